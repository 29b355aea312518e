//! Indexes for lazy loading that a pull has made and kept, for other hosts. `blobs/DIGEST.index` is a record that names
//! the manifest of the index of an image. That manifest and its config are in `manifests/`, and the blobs that it names
//! are in `blobs/`. See `docs/format/object-store.md`, "Kept indexes".

use image::digest::Digest;
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX, RecordError};

/// Why the record of a kept index cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeptIndexError {
    #[error("the record of the index that was kept with {manifest} is damaged")]
    Damaged { manifest: Box<Digest>, source: RecordError },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// Digest of the image's manifest, to detect renamed files.
    manifest: Digest,
    index: Digest,
}

impl DownloadShelf {
    /// Returns the manifest of the index that was kept with an image's manifest. Its documents and blobs may be absent,
    /// for example after a repair.
    ///
    /// # Errors
    /// [`KeptIndexError`] if the record is damaged or cannot be read.
    pub fn kept_index(&self, manifest: &Digest) -> Result<Option<Digest>, KeptIndexError> {
        let name = BlobFile::Index(*manifest).file_name();
        let Some(bytes) = self.directory.read_all(name, RECORD_MAX)? else { return Ok(None) };
        let damaged = |source| KeptIndexError::Damaged { manifest: Box::new(*manifest), source };
        let raw: Raw = record::decode(&bytes).map_err(damaged)?;
        if raw.manifest != *manifest {
            let other = format!("it names manifest {}", raw.manifest);
            return Err(damaged(RecordError::Json(serde::de::Error::custom(other))));
        }
        Ok(Some(raw.index))
    }

    /// Records the index of an image, durably.
    pub(crate) fn set_kept_index(
        &self,
        manifest: &Digest,
        index: &Digest,
    ) -> Result<(), DiskError> {
        let record = record::encode(&Raw { manifest: *manifest, index: *index });
        self.tmp.replace(&self.directory, BlobFile::Index(*manifest).file_name(), &record)
    }

    /// Adds a whole blob, durably. The caller has compared the bytes with the digest.
    pub(crate) fn add_blob(&self, digest: &Digest, bytes: &[u8]) -> Result<(), DiskError> {
        if self.blob(digest)?.is_some_and(|(_, size)| size == bytes.len() as u64) {
            return Ok(());
        }
        self.tmp.replace(&self.directory, BlobFile::Whole(*digest).file_name(), bytes)
    }

    /// Checks a record, and returns the damage.
    pub(super) fn kept_index_damage(&self, manifest: &Digest) -> Result<Option<String>, FsckError> {
        match self.kept_index(manifest) {
            Ok(_) => Ok(None),
            Err(error) => check_error::damage(&error).map(Some),
        }
    }
}
