//! Interns byte strings: each is stored once and identified by a small number.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher as _;

/// The number of a string in one tree. Equal strings have equal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StringId(pub(super) u32);

impl StringId {
    pub(crate) const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Returns a number below [`super::Tree::strings_bound`], for side tables.
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Byte strings, each stored once. Number 0 is the empty string.
#[derive(Debug, Clone)]
pub(super) struct Strings {
    bytes: Vec<u8>,
    /// The end of each string in `bytes`, which is the start of the next string.
    ends: Vec<u32>,
}

impl Strings {
    pub(super) fn get(&self, id: u32) -> &[u8] {
        let at = id as usize;
        let start = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        &self.bytes[start..self.ends[at] as usize]
    }

    /// Adds a string without looking for an equal one; `None` beyond 4 GiB of strings or 2^32 strings.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Option<u32> {
        let id = u32::try_from(self.ends.len()).ok()?;
        let end = u32::try_from(self.bytes.len() + bytes.len()).ok()?;
        self.bytes.extend_from_slice(bytes);
        self.ends.push(end);
        Some(id)
    }

    /// Returns one more than the largest number.
    pub(super) fn bound(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<u32>()
    }
}

/// The strings, and a hash table that finds their numbers.
#[derive(Debug)]
pub(super) struct Interner {
    strings: Strings,
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Interner {
    pub(super) fn new() -> Self {
        Self {
            strings: Strings { bytes: Vec::new(), ends: vec![0] },
            table: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
        }
    }

    pub(super) fn lookup(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.is_empty() {
            return Some(0);
        }
        let hash = self.hasher.hash_one(bytes);
        self.table.find(hash, |&id| self.strings.get(id) == bytes).copied()
    }

    /// Returns the number of `bytes`, and adds them if they are new; `None` beyond 4 GiB of strings or 2^32 strings.
    pub(super) fn intern(&mut self, bytes: &[u8]) -> Option<u32> {
        if bytes.is_empty() {
            return Some(0);
        }
        let hash = self.hasher.hash_one(bytes);
        if let Some(&id) = self.table.find(hash, |&id| self.strings.get(id) == bytes) {
            return Some(id);
        }
        let id = u32::try_from(self.strings.ends.len()).ok()?;
        let end = u32::try_from(self.strings.bytes.len() + bytes.len()).ok()?;
        self.strings.bytes.extend_from_slice(bytes);
        self.strings.ends.push(end);
        let (strings, hasher) = (&self.strings, &self.hasher);
        self.table.insert_unique(hash, id, |&id| hasher.hash_one(strings.get(id)));
        Some(id)
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        self.strings.get(id)
    }

    /// Returns one more than the largest number.
    pub(super) fn bound(&self) -> usize {
        self.strings.bound()
    }

    pub(super) fn into_strings(mut self) -> Strings {
        self.strings.bytes.shrink_to_fit();
        self.strings.ends.shrink_to_fit();
        self.strings
    }
}
