//! A prepared container runs: in the foreground of this process, or watched by a process of its own.

use std::cell::Cell;
use std::fs::File;
use std::io::Write as _;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kernel::process::Exit;
use kernel::terminal::Modes;
use store::ContainerError;

use crate::bundle::spec::RuntimeSpec;
use crate::life::detached::{self, Last};
use crate::life::ended::{Ended, LOST, Runs};
use crate::life::kept;
use crate::life::log::add_sentence;
use crate::life::monitor::{self, FAILED, RunError, Start};
use crate::life::prepare::Ready;
use crate::life::state::{End, Reason};
use crate::life::teardown;
use crate::life::terminal::Keeper;
use crate::runtime::call::chain;

/// How a container in the foreground ended.
#[derive(Debug)]
pub struct Finish {
    /// How its program ended, or why it did not start.
    pub end: Result<End, RunError>,
    /// Whether the disk has lost some of its writes.
    pub has_lost: bool,
    /// Why its folder stays, if it does.
    pub stays: Option<ContainerError>,
}

/// A monitor's part of its container's terminal.
#[derive(Debug)]
pub struct Seat {
    /// Where the runtime sends it.
    pub console: String,
    /// Who keeps it when its caller has left.
    pub keeper: Keeper,
    /// How the caller's terminal is set.
    pub modes: Modes,
}

/// Keeps the terminal of a container whose caller has left, in a thread of the monitor.
struct Keeping {
    thread: JoinHandle<()>,
    has_taken_over: Arc<AtomicBool>,
}

impl Seat {
    fn keep(self, folder: &Path, log_size: Option<NonZeroU64>) -> Keeping {
        let has_taken_over = Arc::new(AtomicBool::new(false));
        let (taken, folder) = (Arc::clone(&has_taken_over), folder.to_owned());
        let thread = std::thread::spawn(move || {
            let taken_over = || taken.store(true, Ordering::SeqCst);
            self.keeper.keep(self.modes, &folder, log_size, &taken_over);
        });
        Keeping { thread, has_taken_over }
    }
}

impl Keeping {
    /// After the container's end: waits until all that it has written is in its log, if that is where it goes.
    fn finish(self) {
        if self.has_taken_over.load(Ordering::SeqCst) {
            // It has nobody to tell of a panic.
            let _ended = self.thread.join();
        }
    }
}

impl Ready {
    fn start<'a>(&'a self, spec: RuntimeSpec, console: Option<&'a str>) -> Start<'a> {
        Start {
            id: &self.id,
            folder: &self.path,
            lock: self.folder.lock(),
            root: &self.root.mount,
            stage: &self.stage,
            process: &self.process,
            owner: self.owner,
            spec,
            terminal: self.terminal,
            console,
            runtime: &self.runtime,
            signals: &self.signals,
            headrooms: &self.headrooms,
            watch: self.watch.as_deref(),
            log_size: self.log_size,
            timeout: self.timeout,
            pasta: self.pasta.as_ref().map(|(pasta, who)| (pasta, *who)),
            notes: self.notes.as_ref(),
        }
    }

    fn has_lost(&self) -> bool {
        self.root.doomed.has_lost(self.root.mount.as_fd())
    }

    fn into_ended(self) -> Ended {
        let Self { id, folder, path, root, stage, headrooms, watch, image, directory, .. } = self;
        let (_image, _directory) = (image, directory);
        Ended { id, folder, path, root, stage, headrooms, watch, _image, _directory }
    }

    /// Runs it to its end in the foreground of this process, which gets a mount namespace of its own, and takes it down.
    #[must_use]
    pub fn run(mut self, remark: &dyn Fn(&str)) -> Finish {
        self.offer();
        let spec = std::mem::take(&mut self.spec);
        let end = monitor::run(&self.start(spec, None), remark);
        let has_lost = self.has_lost();
        let stays = self.into_ended().take_down(Runs::Perhaps, || {}).err();
        Finish { end, has_lost, stays }
    }

    /// Watches the container to its end, in a process of its own. Writes to `report` how it began, and to its
    /// terminal's user also how it ended: a zero when it runs; otherwise, and at its end, an exit code and a sentence.
    pub fn watch(mut self, report: OwnedFd, seat: Option<Seat>, clock: &dyn Fn() -> i64) {
        let spec = std::mem::take(&mut self.spec);
        let mut report = Some(File::from(report));
        let end_report = seat.as_ref().and_then(|_| report.as_ref()?.try_clone().ok());
        let console = seat.as_ref().map(|seat| seat.console.clone());
        let keeping = seat.map(|seat| seat.keep(&self.path, self.log_size));
        // Nobody is to find a directory in use by us.
        let _moved = std::env::set_current_dir("/");
        self.offer();
        let mut started = || tell(report.take(), &[0]);
        let (mut lost, mut is_told) = (false, false);
        // Whoever waits for its end finds this in the log then, if there is room for it.
        let mut ended = || {
            lost = self.has_lost();
            is_told = lost && add_sentence(&self.path, LOST);
            let exit = lost.then_some(Exit::Code(FAILED.into()));
            Last { exit, written: self.root.doomed.written() }
        };
        let start = self.start(spec, console.as_deref());
        let result = detached::watch(start, &self.stop, clock, &mut started, &mut ended);
        // Who was told that it runs finds it, also when its end is not known.
        let has_started = report.is_none();
        let is_unwanted = detached::is_unwanted(&self.path);
        let keep = self.keep && has_started && !is_unwanted;
        let mut refusal = Vec::new();
        let end = match result {
            Ok(end) => {
                let code = u8::try_from(end.exit.shell_code()).unwrap_or(u8::MAX);
                let reason = end.reason.map_or("", Reason::sentence);
                [&[code], if lost { LOST } else { reason }.as_bytes()].concat()
            }
            Err(error) => {
                let text = chain(&error);
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
        let (id, path) = (self.id.clone(), self.path.clone());
        let over = self.into_ended();
        if keep {
            over.rest(lost, is_told);
            return;
        }
        let untold = Cell::new(Some((report, end_report)));
        let tell_end = || {
            if let Some((report, end_report)) = untold.take() {
                tell(report, &refusal);
                tell(end_report, &end);
            }
        };
        // Before another one can have its name, and its cgroup.
        if !teardown::clear(&path, &id) {
            // With the folder, which says what it is.
            tracing::warn!("what is left of the container stays: `quire gc` removes it");
            tell_end();
            return;
        }
        if let Err(error) = over.take_down(Runs::No, tell_end) {
            tracing::warn!(%error, "the container's folder stays: `quire gc` removes it");
            tell_end();
        }
    }

    /// Lets other containers of the image share what this process has mounted, and others look at what is written.
    fn offer(&self) {
        if let Err(error) = self.root.image.offer(&self.path) {
            tracing::debug!(id = self.id, %error, "nobody shares this container's image");
        }
        let upper = self.root.doomed.upper().map(|upper| kept::offer(&self.path, upper));
        if let Some(Err(error)) = upper {
            tracing::debug!(id = self.id, %error, "nobody can look at this container's changes");
        }
    }
}

/// Whoever asked may be gone, and the container is what counts.
fn tell(report: Option<File>, bytes: &[u8]) {
    let _heard = report.map(|mut pipe| pipe.write_all(bytes));
}
