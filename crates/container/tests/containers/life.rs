//! The whole life of a container with this crate only: planned, prepared, monitored, stopped, kept and removed. Needs
//! root.

use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernel::mount::Durability;
use kernel::process::{Pid, ProcessIdentity, Signals, boot_id};
use quire_container::bundle::BundleOptions;
use quire_container::bundle::config::ImageConfig;
use quire_container::folder::{PID, RUNTIME_PATH, RUNTIME_STATE};
use quire_container::life::end::reap;
use quire_container::life::end::reap::{PUT_OFF, Sweep};
use quire_container::life::log::newer_text;
use quire_container::life::lookup::{self, IfRunning, OwnVolumes, Removal};
use quire_container::life::prepare::{AdmittedImage, CallerEnvironment, Ready, TakenName, prepare};
use quire_container::life::state::State;
use quire_container::life::{background, writable_layer};
use quire_container::plan::{ContainerPlan, ContainerRequest};
use quire_container::root::{Via, WritableChoice};
use quire_container::runtime::Runtime;
use store::{ContainerRecord, Seconds};

use crate::fixture::{Fixture, runtimes, turn};

fn wish(id: &str, script: &str, keep: bool) -> ContainerRequest {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let bundle = BundleOptions { command, ..BundleOptions::new(id.to_owned()) };
    ContainerRequest {
        bundle,
        writable: WritableChoice::Memory(None),
        keep,
        ..ContainerRequest::new(id)
    }
}

fn ready(fixture: &Fixture, runtime: &Runtime, wish: ContainerRequest) -> Ready {
    let plan = ContainerPlan::new(ImageConfig::default(), wish, runtime.kind).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let around = CallerEnvironment {
        search: "/usr/sbin:/usr/bin:/sbin:/bin".as_ref(),
        now: Seconds(1),
        unique: &format!("test{}", std::process::id()),
        terminal: null.as_fd(),
        notes: None,
        networks: None,
        via: Via::Tree,
        remark: &|_| {},
        is_asked_to_end: &|| false,
    };
    let signals = Arc::new(Signals::block(&[]).unwrap());
    let runtime = runtime.clone();
    let image = AdmittedImage { store: &fixture.store, image: fixture.image() };
    prepare(&fixture.store, image, plan, runtime, &[], signals, TakenName::Refused, &around)
        .unwrap()
}

#[test]
fn a_container_in_the_foreground_ends_with_its_programs_code() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    for runtime in runtimes() {
        let finish = std::thread::scope(|scope| {
            // The mount namespace that is created stays with the thread.
            let run = || {
                let wish = wish("front", "echo x > /tmp/new && exit 3", false);
                ready(&fixture, &runtime, wish).run(&|_| {})
            };
            scope.spawn(run).join().unwrap()
        });
        assert_eq!(finish.end.unwrap().exit.shell_code(), 3, "{runtime:?}");
        assert!(!finish.has_lost && finish.stays.is_none());
        assert!(fixture.store.containers.all().unwrap().is_empty());
    }
}

/// A writable layer in the container's folder is removed with the folder.
#[test]
fn a_layer_on_the_disk_goes_with_the_containers_folder() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    for (runtime, keep) in runtimes().iter().flat_map(|it| [(it, true), (it, false)]) {
        let (mut report, said) = std::io::pipe().unwrap();
        std::thread::scope(|scope| {
            let fixture = &fixture;
            let watch = move || {
                let wish = wish("disk", "echo x > /new; sleep 60", keep);
                let writable = WritableChoice::Folder(None, Durability::Volatile);
                let wish = ContainerRequest { writable, ..wish };
                ready(fixture, runtime, wish).watch(OwnedFd::from(said), None, &|| 7);
            };
            let monitor = scope.spawn(watch);
            report.read_exact(&mut [1]).unwrap();
            let folder = quire_container::folder::path(&fixture.store, "disk");
            let new = folder.join("layer/upper/new");
            patiently(|| std::fs::read(&new).unwrap_or_default(), |it| it == b"x\n");
            background::signal(&folder, "disk", "KILL").unwrap();
            monitor.join().unwrap();
            if keep {
                let lock = || fixture.store.containers.lock("disk").unwrap();
                let folder = patiently(lock, Option::is_some).unwrap();
                let changes = writable_layer::Changes::of_ended(folder.path()).unwrap();
                rustix::fs::statat(changes.directory(), "new", rustix::fs::AtFlags::empty())
                    .unwrap();
                drop(changes);
                folder.remove().unwrap();
            }
            let left = || {
                let list = |it: &str| std::fs::read_dir(fixture.store.path().join(it)).unwrap();
                let all = list("containers").chain(list("tmp")).flatten();
                all.map(|it| it.path()).filter(|it| it.is_dir()).collect::<Vec<_>>()
            };
            // The folders are removed in the background, because they may contain many files.
            patiently(left, Vec::is_empty);
        });
    }
}

/// Calls `ask` until `will_do` accepts the result. A process that another test has just forked holds all locks until
/// it executes a program.
fn patiently<T>(ask: impl Fn() -> T, will_do: impl Fn(&T) -> bool) -> T {
    let since = Instant::now();
    loop {
        let found = ask();
        if will_do(&found) {
            return found;
        }
        assert!(since.elapsed() < Duration::from_secs(120), "a lock stays");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_container_that_is_watched_is_kept_and_reaped() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    for (runtime, keep) in runtimes().iter().flat_map(|it| [(it, true), (it, false)]) {
        let (mut report, said) = std::io::pipe().unwrap();
        std::thread::scope(|scope| {
            let fixture = &fixture;
            let watch = move || {
                let wish = wish("behind", "echo out; sleep 60", keep);
                ready(fixture, runtime, wish).watch(OwnedFd::from(said), None, &|| 7);
            };
            let monitor = scope.spawn(watch);
            let mut first = [1];
            report.read_exact(&mut first).unwrap();
            assert_eq!(first, [0], "{runtime:?}");
            let folder = quire_container::folder::path(&fixture.store, "behind");
            assert_eq!(State::load(&folder).unwrap().unwrap().started, 7);
            assert!(fixture.store.containers.is_alive("behind").unwrap());
            // Waits for the program's output.
            let since = Instant::now();
            while newer_text(&folder) != "out\n" {
                assert!(since.elapsed() < Duration::from_secs(120), "the log stays empty");
                std::thread::sleep(Duration::from_millis(10));
            }
            background::signal(&folder, "behind", "KILL").unwrap();
            monitor.join().unwrap();
            if keep {
                let state = State::load(&folder).unwrap().unwrap();
                assert_eq!((state.finished, state.code), (Some(7), Some(137)));
                assert_eq!(newer_text(&folder), "out\n");
                assert!(background::is_over(&folder));
                // A kept container is not reaped.
                assert_eq!(
                    patiently(
                        || reap::clear_dead(&fixture.store, Sweep::Brief, &|| 8),
                        |it| it.1.is_empty()
                    )
                    .0,
                    0
                );
                let lock = || fixture.store.containers.lock("behind").unwrap();
                patiently(lock, Option::is_some).unwrap().remove().unwrap();
            }
            let since = Instant::now();
            while folder.exists() {
                assert!(since.elapsed() < Duration::from_secs(120), "the folder stays");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
    }
}

/// crun behaves like this script: it creates its state directory if it does not exist.
#[test]
fn a_call_that_comes_too_late_makes_no_folder_again() {
    let Some(_turn) = turn() else { return };
    let place = tempfile::tempdir().unwrap();
    let [folder, hidden, go] = ["c", "hidden", "go"].map(|it| place.path().join(it));
    std::fs::create_dir(&folder).unwrap();
    let script = place.path().join("crun");
    let (called, text) = (place.path().join("called"), place.path().display());
    let text = format!(
        "#!/bin/sh\ntouch {text}/called\nuntil test -e {text}/go; do sleep 0.01; done\nmkdir -p \"$2/c\"\n"
    );
    testing::script(&script, &text);
    std::fs::write(folder.join(RUNTIME_PATH), script.as_os_str().as_bytes()).unwrap();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| background::signal(&folder, "c", "TERM"));
        let since = Instant::now();
        while !called.exists() {
            assert!(since.elapsed() < Duration::from_secs(120), "nobody calls the runtime");
            std::thread::sleep(Duration::from_millis(10));
        }
        rustix::fs::rename(&folder, &hidden).unwrap();
        std::fs::write(&go, "").unwrap();
        call.join().unwrap().unwrap();
    });
    assert!(!folder.exists());
    assert!(hidden.join(RUNTIME_STATE).join("c").exists());
}

/// Creates an executable named `crun` in `folder`.
fn script(folder: &Path, text: &str) -> PathBuf {
    let script = folder.join("crun");
    testing::script(&script, &format!("#!/bin/sh\n{text}\n"));
    script
}

/// Creates the folder of a container without a monitor, which a runtime has recorded.
fn left(fixture: &Fixture, id: &str, boot: Option<String>, runtime: &Path, keep: bool) -> PathBuf {
    let record = ContainerRecord {
        image: fixture.found.image,
        manifest: None,
        name: None,
        created: Seconds(1),
        keep,
        shared: None,
        boot,
        snapshot: None,
        volumes: Vec::new(),
    };
    let folder = fixture.store.create_container(id, &record).unwrap();
    let path = folder.path().to_owned();
    std::fs::write(path.join(RUNTIME_PATH), runtime.as_os_str().as_bytes()).unwrap();
    std::fs::create_dir_all(path.join(RUNTIME_STATE).join(id)).unwrap();
    path
}

/// proc_pid_stat(5): the start time of a process is counted from the boot, so a pid and its start time may both occur
/// again after the next boot.
#[test]
fn a_process_of_this_boot_is_not_a_container_of_another() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let called = fixture.folder.path().join("called");
    let runtime = script(fixture.folder.path(), &format!("touch {}", called.display()));
    let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let this = ProcessIdentity::from_pid(Pid::from_child(&other)).unwrap().to_string();
    let boot = boot_id().unwrap();
    for (id, of, boot, is_container) in [
        ("now", this.clone(), boot.clone(), true),
        ("before", this.replace(&boot, "before"), "before".to_owned(), false),
    ] {
        let folder = left(&fixture, id, Some(boot), &runtime, true);
        std::fs::write(folder.join(PID), other.id().to_string()).unwrap();
        let state = serde_json::json!({
            "monitor": 1, "pid": other.id(), "process": of, "started": 1, "stop_signal": "TERM",
            "finished": null, "code": null,
        });
        std::fs::write(folder.join("state.json"), state.to_string()).unwrap();
        let found = patiently(
            || lookup::find_container(&fixture.store, id).unwrap(),
            |it| it.liveness == store::Liveness::Dead,
        );
        assert_eq!(found.is_unwatched, is_container, "{id}");
    }
    // The runtime also identifies processes by pid and start time.
    assert!(
        Removal::new(&fixture.store, IfRunning::Kill, OwnVolumes::Stay, &|| 8)
            .remove("before")
            .unwrap()
    );
    assert!(!called.exists(), "the runtime was called");
    assert!(other.try_wait().unwrap().is_none(), "another process was killed");
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(
        Removal::new(&fixture.store, IfRunning::Kill, OwnVolumes::Stay, &|| 8)
            .remove("now")
            .unwrap()
    );
    assert!(called.exists());
}

/// A runtime may hang, for example because a disk does not respond. Starts must not wait for it repeatedly.
#[test]
fn starts_do_not_wait_for_a_runtime_that_hangs() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    let calls = fixture.folder.path().join("calls");
    let hangs = format!("echo >>{}\nexec sleep 1000", calls.display());
    let runtime = script(fixture.folder.path(), &hangs);
    let folders = [("a", false), ("b", false), ("c", true)]
        .map(|(id, keep)| left(&fixture, id, boot_id(), &runtime, keep));
    let state = serde_json::json!({
        "monitor": 1, "pid": 1, "started": 1, "stop_signal": "TERM", "finished": null, "code": null,
    });
    std::fs::write(folders[2].join("state.json"), state.to_string()).unwrap();
    let called = || std::fs::read(&calls).unwrap_or_default().len();
    let clear = |sweep, now| {
        patiently(|| fixture.store.containers.living_and_dead().unwrap().0, Vec::is_empty);
        reap::clear_dead(&fixture.store, sweep, &|| now).0
    };
    // Only the first container is tried, because the other containers have the same runtime.
    for (now, calls) in [(1000, 1), (1001, 1), (999 + PUT_OFF, 1), (1000 + PUT_OFF, 2), (1000, 3)] {
        assert_eq!(clear(Sweep::Brief, now), 0);
        assert_eq!(called(), calls, "{now}");
    }
    // A thorough sweep tries all containers, and a runtime that works again is called.
    script(fixture.folder.path(), &format!("echo >>{}\nrm -r \"$2\"/*", calls.display()));
    assert_eq!(clear(Sweep::Thorough, 1001), 2);
    assert_eq!(called(), 6);
    assert!(!folders[0].exists() && !folders[1].exists());
    assert!(background::is_over(&folders[2]));
}
