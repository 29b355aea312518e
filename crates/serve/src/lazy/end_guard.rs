//! Ends all threads of a service when one of them ends.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it is dropped, also by a panic, so that the other threads do not run on without this one.
#[derive(Debug)]
pub(super) struct EndGuard<'f>(pub(super) &'f AtomicBool);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
