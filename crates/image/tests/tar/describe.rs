//! Describes the content of a tar as text that tests compare.

use std::io::Read;

use image::tar::recipe::{self, Content, TarReader};
use image::tar::{Event, Kind, Reader, TarError};
use image::verity::{Algorithm, ObjectId, digest};
use sha2::{Digest as _, Sha256};

/// An owned entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Record {
    pub(crate) path: Vec<u8>,
    /// File type as in `ls -l`, or `h` for a hard link.
    pub(crate) kind: char,
    pub(crate) target: Vec<u8>,
    pub(crate) device: u64,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
    pub(crate) size: u64,
    pub(crate) content: Vec<u8>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Record {
    /// Returns one line without the xattrs, with text in hex, so that other programs can print the same.
    pub(crate) fn line(&self) -> String {
        let digest = if self.kind == '-' { hex(&Sha256::digest(&self.content)) } else { "".into() };
        format!(
            "{} {} {} {} {:o} {} {} {}.{:09} {} {digest}",
            self.kind,
            hex(&self.path),
            hex(&self.target),
            self.device,
            self.mode,
            self.uid,
            self.gid,
            self.seconds,
            self.nanoseconds,
            self.size,
        )
    }

    /// Returns one readable line without default values.
    pub(crate) fn short(&self) -> String {
        use std::fmt::Write as _;
        let mut line = format!("{} {}", self.kind, self.path.escape_ascii());
        if !self.target.is_empty() {
            write!(line, " -> {}", self.target.escape_ascii()).unwrap();
        }
        if self.device != 0 {
            write!(line, " device {:#x}", self.device).unwrap();
        }
        if self.mode != 0o644 {
            write!(line, " {:o}", self.mode).unwrap();
        }
        if (self.uid, self.gid) != (0, 0) {
            write!(line, " {}:{}", self.uid, self.gid).unwrap();
        }
        if (self.seconds, self.nanoseconds) != (0, 0) {
            write!(line, " {}.{:09}", self.seconds, self.nanoseconds).unwrap();
        }
        if self.size > 100 {
            write!(line, " {} bytes", self.size).unwrap();
        } else if self.size > 0 {
            write!(line, " \"{}\"", self.content.escape_ascii()).unwrap();
        }
        for (name, value) in &self.xattrs {
            write!(line, " {}={}", name.escape_ascii(), value.escape_ascii()).unwrap();
        }
        line
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a tar, and checks that its recipes give the same tar: a recipe in which every file is an object, and one in
/// which every file is inline.
#[track_caller]
pub(crate) fn read(tar: &[u8]) -> Result<Vec<Record>, TarError> {
    let (records, objects, recipes) = take_apart(tar, tar)?;
    for recipe in recipes {
        check_rebuild(&recipe, &objects, tar);
    }
    Ok(records)
}

#[track_caller]
pub(crate) fn check_rebuild(recipe: &[u8], objects: &[(ObjectId, Vec<u8>)], tar: &[u8]) {
    let mut found = Vec::new();
    let contents = |object: &ObjectId, into: &mut [u8], offset: u64| {
        let content = &objects.iter().find(|(id, _)| id == object).unwrap().1;
        (&content[usize::try_from(offset).unwrap()..]).read(into)
    };
    let length = TarReader::new(recipe, contents).unwrap().read_to_end(&mut found);
    assert_eq!(length.unwrap(), tar.len());
    assert!(found == tar, "the recipe gives another tar");
}

pub(crate) type Objects = Vec<(ObjectId, Vec<u8>)>;

/// The parts of a tar: entries, objects, and two recipes.
pub(crate) type Parts = (Vec<Record>, Objects, [Vec<u8>; 2]);

/// Splits a tar into entries, objects, and two recipes: one with references to the objects, one without.
pub(crate) fn take_apart(source: impl Read, tar: &[u8]) -> Result<Parts, TarError> {
    let mut reader = Reader::new(source);
    let mut records = Vec::new();
    let mut objects = Vec::new();
    let mut whole = recipe::Writer::new(Vec::new(), Algorithm::Sha256).unwrap();
    let mut inline = recipe::Writer::new(Vec::new(), Algorithm::Sha512).unwrap();
    loop {
        match reader.next_event() {
            Ok(None) => break,
            Ok(Some(Event::Verbatim(bytes))) => {
                whole.verbatim(bytes).unwrap();
                inline.verbatim(bytes).unwrap();
            }
            Ok(Some(Event::Entry(mut entry))) => {
                let mut content = Vec::new();
                if entry.size < 1 << 30 {
                    std::io::copy(&mut entry.content, &mut content)
                        .map_err(|error| error.downcast::<TarError>().unwrap())?;
                    assert_eq!(content.len() as u64, entry.size);
                }
                let mut packed = usize::try_from(entry.position).unwrap();
                for segment in entry.segments {
                    let length = usize::try_from(segment.length).unwrap();
                    let start = usize::try_from(segment.offset).unwrap();
                    assert_eq!(tar[packed..packed + length], content[start..start + length]);
                    packed += length;
                }
                let id = ObjectId::new(digest(Algorithm::Sha256, &content));
                whole.content(entry.segments, Content::Object(&id)).unwrap();
                inline.content(entry.segments, Content::Inline(&content)).unwrap();
                let (kind, target, device) = match entry.kind {
                    Kind::Regular => ('-', &b""[..], 0),
                    Kind::Directory => ('d', &b""[..], 0),
                    Kind::Hardlink(target) => ('h', target, 0),
                    Kind::Symlink(target) => ('l', target, 0),
                    Kind::CharDevice(device) => ('c', &b""[..], device),
                    Kind::BlockDevice(device) => ('b', &b""[..], device),
                    Kind::Fifo => ('p', &b""[..], 0),
                };
                objects.push((id, content.clone()));
                records.push(Record {
                    path: entry.path.to_vec(),
                    kind,
                    target: target.to_vec(),
                    device,
                    mode: entry.metadata.permissions,
                    uid: entry.metadata.uid,
                    gid: entry.metadata.gid,
                    seconds: entry.metadata.mtime.seconds,
                    nanoseconds: entry.metadata.mtime.nanoseconds,
                    size: entry.size,
                    content,
                    xattrs: entry
                        .xattrs
                        .map(|(name, value)| (name.to_vec(), value.to_vec()))
                        .collect(),
                });
            }
            Err(error) => return Err(error),
        }
    }
    Ok((records, objects, [whole.finish().unwrap(), inline.finish().unwrap()]))
}
