//! The folder of a service, which has its sockets and its lock.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use store::Store;

use super::client::{ClientError, LazyService};
use super::wire::{LEAVE, SERVICE_SOCKET};

/// Pause between two requests to the running service to exit.
const ASK: Duration = Duration::from_millis(100);
/// Pause between two checks whether the running service has exited.
const TURN: Duration = Duration::from_millis(2);
/// Locked by the folder's only service.
const LOCK: &str = "lock";

/// Why a folder cannot be used by a new service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// Another service has locked the folder.
    #[error(
        "another process already fills the lazy devices of this store: `quire serve --lazy \
        --replace` replaces it"
    )]
    Another,
    /// The service that was asked to exit still runs.
    #[error("the previous service has not exited within {} seconds", LEAVE.as_secs())]
    Stays,
    /// The running service cannot be replaced.
    #[error("cannot replace the running service")]
    Running(#[source] ClientError),
    /// Another user could write into the folder.
    #[error("{} belongs to another user, or others can write to it: remove it", .0.display())]
    Owner(PathBuf),
    /// The folder or a file in it cannot be used.
    #[error("cannot use {}", path.display())]
    Path { path: PathBuf, source: io::Error },
}

/// Returns the folder of the service of a store. Its name contains the device and inode number of the store's
/// directory, so it does not depend on the path.
///
/// # Errors
/// If the directory cannot be examined.
pub fn folder_of(store: &Path) -> io::Result<PathBuf> {
    let found = fs::metadata(store)?;
    let name = format!("lazy-{:x}-{}", found.dev(), found.ino());
    Ok(Path::new(container::boot_cache::FOLDER).join(name))
}

/// Makes the service of a store, if one runs, release unused devices.
pub fn release(store: &Store) {
    let asked = folder_of(store.path()).and_then(|folder| LazyService::connect(&folder));
    match asked.map(|service| service.map(|it| it.release())) {
        Ok(None | Some(Ok(()))) => {}
        // The service keeps these devices in use, so `gc` keeps them as well.
        Ok(Some(Err(error))) => {
            tracing::warn!(%error, "the service for lazy devices does not release its devices");
        }
        Err(error) => tracing::debug!(%error, "cannot reach the service for lazy devices"),
    }
}

/// Whether a running service is asked to exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Yes. Readers wait until the new service has taken over.
    Yes,
    /// No, it stays.
    No,
}

fn make_folder(folder: &Path, user: u32) -> Result<(), FolderError> {
    let failed = |source| FolderError::Path { path: folder.to_owned(), source };
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder).map_err(failed)?;
    let found = fs::symlink_metadata(folder).map_err(failed)?;
    let is_ours = found.uid() == user;
    if is_ours && found.is_dir() && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(FolderError::Owner(folder.to_owned()))
}

/// Creates the folder and locks it for this process.
pub(super) fn lock(folder: &Path, user: u32, replace: Replace) -> Result<File, FolderError> {
    let path = folder.join(LOCK);
    let failed = |source| FolderError::Path { path: path.clone(), source };
    let begun = Instant::now();
    let mut asked = None;
    loop {
        let made = make_folder(folder, user).and_then(|()| {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).open(&path).map_err(failed)
        });
        let file = match made {
            // A service that just ended has removed the folder.
            Err(FolderError::Path { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                if begun.elapsed() > LEAVE {
                    return Err(failed(source));
                }
                continue;
            }
            made => made?,
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_at(&file, &path) => return Ok(file),
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if replace == Replace::No => return Err(FolderError::Another),
            Err(Errno::WOULDBLOCK) if begun.elapsed() > LEAVE => return Err(FolderError::Stays),
            Err(Errno::WOULDBLOCK) => {
                // The other service may have just started to listen, so the request is repeated.
                if asked.is_none_or(|it: Instant| it.elapsed() > ASK) {
                    if let Ok(Some(service)) = LazyService::connect(folder)
                        && let Err(error @ ClientError::OtherVersion) = service.leave()
                    {
                        return Err(FolderError::Running(error));
                    }
                    asked = Some(Instant::now());
                }
                thread::sleep(TURN);
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

/// Removes the folder of a keeper whose service has ended, unless another service has it.
pub(super) fn remove(folder: &Path) {
    let path = folder.join(LOCK);
    match File::options().write(true).open(&path) {
        Ok(file) => {
            let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
            if locked.is_ok() && is_at(&file, &path) {
                remove_locked(folder);
            }
        }
        // The service removed its lock. If another one is about to start, it finds or creates the folder.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let _gone = fs::remove_dir(folder);
        }
        Err(error) => tracing::debug!(%error, folder = %folder.display(), "the folder stays"),
    }
}

/// Removes the folder of a service, which has the lock. A service that waits for the lock creates the folder again.
pub(super) fn remove_locked(folder: &Path) {
    // A service that died has left its socket.
    for name in [SERVICE_SOCKET, LOCK] {
        let _gone = fs::remove_file(folder.join(name));
    }
    let _gone = fs::remove_dir(folder);
}

/// Returns whether a path still refers to this file.
fn is_at(file: &File, path: &Path) -> bool {
    let numbers = |found: io::Result<fs::Metadata>| found.map(|it| (it.dev(), it.ino())).ok();
    let there = numbers(fs::symlink_metadata(path));
    there.is_some() && there == numbers(file.metadata())
}
