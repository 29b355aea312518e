//! Supplies and keeps the starts of images (decision 36).

use image::digest::Digest;
use image::verity::ImageId;
use store::{DEFAULT_TRACE, Origin, StartRecord, TraceRun};
use transfer::lazy::{PreviousVersions, previous_start, start_blocks, started_files};

use super::{NO_TRACE, Supply};
use crate::any_error::AnyError;
use crate::lazy::prefetch::start_recorder::EndedRecording;

/// The start of an image, as it is prefetched.
#[derive(Debug)]
pub(in crate::lazy) struct SuppliedStart {
    /// Manifest of the version that was started.
    pub(in crate::lazy) started: Digest,
    /// The blocks of the image's devices, in the order of the first read.
    pub(in crate::lazy) blocks: Vec<TraceRun>,
}

impl Supply<'_> {
    /// Whether the start of an image is prefetched for a mount that has requested this trace, and the image does not have
    /// it.
    pub(in crate::lazy) fn may_prefetch_start(&self, requested: Option<&str>) -> bool {
        requested.is_none() && (self.usual_trace)() != NO_TRACE
    }

    /// Returns the start of an image: its own, if it was recorded here for the whole time, or else that of another version
    /// if it is better. `None` if there is none, or if the trace `default` of the image describes its start.
    ///
    /// # Errors
    /// If the image or the records in the store cannot be read.
    pub(in crate::lazy) fn start(
        &self,
        image: &ImageId,
        manifest: &Digest,
    ) -> Result<Option<SuppliedStart>, AnyError> {
        if self.has_default_trace(image) {
            return Ok(None);
        }
        let own = self.store.downloads.start(manifest)?;
        let start = match own {
            Some(own) if own.is_whole => Some(own),
            // A command that only looked at the image says little about the start of its server.
            own => match (own, self.previous_start(image, manifest)?) {
                (Some(own), Some(previous)) if !previous.is_better_than(&own, manifest) => {
                    Some(own)
                }
                (own, previous) => previous.or(own),
            },
        };
        let Some(start) = start else { return Ok(None) };
        let blocks = start_blocks(&self.store.image_file(image)?, &start)?;
        Ok(Some(SuppliedStart { started: start.started, blocks }))
    }

    fn previous_start(
        &self,
        image: &ImageId,
        manifest: &Digest,
    ) -> Result<Option<StartRecord>, AnyError> {
        let origins = self.store.downloads.origins(image)?.into_iter();
        let of_manifest = |it: Origin| it.repository.filter(|_| it.manifest == Some(*manifest));
        let repositories: Vec<_> = origins.filter_map(of_manifest).collect();
        let wanted = PreviousVersions { manifest, repositories: &repositories, replaced: None };
        Ok(previous_start(self.store, &wanted)?)
    }

    /// Keeps a start that was recorded, unless the store has one that is as well known, or the trace `default` of the
    /// image describes it.
    ///
    /// # Errors
    /// If the image cannot be read, or the record cannot be written.
    pub(in crate::lazy) fn keep_start(&self, ended: &EndedRecording) -> Result<(), AnyError> {
        let EndedRecording { manifest, reads, is_whole } = ended;
        let before = self.store.downloads.start(manifest)?;
        let new = StartRecord::new(*manifest, *is_whole);
        if before.is_some_and(|it| !new.is_better_than(&it, manifest)) {
            return Ok(());
        }
        for image in self.store.images.ids()? {
            let origins = self.store.downloads.origins(&image).unwrap_or_default();
            if !origins.iter().any(|it| it.manifest == Some(*manifest)) {
                continue;
            }
            let devices = self.store.devices_of(&image).unwrap_or_default();
            // The manifest may also have an image of another form.
            if !reads.devices().all(|it| devices.contains(it)) {
                continue;
            }
            if self.has_default_trace(&image) {
                return Ok(());
            }
            let file = self.store.image_file(&image)?;
            let start = started_files(&file, reads, *manifest, *is_whole)?;
            if !start.is_empty() {
                self.store.downloads.set_start(manifest, &start)?;
            }
            return Ok(());
        }
        Ok(())
    }

    fn has_default_trace(&self, image: &ImageId) -> bool {
        self.store.downloads.traces(image).is_ok_and(|it| it.get(DEFAULT_TRACE).is_some())
    }
}
