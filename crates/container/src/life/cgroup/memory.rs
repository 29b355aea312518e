//! Detects if the kernel has killed a process of a container that was out of memory.
//!
//! The container's cgroup counts such kills while it exists. Runtimes that stay with a container remove the cgroup
//! before other processes can read the count, so a thread watches the cgroup while the container runs.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _, Seek as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::backoff::Pace;
use crate::bundle::spec::{RuntimeSpec, SpecLinux};
use crate::folder::KILLED;

/// Mount point and name of the files with the counts. Source: Linux `Documentation/admin-guide/cgroup-v2.rst`,
/// "memory.events"; `cgroup-v1/memory.rst`, "OOM Control".
const UNIFIED: (&str, &str) = ("/sys/fs/cgroup", "memory.events");
const LEGACY: (&str, &str) = ("/sys/fs/cgroup/memory", "memory.oom_control");

/// Initial interval between checks for the runtime's cgroup or for a kill; the interval grows.
const LOOK: Duration = Duration::from_millis(2);
/// Time for the kernel to report the removal of a cgroup.
const GONE: Duration = Duration::from_millis(100);

/// Counts of a cgroup.
struct Counts {
    file: File,
    is_legacy: bool,
}

impl Counts {
    /// Opens the counts by the cgroup's path below the root of each hierarchy.
    fn open(cgroup: &str) -> Option<Self> {
        let cgroup = cgroup.trim_start_matches('/');
        let open =
            |(root, name): (&str, &str)| File::open(Path::new(root).join(cgroup).join(name)).ok();
        let unified = open(UNIFIED).map(|file| Self { file, is_legacy: false });
        unified.or_else(|| open(LEGACY).map(|file| Self { file, is_legacy: true }))
    }

    /// Returns the number of killed processes, or an error if the cgroup is gone.
    fn killed(&mut self) -> io::Result<u64> {
        let mut text = String::new();
        self.file.rewind()?;
        self.file.read_to_string(&mut text)?;
        Ok(count(&text, "oom_kill"))
    }
}

fn count(text: &str, key: &str) -> u64 {
    let values = text.lines().filter_map(|line| line.split_once(' '));
    values
        .filter(|(name, _)| *name == key)
        .find_map(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

fn cgroup(linux: &SpecLinux) -> Option<&str> {
    linux.cgroups_path.as_deref().filter(|it| it.len() > 1)
}

/// Returns the number of processes killed in a container so far, by its bundle's configuration; 0 if unknown.
pub(crate) fn killed(linux: &SpecLinux) -> u64 {
    let counts = cgroup(linux).and_then(Counts::open);
    counts.and_then(|mut it| it.killed().ok()).unwrap_or(0)
}

/// Returns this number for the container with this folder.
#[must_use]
pub fn killed_in(folder: &Path) -> u64 {
    RuntimeSpec::load(folder).map_or(0, |spec| killed(&spec.linux))
}

/// Records that Quire is about to kill a container, so that earlier kills by the kernel do not count as its end.
pub(crate) fn note_kill(folder: &Path) {
    if let Err(error) = std::fs::write(folder.join(KILLED), killed_in(folder).to_string()) {
        tracing::debug!(%error, "a later command may report that the kernel killed the container");
    }
}

/// Returns the recorded number of kills, or `None` if Quire has not killed the container.
fn noted(folder: &Path) -> Option<u64> {
    std::fs::read_to_string(folder.join(KILLED)).ok()?.parse().ok()
}

/// Whether a container that was killed had run out of memory, according to its current counts.
pub(crate) fn was_lacking(linux: &SpecLinux, folder: &Path) -> bool {
    killed(linux) > noted(folder).unwrap_or(0)
}

/// A thread that watches the counts while the runtime runs the container.
#[derive(Debug)]
pub(crate) struct Ear {
    thread: JoinHandle<Heard>,
    over: PipeWriter,
}

/// Results of the watch.
#[derive(Debug, Default)]
struct Heard {
    /// Number of processes that the kernel has killed.
    killed: u64,
    /// An eventfd that the kernel signals when memory runs out, and once more when the cgroup is removed.
    bell: Option<OwnedFd>,
    rings: u64,
}

impl Ear {
    /// Starts the thread. Returns `None` for a container without a memory limit, because its cgroup does not report
    /// that the whole machine is out of memory.
    pub(crate) fn start(linux: &SpecLinux) -> io::Result<Option<Self>> {
        if linux.resources.memory.as_ref().is_none_or(|it| it.limit.is_none()) {
            return Ok(None);
        }
        let Some(cgroup) = cgroup(linux).map(str::to_owned) else { return Ok(None) };
        let (ended, over) = io::pipe()?;
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        let thread = thread.spawn(move || listen(&cgroup, &ended))?;
        Ok(Some(Self { thread, over }))
    }

    /// Returns, after the container's end, whether the kernel killed one of its processes and Quire did not end it
    /// after that. `was_killed` shows whether the container's exit looks like a kill.
    pub(crate) fn finish(self, was_killed: bool, folder: &Path) -> bool {
        drop(self.over);
        // A panic of the thread must not hide the container's exit.
        let Ok(heard) = self.thread.join() else { return false };
        let noted = noted(folder);
        if heard.killed > 0 || noted.is_some() || !was_killed {
            return heard.killed > noted.unwrap_or(0);
        }
        // A single event may be one or the other, so wait for the second one.
        let Some(bell) = heard.bell else { return false };
        let mut rings = heard.rings;
        while rings == 1 && wait(&[PollFd::new(&bell, PollFlags::IN)], Some(GONE)) {
            rings += ring(&bell);
        }
        rings > 1
    }
}

fn listen(cgroup: &str, ended: &PipeReader) -> Heard {
    let mut heard = Heard::default();
    let pace = Pace::new(LOOK);
    let mut counts = loop {
        if let Some(counts) = Counts::open(cgroup) {
            break counts;
        }
        if wait(&[PollFd::new(ended, PollFlags::IN)], Some(pace.pause())) {
            return heard;
        }
    };
    heard.bell = if counts.is_legacy { bell(cgroup, &counts.file).ok() } else { None };
    // A legacy cgroup without an eventfd is polled. After a notification, every cgroup is polled, because the kernel
    // may update its counts later.
    let is_deaf = counts.is_legacy && heard.bell.is_none();
    let mut alert = is_deaf.then(|| Pace::new(LOOK));
    // Runs until the cgroup is removed.
    while let Ok(killed) = counts.killed() {
        heard.killed = killed;
        let sign = match &heard.bell {
            Some(bell) => PollFd::new(bell, PollFlags::IN),
            None => PollFd::new(&counts.file, PollFlags::PRI),
        };
        let mut signs = [sign, PollFd::new(ended, PollFlags::IN)];
        let most = alert.as_ref().and_then(|it| Timespec::try_from(it.pause()).ok());
        match poll(&mut signs, most.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
        let (is_sign, is_over) = (!signs[0].revents().is_empty(), !signs[1].revents().is_empty());
        if is_sign {
            alert = Some(Pace::new(LOOK));
        }
        if let (true, Some(bell)) = (is_sign, &heard.bell) {
            heard.rings += ring(bell);
        }
        if is_over {
            break;
        }
    }
    if let Some(bell) = &heard.bell {
        heard.rings += ring(bell);
    }
    heard
}

/// Waits until a descriptor is ready or the time is over. Returns whether one is ready.
fn wait(fds: &[PollFd<'_>], most: Option<Duration>) -> bool {
    let most = most.and_then(|it| Timespec::try_from(it).ok());
    matches!(poll(&mut fds.to_vec(), most.as_ref()), Ok(1..))
}

/// Returns a descriptor that counts events. Source: `cgroup-v1/memory.rst`, "OOM Control".
fn bell(cgroup: &str, counts: &File) -> io::Result<OwnedFd> {
    let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let control =
        Path::new(LEGACY.0).join(cgroup.trim_start_matches('/')).join("cgroup.event_control");
    let order = format!("{} {}", bell.as_raw_fd(), counts.as_raw_fd());
    // The file is not created if it is missing, because then the cgroup was removed.
    let control = File::options().write(true).open(control)?;
    rustix::io::write(&control, order.as_bytes())?;
    Ok(bell)
}

fn ring(bell: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    match rustix::io::read(bell, &mut bytes) {
        Ok(8) => count_of(bytes),
        _ => 0,
    }
}

#[expect(
    clippy::host_endian_bytes,
    reason = "eventfd(2): the kernel uses the machine's byte order"
)]
const fn count_of(bytes: [u8; 8]) -> u64 {
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::spec::SpecMemory;

    #[test]
    fn counts_of_both_versions() {
        let legacy = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
        let unified = "low 0\nhigh 0\nmax 31\noom 1\noom_kill 1\noom_group_kill 0\n";
        assert_eq!([legacy, unified, "", "oom_kill"].map(|it| count(it, "oom_kill")), [2, 1, 0, 0]);
    }

    #[test]
    fn a_cgroup_that_is_not_there_has_killed_nobody() {
        let linux =
            |path: &str| SpecLinux { cgroups_path: Some(path.to_owned()), ..SpecLinux::default() };
        for path in ["/quire-none-1", "", "/"] {
            assert_eq!(killed(&linux(path)), 0, "{path}");
        }
        let mut limited = linux("/quire-none-1");
        assert!(Ear::start(&limited).unwrap().is_none());
        limited.resources.memory = Some(SpecMemory { limit: Some(1), ..SpecMemory::default() });
        let folder = tempfile::tempdir().unwrap();
        assert!(!Ear::start(&limited).unwrap().unwrap().finish(true, folder.path()));
    }

    /// The kernel has killed child processes of the container before Quire kills the container.
    #[test]
    fn what_was_killed_before_quire_killed_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let check = |killed, noted: Option<&str>, expect| {
            drop(std::fs::remove_file(folder.path().join(KILLED)));
            if let Some(noted) = noted {
                std::fs::write(folder.path().join(KILLED), noted).unwrap();
            }
            let (_ended, over) = io::pipe().unwrap();
            let heard = Heard { killed, ..Heard::default() };
            let ear = Ear { thread: std::thread::spawn(|| heard), over };
            assert_eq!(ear.finish(true, folder.path()), expect, "{killed} {noted:?}");
        };
        check(0, None, false);
        check(1, None, true);
        check(1, Some("1"), false);
        check(2, Some("1"), true);
        note_kill(folder.path());
        assert_eq!(noted(folder.path()), Some(0));
    }
}
