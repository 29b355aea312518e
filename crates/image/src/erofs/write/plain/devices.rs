//! The device table, and where in one space of block addresses the devices are.

use zerocopy::FromZeros as _;
use zerocopy::little_endian::{U16, U32};

use super::native::{DEVICES_MAX, DataBlob};
use crate::erofs::layout::RawDeviceSlot;
use crate::erofs::write::WriteError;
use crate::erofs::write::place::BlockSize;
use crate::verity::Algorithm;

/// Blocks of the address space that are kept for the image itself, whose length is known only when it is decided which
/// devices are in there.
const FOR_THE_IMAGE: u64 = 1 << 28;
/// More blocks than a device may have: their numbers have 48 bits, of which all ones are a hole.
const BLOCKS_END: u64 = 1 << 48;

/// The devices of an image.
#[derive(Debug, Default)]
pub(super) struct Devices {
    slots: Vec<Slot>,
    is_wide: bool,
}

#[derive(Debug)]
struct Slot {
    tag: [u8; 64],
    blocks: u64,
    /// Where it begins behind the image, in blocks; `None` when it is not in the address space, since it would not fit.
    start: Option<u32>,
}

impl Devices {
    pub(super) fn of(blobs: &[DataBlob], block_size: BlockSize) -> Result<Self, WriteError> {
        if blobs.len() > DEVICES_MAX {
            return Err(WriteError::TooLarge("4096 data blobs"));
        }
        let mut next = 0_u64;
        let slots = blobs.iter().map(|blob| {
            let (id, bytes, size) = (blob.id, blob.bytes, block_size.bytes());
            if id.algorithm() != Algorithm::Sha256 {
                return Err(WriteError::BlobAlgorithm { id });
            }
            let blocks = bytes / size;
            if !(1..BLOCKS_END).contains(&blocks) || bytes % size != 0 {
                return Err(WriteError::BlobLength { id, bytes, block: size });
            }
            let mut tag = [0; 64];
            tag.copy_from_slice(id.to_string().as_bytes());
            let end = next + blocks;
            let start = u32::try_from(next).ok().filter(|_| end + FOR_THE_IMAGE <= 1 << 32);
            next = if start.is_some() { end } else { next };
            Ok(Slot { tag, blocks, start })
        });
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        let is_wide = slots.iter().any(|slot: &Slot| u32::try_from(slot.blocks).is_err());
        Ok(Self { slots, is_wide })
    }

    pub(super) fn len(&self) -> u16 {
        u16::try_from(self.slots.len()).expect("there are at most 4096")
    }

    /// Blocks of a device.
    pub(super) fn blocks(&self, device: u16) -> Option<u64> {
        self.slots.get(usize::from(device)).map(|slot| slot.blocks)
    }

    /// Whether a device has blocks whose numbers do not fit 32 bits. Kernels before 6.15 refuse an image with one.
    pub(super) const fn is_wide(&self) -> bool {
        self.is_wide
    }

    pub(super) fn is_mapped(&self, device: u16) -> bool {
        self.slots[usize::from(device)].start.is_some()
    }

    /// The address of a block of a device that is in the address space, behind an image of so many blocks.
    pub(super) fn address(&self, device: u16, block: u64, image: u32) -> Option<u32> {
        let start = self.slots[usize::from(device)].start?;
        u32::try_from(u64::from(image) + u64::from(start) + block).ok()
    }

    /// The table, for an image of so many blocks. `None` when the image takes more of the address space than was kept.
    pub(super) fn table(&self, image: u32) -> Option<Vec<RawDeviceSlot>> {
        let slot = |slot: &Slot| {
            let first = slot.start.map_or(Some(0), |start| start.checked_add(image))?;
            if slot.start.is_some() {
                u32::try_from(u64::from(first) + slot.blocks).ok()?;
            }
            let (blocks_hi, blocks_lo) = halves(slot.blocks);
            Some(RawDeviceSlot {
                tag: slot.tag,
                blocks_lo,
                blocks_hi: blocks_hi.into(),
                uniaddr_lo: U32::new(first),
                ..RawDeviceSlot::new_zeroed()
            })
        };
        self.slots.iter().map(slot).collect()
    }
}

/// The high 16 bits of a number of blocks, and the low 32.
pub(super) fn halves(blocks: u64) -> (U16, U32) {
    let high = u16::try_from(blocks >> 32).expect("a device has fewer than 2^48");
    let low = u32::try_from(blocks & u64::from(u32::MAX)).expect("masked");
    (U16::new(high), U32::new(low))
}
