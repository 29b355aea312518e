//! A model of a disk that loses data which was not synced.
//!
//! POSIX promises little: `fsync` of a file keeps its bytes but not its name, `fsync` of a directory keeps the names
//! in it, and `syncfs` keeps everything. All other changes may or may not be present after a crash, in any
//! combination, and bytes may be missing or zero. A single rename is atomic.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::tests::Random;
use crate::trace::Change;

/// Mode bit that marks files that are not synced.
const STICKY: u32 = 0o1000;

/// The bytes of a file, as they were written and as they were synced.
#[derive(Debug, Clone, Default)]
struct File {
    data: Vec<u8>,
    synced: Vec<u8>,
    /// Whether the file has the mark of files that are not synced, now and in the synced inode. A name never leads to an
    /// inode that was not written, so a file with a name has the mark that it was made with, or a later state.
    is_marked: bool,
    is_marked_on_disk: bool,
    /// Freed ranges of synced bytes. Each may or may not read as zeros after a crash.
    holes: Vec<std::ops::Range<usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    Directory,
    File(usize),
}

/// A change of names that is not synced.
#[derive(Debug, Clone)]
enum Pending {
    Name {
        remove: Option<PathBuf>,
        add: Option<(PathBuf, Node)>,
    },
    /// Two names, each with the node that it has afterwards.
    Exchange([(PathBuf, Node); 2]),
}

impl Pending {
    /// Whether the change is one of this directory.
    fn is_in(&self, directory: &Path) -> bool {
        let is_in = |path: &Path| path.parent() == Some(directory);
        match self {
            Self::Name { remove, add } => {
                let removed = remove.as_deref().is_some_and(is_in);
                removed || add.as_ref().is_some_and(|it| is_in(&it.0))
            }
            Self::Exchange(names) => names.iter().any(|it| is_in(&it.0)),
        }
    }
}

type Names = BTreeMap<PathBuf, Node>;

/// The disk after some changes: synced data, and unsynced changes.
#[derive(Debug, Clone, Default)]
pub(in crate::tests) struct Disk {
    files: Vec<File>,
    /// Names as a running process sees them.
    now: Names,
    /// Names that are synced.
    kept: Names,
    pending: Vec<Pending>,
}

/// A possible state after a crash, to be written to a real directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tests) struct Crashed(BTreeMap<PathBuf, Option<CrashedFile>>);

/// A file after a crash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct CrashedFile {
    bytes: Vec<u8>,
    is_marked: bool,
}

/// The state of unsynced bytes after a crash.
#[derive(Debug, Clone, Copy)]
enum Bytes {
    Synced,
    Zeros,
    All,
    Any,
}

impl Disk {
    /// Loads a real directory, with everything synced.
    pub(in crate::tests) fn from_directory(root: &Path) -> Self {
        let mut disk = Self::default();
        disk.load(root, Path::new(""));
        disk.kept.clone_from(&disk.now);
        disk
    }

    fn load(&mut self, root: &Path, directory: &Path) {
        for entry in fs::read_dir(root.join(directory)).unwrap() {
            let entry = entry.unwrap();
            let path = directory.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                self.now.insert(path.clone(), Node::Directory);
                self.load(root, &path);
            } else if !entry.file_type().unwrap().is_symlink() {
                let data = fs::read(root.join(&path)).unwrap();
                let mode = entry.metadata().unwrap().permissions().mode();
                let is_marked = mode & STICKY != 0;
                self.now.insert(path, Node::File(self.files.len()));
                self.files.push(File {
                    synced: data.clone(),
                    data,
                    is_marked,
                    is_marked_on_disk: is_marked,
                    holes: Vec::new(),
                });
            }
        }
    }

    /// Applies a recorded change with paths below `root`.
    pub(in crate::tests) fn apply(&mut self, root: &Path, change: &Change) {
        let inside = |path: &Path| path.strip_prefix(root).unwrap().to_owned();
        match change {
            Change::MakeDirectory(path) => self.name(None, Some((inside(path), Node::Directory))),
            Change::Create(path) | Change::CreateUnsynced(path) => {
                let file = Node::File(self.files.len());
                let is_marked = matches!(change, Change::CreateUnsynced(_));
                let made = File { is_marked, is_marked_on_disk: is_marked, ..File::default() };
                self.files.push(made);
                self.name(None, Some((inside(path), file)));
            }
            Change::RemoveMark(path) => self.file(&inside(path)).is_marked = false,
            Change::Write(path, bytes) => {
                let file = self.file(&inside(path));
                file.data.extend_from_slice(bytes);
            }
            Change::WriteAt(path, offset, bytes) => {
                let at = usize::try_from(*offset).unwrap();
                self.file(&inside(path)).data[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Change::Lengthen(path, bytes) => {
                self.file(&inside(path)).data.resize(usize::try_from(*bytes).unwrap(), 0);
            }
            Change::Punch(path, from, until) => {
                let range = usize::try_from(*from).unwrap()..usize::try_from(*until).unwrap();
                let file = self.file(&inside(path));
                file.data[range.clone()].fill(0);
                file.holes.push(range);
            }
            Change::Rename(from, to) => {
                let (from, to) = (inside(from), inside(to));
                let node = self.now[&from];
                self.name(Some(from), Some((to, node)));
            }
            Change::Exchange(one, other) => {
                let (one, other) = (inside(one), inside(other));
                let (node, other_node) = (self.now[&one], self.now[&other]);
                self.change_names(Pending::Exchange([(one, other_node), (other, node)]));
            }
            Change::Unlink(path) | Change::RemoveDirectory(path) => {
                self.name(Some(inside(path)), None);
            }
            Change::SyncFile(path) => {
                let file = self.file(&inside(path));
                file.synced.clone_from(&file.data);
                file.is_marked_on_disk = file.is_marked;
            }
            Change::SyncDirectory(path) => {
                let directory = inside(path);
                for change in std::mem::take(&mut self.pending) {
                    // Both names of a rename or an exchange become durable together, when the directory of either is
                    // synced.
                    if change.is_in(&directory) {
                        do_pending(&mut self.kept, &change);
                    } else {
                        self.pending.push(change);
                    }
                }
            }
            Change::SyncEverything => {
                self.pending.clear();
                self.kept.clone_from(&self.now);
                for file in &mut self.files {
                    file.synced.clone_from(&file.data);
                    file.is_marked_on_disk = file.is_marked;
                    file.holes.clear();
                }
            }
        }
    }

    fn file(&mut self, path: &Path) -> &mut File {
        match self.now[path] {
            Node::File(number) => &mut self.files[number],
            Node::Directory => panic!("{} is a directory", path.display()),
        }
    }

    fn name(&mut self, remove: Option<PathBuf>, add: Option<(PathBuf, Node)>) {
        self.change_names(Pending::Name { remove, add });
    }

    fn change_names(&mut self, change: Pending) {
        do_pending(&mut self.now, &change);
        self.pending.push(change);
    }

    /// Returns some of the states that a crash at this moment may leave: the extremes, and `samples` mixtures.
    pub(in crate::tests) fn crashes(&self, samples: u64, seed: u64) -> BTreeSet<Crashed> {
        let mut found = BTreeSet::new();
        let mut random = Random::new(seed + 1);
        found.insert(self.crash(&mut |_| false, Bytes::Synced, &mut random));
        for bytes in [Bytes::Synced, Bytes::Zeros, Bytes::All] {
            found.insert(self.crash(&mut |_| true, bytes, &mut random));
        }
        // Keeps the first half of the changes, or the second half, which covers both orders of a journal.
        let half = self.pending.len() / 2;
        found.insert(self.crash(&mut |at| at < half, Bytes::Synced, &mut random));
        found.insert(self.crash(&mut |at| at >= half, Bytes::Synced, &mut random));
        for _ in 0..samples {
            let mut choice = random.clone();
            random.below(2);
            let chance = 1 + choice.below(9);
            let mut keep = |_| choice.below(10) < chance;
            found.insert(self.crash(&mut keep, Bytes::Any, &mut random));
        }
        found
    }

    fn crash(
        &self,
        keep: &mut dyn FnMut(usize) -> bool,
        bytes: Bytes,
        random: &mut Random,
    ) -> Crashed {
        let mut names = self.kept.clone();
        for (at, change) in self.pending.iter().enumerate() {
            if keep(at) {
                do_pending(&mut names, change);
            }
        }
        let mut found = BTreeMap::new();
        for (path, node) in names {
            // A name is gone if its directory is gone.
            let parent = path.parent().unwrap();
            if parent != Path::new("") && !matches!(found.get(parent), Some(None)) {
                continue;
            }
            found.insert(
                path,
                match node {
                    Node::Directory => None,
                    Node::File(number) => Some(self.files[number].crash(bytes, random)),
                },
            );
        }
        Crashed(found)
    }
}

impl File {
    fn crash(&self, bytes: Bytes, random: &mut Random) -> CrashedFile {
        let is_marked = match bytes {
            _ if self.is_marked == self.is_marked_on_disk => self.is_marked,
            Bytes::Synced => self.is_marked_on_disk,
            Bytes::Zeros | Bytes::All => self.is_marked,
            Bytes::Any => random.below(2) == 0,
        };
        CrashedFile { bytes: self.crashed_bytes(bytes, random), is_marked }
    }

    fn crashed_bytes(&self, bytes: Bytes, random: &mut Random) -> Vec<u8> {
        if self.data == self.synced {
            return self.data.clone();
        }
        if !self.holes.is_empty() {
            let mut found = self.synced.clone();
            for hole in &self.holes {
                let is_there = match bytes {
                    Bytes::Synced => false,
                    Bytes::Zeros | Bytes::All => true,
                    Bytes::Any => random.below(2) == 0,
                };
                if is_there {
                    found[hole.clone()].fill(0);
                }
            }
            return found;
        }
        match bytes {
            Bytes::Synced => self.synced.clone(),
            Bytes::Zeros => vec![0; self.data.len()],
            Bytes::All => self.data.clone(),
            Bytes::Any => match random.below(4) {
                0 => self.synced.clone(),
                1 => vec![0; self.data.len()],
                2 => self.data.clone(),
                // The bytes were overwritten in place, so the length does not change.
                _ if self.data.len() == self.synced.len() => {
                    let (half, all) = (self.data.len() / 2, self.data.len());
                    [&self.data[..half], &self.synced[half..all]].concat()
                }
                _ => self.data[..self.data.len() / 2].to_vec(),
            },
        }
    }
}

/// Changes names. A directory is moved together with its contents.
fn do_pending(names: &mut Names, change: &Pending) {
    match change {
        Pending::Name { remove, add } => {
            let inner = remove.as_ref().map(|it| take(names, it)).unwrap_or_default();
            if let Some((to, node)) = add {
                put(names, to, *node, inner);
            }
        }
        Pending::Exchange([(one, one_node), (other, other_node)]) => {
            let (inner, other_inner) = (take(names, one), take(names, other));
            put(names, one, *one_node, other_inner);
            put(names, other, *other_node, inner);
        }
    }
}

/// Removes a name, and returns the contents of its directory by their relative paths.
fn take(names: &mut Names, from: &Path) -> Vec<(PathBuf, Node)> {
    names.remove(from);
    let below = names.range(from.to_owned()..).map(|it| it.0.clone());
    let below: Vec<_> = below.take_while(|path| path.starts_with(from)).collect();
    let taken = below.into_iter().map(|path| {
        let node = names.remove(&path).unwrap();
        (path.strip_prefix(from).unwrap().to_owned(), node)
    });
    taken.collect()
}

fn put(names: &mut Names, to: &Path, node: Node, inner: Vec<(PathBuf, Node)>) {
    names.insert(to.to_owned(), node);
    names.extend(inner.into_iter().map(|(path, node)| (to.join(path), node)));
}

impl Crashed {
    /// Returns the state without the contents of work directories, which are not used after a crash.
    pub(in crate::tests) fn published(&self) -> Self {
        let outside = |path: &Path| path.components().count() < 3 || !path.starts_with("tmp");
        Self(
            self.0
                .iter()
                .filter(|it| outside(it.0))
                .map(|it| (it.0.clone(), it.1.clone()))
                .collect(),
        )
    }

    /// Returns the state as it is found in the next boot: the store's record of the boot is of another one.
    pub(in crate::tests) fn in_next_boot(mut self) -> Self {
        self.0.remove(Path::new("boot"));
        self
    }

    /// Writes the state to an empty directory.
    pub(in crate::tests) fn restore(&self, root: &Path) {
        for (path, node) in &self.0 {
            let path = root.join(path);
            match node {
                None => fs::create_dir(path).unwrap(),
                Some(CrashedFile { bytes, is_marked }) => {
                    fs::write(&path, bytes).unwrap();
                    let mode = if *is_marked { 0o400 | STICKY } else { 0o444 };
                    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
                }
            }
        }
    }
}

mod tests {
    use std::path::{Path, PathBuf};

    use super::{Crashed, Disk};
    use crate::trace::Change;

    /// Checks the possible contents of a file after the changes and a crash. `-` means that the file does not exist.
    fn check(changes: &[Change], file: &str, expected: &[&str]) {
        let mut disk = Disk::default();
        for change in changes {
            disk.apply(Path::new("/"), change);
        }
        let found = disk.crashes(200, 1).into_iter().map(|Crashed(found)| {
            found.get(Path::new(file)).map_or("-".to_owned(), |bytes| {
                let text = String::from_utf8(bytes.clone().unwrap().bytes).unwrap();
                text.replace('\0', "0")
            })
        });
        let found: std::collections::BTreeSet<_> = found.collect();
        let expected: std::collections::BTreeSet<_> =
            expected.iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{changes:?}");
    }

    #[test]
    fn the_model_loses_what_was_not_synced() {
        let path = |text: &str| PathBuf::from(text);
        let create = Change::Create(path("/a"));
        let write = Change::Write(path("/a"), b"text".to_vec());
        let rename = Change::Rename(path("/a"), path("/b"));
        let file = Change::SyncFile(path("/a"));
        let names = Change::SyncDirectory(path("/"));
        let all = Change::SyncEverything;
        let new = [create, write];
        let then = |more: &[&Change]| {
            let more: Vec<_> = more.iter().map(|it| (*it).clone()).collect();
            [&new[..], &more[..]].concat()
        };
        check(&then(&[]), "a", &["-", "", "0000", "text", "te"]);
        check(&then(&[&file]), "a", &["-", "text"]);
        check(&then(&[&names]), "a", &["", "0000", "text", "te"]);
        check(&then(&[&file, &names]), "a", &["text"]);
        check(&then(&[&all]), "a", &["text"]);
        check(&then(&[&all, &rename]), "a", &["-", "text"]);
        check(&then(&[&all, &rename]), "b", &["-", "text"]);
        check(&then(&[&all, &rename, &names]), "b", &["text"]);
        check(&then(&[&rename, &names]), "b", &["", "0000", "text", "te"]);
    }

    /// Two directories, each with a file, exchange their names.
    #[test]
    fn an_exchange_in_the_model_is_whole_or_not_made() {
        let path = |text: &str| PathBuf::from(text);
        let file = |name: &str, text: &str| {
            [Change::Create(path(name)), Change::Write(path(name), text.as_bytes().to_vec())]
        };
        let folders = ["/a", "/b", "/b/in"].map(|it| Change::MakeDirectory(path(it)));
        let made = [&folders[..], &file("/a/file", "one"), &file("/b/in/file", "two")].concat();
        let then = |more: &[Change]| [&made[..], &[Change::SyncEverything], more].concat();
        let exchange = Change::Exchange(path("/a"), path("/b"));
        for sync in [None, Some("/"), Some("/a"), Some("/b")] {
            let is_kept = sync == Some("/");
            let changes = match sync {
                None => then(std::slice::from_ref(&exchange)),
                Some(at) => then(&[exchange.clone(), Change::SyncDirectory(path(at))]),
            };
            let mut disk = Disk::default();
            changes.iter().for_each(|it| disk.apply(Path::new("/"), it));
            let found = disk.crashes(50, 1);
            let old = ["a", "a/file", "b", "b/in", "b/in/file"];
            let new = ["a", "a/in", "a/in/file", "b", "b/file"];
            let texts = |Crashed(found): &Crashed| {
                let of = |name: &str| found.get(Path::new(name)).cloned().flatten();
                let text = |name| of(name).map(|it| String::from_utf8(it.bytes).unwrap());
                let texts = ["a/file", "b/in/file", "a/in/file", "b/file"].map(text);
                texts.map(Option::unwrap_or_default).join(",")
            };
            let seen: Vec<_> = found
                .iter()
                .map(|it| {
                    let names: Vec<_> = it.0.keys().map(|it| it.to_str().unwrap()).collect();
                    (names, texts(it))
                })
                .collect();
            let (old, new) =
                ((old.to_vec(), "one,two,,".to_owned()), (new.to_vec(), ",,two,one".to_owned()));
            let expect = if is_kept { vec![new] } else { vec![old, new] };
            assert_eq!(seen, expect, "{sync:?}");
        }
    }
}
