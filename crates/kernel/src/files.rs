//! Atomic creation of files, copies that share blocks where possible, and complete reads and writes.
//! For everything else about files, rustix is safe to use directly.
#![expect(
    unsafe_code,
    reason = "rustix has no ioctl that shuts a file system down, and no sync_file_range"
)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RenameFlags, ResolveFlags, SeekFrom, StatxFlags, statx,
};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter};
use rustix::path::Arg;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::fd_name::proc_path;
use crate::last_errno;

/// Creates a file without a name (`O_TMPFILE`), open for reading and writing, in the file system of a directory.
/// Closing the descriptor removes the file. The umask applies to the mode.
///
/// # Errors
/// `EOPNOTSUPP` if the file system does not support this (NFS, overlayfs before 6.1, some FUSE file systems).
pub fn unnamed(directory: BorrowedFd<'_>, mode: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::openat(directory, c".", flags, Mode::from_raw_mode(mode))
}

/// Opens a file for reading without waiting for the writer of a FIFO, and without getting a controlling terminal. The
/// caller checks the type of the opened file.
///
/// # Errors
/// The errors of `open`.
pub fn open_to_read(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
        // Another process has a lease on the file, which a blocking open makes it release. Only regular files have
        // leases.
        Err(Errno::AGAIN) => rustix::fs::open(path, flags, Mode::empty()),
        other => other,
    }
}

/// Number of attempts of [`open_resolved`].
const RESOLVE_TRIES: u32 = 512;

/// Opens a path with the `resolve` flags of openat2. The kernel returns `EAGAIN` at a `..` if any file on the system
/// was renamed, or any file system was mounted, during the call, which any user can cause at any time. So `EAGAIN` is
/// retried many times before it is returned.
pub fn open_resolved(
    directory: BorrowedFd<'_>,
    path: impl Arg + Copy,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    for _ in 1..RESOLVE_TRIES {
        match rustix::fs::openat2(directory, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => std::thread::yield_now(),
            opened => return opened,
        }
    }
    rustix::fs::openat2(directory, path, flags, Mode::empty(), resolve)
}

/// Outcome of giving a file a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameOutcome {
    /// The file has the name now.
    Now,
    /// Another file has the name, and was left unchanged.
    Taken,
}

/// Gives an open file a name without replacing an existing file. The file may come from [`unnamed`].
///
/// # Errors
/// An error of the kernel, except `EEXIST`, which is [`NameOutcome::Taken`].
pub fn link(
    file: BorrowedFd<'_>,
    directory: BorrowedFd<'_>,
    name: impl Arg,
) -> Result<NameOutcome, Errno> {
    // The path in /proc avoids AT_EMPTY_PATH, which requires CAP_DAC_READ_SEARCH.
    named(rustix::fs::linkat(CWD, proc_path(file), directory, name, AtFlags::SYMLINK_FOLLOW))
}

/// Renames a file without replacing an existing one.
///
/// # Errors
/// An error of the kernel, except `EEXIST`, which is [`NameOutcome::Taken`].
pub fn rename_new(
    from: (BorrowedFd<'_>, impl Arg),
    to: (BorrowedFd<'_>, impl Arg),
) -> Result<NameOutcome, Errno> {
    named(rustix::fs::renameat_with(from.0, from.1, to.0, to.1, RenameFlags::NOREPLACE))
}

fn named(result: Result<(), Errno>) -> Result<NameOutcome, Errno> {
    match result {
        Ok(()) => Ok(NameOutcome::Now),
        Err(Errno::EXIST) => Ok(NameOutcome::Taken),
        Err(errno) => Err(errno),
    }
}

/// Opens a file once more, read-only. To turn fs-verity on, drop the writable descriptor and call
/// [`crate::verity::enable`] with this one.
pub fn reopen_read_only(file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::fs::open(proc_path(file), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Raises this process's limit of open files to `count` plus a reserve for its other descriptors, as far as the hard
/// limit allows. Child processes inherit the limit.
pub fn allow_open(count: usize) {
    // Reserve for the process's other descriptors, such as pipes and those of its threads.
    const OTHERS: u64 = 256;
    let wanted = u64::try_from(count).unwrap_or(u64::MAX).saturating_add(OTHERS);
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return;
    }
    let current = Some(limit.maximum.map_or(wanted, |maximum| wanted.min(maximum)));
    // If this fails, the limit is unchanged, and the call that exceeds it returns an error.
    let _raised = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
}

/// Returns the alignment of direct I/O on a file, in bytes: 0 if the file does not support direct I/O, `None` if it
/// is unknown, because the kernel is older than Linux 6.1 or the file system does not report it.
pub(crate) fn direct_io_unit(file: BorrowedFd<'_>) -> Result<Option<u32>, Errno> {
    let stat = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let is_known = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    Ok(is_known.then_some(stat.stx_dio_offset_align))
}

/// How [`copy`] copied a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Both files share the same blocks on disk (XFS, btrfs).
    Shared,
    /// This many bytes were copied.
    Bytes(u64),
}

/// Copies a whole file into an empty one: by sharing blocks if the file system supports this, else inside the kernel
/// if possible, else by reading and writing. Ignores the file offsets of the descriptors.
///
/// # Errors
/// An error of the kernel, such as `ENOSPC` or `EIO`.
pub fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<Copied, Errno> {
    match rustix::fs::ioctl_ficlone(to, from) {
        Ok(()) => return Ok(Copied::Shared),
        Err(
            Errno::OPNOTSUPP
            | Errno::NOTTY
            | Errno::XDEV
            | Errno::INVAL
            | Errno::NOSYS
            | Errno::PERM,
        ) => {}
        Err(errno) => return Err(errno),
    }
    let mut position = 0;
    loop {
        let (mut read_at, mut write_at) = (position, position);
        // One gigabyte is copied at a time, because the call cannot be interrupted.
        match rustix::fs::copy_file_range(
            from,
            Some(&mut read_at),
            to,
            Some(&mut write_at),
            1 << 30,
        ) {
            // Some file systems (/proc) return 0 instead of an error, so the file is read in the usual way.
            Ok(0) => return copy_bytes(from, to, position),
            Ok(length) => position += length as u64,
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => {
                return copy_bytes(from, to, position);
            }
            Err(errno) => return Err(errno),
        }
    }
}

/// Copies the data of a sparse file into a file that reads as zeros, and keeps its holes. The files share no blocks,
/// so later writes to the copy need no more space.
///
/// # Errors
/// An error of the kernel, such as `ENOSPC`; `EIO` also if the source is truncated during the copy.
pub fn copy_sparse(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let size = rustix::fs::fstat(from)?.st_size.unsigned_abs();
    let mut buffer = vec![0; 1 << 16];
    let mut end = 0;
    loop {
        let start = match rustix::fs::seek(from, SeekFrom::Data(end)) {
            Ok(start) => start,
            // Only a hole follows.
            Err(Errno::NXIO) => return rustix::fs::ftruncate(to, size),
            Err(errno) => return Err(errno),
        };
        end = rustix::fs::seek(from, SeekFrom::Hole(start))?;
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).map_or(buffer.len(), |it| it.min(buffer.len()));
            let part = buffer.get_mut(..length).unwrap_or_default();
            match rustix::io::pread(from, part, at) {
                // The file was truncated during the copy.
                Ok(0) => return Err(Errno::IO),
                Ok(length) => {
                    write_all(to, buffer.get(..length).unwrap_or_default(), at)?;
                    at += length as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

/// Shuts down the whole file system of a file without writing dirty data. This is for a file system that is about to
/// be deleted, because its unmount would otherwise wait for the writeback. Later accesses fail with `EIO`. Needs
/// `CAP_SYS_ADMIN` and a descriptor that is not `O_PATH`.
///
/// # Errors
/// An error of the kernel; `ENOTTY` from file systems that do not support this (ext4, XFS, F2FS, and tmpfs of newer
/// kernels do).
pub fn shut_down_file_system(file: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the ioctl reads one u32.
    let shutdown = unsafe { Setter::<SHUTDOWN, u32>::new(WITHOUT_LOG) };
    // SAFETY: as above; the argument lives through the call.
    unsafe { rustix::ioctl::ioctl(file, shutdown) }
}

// Source: Linux fs/ext4/ext4.h, `EXT4_IOC_SHUTDOWN` and `EXT4_GOING_FLAGS_NOLOGFLUSH`; the same numbers in fs/xfs.
const SHUTDOWN: Opcode = rustix::ioctl::opcode::read::<u32>(b'X', 125);
const WITHOUT_LOG: u32 = 2;

fn copy_bytes(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    mut position: u64,
) -> Result<Copied, Errno> {
    let mut buffer = vec![0; 1 << 18];
    loop {
        let length = match rustix::io::pread(from, &mut buffer, position) {
            Ok(0) => return Ok(Copied::Bytes(position)),
            Ok(length) => length,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        };
        write_all(to, buffer.get(..length).unwrap_or_default(), position)?;
        position += length as u64;
    }
}

/// Tests whether an earlier writeback of a file failed, without waiting. The kernel reports each failure once per
/// open file.
///
/// # Errors
/// The writeback error: `EIO`, `ENOSPC` or `EDQUOT`. The kernel drops the failed pages, which then read as zeros.
pub fn check_written(file: BorrowedFd<'_>) -> Result<(), Errno> {
    use std::os::fd::AsRawFd as _;
    // The call waits only for this range, which contains no pages, but reports errors of the whole file
    // (`mm/filemap.c`, `file_fdatawait_range`).
    const BEHIND: i64 = 1 << 62;
    // SAFETY: all arguments are numbers.
    let done = unsafe {
        libc::sync_file_range(file.as_raw_fd(), BEHIND, 1, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
    };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Waits until the disk has received all data of a file. A crash may still lose the file, because its metadata is not
/// written and the disk's cache is not flushed.
///
/// # Errors
/// The writeback error: `EIO`, `ENOSPC` or `EDQUOT`.
pub fn write_back(file: BorrowedFd<'_>) -> Result<(), Errno> {
    use std::os::fd::AsRawFd as _;
    // Source: `linux/magic.h`, OVERLAYFS_SUPER_MAGIC.
    const OVERLAYFS_SUPER_MAGIC: i64 = 0x794c_7630;
    // On an overlay, sync_file_range writes nothing, because the pages belong to the file of the upper layer.
    if rustix::fs::fstatfs(file)?.f_type == OVERLAYFS_SUPER_MAGIC {
        return rustix::fs::fdatasync(file);
    }
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: all arguments are numbers. Length 0 means to the end of the file.
    let done = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, all) };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Reads a file from `position` until `into` is full or the file ends. Returns the number of bytes read.
pub fn read_full(from: BorrowedFd<'_>, into: &mut [u8], position: u64) -> Result<usize, Errno> {
    let mut length = 0;
    while let Some(rest) = into.get_mut(length..).filter(|it| !it.is_empty()) {
        match rustix::io::pread(from, rest, position + length as u64) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(length)
}

/// Writes all of `rest` to a file at `position`.
pub fn write_all(to: BorrowedFd<'_>, mut rest: &[u8], mut position: u64) -> Result<(), Errno> {
    while !rest.is_empty() {
        match rustix::io::pwrite(to, rest, position) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                rest = rest.get(written..).unwrap_or_default();
                position += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    use super::{
        Copied, NameOutcome, OFlags, ResolveFlags, copy, copy_sparse, link, open_resolved,
        rename_new, reopen_read_only, unnamed,
    };
    use rustix::io::Errno;

    #[test]
    fn a_file_appears_whole_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = File::open(dir.path()).unwrap();
        let mut file = File::from(unnamed(at.as_fd(), 0o444).unwrap());
        file.write_all(b"text").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(link(file.as_fd(), at.as_fd(), "name").unwrap(), NameOutcome::Now);
        assert_eq!(fs::read(dir.path().join("name")).unwrap(), b"text");
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o444);

        let other = unnamed(at.as_fd(), 0o444).unwrap();
        assert_eq!(link(other.as_fd(), at.as_fd(), "name").unwrap(), NameOutcome::Taken);
        assert_eq!(fs::read(dir.path().join("name")).unwrap(), b"text");
        let error = link(other.as_fd(), at.as_fd(), "absent/name").unwrap_err();
        assert_eq!(error, Errno::NOENT);
    }

    #[test]
    fn holes_stay_holes() {
        let dir = tempfile::tempdir().unwrap();
        let at = File::open(dir.path()).unwrap();
        let from = File::from(unnamed(at.as_fd(), 0o600).unwrap());
        // Data, a hole, data longer than one buffer, and a hole at the end.
        from.set_len(100 << 20).unwrap();
        let long = [b'x'; 200_000];
        from.write_all_at(b"begin", 0).unwrap();
        from.write_all_at(&long, (50 << 20) + 5).unwrap();
        let to = File::from(unnamed(at.as_fd(), 0o600).unwrap());
        copy_sparse(from.as_fd(), to.as_fd()).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 100 << 20);
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
        let mut head = [0; 6];
        to.read_exact_at(&mut head, 0).unwrap();
        assert_eq!(&head, b"begin\0");
        let mut middle = vec![0; long.len() + 10];
        to.read_exact_at(&mut middle, 50 << 20).unwrap();
        assert_eq!(&middle[..5], [0; 5]);
        assert_eq!(middle[5..][..long.len()], long);
        assert_eq!(&middle[5 + long.len()..], [0; 5]);
        let empty = File::from(unnamed(at.as_fd(), 0o600).unwrap());
        let copied = File::from(unnamed(at.as_fd(), 0o600).unwrap());
        copy_sparse(empty.as_fd(), copied.as_fd()).unwrap();
        assert_eq!(copied.metadata().unwrap().len(), 0);
    }

    #[test]
    fn renames_replace_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let at = File::open(dir.path()).unwrap();
        fs::write(dir.path().join("a"), "a").unwrap();
        fs::write(dir.path().join("b"), "b").unwrap();
        let rename = |from: &str, to: &str| rename_new((at.as_fd(), from), (at.as_fd(), to));
        assert_eq!(rename("a", "b"), Ok(NameOutcome::Taken));
        assert_eq!(fs::read(dir.path().join("b")).unwrap(), b"b");
        assert_eq!(rename("a", "c"), Ok(NameOutcome::Now));
        assert_eq!(fs::read(dir.path().join("c")).unwrap(), b"a");
        assert_eq!(rename("a", "d"), Err(Errno::NOENT));
    }

    #[test]
    fn a_second_open_file_only_reads() {
        let dir = tempfile::tempdir().unwrap();
        let at = File::open(dir.path()).unwrap();
        let file = unnamed(at.as_fd(), 0o600).unwrap();
        let mut same = File::from(reopen_read_only(file.as_fd()).unwrap());
        rustix::io::write(&file, b"text").unwrap();
        let mut text = String::new();
        same.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        assert_eq!(rustix::io::write(&same, b"more"), Err(Errno::BADF));
    }

    #[track_caller]
    fn check_copy(from: &File, content: &[u8]) {
        let dir = tempfile::tempdir().unwrap();
        let mut to = File::create_new(dir.path().join("to")).unwrap();
        match copy(from.as_fd(), to.as_fd()).unwrap() {
            Copied::Shared => {}
            Copied::Bytes(length) => assert_eq!(length, content.len() as u64),
        }
        assert_eq!(fs::read(dir.path().join("to")).unwrap(), content);
        to.write_all(b"!").unwrap();
    }

    #[test]
    fn copies_are_whole() {
        let dir = tempfile::tempdir().unwrap();
        for length in [0, 1, 4096, 1_000_003] {
            let content: Vec<u8> = (0..length).map(|i: u32| i.to_le_bytes()[0] ^ 0x5a).collect();
            fs::write(dir.path().join("from"), &content).unwrap();
            let mut from = File::open(dir.path().join("from")).unwrap();
            // The copy must ignore the file offset.
            from.read_exact(&mut vec![0; content.len() / 2]).unwrap();
            check_copy(&from, &content);
        }
    }

    /// Files of /proc report a size of 0, and copy_file_range copies no bytes from them.
    #[test]
    fn a_copy_of_a_file_without_length() {
        let from = File::open("/proc/sys/kernel/ostype").unwrap();
        check_copy(&from, b"Linux\n");
    }

    /// Any user can rename files, which makes openat2(2) return `EAGAIN` for paths with `..`.
    #[test]
    fn others_who_rename_stop_no_open() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir(&one).unwrap();
        let directory = File::open(folder.path()).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let opened = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    rustix::fs::rename(&one, &two).unwrap();
                    rustix::fs::rename(&two, &one).unwrap();
                }
            });
            let open = |_| {
                let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
                let path = "a/../a/b/../../file";
                open_resolved(directory.as_fd(), path, OFlags::RDONLY | OFlags::CLOEXEC, resolve)
            };
            let opened: Result<Vec<_>, _> = (0..500).map(open).collect();
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            opened
        });
        assert_eq!(opened.map(|it| it.len()), Ok(500));
    }
}
