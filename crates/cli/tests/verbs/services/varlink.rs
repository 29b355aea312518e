//! A client of varlink services that can send invalid requests.

use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use kernel::mount::Detached;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde_json::{Value, json};

/// A connection to a service.
pub(crate) struct Client(pub(crate) UnixStream);

/// A reply with its descriptors.
pub(crate) struct Answer {
    pub(crate) value: Value,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Answer {
    /// Returns the name of the error without the interface.
    pub(crate) fn error(&self) -> &str {
        let name = self.value["error"].as_str().unwrap_or("none");
        name.rsplit('.').next().unwrap()
    }

    pub(crate) fn reason(&self) -> &str {
        self.value["parameters"]["reason"].as_str().unwrap_or_default()
    }

    pub(crate) fn mount(mut self) -> Detached {
        assert_eq!(self.error(), "none", "{}", self.value);
        Detached::from_fd(self.descriptors.remove(0))
    }
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> Self {
        Self(UnixStream::connect(socket).unwrap())
    }

    pub(crate) fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
    }

    /// Returns the next reply, or `None` if the service has closed the connection.
    pub(crate) fn receive(&self) -> Option<Answer> {
        let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
        while bytes.last() != Some(&0) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut piece = [0; 4096];
            let parts = &mut [IoSliceMut::new(&mut piece)];
            let got = rustix::net::recvmsg(&self.0, parts, &mut control, RecvFlags::CMSG_CLOEXEC);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(some) = message {
                    descriptors.extend(some);
                }
            }
            match got {
                Ok(got) if got.bytes > 0 => bytes.extend_from_slice(&piece[..got.bytes]),
                _ => return None,
            }
        }
        bytes.pop();
        Some(Answer { value: serde_json::from_slice(&bytes).unwrap(), descriptors })
    }

    pub(crate) fn ask(
        &self,
        method: &str,
        parameters: &Value,
        descriptors: &[BorrowedFd<'_>],
    ) -> Answer {
        let call = json!({"method": method, "parameters": parameters}).to_string() + "\0";
        self.send(call.as_bytes(), descriptors).unwrap();
        self.receive().expect("an answer")
    }

    /// Calls a method with `more`, and returns all replies.
    pub(crate) fn list(&self, method: &str, parameters: &Value) -> Vec<Value> {
        let call = json!({"method": method, "parameters": parameters, "more": true}).to_string();
        self.send((call + "\0").as_bytes(), &[]).unwrap();
        let mut bytes = Vec::new();
        loop {
            let mut piece = [0; 4096];
            let count = (&self.0).read(&mut piece).unwrap();
            assert!(count > 0, "the list has no end");
            bytes.extend_from_slice(&piece[..count]);
            if bytes.last() != Some(&0) {
                continue;
            }
            let answers = bytes.split(|it| *it == 0).filter(|it| !it.is_empty());
            let answers: Vec<Value> =
                answers.map(|it| serde_json::from_slice(it).unwrap()).collect();
            if answers.last().is_some_and(|it| it["continues"] != true) {
                return answers;
            }
        }
    }
}
