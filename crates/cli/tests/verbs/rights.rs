//! What files of a mounted image may do on the host. Needs root.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat, setxattr};

use crate::mounts::Unmount;
use crate::{Place, is_root, open_to_all, program, write};

/// Source: Linux `include/uapi/linux/capability.h`, `struct vfs_cap_data`, revision 2: effective, CAP_DAC_OVERRIDE
/// permitted.
const MAY_READ_ALL: [u8; 20] = [1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A tree with a set-uid `cat`, one with a capability, and `/dev/zero`, all for everybody to use.
fn tree(place: &Place) -> std::path::PathBuf {
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)).unwrap();
    let cat = program("cat").unwrap();
    for (name, mode) in [("suid", 0o4755), ("capable", 0o755), ("plain", 0o755)] {
        fs::copy(&cat, tree.join(name)).unwrap();
        fs::set_permissions(tree.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    setxattr(tree.join("capable"), c"security.capability", &MAY_READ_ALL, XattrFlags::empty())
        .unwrap();
    let mode = Mode::from_raw_mode(0o666);
    let zero = tree.join("zero");
    mknodat(CWD, &zero, FileType::CharacterDevice, mode, makedev(1, 5)).unwrap();
    fs::set_permissions(&zero, fs::Permissions::from_mode(0o666)).unwrap();
    tree
}

/// Whether nobody (65534) ends with 0 who does this, and what he reads.
fn nobody(command: &[&Path]) -> Option<Vec<u8>> {
    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).args(command);
    let output = setpriv.stdin(Stdio::null()).output().unwrap();
    output.status.success().then_some(output.stdout)
}

/// Which of set-uid files, file capabilities and devices have effect for nobody.
fn works(point: &Path, secret: &Path) -> [bool; 3] {
    let is_read = |program: &str| {
        let read = nobody(&[&point.join(program), secret]);
        assert!(read.as_ref().is_none_or(|it| it == b"secret"), "{read:?}");
        read.is_some()
    };
    // Programs as such can be executed, and the secret is one.
    assert!(nobody(&[&point.join("plain"), Path::new("/dev/null")]).is_some());
    assert!(!is_read("plain"));
    let head = program("head").unwrap();
    let zero = nobody(&[&head, Path::new("-c1"), &point.join("zero")]);
    [is_read("suid"), is_read("capable"), zero.is_some()]
}

/// The flags of the mount at a path, as the kernel shows them.
fn flags(point: &Path) -> Vec<String> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = format!(" {} ", point.display());
    let line = mountinfo.lines().rfind(|line| line.contains(&at)).unwrap();
    // Source: proc_pid_mountinfo(5), field 6.
    let words = line.split(' ').nth(5).unwrap().split(',');
    words.filter(|it| it.starts_with("no") && !it.ends_with("atime")).map(str::to_owned).collect()
}

#[test]
fn what_is_mounted_gives_nobody_any_rights() {
    if !is_root() {
        return;
    }
    if program("setpriv").is_none() {
        testing::skipped("setpriv is not installed");
        return;
    }
    let place = Place::new();
    open_to_all(&place);
    let secret = place.path("secret");
    write(&secret, b"secret", 0o600);
    let tree = tree(&place);
    let point = place.path("point");
    fs::create_dir(&point).unwrap();
    let _guard = Unmount(point.clone());
    fs::create_dir(place.path("upper")).unwrap();
    let tar = place.path("tree.tar");
    let status = Command::new("tar")
        .args(["--xattrs", "--xattrs-include=*", "-cf"])
        .args([&tar, Path::new("-C"), &tree, Path::new(".")])
        .status();
    assert!(status.unwrap().success());
    for form in ["objects", "packed", "tar"] {
        place.out(&format!("import --form {form} tar:{} {form}", tar.display()));
        for more in ["", "--df ", "--writable memory ", "--writable self ", "--writable dir=upper "]
        {
            let mount = |options: &str| place.out(&format!("mount {more}{options}{form} point"));
            mount("");
            assert_eq!(works(&point, &secret), [false; 3], "{form} {more}");
            assert_eq!(flags(&point), ["nosuid", "nodev"], "{form} {more}");
            place.out("umount point");
            mount("-o suid,dev ");
            assert_eq!(works(&point, &secret), [true; 3], "{form} {more}");
            place.out("umount point");
        }
        place.out(&format!("mount --userns 0:500000:65536 {form} point"));
        assert_eq!(works(&point, &secret), [false; 3], "{form}");
        assert_eq!(flags(&point), ["nosuid", "nodev"], "{form}");
        place.out("umount point");
    }
}

#[test]
fn mount_options_are_words_of_mount() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    let point = place.path("point");
    fs::create_dir(&point).unwrap();
    let _guard = Unmount(point.clone());
    let cases: [(&str, &[&str]); 6] = [
        ("-o suid", &["nodev"]),
        ("-o dev", &["nosuid"]),
        ("-o noexec", &["nosuid", "nodev", "noexec"]),
        ("-o nosuid,nodev,exec,ro", &["nosuid", "nodev"]),
        ("-o suid,dev -o nosuid", &["nosuid"]),
        ("--options noexec,exec,dev,suid", &[]),
    ];
    for (options, expected) in cases {
        place.out(&format!("mount {options} a point"));
        assert_eq!(flags(&point), expected, "{options}");
        place.out("umount point");
    }
    let refused = place.run("mount -o nosiud a point");
    assert_eq!(refused.code, Some(2));
    for word in ["'nosiud'", "suid, nosuid, dev, nodev, exec, noexec, ro"] {
        assert!(refused.err.contains(word), "{}", refused.err);
    }
    let refused = place.run("mount --writable memory -o ro a point");
    assert!(refused.code == Some(2) && refused.err.contains("contradicts"), "{}", refused.err);
}

#[test]
fn a_bundle_is_its_owners_alone() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    open_to_all(&place);
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    let mode = |name: &str| fs::metadata(place.path(name)).unwrap().mode() & 0o777;
    let _guards = [Unmount(place.path("new/rootfs")), Unmount(place.path("old/rootfs"))];
    place.out("bundle a new -- /bin/true");
    assert_eq!(mode("new"), 0o700);
    assert_eq!(flags(&place.path("new/rootfs")), [""; 0]);
    place.out("umount new/rootfs");
    fs::create_dir(place.path("old")).unwrap();
    fs::set_permissions(place.path("old"), fs::Permissions::from_mode(0o755)).unwrap();
    let ran = place.run("bundle a old -- /bin/true");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("has the mode 0700 now"), "{}", ran.err);
    assert_eq!(mode("old"), 0o700);
    place.out("umount old/rootfs");
    fs::create_dir(place.path("theirs")).unwrap();
    std::os::unix::fs::chown(place.path("theirs"), Some(65534), Some(65534)).unwrap();
    let ran = place.run("bundle a theirs -- /bin/true");
    assert!(ran.code == Some(2) && ran.err.contains("belongs to user 65534"), "{}", ran.err);
    assert_eq!(fs::read_dir(place.path("theirs")).unwrap().count(), 0);
}
