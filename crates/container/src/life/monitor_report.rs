//! Reports of a container's monitor to the command that started it: about the start and the end.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use kernel::process::{Process, ProcessError, Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::life::background;

/// Error of reading a monitor's report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The pipe cannot be read.
    #[error("cannot read from the monitor")]
    Hear(#[source] std::io::Error),
    /// Signals cannot be waited for or forwarded.
    #[error(transparent)]
    Signals(#[from] ProcessError),
    /// The monitor was killed while it started the container.
    #[error("the monitor of container {0} exited before the container started")]
    Start(String),
    /// The monitor was killed while the container ran.
    #[error("the exit code of container {0} is unknown: its monitor was killed")]
    End(String),
}

/// Reason why a container did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NotStarted {
    /// Exit code for the failed start.
    pub code: u8,
    message: String,
}

/// Result of a start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartReport {
    /// The container runs.
    Runs,
    /// The start was interrupted by this signal.
    Interrupted(Signal),
    /// The start failed.
    Failed(NotStarted),
}

/// How a container ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndReport {
    pub code: u8,
    /// A sentence about the end; may be empty.
    pub remark: String,
}

/// The pipe from a container's monitor.
#[derive(Debug)]
pub struct MonitorReport {
    id: String,
    pipe: File,
}

impl MonitorReport {
    /// Creates the report of the monitor of container `id`.
    #[must_use]
    pub fn new(id: &str, pipe: OwnedFd) -> Self {
        Self { id: id.to_owned(), pipe: pipe.into() }
    }

    /// Waits until a detached container has started. A signal that ends programs ends the start, unless the container
    /// already runs.
    pub fn wait(
        mut self,
        monitor: &Process,
        signals: &Signals,
    ) -> Result<StartReport, ReportError> {
        let mut said = Vec::new();
        let mut asked = None;
        loop {
            signals.wait_or(self.pipe.as_fd())?;
            if let Some(signal) = signals.ending() {
                asked = Some(signal);
                // The monitor may have exited, or may have just reported that the container runs.
                let _heard = monitor.signal(Signal::TERM);
            } else {
                let mut bytes = [0; 4096];
                match self.pipe.read(&mut bytes).map_err(ReportError::Hear)? {
                    0 => break,
                    length => said.extend_from_slice(&bytes[..length]),
                }
            }
        }
        if said.first() == Some(&0) {
            return Ok(StartReport::Runs);
        }
        not_started(&self.id, &said, asked)
    }

    /// Waits for the start, and calls `deliver` for each signal that arrives. Returns the report of a failed start,
    /// or `None` if the container runs.
    pub fn start(
        &mut self,
        signals: &Signals,
        deliver: &mut dyn FnMut(Signal) -> Result<(), ProcessError>,
    ) -> Result<Option<Vec<u8>>, ReportError> {
        loop {
            signals.wait_or(self.pipe.as_fd())?;
            let Some(received) = signals.next()? else { break };
            deliver(received.signal)?;
        }
        let mut byte = [0];
        match self.pipe.read(&mut byte).map_err(ReportError::Hear)? {
            1 if byte == [0] => Ok(None),
            length => Ok(Some([&byte[..length], &self.rest()?].concat())),
        }
    }

    /// Returns the report of a failed start, for a container that has no terminal yet.
    pub fn not_started(mut self, asked: Option<Signal>) -> Result<StartReport, ReportError> {
        let said = self.rest()?;
        not_started(&self.id, &said, asked)
    }

    /// Waits for the end of a container that runs according to [`start`](Self::start), and returns its report.
    pub fn end(mut self) -> Result<EndReport, ReportError> {
        let said = self.rest()?;
        let (&code, remark) = said.split_first().ok_or(ReportError::End(self.id))?;
        Ok(EndReport { code, remark: String::from_utf8_lossy(remark).into_owned() })
    }

    fn rest(&mut self) -> Result<Vec<u8>, ReportError> {
        let mut said = Vec::new();
        self.pipe.read_to_end(&mut said).map_err(ReportError::Hear)?;
        Ok(said)
    }
}

/// Interprets the bytes `said` that the monitor reported about container `id`, which has not started, perhaps because
/// a signal `asked` it to end.
pub fn not_started(
    id: &str,
    said: &[u8],
    asked: Option<Signal>,
) -> Result<StartReport, ReportError> {
    if let Some(signal) = asked {
        return Ok(StartReport::Interrupted(signal));
    }
    let (&code, message) = said.split_first().ok_or_else(|| ReportError::Start(id.to_owned()))?;
    let message = String::from_utf8_lossy(message).into_owned();
    Ok(StartReport::Failed(NotStarted { code, message }))
}

/// Whether a container was removed that its caller has killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakenBack {
    /// The container and its remains are removed.
    Gone,
    /// The container is kept, because it had ended just before.
    Stays,
    /// The monitor still runs, and may still remove the container.
    Unsettled,
}

/// Kills a container and waits for the end of its monitor, which removes the container.
#[must_use]
pub fn take_back(id: &str, folder: &Path, monitor: &Process) -> TakenBack {
    let _asked = background::unwant(folder);
    let _killed = background::signal(folder, id, "KILL");
    taken_back(folder, monitor, UNWANTED)
}

/// How long to wait for the end of a killed container.
const UNWANTED: Duration = Duration::from_secs(20);

fn taken_back(folder: &Path, monitor: &Process, most: Duration) -> TakenBack {
    let since = Instant::now();
    // Until the monitor has exited, the folder does not show the result, because it may still be removed.
    loop {
        let rest = Timespec::try_from(most.saturating_sub(since.elapsed())).ok();
        match poll(&mut [PollFd::new(monitor, PollFlags::IN)], rest.as_ref()) {
            Ok(1..) => break,
            Err(Errno::INTR) => {}
            Ok(0) | Err(_) => return TakenBack::Unsettled,
        }
    }
    if folder.exists() { TakenBack::Stays } else { TakenBack::Gone }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use kernel::process::Pid;

    use super::*;

    #[test]
    fn what_a_monitor_says_of_a_start_that_failed() {
        let check = |said, asked, expect: &str| {
            let got = not_started("c", said, asked).map_err(|error| error.to_string());
            assert_eq!(format!("{got:?}"), expect);
        };
        check(
            b"\x7fno such program",
            None,
            "Ok(Failed(NotStarted { code: 127, message: \"no such program\" }))",
        );
        check(b"\x7dgone", Some(Signal::TERM), &format!("Ok(Interrupted({:?}))", Signal::TERM));
        check(b"", None, "Err(\"the monitor of container c exited before the container started\")");
    }

    /// Tests a machine that is so busy that a monitor needs long for its last steps.
    #[test]
    fn what_a_monitor_will_do_is_not_known_before_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let (there, gone) = (folder.path(), folder.path().join("none"));
        let monitor = Process::open(rustix::process::getpid()).unwrap();
        for folder in [there, &gone] {
            let back = taken_back(folder, &monitor, Duration::from_millis(5));
            assert_eq!(back, TakenBack::Unsettled);
        }
        // The test's own program, which only lists its tests.
        let mut program = Command::new(std::env::current_exe().unwrap());
        let mut child = program.arg("--list").stdout(Stdio::null()).spawn().unwrap();
        let monitor = Process::open(Pid::from_child(&child)).unwrap();
        assert_eq!(taken_back(there, &monitor, UNWANTED), TakenBack::Stays);
        assert_eq!(taken_back(&gone, &monitor, UNWANTED), TakenBack::Gone);
        child.wait().unwrap();
    }
}
