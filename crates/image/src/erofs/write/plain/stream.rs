//! The second pass, which writes the image's bytes from first to last.
//!
//! The tails of files are written with the inodes, before the blocks of files. A file with both is therefore read
//! twice: first its tail, unverified, and later the whole file, verified. A hash over all tails in the order of the
//! inodes, and a hash over the same bytes of the verified files in the same order, show that both reads returned the
//! same bytes.

use std::io;

use sha2::{Digest as _, Sha256};
use zerocopy::FromZeros as _;
use zerocopy::little_endian::{I64, U16, U32, U64};

use super::Piece;
use super::plan::{DEVICE_TABLE, Plan, prefixes_start, size_of_data};
use super::survey::{Data, Item};
use crate::erofs::layout::{
    LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, RawDeviceSlot, RawNativeHeader,
    RawSuperblock, SLOT_SIZE, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, compat, file_type, incompat,
};
use crate::erofs::write::directory::{Dirent, put_directory};
use crate::erofs::write::inode::{Record, icount};
use crate::erofs::write::listing::{Listing, Source};
use crate::erofs::write::output::{Checksum, Output};
use crate::erofs::write::{Contents, WriteError};
use crate::tree::{Inode, Node};

/// Writes the image, and returns its length in bytes.
pub(super) fn write(
    plan: &Plan<'_>,
    uuid: [u8; 16],
    header: Option<RawNativeHeader>,
    contents: &mut Contents<'_>,
    out: impl io::Write,
) -> Result<u64, WriteError> {
    let mut stream = Stream {
        plan,
        out: Output::new(out, Checksum::Crc32c, plan.survey.block_size),
        contents,
        ends: Sha256::new(),
        ends_again: Sha256::new(),
    };
    if let Some(header) = header {
        stream.out.put(&header);
    }
    stream.out.pad_to(SUPERBLOCK_OFFSET as u64);
    stream.out.put(&superblock(plan, uuid));
    for slot in &plan.device_table {
        stream.out.put(slot);
    }
    stream.out.buffer.extend_from_slice(&plan.survey.prefixes.bytes);
    stream.inodes()?;
    stream.out.pad_to(plan.inodes_end);
    for put in plan.survey.xattrs.shared_entries() {
        put(&mut stream.out.buffer);
        stream.out.flush_if_full()?;
    }
    let prefix = plan.survey.prefixes.fingerprint.unwrap_or_default();
    for put in plan.survey.files.shared_entries(prefix) {
        put(&mut stream.out.buffer);
        stream.out.flush_if_full()?;
    }
    stream.out.pad_to(plan.data_start);
    stream.blocks_of_names()?;
    stream.blocks_of_files()?;
    let Stream { out, ends, ends_again, .. } = stream;
    if ends.finalize() != ends_again.finalize() {
        return Err(WriteError::ContentChanged);
    }
    let bytes = out.finish()?;
    let planned = u64::from(plan.blocks) * plan.survey.block_size.bytes();
    assert_eq!(bytes, planned, "the plan has the length of the image");
    Ok(bytes)
}

fn superblock(plan: &Plan<'_>, uuid: [u8; 16]) -> RawSuperblock {
    let survey = &plan.survey;
    let when = |condition, bits| if condition { bits } else { 0 };
    let fingerprint = survey.prefixes.fingerprint;
    let devices = survey.devices.len();
    let xattr_block = plan.inodes_end / survey.block_size.bytes();
    let has_files_on_devices = !survey.files.on_devices.is_empty();
    let has_prefixes = survey.prefixes.count > 0;
    let number = |number: u64| u32::try_from(number).expect("it is before the inodes");
    RawSuperblock {
        magic: U32::new(SUPERBLOCK_MAGIC),
        feature_compat: U32::new(
            compat::SB_CHKSUM
                | compat::MTIME
                | when(survey.has_xattrs || fingerprint.is_some(), compat::XATTR_FILTER)
                | when(fingerprint.is_some(), compat::ISHARE_XATTRS),
        ),
        feature_incompat: U32::new(
            when(has_files_on_devices, incompat::CHUNKED_FILE)
                | when(devices > 0, incompat::DEVICE_TABLE)
                | when(has_prefixes, incompat::XATTR_PREFIXES)
                | when(survey.devices.is_wide(), incompat::ADDRESS_48BIT),
        ),
        blkszbits: survey.block_size.bits(),
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
        inos: U64::new(plan.survey.items.len() as u64),
        epoch: I64::new(plan.survey.epoch.seconds),
        fixed_nsec: U32::new(plan.survey.epoch.nanoseconds),
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
    plan: &'s Plan<'s>,
    out: Output<W>,
    contents: &'s mut Contents<'c>,
    /// Hash of the tails of files that also have blocks, as they were written.
    ends: Sha256,
    /// Hash of the same tails, as they were when the whole files were read.
    ends_again: Sha256,
}

impl<W: io::Write> Stream<'_, '_, W> {
    fn inodes(&mut self) -> Result<(), WriteError> {
        let survey = &self.plan.survey;
        let in_block = self.plan.inodes_end % survey.block_size.bytes();
        let first_id = u32::try_from(in_block / 4).expect("less than a block");
        let first_fingerprint = (in_block + survey.xattrs.shared_bytes()) / 4;
        let first_fingerprint =
            u32::try_from(first_fingerprint).expect("the table has less than 4 GiB");
        let mut xattrs = Vec::new();
        for (ino, item) in (1_u32..).zip(&survey.items) {
            let inode = survey.tree.inode(item.id);
            let data = Data::of(&inode);
            self.out.pad_to(u64::from(self.plan.nid(item.id)) * SLOT_SIZE);
            xattrs.clear();
            survey.xattrs.put(survey.set_of(&inode), None, first_id, &mut xattrs);
            survey.files.put(item.id, first_fingerprint, &mut xattrs);
            let chunks = survey.table(&data);
            let record = Record {
                layout: match chunks {
                    Some(_) => LAYOUT_CHUNK_BASED,
                    None if item.tail > 0 => LAYOUT_FLAT_INLINE,
                    None => LAYOUT_FLAT_PLAIN,
                },
                icount: icount(xattrs.len()),
                mode: inode.mode(),
                nlink: inode.nlink(),
                size: size_of_data(survey, &inode, &data, item.tail),
                i_u: match data {
                    Data::Device(number) => u32::try_from(number).expect(
                        "other values are \
                        refused",
                    ),
                    _ => chunks.map_or(item.block, |(_, table)| table.format()),
                },
                ino,
                metadata: inode.metadata(),
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
                self.tail(item, &inode, &data)?;
            }
            self.out.flush_if_full()?;
        }
        Ok(())
    }

    /// Writes the tail after an inode.
    fn tail(&mut self, item: &Item, inode: &Inode<'_>, data: &Data<'_>) -> Result<(), WriteError> {
        match *data {
            Data::Directory => self.directory(item, inode, Blocks::Tail),
            Data::Symlink(bytes) | Data::Inline(bytes) => {
                let tail = &bytes[bytes.len() - usize::from(item.tail)..];
                self.out.buffer.extend_from_slice(tail);
                Ok(())
            }
            Data::External { size, .. } => {
                let start = size - u64::from(item.tail);
                let piece = if start == 0 { Piece::Whole } else { Piece::From(start) };
                let end = self.end(inode, piece, size, item.tail.into())?;
                if matches!(piece, Piece::From(_)) {
                    self.ends.update(&end);
                }
                self.out.buffer.extend_from_slice(&end);
                Ok(())
            }
            Data::Device(_) | Data::Nothing => Ok(()),
        }
    }

    /// Reads the `wanted` bytes of a piece, which is the end of a file or the whole file.
    fn end(
        &mut self,
        inode: &Inode<'_>,
        piece: Piece,
        size: u64,
        wanted: usize,
    ) -> Result<Vec<u8>, WriteError> {
        let mut end = End { bytes: Vec::new(), wanted };
        (self.contents)(*inode, piece, &mut end)
            .map_err(|source| WriteError::Content { path: inode.path(), source })?;
        if end.bytes.len() == wanted {
            Ok(end.bytes)
        } else {
            Err(WriteError::ContentSize { path: inode.path(), size })
        }
    }

    fn directory(
        &mut self,
        item: &Item,
        inode: &Inode<'_>,
        which: Blocks,
    ) -> Result<(), WriteError> {
        let plan = self.plan;
        let size = size_of_data(&plan.survey, inode, &Data::Directory, item.tail);
        let blocks = (size - u64::from(item.tail)) / plan.survey.block_size.bytes();
        let blocks = u32::try_from(blocks).expect("they have numbers of 32 bits");
        let wanted = match which {
            Blocks::Tail => blocks..blocks + 1,
            Blocks::Whole => 0..blocks,
        };
        let entries = Listing::plain(inode).map(|entry| {
            let Source::Tree(id) = entry.source else {
                unreachable!("a plain listing has no shadows")
            };
            let file_type = file_type_of(&plan.survey.tree.inode(id));
            Dirent { name: entry.name, nid: plan.nid(id), file_type }
        });
        put_directory(entries, blocks, wanted, &mut self.out)
    }

    fn blocks_of_names(&mut self) -> Result<(), WriteError> {
        let survey = &self.plan.survey;
        for item in survey.items.iter().filter(|item| item.owns_blocks) {
            let inode = survey.tree.inode(item.id);
            match Data::of(&inode) {
                Data::Directory => self.directory(item, &inode, Blocks::Whole)?,
                Data::Symlink(target) => {
                    self.out.buffer.extend_from_slice(target);
                    self.out.pad_to_block();
                }
                _ => {}
            }
            self.out.flush_if_full()?;
        }
        Ok(())
    }

    fn blocks_of_files(&mut self) -> Result<(), WriteError> {
        let survey = &self.plan.survey;
        for item in survey.items.iter().filter(|item| item.owns_blocks) {
            let inode = survey.tree.inode(item.id);
            match Data::of(&inode) {
                Data::Inline(bytes) => {
                    self.out.write(&bytes[..bytes.len() - usize::from(item.tail)])?;
                }
                Data::External { size, .. } => self.external(item, &inode, size)?,
                _ => continue,
            }
            self.out.pad_to_block();
            self.out.flush_if_full()?;
        }
        Ok(())
    }

    fn external(&mut self, item: &Item, inode: &Inode<'_>, size: u64) -> Result<(), WriteError> {
        let mut body = Body {
            out: &mut self.out,
            ends: &mut self.ends_again,
            left: size - u64::from(item.tail),
            tail: item.tail.into(),
            failed: None,
        };
        let given = (self.contents)(*inode, Piece::Whole, &mut body);
        let Body { left, tail, failed, .. } = body;
        match (failed, given) {
            (Some(Failed::Output(error)), _) => Err(error),
            (None, Err(source)) => Err(WriteError::Content { path: inode.path(), source }),
            (None, Ok(())) if left == 0 && tail == 0 => Ok(()),
            (Some(Failed::Size), _) | (None, Ok(())) => {
                Err(WriteError::ContentSize { path: inode.path(), size })
            }
        }
    }
}

/// A selection of a directory's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    Tail,
    Whole,
}

/// A writer that collects the end of a file.
struct End {
    bytes: Vec<u8>,
    wanted: usize,
}

impl io::Write for End {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Keep one byte more than wanted, to detect excess bytes.
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
    Output(WriteError),
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

/// Returns the file type in dirents.
fn file_type_of(inode: &Inode<'_>) -> u8 {
    match Data::of(inode) {
        Data::Inline(_) | Data::External { .. } => file_type::REGULAR,
        Data::Directory => file_type::DIRECTORY,
        Data::Symlink(_) => file_type::SYMLINK,
        Data::Device(_) | Data::Nothing => match inode.node() {
            Node::CharDevice(_) => file_type::CHAR_DEVICE,
            Node::BlockDevice(_) => file_type::BLOCK_DEVICE,
            Node::Fifo => file_type::FIFO,
            _ => file_type::SOCKET,
        },
    }
}
