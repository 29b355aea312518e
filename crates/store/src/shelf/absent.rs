//! The directory `absent/`, in which overlayfs finds a symlink loop instead of a missing object. See
//! `docs/format/object-store.md`, "Objects that vanish".

use rustix::fs::{FileType, Mode};

use crate::disk::{Directory, DiskError};

pub(crate) const ABSENT: &str = "absent";

/// All users of a shared store look up names in it.
const READABLE: Mode = Mode::from_raw_mode(0o755);

fn names() -> impl Iterator<Item = String> {
    (0..=u8::MAX).map(|it| format!("{it:02x}"))
}

/// Creates the missing entries of the directory. They are not synced, because [`open`] detects entries that a crash
/// has lost.
pub(crate) fn make(root: &Directory) -> Result<(), DiskError> {
    root.make(ABSENT, READABLE)?;
    let directory = root.open(ABSENT)?;
    // Each symlink points to itself, so a lookup through it fails.
    names().try_for_each(|name| directory.link_to_itself(&name))
}

/// Opens the directory if it is complete. If an entry were missing, overlayfs would show the file as absent.
pub(crate) fn open(root: &Directory) -> Result<Option<Directory>, DiskError> {
    let Some(directory) = root.open_if_there(ABSENT)? else { return Ok(None) };
    let found = directory.list()?;
    let is_whole = found.len() == 256
        && names().zip(&found).all(|(name, it)| {
            it.name == name.as_bytes()
                && (it.kind == FileType::Symlink
                    || it.kind == FileType::Unknown && is_symlink(&directory, &name))
        });
    Ok(is_whole.then_some(directory))
}

/// Looks up the type of an entry, because the file system did not report it.
fn is_symlink(directory: &Directory, name: &str) -> bool {
    let stat = directory.stat(name).ok().flatten();
    stat.is_some_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::Symlink)
}
