//! Marks of images that were pulled with an index, and were not yet compared with an import of their layers.
//!
//! `blobs/IMAGE.unproven` is a record. See `docs/format/object-store.md`, "Unproven images".

use std::collections::BTreeSet;

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX, RecordError};
use image::digest::Digest;

/// Maximum number of manifests in a mark. With digests of the maximum length, they take 600 KB of a record.
pub(crate) const MANIFESTS_MAX: usize = 4096;

/// A reason why it is unknown which manifests an image must be compared with. The image is unproven nevertheless.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnprovenError {
    #[error("the mark of image {image}, which comes from an index, is damaged")]
    Damaged { image: Box<ImageId>, source: RecordError },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// Id of the image, to detect renamed files.
    image: String,
    manifests: BTreeSet<Digest>,
    /// Whether an import of another manifest's layers has made the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    proven: bool,
}

/// The manifests with which an image has not been compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnprovenMark {
    /// Manifests that claim that their layers make the image, and whose layers were not read.
    pub(crate) manifests: BTreeSet<Digest>,
    /// Whether an import of another manifest's layers has made the image. Claims of other manifests do not change
    /// that.
    pub(crate) is_proven: bool,
}

impl UnprovenMark {
    /// Whether it is proven that the layers of this manifest make the image. Without a manifest, the layers of any
    /// manifest suffice.
    fn is_proof_of(&self, manifest: Option<&Digest>) -> bool {
        self.is_proven && manifest.is_none_or(|it| !self.manifests.contains(it))
    }
}

pub(crate) fn encode(image: &ImageId, mark: &UnprovenMark) -> Vec<u8> {
    let UnprovenMark { manifests, is_proven } = mark.clone();
    record::encode(&Raw { image: image.to_string(), manifests, proven: is_proven })
}

impl DownloadShelf {
    /// Whether an image has a mark, sound or damaged.
    ///
    /// # Errors
    /// [`DiskError`] if the mark cannot be looked up.
    pub fn is_unproven(&self, image: &ImageId) -> Result<bool, DiskError> {
        Ok(self.directory.stat(BlobFile::Unproven(*image).file_name())?.is_some())
    }

    /// Whether an image must be compared with the layers of this manifest before it is used for the manifest. Claims
    /// of other manifests do not count. Without a manifest, a proof for any manifest suffices. If the mark is
    /// damaged, the image must be compared.
    ///
    /// # Errors
    /// [`DiskError`] if the mark cannot be read.
    pub fn is_unproven_for(
        &self,
        image: &ImageId,
        manifest: Option<&Digest>,
    ) -> Result<bool, DiskError> {
        match self.unproven_mark(image) {
            Ok(None) => Ok(false),
            Ok(Some(mark)) => Ok(!mark.is_proof_of(manifest)),
            Err(UnprovenError::Damaged { .. }) => Ok(true),
            Err(UnprovenError::Disk(error)) => Err(error),
        }
    }

    /// Returns the manifests whose layers an image has not been compared with. `None` if the image has no mark.
    ///
    /// # Errors
    /// [`UnprovenError`] if the record is damaged or cannot be read.
    pub fn unproven(&self, image: &ImageId) -> Result<Option<BTreeSet<Digest>>, UnprovenError> {
        Ok(self.unproven_mark(image)?.map(|it| it.manifests))
    }

    /// Returns the mark of an image. `None` if the image has none.
    pub(crate) fn unproven_mark(
        &self,
        image: &ImageId,
    ) -> Result<Option<UnprovenMark>, UnprovenError> {
        let bytes = self.directory.read_all(BlobFile::Unproven(*image).file_name(), RECORD_MAX)?;
        let Some(bytes) = bytes else { return Ok(None) };
        let damaged = |source| UnprovenError::Damaged { image: Box::new(*image), source };
        let raw: Raw = record::decode(&bytes).map_err(damaged)?;
        record::check_image(&raw.image, image).map_err(damaged)?;
        Ok(Some(UnprovenMark { manifests: raw.manifests, is_proven: raw.proven }))
    }

    /// Checks the mark of an image, and returns the damage.
    pub(super) fn unproven_damage(&self, image: &ImageId) -> Result<Option<String>, FsckError> {
        Ok(check_error::found(self.unproven(image))?.err())
    }
}
