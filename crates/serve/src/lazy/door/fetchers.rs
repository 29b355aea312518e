//! Threads that bring what readers wait for.
//!
//! A source that is silent holds each thread that asks it. So no image has more than some of them, however many layers it
//! has, and no host has most of them. There are more threads as long as all are at work.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

use super::waiting::WaitingReader;
use crate::lazy::fill::{ImageKey, SourceKey};

/// The most threads that bring bytes of one image. Each unit of it is fetched by one of them.
pub(super) const OF_AN_IMAGE: usize = 64;
/// The most threads that ask one host. Whatever it does, as many are left to others.
const OF_A_HOST: usize = 192;
/// The most threads that read bytes that are here.
const OF_THE_DISK: usize = 32;
/// The most threads in all. Each has a stack, of which it uses little.
const THREADS_MAX: usize = 512;
/// When so many ask sources, each image has only [`FEW`] more.
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

/// What waits, by the source that it asks; without one, it only has to be read from the disk.
#[derive(Debug)]
struct State<T> {
    /// Sources in the order in which they are looked at, each with something that waits.
    waiting: VecDeque<(Option<SourceKey>, VecDeque<T>)>,
    /// The threads at work for each image; for none, those that read what is here.
    images: HashMap<Option<ImageKey>, usize>,
    hosts: HashMap<Arc<str>, usize>,
    /// The threads at work that ask sources.
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

/// What a thread does next.
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

    /// Whether one more thread may be at work for a source.
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

    /// What a thread does next. Sources take turns.
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
                // Others may have waited for what this thread took last.
                self.changed.notify_all();
            } else if !state.waiting.is_empty() {
                // What waited for a thread of this source may go on.
                self.changed.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use image::digest::Digest;

    use super::*;

    /// The source of the image with this number, at this host.
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
        // What waits is brought before the end.
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

    /// Its images take turns, and none of them reaches its own bound.
    #[test]
    fn a_host_that_is_silent_leaves_threads_to_other_hosts() {
        let mut state = State::default();
        for image in 0..OF_A_HOST {
            (0..2).for_each(|_| state.push(source(image, "silent"), ()));
        }
        while let Next::Work(..) = state.next() {}
        assert_eq!(state.asking, OF_A_HOST);
        // One whose host nobody knows is bound by its image alone.
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
        // Those that came when there were few threads left have some, too.
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
