//! Remembers failures of sources and disks: how long readers wait, which units are not requested again yet, and
//! whether the disk accepts data.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Default of the longest time that a reader waits.
pub const READERS_WAIT: Duration = Duration::from_secs(60);
/// How long a unit is denied after its first failure.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest time that a unit is denied.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Largest number of remembered units. Beyond this number, the units whose pause ends first are forgotten.
const UNITS_MAX: usize = 4096;

/// In this time, at most [`LINES_MAX`] lines about failures of one device are logged.
const LINES_TIME: Duration = Duration::from_secs(60);
const LINES_MAX: u32 = 10;

/// The timeouts of a service for its sources. They can be changed while the service runs.
#[derive(Debug)]
pub struct SourcePatience {
    /// Timeout of readers in milliseconds; 0 for none.
    wait: AtomicU64,
    pause: Duration,
    pause_max: Duration,
}

impl Default for SourcePatience {
    fn default() -> Self {
        Self::new(Some(READERS_WAIT))
    }
}

impl SourcePatience {
    /// Creates timeouts. A reader waits at most `wait` while its device gets no bytes from any source; `None` for no
    /// limit.
    #[must_use]
    pub fn new(wait: Option<Duration>) -> Self {
        let patience = Self { wait: AtomicU64::default(), pause: PAUSE, pause_max: PAUSE_MAX };
        patience.set_wait(wait);
        patience
    }

    /// Sets how long a failed unit is denied. The pause doubles with each further failure, up to `longest`.
    #[must_use]
    pub fn with_pauses(self, first: Duration, longest: Duration) -> Self {
        Self { pause: first, pause_max: longest, ..self }
    }

    /// Changes how long readers wait, also for those that already wait.
    pub fn set_wait(&self, wait: Option<Duration>) {
        let millis = wait.map(|it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX).max(1));
        self.wait.store(millis.unwrap_or_default(), Ordering::Relaxed);
    }

    /// Returns how long readers wait.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        Some(self.wait.load(Ordering::Relaxed)).filter(|it| *it > 0).map(Duration::from_millis)
    }
}

/// The failures of one device.
#[derive(Debug)]
pub(super) struct Failures<'a> {
    patience: &'a SourcePatience,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When a source last returned the requested bytes.
    gave: Option<Instant>,
    units: BTreeMap<usize, FailedUnit>,
    /// Set when a write to the disk failed.
    disk: Option<FailedDisk>,
    /// Why prefetching has stopped, since the last unit was filled.
    room: Option<String>,
    lines: Lines,
}

/// A disk for which the last write failed.
#[derive(Debug)]
struct FailedDisk {
    pause: Duration,
    until: Instant,
    /// The disk's error. `None` if a write has succeeded since, although the disk may be full after that write.
    error: Option<String>,
    /// Whether a thread is retrying a write.
    is_tried: bool,
}

/// The lines that were logged.
#[derive(Debug, Default)]
struct Lines {
    since: Option<Instant>,
    logged: u32,
    /// Number of failures since the last line that were not logged.
    unlogged: u64,
}

/// A unit whose last fetch failed.
#[derive(Debug, Clone, Copy)]
struct FailedUnit {
    pause: Duration,
    until: Instant,
}

/// A unit whose readers get an error without another attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeniedUnit {
    pub(super) unit: usize,
    /// Time until the next attempt.
    pub(super) left: Duration,
}

impl<'a> Failures<'a> {
    pub(super) fn new(patience: &'a SourcePatience) -> Self {
        Self { patience, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a source returned bytes, so that it is worth waiting for others.
    pub(super) fn gave(&self, now: Instant) {
        self.lock().gave = Some(now);
    }

    /// Returns how long a reader has waited since `since` or since the last success, if its timeout is over.
    pub(super) fn overdue(&self, since: Instant, now: Instant) -> Option<Duration> {
        let wait = self.patience.wait()?;
        let since = self.lock().gave.map_or(since, |it| it.max(since));
        Some(now.saturating_duration_since(since)).filter(|it| *it >= wait)
    }

    /// Records that these units failed.
    pub(super) fn failed(&self, units: Range<usize>, now: Instant) {
        let SourcePatience { pause: first, pause_max, .. } = *self.patience;
        let State { units: known, .. } = &mut *self.lock();
        for unit in units {
            let before = known.get(&unit).map(|it| it.pause.saturating_mul(2));
            let pause = before.unwrap_or(first).min(pause_max);
            known.insert(unit, FailedUnit { pause, until: now + pause });
            if known.len() > UNITS_MAX
                && let Some(soonest) = known.iter().min_by_key(|(_, it)| it.until).map(|it| *it.0)
            {
                known.remove(&soonest);
            }
        }
    }

    /// Records that writing a unit failed, with the disk's error.
    pub(super) fn disk_failed(&self, error: String, now: Instant) {
        let SourcePatience { pause: first, pause_max, .. } = *self.patience;
        let disk = &mut self.lock().disk;
        let pause = match disk {
            // Simultaneous writes that fail count as one failure.
            Some(before) if now < before.until && before.error.is_some() && !before.is_tried => {
                before.pause
            }
            Some(before) if now < before.until + pause_max => {
                before.pause.saturating_mul(2).min(pause_max)
            }
            _ => first,
        };
        *disk = Some(FailedDisk { pause, until: now + pause, error: Some(error), is_tried: false });
    }

    /// Records that prefetching would use up the last free space of the disk.
    pub(super) fn no_room(&self, error: String) {
        self.lock().room = Some(error);
    }

    /// Returns the last error of the disk, unless a write has succeeded since.
    pub(super) fn disk_error(&self) -> Option<String> {
        let state = self.lock();
        let failed = state.disk.as_ref().and_then(|it| it.error.as_ref());
        failed.or(state.room.as_ref()).cloned()
    }

    /// Returns how long fetching pauses, because the fetched bytes cannot be written to the disk. When the pause is
    /// over, the first caller may retry if `has_room` returns true, and other callers wait for the result.
    pub(super) fn disk_pause(&self, has_room: impl Fn() -> bool, now: Instant) -> Option<Duration> {
        let mut state = self.lock();
        let FailedDisk { pause, until, is_tried, .. } =
            state.disk.as_mut().filter(|it| it.error.is_some())?;
        let left = until.saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        // The pause is repeated for the next caller.
        *until = now + *pause;
        *is_tried = has_room();
        (!*is_tried).then_some(*pause)
    }

    /// Records that these units were fetched and written.
    pub(super) fn came(&self, units: &Range<usize>) {
        let State { units: known, disk, room, .. } = &mut *self.lock();
        *room = None;
        if let Some(FailedDisk { error, .. }) = disk {
            *error = None;
        }
        while let Some(unit) = known.range(units.clone()).next().map(|it| *it.0) {
            known.remove(&unit);
        }
    }

    /// Returns whether a failure should be logged, with the number of failures that were not logged since the last
    /// line.
    pub(super) fn may_log(&self, now: Instant) -> Option<u64> {
        let Lines { since, logged, unlogged } = &mut self.lock().lines;
        if since.is_none_or(|it| now.saturating_duration_since(it) >= LINES_TIME) {
            (*since, *logged) = (Some(now), 0);
        }
        if *logged >= LINES_MAX {
            *unlogged += 1;
            return None;
        }
        *logged += 1;
        Some(std::mem::take(unlogged))
    }

    /// Returns the first of these units that is denied now.
    pub(super) fn denied(&self, units: &Range<usize>, now: Instant) -> Option<DeniedUnit> {
        let state = self.lock();
        let denied = state.units.range(units.clone()).map(|(unit, it)| DeniedUnit {
            unit: *unit,
            left: it.until.saturating_duration_since(now),
        });
        denied.into_iter().find(|it| !it.left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_failure_doubles_the_pause_and_a_success_ends_it() {
        let patience = SourcePatience::default();
        let failures = Failures::new(&patience);
        let mut now = Instant::now();
        let left = |units, now| failures.denied(&units, now).map(|it| (it.unit, it.left.as_secs()));
        assert_eq!(left(0..9, now), None);
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            failures.failed(3..5, now);
            assert_eq!(left(0..9, now), Some((3, pause)));
            assert_eq!(left(4..9, now), Some((4, pause)));
            assert_eq!((left(0..3, now), left(5..9, now)), (None, None));
            now += Duration::from_secs(pause) - SECOND / 2;
            assert_eq!(left(3..4, now), Some((3, 0)));
            now += SECOND / 2;
            assert_eq!(left(3..5, now), None);
        }
        failures.came(&(0..4));
        failures.failed(3..5, now);
        assert_eq!((left(3..4, now), left(4..5, now)), (Some((3, 1)), Some((4, 30))));
    }

    #[test]
    fn a_reader_waits_as_long_as_other_units_come() {
        let patience = SourcePatience::new(Some(SECOND * 10));
        let failures = Failures::new(&patience);
        let begin = Instant::now();
        let at = |seconds| begin + SECOND * seconds;
        assert_eq!(failures.overdue(begin, at(9)), None);
        assert_eq!(failures.overdue(begin, at(10)), Some(SECOND * 10));
        failures.gave(at(8));
        assert_eq!(failures.overdue(begin, at(17)), None);
        assert_eq!(failures.overdue(begin, at(19)), Some(SECOND * 11));
        // A reader that came later has not waited long enough.
        assert_eq!(failures.overdue(at(12), at(19)), None);
        // The timeout may change while a reader waits.
        patience.set_wait(Some(SECOND * 5));
        assert_eq!(failures.overdue(at(12), at(19)), Some(SECOND * 7));
        patience.set_wait(None);
        assert_eq!(failures.overdue(begin, at(1_000_000)), None);
        patience.set_wait(Some(Duration::ZERO));
        assert!(failures.overdue(begin, at(19)).is_some(), "no wait is not the longest one");
    }

    #[test]
    fn one_try_at_a_time_of_a_disk_that_is_full() {
        let patience = SourcePatience::default();
        let failures = Failures::new(&patience);
        let mut now = Instant::now();
        let pause = |now| failures.disk_pause(|| true, now).map(|it| it.as_secs());
        assert_eq!(pause(now), None);
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            for thread in ["one", "two"] {
                failures.disk_failed(thread.to_owned(), now);
            }
            assert_eq!(failures.disk_error().as_deref(), Some("two"));
            assert_eq!(pause(now), Some(seconds));
            now += Duration::from_secs(seconds);
            // Without room, a write is not tried.
            assert_eq!(failures.disk_pause(|| false, now).map(|it| it.as_secs()), Some(seconds));
            now += Duration::from_secs(seconds);
            assert_eq!(pause(now), None);
            assert_eq!(pause(now), Some(seconds));
        }
        failures.came(&(0..1));
        assert_eq!((pause(now), failures.disk_error()), (None, None));
        // The last successful write may have filled the disk.
        failures.disk_failed(String::new(), now);
        assert_eq!(pause(now), Some(30));
        failures.came(&(0..1));
        now += PAUSE_MAX * 3;
        failures.disk_failed(String::new(), now);
        assert_eq!(pause(now), Some(1));
        failures.came(&(0..1));
        // Prefetching stops, but readers may use the last space.
        failures.no_room("tight".to_owned());
        assert_eq!((pause(now), failures.disk_error().as_deref()), (None, Some("tight")));
    }

    #[test]
    fn a_source_that_fails_does_not_fill_the_log() {
        let patience = SourcePatience::default();
        let failures = Failures::new(&patience);
        let now = Instant::now();
        let logged = |times: usize, at| {
            let lines = (0..times).filter_map(|_| failures.may_log(at));
            lines.fold((0, 0), |(lines, others), it| (lines + 1, others + it))
        };
        assert_eq!(logged(1000, now), (10, 0));
        assert_eq!(logged(5, now + LINES_TIME - SECOND), (0, 0));
        // The next line contains the number of all failures that were not logged.
        assert_eq!(logged(20, now + LINES_TIME), (10, 995));
        assert_eq!(logged(1, now + LINES_TIME * 2), (1, 10));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let patience = SourcePatience::default();
        let failures = Failures::new(&patience);
        let now = Instant::now();
        failures.failed(7..8, now);
        failures.failed(7..8, now);
        failures.failed(1000..1000 + UNITS_MAX * 2, now + SECOND / 2);
        assert_eq!(failures.lock().units.len(), UNITS_MAX);
        // The unit with the longest pause is kept.
        assert!(failures.denied(&(7..8), now).is_some());
    }
}
