#![expect(clippy::as_conversions, reason = "tests fail by panicking")]

use flate2::write::DeflateEncoder;
use flate2::{Compression, Decompress, FlushDecompress, Status};
use proptest::prelude::*;
use std::io::Write as _;
use testing::noise;

use super::*;

/// Inflates with another decoder; returns the output and the number of input bytes used, or `None` for damaged or
/// incomplete data.
fn theirs(packed: &[u8]) -> Option<(Vec<u8>, u64)> {
    let mut decoder = Decompress::new(false);
    let mut out = Vec::with_capacity(1 << 20);
    let status = decoder.decompress_vec(packed, &mut out, FlushDecompress::Finish).ok()?;
    (status == Status::StreamEnd).then(|| (out, decoder.total_in()))
}

/// Inflates with this decoder, which gets at once `piece` bytes more than it needs.
fn ours(packed: &[u8], piece: usize) -> Result<(Vec<u8>, u64), InflateError> {
    let mut inflater = Inflater::default();
    let mut out = vec![0; (1 << 20) + ROOM];
    let (mut used, mut at) = (0, 0);
    loop {
        let rest = &packed[used..];
        let some = rest.len().min(AHEAD + piece);
        let mut marks = Marks { origin: 0, needed: &mut [] };
        let is_all = some == rest.len();
        let step = inflater.step(&rest[..some], is_all, &mut out, at, &mut marks)?;
        used += step.read;
        at += step.written;
        match step.pause {
            Pause::End => {
                out.truncate(at);
                return Ok((out, used as u64));
            }
            Pause::Output => panic!("more output than there is room for"),
            Pause::Block => {}
            Pause::Input => assert!(some < rest.len(), "it had all"),
        }
    }
}

fn check(packed: &[u8], piece: usize) -> Result<(), InflateError> {
    let ours = ours(packed, piece);
    assert_eq!(ours.as_ref().ok(), theirs(packed).as_ref(), "{packed:x?}");
    ours.map(|_| ())
}

fn deflate(bytes: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Packs groups of binary digits into bytes, lowest bit first. Codes are written in the order in which they are read.
fn bits(groups: &[&str]) -> Vec<u8> {
    let all: Vec<u8> = groups.concat().bytes().map(|digit| digit - b'0').collect();
    all.chunks(8).map(|byte| (0..).zip(byte).map(|(at, bit)| bit << at).sum()).collect()
}

#[test]
fn blocks_by_hand() {
    let row = |groups: &[&str], expect| {
        let mut bytes = bits(groups);
        // Bytes after the end must be ignored.
        bytes.extend([0x55; 40]);
        assert_eq!(check(&bytes, 0), expect, "{groups:?}");
    };
    let (good, damaged) = (Ok(()), Err(InflateError::Damaged));
    // The last block, with the fixed codes. The length 3 and the distance 1 have the number 0.
    let (fixed, end) = (["1", "10"].concat(), "0000000");
    row(&[&fixed, end], good);
    row(&[&fixed, "10010001", end], good);
    row(&[&fixed, "10010001", "0000001", "00000", end], good);
    // A distance of two bytes, although there is only one byte of output.
    row(&[&fixed, "10010001", "0000001", "00001", end], damaged);
    // Symbols that have a code but no meaning: the length symbol 286, and the distance symbol 30.
    row(&[&fixed, "11000110", "00000", end], damaged);
    row(&[&fixed, "10010001", "0000001", "11110", end], damaged);
    // Stored blocks: an empty one, and one with a wrong check of the length. They are followed by the block type that
    // does not exist.
    row(&["1", "00", "00000", "0000000000000000", "1111111111111111"], good);
    row(&["1", "00", "00000", "1000000000000000", "1111111111111111"], damaged);
    row(&["1", "11"], damaged);
    // Dynamic codes for 257 and 1 symbols. The code lengths are written with two codes of one bit each, for the
    // symbols 18 and 1.
    let own = ["1", "01", "00000", "00000"].concat();
    // 18 code lengths follow in the order of RFC 1951. The length for symbol 18 is the third, and the length for
    // symbol 1 is the last.
    let lengths = ["0111", "000", "000", "100"].concat() + &"000".repeat(14) + "100";
    // 138 and 118 zeros, a code for the end, and a code for a distance. The code of symbol 1 is 0, and the code of
    // symbol 18 is 1.
    let zeros = ["1", "1111111", "1", "1101011"].concat();
    row(&[&own, &lengths, &zeros, "0", "0", "0"], good);
    // The one-bit code that is not the code of the end symbol.
    row(&[&own, &lengths, &zeros, "0", "0", "1"], damaged);
    // The end symbol has no code.
    row(&[&own, &lengths, "1", "1111111", "1", "0011011", "0", "0", "0"], damaged);
    // More lengths than symbols.
    row(&[&own, &lengths, "1", "1111111", "1", "1111111", "0"], damaged);
    // 287 symbols, then 31 distances.
    row(&["1", "01", "01111", "00000", &lengths, &zeros, "0", "0", "0"], damaged);
    row(&["1", "01", "00000", "01111", &lengths, &zeros, "0", "0", "0"], damaged);
    // A code for code lengths that uses only half of the possible codes, and one that uses more than all of them.
    row(&[&own, "0000", "100", "000", "000", "000", "0"], damaged);
    row(&[&own, "0000", "100", "100", "100", "000", "0"], damaged);
    // A length is repeated before any length was given.
    row(&[&own, "0000", "100", "000", "100", "000", "0", "00"], damaged);
}

#[test]
fn data_that_ends_early() {
    let bytes = noise(300);
    for level in [0, 1, 9] {
        let packed = deflate(&[&bytes[..], &bytes, &[7; 1000]].concat(), level);
        check(&packed, 0).unwrap();
        for length in 0..packed.len() {
            assert_eq!(check(&packed[..length], 0), Err(InflateError::Short), "{length}");
        }
    }
}

#[test]
fn marks_are_what_matches_lead_to() {
    let mut out = vec![0; 2 * WINDOW];
    let mut needed = vec![0; WINDOW];
    // "aaaa" with a distance of 4 and then of 2, after 10 bytes.
    let packed = bits(&["1", "10", "0000010", "00011", "0000001", "00001", "0000000"]);
    let mut marks = Marks { origin: 10, needed: &mut needed };
    let step = Inflater::default().step(&packed, true, &mut out, 10, &mut marks).unwrap();
    assert_eq!((step.written, step.pause), (7, Pause::End));
    let marked: Vec<_> = (0..WINDOW).filter(|at| needed[*at] == 1).collect();
    assert_eq!(marked, [WINDOW - 4, WINDOW - 3, WINDOW - 2, WINDOW - 1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(u32::try_from(testing::rounds(200)).unwrap()))]

    #[test]
    fn damage_is_seen_as_by_another_decoder(
        length in 0..20_000_usize,
        alphabet in 1..=255_u8,
        level in 0..10_u32,
        piece in 0..3000_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let bytes: Vec<u8> = noise(length).iter().map(|byte| byte % alphabet).collect();
        let mut packed = deflate(&bytes, level);
        for (at, byte) in changes {
            let at = at.index(packed.len());
            packed[at] ^= byte;
        }
        let _either = check(&packed, piece);
    }

    #[test]
    fn whatever_comes(packed in prop::collection::vec(any::<u8>(), 0..400)) {
        let _either = check(&packed, 0);
    }
}
