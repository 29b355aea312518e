//! Runs work on several threads.

use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::operation::OperationError;

/// Returns the error of a thread that the system cannot start.
#[must_use]
pub fn thread_failed(error: io::Error) -> OperationError {
    OperationError::of("start", "a thread")(error)
}

/// Calls `work` for each number below `count`, in ascending order, on at most `threads` threads with this name.
/// Returns the results in the order of the numbers. After the first failure, no further number is started.
///
/// # Errors
/// The first error of `work`, or that of a thread that cannot be started.
///
/// # Panics
/// If `work` panics, after all threads have ended.
pub fn each<T: Send, E: Send + From<OperationError>>(
    name: &str,
    threads: usize,
    count: usize,
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    each_with(name, threads, count, || (), |(), at| work(at))
}

/// As [`each`], with a value such as a buffer, which each thread creates once and reuses.
pub(crate) fn each_with<S, T: Send, E: Send + From<OperationError>>(
    name: &str,
    threads: usize,
    count: usize,
    make: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let first: Mutex<Option<E>> = Mutex::new(None);
    let fail = |error| {
        first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        // This stops all threads.
        next.fetch_max(count, Ordering::Relaxed);
    };
    let run = || {
        let mut kept = make();
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return done;
            }
            match work(&mut kept, at) {
                Ok(result) => done.push((at, result)),
                Err(error) => fail(error),
            }
        }
    };
    let mut done = thread::scope(|scope| {
        let mut working = Vec::new();
        for _ in 0..threads.max(1).min(count) {
            match thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, run) {
                Ok(thread) => working.push(thread),
                Err(error) => fail(thread_failed(error).into()),
            }
        }
        let joined = working.into_iter().map(|it| it.join().unwrap_or_else(|it| resume_unwind(it)));
        joined.flatten().collect::<Vec<_>>()
    });
    if let Some(error) = first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    done.sort_unstable_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::{OperationError, each, each_with};

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("number {0}")]
        At(usize),
        #[error(transparent)]
        Failed(#[from] OperationError),
    }

    #[test]
    fn results_are_in_order() {
        for (threads, count) in [(0, 3), (1, 3), (3, 100), (8, 2), (4, 0)] {
            let done = each("test", threads, count, |at| Ok::<_, Failure>(at * 2)).unwrap();
            let expected: Vec<_> = (0..count).map(|at| at * 2).collect();
            assert_eq!(done, expected, "{threads} threads");
        }
    }

    #[test]
    fn all_threads_work_at_once() {
        let barrier = Barrier::new(4);
        each("test", 4, 4, |_| Ok::<_, Failure>(barrier.wait())).unwrap();
    }

    #[test]
    fn threads_keep_what_they_made() {
        let count = |seen: &mut usize, _| {
            *seen += 1;
            Ok::<_, Failure>(*seen)
        };
        assert_eq!(each_with("test", 1, 3, || 0, count).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn the_first_failure_ends_it() {
        let asked = AtomicUsize::new(0);
        let error = each("test", 1, 100, |at| {
            asked.fetch_add(1, Ordering::Relaxed);
            if at < 3 { Ok(()) } else { Err(Failure::At(at)) }
        });
        assert_eq!(error.unwrap_err().to_string(), "number 3");
        assert_eq!(asked.into_inner(), 4);
    }

    #[test]
    fn a_panic_is_passed_on_as_it_is() {
        let work = |at| if at == 1 { panic!("number {at}") } else { Ok::<_, Failure>(at) };
        let panic = catch_unwind(AssertUnwindSafe(|| each("test", 2, 4, work))).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("number 1"));
    }
}
