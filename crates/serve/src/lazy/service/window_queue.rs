//! Windows of indexes that were fetched for readers, until they are in the store.
//!
//! Storing them takes locks of the store, which `gc` or an import may hold for a while. Readers do not wait for that.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use image::digest::Digest;
use image::verity::DeviceId;

use crate::lazy::supply::Supply;
use crate::unpoisoned::lock;

/// Maximum number of indexes whose windows wait. Further windows are fetched again after the next start of the service.
const QUEUED_MAX: usize = 32;

/// Maximum size of the windows that wait, in bytes. The device's filler, which has the same windows, may end earlier.
const QUEUED_BYTES_MAX: usize = 256 << 20;

/// The windows of an index that came without them.
struct FetchedWindows {
    device: DeviceId,
    manifest: Digest,
    /// Shared with the device's filler.
    groups: Arc<Vec<u8>>,
}

/// The queue of a service.
#[derive(Default)]
pub(super) struct WindowQueue(Mutex<VecDeque<FetchedWindows>>);

impl WindowQueue {
    pub(super) fn push(&self, device: DeviceId, manifest: Digest, groups: &Arc<Vec<u8>>) {
        let mut queue = lock(&self.0);
        let bytes: usize = queue.iter().map(|it| it.groups.len()).sum();
        if queue.len() >= QUEUED_MAX || bytes.saturating_add(groups.len()) > QUEUED_BYTES_MAX {
            tracing::debug!(%device, "not keeping the windows of an index: too many are waiting");
            return;
        }
        queue.push_back(FetchedWindows { device, manifest, groups: Arc::clone(groups) });
    }

    /// Stores the windows that wait, until `end` is set.
    pub(super) fn store(&self, supply: &Supply<'_>, end: &AtomicBool) {
        while !end.load(Ordering::Relaxed) {
            // The queue is not locked while windows are stored.
            let Some(next) = lock(&self.0).pop_front() else { return };
            supply.keep_windows(&next.device, &next.manifest, &next.groups);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_bounded() {
        let queue = WindowQueue::default();
        let groups = Arc::new(vec![1]);
        let device = DeviceId::from_bytes(&[9; 32]).unwrap();
        for _ in 0..QUEUED_MAX * 2 {
            queue.push(device, Digest::sha256(b"manifest"), &groups);
        }
        assert_eq!(lock(&queue.0).len(), QUEUED_MAX);
        assert_eq!(Arc::strong_count(&groups), QUEUED_MAX + 1);
    }

    #[test]
    fn the_memory_of_the_queue_is_bounded() {
        let queue = WindowQueue::default();
        // The pages of zeroed memory that nothing touches take no memory.
        let groups = Arc::new(vec![0; QUEUED_BYTES_MAX / 3]);
        let device = DeviceId::from_bytes(&[9; 32]).unwrap();
        for _ in 0..5 {
            queue.push(device, Digest::sha256(b"manifest"), &groups);
        }
        assert_eq!(lock(&queue.0).len(), 3);
        // Smaller windows still fit.
        queue.push(device, Digest::sha256(b"manifest"), &Arc::new(vec![0; 1]));
        assert_eq!(lock(&queue.0).len(), 4);
    }
}
