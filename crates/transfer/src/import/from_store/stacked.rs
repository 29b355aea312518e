//! Adds one layer to an image of the store, without reading the lower layers again.

use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use image::tree::{Builder, Tree};
use image::verity::Algorithm;
use store::{Blob, Store};

use crate::import::layers::{LayerProof, LayerSource, Once, onto};
use crate::import::stop::Stop;
use crate::import::tally::Totals;
use crate::import::{
    ImportContext, ImportError, ImportOptions, ImportRun, LayerFailure, Origins, Report, Times,
    UncommittedImage, copy, layer,
};
use crate::progress::Event;
use image::digest::Digest;

/// The image to which a layer is added.
#[derive(Debug, Clone, Copy)]
pub struct Below<'a> {
    pub tree: &'a Tree,
    /// Diff ids of the image's layers, from the lowest to the uppermost.
    pub diff_ids: &'a [Digest],
}

/// A document's digest and bytes.
pub(crate) type NamedDocument = (Digest, Vec<u8>);

/// Adds a layer. `documents` makes the config and the manifest when the layer's diff id and blob are known.
///
/// # Errors
/// [`ImportError`]; the store is unchanged then.
pub(crate) fn import(
    store: &Store,
    below: Below<'_>,
    tar: impl Read + Send,
    documents: impl FnOnce(&Digest, &Blob) -> (NamedDocument, NamedDocument),
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?;
    let (made, diff_id, blob) = run.stacked(below, tar)?;
    let (config, manifest) = documents(&diff_id, &blob);
    let digest = manifest.0;
    for (digest, bytes) in [config, manifest] {
        run.transaction.manifest(&digest, &bytes).map_err(ImportError::manifest)?;
    }
    run.finish(UncommittedImage { manifest: Some(digest), ..made }, options.name.cloned(), start)
}

/// Adds a layer of unknown origin. The resulting image has no manifest and config, and no origin for policies. The
/// caller must protect the layer and the image from `gc`.
///
/// # Errors
/// [`ImportError`]; the store is unchanged then.
pub fn add_unknown(
    store: &Store,
    below: Below<'_>,
    tar: impl Read + Send,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?.from(Origins::Unknown);
    let (made, _, _) = run.stacked(below, tar)?;
    run.finish(made, None, start)
}

/// Makes an image from layers that the store has. The image has no manifest and config, and no origin for policies.
/// The caller must protect it from `gc`.
///
/// # Errors
/// [`ImportError`], also if a layer is missing from the store; the store is unchanged then.
pub fn stack(
    store: &Store,
    layers: &[Digest],
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, ImportError> {
    let start = Instant::now();
    let run = ImportRun::begin(store, environment, options)?.from(Origins::Unknown);
    for (number, diff_id) in (1..).zip(layers) {
        // From here on `gc` keeps the layer and its content.
        let found = run.transaction.reuse_layer(diff_id);
        if found.map_err(|error| failed(number, error.into()))?.is_none() {
            return Err(ImportError::LayerBelow(Box::new(*diff_id)));
        }
    }
    let sources = layers.iter().map(|diff_id| LayerSource {
        name: diff_id.to_string(),
        source: Mutex::new(Box::new(Once::new(std::io::empty()))),
        media_type: String::new(),
        digest: None,
        size: None,
        diff_id: Some(*diff_id),
        title: LayerProof::Own,
        is_wanted: false,
    });
    let sources: Vec<_> = sources.collect();
    let stop = Stop::new(environment.cancel);
    let gathered = run.gather(&sources, 0, &stop, &Totals::default())?;
    let mut tree: Option<Builder> = None;
    let mut reports = Vec::new();
    for (number, gathered) in (1..).zip(gathered) {
        let failed = |failure| failed(number, failure);
        tree = Some(onto(gathered.layer, tree, environment.cancel, failed)?);
        reports.push(gathered.report);
    }
    let made = UncommittedImage::from_tree(tree.unwrap_or_default().finish(), None);
    run.finish(UncommittedImage { layers: reports, ..made }, None, start)
}

/// Returns the tree of an image, and the tree that it would have with one more layer. Stores nothing.
///
/// # Errors
/// [`ImportError`] if the tar is not a valid layer.
pub fn preview(
    below: &Tree,
    tar: impl Read,
    algorithm: Algorithm,
) -> Result<(Tree, Tree), ImportError> {
    let added = layer::look(tar, algorithm).map_err(|failure| failed(1, failure))?;
    let before = copy::thawed(below).map_err(ImportError::relocate)?;
    Ok((before.finish(), put(added, below, 1, &AtomicBool::new(false))?))
}

fn put(
    added: image::layer::Layer,
    below: &Tree,
    number: usize,
    cancel: &AtomicBool,
) -> Result<Tree, ImportError> {
    let below = copy::thawed(below).map_err(ImportError::relocate)?;
    Ok(onto(added, Some(below), cancel, |failure| failed(number, failure))?.finish())
}

/// The layer's name in messages.
const NAME: &str = "the changes";

fn failed(number: usize, failure: LayerFailure) -> ImportError {
    let source = Box::new(failure);
    ImportError::Layer { number, count: number, name: NAME.to_owned(), source }
}

impl ImportRun<'_> {
    fn stacked(
        &self,
        below: Below<'_>,
        tar: impl Read + Send,
    ) -> Result<(UncommittedImage, Digest, Blob), ImportError> {
        (self.environment.progress)(Event::Layers(&[None]));
        let number = below.diff_ids.len() + 1;
        for diff_id in below.diff_ids {
            // From here on `gc` keeps the layer and its content.
            let found = self.transaction.reuse_layer(diff_id);
            if found.map_err(|error| failed(number, error.into()))?.is_none() {
                return Err(ImportError::LayerBelow(Box::new(*diff_id)));
            }
        }
        let source = LayerSource {
            name: NAME.to_owned(),
            source: Mutex::new(Box::new(Once::new(tar))),
            media_type: String::new(),
            digest: None,
            size: None,
            diff_id: None,
            title: LayerProof::Bytes,
            is_wanted: false,
        };
        let stop = Stop::new(self.environment.cancel);
        let mut gathered = self.gather(&[source], 0, &stop, &Totals::default())?;
        let gathered = gathered.pop().expect("as many as there were sources");
        let tree = put(gathered.layer, below.tree, number, self.environment.cancel)?;
        let diff_id = gathered.report.diff_id;
        let layers = [below.diff_ids, &[diff_id]].concat();
        let tar = gathered.tar.map(|tar| (diff_id, tar));
        let written = self.native(&tree, &layers, vec![tar])?;
        let made = UncommittedImage {
            tree,
            written,
            manifest: None,
            layers: vec![gathered.report],
            name: None,
            committed: gathered.committed,
            times: Times::default(),
        };
        Ok((made, diff_id, gathered.blob))
    }
}
