//! Options of the verbs that start containers or programs in them.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use container::bundle::mounts::MountRequest;
use container::network::{PastaOptions, PastaOptionsError};
use container::networks::definition::RESERVED;
use container::root::WritableChoice;

#[cfg(feature = "serve")]
use super::LazyOptions;
use super::limits::size;
use super::userns::{Ranges, UserNs, ranges};
use super::volumes::{MountOption, mount, tmpfs};
use super::{Trust, WARM, Warm, When};
use crate::args::writable::{memory, writable};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NetworkKind {
    None,
    Host,
    /// A private namespace that pasta connects to the host's network.
    Pasta,
    /// The same, with options of pasta.
    PastaWith(PastaOptions),
    /// Path of an existing network namespace.
    Joined(PathBuf),
    /// Name of another container.
    Container(String),
    /// Names of networks of the store.
    Named(Vec<String>),
}

impl FromStr for NetworkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("ns:")) {
            ("none", _) => Ok(Self::None),
            ("host", _) => Ok(Self::Host),
            ("pasta", _) => Ok(Self::Pasta),
            (name, _) if name.starts_with(PASTA) => {
                let options = name.strip_prefix(PASTA).unwrap_or_default().parse();
                options.map(Self::PastaWith).map_err(|error: PastaOptionsError| error.to_string())
            }
            ("bridge" | "slirp4netns" | "private", _) => {
                let text = "use pasta, a private network that connects out through the host's, or the name of \
                    a network of `quire network create`";
                Err(text.to_owned())
            }
            (name, _) if name.starts_with(CONTAINER) => match name.strip_prefix(CONTAINER) {
                Some(name) if store::check_id(name).is_ok() => Ok(Self::Container(name.to_owned())),
                _ => Err("container: needs the name of a container".to_owned()),
            },
            (_, Some("")) => Err(NETWORKS.to_owned()),
            (names, None) => named(names).map(Self::Named),
            (_, Some(path)) => Ok(Self::Joined(path.into())),
        }
    }
}

/// Parses the names of networks of the store.
fn named(text: &str) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    for name in text.split(',') {
        if store::check_id(name).is_err() {
            return Err(NETWORKS.to_owned());
        }
        if RESERVED.contains(&name) {
            return Err(format!("{name} cannot be combined with other networks"));
        }
        if names.iter().any(|it| it == name) {
            return Err(format!("network {name} is named twice"));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

const NETWORKS: &str = "use none, pasta, host, container:NAME, the name of a network of `quire network create`, or \
    ns:PATH, for example ns:/run/netns/NAME";

/// Prefix of options of pasta.
const PASTA: &str = "pasta:";

/// Prefix of a container's name.
const CONTAINER: &str = "container:";

// How a program is started in a container.
#[derive(Debug, Args)]
pub(crate) struct Program {
    /// Set an environment variable. NAME without a value passes on the caller's value, and keeps it out of the list
    /// of processes
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Set the environment variables of this file. Each line is NAME=VALUE, NAME, or a comment that begins with #.
    /// --env overrides the file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) env_file: Vec<PathBuf>,
    /// Run as this user and group, by names or numbers. The default is the user of the image, or for `exec` of the
    /// container
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Start the command in this directory. The default is that of the image, or for `exec` of the container
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
}

/// Help text of `--network`.
const NETWORK: &str = "Connect the container to a network, by default none. `quire doctor` shows whether pasta is \
    installed\n\
    - none: only loopback\n\
    - pasta: a private network that connects out through the host's; --publish leads into it (`run` only)\n\
    - pasta:OPTION,…: the same, with options of pasta(1), for example pasta:-4,--mtu,1280\n\
    - host: the host's network\n\
    - container:NAME: the network of another container, which must run (`run` and `create` only)\n\
    - NAME[,NAME…]: networks of `quire network create`, whose containers reach each other by name (`run` and `create` \
    only)\n\
    - ns:PATH: an existing network namespace, such as one of `ip netns`";

/// Help text of `--writable`.
const WRITABLE: &str = "Choose where the container's changes go. Only durable changes are synced to the disk. If \
    the disk is full, writes in the container fail\n\
    - dir[,size=SIZE][,durable]: a directory of the container on the store's disk (`run` only); a limit needs a disk \
    with project quotas\n\
    - self[,size=SIZE][,durable]: a file system in one file of the container, by default of 10 GiB, or for \
    `bundle` of an eighth of the free space; faster than dir for many small files\n\
    - memory[,size=SIZE]: memory, by default half of --memory, or else of the host's memory\n\
    - dir=PATH[,durable]: the directories `upper` and `work` below PATH, which stay\n\
    - none: the root is read-only\n\
    The default of `run` is dir if the disk of the store is ext4, XFS, btrfs, F2FS or tmpfs. Otherwise, and for \
    `bundle`, it is self for root, and memory for others";

/// Help text of `--mount`.
const MOUNT: &str = "Add a mount. Docker's keywords work as well: tmpfs, bind, source, target, readonly\n\
    - type=memory[,size=SIZE][,mode=MODE][,ro]: memory\n\
    - type=self[,size=SIZE][,mode=MODE][,durable][,ro]: a file system in one file, by default of 10 GiB, \
    removed with the container\n\
    - type=volume[,src=NAME][,ro]: a volume, as with --volume\n\
    - type=dir,src=PATH[,ro]: a directory or file of the host";

// Settings of a container. Where an option is missing, the image's configuration applies.
//
// Help has the groups of options in the order of these fields.
#[derive(Debug, Args)]
pub(crate) struct ContainerOptions {
    #[command(flatten)]
    pub(crate) program: Program,
    /// Replace the image's entrypoint by this program, or a JSON array with its arguments; an empty value
    /// removes it
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    #[command(flatten)]
    pub(crate) names: super::names::Names,
    #[arg(long, alias = "net", value_name = "none|pasta|host|NAME|…", help = NETWORK)]
    pub(crate) network: Option<NetworkKind>,
    #[command(flatten)]
    pub(crate) join: super::names::JoinOptions,
    #[arg(long, value_name = "KIND", value_parser = writable, help = WRITABLE)]
    pub(crate) writable: Option<WritableChoice>,
    /// Make the root read-only, as `--writable none`
    #[arg(long, conflicts_with = "writable")]
    pub(crate) read_only: bool,
    /// With --read-only, let `df` show free space instead of a full file system, for programs that check before they
    /// start. Listing the root directory then takes longer
    #[arg(long)]
    pub(crate) df: bool,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
    /// Mount a directory or file of the host in the container (SOURCE begins with `/`, `./` or `../`), or the volume
    /// of this name, which is made if there is none. Without a source, the container gets a new volume, which is
    /// removed with it. With U, the files get the owner of the container's program; z and Z have no effect
    #[arg(short, long, value_name = "[SOURCE:]CONTAINER[:ro,U,z]")]
    pub(crate) volume: Vec<String>,
    /// Mount a file system in memory. The options are those of mount(8), such as size=64m, mode=1770, ro and exec;
    /// by default rw,noexec,nosuid,nodev
    #[arg(long, value_name = "PATH[:OPTIONS]", value_parser = tmpfs)]
    pub(crate) tmpfs: Vec<MountRequest>,
    /// Set the size of /dev/shm, by default 64m; 0 means no limit
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) shm_size: Option<u64>,
    #[arg(
        long,
        value_name = "type=KIND,dst=PATH[,…]",
        value_parser = mount,
        help = MOUNT
    )]
    pub(crate) mount: Vec<MountOption>,
    /// Limit the container's memory, for example 512m; at least 6m, or 0 for no limit. Above the limit, the kernel kills
    /// processes of the container
    #[arg(short, long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: Option<u64>,
    #[command(flatten)]
    pub(crate) cpu: super::cpu::Cpu,
    #[command(flatten)]
    pub(crate) security: super::security::Security,
    #[command(flatten)]
    pub(crate) process: super::process::ProcessOptions,
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
    /// Run the static program at this path as that init; implies --init
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) init_path: Option<PathBuf>,
}

// Mapping of the container's users to users of the host.
#[derive(Debug, Args)]
pub(crate) struct Ids {
    #[arg(
        long,
        value_name = "WHO",
        help = "Map the container's users to users of the host; with `run`, only root can do this. Files whose owner \
                is not in the map appear as nobody (65534)\n\
                - host: no map, the default for root\n\
                - auto[,size=COUNT]: ids from /etc/subuid and /etc/subgid that no other container of the store has, \
                65536 by default\n\
                - CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…]: a map for users and groups alike"
    )]
    pub(crate) userns: Option<UserNs>,
    /// Map users, by CONTAINER:HOST:SIZE[,…]; groups use the same map unless --gidmap is given
    #[arg(long, value_name = "MAP", conflicts_with = "userns", value_parser = ranges)]
    pub(crate) uidmap: Option<Ranges>,
    /// Map groups, by CONTAINER:HOST:SIZE[,…]; users use the same map unless --uidmap is given
    #[arg(long, value_name = "MAP", conflicts_with = "userns", value_parser = ranges)]
    pub(crate) gidmap: Option<Ranges>,
}

// How a command is connected to its caller.
#[derive(Debug, Args)]
pub(crate) struct Tty {
    /// Give the command a terminal, as `--tty always`
    #[arg(short = 't', conflicts_with = "tty")]
    terminal: bool,
    /// Choose when the command gets a terminal. With auto, it gets one if standard input and output are terminals
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    tty: When,
    /// Keep standard input connected, which is the default
    #[arg(short, long)]
    pub(crate) interactive: bool,
}

impl ContainerOptions {
    /// Returns the limit of memory, in bytes.
    pub(crate) fn memory_limit(&self) -> Option<NonZeroU64> {
        self.memory.and_then(NonZeroU64::new)
    }

    /// Returns whether memory, processors or processes are limited.
    pub(crate) fn has_limits(&self) -> bool {
        self.memory_limit().is_some()
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
