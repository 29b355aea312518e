//! Connects to a registry before its first request: ahead of its reader, and to find whether the registry has HTTPS.

use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::{Method, Url};

use super::engine::first;
use super::hosts::{Capability, Endpoint};
use super::transport::{Ask, Urgency};
use super::{Cause, Core, Registry, RegistryError, lock};
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

    /// Returns the registry itself by HTTP if it may use HTTP, and responds only to that. `None` if the settings stay.
    ///
    /// # Errors
    /// [`RegistryError`] if the caller cancels the requests.
    pub(super) fn find_http(&self) -> Result<Option<Endpoint>, RegistryError> {
        let Some(own) = self.core.endpoints.last().filter(|it| it.may_use_http) else {
            return Ok(None);
        };
        let (https, http) = (own.clone(), by_http(own));
        self.run("reach the registry", |core| async move {
            if core.responds(&https).await {
                return Ok(None);
            }
            // A host that responds to neither is reported by the first request.
            Ok(core.responds(&http).await.then_some(http))
        })
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

    /// Whether a host responds to a request without credentials, with any status. By HTTPS, a redirect is a response,
    /// whatever its target does; by HTTP, it usually leads to HTTPS, which did not work.
    async fn responds(&self, endpoint: &Endpoint) -> bool {
        // Headers of `hosts.toml` may contain credentials.
        let anonymous = Endpoint { headers: Vec::new(), ..endpoint.clone() };
        let asked = async {
            let url = Url::parse(&format!("{}/", endpoint.base))
                .map_err(|error| Cause::Protocol(error.to_string()))?;
            self.transport.send(&anonymous, &Ask::new(Method::GET, url), None).await
        };
        match asked.await {
            Ok(answer) if answer.is_own => true,
            Ok(_) | Err(Cause::Downgrade(_) | Cause::Elsewhere { .. }) => {
                endpoint.base.starts_with("https:")
            }
            Err(cause) => {
                tracing::debug!(base = endpoint.base, %cause, "the registry does not respond");
                false
            }
        }
    }
}

/// Returns the same host by HTTP.
fn by_http(endpoint: &Endpoint) -> Endpoint {
    let base = match endpoint.base.strip_prefix("https:") {
        Some(rest) => format!("http:{rest}"),
        None => endpoint.base.clone(),
    };
    Endpoint { base, may_use_http: false, ..endpoint.clone() }
}
