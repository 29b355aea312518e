//! Writable layers in a directory of the host, which may have been used before.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use kernel::mount::{DETACHED_SOURCES, Durability, Reach};
use kernel::version::KernelVersion;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{BOOT, Shown, UpperError, WritableLayer, directories};
use crate::bundle::userns::IdMap;

/// Directories of the kernel's mark on a layer that was written without syncing. Source: Linux
/// Documentation/filesystems/overlayfs.rst.
const INCOMPATIBLE: [&str; 3] = ["work", "work", "incompat"];
const VOLATILE: &str = "volatile";
/// File that the kernel creates in the mark, so that older kernels cannot remove it.
const DIRTY: &str = "volatile/dirty";
/// File in the layer's directory with the map of its owners, if they are not the image's own.
const MAP: &str = "userns";

/// File in the layer's directory with a random identifier of its last use.
const USE: &str = "use";

/// Returns the identifier of a directory's last use, if it was noted.
pub(crate) fn last_use(directory: BorrowedFd<'_>) -> Option<String> {
    let bytes = read(directory, USE).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Opens the layer in a directory through a separate mount. `mountinfo` shows paths relative to the root of that
/// mount, so it reveals no paths of the host. Older kernels accept layers only by the names of descriptors, and stack
/// no detached mounts.
fn layer_in(
    directory: BorrowedFd<'_>,
    image: Shown<'_>,
    durability: Durability,
) -> Result<WritableLayer, UpperError> {
    let is_old = KernelVersion::running().is_some_and(|it| it < DETACHED_SOURCES);
    let mount = match is_old {
        true => None,
        false => Some(kernel::mount::bind(directory, Reach::One)?),
    };
    let (upper, work) = directories(mount.as_ref().map_or(directory, |it| it.as_fd()), image)?;
    Ok(WritableLayer { mount, upper, work, durability })
}

/// Prepares a layer in a directory that may have been used before.
pub(super) fn prepare_used(
    directory: BorrowedFd<'_>,
    image: Shown<'_>,
    durability: Durability,
) -> Result<WritableLayer, UpperError> {
    let boot = read(CWD, "/proc/sys/kernel/random/boot_id")?;
    if let Some(incompatible) = incompatible(directory)? {
        check_boot(directory, &boot)?;
        unmark(incompatible.as_fd())?;
        if durability == Durability::Durable {
            rustix::fs::syncfs(directory)?;
        }
    }
    if durability == Durability::Volatile {
        write(directory, BOOT, &boot)?;
    }
    layer_in(directory, image, durability)
}

/// Notes another use of a directory.
pub(super) fn note_use(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    // Each read of this file returns a new number. Source: Linux Documentation/admin-guide/sysctl/kernel.rst.
    write(directory, USE, &read(CWD, "/proc/sys/kernel/random/uuid")?)
}

/// Removes the mark, unless another process has just removed it: the process that syncs the layer of a container that
/// has ended holds no lock.
fn unmark(incompatible: BorrowedFd<'_>) -> Result<(), Errno> {
    for (name, flags) in [(DIRTY, AtFlags::empty()), (VOLATILE, AtFlags::REMOVEDIR)] {
        match rustix::fs::unlinkat(incompatible, name, flags) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Removes the mark of a layer whose data is known to be complete.
pub(super) fn remove_mark(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    incompatible(directory)?.map_or(Ok(()), |marked| unmark(marked.as_fd()))
}

/// Makes unsynced data in a directory survive a restart of the host. An overlay must not be writing to the directory.
pub(crate) fn settle(directory: &Path) -> std::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty())?;
    let Some(incompatible) = incompatible(opened.as_fd())? else { return Ok(()) };
    kernel::usage::sync(directory)?;
    Ok(unmark(incompatible.as_fd())?)
}

/// Checks that the host was not restarted since the layer was used. Only then is all of its data in memory or on the
/// disk.
fn check_boot(directory: BorrowedFd<'_>, boot: &[u8]) -> Result<(), UpperError> {
    match read(directory, BOOT) {
        Ok(found) if found == boot => Ok(()),
        Ok(_) => Err(UpperError::Crashed),
        Err(Errno::NOENT) => Err(UpperError::Unknown),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the upper directory in a directory of the host that has no writer.
pub(crate) fn at_rest(directory: BorrowedFd<'_>) -> Result<OwnedFd, UpperError> {
    if incompatible(directory)?.is_some() {
        check_boot(directory, &read(CWD, "/proc/sys/kernel/random/boot_id")?)?;
    }
    open_upper(directory)
}

/// Opens the directory to which an overlay wrote.
pub(crate) fn open_upper(parent: BorrowedFd<'_>) -> Result<OwnedFd, UpperError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, "upper", flags, Mode::empty())?)
}

/// Checks that the owners in a directory belong to this map, and notes the map in a new directory.
pub(super) fn check_map(directory: BorrowedFd<'_>, map: Option<&IdMap>) -> Result<(), UpperError> {
    let wanted = map.map(ToString::to_string).unwrap_or_default();
    match rustix::fs::statat(directory, "upper", AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => {
            let noted = match read(directory, MAP) {
                Ok(noted) => String::from_utf8_lossy(&noted).into_owned(),
                Err(Errno::NOENT) => String::new(),
                Err(errno) => return Err(errno.into()),
            };
            match (noted == wanted, noted.trim().split_once('\n')) {
                (true, _) => Ok(()),
                (false, Some((users, groups))) => {
                    Err(UpperError::OtherMap(format!("with --uidmap {users} --gidmap {groups}")))
                }
                (false, None) => Err(UpperError::OtherMap("without --userns".to_owned())),
            }
        }
        Err(Errno::NOENT) => match map {
            Some(_) => {
                write(directory, MAP, wanted.as_bytes())?;
                // The map is synced before files with these owners are created, because after a crash such files must
                // not exist without the map.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::fsync(rustix::fs::openat(directory, MAP, flags, Mode::empty())?)?;
                Ok(rustix::fs::fsync(directory)?)
            }
            // The map of an upper directory that was removed.
            None => match rustix::fs::unlinkat(directory, MAP, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(errno.into()),
            },
        },
        Err(errno) => Err(errno.into()),
    }
}

fn write(at: BorrowedFd<'_>, path: &str, bytes: &[u8]) -> Result<(), Errno> {
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(at, path, flags, Mode::from_raw_mode(0o600))?;
    kernel::files::write_all(file.as_fd(), bytes, 0)
}

/// Returns the directory with the mark, if the mark exists.
fn incompatible(directory: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // A mark at another place, to which a link leads, does not count.
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    match kernel::files::open_resolved(directory, &*INCOMPATIBLE.join("/"), flags, resolve) {
        Ok(found) => match rustix::fs::statat(&found, VOLATILE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(Some(found)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        },
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Reads a short file.
fn read(at: BorrowedFd<'_>, path: &str) -> Result<Vec<u8>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(at, path, flags, Mode::empty())?;
    let mut bytes = vec![0; 16 << 10];
    let length = kernel::files::read_full(file.as_fd(), &mut bytes, 0)?;
    bytes.truncate(length);
    Ok(bytes)
}
