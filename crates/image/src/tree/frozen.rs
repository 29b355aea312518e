//! A finished tree.

use super::intern::{StringId, Strings};
use super::raw::{IMPLICIT, Kind, NO_OWNER, RawEntry, RawInode, STATED_LARGE};
use super::{Content, InodeId, Location, Metadata, Node, Timestamp, XattrsId, components};
use crate::verity::ObjectId;

/// A tree that does not change: children in byte order, each inode owned by one name.
#[derive(Debug, Clone)]
pub struct Tree {
    pub(super) inodes: Vec<RawInode>,
    /// The entries of each directory together, in byte order of their names.
    pub(super) entries: Vec<RawEntry>,
    /// The entry that owns each inode; none for the root and for inodes without a name.
    pub(super) owners: Vec<u32>,
    pub(super) reached: usize,
    pub(super) names: Strings,
    pub(super) strings: Strings,
    pub(super) xattrs: Strings,
}

impl Tree {
    pub(super) fn entry_path(&self, mut at: usize, path: &mut Vec<u8>) {
        let mut parts = Vec::new();
        loop {
            let entry = self.entries[at];
            parts.push(entry.name);
            match self.owners[entry.parent as usize] {
                NO_OWNER => break,
                owner => at = owner as usize,
            }
        }
        path.clear();
        for name in parts.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(self.names.get(*name));
        }
    }

    fn object(&self, string: u32) -> Option<ObjectId> {
        let bytes = self.strings.get(string);
        (!bytes.is_empty()).then(|| ObjectId::from_bytes(bytes).expect("kept as an object id"))
    }

    /// More than the index of any string: the length of a side table.
    pub(crate) fn strings_bound(&self) -> usize {
        self.strings.bound()
    }

    /// The bytes of a digest or a place.
    pub(crate) fn string(&self, id: StringId) -> &[u8] {
        self.strings.get(id.0)
    }

    /// The root directory.
    #[must_use]
    pub fn root(&self) -> Inode<'_> {
        self.inode(InodeId::ROOT)
    }

    /// The inode with this id.
    #[must_use]
    pub fn inode(&self, id: InodeId) -> Inode<'_> {
        Inode { tree: self, id, raw: &self.inodes[id.index()] }
    }

    /// The number of inodes that have a name, and the root.
    #[must_use]
    pub const fn inode_count(&self) -> usize {
        self.reached
    }

    /// More than any inode's index: the length of a side table.
    #[must_use]
    pub fn inode_bound(&self) -> usize {
        self.inodes.len()
    }

    /// More than any xattr set's index: the length of a side table.
    #[must_use]
    pub fn xattrs_bound(&self) -> usize {
        self.xattrs.bound()
    }

    /// The xattrs of a set, in the source's order.
    #[must_use]
    pub fn xattrs(&self, id: XattrsId) -> Xattrs<'_> {
        Xattrs { tree: self, pairs: self.xattrs.get(id.0) }
    }

    /// All sets of xattrs, each once, with those that no inode has.
    pub fn xattr_sets(&self) -> impl Iterator<Item = Xattrs<'_>> {
        let bound = u32::try_from(self.xattrs.bound()).unwrap_or(u32::MAX);
        (0..bound).map(|id| self.xattrs(XattrsId(id)))
    }

    /// The inode at `path`, through directories only: symlinks are not followed.
    #[must_use]
    pub fn resolve(&self, path: &[u8]) -> Option<Inode<'_>> {
        components(path).try_fold(self.root(), |directory, name| directory.lookup(name))
    }

    /// Every name below the root with its path, depth first, siblings in byte order, without the root itself.
    #[must_use]
    pub fn walk(&self) -> Walk<'_> {
        Walk { stack: vec![(self.root().children(), 0)], path: Vec::new(), tree: self }
    }

    /// Every regular file once, by the name that owns it: depth first, siblings in byte order.
    pub fn files(&self) -> impl Iterator<Item = (Inode<'_>, Content<'_>)> {
        let mut stack = vec![self.root().children()];
        std::iter::from_fn(move || {
            loop {
                let Some(entry) = stack.last_mut()?.next() else {
                    stack.pop();
                    continue;
                };
                match entry.inode.node() {
                    Node::Directory => stack.push(entry.inode.children()),
                    Node::Regular(content) if entry.is_owner => {
                        return Some((entry.inode, content));
                    }
                    _ => {}
                }
            }
        })
    }

    /// Bytes on the heap that the tree takes, as allocated.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.inodes.capacity() * size_of::<RawInode>()
            + self.entries.capacity() * size_of::<RawEntry>()
            + self.owners.capacity() * size_of::<u32>()
            + self.names.heap_bytes()
            + self.strings.heap_bytes()
            + self.xattrs.heap_bytes()
    }
}

/// An external file with its digest and place as numbers, for who compares many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct External {
    /// Length in bytes, 1 to 2^63 - 1.
    pub(crate) size: u64,
    /// The bytes of its object id.
    pub(crate) object: Option<StringId>,
    pub(crate) place: Place,
}

/// A [`Location`] by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    None,
    Object,
    Path(StringId),
}

/// An inode of a tree.
#[derive(Debug, Clone, Copy)]
pub struct Inode<'a> {
    tree: &'a Tree,
    id: InodeId,
    raw: &'a RawInode,
}

impl<'a> Inode<'a> {
    /// Its id.
    #[must_use]
    pub const fn id(&self) -> InodeId {
        self.id
    }

    /// Permissions, owner and time.
    #[must_use]
    pub const fn metadata(&self) -> Metadata {
        Metadata {
            permissions: self.raw.permissions,
            uid: self.raw.uid,
            gid: self.raw.gid,
            mtime: Timestamp { seconds: self.raw.seconds, nanoseconds: self.raw.nanoseconds },
        }
    }

    /// `st_mode`: type and permissions.
    #[must_use]
    pub fn mode(&self) -> u16 {
        let of_type = match self.raw.kind {
            Kind::Directory => Node::Directory,
            Kind::Inline | Kind::External | Kind::ExternalOfObject => {
                Node::Regular(Content::Inline(&[]))
            }
            Kind::Symlink => Node::Symlink(&[]),
            Kind::CharDevice => Node::CharDevice(0),
            Kind::BlockDevice => Node::BlockDevice(0),
            Kind::Fifo => Node::Fifo,
            Kind::Socket => Node::Socket,
        };
        of_type.type_bits() | self.raw.permissions
    }

    /// Whether the source stated 4 GiB or more for a device, pipe or socket.
    pub(crate) const fn has_large_stated_size(&self) -> bool {
        self.raw.flags & STATED_LARGE != 0
    }

    /// What a regular file has whose bytes are elsewhere.
    pub(crate) fn external(&self) -> Option<External> {
        let RawInode { size, first, second, .. } = *self.raw;
        let place = match self.raw.kind {
            Kind::ExternalOfObject => Place::Object,
            Kind::External if second == 0 => Place::None,
            Kind::External => Place::Path(StringId(second)),
            _ => return None,
        };
        Some(External { size, object: (first != 0).then_some(StringId(first)), place })
    }

    /// Number of links. Directories: 2 and one for each subdirectory. Others: the number in the dump, or else of names.
    #[must_use]
    pub const fn nlink(&self) -> u32 {
        self.raw.nlink
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.raw.kind == Kind::Directory
    }

    /// Whether it is a directory that no source described.
    #[must_use]
    pub const fn is_implicit(&self) -> bool {
        self.raw.flags & IMPLICIT != 0
    }

    /// Its type and content.
    #[must_use]
    pub fn node(&self) -> Node<'a> {
        let RawInode { size, first, second, .. } = *self.raw;
        let strings = &self.tree.strings;
        let object = || self.tree.object(first);
        match self.raw.kind {
            Kind::Directory => Node::Directory,
            Kind::Inline => Node::Regular(Content::Inline(strings.get(first))),
            Kind::External => Node::Regular(Content::External {
                size,
                object: object(),
                location: match second {
                    0 => Location::None,
                    id => Location::Path(strings.get(id)),
                },
            }),
            Kind::ExternalOfObject => Node::Regular(Content::External {
                size,
                object: object(),
                location: Location::Object,
            }),
            Kind::Symlink => Node::Symlink(strings.get(first)),
            Kind::CharDevice => Node::CharDevice(size),
            Kind::BlockDevice => Node::BlockDevice(size),
            Kind::Fifo => Node::Fifo,
            Kind::Socket => Node::Socket,
        }
    }

    /// Its set of xattrs, equal for equal sets.
    #[must_use]
    pub const fn xattrs_id(&self) -> XattrsId {
        self.raw.xattrs
    }

    /// Its xattrs, in the source's order.
    #[must_use]
    pub fn xattrs(&self) -> Xattrs<'a> {
        self.tree.xattrs(self.raw.xattrs)
    }

    /// The entries of a directory, in byte order; none for other inodes.
    #[must_use]
    pub fn children(&self) -> Children<'a> {
        let (first, count) = match self.raw.kind {
            Kind::Directory => (self.raw.first, self.raw.second),
            _ => (0, 0),
        };
        Children { tree: self.tree, next: first, end: first + count }
    }

    /// The inode that `name` has in this directory.
    #[must_use]
    pub fn lookup(&self, name: &[u8]) -> Option<Self> {
        let children = self.children();
        let siblings = &self.tree.entries[children.next as usize..children.end as usize];
        let names = &self.tree.names;
        let at = siblings.binary_search_by(|entry| names.get(entry.name).cmp(name)).ok()?;
        Some(self.tree.inode(InodeId(siblings[at].inode())))
    }

    /// The whole path of the name that owns the inode, with a leading slash; `/` for the root.
    #[must_use]
    pub fn path(&self) -> Vec<u8> {
        let mut path = Vec::new();
        match self.tree.owners[self.id.index()] {
            NO_OWNER => path.push(b'/'),
            owner => self.tree.entry_path(owner as usize, &mut path),
        }
        path
    }

    /// The directory of the name that owns the inode; the root's is the root.
    #[must_use]
    pub fn parent(&self) -> Self {
        match self.tree.owners[self.id.index()] {
            NO_OWNER => *self,
            owner => self.tree.inode(InodeId(self.tree.entries[owner as usize].parent)),
        }
    }
}

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// 1 to 255 bytes.
    pub name: &'a [u8],
    /// The inode that it names.
    pub inode: Inode<'a>,
    /// Whether this name owns the inode; otherwise it is a further hard link to it.
    pub is_owner: bool,
}

/// The entries of a directory, in byte order.
#[derive(Debug, Clone)]
pub struct Children<'a> {
    tree: &'a Tree,
    next: u32,
    end: u32,
}

impl<'a> Iterator for Children<'a> {
    type Item = Entry<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.end {
            return None;
        }
        let at = self.next;
        self.next += 1;
        let raw = self.tree.entries[at as usize];
        let inode = self.tree.inode(InodeId(raw.inode()));
        let is_owner = self.tree.owners[inode.id.index()] == at;
        Some(Entry { name: self.tree.names.get(raw.name), inode, is_owner })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.end - self.next) as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Children<'_> {}

/// The names and values of a set of xattrs, in the source's order.
#[derive(Debug, Clone)]
pub struct Xattrs<'a> {
    tree: &'a Tree,
    pairs: &'a [u8],
}

impl<'a> Iterator for Xattrs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, rest) = self.pairs.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_first_chunk::<4>()?;
        self.pairs = rest;
        let strings = &self.tree.strings;
        Some((strings.get(u32::from_le_bytes(*name)), strings.get(u32::from_le_bytes(*value))))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.pairs.len() / 8, Some(self.pairs.len() / 8))
    }
}

impl ExactSizeIterator for Xattrs<'_> {}

/// Goes through a tree depth first. Not an [`Iterator`], since the path is borrowed.
#[derive(Debug)]
pub struct Walk<'a> {
    tree: &'a Tree,
    /// The directories above, each with the length of its path.
    stack: Vec<(Children<'a>, usize)>,
    path: Vec<u8>,
}

impl<'a> Walk<'a> {
    /// The next name: its whole path with a leading slash, and the entry.
    #[expect(
        clippy::should_implement_trait,
        reason = "the path is lent, which Iterator cannot say"
    )]
    pub fn next(&mut self) -> Option<(&[u8], Entry<'a>)> {
        let entry = loop {
            let (children, length) = self.stack.last_mut()?;
            self.path.truncate(*length);
            match children.next() {
                Some(entry) => break entry,
                None => {
                    self.stack.pop();
                }
            }
        };
        self.path.push(b'/');
        self.path.extend_from_slice(entry.name);
        if entry.inode.is_directory() {
            self.stack.push((self.tree.inode(entry.inode.id).children(), self.path.len()));
        }
        Some((&self.path, entry))
    }
}
