//! The snapshots of one engine and the operations on them: containerd's rules, without gRPC.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use container::bundle::userns::IdMap;
use container::changes::Owners;
use image::digest::Digest;
use image::verity::ImageId;
use kernel::usage::{Usage, sync, usage_of};
use oci::manifest::is_erofs_layer;
use store::{
    Seconds, SnapshotContent, SnapshotError, SnapshotInstance, SnapshotKind, SnapshotRecord,
    SnapshotSize, Store, Transaction,
};
use transfer::import::ImportError;

use super::cancellation::CancelToken;
use super::counts::Counts;
use super::error::{SnapshotterError, unopened};
use super::grpc::filter::Filters;
use super::id_map::map_of;
use super::labels::{
    Labels, asked_map, asked_size, change_labels, check_labels, check_name, is_unpacked,
};
use super::layers::from_dir::{LayerClaim, Resources};
use super::layers::{AppliedLayer, Layers, shared};
use super::lazy::states::LazyMemory;
use super::roots::{self, Purpose, RootPlace, Roots};
use super::settings::{SkipLayers, SnapshotAccess, SnapshotResources};
use super::snapshot_lock::{NewSnapshot, SnapshotLocks, Taken};
use super::space::deferred_delete::{Thrown, Trash};
use super::space::quota::Quota;
use super::state::{Root, SnapshotEntry, SnapshotInfo, State, Work, kind_name};

/// A mount with which an engine reaches a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotMount {
    /// Path of the root.
    pub source: PathBuf,
    pub is_writable: bool,
}

/// The snapshots of one engine.
#[derive(Debug)]
pub struct Snapshotter {
    pub(super) store: Store,
    pub(super) instance: SnapshotInstance,
    pub(super) environment: SnapshotResources,
    pub(super) layers: Layers,
    pub(super) lazy: LazyMemory,
    roots: Roots,
    locks: SnapshotLocks,
    pub(super) trash: Trash,
    pub(super) quota: Quota,
    pub(super) counts: Arc<Counts>,
}

impl Snapshotter {
    /// Opens the snapshots of an engine in a store. Roots that an earlier service has mounted stay mounted.
    ///
    /// # Errors
    /// Also if another service uses the instance.
    pub fn open(
        store: Store,
        instance: &str,
        environment: SnapshotResources,
    ) -> Result<Self, SnapshotterError> {
        let instance = open_snapshots(&store, instance)?;
        let (records, damaged) = instance.read()?;
        let counts = Arc::new(Counts::default());
        counts.found_damaged(damaged.len() as u64);
        for error in damaged {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, "ignoring a snapshot");
        }
        let may_have = |number: u64| {
            let record = records.get(&number);
            record.is_some_and(|it| !it.kind.is_committed())
        };
        let mounted = roots::adopt(&instance, &may_have)?;
        // The number of a folder that cannot be read is not reused.
        let mut state = State { next: instance.free_number()?, ..State::default() };
        for (number, record) in records {
            state.names.insert(record.name.clone(), number);
            let root = if mounted.contains(&number) { Root::Adopted } else { Root::No };
            // The directory still exists, because mounted roots needed it when the snapshot became a layer, or because
            // the service died before it removed the directory.
            let is_layer = matches!(record.kind, SnapshotKind::Committed(_));
            if is_layer && instance.changes(number).exists() {
                state.spare.insert(number);
            }
            state.entries.insert(number, SnapshotEntry { record, root, work: Work::None });
        }
        let roots = Roots::adopt(&instance, &mut state)?;
        let quota = Quota::new(environment.search.clone())?;
        let maker = Resources {
            threads: environment.threads,
            scratch: environment.scratch.clone(),
            cancel: AtomicBool::new(false),
        };
        let it = Self {
            store,
            instance,
            environment,
            layers: Layers::new(maker),
            lazy: LazyMemory::default(),
            roots,
            locks: SnapshotLocks::new(state),
            trash: Trash::new(),
            quota,
            counts,
        };
        it.drop_spare();
        it.forget_names();
        let mounted = |it: &State| -> Vec<u64> {
            it.entries.iter().filter(|it| it.1.root != Root::No).map(|it| *it.0).collect()
        };
        let mounted = mounted(&it.state());
        mounted.into_iter().for_each(|number| it.quota.make_room(&it.instance, number));
        Ok(it)
    }

    /// Makes a snapshot and mounts its root.
    ///
    /// # Errors
    /// On an error, the snapshot does not exist.
    pub fn prepare(
        &self,
        key: &str,
        parent: &str,
        labels: &Labels,
        access: SnapshotAccess,
    ) -> Result<SnapshotMount, SnapshotterError> {
        let kind = match access {
            SnapshotAccess::Write => SnapshotKind::Active(None),
            SnapshotAccess::Read => SnapshotKind::View,
        };
        let new = self.make(key, parent, labels, kind)?;
        let (number, record) = (new.number, &new.record);
        let is_for_the_differ = self.state().is_for_the_differ(record);
        let root = match is_for_the_differ {
            true => Root::No,
            false => self.mount_root(number, record)?,
        };
        let mount = self.mount_of(number, record);
        new.keep(|entry| entry.root = root);
        Ok(mount)
    }

    /// Returns the mount of a root. Mounts the root if necessary, for example after a reboot of the host.
    pub fn mounts(&self, key: &str) -> Result<SnapshotMount, SnapshotterError> {
        let taken = self.take(key, |record| match record.kind {
            SnapshotKind::View | SnapshotKind::Active(_) => Ok(()),
            _ => Err(SnapshotterError::Committed(key.to_owned())),
        })?;
        let (number, record) = (taken.number, &taken.record);
        let mut root = self.state().entries.get(&number).map_or(Root::No, |it| it.root);
        let path = self.instance.root(number);
        if root != Root::No && !roots::is_mounted(&path) {
            // Without a new mount, a program would see an empty directory of the store.
            tracing::warn!(key, root = %path.display(), "another process unmounted a root: mounting it again");
            self.unmount_root(number)?;
            root = Root::No;
        }
        if root == Root::No {
            // Only one overlay at a time may use a directory with changes, so this waits until the old overlay is
            // gone.
            self.trash.empty();
            let root = self.mount_root(number, record)?;
            taken.change(|entry| entry.root = root);
        }
        Ok(self.mount_of(number, record))
    }

    /// Checks that a snapshot has this parent. An empty name is always accepted.
    pub fn check_parent(&self, key: &str, parent: &str) -> Result<(), SnapshotterError> {
        let own = self.stat(key)?.parent;
        match parent.is_empty() || parent == own {
            true => Ok(()),
            false => Err(SnapshotterError::OtherParent(key.to_owned(), own)),
        }
    }

    /// Commits an active snapshot under a new name. A layer that the engine has unpacked becomes a layer of the
    /// store. Other changes stay a directory until a layer is put on it.
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

    /// Removes a snapshot and its changes.
    ///
    /// # Errors
    /// On an error, the snapshot still exists.
    pub fn remove(&self, key: &str) -> Result<(), SnapshotterError> {
        let taken = self.take(key, |_| Ok(()))?;
        let number = taken.number;
        let begun = self.state().begin_removal(number);
        begun?;
        self.unmount_root(number)?;
        self.quota.drop(&self.instance, number)?;
        let folder = self.instance.hide(number)?;
        self.state().forget(number);
        self.trash.throw(Thrown::Folder(folder));
        drop(taken);
        self.drop_spare();
        Ok(())
    }

    /// Returns the record of a snapshot.
    pub fn stat(&self, key: &str) -> Result<SnapshotInfo, SnapshotterError> {
        let state = self.state();
        let number = state.number(key)?;
        Ok(state.info(&state.entries[&number].record))
    }

    /// Changes the labels of `fields`, which are written `labels` or `labels.NAME`, or all labels if `fields` is
    /// empty.
    ///
    /// # Errors
    /// On an error, the labels are unchanged.
    pub fn update(
        &self,
        key: &str,
        labels: &Labels,
        fields: &[String],
    ) -> Result<SnapshotInfo, SnapshotterError> {
        check_labels(labels)?;
        {
            let taken = self.take(key, |_| Ok(()))?;
            let mut record = taken.record.clone();
            change_labels(&mut record.labels, labels, fields)?;
            if matches!(record.kind, SnapshotKind::Active(_)) {
                asked_map(key, &record.labels)?;
                asked_size(key, &record.labels)?;
            }
            record.updated = (self.environment.now)();
            self.instance.change(taken.number, &record)?;
            taken.change(|entry| entry.record = record);
        }
        self.stat(key)
    }

    /// Returns all snapshots that match a filter, in the order in which they were made.
    #[must_use]
    pub fn list(&self, filters: &Filters) -> Vec<SnapshotInfo> {
        let state = self.state();
        let infos = state.entries.values().map(|it| state.info(&it.record));
        infos.filter(|it| filters.hold(|field| it.field(field))).collect()
    }

    /// Returns the kind of each snapshot whose root is mounted.
    pub(super) fn mounted_kinds(&self) -> Vec<&'static str> {
        let state = self.state();
        let mounted = state.entries.values().filter(|it| it.root != Root::No);
        mounted.map(|it| kind_name(&it.record.kind)).collect()
    }

    /// Returns the space that a snapshot uses in addition to its parent.
    pub fn usage(&self, key: &str) -> Result<Usage, SnapshotterError> {
        let (number, record) = {
            let state = self.state();
            let number = state.number(key)?;
            (number, state.entries[&number].record.clone())
        };
        match record.kind {
            SnapshotKind::View => Ok(Usage::default()),
            SnapshotKind::Committed(SnapshotContent { bytes, inodes, .. })
            | SnapshotKind::Active(Some(SnapshotContent { bytes, inodes, .. })) => {
                Ok(Usage { bytes, inodes })
            }
            SnapshotKind::Directory(SnapshotSize { bytes, inodes }) => Ok(Usage { bytes, inodes }),
            SnapshotKind::Active(None) => {
                // After a reboot of the host, the filestore must be mounted again.
                if Quota::is_limited(&self.instance, number) {
                    let taken = self.take(key, |_| Ok(()))?;
                    Quota::attach(&self.instance, taken.number)?;
                }
                let upper = self.instance.changes(number).join("upper");
                Ok(usage_of(&upper).map_err(unopened)?)
            }
        }
    }

    /// Waits until the data of removed snapshots is deleted.
    pub fn cleanup(&self) {
        self.trash.empty();
    }

    /// Ends running work. Roots stay mounted for the next service.
    pub fn stop(&self) {
        self.layers.maker.cancel.store(true, Ordering::Relaxed);
        if let Some(lazy) = &self.environment.lazy {
            lazy.images.stop();
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.locks.state()
    }

    /// Waits until a snapshot is free, and locks it.
    pub(super) fn take(
        &self,
        key: &str,
        check: impl Fn(&SnapshotRecord) -> Result<(), SnapshotterError>,
    ) -> Result<Taken<'_>, SnapshotterError> {
        self.locks.take(key, check)
    }

    fn mount_root(&self, number: u64, record: &SnapshotRecord) -> Result<Root, SnapshotterError> {
        // Records do not name the empty image, so `gc` is held off. Other images may be downloads; `gc` must not wait
        // for those.
        let is_nothing = self.state().base_of(record.parent)?.is_none();
        let _hold = is_nothing.then(|| self.store.hold()).transpose()?;
        let below = self.below(record.parent)?;
        self.instance.make_root(number)?;
        let policies = (self.environment.policies)().map_err(SnapshotterError::Policies)?;
        let purpose = match is_unpacked(&record.name) {
            true => Purpose::Unpack,
            false => Purpose::Use,
        };
        let access = match record.kind {
            SnapshotKind::Active(_) => SnapshotAccess::Write,
            _ => SnapshotAccess::Read,
        };
        if access == SnapshotAccess::Write {
            self.quota.set(&self.store, &self.instance, number, record)?;
        }
        let map = map_of(&self.instance, number, record)?;
        let map = map.as_ref();
        let lazy = self.environment.lazy.as_ref().map(|it| &*it.images);
        let lazy = below.lazy.and(lazy);
        let place = RootPlace { instance: &self.instance, number, below: &below, lazy, map };
        self.roots.mount(&self.store, &policies, place, purpose, access)?;
        self.quota.make_room(&self.instance, number);
        Ok(Root::Ours(below.image))
    }

    pub(super) fn empty_image(&self) -> Result<ImageId, SnapshotterError> {
        let now = Seconds((self.environment.now)().seconds);
        self.layers.empty_image(&self.store, now)
    }

    pub(super) fn unmount_root(&self, number: u64) -> Result<(), SnapshotterError> {
        if let Some(root) = roots::detach_later(&self.instance.root(number))? {
            self.trash.throw(Thrown::Root(root));
        }
        let mut state = self.state();
        if let Some(entry) = state.entries.get_mut(&number)
            && let Root::Ours(image) = std::mem::replace(&mut entry.root, Root::No)
        {
            self.roots.release(&self.instance, &image);
        }
        Ok(())
    }

    fn mount_of(&self, number: u64, record: &SnapshotRecord) -> SnapshotMount {
        let is_writable = matches!(record.kind, SnapshotKind::Active(_));
        SnapshotMount { source: self.instance.root(number), is_writable }
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
        Quota::attach(&self.instance, number)?;
        let upper = self.instance.changes(number).join("upper");
        let map = map_of(&self.instance, number, record)?;
        let is_layer = record.content().is_none()
            && (is_unpacked(&record.name)
                // Another root on this snapshot may have another id map.
                || map.is_some()
                // The filestore is only for the changes of this root.
                || Quota::is_limited(&self.instance, number)
                || !self.state().has_room_above(record.parent));
        if let (true, Some(parent)) = (is_layer, record.parent) {
            // Downloaded before the store is locked, so that `gc` does not wait for registries.
            self.bring_layers(parent)?;
        }
        let new = |kind| {
            let now = (self.environment.now)();
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
        let now = Seconds((self.environment.now)().seconds);
        let owners = map.map(Owners::of_map).unwrap_or_default();
        self.layers.maker.ingest(&self.store, &base, upper, &owners, now)
    }

    /// Writes the record that `make` returns with a new layer or image. Until the record names it, `gc` is held off.
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

    /// Returns the snapshot with this root, if a layer can be applied to it.
    pub(super) fn unpacked_at(&self, root: &Path) -> Option<String> {
        let state = self.state();
        state.unpacked(*state.entries.keys().find(|it| self.instance.root(**it) == root)?)
    }

    /// Returns the layer of a blob, if the store has it.
    pub(super) fn known_layer(&self, blob: &Digest) -> Option<Digest> {
        match self.environment.skip {
            SkipLayers::Never => None,
            SkipLayers::Download | SkipLayers::Unpack => {
                self.layers.known(&self.store, blob).filter(|layer| self.is_tar(layer))
            }
        }
    }

    /// Whether the store has read a layer as a tar. The same bytes may also be an EROFS image, with other files.
    fn is_tar(&self, layer: &Digest) -> bool {
        let found = self.store.layers.open(layer).ok().flatten();
        found.is_some_and(|it| !it.info().blobs.iter().any(|blob| is_erofs_layer(&blob.media_type)))
    }

    /// Reads a blob into the store as the layer of an unchanged snapshot.
    pub(super) fn apply(
        &self,
        key: &str,
        claim: &LayerClaim,
        blob: impl Read + Send,
        wanted: &CancelToken,
    ) -> Result<AppliedLayer, SnapshotterError> {
        // The keeper protects the layer from `gc` until a record names it.
        let keeper = self.keeper()?;
        let read = |now| self.layers.read(&keeper, claim, blob, wanted, now);
        let applied = self.apply_with(key, read)?;
        self.applied(&applied).inspect(|it| self.counts.read(it.bytes))
    }

    /// Starts a transaction that keeps imported data from `gc` until it is dropped.
    pub(super) fn keeper(&self) -> Result<Transaction<'_>, SnapshotterError> {
        Ok(self.store.begin().map_err(ImportError::transaction)?)
    }

    /// Applies a layer that the store already has.
    pub(super) fn apply_known(
        &self,
        key: &str,
        layer: &Digest,
    ) -> Result<AppliedLayer, SnapshotterError> {
        self.apply_with(key, |_| Ok(shared(layer)))?;
        self.applied(layer).inspect(|_| self.counts.known())
    }

    fn applied(&self, layer: &Digest) -> Result<AppliedLayer, SnapshotterError> {
        let opened = self.store.layers.open(layer).map_err(SnapshotterError::Layer)?;
        let bytes = opened.map_or(0, |it| it.info().size);
        Ok(AppliedLayer { diff_id: *layer, bytes })
    }

    fn apply_with(
        &self,
        key: &str,
        content: impl FnOnce(Seconds) -> Result<SnapshotContent, SnapshotterError>,
    ) -> Result<Digest, SnapshotterError> {
        let taken = self.take(key, |record| match record.kind {
            SnapshotKind::Active(None) => Ok(()),
            _ => Err(SnapshotterError::NotActive(key.to_owned())),
        })?;
        self.unmount_root(taken.number)?;
        if self.instance.is_changed(taken.number) {
            return Err(SnapshotterError::Written(key.to_owned()));
        }
        let content = content(Seconds((self.environment.now)().seconds))?;
        let layer = content.layer;
        let kind = SnapshotKind::Active(Some(content));
        let new = SnapshotRecord { kind, ..taken.record.clone() };
        self.store.settle_snapshot(&self.instance, taken.number, &new)?;
        taken.change(|entry| entry.record = new);
        Ok(layer)
    }

    /// Reserves a name for a new snapshot, which is locked from then on, and creates its folder.
    pub(super) fn make(
        &self,
        key: &str,
        parent: &str,
        labels: &Labels,
        kind: SnapshotKind,
    ) -> Result<NewSnapshot<'_>, SnapshotterError> {
        check_name(key)?;
        check_labels(labels)?;
        asked_map(key, labels)?;
        asked_size(key, labels)?;
        let now = (self.environment.now)();
        let (number, record) = self.state().add(key, parent, |parent| {
            let (name, labels) = (key.to_owned(), labels.clone());
            SnapshotRecord { name, kind, parent, labels, created: now, updated: now }
        })?;
        let mut new = NewSnapshot {
            locks: &self.locks,
            instance: &self.instance,
            quota: &self.quota,
            trash: &self.trash,
            number,
            record,
            is_made: false,
            is_kept: false,
        };
        self.instance.make(number, &new.record)?;
        new.is_made = true;
        Ok(new)
    }
}

/// How long an earlier service may take to exit.
const ENDING: Duration = Duration::from_secs(3);

/// Opens the snapshots of an instance. Waits for an earlier service that is about to exit.
fn open_snapshots(store: &Store, instance: &str) -> Result<SnapshotInstance, SnapshotError> {
    let begun = Instant::now();
    loop {
        match store.open_snapshots(instance) {
            Err(SnapshotError::InUse(_)) if begun.elapsed() < ENDING => {
                std::thread::sleep(ENDING / 100);
            }
            opened => return opened,
        }
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
    let usage = usage_of(upper).map_err(unopened)?;
    sync(upper).map_err(unopened)?;
    Ok(SnapshotSize { bytes: usage.bytes, inodes: usage.inodes })
}
