//! The content store of an engine: its blobs are read there, and new layers are written there.
//!
//! It is another process, which may hang, lie or end. So each of its messages is waited for a limited time, and what it
//! says of bytes is compared with what was sent.

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

use super::cancellation::Wanted;
use containerd_api::leases::CreateRequest;
use containerd_api::leases::leases_client::LeasesClient;

use connection::{BoxError, Connection};
pub(super) use write::{ContentWriter, NewContent};

/// How long an engine's content store may be silent before a call is given up. Disks that are busy take seconds for one
/// message of a mebibyte, and no working ones take a minute.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Messages that wait to be taken: containerd's have up to 1 MiB.
const AHEAD: usize = 4;

/// Headers of an engine's calls: in which namespace content is, and which lease keeps it from the engine's garbage
/// collector. Source: containerd's packages `namespaces` and `leases`.
const HEADERS: [&str; 2] = ["containerd-namespace", LEASE];
const LEASE: &str = "containerd-lease";
/// The label with the end of a lease, as RFC 3339 writes times. Source: containerd's `docs/garbage-collection.md`.
const LEASE_END: &str = "containerd.io/gc.expire";

/// The content store of an engine.
#[derive(Debug, Clone)]
pub(super) struct ContentStore {
    /// The engine's socket.
    pub(super) socket: PathBuf,
    /// How long it may be silent.
    pub(super) patience: Duration,
}

/// Headers of a call of the engine that belong to calls which are made for it.
#[derive(Debug, Clone, Default)]
pub(super) struct EngineHeaders(Vec<(&'static str, MetadataValue<Ascii>)>);

impl EngineHeaders {
    pub(super) fn of(headers: &MetadataMap) -> Self {
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

/// Why bytes cannot be had from the content store of an engine, or not be given to it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the content store of the engine at {}", socket.display())]
pub struct ContentError {
    /// The action, with its object and a preposition.
    action: String,
    /// The engine's socket.
    socket: PathBuf,
    /// The cause.
    source: ContentFault,
}

/// What a content store has done, or not done.
#[derive(Debug, thiserror::Error)]
enum ContentFault {
    #[error("cannot connect: `--engine PATH` says where the engine listens")]
    Connect(#[source] BoxError),
    #[error("it was silent for {} seconds: see whether the engine hangs, and try again", .0.as_secs_f32())]
    Silent(Duration),
    #[error("{0}")]
    Refused(String),
    #[error("it ended the call early: the log of the engine may say why")]
    Ended,
    #[error("it gave bytes from {found} on where those from {expected} on come next")]
    Order { expected: u64, found: i64 },
    #[error("it says that it has {taken} bytes of {sent}")]
    Taken { sent: u64, taken: i64 },
    #[error("it says that what it was given has the digest {named}, not {sent}")]
    Digest { sent: Box<Digest>, named: String },
    #[error("the engine waits for it no longer")]
    Unwanted,
}

/// A call of the content store: who is called, for what, and how long it may take.
#[derive(Debug, Clone)]
struct ContentCall {
    action: String,
    store: ContentStore,
    headers: EngineHeaders,
    wanted: Wanted,
}

impl ContentCall {
    fn failed(&self, source: ContentFault) -> ContentError {
        let ContentStore { socket, .. } = &self.store;
        ContentError { action: self.action.clone(), socket: socket.clone(), source }
    }

    /// A connection for this call alone.
    async fn connect(&self) -> Result<Connection, ContentError> {
        let connecting = Connection::open(&self.store.socket);
        let connected = self.within(self.store.patience, connecting).await?;
        connected.map_err(|error| self.failed(ContentFault::Connect(error)))
    }

    /// The outcome of one step, if it comes in time and somebody waits for it.
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

    /// The answer to a message.
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
    fn call(&self, action: String, headers: &EngineHeaders, wanted: &Wanted) -> ContentCall {
        let (headers, wanted) = (headers.clone(), wanted.clone());
        ContentCall { action, store: self.clone(), headers, wanted }
    }

    /// Has the engine keep new content until `end`, or until it has a name. Engines have leases for that, but do not
    /// pass them on to differs.
    pub(super) async fn lease(
        &self,
        mut headers: EngineHeaders,
        end: String,
        wanted: &Wanted,
    ) -> Result<EngineHeaders, ContentError> {
        if headers.has(LEASE) {
            return Ok(headers);
        }
        let call = self.call("get a lease from".to_owned(), &headers, wanted);
        let connection = call.connect().await?;
        let mut client = LeasesClient::new(connection.channel.clone());
        let labels = HashMap::from([(LEASE_END.to_owned(), end)]);
        // The engine finds a name for it.
        let request = call.headers.with(CreateRequest { labels, ..CreateRequest::default() });
        let lease = match call.within(self.patience, client.create(request)).await? {
            Ok(answer) => answer.into_inner().lease.unwrap_or_default(),
            Err(status) => {
                // It matters only if the engine collects garbage this moment.
                tracing::warn!(error = status.message(), "the engine gives no lease");
                return Ok(headers);
            }
        };
        if let Ok(value) = lease.id.parse() {
            headers.0.push((LEASE, value));
        }
        Ok(headers)
    }
}
