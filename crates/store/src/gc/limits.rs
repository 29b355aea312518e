//! Limits by which a collection keeps recent garbage, as a cache for later imports.

use std::collections::BTreeSet;

use image::digest::Digest;
use image::verity::ImageId;
use rustix::fs::Stat;

use super::data::Trimming;
use super::{CollectionPlan, Freeing, GcError};
use crate::disk::DiskError;
use crate::found::RunningImports;
use crate::inventory::Inventory;
use crate::shelf::item::StoreItem;
use crate::shelf::refs::Seconds;
use crate::store::Store;

/// The garbage that a collection keeps. Images with a name are always kept, and leftovers of dead commands never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcLimits {
    /// Garbage is kept if it was added at this time or later.
    pub added_before: Option<Seconds>,
    /// Maximum disk use of the whole store, in bytes. Garbage is removed, the oldest first, until this is reached.
    pub keep_bytes: Option<u64>,
}

/// Items that are kept in addition to the roots of the search.
#[derive(Debug, Default)]
pub(super) struct Listed {
    pub(super) images: BTreeSet<ImageId>,
    pub(super) layers: BTreeSet<Digest>,
    pub(super) manifests: BTreeSet<Digest>,
}

impl Listed {
    /// Lists the items that running imports rely on.
    pub(super) fn from_imports(imports: &RunningImports) -> Self {
        Self {
            images: imports.images.clone(),
            layers: imports.layers.clone(),
            manifests: imports.manifests.clone(),
        }
    }
}

/// Returns the time when a file was added to the store: its ctime, which programs cannot set. Files of a store do not
/// change, except that freeing parts of a device renews its ctime.
#[expect(clippy::useless_conversion, reason = "the types differ between architectures")]
fn added(stat: &Stat) -> i64 {
    i64::from(stat.st_ctime)
}

impl Store {
    /// Returns the time when an item was added to the store, or `None` if the item is gone.
    fn added(&self, item: &StoreItem) -> Result<Option<i64>, DiskError> {
        let stat = self.place(item)?.stat(item.file_name())?;
        Ok(stat.as_ref().map(added))
    }

    fn is_newer(&self, item: &StoreItem, until: Seconds) -> Result<bool, DiskError> {
        Ok(self.added(item)?.is_some_and(|it| it >= until.0))
    }

    /// Lists images, layers and manifests that were added at `until` or later.
    pub(super) fn list_newer(
        &self,
        listed: &mut Listed,
        found: &Inventory,
        until: Seconds,
    ) -> Result<(), DiskError> {
        for image in &found.images {
            if self.is_newer(&StoreItem::Image(*image), until)? {
                listed.images.insert(*image);
            }
        }
        for layer in &found.layers {
            if self.is_newer(&StoreItem::Layer(*layer), until)? {
                listed.layers.insert(*layer);
            }
        }
        for manifest in &found.manifests {
            if self.is_newer(&StoreItem::Manifest(*manifest), until)? {
                listed.manifests.insert(*manifest);
            }
        }
        Ok(())
    }

    /// Keeps only items and trimmings older than `until` in the plan. Newer items that are kept need none of the
    /// removed items, because newer images and layers were listed as needed.
    pub(super) fn retain_older(
        &self,
        items: &mut Vec<StoreItem>,
        trimmings: &mut Vec<Trimming>,
        until: Seconds,
    ) -> Result<(), DiskError> {
        let mut older = Vec::new();
        for item in std::mem::take(items) {
            if !self.is_newer(&item, until)? {
                older.push(item);
            }
        }
        *items = older;
        let mut older = Vec::new();
        for trimming in std::mem::take(trimmings) {
            if !self.is_newer(&StoreItem::Device(trimming.dead.device), until)? {
                older.push(trimming);
            }
        }
        *trimmings = older;
        Ok(())
    }

    /// Plans a collection that keeps garbage within the limits.
    pub(super) fn plan_within(
        &self,
        now: Seconds,
        imports: &RunningImports,
        limits: &GcLimits,
    ) -> Result<CollectionPlan, GcError> {
        let all = self.plan(now, imports, None)?;
        if *limits == GcLimits::default() {
            return Ok(all);
        }
        let bytes = self.freed_by(&all);
        let mut until = limits.added_before.unwrap_or(Seconds(i64::MAX));
        if let Some(keep) = limits.keep_bytes {
            let excess = self.bytes_on_disk()?.saturating_sub(keep);
            until = self.oldest_of(&all, until, excess, |until| {
                let plan = self.plan(now, imports, Some(until))?;
                Ok(self.freed_by(&plan))
            })?;
        }
        let mut plan = self.plan(now, imports, Some(until))?;
        plan.spared = bytes.saturating_sub(self.freed_by(&plan));
        Ok(plan)
    }

    /// Returns the earliest time such that removing all older garbage frees `excess` bytes, or `until` if that is not
    /// enough.
    fn oldest_of(
        &self,
        plan: &CollectionPlan,
        until: Seconds,
        excess: u64,
        freed: impl Fn(Seconds) -> Result<u64, GcError>,
    ) -> Result<Seconds, GcError> {
        if excess == 0 {
            return Ok(Seconds(i64::MIN));
        }
        let mut moments = BTreeSet::new();
        let devices = plan.trimmings.iter().map(|it| StoreItem::Device(it.dead.device));
        for item in plan.items.iter().cloned().chain(devices) {
            // Items that were added in the same second are removed together.
            moments.extend(self.added(&item)?.map(|it| it.saturating_add(1)));
        }
        let moments: Vec<_> = moments.into_iter().filter(|it| *it < until.0).collect();
        let (mut low, mut high) = (0, moments.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let Some(moment) = moments.get(middle) else { break };
            match freed(Seconds(*moment))? >= excess {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        Ok(moments.get(low).map_or(until, |it| Seconds(*it)))
    }

    /// Returns the bytes on disk that this plan frees, without leftovers.
    fn freed_by(&self, plan: &CollectionPlan) -> u64 {
        let described = self.describe(plan);
        let items = described.garbage.iter().take(plan.items.len()).map(|it| it.1);
        let dead = described.dead.iter().filter(|it| it.freeing == Freeing::Now);
        items.chain(dead.map(|it| it.bytes)).sum()
    }

    /// Returns the bytes on disk of the whole store.
    fn bytes_on_disk(&self) -> Result<u64, DiskError> {
        let parts = self.root.list()?;
        Ok(parts.iter().map(|it| self.root.tree_bytes(&it.name)).sum())
    }
}

#[cfg(test)]
mod tests;
