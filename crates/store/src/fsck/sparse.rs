//! Sparse devices that images need.

use std::collections::BTreeSet;

use image::verity::DeviceId;

use super::{Damage, FsckError, FsckReport, Scope, Users};
use crate::shelf::devices::DataFile;
use crate::shelf::item::StoreItem;
use crate::shelf::sparse::{Lacks, SparseFile};
use crate::store::Store;

impl Store {
    /// Checks the devices that images need and that are in `sparse/` alone, and says whom damage hurts. Returns which
    /// these are.
    pub(super) fn check_sparse_of_images(
        &self,
        users: &Users<'_>,
        scope: Scope,
        report: &mut FsckReport,
    ) -> Result<BTreeSet<DeviceId>, FsckError> {
        let mut checked: BTreeSet<DeviceId> =
            users.images.values().flat_map(|it| it.devices.keys().copied()).collect();
        for file in self.devices.list()?.names {
            if let DataFile::Device(id) = file {
                checked.remove(&id);
            }
        }
        checked.retain(|id| self.sparse.file(id).is_some());
        let partial = match scope {
            // Somebody brings the rest, perhaps.
            Scope::Everything => Lacks::IfNobodyFillsIt,
            Scope::Images => Lacks::Always,
        };
        for id in &checked {
            report.checked += 1;
            let stated = users.images.values().filter_map(|it| it.devices.get(id)).copied();
            if let Some(why) = self.sparse.lack(id, stated, partial)? {
                let item = StoreItem::Sparse(SparseFile::Device(*id));
                report.damage.push((Damage::Bad(item, why), users.harm_of_device(id)));
            }
        }
        Ok(checked)
    }
}
