//! Imports: everything that one import adds becomes visible at once, or not at all.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, btree_map, hash_map};
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use image::verity::{self, Algorithm, DeviceId, ImageId, ObjectId};
use rustix::io::Errno;

use crate::disk::{Directory, DiskError, NewFile};
use crate::found::FoundLists;
use crate::operation::OperationError;
use crate::shelf::downloads::origins::Origin;
use crate::shelf::is_file_of;
use crate::shelf::item::StoreItem;
use crate::shelf::layers::{StoredLayer, StoredLayerError};
use crate::shelf::lazy_devices::LazyDeviceError;
use crate::shelf::manifests::StoredManifestError;
use crate::shelf::objects::ObjectLookupError;
use crate::shelf::refs::{RefName, Reference};
use crate::staging::{self, Workspace};
use crate::store::Store;
use crate::walk::FilePart;
use image::digest::Digest;

pub use committed::Committed;
use data::DeviceLocation;
use draft::{Draft, DraftError, ImageDraft, Scrap};
use layer::{LayerDraft, LayerPlace};
use lazy::LazyDevice;

mod commit;
mod committed;
mod container;
mod container_replacement;
pub(crate) mod container_snapshot;
mod data;
pub(crate) mod device;
pub(crate) mod draft;
mod forms;
pub(crate) mod kept_index;
pub(crate) mod layer;
mod lazy;
pub(crate) mod lazy_devices;
pub(crate) mod named;
mod sealer;
pub(crate) mod snapshot;
mod unverified_index;
pub(crate) mod volume;

/// An error while an import begins or is committed. Its additions are not visible then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(std::path::PathBuf),
    /// An earlier step failed, and returned an error.
    #[error("the import is incomplete: an earlier step failed")]
    Incomplete,
    /// A ref names an image or a manifest that is neither in the store nor in this import.
    #[error("{name} names {what}, which is not in the store")]
    Dangling {
        name: RefName,
        /// Kind and id of the missing image or manifest.
        what: String,
    },
    /// An item of the store that this import relied on was removed by another program than `gc`.
    #[error("{0} disappeared from the store during the import: import again")]
    Vanished(String),
    /// A ref that should still name an image now names another one.
    #[error("another command gave the name {0} to another image: try again")]
    RefChanged(RefName),
    /// An image of this import needs a device that the import neither made nor found in the store.
    #[error("image {image} needs device {device}, which is not in the store")]
    NoDevice {
        image: Box<ImageId>,
        /// Device id in the image's device table.
        device: String,
    },
    /// A lazy device cannot be created, or exists and cannot be filled.
    #[error("cannot add a lazy device")]
    LazyDevice(#[from] LazyDeviceError),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A running import. It is `Sync`, so several threads may add to one transaction by reference.
///
/// Everything is written to a work directory in `tmp/`, which is locked as long as the transaction exists. Dropping
/// the transaction removes that directory. If the caller wants to end early, or if the process is killed, the next
/// command removes the directory.
#[derive(Debug)]
pub struct Transaction<'s> {
    store: &'s Store,
    work: Workspace,
    /// Lists of the items in the store that the import relies on.
    lists: Arc<FoundLists>,
    /// Lists of outer imports, which protect the items that this import publishes.
    keepers: Vec<Arc<FoundLists>>,
    /// Whether the lists contain the note that the import looks up data in devices.
    looks_into_devices: AtomicBool,
    /// Name of the next file in `work`.
    next: AtomicU64,
    state: Mutex<State>,
    /// Whether new files need a change of mode after their creation.
    modes: AtomicU8,
    /// Whether the file system has fs-verity.
    verity: AtomicU8,
    /// Devices (`st_dev`) of files that cannot share blocks with files of the store.
    unshared: Mutex<HashSet<u64>>,
    failed: AtomicBool,
}

/// Images that came with an index, each with the manifests whose layers possibly do not make the image.
const UNKNOWN: u8 = 0;
const YES: u8 = 1;
const NO: u8 = 2;

#[derive(Debug, Default)]
struct State {
    objects: HashMap<ObjectId, ItemLocation>,
    data: BTreeMap<DeviceId, DeviceLocation>,
    lazy: BTreeMap<DeviceId, LazyDevice>,
    /// Items that need objects: images, layers and manifests.
    users: BTreeMap<StoreItem, ItemLocation>,
    origins: BTreeMap<ImageId, Vec<Origin>>,
    /// Images that came with an index, with the manifests whose layers may not make them.
    unproven: BTreeMap<ImageId, BTreeSet<Digest>>,
    /// Images, each with the manifests whose layers make the image.
    proven: BTreeMap<ImageId, BTreeSet<Digest>>,
    refs: BTreeMap<RefName, Reference>,
    /// Images that refs must have until they are replaced.
    expected: BTreeMap<RefName, ImageId>,
    counts: Committed,
}

/// Location of an item that the import needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemLocation {
    /// A thread is about to write the item.
    Claimed,
    /// In the import's work directory, under this number.
    Here(u64),
    /// Like `Here`. The store has a file of this name with another size, which is damaged and will be replaced.
    Better(u64),
    /// Like `Here`. The store has a sound file of this name with less information, which will be replaced.
    Newer(u64),
    Store,
}

impl Store {
    /// Begins an import, and removes the leftovers of dead imports.
    ///
    /// # Errors
    /// [`TransactionError`] if the store is read-only or the disk is full.
    pub fn begin(&self) -> Result<Transaction<'_>, TransactionError> {
        self.begin_for(Vec::new())
    }

    fn begin_for(
        &self,
        keepers: Vec<Arc<FoundLists>>,
    ) -> Result<Transaction<'_>, TransactionError> {
        if !self.is_writable() {
            return Err(TransactionError::ReadOnly(self.path().to_owned()));
        }
        staging::clear(&self.tmp)?;
        crate::trash::clear(&self.tmp)?;
        // Either `gc` sees that this import runs, or the import sees the state after `gc`.
        let lock = self.lock_shared()?;
        let work = Workspace::make(&self.tmp)?;
        let work = work.leaving(self.tmp.room()?).left_when(&self.give_up);
        let lists = Arc::new(FoundLists::make(&work.directory)?);
        drop(lock);
        Ok(Transaction {
            store: self,
            work,
            lists,
            keepers,
            looks_into_devices: AtomicBool::new(false),
            next: AtomicU64::new(0),
            state: Mutex::default(),
            modes: AtomicU8::new(UNKNOWN),
            verity: AtomicU8::new(UNKNOWN),
            unshared: Mutex::default(),
            failed: AtomicBool::new(false),
        })
    }
}

impl<'s> Transaction<'s> {
    /// Returns the store that the import adds to.
    #[must_use]
    pub const fn store(&self) -> &'s Store {
        self.store
    }

    /// Begins another import into the same store. The items that it publishes are protected from `gc` until this
    /// import ends.
    ///
    /// # Errors
    /// As [`Store::begin`].
    pub fn begin_inner(&self) -> Result<Self, TransactionError> {
        let keepers = self.keepers.iter().chain([&self.lists]);
        self.store.begin_for(keepers.map(Arc::clone).collect())
    }

    /// Adds an object whose bytes are all in memory. This is the fast path: for an existing object, it costs a hash
    /// and at most one system call.
    ///
    /// # Errors
    /// [`DraftError`] if the object cannot be written. The transaction cannot be committed then.
    pub fn object(&self, bytes: &[u8]) -> Result<ObjectId, DraftError> {
        let id = verity::digest(self.store.algorithm(), bytes).into();
        self.object_with_id(&id, bytes)?;
        Ok(id)
    }

    /// Like [`object`](Self::object), for callers that have already hashed the bytes, for example on another thread.
    /// The id is trusted: `fsck` reports a wrong one as damage.
    ///
    /// # Errors
    /// As [`object`](Self::object).
    pub fn object_with_id(&self, id: &ObjectId, bytes: &[u8]) -> Result<(), DraftError> {
        let size = bytes.len() as u64;
        if self.claim(id, size) {
            let found = self.place_object(id, bytes)?;
            self.enter_object(id, found, size);
        }
        Ok(())
    }

    /// Returns whether the caller is the first one to add this object, and so must write it. Later callers need not
    /// wait for the write, because the transaction cannot be committed if the write fails.
    fn claim(&self, id: &ObjectId, size: u64) -> bool {
        let mut state = self.state();
        let State { objects, counts, .. } = &mut *state;
        match objects.entry(*id) {
            hash_map::Entry::Occupied(_) => {
                counts.reuse(size);
                false
            }
            hash_map::Entry::Vacant(entry) => {
                entry.insert(ItemLocation::Claimed);
                true
            }
        }
    }

    fn place_object(&self, id: &ObjectId, bytes: &[u8]) -> Result<ItemLocation, DraftError> {
        let before = self.look_up(id, bytes.len() as u64)?;
        if before == Some(true) {
            return Ok(ItemLocation::Store);
        }
        let number = self
            .new_file()
            .and_then(|(number, mut file)| file.write_all(bytes).map(|()| number))
            .map_err(|source| self.write_failed("an object", source))?;
        self.seal(number, "an object")?;
        Ok(if before.is_none() { ItemLocation::Here(number) } else { ItemLocation::Better(number) })
    }

    /// Whether the store has the object with this size; `None` if no file has its name.
    fn look_up(&self, id: &ObjectId, size: u64) -> Result<Option<bool>, DraftError> {
        let failed = |source: ObjectLookupError| {
            self.fail();
            OperationError::of("look for", format_args!("{} in the store", id.digest()))(source)
        };
        self.store.objects.check_algorithm(id).map_err(failed)?;
        // The object is listed before the lookup, so either `gc` sees the list, or this lookup sees the changes of
        // `gc`.
        self.lists.add_objects([id]).map_err(|error| failed(error.into()))?;
        let shard = self.store.objects.shard(id).map_err(|error| failed(error.into()))?;
        let Some(shard) = shard else { return Ok(None) };
        let (_, rest) = crate::shelf::objects::split(id);
        let stat = shard.stat(rest).map_err(|error| failed(error.into()))?;
        Ok(stat.map(|stat| is_file_of(&stat, size)))
    }

    fn enter_object(&self, id: &ObjectId, found: ItemLocation, size: u64) {
        let mut state = self.state();
        state.objects.insert(*id, found);
        match found {
            ItemLocation::Store => state.counts.reuse(size),
            _ => state.counts.add(size),
        }
    }

    /// Begins an object whose bytes are added in parts. Up to 256 KiB are kept in memory; longer objects are written
    /// to a file.
    ///
    /// # Errors
    /// Currently none. The first write that goes to a file may fail.
    pub fn draft(&self) -> Result<Draft<'_>, DraftError> {
        Ok(Draft::new(self))
    }

    /// Adds a file of `size` bytes by sharing its blocks (XFS, btrfs), so that it takes no disk space. `go_on` is
    /// called repeatedly while the bytes are hashed. Returns `None` if the file systems do not support this; then
    /// [copy](Self::draft) the file.
    ///
    /// # Errors
    /// Errors of reading or of the disk, and errors of `go_on`; [`io::ErrorKind::UnexpectedEof`] if the file has
    /// another size.
    pub fn share(
        &self,
        file: &File,
        size: u64,
        mut go_on: impl FnMut() -> io::Result<()>,
    ) -> io::Result<Option<ObjectId>> {
        let what = "an object";
        let failed = |source| self.io_failed(what, source);
        let device = rustix::fs::fstat(file)?.st_dev;
        if self.unshared.lock().unwrap_or_else(PoisonError::into_inner).contains(&device) {
            return Ok(None);
        }
        let (scrap, mut new) = Scrap::new(self).map_err(failed)?;
        let Some(length) = new.share_blocks_of(file).map_err(failed)? else {
            self.unshared.lock().unwrap_or_else(PoisonError::into_inner).insert(device);
            return Ok(None);
        };
        if length != size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // The file may change during the hashing, but not its copy.
        let name = scrap.number().to_string();
        let Some((copy, _)) = self.work.directory.read(&name).map_err(failed)? else {
            return Err(failed(self.work.directory.failed("open", &name, Errno::NOENT)));
        };
        let mut hasher = verity::Hasher::new(self.store.algorithm());
        crate::walk::parts(&copy, size, &mut Vec::new(), |part| {
            go_on()?;
            match part {
                FilePart::Data(bytes) => hasher.update(bytes),
                FilePart::Hole(count) => hasher.zeros(count),
            }
            Ok(())
        })?;
        drop(copy);
        let object = self.finish_object(scrap.keep(), new, hasher.finish().into(), size);
        object.map(Some).map_err(io::Error::other)
    }

    pub(crate) fn finish_object(
        &self,
        number: u64,
        file: NewFile,
        id: ObjectId,
        size: u64,
    ) -> Result<ObjectId, DraftError> {
        drop(file);
        if !self.claim(&id, size) {
            self.discard(number);
            return Ok(id);
        }
        let found = match self.look_up(&id, size)? {
            Some(true) => ItemLocation::Store,
            Some(false) => ItemLocation::Better(number),
            None => ItemLocation::Here(number),
        };
        match found {
            ItemLocation::Store => self.discard(number),
            _ => self.seal(number, "an object")?,
        }
        self.enter_object(&id, found, size);
        Ok(id)
    }

    /// Whether the store, or this import so far, has the object with this size. If so, the object is protected from
    /// `gc` until the import ends, and counted as reused. If the store has the object with another size, the object is
    /// damaged: add it again, so that the commit replaces it.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse(&self, id: &ObjectId, size: u64) -> Result<bool, DraftError> {
        let known = self.state().objects.contains_key(id);
        if !known && self.look_up(id, size)? != Some(true) {
            return Ok(false);
        }
        let mut state = self.state();
        state.objects.entry(*id).or_insert(ItemLocation::Store);
        state.counts.reuse(size);
        Ok(true)
    }

    /// Begins an image. Its bytes are written in order, as `image::erofs::write` produces them.
    ///
    /// # Errors
    /// [`DraftError`] if its file cannot be created.
    pub fn image(&self) -> Result<ImageDraft<'_>, DraftError> {
        ImageDraft::new(self).map_err(|source| self.write_failed("an image", source))
    }

    pub(crate) fn finish_image(
        &self,
        number: u64,
        file: NewFile,
        id: ImageId,
        size: u64,
    ) -> Result<ImageId, DraftError> {
        drop(file);
        let failed = |source| self.write_failed("an image", source);
        self.list(&StoreItem::Image(id)).map_err(failed)?;
        let there = self.store.images.directory.stat(id.to_string());
        let there = there.map_err(failed)?;
        let found = match there {
            _ if self.state().users.contains_key(&StoreItem::Image(id)) => None,
            Some(stat) if is_file_of(&stat, size) => Some(ItemLocation::Store),
            Some(_) => Some(ItemLocation::Better(number)),
            None => Some(ItemLocation::Here(number)),
        };
        match found {
            None | Some(ItemLocation::Store) => self.discard(number),
            Some(_) => self.seal(number, "an image")?,
        }
        if let Some(found) = found {
            self.state().users.insert(StoreItem::Image(id), found);
        }
        Ok(id)
    }

    /// Whether the store has this image. If so, the image is protected from `gc` until the import ends.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_image(&self, id: &ImageId) -> Result<bool, DraftError> {
        let failed = |source| self.write_failed("an image", source);
        self.list(&StoreItem::Image(*id)).map_err(failed)?;
        let there = self.store.images.directory.stat(id.to_string());
        let there = there.map_err(failed)?;
        let there = there.is_some_and(|stat| is_file_of(&stat, crate::disk::length(&stat)));
        if there {
            self.state().users.entry(StoreItem::Image(*id)).or_insert(ItemLocation::Store);
        }
        Ok(there)
    }

    /// Returns the layer with this diff id if the store has it with all of its objects, so that it need not be
    /// unpacked again. The layer and its objects are protected from `gc` until the import ends. A damaged layer
    /// counts as missing, because the import replaces it.
    ///
    /// # Errors
    /// [`StoredLayerError`] if the lookup fails.
    pub fn reuse_layer(&self, diff_id: &Digest) -> Result<Option<StoredLayer>, StoredLayerError> {
        self.list(&StoreItem::Layer(*diff_id)).map_err(StoredLayerError::Disk)?;
        let layer = match self.store.layers.open(diff_id) {
            Err(StoredLayerError::Disk(error)) if !error.is_not_a_file() => {
                return Err(error.into());
            }
            Err(error) => {
                tracing::warn!(%diff_id, %error, "replacing a damaged layer");
                return Ok(None);
            }
            Ok(None) => return Ok(None),
            Ok(Some(layer)) => layer,
        };
        let (mut present, mut devices) = (Vec::new(), BTreeSet::new());
        // The layer's objects may be in files or devices, and an image of this import may need them as files.
        self.lists.add_objects(&layer.info().objects).map_err(StoredLayerError::Disk)?;
        for id in &layer.info().objects {
            if self.state().objects.contains_key(id) {
                continue;
            }
            let (_, rest) = crate::shelf::objects::split(id);
            let stat = match self.store.objects.shard(id).map_err(StoredLayerError::Disk)? {
                Some(shard) => shard.stat(rest).map_err(StoredLayerError::Disk)?,
                None => None,
            };
            // The recipe states the size, and its reader compares it.
            match stat {
                Some(stat) if is_file_of(&stat, crate::disk::length(&stat)) => present.push(*id),
                _ => match self.data_of(id).map_err(StoredLayerError::Disk)? {
                    Some(stored) => devices.extend(stored.devices().map(|it| it.id)),
                    None => return Ok(None),
                },
            }
        }
        let mut state = self.state();
        for device in devices {
            state.data.entry(device).or_insert(DeviceLocation::Store);
        }
        for id in present {
            state.objects.entry(id).or_insert(ItemLocation::Store);
        }
        state.users.entry(StoreItem::Layer(*diff_id)).or_insert(ItemLocation::Store);
        Ok(Some(layer))
    }

    /// Begins a layer. The draft accepts the bytes of the recipe, and compresses them.
    ///
    /// # Errors
    /// [`StoredLayerError`] if its file cannot be created.
    pub fn layer(&self) -> Result<LayerDraft<'_>, StoredLayerError> {
        LayerDraft::new(self)
    }

    /// Notes that the store has the layer, and that this import has no new information about it.
    pub(crate) fn keep_layer(&self, diff_id: &Digest) {
        self.state().users.entry(StoreItem::Layer(*diff_id)).or_insert(ItemLocation::Store);
    }

    pub(crate) fn finish_layer(&self, number: u64, diff_id: &Digest, place: LayerPlace) {
        let found = match place {
            LayerPlace::Free => ItemLocation::Here(number),
            LayerPlace::Damaged => ItemLocation::Better(number),
            LayerPlace::Newer => ItemLocation::Newer(number),
        };
        let is_first = match self.state().users.entry(StoreItem::Layer(*diff_id)) {
            btree_map::Entry::Vacant(entry) => {
                entry.insert(found);
                true
            }
            btree_map::Entry::Occupied(mut entry) if *entry.get() == ItemLocation::Store => {
                entry.insert(found);
                true
            }
            // The import added the same layer twice, and needs only one file.
            btree_map::Entry::Occupied(_) => false,
        };
        if !is_first {
            self.discard(number);
        }
    }

    /// Adds a manifest, config or index, after its bytes were compared with `digest`.
    ///
    /// # Errors
    /// [`StoredManifestError`] if the bytes have another digest or cannot be written.
    pub fn manifest(&self, digest: &Digest, bytes: &[u8]) -> Result<(), StoredManifestError> {
        crate::shelf::manifests::check(digest, bytes)?;
        let write = || -> Result<(), DiskError> {
            if self.state().users.contains_key(&StoreItem::Manifest(*digest)) {
                return Ok(());
            }
            self.list(&StoreItem::Manifest(*digest))?;
            let there = self.store.manifests.directory.stat(digest.file_name())?;
            let found = match there {
                Some(stat) if is_file_of(&stat, bytes.len() as u64) => ItemLocation::Store,
                there => {
                    let (number, mut file) = self.new_file()?;
                    file.write_all(bytes)?;
                    if there.is_some() {
                        ItemLocation::Better(number)
                    } else {
                        ItemLocation::Here(number)
                    }
                }
            };
            self.state().users.insert(StoreItem::Manifest(*digest), found);
            Ok(())
        };
        write().map_err(|source| {
            self.fail();
            StoredManifestError::Disk(source)
        })
    }

    /// Sets the ref `name` to `reference` at the commit, and replaces an earlier one. The commit checks that the
    /// image and the manifest are in the store or in this import.
    pub fn set_ref(&self, name: RefName, reference: Reference) {
        self.state().refs.insert(name, reference);
    }

    /// Adds an origin to an image of this import or of the store.
    pub fn add_origin(&self, image: ImageId, origin: Origin) {
        self.state().origins.entry(image).or_default().push(origin);
    }

    /// Makes the commit fail with [`TransactionError::RefChanged`] if this ref names another image at that time.
    pub fn expect_ref(&self, name: RefName, image: ImageId) {
        self.state().expected.insert(name, image);
    }

    /// Protects an image, a layer or a manifest from `gc`. Callers must do this before they check whether the item
    /// exists.
    pub(crate) fn list(&self, item: &StoreItem) -> Result<(), DiskError> {
        let _lock = self.store.lock_shared()?;
        self.lists.add(item)
    }

    /// Removes the lists, as if they could not be read.
    #[cfg(test)]
    pub(crate) fn forget_lists(&self) {
        for list in crate::found::LISTS {
            self.work.directory.unlink(list).unwrap();
        }
    }

    /// Protects all devices from `gc`. Callers must do this before they look up data in a device.
    pub(crate) fn look_into_devices(&self) -> Result<(), DiskError> {
        if self.looks_into_devices.load(Ordering::Acquire) {
            return Ok(());
        }
        let lock = self.store.lock_shared()?;
        self.lists.add_devices()?;
        drop(lock);
        // From now on `gc` removes no objects from devices.
        self.store.devices.forget_indexes();
        self.looks_into_devices.store(true, Ordering::Release);
        Ok(())
    }

    /// Creates a new file in the work directory, named by a number.
    pub(crate) fn new_file(&self) -> Result<(u64, NewFile), DiskError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let file = self.work.directory.create(number.to_string())?;
        // The umask and default ACLs are the same for all files in this directory, so only the first file is checked.
        if self.modes.load(Ordering::Relaxed) != NO {
            let changed = file.publish_mode()?;
            self.modes.store(if changed { YES } else { NO }, Ordering::Relaxed);
        }
        Ok((number, file))
    }

    /// Enables fs-verity for a file that is completely written.
    fn seal(&self, number: u64, what: &'static str) -> Result<(), DraftError> {
        self.seal_in(&self.work.directory, &number.to_string(), what)
    }

    /// As [`seal`](Self::seal), for a file in another directory.
    fn seal_in(
        &self,
        directory: &Directory,
        name: &str,
        what: &'static str,
    ) -> Result<(), DraftError> {
        // Enabling fs-verity syncs the file.
        if self.verity.load(Ordering::Relaxed) == NO || self.store.is_deferring() {
            return Ok(());
        }
        let opened = directory
            .read(name)
            .and_then(|it| it.ok_or_else(|| directory.failed("open", name, Errno::NOENT)));
        let (file, _) = opened.map_err(|source| self.write_failed(what, source))?;
        let algorithm = match self.store.algorithm() {
            Algorithm::Sha256 => kernel::verity::Algorithm::Sha256,
            Algorithm::Sha512 => kernel::verity::Algorithm::Sha512,
        };
        match kernel::verity::enable(file.as_fd(), algorithm) {
            Ok(_) => self.verity.store(YES, Ordering::Relaxed),
            Err(error) if error.is_unsupported() => self.verity.store(NO, Ordering::Relaxed),
            Err(source) => {
                self.fail();
                return Err(OperationError::of("seal", what)(source).into());
            }
        }
        Ok(())
    }

    /// Removes a file that the import does not need. If that fails, the end of the import removes it.
    pub(crate) fn discard(&self, number: u64) {
        if let Err(error) = self.work.directory.unlink(number.to_string()) {
            tracing::debug!(%error, "cannot remove a file that the import no longer needs: its end removes the file");
        }
    }

    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn write_failed(&self, what: &'static str, source: DiskError) -> DraftError {
        self.fail();
        OperationError::of("add", format_args!("{what} to the store"))(source).into()
    }

    pub(crate) fn io_failed(&self, what: &'static str, source: DiskError) -> io::Error {
        let kind = source.source.kind();
        io::Error::new(kind, self.write_failed(what, source))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
