//! The second copy: changes since the first one, while the container is frozen.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Statx, linkat};
use rustix::io::Errno;

use super::content::CopyStop;
use super::entry::{Copier, Place, Stale, Writers, hold, list, open_below, open_directory};
use super::first_copy::FirstCopy;
use super::index::{CopiedEntry, CopyIndex, DirectoryId, FileId, KnownNames, Tally};
use super::remove::remove;
use super::stamp::{FileKey, Stamp, kind, stat, stat_at};
use super::way::{Back, Level, Way};
use super::{CopyError, CopyReport};

/// A subdirectory that is left.
struct Subdirectory {
    name: CString,
    id: DirectoryId,
    /// Identity of the source's directory.
    key: FileKey,
    /// Whether its metadata must be copied.
    is_due: bool,
}

/// The file of the copy that has the content of a file with several names.
struct Group {
    /// The file in the index; `None` if it was copied again.
    file: Option<FileId>,
    directory: DirectoryId,
    name: Box<CStr>,
}

pub(super) struct SecondCopy<'a> {
    from: OwnedFd,
    to: OwnedFd,
    copier: Copier<'a>,
    pub(super) index: CopyIndex,
    tally: Tally,
    groups: HashMap<FileKey, Group>,
    /// Whether every change through a shared mapping changes the `ctime`.
    shows_stores: bool,
    /// Buffer for the names of a directory.
    listing: Vec<u8>,
}

impl FirstCopy<'_> {
    /// Copies the changes since the first copy. All processes of the container must be frozen or ended, and
    /// nothing else may write to the upper directory. The copy then is exactly what the upper directory is now.
    ///
    /// # Errors
    /// [`CopyError`]; the copy has incomplete contents then.
    pub fn finish(self) -> Result<CopyReport, CopyError> {
        let mut second = SecondCopy::new(self)?;
        second.walk()?;
        Ok(second.tally.report)
    }
}

/// Whether a file system changes a file's `ctime` at the first store to a clean page of a shared mapping. These do:
/// their `page_mkwrite` calls `file_update_time`. On tmpfs, pages are never clean.
pub(super) fn shows_stores(directory: impl AsFd) -> Result<bool, Errno> {
    // Source: Linux include/uapi/linux/magic.h: ext4 (also ext2 and ext3), XFS, btrfs and F2FS.
    const KNOWN: [i128; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010];
    let kind = rustix::fs::fstatfs(directory)?.f_type;
    // Some architectures have a signed type of 32 bits.
    Ok(KNOWN.contains(&(i128::from(kind) & 0xffff_ffff)))
}

impl<'a> SecondCopy<'a> {
    pub(super) fn new(first: FirstCopy<'a>) -> Result<Self, CopyError> {
        let shows_stores = shows_stores(&first.from).map_err(|errno| {
            first.stopped(DirectoryId::ROOT, None, CopyStop::Kernel("examine", errno))
        })?;
        Ok(Self {
            from: first.from,
            to: first.to,
            copier: first.copier,
            index: first.index,
            tally: Tally::default(),
            groups: HashMap::new(),
            shows_stores,
            listing: Vec::new(),
        })
    }

    pub(super) fn walk(&mut self) -> Result<(), CopyError> {
        let mut way = Way::new();
        let root = DirectoryId::ROOT;
        let entered = self.root();
        let level = entered.map_err(|(name, stop)| self.stopped(root, name.as_deref(), stop))?;
        self.push(&mut way, level)?;
        while let Some(level) = way.last() {
            let id = level.id;
            if let Some(below) = level.left.pop() {
                let from = level.from().map_err(CopyStop::at("open"));
                let opened = from
                    .and_then(|from| open_below(from, &below.name).map_err(CopyStop::at("open")));
                let from = opened.map_err(|stop| self.stopped(below.id, None, stop))?;
                let base = way.base().map_err(CopyStop::at("open the copy of"));
                let base = base.map_err(|stop| self.stopped(below.id, None, stop))?;
                let mut level = Level::below(from, below.key, below.id, base);
                level.is_due = below.is_due;
                let scanned = self.scan(level);
                let level = scanned
                    .map_err(|(name, stop)| self.stopped(below.id, name.as_deref(), stop))?;
                self.push(&mut way, level)?;
                continue;
            }
            let Some(mut level) = way.pop() else { break };
            let left = self.leave(&mut way, &mut level);
            if left.map_err(|stop| self.stopped(id, None, stop))? == Back::Lost {
                return Err(self.stopped(id, None, CopyStop::Changed));
            }
        }
        Ok(())
    }

    fn push(
        &self,
        way: &mut Way<Subdirectory>,
        level: Level<Subdirectory>,
    ) -> Result<(), CopyError> {
        let id = level.id;
        let pushed = way.push(level, &self.index).map_err(CopyStop::at("open the copy of"));
        pushed.map_err(|stop| self.stopped(id, None, stop))
    }

    fn root(&mut self) -> Result<Level<Subdirectory>, (Option<CString>, CopyStop)> {
        let failed = |action| move |errno| (None, CopyStop::Kernel(action, errno));
        let from = open_directory(&self.from).map_err(failed("open"))?;
        let to = open_directory(&self.to).map_err(failed("open the copy of"))?;
        let stat = stat(&from).map_err(failed("examine"))?;
        self.tally.inode(&stat);
        let stamp = Stamp::of(&stat);
        let mut level = Level::root(from, stamp.key, to);
        level.is_due = !self.index.is_unchanged(DirectoryId::ROOT, &stamp);
        self.scan(level)
    }

    /// Compares the entries of a directory with those of the first copy, and copies those that differ. An error comes
    /// with the name of the entry.
    fn scan(
        &mut self,
        mut level: Level<Subdirectory>,
    ) -> Result<Level<Subdirectory>, (Option<CString>, CopyStop)> {
        let listed = level.from().and_then(open_directory);
        let listed = listed.map_err(|errno| (None, CopyStop::Kernel("open", errno)))?;
        let mut known = self.index.take_names(level.id);
        let mut listing = std::mem::take(&mut self.listing);
        let failed = |errno| (None, CopyStop::Kernel("list", errno));
        list(listed.as_fd(), &mut listing, failed, |name| {
            let compared = self.entry(&mut level, &mut known, name);
            compared.map_err(|stop| (Some(name.to_owned()), stop))
        })?;
        self.listing = listing;
        for name in known.lost() {
            let removed = self.remove(&mut level, &name);
            removed.map_err(|stop| (Some(name), stop))?;
        }
        Ok(level)
    }

    fn remove(&mut self, level: &mut Level<Subdirectory>, name: &CStr) -> Result<(), CopyStop> {
        self.tally.report.recopied += 1;
        let to = level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
        remove(to, name).map_err(CopyStop::at("remove the copy of"))
    }

    fn entry(
        &mut self,
        level: &mut Level<Subdirectory>,
        known: &mut KnownNames,
        name: &CStr,
    ) -> Result<(), CopyStop> {
        self.copier.content.go_on()?;
        let from = level.from().map_err(CopyStop::at("open"))?;
        let stat = match stat_at(from, name) {
            Err(Errno::NOENT) => return Err(CopyStop::Changed),
            stat => stat.map_err(CopyStop::at("examine"))?,
        };
        self.tally.name(&stat);
        let stamp = Stamp::of(&stat);
        let found = known.find(name);
        if kind(&stat) == FileType::Directory {
            let id = match found {
                // It may be another directory with the same name. All its entries and its metadata are compared.
                Some(CopiedEntry::Directory(id)) => id,
                found => self.add_directory(level, found, name)?,
            };
            let is_due = !self.index.is_unchanged(id, &stamp);
            let key = stamp.key;
            level.left.push(Subdirectory { name: name.to_owned(), id, key, is_due });
            return Ok(());
        }
        if let Some(CopiedEntry::File(file)) = found
            && self.is_same(level, name, file, &stat)?
        {
            return Ok(());
        }
        self.tally.report.recopied += 1;
        let to = level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
        if found.is_some() {
            remove(to, name).map_err(CopyStop::at("remove the copy of"))?;
        }
        self.renew(level, name, &stat)
    }

    fn add_directory(
        &mut self,
        level: &mut Level<Subdirectory>,
        found: Option<CopiedEntry>,
        name: &CStr,
    ) -> Result<DirectoryId, CopyStop> {
        self.tally.report.recopied += 1;
        let to = level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
        if found.is_some() {
            remove(to, name).map_err(CopyStop::at("remove the copy of"))?;
        }
        self.copier.directory(Place { directory: to, name })?;
        Ok(self.index.add_directory(level.id, name))
    }

    /// Whether a name has the same file in the copy.
    fn is_same(
        &mut self,
        level: &mut Level<Subdirectory>,
        name: &CStr,
        file: FileId,
        stat: &Statx,
    ) -> Result<bool, CopyStop> {
        let stamp = Stamp::of(stat);
        let seen = self.index.file(file);
        // Overlayfs links all whiteouts to one file, whose `ctime` changes with each. Their metadata has no meaning.
        if stamp.is_whiteout() && seen.is_whiteout() {
            return Ok(true);
        }
        let is_linked = stat.stx_nlink > 1;
        // All names of a file must be names of one file in the copy.
        if is_linked && let Some(group) = self.groups.get(&stamp.key) {
            return Ok(group.file == Some(file));
        }
        let is_same = seen.is_unchanged(&stamp) && self.has_same_bytes(level, name, stat)?;
        if is_same && is_linked {
            let group = Group { file: Some(file), directory: level.id, name: name.into() };
            self.groups.insert(stamp.key, group);
        }
        Ok(is_same)
    }

    /// Whether the bytes of a file cannot have been changed by a store through a mapping.
    fn has_same_bytes(
        &mut self,
        level: &mut Level<Subdirectory>,
        name: &CStr,
        stat: &Statx,
    ) -> Result<bool, CopyStop> {
        if self.shows_stores || kind(stat) != FileType::RegularFile || stat.stx_size == 0 {
            return Ok(true);
        }
        let from = level.from().map_err(CopyStop::at("open"))?;
        let held = hold(from, name).map_err(CopyStop::at("open"))?;
        let directory = level.copy(&self.index);
        let directory = directory.map_err(CopyStop::at("open the copy of"))?;
        self.copier.is_equal(&held, stat, Place { directory, name })
    }

    /// Copies a file to a name that the copy does not have.
    fn renew(
        &mut self,
        level: &mut Level<Subdirectory>,
        name: &CStr,
        seen: &Statx,
    ) -> Result<(), CopyStop> {
        let stamp = Stamp::of(seen);
        let id = level.id;
        level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
        let (from, to) = level.both().map_err(CopyStop::at("open"))?;
        let is_linked = seen.stx_nlink > 1;
        if is_linked && let Some(group) = self.groups.get(&stamp.key) {
            let other;
            let directory = if group.directory == id {
                to
            } else {
                let opened = self.index.open(self.to.as_fd(), group.directory);
                other = opened.map_err(CopyStop::at("open the copy of"))?;
                other.as_fd()
            };
            match linkat(directory, &*group.name, to, name, AtFlags::empty()) {
                Ok(()) => return Ok(()),
                Err(Errno::MLINK) if stamp.is_whiteout() => {}
                Err(errno) => return Err(CopyStop::Kernel("link the copy of", errno)),
            }
        }
        let held = hold(from, name).map_err(CopyStop::at("open"))?;
        let examine = |held: &OwnedFd| stat(held).map_err(CopyStop::at("examine"));
        let now = examine(&held)?;
        if Stamp::of(&now) != stamp {
            return Err(CopyStop::Changed);
        }
        let place = Place { directory: to, name };
        self.copier.file(&held, &now, place, Writers::Rest)?;
        if Stamp::of(&examine(&held)?) != stamp {
            return Err(CopyStop::Changed);
        }
        if is_linked {
            let group = Group { file: None, directory: id, name: name.into() };
            self.groups.insert(stamp.key, group);
        }
        Ok(())
    }

    /// Copies the metadata of a directory if necessary, and returns to its parent.
    fn leave(
        &mut self,
        way: &mut Way<Subdirectory>,
        level: &mut Level<Subdirectory>,
    ) -> Result<Back, CopyStop> {
        if level.is_due {
            level.to(&self.index).map_err(CopyStop::at("open the copy of"))?;
            let (from, to) = level.both().map_err(CopyStop::at("open"))?;
            let stat = stat(from).map_err(CopyStop::at("examine"))?;
            self.copier.metadata(from, to, &stat, Stale::Removed)?;
        }
        way.back(level).map_err(CopyStop::at("leave"))
    }

    fn stopped(&self, id: DirectoryId, name: Option<&CStr>, stop: CopyStop) -> CopyError {
        CopyError::of(stop, self.index.path(id, name))
    }
}
