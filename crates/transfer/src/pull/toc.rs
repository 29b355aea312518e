//! The tables of contents of an image's layers, and the bytes that they save.

use std::sync::Arc;

use store::Store;
use store::parallel::{self, ThreadError};

use super::parts::Parts;
use crate::chunked::{ChunkedError, Plan, Room, Toc, plans};
use image::digest::Digest;
use oci::blobs::BlobSource;
use oci::manifest::Descriptor;

/// What part of the memory for data on its way tables may take.
const SHARE: usize = 2;

/// What came of a layer's table: `None` where it has none that is of use.
pub(super) type Table<'a> = Result<Option<(Arc<Toc>, Option<Plan<'a>>)>, ChunkedError>;

/// Whether the image may have the layer that the store has. Otherwise the layer is made once more, of what a table names,
/// to see that.
pub(super) fn is_here(store: &Store, layer: &Descriptor, diff_id: &Digest) -> bool {
    matches!(store.layers.open(diff_id), Ok(Some(it)) if it.info().is_in(&layer.digest))
}

/// The tables of all layers that have one and are not here, in the layers' order, and how many bytes of memory they take.
/// All are fetched before any layer is, so that what the store knows is read once. Of a layer of which all bytes are
/// `wanted` none is skipped, but its table is of use for the layers to come.
pub(super) fn fetch<'a>(
    store: &'a Store,
    blobs: &dyn BlobSource,
    layers: &[(&Descriptor, &Digest)],
    wanted: impl Fn(&Descriptor) -> bool,
    budget: usize,
    threads: usize,
) -> Result<(Vec<Table<'a>>, usize), ThreadError> {
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
        Ok::<_, ThreadError>(Toc::fetch(layer, &Parts::new(blobs, layer), &room))
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
    let shared = plans.iter().flatten().map(Plan::shared_memory).next();
    memory += shared.unwrap_or(0) + plans.iter().flatten().map(Plan::memory).sum::<usize>();
    for ((at, toc), plan) in places.into_iter().zip(tocs).zip(plans) {
        tables[at] = Ok(Some((toc, plan)));
    }
    Ok((tables, memory))
}
