//! The index of a lazy device: the data that is needed to fill any part of the device from a layer's blob, and to
//! verify that part.
//!
//! A [`Head`] has the digest of each unit of the device and the position in the blob of each span. The windows of the
//! spans are stored separately, in groups that are fetched on demand. `docs/format/lazy-index.md` defines the format.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

mod chunks;
pub mod hot;
mod places;
pub mod tag;
mod windows;

use sha2::{Digest as _, Sha256};

use crate::digest::Digest;
use crate::gzip::{SPAN, SPAN_MAX, Start, packed_max};
use crate::verity::{Algorithm, DeviceId};

pub use chunks::{CHUNK_MAX, unit_digest};
pub use windows::{decode_windows, encode_windows};

/// Bytes of a device that have one digest. The last unit may be shorter.
pub const UNIT: u64 = 64 << 10;

/// Bytes of a blob per group: the windows of the spans that begin in such a part of the blob are in one group.
pub const GROUP: u64 = 512 << 10;

const MAGIC: &[u8; 8] = b"quirelzy";
/// Version of the format and of the code that finds checkpoints. A change of either changes the version.
const VERSION: u32 = 1;
/// The encoding of [`BlobKind::Gzip`].
const GZIP: u32 = 1;
/// The encoding of [`BlobKind::Zstd`].
const ZSTD: u32 = 2;
/// The encoding of [`BlobKind::GzipChunks`].
const GZIP_CHUNKS: u32 = 3;
/// The encoding of [`BlobKind::ZstdChunks`].
const ZSTD_CHUNKS: u32 = 4;
const FIXED: usize = 192;
const SPAN_SIZE: usize = 24;
const GROUP_SIZE: usize = 16;
/// The encoding of [`Start::Member`]: a gzip member or a zstd frame begins. Other values are the number of bits in
/// [`Start::Block`].
const MEMBER: u8 = 255;
/// Upper limit of the length of a tail, in bytes. A tail consists of less than 512 bytes of padding, and a block of
/// 512 bytes that states the device's contents.
const TAIL_MAX: u32 = 1024;
/// Maximum size of a head in bytes, because a head is held in memory. It suffices for a layer of a terabyte.
pub const HEAD_MAX: u64 = 1 << 30;

/// The compression of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobKind {
    /// Gzip members (RFC 1952). A span begins with a member or a deflate block.
    Gzip,
    /// Zstd frames (RFC 8878). A span consists of whole frames, so its window is empty.
    Zstd {
        /// End in the blob of the last span, in bytes. Only frames without output follow, such as the skippable frame
        /// with the table of contents of a zstd:chunked layer.
        data_end: u64,
    },
    /// Gzip members of an eStargz layer, whose table of contents describes the device: see
    /// [`is_of_chunks`](Self::is_of_chunks).
    GzipChunks {
        /// End in the blob of the last span, in bytes: the table of contents follows.
        data_end: u64,
    },
    /// Zstd frames of a zstd:chunked layer, whose table of contents describes the device: see
    /// [`is_of_chunks`](Self::is_of_chunks).
    ZstdChunks {
        /// End in the blob of the last span, in bytes.
        data_end: u64,
    },
}

impl BlobKind {
    /// Returns whether each span is a chunk of a table of contents. Then the device is not a tar: it has the contents of
    /// the layer's files, and each span consists of a chunk and of [zeros](SpanPlace::padding) behind it. A head has the
    /// digests of the chunks instead of those of units.
    #[must_use]
    pub const fn is_of_chunks(self) -> bool {
        matches!(self, Self::GzipChunks { .. } | Self::ZstdChunks { .. })
    }
}

/// The beginning of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanPlace {
    /// State in which inflating begins.
    pub start: Start,
    /// Offset in the blob in bytes.
    pub packed: u64,
    /// Offset in the tar in bytes.
    pub unpacked: u64,
    /// Number of zeros with which the span ends, and which its chunk does not have. 0 unless the span is a chunk.
    pub padding: u16,
}

/// A group of windows that are fetched together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowGroup {
    /// Number of the span whose window is the first in the group. The next group begins with the window of
    /// that group's `first`.
    pub first: u32,
    /// Length in bytes in the file of windows, which holds the groups one after the other.
    pub bytes: u32,
}

/// An index without its windows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Id of the device.
    pub device: DeviceId,
    /// Length of the device in bytes: a multiple of 512.
    pub device_bytes: u64,
    /// Digest of the layer's blob.
    pub blob: Digest,
    /// Length of the blob in bytes.
    pub blob_bytes: u64,
    /// Compression of the blob.
    pub kind: BlobKind,
    /// Digest of the uncompressed tar.
    pub diff_id: Digest,
    /// Length in bytes of the tar, with which the device begins.
    pub tar_bytes: u64,
    /// The bytes of the device after the tar.
    pub tail: Vec<u8>,
    /// SHA-256 digest of each unit; of each chunk, if spans are chunks.
    pub units: Vec<[u8; 32]>,
    /// The spans, in ascending order.
    pub spans: Vec<SpanPlace>,
    /// The groups of windows, in ascending order.
    pub groups: Vec<WindowGroup>,
}

/// The reason why a head is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// The file is not a head.
    #[error("it is not an index of a lazy device")]
    Magic,
    /// The head was made by another version of Quire.
    #[error(
        "it is an index of version {0}, but this version of Quire reads only {VERSION}: make \
        the index again"
    )]
    Version(u32),
    /// The digest at the end of the file does not match its content.
    #[error("it is damaged: its digest is wrong")]
    Digest,
    /// The kind is unknown. A later version may have made the head.
    #[error(
        "it is for blobs of kind {0}, but this version of Quire reads only kinds {GZIP} to {ZSTD_CHUNKS}"
    )]
    Kind(u32),
    /// A field is missing or has an invalid value.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// The lengths of the tar and the tail do not add up to the length of the device.
    #[error(
        "it is damaged: a tar of {tar} bytes and a tail of {tail} bytes do not add up to a \
        device of {device} bytes"
    )]
    Lengths {
        /// Length of the device in bytes.
        device: u64,
        /// Length of the tar in bytes.
        tar: u64,
        /// Length of the tail in bytes.
        tail: u32,
    },
    /// The last span ends after the end of the blob.
    #[error("it is damaged: the data of a blob of {blob} bytes ends at byte {data_end}")]
    DataEnd {
        /// Length of the blob in bytes.
        blob: u64,
        /// End of the last span in bytes.
        data_end: u64,
    },
    /// The number of digests differs from the number of the device's units.
    #[error(
        "it is damaged: it has the digests of {actual} units, but its device has {expected} \
        units"
    )]
    Units {
        /// Number of units of the device.
        expected: u64,
        /// Number of digests.
        actual: usize,
    },
    /// The span of this number does not fit its neighbours, or is shorter or longer than the limits.
    #[error("it is damaged: span {0} is out of order or has an invalid size")]
    Span(usize),
    /// The device's id is not that of a device of these chunks.
    #[error("it is damaged: its device is not the device of its chunks")]
    Device,
    /// The group of windows of this number does not fit the spans or its neighbours.
    #[error("it is damaged: group {0} of windows is out of order or does not fit the spans")]
    Group(usize),
}

/// Splits fields off the front of the bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, length: usize) -> Result<&'a [u8], HeadError> {
        let short = HeadError::Damaged("it ends early");
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(short)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HeadError> {
        self.bytes(N)?.try_into().or(Err(HeadError::Damaged("it ends early")))
    }

    fn u32(&mut self) -> Result<u32, HeadError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeadError> {
        self.array().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Result<usize, HeadError> {
        usize::try_from(self.u32()?).or(Err(HeadError::Damaged("a count is too large")))
    }
}

impl Head {
    /// Encodes the head as the content of a file.
    ///
    /// # Errors
    /// [`HeadError`] for a head that [`decode`](Self::decode) would refuse.
    pub fn encode(&self) -> Result<Vec<u8>, HeadError> {
        self.check()?;
        let mut bytes = self.fields(self.device.as_bytes())?;
        let digest = Sha256::digest(&bytes);
        bytes.extend(digest);
        Ok(bytes)
    }

    /// Encodes all fields, with this id of the device.
    fn fields(&self, device: &[u8]) -> Result<Vec<u8>, HeadError> {
        let count = |length: usize| {
            u32::try_from(length).or(Err(HeadError::Damaged("a count is too large")))
        };
        let mut bytes = Vec::with_capacity(FIXED);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        let (kind, data_end) = match self.kind {
            BlobKind::Gzip => (GZIP, 0),
            BlobKind::Zstd { data_end } => (ZSTD, data_end),
            BlobKind::GzipChunks { data_end } => (GZIP_CHUNKS, data_end),
            BlobKind::ZstdChunks { data_end } => (ZSTD_CHUNKS, data_end),
        };
        bytes.extend(kind.to_le_bytes());
        bytes.extend(device);
        bytes.extend(self.device_bytes.to_le_bytes());
        bytes.extend(self.blob.as_bytes());
        bytes.extend(self.blob_bytes.to_le_bytes());
        bytes.extend(self.diff_id.as_bytes());
        bytes.extend(self.tar_bytes.to_le_bytes());
        for length in [self.tail.len(), self.units.len(), self.spans.len(), self.groups.len()] {
            bytes.extend(count(length)?.to_le_bytes());
        }
        bytes.extend(data_end.to_le_bytes());
        bytes.resize(FIXED, 0);
        bytes.extend(&self.tail);
        bytes.extend(self.units.iter().flatten());
        for span in &self.spans {
            bytes.extend(span.packed.to_le_bytes());
            bytes.extend(span.unpacked.to_le_bytes());
            let start = match span.start {
                Start::Member => MEMBER,
                Start::Block(bits) => bits,
            };
            let [low, high] = span.padding.to_le_bytes();
            bytes.extend([start, low, high, 0, 0, 0, 0, 0]);
        }
        for group in &self.groups {
            bytes.extend(group.first.to_le_bytes());
            bytes.extend(group.bytes.to_le_bytes());
            bytes.extend([0; 8]);
        }
        Ok(bytes)
    }

    /// Decodes the content of a file.
    ///
    /// # Errors
    /// [`HeadError`] with the field, span or group that is invalid.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeadError> {
        let (content, digest) = bytes.split_last_chunk::<32>().ok_or(HeadError::Magic)?;
        let mut fields = Fields(content);
        if fields.bytes(8).ok() != Some(&MAGIC[..]) {
            return Err(HeadError::Magic);
        }
        match fields.u32()? {
            VERSION => {}
            other => return Err(HeadError::Version(other)),
        }
        if Sha256::digest(content)[..] != *digest {
            return Err(HeadError::Digest);
        }
        let kind = match fields.u32()? {
            kind @ (GZIP | ZSTD | GZIP_CHUNKS | ZSTD_CHUNKS) => kind,
            other => return Err(HeadError::Kind(other)),
        };
        let id = fields.array::<32>()?;
        let device =
            DeviceId::from_bytes(&id).or(Err(HeadError::Damaged("its device id is invalid")))?;
        let device_bytes = fields.u64()?;
        let blob = Digest::from_sha256(&fields.array()?);
        let blob_bytes = fields.u64()?;
        let diff_id = Digest::from_sha256(&fields.array()?);
        let tar_bytes = fields.u64()?;
        let [tail, units, spans, groups] =
            [fields.count()?, fields.count()?, fields.count()?, fields.count()?];
        // The field is part of the zeros of an index of a gzip blob.
        let kind = match (kind, fields.u64()?) {
            (ZSTD, data_end) => BlobKind::Zstd { data_end },
            (GZIP_CHUNKS, data_end) => BlobKind::GzipChunks { data_end },
            (ZSTD_CHUNKS, data_end) => BlobKind::ZstdChunks { data_end },
            (_, 0) => BlobKind::Gzip,
            _ => return Err(RESERVED),
        };
        let read = content.len().saturating_sub(fields.0.len());
        is_zero(fields.bytes(FIXED.saturating_sub(read))?)?;
        let tail = fields.bytes(tail)?.to_vec();
        // Items are read one by one, so that a wrong count does not reserve memory.
        let units = (0..units).map(|_| fields.array()).collect::<Result<_, _>>()?;
        let spans = (0..spans).map(|_| span(&mut fields)).collect::<Result<_, _>>()?;
        let groups = (0..groups).map(|_| group(&mut fields)).collect::<Result<_, _>>()?;
        if !fields.0.is_empty() {
            return Err(HeadError::Damaged("bytes follow its end"));
        }
        let head = Self {
            device,
            device_bytes,
            blob,
            blob_bytes,
            kind,
            diff_id,
            tar_bytes,
            tail,
            units,
            spans,
            groups,
        };
        head.check()?;
        Ok(head)
    }

    /// Checks that the fields are consistent with each other.
    fn check(&self) -> Result<(), HeadError> {
        let is_sha256 = [&self.blob, &self.diff_id].iter().all(|it| it.as_bytes().len() == 32);
        if !is_sha256 || self.device.algorithm() != Algorithm::Sha256 {
            return Err(HeadError::Damaged("a digest is not SHA-256"));
        }
        let (device, tar) = (self.device_bytes, self.tar_bytes);
        let tail = u32::try_from(self.tail.len()).unwrap_or(u32::MAX);
        let is_whole = device.is_multiple_of(512) && tar.checked_add(tail.into()) == Some(device);
        if !is_whole || tail >= TAIL_MAX {
            return Err(HeadError::Lengths { device, tar, tail });
        }
        if self.kind.is_of_chunks() {
            return self.check_chunks();
        }
        let (expected, actual) = (device.div_ceil(UNIT), self.units.len());
        if u64::try_from(actual) != Ok(expected) {
            return Err(HeadError::Units { expected, actual });
        }
        let (blob, data_end) = (self.blob_bytes, self.data_end());
        if data_end > blob {
            return Err(HeadError::DataEnd { blob, data_end });
        }
        self.check_spans()?;
        self.check_groups()
    }

    /// Checks that the spans follow each other from the beginning to the end, and that their lengths are within the
    /// limits.
    fn check_spans(&self) -> Result<(), HeadError> {
        let first = SpanPlace { start: Start::Member, packed: 0, unpacked: 0, padding: 0 };
        if self.spans.first() != Some(&first) {
            return Err(HeadError::Span(0));
        }
        let ends = self.spans.iter().skip(1).map(|it| (it.packed, it.unpacked));
        let ends = ends.chain([(self.data_end(), self.tar_bytes)]);
        let mut are_right = self.spans.iter().zip(ends).map(|(span, (packed, unpacked))| {
            let length = unpacked.checked_sub(span.unpacked);
            // The minimum length bounds the number of spans in a part of the device. Only the last span ends with the
            // tar.
            let least = if unpacked == self.tar_bytes { 1 } else { SPAN };
            length.is_some_and(|it| (least..=SPAN_MAX).contains(&it))
                && span.padding == 0
                && packed
                    .checked_sub(span.packed)
                    .zip(length)
                    .is_some_and(|(packed, length)| packed > 0 && packed <= packed_max(length))
                && match span.start {
                    Start::Member => true,
                    Start::Block(bits) => bits < 8 && self.kind == BlobKind::Gzip,
                }
        });
        are_right.position(|it| !it).map_or(Ok(()), |span| Err(HeadError::Span(span)))
    }

    /// Checks that `encode_windows` could have made these groups. This bounds their number by the blob's length.
    fn check_groups(&self) -> Result<(), HeadError> {
        let mut before = None;
        for (number, group) in self.groups.iter().enumerate() {
            let span = usize::try_from(group.first).ok().and_then(|it| self.spans.get(it));
            let part = span.and_then(|it| it.packed.checked_div(GROUP));
            // Each group belongs to a later part of the blob than the preceding group.
            let is_right = if number == 0 { group.first == 0 } else { part > before };
            if !is_right || part.is_none() {
                return Err(HeadError::Group(number));
            }
            before = part;
        }
        if before.is_none() { Err(HeadError::Group(0)) } else { Ok(()) }
    }

    /// Whether `bytes` match the digest of this unit of the device. Always `false` if spans are chunks: compare
    /// [chunks](Self::is_chunk) instead.
    #[must_use]
    pub fn is_unit(&self, unit: usize, bytes: &[u8]) -> bool {
        !self.kind.is_of_chunks()
            && self.units.get(unit).is_some_and(|it| Sha256::digest(bytes)[..] == it[..])
    }
}

fn span(fields: &mut Fields<'_>) -> Result<SpanPlace, HeadError> {
    let (packed, unpacked) = (fields.u64()?, fields.u64()?);
    let [start, low, high, zeros @ ..] = fields.array::<8>()?;
    is_zero(&zeros)?;
    let start = if start == MEMBER { Start::Member } else { Start::Block(start) };
    Ok(SpanPlace { start, packed, unpacked, padding: u16::from_le_bytes([low, high]) })
}

fn group(fields: &mut Fields<'_>) -> Result<WindowGroup, HeadError> {
    let group = WindowGroup { first: fields.u32()?, bytes: fields.u32()? };
    is_zero(fields.bytes(GROUP_SIZE.saturating_sub(8))?)?;
    Ok(group)
}

fn is_zero(bytes: &[u8]) -> Result<(), HeadError> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    Err(RESERVED)
}

const RESERVED: HeadError = HeadError::Damaged("a reserved field is not zero");

const _: () = assert!(SPAN_SIZE == 8 + 8 + 8, "a span has two offsets and its start state");

#[cfg(test)]
mod tests;
