//! Checks the records of networks.

use crate::check::check_error::{FsckError, chain};
use crate::check::fsck::{Damage, FsckReport};
use crate::shelf::item::StoreItem;
use crate::store::Store;

impl Store {
    pub(super) fn check_networks(&self, report: &mut FsckReport) -> Result<(), FsckError> {
        for name in self.networks.names()? {
            report.checked += 1;
            if let Some(damage) = self.networks.damage(&name)? {
                let why = format!("its record is damaged: {}", chain(&damage));
                report.add(Damage::Bad(StoreItem::Network(name), why));
            }
        }
        Ok(())
    }
}
