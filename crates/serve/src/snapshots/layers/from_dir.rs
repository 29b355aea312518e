//! Makes a layer of the changes of a root, and an image of this layer and the image below.

use std::fs::File;
use std::io::Read;
use std::num::NonZeroUsize;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use container::changes::{self, Owners as Ids, Upper};
use image::digest::Digest;
use image::erofs::read::Owners;
use image::tree::{Builder, Tree};
use image::verity::ImageId;
use store::{OperationError, Seconds, SnapshotContent, Store, Transaction};
use transfer::import::{
    BUDGET, Below, Durable, ImportContext, ImportOptions, IncomingLayer, LayerImport, Report,
    add_unknown, stack,
};

use crate::snapshots::cancellation::CancelToken;
use crate::snapshots::error::{SnapshotterError, unopened};

/// The resources for making layers.
#[derive(Debug)]
pub(in crate::snapshots) struct Resources {
    pub(in crate::snapshots) threads: NonZeroUsize,
    pub(in crate::snapshots) scratch: PathBuf,
    /// Set to end running work.
    pub(in crate::snapshots) cancel: AtomicBool,
}

/// The engine's description of a blob. All of it is verified.
#[derive(Debug, Clone)]
pub(in crate::snapshots) struct LayerClaim {
    pub(in crate::snapshots) digest: Digest,
    /// Size in bytes.
    pub(in crate::snapshots) size: Option<u64>,
    /// Empty if unknown.
    pub(in crate::snapshots) media_type: String,
}

/// The base of a new layer.
#[derive(Debug, Clone)]
pub(in crate::snapshots) struct Base {
    /// `None` for an empty base.
    pub(in crate::snapshots) image: Option<ImageId>,
    /// The layers of the image, from the lowest.
    pub(in crate::snapshots) layers: Vec<Digest>,
}

impl Resources {
    /// Makes layer and image of everything in `upper`. `ids` maps its owners.
    pub(in crate::snapshots) fn ingest(
        &self,
        store: &Store,
        base: &Base,
        upper: &Path,
        ids: &Ids,
        now: Seconds,
    ) -> Result<SnapshotContent, SnapshotterError> {
        let tree = match &base.image {
            Some(image) => tree_of(store, image)?,
            None => Builder::new().finish(),
        };
        let directory = File::open(upper).map_err(unopened)?;
        let upper = Upper {
            directory: directory.as_fd(),
            image: &tree,
            store,
            ids,
            latest: None,
            cancel: &self.cancel,
        };
        let below = Below { tree: &tree, diff_ids: &base.layers };
        let (changes, report) = changes::through(
            |out| changes::write(&upper, out),
            |tar| self.add(store, below, tar, now),
        )?;
        tell_of_skipped(&changes);
        Ok(SnapshotContent { inodes: changes.entries, ..content(&report) })
    }

    /// Makes an empty image.
    pub(in crate::snapshots) fn nothing(
        &self,
        store: &Store,
        now: Seconds,
    ) -> Result<ImageId, SnapshotterError> {
        let below = Below { tree: &Builder::new().finish(), diff_ids: &[] };
        // Two blocks of zeros end a tar.
        Ok(self.add(store, below, &[0; 1024][..], now)?.image)
    }

    /// Reads a blob into the store. The layer is kept from `gc` until the keeper is dropped.
    pub(in crate::snapshots) fn layer(
        &self,
        keeper: &Transaction<'_>,
        claim: &LayerClaim,
        blob: impl Read + Send,
        wanted: &CancelToken,
        now: Seconds,
    ) -> Result<SnapshotContent, SnapshotterError> {
        let options = ImportOptions {
            durable: Durable::EachLayer,
            keeper: Some(keeper),
            ..ImportOptions::default()
        };
        let environment = ImportContext { cancel: wanted.cancel(), ..self.environment(now) };
        let import = LayerImport::begin(keeper.store(), &environment, &options)?;
        let layers = import.layers().layer(IncomingLayer {
            name: claim.digest.to_string(),
            blob: Box::new(blob),
            media_type: claim.media_type.clone(),
            digest: Some(claim.digest),
            size: claim.size,
            diff_id: None,
        })?;
        let committed = layers.committed();
        // Freed memory is returned to the system, because the next layer may come days later.
        kernel::process::trim_heap();
        let layer = layers.reports().next().map(|it| it.diff_id).expect("one layer was added");
        let bytes = committed.object_bytes;
        Ok(SnapshotContent { layer, image: None, lazy: None, bytes, inodes: committed.objects })
    }

    /// Makes the image of layers, and returns it with its size in bytes.
    pub(in crate::snapshots) fn stack(
        &self,
        store: &Store,
        layers: &[Digest],
        now: Seconds,
    ) -> Result<(ImageId, u64), SnapshotterError> {
        let made = stack(store, layers, &self.environment(now), &ImportOptions::default())?;
        Ok((made.image, made.image_bytes))
    }

    fn environment(&self, now: Seconds) -> ImportContext<'_> {
        ImportContext {
            now,
            threads: self.threads,
            budget: BUDGET,
            scratch: &self.scratch,
            progress: &|_| {},
            cancel: &self.cancel,
        }
    }

    fn add(
        &self,
        store: &Store,
        below: Below<'_>,
        tar: impl Read + Send,
        now: Seconds,
    ) -> Result<Report, SnapshotterError> {
        let options = ImportOptions::default();
        Ok(add_unknown(store, below, tar, &self.environment(now), &options)?)
    }
}

/// Logs files that a layer cannot contain.
pub(in crate::snapshots) fn tell_of_skipped(changes: &changes::Report) {
    for path in &changes.skipped {
        let path = path.escape_ascii();
        tracing::warn!(%path, "leaving a socket out of the layer of a snapshot, because layers \
            cannot contain sockets");
    }
}

pub(in crate::snapshots) fn tree_of(
    store: &Store,
    image: &ImageId,
) -> Result<Tree, SnapshotterError> {
    let opened = store.open_image(image);
    let opened = opened.map_err(|error| SnapshotterError::Image(Box::new(error)))?;
    let read = store.tree(&opened, Owners::AsWritten);
    Ok(read.map_err(OperationError::of("read image", image))?.tree)
}

fn content(report: &Report) -> SnapshotContent {
    let layer = report.layers[0].diff_id;
    let (image, bytes) = (report.image, report.objects.object_bytes + report.image_bytes);
    SnapshotContent { layer, image: Some(image), lazy: None, bytes, inodes: 0 }
}
