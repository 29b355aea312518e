//! A hot pack: the blocks of an image's devices that its programs read first, compressed, each with its digest.
//!
//! A pack is one blob of an index. With it, a lazy start needs one request instead of one for each part of the image
//! that it reads. `docs/format/hot-pack.md` defines the format.

use std::collections::BTreeSet;

use sha2::{Digest as _, Sha256};

use super::{Fields, HeadError};
use crate::verity::{Algorithm, DeviceId};

/// Bytes of a device that have one digest in a pack. The last block of a device may be shorter. A unit consists of four
/// blocks.
pub const BLOCK: u64 = 16 << 10;
/// Number of blocks in a unit.
pub const BLOCKS_OF_A_UNIT: u32 = 4;
const _: () = assert!(BLOCK * 4 == super::UNIT && BLOCKS_OF_A_UNIT == 4);

/// Read-ahead in KiB of a mount while its data comes from a pack, and while its reads are recorded for one. With another
/// read-ahead, the kernel would read blocks that the pack does not have.
pub const READ_AHEAD: u32 = 16;

/// Maximum number of blocks of a frame: 1 MiB.
pub const FRAME_BLOCKS: u32 = 64;
/// Maximum number of blocks of a pack: 256 MiB.
pub const PACK_BLOCKS: u32 = 1 << 14;
/// Maximum length of a compressed frame in bytes. zstd adds less than this to data that it cannot compress.
pub const PACKED_MAX: u32 = (1 << 20) + (16 << 10);
/// Number of bytes at the beginning of a pack from which the length of its head is known.
pub const COUNTS: usize = 32;

const MAGIC: &[u8; 8] = b"quirehot";
const VERSION: u32 = 1;
/// Maximum number of devices. An image has at most this many layers.
const DEVICES_MAX: u32 = 4096;

/// Adjacent blocks of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotRun {
    /// Number of the first block.
    pub first: u32,
    /// Number of blocks, at least 1.
    pub blocks: u32,
}

/// Blocks of one device that are compressed together, as one zstd frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotFrame {
    /// The device of the blocks.
    pub device: DeviceId,
    /// The blocks, in the order in which the frame has them.
    pub runs: Vec<HotRun>,
    /// SHA-256 digest of each block.
    pub digests: Vec<[u8; 32]>,
    /// Length in bytes of the compressed frame.
    pub packed: u32,
}

impl HotFrame {
    /// Returns the numbers of the frame's blocks, in its order.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|it| it.first..it.first.saturating_add(it.blocks))
    }
}

/// Returns the digest of a block.
#[must_use]
pub fn block_digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// The table of a pack, which precedes its frames.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HotHead {
    /// The frames, in the order in which programs read their first blocks.
    pub frames: Vec<HotFrame>,
}

/// The lengths of a pack's tables, which its first bytes have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    devices: u32,
    frames: u32,
    runs: u32,
    blocks: u32,
}

impl Counts {
    fn decode(fields: &mut Fields<'_>) -> Result<Self, HeadError> {
        if fields.bytes(8).ok() != Some(&MAGIC[..]) {
            return Err(HeadError::Magic);
        }
        match fields.u32()? {
            VERSION => {}
            other => return Err(HeadError::Version(other)),
        }
        let [devices, frames, runs, blocks, reserved] =
            [fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?];
        let are_right = devices <= DEVICES_MAX
            && blocks <= PACK_BLOCKS
            && runs <= blocks
            && frames <= runs
            && devices <= frames;
        if !are_right || reserved != 0 {
            return Err(HeadError::Damaged("a count of a hot pack"));
        }
        Ok(Self { devices, frames, runs, blocks })
    }

    /// Returns the length of the head in bytes.
    fn length(&self) -> usize {
        let [devices, frames, runs, blocks] = [self.devices, self.frames, self.runs, self.blocks]
            .map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        let tables = [(devices, 32), (frames, 12), (runs, 8), (blocks, 32), (1, 32)];
        tables
            .into_iter()
            .fold(COUNTS, |sum, (count, size)| sum.saturating_add(count.saturating_mul(size)))
    }
}

impl HotHead {
    /// Returns the length in bytes of the head of a pack that begins with these [`COUNTS`] bytes.
    ///
    /// # Errors
    /// [`HeadError`] if no pack begins like this.
    pub fn length_of(beginning: &[u8; COUNTS]) -> Result<usize, HeadError> {
        Ok(Counts::decode(&mut Fields(beginning))?.length())
    }

    /// Returns the number of the pack's blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.frames.iter().map(|it| it.digests.len()).sum()
    }

    /// Encodes the head. The frames follow it in a pack.
    ///
    /// # Errors
    /// [`HeadError`] for a head that [`decode`](Self::decode) would refuse.
    pub fn encode(&self) -> Result<Vec<u8>, HeadError> {
        self.check()?;
        let devices: BTreeSet<DeviceId> = self.frames.iter().map(|it| it.device).collect();
        let devices: Vec<DeviceId> = devices.into_iter().collect();
        let count = |length: usize| {
            u32::try_from(length).or(Err(HeadError::Damaged("a count is too large")))
        };
        let runs: usize = self.frames.iter().map(|it| it.runs.len()).sum();
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        for length in [devices.len(), self.frames.len(), runs, self.blocks()] {
            bytes.extend(count(length)?.to_le_bytes());
        }
        bytes.extend([0; 4]);
        for device in &devices {
            bytes.extend(device.as_bytes());
        }
        for frame in &self.frames {
            let device = devices.binary_search(&frame.device).unwrap_or_default();
            for number in [count(device)?, count(frame.runs.len())?, frame.packed] {
                bytes.extend(number.to_le_bytes());
            }
        }
        for run in self.frames.iter().flat_map(|it| &it.runs) {
            bytes.extend(run.first.to_le_bytes());
            bytes.extend(run.blocks.to_le_bytes());
        }
        bytes.extend(self.frames.iter().flat_map(|it| it.digests.iter().flatten()));
        let digest = Sha256::digest(&bytes);
        bytes.extend(digest);
        Ok(bytes)
    }

    /// Decodes the head of a pack, without the frames behind it.
    ///
    /// # Errors
    /// [`HeadError`] with the field that is invalid.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeadError> {
        let (content, digest) = bytes.split_last_chunk::<32>().ok_or(HeadError::Magic)?;
        let mut fields = Fields(content);
        let counts = Counts::decode(&mut fields)?;
        if counts.length() != bytes.len() {
            return Err(HeadError::Damaged("the length of the head of a hot pack"));
        }
        if Sha256::digest(content)[..] != *digest {
            return Err(HeadError::Digest);
        }
        let mut devices = Vec::new();
        for _ in 0..counts.devices {
            let id = DeviceId::from_bytes(&fields.array::<32>()?);
            let id = id.or(Err(HeadError::Damaged("a device id is invalid")))?;
            if devices.last().is_some_and(|it| *it >= id) {
                return Err(HeadError::Damaged("the devices of a hot pack are not in order"));
            }
            devices.push(id);
        }
        let mut frames = Vec::new();
        let mut lengths = Vec::new();
        for _ in 0..counts.frames {
            let device = fields.count()?;
            let unknown = HeadError::Damaged("a frame of a hot pack has an unknown device");
            let device = *devices.get(device).ok_or(unknown)?;
            lengths.push(fields.count()?);
            let packed = fields.u32()?;
            frames.push(HotFrame { device, runs: Vec::new(), digests: Vec::new(), packed });
        }
        let most = usize::try_from(counts.runs).unwrap_or(usize::MAX);
        if lengths.iter().fold(0_usize, |sum, it| sum.saturating_add(*it)) != most {
            return Err(HeadError::Damaged("the number of runs of a hot pack"));
        }
        let mut blocks = 0_u32;
        for (frame, length) in frames.iter_mut().zip(&lengths) {
            for _ in 0..*length {
                let run = HotRun { first: fields.u32()?, blocks: fields.u32()? };
                blocks = blocks.saturating_add(run.blocks);
                frame.runs.push(run);
            }
        }
        if blocks != counts.blocks {
            return Err(HeadError::Damaged("the number of blocks of a hot pack"));
        }
        for frame in &mut frames {
            let blocks: u32 = frame.runs.iter().map(|it| it.blocks).sum();
            frame.digests = (0..blocks).map(|_| fields.array()).collect::<Result<_, _>>()?;
        }
        let used: BTreeSet<DeviceId> = frames.iter().map(|it| it.device).collect();
        if used.len() != devices.len() {
            return Err(HeadError::Damaged("a device of a hot pack has no frame"));
        }
        let head = Self { frames };
        head.check()?;
        Ok(head)
    }

    /// Checks the limits, and that each block occurs once.
    fn check(&self) -> Result<(), HeadError> {
        let mut seen = BTreeSet::new();
        let mut all = 0_u32;
        for frame in &self.frames {
            let mut blocks = 0_u32;
            for run in &frame.runs {
                blocks = blocks.saturating_add(run.blocks);
                if run.blocks == 0 || run.first.checked_add(run.blocks).is_none() {
                    return Err(HeadError::Damaged("a run of a hot pack"));
                }
                if blocks > FRAME_BLOCKS {
                    return Err(HeadError::Damaged("a frame of a hot pack is too long"));
                }
            }
            let is_right = blocks > 0
                && usize::try_from(blocks) == Ok(frame.digests.len())
                && (1..=PACKED_MAX).contains(&frame.packed)
                && frame.device.algorithm() == Algorithm::Sha256;
            if !is_right {
                return Err(HeadError::Damaged("a frame of a hot pack"));
            }
            all = all.saturating_add(blocks);
            if all > PACK_BLOCKS {
                return Err(HeadError::Damaged("a hot pack has too many blocks"));
            }
            if !frame.blocks().all(|it| seen.insert((frame.device, it))) {
                return Err(HeadError::Damaged("a block occurs twice in a hot pack"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(byte: u8) -> DeviceId {
        DeviceId::from_bytes(&[byte; 32]).unwrap()
    }

    fn frame(byte: u8, runs: &[(u32, u32)]) -> HotFrame {
        let runs: Vec<_> =
            runs.iter().map(|(first, blocks)| HotRun { first: *first, blocks: *blocks }).collect();
        let blocks: u32 = runs.iter().map(|it| it.blocks).sum();
        let digests = (0..blocks).map(|it| [u8::try_from(it).unwrap(); 32]).collect();
        HotFrame { device: device(byte), runs, digests, packed: 77 }
    }

    /// The bytes of a small head, from the tables of `docs/format/hot-pack.md`.
    #[test]
    fn a_head_is_encoded_as_the_format_says() {
        let head = HotHead { frames: vec![frame(9, &[(5, 1)]), frame(3, &[(0, 1), (8, 1)])] };
        let mut expect = b"quirehot".to_vec();
        for number in [1_u32, 2, 2, 3, 3, 0] {
            expect.extend(number.to_le_bytes());
        }
        expect.extend([3; 32]);
        expect.extend([9; 32]);
        for number in [1_u32, 1, 77, 0, 2, 77, 5, 1, 0, 1, 8, 1] {
            expect.extend(number.to_le_bytes());
        }
        expect.extend([[0; 32], [0; 32], [1; 32]].concat());
        let digest = Sha256::digest(&expect);
        expect.extend(digest);
        let bytes = head.encode().unwrap();
        assert_eq!(bytes, expect);
        assert_eq!(HotHead::length_of(bytes.first_chunk().unwrap()), Ok(bytes.len()));
        assert_eq!(HotHead::decode(&bytes), Ok(head));
    }

    #[test]
    fn heads_that_break_a_rule_are_refused() {
        for (frames, part) in [
            (vec![frame(1, &[(0, FRAME_BLOCKS + 1)])], "too long"),
            (vec![frame(1, &[(0, 2), (1, 1)])], "twice"),
            (vec![frame(1, &[(0, 2)]), frame(1, &[(1, 1)])], "twice"),
            (vec![frame(1, &[(u32::MAX, 1)])], "a run"),
            (vec![frame(1, &[(0, 0)])], "a run"),
            (vec![frame(1, &[])], "a frame"),
            (vec![HotFrame { packed: 0, ..frame(1, &[(0, 1)]) }], "a frame"),
            (vec![HotFrame { packed: PACKED_MAX + 1, ..frame(1, &[(0, 1)]) }], "a frame"),
            (vec![HotFrame { digests: vec![], ..frame(1, &[(0, 1)]) }], "a frame"),
        ] {
            let error = HotHead { frames }.encode().unwrap_err().to_string();
            assert!(error.contains(part), "{error}: {part}");
        }
        // The same block of two devices is no repetition.
        let head = HotHead { frames: vec![frame(1, &[(0, 2)]), frame(2, &[(0, 2)])] };
        let bytes = head.encode().unwrap();
        let patched = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            let end = bytes.len() - 32;
            let digest = Sha256::digest(&bytes[..end]);
            bytes[end..].copy_from_slice(&digest);
            HotHead::decode(&bytes)
        };
        assert!(patched(0, b'q').is_ok());
        for (at, value) in [(0, b'x'), (8, 2), (12, 3), (16, 3), (20, 3), (24, 3), (28, 1), (31, 1)]
        {
            assert!(patched(at, value).is_err(), "byte {at}");
        }
        // The devices in the wrong order, an unknown device, and a device without frames.
        let frames = COUNTS + 64;
        for (at, value) in [(COUNTS, 5), (frames, 7), (frames + 12, 0)] {
            assert!(patched(at, value).is_err(), "byte {at}");
        }
        let mut damaged = bytes.clone();
        damaged[40] ^= 1;
        assert_eq!(HotHead::decode(&damaged), Err(HeadError::Digest));
        assert!(HotHead::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}
