//! Prefetches bytes, with less priority than those that readers wait for.

pub(super) mod files;
pub(super) mod plans;
pub(super) mod readahead;
pub(super) mod start_recorder;
pub(super) mod trace_recorder;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, DefaultHasher, Hash as _, Hasher as _, RandomState};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use plans::{TracePlan, TraceUnits};

use super::fill::{Cause, Completing, FillError, LayerFiller, PartOutcome};

/// Number of prefetch requests that run at the same time.
pub(super) const WORKERS: usize = 24;
/// Largest number of them for one image, because its source may not respond.
const OF_AN_IMAGE: usize = 16;
/// Largest number of waiting parts. With sources that do not respond, the queues would grow without end.
const WAITING_MAX: usize = 1 << 16;
/// Number of threads that complete devices, which is also the largest number of their requests at the same time. The
/// threads have a low priority, and few requests take little of a line's bandwidth from a reader's request.
pub(super) const COMPLETERS: usize = 4;
/// Largest number of requests for complete devices while a reader's request runs and soon after it.
const COMPLETERS_BESIDE_READERS: usize = 1;
/// How long after a reader's request the next one is expected.
const SOON: Duration = Duration::from_millis(50);
/// Largest number of requests for traces that run while a reader waits for a request.
const BESIDE_READERS: usize = 2;
/// Nice value of the threads that complete devices.
const NICE: i32 = 19;
/// Pause of completing devices after a failure. It doubles with each further failure.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Completing a device is given up after this many failures in a row, which take about ten minutes.
const FAILURES_MAX: u32 = 24;

/// Number of neighbouring parts of a completion that are fetched one after the other, if there may be peers: about 4 MiB
/// of a blob.
const GROUP: usize = 4;
/// How often a part of a completion is put off for peers.
const PUT_OFF_MAX: u8 = 2;
/// Time for which a part is put off, so that a peer can fetch it.
const PUT_OFF: Duration = Duration::from_millis(200);

/// Spans of a device's blob that should be prefetched. The device may be released before that.
#[derive(Debug, Clone)]
struct AheadPart<'a> {
    filler: Weak<LayerFiller<'a>>,
    /// Hash of the image that the spans are for: layers of one image are at the same registry.
    image: u64,
    spans: Range<usize>,
    cause: Cause,
    /// How often the part was put off, because a peer probably fetches it.
    put_off: u8,
    /// Until when it was put off. Other parts do not wait for it.
    later: Option<Instant>,
}

impl<'a> AheadPart<'a> {
    fn new(filler: &Arc<LayerFiller<'a>>, spans: Range<usize>, cause: Cause) -> Self {
        let mut hasher = DefaultHasher::new();
        filler.key().image.hash(&mut hasher);
        let image = hasher.finish();
        Self { filler: Arc::downgrade(filler), image, spans, cause, put_off: 0, later: None }
    }

    /// Whether this part is not put off.
    fn is_ready(&self, now: Instant) -> bool {
        self.later.is_none_or(|it| it <= now)
    }

    /// Whether this part is behind another one in the same device.
    fn follows(&self, before: &Self) -> bool {
        self.spans.start == before.spans.end && self.filler.ptr_eq(&before.filler)
    }
}

/// An empty range of spans. A part with it makes a worker find the device's files.
const NO_SPANS: Range<usize> = 0..0;

/// Adds parts up to [`WAITING_MAX`]. The bytes of the others are fetched when they are read.
fn add<T>(waiting: &mut VecDeque<T>, parts: impl IntoIterator<Item = T>) {
    let room = WAITING_MAX.saturating_sub(waiting.len());
    waiting.extend(parts.into_iter().take(room));
}

/// The prefetch queues.
#[derive(Debug, Default)]
pub(super) struct Ahead<'a> {
    state: Mutex<State<'a>>,
    /// Signalled when parts are added, when more requests are allowed, and at the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State<'a> {
    /// Frames of hot packs.
    hot: VecDeque<(Weak<LayerFiller<'a>>, usize)>,
    /// Devices whose windows are fetched before they become complete.
    windows: VecDeque<Weak<LayerFiller<'a>>>,
    /// Number of windows that are being fetched.
    windows_coming: usize,
    /// Traces whose parts have to be found.
    plans: VecDeque<TracePlan<'a>>,
    /// Parts for sequential readers.
    streams: VecDeque<AheadPart<'a>>,
    /// Parts of traces.
    traces: VecDeque<AheadPart<'a>>,
    /// Parts of devices that should become complete.
    completions: VecDeque<AheadPart<'a>>,
    /// Number of running requests, by the hash of their image.
    under_way: HashMap<u64, usize>,
    /// Number of those for `traces`.
    behind: usize,
    /// Number of those for `completions`.
    completing: usize,
    /// End of the pause of `completions`.
    pause: Option<Instant>,
    /// Number of failures of `completions` since the last success.
    failures: u32,
    /// Whether the disk was full at the last failure of `completions`.
    has_no_room: bool,
    /// Number of running requests for readers.
    readers: usize,
    /// When the last request for a reader ended.
    read: Option<Instant>,
    is_over: bool,
}

/// Exists while a reader's request runs.
#[derive(Debug)]
pub(super) struct First<'q, 'a>(&'q Ahead<'a>);

impl Drop for First<'_, '_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.readers -= 1;
        state.read = Some(Instant::now());
        drop(state);
        self.0.changed.notify_all();
    }
}

impl<'a> Ahead<'a> {
    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives readers precedence over traces and completions as long as the returned value exists, and over completions
    /// a little longer.
    pub(super) fn behind_reader(&self) -> First<'_, 'a> {
        self.lock().readers += 1;
        First(self)
    }

    /// Adds spans that a reader will need soon.
    pub(super) fn soon(&self, filler: &Arc<LayerFiller<'a>>, spans: Vec<Range<usize>>) {
        let unknown = filler.files().begin().then_some(NO_SPANS);
        let pieces =
            spans.into_iter().flat_map(|it| readahead::in_pieces(it, |it| filler.cost(it)));
        let made: Vec<_> = unknown.into_iter().chain(pieces).collect();
        if made.is_empty() {
            return;
        }
        let piece = |spans| AheadPart::new(filler, spans, Cause::Stream);
        add(&mut self.lock().streams, made.into_iter().map(piece));
        self.changed.notify_all();
    }

    /// Adds frames of a hot pack, with the priority of readers, because loading them needs no source.
    pub(super) fn load(&self, frames: Vec<(Arc<LayerFiller<'a>>, usize)>) {
        let mut state = self.lock();
        let frames = frames.into_iter().map(|(filler, frame)| (Arc::downgrade(&filler), frame));
        add(&mut state.hot, frames);
        drop(state);
        self.changed.notify_all();
    }

    /// Adds the units of a trace, in the order of the trace.
    pub(super) fn trace(&self, runs: TraceUnits<'a>) {
        let mut fillers: Vec<Arc<LayerFiller<'a>>> = Vec::new();
        let mut placed = Vec::new();
        for (filler, units) in runs {
            let place = fillers.iter().position(|it| Arc::ptr_eq(it, &filler));
            let place = place.unwrap_or_else(|| {
                fillers.push(filler);
                fillers.len() - 1
            });
            placed.push((place, fillers[place].spans_of(&units)));
        }
        let made = readahead::requests(placed, |(place, spans)| fillers[*place].cost(spans));
        let piece = |(place, spans): readahead::SpanRun| {
            AheadPart::new(&fillers[place], spans, Cause::Trace)
        };
        add(&mut self.lock().traces, made.into_iter().map(piece));
        self.changed.notify_all();
    }

    /// Adds the units of a trace that `find` returns. It is called by a thread that prefetches.
    pub(super) fn trace_later(&self, find: impl FnOnce() -> TraceUnits<'a> + Send + 'a) {
        TracePlan::add(&mut self.lock().plans, find);
        self.changed.notify_all();
    }

    /// Queues all units of a device again, unless some of its units are queued.
    pub(super) fn complete_rest(&self, filler: &Arc<LayerFiller<'a>>) {
        let wanted = Arc::downgrade(filler);
        let is_waiting = self.lock().completions.iter().any(|it| it.filler.ptr_eq(&wanted));
        if is_waiting {
            self.changed.notify_all();
        } else {
            self.add_all(filler);
        }
    }

    /// Ends the pause after failures of completions. It is called for each request for a completion, because the cause
    /// of the failures may be gone by then.
    pub(super) fn forget_failures(&self) {
        let mut state = self.lock();
        (state.pause, state.failures) = (None, 0);
    }

    fn add_all(&self, filler: &Arc<LayerFiller<'a>>) {
        let spans = 0..filler.index().head.spans.len();
        let made = readahead::in_pieces(spans, |it| filler.cost(it));
        let piece = |spans| AheadPart::new(filler, spans, Cause::Completion);
        let with_peers = filler.may_have_peers();
        let mut state = self.lock();
        if !filler.has_windows() {
            // Readers may need the windows as well, so no thread of low priority fetches them.
            state.windows.push_back(Arc::downgrade(filler));
        }
        state.completions.extend(made.into_iter().map(piece));
        if with_peers {
            // Hosts that complete the same image at the same time exchange what they have.
            state.completions = shuffled(std::mem::take(&mut state.completions));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends [`work`](Self::work) when the running requests are done.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Fetches parts of devices that should become complete, until the end, with a low priority of the thread.
    pub(super) fn complete_devices(&self) {
        // Source: setpriority(2): on Linux, this changes only the calling thread. The priority for the disk stays, because
        // readers may wait for a lock of a unit.
        if let Err(error) = rustix::process::setpriority_process(None, NICE) {
            tracing::debug!(%error, "devices are completed with the usual priority");
        }
        let mut state = self.lock();
        while !state.is_over {
            let now = Instant::now();
            match state.next_completion(now) {
                Some(part) => {
                    drop(state);
                    state = self.fetch(&part);
                }
                None => state = self.wait(state, now),
            }
        }
    }

    /// Fetches all other parts until the end.
    pub(super) fn work(&self) {
        let mut state = self.lock();
        loop {
            if state.is_over {
                return;
            }
            if let Some((filler, frame)) = state.hot.pop_front() {
                drop(state);
                let filler = filler.upgrade();
                let load = || filler.inspect(|it| it.load_hot_frame(frame));
                // After a panic, a reader of the blocks fetches their units.
                let _loaded = catch_unwind(AssertUnwindSafe(load)).ok();
                state = self.lock();
                if state.hot.is_empty() {
                    // Completions wait for the frames.
                    self.changed.notify_all();
                }
                continue;
            }
            if let Some(filler) = state.windows.pop_front() {
                state.windows_coming += 1;
                drop(state);
                let fetch = || filler.upgrade().map(|it| it.fetch_windows_now());
                // After a failure, the first part of the device reports the error.
                let _fetched = catch_unwind(AssertUnwindSafe(fetch)).ok();
                state = self.lock();
                state.windows_coming -= 1;
                self.changed.notify_all();
                continue;
            }
            if let Some(plan) = state.plans.pop_front() {
                drop(state);
                // After a panic, the bytes are fetched when they are read.
                let found = catch_unwind(AssertUnwindSafe(|| plan.find()));
                self.trace(found.unwrap_or_default());
                state = self.lock();
                continue;
            }
            let Some(part) = state.next() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            state = self.fetch(&part);
        }
    }

    /// Fetches a part, and records the result.
    fn fetch(&self, part: &AheadPart<'a>) -> MutexGuard<'_, State<'a>> {
        let done = part.filler.upgrade().and_then(|it| {
            if part.cause == Cause::Completion && !it.is_completing(Completing::WhileUsed) {
                return None;
            }
            let bring = || {
                if part.spans == NO_SPANS {
                    it.files().locate_all();
                }
                // Chunks have no peers, and several of them share a unit.
                if part.cause == Cause::Completion && it.is_sealable() {
                    return it.bring_part(&part.spans, part.put_off < PUT_OFF_MAX);
                }
                let has_fetched = it.bring_ahead(part.spans.clone(), part.cause)?;
                Ok(if has_fetched { PartOutcome::Fetched } else { PartOutcome::Present })
            };
            // After a panic, a reader of the bytes fetches them itself.
            catch_unwind(AssertUnwindSafe(bring)).ok()
        });
        let mut state = self.lock();
        state.done(part);
        match done {
            Some(Err(error)) => {
                // A reader of the bytes fetches them again and logs a failure.
                let text: &dyn std::error::Error = &error;
                tracing::debug!(error = text, ?part, "prefetching failed");
                if part.cause == Cause::Completion {
                    state.failed(part.clone(), &error, Instant::now());
                }
            }
            Some(Ok(PartOutcome::Fetched)) if part.cause == Cause::Completion => {
                (state.failures, state.has_no_room) = (0, false);
            }
            Some(Ok(PartOutcome::Later)) => state.put_off(part.clone(), Instant::now()),
            Some(Ok(PartOutcome::Fetched | PartOutcome::Present)) | None => {}
        }
        self.changed.notify_all();
        state
    }

    /// Waits for a change, or until a part of a completion may be fetched.
    fn wait<'s>(
        &self,
        state: MutexGuard<'s, State<'a>>,
        now: Instant,
    ) -> MutexGuard<'s, State<'a>> {
        let times = [state.pause, state.read.map(|it| it + SOON)].into_iter().flatten();
        let times = times.chain(state.completions.iter().filter_map(|it| it.later));
        let next = times.filter(|it| *it > now).min().filter(|_| !state.completions.is_empty());
        let Some(next) = next else {
            return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        let left = (next - now).max(Duration::from_millis(1));
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Orders the parts of completions randomly, except that [`GROUP`] neighbours stay together. A host that fetches
/// neighbours has the units between them.
fn shuffled(parts: VecDeque<AheadPart<'_>>) -> VecDeque<AheadPart<'_>> {
    let mut groups: Vec<Vec<AheadPart<'_>>> = Vec::new();
    for part in parts {
        match groups.last_mut() {
            Some(group)
                if group.len() < GROUP && group.last().is_some_and(|it| part.follows(it)) =>
            {
                group.push(part);
            }
            _ => groups.push(vec![part]),
        }
    }
    let (random, mut number) = (RandomState::new(), 0_usize);
    groups.sort_by_cached_key(|_| {
        number += 1;
        random.hash_one(number)
    });
    groups.into_iter().flatten().collect()
}

/// Takes the first part that is not put off, and whose image may have one more running request.
fn first<'a>(
    waiting: &mut VecDeque<AheadPart<'a>>,
    under_way: &HashMap<u64, usize>,
    now: Instant,
) -> Option<AheadPart<'a>> {
    let place = waiting.iter().position(|it| it.is_ready(now) && may_run(under_way, it));
    place.and_then(|it| waiting.remove(it))
}

/// Whether the part's image may have one more running request.
fn may_run(under_way: &HashMap<u64, usize>, part: &AheadPart<'_>) -> bool {
    under_way.get(&part.image).is_none_or(|requests| *requests < OF_AN_IMAGE)
}

impl<'a> State<'a> {
    /// Takes the next part that is not of a completion, if one may run.
    fn next(&mut self) -> Option<AheadPart<'a>> {
        let now = Instant::now();
        let mut next = first(&mut self.streams, &self.under_way, now);
        let may_more = self.readers == 0 || self.behind < BESIDE_READERS;
        if next.is_none() && may_more {
            next = first(&mut self.traces, &self.under_way, now);
        }
        self.begun(next)
    }

    /// Takes the next part of a completion, if one may run. Readers, and the parts of other queues, come first.
    fn next_completion(&mut self, now: Instant) -> Option<AheadPart<'a>> {
        if self.pause.is_some_and(|it| now < it) {
            return None;
        }
        self.pause = None;
        let has_reader = self.readers > 0 || self.read.is_some_and(|it| now < it + SOON);
        let most = if has_reader { COMPLETERS_BESIDE_READERS } else { COMPLETERS };
        let mut others = self.streams.iter().chain(&self.traces);
        let has_other = others.any(|it| may_run(&self.under_way, it))
            || !self.hot.is_empty()
            || !self.windows.is_empty()
            || self.windows_coming > 0;
        if self.completing >= most || has_other {
            return None;
        }
        let next = first(&mut self.completions, &self.under_way, now);
        self.begun(next)
    }

    fn begun(&mut self, part: Option<AheadPart<'a>>) -> Option<AheadPart<'a>> {
        let part = part?;
        *self.under_way.entry(part.image).or_default() += 1;
        self.behind += usize::from(part.cause == Cause::Trace);
        self.completing += usize::from(part.cause == Cause::Completion);
        Some(part)
    }

    /// Records that a part's request has ended.
    fn done(&mut self, part: &AheadPart<'a>) {
        self.behind -= usize::from(part.cause == Cause::Trace);
        self.completing -= usize::from(part.cause == Cause::Completion);
        match self.under_way.get_mut(&part.image) {
            Some(requests @ 2..) => *requests -= 1,
            _ => drop(self.under_way.remove(&part.image)),
        }
    }

    /// Queues a part of a completion behind all others, and the parts behind it in the device as well. They wait until a
    /// peer had some time; all other parts continue.
    fn put_off(&mut self, part: AheadPart<'a>, now: Instant) {
        let mut moved = vec![part];
        let place = self.completions.iter().position(|it| it.is_ready(now)).unwrap_or_default();
        while let Some(next) = self.completions.get(place)
            && moved.last().is_some_and(|it| next.follows(it))
        {
            moved.extend(self.completions.remove(place));
        }
        let later = Some(now + PUT_OFF);
        let later =
            |it: AheadPart<'a>| AheadPart { put_off: it.put_off.saturating_add(1), later, ..it };
        self.completions.extend(moved.into_iter().map(later));
    }

    /// Queues a failed part of a completion again, or stops completing its device. Failures of the disk are retried
    /// for ever, because an attempt costs almost nothing.
    fn failed(&mut self, part: AheadPart<'a>, error: &FillError, now: Instant) {
        // Simultaneous requests that fail count as one failure.
        if self.pause.is_none() {
            self.failures = self.failures.saturating_add(1);
            if error.is_of_the_disk() {
                self.failures = self.failures.min(FAILURES_MAX);
            }
            let times = 1 << (self.failures - 1).min(PAUSE_MAX.as_secs().ilog2() + 1);
            self.pause = Some(now + (PAUSE * times).min(PAUSE_MAX));
        }
        let text: &dyn std::error::Error = error;
        let device = part.filler.upgrade().map(|it| *it.device().id());
        let device = device.as_ref().map(tracing::field::display);
        if error.is_of_the_disk() {
            if !std::mem::replace(&mut self.has_no_room, true) {
                tracing::warn!(error = text, device, "completing a device waits for disk space");
            }
            return self.completions.push_back(part);
        }
        if self.failures <= FAILURES_MAX {
            return self.completions.push_back(part);
        }
        let is_of = |it: &AheadPart<'a>| Weak::ptr_eq(&it.filler, &part.filler);
        self.completions.retain(|it| !is_of(it));
        if let Some(filler) = part.filler.upgrade() {
            filler.give_up_completing();
            // The source of another device may work.
            self.failures = 0;
            tracing::warn!(error = text, device, "stopped completing a device");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(first: usize, cause: Cause) -> AheadPart<'static> {
        let spans = first..first + 1;
        AheadPart { filler: Weak::new(), image: 0, spans, cause, put_off: 0, later: None }
    }

    const fn silent() -> FillError {
        FillError::Silent(Duration::from_secs(1))
    }

    #[test]
    fn an_image_whose_source_is_silent_leaves_workers_to_others() {
        for cause in [Cause::Stream, Cause::Trace] {
            let mut state = State::default();
            let waiting = match cause {
                Cause::Stream => &mut state.streams,
                _ => &mut state.traces,
            };
            waiting.extend((0..WORKERS).map(|it| part(it, cause)));
            waiting.push_back(AheadPart { image: 1, ..part(WORKERS, cause) });
            let silent: Vec<_> = (0..OF_AN_IMAGE).map(|_| state.next().unwrap()).collect();
            assert!(silent.iter().all(|it| it.image == 0));
            assert_eq!(state.next().map(|it| it.image), Some(1));
            assert!(state.next().is_none());
            // When a request has ended, the next part of the same image can be requested.
            state.done(&silent[0]);
            assert_eq!(state.next().map(|it| it.spans.start), Some(OF_AN_IMAGE));
        }
    }

    #[test]
    fn devices_are_completed_behind_all_else() {
        let mut state = State::default();
        let now = Instant::now();
        state.completions.extend([part(1, Cause::Completion), part(2, Cause::Completion)]);
        state.traces.extend([part(3, Cause::Trace), part(4, Cause::Trace)]);
        state.streams.push_back(part(5, Cause::Stream));
        let next = |state: &mut State<'static>| state.next().map(|it| it.spans.start);
        let complete =
            |state: &mut State<'static>, at| state.next_completion(at).map(|it| it.spans.start);
        state.readers = 1;
        assert_eq!(next(&mut state), Some(5));
        assert_eq!(complete(&mut state, now), None, "traces come first");
        assert_eq!(next(&mut state), Some(3));
        assert_eq!(next(&mut state), Some(4));
        assert_eq!(state.behind, BESIDE_READERS);
        assert_eq!(next(&mut state), None);
        // One request beside a reader, and soon after it.
        assert_eq!(complete(&mut state, now), Some(1));
        assert_eq!(complete(&mut state, now), None);
        (state.readers, state.read) = (0, Some(now));
        assert_eq!(complete(&mut state, now), None);
        assert_eq!(complete(&mut state, now + SOON), Some(2));
        state.completions.extend((6..9).map(|it| part(it, Cause::Completion)));
        assert_eq!(complete(&mut state, now + SOON), Some(6));
        assert_eq!(complete(&mut state, now + SOON), Some(7));
        assert_eq!(state.completing, COMPLETERS);
        assert_eq!(complete(&mut state, now + SOON), None);
        state.done(&part(1, Cause::Completion));
        assert_eq!(complete(&mut state, now + SOON), Some(8));
        assert_eq!(next(&mut state), None);
    }

    #[test]
    fn completion_pauses_longer_each_time_and_ends() {
        let mut state = State::default();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..=FAILURES_MAX {
            // Two parts that run at the same time.
            state.completions.extend([part(1, Cause::Completion), part(2, Cause::Completion)]);
            let mut next = || state.next_completion(now).unwrap();
            let (one, two) = (next(), next());
            [&one, &two].into_iter().for_each(|it| state.done(it));
            state.failed(one, &silent(), now);
            state.failed(two, &silent(), now);
            let pause = state.pause.unwrap() - now;
            assert!(state.next_completion(now).is_none());
            pauses.push(pause.as_secs());
            now += pause;
            state.completions.clear();
        }
        assert_eq!(pauses[..7], [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(pauses.last(), Some(&30));
        // After the last failure, parts are not queued again.
        state.failed(part(3, Cause::Completion), &silent(), now);
        assert!(state.completions.is_empty());
        // Failures of the disk are an exception, because the disk may have room again.
        let full = FillError::DiskPause(Duration::ZERO);
        state.failed(part(3, Cause::Completion), &full, now);
        assert_eq!(state.completions.len(), 1);
        state.failures = 0;
        state.failed(part(3, Cause::Completion), &silent(), now);
        assert_eq!(state.completions.len(), 2);
    }

    /// Hosts fetch groups in other orders, and the parts of each group in order.
    #[test]
    fn completions_with_peers_have_a_random_order() {
        let parts = || (0..103).map(|it| part(it, Cause::Completion)).collect::<VecDeque<_>>();
        let order = || shuffled(parts()).iter().map(|it| it.spans.start).collect::<Vec<_>>();
        let orders = [order(), order(), order()];
        assert!(orders[0] != orders[1] || orders[1] != orders[2]);
        for order in orders {
            let mut groups: Vec<Vec<usize>> = Vec::new();
            for start in &order {
                match groups.last_mut() {
                    Some(group) if start % GROUP > 0 => group.push(*start),
                    _ => groups.push(vec![*start]),
                }
            }
            assert!(
                groups.iter().all(|it| it.iter().zip(it[0]..).all(|(one, other)| *one == other))
            );
            let mut all = order.clone();
            all.sort_unstable();
            assert_eq!(all, (0..103).collect::<Vec<_>>());
        }
    }

    #[test]
    fn parts_that_peers_fetch_are_put_off() {
        let mut state = State::default();
        let now = Instant::now();
        state.completions.extend([1, 2, 7, 8].map(|it| part(it, Cause::Completion)));
        let order =
            |state: &State<'static>| state.completions.iter().map(|it| it.spans.start).collect();
        state.put_off(part(0, Cause::Completion), now);
        let expect: Vec<usize> = order(&state);
        assert_eq!(expect, [7, 8, 0, 1, 2]);
        state.completions.drain(..2);
        // Also if the neighbours are behind parts that still wait.
        state.completions.extend([11, 12].map(|it| part(it, Cause::Completion)));
        state.put_off(part(10, Cause::Completion), now);
        let expect: Vec<usize> = order(&state);
        assert_eq!(expect, [0, 1, 2, 10, 11, 12]);
        assert!(state.completions.iter().all(|it| it.put_off == 1));
        let next = state.completions.pop_front().unwrap();
        state.put_off(next, now + PUT_OFF);
        let expect: Vec<usize> = order(&state);
        assert_eq!(expect, [10, 11, 12, 0, 1, 2]);
    }

    /// Also those of other devices, which are queued behind them, and whatever is put off again.
    #[test]
    fn no_part_waits_for_one_that_was_put_off() {
        let mut state = State::default();
        let now = Instant::now();
        let next = |state: &mut State<'static>, at| {
            let next = state.next_completion(at)?;
            state.done(&next);
            Some(next)
        };
        for _ in 0..PUT_OFF_MAX {
            state.put_off(part(0, Cause::Completion), now);
            state.put_off(part(2, Cause::Completion), now);
            let others = (5..9).map(|it| AheadPart { image: 1, ..part(it, Cause::Completion) });
            state.completions.extend(others);
            for expect in 5..9 {
                assert_eq!(next(&mut state, now).map(|it| it.spans.start), Some(expect));
            }
            assert!(next(&mut state, now).is_none(), "a peer has no time to fetch it");
            for expect in [0, 2] {
                assert_eq!(next(&mut state, now + PUT_OFF).map(|it| it.spans.start), Some(expect));
            }
            assert!(state.completions.is_empty());
        }
    }

    #[test]
    fn no_more_than_that_waits() {
        let mut waiting = VecDeque::from([0]);
        add(&mut waiting, 1..WAITING_MAX * 2);
        add(&mut waiting, [0]);
        assert_eq!((waiting.len(), waiting.back()), (WAITING_MAX, Some(&(WAITING_MAX - 1))));
    }
}
