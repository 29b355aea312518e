//! The recipes in an artifact, which describe how the tars of layers are made from files, so that a pull fetches only
//! the missing files.
//!
//! A recipe needs no trust, because a tar that is made from it is discarded unless it has the layer's diff id.

use std::io;

use image::digest::Digest;
use store::{OperationError, Store, StoredLayerError};

use super::{
    ArtifactError, CONFIG_MAX, Filled, LazySubject, RawConfig, RawDescriptor, RawManifest,
    RawParts, ZSTD_LEVEL, check_size, devices, layers_of,
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

/// The blobs for pulling the missing parts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpdateBlobs {
    /// Units and spans.
    pub head: BlobName,
    /// Windows of the spans.
    pub windows: BlobName,
    pub recipe: BlobName,
}

/// Returns, for each layer of an artifact's image, in the image's order, the blobs that the artifact has for it;
/// `None` for a layer without a recipe. `fetch` returns the bytes of the config, whose size is bounded; this function
/// verifies the digest. The sizes of the returned blobs are not bounded.
///
/// # Errors
/// [`ArtifactError`] if the artifact is invalid or belongs to another image, or the config cannot be fetched.
pub fn update_blobs(
    manifest: &[u8],
    subject: &LazySubject<'_>,
    fetch: impl FnOnce(&Digest, u64) -> io::Result<Vec<u8>>,
) -> Result<Vec<Option<UpdateBlobs>>, ArtifactError> {
    let raw = RawManifest::decode(manifest)?;
    if raw.subject.digest != *subject.digest {
        let (expected, actual) = (Box::new(*subject.digest), Box::new(raw.subject.digest));
        return Err(ArtifactError::Subject { expected, actual });
    }
    let RawParts { heads, recipes, .. } = raw.parts()?;
    let layers = layers_of(subject)?;
    if recipes.is_empty() {
        return Ok(layers.iter().map(|_| None).collect());
    }
    let RawDescriptor { digest, size, .. } = &raw.config;
    check_size("config", *size, CONFIG_MAX)?;
    let config = fetch(digest, *size);
    let object = format_args!("blob {digest} of the index");
    let config = config.map_err(OperationError::of("read", object))?;
    if config.len() as u64 != *size || !digest.matches(&config) {
        return Err(ArtifactError::Blob { blob: Box::new(*digest) });
    }
    let config = RawConfig::decode(&config)?;
    let devices = devices(&layers, &config)?;
    if devices.len() != heads.len() {
        let text = format!("{} heads, {} devices", heads.len(), devices.len());
        return Err(ArtifactError::Layers(text));
    }
    let of = |layer: &super::SubjectLayer<'_>, recipe: Option<Digest>| {
        let recipe = recipes.iter().find(|it| Some(it.digest) == recipe)?;
        let is_of = |it: &Filled<'_, '_>| it.layers.iter().any(|it| std::ptr::eq(*it, layer));
        let at = devices.iter().position(is_of)?;
        let [head, windows] = heads[at];
        let [head, windows, recipe] = [head, windows, recipe].map(BlobName::from_descriptor);
        (head.digest == devices[at].head).then_some(UpdateBlobs { head, windows, recipe })
    };
    let both = layers.iter().zip(&config.layers);
    Ok(both.map(|(layer, raw)| of(layer, raw.recipe)).collect())
}
