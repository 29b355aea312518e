//! When an import stops early, and why.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::ImportError;

/// Shared by all threads of one import: each looks at it between pieces of work.
pub(super) struct Stop<'a> {
    cancel: &'a AtomicBool,
    failed: AtomicBool,
    first: Mutex<Option<ImportError>>,
}

impl<'a> Stop<'a> {
    pub(super) const fn new(cancel: &'a AtomicBool) -> Self {
        Self { cancel, failed: AtomicBool::new(false), first: Mutex::new(None) }
    }

    /// Whether there is no use in going on.
    pub(super) fn is_set(&self) -> bool {
        self.cancel.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    /// Keeps the first failure; those that follow are its consequences.
    pub(super) fn fail(&self, error: ImportError) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Makes all threads end; the panic itself is passed on where they are joined.
    pub(super) fn panicked(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// The outcome, once all threads are done.
    pub(super) fn result(&self) -> Result<(), ImportError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(ImportError::Cancelled);
        }
        match self.first.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
