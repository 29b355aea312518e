use std::cell::Cell;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use image::digest::Digest;
use image::verity::{Algorithm, ImageId, digest};
use tempfile::TempDir;

use super::{GcLimits, GcPlan, HOLD, Known, Pace, RunningImports, Store, Sweep, Swept};
use crate::shelf::blob_file::BlobFile;
use crate::shelf::item::StoreItem;
use crate::tests::data::pack;
use crate::tests::{Failure, NOW, add, check, check_clean, import, import_as, name, open, sample};
use crate::trace::{Change, Recorder, Trace};
use crate::{ContainerRecord, Form, Freeing, Kept, OpenOptions, Reference, Seconds, Transaction};

/// Collects one object at a time. Calls `meanwhile` with the number of the call each time that the lock is free.
fn collect(store: &Store, meanwhile: &mut dyn FnMut(usize)) -> usize {
    let mut calls = 0;
    let rest = &mut |_| {
        meanwhile(calls);
        calls += 1;
    };
    store
        .gc_at(NOW, &GcLimits::default(), Pace { hold: HOLD, objects: 1, rest, go_on: &|| true })
        .unwrap();
    calls
}

/// Makes a store with an image that is kept, and one that is garbage.
fn stage() -> (TempDir, Store, Reference) {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "kept", &sample("kept", 3)).unwrap();
    import(&store, "gone", &sample("gone", 3)).unwrap();
    let gone = store.refs.get(&name("gone")).unwrap().unwrap();
    store.remove_ref(&name("gone")).unwrap();
    (directory, store, gone)
}

#[test]
fn the_lock_is_free_between_objects() {
    let (directory, store, gone) = stage();
    let kept = store.refs.get(&name("kept")).unwrap().unwrap().image;
    let opened = Cell::new(0);
    let calls = collect(&store, &mut |_| {
        let other = open(directory.path());
        other.open_image(&kept).unwrap();
        drop(other.begin().unwrap());
        opened.set(opened.get() + 1);
    });
    // The garbage image has three objects, collected one at a time.
    assert!(calls > 3 && opened.get() == calls, "{calls}");
    assert!(!store.images.has(&gone.image).unwrap());
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

/// Opens a store whose changes are recorded. The changes that are made under the exclusive lock are also recorded
/// separately.
fn traced(directory: &TempDir) -> (Store, Arc<Recorder>) {
    let lock = Some(directory.path().join("gc.lock"));
    let recorder = Arc::new(Recorder { lock, ..Recorder::default() });
    let (who, trace) = (crate::Who::this_process(), Trace::to(&recorder));
    let store = Store::open_traced(directory.path(), who, OpenOptions::write(), trace).unwrap();
    (store, recorder)
}

/// A file system may need a tenth of a second to unlink or sync a file.
#[test]
fn nothing_is_unlinked_or_synced_while_others_wait() {
    for form in [Form::Objects, Form::Packed] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        import(&store, "kept", &sample("kept", 3)).unwrap();
        import_as(&store, "gone", &sample("gone", 12), form).unwrap();
        store.remove_ref(&name("gone")).unwrap();
        let lazy = digest(Algorithm::Sha256, b"lazy").into();
        drop(store.create_lazy_device(&lazy, 10_000).unwrap());
        // Unlinking a part of a large layer frees many blocks.
        let layer = Digest::sha256(b"layer");
        store.downloads.partial(&layer).unwrap().unwrap().append(&[1; 10_000]).unwrap();
        // The result is the same while an import runs.
        let running = store.begin().unwrap();
        let (traced, recorder) = traced(&directory);
        assert!(traced.gc(NOW).unwrap().1.removed > 3);
        assert!(store.lazy_devices.stat(&lazy).unwrap().is_none());
        assert_eq!(store.downloads.list().unwrap().names, []);
        assert_eq!(*recorder.locked.lock().unwrap(), Vec::<Change>::new(), "{form:?}");
        let changes = recorder.changes.lock().unwrap();
        assert!(changes.iter().any(|it| matches!(it, Change::Unlink(_))));
        drop(running);
        assert_eq!(check_clean(&store).unwrap().len(), 1);
    }
}

/// Makes a device that two images need, and removes one of them.
fn half_dead() -> (TempDir, Store) {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import_as(&store, "gone", &sample("gone", 12), Form::Packed).unwrap();
    import_as(&store, "kept", &sample("kept", 12), Form::Packed).unwrap();
    store.remove_ref(&name("gone")).unwrap();
    (directory, store)
}

/// Freeing a part of a large file changes as much of a file system as its removal, and syncing waits for the disk.
#[test]
fn parts_of_devices_are_freed_while_nobody_waits() {
    let (directory, store) = half_dead();
    // When an import begins, the collection uses another trash, and removes the old one.
    let (traced, recorder) = traced(&directory);
    let mut imports = Vec::new();
    let rest = &mut |_| imports.push(store.begin().unwrap());
    let pace = Pace { hold: HOLD, objects: 1, rest, go_on: &|| true };
    let (_, swept) = traced.gc_at(NOW, &GcLimits::default(), pace).unwrap();
    assert!(swept.trimmed > 0, "{swept:?}");
    assert_eq!(*recorder.locked.lock().unwrap(), Vec::<Change>::new());
    assert!(recorder.changes.lock().unwrap().iter().any(|it| matches!(it, Change::Punch(..))));
    drop(imports);
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

/// The lock is released before bytes are freed. An import that begins at this moment does not find the objects in the
/// device, and may replace the device by a complete device with the same name.
#[test]
fn an_import_before_the_bytes_are_freed_loses_nothing() {
    let (directory, store) = half_dead();
    let own = digest(Algorithm::Sha256, &sample("gone", 12)["own-9"]).into();
    let plan = store.plan(NOW, &RunningImports::from_store(&store).unwrap(), None).unwrap();
    let trimming = &plan.trimmings[0];
    let device = directory.path().join("data").join(trimming.dead.device.to_string());
    let inode = || device.metadata().unwrap().ino();
    let before = inode();
    let new = store.index_after(trimming).unwrap();
    let lock = store.lock_exclusive().unwrap();
    let opened = store.drop_objects(trimming, new.as_ref()).unwrap();
    drop(lock);
    assert_eq!(store.devices.find_object(&own).unwrap(), None);
    let mut all: Vec<Vec<u8>> = Vec::new();
    for bytes in sample("gone", 12).into_values().filter(|it| it.len() > 64) {
        if !all.contains(&bytes) {
            all.push(bytes);
        }
    }
    let other = open(directory.path());
    let import = other.begin().unwrap();
    assert_eq!(pack(&import, &all).unwrap().id, trimming.dead.device);
    import.commit().unwrap();
    assert_ne!(inode(), before, "the device is complete again");
    assert!(store.free(trimming, &opened).unwrap());
    drop((opened, new));
    check(&store).unwrap();
    assert!(store.devices.find_object(&own).unwrap().is_some());
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

/// If a `gc` was killed before it synced the index, the next `gc` syncs it, although it does not change the index.
#[test]
fn an_index_is_durable_before_bytes_are_freed() {
    let (directory, store) = half_dead();
    let plan = store.plan(NOW, &RunningImports::from_store(&store).unwrap(), None).unwrap();
    let trimming = &plan.trimmings[0];
    let new = store.index_after(trimming).unwrap();
    drop(store.drop_objects(trimming, new.as_ref()).unwrap());
    drop(new);
    let (traced, recorder) = traced(&directory);
    assert!(traced.gc(NOW).unwrap().1.trimmed > 0);
    let changes = recorder.changes.lock().unwrap();
    let punched = changes.iter().position(|it| matches!(it, Change::Punch(..))).unwrap();
    let data = Change::SyncDirectory(directory.path().join("data"));
    assert!(changes[..punched].contains(&data), "{changes:?}");
}

/// Items that become needed at any moment of a collection, for any reason, are complete afterwards.
#[test]
fn a_collection_takes_nothing_that_news_needs() {
    type News = fn(&Store, &Reference) -> Result<(), Failure>;
    let all: [(&str, News); 4] = [
        ("an import", |store, _| import(store, "new", &sample("gone", 3)).map(drop)),
        ("a part of it", |store, _| import(store, "new", &sample("gone", 2)).map(drop)),
        ("a name", |store, gone| Ok(store.set_ref(&name("new"), gone)?)),
        ("a container", |store, gone| {
            let record = ContainerRecord {
                image: gone.image,
                manifest: gone.manifest,
                name: None,
                created: Seconds(2),
                keep: true,
                shared: None,
                boot: None,
                snapshot: None,
                volumes: Vec::new(),
            };
            drop(store.create_container("new", &record)?);
            Ok(())
        }),
    ];
    for (what, news) in all {
        let mut came = 0;
        for at in 0.. {
            let (directory, store, gone) = stage();
            let mut is_here = false;
            let calls = collect(&store, &mut |call| {
                // A name for an image that has been removed is refused.
                is_here |= call == at && news(&open(directory.path()), &gone).is_ok();
            });
            came += usize::from(is_here);
            check(&store).unwrap_or_else(|error| panic!("{what} at {at}: {error}"));
            let has = store.images.has(&gone.image).unwrap();
            assert!(!is_here || has || what == "a part of it", "{what} at {at}");
            check_clean(&store).unwrap();
            if at >= calls {
                break;
            }
        }
        assert!(came > 0, "{what}");
    }
}

/// An import looks up its objects at one moment of a collection, and ends at another one.
#[test]
fn an_import_beside_a_collection_loses_nothing() {
    for (from, until) in (0..8).flat_map(|from| (from..8).map(move |until| (from, until))) {
        let (directory, store, _) = stage();
        let other = open(directory.path());
        let mut running: Option<(Transaction<'_>, Reference)> = None;
        let end = |running: Option<(Transaction<'_>, Reference)>| {
            let Some((transaction, reference)) = running else { return };
            transaction.set_ref(name("new"), reference);
            transaction.commit().unwrap();
        };
        collect(&store, &mut |call| {
            if call == from {
                let transaction = other.begin().unwrap();
                let reference = add(&transaction, &sample("gone", 3)).unwrap();
                running = Some((transaction, reference));
            }
            if call == until {
                end(running.take());
            }
        });
        end(running.take());
        check(&store).unwrap_or_else(|error| panic!("{from} to {until}: {error}"));
        assert!(check_clean(&store).unwrap().len() <= 2);
    }
}

/// An image that is opened between the plan and the sweep is kept.
#[test]
fn an_image_that_is_opened_after_the_plan_is_kept() {
    let (directory, store, gone) = stage();
    let other = open(directory.path());
    let mut opened = None;
    collect(&store, &mut |call| {
        if call == 0 {
            opened = Some(other.open_image(&gone.image).unwrap());
        }
    });
    assert_eq!(store.plan_gc(NOW).unwrap().kept, [Kept::InUse(gone.image)]);
    let image: ImageId = gone.image;
    assert!(store.images.has(&image).unwrap());
    let bytes = &sample("gone", 3)["own-2"];
    let object = digest(Algorithm::Sha256, bytes).into();
    assert!(store.has(&object, bytes.len() as u64).unwrap(), "{}", StoreItem::Object(object));
    drop(opened);
    check_clean(&store).unwrap();
}

/// Imports look up objects without the lock, either before `gc` moves an object or after that.
#[test]
fn an_object_that_an_import_finds_while_it_is_taken_is_put_back() {
    let (directory, store, _) = stage();
    let other = open(directory.path());
    let files = sample("gone", 3);
    let found = ["own-0", "own-1", "own-2"].map(|it| {
        let id = digest(Algorithm::Sha256, &files[it]).into();
        (id, files[it].len() as u64)
    });
    let has = || found.map(|(id, size)| store.has(&id, size).unwrap());
    let transaction = other.begin().unwrap();
    let plan = store.plan(NOW, &RunningImports::from_store(&store).unwrap(), None).unwrap();
    let items: Vec<_> = plan.items.iter().map(|it| (it.clone(), 1)).collect();
    let objects = items.iter().filter(|it| matches!(it.0, StoreItem::Object(_))).collect();
    let (mut done, mut swept) = (GcPlan::default(), Swept::default());
    let mut sweep = Sweep {
        store: &store,
        plan: &plan,
        known: Known::from_plan(&plan),
        imports: RunningImports::from_store(&store).unwrap(),
        pace: &mut Pace { hold: HOLD, objects: 1, rest: &mut |_| {}, go_on: &|| true },
        done: &mut done,
        swept: &mut swept,
        waiting: None,
        trash: None,
        old: Vec::new(),
    };
    assert!(transaction.reuse(&found[0].0, found[0].1).unwrap());
    sweep.make_trash().unwrap();
    for (item, _) in &items {
        if matches!(item, StoreItem::Object(_)) {
            sweep.take(&store.place(item).unwrap(), item, &item.file_name()).unwrap();
        }
    }
    assert_eq!(has(), [false; 3]);
    assert!(!transaction.reuse(&found[1].0, found[1].1).unwrap());
    let back = sweep.put_back(&objects).unwrap();
    // The second object is also listed, which does no harm.
    assert_eq!(back, found[..2].iter().map(|it| it.0).collect());
    sweep.end().unwrap();
    assert_eq!(has(), [true, true, false]);
    transaction.commit().unwrap();
    check_clean(&store).unwrap();
    assert_eq!(has(), [false; 3]);
}

/// A service that ends does not wait for the whole collection. The next collection continues.
#[test]
fn a_collection_can_be_ended_at_any_moment() {
    for calls in 0_u32.. {
        let (directory, store, _) = stage();
        let left = Cell::new(calls);
        let go_on = || left.replace(left.get().saturating_sub(1)) > 0;
        let pace = Pace { hold: HOLD, objects: 1, rest: &mut |_| {}, go_on: &go_on };
        store.gc_at(NOW, &GcLimits::default(), pace).unwrap();
        check(&store).unwrap();
        let other = open(directory.path());
        import(&other, "again", &sample("gone", 3)).unwrap();
        assert_eq!(check_clean(&store).unwrap().len(), 2);
        if left.get() > 0 {
            assert!(calls > 4);
            break;
        }
    }
}

/// If one collection frees parts of a device, another one with an older plan must not restore them in the index.
#[test]
fn two_collections_of_devices_do_not_contradict_each_other() {
    for at in 0.. {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        import_as(&store, "gone", &sample("gone", 12), Form::Packed).unwrap();
        import_as(&store, "kept", &sample("kept", 12), Form::Packed).unwrap();
        import_as(&store, "part", &sample("gone", 9), Form::Packed).unwrap();
        store.remove_ref(&name("gone")).unwrap();
        let calls = collect(&store, &mut |call| {
            if call == at {
                let other = open(directory.path());
                other.remove_ref(&name("part")).unwrap();
                other.gc(NOW).unwrap();
            }
        });
        check(&store).unwrap_or_else(|error| panic!("{at}: {error}"));
        import_as(&store, "again", &sample("gone", 12), Form::Packed).unwrap();
        check(&store).unwrap_or_else(|error| panic!("again at {at}: {error}"));
        if at >= calls {
            break;
        }
    }
}

/// A collection neither counts nor creates the file of a download that another process continues or has removed.
#[test]
fn only_removed_downloads_are_counted() {
    for is_unlisted in [false, true] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        let [locked, ended, unused] = [&b"locked"[..], b"ended", b"unused"].map(Digest::sha256);
        for digest in [&locked, &ended, &unused] {
            store.downloads.partial(digest).unwrap().unwrap().append(&[1; 10_000]).unwrap();
        }
        let other = open(directory.path());
        let continued = other.downloads.partial(&locked).unwrap().unwrap();
        // An import without readable lists makes the collection remove downloads without its trash.
        let running = is_unlisted.then(|| other.begin().unwrap());
        if let Some(running) = &running {
            running.forget_lists();
        }
        let recorder = Arc::new(Recorder::default());
        let (who, trace) = (crate::Who::this_process(), Trace::to(&recorder));
        let traced =
            Store::open_traced(directory.path(), who, OpenOptions::write(), trace).unwrap();
        let rest = &mut |_| {
            // After the plan, and before the first removal.
            if let Some(ended) = other.downloads.existing_partial(&ended).unwrap() {
                ended.discard().unwrap();
            }
        };
        let pace = Pace { hold: HOLD, objects: 1, rest, go_on: &|| true };
        let (done, swept) = traced.gc_at(NOW, &GcLimits::default(), pace).unwrap();
        let partial = |digest| StoreItem::Blob(BlobFile::Partial(digest));
        let removed: Vec<_> = done.garbage.iter().map(|it| it.0.clone()).collect();
        assert_eq!(removed, [partial(unused)], "{is_unlisted}");
        assert_eq!(swept.removed, 1);
        assert_eq!(store.downloads.list().unwrap().names, [BlobFile::Partial(locked)]);
        drop((continued, running));
    }
}

/// Another collection may have removed an item.
#[test]
fn an_item_that_is_gone_is_not_counted() {
    let (directory, store, _) = stage();
    let id = digest(Algorithm::Sha256, &sample("gone", 3)["own-1"]).into();
    let (shard, file) = crate::shelf::objects::split(&id);
    let path = directory.path().join("objects").join(shard).join(file);
    let is_gone = |plan: &GcPlan| !plan.garbage.iter().any(|it| it.0 == StoreItem::Object(id));
    assert!(path.exists() && !is_gone(&store.plan_gc(NOW).unwrap()));
    // After the plan.
    let rest = &mut |_| drop(std::fs::remove_file(&path));
    let pace = Pace { hold: HOLD, objects: 1, rest, go_on: &|| true };
    let (done, swept) = store.gc_at(NOW, &GcLimits::default(), pace).unwrap();
    assert!(is_gone(&done) && done.garbage.len() as u64 == swept.removed, "{done:?}");
    assert!(swept.removed > 3, "{swept:?}");
    let bytes: u64 = done.garbage.iter().map(|it| it.1).sum();
    assert_eq!(swept.freed, bytes, "{done:?}");
}

/// A new index takes space on the disk, so it is written only if it can be used.
#[test]
fn a_device_in_use_gets_no_new_index() {
    let (directory, store) = half_dead();
    let own = digest(Algorithm::Sha256, &sample("gone", 12)["own-9"]).into();
    let device = store.devices.find_object(&own).unwrap().unwrap().device;
    let index = std::fs::read(directory.path().join(format!("data/{device}.index"))).unwrap();
    let (traced, recorder) = traced(&directory);
    let mut reader = None;
    let rest = &mut |_| {
        // After the plan.
        reader.get_or_insert_with(|| store.object(&own).unwrap());
    };
    let pace = Pace { hold: HOLD, objects: 1, rest, go_on: &|| true };
    let (done, swept) = traced.gc_at(NOW, &GcLimits::default(), pace).unwrap();
    assert_eq!((done.dead[0].freeing, swept.trimmed), (Freeing::InUse, 0));
    let changes = recorder.changes.lock().unwrap();
    let is_index =
        |it: &&Change| matches!(it, Change::Write(_, bytes) if bytes.starts_with(&index[..8]));
    assert_eq!(changes.iter().find(is_index), None);
}
