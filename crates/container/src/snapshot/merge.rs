//! Makes one directory of a chain of snapshots, which means the same to overlayfs above the image as the chain.
//!
//! Overlayfs looks a name up in one layer after the other. It stops at a whiteout, at an opaque directory, and at a
//! file that has its own data. A `redirect` changes the name, or the path from the root, that it looks up in the layers
//! below. Source: Linux fs/overlayfs/namei.c, `ovl_lookup`, `ovl_lookup_layer` and `ovl_lookup_single`, whose steps
//! [`Merger::lookup`] follows. The merged directory gets a whiteout, `opaque` or `redirect` only where the image
//! continues the lookup in another way than without.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use image::erofs::read::PATH_MAX;
use kernel::files::NameOutcome;
use kernel::mount::XattrNamespace;
use rustix::fs::{AtFlags, FileType, Mode, Statx, linkat, mknodat, openat};
use rustix::io::Errno;

use super::content::{ByteCopier, CopyStop};
use super::entry::{
    Bearer, Copier, DIRECTORY, Place, Stale, Writers, Xattrs, create, hold, inherit_nothing, list,
    open_data, open_directory, parent,
};
use super::index::{CopyIndex, DirectoryId, Tally};
use super::stamp::{FileKey, Stamp, kind, stat};
use super::{CopyError, CopyReport};
use crate::changes::marks::{Keeping, Marks, Opaque, split};

/// How the merged directory gets the files of the snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// As further names of the same files, where possible.
    Link,
    /// As copies, which share blocks where possible.
    Copy,
}

/// Maximum number of snapshots that can be merged.
pub const MOST_LAYERS: usize = 64;

/// Reason why snapshots cannot be merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A file has only metadata, and the lookup of its data ends in the snapshots.
    #[error("\"{}\" of the container has lost its data: a snapshot is damaged", .0.escape_ascii())]
    NoData(Vec<u8>),
    /// There are more snapshots than [`MOST_LAYERS`].
    #[error("{0} snapshots are too many to merge")]
    TooMany(usize),
}

/// Number of directories on the path that are open.
const OPEN: usize = 16;

/// A directory of a snapshot that is part of a merged directory.
#[derive(Debug)]
struct Part {
    /// `None` for outer directories that are reached by `..`.
    directory: Option<OwnedFd>,
    /// Number of the snapshot.
    layer: usize,
    /// Place of its parent directory among the parts of the parent; `None` if a redirect leads to it from elsewhere.
    above: Option<usize>,
    /// Whether marked empty files in it are whiteouts.
    has_marked: bool,
}

/// A merged directory.
#[derive(Debug)]
struct Level {
    id: DirectoryId,
    to: Option<OwnedFd>,
    /// Uppermost first.
    parts: Vec<Part>,
    /// Path of the image's directory that is visible in it; `None` if none is.
    below: Option<Vec<u8>>,
    /// Names that are left, and the parts that have them: the lowest bit is the uppermost one.
    left: Vec<(CString, u64)>,
    stat: Statx,
    xattrs: Xattrs,
}

/// A file or directory of a snapshot.
#[derive(Debug)]
struct Element {
    held: OwnedFd,
    layer: usize,
    above: Option<usize>,
    stat: Statx,
    xattrs: Xattrs,
    marks: Marks,
}

/// Result of a lookup in all snapshots.
enum Found {
    Whiteout,
    Files {
        first: Box<Element>,
        /// Further directories of a merged directory, or the files to which a file without data refers.
        others: Vec<Element>,
        /// Path at which the image continues; `None` if it does not.
        below: Option<Vec<u8>>,
    },
}

/// State of a lookup.
struct Search {
    /// Name in the parent directory, or path from the root of the layers.
    target: Vec<u8>,
    /// Whether no further layer is searched.
    is_stopped: bool,
}

/// A file of a snapshot with several names, of which a copy has all that have the same redirect.
#[derive(Debug, PartialEq, Eq, Hash)]
struct LinkKey {
    layer: usize,
    file: FileKey,
    redirect: Option<Vec<u8>>,
}

/// Why a merge ended.
#[derive(Clone, Copy)]
enum End {
    Stop(CopyStop),
    NoData,
}

impl From<CopyStop> for End {
    fn from(stop: CopyStop) -> Self {
        Self::Stop(stop)
    }
}

struct Merger<'a> {
    layers: Vec<OwnedFd>,
    to: OwnedFd,
    how: Share,
    namespace: XattrNamespace,
    copier: Copier<'a>,
    index: CopyIndex,
    tally: Tally,
    /// First name of each file of a snapshot that was copied and has several names.
    links: HashMap<LinkKey, (DirectoryId, CString)>,
    /// A whiteout of the merged directory.
    whiteout: Option<(DirectoryId, CString)>,
}

/// Merges snapshots, uppermost first, into the empty directory `to`. They must not change. `namespace` is that of
/// the overlay's xattrs.
///
/// # Errors
/// [`MergeError`]; `to` has incomplete contents then.
pub fn merge(
    layers: &[BorrowedFd<'_>],
    to: BorrowedFd<'_>,
    how: Share,
    namespace: XattrNamespace,
    cancel: &AtomicBool,
) -> Result<CopyReport, MergeError> {
    if layers.is_empty() || layers.len() > MOST_LAYERS {
        return Err(MergeError::TooMany(layers.len()));
    }
    let failed = |action| {
        move |errno| MergeError::Copy(CopyError::of(CopyStop::Kernel(action, errno), b"/".to_vec()))
    };
    let layers = layers.iter().map(open_directory).collect::<Result<Vec<_>, _>>();
    let to = open_directory(to).map_err(failed("open the copy of"))?;
    inherit_nothing(to.as_fd()).map_err(failed("remove the ACL of the copy of"))?;
    let content = ByteCopier::new(cancel, to.as_fd()).map_err(failed("open the copy of"))?;
    let mut merger = Merger {
        layers: layers.map_err(failed("open"))?,
        to,
        how,
        namespace,
        copier: Copier::new(content),
        index: CopyIndex::new(),
        tally: Tally::default(),
        links: HashMap::new(),
        whiteout: None,
    };
    merger.walk()?;
    Ok(merger.tally.report)
}

impl Merger<'_> {
    fn walk(&mut self) -> Result<(), MergeError> {
        let root = self.root();
        let root = root.map_err(|end| self.ended(DirectoryId::ROOT, None, end))?;
        let mut levels = vec![root];
        while let Some(level) = levels.last_mut() {
            let id = level.id;
            if let Some((name, parts)) = level.left.pop() {
                let entered = self.entry(level, &name, parts);
                if let Some(below) = entered.map_err(|end| self.ended(id, Some(&name), end))? {
                    levels.push(below);
                    close_outer(&mut levels);
                }
                continue;
            }
            let Some(level) = levels.pop() else { break };
            let left = self.leave(&level, levels.last_mut());
            left.map_err(|stop| self.ended(id, None, stop.into()))?;
        }
        Ok(())
    }

    fn ended(&self, id: DirectoryId, name: Option<&CStr>, end: End) -> MergeError {
        let path = self.index.path(id, name);
        match end {
            End::Stop(stop) => CopyError::of(stop, path).into(),
            End::NoData => MergeError::NoData(path),
        }
    }

    /// Overlayfs merges the roots of all layers, whatever their marks are.
    fn root(&mut self) -> Result<Level, End> {
        let mut elements = Vec::new();
        for layer in 0..self.layers.len() {
            let held = open_directory(self.layer(layer)?).map_err(CopyStop::at("open"))?;
            elements.push(self.element(held, layer, None)?);
        }
        let first = elements.remove(0);
        self.tally.inode(&first.stat);
        let to = open_directory(&self.to).map_err(CopyStop::at("open the copy of"))?;
        let xattrs = self.without_marks(&first.xattrs);
        let below = Some(b"/".to_vec());
        self.level(DirectoryId::ROOT, to, first, elements, below, xattrs)
    }

    fn layer(&self, number: usize) -> Result<BorrowedFd<'_>, CopyStop> {
        let layer = self.layers.get(number).map(|it| it.as_fd());
        layer.ok_or(CopyStop::Kernel("open", Errno::BADF))
    }

    /// Reads a file or directory, and its marks.
    fn element(
        &mut self,
        held: OwnedFd,
        layer: usize,
        above: Option<usize>,
    ) -> Result<Element, CopyStop> {
        let stat = stat(&held).map_err(CopyStop::at("examine"))?;
        let xattrs = self.copier.xattrs(Bearer::Held(held.as_fd()))?;
        let keeping = match self.namespace {
            XattrNamespace::Trusted => Keeping::Trusted,
            XattrNamespace::User => Keeping::User,
        };
        let (mut marks, _) = split(xattrs.clone(), keeping);
        if self.namespace == XattrNamespace::User {
            // Overlays in user namespaces do not follow these marks.
            marks.redirect = None;
            marks.is_metacopy = false;
        }
        Ok(Element { held, layer, above, stat, xattrs, marks })
    }

    /// Makes a level of a merged directory, whose parts it lists.
    fn level(
        &mut self,
        id: DirectoryId,
        to: OwnedFd,
        first: Element,
        others: Vec<Element>,
        below: Option<Vec<u8>>,
        xattrs: Xattrs,
    ) -> Result<Level, End> {
        let stat = first.stat;
        let mut names: BTreeMap<CString, u64> = BTreeMap::new();
        let mut parts = Vec::new();
        let mut buffer = Vec::new();
        for (number, element) in std::iter::once(first).chain(others).enumerate() {
            let directory = open_directory(&element.held).map_err(CopyStop::at("open"))?;
            list(directory.as_fd(), &mut buffer, CopyStop::at("list"), |name| {
                *names.entry(name.to_owned()).or_default() |= 1 << number;
                Ok::<_, CopyStop>(())
            })?;
            parts.push(Part {
                directory: Some(directory),
                layer: element.layer,
                above: element.above,
                has_marked: element.marks.opaque == Opaque::Marked,
            });
        }
        let left = names.into_iter().rev().collect();
        Ok(Level { id, to: Some(to), parts, below, left, stat, xattrs })
    }

    /// Sets the metadata of a merged directory, and returns to its parent.
    fn leave(&mut self, level: &Level, above: Option<&mut Level>) -> Result<(), CopyStop> {
        let to = level.to()?;
        self.copier.apply(to, &level.stat, &level.xattrs, Stale::Removed)?;
        let Some(above) = above else { return Ok(()) };
        let failed = CopyStop::at("leave");
        if above.to.is_none() {
            above.to = Some(parent(to).map_err(failed)?);
        }
        for part in &level.parts {
            let Some(outer) = part.above.and_then(|it| above.parts.get_mut(it)) else { continue };
            if outer.directory.is_none() {
                outer.directory = Some(parent(part.directory()?).map_err(failed)?);
            }
        }
        Ok(())
    }

    /// Merges an entry. Returns it if it is a directory, to be walked next.
    fn entry(&mut self, level: &mut Level, name: &CStr, parts: u64) -> Result<Option<Level>, End> {
        self.copier.content.go_on()?;
        match self.lookup(level, name, parts)? {
            // Without a directory of the image there is nothing to hide.
            Some(Found::Whiteout) if level.below.is_some() => {
                self.whiteout(level, name)?;
                Ok(None)
            }
            None | Some(Found::Whiteout) => Ok(None),
            Some(Found::Files { first, others, below }) => {
                if kind(&first.stat) == FileType::Directory {
                    return self.directory(level, name, *first, others, below).map(Some);
                }
                self.file(level, name, &first, &others, below)?;
                Ok(None)
            }
        }
    }

    /// Looks a name up in all snapshots, as overlayfs does. `parts` are those that have the name.
    fn lookup(&mut self, level: &Level, name: &CStr, parts: u64) -> Result<Option<Found>, End> {
        let mut elements: Vec<Element> = Vec::new();
        let mut search = Search { target: name.to_bytes().to_vec(), is_stopped: false };
        // Next part of the parent directory, and the next layer if the target is a path.
        let (mut part, mut layer) = (0, 0);
        while !search.is_stopped {
            let is_path = search.target.first() == Some(&b'/');
            let (held, number, above) = if is_path {
                if layer >= self.layers.len() {
                    break;
                }
                layer += 1;
                (self.resolve(layer - 1, &mut search)?, layer - 1, None)
            } else {
                let Some(place) = level.parts.get(part) else { break };
                part += 1;
                if search.target == name.to_bytes() && parts & (1 << (part - 1)) == 0 {
                    continue;
                }
                layer = place.layer + 1;
                (hold_bytes(place.directory()?, &search.target)?, place.layer, Some(part - 1))
            };
            let Some(held) = held else { continue };
            let element = self.element(held, number, above)?;
            let may_be_marked =
                above.and_then(|it| level.parts.get(it)).is_some_and(|it| it.has_marked);
            let is_directory = kind(&element.stat) == FileType::Directory;
            let is_marked = may_be_marked && !is_directory && element.marks.is_whiteout;
            if Stamp::of(&element.stat).is_whiteout() || is_marked {
                search.is_stopped = true;
                if elements.is_empty() {
                    return Ok(Some(Found::Whiteout));
                }
                break;
            }
            if let Some(first) = elements.first() {
                // A directory is merged only with directories, and only a regular file has the data of another.
                let fits = match kind(&first.stat) {
                    FileType::Directory => is_directory,
                    _ => kind(&element.stat) == FileType::RegularFile,
                };
                if !fits {
                    search.is_stopped = true;
                    break;
                }
            }
            if is_directory {
                // With an opaque directory on a path, the search may have been stopped before.
                search.is_stopped |= element.marks.opaque == Opaque::Yes;
            } else {
                let is_regular = kind(&element.stat) == FileType::RegularFile;
                search.is_stopped = !(is_regular && element.marks.is_metacopy);
            }
            let is_opaque = is_directory && element.marks.opaque == Opaque::Yes;
            if (is_directory || !search.is_stopped)
                && !is_opaque
                && let Some(redirect) = &element.marks.redirect
            {
                search.redirect(redirect, 0)?;
            }
            elements.push(element);
        }
        if elements.is_empty() {
            return Ok(None);
        }
        let below = match (search.is_stopped, search.target.first()) {
            (true, _) => None,
            (false, Some(b'/')) => Some(search.target),
            (false, _) => level.below.as_ref().map(|it| join(it, &search.target)),
        };
        // No image has longer paths. All levels of a tree that a container has made deeper would each keep one.
        let below = below.filter(|path| path.len() <= PATH_MAX);
        let first = elements.remove(0);
        Ok(Some(Found::Files { first: Box::new(first), others: elements, below }))
    }

    /// Follows a path in one snapshot, up to its last name.
    fn resolve(&mut self, layer: usize, search: &mut Search) -> Result<Option<OwnedFd>, CopyStop> {
        let mut here = open_directory(self.layer(layer)?).map_err(CopyStop::at("open"))?;
        // Marks may change the path that precedes this rest.
        let mut rest = search.target.get(1..).unwrap_or_default().to_vec();
        loop {
            let mut names = rest.splitn(2, |byte| *byte == b'/');
            let name = names.next().unwrap_or_default().to_vec();
            let after = names.next().map(<[u8]>::to_vec);
            let Some(held) = hold_bytes(here.as_fd(), &name)? else { return Ok(None) };
            let Some(after) = after else { return Ok(Some(held)) };
            let element = self.element(held, layer, None)?;
            if kind(&element.stat) != FileType::Directory {
                // A whiteout, or another file: the layers below are hidden.
                search.is_stopped = true;
                return Ok(None);
            }
            if element.marks.opaque == Opaque::Yes {
                search.is_stopped = true;
            } else if let Some(redirect) = &element.marks.redirect {
                search.redirect(redirect, after.len() + 1)?;
            }
            here = open_directory(&element.held).map_err(CopyStop::at("open"))?;
            rest = after;
        }
    }

    fn directory(
        &mut self,
        level: &mut Level,
        name: &CStr,
        first: Element,
        others: Vec<Element>,
        below: Option<Vec<u8>>,
    ) -> Result<Level, End> {
        self.tally.name(&first.stat);
        let to = level.to()?;
        self.copier.directory(Place { directory: to, name })?;
        let copy = openat(to, name, DIRECTORY, Mode::empty());
        let copy = copy.map_err(CopyStop::at("open the copy of"))?;
        let id = self.index.add_directory(level.id, name);
        let mut xattrs = self.without_marks(&first.xattrs);
        let usual = level.below.as_ref().map(|it| join(it, name.to_bytes()));
        match &below {
            None if usual.is_some() => xattrs.push((self.mark(b"opaque"), b"y".to_vec())),
            Some(path) if usual.as_ref() != Some(path) => {
                xattrs.push((self.mark(b"redirect"), path.clone()));
            }
            _ => {}
        }
        self.level(id, copy, first, others, below, xattrs)
    }

    fn file(
        &mut self,
        level: &mut Level,
        name: &CStr,
        first: &Element,
        others: &[Element],
        below: Option<Vec<u8>>,
    ) -> Result<(), End> {
        let place = Place { directory: level.to()?, name };
        let is_regular = kind(&first.stat) == FileType::RegularFile;
        if !(is_regular && first.marks.is_metacopy) {
            self.tally.name(&first.stat);
            return Ok(self.share(level.id, place, first)?);
        }
        let data = others.last().filter(|it| !it.marks.is_metacopy);
        let is_linked = first.stat.stx_nlink > 1;
        let mut xattrs = self.without_marks(&first.xattrs);
        let mut redirect = None;
        let mut counted = first.stat;
        counted.stx_blocks = data.unwrap_or(first).stat.stx_blocks;
        self.tally.name(&counted);
        if data.is_none() {
            // The data is in the image.
            let below = below.ok_or(End::NoData)?;
            let usual = level.below.as_ref().map(|it| join(it, name.to_bytes()));
            // With a path, all names of the file can stay names of one file.
            redirect = (is_linked || usual.as_ref() != Some(&below)).then_some(below);
            if redirect == first.marks.redirect {
                return Ok(self.share(level.id, place, first)?);
            }
            let metacopy = self.mark(b"metacopy");
            xattrs.extend(first.xattrs.iter().filter(|it| it.0 == metacopy).cloned());
            xattrs.extend(redirect.iter().map(|it| (self.mark(b"redirect"), it.clone())));
        }
        let key = LinkKey { layer: first.layer, file: Stamp::of(&first.stat).key, redirect };
        if is_linked && self.link(level.id, place, &key)? {
            return Ok(());
        }
        self.copier.content.take_room(0)?;
        let copy = create(place).map_err(CopyStop::at("create the copy of"))?;
        // A file without data consists of a hole.
        let source = data.unwrap_or(first);
        let from = open_data(&source.held).map_err(CopyStop::at("open"))?;
        if !self.copier.data(from.as_fd(), copy.as_fd(), &source.stat)? {
            return Err(CopyStop::Changed.into());
        }
        self.copier.apply(copy.as_fd(), &first.stat, &xattrs, Stale::None)?;
        if is_linked {
            self.links.insert(key, (level.id, name.to_owned()));
        }
        Ok(())
    }

    /// Gives a file of a snapshot a name in the merged directory, or copies it.
    fn share(&mut self, id: DirectoryId, to: Place<'_>, file: &Element) -> Result<(), CopyStop> {
        if self.how == Share::Link {
            match kernel::files::link(file.held.as_fd(), to.directory, to.name) {
                Ok(NameOutcome::Now) => return Ok(()),
                Ok(NameOutcome::Taken) => {
                    return Err(CopyStop::Kernel("create the copy of", Errno::EXIST));
                }
                // The file has too many names, or the directory is on another file system.
                Err(Errno::MLINK | Errno::XDEV | Errno::PERM) => {}
                Err(errno) => return Err(CopyStop::Kernel("link the copy of", errno)),
            }
        }
        let redirect = file.marks.redirect.clone();
        let key = LinkKey { layer: file.layer, file: Stamp::of(&file.stat).key, redirect };
        let is_linked = file.stat.stx_nlink > 1;
        if is_linked && self.link(id, to, &key)? {
            return Ok(());
        }
        self.copier.file(&file.held, &file.stat, to, Writers::Rest)?;
        if is_linked {
            self.links.insert(key, (id, to.name.to_owned()));
        }
        Ok(())
    }

    /// Links a name to the copy of a file. Returns false if there is none.
    fn link(&self, id: DirectoryId, to: Place<'_>, key: &LinkKey) -> Result<bool, CopyStop> {
        match self.links.get(key) {
            None => Ok(false),
            Some(known) => {
                let linked = self.link_to(id, to, known);
                linked.map_err(CopyStop::at("link the copy of"))?;
                Ok(true)
            }
        }
    }

    fn link_to(
        &self,
        id: DirectoryId,
        to: Place<'_>,
        (directory, name): &(DirectoryId, CString),
    ) -> Result<(), Errno> {
        let other;
        let from = if *directory == id {
            to.directory
        } else {
            other = self.index.open(self.to.as_fd(), *directory)?;
            other.as_fd()
        };
        linkat(from, &**name, to.directory, to.name, AtFlags::empty())
    }

    fn whiteout(&mut self, level: &Level, name: &CStr) -> Result<(), CopyStop> {
        self.tally.report.entries += 1;
        let to = Place { directory: level.to()?, name };
        if let Some(known) = &self.whiteout {
            match self.link_to(level.id, to, known) {
                Ok(()) => return Ok(()),
                Err(Errno::MLINK | Errno::PERM) => {}
                Err(errno) => return Err(CopyStop::Kernel("link the copy of", errno)),
            }
        }
        self.tally.report.inodes += 1;
        self.copier.content.take_room(0)?;
        mknodat(to.directory, name, FileType::CharacterDevice, Mode::empty(), 0)
            .map_err(CopyStop::at("create the copy of"))?;
        self.whiteout = Some((level.id, name.to_owned()));
        Ok(())
    }

    fn mark(&self, name: &[u8]) -> Vec<u8> {
        [self.namespace.prefix().as_bytes(), name].concat()
    }

    /// Returns the xattrs without the marks that this merge decides about.
    fn without_marks(&self, xattrs: &Xattrs) -> Xattrs {
        let decided: &[&[u8]] = match self.namespace {
            XattrNamespace::Trusted => &[b"opaque", b"redirect", b"metacopy", b"whiteout"],
            // The others have no meaning.
            XattrNamespace::User => &[b"opaque", b"whiteout"],
        };
        let decided: Vec<_> = decided.iter().map(|it| self.mark(it)).collect();
        xattrs.iter().filter(|it| !decided.contains(&it.0)).cloned().collect()
    }
}

impl Search {
    /// Applies a redirect of the name that is followed by `after` bytes of the target.
    fn redirect(&mut self, redirect: &[u8], after: usize) -> Result<(), CopyStop> {
        let is_path = redirect.first() == Some(&b'/');
        let names = redirect.get(usize::from(is_path)..).unwrap_or_default();
        let mut names = names.split(|byte| *byte == b'/');
        let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
        let is_valid = names.clone().all(is_name) && (is_path || names.nth(1).is_none());
        if !is_valid {
            return Err(CopyStop::Kernel("follow the redirect of", Errno::INVAL));
        }
        let end = self.target.len().saturating_sub(after);
        let after = self.target.split_off(end);
        if is_path {
            // This continues even if a directory on the path was opaque.
            self.is_stopped = false;
            self.target.clear();
        } else {
            let start = self.target.iter().rposition(|byte| *byte == b'/').map_or(0, |it| it + 1);
            self.target.truncate(start);
        }
        self.target.extend_from_slice(redirect);
        self.target.extend_from_slice(&after);
        Ok(())
    }
}

impl Part {
    fn directory(&self) -> Result<BorrowedFd<'_>, CopyStop> {
        let directory = self.directory.as_ref().map(|it| it.as_fd());
        directory.ok_or(CopyStop::Kernel("open", Errno::BADF))
    }
}

impl Level {
    fn to(&self) -> Result<BorrowedFd<'_>, CopyStop> {
        let to = self.to.as_ref().map(|it| it.as_fd());
        to.ok_or(CopyStop::Kernel("open the copy of", Errno::BADF))
    }
}

/// Closes directories that are reached by `..` later.
fn close_outer(levels: &mut [Level]) {
    let Some(outer) = levels.len().checked_sub(OPEN) else { return };
    let [outer, inner, ..] = levels.get_mut(outer..).unwrap_or_default() else { return };
    outer.to = None;
    for above in inner.parts.iter().filter_map(|it| it.above) {
        if let Some(part) = outer.parts.get_mut(above) {
            part.directory = None;
        }
    }
}

/// Appends a name to a path.
fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if path.ends_with(b"/") { b"" } else { b"/" };
    [path, slash, name].concat()
}

/// Opens a name. `None` if it does not exist.
fn hold_bytes(directory: BorrowedFd<'_>, name: &[u8]) -> Result<Option<OwnedFd>, CopyStop> {
    let failed = CopyStop::at("open");
    let name = CString::new(name).map_err(|_nul| failed(Errno::INVAL))?;
    match hold(directory, &name) {
        Err(Errno::NOENT | Errno::NAMETOOLONG) => Ok(None),
        held => held.map(Some).map_err(failed),
    }
}
