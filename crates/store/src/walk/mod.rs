//! A directory on disk becomes a tree.
//!
//! The directory is walked by descriptors: no symlink is ever followed, and what is described is what was opened. Regular
//! files are read on several threads, a few at a time. Whatever changes meanwhile is an error, as far as the kernel's
//! time stamps show it. Rules: `docs/format/tree.md`.

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

pub use source::{Seen, Source};

/// The longest file that a composefs image holds itself, in bytes, when it is made from a directory. Source:
/// `mkcomposefs`.
pub const COMPOSEFS_INLINE_MAX: u64 = 64;

/// What a directory's files become in the tree.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Files with several names.
    pub hardlinks: Hardlinks,
    /// Which xattrs are kept.
    pub xattrs: Xattrs,
    /// Which times are kept.
    pub times: Times,
    /// Whether device nodes are kept.
    pub devices: Devices,
    /// The longest file whose bytes go into the tree, in bytes; longer ones are put elsewhere.
    pub inline_max: u64,
    /// How many threads read files.
    pub threads: NonZeroUsize,
}

/// Files with several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hardlinks {
    /// They stay one file.
    Keep,
    /// Each name becomes a file of its own, as `mkcomposefs` does it.
    Split,
}

/// Which xattrs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Xattrs {
    /// All that this process may see.
    All,
    /// Those whose name begins with `user.`.
    UserOnly,
    /// None.
    None,
}

/// Which times are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// As they are.
    Exact,
    /// Without fractions of a second.
    WholeSeconds,
    /// All are 0.
    Epoch,
}

/// Whether character and block devices are kept, overlayfs whiteouts among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// They are.
    Keep,
    /// They are left out.
    Skip,
}

/// Why a directory did not become a tree.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalkError {
    /// The kernel refuses something.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// What was to be done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file is another, or has other bytes or metadata, than a moment before.
    #[error("{} changed while it was read", .0.display())]
    Changed(PathBuf),
    /// The bytes of a file could not be put where they should.
    #[error("cannot store {}", .path.display())]
    Put {
        /// The file.
        path: PathBuf,
        /// Why.
        source: PutError,
    },
    /// A file that no tree can hold.
    #[error("cannot add {} to the tree", .path.display())]
    Tree {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TreeError,
    },
}

/// What the caller's way of storing a file answers when it fails.
pub type PutError = Box<dyn Error + Send + Sync>;

/// The tree below `directory`, whose `path` is only for messages. `put` is called for each regular file that is longer
/// than `inline_max`, on several threads at once: it puts the bytes where they should be, if anywhere, and answers with
/// their digest ([`Source::digest`]). Files with several names are put once for each with [`Hardlinks::Split`].
///
/// The tree is the same whatever the order of the directory's entries and the number of threads.
///
/// # Errors
/// [`WalkError`], which names the file. What was put before stays where it is.
pub fn tree(
    directory: BorrowedFd<'_>,
    path: &Path,
    options: &Options,
    put: impl Fn(&mut Source<'_>) -> Result<ObjectId, PutError> + Sync,
) -> Result<Tree, WalkError> {
    scan::scan(directory, path, options, &put)
}
