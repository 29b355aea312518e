//! Tests the lower layers of roots: shared images, directories, and mapped owners.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ::store::Seconds;
use containerd_api::snapshots::{Info, Kind, PrepareSnapshotRequest, UpdateSnapshotRequest};
use image::digest::Digest;
use kernel::mount::{Unmount, unmount};
use quire_serve::snapshots::SkipLayers;
use testing::fake::wait_for;
use tonic::Code;

use crate::{Engine, Stage, code, is_root, layer, two_layers, unpacked};

/// Docker makes a directory below each container, and builds make others.
#[test]
fn what_was_written_stays_a_directory() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    let root = engine.prepare("1-init-key", "sha256:b").unwrap();
    let layers = stage.count("layers");
    fs::write(root.join("etc/hosts"), "mine").unwrap();
    fs::remove_file(root.join("etc/new")).unwrap();
    // overlayfs copies only metadata here, so the file in the directory has no data.
    fs::set_permissions(root.join("link"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    rustix::fs::rename(root.join("etc"), root.join("moved")).unwrap();
    engine.commit("1-init", "1-init-key").unwrap();
    assert_eq!(engine.stat("1-init").unwrap().kind(), Kind::Committed);
    code(engine.mounts("1-init"), Code::FailedPrecondition, "committed");
    let shows = |root: &Path| {
        assert_eq!(fs::read_to_string(root.join("moved/hosts")).unwrap(), "mine");
        assert_eq!(fs::read_to_string(root.join("link")).unwrap(), "kept".repeat(5000));
        assert_eq!(fs::metadata(root.join("link")).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(fs::read_to_string(root.join("moved/kept")).unwrap(), "kept".repeat(5000));
        assert!(!root.join("etc").exists() && !root.join("moved/new").exists());
        assert!(root.join("empty").is_dir());
    };
    let running = engine.prepare("1", "1-init").unwrap();
    let view = engine.view("view", "1-init").unwrap();
    shows(&view);
    fs::write(running.join("moved/hosts"), "theirs").unwrap();
    shows(&view);
    fs::remove_file(running.join("moved/hosts")).unwrap();
    engine.remove("view").unwrap();
    // Makes another directory on top of the first one, as a build does.
    let step = engine.prepare("step", "1-init").unwrap();
    fs::remove_dir(step.join("empty")).unwrap();
    fs::create_dir(step.join("empty")).unwrap();
    engine.commit("built", "step").unwrap();
    shows(&engine.view("view", "built").unwrap());
    engine.remove("view").unwrap();
    // The service may be restarted in between.
    engine.end();
    let mut engine = Engine::start(&stage, None);
    assert_eq!(stage.count("layers"), layers);
    shows(&engine.view("view", "built").unwrap());
    engine.remove("view").unwrap();
    // When a layer is applied on top of directories, they become layers. Roots that use them continue to work.
    let root = engine.prepare(&unpacked("3"), "built").unwrap();
    fs::write(root.join("third"), "third").unwrap();
    engine.commit("sha256:c", &unpacked("3")).unwrap();
    assert_eq!(stage.count("layers"), layers + 3);
    let root = engine.prepare("2", "sha256:c").unwrap();
    shows(&root);
    assert_eq!(fs::read_to_string(root.join("third")).unwrap(), "third");
    assert_eq!(fs::read_to_string(running.join("link")).unwrap(), "kept".repeat(5000));
    assert!(!running.join("moved/hosts").exists());
    shows(&engine.view("view", "1-init").unwrap());
    let directories = || {
        let paths = fs::read_dir(stage.0.path().join("store/snapshots/test")).unwrap();
        paths.filter(|it| it.as_ref().unwrap().path().join("changes/upper").exists()).count()
    };
    // The running container still uses one of the directories.
    assert!(directories() > 1);
    for key in ["view", "1", "2", "sha256:c"] {
        engine.remove(key).unwrap();
    }
    assert_eq!(directories(), 0);
    engine.end();
    let mut engine = Engine::start(&stage, None);
    let store = stage.store();
    store.gc(Seconds(0)).unwrap();
    shows(&engine.view("view", "built").unwrap());
    for key in ["view", "built", "1-init", "sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    engine.end();
    store.gc(Seconds(0)).unwrap();
    let left = ["images", "layers", "tmp"].map(|it| stage.count(it));
    assert_eq!((left, stage.mounts()), ([0, 0, 0], vec![]));
}

/// Overlayfs supports only a limited number of directories.
#[test]
fn many_directories_become_layers() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    let mut parent = String::new();
    for number in 0..150 {
        let root = engine.prepare("step", &parent).unwrap();
        fs::write(root.join(number.to_string()), number.to_string()).unwrap();
        if number > 0 {
            fs::remove_file(root.join((number - 1).to_string())).unwrap();
        }
        parent = format!("step {number}");
        engine.commit(&parent, "step").unwrap();
    }
    let root = engine.view("view", &parent).unwrap();
    let names: Vec<_> = fs::read_dir(root).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["149"]);
    assert!(stage.count("layers") > 100);
    engine.end();
}

/// In a container with a user namespace, files belong to the host ids that the namespace maps their owners to.
#[test]
fn owners_are_mapped_for_a_container() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    let root = engine.prepare(&unpacked("1"), "").unwrap();
    fs::write(root.join("file"), "file").unwrap();
    chown(root.join("file"), Some(33), Some(44)).unwrap();
    engine.commit("sha256:a", &unpacked("1")).unwrap();
    // The owners of files in a directory between the image and the container are mapped as well.
    let root = engine.prepare("init-key", "sha256:a").unwrap();
    fs::write(root.join("init"), "init").unwrap();
    chown(root.join("init"), Some(1), Some(2)).unwrap();
    engine.commit("init", "init-key").unwrap();
    let maps = |users: &str, groups: &str| -> HashMap<String, String> {
        [("uidmapping", users), ("gidmapping", groups)]
            .map(|it| (format!("containerd.io/snapshot/{}", it.0), it.1.to_owned()))
            .into()
    };
    let root = engine.prepare("other-key", "sha256:a").unwrap();
    chown(&root, Some(70_000), Some(0)).unwrap();
    engine.commit("other", "other-key").unwrap();
    let mut mapped = |key: &str, parent: &str, labels: HashMap<String, String>| {
        let (key, parent) = (key.to_owned(), parent.to_owned());
        let request =
            PrepareSnapshotRequest { key, parent, labels, ..PrepareSnapshotRequest::default() };
        let answer = engine.runtime.block_on(engine.client.prepare(request))?.into_inner();
        Ok(PathBuf::from(&answer.mounts[0].source))
    };
    let root = mapped("container", "init", maps("0:100000:65536", "0:200000:1000")).unwrap();
    let owner = |path: PathBuf| {
        let found = fs::symlink_metadata(path).unwrap();
        (found.uid(), found.gid())
    };
    assert_eq!(owner(root.clone()), (100_000, 200_000));
    assert_eq!(owner(root.join("file")), (100_033, 200_044));
    assert_eq!(owner(root.join("init")), (100_001, 200_002));
    fs::write(root.join("written"), "written").unwrap();
    chown(root.join("written"), Some(100_005), Some(200_006)).unwrap();
    for (users, groups) in [("0:1", "0:1:2"), ("1:1000:5", "0:1:2"), ("0:1:0", "0:1:1")] {
        code::<PathBuf>(
            mapped("bad", "init", maps(users, groups)),
            Code::InvalidArgument,
            "map of ids",
        );
    }
    // The root's owner comes from the directory, and the id map lacks it.
    let labels = maps("0:100000:65536", "0:200000:1000");
    let lost = mapped("lost", "other", labels).unwrap_err();
    for words in ["belongs to user 70000", "remap-ids"] {
        code::<PathBuf>(Err(lost.clone()), Code::Internal, words);
    }
    // Labels of a snapshot for unpacking may come from the image's manifest, so they are ignored.
    let root = mapped(&unpacked("2"), "init", maps("0:100000:65536", "0:200000:1000")).unwrap();
    assert_eq!(owner(root.join("file")), (33, 44));
    // Changed labels do not change the owners of existing files.
    let info = Info { name: "container".to_owned(), ..Info::default() };
    let request = UpdateSnapshotRequest { info: Some(info), ..UpdateSnapshotRequest::default() };
    engine.runtime.block_on(engine.client.update(request)).unwrap();
    let root = engine.mounts("container").unwrap();
    engine.end();
    unmount(&root, Unmount::Now).unwrap();
    let mut engine = Engine::start(&stage, None);
    let root = engine.mounts("container").unwrap();
    assert_eq!(owner(root.join("written")), (100_005, 200_006));
    engine.commit("committed", "container").unwrap();
    let root = engine.view("view", "committed").unwrap();
    assert_eq!(owner(root.join("written")), (5, 6));
    assert_eq!(owner(root.join("file")), (33, 44));
    assert_eq!(owner(root.join("init")), (1, 2));
    assert_eq!(owner(root), (0, 0));
    engine.end();
}

/// An image is mounted once as long as a root needs it, even across services.
#[test]
fn an_image_stays_mounted_once() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    engine.prepare("before", "sha256:b").unwrap();
    let image = stage.images_and_roots().0;
    assert_eq!(image.len(), 1);
    engine.end();
    let mut engine = Engine::start(&stage, None);
    assert_eq!(stage.images_and_roots().0, image);
    engine.prepare("after", "sha256:b").unwrap();
    engine.remove("before").unwrap();
    assert_eq!(stage.images_and_roots().0, image);
    engine.remove("after").unwrap();
    assert_eq!(stage.mounts(), [] as [PathBuf; 0]);
    // A killed service may leave a mount that is not needed.
    let root = engine.prepare("again", "sha256:b").unwrap();
    engine.end();
    unmount(&root, Unmount::Now).unwrap();
    let mut engine = Engine::start(&stage, None);
    assert_eq!(stage.mounts(), [] as [PathBuf; 0]);
    engine.remove("again").unwrap();
    engine.end();
}

/// With a damaged record in its chain, a root must not be made of the remaining layers.
#[test]
fn nothing_stands_on_what_cannot_be_read() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    let root = engine.prepare("first-key", "").unwrap();
    fs::write(root.join("first"), "first").unwrap();
    engine.commit("first", "first-key").unwrap();
    let torn = root.parent().unwrap().join("snapshot.json");
    let root = engine.prepare("second-key", "first").unwrap();
    fs::write(root.join("second"), "second").unwrap();
    engine.commit("second", "second-key").unwrap();
    let root = engine.prepare("container", "second").unwrap();
    engine.end();
    let right = fs::read(&torn).unwrap();
    fs::write(&torn, "torn").unwrap();
    unmount(&root, Unmount::Now).unwrap();
    let mut engine = Engine::start(&stage, None);
    code(engine.mounts("container"), Code::Internal, "damaged");
    code(engine.prepare("other", "second"), Code::Internal, "damaged");
    code(engine.view("view", "second"), Code::Internal, "damaged");
    let key = unpacked("3");
    code(engine.prepare(&key, "second"), Code::Internal, "damaged");
    engine.end();
    // The service has removed nothing.
    fs::write(&torn, right).unwrap();
    let mut engine = Engine::start(&stage, None);
    let root = engine.mounts("container").unwrap();
    assert_eq!(fs::read_to_string(root.join("first")).unwrap(), "first");
    assert_eq!(fs::read_to_string(root.join("second")).unwrap(), "second");
    engine.end();
}

/// Files with unknown owners must not be shown.
#[test]
fn a_damaged_map_of_owners_is_not_taken_for_none() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    let labels = ["uidmapping", "gidmapping"]
        .map(|it| (format!("containerd.io/snapshot/{it}"), "0:100000:65536".to_owned()));
    let request = PrepareSnapshotRequest {
        key: "container".to_owned(),
        labels: labels.into(),
        ..PrepareSnapshotRequest::default()
    };
    let answer = engine.runtime.block_on(engine.client.prepare(request)).unwrap().into_inner();
    let root = PathBuf::from(&answer.mounts[0].source);
    fs::write(root.join("file"), "file").unwrap();
    engine.end();
    unmount(&root, Unmount::Now).unwrap();
    fs::write(root.parent().unwrap().join("changes/userns"), "").unwrap();
    let mut engine = Engine::start(&stage, None);
    code(engine.mounts("container"), Code::Internal, "the owners of its files");
    code(engine.commit("committed", "container"), Code::Internal, "the owners of its files");
    engine.end();
}

/// After the last layer of an image, a container comes next, so its image is made in advance.
#[test]
fn the_image_of_the_last_layer_is_made_ahead() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let [lower, upper] = ["lower", "upper"].map(|name| layer(&stage, name));
    let mut engine = Engine::serve(&stage, stage.open(None, SkipLayers::Download).unwrap());
    let before = stage.count("images");
    code(engine.prepare_layers("", &lower, &[&lower, &upper]), Code::AlreadyExists, "quire/");
    let top = Digest::sha256(format!("{lower} {upper}").as_bytes());
    let below = format!("quire/{lower}");
    code(engine.prepare_layers(&below, &top, &[&upper]), Code::AlreadyExists, "quire/");
    wait_for("the image is made", || stage.count("images") > before);
    // Only one image was made, of both layers.
    let root = engine.view("container", &format!("quire/{top}")).unwrap();
    assert!(root.join("lower").exists() && root.join("upper").exists());
    assert_eq!(stage.count("images"), before + 1);
    engine.end();
}

/// A program that starts in the root must not see the bare directory of the store.
#[test]
fn a_root_that_somebody_has_unmounted_is_mounted_again() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    let root = engine.prepare("container", "sha256:b").unwrap();
    fs::write(root.join("etc/mine"), "mine").unwrap();
    for _ in 0..2 {
        unmount(&root, Unmount::Now).unwrap();
        assert!(!root.join("etc").exists());
        assert_eq!(engine.mounts("container").unwrap(), root);
        assert_eq!(fs::read_to_string(root.join("etc/mine")).unwrap(), "mine");
        assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    }
    engine.remove("container").unwrap();
    engine.cleanup();
    assert_eq!(stage.mounts(), [] as [PathBuf; 0]);
    engine.end();
}

/// A killed service may hold its lock for a moment.
#[test]
fn a_service_waits_for_the_one_before_it() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let before = store.open_snapshots("test").unwrap();
    thread::scope(|scope| {
        let opened = scope.spawn(|| stage.open(None, SkipLayers::Unpack).is_ok());
        thread::sleep(Duration::from_millis(200));
        assert!(!opened.is_finished());
        drop(before);
        assert!(opened.join().unwrap());
    });
}
