//! Fills devices of chunks, which a layer's table of contents describes.
//!
//! The table has the digests of chunks, and not of units. So chunks are verified when they are inflated, or when they
//! are read back after a restart. Units that consist of verified chunks are then compared with the digests that they had
//! at that time.

use std::ops::Range;
use std::sync::OnceLock;

use image::lazy::{Head, UNIT, unit_digest};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{FillError, LayerFiller};

/// Digests of units that were made of verified chunks. Empty if the head has digests of units.
#[derive(Debug)]
pub(super) struct LearnedUnits(Vec<OnceLock<[u8; 32]>>);

impl LearnedUnits {
    pub(super) fn new(head: &Head) -> Self {
        let units = if head.kind.is_of_chunks() { head.unit_count() } else { 0 };
        Self((0..units).map(|_| OnceLock::new()).collect())
    }
}

impl LayerFiller<'_> {
    /// Returns whether the device is sealed once it is full.
    #[must_use]
    pub fn is_sealable(&self) -> bool {
        !self.index.head.kind.is_of_chunks()
    }

    /// Returns whether `bytes` have the digest of this unit. A unit of chunks has one only if it was filled.
    pub(super) fn is_unit(&self, unit: usize, bytes: &[u8]) -> bool {
        let head = &self.index.head;
        if !head.kind.is_of_chunks() {
            return head.is_unit(unit, bytes);
        }
        let learned = self.core.learned.0.get(unit).and_then(OnceLock::get);
        learned.is_some_and(|it| unit_digest(bytes) == *it)
    }

    /// Returns whether `bytes` have the digest of this unit. A unit of chunks gets the digest of its first bytes, so the
    /// caller must have verified the chunks that the bytes consist of.
    pub(super) fn is_right_or_new(&self, unit: usize, bytes: &[u8]) -> bool {
        let head = &self.index.head;
        if !head.kind.is_of_chunks() {
            return head.is_unit(unit, bytes);
        }
        let Some(learned) = self.core.learned.0.get(unit) else { return false };
        let digest = unit_digest(bytes);
        *learned.get_or_init(|| digest) == digest
    }

    /// Extends chunks that lie inside one unit to all chunks of the unit. Without the others, they would be dropped.
    pub(super) fn with_unit(&self, spans: Range<usize>, units: &Range<usize>) -> Range<usize> {
        let is_inside = self.index.head.kind.is_of_chunks() && units.len() == 1;
        if is_inside { self.spans_of(units) } else { spans }
    }

    /// Finds units that the device already contains. A chunk counts only if all of it is in the device.
    pub(super) fn recall_chunks(&self, units: &Range<usize>) -> Result<(), FillError> {
        let units = units.start..units.end.min(self.index.head.unit_count());
        let is_open = |it: &usize| !self.is_there(*it);
        let (Some(first), Some(last)) =
            (units.clone().find(is_open), units.clone().rev().find(is_open))
        else {
            return Ok(());
        };
        let head = &self.index.head;
        let mut start = None;
        let mut run = Vec::new();
        for span in self.spans_of(&(first..last + 1)) {
            let place = head.unpacked(&(span..span + 1));
            match self.stored_chunk(span, &place)? {
                Some(bytes) => {
                    start.get_or_insert(place.start);
                    run.extend(bytes);
                }
                None => {
                    if let Some(start) = start.take() {
                        self.recall_run(start, &run);
                    }
                    run.clear();
                }
            }
        }
        if let Some(start) = start {
            self.recall_run(start, &run);
        }
        Ok(())
    }

    /// Reads a chunk, with the zeros behind it, from the device. Returns `None` if a part of it is missing or wrong.
    fn stored_chunk(&self, span: usize, place: &Range<u64>) -> Result<Option<Vec<u8>>, FillError> {
        // `lseek` is safe, because the file offset is not used otherwise.
        let data = rustix::fs::seek(self.core.device.file(), SeekFrom::Data(place.start));
        // A part of a chunk may be a hole, because some file systems do not store zeros.
        if data.map_or_else(|error| error == Errno::NXIO, |it| it >= place.end) {
            return Ok(None);
        }
        let Ok(length) = usize::try_from(place.end.saturating_sub(place.start)) else {
            return Ok(None);
        };
        let mut bytes = vec![0; length];
        self.core.device.read_at(&mut bytes, place.start).map_err(FillError::Read)?;
        Ok(self.index.head.is_chunk(span, &bytes).then_some(bytes))
    }

    /// Marks the units that lie entirely in these bytes of the device as filled. The bytes consist of verified chunks.
    fn recall_run(&self, start: u64, bytes: &[u8]) {
        let head = &self.index.head;
        let end = start + bytes.len() as u64;
        for unit in head.units_of(&(start..end)) {
            let place = unit as u64 * UNIT;
            let until = (place + UNIT).min(head.device_bytes);
            if place < start || until > end || self.is_there(unit) {
                continue;
            }
            let [from, to] =
                [place, until].map(|it| usize::try_from(it - start).unwrap_or(usize::MAX));
            let Some(bytes) = bytes.get(from..to) else { continue };
            let _writing = self.writing(unit);
            if !self.is_there(unit) && self.is_right_or_new(unit, bytes) {
                self.tag(unit, bytes);
                self.set_filled(unit);
                self.core.counts.recalled();
            }
        }
    }
}
