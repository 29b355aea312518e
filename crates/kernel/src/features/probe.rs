//! The probes, one function for each feature.
#![expect(unsafe_code, reason = "rustix has no fanotify")]

use std::fmt::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::fs::FileType;
use rustix::io::Errno;

use super::{Can, Cgroups, Feature, empty_image};
use crate::fd_name::name_of;
use crate::files;
use crate::fuse::{FuseConnection, FuseError, Resent};
use crate::loopdev::{self, Access, LoopBlockSize, LoopOptions};
use crate::mount::{
    self, Backing, Credentials, ErofsOptions, FuseAccess, FuseOptions, Io, MountError,
    OverlayOptions, Sharing, TmpfsOptions, Verity, XattrNamespace,
};
use crate::process::{IdRange, Who, user_namespace};
use crate::seal::{self, SealError};
use crate::verity::{self, Algorithm, VerityError};
use crate::version::KernelVersion;

impl Feature {
    fn yes(reason: impl Into<String>) -> Self {
        Self { can: Can::Yes, reason: reason.into() }
    }

    fn no(reason: impl Into<String>) -> Self {
        Self { can: Can::No, reason: reason.into() }
    }

    fn unknown(reason: impl Into<String>) -> Self {
        Self { can: Can::Unknown, reason: reason.into() }
    }

    /// Makes the result of a failed attempt: unknown if privileges were missing, else no.
    fn refused(error: &dyn std::error::Error, errno: Option<Errno>) -> Self {
        let mut reason = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            write!(reason, ": {error}").expect("writing to a string");
            cause = error.source();
        }
        match errno {
            Some(Errno::PERM | Errno::ACCESS) => {
                Self::unknown(format!("not tried, because this user may not: {reason}"))
            }
            _ => Self::no(reason),
        }
    }

    fn no_file(directory: BorrowedFd<'_>, errno: Errno) -> Self {
        let directory = name_of(directory);
        Self::unknown(format!("not tried: cannot make an unnamed file in {directory}: {errno}"))
    }
}

/// Makes an unnamed file with the smallest image in a directory.
fn image_in(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let file = files::unnamed(directory, 0o600)?;
    let mut rest = empty_image().as_slice().to_vec();
    while !rest.is_empty() {
        let written = rustix::io::write(&file, &rest)?;
        rest.drain(..written);
    }
    Ok(file)
}

pub(super) fn erofs_from_file(directory: BorrowedFd<'_>) -> Feature {
    let image = match image_in(directory) {
        Ok(image) => image,
        Err(errno) => return Feature::no_file(directory, errno),
    };
    let result = mount::erofs(image.as_fd(), &ErofsOptions::default());
    match result {
        Ok(mounted) => match (mounted.backing, mounted.io) {
            (Backing::File, Io::Direct) => Feature::yes("mounted an image file, with direct I/O"),
            (Backing::File, Io::Buffered) => {
                Feature::yes("mounted an image file, but its data is cached twice (no `directio`)")
            }
            (Backing::Loop, _) => Feature::no(format!(
                "only through a loop device: direct mounts need Linux 6.12 (this is {}), and a \
                file that is not on tmpfs or overlayfs",
                KernelVersion::running().map_or_else(|| "unknown".into(), |v| v.to_string())
            )),
        },
        // The kernel refused a file, and no loop device was available.
        Err(error @ MountError::Loop { .. }) => Feature::no(error_chain(&error)),
        Err(error) => Feature::refused(&error, error.errno()),
    }
}

fn error_chain(error: &MountError) -> String {
    Feature::refused(error, None).reason
}

pub(super) fn page_sharing() -> Feature {
    match mount::try_sharing() {
        Ok(Sharing::Domain) => Feature::yes("the kernel accepted `inode_share` and a domain"),
        Ok(Sharing::Alone) => {
            Feature::no("needs Linux 7.0, built with CONFIG_EROFS_FS_PAGE_CACHE_SHARE")
        }
        Err(error) => Feature::refused(&error, error.errno()),
    }
}

pub(super) fn direct_io(directory: BorrowedFd<'_>) -> Feature {
    // The smallest block size of EROFS images.
    const BLOCK: u32 = 512;
    let unit = match image_in(directory).map(|file| files::direct_io_unit(file.as_fd())) {
        Ok(Ok(unit)) => unit,
        Ok(Err(errno)) | Err(errno) => return Feature::no_file(directory, errno),
    };
    match unit {
        None => Feature::no(format!(
            "neither the kernel (from Linux 6.1) nor the file system reports the alignment of \
            direct reads of files in {}",
            name_of(directory)
        )),
        Some(0) => {
            Feature::no(format!("files in {} do not support direct reads", name_of(directory)))
        }
        Some(unit) if BLOCK.is_multiple_of(unit) => {
            Feature::yes(format!("direct reads begin at multiples of {unit} bytes"))
        }
        Some(unit) => Feature::no(format!(
            "direct reads begin at multiples of {unit} bytes in {}, but those of native images at \
            multiples of {BLOCK}",
            name_of(directory)
        )),
    }
}

pub(super) fn loop_devices(directory: BorrowedFd<'_>) -> Feature {
    let image = match image_in(directory) {
        Ok(image) => image,
        Err(errno) => return Feature::no_file(directory, errno),
    };
    let options =
        LoopOptions { block_size: LoopBlockSize::B4096, access: Access::ReadOnly, direct_io: true };
    match loopdev::attach(image.as_fd(), &options) {
        Ok(device) => Feature::yes(format!("attached {}", device.path())),
        Err(error) => Feature::refused(&error, error.errno()),
    }
}

pub(super) fn overlay_by_descriptor(directory: BorrowedFd<'_>) -> Feature {
    match stack(directory, mount::by_descriptor) {
        Ok(()) => Feature::yes("stacked a detached mount"),
        Err(error) if error.errno() == Some(Errno::PERM) => Feature::refused(&error, error.errno()),
        Err(error) => Feature::no(format!("needs Linux 6.15: {}", error_chain(&error))),
    }
}

pub(super) fn overlay_data_layers(directory: BorrowedFd<'_>) -> Feature {
    match stack(directory, mount::overlay) {
        Ok(()) if KernelVersion::running().is_some_and(|it| it < mount::DATA_LAYERS) => {
            Feature::yes("stacked one as an ordinary layer (data layers need Linux 6.5)")
        }
        Ok(()) => Feature::yes("stacked one"),
        Err(error) => Feature::refused(&error, error.errno()),
    }
}

fn stack(
    directory: BorrowedFd<'_>,
    overlay: impl Fn(&OverlayOptions<'_>) -> Result<mount::Detached, MountError>,
) -> Result<(), MountError> {
    let name = "quire:probe";
    let lower = mount::tmpfs(&TmpfsOptions { name, bytes: None, inodes: None, mode: 0o755 })?;
    overlay(&OverlayOptions {
        name,
        lower: &[lower.as_fd()],
        data: &[directory],
        upper: None,
        verity: Verity::Off,
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    })
    .map(drop)
}

pub(super) fn fs_verity(directory: BorrowedFd<'_>) -> Feature {
    let file = image_in(directory).and_then(|file| files::reopen_read_only(file.as_fd()));
    let file = match file {
        Ok(file) => file,
        Err(errno) => return Feature::no_file(directory, errno),
    };
    match verity::enable(file.as_fd(), Algorithm::Sha256) {
        Ok(_) => Feature::yes("turned on for a file, SHA-256, blocks of 4096 bytes"),
        Err(VerityError::NoKernelSupport { source, .. }) => Feature::no(format!(
            "this kernel or the file system of {} does not support it: {source}",
            name_of(directory)
        )),
        Err(VerityError::NotEnabled { source, .. }) => Feature::no(format!(
            "not turned on in the file system of {} (ext4: mkfs.ext4 or tune2fs -O verity, and a \
             kernel with CONFIG_FS_VERITY): {source}",
            name_of(directory)
        )),
        Err(error) => Feature::refused(&error, None),
    }
}

pub(super) fn immutable_flag(directory: BorrowedFd<'_>) -> Feature {
    let file = match image_in(directory) {
        Ok(file) => file,
        Err(errno) => return Feature::no_file(directory, errno),
    };
    let result = seal::set_immutable(file.as_fd());
    match result.and_then(|()| seal::clear_immutable(file.as_fd())) {
        Ok(()) => Feature::yes("set and cleared on a file"),
        Err(error @ SealError::Forbidden { .. }) => Feature::refused(&error, Some(Errno::PERM)),
        Err(error) => Feature::refused(&error, None),
    }
}

/// `FAN_PRE_ACCESS` of include/uapi/linux/fanotify.h, which libc lacks.
const FAN_PRE_ACCESS: u64 = 0x0010_0000;

pub(super) fn pre_content_events(directory: BorrowedFd<'_>) -> Feature {
    let file = match image_in(directory) {
        Ok(file) => file,
        Err(errno) => return Feature::no_file(directory, errno),
    };
    let no_group = "no fanotify group of class pre-content";
    // SAFETY: fanotify_init takes two integers.
    let group = unsafe { libc::fanotify_init(libc::FAN_CLASS_PRE_CONTENT | libc::FAN_CLOEXEC, 0) };
    if group < 0 {
        return match crate::last_errno() {
            errno @ Errno::PERM => {
                Feature::unknown(format!("not tried without CAP_SYS_ADMIN: {errno}"))
            }
            errno => Feature::no(format!("{no_group}: {errno}")),
        };
    }
    // SAFETY: fanotify_init has just made the descriptor, and nothing else owns it.
    let group = unsafe { OwnedFd::from_raw_fd(group) };
    // SAFETY: a null path selects the descriptor itself.
    let marked = unsafe {
        libc::fanotify_mark(
            group.as_raw_fd(),
            libc::FAN_MARK_ADD,
            FAN_PRE_ACCESS,
            file.as_raw_fd(),
            std::ptr::null(),
        )
    };
    if marked == 0 {
        return Feature::yes("marked a file");
    }
    match crate::last_errno() {
        errno @ Errno::OPNOTSUPP => {
            let directory = name_of(directory);
            Feature::no(format!(
                "not supported by the file system of {directory} ({errno}): use ext4, XFS or btrfs"
            ))
        }
        errno => Feature::no(format!("needs Linux 6.14: {errno}")),
    }
}

pub(super) fn files_on_fuse(who: Who) -> Feature {
    let connection = match FuseConnection::open() {
        Ok(connection) => connection,
        Err(FuseError::Open(errno @ (Errno::ACCESS | Errno::PERM))) => {
            return Feature::unknown(format!("cannot open /dev/fuse: {errno}"));
        }
        Err(FuseError::Open(errno)) => return Feature::no(format!("no /dev/fuse: {errno}")),
        Err(error) => return Feature::no(error.to_string()),
    };
    let options = FuseOptions {
        root: FileType::RegularFile,
        owner: (who.user, who.group),
        access: FuseAccess::Owner,
        name: "quire",
    };
    let mounted = crate::mount::fuse(connection.as_fd(), &options);
    match (mounted, connection.resend()) {
        (Ok(_), Ok(Resent::Yes)) => Feature::yes("mounted one"),
        (Ok(_), _) => Feature::yes(
            "mounted one; before Linux 6.9, reads that a killed service had accepted fail",
        ),
        (Err(error), _) => Feature::refused(&error, error.errno()),
    }
}

pub(super) fn user_namespaces(who: Who) -> Feature {
    let own = |id: u32| [IdRange { inside: 0, outside: id, count: 1 }];
    let limits = namespace_limits();
    match user_namespace(&own(who.user), &own(who.group)) {
        Ok(_) if who.is_host_root() && !limits.is_empty() => {
            Feature::yes(format!("made one as root; for others: {}", limits.join(", ")))
        }
        Ok(_) => Feature::yes(format!("made one as user {}", who.user)),
        Err(error) => {
            let mut feature = Feature::refused(&error, None);
            if !limits.is_empty() {
                write!(feature.reason, " ({})", limits.join(", ")).expect("writing to a string");
            }
            feature
        }
    }
}

/// Returns the sysctl settings that forbid user namespaces to users.
fn namespace_limits() -> Vec<String> {
    [
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ]
    .into_iter()
    .filter(|(name, forbids)| {
        std::fs::read_to_string(format!("/proc/sys/{name}"))
            .is_ok_and(|value| value.trim() == *forbids)
    })
    .map(|(name, value)| format!("{}={value}", name.replace('/', ".")))
    .collect()
}

pub(super) fn cgroups() -> Cgroups {
    let kind = |path: &str| rustix::fs::statfs(path).map(|stat| stat.f_type);
    match kind("/sys/fs/cgroup") {
        Ok(libc::CGROUP2_SUPER_MAGIC) => Cgroups::V2,
        Ok(libc::TMPFS_MAGIC) => match kind("/sys/fs/cgroup/unified") {
            Ok(libc::CGROUP2_SUPER_MAGIC) => Cgroups::Hybrid,
            _ => Cgroups::V1,
        },
        _ => Cgroups::Absent,
    }
}
