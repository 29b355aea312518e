//! Stops containers: asks them to end, and kills them if they do not.

use std::cell::Cell;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use kernel::process::Signal;
use rustix::fs::{FlockOperation, flock};
use store::{Liveness, OperationError, Store};

use crate::folder::STOPPING;
use crate::life::background;
use crate::life::init_signals::Terms;
use crate::life::lookup::{AGAIN, KnownContainer, KnownError};
use crate::life::signal::{signal_name, signal_number};

const TERM: u8 = 15;

/// Default time to wait before the kill, in seconds, the same as podman's.
const PATIENCE: u32 = 10;

/// How to stop containers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StopOptions {
    /// Number of the signal that asks; `None` for each container's own.
    pub signal: Option<u8>,
    /// Seconds after which the containers are killed; `None` for the setting of each container.
    pub timeout: Option<u32>,
}

impl StopOptions {
    fn patience(&self, known: &KnownContainer) -> Duration {
        let own = known.state.as_ref().and_then(|it| it.stop_timeout);
        Duration::from_secs(self.timeout.or(own).unwrap_or(PATIENCE).into())
    }
}

/// Stops containers, and records the end of those without a monitor. `now` returns the time, in seconds since 1970.
/// `remark` gets sentences for users.
///
/// # Errors
/// [`KnownError`]; some containers may still run then.
pub fn stop(
    store: &Store,
    known: Vec<KnownContainer>,
    wish: StopOptions,
    now: &dyn Fn() -> i64,
    remark: &dyn Fn(&str),
) -> Result<(), KnownError> {
    for it in known.iter().filter(|it| it.liveness == Liveness::Dead) {
        // The monitor was killed, but the container may still run.
        if let Some(folder) = store.containers.lock(&it.id)? {
            background::bury(&folder, now())
                .map_err(OperationError::of("record the end of container", &it.id))?;
        }
    }
    for it in &known {
        it.note_stopped(TERM)?;
    }
    // All containers are signalled before this waits for any.
    let running: Vec<_> = known.into_iter().filter(KnownContainer::is_running).collect();
    let _stopping: Vec<_> = running.iter().filter_map(|it| hold(&it.folder)).collect();
    let since = Instant::now();
    let terms: Vec<_> = running.iter().map(|it| Terms::for_folder(&it.folder)).collect();
    let mut sent = Vec::new();
    for (it, terms) in running.iter().zip(&terms) {
        sent.push(ask(store, it, terms, wish, since, remark)?);
    }
    for ((it, terms), signal) in running.iter().zip(&terms).zip(sent) {
        let rest = wish.patience(it).saturating_sub(since.elapsed());
        let is_deaf = Cell::new(false);
        let is_waited_for = || -> Result<bool, KnownError> {
            let is_alive = it.is_alive(store)?;
            if is_alive {
                terms.look(|| is_deaf.set(true));
            }
            Ok(is_alive && !is_deaf.get())
        };
        if !background::wait(Some(rest), &is_waited_for)? || is_deaf.get() {
            if !wish.patience(it).is_zero() {
                remark(&unstopped(it, signal, wish.patience(it), is_deaf.get()));
            }
            it.kill(store)?;
        }
    }
    Ok(())
}

/// Marks a container as being stopped, until the file is dropped. Without disk space, there is no mark.
fn hold(folder: &Path) -> Option<File> {
    let file = File::options().create(true).truncate(false).write(true).open(folder.join(STOPPING));
    // Several commands may stop a container.
    let file = file.ok()?;
    flock(&file, FlockOperation::NonBlockingLockShared).ok().map(|()| file)
}

/// Returns the remark that a container is killed. The text is podman's.
fn unstopped(it: &KnownContainer, signal: u8, patience: Duration, is_deaf: bool) -> String {
    let seconds = patience.as_secs();
    let why = match is_deaf {
        true => ", because its first process does not handle it".to_owned(),
        false => format!(" in {seconds} seconds"),
    };
    let (signal, id) = (signal_name(signal), &it.id);
    format!("StopSignal {signal} failed to stop container {id}{why}, resorting to SIGKILL")
}

/// Sends the signal that asks a container to end, and returns it.
fn ask(
    store: &Store,
    known: &KnownContainer,
    terms: &Terms<'_>,
    wish: StopOptions,
    since: Instant,
    remark: &dyn Fn(&str),
) -> Result<u8, KnownError> {
    let own = known.state.as_ref().map(|it| it.stop_signal.as_str()).filter(|it| !it.is_empty());
    // An invalid signal in an image must not prevent the container from being stopped.
    let by_image = |own| {
        signal_number(own).unwrap_or_else(|error| {
            remark(&format!("{error}: sending TERM to {} instead", known.id));
            TERM
        })
    };
    let mut signal = wish.signal.unwrap_or_else(|| own.map_or(TERM, by_image));
    loop {
        let name = if signal == TERM { "TERM".to_owned() } else { signal.to_string() };
        if signal == TERM {
            terms.note(Signal::TERM);
        }
        if known.is_restarting()? {
            // The monitor sees that a user stops the container.
            return Ok(signal);
        }
        let Err(message) = background::signal(&known.folder, &known.id, &name) else {
            return Ok(signal);
        };
        // The container may have ended since.
        if !known.is_alive(store)? || known.is_restarting()? {
            return Ok(signal);
        }
        // Otherwise it may not have started yet.
        let has_started = known.state_now()?.is_some();
        if has_started || since.elapsed() >= wish.patience(known) {
            if wish.signal.is_some() || signal == TERM {
                return Err(KnownError::Untold(message));
            }
            remark(&format!("{message}: sending TERM instead"));
            signal = TERM;
        }
        std::thread::sleep(AGAIN);
    }
}
