//! Ends all threads of a service when one of them ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::unpoisoned::lock;

/// How the threads of a service end.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// Whether all threads have to end.
    pub(super) end: AtomicBool,
    has_panicked: AtomicBool,
    pausing: Mutex<()>,
    /// Signalled at the end.
    ended: Condvar,
}

impl Ending {
    /// Returns a guard for a thread.
    pub(super) fn guard(&self) -> EndGuard<'_> {
        EndGuard(self)
    }

    /// Ends all threads.
    pub(super) fn begin(&self) {
        self.end.store(true, Ordering::SeqCst);
        // With this lock, a thread that has just read the flag already waits for the signal.
        let _pausing = lock(&self.pausing);
        self.ended.notify_all();
    }

    /// Pauses a thread for this time, or until the end begins.
    pub(super) fn pause(&self, time: Duration) {
        let is_running = |_: &mut ()| !self.end.load(Ordering::SeqCst);
        let paused = self.ended.wait_timeout_while(lock(&self.pausing), time, is_running);
        drop(paused.unwrap_or_else(PoisonError::into_inner));
    }

    /// Panics if a thread has panicked, so that the service does not end in an orderly way.
    pub(super) fn pass_panic_on(&self) {
        if self.has_panicked.load(Ordering::SeqCst) {
            std::panic::resume_unwind(Box::new("a thread of the service panicked"));
        }
    }
}

/// Ends all threads when it is dropped, also by a panic, so that the other threads do not run on without this one.
#[derive(Debug)]
pub(super) struct EndGuard<'e>(&'e Ending);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.has_panicked.store(true, Ordering::SeqCst);
        }
        self.0.begin();
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

    #[test]
    fn the_end_of_a_thread_ends_the_pauses_of_others() {
        let ending = Ending::default();
        ending.pause(Duration::from_millis(1));
        std::thread::scope(|scope| {
            let pausing = scope.spawn(|| ending.pause(Duration::MAX));
            drop(ending.guard());
            pausing.join().unwrap();
        });
        ending.pause(Duration::MAX);
    }
}
