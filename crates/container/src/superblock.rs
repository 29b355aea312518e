//! One EROFS superblock for all containers of an image: whoever holds a mount of it says so in the container's folder, and
//! the next one takes a copy of that descriptor. The last one out frees it.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;

use kernel::mount::{Backing, Detached};
use kernel::process::{Pid, Process};

/// A line: process, its start, the number of its descriptor, `file` or `loop`.
const OFFER: &str = "superblock";

/// Source: `linux/magic.h`, EROFS_SUPER_MAGIC_V1.
const EROFS_SUPER_MAGIC: i64 = 0xe0f5_e1e2;

/// A mount of an image, attached nowhere.
#[derive(Debug)]
pub struct Superblock {
    /// The mount.
    pub mount: Detached,
    /// How the kernel reads the image.
    pub backing: Backing,
}

impl Superblock {
    /// Offers it to others, as long as this process has it.
    ///
    /// # Errors
    /// The disk's; then nobody shares it.
    pub fn offer(&self, folder: &Path) -> std::io::Result<()> {
        let pid = rustix::process::getpid();
        let Some(start) = start_of(pid) else { return Ok(()) };
        let number = self.mount.as_fd().as_raw_fd();
        let backing = match self.backing {
            Backing::File => "file",
            Backing::Loop => "loop",
        };
        // Whoever finds half of it mounts the image anew.
        let text = format!("{} {start} {number} {backing}\n", pid.as_raw_nonzero());
        std::fs::write(folder.join(OFFER), text)
    }

    /// Takes what a container of the same image offers; none if there is no offer, its maker is gone, or the kernel cannot
    /// (before Linux 6.15).
    #[must_use]
    pub fn take(folder: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(folder.join(OFFER)).ok()?;
        let mut words = text.split_whitespace();
        let pid = words.next()?.parse().ok().and_then(Pid::from_raw)?;
        let start = words.next()?;
        let number = words.next()?.parse().ok()?;
        let backing = match words.next()? {
            "file" => Backing::File,
            "loop" => Backing::Loop,
            _ => return None,
        };
        let process = Process::open(pid).ok()?;
        let taken: OwnedFd = process.descriptor(number).ok()?;
        // Asked last: it was the same process all the time, then.
        if start_of(pid).as_deref() != Some(start) {
            return None;
        }
        // It may be ending, and have something else by that number already.
        if rustix::fs::fstatfs(&taken).ok()?.f_type != EROFS_SUPER_MAGIC {
            return None;
        }
        let mount = Detached::from_fd(taken).clone_detached().ok()?;
        Some(Self { mount, backing })
    }
}

/// When a process was started, in the kernel's own count: with its number, a name that no other process gets. Source:
/// proc_pid_stat(5), field 22.
fn start_of(pid: Pid) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The second field is the program's name, in parentheses, and may have any of them in it.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19).map(str::to_owned)
}
