//! `--writable`: each kind behaves like a plain ext4, has the right limit, and leaves no files. Needs root.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::mounting::mounts::Unmount;
use crate::{Place, Ran, add_programs, is_root, program};

/// Differences of overlayfs from ext4, on any file system. The documentation of overlayfs lists both.
const DEVIATIONS: [(&str, &str); 2] = [
    // When a file is copied up, its hard links are no longer known.
    ("links_of_the_image_stay_together: changed", "links_of_the_image_stay_together: linkedl"),
    // A descriptor shows the inode of the image, with the image's number of links.
    ("open_file_outlives_its_name: (400, 0)", "open_file_outlives_its_name: (400, 1)"),
];

fn semantics(what: &str, directory: &Path) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/verbs/container_disk/semantics.py");
    let mut python = Command::new(testing::find_program("python3").expect("the test asked for it"));
    let output = python.arg(script).arg(what).arg(directory).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Mounts an empty ext4 in a file of `place`.
pub(crate) fn plain_ext4(
    place: &Place,
    name: &str,
    size: u64,
    features: &[&str],
) -> (PathBuf, Unmount) {
    let (file, point) = (place.path(&format!("{name}.ext4")), place.path(name));
    fs::File::create(&file).unwrap().set_len(size).unwrap();
    fs::create_dir(&point).unwrap();
    let (file, at) = (file.to_str().unwrap(), point.to_str().unwrap());
    run("mkfs.ext4", &[&["-q", "-F", "-b", "4096"], features, &[file]].concat());
    run("mount", &["-o", "loop", file, at]);
    (point.clone(), Unmount(point))
}

/// Returns whether all programs are installed, including runtimes that `cargo xtask inputs` built. Notes a skipped
/// test if not.
pub(crate) fn has(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|name| program(name).is_none());
    if let Some(name) = missing {
        testing::skipped(&format!("{name} is not installed"));
    }
    missing.is_none()
}

/// Returns the files of all loop devices of the kernel whose path contains `text`.
pub(crate) fn loop_devices(text: &str) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").unwrap().filter_map(|it| {
        let file = it.unwrap().path().join("loop/backing_file");
        fs::read_to_string(file).ok()
    });
    devices.filter(|path| path.contains(text)).collect()
}

/// Waits for work in the background.
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether no container has left a folder, work, or a loop device.
pub(crate) fn is_clean(place: &Place) -> bool {
    let entries = |name: &str| {
        let entries = fs::read_dir(place.path("store").join(name)).unwrap();
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let only_templates = entries("containers").iter().all(|name| name.starts_with('.'));
    only_templates
        && entries("tmp").iter().all(|name| !name.starts_with("work-"))
        && loop_devices(place.path("store").to_str().unwrap()).is_empty()
}

#[test]
fn every_kind_behaves_as_ext4() {
    if !is_root() || !has(&["python3", "mkfs.ext4"]) {
        return;
    }
    let place = Place::new();
    let (ext4, _guard) = plain_ext4(&place, "plain", 256 << 20, &[]);
    fs::create_dir(ext4.join("tree")).unwrap();
    semantics("tree", &ext4.join("tree"));
    place.out(&format!("import --quiet dir:{} a", ext4.join("tree").display()));
    let mut expect = semantics("ask", &ext4.join("tree"));
    assert!(expect.lines().count() > 50, "{expect}");
    for (plain, overlay) in DEVIATIONS {
        assert!(expect.contains(plain), "{expect}");
        expect = expect.replace(plain, overlay);
    }
    let point = place.path("point");
    fs::create_dir(&point).unwrap();
    fs::create_dir(place.path("upper")).unwrap();
    let mut wrong = Vec::new();
    for kind in ["memory", "self", "self,durable", "dir=upper"] {
        let _guard = Unmount(point.clone());
        // With this option, the device in the table of tests can be opened.
        place.out(&format!("mount -o dev --writable {kind} a point"));
        let found = semantics("ask", &point);
        for (expect, found) in expect.lines().zip(found.lines()).filter(|(a, b)| a != b) {
            wrong.push(format!("{kind}: {found}, but with ext4 {expect}"));
        }
        assert_eq!(found.lines().count(), expect.lines().count());
        place.out("umount point");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // The image is unchanged.
    place.out("verify a");
    until("a loop device stays", || is_clean(&place));
}

/// A place with an image with a shell and some programs.
fn with_shell() -> Option<Place> {
    if !is_root() || !has(&["mkfs.ext4"]) {
        return None;
    }
    if program("crun").is_none() && program("runc").is_none() {
        testing::skipped("crun is not installed");
        return None;
    }
    let place = Place::new();
    let tree = place.path("tree");
    for name in ["etc", "tmp", "proc", "sys", "dev"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    let programs =
        ["/bin/sh", "/bin/cat", "/bin/dd", "/bin/rm", "/bin/df", "/bin/sync", "/bin/sleep"];
    add_programs(&tree, &programs);
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

#[test]
fn a_filestore_is_one_file_of_the_host_with_a_hard_limit() {
    let Some(place) = with_shell() else { return };
    let script = "dd if=/dev/zero of=/big bs=1M 2>/dev/null && exit 1\n\
                  cat /big /big > /more 2>/dev/null && exit 2\n\
                  df / > /dev/null || exit 3\n\
                  sync; echo full; read go; exit 28";
    let arguments =
        ["run", "--writable", "self,size=32m", "-u", "0", "a", "--", "sh", "-c", script];
    let mut command = place.command(&arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut input = child.stdin.take().unwrap();
    let containers = place.path("store/containers");
    let filestore = || {
        let folders = fs::read_dir(&containers).unwrap().map(|it| it.unwrap().path());
        let mut files = folders.map(|it| it.join("filestore")).filter(|it| it.exists());
        fs::metadata(files.next().unwrap()).unwrap()
    };
    assert_eq!(lines.next().unwrap().unwrap(), "full");
    // The file is nearly as large as the limit in blocks, as `du` counts them, and not larger.
    let full = filestore();
    assert_eq!(full.len(), 32 << 20);
    assert!((28 << 20..33 << 20).contains(&(full.blocks() * 512)), "{}", full.blocks());
    input.write_all(b"go\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(28));
    until("something stays", || is_clean(&place));
    place.out("fsck");
}

#[test]
fn what_is_killed_leaves_files_that_the_next_command_removes() {
    let Some(place) = with_shell() else { return };
    for round in 0..3 {
        let script = "echo up; dd if=/dev/zero of=/big bs=1M count=20 2>/dev/null; sleep 60";
        let arguments = ["run", "--writable", "self", "-u", "0", "a", "--", "sh", "-c", script];
        let mut command = place.command(&arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "up", "{round}");
        // The program in the container is killed first and then Quire, so that no process removes the container.
        let pid = || {
            let folders = fs::read_dir(place.path("store/containers")).unwrap();
            let mut files = folders.map(|it| it.unwrap().path().join("container.pid"));
            files.find_map(|it| fs::read_to_string(it).ok().filter(|text| !text.is_empty()))
        };
        until("the runtime notes no pid", || pid().is_some());
        let pid = pid().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
        // Mounts and the loop device disappear with the processes; the files remain until the next command.
        until("a loop device stays", || loop_devices(place.path("").to_str().unwrap()).is_empty());
        place.out("gc");
        assert!(is_clean(&place), "{round}");
    }
    place.out("fsck");
}

#[test]
fn a_directory_keeps_what_is_written() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import dir:{} a", tree.display()));
    for name in ["point", "kept"] {
        fs::create_dir(place.path(name)).unwrap();
    }
    let point = place.path("point");
    let _guard = Unmount(point.clone());
    place.out("mount --writable dir=kept a point");
    fs::write(point.join("etc/new"), "1").unwrap();
    place.out("umount point");
    for kind in ["dir=kept", "dir=kept,durable", "dir=kept"] {
        place.out(&format!("mount --writable {kind} a point"));
        assert_eq!(fs::read_to_string(point.join("etc/new")).unwrap(), "1", "{kind}");
        assert_eq!(fs::read_to_string(point.join("etc/short")).unwrap(), "short\n");
        place.out("umount point");
    }
    // Imitate a crash of the host.
    fs::write(place.path("kept/boot_id"), "of another start\n").unwrap();
    let ran = place.run("mount --writable dir=kept a point");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("the host has restarted since then"), "{}", ran.err);
    fs::remove_file(place.path("kept/boot_id")).unwrap();
    let ran = place.run("mount --writable dir=kept a point");
    assert!(ran.err.contains("\"boot_id\", is missing"), "{}", ran.err);
    fs::remove_dir_all(place.path("kept/work").join("work").join("incompat")).unwrap();
    place.out("mount --writable dir=kept a point");
    place.out("umount point");
    let refused = [
        ("dir=absent", "cannot open \"absent\""),
        ("dir=tree/etc/short", "is not a directory"),
        ("self,size=1m", "16 MiB to 16 TiB"),
        ("self,size=17t", "16 MiB to 16 TiB"),
        ("disk", "use dir[,size=SIZE]"),
        ("dir", "needs the directory of a container"),
    ];
    for (kind, expect) in refused {
        let ran = place.run(&format!("mount --writable {kind} a point"));
        assert_eq!(ran.code, Some(2), "{kind}");
        assert!(ran.err.contains(expect), "{kind}: {}", ran.err);
    }
    fs::create_dir(place.path("odd")).unwrap();
    fs::write(place.path("odd/upper"), "").unwrap();
    let ran = place.run("mount --writable dir=odd a point");
    assert!(ran.err.contains("\"upper\" in it is not a directory"), "{}", ran.err);
    symlink("/etc", place.path("odd/link")).unwrap();
    fs::remove_file(place.path("odd/upper")).unwrap();
    fs::rename(place.path("odd/link"), place.path("odd/upper")).unwrap();
    let ran = place.run("mount --writable dir=odd a point");
    assert!(ran.err.contains("\"upper\" in it is not a directory"), "{}", ran.err);
}

#[test]
fn a_full_disk_of_the_host_hurts_only_who_fills_it() {
    let Some(with_shell) = with_shell() else { return };
    let place = Place::new();
    // The store is on a file system that is smaller than the container's limit.
    let (small, _guard) = plain_ext4(&place, "small", 64 << 20, &["-m", "0"]);
    let store = small.join("store");
    symlink(&store, place.path("store")).unwrap();
    fs::create_dir(&store).unwrap();
    place.out(&format!("import --quiet dir:{} a", with_shell.path("tree").display()));
    // The container may write a gigabyte if the disk has it. Writing more than the disk has is an error.
    let script = "dd if=/dev/zero of=/direct bs=1M count=200 oflag=direct 2>/dev/null || echo told\n\
                  dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null || echo told, too";
    let arguments = ["run", "--writable", "self,size=1g", "-u", "0", "a", "--", "sh", "-c", script];
    let ran = Ran::from_output(&place.command(&arguments).output().unwrap());
    assert_eq!((ran.code, &*ran.out), (Some(0), "told\ntold, too\n"), "{}", ran.err);
    assert!(!ran.err.contains("lost"), "{}", ran.err);
    until("something stays", || is_clean(&place));
    place.out("fsck");
    place.out("verify a");
    // If there is no space for a filestore, no files of it are left either.
    let filler = fs::File::create(small.join("filler")).unwrap();
    let mut position = 0;
    while filler.write_all_at(&[1; 4096], position).is_ok() {
        position += 4096;
    }
    let ran = place.run("run --writable self,size=2g a -- sh");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("No space left on device"), "{}", ran.err);
    assert!(is_clean(&place));
    fs::remove_file(small.join("filler")).unwrap();
    place.out("fsck");
}

/// Makes a store on an ext4 with `features`, mounted with `options`. `None` if the kernel does not mount it.
fn store_on_ext4(place: &Place, features: &[&str], options: &str) -> Option<Unmount> {
    let (file, point) = (place.path("quota.ext4"), place.path("quota"));
    fs::File::create(&file).unwrap().set_len(256 << 20).unwrap();
    fs::create_dir(&point).unwrap();
    run("mkfs.ext4", &[&["-q", "-F"], features, &[file.to_str().unwrap()]].concat());
    let mut mount = Command::new("mount");
    let mounted = mount.args(["-o", options]).args([&file, &point]).output().unwrap();
    if !mounted.status.success() {
        return None;
    }
    fs::create_dir(point.join("store")).unwrap();
    symlink(point.join("store"), place.path("store")).unwrap();
    Some(Unmount(point))
}

/// Returns the first number of a line of `df -P`, which is the size in KiB, and the fourth column, the free space.
fn size_and_free(df: &str) -> (u64, u64) {
    let numbers: Vec<u64> = df.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    (numbers[0], numbers[2])
}

/// The kernel enforces the limit: ext4 shows it as the size of the file system (Linux `fs/ext4/super.c`,
/// `ext4_statfs_project`).
#[test]
fn a_directory_has_a_limit_on_a_disk_with_quotas() {
    let Some(with_shell) = with_shell() else { return };
    let place = Place::new();
    let features = ["-O", "quota,project", "-E", "quotatype=prjquota"];
    let Some(_guard) = store_on_ext4(&place, &features, "loop,prjquota") else {
        testing::skipped("this kernel has no quotas for projects on ext4 (CONFIG_QFMT_V2)");
        return;
    };
    place.out(&format!("import --quiet dir:{} a", with_shell.path("tree").display()));
    let script = "dd if=/dev/zero of=/big$1 bs=1M count=100 2>/dev/null && exit 1\n\
                  df -P / | { read head; read line; echo $line; }";
    let start = |name: &str, size: &str| {
        let kind = format!("dir,size={size}");
        let words =
            ["run", "--quiet", "-d", "--name", name, "--writable", &kind, "-u", "0", "a", "--"];
        let words = [&words[..], &["sh", "-c", script]].concat();
        let ran = Ran::from_output(&place.command(&words).output().unwrap());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
    };
    let ended = |name: &str| {
        assert_eq!(
            place.out(&format!("wait {name}")).trim(),
            "0",
            "{}",
            place.out(&format!("logs {name}"))
        );
        place.out(&format!("logs {name}"))
    };
    // Both run at the same time, each with its own limit.
    start("small", "16m");
    start("large", "32m");
    for (name, kib) in [("small", 16 << 10), ("large", 32 << 10)] {
        let log = ended(name);
        let (size, free) = size_and_free(log.lines().last().unwrap());
        assert!(size == kib && free < 1024, "{name}: {log}");
    }
    let usage = disk_usage(&place, "small");
    assert!((15 << 20..=16 << 20).contains(&usage), "{usage}");
    place.out("rm small large");
    until("something stays", || is_clean(&place));
    // Without a limit, the whole disk is available.
    let ran = place.run_each(&["run", "-u", "0", "a", "--", "df", "-P", "/"]);
    assert!(size_and_free(ran.out.lines().last().unwrap()).0 > 200 << 10, "{}", ran.out);
    place.out("fsck");
}

/// Returns the bytes on disk of a container's changes.
fn disk_usage(place: &Place, name: &str) -> u64 {
    let mut du = testing::command("du").expect("coreutils have it");
    let folder = place.path("store/containers").join(name);
    let output = du.args(["-s", "-B1"]).arg(folder.join("layer/upper")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().expect("du prints a number").parse().unwrap()
}

#[test]
fn a_disk_without_quotas_gives_no_limit_and_says_what_does() {
    let Some(with_shell) = with_shell() else { return };
    let place = Place::new();
    let _guard = store_on_ext4(&place, &[], "loop").expect("a plain ext4 is mounted");
    place.out(&format!("import --quiet dir:{} a", with_shell.path("tree").display()));
    let ran = place.run("run --writable dir,size=16m -u 0 a -- df");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    for expect in ["does not enforce project quotas", "prjquota", "self,size=SIZE"] {
        assert!(ran.err.contains(expect), "{}", ran.err);
    }
    assert!(is_clean(&place));
}

/// The kernel does not count inodes as bytes of a tmpfs, although each takes memory.
#[test]
fn memory_has_a_limit_of_files_too() {
    let Some(place) = with_shell() else { return };
    let script = "i=0; while [ $i -lt 3000 ]; do : > $1/$i || exit 1; i=$((i + 1)); done";
    let volume = "--mount=type=memory,dst=/tmp,size=1m";
    for (options, folder) in [(&["--writable", "memory,size=1m"][..], ""), (&[volume][..], "/tmp")]
    {
        let words =
            [&["run", "-u", "0"], options, &["a", "--", "sh", "-c", script, "sh", folder]].concat();
        let ran = place.run_each(&words);
        assert_ne!(ran.code, Some(0), "{options:?}: {}", ran.err);
        assert!(ran.err.contains("No space left on device"), "{}", ran.err);
    }
}
