//! Origins of images. They are recorded with the image and not with a name, so that they last as long as the image.
//!
//! `blobs/IMAGE.origins` is a record. See `docs/format/object-store.md`, "Origins".

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX, RecordError};
use image::digest::Digest;

/// Maximum number of origins that are kept for one image. The latest ones are kept.
pub const ORIGINS_MAX: usize = 64;

/// An origin of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Manifest that the image was made from, if any.
    pub manifest: Option<Digest>,
    /// Repository that the image was pulled from, as `registry/repository`. `None` if it was imported or made
    /// locally.
    pub repository: Option<String>,
}

/// A reason why the origins of an image are unknown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OriginError {
    #[error("the record of the origin of image {image} is damaged: import or pull it again")]
    Damaged { image: Box<ImageId>, source: RecordError },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// Id of the image, to detect renamed files.
    image: String,
    /// The last origin first.
    origins: Vec<Origin>,
}

pub(crate) fn encode(image: &ImageId, origins: &[Origin]) -> Vec<u8> {
    record::encode(&Raw { image: image.to_string(), origins: origins.to_vec() })
}

impl DownloadShelf {
    /// Returns the origins of an image, the last one first. The list is empty if none was recorded.
    ///
    /// # Errors
    /// [`OriginError`] if the record is damaged or cannot be read.
    pub fn origins(&self, image: &ImageId) -> Result<Vec<Origin>, OriginError> {
        let bytes = self.directory.read_all(BlobFile::Origins(*image).file_name(), RECORD_MAX)?;
        let Some(bytes) = bytes else { return Ok(Vec::new()) };
        let damaged = |source| OriginError::Damaged { image: Box::new(*image), source };
        let raw: Raw = record::decode(&bytes).map_err(damaged)?;
        record::check_image(&raw.image, image).map_err(damaged)?;
        Ok(raw.origins)
    }

    /// Returns the origins of an image with the new ones added, or `None` if all of them are already recorded. A
    /// damaged record is replaced.
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
        all.truncate(ORIGINS_MAX);
        Ok(Some(all))
    }

    /// Checks the record of an image's origins, and returns the damage.
    pub(super) fn origins_damage(&self, image: &ImageId) -> Result<Option<String>, FsckError> {
        Ok(check_error::found(self.origins(image))?.err())
    }
}
