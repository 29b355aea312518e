//! Several imports and `gc` at the same time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use image::verity::{Algorithm, digest};
use tempfile::TempDir;

use super::{NOW, add, check, check_clean, eventually, import, name, open, sample};
use crate::{Kept, Store};

/// Opens the store again, as another process would.
fn again(store: &Store) -> Store {
    open(store.path())
}

#[test]
fn two_processes_import_the_same() {
    let directory = TempDir::new().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| super::interrupted::kill::spawn(directory.path(), "import-once", None))
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let store = open(directory.path());
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

#[test]
fn threads_share_a_transaction() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let transaction = store.begin().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let transaction = &transaction;
            scope.spawn(move || {
                for at in 0..200_usize {
                    // Two threads add every object.
                    let number = (at + thread * 100) % 400;
                    let bytes = format!("object {number} ").repeat(30);
                    let id = transaction.object(bytes.as_bytes()).unwrap();
                    assert_eq!(id, digest(Algorithm::Sha256, bytes.as_bytes()).into());
                }
            });
        }
    });
    let committed = transaction.commit().unwrap();
    assert_eq!((committed.objects, committed.reused), (400, 400));
    for number in 0..400 {
        let bytes = format!("object {number} ").repeat(30);
        let id = digest(Algorithm::Sha256, bytes.as_bytes()).into();
        assert!(store.has(&id, bytes.len() as u64).unwrap());
    }
}

/// Each feature is recorded by reading `meta` and replacing it.
#[test]
fn processes_record_features_at_once() {
    for _ in 0..20 {
        let directory = TempDir::new().unwrap();
        let stores = [open(directory.path()), open(directory.path())];
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                together.wait();
                stores[0].prepare_lazy().unwrap();
            });
            scope.spawn(|| {
                together.wait();
                drop(stores[1].open_snapshots("one").unwrap());
            });
        });
        let again = again(&stores[0]);
        let meta = again.meta();
        assert!(meta.has_lazy_devices && meta.has_snapshots, "{meta:?}");
    }
}

/// All objects are garbage when the import finds them, and `gc` runs before the import ends.
#[test]
fn an_import_keeps_what_it_has_found() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "old", &sample("same", 3)).unwrap();
    import(&store, "other", &sample("other", 3)).unwrap();
    store.remove_ref(&name("old")).unwrap();
    store.remove_ref(&name("other")).unwrap();
    let transaction = store.begin().unwrap();
    let reference = add(&transaction, &sample("same", 3)).unwrap();
    let other = again(&store);
    let (plan, swept) = other.gc(NOW).unwrap();
    // Items that the import has not found are freed at once.
    assert_eq!(plan.garbage.len(), 3 + 4, "{plan:?}");
    assert!(swept.freed > 0 && swept.set_aside == 0, "{swept:?}");
    assert_eq!(other.images.ids().unwrap(), [reference.image]);
    assert_eq!(store.tmp.list().unwrap().len(), 1);
    check(&store).unwrap();
    transaction.set_ref(name("new"), reference);
    let committed = transaction.commit().unwrap();
    assert_eq!((committed.objects, committed.reused), (0, 6));
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

/// An import adds the objects that it did not find, even if another import published them and `gc` removed them
/// later.
#[test]
fn an_import_adds_what_it_did_not_find() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let transaction = store.begin().unwrap();
    let reference = add(&transaction, &sample("same", 3)).unwrap();
    import(&store, "old", &sample("same", 3)).unwrap();
    store.remove_ref(&name("old")).unwrap();
    again(&store).gc(NOW).unwrap();
    transaction.set_ref(name("new"), reference);
    transaction.commit().unwrap();
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

/// A layer is in the store before the import that needs it ends.
#[test]
fn an_import_keeps_what_an_import_inside_it_has_published() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let outer = store.begin().unwrap();
    let middle = outer.begin_inner().unwrap();
    let inner = middle.begin_inner().unwrap();
    let reference = add(&inner, &sample("one", 3)).unwrap();
    inner.commit().unwrap();
    for kept_by in [Some(middle), None] {
        let (plan, _) = again(&store).gc(NOW).unwrap();
        assert_eq!(plan.garbage, [], "{kept_by:?}");
        assert_eq!(store.images.ids().unwrap(), [reference.image]);
        check(&store).unwrap();
    }
    drop(outer);
    check_clean(&store).unwrap();
    assert_eq!(store.images.ids().unwrap(), []);
}

/// A line that only a later version understands may name any item.
#[test]
fn a_list_that_cannot_be_read_keeps_everything() {
    for line in [&b"pool sha256:0\n"[..], b"image 0\n", b"\0\xff\n", b"layer"] {
        let directory = TempDir::new().unwrap();
        let store = open(directory.path());
        import(&store, "old", &sample("same", 1)).unwrap();
        store.remove_ref(&name("old")).unwrap();
        let transaction = store.begin().unwrap();
        let work = std::fs::read_dir(directory.path().join("tmp")).unwrap().next().unwrap();
        std::fs::write(work.unwrap().path().join("kept"), line).unwrap();
        let (_, swept) = again(&store).gc(NOW).unwrap();
        assert!(swept.freed == 0 && swept.set_aside > 0, "{swept:?}");
        drop(transaction);
        check_clean(&store).unwrap();
    }
}

/// An import whose lists cannot be read may need any item.
#[test]
fn an_import_without_lists_keeps_what_it_has_found() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "old", &sample("same", 3)).unwrap();
    store.remove_ref(&name("old")).unwrap();

    let transaction = store.begin().unwrap();
    let reference = add(&transaction, &sample("same", 3)).unwrap();
    transaction.forget_lists();
    let other = again(&store);
    let (plan, swept) = other.gc(NOW).unwrap();
    assert_eq!(plan.garbage.len(), 6 + 4, "{plan:?}");
    assert!(swept.freed == 0 && swept.set_aside > 0, "{swept:?}");
    assert!(other.images.ids().unwrap().is_empty());
    // The trash must stay until the import has ended.
    other.clear_dead().unwrap();
    other.begin().unwrap().commit().unwrap();
    other.gc(NOW).unwrap();

    transaction.set_ref(name("new"), reference);
    let committed = transaction.commit().unwrap();
    assert_eq!((committed.objects, committed.reused), (0, 6));
    check(&store).unwrap();
    assert_eq!(check_clean(&store).unwrap().len(), 1);
}

/// As above, but the import is dropped, so the space is freed.
#[test]
fn what_was_set_aside_is_freed_in_the_end() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "old", &sample("same", 3)).unwrap();
    store.remove_ref(&name("old")).unwrap();
    let transaction = store.begin().unwrap();
    transaction.forget_lists();
    again(&store).gc(NOW).unwrap();
    assert_eq!(store.tmp.list().unwrap().len(), 2);
    drop(transaction);
    eventually(|| {
        drop(store.begin().unwrap());
        store.tmp.list().unwrap().is_empty()
    });
}

/// The items are removed by another program than `gc`.
#[test]
fn what_has_vanished_is_an_error() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "old", &sample("same", 3)).unwrap();
    store.remove_ref(&name("old")).unwrap();
    let transaction = store.begin().unwrap();
    let reference = add(&transaction, &sample("same", 3)).unwrap();
    transaction.forget_lists();
    again(&store).gc(NOW).unwrap();
    for trash in std::fs::read_dir(directory.path().join("tmp")).unwrap() {
        let path = trash.unwrap().path();
        let is_trash = path.file_name().unwrap().to_str().unwrap().starts_with("trash-");
        for file in std::fs::read_dir(&path).unwrap().filter(|_| is_trash) {
            let file = file.unwrap().path();
            if file.file_name().unwrap().to_str().unwrap().starts_with("object-") {
                std::fs::remove_file(file).unwrap();
            }
        }
    }
    transaction.set_ref(name("new"), reference);
    let error = transaction.commit().unwrap_err().to_string();
    assert!(error.contains("disappeared from the store"), "{error}");
    assert!(store.refs.all().unwrap().is_empty());
}

#[test]
fn an_open_image_is_kept() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import(&store, "old", &sample("old", 2)).unwrap();
    let opened = store.open_image(&image).unwrap();
    let other = again(&store);
    other.remove_ref(&name("old")).unwrap();
    let (plan, swept) = other.gc(NOW).unwrap();
    assert_eq!(plan.kept, [Kept::InUse(image)]);
    // The image, its layer and its manifests are removed, but its objects stay.
    assert_eq!(swept.removed, 3);
    let files = sample("old", 2);
    let bytes = &files["own-1"];
    assert!(store.has(&digest(Algorithm::Sha256, bytes).into(), bytes.len() as u64).unwrap());
    // A duplicate of the descriptor has the same effect.
    let copy = opened.image.fd().try_clone_to_owned().unwrap();
    drop(opened);
    assert_eq!(other.gc(NOW).unwrap().1.removed, 0);
    drop(copy);
    eventually(|| other.gc(NOW).unwrap().1.removed == 5);
    assert!(matches!(store.open_image(&image), Err(crate::OpenImageError::Absent(_))));
}

#[test]
fn an_image_can_be_opened_while_someone_asks_whether_it_is_open() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import(&store, "old", &sample("old", 1)).unwrap();
    store.remove_ref(&name("old")).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                again(&store).plan_gc(NOW).unwrap();
            }
        });
        for _ in 0..2000 {
            store.open_image(&image).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn imports_and_gc_at_once_lose_nothing() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let done = AtomicBool::new(false);
    let runs = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let collector = scope.spawn(|| {
            let store = again(&store);
            while !done.load(Ordering::Relaxed) {
                store.gc(NOW).unwrap();
                runs.fetch_add(1, Ordering::Relaxed);
            }
        });
        let importers: Vec<_> = (0..2)
            .map(|thread| {
                let store = again(&store);
                let runs = &runs;
                scope.spawn(move || {
                    for round in 0..1000 {
                        // A collection starts again when it finds new items, so few collections complete. The name of
                        // the last round is kept.
                        let is_enough = round >= 12 && runs.load(Ordering::Relaxed) > 2;
                        if is_enough && round % 2 == 0 {
                            break;
                        }
                        let own = format!("name-{thread}");
                        // Both threads import the same samples, and make garbage of them in between.
                        let files = sample(&format!("sample-{}", (round + thread) % 3), 4);
                        let image = import(&store, &own, &files).unwrap();
                        let sound = store.verify(&image, crate::FsckOptions { threads: 1 });
                        let sound = sound.unwrap();
                        assert!(sound.is_sound(), "{:?}", sound.damage);
                        if round % 2 == 0 {
                            store.remove_ref(&name(&own)).unwrap();
                        }
                    }
                })
            })
            .collect();
        let joined: Vec<_> = importers.into_iter().map(|it| it.join()).collect();
        done.store(true, Ordering::Relaxed);
        collector.join().unwrap();
        joined.into_iter().for_each(|it| it.unwrap());
        assert!(runs.load(Ordering::Relaxed) > 2);
    });
    check(&store).unwrap();
    assert_eq!(check_clean(&store).unwrap().len(), 2);
}
