#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "tests fail by panicking"
)]

use std::io::{BufRead, BufReader, Read, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use testing::noise;

use super::*;

fn gzip(bytes: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Generates text that resembles that of layers. Some words are repeated at short or long distances, and others are
/// not repeated.
fn text(length: usize) -> Vec<u8> {
    let seed = noise(length / 4 + 8);
    let mut text = Vec::with_capacity(length + 64);
    for eight in seed.chunks_exact(8).cycle() {
        if text.len() >= length {
            break;
        }
        let back = usize::from(u16::from_le_bytes([eight[0], eight[1]]));
        let count = usize::from(eight[2] % 40) + 3;
        if back > count && back < text.len() {
            let from = text.len() - back;
            text.extend_from_within(from..from + count);
        }
        text.extend(
            format!("{:x} ", u32::from_le_bytes([eight[4], eight[5], eight[6], 0])).bytes(),
        );
    }
    text.truncate(length);
    text
}

/// A reader that returns at most this number of bytes at once.
struct Pieces<'a>(&'a [u8], usize);

impl Read for Pieces<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.1.min(into.len()).min(self.0.len());
        into[..length].copy_from_slice(&self.0[..length]);
        self.0 = &self.0[length..];
        Ok(length)
    }
}

impl BufRead for Pieces<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        Ok(&self.0[..self.1.min(self.0.len())])
    }

    fn consume(&mut self, amount: usize) {
        self.0 = &self.0[amount..];
    }
}

fn index(blob: &[u8], piece: usize) -> io::Result<(Vec<u8>, Vec<Checkpoint>)> {
    let mut indexer = Indexer::new(Pieces(blob, piece));
    let mut bytes = Vec::new();
    indexer.read_to_end(&mut bytes)?;
    Ok((bytes, indexer.finish().map_err(io::Error::other)?))
}

/// Checks that the blob, and each of its spans, inflates to the expected bytes.
fn check(blob: &[u8], expect: &[u8], piece: usize) -> Vec<Checkpoint> {
    let (bytes, checkpoints) = index(blob, piece).unwrap();
    assert!(bytes == expect, "{} bytes, not {}", bytes.len(), expect.len());
    let ends = checkpoints.iter().skip(1).map(|it| (it.packed, it.unpacked));
    let ends = ends.chain([(blob.len() as u64, expect.len() as u64)]);
    for (checkpoint, (packed, unpacked)) in checkpoints.iter().zip(ends) {
        let [from, to] = [checkpoint.unpacked, unpacked].map(|it| usize::try_from(it).unwrap());
        let needs = checkpoint.needs(packed);
        let [first, last] = [needs.start, needs.end].map(|it| usize::try_from(it).unwrap());
        let span = checkpoint.inflate(&blob[first..last], unpacked - checkpoint.unpacked).unwrap();
        assert!(span == expect[from..to], "{checkpoint:?}");
    }
    checkpoints
}

#[test]
fn every_span_is_inflated_alone() {
    let bytes = text(3_000_000);
    // Level 1 of zlib-ng makes a single block.
    for level in [2, 6, 9] {
        let checkpoints = check(&gzip(&bytes, level), &bytes, 64 << 10);
        assert!((8..=12).contains(&checkpoints.len()), "{}", checkpoints.len());
        assert_eq!((checkpoints[0].start, checkpoints[0].packed), (Start::Member, 0));
        assert!(checkpoints[0].window.bytes().is_empty());
        for checkpoint in &checkpoints[1..] {
            assert!(matches!(checkpoint.start, Start::Block(0..=7)));
            let kept = checkpoint.window.bytes().len();
            assert!((1..WINDOW).contains(&kept), "{kept} bytes of window");
        }
    }
}

#[test]
fn a_byte_of_the_window_that_is_not_kept_is_not_needed() {
    let bytes = text(1_000_000);
    let blob = gzip(&bytes, 6);
    let (_, checkpoints) = index(&blob, 1 << 20).unwrap();
    let [one, next] = [&checkpoints[1], &checkpoints[2]];
    let [first, last] =
        [one.needs(next.packed).start, next.packed].map(|it| usize::try_from(it).unwrap());
    let length = next.unpacked - one.unpacked;
    let right = one.inflate(&blob[first..last], length).unwrap();
    // Each byte in the window is needed, because changing it changes the span.
    let runs = one.window.runs().to_vec();
    for at in [0, one.window.bytes().len() / 2, one.window.bytes().len() - 1] {
        let mut kept = one.window.bytes().to_vec();
        kept[at] ^= 1;
        let window = Window::of_parts(runs.clone(), kept).unwrap();
        let wrong = Checkpoint { window, ..one.clone() };
        assert!(wrong.inflate(&blob[first..last], length).unwrap() != right, "{at}");
    }
}

#[test]
fn members_headers_and_stored_blocks() {
    let bytes = text(1_500_000);
    let (first, rest) = bytes.split_at(700_001);
    let (second, third) = rest.split_at(13);
    let mut blob = gzip(first, 9);
    // A member with a name, a comment, an extra field and a checksum of its header. Source: RFC 1952, 2.3.
    let mut header = vec![0x1f, 0x8b, 8, 0b1_1110, 0, 0, 0, 0, 0, 3, 2, 0, b'x', b'y'];
    header.extend(b"name\0comment\0");
    let [low, high, ..] = crc32fast::hash(&header).to_le_bytes();
    header.extend([low, high]);
    blob.extend(&header);
    blob.extend(&gzip(second, 6)[10..]);
    blob.extend(gzip(b"", 6));
    // Level 0 makes stored blocks.
    blob.extend(gzip(third, 0));
    let whole = check(&blob, &bytes, 8 << 10);
    assert!(whole.len() >= 4);
    let mut members = gzip(&bytes[..400_000], 6);
    members.extend(gzip(&bytes[400_000..], 6));
    let checkpoints = check(&members, &bytes, 8 << 10);
    assert!(checkpoints.iter().all(|it| it.packed <= members.len() as u64));
    for piece in [1, 7, 4096] {
        assert_eq!(check(&blob, &bytes, piece).len(), whole.len());
    }
}

#[test]
fn the_same_checkpoints_however_the_bytes_come() {
    let bytes = text(900_000);
    let blob = gzip(&bytes, 6);
    let (_, expect) = index(&blob, 256 << 10).unwrap();
    for piece in [1, 3, 1000, 65_536, 1 << 20] {
        assert_eq!(index(&blob, piece).unwrap().1, expect, "{piece}");
    }
    // A caller that reads only a few bytes at a time.
    let mut indexer = Indexer::new(BufReader::new(&blob[..]));
    let mut byte = [0; 17];
    while indexer.read(&mut byte).unwrap() > 0 {}
    assert_eq!(indexer.finish().unwrap(), expect);
}

#[test]
fn damage_is_an_error() {
    let bytes = text(400_000);
    let blob = gzip(&bytes, 6);
    let check = |blob: &[u8], kind: io::ErrorKind, is_behind: bool| {
        let mut indexer = Indexer::new(blob);
        let error = indexer.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!((error.kind(), indexer.is_behind_a_member()), (kind, is_behind));
    };
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    check(&[], UnexpectedEof, false);
    check(&blob[..9], UnexpectedEof, false);
    check(&blob[..blob.len() / 2], UnexpectedEof, false);
    check(&blob[..blob.len() - 1], UnexpectedEof, false);
    check(b"\x1f\x8b\x07\0\0\0\0\0\0\0", InvalidData, false);
    check(b"\x1f\x8b\x08\xe0\0\0\0\0\0\0", InvalidData, false);
    let behind = [&blob[..], b"\0\0\0\0"].concat();
    check(&behind, InvalidData, true);
    for at in [blob.len() - 1, blob.len() - 8] {
        let mut wrong = blob.clone();
        wrong[at] ^= 1;
        check(&wrong, InvalidData, false);
    }
}

#[test]
fn spans_of_hostile_checkpoints_are_errors() {
    let bytes = text(700_000);
    let blob = gzip(&bytes, 6);
    let (_, checkpoints) = index(&blob, 1 << 20).unwrap();
    let one = &checkpoints[1];
    let from = usize::try_from(one.needs(0).start).unwrap();
    assert_eq!(one.inflate(&blob[from..], SPAN_MAX + 1), Err(SpanError::Long(SPAN_MAX + 1)));
    assert_eq!(one.inflate(&[], 1), Err(SpanError::Short));
    assert_eq!(one.inflate(&blob[from..from + 100], SPAN), Err(SpanError::Short));
    // The requested length exceeds the output, and no member follows the last one.
    assert_eq!(checkpoints[0].inflate(&blob, 700_001), Err(SpanError::Short));
    assert_eq!(checkpoints[0].inflate(b"not gzip, and long", 1), Err(SpanError::Damaged));
    let refused = |runs: &[Range<u16>], bytes: usize| {
        assert!(Window::of_parts(runs.to_vec(), vec![0; bytes]).is_none(), "{runs:?}");
    };
    refused(&[0..2, 2..3], 3);
    refused(&[0..2, 1..3], 4);
    refused(&[1..2, 5..5], 1);
    refused(&[1..2, 3..32_769], 32_767);
    refused(&[0..2, 3..4], 4);
    assert!(Window::of_parts(vec![0..2, 3..32_768], vec![0; 32_767]).is_some());
}

#[test]
fn a_block_that_is_too_long_leaves_no_checkpoints() {
    // A block with the fixed code (RFC 1951, 3.2.6): a zero, and enough copies of 258 zeros to exceed the limit.
    let mut bits = Bits::default();
    bits.put(0b011, 3);
    bits.put_reversed(0x30, 8);
    let copies = SPAN_MAX / 258 + 2;
    for _ in 0..copies {
        // Symbol 285, which has no extra bits, and distance code 0.
        bits.put_reversed(0b1100_0101, 8);
        bits.put(0, 5);
    }
    bits.put(0, 7);
    let length = u32::try_from(copies * 258 + 1).unwrap();
    let zeros = vec![0; length as usize];
    let mut blob = b"\x1f\x8b\x08\0\0\0\0\0\0\x03".to_vec();
    blob.extend(bits.bytes());
    blob.extend(crc32fast::hash(&zeros).to_le_bytes());
    blob.extend(length.to_le_bytes());
    let mut indexer = Indexer::new(&blob[..]);
    let mut bytes = Vec::new();
    indexer.read_to_end(&mut bytes).unwrap();
    assert!(bytes == zeros);
    assert_eq!(indexer.finish(), Err(GzipError::Block));
}

/// Builds a deflate stream, from the lowest bit of each byte up.
#[derive(Default)]
struct Bits(Vec<bool>);

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        self.0.extend((0..count).map(|bit| value >> bit & 1 == 1));
    }

    /// Appends a Huffman code, whose highest bit comes first.
    fn put_reversed(&mut self, value: u32, count: u32) {
        self.0.extend((0..count).rev().map(|bit| value >> bit & 1 == 1));
    }

    fn bytes(&self) -> Vec<u8> {
        let byte = |bits: &[bool]| (0..).zip(bits).map(|(at, bit)| u8::from(*bit) << at).sum();
        self.0.chunks(8).map(byte).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(u32::try_from(testing::rounds(24)).unwrap()))]
    #[test]
    fn whatever_is_compressed_comes_back(
        parts in prop::collection::vec((0..200_000_usize, 0..10_u32, any::<bool>()), 1..5),
        piece in 1..100_000_usize,
    ) {
        let (mut bytes, mut blob) = (Vec::new(), Vec::new());
        for (length, level, is_noise) in parts {
            let part = if is_noise { noise(length) } else { text(length) };
            blob.extend(gzip(&part, level));
            bytes.extend(part);
        }
        check(&blob, &bytes, piece);
    }
}

#[test]
fn a_blob_of_empty_members_has_no_checkpoints() {
    let member = |bytes: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let read = |blob: &[u8]| {
        let mut indexer = Indexer::new(blob);
        let mut read = Vec::new();
        indexer.read_to_end(&mut read).unwrap();
        (read, indexer.finish())
    };
    let (empty, text) = (member(b""), member(b"text"));
    let few = (64 << 10) / empty.len() - 2;
    let (out, checkpoints) = read(&[empty.repeat(few), text.clone()].concat());
    assert_eq!((&out[..], checkpoints.map(|it| it.len())), (&b"text"[..], Ok(1)));
    let (out, checkpoints) = read(&[empty.repeat(few + 10), text].concat());
    assert_eq!((&out[..], checkpoints), (&b"text"[..], Err(GzipError::Empty)));
}

/// Each span repeats its whole window, so the windows are far larger than the blob.
#[test]
fn a_blob_whose_windows_are_more_than_it_is_has_no_checkpoints() {
    // zlib refers back slightly less than the window.
    let words = noise(32_000);
    let blob = |spans: usize| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
        for _ in 0..spans {
            encoder.write_all(&words.repeat(9)).unwrap();
            // End the block.
            encoder.flush().unwrap();
        }
        encoder.finish().unwrap()
    };
    let checkpoints = |blob: &[u8]| {
        let mut indexer = Indexer::new(blob);
        std::io::copy(&mut indexer, &mut std::io::sink()).unwrap();
        indexer.finish()
    };
    let few = checkpoints(&blob(20)).unwrap();
    assert!(few.len() >= 20 && few[5].window.bytes().len() >= 30_000);
    // These windows exceed 16 MiB plus an eighth of the blob.
    assert_eq!(checkpoints(&blob(700)), Err(GzipError::Windows));
}
