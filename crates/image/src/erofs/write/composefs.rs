//! The composefs profile, which transforms the tree before the layout.
//!
//! overlayfs makes a file system of the image and a directory of objects. Therefore a file whose bytes are in an
//! object gets the xattrs of a metacopy; overlayfs xattrs and whiteouts of the source are escaped, and overlayfs
//! unescapes them; and real whiteouts hide the object directories `00` to `ff`. Section 3 of
//! `docs/format/erofs-profile.md` has the rules.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::listing::{Listing, SHADOWS, Source};
use super::pair::OverlayNames;
use super::xattrs::{FilePairs, POSIX_ACLS, SetId, Xattrs};
use super::{Version, Versions, WriteError};
use crate::erofs::layout::file_type;
use crate::tree::{Content, External, Inode, InodeId, Metadata, Node, Timestamp, Tree, XattrsId};
use crate::verity::Algorithm;

/// composefs's limit of a file's content in the image, in bytes. `LCFS_INLINE_CONTENT_MAX` in `lcfs-writer.h`.
const INLINE_MAX: usize = 5000;
/// composefs's limit of an inode's xattrs, as it counts them. `LCFS_INODE_EXTERNAL_XATTR_MAX` in `lcfs-writer.h`.
const XATTRS_MAX: u64 = 32767;
/// Binary logarithm of a chunk's size: at least a block, and at most the 2^31 blocks of `CHUNK_BLKBITS_MASK`.
const CHUNK_BITS: std::ops::RangeInclusive<u32> = 12..=43;
/// Maximum number of chunks in a file: the number of 4-byte block numbers in a block.
const CHUNKS_MAX: u64 = 1024;

const SELINUX: &[u8] = b"security.selinux";
/// Xattrs that make a file a whiteout that overlayfs unescapes, with privileges and without.
const WHITEOUT: [(&[u8], &[u8]); 2] =
    [(b"trusted.overlay.overlay.whiteout", b""), (b"user.overlay.whiteout", b"")];
/// Xattrs that mark a directory with such whiteouts; the last two since version 1.
const WHITEOUTS: [(&[u8], &[u8]); 4] = [
    (b"trusted.overlay.overlay.whiteouts", b""),
    (b"user.overlay.whiteouts", b""),
    (b"trusted.overlay.overlay.opaque", b"x"),
    (b"user.overlay.opaque", b"x"),
];

/// An inode of the image, in 16 bytes, because there are many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) source: Source,
    /// Number of data blocks. 32 bits suffice: a directory has less than 2^32 entries of at most 267 bytes each.
    pub(super) blocks: u32,
    /// Bytes of data after the inode.
    pub(super) tail: u16,
    /// Whether the inode has the extended form.
    pub(super) extended: bool,
    /// Whether the inode is a directory with whiteouts.
    whiteouts: bool,
}
const _: () = assert!(size_of::<Item>() == 16);

impl Item {
    const fn new(source: Source) -> Self {
        Self { source, blocks: 0, tail: 0, extended: false, whiteouts: false }
    }
}

/// The data of an inode in the image.
#[derive(Debug, Clone, Copy)]
pub(super) enum Data<'a> {
    Directory,
    Symlink(&'a [u8]),
    Inline(&'a [u8]),
    /// A file of this size that consists of holes.
    Chunks {
        size: u64,
        bits: u32,
        chunks: u64,
    },
    /// A device number.
    Device(u32),
    Nothing,
}

/// The fields and data of an inode in the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) mode: u16,
    pub(super) nlink: u32,
    pub(super) metadata: Metadata,
    pub(super) data: Data<'a>,
    /// Whether the source states a size of 4 GiB or more for an inode without data.
    pub(super) large: bool,
}

/// Whether the inode is a character device 0:0, which is a whiteout to overlayfs. Images store 32 bits of a device
/// number.
fn is_whiteout(inode: &Inode<'_>) -> bool {
    inode.external().is_none()
        && matches!(inode.node(), Node::CharDevice(number) if device_number(number) == 0)
}

fn device_number(number: u64) -> u32 {
    u32::try_from(number & 0xffff_ffff).expect("masked")
}

/// Every inode of the image, in order, with its xattrs.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    tree: &'a Tree,
    records: OverlayNames,
    pub(super) version: Version,
    /// The inodes breadth first from the root, each at the position of the name that owns it.
    pub(super) items: Vec<Item>,
    /// The modification time of compact inodes.
    pub(super) earliest: Timestamp,
    pub(super) xattrs: Xattrs<'a>,
    pub(super) has_acl: bool,
    /// The image's xattr sets by the tree's; [`SetId::UNKNOWN`] until they are made.
    plain: Vec<SetId>,
    /// Sets to which xattrs were added.
    special: BTreeMap<(XattrsId, Role), SetId>,
}

/// The role of an inode, which determines the xattrs that are added, besides those of external files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Plain,
    Whiteout,
    HasWhiteouts,
    Root { whiteouts: bool },
    Shadow,
}

impl<'a> Survey<'a> {
    pub(super) fn of(
        tree: &'a Tree,
        versions: Versions,
        records: OverlayNames,
    ) -> Result<Self, WriteError> {
        let mut survey = Self {
            tree,
            records,
            version: versions.min,
            items: Vec::with_capacity(tree.inode_count() + SHADOWS.len()),
            earliest: tree.root().metadata().mtime,
            xattrs: Xattrs::new(tree, records),
            has_acl: false,
            plain: vec![SetId::UNKNOWN; tree.xattrs_bound()],
            special: BTreeMap::new(),
        };
        if survey.list() && versions.max >= Version::V1 {
            survey.version = Version::V1;
        }
        survey.make_sets()?;
        survey.has_acl = POSIX_ACLS.iter().any(|name| survey.xattrs.has_name(name));
        let Self { items, xattrs, .. } = &mut survey;
        let files = items.iter().filter_map(|item| file_pairs(tree, item.source));
        xattrs.share(files).ok_or(WriteError::TooLarge("4 GiB of shared xattrs"))?;
        Ok(survey)
    }

    /// Finds the inodes, and returns whether there is a whiteout among them.
    fn list(&mut self) -> bool {
        let mut any = false;
        self.items.push(Item::new(Source::Tree(InodeId::ROOT)));
        let mut at = 0;
        while at < self.items.len() {
            if let Source::Tree(id) = self.items[at].source {
                let inode = self.tree.inode(id);
                self.earliest = self.earliest.min(inode.metadata().mtime);
                if inode.is_directory() {
                    let mut whiteouts = false;
                    for entry in survey_listing(&inode, self.records).filter(|entry| entry.owns) {
                        self.items.push(Item::new(entry.source));
                        whiteouts |= match entry.source {
                            Source::Tree(id) => is_whiteout(&self.tree.inode(id)),
                            Source::Shadow(_) => false,
                        };
                    }
                    self.items[at].whiteouts = whiteouts;
                    any |= whiteouts;
                }
            }
            at += 1;
        }
        any
    }

    fn make_sets(&mut self) -> Result<(), WriteError> {
        for at in 0..self.items.len() {
            let item = self.items[at];
            let (xattrs, role) = self.role(&item);
            let set = match self.find_set(xattrs, role) {
                Some(set) => set,
                None => self.make_set(&item, xattrs, role)?,
            };
            self.xattrs.count(set);
            if let Source::Tree(id) = item.source {
                let inode = self.tree.inode(id);
                if let Some(external) = inode.external() {
                    self.check_external(&inode, external)?;
                    self.xattrs.count_file(FilePairs::of(external));
                } else if let Node::Regular(Content::Inline(bytes)) = inode.node()
                    && bytes.len() > INLINE_MAX
                {
                    let (path, size) = (inode.path(), bytes.len() as u64);
                    return Err(WriteError::InlineTooLarge { path, size });
                }
            }
        }
        Ok(())
    }

    fn role(&self, item: &Item) -> (XattrsId, Role) {
        match item.source {
            Source::Shadow(_) => (self.tree.root().xattrs_id(), Role::Shadow),
            Source::Tree(id) => {
                let inode = self.tree.inode(id);
                let role = match item.whiteouts {
                    whiteouts if id == InodeId::ROOT => Role::Root { whiteouts },
                    true => Role::HasWhiteouts,
                    false if is_whiteout(&inode) => Role::Whiteout,
                    false => Role::Plain,
                };
                (inode.xattrs_id(), role)
            }
        }
    }

    fn find_set(&self, xattrs: XattrsId, role: Role) -> Option<SetId> {
        match role {
            Role::Plain => Some(self.plain[xattrs.index()]).filter(|set| *set != SetId::UNKNOWN),
            _ => self.special.get(&(xattrs, role)).copied(),
        }
    }

    /// Returns the set of an inode's xattrs without its [`FilePairs`].
    pub(super) fn set_of(&self, item: &Item) -> SetId {
        let (xattrs, role) = self.role(item);
        self.find_set(xattrs, role).expect("sets were made for all items")
    }

    fn make_set(&mut self, item: &Item, xattrs: XattrsId, role: Role) -> Result<SetId, WriteError> {
        let mut set = Draft::default();
        let original = self.tree.xattrs(xattrs);
        if role == Role::Shadow {
            set.pairs.extend(
                original.filter(|(name, _)| *name == SELINUX).map(|(n, v)| (Cow::Borrowed(n), v)),
            );
        } else {
            let bytes = account(original.clone());
            if bytes > XATTRS_MAX {
                return Err(WriteError::XattrSpace { path: self.path(item), bytes });
            }
            set.pairs.extend(original.map(|(name, value)| (escape(name, self.records), value)));
        }
        let mark = match self.version {
            Version::V0 => &WHITEOUTS[..2],
            Version::V1 => &WHITEOUTS[..],
        };
        let opaque: &[(&'static [u8], &'static [u8])] = &[(self.records.opaque, b"y")];
        let added: &[&[(&'static [u8], &'static [u8])]] = match role {
            Role::Plain | Role::Shadow => &[],
            Role::Whiteout => &[&WHITEOUT],
            Role::HasWhiteouts => &[mark],
            Role::Root { whiteouts: false } => &[opaque],
            Role::Root { whiteouts: true } => &[mark, opaque],
        };
        for (name, value) in added.iter().copied().flatten() {
            set.put(name, value).map_err(|Refused| WriteError::XattrInTheWay {
                path: self.path(item),
                name: name.to_vec(),
            })?;
        }
        let id = self.xattrs.add(set.pairs).ok_or(WriteError::TooLarge("2^32 xattrs"))?;
        match role {
            Role::Plain => self.plain[xattrs.index()] = id,
            _ => {
                self.special.insert((xattrs, role), id);
            }
        }
        Ok(id)
    }

    /// Refuses a file that the image cannot represent.
    fn check_external(&self, inode: &Inode<'_>, external: External) -> Result<(), WriteError> {
        if chunks_of(external.size).1 > CHUNKS_MAX {
            return Err(WriteError::FileTooLarge { path: inode.path(), size: external.size });
        }
        let digest = external.object.map(|object| self.tree.string(object));
        if digest.is_some_and(|digest| digest.len() != Algorithm::Sha256.digest_len()) {
            return Err(WriteError::ObjectAlgorithm { path: inode.path() });
        }
        // C counts the xattrs that it adds itself separately.
        let (metacopy, redirect) = FilePairs::of(external).value_lengths(self.tree);
        let header = if inode.xattrs().len() == 0 { XATTRS_HEADER } else { 0 };
        let bytes = header
            + account_pair(self.records.metacopy, metacopy)
            + redirect.map_or(0, |value| account_pair(self.records.redirect, value));
        if bytes > XATTRS_MAX {
            return Err(WriteError::XattrSpace { path: inode.path(), bytes });
        }
        Ok(())
    }

    pub(super) fn path(&self, item: &Item) -> Vec<u8> {
        match item.source {
            Source::Tree(id) => self.tree.inode(id).path(),
            Source::Shadow(byte) => [b"/", &SHADOWS[usize::from(byte)].1[..]].concat(),
        }
    }

    pub(super) fn file_pairs(&self, item: &Item) -> Option<FilePairs> {
        file_pairs(self.tree, item.source)
    }

    pub(super) fn facts(&self, source: Source) -> Facts<'a> {
        match source {
            Source::Tree(id) => facts_of(&self.tree.inode(id)),
            Source::Shadow(_) => {
                let metadata = Metadata { permissions: 0o644, ..self.tree.root().metadata() };
                let mode = Node::CharDevice(0).type_bits() | metadata.permissions;
                Facts { mode, nlink: 1, metadata, data: Data::Device(0), large: false }
            }
        }
    }

    /// Returns the file type in dirents.
    pub(super) fn file_type(&self, source: Source) -> u8 {
        match source {
            Source::Tree(id) => file_type_of(&self.tree.inode(id)),
            Source::Shadow(_) => file_type::CHAR_DEVICE,
        }
    }

    pub(super) fn listing(&self, source: Source) -> Listing<'a> {
        match source {
            Source::Tree(id) => survey_listing(&self.tree.inode(id), self.records),
            Source::Shadow(_) => unreachable!("a shadow is not a directory"),
        }
    }
}

/// Lists a directory. Only root's overlays may have to hide objects: overlayfs itself hides them since Linux 6.5, and
/// overlays of users need a newer kernel than that.
fn survey_listing<'a>(directory: &Inode<'a>, records: OverlayNames) -> Listing<'a> {
    if records == OverlayNames::TRUSTED {
        Listing::of(directory)
    } else {
        Listing::plain(directory)
    }
}

/// Returns the name in the image of a source's xattr.
fn escape(name: &[u8], records: OverlayNames) -> Cow<'_, [u8]> {
    match name.strip_prefix(records.overlay) {
        Some(rest) => Cow::Owned([records.escaped, rest].concat()),
        None => Cow::Borrowed(name),
    }
}

/// Bytes that composefs counts for an inode with xattrs: their header.
const XATTRS_HEADER: u64 = 12;

/// Returns the bytes that composefs counts for an xattr: the entry and the maximum padding.
const fn account_pair(name: &[u8], value_len: usize) -> u64 {
    (7 + name.len() + value_len) as u64
}

fn account<'a>(pairs: impl ExactSizeIterator<Item = (&'a [u8], &'a [u8])>) -> u64 {
    let header = if pairs.len() == 0 { 0 } else { XATTRS_HEADER };
    header + pairs.map(|(name, value)| account_pair(name, value.len())).sum::<u64>()
}

/// A set of xattrs to which the profile's xattrs are added.
#[derive(Debug, Default)]
struct Draft<'a> {
    pairs: Vec<(Cow<'a, [u8]>, &'a [u8])>,
    /// The counted bytes of the added xattrs, less those of the replaced ones.
    added: u64,
}

struct Refused;

impl<'a> Draft<'a> {
    /// Adds a pair, or replaces the value of an existing one.
    ///
    /// C counts an inode's xattrs again from 0 for those that the profile adds, in an unsigned number. If a replaced
    /// value is longer than all xattrs added before, C therefore refuses the inode, and so does this function. An
    /// exception is a value that is the only xattr, because the count then starts with it.
    fn put(&mut self, name: &'static [u8], value: &'static [u8]) -> Result<(), Refused> {
        let new = account_pair(name, value.len());
        let is_only = self.pairs.len() == 1;
        if let Some((_, there)) = self.pairs.iter_mut().find(|(other, _)| **other == *name) {
            let old = account_pair(name, there.len());
            self.added = match (self.added + new).checked_sub(old) {
                _ if is_only => XATTRS_HEADER + new,
                Some(added) => added,
                None => return Err(Refused),
            };
            *there = value;
        } else {
            let header = if self.pairs.is_empty() { XATTRS_HEADER } else { 0 };
            self.added += header + new;
            self.pairs.push((Cow::Borrowed(name), value));
        }
        Ok(())
    }
}

fn file_pairs(tree: &Tree, source: Source) -> Option<FilePairs> {
    match source {
        Source::Tree(id) => tree.inode(id).external().map(FilePairs::of),
        Source::Shadow(_) => None,
    }
}

/// Returns the binary logarithm of the chunk size, and the number of chunks, for a file of `size` bytes.
fn chunks_of(size: u64) -> (u32, u64) {
    let bits =
        (u64::BITS - (size - 1).leading_zeros()).clamp(*CHUNK_BITS.start(), *CHUNK_BITS.end());
    (bits, size.div_ceil(1 << bits))
}

fn facts_of<'a>(inode: &Inode<'a>) -> Facts<'a> {
    let mut facts = Facts {
        mode: inode.mode(),
        nlink: inode.nlink(),
        metadata: inode.metadata(),
        data: Data::Nothing,
        large: inode.has_large_stated_size(),
    };
    facts.data = if let Some(External { size, .. }) = inode.external() {
        let (bits, chunks) = chunks_of(size);
        Data::Chunks { size, bits, chunks }
    } else {
        match inode.node() {
            Node::Directory => Data::Directory,
            Node::Regular(Content::Inline(bytes)) if !bytes.is_empty() => Data::Inline(bytes),
            Node::Symlink(target) => Data::Symlink(target),
            Node::CharDevice(number) if device_number(number) == 0 => {
                facts.mode =
                    Node::Regular(Content::Inline(&[])).type_bits() | facts.metadata.permissions;
                facts.large = false;
                Data::Nothing
            }
            Node::CharDevice(number) | Node::BlockDevice(number) => {
                Data::Device(device_number(number))
            }
            Node::Regular(_) | Node::Fifo | Node::Socket => Data::Nothing,
        }
    };
    facts
}

/// Returns the file type in dirents. An escaped whiteout is a regular file.
fn file_type_of(inode: &Inode<'_>) -> u8 {
    if inode.external().is_some() {
        return file_type::REGULAR;
    }
    match inode.node() {
        Node::Directory => file_type::DIRECTORY,
        Node::Regular(_) => file_type::REGULAR,
        Node::CharDevice(number) if device_number(number) == 0 => file_type::REGULAR,
        Node::CharDevice(_) => file_type::CHAR_DEVICE,
        Node::BlockDevice(_) => file_type::BLOCK_DEVICE,
        Node::Fifo => file_type::FIFO,
        Node::Socket => file_type::SOCKET,
        Node::Symlink(_) => file_type::SYMLINK,
    }
}
