//! Reads and searches directories.

use std::cmp::Ordering;

use zerocopy::FromBytes as _;

use super::compressed::FileReader;
use super::error::{ErofsCorruption, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::source::ReadAt;
use super::{ByteOffset, Image, to_u64, to_usize};
use crate::erofs::layout::RawDirent;
use crate::tree::{NAME_MAX, components};

/// An entry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// The name, 1 to 255 bytes. The entries include `.` and `..`; other names may be invalid.
    pub name: &'a [u8],
    /// Nid of the inode that the name refers to.
    pub nid: Nid,
    /// Type of that inode as stated in the entry: a value of [`file_type`](crate::erofs::layout::file_type), or 0 for
    /// unknown.
    pub file_type: u8,
}

impl DirEntry<'_> {
    /// Whether the entry is `.` or `..`.
    #[must_use]
    pub fn is_dots(&self) -> bool {
        self.name == b"." || self.name == b".."
    }
}

/// A position before an entry of a directory: the index of a block and of an entry in it, as one number below 2^63.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirPosition(pub u64);

/// Bits of an entry's index. A block of 64 KiB has at most 5461 entries.
const ENTRY_BITS: u32 = 16;

impl DirPosition {
    /// The position before the first entry.
    pub const START: Self = Self(0);

    fn new(block: u64, entry: usize) -> Self {
        Self(block << ENTRY_BITS | to_u64(entry))
    }

    fn entry(self) -> usize {
        to_usize(self.0 & ((1 << ENTRY_BITS) - 1))
    }
}

/// A directory block: at least one entry, then the names of all entries.
#[derive(Debug, Clone, Copy)]
struct Block<'a> {
    nid: Nid,
    number: u64,
    bytes: &'a [u8],
    entries: &'a [RawDirent],
}

impl<'a> Block<'a> {
    fn new(nid: Nid, number: u64, bytes: &'a [u8]) -> Result<Self, ErofsCorruption> {
        let offset = RawDirent::ref_from_prefix(bytes).map_or(0, |(first, _)| first.nameoff.get());
        let names = usize::from(offset);
        let whole = names != 0 && names.is_multiple_of(size_of::<RawDirent>());
        let entries = bytes.get(..names).filter(|_| whole && names < bytes.len());
        let wrong =
            ErofsCorruption::DirectoryBlock { nid, block: number, offset, len: bytes.len() };
        let entries = <[RawDirent]>::ref_from_bytes(entries.ok_or(wrong)?);
        let entries = entries.expect("a whole number of unaligned structures");
        Ok(Self { nid, number, bytes, entries })
    }

    fn entry(&self, at: usize) -> Result<Option<DirEntry<'a>>, ErofsCorruption> {
        let Some(raw) = self.entries.get(at) else { return Ok(None) };
        let start = usize::from(raw.nameoff.get());
        let rest = self.bytes.get(start..).unwrap_or_default();
        // The last name ends at the end of the directory, or at padding.
        let end = match at.checked_add(1).and_then(|next| self.entries.get(next)) {
            Some(next) => usize::from(next.nameoff.get()),
            None => {
                let len = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
                start.saturating_add(len)
            }
        };
        let name = self.bytes.get(start..end).unwrap_or_default();
        if !(1..=NAME_MAX).contains(&name.len()) || start < size_of_val(self.entries) {
            let (nid, block) = (self.nid, self.number);
            return Err(ErofsCorruption::NameRange { nid, block, entry: at, start, end });
        }
        Ok(Some(DirEntry { name, nid: Nid(raw.nid.get()), file_type: raw.file_type }))
    }
}

impl<S: ReadAt> Image<S> {
    /// Returns the entries of a directory; none for other inodes.
    #[must_use]
    pub fn read_dir<'i>(&'i self, directory: &Inode) -> ReadDir<'i, S> {
        self.read_dir_from(directory, DirPosition::START)
    }

    /// Returns the entries after a position that [`ReadDir::position`] returned. Any other position gives an error or
    /// some of the entries.
    #[must_use]
    pub fn read_dir_from<'i>(&'i self, directory: &Inode, from: DirPosition) -> ReadDir<'i, S> {
        ReadDir {
            image: self,
            directory: *directory,
            reader: self.reader(directory),
            block: Vec::new(),
            is_read: false,
            number: from.0 >> ENTRY_BITS,
            next_entry: from.entry(),
            previous: Vec::new(),
            failed: false,
        }
    }

    /// Reads block `number` of a directory into `bytes`, and returns whether the block exists.
    fn directory_block(
        &self,
        directory: &Inode,
        reader: &mut FileReader<'_, S>,
        number: u64,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, ReadError> {
        let size = self.superblock.block_bits.size();
        let start = number.saturating_mul(size);
        let len = match directory.file_type() {
            FileType::Directory => directory.size().saturating_sub(start).min(size),
            _ => 0,
        };
        bytes.resize(to_usize(len), 0);
        reader.read(ByteOffset(start), bytes, &[])?;
        Ok(len != 0)
    }

    /// Finds the inode of `name` in a directory by binary search, which requires that names ascend, as the format
    /// demands.
    ///
    /// # Errors
    /// [`ReadError`] if a block of the directory is invalid or cannot be read.
    pub fn lookup(&self, directory: &Inode, name: &[u8]) -> Result<Option<Nid>, ReadError> {
        let nid = directory.nid();
        let (mut bytes, mut reader) = (Vec::new(), self.reader(directory));
        let blocks = match directory.file_type() {
            FileType::Directory => directory.size().div_ceil(self.superblock.block_bits.size()),
            _ => 0,
        };
        // This finds the first block that begins after the name. The name can only be in the preceding block.
        let (mut low, mut high) = (0, blocks);
        while low < high {
            let middle = low.midpoint(high);
            self.directory_block(directory, &mut reader, middle, &mut bytes)?;
            let block = Block::new(nid, middle, &bytes)?;
            let Some(first) = block.entry(0)? else { break };
            match first.name.cmp(name) {
                Ordering::Equal => return Ok(Some(first.nid)),
                Ordering::Less => low = middle.saturating_add(1),
                Ordering::Greater => high = middle,
            }
        }
        let Some(number) = low.checked_sub(1) else { return Ok(None) };
        self.directory_block(directory, &mut reader, number, &mut bytes)?;
        let block = Block::new(nid, number, &bytes)?;
        let (mut low, mut high) = (0, block.entries.len());
        while low < high {
            let middle = low.midpoint(high);
            let Some(entry) = block.entry(middle)? else { break };
            match entry.name.cmp(name) {
                Ordering::Equal => return Ok(Some(entry.nid)),
                Ordering::Less => low = middle.saturating_add(1),
                Ordering::Greater => high = middle,
            }
        }
        Ok(None)
    }

    /// Finds the inode of a path. Symlinks are not followed.
    ///
    /// # Errors
    /// [`ReadError`] if a directory or an inode is invalid or cannot be read.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<Inode>, ReadError> {
        let mut inode = self.root()?;
        for name in components(path) {
            let Some(nid) = self.lookup(&inode, name)? else { return Ok(None) };
            inode = self.inode(nid)?;
        }
        Ok(Some(inode))
    }
}

/// The entries of a directory in the image's order, which is checked to be byte order. They end after an error.
/// `ReadDir` is not an [`Iterator`], because it returns names that borrow from it.
#[derive(Debug)]
pub struct ReadDir<'i, S> {
    image: &'i Image<S>,
    directory: Inode,
    reader: FileReader<'i, S>,
    block: Vec<u8>,
    /// Whether `block` holds the block with the index `number`.
    is_read: bool,
    number: u64,
    next_entry: usize,
    /// The preceding name; empty at the beginning.
    previous: Vec<u8>,
    failed: bool,
}

impl<S: ReadAt> ReadDir<'_, S> {
    /// Returns the next entry, or `None` at the end.
    ///
    /// # Errors
    /// [`ReadError`] if a block of the directory is invalid or cannot be read.
    #[expect(
        clippy::should_implement_trait,
        reason = "the name borrows from the reader, which Iterator cannot express"
    )]
    pub fn next(&mut self) -> Result<Option<DirEntry<'_>>, ReadError> {
        if self.failed || !self.advance().inspect_err(|_| self.failed = true)? {
            return Ok(None);
        }
        let nid = self.directory.nid();
        let block = Block::new(nid, self.number, &self.block)?;
        let Some(entry) = block.entry(self.next_entry)? else { return Ok(None) };
        if entry.name <= &self.previous[..] {
            self.failed = true;
            let previous = std::mem::take(&mut self.previous);
            return Err(
                ErofsCorruption::NameOrder { nid, previous, name: entry.name.to_vec() }.into()
            );
        }
        self.previous.clear();
        self.previous.extend_from_slice(entry.name);
        self.next_entry = self.next_entry.saturating_add(1);
        Ok(Some(entry))
    }

    /// Returns the position of the next entry.
    #[must_use]
    pub fn position(&self) -> DirPosition {
        DirPosition::new(self.number, self.next_entry)
    }

    /// Advances to the next block if the current block has no more entries. Returns whether there is an entry.
    fn advance(&mut self) -> Result<bool, ReadError> {
        let nid = self.directory.nid();
        loop {
            if self.is_read {
                let block = Block::new(nid, self.number, &self.block)?;
                if block.entry(self.next_entry)?.is_some() {
                    return Ok(true);
                }
                self.number = self.number.saturating_add(1);
                self.next_entry = 0;
            }
            let Self { image, directory, reader, number, block, .. } = self;
            self.is_read = image.directory_block(directory, reader, *number, block)?;
            if !self.is_read {
                return Ok(false);
            }
        }
    }
}
