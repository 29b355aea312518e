//! `run` and `exec` on a terminal, of which these tests hold the master. Needs root.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, OutputModes, Winsize, tcgetattr, tcsetwinsize};

use crate::Place;
use crate::container_life::containers::{Rm, ps};
use crate::container_life::runs::{place, runtimes, wait_for};

/// A program on a terminal, and the terminal's output.
struct Seat {
    master: OwnedFd,
    slave: OwnedFd,
    program: Child,
    bytes: Receiver<Vec<u8>>,
    shown: Vec<u8>,
}

impl Seat {
    fn new(place: &Place, arguments: &[&str], size: (u16, u16)) -> Option<Self> {
        if !crate::program("setsid").is_some_and(|it| it.is_file()) {
            testing::skipped("setsid is not installed");
            return None;
        }
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC);
        let master = master.unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
        resize(&master, size.0, size.1);
        let quire = place.command(arguments);
        let mut command = std::process::Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(quire.get_program()).args(quire.get_args());
        for (name, value) in quire.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let stream = || Stdio::from(slave.try_clone().unwrap());
        command.stdin(stream()).stdout(stream()).stderr(stream());
        let program = command.current_dir(place.folder.path()).spawn().unwrap();
        let (sender, bytes) = channel();
        let mut reader = File::from(master.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Some(Self { master, slave, program, bytes, shown: Vec::new() })
    }

    /// Starts `run` of a shell script.
    fn run(place: &Place, runtime: &str, options: &[&str], script: &str) -> Option<Self> {
        let before = ["run", "--quiet", "-u", "0", "--runtime", runtime];
        let after = ["a", "--", "sh", "-c", script];
        Self::new(place, &[&before, options, &after].concat(), (33, 77))
    }

    fn look(&mut self) {
        if let Ok(bytes) = self.bytes.recv_timeout(Duration::from_millis(20)) {
            self.shown.extend(bytes);
        }
    }

    /// Waits until the terminal shows this text, and drops the output up to its end.
    fn see(&mut self, text: &str) {
        let start = Instant::now();
        loop {
            let at = self.shown.windows(text.len()).position(|it| it == text.as_bytes());
            if let Some(at) = at {
                self.shown.drain(..at + text.len());
                return;
            }
            let shown = String::from_utf8_lossy(&self.shown);
            assert!(start.elapsed() < Duration::from_secs(120), "no {text:?} in {shown:?}");
            self.look();
        }
    }

    /// Sends the bytes repeatedly until the terminal shows the text.
    fn ask(&mut self, bytes: &[u8], text: &str) {
        wait_for(text, || {
            self.send(bytes);
            for _ in 0..25 {
                self.look();
            }
            self.shown.windows(text.len()).any(|it| it == text.as_bytes())
        });
        self.see(text);
    }

    fn send(&self, bytes: &[u8]) {
        File::from(self.master.try_clone().unwrap()).write_all(bytes).unwrap();
    }

    /// Waits for the end, and returns the exit code and the remaining output of the terminal.
    fn end(mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.program.try_wait().unwrap() {
                break status;
            }
            let shown = String::from_utf8_lossy(&self.shown);
            assert!(start.elapsed() < Duration::from_secs(120), "it does not end: {shown:?}");
            self.look();
        };
        // If the program was killed, another process restores the terminal's modes.
        wait_for("the terminal to be as it was", || {
            let modes = tcgetattr(&self.slave).unwrap();
            modes.local_modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
                && modes.output_modes.contains(OutputModes::OPOST)
        });
        for _ in 0..3 {
            self.look();
        }
        (status.code(), String::from_utf8_lossy(&self.shown).into_owned())
    }
}

fn resize(terminal: &OwnedFd, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal.as_fd(), size).unwrap();
}

/// The tests' image with programs for terminals.
fn image() -> Option<Place> {
    let place = place()?;
    let tree = place.path("terminal");
    let programs = ["stty", "sleep", "sh", "bash", "cat", "od", "head", "tr"].map(crate::program);
    let programs: Vec<_> = programs.into_iter().flatten().collect();
    let programs: Vec<&str> = programs.iter().map(|it| it.to_str().unwrap()).collect();
    crate::add_programs(&tree, &programs);
    let bin = tree.join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    for program in &programs {
        let name = program.rsplit('/').next().unwrap();
        std::fs::copy(program, bin.join(name)).unwrap();
    }
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

#[test]
fn the_size_is_the_callers_from_the_first_moment_on() {
    let Some(place) = image() else { return };
    let script = "stty size; read x; stty size; echo got $x; exit 7";
    for runtime in runtimes() {
        let Some(mut seat) = Seat::run(&place, runtime, &[], script) else { return };
        seat.see("33 77\r\n");
        resize(&seat.master, 20, 50);
        // The kernel notifies quire, which resizes the container's terminal.
        std::thread::sleep(Duration::from_millis(200));
        seat.send(b"word\r");
        seat.see("20 50\r\n");
        seat.see("got word\r\n");
        assert_eq!(seat.end().0, Some(7), "{runtime}");
        let _guard = Rm(&place, "up");
        let arguments = ["run", "-d", "--name", "up", "--runtime", runtime, "a", "sleep", "60"];
        assert_eq!(place.run_each(&arguments).code, Some(0));
        // With crun 1.8, these terminals have no size at first.
        let script = script.replacen(
            "stty size",
            "while test \"$(stty size)\" = '0 0'; do :; done; stty size",
            1,
        );
        let exec = ["exec", "-it", "up", "sh", "-c", &script];
        let mut seat = Seat::new(&place, &exec, (11, 22)).unwrap();
        seat.see("11 22\r\n");
        resize(&seat.master, 12, 24);
        std::thread::sleep(Duration::from_millis(200));
        seat.send(b"word\r");
        seat.see("12 24\r\n");
        assert_eq!(seat.end().0, Some(7), "{runtime}");
    }
}

#[test]
fn every_byte_and_the_end_come_through() {
    let Some(place) = image() else { return };
    for runtime in runtimes() {
        let script = "i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done";
        let Some(seat) = Seat::run(&place, runtime, &[], script) else { return };
        let (code, shown) = seat.end();
        let expect: String = (0..5000).map(|it| format!("line {it}\r\n")).collect();
        assert!(code == Some(0) && shown == expect, "{runtime}: {} bytes", shown.len());
        // The bytes are in descending order, because Ctrl-P before Ctrl-Q would detach.
        let script = "stty raw -echo; echo ready; head -c 256 | od -An -v -tx1 | tr -d ' \\n'";
        let mut seat = Seat::run(&place, runtime, &[], script).unwrap();
        seat.see("ready\n");
        let all: Vec<u8> = (0..=255).rev().collect();
        seat.send(&all);
        let expect: String = all.iter().map(|it| format!("{it:02x}")).collect();
        assert_eq!(seat.end(), (Some(0), expect), "{runtime}");
        let mut seat = Seat::run(&place, runtime, &[], "cat; exit 4").unwrap();
        seat.send(b"typed\r");
        seat.see("typed\r\ntyped\r\n");
        seat.send(b"\x04");
        assert_eq!(seat.end().0, Some(4), "{runtime}");
    }
}

#[test]
fn two_ctrl_c_end_only_who_does_not_hear_one() {
    let Some(place) = image() else { return };
    for runtime in runtimes() {
        let Some(mut seat) = Seat::run(&place, runtime, &[], "echo up; exec sleep 60") else {
            return;
        };
        seat.see("up");
        // Wait until the shell has executed `sleep`.
        std::thread::sleep(Duration::from_millis(200));
        seat.send(b"\x03");
        seat.see("^C");
        seat.send(b"\x03");
        assert_eq!(seat.end().0, Some(137), "{runtime}");
        // In raw mode, each line must begin with a carriage return.
        let run = [
            "run",
            "-u",
            "0",
            "--runtime",
            runtime,
            "a",
            "--",
            "sh",
            "-c",
            "echo up; exec sleep 60",
        ];
        let mut seat = Seat::new(&place, &run, (33, 77)).unwrap();
        seat.see("up");
        std::thread::sleep(Duration::from_millis(200));
        seat.send(b"\x03");
        seat.see(
            "\r\nquire: the program does not handle Ctrl-C: press it again to kill the program\r\n",
        );
        seat.send(b"\x03");
        assert_eq!(seat.end().0, Some(137), "{runtime}");
        let mut seat = Seat::run(&place, runtime, &[], "exec bash --norc --noprofile").unwrap();
        seat.send(b"echo a $((6*7))\r");
        // Before the shell has set its handlers, it counts as a program without handlers.
        seat.see("a 42\r\n");
        seat.send(b"\x03\x03\x03");
        // The signals discard input and output that the terminal has not processed yet, which may include a prompt.
        seat.see("^C");
        seat.ask(b"\r", "# ");
        for command in ["echo b $((6*7))\r", "sleep 60\r"] {
            seat.send(command.as_bytes());
        }
        seat.see("b 42\r\n");
        seat.see("sleep 60\r\n");
        std::thread::sleep(Duration::from_millis(200));
        for command in ["\x03", "echo c $((6*7))\r", "exit 3\r"] {
            seat.send(command.as_bytes());
        }
        seat.see("c 42\r\n");
        assert_eq!(seat.end().0, Some(3), "{runtime}");
        // A program that ignores the signal is not killed.
        let script = "trap '' INT; echo up; read x; exit 6";
        let mut seat = Seat::run(&place, runtime, &[], script).unwrap();
        seat.see("up");
        seat.send(b"\x03\x03\r");
        assert_eq!(seat.end().0, Some(6), "{runtime}");
    }
}

#[test]
fn a_container_that_is_left_goes_on() {
    let Some(place) = image() else { return };
    for runtime in runtimes() {
        let script = "echo one; read x; while :; do echo tick; sleep 0.1; done";
        let options = ["--name", "left"];
        let Some(mut seat) = Seat::run(&place, runtime, &options, script) else { return };
        let _guard = Rm(&place, "left");
        seat.see("one");
        seat.send(b"\r\x10");
        seat.see("tick");
        seat.send(b"\x11");
        assert_eq!(seat.end().0, Some(0), "{runtime}");
        assert_eq!(ps(&place, "left").unwrap()["status"], "running");
        wait_for("its output", || place.out("logs left").contains("tick\r\n"));
        place.out("stop --time 0 left");
        wait_for("nothing to be left", || ps(&place, "left").is_none());
    }
}

#[test]
fn whatever_ends_quire_the_terminal_is_as_it_was() {
    let Some(place) = image() else { return };
    for runtime in runtimes() {
        let deaf = "echo up; while :; do sleep 0.05; done";
        let trap = "trap 'exit 9' TERM HUP; echo up; while :; do sleep 0.05; done";
        for (signal, script, code) in [
            (Signal::TERM, trap, Some(9)),
            (Signal::TERM, deaf, Some(143)),
            (Signal::HUP, trap, Some(9)),
            (Signal::KILL, trap, None),
        ] {
            let options = ["--name", "ended"];
            let Some(mut seat) = Seat::run(&place, runtime, &options, script) else { return };
            let _guard = Rm(&place, "ended");
            seat.see("up");
            // setsid has executed quire, with the same pid.
            let pid = Pid::from_raw(i32::try_from(seat.program.id()).unwrap()).unwrap();
            kill_process(pid, signal).unwrap();
            assert_eq!(seat.end().0, code, "{runtime} {signal:?}");
            // If quire was killed, the container's terminal is hung up.
            wait_for("nothing to be left", || ps(&place, "ended").is_none());
        }
    }
}

/// The log of a kept container has what the caller's terminal has shown.
#[test]
fn a_kept_container_with_a_terminal_has_a_log() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let _guard = Rm(&place, "kept");
        let options = ["--rm=false", "--name", "kept"];
        let script = "read line; echo \"got $line\"; exit 3";
        let Some(mut seat) = Seat::run(&place, runtime, &options, script) else { return };
        seat.send(b"typed\r");
        seat.see("got typed");
        assert_eq!(seat.end().0, Some(3), "{runtime}");
        assert_eq!(ps(&place, "kept").unwrap()["code"], 3);
        assert!(place.out("logs kept").contains("got typed"), "{runtime}");
        place.out("rm kept");
    }
}

/// A script's standard input counts as typed, and its end as Ctrl-D.
#[test]
fn a_terminal_needs_none_of_the_callers() {
    let Some(place) = place() else { return };
    let script =
        "[ -t 0 ] && [ -t 1 ] && echo terminal; read line; echo \"got $line\"; cat; exit 3";
    for runtime in runtimes() {
        let given = |words: &[&str], input: &[u8]| {
            let mut command = place.command(words);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().unwrap();
            child.stdin.take().unwrap().write_all(input).unwrap();
            crate::Ran::from_output(&child.wait_with_output().unwrap())
        };
        let run = ["run", "-it", "-u", "0", "--runtime", runtime, "a", "--", "sh", "-c", script];
        let ran = given(&run, b"typed\n");
        assert_eq!(ran.code, Some(3), "{runtime}: {}{}", ran.out, ran.err);
        assert!(
            ran.out.contains("terminal\r\n") && ran.out.contains("got typed\r\n"),
            "{}",
            ran.out
        );
        assert!(ran.err.contains("standard input is not a terminal"), "{}", ran.err);
        let ran =
            place.run_each(&["run", "-t", "--runtime", runtime, "a", "--", "sh", "-c", "[ -t 0 ]"]);
        assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(0), "", ""), "{runtime}");
        let _guard = Rm(&place, "c");
        start_sleep(&place, runtime);
        let exec = ["exec", "-t", "c", "sh", "-c", script];
        let ran = given(&exec, b"typed\n");
        assert_eq!(ran.code, Some(3), "{runtime}: {}{}", ran.out, ran.err);
        assert!(
            ran.out.contains("terminal\r\n") && ran.out.contains("got typed\r\n"),
            "{}",
            ran.out
        );
        place.out("rm -f c");
    }
}

fn start_sleep(place: &Place, runtime: &str) {
    place.out(&format!("run --quiet -d -u 0 --runtime {runtime} --name c a sleep 1000"));
}

/// A container in the background may have another terminal. Source: podman-exec(1), `--tty`.
#[test]
fn a_program_has_a_terminal_besides_the_containers() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let _guard = Rm(&place, "both");
        let run = ["run", "--quiet", "-dt", "--runtime", runtime, "--name", "both", "a"];
        place.run_each(&[&run[..], &["sleep", "1000"]].concat());
        let exec = |options: &[&str]| {
            let words = ["both", "sh", "-c", "[ -t 1 ] && echo $TERM"];
            place.run_each(&[&["exec", "-t"], options, &words].concat())
        };
        let ran = exec(&[]);
        assert_eq!((ran.code, &*ran.out), (Some(0), "xterm\r\n"), "{runtime}: {}", ran.err);
        assert_eq!(exec(&["-e", "TERM=other"]).out, "other\r\n", "{runtime}");
        place.out("rm -f both");
        place.out(&format!("run --quiet -d --runtime {runtime} --name both a sleep 1000"));
        assert_eq!(exec(&[]).out, "xterm\r\n", "{runtime}");
        place.out("rm -f both");
    }
}
