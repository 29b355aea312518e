//! Output of verbs: a file that is written completely or not at all, or standard output.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use kernel::files::NameOutcome;
use rustix::fs::AtFlags;
use rustix::io::Errno;
use tempfile::TempPath;
use transfer::export::Output;

use crate::output::report;
use crate::session::context::{Context, Outside};
use crate::session::failure::UsageError;
use crate::session::target::check_directory;

/// Checks that an export can be written to this output.
pub(crate) fn check_output(context: &Context, output: &Output, force: bool) -> anyhow::Result<()> {
    match output {
        Output::Stdout if context.json => {
            let reason = "--json prints to standard output, where the export would be written as \
                well: name a file";
            Err(UsageError(reason.to_owned()).into())
        }
        Output::Stdout if std::io::stdout().is_terminal() => {
            bail!("standard output is a terminal: redirect it, or name a file")
        }
        Output::Stdout => Ok(()),
        Output::File(path) => match path.metadata() {
            Ok(found) if !found.is_file() => bail!(
                "{} is not a regular file: write to - and redirect standard output",
                path.display()
            ),
            Ok(_) if !force => {
                bail!("{} already exists: --force overwrites it", path.display())
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => check_directory(&parent(path)),
            // Writing the file will report the error.
            Err(_) => Ok(()),
        },
    }
}

/// Lets `write` write standard output, or a file that appears completely or not at all. `committing` is called
/// between writing and publishing the file.
pub(crate) fn output<T>(
    file: &Output,
    force: bool,
    write: impl FnOnce(&mut dyn Write) -> anyhow::Result<T>,
    committing: impl FnOnce(),
) -> anyhow::Result<T> {
    let path = match file {
        Output::Stdout => {
            let written = write(&mut report::standard_output());
            return written.map_err(|error| Outside::Stdout.note(error));
        }
        Output::File(path) => path,
    };
    let write = |file: &File| -> anyhow::Result<T> {
        let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
        let done = write(&mut out)?;
        let written = out.into_inner().map_err(std::io::IntoInnerError::into_error);
        written.with_context(|| cannot_write(path))?;
        Ok(done)
    };
    to_file(path, force, write, committing)
}

/// As [`output`], for a file, in which `write` can go back.
pub(crate) fn to_file<T>(
    path: &Path,
    force: bool,
    write: impl FnOnce(&File) -> anyhow::Result<T>,
    committing: impl FnOnce(),
) -> anyhow::Result<T> {
    let failed = || cannot_write(path);
    // Overwrite the target of a symlink, not the symlink.
    let path = match path.canonicalize() {
        Ok(real) => real,
        Err(_) => path.to_owned(),
    };
    let parent = parent(&path);
    let outside = |error| Outside::File(parent.clone()).note(error);
    let draft = Draft::new(&parent).with_context(failed).map_err(outside)?;
    let done = write(&draft.file).map_err(outside)?;
    committing();
    draft.file.sync_all().with_context(failed).map_err(outside)?;
    draft.publish(&path, force).with_context(failed).map_err(outside)?;
    File::open(&parent).and_then(|it| it.sync_all()).with_context(failed)?;
    Ok(done)
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Returns the parent directory of a file.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Prefix of temporary files next to an output.
const PREFIX: &str = ".quire-export-";
/// Directory of this process's descriptors, through which an open file gets a name.
const OPEN_FILES: &str = "/proc/self/fd";
/// Mode of an output. The kernel clears the bits of the caller's umask, as for the files of any other program.
const MODE: u32 = 0o666;

/// A file that has no name yet, so that nothing is left of it if this process is killed. It has a temporary name if
/// [`unnamed`] makes no file.
struct Draft {
    folder: File,
    file: File,
    name: Option<TempPath>,
}

impl Draft {
    fn new(parent: &Path) -> io::Result<Self> {
        let folder = File::open(parent)?;
        match unnamed(folder.as_fd(), MODE)? {
            Some(file) => Ok(Self { folder, file, name: None }),
            None => Self::with_name(folder, parent),
        }
    }

    fn with_name(folder: File, parent: &Path) -> io::Result<Self> {
        // Only the system's error is kept, because tempfile adds the path of the temporary file, which the user does
        // not know.
        let mut refused = None;
        let made = tempfile::Builder::new().prefix(PREFIX).make_in(parent, |path| {
            let made =
                File::options().read(true).write(true).create_new(true).mode(MODE).open(path);
            made.inspect_err(|error| refused = error.raw_os_error())
        });
        let name = made.map_err(|error| refused.map_or(error, io::Error::from_raw_os_error))?;
        let (file, name) = name.into_parts();
        Ok(Self { folder, file, name: Some(name) })
    }

    fn publish(self, to: &Path, force: bool) -> io::Result<()> {
        let Self { folder, file, name } = self;
        match (name, force) {
            (Some(name), true) => name.persist(to).map_err(|error| error.error),
            (Some(name), false) => name.persist_noclobber(to).map_err(|error| error.error),
            (None, force) => {
                let name = to.file_name().ok_or(Errno::ISDIR)?;
                match kernel::files::link(file.as_fd(), folder.as_fd(), name)? {
                    NameOutcome::Now => Ok(()),
                    NameOutcome::Taken if !force => Err(Errno::EXIST.into()),
                    NameOutcome::Taken => Ok(replace(file.as_fd(), folder.as_fd(), name, PREFIX)?),
                }
            }
        }
    }
}

/// Makes a file without a name that can get one later. Returns `None` if that is impossible: some kernels and file
/// systems have no unnamed files, and the link that gives a file its name goes through `/proc`, which may not be
/// mounted.
pub(crate) fn unnamed(folder: BorrowedFd<'_>, mode: u32) -> Result<Option<File>, Errno> {
    if !Path::new(OPEN_FILES).is_dir() {
        return Ok(None);
    }
    match kernel::files::unnamed(folder, mode) {
        Ok(file) => Ok(Some(file.into())),
        // Source: open(2), O_TMPFILE.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives an unnamed file the name of an existing file, which it replaces. Only a rename can do that, and only a file
/// with a name can be renamed, so the file first gets a temporary name that begins with `prefix`.
pub(crate) fn replace(
    file: BorrowedFd<'_>,
    folder: BorrowedFd<'_>,
    name: &OsStr,
    prefix: &str,
) -> Result<(), Errno> {
    let mut number = std::process::id();
    let mut draft = format!("{prefix}{number}");
    while kernel::files::link(file, folder, &draft)? == NameOutcome::Taken {
        number = number.wrapping_add(1);
        draft = format!("{prefix}{number}");
    }
    let renamed = rustix::fs::renameat(folder, &draft, folder, name);
    if renamed.is_err() {
        // A failed removal is ignored, because the first error is returned.
        let _left = rustix::fs::unlinkat(folder, &draft, AtFlags::empty());
    }
    renamed
}
