//! `mount` and `umount` on this kernel. Needs root.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use kernel::version::KernelVersion;

use crate::{Place, is_before, is_root};

/// Unmounts a path on drop, so also when a test fails.
pub(crate) struct Unmount(pub(crate) std::path::PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ended = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn an_image_is_mounted_and_unmounted() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --form objects dir:{} a", tree.display()));
    let point = place.path("point");
    std::fs::create_dir(&point).unwrap();
    let guard = Unmount(point.clone());
    let ran = place.run("mount a point");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(std::fs::read_to_string(point.join("etc/long")).unwrap(), "x".repeat(100));
    assert_eq!(std::fs::read_to_string(point.join("etc/short")).unwrap(), "short\n");
    let refused = std::fs::write(point.join("new"), "").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(mountinfo.contains(" - overlay a "), "{mountinfo}");
    let inside = std::fs::File::open(point.join("etc/long")).unwrap();
    let ran = place.run("umount point");
    assert!(ran.code == Some(2) && ran.err.contains("--lazy"), "{}", ran.err);
    drop(inside);
    // Names and even files may be removed while the image is mounted, because `gc` keeps the data that a mount needs.
    place.out("rmi a");
    place.out("gc");
    assert_eq!(std::fs::read_to_string(point.join("etc/long")).unwrap(), "x".repeat(100));
    place.out("umount point");
    assert!(!point.join("etc").exists());
    place.out("gc");
    assert!(place.out("du --json").contains("\"objects\": 0"));
    drop(guard);
}

/// Returns whether this kernel mounts images of a form. Source: docs/format/erofs-profile.md.
pub(crate) fn is_mounted_here(form: &str) -> bool {
    const NATIVE: KernelVersion = KernelVersion { major: 6, minor: 4 };
    form == "objects" || KernelVersion::running() >= Some(NATIVE)
}

/// Programs see one image or the other, and never the directory under the mounts.
#[test]
fn a_mount_is_replaced_in_one_step() {
    if !is_root() {
        return;
    }
    if is_before(6, 5) {
        return testing::skipped("mounts beneath others: this kernel is older than Linux 6.5");
    }
    let place = Place::new();
    let point = place.path("point");
    std::fs::create_dir_all(&point).unwrap();
    let _guard = Unmount(point.clone());
    for name in ["one", "two"] {
        let tree = place.tree(name, name);
        place.out(&format!("import --quiet --form objects dir:{} {name}", tree.display()));
    }
    place.out("mount one point");
    let is_over = AtomicBool::new(false);
    let failed = std::thread::scope(|scope| {
        let look = || {
            let mut failed = 0;
            while !is_over.load(Ordering::Relaxed) {
                failed += u32::from(!point.join("etc/long").exists());
            }
            failed
        };
        let looking = scope.spawn(look);
        let ran = (0..30).map(|at| {
            let name = if at % 2 == 0 { "two" } else { "one" };
            place.run(&format!("mount --replace {name} point"))
        });
        let ran: Vec<_> = ran.collect();
        is_over.store(true, Ordering::Relaxed);
        // The reader may have kept a mount busy, so some commands may fail.
        assert!(ran.iter().any(|it| it.code == Some(0)), "{ran:?}");
        looking.join().unwrap()
    });
    place.out("umount point");
    assert_eq!(failed, 0);
    assert!(!point.join("etc").exists(), "one was mounted");
}

#[test]
fn mounts_of_one_image_at_once_are_one() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet --form objects dir:{} a", tree.display()));
    let point = place.path("point");
    std::fs::create_dir_all(&point).unwrap();
    for _ in 0..5 {
        let guard = Unmount(point.clone());
        let all = (0..6).map(|_| place.command(&["mount", "a", "point"]).spawn().unwrap());
        let all: Vec<_> = all.collect();
        for mut one in all {
            assert!(one.wait().unwrap().success());
        }
        place.out("umount point");
        assert!(!point.join("etc").exists(), "there was another mount");
        drop(guard);
    }
}

/// Without a check, the kernel would stack the mounts.
#[test]
fn a_directory_has_one_image_and_another_one_replaces_it() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let (one, two) = (place.tree("one", "1"), place.tree("two", "2"));
    let point = place.path("point");
    std::fs::create_dir_all(&point).unwrap();
    std::fs::create_dir(place.path("other")).unwrap();
    let _guards = [Unmount(point.clone()), Unmount(place.path("other"))];
    // Returns the types and sources of the mounts on a directory, from mountinfo.
    let mounted = |name: &str| {
        let point = format!(" {} ", place.path(name).display());
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let lines = table.lines().filter(|it| it.contains(&point));
        let shown = lines.map(|it| {
            let (_, rest) = it.split_once(" - ").unwrap();
            rest.rsplit_once(' ').unwrap().0.to_owned()
        });
        shown.collect::<Vec<_>>()
    };
    let read = || std::fs::read_to_string(point.join("etc/long")).unwrap()[..1].to_owned();
    let forms = [("objects", "overlay"), ("packed", "erofs")];
    for (form, kind) in forms.into_iter().filter(|it| is_mounted_here(it.0)) {
        for (name, tree) in [("one:1.0", &one), ("some.where/a/two", &two)] {
            place.out(&format!("import --quiet --form {form} dir:{} {name}", tree.display()));
        }
        place.out("tag one:1.0 again");
        place.out("mount one:1.0 point");
        assert_eq!(mounted("point"), [format!("{kind} one:1.0")]);
        for same in ["one:1.0", "again", "-o suid,nosuid one:1.0"] {
            let ran = place.run(&format!("mount {same} point"));
            assert_eq!(ran.code, Some(0), "{form} {same}: {}", ran.err);
            assert!(ran.err.contains("is already mounted on \"point\""), "{form}: {}", ran.err);
        }
        for (other, why) in [
            ("some.where/a/two", "another image, one:1.0, is mounted on \"point\": --replace"),
            ("--writable memory one:1.0", "is mounted on \"point\" with other options: --replace"),
            ("-o suid one:1.0", "is mounted on \"point\" with other options: --replace"),
        ] {
            let ran = place.run(&format!("mount {other} point"));
            assert_eq!(ran.code, Some(2), "{form} {other}");
            assert!(ran.err.contains(why), "{form} {other}: {}", ran.err);
        }
        assert_eq!((mounted("point").len(), read()), (1, "1".to_owned()));
        // A name may have moved to another image.
        place.out("tag some.where/a/two again");
        assert_eq!(place.run("mount again point").code, Some(2), "{form}");
        // A mount in use is not replaced.
        let inside = std::fs::File::open(point.join("etc/long")).unwrap();
        assert_eq!(place.run("mount --replace again point").code, Some(2), "{form}");
        assert_eq!((mounted("point").len(), read()), (1, "1".to_owned()));
        drop(inside);
        place.out("mount --replace some.where/a/two point");
        assert_eq!(mounted("point"), [format!("{kind} some.where/a/two")]);
        assert_eq!(read(), "2");
        // A bind mount shows the same file system, and unmounting it must not affect the other mount.
        let mut bind = Command::new("mount");
        bind.arg("--bind").arg(&point).arg(place.path("other"));
        assert!(bind.status().unwrap().success());
        place.out("umount other");
        assert!(place.run("mount some.where/a/two point").err.contains("already"), "{form}");
        place.out("umount point");
        assert_eq!(mounted("point").len() + mounted("other").len(), 0);
        // Mounts of other programs are covered, as by mount(8).
        let tmpfs = ["-t", "tmpfs", "one:1.0"];
        assert!(Command::new("mount").args(tmpfs).arg(&point).status().unwrap().success());
        place.out("mount one:1.0 point");
        assert_eq!(mounted("point"), ["tmpfs one:1.0".to_owned(), format!("{kind} one:1.0")]);
        place.out("umount point");
        let ran = place.run("umount point");
        assert!(ran.err.contains("not to Quire"), "{form}: {}", ran.err);
        assert!(Command::new("umount").arg(&point).status().unwrap().success());
    }
}

/// mount(8) mounts the image, as docs/format/mount-specification.md describes.
#[test]
fn another_program_mounts_an_image_by_its_specification() {
    if !is_root() || testing::program("mount").is_none() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::fs::write(tree.join("large"), testing::noise(100_000)).unwrap();
    for (form, overlays, devices) in [("objects", 1, 0), ("packed", 0, 1)] {
        place.out(&format!("import --form {form} dir:{} {form}", tree.display()));
        let text = place.out(&format!("mount --specification {form}"));
        let specification: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(specification["version"], 1);
        let (erofs, overlay) = (&specification["erofs"], &specification["overlay"]);
        assert_eq!(overlay.is_object(), overlays == 1, "{text}");
        assert_eq!(erofs["devices"].as_array().unwrap().len(), devices, "{text}");
        let [image, root] = ["image", "root"].map(|it| place.path(&format!("{form}-{it}")));
        [&image, &root].iter().for_each(|it| std::fs::create_dir(it).unwrap());
        let mount = |kind: &str, source: &str, options: &str, point: &std::path::Path| {
            let mut mount = Command::new("mount");
            let ran = mount.args(["-i", "-t", kind, "-o", options, source]).arg(point).output();
            let ran = ran.unwrap();
            assert!(ran.status.success(), "{options}: {}", String::from_utf8_lossy(&ran.stderr));
            Unmount(point.to_owned())
        };
        let all = |list: &serde_json::Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|it| it.as_str().unwrap().to_owned()).collect()
        };
        let mut options = all(&erofs["flags"]);
        // mount(8) makes a loop device for the image, so the kernel accepts only loop devices for the data.
        let loops: Vec<_> = erofs["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| {
                let path = it["path"].as_str().unwrap();
                let mut losetup = Command::new("losetup");
                let ran = losetup.args(["--find", "--show", "--read-only", path]).output().unwrap();
                Loop(String::from_utf8(ran.stdout).unwrap().trim().to_owned())
            })
            .collect();
        options.extend(loops.iter().map(|it| format!("device={}", it.0)));
        options.push("loop".to_owned());
        let source = erofs["source"].as_str().unwrap();
        let _image = mount("erofs", source, &options.join(","), &image);
        let (mut seen, mut upper) = (image.clone(), None);
        if overlay.is_object() {
            let mut options = all(&overlay["options"]);
            let layers = [vec![image.display().to_string()], all(&overlay["data"])].concat();
            options.extend(["ro".to_owned(), format!("lowerdir={}", layers.join("::"))]);
            upper = Some(mount("overlay", "overlay", &options.join(","), &root));
            seen = root;
        }
        assert_eq!(std::fs::read_to_string(seen.join("etc/short")).unwrap(), "short\n");
        assert!(std::fs::read(seen.join("large")).unwrap() == testing::noise(100_000), "{text}");
        drop(upper);
    }
    let ran = place.run("mount --specification objects point");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
}

/// A loop device that a test made, removed on drop.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _gone = Command::new("losetup").args(["--detach", &self.0]).output();
    }
}

#[test]
fn a_writable_mount_forgets() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    let point = place.path("point");
    std::fs::create_dir(&point).unwrap();
    let _guard = Unmount(point.clone());
    place.out("mount --writable memory a point");
    std::fs::write(point.join("etc/long"), "changed").unwrap();
    assert_eq!(std::fs::read_to_string(point.join("etc/long")).unwrap(), "changed");
    place.out("umount point");
    assert_eq!(place.out("cat a:/etc/long"), "x".repeat(100));
}

#[test]
fn df_of_a_mount_can_be_sane() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::fs::set_permissions(&tree, std::fs::Permissions::from_mode(0o1751)).unwrap();
    std::os::unix::fs::chown(&tree, Some(5), Some(6)).unwrap();
    place.out(&format!("import dir:{} a", tree.display()));
    let point = place.path("point");
    std::fs::create_dir(&point).unwrap();
    let _guard = Unmount(point.clone());
    let space = || {
        let found = rustix::fs::statvfs(&point).unwrap();
        (found.f_bavail, found.f_bfree, found.f_ffree, found.f_blocks)
    };
    let names = || {
        let entries = std::fs::read_dir(&point).unwrap();
        let mut names: Vec<_> = entries.map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let root = || {
        let found = std::fs::metadata(&point).unwrap();
        (found.mode(), found.uid(), found.gid(), found.mtime(), found.mtime_nsec())
    };
    place.out("mount a point");
    assert_eq!((space().0, space().1), (0, 0));
    let plain = (names(), root());
    assert_eq!((plain.1.0 & 0o7777, plain.1.1, plain.1.2), (0o1751, 5, 6));
    place.out("umount point");
    place.out("mount --df a point");
    let (available, free, files, blocks) = space();
    assert!(available > 0 && files > 0 && free == blocks, "{:?}", space());
    // Everything else is unchanged.
    assert_eq!((names(), root()), plain);
    assert_eq!(std::fs::read_to_string(point.join("etc/long")).unwrap(), "x".repeat(100));
    let refused = std::fs::write(point.join("new"), "").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    place.out("umount point");
    place.out("mount --df --userns 0:500000:10 a point");
    assert_eq!((root().1, root().2), (500_005, 500_006));
    assert!(space().0 > 0);
    place.out("umount point");
    let ran = place.run("mount --df --writable memory a point");
    assert!(ran.code == Some(2) && ran.err.contains("a writable layer"), "{}", ran.err);
}

#[test]
fn only_the_demanded_image_is_mounted() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let imported = place.out(&format!("import --json dir:{} a", tree.display()));
    let imported: serde_json::Value = serde_json::from_str(&imported).unwrap();
    let id = imported["image"].as_str().unwrap();
    let point = place.path("point");
    std::fs::create_dir(&point).unwrap();
    let _guard = Unmount(point);
    place.out(&format!("mount --digest {id} a point"));
    place.out("umount point");
    let other = "0".repeat(64);
    let ran = place.run(&format!("mount --digest {other} a point"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("as --digest requires"), "{}", ran.err);
    let ran = place.run("mount --verity require a point");
    // If fs-verity and overlayfs support it, the mount works; otherwise it is refused before any mount is made.
    if ran.code == Some(0) {
        place.out("umount point");
    } else {
        let reasons = ["has no fs-verity in this store", "Linux 6.6"];
        assert!(reasons.iter().any(|it| ran.err.contains(it)), "{}", ran.err);
    }
}

#[test]
fn umount_leaves_other_mounts_alone() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let ran = place.run("umount /proc");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("not to Quire"), "{}", ran.err);
    assert!(std::path::Path::new("/proc/self").exists());
}

#[test]
fn a_store_on_tmpfs_goes_through_a_loop_device() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    // The test uses a separate mount namespace, so that no cleanup is needed.
    let script = format!(
        "mkdir store point && mount -t tmpfs tmpfs store && '{quire}' --store store import dir:{tree} a >&2 && \
         '{quire}' --store store mount a point && cat point/etc/long && '{quire}' umount point",
        quire = env!("CARGO_BIN_EXE_quire"),
        tree = tree.display(),
    );
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-ec", &script])
        .current_dir(place.folder.path())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "x".repeat(100), "{error}");
}

#[test]
fn a_policy_is_asked_before_anything_is_mounted() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    std::fs::create_dir(place.path("point")).unwrap();
    std::fs::write(place.path("none.toml"), "default = \"none\"\n").unwrap();
    std::fs::write(place.path("bad.toml"), "defualt = \"any\"\n").unwrap();
    let commands = [
        ("mount a point", 2),
        ("run --runtime /bin/true a true", 125),
        ("merge a a b", 2),
        ("filter a b", 2),
        ("export a tar:t", 2),
        ("convert a", 2),
    ];
    for (command, code) in commands {
        let refused = place.run(&format!("--policy none.toml {command}"));
        assert_eq!(refused.code, Some(if code == 2 { 4 } else { code }), "{}", refused.err);
        let expect = "the default of none.toml refuses a:latest: no rule matches local";
        assert!(refused.err.contains(expect), "{}", refused.err);
        let refused = place.run(&format!("--policy bad.toml {command}"));
        assert_eq!(refused.code, Some(code), "{}", refused.err);
        assert!(refused.err.contains("line 1: \"defualt\" is not a field"), "{}", refused.err);
        let refused = place.run(&format!("--policy absent.toml {command}"));
        assert_eq!(refused.code, Some(code), "{}", refused.err);
        assert!(refused.err.contains("there is no policy absent.toml"), "{}", refused.err);
    }
    assert!(place.out("--policy none.toml doctor").contains("all others are refused"));
    assert!(place.out("--policy bad.toml doctor").contains("no image is accepted: "));
}

/// Returns paths, modes and contents of the files below a folder.
fn contents(folder: &std::path::Path) -> Vec<(std::path::PathBuf, u32, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let mode = std::fs::symlink_metadata(&path).unwrap().mode();
        if path.is_dir() {
            found.extend(contents(&path));
        }
        found.push((path.clone(), mode, std::fs::read(&path).unwrap_or_default()));
    }
    found.sort();
    found
}

#[test]
fn links_of_anothers_store_lead_root_nowhere() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    let store = place.path("store");
    // These files would be removed as garbage if a folder of the store was a link to this directory.
    let victim = place.path("victim");
    for name in ["00", "x", "work-1", "sub/00"] {
        std::fs::create_dir_all(victim.join(name)).unwrap();
        std::fs::write(victim.join(name).join("0".repeat(62)), "kept").unwrap();
        std::fs::write(victim.join(format!("{}{}", "0".repeat(60), name.len())), "kept").unwrap();
    }
    let before = contents(&victim);
    std::os::unix::fs::lchown(&store, Some(65_534), None).unwrap();
    std::fs::create_dir(place.path("point")).unwrap();
    let places = [
        "objects",
        "objects/00",
        "tmp",
        "tmp/work-1",
        "images",
        "layers",
        "manifests",
        "refs",
        "containers",
        "containers/x",
        "data",
        "blobs",
        "meta",
        "gc.lock",
    ];
    let lines = [
        "gc",
        "gc --unfinished",
        "fsck",
        "fsck --repair",
        "du",
        "ps -a",
        "images",
        "rm -f b",
        "rm --container -f x",
        "run a true",
        "mount a point",
        "verify a",
        "commit x y",
        "logs x",
        "stop x",
        "wait x",
        "import --quiet dir:tree b",
    ];
    for name in places {
        let (there, aside) = (store.join(name), place.path("aside"));
        let moved = std::fs::rename(&there, &aside).is_ok();
        std::os::unix::fs::symlink(&victim, &there).unwrap();
        std::os::unix::fs::lchown(&there, Some(65_534), None).unwrap();
        for line in lines {
            let ran = place.run(line);
            assert!(
                !ran.err.contains("panicked") && ran.code.is_some(),
                "{name}: {line}: {}",
                ran.err
            );
            assert!(!line.starts_with("run") || ran.code != Some(0), "{name}: {line}");
            if line.starts_with("mount") && ran.code == Some(0) {
                // The image and its data have fs-verity in this test, so their owner cannot change them.
                let long = std::fs::read(place.path("point/etc/long")).unwrap();
                assert_eq!(long, "x".repeat(100).as_bytes(), "{name}: {line}");
                place.out("umount point");
            }
            assert_eq!(contents(&victim), before, "{name}: {line}");
        }
        let is_link = std::fs::symlink_metadata(&there).is_ok_and(|it| it.is_symlink());
        if is_link {
            std::fs::remove_file(&there).unwrap();
        }
        if moved && is_link {
            std::fs::rename(aside, there).unwrap();
        }
    }
}
