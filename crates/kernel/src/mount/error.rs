//! Errors of mounts, with the kernel's messages.

use std::fmt;

use rustix::io::Errno;

use crate::version::KernelVersion;

/// What [`MountError::Unsupported`] calls it.
pub(super) const CHECK_VERITY: &str = "check fs-verity digests in overlays";
use crate::loopdev::LoopError;

/// Why a mount could not be made, changed or taken away.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel refused one step.
    #[error("cannot {step} {object}{messages}")]
    Call {
        /// The step of the mount sequence.
        step: Step,
        /// Object of the step, for people.
        object: String,
        /// Messages of the file system.
        messages: KernelMessages,
        /// The kernel's answer.
        source: Errno,
    },
    /// This kernel lacks something that no fallback replaces.
    #[error("cannot mount {object}: Linux {kernel} cannot {feature}, which Linux {since} can")]
    Unsupported {
        /// Object that was being mounted.
        object: String,
        /// Feature that the kernel lacks.
        feature: &'static str,
        /// The first Linux version that can.
        since: KernelVersion,
        /// The version of the running kernel.
        kernel: KernelVersion,
        /// The kernel's answer.
        source: Errno,
    },
    /// An overlay with an upper layer came out read-only. The kernel does that without an error
    /// where the upper file system lacks something (an idmapped upper, no `tmpfile`, no xattrs).
    #[error(
        "overlay {object} has an upper layer, but the kernel made it read-only \
         (the kernel log says why)"
    )]
    ReadOnly {
        /// The overlay's name.
        object: String,
    },
    /// The image needs a loop device, and there was none to be had.
    #[error("cannot mount {object} through a loop device")]
    Loop {
        /// The image.
        object: String,
        /// Cause.
        source: LoopError,
    },
}

impl MountError {
    /// Whether all that was missing is the kernel's own check of fs-verity digests in overlays.
    #[must_use]
    pub fn is_for_want_of_verity(&self) -> bool {
        matches!(self, Self::Unsupported { feature, .. } if *feature == CHECK_VERITY)
    }

    pub(crate) fn call(step: Step, object: impl fmt::Display, source: Errno) -> Self {
        Self::Call { step, object: object.to_string(), messages: KernelMessages::default(), source }
    }

    /// Says that a refusal comes of the kernel's age, if it does.
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

    /// The kernel's answer, if it gave one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Call { source, .. } | Self::Unsupported { source, .. } => Some(*source),
            Self::Loop { source, .. } => source.errno(),
            Self::ReadOnly { .. } => None,
        }
    }
}

/// A step of making, changing or ending a mount. Displays as what follows "cannot".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `fsopen`: the file system type is unknown, or this user may not mount.
    Open,
    /// `fsconfig`: one option, by its name.
    Set(String),
    /// `fsconfig(FSCONFIG_CMD_CREATE)`: the superblock.
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
    /// `fstatfs`, or reading what must be known before mounting.
    Examine,
    /// `umount2`.
    Unmount,
    /// The way through a user namespace that locks a mount's attributes.
    Lock,
    /// A temporary mountpoint, on kernels that cannot do without.
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

/// Messages of a file system in its context's log while it was set up, oldest first, without the level letter. If there
/// are none, the kernel log may have more.
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
