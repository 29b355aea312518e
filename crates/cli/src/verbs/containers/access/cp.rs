//! `cp`: copies files between a container and the host, or as a tar.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufReader, IsTerminal as _, Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use container::bundle::Kind;
use container::bundle::spec::RuntimeSpec;
use container::bundle::userns::IdMap;
use container::changes::Owners;
use container::copy::{self, CopyError, Destination, LinkHandling, NewOwner, Place, Skipped};
use container::life::at_rest::RestingRoot;
use container::life::end::ended::LOST;
use container::life::kept::KeptContainer;
use container::life::lookup::{self, find_at_rest, find_container};
use container::life::prepare::AdmittedImage;
use container::request::StoredRequest;
use container::root::WritableChoice;
use container::runtime::Runtime;
use kernel::process::{Signal, Signals};
use oci::source::Input;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use store::{OpenOptions, Store};
use transfer::import::{Limits, read_archive};

use crate::Answer;
use crate::args::Trust;
use crate::output::report;
use crate::session::context::{Context, now};
use crate::session::failure::UsageError;
use crate::session::signals::{Heard, until_stopped};
use crate::session::ways::Ways;
use crate::verbs::VerbArgs;
use crate::verbs::containers::start::{image, shared_store, usual};
use crate::verbs::images::file_listing;

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
        SOURCE is a directory and ends with `/.`, its contents are copied. Links at the end of PATH are followed, but \
        no link leads out of the container. A tar on standard input may be compressed by gzip or zstd.\n\n\
        Modes and times are copied, but no extended attributes. Devices and sockets are left out. The host's copies have \
        no set-user-id and set-group-id bits.";
    const EXAMPLES: &'static str =
        "quire cp web:/etc/hosts .\n  quire cp ./site/. web:/srv\n  quire cp web:/etc - | tar t";
    const PRINTS_JSON: bool = false;

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

/// The source or the destination of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side<'a> {
    Container {
        name: &'a str,
        path: &'a [u8],
    },
    Host(&'a Path),
    /// A standard stream, with a tar.
    Stream,
}

impl<'a> Side<'a> {
    /// Parses a side. A path that begins with a slash or a dot is of the host, as for podman and Docker.
    fn parse(text: &'a OsStr) -> Self {
        let bytes = text.as_bytes();
        if bytes == b"-" {
            return Self::Stream;
        }
        let at = bytes.iter().position(|it| *it == b':');
        let at = at.filter(|at| *at > 0 && !bytes.starts_with(b".") && !bytes.starts_with(b"/"));
        let Some(at) = at else { return Self::Host(Path::new(text)) };
        match std::str::from_utf8(&bytes[..at]) {
            Ok(name) => Self::Container { name, path: &bytes[at + 1..] },
            Err(_) => Self::Host(Path::new(text)),
        }
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

/// Signals that end the copy.
struct Interrupt {
    signals: Signals,
    cancel: AtomicBool,
}

impl Interrupt {
    fn new() -> anyhow::Result<Self> {
        let signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
        Ok(Self { signals, cancel: AtomicBool::new(false) })
    }

    /// Returns whether a signal has arrived, also before the copy.
    fn has_arrived(&self) -> bool {
        if self.signals.ending().is_some() {
            self.cancel.store(true, Ordering::Relaxed);
        }
        self.cancel.load(Ordering::Relaxed)
    }
}

/// One side of a copy. It fails soon after `cancel` is set.
pub(crate) struct CancellableStream<'a, T> {
    pub(crate) inner: T,
    pub(crate) cancel: &'a AtomicBool,
}

impl<T> CancellableStream<'_, T> {
    fn check(&self) -> io::Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(io::Error::other("cancelled")),
            false => Ok(()),
        }
    }
}

impl<T: Read> Read for CancellableStream<'_, T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.inner.read(into)
    }
}

impl<T: Write> Write for CancellableStream<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        self.inner.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Prints a remark about files that were left out.
fn tell(context: &Context, skipped: &Skipped) {
    let Some((path, what)) = &skipped.first else { return };
    let count = report::count(skipped.count, "file");
    let path = file_listing::name(path);
    context.remark(&format!("leaving out {count}, such as {path}: {what}"));
}

/// The containers of a copy, which may be the same.
struct OpenedContainers {
    source: Option<OpenedContainer>,
    /// `None` also for the container of the source.
    destination: Option<OpenedContainer>,
    is_same: bool,
}

impl OpenedContainers {
    fn open(
        context: &Context,
        store: &Store,
        source: Side<'_>,
        destination: Side<'_>,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let id = |side: Side<'_>| match side {
            Side::Container { name, .. } => find_container(store, name).map(|it| Some(it.id)),
            Side::Host(_) | Side::Stream => Ok(None),
        };
        // Both are looked up before either is opened.
        let (from, to) = (id(source)?, id(destination)?);
        let is_same = from.is_some() && from == to;
        let open = |id: Option<String>, is_written| {
            id.map(|id| OpenedContainer::open(context, store, &id, is_written, interrupt))
                .transpose()
        };
        // Two commands that copy in both directions must not wait for each other.
        if !is_same && from.is_some() && to.is_some() && to < from {
            let destination = open(to, true)?;
            return Ok(Self { source: open(from, false)?, destination, is_same });
        }
        let source = open(from, is_same)?;
        let destination = if is_same { None } else { open(to, true)? };
        Ok(Self { source, destination, is_same })
    }

    fn source(&self) -> Option<&OpenedContainer> {
        self.source.as_ref()
    }

    fn destination(&self) -> Option<&OpenedContainer> {
        if self.is_same { self.source.as_ref() } else { self.destination.as_ref() }
    }

    /// Unmounts the roots of containers at rest. Returns whether the disk has lost data.
    fn rest(self) -> bool {
        let all = self.source.into_iter().chain(self.destination);
        all.map(OpenedContainer::rest).fold(false, |all, it| all | it)
    }
}

/// A container's root, to copy files from or to.
struct OpenedContainer {
    id: String,
    root: OpenedRoot,
    /// Map of the container's users to the host's.
    map: Option<IdMap>,
    /// Directory at which relative paths begin.
    working_dir: String,
    /// User and group of the container's program, by their ids in the container.
    user: (u32, u32),
}

enum OpenedRoot {
    Running(File),
    Resting {
        root: Box<RestingRoot>,
        /// Mount points, below which only a running container has its files.
        mounts: Vec<String>,
    },
}

impl OpenedContainer {
    fn open(
        context: &Context,
        store: &Store,
        id: &str,
        is_written: bool,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let is_asked_to_end = || interrupt.has_arrived();
        let known = find_container(store, id)?;
        let failed = || format!("container {id} is damaged");
        let (root, folder, map) = if known.is_running() {
            let (known, root) = lookup::running(store, id, &is_asked_to_end)?;
            let runtime = StoredRequest::load(&known.folder, id).map(|it| Runtime::at(it.runtime));
            if runtime.is_ok_and(|it| it.kind == Kind::Runsc) {
                bail!(
                    "container {id} runs in gVisor, which shows its files to no other program: use `quire exec {id} \
                    tar`, or `quire stop {id}` first"
                );
            }
            if is_written {
                // While another command copies the container's changes, this waits.
                let goes_on =
                    container::life::cgroup::pause::pass(&known.folder, id, &is_asked_to_end)
                        .with_context(|| format!("cannot determine whether {id} is paused"))?;
                if !goes_on {
                    bail!("interrupted: container {id} is paused by another command");
                }
            }
            let map = IdMap::noted(&known.folder);
            (OpenedRoot::Running(root), known.folder, map)
        } else {
            let (root, mounts) = at_rest(context, store, id, is_written, &is_asked_to_end)?;
            let (folder, map) = (root.folder().to_owned(), root.map().cloned());
            (OpenedRoot::Resting { root: Box::new(root), mounts }, folder, map)
        };
        let process = RuntimeSpec::load(&folder).with_context(failed)?.process;
        Ok(Self {
            id: id.to_owned(),
            root,
            map,
            working_dir: process.cwd,
            user: (process.user.uid, process.user.gid),
        })
    }

    fn root(&self) -> BorrowedFd<'_> {
        match &self.root {
            OpenedRoot::Running(root) => root.as_fd(),
            OpenedRoot::Resting { root, .. } => root.root(),
        }
    }

    fn look(&self) {
        if let OpenedRoot::Resting { root, .. } = &self.root {
            root.look();
        }
    }

    fn rest(self) -> bool {
        match self.root {
            OpenedRoot::Running(_) => false,
            OpenedRoot::Resting { root, .. } => root.rest(),
        }
    }

    /// Finds a path in the container.
    fn find(&self, path: &[u8]) -> anyhow::Result<Place> {
        let whole = match path {
            [b'/', ..] => path.to_vec(),
            _ => [self.working_dir.as_bytes(), b"/", path].concat(),
        };
        let found = copy::find(self.root(), &whole);
        self.check_mounts(path, &whole, found.as_ref().ok())?;
        found.map_err(|errno| self.not_found(path, errno))
    }

    /// Refuses a path in a mount of a container at rest. `whole` is the path from the root, and `place` the file.
    fn check_mounts(&self, path: &[u8], whole: &[u8], place: Option<&Place>) -> anyhow::Result<()> {
        let OpenedRoot::Resting { mounts, .. } = &self.root else { return Ok(()) };
        let mount = match place {
            Some(place) => copy::mount_above(self.root(), place, mounts)
                .map_err(|errno| self.not_found(path, errno))?,
            // Directories that only the mount has.
            None => mounts.iter().map(String::as_str).find(|it| is_at_or_below(whole, it)),
        };
        let Some(mount) = mount else { return Ok(()) };
        let (path, id) = (file_listing::name(path), &self.id);
        bail!(
            "{path} is in the mount {mount} of container {id}, which exists only while the container runs: `quire start \
            {id}` first"
        );
    }

    fn not_found(&self, path: &[u8], errno: Errno) -> anyhow::Error {
        let (path, id) = (file_listing::name(path), &self.id);
        anyhow::Error::from(errno)
            .context(format!("\"{path}\" could not be found on container {id}"))
    }

    /// Returns the destination for files of this container, in this directory.
    fn destination(&self, archive: bool, directory: Vec<u8>) -> Destination<'_> {
        let (user, group) = self.user;
        let map = self.map.as_ref();
        let mapped = map.and_then(|map| map.user(user).zip(map.group(group)));
        let owner = match archive {
            true => {
                let (user, group) = mapped.unwrap_or((user, group));
                NewOwner::One(user, group)
            }
            false => NewOwner::OfTar(map),
        };
        let (root, links) = (self.root(), LinkHandling::Inside);
        Destination { root, directory, links, owner, keeps_set_ids: true }
    }
}

/// Mounts the root of a container at rest, and returns its mount points as well.
fn at_rest(
    context: &Context,
    store: &Store,
    id: &str,
    is_written: bool,
    is_asked_to_end: &dyn Fn() -> bool,
) -> anyhow::Result<(RestingRoot, Vec<String>)> {
    let (known, folder) = find_at_rest(store, id, is_asked_to_end)?;
    let Some(folder) = folder.filter(|_| !known.is_unwatched) else {
        bail!("container {id} was started by another command: copy the files again");
    };
    let kept = KeptContainer::open(folder, now().0)?;
    let request = kept.request();
    if is_written && matches!(request.writable, WritableChoice::Memory(_)) {
        bail!(
            "the changes of container {id} are in memory, and end with its program: `quire start {id}`, then copy \
            the files"
        );
    }
    let volumes = request.volumes.iter().map(|it| it.destination.clone());
    let mounts = request.mounts.iter().map(|it| it.destination.clone());
    let mounts = volumes.chain(mounts).collect();
    let record = kept.record().clone();
    let shared = shared_store(context, record.shared.as_deref())?;
    let images = shared.as_ref().unwrap_or(store);
    let image = AdmittedImage { store: images, image: image(context, images, &record)? };
    let trust = usual::<Trust>()?;
    let ways = Ways::new(context.who(), &trust);
    let remark = |text: &str| context.remark(text);
    let root = RestingRoot::mount(store, image, kept, ways.via(&trust), &remark)?;
    Ok((root, mounts))
}

/// Returns whether a path, whose text alone counts, is this directory or is in it.
fn is_at_or_below(path: &[u8], directory: &str) -> bool {
    let names = |path: &'_ [u8]| {
        let mut names: Vec<Vec<u8>> = Vec::new();
        for name in path.split(|it| *it == b'/') {
            match name {
                b"" | b"." => {}
                b".." => drop(names.pop()),
                name => names.push(name.to_vec()),
            }
        }
        names
    };
    names(path).starts_with(&names(directory.as_bytes()))
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
        let place = container.find(path)?;
        let is_directory = place.is_directory();
        let Some(file) = place.file else { return Err(container.not_found(path, Errno::NOENT)) };
        if !is_directory && path.ends_with(b"/") {
            return Err(container.not_found(path, Errno::NOTDIR));
        }
        let name = if is_of_contents(path) { Vec::new() } else { place.name };
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
        let place = container.find(path)?;
        let (directory, name) = match place.kind {
            Some(FileType::Directory) => (place.path(), None),
            Some(_) if source.is_directory => bail!(NOT_INTO_FILE),
            Some(FileType::RegularFile) => (place.directory, Some(place.name)),
            Some(_) => bail!("{} is not a regular file", file_listing::name(path)),
            None if path.ends_with(b"/") => return Err(container.not_found(path, Errno::NOENT)),
            None => (place.directory, Some(place.name)),
        };
        Ok(Self { destination: container.destination(archive, directory), name })
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
    let place = container.find(path)?;
    if !place.is_directory() {
        // The text is podman's.
        bail!("destination must be a directory when copying from stdin");
    }
    let destination = container.destination(args.archive, place.path());
    let copied = read_archive(&Input::Stdin, &Limits::default(), cancel, |tar| {
        copy::unpack(BufReader::new(tar), &destination, &|| container.look())
    })?;
    match copied {
        Err(error @ CopyError::Read(_)) => Err(anyhow::Error::from(error)
            .context("source must be a (compressed) tar archive when copying from stdin")),
        copied => Ok(copied?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_containers_paths_and_streams() {
        let check = |text: &str, expect: Side<'_>| {
            assert_eq!(Side::parse(OsStr::new(text)), expect, "{text}");
        };
        let container = |name, path: &'static str| Side::Container { name, path: path.as_bytes() };
        check("-", Side::Stream);
        check("web:/etc/hosts", container("web", "/etc/hosts"));
        check("web:", container("web", ""));
        check("web:a:b", container("web", "a:b"));
        for path in ["file", "./web:/x", "/a:b", "../a:b", ":/x"] {
            check(path, Side::Host(Path::new(path)));
        }
    }

    #[test]
    fn mounts_have_the_paths_below_them() {
        let check = |path: &str, directory, expect| {
            assert_eq!(is_at_or_below(path.as_bytes(), directory), expect, "{path} {directory}");
        };
        check("/data", "/data", true);
        check("/data/../data/x", "/data/", true);
        check("//data/./x", "/data", true);
        check("/data/../x", "/data", false);
        check("/database", "/data", false);
        check("/", "/data", false);
    }
}
