//! Filestores for roots in which other programs, such as engines, run containers. Each filestore is attached at a
//! directory of the host, and limits the size of the data in it.

use std::ffi::OsStr;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use kernel::mount::Durability;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use store::OperationError;

use crate::root::filestore::{self, Backing, FilestoreError};
use crate::root::headroom::Headroom;
use crate::root::upper_dir::{Doomed, mount_ext4, open_upper};

/// Reason why the data in a directory cannot be limited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SizeLimitError {
    /// The file cannot be made.
    #[error(transparent)]
    Make(#[from] FilestoreError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Creates a filestore of this size, 16 MiB to 16 TiB, with a name in a folder. Templates are kept in `templates`.
///
/// # Errors
/// [`SizeLimitError`]; the filestore then does not exist.
pub fn make_filestore(
    templates: BorrowedFd<'_>,
    bytes: NonZeroU64,
    folder: &Path,
    name: &str,
    search: &OsStr,
) -> Result<(), SizeLimitError> {
    let file = filestore::make(templates, bytes, Durability::Durable, Backing::Ahead, search)?;
    let path = folder.join(name);
    // The filestore is synced before it gets its name, so that a file with this name is complete, even after a crash.
    rustix::fs::fsync(&file).map_err(OperationError::at("sync", &path))?;
    let opened = directory(folder).map_err(OperationError::at("open", folder))?;
    filestore::name(file.as_fd(), opened.as_fd(), name)
        .map_err(OperationError::at("name", &path))?;
    Ok(rustix::fs::fsync(&opened).map_err(OperationError::at("sync", folder))?)
}

/// Mounts a filestore at a directory. Synced data in it survives a crash.
pub fn attach_filestore(file: &Path, at: &Path) -> Result<(), SizeLimitError> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(file, flags, Mode::empty());
    let opened = opened.map_err(OperationError::at("open", file))?;
    let mounted = mount_ext4(opened.as_fd(), Durability::Durable);
    let attached = mounted.and_then(|it| it.attach_at(at));
    Ok(attached.map_err(OperationError::at("mount", file))?)
}

/// Returns the reserve of disk space for an attached filestore, over which a root was made.
pub fn headroom_of(file: &Path, at: &Path) -> Result<Headroom, OperationError> {
    let upper = directory(at).and_then(|it| {
        open_upper(it.as_fd()).map_err(|error| match error {
            crate::root::UpperError::Prepare(errno) => errno,
            _ => Errno::IO,
        })
    });
    let upper = upper.map_err(OperationError::at("reserve space for", file))?;
    Headroom::open(upper.as_fd(), file, Durability::Durable)
}

/// Drops unwritten data, so that unmounting need not wait for it. Has no effect if the filestore is not attached.
pub fn shut_down_filestore(at: &Path) {
    let device = |it: &File| it.metadata().map(|it| it.dev());
    // The comparison uses open descriptors, which are not affected by concurrent mounts and unmounts. Otherwise the
    // host's own file system could be shut down.
    let opened = File::open(at).and_then(|it| Ok((device(&it)?, it)));
    let above = File::open(at.parent().unwrap_or(at)).and_then(|it| device(&it));
    if let (Ok((here, directory)), Ok(above)) = (opened, above)
        && here != above
    {
        Doomed::of_filestore(directory.into(), Durability::Durable).shut_down();
    }
}

fn directory(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty())
}
