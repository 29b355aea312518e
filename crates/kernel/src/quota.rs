//! Project quotas, which limit the disk space of a directory and everything below it.
#![expect(
    unsafe_code,
    reason = "rustix has no FS_IOC_FSSETXATTR, and neither crate has quotactl_fd"
)]

use std::num::NonZeroU64;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, Setter};

use crate::last_errno;

/// The error of [`limit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// The file system has no project quotas, or does not enforce them.
    #[error("its file system does not enforce project quotas")]
    NotEnforced,
    /// Every project id that was tried is in use.
    #[error("none of the {TRIES} project ids tried is free")]
    NoId,
    /// A system call failed.
    #[error("cannot {step}")]
    Kernel {
        step: &'static str,
        /// `EPERM` if the caller is not the host's root, who alone sets quotas.
        source: Errno,
    },
}

/// The project ids that Quire assigns. The range avoids those of administrators (`/etc/projid`) and of other engines,
/// which count up from small numbers.
const IDS: std::ops::Range<u32> = 0x5100_0000..0x5200_0000;

/// Number of ids to try before [`QuotaError::NoId`].
const TRIES: u32 = 256;

/// Limits the disk space, in bytes, of an empty directory and of all files created below it later. The kernel stores
/// the limit on the disk, and refuses further writes with `EDQUOT` or `ENOSPC`. `statfs` of the directory returns the
/// limit as its size. Processes with `CAP_SYS_RESOURCE` are not limited on ext4, but overlayfs writes to its upper
/// layer without that capability (Linux `fs/overlayfs/super.c`, `ovl_fill_super`).
///
/// In the initial user namespace, the owner of a file can change its project id and so exempt the file from the limit
/// (Linux `fs/file_attr.c`, `fileattr_set_prepare`). In other user namespaces no process can.
///
/// A project id is free when no file has it, so removing the directory frees its id.
pub fn limit(directory: BorrowedFd<'_>, bytes: NonZeroU64) -> Result<(), QuotaError> {
    if !is_enforced(directory)? {
        return Err(QuotaError::NotEnforced);
    }
    let stat = rustix::fs::fstat(directory)
        .map_err(|source| QuotaError::Kernel { step: "examine the directory", source })?;
    let count = IDS.end - IDS.start;
    // Directories have different inode numbers, so containers that start at the same time try different ids first.
    let first = u32::try_from(stat.st_ino % u64::from(count)).unwrap_or(0);
    for id in (0..TRIES).map(|it| IDS.start + (first + it) % count) {
        if files_of(directory, id)? != 0 {
            continue;
        }
        let before = set_project(directory, id)?;
        // Another process may have taken the id since the check. Then both processes count two files with the id, and
        // try the next id.
        if files_of(directory, id)? == 1 {
            return set_limit(directory, id, bytes);
        }
        let _ours = set_project(directory, before)?;
    }
    Err(QuotaError::NoId)
}

/// Tests whether the file system of a directory refuses writes above a project's limit.
fn is_enforced(directory: BorrowedFd<'_>) -> Result<bool, QuotaError> {
    let mut state = State { version: STATE_VERSION, ..State::default() };
    match quotactl(directory, GET_STATE, 0, &mut state) {
        Ok(()) => Ok(state.flags & PROJECTS_ENFORCED != 0),
        // The kernel does not support quotas, or the file system has no quotas, or no quotas for projects.
        Err(Errno::NOSYS | Errno::INVAL | Errno::SRCH | Errno::OPNOTSUPP | Errno::NOTTY) => {
            Ok(false)
        }
        Err(source) => Err(QuotaError::Kernel { step: "read the state of project quotas", source }),
    }
}

/// Returns the number of files, including directories, that have a project id.
fn files_of(directory: BorrowedFd<'_>, id: u32) -> Result<u64, QuotaError> {
    let mut quota = Quota::default();
    match quotactl(directory, GET_QUOTA, id, &mut quota) {
        Ok(()) => Ok(quota.files),
        // XFS has no record for an id that was never used.
        Err(Errno::NOENT | Errno::SRCH) => Ok(0),
        Err(source) => Err(QuotaError::Kernel { step: "read a project's quota", source }),
    }
}

fn set_limit(directory: BorrowedFd<'_>, id: u32, bytes: NonZeroU64) -> Result<(), QuotaError> {
    let limit = bytes.get().div_ceil(BLOCK);
    let mut quota = Quota { hard_limit: limit, valid: VALID_LIMITS, ..Quota::default() };
    quotactl(directory, SET_QUOTA, id, &mut quota)
        .map_err(|source| QuotaError::Kernel { step: "set a project's quota", source })
}

/// Sets a directory's project id, which new files in it inherit, and returns the previous id.
fn set_project(directory: BorrowedFd<'_>, id: u32) -> Result<u32, QuotaError> {
    let failed = |source| QuotaError::Kernel { step: "set a directory's project id", source };
    // SAFETY: FS_IOC_FSGETXATTR writes exactly this struct, whose size is asserted below.
    let get = unsafe { Getter::<GET_ATTRIBUTES, Attributes>::new() };
    // SAFETY: as above; the argument lives through the call.
    let mut attributes = unsafe { rustix::ioctl::ioctl(directory, get) }.map_err(failed)?;
    let before = attributes.project;
    attributes.project = id;
    attributes.flags |= INHERIT;
    // SAFETY: FS_IOC_FSSETXATTR takes exactly this struct, whose size is asserted below.
    let set = unsafe { Setter::<SET_ATTRIBUTES, Attributes>::new(attributes) };
    // SAFETY: as above; the argument lives through the call.
    unsafe { rustix::ioctl::ioctl(directory, set) }.map_err(failed)?;
    Ok(before)
}

/// Calls quotactl_fd(2) for project quotas.
fn quotactl<T>(file: BorrowedFd<'_>, command: u32, id: u32, argument: &mut T) -> Result<(), Errno> {
    // Source: Linux include/uapi/linux/quota.h, QCMD and PRJQUOTA.
    const PROJECTS: u32 = 2;
    let command = command << 8 | PROJECTS;
    // SAFETY: the callers below pass each command with its struct, which lives through the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            file.as_raw_fd(),
            command,
            id,
            std::ptr::from_mut(argument),
        )
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

// Source: Linux include/uapi/linux/fs.h, FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR and FS_XFLAG_PROJINHERIT.
const GET_ATTRIBUTES: Opcode = rustix::ioctl::opcode::read::<Attributes>(b'X', 31);
const SET_ATTRIBUTES: Opcode = rustix::ioctl::opcode::write::<Attributes>(b'X', 32);
const INHERIT: u32 = 0x200;

/// `struct fsxattr`.
#[repr(C)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    reserved: [u8; 8],
}
const _: () = assert!(size_of::<Attributes>() == 28);

// Source: Linux include/uapi/linux/quota.h: commands, `QIF_BLIMITS`, and the unit of limits, QIF_DQBLKSIZE.
const GET_QUOTA: u32 = 0x80_0007;
const SET_QUOTA: u32 = 0x80_0008;
const VALID_LIMITS: u32 = 1;
const BLOCK: u64 = 1024;

/// `struct if_dqblk`.
#[repr(C)]
#[derive(Default)]
struct Quota {
    /// Hard limit, in blocks of [`BLOCK`] bytes.
    hard_limit: u64,
    soft_limit: u64,
    /// Space in use, in bytes.
    bytes: u64,
    hard_limit_files: u64,
    soft_limit_files: u64,
    files: u64,
    grace: u64,
    grace_files: u64,
    valid: u32,
    padding: u32,
}
const _: () = assert!(size_of::<Quota>() == 72);

// Source: Linux include/uapi/linux/dqblk_xfs.h, Q_XGETQSTATV, FS_QSTATV_VERSION1 and FS_QUOTA_PDQ_ENFD.
const GET_STATE: u32 = 0x5808;
const STATE_VERSION: i8 = 1;
const PROJECTS_ENFORCED: u16 = 1 << 5;

/// `struct fs_quota_statv`, which file systems other than XFS fill in as well.
#[repr(C)]
#[derive(Default)]
struct State {
    version: i8,
    padding: u8,
    flags: u16,
    in_core: u32,
    rest: [u64; 19],
}
const _: () = assert!(size_of::<State>() == 160);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    /// Neither procfs nor a tmpfs mounted without quota options has quotas.
    #[test]
    fn a_file_system_without_quotas_is_refused() {
        for path in ["/proc", "/dev/shm"] {
            let directory = std::fs::File::open(path).unwrap();
            let size = NonZeroU64::new(1 << 20).unwrap();
            assert_eq!(limit(directory.as_fd(), size), Err(QuotaError::NotEnforced), "{path}");
        }
    }
}
