//! Options of `serve`, and of verbs that use a service.

use clap::{Args, ValueEnum};
use transfer::lazy::TrustIndex;

use super::{LazyChoice, PullOptions};

const LAZY: &str = "Start although parts of the image are missing: programs that read a missing \
    part wait until `quire serve --lazy` has fetched and verified it. The service is started if it \
    does not run, and exits five minutes after its last use. An image that the store does not have is \
    pulled without its layers, or with them if it has no index. With `--lazy=require`, an image without \
    an index is refused";

// How an image with missing parts is mounted. A doc comment here would become the title of each verb with these
// options.
#[derive(Debug, Args)]
pub(crate) struct LazyOptions {
    #[arg(
        long,
        help = LAZY,
        value_enum,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "prefer"
    )]
    pub(crate) lazy: Option<LazyChoice>,
    /// Trust the index with this digest when the image is pulled, as `quire pull --trust-index` does
    #[arg(long, value_name = "DIGEST|repository", requires = "lazy")]
    pub(crate) trust_index: Option<TrustIndex>,
    /// Prefetch the parts of the image that this trace lists; `none` prefetches nothing. The default is the trace
    /// `default`, if the image has one (see `quire trace`)
    #[arg(long, value_name = "TRACE", requires = "lazy")]
    pub(crate) prefetch: Option<String>,
    /// Also fetch the rest of the image in the background; after that, the image is no longer lazy
    #[arg(long, requires = "lazy")]
    pub(crate) complete: bool,
    #[command(flatten)]
    pub(crate) pull: PullOptions,
    /// Set while `trace` records reads: the image is mounted with the read-ahead that its lazy mounts have.
    #[arg(skip)]
    pub(crate) is_recorded: std::cell::Cell<bool>,
}

/// An engine for which Quire can print a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// For /etc/containerd/config.toml
    Containerd,
    /// For /etc/docker/daemon.json; its containerd needs a configuration as well
    Docker,
    /// A template for k3s's containerd
    K3s,
}

/// When an engine may skip a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Skip {
    /// Before the download
    Download,
    /// After the download
    Unpack,
    /// Do not skip layers
    Never,
}

impl Skip {
    /// Returns the word for options and settings.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Download => "download",
            Self::Unpack => "unpack",
            Self::Never => "never",
        }
    }
}
