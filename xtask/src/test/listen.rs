//! Runs `cargo test`, and reads its output.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rig::summary::Summary;

/// Time without output after the end, while another process still holds the output open; twice that is allowed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The result of `cargo test`.
pub(super) struct Ran {
    pub(super) summary: Summary,
    /// Reasons that tests printed without libtest's capture.
    pub(super) uncaptured: BTreeSet<(String, String)>,
    pub(super) success: bool,
    pub(super) status: std::process::ExitStatus,
}

/// A line of `cargo test`.
enum Line {
    /// Output of libtest.
    Out(Vec<u8>),
    /// Output of cargo, and output of tests that libtest does not capture.
    Err(Vec<u8>),
}

/// Sends each line, until the receiver is gone.
fn read(from: impl Read + Send + 'static, sender: &mpsc::Sender<Line>, line: fn(Vec<u8>) -> Line) {
    let sender = sender.clone();
    thread::spawn(move || {
        for bytes in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            if sender.send(line(bytes)).is_err() {
                return;
            }
        }
    });
}

/// Runs `cargo test`, shows the relevant lines, and writes all lines to `log`.
pub(super) fn listen(cargo: &mut Command, log: &mut File) -> Result<Ran> {
    listen_with(cargo, log, PATIENCE)
}

fn listen_with(cargo: &mut Command, log: &mut File, patience: Duration) -> Result<Ran> {
    cargo.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = cargo.spawn().context("cannot start cargo test")?;
    let (sender, lines) = mpsc::channel();
    read(child.stdout.take().expect("stdout is piped"), &sender, Line::Out);
    read(child.stderr.take().expect("stderr is piped"), &sender, Line::Err);
    drop(sender);
    let (mut summary, mut uncaptured) = (Summary::default(), BTreeSet::new());
    let (mut has_ended, mut is_left) = (false, false);
    loop {
        match lines.recv_timeout(patience) {
            Ok(Line::Out(line)) => {
                log.write_all(&[&line[..], b"\n"].concat())?;
                if let Some(shown) = summary.line(&String::from_utf8_lossy(&line)) {
                    println!("{shown}");
                }
            }
            Ok(Line::Err(line)) => {
                let line = String::from_utf8_lossy(&line);
                eprintln!("{line}");
                if let Some(reason) = line.strip_prefix("SKIPPED: ") {
                    uncaptured.insert((String::new(), reason.to_owned()));
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                // A process that a test left holds the output open, and may do so forever.
                is_left = has_ended;
                has_ended = child.try_wait()?.is_some();
                if is_left {
                    eprintln!("FAILED: a process that a test started has outlived all tests");
                    break;
                }
            }
        }
    }
    let status = child.wait()?;
    Ok(Ran { summary, uncaptured, success: status.success() && !is_left, status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_left_holds_nobody_up() {
        let ran = |script: &str| {
            let mut log = tempfile::tempfile().unwrap();
            let mut sh = Command::new("sh");
            listen_with(sh.args(["-c", script]), &mut log, Duration::from_millis(200)).unwrap()
        };
        assert!(ran("sleep 1; echo a").success);
        assert!(!ran("sleep 5 & echo a").success);
        assert!(!ran("exit 1").success);
    }
}
