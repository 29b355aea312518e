//! The command line of `serve`, and of verbs that use a service.

use std::path::PathBuf;

use clap::Args;

use super::RegistryOptions;

pub(crate) const LAZY: &str = "Start although parts of the image are missing: programs that read one wait until `quire serve \
                               --lazy` has fetched and verified it";

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Fill lazy devices. There is no other service yet
    #[arg(long, required = true)]
    pub(crate) lazy: bool,
    /// Take over from the service that runs: readers wait, and see nothing of it
    #[arg(long, conflicts_with = "keeper")]
    pub(crate) replace: bool,
    /// Be the keeper of the service at the other end of standard input, in this folder
    #[arg(long, hide = true)]
    pub(crate) keeper: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}
