//! Writes inodes.

use std::io;

use zerocopy::little_endian::{I64, U16, U32, U64};

use super::output::Output;
use crate::erofs::layout::{
    FORMAT_EXTENDED, FORMAT_LAYOUT_SHIFT, RawCompactInode, RawExtendedInode, RawXattrHeader,
};
use crate::tree::Metadata;

/// The form of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A [`RawCompactInode`] of 32 bytes.
    Compact,
    /// A [`RawExtendedInode`] of 64 bytes.
    Extended,
}

impl Form {
    /// Returns the size in bytes.
    pub(super) const fn size(self) -> u64 {
        let size = match self {
            Self::Compact => size_of::<RawCompactInode>(),
            Self::Extended => size_of::<RawExtendedInode>(),
        };
        size as u64
    }
}

/// The values of an inode's fields.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    /// One of the data layouts, such as [`LAYOUT_FLAT_PLAIN`](crate::erofs::layout::LAYOUT_FLAT_PLAIN).
    pub(super) layout: u16,
    pub(super) icount: u16,
    pub(super) mode: u16,
    pub(super) nlink: u32,
    pub(super) size: u64,
    pub(super) i_u: u32,
    pub(super) ino: u32,
    pub(super) metadata: Metadata,
}

impl Record {
    /// Writes the inode. The compact form stores no time, so the time must be the superblock's `epoch` and
    /// `fixed_nsec`.
    pub(super) fn put(&self, form: Form, out: &mut Output<impl io::Write>) {
        let format = self.layout << FORMAT_LAYOUT_SHIFT;
        let Metadata { uid, gid, mtime, .. } = self.metadata;
        match form {
            Form::Extended => out.put(&RawExtendedInode {
                i_format: U16::new(format | FORMAT_EXTENDED),
                i_xattr_icount: U16::new(self.icount),
                i_mode: U16::new(self.mode),
                i_nb: U16::ZERO,
                i_size: U64::new(self.size),
                i_u: U32::new(self.i_u),
                i_ino: U32::new(self.ino),
                i_uid: U32::new(uid),
                i_gid: U32::new(gid),
                i_mtime: I64::new(mtime.seconds),
                i_mtime_nsec: U32::new(mtime.nanoseconds),
                i_nlink: U32::new(self.nlink),
                i_reserved2: [0; 16],
            }),
            Form::Compact => {
                let narrow = |number| u16::try_from(number).expect("else the inode is extended");
                out.put(&RawCompactInode {
                    i_format: U16::new(format),
                    i_xattr_icount: U16::new(self.icount),
                    i_mode: U16::new(self.mode),
                    i_nb: U16::new(narrow(self.nlink)),
                    i_size: U32::new(u32::try_from(self.size).expect("else it is extended")),
                    i_mtime: U32::ZERO,
                    i_u: U32::new(self.i_u),
                    i_ino: U32::new(self.ino),
                    i_uid: U16::new(narrow(uid)),
                    i_gid: U16::new(narrow(gid)),
                    i_reserved: U32::ZERO,
                });
            }
        }
    }
}

/// Returns `i_xattr_icount` for xattrs of `xattrs` bytes.
pub(super) fn icount(xattrs: usize) -> u16 {
    let entries = match xattrs.checked_sub(size_of::<RawXattrHeader>()) {
        None => 0,
        Some(bytes) => 1 + bytes / size_of::<u32>(),
    };
    u16::try_from(entries).expect("the profiles allow less than 256 KiB")
}
