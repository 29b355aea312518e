//! Heads of devices that a layer's table of contents describes: each span is a chunk of a file.
//!
//! Such a device is not a tar, because the table does not have all bytes of the tar. It has the contents of the layer's
//! files, and zeros between them. Its id is a digest of the head, so no other head of chunks can claim the device, and
//! the device is never mistaken for one whose id is the fs-verity digest of its bytes. The index of a tar can state such
//! an id; the store refuses it beside the head of chunks. `docs/format/lazy-index.md` defines the format.

use std::ops::Range;

use sha2::{Digest as _, Sha256};

use super::{BlobKind, Head, HeadError, SpanPlace, UNIT};
use crate::digest::Digest;
use crate::gzip::{SPAN_MAX, Start};
use crate::verity::DeviceId;

/// Maximum length of a chunk in bytes, because a chunk is in memory as a whole. Chunks of eStargz have 4 MiB by default.
pub const CHUNK_MAX: u64 = SPAN_MAX;

/// Maximum length of a device of chunks in bytes. It bounds the memory for the states of its units.
const DEVICE_MAX: u64 = 256 << 30;

/// Additional bytes that the blob may have for each unit, for tar headers between the chunks.
const HEADERS_MAX: u64 = 1 << 20;

/// The beginning of the bytes that the id of a device of chunks is a digest of. The descriptor of an fs-verity digest
/// begins with the byte 1. Source: Linux `include/uapi/linux/fsverity.h`, `struct fsverity_descriptor`.
const DOMAIN: &[u8] = b"quire lazy device of chunks, version 1\0";

/// The device's id in the bytes that it is a digest of.
const ZEROS: [u8; 32] = [0; 32];

/// Returns the digest of a unit.
#[must_use]
pub fn unit_digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

impl Head {
    /// Makes the head of a device of chunks. Each chunk is a span, and has a digest in `units`. The device ends with the
    /// last span's padding.
    ///
    /// # Errors
    /// [`HeadError`] if the chunks contradict each other, or exceed a limit.
    pub fn of_chunks(
        blob: Digest,
        blob_bytes: u64,
        kind: BlobKind,
        diff_id: Digest,
        device_bytes: u64,
        spans: Vec<SpanPlace>,
        units: Vec<[u8; 32]>,
    ) -> Result<Self, HeadError> {
        let invalid = HeadError::Damaged("its device id is invalid");
        let device = DeviceId::from_bytes(&ZEROS).or(Err(invalid))?;
        let mut head = Self {
            device,
            device_bytes,
            blob,
            blob_bytes,
            kind,
            diff_id,
            tar_bytes: device_bytes,
            tail: Vec::new(),
            units,
            spans,
            groups: Vec::new(),
        };
        head.device = head.device_of_chunks()?;
        head.check()?;
        Ok(head)
    }

    /// Returns the id that the device must have.
    fn device_of_chunks(&self) -> Result<DeviceId, HeadError> {
        let mut hasher = Sha256::new_with_prefix(DOMAIN);
        hasher.update(self.fields(&ZEROS)?);
        let invalid = HeadError::Damaged("its device id is invalid");
        DeviceId::from_bytes(&hasher.finalize()).or(Err(invalid))
    }

    /// Checks that the chunks follow each other, are within the limits, and determine the device's id.
    pub(super) fn check_chunks(&self) -> Result<(), HeadError> {
        let (blob, data_end) = (self.blob_bytes, self.data_end());
        if data_end > blob {
            return Err(HeadError::DataEnd { blob, data_end });
        }
        if !self.tail.is_empty() || !self.groups.is_empty() {
            return Err(HeadError::Damaged("a device of chunks has a tail or windows"));
        }
        if self.device_bytes > DEVICE_MAX {
            return Err(HeadError::Damaged("a device of chunks is too long"));
        }
        if self.units.len() != self.spans.len() || self.spans.is_empty() {
            let expected = u64::try_from(self.spans.len()).unwrap_or(u64::MAX);
            return Err(HeadError::Units { expected, actual: self.units.len() });
        }
        if self.spans.first().is_none_or(|it| it.unpacked != 0) {
            return Err(HeadError::Span(0));
        }
        // The first span that overlaps the unit in which a span begins.
        let mut first = self.spans.iter().enumerate().peekable();
        for (number, span) in self.spans.iter().enumerate() {
            let (packed, unpacked) = self.ends(number);
            let padding = u64::from(span.padding);
            let length = unpacked.checked_sub(span.unpacked).and_then(|it| it.checked_sub(padding));
            let is_right = length.is_some_and(|it| (1..=CHUNK_MAX).contains(&it))
                && span.start == Start::Member
                && padding < UNIT
                && packed > span.packed;
            if !is_right {
                return Err(HeadError::Span(number));
            }
            let unit = span.unpacked.checked_div(UNIT).unwrap_or(0).saturating_mul(UNIT);
            while first.next_if(|it| self.ends(it.0).1 <= unit).is_some() {}
            let Some((_, first)) = first.peek() else { return Err(HeadError::Span(number)) };
            // The blob's bytes of a unit are in memory as a whole.
            let bytes = unpacked.saturating_sub(first.unpacked);
            let most = bytes.saturating_mul(2).saturating_add(HEADERS_MAX);
            if packed.saturating_sub(first.packed) > most {
                return Err(HeadError::Span(number));
            }
        }
        if self.device_of_chunks()? != self.device {
            return Err(HeadError::Device);
        }
        Ok(())
    }

    /// Returns the ends of a span in the blob and in the device.
    fn ends(&self, span: usize) -> (u64, u64) {
        let next = span.checked_add(1).and_then(|it| self.spans.get(it));
        next.map_or((self.data_end(), self.tar_bytes), |it| (it.packed, it.unpacked))
    }

    /// Returns the range in the device of a span's chunk, without the zeros behind it; empty if there is no such span.
    #[must_use]
    pub fn chunk(&self, span: usize) -> Range<u64> {
        let padding = self.spans.get(span).map_or(0, |it| u64::from(it.padding));
        let Range { start, end } = self.unpacked(&(span..span.saturating_add(1)));
        start..end.saturating_sub(padding).max(start)
    }

    /// Whether `bytes` are those of a span that is a chunk: a chunk with the right digest, and the zeros behind it.
    /// Always `false` if spans are not chunks.
    #[must_use]
    pub fn is_chunk(&self, span: usize, bytes: &[u8]) -> bool {
        let Range { start, end } = self.chunk(span);
        let length = usize::try_from(end.saturating_sub(start));
        let Some((chunk, zeros)) = length.ok().and_then(|it| bytes.split_at_checked(it)) else {
            return false;
        };
        let padding = self.spans.get(span).map(|it| usize::from(it.padding));
        self.kind.is_of_chunks()
            && padding == Some(zeros.len())
            && zeros.iter().all(|byte| *byte == 0)
            && self.units.get(span).is_some_and(|it| Sha256::digest(chunk)[..] == it[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chunk of 70,000 bytes, 100 bytes of another file behind 61,072 zeros, and two chunks of a third file.
    fn of_chunks(kind: BlobKind, change: impl FnOnce(&mut Head)) -> Result<Head, HeadError> {
        let span = |packed, unpacked, padding| SpanPlace {
            start: Start::Member,
            packed,
            unpacked,
            padding,
        };
        let mut head = Head {
            device: DeviceId::from_bytes(&ZEROS).unwrap(),
            device_bytes: 143_360,
            blob: Digest::sha256(b"blob"),
            blob_bytes: 2_000_000,
            kind,
            diff_id: Digest::sha256(b"tar"),
            tar_bytes: 143_360,
            tail: Vec::new(),
            units: vec![
                unit_digest(&[1; 70_000]),
                unit_digest(&[2; 100]),
                unit_digest(&[3; 5000]),
                unit_digest(&[4; 2000]),
            ],
            spans: vec![
                span(1000, 0, 61_072),
                span(2000, 131_072, 3996),
                span(3000, 135_168, 0),
                span(4000, 140_168, 1192),
            ],
            groups: Vec::new(),
        };
        change(&mut head);
        let Head { device_bytes, blob, blob_bytes, kind, diff_id, units, spans, .. } = head;
        Head::of_chunks(blob, blob_bytes, kind, diff_id, device_bytes, spans, units)
    }

    const GZIP: BlobKind = BlobKind::GzipChunks { data_end: 1_000_000 };

    /// Writes the fields of `docs/format/lazy-index.md` by hand.
    #[test]
    fn a_head_of_chunks_is_as_documented() {
        for (kind, number) in [(GZIP, 3), (BlobKind::ZstdChunks { data_end: 1_000_000 }, 4)] {
            let head = of_chunks(kind, |_| ()).unwrap();
            let fields = |device: &[u8]| {
                let mut fields = b"quirelzy\x01\0\0\0".to_vec();
                fields.extend(u32::to_le_bytes(number));
                fields.extend(device);
                fields.extend(143_360_u64.to_le_bytes());
                fields.extend(Sha256::digest(b"blob"));
                fields.extend(2_000_000_u64.to_le_bytes());
                fields.extend(Sha256::digest(b"tar"));
                fields.extend(143_360_u64.to_le_bytes());
                for count in [0_u32, 4, 4, 0] {
                    fields.extend(count.to_le_bytes());
                }
                fields.extend(1_000_000_u64.to_le_bytes());
                fields.extend([0; 32]);
                for chunk in [&[1; 70_000][..], &[2; 100], &[3; 5000], &[4; 2000]] {
                    fields.extend(Sha256::digest(chunk));
                }
                for (packed, unpacked, padding) in [
                    (1000_u64, 0_u64, 61_072_u16),
                    (2000, 131_072, 3996),
                    (3000, 135_168, 0),
                    (4000, 140_168, 1192),
                ] {
                    fields.extend(packed.to_le_bytes());
                    fields.extend(unpacked.to_le_bytes());
                    fields.push(255);
                    fields.extend(padding.to_le_bytes());
                    fields.extend([0; 5]);
                }
                fields
            };
            let named = [&b"quire lazy device of chunks, version 1\0"[..], &fields(&[0; 32])];
            let device = Sha256::digest(named.concat());
            assert_eq!(head.device.as_bytes(), &device[..]);
            let mut bytes = fields(&device);
            let digest = Sha256::digest(&bytes);
            bytes.extend(digest);
            assert_eq!(head.encode().unwrap(), bytes);
            assert_eq!(Head::decode(&bytes), Ok(head));
        }
    }

    #[test]
    fn chunks_are_spans() {
        let head = of_chunks(GZIP, |_| ()).unwrap();
        assert_eq!(head.unit_count(), 3);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|it| head.chunk(it)),
            [0..70_000, 131_072..131_172, 135_168..140_168, 140_168..142_168, 143_360..143_360,]
        );
        assert_eq!(head.packed(&(2..3)), 3000..4000);
        assert_eq!(head.packed(&(3..4)), 4000..1_000_000);
        assert!(!head.has_windows() && head.windows_bytes() == 0);
        let with =
            |byte: u8, chunk: usize, zeros: usize| [vec![byte; chunk], vec![0; zeros]].concat();
        assert!(head.is_chunk(0, &with(1, 70_000, 61_072)));
        assert!(head.is_chunk(2, &with(3, 5000, 0)));
        // Other bytes, another length, other zeros, another chunk, and no chunk.
        assert!(!head.is_chunk(0, &with(2, 70_000, 61_072)));
        assert!(!head.is_chunk(0, &with(1, 70_000, 61_071)));
        assert!(!head.is_chunk(0, &with(1, 70_000, 61_073)));
        assert!(!head.is_chunk(0, &[with(1, 70_000, 61_071), vec![1]].concat()));
        assert!(!head.is_chunk(1, &with(3, 5000, 0)));
        assert!(!head.is_chunk(4, &[]));
        // Its units have no digests.
        assert!(!head.is_unit(0, &with(1, 70_000, 0)[..65_536]));
        assert!(!head.is_unit(1, &with(2, 100, 0)));
    }

    #[test]
    fn chunks_that_contradict_themselves_are_refused() {
        let check = |change: &dyn Fn(&mut Head), expect: HeadError| {
            assert_eq!(of_chunks(GZIP, change).unwrap_err(), expect);
        };
        let span = |number, change: &dyn Fn(&mut Head)| check(change, HeadError::Span(number));
        span(0, &|it| it.spans[0].unpacked = 1);
        span(0, &|it| it.spans[0].start = Start::Block(0));
        // An empty chunk, and two chunks at the same place or in the wrong order.
        span(3, &|it| it.spans[3].padding = 3192);
        span(1, &|it| it.spans[2].packed = 2000);
        span(2, &|it| it.spans.swap(2, 3));
        span(1, &|it| it.spans[2].unpacked = 131_072);
        // A chunk that is too long, and one whose part of the blob is.
        let long = |it: &mut Head| it.device_bytes += CHUNK_MAX;
        span(3, &long);
        span(3, &|it| {
            it.kind = BlobKind::GzipChunks { data_end: 4_000_000 };
            it.blob_bytes = 4_000_000;
        });
        let data_end = HeadError::DataEnd { blob: 999_999, data_end: 1_000_000 };
        check(&|it| it.blob_bytes = 999_999, data_end);
        check(&|it| it.units.truncate(3), HeadError::Units { expected: 4, actual: 3 });
        check(
            &|it| {
                it.spans.clear();
                it.units.clear();
            },
            HeadError::Units { expected: 0, actual: 0 },
        );
        let odd = HeadError::Lengths { device: 143_361, tar: 143_361, tail: 0 };
        check(&|it| it.device_bytes += 1, odd);
        let huge = HeadError::Damaged("a device of chunks is too long");
        check(&|it| it.device_bytes = DEVICE_MAX + 512, huge);
    }

    /// The parts of the blob that the chunks of one unit are in may not be far from each other, because they are in
    /// memory at the same time.
    #[test]
    fn the_blobs_bytes_of_a_unit_are_limited() {
        let made = |gap: u64| {
            let spans: Vec<_> = (0..16)
                .map(|it| SpanPlace {
                    start: Start::Member,
                    packed: 1 + it * gap,
                    unpacked: it * 4096,
                    padding: 4095,
                })
                .collect();
            let kind = BlobKind::ZstdChunks { data_end: 1 + 16 * gap };
            let (blob, units) = (Digest::sha256(b""), vec![[0; 32]; 16]);
            Head::of_chunks(blob, 1 + 16 * gap, kind, blob, 65_536, spans, units)
        };
        let most = (1 << 20) / 16 + 2 * 4096;
        assert!(made(most).is_ok());
        assert!(made(most + 1).is_err());
    }

    /// No head can claim a device of other chunks, or a device of a tar.
    #[test]
    fn the_id_of_a_device_of_chunks_depends_on_all_fields() {
        let right = of_chunks(GZIP, |_| ()).unwrap();
        let others: [&dyn Fn(&mut Head); 6] = [
            &|it| it.blob = Digest::sha256(b"other"),
            &|it| it.blob_bytes += 1,
            &|it| it.diff_id = Digest::sha256(b"other"),
            &|it| it.kind = BlobKind::ZstdChunks { data_end: 1_000_000 },
            &|it| it.units[3][31] ^= 1,
            &|it| it.spans[1].packed += 1,
        ];
        for other in others {
            let other = of_chunks(GZIP, other).unwrap();
            assert_ne!(other.device, right.device);
            let claimed = Head { device: right.device, ..other.clone() };
            assert_eq!(claimed.encode(), Err(HeadError::Device));
        }
    }
}
