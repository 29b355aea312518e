//! Cancels the work of a call when the engine no longer waits for the reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// Owned by a call, and dropped when the call ends, which includes that the engine cancels the call or disconnects.
#[derive(Debug)]
pub(super) struct Caller {
    is_gone: Arc<AtomicBool>,
    /// Dropping the sender wakes all receivers.
    _told: watch::Sender<()>,
}

/// Ends the work of a call that was dropped.
#[derive(Debug, Clone)]
pub(super) struct CancelToken {
    is_gone: Arc<AtomicBool>,
    told: watch::Receiver<()>,
}

impl Caller {
    pub(super) fn new() -> (Self, CancelToken) {
        let (told, tell) = watch::channel(());
        let is_gone = Arc::new(AtomicBool::new(false));
        (Self { is_gone: Arc::clone(&is_gone), _told: told }, CancelToken { is_gone, told: tell })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }
}

impl CancelToken {
    /// Returns a flag that is set when the call was dropped.
    pub(super) fn cancel(&self) -> &AtomicBool {
        &self.is_gone
    }

    /// Waits until the call is dropped.
    pub(super) async fn gone(&mut self) {
        // Messages are never sent: the loop ends when the sender is dropped.
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
