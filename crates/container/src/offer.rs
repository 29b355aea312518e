//! Descriptors that a process holds for others to take: a note in the container's folder has its process and number.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use kernel::process::ProcessIdentity;

/// Offers a descriptor, as long as this process has it, with words about it that have no spaces. The note is a line:
/// the process ([`ProcessIdentity`]), the number of its descriptor, and these words.
///
/// # Errors
/// The disk's; then nobody can take it.
pub(crate) fn offer(
    note: &Path,
    descriptor: BorrowedFd<'_>,
    words: &[&str],
) -> std::io::Result<()> {
    let Some(process) = ProcessIdentity::of(rustix::process::getpid()) else { return Ok(()) };
    let number = descriptor.as_raw_fd();
    // Whoever finds half of it takes nothing.
    let text = format!("{process} {number} {}\n", words.join(" "));
    std::fs::write(note, text)
}

/// Takes a copy of what is offered, and the words about it; none if there is no offer, its maker is gone, or the kernel
/// cannot. Make sure that it is what it should be: its maker may be ending, and have something else by that number.
pub(crate) fn take(note: &Path) -> Option<(OwnedFd, Vec<String>)> {
    let text = std::fs::read_to_string(note).ok()?;
    let text = text.strip_suffix('\n')?;
    let (end, _) = text.match_indices(' ').nth(2)?;
    let process: ProcessIdentity = text[..end].parse().ok()?;
    let mut words = text[end..].split_whitespace();
    let number = words.next()?.parse().ok()?;
    let taken = process.open()?.descriptor(number).ok()?;
    Some((taken, words.map(str::to_owned).collect()))
}
