//! A FUSE file system of one file, whose server is the test.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::thread::{self, JoinHandle};

use kernel::fuse::{
    Caching, FileHandle, FuseConnection, FuseError, FuseOperation, FuseRequest, NodeAttributes,
    NodeNumber, ReplyBody, RequestBuffer, Resent, Served, TakenRequest, Unique,
};
use kernel::mount::{Detached, FuseAccess, FuseOptions};
use kernel::version::KernelVersion;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use testing::skipped;

/// The whole content of the file.
const BYTES: &[u8] = b"bytes of a file\n";

/// A request that a test has taken.
struct Taken {
    unique: Unique,
    is_read: bool,
}

/// Waits for a request, and replies unless it is a read. Returns `None` once the file system is unmounted.
fn serve_one(connection: &FuseConnection, buffer: &mut RequestBuffer) -> Option<Taken> {
    poll(&mut [PollFd::new(connection, PollFlags::IN)], None).unwrap();
    match connection.take(buffer).unwrap() {
        TakenRequest::Over => None,
        TakenRequest::Nothing => panic!("there is a request"),
        TakenRequest::Request(request) => {
            reply(connection, &request);
            let is_read = matches!(request.operation, FuseOperation::Read { .. });
            Some(Taken { unique: request.unique, is_read })
        }
    }
}

fn reply(connection: &FuseConnection, request: &FuseRequest<'_>) {
    let bytes = BYTES.len() as u64;
    let attributes = NodeAttributes::file(NodeNumber::ROOT.0, bytes, Mode::RUSR, (0, 0));
    let body = match &request.operation {
        FuseOperation::Init(offer) => ReplyBody::init(offer, Served::File),
        FuseOperation::GetAttributes(_) => ReplyBody::attributes(&attributes),
        FuseOperation::Open(_) => ReplyBody::opened(FileHandle(7), Caching::None),
        FuseOperation::Statistics => ReplyBody::statistics(bytes, 1),
        FuseOperation::Flush(FileHandle(7)) | FuseOperation::Release(FileHandle(7)) => {
            ReplyBody::done()
        }
        FuseOperation::Read { handle: FileHandle(7), offset: 0, size } if *size >= 16 => return,
        FuseOperation::Interrupt(_) => return,
        _ => return connection.refuse(request.unique, Errno::NOSYS).unwrap(),
    };
    match connection.reply(request.unique, &body) {
        // The kernel has already dropped the request, for example because its caller ended. Source: Linux
        // `fs/fuse/dev.c`, `fuse_dev_do_write`.
        Err(FuseError::Call { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        replied => replied.unwrap(),
    }
}

fn mounted() -> Option<(FuseConnection, Detached)> {
    if !rustix::process::geteuid().is_root() {
        skipped("needs root");
        return None;
    }
    let connection = FuseConnection::open().unwrap();
    let (root, access) = (FileType::RegularFile, FuseAccess::Owner);
    let options = FuseOptions { root, owner: (0, 0), access, name: "test" };
    let mount = kernel::mount::fuse(connection.as_fd(), &options);
    let mount = mount.unwrap();
    Some((connection, mount))
}

/// Opens the file. Another thread must serve the requests.
fn open(mount: &Detached) -> File {
    File::open(format!("/proc/self/fd/{}", mount.as_fd().as_raw_fd())).unwrap()
}

fn read(mount: Detached) -> JoinHandle<io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let file = open(&mount);
        // After this, only the open file keeps the file system.
        drop(mount);
        assert_eq!(file.metadata()?.len(), BYTES.len() as u64);
        let mut bytes = vec![0; BYTES.len()];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    })
}

/// Handles requests until it has taken a read.
fn until_read(connection: &FuseConnection) -> Unique {
    let mut buffer = RequestBuffer::default();
    loop {
        let taken = serve_one(connection, &mut buffer).unwrap();
        if taken.is_read {
            return taken.unique;
        }
    }
}

/// Serves until the file system is unmounted.
fn until_over(connection: &FuseConnection) {
    let mut buffer = RequestBuffer::default();
    while let Some(taken) = serve_one(connection, &mut buffer) {
        assert!(!taken.is_read);
    }
    assert!(!connection.is_mounted().unwrap());
    assert_eq!(connection.resend().unwrap(), Resent::Yes);
}

#[test]
fn the_root_may_be_a_file_and_goes_with_its_last_descriptor() {
    let Some((connection, mount)) = mounted() else { return };
    let reader = read(mount);
    let unique = until_read(&connection);
    assert!(connection.is_mounted().unwrap() && !reader.is_finished());
    connection.reply_bytes(unique, BYTES).unwrap();
    // A second reply to the same request is an error.
    let again = connection.reply_bytes(unique, BYTES);
    let errno = match again.unwrap_err() {
        FuseError::Call { source, .. } => source,
        error => panic!("{error:?}"),
    };
    assert!(matches!(errno, Errno::NOENT | Errno::NODEV));
    until_over(&connection);
    assert_eq!(reader.join().unwrap().unwrap(), BYTES);
}

#[test]
fn a_read_that_is_refused_is_an_error() {
    let Some((connection, mount)) = mounted() else { return };
    let reader = read(mount);
    connection.refuse(until_read(&connection), Errno::IO).unwrap();
    until_over(&connection);
    let error = reader.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
}

#[test]
fn what_another_took_is_asked_again() {
    let Some((connection, mount)) = mounted() else { return };
    let reader = read(mount);
    let first = until_read(&connection);
    // This connection simulates another process with another descriptor.
    let next = FuseConnection::adopt(connection.as_fd().try_clone_to_owned().unwrap());
    drop(connection);
    if next.resend().unwrap() == Resent::Unsupported {
        assert!(KernelVersion::running().unwrap() < KernelVersion { major: 6, minor: 9 });
        next.refuse(first, Errno::IO).unwrap();
        until_over(&next);
        reader.join().unwrap().unwrap_err();
        return skipped("requests that are asked again: this kernel is older than Linux 6.9");
    }
    let second = until_read(&next);
    // The highest bit is FUSE_UNIQUE_RESEND.
    assert_eq!(second.0, first.0 | 1 << 63);
    next.reply_bytes(second, BYTES).unwrap();
    until_over(&next);
    assert_eq!(reader.join().unwrap().unwrap(), BYTES);
}

/// Closing a sibling descriptor fails the requests that were taken through it, and no others.
#[test]
fn what_was_taken_through_a_sibling_goes_with_it() {
    let Some((connection, mount)) = mounted() else { return };
    let sibling = connection.sibling().unwrap();
    let clone = mount.as_fd().try_clone_to_owned().unwrap();
    let reader = read(mount);
    let _taken = until_read(&sibling);
    let another = read(Detached::from_fd(clone));
    drop(sibling);
    reader.join().unwrap().unwrap_err();
    let unique = until_read(&connection);
    connection.reply_bytes(unique, BYTES).unwrap();
    until_over(&connection);
    assert_eq!(another.join().unwrap().unwrap(), BYTES);
}

#[test]
fn without_a_server_all_reads_fail() {
    let Some((connection, mount)) = mounted() else { return };
    let reader = read(mount);
    until_read(&connection);
    drop(connection);
    let error = reader.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::CONNABORTED.raw_os_error()));
}
