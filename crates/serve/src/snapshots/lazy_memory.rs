//! What is known of images whose layers are not in the store, and which calls ask for them.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::ImageId;

/// What is known of images that are not here.
#[derive(Debug, Default)]
pub(super) struct LazyMemory {
    known: Mutex<HashMap<Digest, Known>>,
    /// Something is known of one more.
    told: Condvar,
    /// Manifests whose layers somebody brings.
    bringing: Mutex<HashSet<Digest>>,
    /// Somebody has ended that.
    brought: Condvar,
    /// Names that were given.
    pub(super) names: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
enum Known {
    /// Somebody asks for it.
    Asked,
    /// It was not to be had, at this time.
    No(Instant),
    Here(ImageId),
}

impl LazyMemory {
    fn known(&self) -> MutexGuard<'_, HashMap<Digest, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what is known of an image, or has the caller find out.
    pub(super) fn ask(&self, manifest: &Digest) -> LazyLookup<'_> {
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

    /// Has one call at a time bring the layers of an image.
    pub(super) fn bring(&self, manifest: &Digest) -> Bringing<'_> {
        let mut bringing = self.bringing();
        while !bringing.insert(*manifest) {
            bringing = self.brought.wait(bringing).unwrap_or_else(PoisonError::into_inner);
        }
        Bringing { memory: self, manifest: *manifest }
    }

    /// Forgets an image that is not here any more.
    pub(super) fn forget(&self, manifest: &Digest) {
        let mut known = self.known();
        if matches!(known.get(manifest), Some(Known::Here(_))) {
            known.remove(manifest);
        }
    }
}

pub(super) enum LazyLookup<'m> {
    Known(Option<ImageId>),
    /// Others wait for what the caller finds.
    Ask(Asking<'m>),
}

/// Tells those who wait what was found, however it ends.
pub(super) struct Asking<'m> {
    memory: &'m LazyMemory,
    manifest: Digest,
    pub(super) found: Option<ImageId>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let found = self.found.map_or_else(|| Known::No(Instant::now()), Known::Here);
        self.memory.known().insert(self.manifest, found);
        self.memory.told.notify_all();
    }
}

/// Others wait for the same image meanwhile.
pub(super) struct Bringing<'m> {
    memory: &'m LazyMemory,
    manifest: Digest,
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        self.memory.bringing().remove(&self.manifest);
        self.memory.brought.notify_all();
    }
}

/// How long a call waits for another one that asks for the same image. Then the engine brings its layers.
const WAIT: Duration = Duration::from_secs(60);

/// How long an image without an index is not asked for again: each of its layers would do so.
const AGAIN: Duration = Duration::from_secs(60);

/// Of so many images it is known whether they can be had. More are asked for again.
const KNOWN: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Others would wait for it each time.
    #[test]
    fn a_call_that_ends_without_an_answer_keeps_no_other_waiting() {
        let (memory, manifest) = (LazyMemory::default(), Digest::sha256(b"manifest"));
        let LazyLookup::Ask(asking) = memory.ask(&manifest) else { panic!() };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| matches!(memory.ask(&manifest), LazyLookup::Known(None)));
            drop(asking);
            assert!(waiting.join().unwrap());
        });
        // Of another image nothing is known.
        assert!(matches!(memory.ask(&Digest::sha256(b"other")), LazyLookup::Ask(_)));
    }
}
