//! The clock from which the kernel takes the times of files, and logs the times of records.
#![expect(unsafe_code, reason = "rustix has clocks only with a feature that nothing else needs")]

use std::sync::OnceLock;

/// Time of the kernel's last tick, in nanoseconds since 1970. Changes of files get this time or a later one.
#[must_use]
pub fn last_tick() -> i128 {
    // Without the clock, every change counts as recent.
    read(libc::CLOCK_REALTIME_COARSE).unwrap_or(i128::MIN)
}

/// Time of day, in nanoseconds since 1970.
#[must_use]
pub fn now() -> i128 {
    read(libc::CLOCK_REALTIME).unwrap_or_else(last_tick)
}

/// Time of a clock, in nanoseconds.
fn read(clock: libc::clockid_t) -> Option<i128> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the struct, which lives through the call.
    let done = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (done == 0).then(|| nanoseconds(&time))
}

/// Length of a tick, in nanoseconds: the resolution of the times of files.
#[must_use]
pub fn tick() -> i128 {
    static TICK: OnceLock<i128> = OnceLock::new();
    *TICK.get_or_init(resolution)
}

fn resolution() -> i128 {
    /// Length of the longest tick of any configuration (`CONFIG_HZ=100`).
    const LONGEST: i128 = 10_000_000;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the struct, which lives through the call.
    let done = unsafe { libc::clock_getres(libc::CLOCK_REALTIME_COARSE, &raw mut time) };
    if done == 0 { nanoseconds(&time).max(1) } else { LONGEST }
}

fn nanoseconds(time: &libc::timespec) -> i128 {
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time is compared with that of a file system, whose changes get the time of the last tick or, since Linux 6.13,
    /// a finer one. A busy machine can miss ticks, so only the fine clock is an upper limit.
    #[test]
    fn files_get_the_time_of_a_tick() {
        use std::os::unix::fs::MetadataExt as _;

        let before = last_tick();
        let file = tempfile::tempfile().unwrap();
        let stat = file.metadata().unwrap();
        let changed = i128::from(stat.ctime()) * 1_000_000_000 + i128::from(stat.ctime_nsec());
        assert!(before <= changed, "{before} {changed}");
        let now = read(libc::CLOCK_REALTIME).unwrap();
        assert!(changed <= now, "{changed} {now}");
        assert!((1..=10_000_000).contains(&tick()), "{}", tick());
    }
}
