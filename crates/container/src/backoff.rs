//! Intervals for polling the work of other processes, which are short at first and grow later.

use std::time::{Duration, Instant};

/// Interval between checks of another process's work.
pub const GLANCE: Duration = Duration::from_millis(10);

/// Maximum interval between two checks.
const SELDOM: Duration = Duration::from_millis(250);

/// Growing intervals between checks: an eighth of the time that has passed already.
#[derive(Debug)]
pub(crate) struct Pace {
    since: Instant,
    least: Duration,
}

impl Pace {
    /// Starts now. `least` is the first interval.
    pub(crate) fn new(least: Duration) -> Self {
        Self { since: Instant::now(), least }
    }

    /// Returns the next interval.
    pub(crate) fn pause(&self) -> Duration {
        pause(self.since.elapsed(), self.least)
    }
}

fn pause(passed: Duration, least: Duration) -> Duration {
    (passed / 8).clamp(least, SELDOM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_long_looks_seldom() {
        let check = |passed: u64, expect: u64| {
            let found = pause(Duration::from_millis(passed), Duration::from_millis(2));
            assert_eq!(found, Duration::from_millis(expect), "after {passed} ms");
        };
        for (passed, expect) in
            [(0, 2), (16, 2), (80, 10), (800, 100), (2000, 250), (3_600_000, 250)]
        {
            check(passed, expect);
        }
    }
}
