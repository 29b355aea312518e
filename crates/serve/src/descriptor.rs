//! Descriptors that come through sockets.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

/// What came in one piece.
pub(crate) struct ReceivedPiece {
    /// Bytes in the buffer.
    pub(crate) bytes: usize,
    /// What was cut off.
    pub(crate) flags: ReturnFlags,
    /// What came along, at most one.
    pub(crate) descriptor: Option<OwnedFd>,
}

/// Waits for bytes, and takes the descriptor that comes along.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<ReceivedPiece> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Err(Errno::INTR) => {}
            got => break got?,
        }
    };
    let descriptor = control.drain().find_map(|it| match it {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(ReceivedPiece { bytes: got.bytes, flags: got.flags, descriptor })
}
