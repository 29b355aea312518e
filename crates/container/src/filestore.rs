//! Filestores: one sparse file of the host with an ext4 inside, for the changes to one root.
//!
//! To make an ext4 takes ten milliseconds and a program, to copy one less than one: so each size is made once and kept as
//! a template beside the containers. Its metadata is all that it has, some hundred KiB; what is zero stays a hole.

use std::ffi::OsStr;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernel::files::{Named, copy_sparse, link, unnamed};
use kernel::mount::Durability;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// What it is called in a container's folder; those of further mounts have a hyphen and a number behind it.
pub const NAME: &str = "filestore";

/// The size where none is asked for. Only what is written takes space.
pub const SIZE: NonZeroU64 = NonZeroU64::new(10 << 30).expect("not zero");

/// The least, with which ext4 has room for something: 16 MiB.
pub const SIZE_MIN: u64 = 16 << 20;

/// The most: ext4 with blocks of 4 KiB and numbers of 32 bits.
pub const SIZE_MAX: u64 = 16 << 40;

/// Why there is no filestore.
#[derive(Debug, thiserror::Error)]
pub enum FilestoreError {
    /// No file system can be made.
    #[error("there is no mkfs.ext4 (package e2fsprogs)")]
    NoProgram,
    /// Too small, or too large.
    #[error("a file system of {0} bytes: it may have 16 MiB to 16 TiB")]
    Size(u64),
    /// It does not run.
    #[error("cannot run {}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It did not make one.
    #[error("{} could not make a file system: {message}", path.display())]
    Failed {
        /// The program.
        path: PathBuf,
        /// What it said.
        message: String,
    },
    /// The disk.
    #[error("cannot make a filestore of {size} bytes")]
    Disk {
        /// How large, without its holes, it was to be.
        size: u64,
        /// The kernel's answer.
        source: Errno,
    },
}

/// Where `mkfs.ext4` is. A user's `PATH` often lacks the administrator's folders.
#[must_use]
pub fn program(search: &OsStr) -> Option<PathBuf> {
    let folders = std::env::split_paths(search);
    let folders = folders.chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|it| it.join("mkfs.ext4")).find(|it| it.is_file())
}

/// Makes a filestore without a name, in the file system of `folder`, which keeps the templates too. It is gone with its
/// last user, unless [`link`] gives it a name.
///
/// # Errors
/// [`FilestoreError`]; nothing is left then.
pub fn make(
    folder: BorrowedFd<'_>,
    size: NonZeroU64,
    durability: Durability,
    search: &OsStr,
) -> Result<OwnedFd, FilestoreError> {
    if !(SIZE_MIN..=SIZE_MAX).contains(&size.get()) {
        return Err(FilestoreError::Size(size.get()));
    }
    // ext4 counts blocks of 4 KiB.
    let size = size.get() & !4095;
    let failed = |source| FilestoreError::Disk { size, source };
    let journal = match durability {
        Durability::Volatile => "",
        Durability::Durable => "-journal",
    };
    // The number changes with what `format` does.
    let name = format!(".ext4-1-{size}{journal}");
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let template = match rustix::fs::openat(folder, &*name, flags, Mode::empty()) {
        Ok(template) => template,
        Err(Errno::NOENT) => {
            let template = unnamed(folder, 0o400).map_err(failed)?;
            rustix::fs::ftruncate(&template, size).map_err(failed)?;
            format(template.as_fd(), durability, search)?;
            // Whatever has the name is whole, also after a crash.
            rustix::fs::fsync(&template).map_err(failed)?;
            match link(template.as_fd(), folder, &*name) {
                Ok(Named::Now | Named::Taken) => template,
                Err(errno) => return Err(failed(errno)),
            }
        }
        Err(errno) => return Err(failed(errno)),
    };
    let file = unnamed(folder, 0o600).map_err(failed)?;
    copy_sparse(template.as_fd(), file.as_fd()).map_err(failed)?;
    Ok(file)
}

/// Gives it a name, by which its space is counted and found again.
///
/// # Errors
/// The kernel's answer.
pub fn name(file: BorrowedFd<'_>, folder: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
    match link(file, folder, name)? {
        Named::Now => Ok(()),
        Named::Taken => Err(Errno::EXIST),
    }
}

fn format(
    file: BorrowedFd<'_>,
    durability: Durability,
    search: &OsStr,
) -> Result<(), FilestoreError> {
    let path = program(search).ok_or(FilestoreError::NoProgram)?;
    // By our own number, since the program does not inherit the descriptor.
    let target = Path::new("/proc").join(std::process::id().to_string());
    let target = target.join("fd").join(file.as_raw_fd().to_string());
    let mut command = Command::new(&path);
    // No blocks for root alone: nobody else writes. Room in the table of inodes for files of 8 KiB. Nothing is kept for
    // growing. Zeros need not be written into holes.
    command.args(["-q", "-F", "-b", "4096", "-m", "0", "-i", "8192"]);
    command.args(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]);
    match durability {
        Durability::Volatile => command.args(["-O", "^resize_inode,^has_journal"]),
        Durability::Durable => command.args(["-O", "^resize_inode", "-J", "size=4"]),
    };
    command.arg(target).stdin(Stdio::null());
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let message = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Err(FilestoreError::Failed { path, message })
        }
        Err(source) => Err(FilestoreError::Run { path, source }),
    }
}
