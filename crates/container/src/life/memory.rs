//! Whether the kernel has killed a process of a container that was out of memory.
//!
//! The container's cgroup counts such kills while it exists. Runtimes that stay with a container remove the cgroup
//! before other processes can look, so a thread listens meanwhile.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _, Seek as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::bundle::spec::{RuntimeSpec, SpecLinux};
use crate::folder::KILLED;
use crate::pace::Pace;

/// Where the counts are, below which directory. Source: Linux `Documentation/admin-guide/cgroup-v2.rst`, "memory.events";
/// `cgroup-v1/memory.rst`, "OOM Control".
const UNIFIED: (&str, &str) = ("/sys/fs/cgroup", "memory.events");
const LEGACY: (&str, &str) = ("/sys/fs/cgroup/memory", "memory.oom_control");

/// How soon somebody looks again whether the runtime has made the cgroup, or the kernel has killed: less often when it takes long.
const LOOK: Duration = Duration::from_millis(2);
/// How long the kernel may take to tell that a cgroup is gone.
const GONE: Duration = Duration::from_millis(100);

/// The counts of a cgroup.
struct Counts {
    file: File,
    is_legacy: bool,
}

impl Counts {
    /// By the cgroup's path from the root of each hierarchy.
    fn open(cgroup: &str) -> Option<Self> {
        let cgroup = cgroup.trim_start_matches('/');
        let open =
            |(root, name): (&str, &str)| File::open(Path::new(root).join(cgroup).join(name)).ok();
        let unified = open(UNIFIED).map(|file| Self { file, is_legacy: false });
        unified.or_else(|| open(LEGACY).map(|file| Self { file, is_legacy: true }))
    }

    /// How many processes were killed; an error if the cgroup is gone.
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

/// How many processes were killed in a container so far, by its bundle's configuration; 0 if that cannot be told.
pub(crate) fn killed(linux: &SpecLinux) -> u64 {
    let counts = cgroup(linux).and_then(Counts::open);
    counts.and_then(|mut it| it.killed().ok()).unwrap_or(0)
}

/// The same for the container with this folder.
#[must_use]
pub fn killed_in(folder: &Path) -> u64 {
    RuntimeSpec::load(folder).map_or(0, |spec| killed(&spec.linux))
}

/// Notes that Quire is about to kill a container: what the kernel killed before did not end it.
pub(crate) fn note_kill(folder: &Path) {
    if let Err(error) = std::fs::write(folder.join(KILLED), killed_in(folder).to_string()) {
        tracing::debug!(%error, "it may be told that the kernel has killed the container");
    }
}

/// What was noted; none if Quire has not killed the container.
fn noted(folder: &Path) -> Option<u64> {
    std::fs::read_to_string(folder.join(KILLED)).ok()?.parse().ok()
}

/// Whether a container that was killed lacked memory, from its counts as they are.
pub(crate) fn was_lacking(linux: &SpecLinux, folder: &Path) -> bool {
    killed(linux) > noted(folder).unwrap_or(0)
}

/// Listens while a runtime has the container.
#[derive(Debug)]
pub(crate) struct Ear {
    thread: JoinHandle<Heard>,
    over: PipeWriter,
}

/// What was heard.
#[derive(Debug, Default)]
struct Heard {
    /// How many processes the kernel has killed.
    killed: u64,
    /// The kernel's bell, which rings when memory has run out, and once more when the cgroup goes.
    bell: Option<OwnedFd>,
    rings: u64,
}

impl Ear {
    /// None for a container without a limit: what the whole machine lacks it does not hear of.
    pub(crate) fn of(linux: &SpecLinux) -> io::Result<Option<Self>> {
        if linux.resources.memory.as_ref().is_none_or(|it| it.limit.is_none()) {
            return Ok(None);
        }
        let Some(cgroup) = cgroup(linux).map(str::to_owned) else { return Ok(None) };
        let (ended, over) = io::pipe()?;
        let thread = std::thread::Builder::new().stack_size(128 << 10);
        let thread = thread.spawn(move || listen(&cgroup, &ended))?;
        Ok(Some(Self { thread, over }))
    }

    /// When the container with this folder has ended: whether the kernel killed something in it, and Quire did not end it
    /// after that. `was_killed` says whether its end looks like that.
    pub(crate) fn finish(self, was_killed: bool, folder: &Path) -> bool {
        drop(self.over);
        // What it panics of is no reason to lose the container's end.
        let Ok(heard) = self.thread.join() else { return false };
        let noted = noted(folder);
        if heard.killed > 0 || noted.is_some() || !was_killed {
            return heard.killed > noted.unwrap_or(0);
        }
        // One ring may have been either: the other is still to come.
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
    // Where there is neither, or the kernel tells late, it is looked at again and again after a sign.
    let is_deaf = counts.is_legacy && heard.bell.is_none();
    let mut alert = is_deaf.then(|| Pace::new(LOOK));
    // Until it is gone.
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

/// Waits until one of them is ready, or the time is over; answers whether one is.
fn wait(fds: &[PollFd<'_>], most: Option<Duration>) -> bool {
    let most = most.and_then(|it| Timespec::try_from(it).ok());
    matches!(poll(&mut fds.to_vec(), most.as_ref()), Ok(1..))
}

/// A descriptor that counts events. Source: `cgroup-v1/memory.rst`, "OOM Control".
fn bell(cgroup: &str, counts: &File) -> io::Result<OwnedFd> {
    let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let control =
        Path::new(LEGACY.0).join(cgroup.trim_start_matches('/')).join("cgroup.event_control");
    let order = format!("{} {}", bell.as_raw_fd(), counts.as_raw_fd());
    // Not made where it is not there: the cgroup has gone then.
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
    reason = "eventfd(2): the kernel counts in the machine's own order"
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
        assert!(Ear::of(&limited).unwrap().is_none());
        limited.resources.memory = Some(SpecMemory { limit: Some(1), ..SpecMemory::default() });
        let folder = tempfile::tempdir().unwrap();
        assert!(!Ear::of(&limited).unwrap().unwrap().finish(true, folder.path()));
    }

    /// One that Quire kills, which the kernel has killed children of before.
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
