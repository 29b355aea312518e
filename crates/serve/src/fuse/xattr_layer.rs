//! Copies the few files of an image that have xattrs into a tmpfs. Then the kernel need not ask the server for xattrs
//! at each `exec`, each write, and for each file of `ls -l`.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use container::root::{name_below_overlay, set_below_overlay};
use image::erofs::read::{FileType, InodeXattrs, Nid, ReadError, ShownFile};
use kernel::mount::{Detached, MountError, TmpfsOptions};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use store::OperationError;

use super::open::StoreTree;

/// Largest number of names in the tmpfs. With more names, all files are served by FUSE.
const NAMES_MAX: usize = 256;

/// Largest total number of path components of the copied files, because each component may need a directory.
const DEPTH_MAX: usize = 4096;

/// Largest sum of file sizes, in bytes.
const BYTES_MAX: u64 = 16 << 20;

/// Why files were not copied into a tmpfs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApartError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The kernel refused to mount the tmpfs.
    #[error(transparent)]
    Mount(#[from] MountError),
}

/// A name of a file with xattrs.
struct Name {
    /// Path without a leading slash.
    path: Vec<u8>,
    file: ShownFile,
}

/// Moves the files of an image that have xattrs into a tmpfs, which becomes a layer below the served files. Every byte
/// is compared with its digest. Returns `None` if no file has xattrs, or if there are too many, or if a directory, a
/// symbolic link or a device has xattrs. In the last two cases, the tree keeps all files.
///
/// # Errors
/// On an error, the tree keeps all files.
pub fn set_apart(tree: &mut StoreTree, name: &str) -> Result<Option<Detached>, ApartError> {
    let made = make_apart(tree, name);
    // A server keeps only the descriptors that are passed to it, so the others are closed now.
    tree.data().close();
    made
}

fn make_apart(tree: &mut StoreTree, name: &str) -> Result<Option<Detached>, ApartError> {
    let Some(names) = files_with_xattrs(tree)? else { return Ok(None) };
    if names.is_empty() {
        tree.set_apart(BTreeSet::new());
        return Ok(None);
    }
    let options = TmpfsOptions { name, bytes: None, inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options)?;
    let mut first: HashMap<Nid, &[u8]> = HashMap::new();
    for Name { path, file } in &names {
        let object = made(path);
        let failed = OperationError::of("make", &object);
        let (directory, last) = directory(mount.as_fd(), path).map_err(failed)?;
        let nid = file.inode.nid();
        match first.get(&nid) {
            Some(other) => {
                let root = mount.as_fd();
                rustix::fs::linkat(root, *other, &directory, last, AtFlags::empty())
                    .map_err(failed)?;
            }
            None => {
                make(tree, directory.as_fd(), last, path, file)?;
                first.insert(nid, path);
            }
        }
    }
    tracing::info!(files = first.len(), "copied files with xattrs into memory");
    tree.set_apart(first.into_keys().collect());
    Ok(Some(mount))
}

/// Finds all names of files with xattrs. Returns `None` if they cannot be moved.
fn files_with_xattrs(tree: &StoreTree) -> Result<Option<Vec<Name>>, ApartError> {
    let (mut names, mut bytes, mut depth, mut is_apart) = (Vec::new(), 0_u64, 0_usize, true);
    let counts = |name: &[u8]| name_below_overlay(name).is_some();
    let read = tree.image().names_with_xattrs(counts, |found| {
        let file = found.file;
        bytes = bytes.saturating_add(if found.is_first { file.inode.size() } else { 0 });
        let is_file = match file.kind {
            FileType::Regular | FileType::Fifo | FileType::Socket => true,
            // These kinds cannot be moved. The entries of a directory would have to move with the directory. A
            // symbolic link is resolved among the served files. Users cannot create devices.
            FileType::Directory
            | FileType::Symlink
            | FileType::CharDevice
            | FileType::BlockDevice => false,
        };
        let path = found.path.strip_prefix(b"/").unwrap_or(found.path).to_vec();
        depth = depth.saturating_add(path.split(|it| *it == b'/').count());
        let is_few = names.len() < NAMES_MAX && depth <= DEPTH_MAX && bytes <= BYTES_MAX;
        is_apart = is_file && is_few;
        names.push(Name { path, file });
        is_apart
    });
    read.map_err(unread)?;
    Ok(Some(names).filter(|_| is_apart))
}

/// Opens the parent directory of a path and returns it with the last name. Creates missing directories; their
/// metadata does not matter, because the overlay shows those of the layer above.
fn directory<'p>(root: BorrowedFd<'_>, path: &'p [u8]) -> Result<(OwnedFd, &'p [u8]), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here = rustix::fs::openat(root, ".", flags, Mode::empty())?;
    let mut names = path.split(|it| *it == b'/').peekable();
    while let Some(name) = names.next() {
        if names.peek().is_none() {
            return Ok((here, name));
        }
        match rustix::fs::mkdirat(&here, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        here = rustix::fs::openat(&here, name, flags, Mode::empty())?;
    }
    Err(Errno::INVAL)
}

/// Creates a file with its data and metadata: owner, mode, xattrs and time, in this order, because each step may undo
/// a later one.
fn make(
    tree: &StoreTree,
    directory: BorrowedFd<'_>,
    name: &[u8],
    path: &[u8],
    file: &ShownFile,
) -> Result<(), ApartError> {
    let ShownFile { inode, kind } = file;
    let object = made(path);
    let failed = OperationError::of("make", &object);
    let mode = Mode::from_raw_mode((inode.mode() & 0o7777).into());
    let node = |kind| rustix::fs::mknodat(directory, name, kind, Mode::RUSR, 0);
    match kind {
        FileType::Regular => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let made = rustix::fs::openat(directory, name, flags, Mode::RUSR).map_err(failed)?;
            let bytes = tree.whole(inode);
            let object = format_args!("{}", path.escape_ascii());
            let bytes = bytes.map_err(OperationError::of("read", object))?;
            let mut left = &*bytes;
            while !left.is_empty() {
                let written = rustix::io::write(&made, left).map_err(failed)?;
                left = left.get(written..).unwrap_or_default();
            }
        }
        FileType::Fifo => node(rustix::fs::FileType::Fifo).map_err(failed)?,
        FileType::Socket => node(rustix::fs::FileType::Socket).map_err(failed)?,
        FileType::Directory | FileType::Symlink | FileType::CharDevice | FileType::BlockDevice => {
            return Err(failed(Errno::INVAL).into());
        }
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(directory, name, flags, Mode::empty()).map_err(failed)?;
    let (user, group) = tree.owner(inode);
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    let here = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::chownat(&made, "", Some(user), Some(group), here).map_err(failed)?;
    rustix::fs::chmodat(directory, name, mode, AtFlags::empty()).map_err(failed)?;
    let mut refused = Ok(());
    let read = tree.image().xattrs(inode, &mut InodeXattrs::new(), |name, value| {
        if refused.is_ok() {
            refused = set_below_overlay(made.as_fd(), name, &tree.value(name, value));
        }
    });
    read.map_err(unread)?;
    refused.map_err(failed)?;
    let changed = inode.mtime();
    let time = Timespec { tv_sec: changed.seconds, tv_nsec: changed.nanoseconds.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    let set = rustix::fs::utimensat(directory, name, &times, AtFlags::SYMLINK_NOFOLLOW);
    Ok(set.map_err(failed)?)
}

/// Names a new file for messages.
fn made(path: &[u8]) -> String {
    format!("{} in memory", path.escape_ascii())
}

fn unread(error: ReadError) -> OperationError {
    OperationError::of("read", "the image")(error)
}
