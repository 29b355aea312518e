//! `--group-add`, `--sysctl`, `--umask` and `--oom-score-adj`: settings of a container's processes.

use anyhow::bail;
use clap::Args;
use container::bundle::process_settings::{ProcessSettings, SysctlError, parse_sysctl};
use container::runtime::caller_fds::FIRST;
use kernel::process::left_open;

/// Value of `--group-add` with which processes keep the caller's groups.
const KEEP_GROUPS: &str = "keep-groups";

/// A kernel parameter with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sysctl {
    name: String,
    value: String,
}

fn sysctl(text: &str) -> Result<Sysctl, SysctlError> {
    parse_sysctl(text).map(|(name, value)| Sysctl { name, value })
}

/// Parses a file mode mask. Source: podman-run(1), `--umask`.
fn umask(text: &str) -> Result<u32, String> {
    let is_octal = text.bytes().all(|it| (b'0'..=b'7').contains(&it));
    let mask = u32::from_str_radix(text, 8).ok().filter(|it| is_octal && *it <= 0o777);
    mask.ok_or_else(|| "use an octal mask from 0000 to 0777, for example 0027".to_owned())
}

// Settings of a container's processes.
#[derive(Debug, Args)]
pub(crate) struct ProcessOptions {
    /// Add the user to these groups, by name or number. `keep-groups` keeps the caller's groups instead (only crun)
    #[arg(long, value_name = "GROUP[,…]", value_delimiter = ',')]
    pub(crate) group_add: Vec<String>,
    /// Set a kernel parameter of the container, such as net.core.somaxconn=1024
    #[arg(long, value_name = "NAME=VALUE", value_parser = sysctl)]
    pub(crate) sysctl: Vec<Sysctl>,
    /// Set the file mode mask of programs, by default 0022
    #[arg(long, value_name = "MASK", value_parser = umask)]
    pub(crate) umask: Option<u32>,
    /// Set how readily the kernel kills the container if the host is out of memory, from -1000 to 1000. Only root may
    /// set less than the caller's own value
    #[arg(
        long,
        value_name = "NUMBER",
        allow_hyphen_values = true,
        value_parser = clap::value_parser!(i16).range(-1000..=1000)
    )]
    pub(crate) oom_score_adj: Option<i16>,
}

// Descriptors of the caller for the program.
#[derive(Debug, Args)]
pub(crate) struct Descriptors {
    /// Also pass on the first COUNT descriptors of the caller behind standard error, those from 3 on. The caller must
    /// trust the program with these files
    #[arg(long, value_name = "COUNT", default_value_t = 0, hide_default_value = true)]
    preserve_fds: u8,
    /// Also pass on these descriptors of the caller, such as 9,40 (only crun)
    #[arg(
        long,
        value_name = "FD[,…]",
        value_delimiter = ',',
        value_parser = clap::value_parser!(i32).range(3..1024)
    )]
    preserve_fd: Vec<i32>,
}

impl Descriptors {
    /// Returns the numbers. Those of a row that are not open are left out, as in podman.
    pub(crate) fn numbers(&self) -> Vec<i32> {
        let row =
            (FIRST..FIRST + i32::from(self.preserve_fds)).filter(|it| left_open(*it).is_some());
        row.chain(self.preserve_fd.iter().copied()).collect()
    }
}

impl ProcessOptions {
    /// Returns the settings. The last value of a kernel parameter counts.
    pub(crate) fn wish(&self) -> anyhow::Result<ProcessSettings> {
        let keep_groups = self.group_add.iter().any(|it| it == KEEP_GROUPS);
        if keep_groups && self.group_add.len() > 1 {
            bail!("--group-add {KEEP_GROUPS}: it keeps the caller's groups, and none can be added");
        }
        let sysctl = self.sysctl.iter().map(|it| (it.name.clone(), it.value.clone())).collect();
        Ok(ProcessSettings {
            groups: if keep_groups { Vec::new() } else { self.group_add.clone() },
            keep_groups,
            sysctl,
            umask: self.umask,
            oom_score: self.oom_score_adj,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_octal() {
        for (text, expect) in [("0", Some(0)), ("022", Some(0o22)), ("0777", Some(0o777))] {
            assert_eq!(umask(text).ok(), expect, "{text}");
        }
        for text in ["", "8", "+7", "-1", "0o22", "1000", "1777"] {
            assert!(umask(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_callers_groups_stand_alone() {
        let of = |groups: &[&str]| ProcessOptions {
            group_add: groups.iter().map(|&it| it.to_owned()).collect(),
            sysctl: ["net.a=1", "net.a=2"].map(|it| sysctl(it).unwrap()).to_vec(),
            umask: None,
            oom_score_adj: None,
        };
        let kept = of(&["keep-groups"]).wish().unwrap();
        assert_eq!((kept.keep_groups, kept.groups.len()), (true, 0));
        assert_eq!(kept.sysctl["net.a"], "2");
        let added = of(&["5", "adm"]).wish().unwrap();
        assert_eq!(
            (added.keep_groups, added.groups),
            (false, vec!["5".to_owned(), "adm".to_owned()])
        );
        assert!(of(&["5", "keep-groups"]).wish().is_err());
    }
}
