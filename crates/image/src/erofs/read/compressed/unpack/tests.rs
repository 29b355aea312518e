//! Vectors for each algorithm. The bytes come from the formats' documents and from other programs.

#![expect(clippy::arithmetic_side_effects, reason = "tests fail by panicking")]

use std::io::Write as _;

use super::*;

fn cluster(method: Method, packed: &[u8], is_partial: bool) -> PhysicalCluster {
    let len = u64::try_from(packed.len()).unwrap();
    PhysicalCluster { at: ByteOffset(4096), len, method, is_partial }
}

/// Unpacks `len` bytes of an extent at byte `start` of a file, with blocks of 4096 bytes.
fn attempt(
    method: Method,
    packed: &[u8],
    start: u64,
    len: u64,
    is_partial: bool,
    settings: Settings,
) -> Option<Vec<u8>> {
    let extent = PackedExtent { start, len, cluster: None };
    let cluster = cluster(method, packed, is_partial);
    let block = BlockBits::new(12).unwrap();
    let mut bytes = vec![1; 3];
    unpack(&extent, &cluster, packed, block, settings, &mut bytes)?;
    Some(bytes)
}

/// Checks the bytes as a whole, with padding, as a part, and that no other length is accepted.
fn check(algorithm: Algorithm, packed: &[u8], expect: &[u8]) {
    let method = Method::Packed(algorithm);
    let len = u64::try_from(expect.len()).unwrap();
    let whole = |packed: &[u8], len| attempt(method, packed, 0, len, false, Settings::of_all(true));
    assert_eq!(whole(packed, len).as_deref(), Some(expect), "{algorithm}");
    let padded = [&[0; 100], packed].concat();
    assert_eq!(whole(&padded, len).as_deref(), Some(expect), "{algorithm}, padded");
    for part in 1..len {
        let got = attempt(method, packed, 0, part, true, Settings::of_all(true));
        let end = usize::try_from(part).unwrap();
        assert_eq!(got.as_deref(), Some(&expect[..end]), "{algorithm}, a part of {part}");
    }
    assert_eq!(whole(packed, len + 1), None, "{algorithm}, a byte more");
    assert_eq!(attempt(method, packed, 0, len + 1, true, Settings::of_all(true)), None);
    for end in 1..packed.len() / 2 {
        assert_eq!(whole(&packed[..end], len), None, "{algorithm}, {end} bytes");
    }
    assert_eq!(whole(&[0; 64], len), None, "{algorithm}, only padding");
}

/// From the description of LZ4's format: literals, a match that overlaps itself, and the last literals.
#[test]
fn lz4_blocks() {
    let packed = [0x35, b'a', b'b', b'c', 3, 0, 0x50, b'x', b'y', b'z', b'z', b'y'];
    check(Algorithm::Lz4, &packed, b"abcabcabcabcxyzzy");
    // 20 literals, 300 times the last one, and 5 literals.
    let mut long = vec![0xff, 5];
    long.extend_from_slice(b"abcdefghijklmnopqrst");
    long.extend_from_slice(&[1, 0, 255, 26, 0x50]);
    long.extend_from_slice(b"vwxyz");
    let expect = [&b"abcdefghijklmnopqrs"[..], &[b't'; 301], b"vwxyz"].concat();
    check(Algorithm::Lz4, &long, &expect);
    // Data without a length, and padding after it.
    let old = [&packed[..], &[0; 50]].concat();
    let method = Method::Packed(Algorithm::Lz4);
    let got = attempt(method, &old, 0, 17, false, Settings::of_all(false));
    assert_eq!(got.as_deref(), Some(&b"abcabcabcabcxyzzy"[..]));
    let wrong: [&[u8]; 5] = [
        &[],
        // A distance of 0, and one before the beginning.
        &[0x10, b'a', 0, 0, 0x50, 1, 2, 3, 4, 5],
        &[0x10, b'a', 2, 0, 0x50, 1, 2, 3, 4, 5],
        // Lengths that do not end.
        &[0xf0, 255, 255],
        &[0x1f, b'a', 1, 0, 255],
    ];
    for packed in wrong {
        assert_eq!(
            attempt(method, packed, 0, 10, true, Settings::of_all(false)),
            None,
            "{packed:?}"
        );
    }
}

/// The data of the LZMA SDK's `.lzma` format that XZ for Java makes of this text, without its header and with the
/// first byte of MicroLZMA.
#[test]
fn micro_lzma() {
    let packed = [
        !93, 36, 25, 73, 152, 111, 22, 2, 140, 232, 230, 91, 177, 71, 198, 206, 183, 99, 255, 255,
        60, 172, 0, 0,
    ];
    let method = Method::Packed(Algorithm::MicroLzma);
    let whole = attempt(method, &packed, 0, 13, false, Settings::of_all(true));
    assert_eq!(whole.as_deref(), Some(&b"Hello, world!"[..]));
    let padded = [&[0; 40], &packed[..]].concat();
    let part = attempt(method, &padded, 0, 5, true, Settings::of_all(true));
    assert_eq!(part.as_deref(), Some(&b"Hello"[..]));
    assert_eq!(attempt(method, &packed, 0, 14, false, Settings::of_all(true)), None);
    assert_eq!(attempt(method, &packed[..8], 0, 13, false, Settings::of_all(true)), None);
    // More literal bits than the kernel accepts.
    let mut many = packed;
    many[0] = !8;
    assert_eq!(attempt(method, &many, 0, 13, false, Settings::of_all(true)), None);
}

#[test]
fn deflate() {
    let text = b"deflate data, deflate data, and more data".repeat(8);
    let mut encoder =
        flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(&text).unwrap();
    check(Algorithm::Deflate, &encoder.finish().unwrap(), &text);
}

#[test]
#[cfg_attr(miri, ignore = "it calls C")]
fn zstd_frames() {
    let text = b"zstd data, zstd data, and more data".repeat(8);
    check(Algorithm::Zstd, &::zstd::bulk::compress(&text, 3).unwrap(), &text);
}

#[test]
fn uncompressed_bytes() {
    let block: Vec<u8> = (0..4096_u32).map(|at| (at / 16).to_le_bytes()[0]).collect();
    let shifted = attempt(Method::Shifted, &block, 100, 50, false, Settings::of_all(true));
    assert_eq!(shifted.as_deref(), Some(&block[..50]));
    assert_eq!(attempt(Method::Shifted, &block, 0, 4097, false, Settings::of_all(true)), None);
    // The file's bytes up to the end of its block are at the same offset in the block of the image.
    let interlaced = attempt(Method::Interlaced, &block, 4000, 200, false, Settings::of_all(true));
    let expect = [&block[4000..], &block[..104]].concat();
    assert_eq!(interlaced.as_deref(), Some(&expect[..]));
    let whole = attempt(Method::Interlaced, &block, 8192, 4096, false, Settings::of_all(true));
    assert_eq!(whole.as_deref(), Some(&block[..]));
    assert_eq!(
        attempt(Method::Interlaced, &block[..50], 0, 50, false, Settings::of_all(true)),
        None
    );
}
