//! Tests layers of which data was lost.

use std::fs;
use std::path::{Path, PathBuf};

use ::store::FsckOptions;
use tonic::Code;

use crate::lies::{Bringer, apply};
use crate::{Engine, Stage, code, is_root, unpacked};

/// Returns the only file of at least this size in a folder.
pub(crate) fn file(folder: &Path, least: u64) -> PathBuf {
    let entries = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
    let found = entries.filter_map(|it| match it.is_dir() {
        true => fs::read_dir(it).unwrap().next().map(|it| it.unwrap().path()),
        false => Some(it),
    });
    found.into_iter().find(|it| fs::metadata(it).unwrap().len() >= least).unwrap()
}

/// containerd applies a layer if there is no snapshot of it. Source: containerd's `unpacker.go`.
#[test]
fn a_layer_that_has_lost_something_is_read_again() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let Bringer { store, mut engine, bytes, digest } = Bringer::start(&stage);
    let folder = |name: &str| stage.0.path().join("store").join(name);
    let object = || file(&folder("objects"), 1);
    let recipe = || folder("layers").join(digest.to_string().replace(':', "-"));
    let mut number = 0;
    let mut bring = |engine: &mut Engine| {
        number += 1;
        let key = unpacked(&number.to_string());
        let root = engine.prepare(&key, "").unwrap();
        engine.apply(apply(&root, &digest, bytes.len())).unwrap();
        engine.commit(&format!("layer-{number}"), &key).unwrap();
        format!("layer-{number}")
    };
    let cut = |path: &Path| {
        let half = fs::read(path).unwrap();
        fs::remove_file(path).unwrap();
        fs::write(path, &half[..half.len() / 2]).unwrap();
    };
    let first = bring(&mut engine);
    let harms: [(&str, &dyn Fn()); 4] = [
        ("object gone", &|| fs::remove_file(object()).unwrap()),
        ("object cut", &|| cut(&object())),
        ("recipe gone", &|| fs::remove_file(recipe()).unwrap()),
        ("recipe cut", &|| cut(&recipe())),
    ];
    for (what, harm) in harms {
        harm();
        let layer = bring(&mut engine);
        for parent in [&layer, &first] {
            let root = engine.prepare("container", parent).unwrap();
            let read = fs::read_to_string(root.join("file"));
            assert_eq!(read.unwrap(), "file".repeat(5000), "{what}");
            engine.remove("container").unwrap();
        }
    }
    // Quire does not know of the loss yet. Reading the file fails, so the file does not look as if it did not exist.
    fs::remove_file(object()).unwrap();
    let root = engine.prepare("container", &first).unwrap();
    let read = fs::read(root.join("file")).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
    engine.remove("container").unwrap();
    bring(&mut engine);
    // After a repair, the blob is read again before a container starts, so no container starts without the file.
    let lose = || {
        fs::remove_file(object()).unwrap();
        let report = stage.store().fsck(FsckOptions::default()).unwrap();
        stage.store().remove_damaged(&report).unwrap();
    };
    let text = "file".repeat(5000);
    lose();
    let root = engine.prepare("container", &first).unwrap();
    assert_eq!(fs::read_to_string(root.join("file")).unwrap(), text);
    engine.remove("container").unwrap();
    // If the engine has no blob, no root can be made until it applies the layer again.
    lose();
    let kept = std::mem::take(&mut store.kept.lock().unwrap().blobs);
    code(engine.prepare("container", &first), Code::FailedPrecondition, "lacks the data of 1 file");
    code(engine.view("container", &first), Code::FailedPrecondition, "quire fsck --repair");
    store.kept.lock().unwrap().blobs = kept;
    bring(&mut engine);
    let root = engine.prepare("container", &first).unwrap();
    assert_eq!(fs::read_to_string(root.join("file")).unwrap(), text);
    engine.end();
}
