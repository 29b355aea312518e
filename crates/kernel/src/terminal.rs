//! Terminals: their modes and sizes, and receiving the terminals that OCI runtimes make.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::AtFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::process::Pid;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};

pub use rustix::termios::Winsize;

/// The saved modes of a terminal, to be restored.
#[derive(Debug)]
pub struct Modes {
    terminal: OwnedFd,
    before: Termios,
}

impl Modes {
    /// Saves the modes of a terminal.
    ///
    /// # Errors
    /// `ENOTTY` if the file is not a terminal.
    pub fn save(terminal: BorrowedFd<'_>) -> Result<Self, Errno> {
        let before = rustix::termios::tcgetattr(terminal)?;
        let copy = terminal.try_clone_to_owned();
        let terminal = copy.map_err(|it| Errno::from_io_error(&it).unwrap_or(Errno::IO))?;
        Ok(Self { terminal, before })
    }

    /// Sets the terminal to raw mode, which passes each byte on at once, including Ctrl-C.
    ///
    /// # Errors
    /// An error of the kernel, such as `EIO` for a terminal that has been hung up.
    pub fn set_raw(&self) -> Result<(), Errno> {
        let mut raw = self.before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(&self.terminal, OptionalActions::Drain, &raw)
    }

    /// Restores the saved modes.
    pub fn restore(&self) {
        // A terminal that has been hung up needs no modes.
        let _gone =
            rustix::termios::tcsetattr(&self.terminal, OptionalActions::Drain, &self.before);
    }
}

/// Returns the size of a terminal. `None` if the file is not a terminal.
#[must_use]
pub fn size(terminal: BorrowedFd<'_>) -> Option<Winsize> {
    rustix::termios::tcgetwinsize(terminal).ok()
}

/// Sets the size of a terminal. Its foreground processes get `SIGWINCH` if the size changes.
pub fn resize(terminal: BorrowedFd<'_>, size: Winsize) -> Result<(), Errno> {
    rustix::termios::tcsetwinsize(terminal, size)
}

/// Returns the process group that Ctrl-C on this terminal interrupts. `None` if the terminal treats Ctrl-C as data.
#[must_use]
pub fn interrupted_by_ctrl_c(master: BorrowedFd<'_>) -> Option<Pid> {
    let modes = rustix::termios::tcgetattr(master).ok()?;
    let is_key = modes.local_modes.contains(LocalModes::ISIG)
        && modes.special_codes[SpecialCodeIndex::VINTR] == CTRL_C;
    is_key.then(|| rustix::termios::tcgetpgrp(master).ok()).flatten()
}

/// The byte that terminals send for Ctrl-C.
const CTRL_C: u8 = 3;

/// The file name of a [`Receiver`]'s socket in its directory.
pub const SOCKET: &str = "console.sock";

/// A socket on which a runtime sends the terminal that it makes for a container (`--console-socket`).
#[derive(Debug)]
pub struct Receiver {
    directory: File,
    name: String,
    listener: UnixListener,
}

impl Receiver {
    /// Makes the socket [`SOCKET`] in a directory.
    pub fn new(directory: &Path) -> std::io::Result<Self> {
        Self::named(directory, SOCKET)
    }

    /// Makes a socket of this name in a directory.
    pub fn named(directory: &Path, name: &str) -> std::io::Result<Self> {
        let directory = File::open(directory)?;
        // The address uses the descriptor, because the path may be longer than a socket's address (unix(7): 108
        // bytes).
        let address = format!("{}/{name}", crate::fd_name::proc_path(directory.as_fd()));
        let listener = UnixListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self { directory, name: name.to_owned(), listener })
    }

    /// Returns a path of the socket for other processes, valid while this process has the directory open.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}/{}", std::process::id(), self.directory.as_raw_fd(), self.name)
    }

    /// Returns the master side of the terminal, once [`as_fd`](Self::as_fd) is readable. `None` if no runtime has
    /// connected, or if the runtime failed before it made a terminal.
    pub fn receive(&self) -> std::io::Result<Option<OwnedFd>> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(false)?;
        let (_, master) = receive(&stream)?;
        Ok(master)
    }
}

impl rustix::fd::AsFd for Receiver {
    /// The descriptor is readable when a runtime has connected.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // A failure does not matter, because the directory is removed later.
        let _gone = rustix::fs::unlinkat(&self.directory, &*self.name, AtFlags::empty());
    }
}

/// Sends a byte together with a descriptor.
pub fn send(stream: &UnixStream, byte: u8, with: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [with];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = [byte];
    rustix::net::sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a byte, or `None` at the end of the stream, and the descriptor that was sent with the byte, if any.
pub fn receive(stream: &UnixStream) -> Result<(Option<u8>, Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // Runtimes send the terminal's name along with the descriptor.
    let mut bytes = [0; 4096];
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            result => break result?.bytes,
        }
    };
    let mut found = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            found = found.or(descriptors.last());
        }
    }
    Ok(((received > 0).then_some(bytes[0]), found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_come_with_bytes() {
        let (one, other) = UnixStream::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        send(&one, b'x', reader.as_fd()).unwrap();
        drop((one, reader));
        let (byte, descriptor) = receive(&other).unwrap();
        assert_eq!(byte, Some(b'x'));
        drop(writer);
        // Both the pipe and the stream are at their end.
        assert_eq!(rustix::io::read(descriptor.unwrap(), &mut [0]), Ok(0));
        assert!(matches!(receive(&other), Ok((None, None))));
    }

    #[test]
    fn a_runtime_finds_the_socket_by_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("d".repeat(200));
        std::fs::create_dir(&deep).unwrap();
        let receiver = Receiver::new(&deep).unwrap();
        assert!(receiver.receive().unwrap().is_none());
        let runtime = UnixStream::connect(receiver.path()).unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        send(&runtime, b'/', reader.as_fd()).unwrap();
        assert!(receiver.receive().unwrap().is_some());
        drop(receiver);
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_terminal_has_no_modes() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Modes::save(file.as_fd()).err(), Some(Errno::NOTTY));
        assert!(size(file.as_fd()).is_none());
        assert!(interrupted_by_ctrl_c(file.as_fd()).is_none());
    }
}
