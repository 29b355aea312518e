//! Namespaces, and the id maps of user namespaces.
#![expect(unsafe_code, reason = "fork, and unshare, which rustix calls unsafe")]

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountPropagationFlags;
use rustix::process::{DumpableBehavior, Pid, Signal, WaitOptions};
use rustix::thread::{Gid, LinkNameSpaceType, ThreadNameSpaceType, Uid, UnshareFlags};

use super::ProcessError;
use crate::propagation::Propagation;

/// A kind of namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    Mount,
    /// Users, groups and capabilities.
    User,
    /// Process ids. A process that unshares it is not moved; only its later children are in the new namespace.
    Pid,
    /// Host name and NIS domain name.
    Uts,
    /// System V IPC.
    Ipc,
    Network,
    Cgroup,
}

/// Moves this *thread* (and its later children and threads) into new namespaces. A user namespace requires a process
/// with one thread, and another process to write its id maps; [`user_namespace`] does both in a child.
///
/// # Errors
/// An error of the kernel: `EPERM`, `ENOSPC` (a limit in `/proc/sys/user`), `EINVAL` (several threads).
pub fn unshare(namespaces: &[Namespace]) -> Result<(), ProcessError> {
    let flags = namespaces.iter().fold(UnshareFlags::empty(), |flags, namespace| {
        flags
            | match namespace {
                Namespace::Mount => UnshareFlags::NEWNS,
                Namespace::User => UnshareFlags::NEWUSER,
                Namespace::Pid => UnshareFlags::NEWPID,
                Namespace::Uts => UnshareFlags::NEWUTS,
                Namespace::Ipc => UnshareFlags::NEWIPC,
                Namespace::Network => UnshareFlags::NEWNET,
                Namespace::Cgroup => UnshareFlags::NEWCGROUP,
            }
    });
    // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
    unsafe { rustix::thread::unshare_unsafe(flags) }
        .map_err(ProcessError::call("make new namespaces"))
}

/// Moves this *thread* into all given namespaces of the process behind a pidfd, or into none on error.
///
/// # Errors
/// An error of the kernel: `EPERM`, `ESRCH` if the process has exited, `EINVAL` for a user namespace if this process
/// has several threads.
pub fn enter(process: BorrowedFd<'_>, namespaces: &[Namespace]) -> Result<(), ProcessError> {
    let failed = ProcessError::call("enter the namespaces of a process");
    if namespaces.contains(&Namespace::Mount) {
        // The kernel refuses a thread that shares its working directory with other threads.
        // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.map_err(&failed)?;
    }
    let types = namespaces.iter().fold(ThreadNameSpaceType::empty(), |types, namespace| {
        types
            | match namespace {
                Namespace::Mount => ThreadNameSpaceType::MOUNT,
                Namespace::User => ThreadNameSpaceType::USER,
                Namespace::Pid => ThreadNameSpaceType::PROCESS_ID,
                Namespace::Uts => ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME,
                Namespace::Ipc => ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION,
                Namespace::Network => ThreadNameSpaceType::NETWORK,
                Namespace::Cgroup => ThreadNameSpaceType::CONTROL_GROUP,
            }
    });
    rustix::thread::move_into_thread_name_spaces(process, types).map_err(failed)
}

/// Moves this *thread* (and its later children) into an open network namespace.
///
/// # Errors
/// An error of the kernel: `EPERM` without `CAP_SYS_ADMIN` in both user namespaces, `EINVAL` for another file.
pub fn enter_network(namespace: BorrowedFd<'_>) -> Result<(), ProcessError> {
    let kind = Some(LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(namespace, kind)
        .map_err(ProcessError::call("enter a network namespace"))
}

/// Moves this *thread* (and its later children) into a new mount namespace. Other processes do not see its mounts,
/// which disappear when its last process ends.
///
/// With `Propagation::Downstream`, the namespace receives the host's mounts and, more importantly, unmounts. With
/// `Private`, it keeps file systems busy that the host has unmounted.
///
/// # Errors
/// An error of the kernel: `EPERM` without `CAP_SYS_ADMIN`, `EINVAL` in a chroot whose root is not a mount.
pub fn own_mounts(from_host: Propagation) -> Result<(), ProcessError> {
    unshare(&[Namespace::Mount])?;
    set_root_propagation(from_host)
        .map_err(ProcessError::call("make mounts private in a namespace"))
}

/// The mount namespace and the root directory of a process that is about to move into another namespace, and may
/// return.
#[derive(Debug)]
pub struct MountsBefore {
    namespace: OwnedFd,
    root: OwnedFd,
}

impl MountsBefore {
    /// Opens those of this process.
    ///
    /// # Errors
    /// An error of the kernel, such as `ENOENT` without `/proc`.
    pub fn open() -> Result<Self, ProcessError> {
        let failed = ProcessError::call("open a mount namespace");
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let namespace = rustix::fs::open("/proc/self/ns/mnt", flags, Mode::empty());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty());
        Ok(Self { namespace: namespace.map_err(&failed)?, root: root.map_err(failed)? })
    }

    /// Moves this process back, and to the root directory that it had, also if that is not the root of the namespace
    /// (chroot). The mounts of the namespace that it leaves disappear with the last process in it.
    ///
    /// # Errors
    /// An error of the kernel: `EINVAL` if this process has several threads, `EPERM` without `CAP_SYS_ADMIN` and
    /// `CAP_SYS_CHROOT`.
    pub fn restore(self) -> Result<(), ProcessError> {
        // This changes nothing. If it is not allowed, this process must not enter the namespace, in which it would have
        // another root directory.
        rustix::process::chroot("/").map_err(ProcessError::call("change a root directory"))?;
        let kind = Some(LinkNameSpaceType::Mount);
        rustix::thread::move_into_link_name_space(self.namespace.as_fd(), kind)
            .map_err(ProcessError::call("return to a mount namespace"))?;
        rustix::process::fchdir(&self.root)
            .and_then(|()| rustix::process::chroot("."))
            .map_err(ProcessError::call("return to a root directory"))
    }
}

/// Sets the propagation of all mounts. Makes only system calls, so it may run between fork and exec.
pub(crate) fn set_root_propagation(from_host: Propagation) -> Result<(), Errno> {
    let kind = match from_host {
        Propagation::Private => MountPropagationFlags::PRIVATE,
        Propagation::Downstream => MountPropagationFlags::DOWNSTREAM,
        Propagation::Shared => MountPropagationFlags::SHARED,
    };
    rustix::mount::mount_change(c"/", kind | MountPropagationFlags::REC)
}

/// Returns the kind of a namespace from an open file of nsfs. `None` for an unknown kind.
///
/// # Errors
/// An error of the kernel: `ENOTTY` for a file that is not a namespace.
pub fn namespace_kind(file: BorrowedFd<'_>) -> Result<Option<Namespace>, ProcessError> {
    // Source: Linux `include/uapi/linux/nsfs.h`, `_IO(0xb7, 0x3)`.
    const NS_GET_NSTYPE: libc::Ioctl = 0xb703;
    // SAFETY: the ioctl has no argument, and the descriptor is open.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    if kind < 0 {
        return Err(ProcessError::call("read the kind of a namespace")(crate::last_errno()));
    }
    Ok(match kind {
        libc::CLONE_NEWNS => Some(Namespace::Mount),
        libc::CLONE_NEWUSER => Some(Namespace::User),
        libc::CLONE_NEWPID => Some(Namespace::Pid),
        libc::CLONE_NEWUTS => Some(Namespace::Uts),
        libc::CLONE_NEWIPC => Some(Namespace::Ipc),
        libc::CLONE_NEWNET => Some(Namespace::Network),
        libc::CLONE_NEWCGROUP => Some(Namespace::Cgroup),
        _ => None,
    })
}

/// Returns the device and inode number that identify the user namespace of a process, or of this process if `None`.
#[must_use]
pub fn user_namespace_of(process: Option<Pid>) -> Option<(u64, u64)> {
    let name = process.map_or_else(|| "self".to_owned(), |it| it.as_raw_nonzero().to_string());
    let found = rustix::fs::stat(format!("/proc/{name}/ns/user")).ok()?;
    Some((found.st_dev, found.st_ino))
}

/// A range of ids in a user namespace, mapped to ids of the outer namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First id inside the namespace.
    pub inside: u32,
    /// First id in the outer namespace.
    pub outside: u32,
    /// Number of ids.
    pub count: u32,
}

/// Makes a user namespace without processes, for [`crate::mount::Detached::idmap`] or to test whether one can be
/// made. Works with any number of threads.
///
/// # Errors
/// [`ProcessError::Limit`], or an error of the kernel: `EPERM` if not allowed, or for maps beyond the caller's own id
/// without `CAP_SETUID`.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn user_namespace(users: &[IdRange], groups: &[IdRange]) -> Result<OwnedFd, ProcessError> {
    let unshare = || {
        // SAFETY: the child has one thread and makes only system calls.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }
    };
    in_a_child("make a user namespace", &[], Among::Own, unshare, |child| {
        write_maps(child, users, groups)?;
        open_namespace(child, "user")
    })
}

/// Makes a network namespace without processes. It belongs to the user namespace `owner`, or else to the user
/// namespace of this process. Its loopback interface is down. Programs without privileges may bind any port if
/// `/proc/sys` is writable.
///
/// # Errors
/// [`ProcessError::Limit`], or an error of the kernel: `EPERM` without `CAP_SYS_ADMIN` in the owner.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn network_namespace(owner: Option<BorrowedFd<'_>>) -> Result<OwnedFd, ProcessError> {
    let unshare = || {
        if let Some(owner) = owner {
            rustix::thread::move_into_thread_name_spaces(owner, ThreadNameSpaceType::USER)?;
        }
        // SAFETY: the child has one thread and makes only system calls.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        // Allows unprivileged programs in the container to bind all ports, as podman and docker do. Source: Linux
        // `Documentation/networking/ip-sysctl.rst`.
        let ports = c"/proc/sys/net/ipv4/ip_unprivileged_port_start";
        let ports = rustix::fs::open(ports, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        // In a container, /proc/sys may be read-only. Then low ports are reserved for root, as in the host's network.
        let _as_usual = ports.and_then(|ports| rustix::io::write(ports, b"0"));
        Ok(())
    };
    let needed: Vec<_> = owner.into_iter().collect();
    in_a_child("make a network namespace", &needed, Among::Own, unshare, |child| {
        open_namespace(child, "net")
    })
}

/// The id maps of a user namespace. The outer ids are those of this process's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdMaps {
    /// Ranges of user ids.
    pub users: Vec<IdRange>,
    /// Ranges of group ids.
    pub groups: Vec<IdRange>,
}

/// Reads the id maps of a user namespace from a descriptor of it, with a child that enters it. `owner` is the user
/// and group that have all capabilities in the namespace.
///
/// # Errors
/// An error of the kernel: `EPERM` if `owner` lacks capabilities in the namespace, `ETIMEDOUT` if the namespace's
/// root stops the child.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn id_maps(user_namespace: BorrowedFd<'_>, owner: (u32, u32)) -> Result<IdMaps, ProcessError> {
    let enter = || enter_owned(user_namespace, owner.0, owner.1);
    let step = "read the id maps of a user namespace";
    in_a_child(step, &[user_namespace], Among::Hostile, enter, |child| {
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/{child}/{name}"));
            text.map(|it| ranges_of(&it)).map_err(|error| errno_of(&error))
        };
        Ok(IdMaps { users: read("uid_map")?, groups: read("gid_map")? })
    })
}

/// Switches a forked child from root to the owner of a user namespace and moves it into the namespace. Makes only
/// system calls. The namespace's root may be hostile: it can stop or kill the child, but not trace it, because the
/// child has no other ids than the owner's, and its memory belongs to the previous namespace.
pub(crate) fn enter_owned(
    user_namespace: BorrowedFd<'_>,
    user: u32,
    group: u32,
) -> Result<(), Errno> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    // This flag is set after the ids, because changing the ids resets it to `fs.suid_dumpable`. Entering an owned
    // namespace keeps the flag: Linux `kernel/cred.c`, `commit_creds` and `cred_cap_issubset`.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::thread::move_into_thread_name_spaces(user_namespace, ThreadNameSpaceType::USER)
}

/// The trust in the namespaces that a child enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Among {
    /// The child itself makes the namespaces.
    Own,
    /// The namespaces belong to another user, who may stop the child.
    Hostile,
}

/// Timeout for a child that another user may have stopped.
const CHILD_MAX: Duration = Duration::from_secs(3);

/// Waits until a child's pipe is readable, for at most [`CHILD_MAX`].
///
/// # Errors
/// `ETIMEDOUT`.
pub(crate) fn wait_to_read(from: BorrowedFd<'_>) -> Result<(), Errno> {
    let deadline = Instant::now() + CHILD_MAX;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_range| Errno::INVAL)?;
        let mut fds = [PollFd::from_borrowed_fd(from, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&left)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Err(Errno::INTR) => {}
            polled => return polled.map(drop),
        }
    }
}

/// Kills a child, even a stopped one, and reaps it.
pub(crate) fn end_child(child: Pid) {
    // The child may have exited already.
    let _ended = rustix::process::kill_process(child, Signal::KILL);
    let wait = || rustix::process::waitpid(Some(child), WaitOptions::empty());
    while matches!(wait(), Err(Errno::INTR)) {}
}

/// Parses the ranges of an id map. Source: user_namespaces(7), "User and group ID mappings".
#[must_use]
pub fn ranges_of(text: &str) -> Vec<IdRange> {
    let range = |line: &str| {
        let mut numbers = line.split_whitespace().map(|it| it.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(IdRange { inside: next()?, outside: next()?, count: next()? })
    };
    text.lines().filter_map(range).collect()
}

/// Returns the owner of a user namespace, who has all capabilities in it: the user of the process that made it. The id
/// is shown as in this process's user namespace.
///
/// # Errors
/// An error of the kernel: `ENOTTY` or `EINVAL` for a file that is not a user namespace.
pub fn owner_of_user_namespace(file: BorrowedFd<'_>) -> Result<u32, ProcessError> {
    // Source: Linux `include/uapi/linux/nsfs.h`, `_IO(0xb7, 0x4)`.
    const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;
    let mut owner: libc::uid_t = u32::MAX;
    // SAFETY: the ioctl writes a uid_t to its argument, which lives through the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_OWNER_UID, &raw mut owner) };
    match result {
        0 => Ok(owner),
        _ => Err(ProcessError::call("read the owner of a namespace")(crate::last_errno())),
    }
}

/// Forks a child that enters namespaces by calling `unshare`, which may only make system calls. Then calls `look`
/// with the child's pid, and ends the child. The child keeps the descriptors `needed`.
fn in_a_child<T>(
    step: &'static str,
    needed: &[BorrowedFd<'_>],
    among: Among,
    unshare: impl FnOnce() -> Result<(), Errno>,
    look: impl FnOnce(i32) -> Result<T, Errno>,
) -> Result<T, ProcessError> {
    let failed = |errno| match errno {
        // The kernel reports a reached limit of namespaces as ENOSPC (user_namespaces(7)); disk space is not the
        // cause.
        Errno::NOSPC | Errno::USERS => ProcessError::Limit { step },
        errno => ProcessError::Call { step, source: errno },
    };
    let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(&failed);
    let (ready_read, ready_write) = pipe()?;
    let (done_read, done_write) = pipe()?;
    let kept = [needed, &[ready_write.as_fd(), done_read.as_fd()]].concat();
    let kept = sorted(&kept);

    // SAFETY: the child only makes system calls and exits, so it does not matter that it has only one of this
    // process's threads.
    match unsafe { libc::fork() } {
        -1 => Err(failed(crate::last_errno())),
        0 => {
            close_all_but(&kept);
            stay(unshare(), &ready_write, &done_read)
        }
        child => {
            drop(ready_write);
            drop(done_read);
            let is_there = match among {
                Among::Own => Ok(()),
                Among::Hostile => wait_to_read(ready_read.as_fd()),
            };
            let result =
                is_there.and_then(|()| is_ready(File::from(ready_read))).and_then(|()| look(child));
            // The child sees the end of the pipe, and exits.
            drop(done_write);
            end_child(Pid::from_raw(child).expect("fork returns a pid"));
            result.map_err(failed)
        }
    }
}

/// The child's last step: reports the errno of its unshare, and waits until the parent closes the pipe.
fn stay(result: Result<(), Errno>, ready: &OwnedFd, done: &OwnedFd) -> ! {
    let errno = result.err().map_or(0, Errno::raw_os_error);
    if rustix::io::write(ready, &errno.to_le_bytes()).is_ok() {
        // Waits for the end of the pipe, or for anything unexpected.
        while rustix::io::read(done, &mut [0]) == Err(Errno::INTR) {}
    }
    // SAFETY: _exit runs no destructors or handlers of the parent.
    unsafe { libc::_exit(0) }
}

/// Returns the numbers of the descriptors that a child keeps, in ascending order.
pub(crate) fn sorted(kept: &[BorrowedFd<'_>]) -> Vec<RawFd> {
    let mut numbers: Vec<_> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    numbers.sort_unstable();
    numbers
}

/// Closes every other descriptor: the copy of a pipe's writing end, and all descriptors that would keep the parent's
/// files and mounts in use. Only for a child that exits without running destructors. Makes only system calls.
pub(crate) fn close_all_but(kept: &[RawFd]) {
    let mut first = 0;
    for last in kept.iter().copied().map(Some).chain([None]) {
        let end = last.map_or(RawFd::MAX, |it| it - 1);
        if first <= end {
            // SAFETY: nothing in this process uses these descriptors any more. If the call fails (before Linux 5.9),
            // they stay open, at worst until the parent exits.
            unsafe { libc::syscall(libc::SYS_close_range, first, end, 0) };
        }
        first = last.map_or(RawFd::MAX, |it| it + 1);
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn is_ready(mut ready: File) -> Result<(), Errno> {
    let mut answer = [0; 4];
    ready.read_exact(&mut answer).map_err(|error| errno_of(&error))?;
    match i32::from_le_bytes(answer) {
        0 => Ok(()),
        refused => Err(Errno::from_raw_os_error(refused)),
    }
}

fn open_namespace(child: i32, name: &str) -> Result<OwnedFd, Errno> {
    File::open(format!("/proc/{child}/ns/{name}"))
        .map(OwnedFd::from)
        .map_err(|error| errno_of(&error))
}

fn write_maps(child: i32, users: &[IdRange], groups: &[IdRange]) -> Result<(), Errno> {
    let write = |name: &str, text: &str| {
        // The kernel accepts a map only in a single write.
        File::options()
            .write(true)
            .open(format!("/proc/{child}/{name}"))
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| errno_of(&error))
    };
    write("uid_map", &map_text(users))?;
    if write("gid_map", &map_text(groups)).is_err() {
        // Without CAP_SETGID, the kernel accepts a group map only after this (user_namespaces(7)).
        write("setgroups", "deny")?;
        write("gid_map", &map_text(groups))?;
    }
    Ok(())
}

pub(super) fn map_text(ranges: &[IdRange]) -> String {
    ranges.iter().fold(String::new(), |mut text, range| {
        writeln!(text, "{} {} {}", range.inside, range.outside, range.count)
            .expect("writing to a string");
        text
    })
}
