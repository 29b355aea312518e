//! Notifies a service manager by sd_notify(3). Without `NOTIFY_SOCKET`, notifications are dropped.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;

use kernel::process::Signal;
use sd_notify::NotifyState;

use crate::session::signals::{Heard, until_stopped};

/// A step of a service's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServiceStep {
    /// The service accepts requests.
    Ready,
    /// The settings are being read again. `Ready` follows.
    Reloading,
    /// The service was asked to end.
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

/// Notifies a service manager. A failure is only logged, because it does not affect the service.
pub(crate) fn tell(step: ServiceStep) {
    let states = match step {
        ServiceStep::Ready => Ok(vec![NotifyState::Ready]),
        ServiceStep::Stopping => Ok(vec![NotifyState::Stopping]),
        // systemd ignores a message about a reload that began before systemd's request, so the message contains the
        // time.
        ServiceStep::Reloading => {
            NotifyState::monotonic_usec_now().map(|now| vec![NotifyState::Reloading, now])
        }
    };
    if let Err(error) = states.and_then(|it| sd_notify::notify(&it)) {
        tracing::warn!(%error, step = step.name(), "cannot notify the service manager");
    }
}

/// Runs a service that reads its settings at each use, so that `SIGHUP` has no effect. `work` gets a function that
/// returns when the service is asked to end.
pub(crate) fn serve_until_asked<T: Send>(
    work: impl FnOnce(Box<dyn FnOnce() + Send>) -> T + Send,
) -> anyhow::Result<T> {
    let (end, ended) = mpsc::channel();
    let hear = |signal| {
        if signal == Signal::HUP {
            return Heard::Done;
        }
        tell(ServiceStep::Stopping);
        // The service may have ended by itself.
        let _heard = end.send(());
        Heard::ToEnd
    };
    let stop = Box::new(move || {
        let _end = ended.recv();
    });
    // `until_stopped` blocks signals before `work` starts threads; if a thread did not block them, they would end the
    // process.
    until_stopped(&AtomicBool::new(false), hear, || work(stop))
}
