//! Fetches the tables of contents of an image's layers and plans which bytes need no download.

use std::sync::Arc;

use store::parallel;
use store::{OperationError, Store};

use super::parts::Parts;
use crate::chunked::{AssemblyPlan, ChunkedError, Room, Toc, plans};
use image::digest::Digest;
use oci::blobs::BlobSource;
use oci::manifest::Descriptor;

/// The tables may take this fraction of the memory budget: one part in `SHARE`.
const SHARE: usize = 2;

/// The outcome of fetching a layer's table: `None` if the layer has no usable table.
pub(super) type Table<'a> = Result<Option<(Arc<Toc>, Option<AssemblyPlan<'a>>)>, ChunkedError>;

/// Returns whether the store has the layer, made from this exact blob. If the store's layer was made from another
/// blob, the layer is made again from its table, to verify that this blob has the same diff id.
pub(super) fn is_here(store: &Store, layer: &Descriptor, diff_id: &Digest) -> bool {
    matches!(store.layers.open(diff_id), Ok(Some(it)) if it.info().is_in(&layer.digest))
}

/// Fetches the table of each layer that announces one and is not in the store. Returns the tables in the layers'
/// order, and the bytes of memory that they take. All tables are fetched before any layer, so that the store's lists
/// of chunks are read once. A layer whose blob is `wanted` whole gets no plan, but its table is recorded for later
/// layers.
pub(super) fn fetch<'a>(
    store: &'a Store,
    blobs: &dyn BlobSource,
    layers: &[(&Descriptor, &Digest)],
    wanted: impl Fn(&Descriptor) -> bool,
    budget: usize,
    threads: usize,
) -> Result<(Vec<Table<'a>>, usize), OperationError> {
    let room = Room::new(budget / SHARE);
    let announced: Vec<usize> = layers
        .iter()
        .enumerate()
        .filter(|(_, (layer, diff_id))| {
            Toc::is_announced(layer) && (wanted(layer) || !is_here(store, layer, diff_id))
        })
        .map(|(at, _)| at)
        .collect();
    let mut tables: Vec<Table<'a>> = layers.iter().map(|_| Ok(None)).collect();
    let fetched = parallel::each("table", threads, announced.len(), |at| {
        let (layer, _) = layers[announced[at]];
        Ok::<_, OperationError>(Toc::fetch(layer, &Parts::new(blobs, layer), &room))
    })?;
    let (mut tocs, mut places) = (Vec::new(), Vec::new());
    for (at, toc) in announced.into_iter().zip(fetched) {
        match toc {
            Ok(None) => {}
            Ok(Some(toc)) => {
                let toc = Arc::new(toc);
                if wanted(layers[at].0) {
                    tables[at] = Ok(Some((toc, None)));
                } else {
                    tocs.push(toc);
                    places.push(at);
                }
            }
            Err(error) => tables[at] = Err(error),
        }
    }
    let left = (budget / SHARE).saturating_sub(room.used());
    let mut memory = room.used();
    let plans = plans(store, &tocs, left);
    let shared = plans.iter().flatten().map(AssemblyPlan::shared_memory).next();
    memory += shared.unwrap_or(0) + plans.iter().flatten().map(AssemblyPlan::memory).sum::<usize>();
    for ((at, toc), plan) in places.into_iter().zip(tocs).zip(plans) {
        tables[at] = Ok(Some((toc, plan)));
    }
    Ok((tables, memory))
}
