//! Descriptors that a process offers to other processes: a note in the container's folder contains its process
//! identity and the descriptor's number.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use kernel::process::ProcessIdentity;

/// Offers a descriptor to other processes, as long as this process has it open. `words` describe the descriptor, and
/// must not contain spaces. The note is a line with the process ([`ProcessIdentity`]), the number of the descriptor,
/// and the words.
///
/// # Errors
/// An error of the disk; the descriptor cannot be taken then.
pub(crate) fn offer(
    note: &Path,
    descriptor: BorrowedFd<'_>,
    words: &[&str],
) -> std::io::Result<()> {
    let Some(process) = ProcessIdentity::from_pid(rustix::process::getpid()) else { return Ok(()) };
    let number = descriptor.as_raw_fd();
    // Readers ignore a partly written note.
    let text = format!("{process} {number} {}\n", words.join(" "));
    std::fs::write(note, text)
}

/// Copies an offered descriptor, and returns it with the words about it. `None` if there is no note, if its process
/// has exited, or if the kernel lacks pidfd_getfd. The caller must check the file, because the process may be ending
/// and may have reused the descriptor's number.
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
