//! Volumes of containers.

use std::fs;
use std::sync::Barrier;

use tempfile::TempDir;

use crate::tests::snapshots::container_snapshots::with_image;
use crate::tests::{NOW, open};
use crate::{
    ContainerDir, ContainerError, ContainerRecord, Damage, FsckOptions, OpenOptions, Store,
    StoreItem, VolumeError, VolumeFiles, VolumeRecord,
};

fn container(
    store: &Store,
    id: &str,
    keep: bool,
    volumes: &[&str],
) -> Result<ContainerDir, ContainerError> {
    let record = ContainerRecord {
        image: store.images.ids().unwrap()[0],
        manifest: None,
        name: None,
        created: NOW,
        keep,
        shared: None,
        boot: None,
        snapshot: None,
        volumes: volumes.iter().map(|&it| it.to_owned()).collect(),
    };
    store.create_container(id, &record)
}

fn add(store: &Store, name: &str, record: &VolumeRecord) -> Result<(), VolumeError> {
    let lock = store.hold_volumes()?;
    let draft = store.volumes.draft()?;
    drop(draft.data()?);
    store.publish_volume(&lock, draft, name, record, VolumeFiles::Synced)
}

fn of_container() -> VolumeRecord {
    VolumeRecord { anonymous: true, ends_with_container: true, ..VolumeRecord::new(NOW) }
}

fn names(store: &Store) -> Vec<String> {
    store.volumes.all().unwrap().into_iter().map(|it| it.0).collect()
}

#[test]
fn what_is_written_is_read_again() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    assert!(!store.meta().has_volumes && names(&store).is_empty());
    let labels = [("a".to_owned(), "\u{1f}\"\n".to_owned())].into();
    let record = VolumeRecord { labels, fresh: true, ..of_container() };
    add(&store, "one", &record).unwrap();
    assert_eq!(store.volumes.get("one").unwrap(), Some(record.clone()));
    assert!(store.volumes.path("one").is_dir());
    // An older version must not change a store whose volumes it would not keep.
    let meta = fs::read_to_string(directory.path().join("meta")).unwrap();
    assert!(meta.contains("\"volumes\""), "{meta}");
    assert!(matches!(add(&store, "one", &record), Err(VolumeError::Exists(_))));
    for name in ["", ".", "..", "a/b", "-a", &"x".repeat(65)] {
        assert!(matches!(add(&store, name, &record), Err(VolumeError::Name(_))), "{name}");
        assert!(store.volumes.get(name).unwrap().is_none(), "{name}");
    }
    let labels = [("a".to_owned(), "x".repeat(crate::VOLUME_LABELS_MAX))].into();
    let long = VolumeRecord { labels, ..record };
    assert!(matches!(add(&store, "two", &long), Err(VolumeError::Labels { .. })));
    // The record has the labels as JSON, in which this character takes six bytes, and stays readable.
    let controls = |count| VolumeRecord {
        labels: [("a".to_owned(), "\u{1}".repeat(count))].into(),
        ..long.clone()
    };
    let most = crate::VOLUME_LABELS_MAX / 6;
    assert!(matches!(add(&store, "two", &controls(most)), Err(VolumeError::Labels { .. })));
    add(&store, "controls", &controls(most - 2)).unwrap();
    assert_eq!(store.volumes.get("controls").unwrap(), Some(controls(most - 2)));
    store.remove_volume("controls").unwrap();
    // A refused volume leaves nothing.
    assert_eq!(fs::read_dir(directory.path().join("tmp")).unwrap().count(), 0);
    let reader = Store::open(directory.path(), store.who(), OpenOptions::read()).unwrap();
    assert!(matches!(reader.remove_volume("one"), Err(VolumeError::ReadOnly(_))));
    store.remove_volume("one").unwrap();
    assert!(names(&store).is_empty());
    assert!(matches!(store.remove_volume("one"), Err(VolumeError::Absent(_))));
}

#[test]
fn a_volume_stays_as_long_as_a_container_has_it() {
    let directory = TempDir::new().unwrap();
    let store = with_image(directory.path());
    let error = container(&store, "c", true, &["one"]).unwrap_err();
    assert!(matches!(error, ContainerError::Volume { .. }), "{error}");
    add(&store, "one", &VolumeRecord::new(NOW)).unwrap();
    add(&store, "own", &of_container()).unwrap();
    let alive = container(&store, "c", true, &["one", "own"]).unwrap();
    let check = |store: &Store| {
        for name in ["one", "own"] {
            let error = store.remove_volume(name).unwrap_err();
            assert!(matches!(error, VolumeError::InUse { .. }), "{name}: {error}");
        }
        assert_eq!(store.clear_volumes().unwrap(), 0);
        store.clear_dead().unwrap();
        assert_eq!(names(store), ["one", "own"]);
    };
    check(&store);
    // A kept container that has ended.
    drop(alive);
    check(&store);
    store.containers.lock("c").unwrap().unwrap().remove().unwrap();
    assert_eq!(store.unneeded_volumes().unwrap(), ["own"]);
    assert_eq!(store.clear_volumes().unwrap(), 1);
    store.remove_volume("one").unwrap();
    assert!(names(&store).is_empty());
}

#[test]
fn a_volume_can_be_kept_beyond_its_container() {
    let directory = TempDir::new().unwrap();
    let store = with_image(directory.path());
    add(&store, "named", &VolumeRecord::new(NOW)).unwrap();
    add(&store, "own", &of_container()).unwrap();
    let both = ["named".to_owned(), "own".to_owned(), "gone".to_owned()];
    store.end_volumes_with_container(&both, false).unwrap();
    assert_eq!(store.clear_volumes().unwrap(), 0);
    store.end_volumes_with_container(&both, true).unwrap();
    // A name that a user chose does not end with a container.
    assert_eq!(store.clear_volumes().unwrap(), 1);
    assert_eq!(names(&store), ["named"]);
}

/// A damaged container may use any volume.
#[test]
fn an_unknown_container_keeps_all_volumes() {
    let directory = TempDir::new().unwrap();
    let store = with_image(directory.path());
    add(&store, "own", &of_container()).unwrap();
    drop(container(&store, "c", true, &["own"]).unwrap());
    let record = directory.path().join("containers/c/container.json");
    fs::remove_file(&record).unwrap();
    fs::write(&record, "damaged").unwrap();
    assert!(matches!(store.remove_volume("own"), Err(VolumeError::UnknownUser(id)) if id == "c"));
    assert_eq!(store.clear_volumes().unwrap(), 0);
    assert_eq!(names(&store), ["own"]);
}

#[test]
fn damage_is_found_and_mended_without_a_loss_of_files() {
    let directory = TempDir::new().unwrap();
    let store = with_image(directory.path());
    for name in ["record", "data", "used"] {
        add(&store, name, &VolumeRecord::new(NOW)).unwrap();
    }
    fs::write(store.volumes.path("record").join("file"), "kept").unwrap();
    drop(container(&store, "c", true, &["used"]).unwrap());
    let folder = directory.path().join("volumes");
    fs::remove_file(folder.join("record/volume.json")).unwrap();
    fs::remove_dir(folder.join("data/data")).unwrap();
    fs::remove_dir_all(folder.join("used")).unwrap();
    fs::write(folder.join("stray"), "").unwrap();
    let report = store.fsck(FsckOptions { threads: 2 }).unwrap();
    let has = |item: &StoreItem| {
        report.damage.iter().any(|it| matches!(&it.0, Damage::Bad(found, _) if found == item))
    };
    assert!(has(&StoreItem::Volume("record".to_owned())), "{report:?}");
    assert!(has(&StoreItem::Volume("data".to_owned())), "{report:?}");
    assert!(has(&StoreItem::Container("c".to_owned())), "{report:?}");
    assert!(
        report
            .damage
            .iter()
            .any(|it| matches!(&it.0, Damage::Stray(path) if path.ends_with("stray")))
    );
    assert!(store.mend_volume("record").unwrap() && store.mend_volume("data").unwrap());
    assert!(!store.mend_volume("none").unwrap());
    assert_eq!(fs::read_to_string(store.volumes.path("record").join("file")).unwrap(), "kept");
    assert!(store.volumes.path("data").is_dir());
}

/// Either the container is made, and has its volume, or the volume is removed before.
/// The record is not needed for the removal, so its damage does not keep the files.
#[test]
fn a_volume_with_a_damaged_record_can_be_removed() {
    let directory = TempDir::new().unwrap();
    let store = with_image(directory.path());
    for damage in [&b"damaged"[..], b"", &[0; 100]] {
        add(&store, "one", &VolumeRecord::new(NOW)).unwrap();
        let record = directory.path().join("volumes/one/volume.json");
        fs::remove_file(&record).unwrap();
        fs::write(&record, damage).unwrap();
        assert!(matches!(store.volumes.get("one"), Err(VolumeError::Damaged { .. })), "{damage:?}");
        // It stays until a command removes it.
        assert_eq!(store.clear_volumes().unwrap(), 0);
        store.remove_volume("one").unwrap();
        assert!(names(&store).is_empty(), "{damage:?}");
        assert_eq!(fs::read_dir(directory.path().join("tmp")).unwrap().count(), 0);
    }
}

#[test]
fn removal_and_use_exclude_each_other() {
    let directory = TempDir::new().unwrap();
    let store = with_image(directory.path());
    for round in 0..50 {
        let id = format!("c{round}");
        add(&store, "one", &VolumeRecord::new(NOW)).unwrap();
        let barrier = Barrier::new(2);
        let (made, removed) = std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                barrier.wait();
                container(&store, &id, true, &["one"])
            });
            barrier.wait();
            let removed = store.remove_volume("one");
            (made.join().unwrap(), removed)
        });
        assert_ne!(made.is_ok(), removed.is_ok(), "{made:?} {removed:?}");
        assert_eq!(names(&store).len(), usize::from(made.is_ok()));
        if made.is_ok() {
            drop(made);
            store.containers.lock(&id).unwrap().unwrap().remove().unwrap();
            store.remove_volume("one").unwrap();
        }
    }
}
