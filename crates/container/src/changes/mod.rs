//! A container's changes against its image, as the tar of an OCI layer.
//!
//! Only the upper layer is walked. The upper layer may refer to the image, for a renamed directory, or for a file of
//! which only the metadata has changed. Such references are looked up in the image's tree, and the content comes from
//! the store. The container controls all names, xattrs and bytes of the upper layer. So the walk follows no links, and
//! opens only regular files and directories. The depth of the walk is limited by the length of paths, and does not
//! need more descriptors.
//!
//! The same upper layer gives the same bytes: directories before their entries, names in byte order, whiteouts first.

mod content;
mod ids;
pub(crate) mod marks;
mod read;
mod walk;

use std::io::{self, BufWriter, ErrorKind, PipeReader, Write};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;

use image::erofs::read::PATH_MAX;
use image::tar::write::TarWriteError;
use image::tree::{Timestamp, Tree};
use image::verity::ObjectId;
use store::{ObjectLookupError, Store};

pub use ids::{Owners, Unmapped};

/// An upper layer to read.
#[derive(Debug, Clone, Copy)]
pub struct Upper<'a> {
    /// Directory of the upper layer.
    pub directory: BorrowedFd<'a>,
    /// Tree of the image below the upper layer.
    pub image: &'a Tree,
    /// Store with the data of the image's files.
    pub store: &'a Store,
    /// Map of the owners to the container's ids.
    pub ids: &'a Owners,
    /// Latest modification time in the layer; later times are replaced by this one.
    pub latest: Option<Timestamp>,
    /// Set by another thread to stop soon, with [`ChangesError::Cancelled`].
    pub cancel: &'a AtomicBool,
}

/// Figures of a written layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of members in the tar.
    pub entries: u64,
    /// Size of the tar, in bytes.
    pub bytes: u64,
    /// Paths of sockets, which are left out because a tar cannot contain them.
    pub skipped: Vec<Vec<u8>>,
}

/// Reason why a layer cannot be written. Paths are those in the container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangesError {
    /// The kernel refuses an operation.
    #[error("cannot {action} \"{}\" of the container", path.escape_ascii())]
    Io {
        /// Action that failed.
        action: &'static str,
        path: Vec<u8>,
        source: io::Error,
    },
    /// A file was replaced, or its data or metadata changed during the read.
    #[error("\"{}\" of the container changed during the read", .0.escape_ascii())]
    Changed(Vec<u8>),
    /// The name has a special meaning in a layer.
    #[error(
        "\"{}\" of the container has a name that marks removed files in a layer: rename or remove \
        it",
        .0.escape_ascii()
    )]
    Name(Vec<u8>),
    /// The path is too long.
    #[error("\"{}…\" of the container has a path of more than {PATH_MAX} bytes", .0.escape_ascii())]
    Path(Vec<u8>),
    /// The owner is not in the container's map.
    #[error("cannot determine the owner of \"{}\"", path.escape_ascii())]
    Owner { path: Vec<u8>, source: Unmapped },
    /// A mark of overlayfs refers to a file that does not exist.
    #[error("\"{}\" has only metadata, and refers to the content of \"{}\" in the image, which \
        has no such file",
        path.escape_ascii(), from.escape_ascii())]
    Redirect {
        path: Vec<u8>,
        /// Path in the image that should have the data.
        from: Vec<u8>,
    },
    /// A file of the image cannot be read.
    #[error("cannot read the content of \"{}\" from the image", path.escape_ascii())]
    Object { path: Vec<u8>, source: ObjectError },
    /// A member cannot be written.
    #[error("cannot write the layer")]
    Write(#[source] TarWriteError),
    /// The pipe between the reader and the consumer of the changes cannot be created.
    #[error("cannot make a pipe")]
    Pipe(#[source] io::Error),
    /// The caller has cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Reason why the data of a file of the image cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The image does not name the object.
    #[error("the image does not name its object")]
    Unnamed,
    /// The object is not in the store.
    #[error(transparent)]
    Lookup(#[from] ObjectLookupError),
    /// The object cannot be read.
    #[error("cannot read object {0}")]
    Read(ObjectId, #[source] io::Error),
    /// The object is damaged.
    #[error("object {0} is damaged: run `quire fsck`")]
    Damaged(ObjectId),
}

/// Writes the layer.
///
/// # Errors
/// [`ChangesError`]; the tar in `out` is incomplete then.
pub fn write(upper: &Upper<'_>, out: &mut dyn Write) -> Result<Report, ChangesError> {
    walk::walk(upper, out)
}

/// Runs `write` on another thread, while `take` reads the tar to its end.
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
            // The consumer failed first, and its error is the cause.
            (Err(error), Err(cause)) if is_unread(&error) => Err(cause),
            (Err(error), _) => Err(error.into()),
            (Ok(report), Ok(taken)) => Ok((report, taken)),
            (Ok(_), Err(error)) => Err(error),
        }
    })
}

fn is_unread(error: &ChangesError) -> bool {
    matches!(error, ChangesError::Write(TarWriteError::Write(error)) if error.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests;
