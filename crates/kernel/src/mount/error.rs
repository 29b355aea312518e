//! Errors of mounts, with the messages of the file system.

use std::fmt;

use rustix::io::Errno;

use crate::version::KernelVersion;

/// The feature name of fs-verity checks in [`MountError::Unsupported`].
pub(super) const CHECK_VERITY: &str = "check fs-verity digests in overlays";
use crate::loopdev::LoopError;

/// An error of making, changing or unmounting a mount.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// A system call failed.
    #[error("cannot {step} {object}{messages}")]
    Call {
        step: Step,
        /// Description of the mount or path, for users.
        object: String,
        messages: KernelMessages,
        source: Errno,
    },
    /// The kernel lacks a feature for which there is no fallback.
    #[error("cannot mount {object}: Linux {kernel} cannot {feature}, which needs Linux {since}")]
    Unsupported {
        /// Description of the mount.
        object: String,
        /// The missing feature, as a verb phrase.
        feature: &'static str,
        /// First Linux version with the feature.
        since: KernelVersion,
        /// Version of the running kernel.
        kernel: KernelVersion,
        source: Errno,
    },
    /// The kernel made an overlay with an upper layer read-only. It does so without an error if the upper file system
    /// lacks a feature (an idmapped upper, no `tmpfile`, no xattrs).
    #[error(
        "overlay {object} has an upper layer, but the kernel made it read-only \
         (see the kernel log)"
    )]
    ReadOnly {
        /// The overlay's name.
        object: String,
    },
    /// The image needs a loop device, and attaching one failed.
    #[error("cannot mount {object} through a loop device")]
    Loop { object: String, source: LoopError },
}

impl MountError {
    /// Whether the kernel lacks only the check of fs-verity digests in overlays.
    #[must_use]
    pub fn is_for_want_of_verity(&self) -> bool {
        matches!(self, Self::Unsupported { feature, .. } if *feature == CHECK_VERITY)
    }

    pub(crate) fn call(step: Step, object: impl fmt::Display, source: Errno) -> Self {
        Self::Call { step, object: object.to_string(), messages: KernelMessages::default(), source }
    }

    /// Turns `EINVAL` on a kernel older than `since` into [`MountError::Unsupported`].
    pub(crate) fn if_older(self, since: KernelVersion, feature: &'static str) -> Self {
        match (self, KernelVersion::running()) {
            (Self::Call { object, source: source @ Errno::INVAL, .. }, Some(kernel))
                if kernel < since =>
            {
                Self::Unsupported { object, feature, since, kernel, source }
            }
            (other, _) => other,
        }
    }

    /// Returns the errno of the failed system call, if one failed.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Call { source, .. } | Self::Unsupported { source, .. } => Some(*source),
            Self::Loop { source, .. } => source.errno(),
            Self::ReadOnly { .. } => None,
        }
    }
}

/// A step of making, changing or unmounting a mount. Its `Display` text follows "cannot".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `fsopen`: the file system type is unknown, or this user may not mount.
    Open,
    /// `fsconfig` of one option, as `NAME` or `NAME=VALUE`.
    Set(String),
    /// `fsconfig(FSCONFIG_CMD_CREATE)`, which makes the superblock.
    Create,
    /// `fsmount`.
    Mount,
    /// `move_mount`.
    Attach,
    /// `open_tree`.
    Clone,
    /// `mount_setattr` with a user namespace.
    Idmap,
    /// `mount_setattr`.
    SetAttributes,
    /// `fstatfs`, or reading values that are needed before mounting.
    Examine,
    /// `umount2`.
    Unmount,
    /// Passing a mount through a user namespace, which locks its attributes.
    Lock,
    /// Making a temporary mountpoint, on kernels that need one.
    Scratch,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open a file system context for",
            Self::Set(option) => return write!(f, "set option `{option}` of"),
            Self::Create => "create the superblock of",
            Self::Mount => "mount",
            Self::Attach => "attach a mount at",
            Self::Clone => "clone the mount at",
            Self::Idmap => "map the owners of",
            Self::SetAttributes => "change the attributes of",
            Self::Examine => "examine",
            Self::Unmount => "unmount",
            Self::Lock => "lock the attributes, for a user, of",
            Self::Scratch => "make a temporary mountpoint for",
        })
    }
}

/// Messages from the log of a file system context, oldest first, without the level letter. If there are none, the
/// kernel log may have more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelMessages(pub Vec<String>);

impl fmt::Display for KernelMessages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, " (the kernel says: {})", self.0.join("; "))
    }
}
