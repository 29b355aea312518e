//! Keeps indexes for lazy loading, so that other hosts can fetch them.

use image::digest::Digest;

use super::TransactionError;
use crate::disk::DiskError;
use crate::shelf::manifests::StoredManifestError;
use crate::store::Store;

/// An index of an image, as a registry would have it.
#[derive(Debug, Clone, Copy)]
pub struct KeptIndex<'a> {
    /// Digest of the image's manifest.
    pub image: &'a Digest,
    /// Digest of the index's manifest.
    pub index: &'a Digest,
    /// The index's manifest and config, each with its digest.
    pub documents: &'a [(&'a Digest, &'a [u8])],
    /// The blobs that the index's manifest names, each with its digest.
    pub blobs: &'a [(&'a Digest, &'a [u8])],
}

/// Why an index cannot be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepIndexError {
    #[error("cannot keep the index of {image}")]
    Transaction { image: Box<Digest>, source: Box<TransactionError> },
    #[error("cannot keep the index of {image}")]
    Document { image: Box<Digest>, source: StoredManifestError },
    /// The bytes of a blob do not match its digest.
    #[error("cannot keep the index of {image}: blob {blob} has other bytes")]
    Blob { image: Box<Digest>, blob: Box<Digest> },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl Store {
    /// Keeps an index durably, and replaces an earlier one of the same image. `gc` removes it together with the image's
    /// manifest, which must be in the store with a name, or pinned.
    ///
    /// # Errors
    /// [`KeepIndexError`] if a file cannot be written.
    pub fn keep_index(&self, kept: &KeptIndex<'_>) -> Result<(), KeepIndexError> {
        let KeptIndex { image, index, documents, blobs } = *kept;
        let image_digest = || Box::new(*image);
        let failed = |source| KeepIndexError::Transaction {
            image: image_digest(),
            source: Box::new(source),
        };
        for (blob, bytes) in blobs {
            if !blob.matches(bytes) {
                return Err(KeepIndexError::Blob { image: image_digest(), blob: Box::new(**blob) });
            }
        }
        let transaction = self.begin().map_err(failed)?;
        for (digest, bytes) in documents {
            let added = transaction.manifest(digest, bytes);
            added.map_err(|source| KeepIndexError::Document { image: image_digest(), source })?;
        }
        // The record comes first, because `gc` keeps documents and blobs only if a record leads to them.
        self.downloads.set_kept_index(image, index)?;
        transaction.commit().map_err(failed)?;
        for (digest, bytes) in blobs {
            self.downloads.add_blob(digest, bytes)?;
        }
        Ok(())
    }
}
