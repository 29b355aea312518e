//! Writes a tar in plain ustar, with POSIX pax records for values for which ustar has no space or no field.
//!
//! Equal members give equal bytes. [`Reader`](super::Reader) and GNU tar read every member back unchanged. The tests
//! show where libarchive differs. The `tar` crate would have saved little: it writes headers and pax records, but does
//! not choose between them.

use std::io::{self, Write};

use super::pax::EXTENSION_MAX;
use super::reader::Kind;
use super::{BLOCK, acl, padding, wide};
use crate::tree::{Metadata, Timestamp};

/// A file to write to a tar.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// Path of the file: names with single slashes between them; empty for the root.
    pub path: &'a [u8],
    /// Type of the file. The target of a hard link is a path of the same form as `path`.
    pub kind: Kind<'a>,
    /// Permissions, owner and modification time.
    pub metadata: Metadata,
    /// Length of the content in bytes, which [`Writer::content`] adds. It is 0 except for regular files.
    pub size: u64,
    /// Xattrs, in the order in which they are written. Hard links need none.
    pub xattrs: &'a [(&'a [u8], &'a [u8])],
}

/// The reason why a member or its content cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TarWriteError {
    /// Writing to the sink failed.
    #[error("cannot write the tar")]
    Write(#[source] io::Error),
    /// Xattrs and names take more than 1 MiB, so readers would refuse the tar.
    #[error("\"{}\" has {size} bytes of names and xattrs, and tar readers accept at most {EXTENSION_MAX}", entry.escape_ascii())]
    Extension {
        /// Path of the member.
        entry: Vec<u8>,
        /// Size of the member's extended header in bytes.
        size: u64,
    },
    /// A time that a tar cannot store: nanoseconds of a second or more, or the smallest number of seconds.
    #[error("\"{}\" has a time of {} s and {} ns, which a tar cannot store", entry.escape_ascii(), mtime.seconds, mtime.nanoseconds)]
    Time {
        /// Path of the member.
        entry: Vec<u8>,
        /// Modification time of the member.
        mtime: Timestamp,
    },
    /// A device number that Linux does not support: more than 12 bits of major or 20 bits of minor number.
    #[error("\"{}\" has the device number {number:#x}, which Linux does not support", entry.escape_ascii())]
    Device {
        /// Path of the member.
        entry: Vec<u8>,
        /// Device number of the member.
        number: u64,
    },
    /// The content has fewer or more bytes than the member's size: the member's path.
    #[error("the length of \"{}\" is not that in its header", .0.escape_ascii())]
    Length(Vec<u8>),
}

/// Writes a tar one member after the other.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    /// Missing bytes of the last member's content.
    left: u64,
    /// Bytes of zeros to write after the content.
    padding: u64,
    /// Path of the last member, for errors.
    entry: Vec<u8>,
    /// Buffer for the member's extended header.
    records: Vec<u8>,
}

/// Largest number that fits in a header's field of 8 or 12 bytes: octal digits and a NUL.
const OCTAL_8: u64 = 0o7_777_777;
const OCTAL_12: u64 = 0o77_777_777_777;
/// Length in bytes of a header's name and of its link target.
const NAME: usize = 100;

impl<W: Write> Writer<W> {
    /// Begins a tar. The writer writes to `out` in small pieces.
    pub const fn new(out: W) -> Self {
        Self { out, left: 0, padding: 0, entry: Vec::new(), records: Vec::new() }
    }

    /// Adds a member. Its content, if any, must follow.
    ///
    /// # Errors
    /// [`TarWriteError`]. After errors other than [`TarWriteError::Write`] and [`TarWriteError::Length`], no part of
    /// the member was written, and the next member may follow.
    pub fn member(&mut self, member: &Member<'_>) -> Result<(), TarWriteError> {
        self.end_content()?;
        self.records.clear();
        self.entry.clear();
        self.entry.extend_from_slice(member.path);
        let (block, records) = (header(member, &mut self.records)?, wide(self.records.len()));
        if records > EXTENSION_MAX {
            return Err(TarWriteError::Extension { entry: member.path.to_vec(), size: records });
        }
        if records > 0 {
            let extension = extension(member.path, records);
            self.write(&extension)?;
            let written = self.out.write_all(&self.records);
            written.map_err(TarWriteError::Write)?;
            self.zeros(padding(records))?;
        }
        self.write(&block)?;
        (self.left, self.padding) = (member.size, padding(member.size));
        Ok(())
    }

    /// Adds the next bytes of the last member's content.
    ///
    /// # Errors
    /// [`TarWriteError::Write`], or [`TarWriteError::Length`] if the content exceeds the member's size.
    pub fn content(&mut self, bytes: &[u8]) -> Result<(), TarWriteError> {
        let left = self.left.checked_sub(wide(bytes.len()));
        self.left = left.ok_or_else(|| TarWriteError::Length(self.entry.clone()))?;
        self.write(bytes)
    }

    /// Ends the tar with two blocks of zeros, and returns the sink without flushing it.
    ///
    /// # Errors
    /// [`TarWriteError::Write`], or [`TarWriteError::Length`] if content is missing.
    pub fn finish(mut self) -> Result<W, TarWriteError> {
        self.end_content()?;
        self.zeros(2 * wide(BLOCK))?;
        Ok(self.out)
    }

    fn end_content(&mut self) -> Result<(), TarWriteError> {
        if self.left > 0 {
            return Err(TarWriteError::Length(self.entry.clone()));
        }
        let padding = std::mem::take(&mut self.padding);
        self.zeros(padding)
    }

    fn zeros(&mut self, count: u64) -> Result<(), TarWriteError> {
        let zeros = [0; 2 * BLOCK];
        self.write(zeros.get(..super::narrow(count)).unwrap_or(&zeros))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), TarWriteError> {
        self.out.write_all(bytes).map_err(TarWriteError::Write)
    }
}

/// Makes a member's header, and adds values that do not fit to `records`.
fn header(member: &Member<'_>, records: &mut Vec<u8>) -> Result<[u8; BLOCK], TarWriteError> {
    let Metadata { permissions, uid, gid, mtime } = member.metadata;
    let mut path = member.path.to_vec();
    match member.kind {
        Kind::Directory if path.is_empty() => path.extend_from_slice(b"./"),
        Kind::Directory => path.push(b'/'),
        _ => {}
    }
    let (flag, target, device) = match member.kind {
        Kind::Regular => (b'0', &b""[..], None),
        Kind::Hardlink(target) => (b'1', target, None),
        Kind::Symlink(target) => (b'2', target, None),
        Kind::CharDevice(number) => (b'3', &b""[..], Some(number)),
        Kind::BlockDevice(number) => (b'4', &b""[..], Some(number)),
        Kind::Directory => (b'5', &b""[..], None),
        Kind::Fifo => (b'6', &b""[..], None),
    };

    let long = [&path[..], target].map(|name| if name.len() > NAME { name } else { b"" });
    if long.iter().any(|name| std::str::from_utf8(name).is_err()) {
        // The following records are bytes rather than UTF-8. Source: POSIX `pax`, "pax Extended Header".
        record(records, b"hdrcharset", b"BINARY");
    }
    for (key, name) in [&b"path"[..], b"linkpath"].into_iter().zip(long) {
        if !name.is_empty() {
            record(records, key, name);
        }
    }
    let mut number = |key: &[u8], value: u64, room: u64| {
        if value > room {
            record(records, key, value.to_string().as_bytes());
        }
        if value > room { 0 } else { value }
    };
    let size = number(b"size", member.size, OCTAL_12);
    let uid = number(b"uid", u64::from(uid), OCTAL_8);
    let gid = number(b"gid", u64::from(gid), OCTAL_8);
    let seconds = u64::try_from(mtime.seconds).ok().filter(|seconds| *seconds <= OCTAL_12);
    if seconds.is_none() || mtime.nanoseconds > 0 {
        let entry = || member.path.to_vec();
        let text = time(mtime).ok_or_else(|| TarWriteError::Time { entry: entry(), mtime })?;
        record(records, b"mtime", text.as_bytes());
    }
    for (name, value) in member.xattrs {
        xattr(records, name, value);
    }

    let mut block = [0; BLOCK];
    put(&mut block, 0, path.get(..NAME).unwrap_or(&path));
    octal(&mut block, 100, 8, u64::from(permissions));
    octal(&mut block, 108, 8, uid);
    octal(&mut block, 116, 8, gid);
    octal(&mut block, 124, 12, size);
    octal(&mut block, 136, 12, seconds.unwrap_or(0));
    block[156] = flag;
    put(&mut block, 157, target.get(..NAME).unwrap_or(target));
    put(&mut block, 257, b"ustar\x0000");
    let number = device.unwrap_or(0);
    let (major, minor) = ((number >> 8) & 0xfff, (number & 0xff) | ((number >> 12) & 0xfff00));
    if (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12) != number {
        return Err(TarWriteError::Device { entry: member.path.to_vec(), number });
    }
    octal(&mut block, 329, 8, major);
    octal(&mut block, 337, 8, minor);
    check(&mut block);
    Ok(block)
}

/// Makes the header of an extended header of `size` bytes. Its name is for readers that extract it as a file.
fn extension(path: &[u8], size: u64) -> [u8; BLOCK] {
    let last = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    let mut name = b"PaxHeaders/".to_vec();
    name.extend_from_slice(if last.is_empty() { b"." } else { last });
    let mut block = [0; BLOCK];
    put(&mut block, 0, name.get(..NAME).unwrap_or(&name));
    for (at, width, value) in [(100, 8, 0o644), (108, 8, 0), (116, 8, 0), (136, 12, 0)] {
        octal(&mut block, at, width, value);
    }
    octal(&mut block, 124, 12, size);
    block[156] = b'x';
    put(&mut block, 257, b"ustar\x0000");
    check(&mut block);
    block
}

/// Adds an xattr: an ACL as the text that GNU tar and libarchive apply, if the text is equivalent, and any other
/// value unchanged.
fn xattr(records: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    let key = match name {
        b"system.posix_acl_access" => Some((&b"SCHILY.acl.access"[..], false)),
        b"system.posix_acl_default" => Some((&b"SCHILY.acl.default"[..], true)),
        _ => None,
    };
    if let Some((key, keep_minimal)) = key
        && let Some(text) = acl::text(value)
        && acl::binary(&text, keep_minimal).is_ok_and(|back| back.as_deref() == Some(value))
    {
        return record(records, key, &text);
    }
    let mut key = b"SCHILY.xattr.".to_vec();
    for &byte in name {
        // A key ends at the first `=`. Source: GNU tar `src/xheader.c`, `xattr_encode_keyword`.
        match byte {
            b'=' => key.extend_from_slice(b"%3D"),
            b'%' => key.extend_from_slice(b"%25"),
            _ => key.push(byte),
        }
    }
    record(records, &key, value);
}

/// Appends `LENGTH KEY=VALUE\n`. The length includes its own digits.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length.to_string().len() + rest > length {
        length += 1;
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// Formats seconds with a fraction, as short as possible. Unlike in the tree, the fraction of a time before 1970 is
/// subtracted.
fn time(Timestamp { seconds, nanoseconds }: Timestamp) -> Option<String> {
    let (sign, whole, fraction) = match (seconds, nanoseconds) {
        (_, 1_000_000_000..) => return None,
        (0.., _) => ("", seconds.unsigned_abs(), nanoseconds),
        (_, 0) => ("-", seconds.unsigned_abs(), 0),
        (_, _) => ("-", seconds.unsigned_abs() - 1, 1_000_000_000 - nanoseconds),
    };
    // Readers parse the whole part as an `i64`.
    i64::try_from(whole).ok()?;
    let mut text = format!("{sign}{whole}");
    if fraction > 0 {
        text.push_str(format!(".{fraction:09}").trim_end_matches('0'));
    }
    Some(text)
}

fn put(block: &mut [u8; BLOCK], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Writes octal digits that fill a field except for the NUL at its end.
fn octal(block: &mut [u8; BLOCK], at: usize, width: usize, value: u64) {
    let digits = width - 1;
    put(block, at, format!("{value:0digits$o}").as_bytes());
}

/// Writes the checksum of a header. For the sum, the checksum field counts as spaces.
fn check(block: &mut [u8; BLOCK]) {
    put(block, 148, b"        ");
    let sum: u32 = block.iter().copied().map(u32::from).sum();
    put(block, 148, format!("{sum:06o}\0 ").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are from GNU tar 1.34, for files that were touched to these times, as far as a file system
    /// supports them.
    #[test]
    fn times() {
        let cases = [
            ((0, 0), Some("0")),
            ((1_350_244_992, 23_960_108), Some("1350244992.023960108")),
            ((1, 500_000_000), Some("1.5")),
            ((-1, 0), Some("-1")),
            ((-2, 500_000_000), Some("-1.5")),
            ((-1, 999_999_999), Some("-0.000000001")),
            ((i64::MIN, 900_000_000), Some("-9223372036854775807.1")),
            ((i64::MIN, 0), None),
            ((0, 1_000_000_000), None),
        ];
        for ((seconds, nanoseconds), expected) in cases {
            let found = time(Timestamp { seconds, nanoseconds });
            assert_eq!(found.as_deref(), expected, "{seconds} {nanoseconds}");
        }
    }

    /// Source: POSIX `pax`, "pax Extended Header": the length is that of the whole record.
    #[test]
    fn records_count_their_own_digits() {
        for (value, expected) in [("", "7 key=\n"), ("12", "9 key=12\n"), ("123", "11 key=123\n")] {
            let mut records = Vec::new();
            record(&mut records, b"key", value.as_bytes());
            assert_eq!(records, expected.as_bytes());
        }
        for length in [85, 86, 87, 88, 89, 90, 91, 984, 985, 986, 987, 988] {
            let mut records = Vec::new();
            record(&mut records, b"key", &vec![b'x'; length]);
            let stated = records.split(|&byte| byte == b' ').next().unwrap();
            assert_eq!(std::str::from_utf8(stated).unwrap(), records.len().to_string());
        }
    }
}
