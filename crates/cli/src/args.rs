//! The command line, as clap reads it. Help texts, man pages and completions all come from here.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{
    Arg, ArgAction, Args, Command, CommandFactory as _, Parser, Subcommand, ValueEnum, ValueHint,
};

mod containers;
mod cpu;
mod derive;
mod memory;
mod mount;
mod names;
mod security;

pub(crate) use containers::{
    Bundle, Commit, Exec, Ids, Logs, NetworkKind, Ps, Rm, Rmi, Run, Snapshot, Stop, Wait, Wanted,
};

pub(crate) use derive::{Filter, Merge};
pub(crate) use memory::{Du, WARM, Warm};
pub(crate) use mount::{Mount, MountWord, Umount};
pub(crate) use names::{AddedHost, Address, Names, Server};
pub(crate) use security::{Security, SecurityOpt};

/// Verbs whose output is never JSON: they refuse `--json`, and do not offer it.
const NEVER_JSON: [&str; 6] = ["cat", "dump", "run", "logs", "exec", "completions"];

const CODES: &str =
    "Exit codes: 0 done, or yes; 1 the answer is no (damage, a difference); 2 could not do it";
const RUN_CODES: &str = "\
Exit codes: the program's own, 128+N when signal N ended it; 125 Quire or the runtime failed, \
126 the program cannot be executed, 127 it, or what it needs to start, is not there; 255 the time of --timeout was over

Signals go to the program, which is process 1 of its container: the kernel spares that one INT and TERM unless it \
handles them. TERM kills a program of `run` that neither handles, ignores nor blocks it (143). Otherwise \
the third that quire gets kills the container.

On a terminal, Ctrl-C goes to the program; two within two seconds kill a program that is process 1 and neither handles nor \
ignores it. Ctrl-P Ctrl-Q leaves a container of `run`: it goes on, and what it writes then goes to its log.";

/// The command line with what is the same for all verbs.
/// Where help shows the options that all verbs have.
const EVERY: &str = "Options of every verb";

pub(crate) fn command() -> Command {
    Cli::command().after_help(CODES).mut_subcommands(|verb| {
        let name = verb.get_name().to_owned();
        let verb = verb.after_help(if ["run", "exec"].contains(&name.as_str()) {
            RUN_CODES
        } else {
            CODES
        });
        if !NEVER_JSON.contains(&name.as_str()) {
            return verb;
        }
        // In the place of the one that all verbs have.
        verb.arg(Arg::new("json").long("json").global(true).hide(true).action(ArgAction::SetTrue))
    })
}

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

// Options of every verb.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// The store: by default /var/lib/quire for root, else $XDG_DATA_HOME/quire. Its directory has the mode 0700; root mounts
    /// and runs nothing from a store that another user can change
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_STORE", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) store: Option<PathBuf>,
    /// A policy besides the administrator's, in the place of $XDG_CONFIG_HOME/quire/policy.toml
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_POLICY", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) policy: Option<PathBuf>,
    /// How new files of the store are protected: `immutable` sets the immutable flag where there is no fs-verity.
    /// A store that is made with it keeps it; `quire unseal` takes it off again
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_SEAL", value_name = "HOW")]
    pub(crate) seal: Option<Seal>,
    /// Print JSON for programs; docs/json.md has its fields
    #[arg(long, global = true, help_heading = EVERY)]
    pub(crate) json: bool,
    /// Say more about what is done: once for each request, twice for each object
    #[arg(long, global = true, help_heading = EVERY, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// No progress, no remarks
    #[arg(long, global = true, help_heading = EVERY, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

/// How new files of the store are protected from change.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Seal {
    /// By fs-verity, where the file system has it
    Verity,
    /// By fs-verity, or else by the immutable flag, where the user may set it: `rm -r` of the store fails then
    Immutable,
}

/// What to do.
//
// The options of a verb are made when it is called: those of all take as long as the rest of the start. A comment of theirs
// (`///` on the struct) would become the verb's help then.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Verb {
    /// Bring an image into the store
    Import(Import),
    /// Bring an image from a registry into the store
    #[cfg(feature = "registry")]
    Pull(Pull),
    /// Give an image back as an OCI layout, a docker archive, a tar, an EROFS image or a disk
    ///
    /// `erofs:FILE` is one image with all files in it, which needs no store: Linux mounts it (`mount -t erofs -o ro FILE DIR`),
    /// equal files are in it once, nothing is lost, and the same image gives the same bytes. `gvisor:FILE` is one for gVisor,
    /// as the root of a container by the annotations `dev.gvisor.spec.rootfs.type=erofs` and `dev.gvisor.spec.rootfs.source=FILE`:
    /// gVisor reads no xattrs, so ACLs, capabilities of programs and labels are left out; how many files lose some is said. A
    /// layer to write to, `dev.gvisor.spec.rootfs.overlay=memory`, hides character devices, whose numbers gVisor does not read.
    ///
    /// `disk:FILE` is a raw disk for a virtual machine: a GPT whose one partition is what `erofs:FILE` is, as a read-only root
    /// for the processor that the image is for. It has no boot loader: give the machine a kernel that has EROFS and the disk's
    /// driver, and `root=PARTLABEL=root rootfstype=erofs ro` (or `root=PARTUUID=`, with the id that is told), or an initramfs
    /// that finds roots by their type, as systemd's does. The same image gives the same bytes.
    Export(Export),
    /// Bring an image of the store to a registry
    ///
    /// Quire pushes the manifest that the store has, and sends no layer that the registry has: in the repository itself, or
    /// in another one that the image or its base came from or was pushed to. A pulled image keeps its digest then, and a
    /// derived image sends its own layer alone, once to each registry, by default compressed by gzip. A layer that the registry lacks, and whose blob the store did not
    /// keep (`pull --keep-layers`), is compressed anew, which changes the manifest: a line says so.
    ///
    /// Of an index, Quire pushes the image for the platform that was pulled: the index, and what it has for other platforms,
    /// stays where it came from.
    #[cfg(feature = "registry")]
    Push(Push),
    /// Show what a registry has beside an image: signatures, lists of packages, statements about its making
    #[cfg(feature = "registry")]
    Referrers(Referrers),
    /// Save a name and a password for a registry, when that knows them
    ///
    /// They go to the credential helper that a file of credentials names for the registry, or else into $REGISTRY_AUTH_FILE or
    /// $XDG_RUNTIME_DIR/containers/auth.json, as those of podman and skopeo.
    #[cfg(feature = "registry")]
    Login(Login),
    /// Remove the name and password for a registry
    #[cfg(feature = "registry")]
    Logout(Logout),
    /// Store an image in another form
    ///
    /// Every byte is verified on its way. What was only the old form's is garbage then, which `gc` frees.
    Convert(Convert),
    /// Make an image file, without a store
    Build(Build),
    /// Mount an image on a directory
    Mount(Mount),
    /// Unmount what `mount` mounted
    #[command(visible_alias = "unmount")]
    Umount(Umount),
    /// Run a command in a container whose root is an image
    Run(Box<Run>),
    /// Make an OCI bundle for other tools: a configuration, and the root mounted beside it
    Bundle(Box<Bundle>),
    /// List containers
    Ps(Ps),
    /// Print what a container wrote
    Logs(Logs),
    /// Run one more command in a container
    Exec(Exec),
    /// Ask containers to end, and kill those that do not
    Stop(Stop),
    /// Wait until containers have ended
    Wait(Wait),
    /// List the images
    #[command(visible_alias = "list")]
    Images(Images),
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
    /// Show every path and attribute in which two images differ, or a container from its image
    Diff(Diff),
    /// Make an image of a container: its image, and what it changed as one more layer
    ///
    /// A container that runs is paused meanwhile. One that has ended is there until `rm`; what it wrote with --writable memory
    /// is gone with its end. The new image runs as the one below does, but for what --change says.
    Commit(Commit),
    /// Make an image of several: each is laid over those before it
    ///
    /// A path in a later image decides what is there, with its owner, permissions and times. Directories are merged; what is
    /// no directory replaces a directory with all that is in it, and the other way round. The root directory's metadata are
    /// the last image's. Nothing in an image hides anything of those before it: a character device 0:0 is a file like others.
    ///
    /// No file is read or written: the new image names the same objects. It has no layers and no configuration (command,
    /// environment, user), as one that came from a directory: `quire run NAME -- COMMAND` runs it, `quire export` writes it as
    /// tar:, erofs:, gvisor: or disk:, and a tar imported again is an image of one layer, to be pushed.
    Merge(Merge),
    /// Make an image of a part of another: what matches globs, or what does not
    ///
    /// What an --exclude matches is left out, with all that is below it. Of the rest is kept what an --include matches, with
    /// all that is below it, and the directories above that, with their metadata; or all of it, without --include. Whatever
    /// the order of the options, --exclude wins. A file with several names stays while one of them does.
    ///
    /// Globs are as in .gitignore. Without a slash, but at the end, a glob matches names at any depth (`*.pyc`); with one it
    /// matches paths from the image's root on (`usr/share/doc`, `/etc`). At the end, a slash says that only directories are
    /// meant. `*` and `?` match bytes, but no slash; `**` matches any number of directories; `[a-z]`, `[!a]` and `{a,b}` are
    /// there too, and `\` before what is meant as it is. Links are not followed. A glob that matches nothing is told.
    ///
    /// No file is read or written, and the new image has no layers and no configuration, as one of `quire merge`.
    Filter(Filter),
    /// Write what a container changed as a tar, the layer that `commit` would add
    Snapshot(Snapshot),
    /// Show what images take on disk, and what they share
    Du(Du),
    /// Give an image a further name
    Tag(Tag),
    /// Remove containers, or names of images, whose space `gc` then frees
    Rm(Rm),
    /// Remove names of images, whose space `gc` then frees
    Rmi(Rmi),
    /// Read every byte of images and compare it with their digests
    Verify(Verify),
    /// Check the whole store
    Fsck(Fsck),
    /// Free what no name, container, mount or running import uses
    Gc(Gc),
    /// Take the immutable flag off all files of the store, so that `rm -r` can remove it
    Unseal,
    /// Say what this host can do, and what Quire would choose
    Doctor,
    /// Write a completion script for a shell
    Completions(Completions),
    /// Write the man pages into a directory
    Man(Man),
}

// What an image comes from.
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
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// The platform to take from an index, as os/architecture[/variant]; an image for another one is refused
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Memory for data under way, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

// Where the data of an image goes.
#[derive(Debug, Args)]
pub(crate) struct FormOptions {
    /// How the data is stored; `auto` is what is best here, and `quire doctor` says why
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    pub(crate) form: FormWish,
    /// Of `packed`: what need not be stored again. With `layer`, an image is the same on every host
    #[arg(long, value_enum, value_name = "WHERE", default_value_t)]
    pub(crate) dedup: DedupWish,
}

/// How an image's data is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum FormWish {
    /// `packed` where the kernel shares pages between such images and the store's disk can be read past its cache in blocks
    /// of 512 bytes, else `objects`
    #[default]
    Auto,
    /// A file for each content; overlayfs finds them, and all images share them, in memory too
    Objects,
    /// Packed blobs, that EROFS reads by itself: half of the inodes, and the fastest start
    Packed,
    /// The layers' tars as they are, that EROFS reads by itself: nothing is unpacked
    Tar,
}

/// What packed blobs leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum DedupWish {
    /// What any packed blob of the store has
    #[default]
    Store,
    /// What the same layer has already
    Layer,
}

// Which image, and how it is to be stored.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// What the image in its new form is to be called; by default its name moves to it
    pub(crate) new: Option<String>,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Memory for data under way, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

// What to pull, and from where.
#[cfg(feature = "registry")]
#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// The image: alpine, ghcr.io/owner/app:1.2, localhost:5000/app@sha256:…
    pub(crate) reference: String,
    /// The image's name in the store; by default the whole reference
    pub(crate) name: Option<String>,
    /// The platform to take from an index, as os/architecture[/variant]; an image for another one is refused
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Keep the layers as they came, too, so that a push gives back the very bytes
    #[arg(long)]
    pub(crate) keep_layers: bool,
    /// Leave out sockets and unknown types, and say which, instead of refusing the image
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    #[command(flatten)]
    pub(crate) form: FormOptions,
    /// Memory for data under way, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// What to push, and where to.
#[cfg(feature = "registry")]
#[derive(Debug, Args)]
pub(crate) struct Push {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// Where to: ghcr.io/owner/app:1.2, localhost:5000/app; by default the name itself
    pub(crate) target: Option<String>,
    /// How layers are packed. By default layers that the registry has stay as they are there, as do all layers of a pulled
    /// image; of others, those that are not compressed yet are compressed by gzip
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<Compression>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// To which registry to log in.
#[cfg(feature = "registry")]
#[derive(Debug, Args)]
pub(crate) struct Login {
    /// The registry: docker.io, ghcr.io, localhost:5000
    pub(crate) host: String,
    /// The user; asked for if it is not given
    #[arg(short, long = "username", value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Read the password, or a token, from standard input instead of asking for it
    #[arg(long, requires = "user")]
    pub(crate) password_stdin: bool,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// From which registry to log out.
#[cfg(feature = "registry")]
#[derive(Debug, Args)]
pub(crate) struct Logout {
    /// The registry, as for `login`
    pub(crate) host: String,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// Of what to show what is attached to it.
#[cfg(feature = "registry")]
#[derive(Debug, Args)]
pub(crate) struct Referrers {
    /// The image: alpine, ghcr.io/owner/app:1.2, localhost:5000/app@sha256:…
    pub(crate) reference: String,
    /// Only what is of this type, such as application/spdx+json
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
    /// Of an index, what is attached to the image for this platform, as os/architecture[/variant], not to the index
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

// How to talk to a registry.
#[cfg(feature = "registry")]
#[derive(Debug, Args)]
pub(crate) struct RegistryOptions {
    /// A file with credentials, as Docker's config.json or containers' auth.json; asked before the usual ones
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) authfile: Option<PathBuf>,
    /// A folder like containerd's certs.d, with hosts.toml and CAs for each registry; asked before the usual ones
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) certs_dir: Option<PathBuf>,
    /// Talk HTTP to the registry: anybody on the way can read and change what is not signed
    #[arg(long)]
    pub(crate) plain_http: bool,
}

// How a source becomes a tree.
#[derive(Debug, Default, Args)]
pub(crate) struct TreeOptions {
    /// Where the objects are that a dump refers to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) objects: Option<PathBuf>,
    /// Leave out sockets and unknown types, and say which, instead of refusing the source
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    #[command(flatten)]
    pub(crate) xattrs: XattrOptions,
    /// Drop fractions of seconds from times
    #[arg(long)]
    pub(crate) whole_seconds: bool,
}

// Which extended attributes are kept, of directories and tars.
#[derive(Debug, Default, Args)]
pub(crate) struct XattrOptions {
    /// Drop all extended attributes; ACLs and file capabilities are such, too
    #[arg(long)]
    pub(crate) skip_xattrs: bool,
    /// Keep only those extended attributes whose name begins with user.
    #[arg(long, conflicts_with = "skip_xattrs")]
    pub(crate) user_xattrs: bool,
}

/// How layers are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compression {
    /// As the manifest has them; bytes that the store has not kept are compressed anew
    AsItWas,
    /// By gzip
    Gzip,
    /// By zstd
    Zstd,
    /// Not at all
    None,
}

// What becomes of an image.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    // Not a doc comment: to rustdoc the brackets would be a link.
    #[arg(
        help = "oci:DIR[:TAG], docker-archive:FILE[:NAME], tar:FILE, erofs:FILE, gvisor:FILE or disk:FILE (FILE - for standard output)"
    )]
    pub(crate) target: OsString,
    /// How layers are packed in an OCI layout; by default as-it-was
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<Compression>,
    /// Overwrite the file if it is there
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Leave sockets, and what else no tar can hold, out of a tar, and say which
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    /// The platform that a disk is for, as linux/architecture; by default the image's, or else this machine's
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
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
    /// The kernel if it can, else nobody: the import is trusted
    Auto,
    /// Nobody
    Off,
}

/// What the kernel reads an image from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IoWish {
    /// The store's files, where the kernel can: pages can be shared
    File,
    /// Loop devices over them, with direct I/O: O_DIRECT works, and no pages are shared
    Loop,
}

// Which image may be mounted, who checks it, and how it is read.
#[derive(Debug, Clone, Args)]
pub(crate) struct Trust {
    /// Who checks what is read
    #[arg(long, value_enum, default_value_t = VerityPolicy::Auto, value_name = "POLICY")]
    pub(crate) verity: VerityPolicy,
    /// Refuse any image but the one with this id, and verify the image itself first
    #[arg(long, value_name = "ID")]
    pub(crate) digest: Option<image::verity::ImageId>,
    /// With which images of the forms `packed` and `tar` the pages of equal files are in memory once (from Linux 7.0 on):
    /// those of the same NAME. By default those of the same store; `none` shares with nobody. Who can choose an image of a
    /// domain can change what all in it read, so give tenants domains of their own, with names that nobody guesses
    #[arg(long, value_name = "NAME", env = "QUIRE_DOMAIN")]
    pub(crate) domain: Option<String>,
    /// How images of the forms `packed` and `tar` are read. Programs that open the image's files with O_DIRECT, such as some
    /// databases, need loop: otherwise that fails (EINVAL). Files of the form `objects` have it anyway
    #[arg(long, value_enum, default_value_t = IoWish::File, value_name = "HOW")]
    pub(crate) io: IoWish,
}

impl Trust {
    /// As roots take it.
    pub(crate) fn wish(
        &self,
    ) -> Result<container::root::Trust, container::root::trust::DomainError> {
        use container::root::{PageDomain, VerityPolicy as Policy};
        use kernel::mount::Backing;
        Ok(container::root::Trust {
            verity: match self.verity {
                VerityPolicy::Require => Policy::Require,
                VerityPolicy::Auto => Policy::Auto,
                VerityPolicy::Off => Policy::Off,
            },
            digest: self.digest,
            domain: self.domain.as_deref().map_or(Ok(PageDomain::OfStore), str::parse)?,
            backing: match self.io {
                IoWish::File => Backing::File,
                IoWish::Loop => Backing::Loop,
            },
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Args)]
pub(crate) struct Images {
    /// All of them, as always
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Show the digests of manifests, too
    #[arg(long)]
    pub(crate) digests: bool,
    /// Print ids alone, each once
    #[arg(short = 'q')]
    pub(crate) ids: bool,
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
    #[arg(short = 'L', long, value_name = "LEVELS", value_parser = levels)]
    pub(crate) depth: Option<NonZeroUsize>,
}

/// As `tree` of most systems has it: no level at all is a mistake.
fn levels(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().ok().ok_or_else(|| "invalid level, must be greater than 0".to_owned())
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
    // Not doc comments: to rustdoc the brackets would be links.
    #[arg(
        help = "NAME[:/PATH], or the path of an image file; CONTAINER[:/PATH] without another side"
    )]
    pub(crate) old: OsString,
    /// The same for the other side; without it, a container is compared with its image
    pub(crate) new: Option<OsString>,
    /// Let a container that runs go on while it is read: what changes meanwhile is an error
    #[arg(long, conflicts_with = "new")]
    pub(crate) no_pause: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tag {
    /// A name, an image id or its beginning
    pub(crate) name: String,
    /// The further name
    pub(crate) new: String,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Names or ids of images; by default all
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Fsck {
    /// Remove what is damaged, so that a new import of the same image brings it back. The exit code is 1 all the same:
    /// damage was found. Containers stay, whatever is wrong with their records. What cannot be read for a reason that says
    /// nothing of the file (no memory, no descriptors, no right) ends the check with 2, and is not removed
    #[arg(long)]
    pub(crate) repair: bool,
    /// Also make every layer's tar again and compare its digest: about as long as an import
    #[arg(long)]
    pub(crate) deep: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Gc {
    /// Only say what would be freed
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
    /// Also what interrupted pulls have fetched, which is kept for a week otherwise
    #[arg(long)]
    pub(crate) unfinished: bool,
    /// Then wait until what ended containers leave has been removed, which goes on after `run`, `stop` and `rm` have returned:
    /// until then the store's disk cannot be unmounted
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) wait: bool,
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
