//! Children and namespaces. Tests of signals are in `tests/signals.rs`, a separate process.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::process::{Command, Stdio};

use kernel::mount::Propagation;
use kernel::process::{
    Exit, Namespace, Pid, Process, ProcessError, Setup, Signal, Spawned, enter, set_subreaper,
    spawn,
};
use rustix::io::Errno;

use crate::stage::{Stage, alone, mountinfo};

fn shell(script: &str, setup: &Setup<'_>) -> Spawned {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    spawn(command, setup).unwrap()
}

fn line(child: &mut Spawned) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

#[track_caller]
fn check_exit(script: &str, exit: Exit, shell_code: i32) {
    let child = shell(script, &Setup::default());
    assert_eq!(child.process.wait().unwrap(), exit);
    assert_eq!(exit.shell_code(), shell_code);
    // A child can be waited for only once.
    match child.process.wait() {
        Err(ProcessError::Process { source, .. }) => assert_eq!(source, Errno::CHILD),
        other => panic!("{other:?}"),
    }
}

#[test]
fn exits() {
    let _alone = alone();
    check_exit("exit 0", Exit::Code(0), 0);
    check_exit("exit 42", Exit::Code(42), 42);
    check_exit("exit 255", Exit::Code(255), 255);
    check_exit("kill -TERM $$", Exit::Signal(15), 143);
    check_exit("kill -KILL $$", Exit::Signal(9), 137);
}

#[track_caller]
fn check_no_start(program: &str, kind: std::io::ErrorKind) {
    let error = spawn(Command::new(program), &Setup::default()).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot start {program}"));
    let ProcessError::Spawn { source, .. } = error else { panic!("{error:?}") };
    assert_eq!(source.kind(), kind);
}

#[test]
fn what_cannot_be_started() {
    let _alone = alone();
    check_no_start("/nowhere/at/all", std::io::ErrorKind::NotFound);
    check_no_start("/etc/passwd", std::io::ErrorKind::PermissionDenied);
}

#[test]
fn a_child_dies_with_the_thread_that_started_it() {
    let _alone = alone();
    let setup = Setup { die_with_parent: Some(Signal::TERM), ..Setup::default() };
    let child = std::thread::scope(|scope| {
        scope.spawn(|| shell("exec sleep 1000", &setup)).join().unwrap()
    });
    assert_eq!(child.process.wait().unwrap(), Exit::Signal(15));
}

#[test]
fn kept_descriptors_and_own_session() {
    let _alone = alone();
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let script = format!("echo kept >&{}; read wait", write.as_raw_fd());
    let setup = Setup { keep: &[write.as_fd()], own_session: true, ..Setup::default() };
    let mut child = shell(&script, &setup);
    drop(write);
    let mut text = [0; 16];
    let length = File::from(read).read(&mut text).unwrap();
    assert_eq!(&text[..length], b"kept\n");
    let pid = child.process.pid();
    assert_eq!(rustix::process::getsid(Some(pid)), Ok(pid));
    drop(child.stdin.take());
    child.process.wait().unwrap();

    // Without `keep`, the shell does not have the descriptor.
    let (_read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let script = format!("(echo kept >&{}) 2>/dev/null", write.as_raw_fd());
    let child = shell(&script, &Setup::default());
    assert_ne!(child.process.wait().unwrap(), Exit::Code(0));
}

#[test]
fn a_descriptor_of_another_process() {
    let Some(_stage) = Stage::new(&[]) else { return };
    let mut child = shell("echo ready; exec sleep 1000", &Setup::default());
    assert_eq!(line(&mut child), "ready");
    let its_stdin = child.process.descriptor(0).unwrap();
    child.stdin.take().unwrap().write_all(b"for it").unwrap();
    let mut text = String::new();
    File::from(its_stdin).read_to_string(&mut text).unwrap();
    assert_eq!(text, "for it");
    let error = child.process.descriptor(999).unwrap_err();
    assert!(matches!(error, ProcessError::Process { source: Errno::BADF, .. }), "{error:?}");
    child.process.signal(Signal::KILL).unwrap();
    child.process.wait().unwrap();
    let error = child.process.signal(Signal::KILL).unwrap_err();
    assert!(matches!(error, ProcessError::Process { source: Errno::SRCH, .. }), "{error:?}");
}

#[test]
fn mounts_of_its_own_can_be_entered() {
    let Some(stage) = Stage::new(&["mount"]) else { return };
    let at = stage.dir("at");
    let script = format!(
        "mount -t tmpfs quire:inside {at} && touch {at}/inside && echo mounted && read wait",
        at = at.display()
    );
    let setup = Setup { own_mounts: Some(Propagation::Downstream), ..Setup::default() };
    let mut child = shell(&script, &setup);
    assert_eq!(line(&mut child), "mounted");
    assert!(mountinfo("quire:inside").is_empty());
    assert!(!at.join("inside").exists());
    std::thread::scope(|scope| {
        let (child, at) = (&child, &at);
        let inside = scope.spawn(move || {
            enter(child.process.as_fd(), &[Namespace::Mount]).unwrap();
            (at.join("inside").exists(), mountinfo("quire:inside").len())
        });
        assert_eq!(inside.join().unwrap(), (true, 1));
    });
    drop(child.stdin.take());
    child.process.wait().unwrap();
    enter(child.process.as_fd(), &[Namespace::Mount]).unwrap_err();
}

#[test]
fn orphans_can_be_waited_for() {
    let _alone = alone();
    set_subreaper().unwrap();
    // The script starts a grandchild in the background, which keeps its standard input as descriptor 3.
    let script = "exec 3<&0; (read wait <&3; exit 5) >/dev/null & echo $!";
    let mut child = shell(script, &Setup::default());
    let pid = Pid::from_raw(line(&mut child).parse().unwrap()).unwrap();
    assert_eq!(child.process.wait().unwrap(), Exit::Code(0));
    let orphan = Process::open(pid).unwrap();
    drop(child.stdin.take());
    assert_eq!(orphan.wait().unwrap(), Exit::Code(5));
}

#[test]
fn no_such_process() {
    let _alone = alone();
    let child = shell("exit 0", &Setup::default());
    let pid = child.process.pid();
    child.process.wait().unwrap();
    let error = Process::open(pid).unwrap_err();
    let expect = format!("cannot open a descriptor of process {}", pid.as_raw_nonzero());
    assert_eq!(error.to_string(), expect);
    assert!(!Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists());
}
