//! Tests the lookup of names.

use tempfile::TempDir;

use super::{NOW, eventually, import, name, open, sample};
use crate::{
    ContainerError, ContainerRecord, Liveness, Reference, ResolveError, Seconds, TransactionError,
};

#[test]
fn names_digests_and_ids_are_found() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let one = import(&store, "one:1", &sample("one", 1)).unwrap();
    let two = import(&store, "docker.io/library/two", &sample("two", 1)).unwrap();
    let manifest = store.refs.get(&name("one:1")).unwrap().unwrap().manifest.unwrap();
    let id = two.to_string();
    for (text, image) in [
        ("one:1", one),
        ("docker.io/library/two", two),
        ("docker.io/library/two:latest", two),
        (&manifest.to_string(), one),
        (&id, two),
        (&id[..6], two),
        (&id[..12].to_uppercase(), two),
    ] {
        let found = store.resolve(text).unwrap();
        assert_eq!(found.image, image, "{text}");
        assert!(found.name.is_some(), "{text}");
    }
    for text in ["one", "two", &id[..5], "sha256:00", "", "../etc", "tow"] {
        assert!(matches!(store.resolve(text), Err(ResolveError::Absent { .. })), "{text}");
    }
    let Err(ResolveError::Absent { nearest, .. }) = store.resolve("one:2") else { panic!() };
    assert_eq!(nearest, [name("one:1")]);
    let Err(ResolveError::Absent { ids, .. }) = store.resolve(&id[..5]) else { panic!() };
    assert_eq!(ids, [two]);
}

#[test]
fn the_beginning_of_several_ids_is_ambiguous() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    for last in ["1", "2"] {
        std::fs::write(directory.path().join("images").join("ab".repeat(31) + "0" + last), "")
            .unwrap();
    }
    let error = store.resolve("ababab").unwrap_err();
    assert!(matches!(&error, ResolveError::Ambiguous { images, .. } if images.len() == 2));
    assert_eq!(error.to_string(), "\"ababab\" is the prefix of 2 image ids: give more digits");
    assert!(store.resolve(&("ab".repeat(31) + "01")).unwrap().name.is_none());
}

#[test]
fn a_ref_that_has_changed_stays() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "app", &sample("one", 1)).unwrap();
    let before = store.refs.get(&name("app")).unwrap().unwrap();
    import(&store, "app", &sample("two", 1)).unwrap();
    let now = store.refs.get(&name("app")).unwrap().unwrap();
    assert_ne!(before.image, now.image);
    assert!(!store.remove_ref_if(&name("app"), &before).unwrap());
    assert_eq!(store.refs.get(&name("app")).unwrap(), Some(now.clone()));
    // Also an image that was imported again, because a user may rely on the new name.
    let again = Reference { created: Seconds(now.created.0 + 1), ..now.clone() };
    store.set_ref(&name("app"), &again).unwrap();
    assert!(!store.remove_ref_if(&name("app"), &now).unwrap());
    assert!(store.remove_ref_if(&name("app"), &again).unwrap());
    assert!(!store.remove_ref_if(&name("app"), &again).unwrap());
    assert_eq!(store.refs.get(&name("app")).unwrap(), None);
}

#[test]
fn refs_are_renamed_and_removed() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "a/b:c", &sample("one", 1)).unwrap();
    let reference = store.refs.get(&name("a/b:c")).unwrap().unwrap();
    store.set_ref(&name("other"), &reference).unwrap();
    assert_eq!(store.remove_ref(&name("a/b:c")).unwrap(), Some(reference.clone()));
    store.remove_ref(&name("a/b:c")).unwrap_err();
    assert_eq!(store.refs.all().unwrap(), [(name("other"), reference)]);
    // A damaged ref can also be removed.
    super::damage::flip(&directory.path().join("refs/other:latest"), 9);
    store.refs.all().unwrap_err();
    assert_eq!(store.remove_ref(&name("other")).unwrap(), None);
    assert!(store.refs.all().unwrap().is_empty());
}

/// A conversion replaces a name in this way, so that concurrent changes of the name are not lost.
#[test]
fn a_ref_is_replaced_as_long_as_it_is_what_was_expected() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let [old, new] = ["old", "new"].map(|it| import(&store, it, &sample(it, 1)).unwrap());
    let reference = |it: &str| store.refs.get(&name(it)).unwrap().unwrap();
    let (ours, theirs) = (reference("new"), reference("old"));
    let replace = |expected| {
        let import = store.begin().unwrap();
        import.expect_ref(name("name"), expected);
        import.set_ref(name("name"), ours.clone());
        import.commit()
    };
    let changed =
        |result| matches!(result, Err(TransactionError::RefChanged(it)) if it == name("name"));
    assert!(changed(replace(old)));
    assert!(store.refs.get(&name("name")).unwrap().is_none());
    store.set_ref(&name("name"), &theirs).unwrap();
    assert!(changed(replace(new)));
    assert_eq!(reference("name"), theirs);
    replace(old).unwrap();
    assert_eq!(reference("name"), ours);
}

#[test]
fn containers_are_alive_while_locked() {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let image = import(&store, "one", &sample("one", 1)).unwrap();
    let record = ContainerRecord {
        image,
        manifest: None,
        name: Some("one".into()),
        created: Seconds(7),
        keep: false,
        shared: None,
        boot: None,
        snapshot: None,
        volumes: Vec::new(),
    };
    for id in ["", ".x", "-x", "a/b", "a b", &"x".repeat(65), "é"] {
        let refused = store.create_container(id, &record).unwrap_err();
        assert!(matches!(refused, ContainerError::Id(_)), "{id}");
    }
    let container = store.create_container("c1", &record).unwrap();
    let taken = store.create_container("c1", &record).unwrap_err();
    assert!(matches!(taken, ContainerError::Exists(_)));
    assert!(store.tmp.list().unwrap().is_empty(), "a refused container left something");
    assert_eq!(store.containers.all().unwrap(), [("c1".into(), record.clone(), Liveness::Alive)]);
    assert!(store.containers.lock("c1").unwrap().is_none());
    assert_eq!(store.clear_dead().unwrap(), 0);

    // The records of living containers are not read by this call; a lookup by name reports the damage.
    let path = directory.path().join("containers/c1/container.json");
    let sound = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "damaged").unwrap();
    let (living, dead) = store.containers.living_and_dead().unwrap();
    assert_eq!((&living[..], dead.len()), (&["c1".to_owned()][..], 0));
    assert_eq!(store.containers.image_of("c1"), None);
    let damaged = store.containers.get("c1").unwrap().unwrap();
    assert!(matches!(damaged.record, Err(ContainerError::Damaged { .. })));
    assert_eq!(damaged.liveness, Liveness::Alive);
    // A list has both kinds.
    let found = store.containers.found().unwrap();
    assert!(matches!(
        &found[..],
        [crate::FoundContainer { record: Err(ContainerError::Damaged { .. }), .. }]
    ));
    assert_eq!(found[0].id, "c1");
    assert!(store.containers.all().unwrap().is_empty());
    std::fs::write(&path, sound).unwrap();
    assert_eq!(store.containers.found().unwrap()[0].record.as_ref().unwrap(), &record);
    assert_eq!(store.containers.image_of("c1"), Some(image));
    assert!(
        store.containers.get("c2").unwrap().is_none()
            && store.containers.get("../x").unwrap().is_none()
    );

    // A duplicate of the lock file's descriptor keeps the container alive, as in a runtime, and gives no access to
    // the directory.
    let lock = container.lock().unwrap().try_clone_to_owned().unwrap();
    let stat = rustix::fs::fstat(&lock).unwrap();
    assert!(rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_size == 0);
    // A duplicate of the directory's descriptor has the same effect, as in a monitor.
    let copy = container.fd().try_clone_to_owned().unwrap();
    drop(container);
    assert_eq!(store.containers.all().unwrap()[0].2, Liveness::Alive);
    drop(lock);
    assert_eq!(store.containers.all().unwrap()[0].2, Liveness::Alive);
    let folder = directory.path().join("containers/c1");
    let lock = std::fs::File::open(folder.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let at =
        rustix::fs::openat(&copy, ".", rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty());
    drop(copy);
    let copy = at.unwrap();
    assert!(store.containers.is_alive("c1").unwrap());
    assert!(store.containers.lock("c1").unwrap().is_none());
    assert_eq!(store.clear_dead().unwrap(), 0);
    assert_eq!(store.containers.all().unwrap()[0].2, Liveness::Alive);
    drop(lock);
    // Leftovers of the container may be at any depth, also deeper than a process has descriptors, or than a path can
    // express.
    let mut at = copy.try_clone().unwrap();
    for _ in 0..1500 {
        rustix::fs::mkdirat(&at, "deeper", rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::DIRECTORY;
        at = rustix::fs::openat(&at, "deeper", flags, rustix::fs::Mode::empty()).unwrap();
    }
    rustix::fs::symlinkat("/etc", &at, "link").unwrap();
    let none = rustix::fs::Mode::empty();
    rustix::fs::mkdirat(&copy, "work", none).unwrap();
    drop(copy);
    eventually(|| store.containers.all().unwrap()[0].2 == Liveness::Dead);
    let (living, dead) = store.containers.living_and_dead().unwrap();
    assert!(living.is_empty() && dead[0].id == "c1");
    assert_eq!(dead[0].record.as_ref().unwrap(), &record);
    eventually(|| store.clear_dead().unwrap() == 1);
    assert!(store.containers.all().unwrap().is_empty());
    assert!(matches!(store.containers.lock("c1"), Err(ContainerError::Absent(_))));

    // A container that is kept stays, and keeps its image.
    let kept = ContainerRecord { keep: true, ..record.clone() };
    drop(store.create_container("c2", &kept).unwrap());
    store.remove_ref(&name("one")).unwrap();
    assert_eq!(store.clear_dead().unwrap(), 0);
    let (plan, _) = store.gc(NOW).unwrap();
    assert_eq!(plan.kept, [crate::Kept::Container(image, "c2".into())]);
    assert_eq!(store.images.ids().unwrap(), [image]);
    eventually(|| match store.containers.lock("c2").unwrap() {
        Some(container) => container.remove().is_ok(),
        None => false,
    });
    store.gc(NOW).unwrap();
    assert!(store.images.ids().unwrap().is_empty());
    let absent = store.create_container("c3", &record).unwrap_err();
    assert!(matches!(absent, ContainerError::NoImage { .. }));
}
