//! Mounts for users other than root, who cannot change the attributes of these mounts.
#![expect(unsafe_code, reason = "fork, and unshare, which rustix calls unsafe")]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;
use rustix::thread::UnshareFlags;

use super::{Detached, MountError, Step};
use crate::fd_name::name_of;
use crate::process::{
    close_all_but, end_child, enter_owned, set_root_propagation, sorted, wait_to_read,
};
use crate::propagation::Propagation;

impl Detached {
    /// Turns this mount into one for the root of a user namespace, who may attach and stack it but cannot clear its
    /// attributes. (If the mount were simply sent, the receiver could clear `nodev` and `ro` with the capabilities in
    /// its own namespace.)
    ///
    /// The kernel locks attributes when it copies mounts into a mount namespace of a less privileged owner. So a
    /// child enters the namespace with the mount, as the namespace's `owner` (user and group). Source: Linux
    /// `fs/namespace.c`, `copy_mnt_ns` and `lock_mnt_tree`.
    ///
    /// # Errors
    /// An error of the kernel: `EPERM` if the caller has no `CAP_SYS_ADMIN` or `owner` lacks capabilities in the
    /// namespace; `ETIMEDOUT` or `EINTR` if the namespace's root stops or kills the child.
    ///
    /// # Panics
    /// If `fork` returns an invalid pid.
    pub fn locked_for(
        self,
        user_namespace: BorrowedFd<'_>,
        owner: (u32, u32),
    ) -> Result<Self, MountError> {
        let failed = |errno| MountError::call(Step::Lock, name_of(self.as_fd()), errno);
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(failed)?;
        let kept = sorted(&[self.as_fd(), user_namespace, theirs.as_fd()]);
        // SAFETY: the child makes only system calls and exits, so it does not matter that it has only one of this
        // process's threads.
        match unsafe { libc::fork() } {
            -1 => Err(failed(crate::last_errno())),
            0 => {
                close_all_but(&kept);
                // If the send fails, the parent sees the end of the socket.
                let _sent = match pass_through(self.as_fd(), user_namespace, owner) {
                    Ok(mount) => send(theirs.as_fd(), 0, Some(mount.as_fd())),
                    Err(errno) => send(theirs.as_fd(), errno.raw_os_error(), None),
                };
                // SAFETY: _exit runs no destructors or handlers of the parent.
                unsafe { libc::_exit(0) }
            }
            child => {
                drop(theirs);
                // By now, root of the namespace may have stopped or killed the child.
                let received = wait_to_read(ours.as_fd()).and_then(|()| receive(ours.as_fd()));
                end_child(Pid::from_raw(child).expect("fork returns a pid"));
                received.map(Self::from_fd).map_err(failed)
            }
        }
    }
}

/// The child's part. Makes only system calls.
fn pass_through(
    mount: BorrowedFd<'_>,
    user_namespace: BorrowedFd<'_>,
    owner: (u32, u32),
) -> Result<OwnedFd, Errno> {
    // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    set_root_propagation(Propagation::Private)?;
    // `/` is used because it always exists. The mount on it ends with this process.
    rustix::mount::move_mount(mount, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    // The kernel translates the working directory into the copy of this namespace.
    rustix::process::fchdir(mount)?;
    enter_owned(user_namespace, owner.0, owner.1)?;
    // SAFETY: as above.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(CWD, c"", flags)
}

fn send(socket: BorrowedFd<'_>, errno: i32, mount: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(mount) = &mount {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(mount)));
    }
    let bytes = errno.to_le_bytes();
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4];
    let got = loop {
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            got => break got?.bytes,
        }
    };
    let mount = control.drain().find_map(|it| match it {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    match (got, i32::from_le_bytes(bytes), mount) {
        (4, 0, Some(mount)) => Ok(mount),
        (4, errno, None) if errno != 0 => Err(Errno::from_raw_os_error(errno)),
        // The child was killed.
        _ => Err(Errno::INTR),
    }
}
