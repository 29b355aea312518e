//! Fetches the data that `fsck --repair` removed from the registries of the images, and finds the container engines
//! that damage affects.

use std::collections::{BTreeMap, BTreeSet};

use image::verity::ImageId;
use store::{Digest, RefName, Reference, SnapshotKind, Store, StoredSnapshot};

use crate::session::context::Context;
use crate::session::layers;

/// Options for fetching data again. A program without registries has none.
#[cfg(feature = "registry")]
pub(crate) type Refetch = crate::args::RegistryOptions;
#[cfg(not(feature = "registry"))]
pub(crate) type Refetch = std::convert::Infallible;

/// Label with an image's name from the CRI of kubelet and containerd. Source: containerd's
/// `pkg/snapshotters/annotations.go`.
const IMAGE_NAME: &str = "containerd.io/snapshot/cri.image-ref";
/// Maximum number of listed snapshots without the name of an image.
const UNNAMED_MAX: usize = 3;

/// Images and layers of the store that container engines use.
#[derive(Debug, Default)]
pub(crate) struct EngineUses {
    images: BTreeMap<ImageId, BTreeSet<EngineUse>>,
    layers: BTreeMap<Digest, BTreeSet<EngineUse>>,
}

/// An engine's image, or one of its snapshots.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EngineUse {
    instance: String,
    /// The image's name, if the engine noted it.
    image: Option<String>,
    snapshot: String,
}

impl EngineUses {
    pub(crate) fn from_store(store: &Store) -> anyhow::Result<Self> {
        let mut uses = Self::default();
        for StoredSnapshot { instance, record, .. } in store.snapshots.all()?.0 {
            let SnapshotKind::Committed(content) = &record.kind else { continue };
            let used = EngineUse {
                instance,
                image: record.labels.get(IMAGE_NAME).cloned(),
                snapshot: record.name.clone(),
            };
            if let Some(image) = content.image {
                uses.images.entry(image).or_default().insert(used.clone());
            }
            uses.layers.entry(content.layer).or_default().insert(used);
        }
        Ok(uses)
    }

    /// Returns the engines that use an image, as text.
    pub(crate) fn of_image(&self, image: &ImageId) -> Vec<String> {
        self.images.get(image).map(texts).unwrap_or_default()
    }

    /// Returns the engines that use a layer, as text.
    pub(crate) fn of_layer(&self, layer: &Digest) -> Vec<String> {
        self.layers.get(layer).map(texts).unwrap_or_default()
    }

    /// Returns the uses whose image or layer lacks data.
    fn lost(&self, store: &Store) -> BTreeSet<&EngineUse> {
        let images = self.images.iter();
        let images =
            images.filter(|it| store.lacking(it.0).map_or(true, |lacks| !lacks.is_empty()));
        let layers = self.layers.iter();
        let layers = layers.filter(|it| !store.has_whole_layer(it.0).unwrap_or(false));
        images.flat_map(|it| it.1).chain(layers.flat_map(|it| it.1)).collect()
    }
}

/// Lists each image name once, and some of the snapshots without one.
fn texts(uses: &BTreeSet<EngineUse>) -> Vec<String> {
    let named = uses.iter().filter_map(|it| Some((&it.instance, it.image.as_deref()?)));
    let named: BTreeSet<_> = named.collect();
    let mut texts: Vec<_> =
        named.iter().map(|(instance, image)| format!("{instance}: {image}")).collect();
    let unnamed: Vec<_> = uses.iter().filter(|it| it.image.is_none()).collect();
    let some = unnamed.iter().take(UNNAMED_MAX);
    texts.extend(some.map(|it| format!("{}: snapshot {}", it.instance, it.snapshot)));
    if let Some(more @ 1..) = unnamed.len().checked_sub(UNNAMED_MAX) {
        texts.push(format!("{more} more snapshots"));
    }
    texts
}

/// Fetches the missing data of images that have a name. Prints which data is still missing, and how to restore it.
pub(crate) fn bring_back(
    context: &Context,
    store: &Store,
    registry: Option<&Refetch>,
) -> anyhow::Result<()> {
    let (refs, _) = store.refs.readable()?;
    let is_lost = |reference: &Reference| {
        !transfer::is_whole(store, &reference.image, reference.manifest.as_ref())
    };
    for (name, reference) in refs.into_iter().filter(|it| is_lost(&it.1)) {
        let origin = reference.manifest.and_then(|it| layers::origin(store, &reference.image, it));
        let Some(origin) = origin else {
            context.remark(&format!(
                "{name} lacks data, and did not come from a registry: import it again"
            ));
            continue;
        };
        // After the pull, the name may refer to an image with other devices.
        let is_whole = || store.refs.get(&name).is_ok_and(|it| it.is_some_and(|it| !is_lost(&it)));
        if fetch(context, registry, &name, &origin) && is_whole() {
            context.remark(&format!("{name} is complete again: fetched from {origin}"));
        }
    }
    for used in EngineUses::from_store(store)?.lost(store) {
        let EngineUse { instance, image, snapshot } = used;
        let what = image.as_ref().map_or_else(|| format!("snapshot {snapshot}"), Clone::clone);
        let pull = image.as_deref().unwrap_or("NAME");
        context.remark(&format!(
            "engine {instance}: {what} lacks data. Its next container reads it again if the \
            engine still has the layer; otherwise `quire pull {pull}` restores it"
        ));
    }
    store.clear_lacking()?;
    Ok(())
}

/// Pulls an image again. Only missing data is fetched.
#[cfg(feature = "registry")]
fn fetch(context: &Context, registry: Option<&Refetch>, name: &RefName, origin: &str) -> bool {
    let Some(registry) = registry else {
        tell_how(context, name, origin, None);
        return false;
    };
    match crate::verbs::images::registry::pull::pull_again(context, name, origin, registry) {
        Ok(()) => true,
        Err(error) => {
            tell_how(context, name, origin, Some(&error));
            false
        }
    }
}

#[cfg(not(feature = "registry"))]
fn fetch(context: &Context, _: Option<&Refetch>, name: &RefName, origin: &str) -> bool {
    tell_how(context, name, origin, None);
    false
}

fn tell_how(context: &Context, name: &RefName, origin: &str, why: Option<&anyhow::Error>) {
    let why = why.map_or_else(String::new, |it| format!(", and cannot be fetched now: {it:#}"));
    context.remark(&format!("{name} lacks data{why}. `quire pull {origin} {name}` restores it"));
}
