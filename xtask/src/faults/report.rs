//! The counts, as a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anyhow::Result;
use testing::faults::Kind;

use super::round::Outcome;
use crate::process::repository;

/// How many rounds ended how.
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

    /// Rounds in which a call failed.
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
}

#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) rows: BTreeMap<&'static str, [Counts; 5]>,
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
            "{} rounds with a call that failed: {} right, {} refused, {} wrong; in {} more the call was not reached",
            sum.failed(),
            sum.right,
            sum.refused,
            sum.wrong,
            sum.unreached
        )
    }

    pub(super) fn publish(&self) -> Result<()> {
        let path = repository().join("docs/faults.md");
        let old = fs::read_to_string(&path)?;
        let head = old.split_inclusive('\n').take_while(|line| !line.starts_with('|'));
        let mut text: String = head.collect();
        let names = Kind::ALL.map(Kind::name).join(" | ");
        writeln!(text, "| verb | {names} |\n|---|---|---|---|---|---|")?;
        for (verb, counts) in &self.rows {
            let cells = counts.map(|it| it.text()).join(" | ");
            writeln!(text, "| {verb} | {cells} |")?;
        }
        writeln!(text, "\n{}.", self.sum())?;
        fs::write(path, text)?;
        Ok(())
    }
}
