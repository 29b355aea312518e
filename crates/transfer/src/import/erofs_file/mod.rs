//! Reads EROFS images that are files outside of any store: Quire's exports, images of `mkfs.erofs` and composefs, and
//! disks with one of them.
//!
//! Such an image may come from anyone. Its bytes reach no kernel and no store: a tree is made of it, and the contents
//! of its files are read, both by `image::erofs::read`, which checks them. An import writes its own image of the tree.

mod disk;
mod import;
mod window;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use image::erofs::read::{
    ByteOffset, Cached, Device, Image, ImageTree, Nid, Owners, ReadError, RunPlace, TreeBounds,
    View, to_tree_within,
};
use image::erofs::{Profile, Versions};
use image::tree::{Content, Inode, InodeId, Location, Node, Tree};
use image::verity::{Algorithm, Hasher, ImageId, ObjectId};
use oci::source::Input;
use store::{parallel, walk};

use super::copy::{FileData, KeptMetadata, relocated};
use super::{ImportContext, ImportError, ImportLimitError, Limits, check_marks, check_paths};
use crate::progress::Event;

pub use disk::DiskError;
pub use window::Window;

/// Bytes that are read at once from a file of an image.
const BUFFER: usize = 512 << 10;

/// An EROFS image in a file.
#[derive(Debug)]
pub struct ErofsFile {
    path: PathBuf,
    image: Image<Cached<Window>>,
    /// Bytes that the file occupies on the disk, at most its length. A sparse file may be much longer.
    stored: u64,
    /// Whether it is the root of a disk that has a hash tree for it.
    has_hash_tree: bool,
}

/// A piece of a file's bytes.
#[derive(Debug)]
pub enum FilePiece<'a> {
    /// Bytes.
    Data(&'a [u8]),
    /// This many zeros, which are a hole in the image.
    Hole(u64),
}

impl ErofsFile {
    /// Opens a file that is an EROFS image: a regular file or a block device.
    ///
    /// # Errors
    /// [`ImportError`] if the file cannot be opened or is not a supported EROFS image.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let (window, stored) = Window::open(path).map_err(|it| opened(path, it))?;
        Self::new(path, window, stored)
    }

    /// Opens the root partition of a disk with a GUID partition table: the partition of the type for `architecture`,
    /// named as in Go, or else the only one with EROFS.
    ///
    /// # Errors
    /// As [`open`](Self::open), or if there is no such partition.
    pub fn open_disk(path: &Path, architecture: &str) -> Result<Self, ImportError> {
        let (window, stored) = Window::open(path).map_err(|it| opened(path, it))?;
        let root = disk::root(&window, architecture);
        let root =
            root.map_err(|it| ImportError::failed("read", path.display().to_string(), it))?;
        let len = root.bytes.end - root.bytes.start;
        let file = Self::new(path, window.part(root.bytes), stored.min(len))?;
        Ok(Self { has_hash_tree: root.has_tree, ..file })
    }

    /// Reads a layer of `len` bytes that is an EROFS image. `name` is for messages.
    pub(super) fn of_layer(name: &Path, file: File, len: u64) -> Result<Self, ImportError> {
        Self::new(name, Window::whole(file, len), len)
    }

    /// Returns the first run of a file's bytes that are in the image as they are: the offset in the image and the
    /// length, with all chunks that follow one another.
    pub(super) fn first_run(&self, nid: Nid) -> Result<Option<(u64, u64)>, ImportError> {
        let inode = self.image.inode(nid).map_err(|error| self.failed(error))?;
        let (mut first, mut end) = (None, 0);
        while let Some(run) =
            self.image.map(&inode, ByteOffset(end)).map_err(|error| self.failed(error))?
        {
            let RunPlace::Data(Device::IMAGE, ByteOffset(at)) = run.place else { break };
            let start = *first.get_or_insert(at);
            if at != start + end {
                break;
            }
            end += run.len;
        }
        Ok(first.map(|start| (start, end)))
    }

    fn new(path: &Path, window: Window, stored: u64) -> Result<Self, ImportError> {
        let path = path.to_owned();
        match Image::open(Cached::new(window)) {
            Ok(image) => Ok(Self { path, image, stored, has_hash_tree: false }),
            Err(error) => Err(ImportError::failed("read", path.display().to_string(), error)),
        }
    }

    /// Whether the image is the root of a disk with a hash tree of dm-verity. The tree is not compared with the image:
    /// its root hash, which only the user knows, would be needed.
    #[must_use]
    pub const fn has_hash_tree(&self) -> bool {
        self.has_hash_tree
    }

    /// Returns the image.
    #[must_use]
    pub const fn image(&self) -> &Image<Cached<Window>> {
        &self.image
    }

    /// Whether the image is one of composefs, so that the data of most files is in objects.
    #[must_use]
    pub fn is_composefs(&self) -> bool {
        self.image.superblock().composefs.is_some() && self.image.devices().is_empty()
    }

    fn failed(&self, source: ReadError) -> ImportError {
        if matches!(source, ReadError::Cancelled) {
            return ImportError::Cancelled;
        }
        ImportError::failed("read", self.path.display().to_string(), source)
    }

    /// Returns the image's tree. The files of an image that is not one of composefs have no objects; their bytes are
    /// read by [`read`](Self::read).
    ///
    /// # Errors
    /// [`ImportError`] if the image is invalid or too large, or `cancel` is set.
    pub fn names(&self, limits: &Limits, cancel: &AtomicBool) -> Result<ImageTree, ImportError> {
        let view = match self.is_composefs() {
            true => View::Composefs(Owners::AsWritten),
            false => View::Stored,
        };
        let bounds = TreeBounds {
            names: limits.entries,
            bytes: limits.metadata_bytes,
            stored: self.stored,
            cancel,
        };
        to_tree_within(&self.image, view, bounds).map_err(|error| self.failed(error))
    }

    /// Passes the bytes of a file to `take`: those of inode `nid` of the image, which is `file` in the image's tree.
    ///
    /// # Errors
    /// [`ImportError`] if they cannot be read, and the errors of `take`.
    pub fn read<E: From<ImportError>>(
        &self,
        nid: Nid,
        file: Inode<'_>,
        mut take: impl FnMut(FilePiece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = |error| ImportError::ErofsFile { path: file.path(), source: Box::new(error) };
        let inode = self.image.inode(nid).map_err(failed)?;
        let mut reader = self.image.reader(&inode);
        let mut buffer = vec![0; BUFFER.min(usize::try_from(inode.size()).unwrap_or(BUFFER))];
        let mut at = 0;
        while let Some(run) = self.image.map(&inode, ByteOffset(at)).map_err(failed)? {
            if run.place == RunPlace::Hole {
                take(FilePiece::Hole(run.len))?;
                at += run.len;
                continue;
            }
            let end = at + run.len;
            while at < end {
                let len = usize::try_from(end - at).map_or(buffer.len(), |it| it.min(buffer.len()));
                let part = &mut buffer[..len];
                let read = reader.read(ByteOffset(at), part, &[]).map_err(failed)?;
                if read == 0 {
                    let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
                    return Err(ImportError::failed(
                        "read",
                        self.path.display().to_string(),
                        ended,
                    )
                    .into());
                }
                take(FilePiece::Data(&part[..read]))?;
                at += read as u64;
            }
        }
        Ok(())
    }

    /// Completes a tree of [`names`](Self::names): small files become inline, and `put` returns the objects of the
    /// others. It is called on several threads.
    pub(super) fn complete(
        &self,
        names: &ImageTree,
        kept: KeptMetadata,
        limits: &Limits,
        environment: &ImportContext<'_>,
        put: impl Fn(&FileSource<'_>) -> Result<ObjectId, ImportError> + Sync,
    ) -> Result<Tree, ImportError> {
        let files = self.files(names, limits)?;
        let threads = environment.threads.get();
        let found = parallel::each("read", threads, files.len(), |at| {
            let file = FileSource::new(self, names, files[at]);
            if environment.cancel.load(Ordering::Relaxed) {
                return Err(ImportError::Cancelled);
            }
            if file.size > walk::COMPOSEFS_INLINE_MAX {
                return Ok(FileData::Object(put(&file)?));
            }
            let bytes = file.bytes()?;
            (environment.progress)(Event::FileRead { bytes: file.size });
            Ok(FileData::Inline(bytes))
        })?;
        let data: HashMap<InodeId, FileData> = files.into_iter().zip(found).collect();
        relocated(&names.tree, &data, kept).map_err(ImportError::relocate)
    }

    /// Lists the files whose bytes are in the image, and checks their sizes before they are read.
    fn files(&self, names: &ImageTree, limits: &Limits) -> Result<Vec<InodeId>, ImportError> {
        let limited = |error: ImportLimitError| {
            ImportError::failed("read", self.path.display().to_string(), error)
        };
        let (mut files, mut sum) = (Vec::new(), 0_u64);
        for (inode, content) in names.tree.files() {
            let Content::External { size, object: None, .. } = content else { continue };
            sum = sum.saturating_add(size);
            if sum > limits.content_bytes {
                return Err(limited(ImportLimitError::ContentBytes(limits.content_bytes)));
            }
            limits.check_ratio(self.stored, sum).map_err(limited)?;
            files.push(inode.id());
        }
        Ok(files)
    }

    /// Returns the tree that an import makes of the image, with the ids of all objects, and stores nothing.
    ///
    /// # Errors
    /// [`ImportError`] if the image is invalid or too large, or a file cannot be read.
    pub fn tree(
        &self,
        limits: &Limits,
        environment: &ImportContext<'_>,
    ) -> Result<Tree, ImportError> {
        let names = self.names(limits, environment.cancel)?;
        if self.is_composefs() {
            return Ok(names.tree);
        }
        self.complete(&names, KeptMetadata::ALL, limits, environment, |file| {
            let mut hasher = Hasher::new(Algorithm::Sha256);
            file.read(|piece| {
                if environment.cancel.load(Ordering::Relaxed) {
                    return Err(ImportError::Cancelled);
                }
                match piece {
                    FilePiece::Data(bytes) => hasher.update(bytes),
                    FilePiece::Hole(count) => hasher.zeros(count),
                }
                Ok(())
            })?;
            (environment.progress)(Event::FileRead { bytes: file.size });
            Ok(hasher.finish().into())
        })
    }
}

/// Returns the id of the image that an import makes of a tree in the form `objects`; `None` if the tree does not state
/// the objects of all files.
///
/// # Errors
/// [`ImportError`] if an import refuses the tree.
pub fn image_of(tree: &Tree) -> Result<Option<ImageId>, ImportError> {
    // An import moves the data of files to the paths of their objects.
    let mut moved = HashMap::new();
    for (file, content) in tree.files() {
        match content {
            Content::Inline(_) | Content::External { location: Location::Object, .. } => {}
            Content::External { object: Some(object), .. } => {
                moved.insert(file.id(), FileData::Object(object));
            }
            Content::External { object: None, .. } => return Ok(None),
        }
    }
    if !moved.is_empty() {
        let tree = relocated(tree, &moved, KeptMetadata::ALL).map_err(ImportError::relocate)?;
        return image_of(&tree);
    }
    check_paths(tree)?;
    check_marks(tree)?;
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let profile = Profile::Composefs(Versions::default());
    let written = image::erofs::write(tree, &profile, &mut hasher);
    written.map_err(|it| ImportError::failed("write", "the image", it))?;
    Ok(Some(hasher.finish().into()))
}

/// A file of an image. It owns no memory, because an image may have millions of files with long paths.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileSource<'f> {
    from: &'f ErofsFile,
    file: Inode<'f>,
    nid: Nid,
    /// Size in bytes.
    pub(super) size: u64,
}

const _: () = assert!(!std::mem::needs_drop::<FileSource<'static>>());

impl<'f> FileSource<'f> {
    pub(super) fn new(from: &'f ErofsFile, names: &'f ImageTree, id: InodeId) -> Self {
        let file = names.tree.inode(id);
        let size = match file.node() {
            Node::Regular(content) => content.size(),
            _ => 0,
        };
        Self { from, file, nid: names.nids[id.index()], size }
    }

    pub(super) fn path(&self) -> Vec<u8> {
        self.file.path()
    }

    pub(super) fn read<E: From<ImportError>>(
        &self,
        mut take: impl FnMut(FilePiece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        // Another process may write to the image.
        let changed = || {
            let reason = "its size changed while it was read";
            ImportError::File { path: self.file.path(), reason }
        };
        let mut left = self.size;
        self.from.read(self.nid, self.file, |piece| {
            let len = match piece {
                FilePiece::Data(bytes) => bytes.len() as u64,
                FilePiece::Hole(count) => count,
            };
            left = left.checked_sub(len).ok_or_else(changed)?;
            take(piece)
        })?;
        if left == 0 { Ok(()) } else { Err(changed().into()) }
    }

    /// Returns all bytes of a small file.
    pub(super) fn bytes(&self) -> Result<Vec<u8>, ImportError> {
        let mut bytes = Vec::new();
        self.read(|piece| -> Result<(), ImportError> {
            match piece {
                FilePiece::Data(more) => bytes.extend_from_slice(more),
                FilePiece::Hole(count) => {
                    let count = usize::try_from(count).unwrap_or(usize::MAX);
                    bytes.resize(bytes.len().saturating_add(count), 0);
                }
            }
            Ok(())
        })?;
        Ok(bytes)
    }
}

fn opened(path: &Path, source: io::Error) -> ImportError {
    ImportError::open(&Input::File(path.to_owned()), source)
}
