//! Imports: from a source to an image in the store, in one transaction.
//!
//! Each layer has two threads: one reads, hashes and inflates its blob, the other hashes the tar, splits it into
//! entries and gathers their content. With an index, a third one hashes its units. A pool of threads hashes the content once more, by fs-verity, and writes the
//! objects that the store lacks. Bounded channels connect them, and all data in them counts against one budget of
//! bytes. Nothing is visible before every digest was compared.

mod complete;
mod convert;
mod copy;
mod decode;
mod decode_pipeline;
mod documents;
mod error;
mod failure;
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
mod read_index;
mod recipe;
mod resources;
mod reuse;
pub(crate) mod stacked;
mod stop;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use image::erofs::Profile;
use image::erofs::read::PATH_MAX;
use image::tree::{Inode, Tree};
use image::verity::{Algorithm, ImageId, ObjectId};
use store::{Committed, Form, Origin, RefName, Reference, Store};

#[cfg(feature = "registry")]
pub(crate) use complete::import_here;
pub use complete::{CompleteError, Completed, complete, prove};
pub use convert::{Stored, convert};
pub use decode::DecodeError;
pub use error::{ImportError, LayersMismatch};
pub use failure::LayerFailure;
pub use layer_session::{IncomingLayer, LayerImport, MadeImage, RunningImport};
pub use layers::Document;
pub use limits::{LimitError, Limits};
pub use options::{Durable, ImportOptions, Unsupported};
pub use platform::{OtherPlatform, PlatformMismatch};
pub use resources::{BUDGET, ImportContext};
pub use stacked::{Below, add_unknown, preview, stack};

#[cfg(any(test, feature = "registry"))]
pub(crate) use layers::Found;
#[cfg(feature = "registry")]
pub(crate) use layers::{LayerBlob, LayerSource, Title};

use objects::Target;

use crate::native::Written;
use crate::progress::Event;
use image::digest::Digest;
use oci::layout::Layout;
use oci::source::{Input, Source};

/// Result of importing one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// Digest of its tar.
    pub diff_id: Digest,
    /// Bytes of its tar.
    pub tar_bytes: u64,
    /// Whether the store had it already.
    pub is_reused: bool,
    /// Paths that were left out, because no tree can hold them.
    pub skipped: Vec<Vec<u8>>,
    /// ACLs that were left out.
    pub lost_acls: Vec<LostAcl>,
    /// What became of its index.
    pub index: LayerIndexed,
}

/// An ACL that names a user or group without a number, so that no image can hold it. The file is in the image without
/// its ACL, as in containerd, Docker and podman, which ignore all ACLs of tars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostAcl {
    /// The file.
    pub path: Vec<u8>,
    /// The entry of the ACL.
    pub line: Vec<u8>,
}

/// What became of a layer's index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerIndexed {
    /// None was wanted.
    NotWanted,
    /// It was made.
    Made {
        /// Bytes of head and windows.
        bytes: u64,
    },
    /// The store had it already.
    Here,
    /// There is none, for this reason.
    None(String),
}

/// Result of an import.
#[derive(Debug, Clone)]
pub struct Report {
    /// The image.
    pub image: ImageId,
    /// Bytes of the image.
    pub image_bytes: u64,
    /// The manifest; `None` if the source has none.
    pub manifest: Option<Digest>,
    /// The image's name.
    pub name: Option<RefName>,
    /// Its layers, from the lowest to the uppermost.
    pub layers: Vec<LayerReport>,
    /// Inodes in its tree.
    pub inodes: usize,
    /// Names of xattrs that no mount shows, because EROFS has no number for their namespace. The image has them.
    pub hidden_xattrs: Vec<Vec<u8>>,
    /// Objects that were added, and those that the store had.
    pub objects: Committed,
    /// Time for each step.
    pub times: Times,
}

/// Durations of the steps of an import.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// To read and store the source's data.
    pub data: Duration,
    /// To make and write the image.
    pub image: Duration,
    /// To make all durable and visible.
    pub commit: Duration,
}

/// Imports an image.
///
/// # Errors
/// [`ImportError`]; then nothing was changed.
pub fn import(
    store: &Store,
    source: &Source,
    surroundings: &ImportContext<'_>,
    wishes: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let job = Job::begin(store, surroundings, wishes)?;
    let made = match source {
        Source::Layout { directory, choice } => {
            let layout = Layout::open(directory).map_err(ImportError::layout)?;
            job.layers(&layers::from_layout(&layout, choice, surroundings, wishes)?)?
        }
        Source::DockerArchive { file, choice } => job.layers(&job.docker(file, choice)?)?,
        Source::Tar(input) => job.layers(&layers::from_tar(input, surroundings.cancel)?)?,
        Source::Directory(directory) => job.directory(directory)?,
        Source::Dump(input) => job.dump(input)?,
    };
    let name = match wishes.name {
        Some(name) => Some(name.clone()),
        None => default_name(source, made.name.as_deref()),
    };
    job.finish(made, name, start)
}

/// Looks whether a source is there, before a store is made for it.
///
/// # Errors
/// [`ImportError`], as [`import`] gives it.
pub fn check(source: &Source) -> Result<(), ImportError> {
    let open = |input: &Input, path: &Path| match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(source) => Err(ImportError::Open { input: input.clone(), source }),
    };
    match source {
        Source::Layout { directory, .. } => {
            Layout::open(directory).map(drop).map_err(ImportError::layout)
        }
        Source::DockerArchive { file: input, .. } | Source::Tar(input) | Source::Dump(input) => {
            match input {
                Input::File(path) => open(input, path),
                Input::Stdin => Ok(()),
            }
        }
        Source::Directory(path) => open(&Input::File(path.clone()), path),
    }
}

/// Default name of an image: the name of its source, if that is a valid image name.
fn default_name(source: &Source, found: Option<&str>) -> Option<RefName> {
    source.default_name(found)?.parse().ok()
}

/// Imports an image whose parts were found elsewhere.
#[cfg(any(test, feature = "registry"))]
pub(crate) fn import_found(
    store: &Store,
    found: &Found<'_>,
    origins: Origins,
    surroundings: &ImportContext<'_>,
    wishes: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let job = Job::begin(store, surroundings, wishes)?.from(origins);
    let made = job.layers(found)?;
    let report = job.finish(made, wishes.name.cloned(), start)?;
    layers::kept(found, wishes.form);
    Ok(report)
}

impl<'a> Job<'a> {
    pub(crate) fn begin(
        store: &'a Store,
        surroundings: &ImportContext<'a>,
        wishes: &ImportOptions<'a>,
    ) -> Result<Self, ImportError> {
        if store.algorithm() != Algorithm::Sha256 {
            return Err(ImportError::Algorithm(store.algorithm()));
        }
        if wishes.index && wishes.form != Form::Tar {
            return Err(ImportError::Index(wishes.form));
        }
        let begun = match wishes.keeper {
            Some(keeper) => keeper.begin_inner(),
            None => store.begin(),
        };
        let transaction = Arc::new(begun.map_err(ImportError::Transaction)?);
        Ok(Self {
            transaction,
            surroundings: *surroundings,
            wishes: *wishes,
            origins: Origins::Local,
        })
    }

    /// The same for an image that does not come from here.
    pub(crate) fn from(self, origins: Origins) -> Self {
        Self { origins, ..self }
    }

    /// Whether the store has an object; from here on `gc` leaves it alone.
    pub(crate) fn claim(&self, object: &ObjectId, size: u64) -> Result<bool, ImportError> {
        self.transaction.reuse(object, size).map_err(ImportError::Object)
    }

    /// Writes the image, and makes all durable and visible.
    pub(crate) fn finish(
        self,
        mut made: Made,
        name: Option<RefName>,
        start: Instant,
    ) -> Result<Report, ImportError> {
        let Self { transaction, surroundings, wishes, origins } = self;
        made.times.data = start.elapsed();
        let start = Instant::now();
        (surroundings.progress)(Event::Writing);
        let inodes = made.tree.inode_count();
        let hidden_xattrs = image::erofs::hidden_xattrs(&made.tree);
        check_paths(&made.tree)?;
        let mut form = wishes.form;
        let (image, image_bytes) = match made.written {
            Some(Written { image, bytes, has_tar, .. }) => {
                // Of a `merge` or `filter`, another image's tar may have what was to be packed.
                form = if has_tar { Form::Tar } else { form };
                (image, bytes)
            }
            None => {
                check_marks(&made.tree)?;
                let mut draft = transaction.image().map_err(ImportError::Object)?;
                let profile = Profile::Composefs(wishes.versions);
                let summary = image::erofs::write(&made.tree, &profile, &mut draft)
                    .map_err(ImportError::Image)?;
                (draft.finish().map_err(ImportError::Object)?, summary.bytes)
            }
        };
        drop(made.tree);
        for origin in origins.of(made.manifest) {
            transaction.add_origin(image, origin);
        }
        // It was written from layers that were read and had their diff ids, or from what the store has.
        transaction.proven(image, made.manifest);
        if let Some(name) = &name {
            let reference =
                Reference { image, manifest: made.manifest, form, created: surroundings.now };
            transaction.set_ref(name.clone(), reference);
        }
        made.times.image = start.elapsed();
        let start = Instant::now();
        if surroundings.cancel.load(Ordering::Relaxed) {
            return Err(ImportError::Cancelled);
        }
        (surroundings.progress)(Event::Committing);
        let transaction = Arc::into_inner(transaction).expect("all threads have ended");
        let mut objects = transaction.commit().map_err(ImportError::Transaction)?;
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
            times: made.times,
        })
    }
}

/// Xattrs by which an image of the form `objects` says that a file stands for a whiteout, or that a directory has some.
/// Source: composefs, `lcfs-writer.c`, and Linux Documentation/filesystems/overlayfs.rst, "Nesting overlayfs mounts".
const WHITEOUT_MARKS: [&[u8]; 4] = [
    b"trusted.overlay.whiteout",
    b"trusted.overlay.whiteouts",
    b"user.overlay.whiteout",
    b"user.overlay.whiteouts",
];

/// A file with such an xattr of its own would be one thing to the kernel, and another one to those who read the image.
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

/// Refuses paths that are too long to be read: [`image::erofs::read`] calls such an image corrupt.
fn check_paths(tree: &Tree) -> Result<(), ImportError> {
    let mut walk = tree.walk();
    while let Some((path, _)) = walk.next() {
        if path.len() > PATH_MAX {
            return Err(ImportError::Path { start: path[..60].to_vec(), length: path.len() });
        }
    }
    Ok(())
}

/// What a source was made into.
pub(crate) struct Made {
    tree: Tree,
    /// Its image, if that was written already.
    written: Option<Written>,
    manifest: Option<Digest>,
    layers: Vec<LayerReport>,
    name: Option<String>,
    /// What was committed on the way.
    committed: Committed,
    times: Times,
}

impl Made {
    /// A tree that no layers make, and its image if that was written already.
    pub(crate) fn of(tree: Tree, written: Option<Written>) -> Self {
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

/// Where the image of an import comes from.
#[derive(Debug)]
pub(crate) enum Origins {
    /// From here.
    Local,
    /// From wherever others had it from.
    Unknown,
    /// It is pulled from a repository, `registry/repository`.
    #[cfg(feature = "registry")]
    Pulled(String),
    /// From wherever another image with the same files came from.
    Same(Vec<Origin>),
}

impl Origins {
    /// What is to be noted of an image that is made of this manifest.
    fn of(self, manifest: Option<Digest>) -> Vec<Origin> {
        match self {
            Self::Local => vec![Origin { manifest, repository: None }],
            Self::Unknown => Vec::new(),
            #[cfg(feature = "registry")]
            Self::Pulled(repository) => vec![Origin { manifest, repository: Some(repository) }],
            Self::Same(origins) => origins,
        }
    }
}

/// An import at work: a transaction, what it works with, and how it is to be done.
pub(crate) struct Job<'a> {
    transaction: Target<'a>,
    surroundings: ImportContext<'a>,
    wishes: ImportOptions<'a>,
    origins: Origins,
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn check_name(text: &str, found: Option<&str>, expect: Option<&str>) {
        let name = default_name(&Source::parse(OsStr::new(text)).unwrap(), found);
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
    }
}
