//! Whether an engine still waits for the answer to a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// Part of a call: it is dropped with it. That is also when the engine gives up, or goes.
#[derive(Debug)]
pub(super) struct Caller {
    is_gone: Arc<AtomicBool>,
    /// Dropped, it tells all that wait.
    _told: watch::Sender<()>,
}

/// What ends the work for a call that nobody waits for any more.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    is_gone: Arc<AtomicBool>,
    told: watch::Receiver<()>,
}

impl Caller {
    pub(super) fn new() -> (Self, Wanted) {
        let (told, tell) = watch::channel(());
        let is_gone = Arc::new(AtomicBool::new(false));
        (Self { is_gone: Arc::clone(&is_gone), _told: told }, Wanted { is_gone, told: tell })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }
}

impl Wanted {
    /// Set once nobody waits for the work.
    pub(super) fn cancel(&self) -> &AtomicBool {
        &self.is_gone
    }

    /// Ends once nobody waits for the work.
    pub(super) async fn gone(&mut self) {
        // Nothing is ever sent: it ends with the sender.
        while self.told.changed().await.is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_hears_that_its_call_has_gone() {
        let (caller, mut wanted) = Caller::new();
        assert!(!wanted.cancel().load(Ordering::Relaxed));
        let mut other = wanted.clone();
        let waiting = tokio::spawn(async move { other.gone().await });
        drop(caller);
        waiting.await.unwrap();
        wanted.gone().await;
        assert!(wanted.cancel().load(Ordering::Relaxed));
    }
}
