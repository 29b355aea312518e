//! Converts an image to a tree.

use std::borrow::Cow;
use std::sync::atomic::AtomicBool;

use hashbrown::HashSet;

use super::error::{ErofsCorruption, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::native_files::FileConversion;
use super::source::ReadAt;
use super::walk::{Budget, Step, kept_bound, unpacked_bound, work_bound};
use super::xattr::{InodeXattrs, Xattr};
use super::{ByteOffset, Image, to_u64, to_usize};
use crate::erofs::layout::XATTR_PREFIXES;
use crate::tree::{
    Builder, Content, InodeId, Link, Location, Metadata, Node, Tree, TreeError, XattrsId,
};
use crate::verity::ObjectId;

/// The interpretation of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// The root file system from which composefs made the image, as C's `composefs-info` and `composefs-dump` read it.
    /// Redirects and digests become external files, and escaped overlay xattrs and whiteouts are unescaped. The
    /// whiteouts `00` to `ff`, and all other data that is meant for overlayfs, are dropped.
    Composefs(Owners),
    /// The file system that a plain EROFS mount shows. Regular files are external without a location: their bytes are
    /// read with [`Image::read`], by the nids in [`ImageTree::nids`]. xattrs that the kernel does not show are
    /// dropped.
    Plain,
    /// Like `Plain`, for images that become images of Quire again. Fingerprints are dropped, and xattrs of namespaces
    /// that EROFS has no number for are kept: the kernel does not show them, but Quire's exports have them.
    Stored,
}

/// Limits on a conversion to a tree, for an image that may be a sparse file of any length.
#[derive(Debug, Clone, Copy)]
pub struct TreeBounds<'c> {
    /// Maximum number of names, including the root.
    pub names: u64,
    /// Maximum number of bytes of names, xattrs, targets and inline content.
    pub bytes: u64,
    /// Number of bytes that the image occupies on the disk, which limits the bytes of directories: see
    /// [`unpacked_bound`].
    pub stored: u64,
    /// Ends the conversion with [`ReadError::Cancelled`] when another thread sets it.
    pub cancel: &'c AtomicBool,
}

/// The rule that determines which name owns an inode, because a composefs image does not state this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owners {
    /// The first name, depth first: the rule of C's tools.
    FirstMet,
    /// The name that owned the inode when the image was written, so that the writer makes the same image again. It is
    /// determined by the inode's position. If the position does not determine it, the first name is used.
    AsWritten,
}

/// A tree, and values of its image that a tree does not hold.
#[derive(Debug)]
pub struct ImageTree {
    /// The tree.
    pub tree: Tree,
    /// The nid of each inode, by the inode's index in the tree.
    pub nids: Vec<Nid>,
    /// The size in bytes of each inode in the image. A tree does not hold the size of directories.
    pub sizes: Vec<u64>,
}

/// Maximum size in bytes of a file inside a composefs image. Source: `LCFS_INLINE_CONTENT_MAX` in composefs
/// `libcomposefs/lcfs-writer.h`.
pub(super) const INLINE_CONTENT_MAX: u64 = 5000;

/// Most nanoseconds of a time.
const NANOSECONDS_MAX: u32 = 999_999_999;

const OVERLAY: &[u8] = b"trusted.overlay.";
const ESCAPED: &[u8] = b"trusted.overlay.overlay.";
const METACOPY: &[u8] = b"trusted.overlay.metacopy";
const REDIRECT: &[u8] = b"trusted.overlay.redirect";
const ESCAPED_WHITEOUT: &[u8] = b"trusted.overlay.overlay.whiteout";
/// Further xattrs that mark a whiteout and its directory.
const MARKS: [&[u8]; 3] =
    [b"trusted.overlay.overlay.whiteouts", b"user.overlay.whiteout", b"user.overlay.whiteouts"];

/// Makes a tree from an image.
///
/// # Errors
/// [`ReadError`] if the image is invalid, unsupported or cannot be read; [`ReadError::NotComposefs`]; or
/// [`ErofsCorruption::Tree`] if a tree cannot hold an inode.
pub fn to_tree<S: ReadAt>(image: &Image<S>, view: View) -> Result<ImageTree, ReadError> {
    if let View::Composefs(_) = view {
        image.superblock().composefs.ok_or(ReadError::NotComposefs)?.check()?;
    }
    Reader::new(image, view, None).read(None)
}

/// Like [`to_tree`], with limits besides those that the image's length sets. Times that tars and dumps cannot state are
/// corrupt, although the kernel shows them.
///
/// # Errors
/// As [`to_tree`], [`ReadError::Names`], [`ReadError::Cancelled`] and [`ErofsCorruption::Nanoseconds`].
pub fn to_tree_within<'i, S: ReadAt>(
    image: &'i Image<S>,
    view: View,
    bounds: TreeBounds<'i>,
) -> Result<ImageTree, ReadError> {
    if let View::Composefs(_) = view {
        image.superblock().composefs.ok_or(ReadError::NotComposefs)?.check()?;
    }
    let mut reader = Reader::new(image, view, None);
    if view == View::Stored {
        reader.fingerprint = image.fingerprint_name()?.unwrap_or_default();
    }
    reader.read(Some(bounds))
}

#[derive(Debug)]
pub(super) struct Reader<'i, S> {
    image: &'i Image<S>,
    view: View,
    /// The files of an image over devices, which has the plain view.
    native: Option<FileConversion<'i>>,
    builder: Builder,
    /// The inode in the tree for each step's number; `None` for whiteouts, which are left out.
    ids: Vec<Option<InodeId>>,
    pending: Pending,
    nids: Vec<Nid>,
    sizes: Vec<u64>,
    work: Budget,
    /// Ids of the shared xattrs read so far.
    shared: HashSet<u32>,
    xattrs: InodeXattrs,
    /// A symlink's target or inline content.
    bytes: Vec<u8>,
    /// Name of the xattr with a file's fingerprint, which is dropped; empty if there is none.
    fingerprint: Vec<u8>,
}

/// The data that composefs stores in xattrs.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Overlay<'a> {
    pub(super) metacopy: Option<&'a [u8]>,
    redirect: Option<&'a [u8]>,
    pub(super) is_whiteout: bool,
}

impl<'i, S: ReadAt> Reader<'i, S> {
    pub(super) fn new(image: &'i Image<S>, view: View, native: Option<FileConversion<'i>>) -> Self {
        Self {
            image,
            view,
            native,
            builder: Builder::new(),
            ids: Vec::new(),
            pending: Pending::default(),
            nids: Vec::new(),
            sizes: Vec::new(),
            work: Budget::new(work_bound(image.source().len())),
            shared: HashSet::new(),
            xattrs: InodeXattrs::new(),
            bytes: Vec::new(),
            fingerprint: Vec::new(),
        }
    }

    pub(super) fn read(mut self, bounds: Option<TreeBounds<'i>>) -> Result<ImageTree, ReadError> {
        let mut walk = self.image.walk();
        let mut names = u64::MAX;
        if let Some(bounds) = bounds {
            let len = self.image.source().len();
            walk.kept = Budget::new(kept_bound(len).min(bounds.bytes));
            walk.unpacked = Budget::new(unpacked_bound(bounds.stored));
            walk.cancel = Some(bounds.cancel);
            self.work = Budget::new(work_bound(len.min(bounds.bytes / 4)));
            names = bounds.names;
        }
        let mut left = names;
        while let Some(step) = walk.next()? {
            left = left.checked_sub(1).ok_or(ReadError::Names(names))?;
            let (nid, nanoseconds) = (step.inode.nid(), step.inode.mtime().nanoseconds);
            if bounds.is_some() && nanoseconds > NANOSECONDS_MAX {
                return Err(ErofsCorruption::Nanoseconds { nid, nanoseconds }.into());
            }
            let kept = self.step(&step)?;
            walk.kept.spend(kept)?;
        }
        self.finish()
    }

    /// Adds a name, and returns the number of bytes besides the name that it takes from the image.
    fn step(&mut self, step: &Step<'_>) -> Result<u64, ReadError> {
        let (inode, nid) = (&step.inode, step.inode.nid());
        let is_composefs = matches!(self.view, View::Composefs(_));
        if self.view == View::Composefs(Owners::AsWritten) {
            self.pending.push(step);
        }
        if !step.is_new {
            let target = self.ids.get(step.number).copied().flatten();
            if let Some(target) = target {
                self.name(step, target, Link::Equal)?;
            }
            return Ok(0);
        }
        if is_composefs && is_real_whiteout(inode) {
            self.ids.push(None);
            return match inode.nlink() {
                0 | 1 => Ok(0),
                nlink => Err(ErofsCorruption::WhiteoutLinks { nid, nlink }.into()),
            };
        }

        let mut xattrs = std::mem::take(&mut self.xattrs);
        let mut bytes = std::mem::take(&mut self.bytes);
        self.image.read_xattrs(inode, &mut xattrs)?;
        let mut kept = self.charge(inode, &xattrs)?;
        let (set, overlay) = if is_composefs {
            composefs_xattrs(&mut self.builder, inode, &xattrs)
        } else {
            let hidden = self.native.as_ref().map(|files| &files.fingerprint[..]);
            // A native image keeps all of its xattrs, because exports need even xattrs that no mount shows.
            let is_native = hidden.is_some();
            let is_stored = self.view == View::Stored;
            let is_kept = |it: &Xattr<'_>| match is_stored {
                true => is_stored_xattr(it) && it.name != self.fingerprint,
                false => (it.is_visible || is_native) && Some(it.name) != hidden,
            };
            let visible = xattrs.iter().filter(is_kept);
            let set = self.builder.xattrs(visible.map(|xattr| (xattr.name, xattr.value)));
            (set, Overlay::default())
        };
        let set = set.or_corrupt(nid)?;
        let node = self.node(inode, overlay, &xattrs, &mut bytes)?;
        if let Node::Symlink(kept_bytes) | Node::Regular(Content::Inline(kept_bytes)) = node {
            kept = kept.saturating_add(to_u64(kept_bytes.len()));
        }
        let metadata = Metadata {
            permissions: inode.mode() & 0o7777,
            uid: inode.uid(),
            gid: inode.gid(),
            mtime: inode.mtime(),
        };
        let id = if step.number == 0 {
            self.builder.describe(InodeId::ROOT, &metadata, set).or_corrupt(nid)?;
            InodeId::ROOT
        } else {
            self.builder.inode(&metadata, set, node).or_corrupt(nid)?
        };
        if node != Node::Directory {
            self.builder.state_nlink(id, inode.nlink());
        }
        if self.view == View::Composefs(Owners::AsWritten)
            && self.image.is_needlessly_extended(inode)
        {
            // C makes such inodes if a dump states a size of 4 GiB or more, even if files of the inode's type have no
            // size.
            self.builder.state_size(id, 1 << 32);
        }
        debug_assert_eq!(id.index(), self.nids.len(), "the builder numbers inodes in order");
        self.nids.push(nid);
        self.sizes.push(inode.size());
        self.ids.push(Some(id));
        (self.xattrs, self.bytes) = (xattrs, bytes);
        if id != InodeId::ROOT {
            let met = if is_composefs { Link::Owner } else { Link::Equal };
            self.name(step, id, met)?;
        }
        Ok(kept)
    }

    /// Inserts the name of an inode, unless the owner is decided later.
    fn name(&mut self, step: &Step<'_>, target: InodeId, link: Link) -> Result<(), ReadError> {
        if self.view == View::Composefs(Owners::AsWritten) {
            return Ok(());
        }
        let parent = self.ids.get(step.parent).copied().flatten();
        let parent = parent.expect("a directory comes before its entries");
        let inserted = self.builder.insert(parent, step.name, target, link);
        inserted.or_corrupt(step.inode.nid()).map_err(ReadError::from)
    }

    /// Counts the work for an inode's xattrs, and returns the number of their bytes that were not counted before.
    fn charge(&mut self, inode: &Inode, xattrs: &InodeXattrs) -> Result<u64, ErofsCorruption> {
        let count = to_u64(xattrs.len());
        // The tree compares each name of a set with each other.
        let compared = count.saturating_mul(count) / 16;
        self.work.spend(xattrs.bytes().saturating_add(compared))?;
        let shared = xattrs.shared.iter().filter(|(id, _)| self.shared.insert(*id));
        let shared = shared.fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
        Ok(shared.saturating_add(inode.xattrs_size.into()))
    }

    fn node<'a>(
        &mut self,
        inode: &Inode,
        overlay: Overlay<'a>,
        xattrs: &InodeXattrs,
        bytes: &'a mut Vec<u8>,
    ) -> Result<Node<'a>, ReadError> {
        let number = inode.device_number().into();
        Ok(match inode.file_type() {
            FileType::Directory => Node::Directory,
            FileType::CharDevice => Node::CharDevice(number),
            FileType::BlockDevice => Node::BlockDevice(number),
            FileType::Fifo => Node::Fifo,
            FileType::Socket => Node::Socket,
            FileType::Symlink => {
                self.image.read_link_into(inode, bytes)?;
                Node::Symlink(bytes)
            }
            // composefs writes whiteouts as empty files. A file with data is a regular file that has the xattr.
            FileType::Regular if overlay.is_whiteout && inode.size() == 0 => Node::CharDevice(0),
            FileType::Regular => Node::Regular(self.content(inode, overlay, xattrs, bytes)?),
        })
    }

    fn content<'a>(
        &mut self,
        inode: &Inode,
        overlay: Overlay<'a>,
        xattrs: &InodeXattrs,
        bytes: &'a mut Vec<u8>,
    ) -> Result<Content<'a>, ReadError> {
        let (nid, size) = (inode.nid(), inode.size());
        if size == 0 {
            return Ok(Content::Inline(&[]));
        }
        if let Some(files) = &mut self.native {
            return files.content(self.image, inode, xattrs, bytes);
        }
        if matches!(self.view, View::Plain | View::Stored) {
            return Ok(Content::External { size, object: None, location: Location::None });
        }
        if inode.is_chunk_based() {
            let object = match overlay.metacopy {
                None | Some([]) => None,
                Some(metacopy) => Some(object(nid, metacopy)?),
            };
            let location = match overlay.redirect {
                None | Some([]) => Location::None,
                Some([b'/', path @ ..]) if !path.is_empty() => Location::Path(path),
                Some(path) => Location::Path(path),
            };
            return Ok(Content::External { size, object, location });
        }
        if size > INLINE_CONTENT_MAX {
            return Err(ErofsCorruption::InlineContent { nid, size }.into());
        }
        bytes.clear();
        bytes.resize(to_usize(size), 0);
        self.image.read(inode, ByteOffset(0), bytes, &[])?;
        Ok(Content::Inline(bytes))
    }

    fn finish(mut self) -> Result<ImageTree, ReadError> {
        self.pending.insert(&self.ids, &mut self.builder)?;
        Ok(ImageTree { tree: self.builder.finish(), nids: self.nids, sizes: self.sizes })
    }
}

/// Whether an image of Quire may have an xattr of another image. A name with a known prefix that the kernel does not
/// show would become visible, because Quire writes it with its prefix.
fn is_stored_xattr(xattr: &Xattr<'_>) -> bool {
    let has_prefix = XATTR_PREFIXES.iter().any(|(_, prefix)| xattr.name.starts_with(prefix));
    xattr.is_visible || !has_prefix
}

/// Whether an inode is a whiteout that hides an object directory from overlayfs. composefs escapes all other
/// whiteouts.
pub(super) fn is_real_whiteout(inode: &Inode) -> bool {
    inode.file_type() == FileType::CharDevice && inode.device_number() == 0
}

/// Separates the xattrs of a composefs inode into those of the represented file and those for overlayfs.
pub(super) fn sort_xattrs<'a>(
    inode: &Inode,
    xattrs: &'a InodeXattrs,
    mut of_file: impl FnMut(Cow<'a, [u8]>, &'a [u8]),
) -> Overlay<'a> {
    let is_regular = inode.file_type() == FileType::Regular;
    let mut overlay = Overlay::default();
    for Xattr { name, value, .. } in xattrs.iter() {
        match name {
            REDIRECT => overlay.redirect = Some(value),
            METACOPY => overlay.metacopy = Some(value),
            ESCAPED_WHITEOUT if is_regular => overlay.is_whiteout = true,
            _ if MARKS.contains(&name) => {}
            _ => match name.strip_prefix(ESCAPED) {
                Some(rest) => of_file(Cow::Owned([OVERLAY, rest].concat()), value),
                None if name.starts_with(OVERLAY) => {}
                None => of_file(Cow::Borrowed(name), value),
            },
        }
    }
    overlay
}

fn composefs_xattrs<'a>(
    builder: &mut Builder,
    inode: &Inode,
    xattrs: &'a InodeXattrs,
) -> (Result<XattrsId, TreeError>, Overlay<'a>) {
    let mut set: Vec<(Cow<'_, [u8]>, &[u8])> = Vec::with_capacity(xattrs.len());
    let overlay = sort_xattrs(inode, xattrs, |name, value| set.push((name, value)));
    (builder.xattrs(set.iter().map(|(name, value)| (&name[..], *value))), overlay)
}

/// Parses the digest in a `trusted.overlay.metacopy`: version 0, total length, flags 0, algorithm, digest. Source:
/// Linux `fs/overlayfs/overlayfs.h`, `struct ovl_metacopy`.
pub(super) fn object(nid: Nid, metacopy: &[u8]) -> Result<ObjectId, ErofsCorruption> {
    let wrong = ErofsCorruption::Metacopy { nid, len: metacopy.len() };
    let Some((&[0, len, 0, algorithm], digest)) = metacopy.split_first_chunk::<4>() else {
        return Err(wrong);
    };
    let object = ObjectId::from_bytes(digest).ok().filter(|object| {
        usize::from(len) == metacopy.len() && object.algorithm().kernel_id() == algorithm
    });
    object.ok_or(wrong)
}

/// Names that are inserted after the owners of all inodes are known. Inodes are identified by the numbers of steps.
#[derive(Debug, Default)]
struct Pending {
    links: Vec<PendingLink>,
    names: Vec<u8>,
    /// The nids of all inodes, including whiteouts that are left out later.
    nids: Vec<Nid>,
}

#[derive(Debug, Clone, Copy)]
struct PendingLink {
    parent: usize,
    target: usize,
    /// End of the name in `Pending::names`, which is the start of the next name.
    name_end: usize,
}

impl Pending {
    fn push(&mut self, step: &Step<'_>) {
        if step.is_new {
            self.nids.push(step.inode.nid());
        }
        // The root has no name.
        if step.number != 0 {
            self.names.extend_from_slice(step.name);
            let (parent, target, name_end) = (step.parent, step.number, self.names.len());
            self.links.push(PendingLink { parent, target, name_end });
        }
    }

    /// Inserts the names of all inodes that are in the tree, and marks the owners.
    fn insert(
        &self,
        ids: &[Option<InodeId>],
        builder: &mut Builder,
    ) -> Result<(), ErofsCorruption> {
        let owners = self.owners();
        let id = |number: usize| ids.get(number).copied().flatten();
        let mut start = 0;
        for (at, link) in self.links.iter().enumerate() {
            let name = self.names.get(start..link.name_end).unwrap_or_default();
            start = link.name_end;
            if let Some((parent, target)) = id(link.parent).zip(id(link.target)) {
                let owns = owners.get(link.target) == Some(&at);
                let claim = if owns { Link::Owner } else { Link::Equal };
                let nid = self.nids.get(link.target).copied().unwrap_or(Nid(0));
                builder.insert(parent, name, target, claim).or_corrupt(nid)?;
            }
        }
        Ok(())
    }

    /// Returns for each inode the index of the link that owns it.
    ///
    /// composefs writes inodes breadth first, with siblings in byte order, and writes an inode at the position of the
    /// name that owns it. So if directories are visited in the order of their nids, a name owns its inode if this
    /// inode is the next one in the image. If two names fit, the image is the same with either of them.
    fn owners(&self) -> Vec<usize> {
        const NONE: usize = usize::MAX;
        let mut order: Vec<usize> = (0..self.nids.len()).collect();
        order.sort_unstable_by_key(|number| self.nids.get(*number));
        // Group the links by directory, in their existing order.
        let mut links: Vec<usize> = (0..self.links.len()).collect();
        let parent = |at: &usize| self.links.get(*at).map(|link| link.parent);
        links.sort_by_key(parent);

        let mut owners = vec![NONE; self.nids.len()];
        let mut next = order.iter().copied().skip(1).peekable();
        for directory in &order {
            let first = links.partition_point(|at| parent(at) < Some(*directory));
            let own = links.get(first..).unwrap_or_default();
            for at in own.iter().take_while(|at| parent(at) == Some(*directory)) {
                if let Some(link) = self.links.get(*at)
                    && next.next_if_eq(&link.target).is_some()
                    && let Some(owner) = owners.get_mut(link.target)
                {
                    *owner = *at;
                }
            }
        }
        for (at, link) in self.links.iter().enumerate() {
            if let Some(owner) = owners.get_mut(link.target)
                && *owner == NONE
            {
                *owner = at;
            }
        }
        owners
    }
}

trait OrCorrupt<T> {
    /// Adds the inode that the tree cannot hold to the error.
    fn or_corrupt(self, nid: Nid) -> Result<T, ErofsCorruption>;
}

impl<T> OrCorrupt<T> for Result<T, TreeError> {
    fn or_corrupt(self, nid: Nid) -> Result<T, ErofsCorruption> {
        self.map_err(|reason| ErofsCorruption::Tree { nid, reason })
    }
}
