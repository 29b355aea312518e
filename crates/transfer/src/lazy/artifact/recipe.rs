//! The recipes in an artifact, which describe how the tars of layers are made from files, so that a pull fetches only
//! the missing files.
//!
//! A recipe needs no trust, because a tar that is made from it is discarded unless it has the layer's diff id.

use std::io;
use std::ops::Range;

use image::digest::Digest;
use store::{Store, StoredLayerError};

use super::{
    ArtifactError, Filled, LazySubject, RawDescriptor, RawParts, StartPlaces, ZSTD_LEVEL,
    check_sizes, decoded, devices, fetch_config, layers_of,
};

/// The recipe of a layer, as `docs/format/recipe.md` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRecipe {
    /// Diff id of the layer.
    pub diff_id: Digest,
    /// The recipe as one zstd frame.
    pub bytes: Vec<u8>,
}

/// An error while a recipe is read from a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// The layer cannot be read.
    #[error(transparent)]
    Layer(#[from] StoredLayerError),
    /// The recipe cannot be compressed.
    #[error("cannot compress the recipe of layer {diff_id}")]
    Compress { diff_id: Box<Digest>, source: io::Error },
}

impl LayerRecipe {
    /// Returns the recipe of a layer in a store. Returns `None` if the store has no such layer.
    ///
    /// # Errors
    /// [`RecipeError`] if the layer cannot be read or its recipe cannot be compressed.
    pub fn stored(store: &Store, diff_id: &Digest) -> Result<Option<Self>, RecipeError> {
        let Some(layer) = store.layers.open(diff_id)? else { return Ok(None) };
        let recipe = layer.recipe()?;
        let compress = || -> io::Result<Vec<u8>> {
            let mut encoder = zstd::Encoder::new(Vec::new(), ZSTD_LEVEL)?;
            io::copy(&mut io::BufReader::new(recipe), &mut encoder)?;
            encoder.finish()
        };
        let bytes = compress().map_err(|source| {
            let diff_id = Box::new(*diff_id);
            RecipeError::Compress { diff_id, source }
        })?;
        Ok(Some(Self { diff_id: *diff_id, bytes }))
    }
}

/// The descriptor of a blob of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobName {
    pub digest: Digest,
    /// Length of the blob in bytes.
    pub size: u64,
}

impl BlobName {
    const fn from_descriptor(raw: &RawDescriptor) -> Self {
        Self { digest: raw.digest, size: raw.size }
    }
}

/// A head, which is a part of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadPlace {
    /// The blob that contains the head.
    pub blob: BlobName,
    /// The range of the head in the blob, in bytes.
    pub range: Range<u64>,
    /// Digest of the head.
    pub digest: Digest,
}

impl HeadPlace {
    /// Returns the length of the head in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }
}

/// The blobs for pulling the missing parts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateBlobs {
    /// Units and spans.
    pub head: HeadPlace,
    /// Windows of the spans.
    pub windows: BlobName,
    pub recipe: BlobName,
}

/// Returns, for each layer of an artifact's image, in the image's order, the blobs that the artifact has for it;
/// `None` for a layer without a recipe. `fetch` returns the bytes of the config if the manifest does not contain them;
/// their size is bounded, and this function verifies the digest. The sizes of recipes are not bounded.
///
/// # Errors
/// [`ArtifactError`] if the artifact is invalid or belongs to another image, or the config cannot be fetched.
pub fn update_blobs(
    manifest: &[u8],
    subject: &LazySubject<'_>,
    fetch: impl Fn(&Digest, u64) -> io::Result<Vec<u8>>,
) -> Result<Vec<Option<UpdateBlobs>>, ArtifactError> {
    let raw = decoded(manifest, subject.digest)?;
    let RawParts { start, windows, recipes } = raw.parts()?;
    let layers = layers_of(subject)?;
    if recipes.is_empty() {
        return Ok(layers.iter().map(|_| None).collect());
    }
    let config = fetch_config(&raw.config, fetch)?;
    check_sizes(subject.manifest, &config.start, windows)?;
    let devices = devices(&layers, &config)?;
    let places = config.start.places().filter(|it| it.length == start.size);
    let Some(StartPlaces { heads, .. }) = places else {
        return Err(ArtifactError::Lengths { blob: Box::new(start.digest) });
    };
    if devices.len() != heads.len() || devices.len() != windows.len() {
        let text = format!("{} heads, {} devices", heads.len(), devices.len());
        return Err(ArtifactError::Layers(text));
    }
    let of = |layer: &super::SubjectLayer<'_>, recipe: Option<Digest>| {
        let recipe = recipes.iter().find(|it| Some(it.digest) == recipe)?;
        let is_of = |it: &Filled<'_, '_>| it.layers.iter().any(|it| std::ptr::eq(*it, layer));
        let at = devices.iter().position(is_of)?;
        let (blob, range) = (BlobName::from_descriptor(start), heads[at].clone());
        let head = HeadPlace { blob, range, digest: devices[at].head };
        let [windows, recipe] = [&windows[at], *recipe].map(BlobName::from_descriptor);
        Some(UpdateBlobs { head, windows, recipe })
    };
    let both = layers.iter().zip(&config.layers);
    Ok(both.map(|(layer, raw)| of(layer, raw.recipe)).collect())
}
