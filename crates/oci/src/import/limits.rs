//! How much one import may ask for.

/// Bounds on what a source may make of itself. They are far above real images, and below what would hurt a host: a
/// layer of a few kilobytes can claim any size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one layer's uncompressed tar. Default 64 GiB.
    pub layer_bytes: u64,
    /// Bytes of all files of all layers, holes of sparse files included, since they are hashed. Default 256 GiB.
    pub content_bytes: u64,
    /// How many times larger than its blob a layer's tar may be, and the holes of its files too. Default 250: gzip
    /// reaches 1032 with zeros alone, real layers stay below 20.
    pub ratio: u64,
    /// Up to this size, in bytes, [`ratio`](Self::ratio) is not looked at. Default 1 GiB: some layers do hold empty
    /// disk images.
    pub ratio_from: u64,
    /// Entries of all layers, whiteouts included. Default 8 Mi: they take up to 150 bytes of memory each.
    pub entries: u64,
    /// Bytes of all paths, link targets, xattrs and files of up to 64 bytes, which are kept in memory. Default 1 GiB.
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

/// Which bound was passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// [`Limits::layer_bytes`].
    #[error("it unpacks to more than {0} bytes")]
    LayerBytes(u64),
    /// [`Limits::ratio`].
    #[error("it unpacks to more than {ratio} times its size of {size} bytes")]
    Ratio {
        /// The bound.
        ratio: u64,
        /// Bytes of the blob.
        size: u64,
    },
    /// [`Limits::ratio`], of what sparse files have beyond the tar.
    #[error("the holes of the layer's files are more than {ratio} times its size of {size} bytes")]
    Holes {
        /// The bound.
        ratio: u64,
        /// Bytes of the layer.
        size: u64,
    },
    /// [`Limits::content_bytes`].
    #[error("the image's files have more than {0} bytes")]
    ContentBytes(u64),
    /// [`Limits::entries`].
    #[error("the image has more than {0} entries")]
    Entries(u64),
    /// [`Limits::metadata_bytes`].
    #[error("the image's names and xattrs have more than {0} bytes")]
    MetadataBytes(u64),
}

impl Limits {
    /// Checks how far `unpacked` bytes came out of `packed` ones.
    pub(super) const fn check_ratio(&self, packed: u64, unpacked: u64) -> Result<(), LimitError> {
        if self.is_beyond(packed, unpacked) {
            return Err(LimitError::Ratio { ratio: self.ratio, size: packed });
        }
        Ok(())
    }

    /// Checks how many bytes of a layer of `packed` bytes are in no tar.
    pub(super) const fn check_holes(&self, packed: u64, holes: u64) -> Result<(), LimitError> {
        if self.is_beyond(packed, holes) {
            return Err(LimitError::Holes { ratio: self.ratio, size: packed });
        }
        Ok(())
    }

    const fn is_beyond(&self, packed: u64, unpacked: u64) -> bool {
        unpacked > self.ratio_from && unpacked / self.ratio > packed
    }
}
