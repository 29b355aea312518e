//! Unpacks physical clusters.

use std::io::Read as _;

use lzma_rust2::LzmaReader;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation as _, OutBuffer};

use super::super::superblock::BlockBits;
use super::super::to_usize;
use super::settings::{Algorithm, Settings};
use super::{ByteOffset, Method, PackedExtent, PhysicalCluster, lz4};
use crate::gzip::{OutputPart, inflate};

/// Binary logarithm of the largest window of zstd data. Source: `Z_EROFS_ZSTD_MAX_DICT_SIZE` in Linux
/// `fs/erofs/erofs_fs.h`.
const ZSTD_WINDOW_BITS: u32 = 20;

/// Most bits that select the probabilities of LZMA's literals: literal context and position bits. Source: Linux
/// `lib/xz/xz_dec_lzma2.c`, `lzma_props`.
const LZMA_LITERAL_BITS_MAX: u8 = 4;

/// Unpacks the bytes of an extent into `bytes`. Returns `None` if they are damaged, or too few.
pub(super) fn unpack(
    extent: &PackedExtent,
    cluster: &PhysicalCluster,
    packed: &[u8],
    block: BlockBits,
    settings: Settings,
    bytes: &mut Vec<u8>,
) -> Option<()> {
    let len = to_usize(extent.len);
    let output = if cluster.is_partial { OutputPart::Start } else { OutputPart::Whole };
    bytes.clear();
    match cluster.method {
        Method::Shifted => bytes.extend_from_slice(packed.get(..len)?),
        Method::Interlaced => {
            let within = block.within(ByteOffset(extent.start));
            let first = to_usize(block.size().saturating_sub(within));
            let end = packed.get(packed.len().checked_sub(first)?..)?;
            let end = end.get(..len.min(first))?;
            bytes.extend_from_slice(end);
            bytes.extend_from_slice(packed.get(..len.saturating_sub(end.len()))?);
        }
        Method::Packed(Algorithm::Lz4) if !settings.has_padding_first => {
            // Before Linux 5.4, padding followed the data, so the end of the data is not known.
            bytes.resize(len, 0);
            lz4::unpack(packed, bytes, OutputPart::Start)?;
        }
        Method::Packed(Algorithm::Lz4) => {
            bytes.resize(len, 0);
            lz4::unpack(without_padding(cluster, packed, block)?, bytes, output)?;
        }
        Method::Packed(Algorithm::MicroLzma) => {
            bytes.resize(len, 0);
            lzma(without_padding(cluster, packed, block)?, bytes, output)?;
        }
        Method::Packed(Algorithm::Deflate) => {
            // The inflater makes a buffer, so free the old one first.
            *bytes = Vec::new();
            *bytes = inflate(without_padding(cluster, packed, block)?, len, output)?;
        }
        Method::Packed(Algorithm::Zstd) => {
            bytes.resize(len, 0);
            zstd(without_padding(cluster, packed, block)?, bytes, output)?;
        }
    }
    Some(())
}

/// Returns the data after the zeros with which a physical cluster begins, which end in its first block. Source:
/// `z_erofs_fixup_insize` in Linux `fs/erofs/decompressor.c`.
fn without_padding<'a>(
    cluster: &PhysicalCluster,
    packed: &'a [u8],
    block: BlockBits,
) -> Option<&'a [u8]> {
    let most = to_usize(block.size().saturating_sub(block.within(cluster.at)));
    let zeros = packed.iter().take(most).position(|byte| *byte != 0)?;
    packed.get(zeros..)
}

fn lzma(packed: &[u8], bytes: &mut [u8], output: OutputPart) -> Option<()> {
    let (properties, rest) = packed.split_first()?;
    let properties = !properties;
    let literal = properties % 45;
    if (literal % 9).saturating_add(literal / 9) > LZMA_LITERAL_BITS_MAX {
        return None;
    }
    let len = u32::try_from(bytes.len()).ok()?;
    let stream = [0_u8].as_slice().chain(rest);
    let size = match output {
        OutputPart::Whole => len.into(),
        // The reader refuses data that it knows to be longer than this.
        OutputPart::Start => u64::MAX,
    };
    let reader = LzmaReader::new_with_props(stream, size, properties, len, None);
    reader.ok()?.read_exact(bytes).ok()
}

fn zstd(packed: &[u8], bytes: &mut [u8], output: OutputPart) -> Option<()> {
    let mut decoder = Decoder::new().ok()?;
    decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_BITS)).ok()?;
    let len = bytes.len();
    let (mut from, mut to) = (InBuffer::around(packed), OutBuffer::around(bytes));
    loop {
        let before = (from.pos(), to.pos());
        let has_ended = decoder.run(&mut from, &mut to).ok()? == 0;
        match to.pos() == len {
            true if has_ended || output == OutputPart::Start => return Some(()),
            false if has_ended => return None,
            _ if (from.pos(), to.pos()) == before => return None,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
