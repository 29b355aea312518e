//! What a snapshot stands on.

use image::verity::ImageId;
use store::{Seconds, SnapshotContent, SnapshotKind, SnapshotRecord};

use super::error::SnapshotterError;
use super::ingest::Base;
use super::snapshotter::Snapshotter;

impl Snapshotter {
    pub(super) fn base(&self, parent: Option<u64>) -> Base {
        let state = self.state();
        let mut layers = Vec::new();
        let mut next = parent;
        while let Some(number) = next {
            // Nobody removes what something stands on.
            let Some(entry) = state.entries.get(&number) else { break };
            let SnapshotKind::Committed(content) = &entry.record.kind else { break };
            layers.push(content.layer);
            next = entry.record.parent;
        }
        layers.reverse();
        Base { image: None, layers }
    }

    /// The image of a committed snapshot, which is made when it is first needed.
    pub(super) fn image_of(&self, number: u64) -> Result<ImageId, SnapshotterError> {
        let name = match self.state().entries.get(&number) {
            Some(entry) => match entry.record.content().and_then(|it| it.image) {
                Some(image) => return Ok(image),
                None => entry.record.name.clone(),
            },
            None => return Err(SnapshotterError::Absent(number.to_string())),
        };
        let taken = self.take(&name, |_| Ok(()))?;
        let (record, image) = self.make_image(number, taken.record.clone())?;
        taken.change(|entry| entry.record = record);
        Ok(image)
    }

    fn make_image(
        &self,
        number: u64,
        record: SnapshotRecord,
    ) -> Result<(SnapshotRecord, ImageId), SnapshotterError> {
        let SnapshotKind::Committed(content) = &record.kind else {
            return Err(SnapshotterError::NotCommitted(record.name));
        };
        // Somebody else has made it meanwhile.
        if let Some(image) = content.image {
            return Ok((record, image));
        }
        let (content, layers) = (content.clone(), self.base(Some(number)).layers);
        self.settle_made(number, || {
            let now = Seconds((self.surroundings.now)().seconds);
            let (image, bytes) = self.resources.stack(&self.store, &layers, now)?;
            let bytes = content.bytes + bytes;
            let content = SnapshotContent { image: Some(image), bytes, ..content };
            Ok((SnapshotRecord { kind: SnapshotKind::Committed(content), ..record.clone() }, image))
        })
    }
}
