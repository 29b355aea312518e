//! Time limits for hosts that send few bytes.
//!
//! A stall timeout does not end a transfer in which the host sends a byte now and then. So every wait for the network
//! has a [`Patience`]: a time budget that decreases during the wait, and grows with each byte that arrives.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::Cause;

/// Bytes of a manifest, config, token or list that extend the budget by a second.
const DOCUMENT_RATE: u32 = 16 << 10;
/// Bytes of a layer that extend the budget by a second.
const BLOB_RATE: u32 = 1 << 10;

tokio::task_local! {
    /// The time budget of the task's current attempt.
    static PATIENCE: Arc<Patience>;
    /// The time budget for small documents. During the attempt at a layer, it applies to a token that the attempt
    /// needs.
    static DOCUMENTS: Arc<Patience>;
}

/// The kind of content that is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One small document of one host: all attempts share the budget.
    Document,
    /// A layer: each attempt has a new budget, because the next attempt continues after the received bytes.
    Blob,
}

/// The remaining time budget of one host.
#[derive(Debug)]
pub(super) struct Patience {
    kind: Kind,
    /// Initial budget, which received bytes cannot exceed.
    full: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: Duration,
    /// Number of bytes received.
    received: u64,
}

impl Patience {
    /// Makes a budget for all attempts at one small document.
    pub(super) fn document(full: Duration) -> Arc<Self> {
        Self::new(Kind::Document, full)
    }

    /// Makes a budget for one attempt at a layer.
    pub(super) fn blob(full: Duration) -> Arc<Self> {
        Self::new(Kind::Blob, full)
    }

    fn new(kind: Kind, full: Duration) -> Arc<Self> {
        Arc::new(Self { kind, full, state: Mutex::new(State { left: full, received: 0 }) })
    }

    /// Runs `work`. Its calls of [`wait`] use this budget.
    pub(super) async fn during<T>(self: &Arc<Self>, work: impl Future<Output = T>) -> T {
        let work = PATIENCE.scope(Arc::clone(self), work);
        match self.kind {
            Kind::Document => DOCUMENTS.scope(Arc::clone(self), work).await,
            Kind::Blob => work.await,
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrived(&self, bytes: u64) {
        let rate = match self.kind {
            Kind::Document => DOCUMENT_RATE,
            Kind::Blob => BLOB_RATE,
        };
        let gained = Duration::from_secs(bytes) / rate;
        let mut state = self.state();
        state.received += bytes;
        state.left = (state.left + gained).min(self.full);
    }

    fn is_over(&self) -> Cause {
        let (received, seconds) = (self.state().received, self.full);
        match self.kind {
            Kind::Document => Cause::Overdue { received, seconds },
            Kind::Blob => Cause::TooSlow { received, seconds },
        }
    }
}

/// Subtracts the duration of a wait when dropped, even if the wait was cancelled.
struct Waiting<'a> {
    patience: &'a Patience,
    since: Instant,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.patience.state();
        state.left = state.left.saturating_sub(self.since.elapsed());
    }
}

/// Waits for the network until the task's budget is used up.
pub(super) async fn wait<T>(work: impl Future<Output = Result<T, Cause>>) -> Result<T, Cause> {
    let Ok(patience) = PATIENCE.try_with(Arc::clone) else { return work.await };
    let left = patience.state().left;
    let waiting = Waiting { patience: &patience, since: Instant::now() };
    let result = tokio::time::timeout(left, work).await;
    drop(waiting);
    result.unwrap_or_else(|_elapsed| Err(patience.is_over()))
}

/// Runs `work`, which fetches a small document as a step of another fetch. Uses a new budget if the task has none.
pub(super) async fn as_document<T>(full: Duration, work: impl Future<Output = T>) -> T {
    let documents = DOCUMENTS.try_with(Arc::clone).unwrap_or_else(|_| Patience::document(full));
    documents.during(work).await
}

/// Extends the task's budget for received bytes.
pub(super) fn arrived(bytes: usize) {
    // Tasks without a budget are not limited.
    let _uncounted = PATIENCE.try_with(|patience| patience.arrived(bytes as u64));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(patience: &Patience) -> Duration {
        patience.state().left
    }

    #[test]
    fn bytes_bring_time_back_but_never_more_than_there_was() {
        let patience = Patience::document(Duration::from_secs(60));
        patience.state().left = Duration::from_secs(1);
        patience.arrived(32 << 10);
        assert_eq!(left(&patience), Duration::from_secs(3));
        patience.arrived(1 << 30);
        assert_eq!(left(&patience), Duration::from_secs(60));
        let patience = Patience::blob(Duration::from_secs(60));
        patience.state().left = Duration::ZERO;
        patience.arrived(512);
        assert_eq!(left(&patience), Duration::from_millis(500));
    }
}
