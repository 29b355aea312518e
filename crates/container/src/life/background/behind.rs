//! `exec` in the background: a child of this process starts the program and waits for its end, so that its streams,
//! which a runtime may change, are never the host's files.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use kernel::process::{Process, ProcessError, Signals, start_behind};

use super::{More, Notes, exec};
use crate::backoff::GLANCE;
use crate::runtime::call::chain;

/// Starts an additional program in a container, without the caller's streams and terminal. Returns the pipe that reports
/// the start, for a [`MonitorReport`](crate::life::monitor_report::MonitorReport), and the process that waits for the
/// program. This process must have only one thread.
///
/// # Errors
/// [`ProcessError`] if there can be no child.
pub fn exec_behind(
    folder: &Path,
    id: &str,
    more: More,
    signals: &Signals,
) -> Result<(OwnedFd, Process), ProcessError> {
    start_behind(|report| {
        // The child must not keep the caller's working directory in use.
        let _moved = std::env::set_current_dir("/");
        let report = Mutex::new(Some(File::from(report)));
        let tell = |bytes: &[u8]| {
            let pipe = report.lock().unwrap_or_else(PoisonError::into_inner).take();
            // The caller may have exited, and the program continues.
            let _heard = pipe.map(|mut pipe| pipe.write_all(bytes));
        };
        let has_ended = AtomicBool::new(false);
        let started = Notes::new(folder).pid.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The runtime writes this file when only the program's exec is left.
                while !has_ended.load(Ordering::Relaxed) {
                    if started.exists() {
                        return tell(&[0]);
                    }
                    std::thread::sleep(GLANCE);
                }
            });
            match exec(folder, id, more, signals) {
                Ok(_exit) => tell(&[0]),
                Err(error) => tell(&[&[error.exit_code()], chain(&error).as_bytes()].concat()),
            }
            has_ended.store(true, Ordering::Relaxed);
        });
    })
}
