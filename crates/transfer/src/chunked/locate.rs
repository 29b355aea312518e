//! Finds and fetches the table of contents of a blob.

use std::fmt::Display;
use std::io::{self, Read};

use flate2::read::MultiGzDecoder;

use super::memory_budget::{Claim, Room};
use super::toc::{self, Format};
use super::tree::TocTree;
use super::{ChunkedError, Ranges, Toc};
use image::digest::Digest;
use oci::manifest::Descriptor;

/// A layer's annotation with the digest of its table. Source: stargz-snapshotter, `docs/estargz.md`.
const ESTARGZ_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
/// A layer's annotations with the digest of its compressed table, and its position: `OFFSET:LENGTH:UNPACKED:TYPE`.
/// Source: containers/storage, `pkg/chunked/internal/minimal/compression.go`. The second name was written until 2023
/// (also by Podman 4.3): `pkg/chunked/internal/compression.go`.
const ZSTD_DIGEST: [&str; 2] = [
    "io.github.containers.zstd-chunked.manifest-checksum",
    "io.containers.zstd-chunked.manifest-checksum",
];
const ZSTD_POSITION: [&str; 2] = [
    "io.github.containers.zstd-chunked.manifest-position",
    "io.containers.zstd-chunked.manifest-position",
];
/// The only supported type of zstd:chunked table. eStargz has the same type of table.
const ZSTD_TYPE: u64 = 1;
/// Length in bytes of the header of a skippable frame. Source: RFC 8878, 3.1.2.
const SKIPPABLE_HEADER: u64 = 8;

/// The name of eStargz's table in the tar.
const TOC_NAME: &[u8] = b"stargz.index.json";
/// Length in bytes of eStargz's footer, and of the footer of its predecessor stargz.
const FOOTER: usize = 51;
const LEGACY_FOOTER: usize = 47;
/// Number of bytes to fetch from the end of an eStargz blob for its footer. They usually include the table.
const GUESS: u64 = 128 << 10;

/// Upper bound for the ratio between a table's length and its compressed length: JSON of names and digests seldom
/// compresses to less than a sixth.
const EXPANSION: usize = 8;

/// Maximum length of a table in bytes, compressed and uncompressed. An entry has 200 to 300 bytes.
const PACKED_MAX: u64 = 32 << 20;
const UNPACKED_MAX: u64 = 64 << 20;

/// Why a table cannot be used.
pub(super) enum Failure {
    /// The table is missing or unusable, so the layer is downloaded whole.
    Odd(String),
    /// The table's digest differs from the digest in the manifest.
    Digest(ChunkedError),
}

fn odd(why: impl Display) -> Failure {
    Failure::Odd(why.to_string())
}

/// Returns whether a layer's annotations announce a table.
pub(super) fn is_announced(layer: &Descriptor) -> bool {
    let names = ZSTD_DIGEST.iter().chain([&ESTARGZ_DIGEST]);
    names.into_iter().any(|name| layer.annotations.contains_key(*name))
}

/// Fetches the table of a layer, and adds its entries to a tree, if one is wanted.
pub(super) fn fetch(
    layer: &Descriptor,
    ranges: &dyn Ranges,
    room: &Room,
    tree: Option<TocTree>,
) -> Result<Option<Toc>, Failure> {
    let annotation = |name: &str| layer.annotations.get(name).map(String::as_str);
    let digest = |text: &str| text.parse::<Digest>().map_err(odd);
    for (expected, position) in ZSTD_DIGEST.into_iter().zip(ZSTD_POSITION) {
        if let Some(expected) = annotation(expected)
            && let Some(position) = annotation(position)
        {
            let expected = digest(expected)?;
            return zstd_chunked(layer.size, &expected, position, ranges, room, tree).map(Some);
        }
    }
    match annotation(ESTARGZ_DIGEST) {
        Some(expected) => estargz(layer.size, &digest(expected)?, ranges, room, tree).map(Some),
        None => Ok(None),
    }
}

fn read(ranges: &dyn Ranges, start: u64, end: u64) -> Result<Vec<u8>, Failure> {
    let length = end.checked_sub(start).filter(|it| *it <= PACKED_MAX);
    let length = length.ok_or_else(|| odd("it is too long"))?;
    let mut bytes = Vec::new();
    ranges.read(start..end).take(length).read_to_end(&mut bytes).map_err(odd)?;
    if bytes.len() as u64 != length {
        return Err(odd("the registry sent only a part of it"));
    }
    Ok(bytes)
}

fn compare(expected: &Digest, mut bytes: impl Read) -> Result<(), Failure> {
    let mut hasher = expected.hasher();
    let mut buffer = [0; 16 << 10];
    loop {
        match bytes.read(&mut buffer).map_err(odd)? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    let actual = hasher.finish();
    if actual == *expected {
        return Ok(());
    }
    let (expected, actual) = (Box::new(*expected), Box::new(actual));
    Err(Failure::Digest(ChunkedError::Mismatch { expected, actual }))
}

fn zstd_chunked(
    size: u64,
    expected: &Digest,
    position: &str,
    ranges: &dyn Ranges,
    room: &Room,
    tree: Option<TocTree>,
) -> Result<Toc, Failure> {
    let (offset, length, unpacked) = zstd_position(position, size).map_err(odd)?;
    let table = offset..offset + length;
    // If the rest of the blob is short, it is fetched as well. It consists of a footer, and of data that newer tools
    // add.
    let end = Some(size).filter(|size| size - table.end <= GUESS).unwrap_or(table.end);
    let limit = memory(unpacked).saturating_mul(shares(tree.as_ref()));
    let claim = room.claim(memory(end - offset).saturating_add(limit)).ok_or_else(no_room)?;
    let bytes = read(ranges, offset, end)?;
    let packed = &bytes[..memory(length)];
    compare(expected, packed)?;
    let decoder = zstd::Decoder::with_buffer(packed).map_err(odd)?;
    let mut json = decoder.take(unpacked + 1);
    let format = Format::ZstdChunked;
    let parsed = toc::parse(&mut json, limit, format, offset - SKIPPABLE_HEADER, tree);
    let (contents, tree) = parsed.map_err(odd)?;
    if json.limit() != 1 {
        return Err(odd("its length is not that in the manifest"));
    }
    settle(claim, bytes.len() + contents.memory(), tree.as_ref());
    Ok(Toc { contents, format, tree, size, at: offset, bytes })
}

/// Returns how many times the size of the uncompressed table its contents may take: once, and once more for a tree.
const fn shares(tree: Option<&TocTree>) -> usize {
    if tree.is_some() { 2 } else { 1 }
}

/// Ends the claim of a table that was read. A tree usually takes less than the uncompressed table, which is claimed.
fn settle(claim: Claim<'_>, bytes: usize, tree: Option<&TocTree>) {
    claim.settle(bytes + tree.map_or(0, TocTree::memory));
}

fn no_room() -> Failure {
    odd("it needs more memory than --memory allows")
}

/// Converts a number of bytes, which is at most the sum of [`PACKED_MAX`] and [`UNPACKED_MAX`].
fn memory(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Why the position of a table is not usable.
#[derive(Debug, thiserror::Error)]
enum PositionFlaw {
    #[error("its position is not valid")]
    Syntax,
    #[error("it is of an unknown type, {0}")]
    Type(u64),
    /// The length and the uncompressed length of the table, in bytes.
    #[error("it is too long: {0} bytes, {1} uncompressed")]
    TooLong(u64, u64),
    #[error("it is not in the blob: {length} bytes from byte {offset} on")]
    Outside { offset: u64, length: u64 },
}

/// Returns offset, length and uncompressed length of the table.
fn zstd_position(text: &str, size: u64) -> Result<(u64, u64, u64), PositionFlaw> {
    let numbers: Result<Vec<u64>, _> = text.split(':').map(str::parse).collect();
    let Ok(&[offset, length, unpacked, kind]) = numbers.as_deref() else {
        return Err(PositionFlaw::Syntax);
    };
    if kind != ZSTD_TYPE {
        return Err(PositionFlaw::Type(kind));
    }
    if length > PACKED_MAX || unpacked > UNPACKED_MAX {
        return Err(PositionFlaw::TooLong(length, unpacked));
    }
    let end = offset.checked_add(length).filter(|end| *end <= size);
    if end.is_none() || offset <= SKIPPABLE_HEADER {
        return Err(PositionFlaw::Outside { offset, length });
    }
    Ok((offset, length, unpacked))
}

fn estargz(
    size: u64,
    expected: &Digest,
    ranges: &dyn Ranges,
    room: &Room,
    tree: Option<TocTree>,
) -> Result<Toc, Failure> {
    let guess = size.saturating_sub(GUESS);
    let mut tail = read(ranges, guess, size)?;
    let (offset, footer) = estargz_footer(&tail).ok_or_else(|| odd("it has no footer"))?;
    if offset == 0 || offset >= size - footer as u64 {
        return Err(odd("it is outside the blob"));
    }
    let packed = memory(size - offset);
    let unpacked = memory(UNPACKED_MAX).min(packed.saturating_mul(EXPANSION));
    let unpacked = unpacked.saturating_mul(shares(tree.as_ref()));
    let claim = room.claim(packed.saturating_add(unpacked));
    let claim = claim.ok_or_else(no_room)?;
    match usize::try_from(offset.saturating_sub(guess)) {
        Ok(ahead) if offset >= guess => drop(tail.drain(..ahead)),
        _ => {
            let mut whole = read(ranges, offset, guess)?;
            whole.append(&mut tail);
            tail = whole;
        }
    }
    let packed = &tail[..tail.len() - footer];
    compare(expected, estargz_json(packed).map_err(odd)?)?;
    let format = Format::Estargz;
    let json = estargz_json(packed).map_err(odd)?;
    let limit = claim.bytes() - tail.len();
    let (contents, tree) = toc::parse(json, limit, format, offset, tree).map_err(odd)?;
    settle(claim, tail.len() + contents.memory(), tree.as_ref());
    Ok(Toc { contents, format, tree, size, at: offset, bytes: tail })
}

/// Returns the offset of the table and the length of the footer, in bytes.
fn estargz_footer(tail: &[u8]) -> Option<(u64, usize)> {
    /// A gzip header with an extra field.
    const GZIP: [u8; 4] = [0x1f, 0x8b, 8, 4];
    let offset = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits).ok()?;
        digits.bytes().all(|it| it.is_ascii_hexdigit()).then_some(())?;
        u64::from_str_radix(digits, 16).ok()
    };
    let of = |length: usize| tail.len().checked_sub(length).map(|start| &tail[start..]);
    if let Some(footer) = of(FOOTER)
        && footer.starts_with(&GZIP)
        && footer[10..16] == [26, 0, b'S', b'G', 22, 0]
        && footer[32..38] == *b"STARGZ"
    {
        return Some((offset(&footer[16..32])?, FOOTER));
    }
    let footer = of(LEGACY_FOOTER)?;
    let is_legacy =
        footer.starts_with(&GZIP) && footer[10..12] == [22, 0] && footer[28..34] == *b"STARGZ";
    is_legacy.then(|| Some((offset(&footer[12..28])?, LEGACY_FOOTER)))?
}

/// Returns a reader of the table inside its tar.
fn estargz_json(packed: &[u8]) -> Result<impl Read, io::Error> {
    let bad = |why: &'static str| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut tar = MultiGzDecoder::new(packed);
    let mut header = [0; 512];
    tar.read_exact(&mut header)?;
    if header[..=TOC_NAME.len()] != [TOC_NAME, b"\0"].concat()[..] {
        return Err(bad("it has another name"));
    }
    let digits = header[124..136].split(|it| matches!(it, 0 | b' ')).next().unwrap_or_default();
    let size = std::str::from_utf8(digits).ok().and_then(|it| u64::from_str_radix(it, 8).ok());
    let size = size.filter(|it| *it <= UNPACKED_MAX).ok_or_else(|| bad("it is too long"))?;
    Ok(tar.take(size))
}

pub(super) fn exercise(bytes: &[u8]) {
    if let Some((_, footer)) = estargz_footer(bytes) {
        assert!(footer <= bytes.len());
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok((offset, length, _)) = zstd_position(text, 1 << 40)
    {
        assert!(offset + length <= 1 << 40);
    }
    if let Ok(mut json) = estargz_json(bytes) {
        let mut all = Vec::new();
        if json.read_to_end(&mut all).is_ok() {
            toc::exercise(&all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{estargz_footer, zstd_position};

    #[test]
    fn footers() {
        // The layout of the specification: docs/estargz.md, "Footer".
        let mut footer =
            b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\x0000000000001a2b3cSTARGZ".to_vec();
        footer.extend_from_slice(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
        assert_eq!(footer, include_bytes!("../../../../testdata/formats/estargz-footer"));
        assert_eq!(estargz_footer(&footer), Some((0x001a_2b3c, 51)));
        let before = [b"abc", &footer[..]].concat();
        assert_eq!(estargz_footer(&before), Some((0x001a_2b3c, 51)));
        let legacy = [&footer[..10], b"\x16\0", &footer[16..]].concat();
        assert_eq!(legacy.len(), 47);
        assert_eq!(estargz_footer(&legacy), Some((0x001a_2b3c, 47)));
        for (at, byte) in [(0, 0), (12, b'X'), (20, b'+'), (33, b't')] {
            let mut bad = footer.clone();
            bad[at] = byte;
            assert_eq!(estargz_footer(&bad), None, "byte {at}");
        }
        for length in 0..47 {
            assert_eq!(estargz_footer(&footer[51 - length..]), None);
        }
    }

    fn check_position(text: &str, expected: Option<(u64, u64, u64)>) {
        assert_eq!(zstd_position(text, 1000).ok(), expected, "{text}");
    }

    #[test]
    fn positions() {
        check_position("900:100:5000:1", Some((900, 100, 5000)));
        check_position("901:100:5000:1", None);
        check_position("8:100:5000:1", None);
        check_position("900:100:5000:2", None);
        check_position("900:100:5000", None);
        check_position("900:100:5000:1:1", None);
        check_position("900:100:67108865:1", None);
        check_position("900:-1:5000:1", None);
        check_position("18446744073709551615:100:5000:1", None);
    }
}
