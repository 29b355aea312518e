//! An import whose layers arrive one at a time.

use std::io::Read;
use std::sync::Mutex;
use std::time::Instant;

use image::digest::Digest;
use oci::manifest::Config;
use store::{RefName, Store};

use super::layer::{Gathered, Totals};
use super::layers::{Document, LayerSource, Once, Title};
use super::stop::Stop;
use super::{
    ImportContext, ImportError, ImportOptions, Job, LayerReport, LayersMismatch, Made, Report,
    documents,
};
use crate::stored::{StoredError, image_of};

/// An import in progress: begin it, add [`layers`](Self::layers), and finish it. Dropping it leaves nothing except the
/// layers that [`Durable::EachLayer`](super::Durable::EachLayer) keeps.
pub struct LayerImport<'a> {
    job: Job<'a>,
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

/// A layer, and the claims about it. Every claim is checked.
pub struct IncomingLayer<'r> {
    /// Its name in messages.
    pub name: String,
    /// The blob, from its first byte. It is not read if the store has the layer from this very blob.
    pub blob: Box<dyn Read + Send + 'r>,
    /// Media type in the manifest; empty if it is not known.
    pub media_type: String,
    /// Digest of the blob.
    pub digest: Option<Digest>,
    /// Bytes of the blob.
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

/// The layers so far, from the lowest up.
#[derive(Debug)]
pub struct RunningImport<'i> {
    import: &'i LayerImport<'i>,
    gathered: Vec<Gathered<'i>>,
    names: Vec<String>,
    /// Digest of each blob: the claimed one, or else that of its bytes. The store may know a layer by another blob.
    blobs: Vec<Digest>,
}

/// An image of all layers, still invisible: [`LayerImport::finish`] makes it durable and visible.
pub struct MadeImage(Made);

impl std::fmt::Debug for MadeImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MadeImage")
    }
}

impl<'a> LayerImport<'a> {
    /// Opens an import into a store.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn begin(
        store: &'a Store,
        surroundings: &ImportContext<'a>,
        wishes: &ImportOptions<'a>,
    ) -> Result<Self, ImportError> {
        Ok(Self {
            job: Job::begin(store, surroundings, wishes)?,
            stop: Stop::new(surroundings.cancel),
            totals: Totals::default(),
            start: Instant::now(),
            name: wishes.name.cloned(),
        })
    }

    /// No layer yet.
    #[must_use]
    pub const fn layers(&self) -> RunningImport<'_> {
        RunningImport { import: self, gathered: Vec::new(), names: Vec::new(), blobs: Vec::new() }
    }

    /// Makes an image durable and visible, under the name in the wishes.
    ///
    /// # Errors
    /// [`ImportError`]; then nothing was changed.
    pub fn finish(self, image: MadeImage) -> Result<Report, ImportError> {
        self.job.finish(image.0, self.name, self.start)
    }
}

impl<'i> RunningImport<'i> {
    /// Reads one layer, checks all claims about it, and stores its content, on the number of threads in the
    /// surroundings. The limits apply to all layers together.
    ///
    /// # Errors
    /// [`ImportError`]; then the import has failed, and takes no further layer.
    pub fn layer(mut self, layer: IncomingLayer<'_>) -> Result<Self, ImportError> {
        let LayerImport { job, stop, totals, .. } = self.import;
        if stop.is_set() {
            return Err(ImportError::Cancelled);
        }
        let title = if layer.digest.is_some() { Title::Blob } else { Title::Bytes };
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
        let gathered = job.gather(std::slice::from_ref(&source), before, stop, totals)?;
        self.blobs.extend(gathered.iter().map(|it| source.digest.unwrap_or(it.blob.digest)));
        self.gathered.extend(gathered);
        self.names.push(source.name);
        Ok(self)
    }

    /// What was added to the store so far, of layers that are durable.
    #[must_use]
    pub fn committed(&self) -> store::Committed {
        let mut all = store::Committed::default();
        self.gathered.iter().for_each(|it| all += it.committed);
        all
    }

    /// Results of the layers, from the lowest to the uppermost.
    pub fn reports(&self) -> impl Iterator<Item = &LayerReport> {
        self.gathered.iter().map(|it| &it.report)
    }

    /// Lays the layers over each other. Without documents, it makes a manifest and a config.
    ///
    /// # Errors
    /// [`ImportError`], also if a document does not have its digest, or names other layers or another config.
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
            documents::config(import.job.wishes.platform, &reports)
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
        import.job.lay(gathered, &names, manifest, Some(config), None).map(MadeImage)
    }
}

/// Compares what a document names with what was added.
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
