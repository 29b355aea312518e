//! Requests of the kernel to a server: decodes bytes into a request, or into an error with the offending values.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::ffi::CStr;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::layout::{
    AccessIn, BatchForgetIn, ForgetIn, ForgetOne, GETATTR_FH, GetattrIn, GetxattrIn, HAS_RESEND,
    HandleIn, INIT_EXT, InHeader, InitIn, InterruptIn, MINOR_LEAST, OpenIn, ReadIn, VERSION,
    opcode,
};

/// A request of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FuseRequest<'a> {
    /// Number by which the reply identifies the request.
    pub unique: Unique,
    /// File or directory of the request.
    pub node: NodeNumber,
    /// User, group and thread of the request, all 0 in requests of the kernel itself.
    pub from: Requester,
    pub operation: FuseOperation<'a>,
}

/// The number of a request, unique until the request has a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unique(pub u64);

/// The number of a file or directory. The root has [`NodeNumber::ROOT`]; the server chooses the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeNumber(pub u64);

impl NodeNumber {
    /// The root of a file system.
    pub const ROOT: Self = Self(super::layout::ROOT);
}

/// The number that a server assigned to an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileHandle(pub u64);

/// The user and thread of a request, as ids in the namespaces of the process that made the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requester {
    /// User id.
    pub user: u32,
    /// Group id.
    pub group: u32,
    /// Thread id.
    pub thread: u32,
}

/// An operation that the kernel requests.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FuseOperation<'a> {
    /// Starts the connection.
    Init(InitOffer),
    /// Looks up a name in a directory.
    Lookup(&'a CStr),
    /// The kernel forgets this many lookups of the node. It has no reply.
    Forget(u64),
    /// The kernel forgets lookups of several nodes. It has no reply.
    ForgetSeveral(Forgotten<'a>),
    /// Reads attributes, optionally of an open file.
    GetAttributes(Option<FileHandle>),
    /// Reads the target of a symbolic link.
    ReadLink,
    /// Opens a file, with the flags of open(2).
    Open(u32),
    /// Reads data of an open file.
    Read {
        handle: FileHandle,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes. A shorter reply means that the file ends there.
        size: u32,
    },
    /// Lists a directory.
    ReadDirectory {
        /// Offset of the first entry to return, which is the `next` of the entry before it; 0 at the start.
        offset: u64,
        /// Maximum size of the reply, in bytes.
        size: u32,
        /// Whether the reply also contains the attributes of all entries.
        attributes: bool,
    },
    /// Reads the value of an xattr.
    GetXattr {
        name: &'a CStr,
        /// Maximum size of the reply in bytes; 0 to ask for the length of the value.
        size: u32,
    },
    /// Lists the names of all xattrs, each with a NUL. The number is the maximum size as for a value.
    ListXattrs(u32),
    /// A descriptor of an open file was closed.
    Flush(FileHandle),
    /// The last descriptor of an open file was closed.
    Release(FileHandle),
    /// Reads the values of statfs(2).
    Statistics,
    /// Checks the requester's permissions, with the mode of access(2).
    Access(u32),
    /// A signal interrupted the process that waits for this request. It has no reply.
    Interrupt(Unique),
    /// Ends the connection.
    Destroy,
    /// Another operation, by its opcode.
    Other(u32),
}

impl FuseOperation<'_> {
    /// Whether the kernel waits for a reply.
    #[must_use]
    pub const fn has_reply(&self) -> bool {
        !matches!(self, Self::Forget(_) | Self::ForgetSeveral(_) | Self::Interrupt(_))
    }
}

/// The features that the kernel supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitOffer {
    /// Minor version of the kernel's protocol, 7.`minor`.
    pub minor: u32,
    /// Maximum read-ahead in bytes.
    pub readahead: u32,
    pub(super) flags: u64,
}

impl InitOffer {
    /// Whether the kernel can resend requests that another server has taken (since Linux 6.9).
    #[must_use]
    pub const fn resends(&self) -> bool {
        self.flags & HAS_RESEND != 0
    }
}

/// An iterator over nodes, each with the number of lookups that the kernel forgets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forgotten<'a>(&'a [u8]);

impl Iterator for Forgotten<'_> {
    type Item = (NodeNumber, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let (one, rest) = ForgetOne::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some((NodeNumber(one.nodeid), one.nlookup))
    }
}

/// The bytes are not a valid request. The kernel sends no such bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FuseRequestError {
    /// The bytes are shorter than a header.
    #[error("a FUSE request of {0} bytes has no header")]
    Header(usize),
    /// The header contains another length.
    #[error("a FUSE request of {actual} bytes states a length of {says} bytes")]
    Length {
        unique: Unique,
        /// Length in the header, in bytes.
        says: u32,
        /// Number of bytes received.
        actual: usize,
    },
    /// The body is shorter than the operation's structure.
    #[error("a FUSE request of kind {opcode} is too short: {bytes} bytes follow its header")]
    Short {
        unique: Unique,
        opcode: u32,
        /// Number of bytes after the header.
        bytes: usize,
    },
    /// A name has no NUL at its end, or one before its end.
    #[error("a FUSE request of kind {opcode} has no name")]
    Name { unique: Unique, opcode: u32 },
    /// The kernel uses an unsupported version of the protocol.
    #[error(
        "the kernel's FUSE protocol has version {major}.{minor}, but 7.{MINOR_LEAST} or later \
        is needed"
    )]
    Version { unique: Unique, major: u32, minor: u32 },
}

impl FuseRequestError {
    /// Returns the number of the request, to which a reply can be sent.
    #[must_use]
    pub const fn unique(&self) -> Option<Unique> {
        match self {
            Self::Header(_) => None,
            Self::Length { unique, .. }
            | Self::Short { unique, .. }
            | Self::Name { unique, .. }
            | Self::Version { unique, .. } => Some(*unique),
        }
    }
}

impl<'a> FuseRequest<'a> {
    /// Decodes the bytes of one read of `/dev/fuse`.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FuseRequestError> {
        let (header, body) =
            InHeader::read_from_prefix(bytes).or(Err(FuseRequestError::Header(bytes.len())))?;
        let unique = Unique(header.unique);
        if usize::try_from(header.len) != Ok(bytes.len()) {
            let (says, actual) = (header.len, bytes.len());
            return Err(FuseRequestError::Length { unique, says, actual });
        }
        let from = Requester { user: header.uid, group: header.gid, thread: header.pid };
        let operation = Body { unique, opcode: header.opcode, bytes: body }.operation()?;
        Ok(Self { unique, node: NodeNumber(header.nodeid), from, operation })
    }
}

/// A request's bytes after the header, with the header's opcode and number.
struct Body<'a> {
    unique: Unique,
    opcode: u32,
    bytes: &'a [u8],
}

impl<'a> Body<'a> {
    fn operation(&self) -> Result<FuseOperation<'a>, FuseRequestError> {
        Ok(match self.opcode {
            opcode::INIT => FuseOperation::Init(self.init()?),
            opcode::LOOKUP => FuseOperation::Lookup(self.name_in(self.bytes)?),
            opcode::FORGET => FuseOperation::Forget(self.start::<ForgetIn>()?.0.nlookup),
            opcode::BATCH_FORGET => FuseOperation::ForgetSeveral(self.forgotten()?),
            opcode::GETATTR => {
                let (asked, _) = self.start::<GetattrIn>()?;
                let has_handle = asked.getattr_flags & GETATTR_FH != 0;
                FuseOperation::GetAttributes(has_handle.then_some(FileHandle(asked.fh)))
            }
            opcode::OPEN => FuseOperation::Open(self.start::<OpenIn>()?.0.flags),
            opcode::READ => {
                let (asked, _) = self.start::<ReadIn>()?;
                let handle = FileHandle(asked.fh);
                FuseOperation::Read { handle, offset: asked.offset, size: asked.size }
            }
            opcode::READLINK => FuseOperation::ReadLink,
            opcode::READDIR | opcode::READDIRPLUS => {
                let (asked, _) = self.start::<ReadIn>()?;
                let attributes = self.opcode == opcode::READDIRPLUS;
                let (offset, size) = (asked.offset, asked.size);
                FuseOperation::ReadDirectory { offset, size, attributes }
            }
            opcode::GETXATTR => {
                let (asked, name) = self.start::<GetxattrIn>()?;
                FuseOperation::GetXattr { name: self.name_in(name)?, size: asked.size }
            }
            opcode::LISTXATTR => FuseOperation::ListXattrs(self.start::<GetxattrIn>()?.0.size),
            opcode::FLUSH => FuseOperation::Flush(self.handle()?),
            opcode::RELEASE => FuseOperation::Release(self.handle()?),
            opcode::STATFS => FuseOperation::Statistics,
            opcode::ACCESS => FuseOperation::Access(self.start::<AccessIn>()?.0.mask),
            opcode::INTERRUPT => {
                FuseOperation::Interrupt(Unique(self.start::<InterruptIn>()?.0.unique))
            }
            opcode::DESTROY => FuseOperation::Destroy,
            other => FuseOperation::Other(other),
        })
    }

    fn start<T: FromBytes + KnownLayout + Immutable>(
        &self,
    ) -> Result<(T, &'a [u8]), FuseRequestError> {
        T::read_from_prefix(self.bytes).or(Err(FuseRequestError::Short {
            unique: self.unique,
            opcode: self.opcode,
            bytes: self.bytes.len(),
        }))
    }

    fn handle(&self) -> Result<FileHandle, FuseRequestError> {
        Ok(FileHandle(self.start::<HandleIn>()?.0.fh))
    }

    fn name_in(&self, bytes: &'a [u8]) -> Result<&'a CStr, FuseRequestError> {
        let (unique, opcode) = (self.unique, self.opcode);
        CStr::from_bytes_with_nul(bytes).or(Err(FuseRequestError::Name { unique, opcode }))
    }

    fn init(&self) -> Result<InitOffer, FuseRequestError> {
        let (offer, _) = self.start::<InitIn>()?;
        let (unique, major, minor) = (self.unique, offer.major, offer.minor);
        if major != VERSION || minor < MINOR_LEAST {
            return Err(FuseRequestError::Version { unique, major, minor });
        }
        let more = if offer.flags & INIT_EXT == 0 { 0 } else { offer.flags2 };
        let flags = u64::from(offer.flags) | u64::from(more) << 32;
        Ok(InitOffer { minor, readahead: offer.max_readahead, flags })
    }

    fn forgotten(&self) -> Result<Forgotten<'a>, FuseRequestError> {
        let (head, rest) = self.start::<BatchForgetIn>()?;
        let bytes = usize::try_from(head.count).ok();
        let bytes = bytes.and_then(|it| it.checked_mul(size_of::<ForgetOne>()));
        let forgotten = bytes.and_then(|it| rest.get(..it));
        forgotten.map(Forgotten).ok_or(FuseRequestError::Short {
            unique: self.unique,
            opcode: self.opcode,
            bytes: self.bytes.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;

    use super::*;

    /// Makes a request with a header of 40 bytes and the given body.
    fn bytes(opcode: u32, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(body.len().saturating_add(40)).unwrap();
        [&halves(&[len, opcode]), &words(&[6, 1]), &halves(&[10, 20, 30, 0]), body].concat()
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.as_bytes().to_vec()
    }

    fn halves(halves: &[u32]) -> Vec<u8> {
        halves.as_bytes().to_vec()
    }

    fn operation(opcode: u32, body: &[u8], check: impl FnOnce(FuseOperation<'_>)) {
        let bytes = bytes(opcode, body);
        let request = FuseRequest::decode(&bytes).unwrap();
        assert_eq!((request.unique, request.node), (Unique(6), NodeNumber::ROOT));
        assert_eq!(request.from, Requester { user: 10, group: 20, thread: 30 });
        check(request.operation);
    }

    #[test]
    fn requests_have_the_layout_of_the_header() {
        let is = |expect: FuseOperation<'static>| {
            move |actual: FuseOperation<'_>| assert_eq!(actual, expect)
        };
        operation(1, b"name\0", is(FuseOperation::Lookup(c"name")));
        operation(2, &words(&[3]), is(FuseOperation::Forget(3)));
        operation(3, &words(&[1, 9]), is(FuseOperation::GetAttributes(Some(FileHandle(9)))));
        operation(3, &words(&[0, 9]), is(FuseOperation::GetAttributes(None)));
        operation(14, &halves(&[0o100_000, 0]), is(FuseOperation::Open(0o100_000)));
        let read = [words(&[9, 4096]), halves(&[65_536, 0]), words(&[0, 0])].concat();
        let handle = FileHandle(9);
        operation(15, &read, is(FuseOperation::Read { handle, offset: 4096, size: 65_536 }));
        for (opcode, attributes) in [(28, false), (44, true)] {
            let (offset, size) = (4096, 65_536);
            operation(opcode, &read, is(FuseOperation::ReadDirectory { offset, size, attributes }));
        }
        operation(5, &[], is(FuseOperation::ReadLink));
        let named = [&halves(&[32, 0])[..], b"user.x\0"].concat();
        operation(22, &named, is(FuseOperation::GetXattr { name: c"user.x", size: 32 }));
        operation(23, &halves(&[0, 0]), is(FuseOperation::ListXattrs(0)));
        operation(17, &[], is(FuseOperation::Statistics));
        operation(18, &words(&[9, 0, 0]), is(FuseOperation::Release(handle)));
        operation(25, &words(&[9, 0, 0]), is(FuseOperation::Flush(handle)));
        operation(34, &halves(&[4, 0]), is(FuseOperation::Access(4)));
        operation(36, &words(&[8]), is(FuseOperation::Interrupt(Unique(8))));
        operation(38, &[], is(FuseOperation::Destroy));
        operation(51, b"anything", is(FuseOperation::Other(51)));
        let forgotten = [halves(&[2, 0]), words(&[5, 1, 6, 2])].concat();
        operation(42, &forgotten, |it| {
            let FuseOperation::ForgetSeveral(forgotten) = it else { panic!("{it:?}") };
            let expect = [(NodeNumber(5), 1), (NodeNumber(6), 2)];
            assert_eq!(forgotten.collect::<Vec<_>>(), expect);
        });
        // Linux 6.18 sends version 7.45 and more fields after the flags.
        let init = halves(&[7, 45, 131_072, 1 << 30 | 1, 1 << 7, 0, 0]);
        operation(26, &init, |it| {
            let FuseOperation::Init(offer) = it else { panic!("{it:?}") };
            assert_eq!((offer.minor, offer.readahead, offer.resends()), (45, 131_072, true));
        });
        // Without FUSE_INIT_EXT the second flags are unused bytes.
        operation(26, &halves(&[7, 36, 0, 1, 1 << 7]), |it| {
            let FuseOperation::Init(offer) = it else { panic!("{it:?}") };
            assert!(!offer.resends());
        });
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let unique = Unique(6);
        let refused = |bytes: &[u8]| FuseRequest::decode(bytes).unwrap_err();
        assert_eq!(refused(&[0; 39]), FuseRequestError::Header(39));
        let whole = bytes(17, &[]);
        let (says, actual) = (40, 41);
        assert_eq!(
            refused(&[&whole[..], &[0]].concat()),
            FuseRequestError::Length { unique, says, actual }
        );
        for opcode in [2, 3, 14, 15, 18, 22, 23, 25, 26, 28, 34, 36, 42, 44] {
            let short = FuseRequestError::Short { unique, opcode, bytes: 7 };
            assert_eq!(refused(&bytes(opcode, &[0; 7])), short, "{opcode}");
        }
        // The count is one more than the number of entries.
        let forgotten = [halves(&[2, 0]), words(&[5, 1])].concat();
        let short = FuseRequestError::Short { unique, opcode: 42, bytes: 24 };
        assert_eq!(refused(&bytes(42, &forgotten)), short);
        for name in [&b"name"[..], b"na\0me\0", b""] {
            assert_eq!(refused(&bytes(1, name)), FuseRequestError::Name { unique, opcode: 1 });
            let named = [&halves(&[32, 0])[..], name].concat();
            assert_eq!(refused(&bytes(22, &named)), FuseRequestError::Name { unique, opcode: 22 });
        }
        for (major, minor) in [(8, 45), (7, 30)] {
            let version = FuseRequestError::Version { unique, major, minor };
            assert_eq!(refused(&bytes(26, &halves(&[major, minor, 0, 0, 0]))), version);
        }
        assert_eq!(refused(&bytes(1, b"")).unique(), Some(unique));
    }

    #[test]
    fn only_what_the_kernel_waits_for_has_a_reply() {
        let forgotten = FuseOperation::ForgetSeveral(Forgotten(&[]));
        for it in [FuseOperation::Forget(1), forgotten, FuseOperation::Interrupt(Unique(2))] {
            assert!(!it.has_reply(), "{it:?}");
        }
        assert!(FuseOperation::Destroy.has_reply() && FuseOperation::Other(99).has_reply());
    }
}
