//! Images that came with an index, before they are used: compared with their layers once nothing of them is missing.

use anyhow::{Context as _, bail};
use image::digest::Digest;
use serve::lazy::StoreBlobs;
use store::{OpenOptions, Permitted, Presence, Resolved, Store};
use transfer::import::{self, BUDGET, Completed};

use crate::args::RegistryOptions;
use crate::session::context::Context;
use crate::session::resources::Surroundings;
use crate::verbs::images::pull::{pauses, settings};

/// The image that is to be used: this one, or the one that its layers make.
pub(super) fn proven(
    context: &Context,
    store: &Store,
    image: Permitted,
    registry: &RegistryOptions,
) -> anyhow::Result<Permitted> {
    let found = image.found();
    let manifest = found.manifest.as_ref();
    // Most images have no mark. For them nobody waits for the store's lock here, which no signal ends.
    if matches!(store.downloads.is_unproven_for(&found.image, manifest), Ok(false)) {
        return Ok(image);
    }
    // What cannot be looked at is told when it is opened.
    if !matches!(store.presence_of(&found.image, manifest), Ok(Presence::Unproven)) {
        return Ok(image);
    }
    let shown = found.name.as_ref().map_or_else(|| found.image.to_string(), ToString::to_string);
    let failed = || format!("{shown} came with an index, and cannot be compared with its layers");
    if !store.is_own() || !container::store_ownership::is_ours(store) {
        bail!("{}: the owner of the store can do that, by `quire pull {shown}`", failed());
    }
    if !context.is_quiet() {
        context.remark(&format!(
            "{shown} came with an index, and the last of its layers came in another way: comparing it with them"
        ));
    }
    match compare(context, store, found, registry).with_context(failed)? {
        Completed::Same | Completed::NotYet => Ok(image),
        Completed::Other(right) => {
            context.remark(&format!(
                "the index of {shown} was wrong, or made with other options: its layers make image {right}, which has its \
                 names now"
            ));
            let named = match &found.name {
                Some(name) => store.refs.get(name)?.filter(|it| it.image == right),
                None => None,
            };
            let Some(named) = named else {
                bail!("image {} is not the one that its layers make", found.image)
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
    // The one in use may have been opened to read.
    let store = Store::open(store.path(), store.who(), OpenOptions::write())?;
    let surroundings = Surroundings::new(context, &store, BUDGET);
    let settings = settings(context.who(), registry, &surroundings.cancel, pauses(context))?;
    let blobs = StoreBlobs::new(&store, settings);
    surroundings.during(|it| -> anyhow::Result<_> {
        for manifest in manifests(&store, found) {
            // Most often all layers are in devices, and nothing is asked for.
            if let Err(error) = blobs.know_layers(&found.image, &manifest) {
                let error: &dyn std::error::Error = &*error;
                tracing::debug!(%manifest, error, "where its layers are is not known");
            }
        }
        // Without a manifest, the layers of one after the other are tried.
        let blobs = blobs.of(found.manifest);
        Ok(import::prove(&store, &found.image, found.manifest.as_ref(), &blobs, it)?)
    })?
}

/// The manifests whose layers it may be compared with: its own, or any if it is used without one.
fn manifests(store: &Store, found: &Resolved) -> Vec<Digest> {
    let marked = || store.downloads.unproven(&found.image).ok().flatten().unwrap_or_default();
    found.manifest.map_or_else(|| marked().into_iter().collect(), |it| vec![it])
}
