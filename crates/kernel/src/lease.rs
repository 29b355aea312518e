//! Whether a file is in use: a lease asks the kernel, which knows across namespaces and crashes.
#![expect(unsafe_code, reason = "rustix has no leases")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::io::Errno;

use crate::fd_name::name_of;

/// Why it cannot be told whether a file is in use.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The descriptor cannot ask.
    #[error("cannot ask whether {file} is in use: it must be open for reading or writing")]
    Descriptor {
        /// The file.
        file: String,
    },
    /// Only the owner of a file, or someone with `CAP_LEASE`, may ask.
    #[error("cannot ask whether {file} is in use: it belongs to another user")]
    Forbidden {
        /// The file.
        file: String,
    },
    /// Anything else; `EINVAL` means that its file system has no leases.
    #[error("cannot ask whether {file} is in use")]
    Ask {
        /// The file.
        file: String,
        /// The kernel's answer.
        source: Errno,
    },
}

/// Returns whether anything besides this descriptor has the file open: a mount of it, attached or not, in any
/// namespace; a loop device; a process that reads, writes or maps it.
///
/// The descriptor must be open for reading or writing (`O_RDONLY` is enough, `O_PATH` is not), and must be the only one
/// of this process on that file apart from its own duplicates. A second `open` counts as a user. So does an open file
/// that a child inherited, until the child has called exec: ask again before you trust one "yes". The result holds only
/// for the moment. To act on it, keep others from *starting* to use the file (lock the store, or unlink it first). For
/// some microseconds, another process that opens the file waits, or gets `EAGAIN` with `O_NONBLOCK`.
///
/// # Errors
/// [`LeaseError`] if the kernel cannot tell; treat that as in use.
pub fn in_use(file: BorrowedFd<'_>) -> Result<bool, LeaseError> {
    // Whoever opens the file while we have the lease makes the kernel signal us, by default with
    // SIGIO, which kills a process that does not expect it. SIGURG is ignored unless asked for.
    let asked = set(file, F_SETSIG, libc::SIGURG);
    match asked.and_then(|()| set(file, libc::F_SETLEASE, libc::F_WRLCK)) {
        Ok(()) => {
            // The lease would go with the descriptor, but until then hold up whoever opens it.
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

/// Which signal tells of a lease that is in someone's way. Source: Linux `asm-generic/fcntl.h`.
const F_SETSIG: i32 = 10;

/// `F_SETSIG` or `F_SETLEASE`.
fn set(file: BorrowedFd<'_>, command: i32, argument: i32) -> Result<(), Errno> {
    // SAFETY: both commands take an integer and touch no memory of ours.
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
            // With SIGIO, the first collision ends the process.
            assert!(free > 0, "never free");
        });
    }
}
