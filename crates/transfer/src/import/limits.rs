//! Limits on the size of an import.

/// Limits on the size of a source. They are far above the sizes of real images, and low enough to protect the host: a
/// layer of a few kilobytes can claim any size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of one layer's uncompressed tar, in bytes. Default 64 GiB.
    pub layer_bytes: u64,
    /// Maximum size of all files of all layers, in bytes, including holes, because holes are hashed. Default 256 GiB.
    pub content_bytes: u64,
    /// Maximum ratio of a layer's tar to its blob, and of the holes of its files to its blob. The same ratio limits
    /// the sums over all layers of one import. Default 250: gzip reaches 1032 for zeros only, real layers stay below
    /// 20.
    pub ratio: u64,
    /// Size in bytes up to which [`ratio`](Self::ratio) does not apply. Default 1 GiB, because some layers contain
    /// empty disk images.
    pub ratio_from: u64,
    /// Maximum number of entries of all layers, including whiteouts. Default 8 Mi: each takes up to 150 bytes of
    /// memory.
    pub entries: u64,
    /// Maximum size, in bytes, of the data that is kept in memory: paths, link targets, xattrs, and files of up to 64
    /// bytes. Default 1 GiB.
    pub metadata_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            layer_bytes: 64 << 30,
            content_bytes: 256 << 30,
            ratio: 250,
            ratio_from: 1 << 30,
            entries: 8 << 20,
            metadata_bytes: 1 << 30,
        }
    }
}

/// The limit that a source exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ImportLimitError {
    /// The tar exceeds [`Limits::layer_bytes`].
    #[error("it unpacks to more than {0} bytes")]
    LayerBytes(u64),
    /// The tar exceeds [`Limits::ratio`].
    #[error("it unpacks to more than {ratio} times its size of {size} bytes")]
    Ratio {
        ratio: u64,
        /// Size of the blob in bytes.
        size: u64,
    },
    /// [`Limits::ratio`], for the holes of a layer's sparse files.
    #[error("the holes of the layer's files are more than {ratio} times its size of {size} bytes")]
    Holes {
        ratio: u64,
        /// Size of the blob in bytes.
        size: u64,
    },
    /// [`Limits::ratio`], for the sum of all layers of an import.
    #[error("all layers together unpack to more than {ratio} times their size of {size} bytes")]
    AllRatio {
        ratio: u64,
        /// Size of all blobs in bytes.
        size: u64,
    },
    /// [`Limits::ratio`], for the holes of sparse files in all layers.
    #[error("the holes of all files are more than {ratio} times the {size} bytes of the layers")]
    AllHoles {
        ratio: u64,
        /// Size of all blobs in bytes.
        size: u64,
    },
    /// The files exceed [`Limits::content_bytes`].
    #[error("the image's files have more than {0} bytes")]
    ContentBytes(u64),
    /// The layers exceed [`Limits::entries`].
    #[error("the image has more than {0} entries")]
    Entries(u64),
    /// The paths and xattrs exceed [`Limits::metadata_bytes`].
    #[error("the image's names and xattrs have more than {0} bytes")]
    MetadataBytes(u64),
}

impl Limits {
    /// Checks the size of a tar that has not been read yet, and its ratio to its blob of `packed` bytes.
    #[cfg(feature = "registry")]
    pub(crate) const fn check_layer(
        &self,
        packed: u64,
        unpacked: u64,
    ) -> Result<(), ImportLimitError> {
        if unpacked > self.layer_bytes {
            return Err(ImportLimitError::LayerBytes(self.layer_bytes));
        }
        self.check_ratio(packed, unpacked)
    }

    /// Checks the sum of the files of several layers that have not been read yet.
    #[cfg(feature = "registry")]
    pub(crate) const fn check_all(
        &self,
        packed: u64,
        unpacked: u64,
    ) -> Result<(), ImportLimitError> {
        if unpacked > self.content_bytes {
            return Err(ImportLimitError::ContentBytes(self.content_bytes));
        }
        if self.is_beyond(packed, unpacked) {
            return Err(ImportLimitError::AllRatio { ratio: self.ratio, size: packed });
        }
        Ok(())
    }

    /// Checks the ratio of a tar of `unpacked` bytes to its blob of `packed` bytes.
    pub(super) const fn check_ratio(
        &self,
        packed: u64,
        unpacked: u64,
    ) -> Result<(), ImportLimitError> {
        if self.is_beyond(packed, unpacked) {
            return Err(ImportLimitError::Ratio { ratio: self.ratio, size: packed });
        }
        Ok(())
    }

    /// Checks the ratio of `holes` bytes, which are not in the tar, to a layer's blob of `packed` bytes.
    pub(super) const fn check_holes(
        &self,
        packed: u64,
        holes: u64,
    ) -> Result<(), ImportLimitError> {
        if self.is_beyond(packed, holes) {
            return Err(ImportLimitError::Holes { ratio: self.ratio, size: packed });
        }
        Ok(())
    }

    pub(super) const fn is_beyond(&self, packed: u64, unpacked: u64) -> bool {
        unpacked > self.ratio_from && unpacked / self.ratio > packed
    }
}
