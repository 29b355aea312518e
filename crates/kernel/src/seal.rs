//! Sealed files: the immutable flag, and the test for fs-verity.

use std::os::fd::BorrowedFd;

use rustix::fs::IFlags;
use rustix::io::Errno;

use crate::fd_name::name_of;

/// An error of reading or changing a file's seal.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The file system has no such flag (tmpfs before 6.6, NFS, FUSE).
    #[error("the file system of {file} has no immutable flag")]
    Unsupported { file: String, source: Errno },
    /// Setting or clearing the flag needs `CAP_LINUX_IMMUTABLE`.
    #[error("cannot change the immutable flag of {file} without CAP_LINUX_IMMUTABLE")]
    Forbidden { file: String, source: Errno },
    /// Another error of the kernel.
    #[error("cannot {action} the inode flags of {file}")]
    Flags {
        /// "read" or "change".
        action: &'static str,
        file: String,
        source: Errno,
    },
}

/// A kind of seal that prevents changes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sealed {
    /// fs-verity: the data cannot change, and every read is verified. Links can be added and removed.
    Verity,
    /// The immutable flag: write, link, rename and unlink fail until it is cleared. Reads are not verified.
    Immutable,
    /// The file has no seal, only its permissions.
    No,
}

/// `FS_VERITY_FL` of include/uapi/linux/fs.h, which rustix does not name.
const VERITY: IFlags = IFlags::from_bits_retain(0x0010_0000);

/// Returns the kind of a file's seal. Also returns [`Sealed::No`] if the file system has no flags.
pub fn sealed(file: BorrowedFd<'_>) -> Result<Sealed, SealError> {
    match rustix::fs::ioctl_getflags(file) {
        Ok(flags) if flags.contains(VERITY) => Ok(Sealed::Verity),
        Ok(flags) if flags.contains(IFlags::IMMUTABLE) => Ok(Sealed::Immutable),
        Ok(_) | Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(Sealed::No),
        Err(source) => Err(SealError::Flags { action: "read", file: name_of(file), source }),
    }
}

/// Makes a file immutable. Link it to its final name first, because the flag also forbids linking.
///
/// # Errors
/// [`SealError`]; the file is then unchanged.
pub fn set_immutable(file: BorrowedFd<'_>) -> Result<(), SealError> {
    change(file, |flags| flags | IFlags::IMMUTABLE)
}

/// Clears the immutable flag, so that a file can be unlinked. Does nothing if the flag is not set.
///
/// # Errors
/// Those of [`set_immutable`], except that a file without the flag is not an error.
pub fn clear_immutable(file: BorrowedFd<'_>) -> Result<(), SealError> {
    match sealed(file)? {
        Sealed::No => Ok(()),
        Sealed::Immutable | Sealed::Verity => change(file, |flags| flags - IFlags::IMMUTABLE),
    }
}

fn change(file: BorrowedFd<'_>, to: impl Fn(IFlags) -> IFlags) -> Result<(), SealError> {
    let failed = |action, source| match source {
        Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS => {
            SealError::Unsupported { file: name_of(file), source }
        }
        Errno::PERM => SealError::Forbidden { file: name_of(file), source },
        _ => SealError::Flags { action, file: name_of(file), source },
    };
    let before = rustix::fs::ioctl_getflags(file).map_err(|errno| failed("read", errno))?;
    let after = to(before);
    if after == before {
        return Ok(());
    }
    rustix::fs::ioctl_setflags(file, after).map_err(|errno| failed("change", errno))
}
