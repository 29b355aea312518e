//! Rights on the host of files of a mounted image. Needs root.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat, setxattr};

use crate::mounting::mounts::Unmount;
use crate::{Place, is_root, open_to_all, program, write};

/// A file capability: effective, CAP_DAC_OVERRIDE permitted. Source: Linux `include/uapi/linux/capability.h`,
/// `struct vfs_cap_data`, revision 2.
const MAY_READ_ALL: [u8; 20] = [1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A tree with a set-uid `cat`, one with a capability, and `/dev/zero`, all usable by all users.
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

/// Runs a command as the user 65534, and returns its output if it succeeds.
fn nobody(command: &[&Path]) -> Option<Vec<u8>> {
    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).args(command);
    let output = setpriv.stdin(Stdio::null()).output().unwrap();
    output.status.success().then_some(output.stdout)
}

/// Returns which of set-uid files, file capabilities and devices take effect for the user 65534.
fn works(point: &Path, secret: &Path) -> [bool; 3] {
    let is_read = |program: &str| {
        let read = nobody(&[&point.join(program), secret]);
        assert!(read.as_ref().is_none_or(|it| it == b"secret"), "{read:?}");
        read.is_some()
    };
    // Programs without special rights can be executed, but cannot read the secret.
    assert!(nobody(&[&point.join("plain"), Path::new("/dev/null")]).is_some());
    assert!(!is_read("plain"));
    let head = program("head").unwrap();
    let zero = nobody(&[&head, Path::new("-c1"), &point.join("zero")]);
    [is_read("suid"), is_read("capable"), zero.is_some()]
}

/// Returns the flags of the mount at a path, as the kernel shows them.
fn flags(point: &Path) -> Vec<String> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = format!(" {} ", point.display());
    let line = mountinfo.lines().rfind(|line| line.contains(&at)).unwrap();
    // Field 6. Source: proc_pid_mountinfo(5).
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
    assert!(ran.err.contains("\" to 0700"), "{}", ran.err);
    assert_eq!(mode("old"), 0o700);
    place.out("umount old/rootfs");
    fs::create_dir(place.path("theirs")).unwrap();
    std::os::unix::fs::chown(place.path("theirs"), Some(65534), Some(65534)).unwrap();
    let ran = place.run("bundle a theirs -- /bin/true");
    assert!(ran.code == Some(2) && ran.err.contains("belongs to user 65534"), "{}", ran.err);
    assert_eq!(fs::read_dir(place.path("theirs")).unwrap().count(), 0);
}

/// Changes the owner of a directory and everything below it.
fn give(directory: &Path, user: u32) {
    let status =
        Command::new("chown").args(["-R", &format!("{user}:{user}")]).arg(directory).status();
    assert!(status.unwrap().success());
}

#[test]
fn root_mounts_nothing_that_another_user_can_change() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    for form in ["objects", "packed"] {
        place.out(&format!("import --form {form} dir:{} {form}", tree.display()));
    }
    fs::create_dir(place.path("point")).unwrap();
    let _guard = Unmount(place.path("point"));
    let refused = |path: &str, why: &str, forms: &[&str]| {
        for form in forms {
            for (line, code) in [
                (format!("mount {form} point"), 2),
                (format!("mount --writable memory {form} point"), 2),
                (format!("bundle {form} bundle -- /bin/true"), 2),
                (format!("run --runtime /bin/true {form} -- /bin/true"), 125),
            ] {
                let ran = place.run(&line);
                assert_eq!(ran.code, Some(code), "{line}: {}", ran.err);
                assert!(ran.err.contains("refusing to mount image"), "{line}: {}", ran.err);
                let path = place.path(path).display().to_string();
                assert!(ran.err.contains(&format!("{path} {why}")), "{line}: {}", ran.err);
            }
        }
        assert!(!place.path("bundle").exists());
        assert!(
            !fs::read_to_string("/proc/self/mountinfo")
                .unwrap()
                .contains(place.path("point").to_str().unwrap())
        );
        let told = place.out("fsck --json");
        assert!(told.contains(why), "{told}");
    };
    let all = ["objects", "packed"];
    let owned = "belongs to user 65534";
    give(&place.path("store"), 65534);
    refused("store", owned, &all);
    // The state files of such containers are also ignored, because these files determine how a runtime is called and
    // which processes are killed.
    let ran = place.run("exec any true");
    assert!(ran.err.contains("refusing the containers of the store"), "{}", ran.err);
    assert!(place.out("doctor").contains(owned));
    // Reading is harmless, and prints the owner.
    let ran = place.run("cat objects:/etc/short");
    assert!(ran.out == "short\n" && ran.err.contains(owned), "{ran:?}");
    give(&place.path("store"), 0);
    place.out("mount objects point");
    place.out("umount point");
    for (part, forms) in
        [("objects", &all[..]), ("objects/ab", &all[..1]), ("images", &all), ("data", &all)]
    {
        let path = format!("store/{part}");
        std::os::unix::fs::chown(place.path(&path), Some(65534), None).unwrap();
        refused(&path, owned, forms);
        std::os::unix::fs::chown(place.path(&path), Some(0), None).unwrap();
        let mode = fs::metadata(place.path(&path)).unwrap().permissions();
        fs::set_permissions(place.path(&path), fs::Permissions::from_mode(0o777)).unwrap();
        refused(&path, "has the mode 0777", forms);
        fs::set_permissions(place.path(&path), mode).unwrap();
    }
    for (part, form) in [("images", &all[..]), ("data", &all[1..])] {
        let files = fs::read_dir(place.path(&format!("store/{part}"))).unwrap();
        for file in files.map(|it| it.unwrap().path()) {
            std::os::unix::fs::chown(file, Some(65534), None).unwrap();
        }
        for form in form {
            let ran = place.run(&format!("mount {form} point"));
            assert!(ran.code == Some(2) && ran.err.contains(owned), "{}", ran.err);
        }
        give(&place.path("store"), 0);
    }
    place.out("mount packed point");
    place.out("umount point");
}

#[test]
fn a_store_is_its_owners_alone() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    open_to_all(&place);
    let tree = place.tree("tree", "x");
    let import = format!("import dir:{} a", tree.display());
    let mode = |name: &str| fs::metadata(place.path(name)).unwrap().mode() & 0o777;
    let store = place.path("store");
    // If a user makes the directory first, that user owns the directory with root's files.
    fs::create_dir(&store).unwrap();
    give(&store, 65534);
    let ran = place.run(&import);
    assert!(ran.code == Some(2) && ran.err.contains("belongs to user 65534"), "{}", ran.err);
    assert_eq!(fs::read_dir(&store).unwrap().count(), 0);
    give(&store, 0);
    fs::set_permissions(&store, fs::Permissions::from_mode(0o777)).unwrap();
    // Another user has made a part of the store in the meantime.
    fs::create_dir(store.join("objects")).unwrap();
    give(&store.join("objects"), 65534);
    let ran = place.run(&import);
    assert!(ran.code == Some(2) && ran.err.contains("belongs to user 65534"), "{}", ran.err);
    fs::remove_dir(store.join("objects")).unwrap();
    fs::write(store.join("mine"), "").unwrap();
    let ran = place.run(&import);
    assert!(ran.code == Some(2) && ran.err.contains("\"mine\""), "{}", ran.err);
    fs::remove_file(store.join("mine")).unwrap();
    fs::set_permissions(&store, fs::Permissions::from_mode(0o755)).unwrap();
    place.out(&import);
    assert_eq!(mode("store"), 0o700);
    assert_eq!(mode("store/gc.lock"), 0o600);
    // If the mode of a store was changed later, or if an older version made the store, Quire prints a remark, and
    // other users still cannot lock the store.
    fs::set_permissions(&store, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(store.join("gc.lock"), fs::Permissions::from_mode(0o444)).unwrap();
    fs::set_permissions(store.join("refs"), fs::Permissions::from_mode(0o755)).unwrap();
    let told = "has the mode 0755, so others can read the files of every image";
    let ran = place.run("tag a b");
    assert!(ran.code == Some(0) && ran.err.contains(told), "{}", ran.err);
    assert!(place.out("doctor").contains(told));
    assert!(place.out("fsck").contains(told));
    assert_eq!(place.run("--quiet images").err, "");
    if program("setpriv").is_none() || program("flock").is_none() {
        testing::skipped("setpriv and flock of util-linux are not here");
        return;
    }
    let flock = program("flock").unwrap();
    for name in ["gc.lock", "refs", "data"].into_iter().filter(|it| store.join(it).exists()) {
        let lock = nobody(&[&flock, Path::new("-n"), &store.join(name), Path::new("true")]);
        assert_eq!(lock, None, "{name}");
    }
    fs::set_permissions(&store, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(place.run("tag a c").err, "");
}

#[test]
fn a_mount_does_not_say_where_the_store_is() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --form objects dir:{} a", tree.display()));
    fs::create_dir(place.path("point")).unwrap();
    let _guard = Unmount(place.path("point"));
    fs::create_dir(place.path("kept")).unwrap();
    for options in ["", "--writable self ", "--writable memory ", "--writable dir=kept "] {
        place.out(&format!("mount {options}a point"));
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap();
        for path in ["store", "kept"].map(|it| place.path(it).display().to_string()) {
            assert!(!mountinfo.contains(&path), "{mountinfo}");
        }
        place.out("umount point");
    }
}
