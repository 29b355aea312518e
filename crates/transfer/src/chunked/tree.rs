//! Makes the tree of a layer from its table of contents.
//!
//! The entries of a table are treated like those of the layer's tar in an import, with two exceptions: files of a few
//! bytes have no contents in the tree, because the table does not have them, and the file with the table itself is
//! missing, because it does not list itself.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::digest::Digest;
use image::layer::{Layer, LayerError};
use image::tar::XATTR_NAMES_MAX;
use image::tree::{Content, Location, Metadata, Node, Timestamp, XattrsId};
use image::verity::ObjectId;
use sha2::{Digest as _, Sha256};

use super::entry::TocEntry;

/// The beginning of the bytes that the id of a file is a digest of. The descriptor of an fs-verity digest begins with
/// another byte.
const DOMAIN: &[u8] = b"quire file of a table of contents, version 1\0";

/// Estimated memory of an entry without its texts: an inode, a name, an object id, and their places in tables.
const ENTRY: usize = 192;

/// Maximum length of a path in bytes, because each name in it makes a directory. Source: Linux `PATH_MAX`, less the
/// final NUL.
const PATH_MAX: usize = 4095;
/// Maximum length of an xattr's name in bytes. Source: Linux `include/uapi/linux/limits.h`, `XATTR_NAME_MAX`.
const XATTR_NAME_MAX: usize = 255;

/// Why an entry cannot be in a tree.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeFlaw {
    /// Go replaces bytes of names that are not UTF-8 when it writes JSON, so the name is unknown.
    #[error("a name that is not UTF-8")]
    Name,
    #[error("an invalid {0}")]
    Field(&'static str),
    /// The entry contradicts the others.
    #[error("{}", with_causes(.0))]
    Layer(LayerError),
}

impl From<LayerError> for TreeFlaw {
    fn from(error: LayerError) -> Self {
        Self::Layer(error)
    }
}

/// Returns the message of an error and of its causes. The table's parser keeps only a text.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

/// The tree of a layer, without the contents of its files.
#[derive(Debug)]
pub(crate) struct TocTree {
    /// Distinguishes the files of this table from those of others.
    seed: Digest,
    layer: Layer,
    /// Estimated memory of the layer, in bytes.
    memory: usize,
    /// Path of the last entry.
    last: Vec<u8>,
}

impl TocTree {
    /// Starts the tree of a layer. Only the same table of the same blob has the same `seed`.
    pub(crate) fn new(seed: &Digest) -> Self {
        Self { seed: *seed, layer: Layer::new(), memory: 0, last: Vec::new() }
    }

    #[cfg(feature = "registry")]
    pub(crate) const fn seed(&self) -> &Digest {
        &self.seed
    }

    #[cfg(feature = "registry")]
    pub(crate) fn into_layer(self) -> Layer {
        self.layer
    }

    /// Returns the estimated memory in use, in bytes.
    pub(super) const fn memory(&self) -> usize {
        self.memory
    }

    /// Adds an entry. `number` is the number of its file, if it has contents.
    pub(super) fn add(&mut self, entry: &TocEntry, number: Option<usize>) -> Result<(), TreeFlaw> {
        let xattrs: usize = entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let path = name(&entry.name)?;
        // Directories that the path does not share with the path before may be new ones.
        let names = path.split(|it| *it == b'/');
        let shared = names.clone().zip(self.last.split(|it| *it == b'/'));
        let shared = shared.take_while(|(one, other)| one == other).count();
        let inodes = names.count().saturating_sub(shared).max(1);
        self.memory += ENTRY * inodes + path.len() + entry.link_name.len() + xattrs;
        self.last.clone_from(&path);
        let target;
        let object;
        let node = match entry.kind.as_str() {
            "hardlink" => {
                self.layer.link(&path, &name(&entry.link_name)?)?;
                return Ok(());
            }
            "reg" => match number {
                None => Node::Regular(Content::Inline(b"")),
                Some(number) => {
                    object = file_object(&self.seed, number);
                    Node::Regular(Content::External {
                        size: entry.size,
                        object: Some(object),
                        location: Location::None,
                    })
                }
            },
            "dir" => Node::Directory,
            "symlink" => {
                target = known(&entry.link_name)?.as_bytes();
                Node::Symlink(target)
            }
            "char" => Node::CharDevice(device(entry)?),
            "block" => Node::BlockDevice(device(entry)?),
            "fifo" => Node::Fifo,
            _ => return Err(TreeFlaw::Field("type")),
        };
        let id = |id: i64, what| {
            u32::try_from(id).ok().filter(|it| *it != u32::MAX).ok_or(TreeFlaw::Field(what))
        };
        let metadata = Metadata {
            permissions: u16::try_from(entry.mode & 0o7777).or(Err(TreeFlaw::Field("mode")))?,
            uid: id(entry.uid, "uid")?,
            gid: id(entry.gid, "gid")?,
            mtime: time(&entry.modtime).ok_or(TreeFlaw::Field("modtime"))?,
        };
        let xattrs = self.xattrs(&path, entry)?;
        self.layer.entry(&path, &metadata, xattrs, node)?;
        Ok(())
    }

    fn xattrs(&mut self, path: &[u8], entry: &TocEntry) -> Result<XattrsId, TreeFlaw> {
        if entry.xattrs.is_empty() {
            return Ok(XattrsId::NONE);
        }
        // Tars have other limits and escapes for these, so such a layer is imported.
        let is_plain = |name: &String| {
            let is_other = name.starts_with("system.posix_acl_") || name.contains('%');
            !is_other && name.len() <= XATTR_NAME_MAX
        };
        let names: usize = entry.xattrs.keys().map(|it| it.len() + 1).sum();
        if names > XATTR_NAMES_MAX || !entry.xattrs.keys().all(is_plain) {
            return Err(TreeFlaw::Field("xattr"));
        }
        let mut pairs = Vec::new();
        for (name, value) in &entry.xattrs {
            let value = STANDARD.decode(value).or(Err(TreeFlaw::Field("xattr")))?;
            pairs.push((known(name)?.as_bytes(), value));
        }
        let pairs = pairs.iter().map(|(name, value)| (*name, &value[..]));
        let failed = |source| LayerError::Entry { path: path.to_vec(), source };
        Ok(self.layer.xattrs(pairs).map_err(failed)?)
    }
}

/// Returns the object id that stands for the contents of a file in the tree. It is not the digest of the contents, which
/// the table does not have.
pub(crate) fn file_object(seed: &Digest, number: usize) -> ObjectId {
    let mut hasher = Sha256::new_with_prefix(DOMAIN);
    hasher.update(seed.as_bytes());
    hasher.update((number as u64).to_le_bytes());
    ObjectId::from_bytes(&hasher.finalize()).expect("SHA-256 has 32 bytes")
}

/// Returns a text in which the writer of the table has replaced no bytes.
fn known(text: &str) -> Result<&str, TreeFlaw> {
    if text.contains(char::REPLACEMENT_CHARACTER) { Err(TreeFlaw::Name) } else { Ok(text) }
}

/// Returns a path as single names with slashes between them, as the reader of tars does.
fn name(text: &str) -> Result<Vec<u8>, TreeFlaw> {
    if text.len() > PATH_MAX || text.contains('\0') {
        return Err(TreeFlaw::Field("name"));
    }
    let names: Vec<_> = known(text)?.split('/').filter(|it| !matches!(*it, "" | ".")).collect();
    Ok(names.join("/").into_bytes())
}

/// Returns a device number as in `st_rdev`. Linux has 12 bits for the major number and 20 for the minor.
fn device(entry: &TocEntry) -> Result<u64, TreeFlaw> {
    let number = |number: i64, bits: u32| {
        u64::try_from(number).ok().filter(|it| *it < 1 << bits).ok_or(TreeFlaw::Field("device"))
    };
    let (major, minor) = (number(entry.dev_major, 12)?, number(entry.dev_minor, 20)?);
    Ok((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

/// Parses a time in the format of RFC 3339. No time is the beginning of 1970, as in a tar.
fn time(text: &str) -> Option<Timestamp> {
    if text.is_empty() {
        return Some(Timestamp::default());
    }
    let (date, rest) = text.split_once('T')?;
    let [year, month, day] = fields(date, '-', [4, 2, 2])?;
    let (clock, offset) = match rest.strip_suffix('Z') {
        Some(clock) => (clock, 0),
        None => {
            let (clock, offset) = rest.split_at_checked(rest.len().checked_sub(6)?)?;
            let sign = match offset.as_bytes().first()? {
                b'+' => 1,
                b'-' => -1,
                _ => return None,
            };
            let [hours, minutes] = fields(&offset[1..], ':', [2, 2])?;
            (clock, sign * (hours * 3600 + minutes * 60))
        }
    };
    let (clock, fraction) = clock.split_once('.').map_or((clock, None), |it| (it.0, Some(it.1)));
    let [hour, minute, second] = fields(clock, ':', [2, 2, 2])?;
    let days_of_month = match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    let is_right = (1..=days_of_month).contains(&day) && hour < 24 && minute < 60 && second < 60;
    let nanoseconds = match fraction {
        None => 0,
        Some(digits) if (1..=9).contains(&digits.len()) => {
            let number = digits.bytes().all(|it| it.is_ascii_digit()).then(|| digits.parse());
            let missing = 9 - u32::try_from(digits.len()).ok()?;
            number?.ok().and_then(|it: u32| it.checked_mul(10_u32.pow(missing)))?
        }
        Some(_) => return None,
    };
    let seconds = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    is_right.then_some(Timestamp { seconds, nanoseconds })
}

/// Parses numbers with these numbers of digits.
fn fields<const N: usize>(text: &str, separator: char, digits: [usize; N]) -> Option<[i64; N]> {
    let mut parts = text.split(separator);
    let mut numbers = [0; N];
    for (number, digits) in numbers.iter_mut().zip(digits) {
        let part = parts.next().filter(|it| it.len() == digits)?;
        *number = part.bytes().all(|it| it.is_ascii_digit()).then(|| part.parse().ok())??;
    }
    parts.next().is_none().then_some(numbers)
}

/// Returns the number of days since the beginning of 1970. Source: Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", `days_from_civil`.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers are those of `date -u -d TEXT +%s`.
    #[test]
    fn times() {
        let check = |text, expect: Option<(i64, u32)>| {
            let found = time(text).map(|it| (it.seconds, it.nanoseconds));
            assert_eq!(found, expect, "{text}");
        };
        check("", Some((0, 0)));
        check("1970-01-01T00:00:00Z", Some((0, 0)));
        check("2001-09-09T01:46:40Z", Some((1_000_000_000, 0)));
        check("2000-02-29T12:00:00.25Z", Some((951_825_600, 250_000_000)));
        check("1969-12-31T23:59:59.5Z", Some((-1, 500_000_000)));
        check("2024-03-01T01:30:00+01:30", Some((1_709_251_200, 0)));
        check("2024-02-29T22:30:00-01:30", Some((1_709_251_200, 0)));
        check("0001-01-01T00:00:00Z", Some((-62_135_596_800, 0)));
        check("9999-12-31T23:59:59.999999999Z", Some((253_402_300_799, 999_999_999)));
        for text in [
            "2001-09-09",
            "2001-09-09T01:46:40",
            "2001-02-29T00:00:00Z",
            "1900-02-29T00:00:00Z",
            "2001-13-01T00:00:00Z",
            "2001-00-01T00:00:00Z",
            "2001-01-00T00:00:00Z",
            "2001-01-01T24:00:00Z",
            "2001-01-01T00:60:00Z",
            "2001-01-01T00:00:60Z",
            "2001-01-01T00:00:00.Z",
            "2001-01-01T00:00:00.1234567890Z",
            "2001-01-01T00:00:00.-1Z",
            "2001-01-01T00:00:00*01:00",
            "+001-01-01T00:00:00Z",
            "2001-01-01T00:00:00Zä",
            "äT",
            "T",
        ] {
            check(text, None);
        }
    }

    #[test]
    fn names() {
        let check = |text, expect: Option<&[u8]>| assert_eq!(name(text).ok().as_deref(), expect);
        check("./usr//bin/", Some(b"usr/bin"));
        check("/", Some(b""));
        check("a\u{fffd}", None);
        check("a\0b", None);
        check(&"a/".repeat(2048), None);
        assert!(name(&"a/".repeat(2047)).is_ok());
    }
}
