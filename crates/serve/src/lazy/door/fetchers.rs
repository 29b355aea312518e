//! Threads that bring what readers wait for.
//!
//! A source that is silent holds each thread that asks it. So no device has more than some of them, and there are more as
//! long as all are at work.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::Duration;

use image::verity::DeviceId;

use super::waiting::WaitingReader;

/// The most threads that bring bytes of one device. Each unit of it is fetched by one of them.
pub(super) const OF_A_DEVICE: usize = 32;
/// The most threads in all. Each has a stack, of which it uses little.
const THREADS_MAX: usize = 512;
/// A thread without work ends after this, unless it is the only one.
const REST: Duration = Duration::from_secs(10);

/// Readers that wait for a thread.
#[derive(Default)]
pub(super) struct Fetchers<'a> {
    state: Mutex<State<Arc<WaitingReader<'a>>>>,
    /// Told when there is more to do, or at the end.
    changed: Condvar,
}

/// What waits, by the device whose source it asks; without one, it only has to be read from the disk.
#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<(Option<DeviceId>, T)>,
    at_work: HashMap<Option<DeviceId>, usize>,
    threads: usize,
    idle: usize,
    is_over: bool,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        let (waiting, at_work) = (VecDeque::new(), HashMap::new());
        Self { waiting, at_work, threads: 0, idle: 0, is_over: false }
    }
}

/// What a thread does next.
#[derive(Debug, PartialEq, Eq)]
enum Next<T> {
    Work(Option<DeviceId>, T),
    Wait,
    End,
}

impl<T> State<T> {
    fn next(&mut self) -> Next<T> {
        let may =
            |device: &Option<DeviceId>| self.at_work.get(device).is_none_or(|it| *it < OF_A_DEVICE);
        let found = self.waiting.iter().position(|it| may(&it.0));
        if let Some((device, work)) = found.and_then(|at| self.waiting.remove(at)) {
            *self.at_work.entry(device).or_default() += 1;
            return Next::Work(device, work);
        }
        match self.is_over && self.waiting.is_empty() {
            true => Next::End,
            false => Next::Wait,
        }
    }

    fn done(&mut self, device: Option<DeviceId>) {
        match self.at_work.get_mut(&device) {
            Some(threads @ 2..) => *threads -= 1,
            _ => drop(self.at_work.remove(&device)),
        }
    }

    /// Whether another thread is needed: there is always one without work.
    const fn is_short(&self) -> bool {
        self.idle == 0 && self.threads < THREADS_MAX && !self.is_over
    }
}

impl<'a> Fetchers<'a> {
    fn lock(&self) -> MutexGuard<'_, State<Arc<WaitingReader<'a>>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread bring what a reader waits for.
    pub(super) fn push(&self, reader: Arc<WaitingReader<'a>>) {
        self.lock().waiting.push_back((reader.source(), reader));
        self.changed.notify_one();
    }

    /// Ends the threads as soon as nothing waits.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Starts the first thread, which starts others as they are needed. Each gives `bring` what readers wait for.
    pub(super) fn start<'s, F>(&'s self, scope: &'s Scope<'s, '_>, bring: F)
    where
        F: Fn(&WaitingReader<'a>) + Copy + Send + 's,
    {
        self.lock().threads += 1;
        scope.spawn(move || self.work(scope, bring));
    }

    fn work<'s, F>(&'s self, scope: &'s Scope<'s, '_>, bring: F)
    where
        F: Fn(&WaitingReader<'a>) + Copy + Send + 's,
    {
        let mut state = self.lock();
        loop {
            let (device, reader) = match state.next() {
                Next::Work(device, reader) => (device, reader),
                Next::End => {
                    state.threads -= 1;
                    return;
                }
                Next::Wait => {
                    state.idle += 1;
                    let waited = self.changed.wait_timeout(state, REST);
                    let (after, rest) = waited.unwrap_or_else(PoisonError::into_inner);
                    state = after;
                    state.idle -= 1;
                    if rest.timed_out() && state.idle > 0 && state.waiting.is_empty() {
                        state.threads -= 1;
                        return;
                    }
                    continue;
                }
            };
            let is_short = state.is_short();
            drop(state);
            if is_short {
                self.start(scope, bring);
            }
            if !reader.is_answered() {
                bring(&reader);
            }
            drop(reader);
            state = self.lock();
            state.done(device);
            if !state.waiting.is_empty() {
                // What waited for a thread of this device may go on.
                self.changed.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_whose_source_is_silent_leaves_threads_to_others() {
        let mut state = State::default();
        let [silent, other] = [1, 2].map(|it| DeviceId::from_bytes(&[it; 32]).ok());
        state.waiting.extend((0..OF_A_DEVICE + 2).map(|it| (silent, it)));
        for number in 0..OF_A_DEVICE {
            assert_eq!(state.next(), Next::Work(silent, number));
        }
        assert_eq!(state.next(), Next::Wait);
        state.waiting.push_back((other, 100));
        assert_eq!(state.next(), Next::Work(other, 100));
        state.is_over = true;
        // What waits is brought before the end.
        assert_eq!(state.next(), Next::Wait);
        state.done(silent);
        assert_eq!(state.next(), Next::Work(silent, OF_A_DEVICE));
        state.done(silent);
        assert_eq!(state.next(), Next::Work(silent, OF_A_DEVICE + 1));
        assert_eq!(state.next(), Next::End);
        (0..OF_A_DEVICE).for_each(|_| state.done(silent));
        state.done(other);
        assert!(state.at_work.is_empty());
    }

    #[test]
    fn one_thread_is_always_free_up_to_a_bound() {
        let mut state = State::<()> { threads: 1, ..State::default() };
        assert!(state.is_short());
        state.idle = 1;
        assert!(!state.is_short());
        (state.idle, state.threads) = (0, THREADS_MAX);
        assert!(!state.is_short());
    }
}
