//! Files and directories that a root has to have, for others to be mounted on them.

use std::os::fd::BorrowedFd;

use crate::bundle::Access;
use crate::bundle::view::{FilePlace, View};
use crate::root::upper::UpperError;

/// Which files an image lacks, where its links lead: paths without links. Paths of directories end with a slash.
///
/// # Errors
/// An error of the kernel.
pub(crate) fn missing(image: BorrowedFd<'_>, files: &[&str]) -> Result<Vec<String>, UpperError> {
    let view = View::of_root(image, Access::ReadOnly);
    let absent = view.places(files)?.into_iter().filter_map(|place| match place {
        FilePlace::Absent(path) => Some(path),
        FilePlace::At(_) | FilePlace::Taken => None,
    });
    Ok(absent.collect())
}
