//! `--log-size`, `--log-driver` and `--log-opt`: how much of a container's output is kept.

use std::num::{NonZeroU32, NonZeroU64};
use std::str::FromStr;

use anyhow::bail;
use clap::Args;
use container::life::log::SIZE;

use crate::args::writable::bytes;

const DEFAULT: LogSize = LogSize(Some(SIZE));

/// Maximum size of a log, in bytes; `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogSize(Option<NonZeroU64>);

impl FromStr for LogSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" | "unlimited" => Ok(Self(None)),
            _ => match bytes(text)? {
                // The log consists of two files, each of half the size. A full file is renamed.
                size if size.get() < 4096 => Err("a log has at least 4096 bytes".to_owned()),
                size => Ok(Self(Some(size))),
            },
        }
    }
}

/// The ways to keep output that Quire has, in the words of docker and podman.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogDriver {
    /// The log of Quire, a file.
    File,
    Off,
}

impl FromStr for LogDriver {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "k8s-file" | "json-file" | "local" => Ok(Self::File),
            "none" => Ok(Self::Off),
            "journald" | "syslog" => {
                Err("Quire does not write to the log of the system: `systemd-run quire run …` \
                without --detach does, because the output of a service goes there"
                    .to_owned())
            }
            "passthrough" | "passthrough-tty" => {
                Err("leave out --detach: a container in the foreground has your standard streams"
                    .to_owned())
            }
            _ => Err("use k8s-file, json-file or none".to_owned()),
        }
    }
}

// The log of a container.
#[derive(Debug, Args)]
pub(crate) struct LogOptions {
    /// Limit the log of a detached container to this size, at least 4 KiB; by default 64m. At the limit, the older half
    /// is dropped. 0 means no limit
    #[arg(long, value_name = "SIZE")]
    pub(crate) log_size: Option<LogSize>,
    /// Keep the output of a detached container in Quire's log, `k8s-file` or `json-file`, or nowhere, `none`
    #[arg(long, value_name = "DRIVER")]
    log_driver: Option<LogDriver>,
    /// Accept `max-size=SIZE` for --log-size, and `max-file=NUMBER`, by which the size is multiplied
    #[arg(long, value_name = "NAME=VALUE", conflicts_with = "log_size")]
    log_opt: Vec<String>,
}

impl LogOptions {
    /// Whether the log keeps nothing.
    pub(crate) fn is_off(&self) -> bool {
        self.log_driver == Some(LogDriver::Off)
    }

    /// Returns the limit in bytes; `None` means no limit.
    pub(crate) fn limit(&self) -> anyhow::Result<Option<NonZeroU64>> {
        let (mut size, mut files) = (None, NonZeroU64::MIN);
        for text in &self.log_opt {
            match text.split_once('=') {
                Some(("max-size", "-1")) => size = Some(LogSize(None)),
                Some(("max-size", value)) => match value.parse() {
                    Ok(parsed) => size = Some(parsed),
                    Err(error) => bail!("--log-opt {text}: {error}"),
                },
                Some(("max-file", value)) => match value.parse::<NonZeroU32>() {
                    Ok(parsed) => files = parsed.into(),
                    Err(_) => bail!("--log-opt {text}: use a number of files, at least 1"),
                },
                _ => bail!("--log-opt {text}: use max-size=SIZE or max-file=NUMBER"),
            }
        }
        // As in docker, a number of files counts only together with a size.
        let size = size.map(|LogSize(size)| LogSize(size.map(|it| it.saturating_mul(files))));
        Ok(self.log_size.or(size).unwrap_or(DEFAULT).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(size: Option<&str>, options: &[&str]) -> anyhow::Result<Option<u64>> {
        let log_opt = options.iter().map(|&it| it.to_owned()).collect();
        let log_size = size.map(|it| it.parse().unwrap());
        let options = LogOptions { log_size, log_driver: None, log_opt };
        Ok(options.limit()?.map(NonZeroU64::get))
    }

    /// Source: docker, "JSON File logging driver"; podman-run(1), `--log-opt`.
    #[test]
    fn options_of_docker_limit_the_log() {
        for (size, options, expect) in [
            (None, &[][..], Some(64 << 20)),
            (Some("1m"), &[], Some(1 << 20)),
            (Some("0"), &[], None),
            (None, &["max-size=10m"], Some(10 << 20)),
            (None, &["max-size=10mb", "max-file=3"], Some(30 << 20)),
            (None, &["max-file=3"], Some(64 << 20)),
            (None, &["max-size=-1"], None),
        ] {
            assert_eq!(limit(size, options).unwrap(), expect, "{size:?} {options:?}");
        }
        for option in ["tag=x", "max-size", "max-size=much", "max-size=1k", "max-file=0"] {
            let error = limit(None, &[option]).unwrap_err().to_string();
            assert!(error.contains(&format!("--log-opt {option}: ")), "{error}");
        }
    }

    #[test]
    fn drivers_that_do_not_exist_name_the_way_out() {
        for (text, expect) in [
            ("k8s-file", LogDriver::File),
            ("json-file", LogDriver::File),
            ("none", LogDriver::Off),
        ] {
            assert_eq!(text.parse(), Ok(expect));
        }
        for (text, expect) in
            [("journald", "systemd-run"), ("passthrough", "leave out --detach"), ("x", "k8s-file")]
        {
            let error = text.parse::<LogDriver>().unwrap_err();
            assert!(error.contains(expect), "{error}");
        }
    }
}
