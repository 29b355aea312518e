//! Tables of contents: which bytes of a blob are which bytes of its files.
//!
//! They come from the maker of the layer, or from an attacker. They are not trusted: the tar must have the right diff
//! id, or it is thrown away. So parsing must only end, yield no offset outside the blob, and use no more memory than
//! the table itself takes.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufReader, Read};
use std::ops::Range;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use store::{ChunkKey, Digest, DigestHasher};

/// The most entries that are read: as many as an import takes by default has eight times this.
pub(super) const ENTRIES_MAX: usize = 1 << 20;

/// Which of the two formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// gzip members; what follows a file's last chunk is in the same member.
    Estargz,
    /// zstd frames; what is between files is in frames of its own.
    ZstdChunked,
}

/// Some bytes of a file, and where they are in the blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Of the blob. For eStargz the last piece of a file goes on to the next file's first.
    pub(super) blob: Range<u64>,
    /// Their SHA-256, if the table has it.
    pub(super) key: Option<ChunkKey>,
    /// Of the file.
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// A regular file that is not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) size: u64,
    /// Which pieces it has.
    pub(super) pieces: Range<usize>,
    /// What follows it in the tar, up to the next such file's content. `None` for the last.
    pub(super) gap: Option<ChunkKey>,
}

/// What a table says of the blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Contents {
    /// What precedes the first file's content.
    pub(super) first: ChunkKey,
    /// At least one.
    pub(super) files: Vec<File>,
    /// In the order of the blob; they do not overlap and are below `end`.
    pub(super) pieces: Vec<Piece>,
    /// Where in the blob the files end.
    pub(super) end: u64,
}

impl Contents {
    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        memory(&self.files, &self.pieces)
    }
}

fn memory(files: &[File], pieces: &[Piece]) -> usize {
    size_of_val(files) + size_of_val(pieces)
}

/// Reads a table whose files end at `end` of the blob, as far as it takes at most `room` bytes of memory. It is not in
/// memory as it is itself.
pub(super) fn parse(
    json: impl Read,
    room: usize,
    format: Format,
    end: u64,
) -> Result<Contents, serde_json::Error> {
    let mut builder = Builder::new(format, end, room);
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(json));
    Table(&mut builder).deserialize(&mut deserializer)?;
    deserializer.end()?;
    builder.finish().map_err(de::Error::custom)
}

/// One entry. Fields that tell the tar header are in the key of the gap that the header is in.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    name: String,
    link_name: String,
    mode: i64,
    size: u64,
    uid: i64,
    gid: i64,
    user_name: String,
    group_name: String,
    modtime: String,
    accesstime: String,
    changetime: String,
    dev_major: i64,
    dev_minor: i64,
    xattrs: BTreeMap<String, String>,
    digest: String,
    offset: u64,
    end_offset: u64,
    chunk_size: u64,
    chunk_offset: u64,
    chunk_digest: String,
    inner_offset: u64,
}

/// The document.
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

/// The entries, one at a time: they are not kept.
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
        while let Some(entry) = sequence.next_element::<Entry>()? {
            count += 1;
            if count > ENTRIES_MAX {
                return Err(de::Error::custom("it has too many entries"));
            }
            self.0.entry(&entry).map_err(|why| {
                de::Error::custom(format_args!("{why}: \"{}\"", entry.name.escape_debug()))
            })?;
        }
        Ok(())
    }
}

/// What is known of the tar's bytes between two files, hashed.
///
/// The table has all that a tar header has but the finer points (its format, other records of PAX). Where the same maker
/// writes the same entries again, it writes the same bytes, and where not, the diff id tells.
struct GapHash(DigestHasher);

impl GapHash {
    /// Begins with what is before the gap: its size tells the padding.
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

    fn entry(&mut self, entry: &Entry, user: &str, group: &str) {
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

/// A file whose chunks are being told.
struct Open {
    name: String,
    size: u64,
    /// Bytes that chunks were told of.
    covered: u64,
    first: usize,
    /// Where it ends in the blob, if the format says so.
    end: Option<u64>,
    /// Of all of it.
    digest: Option<ChunkKey>,
}

struct Builder {
    format: Format,
    end: u64,
    first: Option<ChunkKey>,
    files: Vec<File>,
    pieces: Vec<Piece>,
    open: Option<Open>,
    gap: GapHash,
    /// The most bytes of files and pieces.
    room: usize,
    /// eStargz has a name only where it is another one than the last for that id.
    users: HashMap<i64, String>,
    groups: HashMap<i64, String>,
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
        }
    }

    fn entry(&mut self, entry: &Entry) -> Result<(), &'static str> {
        if entry.inner_offset != 0 {
            return Err("several files share a gzip member");
        }
        if entry.kind == "chunk" {
            return match &self.open {
                Some(open) if open.name == entry.name => self.piece(entry),
                _ => Err("a chunk without a file"),
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
        match entry.kind.as_str() {
            "reg" if entry.size > 0 => {}
            "reg" | "dir" | "symlink" | "hardlink" | "char" | "block" | "fifo" => return Ok(()),
            _ => return Err("an entry of an unknown type"),
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

    fn piece(&mut self, entry: &Entry) -> Result<(), &'static str> {
        let open = self.open.as_mut().ok_or("a chunk without a file")?;
        let start = entry.offset;
        // Where the last one ends is known now, unless the format has said so.
        if let Some(last) = self.pieces.last_mut() {
            if start <= last.blob.start || start < last.blob.end {
                return Err("chunks overlap");
            }
            if self.format == Format::Estargz || self.pieces.len() > open.first {
                self.pieces.last_mut().expect("it was there").blob.end = start;
            }
        }
        if start == 0 || start >= self.end {
            return Err("a chunk is outside the part of the blob with files");
        }
        if entry.chunk_offset != open.covered {
            return Err("chunks are not consecutive");
        }
        let left = open.size - open.covered;
        let length = if entry.chunk_size == 0 { left } else { entry.chunk_size };
        if length == 0 || length > left {
            return Err("chunks have more bytes than the file");
        }
        let whole = open.digest.filter(|_| length == open.size);
        let key = if entry.chunk_digest.is_empty() { whole } else { key(&entry.chunk_digest) };
        self.pieces.push(Piece { blob: start..start, key, offset: open.covered, length });
        open.covered += length;
        Ok(())
    }

    /// The file's last chunk was told.
    fn close(&mut self) -> Result<(), &'static str> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.covered != open.size {
            return Err("chunks have fewer bytes than the file");
        }
        if let Some(end) = open.end {
            let last = self.pieces.last_mut().ok_or("a file without chunks")?;
            if end <= last.blob.start || end > self.end {
                return Err("a file ends outside the part of the blob with files");
            }
            last.blob.end = end;
        }
        if memory(&self.files, &self.pieces) > self.room {
            return Err("it has more files and chunks than its size allows");
        }
        let pieces = open.first..self.pieces.len();
        self.files.push(File { size: open.size, pieces, gap: None });
        Ok(())
    }

    fn finish(mut self) -> Result<Contents, &'static str> {
        self.close()?;
        if self.format == Format::Estargz
            && let Some(last) = self.pieces.last_mut()
        {
            last.blob.end = self.end;
        }
        let first = self.first.ok_or("it has no files")?;
        self.files.shrink_to_fit();
        self.pieces.shrink_to_fit();
        Ok(Contents { first, files: self.files, pieces: self.pieces, end: self.end })
    }
}

/// A digest, if it is a SHA-256.
fn key(digest: &str) -> Option<ChunkKey> {
    let digest: Digest = digest.strip_prefix("sha256:").and(digest.parse().ok())?;
    Some(ChunkKey(digest.as_bytes().try_into().ok()?))
}

/// Reads `bytes` as a table of either format, for fuzzers: what is accepted holds together.
pub(super) fn exercise(bytes: &[u8]) {
    const END: u64 = 1 << 40;
    for format in [Format::Estargz, Format::ZstdChunked] {
        let Ok(contents) = parse(bytes, usize::MAX, format, END) else { continue };
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
