//! Threads that bring what readers wait for.
//!
//! A source that is silent holds each thread that asks it. So no device has more than some of them, and there are more as
//! long as all are at work.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

use image::verity::DeviceId;

use super::waiting::WaitingReader;

/// The most threads that bring bytes of one device. Each unit of it is fetched by one of them.
pub(super) const OF_A_DEVICE: usize = 32;
/// The most threads in all. Each has a stack, of which it uses little.
const THREADS_MAX: usize = 512;
/// When so many ask sources, each device has only [`FEW`] more.
const SOURCES_MANY: usize = 256;
const FEW: usize = 2;
/// The most threads that ask sources. The others are for bytes that are here.
const SOURCES_MAX: usize = 480;
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
    /// Devices in the order in which they are looked at, each with something that waits.
    waiting: VecDeque<(Option<DeviceId>, VecDeque<T>)>,
    at_work: HashMap<Option<DeviceId>, usize>,
    /// The threads at work that ask sources.
    asking: usize,
    threads: usize,
    idle: usize,
    is_over: bool,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        let (waiting, at_work) = (VecDeque::new(), HashMap::new());
        Self { waiting, at_work, asking: 0, threads: 0, idle: 0, is_over: false }
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
    fn push(&mut self, device: Option<DeviceId>, work: T) {
        match self.waiting.iter_mut().find(|it| it.0 == device) {
            Some((_, queue)) => queue.push_back(work),
            None => self.waiting.push_back((device, VecDeque::from([work]))),
        }
    }

    /// Whether one more thread may be at work for a device.
    fn may(&self, device: Option<DeviceId>) -> bool {
        let most = match device {
            Some(_) if self.asking >= SOURCES_MAX => 0,
            Some(_) if self.asking >= SOURCES_MANY => FEW,
            Some(_) | None => OF_A_DEVICE,
        };
        self.at_work.get(&device).copied().unwrap_or(0) < most
    }

    /// What a thread does next. Devices take turns.
    fn next(&mut self) -> Next<T> {
        let found = self.waiting.iter().position(|it| self.may(it.0));
        if let Some((device, mut queue)) = found.and_then(|at| self.waiting.remove(at))
            && let Some(work) = queue.pop_front()
        {
            if !queue.is_empty() {
                self.waiting.push_back((device, queue));
            }
            *self.at_work.entry(device).or_default() += 1;
            self.asking += usize::from(device.is_some());
            return Next::Work(device, work);
        }
        if self.is_over && self.waiting.is_empty() { Next::End } else { Next::Wait }
    }

    fn done(&mut self, device: Option<DeviceId>) {
        self.asking -= usize::from(device.is_some());
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
        self.lock().push(reader.source(), reader);
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

    /// Starts another one. If the system has none left, those that are there do the work.
    fn start_another<'s, F>(&'s self, scope: &'s Scope<'s, '_>, bring: F)
    where
        F: Fn(&WaitingReader<'a>) + Copy + Send + 's,
    {
        self.lock().threads += 1;
        let started = Builder::new().spawn_scoped(scope, move || self.work(scope, bring));
        if let Err(error) = started {
            self.lock().threads -= 1;
            tracing::warn!(%error, "readers wait longer: no thread can be started");
        }
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
                self.start_another(scope, bring);
            }
            if !reader.is_answered() {
                bring(&reader);
            }
            drop(reader);
            state = self.lock();
            state.done(device);
            if state.is_over {
                // Others may have waited for what this thread took last.
                self.changed.notify_all();
            } else if !state.waiting.is_empty() {
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
        (0..OF_A_DEVICE + 2).for_each(|it| state.push(silent, it));
        for number in 0..OF_A_DEVICE {
            assert_eq!(state.next(), Next::Work(silent, number));
        }
        assert_eq!(state.next(), Next::Wait);
        state.push(other, 100);
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
    fn many_silent_devices_leave_threads_to_others_and_to_the_disk() {
        let mut state = State::default();
        let device = |it: u8| DeviceId::from_bytes(&[it; 32]).ok();
        for number in 0..=u8::MAX {
            (0..OF_A_DEVICE).for_each(|_| state.push(device(number), ()));
        }
        while let Next::Work(..) = state.next() {}
        assert_eq!(state.asking, SOURCES_MAX);
        // Those that came when there were few threads left have some, too.
        let at_work = state.at_work.values();
        assert!(at_work.clone().all(|it| *it <= OF_A_DEVICE) && at_work.min() == Some(&1));
        state.push(None, ());
        assert_eq!(state.next(), Next::Work(None, ()));
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
