//! The differ as containerd calls it: layers go into the store without being unpacked anywhere.

use std::path::PathBuf;
use std::sync::Arc;

use image::digest::Digest;
use tonic::{Request, Response, Status};

use super::api::diff::diff_server::Diff;
use super::api::diff::{ApplyRequest, ApplyResponse, DiffRequest, DiffResponse};
use super::api::types::Descriptor;
use super::content::{ContentStore, NAMESPACE};
use super::ingest::LayerClaim;
use super::service::status;
use super::snapshotter::Snapshotter;

/// The media type of a layer that is not compressed. Source: OCI image-spec, "Media Types".
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

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
        let namespace = request.metadata().get(NAMESPACE).cloned();
        let ApplyRequest { diff, mounts } = request.into_inner();
        let diff = diff.ok_or_else(|| Status::invalid_argument("there is no descriptor"))?;
        let digest: Digest = diff
            .digest
            .parse()
            .map_err(|error| Status::invalid_argument(format!("the descriptor: {error}")))?;
        let [mount] = &mounts[..] else {
            return Err(Status::unimplemented("only roots of this snapshotter are unpacked to"));
        };
        // Others are for the engine's own differ.
        let root = PathBuf::from(&mount.source);
        let key = self.snapshotter.unpacked_at(&root);
        let key = key.ok_or_else(|| {
            Status::unimplemented(format!("{} is no root to unpack to", root.display()))
        })?;
        let claim = LayerClaim {
            digest,
            size: u64::try_from(diff.size).ok().filter(|it| *it > 0),
            media_type: diff.media_type,
        };
        let begun = std::time::Instant::now();
        // It looks at the disk, where nobody else may wait.
        let snapshotter = Arc::clone(&self.snapshotter);
        let known = tokio::task::spawn_blocking(move || snapshotter.known_layer(&digest)).await;
        let known = known.map_err(|error| Status::internal(error.to_string()))?;
        let is_known = known.is_some();
        let snapshotter = Arc::clone(&self.snapshotter);
        let applied = match known {
            Some(layer) => {
                tokio::task::spawn_blocking(move || snapshotter.apply_known(&key, &layer)).await
            }
            None => {
                let blob = self.content.read(&digest, namespace).await?;
                tokio::task::spawn_blocking(move || snapshotter.apply(&key, &claim, blob)).await
            }
        };
        let applied = applied.map_err(|error| Status::internal(error.to_string()))?;
        let took = begun.elapsed();
        let applied = applied.map_err(|error| {
            let status = status(&error);
            tracing::info!(call = "apply", blob = %digest, ?took, error = status.message(), "refused");
            status
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

    async fn diff(&self, _: Request<DiffRequest>) -> Result<Response<DiffResponse>, Status> {
        Err(Status::unimplemented("this differ compares no roots yet"))
    }
}
