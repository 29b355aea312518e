//! Checks volumes, and containers that need them.

use crate::check::check_error::{FsckError, chain};
use crate::check::fsck::{Damage, FsckReport};
use crate::disk::DiskError;
use crate::shelf::item::StoreItem;
use crate::shelf::volumes::error::VolumeError;
use crate::store::Store;

impl Store {
    /// Checks the records of volumes, and that the store has the volumes of all containers. The files in volumes have no
    /// checksums.
    pub(super) fn check_volumes(&self, report: &mut FsckReport) -> Result<(), FsckError> {
        for name in self.volumes.names()? {
            report.checked += 1;
            let why = match self.volumes.get(&name) {
                // It may have been removed since it was listed.
                Ok(None) => continue,
                Ok(Some(_)) if self.volumes.has_data(&name)? => continue,
                Ok(Some(_)) => "its directory \"data\" is missing".to_owned(),
                Err(VolumeError::Damaged { source, .. }) => {
                    format!("its record is damaged: {}", chain(&source))
                }
                Err(VolumeError::Disk(error)) => return Err(error.into()),
                Err(error) => error.to_string(),
            };
            report.add(Damage::Bad(StoreItem::Volume(name), why));
        }
        for container in self.containers.see_all()? {
            let is_garbage = container.is_garbage();
            let Ok(record) = container.record else { continue };
            if is_garbage {
                continue;
            }
            for volume in record.volumes {
                if !self.has_volume(&volume)?
                    && self.containers.directory.stat(&container.id)?.is_some()
                {
                    let why = format!("its volume {volume} is not in the store");
                    report.add(Damage::Bad(StoreItem::Container(container.id.clone()), why));
                }
            }
        }
        Ok(())
    }

    fn has_volume(&self, name: &str) -> Result<bool, DiskError> {
        let Some(shelf) = self.volumes.directory.get()? else { return Ok(false) };
        Ok(shelf.stat(name)?.is_some())
    }
}
