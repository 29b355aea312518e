//! Writes directories.

use std::io;
use std::ops::Range;

use zerocopy::little_endian::{U16, U64};

use super::ErofsWriteError;
use super::blocks::DirectoryExtent;
use super::output::Output;
use crate::erofs::layout::RawDirent;

/// An entry of a directory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dirent<'a> {
    pub(super) name: &'a [u8],
    pub(super) nid: u32,
    /// A value of [`file_type`](crate::erofs::layout::file_type).
    pub(super) file_type: u8,
}

/// Writes the `wanted` blocks of a directory. The block with the index `blocks` is its tail.
pub(super) fn put_directory<'a>(
    entries: impl Iterator<Item = Dirent<'a>>,
    blocks: u32,
    wanted: Range<u32>,
    out: &mut Output<impl io::Write>,
) -> Result<(), ErofsWriteError> {
    let mut extent = DirectoryExtent::new(out.block_size);
    let mut block = 0;
    let mut gathered = Vec::new();
    for entry in entries {
        if extent.push(entry.name) {
            if wanted.contains(&block) {
                put_dirents(&gathered, block < blocks, out)?;
            }
            block += 1;
            gathered.clear();
        }
        gathered.push(entry);
    }
    if wanted.contains(&block) {
        put_dirents(&gathered, block < blocks, out)?;
    }
    Ok(())
}

fn put_dirents(
    entries: &[Dirent<'_>],
    is_block: bool,
    out: &mut Output<impl io::Write>,
) -> Result<(), ErofsWriteError> {
    let mut name = entries.len() * size_of::<RawDirent>();
    for entry in entries {
        out.put(&RawDirent {
            nid: U64::new(entry.nid.into()),
            nameoff: U16::new(u16::try_from(name).expect("names are in the block")),
            file_type: entry.file_type,
            reserved: 0,
        });
        name += entry.name.len();
    }
    for entry in entries {
        out.buffer.extend_from_slice(entry.name);
    }
    if is_block {
        out.pad_to_block();
    }
    out.flush_if_full()
}
