//! The core of a FUSE server: turns requests about the files of an image into replies.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::sync::OnceLock;

use container::bundle::userns::OwnIds;
use container::root::{OverlayMark, acl_for_ids, name_below_overlay};
use image::erofs::read::{
    DirPosition, FileType, Inode, InodeXattrs, Nid, ReadAt, ReadError, ShownContent, ShownFile,
    ShownImage,
};
use image::verity::ObjectId;
use kernel::fuse::{
    DirectoryReply, FuseOperation, FuseRequest, ListedEntry, NodeAttributes, NodeNumber, READ_MAX,
    ReplyBody, Served,
};
use rustix::fs::Mode;
use rustix::io::Errno;

use super::places::{Place, Places, is_whiteout, node_of, positions_after};

/// Prefix of xattrs that only root of the initial namespace may have.
const TRUSTED: &[u8] = b"trusted.";
/// Prefix of xattrs of security modules, and of capabilities.
const SECURITY: &[u8] = b"security.";

/// The file data outside the image.
pub trait FileData: Send + Sync {
    /// Fills `buffer` with bytes of an object, starting at `offset`. `size` is the object's size.
    ///
    /// # Errors
    /// If the object is missing, cannot be read, or has another digest.
    fn object(
        &self,
        object: &ObjectId,
        size: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<()>;

    /// Returns the devices of the image, in the order of its device table.
    fn devices(&self) -> Vec<&dyn ReadAt>;
}

/// Which users see the tree, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FuseView {
    /// Only the user who mounted the file system, and who may read every file.
    Owner,
    /// The users of a user namespace, with permission checks, below an overlay with `userxattr`.
    Namespace,
    /// Like `Namespace`, but without an overlay above.
    Alone,
    /// Like `Namespace`, and the overlay above reads the data of files in the objects. The overlay asks for its marks
    /// of each file, so the kernel always sends requests for xattrs.
    Objects,
}

/// The files of an image, as a FUSE file system.
#[derive(Debug)]
pub struct FileTree<S, D> {
    image: ShownImage<S>,
    data: D,
    view: FuseView,
    /// The ids that the user namespace maps; `None` if it has all.
    ids: Option<OwnIds>,
    has_xattrs: OnceLock<bool>,
    /// Mount points that the image lacks.
    places: Places,
    /// Files that are hidden, because a tmpfs above contains them.
    apart: BTreeSet<Nid>,
}

/// Buffers that are reused from one request to the next.
#[derive(Debug, Default)]
pub struct AnswerMemory {
    bytes: Vec<u8>,
    xattrs: InodeXattrs,
}

/// The reply to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum FuseAnswer<'m> {
    /// The kernel expects no reply.
    None,
    /// The request failed.
    Error(Errno),
    /// A reply with a fixed layout.
    Body(ReplyBody),
    /// A reply that consists of these bytes.
    Bytes(&'m [u8]),
}

enum Failed {
    With(Errno),
    Image(ReadError),
    Data(io::Error),
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Self::With(errno)
    }
}

impl From<ReadError> for Failed {
    fn from(error: ReadError) -> Self {
        Self::Image(error)
    }
}

impl<S: ReadAt, D: FileData> FileTree<S, D> {
    /// Creates the tree of an image. Files whose owners are not mapped by `ids` belong to root.
    #[must_use]
    pub const fn new(image: ShownImage<S>, data: D, view: FuseView, ids: Option<OwnIds>) -> Self {
        Self {
            image,
            data,
            view,
            ids,
            has_xattrs: OnceLock::new(),
            places: Places::new(),
            apart: BTreeSet::new(),
        }
    }

    /// Shows those of these paths that the image lacks as empty files, and paths that end with a slash as empty
    /// directories, below an overlay. A path that leads through a link or a file of the image is left out.
    ///
    /// # Errors
    /// If a directory of the image cannot be read.
    pub fn add_places(&mut self, paths: &[&str]) -> Result<(), ReadError> {
        self.places = Places::missing(&self.image, paths)?;
        Ok(())
    }

    /// Hides these files. They must be all files that have xattrs.
    pub(super) fn set_apart(&mut self, apart: BTreeSet<Nid>) {
        self.has_xattrs = OnceLock::from(false);
        self.apart = apart;
    }

    /// Returns the user and group of a file in this namespace.
    pub(super) fn owner(&self, inode: &Inode) -> (u32, u32) {
        match &self.ids {
            Some(ids) => (ids.user(inode.uid()), ids.group(inode.gid())),
            None => (inode.uid(), inode.gid()),
        }
    }

    /// Returns the value of an xattr in this namespace: ids in ACLs are translated.
    pub(super) fn value<'v>(&self, name: &[u8], value: &'v [u8]) -> Cow<'v, [u8]> {
        match &self.ids {
            Some(ids) => acl_for_ids(name, value, ids),
            None => Cow::Borrowed(value),
        }
    }

    pub fn set_view(&mut self, view: FuseView) {
        self.view = view;
    }

    /// Whether the kernel requests the data of files. Otherwise it reads them in the objects, except for data that is
    /// in the image itself.
    pub(super) fn has_data(&self) -> bool {
        self.view != FuseView::Objects
    }

    pub const fn image(&self) -> &ShownImage<S> {
        &self.image
    }

    /// The file data outside the image.
    pub const fn data(&self) -> &D {
        &self.data
    }

    /// Handles a request.
    pub fn answer<'m>(
        &self,
        request: &FuseRequest<'_>,
        memory: &'m mut AnswerMemory,
    ) -> FuseAnswer<'m> {
        if !request.operation.has_reply() {
            return FuseAnswer::None;
        }
        let answered = match self.places.get(request.node) {
            Some(place) => self.answer_place(request.node, place, &request.operation, memory),
            None => self.answer_image(request, memory),
        };
        match answered {
            Ok(answer) => answer,
            Err(Failed::With(errno)) => FuseAnswer::Error(errno),
            Err(Failed::Image(error)) => {
                tracing::error!(%error, "cannot read the image");
                FuseAnswer::Error(Errno::IO)
            }
            Err(Failed::Data(error)) => {
                tracing::error!(%error, "cannot read a file");
                FuseAnswer::Error(Errno::IO)
            }
        }
    }

    /// Handles a request about the file system, or a file of the image.
    fn answer_image<'m>(
        &self,
        request: &FuseRequest<'_>,
        memory: &'m mut AnswerMemory,
    ) -> Result<FuseAnswer<'m>, Failed> {
        let node = request.node;
        match &request.operation {
            FuseOperation::Init(offer) => {
                let permissions = self.view != FuseView::Owner;
                // In the other views, the first request for an ACL shows whether the image has xattrs at all.
                let acls = self.view != FuseView::Objects
                    || self.image.image().superblock().may_have_acl();
                let served = Served::Tree { permissions, acls };
                Ok(FuseAnswer::Body(ReplyBody::init(offer, served)))
            }
            FuseOperation::Lookup(name) => {
                self.look_up(node, name.to_bytes()).map(FuseAnswer::Body)
            }
            FuseOperation::GetAttributes(_) => self.attributes_of(node).map(FuseAnswer::Body),
            FuseOperation::ReadLink => self.read_link(node, &mut memory.bytes),
            FuseOperation::Read { offset, size, .. } => {
                self.read(node, *offset, *size, &mut memory.bytes)
            }
            FuseOperation::ReadDirectory { offset, size, attributes } => {
                self.list(node, DirPosition(*offset), *size, *attributes, &mut memory.bytes)
            }
            FuseOperation::GetXattr { name, size } => {
                self.xattr(node, name.to_bytes(), *size, memory)
            }
            FuseOperation::ListXattrs(size) => self.xattr_names(node, *size, memory),
            FuseOperation::Statistics => Ok(FuseAnswer::Body(self.statistics())),
            FuseOperation::Destroy => Ok(FuseAnswer::Body(ReplyBody::done())),
            // After `ENOSYS` the kernel handles an operation itself, such as opening and closing files, or fails it.
            _ => Err(Errno::NOSYS.into()),
        }
    }

    /// Handles a request about a place.
    fn answer_place<'m>(
        &self,
        node: NodeNumber,
        place: &Place,
        operation: &FuseOperation<'_>,
        memory: &'m mut AnswerMemory,
    ) -> Result<FuseAnswer<'m>, Failed> {
        let bytes = &mut memory.bytes;
        bytes.clear();
        match operation {
            FuseOperation::GetAttributes(_) => {
                Ok(FuseAnswer::Body(ReplyBody::attributes(&place.attributes(node))))
            }
            FuseOperation::Lookup(name) if place.is_directory() => {
                Ok(FuseAnswer::Body(self.look_up_place(node, name.to_bytes())))
            }
            FuseOperation::Lookup(_) => Err(Errno::NOTDIR.into()),
            FuseOperation::ReadDirectory { offset, size, attributes } if place.is_directory() => {
                let mut reply = DirectoryReply::new(bytes, *size, *attributes);
                self.list_places(node, 0, *offset, &mut reply);
                Ok(FuseAnswer::Bytes(bytes))
            }
            FuseOperation::ReadDirectory { .. } => Err(Errno::NOTDIR.into()),
            FuseOperation::Read { .. } if !place.is_directory() => Ok(FuseAnswer::Bytes(bytes)),
            FuseOperation::Read { .. } | FuseOperation::ReadLink => Err(Errno::INVAL.into()),
            FuseOperation::GetXattr { name, .. } => Err(self.no_xattr(name.to_bytes()).into()),
            FuseOperation::ListXattrs(size) => sized(bytes, *size),
            FuseOperation::Statistics => Ok(FuseAnswer::Body(self.statistics())),
            _ => Err(Errno::NOSYS.into()),
        }
    }

    fn look_up_place(&self, directory: NodeNumber, name: &[u8]) -> ReplyBody {
        match self.places.find(directory, name) {
            Some((node, place)) => ReplyBody::entry(node, &place.attributes(node)),
            None => ReplyBody::no_entry(),
        }
    }

    /// Adds the places of a directory to a listing. `first` is the position of the first place, and `from` is the
    /// distance from there at which the listing continues.
    fn list_places(
        &self,
        directory: NodeNumber,
        first: u64,
        from: u64,
        reply: &mut DirectoryReply<'_>,
    ) {
        for (after, node, place) in self.places.after(directory, from) {
            let (name, attributes) = (place.name(), place.attributes(node));
            let next = first.saturating_add(after);
            if !reply.push(&ListedEntry { name, node: Some(node), attributes, next }) {
                return;
            }
        }
    }

    /// Whether a file of the image has no name: a tmpfs above contains it, or an overlay above takes it for a whiteout.
    /// An overlay would list such a name, but not find it.
    fn is_hidden(&self, file: &ShownFile) -> bool {
        self.apart.contains(&file.inode.nid()) || self.has_overlay() && is_whiteout(file)
    }

    const fn has_overlay(&self) -> bool {
        match self.view {
            FuseView::Namespace | FuseView::Objects => true,
            FuseView::Owner | FuseView::Alone => false,
        }
    }

    fn node(&self, nid: Nid) -> Result<NodeNumber, Errno> {
        node_of(&self.image, nid).ok_or(Errno::IO)
    }

    fn file(&self, node: NodeNumber) -> Result<ShownFile, Failed> {
        let nid = match node {
            NodeNumber::ROOT => self.image.root(),
            NodeNumber(number) => Nid(number.checked_sub(2).ok_or(Errno::STALE)?),
        };
        Ok(self.image.file(nid)?.ok_or(Errno::NOENT)?)
    }

    /// Returns a file's inode, or `otherwise` if the file is of another kind.
    fn inode(&self, node: NodeNumber, kind: FileType, otherwise: Errno) -> Result<Inode, Failed> {
        let file = self.file(node)?;
        if file.kind == kind { Ok(file.inode) } else { Err(otherwise.into()) }
    }

    fn attributes(&self, file: &ShownFile) -> NodeAttributes {
        let ShownFile { inode, kind } = file;
        let changed = inode.mtime();
        NodeAttributes {
            number: inode.nid().0,
            kind: kind_of(*kind),
            mode: Mode::from_raw_mode((inode.mode() & 0o7777).into()),
            bytes: match kind {
                FileType::Regular | FileType::Directory | FileType::Symlink => inode.size(),
                _ => 0,
            },
            owner: self.owner(inode),
            links: inode.nlink(),
            changed: (changed.seconds, changed.nanoseconds),
            device: inode.device_number(),
        }
    }

    fn attributes_of(&self, node: NodeNumber) -> Result<ReplyBody, Failed> {
        Ok(ReplyBody::attributes(&self.attributes(&self.file(node)?)))
    }

    fn look_up(&self, directory: NodeNumber, name: &[u8]) -> Result<ReplyBody, Failed> {
        let inode = self.inode(directory, FileType::Directory, Errno::NOTDIR)?;
        match self.image.lookup(inode.nid(), name)? {
            Some(file) if !self.is_hidden(&file) => {
                Ok(ReplyBody::entry(self.node(file.inode.nid())?, &self.attributes(&file)))
            }
            _ => Ok(self.look_up_place(directory, name)),
        }
    }

    fn read_link<'m>(
        &self,
        node: NodeNumber,
        bytes: &'m mut Vec<u8>,
    ) -> Result<FuseAnswer<'m>, Failed> {
        let link = self.inode(node, FileType::Symlink, Errno::INVAL)?;
        *bytes = self.image.image().read_link(&link)?;
        Ok(FuseAnswer::Bytes(bytes))
    }

    fn read<'m>(
        &self,
        node: NodeNumber,
        offset: u64,
        size: u32,
        bytes: &'m mut Vec<u8>,
    ) -> Result<FuseAnswer<'m>, Failed> {
        let file = self.inode(node, FileType::Regular, Errno::INVAL)?;
        let whole = file.size();
        let most = u64::from(size).min(u64::try_from(READ_MAX).unwrap_or(u64::MAX));
        let length = usize::try_from(whole.saturating_sub(offset).min(most)).unwrap_or(READ_MAX);
        bytes.resize(length, 0);
        self.fill(&file, offset, bytes)?;
        Ok(FuseAnswer::Bytes(bytes))
    }

    /// Fills `bytes` with data of a regular file from `offset` on. The file must be long enough.
    fn fill(&self, file: &Inode, offset: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self.image.content(file)? {
            ShownContent::Object(object) => {
                self.data.object(&object, file.size(), offset, bytes).map_err(Failed::Data)
            }
            ShownContent::Inside => {
                let read = self.image.read(file, offset, bytes, &self.data.devices())?;
                // The kernel would fill up a short reply with zeros.
                if read == bytes.len() { Ok(()) } else { Err(Errno::IO.into()) }
            }
            ShownContent::Unnamed => Err(Failed::Data(io::Error::other(UNNAMED))),
        }
    }

    /// Reads a whole regular file.
    ///
    /// # Errors
    /// If bytes are missing, cannot be read, or have another digest.
    pub(super) fn whole(&self, file: &Inode) -> io::Result<Vec<u8>> {
        let length = usize::try_from(file.size()).map_err(io::Error::other)?;
        let mut bytes = vec![0; length];
        self.fill(file, 0, &mut bytes).map_err(|failed| match failed {
            Failed::With(errno) => errno.into(),
            Failed::Image(error) => io::Error::other(error),
            Failed::Data(error) => error,
        })?;
        Ok(bytes)
    }

    fn list<'m>(
        &self,
        node: NodeNumber,
        from: DirPosition,
        size: u32,
        with_attributes: bool,
        bytes: &'m mut Vec<u8>,
    ) -> Result<FuseAnswer<'m>, Failed> {
        let directory = self.inode(node, FileType::Directory, Errno::NOTDIR)?;
        let mut reply = DirectoryReply::new(bytes, size, with_attributes);
        let first_place = positions_after(&directory);
        if let Some(from) = from.0.checked_sub(first_place) {
            self.list_places(node, first_place, from, &mut reply);
            return Ok(FuseAnswer::Bytes(bytes));
        }
        let (mut is_wrong, mut is_full) = (None, false);
        self.image.entries(directory.nid(), from, |entry| {
            if self.is_hidden(&entry.file) {
                return true;
            }
            let node = match self.node(entry.file.inode.nid()) {
                _ if entry.name == b"." || entry.name == b".." => None,
                Ok(node) => Some(node),
                Err(errno) => {
                    is_wrong = Some(errno);
                    return false;
                }
            };
            let attributes = self.attributes(&entry.file);
            let listed = ListedEntry { name: entry.name, node, attributes, next: entry.next.0 };
            let has_room = reply.push(&listed);
            is_full |= !has_room;
            has_room
        })?;
        if let Some(errno) = is_wrong {
            return Err(errno.into());
        }
        if !is_full {
            self.list_places(node, first_place, 0, &mut reply);
        }
        Ok(FuseAnswer::Bytes(bytes))
    }

    /// Returns the name that this view shows for an xattr of the image; `None` if the xattr is not shown.
    fn shown_name<'n>(&self, name: &'n [u8]) -> Option<Cow<'n, [u8]>> {
        if self.has_overlay() {
            return name_below_overlay(name);
        }
        (!name.starts_with(TRUSTED)).then_some(Cow::Borrowed(name))
    }

    /// Returns `ENOSYS` if no file of the image has xattrs, so that the kernel stops asking. Searches all files once.
    fn check_xattrs(&self) -> Result<(), Failed> {
        let has = match self.has_xattrs.get() {
            Some(has) => *has,
            None => {
                let has = self.image.has_xattrs(|name| self.shown_name(name).is_some())?;
                *self.has_xattrs.get_or_init(|| has)
            }
        };
        if has { Ok(()) } else { Err(Errno::NOSYS.into()) }
    }

    /// Calls `take` with each visible xattr of a file, with the name and the value that this view shows.
    fn xattrs_of(
        &self,
        node: NodeNumber,
        xattrs: &mut InodeXattrs,
        mut take: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), Failed> {
        let file = self.file(node)?;
        self.image.xattrs(&file.inode, xattrs, |name, value| {
            if let Some(shown) = self.shown_name(name) {
                take(&shown, &self.value(name, value));
            }
        })?;
        Ok(())
    }

    fn xattr<'m>(
        &self,
        node: NodeNumber,
        name: &[u8],
        size: u32,
        memory: &'m mut AnswerMemory,
    ) -> Result<FuseAnswer<'m>, Failed> {
        let AnswerMemory { bytes, xattrs } = memory;
        bytes.clear();
        if self.view != FuseView::Objects {
            self.check_xattrs()?;
        } else if let Some(mark) = OverlayMark::from_name(name) {
            let Some(object) = self.object(node)? else { return Err(Errno::NODATA.into()) };
            bytes.extend_from_slice(&mark.of(&object));
            return sized(bytes, size);
        }
        let mut is_there = false;
        self.xattrs_of(node, xattrs, |found, value| {
            if found == name {
                is_there = true;
                bytes.extend_from_slice(value);
            }
        })?;
        if is_there { sized(bytes, size) } else { Err(self.no_xattr(name).into()) }
    }

    /// Returns the object with a file's data.
    fn object(&self, node: NodeNumber) -> Result<Option<ObjectId>, Failed> {
        let file = self.file(node)?;
        if file.kind != FileType::Regular {
            return Ok(None);
        }
        match self.image.content(&file.inode)? {
            ShownContent::Object(object) => Ok(Some(object)),
            ShownContent::Inside => Ok(None),
            ShownContent::Unnamed => Err(Failed::Data(io::Error::other(UNNAMED))),
        }
    }

    /// Returns the error for an xattr that a file lacks. Labels of security modules are not shown below an overlay, so
    /// they are not supported: `ls -l` then stops asking for them.
    fn no_xattr(&self, name: &[u8]) -> Errno {
        let is_label = name.starts_with(SECURITY) && self.shown_name(name).is_none();
        if is_label { Errno::OPNOTSUPP } else { Errno::NODATA }
    }

    fn xattr_names<'m>(
        &self,
        node: NodeNumber,
        size: u32,
        memory: &'m mut AnswerMemory,
    ) -> Result<FuseAnswer<'m>, Failed> {
        if self.view != FuseView::Objects {
            self.check_xattrs()?;
        }
        let AnswerMemory { bytes, xattrs } = memory;
        bytes.clear();
        self.xattrs_of(node, xattrs, |name, _| {
            bytes.extend_from_slice(name);
            bytes.push(0);
        })?;
        sized(bytes, size)
    }

    fn statistics(&self) -> ReplyBody {
        let superblock = self.image.image().superblock();
        ReplyBody::statistics(self.image.image().source().len(), superblock.inodes)
    }
}

/// Error of a file whose data cannot be found.
const UNNAMED: &str = "the image has no digest of the file's content";

/// Replies with bytes if they fit into `size`, or with their length if `size` is 0, as getxattr(2) does.
fn sized(bytes: &[u8], size: u32) -> Result<FuseAnswer<'_>, Failed> {
    let length = u32::try_from(bytes.len()).or(Err(Errno::TOOBIG))?;
    match size {
        0 => Ok(FuseAnswer::Body(ReplyBody::xattr_size(length))),
        _ if size < length => Err(Errno::RANGE.into()),
        _ => Ok(FuseAnswer::Bytes(bytes)),
    }
}

const fn kind_of(kind: FileType) -> rustix::fs::FileType {
    use rustix::fs::FileType as Kind;
    match kind {
        FileType::Regular => Kind::RegularFile,
        FileType::Directory => Kind::Directory,
        FileType::CharDevice => Kind::CharacterDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::Symlink => Kind::Symlink,
    }
}

#[cfg(test)]
mod tests;
