//! What a service manager is told, as sd_notify(3) has it. Without `NOTIFY_SOCKET`, nobody is.

use sd_notify::NotifyState;

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
