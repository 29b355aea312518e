//! Copies of a container's upper directory, as lower layers for other containers (decision 41).
//!
//! [`first_copy`] copies everything while the container runs. [`FirstCopy::finish`] copies later changes while
//! the container is frozen, and examines each other file only by one `statx`. A file counts as unchanged if its
//! `ctime` and its other metadata are the same, and if no later change could have left them the same:
//!
//! - The `ctime` is read before the bytes and the xattrs. If it is less than two ticks of the kernel's clock old then,
//!   the file is copied again, because a second change in the same tick shows no difference.
//! - A write changes the `ctime` before it changes bytes. So between the two, the first copy waits for writes that are
//!   in progress.
//! - A store through a shared mapping changes the `ctime` only if the page is clean. So the first copy writes the
//!   file's dirty pages back before it reads them. On file systems whose mappings do not work like this, such as
//!   tmpfs, the second copy compares the bytes of all files with those of their copies.
//!
//! The freezer stops tasks only between system calls, so a write or a rename is whole or absent. Only asynchronous
//! direct I/O that is in progress during one of the copies may be incomplete (decision 41).
//!
//! [`merge`] makes one directory of a chain of snapshots.

mod content;
mod entry;
mod first_copy;
mod index;
mod merge;
mod remove;
mod second_copy;
mod stamp;
pub mod take;
mod way;

use std::io;

pub use first_copy::{FirstCopy, copy_tree, first_copy};
pub use merge::{MOST_LAYERS, MergeError, Share, merge};

use self::content::CopyStop;

/// Figures of a copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// Number of names.
    pub entries: u64,
    /// Number of names that were copied again or removed while the container was frozen.
    pub recopied: u64,
    /// Size on disk of the files, in bytes. Blocks that files share count for each of them.
    pub bytes: u64,
    /// Number of files and directories.
    pub inodes: u64,
}

/// Reason why a container's files cannot be copied. Paths are those in the container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The kernel refuses an operation.
    #[error("cannot {action} \"{}\" of the container", path.escape_ascii())]
    Io {
        /// Action that failed.
        action: &'static str,
        path: Vec<u8>,
        source: io::Error,
    },
    /// A file changed although the container is frozen or has ended.
    #[error("\"{}\" of the container changed while nothing should write to it", .0.escape_ascii())]
    Changed(Vec<u8>),
    /// The caller has cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl CopyError {
    fn of(stop: CopyStop, path: Vec<u8>) -> Self {
        match stop {
            CopyStop::Cancelled => Self::Cancelled,
            CopyStop::Changed => Self::Changed(path),
            CopyStop::Kernel(action, errno) => Self::Io { action, path, source: errno.into() },
        }
    }
}

#[cfg(test)]
mod tests;
