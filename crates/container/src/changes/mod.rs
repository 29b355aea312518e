//! A container's changes against its image, as the tar of an OCI layer.
//!
//! Only the upper layer is walked. It may refer to the image, for a renamed directory or a file with new metadata only.
//! Such references are looked up in the image's tree, and the content comes from the store. The container controls all
//! names, xattrs and bytes of the upper layer. So no link is followed, and only regular files are opened. Depth costs
//! no descriptors, and ends where paths do.
//!
//! The same upper layer gives the same bytes: directories before their entries, names in byte order, whiteouts first.

mod content;
mod ids;
mod marks;
mod read;
mod walk;

use std::io::{self, BufWriter, ErrorKind, PipeReader, Write};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;

use image::erofs::read::PATH_MAX;
use image::tar::write::WriteError;
use image::tree::{Timestamp, Tree};
use image::verity::ObjectId;
use store::{LookupError, Store};

pub use ids::{Owners, Unmapped};

/// The layer to read.
#[derive(Debug, Clone, Copy)]
pub struct Upper<'a> {
    /// The upper layer's directory.
    pub directory: BorrowedFd<'a>,
    /// The tree of the image below.
    pub image: &'a Tree,
    /// Where the image's files have their bytes.
    pub store: &'a Store,
    /// Whose numbers the owners are.
    pub ids: &'a Owners,
    /// The latest time that a file of the layer may have: later ones become this one.
    pub latest: Option<Timestamp>,
    /// Set to end soon, with [`ChangesError::Cancelled`].
    pub cancel: &'a AtomicBool,
}

/// Figures of the layer that was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Members of the tar.
    pub entries: u64,
    /// Bytes of the tar.
    pub bytes: u64,
    /// Sockets, which no tar can hold: left out.
    pub skipped: Vec<Vec<u8>>,
}

/// A layer could not be written. Paths are the container's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangesError {
    /// The kernel refuses something.
    #[error("cannot {action} \"{}\" of the container", path.escape_ascii())]
    Io {
        /// Action that failed.
        action: &'static str,
        /// The file.
        path: Vec<u8>,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file is another, or has other bytes or metadata, than a moment before.
    #[error("\"{}\" of the container changed while it was read", .0.escape_ascii())]
    Changed(Vec<u8>),
    /// In a layer the name would mean something else.
    #[error(
        "\"{}\" of the container has a name that means \"removed\" in a layer: rename or remove it",
        .0.escape_ascii()
    )]
    Name(Vec<u8>),
    /// A path that is too long.
    #[error("\"{}…\" of the container has a path of more than {PATH_MAX} bytes", .0.escape_ascii())]
    Path(Vec<u8>),
    /// Its owner is not in the container's map.
    #[error("cannot tell the owner of \"{}\"", path.escape_ascii())]
    Owner {
        /// The file.
        path: Vec<u8>,
        /// Who.
        source: Unmapped,
    },
    /// A mark of overlayfs's leads nowhere.
    #[error("\"{}\" has only metadata, and its content should be that of \"{}\" in the image, which has no such file",
        path.escape_ascii(), from.escape_ascii())]
    Redirect {
        /// The file.
        path: Vec<u8>,
        /// Where its bytes should be.
        from: Vec<u8>,
    },
    /// A file of the image cannot be read.
    #[error("cannot read the content of \"{}\" from the image", path.escape_ascii())]
    Object {
        /// The file.
        path: Vec<u8>,
        /// Why.
        source: ObjectError,
    },
    /// A member cannot be written.
    #[error("cannot write the layer")]
    Write(#[source] WriteError),
    /// No pipe could be made between the reader and the taker of the changes.
    #[error("cannot make a pipe")]
    Pipe(#[source] io::Error),
    /// As asked for.
    #[error("cancelled")]
    Cancelled,
}

/// Why the bytes of a file of the image cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The image does not say which object it is.
    #[error("the image does not name its object")]
    Unnamed,
    /// It is not in the store.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The disk.
    #[error("cannot read object {0}")]
    Read(ObjectId, #[source] io::Error),
    /// It is damaged.
    #[error("object {0} is damaged: run `quire fsck`")]
    Damaged(ObjectId),
}

/// Writes the layer.
///
/// # Errors
/// [`ChangesError`]; `out` has an incomplete tar then.
pub fn write(upper: &Upper<'_>, out: &mut dyn Write) -> Result<Report, ChangesError> {
    walk::walk(upper, out)
}

/// Has `write` write the layer on another thread, and gives the tar to `take` meanwhile, which reads it to its end.
///
/// # Errors
/// [`ChangesError`], and the errors of `take`.
pub fn through<T, E: From<ChangesError>>(
    write: impl FnOnce(&mut dyn Write) -> Result<Report, ChangesError> + Send,
    take: impl FnOnce(PipeReader) -> Result<T, E>,
) -> Result<(Report, T), E> {
    let (reader, writer) = io::pipe().map_err(ChangesError::Pipe)?;
    std::thread::scope(|scope| {
        let writing = scope.spawn(move || write(&mut BufWriter::with_capacity(256 << 10, writer)));
        let taken = take(reader);
        let written = match writing.join() {
            Ok(written) => written,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        match (written, taken) {
            // Whoever takes it had enough of it first.
            (Err(error), Err(cause)) if is_unread(&error) => Err(cause),
            (Err(error), _) => Err(error.into()),
            (Ok(report), Ok(taken)) => Ok((report, taken)),
            (Ok(_), Err(error)) => Err(error),
        }
    })
}

fn is_unread(error: &ChangesError) -> bool {
    matches!(error, ChangesError::Write(WriteError::Write(error)) if error.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests;
