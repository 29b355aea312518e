//! What was written to a root: bytes on disk, and files.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Size of what a snapshot has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

/// Source: stat(2), `st_blocks`.
const BLOCK: u64 = 512;

fn is_unreachable(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename)
}

/// The use of a directory and all in it. What vanishes meanwhile, or is too deep for a path, counts nothing.
///
/// # Errors
/// When a directory cannot be read.
pub(super) fn usage_of(directory: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    let mut seen = HashSet::new();
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        let found = match path.symlink_metadata() {
            // Or the path is longer than the kernel takes: programs can make such.
            Err(error) if is_unreachable(&error) => continue,
            found => found?,
        };
        if found.nlink() > 1 && !found.is_dir() && !seen.insert((found.dev(), found.ino())) {
            continue;
        }
        usage.inodes += 1;
        usage.bytes += found.blocks() * BLOCK;
        if !found.is_dir() {
            continue;
        }
        match path.read_dir() {
            Err(error) if is_unreachable(&error) => {}
            entries => {
                for entry in entries? {
                    left.push(entry?.path());
                }
            }
        }
    }
    Ok(usage)
}
