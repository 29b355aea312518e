//! A lazy image's index as an artifact in a registry, which refers to the image's manifest.
//!
//! `docs/format/lazy-artifact.md` has the fields. An artifact is not trusted: see [`Artifact::open`].

mod blobs;
mod documents;
mod error;
mod recipe;

use std::io::{self, Read as _};

use image::digest::Digest;
use image::lazy::hot::{COUNTS, HotHead};
use image::lazy::{HEAD_MAX, Head, HeadError};
use image::verity::{Algorithm, DeviceId, Id, ImageId};
use oci::manifest::{Config, Descriptor, Manifest};
use serde::{Deserialize, Serialize};
use store::{OperationError, Traces, parallel};

use super::check::check_image;
use super::{LayerIndex, ZSTD_LEVEL};

use blobs::Blobs;
use documents::{
    CONFIG_TYPE, HEAD_TYPE, HOT_TYPE, IMAGE_TYPE, MORE_MAX, RECIPE_TYPE, RawConfig, RawDescriptor,
    RawLayer, RawManifest, RawParts, TRACES_TYPE, VERSION, WINDOWS_TYPE, check_size,
};
pub(super) use documents::{CREATED_ANNOTATION, TRACES_ANNOTATION};
pub use error::ArtifactError;
pub use recipe::{BlobName, LayerRecipe, RecipeError, UpdateBlobs, update_blobs};

/// Artifact type of lazy indexes.
pub const LAZY_ARTIFACT: &str = "application/vnd.quire.lazy.v1";
/// Media type of an artifact's manifest, the same as for images.
pub const ARTIFACT_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Maximum length of a config in bytes. A config has a few hundred bytes for each layer.
const CONFIG_MAX: u64 = 1 << 20;
/// Maximum length of an EROFS image in bytes, which is held in memory: enough for five million files.
const IMAGE_MAX: u64 = 512 << 20;
/// Maximum length of the traces in bytes, which is the store's limit.
const TRACES_MAX: u64 = 512 << 10;
/// Maximum length of a hot pack in bytes, which is held in memory: 256 MiB of blocks that cannot be compressed, and
/// their digests.
const HOT_MAX: u64 = 264 << 20;
/// Number of blobs that are fetched at the same time.
const PARALLEL: usize = 16;
/// The index of a layer may be larger than the layer by this many bytes, because small layers also have an index.
const INDEX_SLACK: u64 = 64 << 10;
/// Maximum length in bytes of all heads and windows of an image, which are in memory at the same time. A limit is
/// needed because the sizes of layers that are never fetched are only claims. This one suffices for layers of 30 GB.
const INDEX_MAX: u64 = 512 << 20;

/// The parts that make an image lazy. They are verified as far as possible: the index is compared with the image's
/// manifest and config, and the EROFS image with the output of Quire's writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LazyParts {
    /// Id of the EROFS image.
    pub id: ImageId,
    /// The EROFS image, of the form `tar`.
    pub image: Vec<u8>,
    /// An index for each device of the image, in the order of the layers.
    pub indexes: Vec<LayerIndex>,
    /// The hot pack of the trace `default`, if there is one: see [`image::lazy::hot`].
    pub hot: Option<Vec<u8>>,
    /// The data that programs read first. The traces only affect the order of fetches.
    pub traces: Traces,
    /// When the traces were recorded, in RFC 3339, in UTC without fractions of a second. `None` if there are none.
    pub created: Option<String>,
    /// Recipes of the layers that have an index. With them, a pull can fetch only the missing parts.
    /// [`Artifact::open`] does not fetch them.
    pub recipes: Vec<LayerRecipe>,
}

/// A blob of an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactBlob {
    pub digest: Digest,
    pub bytes: Vec<u8>,
}

/// An encoded artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifact {
    /// Digest of the manifest.
    pub digest: Digest,
    /// Digest of the config. It covers everything except the subject and the windows, which need not be trusted.
    pub index: Digest,
    /// The encoded manifest.
    pub manifest: Vec<u8>,
    /// The config, and all blobs that the manifest names, without duplicates.
    pub blobs: Vec<ArtifactBlob>,
}

/// The manifest that an artifact refers to, with its config.
#[derive(Debug, Clone, Copy)]
pub struct LazySubject<'a> {
    /// Digest of the manifest.
    pub digest: &'a Digest,
    /// The encoded manifest.
    pub bytes: &'a [u8],
    /// The parsed manifest.
    pub manifest: &'a Manifest,
    /// The parsed config.
    pub config: &'a Config,
}

impl LazyParts {
    /// Encodes an image's parts as an artifact. With the same version of zstd, the same parts give the same bytes.
    ///
    /// # Errors
    /// [`ArtifactError`] if the parts do not match each other or the subject, so that [`Artifact::open`] would refuse
    /// them.
    pub fn artifact(&self, subject: &LazySubject<'_>) -> Result<Artifact, ArtifactError> {
        check_image_of(self)?;
        check_size("image", self.image.len() as u64, IMAGE_MAX)?;
        let layers = layers_of(subject)?;
        let mut heads = Vec::new();
        for LayerIndex { head, .. } in &self.indexes {
            let encoded = head.encode().map_err(head_failed(&head.blob))?;
            heads.push((head, Digest::sha256(&encoded), encoded));
        }
        let head =
            |layer: &SubjectLayer<'_>| heads.iter().find(|it| it.0.diff_id == *layer.diff_id);
        let recipe = |layer: &SubjectLayer<'_>| {
            let recipe = self.recipes.iter().find(|it| it.diff_id == *layer.diff_id);
            recipe.filter(|_| head(layer).is_some())
        };
        let raw = layers.iter().map(|layer| RawLayer {
            digest: layer.layer.digest,
            size: layer.layer.size,
            diff_id: *layer.diff_id,
            device: head(layer).map(|it| it.0.device.to_string()),
            head: head(layer).map(|it| it.1),
            recipe: recipe(layer).map(|it| Digest::sha256(&it.bytes)),
        });
        let config = RawConfig {
            version: VERSION,
            image: self.id.to_string(),
            image_bytes: self.image.len() as u64,
            layers: raw.collect(),
            hot: self.hot.as_ref().map(|it| Digest::sha256(it)),
        };
        let devices = devices(&layers, &config)?;
        if let Some(hot) = &self.hot {
            check_hot(hot, &devices)?;
        }
        if devices.len() != self.indexes.len() {
            let text =
                format!("it has {} indexes for {} devices", self.indexes.len(), devices.len());
            return Err(ArtifactError::Layers(text));
        }
        let mut blobs = Blobs::default();
        let index = blobs.add(CONFIG_TYPE, json("config", &config)?);
        let image = zstd::bulk::compress(&self.image, ZSTD_LEVEL);
        let image = image.map_err(OperationError::of("compress", "the image of the index"))?;
        let mut named = vec![blobs.add(IMAGE_TYPE, image)];
        for Filled { device, layers, .. } in &devices {
            let both = self.indexes.iter().zip(&heads);
            let Some((index, head)) = both.into_iter().find(|it| it.0.head.device == *device)
            else {
                return Err(ArtifactError::Layers(format!("device {device} has no index")));
            };
            fits(index, layers)?;
            named.push(blobs.add(HEAD_TYPE, head.2.clone()));
            named.push(blobs.add(WINDOWS_TYPE, index.windows.clone()));
        }
        // It is named before the recipes, so that it is always within the number of blobs that readers accept.
        named.extend(self.hot.iter().map(|it| blobs.add(HOT_TYPE, it.clone())));
        for Filled { layers, .. } in &devices {
            let recipe = layers.first().and_then(|it| recipe(it));
            // Readers refuse more blobs.
            if named.len() < 2 * devices.len() + MORE_MAX {
                named.extend(recipe.map(|it| blobs.add(RECIPE_TYPE, it.bytes.clone())));
            }
        }
        if !self.traces.is_empty() {
            let traces = self.traces.encode();
            check_size("traces", traces.len() as u64, TRACES_MAX)?;
            named.push(blobs.add(TRACES_TYPE, traces));
        }
        let traces: Vec<_> = self.traces.iter().map(|it| it.name.as_str()).collect();
        let traces = traces.join(",");
        let manifest = RawManifest {
            schema_version: 2,
            media_type: ARTIFACT_MANIFEST.to_owned(),
            artifact_type: LAZY_ARTIFACT.to_owned(),
            config: index.clone(),
            layers: named,
            subject: RawDescriptor {
                media_type: media_type(subject.bytes),
                digest: *subject.digest,
                size: subject.bytes.len() as u64,
            },
            annotations: {
                let traces = (!traces.is_empty()).then(|| (TRACES_ANNOTATION.to_owned(), traces));
                let created = self.created.clone().map(|it| (CREATED_ANNOTATION.to_owned(), it));
                created.into_iter().chain(traces).collect()
            },
        };
        let manifest = json("manifest", &manifest)?;
        let (digest, index) = (Digest::sha256(&manifest), index.digest);
        Ok(Artifact { digest, index, manifest, blobs: blobs.0 })
    }
}

impl Artifact {
    /// Decodes and verifies an artifact. `fetch` returns the bytes of a blob, whose size is bounded; this function
    /// verifies the digest. `fetch` is called from several threads.
    ///
    /// On success, the subject, its layers and diff ids, the devices, the heads and the EROFS image are consistent,
    /// and the image is exactly the output of Quire's writer. The bytes of the layers are not read, so the index may
    /// still describe the contents of a layer's tar incorrectly.
    pub fn open(
        manifest: &[u8],
        subject: &LazySubject<'_>,
        fetch: impl Fn(&Digest, u64) -> io::Result<Vec<u8>> + Sync,
    ) -> Result<LazyParts, ArtifactError> {
        let raw = RawManifest::decode(manifest)?;
        if raw.subject.digest != *subject.digest {
            let (expected, actual) = (Box::new(*subject.digest), Box::new(raw.subject.digest));
            return Err(ArtifactError::Subject { expected, actual });
        }
        let fetched = |what, max, it: &RawDescriptor| {
            check_size(what, it.size, max)?;
            let bytes = fetch(&it.digest, it.size);
            let object = format_args!("blob {} of the index", it.digest);
            let bytes = bytes.map_err(OperationError::of("read", object))?;
            if bytes.len() as u64 != it.size || !it.digest.matches(&bytes) {
                return Err(ArtifactError::Blob { blob: Box::new(it.digest) });
            }
            Ok(bytes)
        };
        let layers = layers_of(subject)?;
        let RawParts { image, heads, traces, hot, .. } = raw.parts()?;
        // The sizes are checked before anything is fetched: the index must be smaller than the layers.
        check_sizes(&layers, &heads)?;
        let all = layers.iter().fold(INDEX_SLACK, |sum, it| sum.saturating_add(it.layer.size));
        let mut wanted = vec![("config", CONFIG_MAX, &raw.config)];
        wanted.push(("compressed image", IMAGE_MAX.saturating_add(INDEX_SLACK), image));
        for [head, windows] in &heads {
            wanted.extend([("head", HEAD_MAX, *head), ("windows", windows.size, *windows)]);
        }
        wanted.extend(traces.map(|it| ("traces", TRACES_MAX, it)));
        wanted.extend(hot.map(|it| ("hot pack", HOT_MAX.min(all), it)));
        // A distant registry responds to many parallel requests as fast as to a single one.
        let done = parallel::each("index", PARALLEL, wanted.len(), |number| {
            let (what, max, it) = wanted[number];
            fetched(what, max, it)
        })?;
        let mut done = done.into_iter();
        let mut next = || done.next().ok_or(ArtifactError::BlobCount(heads.len()));
        let config = RawConfig::decode(&next()?)?;
        let devices = devices(&layers, &config)?;
        if devices.len() != heads.len() {
            let text = format!("it has {} heads for {} devices", heads.len(), devices.len());
            return Err(ArtifactError::Layers(text));
        }
        for (Filled { head: expected, layers, .. }, [head, _]) in devices.iter().zip(&heads) {
            if head.digest != *expected {
                let layer = Box::new(layers[0].layer.digest);
                return Err(ArtifactError::Contradiction { layer, what: "head" });
            }
        }
        check_size("image", config.image_bytes, IMAGE_MAX)?;
        let compressed = next()?;
        let image = decompressed(&compressed, config.image_bytes)?;
        drop(compressed);
        let mut indexes = Vec::new();
        for (Filled { device, layers, .. }, [head, _]) in devices.iter().zip(&heads) {
            let head = Head::decode(&next()?).map_err(head_failed(&head.digest))?;
            let index = LayerIndex { head, windows: next()? };
            if index.head.device != *device {
                let layer = Box::new(index.head.blob);
                return Err(ArtifactError::Contradiction { layer, what: "device" });
            }
            fits(&index, layers)?;
            indexes.push(index);
        }
        let traces = match traces {
            Some(_) => Traces::decode(&next()?)
                .map_err(OperationError::of("use", "the traces of the index"))?,
            None => Traces::default(),
        };
        let hot_bytes = hot.map(|_| next()).transpose()?;
        // A pack is used only if the config names it, because only the config is trusted. The image works without a
        // pack, for example of a later version.
        let hot = hot_bytes.filter(|_| hot.map(|it| it.digest) == config.hot);
        let hot = hot.filter(|pack| match check_hot(pack, &devices) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "ignoring a hot pack");
                false
            }
        });
        let id = id("image", &config.image)?;
        let created = raw.annotations.get(CREATED_ANNOTATION).cloned();
        let recipes = Vec::new();
        let parts = LazyParts { id, image, indexes, hot, traces, created, recipes };
        check_image_of(&parts)?;
        Ok(parts)
    }
}

/// Returns the digest of the config that an artifact's manifest names: see [`Artifact::index`].
///
/// # Errors
/// [`ArtifactError`] if the bytes are not the manifest of such an artifact.
pub fn index_of(manifest: &[u8]) -> Result<Digest, ArtifactError> {
    Ok(RawManifest::decode(manifest)?.config.digest)
}

/// A layer of the image.
struct SubjectLayer<'a> {
    layer: &'a Descriptor,
    diff_id: &'a Digest,
}

fn layers_of<'a>(subject: &LazySubject<'a>) -> Result<Vec<SubjectLayer<'a>>, ArtifactError> {
    let layers = &subject.manifest.layers;
    let diff_ids = subject.config.diff_ids_of(layers.len());
    let diff_ids = diff_ids.map_err(|error| ArtifactError::Layers(error.to_string()))?;
    let layers = layers.iter().zip(diff_ids);
    Ok(layers.map(|(layer, diff_id)| SubjectLayer { layer, diff_id }).collect())
}

/// Checks the sizes of heads and windows against the layers of the image, before any of them is fetched.
fn check_sizes(
    layers: &[SubjectLayer<'_>],
    heads: &[[&RawDescriptor; 2]],
) -> Result<(), ArtifactError> {
    if heads.len() > layers.len() {
        let text = format!("it has {} heads for {} layers", heads.len(), layers.len());
        return Err(ArtifactError::Layers(text));
    }
    let max = layers.iter().map(|it| it.layer.size).max().unwrap_or(0);
    let max = max.saturating_add(INDEX_SLACK);
    for [head, windows] in heads {
        check_size("head", head.size, max.min(HEAD_MAX))?;
        check_size("windows", windows.size, max)?;
    }
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
    let all = sum(&mut layers.iter().map(|it| it.layer.size.saturating_add(INDEX_SLACK)));
    check_size("windows", sum(&mut heads.iter().map(|it| it[1].size)), all)?;
    let both = sum(&mut heads.iter().flatten().map(|it| it.size));
    check_size("heads and windows", both, INDEX_MAX)
}

/// A device that a config names, with its layers. Layers with equal tars share a device.
struct Filled<'l, 'a> {
    device: DeviceId,
    /// Digest of the device's head.
    head: Digest,
    /// At least one layer.
    layers: Vec<&'l SubjectLayer<'a>>,
}

/// Returns the devices that a config names, in the order of the layers.
fn devices<'l, 'a>(
    layers: &'l [SubjectLayer<'a>],
    config: &RawConfig,
) -> Result<Vec<Filled<'l, 'a>>, ArtifactError> {
    let (here, there) = (layers.len(), config.layers.len());
    if here != there {
        let text = format!("it has {there} layers, but the image has {here}");
        return Err(ArtifactError::Layers(text));
    }
    let mut found: Vec<Filled<'_, '_>> = Vec::new();
    for (number, (layer, raw)) in (1..).zip(layers.iter().zip(&config.layers)) {
        let Descriptor { digest, size, .. } = layer.layer;
        if (raw.digest, raw.size, raw.diff_id) != (*digest, *size, *layer.diff_id) {
            let text =
                format!("layer {number} is {digest} in the image, but {} in the index", raw.digest);
            return Err(ArtifactError::Layers(text));
        }
        let (device, head) = match (&raw.device, &raw.head) {
            (Some(device), Some(head)) => (device, head),
            (None, None) => continue,
            (Some(_), None) | (None, Some(_)) => {
                let text = format!("layer {number} has only one of device and head");
                return Err(ArtifactError::Layers(text));
            }
        };
        let device: DeviceId = id("device", device)?;
        match found.iter_mut().find(|it| it.device == device) {
            Some(same) if same.head == *head => same.layers.push(layer),
            Some(_) => {
                let layer = Box::new(*digest);
                return Err(ArtifactError::Contradiction { layer, what: "head" });
            }
            None => found.push(Filled { device, head: *head, layers: vec![layer] }),
        }
    }
    Ok(found)
}

/// Checks that an index belongs to these layers, which share a device.
fn fits(index: &LayerIndex, layers: &[&SubjectLayer<'_>]) -> Result<(), ArtifactError> {
    let head = &index.head;
    let wrong = |what| {
        let layer = Box::new(head.blob);
        Err(ArtifactError::Contradiction { layer, what })
    };
    if layers.iter().any(|it| *it.diff_id != head.diff_id) {
        return wrong("diff id");
    }
    let is_of =
        |it: &&SubjectLayer<'_>| (it.layer.digest, it.layer.size) == (head.blob, head.blob_bytes);
    if !layers.iter().any(is_of) {
        return wrong("blob");
    }
    if head.windows_bytes() != index.windows.len() as u64 {
        return wrong("length of windows");
    }
    Ok(())
}

/// Checks that a hot pack is well-formed, and that it has blocks of these devices only.
fn check_hot(pack: &[u8], devices: &[Filled<'_, '_>]) -> Result<(), ArtifactError> {
    let digest = Digest::sha256(pack);
    let failed = head_failed(&digest);
    let counts = pack.first_chunk::<COUNTS>().ok_or_else(|| failed(HeadError::Magic))?;
    let length = HotHead::length_of(counts).map_err(&failed)?;
    let short = || failed(HeadError::Damaged("the length of a hot pack"));
    let (head, frames) = pack.split_at_checked(length).ok_or_else(short)?;
    let head = HotHead::decode(head).map_err(&failed)?;
    let packed: u64 = head.frames.iter().map(|it| u64::from(it.packed)).sum();
    if packed != frames.len() as u64 {
        return Err(short().into());
    }
    let is_known = |device| devices.iter().any(|it| it.device == device);
    if !head.frames.iter().all(|it| is_known(it.device)) {
        return Err(failed(HeadError::Damaged("a hot pack of other devices")).into());
    }
    Ok(())
}

/// `blob` is the digest of the head, or of the layer's blob if the head cannot be encoded.
fn head_failed(blob: &Digest) -> impl Fn(HeadError) -> OperationError {
    move |error| OperationError::of("use", format_args!("the head {blob} of the index"))(error)
}

/// Checks an image against its heads, its id and Quire's writer.
fn check_image_of(parts: &LazyParts) -> Result<(), ArtifactError> {
    let heads = parts.indexes.iter().map(|it| &it.head);
    let actual = check_image(&parts.image, heads).map_err(Box::new)?;
    if actual == parts.id {
        return Ok(());
    }
    let (expected, actual) = (Box::new(parts.id), Box::new(actual));
    Err(ArtifactError::ImageId { expected, actual })
}

/// Parses a SHA-256 id, which must be in canonical form.
fn id<K>(what: &'static str, text: &str) -> Result<Id<K>, ArtifactError> {
    let id = Id::<K>::from_hex(text.as_bytes()).ok();
    let id = id.filter(|it| it.algorithm() == Algorithm::Sha256 && it.to_string() == text);
    id.ok_or_else(|| ArtifactError::Id { what, text: text.to_owned() })
}

fn decompressed(bytes: &[u8], length: u64) -> Result<Vec<u8>, ArtifactError> {
    let mut image = Vec::new();
    let read = zstd::Decoder::new(bytes).and_then(|decoder| {
        // One more byte shows that the data is too long.
        decoder.take(length + 1).read_to_end(&mut image)
    });
    let right = read.and_then(|read| match read as u64 == length {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "its length is wrong")),
    });
    right.map_err(OperationError::of("decompress", "the image of the index"))?;
    Ok(image)
}

fn json(what: &'static str, value: &impl Serialize) -> Result<Vec<u8>, ArtifactError> {
    serde_json::to_vec(value).map_err(|source| ArtifactError::Json { what, source })
}

/// Returns the media type in a manifest, which is optional in OCI manifests.
fn media_type(manifest: &[u8]) -> String {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Typed {
        media_type: String,
    }
    let typed: Result<Typed, _> = serde_json::from_slice(manifest);
    typed.map_or_else(|_untyped| ARTIFACT_MANIFEST.to_owned(), |it| it.media_type)
}

/// Parses `bytes` as a manifest and as a config of an artifact, for fuzzers. An accepted manifest must be accepted
/// again after it is encoded, and each layer must have at most one device.
///
/// # Panics
/// If one of these conditions is violated.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    if let Ok(manifest) = RawManifest::decode(bytes) {
        let written = json("manifest", &manifest).expect("it was parsed from JSON");
        let again = RawManifest::decode(&written).expect("it was accepted before");
        assert_eq!(json("manifest", &again).ok(), Some(written));
        if let Ok(parts) = manifest.parts() {
            let RawParts { heads, recipes, traces, .. } = parts;
            let named = 1 + 2 * heads.len() + recipes.len() + usize::from(traces.is_some());
            assert!(named <= manifest.layers.len());
        }
    }
    let Ok(config) = RawConfig::decode(bytes) else { return };
    let descriptor = |it: &RawLayer| Descriptor {
        digest: it.digest,
        size: it.size,
        media_type: String::new(),
        annotations: std::collections::BTreeMap::new(),
        urls: Vec::new(),
        platform: None,
    };
    // An image with exactly these layers.
    let descriptors: Vec<_> = config.layers.iter().map(descriptor).collect();
    let both = descriptors.iter().zip(&config.layers);
    let layers: Vec<_> =
        both.map(|(layer, raw)| SubjectLayer { layer, diff_id: &raw.diff_id }).collect();
    let Ok(devices) = devices(&layers, &config) else { return };
    let mut seen = std::collections::BTreeSet::new();
    for Filled { device, layers, .. } in &devices {
        assert!(seen.insert(*device), "device {device} occurs twice");
        assert!(!layers.is_empty(), "device {device} has no layer");
    }
    assert!(devices.iter().map(|it| it.layers.len()).sum::<usize>() <= layers.len());
}

#[cfg(test)]
mod tests;
