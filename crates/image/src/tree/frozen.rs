//! The finished tree and its iterators.

use super::intern::{StringId, Strings};
use super::raw::{IMPLICIT, Kind, NO_OWNER, RawEntry, RawInode, STATED_LARGE};
use super::{
    Content, InodeId, Location, Metadata, Node, Timestamp, TreeError, XattrsId, components,
};
use hashbrown::HashMap;

use crate::verity::ObjectId;

/// An immutable tree, whose children are in byte order and whose inodes are each owned by one name.
#[derive(Debug, Clone)]
pub struct Tree {
    pub(super) inodes: Vec<RawInode>,
    /// The entries, grouped by directory, in byte order of their names.
    pub(super) entries: Vec<RawEntry>,
    /// Index of the entry that owns each inode; [`NO_OWNER`] for the root and for inodes without a name.
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

    /// Returns one more than the largest index of a string, which is the length of a table with an element for each
    /// string.
    pub(crate) fn strings_bound(&self) -> usize {
        self.strings.bound()
    }

    /// Returns the bytes of an object id or of a location's path.
    pub(crate) fn string(&self, id: StringId) -> &[u8] {
        self.strings.get(id.0)
    }

    /// Replaces the objects of external files, for example by the ids of the same objects with another algorithm.
    /// Files for whose object `new` returns `None` are unchanged.
    ///
    /// # Errors
    /// [`TreeError::TooLarge`] if the strings take more than 4 GiB.
    pub fn replace_objects(
        &mut self,
        new: impl Fn(&ObjectId) -> Option<ObjectId>,
    ) -> Result<(), TreeError> {
        // Equal ids keep equal numbers, because the writer compares numbers.
        let mut replaced: HashMap<u32, u32> = HashMap::new();
        for at in 0..self.inodes.len() {
            let RawInode { kind, first, .. } = self.inodes[at];
            if !matches!(kind, Kind::External | Kind::ExternalOfObject) {
                continue;
            }
            let Some(id) = self.object(first).as_ref().and_then(&new) else { continue };
            let string = match replaced.get(&first) {
                Some(string) => *string,
                None => {
                    let string = self.strings.push(id.as_bytes());
                    let string = string.ok_or(TreeError::TooLarge("4 GiB of contents"))?;
                    replaced.insert(first, string);
                    string
                }
            };
            self.inodes[at].first = string;
        }
        Ok(())
    }

    /// Returns the root directory.
    #[must_use]
    pub fn root(&self) -> Inode<'_> {
        self.inode(InodeId::ROOT)
    }

    /// Returns the inode with this id.
    #[must_use]
    pub fn inode(&self, id: InodeId) -> Inode<'_> {
        Inode { tree: self, id, raw: &self.inodes[id.index()] }
    }

    /// Returns the number of inodes that have a name, plus one for the root.
    #[must_use]
    pub const fn inode_count(&self) -> usize {
        self.reached
    }

    /// Returns one more than the largest index of an inode, which is the length of a table with an element for each
    /// inode.
    #[must_use]
    pub fn inode_bound(&self) -> usize {
        self.inodes.len()
    }

    /// Returns one more than the largest index of an xattr set, which is the length of a table with an element for
    /// each set.
    #[must_use]
    pub fn xattrs_bound(&self) -> usize {
        self.xattrs.bound()
    }

    /// Returns the xattrs of a set, in the source's order.
    #[must_use]
    pub fn xattrs(&self, id: XattrsId) -> TreeXattrs<'_> {
        TreeXattrs { tree: self, pairs: self.xattrs.get(id.0) }
    }

    /// Returns all sets of xattrs, each once, including sets that no inode has.
    pub fn xattr_sets(&self) -> impl Iterator<Item = TreeXattrs<'_>> {
        let bound = u32::try_from(self.xattrs.bound()).unwrap_or(u32::MAX);
        (0..bound).map(|id| self.xattrs(XattrsId(id)))
    }

    /// Returns the inode at `path`. Symlinks are not followed.
    #[must_use]
    pub fn resolve(&self, path: &[u8]) -> Option<Inode<'_>> {
        components(path).try_fold(self.root(), |directory, name| directory.lookup(name))
    }

    /// Walks all names below the root with their paths, depth first, siblings in byte order.
    #[must_use]
    pub fn walk(&self) -> Walk<'_> {
        Walk { stack: vec![(self.root().children(), 0)], path: Vec::new(), tree: self }
    }

    /// Returns every regular file once, in the order of the names that own them: depth first, siblings in byte order.
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

    /// Returns the bytes that the tree has allocated on the heap.
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

/// An external file with the numbers of its strings, which are cheap to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct External {
    /// Length in bytes, 1 to 2^63 - 1.
    pub(crate) size: u64,
    /// The string that holds the object id.
    pub(crate) object: Option<StringId>,
    pub(crate) place: StoredLocation,
}

/// A [`Location`] whose path is a string's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredLocation {
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
    /// Returns the inode's id.
    #[must_use]
    pub const fn id(&self) -> InodeId {
        self.id
    }

    /// Returns the permissions, owner, group and modification time.
    #[must_use]
    pub const fn metadata(&self) -> Metadata {
        Metadata {
            permissions: self.raw.permissions,
            uid: self.raw.uid,
            gid: self.raw.gid,
            mtime: Timestamp { seconds: self.raw.seconds, nanoseconds: self.raw.nanoseconds },
        }
    }

    /// Returns `st_mode`: the type and the permissions.
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

    /// Whether the source states 4 GiB or more as the size of a device, pipe or socket.
    pub(crate) const fn has_large_stated_size(&self) -> bool {
        self.raw.flags & STATED_LARGE != 0
    }

    /// Returns the size, object and location of an external file; `None` for other inodes.
    pub(crate) fn external(&self) -> Option<External> {
        let RawInode { size, first, second, .. } = *self.raw;
        let place = match self.raw.kind {
            Kind::ExternalOfObject => StoredLocation::Object,
            Kind::External if second == 0 => StoredLocation::None,
            Kind::External => StoredLocation::Path(StringId(second)),
            _ => return None,
        };
        Some(External { size, object: (first != 0).then_some(StringId(first)), place })
    }

    /// Returns the number of links: 2 plus the number of subdirectories for a directory, otherwise the number that a
    /// dump states or else the number of names.
    #[must_use]
    pub const fn nlink(&self) -> u32 {
        self.raw.nlink
    }

    /// Whether the inode is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.raw.kind == Kind::Directory
    }

    /// Whether the inode is a directory that the source does not describe.
    #[must_use]
    pub const fn is_implicit(&self) -> bool {
        self.raw.flags & IMPLICIT != 0
    }

    /// Returns the type and content.
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

    /// Returns the id of the inode's set of xattrs. Equal sets have equal ids.
    #[must_use]
    pub const fn xattrs_id(&self) -> XattrsId {
        self.raw.xattrs
    }

    /// Returns the inode's xattrs, in the source's order.
    #[must_use]
    pub fn xattrs(&self) -> TreeXattrs<'a> {
        self.tree.xattrs(self.raw.xattrs)
    }

    /// Returns the entries of a directory in byte order; empty for other inodes.
    #[must_use]
    pub fn children(&self) -> Children<'a> {
        let (first, count) = match self.raw.kind {
            Kind::Directory => (self.raw.first, self.raw.second),
            _ => (0, 0),
        };
        Children { tree: self.tree, next: first, end: first + count }
    }

    /// Returns the inode with this name in the directory.
    #[must_use]
    pub fn lookup(&self, name: &[u8]) -> Option<Self> {
        let children = self.children();
        let siblings = &self.tree.entries[children.next as usize..children.end as usize];
        let names = &self.tree.names;
        let at = siblings.binary_search_by(|entry| names.get(entry.name).cmp(name)).ok()?;
        Some(self.tree.inode(InodeId(siblings[at].inode())))
    }

    /// Returns the whole path of the name that owns the inode, with a leading slash; `/` for the root.
    #[must_use]
    pub fn path(&self) -> Vec<u8> {
        let mut path = Vec::new();
        match self.tree.owners[self.id.index()] {
            NO_OWNER => path.push(b'/'),
            owner => self.tree.entry_path(owner as usize, &mut path),
        }
        path
    }

    /// Returns the directory of the name that owns the inode; the root for the root.
    #[must_use]
    pub fn parent(&self) -> Self {
        match self.tree.owners[self.id.index()] {
            NO_OWNER => *self,
            owner => self.tree.inode(InodeId(self.tree.entries[owner as usize].parent)),
        }
    }
}

/// A directory entry.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// File name, 1 to 255 bytes.
    pub name: &'a [u8],
    /// The inode that the name refers to.
    pub inode: Inode<'a>,
    /// Whether this name owns the inode; otherwise it is a further hard link to it.
    pub is_owner: bool,
}

/// Iterates over the entries of a directory, in byte order.
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

/// Iterates over the names and values of a set of xattrs, in the source's order.
#[derive(Debug, Clone)]
pub struct TreeXattrs<'a> {
    tree: &'a Tree,
    pairs: &'a [u8],
}

impl<'a> Iterator for TreeXattrs<'a> {
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

impl ExactSizeIterator for TreeXattrs<'_> {}

/// Walks a tree depth first. `Walk` is not an [`Iterator`], because it returns a path that borrows from it.
#[derive(Debug)]
pub struct Walk<'a> {
    tree: &'a Tree,
    /// The open directories, each with the length of its path in bytes.
    stack: Vec<(Children<'a>, usize)>,
    path: Vec<u8>,
}

impl<'a> Walk<'a> {
    /// Returns the next name: its whole path with a leading slash, and its entry.
    #[expect(
        clippy::should_implement_trait,
        reason = "the path borrows from the iterator, which Iterator cannot express"
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
