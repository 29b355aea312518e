//! Builds trees from other trees.

use std::collections::HashMap;

use image::tree::{Builder, InodeId, Link, Tree, TreeError, XattrsId};
use image::verity::ObjectId;

/// Copies a tree into a builder that counts links in the same way as for trees of layers.
pub(super) fn thawed(tree: &Tree) -> Result<Builder, TreeError> {
    let mut builder = Builder::new();
    builder.lay(tree).map_err(|error| error.source)?;
    Ok(builder)
}

/// Copies a tree. The data of these files is relocated to the paths of their objects. Link counts are kept as stated.
pub(super) fn relocated(
    tree: &Tree,
    objects: &HashMap<InodeId, ObjectId>,
) -> Result<Tree, TreeError> {
    let mut builder = Builder::new();
    let mut ids = vec![None; tree.inode_bound()];
    let mut xattr_sets = vec![None; tree.xattrs_bound()];
    let mut xattrs = |builder: &mut Builder, id: XattrsId| match xattr_sets[id.index()] {
        Some(known) => Ok(known),
        None => builder.xattrs(tree.xattrs(id)).inspect(|new| xattr_sets[id.index()] = Some(*new)),
    };
    let root = tree.root();
    let root_xattrs = xattrs(&mut builder, root.xattrs_id())?;
    builder.describe(InodeId::ROOT, &root.metadata(), root_xattrs)?;
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
                    let id = builder.inode(&inode.metadata(), set, inode.node())?;
                    if let Some(object) = objects.get(&inode.id()) {
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
