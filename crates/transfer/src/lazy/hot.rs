//! Makes the hot pack of an image from a trace and from its complete devices.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::FileExt as _;

use image::lazy::hot::{BLOCK, FRAME_BLOCKS, HotFrame, HotHead, HotRun, PACK_BLOCKS, block_digest};
use image::lazy::{Head, UNIT};
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

/// Makes the hot pack of the blocks of a trace, in the trace's order. `devices` are complete, and their units are
/// compared with the digests in `heads`, so that damage of a disk does not get into a pack. Blocks that no device has,
/// and those beyond the limit of a pack, are left out. Returns `None` if no block is left.
///
/// The same trace gives the same bytes, with the same version of zstd.
pub fn hot_pack<'h>(
    trace: &Trace,
    devices: &[OpenDevice],
    heads: impl IntoIterator<Item = &'h Head>,
) -> Result<Option<Vec<u8>>, OperationError> {
    let heads: Vec<&Head> = heads.into_iter().collect();
    let mut open: BTreeMap<DeviceId, Blocks> = BTreeMap::new();
    let mut done: Vec<(usize, HotFrame, Vec<u8>)> = Vec::new();
    let (mut seen, mut order) = (BTreeSet::new(), 0);
    let most = usize::try_from(PACK_BLOCKS).unwrap_or(usize::MAX);
    let full = usize::try_from(FRAME_BLOCKS).unwrap_or(usize::MAX);
    for run in &trace.runs {
        let Some(device) = devices.iter().find(|it| it.id == run.device) else { continue };
        let Some(head) = heads.iter().find(|it| it.device == run.device) else { continue };
        let failed = |source| {
            let what = format_args!("device {} for a hot pack", run.device);
            OperationError::of::<_, io::Error>("read", what)(source)
        };
        let length = head.device_bytes;
        let mut verified = None;
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
            let unit = place / UNIT;
            let unit_bytes = match verified.take() {
                Some((number, bytes)) if number == unit => bytes,
                _ => read_unit(device, head, unit).map_err(&failed)?,
            };
            let begin = usize::try_from(place % UNIT).unwrap_or_default();
            let bytes = &unit_bytes[begin..begin + size];
            blocks.digests.push(block_digest(bytes));
            blocks.bytes.extend(bytes);
            verified = Some((unit, unit_bytes));
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

/// Reads a unit of a device, and compares it with its digest.
fn read_unit(device: &OpenDevice, head: &Head, unit: u64) -> io::Result<Vec<u8>> {
    let length = head.device_bytes.saturating_sub(unit * UNIT).min(UNIT);
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    device.file.read_exact_at(&mut bytes, unit * UNIT)?;
    match usize::try_from(unit).is_ok_and(|it| head.is_unit(it, &bytes)) {
        true => Ok(bytes),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("unit {unit} is damaged: run `quire fsck`"),
        )),
    }
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
