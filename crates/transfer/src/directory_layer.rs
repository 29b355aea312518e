//! Imports a directory as an image of one layer, with a config and a manifest, so that it can have settings and be pushed.
//! An import of a directory by [`crate::import`] has none of these.
//!
//! The directory is read once, into objects of the store. The layer is the tar of these objects, which are verified
//! while it is written, so that a file that changes during the import cannot differ between the image and the layer.

use std::io::{self, BufWriter, PipeReader, Read, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use oci::source::ImageSource;
use store::{Form, RefName, Store, TransactionError};

use crate::export::{self, ExportError};
use crate::import::{self, ImportContext, ImportError, ImportOptions, Report};

/// Capacity of the buffer between the tar and its import, in bytes.
const BUFFER: usize = 1 << 20;

/// Why an import failed. The store is unchanged, except that files of the directory may stay until `gc`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryLayerError {
    #[error("cannot begin the import")]
    Begin(#[from] TransactionError),
    #[error(transparent)]
    Import(Box<ImportError>),
    /// The layer cannot be written.
    #[error("cannot make a layer of the directory")]
    Layer(#[source] Box<ExportError>),
    #[error("cannot make a pipe")]
    Pipe(#[source] io::Error),
}

impl From<ImportError> for DirectoryLayerError {
    fn from(error: ImportError) -> Self {
        Self::Import(Box::new(error))
    }
}

/// Imports a directory. The changes of the options make its config.
///
/// # Errors
/// [`DirectoryLayerError`]
pub fn import_directory(
    store: &Store,
    directory: &Path,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, DirectoryLayerError> {
    // From here on, `gc` keeps the files.
    let keeper = store.begin()?;
    let source = ImageSource::Directory(directory.to_owned());
    let plain = ImportOptions {
        name: None,
        unnamed: true,
        keeper: Some(&keeper),
        index: false,
        form: Form::Objects,
        ..*options
    };
    let files = import::import(store, &source, environment, &plain)?;
    let own_name: Option<RefName> = match options.unnamed {
        true => None,
        false => source.default_name(None).and_then(|it| it.parse().ok()),
    };
    let layered = ImportOptions {
        name: options.name.or(own_name.as_ref()),
        keeper: Some(&keeper),
        ..*options
    };
    let export_options = export::Options {
        threads: environment.threads,
        scratch: environment.scratch,
        progress: &|_| (),
        cancel: environment.cancel,
    };
    let (reader, writer) = io::pipe().map_err(DirectoryLayerError::Pipe)?;
    let is_whole = AtomicBool::new(false);
    let (written, imported) = thread::scope(|scope| {
        let write = || {
            let mut out = BufWriter::with_capacity(BUFFER, writer);
            let (image, unsupported) = (&files.image, options.unsupported);
            let written = export::to_tar(store, image, &mut out, unsupported, &export_options)?;
            // The reader looks at this when the pipe is closed.
            is_whole.store(out.flush().is_ok(), Ordering::Release);
            Ok(written)
        };
        let writing = scope.spawn(write);
        let tar = WholeTar { pipe: reader, is_whole: &is_whole };
        let name = directory.display().to_string();
        let imported = import::import_tar(store, &name, tar, environment, &layered);
        let written: Result<_, ExportError> = match writing.join() {
            Ok(written) => written,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        (written, imported)
    });
    let mut report = match (imported, written) {
        (Ok(report), Ok(written)) => {
            let mut report = report;
            if let Some(layer) = report.layers.first_mut() {
                layer.skipped.extend(written.skipped);
            }
            report
        }
        // If the import fails first, the pipe is closed.
        (Err(_), Err(error)) if !is_closed_pipe(&error) => {
            return Err(DirectoryLayerError::Layer(Box::new(error)));
        }
        (Err(error), _) => return Err(error.into()),
        (Ok(_), Err(error)) => return Err(DirectoryLayerError::Layer(Box::new(error))),
    };
    // The second import found all files in the store.
    report.objects = files.objects;
    report.times.data += files.times.data + files.times.image + files.times.commit;
    Ok(report)
}

/// The reading end of a pipe. Its end is an error if the tar is not whole.
struct WholeTar<'a> {
    pipe: PipeReader,
    is_whole: &'a AtomicBool,
}

impl Read for WholeTar<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.pipe.read(bytes)?;
        if count == 0 && !bytes.is_empty() && !self.is_whole.load(Ordering::Acquire) {
            return Err(io::Error::other("the tar is not complete"));
        }
        Ok(count)
    }
}

fn is_closed_pipe(error: &ExportError) -> bool {
    let mut causes =
        std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.any(|it| {
        it.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tar_that_ends_early_is_an_error() {
        for is_whole in [true, false] {
            let (reader, mut writer) = io::pipe().unwrap();
            writer.write_all(b"tar").unwrap();
            drop(writer);
            let is_whole = AtomicBool::new(is_whole);
            let mut tar = WholeTar { pipe: reader, is_whole: &is_whole };
            let mut text = String::new();
            let read = tar.read_to_string(&mut text);
            assert_eq!((text.as_str(), read.is_ok()), ("tar", is_whole.load(Ordering::Relaxed)));
        }
    }
}
