//! Options of the verbs that talk to registries.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

/// Memory for data of a pull in flight, in MiB.
pub(crate) const PULL_MEMORY: u64 = 32;

/// Whether an image may be pulled with its layers after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LazyWish {
    /// Without an index that can be used, its layers are pulled
    Prefer,
    /// Without an index that can be used, it is refused
    Require,
}

/// When an image is pulled before it is used, in podman's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PullPolicy {
    /// Pull it each time; what the store has already is not fetched again
    Always,
    /// Pull it if the store does not have the name
    Missing,
    /// Use what the store has
    Never,
}

// Whether an image is pulled before it is used.
#[derive(Debug, Args)]
pub(crate) struct PullOptions {
    /// When to pull the image before it is used. The default is `missing` with `--lazy`, and `never` otherwise
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) pull: Option<PullPolicy>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// How to talk to a registry.
#[derive(Debug, Clone, Args)]
pub(crate) struct RegistryOptions {
    /// Read credentials from this file first; it has the format of Docker's config.json or podman's auth.json
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) authfile: Option<PathBuf>,
    /// Read hosts.toml files and CAs from this directory first; it is laid out as containerd's certs.d
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) certs_dir: Option<PathBuf>,
    /// Use plain HTTP: anyone on the network path can read all data, and change data that is not signed
    #[arg(long)]
    pub(crate) plain_http: bool,
}
