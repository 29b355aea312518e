//! Sources of an image's bytes.

use std::io;
use std::sync::{Mutex, PoisonError};

use hashbrown::HashMap;

use super::{to_u64, to_usize};

/// Bytes that can be read anywhere: an image, or a device that an image refers to. Reading does not change them.
pub trait ReadAt {
    /// Number of bytes.
    fn len(&self) -> u64;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// The error of the source; [`io::ErrorKind::UnexpectedEof`] when it ends before the buffer is full.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for [u8] {
    fn len(&self) -> u64 {
        to_u64(<[u8]>::len(self))
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(buffer.len()));
        let range = start.zip(end).and_then(|(start, end)| self.get(start..end));
        buffer.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buffer)
    }
}

/// How much a [`Cached`] keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSize {
    /// Bytes that are read at a time, at least 1.
    pub chunk: u64,
    /// The most of them that are kept, at least 1.
    pub chunks: usize,
}

impl CacheSize {
    /// One read of a disk's readahead size serves some thousand inodes, and 16 MiB are all of an image of 90,000 files.
    const USUAL: Self = Self { chunk: 64 * 1024, chunks: 256 };
}

/// A source with a cache: chunks of 64 KiB, at most 16 MiB, unless it is given another size. The least recently used are
/// dropped first. Reads of a chunk and more bypass the cache.
///
/// Reading metadata takes a few small reads an inode: put this around anything that makes a system call for each.
/// Threads wait for each other while one reads.
#[derive(Debug)]
pub struct Cached<S> {
    source: S,
    size: CacheSize,
    chunks: Mutex<Chunks>,
}

#[derive(Debug, Default)]
struct Chunks {
    slots: Vec<Slot>,
    /// From a chunk's number to its slot.
    index: HashMap<u64, usize>,
    clock: u64,
}

#[derive(Debug)]
struct Slot {
    chunk: u64,
    used: u64,
    bytes: Vec<u8>,
}

impl<S: ReadAt> Cached<S> {
    /// Puts an empty cache around a source.
    #[must_use]
    pub fn new(source: S) -> Self {
        Self::with(source, CacheSize::USUAL)
    }

    /// The same with a cache of this size.
    #[must_use]
    pub fn with(source: S, size: CacheSize) -> Self {
        Self { source, size, chunks: Mutex::default() }
    }

    /// The source.
    pub const fn get(&self) -> &S {
        &self.source
    }
}

impl Chunks {
    /// The bytes of a chunk, read if they are not here.
    fn chunk(&mut self, source: &impl ReadAt, size: CacheSize, chunk: u64) -> io::Result<&[u8]> {
        self.clock = self.clock.saturating_add(1);
        let at = match self.index.get(&chunk) {
            Some(at) => *at,
            None => self.load(source, size, chunk)?,
        };
        let slot = self.slots.get_mut(at).expect("the index names slots that are there");
        slot.used = self.clock;
        Ok(&slot.bytes)
    }

    fn load(&mut self, source: &impl ReadAt, size: CacheSize, chunk: u64) -> io::Result<usize> {
        let start = chunk.checked_mul(size.chunk).ok_or(io::ErrorKind::UnexpectedEof)?;
        let len = source.len().saturating_sub(start).min(size.chunk);
        let mut bytes = vec![0; to_usize(len)];
        source.read_at(start, &mut bytes)?;
        let slot = Slot { chunk, used: self.clock, bytes };
        let at = if self.slots.len() < size.chunks {
            self.slots.push(slot);
            self.slots.len().saturating_sub(1)
        } else {
            let oldest = self.slots.iter_mut().enumerate().min_by_key(|(_, slot)| slot.used);
            let (at, old) = oldest.expect("there are slots");
            self.index.remove(&old.chunk);
            *old = slot;
            at
        };
        self.index.insert(chunk, at);
        Ok(at)
    }
}

/// The chunk of a byte.
fn at(offset: u64, size: CacheSize) -> u64 {
    offset.checked_div(size.chunk).unwrap_or_default()
}

/// How far into its chunk a byte is.
fn within(offset: u64, size: CacheSize) -> u64 {
    offset.checked_rem(size.chunk).unwrap_or_default()
}

impl<S: ReadAt> ReadAt for Cached<S> {
    fn len(&self) -> u64 {
        self.source.len()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let size = self.size;
        if to_u64(buffer.len()) >= size.chunk {
            return self.source.read_at(offset, buffer);
        }
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut offset, mut buffer) = (offset, buffer);
        while !buffer.is_empty() {
            let bytes = chunks.chunk(&self.source, size, at(offset, size))?;
            let rest = bytes.get(to_usize(within(offset, size))..).unwrap_or_default();
            let len = rest.len().min(buffer.len());
            let (Some(from), Some((to, left))) =
                (rest.get(..len), buffer.split_at_mut_checked(len))
            else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            to.copy_from_slice(from);
            offset = offset.saturating_add(to_u64(len));
            buffer = left;
        }
        Ok(())
    }
}
