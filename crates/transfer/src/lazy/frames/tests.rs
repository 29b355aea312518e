use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use image::digest::Digest;
use image::lazy::{BlobKind, Head};
use image::verity::DeviceId;
use oci::blobs::BlobSource;
use oci::manifest::Descriptor;
use testing::noise;

use super::*;
use crate::lazy::{IndexedLayer, LayerIndex, LayerIndexError, NoIndex, inflate_span};

struct Bytes<'a>(&'a [u8]);

impl BlobSource for Bytes<'_> {
    fn blob(&self, _: &Digest, _: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        Box::new(&self.0[place(range.start)..place(range.end)])
    }
}

fn place(byte: u64) -> usize {
    usize::try_from(byte).unwrap()
}

/// Bytes that compress a little.
fn text(length: usize) -> Vec<u8> {
    noise(length).into_iter().map(|it| it & 0x3f).collect()
}

fn frame(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

/// Returns a skippable frame. Source: RFC 8878, 3.1.2.
fn skippable(number: u8, length: usize) -> Vec<u8> {
    let mut frame = vec![0x50 + number, 0x2a, 0x4d, 0x18];
    frame.extend(u32::try_from(length).unwrap().to_le_bytes());
    frame.extend(noise(length));
    frame
}

/// Makes the index of a blob that contains this tar.
fn index(blob: &[u8], tar: &[u8]) -> Result<Head, LayerIndexError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(tar).unwrap();
    file.write_all(&vec![7; tar.len().next_multiple_of(512) - tar.len()]).unwrap();
    index_of(blob, tar, &file)
}

fn index_of(blob: &[u8], tar: &[u8], file: &File) -> Result<Head, LayerIndexError> {
    let layer = Descriptor {
        digest: Digest::sha256(blob),
        size: blob.len() as u64,
        media_type: String::new(),
        annotations: std::collections::BTreeMap::new(),
        urls: Vec::new(),
        platform: None,
    };
    let device = DeviceId::from_bytes(&[3; 32]).unwrap();
    let diff_id = Digest::sha256(tar);
    let layer = IndexedLayer { layer: &layer, diff_id: &diff_id, device: &device, file };
    Ok(LayerIndex::new(&layer, &Bytes(blob), &AtomicBool::new(false))?.head)
}

fn span(head: &Head, number: usize, blob: &[u8]) -> Result<Vec<u8>, SpanError> {
    let packed = head.packed(&(number..number + 1));
    inflate_span(head, number, Window::default(), &blob[place(packed.start)..place(packed.end)])
}

/// Checks that each span gives its bytes of the tar, and returns the lengths of the spans.
#[track_caller]
fn check(blob: &[u8], tar: &[u8]) -> (Head, Vec<u64>) {
    let head = index(blob, tar).unwrap();
    assert_eq!(Head::decode(&head.encode().unwrap()).as_ref(), Ok(&head));
    let mut lengths = Vec::new();
    let mut all = Vec::new();
    for number in 0..head.spans.len() {
        let bytes = span(&head, number, blob).unwrap();
        lengths.push(bytes.len() as u64);
        all.extend(bytes);
    }
    assert!(all == tar, "the spans give {} bytes, not {}", all.len(), tar.len());
    (head, lengths)
}

const KIB: usize = 1 << 10;

#[test]
fn spans_consist_of_whole_frames() {
    let tar = text(1000 * KIB);
    let blob: Vec<u8> = tar.chunks(100 * KIB).flat_map(frame).collect();
    let (head, lengths) = check(&blob, &tar);
    let kib = |it: u64| it * KIB as u64;
    assert_eq!(lengths, [300, 300, 300, 100].map(kib));
    assert_eq!(head.kind, BlobKind::Zstd { data_end: blob.len() as u64 });
    // Each span can be inflated without the others, and begins at a frame.
    assert!(head.spans.iter().all(|it| it.start == Start::Member));
    assert!(head.spans.iter().all(|it| blob[place(it.packed)..].starts_with(b"\x28\xb5\x2f\xfd")));
    // A frame of exactly the minimum is a span.
    let blob: Vec<u8> = tar[..1024 * KIB - 24 * KIB].chunks(256 * KIB).flat_map(frame).collect();
    assert_eq!(check(&blob, &tar).1, [256, 256, 256, 232].map(kib));
}

#[test]
fn frames_without_output_are_in_the_span_before_or_after_them() {
    let tar = text(800 * KIB);
    let [one, two, three] = [0..300, 300..700, 700..800]
        .map(|it: Range<usize>| frame(&tar[it.start * KIB..it.end * KIB]));
    let empty = frame(b"");
    let blob = [
        // A blob may begin with them.
        skippable(0, 5),
        empty.clone(),
        one,
        skippable(3, 70),
        empty.clone(),
        two,
        empty.clone(),
        skippable(15, 0),
        three,
    ]
    .concat();
    let (head, lengths) = check(&blob, &tar);
    assert_eq!(lengths, [300, 400, 100].map(|it| it * KIB as u64));
    assert_eq!(head.data_end(), blob.len() as u64);
    // Frames without output at the end, as large as a table of contents, are not part of the last span.
    let longer = [&blob[..], &empty, &skippable(1, 3 << 20), &empty, &skippable(2, 9)].concat();
    let (head, again) = check(&longer, &tar);
    assert_eq!(again, lengths);
    assert_eq!(head.kind, BlobKind::Zstd { data_end: blob.len() as u64 });
    assert_eq!(head.blob_bytes, longer.len() as u64);
    assert_eq!(head.packed(&(0..3)), 0..blob.len() as u64);
    // If the last span is long enough, no empty span follows it.
    let tar = text(300 * KIB);
    let data = frame(&tar);
    let (head, lengths) = check(&[&data[..], &skippable(1, 9)].concat(), &tar);
    assert_eq!((lengths.len(), head.data_end()), (1, data.len() as u64));
}

/// A blob may arrive in parts of any length, and the reader may take the tar in parts of any length.
#[test]
fn parts_of_any_length_give_the_same_spans() {
    let tar = text(700 * KIB);
    let mut blob = skippable(1, 7);
    for bytes in tar.chunks(290 * KIB) {
        blob.extend(frame(bytes));
        blob.extend(skippable(2, 1));
    }
    let by = |input: usize, output: usize| {
        let source = std::io::BufReader::with_capacity(input, &blob[..]);
        let mut indexer = FrameIndexer::new(source).unwrap();
        let (mut all, mut piece) = (Vec::new(), vec![0; output]);
        loop {
            let read = indexer.read(&mut piece).unwrap();
            all.extend_from_slice(&piece[..read]);
            if read == 0 {
                break;
            }
        }
        assert!(all == tar);
        indexer.finish().unwrap()
    };
    let expect = by(1 << 20, 1 << 20);
    assert_eq!(expect.checkpoints.len(), 3);
    for (input, output) in [(1, 1 << 20), (1 << 20, 1), (2, 777), (777, 4096), (131_075, 131_072)] {
        assert_eq!(by(input, output), expect, "{input} {output}");
    }
}

#[track_caller]
fn check_none(blob: &[u8], tar: &[u8], expect: FramesError, reason: &str) {
    let error = index(blob, tar).unwrap_err();
    let LayerIndexError::Spans { source, .. } = error else { panic!("{error:?}") };
    assert_eq!(source, crate::lazy::SpansError::Zstd(expect));
    assert!(NoIndex::of_blob(source).to_string().contains(reason));
}

#[test]
fn blobs_that_cannot_be_read_in_parts_have_no_index() {
    // One frame, as most programs make it.
    let zeros = vec![0; (16 << 20) + 1];
    check(&frame(&zeros[1..]), &zeros[1..]);
    check_none(&frame(&zeros), &zeros, FramesError::Large, "frames are too large");
    // The frame before is too short for a span.
    let two = [frame(&zeros[..1000]), frame(&zeros[1000..])].concat();
    check_none(&two, &zeros, FramesError::Large, "frames are too large");
    // The compressed bytes of a span are limited: 2 bytes for each byte of its output, and 64 KiB.
    let tar = text(300 * KIB);
    let data = frame(&tar);
    let with = |length: usize| {
        let more = 2 * tar.len() + 64 * KIB + length - data.len() - 8;
        [&skippable(1, more)[..], &data].concat()
    };
    check(&with(0), &tar);
    check_none(&with(1), &tar, FramesError::Empty, "unsuitable for partial reads");
    let twice = [&tar[..], &tar].concat();
    let with = |length: usize| [with(length), data.clone()].concat();
    check(&with(0), &twice);
    check_none(&with(1), &twice, FramesError::Empty, "unsuitable for partial reads");
}

/// A frame with this window in its header, one raw block and no dictionary. Source: RFC 8878, 3.1.1.
fn raw_frame(window_log: u8, bytes: &[u8]) -> Vec<u8> {
    let mut frame = b"\x28\xb5\x2f\xfd\x00".to_vec();
    frame.push((window_log - 10) << 3);
    let header = u32::try_from(bytes.len()).unwrap() << 3 | 1;
    frame.extend(&header.to_le_bytes()[..3]);
    frame.extend(bytes);
    frame
}

/// The same with a dictionary's number.
fn dictionary_frame(bytes: &[u8]) -> Vec<u8> {
    let mut frame = raw_frame(20, bytes);
    frame[4] = 1;
    frame.insert(6, 42);
    frame
}

#[test]
fn frames_that_other_data_or_too_much_memory_is_needed_for_are_refused() {
    let tar = text(100 * KIB);
    check(&raw_frame(17, &tar), &tar);
    check(&raw_frame(27, &tar), &tar);
    for blob in [raw_frame(28, &tar), raw_frame(41, &tar), dictionary_frame(&tar)] {
        let error = index(&blob, &tar).unwrap_err();
        assert!(matches!(error, LayerIndexError::Blob { .. }), "{error:?}");
    }
    // Nor does a dictionary in the middle pass.
    let blob = [frame(&tar), dictionary_frame(&tar)].concat();
    index(&blob, &[&tar[..], &tar].concat()).unwrap_err();
}

#[test]
fn damaged_blobs_have_no_index() {
    let tar = text(600 * KIB);
    let blob: Vec<u8> = tar.chunks(300 * KIB).flat_map(frame).collect();
    check(&blob, &tar);
    let is_damaged = |blob: &[u8]| {
        let error = index(blob, &tar).unwrap_err();
        assert!(matches!(error, LayerIndexError::Blob { .. }), "{error:?}");
    };
    for end in [3, 10, blob.len() / 2 + 5, blob.len() - 1] {
        is_damaged(&blob[..end]);
    }
    for behind in [&b"\0"[..], b"\x28\xb5", b"garbage that is no frame", &skippable(0, 5)[..12]] {
        is_damaged(&[&blob[..], behind].concat());
    }
    let other = index(&blob, &text(600 * KIB)[1..]);
    assert!(matches!(other, Err(LayerIndexError::DiffId { .. })));
}

/// A hostile head or a hostile server leads to an error or to bytes of another digest.
#[test]
fn spans_of_other_bytes_are_errors_or_have_another_digest() {
    let tar = text(900 * KIB);
    let mut blob: Vec<u8> = tar.chunks(300 * KIB).flat_map(frame).collect();
    let data_end = blob.len();
    blob.extend(skippable(1, 1000));
    let (head, _) = check(&blob, &tar);
    let with = |change: &dyn Fn(&mut Head)| {
        let mut wrong = head.clone();
        change(&mut wrong);
        wrong
    };
    // The places are wrong: frames are cut, or there is other data.
    let moved = with(&|it| it.spans[1].packed += 1);
    assert_eq!(span(&moved, 0, &blob), Err(SpanError::Damaged));
    assert_eq!(span(&moved, 1, &blob), Err(SpanError::Damaged));
    let cut = with(&|it| it.kind = BlobKind::Zstd { data_end: data_end as u64 - 1 });
    assert_eq!(span(&cut, 2, &blob), Err(SpanError::Damaged));
    // More output than the span has, and less.
    let long = with(&|it| it.spans[1].unpacked += 512);
    assert_eq!(span(&long, 0, &blob), Err(SpanError::Short));
    assert_eq!(span(&long, 1, &blob), Err(SpanError::Damaged));
    // The bytes after the data have no output, so they do not matter.
    let whole = with(&|it| it.kind = BlobKind::Zstd { data_end: it.blob_bytes });
    assert!(span(&whole, 2, &blob).unwrap() == tar[600 * KIB..]);
    // A head of a gzip blob.
    let gzip = with(&|it| it.kind = BlobKind::Gzip);
    assert_eq!(span(&gzip, 0, &blob), Err(SpanError::Damaged));

    // Other frames of the same length of output.
    let other = frame(&vec![9; 300 * KIB]);
    let bytes = inflate_frames(&other, 300 * KIB as u64).unwrap();
    assert!(!head.is_unit(0, &bytes[..64 * KIB]) && head.is_unit(0, &tar[..64 * KIB]));
    let inflated = |packed: &[u8], length: usize| inflate_frames(packed, length as u64);
    let bytes = &tar[..1000];
    assert_eq!(inflated(b"", 1), Err(SpanError::Short));
    assert_eq!(inflated(b"garbage, and no frame", 1000), Err(SpanError::Damaged));
    assert_eq!(inflated(&dictionary_frame(bytes), 1000), Err(SpanError::Damaged));
    assert_eq!(inflated(&[frame(bytes), b"\0".to_vec()].concat(), 1000), Err(SpanError::Damaged));
    assert_eq!(inflated(&[frame(bytes), frame(bytes)].concat(), 1000), Err(SpanError::Damaged));
    assert_eq!(inflated(&frame(bytes), (16 << 20) + 1), Err(SpanError::Long((16 << 20) + 1)));
    // A claim of 2 GiB is never allocated, because the output is the only buffer.
    assert_eq!(inflated(&raw_frame(31, bytes), 1000).as_deref(), Ok(bytes));
    // 16 MiB of zeros do not fit in a span of 1000 bytes.
    assert_eq!(inflated(&frame(&vec![0; 16 << 20]), 1000), Err(SpanError::Damaged));
}
