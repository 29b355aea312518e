//! Runs a prepared container: in the foreground of this process, or with this process as its monitor.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, PipeWriter, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kernel::process::Exit;
use kernel::terminal::{Modes, Receiver};
use store::{ContainerError, OperationError};

use crate::bundle::Terminal;
use crate::bundle::spec::RuntimeSpec;
use crate::folder::CONFIG;
use crate::life::background::{self, Last, WatchCalls};
use crate::life::end::ended::{Ended, LOST, Runs, sync_needed};
use crate::life::end::teardown;
use crate::life::log::{LogLimit, add_sentence};
use crate::life::monitor::{self, CallerStreams, FAILED, RunError, Start};
use crate::life::prepare::Ready;
use crate::life::state::{End, Reason, StateBefore};
use crate::life::terminal::{self, Keeper};
use crate::life::writable_layer;
use crate::restart_policy::RestartPolicy;
use crate::runtime::call::chain;

/// How a container in the foreground ended.
#[derive(Debug)]
pub struct Finish {
    /// Exit of the program, or the reason why it did not start.
    pub end: Result<End, RunError>,
    /// Whether the disk has lost some of the container's writes.
    pub has_lost: bool,
    /// Reason why the container's folder cannot be removed.
    pub stays: Option<ContainerError>,
}

/// The monitor's part of its container's terminal.
#[derive(Debug)]
pub struct Seat {
    /// Path of the socket to which the runtime sends the terminal.
    pub console: String,
    /// The end of the connection that takes over the terminal when its caller has left.
    pub keeper: Keeper,
    /// Settings of the caller's terminal, if the input is one.
    pub modes: Option<Modes>,
}

/// A monitor's thread that keeps the terminal of a container whose caller has left.
struct Keeping {
    thread: JoinHandle<()>,
    has_taken_over: Arc<AtomicBool>,
}

impl Seat {
    /// Starts the thread. `None` if it cannot be started: then the terminal ends with its caller.
    fn keep(self, folder: &Path, log_size: LogLimit) -> Option<Keeping> {
        let has_taken_over = Arc::new(AtomicBool::new(false));
        let (taken, folder) = (Arc::clone(&has_taken_over), folder.to_owned());
        let started = std::thread::Builder::new().spawn(move || {
            let taken_over = || taken.store(true, Ordering::SeqCst);
            self.keeper.keep(self.modes, &folder, log_size, &taken_over);
        });
        let failed = |error: &io::Error| {
            tracing::warn!(%error, "cannot start a thread: the terminal ends with its caller");
        };
        started.inspect_err(failed).ok().map(|thread| Keeping { thread, has_taken_over })
    }
}

impl Keeping {
    /// Waits, after the container's end, until all its output is in the log, if the thread writes the log.
    fn finish(self) {
        if self.has_taken_over.load(Ordering::SeqCst) {
            // If the thread panicked, this is ignored, because it cannot be reported.
            let _ended = self.thread.join();
        }
    }
}

/// The terminal of a container in the background, which the monitor keeps open. Its output goes to the log.
struct OwnTerminal {
    /// Path of the socket to which the runtime sends the terminal.
    console: String,
    receiver: Receiver,
}

/// The thread that reads the terminal.
struct OwnTerminalReader {
    thread: JoinHandle<()>,
    /// When this is closed, no runtime sends a terminal any more.
    until: PipeWriter,
}

impl OwnTerminal {
    fn new(folder: &Path) -> io::Result<Self> {
        let receiver = Receiver::new(folder)?;
        Ok(Self { console: receiver.path(), receiver })
    }

    /// Starts the thread. `None` if it cannot be started: then the start of the container fails, because no process
    /// accepts the runtime's connection.
    fn keep(self, folder: &Path, log_size: LogLimit) -> Option<OwnTerminalReader> {
        let (over, until) = io::pipe().ok()?;
        let (receiver, folder) = (self.receiver, folder.to_owned());
        let started = std::thread::Builder::new().spawn(move || {
            terminal::keep_own(&receiver, &over, &folder, log_size);
        });
        Some(OwnTerminalReader { thread: started.ok()?, until })
    }
}

impl OwnTerminalReader {
    /// Waits, after the container's end, until all its output is in the log.
    fn finish(self) {
        drop(self.until);
        // If the thread panicked, this is ignored, because it cannot be reported.
        let _ended = self.thread.join();
    }
}

impl Ready {
    fn start<'a>(
        &'a self,
        spec: RuntimeSpec,
        console: Option<&'a str>,
        streams: Option<CallerStreams>,
    ) -> Start<'a> {
        Start {
            id: &self.id,
            folder: &self.path,
            lock: self.lock.as_ref().map(|it| it.as_fd()).or_else(|| self.folder.lock()),
            root: &self.root.mount,
            stage: &self.stage,
            process: &self.process,
            owner: self.owner,
            spec,
            terminal: self.terminal,
            has_open_stdin: self.has_open_stdin,
            fds: &self.fds,
            streams,
            console,
            runtime: &self.runtime,
            signals: &self.signals,
            headrooms: &self.headrooms,
            log_size: self.log_size,
            restart: self.restart,
            timeout: self.timeout,
            pasta: self.pasta.as_ref().map(|(pasta, who)| (pasta, *who)),
            networks: self.networks.as_ref(),
            notes: self.notes.as_ref(),
        }
    }

    fn has_lost(&self) -> bool {
        self.root.doomed.has_lost(self.root.mount.as_fd())
    }

    fn into_ended(self) -> Ended {
        let Self {
            id, folder, path, root, stage, headrooms, image, directory, lock, networks, ..
        } = self;
        if let Some(networks) = networks {
            networks.release();
        }
        let (_image, _directory, _lock) = (image, directory, lock);
        Ended { id, folder, path, root, stage, headrooms, _image, _directory, _lock }
    }

    /// Runs the container to its end in the foreground of this process, which moves into a new mount namespace, and
    /// takes the container down.
    #[must_use]
    pub fn run(mut self, remark: &dyn Fn(&str)) -> Finish {
        self.offer();
        let spec = std::mem::take(&mut self.spec);
        let end = monitor::run(&self.start(spec, None, None), remark);
        let has_lost = self.has_lost();
        let stays = self.into_ended().take_down(Runs::Perhaps, || {}).err();
        Finish { end, has_lost, stays }
    }

    /// Runs the container to its end as its monitor. Writes to `report`: a zero when the container runs, or the exit
    /// code and a sentence if it does not start. With a `seat`, the exit code and a sentence also follow at the end.
    pub fn watch(self, report: OwnedFd, seat: Option<Seat>, clock: &dyn Fn() -> i64) {
        let report = Some(File::from(report));
        let _told = self.watch_with(report, seat, None, clock, &|_| {});
    }

    /// Runs the container to its end in the foreground of this process, which is also its monitor, so that the container
    /// can be kept: its output also goes to the log, and its end is recorded.
    #[must_use]
    pub fn run_and_record(
        self,
        streams: CallerStreams,
        clock: &dyn Fn() -> i64,
        remark: &dyn Fn(&str),
    ) -> Finish {
        self.watch_with(None, None, Some(streams), clock, remark)
    }

    fn watch_with(
        mut self,
        mut report: Option<File>,
        seat: Option<Seat>,
        streams: Option<CallerStreams>,
        clock: &dyn Fn() -> i64,
        remark: &dyn Fn(&str),
    ) -> Finish {
        let spec = std::mem::take(&mut self.spec);
        let end_report = seat.as_ref().and_then(|_| report.as_ref()?.try_clone().ok());
        // A container that was started in the background has no caller at its terminal. Without the socket, the runtime
        // refuses the start, with its reason.
        let has_own = self.terminal == Terminal::New && seat.is_none();
        let own = has_own.then(|| OwnTerminal::new(&self.path)).and_then(|made| {
            let failed = |error: &io::Error| {
                tracing::warn!(id = self.id, %error, "cannot make a socket for the container's terminal");
            };
            made.inspect_err(failed).ok()
        });
        let console = seat.as_ref().map(|seat| seat.console.clone());
        let console = console.or_else(|| own.as_ref().map(|own| own.console.clone()));
        let own = own.and_then(|own| own.keep(&self.path, self.log_size));
        let keeping = seat.and_then(|seat| seat.keep(&self.path, self.log_size));
        if streams.is_none() {
            // The monitor must not keep the caller's working directory in use.
            let _moved = std::env::set_current_dir("/");
        }
        self.offer();
        let mut has_started = false;
        let mut started = || {
            has_started = true;
            tell(report.take(), &[0]);
            if self.restart != RestartPolicy::No {
                // The next boot starts the container, also after a crash of the host.
                sync_needed(&self.path, &self.id);
            }
        };
        let (mut lost, mut is_told) = (false, false);
        // The log gets this sentence before the end is reported, if there is space for it.
        let mut ended = || {
            lost = self.has_lost();
            is_told = lost && add_sentence(&self.path, LOST);
            let exit = lost.then_some(Exit::Code(FAILED.into()));
            Last { exit, written: self.root.doomed.written() }
        };
        let start = self.start(spec, console.as_deref(), streams);
        let has_lost = || self.has_lost();
        let mut calls = WatchCalls {
            now: clock,
            started: &mut started,
            has_lost: &has_lost,
            ended: &mut ended,
            remark,
        };
        let result = background::watch(start, &self.stop, &mut calls);
        // A container that was reported as running is kept, even if its exit code is unknown.
        let is_unwanted = background::is_unwanted(&self.path);
        let keep = self.keep && (has_started || self.is_again) && !is_unwanted;
        let mut refusal = Vec::new();
        let end = match &result {
            Ok(end) => {
                let code = u8::try_from(end.exit.shell_code()).unwrap_or(u8::MAX);
                let reason = end.reason.map_or("", Reason::sentence);
                [&[code], if lost { LOST } else { reason }.as_bytes()].concat()
            }
            Err(error) => {
                let text = chain(error);
                let said = [&[error.exit_code()], text.as_bytes()].concat();
                if has_started {
                    let _told = add_sentence(&self.path, &text);
                    said
                } else {
                    refusal = said;
                    Vec::new()
                }
            }
        };
        if let Some(keeping) = keeping {
            keeping.finish();
        }
        if let Some(own) = own {
            own.finish();
        }
        let (id, path) = (self.id.clone(), self.path.clone());
        let over = self.into_ended();
        let mut finish = Finish { end: result, has_lost: lost, stays: None };
        if keep {
            over.rest(lost, is_told);
            tell(report, &refusal);
            tell(end_report, &end);
            return finish;
        }
        let untold = Cell::new(Some((report, end_report)));
        let tell_end = || {
            if let Some((report, end_report)) = untold.take() {
                tell(report, &refusal);
                tell(end_report, &end);
            }
        };
        // The remains are removed before another container can have the same name and cgroup.
        if !teardown::clear(&path, &id) {
            // The folder is kept as well, because it records the remains.
            tracing::warn!("cannot remove all remains of the container: `quire gc` removes them");
            tell_end();
            return finish;
        }
        if let Err(error) = over.take_down(Runs::No, tell_end) {
            tracing::warn!(%error, "cannot remove the container's directory: `quire gc` removes it");
            tell_end();
            finish.stays = Some(error);
        }
        finish
    }

    /// Keeps the new container at rest, so that a later command starts it.
    ///
    /// # Errors
    /// [`OperationError`]; the next command removes the container then.
    pub fn keep(mut self) -> Result<(), OperationError> {
        // Commands read the container's command and owners from this file. The monitor writes it again.
        self.spec.linux.seccomp = None;
        serde_json::to_vec(&self.spec)
            .map_err(Into::into)
            .and_then(|config| std::fs::write(self.path.join(CONFIG), config))
            .and_then(|()| StateBefore::note_created(&self.path))
            .map_err(OperationError::at("write in", &self.path))?;
        self.into_ended().rest(false, false);
        Ok(())
    }

    /// Offers this process's mount of the image to other containers, and the upper directory to other commands.
    fn offer(&self) {
        if let Err(error) = self.root.image.offer(&self.path) {
            tracing::debug!(id = self.id, %error, "other containers cannot share this container's image");
        }
        let upper = self.root.doomed.upper().map(|upper| writable_layer::offer(&self.path, upper));
        if let Some(Err(error)) = upper {
            tracing::debug!(id = self.id, %error, "other commands cannot read this container's changes");
        }
    }
}

/// Errors are ignored, because the command that reads the report may have exited, and the container continues.
fn tell(report: Option<File>, bytes: &[u8]) {
    let _heard = report.map(|mut pipe| pipe.write_all(bytes));
}
