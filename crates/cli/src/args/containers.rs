//! The command lines of containers.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use container::bundle::mounts::MountWish;
use container::root::WritableWish;

use transfer::commit::Change;

#[cfg(feature = "serve")]
use super::LazyOptions;
use super::userns::{Ranges, UserNs, ranges};
use super::volumes::mount;
use super::{Trust, WARM, Warm, When};
use crate::writable::{bytes, memory, writable};

/// What the container sees of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NetworkKind {
    None,
    Host,
    /// One of its own that pasta connects to the host's.
    Pasta,
    /// An existing namespace.
    Joined(PathBuf),
}

impl FromStr for NetworkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("ns:")) {
            ("none", _) => Ok(Self::None),
            ("host", _) => Ok(Self::Host),
            ("pasta", _) => Ok(Self::Pasta),
            (_, Some("")) | (_, None) => Err(NETWORKS.to_owned()),
            (_, Some(path)) => Ok(Self::Joined(path.into())),
        }
    }
}

const NETWORKS: &str = "use none, pasta, host, or ns:PATH, for example ns:/run/netns/NAME";

/// How large a log may be; none is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogSize(pub(crate) Option<NonZeroU64>);

impl FromStr for LogSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" | "unlimited" => Ok(Self(None)),
            _ => match bytes(text)? {
                // Each half is a file, which is renamed when it is full.
                size if size.get() < 4096 => Err("a log has 4096 bytes at least".to_owned()),
                size => Ok(Self(Some(size))),
            },
        }
    }
}

// How a program is started in a container.
#[derive(Debug, Args)]
pub(crate) struct Program {
    /// Set an environment variable. NAME alone passes on the caller's value, and keeps it out of the list of processes
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Set the environment variables of this file, which has NAME=VALUE or NAME in each line, and comments after #; --env
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

// How a container is to be. What is not said is as the image says.
#[derive(Debug, Args)]
pub(crate) struct Wanted {
    #[command(flatten)]
    pub(crate) trust: Trust,
    #[command(flatten)]
    pub(crate) program: Program,
    /// Replace the image's entrypoint; an empty value removes it
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    #[command(flatten)]
    pub(crate) names: super::names::Names,
    /// Network: none (loopback only, the default), pasta (one of its own that reaches out through the host's, and into which
    /// --publish leads), host, or ns:PATH, an existing network namespace, such as one of `ip netns`
    #[arg(long, alias = "net", value_name = "none|pasta|host|ns:PATH")]
    pub(crate) network: Option<NetworkKind>,
    #[arg(
        long,
        value_name = "KIND",
        value_parser = writable,
        help = "Store the container's changes in: dir[,size=SIZE][,durable], a directory of the container on the store's disk (`run` \
                only), whose limit needs a disk with project quotas; \
                self[,size=SIZE][,durable], a file system in one file of the container, with a limit of 10 GiB unless you \
                give another; memory[,size=SIZE]; dir=PATH[,durable], upper and work in a directory of yours, which stay; or \
                none. Only durable ones sync to disk. A full disk is an error for the container. The default is dir, where the \
                disk of the store is ext4, XFS, btrfs, F2FS or tmpfs; elsewhere, and for `bundle`, it is self for root, and \
                memory for others, half of --memory. Removing and replacing many small files is faster in self than in dir"
    )]
    pub(crate) writable: Option<WritableWish>,
    /// Make the root read-only, as `--writable none`
    #[arg(long, conflicts_with = "writable")]
    pub(crate) read_only: bool,
    /// With --read-only, let `df` show free space instead of a full file system, for programs that check before they start.
    /// The root directory is then merged from two, and takes longer to list
    #[arg(long)]
    pub(crate) df: bool,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    pub(crate) lazy: LazyOptions,
    /// Mount a directory or file of the host in the container; HOST begins with `/`, `./` or `../`
    #[arg(short, long, value_name = "HOST:CONTAINER[:ro]")]
    pub(crate) volume: Vec<String>,
    #[arg(
        long,
        value_name = "type=KIND,dst=PATH[,…]",
        value_parser = mount,
        help = "Add a mount: type=memory (with size=SIZE, mode=MODE), type=self (a file system in one file, removed with the \
                container; with size=SIZE, mode=MODE, durable) or type=dir (with src=PATH, a directory or file of the host). \
                All take ro. Docker's words work too: tmpfs, bind, source, target, readonly"
    )]
    pub(crate) mount: Vec<MountWish>,
    #[command(flatten)]
    pub(crate) ids: Ids,
    /// Limit the container's memory, such as 512m, at least 6m; beyond it the kernel kills processes of the container
    #[arg(short, long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: Option<NonZeroU64>,
    #[command(flatten)]
    pub(crate) cpu: super::cpu::Cpu,
    /// Run a small init of this host (catatonit, tini or docker-init) as PID 1. It reaps orphans and passes signals on to the
    /// command
    #[arg(long)]
    pub(crate) init: bool,
    /// Path of that init, a static program; implies --init
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) init_path: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) security: super::security::Security,
}

// Who the container's users are on the host.
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

impl Wanted {
    /// Whether it is to have less of the machine than there is.
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

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Have ports of the host lead to ports of the container; implies `--network pasta`. Without HOST, any free port, which
    /// `ps` lists; both may be ranges, such as 8000-8003
    #[arg(short, long, value_name = "[[IP:]HOST:]CONTAINER[/udp]")]
    pub(crate) publish: Vec<super::ports::Published>,
    /// OCI runtime, by name or path; by default the first of crun, runc and runsc that is installed. With runsc, gVisor keeps
    /// pipes, sockets and an empty /tmp in memory, so they are in no layer
    #[arg(long, env = "QUIRE_RUNTIME", value_name = "RUNTIME")]
    pub(crate) runtime: Option<OsString>,
    /// Run in the background; `ps` lists the container, `logs` prints its output, `rm` removes it
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Remove the container when it ends; without --detach this is always so
    #[arg(long)]
    pub(crate) rm: bool,
    /// Kill the container after this many seconds; the exit code is then 255. 0 means no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0, hide_default_value = true)]
    pub(crate) timeout: u32,
    /// Signal that `stop` sends first; by default the image's, or TERM
    #[arg(long, value_name = "SIGNAL")]
    pub(crate) stop_signal: Option<String>,
    /// Seconds after which `stop` kills the container, unless `stop --time` says otherwise; by default 10
    #[arg(long, value_name = "SECONDS")]
    pub(crate) stop_timeout: Option<u32>,
    /// Limit the log to this size, at least 4 KiB; at the limit, the older half is dropped. 0 means no limit
    #[arg(long, value_name = "SIZE", default_value = "64m")]
    pub(crate) log_size: LogSize,
    /// Name the container: 1 to 64 letters, digits, `-`, `_` and `.`; by default twelve digits
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) tty: Tty,
    /// A name of an image, an image id or its first digits (6 or more)
    pub(crate) image: String,
    /// The command; by default the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Bundle {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// Ask for a terminal in config.json
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// A name of an image, an image id or its first digits (6 or more)
    pub(crate) image: String,
    /// Empty or new directory for config.json and the root, which is mounted on rootfs
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
    /// The command; by default the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[cfg_attr(feature = "serve", expect(clippy::struct_excessive_bools, reason = "each is an option"))]
#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Also list containers that have ended
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Print ids only
    #[arg(short = 'q')]
    pub(crate) ids: bool,
    /// Show how much each container has written
    #[arg(short, long)]
    pub(crate) size: bool,
    /// List the devices of lazily mounted images instead: how much of each is here, and how long readers wait
    #[cfg(feature = "serve")]
    #[arg(long, group = "service", conflicts_with_all = ["all", "ids", "size"])]
    pub(crate) lazy: bool,
    /// List the roots of container engines instead that `quire serve --snapshotter` has mounted; with --all, all snapshots
    #[cfg(feature = "serve")]
    #[arg(long, group = "service", conflicts_with_all = ["ids", "size", "lazy"])]
    pub(crate) engine: bool,
    /// Print what --lazy lists, or what the service behind --engine has done, as metrics in the text format of Prometheus
    #[cfg(feature = "serve")]
    #[arg(long, conflicts_with = "json", requires = "service")]
    pub(crate) metrics: bool,
    /// Where the snapshotter listens that is asked for its metrics, instead of where serve.toml says
    #[cfg(feature = "serve")]
    #[arg(long, value_name = "PATH", requires_all = ["engine", "metrics"])]
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Containers
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Accepted for older scripts: only containers are removed in any case
    #[arg(long, hide = true)]
    pub(crate) container: bool,
    /// Kill running containers, and ignore names that do not exist
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Rmi {
    /// Names of images
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Ignore names that do not exist
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// A container
    pub(crate) container: String,
    /// Follow the output until the container ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Print only this many of the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// Containers
    #[arg(required = true)]
    pub(crate) containers: Vec<String>,
    /// Kill the container after this many seconds; by default the value of `run --stop-timeout`, or 10
    #[arg(short, long, alias = "timeout", value_name = "SECONDS")]
    pub(crate) time: Option<u32>,
    /// Send this signal first; by default the image's, or TERM
    #[arg(short, long, value_name = "SIGNAL")]
    pub(crate) signal: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// Containers; their exit codes are printed in this order
    #[arg(required = true)]
    pub(crate) containers: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) tty: Tty,
    /// A running container
    pub(crate) container: String,
    /// The command
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Commit {
    /// A container
    pub(crate) container: String,
    /// The new image's name
    pub(crate) name: String,
    /// Message for the image's history
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) message: Option<String>,
    /// Author of the image
    #[arg(short, long, value_name = "NAME")]
    pub(crate) author: Option<String>,
    /// Change the image's configuration by a line of a Dockerfile: CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL, USER,
    /// VOLUME or WORKDIR
    #[arg(short, long, value_name = "LINE")]
    pub(crate) change: Vec<Change>,
    /// Do not pause a running container; a file that changes meanwhile is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Snapshot {
    /// A container
    pub(crate) container: String,
    /// Tar to write, - for standard output
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
    /// Overwrite an existing file
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Do not pause a running container; a file that changes meanwhile is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
}
