//! Overlayfs over descriptors: an EROFS image, its data-only layers, and perhaps an upper layer.

mod named;

pub use named::DATA_LAYERS;

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{DETACHED_SOURCES, Detached, MountError};
use crate::fd_name::proc_path;
use crate::version::KernelVersion;

/// How to stack an overlay. At most 500 layers, and no overlay over two file-backed EROFS levels.
#[derive(Clone, Copy, Debug)]
pub struct OverlayOptions<'a> {
    /// Its source in `/proc/self/mountinfo`, such as `quire:NAME`.
    pub name: &'a str,
    /// The lower layers, uppermost first: detached mounts or directories.
    pub lower: &'a [BorrowedFd<'a>],
    /// Directories that redirects in the lower layers point into and that are seen by no name;
    /// searched in this order. If none has what is looked for, the reader gets the last one's error.
    /// Their owners need no mapping. Before Linux 6.5 they are ordinary lower layers: what the lower
    /// layers do not hide is seen by its name there as well.
    pub data: &'a [BorrowedFd<'a>],
    /// The writable layer; none makes the overlay read-only.
    pub upper: Option<Upper<'a>>,
    /// Use of the fs-verity digests in the lower layers.
    pub verity: Verity,
    /// Which xattrs the overlay keeps its own records in.
    pub xattrs: XattrNamespace,
    /// Whose credentials the overlay acts with on its layers.
    pub credentials: Credentials,
}

/// A writable layer.
#[derive(Clone, Copy, Debug)]
pub struct Upper<'a> {
    /// Directory for the writes.
    pub upper: BorrowedFd<'a>,
    /// An empty directory on the same mount, for the overlay's own use.
    pub work: BorrowedFd<'a>,
    /// Data that a crash may cost.
    pub durability: Durability,
}

/// Effect of syncing inside an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Nothing. A crash of the host may leave the upper layer useless, and the kernel refuses to
    /// mount it again until `work/incompat/volatile` is removed.
    Volatile,
    /// Syncing writes to disk.
    Durable,
}

/// Use of the fs-verity digests recorded in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verity {
    /// It ignores them.
    Off,
    /// It checks them where both the image has a digest and the object has fs-verity.
    On,
    /// It refuses to open any file whose object does not have fs-verity with that digest.
    Required,
}

/// Where an overlay keeps its records, and believes those it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrNamespace {
    /// `trusted.overlay.*`, for root.
    Trusted,
    /// `user.overlay.*`, for a user namespace. Data layers then need Linux 6.16.
    User,
}

impl XattrNamespace {
    /// What the names of its records begin with.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Trusted => "trusted.overlay.",
            Self::User => "user.overlay.",
        }
    }
}

/// Whose credentials an overlay acts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// The credentials of the process that creates the superblock.
    Mounter,
    /// The credentials of this thread when it sets the options, whichever process makes the mount (Linux 6.15).
    Caller,
}

/// The first Linux on which an overlay of a user namespace takes data-only layers. Source: Linux 6.16,
/// `fs/overlayfs/params.c`, `ovl_fs_params_verify`.
pub const OVERLAY_USER_DATA: KernelVersion = KernelVersion { major: 6, minor: 16 };

const OVERRIDE_CREDENTIALS: KernelVersion = KernelVersion { major: 6, minor: 15 };
/// The first Linux version whose overlayfs checks fs-verity digests (`verity=`).
pub const OVERLAY_VERITY: KernelVersion = KernelVersion { major: 6, minor: 6 };

/// Stacks an overlay, attached nowhere. The kernel keeps the layers for as long as it lives.
///
/// Before Linux 6.15 a detached lower layer is attached at a temporary mountpoint while this
/// runs, and is *used up*: it cannot be given to a second overlay. Upper and data layers must then
/// be on attached mounts.
///
/// # Errors
/// The kernel's answer to the step that failed; [`MountError::ReadOnly`] where there is an upper
/// layer but the kernel would not write to it; [`MountError::Unsupported`] where an older kernel
/// cannot.
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
        // By its name among this process's descriptors: the kernel shows in mountinfo what it was given, and of a descriptor
        // the path, which is the store's on the host and no business of a container.
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
        // Redirects into data layers are followed without being asked to only since 6.16.
        XattrNamespace::Trusted if !options.data.is_empty() => {
            context.string("metacopy", "on")?;
            context.string("redirect_dir", "on")?;
        }
        // So that directories of the lower layers can be renamed.
        XattrNamespace::Trusted if options.upper.is_some() => {
            context.string("redirect_dir", "on")?;
        }
        XattrNamespace::Trusted => {}
        // The kernel refuses both together with it: any user could forge them.
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
        // Otherwise what was changed in a file that has several names in the image would be noted outside of the upper layer.
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

/// Which of the options an older kernel does not know. Some say so only when all is set.
fn because_of_age(error: MountError, options: &OverlayOptions<'_>) -> MountError {
    if options.credentials == Credentials::Caller {
        error.if_older(OVERRIDE_CREDENTIALS, "lend an overlay credentials")
    } else if options.verity != Verity::Off {
        error.if_older(OVERLAY_VERITY, super::error::CHECK_VERITY)
    } else {
        error
    }
}
