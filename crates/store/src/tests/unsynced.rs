//! Images that are published before the disk has them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use tempfile::TempDir;

use super::interrupted::crash::{Recorded, record};
use super::lazy::Lazy;
use super::{Failure, check, check_clean, import, name, open, sample};
use crate::trace::{Change, Recorder, Trace as CrateTrace};
use crate::{LazyDeviceState, OpenOptions, Presence, StartRecord, Store, Trace, Traces};

/// Publishes an image as a lazy pull does, without syncs if that is possible. Returns whether it was.
fn publish(lazy: &Lazy, store: &Store) -> bool {
    let deferred = store.publish_unsynced(&lazy.image, &lazy.manifest(), &name("one")).unwrap();
    lazy.publish(store).unwrap();
    // A pull also stores the traces of the image.
    let mut traces = Traces::default();
    let trace = Trace { name: "default".to_owned(), runs: Vec::new(), start: None };
    traces.set(trace).unwrap();
    store.downloads.set_traces(&lazy.image, &traces).unwrap();
    // And the start of an earlier version.
    let mut start = StartRecord::new(lazy.manifest(), true);
    let file = start.add_file(b"/file").unwrap();
    assert!(start.add_part(file, 0..4096));
    store.downloads.set_start(&lazy.manifest(), &start).unwrap();
    deferred.is_some()
}

const fn is_sync(change: &Change) -> bool {
    matches!(change, Change::SyncFile(_) | Change::SyncDirectory(_) | Change::SyncEverything)
}

/// Imports an image, and makes the directory for lazy devices.
fn prepare(store: &Store) {
    import(store, "kept", &sample("kept", 2)).unwrap();
    store.prepare_lazy().unwrap();
}

/// Publishes an image without a sync, and perhaps does more after that.
fn record_publishing(lazy: &Lazy, then: impl FnOnce(&Store)) -> Recorded {
    record(prepare, |store| {
        assert!(publish(lazy, store));
        then(store);
    })
}

/// Checks that the next boot finds a sound store with the whole image or without it, and that the image can be published
/// again.
fn judge(recorded: &Recorded, lazy: &Lazy, is_kept: bool) -> Result<usize, Failure> {
    recorded.replay(&|directory, at| {
        let who = crate::Who::this_process();
        let store = Store::open(directory, who, OpenOptions::write())?;
        let found = check(&store)?;
        if !found.contains_key("kept:latest") {
            return Err("an image of earlier is gone".into());
        }
        match found.get("one:latest") {
            Some(image) => {
                if *image != lazy.image || store.presence(image)? != Presence::Partial {
                    return Err(format!("{image} is {:?}", store.presence(image)).into());
                }
                let device = store.lazy_devices.stat(&lazy.head.device)?;
                if device.map(|it| it.state) != Some(LazyDeviceState::Partial) {
                    return Err("the image has a name, but no device".into());
                }
                let index = store.lazy_devices.index_for(&lazy.head.device, Some(&lazy.manifest()));
                index?.ok_or("the image has a name, but no index")?;
            }
            None if is_kept && at == recorded.changes.len() => return Err("it is gone".into()),
            None => {}
        }
        if check_clean(&store)? != found {
            return Err("gc changed a ref".into());
        }
        publish(lazy, &store);
        store.settle()?;
        if !check(&store)?.contains_key("one:latest") {
            return Err("it cannot be published again".into());
        }
        Ok(())
    })
}

#[test]
fn an_image_that_is_not_synced_survives_a_crash_or_is_gone() {
    let lazy = Lazy::new();
    let recorded = record_publishing(&lazy, |_| {});
    assert!(!recorded.changes.iter().any(is_sync), "{:#?}", recorded.changes);
    let seen = judge(&recorded, &lazy, false).unwrap();
    assert!(seen > 10, "{seen} states");
}

#[test]
fn an_image_that_is_synced_later_survives_a_crash_at_any_moment() {
    let lazy = Lazy::new();
    let recorded = || record_publishing(&lazy, |store| assert!(store.settle().unwrap()));
    let seen = judge(&recorded(), &lazy, true).unwrap();
    assert!(seen > 20, "{seen} states");
    // Each kind of sync is needed. The last syncs only keep the mark from coming back.
    for kind in [
        |it: &Change| matches!(it, Change::SyncFile(_)),
        |it: &Change| matches!(it, Change::SyncDirectory(_)),
    ] {
        let mut wrong = recorded();
        wrong.changes.retain(|it| !kind(it));
        judge(&wrong, &lazy, true).unwrap_err();
    }
}

/// An import that uses a device of an image that is not synced yet must not be lost with it.
#[test]
fn an_import_beside_an_image_that_is_not_synced_survives_a_crash() {
    let lazy = Lazy::new();
    let other = |store: &Store| {
        lazy.publish_as(store, "other", lazy.manifest()).unwrap();
    };
    let recorded = record_publishing(&lazy, other);
    recorded
        .replay(&|directory, at| {
            let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
            let found = check(&store)?;
            if at == recorded.changes.len() && !found.contains_key("other:latest") {
                return Err("an import that has returned is gone".into());
            }
            check_clean(&store).map(drop)
        })
        .unwrap();
}

#[test]
fn marks_are_only_for_what_a_crash_may_remove() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    prepare(&store);
    let marked = || {
        let all = ["blobs", "images", "lazy", "manifests", "refs"].into_iter();
        let all = all.flat_map(|it| fs::read_dir(directory.path().join(it)).unwrap());
        let all = all.map(Result::unwrap).filter(|it| it.file_type().unwrap().is_file());
        let mode = |it: &fs::DirEntry| it.metadata().unwrap().permissions().mode();
        let marked = all.filter(|it| mode(it) & 0o1000 != 0);
        // Others must not read what a crash may have damaged.
        marked.inspect(|it| assert_eq!(mode(it) & 0o077, 0, "{it:?}")).count()
    };
    assert!(!store.has_unsynced().unwrap());
    assert!(publish(&lazy, &store));
    // The image, its manifest and config, its name, origins, mark, traces and start; the device, its state, head and
    // windows.
    assert!(marked() >= 11, "{}", marked());
    assert!(store.has_unsynced().unwrap());
    check(&store).unwrap();
    // Another process of this boot keeps everything.
    let again = open(directory.path());
    assert_eq!(again.presence(&lazy.image).unwrap(), Presence::Partial);
    assert!(again.settle().unwrap() && !again.settle().unwrap());
    assert_eq!(marked(), 0);
    // An image or a name that the store has could be lost, so it is synced at once.
    assert!(!publish(&lazy, &store));
    assert_eq!(marked(), 0);
    assert!(!store.has_unsynced().unwrap());
}

/// Two containers of one image start at the same moment, and commits run while other locks are held.
#[test]
fn other_commands_do_not_wait_for_an_image_that_is_not_synced() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    prepare(&store);
    assert!(publish(&lazy, &store));
    // The snapshotter commits under a hold, which waits for no `gc`.
    let hold = store.hold().unwrap();
    assert!(!publish(&lazy, &store));
    import(&store, "two", &sample("two", 2)).unwrap();
    drop(hold);
    assert!(!store.has_unsynced().unwrap());
    check(&store).unwrap();
}

#[test]
fn an_image_that_is_being_published_is_left_to_the_next_call() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let (store, other) = (open(directory.path()), open(directory.path()));
    prepare(&store);
    let begin = || store.publish_unsynced(&lazy.image, &lazy.manifest(), &name("one")).unwrap();
    let running = begin().unwrap();
    lazy.publish(&store).unwrap();
    assert!(other.settle().unwrap() && other.has_unsynced().unwrap());
    // The files that were published before the call are durable, so another import may use them.
    assert!(other.refs.directory.unsynced().unwrap().is_empty());
    drop(running);
    assert!(other.settle().unwrap() && !other.has_unsynced().unwrap());
}

/// While changes are not synced, nothing durable is replaced, even if it came after the publication began.
#[test]
fn a_publication_replaces_nothing_that_is_durable() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let (store, other) = (open(directory.path()), open(directory.path()));
    prepare(&store);
    let deferred = store.publish_unsynced(&lazy.image, &lazy.manifest(), &name("one")).unwrap();
    assert!(deferred.is_some());
    import(&other, "one", &sample("other", 2)).unwrap();
    let durable = other.refs.get(&name("one")).unwrap();
    lazy.publish(&store).unwrap_err();
    assert_eq!(other.refs.get(&name("one")).unwrap(), durable);
    drop(deferred);
    lazy.publish(&store).unwrap();
    assert_eq!(store.refs.get(&name("one")).unwrap().unwrap().image, lazy.image);
}

#[test]
fn marks_that_a_killed_process_has_removed_are_synced() {
    let lazy = Lazy::new();
    let syncs = |content: &str| {
        let recorded = record(
            |store| {
                prepare(store);
                publish(&lazy, store);
                fs::write(store.path().join("unsynced"), content).unwrap();
            },
            |store| assert!(store.settle().unwrap()),
        );
        recorded.changes.contains(&Change::SyncEverything)
    };
    assert!(!syncs("waiting") && syncs("syncing"));
}

/// The kernel reports bytes that it could not write only once, so they must not be trusted later.
#[test]
fn an_image_that_cannot_be_synced_is_removed() {
    let lazy = Lazy::new();
    let mut removed = 0;
    for fail_at in 0.. {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        prepare(&store);
        publish(&lazy, &store);
        let recorder = Arc::new(Recorder { fail_at: Some(fail_at), ..Recorder::default() });
        let (who, trace) = (crate::Who::this_process(), CrateTrace::to(&recorder));
        let failing = Store::open_traced(directory.path(), who, OpenOptions::write(), trace);
        let settled = failing.unwrap().settle();
        let found = check(&store).unwrap();
        if settled.is_ok() {
            assert!(found.contains_key("one:latest") && fail_at > 20, "{fail_at}");
            break;
        }
        // If a later step failed, the image may be durable.
        let is_marked = !store.refs.directory.unsynced().unwrap().is_empty();
        assert!(!is_marked || store.has_unsynced().unwrap());
        removed += u32::from(!found.contains_key("one:latest"));
        assert!(store.settle().is_ok());
        check(&store).unwrap();
    }
    assert!(removed > 10, "{removed}");
}

#[test]
fn a_crash_while_files_are_removed_leaves_a_sound_store() {
    let lazy = Lazy::new();
    let published = |store: &Store| {
        prepare(store);
        publish(&lazy, store);
    };
    let recorded = record(published, |store| {
        assert!(store.remove_marked().unwrap() >= 10);
    });
    assert!(judge(&recorded, &lazy, false).unwrap() > 1);
}

#[test]
fn the_first_lazy_image_of_a_store_survives_a_crash_or_is_gone() {
    let lazy = Lazy::new();
    let kept = |store: &Store| {
        import(store, "kept", &sample("kept", 2)).unwrap();
    };
    for is_settled in [false, true] {
        let recorded = record(kept, |store| {
            assert!(publish(&lazy, store));
            assert!(!is_settled || store.settle().unwrap());
        });
        // The directory for lazy devices is new.
        let root = recorded.directory.path().to_owned();
        let lazy_made = |it: &&Change| **it == Change::MakeDirectory(root.join("lazy"));
        assert_eq!(recorded.changes.iter().filter(lazy_made).count(), 1);
        assert!(judge(&recorded, &lazy, is_settled).unwrap() > 10);
    }
}

/// Container managers may give each container another boot id.
#[test]
fn an_image_that_a_process_fills_or_publishes_is_of_this_boot() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    prepare(&store);
    let id = (lazy.image, lazy.manifest(), name("one"));
    let in_another_boot = || {
        fs::write(directory.path().join("boot"), "another boot").unwrap();
        open(directory.path()).refs.names().unwrap()
    };
    let publishing = store.publish_unsynced(&id.0, &id.1, &id.2).unwrap().unwrap();
    lazy.publish(&store).unwrap();
    assert_eq!(in_another_boot(), [name("kept"), name("one")]);
    drop(publishing);
    drop(store);

    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    prepare(&store);
    publish(&lazy, &store);
    let filling = store.fill_lazy_device(&lazy.head.device).unwrap().unwrap();
    let in_another_boot = || {
        fs::write(directory.path().join("boot"), "another boot").unwrap();
        open(directory.path()).refs.names().unwrap()
    };
    assert_eq!(in_another_boot(), [name("kept"), name("one")]);
    assert!(!store.has_unsynced().unwrap());
    drop(filling);
}

/// Other programs may have any file open, for example a backup.
#[test]
fn a_reader_of_an_image_proves_nothing_about_its_boot() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    prepare(&store);
    publish(&lazy, &store);
    let read = store.images.open(&lazy.image).unwrap().unwrap();
    drop(store);
    fs::write(directory.path().join("boot"), "another boot").unwrap();
    assert_eq!(open(directory.path()).refs.names().unwrap(), [name("kept")]);
    drop(read);
}

/// A store whose file `boot` is odd is opened, and recovered again.
#[test]
fn a_store_needs_no_record_of_the_boot() {
    let directory = TempDir::new().unwrap();
    let boot = directory.path().join("boot");
    drop(open(directory.path()));
    let is_recovered = || open(directory.path()).is_recovered;
    assert!(is_recovered());
    fs::write(&boot, "x".repeat(100)).unwrap();
    assert!(is_recovered());
    fs::remove_file(&boot).unwrap();
    fs::create_dir(&boot).unwrap();
    assert!(!is_recovered());
    let (lazy, store) = (Lazy::new(), open(directory.path()));
    assert!(!publish(&lazy, &store));
    check(&store).unwrap();
}

#[test]
fn a_store_that_cannot_be_recovered_does_not_use_what_a_crash_may_have_damaged() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let mut store = open(directory.path());
    prepare(&store);
    publish(&lazy, &store);
    // As if the file system were read-only since a crash, or as if there were no /proc.
    (store.images.may_be_torn, store.is_recovered) = (true, false);
    for refused in [
        testing::chain(&store.presence(&lazy.image).unwrap_err()),
        testing::chain(&store.settle().unwrap_err()),
        testing::chain(&lazy.publish_as(&store, "two", lazy.manifest()).unwrap_err()),
    ] {
        assert!(refused.contains("a crash may have damaged"), "{refused}");
    }
    let again = Lazy::of_sample("two");
    let begun = store.publish_unsynced(&again.image, &again.manifest(), &name("two"));
    assert!(begun.unwrap().is_none());
    drop(store);
    // A command that only reads recovers the store as well.
    fs::write(directory.path().join("boot"), "another boot").unwrap();
    let store = Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read());
    let store = store.unwrap();
    assert_eq!(store.refs.names().unwrap(), [name("kept")]);
    assert!(!store.has_unsynced().unwrap());
}

/// Other users could not open files with the mark.
#[test]
fn a_shared_store_gets_synced_files() {
    let (lazy, directory) = (Lazy::new(), TempDir::new().unwrap());
    let store = open(directory.path());
    prepare(&store);
    assert!(publish(&lazy, &store) && store.has_unsynced().unwrap());
    store.share(crate::Sharing::All).unwrap();
    assert!(!store.has_unsynced().unwrap());
    let again = Lazy::of_sample("two");
    let begun = store.publish_unsynced(&again.image, &again.manifest(), &name("two"));
    assert!(begun.unwrap().is_none());
}
