//! Stores written by old releases, in `testdata/stores`.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy does not see as tests")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use image::erofs::read::Owners;
use image::tree::{Content, Node};
use quire_store::{
    Digest, FORMAT_VERSION, Form, FsckOptions, OpenOptions, RefName, Seconds, Store,
};

/// The first format of a release.
const FIRST: u32 = 2;

const OPTIONS: FsckOptions = FsckOptions { threads: 2 };

/// Copies a directory, with the modes of files in a store.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).unwrap();
            fs::set_permissions(&to, fs::Permissions::from_mode(0o444)).unwrap();
        }
    }
}

/// Returns the lines of `expected.txt` that begin with a word, without that word.
fn lines(expected: &str, word: &str) -> Vec<String> {
    let lines = expected.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    let lines: Vec<_> = lines.map(str::to_owned).collect();
    assert!(!lines.is_empty(), "nothing is expected of {word}");
    lines
}

fn line(path: &[u8], bytes: &[u8]) -> String {
    let digest = Digest::sha256(bytes).to_string();
    let hex = digest.trim_start_matches("sha256:");
    format!("{hex} {} {}", bytes.len(), path.escape_ascii())
}

/// Returns every regular file of an image, read from the image, the objects and the devices.
fn files(store: &Store, name: &RefName) -> Vec<String> {
    let reference = store.refs.get(name).unwrap().expect("the store has the ref");
    let opened = store.open_image(&reference.image).unwrap();
    let tree = store.tree(&opened, Owners::AsWritten).unwrap().tree;
    let mut found = Vec::new();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        match entry.inode.node() {
            Node::Regular(Content::Inline(bytes)) => found.push(line(path, bytes)),
            Node::Regular(Content::External { object, .. }) => {
                let mut bytes = Vec::new();
                let mut file = store.object(&object.unwrap()).unwrap();
                file.read_to_end(&mut bytes).unwrap();
                found.push(line(path, &bytes));
            }
            _ => {}
        }
    }
    found.sort_unstable();
    found
}

/// Adds every regular file below a directory.
fn walk(root: &Path, inside: &[u8], found: &mut Vec<String>) {
    for entry in fs::read_dir(root).unwrap() {
        let entry = entry.unwrap();
        let path = [inside, b"/", entry.file_name().as_bytes()].concat();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            walk(&entry.path(), &path, found);
        } else if kind.is_file() {
            found.push(line(&path, &fs::read(entry.path()).unwrap()));
        }
    }
}

/// Returns the same files, read through the kernel.
fn mounted(store: &Store, name: &RefName) -> Vec<String> {
    use kernel::mount;
    let reference = store.refs.get(name).unwrap().unwrap();
    let opened = store.open_image(&reference.image).unwrap();
    let devices: Vec<_> = opened.devices.iter().map(|it| it.file.as_fd()).collect();
    let options = mount::ErofsOptions { devices: &devices, ..mount::ErofsOptions::default() };
    let erofs = mount::erofs(opened.image.fd(), &options).unwrap();
    let root = match opened.form {
        Form::Objects => mount::overlay(&mount::OverlayOptions {
            name: "golden",
            lower: &[erofs.mount.as_fd()],
            data: &[opened.objects.as_fd()],
            upper: None,
            verity: mount::Verity::Off,
            xattrs: mount::XattrNamespace::Trusted,
            credentials: mount::Credentials::Mounter,
        })
        .unwrap(),
        _ => erofs.mount,
    };
    // The mount is not attached, so it disappears even if the test fails.
    let root = format!("/proc/self/fd/{}", root.as_fd().as_raw_fd());
    let error = File::create(format!("{root}/new")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let mut found = Vec::new();
    walk(Path::new(&root), b"", &mut found);
    found.sort_unstable();
    found
}

fn check(folder: &Path) {
    let expected = fs::read_to_string(folder.join("expected.txt")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    copy(&folder.join("store"), &path);
    for name in ["blobs", "containers", "objects", "tmp"] {
        // Empty directories, which git does not store.
        fs::create_dir_all(path.join(name)).unwrap();
    }
    let store = Store::open(&path, quire_store::Who::this_process(), OpenOptions::read()).unwrap();
    let report = store.fsck_deep(OPTIONS).unwrap();
    assert!(report.is_sound(), "{:#?}", report.damage);

    let refs = store.refs.all().unwrap();
    let found = refs.iter().map(|(name, reference)| format!("{name} {}", reference.image));
    assert_eq!(found.collect::<Vec<_>>(), lines(&expected, "ref"));
    let layers = store.layers.diff_ids().unwrap();
    let found = layers.iter().map(|diff_id| {
        let layer = store.layers.open(diff_id).unwrap().unwrap();
        format!("{diff_id} {}", layer.info().size)
    });
    assert_eq!(found.collect::<BTreeSet<_>>(), lines(&expected, "layer").into_iter().collect());
    let mut wanted = lines(&expected, "file");
    wanted.sort_unstable();
    let (name, _) = refs.first().expect("compared above");
    assert_eq!(files(&store, name), wanted);
    if rustix::process::geteuid().is_root() {
        assert_eq!(mounted(&store, name), wanted);
    } else {
        testing::skipped(&format!("mounting {}: not root", folder.display()));
    }

    // The store can be changed, and its contents stay.
    let store = Store::open(&path, quire_store::Who::this_process(), OpenOptions::write()).unwrap();
    let transaction = store.begin().unwrap();
    let mut draft = transaction.draft().unwrap();
    draft.write_all(&[b'n'; 1000]).unwrap();
    draft.finish().unwrap();
    transaction.commit().unwrap();
    store.gc(Seconds(0)).unwrap();
    assert!(store.fsck_deep(OPTIONS).unwrap().is_sound());
    assert_eq!(files(&store, name), wanted);
}

#[test]
fn stores_of_every_format() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/stores");
    let mut versions = BTreeSet::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            println!("{}", entry.path().display());
            check(&entry.path());
            let name = entry.file_name().into_string().unwrap();
            let version = name.split('-').next().unwrap().trim_start_matches('v');
            versions.insert(version.parse::<u32>().unwrap());
        }
    }
    let all: BTreeSet<_> = (FIRST..=FORMAT_VERSION).collect();
    assert_eq!(versions, all, "a format has no store here");
}

/// Format 1 was never released. Such stores are recognized, and not reported as damaged.
#[test]
fn stores_from_before_the_first_release_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let meta = br#"{"format":1,"algorithm":"sha256","needed_to_write":["data-blobs"]}"#;
    let meta = [&meta[..], b"\n"].concat();
    let digest = Digest::sha256(&meta);
    fs::write(
        directory.path().join("meta"),
        [&meta[..], format!("{digest}\n").as_bytes()].concat(),
    )
    .unwrap();
    for options in [OpenOptions::read(), OpenOptions::write(), OpenOptions::create()] {
        let error =
            Store::open(directory.path(), quire_store::Who::this_process(), options).unwrap_err();
        let source = std::error::Error::source(&error).unwrap();
        let error = format!("{error}: {source}");
        assert!(error.contains("has format 1"), "{error}");
        assert!(error.contains("pull or import its images again"), "{error}");
        assert!(!error.contains("damaged"), "{error}");
    }
}
