//! A file, or a part of it, as the source of an image.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use image::erofs::read::ReadAt;
use oci::files;

/// A part of a file.
#[derive(Debug)]
pub struct Window {
    file: File,
    start: u64,
    len: u64,
}

impl Window {
    /// Opens a whole file, and returns the number of bytes that it occupies on the disk, at most its length.
    pub(super) fn open(path: &Path) -> io::Result<(Self, u64)> {
        let mut file = files::regular_or_block(path)?;
        let metadata = file.metadata()?;
        let (len, stored) = match metadata.file_type().is_block_device() {
            true => {
                let len = file.seek(SeekFrom::End(0))?;
                (len, len)
            }
            // File systems may keep the data of small files elsewhere than in blocks.
            false => (metadata.len(), metadata.blocks().saturating_mul(512).max(64 << 10)),
        };
        Ok((Self { file, start: 0, len }, stored.min(len)))
    }

    /// Returns the first `len` bytes of a file.
    pub(super) const fn whole(file: File, len: u64) -> Self {
        Self { file, start: 0, len }
    }

    /// Returns a part of this part, which must contain it.
    pub(super) fn part(self, range: Range<u64>) -> Self {
        let Self { file, start, len } = self;
        debug_assert!(range.start <= range.end && range.end <= len, "{range:?} of {len}");
        Self { file, start: start + range.start, len: range.end - range.start }
    }
}

impl ReadAt for Window {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_exact_at(buffer, self.start + offset)
    }
}
