//! Finds out which digests belong to private images, so that no other image serves their bytes.
//!
//! Pulls reuse what the store has. So a hostile registry can publish an image whose manifest names the layers of a
//! private image, and the store has it as its own image without a byte from that registry.

use std::collections::{BTreeMap, BTreeSet};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::manifest::{Config, Document};
use oci::policy::{ImageOrigin, Repository};
use store::{
    KeptIndexError, ORIGINS_MAX, OpenImageError, Origin, OriginError, RefName, Reference,
    SnapshotKind, Store, StoredManifestError,
};
use transfer::evidence::read_evidence;
use transfer::lazy::artifact::blobs_of;

use super::RegistryResources;
use super::error::Refused;

/// The data of private images.
#[derive(Debug, Default)]
pub(super) struct PrivateDigests {
    /// Digests of manifests, configs, layers, diff ids and kept indexes.
    pub(super) digests: BTreeSet<Digest>,
    /// Devices of the images. An index that came with another image can claim the same devices.
    pub(super) devices: BTreeSet<DeviceId>,
    /// Whether the devices of an image cannot be read, so that any device may be private.
    pub(super) has_unknown_devices: bool,
}

/// Facts about private images that were read before, and do not change.
#[derive(Debug, Default)]
pub(super) struct ReadPrivate {
    /// Digests in manifests.
    manifests: BTreeMap<Digest, Vec<Digest>>,
    devices: BTreeMap<ImageId, Vec<DeviceId>>,
}

/// The cached facts about an image of the store.
#[derive(Debug, Default)]
struct Known {
    manifests: BTreeSet<Digest>,
    is_named: bool,
    is_private: bool,
}

impl PrivateDigests {
    /// Collects the digests of all images with a name or an origin that is not in the served repositories. `read`
    /// keeps the facts for the next time.
    pub(super) fn find(
        resources: &RegistryResources,
        refs: &BTreeMap<RefName, Reference>,
        read: &mut ReadPrivate,
    ) -> Result<Self, Refused> {
        // If everything is served, nothing is private.
        if resources.repositories.iter().any(|it| it.to_string() == "**") {
            *read = ReadPrivate::default();
            return Ok(Self::default());
        }
        let store = &resources.store;
        let is_served = |name: &Repository| {
            let origin = ImageOrigin::Repository(name.clone());
            resources.repositories.iter().any(|it| it.matches(&origin))
        };
        // A pull has recorded the origin of its manifest before its first layer. If it ends during this search, its image
        // is found below.
        let pinned = store.downloads.pinned().map_err(failed)?;
        let mut images: BTreeMap<ImageId, Known> = BTreeMap::new();
        for id in store.images.ids().map_err(failed)? {
            images.insert(id, Known::default());
        }
        for (name, reference) in refs {
            let known = images.entry(reference.image).or_default();
            known.is_named = true;
            known.is_private |= repository_of(name.as_str()).is_none_or(|it| !is_served(&it.0));
            known.manifests.extend(reference.manifest);
        }
        let mut manifests = BTreeSet::new();
        let (digests, mut with_devices) = snapshot_layers(store)?;
        for (id, known) in &mut images {
            add_origins(store, id, known, &is_served)?;
            if known.is_private {
                manifests.append(&mut known.manifests);
                with_devices.insert(*id);
            }
        }
        for manifest in pinned {
            let origins = read_evidence(store, &manifest).unwrap_or_default().origins;
            if origins.is_empty() || origins.iter().any(|it| !is_served(it)) {
                manifests.insert(manifest);
            }
        }
        read.manifests.retain(|it, _| manifests.contains(it));
        let mut all = Self { digests, ..Self::default() };
        for manifest in &manifests {
            all.digests.insert(*manifest);
            add_kept_index(store, manifest, &mut all.digests)?;
            match read.manifests.get(manifest) {
                Some(digests) => all.digests.extend(digests),
                None => {
                    let (digests, is_whole) = digests_of(store, manifest)?;
                    all.digests.extend(&digests);
                    if is_whole {
                        read.manifests.insert(*manifest, digests);
                    }
                }
            }
        }
        all.add_devices(store, with_devices, &mut read.devices);
        Ok(all)
    }

    /// Adds the devices of these images. Only layers of incomplete images depend on them, so an image that cannot be
    /// read hides no others.
    fn add_devices(
        &mut self,
        store: &Store,
        images: BTreeSet<ImageId>,
        read: &mut BTreeMap<ImageId, Vec<DeviceId>>,
    ) {
        read.retain(|it, _| images.contains(it));
        for image in images {
            let found = match read.get(&image) {
                Some(devices) => Ok(devices.clone()),
                None => store.devices_of(&image),
            };
            match found {
                Ok(devices) => {
                    self.devices.extend(&devices);
                    read.insert(image, devices);
                }
                // It was removed in the meantime.
                Err(OpenImageError::Absent(_)) => {}
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::debug!(%image, error, "no layer of an incomplete image is served");
                    self.has_unknown_devices = true;
                }
            }
        }
    }

    pub(super) fn contains(&self, digest: &Digest) -> bool {
        self.digests.contains(digest)
    }

    /// Whether a device may have bytes of a private image.
    pub(super) fn may_have(&self, device: &DeviceId) -> bool {
        self.has_unknown_devices || self.devices.contains(device)
    }
}

/// Adds the recorded origins of an image.
fn add_origins(
    store: &Store,
    id: &ImageId,
    known: &mut Known,
    is_served: &dyn Fn(&Repository) -> bool,
) -> Result<(), Refused> {
    let origins = match store.downloads.origins(id) {
        Ok(origins) => origins,
        Err(OriginError::Disk(error)) => return Err(failed(error)),
        Err(error) => {
            tracing::debug!(%error, "an image with a damaged origin counts as private");
            known.is_private = true;
            return Ok(());
        }
    };
    known.add(&origins, is_served);
    // Early versions recorded origins in the evidence of the manifest.
    if origins.iter().all(|it| it.repository.is_none()) {
        let mut is_known = !origins.is_empty();
        for manifest in &known.manifests {
            let evidence = read_evidence(store, manifest).unwrap_or_default();
            is_known |= !evidence.origins.is_empty();
            known.is_private |= evidence.origins.iter().any(|name| !is_served(name));
        }
        known.is_private |= !is_known;
    }
    Ok(())
}

impl Known {
    fn add(&mut self, origins: &[Origin], is_served: &dyn Fn(&Repository) -> bool) {
        let (mut is_local, mut is_pulled) = (false, false);
        for origin in origins {
            self.manifests.extend(origin.manifest);
            match &origin.repository {
                None => is_local = true,
                Some(name) => {
                    is_pulled = true;
                    let name = Repository::from_name(name);
                    self.is_private |= name.is_none_or(|name| !is_served(&name));
                }
            }
        }
        // An image that was made here is served only if its names say so. If it also came from a registry, the
        // registry may have named it without having its bytes. A full record has lost its first origins.
        self.is_private |= is_local && (is_pulled || !self.is_named);
        self.is_private |= origins.len() >= ORIGINS_MAX;
    }
}

/// Returns the layers of container engines, whose repositories cannot be trusted, and the images of lazy ones.
fn snapshot_layers(store: &Store) -> Result<(BTreeSet<Digest>, BTreeSet<ImageId>), Refused> {
    let (snapshots, _damaged) = store.snapshots.all().map_err(failed)?;
    let images = snapshots.iter().filter_map(|it| it.record.content()?.lazy.as_ref());
    let images = images.map(|it| it.image).collect();
    let layers = snapshots.iter().filter_map(|it| match &it.record.kind {
        SnapshotKind::Active(content) => content.as_ref().map(|it| it.layer),
        SnapshotKind::Committed(content) => Some(content.layer),
        SnapshotKind::View | SnapshotKind::Directory(_) => None,
    });
    Ok((layers.collect(), images))
}

/// Adds the digests of the index that was kept with a manifest. They are not cached, because an index may be kept later.
/// A damaged index adds none: it is not served, and `quire fsck` reports it.
fn add_kept_index(
    store: &Store,
    manifest: &Digest,
    all: &mut BTreeSet<Digest>,
) -> Result<(), Refused> {
    let index = match store.downloads.kept_index(manifest) {
        Ok(Some(index)) => index,
        Ok(None) | Err(KeptIndexError::Damaged { .. }) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    all.insert(index);
    let bytes = match store.manifests.read(&index) {
        Ok(Some(bytes)) => bytes,
        Ok(None) | Err(StoredManifestError::Mismatch { .. } | StoredManifestError::Size { .. }) => {
            return Ok(());
        }
        Err(error) => return Err(failed(error)),
    };
    all.extend(blobs_of(&bytes, manifest).into_iter().flatten().map(|it| it.digest));
    Ok(())
}

/// Returns the digests of the config, the layers and the tars of a manifest, as far as the store has the documents,
/// and whether it has them.
fn digests_of(store: &Store, manifest: &Digest) -> Result<(Vec<Digest>, bool), Refused> {
    let mut digests = Vec::new();
    // The documents of a name that was removed may be gone.
    let Some(bytes) = store.manifests.read(manifest).map_err(failed)? else {
        return Ok((digests, false));
    };
    let Document::Image(found) = Document::parse(&bytes).map_err(failed)? else {
        return Ok((digests, true));
    };
    digests.push(found.config.digest);
    digests.extend(found.layers.iter().map(|it| it.digest));
    let Some(bytes) = store.manifests.read(&found.config.digest).map_err(failed)? else {
        return Ok((digests, false));
    };
    digests.extend(Config::parse(&bytes).map_err(failed)?.diff_ids());
    Ok((digests, true))
}

/// Without all private digests, nothing is served.
fn failed(error: impl std::error::Error + 'static) -> Refused {
    let error: &dyn std::error::Error = &error;
    tracing::error!(
        error,
        "no image is served, because a private one cannot be read: see `quire fsck`"
    );
    Refused::Failed
}

/// Returns the repository and the tag of a name in the store. Names without a registry were given on this host, so
/// they are in no repository.
pub(super) fn repository_of(name: &str) -> Option<(Repository, String)> {
    let reference: oci::reference::Reference = name.parse().ok()?;
    let (registry, repository) = (reference.registry(), reference.repository());
    let first = name.split_once('/')?.0;
    (first == registry).then(|| {
        (Repository::new(registry, repository), reference.tag().unwrap_or("latest").to_owned())
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::atomic::AtomicBool;

    use oci::policy::Pattern;
    use oci::source::{ImageSource, Input};
    use store::{Form, OpenOptions, Seconds, Who};
    use transfer::import::{ImportContext, ImportOptions, import};

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

    #[test]
    fn origins_decide_whether_an_image_is_private() {
        let pulled = |name: &str| Origin { manifest: None, repository: Some(name.to_owned()) };
        let local = Origin { manifest: None, repository: None };
        let is_served = |name: &Repository| name.as_str().starts_with("docker.io/public/");
        let (public, private) = (pulled("docker.io/public/a"), pulled("docker.io/corp/app"));
        for (origins, is_named, expect) in [
            (vec![public.clone()], true, false),
            (vec![private.clone()], true, true),
            (vec![public.clone(), private.clone()], true, true),
            (vec![local.clone()], true, false),
            (vec![local.clone()], false, true),
            (vec![local, public.clone()], true, true),
            (vec![pulled("nonsense")], true, true),
            (vec![public.clone(); ORIGINS_MAX], true, true),
        ] {
            let mut known = Known { is_named, ..Known::default() };
            known.add(&origins, &is_served);
            assert_eq!(known.is_private, expect, "{origins:?}, named: {is_named}");
        }
    }

    /// The index of another image can claim the device of a private one.
    #[test]
    fn devices_of_private_images_are_private() {
        if !testing::programs(&["tar"]) {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (path, tar) = (folder.path().join("store"), folder.path().join("layer.tar"));
        std::fs::write(folder.path().join("file"), [7; 9000]).unwrap();
        let arguments = ["-cf", tar.to_str().unwrap(), "file"];
        assert!(testing::trees::run("tar", &arguments, folder.path()));
        let open = || Store::open(&path, Who::this_process(), OpenOptions::create()).unwrap();
        let (store, never) = (open(), AtomicBool::new(false));
        let environment = ImportContext {
            now: Seconds(1_700_000_000),
            threads: NonZeroUsize::MIN,
            budget: 16 << 20,
            scratch: folder.path(),
            progress: &|_| {},
            cancel: &never,
        };
        let name: RefName = "docker.io/public/a:1".parse().unwrap();
        let options =
            ImportOptions { form: Form::Tar, name: Some(&name), ..ImportOptions::default() };
        let source = ImageSource::Tar(Input::File(tar));
        let image = import(&store, &source, &environment, &options).unwrap().image;
        let device = store.devices_of(&image).unwrap()[0];
        let other = image::verity::digest(image::verity::Algorithm::Sha256, b"other").into();
        let find = |pattern: &str, read: &mut ReadPrivate| {
            let resources = RegistryResources {
                store: open(),
                repositories: vec![Pattern::parse(pattern).unwrap()],
                tags: false,
                policies: Box::new(|| Err("not used".to_owned())),
            };
            let (refs, _) = resources.store.refs.readable().unwrap();
            let private = PrivateDigests::find(&resources, &refs, read).unwrap();
            [device, other].map(|it| private.may_have(&it))
        };
        let mut read = ReadPrivate::default();
        for (pattern, expect) in [
            ("docker.io/public/*", [false, false]),
            ("docker.io/other/*", [true, false]),
            ("docker.io/other/*", [true, false]),
            ("**", [false, false]),
        ] {
            assert_eq!(find(pattern, &mut read), expect, "{pattern}");
        }
        // The devices of a private image that cannot be read may be any.
        let image = path.join("images").join(image.to_string());
        std::fs::remove_file(&image).unwrap();
        std::fs::write(&image, "damaged").unwrap();
        assert_eq!(find("docker.io/other/*", &mut read), [true, true]);
        assert_eq!(find("docker.io/public/*", &mut read), [false, false]);
    }
}
