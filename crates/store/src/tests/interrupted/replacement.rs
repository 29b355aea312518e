//! A container's directory is replaced, as by a rollback, and the machine stops or the disk is full at any moment.

use std::sync::Arc;

use super::crash::{Recorded, record};
use crate::tests::{Failure, NOW, check, fast_directory, import, name, open, sample};
use crate::trace::{Change, Recorder, Trace};
use crate::{ContainerRecord, OpenOptions, Store};

/// A kept container of the image `one`; its name shows which of two records it is.
fn container(store: &Store, name_of_container: &str) -> ContainerRecord {
    ContainerRecord {
        image: store.refs.get(&name("one")).unwrap().unwrap().image,
        manifest: None,
        name: Some(name_of_container.to_owned()),
        created: NOW,
        keep: true,
        shared: None,
        boot: None,
        snapshot: None,
        volumes: Vec::new(),
    }
}

fn prepare(store: &Store) {
    import(store, "one", &sample("one", 1)).unwrap();
    drop(store.create_container("c", &container(store, "old")).unwrap());
}

fn replace(store: &Store) -> Result<(), Failure> {
    let folder = store.containers.lock("c")?.ok_or("the container is locked")?;
    let replacement = store.replacement_of_container("c", &container(store, "new"))?;
    let (new, old) = store.replace_container(folder, replacement)?;
    assert_eq!(new.record().unwrap().name.as_deref(), Some("new"));
    Ok(old.remove()?)
}

/// Returns the name in the record of the container, whose whole directory must be usable.
fn found(store: &Store) -> Result<String, Failure> {
    check(store)?;
    let containers = store.containers.all()?;
    let [(_, record, _)] = &containers[..] else { return Err(format!("{containers:?}").into()) };
    let folder = store.containers.lock("c")?.ok_or("the container is locked")?;
    if folder.record() != Some(record) {
        return Err(format!("{:?} is not {record:?}", folder.record()).into());
    }
    Ok(record.name.clone().unwrap_or_default())
}

fn judge(recorded: &Recorded) -> Result<usize, Failure> {
    recorded.replay(&|directory, at| {
        let who = crate::Who::this_process();
        let found = found(&Store::open(directory, who, OpenOptions::write())?)?;
        // The last changes remove the old directory, after the exchange became durable.
        let is_done = at == recorded.changes.len();
        match found.as_str() {
            "new" => Ok(()),
            "old" if !is_done => Ok(()),
            other => Err(format!("{other:?} after {at} changes").into()),
        }
    })
}

fn record_replacement() -> Recorded {
    record(prepare, |store| replace(store).unwrap())
}

#[test]
fn a_crash_leaves_a_container_its_old_or_its_new_directory() {
    let recorded = record_replacement();
    let exchanges = recorded.changes.iter().filter(|it| matches!(it, Change::Exchange(..)));
    assert_eq!(exchanges.count(), 1);
    assert!(judge(&recorded).unwrap() > 1);
}

/// Whether a change is left out.
type IsLeftOut = dyn Fn(&Change) -> bool;

#[test]
fn a_replacement_that_is_not_synced_is_found_out() {
    let wrong: [(&str, &IsLeftOut); 3] = [
        (
            "the record",
            &|it| matches!(it, Change::SyncFile(path) if path.ends_with("container.json")),
        ),
        (
            "the new directory",
            &|it| matches!(it, Change::SyncDirectory(path) if path.parent().is_some_and(|it| it.ends_with("tmp"))),
        ),
        (
            "the exchange",
            &|it| matches!(it, Change::SyncDirectory(path) if path.ends_with("containers")),
        ),
    ];
    for (what, is_left_out) in wrong {
        let mut recorded = record_replacement();
        let before = recorded.changes.len();
        recorded.changes.retain(|it| !is_left_out(it));
        assert!(recorded.changes.len() < before, "{what} is never synced");
        assert!(judge(&recorded).is_err(), "without a sync of {what}, a crash does no harm");
    }
}

/// All changes from a step on fail, as if the process had died there.
#[test]
fn a_process_that_dies_leaves_a_container_its_old_or_its_new_directory() {
    for fail_at in 0.. {
        let directory = fast_directory();
        let store = open(directory.path());
        prepare(&store);
        let recorder = Recorder { fail_at: Some(fail_at), for_good: true, ..Recorder::default() };
        let recorder = Arc::new(recorder);
        let (who, options) = (crate::Who::this_process(), OpenOptions::write());
        let traced =
            Store::open_traced(directory.path(), who, options, Trace::to(&recorder)).unwrap();
        let done = replace(&traced);
        let found = found(&store).unwrap_or_else(|error| panic!("after {fail_at}: {error}"));
        if done.is_ok() {
            assert!(fail_at > 5 && found == "new", "{found} after {fail_at} changes");
            return;
        }
        assert!(["old", "new"].contains(&found.as_str()), "{found} after {fail_at} changes");
    }
}
