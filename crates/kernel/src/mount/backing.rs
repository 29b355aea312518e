//! How far the kernel reads ahead in the files of a file system that has no block device.
//!
//! It is a number of the file system's *backing device info*, `/sys/class/bdi/NAME/read_ahead_kb` (the kernel's
//! `Documentation/ABI/testing/sysfs-class-bdi`). Nothing says which name a mount has, so it is the one that came up with it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

const BACKINGS: &str = "/sys/class/bdi";
/// How many KiB the kernel reads ahead unless somebody says otherwise. Source: `VM_READAHEAD_PAGES` in Linux
/// `include/linux/mm.h`.
const USUAL: u32 = 128;

/// The most KiB that Quire reads ahead in the files of a native image: `docs/performance/README.md` says what more does.
pub const NATIVE_READ_AHEAD_MAX: u32 = 512;

/// Returns the read-ahead for native images whose data is in this file, in KiB: that of the file's disk, up to
/// [`NATIVE_READ_AHEAD_MAX`]. `None` for the kernel's default, and if the disk's is unknown.
#[must_use]
pub fn native_read_ahead(data: BorrowedFd<'_>) -> Option<u32> {
    let kilobytes = disk_read_ahead(data)?.min(NATIVE_READ_AHEAD_MAX);
    (kilobytes != USUAL).then_some(kilobytes)
}

/// How many KiB the kernel reads ahead on the disk that a file is on.
fn disk_read_ahead(file: BorrowedFd<'_>) -> Option<u32> {
    let device = rustix::fs::fstat(file).ok()?.st_dev;
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let disk = Path::new("/sys/dev/block").join(&number);
    // A partition has the queue of its disk, whose folder it is in. Without a block device there is the backing itself.
    let places = [
        disk.join("queue/read_ahead_kb"),
        disk.join("../queue/read_ahead_kb"),
        Path::new(BACKINGS).join(&number).join("read_ahead_kb"),
    ];
    let text = places.iter().find_map(|place| fs::read_to_string(place).ok())?;
    text.trim().parse().ok()
}

/// Has what `mount` mounts read this many KiB ahead, if that can be done and it can be told which one it is: not without
/// `/sys`, without the right to write there, or when somebody else mounts such a file system at the same time. Answers
/// whether it was done.
pub(super) fn with_read_ahead<T, E>(
    prefix: &str,
    kilobytes: u32,
    mount: impl FnOnce() -> Result<T, E>,
) -> Result<(T, bool), E> {
    // Two threads would otherwise see two new ones each.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = named(prefix);
    let mounted = mount()?;
    // How far is read ahead changes no byte: a mount is as good without.
    let mut is_done = false;
    if let (Ok(before), Ok(after)) = (before, named(prefix)) {
        let mut new = after.difference(&before);
        if let (Some(backing), None) = (new.next(), new.next()) {
            let file = Path::new(BACKINGS).join(backing).join("read_ahead_kb");
            is_done = fs::write(file, kilobytes.to_string()).is_ok();
        }
    }
    Ok((mounted, is_done))
}

fn named(prefix: &str) -> io::Result<BTreeSet<OsString>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(BACKINGS)? {
        let name = entry?.file_name();
        if name.as_encoded_bytes().starts_with(prefix.as_bytes()) {
            found.insert(name);
        }
    }
    Ok(found)
}
