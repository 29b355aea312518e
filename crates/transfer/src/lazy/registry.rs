//! Pushes indexes to registries as artifacts, and fetches them.

use std::cmp::Reverse;
use std::io::{self, Read as _};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::{Cause, Fetched, Registry, RegistryError};
use store::{DEFAULT_TRACE, OpenImage, OperationError, OriginError, Store, StoredTracesError};

use super::LayerIndex;
use super::artifact::{
    ARTIFACT_MANIFEST, Artifact, CREATED_ANNOTATION, LAZY_ARTIFACT, LayerRecipe, LazyParts,
    LazySubject, TRACES_ANNOTATION, index_of,
};
use super::hot::hot_pack;
use super::trust::{self, FoundIndex, TrustIndex, Untrusted};

/// Maximum number of an image's indexes to inspect. Each user with push rights may push more.
const INDEXES_MAX: usize = 8;
/// Maximum number of listed indexes that are sorted before `INDEXES_MAX` applies.
const LISTED_MAX: usize = 1000;

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
        let id = image.id;
        let object = format!("image {id}");
        let size =
            usize::try_from(image.image.size()).map_err(OperationError::of("read", &object))?;
        let mut bytes = vec![0; size];
        image.image.read_exact_at(&mut bytes, 0).map_err(OperationError::of("read", &object))?;
        let indexes = image.devices.iter().map(|device| {
            let loaded = LayerIndex::load(store, &device.id, Some(manifest));
            let loaded =
                loaded.map_err(OperationError::of("read the index of device", device.id))?;
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
/// uploaded.
pub fn push(
    registry: &Registry,
    subject: &LazySubject<'_>,
    parts: &LazyParts,
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
    Ok(LazyPushed { artifact: made.digest, index: made.index, sent })
}

/// Why an image has no usable index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyFetchError {
    /// The registry lists no index for the image's manifest.
    #[error("{0} has no index for lazy loading: `quire index --push` adds one")]
    None(Box<Reference>),
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

/// An index to fetch.
#[derive(Debug, Clone, Copy)]
pub struct LazyFetch<'a> {
    /// The name of the image.
    pub reference: &'a Reference,
    /// The image's manifest, which the policies have accepted.
    pub subject: LazySubject<'a>,
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

/// The indexes that a registry lists for an image.
#[derive(Debug)]
pub struct ListedIndexes {
    /// Digests of the artifacts' manifests, the best one first.
    listed: Result<Vec<Digest>, RegistryError>,
    /// The manifest of the best index.
    first: Option<Result<Fetched, RegistryError>>,
}

impl ListedIndexes {
    /// Requests the list of indexes for the image with this manifest, and the manifest of the best index. The
    /// responses are not trusted yet. The image need not be accepted by the policies before, because the list and a
    /// manifest are small.
    #[must_use]
    pub fn request(registry: &Registry, manifest: &Digest) -> Self {
        let listed = registry.referrers(manifest, Some(LAZY_ARTIFACT)).map(|mut listed| {
            listed.truncate(LISTED_MAX);
            // If an index was pushed again, the list contains both the old and the new index. Times in UTC without
            // fractions sort as text.
            listed.sort_by_key(|it| {
                let annotations = &it.descriptor.annotations;
                let traces = annotations.get(TRACES_ANNOTATION);
                let traces = traces.map_or(0, |it| it.split(',').count());
                Reverse((annotations.get(CREATED_ANNOTATION).cloned(), traces))
            });
            listed.truncate(INDEXES_MAX);
            listed.into_iter().map(|it| it.descriptor.digest).collect::<Vec<_>>()
        });
        let first = listed.as_ref().ok().and_then(|it| it.first());
        let first = first.map(|it| registry.manifest(&it.to_string()));
        Self { listed, first }
    }
}

/// Fetches the parts of a lazy image from the indexes that were [found](ListedIndexes::request) for its manifest.
///
/// # Errors
/// [`LazyFetchError`] of the first index, if none can be used.
pub fn fetch(
    registry: &Registry,
    wanted: &LazyFetch<'_>,
    found: ListedIndexes,
) -> Result<FetchedIndex, LazyFetchError> {
    let LazyFetch { reference, .. } = wanted;
    let listed = found.listed.map_err(OperationError::of("look for an index of", reference))?;
    let mut manifest = found.first;
    let mut first = None;
    for digest in &listed {
        let manifest = manifest.take().unwrap_or_else(|| registry.manifest(&digest.to_string()));
        match one(registry, wanted, digest, manifest) {
            Ok(found) => return Ok(found),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "ignoring an index");
                first.get_or_insert(error);
            }
        }
    }
    Err(first.unwrap_or_else(|| LazyFetchError::None(Box::new((*reference).clone()))))
}

fn one(
    registry: &Registry,
    wanted: &LazyFetch<'_>,
    digest: &Digest,
    fetched: Result<Fetched, RegistryError>,
) -> Result<FetchedIndex, LazyFetchError> {
    let LazyFetch { reference, subject, policies, trust } = wanted;
    let object = format!("index {digest} of {reference}");
    let fetched = fetched.map_err(OperationError::of("fetch", &object))?;
    let index = index_of(&fetched.bytes).map_err(OperationError::of("use", &object))?;
    // Trust is checked before the blobs are fetched, so that no blobs of an untrusted index are fetched.
    let found = FoundIndex { artifact: digest, index: &index, manifest: subject.bytes };
    let trusted = trust::check(&found, reference, policies, registry, *trust);
    trusted.map_err(|source| LazyFetchError::Untrusted {
        reference: Box::new((*reference).clone()),
        artifact: Box::new(*digest),
        source,
    })?;
    let parts =
        Artifact::open(&fetched.bytes, subject, |digest, size| blob(registry, digest, size));
    let parts = parts.map_err(OperationError::of("use", &object))?;
    Ok(FetchedIndex { artifact: *digest, parts })
}

/// Fetches a blob. If the bytes are wrong, fetches it once more from another host.
fn blob(registry: &Registry, digest: &Digest, size: u64) -> io::Result<Vec<u8>> {
    let fetched = || {
        let mut bytes = Vec::new();
        registry.blob(digest, Some(size), 0).read_to_end(&mut bytes)?;
        Ok::<_, io::Error>(bytes)
    };
    let bytes = fetched()?;
    if !digest.matches(&bytes) && registry.distrust(digest) {
        return fetched();
    }
    Ok(bytes)
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
