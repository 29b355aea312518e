//! The command lines of verbs that make something of an image.

use clap::Args;

use super::FormOptions;
use transfer::derive::Glob;

// What to lay over each other.
#[derive(Debug, Args)]
pub(crate) struct Merge {
    /// Names, image ids or their first digits (6 or more), two images or more: the first is the lowest
    #[arg(required = true, num_args = 2.., value_name = "IMAGE")]
    pub(crate) images: Vec<String>,
    /// The new image's name
    pub(crate) name: String,
}

// What to keep, of which image.
#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// The new image's name
    pub(crate) new: String,
    /// Keep what this matches, and no longer everything; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<Glob>,
    /// Leave out what this matches, with all that is below it; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<Glob>,
}

// Which image, and how it is to be stored.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Name of the converted image; by default the old name moves to it
    pub(crate) new: Option<String>,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Use up to this much memory for data in flight, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

// Which image.
#[derive(Debug, Args)]
pub(crate) struct Index {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Add image and index to this image in a registry, so that `pull --lazy` needs no layers
    #[cfg(feature = "registry")]
    #[arg(long, value_name = "REFERENCE")]
    pub(crate) push: Option<String>,
    #[cfg(feature = "registry")]
    #[command(flatten)]
    pub(crate) registry: super::RegistryOptions,
}
