//! The kernel's version, for messages and for features that cannot be probed.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    /// First number of the version: 6 in 6.18.
    pub major: u32,
    /// Second number of the version: 18 in 6.18.
    pub minor: u32,
}

impl KernelVersion {
    /// Returns the version of the running kernel. `None` if uname(2) reports none that can be parsed.
    #[must_use]
    pub fn running() -> Option<Self> {
        Self::parse(&rustix::system::uname().release().to_string_lossy())
    }

    fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some(Self { major: numbers.next()?.ok()?, minor: numbers.next()?.ok()? })
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::KernelVersion;

    #[track_caller]
    fn check(release: &str, expect: Option<(u32, u32)>) {
        let expect = expect.map(|(major, minor)| KernelVersion { major, minor });
        assert_eq!(KernelVersion::parse(release), expect);
    }

    #[test]
    fn releases() {
        check("6.18.44-custom+", Some((6, 18)));
        check("7.0-rc3", Some((7, 0)));
        check("5.14.0-503.el9.x86_64", Some((5, 14)));
        check("6.12+deb13-amd64", Some((6, 12)));
        check("6", None);
        check("", None);
        check("linux", None);
    }

    #[test]
    fn order() {
        let version = |major, minor| KernelVersion { major, minor };
        assert!(version(6, 5) < version(6, 15));
        assert!(version(6, 18) < version(7, 0));
    }
}
