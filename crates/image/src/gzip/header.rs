//! Reads the header of a member. Source: RFC 1952, 2.3.

use std::io::{self, Read};

/// Bytes after a member's data: CRC-32 and length, 4 bytes each.
pub(super) const TRAILER: usize = 8;

/// Maximum length in bytes of a name or comment, including the NUL.
const TEXT_MAX: u64 = 64 << 10;

const HEADER_CRC: u8 = 1 << 1;
const EXTRA: u8 = 1 << 2;
const NAME: u8 = 1 << 3;
const COMMENT: u8 = 1 << 4;
const RESERVED: u8 = 0xe0;

/// A header that was read, with its length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) length: u64,
}

/// A reader that counts the bytes and computes their CRC-32.
struct Counted<'a, R> {
    source: &'a mut R,
    length: u64,
    crc: crc32fast::Hasher,
}

impl<R: Read> Counted<'_, R> {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes)?;
        self.length = self.length.saturating_add(u64::try_from(N).unwrap_or(0));
        self.crc.update(&bytes);
        Ok(bytes)
    }

    /// Reads up to and including a NUL.
    fn text(&mut self) -> io::Result<()> {
        for _ in 0..TEXT_MAX {
            if self.take::<1>()? == [0] {
                return Ok(());
            }
        }
        Err(damaged("a name in its header is too long"))
    }
}

impl Header {
    /// Reads a header and no byte after it.
    pub(super) fn read(source: &mut impl Read) -> io::Result<Self> {
        let mut from = Counted { source, length: 0, crc: crc32fast::Hasher::new() };
        let [magic @ .., method, flags] = from.take::<4>()?;
        if magic != [0x1f, 0x8b] || method != 8 || flags & RESERVED != 0 {
            return Err(damaged("a gzip member does not begin with a gzip header"));
        }
        // Modification time, extra flags and operating system.
        from.take::<6>()?;
        if flags & EXTRA != 0 {
            for _ in 0..u16::from_le_bytes(from.take()?) {
                from.take::<1>()?;
            }
        }
        for flag in [NAME, COMMENT] {
            if flags & flag != 0 {
                from.text()?;
            }
        }
        if flags & HEADER_CRC != 0 {
            let [low, high, ..] = from.crc.clone().finalize().to_le_bytes();
            if from.take()? != [low, high] {
                return Err(damaged("the checksum of a gzip header is wrong"));
            }
        }
        Ok(Self { length: from.length })
    }
}

pub(super) fn damaged(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
