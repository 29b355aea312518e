//! Tests the service and its keeper as processes that are killed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use image::digest::Digest;
use image::lazy::UNIT;
use image::verity::DeviceId;
use kernel::mount::{Detached, ErofsOptions, erofs};
use kernel::version::KernelVersion;
use oci::blobs::{BlobSource, FailingReader};
use oci::registry::Settings;
use quire_serve::lazy::{
    Brought, ClientError, Completion, ImportResources, LazyResources, LazyService, OtherBlobs,
    Program, Replace, SourcePatience, StoreBlobs, Supply, keep, serve,
};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use store::{LazyDeviceState, Seconds, Store, Trace, TraceRun};
use testing::fake::wait_for;

use super::images::{SILENT, SilentBlob};
use super::{OneBlob, Stage, store};

/// The first Linux version that resends requests that a dead server had taken.
const RESENDS: KernelVersion = KernelVersion { major: 6, minor: 9 };
/// Environment variable with the folder of a test.
const FOLDER: &str = "QUIRE_TEST_FOLDER";

/// Set to end the service of this process.
pub(super) static STOP: AtomicBool = AtomicBool::new(false);

/// The only blob, which is missing, or blocks, while certain files exist.
pub(super) struct FolderBlob {
    blob: OneBlob,
    gone: PathBuf,
    wait: PathBuf,
    die: PathBuf,
    panic: PathBuf,
}

impl BlobSource for FolderBlob {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        while self.wait.exists() && !STOP.load(Ordering::Relaxed) {
            thread::sleep(std::time::Duration::from_millis(5));
        }
        if self.die.exists() {
            // Simulates a bug, or a lack of memory.
            std::process::abort();
        }
        assert!(fs::remove_file(&self.panic).is_err(), "a thread that fetches panics");
        if self.gone.exists() || STOP.load(Ordering::Relaxed) {
            return Box::new(FailingReader::new(io::ErrorKind::NotFound.into()));
        }
        self.blob.blob(digest, size, range)
    }
}

impl FolderBlob {
    fn new(folder: &Path) -> Self {
        let blob = OneBlob::new(fs::read(folder.join("blob")).unwrap());
        let [gone, wait, die, panic] = ["gone", "wait", "die", "panic"].map(|it| folder.join(it));
        Self { blob, gone, wait, die, panic }
    }
}

/// Returns the folder of the test that started this process.
#[expect(clippy::disallowed_methods, reason = "its arguments are those of tests")]
fn folder_here() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).unwrap())
}

/// Returns the source of blobs, which does not respond for one image while a file exists.
fn blobs_of(folder: &Path) -> OtherBlobs {
    let blob = Arc::new(FolderBlob::new(folder));
    let silent = Arc::new(SilentBlob { folder: folder.to_owned(), blob: Arc::clone(&blob) });
    let of_image = move |manifest: Option<&Digest>| -> Arc<dyn BlobSource> {
        match manifest == Some(&Digest::sha256(SILENT)) {
            true => Arc::clone(&silent) as _,
            false => Arc::clone(&blob) as _,
        }
    };
    OtherBlobs { host: "registry".to_owned(), of_image: Box::new(of_image) }
}

pub(super) fn program(folder: &Path, test: &str) -> Program {
    let mut arguments = vec![format!("{FOLDER}={}", folder.display()).into()];
    arguments.push(std::env::current_exe().unwrap().into());
    let test = format!("service::{test}");
    arguments.extend(["--exact", &test, "--ignored", "--nocapture"].map(Into::into));
    Program { path: "/usr/bin/env".into(), arguments }
}

#[test]
#[ignore = "the process of a keeper"]
fn a_keeper() {
    let folder = folder_here();
    note(&folder, "keeper.pid");
    let socket = io::stdin().as_fd().try_clone_to_owned().unwrap();
    keep(socket, &folder.join("run"), &program(&folder, "a_service")).unwrap();
}

#[test]
#[ignore = "the process of a service"]
fn a_service() {
    let folder = folder_here();
    let store = store(&folder.join("lazy"));
    let blobs = StoreBlobs::new(&store, Settings::default()).with_other(blobs_of(&folder));
    let resources = ImportResources {
        now: || Seconds(1_700_000_000),
        threads: NonZeroUsize::MIN,
        scratch: folder.clone(),
    };
    let usual_trace = || "usual".to_owned();
    let of_test = folder.clone();
    let supply = Supply::new(&store, blobs, &usual_trace, &resources).with_sealed(move |device| {
        // The file makes the call fail.
        if of_test.join("refuse").exists() {
            return Err("refused".into());
        }
        Ok(fs::write(of_test.join("sealed"), device.to_string())?)
    });
    let environment = LazyResources {
        options: &[],
        supply: &supply,
        folder: &folder.join("run"),
        keeper: &program(&folder, "a_keeper"),
        complete: &|| {
            assert!(fs::remove_file(folder.join("break")).is_err(), "the service panics");
            match ["complete", "used"].map(|it| folder.join(it).exists()) {
                [true, _] => Completion::Always,
                [false, true] => Completion::After(std::time::Duration::ZERO),
                [false, false] => Completion::Asked,
            }
        },
        patience: &SourcePatience::default(),
        idle: folder.join("idle").exists().then_some(std::time::Duration::from_secs(1)),
        stop: &STOP,
    };
    serve(&store, &environment, Replace::Yes, || note(&folder, "service.pid")).unwrap();
}

/// Writes the number of this process atomically.
#[expect(clippy::disallowed_methods, reason = "it is gone after the test")]
fn note(folder: &Path, name: &str) {
    let draft = folder.join(format!("{name}.draft"));
    fs::write(&draft, std::process::id().to_string()).unwrap();
    fs::rename(draft, folder.join(name)).unwrap();
}

/// A store with an empty device, and a service for it.
pub(super) struct Served {
    /// Whether the kernel resends FUSE requests that a dead service had taken.
    pub(super) resends: bool,
    pub(super) stage: Stage,
    store: Store,
    pub(super) expect: Vec<u8>,
}

impl Served {
    pub(super) fn new() -> Option<Self> {
        let stage = Stage::new()?;
        let folder = stage.folder.path();
        fs::write(folder.join("blob"), &stage.blob.bytes).unwrap();
        let store = store(&folder.join("lazy"));
        drop(store.create_lazy_device(&stage.device(), stage.index.head.device_bytes).unwrap());
        let expect = fs::read(stage.tree.join("words")).unwrap();
        let resends = KernelVersion::running().unwrap() >= RESENDS;
        let served = Self { resends, stage, store, expect };
        served.save_index();
        Some(served)
    }

    /// Saves the index and a trace of all units.
    fn save_index(&self) {
        self.stage.index.save(&self.store).unwrap();
        // More units than exist, because a trace may come from another host.
        let all = TraceRun { device: self.stage.device(), block: 0, blocks: u32::MAX };
        self.save_trace("all", vec![TraceRun { block: 8, blocks: 4, ..all }, all]);
    }

    pub(super) fn save_trace(&self, name: &str, runs: Vec<TraceRun>) {
        let mut traces = self.store.downloads.traces(&self.stage.image).unwrap();
        traces.set(Trace { name: name.to_owned(), runs, start: None }).unwrap();
        self.store.downloads.set_traces(&self.stage.image, &traces).unwrap();
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.stage.folder.path().join(name)
    }

    /// Starts a service, and waits until clients can connect.
    pub(super) fn start(&self) -> Child {
        let _before = fs::remove_file(self.path("service.pid"));
        let Program { path, arguments } = program(self.stage.folder.path(), "a_service");
        // The runner of tests would count the output of this test program as well.
        let child = Command::new(path).args(arguments).stdout(Stdio::null()).spawn().unwrap();
        self.wait_for_service();
        child
    }

    pub(super) fn wait_for_service(&self) {
        wait_for("the service", || self.path("service.pid").exists());
    }

    pub(super) fn pid(&self, name: &str) -> Pid {
        let text = fs::read_to_string(self.path(name)).unwrap();
        Pid::from_raw(text.parse().unwrap()).unwrap()
    }

    /// Sends a signal to the process whose number is in a file, and removes the file.
    pub(super) fn signal(&self, name: &str, signal: Signal) -> Pid {
        loop {
            let pid = self.pid(name);
            fs::remove_file(self.path(name)).unwrap();
            match kill_process(pid, signal) {
                // On a busy machine, a keeper may start two services. The second one replaces the first, and writes
                // its process id last.
                Err(Errno::SRCH) => wait_for("the next one", || self.path(name).exists()),
                killed => {
                    killed.unwrap();
                    return pid;
                }
            }
        }
    }

    pub(super) fn service(&self) -> LazyService {
        LazyService::connect(&self.path("run")).unwrap().unwrap()
    }

    pub(super) fn mount(&self) -> Detached {
        let device = self.service().lend(&self.stage.device()).unwrap();
        self.mount_with(&device)
    }

    pub(super) fn mount_with(&self, device: &File) -> Detached {
        let image = self.stage.full.open_image(&self.stage.image).unwrap();
        let devices = [device.as_fd()];
        let options = ErofsOptions { devices: &devices, ..ErofsOptions::default() };
        erofs(image.image.fd(), &options).unwrap().mount
    }

    /// Reads parts of a file in many threads, and returns how many got an I/O error. Panics on wrong bytes.
    pub(super) fn read(&self, mount: &Detached, readers: usize) -> usize {
        let path = words(mount);
        let failed = AtomicUsize::new(0);
        let next = AtomicUsize::new(0);
        let pages = self.expect.len() / 4096;
        thread::scope(|scope| {
            for _ in 0..readers {
                let one = || {
                    let file = File::open(&path).unwrap();
                    let mut bytes = [0; 4096];
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= readers {
                            return;
                        }
                        // Spread over the whole file.
                        let place = number * 7919 % pages * 4096;
                        match file.read_exact_at(&mut bytes, place as u64) {
                            Ok(()) => assert!(bytes[..] == self.expect[place..place + 4096]),
                            Err(error) => {
                                assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                };
                thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, one).unwrap();
            }
        });
        failed.into_inner()
    }

    /// Checks how many of the readers failed whose service was killed. Before Linux 6.9, requests that the dead service
    /// had taken fail.
    pub(super) fn check_failed(&self, failed: usize, readers: usize) {
        match self.resends {
            true => assert_eq!(failed, 0),
            false => assert!(failed < readers, "all of {readers} readers failed"),
        }
    }

    /// Returns the file that stands for the device. Each read of it is a request, without the page cache of EROFS in
    /// between.
    pub(super) fn lend(&self) -> File {
        self.service().lend(&self.stage.device()).unwrap()
    }

    /// Does the same as [`read`](Self::read) with the device itself.
    pub(super) fn read_device(&self, device: &File, readers: usize) -> usize {
        let expect = self.path("full/data").join(self.stage.device().to_string());
        let expect = fs::read(expect).unwrap();
        let failed = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..readers {
                let (expect, failed) = (&expect, &failed);
                scope.spawn(move || {
                    let place = number * 7919 % (expect.len() / 4096) * 4096;
                    let mut bytes = [0; 4096];
                    match device.read_exact_at(&mut bytes, place as u64) {
                        Ok(()) => assert!(bytes[..] == expect[place..place + 4096]),
                        Err(error) => {
                            assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        failed.into_inner()
    }

    /// Ends a service that has no device in use, and checks that its keeper exits as well.
    pub(super) fn end(&self, service: Child) {
        self.leave();
        self.is_gone(service);
        self.is_over();
    }

    pub(super) fn leave(&self) {
        fs::remove_file(self.path("service.pid")).unwrap();
        self.service().leave().unwrap();
    }

    pub(super) fn state(&self) -> Option<LazyDeviceState> {
        Some(self.store.lazy_devices.stat(&self.stage.index.head.device).unwrap()?.state)
    }

    /// Waits until the device is sealed and its images were completed.
    pub(super) fn wait_for_all(&self) {
        wait_for("all of the device", || self.path("sealed").exists());
        assert_eq!(self.state(), Some(LazyDeviceState::Sealed));
    }

    /// Checks that a service that was asked to exit has exited, and its keeper as well.
    pub(super) fn is_gone(&self, mut service: Child) {
        assert!(service.wait().unwrap().success());
        wait_for("the keeper's end", || !self.path("run/keeper").exists());
    }

    pub(super) fn is_over(&self) {
        wait_for("the keeper's end", || !self.path("run/keeper").exists());
        // The device may have been completed.
        if self.state() != Some(LazyDeviceState::Sealed) {
            let fill = self.store.fill_lazy_device(&self.stage.device()).unwrap();
            assert!(fill.is_some(), "it is let go");
        }
    }
}

impl Drop for Served {
    /// Kills the processes that a failed test leaves.
    fn drop(&mut self) {
        if thread::panicking() {
            for name in ["service.pid", "keeper.pid"] {
                if self.path(name).exists() {
                    let _gone = kill_process(self.pid(name), Signal::KILL);
                }
            }
        }
    }
}

pub(super) fn words(mount: &Detached) -> PathBuf {
    format!("/proc/self/fd/{}/words", mount.as_fd().as_raw_fd()).into()
}

#[test]
fn a_service_that_is_killed_is_succeeded() {
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let mount = served.mount();
    let units = usize::try_from(served.stage.index.head.device_bytes.div_ceil(UNIT)).unwrap();
    // The source hangs, so all readers wait when the service dies.
    for _ in 0..3 {
        fs::write(served.path("wait"), "").unwrap();
        thread::scope(|scope| {
            let readers = scope.spawn(|| served.read(&mount, 64));
            thread::sleep(std::time::Duration::from_millis(50));
            served.signal("service.pid", Signal::KILL);
            fs::remove_file(served.path("wait")).unwrap();
            served.wait_for_service();
            served.check_failed(readers.join().unwrap(), 64);
        });
        // The keeper has started another service.
        assert_eq!(served.read(&mount, 64), 0);
    }
    service.wait().unwrap();
    let status = served.service().status().unwrap();
    assert_eq!((status.len(), status[0].units), (1, units as u64));
    drop(mount);
    served.leave();
    served.is_over();
}

#[test]
fn a_keeper_that_is_killed_is_replaced() {
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let mount = served.mount();
    for _ in 0..3 {
        served.signal("keeper.pid", Signal::KILL);
        assert_eq!(served.read(&mount, 8), 0);
        wait_for("another keeper", || served.path("keeper.pid").exists());
        // The new keeper holds all descriptors of the old keeper, so the service that it starts can serve the mount.
        wait_for("its socket", || served.path("run/keeper").exists());
        thread::sleep(std::time::Duration::from_millis(100));
        served.signal("service.pid", Signal::KILL);
        served.wait_for_service();
        assert_eq!(served.read(&mount, 8), 0);
    }
    service.wait().unwrap();
    drop(mount);
    served.leave();
    served.is_over();
}

#[test]
fn readers_wait_for_the_next_service() {
    let Some(served) = Served::new() else { return };
    let mut first = served.start();
    let mount = served.mount();
    assert_eq!(served.read(&mount, 3), 0);
    // As with `--replace`: readers do not notice the change.
    let mut second = thread::scope(|scope| {
        let readers = scope.spawn(|| served.read(&mount, 1000));
        let second = served.start();
        assert_eq!(readers.join().unwrap(), 0);
        second
    });
    assert!(first.wait().unwrap().success());
    // With a pause between the two services.
    served.leave();
    assert!(second.wait().unwrap().success());
    let third = thread::scope(|scope| {
        let readers = scope.spawn(|| served.read(&mount, 1000));
        thread::sleep(std::time::Duration::from_millis(200));
        let third = served.start();
        assert_eq!(readers.join().unwrap(), 0);
        third
    });
    drop(mount);
    served.end(third);
}

#[test]
fn a_service_that_stands_still_keeps_thousands_of_readers_waiting() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let mount = served.mount();
    let pid = served.pid("service.pid");
    let count = if testing::long_tests() { 20_000 } else { 500 };
    kill_process(pid, Signal::STOP).unwrap();
    thread::scope(|scope| {
        let readers = scope.spawn(|| served.read(&mount, count));
        thread::sleep(std::time::Duration::from_millis(300));
        assert!(!readers.is_finished());
        kill_process(pid, Signal::CONT).unwrap();
        assert_eq!(readers.join().unwrap(), 0);
    });
    drop(mount);
    served.end(service);
}

#[test]
fn what_was_mounted_without_anybody_is_not_lent() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    // A mount of an earlier version of Quire reads the device itself.
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let mount = served.mount_with(&File::open(path).unwrap());
    match served.service().lend(&served.stage.device()) {
        Err(ClientError::Refused(reason)) => assert!(reason.contains("unmount its"), "{reason}"),
        lent => panic!("{lent:?}"),
    }
    drop(mount);
    let mount = served.mount();
    assert_eq!(served.read(&mount, 8), 0);
    drop(mount);
    served.end(service);
}

#[test]
fn what_a_trace_has_is_there_before_it_is_read() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let mount = served.mount();
    assert_eq!(
        served.service().bring(&served.stage.image, Some("other")).unwrap(),
        Brought::Nothing
    );
    // A complete device would no longer be served, so this trace has the units of only one file.
    let device = served.stage.device().to_string();
    let device = fs::read(served.path("full/data").join(device)).unwrap();
    let begins = |it: &[u8]| it == &served.expect[..4096];
    let place = device.windows(4096).position(begins).unwrap() as u64;
    let end = (place + served.expect.len() as u64).div_ceil(UNIT);
    let runs = (place / UNIT, end - place / UNIT);
    let [unit, units] = [runs.0, runs.1].map(|it| u32::try_from(it).unwrap());
    served.save_trace(
        "words",
        vec![TraceRun { device: served.stage.device(), block: unit * 4, blocks: units * 4 }],
    );
    assert_eq!(served.service().bring(&served.stage.image, Some("words")).unwrap(), Brought::Trace);
    let status = || served.service().status().unwrap().remove(0);
    let mut there = status();
    // Other units of the same requests may still be written to the device.
    wait_for("its units", || {
        thread::sleep(std::time::Duration::from_millis(300));
        let before = std::mem::replace(&mut there, status());
        there.filled >= runs.1 && there == before
    });
    let before = &there.counts;
    assert_eq!((before.waits, before.wanted_units), (0, 0));
    assert_eq!(before.ahead_units, there.filled);
    assert_eq!(before.fetched, before.fetched_ahead);
    assert_eq!(before.wasted(), there.filled * UNIT);
    assert_eq!(served.read(&mount, 64), 0);
    let after = status().counts;
    assert_eq!((after.waits, after.requests), (0, before.requests));
    assert!(after.touched_units > 0);
    drop(mount);
    served.end(service);
}

#[test]
fn a_reader_that_reads_on_finds_its_bytes() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let mount = served.mount();
    assert!(fs::read(words(&mount)).unwrap() == served.expect);
    let counts = || served.service().status().unwrap().remove(0).counts;
    // Some reads did not have to wait. The number of prefetched units that were not read is limited.
    wait_for("what is on its way", || counts().touched_units > 0);
    let now = counts();
    assert!(now.ahead_units > 0 && now.waits < served.expect.len() as u64 / UNIT, "{now:?}");
    let vain = now.ahead_units - now.touched_units;
    assert!(vain <= now.wanted_units + now.touched_units + 32 + 4 * now.waits, "{now:?}");
    drop(mount);
    served.end(service);
}

#[test]
fn a_device_with_other_bytes_than_its_name_is_condemned() {
    let Some(mut served) = Served::new() else { return };
    // The index has the right digests of units, but the id of another device.
    let id = DeviceId::from_bytes(&[9; 32]).unwrap();
    served.stage.index.head.device = id;
    served.save_index();
    drop(served.store.create_lazy_device(&id, served.stage.index.head.device_bytes).unwrap());
    let service = served.start();
    let lent = served.service().lend(&id).unwrap();
    let image = served.stage.full.open_image(&served.stage.image).unwrap();
    let devices = [lent.as_fd()];
    let options = ErofsOptions { devices: &devices, ..ErofsOptions::default() };
    let mount = erofs(image.image.fd(), &options).unwrap().mount;
    assert_eq!(served.read(&mount, 1), 0);
    assert_eq!(served.service().bring(&served.stage.image, Some("all")).unwrap(), Brought::Trace);
    wait_for("the condemnation", || served.state() == Some(LazyDeviceState::Condemned));
    wait_for("errors", || fs::read(words(&mount)).is_err());
    wait_for("a refusal", || served.service().lend(&id).is_err());
    assert!(!served.path("sealed").exists());
    // It stays listed until its last mount ends.
    let listed = || served.service().status().unwrap();
    let [status] = &listed()[..] else { panic!("{:?}", listed()) };
    let cause = status.broken.as_deref().unwrap_or_default();
    assert!(cause.contains("is condemned: its digest is"), "{cause}");
    assert_eq!((&status.device, status.filled), (&id.to_string(), status.units));
    assert!(status.is_mounted);
    drop((mount, lent));
    wait_for("its end", || listed().is_empty());
    served.leave();
    served.is_gone(service);
}

#[test]
fn what_could_not_be_made_complete_is_tried_again() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("refuse"), "").unwrap();
    fs::write(served.path("complete"), "").unwrap();
    let service = served.start();
    let mount = served.mount();
    wait_for("the seal", || served.state() == Some(LazyDeviceState::Sealed));
    thread::sleep(std::time::Duration::from_millis(300));
    fs::remove_file(served.path("refuse")).unwrap();
    served.wait_for_all();
    drop(mount);
    served.leave();
    served.is_gone(service);
}

#[test]
fn a_device_is_completed_though_its_source_fails_for_a_while() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("gone"), "").unwrap();
    fs::write(served.path("complete"), "").unwrap();
    let service = served.start();
    let mount = served.mount();
    let status = || served.service().status().unwrap().remove(0);
    assert!(status().is_completing);
    thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(status().filled, 0);
    fs::remove_file(served.path("gone")).unwrap();
    // The device is completed without readers.
    drop(mount);
    served.wait_for_all();
    served.leave();
    served.is_gone(service);
}

#[test]
fn a_device_that_is_used_for_some_time_becomes_complete() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("used"), "").unwrap();
    let service = served.start();
    let mount = served.mount();
    // No program reads the device.
    served.wait_for_all();
    drop(mount);
    served.leave();
    served.is_gone(service);
}

#[test]
fn completion_of_a_used_device_ends_with_its_last_mount() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("used"), "").unwrap();
    // The source fails, so the device does not become complete.
    fs::write(served.path("gone"), "").unwrap();
    let service = served.start();
    let mount = served.mount();
    let status = || served.service().status().unwrap();
    wait_for("the completion", || status().first().is_some_and(|it| it.is_completing));
    drop(mount);
    wait_for("the release of the device", || status().is_empty());
    fs::remove_file(served.path("gone")).unwrap();
    served.end(service);
    assert_eq!(served.state(), Some(LazyDeviceState::Partial));
}

#[test]
fn the_next_service_completes_what_the_one_before_was_asked_for() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("gone"), "").unwrap();
    fs::write(served.path("complete"), "").unwrap();
    let mut service = served.start();
    let mount = served.mount();
    // The next service is not configured to complete all devices.
    fs::remove_file(served.path("complete")).unwrap();
    served.signal("service.pid", Signal::KILL);
    service.wait().unwrap();
    served.wait_for_service();
    fs::remove_file(served.path("gone")).unwrap();
    drop(mount);
    served.wait_for_all();
    served.leave();
    served.is_over();
}
