//! A store that all users of the host may read, because its owner says so: one pull, one copy on disk and in memory.
//!
//! Readers lock no file that imports lock. They lock the mark while they open an image, and `gc` waits for that, though not
//! for ever: a reader that `gc` did not wait for gets an error, never other bytes.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::process::{UserNamespace, Who};
use rustix::fs::{FlockOperation, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::disk::DiskError;
use crate::meta::SHARED_MARK;
use crate::shelf::absent::ABSENT;
use crate::shelf::devices::DATA;
use crate::store::{
    Lock, OWN, OpenOptions, PRIVATE, READ_BY_ALL, SHARED, Sharing, Store, StoreError,
};

/// For how long `gc` and readers wait for one another. Readers take milliseconds, unless they mean to hold others up.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// A store that root shares with everybody, or this user.
#[derive(Debug, Clone)]
pub struct SharedStore {
    directory: PathBuf,
    /// Device and inode of the directory that was looked at.
    identity: (u64, u64),
}

/// Why a store of others is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotShared {
    /// It is not shared, or there is none.
    #[error("{} is no store that is shared with you: its owner may, by `quire share`", .0.display())]
    Unshared(PathBuf),
    /// It is not known in this user namespace who can change it.
    #[error(
        "a shared store is not used: in this user namespace, {} does not prove that root of the host shares it: `sudo quire \
         share` there makes the proof", .0.display()
    )]
    Unproven(PathBuf),
    /// Somebody else can change it.
    #[error("a shared store is not used: {} belongs to user {user}, who can change it: only root shares", path.display())]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        user: u32,
    },
    /// Others may write to it.
    #[error(
        "a shared store is not used: {} has the mode {mode:04o}, so others can change it: `chmod go-w {}`",
        path.display(), path.display()
    )]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

/// An xattr of the mark that proves in a user namespace that root of the host shares the store. Files of root have no owner
/// there, as files of all other users whom the namespace lacks. But the kernel lets nobody else set this value: from root of
/// another user namespace it takes it with that root's number, and shows it in no other namespace (`EOVERFLOW`). Source: Linux
/// `security/commoncap.c`, `cap_convert_nscap` and `cap_inode_getsecurity`.
const PROOF: &str = "security.capability";
/// No capability. Source: Linux `include/uapi/linux/capability.h`, `VFS_CAP_REVISION_2` and `struct vfs_cap_data`.
const NO_CAPABILITY: [u8; 20] = [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Whose files in a store may be.
#[derive(Debug, Clone, Copy)]
struct Owners {
    user: u32,
    /// The number of all whom this user namespace lacks, if root of the host has proven to be one of them.
    unknown: Option<u32>,
}

impl Owners {
    fn of(directory: &Path, who: Who) -> Self {
        let is_elsewhere = who.namespace == UserNamespace::Other;
        let unknown = (is_elsewhere && is_proven(directory)).then(overflow_user);
        Self { user: who.user, unknown }
    }
}

/// Whether root of the host has shared the store in this directory, as far as a user namespace can tell.
fn is_proven(directory: &Path) -> bool {
    let mark = directory.join(SHARED_MARK);
    // A mark with another name may be that of another store.
    let is_whole = std::fs::symlink_metadata(&mark).is_ok_and(|it| it.is_file() && it.nlink() == 1);
    let mut value = [0; NO_CAPABILITY.len() + 1];
    let length = rustix::fs::lgetxattr(&mark, PROOF, &mut value);
    is_whole && length.is_ok_and(|it| value.get(..it) == Some(&NO_CAPABILITY[..]))
}

/// Source: Linux `Documentation/admin-guide/sysctl/fs.rst`, `overflowuid`.
fn overflow_user() -> u32 {
    let set = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    set.ok().and_then(|it| it.trim().parse().ok()).unwrap_or(65_534)
}

/// What is read of it.
const READ: [&str; 8] = [ABSENT, "blobs", DATA, "images", "layers", "manifests", "objects", "refs"];

fn check(path: &Path, found: &std::fs::Metadata, owners: Owners) -> Result<(), NotShared> {
    let (user, mode) = (found.uid(), Mode::from_raw_mode(found.mode()));
    if user != 0 && user != owners.user && Some(user) != owners.unknown {
        return Err(NotShared::Owner { path: path.to_owned(), user });
    }
    match mode.intersects(Mode::WGRP | Mode::WOTH) {
        true => Err(NotShared::Writable { path: path.to_owned(), mode: mode.as_raw_mode() }),
        false => Ok(()),
    }
}

impl SharedStore {
    /// Looks whether the store in this directory is shared, and by whom. In a user namespace, where root of the host has no
    /// number, only what root's mark proves is found out.
    ///
    /// # Errors
    /// [`NotShared`].
    pub fn find(directory: &Path, who: Who) -> Result<Self, NotShared> {
        let unshared = || NotShared::Unshared(directory.to_owned());
        let mark = std::fs::symlink_metadata(directory.join(SHARED_MARK));
        mark.map_err(|_absent| unshared())?;
        let own = std::fs::metadata(directory).map_err(|_absent| unshared())?;
        let owners = Owners::of(directory, who);
        if who.namespace == UserNamespace::Other
            && owners.unknown.is_none()
            && own.uid() == overflow_user()
        {
            return Err(NotShared::Unproven(directory.to_owned()));
        }
        check(directory, &own, owners)?;
        // Files in these are root's, unless root gave them away.
        let shards = (0..=u8::MAX).map(|it| format!("objects/{it:02x}"));
        for name in READ.into_iter().map(str::to_owned).chain(shards) {
            let path = directory.join(name);
            match std::fs::symlink_metadata(&path) {
                Ok(found) => check(&path, &found, owners)?,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(_refused) => return Err(unshared()),
            }
        }
        Ok(Self { directory: directory.to_owned(), identity: (own.dev(), own.ino()) })
    }

    /// Opens it, to read and mount. All of it has to belong to the same user, as far as that can be told in a namespace.
    ///
    /// # Errors
    /// [`StoreError`], also when another directory has taken the place of the one that was looked at.
    pub fn open(&self, who: Who) -> Result<Store, StoreError> {
        let mut store = Store::open(&self.directory, who, OpenOptions::read())?;
        let found = store.root.stat_self()?;
        if (found.st_dev, found.st_ino) != self.identity {
            return Err(store
                .root
                .failed("use another directory in the place of", "", Errno::STALE)
                .into());
        }
        store.sharer = Some(found.st_uid);
        Ok(store)
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }
}

impl Store {
    /// Whether it is this process's own, and not one that somebody shares.
    #[must_use]
    pub const fn is_own(&self) -> bool {
        self.sharer.is_none()
    }

    /// Who may read it.
    ///
    /// # Errors
    /// [`DiskError`] when that cannot be looked at.
    pub fn sharing(&self) -> Result<Sharing, DiskError> {
        let mark = self.root.stat(SHARED_MARK)?;
        Ok(if mark.is_some() { Sharing::All } else { Sharing::Owner })
    }

    /// Changes who may read it. Interrupted, it has at most opened less, or closed more, than it was to.
    ///
    /// # Errors
    /// [`DiskError`] when this user may not change the permissions, or the store.
    pub fn share(&self, sharing: Sharing) -> Result<(), DiskError> {
        let _lock = self.lock_exclusive()?;
        let read_by_all = |mode: Mode| -> Result<(), DiskError> {
            self.root.set_mode(READ_BY_ALL[0], mode)?;
            match self.root.stat(DATA)? {
                Some(_) => self.root.set_mode(DATA, mode),
                None => Ok(()),
            }
        };
        match sharing {
            Sharing::All => {
                for name in OWN {
                    self.root.set_mode(name, PRIVATE)?;
                }
                match self.root.create(SHARED_MARK) {
                    Ok(_) => {}
                    Err(error) if error.is(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
                self.root.set_mode(SHARED_MARK, Mode::from_raw_mode(0o444))?;
                self.prove()?;
                read_by_all(SHARED)?;
                // What keeps others out until all else is as it has to be.
                self.root.set_mode_self(SHARED)?;
            }
            Sharing::Owner => {
                self.root.set_mode_self(PRIVATE)?;
                read_by_all(PRIVATE)?;
                self.root.unlink(SHARED_MARK)?;
            }
        }
        self.root.sync()
    }

    /// Proves that root of the host shares the store, if it does, and if the file system has such xattrs.
    fn prove(&self) -> Result<(), DiskError> {
        if !self.who.is_host_root() || self.root.stat_self()?.st_uid != 0 {
            return Ok(());
        }
        let Some(mark) = self.mark()? else { return Ok(()) };
        match rustix::fs::fsetxattr(&mark, PROOF, &NO_CAPABILITY, XattrFlags::empty()) {
            Ok(()) => Ok(()),
            // Root may lack the capability to set capabilities.
            Err(errno @ (Errno::OPNOTSUPP | Errno::PERM)) => {
                tracing::debug!(%errno, "programs in user namespaces cannot use the store");
                Ok(())
            }
            Err(errno) => Err(self.root.failed("mark", SHARED_MARK, errno)),
        }
    }

    fn mark(&self) -> Result<Option<OwnedFd>, DiskError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::openat(&self.root, SHARED_MARK, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.root.failed("open", SHARED_MARK, errno)),
        }
    }

    /// As [`lock_shared`](Self::lock_shared), for users whom it is shared with. `gc` holds it for as long as it works, and any
    /// user can: so it is not waited for for ever.
    pub(crate) fn lock_as_reader(&self) -> Result<Option<Lock>, DiskError> {
        let Some(fd) = self.mark()? else {
            return Err(self.root.failed("open", SHARED_MARK, Errno::ACCESS));
        };
        let locked = self.try_for_a_while(fd, FlockOperation::NonBlockingLockShared)?;
        Ok(locked.map(Lock::of))
    }

    /// Keeps new readers out, and waits for the others, if there may be some.
    pub(crate) fn wait_for_readers(&self) -> Result<Option<OwnedFd>, DiskError> {
        match self.mark()? {
            Some(fd) => self.try_for_a_while(fd, FlockOperation::NonBlockingLockExclusive),
            None => Ok(None),
        }
    }

    fn try_for_a_while(
        &self,
        fd: OwnedFd,
        how: FlockOperation,
    ) -> Result<Option<OwnedFd>, DiskError> {
        let since = Instant::now();
        loop {
            if self.is_given_up() {
                return Err(self.root.failed("lock", SHARED_MARK, Errno::INTR));
            }
            match rustix::fs::flock(&fd, how) {
                Ok(()) => return Ok(Some(fd)),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if since.elapsed() < PATIENCE => std::thread::sleep(POLL),
                Err(Errno::WOULDBLOCK) => {
                    let mark = self.root.path_of(SHARED_MARK);
                    tracing::warn!(
                        "`gc` or another user keeps {} locked (`lslocks` names the process): it is not waited for any longer",
                        mark.display()
                    );
                    return Ok(None);
                }
                Err(errno) => return Err(self.root.failed("lock", SHARED_MARK, errno)),
            }
        }
    }
}
