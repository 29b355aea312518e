//! The disk is full: each change to the disk fails in turn, and tests on a disk that is really full.

use std::sync::Arc;

use image::verity::{Algorithm, ObjectId};
use tempfile::TempDir;

use crate::tests::{
    Failure, NOW, check, check_clean, fast_directory, import, import_as, is_root, name, open,
    sample,
};
use crate::trace::{Recorder, Trace};
use crate::{Form, Freeing, LazyDeviceFill, LazyDeviceState, OpenOptions, Store};

/// Runs `command` on a store with one image, and makes its change with the number `at` fail. Returns the result of the
/// command, and the number of changes that it tried.
fn fail(
    at: usize,
    for_good: bool,
    command: &dyn Fn(&Store) -> Result<(), Failure>,
) -> (Result<(), Failure>, usize) {
    let directory = fast_directory();
    let store = open(directory.path());
    let old = import(&store, "old", &sample("old", 2)).unwrap();
    let recorder = Arc::new(Recorder { fail_at: Some(at), for_good, ..Recorder::default() });
    let traced = Store::open_traced(
        directory.path(),
        crate::Who::this_process(),
        OpenOptions::write(),
        Trace::to(&recorder),
    )
    .unwrap();
    let answer = command(&traced);
    drop(traced);

    let found = check(&store).unwrap();
    assert_eq!(found.get("old:latest"), Some(&old), "change {at}");
    // The last steps only remove temporary files. The ref was set before, and errors of these steps are not reported.
    if answer.is_ok() {
        assert_eq!(found.len(), 2, "change {at}");
    }
    assert_eq!(check_clean(&store).unwrap(), found, "change {at}");
    drop(store.remove_ref(&name("gone")));
    import(&store, "new", &sample("new", 2)).unwrap();
    assert_eq!(check_clean(&store).unwrap().len(), 2, "change {at}");
    (answer, recorder.attempts())
}

#[test]
fn whatever_change_fails_the_store_is_the_old_one_or_the_new_one() {
    let import_one = |store: &Store| -> Result<(), Failure> {
        import(store, "new", &sample("new", 2)).map(drop)
    };
    let (answer, changes) = fail(usize::MAX, false, &import_one);
    answer.unwrap();
    assert!(changes > 20, "{changes}");
    let mut failed = 0;
    for at in 0..changes {
        for for_good in [false, true] {
            failed += usize::from(fail(at, for_good, &import_one).0.is_err());
        }
    }
    // All changes fail, except those that remove temporary files.
    assert!(failed > changes, "{failed} of {changes} twice");
}

#[test]
fn whatever_change_of_gc_fails_nothing_is_lost() {
    let collect = |store: &Store| -> Result<(), Failure> {
        import(store, "new", &sample("new", 2))?;
        import(store, "gone", &sample("gone", 2))?;
        store.remove_ref(&name("gone"))?;
        store.gc(NOW)?;
        Ok(())
    };
    let changes = fail(usize::MAX, false, &collect).1;
    for at in (0..changes).rev().take(40) {
        fail(at, true, &collect).0.unwrap_or_default();
    }
}

#[test]
fn whatever_change_of_a_device_fails_the_store_is_the_old_one_or_the_new_one() {
    let import_one = |store: &Store| -> Result<(), Failure> {
        import_as(store, "new", &sample("new", 9), Form::Packed).map(drop)
    };
    let (answer, changes) = fail(usize::MAX, false, &import_one);
    answer.unwrap();
    assert!(changes > 20, "{changes}");
    let mut failed = 0;
    for at in 0..changes {
        failed += usize::from(fail(at, at % 2 == 0, &import_one).0.is_err());
    }
    // All changes fail, except those that remove temporary files.
    assert!(failed > changes / 2, "{failed} of {changes}");
}

#[test]
fn whatever_change_fails_while_a_device_is_trimmed_nothing_is_lost() {
    let collect = |store: &Store| -> Result<(), Failure> {
        import_as(store, "gone", &sample("gone", 12), Form::Packed)?;
        import_as(store, "new", &sample("new", 12), Form::Packed)?;
        store.remove_ref(&name("gone"))?;
        let (_, swept) = store.gc(NOW)?;
        // Without space for the new index, the device is left as it is.
        if swept.trimmed > 0 { Ok(()) } else { Err("the device is not trimmed".into()) }
    };
    let (answer, changes) = fail(usize::MAX, false, &collect);
    answer.unwrap();
    for at in (0..changes).rev().take(40) {
        fail(at, true, &collect).0.unwrap_or_default();
    }
}

#[test]
fn whatever_change_of_a_lazy_device_fails_it_is_right_or_not_sealed() {
    let content = vec![7; 10_000];
    let device = image::verity::digest(image::verity::Algorithm::Sha256, &content).into();
    let bring = |filling: LazyDeviceFill<'_>| {
        filling.write_at(&content, 0)?;
        filling.seal()
    };
    let state = |store: &Store| store.lazy_devices.stat(&device).unwrap().map(|it| it.state);
    let run = |at: usize, for_good: bool| {
        let directory = fast_directory();
        let store = open(directory.path());
        let recorder = Arc::new(Recorder { fail_at: Some(at), for_good, ..Recorder::default() });
        let who = crate::Who::this_process();
        let trace = Trace::to(&recorder);
        let traced =
            Store::open_traced(directory.path(), who, OpenOptions::write(), trace).unwrap();
        let done = traced.create_lazy_device(&device, content.len() as u64).and_then(bring);
        drop(traced);
        let found = state(&store);
        assert!(done.is_err() || found == Some(LazyDeviceState::Sealed), "change {at}: {found:?}");
        if found != Some(LazyDeviceState::Condemned) {
            check(&store).unwrap();
        }
        // The device can be filled after the failure.
        crate::tests::eventually(|| {
            let report = store.fsck(crate::FsckOptions::default()).unwrap();
            drop(store.remove_damaged(&report));
            let filling = match state(&store) {
                None => Some(store.create_lazy_device(&device, content.len() as u64).unwrap()),
                Some(LazyDeviceState::Partial) => store.fill_lazy_device(&device).unwrap(),
                Some(LazyDeviceState::Sealed | LazyDeviceState::Condemned) => None,
            };
            if let Some(filling) = filling {
                bring(filling).unwrap();
            }
            state(&store) == Some(LazyDeviceState::Sealed)
        });
        check(&store).unwrap();
        (found, recorder.attempts())
    };
    let (_, changes) = run(usize::MAX, false);
    assert!(changes > 20, "{changes}");
    let mut condemned = 0;
    for at in 0..changes {
        for for_good in [false, true] {
            condemned += usize::from(run(at, for_good).0 == Some(LazyDeviceState::Condemned));
        }
    }
    assert_eq!(condemned, 2, "after each failed sync of its bytes");
}

/// A file system that is mounted for a test, and unmounted at its end.
struct Mounted(TempDir);

impl Mounted {
    fn tmpfs(options: &std::ffi::CStr) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", directory.path(), "tmpfs", flags, options).ok()?;
        Some(Self(directory))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_is_a_clear_error_and_leaves_the_store_as_it_was() {
    if !is_root() {
        testing::skipped("a full disk: only root can mount a small file system");
        return;
    }
    let Some(mounted) = Mounted::tmpfs(c"size=2m,nr_inodes=600") else {
        testing::skipped("a full disk: tmpfs cannot be mounted here");
        return;
    };
    let directory = mounted.0.path().join("store");
    let store = open(&directory);
    let old = import(&store, "old", &sample("old", 2)).unwrap();
    let mut files = sample("big", 2);
    files.insert("big".into(), (0..3 << 20_u32).map(|it: u32| it.to_le_bytes()[1]).collect());
    let error = import(&store, "big", &files).unwrap_err();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    assert!(text.contains("cannot add an object"), "{text}");
    // The import fails before the disk is full, because the remaining space is reserved for other programs.
    assert!(text.contains("would leave less than"), "{text}");
    assert_eq!(check(&store).unwrap(), [("old:latest".to_owned(), old)].into());
    let plan = store.plan_gc(NOW).unwrap();
    assert!(plan.garbage.is_empty(), "the failed import left {plan:?}");

    // There is space again for a smaller import.
    import(&store, "small", &sample("small", 2)).unwrap();
    assert_eq!(check(&store).unwrap().len(), 2);
}

/// On a full disk, no trash can be made, but `gc` is especially needed then.
#[test]
fn gc_frees_a_full_disk() {
    if !is_root() {
        testing::skipped("a full disk: only root can mount a small file system");
        return;
    }
    for form in [Form::Objects, Form::Packed] {
        let Some(mounted) = Mounted::tmpfs(c"size=4m,nr_inodes=700") else {
            testing::skipped("a full disk: tmpfs cannot be mounted here");
            return;
        };
        let store = open(&mounted.0.path().join("store"));
        import(&store, "kept", &sample("kept", 2)).unwrap();
        import_as(&store, "gone", &sample("gone", 12), form).unwrap();
        store.remove_ref(&name("gone")).unwrap();
        let fillers = mounted.0.path().join("fillers");
        std::fs::create_dir(&fillers).unwrap();
        let fill = |number: u32| std::fs::write(fillers.join(number.to_string()), "");
        let error = (0..).find_map(|it| fill(it).err()).unwrap();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        let (_, swept) = store.gc(NOW).unwrap();
        assert!(swept.removed > 3, "{form:?}: {swept:?}");
        assert_eq!(check_clean(&store).unwrap().len(), 1);
    }
}

/// A device needs space for its new index before its dead parts can be freed. All other garbage is removed before,
/// and one device without an index does not stop the others.
#[test]
fn a_device_that_cannot_be_trimmed_stops_nothing_else() {
    let garbage: ObjectId =
        image::verity::digest(Algorithm::Sha256, &sample("files", 3)["own-2"]).into();
    let run = |at: usize, for_good: bool| {
        let directory = fast_directory();
        let store = open(directory.path());
        import(&store, "files", &sample("files", 3)).unwrap();
        // The second pair of images shares files that the first pair does not have.
        for (gone, kept, count) in [("gone", "kept", 12), ("gone2", "kept2", 24)] {
            import_as(&store, gone, &sample(gone, count), Form::Packed).unwrap();
            import_as(&store, kept, &sample(kept, count), Form::Packed).unwrap();
            store.remove_ref(&name(gone)).unwrap();
        }
        store.remove_ref(&name("files")).unwrap();
        let recorder = Arc::new(Recorder { fail_at: Some(at), for_good, ..Recorder::default() });
        let (who, trace) = (crate::Who::this_process(), Trace::to(&recorder));
        let traced =
            Store::open_traced(directory.path(), who, OpenOptions::write(), trace).unwrap();
        let collected = traced.gc(NOW);
        drop(traced);
        let is_removed = store.objects.open(&garbage).unwrap().is_none();
        check(&store).unwrap();
        let trimmed = store.gc(NOW).unwrap().1.trimmed;
        assert_eq!(check_clean(&store).unwrap().len(), 2, "change {at}");
        (collected, is_removed, trimmed, recorder.attempts())
    };
    let (collected, _, trimmed, changes) = run(usize::MAX, false);
    let (plan, swept) = collected.unwrap();
    assert_eq!((plan.dead.len(), trimmed), (2, 0), "{plan:?}");
    let mut spared = 0;
    for at in 0..changes {
        let (collected, is_removed, trimmed, _) = run(at, false);
        let Ok((plan, partly)) = collected else { continue };
        if plan.dead.iter().any(|it| it.freeing == Freeing::NoSpace) {
            spared += 1;
            assert!(is_removed && partly.trimmed > 0, "change {at}: {partly:?}");
            assert_eq!(partly.trimmed + trimmed, swept.trimmed, "change {at}");
            // The same if the disk stays full.
            let (collected, is_removed, _, _) = run(at, true);
            assert!(is_removed, "change {at}: {collected:?}");
        }
    }
    assert!(spared > 1, "{spared} of {changes}");
}

#[test]
fn a_read_only_store_can_be_read_and_says_so() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import(&store, "old", &sample("old", 2)).unwrap();
    drop(store);

    let store =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    let text = store.begin().unwrap_err().to_string();
    assert!(text.contains("is open read-only"), "{text}");
    let text = store.remove_ref(&name("old")).unwrap_err().to_string();
    assert!(text.contains("is open read-only"), "{text}");
    assert!(store.gc(NOW).unwrap_err().to_string().contains("is open read-only"));

    if !is_root() {
        testing::skipped("a read-only file system: only root can mount one");
        return;
    }
    let again = TempDir::new().unwrap();
    let flags = rustix::mount::MountFlags::RDONLY | rustix::mount::MountFlags::BIND;
    rustix::mount::mount_bind(directory.path(), again.path()).unwrap();
    let mounted = Mounted(again);
    rustix::mount::mount_remount(mounted.0.path(), flags, "").unwrap();
    let text = Store::open(mounted.0.path(), crate::Who::this_process(), OpenOptions::write())
        .unwrap_err()
        .to_string();
    assert!(text.contains("cannot change the store"), "{text}");
    let store =
        Store::open(mounted.0.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    assert_eq!(check(&store).unwrap(), [("old:latest".to_owned(), image)].into());
    store.open_image(&image).unwrap();
    store.plan_gc(NOW).unwrap();
    store.du().unwrap();
}
