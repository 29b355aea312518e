//! Copies files between the root of a container and the host, in the form of a tar.
//!
//! Both a container and a tar may be hostile:
//!
//! - The kernel resolves paths of a container inside its root ([`find`], `RESOLVE_IN_ROOT`), without the magic links of
//!   `/proc`. A container that exchanges directories and links can only redirect a copy inside its own root.
//! - [`pack`] opens each name once, with `O_PATH`, which follows no link and has no effect on FIFOs and devices. All
//!   further steps use that descriptor.
//! - [`unpack`] creates each file by a single name, in a directory that it holds open, and follows no link at that name.
//!   On the host, it follows no links at all below the destination.

mod find;
mod pack;
#[cfg(test)]
mod tests;
mod unpack;

use std::io::{self, BufWriter, ErrorKind, PipeReader, Read as _, Write};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use image::tar::TarError;
use image::tar::write::TarWriteError;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

pub use find::{Place, find, mount_above};
pub use pack::pack;
pub use unpack::{Destination, LinkHandling, NewOwner, unpack};

/// Maximum number of directories above a file of a copy. Each of them is held open.
const DEPTH_MAX: usize = 256;

/// Flags for opening a name without any effect on the file.
const HOLD: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Flags for opening a directory.
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Reason why files cannot be copied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The kernel refuses an operation.
    #[error("cannot {action} \"{}\"", path.escape_ascii())]
    Io {
        /// Action that failed.
        action: &'static str,
        path: Vec<u8>,
        source: Errno,
    },
    /// A file that cannot be copied, or cannot be replaced.
    #[error("cannot copy \"{}\": {why}", path.escape_ascii())]
    Refused { path: Vec<u8>, why: &'static str },
    /// The tar cannot be read.
    #[error("cannot read the tar")]
    Read(#[from] TarError),
    /// A member of the tar cannot be written.
    #[error(transparent)]
    Write(#[from] TarWriteError),
    /// The pipe between the two sides of a copy cannot be made or read.
    #[error("cannot use a pipe")]
    Pipe(#[source] io::Error),
}

impl CopyError {
    fn io(action: &'static str, path: &[u8]) -> impl Fn(Errno) -> Self {
        move |source| Self::Io { action, path: path.to_vec(), source }
    }

    fn refused(path: &[u8], why: &'static str) -> Self {
        Self::Refused { path: path.to_vec(), why }
    }
}

/// Files that were left out of a copy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Number of these files.
    pub count: u64,
    /// Path and description of the first of them.
    pub first: Option<(Vec<u8>, &'static str)>,
}

impl Skipped {
    fn add(&mut self, path: &[u8], what: &'static str) {
        self.count = self.count.saturating_add(1);
        self.first.get_or_insert_with(|| (path.to_vec(), what));
    }

    /// Adds the files that the other side of the copy has left out.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { count: self.count.saturating_add(other.count), first: self.first.or(other.first) }
    }
}

/// Why a file of the kernel is no part of a copy.
const KERNELS: &str = "it is in a file system of the kernel, such as /proc";

/// Why a file below many directories is no part of a copy.
const TOO_DEEP: &str = "it is below too many directories";

/// Runs `pack` on another thread, while `unpack` reads the tar.
///
/// # Errors
/// [`CopyError`]: the first error, which is the cause of the other side's error.
pub fn through(
    pack: impl FnOnce(&mut dyn Write) -> Result<Skipped, CopyError> + Send,
    unpack: impl FnOnce(&mut PipeReader) -> Result<Skipped, CopyError>,
) -> Result<Skipped, CopyError> {
    let (mut reader, writer) = io::pipe().map_err(CopyError::Pipe)?;
    std::thread::scope(|scope| {
        let packing = scope.spawn(move || -> Result<Skipped, CopyError> {
            let mut out = BufWriter::with_capacity(256 << 10, writer);
            let skipped = pack(&mut out)?;
            out.flush().map_err(TarWriteError::Write)?;
            Ok(skipped)
        });
        let unpacked = unpack(&mut reader).and_then(|skipped| {
            // The end of the tar is not the end of the pipe.
            io::copy(&mut reader.by_ref(), &mut io::sink()).map_err(CopyError::Pipe)?;
            Ok(skipped)
        });
        drop(reader);
        let packed = match packing.join() {
            Ok(packed) => packed,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        match (packed, unpacked) {
            // The reader failed first.
            (Err(error), Err(cause)) if is_unread(&error) => Err(cause),
            (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            (Ok(packed), Ok(unpacked)) => Ok(packed.and(unpacked)),
        }
    })
}

fn is_unread(error: &CopyError) -> bool {
    matches!(error, CopyError::Write(TarWriteError::Write(error)) if error.kind() == ErrorKind::BrokenPipe)
}

/// Returns the attributes of the file behind a descriptor.
fn stat(file: impl AsFd) -> Result<Statx, Errno> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Describes a file that is neither a regular file, a directory nor a symbolic link.
const fn special(kind: FileType) -> &'static str {
    match kind {
        FileType::CharacterDevice | FileType::BlockDevice => "it is a device",
        FileType::Socket => "it is a socket",
        FileType::Fifo => "it is a FIFO",
        _ => "its type is unknown",
    }
}

/// Opens the file behind an `O_PATH` descriptor with other flags. The path leads to exactly this file.
fn reopen(held: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = by_number(held);
    rustix::fs::open(&*path, flags | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
}

fn by_number(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether a file is in a file system whose files are interfaces of the kernel. A write to such a file, to which a link
/// of a container may lead, could change the host. Source: Linux `include/uapi/linux/magic.h`.
fn is_kernels(file: impl AsFd) -> Result<bool, Errno> {
    Ok(matches!(
        rustix::fs::fstatfs(file)?.f_type,
        0x9fa0 // proc
            | 0x6265_6572 // sysfs
            | 0x0027_e0eb // cgroup
            | 0x6367_7270 // cgroup2
            | 0x6462_6720 // debugfs
            | 0x7472_6163 // tracefs
            | 0x7363_6673 // securityfs
            | 0xf97c_ff8c // selinuxfs
            | 0xcafe_4a11 // bpf
            | 0xde5e_81e4 // efivarfs
            | 0x6e73_6673 // nsfs
            | 0x4249_4e4d // binfmt_misc
    ))
}
