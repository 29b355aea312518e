//! Formats the counts as a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context as _, Result};
use testing::faults::Kind;

use super::round::Outcome;
use rig::process::repository;

/// Numbers of rounds by outcome.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) right: u64,
    pub(super) refused: u64,
    pub(super) unreached: u64,
    pub(super) wrong: u64,
}

impl Counts {
    pub(super) fn add(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Right => self.right += 1,
            Outcome::Refused(_) => self.refused += 1,
            Outcome::Unreached => self.unreached += 1,
            Outcome::Wrong(_) => self.wrong += 1,
        }
    }

    /// Returns the number of rounds in which a call failed.
    const fn failed(&self) -> u64 {
        self.right + self.refused + self.wrong
    }

    fn text(&self) -> String {
        if self.failed() == 0 {
            return String::from("-");
        }
        let wrong = if self.wrong == 0 { String::new() } else { format!(", {} wrong", self.wrong) };
        format!("{}: {} / {}{wrong}", self.failed(), self.right, self.refused)
    }

    /// Parses the output of [`text`](Self::text), which does not include calls that were not reached.
    fn parse(text: &str) -> Option<Self> {
        if text == "-" {
            return Some(Self::default());
        }
        let (_, text) = text.split_once(": ")?;
        let (text, wrong) = match text.split_once(", ") {
            Some((text, wrong)) => (text, wrong.strip_suffix(" wrong")?.parse().ok()?),
            None => (text, 0),
        };
        let (right, refused) = text.split_once(" / ")?;
        Some(Self {
            right: right.parse().ok()?,
            refused: refused.parse().ok()?,
            unreached: 0,
            wrong,
        })
    }
}

/// The counts of a verb, in the order of [`Kind::ALL`].
type Row = [Counts; Kind::ALL.len()];

#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) rows: BTreeMap<String, Row>,
    pub(super) failures: u64,
}

impl Report {
    pub(super) fn row(&self, verb: &str) -> String {
        let counts = self.rows.get(verb).copied().unwrap_or_default();
        let texts =
            Kind::ALL.map(|kind| format!("{} {}", kind.name(), counts[kind.index()].text()));
        texts.join(", ")
    }

    pub(super) fn sum(&self) -> String {
        let all = self.rows.values().flatten();
        let sum = all.fold(Counts::default(), |sum, it| Counts {
            right: sum.right + it.right,
            refused: sum.refused + it.refused,
            unreached: sum.unreached + it.unreached,
            wrong: sum.wrong + it.wrong,
        });
        format!(
            "{} rounds with a call that failed: {} right, {} refused, {} wrong",
            sum.failed(),
            sum.right,
            sum.refused,
            sum.wrong,
        )
    }

    /// Writes the rows to the table of docs/faults.md, which keeps the rows of other verbs.
    pub(super) fn publish(&self, most: Option<u64>) -> Result<()> {
        let path = repository().join("docs/faults.md");
        let text = fs::read_to_string(&path)?;
        fs::write(path, self.published(&text, most)?)?;
        Ok(())
    }

    fn published(&self, old: &str, most: Option<u64>) -> Result<String> {
        const HEADING: &str = "## Counts\n";
        let (head, table) = old.split_once(HEADING).context("docs/faults.md has no counts")?;
        let row = |line: &str| {
            let mut cells = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ");
            let (verb, chosen) = (cells.next()?.to_owned(), cells.next()?.to_owned());
            let counts: Vec<_> = cells.map(Counts::parse).collect::<Option<_>>()?;
            Some((verb, (chosen, Row::try_from(counts).ok()?)))
        };
        let mut rows: BTreeMap<_, _> = table.lines().filter_map(row).collect();
        let chosen = most.map_or_else(|| "all".to_owned(), |it| format!("{it} of each kind"));
        rows.extend(self.rows.iter().map(|(verb, row)| (verb.clone(), (chosen.clone(), *row))));
        let mut text = format!(
            "{head}{HEADING}\nCells: rounds: right / refused. *Calls* says how many of a command's calls failed in turn, evenly chosen, for\n\
             each error and mode; `make check-all` takes all.\n\n"
        );
        let names = Kind::ALL.map(Kind::name).join(" | ");
        let line = "---|".repeat(Kind::ALL.len());
        writeln!(text, "| command | calls | {names} |\n|---|---|{line}")?;
        for (verb, (chosen, counts)) in &rows {
            let cells = counts.map(|it| it.text()).join(" | ");
            writeln!(text, "| {verb} | {chosen} | {cells} |")?;
        }
        let rows = rows.into_iter().map(|(verb, (_, row))| (verb, row)).collect();
        let all = Self { rows, failures: 0 };
        writeln!(text, "\n{}.", all.sum())?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_other_verbs_stay() {
        let count = |right, wrong| Counts { right, refused: 7, unreached: 0, wrong };
        let report = |verb: &str, counts| Report {
            rows: BTreeMap::from([(verb.to_owned(), [counts; Kind::ALL.len()])]),
            failures: 0,
        };
        let old =
            "# Title\n\n| error | calls |\n|---|---|\n| EIO | reads |\n\n## Counts\n\nNone.\n";
        let text = report("pull", count(5, 2)).published(old, Some(3)).unwrap();
        let text = report("export", Counts::default()).published(&text, Some(3)).unwrap();
        let text = report("pull", count(6, 1)).published(&text, None).unwrap();
        let cells = |cell: &str| [cell; Kind::ALL.len()].join(" | ");
        assert!(
            text.starts_with("# Title\n\n| error | calls |\n|---|---|\n| EIO | reads |\n"),
            "{text}"
        );
        assert!(
            text.contains(&format!("\n| export | 3 of each kind | {} |\n", cells("-"))),
            "{text}"
        );
        assert!(
            text.contains(&format!("\n| pull | all | {} |\n", cells("14: 6 / 7, 1 wrong"))),
            "{text}"
        );
        assert!(
            text.ends_with("\n84 rounds with a call that failed: 36 right, 42 refused, 6 wrong.\n")
        );
    }
}
