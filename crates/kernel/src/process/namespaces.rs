//! Namespaces, and the maps of ids in user namespaces.
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
use rustix::thread::{Gid, ThreadNameSpaceType, Uid, UnshareFlags};

use super::ProcessError;
use crate::propagation::Propagation;

/// A kind of namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// Mounts.
    Mount,
    /// Users, groups and capabilities.
    User,
    /// Process numbers; for children only.
    Pid,
    /// Host name.
    Uts,
    /// System V IPC.
    Ipc,
    /// Network.
    Network,
    /// Control groups.
    Cgroup,
}

/// Gives this *thread* (and children and threads that it starts later) new namespaces. A user
/// namespace needs a process with one thread, and its id maps written from outside;
/// [`user_namespace`] does both elsewhere.
///
/// # Errors
/// The kernel's answer: `EPERM`, `ENOSPC` (a limit in `/proc/sys/user`), `EINVAL` (threads).
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
    // SAFETY: without FILES, no thread loses sight of a descriptor.
    unsafe { rustix::thread::unshare_unsafe(flags) }
        .map_err(ProcessError::call("make new namespaces"))
}

/// Moves this *thread* into namespaces of the process behind a pidfd, all or none.
///
/// # Errors
/// The kernel's answer: `EPERM`, `ESRCH` when the process has ended, `EINVAL` for a user namespace
/// in a process with several threads.
pub fn enter(process: BorrowedFd<'_>, namespaces: &[Namespace]) -> Result<(), ProcessError> {
    let failed = ProcessError::call("enter the namespaces of a process");
    if namespaces.contains(&Namespace::Mount) {
        // The kernel moves no thread that shares its working directory with others.
        // SAFETY: without FILES, no thread loses sight of a descriptor.
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

/// Gives this *thread* (and its later children) a mount namespace of its own. Other processes do not see its mounts,
/// which end with its last process.
///
/// `Propagation::Downstream` lets the host's mounts and, above all, unmounts through; with
/// `Private` this namespace keeps alive what the host unmounts.
///
/// # Errors
/// An error of the kernel: `EPERM` without `CAP_SYS_ADMIN`, `EINVAL` in a chroot whose root is not a mount.
pub fn own_mounts(from_host: Propagation) -> Result<(), ProcessError> {
    unshare(&[Namespace::Mount])?;
    set_root_propagation(from_host)
        .map_err(ProcessError::call("keep mounts from spreading out of a namespace"))
}

/// Only system calls, so that it may run between fork and exec.
pub(crate) fn set_root_propagation(from_host: Propagation) -> Result<(), Errno> {
    let kind = match from_host {
        Propagation::Private => MountPropagationFlags::PRIVATE,
        Propagation::Downstream => MountPropagationFlags::DOWNSTREAM,
        Propagation::Shared => MountPropagationFlags::SHARED,
    };
    rustix::mount::mount_change(c"/", kind | MountPropagationFlags::REC)
}

/// Returns the kind of a namespace, from a file of nsfs that is open for reading; `None` for an unknown kind.
///
/// # Errors
/// An error of the kernel: `ENOTTY` for a file that is not a namespace.
pub fn namespace_kind(file: BorrowedFd<'_>) -> Result<Option<Namespace>, ProcessError> {
    // Source: Linux `include/uapi/linux/nsfs.h`, `_IO(0xb7, 0x3)`.
    const NS_GET_NSTYPE: libc::Ioctl = 0xb703;
    // SAFETY: it has no argument, and the descriptor is open.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    if kind < 0 {
        return Err(ProcessError::call("ask for the kind of a namespace")(crate::last_errno()));
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

/// What tells the user namespace of a process from all others that there are: of this one, if there is no number.
#[must_use]
pub fn user_namespace_of(process: Option<Pid>) -> Option<(u64, u64)> {
    let name = process.map_or_else(|| "self".to_owned(), |it| it.as_raw_nonzero().to_string());
    let found = rustix::fs::stat(format!("/proc/{name}/ns/user")).ok()?;
    Some((found.st_dev, found.st_ino))
}

/// A range of ids in a user namespace and the ids outside that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// The first id inside.
    pub inside: u32,
    /// The first id outside.
    pub outside: u32,
    /// How many there are.
    pub count: u32,
}

/// Makes a user namespace without processes, for [`crate::mount::Detached::idmap`] or to test that one can be made.
/// Works with any number of threads.
///
/// # Errors
/// [`ProcessError::Limit`], or an error of the kernel: `EPERM` if not allowed; `EPERM` for maps beyond one's own id
/// without `CAP_SETUID`.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn user_namespace(users: &[IdRange], groups: &[IdRange]) -> Result<OwnedFd, ProcessError> {
    let unshare = || {
        // SAFETY: this process has one thread and makes nothing but system calls.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }
    };
    in_a_child("make a user namespace", (&[], Among::Own), unshare, |child| {
        write_maps(child, users, groups)?;
        open_namespace(child, "user")
    })
}

/// Makes a network namespace without processes, in which any port may be listened at where `/proc/sys` lets. It belongs to the user namespace
/// `owner`, or to this process's. Its loopback interface is down.
///
/// # Errors
/// [`ProcessError::Limit`], or an error of the kernel: `EPERM` without `CAP_SYS_ADMIN` in its owner.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn network_namespace(owner: Option<BorrowedFd<'_>>) -> Result<OwnedFd, ProcessError> {
    let unshare = || {
        if let Some(owner) = owner {
            rustix::thread::move_into_thread_name_spaces(owner, ThreadNameSpaceType::USER)?;
        }
        // SAFETY: this process has one thread and makes nothing but system calls.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        // As podman and docker have it, for programs that are not their container's root. Source: Linux
        // `Documentation/networking/ip-sysctl.rst`.
        let ports = c"/proc/sys/net/ipv4/ip_unprivileged_port_start";
        let ports = rustix::fs::open(ports, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        // In containers /proc/sys may be read-only: then low ports are for root, as they are without a network of one's own.
        let _as_usual = ports.and_then(|ports| rustix::io::write(ports, b"0"));
        Ok(())
    };
    let needed: Vec<_> = owner.into_iter().collect();
    let needed = (&*needed, Among::Own);
    in_a_child("make a network namespace", needed, unshare, |child| open_namespace(child, "net"))
}

/// The ids that there are in a user namespace, as this process's own namespace numbers them outside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdMaps {
    /// Of users.
    pub users: Vec<IdRange>,
    /// Of groups.
    pub groups: Vec<IdRange>,
}

/// Asks for the maps of a user namespace, of which nothing but a descriptor is known. `owner` is the user, with a group, who has
/// all rights in it.
///
/// # Errors
/// An error of the kernel: `EPERM` if the owner has not all rights in it, `ETIMEDOUT` if its root keeps this from looking.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn id_maps(user_namespace: BorrowedFd<'_>, owner: (u32, u32)) -> Result<IdMaps, ProcessError> {
    let enter = || enter_owned(user_namespace, owner);
    let needed = (&[user_namespace][..], Among::Hostile);
    in_a_child("ask for the maps of a user namespace", needed, enter, |child| {
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/{child}/{name}"));
            text.map(|it| ranges_of(&it)).map_err(|error| errno_of(&error))
        };
        Ok(IdMaps { users: read("uid_map")?, groups: read("gid_map")? })
    })
}

/// Has a child of root's become the owner of a user namespace, and enter it: nothing but system calls. The namespace's root may be
/// hostile. It can stop the child then and end it, but not look into it: the child is no one that its owner is not, and its
/// memory belongs to the namespace of before.
pub(crate) fn enter_owned(
    user_namespace: BorrowedFd<'_>,
    (user, group): (u32, u32),
) -> Result<(), Errno> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    // After that, since the kernel then takes what `fs.suid_dumpable` says. Entering a namespace of one's own leaves it alone:
    // Linux `kernel/cred.c`, `commit_creds` and `cred_cap_issubset`.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::thread::move_into_thread_name_spaces(user_namespace, ThreadNameSpaceType::USER)
}

/// Whose the namespaces are that a child is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Among {
    /// Nobody else's.
    Own,
    /// Those of somebody who may stop it.
    Hostile,
}

/// How long a child may take whose namespace's root may have stopped it.
const CHILD_MAX: Duration = Duration::from_secs(3);

/// Waits until something can be read of a child, for so long.
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

/// Ends a child that has nothing left to do, also one that is stopped, and waits for it.
pub(crate) fn end_child(child: Pid) {
    // It may have ended.
    let _ended = rustix::process::kill_process(child, Signal::KILL);
    let wait = || rustix::process::waitpid(Some(child), WaitOptions::empty());
    while matches!(wait(), Err(Errno::INTR)) {}
}

/// The ranges of a map. Source: user_namespaces(7), "User and group ID mappings".
#[must_use]
pub fn ranges_of(text: &str) -> Vec<IdRange> {
    let range = |line: &str| {
        let mut numbers = line.split_whitespace().map(|it| it.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(IdRange { inside: next()?, outside: next()?, count: next()? })
    };
    text.lines().filter_map(range).collect()
}

/// The user who made a user namespace, or whose child did: all rights in it are theirs. The number is one of this process's own
/// namespace.
///
/// # Errors
/// An error of the kernel: `ENOTTY` or `EINVAL` for a file that is no user namespace.
pub fn owner_of_user_namespace(file: BorrowedFd<'_>) -> Result<u32, ProcessError> {
    // Source: Linux `include/uapi/linux/nsfs.h`, `_IO(0xb7, 0x4)`.
    const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;
    let mut owner: libc::uid_t = u32::MAX;
    // SAFETY: it writes a uid_t to its argument, which lives as long as the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_OWNER_UID, &raw mut owner) };
    match result {
        0 => Ok(owner),
        _ => Err(ProcessError::call("ask for the owner of a namespace")(crate::last_errno())),
    }
}

/// Has a child move into namespaces of its own by `unshare`, which makes nothing but system calls, and looks at it by its number
/// until `look` is done. The child keeps the descriptors `needed`.
fn in_a_child<T>(
    step: &'static str,
    (needed, among): (&[BorrowedFd<'_>], Among),
    unshare: impl FnOnce() -> Result<(), Errno>,
    look: impl FnOnce(i32) -> Result<T, Errno>,
) -> Result<T, ProcessError> {
    let failed = |errno| match errno {
        // The kernel's word for a limit here (user_namespaces(7)), which has nothing to do with disks.
        Errno::NOSPC | Errno::USERS => ProcessError::Limit { step },
        errno => ProcessError::Call { step, source: errno },
    };
    let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(&failed);
    let (ready_read, ready_write) = pipe()?;
    let (done_read, done_write) = pipe()?;
    let kept = [needed, &[ready_write.as_fd(), done_read.as_fd()]].concat();
    let kept = sorted(&kept);

    // SAFETY: the child only makes system calls, then exits: of this process's other threads,
    // which it does not have, it needs nothing.
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
            end_child(Pid::from_raw(child).expect("fork answers a pid"));
            result.map_err(failed)
        }
    }
}

/// What the child does then. It answers with the errno of its unshare, and stays until it is no longer needed.
fn stay(result: Result<(), Errno>, ready: &OwnedFd, done: &OwnedFd) -> ! {
    let errno = result.err().map_or(0, Errno::raw_os_error);
    if rustix::io::write(ready, &errno.to_le_bytes()).is_ok() {
        // Until the end of the pipe, or anything unexpected.
        while rustix::io::read(done, &mut [0]) == Err(Errno::INTR) {}
    }
    // SAFETY: _exit runs no destructors or handlers of the parent's.
    unsafe { libc::_exit(0) }
}

/// The numbers of descriptors that a child keeps, in order.
pub(crate) fn sorted(kept: &[BorrowedFd<'_>]) -> Vec<RawFd> {
    let mut numbers: Vec<_> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    numbers.sort_unstable();
    numbers
}

/// Lets go of every other descriptor: the copy of a pipe's writing end, and all that would keep
/// the parent's files and mounts in use meanwhile. Only for a child that ends without dropping. It makes nothing but system
/// calls.
pub(crate) fn close_all_but(kept: &[RawFd]) {
    let mut first = 0;
    for last in kept.iter().copied().map(Some).chain([None]) {
        let end = last.map_or(RawFd::MAX, |it| it - 1);
        if first <= end {
            // SAFETY: nothing in this process uses these descriptors any more. An error (before
            // Linux 5.9) leaves them open, at worst until the parent exits.
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
        // The kernel takes a map in one write.
        File::options()
            .write(true)
            .open(format!("/proc/{child}/{name}"))
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| errno_of(&error))
    };
    write("uid_map", &map_text(users))?;
    if write("gid_map", &map_text(groups)).is_err() {
        // Without CAP_SETGID a group map is only taken after this (user_namespaces(7)).
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
