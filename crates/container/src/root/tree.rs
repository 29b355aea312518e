//! Rebuilds the tree of an image in memory, for user namespaces, in which the kernel does not mount EROFS.
//!
//! The tree contains directories, links and small files. All other files are stubs, which redirect an overlay with
//! `userxattr` to the objects. The kernel does not parse any bytes of the image: names, modes and xattrs are set one
//! by one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use image::erofs::read::{Cached, Image, Owners, View, to_tree};
use image::tree::{
    Content, Inode, InodeId, Location, Node, Timestamp, XATTR_NAME_MAX, is_users_xattr,
};
use image::verity::ObjectId;
use kernel::mount::{Detached, MountError, TmpfsOptions};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use store::{CheckedError, CheckedFile, OpenImage};

use crate::bundle::userns::OwnIds;
use crate::root::acl::acl_for_ids;

/// Prefix that overlayfs uses instead of `trusted.overlay.` if it is mounted with `userxattr`. Source: Linux
/// `Documentation/filesystems/overlayfs.rst`, "Permission model" and "Metadata only copy up".
const OVERLAY: &str = "user.overlay.";

/// Reason why a tree cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeRootError {
    /// The image's bytes do not match its id, or cannot be read.
    #[error("cannot use the image")]
    Damaged(#[from] CheckedError),
    /// The image's descriptor cannot be duplicated.
    #[error("cannot open the image")]
    Open(#[source] std::io::Error),
    /// The image is malformed.
    #[error("cannot read the image")]
    Image(#[from] Box<image::erofs::read::ReadError>),
    /// The kernel refused a mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A file cannot be created.
    #[error("cannot make {path} in memory")]
    File {
        /// Path without a leading slash.
        path: String,
        source: Errno,
    },
    /// The data of a file is not in the store.
    #[error("{0} has no object id")]
    Place(String),
}

/// A tree, and the number of entries that it lacks.
#[derive(Debug)]
pub(crate) struct StubTree {
    pub(crate) mount: Detached,
    /// Number of device nodes, which users may not create.
    pub(crate) devices: u64,
}

/// Makes the tree of an image whose data is in objects.
///
/// # Errors
/// [`TreeRootError`]; the mount is then removed.
pub(crate) fn make(image: &OpenImage, name: &str, ids: &OwnIds) -> Result<StubTree, TreeRootError> {
    let file = image.image.fd().try_clone_to_owned().map_err(TreeRootError::Open)?;
    let checked = CheckedFile::new(file.into(), *image.id.digest(), image.image.size())?;
    let erofs = Image::open(Cached::new(&checked)).map_err(Box::new)?;
    let tree = to_tree(&erofs, View::Composefs(Owners::FirstMet)).map_err(Box::new)?.tree;
    let options = TmpfsOptions { name, bytes: None, inodes: None, mode: 0o700 };
    let mount = kernel::mount::tmpfs(&options)?;
    let top = open_directory(mount.as_fd(), b".").map_err(failed(b""))?;
    let maker = Maker { ids, root: top.as_fd(), state: Mutex::default(), changed: Condvar::new() };
    // Files are created with their final modes, so the umask is cleared. Other threads create no files at the same
    // time.
    let mask = rustix::process::umask(Mode::empty());
    let filled = maker.fill(Directory { inode: tree.root(), path: Vec::new() });
    rustix::process::umask(mask);
    filled?;
    let state = maker.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(StubTree { mount, devices: state.devices })
}

/// Maximum number of threads. More would wait for each other in the kernel.
const THREADS_MAX: usize = 4;

/// When a name is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CreationTime {
    Now,
    /// After all files were created.
    Later,
}

/// A directory that was created and is not filled yet. It is not kept open, because there may be more directories than
/// a process may open files.
struct Directory<'t> {
    inode: Inode<'t>,
    /// Path from the root, without a leading slash. All of its components are directories that were created by this
    /// process.
    path: Vec<u8>,
}

struct Maker<'a, 't> {
    ids: &'a OwnIds,
    root: BorrowedFd<'a>,
    state: Mutex<State<'t>>,
    /// Notified when a directory is added, or when no more will be.
    changed: Condvar,
}

#[derive(Default)]
struct State<'t> {
    /// Directories that no thread has taken yet. The last one is taken first, so that few directories wait.
    waiting: Vec<Directory<'t>>,
    at_work: usize,
    failed: Option<TreeRootError>,
    /// First paths of files with several names.
    linked: HashMap<InodeId, Vec<u8>>,
    /// Other paths, each with its file. They are created after all files.
    links: Vec<(Vec<u8>, InodeId)>,
    /// Directories whose times must be set again, with their paths.
    touched: Vec<(Vec<u8>, Timestamp)>,
    devices: u64,
}

impl<'t> Maker<'_, 't> {
    fn lock(&self) -> MutexGuard<'_, State<'t>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills the root and everything below it, one directory at a time, with several threads.
    fn fill(&self, root: Directory<'t>) -> Result<(), TreeRootError> {
        self.lock().waiting.push(root);
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        std::thread::scope(|scope| {
            for _ in 1..threads.min(THREADS_MAX) {
                // If a thread cannot be started, this is ignored, because fewer threads only take longer.
                let _handle = std::thread::Builder::new().spawn_scoped(scope, || self.work());
            }
            self.work();
        });
        let mut state = self.lock();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        for (path, inode) in &state.links {
            let Some(first) = state.linked.get(inode) else { continue };
            rustix::fs::linkat(self.root, &**first, self.root, &**path, AtFlags::empty())
                .map_err(failed(path))?;
        }
        for (path, changed) in &state.touched {
            set_time(self.root, from_root(path), *changed).map_err(failed(path))?;
        }
        Ok(())
    }

    /// Takes directories until there are none left, or until one cannot be filled.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            let is_over = state.failed.is_some() || state.waiting.is_empty() && state.at_work == 0;
            if is_over {
                self.changed.notify_all();
                return;
            }
            let Some(directory) = state.waiting.pop() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.at_work += 1;
            drop(state);
            let filled = self.directory(directory);
            state = self.lock();
            state.at_work -= 1;
            if let Err(error) = filled {
                state.failed.get_or_insert(error);
            }
        }
    }

    /// Creates the entries of a directory, and sets its metadata.
    fn directory(&self, directory: Directory<'t>) -> Result<(), TreeRootError> {
        let Directory { inode, mut path } = directory;
        let fd = open_directory(self.root, from_root(&path)).map_err(failed(&path))?;
        let (mut below, mut is_touched) = (Vec::new(), false);
        for entry in inode.children() {
            let length = path.len();
            if length > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(entry.name);
            if entry.inode.is_directory() {
                rustix::fs::mkdirat(&fd, entry.name, Mode::RWXU).map_err(failed(&path))?;
                below.push(Directory { inode: entry.inode, path: path.clone() });
            } else {
                let made = self.entry(fd.as_fd(), entry.name, entry.inode, &path)?;
                is_touched |= made == CreationTime::Later;
            }
            path.truncate(length);
        }
        self.describe(fd.as_fd(), inode, &path)?;
        if is_touched || !below.is_empty() {
            let mut state = self.lock();
            state.waiting.append(&mut below);
            if is_touched {
                state.touched.push((path, inode.metadata().mtime));
            }
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Whether the file exists by another name, or will exist. Then this name is created later.
    fn is_linked(&self, inode: Inode<'t>, path: &[u8]) -> bool {
        if inode.nlink() < 2 {
            return false;
        }
        let mut state = self.lock();
        let is_known = state.linked.contains_key(&inode.id());
        if is_known {
            state.links.push((path.to_vec(), inode.id()));
        } else {
            state.linked.insert(inode.id(), path.to_vec());
        }
        is_known
    }

    /// Creates a file that is not a directory.
    fn entry(
        &self,
        directory: BorrowedFd<'_>,
        name: &[u8],
        inode: Inode<'t>,
        path: &[u8],
    ) -> Result<CreationTime, TreeRootError> {
        if matches!(inode.node(), Node::CharDevice(_) | Node::BlockDevice(_)) {
            self.lock().devices += 1;
            return Ok(CreationTime::Now);
        }
        if self.is_linked(inode, path) {
            return Ok(CreationTime::Later);
        }
        let mode = Mode::from_raw_mode(inode.metadata().permissions.into());
        let make = |kind| rustix::fs::mknodat(directory, name, kind, mode, 0);
        match inode.node() {
            Node::Regular(content) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = rustix::fs::openat(directory, name, flags, mode);
                let file = file.map_err(failed(path))?;
                fill(&file, content, path)?;
                return self.describe(file.as_fd(), inode, path).map(|()| CreationTime::Now);
            }
            Node::Symlink(target) => rustix::fs::symlinkat(target, directory, name),
            Node::Socket => make(FileType::Socket),
            _ => make(FileType::Fifo),
        }
        .map_err(failed(path))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(directory, name, flags, Mode::empty());
        let made = made.map_err(failed(path))?;
        self.describe(made.as_fd(), inode, path).map(|()| CreationTime::Now)
    }

    /// Sets a file's owner, mode, xattrs and time, in this order, because each may change the previous one.
    fn describe(
        &self,
        file: BorrowedFd<'_>,
        inode: Inode<'_>,
        path: &[u8],
    ) -> Result<(), TreeRootError> {
        let of_file = inode.metadata();
        let owner = (self.ids.user(of_file.uid), self.ids.group(of_file.gid));
        let here = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        // This process is root in the namespace, so it owns new files.
        let is_others = owner != (0, 0);
        if is_others {
            let (user, group) = (Uid::from_raw(owner.0), Gid::from_raw(owner.1));
            rustix::fs::chownat(file, c"", Some(user), Some(group), here).map_err(failed(path))?;
        }
        let mode = Mode::from_raw_mode(of_file.permissions.into());
        let is_special = of_file.permissions & 0o6000 != 0;
        match inode.node() {
            Node::Symlink(_) => Ok(()),
            Node::Directory => rustix::fs::fchmod(file, mode),
            // The file was created with its mode, but a change of the owner and writes clear the set-id bits.
            Node::Regular(_) if is_special => rustix::fs::fchmod(file, mode),
            _ if is_others && is_special => rustix::fs::chmod(place(file), mode),
            _ => Ok(()),
        }
        .map_err(failed(path))?;
        for (name, value) in inode.xattrs() {
            let value = acl_for_ids(name, value, self.ids);
            set_below_overlay(file, name, &value).map_err(failed(path))?;
        }
        set_time(file, b"", of_file.mtime).map_err(failed(path))
    }
}

/// Returns a path to exactly this file, which may be open with `O_PATH`.
fn place(file: BorrowedFd<'_>) -> String {
    format!("/proc/thread-self/fd/{}", file.as_raw_fd())
}

/// Sets an xattr of an image on a file, if possible, by [its name below an overlay](name_below_overlay).
pub fn set_below_overlay(file: BorrowedFd<'_>, name: &[u8], value: &[u8]) -> Result<(), Errno> {
    let Some(name) = name_below_overlay(name) else { return Ok(()) };
    match rustix::fs::setxattr(place(file), &*name, value, XattrFlags::empty()) {
        // Other file systems also refuse these xattrs, for example `user.` xattrs of a symlink.
        Err(Errno::OPNOTSUPP | Errno::PERM) => {
            let name = String::from_utf8_lossy(&name);
            tracing::debug!(%name, "the file system does not support an xattr of a file");
            Ok(())
        }
        done => done,
    }
}

/// Returns a path for system calls; the root is `.`.
fn from_root(path: &[u8]) -> &[u8] {
    if path.is_empty() { b"." } else { path }
}

/// Sets a file's time: that of the path below a directory, or that of the open file itself.
fn set_time(directory: BorrowedFd<'_>, path: &[u8], time: Timestamp) -> Result<(), Errno> {
    let time = Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(directory, path, &times, flags)
}

/// Writes a small file, or makes the overlay read its data from an object.
fn fill(file: &OwnedFd, content: Content<'_>, path: &[u8]) -> Result<(), TreeRootError> {
    let set = |name: &str, value: &[u8]| {
        rustix::fs::fsetxattr(file, name, value, XattrFlags::CREATE).map_err(failed(path))
    };
    match content {
        Content::Inline(bytes) => {
            let mut left = bytes;
            while !left.is_empty() {
                let written = rustix::io::write(file, left).map_err(failed(path))?;
                left = &left[written..];
            }
            Ok(())
        }
        Content::External { size, object, location } => {
            // Only objects are in this store.
            let (Location::Object, Some(object)) = (location, object) else {
                return Err(TreeRootError::Place(shown_path(path)));
            };
            rustix::fs::ftruncate(file, size).map_err(failed(path))?;
            [OverlayMark::Redirect, OverlayMark::Metacopy]
                .iter()
                .try_for_each(|mark| set(mark.name(), &mark.of(&object)))
        }
    }
}

/// An xattr by which an overlay with `userxattr` finds the data of a file in an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayMark {
    /// The path of the object in the data-only layers.
    Redirect,
    /// The digest of the object, which the overlay compares if the object has fs-verity.
    Metacopy,
}

impl OverlayMark {
    /// Returns the mark whose xattr has this name.
    #[must_use]
    pub fn from_name(name: &[u8]) -> Option<Self> {
        [Self::Redirect, Self::Metacopy].into_iter().find(|it| it.name().as_bytes() == name)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Redirect => "user.overlay.redirect",
            Self::Metacopy => "user.overlay.metacopy",
        }
    }

    /// Returns the value of the mark on a file whose data is in this object.
    #[must_use]
    pub fn of(self, object: &ObjectId) -> Vec<u8> {
        match self {
            Self::Redirect => format!("/{}", object.path()).into_bytes(),
            Self::Metacopy => metacopy(object),
        }
    }
}

/// Returns the digest that overlayfs compares with an object's. Source: Linux `fs/overlayfs/overlayfs.h`, `struct
/// ovl_metacopy`.
fn metacopy(object: &ObjectId) -> Vec<u8> {
    let digest = object.as_bytes();
    let length = u8::try_from(4 + digest.len()).unwrap_or(u8::MAX);
    [&[0, length, 0, object.algorithm().kernel_id()], digest].concat()
}

/// Returns the name of an image's xattr below an overlay of a user namespace. `None` for xattrs that only the host's
/// root may set: when a file is changed, an overlay copies its xattrs to the writable layer, and if the kernel refuses
/// one of `security.`, it refuses the change. An overlay interprets xattrs with its prefix, unless they have the prefix
/// twice. `None` also for a name that is too long for that: the overlay could not request it.
#[must_use]
pub fn name_below_overlay(name: &[u8]) -> Option<Cow<'_, [u8]>> {
    if !is_users_xattr(name) {
        return None;
    }
    let Some(rest) = name.strip_prefix(OVERLAY.as_bytes()) else { return Some(name.into()) };
    let escaped = [OVERLAY.as_bytes(), b"overlay.", rest].concat();
    (escaped.len() <= XATTR_NAME_MAX).then_some(Cow::Owned(escaped))
}

fn open_directory(above: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(above, name, flags, Mode::empty())
}

fn failed(path: &[u8]) -> impl Fn(Errno) -> TreeRootError {
    move |source| TreeRootError::File { path: shown_path(path), source }
}

fn shown_path(path: &[u8]) -> String {
    path.escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The length is limited by Linux `XATTR_NAME_MAX`, 255, and the escape has eight bytes.
    #[test]
    fn names_below_an_overlay() {
        let check = |name: &str, expect: Option<&str>| {
            let found = name_below_overlay(name.as_bytes());
            assert_eq!(found.as_deref(), expect.map(str::as_bytes), "{name}");
        };
        for name in ["user.a", "user.overlay", "security.capability", "system.posix_acl_access"] {
            check(name, Some(name));
        }
        check("user.overlay.redirect", Some("user.overlay.overlay.redirect"));
        check("user.overlay.overlay.x", Some("user.overlay.overlay.overlay.x"));
        for name in ["trusted.overlay.redirect", "trusted.a", "security.selinux", "security.ima"] {
            check(name, None);
        }
        let long = |length: usize| format!("user.overlay.{}", "x".repeat(length - 13));
        check(&long(247), Some(&format!("user.overlay.overlay.{}", "x".repeat(234))));
        check(&long(248), None);
        check(&long(255), None);
        let plain = format!("user.{}", "x".repeat(250));
        check(&plain, Some(&plain));
    }
}
