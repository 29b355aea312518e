//! The option `--warm`: reading an image ahead into memory.

use clap::ValueEnum;

/// The part of an image that is read ahead into memory when the image is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Warm {
    /// The image file, if it has at most 32 MiB
    #[default]
    Auto,
    /// Read nothing ahead
    None,
    /// Read the image file ahead: names, owners and places of all files, and the smallest files
    Metadata,
}

impl From<Warm> for container::root::Warm {
    fn from(warm: Warm) -> Self {
        match warm {
            Warm::Auto => Self::Auto,
            Warm::None => Self::Nothing,
            Warm::Metadata => Self::Metadata,
        }
    }
}

/// Help text of `--warm`.
pub(crate) const WARM: &str = "Read ahead in the background; the mount does not wait, and cached \
    data is not read again. This helps programs that look at many files soon after the start, such as \
    find, ls -R, package managers and interpreters that search for modules. The disk is then read in \
    large pieces, not block by block. It has no effect on an image that was used since the host \
    started";
