//! System calls that can fail, and their errors.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use nix::libc;

use super::Kind;

/// A system call that is about to be made.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) pid: i32,
    pub(super) number: u64,
    pub(super) arguments: [u64; 6],
}

/// Subject of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum About {
    /// A descriptor, in this argument.
    Descriptor(usize),
    /// A path, in this argument, relative to the directory in the argument before.
    At(usize),
    /// A path, in this argument.
    Path(usize),
    Nothing,
}

/// How a call can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Can {
    /// With this error.
    Fail(Kind),
    /// With this error, on a file or directory of a disk.
    FailOnDisk(Kind),
    /// With `EINTR`, on a blocking pipe or socket.
    BeInterrupted,
    /// Transfers fewer bytes than this argument requests.
    BeShort(usize),
}

use About::{At, Descriptor, Nothing, Path};
use Can::{BeInterrupted, BeShort, Fail, FailOnDisk};
use Kind::{Descriptors, Interrupted, Io, Memory, NoSpace};

const NEW_NAME: &[Can] = &[FailOnDisk(NoSpace), FailOnDisk(Io)];
const DISK: &[Can] = &[FailOnDisk(Io)];
const DESCRIPTOR: &[Can] = &[Fail(Descriptors)];
const WAIT: &[Can] = &[Fail(Interrupted)];

/// `(number, name, subject, errors)`. Conditions on arguments are in `Call::is_exempt`.
const CALLS: &[(i64, &str, About, &[Can])] = &[
    (
        libc::SYS_read,
        "read",
        Descriptor(0),
        &[FailOnDisk(Io), FailOnDisk(Memory), BeInterrupted, BeShort(2)],
    ),
    (
        libc::SYS_pread64,
        "pread64",
        Descriptor(0),
        &[FailOnDisk(Io), FailOnDisk(Memory), BeShort(2)],
    ),
    (libc::SYS_readv, "readv", Descriptor(0), &[FailOnDisk(Io), BeInterrupted]),
    (libc::SYS_preadv, "preadv", Descriptor(0), DISK),
    (
        libc::SYS_write,
        "write",
        Descriptor(0),
        &[FailOnDisk(NoSpace), FailOnDisk(Io), BeInterrupted, BeShort(2)],
    ),
    (
        libc::SYS_pwrite64,
        "pwrite64",
        Descriptor(0),
        &[FailOnDisk(NoSpace), FailOnDisk(Io), BeShort(2)],
    ),
    (
        libc::SYS_writev,
        "writev",
        Descriptor(0),
        &[FailOnDisk(NoSpace), FailOnDisk(Io), BeInterrupted, BeShort(2)],
    ),
    (libc::SYS_recvfrom, "recvfrom", Descriptor(0), &[BeInterrupted, BeShort(2)]),
    (libc::SYS_sendto, "sendto", Descriptor(0), &[BeInterrupted, BeShort(2)]),
    (libc::SYS_recvmsg, "recvmsg", Descriptor(0), &[BeInterrupted]),
    (libc::SYS_sendmsg, "sendmsg", Descriptor(0), &[BeInterrupted]),
    (
        libc::SYS_copy_file_range,
        "copy_file_range",
        Descriptor(2),
        &[FailOnDisk(NoSpace), FailOnDisk(Io), BeShort(4)],
    ),
    (
        libc::SYS_sendfile,
        "sendfile",
        Descriptor(0),
        &[FailOnDisk(NoSpace), FailOnDisk(Io), BeShort(3)],
    ),
    (libc::SYS_splice, "splice", Descriptor(2), &[BeInterrupted, BeShort(4)]),
    (libc::SYS_getrandom, "getrandom", Nothing, &[BeShort(1)]),
    (
        libc::SYS_getdents64,
        "getdents64",
        Descriptor(0),
        &[FailOnDisk(Io), FailOnDisk(Memory), BeShort(2)],
    ),
    (libc::SYS_fsync, "fsync", Descriptor(0), NEW_NAME),
    (libc::SYS_fdatasync, "fdatasync", Descriptor(0), NEW_NAME),
    (libc::SYS_syncfs, "syncfs", Descriptor(0), NEW_NAME),
    (libc::SYS_sync_file_range, "sync_file_range", Descriptor(0), NEW_NAME),
    (
        libc::SYS_fallocate,
        "fallocate",
        Descriptor(0),
        &[FailOnDisk(NoSpace), FailOnDisk(Io), Fail(Interrupted)],
    ),
    (libc::SYS_ftruncate, "ftruncate", Descriptor(0), NEW_NAME),
    (libc::SYS_fsetxattr, "fsetxattr", Descriptor(0), NEW_NAME),
    (libc::SYS_setxattr, "setxattr", Path(0), NEW_NAME),
    (libc::SYS_lsetxattr, "lsetxattr", Path(0), NEW_NAME),
    (libc::SYS_fgetxattr, "fgetxattr", Descriptor(0), DISK),
    (libc::SYS_flistxattr, "flistxattr", Descriptor(0), DISK),
    (libc::SYS_lgetxattr, "lgetxattr", Path(0), DISK),
    (libc::SYS_llistxattr, "llistxattr", Path(0), DISK),
    (libc::SYS_getxattr, "getxattr", Path(0), DISK),
    (libc::SYS_listxattr, "listxattr", Path(0), DISK),
    (libc::SYS_ioctl, "ioctl", Descriptor(0), DISK),
    (
        libc::SYS_openat,
        "openat",
        At(1),
        &[Fail(Descriptors), FailOnDisk(NoSpace), FailOnDisk(Io), FailOnDisk(Memory)],
    ),
    (libc::SYS_openat2, "openat2", At(1), &[Fail(Descriptors), FailOnDisk(Io), FailOnDisk(Memory)]),
    (libc::SYS_open, "open", Path(0), &[Fail(Descriptors), FailOnDisk(NoSpace), FailOnDisk(Io)]),
    (libc::SYS_statx, "statx", At(1), &[FailOnDisk(Io), FailOnDisk(Memory)]),
    (libc::SYS_newfstatat, "newfstatat", At(1), DISK),
    (libc::SYS_readlinkat, "readlinkat", At(1), DISK),
    (libc::SYS_readlink, "readlink", Path(0), DISK),
    (libc::SYS_unlinkat, "unlinkat", At(1), DISK),
    (libc::SYS_unlink, "unlink", Path(0), DISK),
    (libc::SYS_rmdir, "rmdir", Path(0), DISK),
    (libc::SYS_mkdirat, "mkdirat", At(1), NEW_NAME),
    (libc::SYS_mkdir, "mkdir", Path(0), NEW_NAME),
    (libc::SYS_mknodat, "mknodat", At(1), NEW_NAME),
    (libc::SYS_symlinkat, "symlinkat", At(2), NEW_NAME),
    (libc::SYS_symlink, "symlink", Path(1), NEW_NAME),
    (libc::SYS_linkat, "linkat", At(3), NEW_NAME),
    (libc::SYS_link, "link", Path(1), NEW_NAME),
    (libc::SYS_renameat2, "renameat2", At(3), NEW_NAME),
    (libc::SYS_renameat, "renameat", At(3), NEW_NAME),
    (libc::SYS_rename, "rename", Path(1), NEW_NAME),
    (libc::SYS_fchmod, "fchmod", Descriptor(0), DISK),
    (libc::SYS_fchmodat, "fchmodat", At(1), DISK),
    (libc::SYS_chmod, "chmod", Path(0), DISK),
    (libc::SYS_fchown, "fchown", Descriptor(0), DISK),
    (libc::SYS_fchownat, "fchownat", At(1), DISK),
    (libc::SYS_utimensat, "utimensat", At(1), DISK),
    (libc::SYS_socket, "socket", Nothing, DESCRIPTOR),
    (libc::SYS_socketpair, "socketpair", Nothing, DESCRIPTOR),
    (libc::SYS_pipe2, "pipe2", Nothing, DESCRIPTOR),
    (libc::SYS_dup, "dup", Descriptor(0), DESCRIPTOR),
    (libc::SYS_fcntl, "fcntl", Descriptor(0), &[Fail(Descriptors), Fail(Interrupted)]),
    (libc::SYS_flock, "flock", Descriptor(0), WAIT),
    (libc::SYS_memfd_create, "memfd_create", Nothing, DESCRIPTOR),
    (libc::SYS_pidfd_open, "pidfd_open", Nothing, DESCRIPTOR),
    (libc::SYS_epoll_create1, "epoll_create1", Nothing, DESCRIPTOR),
    (libc::SYS_eventfd2, "eventfd2", Nothing, DESCRIPTOR),
    (libc::SYS_timerfd_create, "timerfd_create", Nothing, DESCRIPTOR),
    (libc::SYS_signalfd4, "signalfd4", Nothing, DESCRIPTOR),
    (libc::SYS_inotify_init1, "inotify_init1", Nothing, DESCRIPTOR),
    (libc::SYS_inotify_add_watch, "inotify_add_watch", Path(1), &[Fail(NoSpace)]),
    (libc::SYS_accept4, "accept4", Descriptor(0), &[Fail(Descriptors), BeInterrupted]),
    (libc::SYS_fsopen, "fsopen", Path(0), DESCRIPTOR),
    (libc::SYS_fspick, "fspick", At(1), DESCRIPTOR),
    (libc::SYS_fsconfig, "fsconfig", Nothing, &[Fail(Io)]),
    (libc::SYS_fsmount, "fsmount", Nothing, &[Fail(Descriptors), Fail(NoSpace)]),
    (libc::SYS_open_tree, "open_tree", At(1), &[Fail(Descriptors), Fail(NoSpace)]),
    (libc::SYS_move_mount, "move_mount", At(3), &[Fail(NoSpace)]),
    (libc::SYS_mount, "mount", Path(1), &[Fail(NoSpace)]),
    (libc::SYS_unshare, "unshare", Nothing, &[Fail(NoSpace)]),
    (libc::SYS_wait4, "wait4", Nothing, WAIT),
    (libc::SYS_waitid, "waitid", Nothing, WAIT),
    (libc::SYS_poll, "poll", Nothing, WAIT),
    (libc::SYS_ppoll, "ppoll", Nothing, WAIT),
    (libc::SYS_epoll_wait, "epoll_wait", Nothing, WAIT),
    (libc::SYS_clock_nanosleep, "clock_nanosleep", Nothing, WAIT),
    (libc::SYS_nanosleep, "nanosleep", Nothing, WAIT),
];

/// The change to a call that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Injection {
    Error,
    /// Sets this argument to this number.
    Shorten(usize, u64),
}

/// A call that can fail.
#[derive(Debug)]
pub(super) struct Candidate {
    /// Name of the call, and its subject.
    pub(super) text: String,
    kinds: Vec<(Kind, Injection)>,
}

impl Candidate {
    pub(super) fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.kinds.iter().map(|(kind, _)| *kind)
    }

    pub(super) fn injection(&self, kind: Kind) -> Option<Injection> {
        self.kinds.iter().find(|it| it.0 == kind).map(|it| it.1)
    }
}

/// Type of the file of a descriptor or path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// A file or directory.
    Disk,
    /// A file of the kernel: `/proc`, `/sys`, `/dev`.
    Kernel,
    /// A pipe or a socket.
    Stream,
    Other,
}

impl Target {
    fn from_path(path: &[u8]) -> Self {
        let begins = |start: &str| path.starts_with(start.as_bytes());
        if begins("pipe:") || begins("socket:") {
            Self::Stream
        } else if begins("/proc") || begins("/sys") || (begins("/dev/") && !begins("/dev/shm")) {
            Self::Kernel
        } else if begins("/") {
            Self::Disk
        } else {
            Self::Other
        }
    }
}

impl Call {
    /// Returns how the call can fail, if it can.
    pub(super) fn candidate(&self) -> Option<Candidate> {
        let number = i64::try_from(self.number).ok()?;
        let (_, name, about, cans) = CALLS.iter().find(|it| it.0 == number)?;
        if self.is_exempt(name) {
            return None;
        }
        let path = self.subject(*about);
        let target = if *about == Nothing {
            Target::Other
        } else {
            Target::from_path(path.as_os_str().as_bytes())
        };
        let kinds: Vec<_> = cans
            .iter()
            .filter_map(|can| match *can {
                Fail(kind) => self.may(name, kind).then_some((kind, Injection::Error)),
                FailOnDisk(kind) => {
                    let may = target == Target::Disk && self.may(name, kind);
                    may.then_some((kind, Injection::Error))
                }
                BeInterrupted => {
                    let may = target == Target::Stream && self.blocks();
                    may.then_some((Interrupted, Injection::Error))
                }
                BeShort(argument) => {
                    let less = self.less(name, argument, target)?;
                    Some((Kind::Short, Injection::Shorten(argument, less)))
                }
            })
            .collect();
        if kinds.is_empty() {
            return None;
        }
        let text = format!("{name} {}", path.display());
        Some(Candidate { text: text.trim_end().to_owned(), kinds })
    }

    /// Whether this call never fails, independent of its subject.
    fn is_exempt(&self, name: &str) -> bool {
        let argument = |index: usize| self.arguments[index];
        let has = |index: usize, flag: i32| argument(index) & u64::from(flag.unsigned_abs()) != 0;
        match name {
            // If a write to standard error fails, the failure cannot be reported.
            "write" | "writev" => argument(0) == 2,
            // Calls that return immediately.
            "wait4" => has(2, libc::WNOHANG),
            "waitid" => has(3, libc::WNOHANG),
            "poll" => argument(2) == 0,
            "epoll_wait" => argument(3) == 0,
            "flock" => has(1, libc::LOCK_NB) || has(1, libc::LOCK_UN),
            // For an open descriptor, the kernel already has all the metadata.
            "statx" => has(2, libc::AT_EMPTY_PATH),
            "newfstatat" => has(3, libc::AT_EMPTY_PATH),
            // Only the command that creates a superblock reads a disk.
            "fsconfig" => argument(1) != 6,
            "ioctl" => !DISK_REQUESTS.contains(&argument(1)),
            _ => false,
        }
    }

    /// Whether the call can fail in this way, with these arguments.
    fn may(&self, name: &str, kind: Kind) -> bool {
        let flags = |index: usize| i32::try_from(self.arguments[index] & 0x7fff_ffff).unwrap_or(0);
        let makes = libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY);
        match (name, kind) {
            ("openat", NoSpace) => flags(2) & makes != 0,
            ("open", NoSpace) => flags(1) & makes != 0,
            ("open_tree", NoSpace) => self.arguments[2] & 1 != 0,
            ("fcntl", Descriptors) => [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC].contains(&flags(1)),
            ("fcntl", _) => [libc::F_SETLKW, libc::F_OFD_SETLKW].contains(&flags(1)),
            _ => true,
        }
    }

    /// Returns a smaller number of bytes than requested, if the call may return less.
    fn less(&self, name: &str, argument: usize, target: Target) -> Option<u64> {
        let asked = self.arguments[argument];
        let may = match name {
            // A directory entry has at most 280 bytes.
            "getdents64" => return (asked > 640).then_some(320),
            // getrandom(2): requests of up to 256 bytes are never cut short.
            "getrandom" => asked > 256,
            // pipe(7): this number of bytes is written completely or not at all.
            "write" | "writev" if target == Target::Stream && asked <= 4096 => false,
            // epoll(7): with edge-triggered notification, a short count means the end of the available data.
            _ if target == Target::Stream && !self.blocks() => false,
            // Writes to files of the kernel are always complete.
            "write" | "writev" | "pwrite64" => matches!(target, Target::Disk | Target::Stream),
            _ => target != Target::Other,
        };
        (may && asked > 1).then_some(asked / 2)
    }

    /// Whether the descriptor in the first argument blocks.
    fn blocks(&self) -> bool {
        let path = format!("/proc/{}/fdinfo/{}", self.pid, self.arguments[0]);
        let text = fs::read_to_string(path).unwrap_or_default();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|it| i32::from_str_radix(it.trim(), 8).ok()).unwrap_or(0);
        flags & libc::O_NONBLOCK == 0
    }

    fn subject(&self, about: About) -> PathBuf {
        match about {
            Nothing => PathBuf::new(),
            Descriptor(index) => self.descriptor(self.arguments[index]),
            Path(index) => self.path(self.arguments[index]),
            At(index) => {
                let path = self.path(self.arguments[index]);
                if path.is_absolute() {
                    return path;
                }
                self.descriptor(self.arguments[index - 1]).join(path)
            }
        }
    }

    /// Returns the path of a descriptor's file.
    fn descriptor(&self, number: u64) -> PathBuf {
        // The kernel uses 32 bits, of which the highest marks `AT_FDCWD`.
        let number = number & 0xffff_ffff;
        let link = if number > 0x7fff_ffff {
            format!("/proc/{}/cwd", self.pid)
        } else {
            format!("/proc/{}/fd/{number}", self.pid)
        };
        fs::read_link(link).unwrap_or_default()
    }

    /// Reads a path in the memory of the process.
    fn path(&self, address: u64) -> PathBuf {
        let mut bytes = vec![0; 4096];
        let memory = File::open(format!("/proc/{}/mem", self.pid));
        let got = memory.and_then(|it| it.read_at(&mut bytes, address)).unwrap_or(0);
        bytes.truncate(got);
        let end = bytes.iter().position(|it| *it == 0).unwrap_or(bytes.len());
        bytes.truncate(end);
        let path = CString::new(bytes).map(CString::into_bytes).unwrap_or_default();
        PathBuf::from(OsString::from_vec(path))
    }
}

/// Requests that read or write a disk: `FICLONE`, `FICLONERANGE`, `FS_IOC_ENABLE_VERITY`, `FS_IOC_SETFLAGS`.
const DISK_REQUESTS: [u64; 4] = [0x4004_9409, 0x4020_940d, 0x4080_6685, 0x4008_6602];
