//! Versions of container engines.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;

/// A version of an engine: of containerd, Docker or k3s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EngineVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) patch: u32,
}

impl EngineVersion {
    pub(crate) const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// This version, unless it is older than the oldest one that can be configured.
    pub(crate) fn not_before(self, oldest: Self, engine: &str) -> anyhow::Result<Self> {
        if self < oldest {
            bail!("{engine} {self} is too old: {oldest} is the oldest that `--print-config` knows");
        }
        Ok(self)
    }
}

impl fmt::Display for EngineVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.patch > 0 { write!(f, ".{}", self.patch) } else { Ok(()) }
    }
}

impl FromStr for EngineVersion {
    type Err = String;

    /// Also as engines print it: `v2.4.2`, `28.5.2+dfsg1`, `v1.32.2+k3s1`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("\"{}\" is no version of an engine: 1.6 or 2.4.2 would be", text.escape_debug())
        };
        let numbers =
            text.trim_start_matches('v').split(['+', '-', '~']).next().unwrap_or_default();
        let mut numbers = numbers.split('.').map(str::parse);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
            return Err(wrong());
        };
        let patch = numbers.next().transpose().map_err(|_no_number| wrong())?;
        Ok(Self::new(major, minor, patch.unwrap_or(0)))
    }
}
