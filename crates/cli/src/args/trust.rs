//! Options that decide which images may be mounted, who verifies them, and how they are read.

use clap::{Args, ValueEnum};

/// The verifier of data that programs read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VerityPolicy {
    /// The kernel verifies with fs-verity, or Quire refuses to mount
    Require,
    /// The kernel verifies if it can; otherwise Quire trusts the import
    Auto,
    /// Reads are not verified
    Off,
}

/// How the kernel reads an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IoChoice {
    /// Read the store's files directly, where the kernel can: pages can be shared
    File,
    /// Read through loop devices with direct I/O: O_DIRECT works, and no pages are shared
    Loop,
}

/// How users get an image that the kernel does not mount for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ViaWord {
    /// The kernel for the host's root; for others the mount service if it is running, else `fuse-objects` where it
    /// works, else `fuse`, or a tree where there is no FUSE
    Auto,
    /// The kernel, from a copy that root's mount service has written (`quire serve --mounts`), with data in the
    /// store's objects: Linux 6.16 or newer
    Service,
    /// A server of names and attributes, with data in the store's objects: Linux 6.16 or newer
    FuseObjects,
    /// The image's tree rebuilt in memory, with data in the store's objects: Linux 6.16 or newer
    Tree,
    /// A server that checks every byte
    Fuse,
}

// Which images may be mounted, who verifies them, and how they are read.
#[derive(Debug, Clone, Args)]
pub(crate) struct Trust {
    /// Choose who verifies reads from the image
    #[arg(long, value_enum, default_value_t = VerityPolicy::Auto, value_name = "POLICY")]
    pub(crate) verity: VerityPolicy,
    /// Refuse every image except the one with this id, and verify the image file first
    #[arg(long, value_name = "ID")]
    pub(crate) digest: Option<image::verity::ImageId>,
    /// Share the page cache of equal files with images of the same NAME (forms `packed` and `tar`, Linux 7.0 or
    /// newer). By default images of the same store share; `none` shares nothing. Anyone who can add an image to a
    /// domain can change the data that the others read, so give each tenant a separate domain with a name that is
    /// hard to guess
    #[arg(long, value_name = "NAME", env = "QUIRE_DOMAIN")]
    pub(crate) domain: Option<String>,
    /// Choose how the kernel reads images of the forms `packed` and `tar`. Programs that open files with O_DIRECT,
    /// such as some databases, need loop; otherwise the open fails with EINVAL. The form `objects` always allows
    /// O_DIRECT
    #[arg(long, value_enum, default_value_t = IoChoice::File, value_name = "HOW")]
    pub(crate) io: IoChoice,
    /// Choose how users who are not root get the image. `quire doctor` shows the available ways
    #[cfg(feature = "serve")]
    #[arg(long, value_enum, default_value_t = ViaWord::Auto, value_name = "WAY")]
    pub(crate) via: ViaWord,
    /// Use this socket of the mount service
    #[cfg(feature = "serve")]
    #[arg(
        long,
        value_name = "PATH",
        env = "QUIRE_MOUNT_SERVICE",
        default_value = serve::mounts::MOUNTS_SOCKET,
        value_hint = clap::ValueHint::FilePath
    )]
    pub(crate) mount_service: std::path::PathBuf,
}

impl Trust {
    /// Converts the options to the type that roots use.
    pub(crate) fn wish(
        &self,
    ) -> Result<container::root::Trust, container::root::trust::DomainError> {
        use container::root::{PageDomain, VerityPolicy as Policy};
        use kernel::mount::Backing;
        Ok(container::root::Trust {
            verity: match self.verity {
                VerityPolicy::Require => Policy::Require,
                VerityPolicy::Auto => Policy::Auto,
                VerityPolicy::Off => Policy::Off,
            },
            digest: self.digest,
            domain: self.domain.as_deref().map_or(Ok(PageDomain::OfStore), str::parse)?,
            backing: match self.io {
                IoChoice::File => Backing::File,
                IoChoice::Loop => Backing::Loop,
            },
        })
    }
}
