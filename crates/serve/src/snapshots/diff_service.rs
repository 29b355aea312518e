//! containerd's differ service. It imports layers into the store without unpacking them, and writes layers from the
//! store without reading an image.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use image::digest::Digest;
use image::tree::Timestamp;
use oci::manifest::is_erofs_layer;
use store::SnapshotError;
use tonic::{Request, Response, Status};
use transfer::export::{Encoding, PackedLayer};

use super::cancellation::{Caller, CancelToken};
use super::content::{ContentError, ContentStore, EngineHeaders, NewContent};
use super::error::SnapshotterError;
use super::grpc::status::status;
use super::layers::AppliedLayer;
use super::layers::compare::{Compared, LayerRequest};
use super::layers::from_dir::LayerClaim;
use super::snapshotter::Snapshotter;
use containerd_api::diff::diff_server::Diff;
use containerd_api::diff::{ApplyRequest, ApplyResponse, DiffRequest, DiffResponse};
use containerd_api::types::{Descriptor, Mount};

/// Media types of layers. Source: OCI image-spec, "Media Types".
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

pub(super) struct Differ {
    pub(super) snapshotter: Arc<Snapshotter>,
    pub(super) content: ContentStore,
}

#[tonic::async_trait]
impl Diff for Differ {
    async fn apply(
        &self,
        request: Request<ApplyRequest>,
    ) -> Result<Response<ApplyResponse>, Status> {
        let headers = EngineHeaders::from_metadata(request.metadata());
        let ApplyRequest { diff, mounts } = request.into_inner();
        let diff = diff.ok_or_else(|| Status::invalid_argument("the descriptor is missing"))?;
        let digest: Digest = diff
            .digest
            .parse()
            .map_err(|error| Status::invalid_argument(format!("the descriptor: {error}")))?;
        // The engine has a differ for these if it uses its own snapshotter for EROFS.
        if is_erofs_layer(&diff.media_type) {
            return Err(Status::unimplemented(
                "this snapshotter does not unpack EROFS layers: pull the image with `quire pull`",
            ));
        }
        // Other mounts are left to the engine's differ.
        let [mount] = &mounts[..] else {
            return Err(Status::unimplemented(
                "can apply layers only to roots of this snapshotter",
            ));
        };
        let key = self.snapshotter.unpacked_at(Path::new(&mount.source));
        let key = key.ok_or_else(|| {
            Status::unimplemented(format!("{} is not a root for applying layers", mount.source))
        })?;
        let claim = LayerClaim {
            digest,
            size: u64::try_from(diff.size).ok().filter(|it| *it > 0),
            media_type: diff.media_type,
        };
        let begun = Instant::now();
        let (_caller, wanted) = Caller::new();
        let applied = self.apply_layer(key, claim, &headers, &wanted).await;
        let took = begun.elapsed();
        let (applied, is_known) = applied.inspect_err(|status| {
            tracing::info!(call = "apply", blob = %digest, ?took, error = status.message(), "refused");
        })?;
        tracing::info!(call = "apply", blob = %digest, ?took, is_known, "done");
        let applied = Descriptor {
            media_type: TAR.to_owned(),
            digest: applied.diff_id.to_string(),
            size: i64::try_from(applied.bytes).unwrap_or(i64::MAX),
            ..Descriptor::default()
        };
        Ok(Response::new(ApplyResponse { applied: Some(applied) }))
    }

    async fn diff(&self, request: Request<DiffRequest>) -> Result<Response<DiffResponse>, Status> {
        let headers = EngineHeaders::from_metadata(request.metadata());
        let request = request.into_inner();
        let media_type = match &*request.media_type {
            "" => GZIP.to_owned(),
            media_type => media_type.to_owned(),
        };
        // The engine tries its own differ only if the status is `Unimplemented`.
        let encoding = encoding(&media_type).ok_or_else(|| {
            Status::unimplemented(format!("layers of the type {media_type} are not supported"))
        })?;
        let compared = self.compared(&request).ok_or_else(|| {
            Status::unimplemented(
                "can compare only a root of this snapshotter with a view of its parent",
            )
        })?;
        let content = NewContent { reference: request.r#ref, labels: request.labels };
        let wish = LayerRequest { encoding, latest: request.source_date_epoch.map(timestamp) };
        let begun = Instant::now();
        let (_caller, wanted) = Caller::new();
        let written = self.write_layer(compared, wish, content, headers, &wanted).await;
        let took = begun.elapsed();
        let written = written.inspect_err(|status| {
            tracing::info!(call = "diff", ?took, error = status.message(), "refused");
        })?;
        tracing::info!(call = "diff", blob = %written.digest, bytes = written.size, ?took, "done");
        let diff = Descriptor {
            media_type,
            digest: written.digest.to_string(),
            size: i64::try_from(written.size).unwrap_or(i64::MAX),
            ..Descriptor::default()
        };
        Ok(Response::new(DiffResponse { diff: Some(diff) }))
    }
}

impl Differ {
    /// Imports a layer for a snapshot. Also returns whether the store already had the layer.
    async fn apply_layer(
        &self,
        key: String,
        claim: LayerClaim,
        headers: &EngineHeaders,
        wanted: &CancelToken,
    ) -> Result<(AppliedLayer, bool), Status> {
        let digest = claim.digest;
        let known = self.work(move |snapshotter| Ok(snapshotter.known_layer(&digest))).await?;
        if let Some(layer) = known {
            let key = key.clone();
            let applied = self.work(move |snapshotter| kept(snapshotter.apply_known(&key, &layer)));
            // If `gc` has removed the layer in between, the layer's blob is read.
            if let Some(applied) = applied.await? {
                return Ok((applied, true));
            }
        }
        let blob = self.content.read(&digest, headers, wanted).await;
        let blob = blob.map_err(|error| status(&error.into()))?;
        let wanted = wanted.clone();
        let applied = self.work(move |snapshotter| snapshotter.apply(&key, &claim, blob, &wanted));
        Ok((applied.await?, false))
    }

    /// Returns the difference that is requested, if this differ can write it.
    fn compared(&self, request: &DiffRequest) -> Option<Compared> {
        let root = |mounts: &[Mount]| match mounts {
            [mount] if mount.r#type == "bind" => Some(PathBuf::from(&mount.source)),
            _ => None,
        };
        let (left, right) = (root(&request.left)?, root(&request.right)?);
        match self.snapshotter.compared(&left, &right)? {
            // The times in layers of the store are fixed.
            Compared::Layer(_) | Compared::Directory(_) if request.source_date_epoch.is_some() => {
                None
            }
            compared => Some(compared),
        }
    }

    async fn write_layer(
        &self,
        compared: Compared,
        wish: LayerRequest,
        content: NewContent,
        headers: EngineHeaders,
        wanted: &CancelToken,
    ) -> Result<PackedLayer, Status> {
        let failed = |error: ContentError| status(&error.into());
        let end = (self.snapshotter.environment.in_an_hour)();
        let headers = self.content.lease(headers, end, wanted).await.map_err(failed)?;
        let out = self.content.write(content, &headers, wanted).await;
        let mut out = out.map_err(failed)?;
        let wanted = wanted.clone();
        self.work(move |snapshotter| {
            let packed = snapshotter.write_compared(&compared, wish, &wanted, &mut out)?;
            out.commit(&packed)?;
            Ok(packed)
        })
        .await
    }

    /// Runs blocking work on a thread for blocking work.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Snapshotter) -> Result<T, SnapshotterError> + Send + 'static,
    ) -> Result<T, Status> {
        let snapshotter = Arc::clone(&self.snapshotter);
        let done = tokio::task::spawn_blocking(move || work(&snapshotter)).await;
        let done = done.map_err(|error| Status::internal(error.to_string()))?;
        done.map_err(|error| status(&error))
    }
}

/// Returns the compression for a media type, if it can be written. The inner `None` is a plain tar.
fn encoding(media_type: &str) -> Option<Option<Encoding>> {
    match media_type {
        TAR => Some(None),
        GZIP => Some(Some(Encoding::Gzip)),
        ZSTD => Some(Some(Encoding::Zstd)),
        _ => None,
    }
}

fn timestamp(it: prost_types::Timestamp) -> Timestamp {
    let nanoseconds = u32::try_from(it.nanos).unwrap_or_default().min(999_999_999);
    Timestamp { seconds: it.seconds, nanoseconds }
}

/// Returns `None` for a layer that was gone when its record was written.
fn kept<T>(applied: Result<T, SnapshotterError>) -> Result<Option<T>, SnapshotterError> {
    match applied {
        Err(SnapshotterError::Store(SnapshotError::Gone(_))) => Ok(None),
        applied => applied.map(Some),
    }
}
