//! Places of a container's mounts, in the mount namespace of its monitor, for the runtime to find.

use std::fs::File;
use std::io::{self, Write as _};
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use kernel::mount::{Detached, Durability, MountError, TmpfsOptions};
use kernel::process::Who;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::bundle::Access;
use crate::bundle::names::{NameFile, NameMount};
use crate::bundle::userns::IdMap;
use crate::folder::{MOUNT, MOUNT_NAMES, NETWORK, ROOT};
use crate::notes::Notes;
use crate::root::headroom::{Headroom, HeadroomError};
use crate::root::upper::{Doomed, UpperError};

/// Runtimes prepare a container of a user namespace as its root, who is nobody to the host: the folders of a store, and
/// above it, need not let him through. This one does, in [`FOLDER`](crate::notes::FOLDER).
const OPEN: &str = "/run/quire/userns";

/// The places for the root and for what else is mounted. Those for a user namespace are the same for all containers, each
/// in its own mount namespace.
#[derive(Debug)]
pub struct Stage {
    folder: PathBuf,
    /// Who attaches.
    user: u32,
    open: bool,
    filestores: Vec<Filestore>,
    names: Vec<NameFile>,
    /// The container's root, as the host numbers it.
    root: (u32, u32),
}

/// A file system in a file of the host, for a container to have besides its root; attached nowhere.
#[derive(Debug)]
pub struct Filestore {
    mount: Detached,
    doomed: Doomed,
}

/// Files or mounts for the runtime could not be put in place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The root, or a further mount, cannot be put in its place.
    #[error("cannot attach the root of container {id}")]
    Attach {
        /// The container.
        id: String,
        /// An error of the kernel.
        source: MountError,
    },
    /// Files for looking up names could not be made.
    #[error("cannot make /etc/hosts and the like for container {id}")]
    Names {
        /// The container.
        id: String,
        /// Why.
        source: UpperError,
    },
    /// A directory cannot be made.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What may be added to those files.
const ROOM: u64 = 1 << 20;

/// Whether something of a container's folder is there to have something mounted on it.
pub(crate) fn is_place(path: &Path) -> bool {
    let name = path.file_name().and_then(|it| it.to_str());
    let is_directory = |name: &str| name == ROOT || name.starts_with(MOUNT);
    name.is_some_and(|it| it == NETWORK || (is_directory(it) && path.is_dir()))
}

/// The directory of a filestore that the container sees: the one above has ext4's `lost+found`.
const DATA: &str = "data";

impl Filestore {
    /// Mounts it. `owner` has its one directory, as the host numbers users and groups.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn mount(
        file: BorrowedFd<'_>,
        durability: Durability,
        mode: u32,
        owner: (u32, u32),
    ) -> Result<Self, UpperError> {
        let (mount, directory) = crate::root::upper::volume(file, durability, DATA, mode, owner)?;
        Ok(Self { mount, doomed: Doomed::of_filestore(directory, durability) })
    }
}

impl Stage {
    /// Makes the stage of a container with this folder, this user and this map of ids.
    #[must_use]
    pub fn new(folder: &Path, user: u32, map: Option<&IdMap>) -> Self {
        let root = map.and_then(|map| map.root().ok()).unwrap_or((0, 0));
        let (folder, open) = (folder.to_owned(), map.is_some());
        Self { folder, user, open, filestores: Vec::new(), names: Vec::new(), root }
    }

    /// Returns the path of the root for the bundle.
    #[must_use]
    pub fn root(&self) -> String {
        match self.open {
            true => format!("{OPEN}/{ROOT}"),
            false => ROOT.to_owned(),
        }
    }

    /// Where its network will be, for the runtime and for pasta. For root that is no other user's folder, but pasta is nobody.
    pub(crate) fn set_network(&mut self, who: Who) -> String {
        self.open |= who.is_host_root();
        self.base().join(NETWORK).display().to_string()
    }

    /// Adds a file system; answers where its directory will be.
    pub fn add(&mut self, filestore: Filestore) -> PathBuf {
        let place = self.place(self.filestores.len());
        self.filestores.push(filestore);
        place.join(DATA)
    }

    /// Keeps files for the container; returns where they will be. They are in memory, whose size is limited. On the
    /// host's disk, the container could fill the disk, and read in `mountinfo` where the store is.
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
        let bytes = self.names.iter().map(|it| it.text.len() as u64).sum::<u64>();
        let bytes = NonZeroU64::new(bytes.saturating_add(ROOM));
        let options =
            TmpfsOptions { name: "quire-names", bytes, inodes: NonZeroU64::new(16), mode: 0o711 };
        let mount = kernel::mount::tmpfs(&options)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        for names in &self.names {
            let mode = Mode::from_raw_mode(0o644);
            let mut file = File::from(rustix::fs::openat(&mount, names.name(), flags, mode)?);
            let failed = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
            file.write_all(names.text.as_bytes()).map_err(failed)?;
            // Whatever the umask.
            rustix::fs::fchmod(&file, mode)?;
            let (user, group) = (Uid::from_raw(self.root.0), Gid::from_raw(self.root.1));
            rustix::fs::fchown(&file, Some(user), Some(group))?;
        }
        Ok(mount)
    }

    /// How many have been added.
    #[must_use]
    pub fn filestores(&self) -> usize {
        self.filestores.len()
    }

    /// Returns what reserves space for their writes, in order. `file` returns the path of the host's file, by its
    /// number.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn headrooms(
        &self,
        file: impl Fn(usize) -> PathBuf,
    ) -> Result<Vec<Headroom>, HeadroomError> {
        let headrooms = self
            .filestores
            .iter()
            .enumerate()
            .map(|(number, it)| it.doomed.headroom(&file(number)));
        headrooms.filter_map(Result::transpose).collect()
    }

    /// The folder of all places.
    pub(crate) fn base(&self) -> &Path {
        if self.open { Path::new(OPEN) } else { &self.folder }
    }

    fn place(&self, number: usize) -> PathBuf {
        self.base().join(format!("{MOUNT}{number}"))
    }

    /// Attaches everything, in this process's own mount namespace.
    pub(crate) fn set_up(&self, id: &str, root: &Detached) -> Result<(), StageError> {
        let failed = |source| StageError::Attach { id: id.to_owned(), source };
        let write_failed = |path: &Path| {
            let path = path.to_owned();
            move |source| StageError::Write { path, source }
        };
        if self.open {
            let open = Path::new(OPEN);
            // runc executes further programs from where the root would be, in a namespace where it is not.
            let root = open.join(ROOT);
            make_open(open, self.user)
                .and_then(|()| std::fs::create_dir_all(&root))
                .map_err(write_failed(&root))?;
            // It has nothing but names.
            let (bytes, inodes) = (NonZeroU64::new(1 << 20), NonZeroU64::new(1 << 10));
            let options = TmpfsOptions { name: "quire-userns", bytes, inodes, mode: 0o711 };
            let stage = kernel::mount::tmpfs(&options).map_err(failed)?;
            stage.attach_at(open).map_err(failed)?;
        }
        let names = match self.names.is_empty() {
            true => None,
            false => Some(
                self.mount_names()
                    .map_err(|source| StageError::Names { id: id.to_owned(), source })?,
            ),
        };
        let names = names.iter().map(|it| (self.base().join(MOUNT_NAMES), it));
        let mounts = self.filestores.iter().enumerate();
        let mounts = mounts.map(|(number, it)| (self.place(number), &it.mount)).chain(names);
        for (path, mount) in [(self.base().join(ROOT), root)].into_iter().chain(mounts) {
            std::fs::create_dir(&path).map_err(write_failed(&path))?;
            mount.attach_at(&path).map_err(failed)?;
        }
        Ok(())
    }

    /// Whether to unmount it takes long.
    #[must_use]
    pub fn takes_long(&self) -> bool {
        !self.filestores.is_empty()
    }

    /// Drops unwritten data, and this process's descriptors of the file systems.
    pub fn shut_down(self) {
        for filestore in self.filestores {
            filestore.doomed.shut_down();
        }
    }
}

/// Makes a directory that everybody may pass through, whatever the umask.
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
