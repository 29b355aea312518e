//! The walk: one thread traverses directories, other threads read files.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use image::tree::{
    Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp, Tree, TreeError, XattrsId,
};
use image::verity::ObjectId;
use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::operation::OperationError;

use super::source::{FileReader, FileStamp, stat};
use super::{Devices, Hardlinks, KeptXattrs, Options, PutError, Times, WalkError};

/// Maximum bytes of a list of xattr names, and of a value. Source: Linux `XATTR_LIST_MAX`, `XATTR_SIZE_MAX`.
const XATTR_BUFFER: usize = 65536;

type Put<'a> = &'a (dyn Fn(&mut FileReader<'_>) -> Result<ObjectId, PutError> + Sync);

/// A regular file that waits to be read.
struct Job {
    file: File,
    seen: FileStamp,
    inode: InodeId,
    path: PathBuf,
}

type Done = Result<(InodeId, ObjectId), WalkError>;

pub(super) fn scan(
    directory: BorrowedFd<'_>,
    path: &Path,
    options: &Options,
    put: Put<'_>,
) -> Result<Tree, WalkError> {
    let threads = options.threads.get();
    // The queue is bounded, because each waiting file is an open descriptor.
    let (jobs, waiting) = mpsc::sync_channel::<Job>(threads.saturating_mul(4).min(256));
    let (report, done) = mpsc::channel::<Done>();
    // The threads share ownership of the receiver, so that `send` fails instead of blocking forever if all of them
    // panic.
    let waiting = Arc::new(Mutex::new(waiting));
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (waiting, report, stopped) = (Arc::clone(&waiting), report.clone(), &stopped);
            scope.spawn(move || work(&waiting, &report, stopped, put));
        }
        drop((waiting, report));
        let walker = Walker {
            options,
            builder: Builder::new(),
            jobs,
            done,
            links: HashMap::new(),
            path: path.as_os_str().as_bytes().to_vec(),
            names: Vec::new(),
            value: Vec::new(),
        };
        let tree = walker.walk(directory);
        stopped.store(true, Ordering::Relaxed);
        tree
    })
}

/// Reads files until there are no more, or the walk has ended.
fn work(
    waiting: &Mutex<mpsc::Receiver<Job>>,
    report: &mpsc::Sender<Done>,
    stopped: &AtomicBool,
    put: Put<'_>,
) {
    let mut buffer = Vec::new();
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        if stopped.load(Ordering::Relaxed) {
            return;
        }
        if report.send(read(job, &mut buffer, put)).is_err() {
            return;
        }
    }
}

fn read(job: Job, buffer: &mut Vec<u8>, put: Put<'_>) -> Done {
    let Job { file, seen, inode, path } = job;
    let mut source = FileReader { file: &file, seen, buffer };
    let answer = put(&mut source);
    match (source.is_unchanged(), answer) {
        (Err(error), _) => Err(OperationError::at("examine", &path)(error).into()),
        (Ok(false), _) => Err(WalkError::Changed(path)),
        (Ok(true), Ok(object)) => Ok((inode, object)),
        (Ok(true), Err(error)) => Err(OperationError::at("store", &path)(error).into()),
    }
}

struct Walker<'a> {
    options: &'a Options,
    builder: Builder,
    jobs: mpsc::SyncSender<Job>,
    done: mpsc::Receiver<Done>,
    /// Inodes of files with several names, by device and inode number.
    links: HashMap<(u32, u32, u64), InodeId>,
    /// Path of the current entry, for messages.
    path: Vec<u8>,
    names: Vec<u8>,
    value: Vec<u8>,
}

/// A directory that is being walked.
struct Level {
    directory: Dir,
    seen: FileStamp,
    inode: InodeId,
    /// Remaining entries, in reverse order.
    left: Vec<(CString, FileType)>,
    /// Length of the directory's path in `path`.
    length: usize,
}

impl Walker<'_> {
    fn walk(mut self, root: BorrowedFd<'_>) -> Result<Tree, WalkError> {
        let root = rustix::fs::openat(root, c".", directory_flags(), Mode::empty());
        let root = root.map_err(|error| self.io("open", error))?;
        let seen = stat(&root).map_err(|error| self.io("examine", error))?;
        let xattrs = self.xattrs(root.as_fd(), Through::Descriptor)?;
        let metadata = self.metadata(&seen);
        let described = self.builder.describe(InodeId::ROOT, &metadata, xattrs);
        described.map_err(|error| self.misfit(error))?;
        let mut levels = vec![self.list(root, &seen, InodeId::ROOT)?];
        while let Some(level) = levels.last_mut() {
            self.path.truncate(level.length);
            let Some((name, kind)) = level.left.pop() else {
                let now = level.directory.fd().and_then(|it| Ok(FileStamp::from_stat(&stat(it)?)));
                if now.map_err(|error| self.io("examine", error))? != level.seen {
                    return Err(self.changed());
                }
                levels.pop();
                continue;
            };
            if self.path.last() != Some(&b'/') {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(name.to_bytes());
            let directory = level.directory.fd().map_err(|error| self.io("open", error))?;
            if let Some(below) = self.entry(directory, level.inode, &name, kind)? {
                levels.push(below);
            }
            while let Ok(done) = self.done.try_recv() {
                self.settle(done)?;
            }
        }
        let path = self.path();
        let Self { mut builder, jobs, done, .. } = self;
        drop(jobs);
        for done in done {
            let (inode, object) = done?;
            let set = builder.set_object(inode, &object);
            set.map_err(|error| misfit(&path, error))?;
        }
        Ok(builder.finish())
    }

    fn settle(&mut self, done: Done) -> Result<(), WalkError> {
        let (inode, object) = done?;
        self.builder.set_object(inode, &object).map_err(|error| self.misfit(error))
    }

    /// Adds one entry to the tree. If it is a directory, returns it to be walked next.
    fn entry(
        &mut self,
        directory: BorrowedFd<'_>,
        parent: InodeId,
        name: &CStr,
        kind: FileType,
    ) -> Result<Option<Level>, WalkError> {
        let kind = match kind {
            FileType::Unknown => {
                let stat = rustix::fs::statx(
                    directory,
                    name,
                    AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT,
                    StatxFlags::TYPE,
                );
                FileType::from_raw_mode(
                    stat.map_err(|error| self.io("examine", error))?.stx_mode.into(),
                )
            }
            kind => kind,
        };
        let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
        if is_device && self.options.devices == Devices::Skip {
            return Ok(None);
        }
        let flags = match kind {
            FileType::Directory => directory_flags(),
            // `NONBLOCK`, because a FIFO that has replaced the file would block the open.
            FileType::RegularFile => OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY,
            _ => OFlags::PATH,
        };
        let opened = rustix::fs::openat(
            directory,
            name,
            flags | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let opened = opened.map_err(|error| match error {
            // The entry was listed a moment ago, and was not a symlink.
            Errno::NOENT | Errno::LOOP | Errno::NOTDIR => self.changed(),
            error => self.io("open", error),
        })?;
        let seen = stat(&opened).map_err(|error| self.io("examine", error))?;
        if FileType::from_raw_mode(seen.stx_mode.into()) != kind {
            return Err(self.changed());
        }
        match kind {
            FileType::Directory => {
                let inode = self.add(&opened, &seen, Node::Directory, Through::Descriptor)?;
                self.name(parent, name, inode)?;
                self.list(opened, &seen, inode).map(Some)
            }
            FileType::RegularFile => self.regular(File::from(opened), &seen, parent, name),
            _ => self.special(&opened, &seen, parent, name),
        }
    }

    fn regular(
        &mut self,
        file: File,
        stat: &Statx,
        parent: InodeId,
        name: &CStr,
    ) -> Result<Option<Level>, WalkError> {
        if let Some(inode) = self.linked(stat) {
            return self.name(parent, name, inode).map(|()| None);
        }
        let size = stat.stx_size;
        let seen = FileStamp::from_stat(stat);
        if size <= self.options.inline_max {
            let mut bytes = Vec::new();
            let mut source = FileReader { file: &file, seen, buffer: &mut self.value };
            let read = source.read(|piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            });
            let unchanged = source.is_unchanged().map_err(|error| self.io("examine", error))?;
            if !unchanged {
                return Err(self.changed());
            }
            read.map_err(|error| self.io("read", error))?;
            let node = Node::Regular(Content::Inline(&bytes));
            let inode = self.add(&file, stat, node, Through::Descriptor)?;
            return self.name(parent, name, inode).map(|()| None);
        }
        // The thread that reads the file reports the object.
        let content = Content::External { size, object: None, location: Location::None };
        let inode = self.add(&file, stat, Node::Regular(content), Through::Descriptor)?;
        self.name(parent, name, inode)?;
        let job = Job { file, seen, inode, path: self.path() };
        if self.jobs.send(job).is_err() {
            // All threads have ended. Their last reports contain the reason, unless a thread panicked, and the scope
            // propagates a panic.
            while let Ok(done) = self.done.recv() {
                self.settle(done)?;
            }
            return Err(self.io("read", Errno::CANCELED));
        }
        Ok(None)
    }

    fn special(
        &mut self,
        file: &OwnedFd,
        stat: &Statx,
        parent: InodeId,
        name: &CStr,
    ) -> Result<Option<Level>, WalkError> {
        if let Some(inode) = self.linked(stat) {
            return self.name(parent, name, inode).map(|()| None);
        }
        let number = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
        let target;
        let node = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Symlink => {
                let read = rustix::fs::readlinkat(file, c"", Vec::new());
                target = read.map_err(|error| self.io("read the symlink", error))?;
                Node::Symlink(target.to_bytes())
            }
            FileType::CharacterDevice => Node::CharDevice(number),
            FileType::BlockDevice => Node::BlockDevice(number),
            FileType::Fifo => Node::Fifo,
            FileType::Socket => Node::Socket,
            _ => return Err(self.changed()),
        };
        let inode = self.add(file, stat, node, Through::Proc)?;
        self.name(parent, name, inode).map(|()| None)
    }

    /// Returns the inode of another name of this file, if hard links are kept.
    fn linked(&self, stat: &Statx) -> Option<InodeId> {
        let several = stat.stx_nlink > 1 && self.options.hardlinks == Hardlinks::Keep;
        several.then(|| self.links.get(&identity(stat)).copied()).flatten()
    }

    /// Adds an inode without a name.
    fn add(
        &mut self,
        file: impl AsFd,
        stat: &Statx,
        node: Node<'_>,
        through: Through,
    ) -> Result<InodeId, WalkError> {
        let xattrs = self.xattrs(file.as_fd(), through)?;
        let inode = self.builder.inode(&self.metadata(stat), xattrs, node);
        let inode = inode.map_err(|error| self.misfit(error))?;
        let several = stat.stx_nlink > 1 && !matches!(node, Node::Directory);
        if several && self.options.hardlinks == Hardlinks::Keep {
            self.links.insert(identity(stat), inode);
        }
        Ok(inode)
    }

    fn name(&mut self, parent: InodeId, name: &CStr, inode: InodeId) -> Result<(), WalkError> {
        let named = self.builder.insert(parent, name.to_bytes(), inode, Link::Equal);
        named.map_err(|error| self.misfit(error))
    }

    fn metadata(&self, stat: &Statx) -> Metadata {
        let mut mtime =
            Timestamp { seconds: stat.stx_mtime.tv_sec, nanoseconds: stat.stx_mtime.tv_nsec };
        match self.options.times {
            Times::Exact => {}
            Times::WholeSeconds => mtime.nanoseconds = 0,
            Times::Epoch => mtime = Timestamp::default(),
        }
        Metadata {
            permissions: stat.stx_mode & 0o7777,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            mtime,
        }
    }

    /// Reads the entries of a directory.
    fn list(&self, file: OwnedFd, stat: &Statx, inode: InodeId) -> Result<Level, WalkError> {
        let list = || -> Result<_, Errno> {
            let mut directory = Dir::new(file)?;
            let mut left = Vec::new();
            while let Some(entry) = directory.read() {
                let entry = entry?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    left.push((entry.file_name().to_owned(), entry.file_type()));
                }
            }
            left.sort_unstable_by(|(one, _), (other, _)| other.cmp(one));
            Ok((directory, left))
        };
        let (directory, left) = list().map_err(|error| self.io("list", error))?;
        Ok(Level {
            directory,
            seen: FileStamp::from_stat(stat),
            inode,
            left,
            length: self.path.len(),
        })
    }

    fn xattrs(&mut self, file: BorrowedFd<'_>, through: Through) -> Result<XattrsId, WalkError> {
        if self.options.xattrs == KeptXattrs::None {
            return Ok(XattrsId::NONE);
        }
        let mut list = std::mem::take(&mut self.names);
        list.clear();
        list.reserve(XATTR_BUFFER);
        let proc = || format!("/proc/self/fd/{}", file.as_raw_fd());
        let count = match through {
            Through::Descriptor => rustix::fs::flistxattr(file, spare_capacity(&mut list)),
            Through::Proc => rustix::fs::listxattr(proc(), spare_capacity(&mut list)),
        };
        match count {
            Ok(_) => {}
            // The file system does not support xattrs.
            Err(Errno::NOTSUP) => list.clear(),
            Err(error) => return Err(self.io("list the xattrs of", error)),
        }
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let mut names: Vec<&[u8]> = names
            .filter(|name| self.options.xattrs == KeptXattrs::All || name.starts_with(b"user."))
            .collect();
        names.sort_unstable();
        let mut values = Vec::new();
        for name in &names {
            self.value.clear();
            self.value.reserve(XATTR_BUFFER);
            let value = spare_capacity(&mut self.value);
            let count = match through {
                Through::Descriptor => rustix::fs::fgetxattr(file, *name, value),
                Through::Proc => rustix::fs::getxattr(proc(), *name, value),
            };
            match count {
                Ok(_) => values.push(self.value.clone()),
                Err(Errno::NODATA) => return Err(self.changed()),
                Err(error) => return Err(self.io("read the xattrs of", error)),
            }
        }
        let pairs = names.iter().zip(&values).map(|(name, value)| (*name, &value[..]));
        let xattrs = self.builder.xattrs(pairs);
        let xattrs = xattrs.map_err(|error| self.misfit(error))?;
        self.names = list;
        Ok(xattrs)
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(std::ffi::OsStr::from_bytes(&self.path))
    }

    fn io(&self, action: &'static str, source: impl Into<io::Error>) -> WalkError {
        OperationError::at(action, &self.path())(source.into()).into()
    }

    fn changed(&self) -> WalkError {
        WalkError::Changed(self.path())
    }

    fn misfit(&self, source: TreeError) -> WalkError {
        misfit(&self.path(), source)
    }
}

fn misfit(path: &Path, error: TreeError) -> WalkError {
    OperationError::of("add", format_args!("{} to the tree", path.display()))(error).into()
}

/// How the xattrs of an open file are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Through {
    Descriptor,
    /// Through the descriptor's path in `/proc`, because the kernel reads no xattrs from descriptors opened with
    /// `O_PATH`.
    Proc,
}

const fn directory_flags() -> OFlags {
    OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC)
}

const fn identity(stat: &Statx) -> (u32, u32, u64) {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}
