//! Images that came with an index, and have not been compared with an import of their layers.
//!
//! `blobs/IMAGE.unproven` is a record. See `docs/format/object-store.md`, "Unproven images".

use std::collections::BTreeSet;

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::disk::DiskError;
use crate::fault::{self, FsckError};
use crate::record::{self, RECORD_MAX, RecordError};
use image::digest::Digest;

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
}

pub(crate) fn encode(image: &ImageId, manifests: &BTreeSet<Digest>) -> Vec<u8> {
    record::encode(&Raw { image: image.to_string(), manifests: manifests.clone() })
}

impl DownloadShelf {
    /// Whether an image has a mark, sound or damaged.
    ///
    /// # Errors
    /// [`DiskError`] when it cannot be looked up.
    pub fn is_unproven(&self, image: &ImageId) -> Result<bool, DiskError> {
        Ok(self.directory.stat(BlobFile::Unproven(*image).file_name())?.is_some())
    }

    /// The manifests whose layers an image has not been compared with. `None` if it has no mark.
    ///
    /// # Errors
    /// [`UnprovenError`] when the record is damaged or cannot be read.
    pub fn unproven(&self, image: &ImageId) -> Result<Option<BTreeSet<Digest>>, UnprovenError> {
        let bytes = self.directory.read_all(BlobFile::Unproven(*image).file_name(), RECORD_MAX)?;
        let Some(bytes) = bytes else { return Ok(None) };
        let damaged = |source| UnprovenError::Damaged { image: Box::new(*image), source };
        let raw: Raw = record::decode(&bytes).map_err(damaged)?;
        record::check_image(&raw.image, image).map_err(damaged)?;
        Ok(Some(raw.manifests))
    }

    /// What is wrong with the mark of an image, if anything.
    pub(super) fn unproven_damage(&self, image: &ImageId) -> Result<Option<String>, FsckError> {
        Ok(fault::found(self.unproven(image))?.err())
    }
}
