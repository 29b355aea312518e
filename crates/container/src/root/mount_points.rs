//! Files and directories that a root has to have, for others to be mounted on them.

use std::os::fd::BorrowedFd;

use crate::bundle::Access;
use crate::bundle::view::{FilePlace, View};
use crate::root::upper::UpperError;

/// Returns which of these files an image lacks, where its links lead: paths without links. Paths of directories end with a
/// slash. A file that meets one of the `claimed` paths, and is none of them itself, is left out.
///
/// # Errors
/// An error of the kernel.
pub(crate) fn missing(
    image: BorrowedFd<'_>,
    claimed: &[&str],
    files: &[&str],
) -> Result<Vec<String>, UpperError> {
    let view = View::of_root(image, Access::ReadOnly);
    // A path has precedence over those that follow.
    let mut before = view.places(&[claimed, files].concat())?;
    let places = before.split_off(claimed.len());
    let absent = files.iter().zip(places).filter_map(|(file, place)| match place {
        FilePlace::Absent(_) if before.contains(&place) && !claimed.contains(file) => None,
        FilePlace::Absent(path) => Some(path),
        FilePlace::At(_) | FilePlace::Taken => None,
    });
    Ok(absent.collect())
}

/// Whether one of the `files` that an image has, or that were added to it, is where one of the `claimed` paths leads, or above
/// that.
///
/// # Errors
/// An error of the kernel.
pub(crate) fn meets(
    image: BorrowedFd<'_>,
    claimed: &[&str],
    files: &[&str],
) -> Result<bool, UpperError> {
    let view = View::of_root(image, Access::ReadOnly);
    let mut places = Vec::new();
    for file in files.iter().filter(|it| !claimed.contains(it)) {
        places.push(view.place(file)?);
    }
    for path in claimed {
        let place = view.place(path)?;
        // Nothing is below a file, so a path that leads there is taken.
        if place == FilePlace::Taken || places.contains(&place) {
            return Ok(true);
        }
    }
    Ok(false)
}
