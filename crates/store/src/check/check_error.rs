//! Reasons why a check stops, and whether an error shows that a file is damaged.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use image::verity::ImageId;

use crate::disk::DiskError;
use crate::operation::OperationError;

/// A reason why a check could not be completed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsckError {
    #[error("the store has no image {0}")]
    Absent(ImageId),
    /// Imports are running, and may rely on damaged files.
    #[error("cannot repair the store while imports run: try again after they end")]
    Busy,
    /// A service may have the damaged snapshots mounted.
    #[error(
        "the service of instance {0} uses its snapshots, so its damaged snapshots stay: stop it \
        first (`systemctl stop quire-snapshotter`), and repair again"
    )]
    SnapshotsInUse(String),
    /// Something needs a container's snapshot that is damaged.
    #[error(
        "{user} needs snapshot {id}, so the damaged snapshot stays: remove what needs it \
        (`quire rm --force`, `quire snapshot rm`), and repair again"
    )]
    SnapshotNeeded {
        id: String,
        /// Kind and name of what needs it.
        user: String,
    },
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(PathBuf),
    /// A file could not be checked, for a reason that does not show damage.
    #[error("the check stopped early, so the rest of the store is unchecked; run it again: {0}")]
    Unchecked(String),
    /// A disk error that is not damage to one file.
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Returns the damage that an error shows, as text.
///
/// # Errors
/// [`FsckError::Unchecked`] if the error does not show damage: memory or descriptors ran out, or this user may not
/// read the file. Treating that as damage would remove sound files.
pub(crate) fn damage(error: &(dyn Error + 'static)) -> Result<String, FsckError> {
    match errno(error) {
        Some(errno) if !speaks_of_the_file(errno) => Err(FsckError::Unchecked(chain(error))),
        _ => Ok(chain(error)),
    }
}

/// As [`damage`], for a result.
pub(crate) fn found<T, E: Error + 'static>(
    looked: Result<T, E>,
) -> Result<Result<T, String>, FsckError> {
    match looked {
        Ok(value) => Ok(Ok(value)),
        Err(error) => damage(&error).map(Err),
    }
}

/// Whether an error of the kernel shows that the data on the disk is wrong, or is not a file. All other errors
/// concern the machine, or the permissions of the caller.
const fn speaks_of_the_file(errno: Errno) -> bool {
    matches!(
        errno,
        // The disk cannot read the data. Or the file system, checksums of btrfs, or fs-verity (EIO) detect that it has
        // changed.
        Errno::IO | Errno::UCLEAN | Errno::BADMSG | Errno::NODATA
        // A symlink, a socket or a device, a directory, or a path below a file that is not a directory.
        | Errno::LOOP | Errno::NXIO | Errno::ISDIR | Errno::NOTDIR
        // The file vanished, or is longer than any file can be.
        | Errno::NOENT | Errno::OVERFLOW | Errno::FBIG
    )
}

/// Returns the kernel's error code in a chain of errors, if there is one.
fn errno(error: &(dyn Error + 'static)) -> Option<Errno> {
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        if let Some(error) = error.downcast_ref::<io::Error>() {
            if let Some(errno) = Errno::from_io_error(error) {
                return Some(errno);
            }
            if error.kind() == io::ErrorKind::OutOfMemory {
                return Some(Errno::NOMEM);
            }
            // `source` of an `io::Error` skips the inner error, so the loop continues with the inner error.
            next = error.get_ref().map(|it| it as &(dyn Error + 'static));
        }
    }
    None
}

/// Formats an error with all of its causes, for a report.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn os(errno: Errno) -> io::Error {
        errno.into()
    }

    #[test]
    fn what_the_machine_cannot_do_is_no_damage() {
        for errno in [
            Errno::NOMEM,
            Errno::MFILE,
            Errno::NFILE,
            Errno::INTR,
            Errno::ACCESS,
            Errno::PERM,
            Errno::AGAIN,
        ] {
            let wrapped = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, os(errno)));
            for error in [os(errno), io::Error::other(os(errno)), wrapped] {
                assert!(matches!(damage(&error), Err(FsckError::Unchecked(_))), "{error:?}");
            }
        }
        assert!(damage(&io::Error::from(io::ErrorKind::OutOfMemory)).is_err());
    }

    #[test]
    fn what_the_disk_says_of_a_file_is() {
        for errno in [Errno::IO, Errno::UCLEAN, Errno::BADMSG, Errno::LOOP, Errno::ISDIR] {
            assert!(damage(&os(errno)).is_ok(), "{errno:?}");
        }
        let short = io::Error::from(io::ErrorKind::UnexpectedEof);
        assert!(damage(&io::Error::other(short)).is_ok());
        assert_eq!(damage(&io::Error::other("bad magic")).unwrap(), "bad magic");
    }
}
