//! Removes damaged items, so that they can be imported again.

use std::collections::{BTreeMap, BTreeSet};

use image::verity::{DeviceId, ObjectId};

use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::check::fsck::{Damage, FsckReport};
use crate::disk::{Directory, DiskError};
use crate::found::RunningImports;
use crate::shelf::blob_file::BlobFile;
use crate::shelf::item::StoreItem;
use crate::shelf::lazy_device_file::LazyDeviceFile;
use crate::shelf::refs::RefError;
use crate::shelf::snapshots::MendedSnapshot;
use crate::store::Store;

impl Store {
    /// Removes every object, image, layer, manifest, device, index and ref that a check found damaged and that still
    /// is damaged. Returns their number. An import of the same content then restores the item; otherwise it would
    /// reuse the damaged object. Until then, opening an image that needs the item fails, so that programs do not see
    /// wrong bytes or missing files. A ref that cannot be read is removed, because `gc` cannot work with it. A
    /// readable ref whose image is missing is kept, because an import restores the image. A damaged mark of an
    /// unproven image is rewritten.
    ///
    /// If an item cannot be removed, the remaining items are still removed.
    ///
    /// # Errors
    /// [`FsckError::Busy`] while imports run, since these may rely on the items; otherwise the first error, such as
    /// [`FsckError::SnapshotsInUse`].
    pub fn remove_damaged(&self, report: &FsckReport) -> Result<u64, FsckError> {
        if !self.is_writable() {
            return Err(FsckError::ReadOnly(self.path().to_owned()));
        }
        let _lock = self.lock_exclusive()?;
        if !RunningImports::from_store(self)?.names.is_empty() {
            return Err(FsckError::Busy);
        }
        let mut removed = 0;
        let mut failed = None;
        let hurt = report.damage.iter().filter(|it| is_of_data(&it.0));
        for harm in hurt.flat_map(|it| &it.1) {
            self.mark_lacking(&harm.image)?;
        }
        match self.drop_damaged(report) {
            Ok(dropped) => removed += dropped,
            Err(error) => failed = Some(error),
        }
        for (damage, _) in &report.damage {
            if let Damage::Bad(StoreItem::Ref(name), _) = damage {
                match self.remove_bad_ref(name) {
                    Ok(was_bad) => removed += u64::from(was_bad),
                    Err(error) => failed = failed.or(Some(error.into())),
                }
            }
            let Some(item) = item(damage) else { continue };
            match self.is_damaged(&item) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) => {
                    failed = failed.or(Some(error));
                    continue;
                }
            }
            let mended = match &item {
                StoreItem::Snapshot(instance, number) => {
                    match self.snapshots.remove_damaged(instance, *number) {
                        Ok(MendedSnapshot::Removed) => Ok(true),
                        Ok(MendedSnapshot::Sound) => Ok(false),
                        Ok(MendedSnapshot::InUse) => {
                            Err(FsckError::SnapshotsInUse(instance.clone()))
                        }
                        Err(error) => Err(error.into()),
                    }
                }
                StoreItem::ContainerSnapshot(id) => self.remove_damaged_snapshot(id),
                // The files of a volume are the user's data, so only its record is replaced.
                StoreItem::Volume(name) => self.mend_volume(name).map_err(FsckError::from),
                // Without this mark, the image would count as compared with its layers.
                StoreItem::Blob(BlobFile::Unproven(image)) => {
                    self.mend_mark(image).map(|()| true).map_err(FsckError::from)
                }
                item => {
                    let removed =
                        self.place(item).and_then(|place| remove(&place, &item.file_name()));
                    removed.map_err(FsckError::from)
                }
            };
            match mended {
                Ok(was_there) => removed += u64::from(was_there),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // The damage may have been repaired since the check.
        self.clear_lacking_locked()?;
        match failed {
            Some(error) => Err(error),
            None => Ok(removed),
        }
    }

    /// Removes damaged objects from the indexes of devices, so that imports do not find them. Images that use these
    /// objects in a device still show the damaged bytes.
    fn drop_damaged(&self, report: &FsckReport) -> Result<u64, FsckError> {
        let mut damaged: BTreeMap<DeviceId, BTreeSet<ObjectId>> = BTreeMap::new();
        let mut failed = None;
        for (damage, _) in &report.damage {
            let Damage::Stored { object, device, .. } = damage else { continue };
            match self.is_sound_stored(device, object) {
                Ok(true) => {}
                Ok(false) => drop(damaged.entry(*device).or_default().insert(*object)),
                // An object that cannot be checked does not stop the others.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let mut dropped = 0;
        for (device, objects) in damaged {
            let index = self.devices.index_of(&device)?;
            let Some(index) = index else { continue };
            let entries = index.entries.iter();
            let keep: Vec<_> =
                entries.filter(|it| !objects.contains(&it.object())).copied().collect();
            let records = index.records.iter().filter(|it| !objects.contains(&it.object()));
            let records: Vec<_> = records.cloned().collect();
            let lost = index.entries.len() - keep.len() + index.records.len() - records.len();
            dropped += lost as u64;
            self.devices.drop_entries(&device, &index, &keep, &records)?;
        }
        failed.map_or(Ok(dropped), Err)
    }

    /// Removes a container's snapshot that cannot be used, unless something needs it. Returns `false` if it stays
    /// because it only lacks other items.
    fn remove_damaged_snapshot(&self, id: &str) -> Result<bool, FsckError> {
        let shelf = &self.container_snapshots;
        let Some(lock) = shelf.lock()? else { return Ok(false) };
        let Some(seen) = shelf.get(id)? else { return Ok(false) };
        if seen.record.is_ok() && !seen.is_lost && seen.has_upper {
            return Ok(false);
        }
        let needed = |user: String| FsckError::SnapshotNeeded { id: id.to_owned(), user };
        for container in self.containers.see_all()? {
            let is_user = match &container.record {
                Ok(record) => record.snapshot.as_deref() == Some(id),
                Err(_) => !container.is_garbage(),
            };
            if is_user {
                return Err(needed(format!("container {}", container.id)));
            }
        }
        for other in shelf.see_all()? {
            if other.record.is_ok_and(|it| it.below.as_deref() == Some(id)) {
                return Err(needed(format!("snapshot {}", other.id)));
            }
        }
        let Some(hidden) = shelf.hide(&lock, id)? else {
            return Err(needed("a process".to_owned()));
        };
        lock.sync()?;
        drop(lock);
        Ok(hidden.remove().map(|()| true)?)
    }

    /// Removes a ref that cannot be read. Returns whether there was one.
    fn remove_bad_ref(&self, name: &str) -> Result<bool, DiskError> {
        // The ref of an image without a name cannot be parsed.
        let names = self.refs.names()?;
        let Some(name) = names.iter().find(|it| it.as_str() == name) else { return Ok(false) };
        // An import may set the ref again at the same time.
        let _alone = self.lock_records()?;
        match self.refs.get(name) {
            Ok(_) | Err(RefError::Disk(_)) => Ok(false),
            Err(_) => remove(&self.refs.directory, &name.file_name()),
        }
    }

    fn is_damaged(&self, item: &StoreItem) -> Result<bool, FsckError> {
        Ok(match item {
            StoreItem::Object(id) => !self.is_sound_object(id)?,
            StoreItem::Image(id) => !self.is_sound_image(id)?,
            StoreItem::Layer(digest) => {
                check_error::found(self.layers.open(digest))?.is_err()
                    || self.gives_another_tar(digest)?
            }
            StoreItem::Manifest(digest) => {
                check_error::found(self.manifests.read(digest))?.is_err()
            }
            StoreItem::Blob(file) => self.downloads.damage(file)?.is_some(),
            StoreItem::LazyDevice(LazyDeviceFile::Index(id)) => {
                self.lazy_devices.index_damage(id, None)?.is_some()
            }
            StoreItem::LazyDevice(LazyDeviceFile::ClaimedIndex(id, manifest)) => {
                self.lazy_devices.index_damage(id, Some(manifest))?.is_some()
            }
            StoreItem::LazyDevice(file) => {
                let id = file.device();
                self.lazy_devices.damage(id)?.is_some() && !self.lazy_devices.is_in_use(id)?
            }
            StoreItem::Device(id) | StoreItem::DeviceIndex(id) => {
                !matches!(check_error::found(self.devices.index_damage(id))?, Ok(None))
            }
            // The removal checks the snapshot.
            StoreItem::ContainerSnapshot(_) | StoreItem::Snapshot(..) | StoreItem::Volume(_) => {
                true
            }
            StoreItem::Network(name) => self.networks.damage(name)?.is_some(),
            StoreItem::Ref(_) | StoreItem::Container(_) | StoreItem::Leftover(_) => false,
        })
    }
}

fn remove(place: &Directory, name: &str) -> Result<bool, DiskError> {
    let removed = place.remove_any(name)?;
    place.sync()?;
    Ok(removed)
}

/// Whether images lack a file after the repair of this damage.
const fn is_of_data(damage: &Damage) -> bool {
    matches!(
        damage,
        Damage::Object { .. }
            | Damage::Missing(_)
            | Damage::Size { .. }
            | Damage::Stored { .. }
            | Damage::Bad(StoreItem::Object(_), _)
    )
}

/// Returns the item to remove, if the damage is in a file that is named by its content.
fn item(damage: &Damage) -> Option<StoreItem> {
    match damage {
        Damage::Object { expected, .. } => Some(StoreItem::Object(*expected)),
        Damage::Image { expected, .. } => Some(StoreItem::Image(*expected)),
        Damage::Bad(StoreItem::Ref(_) | StoreItem::Container(_), _) => None,
        Damage::Bad(item, _) => Some(item.clone()),
        Damage::Stored { .. }
        | Damage::Missing(_)
        | Damage::Size { .. }
        | Damage::Lazy(_)
        | Damage::Stray(_) => None,
    }
}
