//! Makes the indexes of an image whose data and layer blobs are in the store.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use image::digest::{Digest, DigestHasher};
use image::gzip::GzipError;
use image::lazy::Head;
use image::verity::DeviceId;
use oci::blobs::BlobSource;
use oci::manifest::Descriptor;
use store::parallel;
use store::{IndexWindows, LazyDeviceError, OpenDevice, OpenImage, OperationError, Store};

use super::{
    FramesError, IndexedLayer, KeptBlobs, LayerIndex, LayerIndexError, SpanCompression, SpansError,
};
use crate::progress::Event;
use crate::stored::StoredImage;

/// Resources for making indexes.
#[derive(Clone, Copy)]
pub struct IndexOptions<'a> {
    /// Maximum number of layers that are read at the same time.
    pub threads: NonZeroUsize,
    /// Callback for progress, called from any thread.
    pub progress: &'a (dyn Fn(Event<'_>) + Sync),
    /// Set to true to end the work with [`IndexError::Cancelled`].
    pub cancel: &'a AtomicBool,
}

impl fmt::Debug for IndexOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexOptions").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// The outcome of indexing a layer.
#[derive(Debug)]
pub struct IndexedReport {
    /// Digest of the layer's blob.
    pub blob: Digest,
    /// Length of the blob in bytes, from the manifest.
    pub blob_bytes: u64,
    /// Digest of the tar in the blob.
    pub diff_id: Digest,
    /// The index, or why the layer has none.
    pub index: Result<IndexReport, NoIndex>,
}

/// An index in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexReport {
    /// Whether it was made and saved now, not earlier.
    pub is_new: bool,
    /// The device that the index fills.
    pub device: DeviceId,
    /// Length of the head in bytes.
    pub head_bytes: u64,
    /// Length of the windows in bytes.
    pub windows_bytes: u64,
    /// Number of positions at which decompression can begin.
    pub spans: usize,
}

/// Why a layer has no index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoIndex {
    /// The layer's device is not part of the image.
    #[error("it needs none, because it has no file of the image")]
    Unused,
    /// The blob is not in the store.
    #[error("the store does not have its blob: pull the image from a registry with --keep-layers")]
    NotKept,
    /// The blob is not compressed.
    #[error(
        "only layers compressed with gzip or zstd can have one: push the image with \
        --compression gzip, and pull it again"
    )]
    NotCompressed,
    /// The blob's deflate blocks are too large, so decompression cannot begin inside the blob.
    #[error(
        "its gzip blocks are too large for partial reads: compress the layer with another program \
        or level"
    )]
    Blocks,
    /// The blob's zstd frames are too large. Many programs compress a layer as one frame.
    #[error(
        "its zstd frames are too large for partial reads: push the image with --compression gzip, \
        or compress its layers as zstd:chunked"
    )]
    Frames,
    /// The index would be too large, or using it would take too much memory.
    #[error(
        "its compressed data is unsuitable for partial reads: compress the layer with another program"
    )]
    Compression,
    /// The blob's bytes do not match its digest.
    #[error(
        "its blob in the store is damaged: `quire fsck --repair` removes it, and a pull with \
        --keep-layers fetches it again"
    )]
    Damaged(#[source] LayerIndexError),
    /// The index in the store is damaged, and cannot be made again without the blob.
    #[error(
        "its index in the store is damaged, and the store does not have its blob: \
        `quire fsck --repair` removes the index, and a pull with --keep-layers --index makes it again"
    )]
    DamagedIndex(#[source] Box<LazyDeviceError>),
    /// The index cannot be made for another reason.
    #[error("cannot make the index")]
    Failed(#[source] LayerIndexError),
}

impl NoIndex {
    pub(crate) const fn of_blob(error: SpansError) -> Self {
        match error {
            SpansError::Gzip(GzipError::Block) => Self::Blocks,
            SpansError::Zstd(FramesError::Large) => Self::Frames,
            SpansError::Gzip(GzipError::Empty | GzipError::Windows | _)
            | SpansError::Zstd(FramesError::Empty) => Self::Compression,
        }
    }
}

/// An error while the indexes of an image are made. Indexes that were saved before the error are kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The caller cancelled.
    #[error("interrupted")]
    Cancelled,
}

/// Makes the index of each layer of an image from the blobs in the store, and saves it. The image must have the form
/// `tar`. Returns the outcomes in the manifest's order. A layer that occurs twice is reported once.
///
/// # Errors
/// [`IndexError`]. A layer that cannot have an index is not an error.
pub fn index(
    store: &Store,
    image: &OpenImage,
    documents: &StoredImage,
    options: &IndexOptions<'_>,
) -> Result<Vec<IndexedReport>, IndexError> {
    let mut devices = Vec::new();
    for device in &image.devices {
        let layer = store.devices.layer_of(&device.id);
        let layer = layer.map_err(OperationError::of("look for the layer of device", device.id))?;
        devices.extend(layer.map(|it| (it, device)));
    }
    let layers = documents.manifest.layers.iter().zip(documents.config.diff_ids());
    let layers: Vec<(&Descriptor, &Digest)> = layers.collect();
    let sizes: Vec<_> = layers.iter().map(|it| Some(it.0.size)).collect();
    (options.progress)(Event::Layers(&sizes));
    let mut seen = BTreeSet::new();
    let first: Vec<usize> =
        (0..layers.len()).filter(|at| seen.insert(layers[*at].0.digest)).collect();
    let work = Work { store, manifest: &documents.digest, options };
    let make = |number: usize| {
        let at = first[number];
        let (layer, diff_id) = layers[at];
        let device = devices.iter().find(|it| it.0 == *diff_id).map(|it| it.1);
        work.layer(at, layer, diff_id, device)
    };
    parallel::each("index", options.threads.get(), first.len(), make)
}

/// The inputs that all layers share.
#[derive(Clone, Copy)]
struct Work<'a> {
    store: &'a Store,
    manifest: &'a Digest,
    options: &'a IndexOptions<'a>,
}

impl Work<'_> {
    fn layer(
        &self,
        number: usize,
        layer: &Descriptor,
        diff_id: &Digest,
        device: Option<&OpenDevice>,
    ) -> Result<IndexedReport, IndexError> {
        let tell = self.options.progress;
        tell(Event::Started { layer: number });
        let index = match self.index(number, layer, diff_id, device) {
            Ok(made) => Ok(made),
            Err(Stop::None(reason)) => Err(reason),
            Err(Stop::All(error)) => return Err(error),
        };
        tell(Event::Done { layer: number });
        let (blob, blob_bytes, diff_id) = (layer.digest, layer.size, *diff_id);
        Ok(IndexedReport { blob, blob_bytes, diff_id, index })
    }

    fn index(
        &self,
        number: usize,
        layer: &Descriptor,
        diff_id: &Digest,
        device: Option<&OpenDevice>,
    ) -> Result<IndexReport, Stop> {
        let OpenDevice { id, file, .. } = device.ok_or(Stop::None(NoIndex::Unused))?;
        let kept = self.store.downloads.blob(&layer.digest);
        let failed = OperationError::of("read blob", &layer.digest);
        let kept = kept.map_err(|error| failed(io::Error::other(error)))?;
        let Some((mut kept, _)) = kept else {
            return self.present(layer, id);
        };
        let mut magic = Vec::new();
        let first = kept.by_ref().take(SpanCompression::MAGIC as u64).read_to_end(&mut magic);
        first.map_err(failed)?;
        if SpanCompression::detect(&magic).is_none() {
            let mut hasher = DigestHasher::sha256();
            hasher.update(&magic);
            io::copy(&mut kept, &mut hasher).map_err(failed)?;
            let actual = Box::new(hasher.finish());
            return Err(Stop::None(match *actual == layer.digest {
                true => NoIndex::NotCompressed,
                false => NoIndex::Damaged(LayerIndexError::BlobDigest {
                    expected: Box::new(layer.digest),
                    actual,
                }),
            }));
        }
        let tell = |bytes| (self.options.progress)(Event::Read { layer: number, bytes });
        let blobs = Told { blobs: KeptBlobs(self.store), tell: &tell };
        let indexed = IndexedLayer { layer, diff_id, device: id, file };
        let index = LayerIndex::new(&indexed, &blobs, self.options.cancel);
        let index = index.map_err(Stop::from_error)?;
        let saved = index.save(self.store);
        saved.map_err(OperationError::of("save the index of blob", &layer.digest))?;
        Ok(IndexReport { is_new: true, ..IndexReport::from_head(&index.head) })
    }

    /// Returns the sound index of this blob that the store has, for example because the import made it. If the store
    /// also has the blob, the index is made again, which repairs a damaged one.
    fn present(&self, layer: &Descriptor, device: &DeviceId) -> Result<IndexReport, Stop> {
        match self.store.lazy_devices.index_for(device, Some(self.manifest)) {
            // Windows that a lazy pull has not fetched are missing in a new artifact.
            Ok(Some((head, IndexWindows::Groups(_))))
                if (head.blob, head.blob_bytes) == (layer.digest, layer.size) =>
            {
                Ok(IndexReport::from_head(&head))
            }
            Ok(_) => Err(Stop::None(NoIndex::NotKept)),
            Err(error @ LazyDeviceError::Index { .. }) => {
                Err(Stop::None(NoIndex::DamagedIndex(Box::new(error))))
            }
            Err(error) => {
                Err(OperationError::of("read the index of blob", &layer.digest)(error).into())
            }
        }
    }
}

impl IndexReport {
    fn from_head(head: &Head) -> Self {
        Self {
            is_new: false,
            device: head.device,
            head_bytes: head.encode().map_or(0, |it| it.len() as u64),
            windows_bytes: head.windows_bytes(),
            spans: head.spans.len(),
        }
    }
}

/// Why a layer's index was not made.
enum Stop {
    /// This layer gets no index. The other layers may still get an index.
    None(NoIndex),
    /// The whole operation fails.
    All(IndexError),
}

impl From<OperationError> for Stop {
    fn from(error: OperationError) -> Self {
        Self::All(error.into())
    }
}

impl Stop {
    fn from_error(error: LayerIndexError) -> Self {
        Self::None(match error {
            LayerIndexError::Cancelled => return Self::All(IndexError::Cancelled),
            LayerIndexError::Spans { source, .. } => NoIndex::of_blob(source),
            LayerIndexError::BlobDigest { .. } | LayerIndexError::Blob { .. } => {
                NoIndex::Damaged(error)
            }
            other => NoIndex::Failed(other),
        })
    }
}

/// A blob source that reports how many bytes are read.
struct Told<'a, B> {
    blobs: B,
    tell: &'a (dyn Fn(u64) + Sync),
}

impl<B: BlobSource> BlobSource for Told<'_, B> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        Box::new(ToldReader { reader: self.blobs.blob(digest, size, range), tell: self.tell })
    }
}

struct ToldReader<'a> {
    reader: Box<dyn Read + Send + 'a>,
    tell: &'a (dyn Fn(u64) + Sync),
}

impl Read for ToldReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        (self.tell)(read as u64);
        Ok(read)
    }
}
