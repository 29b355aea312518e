//! Commands that wait for the store's lock, which `gc` holds, and are interrupted.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::{Place, Ran};

/// Runs a command that must wait, and interrupts it.
fn interrupted(place: &Place, line: &str) -> Ran {
    let arguments: Vec<&str> = line.split(' ').collect();
    let mut command = place.command(&arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // Until the command blocks the signal to read it from a descriptor, the signal kills it. Bit 1 of SigBlk is INT
    // (proc_pid_status(5)).
    let status = format!("/proc/{}/status", child.id());
    crate::container_life::runs::wait_for("the handler of signals", || {
        let status = std::fs::read_to_string(&status).unwrap();
        let blocked = status.lines().find_map(|it| it.strip_prefix("SigBlk:"));
        let blocked = blocked.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
        blocked.is_some_and(|it| it & 2 != 0)
    });
    // The test cannot see whether the command is already waiting. After this time it usually is.
    std::thread::sleep(Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "{line}: it does not wait");
    let since = Instant::now();
    rustix::process::kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("{line}: it waits on");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ran::from_output(&child.wait_with_output().unwrap())
}

#[test]
fn who_waits_for_the_lock_hears_an_interrupt() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(place.path("a.tar")).arg("-C").arg(&tree).arg(".");
    assert!(tar.status().unwrap().success());
    place.out("import tar:a.tar a:1");
    let mut lines = vec!["export a:1 tar:out.tar", "export a:1 oci:out:1", "import tar:a.tar b:1"];
    // No server listens at this port, but this is noticed only when the lock is free.
    if cfg!(feature = "registry") {
        lines.push("push a:1 127.0.0.1:1/a:1");
    }
    let lock = std::fs::File::open(place.path("store/gc.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    for line in lines {
        let ran = interrupted(&place, line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains("gc.lock"), "{line}: {}", ran.err);
    }
    assert!(!place.path("out.tar").exists() && !place.path("out").exists());
}

#[test]
#[cfg(feature = "registry")]
fn who_waits_for_a_registry_hears_an_interrupt() {
    let place = Place::new();
    place.tree("tree", "x");
    // This server accepts connections, but never replies.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap();
    for line in [format!("pull {host}/a:1"), format!("referrers {host}/a:1")] {
        let ran = interrupted(&place, &line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains("cancelled"), "{line}: {}", ran.err);
    }
}
