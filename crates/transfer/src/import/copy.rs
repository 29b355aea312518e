//! Builds trees from other trees.

use std::collections::HashMap;

use image::tree::{Builder, Content, InodeId, Link, Metadata, Node, Tree, TreeError, XattrsId};
use image::verity::ObjectId;
use store::walk::{KeptXattrs, Times};

/// Copies a tree into a builder that counts links in the same way as for trees of layers.
pub(super) fn thawed(tree: &Tree) -> Result<Builder, TreeError> {
    let mut builder = Builder::new();
    builder.lay(tree).map_err(|error| error.source)?;
    Ok(builder)
}

/// The data of a file.
#[derive(Debug)]
pub(super) enum FileData {
    /// The object, which is at its usual path.
    Object(ObjectId),
    /// The bytes, which become a part of the image.
    Inline(Vec<u8>),
}

/// The metadata that a copy keeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptMetadata {
    pub(super) xattrs: KeptXattrs,
    pub(super) times: Times,
}

impl KeptMetadata {
    pub(super) const ALL: Self = Self { xattrs: KeptXattrs::All, times: Times::Exact };

    /// Whether all metadata is kept.
    pub(super) const fn is_all(self) -> bool {
        matches!(self.xattrs, KeptXattrs::All) && matches!(self.times, Times::Exact)
    }

    pub(super) fn is_kept(self, name: &[u8]) -> bool {
        match self.xattrs {
            KeptXattrs::All => true,
            KeptXattrs::UserOnly => name.starts_with(b"user."),
            KeptXattrs::None => false,
        }
    }

    pub(super) fn of(self, metadata: Metadata) -> Metadata {
        let mut mtime = metadata.mtime;
        match self.times {
            Times::Exact => {}
            Times::WholeSeconds => mtime.nanoseconds = 0,
            Times::Epoch => (mtime.seconds, mtime.nanoseconds) = (0, 0),
        }
        Metadata { mtime, ..metadata }
    }
}

/// Copies a tree. These files get this data. Link counts are kept as stated.
pub(super) fn relocated(
    tree: &Tree,
    data: &HashMap<InodeId, FileData>,
    kept: KeptMetadata,
) -> Result<Tree, TreeError> {
    let mut builder = Builder::new();
    let mut ids = vec![None; tree.inode_bound()];
    let mut xattr_sets = vec![None; tree.xattrs_bound()];
    let mut xattrs = |builder: &mut Builder, id: XattrsId| match xattr_sets[id.index()] {
        Some(known) => Ok(known),
        None => {
            let set = tree.xattrs(id).filter(|(name, _)| kept.is_kept(name));
            builder.xattrs(set).inspect(|new| xattr_sets[id.index()] = Some(*new))
        }
    };
    let root = tree.root();
    let root_xattrs = xattrs(&mut builder, root.xattrs_id())?;
    builder.describe(InodeId::ROOT, &kept.of(root.metadata()), root_xattrs)?;
    ids[InodeId::ROOT.index()] = Some(InodeId::ROOT);
    let mut open = vec![root];
    while let Some(directory) = open.pop() {
        let above = ids[directory.id().index()].expect("pushed when it had an id");
        for entry in directory.children() {
            let inode = entry.inode;
            let id = match ids[inode.id().index()] {
                Some(known) => known,
                None => {
                    let set = xattrs(&mut builder, inode.xattrs_id())?;
                    let found = data.get(&inode.id());
                    let node = match found {
                        Some(FileData::Inline(bytes)) => Node::Regular(Content::Inline(bytes)),
                        _ => inode.node(),
                    };
                    let id = builder.inode(&kept.of(inode.metadata()), set, node)?;
                    if let Some(FileData::Object(object)) = found {
                        builder.set_object(id, object)?;
                    }
                    builder.state_nlink(id, inode.nlink());
                    ids[inode.id().index()] = Some(id);
                    id
                }
            };
            let link = if entry.is_owner { Link::Owner } else { Link::Equal };
            builder.insert(above, entry.name, id, link)?;
            if inode.is_directory() {
                open.push(inode);
            }
        }
    }
    Ok(builder.finish())
}
