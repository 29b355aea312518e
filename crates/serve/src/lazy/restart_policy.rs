//! Handles services that die repeatedly: a reader that each of them dies with gets an error, so that all others
//! continue.

use std::collections::BTreeSet;
use std::time::Duration;

use super::door::InodePlace;
use super::journal::LeftEvent;

/// A reader gets an I/O error when this many services in a row have died with it.
const WITH_A_READER: u32 = 5;
/// After this many services in a row that died at once, the keeper pauses.
const AT_ONCE: u32 = 20;
/// A service that ran for less than this time died at once.
const MOMENT: Duration = Duration::from_millis(50);
/// A service that ran for less than this time died soon.
const SOON: Duration = Duration::from_secs(10);
/// If consecutive services died soon and their total run time exceeds this, the keeper pauses. The reason for their
/// deaths may be a read of a file on FUSE, which the journal does not contain.
const IN_A_ROW: Duration = Duration::from_secs(120);

/// Identifies an event by its file and range, because its descriptor's number may be different in the next service.
type ReadPlace = (Option<InodePlace>, u64, u64);

/// The history of deaths.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    /// The events in the journal at the last death.
    left: BTreeSet<ReadPlace>,
    /// Number of consecutive deaths of services that had such an event in common with the service before.
    with_a_reader: u32,
    at_once: u32,
    /// Total lifetime of the services in a row that died soon.
    in_a_row: Duration,
}

/// The keeper's reaction to a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterDeath {
    /// Start a service at once.
    Again,
    /// Give the readers in the journal an I/O error, then start a service at once.
    WithoutReaders,
    /// Pause for longer than readers wait.
    Rest,
}

impl Deaths {
    /// Records that a service died with these unanswered events, and how long it had lived.
    pub(super) fn died(&mut self, left: &[LeftEvent], lived: Duration) -> AfterDeath {
        let left = left.iter().map(|it| (it.place, it.range.start, it.range.end)).collect();
        let is_again = self.left.intersection(&left).next().is_some();
        self.left = left;
        self.with_a_reader = if is_again { self.with_a_reader + 1 } else { 1 };
        self.at_once = if lived < MOMENT { self.at_once + 1 } else { 0 };
        self.in_a_row = if lived < SOON { self.in_a_row + lived } else { Duration::ZERO };
        if self.with_a_reader >= WITH_A_READER {
            (self.with_a_reader, self.left) = (0, BTreeSet::new());
            return AfterDeath::WithoutReaders;
        }
        if self.at_once >= AT_ONCE || self.in_a_row >= IN_A_ROW {
            (self.at_once, self.in_a_row) = (0, Duration::ZERO);
            return AfterDeath::Rest;
        }
        AfterDeath::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1);

    fn event(start: u64) -> LeftEvent {
        LeftEvent { number: 7, place: Some((1, 2)), range: start..start + 10 }
    }

    #[test]
    fn what_each_service_dies_with_is_given_up() {
        let mut deaths = Deaths::default();
        for number in 1..WITH_A_READER {
            // Other events differ from death to death.
            let left = [event(0), event(u64::from(number) * 100)];
            assert_eq!(deaths.died(&left, LONG), AfterDeath::Again);
        }
        assert_eq!(deaths.died(&[event(0)], LONG), AfterDeath::WithoutReaders);
        assert_eq!(deaths.died(&[event(0)], LONG), AfterDeath::Again);
    }

    #[test]
    fn deaths_with_other_readers_are_chance() {
        let mut deaths = Deaths::default();
        for number in 0..100 {
            assert_eq!(deaths.died(&[event(number * 100)], SOON), AfterDeath::Again);
            assert_eq!(deaths.died(&[], SOON), AfterDeath::Again);
        }
    }

    #[test]
    fn services_that_never_live_are_not_started_all_the_time() {
        let mut deaths = Deaths::default();
        let mut died = |times: u32, lived| (0..times).map(|_| deaths.died(&[], lived)).last();
        assert_eq!(died(AT_ONCE - 1, Duration::ZERO), Some(AfterDeath::Again));
        assert_eq!(died(1, LONG), Some(AfterDeath::Again));
        assert_eq!(died(AT_ONCE, Duration::ZERO), Some(AfterDeath::Rest));
        assert_eq!(died(1, Duration::ZERO), Some(AfterDeath::Again));
    }

    /// A death that is answered by giving up readers is a death like any other.
    #[test]
    fn deaths_with_readers_count_too() {
        let mut deaths = Deaths::default();
        let mut all = Vec::new();
        for number in 0..61 {
            // Five services in a row die with the same reader, and so on.
            all.push(deaths.died(&[event(number / 5 * 100)], LONG * 2));
        }
        let first = all.iter().position(|it| *it == AfterDeath::Rest);
        assert_eq!(first, Some(60), "{all:?}");
    }

    #[test]
    fn services_that_all_die_soon_are_not_started_for_ever() {
        let mut deaths = Deaths::default();
        let mut died = |times: u32, lived| (0..times).map(|_| deaths.died(&[], lived)).last();
        assert_eq!(died(59, LONG * 2), Some(AfterDeath::Again));
        // A service that lived long enough resets the sum.
        assert_eq!(died(1, SOON), Some(AfterDeath::Again));
        assert_eq!(died(59, LONG * 2), Some(AfterDeath::Again));
        assert_eq!(died(1, LONG * 2), Some(AfterDeath::Rest));
        assert_eq!(died(59, LONG * 2), Some(AfterDeath::Again));
    }
}
