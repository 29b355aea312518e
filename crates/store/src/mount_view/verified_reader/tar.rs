//! Rebuilds the exact tar of a layer from its recipe and the objects.

use std::io::{self, Read};

use image::tar::recipe::{Objects, RebuildError, TarReader};
use image::verity::ObjectId;

use super::{BytesError, VerifiedBytes};
use crate::shelf::devices::ObjectReader;
use crate::shelf::layers::{RecipeReader, StoredLayer};
use crate::shelf::objects::ObjectLookupError;
use crate::store::Store;
use image::digest::Digest;

impl Store {
    /// Returns the exact tar of a layer. It ends without an error only if its bytes match the diff id.
    ///
    /// # Errors
    /// [`BytesError`] if the layer is absent or damaged.
    pub fn layer_tar(&self, diff_id: &Digest) -> Result<VerifiedBytes<'_>, BytesError> {
        let layer = self.layers.open(diff_id).map_err(BytesError::Layer)?;
        let layer = layer.ok_or(BytesError::NoLayer(*diff_id))?;
        let size = layer.info().size;
        let tar = LayerTar::new(&layer, |id: &ObjectId| self.object(id))?;
        Ok(VerifiedBytes::new(tar, *diff_id, size))
    }
}

/// A layer's tar that is not compared with a digest. An [`io::Error`] of it contains a [`BytesError`].
pub(crate) struct LayerTar<O>(TarReader<RecipeReader, Opened<O>>);

impl<O: FnMut(&ObjectId) -> Result<ObjectReader, ObjectLookupError>> LayerTar<O> {
    /// Returns the tar of `layer`, with objects opened by `open`.
    pub(crate) fn new(layer: &StoredLayer, open: O) -> Result<Self, BytesError> {
        let recipe = layer.recipe().map_err(BytesError::Layer)?;
        let tar = TarReader::new(recipe, Opened { open, last: None });
        Ok(Self(tar.map_err(BytesError::Recipe)?))
    }
}

impl<O: FnMut(&ObjectId) -> Result<ObjectReader, ObjectLookupError>> LayerTar<O> {
    /// Skips `count` bytes, without reading the contents of objects.
    pub(crate) fn skip(&mut self, count: u64) -> Result<u64, BytesError> {
        self.0.skip(count).map_err(BytesError::Recipe)
    }
}

impl<O: FnMut(&ObjectId) -> Result<ObjectReader, ObjectLookupError>> Read for LayerTar<O> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| match error.downcast() {
            Ok(RebuildError::Object { object, source }) => match source.downcast() {
                Ok(error) => BytesError::into_io(error),
                Err(source) => BytesError::Read { object, source }.into_io(),
            },
            Ok(error) => BytesError::Recipe(error).into_io(),
            Err(error) => error,
        })
    }
}

/// Opens objects on demand, and keeps the last one open, because sparse files have many ranges of one object.
struct Opened<O> {
    open: O,
    last: Option<(ObjectId, ObjectReader)>,
}

impl<O: FnMut(&ObjectId) -> Result<ObjectReader, ObjectLookupError>> Objects for Opened<O> {
    fn read_at(&mut self, object: &ObjectId, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let file = match &mut self.last {
            Some((last, file)) if last == object => file,
            other => {
                let file = (self.open)(object).map_err(|it| BytesError::Object(it).into_io())?;
                &mut other.insert((*object, file)).1
            }
        };
        file.read_at(into, offset)
    }
}
