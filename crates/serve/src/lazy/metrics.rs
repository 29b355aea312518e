//! Counters of the work that a service does for a device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::fill::cause::{Cause, Why};
use super::fill::error::FillError;

/// Upper ends of the ranges of the wait histogram, in microseconds. The last range has no end.
pub const WAITS: [u64; 12] = [
    100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000,
    30_000_000,
];

/// Number of guessed units that a filler may always fetch in vain, however little was read so far: 8 MiB of a device.
const FIRST: u64 = 128;

/// Counters of a device since its service began.
#[derive(Debug, Default)]
pub struct Counts {
    waits: [AtomicU64; WAITS.len() + 1],
    wait_micros: AtomicU64,
    reads: AtomicU64,
    waiting: AtomicU64,
    /// Failed reads, by [`FailureCause`].
    failures: [AtomicU64; FailureCause::ALL.len()],
    requests: AtomicU64,
    fetched: AtomicU64,
    fetched_ahead: AtomicU64,
    wanted_units: AtomicU64,
    ahead_units: AtomicU64,
    touched_units: AtomicU64,
    /// Number of guessed units that were not read so far.
    vain_guesses: AtomicU64,
    /// Number of guessed bytes of the device for which the request has not begun.
    planned: AtomicU64,
    recalled_units: AtomicU64,
    completed_units: AtomicU64,
    hot_blocks: AtomicU64,
    hot_read_blocks: AtomicU64,
}

/// Why a read got an I/O error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCause {
    /// All sources failed.
    Source,
    /// The bytes differ from the digests of the index, or the index has no window to inflate them.
    Bytes,
    /// The disk of the store failed.
    Disk,
    /// The unit failed a moment ago and was not tried again.
    Denied,
    /// The sources sent no bytes until the timeout.
    Silent,
}

impl FailureCause {
    const ALL: [Self; 5] = [Self::Source, Self::Bytes, Self::Disk, Self::Denied, Self::Silent];
}

impl From<&FillError> for FailureCause {
    fn from(error: &FillError) -> Self {
        match error {
            FillError::Blob { .. } | FillError::FetchWindows { .. } => Self::Source,
            FillError::Windows(_)
            | FillError::Span { .. }
            | FillError::Digest(_)
            | FillError::Chunk(_)
            | FillError::Hot(_) => Self::Bytes,
            FillError::Write(_)
            | FillError::Read(_)
            | FillError::DiskPause(_)
            | FillError::Room(_) => Self::Disk,
            FillError::Denied { .. } => Self::Denied,
            FillError::Silent(_) => Self::Silent,
        }
    }
}

/// Why a reader got an I/O error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastFailure {
    /// Milliseconds since the error.
    pub age: u64,
    /// The error with its causes in one line.
    pub cause: String,
}

/// Number of reads that got an I/O error, by [`FailureCause`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LazyFailures {
    /// All sources failed.
    pub source: u64,
    /// The bytes differed from the digests of the index, or the index had no window to inflate them.
    pub bytes: u64,
    /// The disk of the store failed.
    pub disk: u64,
    /// The units failed a moment before and were not tried again.
    pub denied: u64,
    /// The sources sent no bytes until the timeout.
    pub silent: u64,
}

/// A snapshot of [`Counts`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LazyCounts {
    /// Number of reads that had to wait.
    pub waits: u64,
    /// Histogram of their waiting times, with the upper ends of [`WAITS`]; the last range has no end.
    pub wait_histogram: Vec<u64>,
    /// Sum of their waiting times, in microseconds.
    pub wait_micros: u64,
    /// Number of reads that reached the service, because EROFS did not have the data in memory.
    pub reads: u64,
    /// Number of reads that wait at present.
    pub waiting: u64,
    /// Number of reads that got an I/O error.
    pub failures: u64,
    /// The same number by cause.
    pub failures_by_cause: LazyFailures,
    /// Number of requests for parts of the blob.
    pub requests: u64,
    /// Number of fetched bytes of the blob.
    pub fetched: u64,
    /// Number of those that were prefetched.
    pub fetched_ahead: u64,
    /// Number of units of 64 KiB that were fetched while a reader waited for them.
    pub wanted_units: u64,
    /// Number of units that were prefetched.
    pub ahead_units: u64,
    /// Number of those that were read later.
    pub touched_units: u64,
    /// Number of valid units that an earlier service had left on the disk.
    pub recalled_units: u64,
    /// Number of units that were fetched to complete the device.
    pub completed_units: u64,
    /// Number of blocks of 16 KiB that came with the hot pack.
    pub hot_blocks: u64,
    /// Number of those of which readers got a part.
    pub hot_read_blocks: u64,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Counts {
    /// Counts a read.
    pub(super) fn asked(&self) {
        add(&self.reads, 1);
    }

    /// Counts a read that has to wait.
    pub(super) fn waits(&self) {
        add(&self.waiting, 1);
    }

    /// Ends the wait of a read that is left to the next service without a reply.
    pub(super) fn left(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a read that gets an I/O error.
    pub(super) fn failed(&self, cause: FailureCause) {
        let counter = FailureCause::ALL.iter().position(|it| *it == cause);
        if let Some(counter) = counter.and_then(|it| self.failures.get(it)) {
            add(counter, 1);
        }
    }

    /// Ends the wait of a read that got its reply.
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

    /// Counts a read of a unit that was prefetched for this reason.
    pub(super) fn touched(&self, why: Why) {
        if why == Why::Completed {
            // The whole device was wanted anyway.
            return;
        }
        add(&self.touched_units, 1);
        if why == Why::Guessed {
            self.vain_guesses.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Counts bytes that will be prefetched as a guess.
    pub(super) fn planned(&self, bytes: u64) {
        add(&self.planned, bytes);
    }

    /// Counts bytes of these whose request has begun.
    pub(super) fn begun(&self, bytes: u64) {
        let less = |it: u64| Some(it.saturating_sub(bytes));
        let _before = self.planned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    pub(super) fn recalled(&self) {
        add(&self.recalled_units, 1);
    }

    /// Counts a block that came with a hot pack.
    pub(super) fn hot(&self) {
        add(&self.hot_blocks, 1);
    }

    /// Counts a block that came with a hot pack, at its first read.
    pub(super) fn hot_read(&self) {
        add(&self.hot_read_blocks, 1);
    }

    /// Returns how many more units may be guessed. Guesses that are not read may not exceed the units that are read.
    pub(super) fn may_waste(&self) -> u64 {
        let read = load(&self.wanted_units) + load(&self.touched_units);
        let guessed = load(&self.vain_guesses) + load(&self.planned).div_ceil(image::lazy::UNIT);
        (FIRST + read).saturating_sub(guessed)
    }

    /// Returns a snapshot of the counters.
    #[must_use]
    pub fn now(&self) -> LazyCounts {
        let wait_histogram: Vec<u64> = self.waits.iter().map(load).collect();
        let [source, bytes, disk, denied, silent] = self.failures.each_ref().map(load);
        LazyCounts {
            waits: wait_histogram.iter().sum(),
            wait_histogram,
            wait_micros: load(&self.wait_micros),
            reads: load(&self.reads),
            waiting: load(&self.waiting),
            failures: source + bytes + disk + denied + silent,
            failures_by_cause: LazyFailures { source, bytes, disk, denied, silent },
            requests: load(&self.requests),
            fetched: load(&self.fetched),
            fetched_ahead: load(&self.fetched_ahead),
            wanted_units: load(&self.wanted_units),
            ahead_units: load(&self.ahead_units),
            touched_units: load(&self.touched_units),
            recalled_units: load(&self.recalled_units),
            completed_units: load(&self.completed_units),
            hot_blocks: load(&self.hot_blocks),
            hot_read_blocks: load(&self.hot_read_blocks),
        }
    }
}

impl LazyCounts {
    /// Returns the number of bytes that were prefetched and not read so far.
    #[must_use]
    pub const fn wasted(&self) -> u64 {
        self.ahead_units.saturating_sub(self.touched_units).saturating_mul(image::lazy::UNIT)
    }

    /// Returns the number of bytes that came with the hot pack and were not read so far.
    #[must_use]
    pub const fn hot_wasted(&self) -> u64 {
        self.hot_blocks.saturating_sub(self.hot_read_blocks).saturating_mul(image::lazy::hot::BLOCK)
    }

    /// Returns a quantile of the time that reads have waited, in microseconds, rounded up to an end of [`WAITS`]:
    /// `in_a_thousand` of 1000 reads waited at most this long. Returns `None` if no read has waited, or if the time is
    /// beyond all ranges.
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
        // A prefetched guess that was read later counts as read, and no longer as wasted.
        counts.touched(Why::Guessed);
        assert_eq!(counts.may_waste(), 3);
        assert_eq!(counts.now().wasted(), (FIRST - 1) * 65_536);
        // Bytes of planned prefetches count as guesses.
        counts.planned(2 * 65_536 + 1);
        assert_eq!(counts.may_waste(), 0);
        counts.begun(65_537);
        assert_eq!(counts.may_waste(), 2);
        counts.begun(u64::MAX);
        // Units that caused no additional transfer, or that were requested, are not guesses.
        counts.filled(Why::WithOthers);
        counts.filled(Why::Traced);
        counts.filled(Why::Completed);
        counts.touched(Why::Completed);
        assert_eq!(counts.may_waste(), 3);
        assert_eq!(counts.now().ahead_units, FIRST + 2);
    }
}
