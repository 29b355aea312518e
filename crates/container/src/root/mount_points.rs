//! Files and directories that a root must have as mount points.

use std::os::fd::BorrowedFd;

use crate::bundle::Access;
use crate::bundle::path_resolver::{FilePlace, View};
use crate::root::upper_dir::UpperError;

/// Returns the `files` that an image lacks, as paths without links. Paths of directories end with a slash. If a file
/// has another path than a `claimed` one, but resolves to the same place, it is left out.
pub(crate) fn missing(
    image: BorrowedFd<'_>,
    claimed: &[&str],
    files: &[&str],
) -> Result<Vec<String>, UpperError> {
    let view = View::of_root(image, Access::ReadOnly);
    // If two paths lead to the same place, the earlier one is used.
    let mut before = view.places(&[claimed, files].concat())?;
    let places = before.split_off(claimed.len());
    let absent = files.iter().zip(places).filter_map(|(file, place)| match place {
        FilePlace::Absent(_) if before.contains(&place) && !claimed.contains(file) => None,
        FilePlace::Absent(path) => Some(path),
        FilePlace::At(_) | FilePlace::Taken => None,
    });
    Ok(absent.collect())
}

/// Whether one of the `files`, which are in an image or were added to it, is at or above the place of one of the
/// `claimed` paths.
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
        // A path below a file is reported as taken.
        if place == FilePlace::Taken || places.contains(&place) {
            return Ok(true);
        }
    }
    Ok(false)
}
