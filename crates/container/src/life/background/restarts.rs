//! Restarts of a container's program by its monitor, as the container's restart policy says.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use kernel::process::{Exit, Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::folder::{KILLED, PID, RUNTIME_LOG, STOPPED, UNWANTED};
use crate::life::cgroup::pause;
use crate::life::end::teardown;
use crate::life::log::add_sentence;
use crate::restart_policy::{RestartDelays, RestartPolicy};

/// Interval of checks whether a user has stopped the container during a delay.
const GLANCE: Duration = Duration::from_millis(50);

const REMAINS: &str =
    "some processes of the container did not end, so its program is not started again";

/// The restarts of one container.
#[derive(Debug)]
pub(super) struct Restarts<'a> {
    folder: &'a Path,
    id: &'a str,
    policy: RestartPolicy,
    /// Number of restarts so far.
    count: u32,
    delays: RestartDelays,
    /// Start of the last run.
    since: Instant,
    /// Keeps other commands from reading the container's changes while the program is started again.
    lock: Option<File>,
}

impl<'a> Restarts<'a> {
    pub(super) fn new(folder: &'a Path, id: &'a str, policy: RestartPolicy) -> Self {
        let delays = RestartDelays::default();
        Self { folder, id, policy, count: 0, delays, since: Instant::now(), lock: None }
    }

    /// Returns the number of restarts so far. `None` if the program is never started again.
    pub(super) fn count(&self) -> Option<u32> {
        (self.policy != RestartPolicy::No).then_some(self.count)
    }

    /// Counts a restart, and returns the new number.
    pub(super) fn add(&mut self) -> Option<u32> {
        self.count = self.count.saturating_add(1);
        self.since = Instant::now();
        self.count()
    }

    /// Lets other commands read the container's changes, which a program may now write.
    pub(super) fn release(&mut self) {
        self.lock = None;
    }

    /// Whether the program is started again after it has ended in this way.
    pub(super) fn wants(&self, exit: Exit) -> bool {
        self.policy.wants(self.count, exit.shell_code()) && !self.is_stopped()
    }

    /// Whether a command has stopped the container, or wants to remove it.
    pub(super) fn is_stopped(&self) -> bool {
        [STOPPED, UNWANTED].iter().any(|name| self.folder.join(name).exists())
    }

    /// Removes what the runtime has made for the last run, and waits for the time of the next one. Returns false if a
    /// command or a signal ends the container before it.
    pub(super) fn wait(&mut self, signals: &Signals) -> bool {
        self.release();
        let delay = self.delays.next(self.since.elapsed());
        let since = Instant::now();
        if !self.clear() {
            let _told = add_sentence(self.folder, REMAINS);
            return false;
        }
        loop {
            // A signal arrives, for example, when the host is shut down.
            if self.is_stopped() || signals.ending().is_some() {
                return false;
            }
            let rest = delay.saturating_sub(since.elapsed());
            if rest.is_zero() && self.lock_out() {
                self.since = Instant::now();
                return true;
            }
            // Another command may hold the lock.
            let most = if rest.is_zero() { GLANCE } else { rest.min(GLANCE) };
            let most = Timespec::try_from(most).ok();
            let fd = PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN);
            let _arrived = poll(&mut [fd], most.as_ref());
        }
    }

    /// Locks out commands that read the container's changes. Returns false if one of them reads them now.
    fn lock_out(&mut self) -> bool {
        match pause::lock_out(self.folder) {
            Ok(lock) => {
                self.lock = lock;
                self.lock.is_some()
            }
            // The disk may be full.
            Err(error) => {
                tracing::debug!(id = self.id, %error, "the program is started again without a lock");
                true
            }
        }
    }

    /// Removes the runtime's records, the cgroups, and files about the last run. Returns whether nothing is left.
    fn clear(&self) -> bool {
        // The pid may soon be that of another process.
        for name in [PID, KILLED, RUNTIME_LOG] {
            drop(std::fs::remove_file(self.folder.join(name)));
        }
        teardown::clear_run(self.folder, self.id)
    }
}

/// Whether a signal asks a program to end.
pub(super) fn is_request_to_end(signal: Signal) -> bool {
    matches!(signal, Signal::HUP | Signal::INT | Signal::QUIT | Signal::TERM)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::PAUSE;

    fn restarts(folder: &Path, policy: RestartPolicy) -> Restarts<'_> {
        Restarts::new(folder, "c", policy)
    }

    #[test]
    fn a_stopped_container_is_not_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let signals = Signals::block(&[]).unwrap();
        for name in [STOPPED, UNWANTED] {
            let mut always = restarts(folder, RestartPolicy::Always);
            assert!(always.wants(Exit::Code(0)) && always.wait(&signals));
            std::fs::write(folder.join(name), "").unwrap();
            assert!(!always.wants(Exit::Code(0)) && !always.wait(&signals), "{name}");
            std::fs::remove_file(folder.join(name)).unwrap();
        }
    }

    #[test]
    fn a_program_is_not_started_while_its_changes_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let signals = Signals::block(&[]).unwrap();
        let reader = pause::lock_out(folder).unwrap().unwrap();
        let mut always = restarts(folder, RestartPolicy::Always);
        assert!(!always.lock_out());
        drop(reader);
        assert!(always.wait(&signals));
        assert!(pause::lock_out(folder).unwrap().is_none());
        always.release();
        assert!(pause::lock_out(folder).unwrap().is_some());
    }

    #[test]
    fn restarts_are_counted_if_there_is_a_policy() {
        let folder = tempfile::tempdir().unwrap();
        let mut never = restarts(folder.path(), RestartPolicy::No);
        assert_eq!((never.count(), never.wants(Exit::Code(1)), never.add()), (None, false, None));
        let mut once = restarts(folder.path(), RestartPolicy::OnFailure { most: 1 });
        // A shell's code for a signal is a failure.
        assert!(once.wants(Exit::Signal(9)) && !once.wants(Exit::Code(0)));
        assert_eq!((once.count(), once.add()), (Some(0), Some(1)));
        assert!(!once.wants(Exit::Signal(9)));
    }

    /// Another process may get the pid, and commands would take it for the container.
    #[test]
    fn files_about_a_run_are_removed_after_it() {
        let folder = tempfile::tempdir().unwrap();
        for name in [PID, KILLED, RUNTIME_LOG] {
            std::fs::write(folder.path().join(name), "1").unwrap();
        }
        let signals = Signals::block(&[]).unwrap();
        assert!(restarts(folder.path(), RestartPolicy::Always).wait(&signals));
        let left = std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), [PAUSE]);
    }
}
