//! Layers that come one at a time, from whoever has their blobs, into one import.

use std::io::Read;
use std::sync::Mutex;
use std::time::Instant;

use image::digest::Digest;
use oci::manifest::Config;
use store::{RefName, Store};

use super::layer::{Gathered, Totals};
use super::layers::{Document, LayerSource, Once, Title};
use super::stop::Stop;
use super::{ImportError, ImportSurroundings, ImportWishes, Job, LayerReport, Made, Report};
use crate::stored::StoredError;

/// An import that is open: begin it, hand it [`layers`](Self::layers), and finish it. Dropping it leaves nothing behind
/// but the layers that [`Durable::EachLayer`](super::Durable::EachLayer) asks for.
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

/// A layer, and what is claimed of it. Every claim is compared.
pub struct IncomingLayer<'r> {
    /// What messages call it.
    pub name: String,
    /// The blob from its first byte. It is not read if the store has the layer, and hashed this blob when it got it.
    pub blob: Box<dyn Read + Send + 'r>,
    /// As the manifest says; empty if nobody has said.
    pub media_type: String,
    /// Digest of the blob.
    pub digest: Option<Digest>,
    /// Bytes of the blob.
    pub size: Option<u64>,
    /// Digest of the tar that is in it.
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
}

/// An image of all layers, which nothing can see yet: [`LayerImport::finish`] makes it durable and visible.
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
        surroundings: &ImportSurroundings<'a>,
        wishes: &ImportWishes<'a>,
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
        RunningImport { import: self, gathered: Vec::new(), names: Vec::new() }
    }

    /// Makes an image durable and visible, by the name that was wished for.
    ///
    /// # Errors
    /// [`ImportError`]; then nothing was changed.
    pub fn finish(self, image: MadeImage) -> Result<Report, ImportError> {
        self.job.finish(image.0, self.name, self.start)
    }
}

impl<'i> RunningImport<'i> {
    /// Reads one layer, compares all that is claimed of it, and stores what is in it, on as many threads as there may
    /// be. The limits are on all layers together.
    ///
    /// # Errors
    /// [`ImportError`]; the import has failed then, and takes no further layer.
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
        self.gathered.extend(job.gather(std::slice::from_ref(&source), stop, totals)?);
        self.names.push(source.name);
        Ok(self)
    }

    /// What came of each layer, from the lowest up.
    pub fn reports(&self) -> impl Iterator<Item = &LayerReport> {
        self.gathered.iter().map(|it| &it.report)
    }

    /// Lays the layers one over the other. Without documents, a manifest and a config are made.
    ///
    /// # Errors
    /// [`ImportError`], also when a document does not have its digest, or the config names other layers.
    pub fn image(
        self,
        manifest: Option<Document>,
        config: Option<Document>,
    ) -> Result<MadeImage, ImportError> {
        let Self { import, gathered, names } = self;
        if let Some((digest, bytes)) = &config {
            let settings = Config::parse(bytes).map_err(StoredError::wrong(digest))?;
            let diff_ids = settings.diff_ids_of(gathered.len());
            let diff_ids = diff_ids.map_err(StoredError::wrong(digest))?;
            if !diff_ids.iter().eq(gathered.iter().map(|it| &it.report.diff_id)) {
                return Err(ImportError::OtherLayers(Box::new(*digest)));
            }
        }
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        import.job.lay(gathered, &names, manifest, config, None).map(MadeImage)
    }
}
