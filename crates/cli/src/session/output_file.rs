//! Output of verbs: a file that is written completely or not at all, or standard output.

use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use transfer::export::Output;

use crate::output::report;
use crate::session::context::{Context, Outside};
use crate::session::target::check_directory;

/// Checks that an export can be written to this output.
pub(crate) fn check_output(context: &Context, output: &Output, force: bool) -> anyhow::Result<()> {
    match output {
        Output::Stdout if context.json => {
            bail!(
                "--json prints to standard output, where the export would be written as well: \
                name a file"
            )
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
    let failed = || format!("cannot write {}", path.display());
    // Overwrite the target of a symlink, not the symlink.
    let path = match path.canonicalize() {
        Ok(real) => real,
        Err(_) => path.clone(),
    };
    let parent = parent(&path);
    let outside = |error| Outside::File(parent.clone()).note(error);
    // Keep only the system's error: tempfile adds the path of the temporary file, which the user did not name.
    let mut refused = None;
    let draft = tempfile::Builder::new().prefix(".quire-export-").make_in(&parent, |path| {
        // The output has the contents of all files, including those that only root may read in the image.
        let made = File::options().read(true).write(true).create_new(true).mode(0o600).open(path);
        made.inspect_err(|error| refused = error.raw_os_error())
    });
    let draft = draft
        .map_err(|error| refused.map_or(error, io::Error::from_raw_os_error))
        .with_context(failed)
        .map_err(outside)?;
    let mut out = std::io::BufWriter::with_capacity(1 << 20, draft.as_file());
    let done = write(&mut out).map_err(outside)?;
    let written = out.into_inner().map_err(std::io::IntoInnerError::into_error);
    written.with_context(failed).map_err(outside)?;
    committing();
    draft.as_file().sync_all().with_context(failed).map_err(outside)?;
    let published = match force {
        true => draft.persist(&path),
        false => draft.persist_noclobber(&path),
    };
    published.map_err(|error| error.error).with_context(failed).map_err(outside)?;
    File::open(&parent).and_then(|it| it.sync_all()).with_context(failed)?;
    Ok(done)
}

/// Returns the parent directory of a file.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
