//! A container's file system before its runtime assembles it: the root, and the mounts to be made in it.
//!
//! Links are resolved only by their text, as in the container. So no path leads out of the root, or through the magic
//! links of `/proc`, whose targets are open files of the process that follows them.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::bundle::choices::Access;
use crate::bundle::spec::{RuntimeSpec, SpecMount};

/// Maximum number of links in a path. Source: path_resolution(7).
const LINKS: u32 = 40;

/// Mount points of the kernel's file systems and of devices in every container.
pub(crate) const KERNELS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Maximum length of a file name, in bytes. Source: `linux/limits.h`, `NAME_MAX`.
const NAME_MAX: usize = 255;

/// Maximum length of a path at which a runtime mounts a file, in bytes. The runtime prepends the root's path to it,
/// and `PATH_MAX` is 4096.
const PLACE_MAX: usize = 2048;

/// Reason why a directory cannot be a program's working directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkingDirError {
    /// The path does not start with a slash.
    #[error("the working directory \"{0}\" is not an absolute path")]
    Relative(String),
    /// The path is a file.
    #[error("the working directory \"{0}\" is not a directory")]
    NotDirectory(String),
    /// The directory is below `/proc`, `/sys` or `/dev`.
    #[error(
        "the working directory \"{path}\" resolves to {resolved}, and no program can start inside \
        /proc, /sys or /dev: choose another with --workdir"
    )]
    Kernel {
        /// Path as given by the caller.
        path: String,
        /// Path without links.
        resolved: String,
    },
    /// The directory does not exist, and cannot be created in a read-only file system.
    #[error(
        "the working directory \"{0}\" does not exist, and cannot be made in a read-only file system: choose \
         another with --workdir"
    )]
    ReadOnly(String),
    /// The directory does not exist in a running container.
    #[error(
        "the working directory \"{0}\" does not exist in the container: choose another with --workdir"
    )]
    Absent(String),
    /// The path leads through the magic links of `/proc`, or through too many links.
    #[error(
        "the working directory \"{0}\" resolves through links of /proc, or too many links: choose \
        another with --workdir"
    )]
    Links(String),
    /// Links lead to a name that cannot be written into the runtime's configuration.
    #[error(
        "the working directory \"{0}\" resolves to a name that is not UTF-8, which runtimes need"
    )]
    Name(String),
    /// The kernel or a runtime would refuse a path of this length.
    #[error(
        "the working directory \"{0}\" resolves to a path of more than {PLACE_MAX} bytes, or with \
        a name of more than {NAME_MAX}: choose another with --workdir"
    )]
    TooLong(String),
    /// The directory cannot be looked up.
    #[error("cannot look up the working directory \"{path}\"")]
    Look {
        /// Path as given by the caller.
        path: String,
        source: Errno,
    },
}

/// Result of looking up a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Executable {
    /// A regular file that at least one user may execute.
    Yes,
    /// A file that is not executable.
    No,
    /// The file does not exist.
    Absent,
    /// The file cannot be looked up.
    Unknown,
}

/// Place where a file or directory can be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FilePlace {
    /// Path without links of a file that exists or that runtimes can create.
    At(String),
    /// Path without links where nothing exists and runtimes can create nothing.
    Absent(String),
    /// The path cannot be used, because another type of file or a mount of the caller occupies it.
    Taken,
}

/// Resolved destination of a mount or device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LinkTarget {
    /// Path without links.
    pub(crate) path: String,
    pub(crate) state: TargetState,
    /// Whether the path is in a directory or file of the host.
    pub(crate) is_on_host: bool,
}

/// Whether the file at a destination exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetState {
    Exists,
    /// The file does not exist, and a runtime can create it.
    Absent,
    /// The file does not exist, and its file system is read-only.
    CannotBeMade,
    /// The path is below `/proc`, `/sys` or `/dev`.
    InKernel,
}

/// A root, and the mounts to be made in it.
#[derive(Debug)]
pub(crate) struct View<'a> {
    root: BorrowedFd<'a>,
    access: Access,
    mounts: Vec<Mount>,
    /// Error of a bundle's mount that could not be looked up.
    unknown: Option<Errno>,
}

#[derive(Debug)]
struct Mount {
    at: Vec<Vec<u8>>,
    content: Content,
    access: Access,
}

#[derive(Debug)]
enum Content {
    Host(OwnedFd),
    Empty,
    /// A file system of the kernel, whose files are not looked up.
    Kernel,
}

/// One name of a path without links, and its file.
#[derive(Debug)]
struct Step {
    name: Vec<u8>,
    place: EntryPlace,
    /// Access to the file system that contains, or would contain, the file.
    access: Access,
}

#[derive(Debug)]
enum EntryPlace {
    Found(OwnedFd, FileType, Mode),
    /// The root of a new file system.
    Empty,
    Absent,
    /// The root of one of the kernel's file systems.
    Kernel,
    /// A path in such a file system.
    InKernel,
}

/// Result of looking up a name in a directory.
enum NamedEntry {
    Place(EntryPlace),
    Link(Vec<u8>),
}

impl<'a> View<'a> {
    /// Returns a view of a root without mounts.
    pub(crate) const fn of_root(root: BorrowedFd<'a>, access: Access) -> Self {
        Self { root, access, mounts: Vec::new(), unknown: None }
    }

    /// Returns a view of a running container's root with all its mounts except `/proc`, whose links depend on the
    /// process that reads them. The container may change the files at any time.
    pub(crate) fn of_running(root: BorrowedFd<'a>) -> Self {
        let proc = Mount {
            at: vec![b"proc".to_vec()],
            content: Content::Kernel,
            access: Access::Writable,
        };
        Self { mounts: vec![proc], ..Self::of_root(root, Access::Writable) }
    }

    /// Returns a view of a root with the mounts of a bundle's configuration.
    pub(crate) fn of_bundle(root: BorrowedFd<'a>, spec: &RuntimeSpec) -> Self {
        let access = if spec.root.readonly { Access::ReadOnly } else { Access::Writable };
        let mut view = Self::of_root(root, access);
        for mount in &spec.mounts {
            view.add(mount);
        }
        view
    }

    /// Adds a mount over the root and the earlier mounts.
    pub(crate) fn add(&mut self, mount: &SpecMount) {
        let destination = mount.destination.as_str();
        let is_read_only = mount.options.iter().any(|it| it == "ro");
        let access = if is_read_only { Access::ReadOnly } else { Access::Writable };
        // Runtimes create missing mount points, and resolve links in the same way.
        let steps = match self.walk(destination.as_bytes()) {
            Ok(steps) => steps,
            Err(errno) if is_about_path(errno) => return,
            Err(errno) => {
                self.unknown = Some(errno);
                return;
            }
        };
        let content = match (mount.kind.as_deref(), mount.source.as_deref()) {
            _ if KERNELS.contains(&destination) => Content::Kernel,
            (Some("bind"), Some(source)) => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                match rustix::fs::open(source, flags, Mode::empty()) {
                    Ok(opened) => Content::Host(opened),
                    // Some sources are created later. They are treated as empty until they exist.
                    Err(Errno::NOENT) => Content::Empty,
                    Err(errno) => {
                        let unknown = Some(errno).filter(|it| !is_about_path(*it));
                        self.unknown = self.unknown.or(unknown);
                        Content::Kernel
                    }
                }
            }
            (Some("tmpfs"), _) => Content::Empty,
            _ => Content::Kernel,
        };
        let at = steps.into_iter().map(|it| it.name).collect();
        self.mounts.push(Mount { at, content, access });
    }

    /// Resolves the destination of a mount or device.
    ///
    /// # Errors
    /// The kernel's error, or `EILSEQ` for a path that is not UTF-8, which runtimes need.
    pub(crate) fn target(&self, path: &str) -> Result<LinkTarget, Errno> {
        let steps = self.walk(path.as_bytes())?;
        let names: Vec<_> = steps.iter().map(|it| &it.name[..]).collect();
        let path = String::from_utf8([b"/", &names.join(&b'/')[..]].concat());
        let path = path.map_err(|_bytes| Errno::ILSEQ)?;
        // The kernel has not checked the names of missing files.
        if is_too_long(&names, path.len()) {
            return Err(Errno::NAMETOOLONG);
        }
        let is_on_host = self.mounts.iter().any(|it| {
            let at: Vec<_> = it.at.iter().map(|it| &it[..]).collect();
            matches!(it.content, Content::Host(_)) && names.starts_with(&at)
        });
        let state = match steps.last().map(|it| (&it.place, it.access)) {
            Some((EntryPlace::Absent, Access::Writable)) => TargetState::Absent,
            Some((EntryPlace::Absent, Access::ReadOnly)) => TargetState::CannotBeMade,
            Some((EntryPlace::InKernel, _)) => TargetState::InKernel,
            _ => TargetState::Exists,
        };
        Ok(LinkTarget { path, state, is_on_host })
    }

    /// Returns a working directory's path without links. The runtime creates a missing directory.
    pub(crate) fn working_dir(&self, path: &str) -> Result<String, WorkingDirError> {
        let given = || path.to_owned();
        if !path.starts_with('/') {
            return Err(WorkingDirError::Relative(given()));
        }
        let steps = self.walk(path.as_bytes()).map_err(|errno| match errno {
            Errno::NOTDIR => WorkingDirError::NotDirectory(given()),
            Errno::LOOP => WorkingDirError::Links(given()),
            Errno::NAMETOOLONG => WorkingDirError::TooLong(given()),
            source => WorkingDirError::Look { path: given(), source },
        })?;
        let names: Vec<_> = steps.iter().map(|it| &it.name[..]).collect();
        let resolved = OsString::from_vec([b"/", &names.join(&b'/')[..]].concat());
        let resolved = resolved.into_string().map_err(|_bytes| WorkingDirError::Name(given()))?;
        if is_too_long(&names, resolved.len()) {
            return Err(WorkingDirError::TooLong(given()));
        }
        let Some(last) = steps.last() else { return Ok(resolved) };
        match (&last.place, last.access) {
            (
                EntryPlace::Found(_, FileType::Directory, _)
                | EntryPlace::Empty
                | EntryPlace::Kernel,
                _,
            )
            | (EntryPlace::Absent, Access::Writable) => Ok(resolved),
            (EntryPlace::Found(..), _) => Err(WorkingDirError::NotDirectory(given())),
            (EntryPlace::Absent, Access::ReadOnly) => Err(WorkingDirError::ReadOnly(given())),
            (EntryPlace::InKernel, _) => Err(WorkingDirError::Kernel { path: given(), resolved }),
        }
    }

    /// Resolves paths to places where files can be mounted, in order. A path that ends with a slash is a directory,
    /// also in the result. If one of two places is a file and the other is below it, the later one of the two is
    /// [`FilePlace::Taken`].
    ///
    /// # Errors
    /// A kernel error that does not concern the path itself. Such an error may be temporary, so the place must not
    /// count as taken.
    pub(crate) fn places(&self, paths: &[&str]) -> Result<Vec<FilePlace>, Errno> {
        if let Some(errno) = self.unknown {
            return Err(errno);
        }
        let mut places: Vec<FilePlace> = Vec::new();
        for path in paths {
            let place = self.place(path)?;
            let clashes = places.iter().any(|it| clash(it, &place));
            places.push(if clashes { FilePlace::Taken } else { place });
        }
        Ok(places)
    }

    /// Resolves a path to a place for a file, or for a directory if the path ends with a slash.
    pub(crate) fn place(&self, path: &str) -> Result<FilePlace, Errno> {
        match path.strip_suffix('/') {
            Some(path) => self.directory_place(path),
            None => self.file_place(path.as_bytes()),
        }
    }

    /// Resolves a path to a place for a file. Files in mounts of the host are not replaced, so such places are taken.
    /// In a new file system of the container, the file can be created.
    pub(crate) fn file_place(&self, path: &[u8]) -> Result<FilePlace, Errno> {
        let steps = match self.walk(path) {
            Ok(steps) => steps,
            Err(errno) if is_about_path(errno) => return Ok(FilePlace::Taken),
            Err(errno) => return Err(errno),
        };
        let names: Vec<_> = steps.iter().map(|it| &it.name[..]).collect();
        let is_taken = self.mounts.iter().any(|it| {
            let at: Vec<_> = it.at.iter().map(|it| &it[..]).collect();
            let is_new = matches!(it.content, Content::Empty) && at.len() < names.len();
            names.starts_with(&at) && !is_new
        });
        let resolved = String::from_utf8([b"/", &names.join(&b'/')[..]].concat());
        let (false, Ok(resolved), Some(last)) = (is_taken, resolved, steps.last()) else {
            return Ok(FilePlace::Taken);
        };
        // Runtimes mount the kernel's file systems on these paths.
        if KERNELS.contains(&&*resolved) {
            return Ok(FilePlace::Taken);
        }
        // The kernel has not checked the names of missing files.
        if is_too_long(&names, resolved.len()) {
            return Ok(FilePlace::Taken);
        }
        Ok(match (&last.place, last.access) {
            (EntryPlace::Found(_, FileType::RegularFile, _), _)
            | (EntryPlace::Absent, Access::Writable) => FilePlace::At(resolved),
            (EntryPlace::Absent, Access::ReadOnly) => FilePlace::Absent(resolved),
            _ => FilePlace::Taken,
        })
    }

    /// Resolves a path to a place for a directory, in the format of [`places`](Self::places).
    fn directory_place(&self, path: &str) -> Result<FilePlace, Errno> {
        match self.target(path) {
            Err(errno) if is_about_path(errno) || errno == Errno::ILSEQ => Ok(FilePlace::Taken),
            Err(errno) => Err(errno),
            Ok(LinkTarget { state: TargetState::CannotBeMade, path, .. }) => {
                Ok(FilePlace::Absent(format!("{path}/")))
            }
            // If this is a file, the mount will fail.
            Ok(LinkTarget { path, .. }) => Ok(FilePlace::At(format!("{path}/"))),
        }
    }

    /// Looks up a program.
    pub(crate) fn executable(&self, path: &[u8]) -> Executable {
        let mut steps = match self.walk(path) {
            Ok(steps) => steps,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG) => {
                return Executable::Absent;
            }
            // For example, a user's FUSE mount denies access to all other users, including root.
            Err(_) => return Executable::Unknown,
        };
        match steps.pop().map(|it| it.place) {
            Some(EntryPlace::Found(_, FileType::RegularFile, mode))
                if mode.intersects(Mode::XUSR | Mode::XGRP | Mode::XOTH) =>
            {
                Executable::Yes
            }
            Some(EntryPlace::Absent | EntryPlace::InKernel) => Executable::Absent,
            _ => Executable::No,
        }
    }

    /// Returns the first `length` bytes of a regular file, or all bytes of a shorter one; `None` if it cannot be
    /// read.
    pub(crate) fn read_start(&self, path: &[u8], length: u64) -> Option<Vec<u8>> {
        let last = self.walk(path).ok()?.pop()?;
        let EntryPlace::Found(fd, FileType::RegularFile, _) = last.place else { return None };
        let file = std::fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Resolves a path to its steps without links; the root has no steps.
    fn walk(&self, path: &[u8]) -> Result<Vec<Step>, Errno> {
        let mut steps: Vec<Step> = Vec::new();
        // A stack of path components: the last element is resolved next.
        let mut pending = components(path);
        let mut links = 0;
        while let Some(name) = pending.pop() {
            if name == b".." {
                steps.pop();
                continue;
            }
            if let Some(mounted) = self.mount_at(&steps, &name)? {
                steps.push(mounted);
                continue;
            }
            let access = steps.last().map_or(self.access, |it| it.access);
            let named = match steps.last().map(|it| &it.place) {
                None => named(self.root, &name)?,
                Some(EntryPlace::Found(fd, ..)) => named(fd.as_fd(), &name)?,
                Some(EntryPlace::Empty | EntryPlace::Absent) => {
                    NamedEntry::Place(EntryPlace::Absent)
                }
                Some(EntryPlace::Kernel | EntryPlace::InKernel) => {
                    NamedEntry::Place(EntryPlace::InKernel)
                }
            };
            match named {
                NamedEntry::Place(place) => steps.push(Step { name, place, access }),
                NamedEntry::Link(target) => {
                    links += 1;
                    if links > LINKS {
                        return Err(Errno::LOOP);
                    }
                    if target.starts_with(b"/") {
                        steps.clear();
                    }
                    pending.extend(components(&target));
                }
            }
        }
        Ok(steps)
    }

    /// Returns the most recent mount at the path of `above` and `name`.
    fn mount_at(&self, above: &[Step], name: &[u8]) -> Result<Option<Step>, Errno> {
        let is_here = |mount: &&Mount| {
            let names = above.iter().map(|it| &it.name[..]).chain([name]);
            names.eq(mount.at.iter().map(|it| &it[..]))
        };
        let Some(mount) = self.mounts.iter().rev().find(is_here) else { return Ok(None) };
        let place = match &mount.content {
            Content::Host(fd) => found(rustix::io::fcntl_dupfd_cloexec(fd, 0)?)?,
            Content::Empty => EntryPlace::Empty,
            Content::Kernel => EntryPlace::Kernel,
        };
        Ok(Some(Step { name: name.to_owned(), place, access: mount.access }))
    }
}

/// Whether an error means that no process can ever reach a file by the path. `EACCES` is such an error, because a
/// user's FUSE mount may deny access to all other users.
const fn is_about_path(errno: Errno) -> bool {
    matches!(errno, Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::ACCESS)
}

/// Whether the kernel or a runtime would refuse a path with these names and this length in bytes.
fn is_too_long(names: &[&[u8]], bytes: usize) -> bool {
    names.iter().any(|it| it.len() > NAME_MAX) || bytes > PLACE_MAX
}

/// Whether two places exclude each other: one is below the other, which is a file, or both have the same path, but
/// only one of them is a directory.
fn clash(one: &FilePlace, other: &FilePlace) -> bool {
    let path = |place: &FilePlace| match place {
        FilePlace::At(path) | FilePlace::Absent(path) => Some(path.clone()),
        FilePlace::Taken => None,
    };
    let (Some(one), Some(other)) = (path(one), path(other)) else { return false };
    let is_below_file = |path: &str, file: &str| {
        path.strip_prefix(file).is_some_and(|it| it.starts_with('/')) && !file.ends_with('/')
    };
    is_below_file(&one, &other) || is_below_file(&other, &one)
}

/// Returns the names of a path, the first one last.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    let names = path.split(|byte| *byte == b'/');
    let names = names.filter(|it| !it.is_empty() && *it != b".");
    names.rev().map(<[u8]>::to_vec).collect()
}

fn found(fd: OwnedFd) -> Result<EntryPlace, Errno> {
    let stat = rustix::fs::fstat(&fd)?;
    let (kind, mode) = (FileType::from_raw_mode(stat.st_mode), Mode::from_raw_mode(stat.st_mode));
    Ok(EntryPlace::Found(fd, kind, mode))
}

fn named(directory: BorrowedFd<'_>, name: &[u8]) -> Result<NamedEntry, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(NamedEntry::Place(EntryPlace::Absent)),
        Err(errno) => return Err(errno),
    };
    match found(fd)? {
        EntryPlace::Found(fd, FileType::Symlink, _) => {
            Ok(NamedEntry::Link(rustix::fs::readlinkat(&fd, "", Vec::new())?.into_bytes()))
        }
        place => Ok(NamedEntry::Place(place)),
    }
}

/// Checks the working directory of an additional program in a running container. A missing directory is not created.
pub(crate) fn check_inside(root: BorrowedFd<'_>, path: &str) -> Result<(), WorkingDirError> {
    let given = || path.to_owned();
    if !path.starts_with('/') {
        return Err(WorkingDirError::Relative(given()));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    match kernel::files::open_resolved(root, path, flags, resolve) {
        Ok(_directory) => Ok(()),
        Err(Errno::NOENT) => Err(WorkingDirError::Absent(given())),
        Err(Errno::NOTDIR) => Err(WorkingDirError::NotDirectory(given())),
        Err(Errno::LOOP) => Err(WorkingDirError::Links(given())),
        Err(source) => Err(WorkingDirError::Look { path: given(), source }),
    }
}

#[cfg(test)]
mod tests;
