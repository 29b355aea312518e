//! Reads a directory on disk into a tree.
//!
//! The directory is walked by descriptors: symlinks are not followed, and each entry describes the file that was
//! opened. Several threads read regular files, a few at a time. A change during the walk is an error if the kernel's
//! time stamps show it. `docs/format/tree.md` has the rules.

mod scan;
mod source;

#[cfg(test)]
mod tests;

use std::error::Error;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use image::tree::Tree;
use image::verity::ObjectId;

use crate::operation::OperationError;

pub use source::{FilePart, FileReader, FileStamp, parts};

/// Maximum length in bytes of a file stored inside a composefs image that is made from a directory. Source:
/// `mkcomposefs`.
pub const COMPOSEFS_INLINE_MAX: u64 = 64;

/// Options of [`tree`].
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub hardlinks: Hardlinks,
    pub xattrs: KeptXattrs,
    pub times: Times,
    /// Whether device nodes are kept.
    pub devices: Devices,
    /// Maximum length in bytes of a file whose bytes are stored in the tree. Longer files are passed to `put`.
    pub inline_max: u64,
    /// Number of threads that read files.
    pub threads: NonZeroUsize,
}

/// Treatment of files with several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hardlinks {
    /// The names stay hard links of one file.
    Keep,
    /// Each name becomes a separate file, as with `mkcomposefs`.
    Split,
}

/// The xattrs that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptXattrs {
    /// All xattrs that this process can see.
    All,
    /// Only xattrs whose names begin with `user.`.
    UserOnly,
    /// All xattrs are left out.
    None,
}

/// The times that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Times are kept unchanged.
    Exact,
    /// Times are truncated to whole seconds.
    WholeSeconds,
    /// All times become 0.
    Epoch,
}

/// Whether character and block devices are kept, including overlayfs whiteouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    Keep,
    Skip,
}

/// An error while a directory is read into a tree.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalkError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A file, its bytes or its metadata changed during the walk.
    #[error("{} changed while it was read", .0.display())]
    Changed(PathBuf),
}

/// The error of the caller's `put`.
pub type PutError = Box<dyn Error + Send + Sync>;

/// Returns the tree of `directory`. `path` is used only in messages. `put` is called for each regular file that is
/// longer than `inline_max`, on several threads at once. It may store the bytes, and must return their digest
/// ([`FileReader::digest`]). With [`Hardlinks::Split`] it is called once for each name of a file.
///
/// The tree does not depend on the order of the directory's entries or on the number of threads.
///
/// # Errors
/// [`WalkError`], which names the file. Earlier calls of `put` are not undone.
pub fn tree(
    directory: BorrowedFd<'_>,
    path: &Path,
    options: &Options,
    put: impl Fn(&mut FileReader<'_>) -> Result<ObjectId, PutError> + Sync,
) -> Result<Tree, WalkError> {
    scan::scan(directory, path, options, &put)
}
