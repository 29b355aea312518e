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

/// A layer's blob, its tar, and its checkpoints.
fn layer() -> (Vec<u8>, Vec<u8>, Vec<Checkpoint>) {
    // Words of a small alphabet come again, so that spans refer to their windows.
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
    for (at, (group, bytes)) in head.groups.iter().zip(&windows).enumerate() {
        let next = head
            .groups
            .get(at + 1)
            .map_or(u32::try_from(checkpoints.len()).unwrap(), |it| it.first);
        decoded.extend(decode_windows(bytes, group.spans(next)).unwrap());
    }
    let expect: Vec<Window> = checkpoints.iter().map(|it| it.window.clone()).collect();
    assert!(decoded == expect);
    assert!(expect.iter().skip(1).all(|it| !it.bytes().is_empty()));
}

/// All of a device can be made of the blob, the head and the windows alone, unit by unit.
#[test]
fn every_unit_can_be_filled() {
    let (blob, tar, checkpoints) = layer();
    let (head, _) = head(&blob, &tar, &checkpoints);
    let mut device = Vec::new();
    for (at, checkpoint) in checkpoints.iter().enumerate() {
        let end = head.spans.get(at + 1);
        let (packed, unpacked) =
            end.map_or((head.blob_bytes, head.tar_bytes), |it| (it.packed, it.unpacked));
        let SpanPlace { start, packed: from, unpacked: first } = head.spans[at];
        let window = checkpoint.window.clone();
        let checkpoint = Checkpoint { start, packed: from, unpacked: first, window };
        let needs = checkpoint.needs(packed);
        let bytes = &blob[place(needs.start)..place(needs.end)];
        device.extend(checkpoint.inflate(bytes, unpacked - first).unwrap());
    }
    device.extend(&head.tail);
    for (at, unit) in device.chunks(64 << 10).enumerate() {
        assert!(head.is_unit(at, unit), "{at}");
        assert!(!head.is_unit(at + 1, unit));
    }
    assert_eq!(head.span_of(0), Some(0));
    assert_eq!(head.span_of(head.spans[1].unpacked - 1), Some(0));
    assert_eq!(head.span_of(head.spans[1].unpacked), Some(1));
    assert_eq!(head.span_of(head.tar_bytes - 1), Some(head.spans.len() - 1));
    assert_eq!(head.span_of(head.tar_bytes), None);
}

/// With the right digest behind it, whatever the content is.
fn sealed(mut content: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&content);
    content.extend(digest);
    content
}

/// With another place of the second span in the tar.
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
        assert!(matches!(wrong.encode(), Err(HeadError::Damaged(_))));
    };
    refused(&|it| it.device_bytes += 512);
    refused(&|it| it.tar_bytes -= 1);
    refused(&|it| it.tail = vec![0; 1024]);
    refused(&|it| it.units.truncate(3));
    refused(&|it| it.units.push([0; 32]));
    refused(&|it| it.spans[0].start = Start::Block(0));
    refused(&|it| it.spans.clear());
    refused(&|it| it.spans[1].start = Start::Block(8));
    refused(&|it| it.spans.swap(1, 2));
    refused(&|it| it.spans[2].unpacked = it.spans[1].unpacked);
    refused(&|it| drop(it.spans.drain(1..)));
    refused(&|it| it.spans.last_mut().unwrap().packed = it.blob_bytes);
    // Whoever fetches a span has its part of the blob in memory.
    let last = *right.spans.last().unwrap();
    let most = last.packed + (right.tar_bytes - last.unpacked) * 2 + (64 << 10);
    refused(&|it| it.blob_bytes = most + 1);
    Head { blob_bytes: most, ..right.clone() }.encode().unwrap();
    // Nor are there many spans or groups for a part of the device.
    let next = right.spans[2].unpacked;
    refused(&|it| it.spans[1].unpacked = next - (256 << 10) + 1);
    Head { spans: moved(&right.spans, next - (256 << 10)), ..right.clone() }.encode().unwrap();
    let second = WindowGroup { first: 1, bytes: 0 };
    assert!(right.groups[1].first > 1);
    refused(&|it| it.groups.insert(1, second));
    refused(&|it| it.groups.clear());
    refused(&|it| it.groups[0].first = 1);
    refused(&|it| it.groups.last_mut().unwrap().first = u32::MAX);
    refused(&|it| it.blob = Digest::from_sha512(&[0; 64]));
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
    assert_eq!(with(12, 9), HeadError::Damaged("its kind is unknown"));
    for length in [40, 191, 192, content.len() - 1] {
        let error = Head::decode(&sealed(content[..length].to_vec())).unwrap_err();
        assert_eq!(error, HeadError::Damaged("it ends early"));
    }
    let more = [content, &[0][..]].concat();
    let error = Head::decode(&sealed(more)).unwrap_err();
    assert_eq!(error, HeadError::Damaged("something stands behind its end"));
    // A count says more than there is.
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
    // One run: 1 byte from the window's first. Then the same, longer than it has to be.
    assert!(decode_windows(&[1, 0, 1, 9], 1).is_some());
    assert!(decode_windows(&[1, 0x80, 0, 1, 9], 1).is_none());
    assert!(decode_windows(&[0xff, 0xff, 0xff, 0xff], 1).is_none());
    // An empty run, one beyond the window, more runs than bytes.
    assert!(decode_windows(&[1, 0, 0], 1).is_none());
    assert!(decode_windows(&[1, 0xff, 0xff, 1, 2, 0, 0], 1).is_none());
    assert!(decode_windows(&[0xff, 0x7f, 0, 1], 1).is_none());
}
