//! Filestores: a file of the host that contains an ext4 file system, for the changes to one root.
//!
//! Every block that the ext4 may allocate is already allocated on the host's disk, so a full disk causes an error for
//! the writer, and never zeros for a reader. Blocks that the host has not allocated yet belong to a file in the ext4,
//! the *balloon*; [`crate::root::headroom`] makes it smaller and larger.
//!
//! Creating an ext4 takes ten milliseconds and a program, and copying one takes less than one millisecond. So each
//! size is created once, and kept as a template in the directory of the containers. A template contains only metadata,
//! some hundred KiB; zeros stay holes.

use std::ffi::OsStr;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernel::allocation::{allocate, extents, overwrite_in_place, release};
use kernel::files::{NameOutcome, copy_sparse, link, read_full, unnamed, write_all};
use kernel::loopdev::Access;
use kernel::mount::{Durability, Ext4Options, MountError};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// How space on the host's disk is reserved for later writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// A process with a [`crate::root::headroom::Headroom`] reserves space ahead of the writes.
    Ahead,
    /// The whole size is reserved immediately.
    Whole,
    /// No space is reserved, for the disk of a virtual machine. If the host's disk is full, the machine's writes fail.
    Sparse,
}

/// Name of the file in the file system whose blocks the host has not allocated.
pub(crate) const BALLOON: &str = "balloon";

/// Space outside of the balloon in a new filestore, in bytes.
const FREE: u64 = 16 << 20;

/// Number of blocks for ext4's own metadata: 1 MiB.
pub(crate) const RESERVED: u64 = 256;

/// Number of groups whose inode tables a new filestore has on the host's disk.
pub(crate) const TABLES: u64 = 2;

/// Default size, in bytes. Only written data and some reserved space take space on the disk.
pub const SIZE: NonZeroU64 = NonZeroU64::new(10 << 30).expect("not zero");

/// Minimum size in bytes, at which ext4 has room for data.
pub const SIZE_MIN: u64 = 16 << 20;

/// Maximum size in bytes: an ext4 with blocks of 4 KiB and 32-bit block numbers.
pub const SIZE_MAX: u64 = 16 << 40;

/// Returns the default size in the file system of `folder`.
pub fn default_size(folder: BorrowedFd<'_>, backing: Backing) -> Result<NonZeroU64, Errno> {
    if backing != Backing::Whole {
        return Ok(SIZE);
    }
    let numbers = rustix::fs::fstatvfs(folder)?;
    let part = numbers.f_bavail.saturating_mul(numbers.f_frsize) / WHOLE_PART;
    // Rounded down to a power of two, so that there are few templates.
    let part = part.checked_ilog2().map_or(SIZE_MIN, |it| 1 << it);
    Ok(NonZeroU64::new(part.clamp(SIZE_MIN, SIZE.get())).unwrap_or(SIZE))
}

/// Divisor of the disk's free space for the default size with [`Backing::Whole`].
const WHOLE_PART: u64 = 8;

/// Reason why a filestore cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum FilestoreError {
    /// The program that creates file systems is missing.
    #[error("mkfs.ext4 is not installed (package e2fsprogs)")]
    NoProgram,
    /// The size is too small or too large.
    #[error("cannot make a file system of {0} bytes: the size must be 16 MiB to 16 TiB")]
    Size(u64),
    /// The program cannot be executed.
    #[error("cannot run {}", path.display())]
    Run { path: PathBuf, source: std::io::Error },
    /// The program failed.
    #[error("{} could not make a file system: {message}", path.display())]
    Failed { path: PathBuf, message: String },
    /// The new file system cannot be mounted.
    #[error("cannot mount the new file system")]
    Mount(#[from] MountError),
    /// The host's disk returned an error.
    #[error("cannot make a filestore of {}", size_of(*size))]
    Disk {
        /// Requested size in bytes, including holes.
        size: u64,
        source: Errno,
    },
}

/// Formats a size for users, with one decimal if needed.
fn size_of(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB")];
    let Some((unit, name)) = units.into_iter().find(|it| bytes >= it.0) else {
        return format!("{bytes} bytes");
    };
    match (bytes / unit, bytes % unit) {
        (whole, 0) => format!("{whole} {name}"),
        (whole, rest) => format!("{whole}.{} {name}", rest * 10 / unit),
    }
}

/// Finds `mkfs.ext4`. A user's `PATH` often lacks the administrator's folders.
#[must_use]
pub fn program(search: &OsStr) -> Option<PathBuf> {
    let folders = std::env::split_paths(search);
    let folders = folders.chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|it| it.join("mkfs.ext4")).find(|it| it.is_file())
}

/// Creates a filestore without a name, in the file system of `folder`, which also contains the templates. It is
/// removed with its last user, unless [`name`] gives it a name.
///
/// # Errors
/// [`FilestoreError`]; all files except a template are then removed.
pub fn make(
    folder: BorrowedFd<'_>,
    size: NonZeroU64,
    durability: Durability,
    backing: Backing,
    search: &OsStr,
) -> Result<OwnedFd, FilestoreError> {
    if !(SIZE_MIN..=SIZE_MAX).contains(&size.get()) {
        return Err(FilestoreError::Size(size.get()));
    }
    // ext4 counts blocks of 4 KiB.
    let size = size.get() & !4095;
    let failed = |source| FilestoreError::Disk { size, source };
    let template = template(folder, size, durability, backing, search)?;
    let file = unnamed(folder, 0o600).map_err(failed)?;
    overwrite_in_place(file.as_fd()).map_err(failed)?;
    rustix::fs::ftruncate(&file, size).map_err(failed)?;
    match backing {
        Backing::Whole => take(file.as_fd(), &(0..size)).map_err(failed)?,
        Backing::Ahead => take_first(template.as_fd(), file.as_fd()).map_err(failed)?,
        Backing::Sparse => {}
    }
    copy_sparse(template.as_fd(), file.as_fd()).map_err(failed)?;
    Ok(file)
}

/// Calls [`allocate`]. Ignores the error if the host's file system does not support this, because then space cannot be
/// reserved.
pub(crate) fn take(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<(), Errno> {
    match allocate(file, range) {
        Err(Errno::OPNOTSUPP) => Ok(()),
        result => result,
    }
}

/// Size of the note in a template. The note lists the free ranges of the file system, as pairs of start and end in
/// bytes, followed by a newline. The note is in ext4's first block, of which ext4 does not use the first 1024 bytes.
const NOTE_MAX: usize = 1024;

/// Allocates the space of a new filestore on the host's disk: the blocks that the file system writes in place, up to
/// the end of the first inode tables, and the free blocks. All other blocks are copied with data, or belong to the
/// balloon.
fn take_first(template: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut note = [0; NOTE_MAX];
    let length = read_full(template, &mut note, 0)?;
    let text = note.get(..length).unwrap_or_default().split(|&it| it == b'\n').next();
    let text = String::from_utf8_lossy(text.unwrap_or_default());
    let numbers: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
    let numbers = numbers.map_err(|_not_ours| Errno::INVAL)?;
    for pair in numbers.chunks_exact(2) {
        take(file, &(pair[0]..pair[1]))?;
    }
    let tables = Geometry::read(template)?;
    let mut end = 0;
    for group in 0..TABLES.min(tables.groups) {
        end = tables.table(template, group)?.end.max(end);
    }
    take(file, &(0..end))
}

/// Values of an ext4 superblock about the inode tables. Source: Linux
/// Documentation/filesystems/ext4/{super,group_descr}.rst.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) groups: u64,
    pub(crate) inodes_per_group: u64,
    table: u64,
    descriptor: u64,
}

impl Geometry {
    pub(crate) fn read(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        let mut bytes = [0; 1024];
        if read_full(file, &mut bytes, 1024)? != bytes.len() {
            return Err(Errno::IO);
        }
        let word = |at: usize| u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|it| bytes[at + it])));
        let half = |at: usize| u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let (blocks, per_group) = (word(0x4) | word(0x150) << 32, word(0x20));
        let (inodes_per_group, inode) = (word(0x28), half(0x58));
        // Without the feature `64bit`, a descriptor has its old size, whatever the field contains.
        let descriptor = if word(0x60) & 0x80 == 0 { 32 } else { half(0xfe) };
        if per_group == 0 || inodes_per_group == 0 || half(0x38) != 0xef53 {
            return Err(Errno::INVAL);
        }
        let groups = blocks.div_ceil(per_group);
        Ok(Self { groups, inodes_per_group, table: inodes_per_group * inode, descriptor })
    }

    /// Returns the range of a group's inode table. The descriptors start in the second block.
    pub(crate) fn table(&self, file: BorrowedFd<'_>, group: u64) -> Result<Range<u64>, Errno> {
        let mut bytes = [0; 64];
        let length = usize::try_from(self.descriptor).map_or(64, |it| it.min(64));
        if read_full(file, &mut bytes[..length], BLOCK + group * self.descriptor)? != length {
            return Err(Errno::IO);
        }
        let word = |at: usize| u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|it| bytes[at + it])));
        let start = (word(0x8) | word(0x28) << 32) * BLOCK;
        Ok(start..start + self.table)
    }
}

const BLOCK: u64 = 4096;

/// Moves all blocks of a new file system into the balloon, except for [`FREE`] bytes, and records where these are.
fn inflate(
    template: BorrowedFd<'_>,
    durability: Durability,
) -> Result<Result<(), Errno>, FilestoreError> {
    let options = Ext4Options { durability, direct_io: true, access: Access::ReadWrite };
    let mount = kernel::mount::ext4(template, &options)?;
    let fill = || {
        reserve(mount.as_fd(), 0)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let balloon = rustix::fs::openat(&mount, BALLOON, flags, Mode::from_raw_mode(0o600))?;
        let (mut end, mut step) = (0, u64::MAX);
        loop {
            let free = rustix::fs::fstatvfs(&balloon)?.f_bfree * BLOCK;
            step = step.min(free);
            if step < BLOCK {
                break;
            }
            match allocate(balloon.as_fd(), &(end..end + step)) {
                // A part may have been allocated.
                Err(Errno::NOSPC) => step = (step / 2) & !(BLOCK - 1),
                result => result?,
            }
            end = rustix::fs::fstat(&balloon)?.st_size.unsigned_abs();
        }
        if rustix::fs::fstatvfs(&balloon)?.f_bfree != 0 {
            return Err(Errno::NOSPC);
        }
        let free = extents(balloon.as_fd(), &(0..FREE.min(end)))?;
        if free.iter().map(|it| it.length).sum::<u64>() != FREE.min(end) {
            return Err(Errno::IO);
        }
        release(balloon.as_fd(), &(0..FREE.min(end)))?;
        rustix::fs::syncfs(&balloon)?;
        Ok(free.iter().map(|it| it.physical..it.physical + it.length).collect::<Vec<_>>())
    };
    let free = fill();
    // Unmounted before the note is written.
    drop(mount);
    Ok(free.and_then(|free| {
        let text: Vec<_> = free.iter().map(|it| format!("{} {}", it.start, it.end)).collect();
        let text = text.join(" ") + "\n";
        if text.len() > NOTE_MAX {
            return Err(Errno::NOSPC);
        }
        write_all(template, text.as_bytes(), 0)
    }))
}

/// Sets the number of blocks that ext4 keeps for its own metadata, which other files cannot use. The default is 16
/// MiB.
pub(crate) fn reserve(inside: BorrowedFd<'_>, blocks: u64) -> Result<(), Errno> {
    let device = rustix::fs::fstat(inside)?.st_dev;
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let link = Path::new("/sys/dev/block").join(number);
    let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let device = std::fs::read_link(link).map_err(failed)?;
    let name = device.file_name().ok_or(Errno::NOENT)?;
    let file = Path::new("/sys/fs/ext4").join(name).join("reserved_clusters");
    std::fs::write(file, blocks.to_string()).map_err(failed)
}

fn template(
    folder: BorrowedFd<'_>,
    size: u64,
    durability: Durability,
    backing: Backing,
    search: &OsStr,
) -> Result<OwnedFd, FilestoreError> {
    let failed = |source| FilestoreError::Disk { size, source };
    let journal = match durability {
        Durability::Volatile => "",
        Durability::Durable => "-journal",
    };
    let whole = match backing {
        Backing::Ahead => "",
        Backing::Whole | Backing::Sparse => "-whole",
    };
    // Increase this number when the contents of templates change.
    let name = format!(".ext4-3-{size}{journal}{whole}");
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(folder, &*name, flags, Mode::empty()) {
        Err(Errno::NOENT) => {}
        result => return result.map_err(failed),
    }
    let template = unnamed(folder, 0o600).map_err(failed)?;
    rustix::fs::ftruncate(&template, size).map_err(failed)?;
    format(template.as_fd(), size, durability, search)?;
    if backing == Backing::Ahead {
        inflate(template.as_fd(), durability)?.map_err(failed)?;
    }
    rustix::fs::fchmod(&template, Mode::from_raw_mode(0o400)).map_err(failed)?;
    // A file with this name is complete, also after a crash.
    rustix::fs::fsync(&template).map_err(failed)?;
    match link(template.as_fd(), folder, &*name) {
        Ok(NameOutcome::Now | NameOutcome::Taken) => Ok(template),
        Err(errno) => Err(failed(errno)),
    }
}
/// Gives a filestore a name, so that its space is counted and it can be found again.
pub fn name(file: BorrowedFd<'_>, folder: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
    match link(file, folder, name)? {
        NameOutcome::Now => Ok(()),
        NameOutcome::Taken => Err(Errno::EXIST),
    }
}

fn format(
    file: BorrowedFd<'_>,
    size: u64,
    durability: Durability,
    search: &OsStr,
) -> Result<(), FilestoreError> {
    let path = program(search).ok_or(FilestoreError::NoProgram)?;
    // The path contains this process's pid, because the program does not inherit the descriptor.
    let target = Path::new("/proc").join(std::process::id().to_string());
    let target = target.join("fd").join(file.as_raw_fd().to_string());
    let mut command = Command::new(&path);
    // `-m 0`: root needs no reserved blocks, because there is no other writer. `-i`: the inode table is large enough
    // for files of 16 KiB. The options `-E` and `-O` below: no space is reserved for growing, and no zeros are written
    // into holes.
    command.args(["-q", "-F", "-b", "4096", "-m", "0", "-i", "16384"]);
    // All groups form one flexible group, so blocks that are written in place come first, and the kernel allocates
    // inodes in order.
    let groups = size.div_ceil(BLOCK * 8 * BLOCK).max(16).next_power_of_two();
    command.args(["-G", &groups.to_string()]);
    match durability {
        Durability::Volatile => {
            command.args(["-E", "nodiscard,lazy_itable_init=1"]);
            command.args(["-O", "^resize_inode,^has_journal"]);
        }
        Durability::Durable => {
            // The journal is written with zeros, so that copies have its blocks on disk.
            command.args(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=0"]);
            command.args(["-O", "^resize_inode", "-J", "size=4"]).env("UNIX_IO_NOZEROOUT", "1");
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_in_the_largest_unit() {
        for (size, told) in [
            (10 << 30, "10 GiB"),
            (3 << 29, "1.5 GiB"),
            (16 << 20, "16 MiB"),
            ((1 << 30) + 4096, "1.0 GiB"),
            (4096, "4096 bytes"),
        ] {
            let error = FilestoreError::Disk { size, source: Errno::NOSPC };
            assert_eq!(error.to_string(), format!("cannot make a filestore of {told}"));
        }
    }
}
