//! The xattrs of an image: its sets, the pairs of name and value that are shared, and their encoding.
//!
//! Inodes with equal sets in the tree share a set. Xattrs that differ between files, which locate a file's bytes, are
//! not part of a set: [`FilePairs`] adds them to the set's pairs during encoding. They are counted by the numbers of
//! the tree's strings that contain object ids and locations.

pub(super) mod prefixes;

use std::borrow::Cow;
use std::cmp::Ordering;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use std::hash::BuildHasher as _;
use zerocopy::IntoBytes as _;
use zerocopy::little_endian::U32;

use super::pair::{
    Name, OverlayNames, Value, entry_size, long_prefix_size, object_of_path, put_entry,
};
use crate::erofs::layout::RawXattrHeader;
use crate::tree::{External, StoredLocation, StringId, Tree};
use crate::verity::VerityDigest;

/// The names of POSIX ACLs.
pub(super) const POSIX_ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Maximum number of shared xattrs of an inode. `EROFS_MAX_SHARED_XATTRS` of erofs-utils.
const SHARED_MAX: usize = 128;

/// The id of a set of xattrs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SetId(u32);

impl SetId {
    /// The empty set.
    pub(super) const NONE: Self = Self(0);
    /// In side tables: a set that is not made yet.
    pub(super) const UNKNOWN: Self = Self(u32::MAX);
}

#[derive(Debug)]
struct Pair<'a> {
    name: u32,
    /// Offset in the table of shared pairs in bytes, if the pair is shared.
    shared: Option<u32>,
    uses: u64,
    value: &'a [u8],
}

#[derive(Debug, Clone, Copy)]
struct Set {
    /// Range in `members`.
    start: u32,
    end: u32,
    /// Positions in `members` at which a metacopy and a redirect would be inserted.
    metacopy: u32,
    redirect: u32,
    uses: u64,
}

/// The xattrs of an external file in addition to its set: a metacopy and possibly a redirect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilePairs {
    object: Option<StringId>,
    place: StoredLocation,
}

impl FilePairs {
    pub(super) const fn for_external(external: External) -> Self {
        Self { object: external.object, place: external.place }
    }

    /// Returns the lengths in bytes of the metacopy and the redirect, if there is one.
    pub(super) fn value_lengths(self, tree: &Tree) -> (usize, Option<usize>) {
        (self.metacopy(tree).len(), self.redirect(tree).map(Value::len))
    }

    fn metacopy(self, tree: &Tree) -> Value<'_> {
        self.object.map_or(Value::Bytes(&[]), |object| Value::Metacopy(tree.string(object)))
    }

    fn redirect(self, tree: &Tree) -> Option<Value<'_>> {
        match (self.place, self.object) {
            (StoredLocation::Object, Some(object)) => Some(Value::Object(tree.string(object))),
            (StoredLocation::Path(path), _) => Some(Value::Path(tree.string(path))),
            (StoredLocation::Object | StoredLocation::None, _) => None,
        }
    }
}

/// Number of uses of a string as a metacopy's digest, a redirect's object and a redirect's path, up to [`MANY`].
#[derive(Debug, Clone, Copy, Default)]
struct StringUses {
    metacopy: u8,
    object: u8,
    path: u8,
}

/// More than one use.
const MANY: u8 = 2;

/// A shared pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum SharedKey {
    Pair(u32),
    NoDigest,
    Metacopy(StringId),
    Object(StringId),
    Path(StringId),
}

/// All xattrs of an image.
#[derive(Debug)]
pub(super) struct XattrTable<'a> {
    tree: &'a Tree,
    hasher: DefaultHashBuilder,
    names: Vec<Name<'a>>,
    name_table: HashTable<u32>,
    metacopy: Name<'static>,
    redirect: Name<'static>,
    pairs: Vec<Pair<'a>>,
    pair_table: HashTable<u32>,
    members: Vec<u32>,
    sets: Vec<Set>,
    strings: Vec<StringUses>,
    no_digest: u8,
    /// Offsets in bytes of the shared pairs of files in the table of shared pairs.
    shared_files: HashMap<SharedKey, u32>,
    /// The table of shared pairs, in order.
    shared: Vec<SharedKey>,
    shared_bytes: u64,
}

impl<'a> XattrTable<'a> {
    /// Creates an empty collection for an image of `tree`.
    pub(super) fn new(tree: &'a Tree, records: OverlayNames) -> Self {
        let empty = Set { start: 0, end: 0, metacopy: 0, redirect: 0, uses: 0 };
        Self {
            tree,
            hasher: DefaultHashBuilder::default(),
            names: Vec::new(),
            name_table: HashTable::new(),
            metacopy: Name::new(Cow::Borrowed(records.metacopy)),
            redirect: Name::new(Cow::Borrowed(records.redirect)),
            pairs: Vec::new(),
            pair_table: HashTable::new(),
            members: Vec::new(),
            sets: vec![empty],
            strings: vec![StringUses::default(); tree.strings_bound()],
            no_digest: 0,
            shared_files: HashMap::new(),
            shared: Vec::new(),
            shared_bytes: 0,
        }
    }

    /// Adds a set of pairs with distinct names, in any order. Returns `None` if the format cannot hold as many.
    pub(super) fn add(&mut self, pairs: Vec<(Cow<'a, [u8]>, &'a [u8])>) -> Option<SetId> {
        if pairs.is_empty() {
            return Some(SetId::NONE);
        }
        let start = u32::try_from(self.members.len()).ok()?;
        for (name, value) in pairs {
            let name = self.name(name)?;
            let pair = self.pair(name, value)?;
            self.members.push(pair);
        }
        let Self { members, pairs, names, .. } = self;
        let full = |pair: u32| &*names[pairs[pair as usize].name as usize].full;
        let added = &mut members[start as usize..];
        added.sort_unstable_by(|a, b| full(*a).cmp(full(*b)));
        let before = |name: &[u8]| {
            u32::try_from(added.partition_point(|pair| full(*pair) < name))
                .ok()
                .map(|at| start + at)
        };
        let set = Set {
            metacopy: before(self.metacopy.full.as_ref())?,
            redirect: before(self.redirect.full.as_ref())?,
            start,
            end: u32::try_from(members.len()).ok()?,
            uses: 0,
        };
        let id = u32::try_from(self.sets.len()).ok()?;
        self.sets.push(set);
        Some(SetId(id))
    }

    fn name(&mut self, name: Cow<'a, [u8]>) -> Option<u32> {
        let Self { names, name_table, hasher, .. } = self;
        let hash = hasher.hash_one(&*name);
        if let Some(&id) = name_table.find(hash, |&id| names[id as usize].full == name) {
            return Some(id);
        }
        let id = u32::try_from(names.len()).ok()?;
        names.push(Name::new(name));
        name_table.insert_unique(hash, id, |&id| hasher.hash_one(&*names[id as usize].full));
        Some(id)
    }

    fn pair(&mut self, name: u32, value: &'a [u8]) -> Option<u32> {
        let Self { pairs, pair_table, hasher, .. } = self;
        let key = |pair: &Pair<'a>| (pair.name, pair.value);
        let hash = hasher.hash_one((name, value));
        if let Some(&id) = pair_table.find(hash, |&id| key(&pairs[id as usize]) == (name, value)) {
            return Some(id);
        }
        let id = u32::try_from(pairs.len()).ok()?;
        pairs.push(Pair { name, shared: None, uses: 0, value });
        pair_table.insert_unique(hash, id, |&id| hasher.hash_one(key(&pairs[id as usize])));
        Some(id)
    }

    /// Counts an inode with this set.
    pub(super) fn count(&mut self, set: SetId) {
        self.sets[set.0 as usize].uses += 1;
    }

    /// Counts an inode with these pairs in addition to its set.
    pub(super) fn count_file(&mut self, file: FilePairs) {
        let more = |count: &mut u8| *count = MANY.min(*count + 1);
        match file.object {
            Some(object) => more(&mut self.strings[object.index()].metacopy),
            None => more(&mut self.no_digest),
        }
        match (file.place, file.object) {
            (StoredLocation::Object, Some(object)) => {
                more(&mut self.strings[object.index()].object);
            }
            (StoredLocation::Path(path), _) => more(&mut self.strings[path.index()].path),
            (StoredLocation::Object | StoredLocation::None, _) => {}
        }
    }

    /// Whether a counted inode has an xattr of this name.
    pub(super) fn has_name(&self, name: &[u8]) -> bool {
        let used = self.sets.iter().filter(|set| set.uses > 0);
        let mut members = used.flat_map(|set| &self.members[set.start as usize..set.end as usize]);
        members.any(|pair| *self.names[self.pairs[*pair as usize].name as usize].full == *name)
    }

    /// Whether a counted inode has an xattr.
    pub(super) fn has_any(&self) -> bool {
        self.sets.iter().any(|set| set.uses > 0 && set.start < set.end)
    }

    /// Turns whole names into long prefixes where that makes the image smaller. Must be called after all inodes are
    /// counted and before [`share`](Self::share). `add` takes a short prefix and the rest of the name, and returns
    /// the number of the long prefix, or `None` if there are too many.
    pub(super) fn shorten(&mut self, mut add: impl FnMut(u8, &[u8]) -> Option<u8>) {
        let mut used = vec![false; self.pairs.len()];
        for set in self.sets.iter().filter(|set| set.uses > 0) {
            for pair in &self.members[set.start as usize..set.end as usize] {
                used[*pair as usize] = true;
            }
        }
        // Each pair is written once: after the inode if only one inode has it, or else in the table of shared pairs.
        let mut saved = vec![0; self.names.len()];
        for (pair, _) in self.pairs.iter().zip(used).filter(|(_, used)| *used) {
            let (rest, value) = (self.names[pair.name as usize].rest().len(), pair.value.len());
            let padded = |bytes: usize| bytes.next_multiple_of(size_of::<u32>());
            saved[pair.name as usize] += padded(rest + value) - padded(value);
        }
        let mut named: Vec<_> = saved.into_iter().zip(&mut self.names).collect();
        named.sort_unstable_by(|(a, name), (b, other)| b.cmp(a).then(name.full.cmp(&other.full)));
        for (saved, name) in named {
            if saved > long_prefix_size(name.rest())
                && let Some(number) = add(name.index(), name.rest())
            {
                name.set_long_prefix(number);
            }
        }
    }

    /// Decides which pairs are shared, after all inodes are counted. `files` are the counted files; they are only
    /// read in the rare case that one file's path is the object path of another. Returns `None` if the format cannot
    /// hold as much.
    pub(super) fn share(&mut self, files: impl Iterator<Item = FilePairs>) -> Option<()> {
        for set in &self.sets {
            for pair in &self.members[set.start as usize..set.end as usize] {
                self.pairs[*pair as usize].uses += set.uses;
            }
        }
        self.pair_table = HashTable::new();
        self.name_table = HashTable::new();
        self.count_object_paths(files);

        let mut shared = Vec::new();
        for (id, pair) in (0..).zip(&self.pairs) {
            if pair.uses > 1 {
                shared.push(SharedKey::Pair(id));
            }
        }
        if self.no_digest == MANY {
            shared.push(SharedKey::NoDigest);
        }
        for (id, uses) in (0..).map(StringId::new).zip(&self.strings) {
            if uses.metacopy == MANY {
                shared.push(SharedKey::Metacopy(id));
            }
            if uses.object == MANY {
                shared.push(SharedKey::Object(id));
            }
            if uses.path == MANY {
                shared.push(SharedKey::Path(id));
            }
        }
        shared.sort_unstable_by(|a, b| self.cmp_shared(*b, *a));

        let mut size = 0_u64;
        let mut last = None;
        for key in shared {
            let at = match last {
                // A path and the object with that path are the same pair.
                Some((other, at)) if self.cmp_shared(other, key).is_eq() => at,
                _ => {
                    let at = u32::try_from(size).ok()?;
                    let (name, value) = self.content(key);
                    size += entry_size(name, value);
                    self.shared.push(key);
                    at
                }
            };
            match key {
                SharedKey::Pair(pair) => self.pairs[pair as usize].shared = Some(at),
                _ => {
                    self.shared_files.insert(key, at);
                }
            }
            last = Some((key, at));
        }
        self.shared_bytes = size;
        Some(())
    }

    /// Finds paths that are the object paths of other files, and counts both as shared.
    fn count_object_paths(&mut self, files: impl Iterator<Item = FilePairs>) {
        let mut paths = HashMap::new();
        for (id, uses) in (0..).map(StringId::new).zip(&self.strings) {
            if uses.path > 0
                && let Some(digest) = object_of_path(self.tree.string(id))
            {
                paths.insert(digest, id);
            }
        }
        if paths.is_empty() {
            return;
        }
        for file in files {
            if let (StoredLocation::Object, Some(object)) = (file.place, file.object)
                && let Ok(digest) = VerityDigest::from_bytes(self.tree.string(object))
                && let Some(path) = paths.get(&digest)
            {
                self.strings[object.index()].object = MANY;
                self.strings[path.index()].path = MANY;
            }
        }
    }

    fn cmp_shared(&self, a: SharedKey, b: SharedKey) -> Ordering {
        let ((a_name, a_value), (b_name, b_value)) = (self.content(a), self.content(b));
        a_name.full.cmp(&b_name.full).then_with(|| a_value.cmp(b_value))
    }

    fn content(&self, key: SharedKey) -> (&Name<'_>, Value<'_>) {
        match key {
            SharedKey::Pair(pair) => {
                let Pair { name, value, .. } = self.pairs[pair as usize];
                (&self.names[name as usize], Value::Bytes(value))
            }
            SharedKey::NoDigest => (&self.metacopy, Value::Bytes(&[])),
            SharedKey::Metacopy(digest) => {
                (&self.metacopy, Value::Metacopy(self.tree.string(digest)))
            }
            SharedKey::Object(digest) => (&self.redirect, Value::Object(self.tree.string(digest))),
            SharedKey::Path(path) => (&self.redirect, Value::Path(self.tree.string(path))),
        }
    }

    /// Returns the size of the table of shared pairs in bytes.
    pub(super) const fn shared_bytes(&self) -> u64 {
        self.shared_bytes
    }

    /// Returns one function for each shared pair, which writes that pair's entry.
    pub(super) fn shared_entries(&self) -> impl Iterator<Item = impl Fn(&mut Vec<u8>)> {
        self.shared.iter().map(|key| {
            let (name, value) = self.content(*key);
            move |out: &mut Vec<u8>| put_entry(name, value, out)
        })
    }

    /// Returns the pairs of an inode, ordered by name.
    fn pairs_of(
        &self,
        set: SetId,
        file: Option<FilePairs>,
    ) -> impl Iterator<Item = (&Name<'a>, Value<'_>, Option<u32>)> {
        let Set { start, end, metacopy, redirect, .. } = self.sets[set.0 as usize];
        let range = |from: u32, to: u32| {
            self.members[from as usize..to as usize].iter().map(|pair| {
                let Pair { name, shared, value, .. } = self.pairs[*pair as usize];
                (&self.names[name as usize], Value::Bytes(value), shared)
            })
        };
        let metacopy_pair = file.map(move |file| {
            let shared = match file.object {
                None if self.no_digest == MANY => Some(SharedKey::NoDigest),
                Some(object) if self.strings[object.index()].metacopy == MANY => {
                    Some(SharedKey::Metacopy(object))
                }
                _ => None,
            };
            (&self.metacopy, file.metacopy(self.tree), shared.map(|key| self.shared_files[&key]))
        });
        let redirect_pair = file.and_then(move |file| {
            let value = file.redirect(self.tree)?;
            let shared = match (file.place, file.object) {
                (StoredLocation::Path(path), _) if self.strings[path.index()].path == MANY => {
                    Some(SharedKey::Path(path))
                }
                (StoredLocation::Object, Some(object))
                    if self.strings[object.index()].object == MANY =>
                {
                    Some(SharedKey::Object(object))
                }
                _ => None,
            };
            Some((&self.redirect, value, shared.map(|key| self.shared_files[&key])))
        });
        range(start, metacopy)
            .chain(metacopy_pair)
            .chain(range(metacopy, redirect))
            .chain(redirect_pair)
            .chain(range(redirect, end))
    }

    /// Returns the size in bytes of the xattrs after an inode.
    pub(super) fn size_of(&self, set: SetId, file: Option<FilePairs>) -> u64 {
        let (mut size, mut references) = (0, 0);
        for (name, value, shared) in self.pairs_of(set, file) {
            if size == 0 {
                size = size_of::<RawXattrHeader>() as u64;
            }
            if shared.is_some() && references < SHARED_MAX {
                references += 1;
                size += size_of::<u32>() as u64;
            } else {
                size += entry_size(name, value);
            }
        }
        size
    }

    /// Writes the xattrs after an inode. `first_id` is the id at the start of the table of shared pairs.
    pub(super) fn put(
        &self,
        set: SetId,
        file: Option<FilePairs>,
        first_id: u32,
        out: &mut Vec<u8>,
    ) {
        let at = out.len();
        let mut filter = 0;
        let mut references = 0_u8;
        let mut inline = false;
        out.resize(at + size_of::<RawXattrHeader>(), 0);
        for (name, _, shared) in self.pairs_of(set, file) {
            filter |= name.bit;
            match shared {
                Some(offset) if usize::from(references) < SHARED_MAX => {
                    references += 1;
                    out.extend_from_slice(U32::new(first_id + offset / 4).as_bytes());
                }
                _ => inline = true,
            }
        }
        if filter == 0 {
            out.truncate(at);
            return;
        }
        let header = RawXattrHeader {
            h_name_filter: U32::new(!filter),
            h_shared_count: references,
            h_reserved2: [0; 7],
        };
        out[at..at + size_of::<RawXattrHeader>()].copy_from_slice(header.as_bytes());
        if inline {
            let mut references = 0;
            for (name, value, shared) in self.pairs_of(set, file) {
                if shared.is_some() && references < SHARED_MAX {
                    references += 1;
                } else {
                    put_entry(name, value, out);
                }
            }
        }
    }
}
