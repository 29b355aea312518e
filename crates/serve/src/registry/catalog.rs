//! Finds out which images of the store may be served, under which names.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::ImageId;
use oci::policy::{ImageOrigin, Repository};
use oci::reference::Reference;
use store::{Presence, Resolved, Store};
use transfer::StoredImage;
use transfer::evidence::{check_use, read_evidence};

use super::RegistryResources;
use super::error::Refused;
use crate::unpoisoned::lock;

/// Time for which the names of the store are used before they are read again.
const FRESH: Duration = Duration::from_secs(1);

/// A blob of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ServedBlob {
    /// Whether it is the config of an image.
    pub(super) is_config: bool,
    /// The size in its manifest, if it is a layer.
    pub(super) layer: Option<u64>,
    /// Whether it is the tar of a layer, by its diff id.
    pub(super) is_tar: bool,
}

/// The contents of a repository.
#[derive(Debug, Default)]
pub(super) struct ServedRepository {
    pub(super) tags: BTreeMap<String, Digest>,
    /// Manifests in the store, and indexes that led to them, which have their bytes here.
    pub(super) manifests: BTreeMap<Digest, Option<Vec<u8>>>,
    pub(super) blobs: BTreeMap<Digest, ServedBlob>,
}

/// The images that may be served.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    names: Mutex<Option<Arc<Names>>>,
}

/// The images of each repository, at one moment.
#[derive(Debug)]
struct Names {
    read: Instant,
    /// Tag and image of each name.
    images: BTreeMap<Repository, Vec<(String, Resolved)>>,
    /// The repositories whose images were compared with the policies.
    repositories: Mutex<BTreeMap<Repository, Arc<ServedRepository>>>,
}

impl Catalog {
    /// Returns the contents of a repository.
    pub(super) fn repository(
        &self,
        resources: &RegistryResources,
        name: &Repository,
    ) -> Result<Arc<ServedRepository>, Refused> {
        let names = self.names(resources)?;
        let images = names.images.get(name).ok_or(Refused::Repository)?;
        let mut repositories = lock(&names.repositories);
        if let Some(found) = repositories.get(name) {
            return Ok(Arc::clone(found));
        }
        let found = Arc::new(served(resources, images)?);
        repositories.insert(name.clone(), Arc::clone(&found));
        Ok(found)
    }

    /// Returns the names, which are read again if they are old.
    fn names(&self, resources: &RegistryResources) -> Result<Arc<Names>, Refused> {
        let mut names = lock(&self.names);
        if let Some(names) = names.as_ref().filter(|it| it.read.elapsed() < FRESH) {
            return Ok(Arc::clone(names));
        }
        let (refs, _damaged) = resources.store.refs.readable().map_err(|error| {
            tracing::error!(%error, "cannot read the names of the store");
            Refused::Failed
        })?;
        let mut images: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (name, reference) in refs {
            let Some((repository, tag)) = repository_of(name.as_str()) else { continue };
            let origin = ImageOrigin::Repository(repository.clone());
            if !resources.repositories.iter().any(|it| it.matches(&origin)) {
                continue;
            }
            let (image, manifest) = (reference.image, reference.manifest);
            let found = Resolved { image, name: Some(name), manifest };
            images.entry(repository).or_default().push((tag, found));
        }
        let new = Arc::new(Names { read: Instant::now(), images, repositories: Mutex::default() });
        *names = Some(Arc::clone(&new));
        Ok(new)
    }
}

/// Returns the contents of these images, if the policies allow them to be used.
fn served(
    resources: &RegistryResources,
    images: &[(String, Resolved)],
) -> Result<ServedRepository, Refused> {
    let policies = (resources.policies)().map_err(|error| {
        tracing::error!(error, "no image is served, because the policies cannot be read");
        Refused::Failed
    })?;
    let mut served = ServedRepository::default();
    for (tag, found) in images {
        let Some(manifest) = found.manifest else { continue };
        if let Err(error) = check_use(&policies, &resources.store, found) {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(%manifest, error, "not serving an image");
            continue;
        }
        for (digest, blob) in blobs(&resources.store, &found.image, &manifest) {
            let known = served.blobs.entry(digest).or_default();
            known.is_config |= blob.is_config;
            known.is_tar |= blob.is_tar;
            known.layer = known.layer.or(blob.layer);
        }
        served.tags.insert(tag.clone(), manifest);
        served.manifests.insert(manifest, None);
        // Clients ask for the index first if they have its digest.
        let evidence = read_evidence(&resources.store, &manifest).unwrap_or_default();
        for index in evidence.indexes {
            served.manifests.insert(Digest::sha256(&index), Some(index));
        }
    }
    Ok(served)
}

/// Returns the blobs of an image that may be served. A manifest that a hostile registry made can name any blob, and its
/// config any diff id, also of a private image in the store. So only blobs are returned that were compared with the
/// image.
fn blobs(store: &Store, image: &ImageId, manifest: &Digest) -> Vec<(Digest, ServedBlob)> {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        tracing::warn!(%manifest, error, "not serving the layers of an image");
    };
    // The layers of an image that came with an index were not read yet.
    if !matches!(store.presence_of(image, Some(manifest)), Ok(Presence::Complete)) {
        return Vec::new();
    }
    let found = match StoredImage::load(store, manifest) {
        Ok(found) => found,
        Err(error) => {
            failed(&error);
            return Vec::new();
        }
    };
    let none = ServedBlob::default();
    let mut blobs = vec![(found.manifest.config.digest, ServedBlob { is_config: true, ..none })];
    for (layer, diff_id) in found.manifest.layers.iter().zip(found.config.diff_ids()) {
        match store.layers.open(diff_id) {
            Ok(Some(stored)) => {
                blobs.push((*diff_id, ServedBlob { is_tar: true, ..none }));
                // If the layer was made without its blob, the digest of the blob is only a claim.
                if stored.info().is_in(&layer.digest) {
                    blobs.push((layer.digest, ServedBlob { layer: Some(layer.size), ..none }));
                }
            }
            Ok(None) => {}
            Err(error) => failed(&error),
        }
    }
    blobs
}

/// Returns the repository and the tag of a name in the store. Names without a registry were given on this host, so
/// they are in no repository.
fn repository_of(name: &str) -> Option<(Repository, String)> {
    let reference: Reference = name.parse().ok()?;
    let (registry, repository) = (reference.registry(), reference.repository());
    let first = name.split_once('/')?.0;
    (first == registry).then(|| {
        (Repository::new(registry, repository), reference.tag().unwrap_or("latest").to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_with_a_registry_are_in_a_repository() {
        let of = |name: &str| repository_of(name).map(|(name, tag)| format!("{name} {tag}"));
        assert_eq!(of("docker.io/library/a:1").as_deref(), Some("docker.io/library/a 1"));
        assert_eq!(of("localhost:5000/a:1").as_deref(), Some("localhost:5000/a 1"));
        assert_eq!(of("GHCR.io/a/b:1").as_deref(), Some("ghcr.io/a/b 1"));
        for name in ["a:1", "library/a:1", "team/a/b:1"] {
            assert_eq!(of(name), None, "{name}");
        }
    }
}
