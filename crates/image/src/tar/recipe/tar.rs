//! Rebuilds the tar of a recipe, or its skeleton, which has zeros in place of file contents.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Operation, Reader, RebuildError};
use crate::tar::{Segment, narrow, wide};
use crate::verity::ObjectId;

/// The objects that a recipe refers to.
pub trait Objects {
    /// Reads bytes of `object` at `offset` into `into`, and returns their number. Zero means the end of the object.
    ///
    /// # Errors
    /// Any error; [`TarReader`] returns it as the source of a [`RebuildError::Object`].
    fn read_at(&mut self, object: &ObjectId, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Called when a part of `object` begins at byte `position` of the tar.
    fn found(&mut self, _object: &ObjectId, _position: u64) {}
}

impl<F: FnMut(&ObjectId, &mut [u8], u64) -> io::Result<usize>> Objects for F {
    fn read_at(&mut self, object: &ObjectId, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self(object, into, offset)
    }
}

/// A reader of the exact tar of a recipe, which is rebuilt while it is read. An [`io::Error`] holds a
/// [`RebuildError`].
///
/// The reader verifies no digest, so compare the digest of the tar: a recipe may be damaged or wrong.
#[derive(Debug)]
pub struct TarReader<R, O> {
    recipe: Reader<R>,
    objects: O,
    piece: TarPiece,
}

/// The current part of the tar.
#[derive(Debug)]
enum TarPiece {
    /// Bytes from the recipe, at most 64 KiB, and the number of them that were read.
    Verbatim(Vec<u8>, usize),
    /// The unread part of an object's range.
    Object(ObjectId, Segment),
}

impl<R: Read, O: Objects> TarReader<R, O> {
    /// Creates a reader at the beginning of the tar.
    ///
    /// # Errors
    /// [`RebuildError`] if the recipe's header is invalid.
    pub fn new(recipe: R, objects: O) -> Result<Self, RebuildError> {
        let piece = TarPiece::Verbatim(Vec::new(), 0);
        Ok(Self { recipe: Reader::new(recipe)?, objects, piece })
    }

    /// Skips `count` bytes of the tar, without reading the contents of objects. Returns the number of skipped bytes,
    /// which is smaller only at the end of the tar.
    ///
    /// # Errors
    /// [`RebuildError`] if the recipe cannot be read or is invalid.
    pub fn skip(&mut self, count: u64) -> Result<u64, RebuildError> {
        let mut skipped = 0_u64;
        loop {
            let left = count.saturating_sub(skipped);
            if left == 0 {
                return Ok(skipped);
            }
            let passed = match &mut self.piece {
                TarPiece::Verbatim(bytes, at) if *at < bytes.len() => {
                    let passed = narrow(left).min(bytes.len().saturating_sub(*at));
                    *at = at.saturating_add(passed);
                    wide(passed)
                }
                TarPiece::Object(_, segment) if segment.length > 0 => {
                    let passed = left.min(segment.length);
                    segment.offset = segment.offset.saturating_add(passed);
                    segment.length = segment.length.saturating_sub(passed);
                    passed
                }
                TarPiece::Verbatim(..) | TarPiece::Object(..) => {
                    if !self.advance()? {
                        return Ok(skipped);
                    }
                    0
                }
            };
            skipped = skipped.saturating_add(passed);
        }
    }

    /// Advances to the next piece, and returns whether there is one.
    fn advance(&mut self) -> Result<bool, RebuildError> {
        let mut buffer = match &mut self.piece {
            TarPiece::Verbatim(bytes, _) => std::mem::take(bytes),
            TarPiece::Object(..) => Vec::new(),
        };
        let position = self.recipe.length();
        match self.recipe.next_operation()? {
            None => return Ok(false),
            Some(Operation::Verbatim(bytes)) => {
                buffer.clear();
                buffer.extend_from_slice(bytes);
                self.piece = TarPiece::Verbatim(buffer, 0);
            }
            Some(Operation::Range { object, segment }) => {
                self.objects.found(object, position);
                self.piece = TarPiece::Object(*object, segment);
            }
        }
        Ok(true)
    }
}

impl<R: Read, O: Objects> Read for TarReader<R, O> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // Headers are small, so the buffer is filled from several pieces.
        let mut filled = 0_usize;
        loop {
            let room = into.get_mut(filled..).unwrap_or_default();
            if room.is_empty() {
                return Ok(filled);
            }
            let read = match &mut self.piece {
                TarPiece::Verbatim(bytes, at) if *at < bytes.len() => {
                    let read = bytes.get(*at..).unwrap_or_default().read(room)?;
                    *at = at.saturating_add(read);
                    read
                }
                TarPiece::Object(object, segment) if segment.length > 0 => {
                    let count = narrow(segment.length).min(room.len());
                    let part = room.get_mut(..count).unwrap_or_default();
                    let read = match self.objects.read_at(object, part, segment.offset) {
                        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        result => result,
                    };
                    let read = read.map_err(|source| {
                        io::Error::other(RebuildError::Object { object: *object, source })
                    })?;
                    segment.offset = segment.offset.saturating_add(wide(read));
                    segment.length = segment.length.saturating_sub(wide(read));
                    read
                }
                TarPiece::Verbatim(..) | TarPiece::Object(..) => {
                    if !self.advance().map_err(io::Error::other)? {
                        return Ok(filled);
                    }
                    0
                }
            };
            filled = filled.saturating_add(read);
        }
    }
}

/// Offset in bytes of each object in a tar, in ascending order, as far as the tar was read.
pub type ObjectPositions = Arc<Mutex<VecDeque<(u64, ObjectId)>>>;

/// Returns the object at `position` of a tar. Drops preceding objects, whose files are not in the tree.
#[must_use]
pub fn object_at(positions: &ObjectPositions, position: u64) -> Option<ObjectId> {
    let mut positions = positions.lock().unwrap_or_else(PoisonError::into_inner);
    while let Some((at, object)) = positions.pop_front() {
        if at >= position {
            return (at == position).then_some(object);
        }
    }
    None
}

/// A reader of a tar with zeros in place of its objects' contents, which suffices to read the tar's entries.
pub type Skeleton<R> = TarReader<R, Zeros>;

/// Objects whose bytes are all zeros. Records the objects' positions.
#[derive(Debug, Default)]
pub struct Zeros {
    positions: ObjectPositions,
}

impl<R: Read> Skeleton<R> {
    /// Creates a reader of a recipe's skeleton. Also returns the positions of its objects.
    ///
    /// # Errors
    /// As [`TarReader::new`].
    pub fn with_positions(recipe: R) -> Result<(Self, ObjectPositions), RebuildError> {
        let zeros = Zeros::default();
        let positions = Arc::clone(&zeros.positions);
        Ok((Self::new(recipe, zeros)?, positions))
    }
}

impl Objects for Zeros {
    fn read_at(&mut self, _: &ObjectId, into: &mut [u8], _: u64) -> io::Result<usize> {
        into.fill(0);
        Ok(into.len())
    }

    fn found(&mut self, object: &ObjectId, position: u64) {
        let mut positions = self.positions.lock().unwrap_or_else(PoisonError::into_inner);
        positions.push_back((position, *object));
    }
}
