//! Parses versions of container engines.

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

/// Represents a number that was not given, which means the newest version. Older engines ignore lines that they do not
/// know.
const NEWEST: u32 = u32::MAX;

impl EngineVersion {
    pub(crate) const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Returns this version, or fails if it is older than the oldest one that can be configured.
    pub(crate) fn not_before(self, oldest: Self, engine: &str) -> anyhow::Result<Self> {
        if self < oldest {
            bail!("{engine} {self} is too old: `--print-config` supports {oldest} and later");
        }
        Ok(self)
    }
}

impl fmt::Display for EngineVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.major)?;
        if self.minor < NEWEST {
            write!(f, ".{}", self.minor)?;
        }
        if (1..NEWEST).contains(&self.patch) { write!(f, ".{}", self.patch) } else { Ok(()) }
    }
}

impl FromStr for EngineVersion {
    type Err = String;

    /// Also parses versions as engines print them: `v2.4.2`, `28.5.2+dfsg1`, `v1.32.2+k3s1`. `28` and `1.7` mean
    /// the newest release of that line.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "\"{}\" is not a version of an engine: use, for example, 1.6 or 2.4.2",
                text.escape_debug()
            )
        };
        let numbers =
            text.trim_start_matches('v').split(['+', '-', '~']).next().unwrap_or_default();
        let mut numbers = numbers.split('.').map(str::parse);
        let Some(Ok(major)) = numbers.next() else {
            return Err(wrong());
        };
        let mut next = || match numbers.next() {
            Some(number) => number.map_err(|_no_number| wrong()),
            None => Ok(NEWEST),
        };
        Ok(Self::new(major, next()?, next()?))
    }
}
