//! Reads the files of an image, and verifies their bytes while it reads.

use std::io::{self, Read as _};

use image::erofs::read::Owners;
use image::tree::{Content, Tree};
use image::verity::{Hasher, ImageId, ObjectId};
use store::{BytesError, ObjectReader, OperationError, Store};

use super::{ExportError, Options};
use crate::progress::Event;

/// Bytes per read. Files up to this length are verified before any of their bytes are passed on.
const PIECE: usize = 1 << 20;

/// Verifies an image, and returns its tree.
pub(crate) fn tree(store: &Store, id: &ImageId) -> Result<Tree, ExportError> {
    let opened = store.open_image(id).map_err(OperationError::of("open image", id))?;
    // With fs-verity, the kernel verifies each read.
    if !opened.kernel_verity {
        opened.verify()?;
    }
    let tree = store.tree(&opened, Owners::AsWritten);
    let failed =
        |source: store::ContentsError| ExportError::Tree { image: *id, source: Box::new(source) };
    Ok(tree.map_err(failed)?.tree)
}

/// Returns the size of all files in bytes, counting each inode once.
pub(super) fn content_bytes(tree: &Tree) -> u64 {
    tree.files().map(|(_, content)| content.size()).sum()
}

/// Reads a file that is known to be small, without reporting progress.
pub(super) fn read(
    store: &Store,
    path: &[u8],
    content: Content<'_>,
    options: &Options<'_>,
) -> Result<Vec<u8>, ExportError> {
    let options = Options { progress: &|_| (), ..*options };
    let mut bytes = Vec::new();
    FileContents::new(store, &options).give(path, content, &mut |piece| {
        bytes.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(bytes)
}

/// A reader of files' contents.
pub(super) struct FileContents<'a> {
    store: &'a Store,
    options: &'a Options<'a>,
    buffer: Vec<u8>,
}

impl<'a> FileContents<'a> {
    pub(super) fn new(store: &'a Store, options: &'a Options<'a>) -> Self {
        Self { store, options, buffer: vec![0; PIECE] }
    }

    /// Passes all bytes of the file at `path` to `take`. The last piece is passed only after all bytes were verified.
    pub(super) fn give(
        &mut self,
        path: &[u8],
        content: Content<'_>,
        take: &mut dyn FnMut(&[u8]) -> Result<(), ExportError>,
    ) -> Result<(), ExportError> {
        let failed = |source| failed(path, source);
        if let Content::Inline(bytes) = content {
            self.tell(bytes.len());
            return take(bytes);
        }
        let (object, size) = object_of(content).map_err(failed)?;
        let mut file = self.store.object(&object).map_err(|it| failed(BytesError::Object(it)))?;
        let actual = file.size();
        let mut hasher = Hasher::new(object.algorithm());
        let mut left = size;
        while left > 0 {
            self.options.go_on()?;
            let count = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            let piece = &mut self.buffer[..count];
            fill(&mut file, piece)
                .map_err(|source| failed(BytesError::Read { object, source }))?
                .then_some(())
                .ok_or_else(|| failed(BytesError::Size { object, size, actual }))?;
            hasher.update(piece);
            left -= count as u64;
            // The last piece is held back until the digest of all bytes is known.
            if left == 0 {
                if fill(&mut file, &mut [0]).unwrap_or(true) {
                    return Err(failed(BytesError::Size { object, size, actual }));
                }
                let actual =
                    std::mem::replace(&mut hasher, Hasher::new(object.algorithm())).finish();
                if actual != *object.digest() {
                    let (expected, actual) = (Box::new(object), Box::new(actual.into()));
                    return Err(failed(BytesError::Damaged { expected, actual }));
                }
            }
            take(piece)?;
            self.tell(count);
        }
        Ok(())
    }

    /// Returns the bytes of the file at `path` from `start` to its end, which are shorter than a piece and not
    /// verified.
    pub(super) fn end(
        &mut self,
        path: &[u8],
        content: Content<'_>,
        start: u64,
    ) -> Result<&[u8], ExportError> {
        let failed = |source| failed(path, source);
        self.options.go_on()?;
        let (object, size) = object_of(content).map_err(failed)?;
        let file = self.store.object(&object).map_err(|it| failed(BytesError::Object(it)))?;
        let actual = file.size();
        let count = size.checked_sub(start).and_then(|count| usize::try_from(count).ok());
        let piece = count.and_then(|count| self.buffer.get_mut(..count));
        let piece = piece.ok_or_else(|| failed(BytesError::Size { object, size, actual }))?;
        match file.read_exact_at(piece, start) {
            Ok(()) => Ok(piece),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(failed(BytesError::Size { object, size, actual }))
            }
            Err(source) => Err(failed(BytesError::Read { object, source })),
        }
    }

    fn tell(&self, bytes: usize) {
        (self.options.progress)(Event::Read { layer: 0, bytes: bytes as u64 });
    }
}

fn failed(path: &[u8], source: BytesError) -> ExportError {
    ExportError::Content { path: path.to_vec(), source: Box::new(source) }
}

/// Returns the object with a file's content, and its size in bytes.
fn object_of(content: Content<'_>) -> Result<(ObjectId, u64), BytesError> {
    match content {
        Content::External { object: Some(object), size, .. } => Ok((object, size)),
        Content::External { object: None, .. } | Content::Inline(_) => Err(BytesError::Unnamed),
    }
}

/// Fills a buffer. Returns false if the file ends earlier.
fn fill(file: &mut ObjectReader, into: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(into) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
