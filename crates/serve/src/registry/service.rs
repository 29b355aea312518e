//! Accepts connections and answers requests.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::header::RANGE;
use hyper::http::request::Parts as Head;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use image::digest::Digest;
use oci::policy::Repository;
use store::{CheckedSource, StoredManifestError};
use tokio::sync::{mpsc, oneshot};

use super::RegistryResources;
use super::catalog::Catalog;
use super::content::{CheckedSources, Wanted, WantedSource, send};
use super::error::Refused;
use super::lazy_layers::LazyLayer;
use super::quota::{Held, Quota};
use super::range::WantedRange;
use super::response::{self, Body};
use super::route::{Route, RouteError};
use crate::http::connection::Patient;

/// Maximum number of connections, of all clients and of one.
const CONNECTIONS: (usize, usize) = (512, 64);
/// Maximum number of blobs that are sent at a time, to all clients and to one. Each takes a thread.
const TRANSFERS: (usize, usize) = (128, 32);
/// Maximum number of documents that are read at a time, for all clients and for one.
const LOOKUPS: (usize, usize) = (64, 16);
/// Time for which a request waits for one of these.
const TURN: Duration = Duration::from_secs(5);
/// Pause before a waiting request looks again.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum time for the head of a request, and between two requests.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);
/// Maximum size of the head of a request, in bytes, and number of its headers.
const HEAD_MAX: (usize, usize) = (16 << 10, 64);
/// Parts of a body that wait for the client.
const PARTS: usize = 2;
/// Pause after the kernel could not accept a connection, for example because there are no descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a registry cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeRegistryError {
    /// Threads cannot be started.
    #[error("cannot start")]
    Start(#[source] io::Error),
    /// The socket cannot be used.
    #[error("cannot use the socket")]
    Socket(#[source] io::Error),
}

/// Serves clients at `listener` until `stop` returns. `ready` is called when clients can connect.
///
/// # Errors
/// [`ServeRegistryError`]
pub fn serve_registry(
    resources: RegistryResources,
    listener: TcpListener,
    stop: impl FnOnce() + Send + 'static,
    ready: impl FnOnce(),
) -> Result<(), ServeRegistryError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(TRANSFERS.0 + LOOKUPS.0 + 1)
        .enable_io()
        .enable_time()
        .build()
        .map_err(ServeRegistryError::Start)?;
    let service = Arc::new(Service {
        resources,
        catalog: Catalog::default(),
        sources: CheckedSources::default(),
        connections: Quota::new(CONNECTIONS.0, CONNECTIONS.1),
        transfers: Quota::new(TRANSFERS.0, TRANSFERS.1),
        lookups: Quota::new(LOOKUPS.0, LOOKUPS.1),
    });
    let served = runtime.block_on(async {
        listener.set_nonblocking(true).map_err(ServeRegistryError::Socket)?;
        let listener = tokio::net::TcpListener::from_std(listener);
        let listener = listener.map_err(ServeRegistryError::Socket)?;
        let mut stopped = tokio::task::spawn_blocking(stop);
        ready();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ended = &mut stopped => return Ok(()),
            };
            match accepted {
                Ok((stream, address)) => Arc::clone(&service).connected(stream, address.ip()),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    });
    // Connections are cut. Clients continue at another host.
    runtime.shutdown_background();
    served
}

struct Service {
    resources: RegistryResources,
    catalog: Catalog,
    sources: CheckedSources,
    connections: Arc<Quota>,
    transfers: Arc<Quota>,
    lookups: Arc<Quota>,
}

/// The content of a successful response.
enum Found {
    Base,
    /// A document, with its digest and media type.
    Document(Digest, String, Vec<u8>),
    Bytes(Digest, Wanted),
    /// A list of referrers.
    List(Vec<u8>),
}

impl Service {
    fn connected(self: Arc<Self>, stream: tokio::net::TcpStream, client: IpAddr) {
        let Some(held) = self.connections.take(client) else {
            tracing::debug!(%client, "too many connections");
            return;
        };
        tokio::spawn(async move {
            let answer = service_fn(|request: Request<Incoming>| {
                let service = Arc::clone(&self);
                let (head, _no_body) = request.into_parts();
                async move { Ok::<_, Infallible>(service.answer(client, &head).await) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_PATIENCE)
                .max_buf_size(HEAD_MAX.0)
                .max_headers(HEAD_MAX.1)
                .serve_connection(TokioIo::new(Patient::new(stream)), answer);
            if let Err(error) = served.await {
                tracing::debug!(%client, %error, "a connection ended");
            }
            drop(held);
        });
    }

    async fn answer(self: &Arc<Self>, client: IpAddr, request: &Head) -> Response<Body> {
        let Head { method, uri, .. } = request;
        let response = self.respond(client, request).await;
        let response = response.unwrap_or_else(response::refusal);
        let status = response.status().as_u16();
        tracing::debug!(%client, %method, path = uri.path(), status, "request");
        response
    }

    async fn respond(
        self: &Arc<Self>,
        client: IpAddr,
        request: &Head,
    ) -> Result<Response<Body>, Refused> {
        if !matches!(request.method, Method::GET | Method::HEAD) {
            return Err(Refused::Method);
        }
        let route = Route::parse(request.uri.path(), request.uri.query());
        let route = route.map_err(|error| match error {
            RouteError::Absent => Refused::Address,
            RouteError::Name => Refused::Name,
            RouteError::Reference => Refused::Reference,
        })?;
        let range = request.headers.get(RANGE).map(|it| it.as_bytes().to_vec());
        let held = take_soon(&self.lookups, client).await?;
        let service = Arc::clone(self);
        let find = move || {
            // If the client is gone, the slot is in use until the thread is free.
            (service.find(&route, range.as_deref()), held)
        };
        // A panic was printed.
        let (found, slot) =
            tokio::task::spawn_blocking(find).await.map_err(|_error| Refused::Failed)?;
        let is_head = request.method == Method::HEAD;
        match found? {
            Found::Base => {
                Ok(response::whole(hyper::StatusCode::OK, "application/json", b"{}".to_vec()))
            }
            Found::Document(digest, media_type, bytes) => {
                Ok(response::document(&digest, &media_type, bytes, slot))
            }
            Found::List(bytes) => Ok(response::list(bytes)),
            Found::Bytes(digest, wanted) => {
                drop(slot);
                // Such a layer may not be complete, and `Range` has no meaning for HEAD.
                if is_head && matches!(wanted.source, WantedSource::Lazy(_)) {
                    return Err(Refused::Blob);
                }
                let head = response::head(&digest, wanted.size, wanted.part.as_ref());
                if is_head {
                    return Ok(head);
                }
                let slot = take_soon(&self.transfers, client).await?;
                self.bytes(head, wanted, slot).await
            }
        }
    }

    /// Starts to send bytes.
    async fn bytes(
        self: &Arc<Self>,
        head: Response<Body>,
        wanted: Wanted,
        slot: Held,
    ) -> Result<Response<Body>, Refused> {
        let (opened, is_open) = oneshot::channel();
        let (sender, parts) = mpsc::channel(PARTS);
        let service = Arc::clone(self);
        drop(tokio::task::spawn_blocking(move || {
            send(&service.resources, &service.sources, &wanted, opened, &sender, slot);
        }));
        // A panic was printed.
        is_open.await.unwrap_or(Err(Refused::Failed))?;
        Ok(response::with_parts(head, parts))
    }

    fn find(&self, route: &Route, range: Option<&[u8]>) -> Result<Found, Refused> {
        match route {
            Route::Base => Ok(Found::Base),
            Route::Manifest(name, digest) => self.manifest(name, digest),
            Route::Tag(name, tag) => {
                let repository = self.catalog.repository(&self.resources, name)?;
                let digest = repository.tags.get(tag).filter(|_| self.resources.tags);
                let digest = digest.or_else(|| repository.index_tags.get(tag));
                self.manifest(name, digest.ok_or(Refused::Manifest)?)
            }
            Route::Blob(name, digest) => self.blob(name, digest, range),
            Route::Indexes(name, digest) => {
                let repository = self.catalog.repository(&self.resources, name)?;
                let list = repository.index_lists.get(digest).ok_or(Refused::Manifest)?;
                Ok(Found::List(list.clone()))
            }
            // This registry knows only some of the referrers, so clients must ask another one.
            Route::Referrers(..) => Err(Refused::Manifest),
        }
    }

    fn manifest(&self, name: &Repository, digest: &Digest) -> Result<Found, Refused> {
        let repository = self.catalog.repository(&self.resources, name)?;
        let bytes = match repository.manifests.get(digest).ok_or(Refused::Manifest)? {
            Some(index) => index.clone(),
            None => self.document(digest)?.ok_or(Refused::Manifest)?,
        };
        let media_type = oci::manifest::media_type(&bytes);
        Ok(Found::Document(*digest, media_type, bytes))
    }

    fn blob(
        &self,
        name: &Repository,
        digest: &Digest,
        range: Option<&[u8]>,
    ) -> Result<Found, Refused> {
        let repository = self.catalog.repository(&self.resources, name)?;
        let blob = repository.blobs.get(digest).ok_or(Refused::Blob)?;
        if blob.is_config
            && let Some(bytes) = self.document(digest)?
        {
            return Ok(Found::Document(*digest, "application/octet-stream".to_owned(), bytes));
        }
        let store = &self.resources.store;
        let kept = || {
            let expected = blob.layer?;
            let (_, size) = store.downloads.blob(digest).ok().flatten()?;
            (size == expected).then_some((CheckedSource::Blob(*digest), size))
        };
        // The layer itself is opened, and hashed, only when its bytes are sent.
        let tar = || {
            let size = blob.tar?;
            let has = store.layers.has(digest).unwrap_or(false);
            has.then_some((CheckedSource::Tar(*digest), size))
        };
        let Some((source, size)) = kept().or_else(tar) else {
            return lazy_part(blob.lazy.as_ref().ok_or(Refused::Blob)?, range);
        };
        let part = match WantedRange::parse(range, size) {
            WantedRange::Whole => None,
            WantedRange::Part(part) => Some(part),
            WantedRange::Unsatisfiable => return Err(Refused::Range(size)),
        };
        let source = WantedSource::Complete(source);
        Ok(Found::Bytes(*digest, Wanted { source, size, part }))
    }

    /// Reads a manifest or config, which the store compares with its digest.
    fn document(&self, digest: &Digest) -> Result<Option<Vec<u8>>, Refused> {
        self.resources.store.manifests.read(digest).map_err(|error: StoredManifestError| {
            if self.sources.may_tell(digest) {
                let error: &dyn std::error::Error = &error;
                tracing::error!(%digest, error, "cannot serve a document: see `quire fsck`");
            }
            Refused::Failed
        })
    }
}

/// Returns a part of a layer that may be incomplete. The layer itself does not exist for clients.
fn lazy_part(layer: &Arc<LazyLayer>, range: Option<&[u8]>) -> Result<Found, Refused> {
    match WantedRange::parse_part(range, layer.size) {
        WantedRange::Whole => Err(Refused::Blob),
        WantedRange::Unsatisfiable => Err(Refused::Range(layer.size)),
        WantedRange::Part(part) => {
            let source = WantedSource::Lazy(Arc::clone(layer));
            let wanted = Wanted { source, size: layer.size, part: Some(part) };
            Ok(Found::Bytes(layer.diff_id, wanted))
        }
    }
}

/// Takes one of the things, as soon as there is one.
async fn take_soon(quota: &Arc<Quota>, client: IpAddr) -> Result<Held, Refused> {
    let begun = Instant::now();
    loop {
        if let Some(held) = quota.take(client) {
            return Ok(held);
        }
        if begun.elapsed() > TURN {
            return Err(Refused::Busy);
        }
        tokio::time::sleep(LOOK).await;
    }
}
