//! The command line, as clap reads it. Help texts, man pages and completions all come from here.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

/// Verified image file systems for containers and operating systems.
///
/// Quire keeps one verified copy of every file's bytes and turns any image into a root filesystem in milliseconds.
#[derive(Debug, Parser)]
#[command(name = "quire", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Options of every verb.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// The store: by default /var/lib/quire for root, else $XDG_DATA_HOME/quire
    #[arg(long, global = true, env = "QUIRE_STORE", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) store: Option<PathBuf>,
    /// Print JSON for programs
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Say more about what is done: -v for each request, -vv for each object
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// No progress, no remarks
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Bring an image into the store
    Import(Import),
    /// Make an image file, without a store
    Build(Build),
    /// Mount an image on a directory
    Mount(Mount),
    /// Unmount what `mount` mounted
    #[command(visible_alias = "unmount")]
    Umount(Umount),
    /// Run a command in a container whose root is an image
    Run(Run),
    /// List the images
    #[command(visible_alias = "list")]
    Images,
    /// Show all that is known of an image
    #[command(visible_alias = "inspect")]
    Show(Show),
    /// List files of an image
    Ls(Ls),
    /// Show the directory tree of an image
    Tree(Tree),
    /// Write a file of an image to standard output
    Cat(Cat),
    /// Write an image as a composefs dump, a line per file
    Dump(Dump),
    /// Show every path and attribute in which two images differ
    Diff(Diff),
    /// Show what images take on disk, and what they share
    Du(Du),
    /// Give an image a further name
    Tag(Tag),
    /// Remove names of images; `gc` then frees what nobody uses
    Rm(Rm),
    /// Read every byte of images and compare it with their digests
    Verify(Verify),
    /// Check the whole store
    Fsck(Fsck),
    /// Free what no name, container, mount or running import uses
    Gc(Gc),
    /// Say what this host can do, and what Quire would choose
    Doctor,
    /// Write a completion script for a shell
    Completions(Completions),
    /// Write the man pages into a directory
    Man(Man),
}

/// What an image comes from.
#[derive(Debug, Args)]
pub(crate) struct Import {
    // Not a doc comment: to rustdoc the brackets would be a link.
    #[arg(
        help = "oci:DIR[:TAG], docker-archive:FILE, tar:FILE (- for standard input), dir:DIR or dump:FILE"
    )]
    pub(crate) source: OsString,
    /// The image's name; by default the source's own
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) tree: TreeOptions,
    /// The platform to take from an index, as os/architecture[/variant]
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Memory for data under way, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

/// How a source becomes a tree.
#[derive(Debug, Args)]
pub(crate) struct TreeOptions {
    /// Where the objects are that a dump refers to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) objects: Option<PathBuf>,
    /// Leave out sockets and unknown types, and say which, instead of refusing the source
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    /// Drop fractions of seconds from times
    #[arg(long)]
    pub(crate) whole_seconds: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Build {
    /// As for `import`
    pub(crate) source: OsString,
    /// The image file to write, - for standard output
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,
    #[command(flatten)]
    pub(crate) tree: TreeOptions,
    /// Copy the files' bytes into this object directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) digest_store: Option<PathBuf>,
}

/// Who has to check what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VerityPolicy {
    /// The kernel, by fs-verity, or the mount is refused
    Require,
    /// The kernel if it can; else the import is trusted, and that is said
    Auto,
    /// Nobody
    Off,
}

/// Which image may be mounted, and who checks it.
#[derive(Debug, Args)]
pub(crate) struct Trust {
    /// Who checks what is read
    #[arg(long, value_enum, default_value_t = VerityPolicy::Auto, value_name = "POLICY")]
    pub(crate) verity: VerityPolicy,
    /// Refuse any image but the one with this id, and verify the image itself first
    #[arg(long, value_name = "ID")]
    pub(crate) digest: Option<image::verity::ObjectId>,
}

#[derive(Debug, Args)]
pub(crate) struct Mount {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// An existing directory
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
    #[command(flatten)]
    pub(crate) trust: Trust,
    /// Take changes into memory, and forget them at unmount
    #[arg(long)]
    pub(crate) writable: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Umount {
    /// Where the image is mounted
    #[arg(required = true, value_hint = ValueHint::DirPath)]
    pub(crate) directories: Vec<PathBuf>,
    /// Detach even when it is in use; it is freed when its last user has gone
    #[arg(short, long)]
    pub(crate) lazy: bool,
}

/// What the container sees of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NetworkKind {
    /// Loopback only
    None,
    /// The host's
    Host,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) trust: Trust,
    /// Set a variable, or with NAME alone pass on the caller's
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// User, and group, to run as: names or numbers
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Where the command starts
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Replace the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    /// The container's host name
    #[arg(long, value_name = "NAME")]
    pub(crate) hostname: Option<String>,
    /// Network
    #[arg(long, value_enum, default_value_t = NetworkKind::None)]
    pub(crate) network: NetworkKind,
    /// No writable layer
    #[arg(long)]
    pub(crate) read_only: bool,
    /// The most that may be written, in MiB; by default half of the memory
    #[arg(long, value_name = "MIB", conflicts_with = "read_only")]
    pub(crate) size: Option<NonZeroU64>,
    /// The OCI runtime, by name or path; by default crun, runc or runsc, the first that is there
    #[arg(long, env = "QUIRE_RUNTIME", value_name = "RUNTIME")]
    pub(crate) runtime: Option<OsString>,
    /// A terminal for the command: by default when standard input and output are one
    #[arg(short, long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    pub(crate) tty: When,
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// The command; by default the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// A name, an image id or its beginning
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// NAME[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// One line per file with mode, links, owner, size and time
    #[arg(short)]
    pub(crate) long: bool,
    /// Directories with all that is below them
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tree {
    /// NAME[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// How many levels
    #[arg(short = 'L', long, value_name = "LEVELS")]
    pub(crate) depth: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct Cat {
    /// NAME:/PATH
    #[arg(required = true)]
    pub(crate) targets: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Dump {
    /// A name, an image id or its beginning, or the path of an image file
    pub(crate) target: OsString,
}

#[derive(Debug, Args)]
pub(crate) struct Diff {
    /// NAME[:/PATH], or the path of an image file
    pub(crate) old: OsString,
    /// The same for the other side
    pub(crate) new: OsString,
}

#[derive(Debug, Args)]
pub(crate) struct Du {
    /// Only these images
    pub(crate) names: Vec<String>,
    /// Sizes in bytes
    #[arg(short, long)]
    pub(crate) bytes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tag {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// The further name
    pub(crate) new: String,
}

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Names to remove
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Succeed when a name is not there
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Names or ids of images; by default all
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Fsck {
    /// Remove what is damaged, so that a new import of the same image brings it back
    #[arg(long)]
    pub(crate) repair: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Gc {
    /// Only say what would be freed
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// An existing directory
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
}
