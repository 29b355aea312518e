//! What a server replies: the bytes behind the header of a reply.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use rustix::fs::{FileType, Mode};
use zerocopy::IntoBytes as _;

use super::layout::{
    ASYNC_DIO, ASYNC_READ, Attr, AttrOut, EntryOut, FOPEN_DIRECT_IO, FOPEN_NOFLUSH, InitOut,
    Kstatfs, MAX_PAGES, MINOR, OpenOut, VERSION,
};
use super::request::{FileHandle, InitOffer, NodeNumber};

/// The largest read that a server is asked for, in bytes.
pub const READ_MAX: usize = 1 << 20;
/// The same in pages of 4096 bytes.
const READ_PAGES: u16 = 256;
/// The kernel gives a request at least a page.
const WRITE_MAX: u32 = 4096;
/// For ever: what is read from the file system does not change.
const ALWAYS: u64 = 1 << 40;

/// Attributes of a file or folder. Times are those of 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeAttributes {
    /// What it is.
    pub kind: FileType,
    /// Who may do what.
    pub mode: Mode,
    /// How many bytes it has.
    pub bytes: u64,
    /// Its owner: user and group.
    pub owner: (u32, u32),
}

impl NodeAttributes {
    fn raw(&self, node: NodeNumber) -> Attr {
        Attr {
            ino: node.0,
            size: self.bytes,
            blocks: self.bytes.div_ceil(512),
            atime: 0,
            mtime: 0,
            ctime: 0,
            atimensec: 0,
            mtimensec: 0,
            ctimensec: 0,
            mode: self.kind.as_raw_mode() | self.mode.as_raw_mode(),
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// Whether the kernel keeps pages of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caching {
    /// Yes.
    Pages,
    /// No: each read is asked for. Reads that nobody waits for are asked for side by side.
    None,
}

/// The bytes of a reply, behind its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyBody(Vec<u8>);

impl ReplyBody {
    /// Begins with what both sides can do. Any number of requests may be under way.
    #[must_use]
    pub fn init(offer: &InitOffer) -> Self {
        let flags = offer.flags & (ASYNC_READ | ASYNC_DIO | MAX_PAGES);
        let out = InitOut {
            major: VERSION,
            minor: offer.minor.min(MINOR),
            max_readahead: offer.readahead,
            // These three are among the low bits.
            flags: u32::try_from(flags).unwrap_or_default(),
            max_background: u16::MAX,
            congestion_threshold: u16::MAX,
            max_write: WRITE_MAX,
            time_gran: 1,
            max_pages: READ_PAGES,
            map_alignment: 0,
            flags2: 0,
            unused: [0; 7],
        };
        Self(out.as_bytes().to_vec())
    }

    /// The attributes of a node, which do not change.
    #[must_use]
    pub fn attributes(node: NodeNumber, attributes: &NodeAttributes) -> Self {
        let attr = attributes.raw(node);
        let out = AttrOut { attr_valid: ALWAYS, attr_valid_nsec: 0, dummy: 0, attr };
        Self(out.as_bytes().to_vec())
    }

    /// A node that was looked up, which does not change.
    #[must_use]
    pub fn entry(node: NodeNumber, attributes: &NodeAttributes) -> Self {
        let out = EntryOut {
            nodeid: node.0,
            generation: 0,
            entry_valid: ALWAYS,
            attr_valid: ALWAYS,
            entry_valid_nsec: 0,
            attr_valid_nsec: 0,
            attr: attributes.raw(node),
        };
        Self(out.as_bytes().to_vec())
    }

    /// A file that was opened. Whoever closes a descriptor of it does not wait for the server.
    #[must_use]
    pub fn opened(handle: FileHandle, caching: Caching) -> Self {
        let open_flags = match caching {
            Caching::Pages => FOPEN_NOFLUSH,
            Caching::None => FOPEN_NOFLUSH | FOPEN_DIRECT_IO,
        };
        Self(OpenOut { fh: handle.0, open_flags, backing_id: 0 }.as_bytes().to_vec())
    }

    /// The figures of a file system of so many bytes that nobody can write to.
    #[must_use]
    pub fn statistics(bytes: u64) -> Self {
        let out = Kstatfs {
            blocks: bytes.div_ceil(4096),
            bfree: 0,
            bavail: 0,
            files: 1,
            ffree: 0,
            bsize: 4096,
            namelen: 255,
            frsize: 4096,
            padding: 0,
            spare: [0; 6],
        };
        Self(out.as_bytes().to_vec())
    }

    /// Nothing but that it is done.
    #[must_use]
    pub const fn done() -> Self {
        Self(Vec::new())
    }

    /// As the kernel gets them.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes as _;

    use super::super::request::{FuseOperation, FuseRequest};
    use super::*;

    /// The numbers at these places, of 4 bytes each.
    fn numbers(body: &ReplyBody, places: &[usize]) -> Vec<u32> {
        let at = |place: &usize| u32::read_from_prefix(&body.as_bytes()[*place..]).unwrap().0;
        places.iter().map(at).collect()
    }

    fn offer(minor: u32, flags: u32) -> InitOffer {
        let header = [60, 26, 2, 0, 0, 0, 0, 0, 0, 0];
        let body = [7, minor, 131_072, flags, 0];
        let numbers: Vec<u32> = header.iter().chain(&body).copied().collect();
        let request = FuseRequest::decode(numbers.as_bytes()).unwrap();
        let FuseOperation::Init(offer) = request.operation else {
            panic!("it is another request");
        };
        offer
    }

    /// Places from `linux/fuse.h`.
    #[test]
    fn replies_have_the_layout_of_the_header() {
        let init = ReplyBody::init(&offer(45, !(1 << 30)));
        assert_eq!(init.as_bytes().len(), 64);
        // Version, read-ahead, flags, both numbers of requests, the largest write, pages.
        let expect = [7, 38, 131_072, 1 | 1 << 15 | 1 << 22, u32::MAX, 4096, 1, 256];
        assert_eq!(numbers(&init, &[0, 4, 8, 12, 16, 20, 24, 28]), expect);
        // Not more than the kernel has.
        assert_eq!(numbers(&ReplyBody::init(&offer(36, 1)), &[4, 12]), [36, 1]);

        let attributes = NodeAttributes {
            kind: FileType::RegularFile,
            mode: Mode::RUSR,
            bytes: 1025,
            owner: (3, 4),
        };
        let got = ReplyBody::attributes(NodeNumber::ROOT, &attributes);
        assert_eq!(got.as_bytes().len(), 104);
        // Inode, size, blocks, mode, links, user, group.
        let places = [16, 24, 32, 76, 80, 84, 88];
        assert_eq!(numbers(&got, &places), [1, 1025, 3, 0o100_400, 1, 3, 4]);
        let entry = ReplyBody::entry(NodeNumber(7), &attributes);
        assert_eq!(entry.as_bytes().len(), 128);
        assert_eq!(numbers(&entry, &[0, 40, 48, 100]), [7, 7, 1025, 0o100_400]);

        let opened = ReplyBody::opened(FileHandle(5), Caching::None);
        assert_eq!(numbers(&opened, &[0, 4, 8, 12]), [5, 0, 0x21, 0]);
        let opened = ReplyBody::opened(FileHandle(5), Caching::Pages);
        assert_eq!(numbers(&opened, &[8]), [0x20]);
        let statistics = ReplyBody::statistics(4097);
        assert_eq!(statistics.as_bytes().len(), 80);
        assert_eq!(numbers(&statistics, &[0, 40, 44, 48]), [2, 4096, 255, 4096]);
        assert!(ReplyBody::done().as_bytes().is_empty());
        assert_eq!(usize::from(READ_PAGES) * 4096, READ_MAX);
    }
}
