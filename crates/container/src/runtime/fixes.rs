//! Security fixes of runtimes, and the releases that contain them.

use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::boot_cache::Notes;
use crate::runtime::Runtime;

/// Vulnerabilities that a runtime fixed in the same releases.
#[derive(Debug)]
struct Fix {
    /// Name of the runtime in its `--version` output.
    runtime: &'static str,
    vulnerabilities: &'static [&'static str],
    /// First release of each series with the fix, oldest first. Later series have the fix.
    releases: &'static [&'static str],
}

/// Sources: NEWS of crun 1.28; release notes of runc 1.2.8, 1.3.3, 1.4.0-rc.3 and 1.3.6, 1.4.3.
const FIXES: [Fix; 3] = [
    Fix { runtime: "crun", vulnerabilities: &["CVE-2026-47766"], releases: &["1.28"] },
    Fix {
        runtime: "runc",
        vulnerabilities: &["CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"],
        releases: &["1.2.8", "1.3.3", "1.4.0-rc.3"],
    },
    Fix { runtime: "runc", vulnerabilities: &["CVE-2026-41579"], releases: &["1.3.6", "1.4.3"] },
];

/// A version of a runtime. A release candidate is ordered before its release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct RuntimeVersion {
    series: (u32, u32),
    patch: u32,
    /// Number of the release candidate, or `u32::MAX` for the release.
    candidate: u32,
}

impl RuntimeVersion {
    /// Parses `1.2.8`, `1.28`, `1.4.0-rc.3` and `1.1.5+ds1`.
    fn read(text: &str) -> Option<Self> {
        let text = text.split(['+', '~']).next()?;
        let (numbers, candidate) = match text.split_once("-rc") {
            Some((numbers, candidate)) => {
                (numbers, candidate.trim_start_matches('.').parse().ok()?)
            }
            None => (text.split('-').next()?, u32::MAX),
        };
        let mut numbers = numbers.split('.').map(str::parse);
        let series = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        let patch = numbers.next().unwrap_or(Ok(0)).ok()?;
        Some(Self { series, patch, candidate })
    }
}

impl Fix {
    /// Whether this version is older than the fix.
    fn is_missing_in(&self, version: RuntimeVersion) -> bool {
        let releases = self.releases.iter().filter_map(|it| RuntimeVersion::read(it));
        let releases: Vec<_> = releases.collect();
        match releases.iter().find(|it| it.series == version.series) {
            Some(fixed) => version < *fixed,
            None => releases.last().is_some_and(|it| version < *it),
        }
    }
}

/// A runtime that is older than fixes of vulnerabilities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OldRuntime {
    path: PathBuf,
    version: String,
    /// Vulnerabilities, with the releases that fixed them.
    missing: Vec<(String, String)>,
}

impl fmt::Display for OldRuntime {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} reports version {}, which is older than ",
            self.path.display(),
            self.version
        )?;
        for (number, (vulnerabilities, releases)) in self.missing.iter().enumerate() {
            let start = if number == 0 { "" } else { ", and than " };
            write!(out, "{start}the fix of {vulnerabilities} ({releases})")?;
        }
        write!(out, ": update it, unless your distribution's package has the fixes already")
    }
}

impl Runtime {
    /// Returns the fixes that this runtime lacks by its `--version`, or `None` if it has all known fixes or prints no
    /// version. Distributions add fixes to old versions without changing the version number.
    #[must_use]
    pub fn missing_fixes(&self) -> Option<OldRuntime> {
        let mut command = Command::new(&self.path);
        command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null());
        let output = command.output().ok()?.stdout;
        let (version, missing) = missing(std::str::from_utf8(&output).ok()?)?;
        Some(OldRuntime { path: self.path.clone(), version, missing })
    }

    /// Like [`missing_fixes`](Self::missing_fixes), but returns them only once per program and boot, recorded in
    /// `notes`.
    #[must_use]
    pub fn missing_fixes_once(&self, notes: &Notes) -> Option<OldRuntime> {
        let name = self.note("fixes")?;
        if notes.read(&name, 0).is_ok() {
            return None;
        }
        let found = self.missing_fixes();
        match notes.write(&name, b"") {
            Ok(()) => found,
            Err(error) => {
                // Without a note, every run would print the fixes.
                tracing::debug!(name, %error, "not reporting the runtime's missing fixes");
                None
            }
        }
    }
}

/// Returns the version in the output of `--version` and the missing fixes, or `None` if no fixes are missing.
fn missing(output: &str) -> Option<(String, Vec<(String, String)>)> {
    let (name, text) = output.lines().next()?.split_once(" version ")?;
    let version = RuntimeVersion::read(text.trim())?;
    let missing = FIXES.iter().filter(|it| it.runtime == name && it.is_missing_in(version));
    let missing: Vec<_> =
        missing.map(|it| (it.vulnerabilities.join(", "), it.releases.join(", "))).collect();
    (!missing.is_empty()).then(|| (text.trim().to_owned(), missing))
}

#[cfg(test)]
mod tests {

    use super::*;

    /// The versions are from the advisories of the CVEs.
    #[test]
    fn a_version_lacks_the_fixes_of_later_ones() {
        let check = |output: &str, expect: usize| {
            assert_eq!(missing(output).map_or(0, |it| it.1.len()), expect, "{output}");
        };
        for (version, expect) in
            [("1.8.1", 1), ("1.27.9", 1), ("1.28", 0), ("1.29.1", 0), ("2.0", 0)]
        {
            check(&format!("crun version {version}\ncommit: x\n"), expect);
        }
        for (version, expect) in [
            ("1.1.5+ds1", 2),
            ("1.2.7", 2),
            ("1.2.8", 1),
            ("1.3.2", 2),
            ("1.3.3", 1),
            ("1.3.6", 0),
            ("1.4.0-rc.2", 2),
            ("1.4.0-rc.3", 1),
            ("1.4.0", 1),
            ("1.4.3", 0),
            ("1.5.0-rc.1", 0),
        ] {
            check(&format!("runc version {version}\n"), expect);
        }
        for other in
            ["", "runc", "runc version x", "youki version 0.1.0", "runsc version release-1"]
        {
            check(other, 0);
        }
    }

    #[test]
    fn a_runtime_is_named_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crun");
        testing::script(&path, "#!/bin/sh\necho crun version 1.8.1\n");
        let runtime = Runtime::at(path.clone());
        let expect = format!(
            "{} reports version 1.8.1, which is older than the fix of CVE-2026-47766 (1.28): \
             update it, unless your distribution's package has the fixes already",
            path.display()
        );
        assert_eq!(runtime.missing_fixes().unwrap().to_string(), expect);
        let kept = Notes::new(&folder.path().join("notes"), rustix::process::geteuid().as_raw());
        assert_eq!(runtime.missing_fixes_once(&kept).unwrap().to_string(), expect);
        assert_eq!(runtime.missing_fixes_once(&kept), None);
        // A changed program is reported again.
        testing::script(&path, "#!/bin/sh\necho crun version 1.8.2\n");
        assert!(runtime.missing_fixes_once(&kept).is_some());
    }
}
