//! Requests that a user may send to the service. Each case runs as that user, in the user's namespace:
//! [`super::attack`].

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kernel::fuse::{
    FuseConnection, FuseOperation, NodeAttributes, ReplyBody, RequestBuffer, Served, TakenRequest,
};
use kernel::mount::{Attributes, FuseAccess, FuseOptions, MountAttrFlags, Reach, set_attributes};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::services::varlink::{Answer, Client};

/// Bytes that must not be in a copy.
pub(super) const MARK: &[u8] = b"a mark of a client, which no copy has";

fn connect() -> Client {
    Client::connect(Path::new(&std::env::var("QUIRE_TEST_SOCKET").unwrap()))
}

fn lend(client: &Client, image: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> Answer {
    let parameters = json!({"imageFileDescriptor": 0, "userNamespaceFileDescriptor": 1});
    client.ask("io.quire.Mounts.Lend", &parameters, &[image, user_namespace])
}

fn image() -> Vec<u8> {
    fs::read(std::env::var("QUIRE_TEST_IMAGE").unwrap()).unwrap()
}

fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(c"test", flags).unwrap();
    File::from(file.try_clone().unwrap()).write_all(bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

fn sealed(bytes: &[u8]) -> OwnedFd {
    memfd(bytes, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW)
}

fn own_namespace() -> OwnedFd {
    File::open("/proc/self/ns/user").unwrap().into()
}

fn own(path: &str) -> OwnedFd {
    File::open(path).unwrap().into()
}

/// The attributes that a mount from the service must have.
const ATTRIBUTES: [MountAttrFlags; 4] = [
    MountAttrFlags::MOUNT_ATTR_RDONLY,
    MountAttrFlags::MOUNT_ATTR_NODEV,
    MountAttrFlags::MOUNT_ATTR_NOSUID,
    MountAttrFlags::MOUNT_ATTR_NOEXEC,
];

fn clear(mount: BorrowedFd<'_>, what: MountAttrFlags) -> Option<Errno> {
    let change = Attributes { clear: what, ..Attributes::default() };
    set_attributes(mount, &change, Reach::One).err().and_then(|it| it.errno())
}

#[test]
#[ignore = "run by another test, as a user without root"]
fn attributes() {
    let client = connect();
    let answer = lend(&client, sealed(&image()).as_fd(), own_namespace().as_fd());
    assert_eq!(answer.value["parameters"]["devices"], 1, "{}", answer.value);
    let mount = answer.mount();
    // On the user's own mount all of these operations work, because the namespace has the rights.
    let options = kernel::mount::TmpfsOptions { name: "t", bytes: None, inodes: None, mode: 0o755 };
    let tmpfs = kernel::mount::tmpfs(&options).unwrap();
    tmpfs
        .set(&Attributes { set: MountAttrFlags::MOUNT_ATTR_NODEV, ..Attributes::default() })
        .unwrap();
    assert_eq!(clear(tmpfs.as_fd(), MountAttrFlags::MOUNT_ATTR_NODEV), None);
    for what in ATTRIBUTES {
        assert_eq!(clear(mount.as_fd(), what), Some(Errno::PERM), "{what:?}");
    }
    // A clone of the mount, if the kernel makes one, has the same restrictions, as does the attached mount.
    let again = mount.clone_detached();
    let point = tempfile::tempdir().unwrap();
    mount.attach_at(point.path()).unwrap();
    let attached = own(point.path().to_str().unwrap());
    for what in ATTRIBUTES {
        if let Ok(again) = &again {
            assert_eq!(clear(again.as_fd(), what), Some(Errno::PERM), "{what:?}");
        }
        assert_eq!(clear(attached.as_fd(), what), Some(Errno::PERM), "{what:?}");
    }
    assert!(!point.path().join("zero").exists());
    assert!(point.path().join("fifo").symlink_metadata().unwrap().file_type().is_fifo());
    let set_user_id = fs::metadata(point.path().join("theirs")).unwrap();
    // The file belongs to this namespace's root, who is the user.
    assert_eq!((set_user_id.permissions().mode() & 0o7777, set_user_id.uid()), (0o4755, 0));
    let error = fs::write(point.path().join("new"), b"x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let run = std::process::Command::new(point.path().join("bin/sh")).status();
    assert_eq!(run.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    // The mount cannot be mapped to owners outside of the namespace.
    let namespace = own_namespace();
    let change = Attributes { idmap: Some(namespace.as_fd()), ..Attributes::default() };
    assert!(set_attributes(attached.as_fd(), &change, Reach::One).is_err());
}

#[test]
#[ignore = "run by another test, as a user without root"]
fn lent_and_held() {
    let client = connect();
    drop(lend(&client, sealed(&image()).as_fd(), own_namespace().as_fd()).mount());
}

/// For any data, the service returns an error, or a mount that can be walked.
#[test]
#[ignore = "run by another test, as a user without root"]
fn damaged_images() {
    let good = image();
    let mut tried: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0; 4096],
        b"not an image".repeat(1000),
        good[..good.len() / 2].to_vec(),
        [&good[..], MARK].concat(),
        [&good[..], MARK, &[0; 4096]].concat(),
    ];
    // The mark is put into the superblock's volume name, and into unused bytes.
    for at in [1024 + 64, 1024 + 112, good.len() - MARK.len()] {
        let mut marked = good.clone();
        marked[at..at + MARK.len()].copy_from_slice(MARK);
        tried.push(marked);
    }
    let noise = testing::noise(8 * 80);
    for piece in noise.chunks(8) {
        let number = u64::from_le_bytes(piece.try_into().unwrap());
        let mut bytes = good.clone();
        let at = usize::try_from(number).unwrap() % bytes.len();
        bytes[at] ^= 1 << (number % 8);
        tried.push(bytes);
    }
    let mut lent = 0;
    for bytes in tried {
        let client = connect();
        let answer = lend(&client, sealed(&bytes).as_fd(), own_namespace().as_fd());
        if answer.error() == "none" {
            lent += 1;
            let point = tempfile::tempdir().unwrap();
            answer.mount().attach_at(point.path()).unwrap();
            walk(point.path());
            kernel::mount::unmount(point.path(), kernel::mount::Unmount::Lazy).unwrap();
        } else {
            assert!(["Invalid", "Unsupported"].contains(&answer.error()), "{}", answer.value);
        }
    }
    assert!(lent > 5, "{lent}");
}

/// Reads every file's metadata. Errors are ignored.
fn walk(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.filter_map(Result::ok) {
        let Ok(found) = entry.metadata() else { continue };
        if found.is_dir() {
            walk(&entry.path());
        } else if found.is_file() {
            let _read = fs::read(entry.path());
        } else if found.is_symlink() {
            let _read = fs::read_link(entry.path());
        }
    }
}

#[test]
#[ignore = "run by another test, as a user without root"]
fn wrong_requests() {
    let good = sealed(&image());
    let namespace = own_namespace();
    // The shell has opened the host's namespace as descriptor 9.
    let host = own("/proc/self/fd/9");
    let check = |image: &OwnedFd, user_namespace: &OwnedFd, error: &str, reason: &str| {
        let answer = lend(&connect(), image.as_fd(), user_namespace.as_fd());
        assert!(
            answer.error() == error && answer.reason().contains(reason),
            "{error} {reason}: {}",
            answer.value
        );
        assert_eq!(answer.descriptors.is_empty(), error != "none");
    };
    check(&good, &host, "Denied", "the user namespace of the host");
    for wrong in ["/proc/self/ns/mnt", "/proc/self/ns/net", "/proc/self/status", "/", "/dev/null"] {
        check(&good, &own(wrong), "Invalid", "is not a user namespace");
    }
    let (read, _write) = rustix::pipe::pipe().unwrap();
    check(&good, &read, "Invalid", "is not a user namespace");
    check(&good, &good, "Invalid", "is not a user namespace");
    // Another process may still change these files, or may block readers of them.
    let file = own(&std::env::var("QUIRE_TEST_IMAGE").unwrap());
    let some = |seals| memfd(&image(), seals);
    for image in [
        file,
        read,
        own("/"),
        some(SealFlags::empty()),
        some(SealFlags::WRITE | SealFlags::SHRINK),
        some(SealFlags::SHRINK | SealFlags::GROW),
        some(SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW),
    ] {
        check(&image, &namespace, "Invalid", "not a memfd with the seals");
    }
    let huge = rustix::fs::memfd_create(c"huge", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&huge, 1 << 40).unwrap();
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&huge, seals).unwrap();
    check(&huge, &namespace, "TooMuch", "image-bytes");
    // The position of the descriptor does not matter.
    rustix::fs::seek(&good, rustix::fs::SeekFrom::End(0)).unwrap();
    check(&good, &namespace, "none", "");

    let ask = |method: &str, parameters: &Value| {
        let client = connect();
        let answer = client.ask(method, parameters, &[good.as_fd(), namespace.as_fd()]);
        assert!(answer.descriptors.is_empty());
        answer.error().to_owned()
    };
    let lend = |more: &Value| {
        let mut parameters = json!({"imageFileDescriptor": 0, "userNamespaceFileDescriptor": 1});
        for (name, value) in more.as_object().unwrap() {
            parameters[name] = value.clone();
        }
        ask("io.quire.Mounts.Lend", &parameters)
    };
    // A request cannot name objects, a path to mount at, or flags.
    for (name, value) in [("objects", json!(0)), ("at", json!("/etc")), ("options", json!("dev"))] {
        assert_eq!(lend(&json!({name: value})), "InvalidParameter", "{name}");
    }
    for places in [json!(["../x"]), json!("x"), json!([7]), json!(["a/../../etc"])] {
        assert_eq!(lend(&json!({"places": places})), "InvalidParameter");
    }
    for number in [json!(2), json!(1_000_000), json!(u64::MAX)] {
        assert_eq!(lend(&json!({"imageFileDescriptor": number})), "Invalid");
    }
    for number in [json!(-1), json!("0"), json!(0.5), json!(null)] {
        assert_eq!(lend(&json!({"imageFileDescriptor": number})), "InvalidParameter");
    }
    assert_eq!(ask("io.quire.Mounts.Attach", &json!({})), "MethodNotFound");
    assert_eq!(ask("io.systemd.MountFileSystem.MountImage", &json!({})), "MethodNotFound");
    let interface = json!({"interface": "io.quire.Nothing"});
    let method = "org.varlink.service.GetInterfaceDescription";
    assert_eq!(ask(method, &interface), "InterfaceNotFound");
    // Invalid calls end the connection.
    for bytes in [
        &b"\0"[..],
        b"{}\0",
        b"[]\0",
        b"{\"method\": 7}\0",
        b"\xff\xfe\0",
        b"GET / HTTP/1.1\r\n\r\n\0",
    ] {
        let client = connect();
        client.send(bytes, &[]).unwrap();
        assert!(client.receive().is_none(), "{bytes:?}");
    }
    let client = connect();
    let info = client.ask("org.varlink.service.GetInfo", &json!({}), &[]);
    assert_eq!(info.value["parameters"]["interfaces"][1], "io.quire.Mounts");
    let interface = json!({"interface": "io.quire.Mounts"});
    let described = client.ask(method, &interface, &[]);
    let text = described.value["parameters"]["description"].as_str().unwrap();
    assert!(text.contains("method Lend("), "{text}");
}

#[test]
#[ignore = "run by another test, as a user without root"]
fn too_much_of_a_connection() {
    let (good, namespace) = (sealed(&image()), own_namespace());
    let client = connect();
    let parameters = json!({"imageFileDescriptor": 0, "userNamespaceFileDescriptor": 1});
    let call =
        json!({"method": "io.quire.Mounts.Lend", "parameters": parameters}).to_string() + "\0";
    let three = [good.as_fd(), namespace.as_fd(), good.as_fd()];
    client.send(call.as_bytes(), &three).unwrap();
    assert!(client.receive().is_none());
    // Endless bytes also end the connection.
    let client = connect();
    let mut sent = 0;
    while client.send(&[b' '; 4096], &[]).is_ok() {
        sent += 4096;
        assert!(sent < 8 << 20, "nobody stops it");
    }
    // A connection may make several calls.
    let client = connect();
    for _ in 0..3 {
        drop(lend(&client, good.as_fd(), namespace.as_fd()).mount());
    }
}

#[test]
#[ignore = "run by another test, as a user without root"]
fn many_connections() {
    let info = |client: &Client| {
        let answer = client.ask("org.varlink.service.GetInfo", &json!({}), &[]);
        answer.error().to_owned()
    };
    let clients: Vec<_> = (0..4).map(|_| connect()).collect();
    for client in &clients {
        assert_eq!(info(client), "none");
    }
    // A further connection waits until one of these has ended.
    let fifth = std::thread::spawn(move || info(&connect()));
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(!fifth.is_finished(), "it is served beside four others");
    drop(clients);
    assert_eq!(fifth.join().unwrap(), "none");
    // Many connections also wait, and all of them are served in the end.
    let crowd: Vec<_> = (0..50).map(|_| std::thread::spawn(move || info(&connect()))).collect();
    for one in crowd {
        assert_eq!(one.join().unwrap(), "none");
    }
}

/// Opens as many connections without requests as possible, for five seconds.
#[test]
#[ignore = "run by another test, as a user without root"]
fn flood() {
    use std::os::unix::net::UnixStream;
    let socket = std::env::var_os("QUIRE_TEST_SOCKET").unwrap();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut held = Vec::new();
                while std::time::Instant::now() < end {
                    let connected = UnixStream::connect(&socket);
                    // Some connections are held, and most are closed at once.
                    if held.len() < 40 {
                        held.extend(connected);
                    }
                }
            });
        }
    });
}

#[test]
#[ignore = "run by another test, as a user without root"]
fn one_image_at_a_time() {
    let namespace = own_namespace();
    let client = connect();
    let image = image();
    let lend = |place: &str| {
        let parameters = json!({
            "imageFileDescriptor": 0, "userNamespaceFileDescriptor": 1, "places": [place],
        });
        let image = sealed(&image);
        client.ask("io.quire.Mounts.Lend", &parameters, &[image.as_fd(), namespace.as_fd()])
    };
    // Each list of places makes another copy.
    let first = lend("/a").mount();
    let second = lend("/b");
    assert_eq!((second.error(), second.reason().contains("images-per-user")), ("TooMuch", true));
    // The same request again makes no further copy.
    let again = lend("/a").mount();
    drop(first);
    assert_eq!(lend("/b").error(), "TooMuch");
    drop(again);
    let other = lend("/b").mount();
    let point = tempfile::tempdir().unwrap();
    other.attach_at(point.path()).unwrap();
    assert!(point.path().join("b").is_file() && !point.path().join("a").exists());
    assert_eq!(lend("/a").error(), "TooMuch");
}

/// A file of a user's own file system, whose server replies until the file is open, and then not any more until this
/// value is dropped. Until then, closing a descriptor of the file blocks.
struct NeverFlushed {
    file: OwnedFd,
    is_over: Arc<AtomicBool>,
}

impl NeverFlushed {
    fn new() -> Self {
        let connection = FuseConnection::open().unwrap();
        connection.never_wait_in_take().unwrap();
        let (root, access) = (FileType::RegularFile, FuseAccess::Everybody);
        let options = FuseOptions { root, owner: (0, 0), access, name: "slow" };
        let mount = kernel::mount::fuse(connection.as_fd(), &options).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let is_over_now = Arc::clone(&is_over);
        std::thread::spawn(move || answer_until_open(&connection, &is_over_now));
        let path = format!("/proc/self/fd/{}", mount.as_fd().as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Self { file: rustix::fs::open(path, flags, Mode::empty()).unwrap(), is_over }
    }
}

impl Drop for NeverFlushed {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

fn answer_until_open(connection: &FuseConnection, is_over: &AtomicBool) {
    let (mut buffer, mut held) = (RequestBuffer::default(), Vec::new());
    loop {
        connection.has_request(Some(std::time::Duration::from_millis(10))).unwrap();
        let answered = match connection.take(&mut buffer) {
            Ok(TakenRequest::Request(request)) => match request.operation {
                FuseOperation::Init(offer) => {
                    connection.reply(request.unique, &ReplyBody::init(&offer, Served::File))
                }
                FuseOperation::GetAttributes(_) => {
                    let file = NodeAttributes::file(1, 9, Mode::RUSR, (0, 0));
                    connection.reply(request.unique, &ReplyBody::attributes(&file))
                }
                // The flags do not promise anything about flushes. Source: `linux/fuse.h`, `struct fuse_open_out`.
                FuseOperation::Open(_) => connection.reply_bytes(request.unique, &[0; 16]),
                FuseOperation::Flush(_) => {
                    held.push(request.unique);
                    Ok(())
                }
                ref other if other.has_reply() => connection.refuse(request.unique, Errno::NOSYS),
                _ => Ok(()),
            },
            Ok(TakenRequest::Nothing) => Ok(()),
            _ => return,
        };
        answered.unwrap();
        if is_over.load(Ordering::SeqCst) {
            for request in held.drain(..) {
                connection.refuse(request, Errno::IO).unwrap();
            }
        }
    }
}

/// The files are on a file system that does not reply, so closing one blocks.
#[test]
#[ignore = "run by another test, as a user without root"]
fn files_that_wait() {
    let (good, namespace) = (sealed(&image()), own_namespace());
    let unanswered = NeverFlushed::new();
    let file = unanswered.file.as_fd();
    let stuck = [connect(), connect(), connect()];
    let call = json!({"method": "org.varlink.service.GetInfo"}).to_string() + "\0";
    stuck[0].send(call.as_bytes(), &[file]).unwrap();
    let parameters = json!({"imageFileDescriptor": 0, "userNamespaceFileDescriptor": 1});
    let call = json!({"method": "io.quire.Mounts.Lend", "parameters": parameters}).to_string();
    let call = call + "\0";
    stuck[1].send(call.as_bytes(), &[file, namespace.as_fd()]).unwrap();
    stuck[2].send(call.as_bytes(), &[good.as_fd(), file]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    drop(stuck);
    // Other clients are served in the meantime. The blocked requests count until they end.
    drop(lend(&connect(), good.as_fd(), namespace.as_fd()).mount());
    let ask = |client: &Client| {
        client.ask("org.varlink.service.GetInfo", &json!({}), &[]).error().to_owned()
    };
    let fourth = connect();
    assert_eq!(ask(&fourth), "none");
    let fifth = std::thread::spawn(move || ask(&connect()));
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(!fifth.is_finished(), "it is served beside four others");
    drop(fourth);
    assert_eq!(fifth.join().unwrap(), "none");
}

/// Closing these descriptors blocks as long as their owner likes, and there are more than the service accepts.
#[test]
#[ignore = "run by another test, as a user without root"]
fn descriptors_that_wait() {
    let (good, namespace) = (sealed(&image()), own_namespace());
    // Closing a connection with unread bytes takes a minute.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let waits = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    waits.set_nonblocking(true).unwrap();
    while (&waits).write(&[0; 65_536]).is_ok() {}
    let minute = Some(std::time::Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&waits, minute).unwrap();
    let slow = connect();
    let call = json!({"method": "org.varlink.service.GetInfo"}).to_string() + "\0";
    slow.send(call.as_bytes(), &[waits.as_fd()]).unwrap();
    drop(waits);
    // Other clients are served in the meantime.
    drop(lend(&connect(), good.as_fd(), namespace.as_fd()).mount());
    // The descriptors are sent with a call that never ends. The service accepts only a few.
    let full = connect();
    let waiting = |_: &u32| full.send(b" ", &[good.as_fd(), namespace.as_fd()]).is_ok();
    assert!((0..3000).take_while(waiting).count() > 0);
    drop(lend(&connect(), good.as_fd(), namespace.as_fd()).mount());
}

/// Uses a user id that was assigned to another user.
#[test]
#[ignore = "run by another test, as a user without root"]
fn a_number_of_another_user() {
    let answer = lend(&connect(), sealed(b"any").as_fd(), own_namespace().as_fd());
    let is_told = answer.reason().contains("is in a user namespace of another user");
    assert!(answer.error() == "Denied" && is_told, "{}", answer.value);
}
