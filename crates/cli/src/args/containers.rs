//! Options of the verbs that start containers or programs in them.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use container::bundle::mounts::MountRequest;
use container::root::WritableChoice;

#[cfg(feature = "serve")]
use super::LazyOptions;
use super::userns::{Ranges, UserNs, ranges};
use super::volumes::mount;
use super::{Trust, WARM, Warm, When};
use crate::args::writable::{bytes, memory, writable};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NetworkKind {
    None,
    Host,
    /// A private namespace that pasta connects to the host's network.
    Pasta,
    /// Path of an existing network namespace.
    Joined(PathBuf),
}

impl FromStr for NetworkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("ns:")) {
            ("none", _) => Ok(Self::None),
            ("host", _) => Ok(Self::Host),
            ("pasta", _) => Ok(Self::Pasta),
            ("bridge" | "slirp4netns" | "private", _) => {
                Err("use pasta, a private network that connects out through the host's".to_owned())
            }
            (name, _) if name.starts_with("container:") => {
                Err(crate::verbs::podman_hints::SHARED_NETWORK.to_owned())
            }
            (_, Some("")) | (_, None) => Err(NETWORKS.to_owned()),
            (_, Some(path)) => Ok(Self::Joined(path.into())),
        }
    }
}

const NETWORKS: &str = "use none, pasta, host, or ns:PATH, for example ns:/run/netns/NAME";

/// Maximum size of a log, in bytes; `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogSize(pub(crate) Option<NonZeroU64>);

impl FromStr for LogSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" | "unlimited" => Ok(Self(None)),
            _ => match bytes(text)? {
                // The log consists of two files, each of half the size. A full file is renamed.
                size if size.get() < 4096 => Err("a log has at least 4096 bytes".to_owned()),
                size => Ok(Self(Some(size))),
            },
        }
    }
}

// How a program is started in a container.
#[derive(Debug, Args)]
pub(crate) struct Program {
    /// Set an environment variable. NAME alone passes on the caller's value, and keeps it out of the list of
    /// processes
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Set the environment variables of this file: NAME=VALUE or NAME in each line, and comments after #; --env
    /// overrides it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) env_file: Vec<PathBuf>,
    /// Run as this user and group; names or numbers
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Start the command in this directory
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
}

// Settings of a container. Where an option is missing, the image's configuration applies.
//
// Help has the groups of options in the order of these fields.
#[derive(Debug, Args)]
pub(crate) struct ContainerOptions {
    #[command(flatten)]
    pub(crate) program: Program,
    /// Replace the image's entrypoint; an empty value removes it
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    #[command(flatten)]
    pub(crate) names: super::names::Names,
    /// Network: none (loopback only, the default), pasta (a private network that connects out through the host's,
    /// and into which --publish leads), host, or ns:PATH, an existing network namespace, such as one of `ip netns`
    #[arg(long, alias = "net", value_name = "none|pasta|host|ns:PATH")]
    pub(crate) network: Option<NetworkKind>,
    #[arg(
        long,
        value_name = "KIND",
        value_parser = writable,
        help = "Store the container's changes in: dir[,size=SIZE][,durable], a directory of the \
            container on the store's disk (`run` only), where a limit needs a disk with project \
            quotas; self[,size=SIZE][,durable], a file system in one file of the container, with a \
            default limit of 10 GiB; memory[,size=SIZE]; dir=PATH[,durable], upper and work in a \
            directory of yours, which stay; or none. Only durable ones sync to disk. A full disk is \
            an error for the container. The default is dir if the disk of the store is ext4, XFS, \
            btrfs, F2FS or tmpfs; otherwise, and for `bundle`, it is self for root, and memory for \
            others, half of --memory. Removing and replacing many small files is faster in self than \
            in dir"
    )]
    pub(crate) writable: Option<WritableChoice>,
    /// Make the root read-only, as `--writable none`
    #[arg(long, conflicts_with = "writable")]
    pub(crate) read_only: bool,
    /// With --read-only, let `df` show free space instead of a full file system, for programs that check before they
    /// start. The root directory is then merged from two, and takes longer to list
    #[arg(long)]
    pub(crate) df: bool,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
    /// Mount a directory or file of the host in the container; HOST begins with `/`, `./` or `../`
    #[arg(short, long, value_name = "HOST:CONTAINER[:ro]")]
    pub(crate) volume: Vec<String>,
    #[arg(
        long,
        value_name = "type=KIND,dst=PATH[,…]",
        value_parser = mount,
        help = "Add a mount: type=memory (with size=SIZE, mode=MODE), type=self (a file system in \
            one file, removed with the container; with size=SIZE, mode=MODE, durable) or type=dir \
            (with src=PATH, a directory or file of the host). All take ro. Docker's keywords work as \
            well: tmpfs, bind, source, target, readonly"
    )]
    pub(crate) mount: Vec<MountRequest>,
    /// Limit the container's memory, such as 512m, at least 6m; beyond it the kernel kills processes of the container
    #[arg(short, long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: Option<NonZeroU64>,
    #[command(flatten)]
    pub(crate) cpu: super::cpu::Cpu,
    #[command(flatten)]
    pub(crate) security: super::security::Security,
    #[command(flatten)]
    pub(crate) trust: Trust,
    #[command(flatten)]
    pub(crate) ids: Ids,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    pub(crate) lazy: LazyOptions,
    /// Run a small init of this host (catatonit, tini or docker-init) as PID 1. It reaps orphans and passes signals
    /// on to the command
    #[arg(long)]
    pub(crate) init: bool,
    /// Path of that init, a static program; implies --init
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) init_path: Option<PathBuf>,
}

// Mapping of the container's users to users of the host.
#[derive(Debug, Args)]
pub(crate) struct Ids {
    #[arg(
        long,
        value_name = "WHO",
        help = "Map the container's users to users of the host: host (no map, the default); auto[,size=COUNT], ids from \
                /etc/subuid and /etc/subgid that no other container of the store has, 65536 by default; or a map, \
                CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…], for users and groups alike. Files whose owner is not in the \
                map appear as nobody (65534)"
    )]
    pub(crate) userns: Option<UserNs>,
    /// Map users; groups use the same map unless --gidmap is given
    #[arg(long, value_name = "MAP", conflicts_with = "userns", value_parser = ranges)]
    pub(crate) uidmap: Option<Ranges>,
    /// Map groups; users use the same map unless --uidmap is given
    #[arg(long, value_name = "MAP", conflicts_with = "userns", value_parser = ranges)]
    pub(crate) gidmap: Option<Ranges>,
}

// How a command is connected to its caller.
#[derive(Debug, Args)]
pub(crate) struct Tty {
    /// Give the command a terminal
    #[arg(short = 't', conflicts_with = "tty")]
    terminal: bool,
    /// Give the command a terminal; auto does if standard input and output are one
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    tty: When,
    /// Keep standard input connected, which is the default
    #[arg(short, long)]
    pub(crate) interactive: bool,
}

impl ContainerOptions {
    /// Returns whether memory, processors or processes are limited.
    pub(crate) fn has_limits(&self) -> bool {
        self.memory.is_some()
            || self.cpu.cpus.is_some()
            || self.cpu.cpu_shares.is_some()
            || self.cpu.cpuset_cpus.is_some()
            || self.security.pids_limit.is_some_and(|it| it > 0)
    }
}

impl Tty {
    pub(crate) fn when(&self) -> When {
        if self.terminal { When::Always } else { self.tty }
    }
}
