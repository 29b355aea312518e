//! Verbs that import, inspect, name, check and free images.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{Place, is_root, write};

fn json(place: &Place, line: &str) -> Value {
    serde_json::from_str(&place.out(line)).unwrap()
}

/// Returns the paths of all objects of the store.
fn objects(place: &Place) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(place.path("store/objects")).unwrap();
    let files = folders.flat_map(|it| std::fs::read_dir(it.unwrap().path()).unwrap());
    files.map(|it| it.unwrap().path()).collect()
}

/// Changes a byte in place, like a failing disk.
fn flip_byte(path: &Path) {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    if let Ok(file) = File::open(path) {
        // An object may be sealed by the immutable flag.
        let _unsealed = kernel::seal::clear_immutable(file.as_fd());
    }
    std::fs::set_permissions(path, mode).unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    bytes[0] ^= 1;
    File::options().write(true).open(path).unwrap().write_all(&bytes).unwrap();
}

#[test]
fn what_goes_in_can_be_seen() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a:1", tree.display()));
    assert!(place.out("images").contains("a:1"));
    assert_eq!(place.out("cat a:1:/etc/long"), "x".repeat(100));
    assert_eq!(place.out("cat a:1:/etc/link"), "x".repeat(100));
    assert_eq!(place.out("ls a:1:/etc"), "deep\nlink\nlong\nshort\n");
    assert!(place.out("ls -l a:1:/etc/short").starts_with("-rw------- 1 "));
    assert_eq!(place.out("ls -R a:1"), "etc\netc/deep\netc/link\netc/long\netc/short\n");
    assert!(place.out("tree a:1").contains("    ├── link -> ../etc/long\n"));
    assert!(place.out("dump a:1").starts_with("/ "));
    let shown = json(&place, "show --json a:1");
    assert_eq!(shown["inodes"], 6);
    assert_eq!(shown["fileBytes"], 106);
    let listed = json(&place, "ls --json a:1:/etc");
    assert_eq!(listed[2]["path"], "long");
    assert_eq!(listed[2]["size"], 100);
}

#[test]
fn no_store_is_made_for_a_source_that_is_not_there() {
    let place = Place::new();
    let sources = ["oci:none", "docker-archive:none", "tar:none", "dir:none", "dump:none"];
    for source in sources {
        let ran = place.run(&format!("import {source} a"));
        assert_eq!(ran.code, Some(2), "{source}: {}", ran.err);
        assert!(ran.err.contains("none"), "{source}: {}", ran.err);
        assert!(!place.path("store").exists(), "{source}");
    }
}

#[test]
fn one_content_is_one_image_however_it_comes() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let id = |line: &str| json(&place, line)["image"].as_str().unwrap().to_owned();
    let first = id(&format!("import --json dir:{} a", tree.display()));
    assert_eq!(id(&format!("import --json dir:{} b", tree.display())), first);
    write(&place.path("dump"), place.out("dump a").as_bytes(), 0o644);
    assert_eq!(id("import --json dump:dump c"), first);
    place.out(&format!("build dir:{} image", tree.display()));
    let digest = place.out(&format!("build --json dir:{} image2", tree.display()));
    assert!(digest.contains(&first), "{digest}");
    assert_eq!(place.run("diff a ./image").code, Some(0));
    place.out(&format!("build --digest-store objects dir:{} image3", tree.display()));
    assert_eq!(
        std::fs::read(place.path("image")).unwrap(),
        std::fs::read(place.path("image3")).unwrap()
    );
    let stored = objects(&place);
    let object = stored[0].strip_prefix(place.path("store/objects")).unwrap();
    assert_eq!(std::fs::read(place.path("objects").join(object)).unwrap(), [b'x'; 100]);
    assert_eq!(hidden(&place), 0);
}

/// Returns the number of temporary files of a build next to its output, which have hidden names.
fn hidden(place: &Place) -> usize {
    let entries = std::fs::read_dir(place.folder.path()).unwrap();
    entries.filter(|it| it.as_ref().unwrap().file_name().as_bytes().starts_with(b".")).count()
}

#[test]
fn what_a_killed_build_leaves_goes_with_the_next() {
    let place = Place::new();
    place.tree("tree", "x");
    let mut waiting = place
        .command(&["build", "tar:-", "image"])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    // The build makes its folder first and then its store, and then waits.
    while hidden(&place) == 0 {
        assert!(start.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(10));
    }
    place.out("build dir:tree other");
    assert_eq!(hidden(&place), 1, "one that lives is left alone");
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    place.out("build dir:tree other");
    assert_eq!(hidden(&place), 0);
    assert!(!place.path("image").exists());
}

#[test]
fn differences_are_told() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    write(&tree.join("etc/short"), b"other\n", 0o640);
    std::fs::remove_file(tree.join("etc/link")).unwrap();
    std::fs::write(tree.join("new"), "").unwrap();
    place.out(&format!("import dir:{} b", tree.display()));
    let ran = place.run("diff a b");
    assert_eq!(ran.code, Some(1));
    for line in ["- /etc/link", "+ /new", "~ /etc/short", "    mode: 0600 -> 0640"] {
        assert!(ran.out.lines().any(|it| it == line), "{line}: {}", ran.out);
    }
    assert_eq!(place.run("diff a:/etc/long b:/etc/long/").code, Some(0));
    let ran = place.run("diff a:/new b:/new");
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), "+ /new\n"));
    let ran = place.run("diff --json a b");
    assert_eq!(ran.code, Some(1));
    assert!(serde_json::from_str::<Value>(&ran.out).unwrap().as_array().unwrap().len() >= 3);
    assert_eq!(place.run("diff a a").out, "");
}

#[test]
fn an_answer_holds_though_nobody_reads_on() {
    let place = Place::new();
    let (one, two) = (place.tree("one", "x"), place.tree("two", "y"));
    place.out(&format!("import dir:{} a", one.display()));
    place.out(&format!("import dir:{} b", two.display()));
    let check = |line: &str, code| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let arguments: Vec<&str> = line.split(' ').collect();
        let mut command = place.command(&arguments);
        let status = command.stdout(writer).stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(code), "{line}");
    };
    check("diff a b", 1);
    check("diff --json a b", 1);
    check("diff a a", 0);
    check("fsck", 0);
    flip_byte(&objects(&place)[0]);
    check("verify", 1);
    check("fsck --json", 1);
    check("ls a", 0);
    // Work after the printing is also done.
    check("fsck --repair", 1);
    assert_eq!(objects(&place).len(), 1);
}

#[test]
fn a_flipped_byte_is_found_and_mended_by_a_new_import() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    assert!(place.out("verify").starts_with("sound"));
    flip_byte(&objects(&place)[0]);
    for line in ["verify a", "fsck"] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(1), "{line}: {}", ran.err);
        assert!(ran.out.contains("affects a:latest: /etc/long"), "{line}: {}", ran.out);
    }
    let ran = place.run("cat a:/etc/long");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("damaged"), "{}", ran.err);
    assert_eq!(place.run("fsck --repair").code, Some(1));
    place.out(&format!("import dir:{} a", tree.display()));
    assert!(place.out("fsck").starts_with("sound"));
    assert!(place.out("fsck --deep").starts_with("sound"));
    assert_eq!(place.out("cat a:/etc/long"), "x".repeat(100));
}

#[test]
fn a_damaged_name_hides_nothing_else() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    place.out("tag a b");
    let file = place.path("store/refs/b:latest");
    let check = |line: &str, code| {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(code), "{line}: {}", ran.err);
        ran
    };
    for way_out in ["rmi b", "fsck --repair"] {
        std::fs::remove_file(&file).unwrap();
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for line in ["images", "images --json", "du", "du --json"] {
            let ran = check(line, 1);
            assert!(ran.out.contains("a:latest"), "{line}: {}", ran.out);
            let is_told =
                !line.starts_with("images") || ran.err.contains("`quire rmi b:latest` removes");
            assert!(ran.err.contains("b:latest") && is_told, "{line}: {}", ran.err);
        }
        // `show` lists the other names of the image, and `b` might be one, so it reports the damage.
        assert!(check("show a", 1).err.contains("b:latest"));
        check("ls a", 0);
        let ran = check("gc", 2);
        assert!(ran.err.contains("`quire rmi b:latest`"), "{}", ran.err);
        check(way_out, i32::from(way_out != "rmi b"));
        check("images", 0);
        check("gc", 0);
        check("tag a b", 0);
    }
}

#[test]
fn a_store_can_be_sealed_and_unsealed() {
    let place = Place::new();
    let (one, two) = (place.tree("one", "x"), place.tree("two", "y"));
    let sealed = || {
        let open = |path: &PathBuf| File::open(path).unwrap();
        let found = objects(&place);
        let seal = |path: &PathBuf| kernel::seal::sealed(open(path).as_fd()).unwrap();
        found.iter().filter(|path| seal(path) == kernel::seal::Sealed::Immutable).count()
    };
    place.out(&format!("import --seal immutable dir:{} one", one.display()));
    // The flag is set if this is permitted. Files that were sealed with the flag stay sealed.
    let first = sealed();
    place.out(&format!("import dir:{} two", two.display()));
    assert_eq!((objects(&place).len(), sealed()), (2, 2 * first));
    if first == 0 {
        testing::skipped("no right to set the immutable flag here, or no need");
    }
    place.out("rmi two");
    place.out("gc");
    assert_eq!((objects(&place).len(), sealed()), (1, first));
    place.out("unseal");
    assert_eq!(sealed(), 0);
    std::fs::remove_dir_all(place.path("store")).unwrap();
}

#[test]
fn names_come_and_go_and_bytes_follow() {
    let place = Place::new();
    let (one, two) = (place.tree("one", "x"), place.tree("two", "y"));
    place.out(&format!("import dir:{} one", one.display()));
    place.out(&format!("import dir:{} two", two.display()));
    place.out("tag one uno");
    // All names are removed, or none.
    assert_eq!(place.run("rmi one nothing").code, Some(3));
    place.out("rmi -f one one nothing");
    assert_eq!(place.run("show one").code, Some(3));
    assert_eq!(place.out("cat uno:/etc/long"), "x".repeat(100));
    place.out("gc");
    assert_eq!(place.out("cat uno:/etc/long"), "x".repeat(100));
    let used = json(&place, "du --json");
    assert_eq!(used["images"].as_array().unwrap().len(), 2);
    place.out("rmi uno");
    let plan = place.out("gc --dry-run");
    assert!(plan.contains("object ") && plan.contains("would be removed"), "{plan}");
    assert_eq!(objects(&place).len(), 2);
    place.out("gc");
    assert_eq!(objects(&place).len(), 1);
    assert_eq!(place.out("cat two:/etc/long"), "y".repeat(100));
    assert_eq!(place.run("rmi uno").code, Some(3));
    assert_eq!(place.run("rmi -f uno").code, Some(0));
}

#[test]
fn a_tar_that_was_cut_off_is_no_image() {
    let place = Place::new();
    for (name, bytes) in [("empty.tar", &b""[..]), ("cut.tar", &[b'x'; 700][..])] {
        write(&place.path(name), bytes, 0o644);
        let ran = place.run(&format!("import tar:{name} a"));
        assert_eq!(ran.code, ran.failure(), "{name}: {}", ran.out);
        assert_eq!(place.out("images").lines().count(), 1);
    }
}

#[test]
fn links_in_paths_are_followed_inside_the_image() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::os::unix::fs::symlink("/etc", tree.join("conf")).unwrap();
    std::os::unix::fs::symlink("loop", tree.join("loop")).unwrap();
    place.out(&format!("import dir:{} a", tree.display()));
    assert_eq!(place.out("cat a:/conf/link"), "x".repeat(100));
    assert_eq!(place.out("cat a:/etc/../conf/./long"), "x".repeat(100));
    assert_eq!(place.out("ls a:/conf/"), "deep\nlink\nlong\nshort\n");
    assert_eq!(place.out("ls a:/conf"), "/conf\n");
    assert_eq!(place.run("cat a:/loop/x").code, Some(2));
}

#[test]
fn xattrs_are_kept_as_far_as_is_said() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    for name in ["user.mine", "trusted.theirs"] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(tree.join("etc/short"), name, b"1", flags).unwrap();
    }
    let cases = [
        ("", vec!["trusted.theirs", "user.mine"]),
        ("--user-xattrs ", vec!["user.mine"]),
        ("--skip-xattrs ", vec![]),
    ];
    let tar = place.path("tree.tar");
    let mut command = std::process::Command::new("tar");
    command.args(["--xattrs", "--xattrs-include=*", "-cf"]).arg(&tar).arg("-C").arg(&tree);
    assert!(command.arg(".").status().unwrap().success());
    for source in [format!("dir:{}", tree.display()), format!("tar:{}", tar.display())] {
        for (option, expect) in &cases {
            place.out(&format!("import --quiet {option}{source} a"));
            let json = place.out("ls --json a:/etc/short");
            for name in ["user.mine", "trusted.theirs"] {
                assert_eq!(json.contains(name), expect.contains(&name), "{option}{source}: {json}");
            }
        }
    }
}

#[test]
fn a_path_that_nothing_can_name_is_refused() {
    let place = Place::new();
    place.tree("tree", "x");
    let deep = |length: usize| {
        let mut path = format!("{}/", "d".repeat(199)).repeat(length / 200);
        path.push_str(&"e".repeat(length % 200));
        path
    };
    // The length includes the leading slash and the name `/short` below.
    for (length, is_taken) in [(4095 - 7, true), (4096 - 7, false)] {
        let script = format!("s,^\\./etc,./{},", deep(length));
        let mut tar = std::process::Command::new("tar");
        tar.args(["--format=posix", "--transform", &script, "-cf", "deep.tar", "-C", "tree"]);
        let made = tar.args(["./etc/short"]).current_dir(place.folder.path()).status().unwrap();
        assert!(made.success());
        let ran = place.run("import --quiet tar:deep.tar a");
        assert_eq!(ran.code, Some(if is_taken { 0 } else { 2 }), "{}", ran.err);
        assert!(is_taken || ran.err.contains("has 4096 bytes, more than 4095"), "{}", ran.err);
        if is_taken {
            place.out("verify a");
        }
    }
}

/// As in podman, `rm` is for containers and `rmi` for images. Scripts often begin with `rm -f NAME`.
#[test]
fn rm_never_removes_an_image() {
    let place = Place::new();
    place.out(&format!("import --quiet dir:{} base", place.tree("tree", "x").display()));
    place.out("tag base app");
    let id = place.out("images -q");
    for line in
        ["rm -f app", "rm --force app:latest", &format!("rm -f {}", id.trim()), "rm -f none"]
    {
        for _ in 0..2 {
            assert_eq!(place.run(line).code, Some(0), "{line}");
        }
    }
    let ran = place.run("rm -f app");
    assert!(ran.err.contains("app:latest is an image, and stays"), "{}", ran.err);
    for line in ["rm app", "rm --container app", &format!("rm {}", id.trim())] {
        assert_eq!(place.run(line).code, Some(1), "{line}");
    }
    assert!(place.out("images").contains("app:latest"));
    assert_eq!(place.run("rmi app nothing").code, Some(3));
    place.out("rmi -f app nothing");
    assert!(!place.out("images").contains("app:latest"));
}

/// As in podman, listing images before the first one was imported is not an error.
#[test]
fn without_a_store_there_is_nothing() {
    let place = Place::new();
    for (line, expect) in [
        ("images", "NAME  IMAGE  CREATED  SIZE\n"),
        ("images --json", "[]\n"),
        ("images -q", ""),
        ("ps", "CONTAINER  IMAGE  STATUS  CREATED  COMMAND\n"),
        ("ps --all --json", "[]\n"),
        ("ps -aq", ""),
        ("gc", "0 removed, 0 B freed\n"),
        ("gc --dry-run", "0 would be removed, 0 B freed\n"),
        ("rm -f x", ""),
        ("rmi -f x", ""),
    ] {
        let ran = place.run(line);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(0), expect, ""), "{line}");
    }
    for line in ["du", "du --json", "gc --json", "verify", "verify --json"] {
        let ran = place.run(line);
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{line}");
    }
    assert_eq!(json(&place, "du --json")["total"], 0);
    for (line, code) in
        [("rm x", 1), ("rmi x", 3), ("verify x", 3), ("du x", 3), ("show x", 3), ("fsck", 3)]
    {
        let ran = place.run(line);
        assert!(
            ran.code == Some(code) && ran.err.contains("there is no store"),
            "{line}: {}",
            ran.err
        );
    }
    assert!(!place.path("store").exists());
}
