//! Parses a dump into a tree.

#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::io::BufRead;

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher as _;

use super::field::{Bounds, append_unescaped, digit, low, name, number, unescape};
use super::link::Links;
use super::{
    Field, INLINE_MAX, LINE_MAX, LINE_XATTRS_MAX, PAYLOAD_MAX, ParseError, Reason, Strictness,
    XATTR_OVERHEAD, XATTRS_HEADER, XATTRS_MAX,
};
use crate::tree::{
    Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp, Tree, TreeError, XattrsId,
};
use crate::verity::ObjectId;

/// Parses a dump, with little more memory than the tree takes.
///
/// # Errors
/// [`ParseError`], with the number of the line.
pub fn parse(mut input: impl BufRead, strictness: Strictness) -> Result<Tree, ParseError> {
    let mut parser = Parser::new(strictness);
    // The beginning of a line, if the input's buffer does not contain the end of that line yet.
    let mut begun = Vec::new();
    loop {
        let line = parser.line;
        let available = input.fill_buf().map_err(|source| ParseError::Read { line, source })?;
        if available.is_empty() {
            break;
        }
        let (text, used) = match memchr::memchr(b'\n', available) {
            Some(at) => (available.get(..at), at.saturating_add(1)),
            None => (None, available.len()),
        };
        let added = text.unwrap_or(available);
        if added.len().saturating_add(begun.len()) > LINE_MAX {
            return Err(parser.wrong(Reason::TooLong));
        }
        match text {
            Some(text) if begun.is_empty() => parser.take(text)?,
            Some(text) => {
                begun.extend_from_slice(text);
                parser.take(&begun)?;
                begun.clear();
            }
            None => begun.extend_from_slice(added),
        }
        input.consume(used);
    }
    if !begun.is_empty() {
        if strictness == Strictness::Strict {
            return Err(parser.wrong(Reason::NoNewline));
        }
        parser.take(&begun)?;
    }
    parser.finish()
}

struct Parser {
    strictness: Strictness,
    builder: Builder,
    /// Number of the current line, counted from 1.
    line: u64,
    directory: Directory,
    links: Links,
    scratch: Scratch,
}

/// Buffers for unescaped fields.
#[derive(Default)]
struct Scratch {
    path: Vec<u8>,
    payload: Vec<u8>,
    content: Vec<u8>,
    digest: Vec<u8>,
    xattrs: Vec<u8>,
    /// The end of each name and of its value in `xattrs`.
    ends: Vec<(usize, usize)>,
}

/// The directory of the previous line, with its parent directories.
#[derive(Default)]
struct Directory {
    path: Vec<u8>,
    /// The length of the path and the inode of each, without the root.
    chain: Vec<(usize, InodeId)>,
}

/// A line, split at its spaces. Missing fields are empty.
struct Line<'a> {
    path: &'a [u8],
    size: &'a [u8],
    mode: &'a [u8],
    nlink: &'a [u8],
    uid: &'a [u8],
    gid: &'a [u8],
    rdev: &'a [u8],
    mtime: &'a [u8],
    payload: &'a [u8],
    content: &'a [u8],
    digest: &'a [u8],
    xattrs: &'a [u8],
    /// Number of fixed fields that the line has.
    count: usize,
    strictness: Strictness,
}

impl<'a> Line<'a> {
    fn split(text: &'a [u8], strictness: Strictness) -> Self {
        let mut rest = Some(text);
        let mut count = 0_usize;
        let mut next = |is_short: bool| {
            let Some(text) = rest else { return &[][..] };
            count = count.saturating_add(1);
            // For a short field, a simple search is faster than `memchr`, which has a higher fixed cost.
            let end = if is_short {
                text.iter().position(|byte| *byte == b' ')
            } else {
                memchr::memchr(b' ', text)
            };
            let Some((field, after)) = end.and_then(|at| text.split_at_checked(at)) else {
                rest = None;
                return text;
            };
            rest = after.get(1..);
            field
        };
        let path = next(false);
        let [size, mode, nlink, uid, gid, rdev, mtime] = std::array::from_fn(|_| next(true));
        let [payload, content, digest] = std::array::from_fn(|_| next(false));
        let xattrs = rest.unwrap_or_default();
        Self {
            path,
            size,
            mode,
            nlink,
            uid,
            gid,
            rdev,
            mtime,
            payload,
            content,
            digest,
            xattrs,
            count,
            strictness,
        }
    }

    fn number(&self, text: &[u8], field: Field, bounds: Bounds) -> Result<u64, Reason> {
        if text.is_empty() && !Field::FIXED.iter().take(self.count).any(|it| *it == field) {
            return Err(Reason::Missing(field));
        }
        let value = number(text, field)?;
        if self.strictness == Strictness::Exact {
            bounds.check(text, field)?;
        }
        Ok(value)
    }

    fn word(&self, text: &[u8], field: Field) -> Result<u32, Reason> {
        Ok(low(self.number(text, field, Bounds::WORD)?))
    }

    fn mtime(&self) -> Result<Timestamp, Reason> {
        let Some(dot) = memchr::memchr(b'.', self.mtime) else {
            // As for other numbers, the error for a missing field differs from the error for an invalid one.
            self.number(self.mtime, Field::Mtime, Bounds::SECONDS)?;
            return Err(Reason::Mtime(self.mtime.to_vec()));
        };
        let (seconds, rest) = self.mtime.split_at_checked(dot).unwrap_or_default();
        let nanoseconds = rest.get(1..).unwrap_or_default();
        Ok(Timestamp {
            seconds: self.number(seconds, Field::Mtime, Bounds::SECONDS)?.cast_signed(),
            nanoseconds: low(self.number(nanoseconds, Field::Mtime, Bounds::NANOSECONDS)?),
        })
    }
}

impl Parser {
    fn new(strictness: Strictness) -> Self {
        Self {
            strictness,
            builder: Builder::new(),
            line: 1,
            directory: Directory::default(),
            links: Links::default(),
            scratch: Scratch::default(),
        }
    }

    fn wrong(&self, source: Reason) -> ParseError {
        ParseError::Line { line: self.line, source }
    }

    fn take(&mut self, text: &[u8]) -> Result<(), ParseError> {
        self.entry(text).map_err(|reason| self.wrong(reason))?;
        self.line = self.line.saturating_add(1);
        Ok(())
    }

    fn entry(&mut self, text: &[u8]) -> Result<(), Reason> {
        if let Some(at) = memchr::memchr(0, text) {
            return Err(Reason::Nul(at));
        }
        let strictness = self.strictness;
        let line = Line::split(text, strictness);
        let Self { builder, scratch, .. } = self;
        let Scratch { path: path_scratch, payload: payload_scratch, .. } = scratch;
        let path = unescape(line.path, Field::Path, path_scratch)?;
        let path = name(path, Field::Path, strictness)?;
        if path.is_empty() {
            return Err(Reason::EmptyPath);
        }
        let (mode, is_link) = match line.mode {
            [b'@', mode @ ..] => (mode, true),
            mode => (mode, false),
        };
        let mode = Mode::new(low(line.number(mode, Field::Mode, Bounds::MODE)?))?;
        let is_root = path == b"/";
        match (self.line, is_root) {
            (1, false) => return Err(Reason::FirstNotRoot),
            (1, true) if mode.kind != Kind::Directory || is_link => {
                return Err(Reason::RootNotDirectory);
            }
            (1, true) | (_, false) => {}
            (_, true) => return Err(Reason::SecondRoot),
        }
        let payload = match line.payload {
            b"-" => None,
            raw => {
                let payload = unescape(raw, Field::Payload, payload_scratch)?;
                Some(name(payload, Field::Payload, strictness)?)
            }
        };
        if is_link {
            let (parent, name) = self.directory.resolve_parent(builder, &self.links, path)?;
            if mode.kind == Kind::Directory {
                return Err(Reason::LinkToDirectory);
            }
            let target = payload.filter(|it| !it.is_empty()).ok_or(Reason::LinkNowhere)?;
            return Ok(self.links.add(builder, self.line, parent, name, target)?);
        }

        let size = line.number(line.size, Field::Size, Bounds::SIZE)?;
        let nlink = line.word(line.nlink, Field::Nlink)?;
        let rdev = line.number(line.rdev, Field::Rdev, Bounds::WORD)?;
        let metadata = Metadata {
            permissions: mode.permissions,
            uid: line.word(line.uid, Field::Uid)?,
            gid: line.word(line.gid, Field::Gid)?,
            mtime: line.mtime()?,
        };
        let Scratch { content, digest, xattrs, ends, .. } = scratch;
        let content = match line.content {
            b"-" => None,
            raw => Some(unescape(raw, Field::Content, content)?),
        };
        let file = File { line: &line, mode, size, rdev, payload, content };
        file.check(strictness)?;
        let node = file.node(digest)?;
        let xattrs = read_xattrs(builder, &line, xattrs, ends)?;
        if is_root {
            return Ok(builder.describe(InodeId::ROOT, &metadata, xattrs)?);
        }
        let (parent, name) = self.directory.resolve_parent(builder, &self.links, path)?;
        if self.links.index_of(parent, name).is_some() {
            return Err(Reason::Tree(TreeError::Exists(name.to_vec())));
        }
        let inode = builder.inode(&metadata, xattrs, node)?;
        builder.state_nlink(inode, nlink);
        builder.state_size(inode, size);
        Ok(builder.insert(parent, name, inode, Link::Owner)?)
    }

    fn finish(mut self) -> Result<Tree, ParseError> {
        if self.line == 1 {
            return Err(ParseError::Empty);
        }
        self.links.resolve(&mut self.builder)?;
        let Self { builder, .. } = self;
        Ok(builder.finish())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Directory,
    Regular,
    Symlink,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
}

#[derive(Debug, Clone, Copy)]
struct Mode {
    kind: Kind,
    permissions: u16,
}

impl Mode {
    /// Splits a mode. Bits above the lowest 16 have no meaning, and `mkcomposefs` ignores them.
    fn new(mode: u32) -> Result<Self, Reason> {
        let [a, b, ..] = mode.to_le_bytes();
        let bits = u16::from_le_bytes([a, b]);
        // `S_IFMT` in `linux/stat.h`.
        let kind = match bits & 0o170_000 {
            0o040_000 => Kind::Directory,
            0o100_000 => Kind::Regular,
            0o120_000 => Kind::Symlink,
            0o020_000 => Kind::CharDevice,
            0o060_000 => Kind::BlockDevice,
            0o010_000 => Kind::Fifo,
            0o140_000 => Kind::Socket,
            _ => return Err(Reason::Type(mode)),
        };
        Ok(Self { kind, permissions: bits & 0o7777 })
    }
}

/// The fields of a line that is not a hard link.
struct File<'a> {
    line: &'a Line<'a>,
    mode: Mode,
    size: u64,
    rdev: u64,
    payload: Option<&'a [u8]>,
    content: Option<&'a [u8]>,
}

impl<'a> File<'a> {
    /// Checks the limits that apply even to fields without a meaning for this type of file.
    fn check(&self, strictness: Strictness) -> Result<(), Reason> {
        let is_symlink = self.mode.kind == Kind::Symlink;
        if let Some(payload) = self.payload.filter(|it| it.len() > PAYLOAD_MAX) {
            return Err(Reason::PayloadLength(payload.len()));
        }
        if let Some(content) = self.content {
            let length = content.len();
            if u64::try_from(length) != Ok(self.size) {
                if line_ends_before_content(self.line) {
                    return Err(Reason::Missing(Field::Content));
                }
                return Err(Reason::ContentLength { length, size: self.size });
            }
            if length > INLINE_MAX && !is_symlink {
                return Err(Reason::ContentTooLong(length));
            }
        }
        if strictness == Strictness::Strict {
            if self.rdev != 0 && !matches!(self.mode.kind, Kind::CharDevice | Kind::BlockDevice) {
                return Err(Reason::NotDevice(self.rdev));
            }
            if is_symlink {
                let length = self.payload.unwrap_or_default().len();
                if u64::try_from(length) != Ok(self.size) {
                    return Err(Reason::SymlinkSize { size: self.size, length });
                }
                if self.content.is_some() {
                    return Err(Reason::SymlinkContent);
                }
            }
        }
        Ok(())
    }

    fn node(&self, scratch: &mut Vec<u8>) -> Result<Node<'a>, Reason> {
        let device = u64::from(low(self.rdev));
        let raw_digest = match self.line.digest {
            b"-" => None,
            raw => Some(unescape(raw, Field::Digest, scratch)?),
        };
        Ok(match self.mode.kind {
            Kind::Directory => Node::Directory,
            Kind::Symlink => Node::Symlink(self.payload.unwrap_or_default()),
            Kind::CharDevice => Node::CharDevice(device),
            Kind::BlockDevice => Node::BlockDevice(device),
            Kind::Fifo => Node::Fifo,
            Kind::Socket => Node::Socket,
            Kind::Regular => Node::Regular(match self.content {
                Some(content) => Content::Inline(content),
                None if self.size == 0 => Content::Inline(b""),
                None => {
                    let object = raw_digest.map(read_digest).transpose()?;
                    let location = match self.payload.unwrap_or_default() {
                        b"" => Location::None,
                        path if is_path_of(path, raw_digest) => Location::Object,
                        path => Location::Path(path),
                    };
                    Content::External { size: self.size, object, location }
                }
            }),
        })
    }
}

fn line_ends_before_content(line: &Line<'_>) -> bool {
    Field::FIXED.iter().position(|it| *it == Field::Content).is_some_and(|at| at >= line.count)
}

fn read_digest(text: &[u8]) -> Result<ObjectId, Reason> {
    // The error is dropped, because the reason shows the text.
    ObjectId::from_hex(text).ok().ok_or_else(|| Reason::Digest(text.to_vec()))
}

/// Whether `path` is the path of the object with the id `hex` in an object directory.
fn is_path_of(path: &[u8], hex: Option<&[u8]>) -> bool {
    let Some((first, rest)) = hex.and_then(|hex| hex.split_first_chunk::<2>()) else {
        return false;
    };
    let Some((directory, name)) = path.split_first_chunk::<2>() else { return false };
    let is_lower = |byte: &u8| digit(*byte).is_some() && !byte.is_ascii_uppercase();
    directory == first
        && name.strip_prefix(b"/") == Some(rest)
        && path.len() > 3
        && first.iter().chain(rest).all(is_lower)
}

fn read_xattrs(
    builder: &mut Builder,
    line: &Line<'_>,
    bytes: &mut Vec<u8>,
    ends: &mut Vec<(usize, usize)>,
) -> Result<XattrsId, Reason> {
    let text = line.xattrs;
    if text.is_empty() {
        return Ok(XattrsId::NONE);
    }
    if text.len() > LINE_XATTRS_MAX {
        return Err(Reason::XattrsOfLine(text.len()));
    }
    bytes.clear();
    ends.clear();
    // Like `mkcomposefs`, accept a space at the end of the line.
    for pair in text.strip_suffix(b" ").unwrap_or(text).split(|byte| *byte == b' ') {
        let equal = memchr::memchr(b'=', pair).ok_or_else(|| Reason::NoEqual(pair.to_vec()))?;
        let (raw, value) = pair.split_at_checked(equal).unwrap_or_default();
        let start = bytes.len();
        append_unescaped(raw, Field::Xattr, bytes)?;
        let unescaped = bytes.get(start..).unwrap_or_default();
        let length = name(unescaped, Field::Xattr, line.strictness)?.len();
        bytes.truncate(start.saturating_add(length));
        let end = bytes.len();
        append_unescaped(value.get(1..).unwrap_or_default(), Field::Xattr, bytes)?;
        ends.push((end, bytes.len()));
    }
    if counted(ends.len(), bytes.len()) > XATTRS_MAX {
        check_distinct(bytes, ends)?;
    }
    Ok(builder.xattrs(pairs(bytes, ends))?)
}

fn pairs<'a>(
    bytes: &'a [u8],
    ends: &'a [(usize, usize)],
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    let starts = std::iter::once(0).chain(ends.iter().map(|(_, end)| *end));
    starts.zip(ends).map(|(start, &(middle, end))| {
        (bytes.get(start..middle).unwrap_or_default(), bytes.get(middle..end).unwrap_or_default())
    })
}

fn counted(xattrs: usize, bytes: usize) -> usize {
    xattrs.saturating_mul(XATTR_OVERHEAD).saturating_add(XATTRS_HEADER).saturating_add(bytes)
}

/// Checks [`XATTRS_MAX`] like `mkcomposefs`: one xattr after the other, where each replaces an earlier xattr of the
/// same name.
fn check_distinct(bytes: &[u8], ends: &[(usize, usize)]) -> Result<(), Reason> {
    let hasher = DefaultHashBuilder::default();
    let mut distinct: HashTable<(&[u8], usize)> = HashTable::new();
    let mut total = 0_usize;
    for (name, value) in pairs(bytes, ends) {
        let hash = hasher.hash_one(name);
        match distinct.find_mut(hash, |(other, _)| *other == name) {
            Some((_, length)) => {
                total = total.saturating_sub(*length).saturating_add(value.len());
                *length = value.len();
            }
            None => {
                distinct.insert_unique(hash, (name, value.len()), |(it, _)| hasher.hash_one(it));
                total = total.saturating_add(name.len()).saturating_add(value.len());
            }
        }
        if counted(distinct.len(), total) > XATTRS_MAX {
            return Err(Reason::Xattrs);
        }
    }
    Ok(())
}

impl Directory {
    /// Returns the directory of `path` and the name in it. The directory of the previous line is cached, because most
    /// entries are in or near that directory.
    fn resolve_parent<'a>(
        &mut self,
        builder: &Builder,
        links: &Links,
        path: &'a [u8],
    ) -> Result<(InodeId, &'a [u8]), Reason> {
        let (directory, name) = match memchr::memrchr(b'/', path) {
            Some(at) => (
                path.get(..at).unwrap_or_default(),
                path.get(at.saturating_add(1)..).unwrap_or_default(),
            ),
            None => (&b""[..], path),
        };
        if directory != self.path {
            self.enter(builder, links, path, directory)?;
        }
        let parent = self.chain.last().map_or(InodeId::ROOT, |(_, inode)| *inode);
        Ok((parent, name))
    }

    fn enter(
        &mut self,
        builder: &Builder,
        links: &Links,
        path: &[u8],
        directory: &[u8],
    ) -> Result<(), Reason> {
        let same = self.path.iter().zip(directory).take_while(|(a, b)| a == b).count();
        let is_above =
            |length: usize| length <= same && matches!(directory.get(length), None | Some(b'/'));
        while self.chain.last().is_some_and(|(length, _)| !is_above(*length)) {
            self.chain.pop();
        }
        let (mut length, mut inode) = self.chain.last().copied().unwrap_or((0, InodeId::ROOT));
        loop {
            let rest = directory.get(length..).unwrap_or_default();
            let slashes = rest.iter().take_while(|byte| **byte == b'/').count();
            let rest = rest.get(slashes..).unwrap_or_default();
            let end = memchr::memchr(b'/', rest).unwrap_or(rest.len());
            let name = rest.get(..end).unwrap_or_default();
            if name.is_empty() {
                break;
            }
            inode = match builder.lookup(inode, name) {
                Some(found) if builder.is_directory(found) => found,
                None if links.index_of(inode, name).is_none() => {
                    return Err(Reason::NoParent(path.to_vec()));
                }
                _ => return Err(Reason::ParentNotDirectory(path.to_vec())),
            };
            length = length.saturating_add(slashes).saturating_add(end);
            self.chain.push((length, inode));
        }
        self.path.clear();
        self.path.extend_from_slice(directory);
        Ok(())
    }
}
