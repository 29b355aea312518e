//! The snapshotter as a gRPC service of containerd on a socket.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use store::{Moment, SnapshotKind};
use tokio::net::UnixListener;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use super::cri_proxy::ImageService;
use super::filter::Filters;
use super::status::status;
use crate::metrics::{MetricsListener, MetricsPages, serve_metrics};
use crate::snapshots::cancellation::Caller;
use crate::snapshots::content::{ContentStore, EngineHeaders};
use crate::snapshots::counts::{Asked, Counted};
use crate::snapshots::diff_service::Differ;
use crate::snapshots::error::SnapshotterError;
use crate::snapshots::labels::Labels;
use crate::snapshots::layers::heal::LostLayer;
use crate::snapshots::lazy::LazyLabels;
use crate::snapshots::metrics::page::NodeMetrics;
use crate::snapshots::settings::SnapshotAccess;
use crate::snapshots::snapshotter::{SnapshotMount, Snapshotter};
use crate::snapshots::space::collect::{CollectRequests, Collector};
use crate::snapshots::state::SnapshotInfo;
use containerd_api::counts::counts_server::CountsServer;
use containerd_api::diff::diff_server::DiffServer;
use containerd_api::snapshots::snapshots_server::{Snapshots, SnapshotsServer};
use containerd_api::{snapshots as api, types};

/// Number of snapshots in one message of a list: messages may have 4 MiB, and labels 4 KiB each.
const LIST_PART: usize = 64;

/// How long running calls may take to end.
const LAST_CALLS: Duration = Duration::from_secs(10);

/// Why a snapshotter cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeSnapshotsError {
    /// The socket cannot be created.
    #[error("cannot listen on {}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    /// Threads cannot be started.
    #[error("cannot start")]
    Start(#[source] io::Error),
    /// The gRPC server failed.
    #[error("cannot serve")]
    Serve(#[source] tonic::transport::Error),
}

/// Serves an engine at `socket` until `stop` returns. `engine` is the engine's own socket. Metrics are served at
/// `metrics`, if it is given. `ready` is called when the engine can connect.
pub fn serve_snapshots(
    snapshotter: Snapshotter,
    socket: &Path,
    engine: &Path,
    mut metrics: Option<MetricsListener>,
    stop: impl FnOnce() + Send + 'static,
    ready: impl FnOnce(),
) -> Result<(), ServeSnapshotsError> {
    let snapshotter = Arc::new(snapshotter);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_io()
        .enable_time()
        .build()
        .map_err(ServeSnapshotsError::Start)?;
    let choices = snapshotter.environment.collect;
    let metrics_file = metrics.as_mut().and_then(MetricsListener::take_file);
    let started = choices.map(|it| Collector::start(&snapshotter, it)).transpose();
    let (collector, collect) = started.map_err(ServeSnapshotsError::Start)?.unzip();
    let served = runtime.block_on(async {
        let (over, is_over) = tokio::sync::watch::channel(());
        let images = serve_images(&snapshotter, engine, is_over)?;
        let failed = |source| ServeSnapshotsError::Listen { path: socket.to_owned(), source };
        let listener = listen(socket, &snapshotter).map_err(failed)?;
        let stopped = tokio::task::spawn_blocking(stop);
        let counts = || Arc::clone(&snapshotter.counts);
        let instance = snapshotter.instance.name().to_owned();
        let asked = CountsServer::new(Asked { instance, counts: counts() });
        let patience = snapshotter.environment.patience;
        let content = ContentStore { socket: engine.to_owned(), patience };
        let (snapshots, blobs) = (Arc::clone(&snapshotter), content.clone());
        let service = Service { snapshotter: snapshots, content: blobs, collect };
        let service = Counted { service: SnapshotsServer::new(service), counts: counts() };
        if let Some(listener) = metrics {
            let node = NodeMetrics::new(Arc::clone(&snapshotter));
            let pages = MetricsPages {
                metrics: Box::new(move || node.text()),
                engine_socket: socket.to_owned(),
            };
            // It ends with the runtime.
            drop(tokio::spawn(serve_metrics(listener, pages)));
        }
        ready();
        let differ = Differ { snapshotter: Arc::clone(&snapshotter), content };
        let differ = Counted { service: DiffServer::new(differ), counts: counts() };
        let server = Server::builder().add_service(service).add_service(differ).add_service(asked);
        let incoming = UnixListenerStream::new(listener);
        let (told, tell) = tokio::sync::oneshot::channel::<()>();
        let ended = server.serve_with_incoming_shutdown(incoming, async {
            drop(stopped.await);
            // The receiver may be gone.
            let _told = told.send(());
        });
        let late = async {
            // The end must not wait for an engine that keeps its connection open.
            drop(tell.await);
            drop(over);
            tokio::time::sleep(LAST_CALLS).await;
        };
        let both = async {
            let ended = ended.await;
            if let Some(images) = images {
                drop(images.await);
            }
            ended
        };
        tokio::select! {
            ended = both => ended.map_err(ServeSnapshotsError::Serve),
            () = late => Ok(()),
        }
    });
    let lazy = snapshotter.environment.lazy.as_ref();
    if let Some(images) = lazy.and_then(|it| it.image_service.as_ref()) {
        // If listening failed, another service owns the socket.
        if !matches!(&served, Err(ServeSnapshotsError::Listen { path, .. }) if path == images) {
            drop(fs::remove_file(images));
        }
    }
    // The socket is removed, because clients could not connect. If listening failed, the socket belongs to another
    // service.
    if !matches!(served, Err(ServeSnapshotsError::Listen { .. })) {
        drop(fs::remove_file(socket));
    }
    if let Some(file) = metrics_file {
        file.remove();
    }
    snapshotter.stop();
    runtime.shutdown_timeout(LAST_CALLS);
    drop(collector);
    served
}

/// Serves the proxy of the engine's image service, if it is configured, until `is_over` changes.
fn serve_images(
    snapshotter: &Snapshotter,
    engine: &Path,
    mut is_over: tokio::sync::watch::Receiver<()>,
) -> Result<Option<tokio::task::JoinHandle<()>>, ServeSnapshotsError> {
    let Some(lazy) = &snapshotter.environment.lazy else { return Ok(None) };
    let Some(socket) = &lazy.image_service else { return Ok(None) };
    let service = ImageService::new(engine, Arc::clone(&lazy.images));
    let service = service.map_err(ServeSnapshotsError::Serve)?;
    let failed = |source| ServeSnapshotsError::Listen { path: socket.clone(), source };
    let incoming = UnixListenerStream::new(listen(socket, snapshotter).map_err(failed)?);
    let over = async move {
        // Messages are never sent: the wait ends when the sender is dropped.
        let _ended = is_over.changed().await;
    };
    let served =
        Server::builder().add_service(service).serve_with_incoming_shutdown(incoming, over);
    Ok(Some(tokio::spawn(async {
        if let Err(error) = served.await {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, "the image service for kubelet stopped");
        }
    })))
}

/// Listens at a socket to which only root may connect.
fn listen(socket: &Path, snapshotter: &Snapshotter) -> io::Result<UnixListener> {
    let listener = crate::socket::listen(socket, snapshotter.store.who(), 0o600)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Calls that change nothing. Kubernetes makes two of them every ten seconds for each snapshot of a node.
const READS: [&str; 4] = ["list", "mounts", "stat", "usage"];

/// Duration after which a call that changes nothing is logged, because the engine's own timeout is some seconds.
const SLOW: Duration = Duration::from_secs(1);

struct Service {
    snapshotter: Arc<Snapshotter>,
    content: ContentStore,
    collect: Option<CollectRequests>,
}

impl Service {
    /// Runs the blocking work of a call on another thread. Each call is logged, at the level `info` if it changes
    /// something, was refused or took long.
    async fn call<T: Send + 'static>(
        &self,
        call: &'static str,
        key: String,
        work: impl FnOnce(&Arc<Snapshotter>, &str) -> Result<T, SnapshotterError> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let snapshotter = Arc::clone(&self.snapshotter);
        let begun = std::time::Instant::now();
        let name = key.clone();
        let done = tokio::task::spawn_blocking(move || work(&snapshotter, &key)).await;
        let took = begun.elapsed();
        let done = done.map_err(|error| Status::internal(error.to_string()))?;
        match done {
            Ok(answer) if READS.contains(&call) && took < SLOW => {
                tracing::debug!(call, key = %name.escape_debug(), ?took, "done");
                Ok(Response::new(answer))
            }
            Ok(answer) => {
                tracing::info!(call, key = %name.escape_debug(), ?took, "done");
                Ok(Response::new(answer))
            }
            Err(error) => {
                let status = status(&error);
                if let SnapshotterError::Skipped(snapshot) = error {
                    // For engines this error means success.
                    tracing::info!(call, key = %name.escape_debug(), ?took, skipped = %snapshot, "done");
                    return Err(status);
                }
                let is_question = READS.contains(&call) && status.code() == Code::NotFound;
                if is_question && took < SLOW {
                    // Engines use this call to find out whether a snapshot exists, so an error is usual.
                    tracing::debug!(call, key = %name.escape_debug(), ?took, error = status.message(), "refused");
                } else {
                    tracing::info!(call, key = %name.escape_debug(), ?took, error = status.message(), "refused");
                }
                Err(status)
            }
        }
    }
}

impl Service {
    /// Reads damaged layers again. If this fails, the later request for a root fails and reports the lost data.
    async fn heal(&self, key: &str, parent: &str, headers: &EngineHeaders) {
        let (name, below) = (key.to_owned(), parent.to_owned());
        let snapshotter = Arc::clone(&self.snapshotter);
        let look = move || snapshotter.lost_layers(&name, &below);
        let lost = tokio::task::spawn_blocking(look).await.unwrap_or_default();
        for LostLayer { diff_id, blobs } in lost {
            let mut succeeded = false;
            for claim in blobs {
                let (_caller, wanted) = Caller::new();
                let blob = match self.content.read(&claim.digest, headers, &wanted).await {
                    Ok(blob) => blob,
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(layer = %diff_id, error, "cannot read a damaged layer again");
                        continue;
                    }
                };
                let snapshotter = Arc::clone(&self.snapshotter);
                let digest = claim.digest;
                let read = move || snapshotter.read_again(&claim, blob, &wanted);
                match tokio::task::spawn_blocking(read).await {
                    Ok(Ok(())) => {
                        tracing::info!(layer = %diff_id, blob = %digest, "repaired a damaged layer");
                        succeeded = true;
                        break;
                    }
                    Ok(Err(error)) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(layer = %diff_id, error, "cannot read a damaged layer again");
                    }
                    Err(error) => tracing::error!(%error, "reading a layer again failed"),
                }
            }
            self.snapshotter.counts.repaired(succeeded);
        }
    }

    /// Returns the image of a layer that an engine prepares, if it may start before its layers are downloaded.
    async fn lazy_wanted(
        &self,
        labels: &HashMap<String, String>,
        headers: &EngineHeaders,
    ) -> Option<LazyLabels> {
        if !self.snapshotter.starts_lazily() {
            return None;
        }
        let wanted = LazyLabels::from_labels(labels)?;
        let (_caller, until) = Caller::new();
        match self.content.labels(&wanted.manifest, headers, &until).await {
            Ok(labels) if wanted.is_from(&labels) => Some(wanted),
            Ok(_) => {
                tracing::debug!(manifest = %wanted.manifest, "the engine has the manifest from another repository");
                None
            }
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "cannot determine the origin of an engine's image");
                None
            }
        }
    }
}

/// Label with the digests of a layer's blob and of those above it, separated by commas. Source: containerd's
/// `pkg/snapshotters/annotations.go`, `TargetImageLayersLabel`.
const LAYERS_ABOVE: &str = "containerd.io/snapshot/cri.image-layers";

/// Returns whether a layer is the last one of its image, according to its labels, so that a container comes next.
fn is_last_layer(labels: &HashMap<String, String>) -> bool {
    labels.get(LAYERS_ABOVE).is_some_and(|it| !it.is_empty() && !it.contains(','))
}

/// Starts to make an image that a container will need soon. A call that needs the image earlier waits for it.
fn make_ready(snapshotter: &Arc<Snapshotter>, name: String) {
    let snapshotter = Arc::clone(snapshotter);
    drop(tokio::task::spawn_blocking(move || snapshotter.make_ready(&name)));
}

fn mount(it: &SnapshotMount) -> types::Mount {
    let access = if it.is_writable { "rw" } else { "ro" };
    types::Mount {
        r#type: "bind".to_owned(),
        source: it.source.to_string_lossy().into_owned(),
        target: String::new(),
        options: vec!["rbind".to_owned(), access.to_owned()],
    }
}

fn info(it: SnapshotInfo) -> api::Info {
    let time = |it: Moment| {
        let nanos = i32::try_from(it.nanoseconds).unwrap_or_default();
        Some(prost_types::Timestamp { seconds: it.seconds, nanos })
    };
    let kind = match it.record.kind {
        SnapshotKind::View => api::Kind::View,
        SnapshotKind::Active(_) => api::Kind::Active,
        SnapshotKind::Committed(_) | SnapshotKind::Directory(_) => api::Kind::Committed,
    };
    api::Info {
        name: it.record.name,
        parent: it.parent,
        kind: kind.into(),
        created_at: time(it.record.created),
        updated_at: time(it.record.updated),
        labels: it.record.labels.into_iter().collect(),
    }
}

fn labels(labels: HashMap<String, String>) -> Labels {
    BTreeMap::from_iter(labels)
}

type Lists = Pin<Box<dyn Stream<Item = Result<api::ListSnapshotsResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Snapshots for Service {
    async fn prepare(
        &self,
        request: Request<api::PrepareSnapshotRequest>,
    ) -> Result<Response<api::PrepareSnapshotResponse>, Status> {
        let headers = EngineHeaders::from_metadata(request.metadata());
        let it = request.into_inner();
        let is_last = is_last_layer(&it.labels);
        let lazy = self.lazy_wanted(&it.labels, &headers).await;
        self.heal(&it.key, &it.parent, &headers).await;
        self.call("prepare", it.key, move |snapshotter, key| {
            let access = SnapshotAccess::Write;
            let labels = labels(it.labels);
            let skipped = snapshotter.skip(&it.parent, &labels).and_then(|()| match &lazy {
                Some(wanted) => snapshotter.skip_lazily(&it.parent, &labels, wanted),
                None => Ok(()),
            });
            if let Err(error) = skipped {
                if let SnapshotterError::Skipped(name) = &error
                    && is_last
                {
                    make_ready(snapshotter, name.clone());
                }
                return Err(error);
            }
            let made = snapshotter.prepare(key, &it.parent, &labels, access)?;
            Ok(api::PrepareSnapshotResponse { mounts: vec![mount(&made)] })
        })
        .await
    }

    async fn view(
        &self,
        request: Request<api::ViewSnapshotRequest>,
    ) -> Result<Response<api::ViewSnapshotResponse>, Status> {
        let headers = EngineHeaders::from_metadata(request.metadata());
        let it = request.into_inner();
        self.heal(&it.key, &it.parent, &headers).await;
        self.call("view", it.key, move |snapshotter, key| {
            let access = SnapshotAccess::Read;
            let made = snapshotter.prepare(key, &it.parent, &labels(it.labels), access)?;
            Ok(api::ViewSnapshotResponse { mounts: vec![mount(&made)] })
        })
        .await
    }

    async fn mounts(
        &self,
        request: Request<api::MountsRequest>,
    ) -> Result<Response<api::MountsResponse>, Status> {
        self.call("mounts", request.into_inner().key, |snapshotter, key| {
            Ok(api::MountsResponse { mounts: vec![mount(&snapshotter.mounts(key)?)] })
        })
        .await
    }

    async fn commit(
        &self,
        request: Request<api::CommitSnapshotRequest>,
    ) -> Result<Response<()>, Status> {
        let it = request.into_inner();
        self.call("commit", it.key, move |snapshotter, key| {
            snapshotter.check_parent(key, &it.parent)?;
            let is_last = is_last_layer(&it.labels);
            snapshotter.commit(&it.name, key, &labels(it.labels))?;
            if is_last {
                make_ready(snapshotter, it.name);
            }
            Ok(())
        })
        .await
    }

    async fn remove(
        &self,
        request: Request<api::RemoveSnapshotRequest>,
    ) -> Result<Response<()>, Status> {
        self.call("remove", request.into_inner().key, |snapshotter, key| snapshotter.remove(key))
            .await
    }

    async fn stat(
        &self,
        request: Request<api::StatSnapshotRequest>,
    ) -> Result<Response<api::StatSnapshotResponse>, Status> {
        self.call("stat", request.into_inner().key, |snapshotter, key| {
            Ok(api::StatSnapshotResponse { info: Some(info(snapshotter.stat(key)?)) })
        })
        .await
    }

    async fn update(
        &self,
        request: Request<api::UpdateSnapshotRequest>,
    ) -> Result<Response<api::UpdateSnapshotResponse>, Status> {
        let it = request.into_inner();
        let wanted = it.info.unwrap_or_default();
        let fields = it.update_mask.map(|it| it.paths).unwrap_or_default();
        self.call("update", wanted.name, move |snapshotter, key| {
            let updated = snapshotter.update(key, &labels(wanted.labels), &fields)?;
            Ok(api::UpdateSnapshotResponse { info: Some(info(updated)) })
        })
        .await
    }

    type ListStream = Lists;

    async fn list(
        &self,
        request: Request<api::ListSnapshotsRequest>,
    ) -> Result<Response<Lists>, Status> {
        let filters = request.into_inner().filters;
        self.call("list", filters.join(" or "), move |snapshotter, _| {
            let filters = Filters::parse(filters.iter().map(String::as_str))?;
            let mut infos = snapshotter.list(&filters).into_iter().map(info);
            let parts = std::iter::from_fn(move || {
                let info: Vec<_> = infos.by_ref().take(LIST_PART).collect();
                (!info.is_empty()).then_some(Ok(api::ListSnapshotsResponse { info }))
            });
            Ok(Box::pin(tokio_stream::iter(parts)) as Lists)
        })
        .await
    }

    async fn usage(
        &self,
        request: Request<api::UsageRequest>,
    ) -> Result<Response<api::UsageResponse>, Status> {
        self.call("usage", request.into_inner().key, |snapshotter, key| {
            let usage = snapshotter.usage(key)?;
            let number = |it| i64::try_from(it).unwrap_or(i64::MAX);
            let (size, inodes) = (number(usage.bytes), number(usage.inodes));
            Ok(api::UsageResponse { size, inodes })
        })
        .await
    }

    async fn cleanup(
        &self,
        _request: Request<api::CleanupRequest>,
    ) -> Result<Response<()>, Status> {
        let done = self.call("cleanup", String::new(), |snapshotter, _| {
            snapshotter.cleanup();
            Ok(())
        });
        let done = done.await;
        if let Some(collect) = &self.collect {
            collect.send(&self.snapshotter).await;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshots::error::unopened;

    #[test]
    fn a_full_disk_has_a_way_out() {
        let told = |kind: io::ErrorKind| status(&unopened(kind.into()).into()).message().to_owned();
        let full = told(io::ErrorKind::StorageFull);
        assert!(full.ends_with("or give the store a larger disk"), "{full}");
        assert!(!told(io::ErrorKind::NotFound).contains("disk"));
    }

    #[test]
    fn a_layer_that_is_here_is_one_that_exists() {
        let skipped = status(&SnapshotterError::Skipped("quire/x".to_owned()));
        assert_eq!(skipped.code(), Code::AlreadyExists);
    }
}
