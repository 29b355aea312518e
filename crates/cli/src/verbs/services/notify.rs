//! What a service manager is told, as sd_notify(3) has it. Without `NOTIFY_SOCKET`, nobody is.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;

use kernel::process::Signal;
use sd_notify::NotifyState;

use crate::session::signals::{Heard, until_stopped};

/// A step of a service's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServiceStep {
    /// Clients can ask.
    Ready,
    /// The settings are read again. `Ready` follows.
    Reloading,
    /// It was asked to end.
    Stopping,
}

impl ServiceStep {
    const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Reloading => "reloading",
            Self::Stopping => "stopping",
        }
    }
}

/// Tells a service manager. Whether it listens changes nothing for those who read.
pub(crate) fn tell(step: ServiceStep) {
    let states = match step {
        ServiceStep::Ready => Ok(vec![NotifyState::Ready]),
        ServiceStep::Stopping => Ok(vec![NotifyState::Stopping]),
        // systemd takes no message about a reload that began before its own request.
        ServiceStep::Reloading => {
            NotifyState::monotonic_usec_now().map(|now| vec![NotifyState::Reloading, now])
        }
    };
    if let Err(error) = states.and_then(|it| sd_notify::notify(&it)) {
        tracing::warn!(%error, step = step.name(), "the service manager cannot be told");
    }
}

/// Does the work of a service that reads its settings at each use, so that `SIGHUP` changes nothing. `work` is given what returns
/// once the service is asked to end.
pub(crate) fn serve_until_asked<T: Send>(
    work: impl FnOnce(Box<dyn FnOnce() + Send>) -> T + Send,
) -> anyhow::Result<T> {
    let (end, ended) = mpsc::channel();
    let hear = |signal| {
        if signal == Signal::HUP {
            return Heard::Done;
        }
        tell(ServiceStep::Stopping);
        // It may have ended by itself.
        let _heard = end.send(());
        Heard::ToEnd
    };
    let stop = Box::new(move || {
        let _end = ended.recv();
    });
    // Threads that begin before signals are blocked would end the process.
    until_stopped(&AtomicBool::new(false), hear, || work(stop))
}
