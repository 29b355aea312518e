//! Merged images.

use std::os::unix::fs::{MetadataExt as _, symlink};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Place, is_root, program, write};

/// Makes images `a` and `b`, which have all kinds of conflicts.
fn place() -> Place {
    let place = Place::new();
    let (a, b) = (place.tree("a", "x"), place.path("b"));
    for directory in ["etc/only-b", "replaced", "by"] {
        std::fs::create_dir_all(b.join(directory)).unwrap();
    }
    write(&b.join("etc/short"), b"another\n", 0o755);
    write(&b.join("etc/new"), &[b'n'; 1000], 0o640);
    symlink("etc", b.join("deep")).unwrap();
    // One image has directories where the other has files, and the reverse.
    std::fs::create_dir_all(a.join("by/much/more")).unwrap();
    write(&a.join("replaced"), b"a file\n", 0o644);
    write(&b.join("by/file"), b"below\n", 0o644);
    std::fs::remove_dir_all(b.join("by")).unwrap();
    write(&b.join("by"), b"no directory\n", 0o600);
    // One image has a file with three names, one of which is hidden. The other image has a file with two names.
    for name in ["etc/link-1", "etc/deep/link-2", "link-3"] {
        std::fs::hard_link(a.join("etc/long"), a.join(name)).unwrap();
    }
    write(&b.join("link-3"), b"b's own\n", 0o644);
    std::fs::hard_link(b.join("link-3"), b.join("link-4")).unwrap();
    for (tree, mode) in [(&a, 0o755), (&b, 0o711)] {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(tree, permissions).unwrap();
    }
    for tree in ["a", "b"] {
        place.out(&format!("import --quiet dir:{tree} {tree}"));
    }
    place
}

fn json(place: &Place, line: &str) -> Value {
    serde_json::from_str(&place.out(line)).unwrap()
}

fn image(place: &Place, name: &str) -> String {
    json(place, &format!("show --json {name}"))["image"].as_str().unwrap().to_owned()
}

#[test]
fn a_later_image_lies_over_those_before() {
    let place = place();
    let told = json(&place, "merge --json a b ab");
    assert_eq!(told["images"], serde_json::json!([image(&place, "a"), image(&place, "b")]));
    assert_eq!(told["name"], "ab:latest");
    assert_eq!((&told["objectsAdded"], &told["bytesAdded"]), (&0.into(), &0.into()));
    assert_eq!(told["manifest"], Value::Null);
    let names = place.out("ls -R ab");
    let names: Vec<&str> = names.lines().collect();
    let expected = "by deep etc etc/deep etc/deep/link-2 etc/link etc/link-1 etc/long etc/new etc/only-b etc/short link-3 \
                    link-4 replaced";
    assert_eq!(names.join(" "), expected);
    assert_eq!(place.out("cat ab:/etc/short"), "another\n");
    assert_eq!(place.out("cat ab:/etc/long"), "x".repeat(100));
    assert_eq!(place.out("cat ab:/by"), "no directory\n");
    // The root is b's, and the numbers of links are recomputed.
    let dump = place.out("dump ab");
    let fields = |path: &str| {
        let line = dump.lines().find(|line| line.split(' ').next() == Some(path)).unwrap();
        line.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(fields("/")[2], "40711");
    assert_eq!((&*fields("/etc/deep/link-2")[3], &*fields("/link-3")[3]), ("3", "2"));
    assert_eq!(
        fields("/link-4")[4],
        std::fs::metadata(place.path("b/link-3")).unwrap().uid().to_string()
    );

    // Merge more images, the same image twice, and use an existing name.
    place.out("merge --quiet a b a aba");
    assert_eq!(place.out("cat aba:/etc/short"), "short\n");
    place.out("merge --quiet a a aa");
    assert_eq!(image(&place, "aa"), image(&place, "a"));
    place.out("merge --quiet a b ab");
    assert_eq!(told["image"], image(&place, "ab"));
    place.out("merge --quiet a b a");
    assert_eq!(told["image"], image(&place, "a"));
}

/// The kernel's overlay shows the same names, types, metadata and links.
#[test]
fn the_kernel_lays_directories_in_the_same_way() {
    let overlays = std::fs::read_to_string("/proc/filesystems").unwrap().contains("overlay");
    let tools = ["unshare", "mount"].iter().all(|it| program(it).is_some());
    if !is_root() || !overlays || !tools {
        testing::skipped(
            "comparing a merge with the kernel's overlayfs: it cannot be mounted here",
        );
        return;
    }
    let place = place();
    place.out("merge --quiet a b ab");
    std::fs::create_dir(place.path("m")).unwrap();
    let script = format!(
        "mount -t overlay -o ro,lowerdir=b:a overlay m && {} --store store import --quiet dir:m overlay",
        env!("CARGO_BIN_EXE_quire")
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let output = command.current_dir(place.folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ran = place.run("diff overlay ab");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
    assert_eq!(image(&place, "overlay"), image(&place, "ab"));
}

#[test]
fn it_needs_nothing_of_what_it_was_made_of() {
    let place = place();
    place.out("merge --quiet a b ab");
    place.out("rmi --quiet a b");
    place.out("gc");
    assert_eq!(place.out("cat ab:/etc/long"), "x".repeat(100));
    assert_eq!(place.out("cat ab:/etc/new"), "n".repeat(1000));
    place.out("verify ab");
    place.out("fsck");
    // Only files of the uppermost image were kept.
    place.out("rmi --quiet ab");
    place.out("gc");
    let objects = std::fs::read_dir(place.path("store/objects")).unwrap();
    let left = objects.flat_map(|it| std::fs::read_dir(it.unwrap().path()).unwrap()).count();
    assert_eq!(left, 0);
}

#[test]
fn it_is_given_back_as_files() {
    let place = place();
    place.out("merge --quiet a b ab");
    for target in ["tar:ab.tar", "erofs:ab.erofs", "gvisor:ab.gvisor", "disk:ab.disk"] {
        place.out(&format!("export --quiet ab {target}"));
    }
    place.out("import --quiet tar:ab.tar again");
    assert_eq!(image(&place, "again"), image(&place, "ab"));
    place.out("export --quiet again oci:layout:1");
    for target in ["oci:other", "docker-archive:other"] {
        let ran = place.run(&format!("export ab {target}"));
        assert_eq!(ran.code, Some(2));
        assert!(ran.err.contains("merged or filtered"), "{}", ran.err);
        assert!(ran.err.contains("quire export ab tar:FILE"), "{}", ran.err);
        assert!(!place.path("other").exists());
    }
    if cfg!(feature = "registry") {
        let ran = place.run("push ab localhost:1/ab");
        assert_eq!(ran.code, Some(2));
        assert!(ran.err.contains("merged or filtered"), "{}", ran.err);
    }
}

#[test]
fn a_configuration_that_is_lost_is_told() {
    let place = place();
    place.out("export --quiet a tar:a.tar");
    place.out("import --quiet tar:a.tar layered");
    let ran = place.run("merge layered b ab");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("quire run ab:latest -- COMMAND"), "{}", ran.err);
    let ran = place.run("merge a b ab");
    assert!(!ran.err.contains("COMMAND"), "{}", ran.err);
}

#[test]
fn mistakes_are_told_and_change_nothing() {
    let place = place();
    let before = place.out("images --json");
    let cases = [
        ("merge a b", "2 values required"),
        ("merge a", "required arguments were not provided"),
        ("merge a none new", "there is no image \"none\""),
        ("merge a b Not/A/Name!", "is not an image name"),
    ];
    for (line, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, ran.failure(), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
    }
    let objects = std::fs::read_dir(place.path("store/objects")).unwrap();
    let mut objects = objects.flat_map(|it| std::fs::read_dir(it.unwrap().path()).unwrap());
    std::fs::remove_file(objects.next().unwrap().unwrap().path()).unwrap();
    let ran = place.run("merge a b new");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("is missing or damaged in the store"), "{}", ran.err);
    assert!(ran.err.contains("import that image again"), "{}", ran.err);
    // A tree whose id differs from its name is never read.
    let damaged = place.path("store/images").join(image(&place, "b"));
    let mut bytes = std::fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::remove_file(&damaged).unwrap();
    write(&damaged, &bytes, 0o444);
    let ran = place.run("merge a b new");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("is damaged"), "{}", ran.err);
    assert!(ran.err.contains("quire fsck"), "{}", ran.err);
    assert_eq!(place.out("images --json"), before);
}

/// Merges two images of many names: either the merge is interrupted before the end, or the image is complete.
#[test]
fn an_interrupted_merge_leaves_the_store_as_it_was() {
    let place = Place::new();
    let names = (0..40_000).map(|at| format!("/f{at} 0 100644 1 0 0 0 0.0 - - -\n"));
    let dump = format!("/ 0 40755 2 0 0 0 0.0 - - -\n{}", names.collect::<String>());
    std::fs::write(place.path("dump"), dump).unwrap();
    place.out("import --quiet dump:dump a");
    for _ in 0..20 {
        let mut merge = place.command(&["merge", "a", "a", "a", "a", "new"]);
        let mut merge = merge.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let pid = rustix::process::Pid::from_child(&merge);
        if merge.try_wait().unwrap().is_none() {
            rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        }
        let ended = merge.wait_with_output().unwrap();
        if ended.status.code() == Some(2) {
            let text = String::from_utf8_lossy(&ended.stderr);
            assert!(text.contains("cancelled"), "{text}");
            assert_eq!(place.run("show new").code, Some(3));
            place.out("fsck");
            return;
        }
        place.out("rmi --quiet -f new");
    }
    panic!("no signal came before the end");
}
