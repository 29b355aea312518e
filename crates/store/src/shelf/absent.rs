//! `absent/`: what overlayfs finds in the place of an object that is gone. See `docs/format/object-store.md`, "Objects
//! that vanish".

use rustix::fs::{FileType, Mode};

use crate::disk::{Directory, DiskError};

/// The directory.
pub(crate) const ABSENT: &str = "absent";

/// All users whom a store is shared with look through it.
const READABLE: Mode = Mode::from_raw_mode(0o755);

fn names() -> impl Iterator<Item = String> {
    (0..=u8::MAX).map(|it| format!("{it:02x}"))
}

/// Makes what is missing of it. Nothing is synced: [`open`] finds out what a crash has taken.
pub(crate) fn make(root: &Directory) -> Result<(), DiskError> {
    root.make(ABSENT, READABLE)?;
    let directory = root.open(ABSENT)?;
    // Each leads to itself: nobody gets anywhere by it.
    names().try_for_each(|name| directory.link_to_itself(&name))
}

/// The directory, if it is whole: an overlay that finds no entry in it shows the file as absent.
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

/// Where a directory does not say what is in it.
fn is_symlink(directory: &Directory, name: &str) -> bool {
    let stat = directory.stat(name).ok().flatten();
    stat.is_some_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::Symlink)
}
