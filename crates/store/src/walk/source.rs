//! Reads regular files.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;

use image::verity::{Algorithm, Hasher, ObjectId};
use rustix::fs::{AtFlags, SeekFrom, Statx, StatxFlags};
use rustix::io::Errno;

/// Bytes per read. Larger reads are not faster, and smaller ones need more system calls.
const BUFFER: usize = 256 << 10;

/// A part of a file, in the order of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilePart<'a> {
    /// Bytes of the file.
    Data(&'a [u8]),
    /// Number of zeros for which the file system has no blocks.
    Hole(u64),
}

impl FilePart<'_> {
    /// Length in bytes.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            Self::Data(bytes) => bytes.len() as u64,
            Self::Hole(count) => count,
        }
    }
}

/// Passes all `size` bytes of a file to `each`, in pieces. Holes are not read. The offset of `file` changes.
///
/// # Errors
/// The error of the kernel or of `each`; [`io::ErrorKind::UnexpectedEof`] if the file is shorter.
pub fn parts(
    file: &File,
    size: u64,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(FilePart<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let wanted = usize::try_from(size).map_or(BUFFER, |size| BUFFER.min(size));
    if buffer.len() < wanted {
        buffer.resize(wanted, 0);
    }
    let mut offset = 0;
    // End of the data around `offset`. Small files are read without a search for holes.
    let mut data_end = if size > BUFFER as u64 { 0 } else { size };
    while offset < size {
        if offset >= data_end {
            let data = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
                Ok(data) => data.min(size),
                // There is no data after `offset`, so the file ends with a hole, unless it has become shorter.
                Err(Errno::NXIO) if file.metadata()?.len() < size => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Err(Errno::NXIO) => size,
                // The file system does not support `SEEK_DATA`.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => offset,
                Err(errno) => return Err(errno.into()),
            };
            if data > offset {
                each(FilePart::Hole(data - offset))?;
                offset = data;
                continue;
            }
            data_end = rustix::fs::seek(file, SeekFrom::Hole(offset)).unwrap_or(size).min(size);
        }
        let end = data_end.max(offset + 1).min(size);
        let room = usize::try_from(end - offset).map_or(buffer.len(), |it| it.min(buffer.len()));
        let count = match file.read_at(&mut buffer[..room], offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        each(FilePart::Data(&buffer[..count]))?;
        offset += count as u64;
    }
    Ok(())
}

/// A regular file that is being read.
#[derive(Debug)]
pub struct FileReader<'a> {
    pub(super) file: &'a File,
    pub(super) seen: FileStamp,
    pub(super) buffer: &'a mut Vec<u8>,
}

impl FileReader<'_> {
    /// The file, open for reading. Its offset is undefined: read at offsets, or rewind it first.
    #[must_use]
    pub const fn file(&self) -> &File {
        self.file
    }

    /// Length in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.seen.size
    }

    /// Reads the file from beginning to end, in pieces.
    ///
    /// # Errors
    /// The error of the kernel or of `each`; [`io::ErrorKind::UnexpectedEof`] if the length of the file has changed.
    pub fn read(&mut self, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let wanted = usize::try_from(self.size()).map_or(BUFFER, |size| BUFFER.min(size + 1));
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        }
        let mut offset = 0;
        loop {
            let count = match self.file.read_at(self.buffer, offset) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            each(&self.buffer[..count])?;
            offset += count as u64;
            if offset > self.size() {
                break;
            }
        }
        if offset == self.size() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Passes the file to `each` from beginning to end, in pieces. Holes are not read.
    ///
    /// # Errors
    /// The error of the kernel or of `each`; [`io::ErrorKind::UnexpectedEof`] if the file has become shorter.
    pub fn parts(&mut self, each: impl FnMut(FilePart<'_>) -> io::Result<()>) -> io::Result<()> {
        parts(self.file, self.seen.size, self.buffer, each)
    }

    /// Returns the fs-verity digest of the file's bytes.
    ///
    /// # Errors
    /// The errors of [`parts`](Self::parts).
    pub fn digest(&mut self, algorithm: Algorithm) -> io::Result<ObjectId> {
        let mut hasher = Hasher::new(algorithm);
        self.parts(|part| {
            match part {
                FilePart::Data(bytes) => hasher.update(bytes),
                FilePart::Hole(count) => hasher.zeros(count),
            }
            Ok(())
        })?;
        Ok(hasher.finish().into())
    }

    /// Whether identity, length, mode and time stamps of the file are unchanged since it was opened.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn is_unchanged(&self) -> io::Result<bool> {
        Ok(FileStamp::from_stat(&stat(self.file)?) == self.seen)
    }
}

/// Identity, length and time stamps of a file, to detect changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    device: (u32, u32),
    pub inode: u64,
    mode: u16,
    /// Length in bytes.
    pub size: u64,
    modified: (i64, u32),
    changed: (i64, u32),
}

impl FileStamp {
    /// Takes the values from a result of `statx`.
    #[must_use]
    pub const fn from_stat(stat: &Statx) -> Self {
        Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            mode: stat.stx_mode,
            size: stat.stx_size,
            modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        }
    }
}

pub(super) fn stat(file: impl AsFd) -> Result<Statx, Errno> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}
