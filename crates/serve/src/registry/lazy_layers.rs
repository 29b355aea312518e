//! Layers of which the store may have only parts: lazy devices of images that came with an index (decision 34).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::lazy::Head;
use image::verity::{DeviceId, ImageId};
use store::{LazyDeviceError, Store};
use transfer::StoredImage;

use super::private::PrivateDigests;
use crate::unpoisoned::lock;

/// Time after which the index of a device is read again.
const FRESH: Duration = Duration::from_secs(30);
/// Maximum size of a part that a client can get, in bytes. Clients ask for a few MiB. All units of a part are compared
/// before its first byte is sent, so larger parts would cost a client nothing and this host much.
const PART_MAX: u64 = 16 << 20;
/// Maximum number of parts that are compared at a time, before their first byte is sent. Each takes a processor.
const COMPARING_MAX: usize = 2;
/// Time that a request waits for the comparisons of others.
pub(super) const TURN: Duration = Duration::from_secs(1);
/// Pause after which such a request looks whether its client is gone.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes that are read at a time.
const PIECE: u64 = 1 << 20;
/// Maximum bytes of indexes in memory, unless a single one is larger.
const HEADS_WEIGHT_MAX: usize = 64 << 20;
/// Maximum number of indexes in memory.
const HEADS_MAX: usize = 256;

/// A layer of an image that came with an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LazyLayer {
    /// The device whose first bytes are the tar.
    pub(super) device: DeviceId,
    /// The manifest that claims the index of the device.
    pub(super) manifest: Digest,
    pub(super) diff_id: Digest,
    pub(super) blob: Digest,
    /// Length of the tar in bytes.
    pub(super) size: u64,
    /// Manifests that are served; `None` if nothing is private.
    pub(super) public: PublicManifests,
}

/// The manifests of all images that are served, in any repository; `None` if nothing is private.
pub(super) type PublicManifests = Option<Arc<BTreeSet<Digest>>>;

impl LazyLayer {
    /// Whether the device has bytes of no image but those that are served. An image claims an index of a device before its
    /// first byte is written. So bytes that were read before this call are not those of an image that was pulled since the
    /// names of the store were read.
    fn is_public(&self, store: &Store) -> bool {
        let Some(public) = &self.public else { return true };
        let claims = store.lazy_devices.claims(&self.device).ok();
        let is_known = claims.is_some_and(|it| it.iter().all(|it| public.contains(it)));
        // A whole device may have been copied from.
        is_known && store.devices.bytes_of(&self.device).is_none()
    }
}

/// The layers of manifests that the indexes of devices describe, until when each index need not be read again. `None`
/// for an index that cannot be used.
pub(super) type KnownLazyLayers = BTreeMap<(DeviceId, Digest), (Instant, Option<LazyLayer>)>;

/// Returns the layers of an image that are in lazy devices, and that may be served. No byte of a private image can be in
/// such a device: each byte came from a registry of an image that has the device, from the blob in the store that the
/// index names, or from the same device when it was complete.
pub(super) fn lazy_layers(
    store: &Store,
    image: &ImageId,
    manifest: &Digest,
    private: &PrivateDigests,
    public: &PublicManifests,
    known: &mut KnownLazyLayers,
) -> Vec<Arc<LazyLayer>> {
    let now = Instant::now();
    known.retain(|_, it| it.0 > now);
    // A device that is complete in `data/` is not among these. Its bytes may be those of another image.
    let devices = store.lazy_devices(image).unwrap_or_else(|error| {
        let error: &dyn std::error::Error = &error;
        tracing::debug!(%manifest, error, "not serving parts of an image");
        Vec::new()
    });
    let devices = devices.into_iter().filter(|it| !private.may_have(it));
    let found = devices.filter_map(|device| {
        let read = || (now + FRESH, layer_of(store, &device, manifest));
        known.entry((device, *manifest)).or_insert_with(read).1.clone()
    });
    let found = found.filter(|it| !private.contains(&it.diff_id) && !private.contains(&it.blob));
    found.map(|it| Arc::new(LazyLayer { public: public.clone(), ..it })).collect()
}

/// Returns the layer of this manifest that a device has.
fn layer_of(store: &Store, device: &DeviceId, manifest: &Digest) -> Option<LazyLayer> {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        tracing::debug!(%manifest, error, "not serving parts of a layer");
    };
    let head = store.lazy_devices.index_head_for(device, Some(manifest));
    let head = head.inspect_err(|error| failed(error)).ok()??;
    // A device of chunks contains no tar.
    if head.kind.is_of_chunks() {
        return None;
    }
    let image = StoredImage::load(store, manifest).inspect_err(|error| failed(error)).ok()?;
    let mut layers = image.manifest.layers.iter().zip(image.config.diff_ids());
    let is_named = layers.any(|it| it.0.digest == head.blob && *it.1 == head.diff_id);
    let Head { diff_id, blob, tar_bytes: size, .. } = head;
    let (device, manifest) = (*device, *manifest);
    is_named.then_some(LazyLayer { device, manifest, diff_id, blob, size, public: None })
}

/// Indexes that were read to serve parts of layers.
#[derive(Debug, Default)]
pub(super) struct LazyHeads {
    /// The last used one is at the end.
    held: Mutex<Vec<HeldHead>>,
    /// Number of parts that are compared now.
    comparing: Mutex<usize>,
    /// Notified when a comparison ends.
    compared: Condvar,
}

/// Exists while a part is compared.
#[derive(Debug)]
pub(super) struct ComparingPart<'h>(&'h LazyHeads);

impl Drop for ComparingPart<'_> {
    fn drop(&mut self) {
        *lock(&self.0.comparing) -= 1;
        self.0.compared.notify_one();
    }
}

/// The index of a layer.
type HeldHead = (Arc<LazyLayer>, Arc<Head>);

impl LazyHeads {
    /// Waits until another part may be compared. `None` if that takes longer than `patience`, or the client is gone.
    pub(super) fn begin(
        &self,
        patience: Duration,
        is_gone: impl Fn() -> bool,
    ) -> Option<ComparingPart<'_>> {
        let begun = Instant::now();
        let mut comparing = lock(&self.comparing);
        while *comparing >= COMPARING_MAX {
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() || is_gone() {
                return None;
            }
            let waited = self.compared.wait_timeout(comparing, left.min(LOOK));
            comparing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *comparing += 1;
        Some(ComparingPart(self))
    }

    /// Opens a part of a layer's tar, after all of its units were compared with their digests. `None` if some are not in
    /// the store, or the client is gone.
    pub(super) fn open<'s>(
        &self,
        _comparing: &ComparingPart<'_>,
        store: &'s Store,
        layer: &Arc<LazyLayer>,
        part: Range<u64>,
        is_gone: impl Fn() -> bool,
    ) -> Result<Option<LazyTar<'s>>, LazyDeviceError> {
        if part.end.saturating_sub(part.start) > PART_MAX {
            return Ok(None);
        }
        let Some(head) = self.head(store, layer)? else { return Ok(None) };
        // Clients often ask for more units than the device has. No unit is read for them.
        if !store.may_have_lazy_tar_part(&head, &part)? {
            return Ok(None);
        }
        let layer = Arc::clone(layer);
        let mut tar =
            LazyTar { store, layer, head, rest: part.clone(), buffer: Vec::new(), used: 0 };
        while !tar.rest.is_empty() {
            if is_gone() || !tar.refill()? {
                return Ok(None);
            }
        }
        // The bytes are read and compared again, because all of them together may be too large for the memory.
        (tar.rest, tar.buffer, tar.used) = (part, Vec::new(), 0);
        Ok(Some(tar))
    }

    /// Returns the index of a layer, if there is still one for this layer. It is read under the lock, so that clients
    /// cannot make this process read a large one many times at once.
    fn head(
        &self,
        store: &Store,
        layer: &Arc<LazyLayer>,
    ) -> Result<Option<Arc<Head>>, LazyDeviceError> {
        let mut heads = lock(&self.held);
        if let Some(at) = heads.iter().position(|it| it.0 == *layer) {
            let found = heads.remove(at);
            let head = Arc::clone(&found.1);
            heads.push(found);
            return Ok(Some(head));
        }
        let Some(head) = store.lazy_devices.index_head_for(&layer.device, Some(&layer.manifest))?
        else {
            return Ok(None);
        };
        // Another pull of the manifest may have replaced it.
        if (head.diff_id, head.blob, head.tar_bytes) != (layer.diff_id, layer.blob, layer.size) {
            return Ok(None);
        }
        let head = Arc::new(head);
        heads.push((Arc::clone(layer), Arc::clone(&head)));
        let weight = |it: &HeldHead| size_of_val(&*it.1.units) + size_of_val(&*it.1.spans);
        let mut all: usize = heads.iter().map(weight).sum();
        while heads.len() > 1 && (heads.len() > HEADS_MAX || all > HEADS_WEIGHT_MAX) {
            all -= weight(&heads.remove(0));
        }
        Ok(Some(head))
    }
}

/// A reader of a part of a tar. All bytes are compared with the digests of their units before they are returned.
pub(super) struct LazyTar<'s> {
    store: &'s Store,
    layer: Arc<LazyLayer>,
    head: Arc<Head>,
    /// The bytes of the tar that were not read yet.
    rest: Range<u64>,
    buffer: Vec<u8>,
    /// Number of bytes of the buffer that were returned.
    used: usize,
}

impl LazyTar<'_> {
    /// Reads the next bytes. Returns `false` if some of them are missing or wrong.
    fn refill(&mut self) -> Result<bool, LazyDeviceError> {
        let Range { start, end } = self.rest;
        let behind = (start / PIECE + 1).saturating_mul(PIECE).min(end);
        let Some(bytes) = self.store.lazy_tar_part(&self.head, &(start..behind))? else {
            return Ok(false);
        };
        // This check follows the read.
        if !self.layer.is_public(self.store) {
            return Ok(false);
        }
        self.rest.start = behind;
        (self.buffer, self.used) = (bytes, 0);
        Ok(true)
    }
}

impl Read for LazyTar<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.used == self.buffer.len() && !self.rest.is_empty() {
            // Between the comparisons, the device may have been moved, removed or damaged.
            if !self.refill().map_err(io::Error::other)? {
                return Err(io::Error::other("a unit of the device is gone"));
            }
        }
        let rest = self.buffer.get(self.used..).unwrap_or_default();
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        self.used += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_parts_are_compared_at_a_time() {
        let heads = LazyHeads::default();
        let mut running: Vec<_> =
            (0..COMPARING_MAX).map(|_| heads.begin(Duration::ZERO, || false).unwrap()).collect();
        assert!(heads.begin(Duration::ZERO, || false).is_none(), "too many");
        // However long it would wait.
        assert!(heads.begin(Duration::MAX, || true).is_none(), "the client is gone");
        drop(running.pop());
        running.extend(heads.begin(Duration::ZERO, || false));
        assert_eq!(running.len(), COMPARING_MAX);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| heads.begin(Duration::MAX, || false).is_some());
            drop(running);
            assert!(waiting.join().unwrap());
        });
    }
}
