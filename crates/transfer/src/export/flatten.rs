//! Writes an image's root file system as one tar.

use std::io::Write;

use image::tar::write::{Member, TarWriteError, Writer};
use image::tar::{Kind, Whiteout, whiteout};
use image::tree::{Content, Node, Tree};
use image::verity::ImageId;
use store::Store;

use super::archive::{Counted, archive_failed};
use super::files::{self, FileContents};
use super::{ExportError, Options};
use crate::import::Unsupported;
use crate::progress::Event;

/// Result of writing a flat tar.
#[derive(Debug, Clone)]
pub struct TarReport {
    /// Number of entries, including the root.
    pub entries: u64,
    /// Size of the tar, in bytes.
    pub bytes: u64,
    /// Paths that were left out, because a tar cannot represent them.
    pub skipped: Vec<Vec<u8>>,
}

/// Writes all files of an image as one tar, in the order of a walk. The first name of a file has its bytes, and the
/// other names are hard links. ACLs, xattrs, and times in nanoseconds are kept. The same image always gives the same
/// bytes.
///
/// An import of the tar gives the same image if the image came from a tar, a layout or a directory. A composefs dump
/// may contain properties that a tar cannot represent, such as link counts.
///
/// # Errors
/// An [`ExportError`]; the output is incomplete then.
pub fn to_tar(
    store: &Store,
    id: &ImageId,
    out: &mut dyn Write,
    unsupported: Unsupported,
    options: &Options<'_>,
) -> Result<TarReport, ExportError> {
    let tree = files::tree(store, id)?;
    (options.progress)(Event::Layers(&[Some(files::content_bytes(&tree))]));
    (options.progress)(Event::Started { layer: 0 });
    let mut flattener = Flattener {
        files: FileContents::new(store, options),
        options,
        unsupported,
        writer: Writer::new(Counted { out, bytes: 0 }),
        names: vec![None; tree.inode_bound()],
        entries: 0,
        skipped: Vec::new(),
    };
    flattener.tree(&tree)?;
    let Flattener { writer, entries, skipped, .. } = flattener;
    let mut counted = writer.finish().map_err(archive_failed)?;
    counted.flush().map_err(|error| archive_failed(TarWriteError::Write(error)))?;
    (options.progress)(Event::Done { layer: 0 });
    Ok(TarReport { entries, bytes: counted.bytes, skipped })
}

struct Flattener<'a, W> {
    files: FileContents<'a>,
    options: &'a Options<'a>,
    unsupported: Unsupported,
    writer: Writer<W>,
    /// For each inode that is not a directory, the first path written.
    names: Vec<Option<Box<[u8]>>>,
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
            // A directory precedes its entries. So if the parent directory was skipped, it is the last skipped path.
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
            TarWriteError::Extension { .. } => unsupported(path, "it has too many xattrs"),
            TarWriteError::Time { .. } => unsupported(path, "its time is out of range"),
            TarWriteError::Device { .. } => unsupported(path, "its device number is out of range"),
            error => archive_failed(error).into(),
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
        let writer = &mut self.writer;
        self.files
            .give(path, content, &mut |piece| Ok(writer.content(piece).map_err(archive_failed)?))
    }
}

fn unsupported(path: &[u8], reason: &'static str) -> ExportError {
    ExportError::Unsupported { path: path.to_vec(), reason }
}
