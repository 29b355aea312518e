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
#[cfg(all(test, feature = "disk", feature = "serve"))]
mod documents;
mod gc;
mod help;
mod memory;
mod mount;
mod names;
pub(crate) mod ports;
#[cfg(feature = "registry")]
mod registry;
mod security;
#[cfg(feature = "serve")]
mod serve;
mod trust;
mod userns;
mod volumes;

pub(crate) use containers::{
    Bundle, Commit, Exec, Ids, Logs, NetworkKind, Program, Ps, Rm, Rmi, Run, Snapshot, Stop, Wait,
    Wanted,
};

pub(crate) use derive::{Convert, Filter, Index, Merge};
pub(crate) use memory::{Du, WARM, Warm};
pub(crate) use mount::{Mount, MountWord, Umount};
pub(crate) use names::{AddedHost, Address, Names, Server};
#[cfg(feature = "registry")]
pub(crate) use registry::{
    LazyWish, Login, Logout, PULL_MEMORY, Pull, PullOptions, PullPolicy, Push, Referrers,
    RegistryOptions,
};
pub(crate) use security::{Security, SecurityOpt};
#[cfg(feature = "serve")]
pub(crate) use serve::{Door, Engine, LazyOptions, Serve, Skip, Trace};
pub(crate) use trust::Trust;
#[cfg(feature = "serve")]
pub(crate) use trust::ViaWord;
pub(crate) use volumes::{ask_for_labels, volumes};

/// Verbs whose output is never JSON: they refuse `--json`, and do not offer it.
const NEVER_JSON: [&str; 8] =
    ["cat", "dump", "run", "logs", "exec", "completions", "serve", "trace"];

/// Where help shows the options that all verbs have.
const EVERY: &str = "Options of every verb";

/// The command line, with help that is the same for all verbs.
pub(crate) fn command() -> Command {
    let command = Cli::command().after_help(help::CODES_OF_ALL);
    let template = help::template(&command);
    command.help_template(template).mut_subcommands(|verb| {
        let name = verb.get_name().to_owned();
        let verb = verb.after_help(help::after(&name));
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
    /// The store's directory; by default /var/lib/quire for root, else $XDG_DATA_HOME/quire. Its mode is 0700. Root runs
    /// nothing from a store that another user can change, and mounts only images of it that fs-verity seals
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_STORE", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) store: Option<PathBuf>,
    /// Look for images in this store, too, which root shares (`quire share`); it may be given several times. Users always look
    /// in root's own, /var/lib/quire, if it is shared
    #[arg(long, global = true, help_heading = EVERY, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) image_store: Vec<PathBuf>,
    /// Use this policy in addition to the administrator's, instead of $XDG_CONFIG_HOME/quire/policy.toml
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_POLICY", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) policy: Option<PathBuf>,
    /// Protect new files of the store with fs-verity, or with the immutable flag where there is no fs-verity. A store made
    /// with `immutable` keeps that setting; `quire unseal` clears the flags
    #[arg(long, global = true, help_heading = EVERY, env = "QUIRE_SEAL", value_name = "HOW")]
    pub(crate) seal: Option<Seal>,
    /// Print JSON for programs; docs/json.md has its fields
    #[arg(long, global = true, help_heading = EVERY)]
    pub(crate) json: bool,
    /// Log more: once logs each request, twice logs each object
    #[arg(long, global = true, help_heading = EVERY, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Print no progress and no remarks, and of an image that is made or pulled only its id
    #[arg(long, global = true, help_heading = EVERY, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

/// How new files of the store are protected from change.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Seal {
    /// fs-verity, where the file system has it
    Verity,
    /// fs-verity, else the immutable flag where the user may set it; `rm -r` of the store then fails
    Immutable,
}

/// What to do.
//
// The options of a verb are made when it is called: those of all take as long as the rest of the start. A comment of theirs
// (`///` on the struct) would become the verb's help then.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Verb {
    /// Import an image from a layout, archive, tar, directory or dump
    Import(Import),
    /// Pull an image from a registry
    #[cfg(feature = "registry")]
    Pull(Pull),
    /// Export an image as an OCI layout, archive, tar, EROFS image or disk
    ///
    /// `erofs:FILE` is one EROFS image with all files in it. It needs no store: `mount -t erofs -o ro FILE DIR` mounts it.
    /// Equal files are stored once, and nothing is lost. The same image always gives the same bytes.
    ///
    /// `gvisor:FILE` is an EROFS image for gVisor. To use it as a container's root, set the annotations
    /// `dev.gvisor.spec.rootfs.type=erofs` and `dev.gvisor.spec.rootfs.source=FILE`. gVisor reads no extended attributes, so
    /// Quire leaves out ACLs, file capabilities and labels, and says how many files lose some. With a writable layer
    /// (`dev.gvisor.spec.rootfs.overlay=memory`) gVisor hides character devices, because it does not read their numbers.
    ///
    /// `disk:FILE` is a raw disk for a virtual machine. It has a GPT with one partition, the same EROFS image as a read-only
    /// root for the image's processor. It has no boot loader. Give the machine a kernel with EROFS and a driver for the disk,
    /// and `root=PARTLABEL=root rootfstype=erofs ro` (or `root=PARTUUID=` with the id that Quire prints). An initramfs that
    /// finds roots by their type, such as systemd's, works too. The same image always gives the same bytes.
    Export(Export),
    /// Push an image to a registry
    ///
    /// Quire pushes the stored manifest and sends no layer that the registry already has. It looks in the repository itself,
    /// and in those that the image or its base came from or was pushed to. So a pulled image keeps its digest, and a derived
    /// image sends only its own layer, once to each registry, by default compressed with gzip.
    ///
    /// If the registry lacks a layer and the store did not keep its blob (`pull --keep-layers`), Quire compresses the layer
    /// again. That changes the manifest, and Quire says so.
    ///
    /// If the image was pulled from an index, Quire pushes the image of the pulled platform only, not the index.
    #[cfg(feature = "registry")]
    Push(Push),
    /// List an image's signatures, SBOMs and attestations in a registry
    #[cfg(feature = "registry")]
    Referrers(Referrers),
    /// Check a user name and password with a registry, and save them
    ///
    /// Quire saves them with the credential helper that a credentials file names for the registry. Without a helper it writes
    /// $REGISTRY_AUTH_FILE or $XDG_RUNTIME_DIR/containers/auth.json, as podman and skopeo do.
    #[cfg(feature = "registry")]
    Login(Login),
    /// Remove the saved user name and password of a registry
    #[cfg(feature = "registry")]
    Logout(Logout),
    /// Store an image in another form (objects, packed or tar)
    ///
    /// Quire verifies every byte while it converts. `quire gc` then frees the data that only the old form needed.
    Convert(Convert),
    /// Index the layers of an image, so that parts of them can be read
    ///
    /// The image has the form `tar`, and the store keeps the compressed layers as they came (`pull --keep-layers`). Layers that
    /// are compressed with gzip get an index; Quire says why others do not. An index has the digests of a layer's parts, and
    /// takes 1 to 2 % of the layer's size. The same layer always gets the same index.
    Index(Index),
    /// Write an image file, without a store
    Build(Build),
    /// Mount an image on a directory
    Mount(Mount),
    /// Unmount an image
    #[command(visible_alias = "unmount")]
    Umount(Umount),
    /// Run a command in a container whose root is an image
    #[command(disable_help_flag = true)]
    Run(Box<Run>),
    /// Make an OCI bundle: config.json and a mounted root
    #[command(disable_help_flag = true)]
    Bundle(Box<Bundle>),
    /// List containers
    Ps(Ps),
    /// Print the output of a container
    Logs(Logs),
    /// Run another command in a running container
    Exec(Exec),
    /// Stop containers: ask them to end, then kill them
    Stop(Stop),
    /// Wait until containers end, and print their exit codes
    Wait(Wait),
    /// List images
    #[command(visible_alias = "list")]
    Images(Images),
    /// Show the details of an image
    #[command(visible_alias = "inspect")]
    Show(Show),
    /// List the files of an image
    Ls(Ls),
    /// Show the directory tree of an image
    Tree(Tree),
    /// Print a file of an image
    Cat(Cat),
    /// Print an image as a composefs dump, one line for each file
    Dump(Dump),
    /// Compare two images, or a container with its image
    Diff(Diff),
    /// Make an image from a container and its changes
    ///
    /// The new image is the container's image with one more layer, and runs the same way unless --change says otherwise. Quire
    /// pauses a running container meanwhile. An ended container can be committed until `rm` removes it, except that data
    /// written with --writable memory is gone when the container ends.
    Commit(Commit),
    /// Make one image from several, each laid over those before it
    ///
    /// Where several images have a path, the last one wins, with its owner, permissions and times. Directories are merged. A
    /// file replaces a directory and everything in it, and a directory replaces a file. The root directory has the last
    /// image's metadata. There are no whiteouts: a character device 0:0 is a file like others.
    ///
    /// Quire reads and writes no file data, because the new image names the same objects. The new image has no layers and no
    /// configuration (command, environment, user). `quire run NAME -- COMMAND` runs it, and `quire export` writes it as tar:,
    /// erofs:, gvisor: or disk:. To push it, export it as a tar and import that: this makes an image of one layer.
    Merge(Merge),
    /// Make an image with only some files of another
    ///
    /// --exclude leaves out each match and everything below it. --include keeps each match, everything below it, and the
    /// directories above it. Without --include everything is kept. --exclude always wins, in any order of the options. A file
    /// with several names stays as long as one of its names does.
    ///
    /// Globs work as in .gitignore. A glob without a slash matches names at any depth (`*.pyc`); one with a slash matches
    /// paths from the image's root (`usr/share/doc`, `/etc`). A slash at the end matches directories only. `*` and `?` match
    /// any bytes except a slash; `**` matches any number of directories; `[a-z]`, `[!a]` and `{a,b}` work too. `\` takes the
    /// next character literally. Quire does not follow links, and says when a glob matches nothing.
    ///
    /// Quire reads and writes no file data. The new image has no layers and no configuration, as one of `quire merge`.
    Filter(Filter),
    /// Write a container's changes as a tar, the layer of `commit`
    Snapshot(Snapshot),
    /// Show the disk space of images, and the space they share
    Du(Du),
    /// Give an image another name
    Tag(Tag),
    /// Remove containers
    Rm(Rm),
    /// Remove names of images; `gc` then frees the space
    Rmi(Rmi),
    /// Read every byte of images and check their digests
    Verify(Verify),
    /// Check the whole store for damage
    Fsck(Fsck),
    /// Free data that nothing uses any more
    ///
    /// Quire keeps data that a name, a container, a mount or a running import uses. It never removes a name: `rmi` does.
    ///
    /// Unused data is a cache for later imports and pulls. `--older-than` and `--keep-storage` keep some of it.
    Gc(Gc),
    /// Let all users of this host use the images of the store
    ///
    /// They can read every file of every image then, whatever its mode in the image. They can change nothing, and containers,
    /// pulls and credentials stay the owner's. Users mount and run images of root's store as if they were in their own.
    Share(Share),
    /// Clear the immutable flag of a store, so that it can be removed
    Unseal,
    /// Serve lazy images, container engines, users who are not root, or systemd
    ///
    /// Four services, of which each is a process of its own. They run until they get TERM or INT.
    ///
    /// `--lazy`: An image that is mounted with `--lazy` is not here as a whole. Programs that read a part that is missing wait
    /// until this service has fetched and verified it. If that cannot be done, they get an I/O error. If images are mounted
    /// when the service ends, their readers wait ten seconds for the next service, and get I/O errors after that.
    ///
    /// A second process, the keeper, makes sure that readers get no wrong bytes if the service dies. It then starts another
    /// service. It ends by itself when no lazy image is mounted. If both are killed at the same moment, readers get I/O errors.
    /// With `--door fanotify` they can read zeros then, so no service manager or script may kill both.
    ///
    /// `--snapshotter`: containerd, and Docker and Kubernetes above it, get the roots of their containers from this service, on a
    /// socket. The files of their images are in the store, each once and with its digest. The engine has to be told:
    /// `--print-config` prints what belongs in its configuration, and `quire doctor` finds what is wrong there. Containers and
    /// their roots outlive the service, and the next one takes them over. Settings are in the table `[snapshotter]` of
    /// /etc/quire/serve.toml.
    ///
    /// `--mounts`: users who are not root get images from the kernel, for `quire run --via service`. The service trusts nothing
    /// that they send. The table `[mounts]` of /etc/quire/serve.toml says for whom it works. What is mounted outlives it.
    ///
    /// `--storage`: images are read-only volumes for systemd's tools, for root, from Linux 6.15 on. `storagectl` lists them,
    /// and `mount -t storage quire:NAME DIRECTORY` mounts them. What is mounted outlives the service.
    #[cfg(feature = "serve")]
    Serve(Serve),
    /// Run a command in a container, and note what it reads first
    ///
    /// Quire notes in which order the command reads parts of the image, as a trace of this name. `quire index --push` pushes
    /// the traces of an image with its index. Who then starts a container with `--lazy` gets these parts first, before they are
    /// read. The image has the form `tar`, and nothing else uses it meanwhile. The options are those of `run`.
    #[cfg(feature = "serve")]
    #[command(disable_help_flag = true)]
    Trace(Box<Trace>),
    /// Show what this host supports, and what Quire would choose
    Doctor(Doctor),
    /// Print a completion script for a shell
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
    /// Index the layers while they are read, as `quire index` does; only with `--form tar`
    #[arg(long)]
    pub(crate) index: bool,
    /// Take the image of this platform from an index, as os/architecture[/variant]; refuse an image of another one
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Use up to this much memory for data in flight, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=65536))]
    pub(crate) memory: u64,
}

// Where the data of an image goes.
#[derive(Debug, Default, Args)]
pub(crate) struct FormOptions {
    /// Store the data in this form; `auto` takes the best for this host, and `quire doctor` says why
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    pub(crate) form: FormWish,
    /// With `packed`, do not store data again that is here. `layer` makes the same image on every host
    #[arg(long, value_enum, value_name = "WHERE", default_value_t)]
    pub(crate) dedup: DedupWish,
}

/// How an image's data is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum FormWish {
    /// `packed` if the kernel shares pages between such images and the store's disk allows direct I/O in blocks of 512 bytes,
    /// else `objects`
    #[default]
    Auto,
    /// One file for each content, found by overlayfs; all images share them, on disk and in memory
    Objects,
    /// Packed devices, read by EROFS alone: half of the inodes, and the fastest start
    Packed,
    /// The layers' tars as they are, read by EROFS alone: nothing is unpacked
    Tar,
}

/// Data that packed devices leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum DedupWish {
    /// Data that any packed device of the store has
    #[default]
    Store,
    /// Data that the same layer has already
    Layer,
}

// How a source becomes a tree.
#[derive(Debug, Default, Args)]
pub(crate) struct TreeOptions {
    /// Directory of the objects that a dump refers to
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

// Which extended attributes are kept, of directories and tars.
#[derive(Debug, Default, Args)]
pub(crate) struct XattrOptions {
    /// Drop all extended attributes, including ACLs and file capabilities
    #[arg(long)]
    pub(crate) skip_xattrs: bool,
    /// Keep only extended attributes whose names begin with user.
    #[arg(long, conflicts_with = "skip_xattrs")]
    pub(crate) user_xattrs: bool,
}

/// How layers are packed.
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

// What becomes of an image.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    // Not a doc comment: to rustdoc the brackets would be a link.
    #[arg(
        help = "oci:DIR[:TAG], docker-archive:FILE[:NAME], tar:FILE, erofs:FILE, gvisor:FILE or disk:FILE (FILE - for standard output)"
    )]
    pub(crate) target: OsString,
    /// Compress the layers of an OCI layout like this; by default as-it-was
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<Compression>,
    /// Overwrite an existing file
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Leave out and list sockets, and other files that a tar cannot hold
    #[arg(long)]
    pub(crate) skip_unsupported: bool,
    /// Platform of a disk, as linux/architecture; by default the image's, else this machine's
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Build {
    /// Source, as for `import`
    pub(crate) source: OsString,
    /// Image file to write, - for standard output
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,
    #[command(flatten)]
    pub(crate) tree: TreeOptions,
    /// Copy the file data into this object directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) digest_store: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Args)]
pub(crate) struct Images {
    /// List all names, which is the default; `quire du` lists images without names too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Also show the digests of manifests
    #[arg(long)]
    pub(crate) digests: bool,
    /// Print ids only, each once
    #[arg(short = 'q')]
    pub(crate) ids: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// NAME[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// Print mode, links, owner, size and time of each file
    #[arg(short)]
    pub(crate) long: bool,
    /// List directories with everything below them
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tree {
    /// NAME[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// Show at most this many levels
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
    /// A name, an image id or its first digits (6 or more), or the path of an image file
    pub(crate) target: OsString,
}

#[derive(Debug, Args)]
pub(crate) struct Diff {
    // Not doc comments: to rustdoc the brackets would be links.
    #[arg(
        help = "NAME[:/PATH], or the path of an image file; CONTAINER[:/PATH] without another side"
    )]
    pub(crate) old: OsString,
    /// The other side, in the same form; without it, a container is compared with its image
    pub(crate) new: Option<OsString>,
    /// Do not pause a running container; a file that changes meanwhile is an error
    #[arg(long, conflicts_with = "new")]
    pub(crate) no_pause: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Tag {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// The new name
    pub(crate) new: String,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Names or ids of images; by default all images
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Fsck {
    /// Remove damaged files, and fetch them again from the registries that their images came from; policies and credentials
    /// are those of `pull`. Images that came from elsewhere have to be imported again: until then, none of their containers
    /// starts. The exit code stays 1, because damage was found. Containers are never removed. A snapshot of an engine whose
    /// record is damaged is removed, with all that was written in it; end its service first. If a file cannot be read for
    /// another reason than damage (no memory, no descriptors, no permission), the check ends with 2 and the file stays
    #[arg(long)]
    pub(crate) repair: bool,
    /// Also rebuild the tar of every layer and check its digest; this takes about as long as an import
    #[arg(long)]
    pub(crate) deep: bool,
    /// With --repair, fetch nothing
    #[cfg(feature = "registry")]
    #[arg(long, requires = "repair")]
    pub(crate) no_fetch: bool,
    #[cfg(feature = "registry")]
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

#[derive(Debug, Args)]
pub(crate) struct Share {
    /// Keep the store to its owner again
    #[arg(long)]
    pub(crate) undo: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Gc {
    /// Print what would be freed, and free nothing
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
    /// Also free the downloads of interrupted pulls, which are otherwise kept for a week
    #[arg(long)]
    pub(crate) unfinished: bool,
    /// Keep unused data that was added to the store within this time, for example 24h or 7d
    #[arg(long, value_name = "DURATION", value_parser = gc::seconds)]
    pub(crate) older_than: Option<i64>,
    /// Free unused data only until the store takes no more disk space than this, the oldest first, for example 20g
    #[arg(long, value_name = "SIZE", value_parser = gc::size)]
    pub(crate) keep_storage: Option<u64>,
    /// Wait until the leftovers of ended containers are removed. Their removal continues after `run`, `stop` and `rm`
    /// return, and the store's disk cannot be unmounted before it ends
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Look for the configuration of engines below this directory, such as the mounted root of another machine
    #[cfg(feature = "serve")]
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
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
