//! Data about files that is not in the tree: fingerprints, and the locations of their bytes on devices.

use std::io;

use hashbrown::HashMap;
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh32::xxh32;
use zerocopy::IntoBytes as _;
use zerocopy::little_endian::{U16, U32};

use super::chunks::{ChunkTable, Pieces};
use super::on_device::{DataForm, OnDevice};
use super::xattrs::prefixes::FINGERPRINT;
use crate::erofs::layout::{RawXattrEntry, RawXattrHeader, XATTR_FILTER_SEED, XATTR_LONG_PREFIX};
use crate::tree::{InodeId, StringId};

/// Prefix of a fingerprint.
const SHA256: &[u8] = b"sha256:";
/// Size in bytes of a fingerprint's xattr: with one byte of padding it is a multiple of 4.
const ENTRY: u64 =
    (size_of::<RawXattrEntry>() + SHA256.len() + 32).next_multiple_of(size_of::<u32>()) as u64;
/// In `FileTable::of`: the inode has no fingerprint.
const NONE: u32 = u32::MAX;

/// Data about the files of a tree; empty for profiles without devices.
#[derive(Debug, Default)]
pub(super) struct FileTable {
    pub(super) on_devices: HashMap<StringId, OnDevice>,
    /// The files whose bytes are at several locations.
    pub(super) pieces: Vec<Pieces>,
    /// SHA-256 of contents without duplicates, in the order of the table of shared xattrs.
    fingerprints: Vec<[u8; 32]>,
    /// Index of each inode's fingerprint, by [`InodeId::index`]; empty if there are no fingerprints.
    of: Vec<u32>,
}

impl FileTable {
    /// Returns the chunk table of a file, with 48-bit block numbers if `is_wide`.
    pub(super) fn table(&self, file: &OnDevice, is_wide: bool) -> ChunkTable<'_> {
        match file.form {
            DataForm::Consecutive => ChunkTable::consecutive(file, is_wide),
            DataForm::Pieces(at) => {
                let pieces = &self.pieces[usize::try_from(at).expect("a number of a list")];
                ChunkTable::of_pieces(file, pieces, is_wide)
            }
        }
    }

    /// Records the SHA-256 of files. Returns `None` if there are too many.
    pub(super) fn set_fingerprints(
        &mut self,
        hashes: impl Iterator<Item = (InodeId, [u8; 32])>,
        bound: usize,
    ) -> Option<()> {
        let mut known = HashMap::new();
        self.of = vec![NONE; bound];
        for (inode, hash) in hashes {
            let next = u32::try_from(self.fingerprints.len()).ok()?;
            let at = *known.entry(hash).or_insert(next);
            if at == next {
                self.fingerprints.push(hash);
            }
            self.of[inode.index()] = at;
        }
        Some(())
    }

    /// Returns the index of an inode's fingerprint.
    fn fingerprint(&self, inode: InodeId) -> Option<u32> {
        self.of.get(inode.index()).copied().filter(|at| *at != NONE)
    }

    /// Returns the size in bytes of an inode's xattrs, given their size `without` its fingerprint.
    pub(super) fn xattrs_size(&self, inode: InodeId, without: u64) -> u64 {
        if self.fingerprint(inode).is_none() {
            return without;
        }
        let header = if without == 0 { size_of::<RawXattrHeader>() as u64 } else { 0 };
        without + header + size_of::<U32>() as u64
    }

    /// Adds an inode's fingerprint to its encoded xattrs, after the other shared xattrs, which are looked up more
    /// often. `first_id` is the id of the first fingerprint.
    pub(super) fn put(&self, inode: InodeId, first_id: u32, xattrs: &mut Vec<u8>) {
        let Some(fingerprint) = self.fingerprint(inode) else { return };
        const FILTER: usize = size_of::<U32>();
        const HEADER: usize = size_of::<RawXattrHeader>();
        if xattrs.is_empty() {
            xattrs.extend_from_slice(&[0xff; FILTER]);
            xattrs.resize(HEADER, 0);
        }
        let bit = xxh32(FINGERPRINT, XATTR_FILTER_SEED) % u32::BITS;
        xattrs[usize::try_from(bit / 8).expect("below 4")] &= !(1 << (bit % 8));
        let id = first_id + fingerprint * u32::try_from(ENTRY / 4).expect("11");
        let behind = HEADER + FILTER * usize::from(xattrs[FILTER]);
        xattrs.splice(behind..behind, U32::new(id).as_bytes().iter().copied());
        // The inode has at most 128 other shared xattrs.
        xattrs[FILTER] += 1;
    }

    /// Returns the size in bytes of the shared fingerprints.
    pub(super) fn shared_bytes(&self) -> u64 {
        self.fingerprints.len() as u64 * ENTRY
    }

    /// Returns a function for each shared fingerprint, which writes its entry.
    pub(super) fn shared_entries(&self, prefix: u8) -> impl Iterator<Item = impl Fn(&mut Vec<u8>)> {
        let hashes = self.fingerprints.iter();
        hashes.map(move |hash| move |out: &mut Vec<u8>| put_fingerprint(hash, prefix, out))
    }
}

fn put_fingerprint(hash: &[u8; 32], prefix: u8, out: &mut Vec<u8>) {
    let size = SHA256.len() + hash.len();
    let entry = RawXattrEntry {
        e_name_len: 0,
        e_name_index: XATTR_LONG_PREFIX | prefix,
        e_value_size: U16::new(u16::try_from(size).expect("39")),
    };
    let end = out.len() + usize::try_from(ENTRY).expect("44");
    out.extend_from_slice(entry.as_bytes());
    out.extend_from_slice(SHA256);
    out.extend_from_slice(hash);
    out.resize(end, 0);
}

/// A writer that computes the SHA-256 of a whole file.
#[derive(Debug, Default)]
pub(super) struct Hashed {
    hash: Sha256,
    size: u64,
}

impl Hashed {
    /// Returns the SHA-256 if `size` bytes were written.
    pub(super) fn finish(self, size: u64) -> Option<[u8; 32]> {
        (self.size == size).then(|| self.hash.finalize().into())
    }
}

impl io::Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
