//! The command lines of what is in memory.

use clap::{Args, ValueEnum};

/// What of an image is brought into memory when it is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Warm {
    /// The image file, if it has at most 32 MiB
    #[default]
    Auto,
    /// Nothing: what is used comes when it is used
    None,
    /// The image file: names, owners and places of all files, and the smallest files
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

/// What help says of `--warm`.
pub(crate) const WARM: &str = "What is read ahead: the mount waits for nothing, and what is in memory already is not read again. \
                    It helps what looks at many files soon after the start, such as find, ls -R, package managers and \
                    interpreters that search for modules, when the image has not been used since the host started: the disk \
                    is read in large pieces then, not block by block. On an image that is used it changes nothing";

#[derive(Debug, Args)]
pub(crate) struct Du {
    /// Only these images
    pub(crate) names: Vec<String>,
    /// Sizes in bytes
    #[arg(short, long)]
    pub(crate) bytes: bool,
    /// What of images is in memory now, not what they take on disk: of image files, of files in the store, and of mounts
    /// that can be reached (those seen from here, and those of containers). TWICE is how much more there is than one copy
    /// of each file, at most; in the total also of equal files that different images have each for itself. Looking
    /// brings nothing into memory
    #[arg(long)]
    pub(crate) memory: bool,
}
