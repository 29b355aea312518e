//! Sets the read-ahead of file systems without a block device.
//!
//! The kernel keeps it in the file system's *backing device info*, `/sys/class/bdi/NAME/read_ahead_kb` (the kernel's
//! `Documentation/ABI/testing/sysfs-class-bdi`). The NAME of a mount cannot be queried, so the code uses the name that
//! appears when the mount is made.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

const BACKINGS: &str = "/sys/class/bdi";
/// The kernel's default read-ahead, in KiB. Source: `VM_READAHEAD_PAGES` in Linux `include/linux/mm.h`.
const USUAL: u32 = 128;

/// Largest read-ahead for native images, in KiB. `docs/performance/README.md` has the effect of larger values.
pub const NATIVE_READ_AHEAD_MAX: u32 = 512;

/// Returns the read-ahead in KiB for native images whose data is in this file: the read-ahead of the file's disk, up
/// to [`NATIVE_READ_AHEAD_MAX`]. `None` if it equals the kernel's default or if the disk's read-ahead is unknown.
#[must_use]
pub fn native_read_ahead(data: BorrowedFd<'_>) -> Option<u32> {
    let kilobytes = disk_read_ahead(data)?.min(NATIVE_READ_AHEAD_MAX);
    (kilobytes != USUAL).then_some(kilobytes)
}

/// Returns the read-ahead of the disk that stores a file, in KiB.
fn disk_read_ahead(file: BorrowedFd<'_>) -> Option<u32> {
    let device = rustix::fs::fstat(file).ok()?.st_dev;
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let disk = Path::new("/sys/dev/block").join(&number);
    // A partition uses the queue of its disk, which is its parent directory. If there is no block device, the
    // read-ahead is that of the bdi.
    let places = [
        disk.join("queue/read_ahead_kb"),
        disk.join("../queue/read_ahead_kb"),
        Path::new(BACKINGS).join(&number).join("read_ahead_kb"),
    ];
    let text = places.iter().find_map(|place| fs::read_to_string(place).ok())?;
    text.trim().parse().ok()
}

/// Calls `mount` and sets the read-ahead of the new mount, in KiB. Returns whether it was set: this fails without
/// `/sys`, without permission to write there, or if another process mounts such a file system at the same time,
/// because it is then unknown which bdi belongs to the mount.
pub(super) fn with_read_ahead<T, E>(
    prefix: &str,
    kilobytes: u32,
    mount: impl FnOnce() -> Result<T, E>,
) -> Result<(T, bool), E> {
    // If two threads mounted at the same time, each would see two new bdis.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = named(prefix);
    let mounted = mount()?;
    // Read-ahead changes no data, so the mount is usable without it.
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
