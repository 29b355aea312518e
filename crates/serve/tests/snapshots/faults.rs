//! Tests with a full disk and with concurrent work.

use std::fs;
use std::io::Write as _;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ::store::{FsckOptions, Seconds};
use image::digest::Digest;
use kernel::mount::{TmpfsOptions, tmpfs};
use quire_serve::snapshots::{Labels, SkipLayers, SnapshotAccess};
use tonic::Code;

use crate::lies::{Bringer, apply};
use crate::{Engine, Stage, code, is_root, two_layers, unpacked};

/// With a full disk, calls fail and change nothing.
#[test]
fn a_full_disk_leaves_everything_as_it_was() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.0.path().join("store");
    fs::create_dir(&store).unwrap();
    let options =
        TmpfsOptions { name: "test", bytes: NonZeroU64::new(16 << 20), inodes: None, mode: 0o755 };
    tmpfs(&options).unwrap().attach_at(&store).unwrap();
    let mut engine = Engine::start(&stage, None);
    two_layers(&mut engine);
    // The bytes are random, so that neither compression nor deduplication makes them smaller.
    let mut bytes = Vec::new();
    while bytes.len() < 5 << 20 {
        bytes.extend_from_slice(Digest::sha256(&bytes.len().to_le_bytes()).as_bytes());
    }
    let key = unpacked("3");
    let root = engine.prepare(&key, "sha256:b").unwrap();
    fs::write(root.join("large"), &bytes).unwrap();
    let filler = store.join("filler");
    let fill = || {
        let mut file = fs::File::create(&filler).unwrap();
        while file.write_all(&[7; 4096]).is_ok() {}
    };
    fill();
    let listed = engine.list(&[]).unwrap();
    code(engine.commit("sha256:c", &key), Code::Internal, "No space");
    code(engine.prepare("new", "sha256:b"), Code::Internal, "No space");
    assert_eq!(engine.list(&[]).unwrap(), listed);
    let root = engine.mounts(&key).unwrap();
    assert!(fs::read(root.join("large")).unwrap() == bytes);
    fs::remove_file(&filler).unwrap();
    engine.commit("sha256:c", &key).unwrap();
    let root = engine.prepare("container", "sha256:c").unwrap();
    assert!(fs::read(root.join("large")).unwrap() == bytes);
    fill();
    // Calls that free space must work on a full disk.
    for key in ["container", "sha256:c", "sha256:b", "sha256:a"] {
        engine.remove(key).unwrap();
    }
    fs::remove_file(&filler).unwrap();
    engine.cleanup();
    engine.end();
    let opened = stage.store();
    assert!(opened.fsck(FsckOptions::default()).unwrap().is_sound());
    opened.gc(Seconds(0)).unwrap();
    let left = ["images", "layers", "tmp"].map(|it| stage.count(it));
    assert_eq!(left, [0, 0, 0]);
}

/// Until a record names a layer, only its transaction protects it.
#[test]
fn no_gc_takes_a_layer_that_is_being_applied() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let Bringer { store: _store, mut engine, bytes, digest } = Bringer::start(&stage);
    let is_done = AtomicBool::new(false);
    let mut bring = |round: usize| {
        let key = unpacked(&round.to_string());
        let root = engine.prepare(&key, "")?;
        engine.apply(apply(&root, &digest, bytes.len()))?;
        engine.commit("layer", &key)?;
        engine.remove("layer")
    };
    thread::scope(|scope| {
        let gc = scope.spawn(|| {
            let store = stage.store();
            let mut rounds = 0;
            while !is_done.load(Ordering::Relaxed) {
                store.gc(Seconds(0)).unwrap();
                rounds += 1;
            }
            rounds
        });
        let brought: Result<Vec<()>, tonic::Status> = (0..40).map(&mut bring).collect();
        is_done.store(true, Ordering::Relaxed);
        assert!(gc.join().unwrap() > 0);
        brought.unwrap();
    });
    engine.end();
    let store = stage.store();
    assert!(store.fsck(FsckOptions::default()).unwrap().is_sound());
    store.gc(Seconds(0)).unwrap();
    assert_eq!(["images", "layers", "tmp"].map(|it| stage.count(it)), [0, 0, 0]);
}

/// Two engines use one store with the same layers, while `gc` runs all the time.
#[test]
fn engines_and_gc_do_not_wait_for_each_other_in_vain() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let engine = &|instance: &str| {
        let it = stage.open_instance(instance, None, SkipLayers::Unpack).unwrap();
        let (write, read) = (SnapshotAccess::Write, SnapshotAccess::Read);
        let none = Labels::new();
        for round in 0..8 {
            let mut parent = String::new();
            for layer in 0..3 {
                let key = unpacked(&layer.to_string());
                let root = it.prepare(&key, &parent, &none, write).unwrap().source;
                fs::write(root.join(format!("{round}-{layer}")), format!("{layer}")).unwrap();
                parent = format!("layer {layer}");
                it.commit(&parent, &key, &none).unwrap();
            }
            for key in ["first", "second"] {
                let root = it.prepare(key, &parent, &none, read).unwrap().source;
                for layer in 0..3 {
                    let text = fs::read_to_string(root.join(format!("{round}-{layer}"))).unwrap();
                    assert_eq!(text, layer.to_string());
                }
            }
            for key in ["first", "second", "layer 2", "layer 1", "layer 0"] {
                it.remove(key).unwrap();
            }
        }
        it.cleanup();
    };
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let gc = scope.spawn(|| {
            let store = stage.store();
            let mut rounds = 0;
            while !is_done.load(Ordering::Relaxed) {
                store.gc(Seconds(0)).unwrap();
                rounds += 1;
            }
            rounds
        });
        let engines = ["one", "two"].map(|name| scope.spawn(move || engine(name)));
        let ended = engines.map(|it| it.join());
        is_done.store(true, Ordering::Relaxed);
        assert!(gc.join().unwrap() > 0);
        for it in ended {
            it.unwrap();
        }
    });
    let store = stage.store();
    assert!(store.fsck(FsckOptions::default()).unwrap().is_sound());
    store.gc(Seconds(0)).unwrap();
    let left = ["images", "layers", "tmp"].map(|it| stage.count(it));
    assert_eq!((left, stage.mounts()), ([0, 0, 0], vec![]));
}
