//! The page of the results. A run of some files keeps the other files' sections.

use std::collections::{BTreeMap, BTreeSet};

use super::tap::{Counts, FileResult, Outcome};

/// Text before the counts.
const HEAD: &str = "\
# Podman's own tests

`cargo xtask podman-tests` runs system tests of podman's repository (`test/system`) with Quire in the place of podman,
and writes this page. Root runs them, and an ordinary user those of pasta, because they skip themselves for root. The
tests are not changed. `xtask/podman-tests/podman.sh`, a script of at most 100 lines, translates commands of their setup
and teardown; commands under test reach Quire as they are. Their image is made of programs of the host, because the
original is in a registry. A `run.toml` with `rm = false` keeps containers in the foreground, as podman does, and with
`network = \"none\"` names Quire's default.

Many tests compare whole messages, or podman's own exit codes. Such a test fails even if the command did what it should,
and so does a test with many steps of which one needs an option that Quire lacks. Each test that does not pass is listed
below with its first cause. [For docker and podman users](docker-users.md) has the differences by command.
";

/// A test that does not pass, as it is on the page.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    /// The number and the name.
    test: String,
    is_skipped: bool,
    cause: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Section {
    counts: Counts,
    lines: Vec<Line>,
}

/// The page: a section for each file, by name.
#[derive(Debug, Default)]
pub(super) struct Page(BTreeMap<String, Section>);

impl Page {
    /// Reads a page that [`text`](Self::text) returned; an empty text is an empty page.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut page = Self::default();
        for section in text.split("\n## ").skip(1) {
            let (name, body) = section.split_once('\n')?;
            if name.ends_with(".bats") {
                page.0.insert(name.to_owned(), Section::parse(body)?);
            }
        }
        Some(page)
    }

    /// Returns the page with new results of some files.
    pub(super) fn with(mut self, results: &[FileResult]) -> Self {
        for result in results {
            self.0.insert(result.name.clone(), Section::of(result));
        }
        self
    }

    #[cfg(test)]
    pub(super) fn files(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{HEAD}\n## Counts\n\n");
        text += "| file | tests | passed | skipped | failed |\n|---|---|---|---|---|\n";
        let mut all = Counts::default();
        let mut causes: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, section) in &self.0 {
            all.add(section.counts);
            text += &row(name, section.counts);
            for line in section.lines.iter().filter(|it| !it.is_skipped) {
                *causes.entry(&line.cause).or_default() += 1;
            }
        }
        text += &row("all", all);
        let run = all.total() - all.skipped;
        // A page without results has no share.
        let share = (all.passed * 100).checked_div(run).unwrap_or_default();
        text += &format!("\n{} of the {run} tests that ran pass ({share} %).\n", all.passed);
        text += "\n## Causes\n\nThe causes of failed tests, by number of tests:\n\n| tests | cause |\n|---|---|\n";
        let mut causes: Vec<_> = causes.into_iter().collect();
        causes.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        for (cause, count) in causes {
            text += &format!("| {count} | {cause} |\n");
        }
        for (name, section) in &self.0 {
            text += &format!("\n## {name}\n\n{}.\n", section.counts);
            if !section.lines.is_empty() {
                text += "\n| test | | cause |\n|---|---|---|\n";
            }
            for line in &section.lines {
                let outcome = if line.is_skipped { "skipped" } else { "failed" };
                text += &format!("| {} | {outcome} | {} |\n", line.test, line.cause);
            }
        }
        text
    }
}

fn row(name: &str, counts: Counts) -> String {
    let Counts { passed, skipped, failed } = counts;
    format!("| {name} | {} | {passed} | {skipped} | {failed} |\n", counts.total())
}

impl Section {
    fn of(result: &FileResult) -> Self {
        let mut lines = Vec::new();
        for test in &result.tests {
            if test.outcome != Outcome::Passed {
                lines.push(Line {
                    test: format!("{} {}", test.number, cell(&test.name)).trim().to_owned(),
                    is_skipped: matches!(test.outcome, Outcome::Skipped(_)),
                    cause: cell(&test.cause),
                });
            }
        }
        Self { counts: result.counts(), lines }
    }

    fn parse(body: &str) -> Option<Self> {
        let counts = body.lines().find(|it| it.ends_with(" failed."))?;
        let mut numbers = counts.split(", ").map(|it| it.split(' ').next()?.parse().ok());
        let mut number = || numbers.next().flatten();
        let counts = Counts { passed: number()?, skipped: number()?, failed: number()? };
        let mut lines = Vec::new();
        for line in body.lines().filter(|it| it.starts_with("| ")).skip(1) {
            let line = line.strip_prefix("| ")?.strip_suffix(" |")?;
            let mut cells = line.split(" | ");
            let (test, outcome, cause) = (cells.next()?, cells.next()?, cells.next()?);
            let is_skipped = outcome == "skipped";
            lines.push(Line { test: test.to_owned(), is_skipped, cause: cause.to_owned() });
        }
        Some(Self { counts, lines })
    }
}

/// Returns a text for a cell of a table.
fn cell(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        match letter {
            // Names of tests contain words in angle brackets, stars and links, which they do not mean.
            '<' | '>' | '*' | '_' | '[' | ']' => out.extend(['\\', letter]),
            '|' => out.push('/'),
            _ => out.push(letter),
        }
    }
    out
}

/// Returns the lines that only one of two texts has, each with its sign.
pub(super) fn differences(old: &str, new: &str) -> Vec<String> {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (old, new) = (lines(old), lines(new));
    let gone = old.difference(&new).map(|it| format!("-{it}"));
    let added = new.difference(&old).map(|it| format!("+{it}"));
    gone.chain(added).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Vec<FileResult> {
        let mut file = FileResult::parse(
            "045-start.bats",
            "1..4\nok 1 [045] a\nnot ok 2 [045] b <x> | y\nok 3 [045] c # skip no ssh\n",
        );
        file.tests[1].cause = String::from("option --x");
        file.tests[2].cause = String::from("no ssh");
        file.tests[3].cause = String::from("option --x");
        vec![file, FileResult::parse("050-stop.bats", "1..1\nok 1 [050] a\n")]
    }

    #[test]
    fn a_page_is_read_and_written() {
        let text = Page::default().with(&results()).text();
        for expect in [
            "| 045-start.bats | 4 | 1 | 1 | 2 |\n",
            "| all | 5 | 2 | 1 | 2 |\n",
            "\n2 of the 4 tests that ran pass (50 %).\n",
            "| 2 | option --x |\n",
            "\n## 045-start.bats\n\n1 passed, 1 skipped, 2 failed.\n",
            "| 2 b \\<x\\> / y | failed | option --x |\n| 3 c | skipped | no ssh |\n| 4 | failed | option --x |\n",
            "\n## 050-stop.bats\n\n1 passed, 0 skipped, 0 failed.\n",
        ] {
            assert!(text.contains(expect), "{expect}\nis not in\n{text}");
        }
        assert_eq!(Page::parse(&text).unwrap().text(), text);
    }

    #[test]
    fn a_run_of_one_file_keeps_the_others() {
        let text = Page::default().with(&results()).text();
        let mut one = FileResult::parse("050-stop.bats", "1..1\nnot ok 1 [050] a\n");
        one.tests[0].cause = String::from("new");
        let new = Page::parse(&text).unwrap().with(&[one]).text();
        assert!(new.contains("| 3 c | skipped | no ssh |"), "{new}");
        let differences = differences(&text, &new);
        assert!(differences.contains(&String::from("+| 1 a | failed | new |")), "{differences:?}");
        assert!(!differences.iter().any(|it| it.contains("045-start")), "{differences:?}");
    }
}
