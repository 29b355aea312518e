//! Checks the snapshots of containers, and containers that need them.

use crate::check::check_error::{FsckError, chain};
use crate::check::fsck::{Damage, FsckReport};
use crate::shelf::container_snapshots::SeenContainerSnapshot;
use crate::shelf::containers::GcContainer;
use crate::shelf::item::StoreItem;
use crate::store::Store;

/// The damage of a snapshot that is lost.
const LOST: &str = "it is lost, because the host restarted before its data was on the disk";

impl Store {
    /// Checks the records of snapshots that `gc` would keep, and that the store has what they need. Their data has no
    /// checksums.
    pub(super) fn check_container_snapshots(
        &self,
        report: &mut FsckReport,
    ) -> Result<(), FsckError> {
        let seen = self.container_snapshots.see_all()?;
        let garbage = match self.snapshots_of_containers()? {
            Some(needed) => self.unneeded_container_snapshots(&seen, &needed)?,
            // It is unknown which snapshots are needed.
            None => std::collections::BTreeSet::new(),
        };
        for snapshot in seen {
            report.checked += 1;
            if garbage.contains(&snapshot.id) {
                continue;
            }
            // The snapshot may have been removed since it was listed, and then the one below it.
            if let Some(why) = self.damage_of_snapshot(&snapshot)?
                && self.container_snapshots.get(&snapshot.id)?.is_some()
            {
                report.add(Damage::Bad(StoreItem::ContainerSnapshot(snapshot.id), why));
            }
        }
        Ok(())
    }

    fn damage_of_snapshot(
        &self,
        snapshot: &SeenContainerSnapshot,
    ) -> Result<Option<String>, FsckError> {
        if snapshot.is_lost {
            return Ok(Some(LOST.to_owned()));
        }
        let record = match &snapshot.record {
            Ok(record) => record,
            Err(source) => return Ok(Some(format!("its record is damaged: {}", chain(source)))),
        };
        if !snapshot.has_upper {
            return Ok(Some("its directory \"upper\" is missing".to_owned()));
        }
        if let Some(below) = &record.below
            && self.container_snapshots.get(below)?.is_none()
        {
            return Ok(Some(format!("snapshot {below}, which is below it, is not in the store")));
        }
        let has_image = record.shared.is_some() || self.images.has(&record.image)?;
        Ok((!has_image).then(|| format!("its image {} is not in the store", record.image)))
    }

    /// Returns the damage of the snapshot of a container.
    pub(super) fn damage_of_chain(
        &self,
        container: &GcContainer,
    ) -> Result<Option<String>, FsckError> {
        let Ok(record) = &container.record else { return Ok(None) };
        let Some(snapshot) = record.snapshot.as_ref().filter(|_| !container.is_garbage()) else {
            return Ok(None);
        };
        let why = match self.container_snapshots.get(snapshot)? {
            Some(found) if found.is_lost => format!("its snapshot {snapshot} is damaged: {LOST}"),
            // Its own damage is reported with the snapshot.
            Some(_) => return Ok(None),
            // The container may have been removed since it was listed, and then its snapshot.
            None if self.containers.directory.stat(&container.id)?.is_none() => return Ok(None),
            None => format!("its snapshot {snapshot} is not in the store"),
        };
        Ok(Some(why))
    }
}
