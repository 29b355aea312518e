//! Derives a tree that an unprivileged user may mount.

use std::collections::BTreeSet;

use super::{
    Builder, InodeId, Link, Metadata, NAME_MAX, Node, Tree, TreeError, XATTR_NAME_MAX, XattrsId,
    components,
};

/// The user that a tree is derived for.
pub struct TreeUser<'a> {
    /// Maps an owner and group of the tree to ids in the user's namespace.
    pub owner: &'a dyn Fn(u32, u32) -> (u32, u32),
    /// Paths that the tree needs as mount points. A path that does not exist is added with its parent directories: as
    /// an empty directory if it ends with a slash, otherwise as an empty file. A path is skipped if one of its
    /// parents is not a directory.
    pub places: &'a [&'a [u8]],
}

impl std::fmt::Debug for TreeUser<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("TreeUser").field("places", &self.places).finish_non_exhaustive()
    }
}

/// A tree that was derived for a user.
#[derive(Debug)]
pub struct UserTree {
    /// The tree.
    pub tree: Tree,
    /// Number of device nodes, which are left out. Hard links to the same node count once.
    pub devices: u64,
}

/// Prefix of the xattrs that an overlay with `userxattr` reserves.
const OVERLAY: &[u8] = b"user.overlay.";
/// The image writers insert this after [`OVERLAY`] to escape the source's xattrs that have that prefix.
const ESCAPE: &[u8] = b"overlay.";

/// Derives a tree for a user: without devices, without xattrs that only root may set (`trusted.`, and labels of
/// security modules), and with owners that exist in the user's namespace.
///
/// # Errors
/// [`TreeError`] if a place contains an invalid name, or an xattr's name is too long to be escaped.
pub fn for_user(tree: &Tree, user: &TreeUser<'_>) -> Result<UserTree, TreeError> {
    let mut copy = Copy {
        user,
        builder: Builder::new(),
        inodes: vec![None; tree.inode_bound()],
        xattrs: vec![None; tree.xattrs_bound()],
        devices: BTreeSet::new(),
    };
    let root = tree.root();
    let xattrs = copy.xattrs(tree, root.xattrs_id())?;
    copy.builder.describe(InodeId::ROOT, &copy.metadata(&root.metadata()), xattrs)?;
    let mut waiting = vec![(root, InodeId::ROOT)];
    while let Some((directory, here)) = waiting.pop() {
        for entry in directory.children() {
            let Some(inode) = copy.inode(tree, entry.inode.id())? else { continue };
            copy.builder.insert(here, entry.name, inode, Link::Equal)?;
            if entry.inode.is_directory() {
                waiting.push((entry.inode, inode));
            }
        }
    }
    for place in user.places {
        copy.place(place)?;
    }
    let devices = copy.devices.len() as u64;
    Ok(UserTree { tree: copy.builder.finish(), devices })
}

/// Whether an unprivileged user may set an xattr of this name. The only `security.` xattr that is allowed is
/// `security.capability`, which takes effect only in the user's namespace. The others are labels of security modules,
/// which the kernel would trust.
#[must_use]
pub fn is_users_xattr(name: &[u8]) -> bool {
    let is_security = name.starts_with(b"security.") && name != b"security.capability";
    !is_security && !name.starts_with(b"trusted.")
}

struct Copy<'a> {
    user: &'a TreeUser<'a>,
    builder: Builder,
    /// New ids, indexed by the ids in the source.
    inodes: Vec<Option<InodeId>>,
    xattrs: Vec<Option<XattrsId>>,
    /// Indexes of the source's device nodes.
    devices: BTreeSet<usize>,
}

impl Copy<'_> {
    fn metadata(&self, metadata: &Metadata) -> Metadata {
        let (uid, gid) = (self.user.owner)(metadata.uid, metadata.gid);
        Metadata { uid, gid, ..*metadata }
    }

    /// Copies an inode; returns `None` for a device.
    fn inode(&mut self, tree: &Tree, id: InodeId) -> Result<Option<InodeId>, TreeError> {
        if let Some(here) = self.inodes[id.index()] {
            return Ok(Some(here));
        }
        let inode = tree.inode(id);
        let node = inode.node();
        if matches!(node, Node::CharDevice(_) | Node::BlockDevice(_)) {
            self.devices.insert(id.index());
            return Ok(None);
        }
        let xattrs = self.xattrs(tree, inode.xattrs_id())?;
        let here = self.builder.inode(&self.metadata(&inode.metadata()), xattrs, node)?;
        self.inodes[id.index()] = Some(here);
        Ok(Some(here))
    }

    fn xattrs(&mut self, tree: &Tree, id: XattrsId) -> Result<XattrsId, TreeError> {
        if let Some(here) = self.xattrs[id.index()] {
            return Ok(here);
        }
        let kept = tree.xattrs(id).filter(|(name, _)| is_users_xattr(name));
        let kept: Vec<_> = kept.collect();
        let is_long = |name: &[u8]| {
            name.starts_with(OVERLAY) && name.len() > XATTR_NAME_MAX.saturating_sub(ESCAPE.len())
        };
        if let Some((name, _)) = kept.iter().find(|(name, _)| is_long(name)) {
            return Err(TreeError::XattrName(name.to_vec()));
        }
        let here = self.builder.xattrs(kept)?;
        self.xattrs[id.index()] = Some(here);
        Ok(here)
    }

    fn place(&mut self, path: &[u8]) -> Result<(), TreeError> {
        let mut names: Vec<_> = components(path).collect();
        let Some(last) = names.pop() else { return Ok(()) };
        let mut here = InodeId::ROOT;
        for name in names {
            here = match self.builder.lookup(here, name) {
                Some(found) if self.builder.is_directory(found) => found,
                Some(_) => return Ok(()),
                None => self.add(here, name, 0o755, Node::Directory)?,
            };
        }
        if self.builder.lookup(here, last).is_none() {
            let (permissions, node) = match path.ends_with(b"/") {
                true => (0o755, Node::Directory),
                false => (0o644, Node::Regular(super::Content::Inline(&[]))),
            };
            self.add(here, last, permissions, node)?;
        }
        Ok(())
    }

    fn add(
        &mut self,
        directory: InodeId,
        name: &[u8],
        permissions: u16,
        node: Node<'_>,
    ) -> Result<InodeId, TreeError> {
        debug_assert!(name.len() <= NAME_MAX, "insert refuses it");
        let metadata = self.metadata(&Metadata { permissions, ..Metadata::IMPLICIT });
        let added = self.builder.inode(&metadata, XattrsId::NONE, node)?;
        self.builder.insert(directory, name, added, Link::Equal)?;
        Ok(added)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Content, Timestamp};

    fn file(builder: &mut Builder, path: &str, node: Node<'_>, owner: (u32, u32)) -> InodeId {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let directory = components(above.as_bytes())
            .fold(InodeId::ROOT, |here, name| builder.subdirectory(here, name).unwrap());
        let metadata = Metadata {
            permissions: 0o640,
            uid: owner.0,
            gid: owner.1,
            mtime: Timestamp { seconds: 7, nanoseconds: 8 },
        };
        let pairs: [(&[u8], &[u8]); 3] =
            [(b"user.x", b"1"), (b"trusted.y", b"2"), (b"user.overlay.opaque", b"y")];
        let xattrs = builder.xattrs(pairs).unwrap();
        let inode = builder.inode(&metadata, xattrs, node).unwrap();
        builder.insert(directory, name.as_bytes(), inode, Link::Equal).unwrap();
        inode
    }

    fn paths(tree: &Tree) -> Vec<String> {
        let (mut walk, mut paths) = (tree.walk(), Vec::new());
        while let Some((path, _)) = walk.next() {
            paths.push(String::from_utf8_lossy(path).into_owned());
        }
        paths
    }

    #[test]
    fn a_tree_has_what_a_user_may_have() {
        let mut builder = Builder::new();
        let shared = file(&mut builder, "a/one", Node::Regular(Content::Inline(b"x")), (5, 6));
        builder.insert(InodeId::ROOT, b"two", shared, Link::Equal).unwrap();
        let zero = file(&mut builder, "a/zero", Node::CharDevice(0x105), (0, 0));
        builder.insert(InodeId::ROOT, b"zero", zero, Link::Equal).unwrap();
        file(&mut builder, "disk", Node::BlockDevice(0x800), (0, 0));
        file(&mut builder, "whiteout", Node::CharDevice(0), (0, 0));
        file(&mut builder, "fifo", Node::Fifo, (70_000, 1));
        file(&mut builder, "link", Node::Symlink(b"a"), (0, 0));
        let owner = |user, group| (if user == 70_000 { 65_534 } else { user }, group + 1);
        let places: [&[u8]; 8] = [
            b"/a/one",
            b"new/deep/file",
            b"link/x",
            b"two/x",
            b"//fifo",
            b"/proc/",
            b"/a/",
            b"/two/",
        ];
        let made = for_user(&builder.finish(), &TreeUser { owner: &owner, places: &places });
        let UserTree { tree, devices } = made.unwrap();
        assert_eq!(devices, 3);
        let expect = [
            "/a",
            "/a/one",
            "/fifo",
            "/link",
            "/new",
            "/new/deep",
            "/new/deep/file",
            "/proc",
            "/two",
        ];
        assert_eq!(paths(&tree), expect);
        assert!(tree.resolve(b"proc").unwrap().is_directory());
        let one = tree.resolve(b"a/one").unwrap();
        assert_eq!((one.id(), one.nlink()), (tree.resolve(b"two").unwrap().id(), 2));
        let of_file = one.metadata();
        assert_eq!((of_file.uid, of_file.gid, of_file.permissions), (5, 7, 0o640));
        assert_eq!(of_file.mtime, Timestamp { seconds: 7, nanoseconds: 8 });
        let names: Vec<_> = one.xattrs().map(|(name, _)| name.to_vec()).collect();
        assert_eq!(names, [&b"user.x"[..], b"user.overlay.opaque"]);
        assert_eq!(tree.resolve(b"fifo").unwrap().metadata().uid, 65_534);
        let place = tree.resolve(b"new/deep/file").unwrap();
        assert!(matches!(place.node(), Node::Regular(Content::Inline(b""))));
        assert_eq!((place.metadata().permissions, place.metadata().gid), (0o644, 1));
    }

    #[test]
    fn what_cannot_be_escaped_is_refused() {
        for (length, is_right) in [(247, true), (248, false)] {
            let name = [OVERLAY, &vec![b'x'; length - OVERLAY.len()]].concat();
            let mut builder = Builder::new();
            let xattrs = builder.xattrs([(&name[..], &b""[..])]).unwrap();
            builder.describe(InodeId::ROOT, &Metadata::IMPLICIT, xattrs).unwrap();
            let user = TreeUser { owner: &|user, group| (user, group), places: &[] };
            let made = for_user(&builder.finish(), &user);
            assert_eq!(made.is_ok(), is_right, "{length}");
            if let Ok(made) = made {
                let mut image = Vec::new();
                crate::erofs::write(&made.tree, &crate::erofs::Profile::Stubs, &mut image).unwrap();
            }
        }
    }
}
