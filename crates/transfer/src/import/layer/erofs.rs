//! Reads a layer that is an EROFS image instead of a tar, as containerd makes and pulls them from version 2.3 on.
//!
//! Such an image has whiteouts and opaque directories as overlayfs knows them, because containerd mounts it as a layer
//! of an overlay. Source: containerd `core/images/converter/erofs` and `plugins/diff/erofs`, which call
//! `mkfs.erofs --tar=f --aufs`; Linux `Documentation/filesystems/overlayfs.rst`, "whiteouts and opaque directories".
//!
//! The kernel never parses the image. Its bytes are written to a temporary file, because directories and contents are
//! in no order, and `image::erofs::read` reads them. The layer's diff id is the digest of these bytes, and its recipe
//! rebuilds them, with the contents of files as objects.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use image::erofs::read::ImageTree;
use image::layer::LayerError;
use image::tar::Segment;
use image::tree::{Content, Entry, Inode, InodeId, Location, Metadata, Node, XattrsId};
use oci::manifest::is_erofs_layer;
use store::{LayerInfo, OperationError};

use super::{Gatherer, INLINE_MAX, KeptFile, Shared, beyond};
use crate::import::copy::KeptMetadata;
use crate::import::decode::pipeline::Feed;
use crate::import::erofs_file::{ErofsFile, FilePiece, FileSource};
use crate::import::failure::{ErofsLayerFlaw, LayerFailure};
use crate::import::objects::{BATCH, FilePiece as Piece, Keep, Large, PIECE};
use crate::import::tally::{Amounts, Attempt, TallyError};
use crate::spool::Spool;

/// Name of the image in messages.
const NAME: &str = "the EROFS image";
/// Prefix of overlayfs's xattrs. Source: Linux `fs/overlayfs/overlayfs.h`.
const OVERLAY: &[u8] = b"trusted.overlay.";
/// The xattr of a directory that hides all names of lower layers; its value is `y`.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Xattrs that overlayfs writes for itself into upper directories, from which containerd also makes images. They say
/// nothing of the layer's content. Source: Linux `fs/overlayfs/overlayfs.h`, `enum ovl_xattr`.
const NOTES: [&[u8]; 6] = [
    b"trusted.overlay.impure",
    b"trusted.overlay.nlink",
    b"trusted.overlay.origin",
    b"trusted.overlay.protattr",
    b"trusted.overlay.upper",
    b"trusted.overlay.uuid",
];

/// Whether the store has read a layer as the kind that the media type states, a tar or an EROFS image. The same bytes
/// may be both, with other files.
pub(in crate::import) fn is_read_as(info: &LayerInfo, media_type: &str) -> bool {
    let is_erofs = is_erofs_layer(media_type);
    info.blobs.iter().all(|it| is_erofs_layer(&it.media_type) == is_erofs)
}

/// A file whose content is stored as an object.
#[derive(Debug, Clone, Copy)]
struct StoredFile {
    /// The file in the image's tree.
    file: InodeId,
    /// The file in the layer.
    inode: Option<InodeId>,
    /// Offset in the image, in bytes, and the length from there on that is the file's beginning; `None` if the
    /// beginning is compressed, a hole, or shared with another file.
    run: Option<(u64, u64)>,
    size: u64,
}

impl<'t, 'a, 'q> Gatherer<'t, 'a, 'q> {
    /// Reads an EROFS image to its end.
    pub(super) fn read_erofs(
        feed: &mut Feed<'_>,
        packed: Option<u64>,
        shared: &'a Shared<'t, 'a, 'q>,
        attempt: &'a Attempt<'a>,
    ) -> Result<Self, LayerFailure> {
        let (bytes, length) = spool(feed, shared)?;
        let copy = bytes.try_clone().map_err(OperationError::of("open", NAME))?;
        let image = ErofsFile::of_layer(Path::new(NAME), copy, length)?;
        if image.is_composefs() {
            return Err(flawed(b"/", ErofsLayerFlaw::Composefs));
        }
        let mut gatherer = Self::new(Some(packed.unwrap_or(length)), shared, attempt)?;
        let (names, mut files) = {
            let _one = shared.totals.one_tree();
            if shared.stop.is_set() {
                return Err(LayerFailure::Stopped);
            }
            let names = image.names(shared.limits, shared.stop.cancelled())?;
            let files = gatherer.names(&image, &names)?;
            (names, files)
        };
        order(&mut files);
        let mut buffer = vec![0; PIECE];
        let mut at = 0;
        for file in &files {
            if let Some((offset, _)) = file.run {
                gatherer.between(&bytes, at..offset, &mut buffer)?;
                at = offset;
            }
            gatherer.stored_file(FileSource::new(&image, &names, file.file), file)?;
            at += file.run.map_or(0, |(_, length)| length);
        }
        gatherer.between(&bytes, at..length, &mut buffer)?;
        // The length of the image is known, and its digest is compared with the diff id.
        gatherer.ended = true;
        gatherer.settle()?;
        Ok(gatherer)
    }

    /// Adds all names to the layer. Returns the files whose contents become objects.
    fn names(
        &mut self,
        image: &ErofsFile,
        names: &ImageTree,
    ) -> Result<Vec<StoredFile>, LayerFailure> {
        let tree = &names.tree;
        let mut files = Vec::new();
        self.count_name(b"/", tree.root())?;
        self.directory(b"/", tree.root())?;
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            if self.shared.stop.is_set() {
                return Err(LayerFailure::Stopped);
            }
            let is_whiteout = entry.inode.node() == Node::CharDevice(0);
            if entry.name.starts_with(b".wh.") {
                // mkfs.erofs makes whiteouts of AUFS's own files, such as `.wh..wh.plnk`.
                if is_whiteout {
                    continue;
                }
                return Err(flawed(path, ErofsLayerFlaw::WhiteoutName));
            }
            if !entry.is_owner && !is_whiteout {
                continue;
            }
            self.count_name(path, entry.inode)?;
            if let Some(file) = self.name(image, names, path, entry)? {
                files.push(file);
            }
        }
        // A link to a later name would be one to a file of lower layers, if they have that name.
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            if self.shared.stop.is_set() {
                return Err(LayerFailure::Stopped);
            }
            if !entry.is_owner && entry.inode.node() != Node::CharDevice(0) {
                let target = entry.inode.path();
                let metadata_bytes = (path.len() + target.len()) as u64;
                let added = Amounts { entries: 1, metadata_bytes, ..Amounts::default() };
                self.attempt.add(added).map_err(|error| beyond(path, error))?;
                self.layer.link(path, &target)?;
            }
        }
        Ok(files)
    }

    fn name(
        &mut self,
        image: &ErofsFile,
        names: &ImageTree,
        path: &[u8],
        entry: Entry<'_>,
    ) -> Result<Option<StoredFile>, LayerFailure> {
        let inode = entry.inode;
        match inode.node() {
            Node::CharDevice(0) => {
                let none = Node::Regular(Content::Inline(b""));
                let (directory, name) = path.split_at(path.len() - entry.name.len());
                let whiteout = [directory, b".wh.", name].concat();
                self.layer.entry(&whiteout, &Metadata::IMPLICIT, XattrsId::NONE, none)?;
            }
            Node::Directory => self.directory(path, inode)?,
            Node::Regular(content) => {
                let xattrs = self.xattrs(path, inode)?;
                let metadata = self.kept().of(inode.metadata());
                let size = content.size();
                if usize::try_from(size).is_ok_and(|size| size <= INLINE_MAX) {
                    let bytes = FileSource::new(image, names, inode.id()).bytes()?;
                    let node = Node::Regular(Content::Inline(&bytes));
                    self.layer.entry(path, &metadata, xattrs, node)?;
                    return Ok(None);
                }
                let location = Location::None;
                let content = Content::External { size, object: None, location };
                let node = Node::Regular(content);
                let added = self.layer.entry(path, &metadata, xattrs, node)?;
                let run = image.first_run(names.nids[inode.id().index()])?;
                return Ok(Some(StoredFile { file: inode.id(), inode: added, run, size }));
            }
            node => {
                let xattrs = self.xattrs(path, inode)?;
                let metadata = self.kept().of(inode.metadata());
                self.layer.entry(path, &metadata, xattrs, node)?;
            }
        }
        Ok(None)
    }

    fn directory(&mut self, path: &[u8], inode: Inode<'_>) -> Result<(), LayerFailure> {
        let xattrs = self.xattrs(path, inode)?;
        let metadata = self.kept().of(inode.metadata());
        self.layer.entry(path, &metadata, xattrs, Node::Directory)?;
        if inode.xattrs().any(|(name, value)| name == OPAQUE && value == b"y") {
            // overlayfs does not look at this xattr of a root.
            if path == b"/" {
                return Err(flawed(path, ErofsLayerFlaw::OpaqueRoot));
            }
            let opaque = [path, b"/.wh..wh..opq"].concat();
            let none = Node::Regular(Content::Inline(b""));
            self.layer.entry(&opaque, &Metadata::IMPLICIT, XattrsId::NONE, none)?;
        }
        Ok(())
    }

    const fn kept(&self) -> KeptMetadata {
        KeptMetadata { xattrs: self.shared.xattrs, times: self.shared.times }
    }

    /// Adds the xattrs of an inode without those of overlayfs.
    fn xattrs(&mut self, path: &[u8], inode: Inode<'_>) -> Result<XattrsId, LayerFailure> {
        let is_opaque =
            |name: &[u8], value: &[u8]| name == OPAQUE && value == b"y" && inode.is_directory();
        let unknown = |(name, value): (&[u8], &[u8])| {
            name.starts_with(OVERLAY) && !NOTES.contains(&name) && !is_opaque(name, value)
        };
        if inode.xattrs().any(unknown) {
            return Err(flawed(path, ErofsLayerFlaw::Overlay));
        }
        let kept = self.kept();
        let pairs =
            inode.xattrs().filter(|(name, _)| !name.starts_with(OVERLAY) && kept.is_kept(name));
        let mut pairs = pairs.peekable();
        if pairs.peek().is_none() {
            return Ok(XattrsId::NONE);
        }
        let added = self.layer.xattrs(pairs);
        Ok(added.map_err(|source| LayerError::Entry { path: path.to_vec(), source })?)
    }

    /// Counts a name against the limits, as the entry of a tar.
    fn count_name(&self, path: &[u8], inode: Inode<'_>) -> Result<(), LayerFailure> {
        let (content_bytes, kept) = match inode.node() {
            Node::Regular(content) if content.size() <= INLINE_MAX as u64 => {
                (content.size(), content.size())
            }
            Node::Regular(content) => (content.size(), 0),
            Node::Symlink(target) => (0, target.len() as u64),
            _ => (0, 0),
        };
        let xattrs: usize = inode.xattrs().map(|(name, value)| name.len() + value.len()).sum();
        let metadata_bytes = (path.len() + xattrs) as u64 + kept;
        let added = Amounts { entries: 1, metadata_bytes, content_bytes, ..Amounts::default() };
        self.attempt.add(added).map_err(|error| beyond(path, error))
    }

    /// Adds the image's bytes between the contents of files.
    fn between(
        &mut self,
        image: &File,
        range: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<(), LayerFailure> {
        let mut at = range.start;
        while at < range.end {
            if self.shared.stop.is_set() {
                return Err(LayerFailure::Stopped);
            }
            let left = range.end - at;
            let length = usize::try_from(left).map_or(buffer.len(), |it| it.min(buffer.len()));
            let part = &mut buffer[..length];
            image.read_exact_at(part, at).map_err(OperationError::of("read", NAME))?;
            self.recipe.verbatim(part)?;
            self.bound()?;
            at += length as u64;
        }
        Ok(())
    }

    /// Adds a file to the recipe, and queues its content.
    fn stored_file(
        &mut self,
        source: FileSource<'_>,
        file: &StoredFile,
    ) -> Result<(), LayerFailure> {
        let in_image = file.run.map_or(0, |(_, length)| length);
        self.count_unstored(source, file.size - in_image)?;
        let segment = file.run.map(|(_, length)| Segment { offset: 0, length });
        let number = self.recipe.file(segment.as_slice(), file.inode);
        let whole = file.run.filter(|(_, length)| *length == file.size);
        let keep = match (self.shared.keep, whole) {
            (Keep::InTar, Some(_)) => Keep::InTar,
            _ => Keep::Object,
        };
        if self.shared.keep == Keep::InTar {
            let offset = whole.map(|(offset, _)| offset);
            self.files.push(KeptFile { offset, size: file.size, named: None });
        }
        match usize::try_from(file.size) {
            Ok(size) if size <= BATCH && keep == self.shared.keep => {
                self.small_file(source, size, number)
            }
            _ => self.large_file(source, number, keep),
        }
    }

    /// Counts bytes of a file that are compressed, shared or holes, like the holes of a tar's files.
    fn count_unstored(&mut self, source: FileSource<'_>, bytes: u64) -> Result<(), LayerFailure> {
        self.holes = self.holes.saturating_add(bytes);
        let packed = self.packed.unwrap_or_default();
        let checked = self.shared.limits.check_holes(packed, self.holes);
        let added = Amounts { holes: bytes, ..Amounts::default() };
        let added = checked.map_err(TallyError::Limit).and_then(|()| self.attempt.add(added));
        added.map_err(|error| beyond(&source.path(), error))
    }

    fn small_file(
        &mut self,
        source: FileSource<'_>,
        size: usize,
        number: u32,
    ) -> Result<(), LayerFailure> {
        if self.used() + size > BATCH {
            self.send()?;
        }
        let start = self.used();
        let mut into = &mut self.batch.bytes[start..start + size];
        source.read(|piece| -> Result<(), LayerFailure> {
            let count = match piece {
                FilePiece::Data(bytes) => {
                    into[..bytes.len()].copy_from_slice(bytes);
                    bytes.len()
                }
                FilePiece::Hole(count) => {
                    let count = usize::try_from(count).unwrap_or(usize::MAX).min(into.len());
                    into[..count].fill(0);
                    count
                }
            };
            into = &mut std::mem::take(&mut into)[count..];
            Ok(())
        })?;
        self.batch.files.push((number, start + size));
        Ok(())
    }

    fn large_file(
        &mut self,
        source: FileSource<'_>,
        number: u32,
        keep: Keep,
    ) -> Result<(), LayerFailure> {
        // Workers take tasks in order, so earlier files must be queued first.
        self.send()?;
        let queue = self.shared.queue;
        let known = std::sync::Arc::clone(&self.known);
        let file = Large { number, size: source.size, keep, known };
        let pieces = queue.large(file, self.shared.target)?;
        let (mut bytes, mut used) = (queue.buffer(), 0);
        let send = |bytes: &mut Vec<u8>, used: &mut usize| {
            let full = std::mem::replace(bytes, queue.buffer());
            let piece = Piece { bytes: full, used: std::mem::take(used) };
            // The receiver is dropped early only if the import failed elsewhere.
            pieces.send(piece).map_err(|_gone| LayerFailure::Stopped)
        };
        source.read(|piece| -> Result<(), LayerFailure> {
            if self.shared.stop.is_set() {
                return Err(LayerFailure::Stopped);
            }
            let mut left = match piece {
                FilePiece::Data(bytes) => bytes.len() as u64,
                FilePiece::Hole(count) => count,
            };
            let mut from = match piece {
                FilePiece::Data(bytes) => bytes,
                FilePiece::Hole(_) => &[],
            };
            while left > 0 {
                let room = PIECE - used;
                let count = usize::try_from(left).map_or(room, |left| left.min(room));
                let into = &mut bytes[used..used + count];
                match piece {
                    FilePiece::Data(_) => {
                        let (now, later) = from.split_at(count);
                        into.copy_from_slice(now);
                        from = later;
                    }
                    FilePiece::Hole(_) => into.fill(0),
                }
                used += count;
                left -= count as u64;
                if used == PIECE {
                    send(&mut bytes, &mut used)?;
                }
            }
            Ok(())
        })?;
        if used > 0 {
            send(&mut bytes, &mut used)?;
        }
        drop(pieces);
        self.resolve()
    }
}

/// Writes all bytes of the layer to a temporary file without a name. Returns it and its length in bytes.
fn spool(feed: &mut Feed<'_>, shared: &Shared<'_, '_, '_>) -> Result<(File, u64), LayerFailure> {
    let object = format!("a temporary file in {}", shared.scratch.display());
    let failed = |error| OperationError::of("write", &object)(error);
    let mut spool = Spool::new(shared.scratch).map_err(failed)?;
    let mut buffer = vec![0; PIECE];
    let mut length = 0;
    let mut feed = feed;
    loop {
        if shared.stop.is_set() {
            return Err(LayerFailure::Stopped);
        }
        let count = match feed.read(&mut buffer) {
            Ok(0) => return Ok((spool.into_file(), length)),
            Ok(count) => count,
            Err(error) => return Err(crate::import::failure::copy_failed(error).into()),
        };
        spool.write_all(&buffer[..count]).map_err(failed)?;
        length += count as u64;
    }
}

/// Orders files as their contents are in the image. A file that shares bytes with an earlier one loses its place.
fn order(files: &mut [StoredFile]) {
    // Files without a place come first.
    files.sort_by_key(|it| it.run);
    let mut end = 0;
    for file in files.iter_mut() {
        if let Some((offset, length)) = file.run {
            if offset < end {
                file.run = None;
            } else {
                end = offset + length;
            }
        }
    }
}

fn flawed(path: &[u8], flaw: ErofsLayerFlaw) -> LayerFailure {
    LayerFailure::Erofs { path: path.to_vec(), flaw }
}
