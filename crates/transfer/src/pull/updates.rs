//! Uses the index of an image to download only the missing parts of a layer, if the store has most of the layer's
//! files.

use std::collections::BTreeSet;

use image::digest::Digest;
use oci::manifest::Descriptor;
use oci::registry::{AskedHosts, Referrer, Registry, RegistryError};
use store::parallel;
use store::{OperationError, Store};

use super::toc::is_here;
use crate::chunked::{BLOB_MIN, Toc};
use crate::lazy::artifact::{LAZY_ARTIFACT, LazySubject, UpdateBlobs, update_blobs};
use crate::lazy::update::{self, UpdatePlan};

/// Maximum number of an image's indexes to inspect. Each user with push rights may push more.
const INDEXES_MAX: usize = 4;
/// The plans may take this fraction of the memory budget: one part in `SHARE`.
const SHARE: u64 = 2;

/// Returns plans for the layers most of whose files are in the store, and the number of bytes of memory that the plans
/// take. If the store has none of the layers' files or all of them, no request is made. A broken index is only logged.
pub(super) fn fetch<'a>(
    store: &'a Store,
    registry: &Registry,
    layers: &[(&Descriptor, &Digest)],
    subject: &LazySubject<'_>,
    wanted: impl Fn(&Descriptor) -> bool,
    budget: usize,
    threads: usize,
) -> Result<(Vec<Option<UpdatePlan<'a>>>, usize), OperationError> {
    let mut plans: Vec<Option<UpdatePlan<'a>>> = layers.iter().map(|_| None).collect();
    let may_have = |(layer, diff_id): &(&Descriptor, &Digest)| {
        layer.size >= BLOB_MIN
            && !Toc::is_announced(layer)
            && !wanted(layer)
            && !is_here(store, layer, diff_id)
    };
    let mut candidates: Vec<usize> =
        (0..layers.len()).filter(|at| may_have(&layers[*at])).collect();
    let has_files = || store.layers.diff_ids().is_ok_and(|it| !it.is_empty());
    if candidates.is_empty() || !has_files() {
        return Ok((plans, 0));
    }
    let Some(blobs) = find_update_blobs(registry, subject) else { return Ok((plans, 0)) };
    let room = budget as u64 / SHARE;
    let mut used = 0_u64;
    candidates.sort_by_key(|at| std::cmp::Reverse(layers[*at].0.size));
    candidates.retain(|at| {
        let Some(blobs) = blobs.get(*at).and_then(Option::as_ref) else { return false };
        let with = used.saturating_add(update::memory(blobs));
        let fits = with <= room;
        used = if fits { with } else { used };
        fits
    });
    let planned = parallel::each("update", threads, candidates.len(), |number| {
        let at = candidates[number];
        let (layer, diff_id) = layers[at];
        let Some(Some(blobs)) = blobs.get(at) else { return Ok(None) };
        let planned = update::plan(store, registry, layer, diff_id, blobs);
        Ok::<_, OperationError>(planned.unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(blob = %layer.digest, error, "downloading the whole blob");
            None
        }))
    })?;
    for (at, plan) in candidates.into_iter().zip(planned) {
        plans[at] = plan;
    }
    Ok((plans, usize::try_from(used).unwrap_or(usize::MAX)))
}

/// Returns the blobs, for each layer, of the first index that has recipes. If mirrors list only others, the registry's
/// own list counts.
fn find_update_blobs(
    registry: &Registry,
    subject: &LazySubject<'_>,
) -> Option<Vec<Option<UpdateBlobs>>> {
    let mut tried = BTreeSet::new();
    let listed = registry.referrers(subject.digest, Some(LAZY_ARTIFACT));
    usable_blobs(registry, subject, listed, &mut tried).or_else(|| {
        if !registry.has_resolving_mirrors() {
            return None;
        }
        let listed = registry.referrers_at(AskedHosts::Own, subject.digest, LAZY_ARTIFACT);
        usable_blobs(registry, subject, listed, &mut tried)
    })
}

/// Returns the blobs of the first listed index that has recipes and was not `tried`.
fn usable_blobs(
    registry: &Registry,
    subject: &LazySubject<'_>,
    listed: Result<Vec<Referrer>, RegistryError>,
    tried: &mut BTreeSet<Digest>,
) -> Option<Vec<Option<UpdateBlobs>>> {
    let unused = |error: &(dyn std::error::Error + 'static)| {
        tracing::debug!(error, "ignoring an index of the image");
    };
    let listed = listed.inspect_err(|error| unused(error)).ok()?;
    let new = listed.iter().map(|it| it.descriptor.digest);
    let new: Vec<_> = new.filter(|it| !tried.contains(it)).take(INDEXES_MAX).collect();
    for index in new {
        let fetched = registry.manifest(&index.to_string());
        let Ok(fetched) = fetched.inspect_err(|error| unused(error)) else { continue };
        let blob =
            |digest: &Digest, size| registry.range(digest, 0..size).map_err(std::io::Error::other);
        match update_blobs(&fetched.bytes, subject, blob) {
            Ok(blobs) if blobs.iter().any(Option::is_some) => return Some(blobs),
            // A manifest has the right digest, so another host would send the same.
            Ok(_) => _ = tried.insert(index),
            Err(error) => unused(&error),
        }
    }
    None
}
