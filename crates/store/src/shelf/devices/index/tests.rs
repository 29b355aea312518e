#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "the code's own lints; a test that overflows fails"
)]

use std::io::Write as _;

use image::verity::{Algorithm, ObjectId, digest};
use proptest::prelude::{any, proptest};
use sha2::{Digest as _, Sha256};

use super::{
    Builder, COUNTS, DATA_BLOCK, DeviceKind, ENTRY, Entry, HEADER, Header, Index, TRAILER,
};
use super::{IndexPiece, Record};
use crate::Digest;

fn id(text: &str) -> ObjectId {
    digest(Algorithm::Sha256, text.as_bytes()).into()
}

fn entry(text: &str, offset: u64, size: u64) -> Entry {
    let key = id(text).as_bytes().try_into().unwrap();
    Entry { id: key, offset, size, sha256: Sha256::digest(text).into() }
}

const fn packed(pages: u64) -> Header {
    // The additional block identifies the device.
    Header { kind: DeviceKind::Packed, bytes: pages * 4096 + DATA_BLOCK, dropped: 0, layer: None }
}

fn encode(header: &Header, entries: &[Entry]) -> Vec<u8> {
    let mut builder = Builder::default();
    entries.iter().for_each(|it| builder.add(*it));
    builder.encode(header).unwrap()
}

fn file(bytes: &[u8]) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn read(bytes: &[u8]) -> Result<Index, String> {
    Index::read(&file(bytes), bytes.len() as u64).map_err(|it| it.to_string())
}

/// Corrects the hash of a file that was changed.
fn rehash(bytes: &mut [u8]) {
    let (all, hash) = bytes.split_last_chunk_mut::<32>().unwrap();
    *hash = Sha256::digest(all).into();
}

#[test]
fn the_first_byte_without_an_object_is_found() {
    // Two adjacent objects of a block, a gap of a block, and one more object.
    const BLOCK: u64 = 4096;
    let entries = [("a", 0), ("b", 1), ("c", 3)].map(|it| entry(it.0, it.1 * BLOCK, BLOCK));
    let index = read(&encode(&packed(4), &entries)).unwrap();
    for (offset, len, expect) in [
        (0, 2 * BLOCK, None),
        (20, BLOCK, None),
        (0, 2 * BLOCK + 1, Some(2 * BLOCK)),
        (BLOCK + 7, 3 * BLOCK, Some(2 * BLOCK)),
        (2 * BLOCK + 9, 10, Some(2 * BLOCK + 9)),
        (3 * BLOCK, BLOCK + 1, Some(4 * BLOCK)),
        (3 * BLOCK, BLOCK, None),
        (7, 0, None),
    ] {
        assert_eq!(index.first_unknown(offset, len), expect, "{offset} {len}");
    }
}

#[test]
fn what_was_added_is_found() {
    let entries = [entry("whole", 4096, 5000), entry("small", 0, 100), entry("empty", 0, 0)];
    let index = read(&encode(&packed(3), &entries)).unwrap();
    for wanted in &entries {
        assert_eq!(index.places(&wanted.id), [*wanted]);
    }
    assert!(index.places(id("absent").as_bytes().try_into().unwrap()).is_empty());
    assert_eq!(index.at(4096).unwrap().object(), id("whole"));
    assert_eq!(index.at(0).unwrap().object(), id("small"));
    assert_eq!(index.at(8192), None);
    assert_eq!(index.at(4097), None);
}

#[test]
fn the_file_is_as_the_document_says() {
    let layer = Digest::sha256(b"tar");
    let header = Header { kind: DeviceKind::Tar, bytes: 2048, dropped: 7, layer: Some(layer) };
    let bytes = encode(&header, &[entry("one", 512, 600), entry("two", 0, 0)]);
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(&bytes[..8], b"quiredat");
    assert_eq!(bytes[8..16], [2, 0, 0, 0, 0, 2, 0, 0]);
    assert_eq!((number(16), number(24), number(32)), (2048, 7, 32));
    assert_eq!(&bytes[40..72], layer.as_bytes());
    assert!(bytes[72..104].iter().all(|it| *it == 0));
    assert_eq!((number(104), number(112), number(120)), (2, 0, 0));
    let mut ids = [id("one"), id("two")];
    ids.sort_unstable();
    assert_eq!(&bytes[128..160], ids[0].as_bytes());
    assert_eq!(&bytes[208..240], ids[1].as_bytes());
    let one = if ids[0] == id("one") { 128 } else { 208 };
    assert_eq!(bytes[one + 32..one + 64], *Sha256::digest(b"one"));
    assert_eq!((number(one + 64), number(one + 72)), (512, 600));
    let two = 128 + 208 - one;
    assert_eq!((number(two + 64), number(two + 72)), (0, 0));
    assert_eq!(bytes.len(), 288 + 40);
    assert_eq!(&bytes[288..296], b"datend\0\x02");
    assert_eq!(bytes[296..], *Sha256::digest(&bytes[..296]));
    assert_eq!(read(&bytes).unwrap().header, header);
}

/// Checks that a file is refused for this reason after a change, with its hash corrected.
fn refused(change: impl Fn(&mut [u8], [usize; 2]), reason: &str) {
    let entries = [entry("a", 0, 5000), entry("b", 8192, 4096), entry("empty", 0, 0)];
    let mut bytes = encode(&packed(4), &entries);
    let at =
        |text: &str| bytes[HEADER..].chunks(ENTRY).position(|it| it[..32] == *id(text).as_bytes());
    let at = ["a", "empty"].map(|text| HEADER + at(text).unwrap() * ENTRY);
    change(&mut bytes, at);
    rehash(&mut bytes);
    let found = read(&bytes).map(|it| it.entries).unwrap_err();
    assert!(found.contains(reason), "{found}, not {reason}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let put = |bytes: &mut [u8], at: usize, value: u64| {
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    let trailer = |bytes: &[u8]| bytes.len() - TRAILER;
    refused(|bytes, _| bytes[0] = b'Q', "not an index");
    refused(|bytes, _| bytes[8] = 3, "unknown kind");
    refused(|bytes, _| bytes[8] = 2, "layer");
    refused(|bytes, _| bytes[13] = 16, "block size");
    refused(|bytes, _| bytes[32] = 32, "layer");
    refused(|bytes, _| bytes[100] = 1, "header");
    refused(|bytes, _| put(bytes, 16, 4 * 4096 + 511), "whole blocks");
    refused(|bytes, [a, _]| put(bytes, a + 64, 511), "begin at a block boundary");
    refused(|bytes, [a, _]| put(bytes, a + 64, 4 * 4096), "within the device");
    refused(|bytes, [a, _]| put(bytes, a + 64, 0xffff_ffff_ffff_f000), "within the device");
    refused(|bytes, [a, _]| put(bytes, a + 72, u64::MAX), "within the device");
    refused(|bytes, [a, _]| put(bytes, a + 72, 8193), "overlap");
    refused(|bytes, [_, empty]| put(bytes, empty + 64, 512), "an empty object has an offset");
    for count in [0, 2, 4, u64::MAX / 80, u64::MAX] {
        refused(|bytes, _| put(bytes, COUNTS, count), "add up");
    }
    for version in [0, 1, 3] {
        refused(
            |bytes, _| {
                let at = trailer(bytes) + 7;
                bytes[at] = version;
            },
            "not an index",
        );
    }
    refused(
        |bytes, _| {
            let (one, two) = bytes[HEADER..].split_at_mut(ENTRY);
            one.swap_with_slice(&mut two[..ENTRY]);
        },
        "not in order",
    );
    let good = encode(&packed(4), &[entry("a", 0, 5000)]);
    for length in [0, 1, TRAILER - 1, TRAILER, good.len() - 1] {
        read(&good[..length]).unwrap_err();
    }
    for at in [HEADER + 70, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(read(&bad).unwrap_err().contains("checksum"));
    }
}

fn record(text: &str, pieces: &[(&str, u64)]) -> Record {
    let key = |text: &str| <[u8; 32]>::try_from(id(text).as_bytes()).unwrap();
    let piece =
        |(text, len): &(&str, u64)| IndexPiece { id: (*text != ".").then(|| key(text)), len: *len };
    Record {
        id: key(text),
        sha256: Sha256::digest(text).into(),
        size: pieces.iter().map(|it| it.1).sum(),
        pieces: pieces.iter().map(piece).collect(),
    }
}

fn with_records(records: &[Record]) -> std::io::Result<Vec<u8>> {
    let mut builder = Builder::default();
    builder.add(entry("a", 0, 5000));
    builder.add(entry("b", 8192, 4096));
    records.iter().for_each(|it| builder.add_record(it.clone()));
    builder.encode(&packed(4))
}

/// Objects in pieces are encoded as the document describes.
#[test]
fn objects_in_pieces_are_as_the_document_says() {
    let one = record("one", &[("x", 8192), (".", 4096), ("a", 5000)]);
    let bytes = with_records(std::slice::from_ref(&one)).unwrap();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!([number(104), number(112), number(120)], [2, 1, 3]);
    // After the header and two entries.
    let at = 128 + 2 * 80;
    assert_eq!(&bytes[at..at + 32], id("one").as_bytes());
    assert_eq!(bytes[at + 32..at + 64], *Sha256::digest(b"one"));
    assert_eq!([0, 8, 16, 24].map(|it| number(at + 64 + it)), [8192 + 4096 + 5000, 0, 3, 0]);
    let pieces = at + 96;
    assert_eq!(&bytes[pieces..pieces + 32], id("x").as_bytes());
    assert_eq!(bytes[pieces + 40..pieces + 72], [0; 32]);
    assert_eq!([32, 72, 112].map(|it| number(pieces + it)), [8192, 4096, 5000]);
    let index = read(&bytes).unwrap();
    assert_eq!(index.records, std::slice::from_ref(&one));
    assert_eq!(index.record(&one.id), Some(&one));
    assert_eq!(index.record(&entry("a", 0, 0).id), None);
    assert_eq!(index.record_of(&one.pieces), Some(&one));
    assert_eq!(index.record_of(&one.pieces[..2]), None);
    let a = entry("a", 0, 5000);
    assert_eq!(index.piece(&a.id, 5000).map(|it| it.offset), Some(0));
    assert_eq!(index.piece(&a.id, 4999), None);
}

/// The file was made by a script from the document, independently of this code.
#[test]
fn an_index_of_another_writer_is_read() {
    let bytes = include_bytes!("../../../../../../fuzz/corpus/data_index/pieces");
    let index = read(bytes).unwrap();
    let (a, b) = ([b'a'; 8192], [b'b'; 5000]);
    let whole = [&a[..], &[0; 12288], &b].concat();
    let key = |bytes: &[u8]| -> [u8; 32] {
        digest(Algorithm::Sha256, bytes).as_bytes().try_into().unwrap()
    };
    let record = index.record(&key(&whole)).unwrap();
    let expected = [(Some(key(&a)), 8192), (None, 12288), (Some(key(&b)), 5000)];
    assert_eq!(record.pieces, expected.map(|(id, len)| IndexPiece { id, len }));
    assert_eq!((record.size, record.sha256), (25480, Sha256::digest(&whole).into()));
    assert_eq!(index.piece(&key(&b), 5000).unwrap().offset, 8192);
    let [small] = index.places(&key(&[b'x'; 100])) else { panic!() };
    assert_eq!((small.offset, small.size), (13_312, 100));
}

#[test]
fn objects_in_pieces_that_make_no_sense_are_refused() {
    let refused = |records: &[Record], reason: &str| {
        let error = with_records(records).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}, not {reason}");
    };
    refused(&[record("one", &[("x", 8191), ("a", 1)])], "end at a block boundary");
    refused(&[record("one", &[(".", 4096), (".", 4096)])], "two pieces");
    refused(&[record("one", &[])], "add up to its size");
    refused(&[record("one", &[("x", 0), ("a", 1)])], "add up to its size");
    refused(&[Record { size: 9, ..record("one", &[("x", 10)]) }], "add up to its size");
    refused(&[Record { size: 4097, ..record("one", &[("x", 4096)]) }], "add up to its size");
    refused(&[record("one", &[("x", 10)]), record("two", &[("x", 10)])], "same pieces");
    let layer = Some(Digest::sha256(b"tar"));
    let mut builder = Builder::default();
    builder.add_record(record("one", &[("x", 10)]));
    let tar = Header { kind: DeviceKind::Tar, bytes: 512, dropped: 0, layer };
    assert!(builder.encode(&tar).unwrap_err().to_string().contains("a tar has"));

    // Expects the same errors from a file in which a field was changed and the hash was corrected.
    let records =
        [record("one", &[("x", 8192), ("a", 10)]), record("two", &[(".", 4096), ("x", 8192)])];
    let good = with_records(&records).unwrap();
    let at = HEADER + 2 * ENTRY;
    let pieces = at + 2 * 96;
    let changed = |change: &dyn Fn(&mut [u8]), reason: &str| {
        let mut bytes = good.clone();
        change(&mut bytes);
        rehash(&mut bytes);
        let error = read(&bytes).map(|it| it.entries).unwrap_err();
        assert!(error.contains(reason), "{error}, not {reason}");
    };
    let put = |bytes: &mut [u8], at: usize, value: u64| {
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    let (records, pieces_count) = (COUNTS + 8, COUNTS + 16);
    changed(&|it| put(it, records, 0), "add up");
    changed(&|it| put(it, records, 3), "add up");
    changed(&|it| put(it, records, u64::MAX), "add up");
    changed(&|it| put(it, pieces_count, 3), "add up");
    changed(&|it| put(it, pieces_count, u64::MAX / 40), "add up");
    changed(&|it| put(it, at + 64, 8203), "end at a block boundary");
    changed(&|it| put(it, at + 72, 1), "in order");
    changed(&|it| put(it, at + 80, 1), "");
    changed(&|it| put(it, at + 80, u64::MAX), "");
    changed(&|it| put(it, at + 88, 1), "reserved field");
    changed(&|it| put(it, pieces + 32, 8191), "end at a block boundary");
    changed(
        &|it| {
            let (one, two) = it[at..].split_at_mut(96);
            one[..64].swap_with_slice(&mut two[..64]);
        },
        "in order",
    );
    read(&good).unwrap();
}

/// Devices with the same bytes and objects, but other objects in pieces, have different ids.
#[test]
fn objects_in_pieces_are_in_the_imprint() {
    let imprint = |records: &[Record]| {
        let mut builder = Builder::default();
        builder.add(entry("a", 0, 5000));
        records.iter().for_each(|it| builder.add_record(it.clone()));
        builder.imprint(DeviceKind::Packed, None)
    };
    let records = [
        record("one", &[("x", 4096), ("a", 10)]),
        record("one", &[("a", 4096), ("x", 10)]),
        record("two", &[("x", 4096), ("a", 10)]),
    ];
    let all: std::collections::BTreeSet<_> =
        std::iter::once(imprint(&[])).chain(records.map(|it| imprint(&[it]))).collect();
    assert_eq!(all.len(), 4);
}

#[test]
fn a_builder_refuses_what_a_reader_would() {
    let encode = |entries: &[Entry]| {
        let mut builder = Builder::default();
        entries.iter().for_each(|it| builder.add(*it));
        builder.encode(&packed(2)).map(drop).map_err(|it| it.to_string())
    };
    encode(&[entry("a", 0, 4096), entry("b", 4096, 4096), entry("a", 0, 4096)]).unwrap();
    assert!(encode(&[entry("a", 0, 4097), entry("b", 4096, 1)]).unwrap_err().contains("overlap"));
    assert!(encode(&[entry("a", 511, 1)]).unwrap_err().contains("block"));
    assert!(encode(&[entry("a", 4096, 4097)]).unwrap_err().contains("within"));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(
        seed in proptest::collection::vec((0_usize..700, any::<u8>()), 1..20),
        right in any::<bool>(),
    ) {
        let mut bytes =
            with_records(&[record("one", &[("x", 8192), (".", 4096), ("a", 5000)])]).unwrap();
        for (at, byte) in seed {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if right {
            rehash(&mut bytes);
        }
        if let Ok(index) = read(&bytes) {
            for entry in &index.entries {
                assert!(entry.until() <= index.header.bytes);
            }
            for record in &index.records {
                assert_eq!(record.pieces.iter().map(|it| it.len).sum::<u64>(), record.size);
            }
        }
    }
}
