//! An image's root file system as one tar.

use std::fs::File;
use std::io::{self, Read as _, Write};

use image::erofs::read::{Cached, Image, Owners, View, to_tree};
use image::tar::write::{Member, WriteError, Writer};
use image::tar::{Kind, Whiteout, whiteout};
use image::tree::{Content, Node, Tree};
use image::verity::{Hasher, ObjectId};
use store::{OpenImage, Store};

use super::archive::Counted;
use super::{BytesError, ExportError, Options};
use crate::import::{Event, Unsupported};

/// Bytes that are read at once. Files up to this long are verified before any of their bytes are written.
const PIECE: usize = 1 << 20;

/// What was written of a flat tar.
#[derive(Debug, Clone)]
pub struct TarReport {
    /// Names in it, the root's too.
    pub entries: u64,
    /// Bytes of the tar.
    pub bytes: u64,
    /// Paths that were left out since no tar can hold them.
    pub skipped: Vec<Vec<u8>>,
}

/// Writes all of an image's files as one tar: names in the order of a walk, the first of a file's names with its bytes and
/// the others as hard links, ACLs and xattrs, times to the nanosecond. The same image gives the same bytes.
///
/// Imported again it is the same image, if that came from a tar, a layout or a directory; a composefs dump may say things
/// of an image that no tar does, such as numbers of links.
///
/// # Errors
/// [`ExportError`]; what was written until then is no tar.
pub fn to_tar(
    store: &Store,
    id: &ObjectId,
    out: &mut dyn Write,
    unsupported: Unsupported,
    options: &Options<'_>,
) -> Result<TarReport, ExportError> {
    let opened = store
        .open_image(id)
        .map_err(|source| ExportError::Open { image: *id, source: Box::new(source) })?;
    verify(&opened)?;
    let tree = |source| ExportError::Tree { image: *id, source: Box::new(source) };
    let image = Image::open(Cached::new(&opened.image)).map_err(tree)?;
    let tree = to_tree(&image, View::Composefs(Owners::AsWritten)).map_err(tree)?.tree;
    (options.progress)(Event::Layers(&[Some(content_bytes(&tree))]));
    (options.progress)(Event::Started { layer: 0 });
    let mut flattener = Flattener {
        store,
        options,
        unsupported,
        writer: Writer::new(Counted { out, bytes: 0 }),
        names: vec![None; tree.inode_bound()],
        buffer: vec![0; PIECE],
        entries: 0,
        skipped: Vec::new(),
    };
    flattener.tree(&tree)?;
    let Flattener { writer, entries, skipped, .. } = flattener;
    let mut counted = writer.finish().map_err(ExportError::Archive)?;
    counted.flush().map_err(|error| ExportError::Archive(WriteError::Write(error)))?;
    (options.progress)(Event::Done { layer: 0 });
    Ok(TarReport { entries, bytes: counted.bytes, skipped })
}

/// Compares the image's file with its name, unless the kernel does so on each read.
fn verify(opened: &OpenImage) -> Result<(), ExportError> {
    if opened.kernel_verity {
        return Ok(());
    }
    let mut hasher = Hasher::new(opened.id.algorithm());
    let mut buffer = vec![0; PIECE];
    let (mut at, size) = (0, opened.image.size());
    while at < size {
        let count = usize::try_from(size - at).unwrap_or(PIECE).min(PIECE);
        let read = opened.image.read_exact_at(&mut buffer[..count], at);
        read.map_err(|source| ExportError::ReadImage { image: opened.id, source })?;
        hasher.update(&buffer[..count]);
        at += count as u64;
    }
    let actual = hasher.finish();
    if actual == opened.id {
        return Ok(());
    }
    Err(ExportError::Image { expected: opened.id, actual: Box::new(actual) })
}

/// Bytes of all files, each once.
fn content_bytes(tree: &Tree) -> u64 {
    let mut bytes = 0;
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        if let (true, Node::Regular(content)) = (entry.is_owner, entry.inode.node()) {
            bytes += content.size();
        }
    }
    bytes
}

struct Flattener<'a, W> {
    store: &'a Store,
    options: &'a Options<'a>,
    unsupported: Unsupported,
    writer: Writer<W>,
    /// Of each inode with several names the first that was written.
    names: Vec<Option<Box<[u8]>>>,
    buffer: Vec<u8>,
    entries: u64,
    skipped: Vec<Vec<u8>>,
}

impl<W: Write> Flattener<'_, W> {
    fn tree(&mut self, tree: &Tree) -> Result<(), ExportError> {
        self.entry(b"", tree.root())?;
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            self.options.go_on()?;
            let path = path.get(1..).unwrap_or_default();
            // Directories come before what is in them, so that it is the last one if any.
            let is_below = |above: &Vec<u8>| {
                path.strip_prefix(&above[..]).is_some_and(|rest| rest.starts_with(b"/"))
            };
            if self.skipped.last().is_some_and(is_below) {
                continue;
            }
            let result = match whiteout(entry.name) {
                Whiteout::None => self.entry(path, entry.inode),
                _ => Err(unsupported(path, "its name would hide another file")),
            };
            match result {
                Err(ExportError::Unsupported { path, .. })
                    if self.unsupported == Unsupported::Skip =>
                {
                    self.skipped.push(path);
                }
                result => result?,
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &[u8], inode: image::tree::Inode<'_>) -> Result<(), ExportError> {
        let mut xattrs: Vec<_> = inode.xattrs().collect();
        xattrs.sort_unstable();
        let first = self.names[inode.id().index()].take();
        let (kind, content) = match (&first, inode.node()) {
            (Some(first), _) => (Kind::Hardlink(first), None),
            (None, Node::Regular(content)) => (Kind::Regular, Some(content)),
            (None, Node::Directory) => (Kind::Directory, None),
            (None, Node::Symlink(target)) => (Kind::Symlink(target), None),
            (None, Node::CharDevice(number)) => (Kind::CharDevice(number), None),
            (None, Node::BlockDevice(number)) => (Kind::BlockDevice(number), None),
            (None, Node::Fifo) => (Kind::Fifo, None),
            (None, Node::Socket) => return Err(unsupported(path, "it is a socket")),
        };
        let member = Member {
            path,
            kind,
            metadata: inode.metadata(),
            size: content.map_or(0, |it| it.size()),
            xattrs: if first.is_some() { &[] } else { &xattrs },
        };
        self.writer.member(&member).map_err(|error| match error {
            WriteError::Extension { .. } => unsupported(path, "it has too many xattrs"),
            WriteError::Time { .. } => unsupported(path, "its time is none that tars can say"),
            WriteError::Device { .. } => unsupported(path, "its device number is none of Linux"),
            error => ExportError::Archive(error),
        })?;
        self.entries += 1;
        if let Some(content) = content {
            self.content(path, content)?;
        }
        let is_shared = !inode.is_directory();
        self.names[inode.id().index()] = first.or_else(|| is_shared.then(|| path.into()));
        Ok(())
    }

    fn content(&mut self, path: &[u8], content: Content<'_>) -> Result<(), ExportError> {
        let failed =
            |source| ExportError::Content { path: path.to_vec(), source: Box::new(source) };
        let (object, size) = match content {
            Content::Inline(bytes) => {
                self.tell(bytes.len());
                return self.writer.content(bytes).map_err(ExportError::Archive);
            }
            Content::External { object: None, .. } => return Err(failed(BytesError::Unnamed)),
            Content::External { object: Some(object), size, .. } => (object, size),
        };
        let wrong_size = || failed(BytesError::Size { object, size });
        let mut file = self.store.object(&object).map_err(|it| failed(BytesError::Object(it)))?;
        let mut hasher = Hasher::new(object.algorithm());
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut left = size;
        while left > 0 {
            self.options.go_on()?;
            let count = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            let piece = &mut buffer[..count];
            fill(&mut file, piece)
                .map_err(|source| failed(BytesError::Read { object, source }))?
                .then_some(())
                .ok_or_else(wrong_size)?;
            hasher.update(piece);
            left -= count as u64;
            // The last piece waits until all of them are known to be right.
            if left == 0 {
                if fill(&mut file, &mut [0]).unwrap_or(true) {
                    return Err(wrong_size());
                }
                let actual =
                    std::mem::replace(&mut hasher, Hasher::new(object.algorithm())).finish();
                if actual != object {
                    let (expected, actual) = (Box::new(object), Box::new(actual));
                    return Err(failed(BytesError::Damaged { expected, actual }));
                }
            }
            self.writer.content(piece).map_err(ExportError::Archive)?;
            self.tell(count);
        }
        self.buffer = buffer;
        Ok(())
    }

    fn tell(&self, bytes: usize) {
        (self.options.progress)(Event::Read { layer: 0, bytes: bytes as u64 });
    }
}

/// Fills all of a buffer. Answers whether there was enough.
fn fill(file: &mut File, into: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(into) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn unsupported(path: &[u8], reason: &'static str) -> ExportError {
    ExportError::Unsupported { path: path.to_vec(), reason }
}
