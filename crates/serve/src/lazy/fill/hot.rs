//! Fills blocks of a device from an image's hot pack, and verifies them.
//!
//! A block that came from a pack is used only for readers of the pack's image: another image may have an index that its
//! user trusts more. Units that were compared with their digests take precedence, and are never overwritten.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use image::lazy::UNIT;
use image::lazy::hot::{BLOCK, block_digest};
use image::lazy::tag::TAGGED;
use store::HotPack;

use super::cause::cause_of;
use super::{FillError, LayerFiller};
use crate::unpoisoned::lock;

/// The blocks of one device in a hot pack.
#[derive(Debug, Default)]
pub(super) struct HotBlocks {
    pack: OnceLock<HotDevice>,
    /// Whether blocks may not be used, because readers of another image share the filler.
    is_off: AtomicBool,
}

#[derive(Debug)]
struct HotDevice {
    pack: Arc<HotPack>,
    /// Numbers of the frames in the pack that have blocks of the device. The flag is set when the frame was handled.
    frames: Vec<(usize, Mutex<bool>)>,
    blocks: HashMap<u32, HotBlock>,
}

#[derive(Debug)]
struct HotBlock {
    /// Index of its frame in [`HotDevice::frames`].
    frame: usize,
    digest: [u8; 32],
    /// Whether the device has the block, verified.
    is_there: AtomicBool,
    /// Whether a reader got a part of the block.
    is_read: AtomicBool,
}

impl HotDevice {
    fn block(&self, number: u64) -> Option<&HotBlock> {
        u32::try_from(number).ok().and_then(|it| self.blocks.get(&it))
    }
}

/// Returns the numbers of the blocks that overlap a range of bytes.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

impl LayerFiller<'_> {
    /// Sets the pack from which blocks of the device are filled. Returns the number of frames to load. The first pack
    /// stays.
    pub fn use_hot_pack(&self, pack: &Arc<HotPack>) -> usize {
        // The blocks of a pack belong to the device of a tar.
        if self.index.head.kind.is_of_chunks() {
            return 0;
        }
        let device = self.index.head.device;
        let made = || {
            let (mut frames, mut blocks) = (Vec::new(), HashMap::new());
            for (number, frame) in pack.frames().iter().enumerate() {
                if frame.device != device {
                    continue;
                }
                for (block, digest) in frame.blocks().zip(&frame.digests) {
                    let (frame, digest) = (frames.len(), *digest);
                    let [is_there, is_read] = [false; 2].map(AtomicBool::new);
                    blocks.insert(block, HotBlock { frame, digest, is_there, is_read });
                }
                frames.push((number, Mutex::new(false)));
            }
            HotDevice { pack: Arc::clone(pack), frames, blocks }
        };
        self.hot.pack.get_or_init(made).frames.len()
    }

    /// Makes the device use units only, because readers of another image will share the filler.
    pub(in crate::lazy) fn stop_using_hot_pack(&self) {
        self.hot.is_off.store(true, Ordering::Release);
    }

    fn hot(&self) -> Option<&HotDevice> {
        self.hot.pack.get().filter(|_| !self.hot.is_off.load(Ordering::Acquire))
    }

    /// Returns whether the part of a range in a unit is present because of the hot pack.
    pub(super) fn has_hot(&self, unit: usize, range: &Range<u64>) -> bool {
        let Some(hot) = self.hot() else { return false };
        let start = unit as u64 * UNIT;
        let part =
            range.start.max(start)..range.end.min(start + UNIT).min(self.index.head.device_bytes);
        let is_there = |it| hot.block(it).is_some_and(|it| it.is_there.load(Ordering::Acquire));
        !part.is_empty() && blocks_of(&part).all(is_there)
    }

    /// Counts the blocks of a range that came with the hot pack, when a reader gets them for the first time.
    pub(super) fn touch_hot(&self, range: &Range<u64>) {
        let Some(hot) = self.hot() else { return };
        for block in blocks_of(range).filter_map(|it| hot.block(it)) {
            if block.is_there.load(Ordering::Acquire)
                && !block.is_read.load(Ordering::Relaxed)
                && !block.is_read.swap(true, Ordering::Relaxed)
            {
                self.core.counts.hot_read();
            }
        }
    }

    /// Loads the frames that have blocks of a range, unless that was done before.
    pub(super) fn load_hot(&self, range: &Range<u64>) {
        let Some(hot) = self.hot() else { return };
        for block in blocks_of(range).filter_map(|it| hot.block(it)) {
            if !block.is_there.load(Ordering::Acquire) {
                self.load_hot_frame(block.frame);
            }
        }
    }

    /// Loads a frame of the pack, by its index among those of the device, unless that was done before. Blocks that
    /// cannot be used are left out: their units are fetched when they are read.
    pub fn load_hot_frame(&self, frame: usize) {
        let Some(hot) = self.hot() else { return };
        let Some((number, is_done)) = hot.frames.get(frame) else { return };
        let mut is_done = lock(is_done);
        if std::mem::replace(&mut *is_done, true) {
            return;
        }
        if let Err(error) = self.load_blocks(hot, *number) {
            let (device, error) = (self.index.head.device, &error as &dyn std::error::Error);
            tracing::warn!(%device, error, "cannot use a part of a hot pack");
        }
    }

    fn load_blocks(&self, hot: &HotDevice, number: usize) -> Result<(), FillError> {
        let bytes = hot.pack.read(number).map_err(FillError::Hot)?;
        let length = self.index.head.device_bytes;
        let mut rest = &bytes[..];
        let mut units = Vec::new();
        self.check_disk()?;
        // Data for waiting readers has precedence in the last free space.
        self.core.device.check_room(bytes.len() as u64).map_err(FillError::Room)?;
        for (block, digest) in
            hot.pack.frames()[number].blocks().zip(&hot.pack.frames()[number].digests)
        {
            let place = u64::from(block) * BLOCK;
            let size = length.saturating_sub(place).min(BLOCK);
            let size = usize::try_from(size).unwrap_or_default();
            let damaged = || FillError::Hot(std::io::ErrorKind::InvalidData.into());
            let (these, behind) = rest.split_at_checked(size).ok_or_else(damaged)?;
            rest = behind;
            let Some(known) = hot.blocks.get(&block).filter(|_| size > 0) else { continue };
            if block_digest(these) != *digest {
                return Err(damaged());
            }
            let unit = usize::try_from(place / UNIT).unwrap_or(usize::MAX);
            self.write_block(unit, these, place)?;
            known.is_there.store(true, Ordering::Release);
            self.core.counts.hot();
            if units.last() != Some(&unit) {
                units.push(unit);
            }
        }
        // Units whose blocks are all there are compared with their digests, so that other images can use them.
        for unit in units {
            let start = unit as u64 * UNIT;
            if !self.is_there(unit) && self.has_hot(unit, &(start..start + UNIT)) {
                self.recall(&(unit..unit + 1))?;
            }
        }
        Ok(())
    }

    /// Writes a block, unless its unit is already there.
    fn write_block(&self, unit: usize, bytes: &[u8], place: u64) -> Result<(), FillError> {
        let _writing = self.writing(unit);
        if self.is_there(unit) {
            return Ok(());
        }
        let mut before = vec![0; bytes.len()];
        if self.core.device.read_at(&mut before, place).is_ok()
            && before == bytes
            && bytes.iter().any(|it| *it != 0)
        {
            // An earlier service wrote it.
            return Ok(());
        }
        self.core.device.write_at(bytes, place).map_err(|error| {
            self.failures.disk_failed(cause_of(&error), Instant::now());
            FillError::Write(error)
        })
    }

    /// Extends a range to the parts that can be verified: blocks with tags, blocks of the hot pack, or whole units.
    pub(in crate::lazy) fn verifiable(&self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range.clone();
        }
        let whole = self.whole_units(range);
        let of = |byte: u64| usize::try_from(byte / UNIT).unwrap_or(usize::MAX);
        let is_hot = |byte: u64| self.has_hot(of(byte), range);
        let blocks = blocks_of(range);
        let last = range.end - 1;
        let start = match range.start {
            start if self.has_tags(of(start)) => start / TAGGED * TAGGED,
            start if is_hot(start) => blocks.start * BLOCK,
            _ => whole.start,
        };
        let end = match last {
            last if self.has_tags(of(last)) => (last / TAGGED + 1) * TAGGED,
            last if is_hot(last) => blocks.end * BLOCK,
            _ => whole.end,
        };
        start..end.min(whole.end)
    }

    /// Verifies the bytes of a part of a unit that was read back by the digests of the hot pack. Blocks that are wrong
    /// are not used again: another image, whose index does not agree with the pack, may have fetched the unit.
    pub(super) fn are_right_blocks(&self, part: &Range<u64>, bytes: &[u8]) -> bool {
        let Some(hot) = self.hot() else { return false };
        let mut chunks = bytes.chunks(usize::try_from(BLOCK).unwrap_or(usize::MAX));
        let mut are_right = part.start.is_multiple_of(BLOCK);
        for number in blocks_of(part) {
            let (Some(block), Some(bytes)) = (hot.block(number), chunks.next()) else {
                return false;
            };
            if block_digest(bytes) != block.digest {
                block.is_there.store(false, Ordering::Release);
                are_right = false;
            }
        }
        are_right
    }
}
