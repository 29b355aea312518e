//! Makes images of images in the store: [`merge`] combines several images, and [`filter`] keeps a part of one.
//!
//! Only the file trees are read, and verified before that. The contents of the files are already objects in the store,
//! so they are not copied. The new image has no layers and therefore no manifest, like an image that was imported from
//! a directory.

mod globs;

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use image::tree::{Builder, Choice, Content, LayError, Tree};
use image::verity::ImageId;
use store::{Form, OperationError, Store};

pub use globs::{Glob, GlobError, Globs};

use crate::export;
use crate::import::{
    ImportContext, ImportError, ImportOptions, ImportRun, Report, UncommittedImage,
};

/// Why a merge or filter failed. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeriveError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The new image cannot be written.
    #[error(transparent)]
    Import(Box<ImportError>),
}

impl From<ImportError> for DeriveError {
    fn from(error: ImportError) -> Self {
        Self::Import(Box::new(error))
    }
}

#[derive(Debug, Clone)]
pub struct Filtered {
    pub report: Report,
    /// Number of paths in the new image, without the root.
    pub kept: u64,
    /// Number of paths in the source image, without the root.
    pub of: u64,
    /// Globs that matched no path of the source image, and so are probably mistakes.
    pub unmatched: Vec<Glob>,
}

/// Merges several images into one, where later images win. A path in a later image replaces the earlier one, with its
/// type and metadata. Directories are merged. A file replaces a whole directory, and a directory replaces a file.
pub fn merge(
    store: &Store,
    images: &[ImageId],
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, DeriveError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?;
    let mut builder = Builder::new();
    for image in images {
        go_on(environment)?;
        let laid = builder.lay_some(&read(store, image)?, |_, _| unless_cancelled(environment));
        laid.map_err(|error| entry(image, error))?;
    }
    go_on(environment)?;
    finish(run, builder.finish(), environment, options, start)
}

/// Makes an image from a part of another one.
pub fn filter(
    store: &Store,
    image: &ImageId,
    globs: &Globs,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Filtered, DeriveError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?;
    go_on(environment)?;
    let whole = read(store, image)?;
    let mut builder = Builder::new();
    let mut matcher = globs.matcher();
    let laid = builder.lay_some(&whole, |path, entry| match unless_cancelled(environment) {
        Choice::Keep => matcher.choose(path, entry),
        left => left,
    });
    laid.map_err(|error| entry(image, error))?;
    go_on(environment)?;
    let unmatched = matcher.unmatched(&whole);
    let tree = builder.finish();
    let (kept, of) = (names(&tree), names(&whole));
    drop(whole);
    let report = finish(run, tree, environment, options, start)?;
    Ok(Filtered { report, kept, of, unmatched })
}

/// Claims all objects that the tree needs, and writes the image.
fn finish(
    run: ImportRun<'_>,
    tree: Tree,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
    start: Instant,
) -> Result<Report, DeriveError> {
    if options.form != Form::Objects {
        let written = run.derived(&tree)?;
        return Ok(run.finish(
            UncommittedImage::from_tree(tree, Some(written)),
            options.name.cloned(),
            start,
        )?);
    }
    let mut claimed = HashSet::new();
    for (file, content) in tree.files() {
        let Content::External { size, object, .. } = content else { continue };
        let Some(object) = object else {
            let reason = "its image does not name its object";
            return Err(ImportError::File { path: file.path(), reason }.into());
        };
        if claimed.insert((object, size)) {
            go_on(environment)?;
            if !run.claim(&object, size)? {
                return Err(ImportError::Gone { object, path: file.path() }.into());
            }
        }
    }
    Ok(run.finish(UncommittedImage::from_tree(tree, None), options.name.cloned(), start)?)
}

fn read(store: &Store, image: &ImageId) -> Result<Tree, DeriveError> {
    Ok(export::tree(store, image).map_err(OperationError::of("read", "a source image"))?)
}

fn entry(image: &ImageId, error: LayError) -> DeriveError {
    let object = format_args!("\"{}\" of image {image}", error.path.escape_ascii());
    OperationError::of("add", object)(error.source).into()
}

fn go_on(environment: &ImportContext<'_>) -> Result<(), DeriveError> {
    match environment.cancel.load(Ordering::Relaxed) {
        true => Err(ImportError::Cancelled.into()),
        false => Ok(()),
    }
}

/// Leaves out the rest of a tree after the caller cancelled.
fn unless_cancelled(environment: &ImportContext<'_>) -> Choice {
    match environment.cancel.load(Ordering::Relaxed) {
        true => Choice::Leave,
        false => Choice::Keep,
    }
}

fn names(tree: &Tree) -> u64 {
    let (mut names, mut walk) = (0, tree.walk());
    while walk.next().is_some() {
        names += 1;
    }
    names
}
