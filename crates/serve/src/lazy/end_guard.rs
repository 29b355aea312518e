//! Ends all threads of a service when one of them ends.

use std::sync::atomic::{AtomicBool, Ordering};

/// How the threads of a service end.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// Whether all threads have to end.
    pub(super) end: AtomicBool,
    has_panicked: AtomicBool,
}

impl Ending {
    /// Returns a guard for a thread.
    pub(super) fn guard(&self) -> EndGuard<'_> {
        EndGuard { end: &self.end, has_panicked: &self.has_panicked }
    }

    /// Panics if a thread has panicked, so that the service does not end in an orderly way.
    pub(super) fn pass_panic_on(&self) {
        if self.has_panicked.load(Ordering::SeqCst) {
            std::panic::resume_unwind(Box::new("a thread of the service panicked"));
        }
    }
}

/// Sets a flag when it is dropped, also by a panic, so that the other threads do not run on without this one.
#[derive(Debug)]
pub(super) struct EndGuard<'f> {
    end: &'f AtomicBool,
    has_panicked: &'f AtomicBool,
}

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.has_panicked.store(true, Ordering::SeqCst);
        }
        self.end.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn a_panic_is_passed_on_and_an_end_is_not() {
        for panics in [false, true] {
            let ending = Ending::default();
            let ended = catch_unwind(|| {
                let _guard = ending.guard();
                assert!(!panics, "as intended");
            });
            assert_eq!(ended.is_err(), panics);
            assert!(ending.end.load(Ordering::SeqCst));
            assert_eq!(catch_unwind(|| ending.pass_panic_on()).is_err(), panics);
        }
    }
}
