//! Options that several verbs share.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

mod changes;
mod containers;
pub(crate) mod cpu;
pub(crate) mod labels;
pub(crate) mod limits;
mod logging;
mod memory;
mod names;
pub(crate) mod ports;
mod process;
#[cfg(feature = "registry")]
mod registry;
mod security;
#[cfg(feature = "serve")]
mod serve;
mod trust;
pub(crate) mod userns;
mod volumes;
pub(crate) mod writable;

pub(crate) use changes::ChangeOptions;
pub(crate) use containers::{ContainerOptions, Ids, NetworkKind, Program, Tty};
pub(crate) use labels::Labels;
pub(crate) use logging::LogOptions;
pub(crate) use memory::{WARM, Warm};
pub(crate) use names::{AddedHost, Address, Names, Server};
pub(crate) use process::Descriptors;
#[cfg(feature = "registry")]
pub(crate) use registry::{
    KeepIndexOption, LazyChoice, PULL_MEMORY, PullOptions, PullPolicy, RegistryOptions,
};
pub(crate) use security::{Security, SecurityOpt};
#[cfg(feature = "serve")]
pub(crate) use serve::{Engine, LazyOptions, Skip};
pub(crate) use trust::Trust;
#[cfg(feature = "serve")]
pub(crate) use trust::ViaWord;
pub(crate) use volumes::{ask_for_labels, mounts, volumes};

/// Heading of the options of all verbs in help.
pub(crate) const EVERY: &str = "Global options";

// Options of every verb.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Use the store in this directory; by default /var/lib/quire for root, else $XDG_DATA_HOME/quire, or
    /// ~/.local/share/quire. Its mode is 0700. Root runs nothing from a store that another user can change, and mounts
    /// only images of it that fs-verity seals
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_STORE", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) store: Option<PathBuf>,
    /// Also look for images in this store, which root shares (`quire share`); it may be given several times. Users
    /// always look in root's own store, /var/lib/quire, if it is shared
    #[arg(long, global = true, help_heading = EVERY, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) image_store: Vec<PathBuf>,
    /// Use this policy in addition to the administrator's, instead of $XDG_CONFIG_HOME/quire/policy.toml
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_POLICY", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) policy: Option<PathBuf>,
    /// Protect new files of the store with fs-verity, or with the immutable flag where there is no fs-verity. A store
    /// made with `immutable` keeps that setting; `quire unseal` clears the flags
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_SEAL", value_name = "HOW")]
    pub(crate) seal: Option<Seal>,
    /// If this command makes the store, name its objects and images by this hash; by default sha256. A store with
    /// sha512 has images of the form `objects` only
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_OBJECT_HASH", value_name = "HASH")]
    pub(crate) object_hash: Option<ObjectHash>,
    /// Print JSON for programs; docs/json.md has its fields
    #[arg(long, global = true, help_heading = EVERY)]
    pub(crate) json: bool,
    /// Log more: once logs each request, twice logs each object
    #[arg(long, global = true, help_heading = EVERY, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Print no progress
    #[arg(long, global = true, help_heading = EVERY)]
    pub(crate) no_progress: bool,
    /// Print no progress and no remarks (warnings); for an image that is made or pulled, print only its id
    #[arg(long, global = true, help_heading = EVERY, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

/// How new files of the store are protected from change.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Seal {
    /// fs-verity, if the file system supports it
    Verity,
    /// fs-verity, else the immutable flag where the user may set it; `rm -r` of the store then fails
    Immutable,
}

/// The hash of a store, which names its objects and images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectHash {
    /// SHA-256
    Sha256,
    /// SHA-512
    Sha512,
}

// How an image's data is stored.
#[derive(Debug, Default, Args)]
pub(crate) struct FormOptions {
    /// Store the data in this form; `auto` chooses the best for this host, and `quire doctor` shows the reason
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    pub(crate) form: FormChoice,
}

/// How an image's data is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum FormChoice {
    /// `packed` if the kernel shares pages between such images and the store's disk allows direct I/O in blocks of
    /// 512 bytes, else `objects`
    #[default]
    Auto,
    /// One file for each content, found through overlayfs; all images share these files, on disk and in memory
    Objects,
    /// Packed devices, which EROFS reads without overlayfs: half of the inodes, and the fastest start
    Packed,
    /// The layers' tars, which EROFS reads without overlayfs: nothing is unpacked
    Tar,
}

// How the tree is made from a source.
#[derive(Debug, Default, Args)]
pub(crate) struct TreeOptions {
    /// Directory of the objects that a dump or a composefs image refers to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) objects: Option<PathBuf>,
    /// Leave out sockets and unknown file types, and list them, instead of refusing the source
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    #[command(flatten)]
    pub(crate) xattrs: XattrOptions,
    /// Drop fractions of seconds from times
    #[arg(long)]
    pub(crate) whole_seconds: bool,
}

// Which extended attributes of directories and tars are kept.
#[derive(Debug, Default, Args)]
pub(crate) struct XattrOptions {
    /// Drop all extended attributes, including ACLs and file capabilities
    #[arg(long)]
    pub(crate) skip_xattrs: bool,
    /// Keep only extended attributes whose names begin with `user.`
    #[arg(long, conflicts_with = "skip_xattrs")]
    pub(crate) user_xattrs: bool,
}

/// How layers are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compression {
    /// As in the manifest; blobs that the store has not kept are compressed again
    AsItWas,
    /// gzip
    Gzip,
    /// zstd
    Zstd,
    /// No compression
    None,
}

/// Parses the value of a Boolean option. Source of the values: Go's `strconv.ParseBool`.
pub(crate) fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err("use true or false".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    Auto,
    Always,
    Never,
}
