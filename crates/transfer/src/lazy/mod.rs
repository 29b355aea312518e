//! Indexes for lazy loading, which map a layer's device to its compressed blob. An index is made in one pass over the
//! blob.

pub mod artifact;
mod check;
mod closure;
mod frames;
mod hot;
#[cfg(feature = "registry")]
mod keep;
mod make;
#[cfg(feature = "registry")]
mod mirrors;
mod previous;
mod publish;
#[cfg(feature = "registry")]
mod registry;
#[cfg(feature = "registry")]
mod search;
mod spans;
mod start;
#[cfg(feature = "registry")]
mod trust;
pub mod update;

use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use image::digest::Digest;
use image::gzip::{Checkpoint, Window};
use image::lazy::{Head, SpanPlace, UNIT, WindowGroup, decode_windows, encode_windows};
use image::verity::DeviceId;
use oci::blobs::{BlobSource, FailingReader};
use oci::manifest::Descriptor;
use sha2::{Digest as _, Sha256};
use store::{IndexWindows, OperationError, Store};

pub use check::{ImageCheckError, check_image};
pub use closure::{StartCommand, add_block, closure, exercise_elf};
pub use frames::{FrameIndexer, FrameSpans, FramesError};
pub use hot::hot_pack;
#[cfg(feature = "registry")]
pub use keep::{IndexKeepError, StoredIndex, keep, stored_index};
pub use make::{IndexError, IndexOptions, IndexReport, IndexedReport, NoIndex, index};
pub use previous::{PreviousVersions, previous_start};
pub use publish::{LazyImage, LazyPublishError, LazyPublished, publish};
#[cfg(feature = "registry")]
pub use registry::{
    FetchedIndex, LazyFetch, LazyFetchError, LazyPushError, LazyPushed, index_tag, push, sources,
    tag_of_index,
};
#[cfg(feature = "registry")]
pub use search::{GuessedIndexes, IndexSearch};
pub use spans::{SpansError, inflate_span};
pub use start::{DeviceReads, start_blocks, started_files};
#[cfg(feature = "registry")]
pub use trust::{INDEX_ANNOTATION, TrustIndex, TrustIndexError, Untrusted};

pub(crate) use frames::ZSTD_WINDOW_LOG;
pub(crate) use spans::{BlobSpans, SpanCompression, SpanIndexer};

/// Compression level of windows. It is high, because windows are compressed once and fetched often.
const ZSTD_LEVEL: i32 = 9;
/// Maximum decompressed length of a group in bytes. Groups of valid indexes have a few hundred kilobytes.
const GROUP_MAX: usize = 16 << 20;
/// Maximum encoded length of a window in a group, in bytes: 32 KiB in runs of one byte, each with a distance and a
/// length, and the number of runs.
const WINDOW_MAX: usize = image::gzip::WINDOW / 2 * 3 + 8;
/// Number of the blob's bytes per read.
const PIECE: usize = 256 << 10;

/// An error while an index is made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerIndexError {
    /// The blob cannot be read, or its compressed data is not valid.
    #[error("cannot inflate blob {blob}")]
    Blob { blob: Box<Digest>, source: io::Error },
    /// The blob's bytes do not match its digest.
    #[error("blob {expected} is damaged: its digest is {actual}")]
    BlobDigest {
        /// Digest in the manifest.
        expected: Box<Digest>,
        /// Digest of the blob's bytes.
        actual: Box<Digest>,
    },
    /// The digest of the tar in the blob differs from the diff id.
    #[error("blob {blob} contains another tar: its digest is {actual}, not {expected}")]
    DiffId {
        blob: Box<Digest>,
        /// The layer's diff id.
        expected: Box<Digest>,
        actual: Box<Digest>,
    },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// Decompression of the blob cannot begin inside it.
    #[error("blob {blob} does not support partial reads")]
    Spans { blob: Box<Digest>, source: SpansError },
    /// The caller cancelled.
    #[error("interrupted")]
    Cancelled,
}

/// A layer's index, which describes how to fill its device from its blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerIndex {
    /// Everything except the windows.
    pub head: Head,
    /// The groups of windows, which may not have been fetched yet.
    pub windows: IndexWindows,
}

/// A layer to be indexed.
#[derive(Debug, Clone, Copy)]
pub struct IndexedLayer<'a> {
    /// Descriptor of the layer in the manifest.
    pub layer: &'a Descriptor,
    /// Digest of the layer's tar.
    pub diff_id: &'a Digest,
    /// The device of the tar.
    pub device: &'a DeviceId,
    /// The device's file, which must be complete.
    pub file: &'a File,
}

/// A reader that hashes the bytes that it returns.
struct Hashed<'a, R> {
    reader: R,
    hasher: Sha256,
    cancel: &'a AtomicBool,
}

impl<R: Read> Read for Hashed<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        let read = self.reader.read(into)?;
        self.hasher.update(&into[..read]);
        Ok(read)
    }
}

/// The data that one pass over a blob collects for its index.
#[derive(Debug)]
pub(crate) struct IndexParts {
    pub(crate) spans: BlobSpans,
    pub(crate) units: Units,
    /// Length of the tar in bytes.
    pub(crate) tar_bytes: u64,
}

/// Digests of consecutive units.
#[derive(Debug, Default)]
pub(crate) struct Units {
    done: Vec<[u8; 32]>,
    current: Sha256,
    filled: u64,
}

impl Units {
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let left = usize::try_from(UNIT - self.filled).unwrap_or(usize::MAX);
            let (these, rest) = bytes.split_at(left.min(bytes.len()));
            self.current.update(these);
            self.filled += these.len() as u64;
            if self.filled == UNIT {
                self.end();
            }
            bytes = rest;
        }
    }

    fn end(&mut self) {
        if self.filled > 0 {
            self.done.push(std::mem::take(&mut self.current).finalize().into());
            self.filled = 0;
        }
    }
}

impl LayerIndex {
    /// Reads a layer's blob once, and makes its index. The digests of blob and tar are verified. The bytes of the tar
    /// are taken from the blob; only the rest of the device is read from its file.
    pub fn new(
        layer: &IndexedLayer<'_>,
        blobs: &dyn BlobSource,
        cancel: &AtomicBool,
    ) -> Result<Self, LayerIndexError> {
        let Descriptor { digest, size, .. } = layer.layer;
        let blob = || Box::new(*digest);
        let reader = blobs.blob(digest, *size, 0..*size);
        let mut hashed = Hashed { reader, hasher: Sha256::new(), cancel };
        let failed = |source| match cancel.load(Ordering::Relaxed) {
            true => LayerIndexError::Cancelled,
            false => LayerIndexError::Blob { blob: blob(), source },
        };
        let mut magic = Vec::new();
        let first = hashed.by_ref().take(SpanCompression::MAGIC as u64).read_to_end(&mut magic);
        first.map_err(failed)?;
        // Other data fails as gzip.
        let compression = SpanCompression::detect(&magic).unwrap_or(SpanCompression::Gzip);
        let source = BufReader::with_capacity(PIECE, magic.chain(&mut hashed));
        let mut indexer = SpanIndexer::new(compression, source).map_err(failed)?;
        let (mut units, mut tar, mut tar_bytes) = (Units::default(), Sha256::new(), 0);
        let mut piece = vec![0; PIECE];
        loop {
            let read = indexer.read(&mut piece).map_err(failed)?;
            if read == 0 {
                break;
            }
            tar.update(&piece[..read]);
            units.add(&piece[..read]);
            tar_bytes += read as u64;
        }
        let spans = indexer.finish();
        let actual = Digest::from_sha256(&hashed.hasher.finalize().into());
        if actual != *digest {
            let actual = Box::new(actual);
            return Err(LayerIndexError::BlobDigest { expected: blob(), actual });
        }
        let actual = Digest::from_sha256(&tar.finalize().into());
        if actual != *layer.diff_id {
            let (expected, actual) = (Box::new(*layer.diff_id), Box::new(actual));
            return Err(LayerIndexError::DiffId { blob: blob(), expected, actual });
        }
        let object = format_args!("the data of device {} after its tar", layer.device);
        let tail = tail(layer.file, tar_bytes).map_err(OperationError::of("read", object))?;
        let spans = spans.map_err(|source| LayerIndexError::Spans { blob: blob(), source })?;
        let parts = IndexParts { spans, units, tar_bytes };
        let (head, groups) = parts.finish(digest, *size, layer.diff_id, *layer.device, tail)?;
        Ok(Self { head, windows: IndexWindows::Groups(groups) })
    }
}

/// Returns the length of a head and its windows in bytes.
pub(crate) fn index_bytes(head: &Head) -> u64 {
    let length = head.encode().map_or(0, |it| it.len());
    (length as u64).saturating_add(head.windows_bytes())
}

impl IndexParts {
    /// Makes the head and the groups of windows of a device with this tail, for a blob of this digest and length in
    /// bytes.
    pub(crate) fn finish(
        self,
        blob: &Digest,
        blob_bytes: u64,
        diff_id: &Digest,
        device: DeviceId,
        tail: Vec<u8>,
    ) -> Result<(Head, Vec<u8>), LayerIndexError> {
        let Self { spans: BlobSpans { kind, checkpoints }, mut units, tar_bytes } = self;
        units.add(&tail);
        units.end();
        let compressed = compressed(&checkpoints);
        let (groups, windows) =
            compressed.map_err(OperationError::of("compress", "the windows of an index"))?;
        let spans = checkpoints.iter().map(|it| {
            let Checkpoint { start, packed, unpacked, .. } = *it;
            SpanPlace { start, packed, unpacked, padding: 0 }
        });
        let head = Head {
            device,
            device_bytes: tar_bytes.saturating_add(tail.len() as u64),
            blob: *blob,
            blob_bytes,
            kind,
            diff_id: *diff_id,
            tar_bytes,
            tail,
            units: units.done,
            spans: spans.collect(),
            groups,
        };
        // If an index cannot be encoded, it could not be read again.
        let written = head.encode();
        written.map_err(OperationError::of("encode the index of blob", blob))?;
        Ok((head, windows))
    }
}

/// Returns the bytes of a device after its tar.
fn tail(device: &File, tar_bytes: u64) -> io::Result<Vec<u8>> {
    let device_bytes = device.metadata()?.len();
    let length = device_bytes.checked_sub(tar_bytes).and_then(|it| usize::try_from(it).ok());
    let length = length.filter(|it| *it < 1024).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the device does not have the length of the layer's tar",
        )
    })?;
    let mut tail = vec![0; length];
    device.read_exact_at(&mut tail, tar_bytes)?;
    Ok(tail)
}

fn compressed(checkpoints: &[Checkpoint]) -> io::Result<(Vec<WindowGroup>, Vec<u8>)> {
    let (mut groups, mut all) = (Vec::new(), Vec::new());
    for (first, bytes) in encode_windows(checkpoints) {
        let frame = zstd::bulk::compress(&bytes, ZSTD_LEVEL)?;
        let bytes = u32::try_from(frame.len()).map_err(io::Error::other)?;
        groups.push(WindowGroup { first, bytes });
        all.extend(frame);
    }
    Ok((groups, all))
}

/// Decodes the windows of a group with `spans` spans from its frame. Returns `None` if the frame is not valid.
#[must_use]
pub fn group_windows(frame: &[u8], spans: usize) -> Option<Vec<Window>> {
    let most = spans.checked_mul(WINDOW_MAX)?.min(GROUP_MAX);
    let bytes = zstd::bulk::decompress(frame, most).ok()?;
    decode_windows(&bytes, spans)
}

/// The unmodified blobs in a store: see `pull --keep-layers`.
#[derive(Debug, Clone, Copy)]
pub struct KeptBlobs<'a>(pub &'a Store);

impl BlobSource for KeptBlobs<'_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let open = || {
            let kept = self.0.downloads.blob(digest).map_err(io::Error::other)?;
            let (mut file, kept) = kept.ok_or(io::ErrorKind::NotFound)?;
            if kept != size {
                return Err(io::Error::other(format!(
                    "the store has {kept} bytes of it, not {size}"
                )));
            }
            file.seek(SeekFrom::Start(range.start))?;
            Ok(file.take(range.end.saturating_sub(range.start)))
        };
        match open() {
            Ok(part) => Box::new(part),
            Err(error) => Box::new(FailingReader::new(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write as _};

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use oci::blobs::Whole;

    use super::*;

    struct Bytes(Vec<u8>);

    impl BlobSource for Bytes {
        fn blob(&self, _: &Digest, _: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
            let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
            Box::new(Cursor::new(self.0.get(start..end.min(self.0.len())).unwrap_or_default()))
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Makes the index of a layer with the digest of `named` in the manifest, the diff id of `tar` in the config, and
    /// the bytes `blob` in the registry.
    fn index(named: &[u8], tar: &[u8], blob: &[u8]) -> Result<LayerIndex, LayerIndexError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(tar).unwrap();
        file.write_all(&[1; 512]).unwrap();
        let layer = Descriptor {
            digest: Digest::sha256(named),
            size: named.len() as u64,
            media_type: String::new(),
            annotations: std::collections::BTreeMap::new(),
            urls: Vec::new(),
            platform: None,
        };
        let layer = IndexedLayer {
            layer: &layer,
            diff_id: &Digest::sha256(tar),
            device: &DeviceId::from_bytes(&[3; 32]).unwrap(),
            file: &file,
        };
        LayerIndex::new(&layer, &Bytes(blob.to_vec()), &AtomicBool::new(false))
    }

    #[test]
    fn an_index_is_of_this_blob_this_tar_and_this_device() {
        let tar = vec![7; 512 * 300];
        let blob = gzip(&tar);
        let made = index(&blob, &tar, &blob).unwrap();
        assert_eq!((made.head.units.len(), made.head.tail.len()), (3, 512));
        assert!(made.head.is_unit(0, &tar[..64 << 10]));
        let frame = made.windows.groups().unwrap();
        assert_eq!(group_windows(frame, 1).unwrap(), [Window::default()]);
        assert!(group_windows(frame, 2).is_none());
        assert!(group_windows(&frame[1..], 1).is_none());

        let other = gzip(&[8; 512 * 300]);
        assert!(matches!(index(&other, &tar, &other), Err(LayerIndexError::DiffId { .. })));
        // The same tar in a different blob.
        let longer = [&blob[..], &gzip(b"")].concat();
        assert!(matches!(index(&longer, &tar, &blob), Err(LayerIndexError::BlobDigest { .. })));
        assert!(matches!(index(&tar, &tar, &tar), Err(LayerIndexError::Blob { .. })));
    }

    #[test]
    fn blobs_that_the_store_keeps_are_a_source() {
        let folder = tempfile::tempdir().unwrap();
        let (path, who) = (folder.path().join("store"), store::Who::this_process());
        let store = Store::open(&path, who, store::OpenOptions::create()).unwrap();
        let bytes = testing::noise(10_000);
        let digest = Digest::sha256(&bytes);
        let mut kept = store.downloads.partial(&digest).unwrap().unwrap();
        kept.append(&bytes).unwrap();
        let source = KeptBlobs(&store);
        // A partial blob is not a source.
        source.blob(&digest, 10_000, 0..1).read(&mut [0]).unwrap_err();
        kept.finish().unwrap();
        let parts = source.ranges(&digest, 10_000, &[5000..5003, 0..10_000], Whole::Read).unwrap();
        assert!(parts[0] == bytes[5000..5003] && parts[1] == bytes);
        source.blob(&digest, 9999, 0..1).read(&mut [0]).unwrap_err();
        source.ranges(&digest, 10_000, &[0..1, 9999..10_001], Whole::Read).unwrap_err();
        assert!(!source.distrust(&digest));
    }

    #[test]
    fn a_device_of_another_length_is_refused() {
        let tar = vec![7; 512 * 3];
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&tar[..512]).unwrap();
        assert!(tail(&file, 512 * 3).is_err());
        file.write_all(&[0; 5000]).unwrap();
        assert!(tail(&file, 512).is_err());
        assert_eq!(tail(&file, 5000).unwrap(), vec![0; 512]);
    }
}
