//! Descriptors that a process holds for others to take: a note in the container's folder has its process and number.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use kernel::process::{Pid, Process, start_of};

/// Offers a descriptor, as long as this process has it, with words about it that have no spaces. The note is a line:
/// process, its start, the number of its descriptor, and these words.
///
/// # Errors
/// The disk's; then nobody can take it.
pub(crate) fn offer(
    note: &Path,
    descriptor: BorrowedFd<'_>,
    words: &[&str],
) -> std::io::Result<()> {
    let pid = rustix::process::getpid();
    let Some(start) = start_of(pid) else { return Ok(()) };
    let number = descriptor.as_raw_fd();
    // Whoever finds half of it takes nothing.
    let text = format!("{} {start} {number} {}\n", pid.as_raw_nonzero(), words.join(" "));
    std::fs::write(note, text)
}

/// Takes a copy of what is offered, and the words about it; none if there is no offer, its maker is gone, or the kernel
/// cannot. Make sure that it is what it should be: its maker may be ending, and have something else by that number.
pub(crate) fn take(note: &Path) -> Option<(OwnedFd, Vec<String>)> {
    let text = std::fs::read_to_string(note).ok()?;
    let text = text.strip_suffix('\n')?;
    let mut words = text.split_whitespace();
    let pid = words.next()?.parse().ok().and_then(Pid::from_raw)?;
    let start = words.next()?.parse().ok()?;
    let number = words.next()?.parse().ok()?;
    let process = Process::open(pid).ok()?;
    let taken = process.descriptor(number).ok()?;
    // Asked last: it was the same process all the time, then.
    if start_of(pid) != Some(start) {
        return None;
    }
    Some((taken, words.map(str::to_owned).collect()))
}
