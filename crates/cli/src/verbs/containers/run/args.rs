//! Arguments of `run`, and of the other verbs that make a container.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum, ValueHint};
use container::life::monitor::CallerStreams;
use container::plan::ImageVolumes;
use container::restart_policy::RestartPolicy;

use crate::args::ports::{Published, published};
use crate::args::{ContainerOptions, Descriptors, Labels, LogOptions, Tty, boolean};

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Run in the background; `ps` lists the container, `logs` prints its output, `rm` removes it
    #[arg(short, long)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) tty: Tty,
    #[command(flatten)]
    pub(crate) new: NewContainer,
    #[command(flatten)]
    pub(crate) attach: AttachOptions,
    #[command(flatten)]
    pub(crate) descriptors: Descriptors,
}

/// A standard stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StreamName {
    Stdin,
    Stdout,
    Stderr,
}

// How the program in the foreground is connected to the caller.
#[derive(Debug, Args)]
pub(crate) struct AttachOptions {
    /// Connect only these standard streams of the caller, instead of all three. Without stdout and stderr, the
    /// container's name is printed
    #[arg(
        short,
        long,
        value_enum,
        ignore_case = true,
        value_name = "STREAM",
        conflicts_with_all = ["detach", "terminal"]
    )]
    attach: Vec<StreamName>,
    /// Accepted without effect: only an empty value, or the keys Ctrl-P Ctrl-Q
    #[arg(long, value_name = "KEYS", hide = true, value_parser = ["", "ctrl-p,ctrl-q"])]
    detach_keys: Option<String>,
    /// Accepted without effect: signals are always passed on
    #[arg(
        long,
        hide = true,
        value_name = "true",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = ["true"]
    )]
    sig_proxy: Option<String>,
}

impl AttachOptions {
    pub(crate) fn streams(&self) -> CallerStreams {
        let has = |stream| self.attach.is_empty() || self.attach.contains(&stream);
        CallerStreams {
            input: has(StreamName::Stdin),
            output: has(StreamName::Stdout),
            errors: has(StreamName::Stderr),
        }
    }
}

/// Treatment of an image's volumes. The words are podman's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageVolumeChoice {
    /// The container gets a new volume for each, with the files of the image
    #[value(alias = "bind")]
    Anonymous,
    /// Their files are part of the root
    Ignore,
}

impl From<ImageVolumeChoice> for ImageVolumes {
    fn from(choice: ImageVolumeChoice) -> Self {
        match choice {
            ImageVolumeChoice::Anonymous => Self::Make,
            ImageVolumeChoice::Ignore => Self::Ignore,
        }
    }
}

// The image, the command, and the settings of a new container. A doc comment here would become the title of each verb
// with these options.
#[derive(Debug, Args)]
pub(crate) struct NewContainer {
    /// Remove the container when it ends. This is the default of `run` without --detach; with --rm=false, the container
    /// stays until `quire rm`
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub(crate) rm: Option<bool>,
    #[command(flatten)]
    pub(crate) wanted: ContainerOptions,
    /// Publish ports of the container on ports of the host; implies `--network pasta`. Without HOST, Quire chooses a
    /// free port, which `ps` lists. HOST and CONTAINER may be ranges, such as 8000-8003
    #[arg(short, long, value_name = "[[IP:]HOST:]CONTAINER[/udp]", value_parser = published)]
    publish: Vec<Option<Published>>,
    /// Start the program again when it ends: `no`, `always`, `unless-stopped`, or `on-failure`, which means after an exit
    /// code other than 0, at most MAX times. `quire stop` ends it. `quire start --print-unit` prints a unit that starts
    /// such containers at boot
    #[arg(
        long,
        value_name = "POLICY[:MAX]",
        default_value_t = RestartPolicy::No,
        hide_default_value = true,
        value_parser = str::parse::<RestartPolicy>
    )]
    pub(crate) restart: RestartPolicy,
    /// Use this OCI runtime, by name or path; by default the first of crun, runc and runsc that is installed. With
    /// runsc (gVisor), pipes, sockets and an empty /tmp are in memory, so `commit` does not store them
    #[arg(long, env = "QUIRE_RUNTIME", value_name = "RUNTIME")]
    pub(crate) runtime: Option<OsString>,
    /// Kill the container after this many seconds; the exit code is then 255. The default, 0, means no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0, hide_default_value = true)]
    pub(crate) timeout: u32,
    /// Set the signal that `stop` sends first; by default the image's, or TERM
    #[arg(long, value_name = "SIGNAL")]
    pub(crate) stop_signal: Option<String>,
    /// Set the seconds after which `stop` without --time kills the container; by default 10
    #[arg(long, value_name = "SECONDS")]
    pub(crate) stop_timeout: Option<u32>,
    #[command(flatten)]
    pub(crate) log: LogOptions,
    /// Name the container: 1 to 64 letters, digits, `-`, `_` and `.`. The default is twelve random hexadecimal digits
    #[arg(long, value_name = "NAME", value_parser = container_name)]
    pub(crate) name: Option<String>,
    /// Remove the container that has the name of --name, if there is one, even if it runs
    #[arg(long, requires = "name")]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) labels: Labels,
    /// Write the container's name into this file, which must not exist
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) cidfile: Option<PathBuf>,
    /// Use the image of this platform, as os/architecture[/variant], and pull it if the store has another one
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Choose what happens with the volumes of the image
    #[arg(long, value_enum, value_name = "HOW", default_value_t = ImageVolumeChoice::Anonymous)]
    pub(crate) image_volume: ImageVolumeChoice,
    /// Begin with this snapshot of a container, by its name or id, instead of an image: all words after the options are
    /// then the command and its arguments
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// Name or id of the image, or the first digits of its id (6 or more)
    #[arg(required_unless_present = "from")]
    image: Option<OsString>,
    /// Command and arguments; by default those of the image
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Removes the slash with which podman's and Docker's own names begin. The name is checked later.
fn container_name(text: &str) -> Result<String, std::convert::Infallible> {
    Ok(text.strip_prefix('/').unwrap_or(text).to_owned())
}

impl NewContainer {
    /// Returns the name of the image. It is empty if the container begins with a snapshot.
    pub(crate) fn image(&self) -> anyhow::Result<&str> {
        let image = self.image.as_deref().filter(|_| self.from.is_none()).unwrap_or_default();
        image.to_str().with_context(|| format!("{image:?} is not UTF-8"))
    }

    /// Returns the values of `--publish` that are not empty.
    pub(crate) fn published(&self) -> Vec<&Published> {
        self.publish.iter().flatten().collect()
    }

    /// Returns the command and its arguments.
    pub(crate) fn command(&self) -> Vec<OsString> {
        let first = self.image.iter().filter(|_| self.from.is_some());
        first.chain(&self.command).cloned().collect()
    }
}
