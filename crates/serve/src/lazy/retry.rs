//! Sources that fail or stay silent: how long readers wait for them, and which units are not asked for again at once. And
//! disks that take nothing: nothing is fetched for them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long readers wait at most, unless something else is set.
pub const READERS_WAIT: Duration = Duration::from_secs(60);
/// How long a unit is denied after it failed for the first time.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest time that a unit is denied.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// The most units that are remembered. Beyond that, those go that may be asked for soonest.
const UNITS_MAX: usize = 4096;

/// In so long a time, no more than [`LINES_MAX`] lines about failures of one device are logged.
const LINES_TIME: Duration = Duration::from_secs(60);
const LINES_MAX: u32 = 10;

/// How patient a service is with sources. It can be changed while the service runs.
#[derive(Debug)]
pub struct SourcePatience {
    /// In milliseconds; 0 for no end.
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
    /// No reader waits longer than this while its device gets nothing from any source; `None` for no end.
    #[must_use]
    pub fn new(wait: Option<Duration>) -> Self {
        let patience = Self { wait: AtomicU64::default(), pause: PAUSE, pause_max: PAUSE_MAX };
        patience.set_wait(wait);
        patience
    }

    /// A unit that failed is denied this long; after each further failure twice as long, up to `longest`.
    #[must_use]
    pub fn with_pauses(self, first: Duration, longest: Duration) -> Self {
        Self { pause: first, pause_max: longest, ..self }
    }

    /// Changes how long readers wait, also for those that wait already.
    pub fn set_wait(&self, wait: Option<Duration>) {
        let millis = wait.map(|it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX).max(1));
        self.wait.store(millis.unwrap_or_default(), Ordering::Relaxed);
    }

    /// How long readers wait.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        Some(self.wait.load(Ordering::Relaxed)).filter(|it| *it > 0).map(Duration::from_millis)
    }
}

/// What is remembered of the sources of one device.
#[derive(Debug)]
pub(super) struct Failures<'a> {
    patience: &'a SourcePatience,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When a source last gave what it was asked for.
    gave: Option<Instant>,
    units: BTreeMap<usize, FailedUnit>,
    /// Set when the disk did not take a unit.
    disk: Option<FailedDisk>,
    /// Why nothing is fetched that nobody waits for, since the last unit came.
    room: Option<String>,
    lines: Lines,
}

/// A disk that did not take what it was last given.
#[derive(Debug)]
struct FailedDisk {
    pause: Duration,
    until: Instant,
    /// What it said. None since it took a unit again: it may have been the last.
    error: Option<String>,
    /// Whether somebody tries again.
    is_tried: bool,
}

/// Lines that were logged.
#[derive(Debug, Default)]
struct Lines {
    since: Option<Instant>,
    logged: u32,
    /// Those that were not, since the last that was.
    unlogged: u64,
}

/// A unit that did not come when it was last asked for.
#[derive(Debug, Clone, Copy)]
struct FailedUnit {
    pause: Duration,
    until: Instant,
}

/// A reader of these units gets an error without another attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeniedUnit {
    pub(super) unit: usize,
    /// How long still.
    pub(super) left: Duration,
}

impl<'a> Failures<'a> {
    pub(super) fn new(patience: &'a SourcePatience) -> Self {
        Self { patience, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A source gave what it was asked for: those who wait for others have a reason to.
    pub(super) fn gave(&self, now: Instant) {
        self.lock().gave = Some(now);
    }

    /// For how long nothing has come for who waits since then, if that is longer than a reader waits.
    pub(super) fn overdue(&self, since: Instant, now: Instant) -> Option<Duration> {
        let wait = self.patience.wait()?;
        let since = self.lock().gave.map_or(since, |it| it.max(since));
        Some(now.saturating_duration_since(since)).filter(|it| *it >= wait)
    }

    /// These units did not come.
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

    /// The disk did not take a unit. It says why.
    pub(super) fn disk_failed(&self, error: String, now: Instant) {
        let SourcePatience { pause: first, pause_max, .. } = *self.patience;
        let disk = &mut self.lock().disk;
        let pause = match disk {
            // Those that were under way together count once.
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

    /// What nobody waits for would take the last of the disk.
    pub(super) fn no_room(&self, error: String) {
        self.lock().room = Some(error);
    }

    /// Why the disk has taken nothing since it was last asked.
    pub(super) fn disk_error(&self) -> Option<String> {
        let state = self.lock();
        let failed = state.disk.as_ref().and_then(|it| it.error.as_ref());
        failed.or(state.room.as_ref()).cloned()
    }

    /// How long nothing is fetched, since the disk would not take it. When that time is over, the first who asks may try, and
    /// the others wait for what becomes of it. Without `has_room` nobody tries.
    pub(super) fn disk_pause(&self, has_room: impl Fn() -> bool, now: Instant) -> Option<Duration> {
        let mut state = self.lock();
        let FailedDisk { pause, until, is_tried, .. } =
            state.disk.as_mut().filter(|it| it.error.is_some())?;
        let left = until.saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        // The next look is after as long a time.
        *until = now + *pause;
        *is_tried = has_room();
        (!*is_tried).then_some(*pause)
    }

    /// These units came, and the disk took them.
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

    /// Whether a line about a failure is to be logged, and how many were not since the last one.
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

    /// The first of these units that is not asked for now.
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
        // Who came later.
        assert_eq!(failures.overdue(at(12), at(19)), None);
        // It may change meanwhile.
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
            // Without room it is not worth a try.
            assert_eq!(failures.disk_pause(|| false, now).map(|it| it.as_secs()), Some(seconds));
            now += Duration::from_secs(seconds);
            assert_eq!(pause(now), None);
            assert_eq!(pause(now), Some(seconds));
        }
        failures.came(&(0..1));
        assert_eq!((pause(now), failures.disk_error()), (None, None));
        // What it took may have been the last.
        failures.disk_failed(String::new(), now);
        assert_eq!(pause(now), Some(30));
        failures.came(&(0..1));
        now += PAUSE_MAX * 3;
        failures.disk_failed(String::new(), now);
        assert_eq!(pause(now), Some(1));
        failures.came(&(0..1));
        // Readers may have the last of it.
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
        // All are counted in the end.
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
        // It is the one with the longest pause.
        assert!(failures.denied(&(7..8), now).is_some());
    }
}
