//! The snapshots of one engine and the operations on them: containerd's rules, without gRPC.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use image::verity::ImageId;
use kernel::usage::{Usage, usage_of};
use store::{
    Seconds, SnapshotContent, SnapshotError, SnapshotInstance, SnapshotKind, SnapshotRecord,
    SnapshotSize, Store,
};

use super::counts::Counts;
use super::error::SnapshotterError;
use super::grpc::filter::Filters;
use super::labels::{Labels, asked_map, asked_size, change_labels, check_labels, is_unpacked};
use super::layers::from_dir::Resources;
use super::layers::known_blobs::KnownBlobs;
use super::lazy::states::LazyMemory;
use super::roots::{self, Purpose, RootPlace, Roots};
use super::settings::{SnapshotAccess, SnapshotResources};
use super::space::deferred_delete::{Thrown, Trash};
use super::space::headrooms::Headrooms;
use super::state::{Root, SnapshotEntry, SnapshotInfo, State, Work};

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
    pub(super) surroundings: SnapshotResources,
    pub(super) resources: Resources,
    blobs: Mutex<KnownBlobs>,
    pub(super) lazy: LazyMemory,
    roots: Roots,
    /// The empty image.
    nothing: OnceLock<ImageId>,
    state: Mutex<State>,
    /// Signalled when a snapshot is released.
    pub(super) released: Condvar,
    pub(super) trash: Trash,
    pub(super) headrooms: Headrooms,
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
        surroundings: SnapshotResources,
    ) -> Result<Self, SnapshotterError> {
        let instance = open_snapshots(&store, instance)?;
        let (records, damaged) = instance.read()?;
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
        let resources = Resources {
            threads: surroundings.threads,
            scratch: surroundings.scratch.clone(),
            cancel: AtomicBool::new(false),
        };
        let it = Self {
            store,
            instance,
            surroundings,
            resources,
            blobs: Mutex::default(),
            lazy: LazyMemory::default(),
            roots,
            nothing: OnceLock::new(),
            state: Mutex::new(state),
            released: Condvar::new(),
            trash: Trash::new(),
            headrooms: Headrooms::new(),
            counts: Arc::default(),
        };
        it.drop_spare();
        it.forget_names();
        let mounted = |it: &State| -> Vec<u64> {
            it.entries.iter().filter(|it| it.1.root != Root::No).map(|it| *it.0).collect()
        };
        let mounted = mounted(&it.state());
        mounted.into_iter().for_each(|number| it.make_room(number));
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
        let root = match self.is_for_the_differ(record) {
            true => Root::No,
            false => self.mount_root(number, record)?,
        };
        let mount = self.mount_of(number, record);
        new.keep(|entry| entry.root = root);
        Ok(mount)
    }

    /// Returns whether only the differ will use this snapshot. Then the snapshot needs no root, so no image is built
    /// for each intermediate layer. If the engine's own differ is used, the layers below already have images.
    fn is_for_the_differ(&self, record: &SnapshotRecord) -> bool {
        let Some(parent) = record.parent else { return false };
        let state = self.state();
        let below = state.entries.get(&parent).and_then(|it| it.record.content());
        is_unpacked(&record.name) && below.is_some_and(|it| it.image.is_none() || it.lazy.is_some())
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
        self.drop_limit(number)?;
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
            record.updated = (self.surroundings.now)();
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
                if self.is_limited(number) {
                    let taken = self.take(key, |_| Ok(()))?;
                    self.attach_limit(taken.number)?;
                }
                let upper = self.instance.changes(number).join("upper");
                usage_of(&upper).map_err(SnapshotterError::Directory)
            }
        }
    }

    /// Waits until the data of removed snapshots is deleted.
    pub fn cleanup(&self) {
        self.trash.empty();
    }

    /// Ends running work. Roots stay mounted for the next service.
    pub fn stop(&self) {
        self.resources.cancel.store(true, Ordering::Relaxed);
        if let Some(lazy) = &self.surroundings.lazy {
            lazy.images.stop();
        }
    }

    pub(super) fn known_blobs(&self) -> MutexGuard<'_, KnownBlobs> {
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mount_root(&self, number: u64, record: &SnapshotRecord) -> Result<Root, SnapshotterError> {
        // Records do not name the empty image, so `gc` must wait while it is used. Other images may have to be
        // downloaded, and `gc` must not wait for downloads.
        let is_nothing = self.base_of(record.parent)?.is_none();
        let _hold = is_nothing.then(|| self.store.hold()).transpose()?;
        let below = self.below(record.parent)?;
        self.instance.make_root(number)?;
        let policies = (self.surroundings.policies)().map_err(SnapshotterError::Policies)?;
        let purpose = match is_unpacked(&record.name) {
            true => Purpose::Unpack,
            false => Purpose::Use,
        };
        let access = match record.kind {
            SnapshotKind::Active(_) => SnapshotAccess::Write,
            _ => SnapshotAccess::Read,
        };
        if access == SnapshotAccess::Write {
            self.limit(number, record)?;
        }
        let map = self.map_of(number, record)?;
        let map = map.as_ref();
        let lazy = self.surroundings.lazy.as_ref().map(|it| &*it.images);
        let lazy = below.lazy.and(lazy);
        let place = RootPlace { instance: &self.instance, number, below: &below, lazy, map };
        self.roots.mount(&self.store, &policies, place, purpose, access)?;
        self.make_room(number);
        Ok(Root::Ours(below.image))
    }

    pub(super) fn empty_image(&self) -> Result<ImageId, SnapshotterError> {
        // `gc` may have removed the image.
        if let Some(image) = self.nothing.get()
            && self.store.open_image(image).is_ok()
        {
            return Ok(*image);
        }
        let now = Seconds((self.surroundings.now)().seconds);
        let image = self.resources.nothing(&self.store, now)?;
        Ok(*self.nothing.get_or_init(|| image))
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
