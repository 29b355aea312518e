//! Overlays whose layers are given by path, for kernels that do not take descriptors.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::{OVERLAY_VERITY, OverlayOptions, Verity, because_of_age, finish, object, set_features};
use crate::fd_name::{name_of, proc_path};
use crate::mount::context::Context;
use crate::mount::{self, DETACHED_SOURCES, Detached, MountError, Step, Unmount, unmount};
use crate::version::KernelVersion;

/// The way to pass the paths of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    /// One option for each layer.
    Each,
    /// One string for all layers.
    Joined,
    /// One string, with the data layers as the lowest ordinary layers.
    Plain,
}

/// The first Linux version with an option for each layer.
const EACH: KernelVersion = KernelVersion { major: 6, minor: 8 };
/// The first Linux version with data-only layers. In older versions, redirects can lead into ordinary layers, whose
/// files are also visible by name. In a composefs image, whiteouts in the root directory hide these files.
pub const DATA_LAYERS: KernelVersion = KernelVersion { major: 6, minor: 5 };

/// Mounts an overlay from paths. An attached layer has a path in /proc; a detached mount is attached at a temporary
/// directory during the call.
pub(super) fn overlay(options: &OverlayOptions<'_>) -> Result<Detached, MountError> {
    overlay_as(
        options,
        match KernelVersion::running() {
            Some(version) if version < DATA_LAYERS => Naming::Plain,
            Some(version) if version < EACH => Naming::Joined,
            _ => Naming::Each,
        },
    )
}

fn overlay_as(options: &OverlayOptions<'_>, naming: Naming) -> Result<Detached, MountError> {
    let object = object(options);
    // The version is checked first, because an attempt uses up detached lower layers, and older kernels refuse only
    // the last step.
    let too_old = KernelVersion::running().is_some_and(|version| version < OVERLAY_VERITY);
    if options.verity != Verity::Off && too_old {
        return Err(because_of_age(MountError::call(Step::Create, &object, Errno::INVAL), options));
    }
    let upper = options.upper.iter().flat_map(|upper| [upper.upper, upper.work]);
    for layer in options.data.iter().copied().chain(upper) {
        if !is_attached(layer)? {
            return Err(MountError::call(Step::Create, &object, Errno::INVAL)
                .if_older(DETACHED_SOURCES, "stack upper or data layers of detached mounts"));
        }
    }
    let mut scratch = Vec::new();
    let mut lower = Vec::new();
    for &layer in options.lower {
        if is_attached(layer)? {
            lower.push(proc_path(layer));
        } else {
            let mountpoint = Scratch::new(&object, layer)?;
            lower.push(mountpoint.path.display().to_string());
            scratch.push(mountpoint);
        }
    }
    let data: Vec<String> = options.data.iter().map(|&layer| proc_path(layer)).collect();

    let context = Context::open("overlay", &object)?;
    set_features(&context, options)?;
    match naming {
        Naming::Each => {
            lower.iter().try_for_each(|layer| context.string("lowerdir+", layer))?;
            data.iter().try_for_each(|layer| context.string("datadir+", layer))?;
        }
        Naming::Joined | Naming::Plain => {
            // All paths were made by this module, so they contain no colon or comma.
            let lower = lower.join(":");
            let before = if naming == Naming::Plain { ":" } else { "::" };
            let all = data.iter().fold(lower, |all, layer| all + before + layer);
            context.string("lowerdir", &all)?;
        }
    }
    if let Some(upper) = &options.upper {
        context.string("upperdir", &proc_path(upper.upper))?;
        context.string("workdir", &proc_path(upper.work))?;
    }
    finish(&context, options)
}

/// Whether a descriptor's mount is attached in this mount namespace.
fn is_attached(layer: BorrowedFd<'_>) -> Result<bool, MountError> {
    let failed = |errno| MountError::call(Step::Examine, name_of(layer), errno);
    let id = rustix::fs::statx(layer, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        .map_err(failed)?
        .stx_mnt_id
        .to_string();
    let table = std::fs::read("/proc/thread-self/mountinfo")
        .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    // The mount id is the first field of each line (proc_pid_mountinfo(5)). Paths may contain any bytes.
    Ok(table
        .split(|&byte| byte == b'\n')
        .any(|line| line.split(|&byte| byte == b' ').next() == Some(id.as_bytes())))
}

/// A temporary mountpoint, removed when dropped.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new(object: &str, layer: BorrowedFd<'_>) -> Result<Self, MountError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let failed = |errno| MountError::call(Step::Scratch, object, errno);
        let mut last = Errno::NOENT;
        for parent in ["/run", "/tmp"] {
            for _ in 0..64 {
                let number = NEXT.fetch_add(1, Ordering::Relaxed);
                let name = format!(".quire-{}-{number}", std::process::id());
                let path = Path::new(parent).join(name);
                match rustix::fs::mkdirat(CWD, &path, Mode::RWXU) {
                    Ok(()) => return Self { path }.attach(layer),
                    Err(Errno::EXIST) => last = Errno::EXIST,
                    Err(errno) => {
                        last = errno;
                        break;
                    }
                }
            }
        }
        Err(failed(last))
    }

    fn attach(self, layer: BorrowedFd<'_>) -> Result<Self, MountError> {
        // The directory is opened by a descriptor, so that no other user can replace it by a link (all users may write
        // to /tmp).
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory: OwnedFd = rustix::fs::open(&self.path, flags, Mode::empty())
            .map_err(|errno| MountError::call(Step::Scratch, self.path.display(), errno))?;
        mount::attach(layer, directory.as_fd()).map_err(|error| {
            error.if_older(DETACHED_SOURCES, "stack a detached mount for the second time")
        })?;
        Ok(self)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failure is ignored, because the directory is empty and private.
        drop(unmount(&self.path, Unmount::Lazy));
        rustix::fs::rmdir(&self.path).unwrap_or(());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, OwnedFd};

    use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags};
    use rustix::io::Errno;

    use super::{DATA_LAYERS, EACH, Naming, Unmount, overlay_as, unmount};
    use crate::mount::{
        Credentials, Detached, Durability, OverlayOptions, Propagation, TmpfsOptions, Upper,
        Verity, XattrNamespace, tmpfs,
    };
    use crate::process::own_mounts;
    use crate::version::KernelVersion;

    fn directory(tmpfs: &Detached, name: &str) -> OwnedFd {
        rustix::fs::mkdirat(tmpfs, name, Mode::RWXU).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(tmpfs, name, flags, Mode::empty()).unwrap()
    }

    fn file(tmpfs: &Detached, name: &str) -> OwnedFd {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        rustix::fs::openat(tmpfs, name, flags, Mode::RWXU).unwrap()
    }

    /// The methods for older kernels also work on this one: mounts a detached lower layer, a data layer and an upper
    /// layer, and checks that the temporary mountpoint is removed.
    fn check(naming: Naming) {
        if !rustix::process::geteuid().is_root() {
            testing::skipped("overlay by name: needs root");
            return;
        }
        own_mounts(Propagation::Private).unwrap();
        let make = || {
            let options = TmpfsOptions { name: "t", bytes: None, inodes: None, mode: 0o755 };
            tmpfs(&options).unwrap()
        };
        let (image, store) = (make(), make());
        let big = file(&image, "big");
        rustix::fs::ftruncate(&big, 6).unwrap();
        let set = |name: &str, value: &[u8]| {
            rustix::fs::fsetxattr(&big, name, value, XattrFlags::empty()).unwrap();
        };
        set("trusted.overlay.metacopy", b"");
        set("trusted.overlay.redirect", b"/object");
        drop(big);
        let gone = file(&image, "gone");
        rustix::fs::ftruncate(&gone, 6).unwrap();
        let set = |name: &str, value: &[u8]| {
            rustix::fs::fsetxattr(&gone, name, value, XattrFlags::empty()).unwrap();
        };
        set("trusted.overlay.metacopy", b"");
        set("trusted.overlay.redirect", b"/ab/gone");
        drop(gone);
        // Older kernels require attached upper and data layers.
        let at = tempfile::tempdir().unwrap();
        store.attach_at(at.path()).unwrap();
        let (data, upper, work) =
            (directory(&store, "data"), directory(&store, "upper"), directory(&store, "work"));
        let absent = directory(&store, "absent");
        rustix::fs::symlinkat("ab", &absent, "ab").unwrap();
        let data_layers = [data.as_fd(), absent.as_fd()];
        // In an ordinary layer, the overlay would treat the symlink as data.
        let data_layers = if naming == Naming::Plain { &data_layers[..1] } else { &data_layers };
        rustix::io::write(file(&store, "data/object"), b"object").unwrap();

        let overlay = overlay_as(
            &OverlayOptions {
                name: "quire:by-name",
                lower: &[image.as_fd()],
                data: data_layers,
                upper: Some(Upper {
                    upper: upper.as_fd(),
                    work: work.as_fd(),
                    durability: Durability::Volatile,
                }),
                verity: Verity::Off,
                xattrs: XattrNamespace::Trusted,
                credentials: Credentials::Mounter,
            },
            naming,
        )
        .unwrap();
        let mut content = [0; 7];
        let big = rustix::fs::openat(&overlay, "big", OFlags::RDONLY, Mode::empty()).unwrap();
        assert_eq!(rustix::io::read(big, &mut content), Ok(6));
        assert_eq!(&content[..6], b"object");
        let gone = rustix::fs::openat(&overlay, "gone", OFlags::RDONLY, Mode::empty());
        let expect = if naming == Naming::Plain { Errno::IO } else { Errno::LOOP };
        assert_eq!(gone.unwrap_err(), expect, "{naming:?}");
        assert!(overlay.is_writable().unwrap());
        rustix::fs::mkdirat(&overlay, "new", Mode::RWXU).unwrap();
        rustix::fs::statat(&upper, "new", AtFlags::empty()).unwrap();

        let own = format!(".quire-{}-", std::process::id());
        for parent in ["/run", "/tmp"] {
            let mut entries = std::fs::read_dir(parent).unwrap();
            assert!(
                !entries.any(|entry| {
                    entry.unwrap().file_name().to_string_lossy().starts_with(&own)
                })
            );
        }
        let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        assert!(!mounts.contains(&own));
        unmount(at.path(), Unmount::Lazy).unwrap();
    }

    /// One test for all methods, because each check would find the temporary mountpoints of another.
    #[test]
    fn layers_by_name() {
        let version = KernelVersion::running().unwrap();
        if version >= EACH {
            check(Naming::Each);
        }
        if version >= DATA_LAYERS {
            check(Naming::Joined);
        }
        check(Naming::Plain);
    }
}
