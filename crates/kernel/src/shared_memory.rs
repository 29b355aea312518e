//! Shared memory that outlives a process: another process that has it open can read its content.
#![expect(unsafe_code, reason = "a mapping is a pointer")]

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::last_errno;

/// Size of a word in bytes.
const WORD: usize = size_of::<u64>();

/// An error of shared memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedMemoryError {
    /// A system call failed.
    #[error("cannot {step} shared memory")]
    Call { step: &'static str, source: Errno },
    /// The size is not sealed, so its other owner could shrink it, which would kill readers with `SIGBUS`.
    #[error("the descriptor is not of memory whose size is sealed")]
    NotSealed,
    /// The memory does not have the expected size.
    #[error("the shared memory has {actual} bytes, not {expected}")]
    Size {
        /// Size in bytes.
        actual: u64,
        /// Expected size in bytes.
        expected: u64,
    },
}

fn failed(step: &'static str) -> impl Fn(Errno) -> SharedMemoryError {
    move |source| SharedMemoryError::Call { step, source }
}

/// An array of words that other processes may map as well. Its size never changes.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    address: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the address is only used for atomics, and stays mapped until the drop.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes memory that contains zeros. `name` appears in `/proc`.
    pub fn new(name: &str, words: usize) -> Result<Self, SharedMemoryError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags).map_err(failed("make"))?;
        rustix::fs::ftruncate(&file, bytes(words)).map_err(failed("size"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed("seal"))?;
        Self::map(file, words)
    }

    /// Maps the memory of another process from a descriptor of it.
    ///
    /// # Errors
    /// [`SharedMemoryError`] if the descriptor is not sealed memory, or if the size differs.
    pub fn adopt(file: OwnedFd, words: usize) -> Result<Self, SharedMemoryError> {
        // For any other type of file this is EINVAL.
        match rustix::fs::fcntl_get_seals(&file) {
            Ok(seals) if seals.contains(SealFlags::SHRINK) => {}
            Ok(_) | Err(Errno::INVAL) => return Err(SharedMemoryError::NotSealed),
            Err(errno) => return Err(failed("examine")(errno)),
        }
        let found = rustix::fs::fstat(&file).map_err(failed("examine"))?;
        let (actual, expected) = (u64::try_from(found.st_size).unwrap_or_default(), bytes(words));
        if actual != expected {
            return Err(SharedMemoryError::Size { actual, expected });
        }
        Self::map(file, words)
    }

    fn map(file: OwnedFd, words: usize) -> Result<Self, SharedMemoryError> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the mapping is new, so it overlaps nothing. It is unmapped when the value is dropped.
        let address = unsafe {
            rustix::mm::mmap(null_mut(), words * WORD, access, MapFlags::SHARED, &file, 0)
        };
        let address = NonNull::new(address.map_err(failed("map"))?.cast());
        let address = address.ok_or(Errno::INVAL).map_err(failed("map"))?;
        Ok(Self { file, address, words })
    }

    /// Returns all words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping starts at a page, has this many words, and lives as long as `self`. Its size is sealed.
        // Other processes may change the words, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.words) }
    }

    /// Allocates memory for a range of words, so that later writes to them cannot fail.
    pub fn reserve(&self, words: Range<usize>) -> Result<(), SharedMemoryError> {
        let (at, length) = (bytes(words.start), bytes(words.len()));
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), at, length)
            .map_err(failed("reserve"))
    }

    /// Calls read(2) with a range of words as the buffer. Returns the number of bytes read.
    ///
    /// # Panics
    /// If `words` is out of range.
    pub fn read_into(&self, from: BorrowedFd<'_>, words: Range<usize>) -> Result<usize, Errno> {
        let place = self.words()[words].as_ptr_range();
        let length = place.end.addr() - place.start.addr();
        let start = place.start.cast_mut().cast::<libc::c_void>();
        // SAFETY: the range was checked above, and the words are only read as atomics.
        let got = unsafe { libc::read(from.as_raw_fd(), start, length) };
        usize::try_from(got).map_err(|_negative| last_errno())
    }

    /// Returns the current values of a range of words.
    ///
    /// # Panics
    /// If `words` is out of range.
    #[must_use]
    pub fn copy(&self, words: Range<usize>) -> Vec<u64> {
        self.words()[words].iter().map(|it| it.load(Ordering::Acquire)).collect()
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let start = self.address.as_ptr().cast();
        // SAFETY: this value owns the mapping, and nothing points into it any more.
        let _unmapped = unsafe { rustix::mm::munmap(start, self.words * WORD) };
    }
}

fn bytes(words: usize) -> u64 {
    (words * WORD) as u64
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;

    #[test]
    fn another_who_has_it_sees_what_is_written() {
        let one = SharedMemory::new("test", 1 << 10).unwrap();
        let other = SharedMemory::adopt(one.file.try_clone().unwrap(), 1 << 10).unwrap();
        one.words()[1023].store(7, Ordering::Release);
        one.reserve(0..512).unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        File::from(write).write_all(&[1; 12]).unwrap();
        assert_eq!(one.read_into(read.as_fd(), 2..4), Ok(12));
        drop(one);
        assert_eq!(other.copy(1022..1024), [0, 7]);
        // The result does not depend on the byte order.
        let words = other.copy(0..4);
        let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
        assert_eq!(
            (words[2], bytes.iter().filter(|it| **it == 1).count()),
            (0x0101_0101_0101_0101, 12)
        );
    }

    #[test]
    fn what_may_be_cut_short_is_refused() {
        let file = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 8).unwrap();
        let adopted = SharedMemory::adopt(file.try_clone().unwrap(), 1);
        assert!(matches!(adopted, Err(SharedMemoryError::NotSealed)), "{adopted:?}");
        let regular = tempfile::tempfile().unwrap();
        let adopted = SharedMemory::adopt(regular.into(), 1);
        assert!(matches!(adopted, Err(SharedMemoryError::NotSealed)), "{adopted:?}");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let adopted = SharedMemory::adopt(file.try_clone().unwrap(), 2);
        let is_short =
            |it: &_| matches!(it, Err(SharedMemoryError::Size { actual: 8, expected: 16 }));
        assert!(is_short(&adopted), "{adopted:?}");
        SharedMemory::adopt(file, 1).unwrap();
    }
}
