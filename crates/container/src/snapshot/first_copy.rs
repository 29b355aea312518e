//! The first copy: everything, while the container runs.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use rustix::fs::{AtFlags, FileType, linkat};
use rustix::io::Errno;

use super::content::{ByteCopier, CopyStop};
use super::entry::{
    Copier, Place, Stale, Writers, XattrChoice, hold, inherit_nothing, list, open_directory,
};
use super::index::{CopiedEntry, CopyIndex, DirectoryId, FileId, Tally};
use super::stamp::{FileKey, Seen, Stamp, kind, look};
use super::way::{Back, Level, Way};
use super::{CopyError, CopyReport};

/// A copy of everything that a container's upper directory had.
#[derive(Debug)]
pub struct FirstCopy<'a> {
    pub(super) from: OwnedFd,
    pub(super) to: OwnedFd,
    pub(super) copier: Copier<'a>,
    pub(super) index: CopyIndex,
    tally: Tally,
    /// First name of each file with several names.
    links: HashMap<FileKey, Copied>,
    /// Whether the walk ended early, because a directory was moved.
    is_incomplete: bool,
    devices: DeviceCopies,
    /// Directories below the uppermost one whose contents are not copied.
    covered: HashSet<FileKey>,
}

/// Whether device files are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceCopies {
    Copied,
    /// They would be device files on the host's disk, and a user without root cannot make them.
    LeftOut,
}

/// A file of the copy, with one of its names.
#[derive(Debug)]
struct Copied {
    file: FileId,
    directory: DirectoryId,
    name: Box<CStr>,
}

/// A directory, and its stamp before it was read.
type Walked = Level<CString>;

/// Copies everything below the directory `from`, which is the upper directory of an overlay, into the empty directory
/// `to`, which nothing else may use. `cancel` is set by another thread to stop this copy, and also the second one.
///
/// # Errors
/// [`CopyError`]; `to` has incomplete contents then.
pub fn first_copy<'a>(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    cancel: &'a AtomicBool,
) -> Result<FirstCopy<'a>, CopyError> {
    let mut copy = begin(from, to, cancel, DeviceCopies::Copied)?;
    // Dirty pages would otherwise be written file by file.
    let failed = |errno| CopyError::of(CopyStop::Kernel("write back", errno), b"/".to_vec());
    rustix::fs::syncfs(&copy.from).map_err(failed)?;
    copy.walk()?;
    Ok(copy)
}

/// Copies everything below the directory `from` of an image, except device files, into the empty directory `to`, which
/// nothing else may use. No link is followed. The directories `covered`, over which others will be mounted, are copied
/// without their contents.
///
/// # Errors
/// [`CopyError`]; `to` has incomplete contents then.
pub fn copy_tree(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    covered: &[OwnedFd],
    cancel: &AtomicBool,
) -> Result<CopyReport, CopyError> {
    let mut copy = begin(from, to, cancel, DeviceCopies::LeftOut)?;
    let failed = |errno| CopyError::of(CopyStop::Kernel("examine", errno), b"/".to_vec());
    let keys = covered.iter().map(|it| Ok(look(it)?.1.key()));
    copy.covered = keys.collect::<Result<_, Errno>>().map_err(failed)?;
    copy.walk()?;
    copy.at_rest()
}

fn begin<'a>(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    cancel: &'a AtomicBool,
    devices: DeviceCopies,
) -> Result<FirstCopy<'a>, CopyError> {
    let failed =
        |action| move |errno| CopyError::of(CopyStop::Kernel(action, errno), b"/".to_vec());
    let from = open_directory(from).map_err(failed("open"))?;
    let to = open_directory(to).map_err(failed("open the copy of"))?;
    inherit_nothing(to.as_fd()).map_err(failed("remove the ACL of the copy of"))?;
    let content = ByteCopier::new(cancel, to.as_fd()).map_err(failed("open the copy of"))?;
    let mut copier = Copier::new(content);
    if devices == DeviceCopies::LeftOut {
        copier.choice = XattrChoice::OfImage;
    }
    Ok(FirstCopy {
        from,
        to,
        copier,
        index: CopyIndex::new(),
        tally: Tally::default(),
        links: HashMap::new(),
        is_incomplete: false,
        devices,
        covered: HashSet::new(),
    })
}

impl FirstCopy<'_> {
    /// Returns the figures of the copy of a layer that nothing has written to since before the copy, so that no second
    /// copy is needed.
    ///
    /// # Errors
    /// If a directory was moved during the copy.
    pub fn at_rest(self) -> Result<CopyReport, CopyError> {
        if self.is_incomplete {
            return Err(CopyError::Changed(b"/".to_vec()));
        }
        Ok(self.tally.report)
    }

    fn walk(&mut self) -> Result<(), CopyError> {
        let mut way = Way::new();
        let root = DirectoryId::ROOT;
        let failed = |stop| self.stopped(root, None, stop);
        let from = open_directory(&self.from).map_err(CopyStop::at("open")).map_err(failed)?;
        let to = open_directory(&self.to);
        let to = to.map_err(CopyStop::at("open the copy of")).map_err(failed)?;
        let (stat, seen) = look(&from).map_err(CopyStop::at("examine")).map_err(failed)?;
        self.tally.inode(&stat);
        let level = self.enter(Level::root(from, seen.key(), to))?;
        self.push(&mut way, level)?;
        let mut seen = vec![seen];
        while let Some(level) = way.last() {
            if let Some(name) = level.left.pop() {
                let id = level.id;
                let entered = self.entry(level, &name);
                let entered = entered.map_err(|stop| self.stopped(id, Some(&name), stop))?;
                if let Some((from, stamp, id)) = entered {
                    let base = way.base().map_err(CopyStop::at("open the copy of"));
                    let base = base.map_err(|stop| self.stopped(id, None, stop))?;
                    let below = Level::below(from, stamp.key(), id, base);
                    let below = match self.covered.contains(&stamp.key()) {
                        true => below,
                        false => self.enter(below)?,
                    };
                    self.push(&mut way, below)?;
                    seen.push(stamp);
                }
                continue;
            }
            let (Some(level), Some(seen)) = (way.pop(), seen.pop()) else { break };
            let id = level.id;
            let back = self.leave(&mut way, level, seen);
            if back.map_err(|stop| self.stopped(id, None, stop))? == Back::Lost {
                // The second copy finds everything that is left.
                self.is_incomplete = true;
                break;
            }
        }
        Ok(())
    }

    fn push(&self, way: &mut Way<CString>, level: Walked) -> Result<(), CopyError> {
        let id = level.id;
        let pushed = way.push(level, &self.index).map_err(CopyStop::at("open the copy of"));
        pushed.map_err(|stop| self.stopped(id, None, stop))
    }

    /// Lists a directory.
    fn enter(&mut self, mut level: Walked) -> Result<Walked, CopyError> {
        let mut names = Vec::new();
        let failed = CopyStop::at("list");
        let listed = level.from().map_err(failed).and_then(|from| {
            list(from, &mut Vec::new(), failed, |name| {
                names.push(name.to_owned());
                Ok(())
            })
        });
        listed.map_err(|stop| self.stopped(level.id, None, stop))?;
        names.reverse();
        level.left = names;
        Ok(level)
    }

    /// Copies the metadata of a directory, and returns to its parent.
    fn leave(
        &mut self,
        way: &mut Way<CString>,
        mut level: Walked,
        seen: Seen,
    ) -> Result<Back, CopyStop> {
        let id = level.id;
        level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
        let back = way.back(&level).map_err(CopyStop::at("leave"))?;
        let (from, to) = level.both().map_err(CopyStop::at("open"))?;
        let (stat, _) = look(from).map_err(CopyStop::at("examine"))?;
        self.copier.metadata(from, to, &stat, Stale::Removed)?;
        self.index.finish(id, seen);
        Ok(back)
    }

    /// Copies an entry. Returns it if it is a directory, to be walked next.
    fn entry(
        &mut self,
        level: &mut Walked,
        name: &CStr,
    ) -> Result<Option<(OwnedFd, Seen, DirectoryId)>, CopyStop> {
        self.copier.content.go_on()?;
        let parent = level.id;
        let held = match hold(level.from().map_err(CopyStop::at("open"))?, name) {
            // The name was removed.
            Err(Errno::NOENT) => return Ok(None),
            held => held.map_err(CopyStop::at("open"))?,
        };
        let (stat, seen) = look(&held).map_err(CopyStop::at("examine"))?;
        let is_device = matches!(kind(&stat), FileType::CharacterDevice | FileType::BlockDevice);
        if is_device && self.devices == DeviceCopies::LeftOut {
            return Ok(None);
        }
        let to = level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
        let place = Place { directory: to, name };
        if kind(&stat) == FileType::Directory {
            let from = match open_directory(&held) {
                Err(Errno::NOENT) => return Ok(None),
                from => from.map_err(CopyStop::at("open"))?,
            };
            match self.copier.directory(place) {
                // The directory lists the name twice, because it was replaced.
                Err(CopyStop::Kernel(_, Errno::EXIST)) => return Ok(None),
                made => made?,
            }
            self.tally.name(&stat);
            let id = self.index.add_directory(parent, name);
            return Ok(Some((from, seen, id)));
        }
        let key = Stamp::of(&stat).key;
        if stat.stx_nlink > 1
            && let Some(known) = self.links.get(&key)
        {
            match link(&self.index, self.to.as_fd(), known, parent, place) {
                Ok(()) => {
                    self.tally.name(&stat);
                    // If another file has got the inode's number, its stamp is another, and it is copied again.
                    self.index.add_name(parent, name, CopiedEntry::File(known.file));
                    return Ok(None);
                }
                Err(Errno::EXIST) => return Ok(None),
                // Overlayfs links all whiteouts to one file, but does not depend on this.
                Err(Errno::MLINK) if seen.is_whiteout() => {}
                Err(errno) => return Err(CopyStop::Kernel("link the copy of", errno)),
            }
        }
        match self.copier.file(&held, &stat, place, Writers::Run) {
            Err(CopyStop::Kernel(_, Errno::EXIST)) => return Ok(None),
            copied => copied?,
        }
        self.tally.name(&stat);
        let file = self.index.add_file(seen);
        self.index.add_name(parent, name, CopiedEntry::File(file));
        if stat.stx_nlink > 1 {
            self.links.insert(key, Copied { file, directory: parent, name: name.into() });
        }
        Ok(None)
    }

    pub(super) fn stopped(
        &self,
        id: DirectoryId,
        name: Option<&CStr>,
        stop: CopyStop,
    ) -> CopyError {
        CopyError::of(stop, self.index.path(id, name))
    }
}

/// Links a name in the directory `parent` to a file of the copy.
fn link(
    index: &CopyIndex,
    root: BorrowedFd<'_>,
    known: &Copied,
    parent: DirectoryId,
    to: Place<'_>,
) -> Result<(), Errno> {
    let other;
    let directory = if known.directory == parent {
        to.directory
    } else {
        other = index.open(root, known.directory)?;
        other.as_fd()
    };
    linkat(directory, &*known.name, to.directory, to.name, AtFlags::empty())
}
