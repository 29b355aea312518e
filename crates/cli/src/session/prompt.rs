//! Questions on the terminal, with visible or hidden answers.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// The longest line, in bytes, that a terminal takes. Source: Linux, `N_TTY_BUF_SIZE`.
const LINE_MAX: usize = 4096;
/// Time between two checks for an interrupt.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The terminal that the process has, wherever its standard input comes from.
pub(crate) struct Terminal(File);

/// What is typed is not shown as long as this lives. A `Drop`, so that no error and no interrupt leaves a terminal mute.
struct Mute<'a> {
    terminal: &'a File,
    before: Termios,
}

impl<'a> Mute<'a> {
    fn new(terminal: &'a File) -> rustix::io::Result<Self> {
        let before = tcgetattr(terminal)?;
        let mut mute = before.clone();
        mute.local_modes.remove(LocalModes::ECHO);
        // Typing ahead of the question would have been shown: it is not taken for an answer.
        tcsetattr(terminal, OptionalActions::Flush, &mute)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Mute<'_> {
    fn drop(&mut self) {
        // A terminal that is gone needs no echo.
        let _gone = tcsetattr(self.terminal, OptionalActions::Flush, &self.before);
    }
}

impl Terminal {
    pub(crate) fn open() -> std::io::Result<Self> {
        File::options().read(true).write(true).open("/dev/tty").map(Self)
    }

    /// Asks for a line.
    pub(crate) fn ask(&self, question: &str, cancel: &AtomicBool) -> anyhow::Result<String> {
        self.write(question)?;
        self.line(cancel)
    }

    /// Asks for a line that is not shown.
    pub(crate) fn ask_hidden(&self, question: &str, cancel: &AtomicBool) -> anyhow::Result<String> {
        let mute = Mute::new(&self.0).context("cannot turn off the echo of the terminal")?;
        self.write(question)?;
        let line = self.line(cancel);
        drop(mute);
        // The one that was typed was not shown either.
        self.write("\n")?;
        line
    }

    fn write(&self, text: &str) -> anyhow::Result<()> {
        std::io::Write::write_all(&mut &self.0, text.as_bytes())
            .context("cannot write to the terminal")
    }

    fn line(&self, cancel: &AtomicBool) -> anyhow::Result<String> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
            // An interrupted poll looks again, as one without an answer does.
            let _ready = rustix::event::poll(&mut fds, Some(&LOOK));
            if cancel.load(Ordering::Relaxed) {
                bail!("cancelled");
            }
            if fds[0].revents().is_empty() {
                continue;
            }
            let mut bytes = [0; LINE_MAX];
            let read = rustix::io::read(&self.0, &mut bytes).context("cannot read the terminal")?;
            if read == 0 || line.len() > LINE_MAX {
                bail!("no answer came from the terminal");
            }
            line.extend_from_slice(&bytes[..read]);
        }
        line.pop();
        String::from_utf8(line).ok().context("the answer is not UTF-8")
    }
}
