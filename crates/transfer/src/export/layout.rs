//! Writes images into an OCI layout. Source: OCI image-spec 1.1, `image-layout.md`.
//!
//! Blobs come first: each is written under a temporary name, synced and then renamed. `index.json` comes last and is
//! replaced atomically, so a reader sees either the old or the new layout, also after a crash. A lock on the
//! directory prevents two exports from losing each other's images.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::FlockOperation;
use serde::Deserialize as _;
use serde_json::{Value, json};
use store::{OperationError, Store};

use super::compress::copy;
use super::copy_error::CopyError;
use super::layout_signatures::AddedSignatures;
use super::{ExportError, ExportPlan, How, Options};
use crate::progress::Event;
use crate::stored::StoredError;
use image::digest::Digest;
use image::verity::ImageId;
use oci::files;
use oci::layout::Layout;
use oci::manifest::{Descriptor, Document, KIND, KIND_IMAGE, REF_NAME};

#[derive(Debug, Clone)]
pub struct LayoutReport {
    /// Number of blobs that were written, including the config and the manifest.
    pub blobs: usize,
    pub bytes: u64,
    /// Number of blobs that the layout had already.
    pub reused: usize,
    /// Number of the image's signatures that the store has and the layout has now.
    pub signatures: usize,
}

const INDEX: &str = "index.json";
const BLOBS: &str = "blobs";
const MARKER: &str = "oci-layout";
const MARKER_TEXT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Writes an image into the layout in `directory`, which is created if it does not exist. If another image has the
/// same tag, that entry is removed; other images are kept. The stored signatures of the manifest are added, and those
/// of the id if `image` is given.
///
/// # Errors
/// An [`ExportError`], after the removal of all files that were written.
pub fn to_layout(
    store: &Store,
    plan: &ExportPlan,
    image: Option<&ImageId>,
    directory: &Path,
    tag: Option<&str>,
    options: &Options<'_>,
) -> Result<LayoutReport, ExportError> {
    let made = CreatedFiles::default();
    made.directories(directory)?;
    let _lock = lock(directory)?;
    // Values drop in reverse order, so the files are removed before the lock is released.
    let made = made;
    let is_new = is_new(directory)?;
    // `Layout::open` limits the length of the old index, and reports errors in it.
    let layout = if is_new { None } else { Some(Layout::open(directory)) };
    let layout = layout.transpose().map_err(OperationError::of("add", "to the layout"))?;
    let signatures = AddedSignatures::new(store, &plan.digest, image, layout.as_ref())?;
    let index = index(directory, layout.as_ref(), plan, tag, &signatures)?;
    remove_drafts(directory)?;
    let mut blobs: BTreeMap<Digest, BlobContent<'_>> = BTreeMap::new();
    for (number, layer) in plan.layers.iter().enumerate() {
        blobs.entry(layer.descriptor.digest).or_insert(BlobContent::Layer(number));
    }
    blobs.insert(plan.config.digest, BlobContent::Bytes(&plan.config_bytes));
    blobs.insert(plan.digest, BlobContent::Bytes(&plan.manifest));
    for (digest, bytes) in &signatures.documents {
        blobs.insert(*digest, BlobContent::Bytes(bytes));
    }
    let blobs: Vec<_> = blobs.into_iter().collect();
    for (digest, _) in &blobs {
        if let Some(folder) = blob_path(directory, digest).parent() {
            made.directories(folder)?;
            remove_drafts(folder)?;
        }
    }
    let written = options.each(blobs.len(), |at| {
        let (digest, content) = &blobs[at];
        let path = blob_path(directory, digest);
        blob(store, plan, &path, digest, content, &made, options)
    })?;

    (options.progress)(Event::Committing);
    let mut folders: Vec<_> = blobs
        .iter()
        .filter_map(|it| Some(blob_path(directory, &it.0).parent()?.to_owned()))
        .collect();
    folders.dedup();
    for folder in folders.iter().map(PathBuf::as_path).chain([&*directory.join(BLOBS)]) {
        sync(folder)?;
    }
    if is_new {
        let marker = directory.join(MARKER);
        replace(&marker, &mut &*MARKER_TEXT, options, &|_| {}, &read_failed)?;
        made.add(&marker, Kind::File);
        sync(directory)?;
    }
    options.go_on()?;
    let index_path = directory.join(INDEX);
    replace(&index_path, &mut index.to_string().as_bytes(), options, &|_| {}, &read_failed)?;
    // From here on, the layout contains the image, so the files are kept.
    made.keep();
    sync(directory)?;
    for parent in directory.ancestors().skip(1).take(1).filter(|it| !it.as_os_str().is_empty()) {
        sync(parent)?;
    }
    let new: Vec<u64> = written.iter().copied().flatten().collect();
    Ok(LayoutReport {
        blobs: new.len(),
        bytes: new.iter().sum(),
        reused: written.len() - new.len(),
        signatures: signatures.count,
    })
}

/// The source of a blob.
enum BlobContent<'a> {
    /// The layer with this index in the plan.
    Layer(usize),
    /// These bytes.
    Bytes(&'a [u8]),
}

/// Writes a blob unless the layout has it. Returns the number of bytes written.
fn blob(
    store: &Store,
    plan: &ExportPlan,
    path: &Path,
    digest: &Digest,
    content: &BlobContent<'_>,
    made: &CreatedFiles,
    options: &Options<'_>,
) -> Result<Option<u64>, ExportError> {
    let progress = |event: Event<'_>| match content {
        // The progress of compressed layers was reported when they were compressed.
        BlobContent::Layer(number)
            if !matches!(plan.layers[*number].how, How::Compressed | How::New) =>
        {
            (options.progress)(event);
        }
        _ => {}
    };
    let layer = if let BlobContent::Layer(number) = content { *number } else { 0 };
    if is_there(path, digest, options)? {
        progress(Event::Reused { layer });
        return Ok(None);
    }
    let is_new = !path.exists();
    match content {
        BlobContent::Bytes(bytes) => {
            replace(path, &mut &**bytes, options, &|_| {}, &read_failed)?;
        }
        BlobContent::Layer(number) => {
            progress(Event::Started { layer });
            let planned = &plan.layers[*number];
            let tell = |bytes| progress(Event::Read { layer, bytes });
            let failed = |error| ExportError::layer(planned.diff_id, error);
            replace(path, &mut planned.open(store)?, options, &tell, &failed)?;
            progress(Event::Done { layer });
        }
    }
    if is_new {
        made.add(path, Kind::File);
    }
    Ok(Some(match content {
        BlobContent::Bytes(bytes) => bytes.len() as u64,
        BlobContent::Layer(number) => plan.layers[*number].descriptor.size,
    }))
}

/// Whether the file has the right bytes already.
fn is_there(path: &Path, digest: &Digest, options: &Options<'_>) -> Result<bool, ExportError> {
    let failed = OperationError::at("write", path);
    let mut file = match files::regular(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed(error).into()),
    };
    let mut hasher = digest.hasher();
    match copy(&mut file, &mut hasher, options, &|_| {}) {
        Ok(()) => Ok(hasher.finish() == *digest),
        Err(CopyError::Cancelled) => Err(ExportError::Cancelled),
        Err(CopyError::Failed(error)) => Err(error.into()),
        Err(CopyError::Read(error) | CopyError::Write(error)) => Err(failed(error).into()),
    }
}

/// Error of a read from memory, which cannot fail.
fn read_failed(error: io::Error) -> ExportError {
    OperationError::at("write", Path::new(""))(error).into()
}

/// Prefix of the names of incomplete files.
const DRAFT: &str = ".quire-layout-";

/// Removes the temporary files of killed exports. This export has the lock, so no other export is writing such files.
fn remove_drafts(folder: &Path) -> Result<(), ExportError> {
    let failed = OperationError::at("write", folder);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_draft = entry.file_name().as_encoded_bytes().starts_with(DRAFT.as_bytes());
        if is_draft && entry.file_type().map_err(failed)?.is_file() {
            fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    Ok(())
}

/// Writes a file so that it appears either complete or not at all.
fn replace(
    path: &Path,
    from: &mut dyn Read,
    options: &Options<'_>,
    tell: &dyn Fn(u64),
    read_failed: &dyn Fn(io::Error) -> ExportError,
) -> Result<(), ExportError> {
    let failed = OperationError::at("write", path);
    let parent = path.parent().unwrap_or(path);
    let mut draft = tempfile::Builder::new()
        .prefix(DRAFT)
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(parent)
        .map_err(failed)?;
    match copy(from, draft.as_file_mut(), options, tell) {
        Ok(()) => {}
        Err(CopyError::Cancelled) => return Err(ExportError::Cancelled),
        Err(CopyError::Failed(error)) => return Err(error.into()),
        Err(CopyError::Read(error)) => return Err(read_failed(error)),
        Err(CopyError::Write(error)) => return Err(failed(error).into()),
    }
    draft.as_file().sync_all().map_err(failed)?;
    draft.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

fn blob_path(directory: &Path, digest: &Digest) -> PathBuf {
    let text = digest.to_string();
    let (algorithm, hex) = text.split_once(':').unwrap_or_default();
    directory.join(BLOBS).join(algorithm).join(hex)
}

fn sync(directory: &Path) -> Result<(), ExportError> {
    let synced = File::open(directory).and_then(|it| it.sync_all());
    Ok(synced.map_err(OperationError::at("write", directory))?)
}

/// Locks the layout while it is changed.
fn lock(directory: &Path) -> Result<File, ExportError> {
    let failed = OperationError::at("write", directory);
    let file = File::open(directory).map_err(failed)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ExportError::Busy(directory.to_owned())),
        Err(errno) => Err(failed(errno.into()).into()),
    }
}

/// Whether this directory has no layout yet. The directory is either empty or has only files of an export that was
/// killed or could not clean up.
fn is_new(directory: &Path) -> Result<bool, ExportError> {
    let failed = OperationError::at("write", directory);
    let (mut is_empty, mut is_marked) = (true, false);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if name == INDEX {
            return Ok(false);
        } else if name == MARKER {
            is_marked = true;
            is_empty &= is_unfinished_marker(&entry.path()).map_err(failed)?;
        } else if name == BLOBS {
            is_empty &= has_directories_only(&entry).map_err(failed)?;
        } else {
            is_empty &= name.as_encoded_bytes().starts_with(DRAFT.as_bytes());
        }
    }
    match (is_empty, is_marked) {
        (true, _) => Ok(true),
        (false, true) => Ok(false),
        (false, false) => Err(ExportError::NotEmpty(directory.to_owned())),
    }
}

/// Whether this is a directory that contains only directories, like `blobs`. A symbolic link could lead anywhere.
fn has_directories_only(entry: &fs::DirEntry) -> io::Result<bool> {
    if !entry.file_type()?.is_dir() {
        return Ok(false);
    }
    for below in fs::read_dir(entry.path())? {
        if !below?.file_type()?.is_dir() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the file has the marker's content, or only its beginning, which a power cut may leave.
fn is_unfinished_marker(path: &Path) -> io::Result<bool> {
    if fs::symlink_metadata(path)?.is_symlink() {
        return Ok(false);
    }
    let Ok(file) = files::regular(path) else { return Ok(false) };
    let mut text = Vec::new();
    file.take(MARKER_TEXT.len() as u64 + 1).read_to_end(&mut text)?;
    Ok(MARKER_TEXT.starts_with(&text))
}

/// Returns the new content of `index.json`.
fn index(
    directory: &Path,
    layout: Option<&Layout>,
    plan: &ExportPlan,
    tag: Option<&str>,
    signatures: &AddedSignatures,
) -> Result<Value, ExportError> {
    let mut index = if let Some(layout) = layout {
        let parsed = serde_json::from_slice(layout.index_bytes());
        parsed.map_err(OperationError::at("write", &directory.join(INDEX)))?
    } else {
        json!({ "schemaVersion": 2, "mediaType": oci::manifest::INDEX, "manifests": [] })
    };
    let mut entry = json!({
        "mediaType": plan.media_type,
        "digest": plan.digest.to_string(),
        "size": plan.manifest.len(),
    });
    if let Some(tag) = tag {
        entry["annotations"][REF_NAME] = tag.into();
    }
    if signatures.signs_manifest {
        entry["annotations"][KIND] = KIND_IMAGE.into();
    }
    let manifests = index["manifests"].as_array_mut();
    let manifests = manifests.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData));
    let manifests = manifests.map_err(OperationError::at("write", directory))?;
    let name = |entry: &Value| entry["annotations"][REF_NAME].as_str().map(str::to_owned);
    let is_this = |entry: &Value| entry["digest"] == plan.digest.to_string();
    // Cosign gives signatures no name.
    let is_image = |entry: &Value| !Descriptor::deserialize(entry).is_ok_and(|it| it.is_attached());
    let has_no_name = |entry: &Value| name(entry).is_none() && is_image(entry);
    if tag.is_none() && manifests.iter().any(|it| has_no_name(it) && !is_this(it)) {
        return Err(ExportError::Untagged(directory.to_owned()));
    }
    manifests
        .retain(|it| if tag.is_none() { !has_no_name(it) } else { name(it).as_deref() != tag });
    manifests.push(entry);
    signatures.list(manifests);
    // It is better to refuse the image than to write a layout that other programs cannot read.
    Document::parse(index.to_string().as_bytes()).map_err(StoredError::wrong(&plan.digest))?;
    Ok(index)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Directory,
}

/// Files and directories made so far. They are removed on drop unless `keep` was called.
#[derive(Debug, Default)]
struct CreatedFiles(Mutex<Vec<(PathBuf, Kind)>>);

impl CreatedFiles {
    fn add(&self, path: &Path, kind: Kind) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((path.to_owned(), kind));
    }

    /// Creates a directory and its missing parents.
    fn directories(&self, path: &Path) -> Result<(), ExportError> {
        let failed = OperationError::at("write", path);
        match fs::create_dir(path) {
            Ok(()) => self.add(path, Kind::Directory),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
                self.directories(parent.ok_or_else(|| failed(error))?)?;
                fs::create_dir(path).map_err(failed)?;
                self.add(path, Kind::Directory);
            }
            Err(error) => return Err(failed(error).into()),
        }
        Ok(())
    }

    fn keep(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Drop for CreatedFiles {
    fn drop(&mut self) {
        let made = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for (path, kind) in made.iter().rev() {
            let removed = match kind {
                Kind::File => fs::remove_file(path),
                Kind::Directory => fs::remove_dir(path),
            };
            if let Err(error) = removed {
                tracing::debug!(path = %path.display(), %error, "cannot remove the unfinished file");
            }
        }
    }
}
