//! Reuses layers of the store: the tree is made from the recipe, and an unknown blob is only read to verify its
//! digests.

use std::io::Read;

use store::{Blob, Form, StoredLayer};

use crate::import::decode::{Claimed, Expected};
use crate::import::failure::{LayerFailure, commit_failed, data_failed};
use crate::import::layer;
use crate::import::layer::{ExpectedLayer, Shared, UnpackedLayer};
use crate::import::{Durable, ImportRun};

/// A layer of the store whose tree was made from its recipe. The image must still prove that it may use the layer.
pub(in crate::import) struct Here<'t> {
    layer: StoredLayer,
    gathered: UnpackedLayer<'t>,
}

impl ImportRun<'_> {
    /// Makes the tree of a layer from its recipe. Returns `None` if the store lacks data in the wanted form.
    pub(in crate::import) fn here<'t>(
        &self,
        layer: StoredLayer,
        media_type: &str,
        shared: &Shared<'t, '_, '_>,
    ) -> Result<Option<Here<'t>>, LayerFailure> {
        if !layer::is_read_as(layer.info(), media_type) || !self.has_data(&layer)? {
            return Ok(None);
        }
        let gathered = layer::replay(&layer, shared)?;
        Ok(gathered.map(|gathered| Here { layer, gathered }))
    }

    /// Reads one blob. If `here` has the layer, only compares the digests; otherwise unpacks the blob.
    pub(in crate::import) fn take<'t>(
        &self,
        reader: impl Read + Send,
        wanted: &ExpectedLayer<'_>,
        here: &mut Option<Here<'t>>,
        shared: &Shared<'t, '_, '_>,
        read: &(dyn Fn(u64) + Sync),
    ) -> Result<UnpackedLayer<'t>, LayerFailure> {
        let Some(Here { layer, .. }) = here else {
            return self.store_layer(reader, wanted, shared, read);
        };
        let (blob, index) = layer::check(reader, wanted, shared, read)?;
        self.record(layer, &blob)?;
        let Here { gathered, .. } = here.take().expect("the layer was in the store just now");
        Ok(UnpackedLayer { blob, index, ..gathered })
    }

    /// Records in the store that this blob contains the layer.
    fn record(&self, layer: &StoredLayer, blob: &Blob) -> Result<(), LayerFailure> {
        let info = layer.info();
        if !blob.is_hashed || info.is_in(&blob.digest) {
            return Ok(());
        }
        if self.options.durable == Durable::Together {
            return Ok(self.transaction.add_blob(layer, blob.clone())?);
        }
        // This is a separate commit, as for an unpacked layer, because a later layer may fail.
        let own = self.transaction.begin_inner().map_err(commit_failed)?;
        if own.reuse_layer(&info.diff_id)?.is_some() {
            own.add_blob(layer, blob.clone())?;
            own.commit().map_err(commit_failed)?;
        }
        Ok(())
    }

    /// Makes a layer from its recipe in the store, or from its tar if its data is stored in another form or the recipe
    /// does not suffice. Returns `None` if the store has read it as another kind of layer than `media_type` states.
    pub(in crate::import) fn stored<'t>(
        &self,
        stored: &StoredLayer,
        media_type: &str,
        shared: &Shared<'t, '_, '_>,
    ) -> Result<Option<UnpackedLayer<'t>>, LayerFailure> {
        if !layer::is_read_as(stored.info(), media_type) {
            return Ok(None);
        }
        if self.has_data(stored)?
            && let Some(gathered) = layer::replay(stored, shared)?
        {
            return Ok(Some(gathered));
        }
        let info = stored.info();
        let diff_id = &info.diff_id;
        let Some(blob) = info.blobs.first() else { return Ok(None) };
        let store = self.transaction.store();
        let Ok(reader) = store.layer_tar(diff_id) else { return Ok(None) };
        let wanted = ExpectedLayer {
            expected: Expected { digest: Some(&blob.digest), size: Some(blob.size) },
            media_type: &blob.media_type,
            diff_id: Some(diff_id),
            tar_of: Some(Claimed { digest: blob.digest, size: blob.size }),
            sealed: None,
        };
        shared.totals.add_blob(blob.size);
        match self.store_layer(reader, &wanted, shared, &|_| {}) {
            Ok(mut gathered) => {
                gathered.report.is_reused = true;
                Ok(Some(gathered))
            }
            Err(error) if shared.stop.is_set() || !error.is_of_parts() => Err(error),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(layer = %diff_id, error, "cannot use the store's copy of the layer");
                Ok(None)
            }
        }
    }

    /// Whether the store has a layer's data in the wanted form.
    fn has_data(&self, layer: &StoredLayer) -> Result<bool, LayerFailure> {
        let transaction = &self.transaction;
        let info = layer.info();
        let has = match self.options.form {
            Form::Objects => {
                let has_files = transaction.has_files(&info.objects).map_err(data_failed)?;
                // If an object is too short, the layer is read again, which replaces the object.
                return Ok(has_files && transaction.store().has_whole_layer(&info.diff_id)?);
            }
            Form::Packed => transaction.has_packed(&info.objects),
            Form::Tar => transaction.has_tar(&info.diff_id, &info.objects),
        };
        Ok(has.map_err(data_failed)?)
    }
}
