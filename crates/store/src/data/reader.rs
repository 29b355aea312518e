//! An object's bytes, wherever they are.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt as _;

/// Reads an object of a store. As long as it is open, `gc` does not take the bytes away.
///
/// The bytes are not verified: hash them, or trust the import.
#[derive(Debug)]
pub struct ObjectReader {
    file: File,
    source: Source,
    size: u64,
    position: u64,
}

#[derive(Debug)]
enum Source {
    /// All of the file.
    Whole,
    /// A part of the file, and the end that is not in it.
    Part { offset: u64, in_blob: u64, end: Vec<u8> },
}

impl ObjectReader {
    pub(crate) const fn whole(file: File, size: u64) -> Self {
        Self { file, source: Source::Whole, size, position: 0 }
    }

    pub(super) fn part(file: File, offset: u64, in_blob: u64, end: Vec<u8>) -> Self {
        let size = in_blob + end.len() as u64;
        Self { file, source: Source::Part { offset, in_blob, end }, size, position: 0 }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The object's own file, if it has one: for the kernel to copy.
    #[must_use]
    pub const fn file(&self) -> Option<&File> {
        match self.source {
            Source::Whole => Some(&self.file),
            Source::Part { .. } => None,
        }
    }

    /// Reads some bytes from `offset` on; none at the end.
    ///
    /// # Errors
    /// As `pread`.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.source {
            Source::Whole => self.file.read_at(buffer, offset),
            Source::Part { offset: start, in_blob, end } => {
                if let Some(left @ 1..) = in_blob.checked_sub(offset) {
                    let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                    return self.file.read_at(&mut buffer[..length], start + offset);
                }
                let into = usize::try_from(offset - in_blob).unwrap_or(usize::MAX);
                let rest = end.get(into..).unwrap_or_default();
                let length = rest.len().min(buffer.len());
                buffer[..length].copy_from_slice(&rest[..length]);
                Ok(length)
            }
        }
    }

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// As `pread`; the end of the object within is `UnexpectedEof`.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Read for ObjectReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.read_at(buffer, self.position)?;
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for ObjectReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => self.size.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        let before = || io::Error::new(io::ErrorKind::InvalidInput, "before the first byte");
        self.position = position.ok_or_else(before)?;
        Ok(self.position)
    }
}
