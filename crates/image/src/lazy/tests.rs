#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "tests fail by panicking"
)]

use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use testing::noise;

use super::*;
use crate::gzip::{Checkpoint, Indexer, Window};

/// Makes a layer: its blob, its tar, and the blob's checkpoints.
fn layer() -> (Vec<u8>, Vec<u8>, Vec<Checkpoint>) {
    // The words are repeated, so that spans refer to their windows.
    let words = noise(1 << 20);
    let tar: Vec<u8> = words.iter().flat_map(|it| format!("{} ", it % 97).into_bytes()).collect();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
    encoder.write_all(&tar).unwrap();
    let blob = encoder.finish().unwrap();
    let mut indexer = Indexer::new(&blob[..]);
    indexer.read_to_end(&mut Vec::new()).unwrap();
    (blob.clone(), tar, indexer.finish().unwrap())
}

fn place(byte: u64) -> usize {
    usize::try_from(byte).unwrap()
}

fn head(blob: &[u8], tar: &[u8], checkpoints: &[Checkpoint]) -> (Head, Vec<Vec<u8>>) {
    let mut device = tar.to_vec();
    device.resize(tar.len().next_multiple_of(512) + 512, 7);
    let places = checkpoints.iter().map(|it| SpanPlace {
        start: it.start,
        packed: it.packed,
        unpacked: it.unpacked,
        padding: 0,
    });
    let (firsts, windows): (Vec<_>, Vec<_>) = encode_windows(checkpoints).into_iter().unzip();
    let groups = firsts.iter().zip(&windows).map(|(first, bytes)| WindowGroup {
        first: *first,
        bytes: u32::try_from(bytes.len()).unwrap(),
    });
    let head = Head {
        device: DeviceId::from_bytes(&[5; 32]).unwrap(),
        device_bytes: device.len() as u64,
        blob: Digest::sha256(blob),
        blob_bytes: blob.len() as u64,
        kind: BlobKind::Gzip,
        diff_id: Digest::sha256(tar),
        tar_bytes: tar.len() as u64,
        tail: device[tar.len()..].to_vec(),
        units: device.chunks(64 << 10).map(|it| Sha256::digest(it).into()).collect(),
        spans: places.collect(),
        groups: groups.collect(),
    };
    (head, windows)
}

#[test]
fn a_head_comes_back() {
    let (blob, tar, checkpoints) = layer();
    let (head, windows) = head(&blob, &tar, &checkpoints);
    let bytes = head.encode().unwrap();
    assert_eq!(Head::decode(&bytes).unwrap(), head);
    assert!(head.groups.len() > 1, "one group shows nothing");
    let mut decoded = Vec::new();
    for (group, bytes) in windows.iter().enumerate() {
        decoded.extend(decode_windows(bytes, head.group_spans(group).len()).unwrap());
    }
    let expect: Vec<Window> = checkpoints.iter().map(|it| it.window.clone()).collect();
    assert!(decoded == expect);
    assert!(expect.iter().skip(1).all(|it| !it.bytes().is_empty()));
}

/// Fills a device unit by unit from only the blob, the head and the windows.
#[test]
fn every_unit_can_be_filled() {
    let (blob, tar, checkpoints) = layer();
    let (head, _) = head(&blob, &tar, &checkpoints);
    let mut device = Vec::new();
    for (at, checkpoint) in checkpoints.iter().enumerate() {
        let packed = head.packed(&(at..at + 1));
        let bytes = &blob[place(packed.start)..place(packed.end)];
        let unpacked = head.unpacked(&(at..at + 1));
        let span = head.checkpoint(at, checkpoint.window.clone()).unwrap();
        device.extend(span.inflate(bytes, unpacked.end - unpacked.start).unwrap());
    }
    device.extend(&head.tail);
    for (at, unit) in device.chunks(64 << 10).enumerate() {
        assert!(head.is_unit(at, unit), "{at}");
        assert!(!head.is_unit(at + 1, unit));
    }
}

/// Makes a head with three spans and two groups, and with arbitrary digests.
fn places() -> Head {
    let span = |start, packed, unpacked| SpanPlace { start, packed, unpacked, padding: 0 };
    let starts = [
        span(Start::Member, 0, 0),
        span(Start::Block(3), 1000, 300_000),
        span(Start::Block(0), 600_000, 2 * 327_680),
    ];
    Head {
        device: DeviceId::from_bytes(&[5; 32]).unwrap(),
        device_bytes: 1_000_448,
        blob: Digest::sha256(b""),
        blob_bytes: 600_500,
        kind: BlobKind::Gzip,
        diff_id: Digest::sha256(b""),
        tar_bytes: 1_000_000,
        tail: vec![0; 448],
        units: vec![[0; 32]; 16],
        spans: starts.to_vec(),
        groups: vec![WindowGroup { first: 0, bytes: 7 }, WindowGroup { first: 2, bytes: 5 }],
    }
}

#[test]
fn spans_units_and_groups_are_found_from_one_another() {
    let head = places();
    head.check().unwrap();
    let last = 2 * 327_680;
    let of = |byte| head.span_of(byte);
    assert_eq!([0, 299_999, 300_000, last, 999_999].map(of), [0, 0, 1, 2, 2].map(Some));
    assert_eq!(of(1_000_000), None);
    assert_eq!(head.spans_of(&(299_999..300_001)), 0..2);
    assert_eq!(head.spans_of(&(299_999..300_000)), 0..1);
    assert_eq!(head.spans_of(&(last..2_000_000)), 2..3);
    // The tail is in no span.
    assert!(head.spans_of(&(1_000_000..1_000_448)).is_empty());
    assert!(head.spans_of(&(5..5)).is_empty());
    assert_eq!(head.unpacked(&(1..2)), 300_000..last);
    assert_eq!(head.unpacked(&(1..9)), 300_000..1_000_000);
    assert_eq!(head.unpacked(&(7..9)), 1_000_000..1_000_000);
    // A span shares the byte before it unless its first block begins at a byte boundary.
    assert_eq!(head.packed(&(1..2)), 999..600_000);
    assert_eq!(head.packed(&(2..3)), 600_000..600_500);
    assert_eq!(head.packed(&(0..3)), 0..600_500);
    assert_eq!(head.units_of(&(65_535..65_537)), 0..2);
    assert_eq!(head.units_of(&(0..u64::MAX)), 0..16);
    assert_eq!(head.touched_units(&(0..1)), 0..5);
    assert_eq!(head.whole_units(&(0..1)), 0..4);
    assert_eq!(head.touched_units(&(1..2)), 4..10);
    assert_eq!(head.whole_units(&(1..2)), 5..10);
    // The last span includes the tail.
    assert_eq!(head.touched_units(&(2..3)), 10..16);
    assert_eq!(head.whole_units(&(2..3)), 10..16);
    assert_eq!([0, 1, 2].map(|it| head.group_of(it)), [0, 0, 1]);
    assert_eq!([0, 1, 2].map(|it| head.group_spans(it)), [0..2, 2..3, 3..3]);
    assert!(head.group_places().eq([0..7, 7..12]));
    assert_eq!(head.windows_bytes(), 12);
}

/// Appends the correct digest to any content.
fn sealed(mut content: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&content);
    content.extend(digest);
    content
}

/// Changes the offset in the tar of the second span.
fn moved(spans: &[SpanPlace], unpacked: u64) -> Vec<SpanPlace> {
    let mut spans = spans.to_vec();
    spans[1].unpacked = unpacked;
    spans
}

#[test]
fn what_contradicts_itself_is_refused() {
    let (blob, tar, checkpoints) = layer();
    let (right, _) = head(&blob, &tar, &checkpoints);
    let refused = |change: &dyn Fn(&mut Head)| {
        let mut wrong = right.clone();
        change(&mut wrong);
        wrong.encode().unwrap_err()
    };
    let (device, tar) = (right.device_bytes, right.tar_bytes);
    let tail = u32::try_from(device - tar).unwrap();
    let lengths = |device, tar, tail| HeadError::Lengths { device, tar, tail };
    let units = |actual| HeadError::Units { expected: right.units.len() as u64, actual };
    assert_eq!(refused(&|it| it.device_bytes += 512), lengths(device + 512, tar, tail));
    assert_eq!(refused(&|it| it.tar_bytes -= 1), lengths(device, tar - 1, tail));
    let long = |it: &mut Head| {
        it.tail = vec![0; 1024];
        it.device_bytes = (it.tar_bytes + 1024).next_multiple_of(512);
    };
    assert!(matches!(refused(&long), HeadError::Lengths { tail: 1024, .. }));
    assert_eq!(refused(&|it| it.units.truncate(3)), units(3));
    assert_eq!(refused(&|it| it.units.push([0; 32])), units(right.units.len() + 1));
    let all = right.spans.len();
    let span = |number: usize, change: &dyn Fn(&mut Head)| {
        assert_eq!(refused(change), HeadError::Span(number));
    };
    span(0, &|it| it.spans[0].start = Start::Block(0));
    span(0, &|it| it.spans.clear());
    span(1, &|it| it.spans[1].start = Start::Block(8));
    span(1, &|it| it.spans.swap(1, 2));
    span(1, &|it| it.spans[2].unpacked = it.spans[1].unpacked);
    span(all - 1, &|it| it.spans.last_mut().unwrap().packed = it.blob_bytes);
    // The compressed size of a span is limited, because it is held in memory.
    let last = *right.spans.last().unwrap();
    let most = last.packed + (right.tar_bytes - last.unpacked) * 2 + (64 << 10);
    span(all - 1, &|it| it.blob_bytes = most + 1);
    Head { blob_bytes: most, ..right.clone() }.encode().unwrap();
    // The number of spans and groups in a part of the device is limited.
    let next = right.spans[2].unpacked;
    span(1, &|it| it.spans[1].unpacked = next - (256 << 10) + 1);
    Head { spans: moved(&right.spans, next - (256 << 10)), ..right.clone() }.encode().unwrap();
    let second = WindowGroup { first: 1, bytes: 0 };
    assert!(right.groups[1].first > 1);
    let group = |number: usize, change: &dyn Fn(&mut Head)| {
        assert_eq!(refused(change), HeadError::Group(number));
    };
    group(1, &|it| it.groups.insert(1, second));
    group(0, &|it| it.groups.clear());
    group(1, &|it| drop(it.spans.drain(1..)));
    group(0, &|it| it.groups[0].first = 1);
    let last = right.groups.len() - 1;
    group(last, &|it| it.groups.last_mut().unwrap().first = u32::MAX);
    let sha512 = refused(&|it| it.blob = Digest::from_sha512(&[0; 64]));
    assert_eq!(sha512, HeadError::Damaged("a digest is not SHA-256"));
}

/// The head of a zstd blob: two spans of 300,000 and 100,000 bytes of tar, and 4000 bytes after the data.
fn of_zstd() -> Head {
    let span = |packed, unpacked| SpanPlace { start: Start::Member, packed, unpacked, padding: 0 };
    Head {
        device: DeviceId::from_bytes(&[1; 32]).unwrap(),
        device_bytes: 400_384,
        blob: Digest::from_sha256(&[2; 32]),
        blob_bytes: 80_000,
        kind: BlobKind::Zstd { data_end: 76_000 },
        diff_id: Digest::from_sha256(&[3; 32]),
        tar_bytes: 400_000,
        tail: vec![4; 384],
        units: vec![[5; 32]; 7],
        spans: vec![span(0, 0), span(60_000, 300_000)],
        groups: vec![WindowGroup { first: 0, bytes: 11 }],
    }
}

/// Writes the fields of `docs/format/lazy-index.md` by hand.
#[test]
fn the_head_of_a_zstd_blob_is_as_documented() {
    let mut content = b"quirelzy\x01\0\0\0\x02\0\0\0".to_vec();
    content.extend([1; 32]);
    content.extend(400_384_u64.to_le_bytes());
    content.extend([2; 32]);
    content.extend(80_000_u64.to_le_bytes());
    content.extend([3; 32]);
    content.extend(400_000_u64.to_le_bytes());
    for count in [384_u32, 7, 2, 1] {
        content.extend(count.to_le_bytes());
    }
    content.extend(76_000_u64.to_le_bytes());
    content.extend([0; 32]);
    assert_eq!(content.len(), 192);
    content.extend([4; 384]);
    content.extend([5; 7 * 32]);
    for (packed, unpacked) in [(0_u64, 0_u64), (60_000, 300_000)] {
        content.extend(packed.to_le_bytes());
        content.extend(unpacked.to_le_bytes());
        content.extend([255, 0, 0, 0, 0, 0, 0, 0]);
    }
    content.extend([0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let bytes = sealed(content.clone());
    assert_eq!(of_zstd().encode().unwrap(), bytes);
    assert_eq!(Head::decode(&bytes), Ok(of_zstd()));
    // Bytes after the data are not fetched.
    assert_eq!(of_zstd().packed(&(0..2)), 0..76_000);
    assert_eq!(of_zstd().packed(&(1..2)), 60_000..76_000);

    let with = |at: usize, value: u8| {
        let mut other = content.clone();
        other[at] = value;
        Head::decode(&sealed(other)).unwrap_err()
    };
    // A gzip blob has no end of data, and a zstd blob no deflate blocks.
    assert_eq!(with(12, 1), HeadError::Damaged("a reserved field is not zero"));
    assert_eq!(with(12, 5), HeadError::Kind(5));
    // Spans that are chunks have neither a tail nor windows.
    assert_eq!(with(12, 3), HeadError::Damaged("a device of chunks has a tail or windows"));
    assert_eq!(with(160, 1), HeadError::Damaged("a reserved field is not zero"));
    let spans = 192 + 384 + 7 * 32;
    assert_eq!(with(spans + 24 + 16, 0), HeadError::Span(1));
    assert_eq!(with(spans + 24 + 16, 3), HeadError::Span(1));
}

#[test]
fn the_data_of_a_zstd_blob_ends_in_the_blob_and_in_the_last_span() {
    let with = |data_end| Head { kind: BlobKind::Zstd { data_end }, ..of_zstd() }.encode();
    with(80_000).unwrap();
    assert_eq!(with(80_001), Err(HeadError::DataEnd { blob: 80_000, data_end: 80_001 }));
    assert_eq!(with(u64::MAX), Err(HeadError::DataEnd { blob: 80_000, data_end: u64::MAX }));
    with(60_001).unwrap();
    for before in [0, 59_999, 60_000] {
        assert_eq!(with(before), Err(HeadError::Span(1)));
    }
    // A table of contents of any size is not part of the last span, but its data is limited.
    let most = 60_000 + 2 * 100_000 + 65_536;
    let long = |data_end| {
        Head { blob_bytes: 1 << 40, kind: BlobKind::Zstd { data_end }, ..of_zstd() }.encode()
    };
    long(most).unwrap();
    assert_eq!(long(most + 1), Err(HeadError::Span(1)));
    // A span of more than 16 MiB of tar is refused.
    let tar_bytes: u64 = 300_000 + (16 << 20);
    let device_bytes = tar_bytes + 32;
    let units = vec![[5; 32]; place(device_bytes.div_ceil(UNIT))];
    let large = Head { tar_bytes, device_bytes, tail: vec![4; 32], units, ..of_zstd() };
    large.encode().unwrap();
    let longer = Head { tar_bytes: tar_bytes + 1, tail: vec![4; 31], ..large };
    assert_eq!(longer.encode(), Err(HeadError::Span(1)));
}

#[test]
fn damage_and_other_versions_are_told_apart() {
    let (blob, tar, checkpoints) = layer();
    let bytes = head(&blob, &tar, &checkpoints).0.encode().unwrap();
    let content = &bytes[..bytes.len() - 32];
    assert_eq!(Head::decode(b""), Err(HeadError::Magic));
    assert_eq!(Head::decode(&[0; 300]), Err(HeadError::Magic));
    for at in [20, 130, 200, content.len() - 1, bytes.len() - 1] {
        let mut wrong = bytes.clone();
        wrong[at] ^= 1;
        assert_eq!(Head::decode(&wrong), Err(HeadError::Digest), "{at}");
    }
    let mut later = bytes.clone();
    later[8] = 2;
    assert_eq!(Head::decode(&later), Err(HeadError::Version(2)));
    let with = |at: usize, value: u8| {
        let mut other = content.to_vec();
        other[at] = value;
        Head::decode(&sealed(other)).unwrap_err()
    };
    assert_eq!(with(12, 9), HeadError::Kind(9));
    for length in [40, 191, 192, content.len() - 1] {
        let error = Head::decode(&sealed(content[..length].to_vec())).unwrap_err();
        assert_eq!(error, HeadError::Damaged("it ends early"));
    }
    let more = [content, &[0][..]].concat();
    let error = Head::decode(&sealed(more)).unwrap_err();
    assert_eq!(error, HeadError::Damaged("bytes follow its end"));
    // A count is larger than the number of items.
    let error = with(143, 0xff);
    assert_eq!(error, HeadError::Damaged("it ends early"));
}

#[test]
fn windows_of_others() {
    let window = |runs: &[std::ops::Range<u16>]| {
        let bytes = runs.iter().flat_map(|it| it.clone().map(|at| at.to_le_bytes()[0])).collect();
        let window = Window::of_parts(runs.to_vec(), bytes).unwrap();
        Checkpoint { start: Start::Member, packed: 0, unpacked: 0, window }
    };
    let whole = [0..32_768, 0..1];
    for runs in [&[][..], &whole[1..], &whole[..1], &[1..2, 127..128, 300..16_700, 32_767..32_768]]
    {
        let one = window(runs);
        let groups = encode_windows(&[one.clone(), one.clone()]);
        assert_eq!(groups.len(), 1);
        let bytes = &groups[0].1;
        let expect = vec![one.window.clone(), one.window];
        assert_eq!(decode_windows(bytes, 2), Some(expect));
        assert_eq!(decode_windows(bytes, 1), None);
        assert_eq!(decode_windows(bytes, 3), None);
        assert_eq!(decode_windows(&bytes[..bytes.len() - 1], 2), None);
    }
    // A run with the first byte of the window, then the same run with a longer encoding of a number.
    assert!(decode_windows(&[1, 0, 1, 9], 1).is_some());
    assert!(decode_windows(&[1, 0x80, 0, 1, 9], 1).is_none());
    assert!(decode_windows(&[0xff, 0xff, 0xff, 0xff], 1).is_none());
    // An empty run, a run beyond the window, and a run that is longer than the bytes.
    assert!(decode_windows(&[1, 0, 0], 1).is_none());
    assert!(decode_windows(&[1, 0xff, 0xff, 1, 2, 0, 0], 1).is_none());
    assert!(decode_windows(&[0xff, 0x7f, 0, 1], 1).is_none());
}
