//! Acting on a plan. The plan is made while others go on, and the store's lock is held for moments only. So each time that
//! it is taken, news is looked for: something that was not there when the plan was made, and may need what the plan takes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId, ObjectId};

use super::{Freeing, GcError, GcPlan, Plan, Swept, is_mark, is_of_device};
use crate::disk::{Directory, DiskError};
use crate::found::RunningImports;
use crate::shelf::devices::index_name;
use crate::shelf::item::StoreItem;
use crate::shelf::objects::split;
use crate::shelf::refs::Seconds;
use crate::shelf::sparse::SparseFile;
use crate::store::{Lock, Store};
use crate::trash::{self, Trash};
use crate::work;

/// How long the lock is held for objects, and how long others can have it then.
const HOLD: Duration = Duration::from_millis(5);
/// After so many plans that news has overtaken, one is made with the lock held.
const PLANS: u32 = 8;

/// How a collection gives way to others.
pub(super) struct Pace<'p> {
    /// How long the lock is held for objects.
    pub(super) hold: Duration,
    /// For how many of them at most.
    pub(super) objects: usize,
    /// Called when the lock is free, also said whether that is between objects.
    pub(super) rest: &'p mut dyn FnMut(bool),
    /// Asked each time before the lock is taken.
    pub(super) go_on: &'p dyn Fn() -> bool,
}

impl Store {
    /// Removes everything that nothing needs. Imports and mounts may begin or run at the same time, and wait for moments
    /// only. Unfinished pulls keep their downloads for a week.
    ///
    /// # Errors
    /// [`GcError`] when something that is kept cannot be read, or garbage cannot be removed.
    pub fn gc(&self, now: Seconds) -> Result<(GcPlan, Swept), GcError> {
        self.gc_while(now, &|| true)
    }

    /// The same, as long as `go_on` returns `true`. What is not removed by then is garbage for the next one.
    ///
    /// # Errors
    /// As [`gc`](Self::gc).
    pub fn gc_while(
        &self,
        now: Seconds,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(GcPlan, Swept), GcError> {
        let rest = &mut |is_between_objects| {
            if is_between_objects {
                std::thread::sleep(HOLD);
            }
        };
        self.gc_at(now, Pace { hold: HOLD, objects: usize::MAX, rest, go_on })
    }

    pub(super) fn gc_at(
        &self,
        now: Seconds,
        mut pace: Pace<'_>,
    ) -> Result<(GcPlan, Swept), GcError> {
        if !self.is_writable() {
            return Err(GcError::ReadOnly(self.path().to_owned()));
        }
        let mut done = GcPlan::default();
        let mut swept = Swept::default();
        let mut containers = BTreeSet::new();
        for plans in 1.. {
            if !(pace.go_on)() {
                break;
            }
            let is_last = plans == PLANS;
            let mut lock = if is_last { self.lock_exclusive()? } else { self.lock_shared()? };
            let mut imports = RunningImports::of(self)?;
            let plan = self.plan(now, &imports)?;
            let described = self.describe(&plan);
            if !is_last {
                drop(lock);
                (pace.rest)(false);
                lock = self.lock_exclusive()?;
                imports = RunningImports::of(self)?;
                if self.is_overtaken(&plan, &imports, now)? {
                    continue;
                }
            }
            containers.extend(plan.roots.containers.iter().cloned());
            (done.kept, done.dead) = (described.kept, described.dead);
            let (items, others) = described.garbage.split_at(plan.items.len());
            let mut sweep = Sweep {
                store: self,
                known: Known::of(&plan),
                plan: &plan,
                imports,
                pace: &mut pace,
                done: &mut done,
                swept: &mut swept,
                waiting: None,
            };
            let has_ended = sweep.all(lock, items)?;
            if has_ended || is_last {
                for (item, bytes) in others {
                    swept.freed += bytes;
                    done.garbage.push((item.clone(), *bytes));
                }
                break;
            }
        }
        for id in &containers {
            self.containers.remove_dead(id)?;
        }
        work::clear(&self.tmp)?;
        trash::clear(&self.tmp)?;
        swept.removed = done.garbage.len() as u64;
        tracing::info!(removed = swept.removed, freed = swept.freed, "collected garbage");
        Ok((done, swept))
    }

    /// Whether something is needed that was not when the plan was made.
    fn is_overtaken(
        &self,
        plan: &Plan,
        imports: &RunningImports,
        now: Seconds,
    ) -> Result<bool, GcError> {
        let roots = self.roots(&plan.found, now)?;
        let manifests: BTreeSet<_> = plan.roots.manifests.iter().collect();
        let is_known = roots.images.is_subset(&plan.roots.images)
            && roots.layers.is_subset(&plan.roots.layers)
            && roots.pinned.is_subset(&plan.roots.pinned)
            && roots.manifests.iter().all(|it| manifests.contains(it))
            && imports.images.iter().all(|it| plan.needed.images.contains(it) || !plan.has(it))
            && imports.layers.is_subset(&plan.needed.layers)
            && imports.manifests.is_subset(&plan.needed.manifests);
        Ok(!is_known || Known::of(plan).has_news(self)?)
    }
}

impl Plan {
    /// Whether an image was there when the plan was made.
    fn has(&self, image: &ImageId) -> bool {
        self.found.images.binary_search(image).is_ok()
    }
}

/// What is there that may need something: of it, it is known what that is.
struct Known {
    images: BTreeSet<ImageId>,
    layers: BTreeSet<Digest>,
    manifests: BTreeSet<Digest>,
}

impl Known {
    fn of(plan: &Plan) -> Self {
        let found = &plan.found;
        Self {
            images: found.images.iter().copied().collect(),
            layers: found.layers.iter().copied().collect(),
            manifests: found.manifests.iter().copied().collect(),
        }
    }

    /// It is gone. If it comes back, it is new.
    fn forget(&mut self, item: &StoreItem) {
        match item {
            StoreItem::Image(id) => drop(self.images.remove(id)),
            StoreItem::Layer(id) => drop(self.layers.remove(id)),
            StoreItem::Manifest(id) => drop(self.manifests.remove(id)),
            _ => {}
        }
    }

    fn has_news(&self, store: &Store) -> Result<bool, DiskError> {
        let images = store.images.list()?.names;
        let layers = store.layers.list()?.names;
        let manifests = store.manifests.list()?.names;
        Ok(!images.iter().all(|it| self.images.contains(it))
            || !layers.iter().all(|it| self.layers.contains(it))
            || !manifests.iter().all(|it| self.manifests.contains(it)))
    }
}

struct Sweep<'s, 'p> {
    store: &'s Store,
    plan: &'s Plan,
    known: Known,
    imports: RunningImports,
    pace: &'s mut Pace<'p>,
    done: &'s mut GcPlan,
    swept: &'s mut Swept,
    /// Where everything goes as long as an import runs that has no lists.
    waiting: Option<Trash>,
}

/// Garbage, and its bytes on disk.
type Items<'i> = Vec<&'i (StoreItem, u64)>;

impl Sweep<'_, '_> {
    /// Removes items: objects last, and what needs them durably before. `false` if there is news.
    fn all(&mut self, lock: Option<Lock>, items: &[(StoreItem, u64)]) -> Result<bool, GcError> {
        let store = self.store;
        if self.imports.has_unlisted() {
            self.waiting = Some(Trash::make(store, &self.imports.names)?);
        }
        let (mut users, mut marks, mut sparse) = (Items::new(), Items::new(), Items::new());
        let (mut data, mut objects) = (Items::new(), Items::new());
        for item in items {
            match &item.0 {
                StoreItem::Object(_) => objects.push(item),
                StoreItem::Sparse(_) => sparse.push(item),
                it if is_of_device(it) => data.push(item),
                it if is_mark(it) => marks.push(item),
                _ => users.push(item),
            }
        }
        for item in users {
            self.take(&store.place(&item.0)?, &item.0)?;
            self.known.forget(&item.0);
            self.note(item);
        }
        drop(lock);
        let trims = self.plan.trimmings.iter().any(|it| it.dead.freeing == Freeing::Now);
        // Also what a gc has removed that was killed then.
        if ![&marks, &sparse, &data, &objects].into_iter().all(Vec::is_empty) || trims {
            store.images.directory.sync()?;
            store.layers.directory.sync()?;
        }
        if self.waiting.is_some() {
            // An import may take an image back that has gone. Its mark has to be there then.
            marks.clear();
        }
        Ok(self.marks_and_sparse(&marks, &sparse)?
            && self.data(&data, !objects.is_empty())?
            && self.trim()?
            && self.objects(&objects)?)
    }

    /// Takes the lock again; `None` if there is news, or the end.
    fn enter(&mut self, is_between_objects: bool) -> Result<Option<Lock>, DiskError> {
        (self.pace.rest)(is_between_objects);
        if !(self.pace.go_on)() {
            return Ok(None);
        }
        let lock = self.store.lock_to_sweep()?;
        let before = self.imports.names.clone();
        self.imports.refresh(self.store)?;
        let is_new = |it: &String| !before.contains(it);
        // What it has found is not known.
        let is_unlisted = self.imports.unlisted.iter().any(is_new);
        let has_news = is_unlisted || self.known.has_news(self.store)?;
        Ok(lock.filter(|_| !has_news))
    }

    fn take(&self, place: &Directory, item: &StoreItem) -> Result<(), DiskError> {
        match (&self.waiting, item) {
            // Nothing relies on these.
            (_, StoreItem::Blob(file)) => self.store.downloads.remove(file).map(drop),
            (Some(trash), _) => trash.take(place, item, &item.file_name()),
            (None, _) => place.unlink_sealed(item.file_name()).map(drop),
        }
    }

    /// Something was removed, or set aside.
    fn note(&mut self, (item, bytes): &(StoreItem, u64)) {
        match self.waiting {
            Some(_) => self.swept.set_aside += bytes,
            None => self.swept.freed += bytes,
        }
        self.done.garbage.push((item.clone(), *bytes));
    }

    /// An image never outlives its mark.
    fn marks_and_sparse(&mut self, marks: &Items<'_>, sparse: &Items<'_>) -> Result<bool, GcError> {
        if marks.is_empty() && sparse.is_empty() {
            return Ok(true);
        }
        let Some(_lock) = self.enter(false)? else { return Ok(false) };
        for mark in marks {
            self.take(&self.store.downloads.directory, &mark.0)?;
            self.note(mark);
        }
        let Plan { needed, found, indexes, .. } = self.plan;
        // Somebody may fill one by now.
        let garbage = match sparse.is_empty() {
            true => Vec::new(),
            false => self.store.garbage_of_sparse(needed, found, indexes)?,
        };
        let mut files: Vec<SparseFile> = Vec::new();
        for item in sparse.iter().filter(|it| garbage.contains(&it.0)) {
            if let StoreItem::Sparse(file) = &item.0 {
                files.push(*file);
                self.note(item);
            }
        }
        self.store.sparse.remove(&files)?;
        Ok(true)
    }

    /// Removes indexes, and then devices.
    fn data(&mut self, data: &Items<'_>, has_objects: bool) -> Result<bool, GcError> {
        let store = self.store;
        let Some(directory) = store.devices.directory.get()? else { return Ok(true) };
        if has_objects {
            // A layer may have its objects in a device from now on, which is to be there surely.
            directory.sync()?;
        }
        let is_index = |it: &&&(StoreItem, u64)| matches!(it.0, StoreItem::DeviceIndex(_));
        let (indexes, devices): (Items<'_>, Items<'_>) = data.iter().partition(is_index);
        for items in [indexes, devices] {
            if items.is_empty() {
                continue;
            }
            let Some(lock) = self.enter(false)? else { return Ok(false) };
            for item in &items {
                let (StoreItem::Device(id) | StoreItem::DeviceIndex(id)) = &item.0 else {
                    continue;
                };
                if self.imports.need_devices() && self.waiting.is_none() {
                    self.swept.set_aside += item.1;
                    self.done.garbage.push((*item).clone());
                    continue;
                }
                // A device that has an index again was made again.
                let is_kept = store.devices.is_in_use(id)?
                    || matches!(item.0, StoreItem::Device(_))
                        && directory.stat(index_name(id))?.is_some();
                if !is_kept {
                    self.take(directory, &item.0)?;
                    self.note(item);
                }
            }
            drop(lock);
            directory.sync()?;
        }
        Ok(true)
    }

    /// Takes dead parts out of devices that stay.
    fn trim(&mut self) -> Result<bool, GcError> {
        let freeing_of = |plan: &mut GcPlan, device: &DeviceId, freeing| {
            let dead = plan.dead.iter_mut().filter(|it| it.device == *device);
            dead.for_each(|it| it.freeing = freeing);
        };
        for trimming in &self.plan.trimmings {
            let device = trimming.dead.device;
            if trimming.dead.freeing != Freeing::Now {
                continue;
            }
            let Some(_lock) = self.enter(false)? else { return Ok(false) };
            let index = self.store.devices.index_of(&device)?;
            if !index.is_some_and(|it| trimming.is_by(&it)) {
                return Ok(false);
            }
            let freeing = if self.imports.need_devices() {
                Freeing::Imports
            } else if self.store.devices.is_in_use(&device)? {
                Freeing::InUse
            } else if self.store.trim(trimming)? {
                self.swept.trimmed += trimming.dead.bytes;
                self.swept.freed += trimming.dead.bytes;
                continue;
            } else {
                Freeing::Unsupported
            };
            freeing_of(self.done, &device, freeing);
        }
        Ok(true)
    }

    /// Removes objects, some at a time.
    fn objects(&mut self, objects: &Items<'_>) -> Result<bool, GcError> {
        let mut left = objects.as_slice();
        // Sorted, so one shard after the other.
        let mut open: Option<(String, Directory)> = None;
        while !left.is_empty() {
            let is_first = left.len() == objects.len();
            let Some(lock) = self.enter(!is_first)? else { return Ok(false) };
            let begun = Instant::now();
            let trash = match (&self.waiting, self.imports.names.is_empty()) {
                (None, false) => Some(Trash::make(self.store, &self.imports.names)?),
                _ => None,
            };
            let mut taken = Items::new();
            for item in left.iter().take(self.pace.objects) {
                left = left.split_first().map_or(left, |it| it.1);
                let StoreItem::Object(id) = &item.0 else { continue };
                if self.imports.has_object(id) {
                    continue;
                }
                let (shard, name) = split(id);
                let place = match open.take() {
                    Some((name, place)) if name == shard => place,
                    _ => self.store.objects.directory.open(&shard)?,
                };
                match &trash {
                    // An import may look for it at this moment.
                    Some(trash) => trash.take(&place, &item.0, &name)?,
                    None => self.take(&place, &item.0)?,
                }
                open = Some((shard, place));
                taken.push(item);
                if begun.elapsed() > self.pace.hold {
                    break;
                }
            }
            let back = match &trash {
                Some(trash) => self.put_back(trash, &taken)?,
                None => BTreeSet::new(),
            };
            drop(lock);
            for item in taken {
                if !matches!(&item.0, StoreItem::Object(id) if back.contains(id)) {
                    self.note(item);
                }
            }
            if let Some(trash) = trash {
                trash.remove(&self.store.tmp)?;
            }
        }
        Ok(true)
    }

    /// Puts objects back that an import has listed while they were taken away. Each import that looks after that sees that
    /// they are gone.
    fn put_back(
        &mut self,
        trash: &Trash,
        taken: &Items<'_>,
    ) -> Result<BTreeSet<ObjectId>, DiskError> {
        self.imports.read_objects()?;
        let mut back = BTreeSet::new();
        for (item, _) in taken {
            if let StoreItem::Object(id) = item
                && self.imports.has_object(id)
                && trash.put_back(self.store, item)?
            {
                back.insert(*id);
            }
        }
        Ok(back)
    }
}

#[cfg(test)]
mod tests;
