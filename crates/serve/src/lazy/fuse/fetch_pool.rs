//! Threads that fetch the bytes that readers wait for.
//!
//! A source that does not respond blocks each thread that sends it a request. So the number of threads is limited for
//! each image, regardless of the number of its layers, and for each host. Threads are added while all threads are
//! busy.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

use super::waiting::WaitingReader;
use crate::lazy::fill::{ImageKey, SourceKey};

/// Largest number of threads that fetch bytes of one image. Each fetches other units.
pub(super) const OF_AN_IMAGE: usize = 64;
/// Largest number of threads for one host. This leaves more than as many threads for other hosts if the host is slow.
const OF_A_HOST: usize = 192;
/// Largest number of threads that read bytes that are already downloaded.
const OF_THE_DISK: usize = 32;
/// Largest number of all threads. Each thread uses only a small part of its stack.
const THREADS_MAX: usize = 512;
/// When this many threads ask sources, each image gets only [`FEW`].
const SOURCES_MANY: usize = 256;
const FEW: usize = 2;
/// Largest number of threads that send requests to sources. The other threads handle downloaded bytes.
const SOURCES_MAX: usize = 480;
/// How long a thread without work stays, unless it is the only idle one.
const REST: Duration = Duration::from_secs(10);

/// A queue of readers, and the threads that serve them.
#[derive(Default)]
pub(super) struct FetchPool<'a> {
    state: Mutex<State<Arc<WaitingReader<'a>>>>,
    /// Signalled when work is added, and at the end.
    changed: Condvar,
}

/// Waiting work, by the source that it needs. Work without a source only reads the disk.
#[derive(Debug)]
struct State<T> {
    /// Sources in the order in which they get threads, each with its non-empty queue.
    waiting: VecDeque<(Option<SourceKey>, VecDeque<T>)>,
    /// Number of busy threads for each image; under `None`, those that read the disk.
    images: HashMap<Option<ImageKey>, usize>,
    hosts: HashMap<Arc<str>, usize>,
    /// Number of busy threads that ask sources.
    asking: usize,
    threads: usize,
    idle: usize,
    is_over: bool,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        let (images, hosts) = (HashMap::new(), HashMap::new());
        let waiting = VecDeque::new();
        Self { waiting, images, hosts, asking: 0, threads: 0, idle: 0, is_over: false }
    }
}

/// The next step of a thread.
#[derive(Debug, PartialEq, Eq)]
enum Next<T> {
    Work(Option<SourceKey>, T),
    Wait,
    End,
}

impl<T> State<T> {
    fn push(&mut self, source: Option<SourceKey>, work: T) {
        match self.waiting.iter_mut().find(|it| it.0 == source) {
            Some((_, queue)) => queue.push_back(work),
            None => self.waiting.push_back((source, VecDeque::from([work]))),
        }
    }

    /// Returns whether one more thread may work for a source.
    fn may(&self, source: Option<&SourceKey>) -> bool {
        let most = match source {
            Some(_) if self.asking >= SOURCES_MAX => 0,
            Some(_) if self.asking >= SOURCES_MANY => FEW,
            Some(_) => OF_AN_IMAGE,
            None => OF_THE_DISK,
        };
        let image = source.map(|it| it.image);
        let of_host = |host: &Arc<str>| self.hosts.get(host).copied().unwrap_or(0) < OF_A_HOST;
        self.images.get(&image).copied().unwrap_or(0) < most
            && source.and_then(|it| it.host.as_ref()).is_none_or(of_host)
    }

    /// Returns the next step of a thread. Sources take turns.
    fn next(&mut self) -> Next<T> {
        let found = self.waiting.iter().position(|it| self.may(it.0.as_ref()));
        if let Some((source, mut queue)) = found.and_then(|at| self.waiting.remove(at))
            && let Some(work) = queue.pop_front()
        {
            if !queue.is_empty() {
                self.waiting.push_back((source.clone(), queue));
            }
            *self.images.entry(source.as_ref().map(|it| it.image)).or_default() += 1;
            if let Some(host) = source.as_ref().and_then(|it| it.host.clone()) {
                *self.hosts.entry(host).or_default() += 1;
            }
            self.asking += usize::from(source.is_some());
            return Next::Work(source, work);
        }
        if self.is_over && self.waiting.is_empty() { Next::End } else { Next::Wait }
    }

    fn done(&mut self, source: Option<&SourceKey>) {
        self.asking -= usize::from(source.is_some());
        let image = source.map(|it| it.image);
        match self.images.get_mut(&image) {
            Some(threads @ 2..) => *threads -= 1,
            _ => drop(self.images.remove(&image)),
        }
        let Some(host) = source.and_then(|it| it.host.as_ref()) else { return };
        match self.hosts.get_mut(host) {
            Some(threads @ 2..) => *threads -= 1,
            _ => drop(self.hosts.remove(host)),
        }
    }

    /// Returns whether another thread is needed, so that one is always idle.
    const fn is_short(&self) -> bool {
        self.idle == 0 && self.threads < THREADS_MAX && !self.is_over
    }
}

impl<'a> FetchPool<'a> {
    fn lock(&self) -> MutexGuard<'_, State<Arc<WaitingReader<'a>>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a reader for a thread.
    pub(super) fn push(&self, reader: Arc<WaitingReader<'a>>) {
        self.lock().push(reader.source(), reader);
        self.changed.notify_one();
    }

    /// Ends the threads when the queue is empty.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Starts the first thread, which starts others as needed. They call `bring` for each reader.
    pub(super) fn start<'s, F>(&'s self, scope: &'s Scope<'s, '_>, bring: F)
    where
        F: Fn(&WaitingReader<'a>) + Copy + Send + 's,
    {
        self.lock().threads += 1;
        scope.spawn(move || self.work(scope, bring));
    }

    /// Starts another thread. If that fails, the existing ones do the work.
    fn start_another<'s, F>(&'s self, scope: &'s Scope<'s, '_>, bring: F)
    where
        F: Fn(&WaitingReader<'a>) + Copy + Send + 's,
    {
        self.lock().threads += 1;
        let started = Builder::new().spawn_scoped(scope, move || self.work(scope, bring));
        if let Err(error) = started {
            self.lock().threads -= 1;
            tracing::warn!(%error, "cannot start another thread, so readers wait longer");
        }
    }

    fn work<'s, F>(&'s self, scope: &'s Scope<'s, '_>, bring: F)
    where
        F: Fn(&WaitingReader<'a>) + Copy + Send + 's,
    {
        let mut state = self.lock();
        loop {
            let (source, reader) = match state.next() {
                Next::Work(source, reader) => (source, reader),
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
            state.done(source.as_ref());
            if state.is_over {
                // Other threads may have waited for this last one to finish.
                self.changed.notify_all();
            } else if !state.waiting.is_empty() {
                // Work that waited for a free thread of this source can start now.
                self.changed.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use image::digest::Digest;

    use super::*;

    /// The source of the image with this number, at a host.
    fn source(image: usize, host: &str) -> Option<SourceKey> {
        let image = ImageKey::Manifest(Digest::sha256(&image.to_le_bytes()));
        Some(SourceKey { image, host: (!host.is_empty()).then(|| host.into()) })
    }

    #[test]
    fn an_image_whose_source_is_silent_leaves_threads_to_others() {
        let mut state = State::default();
        let [silent, other] = [1, 2].map(|it| source(it, "host"));
        (0..OF_AN_IMAGE + 2).for_each(|it| state.push(silent.clone(), it));
        for number in 0..OF_AN_IMAGE {
            assert_eq!(state.next(), Next::Work(silent.clone(), number));
        }
        assert_eq!(state.next(), Next::Wait);
        state.push(other.clone(), 100);
        assert_eq!(state.next(), Next::Work(other.clone(), 100));
        state.is_over = true;
        // The remaining work is done before the end.
        assert_eq!(state.next(), Next::Wait);
        state.done(silent.as_ref());
        assert_eq!(state.next(), Next::Work(silent.clone(), OF_AN_IMAGE));
        state.done(silent.as_ref());
        assert_eq!(state.next(), Next::Work(silent.clone(), OF_AN_IMAGE + 1));
        assert_eq!(state.next(), Next::End);
        (0..OF_AN_IMAGE).for_each(|_| state.done(silent.as_ref()));
        state.done(other.as_ref());
        assert!(state.images.is_empty() && state.hosts.is_empty());
    }

    /// Images of one host take turns, and the limit for the host applies before the limit for an image.
    #[test]
    fn a_host_that_is_silent_leaves_threads_to_other_hosts() {
        let mut state = State::default();
        for image in 0..OF_A_HOST {
            (0..2).for_each(|_| state.push(source(image, "silent"), ()));
        }
        while let Next::Work(..) = state.next() {}
        assert_eq!(state.asking, OF_A_HOST);
        // A source without a known host is limited only by its image.
        for other in [source(1000, "other"), source(1001, ""), None] {
            state.push(other.clone(), ());
            assert_eq!(state.next(), Next::Work(other, ()));
        }
        state.done(source(0, "silent").as_ref());
        assert!(
            matches!(state.next(), Next::Work(Some(it), ()) if it.host.as_deref() == Some("silent"))
        );
    }

    #[test]
    fn many_silent_images_leave_threads_to_others_and_to_the_disk() {
        let mut state = State::default();
        for number in 0..256 {
            (0..OF_AN_IMAGE).for_each(|_| state.push(source(number, &number.to_string()), ()));
        }
        while let Next::Work(..) = state.next() {}
        assert_eq!(state.asking, SOURCES_MAX);
        // Images whose readers came when few threads were left got some threads as well.
        let at_work = state.images.values();
        assert!(at_work.clone().all(|it| *it <= OF_AN_IMAGE) && at_work.min() == Some(&1));
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
