//! Starts that were recorded for later versions of an image.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use image::digest::Digest;
use tempfile::TempDir;

use crate::tests::{NOW, add, eventually, name, open, sample};
use crate::{BlobFile, FsckOptions, StartRecord, Store};

/// Adds an image named `one`, and returns its manifest.
fn import(store: &Store) -> Digest {
    let import = store.begin().unwrap();
    let reference = add(&import, &sample("one", 2)).unwrap();
    let manifest = reference.manifest.unwrap();
    import.set_ref(name("one"), reference);
    import.commit().unwrap();
    manifest
}

fn record(store: &Store, manifest: &Digest) -> StartRecord {
    let mut start = StartRecord::new(*manifest, true);
    let file = start.add_file(b"/file").unwrap();
    assert!(start.add_part(file, 0..4096));
    store.downloads.set_start(manifest, &start).unwrap();
    start
}

#[test]
fn a_recorded_start_goes_with_its_manifest() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (manifest, gone) = (import(&store), Digest::sha256(b"gone"));
    let start = record(&store, &manifest);
    record(&store, &gone);
    assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
    eventually(|| {
        store.gc(NOW).unwrap();
        store.downloads.start(&gone).unwrap().is_none()
    });
    assert_eq!(store.downloads.start(&manifest).unwrap(), Some(start));
    store.remove_ref(&name("one")).unwrap();
    eventually(|| {
        store.gc(NOW).unwrap();
        store.downloads.start_time(&manifest).unwrap().is_none()
    });
    assert!(store.downloads.list().unwrap().names.is_empty());
}

/// It is not synced, so a crash may damage it, and it only saves time.
#[test]
fn a_damaged_start_is_no_damage_of_the_store() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let manifest = import(&store);
    record(&store, &manifest);
    let file = directory.path().join("blobs").join(BlobFile::Start(manifest).file_name());
    for damaged in [&b""[..], &[0; 100], b"text"] {
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, damaged).unwrap();
        assert_eq!(store.downloads.start(&manifest).unwrap(), None);
        assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
        store.plan_gc(NOW).unwrap();
        let start = record(&store, &manifest);
        assert_eq!(store.downloads.start(&manifest).unwrap(), Some(start));
    }
}
