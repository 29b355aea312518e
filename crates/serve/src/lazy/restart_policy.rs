//! Handles services that die repeatedly: after a while the keeper pauses, so that readers get errors.

use std::time::Duration;

/// After this many services in a row that died at once, the keeper pauses.
const AT_ONCE: u32 = 20;
/// A service that ran for less than this time died at once.
const MOMENT: Duration = Duration::from_millis(50);
/// A service that ran for less than this time died soon.
const SOON: Duration = Duration::from_secs(10);
/// If consecutive services died soon and their total run time exceeds this, the keeper pauses. The reason for their
/// deaths may be a read that each of them gets.
const IN_A_ROW: Duration = Duration::from_secs(120);

/// The history of deaths.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    at_once: u32,
    /// Total lifetime of the services in a row that died soon.
    in_a_row: Duration,
}

/// The keeper's reaction to a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterDeath {
    /// Start a service at once.
    Again,
    /// Pause for longer than readers wait.
    Rest,
}

impl Deaths {
    /// Records that a service died, and how long it had lived.
    pub(super) fn died(&mut self, lived: Duration) -> AfterDeath {
        self.at_once = if lived < MOMENT { self.at_once + 1 } else { 0 };
        self.in_a_row = if lived < SOON { self.in_a_row + lived } else { Duration::ZERO };
        if self.at_once >= AT_ONCE || self.in_a_row >= IN_A_ROW {
            *self = Self::default();
            return AfterDeath::Rest;
        }
        AfterDeath::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1);

    fn died(deaths: &mut Deaths, times: u32, lived: Duration) -> AfterDeath {
        let mut after = AfterDeath::Again;
        (0..times).for_each(|_| after = deaths.died(lived));
        after
    }

    #[test]
    fn services_that_never_live_are_not_started_all_the_time() {
        let mut deaths = Deaths::default();
        assert_eq!(died(&mut deaths, AT_ONCE - 1, Duration::ZERO), AfterDeath::Again);
        assert_eq!(died(&mut deaths, 1, LONG), AfterDeath::Again);
        assert_eq!(died(&mut deaths, AT_ONCE, Duration::ZERO), AfterDeath::Rest);
        assert_eq!(died(&mut deaths, 1, Duration::ZERO), AfterDeath::Again);
    }

    #[test]
    fn services_that_all_die_soon_are_not_started_for_ever() {
        let mut deaths = Deaths::default();
        assert_eq!(died(&mut deaths, 59, LONG * 2), AfterDeath::Again);
        // A service that lived long enough resets the sum.
        assert_eq!(died(&mut deaths, 1, SOON), AfterDeath::Again);
        assert_eq!(died(&mut deaths, 59, LONG * 2), AfterDeath::Again);
        assert_eq!(died(&mut deaths, 1, LONG * 2), AfterDeath::Rest);
        assert_eq!(died(&mut deaths, 59, LONG * 2), AfterDeath::Again);
    }
}
