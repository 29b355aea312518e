//! Options of the verbs that make images of images.

use clap::Args;
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
