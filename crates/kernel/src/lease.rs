//! Tests whether a file is in use by taking a lease, which works across namespaces and after crashes.
#![expect(unsafe_code, reason = "rustix has no leases")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::io::Errno;

use crate::fd_name::name_of;

/// The error of [`in_use`].
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The descriptor is not open for reading or writing.
    #[error("cannot find out whether {file} is in use: it must be open for reading or writing")]
    Descriptor { file: String },
    /// The caller is neither the owner of the file nor has `CAP_LEASE`.
    #[error("cannot find out whether {file} is in use: it belongs to another user")]
    Forbidden { file: String },
    /// Another error of the kernel. `EINVAL` means that the file system has no leases.
    #[error("cannot find out whether {file} is in use")]
    Ask { file: String, source: Errno },
}

/// Returns whether anything besides this descriptor has the file open: a mount of it, attached or detached, in any
/// namespace; a loop device; or a process that reads, writes or maps it.
///
/// The descriptor must be open for reading or writing (`O_RDONLY` is enough, `O_PATH` is not). Apart from its own
/// duplicates it must be the only descriptor of this process for that file, because a second `open` counts as a user.
/// A descriptor that a child has inherited also counts until the child calls exec, so repeat the call before you rely
/// on the result `true`. The result is valid only at the moment of the call. To act on it, keep others from *starting*
/// to use the file (lock the store, or unlink the file first). For some microseconds, another process that opens the
/// file waits, or gets `EAGAIN` with `O_NONBLOCK`.
///
/// # Errors
/// [`LeaseError`] if the kernel cannot decide. Treat an error as in use.
pub fn in_use(file: BorrowedFd<'_>) -> Result<bool, LeaseError> {
    // If another process opens the file during the lease, the kernel signals this process, by default with SIGIO,
    // which kills a process that does not expect it. SIGURG is ignored by default.
    let asked = set(file, F_SETSIG, libc::SIGURG);
    match asked.and_then(|()| set(file, libc::F_SETLEASE, libc::F_WRLCK)) {
        Ok(()) => {
            // Closing the descriptor would also end the lease, but would block other openers until then.
            set(file, libc::F_SETLEASE, libc::F_UNLCK)
                .map_err(|source| LeaseError::Ask { file: name_of(file), source })?;
            Ok(false)
        }
        Err(Errno::AGAIN) => Ok(true),
        Err(Errno::BADF) => Err(LeaseError::Descriptor { file: name_of(file) }),
        Err(Errno::ACCESS) => Err(LeaseError::Forbidden { file: name_of(file) }),
        Err(source) => Err(LeaseError::Ask { file: name_of(file), source }),
    }
}

/// Selects the signal for lease breaks. Source: Linux `asm-generic/fcntl.h`.
const F_SETSIG: i32 = 10;

/// Calls fcntl(2) with `F_SETSIG` or `F_SETLEASE`.
fn set(file: BorrowedFd<'_>, command: i32, argument: i32) -> Result<(), Errno> {
    // SAFETY: both commands take an integer and access no memory of this process.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if result == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn someone_who_opens_the_file_meanwhile_does_not_kill_who_asks() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        File::create(&path).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    File::open(&path).unwrap();
                }
            });
            let answers = (0..20_000).map(|_| super::in_use(File::open(&path).unwrap().as_fd()));
            let free = answers.filter(|it| matches!(it, Ok(false))).count();
            done.store(true, Ordering::Relaxed);
            // With SIGIO, the first collision would end the process.
            assert!(free > 0, "never free");
        });
    }
}
