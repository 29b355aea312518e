//! The directory with the state of the networks of running containers, which the next boot removes.
//!
//! | name | content |
//! |---|---|
//! | `lock` | locked by each command that reads or changes the other files |
//! | `attached/ID` | [`Attachment`](super::attachment::Attachment), locked by the container's monitor |
//! | `new` | a record of `attached/` that is being written |
//! | `last/BRIDGE` | the address that a container of the network got last |
//! | `ns/ID` | mount of a container's network namespace, so that netavark finds it |
//! | `netavark/` | files of netavark and aardvark-dns |
//! | `users`, `keeper`, `tools/`, `resolv.conf`, `network` | see [`super::keeper`] |

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use store::{OperationError, Who};

use super::NetworksError;
use crate::backoff::GLANCE;

/// How long to wait for other commands, each of which calls netavark for less than a second.
const LOCKED: Duration = Duration::from_secs(60);

/// Where the bridges are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// In the host's network.
    Host,
    /// In the network of a keeper.
    Keeper,
}

/// The directory of a user.
#[derive(Debug, Clone)]
pub struct NetworkPlace {
    pub(super) folder: PathBuf,
    pub(super) side: Side,
    /// Number of the user who owns the directory.
    user: u32,
}

impl NetworkPlace {
    /// Returns the place in `folder`, which is made when it is needed. `who` is the user of this process.
    #[must_use]
    pub fn new(folder: PathBuf, who: Who) -> Self {
        let side = if who.is_host_root() { Side::Host } else { Side::Keeper };
        Self { folder, side, user: who.user }
    }

    /// Whether published ports can be forwarded.
    #[must_use]
    pub const fn can_publish(&self) -> bool {
        matches!(self.side, Side::Host)
    }

    /// Whether a container was ever connected since the boot.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.path(ATTACHED).exists()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Makes the directories. Fails if other users can write to them.
    pub(super) fn make(&self) -> Result<(), NetworksError> {
        let parent = self.folder.parent();
        for folder in parent.into_iter().chain([self.folder.as_path()]) {
            make_directory(folder, 0o755, self.user).map_err(OperationError::at("make", folder))?;
        }
        for name in [ATTACHED, LAST, NAMESPACES, NETAVARK] {
            let path = self.path(name);
            make_directory(&path, 0o700, self.user).map_err(OperationError::at("make", &path))?;
        }
        Ok(())
    }

    /// Takes the lock of the place. It is released when the descriptor is closed.
    ///
    /// # Errors
    /// If the directory cannot be used, or another command holds the lock for too long.
    pub fn lock(&self) -> Result<OwnedFd, NetworksError> {
        self.make()?;
        let path = self.path(LOCK);
        let failed = OperationError::at("lock", &path);
        let lock = self.open(LOCK).map_err(failed)?;
        let since = Instant::now();
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(lock),
                Err(Errno::WOULDBLOCK | Errno::INTR) if since.elapsed() < LOCKED => {
                    std::thread::sleep(GLANCE);
                }
                Err(errno) => return Err(failed(errno.into()).into()),
            }
        }
    }

    /// Opens a file of the place, and makes it if it does not exist.
    pub(super) fn open(&self, name: &str) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(rustix::fs::open(self.path(name), flags | OFlags::CLOEXEC, mode)?)
    }
}

pub(super) const LOCK: &str = "lock";
pub(super) const ATTACHED: &str = "attached";
pub(super) const LAST: &str = "last";
pub(super) const NAMESPACES: &str = "ns";
pub(super) const NETAVARK: &str = "netavark";
/// Directory of the programs that netavark may call: without `systemd-run`, which would move aardvark-dns out of the
/// keeper's reach.
pub(super) const TOOLS: &str = "tools";

fn make_directory(path: &Path, mode: u32, user: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = std::fs::symlink_metadata(path)?;
    // In a user's namespace, the user has the number of root. Root itself is trusted.
    let is_ours = [user, 0].contains(&found.uid()) && found.mode() & 0o22 == 0;
    if !found.is_dir() || !is_ours {
        let why = "it is not a directory that only this user can write";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

/// Removes a file, if it exists.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads a small file.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    const LARGEST: u64 = 1 << 20;
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}
