//! The images of a store, and the objects that they need.

use image::erofs::read::{Cached, Image, Owners, ReadError, View, to_tree};
use image::tree::{Content, Node};
use image::verity::ObjectId;

use crate::data::BlobKind;
use crate::open::ImageFile;
use crate::refs::Form;
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

/// A data blob that an image has as a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// Its name; none if the device table has something else.
    pub(crate) blob: Option<ObjectId>,
    /// Its length, as the image says.
    pub(crate) bytes: u64,
}

/// What the superblock of an image says of where its data is.
#[derive(Debug)]
pub(crate) struct Devices {
    pub(crate) form: Form,
    /// In order; none of a composefs image.
    pub(crate) uses: Vec<DeviceUse>,
}

/// Reads the table of devices.
pub(crate) fn devices(image: &ImageFile) -> Result<Devices, ContentsError> {
    let image = Image::open(image)?;
    let block = image.superblock().block_bits.size();
    let uses = image
        .devices()
        .iter()
        .map(|slot| DeviceUse { blob: id_of(&slot.tag), bytes: slot.blocks.saturating_mul(block) });
    let uses: Vec<_> = uses.collect();
    let form = match (uses.is_empty(), block == BlobKind::Tar.block_size()) {
        (true, _) => Form::Objects,
        (false, true) => Form::Tar,
        (false, false) => Form::Packed,
    };
    Ok(Devices { form, uses })
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
