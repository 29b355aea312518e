//! Commits active snapshots.

use std::path::Path;

use container::bundle::userns::IdMap;
use container::changes::Owners;
use kernel::usage::{sync, usage_of};
use store::{Seconds, SnapshotContent, SnapshotKind, SnapshotRecord, SnapshotSize};

use super::error::SnapshotterError;
use super::labels::{Labels, check_labels, check_name, is_unpacked};
use super::snapshotter::Snapshotter;

impl Snapshotter {
    /// Commits an active snapshot under a new name. A layer that the engine has unpacked becomes a layer of the store.
    /// Other changes stay a directory until a layer is applied on top of it.
    ///
    /// # Errors
    /// On an error, the snapshot stays active and unchanged.
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
            self.state().spare.insert(number);
        }
        self.drop_spare();
        Ok(())
    }

    /// Makes the content of the committed snapshot, and writes its record.
    fn settle(
        &self,
        number: u64,
        record: &SnapshotRecord,
        name: &str,
        labels: &Labels,
    ) -> Result<SnapshotRecord, SnapshotterError> {
        self.unmount_root(number)?;
        // After a reboot of the host, the filestore must be mounted again.
        self.attach_limit(number)?;
        let upper = self.instance.changes(number).join("upper");
        let map = self.map_of(number, record)?;
        let is_layer = record.content().is_none()
            && (is_unpacked(&record.name)
                // Another root on this snapshot may have another id map.
                || map.is_some()
                // The filestore is only for the changes of this root.
                || self.is_limited(number)
                || !self.has_room_above(record.parent));
        if let (true, Some(parent)) = (is_layer, record.parent) {
            // The layers are downloaded before the store is locked, so that `gc` does not wait for registries.
            self.bring_layers(parent)?;
        }
        let new = |kind| {
            let now = (self.surroundings.now)();
            let (name, labels, parent) = (name.to_owned(), labels.clone(), record.parent);
            SnapshotRecord { name, kind, parent, labels, created: now, updated: now }
        };
        let made = self.settle_made(number, || {
            let content = match record.content() {
                Some(applied) => Some(applied.clone()),
                None if !upper.exists() => return Err(never_mounted(record)),
                None if is_layer => Some(self.layer_of(&upper, record.parent, map.as_ref())?),
                None => None,
            };
            let kind = match content {
                Some(content) => SnapshotKind::Committed(content),
                None => SnapshotKind::Directory(finish(&upper)?),
            };
            Ok((new(kind), ()))
        })?;
        if let (None, Some(content)) = (record.content(), made.0.content()) {
            self.counts.committed(content.bytes);
        }
        Ok(made.0)
    }

    fn layer_of(
        &self,
        upper: &Path,
        parent: Option<u64>,
        map: Option<&IdMap>,
    ) -> Result<SnapshotContent, SnapshotterError> {
        let base = self.base(parent)?;
        let now = Seconds((self.surroundings.now)().seconds);
        let owners = map.map(Owners::of_map).unwrap_or_default();
        self.resources.ingest(&self.store, &base, upper, &owners, now)
    }

    /// Writes the record that `make` returns with a new layer or image. `gc` waits until the record names the layer or
    /// image.
    pub(super) fn settle_made<T>(
        &self,
        number: u64,
        make: impl FnOnce() -> Result<(SnapshotRecord, T), SnapshotterError>,
    ) -> Result<(SnapshotRecord, T), SnapshotterError> {
        let _hold = self.store.hold()?;
        let (record, of_it) = make()?;
        self.store.settle_snapshot(&self.instance, number, &record)?;
        Ok((record, of_it))
    }
}

fn never_mounted(record: &SnapshotRecord) -> SnapshotterError {
    let name = record.name.clone();
    match is_unpacked(&record.name) {
        true => SnapshotterError::NeverUnpacked(name),
        false => SnapshotterError::NeverMounted(name),
    }
}

/// Syncs a directory and measures it.
fn finish(upper: &Path) -> Result<SnapshotSize, SnapshotterError> {
    let usage = usage_of(upper).map_err(SnapshotterError::Directory)?;
    sync(upper).map_err(SnapshotterError::Directory)?;
    Ok(SnapshotSize { bytes: usage.bytes, inodes: usage.inodes })
}
