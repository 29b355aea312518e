//! Carries out a plan. Other processes continue while the plan is made, and the store's lock is held only briefly. So
//! each time the lock is taken, the store is checked for news: new items that may need items of the plan.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId, ObjectId};

use super::data::Trimming;
use super::{CollectionPlan, Freeing, GcError, GcLimits, GcPlan, Swept, is_mark, is_of_device};
use crate::disk::{Directory, DiskError};
use crate::found::RunningImports;
use crate::shelf::blob_file::BlobFile;
use crate::shelf::devices::index_name;
use crate::shelf::item::StoreItem;
use crate::shelf::objects::split;
use crate::shelf::refs::Seconds;
use crate::staging;
use crate::store::{Lock, Store};
use crate::trash::{self, Trash};

/// Maximum time for which the lock is held for objects, and minimum time for which it is free afterwards.
const HOLD: Duration = Duration::from_millis(5);
/// Maximum number of objects that are renamed while the lock is held.
const OBJECTS: usize = 256;
/// Number of plans that news may invalidate before a plan is made with the lock held.
const PLANS: u32 = 8;

/// How a collection yields to other processes.
pub(super) struct Pace<'p> {
    /// How long the lock is held for objects.
    pub(super) hold: Duration,
    /// Maximum number of objects per lock.
    pub(super) objects: usize,
    /// Called while the lock is free, with the time for which it should stay free.
    pub(super) rest: &'p mut dyn FnMut(Duration),
    /// Called before the lock is taken; `false` ends the collection.
    pub(super) go_on: &'p dyn Fn() -> bool,
}

impl Store {
    /// Removes all unneeded items. Imports and mounts may begin or run at the same time, and wait only briefly.
    /// Downloads of unfinished pulls are kept for a week.
    ///
    /// # Errors
    /// [`GcError`] if an item that is kept cannot be read, or garbage cannot be removed.
    pub fn gc(&self, now: Seconds) -> Result<(GcPlan, Swept), GcError> {
        self.gc_while(now, &|| true)
    }

    /// As [`gc`](Self::gc), but keeps the garbage within the limits.
    ///
    /// # Errors
    /// As [`gc`](Self::gc).
    pub fn gc_within(&self, now: Seconds, limits: &GcLimits) -> Result<(GcPlan, Swept), GcError> {
        let rest = &mut std::thread::sleep;
        self.gc_at(now, limits, Pace { hold: HOLD, objects: OBJECTS, rest, go_on: &|| true })
    }

    /// Removes garbage as long as `go_on` returns `true`. The next collection removes the rest.
    ///
    /// # Errors
    /// As [`gc`](Self::gc).
    pub fn gc_while(
        &self,
        now: Seconds,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(GcPlan, Swept), GcError> {
        let rest = &mut std::thread::sleep;
        let limits = &GcLimits::default();
        self.gc_at(now, limits, Pace { hold: HOLD, objects: OBJECTS, rest, go_on })
    }

    pub(super) fn gc_at(
        &self,
        now: Seconds,
        limits: &GcLimits,
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
            let mut imports = RunningImports::from_store(self)?;
            let plan = self.plan_within(now, &imports, limits)?;
            let described = self.describe(&plan);
            if !is_last {
                drop(lock);
                (pace.rest)(Duration::ZERO);
                lock = self.lock_exclusive()?;
                imports = RunningImports::from_store(self)?;
                if self.is_overtaken(&plan, &imports, now)? {
                    continue;
                }
            }
            containers.extend(plan.roots.containers.iter().cloned());
            (done.kept, done.dead, done.spared) = (described.kept, described.dead, plan.spared);
            let (items, others) = described.garbage.split_at(plan.items.len());
            let mut sweep = Sweep {
                store: self,
                known: Known::from_plan(&plan),
                plan: &plan,
                imports,
                pace: &mut pace,
                done: &mut done,
                swept: &mut swept,
                waiting: None,
                trash: None,
                old: Vec::new(),
            };
            let has_ended = sweep.all(lock, items)?;
            sweep.end()?;
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
        self.clear_container_snapshots()?;
        self.clear_volumes()?;
        staging::clear(&self.tmp)?;
        trash::clear(&self.tmp)?;
        swept.removed = done.garbage.len() as u64;
        tracing::info!(removed = swept.removed, freed = swept.freed, "collected garbage");
        Ok((done, swept))
    }

    /// Whether an item is needed now that was not needed when the plan was made.
    fn is_overtaken(
        &self,
        plan: &CollectionPlan,
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
        Ok(!is_known || Known::from_plan(plan).has_news(self)?)
    }
}

impl CollectionPlan {
    /// Whether an image was in the store when the plan was made.
    fn has(&self, image: &ImageId) -> bool {
        self.found.images.binary_search(image).is_ok()
    }
}

/// Items that may need others, and whose needs the plan contains.
struct Known {
    images: BTreeSet<ImageId>,
    layers: BTreeSet<Digest>,
    manifests: BTreeSet<Digest>,
}

impl Known {
    fn from_plan(plan: &CollectionPlan) -> Self {
        let found = &plan.found;
        Self {
            images: found.images.iter().copied().collect(),
            layers: found.layers.iter().copied().collect(),
            manifests: found.manifests.iter().copied().collect(),
        }
    }

    /// Forgets a removed item, so that it counts as new if it is added again.
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

/// Outcome of trimming a device.
enum TrimOutcome {
    /// The dead parts are freed.
    Freed,
    /// The dead parts are on the disk, and this is when they can be freed.
    Kept(Freeing),
    /// There is news, or the collection should end.
    News,
}

struct Sweep<'s, 'p> {
    store: &'s Store,
    plan: &'s CollectionPlan,
    known: Known,
    imports: RunningImports,
    pace: &'s mut Pace<'p>,
    done: &'s mut GcPlan,
    swept: &'s mut Swept,
    /// Trash for all items if a running import has no lists. It is kept until the running imports end.
    waiting: Option<Trash>,
    /// Trash for all other items. It is emptied while the lock is free.
    trash: Option<Trash>,
    /// Trashes to remove when the lock is free.
    old: Vec<Trash>,
}

/// Garbage, with its bytes on disk.
type Items<'i> = Vec<&'i (StoreItem, u64)>;

impl Sweep<'_, '_> {
    /// Removes items, objects after the items which need them, so that these are removed durably before. Trims
    /// devices last. Returns `false` if there is news.
    fn all(&mut self, lock: Option<Lock>, items: &[(StoreItem, u64)]) -> Result<bool, GcError> {
        let store = self.store;
        if self.imports.has_unlisted() {
            self.waiting = Some(Trash::make(store, &self.imports.names)?);
        }
        let (mut users, mut marks, mut lazy) = (Items::new(), Items::new(), Items::new());
        let (mut data, mut objects) = (Items::new(), Items::new());
        for item in items {
            match &item.0 {
                StoreItem::Object(_) => objects.push(item),
                StoreItem::LazyDevice(_) => lazy.push(item),
                it if is_of_device(it) => data.push(item),
                it if is_mark(it) => marks.push(item),
                _ => users.push(item),
            }
        }
        if !users.is_empty() {
            self.make_trash()?;
        }
        for item in users {
            let is_removed = self.take(&store.place(&item.0)?, &item.0, &item.0.file_name())?;
            self.known.forget(&item.0);
            if is_removed {
                self.note(item);
            }
        }
        drop(lock);
        self.empty_trash()?;
        let trims = self.plan.trimmings.iter().any(|it| it.dead.freeing == Freeing::Now);
        // Items that an earlier `gc` removed before it was killed are synced as well.
        if ![&marks, &lazy, &data, &objects].into_iter().all(Vec::is_empty) || trims {
            store.images.directory.sync()?;
            store.layers.directory.sync()?;
        }
        if self.waiting.is_some() {
            // An import may restore an image that was removed, and would then need the mark.
            marks.clear();
        }
        Ok(self.marks(&marks)?
            && self.lazy_devices(&lazy)?
            && self.data(&data, !objects.is_empty())?
            && self.objects(&objects)?
            // Trimming writes indexes, for which the items above may have to make room on the disk.
            && self.trim()?)
    }

    /// Makes a trash that is emptied after all running imports have ended, unless there is one. On a full disk this
    /// may fail.
    fn make_trash(&mut self) -> Result<(), DiskError> {
        let (store, imports) = (self.store, &self.imports.names);
        if self.waiting.is_some() || self.trash.as_ref().is_some_and(|it| it.waits_for(imports)) {
            return Ok(());
        }
        let new = match Trash::make(store, imports) {
            Ok(new) => Some(new),
            Err(error) if error.is_full() => None,
            Err(error) => return Err(error),
        };
        self.old.extend(std::mem::replace(&mut self.trash, new));
        Ok(())
    }

    /// Empties the trash. The caller has released the lock, because this may take long.
    fn empty_trash(&mut self) -> Result<(), DiskError> {
        self.old.drain(..).try_for_each(|it| it.remove(&self.store.tmp))?;
        self.trash.as_ref().map_or(Ok(()), Trash::empty)
    }

    fn end(self) -> Result<(), DiskError> {
        self.old.into_iter().chain(self.trash).try_for_each(|it| it.remove(&self.store.tmp))
    }

    /// Takes the lock again. Returns `None` if there is news, or if the collection should end.
    fn enter(&mut self) -> Result<Option<Lock>, DiskError> {
        self.enter_after(Duration::ZERO)
    }

    fn enter_after(&mut self, rest: Duration) -> Result<Option<Lock>, DiskError> {
        (self.pace.rest)(rest);
        if !(self.pace.go_on)() {
            return Ok(None);
        }
        self.make_trash()?;
        let lock = self.store.lock_to_sweep()?;
        let before = self.imports.names.clone();
        self.imports.refresh(self.store)?;
        let is_new = |it: &String| !before.contains(it);
        // An import without a list may rely on any item.
        let is_unlisted = self.imports.unlisted.iter().any(is_new);
        if is_unlisted || self.known.has_news(self.store)? {
            return Ok(None);
        }
        // The trash must also wait for imports that have begun since it was made.
        self.make_trash()?;
        Ok(lock)
    }

    /// Removes an item, or moves it to the trash. Returns `false` if the item is gone, or if a process that uses it
    /// keeps it.
    fn take(&self, place: &Directory, item: &StoreItem, name: &str) -> Result<bool, DiskError> {
        match (&self.waiting, &self.trash, item) {
            // If a pull appends to the file, it has locked the file, so the file is kept. A pull that opens the file
            // now notices that it has lost its name, and creates another file.
            (None, Some(trash), StoreItem::Blob(BlobFile::Partial(digest))) => {
                let partial = self.store.downloads.existing_partial(digest)?;
                let Some(partial) = partial else { return Ok(false) };
                match trash.take(place, item, name) {
                    Err(error) if error.is_full() => partial.discard().map(|()| true),
                    taken => taken,
                }
            }
            (_, _, StoreItem::Blob(file @ BlobFile::Partial(_)))
            // Imports do not rely on these files.
            | (Some(_), _, StoreItem::Blob(file)) => self.store.downloads.remove(file),
            (Some(_), _, StoreItem::LazyDevice(_)) => place.unlink_sealed(name),
            (Some(trash), _, _) => trash.take(place, item, name),
            (None, Some(trash), _) => match trash.take(place, item, name) {
                Err(error) if error.is_full() => self.remove(place, item, name, error),
                taken => taken,
            },
            (None, None, _) => {
                let full = place.failed("remove", name, rustix::io::Errno::NOSPC);
                self.remove(place, item, name, full)
            }
        }
    }

    /// Removes an item at once, because the disk is too full for a trash. Objects stay if an import runs, because the
    /// import may look them up at this moment.
    fn remove(
        &self,
        place: &Directory,
        item: &StoreItem,
        name: &str,
        full: DiskError,
    ) -> Result<bool, DiskError> {
        if matches!(item, StoreItem::Object(_)) && !self.imports.names.is_empty() {
            return Err(full);
        }
        place.unlink_sealed(name)
    }

    /// Counts an item as removed or set aside.
    fn note(&mut self, (item, bytes): &(StoreItem, u64)) {
        match self.waiting {
            Some(_) => self.swept.set_aside += bytes,
            None => self.swept.freed += bytes,
        }
        self.done.garbage.push((item.clone(), *bytes));
    }

    /// Removes marks after their images, so that an image never outlives its mark.
    fn marks(&mut self, marks: &Items<'_>) -> Result<bool, GcError> {
        if marks.is_empty() {
            return Ok(true);
        }
        let Some(lock) = self.enter()? else { return Ok(false) };
        for mark in marks {
            if self.take(&self.store.downloads.directory, &mark.0, &mark.0.file_name())? {
                self.note(mark);
            }
        }
        drop(lock);
        self.empty_trash()?;
        Ok(true)
    }

    /// Removes lazy devices and heads of indexes before the files that belong to them, because a device cannot be
    /// identified without its state.
    fn lazy_devices(&mut self, lazy: &Items<'_>) -> Result<bool, GcError> {
        if lazy.is_empty() {
            return Ok(true);
        }
        let store = self.store;
        let Some(directory) = store.lazy_devices.directory.get()? else { return Ok(true) };
        let is_first =
            |it: &StoreItem| matches!(it, StoreItem::LazyDevice(file) if file.goes_before_others());
        let (first, rest): (Items<'_>, Items<'_>) = lazy.iter().partition(|it| is_first(&it.0));
        for (items, is_last) in [(first, false), (rest, true)] {
            let Some(lock) = self.enter()? else { return Ok(false) };
            let CollectionPlan { needed, found, indexes, .. } = self.plan;
            // Another process may be filling a device now.
            let garbage = store.garbage_of_lazy_devices(needed, found, indexes)?;
            if is_last && garbage.iter().any(is_first) {
                // The process has created a device since, or has ended.
                return Ok(false);
            }
            for item in items.into_iter().filter(|it| garbage.contains(&it.0)) {
                if self.take(directory, &item.0, &item.0.file_name())? {
                    self.note(item);
                }
            }
            drop(lock);
            self.empty_trash()?;
            if !is_last {
                // Items that another `gc` removed before it was killed are synced as well.
                directory.sync()?;
            }
        }
        Ok(true)
    }

    /// Removes indexes before devices.
    fn data(&mut self, data: &Items<'_>, has_objects: bool) -> Result<bool, GcError> {
        let store = self.store;
        let Some(directory) = store.devices.directory.get()? else { return Ok(true) };
        if has_objects {
            // When the files of objects are removed, layers may rely on the same objects in a device, so the device
            // must be durable.
            directory.sync()?;
        }
        let is_index = |it: &&&(StoreItem, u64)| matches!(it.0, StoreItem::DeviceIndex(_));
        let (indexes, devices): (Items<'_>, Items<'_>) = data.iter().partition(is_index);
        for items in [indexes, devices] {
            if items.is_empty() {
                continue;
            }
            let Some(lock) = self.enter()? else { return Ok(false) };
            for item in &items {
                let (StoreItem::Device(id) | StoreItem::DeviceIndex(id)) = &item.0 else {
                    continue;
                };
                if self.imports.need_devices() && self.waiting.is_none() {
                    self.swept.set_aside += item.1;
                    self.done.garbage.push((*item).clone());
                    continue;
                }
                // If the device has an index again, it was published after the plan was made.
                let is_kept = store.devices.is_in_use(id)?
                    || matches!(item.0, StoreItem::Device(_))
                        && directory.stat(index_name(id))?.is_some();
                if !is_kept && self.take(directory, &item.0, &item.0.file_name())? {
                    self.note(item);
                }
            }
            drop(lock);
            self.empty_trash()?;
            directory.sync()?;
        }
        Ok(true)
    }

    /// Frees dead parts of devices that are kept. If one device cannot be trimmed, the others still are.
    fn trim(&mut self) -> Result<bool, GcError> {
        let mut failed = None;
        for trimming in &self.plan.trimmings {
            if trimming.dead.freeing != Freeing::Now {
                continue;
            }
            let freeing = match self.trim_device(trimming) {
                Ok(TrimOutcome::News) => return Ok(false),
                Ok(TrimOutcome::Freed) => {
                    self.swept.trimmed += trimming.dead.bytes;
                    self.swept.freed += trimming.dead.bytes;
                    continue;
                }
                Ok(TrimOutcome::Kept(freeing)) => freeing,
                Err(error) if error.is_full() => Freeing::NoSpace,
                Err(error) => {
                    failed.get_or_insert(error);
                    continue;
                }
            };
            let dead = self.done.dead.iter_mut().filter(|it| it.device == trimming.dead.device);
            dead.for_each(|it| it.freeing = freeing);
        }
        failed.map_or(Ok(true), |error| Err(error.into()))
    }

    /// Frees dead parts of a device. The lock is held only while the index is replaced: the index is written before,
    /// and bytes are freed after.
    fn trim_device(&mut self, trimming: &Trimming) -> Result<TrimOutcome, DiskError> {
        let device = &trimming.dead.device;
        // Without the lock, the device may come into use later, so this is checked again.
        if let Some(user) = self.user_of(device)? {
            return Ok(TrimOutcome::Kept(user));
        }
        let new = self.store.index_after(trimming)?;
        let Some(lock) = self.enter()? else { return Ok(TrimOutcome::News) };
        let index = self.store.devices.index_of(device)?;
        if !index.is_some_and(|it| trimming.is_by(&it)) {
            return Ok(TrimOutcome::News);
        }
        if let Some(user) = self.user_of(device)? {
            return Ok(TrimOutcome::Kept(user));
        }
        let opened = self.store.drop_objects(trimming, new.as_ref())?;
        drop(lock);
        Ok(match self.store.free(trimming, &opened)? {
            true => TrimOutcome::Freed,
            false => TrimOutcome::Kept(Freeing::Unsupported),
        })
    }

    /// Returns why the bytes of a device cannot be freed now, if it is in use.
    fn user_of(&self, device: &DeviceId) -> Result<Option<Freeing>, DiskError> {
        if self.imports.need_devices() {
            return Ok(Some(Freeing::Imports));
        }
        self.store.user_of(device)
    }

    /// Removes objects in batches.
    fn objects(&mut self, objects: &Items<'_>) -> Result<bool, GcError> {
        let mut left = objects.as_slice();
        let mut shard = OpenShard::default();
        let mut is_free_since: Option<Instant> = None;
        while !left.is_empty() {
            let (batch, _) = left.split_at(left.len().min(self.pace.objects));
            for (item, _) in batch {
                if let StoreItem::Object(id) = item {
                    // The lookup may read the disk, so it happens before the lock is taken.
                    let (name, file) = split(id);
                    shard.open(self.store, name)?.stat(file)?;
                }
            }
            let rest = is_free_since
                .map_or(Duration::ZERO, |it| self.pace.hold.saturating_sub(it.elapsed()));
            let Some(lock) = self.enter_after(rest)? else { return Ok(false) };
            let begun = Instant::now();
            let mut taken = Items::new();
            for item in batch {
                left = left.split_first().map_or(left, |it| it.1);
                let StoreItem::Object(id) = &item.0 else { continue };
                if self.imports.has_object(id) {
                    continue;
                }
                let (name, file) = split(id);
                if self.take(shard.open(self.store, name)?, &item.0, &file)? {
                    taken.push(*item);
                }
                if begun.elapsed() > self.pace.hold {
                    break;
                }
            }
            // An import may have listed one of them while they were moved.
            let back = self.put_back(&taken)?;
            drop(lock);
            is_free_since = Some(Instant::now());
            self.empty_trash()?;
            for item in taken {
                if !matches!(&item.0, StoreItem::Object(id) if back.contains(id)) {
                    self.note(item);
                }
            }
        }
        Ok(true)
    }

    /// Restores objects that an import listed while they were moved to the trash. Imports that look for them later
    /// see that they are gone.
    fn put_back(&mut self, taken: &Items<'_>) -> Result<BTreeSet<ObjectId>, DiskError> {
        let mut back = BTreeSet::new();
        let Some(trash) = &self.trash else { return Ok(back) };
        self.imports.read_objects()?;
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

/// A directory of objects. Objects are sorted by directory, so each directory is opened once.
#[derive(Debug, Default)]
struct OpenShard(Option<(String, Directory)>);

impl OpenShard {
    fn open(&mut self, store: &Store, name: String) -> Result<&Directory, DiskError> {
        let open = match self.0.take() {
            Some(open) if open.0 == name => open,
            _ => {
                let directory = store.objects.directory.open(&name)?;
                (name, directory)
            }
        };
        Ok(&self.0.insert(open).1)
    }
}

#[cfg(test)]
mod tests;
