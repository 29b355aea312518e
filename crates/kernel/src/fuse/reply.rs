//! Replies of a server: the bytes that follow the header.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use rustix::fs::{FileType, Mode};
use zerocopy::{FromZeros as _, IntoBytes as _};

use super::layout::{
    ALLOW_IDMAP, ASYNC_DIO, ASYNC_READ, Attr, AttrOut, CACHE_SYMLINKS, DO_READDIRPLUS, Dirent,
    EntryOut, FOPEN_DIRECT_IO, FOPEN_NOFLUSH, GetxattrOut, INIT_EXT, InitOut, Kstatfs, MAX_PAGES,
    MINOR, NO_OPEN_SUPPORT, NO_OPENDIR_SUPPORT, OpenOut, PARALLEL_DIROPS, POSIX_ACL, VERSION,
};
use super::request::{FileHandle, InitOffer, NodeNumber};

/// The largest read that the kernel requests, in bytes.
pub const READ_MAX: usize = 1 << 20;
/// [`READ_MAX`] in pages of 4096 bytes.
const READ_PAGES: u16 = 256;
/// The largest write in bytes. The kernel requires at least a page.
const WRITE_MAX: u32 = 4096;
/// Cache validity in seconds, practically unlimited, because the file system's content does not change.
const ALWAYS: u64 = 1 << 40;

/// Attributes of a file or directory. All its timestamps are the time of its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeAttributes {
    /// Inode number.
    pub number: u64,
    pub kind: FileType,
    /// Permission bits.
    pub mode: Mode,
    /// Size in bytes.
    pub bytes: u64,
    /// User and group id of the owner.
    pub owner: (u32, u32),
    /// Number of hard links.
    pub links: u32,
    /// Time of the last change: seconds since 1970, and nanoseconds.
    pub changed: (i64, u32),
    /// Device number of a device node, as encoded by the kernel's `new_encode_dev`.
    pub device: u32,
}

impl NodeAttributes {
    /// Makes the attributes of a regular file with one link and a time of 1970.
    #[must_use]
    pub const fn file(number: u64, bytes: u64, mode: Mode, owner: (u32, u32)) -> Self {
        let (kind, links, changed) = (FileType::RegularFile, 1, (0, 0));
        Self { number, kind, mode, bytes, owner, links, changed, device: 0 }
    }

    fn raw(&self) -> Attr {
        let (seconds, nanoseconds) = (self.changed.0.cast_unsigned(), self.changed.1);
        Attr {
            ino: self.number,
            size: self.bytes,
            blocks: self.bytes.div_ceil(512),
            atime: seconds,
            mtime: seconds,
            ctime: seconds,
            atimensec: nanoseconds,
            mtimensec: nanoseconds,
            ctimensec: nanoseconds,
            mode: self.kind.as_raw_mode() | self.mode.as_raw_mode(),
            nlink: self.links,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: self.device,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The kind of file system, which decides the protocol features that the server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// A single file.
    File,
    /// A read-only directory tree.
    Tree {
        /// Whether the kernel enforces modes and ACLs and translates ids on idmapped mounts. Otherwise every user who
        /// can access the mount may read every file.
        permissions: bool,
        /// Whether a file may have an ACL. Otherwise the kernel does not request ACLs, if it enforces modes.
        acls: bool,
    },
}

/// Whether the kernel caches pages of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// The kernel caches pages.
    Pages,
    /// The kernel sends a request for each read. Requests of asynchronous reads run in parallel.
    None,
}

/// The bytes of a reply after its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyBody(Vec<u8>);

impl ReplyBody {
    /// The reply to an init request: the features that both sides support. The number of pending requests is not
    /// limited.
    #[must_use]
    pub fn init(offer: &InitOffer, served: Served) -> Self {
        let wanted = match served {
            Served::File => 0,
            Served::Tree { permissions, acls } => {
                let acl = match (permissions, acls) {
                    (true, true) => POSIX_ACL | ALLOW_IDMAP,
                    (true, false) => ALLOW_IDMAP,
                    (false, _) => 0,
                };
                DO_READDIRPLUS
                    | PARALLEL_DIROPS
                    | CACHE_SYMLINKS
                    | NO_OPEN_SUPPORT
                    | NO_OPENDIR_SUPPORT
                    | acl
            }
        };
        let flags = offer.flags & (wanted | ASYNC_READ | ASYNC_DIO | MAX_PAGES);
        let low = flags & u64::from(u32::MAX);
        let flags2 = u32::try_from(flags >> 32).unwrap_or_default();
        let extended = if flags2 == 0 { 0 } else { INIT_EXT };
        let out = InitOut {
            major: VERSION,
            minor: offer.minor.min(MINOR),
            max_readahead: offer.readahead,
            flags: u32::try_from(low).unwrap_or_default() | extended,
            max_background: u16::MAX,
            congestion_threshold: u16::MAX,
            max_write: WRITE_MAX,
            time_gran: 1,
            max_pages: READ_PAGES,
            map_alignment: 0,
            flags2,
            unused: [0; 7],
        };
        Self(out.as_bytes().to_vec())
    }

    /// The attributes of a node, which the kernel may cache for good.
    #[must_use]
    pub fn attributes(attributes: &NodeAttributes) -> Self {
        let attr = attributes.raw();
        let out = AttrOut { attr_valid: ALWAYS, attr_valid_nsec: 0, dummy: 0, attr };
        Self(out.as_bytes().to_vec())
    }

    /// The result of a lookup, which the kernel may cache for good.
    #[must_use]
    pub fn entry(node: NodeNumber, attributes: &NodeAttributes) -> Self {
        Self(entry(node, attributes).as_bytes().to_vec())
    }

    /// The result of a lookup of a name that does not exist, which the kernel may cache for good.
    #[must_use]
    pub fn no_entry() -> Self {
        let out = EntryOut { nodeid: 0, entry_valid: ALWAYS, ..EntryOut::new_zeroed() };
        Self(out.as_bytes().to_vec())
    }

    /// The length in bytes of an xattr's value, or of the list of xattr names.
    #[must_use]
    pub fn xattr_size(size: u32) -> Self {
        Self(GetxattrOut { size, padding: 0 }.as_bytes().to_vec())
    }

    /// The result of an open. Closing a descriptor of the file does not wait for the server.
    #[must_use]
    pub fn opened(handle: FileHandle, caching: Caching) -> Self {
        let open_flags = match caching {
            Caching::Pages => FOPEN_NOFLUSH,
            Caching::None => FOPEN_NOFLUSH | FOPEN_DIRECT_IO,
        };
        Self(OpenOut { fh: handle.0, open_flags, backing_id: 0 }.as_bytes().to_vec())
    }

    /// The statfs(2) values of a read-only file system with this many bytes and files.
    #[must_use]
    pub fn statistics(bytes: u64, files: u64) -> Self {
        let out = Kstatfs {
            blocks: bytes.div_ceil(4096),
            bfree: 0,
            bavail: 0,
            files,
            ffree: 0,
            bsize: 4096,
            namelen: 255,
            frsize: 4096,
            padding: 0,
            spare: [0; 6],
        };
        Self(out.as_bytes().to_vec())
    }

    /// A reply without a body, which reports success.
    #[must_use]
    pub const fn done() -> Self {
        Self(Vec::new())
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

fn entry(node: NodeNumber, attributes: &NodeAttributes) -> EntryOut {
    EntryOut {
        nodeid: node.0,
        generation: 0,
        entry_valid: ALWAYS,
        attr_valid: ALWAYS,
        entry_valid_nsec: 0,
        attr_valid_nsec: 0,
        attr: attributes.raw(),
    }
}

#[derive(Debug, Clone, Copy)]
pub struct ListedEntry<'a> {
    /// Name of at most 255 bytes.
    pub name: &'a [u8],
    /// Node of the entry. `None` for `.` and `..`, which the kernel knows itself.
    pub node: Option<NodeNumber>,
    /// Attributes of the node.
    pub attributes: NodeAttributes,
    /// Offset of the next entry. Offset 0 is the first entry.
    pub next: u64,
}

/// A reply with as many directory entries as fit.
#[derive(Debug)]
pub struct DirectoryReply<'b> {
    bytes: &'b mut Vec<u8>,
    size: usize,
    with_attributes: bool,
}

impl<'b> DirectoryReply<'b> {
    /// Makes an empty reply of at most `size` bytes that reuses the memory of `bytes`.
    pub fn new(bytes: &'b mut Vec<u8>, size: u32, with_attributes: bool) -> Self {
        bytes.clear();
        let size = usize::try_from(size).unwrap_or(usize::MAX).min(READ_MAX);
        Self { bytes, size, with_attributes }
    }

    /// Adds an entry. Returns whether it fitted.
    pub fn push(&mut self, entry: &ListedEntry<'_>) -> bool {
        let before = if self.with_attributes { size_of::<EntryOut>() } else { 0 };
        let length = size_of::<Dirent>().saturating_add(entry.name.len()).next_multiple_of(8);
        let end = self.bytes.len().saturating_add(before).saturating_add(length);
        let (Ok(namelen), true) = (u32::try_from(entry.name.len()), end <= self.size) else {
            return false;
        };
        if self.with_attributes {
            let out = match entry.node {
                Some(node) => self::entry(node, &entry.attributes),
                None => EntryOut::new_zeroed(),
            };
            self.bytes.extend_from_slice(out.as_bytes());
        }
        // The file type has the encoding of `struct dirent`: the upper bits of a mode.
        let kind = entry.attributes.kind.as_raw_mode() >> 12;
        let dirent = Dirent { ino: entry.attributes.number, off: entry.next, namelen, kind };
        self.bytes.extend_from_slice(dirent.as_bytes());
        self.bytes.extend_from_slice(entry.name);
        self.bytes.resize(end, 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes as _;

    use super::super::request::{FuseOperation, FuseRequest};
    use super::*;

    /// Returns the 4-byte numbers at these offsets.
    fn numbers(body: &ReplyBody, places: &[usize]) -> Vec<u32> {
        let at = |place: &usize| u32::read_from_prefix(&body.as_bytes()[*place..]).unwrap().0;
        places.iter().map(at).collect()
    }

    fn offer(minor: u32, flags: u32, flags2: u32) -> InitOffer {
        let header = [60, 26, 2, 0, 0, 0, 0, 0, 0, 0];
        let body = [7, minor, 131_072, flags, flags2];
        let numbers: Vec<u32> = header.iter().chain(&body).copied().collect();
        let request = FuseRequest::decode(numbers.as_bytes()).unwrap();
        let FuseOperation::Init(offer) = request.operation else {
            panic!("it is another request");
        };
        offer
    }

    /// The offsets come from `linux/fuse.h`.
    #[test]
    fn replies_have_the_layout_of_the_header() {
        let init = ReplyBody::init(&offer(45, !(1 << 30), 0), Served::File);
        assert_eq!(init.as_bytes().len(), 64);
        // The fields are version, read-ahead, flags, both limits of requests, the largest write, time granularity, and
        // pages.
        let expect = [7, 38, 131_072, 1 | 1 << 15 | 1 << 22, u32::MAX, 4096, 1, 256];
        assert_eq!(numbers(&init, &[0, 4, 8, 12, 16, 20, 24, 28]), expect);
        // The minor version and flags are not higher than the kernel's.
        let init = ReplyBody::init(&offer(36, 1, 0), Served::File);
        assert_eq!(numbers(&init, &[4, 12]), [36, 1]);
        // Trees use readdirplus, parallel directory operations and cached symlinks, and neither open nor opendir
        // requests. With `permissions`, ACLs are added.
        for (permissions, expect) in [(false, 0x1c6_a001), (true, 0x1d6_a001)] {
            let tree = Served::Tree { permissions, acls: true };
            let init = ReplyBody::init(&offer(45, !(1 << 30), 0), tree);
            assert_eq!(numbers(&init, &[12, 32]), [expect, 0]);
            // Without ACLs, neither.
            let tree = Served::Tree { permissions, acls: false };
            let init = ReplyBody::init(&offer(45, !(1 << 30), 0), tree);
            assert_eq!(numbers(&init, &[12, 32]), [0x1c6_a001, 0]);
        }
        // The flag for idmapped mounts is in the second field, which is valid because FUSE_INIT_EXT is set.
        for (permissions, expect) in [(false, [0x1c6_a001, 0]), (true, [0x41d6_a001, 1 << 8])] {
            let tree = Served::Tree { permissions, acls: true };
            let init = ReplyBody::init(&offer(45, u32::MAX, 1 << 8), tree);
            assert_eq!(numbers(&init, &[12, 32]), expect);
        }

        let file = NodeAttributes::file(1, 1025, Mode::RUSR, (3, 4));
        let attributes = NodeAttributes { links: 5, changed: (-2, 9), device: 0x1234, ..file };
        let got = ReplyBody::attributes(&attributes);
        assert_eq!(got.as_bytes().len(), 104);
        // Inode, size, blocks, mode, links, user, group, device.
        let places = [16, 24, 32, 76, 80, 84, 88, 92];
        assert_eq!(numbers(&got, &places), [1, 1025, 3, 0o100_400, 5, 3, 4, 0x1234]);
        // The seconds and nanoseconds of the three times.
        let (low, high) = (u32::MAX - 1, u32::MAX);
        let places = [40, 44, 48, 52, 56, 60, 64, 68, 72];
        assert_eq!(numbers(&got, &places), [low, high, low, high, low, high, 9, 9, 9]);
        let entry = ReplyBody::entry(NodeNumber(7), &attributes);
        assert_eq!(entry.as_bytes().len(), 128);
        assert_eq!(numbers(&entry, &[0, 40, 48, 100]), [7, 1, 1025, 0o100_400]);
        let none = ReplyBody::no_entry();
        assert_eq!((none.as_bytes().len(), numbers(&none, &[0, 4, 20])), (128, vec![0, 0, 256]));
        assert_eq!(numbers(&ReplyBody::xattr_size(77), &[0, 4]), [77, 0]);

        let opened = ReplyBody::opened(FileHandle(5), Caching::None);
        assert_eq!(numbers(&opened, &[0, 4, 8, 12]), [5, 0, 0x21, 0]);
        let opened = ReplyBody::opened(FileHandle(5), Caching::Pages);
        assert_eq!(numbers(&opened, &[8]), [0x20]);
        let statistics = ReplyBody::statistics(4097, 6);
        assert_eq!(statistics.as_bytes().len(), 80);
        assert_eq!(numbers(&statistics, &[0, 40, 44, 48]), [2, 4096, 255, 4096]);
        assert!(ReplyBody::done().as_bytes().is_empty());
        assert_eq!(usize::from(READ_PAGES) * 4096, READ_MAX);
    }

    /// The offsets come from `linux/fuse.h`: `struct fuse_direntplus` and `struct fuse_dirent`.
    #[test]
    fn entries_of_directories_have_the_layout_of_the_header() {
        let attributes = NodeAttributes::file(8, 5, Mode::RUSR, (0, 0));
        let node = Some(NodeNumber(9));
        let entry = ListedEntry { name: b"file", node, attributes, next: 3 };
        let mut bytes = Vec::new();
        let mut reply = DirectoryReply::new(&mut bytes, 63, false);
        assert!(reply.push(&entry));
        // A second entry would need 32 more bytes.
        assert!(!reply.push(&entry));
        let body = ReplyBody(bytes.clone());
        // Inode, offset of the next entry, length of the name, type of a regular file.
        assert_eq!(numbers(&body, &[0, 8, 16, 20]), [8, 3, 4, 8]);
        assert_eq!((&bytes[24..28], &bytes[28..]), (&b"file"[..], &[0; 4][..]));

        let mut reply = DirectoryReply::new(&mut bytes, 320, true);
        assert!(reply.push(&ListedEntry { node: None, name: b".", ..entry }));
        assert!(reply.push(&entry));
        assert!(!reply.push(&entry), "there is no room");
        let body = ReplyBody(bytes.clone());
        assert_eq!(bytes.len(), 320);
        assert_eq!(numbers(&body, &[0, 128, 136, 144, 148]), [0, 8, 3, 1, 8]);
        assert_eq!(numbers(&body, &[160, 200, 208, 288, 304]), [9, 8, 5, 8, 4]);
        assert_eq!(&bytes[312..316], b"file");
    }
}
