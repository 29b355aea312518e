//! The C structures of the FUSE protocol.
//!
//! Source: Linux `include/uapi/linux/fuse.h`, version 7.44. Fields keep the kernel's names. Numbers are in native
//! byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `FUSE_KERNEL_VERSION`.
pub(super) const VERSION: u32 = 7;
/// The minor protocol version that this module implements.
pub(super) const MINOR: u32 = 38;
/// The lowest supported minor version. It is the version of Linux 5.4, which has the structures below.
pub(super) const MINOR_LEAST: u32 = 31;
/// `FUSE_ROOT_ID`.
pub(super) const ROOT: u64 = 1;

/// The values of `enum fuse_opcode` that this module uses.
pub(super) mod opcode {
    pub(in crate::fuse) const LOOKUP: u32 = 1;
    pub(in crate::fuse) const FORGET: u32 = 2;
    pub(in crate::fuse) const GETATTR: u32 = 3;
    pub(in crate::fuse) const READLINK: u32 = 5;
    pub(in crate::fuse) const OPEN: u32 = 14;
    pub(in crate::fuse) const READ: u32 = 15;
    pub(in crate::fuse) const STATFS: u32 = 17;
    pub(in crate::fuse) const RELEASE: u32 = 18;
    pub(in crate::fuse) const GETXATTR: u32 = 22;
    pub(in crate::fuse) const LISTXATTR: u32 = 23;
    pub(in crate::fuse) const FLUSH: u32 = 25;
    pub(in crate::fuse) const INIT: u32 = 26;
    pub(in crate::fuse) const READDIR: u32 = 28;
    pub(in crate::fuse) const ACCESS: u32 = 34;
    pub(in crate::fuse) const INTERRUPT: u32 = 36;
    pub(in crate::fuse) const DESTROY: u32 = 38;
    pub(in crate::fuse) const BATCH_FORGET: u32 = 42;
    pub(in crate::fuse) const READDIRPLUS: u32 = 44;
}

/// `FUSE_ASYNC_READ`: the kernel sends several reads of a file at a time.
pub(super) const ASYNC_READ: u64 = 1 << 0;
/// `FUSE_DO_READDIRPLUS`: directory listings include the attributes of all entries.
pub(super) const DO_READDIRPLUS: u64 = 1 << 13;
/// `FUSE_ASYNC_DIO`: direct I/O may be asynchronous.
pub(super) const ASYNC_DIO: u64 = 1 << 15;
/// `FUSE_NO_OPEN_SUPPORT`: a server may refuse open requests once, and then receives none.
pub(super) const NO_OPEN_SUPPORT: u64 = 1 << 17;
/// `FUSE_PARALLEL_DIROPS`: lookups and listings in one directory run in parallel.
pub(super) const PARALLEL_DIROPS: u64 = 1 << 18;
/// `FUSE_POSIX_ACL`: the kernel enforces and caches ACLs. Implies `default_permissions`.
pub(super) const POSIX_ACL: u64 = 1 << 20;
/// `FUSE_MAX_PAGES`: `max_pages` is valid.
pub(super) const MAX_PAGES: u64 = 1 << 22;
/// `FUSE_CACHE_SYMLINKS`: the kernel caches symlink targets.
pub(super) const CACHE_SYMLINKS: u64 = 1 << 23;
/// `FUSE_NO_OPENDIR_SUPPORT`: like `FUSE_NO_OPEN_SUPPORT`, for directories.
pub(super) const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
/// `FUSE_INIT_EXT`: `flags2` is valid.
pub(super) const INIT_EXT: u32 = 1 << 30;
/// `FUSE_HAS_RESEND`, since Linux 6.9.
pub(super) const HAS_RESEND: u64 = 1 << 39;
/// `FUSE_ALLOW_IDMAP`, since Linux 6.12: mounts may be idmapped. Needs `default_permissions`.
pub(super) const ALLOW_IDMAP: u64 = 1 << 40;
/// `FUSE_GETATTR_FH`: the file handle is valid.
pub(super) const GETATTR_FH: u32 = 1 << 0;
/// `FOPEN_DIRECT_IO`: bypasses the page cache.
pub(super) const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// `FOPEN_NOFLUSH`, since Linux 5.16: closing a descriptor sends no flush request.
pub(super) const FOPEN_NOFLUSH: u32 = 1 << 5;
/// `FUSE_NOTIFY_RESEND`, sent in the error field.
pub(super) const NOTIFY_RESEND: i32 = 7;

/// `struct fuse_in_header`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes, Clone, Copy)]
#[repr(C)]
pub(super) struct InHeader {
    pub(super) len: u32,
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) nodeid: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) pid: u32,
    pub(super) total_extlen: u16,
    pub(super) padding: u16,
}

/// `struct fuse_out_header`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct OutHeader {
    pub(super) len: u32,
    pub(super) error: i32,
    pub(super) unique: u64,
}

/// `struct fuse_init_in`, without its unused fields.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct InitIn {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) max_readahead: u32,
    pub(super) flags: u32,
    pub(super) flags2: u32,
}

/// `struct fuse_init_out`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct InitOut {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) max_readahead: u32,
    pub(super) flags: u32,
    pub(super) max_background: u16,
    pub(super) congestion_threshold: u16,
    pub(super) max_write: u32,
    pub(super) time_gran: u32,
    pub(super) max_pages: u16,
    pub(super) map_alignment: u16,
    pub(super) flags2: u32,
    pub(super) unused: [u32; 7],
}

/// `struct fuse_attr`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Attr {
    pub(super) ino: u64,
    pub(super) size: u64,
    pub(super) blocks: u64,
    pub(super) atime: u64,
    pub(super) mtime: u64,
    pub(super) ctime: u64,
    pub(super) atimensec: u32,
    pub(super) mtimensec: u32,
    pub(super) ctimensec: u32,
    pub(super) mode: u32,
    pub(super) nlink: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) rdev: u32,
    pub(super) blksize: u32,
    pub(super) flags: u32,
}

/// `struct fuse_attr_out`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct AttrOut {
    pub(super) attr_valid: u64,
    pub(super) attr_valid_nsec: u32,
    pub(super) dummy: u32,
    pub(super) attr: Attr,
}

/// `struct fuse_entry_out`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct EntryOut {
    pub(super) nodeid: u64,
    pub(super) generation: u64,
    pub(super) entry_valid: u64,
    pub(super) attr_valid: u64,
    pub(super) entry_valid_nsec: u32,
    pub(super) attr_valid_nsec: u32,
    pub(super) attr: Attr,
}

/// `struct fuse_getattr_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct GetattrIn {
    pub(super) getattr_flags: u32,
    pub(super) dummy: u32,
    pub(super) fh: u64,
}

/// `struct fuse_open_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct OpenIn {
    pub(super) flags: u32,
    pub(super) open_flags: u32,
}

/// `struct fuse_open_out`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct OpenOut {
    pub(super) fh: u64,
    pub(super) open_flags: u32,
    pub(super) backing_id: i32,
}

/// `struct fuse_read_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct ReadIn {
    pub(super) fh: u64,
    pub(super) offset: u64,
    pub(super) size: u32,
    pub(super) read_flags: u32,
    pub(super) lock_owner: u64,
    pub(super) flags: u32,
    pub(super) padding: u32,
}

/// `struct fuse_getxattr_in`, which a name may follow.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct GetxattrIn {
    pub(super) size: u32,
    pub(super) padding: u32,
}

/// `struct fuse_getxattr_out`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct GetxattrOut {
    pub(super) size: u32,
    pub(super) padding: u32,
}

/// `struct fuse_dirent`, followed by the name and by zeros up to a multiple of 8 bytes.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Dirent {
    pub(super) ino: u64,
    pub(super) off: u64,
    pub(super) namelen: u32,
    pub(super) kind: u32,
}

/// `struct fuse_release_in`; `struct fuse_flush_in` has the same first field.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct HandleIn {
    pub(super) fh: u64,
    pub(super) flags: u32,
    pub(super) release_flags: u32,
    pub(super) lock_owner: u64,
}

/// `struct fuse_forget_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct ForgetIn {
    pub(super) nlookup: u64,
}

/// `struct fuse_batch_forget_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct BatchForgetIn {
    pub(super) count: u32,
    pub(super) dummy: u32,
}

/// `struct fuse_forget_one`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct ForgetOne {
    pub(super) nodeid: u64,
    pub(super) nlookup: u64,
}

/// `struct fuse_interrupt_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct InterruptIn {
    pub(super) unique: u64,
}

/// `struct fuse_access_in`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct AccessIn {
    pub(super) mask: u32,
    pub(super) padding: u32,
}

/// `struct fuse_kstatfs`.
#[derive(FromBytes, KnownLayout, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Kstatfs {
    pub(super) blocks: u64,
    pub(super) bfree: u64,
    pub(super) bavail: u64,
    pub(super) files: u64,
    pub(super) ffree: u64,
    pub(super) bsize: u32,
    pub(super) namelen: u32,
    pub(super) frsize: u32,
    pub(super) padding: u32,
    pub(super) spare: [u32; 6],
}

const _: () = assert!(size_of::<InHeader>() == 40);
const _: () = assert!(size_of::<OutHeader>() == 16);
const _: () = assert!(size_of::<InitIn>() == 20);
const _: () = assert!(size_of::<InitOut>() == 64);
const _: () = assert!(size_of::<Attr>() == 88);
const _: () = assert!(size_of::<AttrOut>() == 104);
const _: () = assert!(size_of::<EntryOut>() == 128);
const _: () = assert!(size_of::<GetattrIn>() == 16);
const _: () = assert!(size_of::<OpenIn>() == 8);
const _: () = assert!(size_of::<OpenOut>() == 16);
const _: () = assert!(size_of::<ReadIn>() == 40);
const _: () = assert!(size_of::<GetxattrIn>() == 8);
const _: () = assert!(size_of::<GetxattrOut>() == 8);
const _: () = assert!(size_of::<Dirent>() == 24);
const _: () = assert!(size_of::<HandleIn>() == 24);
const _: () = assert!(size_of::<ForgetIn>() == 8);
const _: () = assert!(size_of::<BatchForgetIn>() == 8);
const _: () = assert!(size_of::<ForgetOne>() == 16);
const _: () = assert!(size_of::<InterruptIn>() == 8);
const _: () = assert!(size_of::<AccessIn>() == 8);
const _: () = assert!(size_of::<Kstatfs>() == 80);
