//! Stops all threads of an import early, and keeps the cause.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::ImportError;

/// Stop flag of one import. All its threads share it, and check it between pieces of work.
pub(super) struct Stop<'a> {
    cancel: &'a AtomicBool,
    failed: AtomicBool,
    first: Mutex<Option<ImportError>>,
}

impl<'a> Stop<'a> {
    pub(super) const fn new(cancel: &'a AtomicBool) -> Self {
        Self { cancel, failed: AtomicBool::new(false), first: Mutex::new(None) }
    }

    /// Whether the import has failed or was cancelled.
    pub(super) fn is_set(&self) -> bool {
        self.cancel.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    /// Returns the flag by which the caller cancels the import.
    pub(super) const fn cancelled(&self) -> &'a AtomicBool {
        self.cancel
    }

    /// Stops the import, and keeps the first failure. Later failures are consequences of the first one.
    pub(super) fn fail(&self, error: ImportError) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Makes all threads end. The panic itself propagates where the threads are joined.
    pub(super) fn panicked(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Returns the outcome, after all threads have ended.
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
