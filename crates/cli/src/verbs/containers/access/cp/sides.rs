//! The sides of a copy: files of the host, standard streams, and containers, running or at rest.

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, anyhow, bail};
use container::bundle::mounts::{MountKind, MountSource};
use container::bundle::spec::RuntimeSpec;
use container::bundle::userns::IdMap;
use container::bundle::{Access, Kind};
use container::copy::{self, Destination, LinkHandling, NewOwner, Place};
use container::life::at_rest::RestingRoot;
use container::life::kept::KeptContainer;
use container::life::lookup::{self, find_at_rest, find_container};
use container::life::prepare::AdmittedImage;
use container::plan::ContainerRequest;
use container::request::StoredRequest;
use container::root::WritableChoice;
use container::runtime::Runtime;
use kernel::process::{Signal, Signals};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use store::Store;

use crate::args::Trust;
use crate::session::context::{Context, now};
use crate::session::ways::Ways;
use crate::verbs::containers::start::{image, shared_store, usual};
use crate::verbs::images::file_listing;

/// The source or the destination of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side<'a> {
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
    pub(super) fn parse(text: &'a OsStr) -> Self {
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

/// Signals that end the copy.
pub(super) struct Interrupt {
    signals: Signals,
    pub(super) cancel: AtomicBool,
}

impl Interrupt {
    pub(super) fn new() -> anyhow::Result<Self> {
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

/// The containers of a copy, which may be the same.
pub(super) struct OpenedContainers {
    source: Option<OpenedContainer>,
    /// `None` also for the container of the source.
    destination: Option<OpenedContainer>,
    is_same: bool,
}

impl OpenedContainers {
    pub(super) fn open(
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

    pub(super) fn source(&self) -> Option<&OpenedContainer> {
        self.source.as_ref()
    }

    pub(super) fn destination(&self) -> Option<&OpenedContainer> {
        if self.is_same { self.source.as_ref() } else { self.destination.as_ref() }
    }

    /// Unmounts the roots of containers at rest. Returns whether the disk has lost data.
    pub(super) fn rest(self) -> bool {
        let all = self.source.into_iter().chain(self.destination);
        all.map(OpenedContainer::rest).fold(false, |all, it| all | it)
    }
}

/// A container's root, to copy files from or to.
pub(super) struct OpenedContainer {
    id: String,
    root: OpenedRoot,
    /// Map of the container's users to the host's.
    pub(super) map: Option<IdMap>,
    /// Directory at which relative paths begin.
    working_dir: String,
    /// User and group of the container's program, by their ids in the container.
    user: (u32, u32),
}

enum OpenedRoot {
    Running(File),
    Resting {
        root: Box<RestingRoot>,
        /// The mounts that only a running container has, the deepest first.
        mounts: Vec<RestingMount>,
    },
}

/// A mount of a container at rest.
struct RestingMount {
    destination: String,
    /// Directory or file of the host; `None` if the files are in memory.
    source: Option<PathBuf>,
    is_read_only: bool,
    /// The source, or the directory of a file.
    opened: OnceCell<OwnedFd>,
}

impl RestingMount {
    fn new(destination: &str, source: Option<PathBuf>, access: Access) -> Self {
        let is_read_only = access == Access::ReadOnly;
        Self { destination: destination.to_owned(), source, is_read_only, opened: OnceCell::new() }
    }

    /// Returns the mounts of a container, the deepest first, as they hide each other.
    fn all(store: &Store, request: &ContainerRequest) -> Vec<Self> {
        let volumes = request.volumes.iter().map(|it| {
            let source = match &it.source {
                MountSource::Host(path) | MountSource::Directory(path) => Some(path.into()),
                MountSource::Named(name) | MountSource::Anonymous(Some(name)) => {
                    Some(store.volumes.path(name))
                }
                MountSource::Anonymous(None) | MountSource::Memory { .. } => None,
            };
            Self::new(&it.destination, source, it.access)
        });
        let mounts = request.mounts.iter().map(|it| {
            let source = match &it.kind {
                MountKind::Host(path) => Some(path.into()),
                MountKind::Memory { .. } | MountKind::Filestore { .. } => None,
            };
            Self::new(&it.destination, source, it.access)
        });
        let mut all: Vec<_> = volumes.chain(mounts).collect();
        all.sort_by_key(|it| Reverse(names(it.destination.as_bytes()).len()));
        all
    }

    /// Finds a path below the mount point. Links stay inside the source, which itself may be a link of the host.
    fn find(&self, source: &Path, below: &[u8]) -> Result<FoundPlace<'_>, Errno> {
        let source = std::fs::canonicalize(source);
        let source = &source.map_err(|it| Errno::from_io_error(&it).unwrap_or(Errno::IO))?;
        let is_directory = source.is_dir();
        if !is_directory && !below.is_empty() {
            return Err(Errno::NOTDIR);
        }
        let (directory, path) = match (is_directory, source.file_name()) {
            (true, _) | (_, None) => {
                (source.as_path(), if below.is_empty() { &b"."[..] } else { below })
            }
            (false, Some(name)) => (source.parent().unwrap_or(Path::new("/")), name.as_bytes()),
        };
        let root = match self.opened.get() {
            Some(root) => root,
            None => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let opened = rustix::fs::open(directory, flags, Mode::empty())?;
                self.opened.get_or_init(|| opened)
            }
        };
        let place = copy::find(root.as_fd(), path)?;
        let mut name = place.name.clone();
        if below.is_empty() {
            name = names(self.destination.as_bytes()).pop().unwrap_or_default();
        }
        let (root, is_read_only) = (root.as_fd(), self.is_read_only);
        Ok(FoundPlace { root, place, name, is_read_only, is_mounted_file: !is_directory })
    }
}

/// A path of a container, and the root in which it was found.
pub(super) struct FoundPlace<'a> {
    pub(super) root: BorrowedFd<'a>,
    pub(super) place: Place,
    /// Name of the file in a copy. Empty if the path names no entry of a directory.
    pub(super) name: Vec<u8>,
    /// Whether it is in a mount that the container cannot write.
    is_read_only: bool,
    /// Whether it is a single file of the host that a container at rest mounts.
    pub(super) is_mounted_file: bool,
}

impl FoundPlace<'_> {
    /// Refuses a destination that the container cannot write.
    pub(super) fn check_writable(&self, path: &[u8]) -> anyhow::Result<()> {
        if self.is_read_only {
            bail!("{} is in a read-only mount", file_listing::name(path));
        }
        Ok(())
    }
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

    pub(super) fn look(&self) {
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
    pub(super) fn find(&self, path: &[u8]) -> anyhow::Result<FoundPlace<'_>> {
        let whole = match path {
            [b'/', ..] => path.to_vec(),
            _ => [self.working_dir.as_bytes(), b"/", path].concat(),
        };
        if let Some((mount, below)) = self.mount_of(&whole) {
            let Some(source) = &mount.source else {
                return Err(self.only_running(path, &mount.destination));
            };
            return mount.find(source, &below).map_err(|errno| self.not_found(path, errno));
        }
        let found = copy::find(self.root(), &whole);
        self.check_mounts(path, &whole, found.as_ref().ok())?;
        let place = found.map_err(|errno| self.not_found(path, errno))?;
        let name = place.name.clone();
        let root = self.root();
        Ok(FoundPlace { root, place, name, is_read_only: false, is_mounted_file: false })
    }

    /// Returns the mount of a container at rest that has a path by its text, and the path below the mount point.
    fn mount_of(&self, whole: &[u8]) -> Option<(&RestingMount, Vec<u8>)> {
        let OpenedRoot::Resting { mounts, .. } = &self.root else { return None };
        // With links, `..` may lead elsewhere.
        if whole.split(|it| *it == b'/').any(|it| it == b"..") {
            return None;
        }
        let whole = names(whole);
        mounts.iter().find_map(|mount| {
            let below = whole.strip_prefix(&*names(mount.destination.as_bytes()))?;
            Some((mount, below.join(&b'/')))
        })
    }

    fn only_running(&self, path: &[u8], mount: &str) -> anyhow::Error {
        let (path, id) = (file_listing::name(path), &self.id);
        anyhow!(
            "{path} is in the mount {mount} of container {id}, which exists only while the container runs: `quire start \
            {id}` first"
        )
    }

    /// Refuses a path that leads into a mount of a container at rest by links or `..`. `whole` is the path from the root, and `place` the file.
    fn check_mounts(&self, path: &[u8], whole: &[u8], place: Option<&Place>) -> anyhow::Result<()> {
        let OpenedRoot::Resting { mounts, .. } = &self.root else { return Ok(()) };
        let mounts: Vec<_> = mounts.iter().map(|it| it.destination.clone()).collect();
        let mount = match place {
            Some(place) => copy::mount_above(self.root(), place, &mounts)
                .map_err(|errno| self.not_found(path, errno))?,
            // Directories that only the mount has.
            None => mounts.iter().map(String::as_str).find(|it| is_at_or_below(whole, it)),
        };
        match mount {
            Some(mount) => Err(self.only_running(path, mount)),
            None => Ok(()),
        }
    }

    pub(super) fn not_found(&self, path: &[u8], errno: Errno) -> anyhow::Error {
        let (path, id) = (file_listing::name(path), &self.id);
        anyhow::Error::from(errno)
            .context(format!("\"{path}\" could not be found on container {id}"))
    }

    /// Returns the destination for files of this container, in this directory of a root.
    pub(super) fn destination<'a>(
        &'a self,
        archive: bool,
        root: BorrowedFd<'a>,
        directory: Vec<u8>,
    ) -> Destination<'a> {
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
        Destination {
            root,
            directory,
            links: LinkHandling::Inside,
            owner,
            keeps_set_ids: true,
            is_mounted_file: false,
        }
    }
}

/// Mounts the root of a container at rest, and returns its mounts as well.
fn at_rest(
    context: &Context,
    store: &Store,
    id: &str,
    is_written: bool,
    is_asked_to_end: &dyn Fn() -> bool,
) -> anyhow::Result<(RestingRoot, Vec<RestingMount>)> {
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
    let mounts = RestingMount::all(store, request);
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

/// Returns the names of a path, whose text alone counts.
fn names(path: &[u8]) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    for name in path.split(|it| *it == b'/') {
        match name {
            b"" | b"." => {}
            b".." => drop(names.pop()),
            name => names.push(name.to_vec()),
        }
    }
    names
}

/// Returns whether a path, whose text alone counts, is this directory or is in it.
fn is_at_or_below(path: &[u8], directory: &str) -> bool {
    names(path).starts_with(&names(directory.as_bytes()))
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
