//! Snapshots of containers, while the machine stops or the process dies.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::crash::{Recorded, record};
use crate::tests::snapshots::container_snapshots::{
    BEFORE, add, found, publish, snapshot, this_boot, with_image,
};
use crate::tests::{Failure, check, check_clean, eventually, fast_directory, import, name, sample};
use crate::trace::{Change, Recorder, Trace};
use crate::{ContainerSnapshotError, ContainerSnapshotRecord, OpenOptions, Store};

/// Checks a store with the snapshots `low` and `high`, both of which may be lost. Returns the names of the others.
fn judge_crash(directory: &Path) -> Result<Vec<String>, Failure> {
    let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
    check(&store)?;
    let mut names = Vec::new();
    for (id, record) in store.container_snapshots.all()? {
        match record {
            Err(ContainerSnapshotError::Lost(_)) => continue,
            record => names.extend(record?.name),
        }
        for snapshot in store.container_snapshots.chain(&id)? {
            let text = fs::read_to_string(snapshot.path().join("upper/file"))?;
            if text != "text" {
                return Err(format!("{id} has {text:?}").into());
            }
        }
    }
    names.sort_unstable();
    // A child that another test has just forked may have a snapshot open.
    eventually(|| {
        let is_clean = check_clean(&store).is_ok();
        is_clean && store.container_snapshots.all().is_ok_and(|it| it.len() == names.len())
    });
    Ok(names)
}

/// Records the snapshot `low`, and `high` above it, which are settled together.
fn record_settle() -> Recorded {
    record(
        |store| {
            import(store, "one", &sample("one", 1)).unwrap();
        },
        |store| {
            store.container_snapshots.set_boot(BEFORE);
            let unsettled = |name: &str, below: Option<&str>| {
                let boot = Some(BEFORE.to_owned());
                let record = snapshot(store, Some(name), below);
                publish(store, &ContainerSnapshotRecord { boot, ..record }).unwrap().id
            };
            let low = unsettled("low", None);
            let high = unsettled("high", Some(&low));
            store.settle_container_snapshot(&high).unwrap();
        },
    )
}

fn judge_settle(recorded: &Recorded) -> Result<usize, Failure> {
    recorded.replay(&|directory, at| {
        let names = judge_crash(directory)?;
        let is_done = at == recorded.changes.len();
        match names.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["high", "low"] => Ok(()),
            // The lower one becomes durable first.
            [] | ["low"] if !is_done => Ok(()),
            _ => Err(format!("{names:?}").into()),
        }
    })
}

#[test]
fn a_crash_leaves_a_whole_snapshot_or_none() {
    assert!(judge_settle(&record_settle()).unwrap() > 10);
}

#[test]
fn a_snapshot_that_is_settled_before_it_is_synced_is_found_out() {
    let mut wrong = record_settle();
    wrong.changes.retain(|it| *it != Change::SyncEverything);
    judge_settle(&wrong).unwrap_err();
}

#[test]
fn a_durable_snapshot_survives_a_crash_at_any_moment() {
    let recorded = record(
        |store| {
            import(store, "one", &sample("one", 1)).unwrap();
        },
        |store| drop(add(store, Some("durable"), None)),
    );
    let judge = |directory: &Path, at| match judge_crash(directory)?.len() {
        1 => Ok(()),
        0 if at < recorded.changes.len() => Ok(()),
        other => Err(format!("{other} snapshots").into()),
    };
    assert!(recorded.replay(&judge).unwrap() > 5);
}

#[test]
fn a_removal_survives_a_crash_at_any_moment() {
    let recorded = record(
        |store| {
            import(store, "one", &sample("one", 1)).unwrap();
            let low = add(store, Some("low"), None);
            add(store, Some("high"), Some(&low));
        },
        |store| {
            for name in ["low", "high"] {
                let id = store.container_snapshots.find(name).unwrap().id;
                store.remove_container_snapshot(&id).unwrap();
            }
            eventually(|| {
                store.clear_container_snapshots().unwrap();
                store.container_snapshots.all().unwrap().is_empty()
            });
        },
    );
    let judge = |directory: &Path, at| {
        let names = judge_names(directory)?;
        match (names.as_slice(), at == recorded.changes.len()) {
            ([], _) | ([_] | [_, _], false) => Ok(()),
            _ => Err(format!("{names:?}").into()),
        }
    };
    assert!(recorded.replay(&judge).unwrap() > 5);
}

/// As [`judge_crash`], if a snapshot without a name may be needed.
fn judge_names(directory: &Path) -> Result<Vec<String>, Failure> {
    let store = Store::open(directory, crate::Who::this_process(), OpenOptions::write())?;
    check(&store)?;
    // A child that another test has just forked may have a snapshot open.
    eventually(|| {
        check_clean(&store).is_ok() && !store.has_unneeded_container_snapshots().unwrap()
    });
    let mut names = Vec::new();
    for (id, record) in store.container_snapshots.all()? {
        names.extend(record?.name);
        store.container_snapshots.chain(&id)?;
    }
    // `low` may have lost its name and be below `high`.
    if !names.is_empty() && !names.contains(&"high".to_owned()) {
        return Err(format!("{names:?}").into());
    }
    Ok(names)
}

/// The process is killed, or the disk is full, at any step: all changes from then on fail.
#[test]
fn a_process_that_dies_leaves_whole_snapshots() {
    let steps = |store: &Store| -> Result<(), Failure> {
        let low = publish(
            store,
            &ContainerSnapshotRecord { boot: this_boot(), ..snapshot(store, Some("low"), None) },
        )?
        .id;
        store.settle_container_snapshot(&low)?;
        let high = publish(store, &snapshot(store, Some("high"), Some(&low)))?.id;
        store.remove_container_snapshot(&low)?;
        store.remove_container_snapshot(&high)?;
        store.clear_container_snapshots()?;
        Ok(())
    };
    for fail_at in 0.. {
        let directory = fast_directory();
        let store = with_image(directory.path());
        let recorder = Recorder { fail_at: Some(fail_at), for_good: true, ..Recorder::default() };
        let recorder = Arc::new(recorder);
        let (who, options) = (crate::Who::this_process(), OpenOptions::write());
        let traced = Store::open_traced(directory.path(), who, options, Trace::to(&recorder));
        let done = steps(&traced.unwrap());
        let found = check(&store).unwrap();
        for (id, record) in store.container_snapshots.all().unwrap() {
            record.unwrap_or_else(|error| panic!("after {fail_at} changes: {error}"));
            for snapshot in store.container_snapshots.chain(&id).unwrap() {
                assert_eq!(fs::read(snapshot.path().join("upper/file")).unwrap(), b"text");
            }
        }
        // The names that are left can be removed.
        for name in ["low", "high"] {
            if let Ok(id) = found_id(&store, name) {
                store.remove_container_snapshot(&id).unwrap();
            }
        }
        eventually(|| {
            store.clear_container_snapshots().unwrap();
            store.container_snapshots.all().unwrap().is_empty()
        });
        assert_eq!(check_clean(&store).unwrap(), found, "after {fail_at} changes");
        if done.is_ok() {
            assert!(fail_at > 20, "{fail_at}");
            return;
        }
    }
}

fn found_id(store: &Store, name: &str) -> Result<String, String> {
    found(store.container_snapshots.find(name))
}

/// Publishes, settles and removes snapshots forever, until this process is killed.
pub(super) fn publish_forever(store: &Store) {
    import(store, "snapshots", &sample("snapshots", 1)).unwrap();
    let image = store.refs.get(&name("snapshots")).unwrap().unwrap().image;
    let mut below = None;
    for round in 0_usize.. {
        let record = ContainerSnapshotRecord {
            image,
            name: Some(format!("s-{}", round % 6)),
            boot: this_boot().filter(|_| round % 3 > 0),
            ..snapshot(store, None, below.as_deref())
        };
        // Earlier processes have left names.
        if let Ok(old) = found_id(store, &format!("s-{}", round % 6)) {
            store.remove_container_snapshot(&old).unwrap();
        }
        // The one below may have been removed as garbage.
        let Ok(made) = publish(store, &record) else {
            below = None;
            continue;
        };
        if round % 2 == 0 {
            store.settle_container_snapshot(&made.id).unwrap();
        }
        below = Some(made.id).filter(|_| round % 5 < 4);
    }
}
