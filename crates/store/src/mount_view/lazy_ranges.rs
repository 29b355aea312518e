//! Reads parts of a layer's tar from a lazy device, of which the store may have only parts.

use std::ops::Range;

use image::lazy::{Head, UNIT};

use crate::shelf::lazy_devices::LazyDeviceError;
use crate::store::Store;

impl Store {
    /// Whether all units of this part of a tar were written to a lazy device. They may be wrong. Unlike
    /// [`lazy_tar_part`](Self::lazy_tar_part), this reads no byte, so it costs nothing to refuse a part.
    ///
    /// # Errors
    /// As [`lazy_tar_part`](Self::lazy_tar_part).
    pub fn may_have_lazy_tar_part(
        &self,
        head: &Head,
        part: &Range<u64>,
    ) -> Result<bool, LazyDeviceError> {
        let (start, end) = (part.start, part.end.min(head.tar_bytes));
        if start >= end {
            return Ok(true);
        }
        let first = start - start % UNIT;
        let behind = end.next_multiple_of(UNIT).min(head.device_bytes);
        self.lazy_devices.has_no_hole(&head.device, first, behind.saturating_sub(first))
    }

    /// Reads bytes of the tar with which a lazy device begins. Each unit that contains some of them is compared with
    /// its digest in `head`. Returns `None` unless all these units are in the store and right. `part` should be short,
    /// because its units are in memory, and a program that mounts the device may wait.
    ///
    /// # Errors
    /// An error of the disk, or a damaged state of the device.
    pub fn lazy_tar_part(
        &self,
        head: &Head,
        part: &Range<u64>,
    ) -> Result<Option<Vec<u8>>, LazyDeviceError> {
        let (start, end) = (part.start, part.end.min(head.tar_bytes));
        if start >= end {
            return Ok(Some(Vec::new()));
        }
        let units = head.units_of(&(start..end));
        let first = start - start % UNIT;
        let behind = end.next_multiple_of(UNIT).min(head.device_bytes);
        let length = |from: u64, to: u64| usize::try_from(to.saturating_sub(from));
        let (Ok(whole), Ok(before), Ok(wanted)) =
            (length(first, behind), length(first, start), length(start, end))
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; whole];
        if !self.lazy_devices.read_unverified(&head.device, &mut bytes, first)? {
            return Ok(None);
        }
        let unit = usize::try_from(UNIT).unwrap_or(usize::MAX);
        let mut pieces = units.zip(bytes.chunks(unit));
        if !pieces.all(|(number, piece)| head.is_unit(number, piece)) {
            return Ok(None);
        }
        bytes.drain(..before);
        bytes.truncate(wanted);
        Ok(Some(bytes))
    }
}
