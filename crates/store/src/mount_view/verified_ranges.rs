//! Reads parts of blobs and of layers' tars. The bytes of each part are compared with hashes that were taken while the
//! whole was compared with its digest.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use image::digest::Digest;
use image::verity::{Algorithm, Hasher, ObjectId, PartHashes};

use super::verified_reader::{BytesError, LayerTar, VerifiedBytes};
use crate::operation::OperationError;
use crate::store::Store;

/// Bytes that are read and compared at a time, unless the hashed parts are larger.
const PIECE: u64 = 64 << 10;

/// A blob, or the tar of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckedSource {
    /// The blob with this digest.
    Blob(Digest),
    /// The uncompressed tar of the layer with this diff id.
    Tar(Digest),
}

/// Hashes of all parts of a blob or tar, which had its digest when they were taken.
#[derive(Debug)]
pub struct CheckedRanges {
    source: CheckedSource,
    size: u64,
    hashes: PartHashes,
}

impl CheckedRanges {
    /// Returns the total number of bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of bytes of the hashes, which are in memory.
    #[must_use]
    pub const fn weight(&self) -> usize {
        self.hashes.len()
    }
}

impl Store {
    /// Reads all bytes, compares them with their digest, and returns the hashes of their parts. `blob_size` is the
    /// expected size of a blob, in bytes. `is_unneeded` is called after each MiB, and ends the comparison if it returns
    /// `true`.
    ///
    /// # Errors
    /// [`BytesError`] if the bytes are absent, damaged or not readable, or not needed any more.
    pub fn check_ranges(
        &self,
        source: CheckedSource,
        blob_size: u64,
        is_unneeded: impl Fn() -> bool,
    ) -> Result<CheckedRanges, BytesError> {
        let mut bytes = match source {
            CheckedSource::Blob(digest) => self.verified_blob(&digest, blob_size)?,
            CheckedSource::Tar(diff_id) => self.layer_tar(&diff_id)?,
        };
        let size = VerifiedBytes::size(&bytes);
        let mut hasher = Hasher::keeping(Algorithm::Sha256, size);
        let mut buffer = vec![0; 1 << 20];
        let mut unasked = 0;
        loop {
            let read = match bytes.read(&mut buffer).map_err(BytesError::from_io)? {
                0 => break,
                read => read,
            };
            hasher.update(&buffer[..read]);
            unasked += read;
            if unasked >= buffer.len() {
                unasked = 0;
                if is_unneeded() {
                    return Err(BytesError::GivenUp);
                }
            }
        }
        let (_, hashes) = hasher.finish_kept();
        Ok(CheckedRanges { source, size, hashes })
    }

    /// Returns a reader of a range, which compares the bytes with the hashes before it returns them.
    ///
    /// # Errors
    /// [`BytesError`] if the bytes are absent or not readable.
    pub fn read_range<'s>(
        &'s self,
        checked: &'s CheckedRanges,
        range: Range<u64>,
    ) -> Result<CheckedRange<'s>, BytesError> {
        let part = checked.hashes.part();
        let from = range.start - range.start % part;
        let inner: Box<dyn Read + Send + 's> = match checked.source {
            CheckedSource::Blob(digest) => {
                let opened = self.downloads.blob(&digest);
                let opened = opened.map_err(OperationError::of("open", "the blob"))?;
                let (file, _) = opened.ok_or(BytesError::NoBlob(digest))?;
                Box::new(FileFrom { file, at: from })
            }
            CheckedSource::Tar(diff_id) => {
                let layer = self.layers.open(&diff_id).map_err(BytesError::Layer)?;
                let layer = layer.ok_or(BytesError::NoLayer(diff_id))?;
                let mut tar = LayerTar::new(&layer, |id: &ObjectId| self.object(id))?;
                tar.skip(from)?;
                Box::new(tar)
            }
        };
        Ok(CheckedRange {
            checked,
            inner,
            at: from,
            buffer: Vec::new(),
            skip: range.start - from,
            end: range.end.min(checked.size),
            is_failed: false,
        })
    }
}

/// A reader of a range whose bytes were compared. Errors contain a [`BytesError`].
pub struct CheckedRange<'s> {
    checked: &'s CheckedRanges,
    inner: Box<dyn Read + Send + 's>,
    /// Offset of the next byte of `inner`, at the start of a hashed part unless the reader has ended.
    at: u64,
    /// The bytes before `at` that were compared and not yet returned, after the first `skip`.
    buffer: Vec<u8>,
    /// Bytes at the start of the buffer that were returned, or are before the range.
    skip: u64,
    /// Offset at which the range ends.
    end: u64,
    is_failed: bool,
}

impl std::fmt::Debug for CheckedRange<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut range = f.debug_struct("CheckedRange");
        range.field("source", &self.checked.source).field("at", &self.at);
        range.field("end", &self.end).finish_non_exhaustive()
    }
}

impl CheckedRange<'_> {
    /// Reads the next parts, and compares them with their hashes.
    fn refill(&mut self) -> io::Result<()> {
        let CheckedRanges { source, size, hashes } = self.checked;
        let (CheckedSource::Blob(digest) | CheckedSource::Tar(digest)) = *source;
        let length = hashes.part().max(PIECE).min(size - self.at);
        let length = usize::try_from(length).map_err(io::Error::other)?;
        self.buffer.resize(length, 0);
        self.inner.read_exact(&mut self.buffer)?;
        if !hashes.match_at(self.at, &self.buffer) {
            return Err(BytesError::Changed(digest).into_io());
        }
        self.at += length as u64;
        Ok(())
    }
}

impl Read for CheckedRange<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.is_failed {
            return Err(io::Error::other("an earlier read failed"));
        }
        let next = |it: &Self| it.at - it.buffer.len() as u64 + it.skip;
        // The range begins behind the first bytes of the first part, so the buffer may have to be filled twice.
        while self.skip >= self.buffer.len() as u64 && next(self) < self.end {
            self.skip -= self.buffer.len() as u64;
            if let Err(error) = self.refill() {
                self.is_failed = true;
                return Err(error);
            }
        }
        let left = self.end.saturating_sub(next(self));
        if left == 0 {
            return Ok(0);
        }
        let start = usize::try_from(self.skip).unwrap_or(usize::MAX);
        let bytes = self.buffer.get(start..).unwrap_or_default();
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len()).min(into.len());
        into[..count].copy_from_slice(&bytes[..count]);
        self.skip += count as u64;
        Ok(count)
    }
}

/// Reads a file from an offset on.
struct FileFrom {
    file: File,
    at: u64,
}

impl Read for FileFrom {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
