//! The command lines of containers.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use container::bundle::mounts::MountWish;
use container::root::WritableWish;

use transfer::commit::Change;

use super::{Trust, WARM, Warm, When};
use crate::userns::{Ranges, UserNs, ranges};
use crate::volumes::mount;
use crate::writable::{bytes, writable};

/// What the container sees of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NetworkKind {
    None,
    Host,
    /// A namespace that somebody else has made.
    Joined(PathBuf),
}

impl FromStr for NetworkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("ns:")) {
            ("none", _) => Ok(Self::None),
            ("host", _) => Ok(Self::Host),
            (_, Some("")) | (_, None) => Err(NETWORKS.to_owned()),
            (_, Some(path)) => Ok(Self::Joined(path.into())),
        }
    }
}

const NETWORKS: &str = "it is none, host, or ns:PATH, such as ns:/run/netns/NAME";

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
    /// Set a variable, or with NAME alone pass on the caller's
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// User, and group, to run as: names or numbers
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Where the command starts
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
    /// Replace the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    #[command(flatten)]
    pub(crate) names: super::names::Names,
    /// Network: none (loopback alone), host, or ns:PATH, a namespace that somebody else has made, such as one of `ip netns`
    #[arg(long, alias = "net", value_name = "none|host|ns:PATH", default_value = "none")]
    pub(crate) network: NetworkKind,
    #[arg(
        long,
        value_name = "KIND",
        value_parser = writable,
        help = "Where changes go: memory[,size=SIZE], self[,size=SIZE][,durable] (a file system in one file of the \
                container), dir=PATH[,durable] (upper and work in a directory of yours, which stay), or none. All but \
                those that are durable sync nothing. A disk that is full is an error for the container. By default self of \
                10 GiB, for root, which takes what is written and some room ahead of that (`bundle`: all of its size, an \
                eighth of what is free); memory for others, half of --memory"
    )]
    pub(crate) writable: Option<WritableWish>,
    /// Nothing can be written: `--writable none`
    #[arg(long, conflicts_with = "writable")]
    pub(crate) read_only: bool,
    /// With --read-only: let `df` show an empty file system with some space in it, not a full one, for programs that look
    /// before they start. The price is a root directory that is merged of two, which takes longer to list
    #[arg(long)]
    pub(crate) df: bool,
    #[arg(long, value_enum, value_name = "WHAT", default_value_t, help = WARM)]
    pub(crate) warm: Warm,
    /// Show a directory or file of the host in the container: HOST begins with `/`, `./` or `../`
    #[arg(short, long, value_name = "HOST:CONTAINER[:ro]")]
    pub(crate) volume: Vec<String>,
    #[arg(
        long,
        value_name = "type=KIND,dst=PATH[,…]",
        value_parser = mount,
        help = "Mount something in the container: type=memory (size=SIZE, mode=MODE), type=self (a file system in one file, \
                gone with the container: size=SIZE, mode=MODE, durable) or type=dir (src=PATH, a directory or file of the \
                host); each with ro. Docker's words are understood too: tmpfs, bind, source, target, readonly"
    )]
    pub(crate) mount: Vec<MountWish>,
    #[command(flatten)]
    pub(crate) ids: Ids,
    /// The most memory that it may use, such as 512m
    #[arg(short, long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) memory: Option<NonZeroU64>,
    #[command(flatten)]
    pub(crate) cpu: super::cpu::Cpu,
    /// Let a small program of this host (catatonit, tini or docker-init) be process 1, which waits for orphans and passes
    /// signals on to the command
    #[arg(long)]
    pub(crate) init: bool,
    /// That program, a static one; implies --init
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
        help = "Who the container's users are on the host: host (themselves, the default), auto[,size=COUNT] (65536, or \
                so many, whom no other container of the store has, from /etc/subuid and /etc/subgid), or a map, \
                CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…], for users and groups alike. Files of an image's users whom \
                the map lacks belong to nobody (65534)"
    )]
    pub(crate) userns: Option<UserNs>,
    /// A map for users; that for groups is the same if --gidmap does not say another
    #[arg(long, value_name = "MAP", conflicts_with = "userns", value_parser = ranges)]
    pub(crate) uidmap: Option<Ranges>,
    /// A map for groups; that for users is the same if --uidmap does not say another
    #[arg(long, value_name = "MAP", conflicts_with = "userns", value_parser = ranges)]
    pub(crate) gidmap: Option<Ranges>,
}

// How a command is connected to its caller.
#[derive(Debug, Args)]
pub(crate) struct Tty {
    /// A terminal for the command
    #[arg(short = 't', conflicts_with = "tty")]
    terminal: bool,
    /// When the command has a terminal: by default when standard input and output are one
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    tty: When,
    /// Keep standard input connected, as it always is
    #[arg(short, long)]
    pub(crate) interactive: bool,
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
    /// The OCI runtime, by name or path; by default crun, runc or runsc, the first that is there. With runsc, gVisor has pipes,
    /// sockets and an empty /tmp in memory: they are in no layer
    #[arg(long, env = "QUIRE_RUNTIME", value_name = "RUNTIME")]
    pub(crate) runtime: Option<OsString>,
    /// Start it and return; `ps` shows it, `logs` what it wrote, `rm` removes it
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Remove it as soon as it has ended: always so without --detach
    #[arg(long)]
    pub(crate) rm: bool,
    /// Kill it after so many seconds; the exit code is 255 then. 0 is no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0, hide_default_value = true)]
    pub(crate) timeout: u32,
    /// What asks it to end when `stop` does; by default what the image says, or TERM
    #[arg(long, value_name = "SIGNAL")]
    pub(crate) stop_signal: Option<String>,
    /// After so many seconds `stop` kills it, if --time does not say another number; by default 10
    #[arg(long, value_name = "SECONDS")]
    pub(crate) stop_timeout: Option<u32>,
    /// How large its log may be, from 4 KiB on: then the oldest half of it goes. 0 is no limit
    #[arg(long, value_name = "SIZE", default_value = "64m")]
    pub(crate) log_size: LogSize,
    /// What the container is called: 1 to 64 of letters, digits, `-`, `_` and `.`; by default twelve digits
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) tty: Tty,
    /// A name of an image, an image id or its beginning
    pub(crate) image: String,
    /// The command; by default the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Bundle {
    #[command(flatten)]
    pub(crate) wanted: Wanted,
    /// A terminal in the configuration
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// A name of an image, an image id or its beginning
    pub(crate) image: String,
    /// A directory that is empty, or not there yet: it gets config.json, and the root mounted on rootfs
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
    /// The command; by default the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Those that have ended, too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Print ids alone
    #[arg(short = 'q')]
    pub(crate) ids: bool,
    /// Show how much each container has written
    #[arg(short, long)]
    pub(crate) size: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Containers, or names of images; what is both is the container
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Only containers are meant
    #[arg(long)]
    pub(crate) container: bool,
    /// Succeed when a name is not there, and kill containers that run
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Rmi {
    /// Names of images
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Succeed when a name is not there
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// A container
    pub(crate) container: String,
    /// Go on until it ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Begin with so many of the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// Containers
    #[arg(required = true)]
    pub(crate) containers: Vec<String>,
    /// After so many seconds it is killed; by default what `run --stop-timeout` said, or 10
    #[arg(short, long, alias = "timeout", value_name = "SECONDS")]
    pub(crate) time: Option<u32>,
    /// What asks it to end; by default what the image says, or TERM
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
    /// A container that runs
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
    /// Why, for the image's history
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) message: Option<String>,
    /// Who made it
    #[arg(short, long, value_name = "NAME")]
    pub(crate) author: Option<String>,
    /// What the image is to say, as a line of a Dockerfile: CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL, USER, VOLUME or
    /// WORKDIR
    #[arg(short, long, value_name = "LINE")]
    pub(crate) change: Vec<Change>,
    /// Let a container that runs go on while it is read: what changes meanwhile is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Snapshot {
    /// A container
    pub(crate) container: String,
    /// The tar, - for standard output
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
    /// Overwrite the file if it is there
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Let a container that runs go on while it is read: what changes meanwhile is an error
    #[arg(long)]
    pub(crate) no_pause: bool,
}
