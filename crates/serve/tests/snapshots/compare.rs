//! Tests layers that are made of the changes of a root.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use containerd_api::diff::DiffRequest;
use containerd_api::types::{Descriptor, Mount};
use image::digest::Digest;
use image::tar::{Kind, Reader};
use testing::fake::wait_for;
use tonic::{Code, Request, Status};

use crate::store::{FakeStore, labels};
use crate::{Engine, Stage, code, is_root, two_layers, unpacked};

pub(crate) const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// Returns a request to compare two roots, as containerd sends it.
pub(crate) fn request(left: &Path, right: &Path, media_type: &str) -> DiffRequest {
    let mount = |root: &Path| Mount {
        r#type: "bind".to_owned(),
        source: root.to_str().unwrap().to_owned(),
        ..Mount::default()
    };
    DiffRequest {
        left: vec![mount(left)],
        right: vec![mount(right)],
        media_type: media_type.to_owned(),
        ..DiffRequest::default()
    }
}

impl Engine {
    pub(crate) fn diff(&mut self, request: DiffRequest) -> Result<Descriptor, Status> {
        let mut request = Request::new(request);
        request.metadata_mut().insert("containerd-namespace", "mine".parse().unwrap());
        let answer = self.runtime.block_on(self.differ.diff(request))?;
        Ok(answer.into_inner().diff.unwrap())
    }
}

/// Returns the names in a tar with marks for their kinds; small files have their bytes after a colon.
pub(crate) fn names(tar: &[u8]) -> Vec<String> {
    let mut reader = Reader::new(tar);
    let mut names = Vec::new();
    while let Some(mut entry) = reader.next_entry().unwrap() {
        let path = String::from_utf8(entry.path.to_vec()).unwrap();
        names.push(match entry.kind {
            Kind::Directory => format!("{path}/"),
            Kind::Regular if (1..100).contains(&entry.size) => {
                let mut bytes = String::new();
                let mut content = std::iter::repeat_with(|| {
                    let mut byte = [0];
                    (entry.content.read(&mut byte).unwrap() == 1).then_some(byte[0])
                });
                bytes.extend(content.by_ref().map_while(|it| it).map(char::from));
                format!("{path}:{bytes}")
            }
            Kind::Symlink(target) => format!("{path} -> {}", target.escape_ascii()),
            Kind::Hardlink(target) => format!("{path} = {}", target.escape_ascii()),
            _ => path,
        });
    }
    names
}

/// Unpacks bytes with another program.
fn unpack(program: &str, bytes: &[u8]) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    let mut command = Command::new(program);
    let done = command.arg("-dc").stdin(fs::File::open(file.path()).unwrap()).output().unwrap();
    assert!(done.status.success());
    done.stdout
}

/// Returns a view of two layers, and a root on the same layers.
pub(crate) fn roots(engine: &mut Engine) -> (PathBuf, PathBuf) {
    two_layers(engine);
    let right = engine.prepare("container", "sha256:b").unwrap();
    (engine.view("left", "sha256:b").unwrap(), right)
}

#[test]
fn what_was_written_becomes_a_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let (left, right) = roots(&mut engine);
    fs::remove_file(right.join("link")).unwrap();
    fs::write(right.join("etc/new"), "newer").unwrap();
    fs::create_dir(right.join("dir")).unwrap();
    // Links are not followed, so their targets do not matter.
    symlink("/etc/shadow", right.join("dir/away")).unwrap();
    symlink("/", right.join("dir/root")).unwrap();
    fs::write(right.join("dir/mine"), "mine").unwrap();
    fs::hard_link(right.join("dir/mine"), right.join("dir/too")).unwrap();
    chown(right.join("dir/mine"), Some(7), Some(8)).unwrap();
    fs::set_permissions(right.join("dir/mine"), fs::Permissions::from_mode(0o4711)).unwrap();
    drop(UnixListener::bind(right.join("dir/socket")).unwrap());
    let mut wish = request(&left, &right, TAR);
    wish.labels = labels(&[("mine", "yes")]);
    let plain = engine.diff(wish).unwrap();
    let blob = store.blob(&plain.digest);
    let expect = [
        "/",
        ".wh.link",
        "dir/",
        "dir/away -> /etc/shadow",
        "dir/mine:mine",
        "dir/root -> /",
        "dir/too = dir/mine",
        "etc/",
        "etc/new:newer",
    ];
    assert_eq!(names(&blob.bytes), expect);
    assert_eq!(plain.media_type, TAR);
    assert_eq!(plain.size, i64::try_from(blob.bytes.len()).unwrap());
    let known = [("containerd.io/uncompressed", &*plain.digest), ("mine", "yes")];
    let known: BTreeMap<_, _> = known.map(|it| (it.0.to_owned(), it.1.to_owned())).into();
    assert_eq!(blob.labels, known);
    {
        let kept = store.kept.lock().unwrap();
        assert_eq!(kept.headers.get("containerd-namespace").unwrap(), "mine");
        // The lease lasts until the engine has named the layer.
        assert_eq!(kept.headers.get("containerd-lease").unwrap(), "lease-0");
        let lease = labels(&[("containerd.io/gc.expire", "2030-01-01T00:00:00Z")]);
        assert_eq!((&kept.leases["lease-0"], kept.begun.len()), (&lease, 0));
    }
    // A lease of the engine's call is used.
    let mut wish = Request::new(request(&left, &right, TAR));
    wish.metadata_mut().insert("containerd-lease", "other".parse().unwrap());
    engine.runtime.block_on(engine.differ.diff(wish)).unwrap();
    assert_eq!(store.kept.lock().unwrap().headers.get("containerd-lease").unwrap(), "other");
    // Compressed layers contain the same tar, which other programs can unpack.
    for (media_type, program) in [("", "gzip"), (&*format!("{TAR}+zstd"), "zstd")] {
        let packed = engine.diff(request(&left, &right, media_type)).unwrap();
        let found = store.blob(&packed.digest);
        assert_eq!(found.labels["containerd.io/uncompressed"], plain.digest);
        if testing::program(program).is_some() {
            assert_eq!(unpack(program, &found.bytes), blob.bytes);
        }
        let media_type =
            if media_type.is_empty() { format!("{TAR}+gzip") } else { media_type.to_owned() };
        assert_eq!(packed.media_type, media_type);
        // If the engine already has the blob, only the missing label is added.
        store.kept.lock().unwrap().blobs.get_mut(&packed.digest).unwrap().labels.clear();
        assert_eq!(engine.diff(request(&left, &right, &media_type)).unwrap(), packed);
        let found = store.blob(&packed.digest);
        assert_eq!(found.labels["containerd.io/uncompressed"], plain.digest);
    }
    // Only the times of files change, to at most the requested time.
    let mut wish = request(&left, &right, TAR);
    wish.source_date_epoch = Some(prost_types::Timestamp { seconds: 7, nanos: 9 });
    let early = engine.diff(wish).unwrap();
    let early = store.blob(&early.digest).bytes;
    assert_eq!(names(&early), expect);
    let mut reader = Reader::new(&early[..]);
    while let Some(entry) = reader.next_entry().unwrap() {
        let time = entry.metadata.mtime;
        assert!((time.seconds, time.nanoseconds) <= (7, 9), "{time:?}");
    }
    engine.end();
}

/// The same layer results from a diff before the commit, from the commit, and from a diff after it.
#[test]
fn a_committed_snapshot_gives_its_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let (left, right) = roots(&mut engine);
    fs::write(right.join("file"), testing::noise(5 << 20)).unwrap();
    let before = engine.diff(request(&left, &right, TAR)).unwrap();
    engine.commit("committed", "container").unwrap();
    code(engine.diff(request(&left, &right, TAR)), Code::Unimplemented, "");
    let right = engine.view("right", "committed").unwrap();
    assert_eq!(engine.diff(request(&left, &right, TAR)).unwrap(), before);
    let layers = stage.0.path().join("store/layers");
    assert!(layers.join(before.digest.replace(':', "-")).exists());
    // A layer with an empty base.
    let nothing = engine.view("nothing", "").unwrap();
    let first = engine.view("first", "sha256:a").unwrap();
    let layer = engine.diff(request(&nothing, &first, TAR)).unwrap();
    let expect = ["/", "etc/", "etc/kept", "etc/old:old", "link = etc/kept"];
    assert_eq!(names(&store.blob(&layer.digest).bytes), expect);
    let root = engine.prepare("on nothing", "").unwrap();
    fs::write(root.join("first"), "first").unwrap();
    let layer = engine.diff(request(&nothing, &root, TAR)).unwrap();
    assert_eq!(names(&store.blob(&layer.digest).bytes), ["/", "first:first"]);
    engine.end();
}

#[test]
fn other_roots_are_for_the_differ_of_the_engine() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let _store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let (left, right) = roots(&mut engine);
    let below = engine.view("below", "sha256:a").unwrap();
    let other = engine.prepare("other", "sha256:b").unwrap();
    let committed = engine.view("committed", "sha256:b").unwrap();
    let nowhere = stage.0.path().to_owned();
    let inside = right.join("etc");
    for (left, right) in [
        (&below, &right),
        (&other, &right),
        (&right, &left),
        (&left, &committed),
        (&left, &left),
        (&nowhere, &right),
        (&left, &nowhere),
        (&left, &inside),
    ] {
        code(engine.diff(request(left, right, TAR)), Code::Unimplemented, "root");
    }
    let mut overlay = request(&left, &right, TAR);
    overlay.right[0].r#type = "overlay".to_owned();
    code(engine.diff(overlay), Code::Unimplemented, "root");
    let mut none = request(&left, &right, TAR);
    none.left.clear();
    code(engine.diff(none), Code::Unimplemented, "root");
    code(engine.diff(request(&left, &right, "image/png")), Code::Unimplemented, "image/png");
    // Times of a layer in the store cannot be changed.
    let mut early = request(&below, &committed, TAR);
    early.source_date_epoch = Some(prost_types::Timestamp { seconds: 7, nanos: 0 });
    code(engine.diff(early), Code::Unimplemented, "root");
    engine.end();
}

/// A committed directory becomes a layer when an engine requests a diff of it.
#[test]
fn a_committed_directory_becomes_a_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let (left, right) = roots(&mut engine);
    fs::write(right.join("etc/new"), "newer").unwrap();
    fs::remove_file(right.join("link")).unwrap();
    engine.commit("saved", "container").unwrap();
    let saved = engine.view("view", "saved").unwrap();
    // The times of a committed directory do not change any more, before and after it becomes a layer.
    let mut early = request(&left, &saved, TAR);
    early.source_date_epoch = Some(prost_types::Timestamp { seconds: 7, nanos: 0 });
    code(engine.diff(early.clone()), Code::Unimplemented, "root");
    let layer = engine.diff(request(&left, &saved, TAR)).unwrap();
    assert_eq!(names(&store.blob(&layer.digest).bytes), ["/", ".wh.link", "etc/", "etc/new:newer"]);
    code(engine.diff(early), Code::Unimplemented, "root");
    // The directory is removed when no root uses it any more.
    let changes = saved.parent().unwrap().with_file_name("3").join("changes");
    assert!(changes.join("upper").exists());
    engine.remove("view").unwrap();
    assert!(!changes.exists());
    engine.end();
}

/// If a file is written while it is read, everything is read again. After three attempts, the engine gets an error.
#[test]
fn a_container_may_go_on_writing() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let (left, right) = roots(&mut engine);
    let file = right.join("file");
    // The file is larger than all buffers, so its beginning reaches the store before the whole file was read.
    fs::write(&file, testing::noise(32 << 20)).unwrap();
    let append = |file: &Path| {
        let mut file = fs::OpenOptions::new().append(true).open(file).unwrap();
        std::io::Write::write_all(&mut file, b"more").unwrap();
    };
    let (is_done, path) = (std::cell::Cell::new(false), file.clone());
    store.kept.lock().unwrap().hook = Some(Box::new(move || {
        if !is_done.replace(true) {
            append(&path);
        }
    }));
    let found = engine.diff(request(&left, &right, TAR)).unwrap();
    let bytes = store.blob(&found.digest).bytes;
    assert_eq!(Digest::sha256(&bytes).to_string(), found.digest);
    let mut tar = Command::new("tar");
    tar.args(["-xO", "file"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut tar = tar.spawn().unwrap();
    let mut input = tar.stdin.take().unwrap();
    let writing = std::thread::spawn(move || std::io::Write::write_all(&mut input, &bytes));
    let mut unpacked = Vec::new();
    tar.stdout.take().unwrap().read_to_end(&mut unpacked).unwrap();
    // tar need not read its input to the end.
    let _written = writing.join().unwrap();
    assert!(tar.wait().unwrap().success());
    assert!(unpacked == fs::read(&file).unwrap());
    // A container that never stops writing.
    let path = file.clone();
    store.kept.lock().unwrap().hook = Some(Box::new(move || append(&path)));
    code(engine.diff(request(&left, &right, TAR)), Code::Aborted, "pause it");
    wait_for("nothing is left", || store.kept.lock().unwrap().begun.is_empty());
    // A container that was removed in the meantime.
    store.kept.lock().unwrap().hook = None;
    engine.remove("container").unwrap();
    code(engine.diff(request(&left, &right, TAR)), Code::Unimplemented, "root");
    engine.end();
}

/// A layer that an engine has unpacked without the differ can be compared before its commit.
#[test]
fn what_an_engine_has_unpacked_is_a_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = FakeStore::start(&stage);
    let mut engine = Engine::start(&stage, None);
    let right = engine.prepare(&unpacked("1"), "").unwrap();
    fs::write(right.join("file"), "file").unwrap();
    let left = engine.view("left", "").unwrap();
    let layer = engine.diff(request(&left, &right, TAR)).unwrap();
    assert_eq!(names(&store.blob(&layer.digest).bytes), ["/", "file:file"]);
    engine.end();
}
