//! Reads an object's bytes from files or devices.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use rustix::io::Errno;

use super::{StoredObject, StoredPiece};

/// Minimum number of bytes of holes for which searching them is worthwhile.
const HOLES_MIN: u64 = 1 << 20;

/// Reads an object of a store. As long as the reader exists, `gc` does not remove the bytes.
///
/// The bytes are not verified: hash them, or trust the import.
#[derive(Debug)]
pub struct ObjectReader {
    source: ByteSource,
    size: u64,
    position: u64,
}

#[derive(Debug)]
enum ByteSource {
    /// A whole file.
    Whole(File),
    /// A whole file with holes, which are not read.
    Sparse { file: File, runs: Vec<Run> },
    /// `size` bytes of the file at `offset`.
    Part { file: File, offset: u64, size: u64 },
    /// Parts of several files.
    Pieces { files: Vec<File>, pieces: Vec<Run> },
}

/// A run of an object's bytes.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// End of the run in the object, in bytes.
    until: u64,
    /// The number of the file that contains the bytes, and their offset in that file; `None` for zeros.
    place: Option<(usize, u64)>,
}

/// Returns a reader of an object in pieces. `open` returns the number of the file that contains a piece.
pub(super) fn of_pieces(
    pieces: &[StoredPiece],
    files: Vec<File>,
    open: impl Fn(&StoredObject) -> Option<usize>,
) -> Option<ObjectReader> {
    let mut until = 0_u64;
    let mut runs = Vec::with_capacity(pieces.len());
    for piece in pieces {
        until = until.checked_add(piece.len)?;
        let place = match &piece.stored {
            Some(stored) => Some((open(stored)?, stored.offset)),
            None => None,
        };
        runs.push(Run { until, place });
    }
    Some(ObjectReader::pieces(files, runs))
}

impl ObjectReader {
    /// Returns a reader of all `size` bytes of a file.
    pub(crate) fn whole(file: File, size: u64) -> Self {
        let source = match data_runs(&file, size) {
            Some(runs) => ByteSource::Sparse { file, runs },
            None => ByteSource::Whole(file),
        };
        Self { source, size, position: 0 }
    }

    pub(super) const fn part(file: File, offset: u64, size: u64) -> Self {
        Self { source: ByteSource::Part { file, offset, size }, size, position: 0 }
    }

    fn pieces(files: Vec<File>, pieces: Vec<Run>) -> Self {
        let size = pieces.last().map_or(0, |it| it.until);
        Self { source: ByteSource::Pieces { files, pieces }, size, position: 0 }
    }

    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the object's file, if it is a separate file, so that the kernel can copy the file.
    #[must_use]
    pub const fn file(&self) -> Option<&File> {
        match &self.source {
            ByteSource::Whole(file) | ByteSource::Sparse { file, .. } => Some(file),
            ByteSource::Part { .. } | ByteSource::Pieces { .. } => None,
        }
    }

    /// Reads bytes at `offset`, and returns their number: 0 at the end.
    ///
    /// # Errors
    /// The errors of `pread`.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.source {
            ByteSource::Whole(file) => file.read_at(buffer, offset),
            ByteSource::Part { file, offset: start, size } => {
                let Some(left @ 1..) = size.checked_sub(offset) else { return Ok(0) };
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                file.read_at(&mut buffer[..length], start + offset)
            }
            ByteSource::Sparse { file, runs } => {
                read_run(std::slice::from_ref(file), runs, buffer, offset)
            }
            ByteSource::Pieces { files, pieces } => read_run(files, pieces, buffer, offset),
        }
    }

    /// Fills `buffer` with the bytes at `offset`.
    ///
    /// # Errors
    /// The errors of `pread`, and `UnexpectedEof` if the object ends before the buffer is full.
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

/// Reads from the run that contains the byte at `offset`.
fn read_run(files: &[File], runs: &[Run], buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let at = runs.partition_point(|it| it.until <= offset);
    let Some(run) = runs.get(at) else { return Ok(0) };
    let left = usize::try_from(run.until - offset).unwrap_or(usize::MAX);
    let length = left.min(buffer.len());
    let buffer = &mut buffer[..length];
    let Some((file, start)) = run.place else {
        buffer.fill(0);
        return Ok(length);
    };
    let first = at.checked_sub(1).map_or(0, |before| runs[before].until);
    files[file].read_at(buffer, start + (offset - first))
}

/// Maximum number of data and hole runs looked up in one file. The rest is read as data.
const RUNS_MAX: usize = 4096;

/// Returns the data and hole runs of a file that has fewer bytes on disk than its length; `None` for other files.
fn data_runs(file: &File, size: u64) -> Option<Vec<Run>> {
    let on_disk = file.metadata().ok()?.blocks().saturating_mul(512);
    if on_disk >= size || size - on_disk < HOLES_MIN {
        return None;
    }
    let mut runs = Vec::new();
    let mut at = 0;
    while at < size && runs.len() < RUNS_MAX {
        let data = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data.min(size),
            Err(Errno::NXIO) => size,
            Err(_) => break,
        };
        if data > at {
            runs.push(Run { until: data, place: None });
        }
        if data == size {
            return Some(runs);
        }
        let Ok(hole) = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(data)) else { break };
        at = hole.min(size);
        runs.push(Run { until: at, place: Some((0, data)) });
    }
    if at < size {
        runs.push(Run { until: size, place: Some((0, at)) });
    }
    Some(runs)
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
        let before =
            || io::Error::new(io::ErrorKind::InvalidInput, "cannot seek before the first byte");
        self.position = position.ok_or_else(before)?;
        Ok(self.position)
    }
}
