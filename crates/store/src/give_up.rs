//! A condition under which the caller wants work on a store to end early.

use std::sync::OnceLock;

/// The condition, checked while waiting for a lock and when a transaction ends without its commit.
#[derive(Default)]
pub(crate) struct GiveUp(OnceLock<Box<dyn Fn() -> bool + Send + Sync>>);

impl GiveUp {
    /// Sets the condition. Only the first call has an effect.
    pub(crate) fn set(&self, enough: impl Fn() -> bool + Send + Sync + 'static) {
        let _first = self.0.set(Box::new(enough));
    }

    /// Whether a condition is set.
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
