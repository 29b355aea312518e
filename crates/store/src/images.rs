//! The images of a store, and the objects that they need.

use image::erofs::read::{Cached, Image, Owners, ReadError, View, to_tree};
use image::tree::{Content, Node};
use image::verity::ObjectId;

use crate::open::ImageFile;
use crate::store::{Store, StoreError};

impl Store {
    /// The ids of all images, in order, with or without a ref.
    ///
    /// # Errors
    /// [`StoreError`] when the directory cannot be read.
    pub fn images(&self) -> Result<Vec<ObjectId>, StoreError> {
        let algorithm = self.algorithm();
        let listed = self.images.list()?;
        let ids = listed.iter().filter_map(|it| id_of(&it.name));
        Ok(ids.filter(|id| id.algorithm() == algorithm).collect())
    }
}

/// The id that a file is named by: lower case only, so that it has one name.
pub(crate) fn id_of(name: &[u8]) -> Option<ObjectId> {
    let id = ObjectId::from_hex(name).ok()?;
    (id.to_string().as_bytes() == name).then_some(id)
}

/// A file of an image whose bytes are an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) object: ObjectId,
    /// Length in bytes, as the image says.
    pub(crate) size: u64,
}

/// Why it is not known what an image needs.
#[derive(Debug, thiserror::Error)]
#[error("cannot read what the image needs")]
pub struct ContentsError(#[from] ReadError);

/// Calls `visit` with every path whose bytes are an object, depth first, siblings in byte order.
pub(crate) fn uses(
    image: &ImageFile,
    visit: &mut dyn FnMut(&[u8], Use),
) -> Result<(), ContentsError> {
    let image = Image::open(Cached::new(image))?;
    let tree = to_tree(&image, View::Composefs(Owners::FirstMet))?.tree;
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        if let Node::Regular(Content::External { size, object: Some(object), .. }) =
            entry.inode.node()
        {
            visit(path, Use { object, size });
        }
    }
    Ok(())
}
