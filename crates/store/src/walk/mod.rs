//! A directory on disk becomes a tree.
//!
//! The directory is walked by descriptors: no symlink is followed, and each entry describes the file that was opened.
//! Several threads read regular files, a few at a time. A change during the walk is an error, if the kernel's time
//! stamps show it. Rules: `docs/format/tree.md`.

mod scan;
mod source;

#[cfg(test)]
mod tests;

use std::error::Error;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use image::tree::{Tree, TreeError};
use image::verity::ObjectId;

pub use source::{FilePart, Seen, Source, parts};

/// The longest file that a composefs image holds itself, in bytes, when it is made from a directory. Source:
/// `mkcomposefs`.
pub const COMPOSEFS_INLINE_MAX: u64 = 64;

/// How a directory's files become a tree.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Treatment of files with several names.
    pub hardlinks: Hardlinks,
    /// The xattrs that are kept.
    pub xattrs: Xattrs,
    /// The times that are kept.
    pub times: Times,
    /// Whether device nodes are kept.
    pub devices: Devices,
    /// Length in bytes of the longest file whose bytes go into the tree; `put` gets longer ones.
    pub inline_max: u64,
    /// Number of threads that read files.
    pub threads: NonZeroUsize,
}

/// Treatment of files with several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hardlinks {
    /// They stay one file.
    Keep,
    /// Each name becomes a file of its own, as `mkcomposefs` does it.
    Split,
}

/// The xattrs that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Xattrs {
    /// All that this process can see.
    All,
    /// Only those whose name begins with `user.`.
    UserOnly,
    /// None.
    None,
}

/// The times that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Times as they are.
    Exact,
    /// Times without fractions of a second.
    WholeSeconds,
    /// All times are 0.
    Epoch,
}

/// Whether character and block devices are kept, overlayfs whiteouts among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// They are kept.
    Keep,
    /// They are left out.
    Skip,
}

/// Why a directory could not become a tree.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalkError {
    /// An operation on a file failed.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The operation, such as "open".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A file, its bytes or its metadata changed during the walk.
    #[error("{} changed while it was read", .0.display())]
    Changed(PathBuf),
    /// `put` failed for a file.
    #[error("cannot store {}", .path.display())]
    Put {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: PutError,
    },
    /// A file that no tree can hold.
    #[error("cannot add {} to the tree", .path.display())]
    Tree {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: TreeError,
    },
}

/// The error of the caller's `put`.
pub type PutError = Box<dyn Error + Send + Sync>;

/// The tree below `directory`, whose `path` is only for messages. `put` is called for each regular file that is longer
/// than `inline_max`, on several threads at once. It may store the bytes, and returns their digest
/// ([`Source::digest`]). With [`Hardlinks::Split`] it is called once for each name of a file.
///
/// The tree is the same whatever the order of the directory's entries and the number of threads.
///
/// # Errors
/// [`WalkError`], which names the file. Earlier calls of `put` are not undone.
pub fn tree(
    directory: BorrowedFd<'_>,
    path: &Path,
    options: &Options,
    put: impl Fn(&mut Source<'_>) -> Result<ObjectId, PutError> + Sync,
) -> Result<Tree, WalkError> {
    scan::scan(directory, path, options, &put)
}
