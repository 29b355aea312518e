//! Roots whose files try to redirect the runtime: no file of the host changes. Needs root.
//!
//! The tests run in a jail: a mount namespace whose `/` is an overlay over the host's, so that a runtime that
//! follows a symlink writes to the overlay's upper directory, which the test checks.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{MetadataExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use image::tar::Kind;
use image::tar::write::Member;
use kernel::mount::OVERLAY_USER_DATA;
use kernel::version::KernelVersion;

use crate::container_life::runs::runtimes;
use crate::{Place, Ran, add_programs, is_root, open_to_all, program, write};

/// A user of the jail who is not root.
const USER: u32 = 64_002;

/// Makes the jail in the folder `$1`, for the user `$2`, and waits until standard input ends. Only the folder, /proc,
/// /sys and /dev in the jail lead to files of the host.
const JAIL: &str = "
    j=$1/jail; mkdir $j; mount -t tmpfs -o mode=755 jail $j; mkdir $j/up $j/work $j/root
    mount -t overlay -o lowerdir=/,upperdir=$j/up,workdir=$j/work jail $j/root
    for d in proc sys dev; do mount --rbind /$d $j/root/$d; done
    mkdir -p $j/root$1; mount --bind $1 $j/root$1
    mount -t tmpfs -o mode=755 run $j/root/run
    mkdir -p $j/root/upper $j/root/old; mount --bind $j/up $j/root/upper
    cd $j/root; pivot_root . old; cd /; umount -l /old
    mount --bind $1/passwd /etc/passwd
    for f in subuid subgid; do : >> /etc/$f; mount --bind $1/ids /etc/$f; done
    for d in victim theirs; do
        mkdir -p /srv/$d
        for f in null zero ptmx console core pts shm; do echo of the host > /srv/$d/$f; chmod 600 /srv/$d/$f; done
    done
    chown -R $2:$2 /srv/theirs
    echo ready; exec cat
";

struct Jail {
    place: Place,
    holder: Child,
}

impl Drop for Jail {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        drop(self.holder.wait());
    }
}

/// The user who runs a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caller {
    Root,
    User,
}

impl Jail {
    fn new() -> Option<Self> {
        if !is_root() {
            return None;
        }
        for needed in ["unshare", "nsenter", "mount", "pivot_root", "setpriv", "newuidmap"] {
            if program(needed).is_none() {
                testing::skipped(&format!("{needed} is not installed"));
                return None;
            }
        }
        if runtimes().next().is_none() {
            testing::skipped("neither crun nor runc is installed");
            return None;
        }
        let place = Place::new();
        open_to_all(&place);
        let home = place.path("home");
        fs::create_dir(&home).unwrap();
        chown(&home, Some(USER), Some(USER)).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_quire"), place.path("quire")).unwrap();
        let names = fs::read_to_string("/etc/passwd").unwrap();
        let own = format!("quire-jail:x:{USER}:{USER}::{}:/bin/sh\n", home.display());
        fs::write(place.path("passwd"), names + &own).unwrap();
        fs::write(place.path("ids"), "quire-jail:6500000:65536\n").unwrap();
        let tree = place.path("tree");
        add_programs(&tree, &["/bin/sh", "/bin/true"]);
        for directory in ["etc", "srv/victim", "srv/theirs", "vol/sub", "run", "root", "opt"] {
            fs::create_dir_all(tree.join(directory)).unwrap();
        }
        fs::create_dir_all(place.path("vol/sub")).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", JAIL, "sh"]);
        command.arg(place.folder.path()).arg(USER.to_string());
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "there is no jail");
        Some(Self { place, holder })
    }

    fn quire(&self, caller: Caller, arguments: &[&str]) -> Ran {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.holder.id().to_string(), "--mount", "--"]);
        let store = match caller {
            Caller::Root => self.place.path("store"),
            Caller::User => self.place.path("home/store"),
        };
        if caller == Caller::User {
            let (user, group) = (format!("--reuid={USER}"), format!("--regid={USER}"));
            command.args(["setpriv", &user, &group, "--clear-groups", "--"]);
        }
        command.arg(self.place.path("quire")).arg("--store").arg(store).args(arguments).env_clear();
        command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
        command
            .env("HOME", self.place.path("home"))
            .env("XDG_RUNTIME_DIR", self.place.path("home"));
        Ran::from_output(&command.stdin(Stdio::null()).output().unwrap())
    }

    /// Returns all files that differ from the host, or that a container could reach by a volume.
    fn host(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let upper = PathBuf::from(format!("/proc/{}/root/upper", self.holder.id()));
        list(&upper, &mut found);
        // crun makes a temporary file there.
        found.remove(&upper.join("tmp"));
        list(&self.place.path("vol"), &mut found);
        found
    }

    /// Makes an image of the tree with a hostile file at a path.
    fn import(&self, caller: Caller, hostile: &Hostile) {
        let (tree, aside) = (self.place.path("tree"), self.place.path("aside"));
        let path = tree.join(hostile.path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let was_there = fs::rename(&path, &aside).is_ok();
        match hostile.what {
            What::Link(target) => symlink(target, &path).unwrap(),
            What::File => write(&path, b"x", 0o755),
        }
        let ran =
            self.quire(caller, &["import", "--quiet", &format!("dir:{}", tree.display()), "h"]);
        fs::remove_file(&path).unwrap();
        if was_there {
            fs::rename(&aside, &path).unwrap();
        }
        assert_eq!(ran.code, Some(0), "{hostile:?}: {}", ran.err);
    }
}

fn list(folder: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let it = fs::symlink_metadata(&path).unwrap();
        let link = fs::read_link(&path).unwrap_or_default();
        let size = if it.is_dir() { 0 } else { it.len() };
        let text =
            format!("{:o} {}:{} {size} {:x} {link:?}", it.mode(), it.uid(), it.gid(), it.rdev());
        if it.is_dir() {
            list(&path, found);
        }
        found.insert(path, text);
    }
}

#[derive(Debug, Clone, Copy)]
enum What {
    Link(&'static str),
    File,
}

/// A hostile file of an image, in the place of a directory.
#[derive(Debug, Clone, Copy)]
struct Hostile {
    path: &'static str,
    what: What,
}

impl Hostile {
    /// Returns whether the file has the path of a mount point of the kernel's file systems.
    fn is_kernels(&self) -> bool {
        ["dev", "proc", "sys"].contains(&self.path)
    }
}

/// Paths at which a runtime mounts or makes files with the options below.
const PATHS: [&str; 20] = [
    "dev",
    "proc",
    "sys",
    "dev/pts",
    "dev/shm",
    "dev/mqueue",
    "dev/null",
    "sys/fs/cgroup",
    "etc/hosts",
    "etc/hostname",
    "etc/resolv.conf",
    "etc/mtab",
    "run",
    "tmp",
    "root",
    "vol",
    "vol/sub",
    "opt",
    "job",
    "proc/self",
];

const TARGETS: [&str; 14] = [
    "/srv/victim",
    "/srv/theirs",
    "/",
    "/etc",
    "..",
    "../../../../../../../../srv/victim",
    ".",
    "/proc",
    "/dev",
    "/sys",
    "/proc/self/fd/5",
    "/usr/lib",
    "/vol",
    "/srv/victim/new",
];

/// Options of `run`, with `$` for the folder.
const MODES: [&[&str]; 14] = [
    &[],
    &["--detach", "--name", "d"],
    &["--read-only"],
    &["--volume", "$/vol:/vol", "--mount", "type=memory,dst=/vol/sub"],
    &["--writable", "memory"],
    &["--device", "/dev/null:/opt/mine"],
    &["--read-only", "--volume", "$/vol:/job", "--workdir", "/opt/new"],
    &["--writable", "dir=$/kept"],
    &["--user", "1000:1000"],
    &["--userns", "auto"],
    &["--privileged"],
    &["--read-only", "--userns", "auto", "--mount", "type=memory,dst=/job"],
    &["--device", "/dev/zero:/dev/mine", "--workdir", "/job/new"],
    &["--writable", "self", "--volume", "$/vol/sub:/tmp/sub"],
];

/// Number of the first modes, which also work for users who are not root.
const USERS_MODES: usize = 7;

#[derive(Debug, Clone, Copy)]
struct Round {
    hostile: Hostile,
    caller: Caller,
    runtime: &'static str,
    mode: &'static [&'static str],
}

/// Returns first symlinks to the host's directories in the place of `/dev` in each mode, then random rounds.
fn all_rounds(count: u64) -> Vec<Round> {
    let can_be_user = KernelVersion::running() >= Some(OVERLAY_USER_DATA);
    if !can_be_user {
        testing::skipped("roots of users: this kernel is older than Linux 6.16");
    }
    let runtimes: Vec<_> = runtimes().collect();
    let mut rounds = Vec::new();
    for runtime in &runtimes {
        for (number, mode) in MODES.iter().enumerate() {
            let mut add = |caller, target| {
                let hostile = Hostile { path: "dev", what: What::Link(target) };
                rounds.push(Round { hostile, caller, runtime, mode });
            };
            add(Caller::Root, "/srv/victim");
            if number < USERS_MODES && can_be_user {
                add(Caller::User, "/srv/theirs");
            }
        }
    }
    // xorshift64 makes the same rounds each time.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % below
    };
    while rounds.len() < usize::try_from(count).unwrap() {
        let path = PATHS[next(PATHS.len())];
        let what = if next(8) == 0 { What::File } else { What::Link(TARGETS[next(TARGETS.len())]) };
        let caller = if can_be_user && next(3) == 0 { Caller::User } else { Caller::Root };
        let modes = if caller == Caller::User { USERS_MODES } else { MODES.len() };
        let (runtime, mode) = (runtimes[next(runtimes.len())], MODES[next(modes)]);
        rounds.push(Round { hostile: Hostile { path, what }, caller, runtime, mode });
    }
    rounds
}

/// In CVE-2026-47766 of crun and CVE-2026-41579 of runc, a symlink in the place of `/dev` changes the host.
#[test]
fn no_root_leads_its_runtime_to_the_host() {
    // Long runs, before a release, have as many rounds as attackers have tried.
    let count = if testing::rounds(1) >= 10 { 2000 } else { 60 };
    let Some(jail) = Jail::new() else { return };
    let (folder, mut ran_well) = (jail.place.folder.path().display().to_string(), 0);
    let before = jail.host();
    for (number, round) in all_rounds(count).into_iter().enumerate() {
        let Round { hostile, caller, runtime, mode } = round;
        jail.import(caller, &hostile);
        let kept = jail.place.path("kept");
        drop(fs::remove_dir_all(&kept));
        fs::create_dir(&kept).unwrap();
        if caller == Caller::User {
            chown(&kept, Some(USER), Some(USER)).unwrap();
        }
        let options: Vec<_> = mode.iter().map(|it| it.replace('$', &folder)).collect();
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let command =
            [&["run", "--quiet", "--runtime", runtime], &options[..], &["h", "true"]].concat();
        let ran = jail.quire(caller, &command);
        if mode.contains(&"--detach") {
            jail.quire(caller, &["rm", "--container", "--force", "d"]);
        }
        let after = jail.host();
        let changed: Vec<_> = after.iter().filter(|it| before.get(it.0) != Some(it.1)).collect();
        let gone: Vec<_> = before.keys().filter(|it| !after.contains_key(*it)).collect();
        assert!(changed.is_empty() && gone.is_empty(), "{number} {round:?}: {changed:?} {gone:?}");
        if hostile.is_kernels() {
            let expect = format!("/{} in the container's root is", hostile.path);
            assert_eq!(ran.code, Some(125), "{number} {round:?}: {}", ran.err);
            assert!(ran.err.contains(&expect), "{number} {round:?}: {}", ran.err);
        } else if ran.code == Some(0) {
            ran_well += 1;
        } else {
            // The failure must be an error that names the path, and not a signal or a partial start.
            assert!(matches!(ran.code, Some(125 | 127)), "{number} {round:?}: {ran:?}");
        }
    }
    assert!(ran_well > 0 || count < 60, "no container has started");
}

/// The symlink is not in the original image, but in the writable layer of an earlier container, or in an image that
/// was made from that layer.
#[test]
fn a_link_that_was_written_later_is_refused_too() {
    let Some(jail) = Jail::new() else { return };
    let tree = jail.place.path("tree");
    let import = ["import", "--quiet", &format!("dir:{}", tree.display()), "h"];
    assert_eq!(jail.quire(Caller::Root, &import).code, Some(0));
    let kept = jail.place.path("kept");
    fs::create_dir(&kept).unwrap();
    let option = format!("dir={}", kept.display());
    let before = jail.host();
    for runtime in runtimes() {
        let run = ["run", "--quiet", "--runtime", runtime, "--writable", &option, "h", "true"];
        let ran = jail.quire(Caller::Root, &run);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let link = kept.join("upper/dev");
        drop(fs::remove_dir_all(&link));
        symlink("/srv/victim", &link).unwrap();
        let ran = jail.quire(Caller::Root, &run);
        assert!(
            ran.code == Some(125) && ran.err.contains("symbolic link to \"/srv/victim\""),
            "{ran:?}"
        );
        // Making a bundle is refused as well.
        let bundle = jail.place.path("bundle").display().to_string();
        let ran =
            jail.quire(Caller::Root, &["bundle", "--writable", &option, "h", &bundle, "true"]);
        assert!(ran.code != Some(0) && ran.err.contains("/dev in the container's root"), "{ran:?}");
        fs::remove_file(&link).unwrap();
    }
    assert_eq!(jail.host(), before);
}

/// In an image of the form `objects`, Quire would treat such a file as deleted, but a program would see it. Source:
/// Linux Documentation/filesystems/overlayfs.rst, "Nesting overlayfs mounts".
#[test]
fn no_file_is_one_thing_to_the_kernel_and_another_to_quire() {
    if !crate::is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out("import --quiet --form objects dir:tree sound");
    for (path, name) in [
        ("etc/short", "trusted.overlay.whiteout"),
        ("etc", "trusted.overlay.whiteouts"),
        ("etc/short", "user.overlay.whiteout"),
        ("", "user.overlay.whiteouts"),
    ] {
        let path = tree.join(path);
        rustix::fs::setxattr(&path, name, b"", rustix::fs::XattrFlags::empty()).unwrap();
        let ran = place.run("import --quiet --form objects dir:tree a");
        assert_eq!(ran.code, Some(2), "{name}: {}", ran.err);
        assert!(ran.err.contains(name) && ran.err.contains("--skip-xattrs"), "{name}: {}", ran.err);
        place.out("import --quiet --form objects --skip-xattrs dir:tree a");
        rustix::fs::removexattr(&path, name).unwrap();
    }
    place.out("fsck");
}

/// A layer with the marks of overlayfs must not show other bytes, and must not hide files. Such layers are refused for
/// forms whose images are layers of an overlay.
#[test]
fn a_layers_marks_of_overlayfs_do_nothing() {
    if !crate::is_root() {
        return;
    }
    let place = Place::new();
    let folder = place.path("mounted");
    fs::create_dir(&folder).unwrap();
    let marks: [(&str, &[u8]); 4] =
        [("metacopy", b""), ("opaque", b"y"), ("origin", b"\0\xfb\x1d"), ("redirect", b"/secret")];
    let (own, secret) = ([b'o'; 5000], [b's'; 5000]);
    for prefix in ["trusted.overlay.", "user.overlay."] {
        let names = marks.map(|(name, value)| (format!("{prefix}{name}"), value));
        let xattrs = names.each_ref().map(|(name, value)| (name.as_bytes(), *value));
        let mut tar = image::tar::write::Writer::new(Vec::new());
        let mut add = |path: &str, kind, xattrs, bytes: &[u8]| {
            let size = bytes.len() as u64;
            let metadata = image::tree::Metadata::IMPLICIT;
            tar.member(&Member { path: path.as_bytes(), kind, metadata, size, xattrs }).unwrap();
            tar.content(bytes).unwrap();
        };
        add("secret", Kind::Regular, &[], &secret);
        add("file", Kind::Regular, &xattrs, &own);
        add("folder", Kind::Directory, &xattrs, b"");
        add("folder/file", Kind::Regular, &[], &own);
        fs::write(place.path("marks.tar"), tar.finish().unwrap()).unwrap();
        for form in ["objects", "packed", "tar"] {
            let case = format!("{prefix} {form}");
            let ran = place.run(&format!("import --quiet --form {form} tar:marks.tar a"));
            if prefix == "trusted.overlay." && form != "objects" {
                assert!(ran.code == Some(2) && ran.err.contains(prefix), "{case}: {}", ran.err);
                continue;
            }
            assert_eq!(ran.code, Some(0), "{case}: {}", ran.err);
            place.out("mount a mounted");
            let _guard = crate::mounting::mounts::Unmount(folder.clone());
            for path in ["file", "folder/file"] {
                assert!(fs::read(folder.join(path)).unwrap() == own, "{case}: {path}");
            }
            // Source: Linux Documentation/filesystems/overlayfs.rst, "Nesting overlayfs mounts".
            let escapes = Some(KernelVersion { major: 6, minor: 7 });
            if prefix == "trusted.overlay." && KernelVersion::running() < escapes {
                continue;
            }
            for path in ["file", "folder"] {
                for (name, value) in &names {
                    let mut found = [0; 16];
                    let length = rustix::fs::getxattr(folder.join(path), name, &mut found[..]);
                    assert_eq!(&found[..length.unwrap()], *value, "{case}: {path} {name}");
                }
            }
        }
    }
}
