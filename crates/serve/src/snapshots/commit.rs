//! What was written becomes what others stand on.

use store::{Seconds, SnapshotError, SnapshotKind, SnapshotRecord};

use super::error::SnapshotterError;
use super::snapshotter::{Labels, Snapshotter, check_labels, check_name};

/// How often a `gc` may take a layer before it has a name.
const GONE_MAX: u32 = 3;

impl Snapshotter {
    /// Makes a layer of what was written to an active snapshot, which is a committed one by another name from then on.
    ///
    /// # Errors
    /// [`SnapshotterError`]; then it is active, as it was.
    pub fn commit(&self, name: &str, key: &str, labels: &Labels) -> Result<(), SnapshotterError> {
        check_name(name)?;
        check_labels(labels)?;
        let taken = self.take(key, |record| match record.kind {
            SnapshotKind::Active(_) => Ok(()),
            _ => Err(SnapshotterError::NotActive(key.to_owned())),
        })?;
        let number = taken.number;
        self.state().reserve(name, number)?;
        match self.settle(number, &taken.record, name, labels) {
            Ok(new) => {
                taken.change(|entry| entry.record = new);
                self.state().names.remove(key);
            }
            Err(error) => {
                self.state().names.remove(name);
                return Err(error);
            }
        }
        // All of it is in the layer.
        if let Err(error) = self.instance.drop_changes(number) {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, number, "what a layer was made of is not removed");
        }
        Ok(())
    }

    /// Makes the layer, and the record of a committed snapshot that has it.
    fn settle(
        &self,
        number: u64,
        record: &SnapshotRecord,
        name: &str,
        labels: &Labels,
    ) -> Result<SnapshotRecord, SnapshotterError> {
        self.unmount_root(number)?;
        let upper = self.instance.changes(number).join("upper");
        let applied = record.content().cloned();
        if applied.is_none() && record.parent.is_some() && !upper.exists() {
            return Err(SnapshotterError::NeverUnpacked(record.name.clone()));
        }
        let mut base = self.base(record.parent);
        if applied.is_none() {
            base.image = record.parent.map(|it| self.image_of(it)).transpose()?;
        }
        let made = self.settle_made(number, || {
            let now = (self.surroundings.now)();
            let content = match &applied {
                Some(content) => content.clone(),
                None => self.resources.ingest(&self.store, &base, &upper, Seconds(now.seconds))?,
            };
            let new = SnapshotRecord {
                name: name.to_owned(),
                kind: SnapshotKind::Committed(content),
                parent: record.parent,
                labels: labels.clone(),
                created: now,
                updated: now,
            };
            Ok((new, ()))
        })?;
        Ok(made.0)
    }

    /// Writes the record that `make` makes, with a layer or an image. A `gc` may take these as long as nothing names them:
    /// then they are made again.
    pub(super) fn settle_made<T>(
        &self,
        number: u64,
        mut make: impl FnMut() -> Result<(SnapshotRecord, T), SnapshotterError>,
    ) -> Result<(SnapshotRecord, T), SnapshotterError> {
        let mut gone = 0;
        loop {
            let (record, of_it) = make()?;
            match self.store.settle_snapshot(&self.instance, number, &record) {
                Err(SnapshotError::Gone(_)) if gone < GONE_MAX => gone += 1,
                settled => return Ok(settled.map(|()| (record, of_it))?),
            }
        }
    }
}
