//! Writable layers in a directory of the host, which may have been used before.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use kernel::mount::{DETACHED_SOURCES, Durability, Reach};
use kernel::version::KernelVersion;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{BOOT, Layer, Shown, UpperError, directories};
use crate::bundle::userns::IdMap;

/// The kernel's mark on a layer that was written without syncing: a directory in a directory. Source: Linux
/// Documentation/filesystems/overlayfs.rst.
const INCOMPATIBLE: [&str; 3] = ["work", "work", "incompat"];
const VOLATILE: &str = "volatile";
/// What the kernel makes in the mark, so that older kernels cannot remove it.
const DIRTY: &str = "volatile/dirty";
/// In the layer's directory: whose ids the owners in there are, if not the image's own.
const MAP: &str = "userns";

/// In the layer's directory: a random identifier of its last use.
const USE: &str = "use";

/// Which use of a directory was the last, if that was noted.
pub(crate) fn last_use(directory: BorrowedFd<'_>) -> Option<String> {
    let bytes = read(directory, USE).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// A directory that was made for this root alone.
pub(super) fn prepare_folder(
    directory: BorrowedFd<'_>,
    image: Shown<'_>,
    durability: Durability,
) -> Result<Layer, UpperError> {
    if durability == Durability::Volatile {
        write(directory, BOOT, &read(CWD, "/proc/sys/kernel/random/boot_id")?)?;
    }
    layer_in(directory, image, durability)
}

/// The layer in a directory, by a mount of its own: `mountinfo` shows paths from its root, and so nothing of the host. Older
/// kernels take layers by names of descriptors, and stack no detached mounts.
fn layer_in(
    directory: BorrowedFd<'_>,
    image: Shown<'_>,
    durability: Durability,
) -> Result<Layer, UpperError> {
    let is_old = KernelVersion::running().is_some_and(|it| it < DETACHED_SOURCES);
    let mount = match is_old {
        true => None,
        false => Some(kernel::mount::bind(directory, Reach::One)?),
    };
    let (upper, work) = directories(mount.as_ref().map_or(directory, |it| it.as_fd()), image)?;
    Ok(Layer { mount, upper, work, durability })
}

/// A directory may have been used before.
pub(super) fn prepare_directory(
    directory: BorrowedFd<'_>,
    image: Shown<'_>,
    durability: Durability,
    map: Option<&IdMap>,
) -> Result<Layer, UpperError> {
    check_map(directory, map)?;
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
    // Each has a number of its own. Source: Linux Documentation/admin-guide/sysctl/kernel.rst.
    write(directory, USE, &read(CWD, "/proc/sys/kernel/random/uuid")?)?;
    layer_in(directory, image, durability)
}

/// Takes the mark off.
fn unmark(incompatible: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::unlinkat(incompatible, DIRTY, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno),
    }
    rustix::fs::unlinkat(incompatible, VOLATILE, AtFlags::REMOVEDIR)
}

/// Makes what was written to a directory without syncing outlive a restart of the host. No overlay writes there any more.
pub(crate) fn settle(directory: &Path) -> std::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty())?;
    let Some(incompatible) = incompatible(opened.as_fd())? else { return Ok(()) };
    kernel::usage::sync(directory)?;
    Ok(unmark(incompatible.as_fd())?)
}

/// As long as the host runs, what was written is in its memory or on its disk.
fn check_boot(directory: BorrowedFd<'_>, boot: &[u8]) -> Result<(), UpperError> {
    match read(directory, BOOT) {
        Ok(found) if found == boot => Ok(()),
        Ok(_) => Err(UpperError::Crashed),
        Err(Errno::NOENT) => Err(UpperError::Unknown),
        Err(errno) => Err(errno.into()),
    }
}

/// The upper layer in a directory of the host that nobody writes to.
pub(crate) fn at_rest(directory: BorrowedFd<'_>) -> Result<OwnedFd, UpperError> {
    if incompatible(directory)?.is_some() {
        check_boot(directory, &read(CWD, "/proc/sys/kernel/random/boot_id")?)?;
    }
    open_upper(directory)
}

/// The directory that an overlay wrote to.
pub(crate) fn open_upper(parent: BorrowedFd<'_>) -> Result<OwnedFd, UpperError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, "upper", flags, Mode::empty())?)
}

/// Makes sure that the owners in a directory are of this map, and notes it in a new one.
fn check_map(directory: BorrowedFd<'_>, map: Option<&IdMap>) -> Result<(), UpperError> {
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
                // Before there are files with these owners: a crash must not leave them without it.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::fsync(rustix::fs::openat(directory, MAP, flags, Mode::empty())?)?;
                Ok(rustix::fs::fsync(directory)?)
            }
            // Of an upper layer that somebody has removed.
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

/// Where the mark is, if it is there.
fn incompatible(directory: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // What is marked elsewhere, through a link, is not ours.
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

/// A short file.
fn read(at: BorrowedFd<'_>, path: &str) -> Result<Vec<u8>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(at, path, flags, Mode::empty())?;
    let mut bytes = vec![0; 16 << 10];
    let length = kernel::files::read_full(file.as_fd(), &mut bytes, 0)?;
    bytes.truncate(length);
    Ok(bytes)
}
