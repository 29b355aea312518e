//! Lazy images, whose devices are files on FUSE. Needs root.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kernel::version::KernelVersion;
use rustix::process::{Pid, Signal, kill_process};
use testing::fake::wait_for;

use crate::container_life::runs::runtimes;
use crate::services::served::{Lazy, end, keeper_of, serve_folder, serve_with};
use crate::{add_programs, is_root};

/// Native images have long prefixes and blocks of 512 bytes (docs/format/erofs-profile.md).
const NATIVE: KernelVersion = KernelVersion { major: 6, minor: 4 };

/// Returns whether lazy images can be mounted. Notes a skipped test if not.
pub(crate) fn can_serve() -> bool {
    if !is_root() {
        return false;
    }
    let is_new = KernelVersion::running().unwrap() >= NATIVE;
    if !is_new {
        testing::skipped("native images: this kernel is older than Linux 6.4");
    }
    is_new
}

/// A store with a lazy image, and its service. `None`, with a note, if such images cannot be mounted here.
fn served() -> Option<(Lazy, Child)> {
    served_with(|_| ())
}

/// Like [`served`], with more files in the image.
fn served_with(add: impl FnOnce(&Path)) -> Option<(Lazy, Child)> {
    if !can_serve() {
        return None;
    }
    let lazy = Lazy::with(add, |_| ())?;
    let service = serve(&lazy);
    Some((lazy, service))
}

fn serve(lazy: &Lazy) -> Child {
    serve_with(&lazy.place, &[], |command| command)
}

/// Kills a service and its keeper at the same moment, so that neither can replace the other.
fn kill_both(lazy: &Lazy, service: &mut Child) {
    let keeper = keeper_of(&serve_folder(&lazy.place));
    kill_process(keeper, Signal::STOP).unwrap();
    service.kill().unwrap();
    service.wait().unwrap();
    kill_process(keeper, Signal::KILL).unwrap();
    let process = PathBuf::from(format!("/proc/{}", keeper.as_raw_nonzero()));
    wait_for("its end", || !process.exists());
}

#[test]
fn files_on_fuse_stand_for_devices() {
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    place.out("mount --lazy lazy root");
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    let listed: serde_json::Value = serde_json::from_str(&place.out("ps --lazy --json")).unwrap();
    assert_eq!(listed[0]["mounted"], true, "{listed}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(" - fuse quire"), "they are attached somewhere");
    // gc keeps an image that is in use, even without a name.
    place.out("rmi lazy");
    place.out("gc");
    let long = fs::read(place.path("root/etc/long")).unwrap();
    assert!(long == fs::read(lazy.tree.join("etc/long")).unwrap());
    place.out("umount root");
    end(place, &mut service);
    place.out("gc");
    let sparse = fs::read_dir(place.path("store/lazy")).unwrap();
    assert_eq!(sparse.count(), 0, "the device is gone");
}

#[test]
fn containers_run_from_files_on_fuse() {
    let Some((lazy, mut service)) = served() else { return };
    let words = String::from_utf8(lazy.words()).unwrap();
    for runtime in runtimes() {
        let line = format!("run --rm --lazy --runtime {runtime} lazy cat /words");
        assert!(lazy.place.out(&line) == words, "{runtime}");
    }
    end(&lazy.place, &mut service);
}

#[test]
fn run_prints_why_reads_failed_although_its_image_lost_the_name() {
    let Some(runtime) = runtimes().next() else { return };
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    let fifo = place.path("fifo");
    assert!(testing::trees::run("mkfifo", &[fifo.to_str().unwrap()], &place.path(".")));
    let line = format!(
        "run --rm --lazy --prefetch none --runtime {runtime} -v {}:/fifo lazy cat /fifo /words",
        fifo.display()
    );
    let words: Vec<&str> = line.split(' ').collect();
    let mut run = place.command(&words);
    let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // When this open succeeds, the container is running.
    let mut fifo = fs::File::options().write(true).open(&fifo).unwrap();
    place.out("rmi lazy");
    fs::remove_file(&lazy.blob).unwrap();
    fifo.write_all(b"now\n").unwrap();
    drop(fifo);
    let ended = run.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("a read of device ") && told.contains(" got an I/O error: "), "{told}");
    end(place, &mut service);
}

#[test]
fn a_mount_on_fuse_never_reads_zeros_though_all_others_are_killed() {
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    let read = |root: &str| fs::read(place.path(root).join("words"));
    for root in ["root", "again"] {
        fs::create_dir(place.path(root)).unwrap();
    }
    place.out("mount --lazy --prefetch none lazy root");
    kill_both(&lazy, &mut service);
    let error = read("root").map(|it| it.len()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    // A new mount can be read. The old mount keeps failing.
    let mut service = serve(&lazy);
    place.out("mount --lazy lazy again");
    assert!(read("again").unwrap() == lazy.words());
    read("root").unwrap_err();
    place.out("umount root");
    place.out("umount again");
    end(place, &mut service);
    assert!(!Path::new(&serve_folder(place)).exists());
}

/// Returns a container's monitor. It is the parent of the container's first process.
fn monitor_of(lazy: &Lazy, container: &str) -> Pid {
    let listed = lazy.place.out("ps --json");
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let all = listed.as_array().unwrap();
    let pid = all.iter().find(|it| it["container"] == container).unwrap()["pid"].as_u64().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|it| it.strip_prefix("PPid:")).unwrap();
    Pid::from_raw(parent.trim().parse().unwrap()).unwrap()
}

/// As with `pkill -9 quire`, or when a whole control group is killed for its memory.
#[test]
fn a_container_never_reads_zeros_though_its_monitor_is_killed_too() {
    let Some((lazy, mut service)) = served_with(|tree| add_programs(tree, &["/bin/sh"])) else {
        return;
    };
    let place = &lazy.place;
    let (out, fifo) = (place.path("out"), place.path("fifo"));
    fs::create_dir(&out).unwrap();
    assert!(testing::trees::run("mkfifo", &[fifo.to_str().unwrap()], &place.path(".")));
    for runtime in runtimes() {
        let line = format!(
            "run --quiet --detach --name three --lazy --prefetch none --runtime {runtime} -v {}:/out -v {}:/fifo lazy",
            out.display(),
            fifo.display()
        );
        // The pages of the programs themselves are read earlier.
        let script = "cat /etc/short > /dev/null; cat /fifo > /dev/null; cat /words > /out/words; echo $? > /out/code";
        let mut words: Vec<&str> = line.split(' ').collect();
        words.extend(["sh", "-c", script]);
        assert!(place.command(&words).status().unwrap().success());
        let mut held = fs::File::options().write(true).open(&fifo).unwrap();
        let monitor = monitor_of(&lazy, "three");
        kill_process(monitor, Signal::STOP).unwrap();
        kill_both(&lazy, &mut service);
        kill_process(monitor, Signal::KILL).unwrap();
        wait_for("its end", || !Path::new(&format!("/proc/{}", monitor.as_raw_nonzero())).exists());
        held.write_all(b"now\n").unwrap();
        drop(held);
        // The shell may have been killed because a page of its program could not be read.
        let is_gone = || crate::container_life::runs::processes_with("/out/words").is_empty();
        wait_for("the container's end", || out.join("code").exists() || is_gone());
        let read = fs::read(out.join("words")).unwrap_or_default();
        assert!(lazy.words().starts_with(&read), "{runtime}: bytes that are not the file's");
        assert!(read.len() < lazy.words().len(), "{runtime}: nothing was missing");
        place.out("rm --container --force three");
        for name in ["words", "code"] {
            let _it_may_be_missing = fs::remove_file(out.join(name));
        }
        service = serve(&lazy);
    }
    end(place, &mut service);
}

#[test]
fn without_fuse_nothing_is_lent() {
    let Some((lazy, mut service)) = served() else { return };
    let place = &lazy.place;
    end(place, &mut service);
    if !testing::programs(&["unshare", "mount"]) {
        return;
    }
    let serve = || {
        serve_with(place, &[], |command| {
            let words: Vec<_> =
                std::iter::once(command.get_program()).chain(command.get_args()).collect();
            let mut inner = Command::new("unshare");
            inner.args([
                "--mount",
                "sh",
                "-c",
                "mount --bind /dev/null /dev/fuse && exec \"$@\"",
                "sh",
            ]);
            inner.args(words).current_dir(place.path("."));
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => inner.env(name, value),
                    None => inner.env_remove(name),
                };
            }
            *command = inner;
            command
        })
    };
    fs::create_dir(place.path("root")).unwrap();
    let mut service = serve();
    let refused = place.run("mount --lazy lazy root");
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    for part in ["cannot make files on FUSE", "/dev/fuse", "modprobe fuse", "without --lazy"] {
        assert!(refused.err.contains(part), "{part}: {}", refused.err);
    }
    let refused = place.run("run --rm --lazy lazy cat /words");
    assert!(refused.code == Some(125) && refused.err.contains("/dev/fuse"), "{}", refused.err);
    end(place, &mut service);
}
