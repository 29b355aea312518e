//! Labels the files of a draft, and turns it into a tree.

use std::collections::BTreeMap;

use super::{ComposefsLayout, Draft, Item, ItemKind, KEPT_XATTR, LabelPolicy, ROOT};
use crate::tree::{
    Builder, Content, InodeId, Link, Location, Metadata, Node, Tree, TreeError, XattrsId,
};
use crate::verity::ObjectId;

/// The xattr of labels.
const LABEL_XATTR: &[u8] = b"security.selinux";

/// A directory whose names are being visited.
struct Open {
    /// The names, in descending order.
    names: Vec<(Box<[u8]>, u32)>,
    /// Path for the policy.
    path: Vec<u8>,
    directory: u32,
}

impl Draft {
    /// Labels all files by the policy of the image. Rules B2 to B4. `is_time_to_stop` is called for each name.
    ///
    /// # Errors
    /// [`LabelError`](super::LabelError) if the policy takes too much memory, the draft is too large, or it is time to
    /// stop.
    pub fn relabel(
        &mut self,
        policy: &mut LabelPolicy,
        is_time_to_stop: &dyn Fn() -> bool,
    ) -> Result<(), super::LabelError> {
        self.labels = policy.labels().to_vec();
        // For each file that has a label: the label by the first of its names.
        let mut first: BTreeMap<u32, Option<u32>> = BTreeMap::new();
        self.items[ROOT as usize].label = policy.label(b"/", b'd')?;
        let mut open = vec![self.open(ROOT, b"/".to_vec())];
        while let Some(directory) = open.last_mut() {
            let Some((name, at)) = directory.names.pop() else {
                open.pop();
                continue;
            };
            if is_time_to_stop() {
                return Err(super::LabelError::Stopped);
            }
            let mut path = directory.path.clone();
            if path.last() != Some(&b'/') {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            if let Some(other) = policy.substitute(&path) {
                path = other.to_vec();
            }
            let parent = directory.directory;
            let label = policy.label(&path, self.items[at as usize].kind.letter())?;
            if self.is_directory(at) {
                self.items[at as usize].label = label;
                open.push(self.open(at, path));
                continue;
            }
            let at = match first.get(&at) {
                // Two names of one file cannot have two labels.
                Some(known) if *known != label => {
                    let copy = self.items[at as usize].clone();
                    let new = u32::try_from(self.items.len())
                        .map_err(|_out_of_range| super::LabelError::TooLarge)?;
                    self.items.push(copy);
                    self.children_mut(parent).insert(name, new);
                    new
                }
                _ => at,
            };
            self.items[at as usize].label = label;
            first.entry(at).or_insert(label);
        }
        Ok(())
    }

    /// Returns the names of a directory, for a walk.
    fn open(&self, at: u32, path: Vec<u8>) -> Open {
        let names = self.children(at).iter().rev();
        Open { names: names.map(|(name, at)| (name.clone(), *at)).collect(), path, directory: at }
    }

    /// Makes the tree, with the ids that `id_of` returns for the objects. Rules W1 and W2.
    ///
    /// # Errors
    /// [`TreeError`] if a tree cannot hold a file.
    pub fn into_tree(
        self,
        layout: ComposefsLayout,
        id_of: impl Fn(&ObjectId) -> ObjectId,
    ) -> Result<Tree, TreeError> {
        let mut builder = Builder::new();
        let root = &self.items[ROOT as usize];
        let xattrs = self.xattrs(root, &mut builder)?;
        builder.describe(InodeId::ROOT, &root.metadata, xattrs)?;
        let mut made: Vec<Option<InodeId>> = vec![None; self.items.len()];
        let mut open = vec![(InodeId::ROOT, self.children(ROOT).iter())];
        let is_in_root = |open: &Vec<_>| open.len() == 1;
        while let Some((directory, names)) = open.last_mut() {
            let Some((name, &at)) = names.next() else {
                open.pop();
                continue;
            };
            let directory = *directory;
            let item = &self.items[at as usize];
            // The writer adds these names itself.
            if layout == ComposefsLayout::V1 && is_in_root(&open) && self.is_stub(name, item) {
                continue;
            }
            let known = made[at as usize];
            let inode = match known {
                Some(inode) => inode,
                None => {
                    let xattrs = self.xattrs(item, &mut builder)?;
                    let node = item.kind.node(&id_of);
                    let inode = builder.inode(&item.metadata, xattrs, node)?;
                    made[at as usize] = Some(inode);
                    inode
                }
            };
            // The walk is in the order of composefs-rs's dumps, in which the first name owns the file.
            let link = if known.is_none() { Link::Owner } else { Link::Equal };
            builder.insert(directory, name, inode, link)?;
            if let ItemKind::Directory(children) = &item.kind {
                open.push((inode, children.iter()));
            }
        }
        Ok(builder.finish())
    }

    /// Whether a device in the root is, in all respects, one of the 256 that every image gets. composefs-rs writes it
    /// as such, although C's `mkcomposefs` escapes it. Rule W2.
    fn is_stub(&self, name: &[u8], item: &Item) -> bool {
        let root = &self.items[ROOT as usize];
        let is_hex = |it: &u8| it.is_ascii_digit() || (b'a'..=b'f').contains(it);
        let metadata = Metadata { permissions: 0o644, ..root.metadata };
        matches!(item.kind, ItemKind::CharDevice(0))
            && name.len() == 2
            && name.iter().all(is_hex)
            && (item.metadata, item.label) == (metadata, root.label)
            && item.capability.is_none()
    }

    fn xattrs(&self, item: &Item, builder: &mut Builder) -> Result<XattrsId, TreeError> {
        let label = item.label.and_then(|it| self.labels.get(it as usize));
        let pairs = item.capability.as_deref().map(|it| (KEPT_XATTR, it)).into_iter();
        let pairs = pairs.chain(label.map(|it| (LABEL_XATTR, &it[..])));
        builder.xattrs(pairs)
    }
}

impl ItemKind {
    /// Returns the letter of the type in SELinux policies. Source: selabel_file(5).
    const fn letter(&self) -> u8 {
        match self {
            Self::Directory(_) => b'd',
            Self::Inline(_) | Self::External { .. } => b'-',
            Self::Symlink(_) => b'l',
            Self::CharDevice(_) => b'c',
            Self::BlockDevice(_) => b'b',
            Self::Fifo => b'p',
            Self::Socket => b's',
        }
    }

    fn node(&self, id_of: &impl Fn(&ObjectId) -> ObjectId) -> Node<'_> {
        match self {
            Self::Directory(_) => Node::Directory,
            Self::Inline(bytes) => Node::Regular(Content::Inline(bytes)),
            Self::External { size, object } => {
                let object = object.as_ref().map(id_of);
                let location = if object.is_some() { Location::Object } else { Location::None };
                Node::Regular(Content::External { size: *size, object, location })
            }
            Self::Symlink(target) => Node::Symlink(target),
            Self::CharDevice(number) => Node::CharDevice(*number),
            Self::BlockDevice(number) => Node::BlockDevice(*number),
            Self::Fifo => Node::Fifo,
            Self::Socket => Node::Socket,
        }
    }
}
