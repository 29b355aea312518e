//! Images as volumes of systemd's storage providers.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use kernel::mount::{Detached, Reach, bind};
use kernel::process::{IdRange, user_namespace};
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};

use crate::container_life::runs::wait_for;
use crate::services::varlink::{Answer, Client};
use crate::{Place, Ran, is_before, is_root, open_to_all};

const ACQUIRE: &str = "io.systemd.StorageProvider.Acquire";
const LIST: &str = "io.systemd.StorageProvider.ListVolumes";

/// A provider that is killed on drop.
struct Provider {
    child: Child,
    socket: PathBuf,
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

impl Provider {
    fn start(place: &Place) -> Self {
        Self::start_with(place, &[])
    }

    fn start_with(place: &Place, options: &[&str]) -> Self {
        let socket = place.path("sock/quire");
        let words = ["serve", "--storage", "--socket", socket.to_str().unwrap()];
        let mut command = place.command(&[options, &words].concat());
        let log = File::create(place.path("log")).unwrap();
        let child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let provider = Self { child, socket };
        wait_for("the provider", || UnixStream::connect(&provider.socket).is_ok());
        provider
    }

    fn acquire(&self, parameters: &Value) -> Answer {
        Client::connect(&self.socket).ask(ACQUIRE, parameters, &[])
    }
}

/// A place with one image for each kind of mount.
fn place() -> Option<Place> {
    if !is_root() {
        return None;
    }
    if is_before(6, 15) {
        testing::skipped("this kernel is older than Linux 6.15");
        return None;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} files", tree.display()));
    place.out(&format!("import --quiet --form packed dir:{} packed", tree.display()));
    Some(place)
}

/// Simulates a client, which clones a volume's mount with mapped ids. Source: systemd 262, `src/storage/storagectl.c`,
/// `run_as_mount_helper`.
fn clone_mapped(volume: &OwnedFd) -> Detached {
    let all = [IdRange { inside: 0, outside: 0, count: 65_536 }];
    let clone = bind(volume.as_fd(), Reach::One).unwrap();
    clone.idmap(user_namespace(&all, &all).unwrap().as_fd()).unwrap();
    clone
}

fn read(mount: &Detached, path: &str) -> Vec<u8> {
    let file = rustix::fs::openat(mount.as_fd(), path, OFlags::RDONLY, Mode::empty()).unwrap();
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut File::from(file), &mut bytes).unwrap();
    bytes
}

/// Each client's process ends before its volume is used. It has a separate mount namespace, like a systemd unit.
#[test]
fn images_are_volumes_that_clients_map() {
    let Some(place) = place() else { return };
    if !testing::programs(&["unshare"]) {
        return;
    }
    let clones = ["files", "packed"].map(|name| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", env!("CARGO_BIN_EXE_quire"), "--store"]).arg(place.path("store"));
        command.args(["serve", "--storage", "--inetd"]).stdin(OwnedFd::from(theirs));
        let log = File::create(place.path("log")).unwrap();
        let mut child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        // mount(8) passes `rw` to its helper unless the user gives `ro`.
        let asked = json!({"name": name, "readOnly": false, "requestAs": "dir"});
        let mut answer = Client(ours).ask(ACQUIRE, &asked, &[]);
        let told = &answer.value["parameters"];
        let expect = json!({
            "fileDescriptorIndex": 0, "type": "dir", "readOnly": true, "baseUID": 0, "baseGID": 0
        });
        assert_eq!(*told, expect, "{name}: {}", fs::read_to_string(place.path("log")).unwrap());
        let volume = answer.descriptors.remove(0);
        // Clients refuse a descriptor that was opened with O_PATH.
        let flags = rustix::fs::fcntl_getfl(&volume).unwrap();
        assert!(!flags.contains(OFlags::PATH) && flags.contains(OFlags::DIRECTORY));
        let clone = clone_mapped(&volume);
        child.kill().unwrap();
        child.wait().unwrap();
        clone
    });
    let servers = || {
        let store = place.path("store");
        let all = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|it| fs::read(it.unwrap().path().join("cmdline")).ok());
        let of_place = |it: &Vec<u8>| {
            it.windows(store.as_os_str().len())
                .any(|part| part == store.as_os_str().as_encoded_bytes())
        };
        all.filter(of_place).count()
    };
    for clone in &clones {
        assert_eq!(read(clone, "etc/short"), b"short\n");
        assert_eq!(read(clone, "etc/long"), b"x".repeat(100));
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let made = rustix::fs::openat(clone.as_fd(), "new", flags, Mode::RUSR);
        assert_eq!(made.unwrap_err(), rustix::io::Errno::ROFS);
        let found = rustix::fs::fstatvfs(clone.as_fd()).unwrap().f_flag;
        let expect = rustix::fs::StatVfsMountFlags::NOSUID | rustix::fs::StatVfsMountFlags::NODEV;
        assert!(found.contains(expect), "{found:?}");
    }
    // The FUSE mount has a server, which ends with the mount.
    assert!(servers() > 0);
    drop(clones);
    wait_for("the servers' end", || servers() == 0);
}

#[test]
fn volumes_are_listed() {
    let Some(place) = place() else { return };
    let provider = Provider::start(&place);
    let client = Client::connect(&provider.socket);
    let names = |pattern: Value| {
        let answers = client.list(LIST, &json!({"matchName": pattern}));
        let name = |it: &Value| it["parameters"]["name"].as_str().unwrap_or("none").to_owned();
        answers.iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(names(Value::Null), ["files:latest", "packed:latest"]);
    assert_eq!(names(json!("pa*:l?test")), ["packed:latest"]);
    assert_eq!(names(json!("x*")), ["none"]);
    // The volume is also found by another name.
    let known: Value = serde_json::from_str(&place.out("show --json files")).unwrap();
    assert_eq!(names(known["image"].clone()), ["files:latest"]);
    let volume = &client.list(LIST, &json!({"matchName": "files*"}))[0]["parameters"];
    assert_eq!(volume["aliases"], json!([known["image"]]));
    // The sum of both files of the tree.
    assert_eq!(volume["usedBytes"], 106);
    assert_eq!((&volume["type"], &volume["readOnly"]), (&json!("dir"), &json!(true)));
    // The alias also works.
    assert_eq!(provider.acquire(&json!({"name": known["image"]})).error(), "none");
    assert_eq!(client.ask(LIST, &json!({}), &[]).error(), "ExpectedMore");
    let none = client.list("io.systemd.StorageProvider.ListTemplates", &Value::Null);
    assert_eq!(none[0]["error"], "io.systemd.StorageProvider.NoSuchTemplate");
    let told = client.ask("org.varlink.service.GetInfo", &json!({}), &[]);
    assert_eq!(told.value["parameters"]["interfaces"][1], "io.systemd.StorageProvider");
}

#[test]
fn other_volumes_are_refused() {
    let Some(place) = place() else { return };
    let provider = Provider::start(&place);
    for (asked, error) in [
        (json!({"name": "nowhere"}), "NoSuchVolume"),
        (json!({"name": "../files"}), "NoSuchVolume"),
        (json!({"name": "files", "createMode": "new"}), "CreateNotSupported"),
        (json!({"name": "files", "template": "subvolume"}), "NoSuchTemplate"),
        (json!({"name": "files", "requestAs": "reg"}), "TypeNotSupported"),
        (json!({"name": 7}), "InvalidParameter"),
    ] {
        let answer = provider.acquire(&asked);
        assert_eq!(answer.error(), error, "{asked}");
        assert!(answer.descriptors.is_empty());
    }
    // A damaged image is a system error.
    let known: Value = serde_json::from_str(&place.out("show --json files")).unwrap();
    let image = place.path("store/images").join(known["image"].as_str().unwrap());
    let bytes = fs::read(&image).unwrap();
    fs::remove_file(&image).unwrap();
    fs::write(&image, &bytes[..bytes.len() / 2]).unwrap();
    let answer = provider.acquire(&json!({"name": "files"}));
    assert_eq!(answer.value["error"], "io.systemd.System", "{}", answer.value);
    assert_eq!(answer.value["parameters"]["errno"], 5);
    assert!(fs::read_to_string(place.path("log")).unwrap().contains("cannot provide volume files"));
}

#[test]
fn without_a_store_there_are_no_volumes() {
    let Some(place) = place() else { return };
    fs::rename(place.path("store"), place.path("elsewhere")).unwrap();
    let provider = Provider::start(&place);
    assert_eq!(provider.acquire(&json!({"name": "files"})).error(), "NoSuchVolume");
    let none = Client::connect(&provider.socket).list(LIST, &json!({}));
    assert_eq!(none[0]["error"], "io.systemd.StorageProvider.NoSuchVolume");
    assert_eq!(fs::read_to_string(place.path("log")).unwrap(), "");
}

#[test]
fn a_policy_counts_for_volumes() {
    let Some(place) = place() else { return };
    fs::write(place.path("policy.toml"), "default = \"none\"\n").unwrap();
    let provider = Provider::start_with(&place, &["--policy", "policy.toml"]);
    assert_eq!(provider.acquire(&json!({"name": "files"})).error(), "PermissionDenied");
    assert!(fs::read_to_string(place.path("log")).unwrap().contains("refused volume files"));
    // With a policy that cannot be read, all requests fail with a system error.
    fs::write(place.path("policy.toml"), "default = 7\n").unwrap();
    let answer = provider.acquire(&json!({"name": "files"}));
    assert!(answer.error() == "System" && answer.descriptors.is_empty(), "{}", answer.value);
}

/// The provider checks the user even if the socket is accessible to all users.
#[test]
fn volumes_are_for_root_alone() {
    const USER: u32 = 64_001;
    let Some(place) = place() else { return };
    let python = "python3";
    if !testing::programs(&[python]) {
        return;
    }
    open_to_all(&place);
    let provider = Provider::start(&place);
    assert_eq!(fs::metadata(&provider.socket).unwrap().mode() & 0o777, 0o600);
    let (ours, theirs) = (place.path("open"), "serve --storage --inetd");
    let listener = std::os::unix::net::UnixListener::bind(&ours).unwrap();
    fs::set_permissions(&ours, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let mut user = Command::new(python);
    user.arg("-c").arg(
        "import socket, sys\n\
         s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n\
         s.sendall(b'{\"method\":\"io.systemd.StorageProvider.Acquire\",\"parameters\":{\"name\":\"files\"}}\\0')\n\
         print(s.recv(4096))",
    );
    let user = user.arg(&ours).uid(USER).gid(USER).stdout(Stdio::piped()).spawn().unwrap();
    let (client, _) = listener.accept().unwrap();
    let mut command = place.command(&theirs.split(' ').collect::<Vec<_>>());
    let ran = Ran::from_output(&command.stdin(OwnedFd::from(client)).output().unwrap());
    let told = Ran::from_output(&user.wait_with_output().unwrap());
    assert!(told.out.contains("org.varlink.service.PermissionDenied"), "{}{}", told.out, ran.err);
    let refused = place.run(theirs);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("standard input is not a socket"), "{}", refused.err);
}

/// Uses systemd's own programs, from a Debian that has them.
#[test]
fn mount_of_systemd_mounts_images() {
    let Some(place) = place() else { return };
    let Some(tool) = testing::built("sid", "mount.storage", "sid") else { return };
    let tools = tool.parent().unwrap().to_owned();
    // Ids are also names of volumes. The id of `packed` differs each time, but no id begins with `fi`. Both programs
    // look below /run. The second program calls /bin/mount, which loses nosuid and nodev in Debian 12.
    let script = "
        mount -t tmpfs none /run; mkdir /run/a /run/b
        mount --bind $1/mount \"$(readlink -f /bin/mount)\"
        $2 --store store serve --storage --quiet > log 2>&1 & server=$!
        for _ in $(seq 100); do
            test -S /run/systemd/io.systemd.StorageProvider/quire && break; sleep 0.1
        done
        $1/storagectl --no-pager --no-legend volumes 'fi*'
        $1/mount.storage quire:files /run/a -o rw
        $1/mount.storage quire:packed /run/b -o rw
        cat /run/a/etc/short /run/b/etc/short
        grep -o ' /run/[ab] ro,nosuid,nodev' /proc/self/mountinfo
        $1/mount.storage quire:nowhere /run/a || echo $?
        umount /run/a /run/b; kill $server";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", script, "sh"]);
    command.arg(&tools).arg(env!("CARGO_BIN_EXE_quire"));
    let ran = Ran::from_output(&command.current_dir(place.folder.path()).output().unwrap());
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    let words: Vec<&str> = ran.out.split_whitespace().collect();
    let expect = "quire files:latest dir yes - 106B short short /run/a ro,nosuid,nodev /run/b \
                  ro,nosuid,nodev 1";
    assert_eq!(words.join(" "), expect, "{}", ran.err);
    assert!(ran.err.contains("Volume 'nowhere' not known"), "{}", ran.err);
}
