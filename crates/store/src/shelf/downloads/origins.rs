//! The origins of images, recorded with the image and not with a name, so they last as long as the image.
//!
//! `blobs/IMAGE.origins` is a record. See `docs/format/object-store.md`, "Origins".

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::check_error::{self, FsckError};
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX, RecordError};
use image::digest::Digest;

/// The most origins of one image that are kept: the last ones.
const KEPT: usize = 64;

/// An origin of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The manifest that it was made from, if there was one.
    pub manifest: Option<Digest>,
    /// The repository that it was pulled from, as `registry/repository`. `None`: it was imported or made here.
    pub repository: Option<String>,
}

/// Why the origins of an image are unknown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OriginError {
    /// The record is damaged.
    #[error("the record of where image {image} came from is damaged: import or pull it again")]
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
    /// The last first.
    origins: Vec<Origin>,
}

pub(crate) fn encode(image: &ImageId, origins: &[Origin]) -> Vec<u8> {
    record::encode(&Raw { image: image.to_string(), origins: origins.to_vec() })
}

impl DownloadShelf {
    /// The origins of an image, the last first. Empty if none was recorded.
    ///
    /// # Errors
    /// [`OriginError`] when the record is damaged or cannot be read.
    pub fn origins(&self, image: &ImageId) -> Result<Vec<Origin>, OriginError> {
        let bytes = self.directory.read_all(BlobFile::Origins(*image).file_name(), RECORD_MAX)?;
        let Some(bytes) = bytes else { return Ok(Vec::new()) };
        let damaged = |source| OriginError::Damaged { image: Box::new(*image), source };
        let raw: Raw = record::decode(&bytes).map_err(damaged)?;
        record::check_image(&raw.image, image).map_err(damaged)?;
        Ok(raw.origins)
    }

    /// The origins of an image with new ones; `None` if there is nothing new. A damaged record is replaced.
    pub(crate) fn with_origins(
        &self,
        image: &ImageId,
        new: &[Origin],
    ) -> Result<Option<Vec<Origin>>, DiskError> {
        let before = match self.origins(image) {
            Ok(before) => before,
            Err(OriginError::Disk(error)) => return Err(error),
            Err(error) => {
                tracing::warn!(%image, %error, "replacing a damaged record of origins");
                Vec::new()
            }
        };
        if new.iter().all(|it| before.contains(it)) {
            return Ok(None);
        }
        let mut all: Vec<Origin> = Vec::new();
        for origin in new.iter().chain(&before) {
            if !all.contains(origin) {
                all.push(origin.clone());
            }
        }
        all.truncate(KEPT);
        Ok(Some(all))
    }

    /// What is wrong with the record of an image's origins, if anything.
    pub(super) fn origins_damage(&self, image: &ImageId) -> Result<Option<String>, FsckError> {
        Ok(check_error::found(self.origins(image))?.err())
    }
}
