//! Asks questions on the terminal, with visible or hidden input.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

/// Maximum length of a line that a terminal accepts, in bytes. Source: Linux, `N_TTY_BUF_SIZE`.
const LINE_MAX: usize = 4096;
/// Time between two checks for an interrupt.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The controlling terminal, which may differ from standard input.
pub(crate) struct Terminal(File);

/// Disables the echo of the terminal until it is dropped, so that no error and no interrupt leaves the echo
/// disabled.
struct Mute<'a> {
    terminal: &'a File,
    before: Termios,
}

impl<'a> Mute<'a> {
    fn new(terminal: &'a File) -> rustix::io::Result<Self> {
        let before = tcgetattr(terminal)?;
        let mut mute = before.clone();
        mute.local_modes.remove(LocalModes::ECHO);
        // Input that was typed before the question is discarded, because it was visible.
        tcsetattr(terminal, OptionalActions::Flush, &mute)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Mute<'_> {
    fn drop(&mut self) {
        // Ignore a failure: a closed terminal needs no echo.
        let _gone = tcsetattr(self.terminal, OptionalActions::Flush, &self.before);
    }
}

impl Terminal {
    pub(crate) fn open() -> std::io::Result<Self> {
        File::options().read(true).write(true).open("/dev/tty").map(Self)
    }

    #[cfg(feature = "registry")]
    pub(crate) fn ask(&self, question: &str, cancel: &AtomicBool) -> anyhow::Result<String> {
        self.write(question)?;
        let line = self.line(cancel)?;
        String::from_utf8(line.to_vec()).ok().context("the input is not UTF-8")
    }

    /// Asks for a line with hidden input. Its memory is overwritten when it is dropped, and no copy of it remains.
    pub(crate) fn ask_hidden(
        &self,
        question: &str,
        cancel: &AtomicBool,
    ) -> anyhow::Result<Zeroizing<Vec<u8>>> {
        let mute = Mute::new(&self.0).context("cannot turn off the echo of the terminal")?;
        self.write(question)?;
        let line = self.line(cancel);
        drop(mute);
        // The newline that the user typed was also hidden.
        self.write("\n")?;
        line
    }

    fn write(&self, text: &str) -> anyhow::Result<()> {
        std::io::Write::write_all(&mut &self.0, text.as_bytes())
            .context("cannot write to the terminal")
    }

    /// Reads a line, without the line feed. The memory of the input is overwritten, because the line may be a secret.
    fn line(&self, cancel: &AtomicBool) -> anyhow::Result<Zeroizing<Vec<u8>>> {
        // The buffer never grows, so that no copy stays behind in freed memory.
        let mut line = Zeroizing::new(Vec::with_capacity(2 * LINE_MAX));
        let mut bytes = Zeroizing::new([0; LINE_MAX]);
        while line.last() != Some(&b'\n') {
            let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
            // After an error such as an interrupt, `revents` is empty, as after a timeout, so the loop continues.
            let _ready = rustix::event::poll(&mut fds, Some(&LOOK));
            if cancel.load(Ordering::Relaxed) {
                bail!("cancelled");
            }
            if fds[0].revents().is_empty() {
                continue;
            }
            let read =
                rustix::io::read(&self.0, &mut *bytes).context("cannot read the terminal")?;
            if read == 0 || line.len() > LINE_MAX {
                bail!("the terminal was closed, or the line is too long");
            }
            line.extend_from_slice(&bytes[..read]);
        }
        line.pop();
        Ok(line)
    }
}
