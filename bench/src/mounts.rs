//! Mounts below the bench's folder.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::mount::{UnmountFlags, unmount};

/// Unmounts everything that is mounted at or below a folder, the last mount first.
pub(super) fn unmount_all(folder: &Path) -> Result<()> {
    let targets = mounts()?;
    for target in targets.iter().rev().filter(|it| it.starts_with(folder)) {
        let unmounted = unmount(target, UnmountFlags::empty());
        unmounted.with_context(|| format!("cannot unmount {}", target.display()))?;
    }
    Ok(())
}

/// Detaches everything that is mounted at or below a folder, even if it is still in use.
pub(super) fn detach_all(folder: &Path) -> Result<()> {
    for target in mounts()?.iter().rev().filter(|it| it.starts_with(folder)) {
        // A mount on top of another mount was detached with it.
        let _gone = unmount(target, UnmountFlags::DETACH);
    }
    Ok(())
}

/// Whether something is mounted at this path.
pub(super) fn is_mounted(target: &Path) -> Result<bool> {
    Ok(mounts()?.iter().any(|it| it == target))
}

/// Mount points, in the order of their mounts.
pub(super) fn mounts() -> Result<Vec<PathBuf>> {
    let mounts = fs::read("/proc/self/mounts")?;
    let targets =
        mounts.split(|it| *it == b'\n').filter_map(|it| it.split(|it| *it == b' ').nth(1));
    Ok(targets.map(|it| PathBuf::from(OsStr::from_bytes(it))).collect())
}
