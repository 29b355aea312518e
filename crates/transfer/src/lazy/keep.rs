//! Keeps the index of a pulled image in the store, so that other hosts can fetch it from `quire serve --registry`.

use image::digest::Digest;
use image::verity::ImageId;
use store::{KeepIndexError, KeptIndex, OperationError, Store};

use super::artifact::{Artifact, BlobName, LazyParts, LazySubject, blobs_of};
use super::registry::LazyPushError;

/// Why the index of an image is not kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexKeepError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A part of the index is missing, for example because a layer is not compressed with gzip.
    #[error(transparent)]
    Parts(#[from] LazyPushError),
    #[error(transparent)]
    Keep(#[from] KeepIndexError),
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
    let parts = LazyParts::made_here(store, &open)?;
    let made = parts.artifact(subject);
    let Artifact { digest, index: config, manifest, blobs } =
        made.map_err(OperationError::of("make", "an artifact of the index"))?;
    let (of_config, blobs): (Vec<_>, Vec<_>) =
        blobs.iter().map(|it| (&it.digest, &it.bytes[..])).partition(|it| *it.0 == config);
    let documents = [&of_config[..], &[(&digest, &manifest[..])]].concat();
    let kept =
        KeptIndex { image: subject.digest, index: &digest, documents: &documents, blobs: &blobs };
    store.keep_index(&kept)?;
    Ok(digest)
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
