//! Finds blobs that contain a manifest's layers, and repositories that may have these blobs.

use std::collections::{BTreeMap, BTreeSet};

use store::{Blob, LayerInfo, Store};

use crate::evidence;
use crate::export::Compression;
use image::digest::Digest;
use oci::manifest::{Config, Descriptor, Document, Manifest};
use oci::policy::Repository;
use oci::reference::Reference;

/// Maximum number of repositories from which the registry is asked to mount one blob.
const REPOSITORIES_MAX: usize = 8;
/// Maximum number of blobs that are looked up for one layer.
const BLOBS_MAX: usize = 8;

/// Returns, for each layer of a manifest, the blobs that may represent it, the best first. Returns nothing if the
/// manifest cannot be read, because [`crate::export::plan_for`] then returns the error.
pub(super) fn blobs(store: &Store, manifest: &Digest, compression: Compression) -> Vec<Vec<Blob>> {
    let Some((layers, diff_ids)) = layers(store, manifest) else { return Vec::new() };
    let is_pulled = is_pulled(store, manifest);
    let of_layer = |(layer, diff_id): (&Descriptor, &Digest)| {
        let record = store.layers.open(diff_id).ok().flatten();
        let whole = record.as_ref().map(|it| whole_blobs(it.info())).unwrap_or_default();
        let mut all = candidates(layer, diff_id, &whole, is_pulled, compression);
        for blob in &mut all {
            let known = record.iter().flat_map(|it| &it.info().blobs);
            let pushed = known.filter(|it| it.digest == blob.digest).map(|it| &it.repositories);
            blob.repositories = pushed.flatten().cloned().collect();
        }
        all
    };
    layers.iter().zip(&diff_ids).map(of_layer).collect()
}

/// Returns the blobs that were hashed completely while this layer was read from them. A new manifest uses only these
/// blobs for the layer, because other blobs may have any content.
fn whole_blobs(layer: &LayerInfo) -> Vec<Blob> {
    layer.blobs.iter().filter(|it| it.is_hashed).cloned().collect()
}

/// Whether the manifest came from a registry, unchanged.
pub(super) fn is_pulled(store: &Store, manifest: &Digest) -> bool {
    evidence::read_evidence(store, manifest).is_ok_and(|it| !it.origins.is_empty())
}

fn candidates(
    layer: &Descriptor,
    diff_id: &Digest,
    whole: &[Blob],
    is_pulled: bool,
    compression: Compression,
) -> Vec<Blob> {
    let as_it_was = Blob {
        digest: layer.digest,
        size: layer.size,
        media_type: layer.media_type.clone(),
        is_hashed: false,
        repositories: Vec::new(),
    };
    // Pushing a pulled manifest makes only claims that its registry has also made.
    let is_sure = is_pulled
        || layer.digest == *diff_id
        || whole.iter().any(|it| (it.digest, it.size) == (layer.digest, layer.size));
    let others = whole.iter().filter(|it| it.digest != layer.digest);
    // The blob that the manifest names can be rebuilt, so using another blob would only change the manifest.
    let others = others.filter(|_| compression != Compression::AsItWas || layer.digest != *diff_id);
    let mut all: Vec<Blob> =
        is_sure.then_some(as_it_was).into_iter().chain(others.cloned()).collect();
    all.retain(|it| compression.admits(&it.media_type, it.digest == *diff_id));
    all.truncate(BLOBS_MAX);
    all
}

/// Returns the layers of a manifest and their diff ids.
fn layers(store: &Store, manifest: &Digest) -> Option<(Vec<Descriptor>, Vec<Digest>)> {
    let Manifest { config, layers } = image(store, manifest)?;
    let config = Config::parse(&store.manifests.read(&config.digest).ok()??).ok()?;
    let diff_ids = config.diff_ids_of(layers.len()).ok()?.to_vec();
    Some((layers, diff_ids))
}

fn image(store: &Store, manifest: &Digest) -> Option<Manifest> {
    match Document::parse(&store.manifests.read(manifest).ok()??).ok()? {
        Document::Image(image) => Some(image),
        Document::Index(_) => None,
    }
}

/// The repositories of one registry that had a blob, according to the store: the blob was pushed there, or an image
/// with the blob was pulled from there or is named after the repository. Damaged records are skipped, because `fsck`
/// reports them and the push only sends more bytes.
#[derive(Debug, Default)]
pub(super) struct Sources(BTreeMap<Digest, Vec<String>>);

impl Sources {
    /// Collects the repositories, except `target`'s own, that had a layer of the manifest or one of `blobs`.
    pub(super) fn known(
        store: &Store,
        manifest: &Digest,
        target: &Reference,
        blobs: &[Vec<Blob>],
    ) -> Self {
        let own = repository_of(target);
        let registry = registry_of(&own);
        let mut had: BTreeMap<Digest, BTreeSet<String>> =
            BTreeMap::from([(*manifest, BTreeSet::new())]);
        for (name, reference) in store.refs.readable().map(|(refs, _)| refs).unwrap_or_default() {
            let Some(manifest) = reference.manifest else { continue };
            let repositories = had.entry(manifest).or_default();
            let Ok(name) = name.as_str().parse::<Reference>() else { continue };
            repositories.extend(within(&repository_of(&name), registry));
        }
        let wanted = image(store, manifest).map(|it| digests(&it)).unwrap_or_default();
        let mut sources = Self::default();
        // Repositories that had exactly this blob come first.
        for blob in blobs.iter().flatten() {
            let pushed = blob.repositories.iter().filter_map(|it| parse(it));
            let paths = pushed.filter_map(|it| within(&it, registry));
            sources.add(blob.digest, paths.filter(|it| it != target.repository()));
        }
        for (manifest, mut repositories) in had {
            let Some(image) = image(store, &manifest) else { continue };
            let blobs: Vec<_> =
                digests(&image).into_iter().filter(|it| wanted.contains(it)).collect();
            if blobs.is_empty() {
                continue;
            }
            let origins =
                evidence::read_evidence(store, &manifest).map(|it| it.origins).unwrap_or_default();
            repositories.extend(origins.iter().filter_map(|it| within(it, registry)));
            repositories.remove(target.repository());
            for blob in blobs {
                sources.add(blob, repositories.iter().cloned());
            }
        }
        sources
    }

    fn add(&mut self, blob: Digest, repositories: impl IntoIterator<Item = String>) {
        let known = self.0.entry(blob).or_default();
        for repository in repositories {
            if !known.contains(&repository) {
                known.push(repository);
            }
        }
    }

    /// Returns the repositories that may have a blob, at most [`REPOSITORIES_MAX`].
    pub(super) fn repositories_for(&self, blob: &Digest) -> impl Iterator<Item = &str> {
        self.0.get(blob).into_iter().flatten().map(String::as_str).take(REPOSITORIES_MAX)
    }
}

fn digests(image: &Manifest) -> BTreeSet<Digest> {
    image.layers.iter().map(|it| it.digest).collect()
}

/// Returns the repository in a reference.
pub(super) fn repository_of(reference: &Reference) -> Repository {
    Repository::new(reference.registry(), reference.repository())
}

/// Parses a repository's name in a record. Returns `None` if the name is not valid.
fn parse(name: &str) -> Option<Repository> {
    let reference: Reference = name.parse().ok()?;
    let repository = repository_of(&reference);
    (repository.as_str() == name).then_some(repository)
}

fn registry_of(repository: &Repository) -> &str {
    repository.as_str().split_once('/').map_or("", |(registry, _)| registry)
}

/// Returns the path of a repository, if the repository belongs to this registry.
fn within(repository: &Repository, registry: &str) -> Option<String> {
    let (host, path) = repository.as_str().split_once('/')?;
    (host == registry).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

    fn blob(text: &str, media_type: &str) -> Blob {
        let digest = Digest::sha256(text.as_bytes());
        Blob {
            digest,
            size: text.len() as u64,
            media_type: media_type.to_owned(),
            is_hashed: true,
            repositories: Vec::new(),
        }
    }

    /// Checks which of `a`, `b` (both gzip) and `tar` may represent a layer that the manifest calls `named`.
    fn check(
        named: &str,
        whole: &[&str],
        is_pulled: bool,
        compression: Compression,
        expect: &[&str],
    ) {
        let of = |name: &str| blob(name, if name == "tar" { TAR } else { GZIP });
        let named = of(named);
        let layer = Descriptor {
            media_type: named.media_type.clone(),
            digest: named.digest,
            size: named.size,
            annotations: BTreeMap::new(),
            urls: Vec::new(),
            platform: None,
        };
        let whole: Vec<_> = whole.iter().map(|it| of(it)).collect();
        let diff_id = of("tar").digest;
        let found = candidates(&layer, &diff_id, &whole, is_pulled, compression);
        let found: Vec<_> = found.into_iter().map(|it| (it.digest, it.media_type)).collect();
        let expect = expect.iter().map(|it| of(it)).map(|it| (it.digest, it.media_type));
        assert_eq!(found, expect.collect::<Vec<_>>());
    }

    #[test]
    fn only_whole_blobs_stand_for_a_layer() {
        use Compression::{AsItWas, Gzip, None, Usual, Zstd};
        check("a", &["a"], false, Usual, &["a"]);
        check("a", &["a", "b"], false, Usual, &["a", "b"]);
        check("a", &["b"], false, Usual, &["b"]);
        check("a", &[], false, Usual, &[]);
        check("a", &[], true, Usual, &["a"]);
        // The tar's digest equals the diff id, so the blob has exactly the layer's bytes.
        check("tar", &[], false, Usual, &["tar"]);
        check("tar", &["tar", "b"], false, Usual, &["tar", "b"]);
        check("tar", &["tar", "b"], false, AsItWas, &["tar"]);
        check("a", &["a", "b"], false, AsItWas, &["a", "b"]);
        check("tar", &["tar", "b"], false, Gzip, &["b"]);
        check("a", &["a", "tar"], false, None, &["tar"]);
        check("a", &["a", "tar"], true, Zstd, &[]);
    }

    #[test]
    fn a_record_names_repositories_or_nothing() {
        let check = |name: &str, expect: Option<&str>| {
            let found = parse(name).and_then(|it| within(&it, "localhost:5000"));
            assert_eq!(found.as_deref(), expect, "{name}");
        };
        check("localhost:5000/team/app", Some("team/app"));
        check("localhost:5001/team/app", None);
        for wrong in [
            "",
            "/",
            "app",
            "team/app:1",
            "team/app@sha256:0",
            "../app",
            "a b",
            "a&mount=b",
            "a:pull b",
        ] {
            check(&format!("localhost:5000/{wrong}"), (wrong == "app").then_some("app"));
            check(wrong, None);
        }
    }
}
