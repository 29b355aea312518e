//! Waits that also end when the free space of a file system changes, of which the kernel sends no event.

use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// How long a process waits if no event arrives.
#[derive(Debug, Default)]
pub struct Pause<'a> {
    /// Maximum time; `None` for no limit.
    pub most: Option<Duration>,
    /// File systems whose free space is checked after each `interval`. A change ends the wait.
    pub watched: Vec<WatchedSpace<'a>>,
    pub interval: Duration,
}

impl From<Option<Duration>> for Pause<'_> {
    fn from(most: Option<Duration>) -> Self {
        Self { most, ..Self::default() }
    }
}

/// A file system whose free space is checked during a wait. The wait goes on as long as both numbers are in their
/// ranges.
#[derive(Debug, Clone)]
pub struct WatchedSpace<'a> {
    /// Any file in the file system.
    pub file: BorrowedFd<'a>,
    /// Blocks that are free for users.
    pub blocks: RangeInclusive<u64>,
    /// Free inodes.
    pub inodes: RangeInclusive<u64>,
}

impl WatchedSpace<'_> {
    /// An error counts as a change, so that the caller finds and reports it.
    fn is_unchanged(&self) -> bool {
        let Ok(now) = rustix::fs::fstatvfs(self.file) else { return false };
        self.blocks.contains(&now.f_bavail) && self.inodes.contains(&now.f_ffree)
    }
}

/// The reason why a wait has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waited {
    /// A descriptor is ready.
    Ready,
    /// The free space of a file system has changed.
    Changed,
    /// The time is over.
    Over,
}

/// A wait in rounds, after each of which the file systems are checked.
#[derive(Debug)]
pub(super) struct Rounds<'a> {
    count: u64,
    /// Time of a round; `None` for no limit.
    step: Option<Timespec>,
    watched: &'a [WatchedSpace<'a>],
}

impl<'a> Rounds<'a> {
    /// Divides the time `most`. Without file systems, it is one round.
    pub(super) fn new(most: Option<Duration>, pause: &'a Pause<'a>) -> Self {
        // A time that is too long for the kernel is no limit.
        let timespec = |time: Duration| Timespec::try_from(time).ok();
        let watched = &*pause.watched;
        if watched.is_empty() {
            return Self { count: 1, step: most.and_then(timespec), watched };
        }
        // A round without time would take all of a processor.
        let step = pause.interval.max(Duration::from_millis(1));
        let step = most.map_or(step, |most| step.min(most));
        let count = most.map_or(u128::MAX, |most| most.as_nanos().div_ceil(step.as_nanos().max(1)));
        Self { count: u64::try_from(count).unwrap_or(u64::MAX), step: timespec(step), watched }
    }

    /// Waits like poll(2). This uses no relocated constant, so [`super::constants::Constants`] can call it.
    #[inline(never)]
    pub(super) fn wait(&self, fds: &mut [PollFd<'_>]) -> Result<Waited, Errno> {
        let mut rest = self.count;
        loop {
            if rustix::event::poll(fds, self.step.as_ref())? > 0 {
                return Ok(Waited::Ready);
            }
            for space in self.watched {
                if !space.is_unchanged() {
                    return Ok(Waited::Changed);
                }
            }
            rest = rest.saturating_sub(1);
            if rest == 0 {
                return Ok(Waited::Over);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    use rustix::event::PollFlags;

    use super::*;

    #[test]
    fn a_wait_ends_by_an_event_a_change_or_its_time() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let directory = std::fs::File::open("/").unwrap();
        let any = || 0..=u64::MAX;
        // No file system has this number of free blocks or inodes.
        let none = || u64::MAX..=u64::MAX;
        let check = |ranges: &[(RangeInclusive<u64>, RangeInclusive<u64>)], expect| {
            let watched = ranges.iter().map(|(blocks, inodes)| WatchedSpace {
                file: directory.as_fd(),
                blocks: blocks.clone(),
                inodes: inodes.clone(),
            });
            let milliseconds = Duration::from_millis;
            let pause = Pause { watched: watched.collect(), interval: milliseconds(1), most: None };
            let mut fds = [PollFd::new(&reader, PollFlags::IN)];
            let waited = Rounds::new(Some(milliseconds(5)), &pause).wait(&mut fds);
            assert_eq!(waited, Ok(expect), "{ranges:?}");
        };
        check(&[], Waited::Over);
        check(&[(any(), any())], Waited::Over);
        check(&[(none(), any())], Waited::Changed);
        check(&[(any(), none())], Waited::Changed);
        check(&[(any(), any()), (any(), none())], Waited::Changed);
        writer.write_all(b"a").unwrap();
        check(&[(none(), none())], Waited::Ready);
    }

    #[test]
    fn the_rounds_take_the_whole_time() {
        let directory = std::fs::File::open("/").unwrap();
        let file = directory.as_fd();
        let any = 0..=u64::MAX;
        let watched = vec![WatchedSpace { file, blocks: any.clone(), inodes: any }];
        let milliseconds = Duration::from_millis;
        for (most, interval, count, step) in [
            (Some(1000), 250, 4, 250),
            (Some(1001), 250, 5, 250),
            (Some(100), 250, 1, 100),
            (Some(3), 0, 3, 1),
            (None, 250, u64::MAX, 250),
        ] {
            let interval = milliseconds(interval);
            let pause = Pause { most: None, watched: watched.clone(), interval };
            let rounds = Rounds::new(most.map(milliseconds), &pause);
            let expect = Timespec::try_from(milliseconds(step)).unwrap();
            assert_eq!((rounds.count, rounds.step), (count, Some(expect)), "{most:?}");
        }
        let plain = Pause::default();
        for most in [None, Some(milliseconds(7))] {
            let rounds = Rounds::new(most, &plain);
            let expect = most.map(|it| Timespec::try_from(it).unwrap());
            assert_eq!((rounds.count, rounds.step), (1, expect));
        }
    }
}
