//! Connects to a registry before its first request has a reader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::first;
use super::hosts::Capability;
use super::{Core, Registry, lock};
use crate::Digest;

/// Time after a request in which its connection is certainly still open. Servers close idle connections after a minute,
/// or later.
const RECENT: Duration = Duration::from_secs(20);
/// Longest time limit. A reader that comes later makes a new attempt.
const CONNECT_MAX: Duration = Duration::from_secs(20);

impl Registry {
    /// Opens the connections that the first request for a blob needs, and returns at once. For this, the host that is
    /// asked first gets a request for the size of the blob, which also gets a token and follows a redirect. Nothing is
    /// sent if another request was sent a short time ago. Errors are logged: the request for the blob reports them.
    pub fn connect_ahead(&self, blob: &Digest, limit: Duration) {
        if !self.core.may_connect() {
            return;
        }
        let (core, blob) = (Arc::clone(&self.core), *blob);
        self.engine.spawn(async move {
            let connected = tokio::time::timeout(limit.min(CONNECT_MAX), core.connect(&blob));
            let connected = async {
                let _in_time = connected.await;
            };
            first(connected, core.cancelled()).await;
        });
    }
}

impl Core {
    /// Whether no request was sent a short time ago. If so, the caller sends one.
    fn may_connect(&self) -> bool {
        let (mut last, now) = (lock(&self.last_request), Instant::now());
        if last.is_some_and(|last| now.duration_since(last) < RECENT) {
            return false;
        }
        *last = Some(now);
        true
    }

    /// Records that a request is sent.
    pub(super) fn note_request(&self) {
        *lock(&self.last_request) = Some(Instant::now());
    }

    async fn connect(&self, blob: &Digest) {
        let Some(&index) = self.order(Capability::Pull, Some(blob)).first() else { return };
        let host = &self.endpoints[index].host;
        match self.head(index, blob).await {
            Ok((status, _)) => tracing::debug!(host, status, "connected ahead of the first reader"),
            Err(cause) => {
                tracing::debug!(host, %cause, "cannot connect ahead of the first reader");
                self.note_failure(index, &cause);
            }
        }
    }
}
