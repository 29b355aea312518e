//! Readers that compare bytes of the store with their digest.

mod tar;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use crate::operation::OperationError;
use crate::shelf::layers::StoredLayerError;
use crate::shelf::objects::ObjectLookupError;
use crate::store::Store;
use image::digest::{Digest, DigestHasher};
use image::tar::recipe::RebuildError;
use image::verity::ObjectId;

pub(crate) use tar::LayerTar;

/// An error while bytes of the store are read and verified. An [`io::Error`] of a [`VerifiedBytes`] contains one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BytesError {
    #[error("the store has no layer {0}")]
    NoLayer(Digest),
    /// The store's file of the layer cannot be read.
    #[error("cannot read the layer's recipe")]
    Layer(#[source] StoredLayerError),
    /// The recipe is damaged.
    #[error("cannot rebuild the layer's tar")]
    Recipe(#[source] RebuildError),
    /// An object cannot be found.
    #[error("cannot open an object of the store")]
    Object(#[source] ObjectLookupError),
    #[error("cannot read object {object}")]
    Read { object: ObjectId, source: io::Error },
    /// The bytes of an object do not match its id.
    #[error("object {expected} is damaged: its digest is {actual}")]
    Damaged {
        expected: Box<ObjectId>,
        /// Id that matches the bytes.
        actual: Box<ObjectId>,
    },
    /// An object has another length than the image states.
    #[error("object {object} is damaged: its length is {actual} bytes, not {size}")]
    Size {
        object: ObjectId,
        /// Length in bytes that the image states.
        size: u64,
        /// Length of the object in bytes.
        actual: u64,
    },
    /// The image does not name the object with the file's bytes.
    #[error("the image does not name the object of the file")]
    Unnamed,
    /// A blob that should be in the store is gone.
    #[error("the store has no blob {0}")]
    NoBlob(Digest),
    /// The caller does not need the result any more.
    #[error("the comparison was given up")]
    GivenUp,
    #[error(transparent)]
    Failed(#[from] OperationError),
    #[error("the bytes have the digest {actual}, not {expected}")]
    Mismatch {
        expected: Box<Digest>,
        /// Digest of the bytes.
        actual: Box<Digest>,
    },
    /// The bytes differ from those that had the digest when they were compared with it.
    #[error("the bytes of {0} have changed since they were compared with the digest")]
    Changed(Digest),
    /// There are too few or too many bytes.
    #[error("the length of {expected} is not {size} bytes")]
    Length {
        /// Digest of the expected bytes.
        expected: Digest,
        /// Expected length in bytes.
        size: u64,
    },
}

impl BytesError {
    /// Returns the error inside an error of a [`VerifiedBytes`].
    #[must_use]
    pub fn from_io(error: io::Error) -> Self {
        // `downcast` returns the same error if it has another type.
        error
            .downcast()
            .unwrap_or_else(|error| OperationError::of("read", "the bytes")(error).into())
    }

    pub(crate) fn into_io(self) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, self)
    }

    /// Whether the error shows that data in the store is damaged or missing.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        match self {
            Self::Layer(error) => matches!(error, StoredLayerError::Damaged { .. }),
            Self::Object(error) => matches!(error, ObjectLookupError::NoObject(_)),
            Self::Recipe(RebuildError::Read(_)) => false,
            Self::Recipe(_)
            | Self::Read { .. }
            | Self::Damaged { .. }
            | Self::Size { .. }
            | Self::Mismatch { .. }
            | Self::Changed(_)
            | Self::Length { .. } => true,
            Self::NoLayer(_)
            | Self::Unnamed
            | Self::NoBlob(_)
            | Self::GivenUp
            | Self::Failed(_) => false,
        }
    }
}

/// A reader of the bytes with a given digest. It ends without an error only after all bytes were verified. Errors
/// contain a [`BytesError`], and reads after an error fail as well.
pub struct VerifiedBytes<'s> {
    inner: Box<dyn Read + Send + 's>,
    expected: Digest,
    size: u64,
    /// `None` after the digest was compared or a read failed.
    hasher: Option<DigestHasher>,
    passed: u64,
    is_sound: bool,
}

impl fmt::Debug for VerifiedBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = f.debug_struct("VerifiedBytes");
        bytes.field("expected", &self.expected).field("size", &self.size);
        bytes.field("passed", &self.passed).finish_non_exhaustive()
    }
}

impl<'s> VerifiedBytes<'s> {
    pub(crate) fn new(inner: impl Read + Send + 's, expected: Digest, size: u64) -> Self {
        let hasher = Some(expected.hasher());
        Self { inner: Box::new(inner), expected, size, hasher, passed: 0, is_sound: false }
    }

    /// Returns a reader of a whole file.
    #[must_use]
    pub fn of_file(file: Arc<File>, expected: Digest, size: u64) -> Self {
        Self::new(Whole { file, at: 0 }, expected, size)
    }

    /// Returns the total number of bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    fn wrong_length(&self) -> io::Error {
        BytesError::Length { expected: self.expected, size: self.size }.into_io()
    }

    /// Reads and hashes some bytes. Fails if the source has too few or too many bytes.
    fn step(&mut self, hasher: &mut DigestHasher, into: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.size - self.passed).unwrap_or(usize::MAX);
        let room = left.min(into.len());
        let read = retry(&mut self.inner, &mut into[..room])?;
        hasher.update(&into[..read]);
        self.passed += read as u64;
        if read == 0 && room > 0 {
            return Err(self.wrong_length());
        }
        if self.passed == self.size && retry(&mut self.inner, &mut [0])? > 0 {
            return Err(self.wrong_length());
        }
        Ok(read)
    }
}

impl Store {
    /// Returns a reader of a whole blob of `size` bytes, which compares the blob with its digest.
    ///
    /// # Errors
    /// [`BytesError`] if the blob is absent or cannot be opened.
    pub fn verified_blob(
        &self,
        digest: &Digest,
        size: u64,
    ) -> Result<VerifiedBytes<'static>, BytesError> {
        let (file, _) = self
            .downloads
            .blob(digest)
            .map_err(OperationError::of("open", "the blob"))?
            .ok_or(BytesError::NoBlob(*digest))?;
        Ok(VerifiedBytes::of_file(Arc::new(file), *digest, size))
    }
}

fn retry(from: &mut dyn Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

impl Read for VerifiedBytes<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.is_sound || into.is_empty() {
            return Ok(0);
        }
        let Some(mut hasher) = self.hasher.take() else {
            return Err(io::Error::other("an earlier read failed"));
        };
        // If this read fails, the hasher is gone, so the next read fails as well.
        let read = self.step(&mut hasher, into)?;
        if self.passed < self.size {
            self.hasher = Some(hasher);
            return Ok(read);
        }
        let actual = hasher.finish();
        if actual != self.expected {
            let (expected, actual) = (Box::new(self.expected), Box::new(actual));
            return Err(BytesError::Mismatch { expected, actual }.into_io());
        }
        self.is_sound = true;
        Ok(read)
    }
}

/// Reads a file from its beginning, with a separate offset.
struct Whole {
    file: Arc<File>,
    at: u64,
}

impl Read for Whole {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], of: &[u8], size: u64) -> (Vec<u8>, Option<String>) {
        let mut reader = VerifiedBytes::new(bytes, Digest::sha256(of), size);
        let (mut got, mut buffer) = (Vec::new(), [0; 2]);
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return (got, None),
                Ok(read) => got.extend_from_slice(&buffer[..read]),
                Err(error) => {
                    assert!(reader.read(&mut buffer).is_err(), "it has forgotten its error");
                    return (got, Some(error.to_string()));
                }
            }
        }
    }

    #[test]
    fn the_last_bytes_wait_for_the_digest() {
        assert_eq!(read(b"abcde", b"abcde", 5), (b"abcde".to_vec(), None));
        assert_eq!(read(b"", b"", 0), (Vec::new(), None));
        let cases: [(&[u8], u64, &[u8], &str); 5] = [
            (b"abcdE", 5, b"abcd", "have the digest"),
            (b"Abcde", 5, b"Abcd", "have the digest"),
            (b"abcd", 5, b"abcd", "the length of"),
            (b"abcdef", 5, b"abcd", "the length of"),
            (b"abcde", 0, b"", "the length of"),
        ];
        for (bytes, size, passed, text) in cases {
            let (got, error) = read(bytes, b"abcde", size);
            assert_eq!(got, passed);
            assert!(error.as_ref().is_some_and(|it| it.contains(text)), "{error:?}");
        }
    }
}
