//! Snapshots of containers.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use image::verity::ImageId;

use super::super::{
    Failure, NOW, check, check_clean, eventually, fast_directory, import, name, open, sample,
};
use crate::shelf::container_snapshots::{CONTAINER_SNAPSHOTS, RECORD};
use crate::trace::{Recorder, Trace};
use crate::{
    ClearedSnapshots, ContainerDir, ContainerError, ContainerRecord, ContainerSnapshot,
    ContainerSnapshotDraft, ContainerSnapshotError, ContainerSnapshotRecord, Damage, Digest,
    FsckError, FsckOptions, GcError, Kept, OpenOptions, Sharing, Store, StoreItem,
};

/// Id of a boot before this one.
pub(crate) const BEFORE: &str = "e9a5c0f0-0000-4000-8000-000000000000";

pub(crate) fn this_boot() -> Option<String> {
    Some(kernel::process::boot_id().unwrap())
}

fn only_image(store: &Store) -> ImageId {
    store.images.ids().unwrap()[0]
}

/// Returns the record of a snapshot of the store's only image, whose data is on the disk.
pub(crate) fn snapshot(
    store: &Store,
    name: Option<&str>,
    below: Option<&str>,
) -> ContainerSnapshotRecord {
    ContainerSnapshotRecord {
        name: name.map(str::to_owned),
        container: "c".to_owned(),
        image: only_image(store),
        manifest: None,
        image_name: None,
        shared: None,
        below: below.map(str::to_owned),
        map: None,
        created: NOW,
        bytes: 4096,
        inodes: 2,
        boot: None,
    }
}

/// Makes a draft with one file.
pub(crate) fn draft(store: &Store, text: &str) -> Result<ContainerSnapshotDraft, Failure> {
    let draft = store.container_snapshots.draft()?;
    draft.upper()?;
    let mut file = draft.work.directory.open("upper")?.create("file")?;
    file.write_all(text.as_bytes())?;
    Ok(draft)
}

pub(crate) fn publish(
    store: &Store,
    record: &ContainerSnapshotRecord,
) -> Result<ContainerSnapshot, Failure> {
    Ok(store.publish_container_snapshot(draft(store, "text")?, record)?)
}

/// As [`publish`], and closes the snapshot, so that it can be removed. Returns its id.
pub(crate) fn add(store: &Store, name: Option<&str>, below: Option<&str>) -> String {
    publish(store, &snapshot(store, name, below)).unwrap().id
}

pub(crate) fn with_image(directory: &Path) -> Store {
    let store = open(directory);
    import(&store, "one", &sample("one", 2)).unwrap();
    store
}

/// Makes a kept container above a snapshot.
fn container(store: &Store, id: &str, above: &str) -> Result<ContainerDir, ContainerError> {
    let record = ContainerRecord {
        image: only_image(store),
        manifest: None,
        name: None,
        created: NOW,
        keep: true,
        shared: None,
        boot: None,
        snapshot: Some(above.to_owned()),
        volumes: Vec::new(),
    };
    store.create_container(id, &record)
}

fn folder(store: &Store, id: &str) -> std::path::PathBuf {
    store.path().join(CONTAINER_SNAPSHOTS).join(id)
}

/// Waits until nothing has the snapshot open: a child that another test has just forked has our descriptors.
fn removed(store: &Store, id: &str) {
    eventually(|| {
        store.clear_container_snapshots().unwrap();
        !folder(store, id).exists()
    });
}

pub(crate) fn found(
    result: Result<ContainerSnapshot, ContainerSnapshotError>,
) -> Result<String, String> {
    result.map(|it| it.id).map_err(|error| error.to_string())
}

#[test]
fn what_is_published_is_found() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    assert!(!store.meta().has_container_snapshots);
    let shelf = &store.container_snapshots;
    assert!(shelf.all().unwrap().is_empty());
    for name in ["x", "abcdef012345", ""] {
        assert!(matches!(shelf.find(name), Err(ContainerSnapshotError::Absent(_))), "{name}");
        assert!(matches!(shelf.chain(name), Err(ContainerSnapshotError::Absent(_))), "{name}");
    }
    let below = publish(&store, &snapshot(&store, None, None)).unwrap();
    let full = ContainerSnapshotRecord {
        name: Some("n.a-m_e".to_owned()),
        manifest: Some(Digest::sha256(b"manifest")),
        image_name: Some("\u{1f}\"\n".to_owned()),
        map: Some("0 100000 65536\n".to_owned()),
        below: Some(below.id.clone()),
        boot: this_boot(),
        ..snapshot(&store, None, None)
    };
    let above = store.publish_container_snapshot(draft(&store, "above").unwrap(), &full).unwrap();
    let store = open(directory.path());
    // A version that does not know such snapshots must not remove the items that they need.
    assert!(store.meta().has_container_snapshots);
    let shelf = &store.container_snapshots;
    let id = above.id.clone();
    for text in ["n.a-m_e", &id, &id[..11]] {
        let again = shelf.find(text).unwrap();
        assert_eq!((&again.id, &again.record), (&id, &full), "{text}");
        assert_eq!(fs::read(again.path().join("upper/file")).unwrap(), b"above");
        let upper = fs::File::from(again.upper().unwrap());
        assert!(upper.metadata().unwrap().is_dir());
    }
    for text in ["n.a-m_", &id[..2], &id.replace(|_| true, "A"), "../tmp", "n.a-m_e/"] {
        assert!(matches!(shelf.find(text), Err(ContainerSnapshotError::Absent(_))), "{text}");
    }
    let chain: Vec<_> = shelf.chain(&id).unwrap().into_iter().map(|it| it.id).collect();
    assert_eq!(chain, [id.clone(), below.id.clone()]);
    let mut ids: Vec<_> = shelf.all().unwrap().into_iter().map(|it| it.0).collect();
    assert!(ids.is_sorted());
    ids.retain(|it| *it != id);
    assert_eq!(ids, std::slice::from_ref(&below.id));
    assert!(store.du().unwrap().container_snapshots > 0);
    let mode = fs::metadata(directory.path().join(CONTAINER_SNAPSHOTS)).unwrap().permissions();
    assert_eq!(mode.mode() & 0o7777, 0o700);
    check(&store).unwrap();
}

#[test]
fn a_name_comes_before_an_id_and_the_first_digits_may_be_those_of_many() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let first = add(&store, Some("one"), None);
    let record = ContainerSnapshotRecord { boot: this_boot(), ..snapshot(&store, None, None) };
    // About 80 random ids are enough for two with the same three digits.
    let mut ids = vec![first.clone()];
    let shared = loop {
        let id = publish(&store, &record).unwrap().id;
        let alike = ids.iter().filter(|it| it[..3] == id[..3]).count();
        ids.push(id.clone());
        if alike > 0 {
            break id[..3].to_owned();
        }
        assert!(ids.len() < 2000, "the ids are not random");
    };
    let error = store.container_snapshots.find(&shared).unwrap_err();
    assert!(matches!(&error, ContainerSnapshotError::Ambiguous(it) if *it == shared), "{error}");
    let named = add(&store, Some(&shared), None);
    assert_eq!(found(store.container_snapshots.find(&shared)), Ok(named));
    let named = add(&store, Some(&first), None);
    assert_eq!(found(store.container_snapshots.find(&first)), Ok(named));
    assert_eq!(found(store.container_snapshots.by_id(&first)), Ok(first.clone()));
    assert!(store.container_snapshots.by_id(&first[..11]).is_err());
}

/// Commands that take a snapshot of the same container at once must not choose the same number.
#[test]
fn numbers_are_chosen_once() {
    const EACH: usize = 10;
    let directory = fast_directory();
    let store = with_image(directory.path());
    add(&store, Some("c-7"), None);
    std::thread::scope(|scope| {
        for boot in [this_boot(), None, this_boot(), None] {
            let path = directory.path();
            scope.spawn(move || {
                let store = open(path);
                let record = ContainerSnapshotRecord { boot, ..snapshot(&store, None, None) };
                for _ in 0..EACH {
                    let draft = draft(&store, "text").unwrap();
                    store.publish_numbered_container_snapshot(draft, &record).unwrap();
                }
            });
        }
    });
    let all = store.container_snapshots.all().unwrap();
    let mut names: Vec<_> = all.into_iter().map(|it| it.1.unwrap().name.unwrap()).collect();
    names.sort_by_key(|it| (it.len(), it.clone()));
    let expect: Vec<_> = (7..8 + 4 * EACH).map(|number| format!("c-{number}")).collect();
    assert_eq!(names, expect);
    check_clean(&store).unwrap();
}

#[test]
fn a_name_that_cannot_be_given_is_found_before() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    add(&store, Some("taken"), None);
    store.check_container_snapshot_name("free").unwrap();
    let error = store.check_container_snapshot_name("taken").unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::NameTaken(_)), "{error}");
    let error = store.check_container_snapshot_name("a/b").unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::Name(_)), "{error}");
}

#[test]
fn what_cannot_be_used_is_not_published() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let good = snapshot(&store, Some("good"), None);
    let id = publish(&store, &good).unwrap().id;
    let refused =
        |record: &ContainerSnapshotRecord| publish(&store, record).unwrap_err().to_string();
    let text = refused(&good);
    assert!(text.contains("quire snapshot rm good"), "{text}");
    for bad in ["", ".x", "-x", "a/b", "..", &"x".repeat(65)] {
        let named = ContainerSnapshotRecord { name: Some(bad.to_owned()), ..good.clone() };
        let text = refused(&named);
        assert!(text.contains("is not a name of a snapshot"), "{text}");
    }
    let image: ImageId = "ab".repeat(32).parse().unwrap();
    let nameless = snapshot(&store, None, None);
    let text = refused(&ContainerSnapshotRecord { image, ..nameless.clone() });
    assert!(text.contains("which is not in the store"), "{text}");
    for below in ["abcdef012345", "..", "upper"] {
        let below = Some(below.to_owned());
        let text = refused(&ContainerSnapshotRecord { below, ..nameless.clone() });
        assert!(text.contains("there is no snapshot"), "{text}");
    }
    // The image of another store cannot be checked.
    let shared = Some("/elsewhere".to_owned());
    publish(&store, &ContainerSnapshotRecord { image, shared, ..nameless.clone() }).unwrap();
    let empty = store.container_snapshots.draft().unwrap();
    store.publish_container_snapshot(empty, &nameless).unwrap_err();
    let reader =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    assert_eq!(found(reader.container_snapshots.find("good")), Ok(id.clone()));
    let draft = draft(&store, "").unwrap();
    let error = reader.publish_container_snapshot(draft, &nameless).unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::ReadOnly(_)), "{error}");
    let error = reader.remove_container_snapshot(&id).unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::ReadOnly(_)), "{error}");
    eventually(|| {
        check_clean(&store).unwrap();
        store.container_snapshots.all().unwrap().len() == 1
    });
}

#[test]
fn a_snapshot_stays_as_long_as_it_is_needed() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let lowest = add(&store, Some("lowest"), None);
    let middle = add(&store, Some("middle"), Some(&lowest));
    let other = add(&store, Some("other"), Some(&lowest));
    let container = container(&store, "c", &middle).unwrap();
    // The names can be removed in any order.
    for id in [&lowest, &middle] {
        assert!(!store.remove_container_snapshot(id).unwrap());
        assert_eq!(store.container_snapshots.find(id).unwrap().record.name, None);
    }
    assert!(store.container_snapshots.find("lowest").is_err());
    let chain = store.container_snapshots.chain(&middle).unwrap();
    assert_eq!(chain.len(), 2);
    drop(chain);
    check_clean(&store).unwrap();
    assert_eq!(store.container_snapshots.all().unwrap().len(), 3);
    // The name is free.
    assert!(store.remove_container_snapshot(&add(&store, Some("lowest"), None)).is_ok());
    container.remove().unwrap();
    removed(&store, &middle);
    assert!(folder(&store, &lowest).exists());
    store.remove_container_snapshot(&other).unwrap();
    removed(&store, &lowest);
    removed(&store, &other);
    assert!(store.container_snapshots.all().unwrap().is_empty());
    let error = store.remove_container_snapshot(&other).unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::Absent(_)), "{error}");
    check_clean(&store).unwrap();
}

#[test]
fn a_snapshot_that_is_open_stays() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let below = add(&store, None, None);
    let open = publish(&store, &snapshot(&store, None, Some(&below))).unwrap();
    let id = open.id.clone();
    assert!(!store.has_unneeded_container_snapshots().unwrap());
    assert!(!store.remove_container_snapshot(&id).unwrap());
    // The one below is not tried.
    let cleared = store.clear_container_snapshots().unwrap();
    assert_eq!(cleared, ClearedSnapshots { removed: 0, open: 1 });
    store.remove_ref(&name("one")).unwrap();
    let (plan, _) = store.gc(NOW).unwrap();
    assert_eq!(plan.kept.len(), 1, "{plan:?}");
    assert!(folder(&store, &id).exists() && folder(&store, &below).exists());
    // A container that is made now needs it.
    let container = container(&store, "c", &id).unwrap();
    drop(open);
    assert!(!store.remove_container_snapshot(&id).unwrap());
    assert_eq!(store.clear_dead().unwrap(), 0);
    assert_eq!(store.clear_container_snapshots().unwrap(), ClearedSnapshots::default());
    container.remove().unwrap();
    eventually(|| store.has_unneeded_container_snapshots().unwrap());
    removed(&store, &below);
    check_clean(&store).unwrap();
}

#[test]
fn gc_keeps_the_image_of_a_snapshot_and_names_garbage() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let image = only_image(&store);
    let id = add(&store, Some("s"), None);
    store.remove_ref(&name("one")).unwrap();
    let (plan, _) = store.gc(NOW).unwrap();
    assert_eq!(plan.kept, [Kept::ContainerSnapshot(image, "s".to_owned())]);
    check(&store).unwrap();
    // Without a name, it is needed only by this container.
    let kept = container(&store, "c", &id).unwrap();
    assert!(!store.remove_container_snapshot(&id).unwrap());
    kept.remove().unwrap();
    eventually(|| !store.plan_gc(NOW).unwrap().garbage.is_empty());
    let plan = store.plan_gc(NOW).unwrap();
    let (item, bytes) = &plan.garbage.last().unwrap();
    assert_eq!(item.to_string(), format!("container snapshot {id}"));
    assert!(*bytes > 0 && folder(&store, &id).exists(), "{plan:?}");
    eventually(|| {
        check_clean(&store).unwrap();
        !folder(&store, &id).exists()
    });
    assert!(store.images.ids().unwrap().is_empty());
}

#[test]
fn a_copy_that_is_being_made_is_no_import() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let draft = draft(&store, "text").unwrap();
    store.remove_ref(&name("one")).unwrap();
    let (plan, swept) = store.gc(NOW).unwrap();
    // For an import without lists, all garbage would be set aside.
    assert!(swept.set_aside == 0 && !plan.garbage.is_empty(), "{swept:?}");
    assert!(store.images.ids().unwrap().is_empty());
    assert_eq!(store.clear_work().unwrap(), 0);
    let path = draft.work.directory.path().to_owned();
    assert!(path.join("upper/file").exists());
    drop(draft);
    assert!(!path.exists());
}

/// Adds a snapshot whose data is not on the disk when the machine stops. Returns its id.
fn add_lost(directory: &Path, name: Option<&str>, below: Option<&str>) -> String {
    let store = open(directory);
    store.container_snapshots.set_boot(BEFORE);
    let boot = Some(BEFORE.to_owned());
    let record = ContainerSnapshotRecord { boot, ..snapshot(&store, name, below) };
    publish(&store, &record).unwrap().id
}

#[test]
fn what_was_not_on_the_disk_when_the_machine_stopped_is_lost() {
    let directory = fast_directory();
    drop(with_image(directory.path()));
    let id = add_lost(directory.path(), Some("name"), None);
    let above = add_lost(directory.path(), None, Some(&id));
    let before = open(directory.path());
    before.container_snapshots.set_boot(BEFORE);
    let kept = container(&before, "c", &above).unwrap();
    drop(before);
    drop(kept);
    let store = open(directory.path());
    let shelf = &store.container_snapshots;
    for text in ["name", &id] {
        let error = shelf.find(text).unwrap_err();
        assert!(matches!(error, ContainerSnapshotError::Lost(_)), "{error}");
    }
    assert!(matches!(shelf.chain(&above), Err(ContainerSnapshotError::Lost(_))));
    assert!(shelf.all().unwrap().iter().all(|it| it.1.is_err()));
    let error = store.settle_container_snapshot(&id).unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::Lost(_)), "{error}");
    let error = container(&store, "d", &above).unwrap_err();
    let ContainerError::Snapshot { source, .. } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("the host restarted"), "{source}");
    // The container's error is better than that of a container whose snapshot is gone.
    store.gc(NOW).unwrap();
    assert!(folder(&store, &above).exists());
    let report = store.fsck(FsckOptions::default()).unwrap();
    let of = |item: StoreItem| {
        let has = |it: &Damage| matches!(it, Damage::Bad(found, why) if *found == item && why.contains("lost"));
        report.damage.iter().any(|it| has(&it.0))
    };
    assert!(of(StoreItem::Container("c".to_owned())), "{report:?}");
    assert!(of(StoreItem::ContainerSnapshot(above.clone())), "{report:?}");
    let refused = store.remove_damaged(&report).unwrap_err();
    assert!(matches!(&refused, FsckError::SnapshotNeeded { .. }), "{refused}");
    // A new one can have the name.
    let new = add(&store, Some("name"), None);
    assert_eq!(found(shelf.find("name")), Ok(new));
    eventually(|| store.containers.lock("c").unwrap().is_some_and(|it| it.remove().is_ok()));
    eventually(|| {
        store.gc(NOW).unwrap();
        !folder(&store, &above).exists() && !folder(&store, &id).exists()
    });
    check_clean(&store).unwrap();
}

#[test]
fn settling_one_settles_all_that_were_published_before() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let unsettled = |name: &str, below: Option<&str>| {
        let record =
            ContainerSnapshotRecord { boot: this_boot(), ..snapshot(&store, Some(name), below) };
        publish(&store, &record).unwrap().id
    };
    let lowest = unsettled("lowest", None);
    let other = unsettled("other", None);
    let above = unsettled("above", Some(&lowest));
    let is_marked = |id: &str| {
        fs::metadata(folder(&store, id).join(RECORD)).unwrap().permissions().mode() & 0o1000 != 0
    };
    assert!([&lowest, &other, &above].into_iter().all(|it| is_marked(it)));
    store.settle_container_snapshot(&above).unwrap();
    for id in [&lowest, &other, &above] {
        let found = store.container_snapshots.find(id).unwrap();
        assert!(found.record.boot.is_none() && !is_marked(id), "{:?}", found.record);
        store.settle_container_snapshot(id).unwrap();
    }
    let next = open(directory.path());
    next.container_snapshots.set_boot("the next one");
    assert_eq!(next.container_snapshots.chain(&above).unwrap().len(), 2);
    // One that is durable from the beginning also needs the one below it.
    let late = unsettled("late", None);
    let durable = add(&store, Some("durable"), Some(&late));
    assert_eq!(next.container_snapshots.chain(&durable).unwrap().len(), 2);
    check_clean(&store).unwrap();
}

/// `gc` does this, because the process that waits for the disk may have been killed.
#[test]
fn those_of_commands_that_were_killed_are_settled() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    assert!(!store.settle_container_snapshots().unwrap());
    let record = ContainerSnapshotRecord { boot: this_boot(), ..snapshot(&store, Some("s"), None) };
    let id = publish(&store, &record).unwrap().id;
    assert!(store.settle_container_snapshots().unwrap());
    assert!(store.container_snapshots.find(&id).unwrap().record.boot.is_none());
    assert!(!store.settle_container_snapshots().unwrap());
    check_clean(&store).unwrap();
}

/// The kernel reports lost bytes only once, so no later sync may count.
#[test]
fn a_snapshot_that_the_disk_did_not_write_is_never_settled() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let record = ContainerSnapshotRecord { boot: this_boot(), ..snapshot(&store, Some("s"), None) };
    let id = publish(&store, &record).unwrap().id;
    let recorder = |fail_at| Arc::new(Recorder { fail_at, ..Recorder::default() });
    let (who, options) = (crate::Who::this_process(), OpenOptions::write());
    let traced = |it| Store::open_traced(directory.path(), who, options, Trace::to(it)).unwrap();
    // Opening a store in the same boot changes nothing, so the first change is the sync.
    let failing = recorder(Some(0));
    traced(&failing).settle_container_snapshot(&id).unwrap_err();
    for _ in 0..2 {
        let error = store.settle_container_snapshot(&id).unwrap_err();
        assert!(matches!(error, ContainerSnapshotError::Unwritten(_)), "{error}");
    }
    // It can be used, because the data may be in memory.
    assert_eq!(store.container_snapshots.find("s").unwrap().id, id);
    let above = publish(&store, &snapshot(&store, None, Some(&id))).unwrap_err();
    assert!(above.to_string().contains("quire commit"), "{above}");
    let next = open(directory.path());
    next.container_snapshots.set_boot("the next one");
    assert!(matches!(next.container_snapshots.find("s"), Err(ContainerSnapshotError::Lost(_))));
}

#[test]
fn a_damaged_record_stops_gc_until_it_is_removed() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let damaged = add(&store, Some("damaged"), None);
    let sound = add(&store, Some("sound"), None);
    let nameless = add(&store, None, None);
    let kept = container(&store, "c", &damaged).unwrap();
    let file = folder(&store, &damaged).join(RECORD);
    let mut bytes = fs::read(&file).unwrap();
    bytes[3] ^= 1;
    fs::remove_file(&file).unwrap();
    fs::write(&file, bytes).unwrap();
    let error = store.container_snapshots.find(&damaged).unwrap_err();
    assert!(error.to_string().contains("fsck --repair"), "{error}");
    assert_eq!(found(store.container_snapshots.find("sound")), Ok(sound.clone()));
    store.remove_container_snapshot(&damaged).unwrap_err();
    let error = store.gc(NOW).unwrap_err();
    let GcError::Unreadable { object, .. } = &error else { panic!("{error}") };
    assert_eq!(*object, format!("the references of container snapshot {damaged}"));
    // It may need any other one.
    store.remove_container_snapshot(&sound).unwrap();
    assert!(folder(&store, &sound).exists() && folder(&store, &nameless).exists());
    let report = store.fsck(FsckOptions::default()).unwrap();
    let [(Damage::Bad(item, why), _)] = &report.damage[..] else { panic!("{report:?}") };
    assert_eq!(*item, StoreItem::ContainerSnapshot(damaged.clone()));
    assert!(why.contains("checksum"), "{why}");
    let refused = store.remove_damaged(&report).unwrap_err();
    let FsckError::SnapshotNeeded { user, .. } = &refused else { panic!("{refused}") };
    assert_eq!(user, "container c");
    kept.remove().unwrap();
    eventually(|| store.remove_damaged(&report).is_ok_and(|it| it == 1));
    assert!(!folder(&store, &damaged).exists());
    eventually(|| {
        check_clean(&store).unwrap();
        !folder(&store, &sound).exists() && !folder(&store, &nameless).exists()
    });
}

#[test]
fn fsck_finds_what_a_snapshot_lacks() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let below = add(&store, None, None);
    let above = add(&store, Some("above"), Some(&below));
    let held = container(&store, "c", &above).unwrap();
    let damage = || {
        let report = store.fsck(FsckOptions::default()).unwrap();
        let bad = report.damage.iter().map(|it| match &it.0 {
            Damage::Bad(item, why) => format!("{item}: {why}"),
            other => format!("{other:?}"),
        });
        (bad.collect::<Vec<_>>(), report)
    };
    assert_eq!(damage().0, [""; 0]);
    let aside = directory.path().join("aside");
    #[expect(clippy::disallowed_methods, reason = "a folder goes away, without the store")]
    let move_to = |from: &Path, to: &Path| fs::rename(from, to).unwrap();
    move_to(&folder(&store, &below), &aside);
    let (found, report) = damage();
    let stray = format!("Stray(\"{}\")", aside.display());
    let text = format!(
        "container snapshot {above}: snapshot {below}, which is below it, is not in the store"
    );
    assert_eq!(found, [text, stray]);
    let error = store.container_snapshots.chain(&above).unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::NothingBelow { .. }), "{error}");
    // Its own data is sound.
    assert_eq!(store.remove_damaged(&report).unwrap(), 0);
    move_to(&aside, &folder(&store, &below));
    move_to(&folder(&store, &above).join("upper"), &aside);
    assert!(damage().0[0].ends_with("its directory \"upper\" is missing"), "{:?}", damage().0);
    move_to(&aside, &folder(&store, &above).join("upper"));
    move_to(&folder(&store, &above), &aside);
    assert!(damage().0[0].contains("container c: its snapshot"), "{:?}", damage().0);
    move_to(&aside, &folder(&store, &above));
    let image = directory.path().join("images").join(only_image(&store).to_string());
    move_to(&image, &aside);
    assert!(damage().0.iter().any(|it| it.starts_with("container snapshot")), "{:?}", damage().0);
    move_to(&aside, &image);
    let odd = directory.path().join(CONTAINER_SNAPSHOTS).join("odd");
    fs::write(&odd, "").unwrap();
    assert_eq!(damage().0, [format!("Stray(\"{}\")", odd.display())]);
    fs::remove_file(odd).unwrap();
    drop(held);
    check_clean(&store).unwrap();
}

#[test]
fn a_chain_that_does_not_end_is_an_error() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let first = add(&store, Some("first"), None);
    let second = add(&store, Some("second"), Some(&first));
    let shelf = &store.container_snapshots;
    let lock = shelf.lock().unwrap().unwrap();
    let circular = snapshot(&store, Some("first"), Some(&second));
    shelf.change(&lock, &first, &circular).unwrap();
    drop(lock);
    let error = shelf.chain(&first).unwrap_err();
    assert!(matches!(error, ContainerSnapshotError::Endless(_)), "{error}");
    // Both are needed, and the calls return.
    for id in [&first, &second] {
        assert!(!store.remove_container_snapshot(id).unwrap());
    }
    store.gc(NOW).unwrap();
    assert!(folder(&store, &first).exists());
}

#[test]
fn other_users_of_a_shared_store_see_no_snapshots() {
    let directory = fast_directory();
    let store = with_image(directory.path());
    let before = add(&store, Some("s"), None);
    store.share(Sharing::All).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&directory.path().join(CONTAINER_SNAPSHOTS)), 0o700);
    assert_eq!(mode(&folder(&store, &before)), 0o700);
    add(&store, Some("t"), None);
    assert_eq!(mode(&directory.path().join(CONTAINER_SNAPSHOTS)), 0o700);
    check_clean(&store).unwrap();
}

/// Threads, each with a separate store, publish, use and remove snapshots under two names.
#[test]
fn many_at_once_agree() {
    const ROUNDS: usize = 40;
    let directory = fast_directory();
    let store = with_image(directory.path());
    let work = |thread: usize| {
        let store = open(directory.path());
        for round in 0..ROUNDS {
            let name = ["a", "b"][(thread + round) % 2];
            let record =
                ContainerSnapshotRecord { boot: this_boot(), ..snapshot(&store, Some(name), None) };
            let made = store.publish_container_snapshot(draft(&store, "text").unwrap(), &record);
            let found = match made {
                Ok(made) => Ok(made),
                Err(ContainerSnapshotError::NameTaken(_)) => store.container_snapshots.find(name),
                Err(error) => panic!("{error}"),
            };
            // Another thread may have removed it.
            let Ok(held) = found else { continue };
            let id = held.id.clone();
            store.remove_container_snapshot(&id).unwrap();
            // As long as it is held, a container can be made above it.
            let above = container(&store, &format!("c-{thread}-{round}"), &id).unwrap();
            drop(held);
            store.clear_container_snapshots().unwrap();
            assert_eq!(fs::read(folder(&store, &id).join("upper/file")).unwrap(), b"text");
            if round % 8 == 0 {
                store.gc(NOW).unwrap();
            }
            above.remove().unwrap();
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|it| scope.spawn(move || work(it))).collect();
        threads.into_iter().for_each(|it| it.join().unwrap());
    });
    eventually(|| {
        store.clear_container_snapshots().unwrap();
        store.container_snapshots.all().unwrap().is_empty()
    });
    check_clean(&store).unwrap();
}
