//! Snapshots of container engines, and of containers.

pub(super) mod container_snapshots;

use std::collections::BTreeMap;
use std::fs;

use image::digest::Digest;
use tempfile::TempDir;

use super::interrupted::crash::record;
use super::{Failure, NOW, check, check_clean, import, name, open, sample};
use crate::{
    Damage, GcError, Kept, LazySnapshot, Moment, SnapshotContent, SnapshotError, SnapshotKind,
    SnapshotRecord, SnapshotSize, Store, StoreItem,
};

const EARLY: Moment = Moment { seconds: -1, nanoseconds: 999_999_999 };

fn snapshot(name: &str, kind: SnapshotKind, parent: Option<u64>) -> SnapshotRecord {
    let labels = BTreeMap::from([("a".to_owned(), "\u{1f}\"\n".to_owned())]);
    SnapshotRecord { name: name.to_owned(), kind, parent, labels, created: EARLY, updated: EARLY }
}

/// Returns the content of a snapshot that has the only image of a store.
fn content(store: &Store) -> SnapshotContent {
    let layer = store.layers.diff_ids().unwrap()[0];
    let image = store.images.ids().unwrap().first().copied();
    SnapshotContent { layer, image, lazy: None, bytes: 5, inodes: 6 }
}

#[test]
fn what_is_written_is_read_by_the_next_service() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    assert!(!store.meta().has_snapshots);
    import(&store, "one", &sample("one", 3)).unwrap();
    let content = content(&store);
    let bare = SnapshotContent { image: None, ..content.clone() };
    let records = [
        snapshot("active", SnapshotKind::Active(None), None),
        snapshot("applied", SnapshotKind::Active(Some(bare.clone())), Some(4)),
        snapshot("view", SnapshotKind::View, Some(5)),
        snapshot(
            "directory",
            SnapshotKind::Directory(SnapshotSize { bytes: 4096, inodes: 2 }),
            None,
        ),
        snapshot("committed", SnapshotKind::Committed(bare), None),
        snapshot(&"n".repeat(4096), SnapshotKind::Committed(content), Some(4)),
    ];
    let records: BTreeMap<u64, _> = (1..).zip(records).collect();
    let instance = store.open_snapshots("engine").unwrap();
    for (number, record) in &records {
        instance.make(*number, record).unwrap();
    }
    let other = store.open_snapshots("engine").unwrap_err();
    assert!(matches!(other, SnapshotError::InUse(_)), "{other}");
    assert!(store.open_snapshots("other").is_ok());
    for bad in ["", ".x", "-x", "a/b", "..", &"x".repeat(65)] {
        assert!(matches!(store.open_snapshots(bad), Err(SnapshotError::Instance(_))), "{bad}");
    }
    drop(instance);
    let store = open(directory.path());
    // A version that does not know snapshots must not remove the items that they need.
    assert!(store.meta().has_snapshots);
    let (read, damaged) = store.open_snapshots("engine").unwrap().read().unwrap();
    assert_eq!((read, damaged.len()), (records, 0));
    assert!(store.du().unwrap().snapshots > 0);
    check(&store).unwrap();
}

/// Without the lock, another process could remove the hidden directory at the same time.
#[test]
fn a_snapshot_in_use_by_another_process_is_not_hidden() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let instance = store.open_snapshots("engine").unwrap();
    instance.make(1, &snapshot("a", SnapshotKind::Active(None), None)).unwrap();
    let folder = fs::File::open(instance.path().join("1")).unwrap();
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
    let error = instance.hide(1).unwrap_err();
    assert!(error.is(rustix::io::Errno::WOULDBLOCK), "{error}");
    assert_eq!(instance.read().unwrap().0.len(), 1);
    drop(folder);
    instance.hide(1).unwrap().remove().unwrap();
    assert!(instance.read().unwrap().0.is_empty());
    check(&store).unwrap();
}

#[test]
fn gc_keeps_what_a_record_names() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 3)).unwrap();
    let content = content(&store);
    let instance = store.open_snapshots("engine").unwrap();
    instance.make(1, &snapshot("a", SnapshotKind::Active(None), None)).unwrap();
    let committed = snapshot("c", SnapshotKind::Committed(content.clone()), None);
    store.settle_snapshot(&instance, 1, &committed).unwrap();
    store.remove_ref(&name("one")).unwrap();
    let (plan, _) = store.gc(NOW).unwrap();
    let image = content.image.unwrap();
    assert_eq!(plan.kept, [Kept::Snapshot(image, "engine".to_owned())]);
    check(&store).unwrap();
    // A layer without an image is enough.
    let bare = SnapshotContent { image: None, ..content.clone() };
    let applied = snapshot("a", SnapshotKind::Active(Some(bare)), None);
    store.settle_snapshot(&instance, 1, &applied).unwrap();
    store.gc(NOW).unwrap();
    assert_eq!((store.images.ids().unwrap().len(), store.layers.diff_ids().unwrap().len()), (0, 1));
    // The image is gone, so the record must not be changed.
    let gone = store.settle_snapshot(&instance, 1, &committed).unwrap_err();
    assert!(matches!(gone, SnapshotError::Gone(1)), "{gone}");
    instance.hide(1).unwrap().remove().unwrap();
    check_clean(&store).unwrap();
    assert_eq!(store.layers.diff_ids().unwrap(), []);
}

#[test]
fn gc_keeps_the_image_of_a_layer_that_is_not_here() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 3)).unwrap();
    let bytes = br#"{"schemaVersion":2,"layers":[]}"#;
    let (manifest, image) = (Digest::sha256(bytes), store.images.ids().unwrap()[0]);
    let layer = Digest::sha256(b"of another machine");
    let lazy = Some(LazySnapshot { manifest, image });
    let content = SnapshotContent { layer, image: None, lazy, bytes: 0, inodes: 0 };
    let record = snapshot("lazy", SnapshotKind::Committed(content), None);
    let instance = store.open_snapshots("engine").unwrap();
    instance.make(1, &snapshot("a", SnapshotKind::Active(None), None)).unwrap();
    // Without the manifest, the origin of the layer is unknown.
    let gone = store.settle_snapshot(&instance, 1, &record).unwrap_err();
    assert!(matches!(gone, SnapshotError::Gone(1)), "{gone}");
    let transaction = store.begin().unwrap();
    transaction.manifest(&manifest, bytes).unwrap();
    transaction.commit().unwrap();
    store.settle_snapshot(&instance, 1, &record).unwrap();
    store.remove_ref(&name("one")).unwrap();
    let (plan, _) = store.gc(NOW).unwrap();
    assert_eq!(plan.kept, [Kept::Snapshot(image, "engine".to_owned())]);
    assert!(store.manifests.has(&manifest).unwrap() && store.images.has(&image).unwrap());
    assert_eq!(instance.read().unwrap().0.into_values().collect::<Vec<_>>(), [record]);
    check(&store).unwrap();
    let file = directory.path().join("manifests").join(manifest.file_name());
    let bytes = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    let report = store.fsck(crate::FsckOptions::default()).unwrap();
    let is_it = |it: &Damage| matches!(it, Damage::Bad(StoreItem::Snapshot(..), why) if why.contains("its manifest"));
    assert!(report.damage.iter().any(|it| is_it(&it.0)), "{report:?}");
    fs::write(&file, bytes).unwrap();
    instance.hide(1).unwrap().remove().unwrap();
    check_clean(&store).unwrap();
    assert!(!store.manifests.has(&manifest).unwrap());
}

#[test]
fn a_damaged_record_stops_gc_until_it_is_removed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let instance = store.open_snapshots("engine").unwrap();
    for number in [1, 2] {
        let name = format!("n{number}");
        instance.make(number, &snapshot(&name, SnapshotKind::View, None)).unwrap();
    }
    let file = directory.path().join("snapshots/engine/2/snapshot.json");
    let mut bytes = fs::read(&file).unwrap();
    bytes[3] ^= 1;
    fs::remove_file(&file).unwrap();
    fs::write(&file, bytes).unwrap();
    let (read, damaged) = instance.read().unwrap();
    assert_eq!(read.into_keys().collect::<Vec<_>>(), [1]);
    assert!(damaged[0].to_string().contains("fsck --repair"), "{}", damaged[0]);
    let error = store.gc(NOW).unwrap_err();
    let GcError::Unreadable { object, .. } = &error else { panic!("{error}") };
    assert_eq!(object, "the references of snapshot 2 of instance engine");
    let report = store.fsck(crate::FsckOptions::default()).unwrap();
    let [(Damage::Bad(item, why), _)] = &report.damage[..] else { panic!("{report:?}") };
    assert_eq!(*item, StoreItem::Snapshot("engine".to_owned(), 2));
    assert!(why.contains("checksum"), "{why}");
    // The snapshot may be mounted.
    let busy = store.remove_damaged(&report).unwrap_err().to_string();
    assert!(busy.contains("instance engine uses") && file.exists(), "{busy}");
    assert_eq!(instance.free_number().unwrap(), 3);
    drop(instance);
    assert_eq!(store.remove_damaged(&report).unwrap(), 1);
    check_clean(&store).unwrap();
    assert_eq!(store.open_snapshots("engine").unwrap().read().unwrap().0.len(), 1);
}

#[test]
fn a_crash_leaves_each_snapshot_as_it_was_or_as_it_is() {
    let prepare = |store: &Store| {
        import(store, "one", &sample("one", 2)).unwrap();
    };
    let steps = |content: SnapshotContent| {
        let active = snapshot("a", SnapshotKind::Active(None), None);
        let committed = snapshot("c", SnapshotKind::Committed(content), None);
        let labels = BTreeMap::from([("new".to_owned(), "x".repeat(9000))]);
        let changed = SnapshotRecord { labels, ..committed.clone() };
        [active, committed, changed]
    };
    let view = snapshot("v", SnapshotKind::View, Some(1));
    let recorded = record(prepare, |store| {
        let [active, committed, changed] = steps(content(store));
        let instance = store.open_snapshots("engine").unwrap();
        instance.make(1, &active).unwrap();
        store.settle_snapshot(&instance, 1, &committed).unwrap();
        instance.drop_changes(1).unwrap();
        store.remove_ref(&name("one")).unwrap();
        instance.change(1, &changed).unwrap();
        instance.make(2, &view).unwrap();
        instance.hide(2).unwrap().remove().unwrap();
    });
    let judge = |directory: &std::path::Path, _| -> Result<(), Failure> {
        let store = open(directory);
        let content = content(&store);
        let (read, damaged) = store.open_snapshots("engine")?.read()?;
        let first = read.get(&1);
        let is_a_step = first.is_none_or(|it| steps(content).contains(it));
        let is_view = read.get(&2).is_none_or(|it| *it == view);
        if !is_a_step || !is_view || !damaged.is_empty() {
            return Err(format!("{read:?} {damaged:?}").into());
        }
        // If the image has no name, the snapshot must keep the image.
        if store.refs.all()?.is_empty()
            && !matches!(first.map(|it| &it.kind), Some(SnapshotKind::Committed(_)))
        {
            return Err("the name is gone, and the snapshot does not have the image".into());
        }
        check_clean(&store).map(drop)
    };
    assert!(recorded.replay(&judge).unwrap() > 10);
}

#[test]
fn what_cannot_be_listed_counts_as_written() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let instance = store.open_snapshots("engine").unwrap();
    instance.make(1, &snapshot("active", SnapshotKind::Active(None), None)).unwrap();
    let upper = instance.changes(1).join("upper");
    assert!(!instance.is_changed(1));
    fs::create_dir(&upper).unwrap();
    assert!(!instance.is_changed(1));
    fs::write(upper.join("file"), "").unwrap();
    assert!(instance.is_changed(1));
    fs::remove_dir_all(&upper).unwrap();
    fs::write(&upper, "").unwrap();
    assert!(instance.is_changed(1));
}
