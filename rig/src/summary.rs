//! Summarizes test programs from the output of libtest.

use std::collections::BTreeSet;

/// The output of libtest, read line by line.
#[derive(Debug, Default)]
pub struct Summary {
    /// Number of tests that passed, including those that reported a skip.
    pub passed: u64,
    /// Names of failed tests.
    pub failed: Vec<String>,
    /// Reasons of skips, each with the test that reported it.
    pub skipped: BTreeSet<(String, String)>,
    /// Tests that reported a skip, with the number of their program.
    pub skipped_tests: BTreeSet<(usize, String)>,
    /// Number of test programs that have ended. Two programs may have tests of the same name.
    programs: usize,
    /// The test whose output is being read.
    test: String,
    in_failures: bool,
}

impl Summary {
    /// Returns the number of tests that passed, without those that reported a skip.
    pub fn passed(&self) -> u64 {
        let skipped = u64::try_from(self.skipped_tests.len()).unwrap_or(u64::MAX);
        self.passed.saturating_sub(skipped)
    }

    /// Returns the reasons of skips.
    pub fn reasons(&self) -> impl Iterator<Item = &str> {
        self.skipped.iter().map(|(_, reason)| reason.as_str())
    }

    /// Reads a line, and returns the part to show.
    pub fn line<'a>(&mut self, line: &'a str) -> Option<&'a str> {
        if let Some(name) =
            line.strip_prefix("---- ").and_then(|it| it.strip_suffix(" stdout ----"))
        {
            name.clone_into(&mut self.test);
        }
        if let Some((_, reason)) = line.split_once("SKIPPED: ") {
            self.skipped.insert((self.test.clone(), reason.trim().to_owned()));
            self.skipped_tests.insert((self.programs, self.test.clone()));
        }
        if let Some(counts) = line.strip_prefix("test result: ") {
            let count = |what: &str| {
                let words: Vec<_> = counts.split([' ', ';']).collect();
                let at = words.iter().position(|it| *it == what)?;
                words[at.checked_sub(1)?].parse::<u64>().ok()
            };
            self.passed += count("passed").unwrap_or(0);
            self.programs += 1;
            self.in_failures = false;
            self.test.clear();
            return Some(line);
        }
        if let Some(name) = line.strip_prefix("test ").and_then(|it| it.strip_suffix(" ... FAILED"))
        {
            self.failed.push(name.to_owned());
            return Some(line);
        }
        if let Some((name, reason)) =
            line.strip_prefix("test ").and_then(|it| it.split_once(" ... ignored"))
        {
            let reason = reason.trim_start_matches(", ");
            self.skipped.insert((name.to_owned(), format!("#[ignore]: {reason}")));
        }
        // The runner of `cargo xtask test` prints this about processes, mounts and files of a test program.
        if line.starts_with("LEFT BEHIND ") {
            self.failed.push(line.to_owned());
            return Some(line);
        }
        self.in_failures |= line == "failures:";
        (self.in_failures || line.contains("SKIPPED: ")).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_read_as_libtest_writes_them() {
        let text = "\nrunning 4 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... ok\ntest d ... ignored, a measurement\n\n\
            successes:\n\n---- c stdout ----\nSKIPPED: mkfs.erofs is not installed\nSKIPPED: and more\n\n\
            successes:\n    a\n    c\n\nfailures:\n\n---- b stdout ----\nthread panicked\n\nfailures:\n    b\n\n\
            test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
            LEFT BEHIND by e: the file /tmp/f\n";
        let mut summary = Summary::default();
        let shown: Vec<_> = text.lines().filter_map(|line| summary.line(line)).collect();
        assert_eq!(summary.passed, 2);
        assert_eq!(summary.failed, ["b", "LEFT BEHIND by e: the file /tmp/f"]);
        let skipped: Vec<_> =
            summary.skipped.iter().map(|(test, why)| format!("{test}: {why}")).collect();
        assert_eq!(
            skipped,
            ["c: and more", "c: mkfs.erofs is not installed", "d: #[ignore]: a measurement",]
        );
        assert_eq!(summary.skipped_tests.len(), 1);
        assert!(shown.contains(&"thread panicked"));
        assert!(!shown.contains(&"test a ... ok"));
    }
}
