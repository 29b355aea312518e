//! What was written becomes what others stand on.

use std::path::Path;

use store::{Seconds, SnapshotContent, SnapshotError, SnapshotKind, SnapshotRecord, SnapshotSize};

use super::error::SnapshotterError;
use super::snapshotter::{Labels, Snapshotter, check_labels, check_name, is_unpacked};
use super::usage::{sync, usage_of};

/// How often a `gc` may take a layer before it has a name.
const GONE_MAX: u32 = 3;

impl Snapshotter {
    /// Commits an active snapshot, which has another name from then on. What the engine has unpacked becomes a layer. What
    /// else was written stays a directory, until a layer is put on it.
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
        let new = match self.settle(number, &taken.record, name, labels) {
            Ok(new) => new,
            Err(error) => {
                self.state().names.remove(name);
                return Err(error);
            }
        };
        let is_directory = matches!(new.kind, SnapshotKind::Directory(_));
        taken.change(|entry| entry.record = new);
        self.state().names.remove(key);
        drop(taken);
        if !is_directory {
            self.drop_changes(number);
        }
        Ok(())
    }

    /// Makes what the snapshot has from then on, and its record.
    fn settle(
        &self,
        number: u64,
        record: &SnapshotRecord,
        name: &str,
        labels: &Labels,
    ) -> Result<SnapshotRecord, SnapshotterError> {
        self.unmount_root(number)?;
        let upper = self.instance.changes(number).join("upper");
        let new = |kind| {
            let now = (self.surroundings.now)();
            let (name, labels, parent) = (name.to_owned(), labels.clone(), record.parent);
            SnapshotRecord { name, kind, parent, labels, created: now, updated: now }
        };
        let made = self.settle_made(number, || {
            let content = match record.content() {
                Some(applied) => Some(applied.clone()),
                None if !upper.exists() => return Err(never_mounted(record)),
                None if !is_unpacked(record) && self.has_room_above(record.parent) => None,
                None => Some(self.layer_of(&upper, record.parent)?),
            };
            let kind = match content {
                Some(content) => SnapshotKind::Committed(content),
                None => SnapshotKind::Directory(finish(&upper)?),
            };
            Ok((new(kind), ()))
        })?;
        Ok(made.0)
    }

    fn layer_of(
        &self,
        upper: &Path,
        parent: Option<u64>,
    ) -> Result<SnapshotContent, SnapshotterError> {
        let base = self.base(parent)?;
        let now = Seconds((self.surroundings.now)().seconds);
        self.resources.ingest(&self.store, &base, upper, now)
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

fn never_mounted(record: &SnapshotRecord) -> SnapshotterError {
    let name = record.name.clone();
    match is_unpacked(record) {
        true => SnapshotterError::NeverUnpacked(name),
        false => SnapshotterError::NeverMounted(name),
    }
}

/// Makes a directory last, and measures it.
fn finish(upper: &Path) -> Result<SnapshotSize, SnapshotterError> {
    let usage = usage_of(upper).map_err(SnapshotterError::Directory)?;
    sync(upper).map_err(SnapshotterError::Directory)?;
    Ok(SnapshotSize { bytes: usage.bytes, inodes: usage.inodes })
}
