//! What a service has done for a device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::fill::cause::{Cause, Why};
use super::fill::error::FillError;

/// The upper ends of the ranges of waiting times that are counted, in microseconds. The last range has no end.
pub const WAITS: [u64; 12] = [
    100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000,
    30_000_000,
];

/// Units that a filler may always bring in vain, however little was read so far: 8 MiB of a device.
const FIRST: u64 = 128;

/// What was done for a device since its service began.
#[derive(Debug, Default)]
pub struct Counts {
    waits: [AtomicU64; WAITS.len() + 1],
    wait_micros: AtomicU64,
    reads: AtomicU64,
    waiting: AtomicU64,
    /// By [`FailureCause`].
    failures: [AtomicU64; FailureCause::ALL.len()],
    requests: AtomicU64,
    fetched: AtomicU64,
    fetched_ahead: AtomicU64,
    wanted_units: AtomicU64,
    ahead_units: AtomicU64,
    touched_units: AtomicU64,
    /// Of the units ahead, those that were guessed and that nobody has read.
    vain_guesses: AtomicU64,
    /// Bytes of the device that were guessed, and that no request has been made for yet.
    planned: AtomicU64,
    recalled_units: AtomicU64,
    completed_units: AtomicU64,
}

/// Why a read got an I/O error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCause {
    /// No source gave the bytes.
    Source,
    /// What came did not have the digests of the index, or the index has no way to inflate it.
    Bytes,
    /// The disk of the store.
    Disk,
    /// It failed a moment ago, and was not asked for again.
    Denied,
    /// No source gave anything for too long.
    Silent,
}

impl FailureCause {
    const ALL: [Self; 5] = [Self::Source, Self::Bytes, Self::Disk, Self::Denied, Self::Silent];
}

impl From<&FillError> for FailureCause {
    fn from(error: &FillError) -> Self {
        match error {
            FillError::Blob { .. } => Self::Source,
            FillError::Windows(_) | FillError::Span { .. } | FillError::Digest(_) => Self::Bytes,
            FillError::Write(_)
            | FillError::Read(_)
            | FillError::DiskPause(_)
            | FillError::Room(_) => Self::Disk,
            FillError::Denied { .. } => Self::Denied,
            FillError::Silent(_) => Self::Silent,
        }
    }
}

/// Reads that got an I/O error, by [`FailureCause`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LazyFailures {
    /// No source gave the bytes.
    pub source: u64,
    /// What came did not have the digests of the index, or the index has no way to inflate it.
    pub bytes: u64,
    /// The disk of the store failed.
    pub disk: u64,
    /// They failed a moment before, and were not asked for again.
    pub denied: u64,
    /// No source gave anything for too long.
    pub silent: u64,
}

/// [`Counts`] at some time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LazyCounts {
    /// Reads that had to wait.
    pub waits: u64,
    /// How many of them waited for at most [`WAITS`] microseconds, and longer than the range before; the last one longer than
    /// all.
    pub wait_histogram: Vec<u64>,
    /// How long they waited, all together, in microseconds.
    pub wait_micros: u64,
    /// Reads of the device that came to the service: those that EROFS did not have in memory.
    pub reads: u64,
    /// Those of them that wait now.
    pub waiting: u64,
    /// Reads that got an I/O error.
    pub failures: u64,
    /// The same by their cause.
    pub failures_by_cause: LazyFailures,
    /// Requests for parts of the blob.
    pub requests: u64,
    /// Bytes of the blob that were fetched.
    pub fetched: u64,
    /// Those of them that nobody waited for.
    pub fetched_ahead: u64,
    /// Units of 64 KiB that were brought while a reader waited for them.
    pub wanted_units: u64,
    /// Units that were brought before anybody wanted them.
    pub ahead_units: u64,
    /// Those of them that were read later.
    pub touched_units: u64,
    /// Units that were on the disk from an earlier service, and were right.
    pub recalled_units: u64,
    /// Units that were brought since all of the device is wanted.
    pub completed_units: u64,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

fn of(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Counts {
    /// A read came.
    pub(super) fn asked(&self) {
        add(&self.reads, 1);
    }

    /// A read has to wait.
    pub(super) fn waits(&self) {
        add(&self.waiting, 1);
    }

    /// A read waits here no longer, and has no answer.
    pub(super) fn left(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// A read gets an I/O error.
    pub(super) fn failed(&self, cause: FailureCause) {
        let counter = FailureCause::ALL.iter().position(|it| *it == cause);
        if let Some(counter) = counter.and_then(|it| self.failures.get(it)) {
            add(counter, 1);
        }
    }

    /// A read that had to wait has its answer.
    pub(super) fn waited(&self, time: Duration) {
        self.left();
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        add(&self.waits[WAITS.partition_point(|it| *it < micros)], 1);
        add(&self.wait_micros, micros);
    }

    pub(super) fn fetched(&self, bytes: u64, cause: Cause) {
        add(&self.requests, 1);
        add(&self.fetched, bytes);
        if cause != Cause::Reader {
            add(&self.fetched_ahead, bytes);
        }
    }

    pub(super) fn filled(&self, why: Why) {
        let counter = match why {
            Why::Wanted => &self.wanted_units,
            Why::Completed => &self.completed_units,
            Why::WithOthers | Why::Traced | Why::Guessed => &self.ahead_units,
        };
        add(counter, 1);
        if why == Why::Guessed {
            add(&self.vain_guesses, 1);
        }
    }

    /// A reader wanted a unit that was brought ahead, for this reason.
    pub(super) fn touched(&self, why: Why) {
        if why == Why::Completed {
            // All of it was wanted anyhow.
            return;
        }
        add(&self.touched_units, 1);
        if why == Why::Guessed {
            self.vain_guesses.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// So many bytes are going to be guessed.
    pub(super) fn planned(&self, bytes: u64) {
        add(&self.planned, bytes);
    }

    /// So many of them are asked for.
    pub(super) fn begun(&self, bytes: u64) {
        let less = |it: u64| Some(it.saturating_sub(bytes));
        let _before = self.planned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    pub(super) fn recalled(&self) {
        add(&self.recalled_units, 1);
    }

    /// How many units more may be guessed: those that nobody wants are not to be more than those that somebody wanted.
    pub(super) fn may_waste(&self) -> u64 {
        let read = of(&self.wanted_units) + of(&self.touched_units);
        let guessed = of(&self.vain_guesses) + of(&self.planned).div_ceil(image::lazy::UNIT);
        (FIRST + read).saturating_sub(guessed)
    }

    /// How they are now.
    #[must_use]
    pub fn now(&self) -> LazyCounts {
        let wait_histogram: Vec<u64> = self.waits.iter().map(of).collect();
        let [source, bytes, disk, denied, silent] = self.failures.each_ref().map(of);
        LazyCounts {
            waits: wait_histogram.iter().sum(),
            wait_histogram,
            wait_micros: of(&self.wait_micros),
            reads: of(&self.reads),
            waiting: of(&self.waiting),
            failures: source + bytes + disk + denied + silent,
            failures_by_cause: LazyFailures { source, bytes, disk, denied, silent },
            requests: of(&self.requests),
            fetched: of(&self.fetched),
            fetched_ahead: of(&self.fetched_ahead),
            wanted_units: of(&self.wanted_units),
            ahead_units: of(&self.ahead_units),
            touched_units: of(&self.touched_units),
            recalled_units: of(&self.recalled_units),
            completed_units: of(&self.completed_units),
        }
    }
}

impl LazyCounts {
    /// Bytes that were brought before anybody wanted them, and that nobody has read so far.
    #[must_use]
    pub const fn wasted(&self) -> u64 {
        self.ahead_units.saturating_sub(self.touched_units).saturating_mul(image::lazy::UNIT)
    }

    /// How long the fastest reads waited at most, of which there are so many in a thousand: the upper end of a range of
    /// [`WAITS`], in microseconds. `None` if none has waited, or it was longer than all ranges.
    #[must_use]
    pub fn wait_of(&self, in_a_thousand: u64) -> Option<u64> {
        let wanted = self.waits.saturating_mul(in_a_thousand).div_ceil(1000);
        let mut sum = 0;
        for (end, count) in WAITS.iter().zip(&self.wait_histogram) {
            sum += count;
            if sum >= wanted && sum > 0 {
                return Some(*end);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_times_are_known_by_their_range() {
        let counts = Counts::default();
        assert_eq!(counts.now().wait_of(500), None);
        for micros in [1, 100, 101, 20_000] {
            counts.waits();
            counts.waited(Duration::from_micros(micros));
        }
        counts.waits();
        counts.waits();
        counts.waited(Duration::from_secs(40));
        let now = counts.now();
        assert_eq!((now.waits, now.waiting, now.failures), (5, 1, 0));
        assert_eq!(now.wait_histogram, [2, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(now.wait_of(400), Some(100));
        assert_eq!(now.wait_of(500), Some(300));
        assert_eq!(now.wait_of(800), Some(30_000));
        assert_eq!(now.wait_of(1000), None);
    }

    #[test]
    fn errors_are_known_by_their_cause() {
        let counts = Counts::default();
        for (times, cause) in (1..).zip(FailureCause::ALL) {
            (0..times).for_each(|_| counts.failed(cause));
        }
        let expect = LazyFailures { source: 1, bytes: 2, disk: 3, denied: 4, silent: 5 };
        let now = counts.now();
        assert_eq!((now.failures_by_cause, now.failures), (expect, 15));
    }

    #[test]
    fn no_more_is_brought_in_vain_than_was_wanted() {
        let counts = Counts::default();
        assert_eq!(counts.may_waste(), FIRST);
        for _ in 0..FIRST {
            counts.filled(Why::Guessed);
        }
        assert_eq!(counts.may_waste(), 0);
        counts.filled(Why::Wanted);
        assert_eq!(counts.may_waste(), 1);
        // One is vain no longer, and is wanted.
        counts.touched(Why::Guessed);
        assert_eq!(counts.may_waste(), 3);
        assert_eq!(counts.now().wasted(), (FIRST - 1) * 65_536);
        // What is on its way counts, too.
        counts.planned(2 * 65_536 + 1);
        assert_eq!(counts.may_waste(), 0);
        counts.begun(65_537);
        assert_eq!(counts.may_waste(), 2);
        counts.begun(u64::MAX);
        // What costs nothing more, or was asked for, is no guess.
        counts.filled(Why::WithOthers);
        counts.filled(Why::Traced);
        counts.filled(Why::Completed);
        counts.touched(Why::Completed);
        assert_eq!(counts.may_waste(), 3);
        assert_eq!(counts.now().ahead_units, FIRST + 2);
    }
}
