//! Compares bytes that were read back from a device with their digests.

use std::ops::Range;

use image::lazy::UNIT;

use super::LayerFiller;

/// The outcome of comparing bytes that were read back with their digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::lazy) enum Check {
    Right,
    /// The bytes were replaced while they were read: read them again.
    Changed,
    /// The disk changed the bytes. The device is condemned.
    Wrong,
}

impl LayerFiller<'_> {
    /// Verifies bytes of filled units that were read back. A file system may lose bytes and report it late or never:
    /// after the journal of a file system was aborted, block allocations are lost, and the file reports no error. If a
    /// unit is wrong, all further reads of the device fail.
    ///
    /// Blocks of a hot pack may have been replaced by verified bytes of their unit in the meantime, or by blocks of
    /// another image's pack. This is not a failure of the disk, so the read is repeated.
    pub(in crate::lazy) fn check(&self, whole: &Range<u64>, bytes: &[u8]) -> Check {
        let mut rest = bytes;
        let mut wrong = None;
        for unit in self.index.head.units_of(whole) {
            let start = unit as u64 * UNIT;
            let end = (start + UNIT).min(self.index.head.device_bytes);
            let part = whole.start.max(start)..whole.end.min(end);
            let length = usize::try_from(part.end.saturating_sub(part.start)).unwrap_or(usize::MAX);
            let Some((these, behind)) = rest.split_at_checked(length) else { return Check::Wrong };
            rest = behind;
            match self.are_right(unit, &part, these) {
                Some(true) => {}
                // The unit was filled after these bytes had been read.
                Some(false) if self.is_unit_right(unit) => return Check::Changed,
                Some(false) => {
                    wrong = Some(unit);
                    break;
                }
                None if self.are_right_blocks(&part, these) => {}
                None => return Check::Changed,
            }
        }
        let Some(unit) = wrong else { return Check::Right };
        let condemned = self.core.device.condemn();
        if !matches!(condemned, Ok(false)) {
            let (device, error) =
                (self.core.device.id(), condemned.err().map(tracing::field::display));
            tracing::error!(%device, unit, error, "the disk changed data: readers get I/O errors; unmount the image");
        }
        Check::Wrong
    }

    /// Compares bytes of a filled unit with their tags, or with the unit's digest. Returns `None` if they can only be
    /// compared with the digests of a hot pack.
    fn are_right(&self, unit: usize, part: &Range<u64>, bytes: &[u8]) -> Option<bool> {
        if !self.is_there(unit) {
            return None;
        }
        let is_whole = *part == self.whole_units(part);
        let by_digest = || is_whole.then(|| self.is_unit(unit, bytes));
        self.have_tags(unit, part, bytes).or_else(by_digest)
    }

    /// Reads a filled unit, and compares it with its digest.
    fn is_unit_right(&self, unit: usize) -> bool {
        let start = unit as u64 * UNIT;
        let length = self.index.head.device_bytes.saturating_sub(start).min(UNIT);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        let _writing = self.writing(unit);
        let read = self.core.device.read_at(&mut bytes, start);
        read.is_ok() && self.is_unit(unit, &bytes)
    }
}
