//! Tests roots with a size limit.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use container::root::limit::{attach_filestore, make_filestore, shut_down_filestore};
use containerd_api::snapshots::PrepareSnapshotRequest;
use kernel::mount::{Unmount, unmount};
use tonic::{Code, Status};

use super::{Engine, Stage, code, is_root, two_layers};

const LIMIT: u64 = 32 << 20;

fn prepare(engine: &mut Engine, key: &str, size: &str) -> Result<PathBuf, Status> {
    let label = ("containerd.io/snapshot/max-size".to_owned(), size.to_owned());
    let request = PrepareSnapshotRequest {
        key: key.to_owned(),
        parent: "sha256:b".to_owned(),
        labels: [label].into(),
        ..PrepareSnapshotRequest::default()
    };
    let answer = engine.runtime.block_on(engine.client.prepare(request))?.into_inner();
    Ok(answer.mounts.into_iter().next().unwrap().source.into())
}

/// Writes until the file system is full, at most twice the limit. Returns the number of written bytes.
fn fill(root: &Path) -> u64 {
    let mut file = File::create(root.join("large")).unwrap();
    let piece = vec![1; 1 << 20];
    for written in 0..2 * (LIMIT >> 20) {
        match file.write_all(&piece).and_then(|()| file.sync_data()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => return written << 20,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("there is no limit")
}

/// Simulates a reboot of the host, after which the roots are not mounted.
fn restart(stage: &Stage, engine: Engine) -> Engine {
    engine.end();
    for mount in stage.mounts().into_iter().rev() {
        unmount(&mount, Unmount::Now).unwrap();
    }
    Engine::start(stage, None)
}

/// If a filestore has just been unmounted, the underlying file system must not be shut down instead.
#[test]
fn only_an_attached_filestore_is_shut_down() {
    if !is_root() || testing::program("mkfs.ext4").is_none() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let (folder, size) = (stage.0.path(), NonZeroU64::new(LIMIT).unwrap());
    // Stands for the host's file system.
    let host = folder.join("host");
    fs::create_dir(&host).unwrap();
    let search = OsStr::new("/usr/sbin:/sbin");
    make_filestore(store.containers.fd(), size, folder, "file", search).unwrap();
    attach_filestore(&folder.join("file"), &host).unwrap();
    let inside = host.join("inside");
    fs::create_dir(&inside).unwrap();
    shut_down_filestore(&inside);
    fs::write(inside.join("file"), "here").unwrap();
    File::open(inside.join("file")).unwrap().sync_all().unwrap();
    shut_down_filestore(&host);
    assert!(fs::write(inside.join("other"), "lost").is_err());
}

#[test]
fn a_root_takes_no_more_than_its_limit() {
    if !is_root() || testing::program("mkfs.ext4").is_none() {
        return;
    }
    let stage = Stage::new();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    for wrong in ["1", "-1", "16M"] {
        code(prepare(&mut engine, "wrong", wrong), Code::InvalidArgument, "max-size is 16777216");
    }
    let root = prepare(&mut engine, "one", &LIMIT.to_string()).unwrap();
    let other = engine.prepare("other", "sha256:b").unwrap();
    let written = fill(&root);
    assert!((LIMIT / 2..LIMIT).contains(&written), "{written}");
    assert!(engine.usage("one").0.cast_unsigned() >= written);
    // A root without a limit uses the host's disk.
    fs::write(other.join("large"), vec![1; 64 << 20]).unwrap();
    fs::remove_file(root.join("large")).unwrap();
    fs::write(root.join("etc/new"), "changed").unwrap();
    File::open(root.join("etc/new")).unwrap().sync_all().unwrap();
    engine.end();

    // The next service keeps the limit.
    let mut engine = Engine::start(&stage, None);
    assert_eq!(engine.mounts("one").unwrap(), root);
    assert!(fill(&root) >= LIMIT / 2);
    fs::remove_file(root.join("large")).unwrap();

    let mut engine = restart(&stage, engine);
    assert!(engine.usage("one").1 >= 3, "{:?}", engine.usage("one"));
    assert_eq!(engine.mounts("one").unwrap(), root);
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "changed");
    assert!(fill(&root) >= LIMIT / 2);
    fs::remove_file(root.join("large")).unwrap();

    // A commit makes a layer, which has no limit and needs no filestore.
    let mut engine = restart(&stage, engine);
    engine.commit("sha256:c", "one").unwrap();
    let view = engine.view("view", "sha256:c").unwrap();
    assert_eq!(fs::read_to_string(view.join("etc/new")).unwrap(), "changed");
    let root = prepare(&mut engine, "two", &LIMIT.to_string()).unwrap();
    fs::write(root.join("new"), "new").unwrap();
    for key in ["two", "view", "other"] {
        engine.remove(key).unwrap();
    }
    engine.cleanup();
    assert_eq!(stage.roots(), [] as [PathBuf; 0]);
    let left =
        |number: u64| stage.0.path().join(format!("store/snapshots/test/{number}/filestore"));
    assert!((1..10).all(|number| !left(number).exists()));
    engine.end();
}
