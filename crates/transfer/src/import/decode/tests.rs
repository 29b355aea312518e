use std::io::Write as _;
use std::sync::atomic::AtomicBool;

use super::*;

/// A reader that returns one byte at a time, as a pipe may.
#[derive(Clone)]
struct Drip<'a>(&'a [u8]);

impl Read for Drip<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(1).min(self.0.len());
        into[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        Ok(count)
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// A skippable frame. Source: RFC 8878, section 3.1.2.
fn skippable(number: u8) -> Vec<u8> {
    [&[0x50 + number, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat()
}

const LIMITS: Limits = Limits {
    layer_bytes: 1 << 20,
    content_bytes: 0,
    ratio: 100,
    ratio_from: 1000,
    entries: 0,
    metadata_bytes: 0,
};

/// Decodes with and without an index, and checks that both give the same bytes or the same error.
fn decode(
    source: impl Read + Clone,
    expected: Expected<'_>,
) -> Result<(Vec<u8>, Decoded), DecodeError> {
    let plain = decode_by(source.clone(), expected, BlobReading::Plain);
    let indexed = decode_by(source, expected, BlobReading::Indexing);
    match (&plain, &indexed) {
        (Ok((plain, _)), Ok((bytes, decoded))) => {
            assert!(plain == bytes);
            assert_eq!(decoded.spans.is_some(), decoded.compression != Compression::None);
        }
        (Err(plain), Err(indexed)) => {
            assert_eq!(std::mem::discriminant(plain), std::mem::discriminant(indexed));
        }
        other => panic!("{other:?}"),
    }
    plain
}

fn decode_by(
    source: impl Read,
    expected: Expected<'_>,
    reading: BlobReading,
) -> Result<(Vec<u8>, Decoded), DecodeError> {
    let cancel = AtomicBool::new(false);
    let stop = Stop::new(&cancel);
    let mut decoder = Decoder::new(source, expected, reading, &LIMITS, &stop, &|_| {})?;
    let mut all = Vec::new();
    // The size divides none of the tested sizes.
    let mut piece = vec![0; 777];
    loop {
        let length = decoder.fill(&mut piece)?;
        if length == 0 {
            return Ok((all, decoder.finish()?));
        }
        all.extend_from_slice(&piece[..length]);
    }
}

fn check_all(blob: &[u8], expect: &[u8], compression: Compression) {
    let digest = Digest::sha256(blob);
    let size = Some(blob.len() as u64);
    for expected in [Expected::default(), Expected { digest: Some(&digest), size }] {
        for (all, decoded) in
            [decode(blob, expected).unwrap(), decode(Drip(blob), expected).unwrap()]
        {
            assert!(all == expect, "{} bytes instead of {}", all.len(), expect.len());
            assert_eq!(decoded.digest, digest);
            assert_eq!(decoded.size, blob.len() as u64);
            assert_eq!(decoded.compression, compression);
        }
    }
}

fn text(length: usize) -> Vec<u8> {
    // Numerical Recipes' generator: bytes that do not compress.
    let step = |state: &mut u32| {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(state.to_be_bytes()[0])
    };
    (0..length).scan(1, |state, _| step(state)).collect()
}

#[test]
fn every_wrapping() {
    for length in [1, 5, 6, 7, 512, 5000, 300_000] {
        let bytes = text(length);
        let (head, tail) = bytes.split_at(length / 3);
        check_all(&bytes, &bytes, Compression::None);
        check_all(&gzip(&bytes), &bytes, Compression::Gzip);
        check_all(&[gzip(head), gzip(b""), gzip(tail)].concat(), &bytes, Compression::Gzip);
        check_all(&zstd(&bytes), &bytes, Compression::Zstd);
        let frames = [skippable(0), zstd(head), skippable(15), zstd(tail), skippable(7)];
        check_all(&frames.concat(), &bytes, Compression::Zstd);
    }
    check_all(b"", b"", Compression::None);
    check_all(&gzip(b""), b"", Compression::Gzip);
    check_all(&zstd(b""), b"", Compression::Zstd);
}

fn check_fails(blob: &[u8], expected: Expected<'_>, expect: &str) {
    match decode(blob, expected) {
        Ok((all, _)) => panic!("{expect}: it gave {} bytes", all.len()),
        Err(error) => assert_eq!(error.to_string(), expect),
    }
}

#[test]
fn damage() {
    let bytes = text(5000);
    let none = Expected::default();
    let trailing = "it has other data after its gzip data";
    for (blob, expect, trailing) in [
        (gzip(&bytes), "it is not valid gzip", trailing),
        (zstd(&bytes), "it is not valid zstd", "it is not valid zstd"),
    ] {
        for cut in [10, blob.len() / 2, blob.len() - 4, blob.len() - 1] {
            check_fails(&blob[..cut], none, expect);
        }
        for behind in [&b"\0"[..], &[0; 512], b"garbage", &blob[..7]] {
            check_fails(&[&blob, behind].concat(), none, trailing);
        }
        let mut flipped = blob.clone();
        *flipped.last_mut().unwrap() ^= 1;
        if expect.contains("gzip") {
            check_fails(&flipped, none, expect);
        }
    }
    // Add a checksum of the content, which `encode_all` omits.
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(&bytes).unwrap();
    let mut blob = encoder.finish().unwrap();
    *blob.last_mut().unwrap() ^= 1;
    check_fails(&blob, none, "it is not valid zstd");
}

#[test]
fn wrappings_that_no_layer_has() {
    let none = Expected::default();
    let supported = "which is not supported: use gzip, zstd or no compression";
    check_fails(b"\xfd7zXZ\0\0\x04", none, &format!("it is compressed with xz, {supported}"));
    for (first, name) in [
        (&b"BZh91AY&SY"[..], "bzip2"),
        (b"BZh9\x17rE8P\x90", "bzip2"),
        (b"\x1f\x9d\x90abc", "compress (.Z)"),
        (b"\x04\x22\x4d\x18\x64\x40", "lz4"),
        (b"\x02\x21\x4c\x18\0\0", "lz4"),
        (b"\x5d\0\0\x80\0\xff\xff", "lzma"),
        (b"LZIP\x01\x0c", "lzip"),
        (b"\x89LZO\0\r\n", "lzop"),
        (b"7z\xbc\xaf\x27\x1c", "7z"),
        (b"PK\x03\x04\x14\0", "zip"),
    ] {
        check_fails(first, none, &format!("it is compressed with {name}, {supported}"));
    }
    // File names that begin like another format.
    for name in ["BZh", "BZh9", "LZIP", "LZIPx", "PK", "]", "7z"] {
        let mut block = [0; 512];
        block[..name.len()].copy_from_slice(name.as_bytes());
        assert_eq!(foreign(&block[..6]), None, "{name}");
    }
}

#[test]
fn another_blob() {
    let blob = gzip(&text(5000));
    let other = Digest::sha256(b"other");
    let digest = Digest::sha256(&blob);
    let size = Some(blob.len() as u64);
    let mismatch = format!("it has the digest {digest}, not {other}");
    check_fails(&blob, Expected { digest: Some(&other), size }, &mismatch);
    let longer = format!("it has {} bytes, not {}", blob.len(), blob.len() + 1);
    check_fails(&blob, Expected { digest: Some(&digest), size: size.map(|it| it + 1) }, &longer);
    let shorter = format!("it has at least {} bytes, not {}", blob.len(), blob.len() - 1);
    check_fails(&blob, Expected { digest: None, size: size.map(|it| it - 1) }, &shorter);
    // For a damaged blob, an error about the digest is better than a decompression error.
    let mut damaged = blob.clone();
    damaged[blob.len() / 2] ^= 0xff;
    let actual = Digest::sha256(&damaged);
    let mismatch = format!("it has the digest {actual}, not {digest}");
    check_fails(&damaged, Expected { digest: Some(&digest), size }, &mismatch);
    let cut = &blob[..blob.len() / 2];
    let short = format!("it has {} bytes, not {}", cut.len(), blob.len());
    check_fails(cut, Expected { digest: Some(&digest), size }, &short);
}

#[test]
fn other_digests() {
    let blob = gzip(&text(5000));
    let mut hasher = "sha512:".to_owned();
    hasher.push_str(&"0".repeat(128));
    let wrong: Digest = hasher.parse().unwrap();
    let mut hasher = wrong.hasher();
    hasher.update(&blob);
    let right = hasher.finish();
    assert!(right.to_string().starts_with("sha512:"));
    let expected = Expected { digest: Some(&right), size: None };
    assert_eq!(decode(&blob[..], expected).unwrap().1.digest, right);
    let expect = format!("it has the digest {right}, not {wrong}");
    check_fails(&blob, Expected { digest: Some(&wrong), size: None }, &expect);
}

#[test]
fn bombs() {
    let none = Expected::default();
    let zeros = vec![0; 1 << 21];
    for blob in [gzip(&zeros), zstd(&zeros)] {
        let size = blob.len();
        let expect = format!("it unpacks to more than 100 times its size of {size} bytes");
        check_fails(&blob, none, &expect);
        let expected = Expected { digest: None, size: Some(size as u64) };
        check_fails(&blob, expected, &expect);
    }
    check_fails(&text(1 << 21), none, "it unpacks to more than 1048576 bytes");
    // Blobs that unpack to little data may have any ratio.
    check_all(&gzip(&[0; 1000]), &[0; 1000], Compression::Gzip);
}

#[test]
fn stops_when_told() {
    let cancel = AtomicBool::new(true);
    let stop = Stop::new(&cancel);
    let blob = text(1 << 20);
    let mut decoder =
        Decoder::new(&blob[..], Expected::default(), BlobReading::Plain, &LIMITS, &stop, &|_| {})
            .unwrap();
    let result = loop {
        match decoder.fill(&mut [0; 777]) {
            Ok(0) => panic!("it went on to the end"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(result, DecodeError::Stopped), "{result}");
}
