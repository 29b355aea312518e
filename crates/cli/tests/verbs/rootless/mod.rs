//! Containers of a user who is not root. The tests need root, in order to become that user and to assign ids to the
//! user.

#[cfg(feature = "serve")]
mod fuse;
#[cfg(feature = "serve")]
mod fuse_objects;
#[cfg(feature = "serve")]
mod layers;
mod limits;
#[cfg(feature = "serve")]
mod mounts;
mod networks;
#[cfg(feature = "serve")]
mod share;
mod snapshots;
#[cfg(feature = "serve")]
mod suites;
#[cfg(feature = "serve")]
mod volumes;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use kernel::mount::OVERLAY_USER_DATA;
use kernel::version::KernelVersion;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::container_life::runs::{runtimes, wait_for};
use crate::container_network::pasta::{add_network, answer, open_tun, own_network};
use crate::container_rights::userns::set;
use crate::{Place, Ran, add_programs, program, write};

const USER: u32 = 64_001;

/// A user of this machine that exists only during a command: the machine itself is not changed.
struct User {
    place: Place,
    has_ids: bool,
}

impl User {
    /// Makes a user whose images can be mounted as trees.
    fn new(has_ids: bool) -> Option<Self> {
        if KernelVersion::running().is_none_or(|it| it < OVERLAY_USER_DATA) {
            testing::skipped("trees in user namespaces: this kernel is older than Linux 6.16");
            return None;
        }
        Self::of_any_kernel(has_ids)
    }

    fn of_any_kernel(has_ids: bool) -> Option<Self> {
        if !crate::is_root() {
            return None;
        }
        let needed = ["unshare", "mount", "setpriv", "newuidmap", "newgidmap", "fusermount3"];
        for name in needed {
            if program(name).is_none() {
                assert!(
                    std::env::var_os("CI").is_none(),
                    "CI has no {name}: packages util-linux, uidmap, fuse3"
                );
                testing::skipped(&format!("{name} is not installed"));
                return None;
            }
        }
        if runtimes().next().is_none() {
            testing::skipped("neither crun nor runc is installed");
            return None;
        }
        let place = Place::new();
        let home = place.path("home");
        fs::create_dir(&home).unwrap();
        fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        chown(&home, Some(USER), Some(USER)).unwrap();
        // The built program may be in a folder that only root can read.
        testing::copy_program(env!("CARGO_BIN_EXE_quire"), &place.path("quire"));
        let names = fs::read_to_string("/etc/passwd").unwrap();
        let own = format!("quire-test:x:{USER}:{USER}::{}:/bin/sh\n", home.display());
        fs::write(place.path("passwd"), names + &own).unwrap();
        let ids = if has_ids { "quire-test:6400000:65536\n" } else { "" };
        fs::write(place.path("ids"), ids).unwrap();
        Some(Self { place, has_ids })
    }

    fn home(&self) -> PathBuf {
        self.place.path("home")
    }

    fn run(&self, words: &[&str]) -> Ran {
        let quire = self.place.path("quire").to_str().unwrap().to_owned();
        self.call(&[&[&*quire], words].concat())
    }

    /// Runs a script in one mount namespace; `$Q` is quire.
    #[cfg(feature = "serve")]
    fn script(&self, script: &str) -> Ran {
        let quire = self.place.path("quire");
        self.call(&["env", &format!("Q={}", quire.display()), "sh", "-uc", script])
    }

    fn call(&self, words: &[&str]) -> Ran {
        self.call_after("", words)
    }

    /// Like `call`, after root has run a script, in a mount namespace that ends with the program.
    fn call_after(&self, prepare: &str, words: &[&str]) -> Ran {
        const SCRIPT: &str = "
            mknod -m 666 \"$1/fuse\" c 10 229 2> /dev/null || :
            mount --bind \"$1/fuse\" /dev/fuse
            eval \"$3\"
            mount --bind \"$1/passwd\" /etc/passwd
            mount --bind \"$1/ids\" /etc/subuid
            mount --bind \"$1/ids\" /etc/subgid
            cd \"$1/home\"
            user=$2
            shift 3
            exec setpriv --reuid=$user --regid=$user --clear-groups -- \"$@\"
        ";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", SCRIPT, "sh"]);
        command.arg(self.place.folder.path()).arg(USER.to_string()).arg(prepare);
        command.args(words).env_clear();
        command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", self.home());
        command.env("XDG_RUNTIME_DIR", self.home()).env("TMPDIR", self.home());
        Ran::from_output(&command.stdin(Stdio::null()).output().unwrap())
    }

    fn out(&self, words: &[&str]) -> String {
        let ran = self.run(words);
        let ids = self.has_ids;
        assert_eq!(ran.code, Some(0), "{words:?} {ids}: {}{}", ran.out, ran.err);
        ran.out
    }

    /// Imports a tree that root has made as `a`.
    fn import(&self, tree: &std::path::Path) {
        let file = self.place.path("tree.tar");
        let mut tar = Command::new("tar");
        tar.args(["--create", "--format=posix", "--xattrs", "--xattrs-include=*"]);
        tar.arg("--file").arg(&file).arg("--directory").arg(tree).arg(".");
        assert!(tar.status().unwrap().success());
        self.out(&["import", "--quiet", &format!("tar:{}", file.display()), "a"]);
    }
}

/// Makes files of several owners, of all kinds that a tree can contain.
fn tree(user: &User) -> PathBuf {
    let place = &user.place;
    let tree = place.tree("tree", "x");
    add_programs(
        &tree,
        &["/bin/sh", "/bin/cat", "/bin/sleep", "/bin/id", "/bin/ls", "/usr/bin/find"],
    );
    write(&tree.join("etc/passwd"), b"me:x:33:34::/:/bin/sh\n", 0o644);
    write(&tree.join("theirs"), b"theirs", 0o600);
    chown(tree.join("theirs"), Some(33), Some(34)).unwrap();
    write(&tree.join("large"), &testing::noise(300_000), 0o644);
    fs::hard_link(tree.join("large"), tree.join("etc/again")).unwrap();
    std::os::unix::fs::symlink("large", tree.join("link")).unwrap();
    let mode = Mode::from_raw_mode(0o666);
    mknodat(CWD, tree.join("zero"), FileType::CharacterDevice, mode, makedev(1, 5)).unwrap();
    mknodat(CWD, tree.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    tree
}

#[test]
fn a_user_runs_containers_with_ids_of_its_own() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    for runtime in runtimes() {
        let run = |options: &[&str], script: &str| {
            let before = ["run", "--rm", "--quiet", "--runtime", runtime];
            user.run(&[&before[..], options, &["a", "sh", "-c", script]].concat())
        };
        let ran = run(&[], "cat /proc/self/uid_map; id -u; cat etc/x 2> /dev/null; exit 7");
        assert_eq!(ran.code, Some(7), "{runtime}: {}", ran.err);
        let map: Vec<_> = ran.out.split_whitespace().collect();
        assert_eq!(map, ["0", "64001", "1", "1", "6400000", "65536", "0"], "{runtime}");
        // All bytes are those of the image, also when a file is read by another name. Files that do not belong to root
        // belong to other users.
        let read = run(&["--user", "me"], "cat large etc/again link; cat theirs; id -u; id -g");
        let noise = String::from_utf8_lossy(&testing::noise(300_000)).repeat(3);
        assert!(read.out == noise + "theirs33\n34\n", "{runtime}: {}", read.err);
        // Writes stay in the container.
        let script = "echo new > large && cat large; cat < zero";
        let written = run(&[], script);
        assert!(written.out.starts_with("new\n"), "{runtime}: {} {}", written.out, written.err);
        let refused = "device nodes are left out, or cannot be opened";
        assert!(written.err.contains("zero"), "{refused}: {}", written.err);
        let host = run(&["--network", "host"], "ls /sys/class/net");
        assert!(host.out.lines().any(|it| it == "lo"), "{runtime}: {}", host.err);
    }
}

/// As in a pod whose program is not root, a user without rights in a namespace can make a child namespace. Source:
/// user_namespaces(7).
#[test]
fn a_user_of_a_namespace_runs_containers() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    let way = "--via tree";
    user.import(&tree);
    let inside = |options: &str, user_of_pod: &str| {
        format!(
            "mkdir -p home && chown 33:33 home
             cp -r .local home/ && chown -R 33:33 home/.local
             exec setpriv --reuid={user_of_pod} --regid={user_of_pod} --clear-groups \
                 --bounding-set=-sys_admin --inh-caps=-sys_admin \
                 env HOME=$PWD/home XDG_RUNTIME_DIR=$PWD/home \
                 $Q run --rm --quiet {options} a sh -c 'id -u; cat theirs'"
        )
    };
    for (options, user_of_pod) in
        [(way, "33"), ("--via fuse", "33"), ("--via fuse-objects", "33"), ("", "33")]
    {
        let script = inside(options, user_of_pod);
        let namespace = "unshare --user --map-auto --map-root-user --mount";
        let ran = user.call(&[
            "env",
            &format!("Q={}", user.place.path("quire").display()),
            "sh",
            "-uc",
            &format!("exec {namespace} sh -euc \"$0\""),
            &script,
        ]);
        assert_eq!((ran.code, &*ran.out), (Some(0), "0\ntheirs"), "{options}: {}", ran.err);
        user.call(&["unshare", "--user", "--map-auto", "--map-root-user", "rm", "-rf", "home"]);
    }
}

/// An ACL may name ids that a user lacks. They are mapped like owners with such ids.
#[test]
fn acls_of_others_keep_no_image_from_starting() {
    for has_ids in [true, false] {
        let Some(user) = User::new(has_ids) else { return };
        let tree = tree(&user);
        let [version, entry] = [2_u32.to_le_bytes().to_vec(), Vec::new()];
        let entries = [(1_u16, 6_u16, u32::MAX), (2, 4, 33), (2, 4, 70_000), (4, 4, u32::MAX)];
        let entries =
            entries.into_iter().chain([(8, 4, 70_001), (16, 4, u32::MAX), (32, 0, u32::MAX)]);
        let acl = entries.fold([version, entry].concat(), |acl, (tag, mode, id)| {
            [&acl[..], &tag.to_le_bytes(), &mode.to_le_bytes(), &id.to_le_bytes()].concat()
        });
        set(&tree.join("large"), "system.posix_acl_access", &acl);
        set(&tree.join("etc"), "system.posix_acl_default", &acl);
        user.import(&tree);
        for way in ["tree", "fuse", "fuse-objects"] {
            let words = [
                "run",
                "--rm",
                "--quiet",
                "--via",
                way,
                "a",
                "sh",
                "-c",
                "cat large | head -c 0; ls -d etc",
            ];
            assert_eq!(user.out(&words), "etc\n", "{way} {has_ids}");
        }
    }
}

#[test]
fn a_user_has_a_network_of_its_own_that_reaches_others() {
    reaches_others(true);
}

#[test]
fn a_user_without_ids_has_a_network_of_its_own_too() {
    reaches_others(false);
}

fn reaches_others(has_ids: bool) {
    let Some(user) = User::new(has_ids) else { return };
    let tree = tree(&user);
    if add_network(&tree).is_none() || !own_network() {
        return;
    }
    open_tun(&user.place);
    user.import(&tree);
    for runtime in runtimes() {
        let words = ["run", "--quiet", "--runtime", runtime, "--name", "web", "--detach"];
        let more = ["--publish", "8080:80", "a", "perl", "/serve", "tcp", "80"];
        user.out(&[&words[..], &more].concat());
        assert_eq!(answer("127.0.0.1:8080"), "hello from 80\n", "{runtime}");
        let listed = user.out(&["ps"]);
        assert!(listed.contains("0.0.0.0:8080->80/tcp"), "{runtime}: {listed}");
        // The container has its own interfaces instead of the host's.
        let cards = user.out(&["exec", "web", "ls", "/sys/class/net"]);
        assert!(cards.lines().eq(["card0", "lo"]), "{runtime}: {cards}");
        user.out(&["rm", "--force", "web"]);
        let free = || std::net::TcpListener::bind("0.0.0.0:8080").is_ok();
        wait_for("the end of pasta", free);
        let more = ["--network", "pasta", "--runtime", runtime, "a", "id", "-u"];
        let ran = user.run(&[&["--quiet", "run"], &more[..]].concat());
        assert_eq!((&*ran.out, &*ran.err), ("0\n", ""), "{runtime}");
        // The folders of containers have no mounts, which would prevent their removal.
        for place in ["containers", "tmp"] {
            let left = || {
                let left = fs::read_dir(user.home().join(".local/share/quire").join(place));
                let left = left.unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
                left.filter(|it| !it.starts_with('.')).count()
            };
            wait_for("what the container wrote to be removed", || left() == 0);
        }
    }
    let ran = user.run(&["run", "--publish", "80:80", "a", "true"]);
    let said = "port 80 of the host: only root may use it";
    assert!(ran.code == Some(125) && ran.err.contains(said), "{}", ran.err);
}

/// Prints names, metadata and bytes of all files of a directory. The length of a directory depends on the file
/// system.
const LISTING: &str = "
    find . -xdev -type d -printf '%P %y %m %U %G %T@\\n' -o -printf '%P %y %m %U %G %T@ %s %n %l\\n'
    find . -xdev -type f -exec sha256sum {} +
    getfattr -R -P -h -d -m - -e hex . 2> /dev/null || :
";

fn has_getfattr() -> bool {
    let has = program("getfattr").is_some();
    if !has {
        assert!(std::env::var_os("CI").is_none(), "CI has no getfattr: package attr");
        testing::skipped("getfattr is not installed");
    }
    has
}

/// Makes a tree of all files that can be compared. Users cannot make device nodes.
fn odd_tree(user: &User) -> PathBuf {
    let tree = tree(user);
    add_programs(&tree, &["/usr/bin/sha256sum", "/usr/bin/getfattr"]);
    // Runtimes create these files if the image lacks them. Users cannot create device nodes.
    for path in ["etc/hosts", "etc/hostname", "etc/resolv.conf"] {
        write(&tree.join(path), b"", 0o644);
    }
    fs::remove_file(tree.join("zero")).unwrap();
    write(&tree.join("odd\n\u{1}\u{e9} name"), b"odd", 0o4755);
    write(&tree.join("sticky"), &testing::noise(70_000), 0o2711);
    fs::set_permissions(tree.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    set(&tree.join("sticky"), "user.mine", b"\0 mine");
    let capability = [0x0200_0001_u32, 1, 0, 0, 0].map(u32::to_le_bytes).concat();
    set(&tree.join("sticky"), "security.capability", &capability);
    set(
        &tree.join("theirs"),
        "system.posix_acl_access",
        &crate::container_rights::userns::acl(1000),
    );
    tree
}

/// Returns the listing of root's mount of the tar that `user` has imported.
fn listed_by_kernel(user: &User, form: &str) -> Vec<String> {
    let tar = user.place.path("tree.tar");
    user.place.out(&format!("import --quiet --form {form} tar:{} a", tar.display()));
    let point = user.place.path("point");
    fs::create_dir_all(&point).unwrap();
    user.place.out(&format!("mount a {}", point.display()));
    let shown = Command::new("sh").args(["-c", LISTING]).current_dir(&point).output();
    user.place.out(&format!("umount {}", point.display()));
    sorted(&String::from_utf8_lossy(&shown.unwrap().stdout))
}

/// Returns the sorted lines of a listing, without files that are mounted in each container.
fn sorted(listing: &str) -> Vec<String> {
    let others = ["proc", "sys", "dev", "etc/hosts", "etc/hostname", "etc/resolv.conf"];
    let is_of_image = |line: &&str| {
        let path = line.split("  ./").last().unwrap_or_default();
        !others.iter().any(|it| path.starts_with(it) || path == format!("# file: {it}"))
    };
    let mut all: Vec<_> = listing.lines().filter(is_of_image).map(str::to_owned).collect();
    all.sort();
    all
}

#[track_caller]
fn compare(kernel: &[String], own: &[String]) {
    assert!(kernel.len() > 50, "{kernel:?}");
    for (kernel, own) in kernel.iter().zip(own) {
        assert_eq!(kernel, own);
    }
    assert_eq!(kernel.len(), own.len());
}

/// The reference is the kernel's mount of the image.
#[test]
fn a_tree_in_memory_is_as_the_kernel_shows_the_image() {
    let Some(user) = User::new(true) else { return };
    if !has_getfattr() {
        return;
    }
    user.import(&odd_tree(&user));
    let ran = user.out(&["run", "--rm", "--quiet", "--via", "tree", "a", "sh", "-c", LISTING]);
    compare(&listed_by_kernel(&user, "objects"), &sorted(&ran));
}

/// A directory may have more subdirectories than a process may have open files.
#[test]
fn a_tree_takes_few_descriptors() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    for number in 0..300 {
        fs::create_dir_all(tree.join(format!("wide/{number}"))).unwrap();
    }
    user.import(&tree);
    let quire = user.place.path("quire");
    let script = format!(
        "ulimit -n 120; exec {} run --rm --quiet --via tree a sh -c 'ls wide'",
        quire.display()
    );
    let ran = user.call(&["sh", "-c", &script]);
    assert_eq!((ran.code, ran.out.lines().count()), (Some(0), 300), "{}", ran.err);
}

/// Later commands can find, enter, read, commit, stop and remove a running container.
#[test]
fn later_commands_of_the_user_find_its_container() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    for runtime in runtimes() {
        let script = "id -u; echo hello > /new; exec sleep 1000";
        let before = ["run", "--detach", "--quiet", "--runtime", runtime, "--name", runtime];
        user.out(
            &[&before[..], &["--user", "me", "a", "sh", "-c", "id -u; exec sleep 1000"]].concat(),
        );
        assert!(user.out(&["ps"]).contains("running"));
        assert_eq!(user.out(&["exec", runtime, "id", "-u"]), "33\n", "{runtime}");
        let as_root = ["exec", "--user", "0", runtime, "sh", "-c", "echo hello > /new; id -u"];
        assert_eq!(user.out(&as_root), "0\n");
        assert_eq!(user.out(&["logs", runtime]), "33\n");
        let ran = user.run(&["diff", runtime]);
        assert_eq!(ran.code, Some(1), "{runtime}: {}", ran.err);
        let changes = ran.out;
        assert!(changes.contains("+ /new") && !changes.contains("overlay"), "{runtime}: {changes}");
        let file = user.home().join("changes.tar");
        let target = format!("changes:{}", file.display());
        user.out(&["export", "--force", runtime, &target]);
        let mut tar = Command::new("tar");
        tar.args(["--list", "--verbose", "--numeric-owner", "--file"]).arg(&file);
        let listed = tar.output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        assert!(listed.lines().any(|it| it.contains(" 0/0 ") && it.ends_with(" new")), "{listed}");
        // A program that runs as another user ends as well.
        user.out(&["stop", runtime]);
        assert!(user.out(&["ps", "--all"]).contains("exited"));
        user.out(&["rm", runtime]);
        user.out(&[&before[..], &["a", "sh", "-c", script]].concat());
        user.out(&["rm", "--force", runtime]);
        assert!(!user.out(&["ps", "--all"]).contains(runtime));
    }
}

#[test]
fn what_is_written_to_a_directory_of_the_user_stays() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let kept = user.home().join("kept");
    fs::create_dir(&kept).unwrap();
    chown(&kept, Some(USER), Some(USER)).unwrap();
    let wish = format!("dir={}", kept.display());
    let run = |script: &str| {
        user.out(&["run", "--rm", "--quiet", "--writable", &wish, "a", "sh", "-c", script])
    };
    run("echo kept > etc/kept; rm = 2> /dev/null; :");
    assert_eq!(run("cat etc/kept"), "kept\n");
    assert_eq!(fs::read_to_string(kept.join("upper/etc/kept")).unwrap(), "kept\n");
    // If the container has ended, another process, which has the same ids, commits it.
    let script = "echo more > theirs; : > etc/more";
    let before = ["run", "--detach", "--quiet", "--name", "c", "--writable", &wish, "a"];
    user.out(&[&before[..], &["sh", "-c", script]].concat());
    assert_eq!(user.out(&["wait", "c"]), "0\n");
    user.out(&["commit", "--quiet", "c", "b"]);
    let out = user.out(&[
        "run",
        "--rm",
        "--quiet",
        "b",
        "sh",
        "-c",
        "cat etc/kept theirs; ls -ln theirs",
    ]);
    let words: Vec<_> = out.split_whitespace().collect();
    assert_eq!((words[0], words[1], &words[4..6]), ("kept", "more", &["33", "34"][..]), "{out}");
    user.out(&["rm", "c"]);
}

/// A device with another path in the container is the named one, not the host's device at that path.
#[test]
fn a_device_of_another_name_is_the_one_that_was_named() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    for runtime in runtimes() {
        for path in ["/dev/mine", "/dev/fuse"] {
            let device = format!("/dev/zero:{path}");
            let run = ["run", "--rm", "--quiet", "--runtime", runtime, "--device", &device, "a"];
            let out = user.out(&[&run[..], &["ls", "-ln", path]].concat());
            assert!(out.starts_with('c') && out.contains("1, 5"), "{runtime}: {out}");
        }
    }
}

/// Every file belongs to the container's root.
#[test]
fn a_user_without_ids_has_one() {
    let Some(user) = User::new(false) else { return };
    user.import(&tree(&user));
    for (at, runtime) in runtimes().enumerate() {
        let script = "id -u; ls -ln theirs; cat theirs";
        let ran = user.run(&["run", "--rm", "--runtime", runtime, "a", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        // A permanent condition is reported only once.
        assert_eq!(ran.err.contains("/etc/subuid"), at == 0, "{}", ran.err);
        let words: Vec<_> = ran.out.split_whitespace().collect();
        assert_eq!((words[0], &words[3..5]), ("0", &["0", "0"][..]), "{}", ran.out);
        assert!(ran.out.ends_with("theirs"));
        let other = user.run(&["run", "--rm", "--runtime", runtime, "--user", "33", "a", "id"]);
        assert_eq!(other.code, Some(125));
        assert!(
            other.err.contains("user 33 has no id in this user namespace: use --user 0"),
            "{}",
            other.err
        );
    }
}

/// The file system in a filestore is an ext4, which only root can mount.
#[test]
fn a_user_without_loop_devices_is_told_what_works() {
    let Some(user) = User::new(true) else { return };
    if program("mkfs.ext4").is_none() {
        testing::skipped("mkfs.ext4 is not installed");
        return;
    }
    user.import(&tree(&user));
    for option in [["--writable", "self"], ["--mount", "type=self,dst=/a"]] {
        let words = [&["run", "--rm", "--quiet"], &option[..], &["a", "sh", "-c", ":"]].concat();
        let ran = user.run(&words);
        assert_eq!(ran.code, Some(125), "{option:?}: {}", ran.err);
        let advice = "without root, --writable dir, --writable memory and --mount type=memory work";
        assert!(ran.err.contains(advice), "{option:?}: {}", ran.err);
    }
    for place in ["dir", "memory"] {
        user.out(&["run", "--rm", "--quiet", "--writable", place, "a", "sh", "-c", ":"]);
    }
}

/// A user may have ranges of ids, but no program that maps them.
#[test]
fn a_user_whose_ranges_cannot_be_mapped_is_told_why() {
    let Some(user) = User::of_any_kernel(true) else { return };
    let absent = "mount --bind /dev/null /usr/bin/newuidmap";
    let plain = "cp /usr/bin/newgidmap \"$1/plain\"; chmod 755 \"$1/plain\"; \
                 mount --bind \"$1/plain\" /usr/bin/newgidmap";
    let quire = user.place.path("quire").to_str().unwrap().to_owned();
    for (prepare, expect) in [
        ("", "with 65537 ids inside"),
        (absent, "but newuidmap is not installed (Debian: package uidmap)"),
        (plain, "but /usr/bin/newgidmap may not map them, because it is neither setuid root nor"),
    ] {
        let ran = user.call_after(prepare, &[&quire, "doctor"]);
        assert!(ran.out.contains(expect), "{prepare}: {}{}", ran.out, ran.err);
        let has_ranges = ran.out.contains("this user has ranges in /etc/subuid and /etc/subgid");
        assert_eq!(has_ranges, !prepare.is_empty(), "{prepare}: {}", ran.out);
    }
}

/// Without root, AppArmor counts as off. Source: podman, pkg/specgen/generate/security_linux.go.
#[test]
fn a_container_of_a_user_has_no_apparmor_profile() {
    let Some(user) = User::new(false) else { return };
    user.import(&tree(&user));
    let run = |option: &str, command: &str| {
        let words = ["run", "--rm", "--quiet", "--security-opt", option, "a", "sh", "-c", command];
        user.run(&words)
    };
    // Kernels without security modules fail the read.
    let label = "cat /proc/self/attr/current 2>/dev/null; true";
    for option in ["apparmor=unconfined", "label=disable", "label=type:spc_t"] {
        let ran = run(option, label);
        assert_eq!(ran.code, Some(0), "{option}: {}", ran.err);
        assert!(!ran.out.contains("quire-default"), "{option}: {}", ran.out);
        assert_eq!(ran.err, "", "{option}");
    }
    let ran = run("apparmor=quire-default", "true");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(
        ran.err.contains("only containers of the host's root can have a profile"),
        "{}",
        ran.err
    );
}

/// The overlay trusts its own marks from any source.
#[test]
fn an_image_leads_to_no_bytes_but_its_own() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    let secret = user.place.path("secret");
    fs::create_dir(&secret).unwrap();
    write(&secret.join("secret"), &b"secret".repeat(1000), 0o600);
    for path in [&secret, &secret.join("secret")] {
        chown(path, Some(USER), Some(USER)).unwrap();
    }
    user.import(&tree);
    user.out(&["import", "--quiet", &format!("dir:{}", secret.display()), "secret"]);
    let objects = user.home().join(".local/share/quire/objects");
    let (folder, object) = walk(&objects);
    let evil = user.place.path("evil");
    fs::create_dir(&evil).unwrap();
    add_programs(&evil, &["/bin/sh", "/bin/cat"]);
    write(&evil.join("evil"), &[b'e'; 6000], 0o644);
    set(&evil.join("evil"), "user.overlay.redirect", format!("/{folder}/{object}").as_bytes());
    set(&evil.join("evil"), "user.overlay.metacopy", b"");
    // The data of a file without an object is in the image.
    write(&evil.join("small"), b"small", 0o644);
    set(&evil.join("small"), "user.overlay.redirect", format!("/{folder}/{object}").as_bytes());
    set(&evil.join("small"), "user.overlay.metacopy", b"");
    user.import(&evil);
    for way in ["tree", "fuse-objects"] {
        let run = ["run", "--rm", "--quiet", "--via", way, "a", "cat", "evil", "small"];
        let ran = user.run(&run);
        let expect = "e".repeat(6000) + "small";
        assert_eq!((ran.code, ran.out), (Some(0), expect), "{way}: {}", ran.err);
    }
}

/// Returns the folder and the name of an object.
fn walk(objects: &std::path::Path) -> (String, String) {
    let name = |it: &fs::DirEntry| it.file_name().into_string().unwrap();
    for folder in fs::read_dir(objects).unwrap() {
        let folder = folder.unwrap();
        if let Some(object) = fs::read_dir(folder.path()).unwrap().next() {
            return (name(&folder), name(&object.unwrap()));
        }
    }
    panic!("the store has no object ids");
}

/// A user's store is not at the path of the host root's store.
#[test]
fn root_of_a_namespace_has_the_store_of_its_user() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let quire = user.place.path("quire");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=64001", "--regid=64001", "--clear-groups", "--", "unshare", "--user"]);
    command.args(["--map-root-user", "--"]).arg(quire).arg("images");
    command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", user.home());
    let ran = Ran::from_output(&command.current_dir(user.home()).output().unwrap());
    assert!(ran.code == Some(0) && ran.out.contains("\na:latest "), "{}{}", ran.out, ran.err);
}
