//! Parses a header block: its layout, its checksum and its numbers.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::BLOCK;
use super::error::TarCorruption;

/// A header. Source: POSIX `pax`, "ustar Interchange Format". In V7, the fields from `magic` on are zeros or
/// undefined.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHeader {
    pub(super) name: [u8; 100],
    pub(super) mode: [u8; 8],
    pub(super) uid: [u8; 8],
    pub(super) gid: [u8; 8],
    pub(super) size: [u8; 12],
    pub(super) mtime: [u8; 12],
    checksum: [u8; 8],
    pub(super) typeflag: u8,
    pub(super) link_name: [u8; 100],
    magic: [u8; 6],
    version: [u8; 2],
    user: [u8; 32],
    group: [u8; 32],
    pub(super) dev_major: [u8; 8],
    pub(super) dev_minor: [u8; 8],
    prefix: [u8; 155],
    /// star writes `tar\0` at the end of this field.
    rest: [u8; 12],
}
const _: () = assert!(size_of::<RawHeader>() == BLOCK);

/// A header of GNU tar, which has other fields in place of `prefix`. Source: GNU tar `src/tar.h`, `struct
/// oldgnu_header`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawGnu {
    shared: [u8; 345],
    atime: [u8; 12],
    ctime: [u8; 12],
    offset: [u8; 12],
    long_names: [u8; 4],
    unused: u8,
    pub(super) sparse: [RawRegion; 4],
    pub(super) is_extended: u8,
    pub(super) real_size: [u8; 12],
    rest: [u8; 17],
}
const _: () = assert!(size_of::<RawGnu>() == BLOCK);

/// A region of data in an old GNU sparse file. Source: GNU tar `src/tar.h`, `struct sparse`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawRegion {
    pub(super) offset: [u8; 12],
    pub(super) length: [u8; 12],
}

/// A block of further regions. Source: GNU tar `src/tar.h`, `struct sparse_header`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawSparse {
    pub(super) sparse: [RawRegion; 21],
    pub(super) is_extended: u8,
    rest: [u8; 7],
}
const _: () = assert!(size_of::<RawSparse>() == BLOCK);

/// The format of a header, which determines the fields after the magic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// V7, which has no further fields.
    V7,
    /// A prefix of 155 bytes. Pax has the same.
    Ustar,
    /// A prefix of 131 bytes, then times.
    Star,
    /// Times, then the map of a sparse file.
    Gnu,
}

/// A header with a valid checksum.
pub(super) struct Header<'a> {
    pub(super) raw: &'a RawHeader,
    pub(super) format: Format,
    block: &'a [u8; BLOCK],
}

impl<'a> Header<'a> {
    /// Checks the checksum. Old Sun and NeXT writers summed signed bytes; every reader accepts both sums.
    pub(super) fn check(block: &'a [u8; BLOCK]) -> Result<Self, TarCorruption> {
        let raw: &RawHeader = zerocopy::transmute_ref!(block);
        let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
        let high = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte >> 7)).sum::<u32>();
        // The checksum field counts as eight spaces.
        let spaces = 8 * u32::from(b' ');
        let actual = sum(block).saturating_sub(sum(&raw.checksum)).saturating_add(spaces);
        let stated = octal(&raw.checksum);
        if stated != Some(i64::from(actual)) {
            let negative = high(block).saturating_sub(high(&raw.checksum));
            let signed = i64::from(actual).saturating_sub(i64::from(negative).saturating_mul(256));
            if stated != Some(signed) {
                return Err(TarCorruption::Checksum { stated: raw.checksum, actual });
            }
        }
        let format = match &raw.magic {
            b"ustar\0" if raw.rest.ends_with(b"tar\0") => Format::Star,
            // The version should be "00", but some writers leave it blank.
            b"ustar\0" => Format::Ustar,
            b"ustar " => Format::Gnu,
            _ => Format::V7,
        };
        Ok(Self { raw, format, block })
    }

    pub(super) const fn gnu(&self) -> &'a RawGnu {
        zerocopy::transmute_ref!(self.block)
    }

    /// Appends the entry's name to `into`.
    pub(super) fn push_name(&self, into: &mut Vec<u8>) {
        let prefix = self.prefix();
        if !prefix.is_empty() {
            into.extend_from_slice(prefix);
            into.push(b'/');
        }
        into.extend_from_slice(text(&self.raw.name));
    }

    /// Returns the prefix of the name, without the slash between them; empty if there is none.
    fn prefix(&self) -> &'a [u8] {
        match self.format {
            Format::V7 => &[],
            Format::Ustar => text(&self.raw.prefix),
            Format::Star => text(self.raw.prefix.first_chunk::<131>().map_or(&[], |prefix| prefix)),
            // Go before 1.8 wrote a prefix here in files that it declared as GNU's (golang.org/issues/12594). As in
            // Go, if the field cannot be parsed as times and is ASCII, it is a prefix.
            Format::Gnu => {
                let gnu = self.gnu();
                let is_time = |field: &[u8; 12]| field[0] == 0 || number(field).is_some();
                let prefix = text(&self.raw.prefix);
                if is_time(&gnu.atime) && is_time(&gnu.ctime) || !prefix.is_ascii() {
                    &[]
                } else {
                    prefix
                }
            }
        }
    }
}

/// Returns the bytes up to the first NUL, or all of them.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Parses a number: octal digits, or base 256 if the first bit is set. A blank field is 0, as in Go.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    match field.split_first() {
        Some((&first, rest)) if first & 0x80 != 0 => {
            // Two's complement, big-endian, after the marker bit. The field has at most twelve bytes, so the number
            // has at most 95 bits.
            let sign = if first & 0x40 == 0 { 0 } else { -0x80 };
            let start = i128::from(first & 0x7f) | sign;
            let value = rest.iter().fold(start, |value, &byte| (value << 8) | i128::from(byte));
            i64::try_from(value).ok()
        }
        _ => octal(field),
    }
}

/// Parses octal digits after spaces or NULs and before a space, a NUL or the end of the field.
fn octal(field: &[u8]) -> Option<i64> {
    let is_blank = |byte: &u8| matches!(byte, b' ' | 0);
    let mut value: i64 = 0;
    for byte in field.iter().skip_while(|byte| is_blank(byte)).take_while(|byte| !is_blank(byte)) {
        let digit = byte.checked_sub(b'0').filter(|&digit| digit < 8)?;
        value = value.checked_mul(8)?.checked_add(i64::from(digit))?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_number(field: &[u8], expected: Option<i64>) {
        assert_eq!(number(field), expected, "{}", field.escape_ascii());
    }

    /// Source: the formats in `from_header` of GNU tar's `src/list.c`; the values of base 256 were computed by hand.
    #[test]
    fn numbers() {
        check_number(b"0000644\0", Some(0o644));
        check_number(b"   644 \0", Some(0o644));
        check_number(b"\0\0\0\0\0\0\0\0", Some(0));
        check_number(b"        ", Some(0));
        check_number(b"77777777", Some(0o77_777_777));
        check_number(b"777777777777", Some(0o777_777_777_777));
        check_number(b"12 34567", Some(0o12));
        check_number(b"12\0garb", Some(0o12));
        check_number(b"0000648\0", None);
        check_number(b"-000644\0", None);
        check_number(b"0x644\0\0\0", None);
        check_number(b"\x80\0\0\0\0\x20\0\0", Some(1 << 21));
        check_number(b"\xff\xff\xff\xff\xff\xff\xff\xff", Some(-1));
        check_number(b"\xff\xff\xff\xff\xff\xff\xff\xfe", Some(-2));
        check_number(b"\xff\xff\xff\xff\x80\0\0\0\0\0\0\0", Some(i64::MIN));
        check_number(b"\xff\xff\xff\xff\x7f\0\0\0\0\0\0\0", None);
        check_number(b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff", Some(i64::MAX));
        check_number(b"\x80\0\0\0\x80\0\0\0\0\0\0\0", None);
    }
}
