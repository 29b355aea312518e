//! Copies the contents of files into a tar.

use std::fs::File;
use std::io::{Read as _, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use image::tar::write::Writer;
use image::tree::Content;
use image::verity::{Hasher, ObjectId};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use store::{ObjectReader, Store};

use super::{ChangesError, ObjectError};

/// Size of a read, in bytes. Files of the image up to this size are verified before any of their bytes are written.
const PIECE: usize = 1 << 20;

/// Copies bytes into a tar.
pub(super) struct Copier<'a> {
    cancel: &'a AtomicBool,
    buffer: Vec<u8>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(cancel: &'a AtomicBool) -> Self {
        Self { cancel, buffer: vec![0; PIECE] }
    }

    pub(super) fn go_on(&self) -> Result<(), ChangesError> {
        if self.cancel.load(Ordering::Relaxed) { Err(ChangesError::Cancelled) } else { Ok(()) }
    }

    /// Copies a file of the upper layer that had `size` bytes a moment ago. Holes are not read, so a file that
    /// consists only of holes takes no longer than writing its tar.
    pub(super) fn upper(
        &mut self,
        file: OwnedFd,
        size: u64,
        path: &[u8],
        out: &mut Writer<impl Write>,
    ) -> Result<(), ChangesError> {
        let failed = |source: std::io::Error| {
            let path = path.to_vec();
            ChangesError::Io { action: "read", path, source }
        };
        let file = File::from(file);
        let mut at = 0;
        while at < size {
            let data = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
                Ok(data) => data.min(size),
                Err(Errno::NXIO) => size,
                // The file system cannot seek to data.
                Err(Errno::INVAL) => at,
                Err(errno) => return Err(failed(errno.into())),
            };
            self.zeros(data - at, out)?;
            at = data;
            if at == size {
                break;
            }
            let hole = match rustix::fs::seek(file.as_fd(), SeekFrom::Hole(at)) {
                Ok(hole) => hole.min(size),
                Err(Errno::NXIO | Errno::INVAL) => size,
                Err(errno) => return Err(failed(errno.into())),
            };
            while at < hole {
                self.go_on()?;
                let count = usize::try_from(hole - at).unwrap_or(PIECE).min(PIECE);
                match file.read_at(&mut self.buffer[..count], at) {
                    Ok(0) => return Err(ChangesError::Changed(path.to_vec())),
                    Ok(count) => {
                        out.content(&self.buffer[..count]).map_err(ChangesError::Write)?;
                        at += count as u64;
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(failed(error)),
                }
            }
        }
        Ok(())
    }

    fn zeros(&mut self, mut count: u64, out: &mut Writer<impl Write>) -> Result<(), ChangesError> {
        let used = usize::try_from(count).unwrap_or(PIECE).min(PIECE);
        self.buffer[..used].fill(0);
        while count > 0 {
            self.go_on()?;
            let piece = usize::try_from(count).unwrap_or(PIECE).min(PIECE);
            out.content(&self.buffer[..piece]).map_err(ChangesError::Write)?;
            count -= piece as u64;
        }
        Ok(())
    }

    /// Copies a file of the image. The last piece of an object is written only after the whole object was verified.
    pub(super) fn image(
        &mut self,
        store: &Store,
        content: Content<'_>,
        path: &[u8],
        out: &mut Writer<impl Write>,
    ) -> Result<(), ChangesError> {
        let failed = |source| ChangesError::Object { path: path.to_vec(), source };
        let (object, size) = match content {
            Content::Inline(bytes) => return out.content(bytes).map_err(ChangesError::Write),
            Content::External { object: None, .. } => return Err(failed(ObjectError::Unnamed)),
            Content::External { object: Some(object), size, .. } => (object, size),
        };
        let mut file = store.object(&object).map_err(|error| failed(error.into()))?;
        let mut hasher = Hasher::new(object.algorithm());
        let mut left = size;
        while left > 0 {
            self.go_on()?;
            let count = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            fill(&mut file, &mut self.buffer[..count], &object).map_err(failed)?;
            hasher.update(&self.buffer[..count]);
            left -= count as u64;
            if left == 0 {
                let rest = file.read(&mut [0]).map_err(|it| failed(ObjectError::Read(object, it)));
                let hasher = std::mem::replace(&mut hasher, Hasher::new(object.algorithm()));
                if rest? > 0 || hasher.finish() != *object.digest() {
                    return Err(failed(ObjectError::Damaged(object)));
                }
            }
            out.content(&self.buffer[..count]).map_err(ChangesError::Write)?;
        }
        Ok(())
    }
}

fn fill(file: &mut ObjectReader, into: &mut [u8], object: &ObjectId) -> Result<(), ObjectError> {
    file.read_exact(into).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => ObjectError::Damaged(*object),
        _ => ObjectError::Read(*object, error),
    })
}
