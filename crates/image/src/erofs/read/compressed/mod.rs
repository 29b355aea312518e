//! Reads compressed files.
//!
//! A compressed file is a sequence of *extents*. The bytes of an extent are what a *physical cluster*, some bytes of
//! the image, unpacks to, or a part of that. An index after the inode lists the extents in one of three forms: as an
//! entry for each *logical cluster* of the file, in 8 bytes or in packs of 2 or 4 bytes ([`clusters`]), or as a record
//! for each extent ([`records`]). Sources: Linux `Documentation/filesystems/erofs.rst`, and the structures of
//! `fs/erofs/erofs_fs.h`.
//!
//! # Bounds
//! An extent has at most [`UNPACKED_MAX`] bytes and its physical cluster [`PHYSICAL_CLUSTER_MAX`]; a [`FileReader`]
//! holds one of each. Extents that are read in order must not overlap, so each byte of a file is unpacked once.
//! [`PackedWork`] limits the bytes of physical clusters that are read, because small extents may have large ones.

mod clusters;
mod lz4;
mod records;
mod settings;
mod unpack;

use std::sync::atomic::{AtomicU64, Ordering};

pub use settings::Algorithm;

use super::error::{ErofsCorruption, Part, ReadError, Unsupported};
use super::inode::{DataLayout, FileType, Inode, Nid};
use super::source::ReadAt;
use super::{ByteOffset, Device, Image, to_u64, to_usize};
use crate::erofs::layout::{
    MAP_WHOLE_FRAGMENT, PHYSICAL_CLUSTER_MAX, RawMapHeader, UNPACKED_MAX, advise,
};

use clusters::Clusters;
use records::Records;
use settings::Settings;

/// A run of a compressed file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PackedExtent {
    /// Offset of the run in the file.
    start: u64,
    /// Length of the run in bytes, at least 1.
    len: u64,
    /// Location of the bytes; `None` for a hole.
    cluster: Option<PhysicalCluster>,
}

/// The bytes of an image from which an extent is unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PhysicalCluster {
    at: ByteOffset,
    /// Length in bytes, at least 1.
    len: u64,
    method: Method,
    /// Whether the extent is only a part of what the cluster unpacks to: its beginning.
    is_partial: bool,
}

/// The way in which the bytes of an extent are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    /// Uncompressed, from the beginning of the cluster on.
    Shifted,
    /// Uncompressed. The bytes up to the first end of a block of the file are at the end of the cluster, the others
    /// at its beginning.
    Interlaced,
    /// Compressed.
    Packed(Algorithm),
}

impl PackedExtent {
    const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    const fn has(&self, offset: u64) -> bool {
        self.start <= offset && offset < self.end()
    }

    /// Checks the lengths of an extent. Source: `z_erofs_map_sanity_check` in Linux `fs/erofs/zmap.c`.
    fn check(self, nid: Nid) -> Result<Self, ErofsCorruption> {
        let Some(PhysicalCluster { len: packed, method, .. }) = self.cluster else {
            return Ok(self);
        };
        let Self { start, len, .. } = self;
        let is_plain = matches!(method, Method::Shifted | Method::Interlaced);
        let has_wrong_size = packed == 0 || packed > PHYSICAL_CLUSTER_MAX || len > UNPACKED_MAX;
        if has_wrong_size || is_plain && len > packed {
            let start = ByteOffset(start);
            return Err(ErofsCorruption::ExtentLength { nid, start, len, packed });
        }
        Ok(self)
    }
}

/// The index of a compressed file.
#[derive(Debug)]
enum FileIndex {
    Clusters(Clusters),
    Records(Records),
}

/// The values that both forms of an index need.
#[derive(Debug, Clone, Copy)]
struct Head {
    nid: Nid,
    /// Size of the file in bytes.
    size: u64,
    raw: RawMapHeader,
    /// End of the header.
    end: u64,
    settings: Settings,
}

impl FileIndex {
    fn read<S: ReadAt>(image: &Image<S>, inode: &Inode, is_full: bool) -> Result<Self, ReadError> {
        let nid = inode.nid();
        let at = inode.tail.0.checked_next_multiple_of(to_u64(size_of::<RawMapHeader>()));
        let at = at.unwrap_or(u64::MAX);
        let raw: RawMapHeader = image.fetch_raw(ByteOffset(at), Part::ClusterIndex(nid))?;
        let bits = raw.h_advise.get();
        if raw.h_clusterbits & MAP_WHOLE_FRAGMENT != 0 || bits & advise::FRAGMENT_PCLUSTER != 0 {
            return Err(Unsupported::Fragments(nid).into());
        }
        let known = advise::COMPACTED_2B
            | advise::BIG_PCLUSTER_1
            | advise::BIG_PCLUSTER_2
            | advise::INLINE_PCLUSTER
            | advise::INTERLACED_PCLUSTER;
        if bits & !known != 0 {
            return Err(Unsupported::MapFormat(nid, bits).into());
        }
        let settings = image.settings()?;
        let end = at.saturating_add(to_u64(size_of::<RawMapHeader>()));
        let head = Head { nid, size: inode.size(), raw, end, settings };
        Ok(match is_full && bits & advise::EXTENTS != 0 {
            true => Self::Records(Records::new(image, head)?),
            false => Self::Clusters(Clusters::new(image, head, is_full)?),
        })
    }

    fn extent<S: ReadAt>(
        &mut self,
        image: &Image<S>,
        offset: u64,
    ) -> Result<PackedExtent, ReadError> {
        match self {
            Self::Clusters(clusters) => clusters.extent(image, offset),
            Self::Records(records) => records.extent(image, offset),
        }
    }
}

/// Reads a file, which is fast from front to back: it keeps the last compressed extent that was unpacked.
#[derive(Debug)]
pub struct FileReader<'i, S> {
    image: &'i Image<S>,
    inode: Inode,
    index: Option<FileIndex>,
    /// The extent that `bytes` holds, unless it is a hole.
    extent: Option<PackedExtent>,
    bytes: Vec<u8>,
    /// The extent's physical cluster, kept for its memory.
    packed: Vec<u8>,
}

impl<S: ReadAt> Image<S> {
    /// Returns a reader of a file.
    #[must_use]
    pub const fn reader(&self, inode: &Inode) -> FileReader<'_, S> {
        FileReader {
            image: self,
            inode: *inode,
            index: None,
            extent: None,
            bytes: Vec::new(),
            packed: Vec::new(),
        }
    }
}

impl<S: ReadAt> FileReader<'_, S> {
    /// Reads the file's bytes at `offset` into `buffer`, like [`Image::read`].
    ///
    /// # Errors
    /// As [`Image::read`].
    pub fn read(
        &mut self,
        offset: ByteOffset,
        buffer: &mut [u8],
        devices: &[&dyn ReadAt],
    ) -> Result<usize, ReadError> {
        let DataLayout::Compressed { is_full } = self.inode.layout else {
            return self.image.read(&self.inode, offset, buffer, devices);
        };
        let size = match self.inode.file_type() {
            FileType::Regular | FileType::Directory | FileType::Symlink => self.inode.size(),
            _ => 0,
        };
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = offset.0.saturating_add(to_u64(done));
            if at >= size {
                break;
            }
            let extent = self.load(at, is_full)?;
            let len = rest.len().min(to_usize(extent.end().saturating_sub(at)));
            let rest = rest.get_mut(..len).unwrap_or_default();
            self.copy(extent, at, rest);
            done = done.saturating_add(len);
        }
        Ok(done)
    }

    /// Copies bytes of the extent that was loaded.
    fn copy(&self, extent: PackedExtent, at: u64, buffer: &mut [u8]) {
        if extent.cluster.is_none() {
            return buffer.fill(0);
        }
        let from = to_usize(at.saturating_sub(extent.start));
        let bytes = self.bytes.get(from..).and_then(|bytes| bytes.get(..buffer.len()));
        buffer.copy_from_slice(bytes.expect("`bytes` holds the extent"));
    }

    /// Unpacks the extent that contains a byte of the file, unless it is the last one that was unpacked.
    fn load(&mut self, offset: u64, is_full: bool) -> Result<PackedExtent, ReadError> {
        if let Some(extent) = self.extent.filter(|extent| extent.has(offset)) {
            return Ok(extent);
        }
        let nid = self.inode.nid();
        let index = match &mut self.index {
            Some(index) => index,
            None => self.index.insert(FileIndex::read(self.image, &self.inode, is_full)?),
        };
        let extent = index.extent(self.image, offset)?;
        let overlaps =
            self.extent.take().is_some_and(|last| last.end() == offset && extent.start != offset);
        if !extent.has(offset) || overlaps {
            let (start, len) = (ByteOffset(extent.start), extent.len);
            let offset = ByteOffset(offset);
            return Err(ErofsCorruption::ExtentOverlap { nid, start, len, offset }.into());
        }
        if let Some(cluster) = extent.cluster {
            self.unpack(extent, cluster)?;
        }
        self.extent = Some(extent);
        Ok(extent)
    }

    fn unpack(&mut self, extent: PackedExtent, cluster: PhysicalCluster) -> Result<(), ReadError> {
        let nid = self.inode.nid();
        let image = self.image;
        image.work.spend(cluster.len, extent.len)?;
        self.packed.resize(to_usize(cluster.len), 0);
        image.fetch(cluster.at, &mut self.packed, Part::Data(nid))?;
        let block = image.superblock.block_bits;
        let settings = image.settings()?;
        match unpack::unpack(&extent, &cluster, &self.packed, block, settings, &mut self.bytes) {
            Some(()) if to_u64(self.bytes.len()) == extent.len => Ok(()),
            _ => {
                let PhysicalCluster { at, len: packed, method, .. } = cluster;
                let (start, len) = (ByteOffset(extent.start), extent.len);
                let method = method.name();
                Err(ErofsCorruption::Unpacked { nid, start, len, at, packed, method }.into())
            }
        }
    }
}

impl Method {
    const fn name(self) -> &'static str {
        match self {
            Self::Shifted | Self::Interlaced => "uncompressed",
            Self::Packed(algorithm) => algorithm.name(),
        }
    }
}

/// The bytes that were unpacked from an image, and the bytes of physical clusters from which they were unpacked.
#[derive(Debug, Default)]
pub(super) struct PackedWork {
    packed: AtomicU64,
    unpacked: AtomicU64,
}

/// Bytes of physical clusters that may be read in addition to those that [`PackedWork::spend`] counts.
const PACKED_FREE: u64 = 64 << 20;

impl PackedWork {
    /// Counts an extent. Writers of images compress only where this saves space, but a hostile image may have a
    /// physical cluster of 1 MiB for each 512 bytes. So it may use 16 bytes for each byte that is unpacked.
    fn spend(&self, packed: u64, unpacked: u64) -> Result<(), ErofsCorruption> {
        let packed = self.packed.fetch_add(packed, Ordering::Relaxed).saturating_add(packed);
        let unpacked =
            self.unpacked.fetch_add(unpacked, Ordering::Relaxed).saturating_add(unpacked);
        if packed > unpacked.saturating_mul(16).saturating_add(PACKED_FREE) {
            return Err(ErofsCorruption::PackedWork { packed, unpacked });
        }
        Ok(())
    }
}

/// Returns the location of a physical cluster that begins with a block of the image.
fn block_start<S>(image: &Image<S>, block: u64) -> ByteOffset {
    image.superblock.block_bits.start(block).unwrap_or(ByteOffset(u64::MAX))
}

/// Reads a part of an index.
fn fetch_index<S: ReadAt>(
    image: &Image<S>,
    nid: Nid,
    at: u64,
    buffer: &mut [u8],
) -> Result<(), ReadError> {
    super::fetch(&image.source, Device::IMAGE, ByteOffset(at), buffer, Part::ClusterIndex(nid))
}
