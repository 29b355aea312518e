//! Imports directories and dumps, which are trees rather than layers.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use image::dump::Strictness;
use image::tree::{Content, Inode, InodeId, Location, Node, Tree};
use image::verity::ObjectId;
use store::walk::FilePart;
use store::{Form, parallel, walk};

use super::copy::{FileData, KeptMetadata, relocated};
use super::objects::BATCH;
use super::{ImportError, ImportRun, UncommittedImage};
use crate::progress::Event;
use oci::files::{self, Stream};
use oci::source::Input;

impl ImportRun<'_> {
    /// Imports a directory with a root filesystem.
    pub(super) fn directory(&self, path: &Path) -> Result<UncommittedImage, ImportError> {
        (self.environment.progress)(Event::Walking);
        let opened = |source| ImportError::open(&Input::File(path.to_owned()), source);
        let directory = files::directory(path).map_err(opened)?;
        let options = walk::Options {
            hardlinks: walk::Hardlinks::Keep,
            xattrs: self.options.xattrs,
            times: self.options.times,
            devices: walk::Devices::Keep,
            inline_max: walk::COMPOSEFS_INLINE_MAX,
            threads: self.environment.threads,
        };
        let put = |source: &mut walk::FileReader<'_>| {
            if self.environment.cancel.load(Ordering::Relaxed) {
                return Err(ImportError::Cancelled.into());
            }
            Ok(self.file(source)?)
        };
        match walk::tree(directory.as_fd(), path, &options, put) {
            Ok(tree) => self.made(tree),
            Err(_) if self.environment.cancel.load(Ordering::Relaxed) => {
                Err(ImportError::Cancelled)
            }
            Err(error) => Err(ImportError::failed("import", "the directory", error)),
        }
    }

    fn file(&self, source: &mut walk::FileReader<'_>) -> Result<ObjectId, ImportError> {
        match usize::try_from(source.size()) {
            Ok(size) if size <= BATCH => {
                let mut bytes = Vec::with_capacity(size);
                let read = source.read(|piece| {
                    bytes.extend_from_slice(piece);
                    Ok(())
                });
                read.map_err(|it| ImportError::failed("read", "the file", it))?;
                self.has_read(source.size());
                self.transaction.object(&bytes).map_err(ImportError::Object)
            }
            _ => {
                let size = source.size();
                let shared = self
                    .transaction
                    .share(source.file(), size, || self.go_on().map_err(io::Error::other));
                if let Some(object) = shared.map_err(ImportError::write)? {
                    self.has_read(size);
                    return Ok(object);
                }
                let mut draft = self.transaction.draft().map_err(ImportError::Object)?;
                let read = source.parts(|part| {
                    self.go_on().map_err(io::Error::other)?;
                    self.has_read(part.size());
                    match part {
                        FilePart::Data(bytes) => draft.write_all(bytes),
                        FilePart::Hole(count) => draft.zeros(count),
                    }
                });
                read.map_err(ImportError::write)?;
                draft.finish().map_err(ImportError::Object)
            }
        }
    }

    /// Reports bytes of files that were read, or whose blocks the store shares.
    pub(super) fn has_read(&self, bytes: u64) {
        (self.environment.progress)(Event::FileRead { bytes });
    }

    /// Imports a composefs dump, whose files are in the store or are copied from a folder of objects.
    pub(super) fn dump(&self, input: &Input) -> Result<UncommittedImage, ImportError> {
        (self.environment.progress)(Event::Walking);
        let cancel = self.environment.cancel;
        let opened = |source| ImportError::open(input, source);
        let stream = Stream::open(input, cancel).map_err(opened)?;
        let reader = BufReader::with_capacity(256 << 10, stream);
        let tree = image::dump::parse(reader, Strictness::Exact).map_err(|source| {
            if cancel.load(Ordering::Relaxed) {
                return ImportError::Cancelled;
            }
            ImportError::failed("import", format!("the dump {input}"), source)
        })?;
        self.with_objects(tree, KeptMetadata::ALL)
    }

    /// Makes the result for a composefs tree, whose files are in the store or are copied from a folder of objects.
    pub(super) fn with_objects(
        &self,
        tree: Tree,
        kept: KeptMetadata,
    ) -> Result<UncommittedImage, ImportError> {
        let WantedFiles { files, moved } = wanted(&tree)?;
        let objects = self.collect(&tree, &files)?;
        // A tree may contain any path for a file's data, but in the store the data is at the path of its object.
        let moved: HashMap<_, _> =
            moved.into_iter().map(|(file, at)| (file, FileData::Object(objects[at]))).collect();
        if moved.is_empty() && kept.is_all() {
            return self.made(tree);
        }
        let tree = relocated(&tree, &moved, kept).map_err(ImportError::relocate)?;
        self.made(tree)
    }

    /// Makes the result for a tree whose files are objects of the store or of this import.
    pub(super) fn made(&self, tree: Tree) -> Result<UncommittedImage, ImportError> {
        let written = match self.options.form {
            Form::Objects => None,
            Form::Packed => Some(self.pack(&tree)?),
            Form::Tar => return Err(ImportError::NoLayers),
        };
        Ok(UncommittedImage::from_tree(tree, written))
    }

    /// Makes sure that the store has all wanted files, on several threads. Returns the object of each.
    fn collect(&self, tree: &Tree, wanted: &[InodeId]) -> Result<Vec<ObjectId>, ImportError> {
        let cancelled = || self.environment.cancel.load(Ordering::Relaxed);
        let found = parallel::each("import", self.environment.threads.get(), wanted.len(), |at| {
            if cancelled() {
                return Err(ImportError::Cancelled);
            }
            self.have(&DumpedFile::new(tree.inode(wanted[at]))?)
        });
        if cancelled() { Err(ImportError::Cancelled) } else { found }
    }

    /// Makes sure that the store has the object of a wanted file, and returns its id.
    fn have(&self, wanted: &DumpedFile<'_>) -> Result<ObjectId, ImportError> {
        if let Some(object) = wanted.object
            && self.transaction.reuse(&object, wanted.size).map_err(ImportError::Object)?
        {
            return Ok(object);
        }
        let refused = |reason| ImportError::DumpFile { path: wanted.file.path(), reason };
        let Some(folder) = self.options.objects else {
            let Some(object) = wanted.object else {
                return Err(refused(
                    "it has no digest: name the directory of its objects with --objects",
                ));
            };
            return Err(ImportError::Missing { object, path: wanted.file.path(), looked: false });
        };
        let (path, file) = wanted.open(folder)?;
        let failed = |source| ImportError::open(&Input::File(path.clone()), source);
        let metadata = file.metadata().map_err(failed)?;
        if metadata.len() != wanted.size {
            return Err(refused("the size of its object file is not that in the image"));
        }
        let mut draft = self.transaction.draft().map_err(ImportError::Object)?;
        let read = walk::parts(&file, wanted.size, &mut Vec::new(), |part| {
            self.go_on().map_err(io::Error::other)?;
            self.has_read(part.size());
            let added = match part {
                FilePart::Data(bytes) => draft.write_all(bytes),
                FilePart::Hole(count) => draft.zeros(count),
            };
            added.map_err(|error| io::Error::other(ImportError::write(error)))
        });
        read.map_err(|error| match error.downcast() {
            Ok(error) => error,
            Err(error) => failed(error),
        })?;
        let actual = draft.finish().map_err(ImportError::Object)?;
        match wanted.object {
            Some(expected) if expected != actual => {
                let (expected, actual) = (Box::new(expected), Box::new(actual));
                Err(ImportError::NotObject { path, expected, actual })
            }
            _ => Ok(actual),
        }
    }
}

/// A file of a dump or a composefs image whose data is external.
struct DumpedFile<'t> {
    file: Inode<'t>,
    object: Option<ObjectId>,
    size: u64,
    /// Path of the data in a folder of objects; `None` for the path of the object.
    place: Option<&'t [u8]>,
}

// A tree may have millions of files with long paths.
const _: () = assert!(!std::mem::needs_drop::<DumpedFile<'static>>());

impl<'t> DumpedFile<'t> {
    fn new(file: Inode<'t>) -> Result<Self, ImportError> {
        let refused = |reason| ImportError::DumpFile { path: file.path(), reason };
        let Node::Regular(Content::External { size, object, location }) = file.node() else {
            return Err(refused("its data is not external"));
        };
        let place = match location {
            Location::Path(place) => Some(place.strip_prefix(b"/").unwrap_or(place)),
            Location::Object | Location::None => None,
        };
        if place.is_none() && object.is_none() {
            return Err(refused("it has neither a digest nor a path"));
        }
        Ok(Self { file, object, size, place })
    }

    /// Opens the data at the path in the dump, or else at the path of its digest.
    fn open(&self, folder: &Path) -> Result<(PathBuf, File), ImportError> {
        use std::os::unix::ffi::OsStrExt as _;
        let by_digest = self.object.map(|object| object.path()).unwrap_or_default();
        let place = self.place.unwrap_or(by_digest.as_bytes());
        let place = Path::new(std::ffi::OsStr::from_bytes(place));
        let is_below = place.components().all(|it| matches!(it, std::path::Component::Normal(_)));
        if !is_below {
            let reason = "its path leads out of the directory of objects";
            return Err(ImportError::DumpFile { path: self.file.path(), reason });
        }
        let path = folder.join(place);
        let error = match files::regular_in(folder, place) {
            Ok(file) => return Ok((path, file)),
            Err(error) => error,
        };
        match self.object {
            Some(object) if error.kind() == io::ErrorKind::NotFound => {
                let path = folder.join(&by_digest);
                match files::regular_in(folder, Path::new(&by_digest)) {
                    Ok(file) => Ok((path, file)),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        Err(ImportError::Missing { object, path: self.file.path(), looked: true })
                    }
                    Err(source) => Err(ImportError::open(&Input::File(path), source)),
                }
            }
            _ => Err(ImportError::open(&Input::File(path), error)),
        }
    }
}

/// The files of a tree whose data is external. They are ids, because a tree may have millions of long paths.
struct WantedFiles {
    /// One file for each size, digest and path of data, in the tree's order.
    files: Vec<InodeId>,
    /// The files whose data is not at the path of its object, and for each the index of the file with the same data.
    moved: Vec<(InodeId, usize)>,
}

/// Lists the files of the tree whose data is external.
fn wanted(tree: &Tree) -> Result<WantedFiles, ImportError> {
    let (mut files, mut moved, mut known) = (Vec::new(), Vec::new(), HashMap::new());
    for (file, content) in tree.files() {
        let Content::External { location, .. } = content else { continue };
        let wanted = DumpedFile::new(file)?;
        let at = *known.entry((wanted.place, wanted.object, wanted.size)).or_insert(files.len());
        if at == files.len() {
            files.push(file.id());
        }
        if !matches!(location, Location::Object) {
            moved.push((file.id(), at));
        }
    }
    Ok(WantedFiles { files, moved })
}
