//! Images that a user mounts by FUSE, on the host and in containers.

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;

use super::{
    LISTING, USER, User, compare, has_getfattr, listed_by_kernel, odd_tree, sorted, tree, walk,
};
use crate::container_rights::userns::set;
use kernel::mount::OVERLAY_USER_DATA;
use kernel::version::KernelVersion;
use rustix::fs::XattrFlags;

use crate::container_life::runs::runtimes;
use crate::write;

pub(super) fn user() -> Option<User> {
    let user = User::of_any_kernel(true)?;
    let point = user.home().join("point");
    fs::create_dir(&point).unwrap();
    chown(&point, Some(USER), Some(USER)).unwrap();
    Some(user)
}

/// Runs a script in a namespace in which `a` is mounted; `$S` is the server, and `$H` the process that holds its
/// connection.
fn mounted(user: &User, script: &str) -> String {
    let script = format!(
        "$Q mount a point || exit 9
         H=$(pgrep -f \"^$Q mount a point\" | head -n 1)
         for _ in 1 2 3 4 5 6 7 8 9; do S=$(pgrep -P $H) && break; sleep 0.1; done
         {script}
         $Q umount point || exit 8
         for _ in $(seq 50); do pgrep -f \"^$Q mount a point\" > left || exit 0; sleep 0.1; done
         echo left behind: $(cat left)"
    );
    let ran = user.script(&script);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    ran.out
}

/// Returns a file's bytes, whose length is not a multiple of a power of two, and large enough for several reads.
fn large() -> Vec<u8> {
    testing::noise(5_000_001)
}

/// A user with an image `a` that has [`large`].
fn user_with_large() -> Option<User> {
    let user = user()?;
    let tree = tree(&user);
    write(&tree.join("large"), &large(), 0o644);
    user.import(&tree);
    Some(user)
}

/// With and without notes of mounts.
#[test]
fn an_image_is_mounted_once_on_a_directory() {
    let Some(user) = user() else { return };
    user.import(&user.place.tree("other", "x"));
    user.out(&["tag", "a", "b"]);
    user.import(&tree(&user));
    for prepare in [":", "unset XDG_RUNTIME_DIR"] {
        let ran = user.script(&format!(
            "{prepare}; $Q mount a point; $Q mount a point 2>&1 | grep -o already
             $Q mount b point 2>&1 | grep -o -e --replace; cat point/theirs; grep -c \" $PWD/point \" /proc/self/mountinfo
             $Q mount --replace b point; cat point/etc/short; grep -c \" $PWD/point \" /proc/self/mountinfo
             $Q umount point"
        ));
        let expect = "already\n--replace\ntheirs1\nshort\n1\n";
        assert_eq!((ran.code, &*ran.out), (Some(0), expect), "{prepare}: {}", ran.err);
    }
}

/// The reference is the kernel's mount of the image. On the host, all owners are those of the image.
#[test]
fn what_fuse_shows_is_what_the_kernel_shows() {
    let Some(user) = user() else { return };
    if !has_getfattr() {
        return;
    }
    user.import(&odd_tree(&user));
    let kernel = listed_by_kernel(&user, "objects");
    compare(&kernel, &in_container(&user, can_set_apart()));
    let on_host = mounted(&user, &format!("cd point\n{LISTING}\ncd .."));
    compare(&kernel, &sorted(&on_host));
    // Also test root's own server, with an image that the kernel reads without an overlay.
    let mounts_packed = KernelVersion::running() >= Some(KernelVersion { major: 6, minor: 4 });
    let forms: &[&str] = if mounts_packed { &["objects", "packed"] } else { &["objects"] };
    for form in forms {
        let kernel = listed_by_kernel(&user, form);
        let point = user.place.path("point");
        user.place.out(&format!("mount --via fuse a {}", point.display()));
        let shown =
            std::process::Command::new("sh").args(["-c", LISTING]).current_dir(&point).output();
        user.place.out(&format!("umount {}", point.display()));
        compare(&kernel, &sorted(&String::from_utf8_lossy(&shown.unwrap().stdout)));
    }
}

/// Returns the listing of a container by FUSE; `is_apart` is whether files with xattrs are in memory.
#[track_caller]
fn in_container(user: &User, is_apart: bool) -> Vec<String> {
    let words = ["--verbose", "run", "--rm", "--via", "fuse", "a", "sh", "-c", LISTING];
    let ran = user.run(&words);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(ran.err.contains("copied files with xattrs into memory"), is_apart, "{}", ran.err);
    sorted(&ran.out)
}

/// Returns whether a tmpfs supports xattrs of users.
pub(super) fn can_set_apart() -> bool {
    KernelVersion::running() >= Some(KernelVersion { major: 6, minor: 6 })
}

/// The reference is the kernel's mount, whether the server is asked for xattrs or not.
#[test]
fn files_with_xattrs_are_set_apart_where_they_are_few() {
    let Some(user) = user() else { return };
    if !has_getfattr() {
        return;
    }
    let tree = odd_tree(&user);
    fs::hard_link(tree.join("sticky"), tree.join("etc/sticky too")).unwrap();
    user.import(&tree);
    for form in ["objects", "packed"] {
        user.out(&["convert", "--quiet", "--form", form, "a", "a"]);
        let kernel = listed_by_kernel(&user, "objects");
        compare(&kernel, &in_container(&user, can_set_apart()));
        // If a program writes to a file, the file keeps its xattrs. Its other hard link keeps the old bytes, as in
        // every image.
        let script =
            "echo more >> sticky; sha256sum 'etc/sticky too'; getfattr -d sticky; cat sticky";
        let run = ["run", "--rm", "--quiet", "--via", "fuse", "a", "sh", "-c", script];
        let out = user.out(&run);
        let old = image::digest::Digest::sha256(&testing::noise(70_000)).to_string();
        let old = old.trim_start_matches("sha256:");
        assert!(out.starts_with(old) && out.ends_with("more\n"), "{form}: {old}");
        assert!(out.contains("user.mine"), "{form}");
    }
    // A directory with xattrs is not moved to the tmpfs, because its contents would also have to be in memory.
    set(&tree.join("etc"), "user.mine", b"of a directory");
    user.import(&tree);
    compare(&listed_by_kernel(&user, "objects"), &in_container(&user, false));
    rustix::fs::removexattr(tree.join("etc"), "user.mine").unwrap();
    // A symlink is not moved either, because its target is in the served files.
    fs::remove_file(tree.join("etc/hosts")).unwrap();
    fs::create_dir(tree.join("other")).unwrap();
    std::os::unix::fs::symlink("../other/hosts", tree.join("etc/hosts")).unwrap();
    let link = tree.join("etc/hosts");
    let capability = [0x0200_0000_u32, 1, 0, 0, 0].map(u32::to_le_bytes).concat();
    rustix::fs::lsetxattr(&link, "security.capability", &capability, XattrFlags::empty()).unwrap();
    user.import(&tree);
    let run = ["run", "--rm", "--quiet", "--read-only", "--via", "fuse", "a", "cat", "/etc/hosts"];
    assert!(user.out(&run).contains("localhost"));
    fs::remove_file(&link).unwrap();
    write(&link, b"", 0o644);
    // A few files in deep directories are not moved, because each of these directories would have to be made.
    let deep: PathBuf = (0..450).map(|it| it.to_string()).collect();
    fs::create_dir_all(tree.join(&deep)).unwrap();
    for number in 0..10 {
        let file = tree.join(&deep).join(format!("x{number}"));
        write(&file, b"", 0o644);
        set(&file, "user.mine", b"");
    }
    user.import(&tree);
    in_container(&user, false);
    fs::remove_dir_all(tree.join("0")).unwrap();
    // Many files are not set apart.
    for number in 0..300 {
        let file = tree.join(format!("tmp/{number}"));
        write(&file, b"", 0o644);
        set(&file, "user.mine", b"");
    }
    user.import(&tree);
    compare(&listed_by_kernel(&user, "objects"), &in_container(&user, false));
}

/// Returns the object of a user's store with this length in bytes.
fn object_of(user: &User, bytes: u64) -> PathBuf {
    let folders = fs::read_dir(user.home().join(".local/share/quire/objects")).unwrap();
    let objects = folders.flat_map(|it| fs::read_dir(it.unwrap().path()).unwrap());
    let mut objects = objects.map(|it| it.unwrap());
    objects.find(|it| it.metadata().unwrap().len() == bytes).unwrap().path()
}

/// A file with xattrs is read before the container starts, and its wrong bytes are also an error.
#[test]
fn wrong_bytes_of_a_file_with_xattrs_are_an_error() {
    let Some(user) = user() else { return };
    let tree = tree(&user);
    set(&tree.join("large"), "user.mine", b"x");
    user.import(&tree);
    let object = object_of(&user, 300_000);
    let mut bytes = fs::read(&object).unwrap();
    bytes[200_000] ^= 1;
    fs::remove_file(&object).unwrap();
    write(&object, &bytes, 0o644);
    chown(&object, Some(USER), Some(USER)).unwrap();
    let run = ["run", "--rm", "--quiet", "--via", "fuse", "a"];
    let ran = user.run(&[&run[..], &["cat", "large"]].concat());
    assert!(ran.code == Some(1) && ran.err.contains("Input/output error"), "{}", ran.err);
    // Other files can be read.
    assert_eq!(user.out(&[&run[..], &["cat", "theirs"]].concat()), "theirs");
}

/// Root traces the process, and injects the kernel's error that there is no space.
#[test]
fn a_tree_without_room_is_an_error() {
    let Some(user) = User::new(true) else { return };
    if !testing::programs(&["strace"]) {
        return;
    }
    user.import(&tree(&user));
    let prepare = "
        (strace -f -qq -o /dev/null -e trace=fsetxattr -e inject=fsetxattr:error=ENOSPC:when=1 -p $$ &)
        for _ in $(seq 100); do grep -q '^TracerPid:.[1-9]' /proc/$$/status && break; sleep 0.1; done";
    let quire = user.place.path("quire");
    let quire = quire.to_str().unwrap();
    let ran =
        user.call_after(prepare, &[quire, "run", "--rm", "--via", "tree", "a", "cat", "large"]);
    assert!(ran.code == Some(125) && ran.err.contains("No space left"), "{}", ran.err);
}

#[test]
fn a_user_mounts_on_the_host() {
    let Some(user) = user_with_large() else { return };
    let out = mounted(
        &user,
        "grep ' /.*/point ' /proc/self/mounts | cut -d ' ' -f 1,3,4
         sha256sum < point/large; cat point/theirs; echo
         readlink /proc/$H/fd/* /proc/$S/fd/* | grep -v '/quire/objects$' | sort -u | tr '\\n' ' '; echo
         echo x 2> /dev/null > point/new || echo read-only",
    );
    let sum = image::digest::Digest::sha256(&large()).to_string();
    let lines: Vec<_> = out.lines().collect();
    let [mount, hash, theirs, open, refused] = lines[..] else { panic!("{out}") };
    // The server has none of this test's files open, and of the store only the image and its objects.
    let is_its_own = |it: &&str| {
        let ours = ["/dev/null", "/dev/fuse", "anon_inode:[pidfd]"];
        ours.contains(it)
            || it.starts_with("pipe:")
            || it.contains("/quire/images/")
            || it.contains("/quire/objects/")
    };
    let others: Vec<_> = open.split(' ').filter(|it| !it.is_empty() && !is_its_own(it)).collect();
    assert!(open.contains("/dev/fuse") && others.is_empty(), "{others:?}");
    assert!(mount.starts_with("a fuse.quire ro,nosuid,nodev,"), "{mount}");
    assert_eq!(format!("sha256:{}", hash.split(' ').next().unwrap()), sum);
    // The image belongs to the user, even if its files have other owners.
    assert_eq!((theirs, refused), ("theirs", "read-only"));
}

/// If a server is killed during a read, the reader gets all bytes from the next server.
#[test]
fn readers_outlive_servers() {
    let Some(user) = user_with_large() else { return };
    let out = mounted(
        &user,
        "for _ in 1 2 3 4 5; do
             (sha256sum < point/large; ls -R point | sha256sum) &
             kill -9 $S; wait
             for _ in $(seq 50); do N=$(pgrep -P $H) && [ $N != $S ] && break; sleep 0.1; done
             S=$N
         done",
    );
    let sums: Vec<_> = out.lines().collect();
    assert_eq!(sums.len(), 10, "{out}");
    let sum = image::digest::Digest::sha256(&large()).to_string();
    assert_eq!(format!("sha256:{}", sums[0].split(' ').next().unwrap()), sum);
    assert!(sums.chunks(2).all(|it| it == &sums[..2]), "{out}");
}

/// If the holder dies, its server continues. If both die, reads fail and never return wrong bytes; the mount can be
/// unmounted.
#[test]
fn a_mount_whose_processes_are_killed_can_be_ended() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let out = mounted(
        &user,
        "kill -9 $H; head -c 6 point/theirs; echo
         kill -9 $S; sleep 0.2; cat point/large 2>&1 | tail -c 40",
    );
    assert!(out.starts_with("theirs\n"), "{out}");
    assert!(out.contains("endpoint is not connected"), "{out}");
}

/// If a server always dies, its readers would wait forever. An exited process has no program, even before it is
/// reaped.
#[test]
fn a_server_that_dies_again_and_again_is_given_up() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let out = mounted(
        &user,
        "for it in $(seq 30); do
             kill -9 $S
             for _ in $(seq 200); do N=$(pgrep -P $H) && [ $N != $S ] && break; [ -e /proc/$H/exe ] || break; sleep 0.02; done
             [ -e /proc/$H/exe ] || break
             S=$N
         done 2> /dev/null
         echo $it; cat point/theirs 2>&1 | tail -c 40",
    );
    let (deaths, error) = out.split_once('\n').unwrap();
    // The limit is the ninth death within a minute.
    assert_eq!(deaths, "9", "{out}");
    assert!(error.contains("endpoint is not connected"), "{out}");
}

/// If an object changes at any time, the changed bytes are never returned.
#[test]
fn changed_objects_are_errors() {
    let Some(user) = user() else { return };
    let tree = user.place.path("tree");
    fs::create_dir(&tree).unwrap();
    write(&tree.join("large"), &large(), 0o644);
    user.import(&tree);
    let (folder, object) = walk(&user.home().join(".local/share/quire/objects"));
    let object = format!(".local/share/quire/objects/{folder}/{object}");
    let at = "printf x | dd bs=1 seek=2500000 conv=notrunc 2> /dev/null of=";
    // With fs-verity a file can only be replaced.
    let replace = format!("cp {object} new; chmod u+w new; {at}new; mv -f new {object}");
    let before = format!("{replace}; cat point/large 2>&1 > /dev/null; head -c 3 point/large 2>&1");
    let out = mounted(&user, &before);
    assert_eq!(out.matches("Input/output error").count(), 2, "{out}");
    fs::remove_file(user.home().join(&object)).unwrap();
    write(&user.home().join(&object), &large(), 0o644);
    chown(user.home().join(&object), Some(USER), Some(USER)).unwrap();
    // The object is changed while it is open. The new file has no fs-verity.
    let open = format!(
        "head -c 1 point/large > /dev/null; {at}{object}; cat point/large 2>&1 > /dev/null"
    );
    assert!(mounted(&user, &open).contains("Input/output error"));
    // Truncate the object, and remove it.
    let short = format!("truncate -s 7 {object}; cat point/large 2>&1 > /dev/null");
    assert!(mounted(&user, &short).contains("Input/output error"));
    let gone = format!("rm -f {object}; cat point/large 2>&1 > /dev/null");
    assert!(mounted(&user, &gone).contains("Input/output error"));
}

/// Returns the file of a user's only image.
fn walk_images(user: &User) -> PathBuf {
    let images = user.home().join(".local/share/quire/images");
    fs::read_dir(&images).unwrap().next().unwrap().unwrap().path()
}

/// The image file is compared with its id before it is used.
#[test]
fn a_changed_image_is_neither_mounted_nor_run() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let image = walk_images(&user);
    let mut bytes = fs::read(&image).unwrap();
    // With fs-verity the file can only be replaced.
    fs::remove_file(&image).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    write(&image, &bytes, 0o644);
    chown(&image, Some(USER), Some(USER)).unwrap();
    let ways: [&[&str]; 5] = [
        &["mount", "a", "point"],
        &["run", "--rm", "--via", "fuse", "a", "true"],
        &["run", "--rm", "--via", "tree", "a", "true"],
        &["run", "--rm", "--via", "fuse-objects", "a", "true"],
        &["run", "--rm", "a", "true"],
    ];
    let has_objects = KernelVersion::running() >= Some(OVERLAY_USER_DATA);
    let needs_objects = |it: &&[&str]| it.contains(&"tree") || it.contains(&"fuse-objects");
    for words in ways.into_iter().filter(|it| has_objects || !needs_objects(it)) {
        let ran = user.run(words);
        assert!(ran.code != Some(0) && ran.err.contains("is damaged"), "{words:?}: {}", ran.err);
    }
}

#[test]
fn containers_run_by_fuse() {
    let Some(user) = user_with_large() else { return };
    let sum = image::digest::Digest::sha256(&large()).to_string();
    for runtime in runtimes() {
        let run = |options: &[&str], script: &str| {
            let before = ["run", "--rm", "--quiet", "--via", "fuse", "--runtime", runtime];
            user.run(&[&before[..], options, &["a", "sh", "-c", script]].concat())
        };
        let ran = run(&["--user", "me"], "cat large; cat theirs; id -u");
        assert!(ran.out.ends_with("theirs33\n"), "{runtime}: {}", ran.err);
        let read = run(&[], "cat large");
        let bytes = read.out.into_bytes();
        // The output's invalid UTF-8 was replaced.
        assert_eq!(bytes, String::from_utf8_lossy(&large()).into_owned().into_bytes(), "{sum}");
        // Writes stay in the container, also those to a file of the image.
        let script = "echo new > large; cat large; ls etc; echo x > etc/hosts; cat etc/hosts";
        let written = run(&[], script);
        assert!(written.out.starts_with("new\n"), "{runtime}: {} {}", written.out, written.err);
        assert!(written.out.ends_with("x\n"), "{runtime}: {} {}", written.out, written.err);
        // Device nodes of an image cannot be opened.
        let device = run(&[], "cat < zero");
        assert!(device.err.contains("Permission denied"), "{runtime}: {}", device.err);
        let refused = run(&["--read-only"], "echo new > large");
        assert!(refused.err.contains("Read-only file system"), "{runtime}: {}", refused.err);
    }
    let left = user.script("sleep 0.5; pgrep -f \"^$Q run\" || echo none");
    assert_eq!(left.out, "none\n");
}

/// The data of such images is in a device, which the kernel mounts only for root.
#[test]
fn images_of_all_forms_run() {
    let Some(user) = user_with_large() else { return };
    user.out(&["convert", "--quiet", "--form", "packed", "a", "p"]);
    let out = user.out(&["run", "--rm", "--quiet", "p", "sh", "-c", "cat theirs; cat large"]);
    assert!(out == "theirs".to_owned() + &String::from_utf8_lossy(&large()), "{}", out.len());
    for way in ["tree", "fuse-objects"] {
        let ran = user.run(&["run", "--rm", "--quiet", "--via", way, "p", "true"]);
        assert!(ran.code == Some(125) && ran.err.contains("--via"), "{way}: {}", ran.err);
    }
}

/// In a user namespace, a mount works like root's: with writable layers, and for all users of the namespace.
#[test]
fn root_of_a_namespace_mounts() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let is_old = KernelVersion::running().is_none_or(|it| it < OVERLAY_USER_DATA);
    let ways: &[&str] = if is_old { &["fuse"] } else { &["tree", "fuse", "fuse-objects"] };
    // Before Linux 6.6, a tmpfs cannot store the mark of a removed directory.
    let removes = KernelVersion::running() >= Some(KernelVersion { major: 6, minor: 6 });
    let directory = if removes { "etc" } else { "theirs" };
    for way in ways {
        let ran = user.script(&format!(
            "unshare --user --map-root-user --mount sh -ec '
                 $Q mount --via {way} --writable memory a point
                 cat point/theirs; echo new > point/large; cat point/large
                 rm -r point/{directory}; ls point | head -n 1
                 $Q umount point
                 $Q bundle --via {way} a made -- true && cat made/rootfs/theirs && grep -c ociVersion made/config.json'
             sleep 0.3; pgrep -f \"^$Q mount\" || echo none"
        ));
        assert_eq!(ran.out, "theirsnew\nbin\ntheirs1\nnone\n", "{way}: {}", ran.err);
        assert_eq!(ran.err.contains("before Linux 6.6"), !removes, "{way}: {}", ran.err);
        fs::remove_dir_all(user.home().join("made")).unwrap();
    }
}

/// A file system is freed when no mount namespace has it any more (mount_namespaces(7)). So a server must not have its
/// own mount, or the mount of another server, in a copy of a namespace, because such servers would never end.
#[test]
fn nothing_outlives_its_mount() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let namespace = "unshare --user --map-auto --map-root-user --mount";
    let mount = "$Q mount --via fuse";
    let mut cases = vec![
        format!("{namespace} sh -ec \"{mount} a point; cat point/theirs; $Q umount point\""),
        format!("{namespace} sh -ec \"{mount} a point; cat point/theirs\""),
        // If a mount propagates to copies of the namespace, it does not propagate to the server's namespace.
        format!(
            "{namespace} --propagation shared sh -ec \"{mount} a point; cat point/theirs; \
             mount --make-rprivate /; $Q umount point\""
        ),
        // The servers of a mount end, while the servers of a later mount continue.
        format!(
            "{namespace} sh -ec \"mkdir -p other; {mount} a point; {mount} a other; \
             cat point/theirs; $Q umount point; \
             for _ in \\$(seq 50); do pgrep -f \\\"^$Q mount .* point\\\" > left || break; sleep 0.1; done; \
             [ ! -s left ]; head -c 0 other/theirs\""
        ),
        // One mount is below another.
        format!(
            "{namespace} sh -ec \"mkdir -p other; {mount} a other; {mount} a other/etc; \
             cat other/theirs; $Q umount other/etc other\""
        ),
        format!(
            "{namespace} sh -ec \"{mount} --writable memory a point; cat point/theirs; \
             $Q umount point\""
        ),
    ];
    if KernelVersion::running() >= Some(OVERLAY_USER_DATA) {
        for end in ["; $Q umount point", ""] {
            cases.push(format!(
                "{namespace} sh -ec \"{mount}-objects a point; cat point/theirs{end}\""
            ));
        }
    }
    // Repeat the cases often enough to catch a race.
    for case in cases.iter().cycle().take(3 * cases.len()) {
        let ran = user.script(&format!(
            "{case}
             for _ in $(seq 50); do pgrep -f \"^$Q mount\" > left || exit 0; sleep 0.1; done
             echo left behind: $(cat left); kill -9 $(cat left)"
        ));
        assert_eq!((ran.code, &*ran.out), (Some(0), "theirs"), "{case}: {}", ran.err);
    }
}

/// Tests this also for root, in a private mount namespace, like that of a systemd service.
#[test]
fn nothing_outlives_a_mount_of_roots() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let store = user.home().join("store");
    let imported = std::process::Command::new(user.place.path("quire"))
        .args(["--quiet", "--store"])
        .arg(&store)
        .args(["import", &format!("tar:{}", user.place.path("tree.tar").display()), "a"])
        .output();
    assert!(imported.unwrap().status.success());
    for (propagation, end) in
        [("private", "$Q umount $H/point"), ("private", "true"), ("shared", "true")]
    {
        let script = format!(
            "unshare --mount --propagation {propagation} sh -ec '
                 $Q --store $H/store mount --via fuse a $H/point; cat $H/point/theirs; {end}'
             for _ in $(seq 50); do pgrep -f \"^$Q .*mount\" > $H/left || exit 0; sleep 0.1; done
             echo left behind: $(cat $H/left); kill -9 $(cat $H/left)"
        );
        let mut shell = std::process::Command::new("sh");
        shell.args(["-uc", &script]).env("Q", user.place.path("quire")).env("H", user.home());
        let ran = crate::Ran::from_output(&shell.output().unwrap());
        assert_eq!((ran.code, &*ran.out), (Some(0), "theirs"), "{end}: {}", ran.err);
    }
}

/// overlayfs marks in a user's image have no effect.
#[test]
fn marks_of_an_image_are_no_marks_of_the_overlay() {
    let Some(user) = user() else { return };
    let tree = tree(&user);
    write(&tree.join("evil"), &[b'e'; 6000], 0o644);
    set(&tree.join("evil"), "user.overlay.redirect", b"/etc/passwd");
    fs::create_dir(tree.join("hidden")).unwrap();
    let words =
        ["run", "--rm", "--quiet", "--via", "fuse", "a", "sh", "-c", "cat evil; ls -d hidden"];
    // In the first round, the file is moved to the tmpfs. In the second round, a directory has marks, so all files are
    // served.
    for _ in 0..2 {
        user.import(&tree);
        assert_eq!(user.out(&words), "e".repeat(6000) + "hidden\n");
        set(&tree.join("hidden"), "user.overlay.opaque", b"y");
    }
}

/// Only an overlay removes the escape of its marks. Source: Linux `Documentation/filesystems/overlayfs.rst`,
/// "Nesting overlayfs mounts".
#[test]
fn marks_of_an_image_are_shown_as_they_are() {
    let Some(user) = user() else { return };
    if !has_getfattr() {
        return;
    }
    let tree = tree(&user);
    write(&tree.join("marked"), b"x", 0o644);
    set(&tree.join("marked"), "user.overlay.redirect", b"/etc/passwd");
    // With such a directory, all files are served, and no layer is stacked on them.
    fs::create_dir(tree.join("hidden")).unwrap();
    set(&tree.join("hidden"), "user.overlay.opaque", b"y");
    user.import(&tree);
    // Before Linux 6.7, an overlay hides marks with and without an escape. Source: Linux 6.7, "ovl: Support escaped
    // overlay.* xattrs".
    let has_escapes = KernelVersion::running() >= Some(KernelVersion { major: 6, minor: 7 });
    for options in ["", "--writable memory"] {
        let ran = user.script(&format!(
            "unshare --user --map-root-user --mount sh -ec '
                 $Q mount --quiet --via fuse {options} a point
                 getfattr -d -m - point/marked point/hidden | grep = | sort
                 $Q umount point'"
        ));
        let expect = "user.overlay.opaque=\"y\"\nuser.overlay.redirect=\"/etc/passwd\"\n";
        let expect = if has_escapes { expect } else { "" };
        assert_eq!(ran.out, expect, "{options}: {}", ran.err);
    }
}

/// The error names the missing feature, or another way is used if there is one.
#[test]
fn a_machine_without_fuse_says_so() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let quire = user.place.path("quire");
    let run = |prepare: &str, words: &[&str]| {
        user.call_after(prepare, &[&[quire.to_str().unwrap()], words].concat())
    };
    let no_device = "mount --bind /dev/null /dev/fuse";
    for way in ["fuse", "fuse-objects"] {
        let ran = run(no_device, &["run", "--via", way, "a", "true"]);
        assert!(ran.code == Some(125) && !ran.err.is_empty(), "{way}: {}", ran.err);
    }
    let ran = run(no_device, &["run", "--via", "fuse", "a", "true"]);
    assert!(ran.err.contains("/dev/fuse"), "{}", ran.err);
    let doctor = run(no_device, &["doctor"]);
    assert!(doctor.out.contains("mount does not work: /dev/fuse"), "{}", doctor.out);
    assert!(
        doctor.out.contains("\n✗ some features do not work: see without root"),
        "{}",
        doctor.out
    );
    assert_eq!(run(no_device, &["mount", "a", "point"]).code, Some(2));
    if KernelVersion::running().is_some_and(|it| it >= OVERLAY_USER_DATA) {
        assert_eq!(run(no_device, &["run", "--rm", "a", "sh", "-c", ":"]).code, Some(0));
    }
    let no_namespaces = "echo 0 > none; mount --bind none /proc/sys/user/max_user_namespaces";
    let doctor =
        run(&format!("cd {}; {no_namespaces}", user.place.path("").display()), &["doctor"]);
    assert!(doctor.out.contains("sysctl user.max_user_namespaces"), "{}", doctor.out);
    // In this case, no system setting is the reason for the error: the kernel does not allow a process in a chroot to
    // create namespaces. Source: user_namespaces(7), `EPERM`.
    let chrooted = format!(
        "cd \"$1\"; mkdir all; mount --rbind / all; exec chroot all setpriv --reuid=$2 --regid=$2 --clear-groups env HOME=\"$1/home\" {} \
         doctor",
        quire.display()
    );
    let doctor = user.call_after(&chrooted, &["true"]);
    assert!(
        doctor.out.contains("run does not work: cannot make a user namespace"),
        "{}",
        doctor.out
    );
    let no_program = "mount --bind /dev/null $(command -v fusermount3)";
    let ran = run(no_program, &["mount", "a", "point"]);
    assert!(ran.code == Some(2) && ran.err.contains("package fuse3"), "{}", ran.err);
    let doctor = run(no_program, &["doctor"]);
    assert!(doctor.out.contains("package fuse3"), "{}", doctor.out);
}

/// FUSE is preferred; without FUSE, a tree is used, whatever its size.
#[test]
fn a_large_image_without_fuse_gets_a_tree() {
    let Some(user) = User::new(true) else { return };
    let tree = tree(&user);
    fs::create_dir(tree.join("many")).unwrap();
    for number in 0..30_001 {
        fs::File::create(tree.join(format!("many/{number}"))).unwrap();
    }
    user.import(&tree);
    let quire = user.place.path("quire");
    let count = ["run", "a", "sh", "-c", "set -- /many/*; echo $#"];
    let words = [&[quire.to_str().unwrap()], &count[..]].concat();
    let ran = user.call(&words);
    assert!(ran.out.starts_with("30001\n"), "{} {}", ran.out, ran.err);
    let ran = user.call_after("mount --bind /dev/null /dev/fuse", &words);
    assert!(ran.out.starts_with("30001\n"), "{} {}", ran.out, ran.err);
}

#[test]
fn what_cannot_be_is_refused_with_the_way_out() {
    let Some(user) = user() else { return };
    user.import(&tree(&user));
    let image = walk_images(&user);
    let is_sealed = fs::File::options().write(true).open(image).is_err();
    let cases: [(&[&str], &str); 6] = [
        (&["mount", "--via", "tree", "a", "point"], "unshare --user"),
        (&["mount", "--via", "fuse-objects", "a", "point"], "--via fuse-objects works only in"),
        (&["mount", "--writable", "memory", "a", "point"], "unshare --user"),
        (&["mount", "--options", "suid", "a", "point"], "need root"),
        (&["mount", "--verity", "require", "a", "point"], "fs-verity"),
        (&["umount", "/proc"], "not to Quire"),
    ];
    // If the files have fs-verity, the kernel can verify reads, so that case does not fail.
    for (words, expect) in cases.into_iter().filter(|it| !(is_sealed && it.1 == "fs-verity")) {
        let ran = user.run(words);
        assert_eq!(ran.code, Some(2), "{words:?}: {}", ran.err);
        assert!(ran.err.contains(expect), "{words:?}: {}", ran.err);
    }
    let busy =
        user.script("$Q mount a point; cd point; $Q umount ../point; cd ..; $Q umount point");
    assert!(busy.err.contains("busy"), "{}", busy.err);
}
