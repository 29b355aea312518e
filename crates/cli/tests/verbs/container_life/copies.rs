//! `cp`. Needs root.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use image::tar::Kind;
use image::tar::write::{Member, Writer};
use image::tree::Metadata;
use rustix::process::{Pid, Signal, kill_process};

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::place;
use crate::{Place, Ran, write};

/// Returns the path of a file of a running container, as root of the host sees it.
fn inside(place: &Place, name: &str, path: &str) -> PathBuf {
    let pid = ps(place, name).unwrap()["pid"].as_u64().unwrap();
    PathBuf::from(format!("/proc/{pid}/root{path}"))
}

/// Copies that the container has afterwards: the source, the destination, and the path of a file with the text of the
/// source. Source: podman, `test/system/065-cp.bats`.
const INTO: [(&str, &str, &str); 12] = [
    ("file", "/", "/file"),
    ("file", "/other", "/other"),
    ("file", "/tmp", "/tmp/file"),
    ("file", "/tmp/", "/tmp/file"),
    ("file", "/tmp/.", "/tmp/file"),
    ("file", ".", "/etc/file"),
    ("file", "relative", "/etc/relative"),
    ("file", "deep", "/etc/deep/file"),
    ("dir", "/", "/dir/sub/inner"),
    ("dir/", "/tmp", "/tmp/dir/sub/inner"),
    ("dir/.", "/etc", "/etc/sub/inner"),
    ("dir", "/new", "/new/sub/inner"),
];

#[test]
fn files_reach_a_container_and_come_back() {
    let Some(place) = place() else { return };
    fs::create_dir_all(place.path("dir/sub")).unwrap();
    write(&place.path("file"), b"text\n", 0o640);
    write(&place.path("dir/sub/inner"), b"text\n", 0o751);
    let mut kinds = vec!["dir"];
    if testing::programs(&["mkfs.ext4"]) {
        kinds.push("self");
    }
    for (kind, runs) in kinds.iter().flat_map(|kind| [(*kind, true), (*kind, false)]) {
        let name = format!("copies-{kind}-{runs}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--writable", kind, "--workdir", "/etc"], "sleep 1000");
        if !runs {
            place.out(&format!("stop --time 0 {name}"));
        }
        for (from, to, _) in INTO {
            let ran = place.run(&format!("cp {from} {name}:{to}"));
            assert_eq!((ran.code, &*ran.out), (Some(0), ""), "{kind} {from} {to}: {}", ran.err);
        }
        let back = place.path(&format!("back-{name}"));
        fs::create_dir(&back).unwrap();
        for (_, _, path) in INTO {
            let target = back.join(path.replace('/', "_"));
            place.out(&format!("cp {name}:{path} {}", target.display()));
            assert_eq!(fs::read_to_string(&target).unwrap(), "text\n", "{kind} {path}");
        }
        // The mode and the time are those of the source.
        let copy = fs::metadata(back.join("_dir_sub_inner")).unwrap();
        let source = fs::metadata(place.path("dir/sub/inner")).unwrap();
        assert_eq!((copy.mode(), copy.mtime()), (source.mode(), source.mtime()));
        // A tree and the contents of a directory.
        place.out(&format!("cp {name}:/new back-{name}"));
        place.out(&format!("cp {name}:/new/. back-{name}/contents"));
        for path in ["new/sub/inner", "contents/sub/inner"] {
            assert_eq!(fs::read_to_string(back.join(path)).unwrap(), "text\n");
        }
        if !runs {
            place.out(&format!("start {name}"));
        }
        for (_, _, path) in INTO {
            let ran = place.run(&format!("exec {name} -- cat {path}"));
            assert_eq!(ran.out, "text\n", "{kind} {runs} {path}: {}", ran.err);
        }
    }
}

#[test]
fn copies_that_cannot_be_made_say_why() {
    let Some(place) = place() else { return };
    write(&place.path("file"), b"text\n", 0o644);
    fs::create_dir(place.path("dir")).unwrap();
    fs::create_dir(place.path("data")).unwrap();
    let _guards = ["web", "memory", "data"].map(|it| Rm(&place, it));
    start(&place, &["--name", "web"], "sleep 1000");
    start(&place, &["--name", "memory", "--writable", "memory"], "sleep 1000");
    let data = ["--name", "data", "-v", "./data:/data", "--tmpfs", "/scratch"];
    start(&place, &data, "sleep 1000");
    // A volume of a running container is a part of it.
    place.out("cp file data:/data");
    assert!(place.path("data/file").is_file());
    for name in ["memory", "data"] {
        place.out(&format!("stop --time 0 {name}"));
    }
    for (line, code, said) in [
        ("cp none web:/tmp", 125, "\"none\" could not be found on the host"),
        ("cp web:/none .", 125, "\"/none\" could not be found on container web"),
        ("cp file web:/none/", 125, "\"/none/\" could not be found on container web"),
        ("cp file web:/none/new", 125, "\"/none/new\" could not be found on container web"),
        ("cp web:/etc/short none/new", 125, "\"none/new\" could not be found on the host"),
        ("cp dir web:/etc/short", 125, "must be a directory when copying a directory"),
        ("cp web:/etc file", 125, "must be a directory when copying a directory"),
        ("cp file absent:/tmp", 125, "there is no container \"absent\""),
        ("cp file web:/proc/new", 125, "file system of the kernel"),
        ("cp file web:/dev/null", 125, "is not a regular file"),
        ("cp web:/dev/null .", 125, "it is a device"),
        ("cp web:/proc/version .", 125, "file system of the kernel"),
        ("cp file memory:/tmp", 125, "are in memory, and end with its program"),
        ("cp file data:/scratch", 125, "is in the mount /scratch of container data"),
        ("cp data:/scratch/file .", 125, "`quire start data` first"),
        ("cp --archive=perhaps file web:/", 125, "invalid value 'perhaps'"),
        ("cp - -", 125, "one of the paths must be CONTAINER:PATH"),
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(code), "{line}: {} {}", ran.out, ran.err);
        assert!(ran.err.contains(said), "{line}: {}", ran.err);
    }
    // The image of a container with changes in memory can be read.
    place.out("cp memory:/etc/short .");
    assert_eq!(fs::read_to_string(place.path("short")).unwrap(), "short\n");
}

#[test]
fn owners_are_the_containers_user_or_the_caller() {
    let Some(place) = place() else { return };
    write(&place.path("file"), b"text\n", 0o644);
    std::os::unix::fs::chown(place.path("file"), Some(1234), Some(1235)).unwrap();
    let _guards = ["user", "mapped"].map(|it| Rm(&place, it));
    let run = ["run", "--quiet", "--detach", "--name", "user", "-u", "7:8", "a", "sleep", "1000"];
    let ran = place.run_each(&run);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    start(&place, &["--name", "mapped", "--userns", "auto"], "sleep 1000");
    let owner = |path: PathBuf| {
        let found = fs::metadata(path).unwrap();
        (found.uid(), found.gid())
    };
    for name in ["user", "mapped"] {
        place.out(&format!("cp file {name}:/of-user"));
        place.out(&format!("cp -a=false file {name}:/of-source"));
    }
    assert_eq!(owner(inside(&place, "user", "/of-user")), (7, 8));
    assert_eq!(owner(inside(&place, "user", "/of-source")), (1234, 1235));
    // On the host, the container's root is another user.
    let root = owner(inside(&place, "mapped", "/of-user"));
    assert!(root.0 > 1235 && root.1 > 1235, "{root:?}");
    assert_eq!(owner(inside(&place, "mapped", "/of-source")), (root.0 + 1234, root.1 + 1235));
    for (options, expect) in [("", (0, 0)), ("--archive=false ", (1234, 1235))] {
        place.out(&format!("cp {options}mapped:/of-source back"));
        assert_eq!(owner(place.path("back")), expect, "{options}");
    }
}

/// The links of the image lead to files of the host, if they were resolved on the host.
#[test]
fn a_hostile_container_reaches_no_file_of_the_host() {
    let Some(place) = place() else { return };
    let host = place.path("host");
    fs::create_dir(&host).unwrap();
    write(&host.join("secret"), b"secret\n", 0o600);
    let shown = host.display().to_string();
    let tree = place.path("tree");
    for (target, name) in [
        (shown.clone(), "to-host"),
        (format!("{shown}/secret"), "to-secret"),
        (format!("{}{shown}/secret", "../".repeat(40)), "up-to-secret"),
        (format!("/proc/1/root{shown}/secret"), "by-proc"),
        (format!("{shown}/made"), "to-made"),
    ] {
        symlink(target, tree.join(name)).unwrap();
    }
    write(&tree.join("etc/set-id"), b"#!/bin/sh\n", 0o6755);
    place.out(&format!("import --quiet dir:{} h", tree.display()));
    write(&place.path("file"), b"text\n", 0o644);
    for runs in [true, false] {
        let name = format!("hostile-{runs}");
        let _guard = Rm(&place, &name);
        let run = ["run", "--quiet", "--detach", "--name", &name, "h", "sleep", "1000"];
        let ran = place.run_each(&run);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        if !runs {
            place.out(&format!("stop --time 0 {name}"));
        }
        for link in ["to-secret", "up-to-secret", "by-proc", "to-host/secret"] {
            for line in [
                format!("cp {name}:/{link} got"),
                format!("cp {name}:/{link} -"),
                format!("cp file {name}:/{link}"),
            ] {
                let ran = place.run(&line);
                assert_eq!(ran.code, Some(125), "{line}: {}", ran.err);
                assert!(!ran.out.contains("secret\n"), "{line}");
            }
        }
        // The kernel resolves this link inside the root, where its directory does not exist.
        assert_eq!(place.run(&format!("cp file {name}:/to-made")).code, Some(125));
        let names: Vec<_> =
            fs::read_dir(&host).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(names, ["secret"]);
        assert_eq!(fs::read_to_string(host.join("secret")).unwrap(), "secret\n");
        // Links inside of trees are copied, and not followed.
        place.out(&format!("cp {name}:/. copy-{runs}"));
        let copy = place.path(&format!("copy-{runs}"));
        assert!(fs::symlink_metadata(copy.join("to-secret")).unwrap().is_symlink());
        let mode = fs::metadata(copy.join("etc/set-id")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755);
        assert!(!copy.join("proc/version").exists());
    }
    assert!(!place.path("got").exists());
}

#[test]
fn tars_come_from_and_go_to_standard_streams() {
    let Some(place) = place() else { return };
    if !testing::programs(&["tar"]) {
        return;
    }
    let _guard = Rm(&place, "tars");
    start(&place, &["--name", "tars"], "sleep 1000");
    let ran = place.command(&["cp", "tars:/etc", "-"]).output().unwrap();
    fs::write(place.path("etc.tar"), ran.stdout).unwrap();
    let list = Command::new("tar").arg("-tf").arg(place.path("etc.tar")).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    for path in ["etc/", "etc/short", "etc/deep/", "etc/link"] {
        assert!(list.lines().any(|it| it == path), "{path} {list}");
    }
    let read = |input: Stdio, to: &str| {
        Ran::from_output(&place.command(&["cp", "-", to]).stdin(input).output().unwrap())
    };
    let ran = read(File::open(place.path("etc.tar")).unwrap().into(), "tars:/tmp");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(place.out("exec tars -- cat /tmp/etc/short"), "short\n");
    let ran = read(File::open(place.path("etc.tar")).unwrap().into(), "tars:/etc/short");
    assert!(ran.code == Some(125) && ran.err.contains("must be a directory"), "{}", ran.err);
    let mut bad = File::create(place.path("bad.tar")).unwrap();
    bad.write_all(&[b'x'; 2048]).unwrap();
    let ran = read(File::open(place.path("bad.tar")).unwrap().into(), "tars:/tmp");
    assert!(ran.code == Some(125) && ran.err.contains("cannot read the tar"), "{}", ran.err);
}

/// A mounted file is overwritten, because the container would not see another one in its place.
#[test]
fn mounted_files_and_other_containers_are_sources_and_destinations() {
    let Some(place) = place() else { return };
    write(&place.path("hosts"), b"192.0.2.1 example\n", 0o644);
    let _guards = ["one", "two"].map(|it| Rm(&place, it));
    start(&place, &["--name", "one"], "sleep 1000");
    start(&place, &["--name", "two"], "sleep 1000");
    place.out("cp hosts one:/etc/hosts");
    assert_eq!(place.out("exec one -- cat /etc/hosts"), "192.0.2.1 example\n");
    place.out("cp one:/etc/hosts two:/tmp/copied");
    place.out("stop --time 0 two");
    place.out("cp one:/etc/hosts two:/tmp/again");
    place.out("cp two:/tmp/copied two:/tmp/third");
    place.out("start two");
    for file in ["copied", "again", "third"] {
        assert_eq!(place.out(&format!("exec two -- cat /tmp/{file}")), "192.0.2.1 example\n");
    }
}

/// Returns whether a file of this name is below a directory.
fn is_below(directory: &Path, name: &str) -> bool {
    let Ok(entries) = fs::read_dir(directory) else { return false };
    entries.flatten().any(|entry| {
        let is_directory = entry.file_type().is_ok_and(|it| it.is_dir());
        entry.file_name() == name || is_directory && is_below(&entry.path(), name)
    })
}

/// Waits until `is_so` returns true.
fn await_that(what: &str, is_so: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed().as_secs() < 60, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends a command by a signal, and returns its exit code and what it printed as errors.
fn interrupt(mut child: Child, signal: Signal) -> Ran {
    kill_process(Pid::from_child(&child), signal).unwrap();
    await_that("the interrupted copy has ended", {
        let pid = child.id();
        // The process is not reaped before `wait`.
        move || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|it| it.trim_start().starts_with('Z'))
        }
    });
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    Ran { code: child.wait().unwrap().code(), out: String::new(), err }
}

/// A copy whose other end gives no data, or takes none, ends when it is interrupted, and the container can be started
/// again.
#[test]
fn interrupted_copies_leave_a_container_that_starts() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web", "--writable", "dir"], "sleep 1000");
    write(&place.path("large"), &[b'x'; 1 << 20], 0o644);
    place.out("cp large web:/tmp");
    place.out("stop --time 0 web");
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let name = format!("first-{}", signal.as_raw());
        let mut tar = Writer::new(Vec::new());
        let (path, metadata) = (name.as_bytes(), Metadata::IMPLICIT);
        let member = Member { path, kind: Kind::Regular, metadata, size: 5, xattrs: &[] };
        tar.member(&member).unwrap();
        tar.content(b"first").unwrap();
        // The tar begins like this, and does not end.
        let tar = tar.finish().unwrap();
        let mut copying = place.command(&["cp", "-", "web:/tmp"]);
        copying.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut copying = copying.spawn().unwrap();
        let mut input = copying.stdin.take().unwrap();
        input.write_all(&tar[..1024]).unwrap();
        await_that("the first file is copied", || is_below(&place.path("store/containers"), &name));
        let ran = interrupt(copying, signal);
        assert_eq!(ran.code, Some(125), "{signal:?}: {}", ran.err);
        assert!(ran.err.contains("interrupted"), "{}", ran.err);
        drop(input);

        let mut copying = place.command(&["cp", "web:/tmp/large", "-"]);
        let (mut output, writer) = std::io::pipe().unwrap();
        copying.stdout(writer).stderr(Stdio::piped());
        let copying_child = copying.spawn().unwrap();
        drop(copying);
        // The copy has begun, and the rest does not fit into the pipe.
        output.read_exact(&mut [0; 512]).unwrap();
        let ran = interrupt(copying_child, signal);
        assert_eq!(ran.code, Some(125), "{signal:?}: {}", ran.err);

        place.out("start web");
        assert_eq!(place.out(&format!("exec web -- cat /tmp/{name}")), "first");
        place.out("stop --time 0 web");
    }
}

/// Each command locks both containers.
#[test]
fn copies_in_opposite_directions_do_not_wait_for_each_other() {
    let Some(place) = place() else { return };
    let _guards = ["one", "two"].map(|it| Rm(&place, it));
    for name in ["one", "two"] {
        start(&place, &["--name", name], "sleep 1000");
        place.out(&format!("stop --time 0 {name}"));
    }
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (from, to) in [("one", "two"), ("two", "one")] {
            let (place, finished) = (&place, &finished);
            scope.spawn(move || {
                for _ in 0..15 {
                    let line = format!("cp {from}:/etc/short {to}:/tmp/from-{from}");
                    let mut copying = place.command(&line.split(' ').collect::<Vec<_>>());
                    let mut copying = copying.spawn().unwrap();
                    let since = Instant::now();
                    let status = loop {
                        if let Some(status) = copying.try_wait().unwrap() {
                            break status;
                        }
                        if since.elapsed().as_secs() > 60 {
                            copying.kill().unwrap();
                            copying.wait().unwrap();
                            panic!("the copies wait for each other");
                        }
                        std::thread::sleep(Duration::from_millis(5));
                    };
                    assert!(status.success());
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(finished.load(Ordering::Relaxed), 30);
}

/// A mount of a container at rest is found although the paths differ.
#[test]
fn mounts_at_rest_are_found_by_other_paths() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("data")).unwrap();
    write(&place.path("file"), b"text\n", 0o644);
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web", "-v", "./data:/etc/deep"], "sleep 1000");
    fs::create_dir(place.path("links")).unwrap();
    symlink("/etc", place.path("links/link")).unwrap();
    place.out("cp links/. web:/tmp");
    place.out("stop --time 0 web");
    for path in ["//tmp/../etc/deep", "/tmp/link/deep/x", "/tmp/link/deep"] {
        let ran = place.run(&format!("cp file web:{path}"));
        assert_eq!(ran.code, Some(125), "{path}: {}", ran.out);
        assert!(ran.err.contains("is in the mount /etc/deep"), "{path}: {}", ran.err);
    }
    // Here, `..` leads from /etc to the root.
    place.out("cp file web:/tmp/link/../new");
    place.out("start web");
    assert_eq!(place.out("exec web -- cat /new"), "text\n");
}

/// Source: podman, `test/system/065-cp.bats`: the deepest mount has the file.
#[test]
fn mounts_of_a_container_at_rest_are_read_and_written() {
    let Some(place) = place() else { return };
    write(&place.path("file"), b"text\n", 0o644);
    fs::create_dir(place.path("host")).unwrap();
    fs::create_dir_all(place.path("dir/sub")).unwrap();
    write(&place.path("dir/sub/file"), b"deep\n", 0o644);
    write(&place.path("single"), b"old\n", 0o644);
    write(&place.path("dir/target"), b"old\n", 0o644);
    symlink(place.path("dir/target"), place.path("link")).unwrap();
    let _guard = Rm(&place, "web");
    let options = "-v one:/v -v two:/v/sub -v ./host:/v/sub/host -v ./single:/single -v ./dir:/fixed:ro -v ./link:/linked";
    place.out(&format!(
        "create --name web {options} a cat /v/file /v/sub/file /v/sub/host/file /single"
    ));
    let of = |volume: &str| place.path("store/volumes").join(volume).join("data");
    for path in ["/v", "/v/sub/", "/v/sub/host/file", "/single", "/linked"] {
        place.out(&format!("cp file web:{path}"));
    }
    for path in [of("one").join("file"), of("two").join("file"), place.path("host/file")] {
        assert_eq!(fs::read_to_string(&path).unwrap(), "text\n", "{}", path.display());
    }
    for path in ["single", "dir/target"] {
        assert_eq!(fs::read_to_string(place.path(path)).unwrap(), "text\n", "{path}");
    }
    assert!(place.path("link").is_symlink());
    let names = |path: &Path| {
        let mut all: Vec<_> =
            fs::read_dir(path).unwrap().map(|it| it.unwrap().file_name()).collect();
        all.sort();
        all
    };
    assert_eq!(names(&of("one")), ["file"]);
    place.out("cp web:/v/sub/host copied");
    assert_eq!(fs::read_to_string(place.path("copied/file")).unwrap(), "text\n");
    fs::create_dir(place.path("into")).unwrap();
    place.out("cp web:/fixed into");
    assert_eq!(fs::read_to_string(place.path("into/fixed/sub/file")).unwrap(), "deep\n");
    place.out("cp web:/fixed/. into");
    assert!(place.path("into/sub/file").is_file());
    for (line, said) in [
        ("cp file web:/fixed/new", "is in a read-only mount"),
        ("cp web:/v/none .", "\"/v/none\" could not be found on container web"),
        ("cp web:/single/x .", "\"/single/x\" could not be found on container web"),
    ] {
        let ran = place.run(line);
        assert!(ran.code == Some(125) && ran.err.contains(said), "{line}: {}", ran.err);
    }
    // A link of the volume does not lead to the host.
    symlink(place.path("single"), of("one").join("link")).unwrap();
    assert_ne!(place.run("cp web:/v/link .").code, Some(0));
    assert_eq!(place.out("start -a web"), "text\ntext\ntext\ntext\n");
}
