//! Walks through an upper layer, and translates each name into members of a layer.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsFd as _, OwnedFd};

use image::erofs::read::PATH_MAX;
use image::tar::write::{Member, TarWriteError, Writer};
use image::tar::{Kind, Whiteout, whiteout};
use image::tree::{Content, Inode, InodeId, Metadata, NAME_MAX, Node};
use rustix::fs::{FileType, Mode, OFlags, Statx};
use rustix::io::Errno;
use store::walk::FileStamp;

use super::content::Copier;
use super::marks::{self, Keeping, Marks, Opaque, Pairs};
use super::read;
use super::{ChangesError, Report, Upper};

/// Name of a file that hides the contents of a directory in lower layers. Source: OCI image-spec, "Opaque Whiteout".
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of the name of a removed file.
const REMOVED: &[u8] = b".wh.";

/// A name that is still to be processed.
enum Item<'a> {
    /// The upper layer has the name.
    Upper(CString),
    /// Only the image has the name, below a directory that was renamed.
    Image(Inode<'a>, &'a [u8]),
    /// The image has the name, and the container has removed it.
    Gone(CString),
}

/// A directory that is being walked.
struct Level<'a> {
    /// Identity of the directory in the upper layer. `None` for directories that only the image has.
    seen: Option<FileStamp>,
    /// Remaining entries, the last one first.
    left: Vec<Item<'a>>,
    /// Directory of the image whose entries are visible.
    from: Option<Inode<'a>>,
    /// Directory that the layers below have at this path.
    below: Option<Inode<'a>>,
    /// Length of the directory's path, in bytes.
    length: usize,
}

/// Counts the bytes that are written.
struct Counted<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

struct Walker<'a> {
    upper: Upper<'a>,
    out: Writer<Counted<'a>>,
    copier: Copier<'a>,
    /// Names, separated by slashes.
    path: Vec<u8>,
    /// First written path of each file with several names, by inode number of the upper layer and of the image.
    links: HashMap<u64, Box<[u8]>>,
    image_links: HashMap<InodeId, Box<[u8]>>,
    report: Report,
}

pub(super) fn walk(upper: &Upper<'_>, out: &mut dyn Write) -> Result<Report, ChangesError> {
    let mut walker = Walker {
        upper: *upper,
        out: Writer::new(Counted { out, bytes: 0 }),
        copier: Copier::new(upper.cancel),
        path: Vec::new(),
        links: HashMap::new(),
        image_links: HashMap::new(),
        report: Report::default(),
    };
    walker.tree()?;
    let Walker { out, mut report, .. } = walker;
    let mut counted = out.finish().map_err(ChangesError::Write)?;
    counted.flush().map_err(|error| ChangesError::Write(TarWriteError::Write(error)))?;
    report.bytes = counted.bytes;
    Ok(report)
}

impl<'a> Walker<'a> {
    fn tree(&mut self) -> Result<(), ChangesError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // The directory is opened again, because a duplicate of the descriptor would share the directory position.
        let root = rustix::fs::openat(self.upper.directory, c".", flags, Mode::empty());
        // The deepest directory on the path that is in the upper layer. Only this directory is open.
        let mut here = root.map_err(|error| self.io("open", error))?;
        let image = Some(self.upper.image.root());
        let stat = read::stat(&here).map_err(|error| self.io("examine", error))?;
        let (marks, own) = self.attributes(&here)?;
        let from = image.filter(|_| marks.opaque != Opaque::Yes);
        let first = self.directory(&here, &stat, &marks, &own, from, image)?;
        let mut levels = vec![first];
        while let Some(level) = levels.last_mut() {
            self.copier.go_on()?;
            self.path.truncate(level.length);
            let Some(item) = level.left.pop() else {
                let Some(level) = levels.pop() else { break };
                if level.seen.is_some() {
                    here = self.leave(here, &level, levels.last())?;
                }
                continue;
            };
            let (from, below) = (level.from, level.below);
            match item {
                Item::Gone(name) => self.gone(&name)?,
                Item::Upper(name) => {
                    self.push(name.to_bytes())?;
                    if let Some((opened, level)) = self.entry(&here, &name, from, below)? {
                        here = opened;
                        levels.push(level);
                    }
                }
                Item::Image(inode, name) => {
                    self.push(name)?;
                    levels.extend(self.image(inode)?);
                }
            }
        }
        Ok(())
    }

    /// Returns to the parent directory, if there is one, and checks that no directory was moved.
    fn leave(
        &self,
        here: OwnedFd,
        level: &Level<'_>,
        above: Option<&Level<'_>>,
    ) -> Result<OwnedFd, ChangesError> {
        let seen = |fd: &OwnedFd| read::stat(fd).map(|stat| FileStamp::from_stat(&stat));
        if Some(seen(&here).map_err(|error| self.io("examine", error))?) != level.seen {
            return Err(self.changed());
        }
        let Some(above) = above else { return Ok(here) };
        let back = read::above(&here).map_err(|error| self.io("leave", error))?;
        if Some(seen(&back).map_err(|error| self.io("examine", error))?) != above.seen {
            return Err(self.changed());
        }
        Ok(back)
    }

    /// Processes an entry of the upper layer. Returns it if it is a directory, to be walked next.
    fn entry(
        &mut self,
        directory: &OwnedFd,
        name: &CString,
        from: Option<Inode<'a>>,
        below: Option<Inode<'a>>,
    ) -> Result<Option<(OwnedFd, Level<'a>)>, ChangesError> {
        let held = read::hold(directory.as_fd(), name).map_err(|error| match error {
            Errno::NOENT => self.changed(),
            error => self.io("examine", error),
        })?;
        let stat = read::stat(&held).map_err(|error| self.io("examine", error))?;
        let kind = read::kind(&stat);
        if whiteout(name.to_bytes()) != Whiteout::None {
            return Err(ChangesError::Name(self.whole_path()));
        }
        let (marks, own) = self.attributes(&held)?;
        let lower = |name: &[u8]| from.and_then(|from| from.lookup(name));
        // Redirects refer only to paths through directories. Source: Linux `fs/overlayfs/namei.c`,
        // `ovl_check_redirect` and `ovl_lookup_layer`.
        let origin = match &marks.redirect {
            None => lower(name.to_bytes()),
            Some(path) if path.starts_with(b"/") => self.upper.image.resolve(path),
            Some(name) => lower(name),
        };
        match kind {
            FileType::Directory => {
                let from = origin.filter(|it| it.is_directory() && marks.opaque != Opaque::Yes);
                let below = below.and_then(|it| it.lookup(name.to_bytes()));
                let below = below.filter(Inode::is_directory);
                let opened = read::open(&held, kind).map_err(|error| self.io("open", error))?;
                let level = self.directory(&opened, &stat, &marks, &own, from, below)?;
                return Ok(Some((opened, level)));
            }
            // The other names of a socket are sockets as well, so hard links need not be checked.
            FileType::Socket => self.report.skipped.push(self.whole_path()),
            _ if self.is_linked(&stat)? => {}
            FileType::RegularFile if marks.is_metacopy => {
                let content = origin.map(|it| it.node());
                let Some(Node::Regular(content)) = content else {
                    let from = marks.redirect.unwrap_or_else(|| name.to_bytes().to_vec());
                    return Err(ChangesError::Redirect { path: self.whole_path(), from });
                };
                self.member(Kind::Regular, self.metadata(&stat)?, content.size(), &own)?;
                self.image_bytes(content)?;
            }
            FileType::RegularFile => {
                let file = read::open(&held, kind).map_err(|error| self.io("open", error))?;
                self.member(Kind::Regular, self.metadata(&stat)?, stat.stx_size, &own)?;
                let path = self.whole_path();
                self.copier.upper(file, stat.stx_size, &path, &mut self.out)?;
            }
            kind => self.special(&held, &stat, kind, &own)?,
        }
        // The file's data or xattrs may have changed since the first check.
        let now = read::stat(&held).map_err(|error| self.io("examine", error))?;
        if FileStamp::from_stat(&now) != FileStamp::from_stat(&stat) {
            return Err(self.changed());
        }
        Ok(None)
    }

    fn special(
        &mut self,
        held: &OwnedFd,
        stat: &Statx,
        kind: FileType,
        own: &Pairs,
    ) -> Result<(), ChangesError> {
        let number = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
        let target;
        let kind = match kind {
            FileType::Symlink => {
                let read = rustix::fs::readlinkat(held, c"", Vec::new());
                target = read.map_err(|error| self.io("read the symlink", error))?;
                Kind::Symlink(target.to_bytes())
            }
            FileType::CharacterDevice => Kind::CharDevice(number),
            FileType::BlockDevice => Kind::BlockDevice(number),
            FileType::Fifo => Kind::Fifo,
            _ => return Err(self.changed()),
        };
        self.member(kind, self.metadata(stat)?, 0, own)
    }

    /// Writes another name of a file that was already written. Otherwise records the name if the file may have more.
    fn is_linked(&mut self, stat: &Statx) -> Result<bool, ChangesError> {
        if stat.stx_nlink < 2 {
            return Ok(false);
        }
        let Some(first) = self.links.get(&stat.stx_ino).cloned() else {
            self.links.insert(stat.stx_ino, self.path.as_slice().into());
            return Ok(false);
        };
        let metadata = self.metadata(stat)?;
        self.member(Kind::Hardlink(&first), metadata, 0, &Pairs::new())?;
        Ok(true)
    }

    /// Writes a directory of the upper layer, and lists it. `from` is the directory of the image whose entries are
    /// visible, and `below` is the directory at this path in lower layers.
    fn directory(
        &mut self,
        opened: &OwnedFd,
        stat: &Statx,
        marks: &Marks,
        own: &Pairs,
        from: Option<Inode<'a>>,
        below: Option<Inode<'a>>,
    ) -> Result<Level<'a>, ChangesError> {
        self.member(Kind::Directory, self.metadata(stat)?, 0, own)?;
        let length = self.path.len();
        let (mut names, mut gone) = (Vec::new(), Vec::new());
        for (name, kind) in read::list(opened).map_err(|error| self.io("list", error))? {
            match self.is_removed(opened, &name, kind, marks)? {
                true => gone.push(name),
                false => names.push(name),
            }
        }
        let is_same = |from: Inode<'_>| below.is_some_and(|below| below.id() == from.id());
        let is_there = |name: &CString| from.and_then(|it| it.lookup(name.to_bytes())).is_some();
        gone.retain(is_there);
        let can_be_said = |name: &CString| name.to_bytes().len() + REMOVED.len() <= NAME_MAX;
        let mut left: Vec<Item<'a>> = Vec::new();
        let below = if from.is_some_and(is_same) && gone.iter().all(can_be_said) {
            // The entries of the lower layers are visible, so whiteouts are needed only for removed entries.
            left.extend(gone.into_iter().map(Item::Gone));
            left.extend(names.into_iter().map(Item::Upper));
            below
        } else {
            if below.is_some_and(|below| below.children().len() > 0) {
                self.hide(OPAQUE)?;
            }
            // The directory has another path in the image, so all of its entries are written, except entries that were
            // removed or changed.
            let mut hidden: Vec<&[u8]> =
                names.iter().chain(&gone).map(|it| it.to_bytes()).collect();
            hidden.sort_unstable();
            let shown = from.into_iter().flat_map(|it| it.children());
            let shown = shown.filter(|it| hidden.binary_search(&it.name).is_err());
            left.extend(shown.map(|it| Item::Image(it.inode, it.name)));
            left.extend(names.into_iter().map(Item::Upper));
            left.sort_unstable_by(|one, other| one.name().cmp(other.name()));
            None
        };
        left.reverse();
        Ok(Level { seen: Some(FileStamp::from_stat(stat)), left, from, below, length })
    }

    /// Whether a name in the upper layer is a whiteout.
    fn is_removed(
        &self,
        directory: &OwnedFd,
        name: &CString,
        kind: FileType,
        marks: &Marks,
    ) -> Result<bool, ChangesError> {
        let may_be_marked = marks.opaque == Opaque::Marked;
        match kind {
            FileType::CharacterDevice | FileType::Unknown => {}
            FileType::RegularFile if may_be_marked => {}
            _ => return Ok(false),
        }
        let failed = |error| match error {
            Errno::NOENT => self.changed(),
            error => self.io("examine", error),
        };
        let held = read::hold(directory.as_fd(), name).map_err(failed)?;
        let stat = read::stat(&held).map_err(failed)?;
        let is_marked = || -> Result<bool, ChangesError> {
            let is_empty = read::kind(&stat) == FileType::RegularFile && stat.stx_size == 0;
            Ok(may_be_marked && is_empty && self.attributes(&held)?.0.is_whiteout)
        };
        Ok(read::is_whiteout(&stat) || is_marked()?)
    }

    /// Writes an entry that only the image has. Returns it if it is a directory.
    fn image(&mut self, inode: Inode<'a>) -> Result<Option<Level<'a>>, ChangesError> {
        let name = self.path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        if whiteout(name) != Whiteout::None {
            return Err(ChangesError::Name(self.whole_path()));
        }
        let mut xattrs: Pairs =
            inode.xattrs().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
        xattrs.sort_unstable();
        let metadata = inode.metadata();
        if let Some(first) = self.image_links.get(&inode.id()).cloned() {
            self.member(Kind::Hardlink(&first), metadata, 0, &Pairs::new())?;
            return Ok(None);
        }
        if !inode.is_directory() && inode.nlink() > 1 {
            self.image_links.insert(inode.id(), self.path.as_slice().into());
        }
        let kind = match inode.node() {
            Node::Directory => {
                self.member(Kind::Directory, metadata, 0, &xattrs)?;
                let left = inode.children().map(|it| Item::Image(it.inode, it.name));
                let mut left: Vec<_> = left.collect();
                left.reverse();
                let length = self.path.len();
                return Ok(Some(Level { seen: None, left, from: None, below: None, length }));
            }
            Node::Regular(content) => {
                self.member(Kind::Regular, metadata, content.size(), &xattrs)?;
                return self.image_bytes(content).map(|()| None);
            }
            Node::Socket => {
                self.report.skipped.push(self.whole_path());
                return Ok(None);
            }
            Node::Symlink(target) => Kind::Symlink(target),
            Node::CharDevice(number) => Kind::CharDevice(number),
            Node::BlockDevice(number) => Kind::BlockDevice(number),
            Node::Fifo => Kind::Fifo,
        };
        self.member(kind, metadata, 0, &xattrs).map(|()| None)
    }

    fn image_bytes(&mut self, content: Content<'_>) -> Result<(), ChangesError> {
        let path = self.whole_path();
        self.copier.image(self.upper.store, content, &path, &mut self.out)
    }

    fn gone(&mut self, name: &CString) -> Result<(), ChangesError> {
        self.hide(&[REMOVED, name.to_bytes()].concat())
    }

    /// Writes a whiteout into the current directory.
    fn hide(&mut self, name: &[u8]) -> Result<(), ChangesError> {
        let length = self.path.len();
        self.push(name)?;
        let metadata = Metadata { permissions: 0, ..Metadata::IMPLICIT };
        self.member(Kind::Regular, metadata, 0, &Pairs::new())?;
        self.path.truncate(length);
        Ok(())
    }

    fn member(
        &mut self,
        kind: Kind<'_>,
        mut metadata: Metadata,
        size: u64,
        xattrs: &Pairs,
    ) -> Result<(), ChangesError> {
        if let Some(latest) = self.upper.latest {
            metadata.mtime = metadata.mtime.min(latest);
        }
        let xattrs: Vec<_> = xattrs.iter().map(|(name, value)| (&name[..], &value[..])).collect();
        let member = Member { path: &self.path, kind, metadata, size, xattrs: &xattrs };
        self.out.member(&member).map_err(ChangesError::Write)?;
        self.report.entries += 1;
        Ok(())
    }

    fn metadata(&self, stat: &Statx) -> Result<Metadata, ChangesError> {
        read::metadata(stat, self.upper.ids)
            .map_err(|source| ChangesError::Owner { path: self.whole_path(), source })
    }

    fn attributes(&self, held: &OwnedFd) -> Result<(Marks, Pairs), ChangesError> {
        let xattrs = read::xattrs(held.as_fd());
        let xattrs = xattrs.map_err(|error| self.io("read the xattrs of", error))?;
        let keeping = Keeping::for_user(self.upper.store.who());
        let (marks, own) = marks::split(xattrs, keeping);
        let own = own.into_iter().map(|(name, value)| {
            let value = self.upper.ids.xattr(&name, value);
            let value =
                value.map_err(|source| ChangesError::Owner { path: self.whole_path(), source })?;
            Ok((name, value))
        });
        Ok((marks, own.collect::<Result<_, ChangesError>>()?))
    }

    fn push(&mut self, name: &[u8]) -> Result<(), ChangesError> {
        let slashes = if self.path.is_empty() { 1 } else { 2 };
        if self.path.len() + slashes + name.len() > PATH_MAX {
            let mut path = self.whole_path();
            path.truncate(100);
            return Err(ChangesError::Path(path));
        }
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        Ok(())
    }

    fn whole_path(&self) -> Vec<u8> {
        [b"/", &self.path[..]].concat()
    }

    fn io(&self, action: &'static str, source: impl Into<io::Error>) -> ChangesError {
        ChangesError::Io { action, path: self.whole_path(), source: source.into() }
    }

    fn changed(&self) -> ChangesError {
        ChangesError::Changed(self.whole_path())
    }
}

impl Item<'_> {
    fn name(&self) -> &[u8] {
        match self {
            Self::Upper(name) | Self::Gone(name) => name.to_bytes(),
            Self::Image(_, name) => name,
        }
    }
}
