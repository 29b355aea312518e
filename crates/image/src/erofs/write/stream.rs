//! The second pass, which writes the image's bytes from first to last.
//!
//! The tails of files are written with the inodes, before the blocks of files. A file with both is therefore read
//! twice: first its tail, unverified, and later the whole file, verified. A hash over all tails in the order of the
//! inodes, and a hash over the same bytes of the verified files in the same order, show that both reads returned the
//! same bytes.

use std::io;
use std::ops::Range;

use sha2::{Digest as _, Sha256};
use zerocopy::FromZeros as _;
use zerocopy::little_endian::{I64, U16, U32, U64};

use super::blocks::Extent;
use super::directory::{Dirent, put_directory};
use super::inode::{Record, icount};
use super::output::{Checksum, Output};
use super::plan::{DEVICE_TABLE, PlainPlan, prefixes_start};
use super::survey::{Item, PlainData};
use super::{Contents, ErofsWriteError, Piece};
use crate::erofs::layout::{
    LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, NULL_BLOCK, RawDeviceSlot,
    RawSuperblock, SLOT_SIZE, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, compat, incompat,
};

/// Writes the image, and returns its length in bytes.
pub(super) fn write(
    plan: &PlainPlan<'_>,
    header: &[u8],
    uuid: [u8; 16],
    contents: &mut Contents<'_>,
    out: impl io::Write,
) -> Result<u64, ErofsWriteError> {
    let survey = &plan.survey;
    let mut stream = Stream {
        plan,
        out: Output::new(out, survey.rules.checksum, survey.rules.block_size),
        contents,
        ends: Sha256::new(),
        ends_again: Sha256::new(),
    };
    stream.out.buffer.extend_from_slice(header);
    stream.out.pad_to(SUPERBLOCK_OFFSET as u64);
    stream.out.put(&superblock(plan, uuid));
    for slot in &plan.device_table {
        stream.out.put(slot);
    }
    stream.out.buffer.extend_from_slice(&survey.prefixes.bytes);
    stream.inodes()?;
    stream.out.pad_to(plan.inodes_end);
    for put in survey.xattrs.shared_entries() {
        put(&mut stream.out.buffer);
        stream.out.flush_if_full()?;
    }
    for put in survey.files.shared_entries(survey.prefixes.fingerprint.unwrap_or_default()) {
        put(&mut stream.out.buffer);
        stream.out.flush_if_full()?;
    }
    stream.out.pad_to(plan.data_start);
    stream.blocks()?;
    let Stream { out, ends, ends_again, .. } = stream;
    if ends.finalize() != ends_again.finalize() {
        return Err(ErofsWriteError::ContentChanged);
    }
    let bytes = out.finish()?;
    let planned = u64::from(plan.blocks) * survey.rules.block_size.bytes();
    assert_eq!(bytes, planned, "the plan has the length of the image");
    Ok(bytes)
}

fn superblock(plan: &PlainPlan<'_>, uuid: [u8; 16]) -> RawSuperblock {
    let survey = &plan.survey;
    let when = |condition, bits| if condition { bits } else { 0 };
    let fingerprint = survey.prefixes.fingerprint;
    let devices = survey.devices.len();
    let xattr_block = plan.inodes_end / survey.rules.block_size.bytes();
    let has_files_on_devices = !survey.files.on_devices.is_empty();
    let has_xattrs = survey.xattrs.has_any() || fingerprint.is_some();
    let has_prefixes = survey.prefixes.count > 0;
    let number = |number: u64| u32::try_from(number).expect("it is before the inodes");
    RawSuperblock {
        magic: U32::new(SUPERBLOCK_MAGIC),
        feature_compat: U32::new(
            compat::MTIME
                | when(survey.rules.checksum == Checksum::Crc32c, compat::SB_CHKSUM)
                | when(has_xattrs, compat::XATTR_FILTER)
                | when(fingerprint.is_some(), compat::ISHARE_XATTRS),
        ),
        feature_incompat: U32::new(
            when(has_files_on_devices, incompat::CHUNKED_FILE)
                | when(devices > 0, incompat::DEVICE_TABLE)
                | when(has_prefixes, incompat::XATTR_PREFIXES)
                | when(survey.devices.is_wide(), incompat::ADDRESS_48BIT),
        ),
        blkszbits: survey.rules.block_size.bits(),
        extra_devices: U16::new(devices),
        devt_slotoff: U16::new(if devices > 0 { DEVICE_SLOT } else { 0 }),
        xattr_prefix_count: survey.prefixes.count,
        xattr_prefix_start: U32::new(if has_prefixes {
            number(prefixes_start(survey) / 4)
        } else {
            0
        }),
        ishare_xattr_prefix_id: fingerprint.unwrap_or_default(),
        rootnid_2b: U16::new(plan.root_nid()),
        inos: U64::new(survey.items.len() as u64),
        epoch: I64::new(survey.epoch.seconds),
        fixed_nsec: U32::new(survey.epoch.nanoseconds),
        blocks_lo: U32::new(plan.blocks),
        xattr_blkaddr: U32::new(
            u32::try_from(xattr_block).expect("it is before the last block, which has 32 bits"),
        ),
        uuid,
        ..RawSuperblock::new_zeroed()
    }
}

/// The position of [`DEVICE_TABLE`] in slots.
const DEVICE_SLOT: u16 = {
    const SLOT: u64 = size_of::<RawDeviceSlot>() as u64;
    assert!(DEVICE_TABLE.is_multiple_of(SLOT) && DEVICE_TABLE / SLOT == 9);
    9
};

struct Stream<'s, 'c, W> {
    plan: &'s PlainPlan<'s>,
    out: Output<W>,
    contents: &'s mut Contents<'c>,
    /// Hash of the tails of files that also have blocks, as they were written.
    ends: Sha256,
    /// Hash of the same tails, as they were when the whole files were read.
    ends_again: Sha256,
}

impl<W: io::Write> Stream<'_, '_, W> {
    fn inodes(&mut self) -> Result<(), ErofsWriteError> {
        let (plan, survey) = (self.plan, &self.plan.survey);
        let block_size = survey.rules.block_size.bytes();
        let first_id = u32::try_from(plan.inodes_end % block_size / 4).expect("less than a block");
        let mut xattrs = Vec::new();
        for (ino, item) in (survey.rules.first_ino..).zip(&survey.items) {
            self.out.pad_to(u64::from(plan.nid(item.source)) * SLOT_SIZE);
            let facts = survey.facts(item.source);
            xattrs.clear();
            survey.put_xattrs(item, first_id, &mut xattrs);
            let chunks = survey.table(&facts.data);
            let flat = if item.tail > 0 { LAYOUT_FLAT_INLINE } else { LAYOUT_FLAT_PLAIN };
            let (layout, i_u) = match (facts.data, chunks) {
                (PlainData::Holes { bits, .. }, _) => {
                    // If the table takes a block, the high half of the block number is stored in this field, as in C,
                    // although readers cannot use it.
                    let bits = bits - u32::from(survey.rules.block_size.bits());
                    (LAYOUT_CHUNK_BASED, item.block & 0xffff_0000 | bits)
                }
                (PlainData::Device(number), _) => (flat, number),
                (_, Some((_, table))) => (LAYOUT_CHUNK_BASED, table.format()),
                (_, None) => (flat, item.block),
            };
            let extent = Extent { blocks: item.blocks.into(), tail: item.tail.into() };
            let record = Record {
                layout,
                icount: icount(xattrs.len()),
                mode: facts.mode,
                nlink: facts.nlink,
                size: facts.data.size(extent, block_size),
                i_u,
                ino,
                metadata: facts.metadata,
            };
            record.put(item.form, &mut self.out);
            self.out.buffer.extend_from_slice(&xattrs);
            if let Some((file, table)) = chunks {
                self.out.pad_to(self.out.position().next_multiple_of(8));
                for at in 0..table.entries {
                    self.out.put(&table.entry(file, at));
                    self.out.flush_if_full()?;
                }
            }
            if item.tail > 0 {
                self.tail(item, &facts.data)?;
            }
            self.out.flush_if_full()?;
        }
        Ok(())
    }

    /// Writes the tail after an inode.
    fn tail(&mut self, item: &Item, data: &PlainData<'_>) -> Result<(), ErofsWriteError> {
        let tail = usize::from(item.tail);
        match *data {
            PlainData::Directory => self.directory(item, item.blocks..item.blocks + 1)?,
            PlainData::Symlink(bytes) | PlainData::Inline(bytes) => {
                self.out.buffer.extend_from_slice(&bytes[bytes.len() - tail..]);
            }
            PlainData::Holes { .. } => self.holes(item.tail.into()),
            PlainData::External { size, .. } => {
                let start = size - u64::from(item.tail);
                let piece = if start == 0 { Piece::Whole } else { Piece::From(start) };
                let end = self.end(item, piece, size, tail)?;
                if matches!(piece, Piece::From(_)) {
                    self.ends.update(&end);
                }
                self.out.buffer.extend_from_slice(&end);
            }
            PlainData::Device(_) | PlainData::Nothing => {}
        }
        Ok(())
    }

    /// Writes a chunk table whose chunks are all holes.
    fn holes(&mut self, bytes: u64) {
        for _ in 0..bytes / size_of::<U32>() as u64 {
            self.out.put(&U32::new(NULL_BLOCK));
        }
    }

    /// Reads the `wanted` bytes of a piece, which is the end of a file or the whole file.
    fn end(
        &mut self,
        item: &Item,
        piece: Piece,
        size: u64,
        wanted: usize,
    ) -> Result<Vec<u8>, ErofsWriteError> {
        let inode = self.plan.survey.inode(item);
        let mut end = End { bytes: Vec::new(), wanted };
        (self.contents)(inode, piece, &mut end)
            .map_err(|source| ErofsWriteError::Content { path: inode.path(), source })?;
        if end.bytes.len() == wanted {
            Ok(end.bytes)
        } else {
            Err(ErofsWriteError::ContentSize { path: inode.path(), size })
        }
    }

    /// Writes the `wanted` blocks of a directory.
    fn directory(&mut self, item: &Item, wanted: Range<u32>) -> Result<(), ErofsWriteError> {
        let (plan, survey) = (self.plan, &self.plan.survey);
        let entries = survey.listing(item.source).map(|entry| Dirent {
            name: entry.name,
            nid: plan.nid(entry.source),
            file_type: survey.file_type(entry.source),
        });
        put_directory(entries, item.blocks, wanted, &mut self.out)
    }

    fn blocks(&mut self) -> Result<(), ErofsWriteError> {
        let survey = &self.plan.survey;
        for pass in survey.rules.blocks.passes() {
            for item in survey.items.iter().filter(|item| item.blocks > 0) {
                let data = survey.facts(item.source).data;
                if !data.is_in(*pass) {
                    continue;
                }
                match data {
                    PlainData::Directory => self.directory(item, 0..item.blocks)?,
                    PlainData::Symlink(bytes) | PlainData::Inline(bytes) => {
                        self.out.write(&bytes[..bytes.len() - usize::from(item.tail)])?;
                    }
                    PlainData::Holes { .. } => self.holes(survey.rules.block_size.bytes()),
                    PlainData::External { size, .. } => self.external(item, size)?,
                    PlainData::Device(_) | PlainData::Nothing => {}
                }
                self.out.pad_to_block();
                self.out.flush_if_full()?;
            }
        }
        Ok(())
    }

    fn external(&mut self, item: &Item, size: u64) -> Result<(), ErofsWriteError> {
        let inode = self.plan.survey.inode(item);
        let mut body = Body {
            out: &mut self.out,
            ends: &mut self.ends_again,
            left: size - u64::from(item.tail),
            tail: item.tail.into(),
            failed: None,
        };
        let given = (self.contents)(inode, Piece::Whole, &mut body);
        let Body { left, tail, failed, .. } = body;
        match (failed, given) {
            (Some(Failed::Output(error)), _) => Err(error),
            (None, Err(source)) => Err(ErofsWriteError::Content { path: inode.path(), source }),
            (None, Ok(())) if left == 0 && tail == 0 => Ok(()),
            (Some(Failed::Size), _) | (None, Ok(())) => {
                Err(ErofsWriteError::ContentSize { path: inode.path(), size })
            }
        }
    }
}

/// A writer that collects the end of a file.
struct End {
    bytes: Vec<u8>,
    wanted: usize,
}

impl io::Write for End {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // One byte more than wanted is kept, to detect excess bytes.
        let room = (self.wanted + 1 - self.bytes.len()).min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..room]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A writer for a whole file: it writes the part for blocks to the output, and hashes the tail.
struct Body<'o, W> {
    out: &'o mut Output<W>,
    ends: &'o mut Sha256,
    /// Remaining bytes for blocks.
    left: u64,
    /// Remaining bytes of the tail.
    tail: usize,
    failed: Option<Failed>,
}

enum Failed {
    Output(ErofsWriteError),
    Size,
}

impl<W: io::Write> io::Write for Body<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stop = || io::Error::other("cannot write the image");
        if self.failed.is_some() {
            return Err(stop());
        }
        let count = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        let (body, end) = bytes.split_at(count);
        if end.len() > self.tail {
            self.failed = Some(Failed::Size);
            return Err(stop());
        }
        self.ends.update(end);
        self.tail -= end.len();
        self.left -= body.len() as u64;
        if let Err(error) = self.out.write(body) {
            self.failed = Some(Failed::Output(error));
            return Err(stop());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
