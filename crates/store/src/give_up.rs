//! Whether the caller wants the work on a store to end soon.

use std::sync::OnceLock;

/// Asked while a lock is waited for, and when a transaction ends without its commit.
#[derive(Default)]
pub(crate) struct GiveUp(OnceLock<Box<dyn Fn() -> bool + Send + Sync>>);

impl GiveUp {
    /// Only the first such call counts.
    pub(crate) fn set(&self, enough: impl Fn() -> bool + Send + Sync + 'static) {
        let _first = self.0.set(Box::new(enough));
    }

    /// Whether it can ever be time.
    pub(crate) fn is_possible(&self) -> bool {
        self.0.get().is_some()
    }

    pub(crate) fn is_time(&self) -> bool {
        self.0.get().is_some_and(|enough| enough())
    }
}

impl std::fmt::Debug for GiveUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GiveUp")
    }
}
