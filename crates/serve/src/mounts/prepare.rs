//! Prepares the service: finds an unused user id for its processes, and opens the directory for copies.

use std::fs::{DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use kernel::process::UNUSED_IDS;
use rustix::io::Errno;

/// Source: `linux/magic.h`, TMPFS_MAGIC.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// All ids for the service's processes are in use.
    #[error(
        "serve --mounts: no user id is free for unprivileged processes: users, or ranges in \
        /etc/subuid, have all numbers from 2147418113 to 2147418368"
    )]
    NoUser,
    /// The directory cannot be created or opened.
    #[error("cannot {operation} {} for copies of images", path.display())]
    Directory {
        /// The step that failed.
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Other users can write to the directory.
    #[error(
        "{0} is for copies of images, but others can write to it: `chown root {0}; chmod 0700 \
        {0}`, or set `copies` below [mounts] to another directory"
    )]
    Open(String),
    /// The directory is on a tmpfs.
    #[error(
        "{0} is on a tmpfs, where the kernel cannot mount image files: set `copies` below \
        [mounts] to a directory on a disk"
    )]
    InMemory(String),
}

/// Finds a user and group id that this host does not use, so that other processes cannot kill those of the service.
/// `has_name` returns whether a database of users or groups (`passwd`, `group`) contains an id.
///
/// # Errors
/// [`PrepareError::NoUser`] if 256 ids are all in use.
pub fn unused_id(has_name: &dyn Fn(&str, u32) -> bool) -> Result<u32, PrepareError> {
    // The first id of the range is used by root's pasta.
    let mut ids = UNUSED_IDS.skip(1).take(256);
    let given: Vec<_> = ["/etc/subuid", "/etc/subgid"]
        .iter()
        .filter_map(|it| std::fs::read_to_string(it).ok())
        .flat_map(|text| given_ranges(&text))
        .collect();
    let is_unused = |id: &u32| {
        let is_given = given.iter().any(|it| it.contains(&u64::from(*id)));
        !is_given && !has_name("passwd", *id) && !has_name("group", *id)
    };
    ids.find(is_unused).ok_or(PrepareError::NoUser)
}

/// Parses the ranges in a file of subordinate ids. Source: subuid(5).
fn given_ranges(text: &str) -> Vec<Range<u64>> {
    let range = |line: &str| {
        let mut fields = line.split(':').skip(1).map(|it| it.trim().parse::<u64>().ok());
        let (first, count) = (fields.next()??, fields.next()??);
        Some(first..first.saturating_add(count))
    };
    text.lines().filter_map(range).collect()
}

/// Opens the directory for copies, and creates it if it is absent. Only root may write to it, and it must not be on a
/// tmpfs.
pub fn open_copies(path: &Path) -> Result<OwnedFd, PrepareError> {
    let failed = |operation| {
        let path = path.to_owned();
        move |source| PrepareError::Directory { operation, path, source }
    };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(failed("make"))?;
    let directory = File::open(path).map_err(failed("open"))?;
    let found = directory.metadata().map_err(failed("examine"))?;
    let shown = path.display().to_string();
    if found.uid() != 0 || found.mode() & 0o022 != 0 {
        return Err(PrepareError::Open(shown));
    }
    let system = rustix::fs::fstatfs(&directory).map_err(Errno::into).map_err(failed("examine"))?;
    if system.f_type == TMPFS_MAGIC {
        return Err(PrepareError::InMemory(shown));
    }
    Ok(directory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_users_are_no_ids_of_the_service() {
        let text = "me:100000:65536\nodd\n1000:2147418113:10\nx:y:1\n";
        assert_eq!(given_ranges(text), [100_000..165_536, 2_147_418_113..2_147_418_123]);
    }
}
