//! Pushes indexes to registries as artifacts, and fetches them.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::io::{self, Read as _};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::manifest::Manifest;
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::{AskedHosts, Cause, Fetched, Referrer, Registry, RegistryError};
use store::{
    DEFAULT_TRACE, LazyDeviceError, OpenImage, OperationError, OriginError, Store,
    StoredTracesError, Traces,
};

use super::LayerIndex;
use super::artifact::{
    ARTIFACT_MANIFEST, Artifact, CREATED_ANNOTATION, FetchedArtifact, LayerRecipe, LazyParts,
    LazySubject, TRACES_ANNOTATION, index_of,
};
use super::hot::hot_pack;
use super::trust::{self, FoundIndex, TrustIndex, Untrusted};

/// Maximum number of an image's indexes to inspect. Each user with push rights may push more.
const INDEXES_MAX: usize = 8;
/// Maximum length of a tag in bytes. Source: OCI distribution-spec 1.1.
const TAG_MAX: usize = 128;
/// Maximum number of listed indexes that are sorted before `INDEXES_MAX` applies.
const LISTED_MAX: usize = 1000;
/// Number of times that a blob is fetched because its bytes were wrong.
const TRIES: usize = 8;

/// Why an index was not pushed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyPushError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The registry does not have the image.
    #[error("the repository does not have {manifest}: push the image first")]
    NoImage {
        /// The manifest of the image.
        manifest: Box<Digest>,
        /// The registry's error.
        source: Box<RegistryError>,
    },
    /// A device has no index and so cannot be filled.
    #[error("device {0} of the image has no index, but each of its devices needs one")]
    NoIndex(DeviceId),
    /// The traces of the image cannot be read.
    #[error(transparent)]
    Traces(#[from] StoredTracesError),
}

impl LazyParts {
    /// Returns the parts of an image in a store: its file, the index of each of its devices, its traces, and the hot
    /// pack of its default trace. Indexes that came with another manifest are not included. The caller sets
    /// [`created`](Self::created).
    ///
    /// # Errors
    /// [`LazyPushError`], if a part is missing or cannot be read.
    pub fn stored(
        store: &Store,
        image: &OpenImage,
        manifest: &Digest,
    ) -> Result<Self, LazyPushError> {
        Self::with_indexes(store, image, |device| LayerIndex::load(store, device, Some(manifest)))
    }

    /// As [`stored`](Self::stored), but only with indexes that were made in this store, and without traces and hot
    /// pack. So the result does not depend on what other hosts have sent.
    ///
    /// # Errors
    /// As [`stored`](Self::stored).
    pub fn made_here(store: &Store, image: &OpenImage) -> Result<Self, LazyPushError> {
        let load = |device: &DeviceId| {
            let found = store.lazy_devices.index(device)?;
            Ok(found.map(|(head, windows)| LayerIndex { head, windows }))
        };
        let parts = Self::with_indexes(store, image, load)?;
        Ok(Self { hot: None, traces: Traces::default(), ..parts })
    }

    fn with_indexes(
        store: &Store,
        image: &OpenImage,
        load: impl Fn(&DeviceId) -> Result<Option<LayerIndex>, LazyDeviceError>,
    ) -> Result<Self, LazyPushError> {
        let id = image.id;
        let object = format!("image {id}");
        let size =
            usize::try_from(image.image.size()).map_err(OperationError::of("read", &object))?;
        let mut bytes = vec![0; size];
        image.image.read_exact_at(&mut bytes, 0).map_err(OperationError::of("read", &object))?;
        let indexes = image.devices.iter().map(|device| {
            let loaded = load(&device.id)
                .map_err(OperationError::of("read the index of device", device.id))?;
            // The description that a layer's table of contents gave is not an index of the layer's tar.
            let loaded = loaded.filter(|it| !it.head.kind.is_of_chunks());
            loaded.ok_or(LazyPushError::NoIndex(device.id))
        });
        let indexes = indexes.collect::<Result<Vec<_>, _>>()?;
        let mut recipes = Vec::new();
        for index in &indexes {
            let recipe = LayerRecipe::stored(store, &index.head.diff_id);
            recipes.extend(recipe.map_err(OperationError::of("read", "the recipe of a layer"))?);
        }
        let traces = store.downloads.traces(&id)?;
        let hot = match traces.get(DEFAULT_TRACE) {
            Some(trace) => hot_pack(trace, &image.devices, indexes.iter().map(|it| &it.head))?,
            None => None,
        };
        Ok(Self { id, image: bytes, indexes, hot, traces, created: None, recipes })
    }
}

/// An index that was pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LazyPushed {
    /// Digest of the artifact's manifest.
    pub artifact: Digest,
    /// Digest of the artifact's config: see [`Artifact::index`].
    pub index: Digest,
    /// Number of bytes of blobs that were uploaded.
    pub sent: u64,
}

/// Pushes the parts of a lazy image as a referrer of the image's manifest. Blobs that the registry has are not
/// uploaded. With a `tag`, readers that know only this tag find the index as well: see [`index_tag`].
pub fn push(
    registry: &Registry,
    subject: &LazySubject<'_>,
    parts: &LazyParts,
    tag: Option<&str>,
) -> Result<LazyPushed, LazyPushError> {
    let made = parts.artifact(subject);
    let made = made.map_err(OperationError::of("make", "an artifact of the index"))?;
    registry.manifest(&subject.digest.to_string()).map_err(|source| LazyPushError::NoImage {
        manifest: Box::new(*subject.digest),
        source: Box::new(source),
    })?;
    let failed = OperationError::of("push", "the index");
    let mut sent = 0;
    for blob in &made.blobs {
        let size = blob.bytes.len() as u64;
        if !registry.has_blob(&blob.digest, Some(size)).map_err(failed)? {
            let send = || registry.upload_blob(&blob.digest, size, &mut &blob.bytes[..]);
            let done = match send() {
                Err(error) if matches!(error.cause(), Cause::UploadLost(_)) => send(),
                done => done,
            };
            done.map_err(failed)?;
            sent += size;
        }
    }
    // The manifest is pushed even if the registry already has it, because the list of referrers may lack the manifest.
    let name = made.digest.to_string();
    registry.put_manifest(&name, ARTIFACT_MANIFEST, &made.manifest).map_err(failed)?;
    if let Some(tag) = tag
        && let Err(error) = registry.put_manifest(tag, ARTIFACT_MANIFEST, &made.manifest)
    {
        // The index was pushed. The registry may not allow that a tag is changed.
        let error: &dyn std::error::Error = &error;
        tracing::warn!(
            tag,
            error,
            "cannot push the tag of the index: pulls take longer to find it"
        );
    }
    Ok(LazyPushed { artifact: made.digest, index: made.index, sent })
}

/// Why an image has no usable index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyFetchError {
    /// The registry lists no index for the image's manifest.
    #[error("{0} has no index for lazy loading: `quire index --push` adds one")]
    None(Box<Reference>),
    /// The registry lists no index for the image's manifest, and there can probably be none.
    #[error(
        "{0} has no index for lazy loading. Some of its layers are not compressed with gzip. Uncompressed layers and \
        layers of one zstd frame can have none: `quire push --compression gzip` pushes an image that can have one"
    )]
    NotCompressed(Box<Reference>),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// An index is not trusted.
    #[error("index {artifact} of {reference} is not trusted")]
    Untrusted {
        reference: Box<Reference>,
        /// Digest of the artifact's manifest.
        artifact: Box<Digest>,
        source: Untrusted,
    },
}

impl LazyFetchError {
    /// Returns whether the image has no index. Otherwise, an index may exist, but cannot be used.
    #[must_use]
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::None(_) | Self::NotCompressed(_))
    }
}

/// The image whose index is wanted.
#[derive(Debug, Clone, Copy)]
pub struct LazyFetch<'a> {
    /// The name of the image.
    pub reference: &'a Reference,
    /// Digest of the image's manifest, which the policies have accepted.
    pub digest: &'a Digest,
    /// The encoded manifest.
    pub bytes: &'a [u8],
    /// The parsed manifest.
    pub manifest: &'a Manifest,
    /// Policies that apply to the index.
    pub policies: &'a Policies,
    /// The indexes that the user trusts.
    pub trust: TrustIndex,
}

/// An index that was fetched, is trusted, and matches the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedIndex {
    /// Digest of the artifact's manifest.
    pub artifact: Digest,
    /// The verified parts of the artifact.
    pub parts: LazyParts,
}

/// Returns the tag under which the newest index of an image is pushed, in addition to its digest: a pull requests it
/// together with the image's manifest, whose digest it does not know yet. Returns `None` if the image has no tag, or if
/// the tag would be too long.
///
/// Source of the grammar: OCI distribution-spec 1.1, "Pulling manifests".
#[must_use]
pub fn index_tag(reference: &Reference, os: &str, architecture: &str) -> Option<String> {
    if reference.digest().is_some() {
        return None;
    }
    tag_of_index(reference.tag().unwrap_or("latest"), os, architecture)
}

/// Returns the [tag of the index](index_tag) of an image with this tag.
#[must_use]
pub fn tag_of_index(tag: &str, os: &str, architecture: &str) -> Option<String> {
    let is_plain = |it: &str| !it.is_empty() && it.bytes().all(|it| it.is_ascii_alphanumeric());
    let made = format!("{tag}.{os}-{architecture}.quire");
    (is_plain(os) && is_plain(architecture) && made.len() <= TAG_MAX).then_some(made)
}

/// An index that was fetched as far as possible without the image's config.
#[derive(Debug)]
pub(super) struct Candidate {
    /// Digest of the artifact's manifest.
    pub(super) digest: Digest,
    pub(super) artifact: FetchedArtifact,
    /// The hosts that named it.
    pub(super) hosts: AskedHosts,
}

pub(super) fn ignore(error: &LazyFetchError) {
    tracing::debug!(error = error as &dyn std::error::Error, "ignoring an index");
}

/// Returns the listed indexes of an image, the best one first. The list is not trusted yet.
pub(super) fn sorted(
    wanted: &LazyFetch<'_>,
    listed: Result<Vec<Referrer>, RegistryError>,
) -> Result<VecDeque<Digest>, LazyFetchError> {
    let mut listed =
        listed.map_err(OperationError::of("look for an index of", wanted.reference))?;
    listed.truncate(LISTED_MAX);
    // If an index was pushed again, the list contains both the old and the new index. Times in UTC without fractions
    // sort as text.
    listed.sort_by_key(|it| {
        let annotations = &it.descriptor.annotations;
        let traces = annotations.get(TRACES_ANNOTATION);
        let traces = traces.map_or(0, |it| it.split(',').count());
        Reverse((annotations.get(CREATED_ANNOTATION).cloned(), traces))
    });
    listed.truncate(INDEXES_MAX);
    Ok(listed.into_iter().map(|it| it.descriptor.digest).collect())
}

/// Fetches a listed index if it is trusted.
pub(super) fn begin_listed(
    registry: &Registry,
    wanted: &LazyFetch<'_>,
    digest: &Digest,
) -> Result<FetchedArtifact, LazyFetchError> {
    let object = format_args!("index {digest} of {}", wanted.reference);
    let found = registry.manifest(&digest.to_string());
    begin(registry, wanted, &found.map_err(OperationError::of("fetch", object))?)
}

/// Fetches the blobs of an index if it is trusted.
pub(super) fn begin(
    registry: &Registry,
    wanted: &LazyFetch<'_>,
    fetched: &Fetched,
) -> Result<FetchedArtifact, LazyFetchError> {
    let LazyFetch { reference, policies, trust, .. } = wanted;
    let digest = &fetched.digest;
    let object = format_args!("index {digest} of {reference}");
    let failed = OperationError::of("use", object);
    let index = index_of(&fetched.bytes, wanted.digest).map_err(failed)?;
    // Trust is checked before the blobs are fetched, so that no blobs of an untrusted index are fetched.
    let found = FoundIndex { artifact: digest, index: &index, manifest: wanted.bytes };
    let trusted = trust::check(&found, reference, policies, registry, *trust);
    trusted.map_err(|source| LazyFetchError::Untrusted {
        reference: Box::new((*reference).clone()),
        artifact: Box::new(*digest),
        source,
    })?;
    let blob = |digest: &Digest, size| blob(registry, digest, size);
    let artifact = Artifact::fetch(&fetched.bytes, wanted.digest, wanted.manifest, blob);
    Ok(artifact.map_err(failed)?)
}

/// Fetches a blob. If the bytes are wrong, fetches it again as long as there is another host.
pub(super) fn blob(registry: &Registry, digest: &Digest, size: u64) -> io::Result<Vec<u8>> {
    let fetched = || {
        let mut bytes = Vec::new();
        registry.blob(digest, Some(size), 0).read_to_end(&mut bytes)?;
        Ok::<_, io::Error>(bytes)
    };
    for _ in 1..TRIES {
        let bytes = fetched()?;
        if digest.matches(&bytes) || !registry.distrust(digest) {
            return Ok(bytes);
        }
    }
    fetched()
}

/// Returns the repositories that the layers of a stored image can be fetched from, the most recent one first. Each
/// reference has the digest of the manifest.
///
/// # Errors
/// [`OriginError`] if the image's origins cannot be read.
pub fn sources(store: &Store, image: &ImageId) -> Result<Vec<Reference>, OriginError> {
    let origins = store.downloads.origins(image)?;
    let references = origins.into_iter().filter_map(|origin| {
        let (repository, manifest) = (origin.repository?, origin.manifest?);
        // A name that is not a valid reference comes from an older store. It is skipped, and the other names are
        // used.
        format!("{repository}@{manifest}").parse().ok()
    });
    Ok(references.collect())
}
