//! Containers that are started again in their own folders, above snapshots, and after a rollback. Needs root.

use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, chown};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use kernel::mount::Durability;
use kernel::process::Signals;
use quire_container::bundle::BundleOptions;
use quire_container::bundle::config::ImageConfig;
use quire_container::folder::{FILESTORE, LAYER, LOG, OVER, REQUEST, STATE, STATE_BEFORE};
use quire_container::life::background;
use quire_container::life::end::reap::{Sweep, clear_dead};
use quire_container::life::kept::{KeptContainer, KeptContainerError};
use quire_container::life::log::newer_text;
use quire_container::life::lookup::{
    self, IfRunning, OwnVolumes, Removal, find_at_rest, find_container,
};
use quire_container::life::prepare::{
    AdmittedImage, CallerEnvironment, PrepareError, Ready, TakenName, prepare, restart,
};
use quire_container::life::rollback::{RollBackError, roll_back};
use quire_container::plan::{ContainerPlan, ContainerRequest, IdsChoice};
use quire_container::request::{ChildBase, StoredRequest};
use quire_container::root::{Via, WritableChoice};
use quire_container::runtime::Runtime;
use rustix::fs::{Mode, OFlags};
use store::{ContainerSnapshotRecord, OpenOptions, Seconds, Store};

use crate::fixture::{Fixture, runtimes, turn};

const SEARCH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Prints one line for each run so far.
const COUNTS: &str = "echo run >> /count; cat /count";

fn wish(id: &str, script: &str, writable: WritableChoice) -> ContainerRequest {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let bundle = BundleOptions { command, ..BundleOptions::new(id.to_owned()) };
    ContainerRequest { bundle, writable, keep: true, ..ContainerRequest::new(id) }
}

const fn folder_choice() -> WritableChoice {
    WritableChoice::Folder(None, Durability::Volatile)
}

/// Calls `work` with the environment of a start.
fn around<T>(work: impl FnOnce(&CallerEnvironment<'_>, Arc<Signals>) -> T) -> T {
    let null = std::fs::File::open("/dev/null").unwrap();
    let around = CallerEnvironment {
        search: SEARCH.as_ref(),
        now: Seconds(1),
        unique: &format!("again{}", std::process::id()),
        terminal: null.as_fd(),
        notes: None,
        networks: None,
        via: Via::Tree,
        remark: &|_| {},
        is_asked_to_end: &|| false,
    };
    work(&around, Arc::new(Signals::block(&[]).unwrap()))
}

fn new(fixture: &Fixture, runtime: &Runtime, wish: ContainerRequest) -> Ready {
    let plan = ContainerPlan::new(ImageConfig::default(), wish, runtime.kind).unwrap();
    let image = AdmittedImage { store: &fixture.store, image: fixture.image() };
    around(|around, signals| {
        prepare(
            &fixture.store,
            image,
            plan,
            runtime.clone(),
            &[],
            signals,
            TakenName::Refused,
            around,
        )
        .unwrap()
    })
}

/// Opens a container at rest. A process that another test has just forked holds all locks for a moment.
fn kept(store: &Store, id: &str) -> Result<KeptContainer, KeptContainerError> {
    let (_, folder) = find_at_rest(store, id, &|| false).unwrap();
    KeptContainer::open(folder.expect("it is at rest"), 9)
}

#[expect(clippy::result_large_err, reason = "the error of the library")]
fn again(fixture: &Fixture, kept: KeptContainer) -> Result<Ready, PrepareError> {
    let image = AdmittedImage { store: &fixture.store, image: fixture.image() };
    let config = ImageConfig::default();
    around(|around, signals| restart(&fixture.store, image, config, kept, &[], signals, around))
}

/// Runs a container to its end, with a thread as its monitor. Returns the monitor's report.
fn watch(make: impl FnOnce() -> Ready + Send) -> Vec<u8> {
    let (mut report, said) = std::io::pipe().unwrap();
    std::thread::scope(|scope| {
        // The mount namespace that is made stays with the thread.
        scope.spawn(move || make().watch(OwnedFd::from(said), None, &|| 7)).join().unwrap();
    });
    let mut bytes = Vec::new();
    report.read_to_end(&mut bytes).unwrap();
    bytes
}

fn log(fixture: &Fixture, id: &str) -> String {
    newer_text(&path(fixture, id))
}

fn path(fixture: &Fixture, id: &str) -> PathBuf {
    quire_container::folder::path(&fixture.store, id)
}

fn remove(fixture: &Fixture, id: &str) {
    assert!(
        Removal::new(&fixture.store, IfRunning::Kill, OwnVolumes::Stay, &|| 9).remove(id).unwrap()
    );
}

/// Makes a snapshot with these files, which belong to this user and group of the host.
fn snapshot(store: &Store, fixture: &Fixture, files: &[(&str, &str)], owner: (u32, u32)) -> String {
    let draft = store.container_snapshots.draft().unwrap();
    let upper = draft.upper().unwrap();
    rustix::fs::fchown(
        &upper,
        Some(rustix::fs::Uid::from_raw(owner.0)),
        Some(rustix::fs::Gid::from_raw(owner.1)),
    )
    .unwrap();
    for (name, text) in files {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&upper, *name, flags, Mode::from_raw_mode(0o644)).unwrap();
        std::io::Write::write_all(&mut std::fs::File::from(file), text.as_bytes()).unwrap();
        let path = format!("/proc/self/fd/{}/{name}", std::os::fd::AsRawFd::as_raw_fd(&upper));
        chown(path, Some(owner.0), Some(owner.1)).unwrap();
    }
    let record = ContainerSnapshotRecord {
        name: Some(format!("s{}", files.len())),
        container: "c".to_owned(),
        image: fixture.found.image,
        manifest: None,
        image_name: None,
        shared: None,
        below: None,
        map: None,
        created: Seconds(1),
        bytes: 0,
        inodes: 0,
        boot: None,
    };
    store.publish_container_snapshot(draft, &record).unwrap().id
}

#[test]
fn an_ended_container_continues_with_its_changes() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let directory = fixture.folder.path().join("own");
    std::fs::create_dir(&directory).unwrap();
    let choices = [
        (folder_choice(), "run\nrun\nrun\n"),
        (WritableChoice::Folder(None, Durability::Durable), "run\nrun\nrun\n"),
        (WritableChoice::Directory(directory.clone(), Durability::Volatile), "run\nrun\nrun\n"),
        (
            WritableChoice::Filestore(std::num::NonZeroU64::new(64 << 20), Durability::Volatile),
            "run\nrun\nrun\n",
        ),
        (WritableChoice::Memory(None), "run\nrun\n"),
    ];
    for (runtime, (writable, expect)) in
        runtimes().iter().flat_map(|it| choices.iter().map(move |choice| (it, choice)))
    {
        let wish = || wish("c", COUNTS, writable.clone());
        assert_eq!(watch(|| new(&fixture, runtime, wish())), [0]);
        // Files that the last run has left must not disturb the next one.
        for name in ["unwanted", "killed", "exec-7.json", "late", "runtime.log"] {
            std::fs::write(path(&fixture, "c").join(name), "7").unwrap();
        }
        let ready = || again(&fixture, kept(&fixture.store, "c").unwrap()).unwrap();
        assert_eq!(watch(ready), [0], "{writable:?}");
        assert_eq!(log(&fixture, "c"), *expect, "{writable:?} {runtime:?}");
        let found = find_container(&fixture.store, "c").unwrap();
        assert_eq!((found.status(), found.code()), ("exited", Some(0)));
        assert!(!path(&fixture, "c").join(STATE_BEFORE).exists());
        remove(&fixture, "c");
        let _gone = std::fs::remove_dir_all(directory.join("upper"));
        let _gone = std::fs::remove_dir_all(directory.join("work"));
    }
}

#[test]
fn a_created_container_waits_for_its_first_start() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let [runtime, ..] = &runtimes()[..] else { return };
    new(&fixture, runtime, wish("c", COUNTS, folder_choice())).keep().unwrap();
    for _ in 0..2 {
        let found = find_container(&fixture.store, "c").unwrap();
        assert_eq!((found.status(), found.is_running(), &found.state), ("created", false, &None));
        assert_eq!(found.command(), ["sh", "-c", COUNTS]);
        // It is not removed as a container whose start failed.
        clear_dead(&fixture.store, Sweep::Thorough, &|| 9);
        assert!(path(&fixture, "c").join(STATE_BEFORE).exists());
        // A command that reads it does not make it look like one that runs.
        let held = kept(&fixture.store, "c").unwrap();
        assert_eq!(find_container(&fixture.store, "c").unwrap().status(), "created");
        drop(held);
    }
    let ready = || again(&fixture, kept(&fixture.store, "c").unwrap()).unwrap();
    assert_eq!(watch(ready), [0]);
    assert_eq!(log(&fixture, "c"), "run\n");
    remove(&fixture, "c");
}

/// A program that does not exist is the container's fault, and does not cost it its changes.
#[test]
fn a_start_that_fails_leaves_the_container_as_it_was() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let [runtime, ..] = &runtimes()[..] else { return };
    let bundle =
        BundleOptions { command: vec!["/none".to_owned()], ..BundleOptions::new("c".to_owned()) };
    let absent = ContainerRequest { bundle, ..wish("c", "", folder_choice()) };
    new(&fixture, runtime, absent.clone()).keep().unwrap();
    let ready = || again(&fixture, kept(&fixture.store, "c").unwrap()).unwrap();
    let said = watch(ready);
    assert!(said.first() == Some(&127) && said.len() > 1, "{said:?}");
    assert_eq!(find_container(&fixture.store, "c").unwrap().status(), "created");
    remove(&fixture, "c");

    assert_eq!(watch(|| new(&fixture, runtime, wish("c", "exit 5", folder_choice()))), [0]);
    let request = StoredRequest::encode(&runtime.path, &absent).unwrap();
    std::fs::write(path(&fixture, "c").join(REQUEST), request).unwrap();
    let said = watch(ready);
    assert_eq!(said.first(), Some(&127), "{said:?}");
    let found = find_container(&fixture.store, "c").unwrap();
    assert_eq!((found.status(), found.code()), ("exited", Some(5)));
    assert!(background::is_over(&path(&fixture, "c")));
    remove(&fixture, "c");
}

#[test]
fn what_cannot_be_continued_is_refused_and_stays() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let [runtime, ..] = &runtimes()[..] else { return };
    let directory = fixture.folder.path().join("own");
    std::fs::create_dir(&directory).unwrap();
    let own = WritableChoice::Directory(directory.clone(), Durability::Volatile);
    for id in ["early", "late"] {
        assert_eq!(watch(|| new(&fixture, runtime, wish(id, "true", own.clone()))), [0]);
    }
    let refused = |id: &str| {
        let kept = kept(&fixture.store, id).map_err(|error| testing::chain(&error));
        let refused = match kept {
            Ok(kept) => testing::chain(&again(&fixture, kept).unwrap_err()),
            Err(error) => error,
        };
        assert_eq!(find_container(&fixture.store, id).unwrap().status(), "exited", "{refused}");
        refused
    };
    let error = refused("early");
    assert!(error.contains("was written to after the container ended"), "{error}");
    assert_eq!(watch(|| again(&fixture, kept(&fixture.store, "late").unwrap()).unwrap()), [0]);
    for id in ["early", "late"] {
        remove(&fixture, id);
    }
    assert_eq!(watch(|| new(&fixture, runtime, wish("c", "true", folder_choice()))), [0]);
    let folder = path(&fixture, "c");
    for (file, text, expect) in [
        ("writable.json", r#"{"kind":"folder","lost":true}"#, "some of its writes are lost"),
        ("writable.json", "", "does not record the location"),
        (REQUEST, r#"{"version":9}"#, "format 9"),
        (REQUEST, "", "damaged"),
    ] {
        let before = std::fs::read(folder.join(file)).unwrap();
        std::fs::write(folder.join(file), text).unwrap();
        let error = refused("c");
        assert!(error.contains(expect), "{error}");
        std::fs::write(folder.join(file), before).unwrap();
    }
    // The kernel's mark of a layer that was not synced, with the id of another boot.
    std::fs::create_dir_all(folder.join(LAYER).join("work").join("work/incompat/volatile"))
        .unwrap();
    std::fs::write(folder.join(LAYER).join("boot_id"), "another\n").unwrap();
    let error = refused("c");
    assert!(error.contains("the host has restarted since"), "{error}");
    remove(&fixture, "c");
}

/// A snapshot's files have the ids of the host, to which the map of its container led.
#[test]
fn files_of_a_snapshot_keep_their_owners_below_a_map() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let script = "test -O /mine && echo mine; cat /mine; test -O /bin/cat && echo image; \
                  echo x > /new; test -O /new && echo new; test -O / && echo root";
    for runtime in runtimes() {
        for (map, owner) in [(Some("0:100000:10\n0:200000:10"), (100_000, 200_000)), (None, (0, 0))]
        {
            let id = snapshot(&fixture.store, &fixture, &[("mine", "text\n")], owner);
            let parent = StoredRequest {
                runtime: runtime.path.clone(),
                request: wish("parent", script, folder_choice()),
            };
            let map = map.map(|it| it.parse().unwrap());
            let base = ChildBase { snapshot: Some(id.clone()), map };
            let wish = parent.for_child("c", base);
            let ids = wish.ids.clone();
            assert_eq!(watch(|| new(&fixture, &runtime, wish)), [0]);
            let expect = "mine\ntext\nimage\nnew\nroot\n";
            assert_eq!(log(&fixture, "c"), expect, "{ids:?}");
            let found = find_container(&fixture.store, "c").unwrap();
            assert_eq!(found.record.unwrap().snapshot.as_deref(), Some(&*id));
            let written = path(&fixture, "c").join(LAYER).join("upper/new");
            let found = std::fs::metadata(written).unwrap();
            assert_eq!((found.uid(), found.gid()), owner);
            // The snapshot is below the container also when it is started again.
            assert_eq!(watch(|| again(&fixture, kept(&fixture.store, "c").unwrap()).unwrap()), [0]);
            assert_eq!(log(&fixture, "c"), format!("{expect}{expect}"), "{ids:?}");
            remove(&fixture, "c");
            assert!(fixture.store.remove_container_snapshot(&id).unwrap());
        }
    }
}

/// Two containers that can both be started must not have the same ids.
#[test]
fn ids_of_a_kept_container_are_not_given_to_others() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let [runtime, ..] = &runtimes()[..] else { return };
    let ids = IdsChoice::Auto(std::num::NonZeroU32::new(100).unwrap());
    let mut maps = Vec::new();
    for id in ["a", "b"] {
        let wish = wish(id, "id -u; echo x > /new; test -O /new && echo mine", folder_choice());
        let wish = ContainerRequest { ids: ids.clone(), ..wish };
        assert_eq!(watch(|| new(&fixture, runtime, wish)), [0]);
        maps.push(std::fs::read_to_string(path(&fixture, id).join("userns")).unwrap());
    }
    assert_ne!(maps[0], maps[1]);
    assert_eq!(watch(|| again(&fixture, kept(&fixture.store, "a").unwrap()).unwrap()), [0]);
    assert_eq!(log(&fixture, "a"), "0\nmine\n0\nmine\n");
    let map = std::fs::read_to_string(path(&fixture, "a").join("userns")).unwrap();
    assert_eq!(map, maps[0]);
    std::fs::remove_file(path(&fixture, "a").join("userns")).unwrap();
    let error = kept(&fixture.store, "a").unwrap_err().to_string();
    assert!(error.contains("map of the user ids of container a is missing"), "{error}");
    for id in ["a", "b"] {
        remove(&fixture, id);
    }
}

const STATES: &str = "cat /count 2>/dev/null || echo clean; cat /mine 2>/dev/null || echo image; \
    echo run >> /count";

#[test]
fn a_rollback_replaces_changes_by_a_snapshot() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let search = SEARCH.as_ref();
    let size = std::num::NonZeroU64::new(64 << 20);
    for (runtime, writable) in runtimes().iter().flat_map(|it| {
        [folder_choice(), WritableChoice::Filestore(size, Durability::Volatile)]
            .map(|writable| (it, writable))
    }) {
        let id = snapshot(&fixture.store, &fixture, &[("mine", "text\n")], (0, 0));
        assert_eq!(watch(|| new(&fixture, runtime, wish("c", STATES, writable.clone()))), [0]);
        let expect = ["clean\nimage\n", "clean\ntext\n", "run\ntext\n", "clean\nimage\n"];
        for (below, number) in [(Some(Some(&*id)), 2), (None, 3), (Some(None), 4)] {
            let mut found = kept(&fixture.store, "c").unwrap();
            if let Some(below) = below {
                found = roll_back(&fixture.store, found, below, search).unwrap();
                assert_eq!(found.record().snapshot.as_deref(), below);
            }
            assert_eq!(watch(|| again(&fixture, found).unwrap()), [0], "{writable:?}");
            assert_eq!(log(&fixture, "c"), expect[..number].concat(), "{writable:?}");
        }
        remove(&fixture, "c");
        assert!(fixture.store.remove_container_snapshot(&id).unwrap());
        lookup::settle(&fixture.store).unwrap();
    }
    let directory = fixture.folder.path().join("own");
    std::fs::create_dir(&directory).unwrap();
    let [runtime, ..] = &runtimes()[..] else { return };
    let own = WritableChoice::Directory(directory.clone(), Durability::Volatile);
    assert_eq!(watch(|| new(&fixture, runtime, wish("c", STATES, own))), [0]);
    let refused = roll_back(&fixture.store, kept(&fixture.store, "c").unwrap(), None, search);
    assert!(matches!(refused, Err(RollBackError::Directory { .. })), "{refused:?}");
    assert!(directory.join("upper/count").exists());
    // A snapshot that does not exist.
    assert_eq!(watch(|| new(&fixture, runtime, wish("d", STATES, folder_choice()))), [0]);
    let found = kept(&fixture.store, "d").unwrap();
    let refused = roll_back(&fixture.store, found, Some("0123456789ab"), search);
    assert!(matches!(refused, Err(RollBackError::Snapshot(_))), "{refused:?}");
    assert!(path(&fixture, "d").join(LAYER).join("upper/count").exists());
    for id in ["c", "d"] {
        remove(&fixture, id);
    }
}

const STORE: &str = "QUIRE_CONTAINER_TEST_STORE";
const SNAPSHOT: &str = "QUIRE_CONTAINER_TEST_SNAPSHOT";

/// Rolls the container `c` of a store back.
#[test]
#[ignore = "a child of another test"]
#[expect(clippy::disallowed_methods, reason = "a test has no other arguments")]
fn rolls_back_in_a_child() {
    let (Ok(path), Ok(snapshot)) = (std::env::var(STORE), std::env::var(SNAPSHOT)) else { return };
    let store = Store::open(Path::new(&path), store::Who::this_process(), OpenOptions::write());
    let store = store.unwrap();
    let found = kept(&store, "c").unwrap();
    drop(roll_back(&store, found, Some(&snapshot), SEARCH.as_ref()).unwrap());
}

/// Kills a rollback at each call that changes the disk. The container then has its old changes above the image, or none
/// above the snapshot, and starts with either.
#[test]
fn a_rollback_that_is_killed_is_done_or_not() {
    let Some(_turn) = turn() else { return };
    if !testing::programs(&["strace"]) {
        return;
    }
    let fixture = Fixture::new();
    let [runtime, ..] = &runtimes()[..] else { return };
    let id = snapshot(&fixture.store, &fixture, &[("mine", "text\n")], (0, 0));
    let size = std::num::NonZeroU64::new(64 << 20);
    let choices = [folder_choice(), WritableChoice::Filestore(size, Durability::Volatile)];
    let calls = "mkdirat,mkdir,renameat2,renameat,rename,linkat,link,unlinkat,unlink,rmdir,write,\
                 fsync,fdatasync,fchmod,fallocate,pwrite64";
    let (mut kills, mut outcomes) = (0, [false; 2]);
    for writable in choices {
        assert_eq!(watch(|| new(&fixture, runtime, wish("c", STATES, writable.clone()))), [0]);
        for call in calls.split(',') {
            for number in 1.. {
                let mut child = Command::new(testing::find_program("strace").unwrap());
                child.args(["-qq", "-o", "/dev/null", "-e", &format!("trace={call}")]);
                child.args(["-e", &format!("inject={call}:signal=KILL:when={number}")]);
                child.arg(std::env::current_exe().unwrap());
                child.args(["--exact", "restart::rolls_back_in_a_child", "--ignored"]);
                child.env(STORE, fixture.store.path()).env(SNAPSHOT, &id);
                let output = child.output().unwrap();
                let is_killed = output.status.signal() == Some(9);
                assert!(is_killed || output.status.success(), "{call} {number}: {output:?}");
                kills += u32::from(is_killed);
                let path = path(&fixture, "c");
                let record = fixture.store.containers.get("c").unwrap().unwrap().record.unwrap();
                let is_done = record.snapshot.is_some();
                assert!(is_done || is_killed);
                outcomes[usize::from(is_done)] |= is_killed;
                let whole = [STATE, OVER, REQUEST, LOG].map(|it| path.join(it).exists());
                assert_eq!(whole, [true; 4], "{call} {number}");
                if matches!(writable, WritableChoice::Folder(..)) {
                    let has_changes = path.join(LAYER).join("upper/count").exists();
                    assert_eq!(has_changes, !is_done, "{call} {number}");
                    assert!(path.join(LAYER).is_dir());
                } else {
                    assert!(path.join(FILESTORE).is_file());
                }
                if is_done {
                    // Back to the image, with changes.
                    let kept = kept(&fixture.store, "c").unwrap();
                    let kept = roll_back(&fixture.store, kept, None, SEARCH.as_ref()).unwrap();
                    std::fs::write(path.join(LOG), "").unwrap();
                    assert_eq!(watch(|| again(&fixture, kept).unwrap()), [0], "{call} {number}");
                    assert_eq!(log(&fixture, "c"), "clean\nimage\n", "{call} {number}");
                }
                if !is_killed {
                    break;
                }
            }
        }
        remove(&fixture, "c");
    }
    assert_eq!(outcomes, [true; 2]);
    assert!(kills > 15, "{kills}");
    // The next command removes what the killed ones have left.
    lookup::settle(&fixture.store).unwrap();
    fixture.store.gc(Seconds(9)).unwrap();
    let left = std::fs::read_dir(fixture.store.path().join("tmp")).unwrap().flatten();
    let left: Vec<_> = left.map(|it| it.path()).filter(|it| it.is_dir()).collect();
    assert_eq!(left, Vec::<PathBuf>::new());
}
