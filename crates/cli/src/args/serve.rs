//! The command line of `serve`, and of verbs that use a service.

use ::serve::lazy::{DoorKind, DoorWish};
use clap::{Args, ValueEnum};
use transfer::lazy::TrustIndex;

use super::{LazyWish, PullOptions};

const LAZY: &str = "Start although parts of the image are missing: programs that read one wait until `quire serve \
                               --lazy` has fetched and verified it. It is started if it does not run, and ends five \
                               minutes after the last use. An image that the store does not have is pulled \
                               without its layers, or with them if it has no index. `--lazy=require` refuses it then";

// How an image is mounted of which parts are missing. As a doc comment it would be the title of each verb that has it.
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
    pub(crate) lazy: Option<LazyWish>,
    /// Trust the index with this digest when the image is pulled, as `quire pull --trust-index` does
    #[arg(long, value_name = "DIGEST|repository", requires = "lazy")]
    pub(crate) trust_index: Option<TrustIndex>,
    /// Fetch what this trace of the image has before programs read it; `none` for nothing. Without this option it is the
    /// trace `default`, if the image has one (see `quire trace`)
    #[arg(long, value_name = "TRACE", requires = "lazy")]
    pub(crate) prefetch: Option<String>,
    /// Fetch all of the image, too, behind what programs read: then it is lazy no longer
    #[arg(long, requires = "lazy")]
    pub(crate) complete: bool,
    #[command(flatten)]
    pub(crate) pull: PullOptions,
}

/// How programs wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Door {
    /// The one that never gives zeros: files on FUSE
    Auto,
    /// Events: programs can read zeros if the service, its keeper and monitors are killed
    Fanotify,
    /// Files on FUSE
    Fuse,
}

impl Door {
    /// As options and settings spell it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Fanotify => "fanotify",
            Self::Fuse => "fuse",
        }
    }

    pub(crate) const fn wish(self) -> DoorWish {
        match self {
            Self::Auto => DoorWish::Auto,
            Self::Fanotify => DoorWish::Only(DoorKind::Fanotify),
            Self::Fuse => DoorWish::Only(DoorKind::Fuse),
        }
    }
}

/// An engine whose configuration is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// For /etc/containerd/config.toml
    Containerd,
    /// For /etc/docker/daemon.json; its containerd has to be told, too
    Docker,
    /// A template for k3s's containerd
    K3s,
}

/// When an engine need not bring a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Skip {
    /// Before the download
    Download,
    /// After it
    Unpack,
    /// Never
    Never,
}

impl Skip {
    /// As options and settings spell it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Download => "download",
            Self::Unpack => "unpack",
            Self::Never => "never",
        }
    }
}
