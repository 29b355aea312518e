//! A lazy image's index as an artifact in a registry, which refers to the image's manifest.
//!
//! `docs/format/lazy-artifact.md` has the fields. An artifact is not trusted: see [`Artifact::open`].

mod blobs;
mod documents;
mod error;
mod recipe;

use std::io::{self, Read as _};
use std::ops::Range;

use image::digest::Digest;
use image::lazy::hot::{COUNTS, HotHead};
use image::lazy::{HEAD_MAX, Head, HeadError};
use image::verity::{Algorithm, DeviceId, Id, ImageId};
use oci::manifest::{Config, Descriptor, Manifest};
use serde::{Deserialize, Serialize};
use store::{IndexWindows, OperationError, Traces};

use super::check::check_image;
use super::{LayerIndex, ZSTD_LEVEL};

use blobs::Blobs;
use documents::{
    CONFIG_TYPE, EMBEDDED_MAX, MORE_MAX, RECIPE_TYPE, RawConfig, RawDescriptor, RawLayer,
    RawManifest, RawParts, RawStart, START_TYPE, StartPlaces, VERSION, WINDOWS_TYPE, check_size,
};
pub(super) use documents::{CREATED_ANNOTATION, TRACES_ANNOTATION};
pub use error::ArtifactError;
pub use recipe::{BlobName, HeadPlace, LayerRecipe, RecipeError, UpdateBlobs, update_blobs};

/// Artifact type of lazy indexes.
pub const LAZY_ARTIFACT: &str = "application/vnd.quire.lazy.v1";
/// Media type of an artifact's manifest, the same as for images.
pub const ARTIFACT_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Maximum length of a config in bytes. A config has a few hundred bytes for each layer.
const CONFIG_MAX: u64 = 1 << 20;
/// Maximum length of an EROFS image in bytes, which is held in memory: enough for five million files.
pub(super) const IMAGE_MAX: u64 = 512 << 20;
/// Maximum length of the traces in bytes, which is the store's limit.
const TRACES_MAX: u64 = 512 << 10;
/// Maximum length of a hot pack in bytes, which is held in memory: 256 MiB of blocks that cannot be compressed, and
/// their digests.
const HOT_MAX: u64 = 264 << 20;
/// The index of a layer may be larger than the layer by this many bytes, because small layers also have an index.
const INDEX_SLACK: u64 = 64 << 10;
/// Maximum length in bytes of all heads and windows of an image. All heads are in memory at the same time. A limit is
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
    /// An index for each device of the image, in the order of the layers. [`Artifact::open`] does not fetch windows.
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
    /// Digest of the config. It covers everything except the subject, the windows and the recipes, which need not be
    /// trusted.
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
        let mut packed = zstd::bulk::compress(&self.image, ZSTD_LEVEL)
            .map_err(OperationError::of("compress", "the image of the index"))?;
        let raw = layers.iter().map(|layer| RawLayer {
            digest: layer.layer.digest,
            size: layer.layer.size,
            diff_id: *layer.diff_id,
            device: head(layer).map(|it| it.0.device.to_string()),
            head: head(layer).map(|it| it.1),
            recipe: recipe(layer).map(|it| Digest::sha256(&it.bytes)),
        });
        let traces = (!self.traces.is_empty()).then(|| self.traces.encode());
        check_size("traces", traces.as_ref().map_or(0, |it| it.len() as u64), TRACES_MAX)?;
        let mut config = RawConfig {
            version: VERSION,
            image: self.id.to_string(),
            image_bytes: self.image.len() as u64,
            layers: raw.collect(),
            start: RawStart {
                // Set below, when the blob is complete.
                digest: Digest::sha256(b""),
                image: packed.len() as u64,
                heads: Vec::new(),
                hot: self.hot.as_ref().map(|it| it.len() as u64),
                traces: traces.as_ref().map(|it| it.len() as u64),
            },
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
        let mut windows = Vec::new();
        for Filled { device, layers, .. } in &devices {
            let both = self.indexes.iter().zip(&heads);
            let Some((index, head)) = both.into_iter().find(|it| it.0.head.device == *device)
            else {
                return Err(ArtifactError::Layers(format!("device {device} has no index")));
            };
            let groups = index.windows.groups().ok_or(ArtifactError::NoWindows(*device))?;
            fits(&index.head, groups.len() as u64, layers)?;
            config.start.heads.push(head.2.len() as u64);
            packed.extend(&head.2);
            windows.push(groups.to_vec());
        }
        packed.extend(self.hot.iter().flatten());
        packed.extend(traces.iter().flatten());
        config.start.digest = Digest::sha256(&packed);
        let config = json("config", &config)?;
        let mut blobs = Blobs::default();
        let mut index = blobs.add(CONFIG_TYPE, config.clone());
        if config.len() <= EMBEDDED_MAX {
            index = index.with_data(&config);
        }
        let mut named = vec![blobs.add(START_TYPE, packed)];
        named.extend(windows.into_iter().map(|it| blobs.add(WINDOWS_TYPE, it)));
        for Filled { layers, .. } in &devices {
            let recipe = layers.first().and_then(|it| recipe(it));
            // Readers refuse more blobs.
            if named.len() < 1 + devices.len() + MORE_MAX {
                named.extend(recipe.map(|it| blobs.add(RECIPE_TYPE, it.bytes.clone())));
            }
        }
        let traces: Vec<_> = self.traces.iter().map(|it| it.name.as_str()).collect();
        let traces = traces.join(",");
        let manifest = RawManifest {
            schema_version: 2,
            media_type: ARTIFACT_MANIFEST.to_owned(),
            artifact_type: LAZY_ARTIFACT.to_owned(),
            config: index.clone(),
            layers: named,
            subject: RawDescriptor::new(
                media_type(subject.bytes),
                *subject.digest,
                subject.bytes.len() as u64,
            ),
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

/// An artifact whose config and blob for starts were fetched and have the right digests.
///
/// It was not compared with the image yet, because the image's config may still be on its way.
pub struct FetchedArtifact {
    manifest: RawManifest,
    config: RawConfig,
    places: StartPlaces,
    start: Vec<u8>,
}

impl std::fmt::Debug for FetchedArtifact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FetchedArtifact").field("bytes", &self.start.len()).finish_non_exhaustive()
    }
}

impl Artifact {
    /// Decodes and verifies an artifact: [`fetch`](Self::fetch) and [`FetchedArtifact::open`].
    ///
    /// # Errors
    /// [`ArtifactError`] if the artifact does not belong to the subject, or is invalid.
    pub fn open(
        manifest: &[u8],
        subject: &LazySubject<'_>,
        fetch: impl Fn(&Digest, u64) -> io::Result<Vec<u8>>,
    ) -> Result<LazyParts, ArtifactError> {
        Self::fetch(manifest, subject.digest, subject.manifest, fetch)?.open(subject)
    }

    /// Fetches the blobs of an artifact that belongs to the image with this manifest. `fetch` returns the bytes of a
    /// blob, whose size is bounded; this function verifies the digest.
    ///
    /// # Errors
    /// [`ArtifactError`] if the artifact belongs to another manifest, is larger than a valid one, or cannot be fetched.
    pub fn fetch(
        manifest: &[u8],
        digest: &Digest,
        image: &Manifest,
        fetch: impl Fn(&Digest, u64) -> io::Result<Vec<u8>>,
    ) -> Result<FetchedArtifact, ArtifactError> {
        let raw = decoded(manifest, digest)?;
        let RawParts { start, windows, .. } = raw.parts()?;
        let config = fetch_config(&raw.config, &fetch)?;
        let blob = || Box::new(start.digest);
        let places = config.start.places();
        let places =
            places.filter(|it| it.length == start.size && config.start.digest == start.digest);
        let places = places.ok_or_else(|| ArtifactError::Lengths { blob: blob() })?;
        // The sizes are checked before the blob is fetched: the index must be smaller than the layers.
        check_sizes(image, &config.start, windows)?;
        let start = fetched(start, &fetch)?;
        Ok(FetchedArtifact { manifest: raw, config, places, start })
    }
}

/// Returns the config of an artifact, which its manifest usually contains.
fn fetch_config(
    descriptor: &RawDescriptor,
    fetch: impl Fn(&Digest, u64) -> io::Result<Vec<u8>>,
) -> Result<RawConfig, ArtifactError> {
    check_size("config", descriptor.size, CONFIG_MAX)?;
    match descriptor.embedded() {
        Some(bytes) => RawConfig::decode(&bytes),
        None => RawConfig::decode(&fetched(descriptor, fetch)?),
    }
}

/// Fetches a blob of an artifact and verifies its digest.
fn fetched(
    descriptor: &RawDescriptor,
    fetch: impl Fn(&Digest, u64) -> io::Result<Vec<u8>>,
) -> Result<Vec<u8>, ArtifactError> {
    let RawDescriptor { digest, size, .. } = descriptor;
    let object = format_args!("blob {digest} of the index");
    let bytes = fetch(digest, *size).map_err(OperationError::of("read", object))?;
    if bytes.len() as u64 != *size || !digest.matches(&bytes) {
        return Err(ArtifactError::Blob { blob: Box::new(*digest) });
    }
    Ok(bytes)
}

impl FetchedArtifact {
    /// Decodes the artifact, and compares it with the image.
    ///
    /// On success, the subject, its layers and diff ids, the devices, the heads and the EROFS image are consistent,
    /// and the image is exactly the output of Quire's writer. The bytes of the layers are not read, so the index may
    /// still describe the contents of a layer's tar incorrectly.
    ///
    /// # Errors
    /// [`ArtifactError`] if the artifact is invalid or does not belong to the image.
    pub fn open(self, subject: &LazySubject<'_>) -> Result<LazyParts, ArtifactError> {
        let Self { manifest: raw, config, places, start } = self;
        let RawParts { windows, .. } = raw.parts()?;
        let layers = layers_of(subject)?;
        let devices = devices(&layers, &config)?;
        for (what, count) in [("heads", places.heads.len()), ("windows", windows.len())] {
            if count != devices.len() {
                let text = format!("it has {count} {what} for {} devices", devices.len());
                return Err(ArtifactError::Layers(text));
            }
        }
        check_size("image", config.image_bytes, IMAGE_MAX)?;
        let part = |range: &Range<u64>| {
            let [from, to] = [range.start, range.end].map(|it| usize::try_from(it).ok());
            from.zip(to).and_then(|(from, to)| start.get(from..to)).unwrap_or_default()
        };
        let image = decompressed(part(&places.image), config.image_bytes)?;
        let mut indexes = Vec::new();
        let both = places.heads.iter().zip(windows);
        for (Filled { device, head: expected, layers }, (head, windows)) in devices.iter().zip(both)
        {
            let bytes = part(head);
            let contradiction = |layer: &Digest, what| {
                Err(ArtifactError::Contradiction { layer: Box::new(*layer), what })
            };
            if !expected.matches(bytes) {
                return contradiction(&layers[0].layer.digest, "head");
            }
            let head = Head::decode(bytes).map_err(head_failed(expected))?;
            if head.device != *device {
                return contradiction(&head.blob, "device");
            }
            fits(&head, windows.size, layers)?;
            indexes.push(LayerIndex { head, windows: IndexWindows::Blob(windows.digest) });
        }
        let traces = match &places.traces {
            Some(range) => Traces::decode(part(range))
                .map_err(OperationError::of("use", "the traces of the index"))?,
            None => Traces::default(),
        };
        // The image works without a pack, for example of a later version.
        let hot = places.hot.as_ref().map(part).filter(|pack| match check_hot(pack, &devices) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "ignoring a hot pack");
                false
            }
        });
        let hot = hot.map(<[u8]>::to_vec);
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
/// [`ArtifactError`] if the bytes are not the manifest of an artifact that belongs to the image with this manifest.
pub fn index_of(manifest: &[u8], image: &Digest) -> Result<Digest, ArtifactError> {
    Ok(decoded(manifest, image)?.config.digest)
}

/// Returns the config and the blobs that an artifact's manifest names, the config first.
///
/// # Errors
/// [`ArtifactError`] if the bytes are not the manifest of an artifact that belongs to the image with this manifest.
pub fn blobs_of(manifest: &[u8], image: &Digest) -> Result<Vec<BlobName>, ArtifactError> {
    let raw = decoded(manifest, image)?;
    let all = std::iter::once(&raw.config).chain(&raw.layers);
    Ok(all.map(|it| BlobName { digest: it.digest, size: it.size }).collect())
}

/// Decodes the manifest of an artifact that belongs to the image with this manifest.
fn decoded(manifest: &[u8], image: &Digest) -> Result<RawManifest, ArtifactError> {
    let raw = RawManifest::decode(manifest)?;
    if raw.subject.digest != *image {
        let (expected, actual) = (Box::new(*image), Box::new(raw.subject.digest));
        return Err(ArtifactError::Subject { expected, actual });
    }
    Ok(raw)
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

/// Checks the sizes of an index's parts against the layers of the image, before any of them is fetched.
fn check_sizes(
    image: &Manifest,
    start: &RawStart,
    windows: &[RawDescriptor],
) -> Result<(), ArtifactError> {
    let layers = &image.layers;
    for (what, count) in [("heads", start.heads.len()), ("windows", windows.len())] {
        if count > layers.len() {
            let text = format!("it has {count} {what} for {} layers", layers.len());
            return Err(ArtifactError::Layers(text));
        }
    }
    let max = layers.iter().map(|it| it.size).max().unwrap_or(0).saturating_add(INDEX_SLACK);
    for head in &start.heads {
        check_size("head", *head, max.min(HEAD_MAX))?;
    }
    for windows in windows {
        check_size("windows", windows.size, max)?;
    }
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
    let all = sum(&mut layers.iter().map(|it| it.size.saturating_add(INDEX_SLACK)));
    let of_windows = sum(&mut windows.iter().map(|it| it.size));
    check_size("windows", of_windows, all)?;
    let both = sum(&mut start.heads.iter().copied()).saturating_add(of_windows);
    check_size("heads and windows", both, INDEX_MAX)?;
    check_size("compressed image", start.image, IMAGE_MAX.saturating_add(INDEX_SLACK))?;
    check_size("hot pack", start.hot.unwrap_or(0), HOT_MAX.min(all))?;
    check_size("traces", start.traces.unwrap_or(0), TRACES_MAX)
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

/// Checks that a head belongs to these layers, which share a device, and to windows of this length in bytes.
fn fits(
    head: &Head,
    windows_bytes: u64,
    layers: &[&SubjectLayer<'_>],
) -> Result<(), ArtifactError> {
    let wrong = |what| {
        let layer = Box::new(head.blob);
        Err(ArtifactError::Contradiction { layer, what })
    };
    // Such a head is made from the layer's own table of contents, and from nothing else.
    if head.kind.is_of_chunks() {
        return wrong("kind");
    }
    if layers.iter().any(|it| *it.diff_id != head.diff_id) {
        return wrong("diff id");
    }
    let is_of =
        |it: &&SubjectLayer<'_>| (it.layer.digest, it.layer.size) == (head.blob, head.blob_bytes);
    if !layers.iter().any(is_of) {
        return wrong("blob");
    }
    if head.windows_bytes() != windows_bytes {
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
            assert!(1 + parts.windows.len() + parts.recipes.len() <= manifest.layers.len());
        }
    }
    let Ok(config) = RawConfig::decode(bytes) else { return };
    if let Some(places) = config.start.places() {
        let StartPlaces { image, heads, hot, traces, length } = places;
        let mut parts = vec![image];
        parts.extend(heads.into_iter().chain(hot).chain(traces));
        let ends = parts.iter().try_fold(0, |end, it| (it.start == end).then_some(it.end));
        assert_eq!(ends, Some(length), "each part begins at the end of the one before it");
    }
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
