//! The recipes in an artifact: how the tars of layers are made of files, so that a pull fetches only those that are missing.
//!
//! A recipe needs no trust. What is made with it has the layer's diff id, or is thrown away.

use std::io;

use image::digest::Digest;
use store::{LayerError, Store};

use super::{
    ArtifactError, CONFIG_MAX, Filled, LazySubject, RawConfig, RawDescriptor, RawManifest,
    RawParts, ZSTD_LEVEL, check_size, devices, layers_of,
};

/// The recipe of a layer, as `docs/format/recipe.md` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRecipe {
    /// The layer.
    pub diff_id: Digest,
    /// The recipe, as one zstd frame.
    pub bytes: Vec<u8>,
}

/// An error while a recipe is taken from a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// The layer cannot be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The recipe cannot be compressed.
    #[error("cannot compress the recipe of layer {diff_id}")]
    Compress {
        /// The layer.
        diff_id: Box<Digest>,
        /// The cause.
        source: io::Error,
    },
}

impl LayerRecipe {
    /// The recipe of a layer of a store. `None` if the store has no such layer.
    ///
    /// # Errors
    /// [`RecipeError`].
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

/// A blob of an artifact that was not fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobName {
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
}

impl BlobName {
    const fn of(raw: &RawDescriptor) -> Self {
        Self { digest: raw.digest, size: raw.size }
    }
}

/// What a pull of the missing parts of a layer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpdateBlobs {
    /// Units and spans.
    pub head: BlobName,
    /// Windows of the spans.
    pub windows: BlobName,
    /// The recipe.
    pub recipe: BlobName,
}

/// The blobs that an artifact has for each layer of its image, in the image's order; `None` for a layer without a recipe.
/// `fetch` gives the config's bytes, of which the size is bounded; they are hashed here. Sizes of the blobs are not
/// bounded.
///
/// # Errors
/// [`ArtifactError`].
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
    let blob = || Box::new(*digest);
    let config = fetch(digest, *size);
    let config = config.map_err(|source| ArtifactError::Fetch { blob: blob(), source })?;
    if config.len() as u64 != *size || !digest.matches(&config) {
        return Err(ArtifactError::Blob { blob: blob() });
    }
    let config = RawConfig::decode(&config)?;
    let devices = devices(&layers, &config)?;
    if devices.len() != heads.len() {
        let text = format!("{} heads, {} devices", heads.len(), devices.len());
        return Err(ArtifactError::Layers(text));
    }
    let of = |layer: &super::Layer<'_>, recipe: Option<Digest>| {
        let recipe = recipes.iter().find(|it| Some(it.digest) == recipe)?;
        let is_of = |it: &Filled<'_, '_>| it.layers.iter().any(|it| std::ptr::eq(*it, layer));
        let at = devices.iter().position(is_of)?;
        let [head, windows] = heads[at];
        let [head, windows, recipe] = [head, windows, recipe].map(BlobName::of);
        (head.digest == devices[at].head).then_some(UpdateBlobs { head, windows, recipe })
    };
    let both = layers.iter().zip(&config.layers);
    Ok(both.map(|(layer, raw)| of(layer, raw.recipe)).collect())
}
