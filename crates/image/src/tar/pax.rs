//! Parses extended headers: text records with metadata of an entry that its header has no room for.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use super::error::{Limit, TarCorruption};
use super::sparse::Map;
use super::xattrs::{Collector, Refused, Span};
use crate::tree::Timestamp;

/// Limit in bytes of an extended header, a long name, and the map of a sparse file. Source: Go `archive/tar`,
/// `maxSpecialFileSize`. Images that other tools can read do not exceed it.
pub const EXTENSION_MAX: u64 = 1 << 20;

/// Limit in bytes of all global extended headers together. They are read again for each entry, so they must not take
/// much longer than the 512 bytes of the entry's header. git writes 52 bytes.
pub const GLOBAL_MAX: u64 = 16 << 10;

/// A value that is not stated (`None`), cleared by an empty record (`Some(None)`), or stated.
type Setting<T> = Option<Option<T>>;

/// The records of extended headers. Later records replace earlier ones.
#[derive(Debug, Default)]
pub(super) struct Records {
    text: Vec<u8>,
    path: Setting<Span>,
    link: Setting<Span>,
    size: Setting<u64>,
    uid: Setting<u32>,
    gid: Setting<u32>,
    mtime: Setting<Timestamp>,
    dev_major: Setting<u64>,
    dev_minor: Setting<u64>,
    pub(super) xattrs: Collector,
    pub(super) sparse: SparseRecords,
}

/// The records about a sparse file.
#[derive(Debug, Default)]
pub(super) struct SparseRecords {
    name: Setting<Span>,
    pub(super) major: Option<u64>,
    pub(super) minor: Option<u64>,
    pub(super) regions: Option<u64>,
    /// Size of the content: `GNU.sparse.size` or `.realsize`.
    pub(super) size: Option<u64>,
    pub(super) map: Map,
    pub(super) has_map: bool,
    /// Name of another program whose format of sparse files is used.
    pub(super) foreign: Option<&'static str>,
    /// `SCHILY.realsize`, which star writes for sparse files. It may also be present for other files, with their own
    /// size.
    pub(super) star_size: Option<u64>,
}

/// The reason why an extended header is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PaxError {
    Corrupt(TarCorruption),
    Limit(Limit),
}

impl Records {
    /// Removes all records, but keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        let Self { text, xattrs, sparse, .. } = self;
        text.clear();
        xattrs.clear();
        sparse.map.clear();
        *self = Self {
            text: std::mem::take(text),
            xattrs: std::mem::take(xattrs),
            sparse: SparseRecords { map: std::mem::take(&mut sparse.map), ..Default::default() },
            ..Default::default()
        };
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether a record changes entries, as a comment does not.
    pub(super) const fn changes_entries(&self) -> bool {
        let Self { path, link, size, uid, gid, mtime, dev_major, dev_minor, xattrs, .. } = self;
        path.is_some()
            || link.is_some()
            || size.is_some()
            || uid.is_some()
            || gid.is_some()
            || mtime.is_some()
            || dev_major.is_some()
            || dev_minor.is_some()
            || !xattrs.is_empty()
    }

    /// Returns the buffer to append the text of the next extended header to, before [`Records::parse`].
    pub(super) const fn text(&mut self) -> &mut Vec<u8> {
        &mut self.text
    }

    /// Parses the records in the text from byte `from` on.
    pub(super) fn parse(&mut self, from: usize) -> Result<(), PaxError> {
        // The text is taken out of `self`, so that `self` can be changed while the text is borrowed.
        let text = std::mem::take(&mut self.text);
        let result = self.parse_text(&text, from);
        self.text = text;
        result
    }

    fn parse_text(&mut self, text: &[u8], mut at: usize) -> Result<(), PaxError> {
        while at < text.len() {
            let rest = text.get(at..).unwrap_or_default();
            let wrong = |reason| PaxError::Corrupt(TarCorruption::PaxRecord { at, reason });
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let length = rest
                .get(..digits)
                .and_then(decimal)
                .and_then(|length| usize::try_from(length).ok())
                .ok_or_else(|| wrong("does not begin with its length"))?;
            let record = rest.get(..length).ok_or_else(|| wrong("is longer than the header"))?;
            let body = record
                .get(digits..)
                .and_then(|body| body.strip_prefix(b" "))
                .ok_or_else(|| wrong("has no space after its length"))?
                .strip_suffix(b"\n")
                .ok_or_else(|| wrong("does not end with a newline"))?;
            let equals = body.iter().position(|&byte| byte == b'=');
            let (key, value) = equals
                .and_then(|equals| body.split_at_checked(equals))
                .filter(|(key, _)| !key.is_empty() && !key.contains(&0))
                .ok_or_else(|| wrong("has no key"))?;
            let value = value.get(1..).unwrap_or_default();
            let end = at.saturating_add(length);
            let span = Span {
                start: end.saturating_sub(value.len()).saturating_sub(1),
                end: end.saturating_sub(1),
            };
            self.record(key, value, span)?;
            at = end;
        }
        Ok(())
    }

    /// Stores a record. `span` is the position of its value in the text.
    fn record(&mut self, key: &[u8], value: &[u8], span: Span) -> Result<(), PaxError> {
        let refused = || {
            let value = value.get(..100).unwrap_or(value).to_vec();
            PaxError::Corrupt(TarCorruption::PaxValue { key: key.to_vec(), value })
        };
        let number = || decimal(value).ok_or_else(refused);
        match key {
            b"path" => self.path = Some(name(value, span).ok_or_else(refused)?),
            b"linkpath" => self.link = Some(name(value, span).ok_or_else(refused)?),
            b"size" => self.size = Some(stated(value, decimal).ok_or_else(refused)?),
            b"uid" => self.uid = Some(stated(value, id).ok_or_else(refused)?),
            b"gid" => self.gid = Some(stated(value, id).ok_or_else(refused)?),
            b"mtime" => self.mtime = Some(stated(value, time).ok_or_else(refused)?),
            b"SCHILY.devmajor" => {
                self.dev_major = Some(stated(value, decimal).ok_or_else(refused)?);
            }
            b"SCHILY.devminor" => {
                self.dev_minor = Some(stated(value, decimal).ok_or_else(refused)?);
            }
            b"SCHILY.realsize" => self.sparse.star_size = Some(number()?),
            b"SUN.holesdata" => self.sparse.foreign = Some("Solaris"),
            b"GNU.sparse.major" => self.sparse.major = Some(number()?),
            b"GNU.sparse.minor" => self.sparse.minor = Some(number()?),
            b"GNU.sparse.name" => self.sparse.name = Some(name(value, span).ok_or_else(refused)?),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = Some(number()?),
            b"GNU.sparse.numblocks" => self.sparse.regions = Some(number()?),
            // Version 0.0 repeats these two keys for each region, in this order.
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                let (_, begun) = self.sparse.map.regions();
                if begun != (key == b"GNU.sparse.numbytes") {
                    return Err(refused());
                }
                self.sparse.has_map = true;
                self.sparse.map.push(number()?).map_err(PaxError::Limit)?;
            }
            b"GNU.sparse.map" => {
                self.sparse.has_map = true;
                self.sparse.map.clear();
                for number in value.split(|&byte| byte == b',').filter(|_| !value.is_empty()) {
                    let number = decimal(number).ok_or_else(refused)?;
                    self.sparse.map.push(number).map_err(PaxError::Limit)?;
                }
            }
            _ => {
                self.xattrs.record(key, value).map_err(|error| match error {
                    Refused::Limit(limit) => PaxError::Limit(limit),
                    Refused::Corrupt(kind) => PaxError::Corrupt(kind),
                    Refused::Value => refused(),
                })?;
            }
        }
        Ok(())
    }
}

/// The records that apply to an entry: the entry's own records take precedence over global ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct Merged<'a> {
    pub(super) local: &'a Records,
    pub(super) global: &'a Records,
}

impl<'a> Merged<'a> {
    pub(super) fn path(self) -> Option<&'a [u8]> {
        self.bytes(|records| records.path)
    }

    pub(super) fn link(self) -> Option<&'a [u8]> {
        self.bytes(|records| records.link)
    }

    /// Returns the real name of a sparse file, whose path is a placeholder.
    pub(super) fn sparse_name(self) -> Option<&'a [u8]> {
        self.local.sparse.name.flatten().map(|span| span.slice(&self.local.text))
    }

    pub(super) fn size(self) -> Option<u64> {
        self.value(|records| records.size)
    }

    pub(super) fn uid(self) -> Option<u32> {
        self.value(|records| records.uid)
    }

    pub(super) fn gid(self) -> Option<u32> {
        self.value(|records| records.gid)
    }

    pub(super) fn mtime(self) -> Option<Timestamp> {
        self.value(|records| records.mtime)
    }

    pub(super) fn dev_major(self) -> Option<u64> {
        self.value(|records| records.dev_major)
    }

    pub(super) fn dev_minor(self) -> Option<u64> {
        self.value(|records| records.dev_minor)
    }

    fn value<T>(self, get: impl Fn(&Records) -> Setting<T>) -> Option<T> {
        get(self.local).or_else(|| get(self.global)).flatten()
    }

    fn bytes(self, get: impl Fn(&Records) -> Setting<Span>) -> Option<&'a [u8]> {
        let here = |records: &'a Records| {
            get(records).map(|span| span.map(|span| span.slice(&records.text)))
        };
        here(self.local).or_else(|| here(self.global)).flatten()
    }
}

/// Parses a value. An empty value clears the setting, so that the header's field applies again.
fn stated<T>(value: &[u8], parse: impl Fn(&[u8]) -> Option<T>) -> Option<Option<T>> {
    if value.is_empty() { Some(None) } else { parse(value).map(Some) }
}

fn name(value: &[u8], span: Span) -> Option<Option<Span>> {
    stated(value, |value| (!value.contains(&0)).then_some(span))
}

/// Parses decimal digits, at least one, up to 2^63 - 1, which is the maximum size of a file.
fn decimal(digits: &[u8]) -> Option<u64> {
    let mut value: i64 = 0;
    for byte in digits {
        let digit = byte.checked_sub(b'0').filter(|&digit| digit < 10)?;
        value = value.checked_mul(10)?.checked_add(i64::from(digit))?;
    }
    if digits.is_empty() { None } else { u64::try_from(value).ok() }
}

fn id(digits: &[u8]) -> Option<u32> {
    u32::try_from(decimal(digits)?).ok().filter(is_id)
}

/// Whether a user or group can have this id. Source: Linux `include/linux/uidgid.h`, `uid_valid`: for chown(2),
/// 2^32 - 1 means that the owner is not changed.
pub(super) const fn is_id(id: &u32) -> bool {
    *id != u32::MAX
}

/// Parses seconds with a fraction, rounded down to nanoseconds.
fn time(text: &[u8]) -> Option<Timestamp> {
    let (negative, digits) = match text.strip_prefix(b"-") {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let dot = digits.iter().position(|&byte| byte == b'.').unwrap_or(digits.len());
    let (whole, fraction) = digits.split_at_checked(dot)?;
    let fraction = fraction.get(1..).unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let mut seconds = i64::try_from(decimal(whole)?).ok()?;
    let mut nanoseconds = 0;
    for place in 0..9 {
        let digit = fraction.get(place).map_or(0, |byte| byte.saturating_sub(b'0'));
        nanoseconds = u32::saturating_add(u32::saturating_mul(nanoseconds, 10), u32::from(digit));
    }
    if negative {
        seconds = seconds.checked_neg()?;
        if fraction.iter().skip(9).any(|&byte| byte != b'0') {
            nanoseconds = nanoseconds.saturating_add(1);
        }
        if nanoseconds > 0 {
            seconds = seconds.checked_sub(1)?;
            nanoseconds = 1_000_000_000_u32.saturating_sub(nanoseconds);
        }
    }
    Some(Timestamp { seconds, nanoseconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_time(text: &str, expected: Option<(i64, u32)>) {
        let found = time(text.as_bytes()).map(|time| (time.seconds, time.nanoseconds));
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn times() {
        check_time("0", Some((0, 0)));
        check_time("1350244992.023960108", Some((1_350_244_992, 23_960_108)));
        check_time("1.5", Some((1, 500_000_000)));
        check_time("1.", Some((1, 0)));
        check_time("1.1234567899", Some((1, 123_456_789)));
        check_time("-1", Some((-1, 0)));
        check_time("-1.5", Some((-2, 500_000_000)));
        check_time("-0.000000001", Some((-1, 999_999_999)));
        check_time("-0.0000000001", Some((-1, 999_999_999)));
        check_time("-0.9999999999", Some((-1, 0)));
        check_time("9223372036854775807.9", Some((i64::MAX, 900_000_000)));
        check_time("-9223372036854775807.1", Some((i64::MIN, 900_000_000)));
        check_time("9223372036854775808", None);
        check_time("", None);
        check_time("-", None);
        check_time(".5", None);
        check_time("+1", None);
        check_time("1.5.", None);
        check_time("1.-5", None);
        check_time("1e3", None);
    }

    fn parse(text: &[u8]) -> Result<Records, PaxError> {
        let mut records = Records::default();
        records.text().extend_from_slice(text);
        records.parse(0).map(|()| records)
    }

    #[track_caller]
    fn check_refused(text: &[u8], expected: &str) {
        let error = match parse(text).unwrap_err() {
            PaxError::Corrupt(error) => error.to_string(),
            PaxError::Limit(error) => error.to_string(),
        };
        assert!(error.contains(expected), "{}: {error}", text.escape_ascii());
    }

    /// Makes records with correct lengths, each of less than a hundred bytes.
    fn records(pairs: &[(&str, &str)]) -> Vec<u8> {
        let records = pairs.iter().map(|(key, value)| {
            (0..100)
                .map(|length| format!("{length} {key}={value}\n"))
                .enumerate()
                .find(|(length, record)| record.len() == *length)
                .unwrap()
                .1
        });
        records.collect::<String>().into_bytes()
    }

    #[test]
    fn values() {
        let pairs = [("uid", "7"), ("gid", "123"), ("path", ""), ("uid", "9"), ("linkpath", "a=b")];
        let records = parse(&records(&pairs)).unwrap();
        let merged = Merged { local: &records, global: &Records::default() };
        assert_eq!((merged.uid(), merged.gid()), (Some(9), Some(123)));
        assert_eq!((merged.path(), merged.link()), (None, Some(&b"a=b"[..])));
    }

    #[test]
    fn local_before_global() {
        let global = parse(&records(&[("uid", "7"), ("gid", "7"), ("path", "a")])).unwrap();
        let local = parse(&records(&[("gid", "9"), ("path", "")])).unwrap();
        let merged = Merged { local: &local, global: &global };
        assert_eq!((merged.uid(), merged.gid(), merged.path()), (Some(7), Some(9), None));
    }

    #[test]
    fn refused_records() {
        check_refused(b"x uid=7\n", "at byte 0 does not begin with its length");
        check_refused(b"8 uid=7\n\0", "at byte 8 does not begin with its length");
        check_refused(b"9 uid=7\n", "is longer than the header");
        check_refused(b"99999999999999999999 uid=7\n", "does not begin with its length");
        check_refused(b"7 uid=7\n", "does not end with a newline");
        check_refused(b"1 uid=7\n", "has no space");
        check_refused(b"0 uid=7\n", "has no space");
        check_refused(b"8=uid 7\n", "has no space");
        check_refused(b"8 uid 7\n", "has no key");
        check_refused(b"5 =7\n", "has no key");
        check_refused(b"8 u\0d=7\n", "has no key");
    }

    #[test]
    fn refused_values() {
        let check = |key, value: &str| {
            let expected = format!("{key}={}", value.as_bytes().escape_ascii());
            check_refused(&records(&[(key, value)]), &expected);
        };
        check("uid", "-");
        check("uid", "+7");
        check("gid", "4294967296");
        check("size", "x");
        check("size", "9223372036854775808");
        check("mtime", "x");
        check("path", "a\0");
        check("GNU.sparse.name", "a\0");
        check("GNU.sparse.numbytes", "1");
        check("GNU.sparse.map", "1,,");
        check("SCHILY.devmajor", "-1");
        check("LIBARCHIVE.xattr.user.a", "!");
    }
}
