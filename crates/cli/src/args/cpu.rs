//! The command line of how much of the processors a container may use.

use std::num::{NonZeroU32, NonZeroU64};

use clap::Args;
use container::bundle::CPU_PERIOD;

/// A number of processors as a quota.
fn quota(text: &str) -> Result<NonZeroU32, String> {
    let number: f64 = text.parse().map_err(|_error| "it is a number, such as 1.5".to_owned())?;
    // Source: Linux `kernel/sched/core.c`, `min_cfs_quota_period`: a millisecond, a hundredth of the period.
    if !(0.01..=10_000.0).contains(&number) {
        return Err("it is a number of processors from 0.01 on".to_owned());
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

/// Source: cpuset(7), "List format".
fn list(text: &str) -> Result<String, String> {
    let is_number =
        |it: &str| it.parse::<u16>().is_ok() && it.bytes().all(|it| it.is_ascii_digit());
    let is_range = |it: &str| match it.split_once('-') {
        Some((first, last)) => is_number(first) && is_number(last),
        None => is_number(it),
    };
    match text.split(',').all(is_range) {
        true => Ok(text.to_owned()),
        false => Err("it is a list of processors, such as 0-2,7".to_owned()),
    }
}

// How much of the processors it may use.
#[derive(Debug, Args)]
pub(crate) struct Cpu {
    /// The most processors that it may use, such as 1.5
    #[arg(long, value_name = "NUMBER", value_parser = quota)]
    pub(crate) cpus: Option<NonZeroU32>,
    /// Its share where there are not enough processors; others have 1024
    #[arg(long, value_name = "SHARES")]
    pub(crate) cpu_shares: Option<NonZeroU64>,
    /// Which processors it may use, such as 0-2,7
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
        for text in ["0", "0-2", "0,3-4,7"] {
            assert_eq!(list(text).as_deref(), Ok(text));
        }
        for text in ["", ",", "0-", "-1", "a", "0 1", "0-1-2", "+1"] {
            assert!(list(text).is_err(), "{text}");
        }
    }
}
