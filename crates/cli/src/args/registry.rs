//! Options of the verbs that talk to registries.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use transfer::lazy::TrustIndex;

use super::{Compression, FormOptions};

/// Memory for data of a pull in flight, in MiB.
pub(crate) const PULL_MEMORY: u64 = 32;

// What to pull, and from where.
#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// The image: alpine, ghcr.io/owner/app:1.2, localhost:5000/app@sha256:…
    pub(crate) reference: String,
    /// The image's name in the store; by default the whole reference
    pub(crate) name: Option<String>,
    /// Take the image of this platform from an index, as os/architecture[/variant]; refuse an image of another one
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Also keep the compressed layers, so that a push sends the very same bytes
    #[arg(long)]
    pub(crate) keep_layers: bool,
    /// Fetch no layers, but the image and an index that the registry has of it: `mount --lazy` then fetches what is read. An
    /// image without an index is pulled with its layers, or refused with `require`
    #[arg(
        long,
        value_enum,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "prefer",
        conflicts_with_all = ["keep_layers", "form", "dedup"]
    )]
    pub(crate) lazy: Option<LazyWish>,
    /// Trust the index with this digest, or with `repository` any that the repository has. By default only an index that is
    /// signed or that the manifest names, unless the image is named by its tag
    #[arg(long, value_name = "DIGEST|repository", requires = "lazy")]
    pub(crate) trust_index: Option<TrustIndex>,
    /// Leave out sockets and unknown file types, and list them, instead of refusing the image
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Index the layers while they are read, as `quire index` does; only with `--form tar`
    #[arg(long, conflicts_with = "lazy")]
    pub(crate) index: bool,
    /// Use up to this much memory for data in flight, in MiB
    #[arg(long, value_name = "MIB", default_value_t = PULL_MEMORY, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

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

// What to push, and where to.
#[derive(Debug, Args)]
pub(crate) struct Push {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// Target: ghcr.io/owner/app:1.2, localhost:5000/app; by default the image's name
    pub(crate) target: Option<String>,
    /// Compress layers like this. By default, layers that the registry has and layers of a pulled image stay as they are;
    /// other layers are compressed with gzip
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<Compression>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// To which registry to log in.
#[derive(Debug, Args)]
pub(crate) struct Login {
    /// The registry: docker.io, ghcr.io, localhost:5000
    pub(crate) host: String,
    /// User name; Quire asks for it if it is not given
    #[arg(short, long = "username", value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Read the password, or a token, from standard input instead of asking for it
    #[arg(long, requires = "user")]
    pub(crate) password_stdin: bool,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// From which registry to log out.
#[derive(Debug, Args)]
pub(crate) struct Logout {
    /// The registry, as for `login`
    pub(crate) host: String,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// Of what to show what is attached to it.
#[derive(Debug, Args)]
pub(crate) struct Referrers {
    /// The image: alpine, ghcr.io/owner/app:1.2, localhost:5000/app@sha256:…
    pub(crate) reference: String,
    /// List only this type, such as application/spdx+json
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
    /// For an index, list what refers to the image of this platform (os/architecture[/variant]), not to the index
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
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
