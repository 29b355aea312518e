//! The layers of an import.

use std::io;

use super::Transaction;
use super::draft::Scrap;
use crate::shelf::item::StoreItem;
use crate::shelf::layers::{Blob, LayerInfo, LayerWriter, StoredLayer, StoredLayerError};

/// An unfinished layer. It implements `Write` for the recipe. Dropping it removes its file.
pub struct LayerDraft<'t> {
    transaction: &'t Transaction<'t>,
    scrap: Scrap<'t>,
    writer: LayerWriter,
}

impl std::fmt::Debug for LayerDraft<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut layer = f.debug_struct("LayerDraft");
        layer.field("file", &self.scrap).field("recipe_size", &self.writer.recipe_size()).finish()
    }
}

impl<'t> LayerDraft<'t> {
    pub(crate) fn new(transaction: &'t Transaction<'t>) -> Result<Self, StoredLayerError> {
        let (scrap, file) = Scrap::new(transaction)?;
        let writer = LayerWriter::new(file).map_err(|source| transaction.recipe_failed(source))?;
        Ok(Self { transaction, scrap, writer })
    }

    /// Ends the recipe. The layer becomes visible when the transaction is committed. The caller must have checked
    /// that the tar has `info.diff_id`. If the store has the layer already, the blobs of both are recorded.
    ///
    /// # Errors
    /// [`StoredLayerError`] if the layer cannot be written.
    pub fn finish(self, mut info: LayerInfo) -> Result<(), StoredLayerError> {
        let Self { transaction, scrap, writer } = self;
        transaction.list(&StoreItem::Layer(info.diff_id))?;
        let place = match transaction.store().layers.open(&info.diff_id) {
            Ok(Some(before)) => {
                let before = before.info();
                if info.blobs.iter().all(|it| !it.is_hashed || before.is_in(&it.digest)) {
                    transaction.keep_layer(&info.diff_id);
                    return Ok(());
                }
                info.add_known(&before.blobs);
                LayerPlace::Newer
            }
            Ok(None) => LayerPlace::Free,
            // Replacing a file that cannot be read would lose its records of blobs.
            Err(StoredLayerError::Disk(error)) if !error.is_not_a_file() => {
                return Err(error.into());
            }
            Err(error) => {
                tracing::debug!(%error, "replacing a damaged layer");
                LayerPlace::Damaged
            }
        };
        writer.finish(&info).map_err(|source| transaction.recipe_failed(source))?;
        transaction.finish_layer(scrap.keep(), &info.diff_id, place);
        Ok(())
    }
}

impl io::Write for LayerDraft<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes).inspect_err(|_| self.transaction.fail())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The file that a new layer replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerPlace {
    /// None.
    Free,
    /// A damaged file.
    Damaged,
    /// A sound file of the same layer, with less information.
    Newer,
}

impl Transaction<'_> {
    /// Records that this blob is a layer of the store, and the blob's repositories. `is_hashed` means that the caller
    /// hashed all of its bytes while it unpacked or compressed this layer. The record becomes visible when the
    /// transaction is committed.
    ///
    /// # Errors
    /// [`StoredLayerError`] if the record cannot be written.
    pub fn add_blob(&self, layer: &StoredLayer, blob: Blob) -> Result<(), StoredLayerError> {
        let mut info = LayerInfo { blobs: vec![blob], ..layer.info().clone() };
        info.add_known(&layer.info().blobs);
        let (scrap, file) = Scrap::new(self)?;
        layer.copy(file, &info).map_err(|source| self.recipe_failed(source))?;
        self.finish_layer(scrap.keep(), &info.diff_id, LayerPlace::Newer);
        Ok(())
    }

    fn recipe_failed(&self, source: io::Error) -> StoredLayerError {
        self.fail();
        StoredLayerError::Recipe { action: "write", source }
    }
}
