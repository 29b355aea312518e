//! Overlayfs from descriptors: an EROFS image, its data-only layers, and optionally an upper layer.

mod named;

pub use named::DATA_LAYERS;

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{DETACHED_SOURCES, Detached, MountError};
use crate::fd_name::proc_path;
use crate::version::KernelVersion;

/// Options of [`overlay`]. The kernel allows at most 500 layers, and no overlay over two levels of file-backed EROFS.
#[derive(Clone, Copy, Debug)]
pub struct OverlayOptions<'a> {
    /// Source in `mountinfo`, such as `quire:NAME`.
    pub name: &'a str,
    /// Lower layers, uppermost first: detached mounts or directories.
    pub lower: &'a [BorrowedFd<'a>],
    /// Data-only layers: directories to which redirects in the lower layers refer, and whose names are not visible in
    /// the overlay. They are searched in this order; if no layer has the file, the reader gets the error of the last
    /// one. The owners of their files do not matter. Before Linux 6.5 they are ordinary lower layers, so their files
    /// are also visible by name, unless the lower layers hide them.
    pub data: &'a [BorrowedFd<'a>],
    /// Writable layer. `None` makes the overlay read-only.
    pub upper: Option<Upper<'a>>,
    pub verity: Verity,
    /// Namespace of the xattrs in which the overlay keeps its metadata.
    pub xattrs: XattrNamespace,
    /// Credentials with which the overlay accesses its layers.
    pub credentials: Credentials,
}

/// A writable layer.
#[derive(Clone, Copy, Debug)]
pub struct Upper<'a> {
    /// Upper directory.
    pub upper: BorrowedFd<'a>,
    /// Work directory: empty, and on the same mount.
    pub work: BorrowedFd<'a>,
    /// The data that a crash of the host may lose.
    pub durability: Durability,
}

/// Effect of fsync and sync inside an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Syncs have no effect. A crash of the host may make the upper layer useless, and the kernel refuses to mount the
    /// layer again until `work/incompat/volatile` is removed.
    Volatile,
    /// Syncs write to disk.
    Durable,
}

/// The overlay's use of fs-verity digests that the lower layers record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verity {
    /// The overlay ignores the digests.
    Off,
    /// Checks them if both the image has a digest and the object has fs-verity.
    On,
    /// Refuses to open a file whose object does not have fs-verity with that digest.
    Required,
}

/// The namespace of the xattrs that an overlay writes and trusts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrNamespace {
    /// `trusted.overlay.*`, for root.
    Trusted,
    /// `user.overlay.*`, for a user namespace. Data layers then need Linux 6.16.
    User,
}

impl XattrNamespace {
    /// Returns the prefix of the xattrs' names.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Trusted => "trusted.overlay.",
            Self::User => "user.overlay.",
        }
    }
}

/// The credentials with which an overlay accesses its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// The credentials of the process that makes the superblock.
    Mounter,
    /// The credentials of the calling thread when it sets the options, even if another process makes the mount (Linux
    /// 6.15).
    Caller,
}

/// The first Linux version on which an overlay in a user namespace accepts data-only layers. Source: Linux 6.16,
/// `fs/overlayfs/params.c`, `ovl_fs_params_verify`.
pub const OVERLAY_USER_DATA: KernelVersion = KernelVersion { major: 6, minor: 16 };

const OVERRIDE_CREDENTIALS: KernelVersion = KernelVersion { major: 6, minor: 15 };
/// The first Linux version whose overlayfs checks fs-verity digests (`verity=`).
pub const OVERLAY_VERITY: KernelVersion = KernelVersion { major: 6, minor: 6 };

/// Mounts an overlay, detached. The kernel keeps the layers for as long as the mount lives.
///
/// Before Linux 6.15, a detached lower layer is attached at a temporary mount point during the call. After that it is
/// *used up*: it cannot be part of a second overlay. Upper and data layers must be on attached mounts.
///
/// # Errors
/// The error of the step that failed; [`MountError::ReadOnly`] if there is an upper layer but the kernel made the
/// overlay read-only; [`MountError::Unsupported`] if the kernel is too old.
pub fn overlay(options: &OverlayOptions<'_>) -> Result<Detached, MountError> {
    let mount = match by_descriptor(options) {
        Err(error) if is_old_kernel(&error) => named::overlay(options)?,
        result => result?,
    };
    if options.upper.is_some() && !mount.is_writable()? {
        return Err(MountError::ReadOnly { object: options.name.to_owned() });
    }
    Ok(mount)
}

fn is_old_kernel(error: &MountError) -> bool {
    let refused = [Errno::INVAL, Errno::BADF, Errno::OPNOTSUPP];
    error.errno().is_some_and(|errno| refused.contains(&errno))
        && KernelVersion::running().is_some_and(|version| version < DETACHED_SOURCES)
}

pub(crate) fn by_descriptor(options: &OverlayOptions<'_>) -> Result<Detached, MountError> {
    let object = object(options);
    let context = Context::open("overlay", &object)?;
    set_features(&context, options)?;
    for &layer in options.lower {
        context.descriptor("lowerdir+", layer)?;
    }
    for &layer in options.data {
        // The layer is passed by its path in /proc/self/fd, because mountinfo shows this path. For a descriptor,
        // mountinfo would show the real path of the store on the host, which should not be visible in a container.
        context.string("datadir+", &proc_path(layer))?;
    }
    if let Some(upper) = &options.upper {
        context.descriptor("upperdir", upper.upper)?;
        context.descriptor("workdir", upper.work)?;
    }
    finish(&context, options)
}

fn object(options: &OverlayOptions<'_>) -> String {
    format!("overlay {}", options.name)
}

fn set_features(context: &Context<'_>, options: &OverlayOptions<'_>) -> Result<(), MountError> {
    context.string("source", options.name)?;
    match options.xattrs {
        // Only from Linux 6.16 on, the kernel follows redirects into data layers without these options.
        XattrNamespace::Trusted if !options.data.is_empty() => {
            context.string("metacopy", "on")?;
            context.string("redirect_dir", "on")?;
        }
        // Allows renaming of directories of the lower layers.
        XattrNamespace::Trusted if options.upper.is_some() => {
            context.string("redirect_dir", "on")?;
        }
        XattrNamespace::Trusted => {}
        // The kernel refuses metacopy and redirect_dir together with userxattr, because any user could forge the
        // xattrs of these options.
        XattrNamespace::User => context.flag("userxattr")?,
    }
    let verity =
        |value| context.string("verity", value).map_err(|error| because_of_age(error, options));
    match options.verity {
        Verity::Off => {}
        Verity::On => verity("on")?,
        Verity::Required => verity("require")?,
    }
    if options.credentials == Credentials::Caller {
        context.flag("override_creds").map_err(|error| because_of_age(error, options))?;
    }
    if options.upper.is_some() {
        // With an index, changes to a file with several hard links in the image would be recorded outside of the
        // upper layer.
        context.string("index", "off")?;
    }
    match &options.upper {
        None => context.flag("ro")?,
        Some(upper) if upper.durability == Durability::Volatile => context.flag("volatile")?,
        Some(_) => {}
    }
    Ok(())
}

fn finish(context: &Context<'_>, options: &OverlayOptions<'_>) -> Result<Detached, MountError> {
    context.create().map_err(|error| because_of_age(error, options))?;
    context.mount(match options.upper {
        Some(_) => MountAttrFlags::empty(),
        None => MountAttrFlags::MOUNT_ATTR_RDONLY,
    })
}

/// Reports which option an older kernel does not support. Some kernels refuse only the last step.
fn because_of_age(error: MountError, options: &OverlayOptions<'_>) -> MountError {
    if options.credentials == Credentials::Caller {
        error.if_older(OVERRIDE_CREDENTIALS, "give an overlay credentials")
    } else if options.verity != Verity::Off {
        error.if_older(OVERLAY_VERITY, super::error::CHECK_VERITY)
    } else {
        error
    }
}
