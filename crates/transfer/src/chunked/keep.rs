//! Records where the chunks of a layer are in the store, so that later layers can reuse them.

use std::collections::VecDeque;
use std::io;
use std::sync::PoisonError;

use image::tar::{Kind, Reader, TarError, recipe};
use image::verity::ObjectId;
use store::{ChunkKey, Chunks, DiskError, ObjectPart, OperationError, Store, StoredLayerError};

use super::Toc;
use image::digest::Digest;

/// Why the chunks of a layer are not recorded. As a result, a later pull downloads them again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepError {
    /// The store has no such layer.
    #[error("the store has no layer {0}")]
    Absent(Digest),
    /// The layer cannot be read.
    #[error(transparent)]
    Layer(#[from] StoredLayerError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The files in the table differ from the files in the tar.
    #[error("the table of contents does not match the layer")]
    Different,
    /// The list of chunks cannot be stored.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A file of the tar.
struct File {
    position: u64,
    size: u64,
    /// `None` if the file is small enough to be in the recipe.
    object: Option<ObjectId>,
}

impl Toc {
    /// Records where the chunks of a complete layer are in the store.
    ///
    /// # Errors
    /// [`KeepError`]; in this case nothing is recorded.
    pub fn keep(&self, store: &Store, diff_id: &Digest) -> Result<(), KeepError> {
        let layer = store.layers.open(diff_id)?.ok_or(KeepError::Absent(*diff_id))?;
        let files = files(&layer)?;
        let contents = &self.contents;
        // The tar may also contain the table of contents, which does not list itself.
        if !(contents.files.len()..=contents.files.len() + 1).contains(&files.len()) {
            return Err(KeepError::Different);
        }
        let mut chunks = Chunks::new().map_err(compress_failed)?;
        let mut wanted = VecDeque::new();
        if let Some(file) = files.first() {
            wanted.push_back((0, file.position, contents.first));
        }
        for (index, (told, file)) in contents.files.iter().zip(&files).enumerate() {
            if told.size != file.size {
                return Err(KeepError::Different);
            }
            for piece in &contents.pieces[told.pieces.clone()] {
                let Some(key) = piece.key else { continue };
                let (offset, length) = (piece.offset, piece.length);
                match file.object {
                    Some(object) => chunks.object(key, ObjectPart { object, offset, length }),
                    None => {
                        let start = file.position + offset;
                        wanted.push_back((start, start + length, key));
                    }
                }
            }
            if let (Some(key), Some(next)) = (told.gap, files.get(index + 1)) {
                wanted.push_back((file.position + file.size, next.position, key));
            }
        }
        copy(&layer, wanted, &mut chunks)?;
        Ok(store.downloads.keep_chunks(diff_id, chunks)?)
    }
}

fn compress_failed(error: io::Error) -> OperationError {
    OperationError::of("compress", "the layer's list of chunks")(error)
}

fn recipe_failed(error: recipe::RebuildError) -> OperationError {
    OperationError::of("read", "the recipe of the layer")(error)
}

/// Returns all regular files of a layer that are not empty, in the order of its tar.
fn files(layer: &store::StoredLayer) -> Result<Vec<File>, KeepError> {
    let found = recipe::Skeleton::with_positions(layer.recipe()?);
    let (replay, places) = found.map_err(recipe_failed)?;
    let mut reader = Reader::new(replay);
    let mut files: Vec<File> = Vec::new();
    loop {
        let entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => break,
            // The entry was ignored on import, and is not a regular file.
            Err(TarError::Unsupported { .. }) => continue,
            Err(error) => {
                return Err(OperationError::of("read", "the layer's entries")(error).into());
            }
        };
        if matches!(entry.kind, Kind::Regular) && entry.size > 0 {
            // The table cannot describe holes.
            let [segment] = entry.segments else { return Err(KeepError::Different) };
            if segment.offset != 0 || segment.length != entry.size {
                return Err(KeepError::Different);
            }
            files.push(File { position: entry.position, size: entry.size, object: None });
        }
    }
    let places = std::mem::take(&mut *places.lock().unwrap_or_else(PoisonError::into_inner));
    for (position, object) in places {
        if let Ok(at) = files.binary_search_by_key(&position, |file| file.position) {
            files[at].object = Some(object);
        }
    }
    Ok(files)
}

/// Copies parts of the tar that are in the recipe. Each part has a start, an end and a key; the parts ascend and do
/// not overlap.
fn copy(
    layer: &store::StoredLayer,
    mut wanted: VecDeque<(u64, u64, ChunkKey)>,
    chunks: &mut Chunks,
) -> Result<(), KeepError> {
    let mut reader = recipe::Reader::new(layer.recipe()?).map_err(recipe_failed)?;
    let mut position = 0;
    let mut part = Vec::new();
    while let Some(operation) = reader.next_operation().map_err(recipe_failed)? {
        let bytes = match operation {
            recipe::Operation::Verbatim(bytes) => bytes,
            recipe::Operation::Range { segment, .. } => {
                position += segment.length;
                &[]
            }
        };
        let end = position + bytes.len() as u64;
        while let Some((from, to, key)) = wanted.front().copied().filter(|it| it.0 < end) {
            let inside = |at: u64| {
                let at = at.clamp(position, end) - position;
                usize::try_from(at).expect("at most as many as the bytes")
            };
            part.extend_from_slice(&bytes[inside(from)..inside(to)]);
            if to > end {
                break;
            }
            // The bytes are incomplete if some of them belong to an object whose file is not in the tree.
            if part.len() as u64 == to - from {
                chunks.bytes(key, &part).map_err(compress_failed)?;
            }
            part.clear();
            wanted.pop_front();
        }
        position = end;
    }
    Ok(())
}
