//! Syncs images that were published without syncs.

use store::Store;

/// Syncs images that were published without a sync, when their programs have started.
#[derive(Default)]
pub(super) struct Settler {
    /// Whether the last look found such images.
    is_waiting: bool,
    /// Whether the last attempt failed. Only the first failure is a warning.
    has_failed: bool,
}

impl Settler {
    pub(super) fn look(&mut self, store: &Store) {
        match store.has_unsynced() {
            Ok(true) if self.is_waiting => {
                self.settle(store);
                self.is_waiting = false;
            }
            Ok(is_new) => self.is_waiting = is_new,
            Err(error) => tracing::debug!(%error, "cannot look for images that are not synced"),
        }
    }

    pub(super) fn settle(&mut self, store: &Store) {
        let settled = store.settle();
        if let Err(error) = &settled {
            let error: &dyn std::error::Error = error;
            let text = "cannot sync new images: a crash removes them";
            match self.has_failed {
                true => tracing::debug!(error, "{text}"),
                false => tracing::warn!(error, "{text}"),
            }
        }
        self.has_failed = settled.is_err();
    }
}
