//! Options for a container's use of processors.

use std::num::{NonZeroU32, NonZeroU64};

use clap::Args;
use container::bundle::CPU_PERIOD;

/// Parses a number of processors and returns the quota, in microseconds per [`CPU_PERIOD`].
pub(crate) fn quota(text: &str) -> Result<NonZeroU32, String> {
    let number: f64 = text.parse().map_err(|_error| "use a number, for example 1.5".to_owned())?;
    // Source: Linux `kernel/sched/core.c`, `min_cfs_quota_period`: 1 ms, a hundredth of the period.
    if !(0.01..=10_000.0).contains(&number) {
        return Err("use a number of processors from 0.01 to 10000".to_owned());
    }
    let quota = (number * f64::from(CPU_PERIOD)).round();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the range was checked"
    )]
    let quota = quota as u32;
    NonZeroU32::new(quota).ok_or_else(|| "it is too small".to_owned())
}

/// Parses CPU shares of cgroup v1. Source: Linux `kernel/sched/sched.h`, `MIN_SHARES` and `MAX_SHARES`.
pub(crate) fn shares(text: &str) -> Result<NonZeroU64, String> {
    let number =
        text.parse().ok().filter(|it| (2..=262_144).contains(it)).and_then(NonZeroU64::new);
    number.ok_or_else(|| "use a number from 2 to 262144".to_owned())
}

/// Parses a list of processors. Source: cpuset(7), "List format".
pub(crate) fn list(text: &str) -> Result<String, String> {
    let number = |it: &str| {
        let is_number = !it.is_empty() && it.bytes().all(|it| it.is_ascii_digit());
        if !is_number {
            return Err("use a list of processors, for example 0-2,7".to_owned());
        }
        it.parse::<u16>().map_err(|_error| format!("the largest processor number is {}", u16::MAX))
    };
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if number(first)? > number(last)? {
            return Err(format!("the range {range} ends before it begins"));
        }
    }
    Ok(text.to_owned())
}

// Limits on the container's use of processors.
#[derive(Debug, Args)]
pub(crate) struct Cpu {
    /// Limit the container to the time of this number of processors, for example 1.5
    #[arg(long, value_name = "NUMBER", value_parser = quota)]
    pub(crate) cpus: Option<NonZeroU32>,
    /// Set the container's relative share of busy processors, from 2 to 262144; the default is 1024
    #[arg(long, value_name = "SHARES", value_parser = shares)]
    pub(crate) cpu_shares: Option<NonZeroU64>,
    /// Run only on these processors, for example 0-2,7
    #[arg(long, value_name = "LIST", value_parser = list)]
    pub(crate) cpuset_cpus: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_lists() {
        let found = |text: &str| quota(text).ok().map(NonZeroU32::get);
        assert_eq!(
            ["1", "0.5", "0.01", "64"].map(found),
            [100_000, 50_000, 1000, 6_400_000].map(Some)
        );
        for text in ["", "0", "0.001", "-1", "x", "NaN", "inf", "1e9"] {
            assert_eq!(found(text), None, "{text}");
        }
        for text in ["0", "0-2", "0,3-4,7", "3-3", "65535"] {
            assert_eq!(list(text).as_deref(), Ok(text));
        }
        for text in ["", ",", "0-", "-1", "a", "0 1", "0-1-2", "+1"] {
            assert!(list(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_out_of_bounds_names_them() {
        let refused = |text: &str| list(text).unwrap_err();
        assert_eq!(refused("1-0"), "the range 1-0 ends before it begins");
        assert_eq!(refused("0,7-3"), "the range 7-3 ends before it begins");
        assert_eq!(refused("65536"), "the largest processor number is 65535");
        assert!(quota("10001").unwrap_err().contains("from 0.01 to 10000"));
        for text in ["2", "1024", "262144"] {
            assert_eq!(shares(text).map(|it| it.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "0", "1", "-1", "262145", "1.5", "x"] {
            assert_eq!(shares(text).unwrap_err(), "use a number from 2 to 262144", "{text}");
        }
    }
}
