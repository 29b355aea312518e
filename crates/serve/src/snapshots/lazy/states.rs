//! Remembers the states of images whose layers are not in the store, and the calls that are finding them out.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::ImageId;

/// The known states of images without their layers.
#[derive(Debug, Default)]
pub(in crate::snapshots) struct LazyMemory {
    known: Mutex<HashMap<Digest, Known>>,
    /// Signalled when the state of an image is known.
    told: Condvar,
    /// Manifests whose layers are being downloaded.
    bringing: Mutex<HashSet<Digest>>,
    /// Signalled when such a download ends.
    brought: Condvar,
    /// Number of temporary names that were used.
    pub(in crate::snapshots) names: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
enum Known {
    /// Another call is requesting the image.
    Asked,
    /// The request failed at this time.
    No(Instant),
    Here(ImageId),
}

impl LazyMemory {
    fn known(&self) -> MutexGuard<'_, HashMap<Digest, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the known state of an image. If it is unknown, the caller must find it out.
    pub(in crate::snapshots) fn ask(&self, manifest: &Digest) -> LazyLookup<'_> {
        let begun = Instant::now();
        let mut known = self.known();
        loop {
            match known.get(manifest) {
                Some(Known::Here(image)) => return LazyLookup::Known(Some(*image)),
                Some(Known::No(when)) if when.elapsed() < AGAIN => return LazyLookup::Known(None),
                Some(Known::Asked) => {
                    let Some(left) = WAIT.checked_sub(begun.elapsed()) else {
                        return LazyLookup::Known(None);
                    };
                    let waited = self.told.wait_timeout(known, left);
                    known = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                Some(Known::No(_)) | None => break,
            }
        }
        if known.len() >= KNOWN {
            known.retain(|_, it| matches!(it, Known::Asked));
        }
        known.insert(*manifest, Known::Asked);
        LazyLookup::Ask(Asking { memory: self, manifest: *manifest, found: None })
    }

    fn bringing(&self) -> MutexGuard<'_, HashSet<Digest>> {
        self.bringing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other call downloads the layers of this image.
    pub(in crate::snapshots) fn bring(&self, manifest: &Digest) -> Bringing<'_> {
        let mut bringing = self.bringing();
        while !bringing.insert(*manifest) {
            bringing = self.brought.wait(bringing).unwrap_or_else(PoisonError::into_inner);
        }
        Bringing { memory: self, manifest: *manifest }
    }

    /// Forgets an image that is no longer in the store.
    pub(in crate::snapshots) fn forget(&self, manifest: &Digest) {
        let mut known = self.known();
        if matches!(known.get(manifest), Some(Known::Here(_))) {
            known.remove(manifest);
        }
    }
}

pub(in crate::snapshots) enum LazyLookup<'m> {
    Known(Option<ImageId>),
    /// The caller must find out the state; other calls wait for the result.
    Ask(Asking<'m>),
}

/// Publishes the result when it is dropped, even after a panic.
pub(in crate::snapshots) struct Asking<'m> {
    memory: &'m LazyMemory,
    manifest: Digest,
    pub(in crate::snapshots) found: Option<ImageId>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let found = self.found.map_or_else(|| Known::No(Instant::now()), Known::Here);
        self.memory.known().insert(self.manifest, found);
        self.memory.told.notify_all();
    }
}

/// Lets the next call for the same image continue when it is dropped.
pub(in crate::snapshots) struct Bringing<'m> {
    memory: &'m LazyMemory,
    manifest: Digest,
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        self.memory.bringing().remove(&self.manifest);
        self.memory.brought.notify_all();
    }
}

/// How long a call waits for another call that requests the same image. After that, the engine downloads its layers.
const WAIT: Duration = Duration::from_secs(60);

/// How long an image without an index is not requested again, because each of its layers would cause a request.
const AGAIN: Duration = Duration::from_secs(60);

/// Largest number of images whose state is remembered. The states of further images are not remembered.
const KNOWN: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// A call that panics must not block others, which would otherwise wait for their whole timeout.
    #[test]
    fn a_call_that_ends_without_an_answer_keeps_no_other_waiting() {
        let (memory, manifest) = (LazyMemory::default(), Digest::sha256(b"manifest"));
        let LazyLookup::Ask(asking) = memory.ask(&manifest) else { panic!() };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| matches!(memory.ask(&manifest), LazyLookup::Known(None)));
            drop(asking);
            assert!(waiting.join().unwrap());
        });
        // The state of another image is not known.
        assert!(matches!(memory.ask(&Digest::sha256(b"other")), LazyLookup::Ask(_)));
    }
}
