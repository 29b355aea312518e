//! Signals to this process reach the child, once. This program runs without the test harness, whose threads would
//! receive the signals.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test, without the harness")]

// The name that the other crates use.
extern crate quire_kernel as kernel;

use std::io::Read as _;
use std::process::{Command, Stdio};

use kernel::process::{Exit, Received, Sender, Setup, Signal, Signals, spawn};

const FORWARDED: [(&str, Signal); 7] = [
    ("INT", Signal::INT),
    ("TERM", Signal::TERM),
    ("HUP", Signal::HUP),
    ("QUIT", Signal::QUIT),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("WINCH", Signal::WINCH),
];

fn main() {
    if ignores_some() {
        // The caller is nohup(1) or a background job of a script: a shell cannot trap a signal that was ignored at
        // its start.
        let mut again = Command::new("env");
        let names = FORWARDED.map(|(name, _)| name).join(",");
        again.arg(format!("--default-signal={names}")).arg(std::env::current_exe().unwrap());
        assert!(again.status().unwrap().success());
        return;
    }
    senders_are_told_apart();
    every_signal_reaches_the_child();
    the_child_starts_with_the_mask_from_before();
    println!("signals: ok");
}

/// Whether a forwarded signal was ignored when this process started. Source: proc_pid_status(5), `SigIgn`.
fn ignores_some() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    FORWARDED.iter().any(|(_, signal)| ignored & 1 << (signal.as_raw() - 1) != 0)
}

/// The child sends each signal to its parent, and continues only after it gets the signal back.
fn every_signal_reaches_the_child() {
    let signals = Signals::block(&FORWARDED.map(|(_, signal)| signal)).unwrap();
    assert_eq!(signals.next().unwrap(), None);
    let mut script = String::new();
    for (name, _) in FORWARDED {
        script.push_str(&format!(
            "got=; trap 'got=1; echo {name}' {name}
             kill -{name} $PPID
             while [ -z \"$got\" ]; do sleep 0.01; done
             trap 'echo {name} again' {name}\n"
        ));
    }
    script.push_str("sleep 0.05; exit 7");
    let setup = Setup { signals: Some(&signals), ..Setup::default() };
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &script]).stdout(Stdio::piped());
    let mut child = spawn(command, &setup).unwrap();
    let mut requests = Vec::new();
    let exit =
        child.process.supervise(&signals, &mut |count| requests.push(count), &mut || None).unwrap();
    assert_eq!(exit, Exit::Code(7));
    // INT and TERM are requests to exit; the other signals are not.
    assert_eq!(requests, [1, 2]);
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "INT\nTERM\nHUP\nQUIT\nUSR1\nUSR2\nWINCH\n");
}

/// The signal for the exit of a child is sent by the kernel. Ctrl-C in a terminal also has the code of a kernel
/// signal.
fn senders_are_told_apart() {
    let signals = Signals::block(&[Signal::CHILD, Signal::URG]).unwrap();
    let child = spawn(Command::new("/bin/true"), &Setup::default()).unwrap();
    child.process.wait().unwrap();
    let expect = Received { signal: Signal::CHILD, sender: Sender::Kernel };
    assert_eq!(signals.next().unwrap(), Some(expect));

    let mut command = Command::new("/bin/sh");
    command.args(["-c", "kill -URG $PPID; kill -CHLD $PPID"]);
    let child = spawn(command, &Setup::default()).unwrap();
    child.process.wait().unwrap();
    let urgent = Received { signal: Signal::URG, sender: Sender::Process };
    let mut received = Vec::new();
    while let Some(next) = signals.next().unwrap() {
        received.push(next);
    }
    assert!(received.contains(&urgent), "{received:?}");
}

fn the_child_starts_with_the_mask_from_before() {
    let blocked = |setup: &Setup<'_>| {
        let mut command = Command::new("/bin/grep");
        command.args(["SigBlk", "/proc/self/status"]).stdout(Stdio::piped());
        let mut child = spawn(command, setup).unwrap();
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        child.process.wait().unwrap();
        u64::from_str_radix(text.trim_start_matches("SigBlk:").trim(), 16).unwrap()
    };
    let before = blocked(&Setup::default());
    let signals = Signals::block(&[Signal::IO]).unwrap();
    let io = 1 << (Signal::IO.as_raw() - 1);
    assert_eq!(blocked(&Setup::default()), before | io);
    assert_eq!(blocked(&Setup { signals: Some(&signals), ..Setup::default() }), before);
}
