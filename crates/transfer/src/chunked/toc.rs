//! Tables of contents, which map bytes of a blob to bytes of its files.
//!
//! A table comes from the maker of the layer, or from an attacker, and is not trusted: the tar is discarded unless it
//! has the right diff id, and a lazy image that was made from tables stays unproven until then. So parsing only has to
//! terminate, to return no offset outside the blob, and to use no more memory than the table itself takes.

use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::ops::Range;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use store::{ChunkKey, Digest, DigestHasher};

use super::entry::TocEntry;
use super::tree::{TocTree, TreeFlaw};

/// Maximum number of entries. The default limit of an import is eight times as high.
pub(super) const ENTRIES_MAX: usize = 1 << 20;

/// Number of characters of an entry's name in messages.
const NAME_SHOWN: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// gzip members. The tar bytes after a file's last chunk are in the same member.
    Estargz,
    /// zstd frames. The tar bytes between files are in separate frames.
    ZstdChunked,
}

/// Some bytes of a file, and their location in the blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TocPiece {
    /// Range in the blob. In eStargz, the last piece of a file extends to the next file's first piece.
    pub(crate) blob: Range<u64>,
    /// SHA-256 of the bytes, if the table contains it.
    pub(crate) key: Option<ChunkKey>,
    /// Offset in the file, in bytes.
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A regular file that is not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) size: u64,
    /// Range of the file's pieces in [`Contents::pieces`].
    pub(crate) pieces: Range<usize>,
    /// Key of the tar bytes between this file's content and the next such file's. `None` for the last file.
    pub(super) gap: Option<ChunkKey>,
}

/// The contents of a blob, as its table describes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    /// Key of the tar bytes before the first file's content.
    pub(super) first: ChunkKey,
    /// At least one file, unless a tree was wanted.
    pub(crate) files: Vec<File>,
    /// Pieces in the order of the blob. They do not overlap, and end at or before `end`.
    pub(crate) pieces: Vec<TocPiece>,
    /// Offset in the blob at which the files end.
    pub(crate) end: u64,
}

impl Contents {
    /// Returns the memory in use, in bytes.
    pub(super) fn memory(&self) -> usize {
        memory(&self.files, &self.pieces)
    }
}

fn memory(files: &[File], pieces: &[TocPiece]) -> usize {
    size_of_val(files) + size_of_val(pieces)
}

/// Parses a table whose files end at offset `end` of the blob. Fails if the result takes more than `room` bytes of
/// memory. The JSON is parsed as a stream, so it is never in memory as a whole. The entries are added to `tree`, if one
/// is given.
pub(super) fn parse(
    json: impl Read,
    room: usize,
    format: Format,
    end: u64,
    tree: Option<TocTree>,
) -> Result<(Contents, Option<TocTree>), serde_json::Error> {
    let mut builder = Builder { tree, ..Builder::new(format, end, room) };
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(json));
    Table(&mut builder).deserialize(&mut deserializer)?;
    deserializer.end()?;
    builder.finish().map_err(de::Error::custom)
}

/// Parses the document.
struct Table<'b>(&'b mut Builder);

impl<'de> DeserializeSeed<'de> for Table<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Table<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a table of contents")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (mut version, mut entries) = (None, false);
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "version" => version = Some(map.next_value::<u64>()?),
                "entries" if !entries => {
                    map.next_value_seed(Entries(self.0))?;
                    entries = true;
                }
                "entries" => return Err(de::Error::custom("it has two lists of entries")),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        match version {
            Some(1) => Ok(()),
            _ => Err(de::Error::custom("it is not of version 1")),
        }
    }
}

/// Parses the entries one at a time, without keeping them.
struct Entries<'b>(&'b mut Builder);

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        let mut count = 0;
        while let Some(entry) = sequence.next_element::<TocEntry>()? {
            count += 1;
            if count > ENTRIES_MAX {
                return Err(de::Error::custom("it has too many entries"));
            }
            self.0.entry(&entry).map_err(|why| {
                // A hostile name may have megabytes.
                let name: String = entry.name.chars().take(NAME_SHOWN).collect();
                de::Error::custom(format_args!("{why}: \"{}\"", name.escape_debug()))
            })?;
        }
        Ok(())
    }
}

/// A hash of the metadata that describes the tar's bytes between two files.
///
/// The table has all fields of a tar header except details (its format, other PAX records). If the same tool writes
/// the same entries again, the bytes are the same. If the bytes differ nevertheless, the diff id differs.
struct GapHash(DigestHasher);

impl GapHash {
    /// Starts with the size of the preceding file, because it determines the padding.
    fn new(format: Format, before: u64) -> Self {
        let mut hash = Self(DigestHasher::sha256());
        hash.text(match format {
            Format::Estargz => "gap after a file, estargz",
            Format::ZstdChunked => "gap after a file, zstd:chunked",
        });
        hash.number(before % 512);
        hash
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn entry(&mut self, entry: &TocEntry, user: &str, group: &str) {
        for text in [
            &entry.kind,
            &entry.name,
            &entry.link_name,
            user,
            group,
            &entry.modtime,
            &entry.accesstime,
            &entry.changetime,
        ] {
            self.text(text);
        }
        self.number(entry.size);
        for number in [entry.mode, entry.uid, entry.gid, entry.dev_major, entry.dev_minor] {
            self.number(number.cast_unsigned());
        }
        self.number(entry.xattrs.len() as u64);
        for (name, value) in &entry.xattrs {
            self.text(name);
            self.text(value);
        }
    }

    fn finish(self) -> ChunkKey {
        let digest = self.0.finish();
        ChunkKey(digest.as_bytes().try_into().expect("SHA-256 has 32 bytes"))
    }
}

/// Why a table is not usable. Numbers are bytes.
#[derive(Debug, thiserror::Error)]
enum TocFlaw {
    #[error("several files share a gzip member")]
    SharedMember,
    #[error("a chunk without a file")]
    ChunkWithoutFile,
    #[error("an entry of an unknown type")]
    Type,
    #[error("chunks overlap at {0}")]
    Overlap(u64),
    #[error("a chunk at {start} is outside the part of the blob with files, which ends at {end}")]
    ChunkOutside { start: u64, end: u64 },
    #[error("chunks are not consecutive: {actual} follows {expected}")]
    NotConsecutive { expected: u64, actual: u64 },
    #[error("chunks have more bytes than the file")]
    ChunksTooLong,
    #[error("chunks have {actual} bytes, fewer bytes than the file, {expected}")]
    ChunksTooShort { expected: u64, actual: u64 },
    #[error("a file without chunks")]
    NoChunks,
    #[error("a file ends at {0}, outside the part of the blob with files")]
    FileOutside(u64),
    #[error("it has more files and chunks than its size allows")]
    NoRoom,
    #[error("it has no files")]
    NoFiles,
    #[error(transparent)]
    Tree(#[from] TreeFlaw),
}

/// A file whose chunks are being parsed.
struct Open {
    name: String,
    size: u64,
    /// Number of bytes that the chunks so far cover.
    covered: u64,
    first: usize,
    /// Offset in the blob at which the file ends, if the format has it.
    end: Option<u64>,
    /// SHA-256 of the whole file.
    digest: Option<ChunkKey>,
}

struct Builder {
    format: Format,
    end: u64,
    first: Option<ChunkKey>,
    files: Vec<File>,
    pieces: Vec<TocPiece>,
    open: Option<Open>,
    gap: GapHash,
    /// Maximum memory for files and pieces, in bytes.
    room: usize,
    /// User names by id. eStargz has a name only if it differs from the previous name of the same id.
    users: HashMap<i64, String>,
    groups: HashMap<i64, String>,
    tree: Option<TocTree>,
}

impl Builder {
    fn new(format: Format, end: u64, room: usize) -> Self {
        Self {
            room,
            format,
            end,
            first: None,
            files: Vec::new(),
            pieces: Vec::new(),
            open: None,
            gap: GapHash::new(format, 0),
            users: HashMap::new(),
            groups: HashMap::new(),
            tree: None,
        }
    }

    fn entry(&mut self, entry: &TocEntry) -> Result<(), TocFlaw> {
        if entry.inner_offset != 0 {
            return Err(TocFlaw::SharedMember);
        }
        if entry.kind == "chunk" {
            return match &self.open {
                Some(open) if open.name == entry.name => self.piece(entry),
                _ => Err(TocFlaw::ChunkWithoutFile),
            };
        }
        self.close()?;
        let named = |names: &mut HashMap<i64, String>, id, name: &str| {
            if name.is_empty() {
                return names.get(&id).cloned().unwrap_or_default();
            }
            names.insert(id, name.to_owned());
            name.to_owned()
        };
        let user = named(&mut self.users, entry.uid, &entry.user_name);
        let group = named(&mut self.groups, entry.gid, &entry.group_name);
        self.gap.entry(entry, &user, &group);
        let has_content = entry.kind == "reg" && entry.size > 0;
        if let Some(tree) = &mut self.tree {
            tree.add(entry, has_content.then_some(self.files.len()))?;
            self.check_room()?;
        }
        match entry.kind.as_str() {
            "reg" if entry.size > 0 => {}
            "reg" | "dir" | "symlink" | "hardlink" | "char" | "block" | "fifo" => return Ok(()),
            _ => return Err(TocFlaw::Type),
        }
        let gap = std::mem::replace(&mut self.gap, GapHash::new(self.format, entry.size)).finish();
        match self.files.last_mut() {
            Some(file) => file.gap = Some(gap),
            None => self.first = Some(gap),
        }
        let end = match self.format {
            Format::Estargz => None,
            Format::ZstdChunked => Some(entry.end_offset),
        };
        self.open = Some(Open {
            name: entry.name.clone(),
            size: entry.size,
            covered: 0,
            first: self.pieces.len(),
            end,
            digest: key(&entry.digest),
        });
        self.piece(entry)
    }

    fn piece(&mut self, entry: &TocEntry) -> Result<(), TocFlaw> {
        let open = self.open.as_mut().ok_or(TocFlaw::ChunkWithoutFile)?;
        let start = entry.offset;
        // This chunk begins where the previous chunk ends, unless the format states the ends of chunks.
        if let Some(last) = self.pieces.last_mut() {
            if start <= last.blob.start || start < last.blob.end {
                return Err(TocFlaw::Overlap(start));
            }
            if self.format == Format::Estargz || self.pieces.len() > open.first {
                self.pieces.last_mut().expect("the chunk exists").blob.end = start;
            }
        }
        if start == 0 || start >= self.end {
            return Err(TocFlaw::ChunkOutside { start, end: self.end });
        }
        if entry.chunk_offset != open.covered {
            let (expected, actual) = (open.covered, entry.chunk_offset);
            return Err(TocFlaw::NotConsecutive { expected, actual });
        }
        let left = open.size - open.covered;
        let length = if entry.chunk_size == 0 { left } else { entry.chunk_size };
        if length == 0 || length > left {
            return Err(TocFlaw::ChunksTooLong);
        }
        let whole = open.digest.filter(|_| length == open.size);
        let key = if entry.chunk_digest.is_empty() { whole } else { key(&entry.chunk_digest) };
        self.pieces.push(TocPiece { blob: start..start, key, offset: open.covered, length });
        open.covered += length;
        Ok(())
    }

    /// Finishes the current file after its last chunk.
    fn close(&mut self) -> Result<(), TocFlaw> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.covered != open.size {
            let (expected, actual) = (open.size, open.covered);
            return Err(TocFlaw::ChunksTooShort { expected, actual });
        }
        if let Some(end) = open.end {
            let last = self.pieces.last_mut().ok_or(TocFlaw::NoChunks)?;
            if end <= last.blob.start || end > self.end {
                return Err(TocFlaw::FileOutside(end));
            }
            last.blob.end = end;
        }
        self.check_room()?;
        let pieces = open.first..self.pieces.len();
        self.files.push(File { size: open.size, pieces, gap: None });
        Ok(())
    }

    fn check_room(&self) -> Result<(), TocFlaw> {
        let tree = self.tree.as_ref().map_or(0, TocTree::memory);
        match memory(&self.files, &self.pieces).saturating_add(tree) <= self.room {
            true => Ok(()),
            false => Err(TocFlaw::NoRoom),
        }
    }

    fn finish(mut self) -> Result<(Contents, Option<TocTree>), TocFlaw> {
        self.close()?;
        if self.format == Format::Estargz
            && let Some(last) = self.pieces.last_mut()
        {
            last.blob.end = self.end;
        }
        let first = match self.first {
            Some(first) => first,
            // The layer may consist of directories.
            None if self.tree.is_some() => self.gap.finish(),
            None => return Err(TocFlaw::NoFiles),
        };
        self.files.shrink_to_fit();
        self.pieces.shrink_to_fit();
        let contents = Contents { first, files: self.files, pieces: self.pieces, end: self.end };
        Ok((contents, self.tree))
    }
}

/// Parses a digest. Returns `None` unless it is a SHA-256.
fn key(digest: &str) -> Option<ChunkKey> {
    let digest: Digest = digest.strip_prefix("sha256:").and(digest.parse().ok())?;
    Some(ChunkKey(digest.as_bytes().try_into().ok()?))
}

/// Parses `bytes` as a table of either format, for fuzzers, and asserts that an accepted table is consistent.
pub(super) fn exercise(bytes: &[u8]) {
    const END: u64 = 1 << 40;
    for format in [Format::Estargz, Format::ZstdChunked] {
        let tree = TocTree::new(&Digest::sha256(b""));
        // A table without a tree may be accepted although its tree is refused.
        let with_tree = parse(bytes, usize::MAX, format, END, Some(tree)).map(|it| it.0);
        let contents = match (parse(bytes, usize::MAX, format, END, None), with_tree) {
            (Ok((contents, _)), Ok(same)) => {
                assert_eq!(contents, same);
                contents
            }
            (Ok((contents, _)), Err(_)) => contents,
            // Only layers without files.
            (Err(_), Ok(same)) => {
                assert!(same.files.is_empty());
                continue;
            }
            (Err(_), Err(_)) => continue,
        };
        let mut at = 0;
        for piece in &contents.pieces {
            assert!(at <= piece.blob.start && piece.blob.start < piece.blob.end);
            at = piece.blob.end;
        }
        assert!(at <= END);
        let mut next = 0;
        for file in &contents.files {
            assert_eq!(file.pieces.start, next);
            next = file.pieces.end;
            let pieces = &contents.pieces[file.pieces.clone()];
            let mut covered = 0;
            for piece in pieces {
                assert_eq!(piece.offset, covered);
                covered += piece.length;
            }
            assert_eq!(covered, file.size);
        }
        assert_eq!(next, contents.pieces.len());
        assert!(contents.files.iter().rev().skip(1).all(|file| file.gap.is_some()));
    }
}
