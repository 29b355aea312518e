//! Makes the hot pack of an image from a trace and from its complete devices.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use image::lazy::hot::{BLOCK, FRAME_BLOCKS, HotFrame, HotHead, HotRun, PACK_BLOCKS, block_digest};
use image::verity::DeviceId;
use store::{OpenDevice, OperationError, Trace};

use super::ZSTD_LEVEL;

/// Blocks of one device, until there are enough for a frame.
#[derive(Debug, Default)]
struct Blocks {
    /// Number of the frame in the order of the first access.
    order: usize,
    numbers: Vec<u32>,
    bytes: Vec<u8>,
    digests: Vec<[u8; 32]>,
}

/// Makes the hot pack of the blocks of a trace, in the trace's order. `devices` are complete. Blocks that no device
/// has, and those beyond the limit of a pack, are left out. Returns `None` if no block is left.
///
/// The same trace gives the same bytes, with the same version of zstd.
pub fn hot_pack(trace: &Trace, devices: &[OpenDevice]) -> Result<Option<Vec<u8>>, OperationError> {
    let mut open: BTreeMap<DeviceId, Blocks> = BTreeMap::new();
    let mut done: Vec<(usize, HotFrame, Vec<u8>)> = Vec::new();
    let (mut seen, mut order) = (BTreeSet::new(), 0);
    let most = usize::try_from(PACK_BLOCKS).unwrap_or(usize::MAX);
    let full = usize::try_from(FRAME_BLOCKS).unwrap_or(usize::MAX);
    for run in &trace.runs {
        let Some(device) = devices.iter().find(|it| it.id == run.device) else { continue };
        let failed = |source| {
            let what = format_args!("device {} for a hot pack", run.device);
            OperationError::of::<_, io::Error>("read", what)(source)
        };
        let length = device.file.metadata().map_err(&failed)?.len();
        for block in run.block..run.block.saturating_add(run.blocks) {
            let place = u64::from(block) * BLOCK;
            if place >= length || seen.len() >= most {
                break;
            }
            if !seen.insert((run.device, block)) {
                continue;
            }
            let blocks = open.entry(run.device).or_insert_with(|| {
                order += 1;
                Blocks { order, ..Blocks::default() }
            });
            let size = usize::try_from((length - place).min(BLOCK)).unwrap_or_default();
            let begin = blocks.bytes.len();
            blocks.bytes.resize(begin + size, 0);
            let bytes = &mut blocks.bytes[begin..];
            std::os::unix::fs::FileExt::read_exact_at(&device.file, bytes, place)
                .map_err(&failed)?;
            blocks.digests.push(block_digest(bytes));
            blocks.numbers.push(block);
            if blocks.numbers.len() == full {
                done.extend(open.remove(&run.device).map(|it| it.frame(run.device)).transpose()?);
            }
        }
    }
    for (device, blocks) in open {
        done.push(blocks.frame(device)?);
    }
    if done.is_empty() {
        return Ok(None);
    }
    done.sort_by_key(|it| it.0);
    let (mut frames, mut data) = (Vec::new(), Vec::new());
    for (_, frame, packed) in done {
        frames.push(frame);
        data.extend(packed);
    }
    let pack = HotHead { frames }.encode();
    let mut pack = pack.map_err(OperationError::of("encode", "a hot pack"))?;
    pack.extend(data);
    Ok(Some(pack))
}

impl Blocks {
    fn frame(self, device: DeviceId) -> Result<(usize, HotFrame, Vec<u8>), OperationError> {
        let Self { order, numbers, bytes, digests } = self;
        let packed = zstd::bulk::compress(&bytes, ZSTD_LEVEL)
            .map_err(OperationError::of("compress", "a hot pack"))?;
        let mut runs: Vec<HotRun> = Vec::new();
        for number in numbers {
            match runs.last_mut() {
                Some(run) if run.first + run.blocks == number => run.blocks += 1,
                _ => runs.push(HotRun { first: number, blocks: 1 }),
            }
        }
        let length = u32::try_from(packed.len()).unwrap_or(u32::MAX);
        Ok((order, HotFrame { device, runs, digests, packed: length }, packed))
    }
}
