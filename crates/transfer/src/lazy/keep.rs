//! Keeps the index of a pulled image in the store, so that other hosts can fetch it from `quire serve --registry`.

use image::digest::Digest;
use image::verity::ImageId;
use store::{KeepIndexError, KeptIndex, OpenImage, OperationError, Store};

use super::artifact::{
    Artifact, ArtifactError, BlobName, IMAGE_MAX, LazyParts, LazySubject, blobs_of,
};
use super::registry::LazyPushError;

/// Maximum length in bytes of the image, the windows and the recipes together, which are held in memory. A recipe has
/// 500 bytes or more for each file before it is compressed, so this is enough for half a million files.
const PARTS_MAX: u64 = 1 << 30;

/// Why the index of an image is not kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexKeepError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A part of the index is missing, for example because a layer is not compressed with gzip.
    #[error(transparent)]
    Parts(#[from] LazyPushError),
    /// The parts would take too much memory.
    #[error("the {what} of the index would have {size} bytes, more than {max}")]
    TooLarge {
        what: &'static str,
        /// Size of the parts in bytes.
        size: u64,
        /// Maximum size in bytes.
        max: u64,
    },
    /// The parts do not make a valid artifact.
    #[error("cannot make an artifact of the index")]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Keep(#[from] KeepIndexError),
}

impl IndexKeepError {
    /// Whether the image itself is the cause, so that another attempt would fail as well.
    #[must_use]
    pub fn is_of_image(&self) -> bool {
        matches!(
            self,
            Self::Parts(LazyPushError::NoIndex(_)) | Self::TooLarge { .. } | Self::Artifact(_)
        )
    }
}

/// An index that the store has for other hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredIndex {
    /// Digest of the index's manifest.
    pub digest: Digest,
    /// The index's manifest.
    pub manifest: Vec<u8>,
    /// The config of the index.
    pub config: BlobName,
    /// The other blobs that its manifest names.
    pub blobs: Vec<BlobName>,
}

/// Makes the artifact of an image's index from the indexes that this store has made of its layers, and keeps it. It is
/// the artifact that `quire index --no-start --push` pushes. Returns the digest of its manifest.
///
/// # Errors
/// [`IndexKeepError`], also if a layer has no index.
pub fn keep(
    store: &Store,
    image: &ImageId,
    subject: &LazySubject<'_>,
) -> Result<Digest, IndexKeepError> {
    let open = store.open_image(image);
    let open = open.map_err(OperationError::of("open image", image))?;
    check_parts(store, &open, subject)?;
    let parts = LazyParts::made_here(store, &open)?;
    let Artifact { digest, index: config, manifest, blobs } = parts.artifact(subject)?;
    let (of_config, blobs): (Vec<_>, Vec<_>) =
        blobs.iter().map(|it| (&it.digest, &it.bytes[..])).partition(|it| *it.0 == config);
    let documents = [&of_config[..], &[(&digest, &manifest[..])]].concat();
    let kept =
        KeptIndex { image: subject.digest, index: &digest, documents: &documents, blobs: &blobs };
    store.keep_index(&kept)?;
    Ok(digest)
}

/// Checks, before the parts are read, that each device has an index that was made from a blob of this manifest, and
/// that the parts are not too large.
fn check_parts(
    store: &Store,
    image: &OpenImage,
    subject: &LazySubject<'_>,
) -> Result<(), IndexKeepError> {
    let check = |what, size, max| match size <= max {
        true => Ok(()),
        false => Err(IndexKeepError::TooLarge { what, size, max }),
    };
    let mut sum = image.image.size();
    check("image", sum, IMAGE_MAX)?;
    for device in &image.devices {
        let id = device.id;
        let head = store.lazy_devices.index_head(&id);
        let head = head.map_err(OperationError::of("read the index of device", id))?;
        let is_of_image =
            |blob: &Digest| subject.manifest.layers.iter().any(|it| it.digest == *blob);
        let head = head.filter(|it| is_of_image(&it.blob)).ok_or(LazyPushError::NoIndex(id))?;
        let layer = store.layers.open(&head.diff_id);
        let layer = layer.map_err(OperationError::of("read layer", head.diff_id))?;
        let recipe = layer.map_or(0, |it| it.recipe_size());
        sum = sum.saturating_add(head.windows_bytes()).saturating_add(recipe);
        check("parts", sum, PARTS_MAX)?;
    }
    Ok(())
}

/// Returns the index that was kept with an image's manifest, if the store has all of its files. The blobs are not
/// read.
///
/// # Errors
/// [`OperationError`] if a document is damaged, or cannot be read.
pub fn stored_index(store: &Store, image: &Digest) -> Result<Option<StoredIndex>, OperationError> {
    let object = format!("the index that was kept with {image}");
    let record = store.downloads.kept_index(image);
    let Some(digest) = record.map_err(OperationError::of("read", &object))? else {
        return Ok(None);
    };
    let manifest = store.manifests.read(&digest);
    let Some(manifest) = manifest.map_err(OperationError::of("read", &object))? else {
        return Ok(None);
    };
    let blobs = blobs_of(&manifest, image);
    let mut blobs = blobs.map_err(OperationError::of("read", &object))?;
    let config = blobs.remove(0);
    let failed = OperationError::of("read", &object);
    let mut is_whole = store.manifests.has(&config.digest).map_err(failed)?;
    for BlobName { digest, size } in &blobs {
        let found = store.downloads.blob(digest).map_err(failed)?;
        is_whole &= found.is_some_and(|it| it.1 == *size);
    }
    Ok(is_whole.then_some(StoredIndex { digest, manifest, config, blobs }))
}
