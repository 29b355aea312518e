//! The reader, which parses headers and returns events.

mod entry;

use std::io::Read;

use super::content::{Content, Cursor};
use super::error::{Limit, TarCorruption, TarError};
use super::header::{Header, number, text};
use super::pax::{EXTENSION_MAX, GLOBAL_MAX, Merged, PaxError, Records};
use super::stream::Stream;
use super::xattrs::{Collector, EntryXattrs, XattrRecords};
use super::{BLOCK, Segment, padding, wide};
use crate::tree::{Metadata, Timestamp};

/// Number of verbatim bytes after which they are returned without waiting for an entry.
const VERBATIM_MAX: usize = 64 << 10;

/// Reads a tar from its first byte to its last.
///
/// Memory is bounded for every tar: a buffer of 256 KiB, and for the current entry usually less than 1 KiB and at
/// most about 10 MiB (see [`EXTENSION_MAX`] and [`SPARSE_REGIONS_MAX`](super::SPARSE_REGIONS_MAX)).
#[derive(Debug)]
pub struct Reader<R> {
    stream: Stream<R>,
    state: State,
    /// Whether the last step returned verbatim bytes, which can now be released.
    was_verbatim: bool,
    global: Records,
    local: Records,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    entry: Current,
    cursor: Cursor,
    /// The first unusual entry.
    unusual: Option<(Vec<u8>, UnusualTar)>,
}

/// The state of the reader, which determines the next step.
#[derive(Debug, Clone, Copy)]
enum State {
    Header,
    /// An entry whose header was returned. After its content, `skip` bytes follow that are not content.
    Entry {
        skip: u64,
        padding: u64,
    },
    Content {
        skip: u64,
        padding: u64,
    },
    /// Bytes that belong to no file.
    Skip {
        left: u64,
        padding: u64,
    },
    /// The bytes after the archive's end.
    Trailing,
    End,
    Failed,
}

/// The current entry.
#[derive(Debug, Default)]
struct Current {
    /// The path as in the tar, for messages.
    raw: Vec<u8>,
    path: Vec<u8>,
    target: Vec<u8>,
    kind: CurrentKind,
    permissions: u16,
    uid: u32,
    gid: u32,
    mtime: Timestamp,
    size: u64,
    segments: Vec<Segment>,
    xattrs: Collector,
}

#[derive(Debug, Clone, Copy, Default)]
enum CurrentKind {
    #[default]
    Regular,
    Hardlink,
    Symlink,
    CharDevice(u64),
    BlockDevice(u64),
    Directory,
    Fifo,
}

/// A part of the tar, in order. The verbatim bytes and the segments of entries together are the whole tar.
#[derive(Debug)]
pub enum Event<'a, R> {
    /// Bytes outside of file contents: headers, padding, and everything after the end. Usually less than 64 KiB, and
    /// at most about 1 MiB.
    Verbatim(&'a [u8]),
    /// An entry. All bytes before its content have been returned.
    Entry(Entry<'a, R>),
}

/// A file of the layer.
#[derive(Debug)]
pub struct Entry<'a, R> {
    /// Path of the file: names with single slashes between them; empty for the root.
    pub path: &'a [u8],
    /// Type of the file.
    pub kind: Kind<'a>,
    /// Permissions, owner and modification time.
    pub metadata: Metadata,
    /// Length of the content in bytes, including holes, up to 2^63 - 1. It is 0 except for regular files.
    pub size: u64,
    /// Xattrs, in byte order of the names.
    pub xattrs: EntryXattrs<'a>,
    /// A line of an ACL that is missing from the xattrs, because the line names a user or group without a number, as
    /// GNU tar writes it. Only the system on which the tar was made knows the number.
    pub lost_acl: Option<&'a [u8]>,
    /// The parts of the content that are in the tar, in ascending order: one segment for a file that is not sparse,
    /// none for an empty file. They are contiguous in the tar.
    pub segments: &'a [Segment],
    /// Offset of the first segment in the tar, in bytes.
    pub position: u64,
    /// The content, which must be read before the next event.
    pub content: Content<'a, R>,
}

/// The type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind<'a> {
    /// A regular file.
    Regular,
    /// Another name for the file at this path, which is normalised like the paths of entries.
    ///
    /// Some writers repeat the file's content after the header. The reader returns that content as verbatim bytes. The
    /// stated size does not show whether there is content, because other writers state a size but write no content. So
    /// the reader assumes content if neither a header nor a block of zeros follows. Go never expects content, so it
    /// fails on such tars; it reads all other tars in the same way.
    Hardlink(&'a [u8]),
    /// A symbolic link with its target, which is unchanged and not empty.
    Symlink(&'a [u8]),
    /// A character device, with its number as in `st_rdev`.
    CharDevice(u64),
    /// A block device, with its number as in `st_rdev`.
    BlockDevice(u64),
    /// A named pipe.
    Fifo,
    /// A directory.
    Directory,
}

enum Step {
    Verbatim,
    Entry,
    End,
}

/// A feature of a tar that readers treat differently, so that they make different trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnusualTar {
    /// A pax header for all following entries changes an entry.
    GlobalRecords,
    /// An entry has a name from GNU tar and another one in a pax record, or two targets.
    TwoNames,
    /// The mode has bits beyond 7777 that are not those of the entry's type.
    Mode,
    /// A record of libarchive has file capabilities, and no record of star has the same.
    LibarchiveCapability,
    /// A name that ends with a slash makes a directory of an entry whose type is that of a file.
    Slash,
    /// An entry without content states a size.
    Size,
    /// A device in a tar without a magic number, which has no field for the number.
    OldDevice,
    /// A directory of an incremental GNU archive.
    Incremental,
    /// The label of a GNU volume.
    Label,
}

impl std::fmt::Display for UnusualTar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::GlobalRecords => "has a pax header for all following entries",
            Self::TwoNames => "has a long name of GNU tar and another one in a pax header",
            Self::Mode => "has a mode with other bits than permissions and its type",
            Self::LibarchiveCapability => "has capabilities only in a record of libarchive",
            Self::Slash => "is a directory only because its name ends with a slash",
            Self::Size => "has no content, but states a size",
            Self::OldDevice => "is a device in a tar without a magic number",
            Self::Incremental => "is a directory of an incremental archive (type D)",
            Self::Label => "is the label of a volume (type V)",
        })
    }
}

/// The kind of a header that was parsed.
enum Parsed {
    /// A header that extends the next entry, or that is not for an entry.
    Extension,
    Entry,
    End,
}

impl<R: Read> Reader<R> {
    /// Creates a reader at the start of a tar. All bytes of `source` belong to the tar, even those after its end, and
    /// the reader reads ahead.
    pub fn new(source: R) -> Self {
        Self {
            stream: Stream::new(source),
            state: State::Header,
            was_verbatim: false,
            global: Records::default(),
            local: Records::default(),
            long_name: None,
            long_link: None,
            entry: Current::default(),
            cursor: Cursor::default(),
            unusual: None,
        }
    }

    /// Restricts the xattrs to those of `xattrs`. Records of other xattrs are ignored, even if they are invalid.
    #[must_use]
    pub const fn taking(mut self, xattrs: XattrRecords) -> Self {
        self.global.xattrs.wanted = xattrs;
        self.local.xattrs.wanted = xattrs;
        self
    }

    /// Returns the next event, or `None` at the end of the stream. Unread content of the last entry is skipped.
    ///
    /// # Errors
    /// [`TarError`]. After [`TarError::Unsupported`] the next call continues after that entry, whose bytes are
    /// verbatim.
    pub fn next_event(&mut self) -> Result<Option<Event<'_, R>>, TarError> {
        match self.step()? {
            Step::Verbatim => Ok(Some(Event::Verbatim(self.stream.waiting_bytes()))),
            Step::Entry => Ok(Some(Event::Entry(self.lend()))),
            Step::End => Ok(None),
        }
    }

    /// Returns the next entry, like [`Reader::next_event`] without the verbatim bytes.
    ///
    /// # Errors
    /// As [`Reader::next_event`].
    pub fn next_entry(&mut self) -> Result<Option<Entry<'_, R>>, TarError> {
        loop {
            match self.step()? {
                Step::Verbatim => {}
                Step::Entry => return Ok(Some(self.lend())),
                Step::End => return Ok(None),
            }
        }
    }

    /// Returns the first entry so far that other readers may treat differently, by its name in the tar.
    pub fn unusual(&self) -> Option<(&[u8], UnusualTar)> {
        self.unusual.as_ref().map(|(entry, what)| (&entry[..], *what))
    }

    /// Notes an unusual entry.
    fn note(&mut self, entry: &[u8], what: UnusualTar) {
        if self.unusual.is_none() {
            self.unusual = Some((entry.to_vec(), what));
        }
    }

    /// Returns the number of bytes of the tar in the events so far.
    pub const fn position(&self) -> u64 {
        self.stream.offset()
    }

    fn lend(&mut self) -> Entry<'_, R> {
        let Current { raw, path, target, kind, permissions, uid, gid, mtime, size, .. } =
            &self.entry;
        Entry {
            path,
            kind: match *kind {
                CurrentKind::Regular => Kind::Regular,
                CurrentKind::Hardlink => Kind::Hardlink(target),
                CurrentKind::Symlink => Kind::Symlink(target),
                CurrentKind::CharDevice(device) => Kind::CharDevice(device),
                CurrentKind::BlockDevice(device) => Kind::BlockDevice(device),
                CurrentKind::Directory => Kind::Directory,
                CurrentKind::Fifo => Kind::Fifo,
            },
            metadata: Metadata { permissions: *permissions, uid: *uid, gid: *gid, mtime: *mtime },
            size: *size,
            xattrs: self.entry.xattrs.view(),
            lost_acl: self.entry.xattrs.nameless(),
            segments: &self.entry.segments,
            position: self.stream.offset(),
            content: Content {
                stream: &mut self.stream,
                cursor: &mut self.cursor,
                segments: &self.entry.segments,
                entry: raw,
            },
        }
    }

    fn step(&mut self) -> Result<Step, TarError> {
        if std::mem::take(&mut self.was_verbatim) {
            self.stream.handed_out();
        }
        let step = self.advance();
        self.was_verbatim = matches!(step, Ok(Step::Verbatim));
        if matches!(&step, Err(error) if !matches!(error, TarError::Unsupported { .. })) {
            self.state = State::Failed;
        }
        step
    }

    fn advance(&mut self) -> Result<Step, TarError> {
        loop {
            match self.state {
                State::Header => match self.header()? {
                    Parsed::Extension if self.stream.waiting() < VERBATIM_MAX => {}
                    Parsed::Extension | Parsed::Entry => return Ok(Step::Verbatim),
                    Parsed::End => self.state = State::Trailing,
                },
                State::Entry { skip, padding } => {
                    self.state = State::Content { skip, padding };
                    return Ok(Step::Entry);
                }
                State::Content { skip, padding } => {
                    self.lend().content.skip()?;
                    self.state = State::Skip { left: skip, padding };
                }
                State::Skip { left: 0, padding } => {
                    self.stream.padding(padding)?;
                    self.state = State::Header;
                }
                State::Skip { left, padding } => {
                    let taken = wide(self.stream.verbatim(left)?.len());
                    if taken == 0 {
                        return Err(self.stream.truncated(&self.entry.raw, super::narrow(left)));
                    }
                    self.state = State::Skip { left: left - taken, padding };
                    if self.stream.waiting() >= VERBATIM_MAX {
                        return Ok(Step::Verbatim);
                    }
                }
                State::Trailing => {
                    if self.stream.verbatim(u64::MAX)?.is_empty() {
                        self.state = State::End;
                    }
                    if self.stream.waiting() > 0 {
                        return Ok(Step::Verbatim);
                    }
                }
                State::End => return Ok(Step::End),
                State::Failed => return Err(TarError::Stopped),
            }
        }
    }

    /// Reads a header, and the data after it up to its content.
    fn header(&mut self) -> Result<Parsed, TarError> {
        let at = self.stream.offset();
        let Some(block) = self.stream.block()? else {
            return self.end(at);
        };
        if is_zero(&block) {
            let next = self.stream.peek(BLOCK)?;
            // The second block may be cut short or missing, because it holds no data.
            if !is_zero(next) {
                return Err(corrupt(at, &[], TarCorruption::LoneZeroBlock));
            }
            return self.end(at);
        }
        let header = Header::check(&block).map_err(|kind| corrupt(at, &[], kind))?;
        let raw = header.raw;
        let size = match number(&raw.size) {
            Some(size) => u64::try_from(size).ok(),
            None => None,
        };
        let Some(size) = size else {
            return Err(bad_number(at, text(&raw.name), "size", &raw.size));
        };
        match raw.typeflag {
            // Solaris wrote `X` before POSIX settled on `x`.
            b'x' | b'X' => {
                self.local.clear();
                self.pax(at, size, &header, false)?;
                Ok(Parsed::Extension)
            }
            b'g' => {
                self.pax(at, size, &header, true)?;
                Ok(Parsed::Extension)
            }
            b'L' => {
                self.long_name = Some(self.long(at, size, "a long name", &header)?);
                Ok(Parsed::Extension)
            }
            b'K' => {
                self.long_link = Some(self.long(at, size, "a long link target", &header)?);
                Ok(Parsed::Extension)
            }
            // The label of a GNU tar volume is not a file. Go treats it as a file, to which preceding extensions then
            // apply.
            b'V' => {
                self.note(text(&raw.name), UnusualTar::Label);
                self.forget();
                self.state = State::Skip { left: size, padding: padding(size) };
                Ok(Parsed::Extension)
            }
            _ => {
                self.entry(at, size, &header)?;
                self.forget();
                Ok(Parsed::Entry)
            }
        }
    }

    /// Removes the extensions, which apply to one entry only.
    fn forget(&mut self) {
        self.local.clear();
        self.long_name = None;
        self.long_link = None;
    }

    fn end(&self, at: u64) -> Result<Parsed, TarError> {
        if self.long_name.is_some() || self.long_link.is_some() || !self.local.is_empty() {
            return Err(corrupt(at, &[], TarCorruption::Dangling));
        }
        Ok(Parsed::End)
    }

    fn pax(
        &mut self,
        at: u64,
        size: u64,
        header: &Header<'_>,
        global: bool,
    ) -> Result<(), TarError> {
        let entry = text(&header.raw.name);
        let records = if global { &mut self.global } else { &mut self.local };
        let from = records.text().len();
        let total = wide(from).saturating_add(size);
        let limit = if global && total > GLOBAL_MAX {
            Some(Limit::Global(total))
        } else if total > EXTENSION_MAX {
            Some(Limit::Extension { what: "an extended header", size, at })
        } else {
            None
        };
        if let Some(limit) = limit {
            return Err(TarError::Limit { entry: entry.to_vec(), limit });
        }
        self.stream.collect(size, entry, records.text())?;
        self.stream.padding(padding(size))?;
        let Err(error) = records.parse(from) else { return Ok(()) };
        let entry = if global { entry.to_vec() } else { self.extended(entry) };
        Err(match error {
            PaxError::Corrupt(kind) => corrupt(at, &entry, kind),
            PaxError::Limit(limit) => TarError::Limit { entry, limit },
        })
    }

    /// Returns the name of the entry that the extended header before it describes, for an error message. With many
    /// writers, all such headers have the same name `own`, for example `././@PaxHeader` with Python.
    fn extended(&mut self, own: &[u8]) -> Vec<u8> {
        let stated = Merged { local: &self.local, global: &self.global };
        let stated = stated.sparse_name().or(self.long_name.as_deref()).or_else(|| stated.path());
        if let Some(name) = stated.filter(|name| !name.is_empty()) {
            return name.to_vec();
        }
        let next = self.stream.peek(BLOCK).ok().and_then(|next| next.first_chunk());
        let next = next.and_then(|block| Header::check(block).ok());
        let is_entry =
            |it: &Header<'_>| !matches!(it.raw.typeflag, b'x' | b'X' | b'g' | b'L' | b'K');
        let Some(next) = next.filter(is_entry) else { return own.to_vec() };
        let mut name = Vec::new();
        next.push_name(&mut name);
        name
    }

    /// Reads a name or target that is too long for the header of the next entry, from a special entry of GNU tar.
    fn long(
        &mut self,
        at: u64,
        size: u64,
        what: &'static str,
        header: &Header<'_>,
    ) -> Result<Vec<u8>, TarError> {
        let entry = text(&header.raw.name);
        if size > EXTENSION_MAX {
            let limit = Limit::Extension { what, size, at };
            return Err(TarError::Limit { entry: entry.to_vec(), limit });
        }
        let mut name = Vec::new();
        self.stream.collect(size, entry, &mut name)?;
        self.stream.padding(padding(size))?;
        name.truncate(text(&name).len());
        Ok(name)
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

fn corrupt(offset: u64, entry: &[u8], kind: TarCorruption) -> TarError {
    TarError::Corrupt { offset, entry: entry.to_vec(), kind }
}

fn bad_number(offset: u64, entry: &[u8], field: &'static str, value: &[u8]) -> TarError {
    corrupt(offset, entry, TarCorruption::Number { field, value: value.to_vec() })
}
