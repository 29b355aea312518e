//! The device table, and where in one space of block addresses the devices are.

use zerocopy::FromZeros as _;
use zerocopy::little_endian::{U16, U32};

use super::native::{BLOCK_SIZE, DEVICES_MAX, DeviceFile};
use crate::erofs::layout::RawDeviceSlot;
use crate::erofs::write::WriteError;
use crate::verity::Algorithm;

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
}

impl Devices {
    pub(super) fn of(devices: &[DeviceFile]) -> Result<Self, WriteError> {
        if devices.len() > DEVICES_MAX {
            return Err(WriteError::TooLarge("4096 devices"));
        }
        let slots = devices.iter().map(|device| {
            let (id, bytes, size) = (device.id, device.bytes, BLOCK_SIZE.bytes());
            if id.algorithm() != Algorithm::Sha256 {
                return Err(WriteError::DeviceAlgorithm { id });
            }
            let blocks = bytes / size;
            if !(1..BLOCKS_END).contains(&blocks) || bytes % size != 0 {
                return Err(WriteError::DeviceLength { id, bytes, block: size });
            }
            let mut tag = [0; 64];
            tag.copy_from_slice(id.to_string().as_bytes());
            Ok(Slot { tag, blocks })
        });
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        let is_wide = slots.iter().any(|slot| u32::try_from(slot.blocks).is_err());
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

    /// The table, for an image of so many blocks. Behind these the devices follow each other in one space of addresses
    /// of 32 bits, as far as they fit. No file refers to that: it makes a mount without devices read what is behind the
    /// image, not other bytes of the image, and an image joined with its devices a whole one.
    pub(super) fn table(&self, image: u32) -> Vec<RawDeviceSlot> {
        let mut next = u64::from(image);
        let slot = |slot: &Slot| {
            let end = next + slot.blocks;
            let fits = u32::try_from(end).is_ok();
            let first = if fits { u32::try_from(next).expect("before its end") } else { 0 };
            next = if fits { end } else { next };
            let (blocks_hi, blocks_lo) = halves(slot.blocks);
            RawDeviceSlot {
                tag: slot.tag,
                blocks_lo,
                blocks_hi: blocks_hi.into(),
                uniaddr_lo: U32::new(first),
                ..RawDeviceSlot::new_zeroed()
            }
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
