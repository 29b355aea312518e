//! State of a container while `export changes:` reads its changes, as `commit` and `diff` do. Needs root.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::container_disk::full::{fill, free};
use crate::container_disk::writable::{is_clean, plain_ext4};
use crate::container_life::commit::{Waiting, place};
use crate::container_life::runs::{runtimes, wait_for};
use crate::{Place, Ran};

/// Starts an export of changes to a pipe that is not read yet. It blocks in the middle of a file whose name sorts
/// first.
fn stuck(place: &Place, container: &Waiting<'_>, options: &[&str]) -> Child {
    let mut command = place.command(&[&["export", &container.1, "changes:-"], options].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pipe = rustix::io::dup(child.stdout.as_ref().unwrap()).unwrap();
    let size = rustix::pipe::fcntl_getpipe_size(&pipe).unwrap();
    wait_for("a full pipe", || {
        if let Some(ended) = child.try_wait().unwrap() {
            let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
            panic!("{ended}: {said}");
        }
        let waiting = rustix::io::ioctl_fionread(&pipe).unwrap();
        usize::try_from(waiting).unwrap() >= size - 4096
    });
    child
}

/// Sends a signal, and waits until the process has handled it. If it did not wait, the process could first write all
/// of its output on a busy machine.
fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
    wait_for("the signal to be taken", || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
        pending.trim().bytes().all(|digit| digit == b'0')
    });
    // The thread that handled the signal notifies the others next.
    std::thread::sleep(std::time::Duration::from_millis(100));
}

/// Returns names in the store's directory for unfinished work.
fn work(place: &Place) -> Vec<String> {
    let entries = fs::read_dir(place.path("store/tmp")).unwrap();
    let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
    names.filter(|it| it.starts_with("work-")).collect()
}

/// The changes are read from a copy, so that the container is paused only while later changes are copied.
#[test]
fn a_container_goes_on_while_its_changes_are_read() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        for kind in ["dir", "self,size=64m", "memory"] {
            let options = ["--runtime", runtime, "--writable", kind];
            let container = Waiting::start(&place, "moving", &options, "a");
            let large = container.root().join("!large");
            for how in ["read", "INT", "TERM", "KILL"] {
                fs::write(&large, vec![b'x'; 8 << 20]).unwrap();
                let child = stuck(&place, &container, &[]);
                assert!(!container.is_paused(), "{runtime} {kind} {how}");
                // A background process may still remove that of the last round.
                wait_for("one copy", || work(&place).len() == 1);
                let written = place.run_each(&[
                    "exec",
                    "-u",
                    "0",
                    "moving",
                    "sh",
                    "-c",
                    "echo y > /\\!large",
                ]);
                assert_eq!(written.code, Some(0), "{}", written.err);
                match how {
                    "INT" => send(&child, Signal::INT),
                    "TERM" => send(&child, Signal::TERM),
                    "KILL" => kill_process(Pid::from_child(&child), Signal::KILL).unwrap(),
                    _ => {}
                }
                let ended = child.wait_with_output().unwrap();
                match how {
                    "read" => {
                        assert_eq!(ended.status.code(), Some(0));
                        let old = ended.stdout.iter().filter(|it| **it == b'x').count();
                        assert!(old >= 8 << 20, "{runtime} {kind}: {old}");
                    }
                    "KILL" => assert_eq!(ended.status.code(), None),
                    _ => {
                        let ran = Ran::from_output(&ended);
                        let is_told = ran.code == Some(2) && ran.err.contains("cancelled");
                        assert!(is_told, "{}", ran.err);
                    }
                }
                // The next command removes what a killed one has left.
                place.out("gc");
                assert_eq!(work(&place), Vec::<String>::new(), "{runtime} {kind} {how}");
            }
            // Files that an import would refuse are not read, so the verb does not wait for terabytes of zeros.
            let hole = fs::File::create(container.root().join("hole")).unwrap();
            if hole.set_len(3 << 40).is_ok() {
                let ran = place.run("diff moving");
                assert!(ran.code == Some(2) && ran.err.contains("have more than"), "{}", ran.err);
            }
            fs::remove_file(container.root().join("hole")).unwrap();
            // A container can be removed while its changes are read.
            fs::write(&large, vec![b'x'; 8 << 20]).unwrap();
            let child = stuck(&place, &container, &[]);
            let ran = place.run("rm --container --force moving");
            assert_eq!(ran.code, Some(0), "{}", ran.err);
            assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
            drop(container);
        }
    }
    wait_for("nothing to be left", || is_clean(&place));
}

/// Without space for a copy, the container stands still until its changes are read.
#[test]
fn a_container_stands_still_on_a_full_disk_and_goes_on_whatever_happens() {
    let Some(base) = place() else { return };
    if !base.is_on_disk() {
        return;
    }
    let (small, _guard) = plain_ext4(&base, "small", 90 << 20, &["-m", "0"]);
    let place = Place::new();
    fs::create_dir(small.join("store")).unwrap();
    symlink(small.join("store"), place.path("store")).unwrap();
    place.out(&format!("import --quiet tar:{} a", base.path("base.tar").display()));
    for runtime in runtimes() {
        let options = ["--runtime", runtime, "--writable", "memory"];
        let container = Waiting::start(&place, "still", &options, "a");
        fs::write(container.root().join("!large"), vec![b'x'; 8 << 20]).unwrap();
        fill(&small, "filler", free(&small).saturating_sub(4 << 20));
        for how in ["read", "helper", "INT", "TERM", "KILL"] {
            let child = stuck(&place, &container, &[]);
            assert!(container.is_paused(), "{runtime} {how}");
            match how {
                "INT" => send(&child, Signal::INT),
                "TERM" => send(&child, Signal::TERM),
                "KILL" => kill_process(Pid::from_child(&child), Signal::KILL).unwrap(),
                "helper" => {
                    let list = format!("/proc/{0}/task/{0}/children", child.id());
                    let helper: i32 = fs::read_to_string(list).unwrap().trim().parse().unwrap();
                    kill_process(Pid::from_raw(helper).unwrap(), Signal::KILL).unwrap();
                }
                _ => {}
            }
            let ended = child.wait_with_output().unwrap();
            match how {
                "read" | "helper" => {
                    assert_eq!(ended.status.code(), Some(0));
                    assert!(ended.stdout.len() > 8 << 20);
                }
                "KILL" => assert_eq!(ended.status.code(), None),
                _ => {
                    let ran = Ran::from_output(&ended);
                    assert!(ran.code == Some(2) && ran.err.contains("cancelled"), "{}", ran.err);
                }
            }
            wait_for("the container to go on", || !container.is_paused());
        }
        // A second reader waits for the first.
        let first = stuck(&place, &container, &[]);
        let second = base.path("second.tar");
        let target = format!("changes:{}", second.display());
        let mut export = place.command(&["export", "--force", "--quiet", "still", &target]);
        let export = export.stderr(Stdio::piped()).spawn().unwrap();
        let first = first.wait_with_output().unwrap();
        assert_eq!(Ran::from_output(&export.wait_with_output().unwrap()).err, "");
        assert!(first.stdout == fs::read(second).unwrap());
        assert!(!container.is_paused());
        // While the container is paused, `exec` starts no program in it. It resumes even if all processes that
        // would resume it are killed.
        let exec =
            |name: &str| place.command(&["exec", name, "sh", "-c", "exit 0"]).output().unwrap();
        let child = stuck(&place, &container, &[]);
        let mut waiting = place.command(&["exec", "still", "sh", "-c", "exit 0"]).spawn().unwrap();
        drop(child.wait_with_output().unwrap());
        assert_eq!(waiting.wait().unwrap().code(), Some(0), "{runtime}");
        let child = stuck(&place, &container, &[]);
        let list = format!("/proc/{0}/task/{0}/children", child.id());
        let helper: i32 = fs::read_to_string(list).unwrap().trim().parse().unwrap();
        kill_process(Pid::from_raw(helper).unwrap(), Signal::KILL).unwrap();
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        drop(child.wait_with_output().unwrap());
        assert!(container.is_paused(), "{runtime}");
        let ran = Ran::from_output(&exec("still"));
        assert!(ran.code == Some(0) && !container.is_paused(), "{runtime}: {}", ran.err);
        // Removing a container that is being read does not leave a process that cannot end.
        let child = stuck(&place, &container, &[]);
        let ran = place.run("rm --container --force still");
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        drop(child.wait_with_output().unwrap());
        drop(container);
        fs::remove_file(small.join("filler")).unwrap();
    }
    wait_for("nothing to be left", || is_clean(&place));
}

#[test]
fn what_changes_while_it_is_read_is_an_error() {
    let Some(place) = place() else { return };
    let container = Waiting::start(&place, "changing", &[], "a");
    let file = container.root().join("!large");
    fs::write(&file, vec![b'x'; 8 << 20]).unwrap();
    let child = stuck(&place, &container, &["--no-pause"]);
    assert!(!container.is_paused());
    fs::File::options().write(true).open(&file).unwrap().write_all(b"y").unwrap();
    let ran = Ran::from_output(&child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(2));
    assert!(
        ran.err.contains("\"/!large\" of the container changed during the read"),
        "{}",
        ran.err
    );
    // A directory that gets more names is also an error.
    let child = stuck(&place, &container, &["--no-pause"]);
    fs::write(container.root().join("more"), "").unwrap();
    let ran = Ran::from_output(&child.wait_with_output().unwrap());
    assert!(ran.code == Some(2) && ran.err.contains("changed during the read"), "{}", ran.err);
    // If the target is a file, it does not exist after such an error.
    let refused = place.run("export --no-pause changing changes:no/such/file");
    assert!(
        refused.code == Some(2) && refused.err.contains("the directory \"no/such\" does not exist"),
        "{}",
        refused.err
    );
    place.out("export --quiet --no-pause changing changes:whole.tar");
}
