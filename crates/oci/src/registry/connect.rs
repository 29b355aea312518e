//! Connects to a registry before its first request has a reader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::first;
use super::hosts::Capability;
use super::transport::Urgency;
use super::{Core, Registry, lock};
use crate::Digest;

/// Time after a request in which its connection is certainly still open. Servers close idle connections after a minute,
/// or later.
const RECENT: Duration = Duration::from_secs(20);
/// Longest time limit for a connection. A reader who needs the same token waits as long, and then makes a new attempt.
const CONNECT_MAX: Duration = Duration::from_secs(5);

impl Registry {
    /// Opens the connections that the first request for a blob needs, and returns at once. For this, the host that is
    /// asked first gets a request for the size of the blob, which also gets a token and follows a redirect, unless
    /// another request was sent a short time ago. With HTTP/2, prefetching has a separate connection, which is opened
    /// after that. Errors are logged: the request for the blob reports them.
    pub fn connect_ahead(&self, blob: &Digest, limit: Duration) {
        if !self.core.begin_to_connect() {
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
    /// Records that a connection is opened, unless a request was sent a short time ago. Returns whether it was recorded.
    fn begin_to_connect(&self) -> bool {
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
        for urgency in [Urgency::Reader, Urgency::Background] {
            match self.head_as(index, blob, urgency).await {
                Ok((status, _)) => {
                    tracing::debug!(host, status, ?urgency, "connected ahead of the first reader");
                }
                Err(cause) => {
                    tracing::debug!(host, %cause, "cannot connect ahead of the first reader");
                    return self.note_failure(index, &cause);
                }
            }
            // Requests of HTTP/1.1 share their connections.
            if !self.transport.is_http2(host) {
                return;
            }
        }
    }
}
