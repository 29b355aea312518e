//! Makes the indexes of layers while an import reads the layers.

use image::digest::Digest;
use image::verity::DeviceId;

use super::decode::read_index::ReadIndex;
use super::failure::{LayerFailure, data_failed};
use super::layers::LayerSource;
use super::{ImportError, ImportRun, LayerIndexed, LayerReport};
use crate::lazy::{NoIndex, index_bytes};

impl ImportRun<'_> {
    /// Whether a layer must be read to make its index, even if the store has its files.
    pub(super) fn lacks_index(&self, source: &LayerSource<'_>) -> Result<bool, LayerFailure> {
        if !self.options.index {
            return Ok(false);
        }
        let (Some(diff_id), Some(blob)) = (&source.diff_id, &source.digest) else {
            return Ok(true);
        };
        let device = self.transaction.reuse_tar(diff_id).map_err(data_failed)?;
        Ok(!device.is_some_and(|device| self.has_index(&device.id, blob)))
    }

    /// Whether the store has the index of this blob's device. A damaged index counts as missing.
    fn has_index(&self, device: &DeviceId, blob: &Digest) -> bool {
        let head = self.transaction.store().lazy_devices.index_head(device);
        head.is_ok_and(|it| it.is_some_and(|head| head.blob == *blob))
    }

    /// Adds the indexes of the layers that are devices of the image to the transaction, and reports the result for
    /// each.
    pub(super) fn put_indexes(
        &self,
        read: Vec<ReadIndex>,
        reports: &mut [LayerReport],
        devices: &[DeviceId],
    ) -> Result<(), ImportError> {
        for (ReadIndex { blob, parts }, report) in read.into_iter().zip(reports) {
            let diff_id = report.diff_id;
            let failed = |source: Box<dyn std::error::Error + Send + Sync>| {
                ImportError::failed("store", format!("the index of layer {diff_id}"), source)
            };
            let mut device = None;
            for id in devices {
                let layer = self.transaction.layer_of(id).map_err(|it| failed(Box::new(it)))?;
                device = device.or((layer == Some(diff_id)).then_some(id));
            }
            let parts = match (device, parts) {
                (None, _) => Err(NoIndex::Unused),
                (Some(device), Some(Ok(parts))) => Ok((device, parts)),
                (Some(_), Some(Err(error))) => Err(NoIndex::of_blob(error)),
                (Some(device), None) if self.has_index(device, &blob.digest) => {
                    report.index = LayerIndexed::Here;
                    continue;
                }
                (Some(_), None) => Err(NoIndex::NotCompressed),
            };
            report.index = match parts {
                Err(reason) => LayerIndexed::None(reason.to_string()),
                Ok((device, parts)) => {
                    let tail = self.transaction.device_tail(device, parts.tar_bytes);
                    let tail = tail.map_err(|it| failed(Box::new(it)))?;
                    match parts.finish(&blob.digest, blob.size, &diff_id, *device, tail) {
                        Ok((head, groups)) => {
                            let bytes = index_bytes(&head);
                            self.transaction
                                .put_index(head, groups)
                                .map_err(|it| failed(Box::new(it)))?;
                            LayerIndexed::Made { bytes }
                        }
                        Err(error) => LayerIndexed::None(NoIndex::Failed(error).to_string()),
                    }
                }
            };
        }
        Ok(())
    }
}
