//! Imports directories and dumps, which are trees rather than layers.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use image::dump::Strictness;
use image::tree::{Content, InodeId, Location, Tree};
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
        let wanted = wanted(&tree)?;
        let objects = self.collect(&wanted)?;
        // A tree may contain any path for a file's data, but in the store the data is at the path of its object.
        let moved = wanted.iter().zip(&objects).filter(|(wanted, _)| !wanted.is_in_place);
        let moved: HashMap<_, _> = moved
            .flat_map(|(wanted, object)| {
                wanted.inodes.iter().map(|it| (*it, FileData::Object(*object)))
            })
            .collect();
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
    fn collect(&self, wanted: &[DumpedFile]) -> Result<Vec<ObjectId>, ImportError> {
        let cancelled = || self.environment.cancel.load(Ordering::Relaxed);
        let found = parallel::each("import", self.environment.threads.get(), wanted.len(), |at| {
            if cancelled() { Err(ImportError::Cancelled) } else { self.have(&wanted[at]) }
        });
        if cancelled() { Err(ImportError::Cancelled) } else { found }
    }

    /// Makes sure that the store has the object of a wanted file, and returns its id.
    fn have(&self, wanted: &DumpedFile) -> Result<ObjectId, ImportError> {
        if let Some(object) = wanted.object
            && self.transaction.reuse(&object, wanted.size).map_err(ImportError::Object)?
        {
            return Ok(object);
        }
        let refused = |reason| ImportError::DumpFile { path: wanted.path.clone(), reason };
        let Some(folder) = self.options.objects else {
            let Some(object) = wanted.object else {
                return Err(refused(
                    "it has no digest: name the directory of its objects with --objects",
                ));
            };
            return Err(ImportError::Missing { object, path: wanted.path.clone(), looked: false });
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

/// A file of a dump, or several files with the same size, digest and path of data.
struct DumpedFile {
    object: Option<ObjectId>,
    size: u64,
    /// Path of the data in a folder of objects.
    place: Vec<u8>,
    /// Whether that path is the object's path in the store.
    is_in_place: bool,
    /// Path of one such file, for messages.
    path: Vec<u8>,
    inodes: Vec<InodeId>,
}

impl DumpedFile {
    /// Opens the data at the path in the dump, or else at the path of its digest.
    fn open(&self, folder: &Path) -> Result<(PathBuf, File), ImportError> {
        use std::os::unix::ffi::OsStrExt as _;
        let place = Path::new(std::ffi::OsStr::from_bytes(&self.place));
        let is_below = place.components().all(|it| matches!(it, std::path::Component::Normal(_)));
        if !is_below {
            let reason = "its path leads out of the directory of objects";
            return Err(ImportError::DumpFile { path: self.path.clone(), reason });
        }
        let path = folder.join(place);
        let error = match files::regular_in(folder, place) {
            Ok(file) => return Ok((path, file)),
            Err(error) => error,
        };
        match self.object {
            Some(object) if error.kind() == io::ErrorKind::NotFound => {
                let by_digest = folder.join(object.path());
                match files::regular_in(folder, Path::new(&object.path())) {
                    Ok(file) => Ok((by_digest, file)),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        Err(ImportError::Missing { object, path: self.path.clone(), looked: true })
                    }
                    Err(source) => Err(ImportError::open(&Input::File(by_digest), source)),
                }
            }
            _ => Err(ImportError::open(&Input::File(path), error)),
        }
    }
}

/// Lists the files of the tree whose data is external, each path of data once, in the tree's order.
fn wanted(tree: &Tree) -> Result<Vec<DumpedFile>, ImportError> {
    let mut all: Vec<DumpedFile> = Vec::new();
    let mut known = HashMap::new();
    for (file, content) in tree.files() {
        let Content::External { size, object, location } = content else { continue };
        let place = match (location, object) {
            (Location::Path(place), _) => place.strip_prefix(b"/").unwrap_or(place).to_vec(),
            (_, Some(object)) => object.path().into_bytes(),
            (_, None) => {
                let reason = "it has neither a digest nor a path";
                return Err(ImportError::DumpFile { path: file.path(), reason });
            }
        };
        let at = *known.entry((place.clone(), object, size)).or_insert(all.len());
        if at == all.len() {
            let is_in_place = matches!(location, Location::Object);
            let path = file.path();
            all.push(DumpedFile { object, size, place, is_in_place, path, inodes: Vec::new() });
        }
        all[at].inodes.push(file.id());
    }
    Ok(all)
}
