//! Until the other is there.
use crate::images::ContentsError;
use crate::open::OpenImage;
use crate::store::Store;
use image::erofs::read::{
    Cached, Image, ImageTree, Located, Objects, Owners, View, native_tree, to_tree,
};

impl Store {
    /// As it says.
    ///
    /// # Errors
    /// Yes.
    pub fn tree(&self, image: &OpenImage, owners: Owners) -> Result<ImageTree, ContentsError> {
        let read = Image::open(Cached::new(&image.image))?;
        if read.devices().is_empty() {
            return Ok(to_tree(&read, View::Composefs(owners))?);
        }
        let indexes: Vec<_> =
            image.devices.iter().map(|device| self.index_of(&device.id).unwrap_or(None)).collect();
        let find = |located: &Located| {
            let index = indexes.get(located.device.slot()?)?.as_ref()?;
            let entry = index.at(located.offset.0)?;
            Some(entry.object())
        };
        let objects = Objects { algorithm: self.algorithm(), inline_max: 64, find: &find };
        Ok(native_tree(&read, objects)?)
    }
}
