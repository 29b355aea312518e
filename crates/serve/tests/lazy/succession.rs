//! Tests the handover from one service to the next, also between versions.

use std::fs::{self, File};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use kernel::fanotify::{EventBuffer, Group};
use quire_serve::lazy::{DoorKind, Program};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Signal, kill_process};
use testing::fake::wait_for;

use super::service::{Served, program};

#[test]
fn a_service_that_is_killed_costs_no_reader_anything() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut service = served.start();
    let (device, mount) = (served.lend(), served.mount());
    // The source hangs, so all readers wait when the service dies.
    for round in 0..3 {
        fs::write(served.path("wait"), "").unwrap();
        thread::scope(|scope| {
            let readers = scope.spawn(|| served.read(&mount, 64));
            let others = scope.spawn(|| served.read_device(&device, 64));
            thread::sleep(Duration::from_millis(50));
            served.signal("service.pid", Signal::KILL);
            fs::remove_file(served.path("wait")).unwrap();
            served.wait_for_service();
            assert_eq!(readers.join().unwrap(), 0, "in round {round}");
            assert_eq!(others.join().unwrap(), 0, "in round {round}");
        });
        // The keeper has started another service.
        assert_eq!(served.read(&mount, 64), 0);
    }
    service.wait().unwrap();
    drop((device, mount));
    served.leave();
    served.is_over();
}

#[test]
fn a_service_that_is_killed_twice_in_a_row_costs_no_reader_anything() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut service = served.start();
    let device = served.lend();
    fs::write(served.path("wait"), "").unwrap();
    thread::scope(|scope| {
        let readers = scope.spawn(|| served.read_device(&device, 64));
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(100));
            served.signal("service.pid", Signal::KILL);
            served.wait_for_service();
        }
        // The last one is killed before it was ready.
        thread::sleep(Duration::from_millis(100));
        served.signal("service.pid", Signal::KILL);
        fs::remove_file(served.path("wait")).unwrap();
        assert_eq!(readers.join().unwrap(), 0);
    });
    served.wait_for_service();
    service.wait().unwrap();
    drop(device);
    served.leave();
    served.is_over();
}

#[test]
fn a_service_is_replaced_though_its_source_is_silent() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut first = served.start();
    let device = served.lend();
    fs::write(served.path("wait"), "").unwrap();
    let second = thread::scope(|scope| {
        let readers = scope.spawn(|| served.read_device(&device, 64));
        thread::sleep(Duration::from_millis(100));
        let second = served.start();
        assert!(first.wait().unwrap().success());
        assert!(!readers.is_finished());
        fs::remove_file(served.path("wait")).unwrap();
        assert_eq!(readers.join().unwrap(), 0);
        second
    });
    drop(device);
    served.end(second);
}

#[test]
fn a_keeper_that_is_killed_as_the_service_is_replaced_costs_no_wrong_byte() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let mut service = served.start();
    let mut mount = served.mount();
    for round in 0..6 {
        let keeper = served.pid("keeper.pid");
        service = thread::scope(|scope| {
            let readers = scope.spawn(|| served.read(&mount, 200));
            let killer = scope.spawn(|| {
                thread::sleep(Duration::from_millis(round * 15));
                fs::remove_file(served.path("keeper.pid")).unwrap();
                kill_process(keeper, Signal::KILL).unwrap();
            });
            let next = served.start();
            killer.join().unwrap();
            service.wait().unwrap();
            // Readers may get errors, but `read` panics on wrong bytes.
            readers.join().unwrap();
            next
        });
        wait_for("a keeper", || served.path("keeper.pid").exists());
        let status = served.service().status().unwrap();
        if status.is_empty() {
            // The keeper died when it was the only process that held the devices.
            drop(mount);
            mount = served.mount();
        }
        assert_eq!(served.read(&mount, 8), 0);
    }
    drop(mount);
    served.end(service);
}

/// Returns a message that was recorded with another version, with a device's id inserted.
fn recorded(name: &str, device: &str) -> String {
    let all = include_str!("protocol-0.txt");
    let of = |line: &'static str| line.split_once('\t').filter(|it| it.0 == name);
    let (_, message) = all.lines().find_map(of).unwrap();
    message.replace("DEVICE", device)
}

fn send(socket: &OwnedFd, message: &str, descriptor: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let parts = [IoSlice::new(message.as_bytes())];
    rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn receive(socket: &OwnedFd) -> (String, Option<OwnedFd>) {
    let mut bytes = vec![0; 16 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, flags).unwrap();
    let descriptor = control.drain().find_map(|it| match it {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    bytes.truncate(got.bytes);
    (String::from_utf8(bytes).unwrap(), descriptor)
}

/// Creates the folder like a service.
fn make_folder(served: &Served) {
    fs::DirBuilder::new().mode(0o700).create(served.path("run")).unwrap();
}

fn socket() -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
}

/// A fake service with a real keeper.
struct Acted {
    socket: OwnedFd,
    group: Group,
    device: File,
}

impl Acted {
    fn new(served: &Served, first: &str) -> Self {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let pair = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None);
        let (socket, theirs) = pair.unwrap();
        let Program { path, arguments } = program(served.stage.folder.path(), "a_keeper");
        make_folder(served);
        let mut command = Command::new(path);
        let keeper = command.args(arguments).stdin(Stdio::from(theirs)).spawn().unwrap();
        // Dropping the command closes its end of the socket in this process.
        drop(command);
        let group = Group::new().unwrap();
        send(&socket, first, Some(group.as_fd()));
        let path = served.path("lazy/lazy").join(served.stage.device().to_string());
        let device = File::options().read(true).write(true).open(path).unwrap();
        thread::spawn(move || keeper.wait_with_output());
        Self { socket, group, device }
    }

    /// Passes the device to the keeper, and marks it.
    fn arm(&self, served: &Served) -> kernel::mount::Detached {
        let device = served.stage.device().to_string();
        send(&self.socket, &recorded("keep", &device), Some(self.device.as_fd()));
        assert_eq!(receive(&self.socket).0, recorded("done", ""));
        self.group.mark(self.device.as_fd()).unwrap();
        let path = served.path("lazy/lazy").join(&device);
        served.mount_with(&File::open(path).unwrap())
    }

    /// Takes an event without writing a journal, and drops everything. Returns how many readers got an error.
    fn die_with_a_reader(self, served: &Served) -> usize {
        let device = served.stage.device().to_string();
        let device = File::open(served.path("lazy/lazy").join(device)).unwrap();
        thread::scope(|scope| {
            let reader = scope.spawn(|| served.read_device(&device, 1));
            poll(&mut [PollFd::new(&self.group, PollFlags::IN)], None).unwrap();
            let taken = self.group.read(&mut EventBuffer::default()).unwrap();
            assert_eq!(taken.len(), 1);
            drop((self, taken));
            let failed = reader.join().unwrap();
            served.wait_for_service();
            failed
        })
    }
}

#[test]
fn a_keeper_understands_a_service_of_an_earlier_version() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let acted = Acted::new(&served, &recorded("group", ""));
    // The reply must be exactly this message, because the earlier version knows no other reply.
    assert_eq!(receive(&acted.socket).0, recorded("done", ""));
    let mount = acted.arm(&served);
    for name in ["forget", "keep"] {
        let file = (name == "keep").then(|| acted.device.as_fd());
        send(&acted.socket, &recorded(name, &served.stage.device().to_string()), file);
        assert_eq!(receive(&acted.socket).0, recorded("done", ""));
    }
    // The earlier version has no journal, so the event that it had taken is lost.
    assert_eq!(acted.die_with_a_reader(&served), 1);
    assert_eq!(served.read(&mount, 64), 0);
    drop(mount);
    served.leave();
    served.is_over();
}

#[test]
fn a_keeper_refuses_what_it_does_not_know_and_goes_on() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let first = r#"{"group":{"numbers":1024,"instance":"a","protocol":99,"later":{"a":[1]}}}"#;
    let acted = Acted::new(&served, first);
    assert_eq!(receive(&acted.socket).0, r#"{"keeps":{"protocol":1}}"#);
    for unknown in
        [r#"{"later":{"device":"a"}}"#, "\"later\"", "no json", r#"{"keep":{}}"#, "\"journal\""]
    {
        send(&acted.socket, unknown, None);
        let (answer, _) = receive(&acted.socket);
        assert!(answer.starts_with(r#"{"refused":{"reason":"#), "{answer}");
    }
    let mount = acted.arm(&served);
    drop(acted);
    served.wait_for_service();
    assert_eq!(served.read(&mount, 64), 0);
    drop(mount);
    served.leave();
    served.is_over();
}

#[test]
fn a_journal_that_is_none_costs_errors_and_no_wrong_byte() {
    let memory = |bytes: u64, seals: SealFlags| {
        let file = rustix::fs::memfd_create("journal", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    };
    // The length of a journal of this version: 512 words, 32,768 for the kernel, and five for each number.
    let whole = (512 + 32_768 + 5 * 65_536) * 8;
    let noise = |head: &[u64]| {
        let file = memory(whole, SealFlags::SHRINK);
        let mut bytes: Vec<u8> = head.iter().flat_map(|it| it.to_le_bytes()).collect();
        bytes.extend(testing::noise(1 << 20));
        assert_eq!(rustix::io::pwrite(&file, &bytes, 0), Ok(bytes.len()));
        file
    };
    let magic = u64::from_le_bytes(*b"quirejrn");
    let journals = [
        ("other version", noise(&[magic, 2, 100])),
        ("noise", noise(&[])),
        // This journal is accepted, but its slots contain no event.
        ("noise in slots", noise(&[magic, 1, u64::MAX])),
        ("short", memory(4096, SealFlags::SHRINK)),
        ("can be shortened", memory(whole, SealFlags::GROW)),
    ];
    for (name, journal) in journals {
        let Some(served) = Served::new(DoorKind::Fanotify) else { return };
        let first = r#"{"group":{"numbers":65536,"instance":"a","protocol":1}}"#;
        let acted = Acted::new(&served, first);
        assert_eq!(receive(&acted.socket).0, r#"{"keeps":{"protocol":1}}"#);
        send(&acted.socket, "\"journal\"", Some(journal.as_fd()));
        assert_eq!(receive(&acted.socket).0, recorded("done", ""));
        let mount = acted.arm(&served);
        assert_eq!(acted.die_with_a_reader(&served), 1, "{name}");
        assert_eq!(served.read(&mount, 64), 0, "{name}");
        drop(mount);
        served.leave();
        served.is_over();
    }
}

#[test]
fn a_service_succeeds_a_keeper_of_an_earlier_version() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    make_folder(&served);
    let listener = socket();
    let path = served.path("run/keeper");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let id = served.stage.device().to_string();
    let path = served.path("lazy/lazy").join(&id);
    let device = File::options().read(true).write(true).open(path).unwrap();
    let group = Group::new().unwrap();
    group.mark(device.as_fd()).unwrap();
    let mount = served.mount_with(&File::open(served.path("lazy/lazy").join(&id)).unwrap());
    thread::scope(|scope| {
        let keeper = scope.spawn(|| {
            let socket = rustix::net::accept(&listener).unwrap();
            send(&socket, &recorded("told-group", ""), Some(group.as_fd()));
            send(&socket, &recorded("told-device", &id), Some(device.as_fd()));
            send(&socket, &recorded("done", ""), None);
            // The earlier keeper would treat any other message as the service's end.
            let (first, descriptor) = receive(&socket);
            // Further fields follow, which the earlier keeper ignores.
            assert!(first.starts_with(r#"{"group":{"numbers":"#), "{first}");
            assert!(first.contains(r#","instance":"0123456789abcdef","#), "{first}");
            assert!(descriptor.is_none());
            send(&socket, &recorded("done", ""), None);
            let mut said = Vec::new();
            loop {
                let (message, descriptor) = receive(&socket);
                if message.is_empty() {
                    return said;
                }
                assert!(descriptor.is_none());
                said.push(message);
                send(&socket, &recorded("done", ""), None);
            }
        });
        let mut service = served.start();
        assert_eq!(served.read(&mount, 64), 0);
        drop(mount);
        let status = || served.service().status().unwrap();
        super::wait_for("the release of the device", || status().is_empty());
        served.leave();
        assert!(service.wait().unwrap().success());
        let said = keeper.join().unwrap();
        assert_eq!(said, [recorded("forget", &id), recorded("end", "")]);
    });
}

#[test]
fn a_filler_does_not_wait_for_itself_behind_the_mark_of_a_service_without_a_keeper() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    make_folder(&served);
    let group = Group::new().unwrap();
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    group.mark(File::open(path).unwrap().as_fd()).unwrap();
    // A service whose keeper died when it was asked to exit.
    let lock = File::create(served.path("run/lock")).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    let listener = socket();
    let path = served.path("run/service");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let before = thread::spawn(move || {
        let client = rustix::net::accept(&listener).unwrap();
        assert_eq!(receive(&client).0, recorded("watch", ""));
        send(&client, r#"{"watched":{"instance":"before"}}"#, Some(group.as_fd()));
        assert_eq!(receive(&client).0, recorded("ask-leave", ""));
        send(&client, &recorded("done", ""), None);
        drop((lock, group));
    });
    let service = served.start();
    before.join().unwrap();
    // The filler has read and written the device before the first reader continues.
    let mount = served.mount();
    assert_eq!(served.read(&mount, 64), 0);
    drop(mount);
    served.end(service);
}

#[test]
fn a_device_that_others_mark_is_not_lent() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let service = served.start();
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    let others = Group::new().unwrap();
    others.mark(File::open(path).unwrap().as_fd()).unwrap();
    let refused = served.service().lend(&served.stage.device()).unwrap_err().to_string();
    assert!(refused.contains("watches reads of device"), "{refused}");
    drop(others);
    let mount = served.mount();
    assert_eq!(served.read(&mount, 64), 0);
    drop(mount);
    served.end(service);
}

#[test]
fn a_service_refuses_what_it_does_not_know_and_goes_on() {
    let Some(served) = Served::new(DoorKind::Fanotify) else { return };
    let service = served.start();
    let client = socket();
    rustix::net::connect(&client, &SocketAddrUnix::new(served.path("run/service")).unwrap())
        .unwrap();
    for unknown in [r#"{"later":{"image":"a"}}"#, "no json"] {
        send(&client, unknown, None);
        let (answer, _) = receive(&client);
        assert!(answer.starts_with(r#"{"refused":{"reason":"#), "{answer}");
    }
    let id = served.stage.device().to_string();
    send(&client, &recorded("lend", &id), None);
    let (answer, lent) = receive(&client);
    assert_eq!((answer, lent.is_some()), (recorded("lent", ""), true));
    send(&client, &recorded("watch", ""), None);
    assert!(receive(&client).1.is_some());
    send(&client, &recorded("release", ""), None);
    assert_eq!(receive(&client).0, recorded("done", ""));
    send(&client, &recorded("status", ""), None);
    assert!(receive(&client).0.starts_with(r#"{"device":{"device":""#));
    assert_eq!(receive(&client).0, recorded("done", ""));
    drop((lent, client));
    served.end(service);
}
