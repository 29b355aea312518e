//! The machine stops at any moment, and all data that was not synced is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use image::verity::DeviceId;
use tempfile::TempDir;

use super::model::{Crashed, Disk};
use crate::tests::{
    Failure, NOW, check, check_clean, fast_directory, import, import_as, name, sample, setting,
};
use crate::trace::{Change, Recorder, Trace};
use crate::{ContainerRecord, Form, LazyDeviceFill, LazyDeviceState, OpenOptions, Seconds, Store};

const SAMPLES: u64 = 3;

/// Returns the number of random mixtures of lost changes at each moment.
fn samples() -> u64 {
    setting("QUIRE_STORE_CRASH_SAMPLES").map_or(SAMPLES, |it| it.parse().unwrap())
}

/// The recorded changes of one command on a store.
pub(in crate::tests) struct Recorded {
    pub(in crate::tests) directory: TempDir,
    before: Disk,
    pub(in crate::tests) changes: Vec<Change>,
}

/// Prepares a store, then records the changes that `command` makes.
pub(in crate::tests) fn record(
    prepare: impl FnOnce(&Store),
    command: impl FnOnce(&Store),
) -> Recorded {
    let directory = fast_directory();
    let store = crate::tests::open(directory.path());
    prepare(&store);
    // Shards are created on demand. Creating all 256 shards in each replay would only take time.
    for shard in fs::read_dir(directory.path().join("objects")).unwrap() {
        let _not_empty = fs::remove_dir(shard.unwrap().path());
    }
    let before = Disk::from_directory(directory.path());
    let recorder = Arc::new(Recorder::default());
    let store = Store::open_traced(
        directory.path(),
        crate::Who::this_process(),
        OpenOptions::write(),
        Trace::to(&recorder),
    )
    .unwrap();
    command(&store);
    let changes = std::mem::take(&mut *recorder.changes.lock().unwrap());
    Recorded { directory, before, changes }
}

impl Recorded {
    /// Crashes after each change, in several ways. `judge` checks the result; its second argument is the number of
    /// changes. Returns the number of distinct states.
    pub(in crate::tests) fn replay(
        &self,
        judge: &dyn Fn(&Path, usize) -> Result<(), Failure>,
    ) -> Result<usize, Failure> {
        let mut disk = self.before.clone();
        let mut judged = BTreeSet::new();
        let mut same = 0;
        for at in 0..=self.changes.len() {
            let crashes = match self.is_one_of_many(at) {
                true => BTreeSet::new(),
                false => {
                    let crashes = disk.crashes(samples(), at as u64).into_iter();
                    crashes.map(Crashed::in_next_boot).collect()
                }
            };
            for crashed in crashes {
                // If states differ only in temporary files, only some of them are checked.
                let is_new = judged.insert(crashed.published());
                same += usize::from(!is_new);
                if is_new || same.is_multiple_of(16) || at == self.changes.len() {
                    let directory = fast_directory();
                    crashed.restore(directory.path());
                    judge(directory.path(), at)
                        .map_err(|error| format!("after {:?}: {error}", self.last(at)))?;
                }
            }
            if let Some(change) = self.changes.get(at) {
                disk.apply(self.directory.path(), change);
            }
        }
        Ok(judged.len())
    }

    /// In the middle of a long sequence of similar changes, only one moment in seven is checked, unless the settings
    /// ask for more.
    fn is_one_of_many(&self, at: usize) -> bool {
        use std::mem::discriminant;
        let around = at.checked_sub(8).and_then(|from| self.changes.get(from..at + 8));
        let alike = around.is_some_and(|around| {
            around.windows(2).all(|pair| discriminant(&pair[0]) == discriminant(&pair[1]))
        });
        alike && !at.is_multiple_of(7) && samples() == SAMPLES
    }

    fn last(&self, at: usize) -> Option<&Change> {
        self.changes.get(at.checked_sub(1)?)
    }
}

/// Checks that the store after a crash has the old or the new state, that `gc` frees the rest, and that everything
/// can be imported again.
fn judge(
    directory: &Path,
    at: usize,
    old: &BTreeMap<String, image::verity::ImageId>,
    new: &BTreeMap<String, image::verity::ImageId>,
    again: &[(&str, crate::tests::Files)],
) -> Result<(), Failure> {
    let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
    let found = check(&store)?;
    for name in old.keys().chain(new.keys()) {
        let image = found.get(name);
        if image != old.get(name) && image != new.get(name) {
            return Err(format!("{name} is {image:?}").into());
        }
    }
    if check_clean(&store)? != found {
        return Err("gc changed a ref".into());
    }
    // Most states differ only in items that `gc` has just removed.
    if at.is_multiple_of(4) {
        for (name, files) in again {
            import(&store, name, files)?;
        }
        check(&store)?;
    }
    Ok(())
}

/// Records an import that replaces one ref and adds another, into a store that shares objects with it.
fn record_import(files: usize) -> Recorded {
    record(
        |store| {
            import(store, "kept", &sample("kept", files)).unwrap();
            import(store, "replaced", &sample("old", files)).unwrap();
        },
        |store| {
            let transaction = store.begin().unwrap();
            let reference = crate::tests::add(&transaction, &sample("new", files)).unwrap();
            transaction.set_ref(name("replaced"), reference.clone());
            transaction.set_ref(name("added"), reference);
            transaction.commit().unwrap();
        },
    )
}

fn judge_import(recorded: &Recorded, files: usize) -> Result<usize, Failure> {
    let refs = |crashed: &Disk| {
        let directory = fast_directory();
        let states = crashed.crashes(0, 0);
        states.first().unwrap().restore(directory.path());
        check(
            &Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read())
                .unwrap(),
        )
        .unwrap()
    };
    let old = refs(&recorded.before);
    let new = check(&crate::tests::open(recorded.directory.path())).unwrap();
    assert_eq!(old.len(), 2);
    assert_eq!(new.len(), 3);
    assert_ne!(old["replaced:latest"], new["replaced:latest"]);
    let again = [("added", sample("new", files)), ("gone", sample("old", files))];
    recorded.replay(&|directory, at| judge(directory, at, &old, &new, &again))
}

#[test]
fn an_import_of_few_files_survives_a_crash_at_any_moment() {
    let recorded = record_import(1);
    assert!(recorded.changes.iter().any(|it| matches!(it, Change::SyncFile(_))));
    let seen = judge_import(&recorded, 1).unwrap();
    assert!(seen > 15, "{seen} states");
}

#[test]
fn an_import_of_many_files_survives_a_crash_at_any_moment() {
    let recorded = record_import(8);
    let syncs = recorded.changes.iter().filter(|it| **it == Change::SyncEverything).count();
    assert!(syncs >= 1, "{syncs}");
    let seen = judge_import(&recorded, 8).unwrap();
    assert!(seen > 50, "{seen} states");
}

/// The judge must detect a wrong order of the steps.
#[test]
fn a_wrong_order_is_found_out() {
    if !testing::long_tests() {
        return;
    }
    let is_ref = |change: &Change| matches!(change, Change::Rename(_, to) if to.parent().unwrap().ends_with("refs"));
    for files in [1, 8] {
        // Files are not synced before they get their names.
        let mut wrong = record_import(files);
        let named = wrong.changes.iter().position(|it| matches!(it, Change::Rename(..))).unwrap();
        let mut at = 0;
        wrong.changes.retain(|it| {
            at += 1;
            at > named || !matches!(it, Change::SyncFile(_) | Change::SyncEverything)
        });
        judge_import(&wrong, files).unwrap_err();

        // The names of objects are not synced before the refs.
        let mut wrong = record_import(files);
        let first = wrong.changes.iter().position(is_ref).unwrap();
        let named = wrong.changes.iter().position(|it| matches!(it, Change::Rename(..))).unwrap();
        let mut at = 0;
        wrong.changes.retain(|it| {
            at += 1;
            let sync = matches!(it, Change::SyncDirectory(_) | Change::SyncEverything);
            !(named + 1..=first).contains(&at) || !sync
        });
        judge_import(&wrong, files).unwrap_err();

        // The refs are published before the objects.
        let mut wrong = record_import(files);
        let (refs, others): (Vec<_>, Vec<_>) = wrong.changes.into_iter().partition(is_ref);
        let named = others.iter().position(|it| matches!(it, Change::Rename(..))).unwrap();
        wrong.changes = [&others[..named], &refs, &others[named..]].concat();
        judge_import(&wrong, files).unwrap_err();
    }
}

/// As [`record_import`], with devices: the new image shares objects with an existing one, and adds some.
fn record_packed() -> Recorded {
    record(
        |store| {
            import_as(store, "kept", &sample("kept", 9), Form::Packed).unwrap();
            import_as(store, "replaced", &sample("old", 9), Form::Packed).unwrap();
        },
        |store| {
            let transaction = store.begin().unwrap();
            let reference =
                crate::tests::add_as(&transaction, &sample("new", 9), Form::Packed).unwrap();
            transaction.set_ref(name("replaced"), reference.clone());
            transaction.set_ref(name("added"), reference);
            transaction.commit().unwrap();
        },
    )
}

#[test]
fn an_import_of_a_device_survives_a_crash_at_any_moment() {
    let recorded = record_packed();
    let seen = judge_import(&recorded, 9).unwrap();
    assert!(seen > 20, "{seen} states");
}

/// A layer's file is replaced by a file with more information. At each moment there must be one complete file.
#[test]
fn a_record_of_one_more_blob_survives_a_crash_at_any_moment() {
    let blob = image::digest::Digest::sha256(b"a blob");
    let layer_of = |store: &Store| *store.layers.diff_ids().unwrap().first().unwrap();
    let recorded = record(
        |store| {
            import(store, "kept", &sample("kept", 2)).unwrap();
        },
        |store| {
            let transaction = store.begin().unwrap();
            let layer = transaction.reuse_layer(&layer_of(store)).unwrap().unwrap();
            let media_type = "x/y".to_owned();
            let repositories = vec!["localhost:5000/team/app".to_owned()];
            let blob =
                crate::Blob { digest: blob, size: 6, media_type, is_hashed: true, repositories };
            transaction.add_blob(&layer, blob).unwrap();
            transaction.commit().unwrap();
        },
    );
    let refs = check(&crate::tests::open(recorded.directory.path())).unwrap();
    let was_known = std::cell::Cell::new([false; 2]);
    let judge = |directory: &Path, at: usize| {
        let store = Store::open(directory, crate::Who::this_process(), OpenOptions::read())?;
        let layer = store.layers.open(&layer_of(&store))?.ok_or("the layer is gone")?;
        let mut known = was_known.get();
        known[usize::from(layer.info().is_in(&blob))] = true;
        was_known.set(known);
        drop(store);
        judge(directory, at, &refs, &refs, &[("kept", sample("kept", 2))])
    };
    let seen = recorded.replay(&judge).unwrap();
    assert!(seen > 3, "{seen} states");
    assert_eq!(was_known.get(), [true; 2], "before and after");
}

/// The first device of a store creates the directory.
#[test]
fn the_first_device_survives_a_crash_at_any_moment() {
    let recorded = record(
        |store| {
            import(store, "kept", &sample("kept", 2)).unwrap();
        },
        |store| {
            import_as(store, "new", &sample("new", 9), Form::Packed).unwrap();
        },
    );
    let old = BTreeMap::new();
    let new = check(&crate::tests::open(recorded.directory.path())).unwrap();
    let judge = |directory: &Path, at: usize| {
        let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
        drop(store);
        let mut old = old.clone();
        old.insert("kept:latest".to_owned(), new["kept:latest"]);
        judge(directory, at, &old, &new, &[("new", sample("new", 9))])
    };
    let seen = recorded.replay(&judge).unwrap();
    assert!(seen > 15, "{seen} states");
}

/// Another import may have created the directory without syncing it.
#[test]
fn a_directory_for_data_that_another_import_made_survives_a_crash() {
    let recorded = record(
        |store| {
            import(store, "kept", &sample("kept", 2)).unwrap();
        },
        |store| {
            store
                .root
                .make(
                    crate::shelf::devices::DATA,
                    crate::store::mode_of(crate::shelf::devices::DATA, crate::Sharing::Owner),
                )
                .unwrap();
            import_as(store, "new", &sample("new", 9), Form::Packed).unwrap();
        },
    );
    let new = check(&crate::tests::open(recorded.directory.path())).unwrap();
    let old = BTreeMap::from([("kept:latest".to_owned(), new["kept:latest"])]);
    let judge = |directory: &Path, at: usize| {
        judge(directory, at, &old, &new, &[("new", sample("new", 9))])
    };
    recorded.replay(&judge).unwrap();
}

#[test]
fn a_wrong_order_of_devices_is_found_out() {
    let is_data = |change: &Change, index: bool| {
        let Change::Rename(_, to) = change else { return false };
        to.parent().unwrap().ends_with("data")
            && to.extension().is_some_and(|it| it == "index") == index
    };
    let at = |changes: &[Change], index| changes.iter().position(|it| is_data(it, index)).unwrap();
    // The image is published before the device.
    let mut wrong = record_packed();
    let image = wrong.changes.iter().position(
        |it| matches!(it, Change::Rename(_, to) if to.parent().unwrap().ends_with("images")),
    );
    let device = at(&wrong.changes, false);
    let image = wrong.changes.remove(image.unwrap());
    wrong.changes.insert(device, image);
    judge_import(&wrong, 9).unwrap_err();
    // The index is published after the image.
    let mut wrong = record_packed();
    let index = at(&wrong.changes, true);
    let index = wrong.changes.remove(index);
    let refs = wrong.changes.iter().rposition(|it| matches!(it, Change::Rename(..))).unwrap();
    wrong.changes.insert(refs + 1, index);
    judge_import(&wrong, 9).unwrap_err();
}

/// Records a `gc` of a device of which an image needs only a part.
fn record_trimming() -> Recorded {
    record(
        |store| {
            import_as(store, "gone", &sample("gone", 12), Form::Packed).unwrap();
            import_as(store, "kept", &sample("kept", 12), Form::Packed).unwrap();
            store.remove_ref(&name("gone")).unwrap();
        },
        |store| {
            let (_, swept) = store.gc(NOW).unwrap();
            assert!(swept.trimmed >= 4096, "{swept:?}");
        },
    )
}

fn judge_trimming(recorded: &Recorded) -> Result<usize, Failure> {
    let new = check(&crate::tests::open(recorded.directory.path()))?;
    assert_eq!(new.len(), 1);
    let again = [("gone", sample("gone", 12))];
    let judge = |directory: &Path, at: usize| judge(directory, at, &new, &new, &again);
    recorded.replay(&judge)
}

#[test]
fn taking_objects_out_of_a_device_survives_a_crash_at_any_moment() {
    let recorded = record_trimming();
    assert!(recorded.changes.iter().any(|it| matches!(it, Change::Punch(..))));
    let seen = judge_trimming(&recorded).unwrap();
    assert!(seen > 5, "{seen} states");
}

/// The judge must detect it if bytes are freed before the index says so.
#[test]
fn taking_bytes_out_first_is_found_out() {
    let mut wrong = record_trimming();
    let is_index = |it: &Change| matches!(it, Change::Rename(_, to) if to.extension().is_some_and(|it| it == "index"));
    let index = wrong.changes.iter().rposition(is_index).unwrap();
    let (punches, others): (Vec<_>, Vec<_>) =
        wrong.changes.into_iter().partition(|it| matches!(it, Change::Punch(..)));
    wrong.changes = [&others[..index], &punches, &others[index..]].concat();
    judge_trimming(&wrong).unwrap_err();
}

#[test]
fn removing_a_device_survives_a_crash_at_any_moment() {
    let recorded = record(
        |store| {
            import_as(store, "kept", &sample("kept", 9), Form::Packed).unwrap();
            import_as(store, "gone", &sample("gone", 9), Form::Packed).unwrap();
            store.remove_ref(&name("gone")).unwrap();
        },
        |store| {
            let (_, swept) = store.gc(NOW).unwrap();
            assert!(swept.removed >= 6, "{swept:?}");
        },
    );
    let new = check(&crate::tests::open(recorded.directory.path())).unwrap();
    let again = [("gone", sample("gone", 9))];
    let judge = |directory: &Path, at: usize| judge(directory, at, &new, &new, &again);
    assert!(recorded.replay(&judge).unwrap() > 5);
}

#[test]
fn gc_survives_a_crash_at_any_moment() {
    let recorded = record(
        |store| {
            import(store, "kept", &sample("kept", 3)).unwrap();
            import(store, "gone", &sample("gone", 3)).unwrap();
            store.remove_ref(&name("gone")).unwrap();
        },
        |store| {
            let (_, swept) = store.gc(NOW).unwrap();
            assert!(swept.removed >= 7, "{swept:?}");
        },
    );
    let refs = check(&crate::tests::open(recorded.directory.path())).unwrap();
    let again = [("gone", sample("gone", 3))];
    recorded.replay(&|directory, at| judge(directory, at, &refs, &refs, &again)).unwrap();
}

/// `gc` runs beside an import: garbage is set aside, and the import restores some of it.
#[test]
fn gc_beside_an_import_survives_a_crash_at_any_moment() {
    gc_beside_an_import(true);
}

#[test]
fn gc_beside_an_import_without_lists_survives_a_crash_at_any_moment() {
    gc_beside_an_import(false);
}

fn gc_beside_an_import(has_lists: bool) {
    let recorded = record(
        |store| {
            import(store, "gone", &sample("gone", 3)).unwrap();
            store.remove_ref(&name("gone")).unwrap();
        },
        |store| {
            let transaction = store.begin().unwrap();
            let reference = crate::tests::add(&transaction, &sample("gone", 2)).unwrap();
            if !has_lists {
                transaction.forget_lists();
            }
            let (_, swept) = store.gc(NOW).unwrap();
            assert_eq!(swept.set_aside == 0, has_lists, "{swept:?}");
            assert_eq!(swept.freed > 0, has_lists, "{swept:?}");
            transaction.set_ref(name("back"), reference);
            transaction.commit().unwrap();
            store.clear_dead().unwrap();
        },
    );
    let new = check(&crate::tests::open(recorded.directory.path())).unwrap();
    assert_eq!(new.len(), 1);
    let again = [("gone", sample("gone", 3))];
    recorded.replay(&|directory, at| judge(directory, at, &BTreeMap::new(), &new, &again)).unwrap();
}

#[test]
fn making_a_store_survives_a_crash_at_any_moment() {
    let directory = fast_directory();
    let before = Disk::from_directory(directory.path());
    let recorder = Arc::new(Recorder::default());
    Store::open_traced(
        directory.path(),
        crate::Who::this_process(),
        OpenOptions::create(),
        Trace::to(&recorder),
    )
    .unwrap();
    let mut changes = std::mem::take(&mut *recorder.changes.lock().unwrap());
    // A few shards are as good for this test as all of them.
    let is_shard = |change: &Change| matches!(change, Change::MakeDirectory(path) if path.parent().unwrap().ends_with("objects"));
    let mut shards = 0;
    changes.retain(|it| {
        shards += usize::from(is_shard(it));
        !is_shard(it) || shards < 4
    });
    let recorded = Recorded { directory, before, changes };
    let seen = recorded.replay(&|directory, at| {
        let store = Store::open(directory, crate::Who::this_process(), OpenOptions::create())?;
        import(&store, "first", &sample("first", 1))?;
        check_clean(&store)?;
        let done = at == recorded.changes.len();
        if done && Store::open(directory, crate::Who::this_process(), OpenOptions::read()).is_err()
        {
            return Err("made, and not there".into());
        }
        Ok(())
    });
    assert!(seen.unwrap() > 10);
}

#[test]
fn a_kept_container_survives_a_crash_at_any_moment() {
    let recorded = record(
        |store| {
            import(store, "image", &sample("image", 1)).unwrap();
        },
        |store| {
            let image = store.refs.get(&name("image")).unwrap().unwrap().image;
            let record = ContainerRecord {
                image,
                manifest: None,
                name: None,
                created: Seconds(2),
                keep: true,
                shared: None,
                boot: None,
                snapshot: None,
                volumes: Vec::new(),
            };
            drop(store.create_container("kept", &record).unwrap());
        },
    );
    let refs = check(&crate::tests::open(recorded.directory.path())).unwrap();
    recorded
        .replay(&|directory, at| {
            judge(directory, at, &refs, &refs, &[])?;
            let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
            let there = store.containers.all()?.len();
            if at == recorded.changes.len() && there != 1 {
                return Err(format!("{there} containers").into());
            }
            Ok(())
        })
        .unwrap();
}

const LAZY_LENGTH: u64 = 64 << 10;

fn lazy_bytes() -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(LAZY_LENGTH).unwrap()];
    bytes[8000..40_000].fill(7);
    bytes
}

fn lazy_device() -> DeviceId {
    image::verity::digest(image::verity::Algorithm::Sha256, &lazy_bytes()).into()
}

fn fill_all(filling: LazyDeviceFill<'_>) -> Result<(), Failure> {
    filling.write_at(&lazy_bytes()[8000..20_000], 8000)?;
    filling.write_at(&lazy_bytes()[20_000..40_000], 20_000)?;
    Ok(filling.seal()?)
}

fn record_lazy_device() -> Recorded {
    record(
        |store| {
            import(store, "kept", &sample("kept", 2)).unwrap();
        },
        |store| fill_all(store.create_lazy_device(&lazy_device(), LAZY_LENGTH).unwrap()).unwrap(),
    )
}

/// Checks that a sealed device has all of its bytes, and that a device that is not sealed can be filled further.
fn judge_lazy_device(recorded: &Recorded) -> Result<usize, Failure> {
    let refs = check(&crate::tests::open(recorded.directory.path()))?;
    recorded.replay(&|directory, at| {
        let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
        check(&store)?;
        let device = lazy_device();
        let state = store.lazy_devices.stat(&device)?.map(|it| it.state);
        match state {
            Some(LazyDeviceState::Sealed) => {}
            other if at == recorded.changes.len() => return Err(format!("{other:?}").into()),
            None => fill_all(store.create_lazy_device(&device, LAZY_LENGTH)?)?,
            Some(_) => fill_all(store.fill_lazy_device(&device)?.ok_or("somebody fills it")?)?,
        }
        check(&store)?;
        drop(store);
        judge(directory, at, &refs, &refs, &[])
    })
}

#[test]
fn a_lazy_device_survives_a_crash_at_any_moment() {
    let recorded = record_lazy_device();
    let seen = judge_lazy_device(&recorded).unwrap();
    assert!(seen > 10, "{seen} states");
}

#[test]
fn a_lazy_device_that_is_sealed_before_it_is_synced_is_found_out() {
    let mut wrong = record_lazy_device();
    wrong.changes.retain(
        |it| !matches!(it, Change::SyncFile(path) if path.parent().unwrap().ends_with("lazy")),
    );
    judge_lazy_device(&wrong).unwrap_err();
}

#[test]
fn removing_a_lazy_device_survives_a_crash_at_any_moment() {
    let recorded = || {
        record(
            |store| {
                import(store, "kept", &sample("kept", 2)).unwrap();
                fill_all(store.create_lazy_device(&lazy_device(), LAZY_LENGTH).unwrap()).unwrap();
            },
            |store| {
                // A child process of another test may have the device open for a moment.
                crate::tests::eventually(|| store.gc(NOW).unwrap().1.removed >= 2);
            },
        )
    };
    let judge_removal = |recorded: &Recorded| {
        let refs = check(&crate::tests::open(recorded.directory.path()))?;
        recorded.replay(&|directory, at| judge(directory, at, &refs, &refs, &[]))
    };
    let right = recorded();
    assert!(judge_removal(&right).unwrap() > 1);
    // Without a sync of the directory in between, a crash could lose the state but keep the device.
    let mut wrong = recorded();
    wrong.changes.retain(|it| !matches!(it, Change::SyncDirectory(path) if path.ends_with("lazy")));
    judge_removal(&wrong).unwrap_err();
}
