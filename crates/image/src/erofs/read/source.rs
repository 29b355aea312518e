//! Sources of an image's bytes.

use std::io;
use std::sync::{Mutex, PoisonError};

use hashbrown::HashMap;

use super::{to_u64, to_usize};

/// Bytes with random access: an image, or a device that an image refers to. They do not change while they are read.
pub trait ReadAt {
    /// Returns the number of bytes.
    fn len(&self) -> u64;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` with the bytes at `offset`.
    ///
    /// # Errors
    /// The source's error; [`io::ErrorKind::UnexpectedEof`] if the source ends before the buffer is full.
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

/// The size of a [`Cached`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSize {
    /// Bytes in a chunk, which is read at once; at least 1.
    pub chunk: u64,
    /// Maximum number of chunks in the cache; at least 1.
    pub chunks: usize,
}

impl CacheSize {
    /// A chunk has a disk's readahead size and holds some thousand inodes; 16 MiB hold all of an image of 90,000
    /// files.
    const USUAL: Self = Self { chunk: 64 * 1024, chunks: 256 };
}

/// A source with a cache, by default of chunks of 64 KiB, at most 16 MiB. The least recently used chunks are dropped
/// first. Reads of a chunk or more bypass the cache.
///
/// Reading metadata takes a few small reads per inode, so wrap any source that makes a system call per read. Threads
/// wait for each other while one of them reads.
#[derive(Debug)]
pub struct Cached<S> {
    source: S,
    size: CacheSize,
    chunks: Mutex<Chunks>,
}

#[derive(Debug, Default)]
struct Chunks {
    slots: Vec<Slot>,
    /// The slot of each chunk, by the chunk's number.
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
    /// Wraps a source with an empty cache of the default size.
    #[must_use]
    pub fn new(source: S) -> Self {
        Self::with(source, CacheSize::USUAL)
    }

    /// Wraps a source with an empty cache of the given size.
    #[must_use]
    pub fn with(source: S, size: CacheSize) -> Self {
        Self { source, size, chunks: Mutex::default() }
    }

    /// Returns the source.
    pub const fn get(&self) -> &S {
        &self.source
    }
}

impl Chunks {
    /// Returns the bytes of a chunk, which is read if it is not in the cache.
    fn chunk(&mut self, source: &impl ReadAt, size: CacheSize, chunk: u64) -> io::Result<&[u8]> {
        self.clock = self.clock.saturating_add(1);
        let at = match self.index.get(&chunk) {
            Some(at) => *at,
            None => self.load(source, size, chunk)?,
        };
        let slot = self.slots.get_mut(at).expect("the index names existing slots");
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

/// Returns the number of the chunk that contains a byte.
fn at(offset: u64, size: CacheSize) -> u64 {
    offset.checked_div(size.chunk).unwrap_or_default()
}

/// Returns the offset of a byte in its chunk.
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
