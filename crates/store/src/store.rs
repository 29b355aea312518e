//! The store as a whole: a directory, opened.

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
use crate::meta::{META, Meta, MetaError, SHARED_MARK, Sealing};
use crate::record::RECORD_MAX;
use crate::shelf::absent::{self, ABSENT};
use crate::shelf::containers::ContainerShelf;
use crate::shelf::devices::{DATA, DeviceShelf};
use crate::shelf::downloads::DownloadShelf;
use crate::shelf::images::ImageShelf;
use crate::shelf::item::StoreItem;
use crate::shelf::layers::LayerShelf;
use crate::shelf::lazy_devices::{LAZY, LazyDeviceShelf};
use crate::shelf::manifests::ManifestShelf;
use crate::shelf::objects::{ObjectShelf, split};
use crate::shelf::refs::RefShelf;
use crate::shelf::snapshots::{SNAPSHOTS, SnapshotShelf};
use crate::staging::{Tmp, Workspace};

/// Whether to make a store when the directory holds none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Create {
    /// Refuse with [`StoreError::Absent`].
    Never,
    /// Make one with this fs-verity algorithm, and also the parents of the directory. A directory that
    /// holds something else is refused.
    IfAbsent(Algorithm),
}

/// Who may read a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Its owner, and root.
    Owner,
    /// All users of the host: images, their names and their files, whatever modes these have in the images.
    All,
}

/// The access to an open store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and mount only: works on a read-only file system.
    Read,
    /// Also import, tag and remove.
    Write,
}

/// How to open a store.
#[derive(Debug, Clone, Copy)]
pub struct OpenOptions {
    /// Whether to make a missing store.
    pub create: Create,
    /// The access that is needed.
    pub access: Access,
    /// Protection of new objects and images; `None` for the one that the store was made with.
    pub sealing: Option<Sealing>,
}

impl OpenOptions {
    /// An existing store, to read and mount.
    #[must_use]
    pub const fn read() -> Self {
        Self { create: Create::Never, access: Access::Read, sealing: None }
    }

    /// An existing store, to change.
    #[must_use]
    pub const fn write() -> Self {
        Self { create: Create::Never, access: Access::Write, sealing: None }
    }

    /// A store to change, made with SHA-256 if there is none.
    #[must_use]
    pub const fn create() -> Self {
        Self { create: Create::IfAbsent(Algorithm::Sha256), access: Access::Write, sealing: None }
    }
}

/// Why a store cannot be opened, or something in it cannot be found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no store in this directory.
    #[error("there is no store in {}", .0.display())]
    Absent(PathBuf),
    /// The directory holds something other than a store.
    #[error(
        "{} is not a store: it has \"{}\" but no file \"meta\"",
        .directory.display(), .found.escape_debug()
    )]
    Foreign {
        /// The directory.
        directory: PathBuf,
        /// A name in it that does not belong in a store.
        found: String,
    },
    /// The directory for a new store belongs to another user, or something in it does.
    #[error(
        "cannot make a store in {}: it belongs to user {user}, who could change the store. Name a directory of your \
         own, or one that does not exist yet",
        .path.display()
    )]
    NotYours {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        user: u32,
    },
    /// One of the store's directories is missing.
    #[error(
        "the store {} is damaged: its directory \"{name}\" is missing. `mkdir {}` makes the store usable again, \
         then `quire fsck` shows what was lost",
        .directory.display(), .directory.join(.name).display()
    )]
    Incomplete {
        /// The store.
        directory: PathBuf,
        /// The missing directory.
        name: &'static str,
    },
    /// This user may not change the store, or its file system is read-only.
    #[error("cannot change the store {}", .directory.display())]
    ReadOnly {
        /// The store.
        directory: PathBuf,
        /// The error of the kernel.
        source: std::io::Error,
    },
    /// This version does not know features that it must know to change the store.
    #[error(
        "the store {} can be read but not changed: it has features that this version does not know: {}",
        .directory.display(), .features.join(", ")
    )]
    Newer {
        /// The store.
        directory: PathBuf,
        /// Names of the features, as in `meta`.
        features: Vec<String>,
    },
    /// The file `meta` is refused.
    #[error("cannot open the store {}", .directory.display())]
    Meta {
        /// The store.
        directory: PathBuf,
        /// The cause.
        source: MetaError,
    },
    /// An error of the disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// An open store. `Send + Sync`; share it by reference.
#[derive(Debug)]
pub struct Store {
    pub(crate) root: Arc<Directory>,
    pub(crate) tmp: Arc<Tmp>,
    /// Objects that are files.
    pub(crate) objects: ObjectShelf,
    /// EROFS images.
    pub images: ImageShelf,
    /// Recipes of layers.
    pub layers: LayerShelf,
    /// Manifests, configs and indexes.
    pub manifests: ManifestShelf,
    /// Names of images.
    pub refs: RefShelf,
    /// Devices.
    pub devices: DeviceShelf,
    /// Devices that are filled on demand.
    pub lazy_devices: LazyDeviceShelf,
    /// Files of pulls.
    pub downloads: DownloadShelf,
    /// Folders of containers.
    pub containers: ContainerShelf,
    /// Snapshots of container engines.
    pub snapshots: SnapshotShelf,
    meta: Meta,
    access: Access,
    pub(crate) who: Who,
    /// Who shares it, as this process sees that user, if it is known to be root or this user.
    pub(crate) sharer: Option<u32>,
    pub(crate) sealing: Sealing,
    pub(crate) give_up: Arc<GiveUp>,
}

/// How often a lock that is waited for is tried: `gc` leaves it free for a few milliseconds at a time.
const LOCK_POLL: Duration = Duration::from_millis(2);

/// The directories of a store.
const DIRECTORIES: [&str; 8] =
    ["blobs", "containers", "images", "layers", "manifests", "objects", "refs", "tmp"];
pub(crate) const GC_LOCK: &str = "gc.lock";
/// Objects may be files that only root could read in their image.
pub(crate) const PRIVATE: Mode = Mode::RWXU;
pub(crate) const SHARED: Mode = Mode::from_raw_mode(0o755);
/// What can be opened can be locked, and a lock that another user holds stops every import: so these are private even where
/// the store's directory is not.
const LOCKED: [(&str, Mode); 6] = [
    (GC_LOCK, Mode::from_raw_mode(0o600)),
    ("refs", PRIVATE),
    ("tmp", PRIVATE),
    (DATA, PRIVATE),
    (LAZY, PRIVATE),
    (SNAPSHOTS, PRIVATE),
];
/// Of these, what users read of a store that is shared with them. Nobody locks them.
pub(crate) const READ_BY_ALL: [&str; 2] = ["refs", DATA];

/// What stays its owner's when it is shared: nothing of images.
pub(crate) const OWN: [&str; 2] = ["containers", "tmp"];

/// The permissions of something in a store's own directory.
pub(crate) fn mode_of(name: &str, sharing: Sharing) -> Mode {
    if sharing == Sharing::All && READ_BY_ALL.contains(&name) {
        return SHARED;
    }
    LOCKED.iter().find(|it| it.0 == name).map_or(SHARED, |it| it.1)
}

/// The directory that `mkfs.ext4` creates in the root of a disk. A store may be that root. Source: mklost+found(8).
pub(crate) const LOST_AND_FOUND: &str = "lost+found";

/// Whether something of this name belongs into a store's own directory.
pub(crate) fn belongs(name: &str) -> bool {
    [META, GC_LOCK, SHARED_MARK, ABSENT, DATA, LAZY, SNAPSHOTS].contains(&name)
        || DIRECTORIES.contains(&name)
}

impl Store {
    /// Opens the store in `directory`, as this user.
    ///
    /// # Errors
    /// [`StoreError`] when the store is absent, not a store, made by another version, or not accessible.
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
        let meta = Meta::decode(&meta)
            .map_err(|source| StoreError::Meta { directory: directory.to_owned(), source })?;
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
        let store = Self {
            objects: ObjectShelf::new(part("objects")?, algorithm),
            images: ImageShelf { directory: part("images")?, algorithm },
            layers: LayerShelf { directory: part("layers")?, algorithm },
            manifests: ManifestShelf { directory: part("manifests")? },
            refs: RefShelf { directory: part("refs")? },
            devices: DeviceShelf::new(&root, &tmp),
            lazy_devices: LazyDeviceShelf::new(&root, &tmp),
            snapshots: SnapshotShelf::new(&root, &tmp),
            downloads: DownloadShelf { directory: blobs, tmp: Arc::clone(&tmp), algorithm },
            containers: ContainerShelf { directory: part("containers")?, tmp: Arc::clone(&tmp) },
            tmp,
            root,
            sealing: options.sealing.unwrap_or(meta.sealing),
            meta,
            access: options.access,
            who,
            sharer: None,
            give_up: Arc::default(),
        };
        if options.access == Access::Write {
            check_writable(&store.root, &store.meta)?;
            close_locks(&store.root, who.user, store.sharing()?)?;
        }
        Ok(store)
    }

    /// Ends waits for the store's lock with an error as soon as `enough` returns `true`. `gc` holds that lock while it
    /// works. `enough` is called some hundred times a second, and only during a wait. This is for callers that block
    /// signals, which would end a wait otherwise; only the first such call counts.
    ///
    /// A transaction that ends without its commit then leaves its files to [`clear_work`](Self::clear_work), since the
    /// kernel may take seconds to remove them.
    pub fn give_up_when(&self, enough: impl Fn() -> bool + Send + Sync + 'static) {
        self.give_up.set(enough);
    }

    /// The store's directory, as the caller gave it.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The user that opened it.
    #[must_use]
    pub const fn who(&self) -> Who {
        self.who
    }

    /// The contents of the file `meta`.
    #[must_use]
    pub const fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The hash that names this store's objects and images.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.meta.algorithm
    }

    /// Whether it was opened to change it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.access == Access::Write
    }

    /// The directory of a thing.
    pub(crate) fn place(&self, item: &StoreItem) -> Result<Directory, DiskError> {
        match item {
            StoreItem::Object(id) => self.objects.directory.open(split(id).0),
            StoreItem::Image(_) => self.images.directory.try_clone(),
            StoreItem::Layer(_) => self.layers.directory.try_clone(),
            StoreItem::Manifest(_) => self.manifests.directory.try_clone(),
            StoreItem::Blob(_) => self.downloads.directory.try_clone(),
            StoreItem::Device(_) | StoreItem::DeviceIndex(_) => {
                self.devices.directory.there()?.try_clone()
            }
            StoreItem::LazyDevice(_) => self.lazy_devices.directory.there()?.try_clone(),
            StoreItem::Ref(_) => self.refs.directory.try_clone(),
            StoreItem::Container(_) => self.containers.directory.try_clone(),
            StoreItem::Snapshot(instance, _) => self.snapshots.directory.there()?.open(instance),
            StoreItem::Leftover(_) => self.tmp.try_clone(),
        }
    }

    /// Held while something is published or opened: `gc` neither decides nor sweeps meanwhile.
    pub(crate) fn lock_shared(&self) -> Result<Option<Lock>, DiskError> {
        self.lock(FlockOperation::LockShared, FlockOperation::NonBlockingLockShared)
    }

    /// Held by `gc` while it makes sure of its decision.
    pub(crate) fn lock_exclusive(&self) -> Result<Option<Lock>, DiskError> {
        // First, so that no command of the owner's waits with it. Readers take no other lock.
        let readers = self.wait_for_readers()?;
        let lock =
            self.lock(FlockOperation::LockExclusive, FlockOperation::NonBlockingLockExclusive)?;
        Ok(lock.map(|it| Lock { _readers: readers, ..it }))
    }

    /// Held by `gc` for moments. Readers may open images meanwhile: what those need is kept, or gone already.
    pub(crate) fn lock_to_sweep(&self) -> Result<Option<Lock>, DiskError> {
        self.lock(FlockOperation::LockExclusive, FlockOperation::NonBlockingLockExclusive)
    }

    fn lock(
        &self,
        waiting: FlockOperation,
        trying: FlockOperation,
    ) -> Result<Option<Lock>, DiskError> {
        // A descriptor of its own for each holder, since flock belongs to the open file.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = match rustix::fs::openat(&self.root, GC_LOCK, flags, Mode::empty()) {
            Ok(fd) => fd,
            // Nobody can sweep what nobody can change.
            Err(Errno::NOENT) if self.access == Access::Read => return Ok(None),
            // It is its owner's, and this is one of those whom the store is shared with.
            Err(Errno::ACCESS) if self.access == Access::Read => return self.lock_as_reader(),
            Err(errno) => return Err(self.root.failed("open", GC_LOCK, errno)),
        };
        let how = if self.give_up.is_possible() { trying } else { waiting };
        loop {
            match rustix::fs::flock(&fd, how) {
                Ok(()) => return Ok(Some(Lock::of(fd))),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if self.is_given_up() => {
                    return Err(self.root.failed("lock", GC_LOCK, Errno::INTR));
                }
                Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_POLL),
                Err(errno) => return Err(self.root.failed("lock", GC_LOCK, errno)),
            }
        }
    }

    /// Whether the caller does not want a lock any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.give_up.is_time()
    }

    /// Removes the immutable flag from every object and image, so that `rm -r` can remove the store.
    /// Returns the number of files that had it.
    ///
    /// # Errors
    /// [`DiskError`] when one cannot be read, or this process lacks `CAP_LINUX_IMMUTABLE`.
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

/// A lock on the store, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _fd: OwnedFd,
    /// That of users whom the store is shared with.
    _readers: Option<OwnedFd>,
}

impl Lock {
    pub(crate) const fn of(fd: OwnedFd) -> Self {
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

/// Refuses a directory that has something in it which is none of a store's.
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

/// Makes an existing directory this user's alone, before anything is put there. It may have parts of a store whose making
/// was interrupted, if they are this user's, too.
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

/// Takes the right to open what is locked from others, in a store of this user's that was made with it.
fn close_locks(root: &Directory, user: u32, sharing: Sharing) -> Result<(), DiskError> {
    for (name, _) in LOCKED {
        let mode = mode_of(name, sharing);
        if mode == SHARED {
            continue;
        }
        let Some(stat) = root.stat(name)? else { continue };
        let found = Mode::from_raw_mode(stat.st_mode);
        let is_open = found.intersects(Mode::RWXG | Mode::RWXO);
        // A directory that others could write to may have anything in it: that is to be told, and not to be hidden.
        let is_told = name != GC_LOCK && found.intersects(Mode::WGRP | Mode::WOTH);
        if is_open && !is_told && stat.st_uid == user {
            root.set_mode(name, mode)?;
        }
    }
    Ok(())
}

/// Makes what is missing of a store, `meta` last: without it there is no store, and the next one
/// begins again. Several may do this at once.
fn create(root: &Directory, meta: &Meta) -> Result<(), StoreError> {
    for name in DIRECTORIES {
        root.make(name, mode_of(name, Sharing::Owner))?;
    }
    let objects = root.open("objects")?;
    for shard in 0..=u8::MAX {
        objects.make(format!("{shard:02x}"), SHARED)?;
    }
    // Without it, each start of a container looks for all of its image's objects.
    if let Err(error) = absent::make(root) {
        tracing::warn!(%error, "the store has no directory {ABSENT}");
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
    may.map_err(|errno| StoreError::ReadOnly { directory, source: errno.into() })
}
