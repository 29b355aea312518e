//! Artifacts with indexes, to and from registries.

use std::cmp::Reverse;
use std::io::{self, Read as _};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::policy::Policies;
use oci::reference::Reference;
use oci::registry::{Cause, Fetched, Registry, RegistryError};
use store::{LazyDeviceError, OpenImage, OriginError, Store, StoredTracesError};

use super::LayerIndex;
use super::artifact::{
    ARTIFACT_MANIFEST, Artifact, ArtifactError, LAZY_ARTIFACT, LayerRecipe, LazyParts, LazySubject,
    RecipeError, TRACES_ANNOTATION, index_of,
};
use super::trust::{self, FoundIndex, TrustIndex, Untrusted};

/// So many indexes of one image are looked at: anybody with push rights may push more.
const INDEXES_MAX: usize = 8;
/// So many are compared before that.
const LISTED_MAX: usize = 1000;

/// Why an index was not pushed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyPushError {
    /// The index does not fit the image.
    #[error("cannot make an artifact of the index")]
    Artifact(#[source] ArtifactError),
    /// The registry does not have the image.
    #[error("{manifest} is not in the repository: push the image first")]
    NoImage {
        /// The manifest of the image.
        manifest: Box<Digest>,
        /// What the registry said.
        source: Box<RegistryError>,
    },
    /// A request failed.
    #[error("cannot push the index")]
    Registry(#[source] Box<RegistryError>),
    /// A device has no index, so that it cannot be filled.
    #[error("device {0} of the image has no index: all of its devices need one")]
    NoIndex(DeviceId),
    /// An index of the store cannot be read.
    #[error("cannot read the index of device {device}")]
    Index {
        /// The device.
        device: DeviceId,
        /// Why not.
        source: Box<LazyDeviceError>,
    },
    /// The traces of the image cannot be read.
    #[error(transparent)]
    Traces(#[from] StoredTracesError),
    /// A layer's recipe cannot be read.
    #[error("cannot read how a layer is made")]
    Recipe(#[from] RecipeError),
    /// The image cannot be read.
    #[error("cannot read image {image}")]
    Read {
        /// The image.
        image: ImageId,
        /// Why not.
        source: io::Error,
    },
}

impl LazyParts {
    /// The parts of an image of a store: its file, the index of each of its devices, and its traces. What another manifest
    /// claims is none of them.
    ///
    /// # Errors
    /// [`LazyPushError`]: [`NoIndex`](LazyPushError::NoIndex) and those after it.
    pub fn stored(
        store: &Store,
        image: &OpenImage,
        manifest: &Digest,
    ) -> Result<Self, LazyPushError> {
        let id = image.id;
        let read = |source| LazyPushError::Read { image: id, source };
        let size = usize::try_from(image.image.size()).map_err(|it| read(io::Error::other(it)))?;
        let mut bytes = vec![0; size];
        image.image.read_exact_at(&mut bytes, 0).map_err(read)?;
        let indexes = image.devices.iter().map(|device| {
            let loaded = LayerIndex::load(store, &device.id, Some(manifest)).map_err(|source| {
                let source = Box::new(source);
                LazyPushError::Index { device: device.id, source }
            })?;
            loaded.ok_or(LazyPushError::NoIndex(device.id))
        });
        let indexes = indexes.collect::<Result<Vec<_>, _>>()?;
        let mut recipes = Vec::new();
        for index in &indexes {
            recipes.extend(LayerRecipe::stored(store, &index.head.diff_id)?);
        }
        Ok(Self { id, image: bytes, indexes, traces: store.downloads.traces(&id)?, recipes })
    }
}

/// An index that was pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LazyPushed {
    /// Digest of the artifact's manifest.
    pub artifact: Digest,
    /// Digest of its config: see [`Artifact::index`].
    pub index: Digest,
    /// Bytes of blobs that were sent.
    pub sent: u64,
}

/// Pushes what makes an image lazy, as a referrer of the image's manifest. Blobs that are there are not sent.
///
/// # Errors
/// [`LazyPushError`].
pub fn push(
    registry: &Registry,
    subject: &LazySubject<'_>,
    parts: &LazyParts,
) -> Result<LazyPushed, LazyPushError> {
    let made = parts.artifact(subject).map_err(LazyPushError::Artifact)?;
    registry.manifest(&subject.digest.to_string()).map_err(|source| LazyPushError::NoImage {
        manifest: Box::new(*subject.digest),
        source: Box::new(source),
    })?;
    let failed = |source| LazyPushError::Registry(Box::new(source));
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
    // Again if it is there: the list of referrers may lack it.
    let name = made.digest.to_string();
    registry.put_manifest(&name, ARTIFACT_MANIFEST, &made.manifest).map_err(failed)?;
    Ok(LazyPushed { artifact: made.digest, index: made.index, sent })
}

/// Why an image has no index that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyFetchError {
    /// Nothing refers to its manifest.
    #[error("{0} has no index for lazy loading: `quire index --push` adds one")]
    None(Box<Reference>),
    /// The list of indexes cannot be had.
    #[error("cannot look for an index of {reference}")]
    List {
        /// The image.
        reference: Box<Reference>,
        /// Why not.
        source: Box<RegistryError>,
    },
    /// An index is not trusted.
    #[error("index {artifact} of {reference} is not trusted")]
    Untrusted {
        /// The image.
        reference: Box<Reference>,
        /// The artifact's manifest.
        artifact: Box<Digest>,
        /// Why not.
        source: Untrusted,
    },
    /// The manifest of an index cannot be fetched.
    #[error("cannot fetch index {artifact} of {reference}")]
    Manifest {
        /// The image.
        reference: Box<Reference>,
        /// The artifact's manifest.
        artifact: Box<Digest>,
        /// Why not.
        source: Box<RegistryError>,
    },
    /// An index cannot be used.
    #[error("cannot use index {artifact} of {reference}")]
    Artifact {
        /// The image.
        reference: Box<Reference>,
        /// The artifact's manifest.
        artifact: Box<Digest>,
        /// Why not.
        source: ArtifactError,
    },
}

/// An index to fetch.
#[derive(Debug, Clone, Copy)]
pub struct LazyFetch<'a> {
    /// The name of the image.
    pub reference: &'a Reference,
    /// Its manifest, which the policies have accepted.
    pub subject: LazySubject<'a>,
    /// The policies.
    pub policies: &'a Policies,
    /// The indexes that the user trusts.
    pub trust: TrustIndex,
}

/// An index that was fetched, is trusted, and fits the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedIndex {
    /// Digest of the artifact's manifest.
    pub artifact: Digest,
    /// Its parts, checked.
    pub parts: LazyParts,
}

/// The indexes that a registry lists for an image.
#[derive(Debug)]
pub struct ListedIndexes {
    /// Digests of their manifests, the best one first.
    listed: Result<Vec<Digest>, RegistryError>,
    /// The manifest of that one.
    first: Option<Result<Fetched, RegistryError>>,
}

impl ListedIndexes {
    /// Asks for the indexes of the image with this manifest. Nothing of them is believed, and no policy has to know the image
    /// yet: the list and a manifest are small.
    #[must_use]
    pub fn find(registry: &Registry, manifest: &Digest) -> Self {
        let listed = registry.referrers(manifest, Some(LAZY_ARTIFACT)).map(|mut listed| {
            listed.truncate(LISTED_MAX);
            // One that was pushed again with more traces stands beside the one without them.
            listed.sort_by_key(|it| {
                let traces = it.descriptor.annotations.get(TRACES_ANNOTATION);
                Reverse(traces.map_or(0, |it| it.split(',').count()))
            });
            listed.truncate(INDEXES_MAX);
            listed.into_iter().map(|it| it.descriptor.digest).collect::<Vec<_>>()
        });
        let first = listed.as_ref().ok().and_then(|it| it.first());
        let first = first.map(|it| registry.manifest(&it.to_string()));
        Self { listed, first }
    }
}

/// Fetches what makes an image lazy, of the indexes that were [found](ListedIndexes::find) for its manifest.
///
/// # Errors
/// [`LazyFetchError`], of the first index if there are several.
pub fn fetch(
    registry: &Registry,
    wanted: &LazyFetch<'_>,
    found: ListedIndexes,
) -> Result<FetchedIndex, LazyFetchError> {
    let LazyFetch { reference, .. } = wanted;
    let listed = found.listed.map_err(|source| LazyFetchError::List {
        reference: Box::new((*reference).clone()),
        source: Box::new(source),
    })?;
    let mut manifest = found.first;
    let mut first = None;
    for digest in &listed {
        let manifest = manifest.take().unwrap_or_else(|| registry.manifest(&digest.to_string()));
        match one(registry, wanted, digest, manifest) {
            Ok(found) => return Ok(found),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "an index is not used");
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
    let (name, artifact) = (|| Box::new((*reference).clone()), || Box::new(*digest));
    let fetched = fetched.map_err(|source| LazyFetchError::Manifest {
        reference: name(),
        artifact: artifact(),
        source: Box::new(source),
    })?;
    let useless =
        |source| LazyFetchError::Artifact { reference: name(), artifact: artifact(), source };
    let index = index_of(&fetched.bytes).map_err(useless)?;
    // Before its blobs: what is not trusted is not fetched.
    let found = FoundIndex { artifact: digest, index: &index, manifest: subject.bytes };
    let trusted = trust::check(&found, reference, policies, registry, *trust);
    trusted.map_err(|source| LazyFetchError::Untrusted {
        reference: name(),
        artifact: artifact(),
        source,
    })?;
    let parts =
        Artifact::open(&fetched.bytes, subject, |digest, size| blob(registry, digest, size));
    Ok(FetchedIndex { artifact: *digest, parts: parts.map_err(useless)? })
}

/// The bytes of a blob; from a second host, if the first one's are wrong.
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

/// The repositories that the layers of a stored image can be fetched from, each with the digest of the manifest, the last
/// one first.
///
/// # Errors
/// [`OriginError`].
pub fn sources(store: &Store, image: &ImageId) -> Result<Vec<Reference>, OriginError> {
    let origins = store.downloads.origins(image)?;
    let references = origins.into_iter().filter_map(|origin| {
        let (repository, manifest) = (origin.repository?, origin.manifest?);
        // A name that no reference has comes from an older store; then others are asked.
        format!("{repository}@{manifest}").parse().ok()
    });
    Ok(references.collect())
}
