//! Before an image that came with an index is used, compares it with its layers once all of its data is downloaded.

use anyhow::{Context as _, bail};
use image::digest::Digest;
use serve::lazy::StoreBlobs;
use store::{OpenOptions, Permitted, Presence, Resolved, Store};
use transfer::import::{self, BUDGET, Completed};

use crate::args::RegistryOptions;
use crate::session::context::Context;
use crate::session::resources::JobResources;
use crate::verbs::images::registry::pull::{pauses, settings};

/// Returns the image to use: the given image, or else the image that its layers make.
pub(super) fn proven(
    context: &Context,
    store: &Store,
    image: Permitted,
    registry: &RegistryOptions,
) -> anyhow::Result<Permitted> {
    let found = image.found();
    let manifest = found.manifest.as_ref();
    // Most images are not marked as unproven. For these, the function returns early, because signals do not end the
    // wait for the store's lock below.
    if matches!(store.downloads.is_unproven_for(&found.image, manifest), Ok(false)) {
        return Ok(image);
    }
    // Opening the image will report an error of this check.
    if !matches!(store.presence_of(&found.image, manifest), Ok(Presence::Unproven)) {
        return Ok(image);
    }
    let shown = found.name.as_ref().map_or_else(|| found.image.to_string(), ToString::to_string);
    let failed = || format!("{shown} comes from an index, and cannot be compared with its layers");
    if !store.is_own() || !container::store_ownership::is_ours(store) {
        bail!("{}: the owner of the store can compare it with `quire pull {shown}`", failed());
    }
    if !context.is_quiet() {
        context.remark(&format!(
            "{shown} comes from an index, and all of its layers are now downloaded: comparing it \
            with them"
        ));
    }
    match compare(context, store, found, registry).with_context(failed)? {
        Completed::Same | Completed::NotYet => Ok(image),
        Completed::Other(right) => {
            context.remark(&format!(
                "the index of {shown} is wrong, or was made with other options: its layers make \
                image {right}, which now has its names"
            ));
            let named = match &found.name {
                Some(name) => store.refs.get(name)?.filter(|it| it.image == right),
                None => None,
            };
            let Some(named) = named else {
                bail!("image {} is not the image that its layers make", found.image)
            };
            let name = found.name.clone();
            let right = Resolved { image: right, name, manifest: named.manifest };
            crate::session::policy::permit(context, store, right)
        }
    }
}

fn compare(
    context: &Context,
    store: &Store,
    found: &Resolved,
    registry: &RegistryOptions,
) -> anyhow::Result<Completed> {
    // The store in use may be open for reading only.
    let store = Store::open(store.path(), store.who(), OpenOptions::write())?;
    let environment = JobResources::new(context, &store, BUDGET);
    let settings = settings(context.who(), registry, &environment.cancel, pauses(context))?;
    let blobs = StoreBlobs::new(&store, settings);
    environment.during(|it| -> anyhow::Result<_> {
        for manifest in manifests(&store, found) {
            // Usually the devices contain all layers, so no request is sent.
            if let Err(error) = blobs.know_layers(&found.image, &manifest) {
                let error: &dyn std::error::Error = &*error;
                tracing::debug!(%manifest, error, "cannot determine the locations of layers");
            }
        }
        // Without a manifest, the layers of each known manifest are tried.
        let blobs = blobs.for_manifest(found.manifest);
        Ok(import::prove(&store, &found.image, found.manifest.as_ref(), &blobs, it)?)
    })?
}

/// Returns the manifests whose layers the image may be compared with: its own, or any if it is used without one.
fn manifests(store: &Store, found: &Resolved) -> Vec<Digest> {
    let marked = || store.downloads.unproven(&found.image).ok().flatten().unwrap_or_default();
    found.manifest.map_or_else(|| marked().into_iter().collect(), |it| vec![it])
}
