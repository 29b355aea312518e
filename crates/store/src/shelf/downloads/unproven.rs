//! Images that came with an index, and have not been compared with an import of their layers.
//!
//! `blobs/IMAGE.unproven` is a record. See `docs/format/object-store.md`, "Unproven images".

use std::collections::BTreeSet;

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::check_error::{self, FsckError};
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX, RecordError};
use image::digest::Digest;

/// The most manifests in a mark: with the longest digests, they take 600 KB of a record.
pub(crate) const MANIFESTS_MAX: usize = 4096;

/// Why it is not known which manifests an image is to be compared with. The image is unproven all the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnprovenError {
    /// The record is damaged.
    #[error("the mark of image {image}, which came with an index, is damaged")]
    Damaged {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: RecordError,
    },
    /// An error of the disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// So that a renamed file is found out.
    image: String,
    manifests: BTreeSet<Digest>,
    /// Whether an import of the layers of another manifest has made the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    proven: bool,
}

/// What an image was not compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnprovenMark {
    /// The manifests that say it is what their layers make, and whose layers were not read.
    pub(crate) manifests: BTreeSet<Digest>,
    /// Whether an import of the layers of another manifest has made it. What one manifest claims takes nothing from that.
    pub(crate) is_proven: bool,
}

impl UnprovenMark {
    /// Whether the image is what the layers of this manifest make; without a manifest, what those of any make.
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
    /// [`DiskError`] when it cannot be looked up.
    pub fn is_unproven(&self, image: &ImageId) -> Result<bool, DiskError> {
        Ok(self.directory.stat(BlobFile::Unproven(*image).file_name())?.is_some())
    }

    /// Whether an image has to be compared with the layers of this manifest before it is used as its image; without a
    /// manifest, with those of any. What another manifest claims does not count. With a damaged mark it has to be.
    ///
    /// # Errors
    /// [`DiskError`] when its mark cannot be read.
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

    /// The manifests whose layers an image has not been compared with. `None` if it has no mark.
    ///
    /// # Errors
    /// [`UnprovenError`] when the record is damaged or cannot be read.
    pub fn unproven(&self, image: &ImageId) -> Result<Option<BTreeSet<Digest>>, UnprovenError> {
        Ok(self.unproven_mark(image)?.map(|it| it.manifests))
    }

    /// All that its mark says. `None` if it has none.
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

    /// What is wrong with the mark of an image, if anything.
    pub(super) fn unproven_damage(&self, image: &ImageId) -> Result<Option<String>, FsckError> {
        Ok(check_error::found(self.unproven(image))?.err())
    }
}
