//! Removes files of a copy.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::{AtFlags, Mode, openat, unlinkat};
use rustix::io::Errno;

use super::entry::{DIRECTORY, list, parent};

/// Removes a name, with everything below it if it is a directory of any depth. Only this process uses the directory.
pub(super) fn remove(directory: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        result => return result,
    }
    let mut buffer = Vec::new();
    let mut here = openat(directory, name, DIRECTORY, Mode::empty())?;
    // Subdirectories that are left, for each directory on the path to the current one.
    let mut levels = vec![clear(here.as_fd(), &mut buffer)?];
    loop {
        let Some(left) = levels.last_mut() else {
            return unlinkat(directory, name, AtFlags::REMOVEDIR);
        };
        if let Some(name) = left.last() {
            here = openat(&here, &**name, DIRECTORY, Mode::empty())?;
            levels.push(clear(here.as_fd(), &mut buffer)?);
            continue;
        }
        levels.pop();
        if let Some(name) = levels.last_mut().and_then(Vec::pop) {
            here = parent(here.as_fd())?;
            unlinkat(&here, &*name, AtFlags::REMOVEDIR)?;
        }
    }
}

/// Removes all files of a directory that are not directories, and returns the names of the others.
fn clear(directory: BorrowedFd<'_>, buffer: &mut Vec<u8>) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    list(
        directory,
        buffer,
        |errno| errno,
        |name| {
            names.push(name.to_owned());
            Ok(())
        },
    )?;
    let mut directories = Vec::new();
    for name in names {
        match unlinkat(directory, &*name, AtFlags::empty()) {
            Err(Errno::ISDIR) => directories.push(name),
            result => result?,
        }
    }
    Ok(directories)
}
