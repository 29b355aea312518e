//! Imports an image whose layers arrive one at a time.

use std::io::Read;
use std::sync::Mutex;
use std::time::Instant;

use image::digest::Digest;
use oci::manifest::Config;
use store::{RefName, Store};

use super::layer::UnpackedLayer;
use super::layers::{Document, LayerProof, LayerSource, Once};
use super::stop::Stop;
use super::tally::Totals;
use super::{
    ImportContext, ImportError, ImportOptions, ImportRun, LayerReport, LayersMismatch, Report,
    UncommittedImage, documents,
};
use crate::stored::{StoredError, image_of};

/// An import in progress: begin it, add [`layers`](Self::layers), and finish it. If it is dropped, only the layers
/// that were made durable by [`Durable::EachLayer`](super::Durable::EachLayer) are kept.
pub struct LayerImport<'a> {
    run: ImportRun<'a>,
    stop: Stop<'a>,
    totals: Totals,
    start: Instant,
    name: Option<RefName>,
}

impl std::fmt::Debug for LayerImport<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerImport").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A layer, and the claims about it, all of which are checked.
pub struct IncomingLayer<'r> {
    /// Name for messages.
    pub name: String,
    /// Reader of the blob, at its first byte. It is not read if the store has the layer from this blob.
    pub blob: Box<dyn Read + Send + 'r>,
    /// Media type in the manifest; empty if unknown.
    pub media_type: String,
    pub digest: Option<Digest>,
    /// Size of the blob in bytes.
    pub size: Option<u64>,
    /// Digest of the tar in the blob.
    pub diff_id: Option<Digest>,
}

impl std::fmt::Debug for IncomingLayer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut layer = f.debug_struct("IncomingLayer");
        layer.field("name", &self.name).field("digest", &self.digest);
        layer.field("diff_id", &self.diff_id).finish_non_exhaustive()
    }
}

/// The layers added so far, from the lowest up.
#[derive(Debug)]
pub struct RunningImport<'i> {
    import: &'i LayerImport<'i>,
    gathered: Vec<UnpackedLayer<'i>>,
    names: Vec<String>,
    /// Digest of each blob: the claimed digest, or else the digest of the blob's bytes. The store may have the layer
    /// from another blob.
    blobs: Vec<Digest>,
}

/// An image of all layers, which is not visible until [`LayerImport::finish`] makes it durable and visible.
pub struct MadeImage(UncommittedImage);

impl std::fmt::Debug for MadeImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MadeImage")
    }
}

impl<'a> LayerImport<'a> {
    /// Begins an import into a store.
    pub fn begin(
        store: &'a Store,
        environment: &ImportContext<'a>,
        options: &ImportOptions<'a>,
    ) -> Result<Self, ImportError> {
        Ok(Self {
            run: ImportRun::begin(store, environment, options)?,
            stop: Stop::new(environment.cancel),
            totals: Totals::default(),
            start: Instant::now(),
            name: options.name.cloned(),
        })
    }

    /// Starts the list of layers, which is empty.
    #[must_use]
    pub const fn layers(&self) -> RunningImport<'_> {
        RunningImport { import: self, gathered: Vec::new(), names: Vec::new(), blobs: Vec::new() }
    }

    /// Makes an image durable and visible, under the name in the options.
    ///
    /// # Errors
    /// [`ImportError`]; the store is unchanged then.
    pub fn finish(self, image: MadeImage) -> Result<Report, ImportError> {
        self.run.finish(image.0, self.name, self.start)
    }
}

impl<'i> RunningImport<'i> {
    /// Reads one layer, checks all claims about it, and stores its content, with the number of threads in the
    /// import's [`ImportContext`]. The limits apply to the sum of all layers.
    ///
    /// # Errors
    /// [`ImportError`]; the import has failed then, and accepts no further layer.
    pub fn layer(mut self, layer: IncomingLayer<'_>) -> Result<Self, ImportError> {
        let LayerImport { run, stop, totals, .. } = self.import;
        if stop.is_set() {
            return Err(ImportError::Cancelled);
        }
        let title = if layer.digest.is_some() { LayerProof::Blob } else { LayerProof::Bytes };
        let source = LayerSource {
            name: layer.name,
            source: Mutex::new(Box::new(Once::new(layer.blob))),
            media_type: layer.media_type,
            digest: layer.digest,
            size: layer.size,
            diff_id: layer.diff_id,
            title,
            is_wanted: false,
        };
        let before = self.gathered.len();
        let gathered = run.gather(std::slice::from_ref(&source), before, stop, totals)?;
        self.blobs.extend(gathered.iter().map(|it| source.digest.unwrap_or(it.blob.digest)));
        self.gathered.extend(gathered);
        self.names.push(source.name);
        Ok(self)
    }

    /// Returns the counts of data that committed layers have added to the store so far.
    #[must_use]
    pub fn committed(&self) -> store::Committed {
        let mut all = store::Committed::default();
        self.gathered.iter().for_each(|it| all += it.committed);
        all
    }

    /// Returns the reports of the layers, from the lowest to the uppermost.
    pub fn reports(&self) -> impl Iterator<Item = &LayerReport> {
        self.gathered.iter().map(|it| &it.report)
    }

    /// Applies the layers in order. Makes a manifest and a config if they are not given.
    ///
    /// # Errors
    /// [`ImportError`], also if a document does not match its digest, or names other layers or another config.
    pub fn image(
        self,
        manifest: Option<Document>,
        config: Option<Document>,
    ) -> Result<MadeImage, ImportError> {
        let Self { import, gathered, names, blobs } = self;
        if let Some((digest, bytes)) = &config {
            let settings = Config::parse(bytes).map_err(StoredError::wrong(digest))?;
            let diff_ids = gathered.iter().map(|it| it.report.diff_id);
            compare(settings.diff_ids().iter().copied(), diff_ids)
                .map_err(ImportError::other_layers(digest))?;
        }
        let config = config.unwrap_or_else(|| {
            let reports: Vec<_> = gathered.iter().map(|it| it.report.clone()).collect();
            let options = &import.run.options;
            documents::config(options.platform, &reports, options.changes)
        });
        if let Some((digest, bytes)) = &manifest {
            let image = image_of(digest, bytes)?;
            let named = image.layers.iter().map(|it| it.digest);
            let expected = image.config.digest;
            let of_config = match config.0 {
                actual if actual == expected => Ok(()),
                actual => Err(Box::new(LayersMismatch::Config { expected, actual })),
            };
            compare(named, blobs.iter().copied())
                .and(of_config)
                .map_err(ImportError::other_layers(digest))?;
        }
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        import.run.lay(gathered, &names, manifest, Some(config), None).map(MadeImage)
    }
}

/// Compares the digests that a document names with those of the added layers.
fn compare(
    expected: impl ExactSizeIterator<Item = Digest>,
    actual: impl ExactSizeIterator<Item = Digest>,
) -> Result<(), Box<LayersMismatch>> {
    if expected.len() != actual.len() {
        let (expected, actual) = (expected.len(), actual.len());
        return Err(Box::new(LayersMismatch::Count { expected, actual }));
    }
    match (1..).zip(expected.zip(actual)).find(|(_, (expected, actual))| expected != actual) {
        Some((number, (expected, actual))) => {
            Err(Box::new(LayersMismatch::Layer { number, expected, actual }))
        }
        None => Ok(()),
    }
}
