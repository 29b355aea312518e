//! Files whose bytes are compared with a digest at each read, unless the kernel verifies them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use image::erofs::read::ReadAt;
use image::verity::{Hasher, ObjectId, PartHashes, VerityDigest, digest};
use kernel::verity::{VerityError, measure};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::mount_view::open::digest_of;

/// Bytes hashed at a time.
const PIECE: usize = 128 << 10;
/// Objects up to this length, in bytes, are read and hashed as a whole at each read, so that neither their descriptors
/// nor their hashes are kept.
const SMALL: u64 = 16 << 10;
/// Maximum number of objects kept open.
const OPEN_MAX: usize = 64;
/// Maximum bytes of hashes kept for open objects. The hashes of the last opened object may exceed this.
const HASHES_MAX: usize = 1 << 20;

/// An error of a checked read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckedError {
    #[error("cannot read {0}")]
    Read(VerityDigest, #[source] io::Error),
    /// The file has another digest than expected.
    #[error("{expected} is damaged: its digest is {actual}")]
    Damaged {
        expected: VerityDigest,
        /// Digest of the file's bytes.
        actual: Box<VerityDigest>,
    },
    /// The file was changed after it was opened.
    #[error("{0} is damaged: it changed while it was open")]
    Changed(VerityDigest),
    /// The file has another length than expected, in bytes.
    #[error("{id} is damaged: it has {actual} bytes, not {expected}")]
    Length { id: VerityDigest, expected: u64, actual: u64 },
    #[error("{0} is damaged: it is not a regular file")]
    Kind(VerityDigest),
    /// The kernel does not report whether the file has fs-verity.
    #[error("cannot find out whether {0} has fs-verity")]
    Verity(VerityDigest, #[source] VerityError),
}

impl From<CheckedError> for io::Error {
    fn from(error: CheckedError) -> Self {
        Self::other(error)
    }
}

/// A file whose reads return only bytes that match its digest.
#[derive(Debug)]
pub struct CheckedFile {
    file: File,
    id: VerityDigest,
    size: u64,
    check: Check,
}

#[derive(Debug)]
enum Check {
    /// The kernel checks reads with fs-verity.
    Kernel,
    Hashes(PartHashes),
}

impl CheckedFile {
    /// Wraps a file that should have this digest and length. Without fs-verity, the whole file is hashed now.
    ///
    /// # Errors
    /// [`CheckedError`] if the file does not match, or cannot be read.
    pub fn new(file: File, id: VerityDigest, size: u64) -> Result<Self, CheckedError> {
        let expected = size;
        let actual = file.metadata().map_err(|it| CheckedError::Read(id, it))?.len();
        if actual != expected {
            return Err(CheckedError::Length { id, expected, actual });
        }
        if is_sealed(&file, id)? {
            return Ok(Self { file, id, size, check: Check::Kernel });
        }
        let mut hasher = Hasher::keeping(id.algorithm(), size);
        let mut buffer = vec![0; PIECE];
        let mut at = 0;
        while at < size {
            let length = usize::try_from(size - at).map_or(PIECE, |left| left.min(PIECE));
            let piece = &mut buffer[..length];
            file.read_exact_at(piece, at).map_err(|it| CheckedError::Read(id, it))?;
            hasher.update(piece);
            at += length as u64;
        }
        let (actual, hashes) = hasher.finish_kept();
        compare(id, actual)?;
        Ok(Self { file, id, size, check: Check::Hashes(hashes) })
    }

    /// Fills `buffer` with the bytes at `offset`.
    ///
    /// # Errors
    /// [`CheckedError`]. The buffer may then contain unverified bytes.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), CheckedError> {
        let failed = |error| CheckedError::Read(self.id, error);
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= self.size);
        let end = end.ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
        let Check::Hashes(hashes) = &self.check else {
            return self.file.read_exact_at(buffer, offset).map_err(failed);
        };
        let part = hashes.part();
        let from = offset - offset % part;
        let until = end.next_multiple_of(part).min(self.size);
        if (from, until) == (offset, end) {
            self.file.read_exact_at(buffer, offset).map_err(failed)?;
            return self.checked(hashes, from, buffer);
        }
        // The range begins or ends inside a hashed part, so whole parts are read.
        let length = usize::try_from(until - from);
        let length = length.ok().ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        let mut parts = vec![0; length];
        self.file.read_exact_at(&mut parts, from).map_err(failed)?;
        self.checked(hashes, from, &parts)?;
        let skip = usize::try_from(offset - from).unwrap_or_default();
        buffer.copy_from_slice(&parts[skip..][..buffer.len()]);
        Ok(())
    }

    fn checked(&self, hashes: &PartHashes, at: u64, bytes: &[u8]) -> Result<(), CheckedError> {
        if hashes.match_at(at, bytes) { Ok(()) } else { Err(CheckedError::Changed(self.id)) }
    }

    /// Bytes of hashes kept in memory.
    const fn weight(&self) -> usize {
        match &self.check {
            Check::Kernel => 0,
            Check::Hashes(hashes) => hashes.len(),
        }
    }
}

impl AsFd for CheckedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl ReadAt for CheckedFile {
    fn len(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        Ok(self.read(offset, buffer)?)
    }
}

/// Whether the kernel checks the file against this digest with fs-verity.
fn is_sealed(file: &File, id: VerityDigest) -> Result<bool, CheckedError> {
    match measure(file.as_fd()) {
        Ok(None) => Ok(false),
        Ok(Some(measured)) => compare(id, digest_of(&measured)).map(|()| true),
        Err(error) if error.is_unsupported() => Ok(false),
        Err(error) => Err(CheckedError::Verity(id, error)),
    }
}

fn compare(expected: VerityDigest, actual: VerityDigest) -> Result<(), CheckedError> {
    if expected == actual {
        return Ok(());
    }
    Err(CheckedError::Damaged { expected, actual: Box::new(actual) })
}

/// The objects of a store, read by id.
#[derive(Debug)]
pub struct CheckedObjects {
    directory: OwnedFd,
    /// Open objects, the last used one at the end.
    open: Mutex<Vec<(ObjectId, Arc<CheckedFile>)>>,
}

impl AsFd for CheckedObjects {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl CheckedObjects {
    /// Takes the directory with the objects: [`OpenImage::objects`](crate::OpenImage).
    #[must_use]
    pub const fn new(directory: OwnedFd) -> Self {
        Self { directory, open: Mutex::new(Vec::new()) }
    }

    /// Fills `buffer` with the bytes at `offset` of an object of `size` bytes.
    ///
    /// # Errors
    /// [`CheckedError`]. The buffer may then contain unverified bytes.
    pub fn read(
        &self,
        object: &ObjectId,
        size: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), CheckedError> {
        if let Some(found) = self.cached(object) {
            return found.read(offset, buffer);
        }
        let id = *object.digest();
        let file = self.open(object)?;
        let is_whole = offset == 0 && buffer.len() as u64 == size;
        if (is_whole || size <= SMALL) && !is_sealed(&file, id)? {
            return read_whole(&file, id, size, offset, buffer, is_whole);
        }
        let opened = Arc::new(CheckedFile::new(file, id, size)?);
        self.keep(*object, Arc::clone(&opened));
        opened.read(offset, buffer)
    }

    fn open(&self, object: &ObjectId) -> Result<File, CheckedError> {
        let id = *object.digest();
        let failed = |errno: Errno| CheckedError::Read(id, errno.into());
        // `NONBLOCK`, because opening a FIFO would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let path = object.path();
        let opened = rustix::fs::openat2(&self.directory, path, flags, Mode::empty(), resolve);
        let file = opened.map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(CheckedError::Kind(id));
        }
        Ok(file.into())
    }

    /// Closes the objects that are kept open. Objects with a read in progress are closed after the read.
    pub fn close(&self) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn cached(&self, object: &ObjectId) -> Option<Arc<CheckedFile>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let at = open.iter().position(|it| it.0 == *object)?;
        let found = open.remove(at);
        let file = Arc::clone(&found.1);
        open.push(found);
        Some(file)
    }

    fn keep(&self, object: ObjectId, file: Arc<CheckedFile>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have opened the same object first.
        open.retain(|it| it.0 != object);
        open.push((object, file));
        let mut weight: usize = open.iter().map(|it| it.1.weight()).sum();
        while open.len() > 1 && (open.len() > OPEN_MAX || weight > HASHES_MAX) {
            weight -= open.remove(0).1.weight();
        }
    }
}

/// Reads and verifies a whole file, and copies the requested range to `buffer`.
fn read_whole(
    file: &File,
    id: VerityDigest,
    size: u64,
    offset: u64,
    buffer: &mut [u8],
    is_whole: bool,
) -> Result<(), CheckedError> {
    let failed = |error| CheckedError::Read(id, error);
    let (expected, actual) = (size, file.metadata().map_err(failed)?.len());
    if actual != expected {
        return Err(CheckedError::Length { id, expected, actual });
    }
    if is_whole {
        file.read_exact_at(buffer, 0).map_err(failed)?;
        return compare(id, digest(id.algorithm(), buffer));
    }
    let short = || failed(io::ErrorKind::UnexpectedEof.into());
    let mut bytes = vec![0; usize::try_from(size).ok().ok_or_else(short)?];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    compare(id, digest(id.algorithm(), &bytes))?;
    let start = usize::try_from(offset).ok().ok_or_else(short)?;
    let end = start.checked_add(buffer.len()).ok_or_else(short)?;
    buffer.copy_from_slice(bytes.get(start..end).ok_or_else(short)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use image::verity::Algorithm;

    use super::*;

    fn bytes(size: usize) -> Vec<u8> {
        (0..size).map(|at| u8::try_from(at % 251).unwrap()).collect()
    }

    /// A directory with one object.
    struct Fixture {
        _folder: tempfile::TempDir,
        objects: CheckedObjects,
        path: PathBuf,
        id: ObjectId,
        bytes: Vec<u8>,
    }

    fn fixture(size: usize) -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let bytes = bytes(size);
        let id = ObjectId::new(digest(Algorithm::Sha256, &bytes));
        let path = folder.path().join(id.path());
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let directory = File::open(folder.path()).unwrap();
        let objects = CheckedObjects::new(directory.into());
        Fixture { _folder: folder, objects, path, id, bytes }
    }

    impl Fixture {
        fn read(&self, offset: usize, length: usize) -> Result<Vec<u8>, CheckedError> {
            let mut buffer = vec![0; length];
            let size = self.bytes.len() as u64;
            self.objects.read(&self.id, size, offset as u64, &mut buffer)?;
            Ok(buffer)
        }
    }

    /// Lengths in bytes: a block, small objects, and objects that are hashed in parts.
    const SIZES: [usize; 5] = [1, 4096, 16 << 10, (16 << 10) + 1, 300_000];

    #[test]
    fn any_part_of_an_object_can_be_read() {
        for size in SIZES {
            let it = fixture(size);
            let ranges = [(0, size), (0, 1), (size - 1, 1), (size / 3, size / 2), (size, 0)];
            // The second pass reads the object that is already open.
            for (offset, length) in ranges.into_iter().chain(ranges) {
                let read = it.read(offset, length).unwrap();
                assert!(read == it.bytes[offset..offset + length], "{offset} {length} of {size}");
            }
            assert!(matches!(it.read(1, size).unwrap_err(), CheckedError::Read(..)), "too long");
        }
    }

    #[test]
    fn what_does_not_belong_to_the_digest_is_not_given() {
        for size in SIZES {
            let it = fixture(size);
            let mut changed = it.bytes.clone();
            changed[size / 2] ^= 1;
            std::fs::write(&it.path, &changed).unwrap();
            // The whole object, and a part that was not changed.
            for (offset, length) in [(0, size), (0, 1)] {
                let error = it.read(offset, length).unwrap_err();
                assert!(matches!(error, CheckedError::Damaged { .. }), "{size}: {error}");
            }
            for other in [&it.bytes[..size - 1], &[&it.bytes[..], &[0]].concat()] {
                std::fs::write(&it.path, other).unwrap();
                let error = it.read(0, size).unwrap_err();
                assert!(matches!(error, CheckedError::Length { .. }), "{size}: {error}");
            }
            std::fs::remove_file(&it.path).unwrap();
            let error = it.read(0, size).unwrap_err();
            let CheckedError::Read(_, cause) = error else { panic!("{error}") };
            assert_eq!(cause.kind(), io::ErrorKind::NotFound);
            std::os::unix::fs::symlink("/etc/passwd", &it.path).unwrap();
            assert!(matches!(it.read(0, size).unwrap_err(), CheckedError::Read(..)));
        }
    }

    #[test]
    fn what_is_changed_while_it_is_open_is_not_given() {
        let it = fixture(300_000);
        it.read(0, 1).unwrap();
        let mut changed = it.bytes.clone();
        changed[100_000] ^= 1;
        std::fs::write(&it.path, &changed).unwrap();
        assert_eq!(it.read(0, 4096).unwrap(), it.bytes[..4096], "this part was not changed");
        let error = it.read(100_000, 1).unwrap_err();
        assert!(matches!(error, CheckedError::Changed(_)), "{error}");
        std::fs::write(&it.path, b"short").unwrap();
        assert!(matches!(it.read(8192, 1).unwrap_err(), CheckedError::Read(..)));
    }

    #[test]
    fn few_objects_are_held_open() {
        let folder = tempfile::tempdir().unwrap();
        let objects = CheckedObjects::new(File::open(folder.path()).unwrap().into());
        for number in 0..=OPEN_MAX {
            let mut bytes = bytes(20_000);
            bytes[0] = u8::try_from(number).unwrap();
            let id = ObjectId::new(digest(Algorithm::Sha256, &bytes));
            let path = folder.path().join(id.path());
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
            let mut first = [0];
            objects.read(&id, 20_000, 0, &mut first).unwrap();
            assert_eq!(first[0], bytes[0]);
        }
        assert_eq!(objects.open.lock().unwrap().len(), OPEN_MAX);
    }
}
