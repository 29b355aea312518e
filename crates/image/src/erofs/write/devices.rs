//! The device table, and the positions of the devices in the common address space.

use zerocopy::FromZeros as _;
use zerocopy::little_endian::{U16, U32};

use super::ErofsWriteError;
use super::native::{BLOCK_SIZE, DEVICES_MAX, DeviceFile};
use crate::erofs::layout::RawDeviceSlot;
use crate::verity::Algorithm;

/// Upper bound of the number of blocks of a device: block numbers have 48 bits, and all ones mean a hole.
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
    pub(super) fn from_files(devices: &[DeviceFile]) -> Result<Self, ErofsWriteError> {
        if devices.len() > DEVICES_MAX {
            return Err(ErofsWriteError::TooLarge("4096 devices"));
        }
        let slots = devices.iter().map(|device| {
            let (id, bytes, size) = (device.id, device.bytes, BLOCK_SIZE.bytes());
            if id.algorithm() != Algorithm::Sha256 {
                return Err(ErofsWriteError::DeviceAlgorithm { id });
            }
            let blocks = bytes / size;
            if !(1..BLOCKS_END).contains(&blocks) || bytes % size != 0 {
                return Err(ErofsWriteError::DeviceLength { id, bytes, block: size });
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

    /// Returns the number of blocks of a device.
    pub(super) fn blocks(&self, device: u16) -> Option<u64> {
        self.slots.get(usize::from(device)).map(|slot| slot.blocks)
    }

    /// Whether a device has more blocks than 32-bit numbers can count. Kernels before 6.15 refuse such an image.
    pub(super) const fn is_wide(&self) -> bool {
        self.is_wide
    }

    /// Makes the table for an image of `image` blocks. In the common address space, whose block numbers have 32 bits,
    /// the devices follow the image and each other as far as they fit. Files do not use these addresses. With these
    /// addresses, a mount without devices reads beyond the end of the image and not other bytes of the image, and the
    /// concatenation of the image and its devices is a complete image.
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

/// Splits a number of blocks into its high 16 and low 32 bits.
pub(super) fn halves(blocks: u64) -> (U16, U32) {
    let high = u16::try_from(blocks >> 32).expect("a device has fewer than 2^48");
    let low = u32::try_from(blocks & u64::from(u32::MAX)).expect("masked");
    (U16::new(high), U32::new(low))
}
