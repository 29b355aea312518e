//! Reads recipes, including hostile ones.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::io::{self, BufRead as _, BufReader, Read};

use super::{END, HEADER, LENGTH_MAX, MAGIC, RANGES, RANGES_MAX, VERBATIM, VERBATIM_MAX, VERSION};
use super::{WHOLE, algorithm};
use crate::tar::{Segment, wide};
use crate::verity::{Algorithm, ObjectId};

/// The reason why a tar cannot be rebuilt from a recipe.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// Reading the recipe failed.
    #[error("cannot read the recipe")]
    Read(#[source] io::Error),
    /// The input is not a recipe, or is damaged.
    #[error("the recipe is corrupt at byte {offset}: {kind}")]
    Corrupt {
        /// Offset of the invalid record in the recipe, in bytes.
        offset: u64,
        /// The reason.
        kind: Malformed,
    },
    /// The recipe has the format of a later version.
    #[error("the recipe has format version {0}, and this version of Quire reads 1")]
    Version(u8),
    /// Reading a part of an object failed.
    #[error("cannot read object {object}")]
    Object {
        /// The object.
        object: ObjectId,
        /// The error of [`Objects::read_at`](super::Objects::read_at).
        source: io::Error,
    },
}

/// The reason why a recipe is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The first bytes are not the magic of a recipe.
    #[error("it is not a recipe")]
    Magic,
    /// An unknown algorithm.
    #[error("the algorithm {0} is unknown")]
    Algorithm(u8),
    /// Reserved bytes of the header are not zero.
    #[error("reserved bytes of the header are not zero")]
    Reserved,
    /// A record of unknown type.
    #[error("the record type {0} is unknown")]
    Type(u8),
    /// The recipe ends without an end record.
    #[error("it ends within a record")]
    Truncated,
    /// A number has more bytes than necessary, or is above 2^63 - 1.
    #[error("a number has more bytes than it needs, or is above 2^63 - 1")]
    Number,
    /// A length or a count is out of range.
    #[error("a length is {value}, not between 1 and {bound}")]
    Length {
        /// The value.
        value: u64,
        /// The largest allowed value.
        bound: u64,
    },
    /// A range ends beyond the maximum length of a file.
    #[error("a range of {length} bytes at byte {offset} of an object is too long")]
    Range {
        /// Offset in the object, in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// The length in the end record differs from the total length of the preceding records.
    #[error("the tar has {actual} bytes, but the recipe states {stated}")]
    TarLength {
        /// Length in bytes in the end record.
        stated: u64,
        /// Length in bytes of the other records.
        actual: u64,
    },
    /// There are bytes after the end record.
    #[error("there are bytes after the end")]
    Trailing,
}

/// A piece of the tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Bytes of the tar, at most 64 KiB.
    Verbatim(&'a [u8]),
    /// A part of an object.
    Range {
        /// Id of the object.
        object: &'a ObjectId,
        /// Range of the object.
        segment: Segment,
    },
}

/// Reads a recipe piece by piece, in bounded memory.
#[derive(Debug)]
pub struct Reader<R> {
    source: BufReader<R>,
    /// Number of bytes of the recipe that were read, and the offset of the current record.
    offset: u64,
    record: u64,
    algorithm: Algorithm,
    verbatim: Vec<u8>,
    object: Option<ObjectId>,
    /// Number of remaining ranges of the object, and the end of the previous range.
    ranges: u64,
    range_end: u64,
    /// Bytes of the tar so far.
    length: u64,
    is_done: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the recipe's header.
    ///
    /// # Errors
    /// [`RebuildError::Read`], [`RebuildError::Corrupt`] or [`RebuildError::Version`].
    pub fn new(source: R) -> Result<Self, RebuildError> {
        let mut reader = Self {
            source: BufReader::with_capacity(64 << 10, source),
            offset: 0,
            record: 0,
            algorithm: Algorithm::default(),
            verbatim: Vec::new(),
            object: None,
            ranges: 0,
            range_end: 0,
            length: 0,
            is_done: false,
        };
        let mut header = [0; HEADER];
        reader.fill(&mut header)?;
        let [magic @ .., version, number, a, b, c, d, e, f] = header;
        if magic != MAGIC {
            return Err(reader.corrupt(Malformed::Magic));
        }
        if version != VERSION {
            return Err(RebuildError::Version(version));
        }
        reader.algorithm =
            algorithm(number).ok_or_else(|| reader.corrupt(Malformed::Algorithm(number)))?;
        if [a, b, c, d, e, f] != [0; 6] {
            return Err(reader.corrupt(Malformed::Reserved));
        }
        Ok(reader)
    }

    /// Returns the algorithm of the object ids.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the length of the tar so far, in bytes.
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Returns the next piece, or `None` after the end record.
    ///
    /// # Errors
    /// [`RebuildError::Read`] or [`RebuildError::Corrupt`].
    pub fn next_operation(&mut self) -> Result<Option<Operation<'_>>, RebuildError> {
        if self.is_done {
            return Ok(None);
        }
        if self.ranges > 0 {
            self.ranges = self.ranges.saturating_sub(1);
            let skip = self.number()?;
            return self.range(skip).map(Some);
        }
        self.record = self.offset;
        let mut tag = [0];
        self.fill(&mut tag)?;
        match tag {
            [END] => {
                let mut stated = [0; 8];
                self.fill(&mut stated)?;
                let stated = u64::from_le_bytes(stated);
                let actual = self.length;
                if stated != actual {
                    return Err(self.corrupt(Malformed::TarLength { stated, actual }));
                }
                if !self.source.fill_buf().map_err(RebuildError::Read)?.is_empty() {
                    return Err(self.corrupt(Malformed::Trailing));
                }
                self.is_done = true;
                Ok(None)
            }
            [VERBATIM] => {
                let length = self.bounded(wide(VERBATIM_MAX))?;
                let mut bytes = std::mem::take(&mut self.verbatim);
                bytes.resize(crate::tar::narrow(length), 0);
                let filled = self.fill(&mut bytes);
                self.verbatim = bytes;
                filled?;
                self.grow(length)?;
                Ok(Some(Operation::Verbatim(&self.verbatim)))
            }
            [WHOLE] => {
                self.object_id()?;
                self.range(0).map(Some)
            }
            [RANGES] => {
                self.object_id()?;
                self.ranges = self.bounded(RANGES_MAX)?.saturating_sub(1);
                let skip = self.number()?;
                self.range(skip).map(Some)
            }
            [other] => Err(self.corrupt(Malformed::Type(other))),
        }
    }

    fn object_id(&mut self) -> Result<(), RebuildError> {
        let mut bytes = [0; 64];
        let digest = bytes
            .get_mut(..self.algorithm.digest_len())
            .expect("no digest is longer than SHA-512's");
        self.fill(digest)?;
        let digest = bytes.get(..self.algorithm.digest_len()).unwrap_or_default();
        let object = ObjectId::from_bytes(digest).expect("the length is the algorithm's");
        self.object = Some(object);
        self.range_end = 0;
        Ok(())
    }

    /// Reads the length of a range that begins `skip` bytes after the end of the previous range.
    fn range(&mut self, skip: u64) -> Result<Operation<'_>, RebuildError> {
        let length = self.bounded(LENGTH_MAX)?;
        let offset = self.range_end.saturating_add(skip);
        self.range_end = offset.saturating_add(length);
        if self.range_end > LENGTH_MAX {
            return Err(self.corrupt(Malformed::Range { offset, length }));
        }
        self.grow(length)?;
        let object = self.object.as_ref().expect("ranges follow an object's id");
        Ok(Operation::Range { object, segment: Segment { offset, length } })
    }

    fn grow(&mut self, length: u64) -> Result<(), RebuildError> {
        self.length = self.length.saturating_add(length);
        if self.length > LENGTH_MAX {
            let (value, bound) = (self.length, LENGTH_MAX);
            return Err(self.corrupt(Malformed::Length { value, bound }));
        }
        Ok(())
    }

    fn bounded(&mut self, bound: u64) -> Result<u64, RebuildError> {
        let value = self.number()?;
        if (1..=bound).contains(&value) {
            Ok(value)
        } else {
            Err(self.corrupt(Malformed::Length { value, bound }))
        }
    }

    /// Reads a LEB128 number in its shortest form.
    fn number(&mut self) -> Result<u64, RebuildError> {
        let mut value: u64 = 0;
        for shift in (0..63).step_by(7) {
            let mut byte = [0];
            self.fill(&mut byte)?;
            let [byte] = byte;
            value |= u64::from(byte & 0x7f) << shift;
            match byte {
                0 if shift > 0 => break,
                0..0x80 => return Ok(value),
                _ => {}
            }
        }
        Err(self.corrupt(Malformed::Number))
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), RebuildError> {
        self.source.read_exact(into).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.corrupt(Malformed::Truncated),
            _ => RebuildError::Read(error),
        })?;
        self.offset = self.offset.saturating_add(wide(into.len()));
        Ok(())
    }

    const fn corrupt(&self, kind: Malformed) -> RebuildError {
        RebuildError::Corrupt { offset: self.record, kind }
    }
}
