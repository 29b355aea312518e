//! The folder of a service, which has its sockets and its lock.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::client::LazyService;
use super::last_holder::{self, LazyWatch, is_locked};
use super::service::{LEAVE, ServiceError};

/// Pause between two requests to the running service to exit.
const ASK: Duration = Duration::from_millis(100);
/// Pause between two checks whether the running service has exited.
const TURN: Duration = Duration::from_millis(2);
/// Locked by the folder's only service.
pub(super) const LOCK: &str = "lock";

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

/// Whether a running service is asked to exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Yes. Readers wait until the new service has taken over.
    Yes,
    /// No, it stays.
    No,
}

fn make_folder(folder: &Path, user: u32) -> Result<(), ServiceError> {
    let failed = |source| ServiceError::Path { path: folder.to_owned(), source };
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder).map_err(failed)?;
    let found = fs::symlink_metadata(folder).map_err(failed)?;
    let is_ours = found.uid() == user;
    if is_ours && found.is_dir() && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(ServiceError::Folder(folder.to_owned()))
}

/// The lock of a folder. If the service that exited was the only holder of its group besides this process, the watch
/// now holds the group.
pub(super) type FolderLock = (File, Option<LazyWatch>);

/// Creates the folder and locks it for this process.
pub(super) fn lock(folder: &Path, user: u32, replace: Replace) -> Result<FolderLock, ServiceError> {
    let path = folder.join(LOCK);
    let failed = |source| ServiceError::Path { path: path.clone(), source };
    let begun = Instant::now();
    let (mut watch, mut asked) = (None, None);
    loop {
        let made = make_folder(folder, user).and_then(|()| {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).open(&path).map_err(failed)
        });
        let file = match made {
            // A service that just ended has removed the folder.
            Err(ServiceError::Path { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                if begun.elapsed() > LEAVE {
                    return Err(failed(source));
                }
                continue;
            }
            made => made?,
        };
        // If another service holds the lock, this is handled below.
        match last_holder::lock(&file, &|| replace == Replace::Yes) {
            Ok(()) if is_at(&file, &path) => return Ok((file, watch)),
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if replace == Replace::No => return Err(ServiceError::Another),
            Err(Errno::WOULDBLOCK) if begun.elapsed() > LEAVE => return Err(ServiceError::Stays),
            Err(Errno::WOULDBLOCK) => {
                // The other service may have just started to listen, so the request is repeated.
                if asked.is_none_or(|it: Instant| it.elapsed() > ASK) {
                    if let Ok(Some(service)) = LazyService::connect(folder) {
                        watch = service.watch(folder).ok().or(watch);
                        let _asked = service.leave();
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

/// Returns whether a service has locked the folder.
pub(super) fn is_held(folder: &Path) -> io::Result<bool> {
    match File::open(folder.join(LOCK)) {
        Ok(lock) => is_locked(&lock),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether a path still refers to this file.
fn is_at(file: &File, path: &Path) -> bool {
    let numbers = |found: io::Result<fs::Metadata>| found.map(|it| (it.dev(), it.ino())).ok();
    let there = numbers(fs::symlink_metadata(path));
    there.is_some() && there == numbers(file.metadata())
}
