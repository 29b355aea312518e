//! Record of what the first copy has copied.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, Statx, openat};
use rustix::io::Errno;

use super::CopyReport;
use super::entry::{DIRECTORY, open_directory};
use super::stamp::{FileKey, Seen, Stamp, kind};

/// Number of a file in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId(usize);

/// Number of a directory in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DirectoryId(usize);

impl DirectoryId {
    pub(super) const ROOT: Self = Self(0);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopiedEntry {
    /// A file that is not a directory. Several names may have the same one.
    File(FileId),
    Directory(DirectoryId),
}

/// A directory of the copy.
#[derive(Debug)]
struct Directory {
    /// Parent directory and name; `None` for the root.
    place: Option<(DirectoryId, Box<CStr>)>,
    /// Stamp before its names and xattrs were read; `None` until its metadata was copied.
    seen: Option<Seen>,
    /// Names in the order in which the source has listed them.
    entries: Vec<(Box<CStr>, CopiedEntry)>,
}

/// Record of a copy.
#[derive(Debug)]
pub(super) struct CopyIndex {
    files: Vec<Seen>,
    directories: Vec<Directory>,
    /// Number of names in the paths of directories that were opened.
    pub(super) steps: Cell<u64>,
}

impl CopyIndex {
    /// Returns an index that has only the root.
    pub(super) fn new() -> Self {
        let root = Directory { place: None, seen: None, entries: Vec::new() };
        Self { files: Vec::new(), directories: vec![root], steps: Cell::new(0) }
    }

    /// Adds a copied file, without a name.
    pub(super) fn add_file(&mut self, seen: Seen) -> FileId {
        self.files.push(seen);
        FileId(self.files.len() - 1)
    }

    /// Adds a directory with its name.
    pub(super) fn add_directory(&mut self, parent: DirectoryId, name: &CStr) -> DirectoryId {
        let place = Some((parent, name.into()));
        self.directories.push(Directory { place, seen: None, entries: Vec::new() });
        let id = DirectoryId(self.directories.len() - 1);
        self.add_name(parent, name, CopiedEntry::Directory(id));
        id
    }

    pub(super) fn add_name(&mut self, directory: DirectoryId, name: &CStr, entry: CopiedEntry) {
        self.directories[directory.0].entries.push((name.into(), entry));
    }

    /// Records that the metadata of a directory was copied.
    pub(super) fn finish(&mut self, directory: DirectoryId, seen: Seen) {
        self.directories[directory.0].seen = Some(seen);
    }

    pub(super) fn file(&self, file: FileId) -> &Seen {
        &self.files[file.0]
    }

    /// Whether the copy of a directory has the metadata with this stamp.
    pub(super) fn is_unchanged(&self, directory: DirectoryId, now: &Stamp) -> bool {
        self.directories[directory.0].seen.is_some_and(|it| it.is_unchanged(now))
    }

    /// Takes the names of a directory out of the index.
    pub(super) fn take_names(&mut self, directory: DirectoryId) -> KnownNames {
        let entries = std::mem::take(&mut self.directories[directory.0].entries);
        KnownNames { is_found: vec![false; entries.len()], entries, next: 0, sorted: None }
    }

    /// Returns the names on the path from `above` to a directory, the last one first.
    fn names(&self, mut directory: DirectoryId, above: DirectoryId) -> impl Iterator<Item = &CStr> {
        std::iter::from_fn(move || {
            let place = self.directories[directory.0].place.as_ref();
            let (parent, name) = place.filter(|_| directory != above)?;
            directory = *parent;
            Some(&**name)
        })
    }

    /// Returns a path for an error. If it is too long, only its end.
    pub(super) fn path(&self, directory: DirectoryId, name: Option<&CStr>) -> Vec<u8> {
        /// Number of names in an error.
        const MOST: usize = 64;
        let mut names: Vec<&CStr> =
            name.into_iter().chain(self.names(directory, DirectoryId::ROOT)).take(MOST).collect();
        names.reverse();
        let names = names.iter().flat_map(|name| [b"/", name.to_bytes()]);
        let path = names.collect::<Vec<_>>().concat();
        if path.is_empty() { b"/".to_vec() } else { path }
    }

    /// Opens a directory of the copy. Only this process changes the copy, so its path leads to it.
    ///
    /// # Errors
    /// `ENAMETOOLONG` if too much time was used for long paths. A container can make millions of hard links between
    /// directories that are millions of levels deep.
    pub(super) fn open(
        &self,
        root: BorrowedFd<'_>,
        directory: DirectoryId,
    ) -> Result<OwnedFd, Errno> {
        /// Number of names for each file that are always opened.
        const USUAL: u64 = 64;
        /// Number of further names, which the kernel opens within some seconds.
        const MORE: u64 = 100_000_000;
        let files = (self.files.len() + self.directories.len()) as u64;
        if self.steps.get() > MORE + USUAL * files {
            return Err(Errno::NAMETOOLONG);
        }
        self.open_below(root, DirectoryId::ROOT, directory)
    }

    /// Opens a directory of the copy from `base`, which is the open directory `above` on its path.
    pub(super) fn open_below(
        &self,
        base: BorrowedFd<'_>,
        above: DirectoryId,
        directory: DirectoryId,
    ) -> Result<OwnedFd, Errno> {
        /// Length of the paths that are opened at once, in bytes, which is less than Linux's `PATH_MAX`.
        const LONGEST: usize = 3000;
        let mut names: Vec<&CStr> = self.names(directory, above).collect();
        self.steps.set(self.steps.get() + names.len() as u64);
        let mut here = open_directory(base)?;
        let mut path = Vec::new();
        while let Some(name) = names.pop() {
            path.extend_from_slice(name.to_bytes());
            if names.is_empty() || path.len() > LONGEST {
                here = openat(&here, &*path, DIRECTORY, Mode::empty())?;
                path.clear();
            } else {
                path.push(b'/');
            }
        }
        Ok(here)
    }
}

/// Names that a directory had in the first copy.
#[derive(Debug)]
pub(super) struct KnownNames {
    entries: Vec<(Box<CStr>, CopiedEntry)>,
    is_found: Vec<bool>,
    /// Place of the name that is expected next: a directory usually lists its names in the same order.
    next: usize,
    /// Places of all names in their order, once a name came unexpectedly.
    sorted: Option<Vec<usize>>,
}

impl KnownNames {
    /// Returns the entry with this name. A name is returned once.
    pub(super) fn find(&mut self, name: &CStr) -> Option<CopiedEntry> {
        let entries = &self.entries;
        let place = match entries.get(self.next) {
            Some((expected, _)) if **expected == *name => self.next,
            _ => {
                let sorted = self.sorted.get_or_insert_with(|| {
                    let mut sorted: Vec<usize> = (0..entries.len()).collect();
                    sorted.sort_unstable_by(|one, other| entries[*one].0.cmp(&entries[*other].0));
                    sorted
                });
                sorted[sorted.binary_search_by(|it| (*entries[*it].0).cmp(name)).ok()?]
            }
        };
        self.next = place + 1;
        let is_found = std::mem::replace(&mut self.is_found[place], true);
        (!is_found).then_some(self.entries[place].1)
    }

    /// Returns the names that were not found.
    pub(super) fn lost(&self) -> Vec<CString> {
        let names = self.entries.iter().zip(&self.is_found);
        names
            .filter(|(_, is_found)| !**is_found)
            .map(|((name, _), _)| (**name).to_owned())
            .collect()
    }
}

/// Counts the files of a copy.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) report: CopyReport,
    /// Files with several names that were counted.
    linked: HashSet<FileKey>,
}

impl Tally {
    /// Counts a name.
    pub(super) fn name(&mut self, stat: &Statx) {
        self.report.entries += 1;
        let is_directory = kind(stat) == FileType::Directory;
        if is_directory || stat.stx_nlink < 2 || self.linked.insert(Stamp::of(stat).key) {
            self.inode(stat);
        }
    }

    /// Counts a file without a name.
    pub(super) fn inode(&mut self, stat: &Statx) {
        /// Unit of `stx_blocks`, in bytes. Source: statx(2).
        const BLOCK: u64 = 512;
        self.report.inodes += 1;
        let bytes = stat.stx_blocks.saturating_mul(BLOCK);
        self.report.bytes = self.report.bytes.saturating_add(bytes);
    }
}
