//! Existing containers: commands find, inspect, kill and remove them.

mod remove;
mod restarts;

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::process::{Holder, Process, Signal};
use kernel::usage::usage_of;
use rustix::fs::{FlockOperation, flock};
use store::{
    ContainerDir, ContainerError, ContainerRecord, Liveness, OperationError, Store, VolumeError,
};

use crate::backoff::GLANCE;
use crate::bundle::spec::RuntimeSpec;
use crate::folder::{self, LAYER, STOPPING};
use crate::life::cgroup::{cgroups, pause};
pub use crate::life::end::own_volumes::OwnVolumes;
use crate::life::state::{Reason, State, StateBefore};
use crate::life::writable_layer::{Changes, WritesPlace};
use crate::life::{background, init_signals};
use crate::runtime::call::KILLING;
use crate::store_ownership::{OwnerError, check_containers};

pub use remove::{IfRunning, Removal};

/// Reason why an operation on a container failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KnownError {
    /// The store's containers cannot be listed.
    #[error(transparent)]
    Containers(#[from] ContainerError),
    /// Another user can change the containers.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// The name or id does not match any container.
    #[error("there is no container \"{name}\"")]
    Absent {
        /// The name, or the start of an id, as given.
        name: String,
        /// At most three names of containers that start with `name` or are similar, the most similar first.
        nearest: Vec<String>,
    },
    /// Several ids start with the given text.
    #[error("\"{name}\" is the prefix of containers {one} and {other}: give more of the id")]
    Ambiguous {
        /// The start of an id.
        name: String,
        /// A matching id.
        one: String,
        /// Another matching id.
        other: String,
    },
    /// The container's state exists, but cannot be read.
    #[error("cannot read the state of container {id}")]
    State { id: String, source: std::io::Error },
    /// The container's own volumes cannot be kept, or marked for their removal.
    #[error("cannot change the volumes of container {id}")]
    Volumes { id: String, source: Box<VolumeError> },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The container runs, and must be stopped first.
    #[error("container {0} is running: `quire stop {0}` first, or use --force")]
    Runs(String),
    /// The container has ended or is damaged.
    #[error("container {id} is not running: its status is {status}")]
    Over { id: String, status: &'static str },
    /// The start takes too long.
    #[error("container {0} has not started yet")]
    NotStarted(String),
    /// The program has ended, and the monitor waits before the next run.
    #[error(
        "container {id} is restarting: its program exited ({code}), and its restart policy starts it again; `quire logs \
        {id}` may show why it ends"
    )]
    Restarting { id: String, code: i32 },
    /// A signal arrived during the start.
    #[error("interrupted while starting container {0}")]
    Interrupted(String),
    /// The signal cannot be sent.
    #[error("{0}")]
    Untold(String),
    /// The container was killed, but keeps running.
    #[error("container {0} was killed, but does not end")]
    Deaf(String),
    /// Another process holds the container's lock for too long.
    #[error("container {0} is in use")]
    InUse(String),
}

/// A container, with its state at the time when this value was created.
#[derive(Debug)]
pub struct KnownContainer {
    pub id: String,
    /// `None` if the record is damaged.
    pub record: Option<ContainerRecord>,
    /// Whether the monitor runs.
    pub liveness: Liveness,
    pub folder: PathBuf,
    /// `None` before the container has started, and for a container in the foreground.
    pub state: Option<State>,
    /// Whether the container was only created, and has never been started.
    pub is_created: bool,
    /// Whether the program runs although the monitor is gone.
    pub is_unwatched: bool,
}

impl KnownContainer {
    fn load(
        store: &Store,
        id: String,
        record: Option<ContainerRecord>,
        liveness: Liveness,
    ) -> Result<Self, KnownError> {
        let folder = folder::path(store, &id);
        let mut state = load_state(&folder, &id)?;
        let mut is_created = false;
        // A command that reads a container at rest holds its lock.
        if state.is_none() && (liveness == Liveness::Dead || background::is_over(&folder)) {
            let failed = |source| KnownError::State { id: id.clone(), source };
            match StateBefore::load(&folder).map_err(failed)? {
                StateBefore::Created => is_created = true,
                // A start in this folder was interrupted.
                StateBefore::Ended(before) => state = Some(before),
                StateBefore::None | StateBefore::Unknown => {}
            }
        }
        let is_over = state.as_ref().is_some_and(|it| it.finished.is_some());
        let is_unwatched = liveness == Liveness::Dead
            && record.is_some()
            && !is_over
            && !background::is_over(&folder)
            && first_process(&folder, state.as_ref()).is_some();
        Ok(Self { id, record, liveness, folder, state, is_created, is_unwatched })
    }

    /// Whether the program runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.is_watched() || self.is_unwatched
    }

    /// Whether both the program and its monitor run.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        // If the program has ended, the monitor is taking the container down.
        let is_over = self.state.as_ref().is_some_and(|it| it.finished.is_some());
        self.liveness == Liveness::Alive && !is_over && !self.is_created
    }

    /// `created` (the container has never been started), `running`, `restarting` (the program has ended, and the
    /// monitor waits before it starts it again), `unwatched` (the program runs, but its monitor is
    /// gone), `exited`, `lost` (the program has ended, and its exit code is unknown), or `damaged`.
    #[must_use]
    pub fn status(&self) -> &'static str {
        if self.record.is_none() {
            return "damaged";
        }
        match (&self.state, self.liveness) {
            (Some(State { finished: Some(_), code: Some(_), .. }), _) => "exited",
            _ if self.is_created => "created",
            (Some(State { delay: Some(_), .. }), Liveness::Alive) => "restarting",
            (_, Liveness::Alive) => "running",
            _ if self.is_unwatched => "unwatched",
            (_, Liveness::Dead) => "lost",
        }
    }

    /// Whether a command stops the container now.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        let is_held = |file: File| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err();
        self.is_running() && File::open(self.folder.join(STOPPING)).is_ok_and(is_held)
    }

    /// Returns whether the disk has lost some of the container's writes.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.state.as_ref().is_some_and(|it| it.lost)
    }

    /// Returns why the container ended, unless the program exited by itself.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        self.state.as_ref().and_then(|it| it.reason)
    }

    /// Returns the exit code.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.state.as_ref().and_then(|it| it.code)
    }

    /// Returns the container's command, from its bundle.
    #[must_use]
    pub fn command(&self) -> Vec<String> {
        // A list of many containers asks for each of them, and the whole configuration is many times as long.
        RuntimeSpec::load_args(&self.folder).unwrap_or_default()
    }

    /// Returns the size of the writable layer in bytes, as its file system counts it, including data that is not yet
    /// on disk. `None` if unknown: for a directory of the user, and for a container whose monitor was killed, unless
    /// its writable layer is a directory in its folder. For such a directory, files that this process may not read
    /// are left out.
    #[must_use]
    pub fn written(&self) -> Option<u64> {
        let place = WritesPlace::load(&self.folder);
        if !self.is_watched() && !matches!(place, Some(WritesPlace::Folder { .. })) {
            return self.state.as_ref().and_then(|it| it.written);
        }
        match place? {
            WritesPlace::None => Some(0),
            WritesPlace::Memory | WritesPlace::Filestore { .. } => {
                let changes = Changes::of_running(&self.folder).ok()?;
                crate::root::headroom::written(changes.directory()).ok()
            }
            WritesPlace::Folder { .. } => {
                usage_of(&self.folder.join(LAYER)).ok().map(|it| it.bytes)
            }
            WritesPlace::Directory { .. } => None,
        }
    }

    /// Returns whether the container still runs. The data of a kept container may still be on its way to the disk
    /// after the container's end.
    ///
    /// # Errors
    /// [`KnownError`] if the lock cannot be tried.
    pub fn is_alive(&self, store: &Store) -> Result<bool, KnownError> {
        if !store.containers.is_alive(&self.id)? {
            return Ok(false);
        }
        if !self.record.as_ref().is_some_and(|it| it.keep) {
            return Ok(true);
        }
        Ok(match self.state_now()? {
            Some(state) => state.finished.is_none(),
            // A container that is started again counts as at rest until the runtime may be called.
            None => !background::is_over(&self.folder),
        })
    }

    /// Returns the current state.
    pub fn state_now(&self) -> Result<Option<State>, KnownError> {
        load_state(&self.folder, &self.id)
    }

    /// Kills the container, and waits for its end. Its program is not started again.
    pub fn kill(&self, store: &Store) -> Result<(), KnownError> {
        self.kill_again(store, false)
    }

    /// As [`Self::kill`]. If the container `was_told` to end before, it is signalled again only if it stays.
    fn kill_again(&self, store: &Store, mut was_told: bool) -> Result<(), KnownError> {
        self.note_stopped(KILL)?;
        let since = Instant::now();
        let mut forced = 0_u32;
        loop {
            // A container that is still being started cannot be signalled yet.
            let told = match std::mem::take(&mut was_told) || self.is_restarting()? {
                true => Ok(()),
                false => background::signal(&self.folder, &self.id, "KILL"),
            };
            if told.is_ok() && !background::wait(Some(PAUSED), &|| self.is_alive(store))? {
                // Another command may have paused the container to read its changes. A paused container ends only
                // after it is resumed.
                pause::resume(&self.folder, &self.id);
            }
            let pause = if told.is_ok() { STUCK } else { AGAIN };
            if background::wait(Some(pause), &|| self.is_alive(store))? {
                return Ok(());
            }
            // The container should have ended by now, whatever the runtime reports.
            if since.elapsed() >= STUCK * (forced + 1) {
                self.end_without_runtime(forced > 0);
                forced = forced.saturating_add(1);
                // The runtime may hang again when it is called.
                if background::wait(Some(STUCK), &|| self.is_alive(store))? {
                    return Ok(());
                }
            }
            if since.elapsed() >= DEATH {
                told.map_err(KnownError::Untold)?;
                return Err(KnownError::Deaf(self.id.clone()));
            }
        }
    }
}

impl KnownContainer {
    /// Kills a container without calling its runtime, which may be stuck. Kills the container's processes and the
    /// runtime itself, because the runtime also holds the container's lock. The monitor then records the end and
    /// cleans up, which may take a while on a busy host. If the monitor is `deaf`, it is killed as well.
    fn end_without_runtime(&self, deaf: bool) {
        let id = &self.id;
        cgroups::kill(&self.folder);
        let holders = File::open(self.folder.join(folder::LOCK)).map_err(|it| it.to_string());
        let holders = holders.and_then(|lock| {
            kernel::process::holders(lock.as_fd()).map_err(|errno| errno.to_string())
        });
        let holders = holders.unwrap_or_else(|error| {
            tracing::debug!(id, %error, "cannot look for the runtime's process");
            Vec::new()
        });
        let is_holder = |pid| holders.iter().any(|it| Some(it.process.pid()) == pid);
        let first = first_process(&self.folder, self.state.as_ref()).or_else(|| {
            // A first process without recorded state and cgroup is recognized as a child of its runtime.
            let process = Process::open(init_signals::first_process(&self.folder)?).ok()?;
            is_holder(kernel::process::parent_of(process.pid())).then_some(process)
        });
        let is_monitor = |it: &Holder| match &self.state {
            Some(state) => {
                i32::try_from(state.monitor) == Ok(it.process.pid().as_raw_nonzero().get())
            }
            // A monitor without recorded state is recognized as the parent of the runtime.
            None => {
                let mut parents = holders.iter().map(|it| it.parent);
                !is_holder(it.parent) && parents.any(|parent| parent == Some(it.process.pid()))
            }
        };
        let doomed = holders.iter().filter(|it| deaf || !is_monitor(it));
        for process in first.iter().chain(doomed.map(|it| &it.process)) {
            let pid = process.pid().as_raw_nonzero().get();
            tracing::info!(id, pid, "killing, because the runtime does not end the container");
            let _gone = process.signal(Signal::KILL);
        }
    }
}

/// Returns the first process of a container that may have no monitor, if the process is identified with certainty.
fn first_process(folder: &Path, state: Option<&State>) -> Option<Process> {
    if let Some(noted) = state.and_then(|it| it.process.as_ref()) {
        return noted.open();
    }
    let pid = init_signals::first_process(folder)?;
    let process = Process::open(pid).ok()?;
    cgroups::has(folder, pid).then_some(process)
}

/// The number of `SIGKILL`.
const KILL: u8 = 9;

/// Time after which the runtime counts as stuck. After the same time again, the monitor counts as stuck.
const STUCK: Duration = KILLING;

/// Time for the kernel to end killed processes.
const DEATH: Duration = Duration::from_secs(20);

/// Time in which a killed container ends unless it is paused.
const PAUSED: Duration = Duration::from_millis(500);

/// Interval between signals to a container that has not started yet.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);

fn load_state(folder: &Path, id: &str) -> Result<Option<State>, KnownError> {
    State::load(folder).map_err(|source| KnownError::State { id: id.to_owned(), source })
}

/// Returns all containers of a store.
pub fn all(store: &Store) -> Result<Vec<KnownContainer>, KnownError> {
    let found = store.containers.found()?.into_iter();
    found.map(|it| KnownContainer::load(store, it.id, it.record.ok(), it.liveness)).collect()
}

/// Returns the size of the writable layers of all containers of a store, in bytes.
pub fn all_written(store: &Store) -> Result<u64, KnownError> {
    Ok(all(store)?.iter().filter_map(KnownContainer::written).sum())
}

/// Returns the ids only, so that an unreadable state of one container does not hide the others.
fn ids(store: &Store) -> Result<Vec<String>, KnownError> {
    Ok(store.containers.ids().map_err(ContainerError::from)?)
}

/// Finds a container by its name or by an unambiguous start of its id; `None` if there is none.
fn look(store: &Store, name: &str) -> Result<Option<KnownContainer>, KnownError> {
    // As in podman and Docker, whose own names begin with a slash.
    let name = name.strip_prefix('/').unwrap_or(name);
    if let Some(it) = store.containers.get(name)? {
        return KnownContainer::load(store, it.id, it.record.ok(), it.liveness).map(Some);
    }
    let mut ids = ids(store)?;
    // Names must be complete, as in Docker.
    let is_id = |id: &str| id.len() == 12 && id.bytes().all(|it| it.is_ascii_hexdigit());
    ids.retain(|id| !name.is_empty() && is_id(id) && id.starts_with(name));
    if let [one, other, ..] = &ids[..] {
        let (name, one, other) = (name.to_owned(), one.clone(), other.clone());
        return Err(KnownError::Ambiguous { name, one, other });
    }
    let Some(id) = ids.pop() else { return Ok(None) };
    let Some(it) = store.containers.get(&id)? else { return Ok(None) };
    KnownContainer::load(store, it.id, it.record.ok(), it.liveness).map(Some)
}

/// Finds a container by its name or by an unambiguous start of its id.
pub fn find_container(store: &Store, name: &str) -> Result<KnownContainer, KnownError> {
    check_containers(store)?;
    if let Some(it) = look(store, name)? {
        return Ok(it);
    }
    let ids = ids(store)?.into_iter();
    let mut nearest: Vec<_> = ids.filter_map(|id| Some((likeness(name, &id)?, id))).collect();
    nearest.sort();
    let nearest = nearest.into_iter().take(3).map(|it| it.1).collect();
    Err(KnownError::Absent { name: name.to_owned(), nearest })
}

/// Finds a container, and locks its folder if the container is at rest. Waits for other commands that hold the lock,
/// and until the container's data is on the disk. One of these commands may start the container.
pub fn find_at_rest(
    store: &Store,
    name: &str,
    is_asked_to_end: &dyn Fn() -> bool,
) -> Result<(KnownContainer, Option<ContainerDir>), KnownError> {
    let mut found = find_container(store, name)?;
    while !found.is_watched() {
        if let Some(folder) = store.containers.lock(&found.id)? {
            if folder.record() == found.record.as_ref() {
                return Ok((found, Some(folder)));
            }
            // Another command has rolled it back or replaced it since it was found.
            drop(folder);
            found = find_container(store, &found.id)?;
            continue;
        }
        if is_asked_to_end() {
            return Err(KnownError::Interrupted(found.id));
        }
        std::thread::sleep(GLANCE);
        found = find_container(store, &found.id)?;
    }
    Ok((found, None))
}

/// Returns the distance between `typed` and the name `id`, if `id` may be meant.
fn likeness(typed: &str, id: &str) -> Option<usize> {
    let is_beginning = !typed.is_empty() && id.starts_with(typed);
    if is_beginning { Some(0) } else { store::mistyped(typed, id) }
}

/// Finds a running container and its root. Waits for a container that is being started.
pub fn running(
    store: &Store,
    name: &str,
    is_asked_to_end: &dyn Fn() -> bool,
) -> Result<(KnownContainer, File), KnownError> {
    let since = Instant::now();
    loop {
        let known = find_container(store, name)?;
        if !known.is_running() {
            let status = known.status();
            return Err(KnownError::Over { id: known.id, status });
        }
        if let Some(delay) = known.delay() {
            return Err(KnownError::Restarting { id: known.id.clone(), code: delay.code });
        }
        if let Some(root) = background::root(&known.folder) {
            return Ok((known, root));
        }
        if is_asked_to_end() {
            return Err(KnownError::Interrupted(known.id));
        }
        if since.elapsed() >= DEATH {
            return Err(KnownError::NotStarted(known.id));
        }
        std::thread::sleep(GLANCE);
    }
}

/// Waits until the remains of ended containers are removed, and the data of kept containers is on disk.
pub fn settle(store: &Store) -> Result<(), KnownError> {
    loop {
        let is_over = |it: &KnownContainer| it.liveness == Liveness::Alive && !it.is_watched();
        if !all(store)?.iter().any(is_over)
            && !store.containers.is_clearing().map_err(KnownError::from)?
        {
            return Ok(());
        }
        std::thread::sleep(GLANCE);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use store::{OpenOptions, Who};

    use super::*;

    /// Processes that hold a container's lock; the first of them is a script.
    struct Holding(std::process::Child);

    impl Drop for Holding {
        fn drop(&mut self) {
            let _ended = self.0.kill().and_then(|()| self.0.wait());
        }
    }

    impl Holding {
        fn start(folder: &Path, script: &str) -> Self {
            let lock = File::create(folder.join(folder::LOCK)).unwrap();
            rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockShared).unwrap();
            let mut command = std::process::Command::new("sh");
            Self(command.args(["-c", script]).stdin(lock).spawn().unwrap())
        }

        fn lives(&mut self) -> bool {
            self.0.try_wait().unwrap().is_none()
        }

        fn child(&self) -> Option<i32> {
            let path = format!("/proc/{0}/task/{0}/children", self.0.id());
            std::fs::read_to_string(path).unwrap().trim().parse().ok()
        }
    }

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        for _ in 0..2000 {
            if is_so() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{what} did not come");
    }

    /// On a busy host, the monitor may not have time to record the end of its container.
    #[test]
    fn a_monitor_is_killed_last() {
        const ALONE: &str = "exec sleep 1000";
        let known = |folder: &Path, monitor: Option<u32>| KnownContainer {
            id: "a".to_owned(),
            record: None,
            liveness: Liveness::Alive,
            folder: folder.to_owned(),
            is_created: false,
            state: monitor.map(|monitor| {
                let state =
                    json!({"monitor": monitor, "pid": 0, "started": 0, "stop_signal": "TERM"});
                serde_json::from_value(state).unwrap()
            }),
            is_unwatched: false,
        };
        // Its child simulates the runtime.
        for (script, is_known) in [
            (ALONE, true),
            ("while :; do sleep 1000; done", true),
            ("while :; do sleep 1000; done", false),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let mut monitor = Holding::start(folder.path(), script);
            let runtime = (script != ALONE).then(|| {
                wait_until("the runtime", || monitor.child().is_some());
                monitor.child()
            });
            let mut other = Holding::start(folder.path(), ALONE);
            let known = known(folder.path(), is_known.then(|| monitor.0.id()));
            known.end_without_runtime(false);
            wait_until("the end of the other", || !other.lives());
            if let Some(runtime) = runtime {
                wait_until("the end of the runtime", || {
                    let child = monitor.child();
                    child.is_some() && child != runtime
                });
            }
            assert!(monitor.lives(), "{script} {is_known}");
            known.end_without_runtime(true);
            wait_until("the end of the monitor", || !monitor.lives());
        }
    }

    #[test]
    fn another_container_that_is_unreadable_hides_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store::open(&path, Who::this_process(), OpenOptions::create()).unwrap();
        let other = store.path().join("containers/0123456789ab");
        std::fs::create_dir_all(other.join(folder::STATE)).unwrap();
        std::fs::write(other.join("container.json"), "damaged").unwrap();
        assert!(matches!(find_container(&store, "0123456789ab"), Err(KnownError::State { .. })));
        for (name, expect) in [("nothing", &[][..]), ("0123456789ac", &["0123456789ab"])] {
            let Err(KnownError::Absent { nearest, .. }) = find_container(&store, name) else {
                panic!()
            };
            assert_eq!(nearest, expect, "{name}");
        }
    }

    /// Changes that are read, and the record that names the snapshots below them, must belong together.
    #[test]
    fn the_record_of_a_container_at_rest_is_that_of_its_locked_folder() {
        const ROUNDS: usize = 3000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store::open(&path, Who::this_process(), OpenOptions::create()).unwrap();
        let record = |round: usize| ContainerRecord {
            image: "ab".repeat(32).parse().unwrap(),
            manifest: None,
            name: Some(round.to_string()),
            created: store::Seconds(0),
            keep: true,
            // The image of another store is not looked up.
            shared: Some("/elsewhere".to_owned()),
            boot: None,
            snapshot: None,
            volumes: Vec::new(),
        };
        drop(store.create_container("c", &record(0)).unwrap());
        let end = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1.. {
                    if end.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                    let Some(folder) = store.containers.lock("c").unwrap() else { continue };
                    let new = store.replacement_of_container("c", &record(round)).unwrap();
                    let (_new, old) = store.replace_container(folder, new).unwrap();
                    old.remove().unwrap();
                }
            });
            let differing = (0..ROUNDS).find_map(|_| match find_at_rest(&store, "c", &|| false) {
                Ok((found, Some(lock))) if lock.record() == found.record.as_ref() => None,
                // It counts as running while another thread has it locked, because it has no state.
                Ok((_, None)) => None,
                other => Some(format!("{other:?}")),
            });
            end.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(differing, None);
        });
    }
}
