//! The mount service, its users, and clients that request more than they may get.

mod client;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use image::verity::{Algorithm, ObjectId, digest};

use super::{LISTING, USER, User, compare, has_getfattr, listed_by_kernel, odd_tree, sorted, tree};
use crate::container_life::runs::{runtimes, wait_for};
use crate::{Place, Ran, add_programs, write};

/// A service that is ended on drop.
pub(super) struct Service {
    child: Child,
    pub(super) socket: PathBuf,
    copies: PathBuf,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Writes settings of a service, and returns their path, its socket and the directory of its copies.
fn settings(place: &Place, table: &str) -> (PathBuf, PathBuf, PathBuf) {
    let (file, socket) = (place.path("serve.toml"), place.path("sock/mounts.sock"));
    let copies = place.path("copies");
    let text = format!(
        "[mounts]\nsocket = \"{}\"\ncopies = \"{}\"\n{table}",
        socket.display(),
        copies.display()
    );
    fs::write(&file, text).unwrap();
    (file, socket, copies)
}

impl Service {
    /// The service sees this machine's own `/etc/subuid`, which has no ids for [`USER`].
    fn start(place: &Place, table: &str) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_quire")), place, table)
    }

    /// The service sees files in which [`USER`] has ids.
    pub(super) fn start_with_ids(place: &Place) -> Self {
        const SCRIPT: &str = "
            mount --bind \"$1/passwd\" /etc/passwd
            mount --bind \"$1/ids\" /etc/subuid
            mount --bind \"$1/ids\" /etc/subgid
            shift
            exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", SCRIPT, "sh"]);
        command.arg(place.folder.path()).arg(env!("CARGO_BIN_EXE_quire"));
        Self::start_by(command, place, "")
    }

    fn start_by(mut command: Command, place: &Place, table: &str) -> Self {
        let (file, socket, copies) = settings(place, table);
        command.args(["serve", "--mounts", "--config"]).arg(file);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let log = fs::File::create(place.path("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let service = Self { child, socket, copies };
        wait_for("the mount service", || {
            std::os::unix::net::UnixStream::connect(&service.socket).is_ok()
        });
        service
    }

    /// Returns the copies that the service keeps.
    fn kept(&self) -> Vec<Vec<u8>> {
        let folder = format!("/proc/{}/fd", self.child.id());
        let files = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
        let is_copy = |it: &PathBuf| {
            fs::read_link(it).is_ok_and(|it| it.starts_with(&self.copies) && it != self.copies)
        };
        let read = |it: PathBuf| match fs::read(&it) {
            Ok(bytes) => Some(bytes),
            // The service may close a copy when its client has ended.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => panic!("{}: {error}", it.display()),
        };
        files.filter(is_copy).filter_map(read).collect()
    }
}

/// Runs a case of [`client`] as the user, in the user's own user namespace.
fn attack(user: &User, service: &Service, case: &str, image: &Path) {
    let program = user.place.path("client");
    if !program.exists() {
        testing::copy_program(std::env::current_exe().unwrap(), &program);
    }
    let case = format!("rootless::mounts::client::{case}");
    let words = [
        "env",
        &format!("QUIRE_TEST_SOCKET={}", service.socket.display()),
        &format!("QUIRE_TEST_IMAGE={}", image.display()),
        "sh",
        "-c",
        // Descriptor 9 is the host's namespace, for cases that need it.
        "exec 9< /proc/self/ns/user; exec \"$@\"",
        "sh",
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        program.to_str().unwrap(),
        "--exact",
        &case,
        "--ignored",
        "--nocapture",
    ];
    let ran = user.call(&words);
    let log = fs::read_to_string(user.place.path("log")).unwrap_or_default();
    assert!(
        ran.code == Some(0) && ran.out.contains("1 passed"),
        "{case}: {}{}{log}",
        ran.out,
        ran.err
    );
}

/// Returns the file of the user's only image, which a client may read.
fn image_of(user: &User) -> PathBuf {
    let images = user.home().join(".local/share/quire/images");
    fs::read_dir(&images).unwrap().next().unwrap().unwrap().path()
}

/// A user without subordinate ids, with an image that has a device and a set-user-id program.
fn user_with_image() -> Option<User> {
    let user = User::new(false)?;
    let tree = tree(&user);
    fs::set_permissions(tree.join("theirs"), fs::Permissions::from_mode(0o4755)).unwrap();
    user.import(&tree);
    Some(user)
}

/// Rules S2 and S3: the mount has no devices, and attributes that the client cannot change.
#[test]
fn what_is_lent_stays_as_it_is() {
    let Some(user) = user_with_image() else { return };
    let service = Service::start(&user.place, "");
    attack(&user, &service, "attributes", &image_of(&user));
}

/// Rule S1: the kernel reads only data that the service wrote, and no byte from a client. Rule S6: only an image is
/// accepted.
#[test]
fn the_kernel_reads_no_byte_of_a_client() {
    let Some(user) = user_with_image() else { return };
    let service = Service::start(&user.place, "");
    let image = image_of(&user);
    attack(&user, &service, "damaged_images", &image);
    attack(&user, &service, "lent_and_held", &image);
    let sent = fs::read(&image).unwrap();
    let kept = service.kept();
    assert!(!kept.is_empty());
    for copy in kept {
        assert_ne!(copy, sent);
        // Redirects to objects are marks for overlays of users. There must be none for overlays of root.
        let has = |text: &[u8]| copy.windows(text.len()).any(|it| it == text);
        assert!(has(b"overlay.metacopy") && !has(client::MARK), "{}", copy.len());
        // Root mounts the copy, because users may not.
        let file = user.place.path("copy");
        fs::write(&file, &copy).unwrap();
        let shown = user.place.run(&format!("tree erofs:{}", file.display()));
        assert!(!shown.out.contains("zero"), "{}{}", shown.out, shown.err);
    }
}

/// Rules S4, S5 and S6: requests that name files or ids of others, or that are invalid.
#[test]
fn requests_for_more_are_refused() {
    let Some(user) = user_with_image() else { return };
    let service = Service::start(&user.place, "image-bytes = 10_000_000\nconnections = 4\n");
    let image = image_of(&user);
    attack(&user, &service, "wrong_requests", &image);
    attack(&user, &service, "too_much_of_a_connection", &image);
    attack(&user, &service, "many_connections", &image);
    attack(&user, &service, "files_that_wait", &image);
    attack(&user, &service, "descriptors_that_wait", &image);
    // The service still works as before.
    attack(&user, &service, "lent_and_held", &image);
}

/// A user's connections do not block other users, because the user of a connection is identified before the connection
/// takes a slot.
#[test]
fn a_flood_of_one_user_keeps_no_other_out() {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    let Some(user) = user_with_image() else { return };
    let service = Service::start(&user.place, "");
    let image = image_of(&user);
    let ask = || -> std::io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(&service.socket)?;
        stream.set_read_timeout(Some(std::time::Duration::from_secs(10)))?;
        stream.write_all(b"{\"method\":\"org.varlink.service.GetInfo\"}\0")?;
        let mut answer = vec![0; 512];
        let count = stream.read(&mut answer)?;
        answer.truncate(count);
        Ok(answer)
    };
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| attack(&user, &service, "flood", &image));
        let mut asked = 0;
        while !flood.is_finished() {
            // During the flood, root, which is another user, makes requests.
            let answer = ask().unwrap_or_else(|error| panic!("request {asked}: {error}"));
            assert!(String::from_utf8_lossy(&answer).contains("Quire"), "request {asked}");
            asked += 1;
        }
        assert!(asked > 5, "{asked}");
        flood.join().unwrap();
    });
}

/// Users of the host, including the user `nobody`, can signal only their own processes (kill(2)).
#[test]
fn no_user_of_the_host_can_end_what_speaks_with_clients() {
    use std::os::unix::net::UnixStream;
    if !crate::is_root() || User::new(false).is_none() {
        return;
    }
    let place = Place::new();
    let service = Service::start(&place, "");
    let _client = UnixStream::connect(&service.socket).unwrap();
    let child = || {
        let children = format!("/proc/{0}/task/{0}/children", service.child.id());
        let text = fs::read_to_string(children).unwrap_or_default();
        text.split_whitespace().next().map(ToOwned::to_owned)
    };
    // A child is in the list of the thread that started it.
    let threads = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", service.child.id())).unwrap();
        let lists =
            tasks.filter_map(|it| fs::read_to_string(it.ok()?.path().join("children")).ok());
        lists.flat_map(|it| it.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>()).next()
    };
    let mut found = None;
    wait_for("the process that speaks with the client", || {
        found = child().or_else(threads);
        found.as_ref().is_some_and(|it| {
            fs::read(format!("/proc/{it}/cmdline"))
                .is_ok_and(|it| it.starts_with(b"quire-mount-client"))
        })
    });
    let status = fs::read_to_string(format!("/proc/{}/status", found.unwrap())).unwrap();
    let ids = |name: &str| {
        let line = status.lines().find_map(|it| it.strip_prefix(name)).unwrap();
        line.split_whitespace().map(|it| it.parse().unwrap()).collect::<Vec<u32>>()
    };
    for id in [ids("Uid:"), ids("Gid:")].concat() {
        assert!(id > 2_147_418_112, "{id} may be a user's");
    }
}

/// Rule S6: a user's mounts are counted, and released.
#[test]
fn images_are_counted_for_each_user() {
    let Some(user) = user_with_image() else { return };
    let service = Service::start(&user.place, "images-per-user = 1\n");
    attack(&user, &service, "one_image_at_a_time", &image_of(&user));
}

/// Rule S5: a namespace may have only ids that were assigned to the user.
#[test]
fn a_namespace_with_other_ids_gets_nothing() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    // A user's mount namespace may contain other files that assign ids, but the service reads the host's files.
    let service = Service::start(&user.place, "");
    let socket = format!("QUIRE_MOUNT_SERVICE={}", service.socket.display());
    let quire = user.place.path("quire");
    let words =
        ["env", &socket, quire.to_str().unwrap(), "run", "--rm", "--via", "service", "a", "true"];
    let ran = user.call(&words);
    assert!(ran.code == Some(125), "{}", ran.err);
    assert!(ran.err.contains("users 6400000 to 6465535 of the host"), "{}", ran.err);
}

/// Rule S6: a user with many ids counts as one user.
#[test]
fn numbers_that_were_given_to_a_user_are_not_users() {
    let Some(user) = User::new(true) else { return };
    let program = user.place.path("client");
    testing::copy_program(std::env::current_exe().unwrap(), &program);
    let socket = user.place.path("sock/mounts.sock");
    // The root of a namespace changes to another user in it, and makes a namespace as that user.
    let script = format!(
        "export QUIRE_TEST_SOCKET={}
         unshare --user --map-auto --map-root-user setpriv --reuid=5 --regid=5 --clear-groups unshare --user \
         --map-root-user --mount {} --exact rootless::mounts::client::a_number_of_another_user --ignored --nocapture",
        socket.display(),
        program.display()
    );
    let ran = beside_service(&user, "", &script);
    assert!(ran.code == Some(0) && ran.out.contains("1 passed"), "{}{}", ran.out, ran.err);
}

/// Ends the service whose pid is in a file.
fn end_service(user: &User) {
    let service = fs::read_to_string(user.place.path("pid")).unwrap().trim().parse().unwrap();
    let service = rustix::process::Pid::from_raw(service).unwrap();
    rustix::process::kill_process(service, rustix::process::Signal::TERM).unwrap();
    // An exited process has no program, even before it is reaped.
    let program = format!("/proc/{}/exe", service.as_raw_nonzero());
    wait_for("the end of the mount service", || fs::read_link(&program).is_err());
}

/// The process that reads images has dropped its rights before it reads one.
#[test]
fn the_writer_has_no_rights() {
    use std::os::unix::process::CommandExt as _;
    if !crate::is_root() {
        return;
    }
    let place = Place::new();
    fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // The built program may be in a folder that only root can read.
    testing::copy_program(env!("CARGO_BIN_EXE_quire"), &place.path("quire"));
    let mut command = Command::new(place.path("quire"));
    let ask = r#"{"users":[[0,1]],"groups":[[0,1]],"places":[],"inodes_max":10,"bytes_max":1000}"#;
    command.arg0("quire-image-writer").env("QUIRE_TOLD", ask).uid(65_534).gid(65_534);
    let out = fs::File::create(place.path("out")).unwrap();
    command.stdin(Stdio::piped()).stdout(out).stderr(Stdio::piped());
    let mut writer = command.spawn().unwrap();
    let status = || {
        let text = fs::read_to_string(format!("/proc/{}/status", writer.id())).unwrap();
        let line = |name: &str| {
            let found = text.lines().find_map(|it| it.strip_prefix(name));
            found.unwrap_or_default().trim().to_owned()
        };
        (line("Seccomp:"), line("NoNewPrivs:"), line("CapEff:"), line("Groups:"))
    };
    wait_for("the filter", || status().0 == "2");
    let none = "0".repeat(16);
    assert_eq!(status(), ("2".to_owned(), "1".to_owned(), none, String::new()));
    let limits = fs::read_to_string(format!("/proc/{}/limits", writer.id())).unwrap();
    for (name, most) in
        [("Max open files", "4"), ("Max processes", "0"), ("Max core file size", "0")]
    {
        let line = limits.lines().find(|it| it.starts_with(name)).unwrap();
        assert_eq!(line[name.len()..].split_whitespace().next(), Some(most), "{line}");
    }
    drop(writer.stdin.take());
    let ended = writer.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(1) && said.contains("Invalid"), "{said}");
}

/// Runs a script of the user, with a service that sees the same files of users. `$Q` is quire.
fn beside_service(user: &User, table: &str, script: &str) -> Ran {
    beside_service_after(user, "", table, script)
}

/// Like [`beside_service`], after root has run a script, with the service's directory for copies in `$C`.
fn beside_service_after(user: &User, before: &str, table: &str, script: &str) -> Ran {
    let (file, socket, copies) = settings(&user.place, table);
    let quire = user.place.path("quire");
    let prepare = format!(
        "C={}; {before}
         {} serve --mounts --config {} > \"$1/log\" 2>&1 < /dev/null &
         echo $! > \"$1/pid\"
         for _ in $(seq 100); do test -S {} && break; sleep 0.05; done",
        copies.display(),
        quire.display(),
        file.display(),
        socket.display()
    );
    let words = [
        "env",
        &format!("Q={}", quire.display()),
        &format!("QUIRE_MOUNT_SERVICE={}", socket.display()),
        "sh",
        "-uc",
        script,
    ];
    let ran = user.call_after(&prepare, &words);
    end_service(user);
    ran
}

/// The reference is the kernel's mount of the image.
#[test]
fn what_is_lent_is_as_the_kernel_shows_the_image() {
    let Some(user) = User::new(true) else { return };
    if !has_getfattr() {
        return;
    }
    user.import(&odd_tree(&user));
    fs::write(user.place.path("listing"), LISTING).unwrap();
    let script = format!(
        "$Q run --rm --quiet --via service a sh -c \"$(cat {})\"",
        user.place.path("listing").display()
    );
    let ran = beside_service(&user, "", &script);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    compare(&listed_by_kernel(&user, "objects"), &sorted(&ran.out));
}

/// Containers run as with a tree, and programs with capabilities and set-user-id bits work inside.
#[test]
fn containers_run_by_the_service() {
    for has_ids in [true, false] {
        let Some(user) = User::new(has_ids) else { return };
        let tree = tree(&user);
        add_programs(&tree, &["/usr/bin/sha256sum", "/bin/rm"]);
        user.import(&tree);
        for runtime in runtimes() {
            let script = format!(
                "R='--rm --quiet --via service --runtime {runtime}'
                 $Q run $R a sh -c 'cat large etc/again link | sha256sum; test -e zero || echo no device'
                 $Q run $R a sh -c 'echo new > large && cat large && echo hi > etc/hosts; rm etc/again; ls etc/again 2> /dev/null || echo gone'
                 $Q run $R --read-only a sh -c 'echo x > y 2> /dev/null || echo read-only'
                 $Q run --quiet --via service --runtime {runtime} --detach --name c a sleep 100
                 $Q exec c sh -c 'cat theirs; echo'
                 $Q rm --force c
                 mkdir -p kept
                 $Q run $R --writable dir=$PWD/kept a sh -c 'echo kept > file'
                 $Q run $R --writable dir=$PWD/kept a cat file"
            );
            let ran = beside_service(&user, "", &script);
            let noise = testing::noise(300_000);
            let digest = {
                use sha2::Digest as _;
                let all = [&noise[..], &noise, &noise].concat();
                let digest = sha2::Sha256::digest(all);
                digest.iter().map(|it| format!("{it:02x}")).collect::<String>()
            };
            let expect =
                format!("{digest}  -\nno device\nnew\ngone\nread-only\nc\ntheirs\nc\nkept\n");
            let out = ran.out.lines().filter(|it| it.len() != 64).map(|it| format!("{it}\n"));
            let log = fs::read_to_string(user.place.path("log")).unwrap();
            assert_eq!(out.collect::<String>(), expect, "{runtime} {has_ids}: {}{log}", ran.err);
            assert!(log.contains("mounted an image for a user"), "{log}");
        }
    }
}

/// A container's changes do not depend on the way in which its image was mounted. Docker and podman make mount
/// points in a layer of the container.
#[test]
fn a_read_only_root_needs_no_mount_points_by_any_way() {
    let Some(user) = User::new(true) else { return };
    let Some(tree) = crate::container_disk::volumes::from_scratch(&user.place) else { return };
    user.import(&tree);
    let host = user.home().join("host");
    fs::create_dir(&host).unwrap();
    fs::write(host.join("file"), "host\n").unwrap();
    let host = host.display();
    let ways = ["service", "tree", "fuse", "fuse-objects"];
    for (runtime, via) in runtimes().flat_map(|it| ways.map(|via| (it, via))) {
        let script = format!(
            "$Q run --rm --quiet --read-only --runtime {runtime} --via {via} -v {host}:/data -v {host}/file:/deep/file:ro \
             --mount type=memory,dst=/cache/inner -w /new/work a /look /proc/self /sys/kernel /dev/null /etc/hosts /data \
             /deep/file /cache/inner"
        );
        let ran = beside_service(&user, "", &script);
        assert_eq!(ran.out, crate::container_disk::volumes::LOOKED, "{runtime} {via}: {}", ran.err);
    }
}

#[test]
fn changes_are_found_by_every_way() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    add_programs(&tree, &["/bin/rm"]);
    user.import(&tree);
    let of = |way: &str| {
        format!(
            "$Q run --quiet --detach --name {way} --via {way} a sleep 1000
             $Q exec {way} sh -c 'echo new > etc/new; rm large; echo other > theirs'
             $Q diff {way}
             $Q commit --quiet {way} of-{way}
             $Q rm --force {way}
             $Q run --rm --quiet --read-only --df of-{way} sh -c 'cat etc/new theirs; ls large bin/sh 2>&1'
             $Q run --rm --quiet --read-only --df --via {way} a sh -c 'ls bin/sh'"
        )
    };
    let ran = ["tree", "fuse", "fuse-objects", "service"].map(|way| {
        let ran = beside_service(&user, "", &of(way));
        (ran.out.replace(way, "WAY"), ran.err)
    });
    let [tree, others @ ..] = &ran;
    let (out, err) = tree;
    for line in ["+ /etc/new", "- /large", "new", "other", "bin/sh"] {
        assert!(out.lines().any(|it| it == line), "no {line}: {out}{err}");
    }
    assert_eq!(out.lines().filter(|it| it.starts_with("- ")).count(), 1, "{out}");
    // Times differ between containers, and therefore also the ids of images.
    let steady = |text: &str| {
        let lines = text.lines().filter(|it| it.len() != 64 && !it.contains("mtime: "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    for (other, err) in others {
        assert_eq!(steady(other), steady(out), "{err}");
    }
}

/// Files for names, such as `/etc/hosts`, are created at the targets of the image's symlinks, even if a target does
/// not exist.
#[test]
fn links_of_an_image_that_lead_to_nothing_are_followed() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    let etc = tree.join("etc");
    std::os::unix::fs::symlink("../run/systemd/resolve/stub.conf", etc.join("resolv.conf"))
        .unwrap();
    std::os::unix::fs::symlink("/run/names", etc.join("hosts")).unwrap();
    user.import(&tree);
    let script = "$Q run --rm --quiet --via service --network host --add-host one:10.0.0.1 a sh -c 'cat /run/names; ls /run/systemd/resolve'";
    let ran = beside_service(&user, "", script);
    assert!(
        ran.out.contains("10.0.0.1") && ran.out.contains("stub.conf"),
        "{}{}",
        ran.out,
        ran.err
    );
}

/// The service does not know the volumes, but creates no file in the place of a volume.
#[test]
fn links_of_an_image_take_no_place_of_a_volume() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    let etc = tree.join("etc");
    std::os::unix::fs::symlink("../vol", etc.join("hosts")).unwrap();
    std::os::unix::fs::symlink("/names/resolver", etc.join("resolv.conf")).unwrap();
    std::os::unix::fs::symlink("etc/hostname", tree.join("way")).unwrap();
    user.import(&tree);
    let script = "
        mkdir host; echo mine > host/name
        for more in '' --read-only; do
            $Q run --rm --quiet --via service --network host --dns 192.0.2.1 $more -v ./host:/vol/data a \
                sh -c 'cat /vol/data/name /names/resolver'
            $Q run --rm --quiet --via service $more a cat /vol >shown && echo hosts
            $Q run --rm --quiet --via service $more -v ./host:/way/data a cat /etc/hostname/data/name
        done";
    let ran = beside_service(&user, "", script);
    assert_eq!(ran.out, "mine\nnameserver 192.0.2.1\nhosts\nmine\n".repeat(2), "{}", ran.err);
}

/// The ids of such a store have SHA-512, which the service computes if an allowed id has it.
#[test]
fn images_of_a_store_with_sha512_are_lent() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let store = user.home().join("sealed").display().to_string();
    let source = format!("tar:{}", user.place.path("tree.tar").display());
    let sealed = ["--store", &store, "--object-hash", "sha512"];
    let id = user.out(&[&sealed[..], &["import", "--quiet", &source, "a"]].concat());
    assert_eq!(id.trim().len(), 128, "{id}");
    let script = format!(
        "$Q --store {store} run --rm --quiet --via service a sh -c 'echo ran; cat /large | wc -c'"
    );
    let expect = user.script("$Q run --rm --quiet a sh -c 'echo ran; cat /large | wc -c'").out;
    assert!(expect.starts_with("ran\n"), "{expect}");
    let ran = beside_service(&user, "", &script);
    assert_eq!(ran.out, expect, "{}", ran.err);
    let ran = beside_service(&user, &format!("images = [\"{}\"]\n", id.trim()), &script);
    assert_eq!(ran.out, expect, "{}", ran.err);
    let other = format!("images = [\"{}\"]\n", "0".repeat(128));
    let ran = beside_service(&user, &other, &script);
    assert_eq!(ran.out, "", "{}", ran.err);
    let named = format!("or {}: it is not among `images`", id.trim());
    assert!(ran.err.contains(&named), "{}", ran.err);
}

/// If the service does not run or refuses, another way is used. If the user has chosen the service explicitly, this is
/// an error.
#[test]
fn who_is_refused_has_another_way() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let script =
        "$Q run --rm --quiet a sh -c 'echo ran'; $Q run --rm --via service a true; echo $?";
    let ran = beside_service(&user, "users = [\"root\"]\n", script);
    assert_eq!(ran.out, "ran\n125\n", "{}", ran.err);
    assert!(ran.err.contains("the mount service does not serve user 64001"), "{}", ran.err);
    let none = "images = [\"0000000000000000000000000000000000000000000000000000000000000000\"]\n";
    let ran = beside_service(&user, none, script);
    assert_eq!(ran.out, "ran\n125\n", "{}", ran.err);
    assert!(ran.err.contains("it is not among `images`"), "{}", ran.err);
    let ran = beside_service(&user, "inodes = 3\n", script);
    assert_eq!(ran.out, "ran\n125\n", "{}", ran.err);
    assert!(ran.err.contains("more than 3"), "{}", ran.err);
    // No service listens at this socket.
    let ran =
        user.run(&["run", "--rm", "--via", "service", "--mount-service", "/nowhere", "a", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("quire serve --mounts"), "{}", ran.err);
    // A native image has data in devices.
    user.out(&["convert", "--quiet", "--form", "packed", "a", "p"]);
    let ran = beside_service(&user, "", "$Q run --rm --via service p true; echo $?");
    assert!(ran.out == "125\n" && ran.err.contains("--form objects"), "{}{}", ran.out, ran.err);
}

/// If an image file was changed, the image is never run, even if another way could be tried.
#[test]
fn a_changed_image_is_not_lent() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let image = image_of(&user);
    let mut bytes = fs::read(&image).unwrap();
    fs::remove_file(&image).unwrap();
    // This byte belongs to the time of the root directory, which parsers do not check.
    let at = bytes.len() - 1;
    bytes[at] ^= 1;
    write(&image, &bytes, 0o644);
    chown(&image, Some(USER), Some(USER)).unwrap();
    for options in ["--via service", ""] {
        let script = format!("$Q run --rm {options} a true; echo $?");
        let ran = beside_service(&user, "", &script);
        assert!(ran.out == "125\n" && ran.err.contains("quire fsck"), "{}{}", ran.out, ran.err);
    }
}

/// `fsck` was not run: a file with missing bytes is an error, and does not look as if it did not exist.
#[test]
fn what_vanishes_is_an_error_whichever_way() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    user.import(&tree);
    let large = fs::read(tree.join("large")).unwrap();
    let object = ObjectId::new(digest(Algorithm::Sha256, &large)).path();
    fs::remove_file(user.home().join(".local/share/quire/objects").join(object)).unwrap();
    for (way, error) in [
        ("service", "Too many levels of symbolic links"),
        ("tree", "Too many levels of symbolic links"),
        ("fuse-objects", "Too many levels of symbolic links"),
        ("fuse", "Input/output error"),
    ] {
        let script = format!("$Q run --rm --quiet --via {way} a cat large");
        let ran = beside_service(&user, "", &script);
        assert!(ran.code == Some(1) && ran.err.contains(error), "{way}: {}{}", ran.out, ran.err);
    }
}

/// A full disk causes an error, and not an image with holes.
#[test]
fn a_full_disk_of_the_service_is_told() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let full = "
        mkdir \"$C\"; truncate -s 1M \"$1/disk\"; mkfs.ext4 -q -O ^has_journal \"$1/disk\"
        mount -o loop \"$1/disk\" \"$C\"; chmod 700 \"$C\"
        cat /dev/zero > \"$C/all\" 2> /dev/null || :";
    let script =
        "$Q run --rm --quiet a sh -c 'echo ran'; $Q run --rm --via service a true; echo $?";
    let ran = beside_service_after(&user, full, "", script);
    assert_eq!(ran.out, "ran\n125\n", "{}", ran.err);
    assert!(ran.err.contains("No space left on device"), "{}", ran.err);
}

/// A container continues when the service has ended.
#[test]
fn a_service_that_fails_takes_nothing_along() {
    let Some(user) = User::new(false) else { return };
    let tree = tree(&user);
    add_programs(&tree, &["/usr/bin/wc"]);
    user.import(&tree);
    let mut service = Service::start(&user.place, "");
    let socket = format!("QUIRE_MOUNT_SERVICE={}", service.socket.display());
    let quire = user.place.path("quire").to_str().unwrap().to_owned();
    let run = |words: &[&str]| user.call(&[&["env", &*socket, &*quire], words].concat());
    let ran = run(&[
        "run", "--quiet", "--via", "service", "--detach", "--name", "c", "a", "sleep", "100",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    let ran = run(&["exec", "c", "sh", "-c", "cat theirs; cat large | wc -c"]);
    assert_eq!(ran.out, "theirs300000\n", "{}", ran.err);
    assert_eq!(run(&["rm", "--force", "c"]).code, Some(0));
    // The socket exists, but no service listens.
    let ran = run(&["run", "--rm", "--quiet", "a", "sh", "-c", "echo ran"]);
    assert_eq!((ran.code, &*ran.out), (Some(0), "ran\n"), "{}", ran.err);
    // Another service takes its place.
    let _next = Service::start(&user.place, "");
    let ran = run(&["run", "--rm", "--quiet", "--via", "service", "a", "sh", "-c", "echo ran"]);
    assert_eq!((ran.code, &*ran.out), (Some(0), "ran\n"), "{}", ran.err);
}
