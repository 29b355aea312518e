//! Identities of processes that are never reused.

use std::fmt;
use std::str::FromStr;

use rustix::process::Pid;

use super::{Process, start_of};

/// Source: Linux Documentation/admin-guide/sysctl/kernel.rst, `random`.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the UUID of this boot of the machine. `None` if `/proc` does not provide it.
#[must_use]
pub fn boot_id() -> Option<String> {
    let text = std::fs::read_to_string(BOOT_ID).ok()?;
    Some(text.trim().to_owned()).filter(|it| !it.is_empty())
}

/// The identity of a process for files that outlive it: its pid, its start time, and the boot id. Without the boot
/// id, another process could have the same pid and start time after the next boot. Its text form is `PID START BOOT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessIdentity {
    pid: Pid,
    start: u64,
    boot: String,
}

/// The text is not a process identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not `PID START BOOT`")]
pub struct IdentityError;

impl ProcessIdentity {
    /// Returns the identity of a process that runs or is not reaped. `None` if no process has this pid.
    #[must_use]
    pub fn from_pid(pid: Pid) -> Option<Self> {
        Some(Self { pid, start: start_of(pid)?, boot: boot_id()? })
    }

    /// Returns the pid, which another process may have by now.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.pid
    }

    /// Opens a pidfd of the process. `None` if it has exited.
    #[must_use]
    pub fn open(&self) -> Option<Process> {
        let process = Process::open(self.pid).ok()?;
        // Checked after the open, so that the pid cannot be reused in between.
        self.is_current().then_some(process)
    }

    /// Whether the process with this pid is the identified one.
    #[must_use]
    pub fn is_current(&self) -> bool {
        start_of(self.pid) == Some(self.start) && boot_id().is_some_and(|it| it == self.boot)
    }
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.pid.as_raw_nonzero(), self.start, self.boot)
    }
}

impl FromStr for ProcessIdentity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let mut words = text.split(' ');
        let (Some(pid), Some(start), Some(boot), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(IdentityError);
        };
        let pid = pid.parse::<u32>().ok().and_then(|it| Pid::from_raw(i32::try_from(it).ok()?));
        let (Some(pid), Ok(start), false) = (pid, start.parse(), boot.is_empty()) else {
            return Err(IdentityError);
        };
        Ok(Self { pid, start, boot: boot.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_only_itself_and_only_in_this_boot() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let identity = ProcessIdentity::from_pid(pid).unwrap();
        let text = identity.to_string();
        assert_eq!(text.parse(), Ok(identity.clone()));
        assert_eq!(identity.open().map(|it| it.pid()), Some(pid));
        let words: Vec<_> = text.split(' ').collect();
        for other in [
            format!("{} {} another-boot", words[0], words[1]),
            format!("{} 1 {}", words[0], words[2]),
            format!("1 {} {}", words[1], words[2]),
        ] {
            let other: ProcessIdentity = other.parse().unwrap();
            assert!(!other.is_current() && other.open().is_none(), "{other}");
        }
        for bad in
            ["", "1", "1 2", "1 2 ", "0 2 b", "-1 2 b", "x 2 b", "1 x b", "1 2 b c", " 1 2 b"]
        {
            assert_eq!(bad.parse::<ProcessIdentity>(), Err(IdentityError), "{bad:?}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!identity.is_current() && identity.open().is_none());
    }
}
