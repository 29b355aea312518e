//! The results that bats prints, in the Test Anything Protocol.

use std::fmt;

/// The outcome of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    /// Skipped by the test itself, for this reason.
    Skipped(String),
    Failed,
    /// The file's time limit ended it, or a test before it.
    Unfinished,
}

/// A test of a file.
#[derive(Debug, Clone)]
pub(super) struct TestResult {
    /// Place in the file, from 1.
    pub(super) number: usize,
    /// The name; empty if the test did not start.
    pub(super) name: String,
    pub(super) outcome: Outcome,
    /// Lines that the test printed. Passed tests have none.
    pub(super) output: String,
    /// Why it does not pass, for the page.
    pub(super) cause: String,
}

/// All tests of a file.
#[derive(Debug)]
pub(super) struct FileResult {
    pub(super) name: String,
    pub(super) tests: Vec<TestResult>,
}

/// How many tests of a file passed, were skipped and failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    pub(super) skipped: usize,
    pub(super) failed: usize,
}

impl Counts {
    pub(super) const fn total(self) -> usize {
        self.passed + self.skipped + self.failed
    }

    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.skipped += other.skipped;
        self.failed += other.failed;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, skipped, failed } = self;
        write!(out, "{passed} passed, {skipped} skipped, {failed} failed")
    }
}

impl FileResult {
    /// Reads the output of bats. Tests that its plan announces but that have no result are unfinished.
    pub(super) fn parse(name: &str, output: &str) -> Self {
        let mut planned = 0;
        let mut tests: Vec<TestResult> = Vec::new();
        for line in output.lines() {
            if let Some(result) = test_line(line) {
                tests.push(result);
            } else if let Some(count) = line.strip_prefix("1..") {
                planned = count.parse().unwrap_or_default();
            } else if let (Some(text), Some(test)) = (line.strip_prefix('#'), tests.last_mut()) {
                test.output += text.strip_prefix(' ').unwrap_or(text);
                test.output.push('\n');
            }
        }
        // A failure of the suite's setup is a test with the number 1 and without the file's prefix.
        tests.retain(|it| it.number <= planned);
        for number in 1..=planned {
            if !tests.iter().any(|it| it.number == number) {
                let output = String::new();
                let outcome = Outcome::Unfinished;
                let name = String::new();
                tests.push(TestResult { number, name, outcome, output, cause: String::new() });
            }
        }
        Self { name: name.to_owned(), tests }
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for test in &self.tests {
            match test.outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Skipped(_) => counts.skipped += 1,
                Outcome::Failed | Outcome::Unfinished => counts.failed += 1,
            }
        }
        counts
    }
}

/// Reads `ok 7 [045] name # skip reason` and `not ok 7 [045] name`.
fn test_line(line: &str) -> Option<TestResult> {
    let (is_ok, rest) = match line.strip_prefix("not ok ") {
        Some(rest) => (false, rest),
        None => (true, line.strip_prefix("ok ")?),
    };
    let (number, rest) = rest.split_once(' ')?;
    let number = number.parse().ok()?;
    let (name, skipped) = match rest.split_once(" # skip") {
        Some((name, reason)) => (name, Some(reason.trim().to_owned())),
        None => (rest, None),
    };
    // The prefix is the file's number.
    let name = name.split_once("] ").filter(|it| it.0.starts_with('[')).map_or(name, |it| it.1);
    let outcome = match (is_ok, skipped) {
        (true, Some(reason)) => Outcome::Skipped(reason),
        (true, None) => Outcome::Passed,
        (false, _) => Outcome::Failed,
    };
    let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(TestResult { number, name, outcome, output: String::new(), cause: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines are those of bats 1.8.2.
    #[test]
    fn results_of_bats_are_read() {
        let text = "1..4\n\
            ok 1 [045] podman start  twice\n\
            not ok 2 [045] podman start --all\n\
            # (in test file 045-start.bats, line 20)\n\
            # # [teardown]\n\
            ok 3 [045] podman start again # skip [rootful] tests ulimit\n\
            Terminated\n";
        let file = FileResult::parse("045-start.bats", text);
        assert_eq!(file.counts(), Counts { passed: 1, skipped: 1, failed: 2 });
        let names: Vec<_> = file.tests.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["podman start twice", "podman start --all", "podman start again", ""]);
        assert_eq!(file.tests[1].output, "(in test file 045-start.bats, line 20)\n# [teardown]\n");
        assert_eq!(file.tests[2].outcome, Outcome::Skipped(String::from("[rootful] tests ulimit")));
        assert_eq!(file.tests[3].outcome, Outcome::Unfinished);
    }

    #[test]
    fn a_failed_setup_is_no_test_that_passed() {
        let file = FileResult::parse("130-kill.bats", "1..2\nnot ok 1 setup_suite\n# no\n");
        assert_eq!(file.counts(), Counts { passed: 0, skipped: 0, failed: 2 });
    }
}
