//! Locates and reads the bytes of files.

use zerocopy::little_endian::U32;

use super::error::{ErofsCorruption, Part, ReadError};
use super::inode::{DataLayout, FileType, Indexes, Inode, is_hole};
use super::source::ReadAt;
use super::{ByteOffset, Device, Image, fetch, to_u64, to_usize};
use crate::erofs::layout::RawChunkIndex;

/// A run of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the run in the file.
    pub start: ByteOffset,
    /// Length of the run in bytes, at least 1.
    pub len: u64,
    /// Location of the run.
    pub place: RunPlace,
}

/// The location of a run of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunPlace {
    /// A hole: the bytes are zeros.
    Hole,
    /// In the image after the inode at this offset, unaligned, within one block.
    Inline(ByteOffset),
    /// On a device (0 is the image itself) at this offset.
    Data(Device, ByteOffset),
    /// In the image, compressed.
    Packed,
}

impl RunPlace {
    /// Returns the location `len` bytes further on.
    pub(super) const fn after(self, len: u64) -> Self {
        match self {
            Self::Hole => Self::Hole,
            Self::Packed => Self::Packed,
            Self::Inline(at) => Self::Inline(ByteOffset(at.0.saturating_add(len))),
            Self::Data(device, at) => Self::Data(device, ByteOffset(at.0.saturating_add(len))),
        }
    }
}

impl<S: ReadAt> Image<S> {
    /// Returns the part from `offset` on of the run of a file's bytes that contains `offset`; `None` at the end, and
    /// for inodes other than files, directories and symlinks. The run lies within the image, or within the length that
    /// the image states for the device. A compressed file is one run, and its index is not read.
    ///
    /// # Errors
    /// [`ReadError`] if the location is invalid or cannot be read.
    pub fn map(&self, inode: &Inode, offset: ByteOffset) -> Result<Option<Extent>, ReadError> {
        let has_data = matches!(
            inode.file_type(),
            FileType::Regular | FileType::Directory | FileType::Symlink
        );
        let left = match inode.size().checked_sub(offset.0) {
            Some(left @ 1..) if has_data => left,
            _ => return Ok(None),
        };
        let hole = Extent { start: offset, len: left, place: RunPlace::Hole };
        let bits = self.superblock.block_bits;
        let extent = match inode.layout {
            DataLayout::Compressed { .. } => Extent { place: RunPlace::Packed, ..hole },
            DataLayout::Plain(None) => hole,
            DataLayout::Plain(Some(block)) => self.place(inode, Device::IMAGE, block, hole)?,
            DataLayout::Inline(block) => {
                let blocks = inode.size().div_ceil(bits.size()).saturating_sub(1);
                let tail = blocks.saturating_mul(bits.size());
                match tail.checked_sub(offset.0) {
                    Some(len @ 1..) => {
                        self.place(inode, Device::IMAGE, block, Extent { len, ..hole })?
                    }
                    _ => self.inline(inode, tail, hole)?,
                }
            }
            DataLayout::Chunks { bits, indexes } => self.chunk(inode, bits, indexes, hole)?,
        };
        Ok(Some(extent))
    }

    /// Locates a run in the tail after the inode.
    fn inline(&self, inode: &Inode, tail: u64, run: Extent) -> Result<Extent, ReadError> {
        let into = run.start.0.saturating_sub(tail);
        let at = ByteOffset(inode.tail.0.saturating_add(into));
        let within = self.superblock.block_bits.within(at);
        if within.saturating_add(run.len) > self.superblock.block_bits.size() {
            let (nid, len) = (inode.nid(), run.len);
            return Err(ErofsCorruption::InlineData { nid, offset: at, len }.into());
        }
        self.check_range(Part::Data(inode.nid()), Device::IMAGE, at, run.len)?;
        Ok(Extent { place: RunPlace::Inline(at), ..run })
    }

    /// Locates a run in consecutive blocks. The file's first byte is at the beginning of `block`.
    fn place(
        &self,
        inode: &Inode,
        device: Device,
        block: u64,
        run: Extent,
    ) -> Result<Extent, ReadError> {
        let part = Part::Data(inode.nid());
        let start = self.superblock.block_bits.start(block);
        let at = start.and_then(|start| start.0.checked_add(run.start.0));
        let at = ByteOffset(at.unwrap_or(u64::MAX));
        self.locate(part, device, at, run)
    }

    fn chunk(
        &self,
        inode: &Inode,
        bits: u32,
        indexes: Indexes,
        run: Extent,
    ) -> Result<Extent, ReadError> {
        let size = 1_u64.wrapping_shl(bits);
        let into = run.start.0 & size.wrapping_sub(1);
        let number = run.start.0.wrapping_shr(bits);
        let run = Extent { len: run.len.min(size.saturating_sub(into)), ..run };
        let part = Part::ChunkTable(inode.nid());
        let entry = |unit: u64| {
            let table = inode.tail.0.checked_next_multiple_of(unit);
            let at =
                number.checked_mul(unit).zip(table).and_then(|(at, table)| at.checked_add(table));
            ByteOffset(at.unwrap_or(u64::MAX))
        };
        let (device, block) = match indexes {
            Indexes::Blocks => {
                let raw: U32 = self.fetch_raw(entry(to_u64(size_of::<U32>())), part)?;
                (Device::IMAGE, u64::from(raw.get()))
            }
            Indexes::Narrow | Indexes::Wide => {
                let at = entry(to_u64(size_of::<RawChunkIndex>()));
                let raw: RawChunkIndex = self.fetch_raw(at, part)?;
                let high = if indexes == Indexes::Wide { raw.startblk_hi.get() } else { 0 };
                let block = u64::from(raw.startblk_lo.get()) | u64::from(high) << 32;
                (self.device(raw.device_id.get()), block)
            }
        };
        if is_hole(block, indexes) {
            return Ok(Extent { place: RunPlace::Hole, ..run });
        }
        let count = self.devices.len();
        if device.slot().is_some_and(|slot| slot >= count) {
            return Err(ErofsCorruption::Device { nid: inode.nid(), device, count }.into());
        }
        let start = self.superblock.block_bits.start(block);
        let at = start.and_then(|start| start.0.checked_add(into));
        let at = ByteOffset(at.unwrap_or(u64::MAX));
        self.locate(Part::Data(inode.nid()), device, at, run)
    }

    /// Returns the device of a chunk. Only the low bits of `id` are used, as many as the number of devices needs.
    /// Source: `device_id_mask` in Linux `fs/erofs/super.c`.
    fn device(&self, id: u16) -> Device {
        let devices = u16::try_from(self.devices.len()).expect("read by 16-bit numbers");
        // With 2^16 - 1 devices the next power of two does not fit, and the mask is all ones.
        let mask = devices.checked_add(1).and_then(u16::checked_next_power_of_two).unwrap_or(0);
        Device(id & mask.wrapping_sub(1))
    }

    /// Locates a run on a device, and checks that it is within the device. If a location in the image lies within
    /// another device in the common address space of all devices, the run is on that device, up to the device's end.
    /// Source: `erofs_map_dev` in Linux `fs/erofs/data.c`.
    fn locate(
        &self,
        part: Part,
        device: Device,
        at: ByteOffset,
        run: Extent,
    ) -> Result<Extent, ReadError> {
        if device == Device::IMAGE {
            for (number, slot) in (1..).zip(&self.devices) {
                let (Some(start), Some(len)) = (slot.start, slot.len) else { continue };
                let Some(into) = at.0.checked_sub(start.0).filter(|into| *into < len) else {
                    continue;
                };
                let len = run.len.min(len.saturating_sub(into));
                let place = RunPlace::Data(Device(number), ByteOffset(into));
                return Ok(Extent { len, place, ..run });
            }
        }
        self.check_range(part, device, at, run.len)?;
        Ok(Extent { place: RunPlace::Data(device, at), ..run })
    }

    fn check_range(
        &self,
        part: Part,
        device: Device,
        offset: ByteOffset,
        len: u64,
    ) -> Result<(), ReadError> {
        let bound = match device.slot().and_then(|slot| self.devices.get(slot)) {
            None => Some(self.source.len()),
            Some(slot) => slot.len,
        };
        match (offset.0.checked_add(len), bound) {
            (Some(end), Some(bound)) if end <= bound => Ok(()),
            (Some(_), None) => Ok(()),
            (_, bound) => {
                let bound = bound.unwrap_or(u64::MAX);
                Err(ErofsCorruption::Outside { part, device, offset, len, bound }.into())
            }
        }
    }

    /// Returns all runs of a file in order. Adjacent runs are joined.
    #[must_use]
    pub const fn extents<'i>(&'i self, inode: &Inode) -> Extents<'i, S> {
        Extents { image: self, inode: *inode, at: ByteOffset(0), pending: None, done: false }
    }

    /// Reads a file's bytes at `offset` into `buffer`, and returns their number, which is less than the buffer's
    /// length only at the end of the file. `devices` are the devices of the device table, in the same order; devices
    /// from which no bytes are read may be missing. If `devices` is empty, devices in the common address space are
    /// read from the image itself, after its own blocks, like the kernel does. To read a compressed file in several
    /// steps, use [`Image::reader`], because this function unpacks whole extents each time.
    ///
    /// # Errors
    /// [`ReadError::NoDevice`], [`ReadError::Io`], and the errors of [`Image::map`]; for compressed files
    /// [`ReadError::Unsupported`] or [`ReadError::Corrupt`].
    pub fn read(
        &self,
        inode: &Inode,
        offset: ByteOffset,
        buffer: &mut [u8],
        devices: &[&dyn ReadAt],
    ) -> Result<usize, ReadError> {
        if inode.is_compressed() {
            return self.reader(inode).read(offset, buffer, devices);
        }
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = ByteOffset(offset.0.saturating_add(to_u64(done)));
            let Some(extent) = self.map(inode, at)? else { break };
            let len = rest.len().min(to_usize(extent.len));
            let rest = rest.get_mut(..len).unwrap_or_default();
            self.read_place(inode, extent.place, rest, devices)?;
            done = done.saturating_add(len);
        }
        Ok(done)
    }

    /// Reads bytes at a location that [`Image::map`] returned.
    fn read_place(
        &self,
        inode: &Inode,
        place: RunPlace,
        buffer: &mut [u8],
        devices: &[&dyn ReadAt],
    ) -> Result<(), ReadError> {
        let part = Part::Data(inode.nid());
        let (device, at) = match place {
            RunPlace::Hole => {
                buffer.fill(0);
                return Ok(());
            }
            RunPlace::Inline(at) | RunPlace::Data(Device::IMAGE, at) => {
                return self.fetch(at, buffer, part);
            }
            RunPlace::Data(device, at) => (device, at),
            RunPlace::Packed => unreachable!("compressed files have a reader"),
        };
        let slot = device.slot().expect("the image was handled above");
        if let Some(source) = devices.get(slot) {
            return fetch(source, device, at, buffer, part);
        }
        let start = self.devices.get(slot).and_then(|slot| slot.start);
        let behind = start.and_then(|start| start.0.checked_add(at.0));
        match behind.filter(|_| devices.is_empty()) {
            Some(behind) if behind < self.source.len() => {
                self.fetch(ByteOffset(behind), buffer, part)
            }
            _ => Err(ReadError::NoDevice(device)),
        }
    }

    /// Reads the target of a symlink, 1 to 4095 bytes without NUL. The result is empty for other inodes.
    ///
    /// # Errors
    /// [`ReadError`] if the target is invalid or cannot be read.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, ReadError> {
        let mut target = Vec::new();
        self.read_link_into(inode, &mut target)?;
        Ok(target)
    }

    pub(super) fn read_link_into(
        &self,
        inode: &Inode,
        target: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        target.clear();
        if inode.file_type() != FileType::Symlink {
            return Ok(());
        }
        let (nid, size) = (inode.nid(), inode.size());
        if !(1..=to_u64(crate::tree::SYMLINK_MAX)).contains(&size) {
            return Err(ErofsCorruption::SymlinkSize { nid, size }.into());
        }
        target.resize(to_usize(size), 0);
        self.read(inode, ByteOffset(0), target, &[])?;
        match target.iter().position(|byte| *byte == 0) {
            None => Ok(()),
            Some(at) => Err(ErofsCorruption::SymlinkNul { nid, at }.into()),
        }
    }
}

/// The runs of a file in order. They end after an error.
#[derive(Debug)]
pub struct Extents<'i, S> {
    image: &'i Image<S>,
    inode: Inode,
    at: ByteOffset,
    pending: Option<Extent>,
    done: bool,
}

impl<S: ReadAt> Extents<'_, S> {
    fn advance(&mut self) -> Result<Option<Extent>, ReadError> {
        loop {
            let next = self.image.map(&self.inode, self.at)?;
            if let Some(next) = next {
                self.at = ByteOffset(next.start.0.saturating_add(next.len));
            }
            match (&mut self.pending, next) {
                (Some(before), Some(next)) if before.place.after(before.len) == next.place => {
                    before.len = before.len.saturating_add(next.len);
                }
                (None, None) => return Ok(None),
                (before, next) => {
                    let ready = before.take();
                    *before = next;
                    if ready.is_some() {
                        return Ok(ready);
                    }
                }
            }
        }
    }
}

impl<S: ReadAt> Iterator for Extents<'_, S> {
    type Item = Result<Extent, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.advance();
        self.done = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}
