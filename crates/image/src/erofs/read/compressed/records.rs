//! Indexes with a record for each extent, since Linux 6.15.
//!
//! Records have 4, 8, 16 or 32 bytes. Those of 4 and 8 bytes are for extents of equal lengths. Those of 4 bytes state
//! only the lengths of physical clusters, which follow each other in the image. Source: `z_erofs_map_blocks_ext` in
//! Linux `fs/erofs/zmap.c`, which defines their meaning.

use zerocopy::FromBytes as _;

use super::super::error::{ErofsCorruption, ReadError};
use super::super::inode::Nid;
use super::super::source::ReadAt;
use super::super::{ByteOffset, Image};
use super::settings::Settings;
use super::{Head, Method, PackedExtent, PhysicalCluster, fetch_index};
use crate::erofs::layout::{
    EXTENT_FORMAT_SHIFT, EXTENT_LEN_MASK, EXTENT_PARTIAL, RawExtent, advise,
};

/// A table of extents.
#[derive(Debug)]
pub(super) struct Records {
    nid: Nid,
    /// Size of the file in bytes.
    size: u64,
    /// Offset of the first record.
    at: u64,
    form: Form,
    is_interlaced: bool,
    settings: Settings,
}

/// The form of the records.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// 4 bytes for each extent of 2 to the power of `bits` bytes. The physical cluster of `next` is at `start`.
    Lengths { bits: u32, next: u64, start: u64, first: u64 },
    /// 8 bytes for each extent of 2 to this power of bytes.
    Places(u32),
    /// This many bytes, 16 or 32, for each of `count` extents, in the order of their offsets.
    Extents { record: u64, count: u64 },
}

/// A record: the physical cluster and the way in which it is compressed.
#[derive(Debug, Clone, Copy)]
struct Record {
    plen: u32,
    at: u64,
}

impl Records {
    pub(super) fn new<S: ReadAt>(image: &Image<S>, head: Head) -> Result<Self, ReadError> {
        let Head { nid, size, raw, end, settings } = head;
        let flags = raw.h_advise.get();
        let shift = flags >> advise::RECORD_SIZE_SHIFT & advise::RECORD_SIZE_MASK;
        let record = 4_u64.wrapping_shl(shift.into());
        let mut at = end.checked_next_multiple_of(record).unwrap_or(u64::MAX);
        let bits = u32::from(image.superblock.block_bits.get());
        let bits = bits.saturating_add((raw.h_clusterbits & 15).into());
        let form = match record {
            4 => {
                let mut first = [0; 8];
                fetch_index(image, nid, at, &mut first)?;
                at = at.saturating_add(8);
                let first = u64::from_le_bytes(first);
                Form::Lengths { bits, next: 0, start: first, first }
            }
            8 => Form::Places(bits),
            _ => {
                let high = u16::from_le_bytes([raw.h_algorithmtype, raw.h_clusterbits]);
                let count = u64::from(high) << 32
                    | u64::from(raw.h_idata_size.get()) << 16
                    | u64::from(raw.h_reserved1.get());
                Form::Extents { record, count }
            }
        };
        let is_interlaced = flags & advise::INTERLACED_PCLUSTER != 0;
        Ok(Self { nid, size, at, form, is_interlaced, settings })
    }

    /// Returns the extent that contains a byte of the file.
    pub(super) fn extent<S: ReadAt>(
        &mut self,
        image: &Image<S>,
        offset: u64,
    ) -> Result<PackedExtent, ReadError> {
        let (start, end, record) = match self.form {
            Form::Lengths { bits, .. } | Form::Places(bits) => {
                let number = offset.wrapping_shr(bits);
                let start = number.wrapping_shl(bits);
                let end = start.saturating_add(1_u64.wrapping_shl(bits)).min(self.size);
                (start, end, self.numbered(image, number)?)
            }
            Form::Extents { record, count } => self.search(image, offset, record, count)?,
        };
        let len = end.saturating_sub(start);
        let hole = PackedExtent { start, len, cluster: None };
        let Record { plen, at } = record;
        if plen & EXTENT_LEN_MASK == 0 {
            return Ok(hole);
        }
        let [format, ..] = (plen >> EXTENT_FORMAT_SHIFT).to_le_bytes();
        let is_aligned = image.superblock.block_bits.within(ByteOffset(at)) == 0;
        let method = match format.checked_sub(1) {
            Some(number) => self.settings.method(self.nid, number)?,
            None if self.is_interlaced && is_aligned => Method::Interlaced,
            None => Method::Shifted,
        };
        let cluster = PhysicalCluster {
            at: ByteOffset(at),
            len: (plen & EXTENT_LEN_MASK).into(),
            method,
            is_partial: plen & EXTENT_PARTIAL != 0,
        };
        Ok(PackedExtent { cluster: Some(cluster), ..hole }.check(self.nid)?)
    }

    /// Reads a record of 4 or 8 bytes.
    fn numbered<S: ReadAt>(&mut self, image: &Image<S>, number: u64) -> Result<Record, ReadError> {
        let Form::Lengths { next, start, first, .. } = &mut self.form else {
            let raw = self.read(image, number, 8)?;
            return Ok(Record { plen: raw.plen.get(), at: raw.pstart_lo.get().into() });
        };
        // Files are read from front to back, so the sum of the lengths is rarely computed again.
        if *next > number {
            (*next, *start) = (0, *first);
        }
        let (mut next_number, mut at) = (*next, *start);
        loop {
            let plen = self.read(image, next_number, 4)?.plen.get();
            if next_number == number {
                if let Form::Lengths { next, start, .. } = &mut self.form {
                    (*next, *start) = (number, at);
                }
                return Ok(Record { plen, at });
            }
            at = at.saturating_add((plen & EXTENT_LEN_MASK).into());
            next_number = next_number.saturating_add(1);
        }
    }

    /// Returns the start and end of the extent that contains a byte, and its record. The kernel takes bytes before the
    /// first record for zeros, but writers state a record for each hole.
    fn search<S: ReadAt>(
        &self,
        image: &Image<S>,
        offset: u64,
        record: u64,
        count: u64,
    ) -> Result<(u64, u64, Record), ReadError> {
        let (mut low, mut high) = (0, count);
        let (mut start, mut end, mut found) = (offset, self.size, None);
        while low < high {
            let middle = low.midpoint(high);
            let raw = self.read(image, middle, record)?;
            let wide = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            let begins = wide(raw.lstart_lo.get(), raw.lstart_hi.get());
            if begins > offset {
                if begins > end {
                    let (nid, start) = (self.nid, ByteOffset(begins));
                    return Err(ErofsCorruption::ExtentOrder { nid, number: middle, start }.into());
                }
                (high, end) = (middle, begins);
            } else {
                low = middle.saturating_add(1);
                start = begins;
                let at = wide(raw.pstart_lo.get(), raw.pstart_hi.get());
                found = Some(Record { plen: raw.plen.get(), at });
            }
        }
        let (nid, offset) = (self.nid, ByteOffset(offset));
        let record = found.ok_or(ErofsCorruption::NoExtent { nid, offset })?;
        Ok((start, end, record))
    }

    /// Reads the first `len` bytes of a record; the others are zeros.
    fn read<S: ReadAt>(
        &self,
        image: &Image<S>,
        number: u64,
        len: u64,
    ) -> Result<RawExtent, ReadError> {
        let mut bytes = [0; size_of::<RawExtent>()];
        let at = number.checked_mul(len).and_then(|from| from.checked_add(self.at));
        let part = bytes.get_mut(..super::to_usize(len)).unwrap_or_default();
        fetch_index(image, self.nid, at.unwrap_or(u64::MAX), part)?;
        Ok(RawExtent::read_from_bytes(&bytes).expect("it has that size"))
    }
}
