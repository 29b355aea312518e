//! Tests the handover from one service to the next, and that processes of other versions are refused.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use quire_serve::lazy::{ClientError, Program};
use rustix::fs::FlockOperation;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Signal, kill_process};
use testing::fake::wait_for;

use super::service::{Served, program};

#[test]
fn a_service_that_is_killed_costs_no_reader_anything() {
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let (device, mount) = (served.lend(), served.mount());
    // The source hangs, so all readers wait when the service dies.
    for _ in 0..3 {
        fs::write(served.path("wait"), "").unwrap();
        thread::scope(|scope| {
            let readers = scope.spawn(|| served.read(&mount, 64));
            let others = scope.spawn(|| served.read_device(&device, 64));
            thread::sleep(Duration::from_millis(50));
            served.signal("service.pid", Signal::KILL);
            fs::remove_file(served.path("wait")).unwrap();
            served.wait_for_service();
            served.check_failed(readers.join().unwrap(), 64);
            served.check_failed(others.join().unwrap(), 64);
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
    let Some(served) = Served::new() else { return };
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
        // Before Linux 6.9, all of them may fail.
        served.check_failed(readers.join().unwrap(), 65);
    });
    served.wait_for_service();
    service.wait().unwrap();
    drop(device);
    served.leave();
    served.is_over();
}

#[test]
fn a_service_is_replaced_though_its_source_is_silent() {
    let Some(served) = Served::new() else { return };
    let mut first = served.start();
    let device = served.lend();
    fs::write(served.path("wait"), "").unwrap();
    let second = thread::scope(|scope| {
        let readers = scope.spawn(|| served.read_device(&device, 64));
        thread::sleep(Duration::from_millis(100));
        let second = served.start();
        assert!(first.wait().unwrap().success());
        if served.resends {
            assert!(!readers.is_finished());
        }
        fs::remove_file(served.path("wait")).unwrap();
        served.check_failed(readers.join().unwrap(), 65);
        second
    });
    drop(device);
    served.end(second);
}

#[test]
fn a_keeper_that_is_killed_as_the_service_is_replaced_costs_no_wrong_byte() {
    let Some(served) = Served::new() else { return };
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

/// Listens at a path, and returns the descriptor.
fn listen(path: &std::path::Path) -> OwnedFd {
    let listener = socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    listener
}

/// Starts a keeper, and returns the service's end of its socket.
fn keeper(served: &Served) -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (socket, theirs) =
        rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    let Program { path, arguments } = program(served.stage.folder.path(), "a_keeper");
    make_folder(served);
    let mut command = Command::new(path);
    // The runner of tests would count the output of this test program as well.
    command.args(arguments).stdin(Stdio::from(theirs)).stdout(Stdio::null());
    let keeper = command.spawn().unwrap();
    // Dropping the command closes its end of the socket in this process.
    drop(command);
    thread::spawn(move || keeper.wait_with_output());
    socket
}

/// Runs a service that is expected to fail.
fn failed_service(served: &Served) -> Output {
    let Program { path, arguments } = program(served.stage.folder.path(), "a_service");
    let ended = Command::new(path).args(arguments).output().unwrap();
    assert!(!ended.status.success(), "it started");
    ended
}

const DONE: &str = "\"done\"";
/// The first message of a service to its keeper.
const BEGIN: &str = r#"{"begin":{"protocol":2}}"#;

#[test]
fn a_keeper_refuses_what_it_does_not_know_and_goes_on() {
    let Some(served) = Served::new() else { return };
    let socket = keeper(&served);
    send(&socket, BEGIN, None);
    assert_eq!(receive(&socket).0, DONE);
    for unknown in
        [r#"{"later":{"device":"a"}}"#, "\"later\"", "no json", r#"{"keep":{}}"#, "\"inherit\""]
    {
        send(&socket, unknown, None);
        let (answer, _) = receive(&socket);
        assert!(answer.starts_with(r#"{"refused":{"reason":"#), "{answer}");
    }
    send(&socket, "\"end\"", None);
    assert_eq!(receive(&socket).0, DONE);
    drop(socket);
    served.is_over();
}

/// The messages of protocol 1 are those of a build that had devices with fanotify marks.
#[test]
fn a_keeper_refuses_a_service_of_another_version() {
    let Some(served) = Served::new() else { return };
    let socket = keeper(&served);
    let group = fs::File::open("/dev/null").unwrap();
    let first = r#"{"group":{"numbers":65536,"instance":"a","protocol":1,"has_journal":false}}"#;
    send(&socket, first, Some(group.as_fd()));
    // The keeper exits without a reply.
    assert_eq!(receive(&socket).0, "");
    assert!(!served.path("run/keeper").exists());
}

#[test]
fn a_service_takes_nothing_over_from_a_keeper_of_another_version() {
    for first in
        [r#"{"group":{"instance":"0123456789abcdef","protocol":1}}"#, r#"{"keeps":{"protocol":3}}"#]
    {
        let Some(served) = Served::new() else { return };
        make_folder(&served);
        let listener = listen(&served.path("run/keeper"));
        let keeper = thread::spawn(move || {
            let socket = rustix::net::accept(&listener).unwrap();
            let group = fs::File::open("/dev/null").unwrap();
            send(&socket, first, first.contains("group").then(|| group.as_fd()));
            receive(&socket).0
        });
        let ended = failed_service(&served);
        let text = String::from_utf8_lossy(&ended.stderr).into_owned()
            + &String::from_utf8_lossy(&ended.stdout);
        assert!(text.contains("OtherVersion"), "{text}");
        // The service has sent nothing.
        assert_eq!(keeper.join().unwrap(), "");
        assert!(!served.path("run/service").exists());
    }
}

/// The running service keeps its devices, and its readers notice nothing.
#[test]
fn a_service_of_another_version_is_not_replaced() {
    let Some(served) = Served::new() else { return };
    make_folder(&served);
    let lock = fs::File::create(served.path("run/lock")).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    let listener = listen(&served.path("run/service"));
    let before = thread::spawn(move || {
        let mut asked = Vec::new();
        for _ in 0..2 {
            let client = rustix::net::accept(&listener).unwrap();
            asked.push(receive(&client).0);
            // The build with fanotify marks replied so to messages that it did not know.
            let reason = "this service does not support the request: unknown variant";
            send(&client, &format!(r#"{{"refused":{{"reason":"{reason}"}}}}"#), None);
        }
        asked
    });
    let ended = failed_service(&served);
    let text = String::from_utf8_lossy(&ended.stderr).into_owned()
        + &String::from_utf8_lossy(&ended.stdout);
    assert!(text.contains("OtherVersion"), "{text}");
    // Nor does it get a device that may have a mark.
    let refused = served.service().lend(&served.stage.device()).unwrap_err();
    assert!(matches!(refused, ClientError::OtherVersion), "{refused}");
    assert!(refused.to_string().contains("quire serve --lazy --stop"), "{refused}");
    let asked = before.join().unwrap();
    assert_eq!(asked[0], r#"{"leave":{"protocol":2}}"#);
    assert!(asked[1].starts_with(r#"{"open":{"device":"#), "{}", asked[1]);
    drop(lock);
}

#[test]
fn a_service_refuses_what_it_does_not_know_and_goes_on() {
    let Some(served) = Served::new() else { return };
    let service = served.start();
    let client = socket();
    rustix::net::connect(&client, &SocketAddrUnix::new(served.path("run/service")).unwrap())
        .unwrap();
    // The last four are requests of the build with fanotify marks, and of a later one.
    for unknown in [
        r#"{"later":{"image":"a"}}"#,
        "no json",
        "\"watch\"",
        "\"leave\"",
        r#"{"lend":{"device":"a"}}"#,
        r#"{"leave":{"protocol":3}}"#,
    ] {
        send(&client, unknown, None);
        let (answer, _) = receive(&client);
        let refused = r#"{"refused":{"reason":"this service does not support the request"#;
        assert!(answer.starts_with(refused), "{answer}");
    }
    let id = served.stage.device().to_string();
    send(&client, &format!(r#"{{"open":{{"device":"{id}"}}}}"#), None);
    let (answer, lent) = receive(&client);
    assert_eq!((&answer[..], lent.is_some()), ("\"opened\"", true));
    send(&client, "\"release\"", None);
    assert_eq!(receive(&client).0, DONE);
    send(&client, "\"status\"", None);
    assert!(receive(&client).0.starts_with(r#"{"device":{"device":""#));
    assert_eq!(receive(&client).0, DONE);
    drop((lent, client));
    served.end(service);
}
