//! Stores that all users of the host may read, because the owner shares them: one pull, and one copy on disk and in
//! memory.
//!
//! Readers do not lock the files that imports lock. Instead, they lock the mark (the file `shared`) while they open an
//! image. `gc` waits for this lock for a limited time. A reader for which `gc` did not wait gets an error, and never
//! wrong bytes.

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

/// Maximum time for which `gc` and readers wait for each other. Readers hold the lock for milliseconds, unless they
/// want to block others.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// A shared store that belongs to root or to this user.
#[derive(Debug, Clone)]
pub struct SharedStore {
    directory: PathBuf,
    /// Device and inode number of the directory that was checked.
    identity: (u64, u64),
}

/// A reason why the store of another user is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotShared {
    /// The directory has no store, or its store is not shared.
    #[error("the store {} is not shared with you: its owner can share it with `quire share`", .0.display())]
    Unshared(PathBuf),
    /// In this user namespace, the owner of the store cannot be identified.
    #[error(
        "ignoring a shared store: in this user namespace, {} does not prove that the host's root \
        shares it: run `sudo quire share` there", .0.display()
    )]
    Unproven(PathBuf),
    /// Another user owns the store or a part of it, and can change it.
    #[error("ignoring a shared store: {} belongs to user {user}, who can change it; only root can \
        share a store", path.display())]
    Owner {
        path: PathBuf,
        /// User id of the owner.
        user: u32,
    },
    /// Group or others may write to the store or a part of it.
    #[error(
        "ignoring a shared store: {} has the mode {mode:04o}, so others can change it: `chmod \
        go-w {}`",
        path.display(), path.display()
    )]
    Writable {
        path: PathBuf,
        /// Permission bits.
        mode: u32,
    },
}

/// Xattr of the mark, which proves in a user namespace that root of the host shares the store. In such a namespace,
/// the owner of root's files is shown as the overflow uid, like the owners of all other files whose users the
/// namespace does not map. But only root of the host can set this value: if root of another user namespace sets it,
/// the kernel adds the user id of that root, and returns `EOVERFLOW` to readers in other namespaces. Source: Linux
/// `security/commoncap.c`, `cap_convert_nscap` and `cap_inode_getsecurity`.
const PROOF: &str = "security.capability";
/// Value without any capability. Source: Linux `include/uapi/linux/capability.h`, `VFS_CAP_REVISION_2` and
/// `struct vfs_cap_data`.
const NO_CAPABILITY: [u8; 20] = [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The users who may own files of a store, besides root.
#[derive(Debug, Clone, Copy)]
struct Owners {
    user: u32,
    /// The overflow uid, if the mark proves that root of the host is the owner. It is shown for all users that this
    /// namespace does not map.
    unknown: Option<u32>,
}

impl Owners {
    fn for_directory(directory: &Path, who: Who) -> Self {
        let is_elsewhere = who.namespace == UserNamespace::Other;
        let unknown = (is_elsewhere && is_proven(directory)).then(overflow_user);
        Self { user: who.user, unknown }
    }
}

/// Whether the mark proves that root of the host shares the store in this directory.
fn is_proven(directory: &Path) -> bool {
    let mark = directory.join(SHARED_MARK);
    // A mark with a second hard link may belong to another store.
    let is_whole = std::fs::symlink_metadata(&mark).is_ok_and(|it| it.is_file() && it.nlink() == 1);
    let mut value = [0; NO_CAPABILITY.len() + 1];
    let length = rustix::fs::lgetxattr(&mark, PROOF, &mut value);
    is_whole && length.is_ok_and(|it| value.get(..it) == Some(&NO_CAPABILITY[..]))
}

/// Returns the overflow uid. Source: Linux `Documentation/admin-guide/sysctl/fs.rst`, `overflowuid`.
fn overflow_user() -> u32 {
    let set = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    set.ok().and_then(|it| it.trim().parse().ok()).unwrap_or(65_534)
}

/// Entries of a shared store that readers use.
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
    /// Checks that the store in this directory is shared, and that only trusted users can change it. In a user
    /// namespace that does not map root of the host, this relies on the mark's xattr.
    ///
    /// # Errors
    /// [`NotShared`] with the reason why the store is not used.
    pub fn for_directory(directory: &Path, who: Who) -> Result<Self, NotShared> {
        let unshared = || NotShared::Unshared(directory.to_owned());
        let mark = std::fs::symlink_metadata(directory.join(SHARED_MARK));
        mark.map_err(|_absent| unshared())?;
        let own = std::fs::metadata(directory).map_err(|_absent| unshared())?;
        let owners = Owners::for_directory(directory, who);
        if who.namespace == UserNamespace::Other
            && owners.unknown.is_none()
            && own.uid() == overflow_user()
        {
            return Err(NotShared::Unproven(directory.to_owned()));
        }
        check(directory, &own, owners)?;
        // Files in these directories belong to root, unless root changed their owner.
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

    /// Opens the store to read and mount images.
    ///
    /// # Errors
    /// [`StoreError`], also if the checked directory was replaced by another one.
    pub fn open(&self, who: Who) -> Result<Store, StoreError> {
        let mut store = Store::open(&self.directory, who, OpenOptions::read())?;
        let found = store.root.stat_self()?;
        if (found.st_dev, found.st_ino) != self.identity {
            return Err(store
                .root
                .failed("open a replaced directory instead of", "", Errno::STALE)
                .into());
        }
        store.sharer = Some(found.st_uid);
        Ok(store)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }
}

impl Store {
    /// Whether the store was opened as this process's own store, not as a [`SharedStore`].
    #[must_use]
    pub const fn is_own(&self) -> bool {
        self.sharer.is_none()
    }

    /// Returns who may read the store.
    ///
    /// # Errors
    /// [`DiskError`] if the mark cannot be looked up.
    pub fn sharing(&self) -> Result<Sharing, DiskError> {
        let mark = self.root.stat(SHARED_MARK)?;
        Ok(if mark.is_some() { Sharing::All } else { Sharing::Owner })
    }

    /// Changes who may read the store. If the change is interrupted, others can access less than intended, and never
    /// more.
    ///
    /// # Errors
    /// [`DiskError`] if this user may not change the permissions or the store.
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
                // Other users cannot open files that are not synced. The lock keeps others from publishing some.
                self.settle()?;
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
                // The mode of the store's own directory keeps other users out until everything else is ready.
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

    /// Marks that root of the host shares the store, if that is true and the file system supports such xattrs.
    fn prove(&self) -> Result<(), DiskError> {
        if !self.who.is_host_root() || self.root.stat_self()?.st_uid != 0 {
            return Ok(());
        }
        let Some(mark) = self.mark()? else { return Ok(()) };
        match rustix::fs::fsetxattr(&mark, PROOF, &NO_CAPABILITY, XattrFlags::empty()) {
            Ok(()) => Ok(()),
            // Root may lack `CAP_SETFCAP`.
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

    /// As [`lock_shared`](Self::lock_shared), for users of a shared store. The wait is limited, because `gc` holds
    /// the lock while it works, and any user can hold it.
    pub(crate) fn lock_as_reader(&self) -> Result<Option<Lock>, DiskError> {
        let Some(fd) = self.mark()? else {
            return Err(self.root.failed("open", SHARED_MARK, Errno::ACCESS));
        };
        let locked = self.try_for_a_while(fd, FlockOperation::NonBlockingLockShared)?;
        Ok(locked.map(Lock::from_fd))
    }

    /// If the store is shared, blocks new readers and waits for the current ones.
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
                        "timed out waiting for a lock: `gc` or another user keeps {} locked \
                        (`lslocks` names the process)",
                        mark.display()
                    );
                    return Ok(None);
                }
                Err(errno) => return Err(self.root.failed("lock", SHARED_MARK, errno)),
            }
        }
    }
}
