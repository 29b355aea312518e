//! Writes a recipe.

use std::io::{self, Write};

use super::{END, MAGIC, RANGES, VERBATIM, VERBATIM_MAX, VERSION, WHOLE};
use crate::tar::{Segment, wide};
use crate::verity::{Algorithm, ObjectId};

/// The location of an entry's content.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// An object that holds the content from its first byte on, including holes.
    Object(&'a ObjectId),
    /// The whole content, including holes, to be stored in the recipe itself.
    Inline(&'a [u8]),
}

/// The reason why a recipe cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum RecipeWriteError {
    /// Writing to the sink failed.
    #[error("cannot write the recipe")]
    Write(#[source] io::Error),
    /// The object id has another algorithm than the recipe.
    #[error("the id of object {object} is not {algorithm}, as this recipe needs")]
    Algorithm {
        /// The object.
        object: ObjectId,
        /// The recipe's algorithm.
        algorithm: Algorithm,
    },
    /// Inline content is shorter than the entry's segments require.
    #[error("the content has {length} bytes, but one of its segments ends at byte {end}")]
    Inline {
        /// Length of the content in bytes.
        length: usize,
        /// End of the segment that exceeds the content, in bytes.
        end: u64,
    },
}

/// Writes a recipe. The same tar and objects give the same bytes, for any division of the tar into pieces.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    algorithm: Algorithm,
    /// Verbatim bytes of the next record.
    run: Vec<u8>,
    /// Bytes of the tar in the records written so far.
    length: u64,
    /// Buffer for a record.
    record: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a recipe whose object ids have the algorithm `algorithm`. The writer writes to `out` in small pieces.
    ///
    /// # Errors
    /// [`RecipeWriteError::Write`] if writing to the sink fails.
    pub fn new(mut out: W, algorithm: Algorithm) -> Result<Self, RecipeWriteError> {
        out.write_all(&MAGIC).map_err(RecipeWriteError::Write)?;
        let rest = [VERSION, algorithm.kernel_id(), 0, 0, 0, 0, 0, 0];
        out.write_all(&rest).map_err(RecipeWriteError::Write)?;
        Ok(Self { out, algorithm, run: Vec::new(), length: 0, record: Vec::new() })
    }

    /// Adds the next bytes of the tar, unchanged.
    ///
    /// # Errors
    /// [`RecipeWriteError::Write`] if writing to the sink fails.
    pub fn verbatim(&mut self, mut bytes: &[u8]) -> Result<(), RecipeWriteError> {
        while !bytes.is_empty() {
            let room = VERBATIM_MAX - self.run.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.run.extend_from_slice(now);
            bytes = later;
            if self.run.len() == VERBATIM_MAX {
                self.flush_run()?;
            }
        }
        Ok(())
    }

    /// Adds the next bytes of the tar, which are these segments of a content.
    ///
    /// # Errors
    /// [`RecipeWriteError::Write`]; [`RecipeWriteError::Algorithm`] for an object id with another algorithm than the
    /// recipe's; [`RecipeWriteError::Inline`] if inline content ends before a segment does.
    pub fn content(
        &mut self,
        segments: &[Segment],
        content: Content<'_>,
    ) -> Result<(), RecipeWriteError> {
        match content {
            Content::Inline(bytes) => {
                for segment in segments {
                    let part = usize::try_from(segment.offset)
                        .ok()
                        .zip(usize::try_from(segment.end()).ok())
                        .and_then(|(start, end)| bytes.get(start..end));
                    let short =
                        RecipeWriteError::Inline { length: bytes.len(), end: segment.end() };
                    self.verbatim(part.ok_or(short)?)?;
                }
                Ok(())
            }
            Content::Object(object) => self.object(segments, object),
        }
    }

    fn object(&mut self, segments: &[Segment], object: &ObjectId) -> Result<(), RecipeWriteError> {
        if object.algorithm() != self.algorithm {
            let algorithm = self.algorithm;
            return Err(RecipeWriteError::Algorithm { object: *object, algorithm });
        }
        let mut record = std::mem::take(&mut self.record);
        record.clear();
        match segments {
            [] => {}
            [Segment { offset: 0, length }] => {
                record.push(WHOLE);
                record.extend_from_slice(object.as_bytes());
                put(&mut record, *length);
                self.length += length;
            }
            _ => {
                record.push(RANGES);
                record.extend_from_slice(object.as_bytes());
                put(&mut record, wide(segments.len()));
                let mut end = 0;
                for segment in segments {
                    put(&mut record, segment.offset.saturating_sub(end));
                    put(&mut record, segment.length);
                    end = segment.end();
                    self.length += segment.length;
                }
            }
        }
        if !record.is_empty() {
            self.flush_run()?;
            self.out.write_all(&record).map_err(RecipeWriteError::Write)?;
        }
        self.record = record;
        Ok(())
    }

    fn flush_run(&mut self) -> Result<(), RecipeWriteError> {
        if self.run.is_empty() {
            return Ok(());
        }
        self.record.clear();
        self.record.push(VERBATIM);
        put(&mut self.record, wide(self.run.len()));
        self.out.write_all(&self.record).map_err(RecipeWriteError::Write)?;
        self.out.write_all(&self.run).map_err(RecipeWriteError::Write)?;
        self.length += wide(self.run.len());
        self.run.clear();
        Ok(())
    }

    /// Ends the recipe, and returns the sink without flushing it.
    ///
    /// # Errors
    /// [`RecipeWriteError::Write`] if writing to the sink fails.
    pub fn finish(mut self) -> Result<W, RecipeWriteError> {
        self.flush_run()?;
        self.out.write_all(&[END]).map_err(RecipeWriteError::Write)?;
        self.out.write_all(&self.length.to_le_bytes()).map_err(RecipeWriteError::Write)?;
        Ok(self.out)
    }
}

/// Appends a number in LEB128: seven bits per byte, lowest first, with the top bit set in all bytes but the last.
fn put(record: &mut Vec<u8>, mut number: u64) {
    loop {
        let [low, ..] = number.to_le_bytes();
        number >>= 7;
        if number == 0 {
            record.push(low & 0x7f);
            return;
        }
        record.push(low | 0x80);
    }
}
