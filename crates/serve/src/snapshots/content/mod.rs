//! The content store of an engine: the service reads blobs from it, and writes new layers to it.
//!
//! The content store is another process, which may hang, lie or exit. So each of its messages has a timeout, and its
//! replies are compared with the bytes that were sent.

mod connection;
mod read;
mod write;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use image::digest::Digest;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::{Request, Status};

use super::cancellation::CancelToken;
use containerd_api::leases::CreateRequest;
use containerd_api::leases::leases_client::LeasesClient;

use connection::{BoxError, Connection};
pub(super) use write::{ContentWriter, NewContent};

/// Timeout of each message of an engine's content store. On a busy disk, a message of one mebibyte takes seconds, but
/// never a minute.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Number of messages that may wait in a queue: containerd's have up to 1 MiB.
const AHEAD: usize = 4;

/// Headers of an engine's calls: the namespace of the content, and the lease that protects the content from the
/// engine's garbage collector. Source: containerd's packages `namespaces` and `leases`.
const HEADERS: [&str; 2] = ["containerd-namespace", LEASE];
const LEASE: &str = "containerd-lease";
/// The label with the end of a lease, in the format of RFC 3339. Source: containerd's `docs/garbage-collection.md`.
const LEASE_END: &str = "containerd.io/gc.expire";

#[derive(Debug, Clone)]
pub(super) struct ContentStore {
    /// The engine's socket.
    pub(super) socket: PathBuf,
    /// Timeout of each message.
    pub(super) patience: Duration,
}

/// Headers of an engine's call that are passed on in calls back to the engine.
#[derive(Debug, Clone, Default)]
pub(super) struct EngineHeaders(Vec<(&'static str, MetadataValue<Ascii>)>);

impl EngineHeaders {
    pub(super) fn from_metadata(headers: &MetadataMap) -> Self {
        let named = |name| Some((name, headers.get(name)?.clone()));
        Self(HEADERS.into_iter().filter_map(named).collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|it| it.0 == name)
    }

    fn with<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        for (name, value) in &self.0 {
            request.metadata_mut().insert(*name, value.clone());
        }
        request
    }
}

/// Why a call of an engine's content store failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the content store of the engine at {}", socket.display())]
pub struct ContentError {
    /// The action, with its object and a preposition.
    action: String,
    /// The engine's socket.
    socket: PathBuf,
    source: ContentFault,
}

/// A failure of a content store.
#[derive(Debug, thiserror::Error)]
enum ContentFault {
    #[error("cannot connect: set the socket of the engine with `--engine PATH`")]
    Connect(#[source] BoxError),
    #[error("no reply for {} seconds: check whether the engine hangs, and try again", .0.as_secs_f32())]
    Silent(Duration),
    #[error("{0}")]
    Refused(String),
    #[error("it ended the call early: see the engine's log")]
    Ended,
    #[error("it sent bytes from offset {found}, not from {expected}")]
    Order { expected: u64, found: i64 },
    #[error("it states that it has {taken} bytes, not {sent}")]
    Taken { sent: u64, taken: i64 },
    #[error("it states that the data has the digest {named}, not {sent}")]
    Digest { sent: Box<Digest>, named: String },
    #[error("the engine cancelled the call")]
    Unwanted,
}

/// A call of the content store, with its headers and its purpose.
#[derive(Debug, Clone)]
struct ContentCall {
    action: String,
    store: ContentStore,
    headers: EngineHeaders,
    wanted: CancelToken,
}

impl ContentCall {
    fn failed(&self, source: ContentFault) -> ContentError {
        let ContentStore { socket, .. } = &self.store;
        ContentError { action: self.action.clone(), socket: socket.clone(), source }
    }

    /// Opens a connection for this call.
    async fn connect(&self) -> Result<Connection, ContentError> {
        let connecting = Connection::open(&self.store.socket);
        let connected = self.within(self.store.patience, connecting).await?;
        connected.map_err(|error| self.failed(ContentFault::Connect(error)))
    }

    /// Runs one step of a call. Fails after a timeout, or when the engine's call was dropped.
    async fn within<T>(
        &self,
        patience: Duration,
        step: impl Future<Output = T>,
    ) -> Result<T, ContentError> {
        let mut wanted = self.wanted.clone();
        tokio::select! {
            done = timeout(patience, step) => done.map_err(|_elapsed| self.failed(ContentFault::Silent(patience))),
            () = wanted.gone() => Err(self.failed(ContentFault::Unwanted)),
        }
    }

    /// Returns the reply to a message.
    async fn answer<T>(
        &self,
        patience: Duration,
        step: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, ContentError> {
        let answer = self.within(patience, step).await?;
        answer.map_err(|status| self.refused(&status))
    }

    fn refused(&self, status: &Status) -> ContentError {
        let code = status.code();
        self.failed(ContentFault::Refused(match status.message() {
            "" => code.to_string(),
            message => message.to_owned(),
        }))
    }
}

impl ContentStore {
    fn call(&self, action: String, headers: &EngineHeaders, wanted: &CancelToken) -> ContentCall {
        let (headers, wanted) = (headers.clone(), wanted.clone());
        ContentCall { action, store: self.clone(), headers, wanted }
    }

    /// Creates a lease that keeps new content until `end`, unless the call has one. Engines use leases themselves,
    /// but do not pass them on to differs.
    pub(super) async fn lease(
        &self,
        mut headers: EngineHeaders,
        end: String,
        wanted: &CancelToken,
    ) -> Result<EngineHeaders, ContentError> {
        if headers.has(LEASE) {
            return Ok(headers);
        }
        let call = self.call("get a lease from".to_owned(), &headers, wanted);
        let connection = call.connect().await?;
        let mut client = LeasesClient::new(connection.channel.clone());
        let labels = HashMap::from([(LEASE_END.to_owned(), end)]);
        // The engine chooses the lease's id.
        let request = call.headers.with(CreateRequest { labels, ..CreateRequest::default() });
        let lease = match call.within(self.patience, client.create(request)).await? {
            Ok(answer) => answer.into_inner().lease.unwrap_or_default(),
            Err(status) => {
                // The lease matters only if the engine collects garbage at this moment.
                tracing::warn!(error = status.message(), "cannot get a lease from the engine");
                return Ok(headers);
            }
        };
        if let Ok(value) = lease.id.parse() {
            headers.0.push((LEASE, value));
        }
        Ok(headers)
    }
}
