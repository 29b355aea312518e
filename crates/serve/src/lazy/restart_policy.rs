//! Services that die again and again: what they die of is given up, so that all others go on.

use std::collections::BTreeSet;
use std::time::Duration;

use super::door::InodePlace;
use super::journal::LeftEvent;

/// A reader for which so many services in a row had died gets an I/O error.
const WITH_A_READER: u32 = 5;
/// After so many services in a row that died at once, none is started for a while.
const AT_ONCE: u32 = 20;
/// How long a service lived that died at once.
const MOMENT: Duration = Duration::from_millis(50);
/// How long one lived that died soon.
const SOON: Duration = Duration::from_secs(10);
/// When those in a row that died soon have lived for so long together, none is started for a while: a read of a file on
/// FUSE, which stands in no journal, may be what each of them dies of.
const IN_A_ROW: Duration = Duration::from_secs(120);

/// An event by what is read: its number may be another in the next service.
type ReadPlace = (Option<InodePlace>, u64, u64);

/// How the services before died.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    /// What stood in the journal at the last death.
    left: BTreeSet<ReadPlace>,
    /// Deaths in a row with something of it.
    with_a_reader: u32,
    at_once: u32,
    /// How long those in a row lived that died soon.
    in_a_row: Duration,
}

/// What a keeper does after a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterDeath {
    /// It starts a service at once.
    Again,
    /// The same, after it has given an I/O error to those in the journal.
    WithoutReaders,
    /// It waits for longer than readers do.
    Rest,
}

impl Deaths {
    /// A service died with these events, so long after it had taken over.
    pub(super) fn died(&mut self, left: &[LeftEvent], lived: Duration) -> AfterDeath {
        let left = left.iter().map(|it| (it.place, it.range.start, it.range.end)).collect();
        let is_again = self.left.intersection(&left).next().is_some();
        self.left = left;
        self.with_a_reader = if is_again { self.with_a_reader + 1 } else { 1 };
        self.at_once = if lived < MOMENT { self.at_once + 1 } else { 0 };
        if self.with_a_reader >= WITH_A_READER {
            (self.with_a_reader, self.left) = (0, BTreeSet::new());
            return AfterDeath::WithoutReaders;
        }
        self.in_a_row = if lived < SOON { self.in_a_row + lived } else { Duration::ZERO };
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
            // Others come and go.
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

    #[test]
    fn services_that_all_die_soon_are_not_started_for_ever() {
        let mut deaths = Deaths::default();
        let mut died = |times: u32, lived| (0..times).map(|_| deaths.died(&[], lived)).last();
        assert_eq!(died(59, LONG * 2), Some(AfterDeath::Again));
        // One that has lived shows that it can be done.
        assert_eq!(died(1, SOON), Some(AfterDeath::Again));
        assert_eq!(died(59, LONG * 2), Some(AfterDeath::Again));
        assert_eq!(died(1, LONG * 2), Some(AfterDeath::Rest));
        assert_eq!(died(59, LONG * 2), Some(AfterDeath::Again));
    }
}
