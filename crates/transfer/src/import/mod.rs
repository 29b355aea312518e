//! Imports an image from a source into the store, in one transaction.
//!
//! Each layer has two threads: one thread reads, hashes and decompresses the blob; the other thread hashes the tar,
//! splits it into entries and collects their content. If an index is requested, a third thread hashes its units. A
//! pool of threads hashes the content with fs-verity and writes the objects that the store lacks. Bounded channels
//! connect the threads, and all data in these channels counts against one memory budget. The image becomes visible
//! only after every digest was compared.

mod copy;
mod decode;
mod documents;
mod erofs_file;
mod error;
mod failure;
pub(crate) mod from_store;
mod index;
mod layer;
mod layer_session;
pub(crate) mod layers;
mod limits;
mod native;
mod objects;
mod options;
mod plain;
pub(crate) mod platform;
mod recipe;
mod resources;
mod stop;
mod tally;

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use image::erofs::Profile;
use image::erofs::read::PATH_MAX;
use image::tree::{Inode, Tree};
use image::verity::{Algorithm, ImageId, ObjectId};
use store::{Committed, Form, Origin, RefName, Reference, Store};

pub use decode::DecodeError;
pub use erofs_file::{DiskError, ErofsFile, FilePiece, Window, image_of};
pub use error::{ImportError, LayersMismatch};
pub use failure::{ErofsLayerFlaw, LayerFailure};
#[cfg(feature = "registry")]
pub(crate) use from_store::complete::import_here;
pub use from_store::complete::{CompleteError, Completed, complete, prove};
pub use from_store::convert::{Stored, convert};
pub use from_store::stacked::{Below, add_unknown, preview, stack};
pub use layer_session::{IncomingLayer, LayerImport, MadeImage, RunningImport};
pub use layers::{Document, open_archive, read_archive};
pub use limits::{ImportLimitError, Limits};
pub use options::{Durable, ImportOptions, Unsupported};
pub use platform::{OtherPlatform, PlatformMismatch};
pub use resources::{BUDGET, ImportContext};

#[cfg(any(test, feature = "registry"))]
pub(crate) use layers::SourceImage;
#[cfg(feature = "registry")]
pub(crate) use layers::{LayerBlob, LayerProof, LayerSource};

use objects::Target;

use crate::evidence;
use crate::native::Written;
use crate::progress::Event;
use image::digest::Digest;
use oci::layout::{Layout, LayoutImage};
use oci::policy::{Evidence, LayoutSignatures};
use oci::source::{ImageSource, Input};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// Digest of the layer's tar.
    pub diff_id: Digest,
    /// Size of the layer's tar in bytes.
    pub tar_bytes: u64,
    /// Whether the store already had the layer.
    pub is_reused: bool,
    /// Paths of the entries that were left out, because an image cannot hold them.
    pub skipped: Vec<Vec<u8>>,
    /// ACLs that were left out.
    pub lost_acls: Vec<LostAcl>,
    /// The result for the layer's index.
    pub index: LayerIndexed,
}

/// An ACL that names a user or group without a number, so that an image cannot hold it. The file is in the image
/// without this ACL. containerd, Docker and podman ignore all ACLs of tars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostAcl {
    /// Path of the file.
    pub path: Vec<u8>,
    /// The ACL's entry that has no number.
    pub line: Vec<u8>,
}

/// The result for a layer's index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerIndexed {
    /// An index was not requested.
    NotWanted,
    /// The index was made.
    Made {
        /// Size of the index's head and windows in bytes.
        bytes: u64,
    },
    /// The store already had the index.
    Here,
    /// The layer has no index, for this reason.
    None(String),
}

#[derive(Debug, Clone)]
pub struct Report {
    /// Id of the image.
    pub image: ImageId,
    /// Size of the image in bytes.
    pub image_bytes: u64,
    /// Digest of the manifest; `None` if the source has none.
    pub manifest: Option<Digest>,
    pub name: Option<RefName>,
    /// Reports of the layers, from the lowest to the uppermost.
    pub layers: Vec<LayerReport>,
    /// Number of inodes in the image's tree.
    pub inodes: usize,
    /// Names of xattrs that mounts of the image do not show, because EROFS has no number for their namespace. The
    /// image contains them.
    pub hidden_xattrs: Vec<Vec<u8>>,
    /// Numbers of objects that were added, and that the store already had.
    pub objects: Committed,
    /// Number of signatures that came with the image, verified or not.
    pub signatures: usize,
    /// Whether the image comes from a disk with a hash tree, which was not compared with it.
    pub has_hash_tree: bool,
    /// Duration of each step.
    pub times: Times,
}

/// Durations of the steps of an import.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Reading and storing the source's data.
    pub data: Duration,
    /// Making and writing the image.
    pub image: Duration,
    /// Committing the transaction, which makes the image durable and visible.
    pub commit: Duration,
}

/// Imports an image. If it comes from a layout, the signatures there are stored as well.
///
/// # Errors
/// [`ImportError`]; the store is unchanged then, except that an image whose signatures cannot be stored stays.
pub fn import(
    store: &Store,
    source: &ImageSource,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?;
    let (mut from_layout, mut has_hash_tree) = (None, false);
    let made = match source {
        ImageSource::Layout { directory, choice } => {
            let layout = Layout::open(directory).map_err(ImportError::layout)?;
            let found = layout.find_image(choice, options.platform).map_err(ImportError::layout)?;
            let image = layers::from_layout(&layout, found.clone(), environment, options)?;
            let made = run.layers(&image)?;
            drop(image);
            from_layout = Some((layout, found));
            made
        }
        ImageSource::DockerArchive { file, choice } => run.layers(&run.docker(file, choice)?)?,
        ImageSource::Tar(input) => run.layers(&layers::from_tar(input, environment.cancel)?)?,
        ImageSource::Directory(directory) => run.directory(directory)?,
        ImageSource::Dump(input) => run.dump(input)?,
        ImageSource::Erofs(path) => run.erofs(&ErofsFile::open(path)?)?,
        ImageSource::Disk(path) => {
            let root = ErofsFile::open_disk(path, &options.platform.architecture)?;
            has_hash_tree = root.has_hash_tree();
            run.erofs(&root)?
        }
    };
    let name = match options.name {
        Some(name) => Some(name.clone()),
        None if options.unnamed => None,
        None => default_name(source, made.name.as_deref()),
    };
    let mut report = run.finish(made, name, start)?;
    report.has_hash_tree = has_hash_tree;
    if let Some((layout, found)) = &from_layout {
        report.signatures = keep_signatures(store, layout, found, &report.image)?;
    }
    Ok(report)
}

/// Imports a tar as an image of one layer. `source` names the tar in messages.
///
/// # Errors
/// [`ImportError`]; the store is unchanged then.
pub fn import_tar(
    store: &Store,
    source: &str,
    tar: impl Read + Send,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?;
    let made = run.layers(&layers::from_reader(source.to_owned(), tar, None))?;
    run.finish(made, options.name.cloned(), start)
}

/// Stores the signatures that a layout has of an imported image, unverified, and returns their number. Policies verify
/// them at each use.
fn keep_signatures(
    store: &Store,
    layout: &Layout,
    found: &LayoutImage,
    image: &ImageId,
) -> Result<usize, ImportError> {
    let LayoutSignatures { of_manifest, of_image } = LayoutSignatures::read(layout, found, image);
    let count = of_manifest.len() + of_image.len();
    let failed = |source| ImportError::failed("store", "the signatures of the image", source);
    if !of_manifest.is_empty() {
        // The indexes connect the manifest with the signed document.
        let indexes = found.indexes.clone();
        let evidence = Evidence { indexes, signatures: of_manifest, ..Evidence::default() };
        evidence::keep(&evidence, store, &found.manifest.0).map_err(failed)?;
    }
    if !of_image.is_empty() {
        let evidence = Evidence { signatures: of_image, ..Evidence::default() };
        evidence::keep(&evidence, store, image).map_err(failed)?;
    }
    Ok(count)
}

/// Checks that a source exists, before a store is created for it.
///
/// # Errors
/// The [`ImportError`] that [`import`] would return.
pub fn check(source: &ImageSource) -> Result<(), ImportError> {
    let open = |input: &Input, path: &Path| match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(source) => Err(ImportError::open(input, source)),
    };
    match source {
        ImageSource::Layout { directory, .. } => {
            Layout::open(directory).map(drop).map_err(ImportError::layout)
        }
        ImageSource::DockerArchive { file: input, .. }
        | ImageSource::Tar(input)
        | ImageSource::Dump(input) => match input {
            Input::File(path) => open(input, path),
            Input::Stdin => Ok(()),
        },
        ImageSource::Directory(path) | ImageSource::Erofs(path) | ImageSource::Disk(path) => {
            open(&Input::File(path.clone()), path)
        }
    }
}

/// Returns the default name of an image: the name of its source, if that is a valid image name.
fn default_name(source: &ImageSource, found: Option<&str>) -> Option<RefName> {
    source.default_name(found)?.parse().ok()
}

/// Imports an image whose documents and layers the caller has found.
#[cfg(any(test, feature = "registry"))]
pub(crate) fn import_found(
    store: &Store,
    found: &SourceImage<'_>,
    origins: Origins,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?.from(origins);
    let made = run.layers(found)?;
    let report = run.finish(made, options.name.cloned(), start)?;
    layers::kept(found, options.form);
    Ok(report)
}

impl<'a> ImportRun<'a> {
    pub(crate) fn begin(
        store: &'a Store,
        environment: &ImportContext<'a>,
        options: &ImportOptions<'a>,
    ) -> Result<Self, ImportError> {
        if store.algorithm() != Algorithm::Sha256 && options.form != Form::Objects {
            return Err(ImportError::Algorithm(options.form, store.algorithm()));
        }
        if options.index && options.form != Form::Tar {
            return Err(ImportError::Index(options.form));
        }
        let begun = match options.keeper {
            Some(keeper) => keeper.begin_inner(),
            None => store.begin(),
        };
        let transaction = Arc::new(begun.map_err(ImportError::transaction)?);
        Ok(Self {
            transaction,
            environment: *environment,
            options: *options,
            origins: Origins::Local,
        })
    }

    /// Sets the origin of the image, which is local by default.
    pub(crate) fn from(self, origins: Origins) -> Self {
        Self { origins, ..self }
    }

    /// Whether the store has an object. If so, `gc` keeps the object from now on.
    pub(crate) fn claim(&self, object: &ObjectId, size: u64) -> Result<bool, ImportError> {
        self.transaction.reuse(object, size).map_err(ImportError::Object)
    }

    /// Writes the image, and makes all data durable and visible.
    pub(crate) fn finish(
        self,
        mut made: UncommittedImage,
        name: Option<RefName>,
        start: Instant,
    ) -> Result<Report, ImportError> {
        let Self { transaction, environment, options, origins } = self;
        made.times.data = start.elapsed();
        let start = Instant::now();
        (environment.progress)(Event::Writing);
        let inodes = made.tree.inode_count();
        let hidden_xattrs = image::erofs::hidden_xattrs(&made.tree);
        check_paths(&made.tree)?;
        let mut form = options.form;
        let (image, image_bytes) = match made.written {
            Some(Written { image, bytes, has_tar, .. }) => {
                // For `merge` and `filter`, the data of files may be in the tar of another image instead of a packed
                // device.
                form = if has_tar { Form::Tar } else { form };
                (image, bytes)
            }
            None => {
                check_marks(&made.tree)?;
                let mut draft = transaction.image().map_err(ImportError::Object)?;
                let profile = Profile::Composefs(options.versions);
                let summary = image::erofs::write(&made.tree, &profile, &mut draft)
                    .map_err(|it| ImportError::failed("write", "the image", it))?;
                (draft.finish().map_err(ImportError::Object)?, summary.bytes)
            }
        };
        drop(made.tree);
        for origin in origins.for_manifest(made.manifest) {
            transaction.add_origin(image, origin);
        }
        // The image was made from layers whose diff ids were compared, or from data of the store.
        transaction.proven(image, made.manifest);
        let unnamed =
            || options.kept_unnamed.then(|| RefName::unnamed(&image, made.manifest.as_ref()));
        if let Some(name) = name.clone().or_else(unnamed) {
            let reference =
                Reference { image, manifest: made.manifest, form, created: environment.now };
            transaction.set_ref(name, reference);
        }
        made.times.image = start.elapsed();
        let start = Instant::now();
        if environment.cancel.load(Ordering::Relaxed) {
            return Err(ImportError::Cancelled);
        }
        (environment.progress)(Event::Committing);
        let transaction = Arc::into_inner(transaction).expect("all threads have ended");
        let mut objects = transaction.commit().map_err(ImportError::transaction)?;
        objects += made.committed;
        made.times.commit = start.elapsed();
        Ok(Report {
            image,
            image_bytes,
            manifest: made.manifest,
            name,
            layers: made.layers,
            inodes,
            hidden_xattrs,
            objects,
            signatures: 0,
            has_hash_tree: false,
            times: made.times,
        })
    }
}

/// Xattrs of an image of the form `objects` that mark a file as a whiteout, or a directory as a directory with
/// whiteouts. Source: composefs, `lcfs-writer.c`, and Linux Documentation/filesystems/overlayfs.rst, "Nesting
/// overlayfs mounts".
const WHITEOUT_MARKS: [&[u8]; 4] = [
    b"trusted.overlay.whiteout",
    b"trusted.overlay.whiteouts",
    b"user.overlay.whiteout",
    b"user.overlay.whiteouts",
];

/// Refuses files with such xattrs: the kernel would treat them as whiteouts, unlike programs that read the image.
fn check_marks(tree: &Tree) -> Result<(), ImportError> {
    let check = |path: &[u8], inode: &Inode<'_>| {
        let mark = inode.xattrs().map(|(name, _)| name).find(|it| WHITEOUT_MARKS.contains(it));
        match mark {
            Some(name) => Err(ImportError::WhiteoutMark {
                path: String::from_utf8_lossy(path).into_owned(),
                name: String::from_utf8_lossy(name).into_owned(),
            }),
            None => Ok(()),
        }
    };
    check(b"/", &tree.root())?;
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        if entry.is_owner {
            check(path, &entry.inode)?;
        }
    }
    Ok(())
}

/// Refuses paths that are too long: [`image::erofs::read`] would treat the image as corrupt.
fn check_paths(tree: &Tree) -> Result<(), ImportError> {
    let mut walk = tree.walk();
    while let Some((path, _)) = walk.next() {
        if path.len() > PATH_MAX {
            return Err(ImportError::Path { start: path[..60].to_vec(), length: path.len() });
        }
    }
    Ok(())
}

/// The result of importing a source, before the commit.
pub(crate) struct UncommittedImage {
    tree: Tree,
    /// The image, if it is already written.
    written: Option<Written>,
    manifest: Option<Digest>,
    layers: Vec<LayerReport>,
    name: Option<String>,
    /// Counts of data that separate transactions have committed.
    committed: Committed,
    times: Times,
}

impl UncommittedImage {
    /// Makes the result for a tree without layers, and its image if that is already written.
    pub(crate) fn from_tree(tree: Tree, written: Option<Written>) -> Self {
        Self {
            tree,
            written,
            manifest: None,
            layers: Vec::new(),
            name: None,
            committed: Committed::default(),
            times: Times::default(),
        }
    }
}

/// The origin of an imported image.
#[derive(Debug)]
pub(crate) enum Origins {
    /// The image is imported from a local source.
    Local,
    /// The origin is not known.
    Unknown,
    /// The image is pulled from this repository, `registry/repository`.
    #[cfg(feature = "registry")]
    Pulled(String),
    /// The image has the same origins as another image with the same files.
    Same(Vec<Origin>),
}

impl Origins {
    /// Returns the origins to record for an image with this manifest.
    fn for_manifest(self, manifest: Option<Digest>) -> Vec<Origin> {
        match self {
            Self::Local => vec![Origin { manifest, repository: None }],
            Self::Unknown => Vec::new(),
            #[cfg(feature = "registry")]
            Self::Pulled(repository) => vec![Origin { manifest, repository: Some(repository) }],
            Self::Same(origins) => origins,
        }
    }
}

/// An import in progress: its transaction, resources, options and origin.
pub(crate) struct ImportRun<'a> {
    transaction: Target<'a>,
    environment: ImportContext<'a>,
    options: ImportOptions<'a>,
    origins: Origins,
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn check_name(text: &str, found: Option<&str>, expect: Option<&str>) {
        let name = default_name(&ImageSource::parse(OsStr::new(text)).unwrap(), found);
        assert_eq!(name.as_ref().map(RefName::as_str), expect, "{text} {found:?}");
    }

    #[test]
    fn default_names() {
        check_name("oci:/x/debian", None, Some("debian:latest"));
        check_name("oci:/x/debian:12", None, Some("debian:12"));
        check_name("oci:/x/debian", Some("12"), Some("debian:12"));
        check_name(
            "oci:/x/debian",
            Some("docker.io/library/sid:1"),
            Some("docker.io/library/sid:1"),
        );
        check_name("docker-archive:-", Some("debian:12"), Some("debian:12"));
        check_name("docker-archive:x:debian", Some("debian"), Some("debian:latest"));
        check_name("docker-archive:-", None, None);
        check_name("tar:root.tar.gz", None, Some("root:latest"));
        check_name("tar:-", None, None);
        check_name("dir:/", None, None);
        check_name("dir:/Root", None, None);
        check_name("dump:cs9.dump", None, Some("cs9:latest"));
        check_name("erofs:/x/debian.erofs", None, Some("debian:latest"));
        check_name("disk:debian.img", None, Some("debian:latest"));
        check_name("disk:disk.img", None, None);
        check_name("erofs:/x/disk", None, None);
        check_name("disk:erofs.raw", None, None);
    }
}
