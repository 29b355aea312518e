//! Time limits for hosts that send few bytes.
//!
//! A host that sends one byte now and then never stalls. So every wait for the network has a [`Patience`]: time that
//! runs out during the wait, and grows with each byte that arrives.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::Cause;

/// Bytes of a manifest, config, token or list that are worth a second.
const DOCUMENT_RATE: u32 = 16 << 10;
/// Bytes of a layer that are worth a second.
const BLOB_RATE: u32 = 1 << 10;

tokio::task_local! {
    /// The patience of the attempt that the task is at.
    static PATIENCE: Arc<Patience>;
    /// That for small documents, also where the attempt is at a layer: for a token that is needed on the way.
    static DOCUMENTS: Arc<Patience>;
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One small document of one host: all attempts share the time.
    Document,
    /// A layer: each attempt has the time, since what has come of it is not lost.
    Blob,
}

/// How long one host may still take.
#[derive(Debug)]
pub(super) struct Patience {
    kind: Kind,
    /// The time at the beginning, which is also the most that bytes can bring back.
    full: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: Duration,
    /// Bytes that arrived.
    received: u64,
}

impl Patience {
    /// For all attempts at one small document.
    pub(super) fn document(full: Duration) -> Arc<Self> {
        Self::new(Kind::Document, full)
    }

    /// For one attempt at a layer.
    pub(super) fn blob(full: Duration) -> Arc<Self> {
        Self::new(Kind::Blob, full)
    }

    fn new(kind: Kind, full: Duration) -> Arc<Self> {
        Arc::new(Self { kind, full, state: Mutex::new(State { left: full, received: 0 }) })
    }

    /// Does `work`. What it [waits](wait) for takes of this time.
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

/// Takes the time of a wait away, also of one that was given up.
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

/// Waits for the network, as long as the patience of the task lasts.
pub(super) async fn wait<T>(work: impl Future<Output = Result<T, Cause>>) -> Result<T, Cause> {
    let Ok(patience) = PATIENCE.try_with(Arc::clone) else { return work.await };
    let left = patience.state().left;
    let waiting = Waiting { patience: &patience, since: Instant::now() };
    let result = tokio::time::timeout(left, work).await;
    drop(waiting);
    result.unwrap_or_else(|_elapsed| Err(patience.is_over()))
}

/// Does `work`, which gets a small document on the way to another thing. Without a patience it has one of its own.
pub(super) async fn as_document<T>(full: Duration, work: impl Future<Output = T>) -> T {
    let documents = DOCUMENTS.try_with(Arc::clone).unwrap_or_else(|_| Patience::document(full));
    documents.during(work).await
}

/// So many bytes have arrived.
pub(super) fn arrived(bytes: usize) {
    // Without a patience nobody counts.
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
