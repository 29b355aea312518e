//! Mount points of a container, in the mount namespace of its monitor, where the runtime finds its mounts.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Write as _};
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use kernel::mount::{Detached, Durability, Reach, TmpfsOptions, Unmount};
use kernel::process::Who;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use store::OperationError;

use crate::boot_cache::Notes;
use crate::bundle::Access;
use crate::bundle::etc_files::{NameFile, NameMount};
use crate::bundle::userns::IdMap;
use crate::folder::{MOUNT, MOUNT_NAMES, MOUNT_VOLUME, NETWORK, ROOT};
use crate::root::headroom::Headroom;
use crate::root::upper_dir::{Doomed, UpperError};

/// Folder in [`FOLDER`](crate::boot_cache::FOLDER) that all users may traverse. Runtimes prepare a container with a
/// user namespace as the container's root, an unprivileged user of the host, who may have no access to a store's
/// folders and their parents.
const OPEN: &str = "/run/quire/userns";

/// The mount points of a container's root and other mounts. They are in memory and have the same path for all
/// containers, each in its own mount namespace, or they are in the container's folder.
#[derive(Debug)]
pub struct Stage {
    folder: PathBuf,
    /// User id of this process.
    user: u32,
    /// Whether the mount points are in [`OPEN`].
    open: bool,
    /// Whether this process has attached a file system at [`OPEN`].
    is_attached: Cell<bool>,
    filestores: Vec<Filestore>,
    /// Directories of volumes, which the runtime could not reach by their paths.
    volumes: Vec<Detached>,
    /// The network namespace of another container.
    network: Option<OwnedFd>,
    names: Vec<NameFile>,
    /// User and group id of the container's root on the host.
    root: (u32, u32),
}

/// A file system in a file of the host, for a container to use besides its root. It is not attached yet.
#[derive(Debug)]
pub struct Filestore {
    mount: Detached,
    doomed: Doomed,
}

/// Space that a container may add to its files with names, in bytes.
const ROOM: u64 = 1 << 20;

/// Mode of their directory, through which a container's root passes.
const NAMES_MODE: u32 = 0o711;

/// Whether a file in a container's folder is a mount point.
pub(crate) fn is_place(path: &Path) -> bool {
    let name = path.file_name().and_then(|it| it.to_str());
    let is_directory = |name: &str| name == ROOT || name.starts_with(MOUNT);
    name.is_some_and(|it| it == NETWORK || (is_directory(it) && path.is_dir()))
}

/// Directory of a filestore that the container sees, because ext4's root directory has `lost+found`.
const DATA: &str = "data";

impl Filestore {
    /// Mounts the file system. `owner` is the owner of its directory `data`, as ids of the host.
    pub fn mount(
        file: BorrowedFd<'_>,
        durability: Durability,
        mode: u32,
        owner: (u32, u32),
    ) -> Result<Self, UpperError> {
        let (user, group) = owner;
        let (mount, directory) =
            crate::root::upper_dir::volume(file, durability, DATA, mode, user, group)?;
        Ok(Self { mount, doomed: Doomed::of_filestore(directory, durability) })
    }
}

impl Stage {
    /// Creates the stage for a container with this folder, user and map of ids.
    #[must_use]
    pub fn new(folder: &Path, user: u32, map: Option<&IdMap>) -> Self {
        let root = map.and_then(|map| map.root().ok()).unwrap_or((0, 0));
        let (folder, open) = (folder.to_owned(), map.is_some());
        Self {
            folder,
            user,
            open,
            is_attached: Cell::new(false),
            filestores: Vec::new(),
            volumes: Vec::new(),
            network: None,
            names: Vec::new(),
            root,
        }
    }

    /// Moves all mount points from the container's folder into memory, if this process can make the directory that
    /// covers them. On the disk of the store, each of them would be a directory that a start makes and an end
    /// removes, and each would be unmounted by itself.
    #[must_use]
    pub fn in_memory(mut self, who: Who) -> Self {
        self.open |= who.is_host_root() && make_open(Path::new(OPEN), who.user).is_ok();
        self
    }

    /// Returns the path of the root for the bundle.
    #[must_use]
    pub fn root(&self) -> String {
        match self.open {
            true => format!("{OPEN}/{ROOT}"),
            false => ROOT.to_owned(),
        }
    }

    /// Returns the path of the network namespace, for the runtime and for pasta. With the host's root, all mount
    /// points move to the open folder, because pasta runs as nobody.
    pub(crate) fn set_network(&mut self, who: Who) -> String {
        self.open |= who.is_host_root();
        self.base().join(NETWORK).display().to_string()
    }

    /// Shows the runtime this network namespace. Returns its future path.
    pub(crate) fn join_network(&mut self, namespace: OwnedFd) -> String {
        self.network = Some(namespace);
        self.base().join(NETWORK).display().to_string()
    }

    /// Adds the directory of a volume. Returns its future path.
    pub(crate) fn add_volume(&mut self, directory: Detached) -> PathBuf {
        let place = self.volume_place(self.volumes.len());
        self.volumes.push(directory);
        place
    }

    /// Adds a file system. Returns the future path of its directory.
    pub fn add(&mut self, filestore: Filestore) -> PathBuf {
        let place = self.place(self.filestores.len());
        self.filestores.push(filestore);
        place.join(DATA)
    }

    /// Keeps files for the container, and returns their future mounts. The files are in memory, with a limited size.
    /// If they were on the host's disk, the container could fill the disk, and could read the store's path in
    /// `mountinfo`.
    pub fn set_names(&mut self, names: Vec<NameFile>) -> Vec<NameMount> {
        let place = self.base().join(MOUNT_NAMES);
        self.names = names;
        let mount = |it: &NameFile| {
            let source = place.join(it.name()).display().to_string();
            NameMount { place: it.place, source, access: Access::Writable }
        };
        self.names.iter().map(mount).collect()
    }

    fn mount_names(&self) -> Result<Detached, UpperError> {
        let bytes = NonZeroU64::new(self.room());
        let options = TmpfsOptions {
            name: "quire-names",
            bytes,
            inodes: NonZeroU64::new(16),
            mode: NAMES_MODE,
        };
        let mount = kernel::mount::tmpfs(&options)?;
        self.write_names(mount.as_fd())?;
        Ok(mount)
    }

    /// Makes the directory of the files in a file system that is in memory.
    fn make_names(&self, stage: BorrowedFd<'_>) -> Result<(), UpperError> {
        let mode = Mode::from_raw_mode(NAMES_MODE);
        rustix::fs::mkdirat(stage, MOUNT_NAMES, mode)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(stage, MOUNT_NAMES, flags, Mode::empty())?;
        // Set explicitly, independent of the umask.
        rustix::fs::fchmod(&directory, mode)?;
        Ok(self.write_names(directory.as_fd())?)
    }

    fn write_names(&self, directory: BorrowedFd<'_>) -> Result<(), Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        for names in &self.names {
            let mode = Mode::from_raw_mode(0o644);
            let mut file = File::from(rustix::fs::openat(directory, names.name(), flags, mode)?);
            let failed = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
            file.write_all(&names.bytes).map_err(failed)?;
            // Set explicitly, independent of the umask.
            rustix::fs::fchmod(&file, mode)?;
            let (user, group) = (Uid::from_raw(self.root.0), Gid::from_raw(self.root.1));
            rustix::fs::fchown(&file, Some(user), Some(group))?;
        }
        Ok(())
    }

    /// Returns the size of the files, and of what a container may add to them, in bytes.
    fn room(&self) -> u64 {
        let bytes = self.names.iter().map(|it| it.bytes.len() as u64).sum::<u64>();
        bytes.saturating_add(ROOM)
    }

    /// Returns the number of file systems.
    #[must_use]
    pub fn filestores(&self) -> usize {
        self.filestores.len()
    }

    /// Returns the reservers of disk space for the file systems, in order. `file` returns the path of the host's file
    /// by its number.
    pub fn headrooms(
        &self,
        file: impl Fn(usize) -> PathBuf,
    ) -> Result<Vec<Headroom>, OperationError> {
        let headrooms = self
            .filestores
            .iter()
            .enumerate()
            .map(|(number, it)| it.doomed.headroom(&file(number)));
        headrooms.filter_map(Result::transpose).collect()
    }

    /// Returns the folder of all mount points.
    pub(crate) fn base(&self) -> &Path {
        if self.open { Path::new(OPEN) } else { &self.folder }
    }

    fn place(&self, number: usize) -> PathBuf {
        self.base().join(format!("{MOUNT}{number}"))
    }

    fn volume_place(&self, number: usize) -> PathBuf {
        self.base().join(format!("{MOUNT_VOLUME}{number}"))
    }

    /// Attaches all mounts, in this process's mount namespace.
    pub(crate) fn set_up(&self, id: &str, root: &Detached) -> Result<(), OperationError> {
        let failed = OperationError::of("attach the root of container", id);
        let names_failed = OperationError::of("make files such as /etc/hosts for container", id);
        if self.open {
            let open = Path::new(OPEN);
            // runc executes additional programs from the path of the root, in a namespace in which the root is not
            // mounted.
            let root = open.join(ROOT);
            make_open(open, self.user)
                .and_then(|()| std::fs::create_dir_all(&root))
                .map_err(OperationError::at("write", &root))?;
            // This file system has only mount points and names.
            let (bytes, inodes) = (NonZeroU64::new(self.room()), NonZeroU64::new(1 << 10));
            let options = TmpfsOptions { name: "quire-stage", bytes, inodes, mode: 0o711 };
            let stage = kernel::mount::tmpfs(&options).map_err(failed)?;
            if !self.names.is_empty() {
                self.make_names(stage.as_fd()).map_err(names_failed)?;
            }
            stage.attach_at(open).map_err(failed)?;
            self.is_attached.set(true);
        }
        let names = match self.open || self.names.is_empty() {
            true => None,
            false => Some(self.mount_names().map_err(names_failed)?),
        };
        let names = names.iter().map(|it| (self.base().join(MOUNT_NAMES), it));
        let mounts = self.filestores.iter().enumerate();
        let mounts = mounts.map(|(number, it)| (self.place(number), &it.mount)).chain(names);
        let volumes = self.volumes.iter().enumerate();
        let mounts = mounts.chain(volumes.map(|(number, it)| (self.volume_place(number), it)));
        for (path, mount) in [(self.base().join(ROOT), root)].into_iter().chain(mounts) {
            std::fs::create_dir(&path).map_err(OperationError::at("write", &path))?;
            mount.attach_at(&path).map_err(failed)?;
        }
        if let Some(network) = &self.network {
            let place = self.base().join(NETWORK);
            File::create_new(&place).map_err(OperationError::at("write", &place))?;
            kernel::mount::bind(network.as_fd(), Reach::One)
                .and_then(|it| it.attach_at(&place))
                .map_err(OperationError::of("join the network of another container for", id))?;
        }
        Ok(())
    }

    /// Call this when this process has left the mount namespace of the mounts.
    pub(crate) fn leave(&self) {
        self.is_attached.set(false);
    }

    /// Whether an unmount takes long.
    #[must_use]
    pub fn takes_long(&self) -> bool {
        !self.filestores.is_empty()
    }

    /// Detaches mount points in memory, in this process's mount namespace, so that no other container gets the lock of
    /// a layer that is still mounted. Drops unwritten data, and this process's descriptors of the file systems.
    pub fn shut_down(self) {
        if self.is_attached.get() {
            let _detached = kernel::mount::unmount(Path::new(OPEN), Unmount::Lazy);
        }
        for filestore in self.filestores {
            filestore.doomed.shut_down();
        }
    }
}

/// Creates a directory that all users may pass through, independent of the umask.
fn make_open(path: &Path, user: u32) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        drop(Notes::new(parent, user).make()?);
        open_to_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    open_to_all(path)
}

fn open_to_all(path: &Path) -> io::Result<()> {
    let mode = std::fs::metadata(path)?.permissions().mode();
    if mode & 0o001 == 0 {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode | 0o111))?;
    }
    Ok(())
}
