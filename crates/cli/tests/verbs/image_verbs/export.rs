//! Exports of images that are read again by Quire and by other programs.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::container_life::runs::in_own_mounts;
use crate::mounting::mounts::Unmount;
use crate::{Place, Ran, is_root, program, write};

/// Returns a store with an image `a:1` of a compressed tar of a small tree, and the tree.
fn place() -> (Place, PathBuf) {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let tar = place.path("a.tar.gz");
    let mut command = Command::new("tar");
    command.args(["--format=posix", "--numeric-owner", "-czf"]).arg(&tar).arg("-C").arg(&tree);
    assert!(command.arg(".").status().unwrap().success());
    place.out("import tar:a.tar.gz a:1");
    (place, tree)
}

fn json(place: &Place, line: &str) -> Value {
    serde_json::from_str(&place.out(line)).unwrap()
}

fn image(place: &Place, name: &str) -> String {
    json(place, &format!("show --json {name}"))["image"].as_str().unwrap().to_owned()
}

/// Returns the names in the folder that begin with a dot, which are temporary files.
fn drafts(place: &Place) -> Vec<String> {
    let entries = std::fs::read_dir(place.folder.path()).unwrap();
    let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
    names.filter(|it| it.starts_with('.')).collect()
}

/// Runs another program if it is installed.
fn other(place: &Place, name: &str, line: &str) -> bool {
    if program(name).is_none() {
        testing::skipped(&format!("{name} is not installed"));
        return false;
    }
    let mut command = Command::new(name);
    let output = command.args(line.split(' ')).current_dir(place.folder.path()).output().unwrap();
    assert!(output.status.success(), "{name} {line}: {}", String::from_utf8_lossy(&output.stderr));
    true
}

#[test]
fn layers_that_were_compressed_again_are_told_once() {
    let (place, _) = place();
    let said = "quire: 1 of 1 layer was compressed again, because the store did not keep the \
        originals (`pull --keep-layers` does): the manifest is now sha256:";
    let ran = place.run("export a:1 oci:layout:1");
    assert!(ran.code == Some(0) && ran.err.contains(said), "{}", ran.err);
    let ran = place.run("export a:1 oci:layout:2");
    assert!(ran.code == Some(0) && !ran.err.contains("again"), "{}", ran.err);
}

#[test]
fn a_target_that_takes_nothing_is_blamed_and_not_the_store() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    write(&tree.join("large"), &vec![b'x'; 4 << 20], 0o644);
    place.out("import dir:tree a");
    place.out("export a tar:a.tar");
    place.out("import tar:a.tar a");
    let at = place.path("small");
    std::fs::create_dir(&at).unwrap();
    let mut mount = Command::new("mount");
    let mount = mount.args(["-t", "tmpfs", "-o", "size=1m", "small"]).arg(&at);
    assert!(mount.status().unwrap().success());
    let _guard = Unmount(at.clone());
    let top = at.canonicalize().unwrap();
    let check = |target: &str, why: &str, elsewhere: &str| {
        let ran = place.run(&format!("export --compression none a {target}"));
        let hint = format!("\n  the file system at {} {why}: use a {elsewhere}\n", top.display());
        assert!(ran.code == ran.failure() && ran.err.ends_with(&hint), "{target}: {}", ran.err);
        assert!(!ran.err.contains(".quire-export"), "{target}: {}", ran.err);
    };
    let file = "file elsewhere, or - for standard output";
    check("oci:small/oci", "was full", "directory elsewhere");
    check("tar:small/x.tar", "was full", file);
    // The path of the layout does not exist.
    let line = ["export", "--compression", "none", "a", "oci:oci"];
    let ran = Ran::from_output(&place.command(&line).current_dir(&at).output().unwrap());
    assert!(ran.err.ends_with("use a directory elsewhere\n"), "{}", ran.err);
    let mut mount = Command::new("mount");
    assert!(mount.args(["-o", "remount,ro"]).arg(&at).status().unwrap().success());
    check("oci:small/oci", "is read-only", "directory elsewhere");
    check("tar:small/x.tar", "is read-only", file);
    let ran = place.run("export a tar:small/x.tar");
    let said = "small/x.tar: Read-only file system (os error 30)\n";
    assert!(ran.err.contains(said), "{}", ran.err);
}

#[test]
fn what_goes_out_comes_in_again() {
    let (place, _) = place();
    let first = image(&place, "a:1");
    let told = json(&place, "export --json a:1 oci:layout:1");
    assert_eq!(told["image"], first);
    assert_eq!(told["layers"][0]["from"], "compressed");
    assert_eq!((&told["blobsAdded"], &told["unchanged"]), (&3.into(), &false.into()));
    place.out("export --compression none a:1 oci:layout:plain");
    place.out("export --compression zstd a:1 oci:layout:zstd");
    place.out("export a:1 docker-archive:a.tar:other:2");
    place.out("export a:1 tar:flat.tar");
    for (kind, rest) in [
        ("oci", "layout:1"),
        ("oci", "layout:plain"),
        ("oci", "layout:zstd"),
        ("docker-archive", "a.tar:other:2"),
        ("tar", "flat.tar"),
    ] {
        let other = Place::new();
        other.out(&format!("import {kind}:{} b", place.path(rest).display()));
        assert_eq!(image(&other, "b"), first, "{kind}:{rest}");
    }
    // A layer that was never compressed keeps the bytes that its manifest names.
    place.out("import oci:layout:plain p");
    let told = json(&place, "export --json p oci:again:p");
    assert_eq!((&told["layers"][0]["from"], &told["unchanged"]), (&"plain".into(), &true.into()));
    assert_eq!(drafts(&place), [""; 0]);
}

#[test]
fn others_take_it() {
    let (place, tree) = place();
    let first = image(&place, "a:1");
    place.out("export a:1 oci:layout:1");
    place.out("export --compression zstd a:1 oci:layout:z");
    place.out("export a:1 docker-archive:a.tar");
    if other(&place, "skopeo", "--insecure-policy copy oci:layout:1 dir:skopeo") {
        other(&place, "skopeo", "--insecure-policy copy oci:layout:z dir:skopeo-z");
        let copied = std::fs::read_dir(place.path("skopeo")).unwrap().count();
        assert_eq!(copied, 2 + 2, "manifest, version, config and layer");
        other(
            &place,
            "skopeo",
            "--insecure-policy copy docker-archive:a.tar:a:1 oci:from-docker:1",
        );
        place.out("import oci:from-docker:1 b");
        assert_eq!(image(&place, "b"), first);
        other(&place, "skopeo", "--insecure-policy copy oci:layout:1 docker-archive:b.tar:b:2");
        place.out("import docker-archive:b.tar c");
        assert_eq!(image(&place, "c"), first);
    }
    if other(&place, "umoci", "unpack --rootless --image layout:1 bundle") {
        let unpacked = place.path("bundle/rootfs");
        let (unpacked, tree) = (unpacked.to_str().unwrap(), tree.to_str().unwrap());
        other(&place, "diff", &format!("-r --no-dereference {tree} {unpacked}"));
        // umoci finds its own image beside ours, and ours stays.
        other(&place, "umoci", "tag --image layout:1 of-umoci");
        place.out("export a:1 oci:layout:2");
        let index: Value =
            serde_json::from_slice(&std::fs::read(place.path("layout/index.json")).unwrap())
                .unwrap();
        assert_eq!(index["manifests"].as_array().unwrap().len(), 4);
    }
}

#[test]
fn standard_output_is_a_file_like_others() {
    let (place, _) = place();
    for target in ["tar", "docker-archive", "erofs", "gvisor", "disk"] {
        place.out(&format!("export a:1 {target}:file"));
        let output = place.command(&["export", "a:1", &format!("{target}:-")]).output().unwrap();
        assert!(output.status.success());
        assert!(output.stdout == std::fs::read(place.path("file")).unwrap(), "{target}");
        std::fs::remove_file(place.path("file")).unwrap();
    }
    let mut export = place.command(&["export", "a:1", "tar:-"]);
    let mut export = export.stdout(Stdio::piped()).spawn().unwrap();
    let list = Command::new("tar").arg("-t").stdin(export.stdout.take().unwrap()).output().unwrap();
    assert!(export.wait().unwrap().success());
    let expected = "./\netc/\netc/deep/\netc/link\netc/long\netc/short\n";
    assert_eq!(String::from_utf8(list.stdout).unwrap(), expected);
}

#[test]
fn mistakes_change_nothing() {
    let (place, tree) = place();
    place.out(&format!("import dir:{} plain", tree.display()));
    write(&place.path("there"), b"mine", 0o600);
    std::fs::create_dir(place.path("folder")).unwrap();
    write(&place.path("folder/mine"), b"", 0o644);
    std::os::unix::net::UnixListener::bind(place.path("tree/socket")).unwrap();
    place.out(&format!("import dir:{} socket", tree.display()));
    let cases = [
        ("export a:1 file.tar", "is not an export target"),
        ("export a:1 tar:there", "--force overwrites it"),
        ("export a:1 docker-archive:there:x", "--force overwrites it"),
        ("export a:1 tar:/dev/null", "not a regular file"),
        ("export a:1 erofs:there", "--force overwrites it"),
        ("export a:1 erofs:", "names no file"),
        ("export --compression zstd a:1 gvisor:new", "cannot be compressed"),
        ("export --json a:1 erofs:-", "name a file"),
        ("export --force a:1 tar:/dev/null", "not a regular file"),
        ("export a:1 tar:/no/such/folder/a", "`mkdir -p '/no/such/folder'` makes it"),
        ("export a:1 oci:folder", "use an empty directory"),
        ("export --compression gzip a:1 tar:new", "cannot be compressed"),
        ("export --json a:1 tar:-", "name a file"),
        ("export plain oci:new", "came from a directory or a dump"),
        ("export socket tar:new", "--skip-unsupported"),
        ("export b:1 tar:new", "there is no image"),
    ];
    for (line, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, ran.failure(), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
        assert_eq!(ran.out, "", "{line}");
    }
    assert_eq!(std::fs::read(place.path("there")).unwrap(), b"mine");
    assert!(!place.path("new").exists());
    assert_eq!(drafts(&place), [""; 0]);
    let ran = place.run("export --skip-unsupported socket tar:new");
    assert_eq!(ran.code, Some(0));
    assert!(
        ran.err.contains("leaving out a file that a tar cannot contain: socket"),
        "{}",
        ran.err
    );

    // The target of a symlink is overwritten, not the symlink.
    std::os::unix::fs::symlink("there", place.path("link")).unwrap();
    place.out("export --force a:1 tar:link");
    assert!(place.path("link").is_symlink());
    assert!(std::fs::read(place.path("there")).unwrap().len() > 512);
}

#[test]
fn damage_is_told_and_leaves_no_file() {
    let (place, _) = place();
    let folders = std::fs::read_dir(place.path("store/objects")).unwrap();
    let files = folders.flat_map(|it| std::fs::read_dir(it.unwrap().path()).unwrap());
    let object = files.map(|it| it.unwrap().path()).next().unwrap();
    std::fs::remove_file(&object).unwrap();
    write(&object, &[b'y'; 100], 0o444);
    for target in
        ["oci:out:1", "docker-archive:out", "tar:out", "erofs:out", "gvisor:out", "disk:out"]
    {
        let ran = place.run(&format!("export a:1 {target}"));
        assert_eq!(ran.code, Some(2), "{target}: {}", ran.err);
        assert!(ran.err.contains("quire fsck"), "{target}: {}", ran.err);
        assert!(!place.path("out").exists(), "{target}");
    }
    assert_eq!(drafts(&place), [""; 0]);
}

#[test]
fn an_interrupted_export_leaves_no_file() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::fs::File::create(tree.join("large")).unwrap().set_len(400 << 20).unwrap();
    place.out(&format!("import dir:{} a", tree.display()));
    for target in ["tar:out", "erofs:out", "disk:out"] {
        interrupt(&place, target);
    }
}

/// Whether a process has an unnamed file open.
fn is_writing(pid: Pid) -> bool {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut files = open.filter_map(|it| std::fs::read_link(it.path()).ok());
    files.any(|it| it.to_string_lossy().ends_with(" (deleted)"))
}

/// Interrupts exports until one of them did not end before the interrupt.
fn interrupt(place: &Place, target: &str) {
    for attempt in 0..5 {
        let mut export = place.command(&["export", "--force", "a", target]);
        let mut export = export.stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        let pid = Pid::from_child(&export);
        while !is_writing(pid) && export.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(60), "it does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        if export.try_wait().unwrap().is_some() {
            continue;
        }
        rustix::process::kill_process(pid, Signal::INT).unwrap();
        let ended = export.wait_with_output().unwrap();
        assert_eq!(drafts(place), [""; 0]);
        if ended.status.code() == Some(2) {
            let text = String::from_utf8_lossy(&ended.stderr);
            assert!(text.contains("cancelled"), "{text}");
            assert!(attempt > 0 || !place.path("out").exists());
            return drop(std::fs::remove_file(place.path("out")));
        }
    }
    panic!("no signal came before the end");
}

/// A shell function that writes the output of `find` and `getfattr` for a folder to a file.
const SHOW: &str = r#"show() {
    (cd "$1" && find . -printf '%P %y %m %U %G %T@ %l\n' | sort && find . -type f -printf '%P %s %n\n' | sort \
        && getfattr -R -h -d -m - -e hex . && find . -type f -exec sha256sum {} + | sort) > "$2"
}"#;

/// The kernel can mount the exported file, which contains the imported files.
#[test]
fn an_image_that_needs_no_store() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::fs::hard_link(tree.join("etc/short"), tree.join("etc/again")).unwrap();
    write(&tree.join("copy"), &std::fs::read(tree.join("etc/long")).unwrap(), 0o600);
    write(&tree.join("large"), &[b'l'; 100_000], 0o4711);
    let name = if rustix::process::geteuid().is_root() { "trusted.x" } else { "user.x" };
    let flags = rustix::fs::XattrFlags::empty();
    let has_xattrs = rustix::fs::setxattr(tree.join("large"), name, b"1", flags).is_ok();
    place.out(&format!("import dir:{} a", tree.display()));
    let told = json(&place, "export --json a erofs:a.erofs");
    let bytes = std::fs::metadata(place.path("a.erofs")).unwrap().len();
    assert_eq!((&told["bytes"], &told["inodes"]), (&bytes.into(), &8.into()));
    assert_eq!(told["image"], image(&place, "a"));
    assert_eq!(told["withoutXattrs"], 0);
    let first = std::fs::read(place.path("a.erofs")).unwrap();
    place.out("export --force a erofs:a.erofs");
    assert!(first == std::fs::read(place.path("a.erofs")).unwrap(), "the same bytes again");
    let ran = place.run("export a gvisor:a.gvisor");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(ran.err.contains("1 file has xattrs"), has_xattrs, "{}", ran.err);
    other(&place, "fsck.erofs", "a.erofs");
    other(&place, "fsck.erofs", "a.gvisor");

    let can_mount = std::fs::read_to_string("/proc/filesystems").unwrap().contains("erofs");
    let tools = ["getfattr", "unshare", "mount"].iter().all(|it| program(it).is_some());
    if !crate::is_root() || !can_mount || !tools {
        testing::skipped("what the kernel shows of an exported image: it cannot be mounted here");
        return;
    }
    let script = format!(
        "{SHOW}\nset -e; mkdir m; show tree expected; mount -t erofs -o ro a.erofs m; show m shown; umount m
        mount -t erofs -o ro a.gvisor m; cmp m/large tree/large; getfattr -h -d -m - m/large > xattrs"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let output = command.current_dir(place.folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| std::fs::read_to_string(place.path(name)).unwrap();
    assert_eq!(read("shown"), read("expected"));
    assert_eq!(read("expected").contains("trusted.x"), has_xattrs);
    assert_eq!(read("xattrs"), "");
}

/// An open file without a name gets its name through /proc, so another way is needed where /proc is not mounted.
#[test]
fn files_are_written_without_proc() {
    if !is_root() {
        testing::skipped("only root can hide /proc");
        return;
    }
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree a");
    let hide = "mount -t tmpfs tmpfs /proc && exec \"$@\"";
    for (arguments, file) in [
        (&["export", "--quiet", "a", "tar:a.tar"][..], "a.tar"),
        (&["export", "--quiet", "--force", "a", "tar:a.tar"], "a.tar"),
        (&["export", "--quiet", "a", "erofs:a.erofs"], "a.erofs"),
        (&["export", "--quiet", "--force", "a", "erofs:a.erofs"], "a.erofs"),
    ] {
        let Some(ran) = in_own_mounts(&place, hide, arguments) else { return };
        assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.err);
        assert!(place.path(file).metadata().unwrap().len() > 0);
        assert_eq!(drafts(&place), [""; 0], "{arguments:?}");
    }
    place.out("export --quiet a tar:expected.tar");
    place.out("export --quiet a erofs:expected.erofs");
    for name in ["tar", "erofs"] {
        let [actual, expected] = ["a", "expected"].map(|it| place.path(&format!("{it}.{name}")));
        assert!(std::fs::read(actual).unwrap() == std::fs::read(expected).unwrap(), "{name}");
    }
}

/// A signal that no program can catch leaves nothing beside the target.
#[test]
fn nothing_is_left_of_an_export_that_is_killed() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    write(&tree.join("large"), &testing::noise(16 << 20), 0o644);
    place.out("import --quiet --form packed dir:tree a");
    let folder = place.folder.path().canonicalize().unwrap();
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    if rustix::fs::open(&folder, flags, rustix::fs::Mode::RUSR).is_err() {
        testing::skipped("the file system of the temporary directory has no unnamed files");
        return;
    }
    // Whether the process has a draft open: a file in the folder, with or without a name.
    let has_draft = |pid: Pid| {
        let open = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).ok()?;
        let paths = open.filter_map(|it| std::fs::read_link(it.ok()?.path()).ok());
        let is_draft = |it: &PathBuf| it.parent() == Some(&folder) && it.file_name().is_some();
        Some(paths.filter(is_draft).any(|it| it != folder.join("store")))
    };
    for (target, before) in [("new.tar", None), ("old.tar", Some(&b"old"[..]))] {
        let file = place.path(target);
        let mut was_killed = false;
        for _ in 0..100 {
            match before {
                Some(bytes) => std::fs::write(&file, bytes).unwrap(),
                None => drop(std::fs::remove_file(&file)),
            }
            let target = format!("tar:{target}");
            let mut command = place.command(&["export", "--quiet", "--force", "a", &target]);
            let mut export = command.stdin(Stdio::null()).spawn().unwrap();
            let pid = Pid::from_child(&export);
            while has_draft(pid) == Some(false) && export.try_wait().unwrap().is_none() {
                std::hint::spin_loop();
            }
            let _ended = rustix::process::kill_process(pid, Signal::KILL);
            let killed = export.wait().unwrap().code().is_none();
            was_killed = killed && std::fs::read(&file).ok().as_deref() == before;
            assert_eq!(drafts(&place), [""; 0], "{target}");
            if was_killed {
                break;
            }
        }
        assert!(was_killed, "every export has ended before it was killed");
        // If an export is not killed, it replaces a file only on request.
        place.out(&format!("export --quiet --force a tar:{target}"));
        let found = file.metadata().unwrap();
        assert!(found.len() > 16 << 20);
        let refused = place.run(&format!("export --quiet a tar:{target}"));
        assert_eq!(refused.code, Some(2), "{target}: {}", refused.err);
        assert_eq!(drafts(&place), [""; 0], "{target}");
    }
}
