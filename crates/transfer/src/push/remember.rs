//! Records pushed blobs in the store, so that the next push to the same registry compresses and sends less.

use std::collections::BTreeSet;

use store::{Blob, OperationError, Store, StoredLayerError, Transaction};

use super::Sent;
use super::known::repository_of;
use crate::export::{How, PlannedLayer};
use oci::reference::Reference;

/// Records which blobs were made, and which blobs the repository has because they were sent. Errors are only logged,
/// because the push has succeeded and the next push merely has more work.
pub(super) fn remember(store: &Store, target: &Reference, layers: &[PlannedLayer], sent: &[Sent]) {
    let is_new = |(layer, sent): &(&PlannedLayer, &Sent)| {
        is_made(layer.how) || matches!(sent, Sent::Bytes(_))
    };
    let mut seen = BTreeSet::new();
    let layers = layers.iter().zip(sent).filter(is_new).map(|(layer, _)| layer);
    // A transaction can change each record once.
    let layers: Vec<_> = layers.filter(|it| seen.insert(it.diff_id)).collect();
    if layers.is_empty() || !store.is_writable() {
        return;
    }
    let repository = repository_of(target).as_str().to_owned();
    let failed = OperationError::of("change", "the store");
    let note = || -> Result<(), OperationError> {
        let transaction = store.begin().map_err(failed)?;
        for layer in layers {
            let added = add(&transaction, layer, &repository);
            added.map_err(OperationError::of("change", "the record of a layer"))?;
        }
        transaction.commit().map(drop).map_err(failed)
    };
    if let Err(error) = note() {
        let error: &dyn std::error::Error = &error;
        tracing::debug!(error, repository, "cannot record the pushed blobs");
    }
}

/// Whether the blob was just made from the tar and hashed. Both digests, the tar's and the blob's, were compared
/// before the registry received the last bytes.
const fn is_made(how: How) -> bool {
    match how {
        How::Compressed | How::New => true,
        How::There | How::Kept | How::Plain => false,
    }
}

fn add(
    transaction: &Transaction<'_>,
    layer: &PlannedLayer,
    repository: &str,
) -> Result<(), StoredLayerError> {
    let Some(stored) = transaction.reuse_layer(&layer.diff_id)? else { return Ok(()) };
    let descriptor = &layer.descriptor;
    let known = stored.info().blobs.iter().find(|it| it.digest == descriptor.digest);
    let media_type = known.map_or(&descriptor.media_type, |it| &it.media_type);
    let blob = Blob {
        digest: descriptor.digest,
        size: descriptor.size,
        media_type: media_type.clone(),
        // A blob whose digest is the diff id is the tar itself. For a blob in the store, the flag of its record is not
        // changed.
        is_hashed: is_made(layer.how) || descriptor.digest == layer.diff_id,
        repositories: vec![repository.to_owned()],
    };
    transaction.add_blob(&stored, blob)
}
