//! Opens, creates and locks a store.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use image::verity::Algorithm;
use kernel::process::Who;
use rustix::fs::{Access as Permission, AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::disk::{Directory, DiskError, Renamed, Trace};
use crate::give_up::GiveUp;
use crate::meta::{BOOT, META, Meta, SHARED_MARK, Sealing, UNSYNCED};
use crate::operation::OperationError;
use crate::record::RECORD_MAX;
use crate::shelf::absent::{self, ABSENT};
use crate::shelf::container_snapshots::{CONTAINER_SNAPSHOTS, ContainerSnapshotShelf};
use crate::shelf::containers::ContainerShelf;
use crate::shelf::devices::{DATA, DeviceShelf};
use crate::shelf::downloads::DownloadShelf;
use crate::shelf::images::ImageShelf;
use crate::shelf::item::StoreItem;
use crate::shelf::layers::LayerShelf;
use crate::shelf::lazy_devices::{LAZY, LazyDeviceShelf};
use crate::shelf::manifests::ManifestShelf;
use crate::shelf::networks::{NETWORKS, NetworkLock, NetworkRecordError, NetworkShelf};
use crate::shelf::objects::{ObjectShelf, split};
use crate::shelf::refs::RefShelf;
use crate::shelf::snapshots::{SNAPSHOTS, SnapshotShelf};
use crate::shelf::volumes::{VOLUMES, VolumeShelf};
use crate::staging::{Tmp, Workspace};

/// Whether to create a store if the directory has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Create {
    /// Fails with [`StoreError::Absent`].
    Never,
    /// Creates a store with this fs-verity algorithm, and missing parents of the directory. Fails if the directory
    /// contains files that are not part of a store.
    IfAbsent(Algorithm),
}

/// The users who may read a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// The owner and root.
    Owner,
    /// All users of the host. They can read images, image names and the contents of all files, regardless of the
    /// files' modes in the images.
    All,
}

/// Access mode of an open store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Allows reading and mounting. Works on a read-only file system.
    Read,
    /// Also allows imports, tags and removals.
    Write,
}

/// Options of [`Store::open`].
#[derive(Debug, Clone, Copy)]
pub struct OpenOptions {
    /// Whether to create a missing store.
    pub create: Create,
    pub access: Access,
    /// Protection of new objects and images. With `None`, the setting in `meta` applies.
    pub sealing: Option<Sealing>,
}

impl OpenOptions {
    /// Options to open an existing store for reading and mounting.
    #[must_use]
    pub const fn read() -> Self {
        Self { create: Create::Never, access: Access::Read, sealing: None }
    }

    /// Options to open an existing store for changes.
    #[must_use]
    pub const fn write() -> Self {
        Self { create: Create::Never, access: Access::Write, sealing: None }
    }

    /// Options that open a store for changes. If there is none, it is created, with SHA-256.
    #[must_use]
    pub const fn create() -> Self {
        Self { create: Create::IfAbsent(Algorithm::Sha256), access: Access::Write, sealing: None }
    }
}

/// An error while opening a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory has no store.
    #[error("there is no store in {}", .0.display())]
    Absent(PathBuf),
    /// The directory contains files that are not part of a store.
    #[error(
        "{} is not a store: it has \"{}\" but no file \"meta\"",
        .directory.display(), .found.escape_debug()
    )]
    Foreign {
        directory: PathBuf,
        /// Name of such a file.
        found: String,
    },
    /// The directory for a new store, or an entry in it, belongs to another user.
    #[error(
        "cannot make a store in {}: it belongs to user {user}, who could change the store. Use a \
        directory that belongs to you, or one that does not exist yet",
        .path.display()
    )]
    NotYours {
        /// The directory or the entry.
        path: PathBuf,
        /// User id of its owner.
        user: u32,
    },
    /// One of the store's directories is missing.
    #[error(
        "the store {} is damaged: its directory \"{name}\" is missing. `mkdir {}` makes the store \
        usable again; then `quire fsck` shows the lost data",
        .directory.display(), .directory.join(.name).display()
    )]
    Incomplete { directory: PathBuf, name: &'static str },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The store has features that this version does not know, and that a program must know to change the store.
    #[error(
        "the store {} is usable only for reading: it has features that this version of Quire does \
        not support: {}",
        .directory.display(), .features.join(", ")
    )]
    Newer {
        directory: PathBuf,
        /// Names of the features, as in `meta`.
        features: Vec<String>,
    },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// An open store. It is `Send + Sync`, so threads share it by reference.
#[derive(Debug)]
pub struct Store {
    pub(crate) root: Arc<Directory>,
    pub(crate) tmp: Arc<Tmp>,
    /// Objects stored as files.
    pub(crate) objects: ObjectShelf,
    /// EROFS images.
    pub images: ImageShelf,
    /// Recipes of layers.
    pub layers: LayerShelf,
    /// Manifests, configs and indexes.
    pub manifests: ManifestShelf,
    /// Names of images.
    pub refs: RefShelf,
    /// Complete devices.
    pub devices: DeviceShelf,
    /// Devices that are filled on demand.
    pub lazy_devices: LazyDeviceShelf,
    /// Data of pulls: partial blobs, chunks, origins, traces and marks.
    pub downloads: DownloadShelf,
    /// Directories of containers.
    pub containers: ContainerShelf,
    /// Snapshots of containers' roots.
    pub container_snapshots: ContainerSnapshotShelf,
    /// Snapshots of container engines.
    pub snapshots: SnapshotShelf,
    /// Volumes of containers.
    pub volumes: VolumeShelf,
    /// Networks of containers.
    pub networks: NetworkShelf,
    meta: Meta,
    access: Access,
    pub(crate) who: Who,
    /// User id of the store's owner, as this process sees it, if the store was opened as a shared one: root, this
    /// user, or the overflow uid for a root of the host that this user namespace does not map.
    pub(crate) sharer: Option<u32>,
    pub(crate) sealing: Sealing,
    /// Whether the marks of files that are not synced are from this boot.
    pub(crate) is_recovered: bool,
    pub(crate) give_up: Arc<GiveUp>,
}

/// Pause between two attempts to take a lock. `gc` releases the lock for only a few milliseconds at a time.
pub(crate) const LOCK_POLL: Duration = Duration::from_millis(2);

/// Directories that every store has.
const DIRECTORIES: [&str; 8] =
    ["blobs", "containers", "images", "layers", "manifests", "objects", "refs", "tmp"];
pub(crate) const GC_LOCK: &str = "gc.lock";
/// Mode 0700, because objects may be files that only root can read in their image.
pub(crate) const PRIVATE: Mode = Mode::RWXU;
pub(crate) const SHARED: Mode = Mode::from_raw_mode(0o755);
/// Entries that are private even if the store's directory is not. A user who can open a file can also lock it, and
/// such a lock would block every import.
const LOCKED: [(&str, Mode); 9] = [
    (GC_LOCK, Mode::from_raw_mode(0o600)),
    ("refs", PRIVATE),
    ("tmp", PRIVATE),
    (DATA, PRIVATE),
    (LAZY, PRIVATE),
    (CONTAINER_SNAPSHOTS, PRIVATE),
    (SNAPSHOTS, PRIVATE),
    (VOLUMES, PRIVATE),
    (NETWORKS, PRIVATE),
];
/// Entries of [`LOCKED`] that other users may read in a shared store. Commands do not lock these entries.
pub(crate) const READ_BY_ALL: [&str; 2] = ["refs", DATA];

/// Directories that stay private in a shared store. They contain no data of images.
pub(crate) const OWN: [&str; 2] = ["containers", "tmp"];

/// Returns the mode of an entry in the store's own directory.
pub(crate) fn mode_of(name: &str, sharing: Sharing) -> Mode {
    if sharing == Sharing::All && READ_BY_ALL.contains(&name) {
        return SHARED;
    }
    LOCKED.iter().find(|it| it.0 == name).map_or(SHARED, |it| it.1)
}

/// Directory that `mkfs.ext4` creates in the root of a file system, which may be a store. Source: mklost+found(8).
pub(crate) const LOST_AND_FOUND: &str = "lost+found";

/// Whether an entry of this name in the store's own directory is part of the store.
pub(crate) fn belongs(name: &str) -> bool {
    [META, GC_LOCK, SHARED_MARK, ABSENT, BOOT, UNSYNCED].contains(&name)
        || [DATA, LAZY, CONTAINER_SNAPSHOTS, SNAPSHOTS, VOLUMES, NETWORKS].contains(&name)
        || DIRECTORIES.contains(&name)
}

impl Store {
    /// Opens the store in `directory` as the user `who`.
    ///
    /// # Errors
    /// [`StoreError`] if the store is absent, damaged, of another version, or not accessible, or if the directory is
    /// not a store.
    pub fn open(directory: &Path, who: Who, options: OpenOptions) -> Result<Self, StoreError> {
        Self::open_traced(directory, who, options, Trace::default())
    }

    pub(crate) fn open_traced(
        directory: &Path,
        who: Who,
        options: OpenOptions,
        trace: Trace,
    ) -> Result<Self, StoreError> {
        let root = match Directory::open_root(directory, trace.clone()) {
            Ok(root) => root,
            Err(error) if error.is(Errno::NOENT) => match options.create {
                Create::Never => return Err(StoreError::Absent(directory.to_owned())),
                Create::IfAbsent(_) => make_root(directory, trace)?,
            },
            Err(error) => return Err(error.into()),
        };
        let meta = match (root.read_all(META, RECORD_MAX)?, options.create) {
            (Some(meta), _) => meta,
            (None, Create::Never) => return Err(absent_or_foreign(&root)?),
            (None, Create::IfAbsent(algorithm)) => {
                take(&root, who.user)?;
                create(&root, &Meta::new(algorithm, options.sealing.unwrap_or_default()))?;
                let gone = || root.failed("read", META, Errno::NOENT);
                root.read_all(META, RECORD_MAX)?.ok_or_else(gone)?
            }
        };
        let root = Arc::new(root);
        let meta = Meta::decode(&meta).map_err(OperationError::at("open the store", directory))?;
        let part = |name| match root.open_if_there(name) {
            Ok(Some(part)) => Ok(part),
            Ok(None) => Err(StoreError::Incomplete { directory: directory.to_owned(), name }),
            Err(error) if error.is(Errno::ACCESS) && options.access == Access::Read => {
                match OWN.contains(&name) && root.stat(SHARED_MARK)?.is_some() {
                    true => Ok(root.open_place(name)?),
                    false => Err(error.into()),
                }
            }
            Err(error) => Err(error.into()),
        };
        let blobs = part("blobs")?;
        let tmp = Arc::new(Tmp::new(part("tmp")?));
        let algorithm = meta.algorithm;
        let mut store = Self {
            objects: ObjectShelf::new(part("objects")?, algorithm),
            images: ImageShelf { directory: part("images")?, algorithm, may_be_torn: false },
            layers: LayerShelf { directory: part("layers")?, algorithm },
            manifests: ManifestShelf { directory: part("manifests")? },
            refs: RefShelf { directory: part("refs")? },
            devices: DeviceShelf::new(&root, &tmp),
            lazy_devices: LazyDeviceShelf::new(&root, &tmp),
            container_snapshots: ContainerSnapshotShelf::new(&root, &tmp),
            snapshots: SnapshotShelf::new(&root, &tmp),
            volumes: VolumeShelf::new(&root, &tmp),
            networks: NetworkShelf::new(&root, &tmp),
            downloads: DownloadShelf { directory: blobs, tmp: Arc::clone(&tmp), algorithm },
            containers: ContainerShelf { directory: part("containers")?, tmp: Arc::clone(&tmp) },
            tmp,
            root,
            sealing: options.sealing.unwrap_or(meta.sealing),
            meta,
            access: options.access,
            who,
            sharer: None,
            is_recovered: false,
            give_up: Arc::default(),
        };
        if options.access == Access::Write {
            check_writable(&store.root, &store.meta)?;
            close_locks(&store.root, who.user, store.sharing()?)?;
        }
        store.recover()?;
        Ok(store)
    }

    /// Makes waits for the store's lock fail as soon as `enough` returns `true`. `gc` holds that lock while it works.
    /// `enough` is called some hundred times a second, and only during a wait or at the end of a transaction. Callers
    /// that block signals need this, because signals cannot interrupt their waits. Only the first call has an effect.
    ///
    /// Once `enough` returns `true`, a transaction that ends without its commit leaves its files to
    /// [`clear_work`](Self::clear_work), because the kernel may take seconds to remove them.
    pub fn give_up_when(&self, enough: impl Fn() -> bool + Send + Sync + 'static) {
        self.give_up.set(enough);
    }

    /// The store's directory, as the caller passed it.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The user that opened the store.
    #[must_use]
    pub const fn who(&self) -> Who {
        self.who
    }

    /// Contents of the file `meta`.
    #[must_use]
    pub const fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Hash that names this store's objects and images.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.meta.algorithm
    }

    /// Whether the store was opened with [`Access::Write`].
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.access == Access::Write
    }

    /// Takes the lock under which networks are made and removed. Makes the directory of all networks if it does not
    /// exist.
    ///
    /// # Errors
    /// [`NetworkRecordError`] if the store is read-only, or an error of the disk.
    pub fn lock_networks(&self) -> Result<NetworkLock, NetworkRecordError> {
        if !self.is_writable() {
            return Err(NetworkRecordError::ReadOnly(self.path().to_owned()));
        }
        if self.networks.directory.get()?.is_none() {
            self.root.make(NETWORKS, mode_of(NETWORKS, self.sharing()?))?;
            self.root.sync()?;
        }
        Ok(self.networks.lock()?)
    }

    /// Opens the directory that contains an item.
    pub(crate) fn place(&self, item: &StoreItem) -> Result<Directory, DiskError> {
        match item {
            StoreItem::Object(id) => self.objects.directory.open(split(id).0),
            StoreItem::Image(_) => self.images.directory.try_clone(),
            StoreItem::Layer(_) => self.layers.directory.try_clone(),
            StoreItem::Manifest(_) => self.manifests.directory.try_clone(),
            StoreItem::Blob(_) => self.downloads.directory.try_clone(),
            StoreItem::Device(_) | StoreItem::DeviceIndex(_) => {
                self.devices.directory.existing()?.try_clone()
            }
            StoreItem::LazyDevice(_) => self.lazy_devices.directory.existing()?.try_clone(),
            StoreItem::Ref(_) => self.refs.directory.try_clone(),
            StoreItem::Container(_) => self.containers.directory.try_clone(),
            StoreItem::ContainerSnapshot(_) => {
                self.container_snapshots.directory.existing()?.try_clone()
            }
            StoreItem::Volume(_) => self.volumes.directory.existing()?.try_clone(),
            StoreItem::Network(_) => self.networks.directory.existing()?.try_clone(),
            StoreItem::Snapshot(instance, _) => self.snapshots.directory.existing()?.open(instance),
            StoreItem::Leftover(_) => self.tmp.try_clone(),
        }
    }

    /// Takes the lock for publishing or opening files: `gc` neither decides nor deletes while it is held. Returns
    /// `None` if a reader proceeds without a lock.
    pub(crate) fn lock_shared(&self) -> Result<Option<Lock>, DiskError> {
        self.lock(FlockOperation::LockShared, FlockOperation::NonBlockingLockShared)
    }

    /// Takes the lock that `gc` holds while it confirms its decision.
    pub(crate) fn lock_exclusive(&self) -> Result<Option<Lock>, DiskError> {
        // The lock of readers is taken first, so that the owner's commands do not wait for readers. Readers take no
        // other lock.
        let readers = self.wait_for_readers()?;
        let lock =
            self.lock(FlockOperation::LockExclusive, FlockOperation::NonBlockingLockExclusive)?;
        Ok(lock.map(|it| Lock { _readers: readers, ..it }))
    }

    /// Takes the lock that `gc` holds for moments while it deletes. Readers of a shared store may open images at the
    /// same time, because the files that these images need are either kept or already removed.
    pub(crate) fn lock_to_sweep(&self) -> Result<Option<Lock>, DiskError> {
        self.lock(FlockOperation::LockExclusive, FlockOperation::NonBlockingLockExclusive)
    }

    /// Locks `tmp/`, so that no other process replaces a ref, a record of origins, a mark or `meta` between its lookup and
    /// its rename. The lock is released when the directory is dropped.
    pub(crate) fn lock_records(&self) -> Result<Directory, DiskError> {
        // The lock needs a separate descriptor, because flock belongs to the open file description. The directories of
        // the records are not locked, because other users can open them in a shared store, and could lock them.
        let alone = self.root.open("tmp")?;
        alone.lock()?;
        Ok(alone)
    }

    fn lock(
        &self,
        waiting: FlockOperation,
        trying: FlockOperation,
    ) -> Result<Option<Lock>, DiskError> {
        // Each holder needs a separate descriptor, because flock belongs to the open file description.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = match rustix::fs::openat(&self.root, GC_LOCK, flags, Mode::empty()) {
            Ok(fd) => fd,
            // `gc` needs this file, so it cannot run on this store.
            Err(Errno::NOENT) if self.access == Access::Read => return Ok(None),
            // The lock file is private, and its owner shares the store with this user.
            Err(Errno::ACCESS) if self.access == Access::Read => return self.lock_as_reader(),
            Err(errno) => return Err(self.root.failed("open", GC_LOCK, errno)),
        };
        let how = if self.give_up.is_possible() { trying } else { waiting };
        loop {
            match rustix::fs::flock(&fd, how) {
                Ok(()) => return Ok(Some(Lock::from_fd(fd))),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if self.is_given_up() => {
                    return Err(self.root.failed("lock", GC_LOCK, Errno::INTR));
                }
                Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_POLL),
                Err(errno) => return Err(self.root.failed("lock", GC_LOCK, errno)),
            }
        }
    }

    /// Whether the caller wants waits for locks to end.
    pub(crate) fn is_given_up(&self) -> bool {
        self.give_up.is_time()
    }

    /// Removes the immutable flag from every object, image and device, so that `rm -r` can remove the store. Returns
    /// the number of files that had the flag.
    ///
    /// # Errors
    /// [`DiskError`] if a directory cannot be read, or if this process lacks `CAP_LINUX_IMMUTABLE`.
    pub fn unseal(&self) -> Result<u64, DiskError> {
        let mut unsealed = unseal_all(&self.images.directory)?;
        for shard in self.objects.directory.list()? {
            unsealed += unseal_all(&self.objects.directory.open(&shard.name)?)?;
        }
        if let Some(data) = self.devices.directory.get()? {
            unsealed += unseal_all(data)?;
        }
        Ok(unsealed)
    }
}

fn unseal_all(directory: &Directory) -> Result<u64, DiskError> {
    use std::os::fd::AsFd as _;
    let mut unsealed = 0;
    for file in directory.list()? {
        let Ok(Some((opened, _))) = directory.read(&file.name) else { continue };
        if matches!(kernel::seal::sealed(opened.as_fd()), Ok(kernel::seal::Sealed::Immutable)) {
            let refused = directory.failed("unseal", &file.name, Errno::PERM);
            directory.unseal(&file.name, refused)?;
            unsealed += 1;
        }
    }
    Ok(unsealed)
}

/// A lock on the store, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _fd: OwnedFd,
    /// Lock that excludes the readers of a shared store.
    _readers: Option<OwnedFd>,
}

impl Lock {
    pub(crate) const fn from_fd(fd: OwnedFd) -> Self {
        Self { _fd: fd, _readers: None }
    }
}

fn make_root(directory: &Path, trace: Trace) -> Result<Directory, DiskError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let failed =
        |source| DiskError { action: "make directory", path: directory.to_owned(), source };
    if let Some(parent) = directory.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let made = std::fs::DirBuilder::new().mode(PRIVATE.as_raw_mode()).create(directory);
    match made {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    Directory::open_root(directory, trace)
}

/// Returns [`StoreError::Foreign`] if the directory contains an entry that is not part of a store, else
/// [`StoreError::Absent`].
fn absent_or_foreign(root: &Directory) -> Result<StoreError, DiskError> {
    Ok(match foreign(root)? {
        Some(foreign) => foreign,
        None => StoreError::Absent(root.path().to_owned()),
    })
}

fn foreign(root: &Directory) -> Result<Option<StoreError>, DiskError> {
    let is_foreign = |name: &str| !belongs(name) && name != LOST_AND_FOUND;
    let found = root.list()?.into_iter().find(|it| it.text().is_none_or(is_foreign));
    Ok(found.map(|found| StoreError::Foreign {
        directory: root.path().to_owned(),
        found: String::from_utf8_lossy(&found.name).into_owned(),
    }))
}

/// Makes an existing directory private to this user before anything is written to it. If creating a store was
/// interrupted, the directory may already contain parts of it, which must belong to this user.
fn take(root: &Directory, user: u32) -> Result<(), StoreError> {
    let check = |stat: &rustix::fs::Stat, path: PathBuf| match stat.st_uid {
        owner if owner == user => Ok(()),
        owner => Err(StoreError::NotYours { path, user: owner }),
    };
    let stat = root.stat_self()?;
    check(&stat, root.path().to_owned())?;
    if Mode::from_raw_mode(stat.st_mode) != PRIVATE {
        root.set_mode_self(PRIVATE)?;
    }
    if let Some(foreign) = foreign(root)? {
        return Err(foreign);
    }
    for part in root.list()?.iter().filter(|it| it.text() != Some(LOST_AND_FOUND)) {
        if let Some(stat) = root.stat(&part.name)? {
            check(&stat, root.path_of(&part.name))?;
        }
    }
    Ok(())
}

/// Removes other users' access to the entries of [`LOCKED`], if this user's store was created with such access.
fn close_locks(root: &Directory, user: u32, sharing: Sharing) -> Result<(), DiskError> {
    for (name, _) in LOCKED {
        let mode = mode_of(name, sharing);
        if mode == SHARED {
            continue;
        }
        let Some(stat) = root.stat(name)? else { continue };
        let found = Mode::from_raw_mode(stat.st_mode);
        let is_open = found.intersects(Mode::RWXG | Mode::RWXO);
        // If others can write to a directory, they may have changed its contents. [`Store::exposure`] reports its
        // mode, so its mode is not changed.
        let is_told = name != GC_LOCK && found.intersects(Mode::WGRP | Mode::WOTH);
        if is_open && !is_told && stat.st_uid == user {
            root.set_mode(name, mode)?;
        }
    }
    Ok(())
}

/// Creates the missing parts of a store. `meta` is created last, because a directory without `meta` is not a store, so
/// the next attempt continues there. Several processes may do this at the same time.
fn create(root: &Directory, meta: &Meta) -> Result<(), StoreError> {
    for name in DIRECTORIES {
        root.make(name, mode_of(name, Sharing::Owner))?;
    }
    let objects = root.open("objects")?;
    for shard in 0..=u8::MAX {
        objects.make(format!("{shard:02x}"), SHARED)?;
    }
    // If `absent/` does not exist, each start of a container looks up all objects of its image.
    if let Err(error) = absent::make(root) {
        tracing::warn!(%error, "cannot make the directory {ABSENT} of the store");
    }
    match root.create(GC_LOCK) {
        Ok(_) => root.set_mode(GC_LOCK, mode_of(GC_LOCK, Sharing::Owner))?,
        Err(error) if error.is(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    root.sync()?;
    let work = Workspace::make(&root.open("tmp")?)?;
    let mut file = work.directory.create(META)?;
    file.write_all(&meta.encode())?;
    file.publish_mode()?;
    drop(file);
    work.directory.sync_file(META)?;
    match work.directory.rename_new(META, root, META)? {
        Renamed::Now | Renamed::Taken => root.sync()?,
    }
    work.remove()?;
    tracing::info!(store = %root.path().display(), algorithm = %meta.algorithm, "made a store");
    Ok(())
}

fn check_writable(root: &Directory, meta: &Meta) -> Result<(), StoreError> {
    let directory = root.path().to_owned();
    if !meta.unknown_to_write.is_empty() {
        return Err(StoreError::Newer { directory, features: meta.unknown_to_write.clone() });
    }
    let may = rustix::fs::accessat(root, "tmp", Permission::WRITE_OK, AtFlags::EACCESS);
    let failed = OperationError::at("change the store", &directory);
    Ok(may.map_err(|errno| failed(std::io::Error::from(errno)))?)
}
