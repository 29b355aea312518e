//! Options of the verbs that connect to registries.

use std::path::PathBuf;

use anyhow::bail;
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum, ValueHint};

use crate::args::boolean;

/// Default memory for a pull's data in flight, in MiB.
pub(crate) const PULL_MEMORY: u64 = 32;

/// Whether an image without a usable index is pulled with its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LazyChoice {
    /// Pull the layers if there is no usable index
    Prefer,
    /// Refuse the image if there is no usable index
    Require,
}

/// When an image is pulled before it is used; the words are podman's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PullPolicy {
    /// Pull it each time; data that the store already has is not fetched again
    Always,
    /// Pull it if the store does not have the name
    Missing,
    /// Use the image in the store
    Never,
}

// Whether an image is pulled before it is used.
#[derive(Debug, Args)]
pub(crate) struct PullOptions {
    /// Choose when to pull the image: by default missing for `run` and `create`, and with --lazy; otherwise never
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) pull: Option<PullPolicy>,
    #[command(flatten)]
    pub(crate) keep_index: KeepIndexOption,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// Whether pulls keep indexes.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct KeepIndexOption {
    /// Make an index for lazy loading while the layers are pulled, and keep it in the store: hosts that pull from
    /// `serve --registry` then get it. The image gets the form `tar`
    #[arg(long, env = "QUIRE_KEEP_INDEX", value_parser = FalseyValueParser::new())]
    pub(crate) keep_index: bool,
}

// Connection to a registry.
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
    /// Require HTTPS with a valid certificate; with false, accept any certificate, and plain HTTP if there is no HTTPS.
    /// This applies to the registry of this command, and not to its mirrors
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean,
        conflicts_with = "plain_http"
    )]
    pub(crate) tls_verify: Option<bool>,
}

impl RegistryOptions {
    /// Refuses an option for one registry in commands that may use all of them, also later.
    pub(crate) fn check_several(&self) -> anyhow::Result<()> {
        if self.tls_verify == Some(false) {
            bail!(
                "--tls-verify=false is for commands that use one registry: for lasting settings, name the registry in \
                hosts.toml, with skip_verify = true"
            );
        }
        Ok(())
    }
}
