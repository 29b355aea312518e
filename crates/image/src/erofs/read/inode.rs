//! Reads and checks inodes.

use std::fmt;

use zerocopy::FromBytes as _;

use super::error::{ErofsCorruption, Part, ReadError, Unsupported};
use super::source::ReadAt;
use super::{ByteOffset, Device, Image, to_u64, to_usize};
use crate::erofs::layout::{
    CHUNK_48BIT, CHUNK_BLKBITS_MASK, CHUNK_INDEXES, FORMAT_BIT_4, FORMAT_EXTENDED,
    FORMAT_LAYOUT_MASK, FORMAT_LAYOUT_SHIFT, LAYOUT_CHUNK_BASED, LAYOUT_COMPRESSED_COMPACT,
    LAYOUT_COMPRESSED_FULL, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, NULL_BLOCK, RawCompactInode,
    RawExtendedInode, RawXattrHeader, file_type,
};
use crate::tree::Timestamp;

/// The number of an inode: its offset in units of 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

impl fmt::Display for Nid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A type of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileType {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A symbolic link.
    Symlink,
}

impl FileType {
    /// Returns the type for the type bits of `st_mode`. Source: `linux/stat.h`.
    const fn of_mode(mode: u16) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o100_000 => Self::Regular,
            0o040_000 => Self::Directory,
            0o020_000 => Self::CharDevice,
            0o060_000 => Self::BlockDevice,
            0o010_000 => Self::Fifo,
            0o140_000 => Self::Socket,
            0o120_000 => Self::Symlink,
            _ => return None,
        })
    }

    /// Returns the type's number in directory entries.
    pub(super) const fn in_entry(self) -> u8 {
        match self {
            Self::Regular => file_type::REGULAR,
            Self::Directory => file_type::DIRECTORY,
            Self::CharDevice => file_type::CHAR_DEVICE,
            Self::BlockDevice => file_type::BLOCK_DEVICE,
            Self::Fifo => file_type::FIFO,
            Self::Socket => file_type::SOCKET,
            Self::Symlink => file_type::SYMLINK,
        }
    }
}

/// An inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inode {
    nid: Nid,
    file_type: FileType,
    mode: u16,
    uid: u32,
    gid: u32,
    mtime: Timestamp,
    nlink: u32,
    size: u64,
    device_number: u32,
    is_extended: bool,
    pub(super) layout: DataLayout,
    /// Offset of the xattrs.
    pub(super) xattrs: ByteOffset,
    /// Size of the xattrs in bytes.
    pub(super) xattrs_size: u32,
    /// Offset of the inline data or the chunk table.
    pub(super) tail: ByteOffset,
}

/// The location of an inode's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataLayout {
    /// Consecutive blocks from this one on, or `None` for a hole.
    Plain(Option<u64>),
    /// Consecutive blocks from this one on, and a tail after the inode.
    Inline(u64),
    /// Chunks of 2 to the power of `bits` bytes, whose locations are in a table after the inode.
    Chunks { bits: u32, indexes: Indexes },
    /// Compressed data. `is_full` states the form of the index.
    Compressed { is_full: bool },
}

/// The type of a chunk table's entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Indexes {
    /// 4-byte block numbers on the primary device.
    Blocks,
    /// 8-byte indexes with a device number and a 32-bit block number.
    Narrow,
    /// 8-byte indexes with a device number and a 48-bit block number.
    Wide,
}

impl Inode {
    /// Returns the number of the inode.
    #[must_use]
    pub const fn nid(&self) -> Nid {
        self.nid
    }

    /// Returns the file type.
    #[must_use]
    pub const fn file_type(&self) -> FileType {
        self.file_type
    }

    /// Returns `st_mode`: the type and the permissions.
    #[must_use]
    pub const fn mode(&self) -> u16 {
        self.mode
    }

    /// Returns the user id of the owner.
    #[must_use]
    pub const fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns the group id of the owner.
    #[must_use]
    pub const fn gid(&self) -> u32 {
        self.gid
    }

    /// Returns the modification time.
    #[must_use]
    pub const fn mtime(&self) -> Timestamp {
        self.mtime
    }

    /// Returns the number of links that the inode states.
    #[must_use]
    pub const fn nlink(&self) -> u32 {
        self.nlink
    }

    /// Returns the length in bytes, at most 2^63 - 1, of a file, a symlink's target, or a directory's entries.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of a device as in `st_rdev`; 0 for other types.
    #[must_use]
    pub const fn device_number(&self) -> u32 {
        self.device_number
    }

    /// Whether the data is compressed.
    #[must_use]
    pub const fn is_compressed(&self) -> bool {
        matches!(self.layout, DataLayout::Compressed { .. })
    }

    /// Whether the data is in chunks, which may be on other devices or holes. Otherwise the data is in the image.
    #[must_use]
    pub const fn is_chunk_based(&self) -> bool {
        matches!(self.layout, DataLayout::Chunks { .. })
    }
}

/// The fields that compact and extended inodes share.
struct Fields {
    xattr_icount: u16,
    mode: u16,
    size: u64,
    /// The field `i_u`.
    u: u32,
    /// High bits of a block number.
    block_high: u16,
    /// Number of bits in a block number, all of which are 1 for a hole.
    block_bits: u32,
    uid: u32,
    gid: u32,
    mtime: Timestamp,
    nlink: u32,
    header: usize,
}

impl<S: ReadAt> Image<S> {
    /// Reads an inode.
    ///
    /// # Errors
    /// [`ReadError`] if the inode is invalid, unsupported or cannot be read.
    pub fn inode(&self, nid: Nid) -> Result<Inode, ReadError> {
        let at = self.superblock.inode(nid).unwrap_or(ByteOffset(u64::MAX));
        let (format, fields) = self.fields(nid, at)?;
        self.check(nid, at, format, &fields)
    }

    /// Reads an inode's format, and the fields that both forms of inodes have.
    fn fields(&self, nid: Nid, at: ByteOffset) -> Result<(u16, Fields), ReadError> {
        let part = Part::Inode(nid);
        // The size of the larger form is read at once, unless the image ends before that.
        let mut bytes = [0; size_of::<RawExtendedInode>()];
        let left = to_usize(self.source.len().saturating_sub(at.0));
        let len = left.clamp(size_of::<RawCompactInode>(), bytes.len());
        let bytes = bytes.get_mut(..len).expect("clamped to its length");
        self.fetch(at, bytes, part)?;

        let (compact, _) = RawCompactInode::ref_from_prefix(bytes).expect("it has 32 bytes");
        let format = compact.i_format.get();
        let known = FORMAT_EXTENDED | FORMAT_LAYOUT_MASK << FORMAT_LAYOUT_SHIFT | FORMAT_BIT_4;
        if format & !known != 0 {
            return Err(Unsupported::InodeFormat(nid, format).into());
        }
        let fields = if format & FORMAT_EXTENDED == 0 {
            self.compact(compact)
        } else if let Ok((extended, _)) = RawExtendedInode::ref_from_prefix(bytes) {
            extended_fields(extended)
        } else {
            let (len, bound) = (to_u64(size_of::<RawExtendedInode>()), self.source.len());
            let device = Device::IMAGE;
            return Err(ErofsCorruption::Outside { part, device, offset: at, len, bound }.into());
        };
        Ok((format, fields))
    }

    /// Whether an extended inode would fit in a compact one.
    pub(super) fn is_needlessly_extended(&self, inode: &Inode) -> bool {
        let epoch = Timestamp {
            seconds: self.superblock.epoch,
            nanoseconds: self.superblock.fixed_nanoseconds,
        };
        let ids = [inode.uid, inode.gid, inode.nlink];
        inode.is_extended
            && inode.mtime == epoch
            && u32::try_from(inode.size).is_ok()
            && ids.iter().all(|id| u16::try_from(*id).is_ok())
    }

    fn compact(&self, raw: &RawCompactInode) -> Fields {
        let mode = raw.i_mode.get();
        let is_directory = FileType::of_mode(mode) == Some(FileType::Directory);
        // The bit has two meanings. For a directory it means that the directory has no `.`.
        let single = raw.i_format.get() & FORMAT_BIT_4 != 0 && !is_directory;
        let seconds = self.superblock.epoch.wrapping_add(i64::from(raw.i_mtime.get()));
        Fields {
            xattr_icount: raw.i_xattr_icount.get(),
            mode,
            size: raw.i_size.get().into(),
            u: raw.i_u.get(),
            block_high: if single { raw.i_nb.get() } else { 0 },
            block_bits: if single { 48 } else { 32 },
            uid: raw.i_uid.get().into(),
            gid: raw.i_gid.get().into(),
            mtime: Timestamp { seconds, nanoseconds: self.superblock.fixed_nanoseconds },
            nlink: if single { 1 } else { raw.i_nb.get().into() },
            header: size_of::<RawCompactInode>(),
        }
    }

    fn check(
        &self,
        nid: Nid,
        at: ByteOffset,
        format: u16,
        fields: &Fields,
    ) -> Result<Inode, ReadError> {
        let &Fields { mode, size, u, .. } = fields;
        let file_type = FileType::of_mode(mode).ok_or(ErofsCorruption::Mode { nid, mode })?;
        if i64::try_from(size).is_err() {
            return Err(ErofsCorruption::Size { nid, size }.into());
        }
        let block = u64::from(u) | u64::from(fields.block_high) << 32;
        let hole = u64::MAX.wrapping_shr(64_u32.saturating_sub(fields.block_bits));
        let layout = match format >> FORMAT_LAYOUT_SHIFT & FORMAT_LAYOUT_MASK {
            LAYOUT_FLAT_PLAIN => DataLayout::Plain((block != hole).then_some(block)),
            LAYOUT_FLAT_INLINE => DataLayout::Inline(block),
            LAYOUT_CHUNK_BASED => self.chunks(nid, u)?,
            LAYOUT_COMPRESSED_FULL => DataLayout::Compressed { is_full: true },
            LAYOUT_COMPRESSED_COMPACT => DataLayout::Compressed { is_full: false },
            other => return Err(Unsupported::DataLayout(nid, other).into()),
        };
        // The first unit represents the header, and each further unit represents 4 bytes after it.
        let xattrs_size = match fields.xattr_icount.checked_sub(1) {
            None => 0,
            Some(units) => {
                let header = u32::try_from(size_of::<RawXattrHeader>()).expect("12");
                u32::from(units).saturating_mul(4).saturating_add(header)
            }
        };
        let xattrs = ByteOffset(at.0.saturating_add(to_u64(fields.header)));
        let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
        Ok(Inode {
            nid,
            file_type,
            mode,
            uid: fields.uid,
            gid: fields.gid,
            mtime: fields.mtime,
            nlink: fields.nlink,
            size,
            // This is the encoding of the kernel's `new_encode_dev`, which is the low half of a C library's device
            // number.
            device_number: if is_device { u } else { 0 },
            is_extended: format & FORMAT_EXTENDED != 0,
            layout,
            xattrs,
            xattrs_size,
            tail: ByteOffset(xattrs.0.saturating_add(u64::from(xattrs_size))),
        })
    }

    fn chunks(&self, nid: Nid, u: u32) -> Result<DataLayout, ReadError> {
        let format = u16::try_from(u & u32::from(u16::MAX)).expect("masked");
        let known = CHUNK_BLKBITS_MASK | CHUNK_INDEXES | CHUNK_48BIT;
        if format & !known != 0 {
            return Err(Unsupported::ChunkFormat(nid, format).into());
        }
        let blocks = format & CHUNK_BLKBITS_MASK;
        let bits = u32::from(self.superblock.block_bits.get()).saturating_add(blocks.into());
        let indexes = match (format & CHUNK_INDEXES != 0, format & CHUNK_48BIT != 0) {
            (false, _) => Indexes::Blocks,
            (true, false) => Indexes::Narrow,
            (true, true) => Indexes::Wide,
        };
        Ok(DataLayout::Chunks { bits, indexes })
    }
}

fn extended_fields(raw: &RawExtendedInode) -> Fields {
    Fields {
        xattr_icount: raw.i_xattr_icount.get(),
        mode: raw.i_mode.get(),
        size: raw.i_size.get(),
        u: raw.i_u.get(),
        block_high: raw.i_nb.get(),
        block_bits: 48,
        uid: raw.i_uid.get(),
        gid: raw.i_gid.get(),
        mtime: Timestamp { seconds: raw.i_mtime.get(), nanoseconds: raw.i_mtime_nsec.get() },
        nlink: raw.i_nlink.get(),
        header: size_of::<RawExtendedInode>(),
    }
}

/// Whether a block number in a chunk table means a hole.
pub(super) fn is_hole(block: u64, indexes: Indexes) -> bool {
    match indexes {
        Indexes::Blocks | Indexes::Narrow => block == u64::from(NULL_BLOCK),
        Indexes::Wide => block == u64::MAX >> 16,
    }
}
