//! Commits an import. The order of the steps is essential for its behaviour after a crash: see
//! `docs/format/object-store.md`, "A commit".

use std::collections::BTreeMap;

use image::verity::ObjectId;

use super::data::{DeviceLocation, MadeFile};
use super::sealer::Sealer;
use super::{Committed, ItemLocation, State, Transaction, TransactionError};
use crate::disk::{Directory, DiskError, Renamed, is_unsynced};
use crate::shelf::blob_file::BlobFile;
use crate::shelf::downloads::origins;
use crate::shelf::item::StoreItem;
use crate::shelf::objects::split;
use crate::shelf::refs;
use crate::store::SHARED;
use crate::trash;

/// Up to this many files or directories are synced with `fsync`. `syncfs` is cheaper from a handful of files on, but
/// it also waits for all other data written to the same file system. Measured in `docs/decisions/0002-store.md`.
const FSYNC_MAX: usize = 8;
/// Prefix of a name in the work directory: of a directory that was found in the place of a file.
const ASIDE: &str = "aside-";

impl Transaction<'_> {
    /// Makes everything durable and visible: objects and devices first, then images, layers and manifests, refs last.
    ///
    /// # Errors
    /// [`TransactionError`]. The refs are unchanged then.
    pub fn commit(self) -> Result<Committed, TransactionError> {
        if self.failed.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(TransactionError::Incomplete);
        }
        let state = std::mem::take(&mut *self.state());
        if state.objects.values().any(|found| *found == ItemLocation::Claimed) {
            return Err(TransactionError::Incomplete);
        }
        // This import may rely on files that were published without a sync. Most of them are synced here, while `gc` does
        // not wait.
        self.store.settle()?;
        // From here until the end of the commit, `gc` waits.
        let lock = self.store.lock_shared()?;
        self.bring_back(&state)?;
        self.keep(&state)?;
        self.check_refs(&state)?;
        self.check_devices(&state)?;
        let refs = self.write_refs(&state)?;

        self.sync_data(&state, &refs)?;
        self.publish_objects(&state)?;
        self.publish_data(&state)?;
        self.publish_lazy(&state)?;
        self.sync_objects(&state)?;
        if !state.unproven.is_empty() {
            // A reader that finds one of these images by its id must also find the mark.
            let _alone = self.store.lock_records()?;
            self.set_marks(&state)?;
        }
        self.store.settle()?;
        self.publish_users(&state)?;
        let has_marks = !state.unproven.is_empty() || !state.proven.is_empty();
        if !refs.is_empty() || !state.origins.is_empty() || has_marks {
            let alone = self.store.lock_records()?;
            self.publish_origins(&state)?;
            self.check_expected(&state)?;
            // Another import may have proven an image for all of its names before this import sets a name.
            self.set_marks(&state)?;
            self.store.settle()?;
            self.check_published(&state)?;
            for (name, file) in &refs {
                self.work.directory.rename_over(file, &self.store.refs.directory, name)?;
            }
            if let Err(error) = self.clear_marks(&state) {
                // The refs have changed already. The mark only causes another comparison of the image.
                tracing::warn!(%error, "cannot remove the mark of an image that was compared with its layers");
            }
            drop(alone);
            self.store.refs.directory.sync()?;
        }
        let images = state.users.keys().filter_map(|it| match it {
            StoreItem::Image(image) => Some(image),
            _ => None,
        });
        self.store.settle_lacking(images);
        drop(lock);
        let counts = state.counts;
        if let Err(error) = self.work.remove() {
            tracing::debug!(%error, "cannot remove the work directory: the next command removes it");
        }
        Ok(counts)
    }

    /// Protects the items that this import publishes and has found for the outer imports.
    fn keep(&self, state: &State) -> Result<(), DiskError> {
        for keeper in &self.keepers {
            keeper.add_objects(state.objects.keys())?;
            state.users.keys().try_for_each(|item| keeper.add(item))?;
        }
        Ok(())
    }

    /// Checks that every item that the import found is still in the store. Restores items that `gc` set aside.
    pub(super) fn bring_back(&self, state: &State) -> Result<(), TransactionError> {
        // Files that are not synced are removed if they cannot be synced.
        for (item, found) in &state.users {
            if *found == ItemLocation::Store
                && self.store.place(item)?.stat(item.file_name())?.is_none()
                && trash::all(&self.store.tmp)?.is_empty()
            {
                return Err(TransactionError::Vanished(item.to_string()));
            }
        }
        let trashes = trash::all(&self.store.tmp)?;
        if trashes.is_empty() {
            // `gc` keeps listed items, or sets them aside in a trash.
            return Ok(());
        }
        for item in state.found_in_store() {
            let is_there =
                || Ok::<_, DiskError>(self.store.place(&item)?.stat(item.file_name())?.is_some());
            // Another import may restore the item at this moment.
            let is_back =
                is_there()? || trash::put_back(self.store, &trashes, &item)? || is_there()?;
            if !is_back {
                return Err(TransactionError::Vanished(item.to_string()));
            }
        }
        Ok(())
    }

    fn check_refs(&self, state: &State) -> Result<(), TransactionError> {
        let store = self.store;
        for (name, reference) in &state.refs {
            let dangling = |what: String| TransactionError::Dangling { name: name.clone(), what };
            let image = &reference.image;
            let there =
                state.users.contains_key(&StoreItem::Image(*image)) || store.images.has(image)?;
            if !there {
                return Err(dangling(format!("image {image}")));
            }
            let Some(manifest) = &reference.manifest else { continue };
            let there = state.users.contains_key(&StoreItem::Manifest(*manifest))
                || store.manifests.has(manifest)?;
            if !there {
                return Err(dangling(format!("manifest {manifest}")));
            }
        }
        Ok(())
    }

    /// Checks that the images and manifests that refs are about to name are in the store.
    fn check_published(&self, state: &State) -> Result<(), TransactionError> {
        for reference in state.refs.values() {
            let vanished = |item: StoreItem| TransactionError::Vanished(item.to_string());
            if !self.store.images.has(&reference.image)? {
                return Err(vanished(StoreItem::Image(reference.image)));
            }
            let Some(manifest) = reference.manifest else { continue };
            if !self.store.manifests.has(&manifest)? {
                return Err(vanished(StoreItem::Manifest(manifest)));
            }
        }
        Ok(())
    }

    fn check_expected(&self, state: &State) -> Result<(), TransactionError> {
        for (name, image) in &state.expected {
            // A ref that cannot be read counts as changed.
            let now = self.store.refs.get(name).ok().flatten();
            if now.map(|it| it.image) != Some(*image) {
                return Err(TransactionError::RefChanged(name.clone()));
            }
        }
        Ok(())
    }

    /// Writes the refs' files. Returns the final name and the current name of each.
    fn write_refs(&self, state: &State) -> Result<Vec<(String, String)>, DiskError> {
        let mut written = Vec::new();
        for (name, reference) in &state.refs {
            let (number, mut file) = self.new_file()?;
            file.write_all(&refs::encode(name, reference))?;
            written.push((name.file_name(), number.to_string()));
        }
        Ok(written)
    }

    /// Syncs the data of every new file in the work directory.
    fn sync_data(&self, state: &State, refs: &[(String, String)]) -> Result<(), DiskError> {
        let mut files: Vec<u64> = Vec::new();
        files.extend(state.objects.values().filter_map(ItemLocation::number));
        for data in state.data.values() {
            if let DeviceLocation::Here(made) = data {
                files.push(made.index_file);
                // A sealed lazy device was synced before it was sealed.
                if let MadeFile::Own(number) = made.device {
                    files.push(number);
                }
            }
        }
        files.extend(state.users.values().filter_map(ItemLocation::number));
        if files.len() + refs.len() > FSYNC_MAX {
            return self.store.tmp.sync_everything();
        }
        files.sort_unstable();
        let work = &self.work.directory;
        files.iter().try_for_each(|number| work.sync_file(number.to_string()))?;
        refs.iter().try_for_each(|(_, file)| work.sync_file(file))
    }

    fn publish_objects(&self, state: &State) -> Result<(), DiskError> {
        let mut sealer = Sealer::new(self);
        let mut objects: Vec<_> = state.objects.iter().collect();
        objects.sort_unstable_by_key(|(id, _)| **id);
        for (id, found) in objects {
            let Some(number) = found.number() else { continue };
            let shard = self.store.objects.make_shard(id, SHARED)?;
            let (_, rest) = split(id);
            self.place(number, *found, shard, &rest)?;
            sealer.seal(shard, &rest);
        }
        Ok(())
    }

    /// Publishes the items that need objects, and makes them durable. The objects that these items need are already
    /// durable, so the items are complete even after a crash.
    fn publish_users(&self, state: &State) -> Result<(), DiskError> {
        let mut sealer = Sealer::new(self);
        let mut used = Vec::new();
        for (item, found) in &state.users {
            let directory = self.store.place(item)?;
            if let Some(number) = found.number() {
                let name = item.file_name();
                self.place(number, *found, &directory, &name)?;
                if matches!(item, StoreItem::Image(_)) {
                    sealer.seal(&directory, &name);
                }
            }
            if used.last().is_none_or(|last: &Directory| last.path() != directory.path()) {
                used.push(directory);
            }
        }
        // Items that another import has published, but perhaps not synced yet, are synced as well.
        used.iter().try_for_each(Directory::sync)
    }

    /// Adds origins to the records of images, durably. An image without a record has origin "unknown".
    fn publish_origins(&self, state: &State) -> Result<(), DiskError> {
        let work = &self.work.directory;
        let mut is_new = false;
        for (image, added) in &state.origins {
            let Some(all) = self.store.downloads.with_origins(image, added)? else { continue };
            let (number, mut file) = self.new_file()?;
            file.write_all(&origins::encode(image, &all))?;
            let (number, name) = (number.to_string(), BlobFile::Origins(*image).file_name());
            work.sync_file(&number)?;
            work.rename_over(&number, &self.store.downloads.directory, &name)?;
            is_new = true;
        }
        if is_new { self.store.downloads.directory.sync() } else { Ok(()) }
    }

    pub(super) fn place(
        &self,
        file: u64,
        found: ItemLocation,
        to: &Directory,
        name: &str,
    ) -> Result<(), DiskError> {
        if matches!(found, ItemLocation::Better(_)) {
            tracing::warn!(name, "replacing a damaged file");
            return self.replace(file, to, name);
        }
        if matches!(found, ItemLocation::Newer(_)) {
            return self.replace(file, to, name);
        }
        match self.work.directory.rename_new(file.to_string(), to, name)? {
            Renamed::Now => Ok(()),
            // Another import has published the same file since `settle`, without a sync.
            Renamed::Taken
                if !self.store.is_deferring()
                    && to.stat(name)?.is_some_and(|it| is_unsynced(&it)) =>
            {
                self.replace(file, to, name)
            }
            // Another import has published the same file. The data of both files is synced.
            Renamed::Taken => Ok(()),
        }
    }

    /// Renames a file, replacing any file or directory of the new name.
    pub(super) fn replace(&self, file: u64, to: &Directory, name: &str) -> Result<(), DiskError> {
        self.replace_from(&self.work.directory, &file.to_string(), to, name)
    }

    /// Renames a file of this directory, replacing any file or directory of the new name.
    pub(super) fn replace_from(
        &self,
        from: &Directory,
        file: &str,
        to: &Directory,
        name: &str,
    ) -> Result<(), DiskError> {
        let work = &self.work.directory;
        match from.rename_over(file, to, name) {
            Err(error) if error.is(rustix::io::Errno::PERM) => {
                to.unseal(name.as_bytes(), error)?;
                from.rename_over(file, to, name)
            }
            // The name belongs to a directory. It is moved to the work directory, which is removed later.
            Err(error) if error.is(rustix::io::Errno::ISDIR) => {
                let (Renamed::Now | Renamed::Taken) =
                    to.rename_new(name, work, format!("{ASIDE}{file}"))?;
                from.rename_over(file, to, name)
            }
            other => other,
        }
    }

    /// Makes the names of all objects durable that the import relies on, including objects that another import has
    /// published but perhaps not synced yet.
    fn sync_objects(&self, state: &State) -> Result<(), DiskError> {
        let store = self.store;
        let shards: BTreeMap<u8, &ObjectId> =
            state.objects.keys().filter_map(|id| Some((*id.as_bytes().first()?, id))).collect();
        if shards.is_empty() {
            return Ok(());
        }
        if shards.len() > FSYNC_MAX {
            return store.tmp.sync_everything();
        }
        for id in shards.values() {
            if let Some(shard) = store.objects.shard(id)? {
                shard.sync()?;
            }
        }
        // The directory of a shard may be new.
        store.objects.directory.sync()
    }
}

impl ItemLocation {
    pub(super) const fn number(&self) -> Option<u64> {
        match self {
            Self::Here(number) | Self::Better(number) | Self::Newer(number) => Some(*number),
            Self::Claimed | Self::Store => None,
        }
    }
}

impl State {
    fn found_in_store(&self) -> impl Iterator<Item = StoreItem> {
        let there = |found: &ItemLocation| *found == ItemLocation::Store;
        let objects = self.objects.iter().filter(move |it| there(it.1));
        let objects = objects.map(|(id, _)| StoreItem::Object(*id));
        let data = self.data.iter().filter(|it| matches!(it.1, DeviceLocation::Store));
        let data = data.flat_map(|(id, _)| [StoreItem::Device(*id), StoreItem::DeviceIndex(*id)]);
        let users = self.users.iter().filter(move |it| there(it.1));
        objects.chain(data).chain(users.map(|(item, _)| item.clone()))
    }
}
