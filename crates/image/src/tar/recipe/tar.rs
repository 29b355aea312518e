//! The tar of a recipe: all of it, or its skeleton, with zeros for what files contain.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Operation, Reader, RebuildError};
use crate::tar::{Segment, narrow, wide};
use crate::verity::ObjectId;

/// The objects that a recipe refers to.
pub trait Objects {
    /// Reads bytes of `object` from `offset` on into `into`, and returns their number. Zero means that it has no more.
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

/// The exact tar of a recipe, made while it is read. An [`io::Error`] of it holds a [`RebuildError`].
///
/// It compares no digest, so compare that of the tar: a recipe may be damaged or wrong.
#[derive(Debug)]
pub struct TarReader<R, O> {
    recipe: Reader<R>,
    objects: O,
    piece: TarPiece,
}

/// The part of the tar that is being handed out.
#[derive(Debug)]
enum TarPiece {
    /// Bytes of the tar itself, at most 64 KiB, and how many of them were read.
    Verbatim(Vec<u8>, usize),
    /// A part of an object.
    Object(ObjectId, Segment),
}

impl<R: Read, O: Objects> TarReader<R, O> {
    /// A reader at the beginning of the tar.
    ///
    /// # Errors
    /// [`RebuildError`] when the recipe's header is invalid.
    pub fn new(recipe: R, objects: O) -> Result<Self, RebuildError> {
        let piece = TarPiece::Verbatim(Vec::new(), 0);
        Ok(Self { recipe: Reader::new(recipe)?, objects, piece })
    }

    /// Goes on to the next piece, and returns whether there is one.
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
        // Headers are small: as many pieces as there is room for.
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

/// The position in bytes of each object in a tar, in ascending order, as far as the tar was read.
pub type ObjectPositions = Arc<Mutex<VecDeque<(u64, ObjectId)>>>;

/// A tar with zeros for the contents of its objects: enough to read its entries.
pub type Skeleton<R> = TarReader<R, Zeros>;

/// Objects of zeros, which record their positions.
#[derive(Debug, Default)]
pub struct Zeros {
    positions: ObjectPositions,
}

impl<R: Read> Skeleton<R> {
    /// The skeleton of a recipe's tar, and the positions of its objects.
    ///
    /// # Errors
    /// The errors of [`TarReader::new`].
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
