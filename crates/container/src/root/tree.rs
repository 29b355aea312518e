//! The tree of an image made anew in memory, where the kernel mounts no EROFS: in a user namespace.
//!
//! Directories, links and small files are there. Of all other files there are stubs, which lead an overlay with `userxattr`
//! to the objects. Nothing that an image says reaches a parser of the kernel: names, modes and xattrs go there one by one.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use image::erofs::read::{Cached, Image, Owners, View, to_tree};
use image::tree::{Content, Inode, InodeId, Location, Node, Timestamp};
use image::verity::ObjectId;
use kernel::mount::{Detached, MountError, TmpfsOptions};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use store::OpenImage;

use crate::bundle::userns::OwnIds;

/// What overlayfs keeps in the place of `trusted.overlay.` where it is mounted with `userxattr`. Source: Linux
/// `Documentation/filesystems/overlayfs.rst`, "Permission model" and "Metadata only copy up".
const OVERLAY: &str = "user.overlay.";

/// A tree that cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// The image is not sound.
    #[error("cannot read the image")]
    Image(#[from] Box<image::erofs::read::ReadError>),
    /// The kernel refused a mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A file cannot be made.
    #[error("cannot make {path} in memory")]
    File {
        /// Its path, without a slash before it.
        path: String,
        /// The kernel's answer.
        source: Errno,
    },
    /// A file's bytes are at no place that the store has.
    #[error("{0} has no object")]
    Place(String),
}

impl TreeError {
    /// Whether there is no memory, or no inode, left for it.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::File { source: Errno::NOSPC | Errno::NOMEM, .. })
    }
}

/// A tree, and what it lacks.
#[derive(Debug)]
pub(crate) struct StubTree {
    pub(crate) mount: Detached,
    /// Device nodes, which no user may make.
    pub(crate) devices: u64,
}

/// Makes the tree of an image whose data are objects.
///
/// # Errors
/// [`TreeError`]; then nothing is left mounted.
pub(crate) fn make(image: &OpenImage, name: &str, ids: &OwnIds) -> Result<StubTree, TreeError> {
    let erofs = Image::open(Cached::new(&image.image)).map_err(Box::new)?;
    let tree = to_tree(&erofs, View::Composefs(Owners::FirstMet)).map_err(Box::new)?.tree;
    let options = TmpfsOptions { name, bytes: None, inodes: None, mode: 0o700 };
    let mount = kernel::mount::tmpfs(&options)?;
    let top = open_directory(mount.as_fd(), b".").map_err(failed(b""))?;
    let mut maker = Maker { ids, root: top.as_fd(), linked: HashMap::new(), devices: 0 };
    maker.directory(top.as_fd(), tree.root(), &mut Vec::new())?;
    let devices = maker.devices;
    Ok(StubTree { mount, devices })
}

struct Maker<'a> {
    ids: &'a OwnIds,
    root: BorrowedFd<'a>,
    /// The first paths of files with several names.
    linked: HashMap<InodeId, Vec<u8>>,
    devices: u64,
}

impl Maker<'_> {
    /// Fills a directory that is there, and gives it its metadata. `path` is its own.
    fn directory(
        &mut self,
        directory: BorrowedFd<'_>,
        inode: Inode<'_>,
        path: &mut Vec<u8>,
    ) -> Result<(), TreeError> {
        for entry in inode.children() {
            let length = path.len();
            if length > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(entry.name);
            self.entry(directory, entry.name, entry.inode, path)?;
            path.truncate(length);
        }
        self.describe(directory, inode, path)
    }

    fn entry(
        &mut self,
        directory: BorrowedFd<'_>,
        name: &[u8],
        inode: Inode<'_>,
        path: &mut Vec<u8>,
    ) -> Result<(), TreeError> {
        if !inode.is_directory() && inode.nlink() > 1 {
            if let Some(first) = self.linked.get(&inode.id()) {
                let flags = AtFlags::empty();
                return rustix::fs::linkat(self.root, &**first, directory, name, flags)
                    .map_err(failed(path));
            }
            self.linked.insert(inode.id(), path.clone());
        }
        let make = |kind| rustix::fs::mknodat(directory, name, kind, Mode::RUSR, 0);
        match inode.node() {
            Node::Directory => {
                rustix::fs::mkdirat(directory, name, Mode::RWXU).map_err(failed(path))?;
                let made = open_directory(directory, name).map_err(failed(path))?;
                return self.directory(made.as_fd(), inode, path);
            }
            Node::Regular(content) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR);
                let file = file.map_err(failed(path))?;
                fill(&file, content, path)?;
                return self.describe(file.as_fd(), inode, path);
            }
            Node::Symlink(target) => rustix::fs::symlinkat(target, directory, name),
            Node::Fifo => make(FileType::Fifo),
            Node::Socket => make(FileType::Socket),
            Node::CharDevice(_) | Node::BlockDevice(_) => {
                self.devices += 1;
                self.linked.remove(&inode.id());
                return Ok(());
            }
        }
        .map_err(failed(path))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(directory, name, flags, Mode::empty());
        self.describe(made.map_err(failed(path))?.as_fd(), inode, path)
    }

    /// Gives a file its owner, mode, xattrs and time, in this order: each may change the one before.
    fn describe(
        &self,
        file: BorrowedFd<'_>,
        inode: Inode<'_>,
        path: &[u8],
    ) -> Result<(), TreeError> {
        let of_file = inode.metadata();
        let owner = (self.ids.user(of_file.uid), self.ids.group(of_file.gid));
        let here = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        // Whoever makes it is root here.
        if owner != (0, 0) {
            let (user, group) = (Uid::from_raw(owner.0), Gid::from_raw(owner.1));
            rustix::fs::chownat(file, c"", Some(user), Some(group), here).map_err(failed(path))?;
        }
        // A path that leads to this very file, where it is open by its place only.
        let own = || format!("/proc/thread-self/fd/{}", file.as_raw_fd());
        let mode = Mode::from_raw_mode(of_file.permissions.into());
        match inode.node() {
            Node::Symlink(_) => Ok(()),
            Node::Directory | Node::Regular(_) => rustix::fs::fchmod(file, mode),
            _ => rustix::fs::chmod(own(), mode),
        }
        .map_err(failed(path))?;
        for (name, value) in inode.xattrs() {
            let Some(name) = shown(name) else { continue };
            match rustix::fs::setxattr(own(), &*name, value, XattrFlags::empty()) {
                // Other file systems refuse them as well: those of a link, and of security modules that are not there.
                Err(Errno::OPNOTSUPP | Errno::PERM) => {
                    let name = String::from_utf8_lossy(&name);
                    tracing::debug!(path = %shown_path(path), %name, "it has no such xattr here");
                }
                done => done.map_err(failed(path))?,
            }
        }
        let time = time(of_file.mtime);
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(file, c"", &times, here).map_err(failed(path))
    }
}

/// Writes a small file, or has the overlay look for its bytes elsewhere.
fn fill(file: &OwnedFd, content: Content<'_>, path: &[u8]) -> Result<(), TreeError> {
    let set = |name: &str, value: &[u8]| {
        let name = format!("{OVERLAY}{name}");
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
            let place = match (location, &object) {
                (Location::Object, Some(object)) => object.path(),
                // Only objects are of this store.
                _ => return Err(TreeError::Place(shown_path(path))),
            };
            rustix::fs::ftruncate(file, size).map_err(failed(path))?;
            set("redirect", format!("/{place}").as_bytes())?;
            set("metacopy", &object.map(|it| metacopy(&it)).unwrap_or_default())
        }
    }
}

/// The digest that overlayfs compares with an object's. Source: Linux `fs/overlayfs/overlayfs.h`, `struct ovl_metacopy`.
fn metacopy(object: &ObjectId) -> Vec<u8> {
    let digest = object.as_bytes();
    let length = u8::try_from(4 + digest.len()).unwrap_or(u8::MAX);
    [&[0, length, 0, object.algorithm().kernel_id()], digest].concat()
}

/// The name of an image's xattr in the tree: none for those that only root's overlays have. An overlay takes those with its
/// own prefix for its own, but for what begins with it twice.
fn shown(name: &[u8]) -> Option<Vec<u8>> {
    if name.starts_with(b"trusted.") {
        return None;
    }
    Some(match name.strip_prefix(OVERLAY.as_bytes()) {
        Some(rest) => [OVERLAY.as_bytes(), b"overlay.", rest].concat(),
        None => name.to_vec(),
    })
}

const fn time(time: Timestamp) -> Timespec {
    Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds as _ }
}

fn open_directory(above: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(above, name, flags, Mode::empty())
}

fn failed(path: &[u8]) -> impl Fn(Errno) -> TreeError {
    move |source| TreeError::File { path: shown_path(path), source }
}

fn shown_path(path: &[u8]) -> String {
    path.escape_ascii().to_string()
}
