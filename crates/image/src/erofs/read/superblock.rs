//! Reads and checks the superblock, the header before it and the device table.

use crc::{CRC_32_ISCSI, Crc};
use zerocopy::IntoBytes as _;

use super::error::{ErofsCorruption, Part, ReadError, Unsupported};
use super::source::ReadAt;
use super::{ByteOffset, Device, Nid, fetch, fetch_raw, to_u64, to_usize};
use crate::erofs::layout::{
    COMPOSEFS_HAS_ACL, COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC, NATIVE_HAS_ACL, NATIVE_HAS_TAR,
    NATIVE_HEADER_VERSION, NATIVE_MAGIC, RawComposefsHeader, RawDeviceSlot, RawNativeHeader,
    RawSuperblock, SLOT_SIZE, SUPERBLOCK_EXTSLOT_SIZE, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, compat,
    incompat,
};

/// All known features. The reader supports each of them, or refuses it by name.
const KNOWN: u32 = incompat::ZERO_PADDING
    | incompat::COMPR_CFGS
    | incompat::CHUNKED_FILE
    | incompat::DEVICE_TABLE
    | incompat::ZTAILPACKING
    | incompat::FRAGMENTS
    | incompat::XATTR_PREFIXES
    | incompat::ADDRESS_48BIT
    | incompat::METABOX;

/// Size of a block: a power of two, 512 bytes to 64 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockBits(u8);

impl BlockBits {
    pub(super) fn new(bits: u8) -> Result<Self, ErofsCorruption> {
        // The minimum is 2^9, the alignment of tar entries. The kernel's maximum is its page size, which is at most 64
        // KiB.
        match bits {
            9..=16 => Ok(Self(bits)),
            _ => Err(ErofsCorruption::BlockBits(bits)),
        }
    }

    /// Returns the binary logarithm, 9 to 16.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size(self) -> u64 {
        1_u64.wrapping_shl(u32::from(self.0))
    }

    /// Returns the offset of block `number`, or `None` beyond 2^64.
    #[must_use]
    pub fn start(self, number: u64) -> Option<ByteOffset> {
        number.checked_mul(self.size()).map(ByteOffset)
    }

    /// Returns the offset of `at` in its block.
    pub(super) fn within(self, at: ByteOffset) -> u64 {
        at.0 & self.size().wrapping_sub(1)
    }
}

/// The header that composefs writes before the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComposefsHeader {
    /// Version of the header. The only one is 1.
    pub header_version: u32,
    /// Version of composefs's rules by which the image was made: 0 or 1 by C composefs, 2 by composefs-rs.
    pub version: u32,
    /// Whether an inode has a POSIX ACL. Without one, composefs images are mounted with `noacl`.
    pub has_acl: bool,
}

/// The header that Quire writes before the superblock of a native image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeHeader {
    /// Whether an inode has a POSIX ACL.
    pub has_acl: bool,
    /// Whether a device is a tar.
    pub has_tar: bool,
}

/// The superblock, and the header before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Size of a block.
    pub block_bits: BlockBits,
    /// `feature_compat`: see [`compat`].
    pub compat: u32,
    /// `feature_incompat`: see [`incompat`].
    pub incompat: u32,
    /// Number of inodes that the superblock states.
    pub inodes: u64,
    /// Number of blocks that the superblock states.
    pub blocks: u64,
    /// Base of the modification time of compact inodes, in seconds since 1970.
    pub epoch: i64,
    /// Nanoseconds of the modification time of compact inodes.
    pub fixed_nanoseconds: u32,
    /// Time at which the image was made, in seconds after `epoch`; 0 if the image does not state it.
    pub build_time: u32,
    /// UUID of the volume; zeros if it has none.
    pub uuid: [u8; 16],
    /// Name of the volume, up to the first NUL.
    pub volume_name: [u8; 16],
    /// Nid of the root directory.
    pub root: Nid,
    /// Nid of a file that holds parts of other files, and the long xattr prefixes of some images.
    pub packed: Option<Nid>,
    /// Whether the name filters of xattrs are valid.
    pub has_xattr_filter: bool,
    /// Number of the long xattr prefix that names content fingerprints, for page cache sharing.
    pub fingerprint_prefix: Option<u8>,
    /// composefs's header.
    pub composefs: Option<ComposefsHeader>,
    /// Quire's header of a native image; `None` for images older than the first release.
    pub native: Option<NativeHeader>,
    /// A bit for each compression algorithm, with [`incompat::COMPR_CFGS`].
    pub(super) algorithm_bits: u16,
    /// Offset of the compression settings, with [`incompat::COMPR_CFGS`].
    pub(super) settings: ByteOffset,
    /// Offset of nid 0.
    pub(super) metadata: ByteOffset,
    /// Offset of the shared xattr with id 0.
    pub(super) shared_xattrs: ByteOffset,
}

impl Superblock {
    /// Returns the offset of an inode.
    pub(super) fn inode(&self, nid: Nid) -> Option<ByteOffset> {
        let slots = nid.0.checked_mul(SLOT_SIZE)?;
        self.metadata.0.checked_add(slots).map(ByteOffset)
    }
}

/// A slot of the device table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSlot {
    /// Name of the device for user space, such as a path or a digest; padded with NULs.
    pub tag: [u8; 64],
    /// Number of blocks in the device; 0 if the image does not state it.
    pub blocks: u64,
    /// First block of the device in the common address space of all devices, or 0.
    pub first_block: u64,
    /// Length of the device in bytes; `None` if the image does not state it.
    pub(super) len: Option<u64>,
    /// Offset of the device in the common address space of all devices.
    pub(super) start: Option<ByteOffset>,
}

/// Reads the superblock and the headers of composefs and Quire.
pub(super) fn read(source: &impl ReadAt) -> Result<(Superblock, RawSuperblock), ReadError> {
    let at = ByteOffset(to_u64(SUPERBLOCK_OFFSET));
    let end = at.0.saturating_add(to_u64(size_of::<RawSuperblock>()));
    if source.len() < end {
        return Err(ReadError::NotErofs);
    }
    let raw: RawSuperblock = fetch_raw(source, at, Part::Superblock)?;
    if raw.magic.get() != SUPERBLOCK_MAGIC {
        return Err(ReadError::NotErofs);
    }
    let block_bits = BlockBits::new(raw.blkszbits)?;
    let (compat, incompat) = (raw.feature_compat.get(), raw.feature_incompat.get());
    if compat & compat::SB_CHKSUM != 0 {
        check_checksum(source, block_bits, &raw)?;
    }
    if incompat & !KNOWN != 0 {
        return Err(Unsupported::Features(incompat & !KNOWN).into());
    }
    if compat & compat::RAFS_V6 != 0 {
        return Err(Unsupported::Rafs.into());
    }
    if incompat & incompat::METABOX != 0 {
        return Err(Unsupported::Metabox.into());
    }
    if raw.dirblkbits != 0 {
        return Err(Unsupported::DirectoryBlocks(raw.dirblkbits).into());
    }

    let mut blocks = u64::from(raw.blocks_lo.get());
    let mut root = u64::from(raw.rootnid_2b.get());
    if incompat & incompat::ADDRESS_48BIT != 0 && raw.rootnid_8b.get() != 0 {
        blocks |= u64::from(raw.rootnid_2b.get()) << 32;
        root = raw.rootnid_8b.get();
    }
    let len = source.len();
    if blocks.checked_mul(block_bits.size()).is_none_or(|end| end > len) {
        return Err(
            ErofsCorruption::Truncated { blocks, block_size: block_bits.size(), len }.into()
        );
    }
    let block = |number: u32| {
        block_bits.start(u64::from(number)).expect("2^32 blocks of 2^16 bytes are below 2^64")
    };
    let slots = usize::from(raw.sb_extslots).saturating_mul(SUPERBLOCK_EXTSLOT_SIZE);
    let has_packed = incompat & incompat::FRAGMENTS != 0 && raw.packed_nid.get() != 0;
    let superblock = Superblock {
        block_bits,
        compat,
        incompat,
        inodes: raw.inos.get(),
        blocks,
        epoch: raw.epoch.get(),
        fixed_nanoseconds: raw.fixed_nsec.get(),
        build_time: raw.build_time.get(),
        uuid: raw.uuid,
        volume_name: raw.volume_name,
        root: Nid(root),
        packed: has_packed.then_some(Nid(raw.packed_nid.get())),
        has_xattr_filter: compat & compat::XATTR_FILTER != 0 && raw.xattr_filter_reserved == 0,
        fingerprint_prefix: (compat & compat::ISHARE_XATTRS != 0)
            .then_some(raw.ishare_xattr_prefix_id),
        composefs: composefs_header(source)?,
        native: native_header(source)?,
        algorithm_bits: raw.available_compr_algs.get(),
        settings: ByteOffset(end.saturating_add(to_u64(slots))),
        metadata: block(raw.meta_blkaddr.get()),
        shared_xattrs: block(raw.xattr_blkaddr.get()),
    };
    Ok((superblock, raw))
}

fn composefs_header(source: &impl ReadAt) -> Result<Option<ComposefsHeader>, ReadError> {
    let raw: RawComposefsHeader = fetch_raw(source, ByteOffset(0), Part::Superblock)?;
    Ok((raw.magic.get() == COMPOSEFS_MAGIC).then(|| ComposefsHeader {
        header_version: raw.version.get(),
        version: raw.composefs_version.get(),
        has_acl: raw.flags.get() & COMPOSEFS_HAS_ACL != 0,
    }))
}

fn native_header(source: &impl ReadAt) -> Result<Option<NativeHeader>, ReadError> {
    let raw: RawNativeHeader = fetch_raw(source, ByteOffset(0), Part::Superblock)?;
    let version = raw.version.get();
    if raw.magic != NATIVE_MAGIC || version < NATIVE_HEADER_VERSION {
        return Ok(None);
    }
    if version > NATIVE_HEADER_VERSION {
        return Err(Unsupported::NativeHeader(version).into());
    }
    let flags = raw.flags.get();
    let (has_acl, has_tar) = (flags & NATIVE_HAS_ACL != 0, flags & NATIVE_HAS_TAR != 0);
    Ok(Some(NativeHeader { has_acl, has_tar }))
}

impl Superblock {
    /// Whether an inode may have a POSIX ACL: the value in the image's header, or `true` without a header. If
    /// `false`, mounting with `noacl` makes no difference and is faster.
    #[must_use]
    pub fn may_have_acl(&self) -> bool {
        match (self.composefs, self.native) {
            (Some(header), _) => header.has_acl,
            (None, Some(header)) => header.has_acl,
            (None, None) => true,
        }
    }
}

impl ComposefsHeader {
    /// Checks the header's version, before the image is read as a composefs image.
    pub(super) fn check(self) -> Result<(), Unsupported> {
        match self.header_version {
            COMPOSEFS_HEADER_VERSION => Ok(()),
            other => Err(Unsupported::ComposefsHeader(other)),
        }
    }
}

/// Compares the checksum: crc32c from the superblock to the end of its block, with the checksum as 0 and without the
/// final inversion. If the block size is at most the superblock's offset, the length is the block size.
/// Source: `erofs_superblock_csum_verify` in Linux `fs/erofs/super.c`.
fn check_checksum(
    source: &impl ReadAt,
    block_bits: BlockBits,
    raw: &RawSuperblock,
) -> Result<(), ReadError> {
    let offset = to_u64(SUPERBLOCK_OFFSET);
    let len = match block_bits.size() {
        size if size > offset => size.saturating_sub(offset),
        size => size,
    };
    let mut head = *raw;
    head.checksum = 0.into();
    let head = head.as_bytes();
    let mut rest = vec![0; to_usize(len.saturating_sub(to_u64(head.len())))];
    let after = offset.saturating_add(to_u64(head.len()));
    fetch(source, Device::IMAGE, ByteOffset(after), &mut rest, Part::Superblock)?;
    let crc = Crc::<u32>::new(&CRC_32_ISCSI);
    let mut digest = crc.digest();
    digest.update(head);
    digest.update(&rest);
    let (stored, computed) = (raw.checksum.get(), !digest.finalize());
    if stored == computed {
        Ok(())
    } else {
        Err(ErofsCorruption::Checksum { stored, computed }.into())
    }
}

/// Reads the device table.
pub(super) fn devices(
    source: &impl ReadAt,
    superblock: &Superblock,
    raw: &RawSuperblock,
) -> Result<Vec<DeviceSlot>, ReadError> {
    if superblock.incompat & incompat::DEVICE_TABLE == 0 {
        return Ok(Vec::new());
    }
    let size = to_u64(size_of::<RawDeviceSlot>());
    let wide = superblock.incompat & incompat::ADDRESS_48BIT != 0;
    let first = u64::from(raw.devt_slotoff.get());
    (1..=raw.extra_devices.get())
        .map(|number| {
            let slot = first.saturating_add(u64::from(number)).saturating_sub(1);
            let at = ByteOffset(slot.saturating_mul(size));
            let raw: RawDeviceSlot = fetch_raw(source, at, Part::Device(Device(number)))?;
            let high = |part: u64| if wide { part << 32 } else { 0 };
            let blocks = u64::from(raw.blocks_lo.get()) | high(raw.blocks_hi.get().into());
            let first_block = u64::from(raw.uniaddr_lo.get()) | high(raw.uniaddr_hi.get().into());
            let bytes = |blocks| superblock.block_bits.start(blocks);
            Ok(DeviceSlot {
                tag: raw.tag,
                blocks,
                first_block,
                len: bytes(blocks).filter(|_| blocks != 0).map(|len| len.0),
                start: bytes(first_block).filter(|_| first_block != 0),
            })
        })
        .collect()
}
