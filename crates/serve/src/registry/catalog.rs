//! Finds out which images of the store may be served, under which names.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::ImageId;
use oci::manifest::{Config, Document, INDEX};
use oci::policy::{ImageOrigin, Repository};
use serde_json::json;
use store::{Presence, Resolved, Seconds, Store};
use transfer::StoredImage;
use transfer::evidence::{check_use, read_evidence};
use transfer::lazy::artifact::{ARTIFACT_MANIFEST, BlobName, LAZY_ARTIFACT};
use transfer::lazy::{StoredIndex, stored_index, tag_of_index};

use super::RegistryResources;
use super::error::Refused;
use super::lazy_layers::{KnownLazyLayers, LazyLayer, PublicManifests, lazy_layers};
use super::private::{PrivateDigests, ReadPrivate, repository_of};
use crate::unpoisoned::lock;

/// Time for which the names of the store are used before they are read again.
const FRESH: Duration = Duration::from_secs(1);
/// If it takes long to read the names, they are used for this many times as long.
const FRESH_TIMES: u32 = 10;
/// Time after which the layers of an image are looked at again, if all of them can be served, and otherwise.
const LAYERS_FRESH: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(30));

/// A blob of a repository.
#[derive(Debug, Default)]
pub(super) struct ServedBlob {
    /// Whether it is the config of an image.
    pub(super) is_config: bool,
    /// The size in its manifest, if it is a layer or belongs to an index for lazy loading.
    pub(super) layer: Option<u64>,
    /// The size of the tar, if it is the diff id of a layer.
    pub(super) tar: Option<u64>,
    /// The layer, if it is the diff id of a layer of which the store may have only parts.
    pub(super) lazy: Option<Arc<LazyLayer>>,
}

/// The contents of a repository.
#[derive(Debug, Default)]
pub(super) struct ServedRepository {
    pub(super) tags: BTreeMap<String, Digest>,
    /// Tags of indexes for lazy loading. Each index names the manifest of its image, so an old one does no harm.
    pub(super) index_tags: BTreeMap<String, Digest>,
    /// The list of the referrers that are such indexes, for each manifest of an image.
    pub(super) index_lists: BTreeMap<Digest, Vec<u8>>,
    /// Manifests in the store, and indexes that led to them, which have their bytes here.
    pub(super) manifests: BTreeMap<Digest, Option<Vec<u8>>>,
    pub(super) blobs: BTreeMap<Digest, ServedBlob>,
}

/// The images that may be served.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    names: Mutex<Option<Arc<Names>>>,
    /// Locked by the thread that reads the names.
    reading: Mutex<Reading>,
    repositories: Mutex<BTreeMap<Repository, Arc<Mutex<KeptRepository>>>>,
}

#[derive(Debug, Default)]
struct Reading {
    private: ReadPrivate,
    /// When the names could last not be read.
    failed: Option<Instant>,
}

/// The images of each repository, at one moment.
#[derive(Debug)]
struct Names {
    read: Instant,
    fresh: Duration,
    images: BTreeMap<Repository, Vec<NamedImage>>,
    private: PrivateDigests,
    public: PublicManifests,
}

#[derive(Debug)]
struct NamedImage {
    tag: String,
    found: Resolved,
    created: Seconds,
}

/// The cached state of a repository. Its lock is held while the images are compared with the policies.
#[derive(Debug, Default)]
struct KeptRepository {
    served: Option<KeptContents>,
    /// When the images could last not be compared with the policies.
    failed: Option<Instant>,
    /// The layers of each image and manifest with a time of creation. To look at them, their recipes are hashed.
    layers: BTreeMap<(ImageId, Digest, Seconds), KeptLayers>,
    lazy: KnownLazyLayers,
}

/// The contents of a repository at one moment.
#[derive(Debug)]
struct KeptContents {
    /// When the names were read.
    read: Instant,
    /// Until when it is used even if the names were read again, because comparing the images takes time.
    until: Instant,
    contents: Arc<ServedRepository>,
}

/// The layers of an image that were compared with it.
#[derive(Debug)]
struct KeptLayers {
    until: Instant,
    config: Digest,
    layers: Vec<ComparedLayer>,
    /// Whether the store itself has unpacked all layers of the image.
    is_full: bool,
    os: String,
    architecture: String,
}

impl KeptLayers {
    /// Whether an index may be served that was made from these layers: it has names and data of all of them.
    fn may_be_indexed(&self, private: &PrivateDigests) -> bool {
        let is_public = |it: &ComparedLayer| {
            it.is_unpacked && !private.contains(&it.diff_id) && !private.contains(&it.blob)
        };
        self.is_full && !private.contains(&self.config) && self.layers.iter().all(is_public)
    }
}

#[derive(Debug)]
struct ComparedLayer {
    diff_id: Digest,
    tar_size: u64,
    blob: Digest,
    blob_size: u64,
    /// Whether the store itself has unpacked the blob. Otherwise the digest of the blob is only a claim.
    is_unpacked: bool,
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
        let kept = {
            let mut all = lock(&self.repositories);
            all.retain(|it, _| names.images.contains_key(it));
            Arc::clone(all.entry(name.clone()).or_default())
        };
        let mut kept = lock(&kept);
        let begun = Instant::now();
        if let Some(KeptContents { read, until, contents }) = &kept.served
            && (*read >= names.read || begun < *until)
        {
            return Ok(Arc::clone(contents));
        }
        // Images that were served before may be forbidden now.
        kept.served = None;
        if has_just(kept.failed) {
            return Err(Refused::Failed);
        }
        let KeptRepository { layers, lazy, .. } = &mut *kept;
        let found = served(resources, images, &names, layers, lazy);
        kept.failed = found.is_err().then(Instant::now);
        let contents = Arc::new(found?);
        let until = Instant::now() + begun.elapsed() * FRESH_TIMES;
        kept.served =
            Some(KeptContents { read: names.read, until, contents: Arc::clone(&contents) });
        Ok(contents)
    }

    /// Returns the names, which are read again if they are old.
    fn names(&self, resources: &RegistryResources) -> Result<Arc<Names>, Refused> {
        let mut names = lock(&self.names);
        if let Some(names) = names.as_ref().filter(|it| it.read.elapsed() < it.fresh) {
            return Ok(Arc::clone(names));
        }
        let mut reading = lock(&self.reading);
        if has_just(reading.failed) {
            return Err(Refused::Failed);
        }
        let found = Names::read(resources, &mut reading.private);
        reading.failed = found.is_err().then(Instant::now);
        let new = Arc::new(found?);
        *names = Some(Arc::clone(&new));
        Ok(new)
    }
}

/// Whether a failure was less than a second ago. Clients can repeat their requests, but not the work and the log.
fn has_just(failed: Option<Instant>) -> bool {
    failed.is_some_and(|it| it.elapsed() < FRESH)
}

impl Names {
    fn read(resources: &RegistryResources, read: &mut ReadPrivate) -> Result<Self, Refused> {
        let begun = Instant::now();
        let (refs, _damaged) = resources.store.refs.readable().map_err(|error| {
            tracing::error!(%error, "cannot read the names of the store");
            Refused::Failed
        })?;
        let private = PrivateDigests::find(resources, &refs, read)?;
        let mut images: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (name, reference) in refs {
            if name.is_unnamed() {
                continue;
            }
            let Some((repository, tag)) = repository_of(name.as_str()) else { continue };
            let origin = ImageOrigin::Repository(repository.clone());
            if !resources.repositories.iter().any(|it| it.matches(&origin)) {
                continue;
            }
            let (image, manifest) = (reference.image, reference.manifest);
            let found = Resolved { image, name: Some(name), manifest };
            let named = NamedImage { tag, found, created: reference.created };
            images.entry(repository).or_default().push(named);
        }
        let is_all = resources.repositories.iter().any(|it| it.to_string() == "**");
        let manifests = images.values().flatten().filter_map(|it: &NamedImage| it.found.manifest);
        let public = manifests.filter(|it| !private.contains(it)).collect();
        let public = (!is_all).then(|| Arc::new(public));
        let fresh = FRESH.max(begun.elapsed() * FRESH_TIMES);
        Ok(Self { read: Instant::now(), fresh, images, private, public })
    }
}

/// Returns the contents of these images, if the policies allow them to be used. Data that a private image has is not served.
fn served(
    resources: &RegistryResources,
    images: &[NamedImage],
    Names { private, public, .. }: &Names,
    kept: &mut BTreeMap<(ImageId, Digest, Seconds), KeptLayers>,
    known_lazy: &mut KnownLazyLayers,
) -> Result<ServedRepository, Refused> {
    let policies = (resources.policies)().map_err(|error| {
        tracing::error!(error, "no image is served, because the policies cannot be read");
        Refused::Failed
    })?;
    let store = &resources.store;
    let now = Instant::now();
    let mut before = std::mem::take(kept);
    let mut served = ServedRepository::default();
    let mut indexes = BTreeMap::new();
    for NamedImage { tag, found, created } in images {
        let Some(manifest) = found.manifest else { continue };
        if private.contains(&manifest) {
            tracing::debug!(%manifest, "not serving an image that is also private");
            continue;
        }
        if let Err(error) = check_use(&policies, store, found) {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(%manifest, error, "not serving an image");
            continue;
        }
        let key = (found.image, manifest, *created);
        if let Some(known) = before.remove(&key).filter(|it| it.until > now) {
            kept.insert(key, known);
        }
        // The same image may have several tags.
        if !kept.contains_key(&key)
            && let Some(new) = compared_layers(store, &found.image, &manifest)
        {
            kept.insert(key, new);
        }
        if let Some(layers) = kept.get(&key) {
            add_blobs(&mut served.blobs, layers, private);
            if layers.may_be_indexed(private) {
                add_index(&mut served, store, &manifest, layers, tag, private);
            }
        } else {
            for layer in lazy_layers(store, &found.image, &manifest, private, public, known_lazy) {
                let blob = served.blobs.entry(layer.diff_id).or_default();
                blob.lazy.get_or_insert(layer);
            }
        }
        served.tags.insert(tag.clone(), manifest);
        served.manifests.insert(manifest, None);
        // Clients ask for the index first if they have its digest.
        for index in read_evidence(store, &manifest).unwrap_or_default().indexes {
            indexes.insert(Digest::sha256(&index), index);
        }
    }
    add_indexes(&mut served.manifests, indexes, private, |it| {
        store.manifests.has(it).unwrap_or(true)
    });
    Ok(served)
}

/// Adds the index for lazy loading that was kept with an image.
fn add_index(
    served: &mut ServedRepository,
    store: &Store,
    manifest: &Digest,
    layers: &KeptLayers,
    tag: &str,
    private: &PrivateDigests,
) {
    let found = stored_index(store, manifest).inspect_err(|error| {
        let error: &dyn std::error::Error = error;
        tracing::debug!(%manifest, error, "not serving an index: see `quire fsck`");
    });
    let Ok(Some(StoredIndex { digest, manifest: bytes, config, blobs })) = found else { return };
    let is_private = |it: &BlobName| private.contains(&it.digest);
    if private.contains(&digest) || is_private(&config) || blobs.iter().any(is_private) {
        return;
    }
    if let Some(tag) = tag_of_index(tag, &layers.os, &layers.architecture) {
        served.index_tags.insert(tag, digest);
    }
    let listed = json!({
        "mediaType": ARTIFACT_MANIFEST,
        "digest": digest,
        "size": bytes.len(),
        "artifactType": LAZY_ARTIFACT,
    });
    let list = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [listed]});
    served.index_lists.insert(*manifest, list.to_string().into_bytes());
    served.manifests.insert(digest, Some(bytes));
    served.blobs.entry(config.digest).or_default().is_config = true;
    for BlobName { digest, size } in blobs {
        let known = served.blobs.entry(digest).or_default();
        known.layer = known.layer.or(Some(size));
    }
}

/// Adds the indexes that name no image of the store except those that are served. Other indexes would disclose the images of other repositories.
fn add_indexes(
    manifests: &mut BTreeMap<Digest, Option<Vec<u8>>>,
    mut indexes: BTreeMap<Digest, Vec<u8>>,
    private: &PrivateDigests,
    has: impl Fn(&Digest) -> bool,
) {
    indexes.retain(|digest, bytes| {
        let Ok(Document::Index(index)) = Document::parse(bytes) else { return false };
        let mut listed = index.manifests.iter().map(|it| &it.digest);
        let is_hidden = |it: &Digest| private.contains(it) || has(it);
        !private.contains(digest) && listed.all(|it| manifests.contains_key(it) || !is_hidden(it))
    });
    manifests.extend(indexes.into_iter().map(|(digest, bytes)| (digest, Some(bytes))));
}

fn add_blobs(
    blobs: &mut BTreeMap<Digest, ServedBlob>,
    image: &KeptLayers,
    private: &PrivateDigests,
) {
    if !private.contains(&image.config) {
        blobs.entry(image.config).or_default().is_config = true;
    }
    for layer in &image.layers {
        if private.contains(&layer.diff_id) || private.contains(&layer.blob) {
            continue;
        }
        blobs.entry(layer.diff_id).or_default().tar = Some(layer.tar_size);
        if layer.is_unpacked {
            let known = blobs.entry(layer.blob).or_default();
            known.layer = known.layer.or(Some(layer.blob_size));
        }
    }
}

/// Returns the layers of an image that may be served. A manifest that a hostile registry made can name any blob, and
/// its config any diff id, also of a private image in the store. So only layers are returned that were compared with
/// the image.
fn compared_layers(store: &Store, image: &ImageId, manifest: &Digest) -> Option<KeptLayers> {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        tracing::warn!(%manifest, error, "not serving the layers of an image");
    };
    // The layers of an image that came with an index were not read yet.
    if !matches!(store.presence_of(image, Some(manifest)), Ok(Presence::Complete)) {
        return None;
    }
    let found = StoredImage::load(store, manifest).inspect_err(|error| failed(error)).ok()?;
    let (mut layers, mut is_full) = (Vec::new(), true);
    for (layer, diff_id) in found.manifest.layers.iter().zip(found.config.diff_ids()) {
        let stored = store.layers.open(diff_id).inspect_err(|error| failed(error)).ok().flatten();
        let is_unpacked = stored.as_ref().is_some_and(|it| it.info().is_in(&layer.digest));
        is_full &= is_unpacked;
        layers.extend(stored.map(|stored| ComparedLayer {
            diff_id: *diff_id,
            tar_size: stored.info().size,
            blob: layer.digest,
            blob_size: layer.size,
            is_unpacked,
        }));
    }
    is_full &= layers.len() == found.manifest.layers.len();
    let config = found.manifest.config.digest;
    let fresh = if is_full { LAYERS_FRESH.0 } else { LAYERS_FRESH.1 };
    let Config { os, architecture, .. } = found.config;
    let until = Instant::now() + fresh;
    Some(KeptLayers { until, config, layers, is_full, os, architecture })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_names_a_hidden_image_is_not_served() {
        let [served, hidden, absent] =
            ["served", "hidden", "absent"].map(|it| Digest::sha256(it.as_bytes()));
        let index = |listed: &[Digest]| {
            let listed: Vec<_> = listed
                .iter()
                .map(|it| {
                    format!(
                        r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{it}","size":9}}"#
                    )
                })
                .collect();
            format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, listed.join(",")).into_bytes()
        };
        let (good, bad) = (index(&[served, absent]), index(&[served, hidden]));
        let all = [&good, &bad, &b"{".to_vec()].map(|it| (Digest::sha256(it), it.clone()));
        let mut manifests = BTreeMap::from([(served, None)]);
        let none = PrivateDigests::default();
        add_indexes(&mut manifests, all.into(), &none, |it| [served, hidden].contains(it));
        let expect = BTreeMap::from([(served, None), (Digest::sha256(&good), Some(good))]);
        assert_eq!(manifests, expect);
    }

    /// A layer of a private image is found by its diff id or its blob, and not served as either.
    #[test]
    fn layers_of_private_images_are_not_served() {
        let [config, diff_id, blob, own, own_blob] =
            [b"1", b"2", b"3", b"4", b"5"].map(|it| Digest::sha256(it));
        let layer = |diff_id, blob| ComparedLayer {
            diff_id,
            tar_size: 1,
            blob,
            blob_size: 1,
            is_unpacked: true,
        };
        let layers = vec![layer(diff_id, blob), layer(own, own_blob)];
        let image = kept(config, layers);
        for (private, expect) in [
            (vec![], vec![config, diff_id, blob, own, own_blob]),
            (vec![diff_id], vec![config, own, own_blob]),
            (vec![blob], vec![config, own, own_blob]),
            (vec![config, own], vec![diff_id, blob]),
        ] {
            let mut blobs = BTreeMap::new();
            add_blobs(&mut blobs, &image, &private_digests(private));
            let served: std::collections::BTreeSet<_> = blobs.into_keys().collect();
            assert_eq!(served, expect.into_iter().collect());
        }
    }

    fn private_digests(digests: impl IntoIterator<Item = Digest>) -> PrivateDigests {
        PrivateDigests { digests: digests.into_iter().collect(), ..PrivateDigests::default() }
    }

    fn kept(config: Digest, layers: Vec<ComparedLayer>) -> KeptLayers {
        let (os, architecture) = ("linux".to_owned(), "amd64".to_owned());
        KeptLayers { until: Instant::now(), config, layers, is_full: true, os, architecture }
    }

    /// An index has data of all layers, so one private or unread layer hides it.
    #[test]
    fn an_index_is_served_only_if_all_layers_are() {
        let [config, diff_id, blob, other] = [b"1", b"2", b"3", b"4"].map(|it| Digest::sha256(it));
        let layer =
            |is_unpacked| ComparedLayer { diff_id, tar_size: 1, blob, blob_size: 1, is_unpacked };
        let may = |image: &KeptLayers, private: &[Digest]| {
            image.may_be_indexed(&private_digests(private.iter().copied()))
        };
        let image = kept(config, vec![layer(true)]);
        assert!(may(&image, &[]) && may(&image, &[other]));
        for private in [config, diff_id, blob] {
            assert!(!may(&image, &[private]));
        }
        assert!(!may(&kept(config, vec![layer(true), layer(false)]), &[]));
        assert!(!may(&KeptLayers { is_full: false, ..image }, &[]));
    }
}
