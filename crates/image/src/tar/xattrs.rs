//! Collects the xattrs of an entry from several kinds of records.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use super::acl::{self, AclError};
use super::error::{Limit, TarCorruption};
use crate::tree::{XATTR_NAME_MAX, XATTR_VALUE_MAX};

/// Maximum total length in bytes of the names of a file's xattrs, each with a final NUL. Source: Linux
/// `XATTR_LIST_MAX`. A file that a tar is made from cannot have more.
pub const XATTR_NAMES_MAX: usize = 65536;

/// A range of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Span {
    pub(super) fn slice(self, buffer: &[u8]) -> &[u8] {
        buffer.get(self.start..self.end).unwrap_or_default()
    }
}

/// The program whose format an xattr's record has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    /// star, GNU tar and Go: the value is unchanged.
    Schily,
    /// libarchive: name and value are encoded. It also writes star's record, with the same encoded name.
    Libarchive,
}

#[derive(Debug, Clone, Copy)]
struct Item {
    /// The name as in the record.
    written: Span,
    writer: Writer,
    name: Span,
    value: Span,
}

/// The xattr records that a reader accepts. Other records are ignored, even if they are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum XattrRecords {
    /// All records.
    #[default]
    All,
    /// Records of xattrs whose name begins with `user.`.
    UserOnly,
    /// None.
    None,
}

impl XattrRecords {
    /// Whether a record holds an xattr that is left out.
    fn leaves_out(self, key: &[u8]) -> bool {
        let name =
            key.strip_prefix(b"SCHILY.xattr.").or_else(|| key.strip_prefix(b"LIBARCHIVE.xattr."));
        let is_xattr = name.is_some()
            || matches!(
                key,
                b"RHT.security.selinux" | b"SCHILY.acl.access" | b"SCHILY.acl.default"
            );
        match self {
            Self::All => false,
            Self::UserOnly => is_xattr && !name.is_some_and(|name| name.starts_with(b"user.")),
            Self::None => is_xattr,
        }
    }
}

/// The xattrs collected so far.
#[derive(Debug, Default)]
pub(super) struct Collector {
    bytes: Vec<u8>,
    items: Vec<Item>,
    pub(super) wanted: XattrRecords,
    /// A line of an ACL that names a user or group without a number. That ACL is left out.
    nameless: Option<Vec<u8>>,
}

/// The reason why an xattr's record is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Limit(Limit),
    Corrupt(TarCorruption),
    /// The name or the encoding is invalid.
    Value,
}

impl Collector {
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.items.clear();
        self.nameless = None;
    }

    /// Whether there is no xattr, and none was left out.
    pub(super) const fn is_empty(&self) -> bool {
        self.items.is_empty() && self.nameless.is_none()
    }

    /// Whether a record of libarchive has another value of this xattr than star's records, or is the only one. To be
    /// called before [`settle`](Self::settle).
    pub(super) fn is_libarchives(&self, name: &[u8]) -> bool {
        let last = |writer| {
            let is_it = |it: &&Item| it.writer == writer && it.name.slice(&self.bytes) == name;
            self.items.iter().rev().find(is_it).map(|it| it.value.slice(&self.bytes))
        };
        let own = last(Writer::Libarchive);
        own.is_some() && own != last(Writer::Schily)
    }

    /// Adds the xattr of a record, in any of the formats; returns `false` for other records.
    pub(super) fn record(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Refused> {
        if self.wanted.leaves_out(key) {
            return Ok(true);
        }
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            let start = self.bytes.len();
            unescape(name, &mut self.bytes);
            self.push(name, Writer::Schily, start, value)?;
        } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
            let value = base64(value).ok_or(Refused::Value)?;
            let start = self.bytes.len();
            percent_decode(name, &mut self.bytes).ok_or(Refused::Value)?;
            self.push(name, Writer::Libarchive, start, &value)?;
        } else if key == b"RHT.security.selinux" {
            // GNU tar writes the label without the NUL that the kernel stores.
            let mut label = value.to_vec();
            label.push(0);
            self.named(b"security.selinux", &label)?;
        } else if key == b"SCHILY.acl.access" {
            self.acl(b"system.posix_acl_access", acl::binary(value, false))?;
        } else if key == b"SCHILY.acl.default" {
            self.acl(b"system.posix_acl_default", acl::binary(value, true))?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn acl(
        &mut self,
        name: &[u8],
        value: Result<Option<Vec<u8>>, AclError>,
    ) -> Result<(), Refused> {
        match value {
            Ok(None) => Ok(()),
            Ok(Some(value)) => self.named(name, &value),
            Err(AclError::Corrupt(kind)) => Err(Refused::Corrupt(kind)),
            Err(AclError::Name(line)) => {
                self.nameless = Some(line);
                Ok(())
            }
        }
    }

    fn named(&mut self, name: &[u8], value: &[u8]) -> Result<(), Refused> {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(name);
        self.push(name, Writer::Schily, start, value)
    }

    /// Adds an xattr whose name is the end of `bytes` from `start` on.
    fn push(
        &mut self,
        written: &[u8],
        writer: Writer,
        start: usize,
        value: &[u8],
    ) -> Result<(), Refused> {
        let name = Span { start, end: self.bytes.len() };
        let length = name.slice(&self.bytes).len();
        if length == 0 || name.slice(&self.bytes).contains(&0) {
            return Err(Refused::Value);
        }
        if length > XATTR_NAME_MAX {
            return Err(Refused::Limit(Limit::XattrName(length)));
        }
        if value.len() > XATTR_VALUE_MAX {
            return Err(Refused::Limit(Limit::XattrValue(value.len())));
        }
        if matches!(
            name.slice(&self.bytes),
            b"system.posix_acl_access" | b"system.posix_acl_default"
        ) {
            acl::check_value(value).map_err(Refused::Corrupt)?;
        }
        let value = self.keep(value);
        let written = self.keep(written);
        self.items.push(Item { written, writer, name, value });
        Ok(())
    }

    fn keep(&mut self, bytes: &[u8]) -> Span {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        Span { start, end: self.bytes.len() }
    }

    /// Appends all xattrs of another collector.
    pub(super) fn append(&mut self, other: &Self) {
        if other.nameless.is_some() {
            self.nameless.clone_from(&other.nameless);
        }
        for item in &other.items {
            let written = self.keep(item.written.slice(&other.bytes));
            let name = self.keep(item.name.slice(&other.bytes));
            let value = self.keep(item.value.slice(&other.bytes));
            self.items.push(Item { written, writer: item.writer, name, value });
        }
    }

    /// Sorts by name and keeps the last value of each name.
    pub(super) fn settle(&mut self) -> Result<(), Limit> {
        let Self { bytes, items, .. } = self;
        if items.iter().any(|item| item.writer == Writer::Libarchive) {
            let mut encoded: Vec<&[u8]> = items
                .iter()
                .filter(|item| item.writer == Writer::Libarchive)
                .map(|item| item.written.slice(bytes))
                .collect();
            encoded.sort_unstable();
            items.retain(|item| {
                item.writer == Writer::Libarchive
                    || encoded.binary_search(&item.written.slice(bytes)).is_err()
            });
        }
        // The order is reversed before the stable sort, so that the last value of a name comes first and is kept.
        items.reverse();
        items.sort_by(|a, b| a.name.slice(bytes).cmp(b.name.slice(bytes)));
        items.dedup_by(|a, b| a.name.slice(bytes) == b.name.slice(bytes));
        let names = items.iter().fold(0_usize, |sum, item| {
            sum.saturating_add(item.name.slice(bytes).len()).saturating_add(1)
        });
        if names > XATTR_NAMES_MAX {
            return Err(Limit::XattrNames(names));
        }
        Ok(())
    }

    pub(super) fn nameless(&self) -> Option<&[u8]> {
        self.nameless.as_deref()
    }

    pub(super) fn view(&self) -> EntryXattrs<'_> {
        EntryXattrs { bytes: &self.bytes, items: self.items.iter() }
    }
}

/// Iterates over the names and values of an entry's xattrs, in byte order of the names, each name once.
#[derive(Debug, Clone)]
pub struct EntryXattrs<'a> {
    bytes: &'a [u8],
    items: std::slice::Iter<'a, Item>,
}

impl<'a> Iterator for EntryXattrs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.items.next()?;
        Some((item.name.slice(self.bytes), item.value.slice(self.bytes)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.items.size_hint()
    }
}

impl ExactSizeIterator for EntryXattrs<'_> {}

/// Decodes a name. GNU tar and libarchive write `=` as `%3D` and `%` as `%25`, because a key ends at the first `=`.
/// Source: GNU tar `src/xheader.c`, `xattr_encode_keyword`.
fn unescape(mut name: &[u8], into: &mut Vec<u8>) {
    while let Some((&first, rest)) = name.split_first() {
        let (byte, rest) = match (name.strip_prefix(b"%3D"), name.strip_prefix(b"%25")) {
            (Some(rest), _) => (b'=', rest),
            (_, Some(rest)) => (b'%', rest),
            _ => (first, rest),
        };
        into.push(byte);
        name = rest;
    }
}

fn percent_decode(mut name: &[u8], into: &mut Vec<u8>) -> Option<()> {
    while let Some((&first, rest)) = name.split_first() {
        name = rest;
        if first == b'%' {
            let (digits, rest) = rest.split_first_chunk::<2>()?;
            let [high, low] = digits.map(|digit| char::from(digit).to_digit(16));
            into.push(u8::try_from((high? << 4) | low?).ok()?);
            name = rest;
        } else {
            into.push(first);
        }
    }
    Some(())
}

/// Decodes base 64 with `+` and `/`, with or without padding, as libarchive writes and reads it.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.trim_ascii_end();
    let digits = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let mut bytes = Vec::with_capacity(text.len());
    for group in digits.chunks(4) {
        let mut value: u32 = 0;
        for digit in group {
            let digit = match digit {
                b'A'..=b'Z' => digit.checked_sub(b'A')?,
                b'a'..=b'z' => digit.checked_sub(b'a')?.checked_add(26)?,
                b'0'..=b'9' => digit.checked_sub(b'0')?.checked_add(52)?,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            value = (value << 6) | u32::from(digit);
        }
        let [_, a, b, c] = match group.len() {
            4 => value.to_be_bytes(),
            3 => (value << 6).to_be_bytes(),
            2 => (value << 12).to_be_bytes(),
            _ => return None,
        };
        bytes.extend_from_slice([a, b, c].get(..group.len().checked_sub(1)?)?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_base64(text: &[u8], expected: Option<&[u8]>) {
        assert_eq!(base64(text).as_deref(), expected, "{}", text.escape_ascii());
    }

    /// Source: RFC 4648, section 10.
    #[test]
    fn base_64() {
        check_base64(b"", Some(b""));
        check_base64(b"Zg==", Some(b"f"));
        check_base64(b"Zg", Some(b"f"));
        check_base64(b"Zm8=", Some(b"fo"));
        check_base64(b"Zm9v", Some(b"foo"));
        check_base64(b"Zm9vYmFy", Some(b"foobar"));
        check_base64(b"+/+/", Some(b"\xfb\xff\xbf"));
        check_base64(b"Zm9vY", None);
        check_base64(b"Zm 9v", None);
    }

    type Pair = (&'static str, &'static str);

    #[track_caller]
    fn check(records: &[Pair], expected: &[Pair]) {
        let mut collector = Collector::default();
        for (key, value) in records {
            assert_eq!(collector.record(key.as_bytes(), value.as_bytes()), Ok(true), "{key}");
        }
        collector.settle().unwrap();
        let found: Vec<_> = collector
            .view()
            .map(|(name, value)| {
                (std::str::from_utf8(name).unwrap(), std::str::from_utf8(value).unwrap())
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn records() {
        check(
            &[("SCHILY.xattr.user.b", "1"), ("SCHILY.xattr.user.a", "")],
            &[("user.a", ""), ("user.b", "1")],
        );
        check(&[("SCHILY.xattr.user.a", "1"), ("SCHILY.xattr.user.a", "2")], &[("user.a", "2")]);
        check(&[("SCHILY.xattr.user.a%3Db%25c%41", "v")], &[("user.a=b%c%41", "v")]);
        // bsdtar 3.6.2 writes an xattr "user.a=é" like this.
        check(
            &[("LIBARCHIVE.xattr.user.a%3D%C3%A9", "dg"), ("SCHILY.xattr.user.a%3D%C3%A9", "v")],
            &[("user.a=é", "v")],
        );
        check(&[("RHT.security.selinux", "u:r:t:s0")], &[("security.selinux", "u:r:t:s0\0")]);
        check(&[("SCHILY.acl.access", "user::rwx,group::r-x,other::r-x")], &[]);
    }

    #[track_caller]
    fn check_refused(key: &[u8], value: &[u8], expected: Refused) {
        let mut collector = Collector::default();
        assert_eq!(collector.record(key, value), Err(expected), "{}", key.escape_ascii());
    }

    #[test]
    fn refused() {
        check_refused(b"SCHILY.xattr.", b"", Refused::Value);
        check_refused(b"LIBARCHIVE.xattr.user.a%0", b"dg", Refused::Value);
        check_refused(b"LIBARCHIVE.xattr.user.a%00", b"dg", Refused::Value);
        check_refused(b"LIBARCHIVE.xattr.user.a", b"d", Refused::Value);
        let key = [b"SCHILY.xattr.".as_slice(), &[b'n'; 256]].concat();
        check_refused(&key, b"", Refused::Limit(Limit::XattrName(256)));
        let value = vec![0; 65536];
        check_refused(b"SCHILY.xattr.user.a", &value, Refused::Limit(Limit::XattrValue(65536)));
    }

    /// Records that are left out may have any value.
    #[test]
    fn not_wanted() {
        let odd = [
            ("SCHILY.xattr.", "x"),
            ("LIBARCHIVE.xattr.security.ima", "no base 64"),
            ("SCHILY.acl.access", "user::rw-,user:lisa:rw-"),
            ("SCHILY.acl.default", "no ACL"),
            ("RHT.security.selinux", ""),
        ];
        for (wanted, name) in [(XattrRecords::UserOnly, Some("user.a")), (XattrRecords::None, None)]
        {
            let mut collector = Collector { wanted, ..Collector::default() };
            for (key, value) in odd {
                assert_eq!(collector.record(key.as_bytes(), value.as_bytes()), Ok(true), "{key}");
            }
            collector.record(b"SCHILY.xattr.user.a", b"v").unwrap();
            collector.record(b"SCHILY.xattr.trusted.b", b"v").unwrap();
            assert_eq!(collector.record(b"comment", b"v"), Ok(false));
            collector.settle().unwrap();
            let found: Vec<_> = collector.view().map(|(name, _)| name.to_vec()).collect();
            assert_eq!(
                found,
                name.map(|it| it.as_bytes().to_vec()).into_iter().collect::<Vec<_>>()
            );
            assert_eq!(collector.nameless(), None);
        }
    }

    #[test]
    fn too_many() {
        let mut collector = Collector::default();
        let longest = "n".repeat(250);
        for number in 0..256 {
            let key = format!("SCHILY.xattr.{number:05}{longest}");
            collector.record(key.as_bytes(), b"").unwrap();
            assert_eq!(collector.settle(), Ok(()), "{number}");
        }
        collector.record(b"SCHILY.xattr.a", b"").unwrap();
        assert_eq!(collector.settle(), Err(Limit::XattrNames(65538)));
    }
}
