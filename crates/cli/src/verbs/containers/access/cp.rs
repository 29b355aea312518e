//! `cp`: copies files between a container and the host, or as a tar.

mod sides;

use std::ffi::OsString;
use std::io::{BufReader, IsTerminal as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use container::changes::Owners;
use container::copy::{self, CopyError, Destination, LinkHandling, NewOwner, Skipped};
use container::life::end::ended::LOST;
use oci::source::Input;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use store::OpenOptions;
use transfer::import::{Limits, read_archive};

use crate::Answer;
use crate::output::report;
use crate::output::stream::CancellableStream;
use crate::session::context::Context;
use crate::session::failure::UsageError;
use crate::session::signals::{Heard, until_stopped};
use crate::verbs::VerbArgs;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::images::file_listing;
use sides::{FoundPlace, Interrupt, OpenedContainer, OpenedContainers, Side};

#[derive(Debug, Args)]
pub(crate) struct Cp {
    /// Give the copies the container's user as their owner, or on the host the caller. With false, they keep the user
    /// and group ids of the container
    #[arg(
        short,
        long,
        value_name = "BOOL",
        default_value_t = true,
        default_missing_value = "true",
        num_args = 0..=1,
        require_equals = true,
        action = clap::ArgAction::Set
    )]
    pub(crate) archive: bool,
    /// Accepted for older scripts: files always replace others of the same name
    #[arg(long, hide = true)]
    pub(crate) overwrite: bool,
    /// CONTAINER:PATH, a path of the host, or - for a tar on standard input
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(crate) source: OsString,
    /// CONTAINER:PATH, a path of the host, or - for a tar on standard output
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(crate) destination: OsString,
}

impl VerbArgs for Cp {
    const NAME: &'static str = "cp";
    const ABOUT: &'static str = "Copy files between a container and the host";
    const DETAILS: &'static str = "The container may run, or may have ended. A relative PATH begins at the container's \
        working directory. Write ./NAME for a file of the host whose name contains a colon.\n\n\
        If DESTINATION is a directory, SOURCE is copied into it. If there is no such file, SOURCE gets this name. If \
        SOURCE is a directory and ends with `/.`, its contents are copied. In a container that does not run, PATH may be \
        in a volume or in a directory of the host that it mounts. Links at the end of PATH are followed, but \
        no link leads out of the container. A tar on standard input may be compressed by gzip or zstd.\n\n\
        Modes and times are copied, but no extended attributes. Devices and sockets are left out. The host's copies have \
        no set-user-id and set-group-id bits.";
    const EXAMPLES: &'static str =
        "quire cp web:/etc/hosts .\n  quire cp ./site/. web:/srv\n  quire cp web:/etc - | tar t";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        cp(context, self)
    }
}

impl Cp {
    /// Returns the containers that the command line names.
    pub(crate) fn containers(&self) -> impl Iterator<Item = &str> {
        [&self.source, &self.destination].into_iter().filter_map(|it| match Side::parse(it) {
            Side::Container { name, .. } => Some(name),
            Side::Host(_) | Side::Stream => None,
        })
    }
}

fn cp(context: &Context, args: &Cp) -> anyhow::Result<Answer> {
    let (source, destination) = (Side::parse(&args.source), Side::parse(&args.destination));
    let is_container = |it: &Side<'_>| matches!(it, Side::Container { .. });
    if !is_container(&source) && !is_container(&destination) {
        let text = "one of the paths must be CONTAINER:PATH";
        return Err(UsageError(text.to_owned()).into());
    }
    let store = context.open(OpenOptions::write())?;
    // A signal ends the copy, but not the process before the roots are unmounted.
    let interrupt = Interrupt::new()?;
    let opened = OpenedContainers::open(context, &store, source, destination, &interrupt)?;
    let cancel = &interrupt.cancel;
    let hear = |_| match cancel.load(Ordering::Relaxed) {
        // The copy is ending already.
        true => Heard::Done,
        false => Heard::ToEnd,
    };
    let work = move || {
        let copied = match source {
            Side::Stream => from_stream(args, &opened, destination, cancel),
            _ => copy_files(args, &opened, source, destination, cancel),
        };
        (copied, opened)
    };
    let (copied, opened) = until_stopped(cancel, hear, work)?;
    let has_lost = opened.rest();
    if cancel.load(Ordering::Relaxed) {
        bail!("interrupted: some of the files are not copied");
    }
    tell(context, &copied?);
    if has_lost {
        bail!(LOST);
    }
    Ok(Answer::Yes)
}

/// Prints a remark about files that were left out.
pub(in crate::verbs::containers) fn tell(context: &Context, skipped: &Skipped) {
    let Some((path, what)) = &skipped.first else { return };
    let count = report::count(skipped.count, "file");
    let path = file_listing::name(path);
    context.remark(&format!("leaving out {count}, such as {path}: {what}"));
}

/// A file or directory to copy.
struct Source {
    file: OwnedFd,
    is_directory: bool,
    /// Its own name. Empty for a directory of which only the contents are copied.
    name: Vec<u8>,
}

/// Returns whether a path stands for the contents of a directory.
fn is_of_contents(path: &[u8]) -> bool {
    path == b"." || path.ends_with(b"/.")
}

impl Source {
    fn in_container(container: &OpenedContainer, path: &[u8]) -> anyhow::Result<Self> {
        let FoundPlace { place, name, .. } = container.find(path)?;
        let is_directory = place.is_directory();
        let Some(file) = place.file else { return Err(container.not_found(path, Errno::NOENT)) };
        if !is_directory && path.ends_with(b"/") {
            return Err(container.not_found(path, Errno::NOTDIR));
        }
        let name = if is_of_contents(path) { Vec::new() } else { name };
        Ok(Self { file, is_directory, name })
    }

    fn on_host(path: &Path) -> anyhow::Result<Self> {
        let failed = || format!("\"{}\" could not be found on the host", path.display());
        let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let file = file.with_context(failed)?;
        let found = rustix::fs::fstat(&file).with_context(failed)?;
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let name = match is_of_contents(path.as_os_str().as_bytes()) {
            true => Vec::new(),
            false => {
                let real = path.canonicalize().with_context(failed)?;
                real.file_name().unwrap_or_default().as_bytes().to_vec()
            }
        };
        Ok(Self { file, is_directory, name })
    }
}

/// Where a source goes.
struct Target<'a> {
    destination: Destination<'a>,
    /// The new name. `None` if the destination is a directory, in which the source keeps its own name.
    name: Option<Vec<u8>>,
}

/// The text is podman's.
const NOT_INTO_FILE: &str = "destination must be a directory when copying a directory";

impl<'a> Target<'a> {
    fn in_container(
        container: &'a OpenedContainer,
        path: &[u8],
        archive: bool,
        source: &Source,
    ) -> anyhow::Result<Self> {
        let found = container.find(path)?;
        found.check_writable(path)?;
        let FoundPlace { root, place, is_mounted_file, .. } = found;
        let (directory, name) = match place.kind {
            Some(FileType::Directory) => (place.path(), None),
            Some(_) if source.is_directory => bail!(NOT_INTO_FILE),
            Some(FileType::RegularFile) => (place.directory, Some(place.name)),
            Some(_) => bail!("{} is not a regular file", file_listing::name(path)),
            None if path.ends_with(b"/") => return Err(container.not_found(path, Errno::NOENT)),
            None => (place.directory, Some(place.name)),
        };
        let destination = container.destination(archive, root, directory);
        Ok(Self { destination: Destination { is_mounted_file, ..destination }, name })
    }
}

/// The directory of the host for a destination, and the new name.
struct HostTarget {
    directory: OwnedFd,
    name: Option<Vec<u8>>,
}

impl HostTarget {
    fn new(path: &Path, source: &Source) -> anyhow::Result<Self> {
        let failed = || format!("\"{}\" could not be found on the host", path.display());
        let (directory, name) = match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => (path.to_owned(), None),
            Ok(_) if source.is_directory => bail!(NOT_INTO_FILE),
            Ok(found) if !found.is_file() => {
                bail!("{} is not a regular file: copy to - and redirect it", path.display())
            }
            // The file behind a link is replaced, and not the link.
            Ok(_) => parent_and_name(&path.canonicalize().with_context(failed)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if path.as_os_str().as_bytes().ends_with(b"/") {
                    return Err(error).with_context(failed);
                }
                parent_and_name(path)
            }
            Err(error) => return Err(error).with_context(failed),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&directory, flags, Mode::empty()).with_context(failed)?;
        Ok(Self { directory, name })
    }

    /// Returns the destination, where files belong to the caller unless they keep the container's ids.
    fn destination(&self, archive: bool) -> Destination<'_> {
        Destination {
            root: self.directory.as_fd(),
            directory: Vec::new(),
            links: LinkHandling::Refused,
            owner: if archive { NewOwner::Caller } else { NewOwner::OfTar(None) },
            keeps_set_ids: false,
            is_mounted_file: false,
        }
    }
}

fn parent_and_name(path: &Path) -> (PathBuf, Option<Vec<u8>>) {
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(".")).to_owned();
    (parent, path.file_name().map(|it| it.as_bytes().to_vec()))
}

fn copy_files(
    args: &Cp,
    opened: &OpenedContainers,
    source: Side<'_>,
    destination: Side<'_>,
    cancel: &AtomicBool,
) -> anyhow::Result<Skipped> {
    let of_container = opened.source().and_then(|it| it.map.as_ref());
    let owners = of_container.map_or_else(Owners::default, Owners::of_map);
    let from = match (source, opened.source()) {
        (Side::Container { path, .. }, Some(container)) => Source::in_container(container, path)?,
        (Side::Host(path), _) => Source::on_host(path)?,
        _ => bail!("the source is no file"),
    };
    let host;
    let (target, container) = match (destination, opened.destination()) {
        (Side::Container { path, .. }, Some(container)) => {
            (Target::in_container(container, path, args.archive, &from)?, Some(container))
        }
        (Side::Host(path), _) => {
            host = HostTarget::new(path, &from)?;
            let (destination, name) = (host.destination(args.archive), host.name.clone());
            (Target { destination, name }, None)
        }
        _ => return to_stream(&from, &owners, cancel),
    };
    let Target { destination, name } = target;
    let name = name.as_ref().unwrap_or(&from.name);
    let look = || {
        if let Some(container) = container {
            container.look();
        }
    };
    let copied = copy::through(
        |out| copy::pack(&from.file, name, &owners, &mut CancellableStream { inner: out, cancel }),
        |tar| copy::unpack(CancellableStream { inner: tar, cancel }, &destination, &look),
    );
    Ok(copied?)
}

/// Writes a tar on standard output.
fn to_stream(from: &Source, owners: &Owners, cancel: &AtomicBool) -> anyhow::Result<Skipped> {
    if std::io::stdout().is_terminal() {
        bail!("standard output is a terminal: redirect it, or name a file");
    }
    let mut out = report::cancellable_output(cancel);
    let skipped = copy::pack(&from.file, &from.name, owners, &mut out)?;
    out.flush()?;
    Ok(skipped)
}

/// Unpacks the tar on standard input in a container.
fn from_stream(
    args: &Cp,
    opened: &OpenedContainers,
    destination: Side<'_>,
    cancel: &AtomicBool,
) -> anyhow::Result<Skipped> {
    let (Side::Container { path, .. }, Some(container)) = (destination, opened.destination())
    else {
        bail!("the destination must be CONTAINER:PATH if the source is standard input");
    };
    if std::io::stdin().is_terminal() {
        bail!("standard input is a terminal: redirect a tar to it");
    }
    let found = container.find(path)?;
    found.check_writable(path)?;
    let FoundPlace { root, place, .. } = found;
    if !place.is_directory() {
        // The text is podman's.
        bail!("destination must be a directory when copying from stdin");
    }
    let destination = container.destination(args.archive, root, place.path());
    let copied = read_archive(&Input::Stdin, &Limits::default(), cancel, |tar| {
        copy::unpack(BufReader::new(tar), &destination, &|| container.look())
    })?;
    match copied {
        Err(error @ CopyError::Read(_)) => Err(anyhow::Error::from(error)
            .context("source must be a (compressed) tar archive when copying from stdin")),
        copied => Ok(copied?),
    }
}
