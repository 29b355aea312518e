//! Makes a lazy image from the tables of contents of its layers, for images without an index.
//!
//! The manifest names the digest of each table, so the tables are as trusted as the manifest. They are not compared with
//! the layers, so the image is as unproven as one that was made from an index (decision 35).

use std::collections::HashMap;
use std::io::{self, Write};

use image::digest::Digest;
use image::gzip::Start;
use image::layer::LayerError;
use image::lazy::{BlobKind, CHUNK_MAX, Head, HeadError, SpanPlace, UNIT};
use image::tree::Builder;
use image::verity::{Algorithm, ObjectId, digest};
use oci::blobs::BlobSource;
use oci::manifest::{Descriptor, Manifest};
use sha2::{Digest as _, Sha256};
use store::{DeviceKind, DraftError, IndexWindows, OperationError, StoredObject, Traces, parallel};

use super::parts::Parts;
use crate::chunked::tree::file_object;
use crate::chunked::{Contents, Format, Room, Toc, TocTreeError};
use crate::import::{ImportLimitError, Limits};
use crate::lazy::LayerIndex;
use crate::lazy::artifact::LazyParts;
use crate::native::{self, NativeError, Places};

/// Alignment of files in a device, in bytes, so that a page of a device has bytes of one file.
const ALIGNMENT: u64 = 4096;

/// The beginning of the bytes that the fingerprint of a file of several chunks is a digest of. The digest of the whole
/// file, which the table has, is not verified before the file is complete. Kernels may share pages of files with equal
/// fingerprints, so the fingerprint is not one that another file can have.
const FINGERPRINT: &[u8] = b"quire file of chunks, version 1\0";

/// Why an image cannot be made from the tables of contents of its layers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TocImageError {
    /// A layer has no usable table.
    #[error("layer {layer} cannot be used without an index")]
    Layer { layer: Box<Digest>, source: TocLayerFlaw },
    /// No layer has a file, so no data could be fetched later.
    #[error("its layers have no files")]
    NoFiles,
    /// The layers contradict each other.
    #[error("the layer {layer} does not fit to the layers below")]
    Merge { layer: Box<Digest>, source: LayerError },
    /// The image cannot be written.
    #[error("cannot make an image of its layers' tables of contents")]
    Write(#[source] Box<NativeError>),
    /// All layers together exceed a limit of imports.
    #[error(transparent)]
    Limit(#[from] ImportLimitError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Why a layer cannot be used without an index.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct TocLayerFlaw(Flaw);

#[derive(Debug, thiserror::Error)]
enum Flaw {
    #[error(transparent)]
    Table(#[from] TocTreeError),
    #[error("a chunk has {0} bytes, more than {CHUNK_MAX}")]
    Chunk(u64),
    #[error("a chunk has no digest")]
    NoDigest,
    #[error("its files are too long")]
    Length,
    #[error(transparent)]
    Limit(#[from] ImportLimitError),
    #[error(transparent)]
    Head(#[from] HeadError),
}

/// Returns whether all layers announce a table of contents. Otherwise, only an index can replace the layers.
pub(super) fn have_tables(manifest: &Manifest) -> bool {
    let layers = &manifest.layers;
    !layers.is_empty() && layers.iter().all(Toc::is_announced_by)
}

/// Fetches the tables of all layers, and makes the image. The caller has checked that each layer announces a table
/// ([`have_tables`]). `budget` is the memory for the tables in bytes.
pub(super) fn fetch(
    blobs: &dyn BlobSource,
    manifest: &Manifest,
    diff_ids: &[Digest],
    budget: usize,
    threads: usize,
    limits: &Limits,
) -> Result<LazyParts, TocImageError> {
    let failed = |layer: &Descriptor, flaw: Flaw| TocImageError::Layer {
        layer: Box::new(layer.digest),
        source: TocLayerFlaw(flaw),
    };
    let room = Room::new(budget);
    let layers = &manifest.layers;
    let fetched = parallel::each("table", threads, layers.len(), |at| {
        let layer = &layers[at];
        let toc = Toc::fetch_with_tree(layer, &Parts::new(blobs, layer), &room);
        Ok::<_, OperationError>(toc.map_err(Flaw::from))
    })?;
    let mut places = ChunkPlaces::default();
    let (mut indexes, mut tree) = (Vec::<LayerIndex>::new(), None::<Builder>);
    // The service needs memory for each unit of a device, also for chunks that do not exist.
    let (mut all_packed, mut all_unpacked) = (0_u64, 0_u64);
    for ((layer, diff_id), toc) in layers.iter().zip(diff_ids).zip(fetched) {
        let Toc { contents, format, tree: of_layer, .. } = toc.map_err(|it| failed(layer, it))?;
        let of_layer = of_layer.ok_or_else(|| failed(layer, TocTreeError::None.into()))?;
        let index = places.add(layer, diff_id, &contents, format, of_layer.seed());
        let index = index.map_err(|it| failed(layer, it))?;
        drop(contents);
        let unpacked = index.as_ref().map_or(0, |it| it.head.device_bytes);
        let checked = limits.check_layer(layer.size, unpacked);
        checked.map_err(|it| failed(layer, it.into()))?;
        (all_packed, all_unpacked) =
            (all_packed.saturating_add(layer.size), all_unpacked.saturating_add(unpacked));
        limits.check_all(all_packed, all_unpacked)?;
        // The same layer may occur twice.
        if let Some(index) = index
            && indexes.iter().all(|it| it.head.device != index.head.device)
        {
            indexes.push(index);
        }
        let merged = of_layer.into_layer().onto(tree.take());
        let layer = Box::new(layer.digest);
        tree = Some(merged.map_err(|source| TocImageError::Merge { layer, source })?);
    }
    let tree = tree.filter(|_| !indexes.is_empty()).ok_or(TocImageError::NoFiles)?.finish();
    let mut image = Vec::new();
    let written = native::write_to(&tree, &places, &mut image);
    let written = written.map_err(|it| TocImageError::Write(Box::new(it)))?;
    // A layer whose files are all hidden needs no device.
    indexes.retain(|it| written.devices.contains(&it.head.device));
    if indexes.is_empty() {
        return Err(TocImageError::NoFiles);
    }
    Ok(LazyParts {
        id: digest(Algorithm::Sha256, &image).into(),
        image,
        indexes,
        hot: None,
        traces: Traces::default(),
        created: None,
        recipes: Vec::new(),
    })
}

/// The places of files in the devices of an image.
#[derive(Default)]
struct ChunkPlaces(HashMap<ObjectId, StoredObject>);

impl ChunkPlaces {
    /// Adds the files of a layer, and returns the index of the layer's device, unless the layer has no files.
    fn add(
        &mut self,
        layer: &Descriptor,
        diff_id: &Digest,
        contents: &Contents,
        format: Format,
        seed: &Digest,
    ) -> Result<Option<LayerIndex>, Flaw> {
        let Some(last) = contents.pieces.last() else { return Ok(None) };
        let kind = match format {
            Format::Estargz => BlobKind::GzipChunks { data_end: contents.end },
            Format::ZstdChunked => BlobKind::ZstdChunks { data_end: last.blob.end },
        };
        let TocLayout { spans, digests, files, device_bytes } = TocLayout::new(contents)?;
        let head = Head::of_chunks(
            layer.digest,
            layer.size,
            kind,
            *diff_id,
            device_bytes,
            spans,
            digests,
        )?;
        for (number, (offset, sha256)) in files.into_iter().enumerate() {
            let object = file_object(seed, number);
            let stored = StoredObject {
                object,
                device: head.device,
                device_bytes,
                kind: DeviceKind::Tar,
                offset,
                size: contents.files[number].size,
                sha256,
                pieces: None,
            };
            self.0.insert(object, stored);
        }
        Ok(Some(LayerIndex { head, windows: IndexWindows::Groups(Vec::new()) }))
    }
}

impl Places for ChunkPlaces {
    fn find_object(&self, object: &ObjectId) -> Result<Option<StoredObject>, DraftError> {
        Ok(self.0.get(object).cloned())
    }

    fn give(&self, _: &ObjectId, _: u64, _: &mut dyn Write) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::InvalidData, "the file is in no layer"))
    }
}

/// A device that has the contents of files in the order of the blob.
#[derive(Debug, Default)]
struct TocLayout {
    spans: Vec<SpanPlace>,
    /// Digest of each chunk.
    digests: Vec<[u8; 32]>,
    /// Offset in the device and fingerprint of each file.
    files: Vec<(u64, [u8; 32])>,
    device_bytes: u64,
}

impl TocLayout {
    fn new(contents: &Contents) -> Result<Self, Flaw> {
        let mut layout = Self::default();
        let mut end = 0;
        for file in &contents.files {
            let start = start_of(end, file.size).ok_or(Flaw::Length)?;
            layout.pad(start - end)?;
            let mut all = Sha256::new_with_prefix(FINGERPRINT);
            let pieces = &contents.pieces[file.pieces.clone()];
            for piece in pieces {
                if piece.length > CHUNK_MAX {
                    return Err(Flaw::Chunk(piece.length));
                }
                let digest = piece.key.ok_or(Flaw::NoDigest)?.0;
                all.update(piece.length.to_le_bytes());
                all.update(digest);
                layout.digests.push(digest);
                layout.spans.push(SpanPlace {
                    start: Start::Member,
                    packed: piece.blob.start,
                    unpacked: start.checked_add(piece.offset).ok_or(Flaw::Length)?,
                    padding: 0,
                });
            }
            let fingerprint = match pieces {
                [one] => one.key.ok_or(Flaw::NoDigest)?.0,
                _ => all.finalize().into(),
            };
            layout.files.push((start, fingerprint));
            end = start.checked_add(file.size).ok_or(Flaw::Length)?;
        }
        let device_bytes = end.checked_next_multiple_of(ALIGNMENT).ok_or(Flaw::Length)?;
        layout.pad(device_bytes - end)?;
        layout.device_bytes = device_bytes;
        Ok(layout)
    }

    /// Adds zeros behind the last chunk.
    fn pad(&mut self, zeros: u64) -> Result<(), Flaw> {
        if let Some(last) = self.spans.last_mut() {
            last.padding = u16::try_from(zeros).or(Err(Flaw::Length))?;
        }
        Ok(())
    }
}

/// Returns where a file of this size in bytes begins, if the last file ends at `end`. A file of a unit or more begins
/// with a unit, and a smaller one lies in one unit, so that no unit has parts of two larger chunks.
fn start_of(end: u64, size: u64) -> Option<u64> {
    if size >= UNIT {
        return end.checked_next_multiple_of(UNIT);
    }
    let start = end.checked_next_multiple_of(ALIGNMENT)?;
    let last = start.checked_add(size)?.saturating_sub(1);
    if start / UNIT == last / UNIT { Some(start) } else { start.checked_next_multiple_of(UNIT) }
}
