//! Writes a bench's results as a dated Markdown page, and the same numbers as JSON.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use rig::figures;
use rig::process::repository;

use super::measure::{Memory, Outcome};
use super::proc::field;
use crate::command::run;

/// A table of contestants' times and memory.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) memory: Memory,
    pub(super) runs: usize,
    pub(super) outcomes: Vec<Outcome>,
}

/// Unit of a table's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Bytes, shown as MB.
    Megabytes,
    /// Bytes, shown as kB.
    Kilobytes,
    /// Bytes per second, shown as MB/s.
    MegabytesPerSecond,
    /// Nanoseconds, shown as ms.
    Milliseconds,
    /// Nanoseconds, shown as µs.
    Microseconds,
    /// A number of events.
    Times,
    /// Percent.
    Percent,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Self::Megabytes => "MB",
            Self::Kilobytes => "kB",
            Self::MegabytesPerSecond => "MB/s",
            Self::Milliseconds => "ms",
            Self::Microseconds => "µs",
            Self::Times => "",
            Self::Percent => "%",
        }
    }

    fn show(self, value: u64) -> String {
        match self {
            Self::Megabytes => format!("{:.1}", megabytes(value)),
            Self::MegabytesPerSecond => format!("{:.0}", megabytes(value)),
            Self::Kilobytes => format!("{:.1}", megabytes(value.saturating_mul(1000))),
            Self::Milliseconds => milliseconds(Duration::from_nanos(value)),
            Self::Microseconds => {
                format!("{:.1}", Duration::from_nanos(value).as_secs_f64() * 1e6)
            }
            Self::Times | Self::Percent => value.to_string(),
        }
    }
}

/// A table of other numbers, such as sizes, which do not vary between runs, or percentiles.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) title: String,
    pub(super) unit: Unit,
    pub(super) columns: Vec<&'static str>,
    /// Names and numbers of the rows; each row has one number for each column.
    pub(super) rows: Vec<(String, Vec<u64>)>,
}

impl Sizes {
    pub(super) fn new(
        title: impl Into<String>,
        unit: Unit,
        columns: impl Into<Vec<&'static str>>,
        rows: Vec<(String, Vec<u64>)>,
    ) -> Self {
        Self { title: title.into(), unit, columns: columns.into(), rows }
    }

    /// A table of one row.
    pub(super) fn one(
        title: impl Into<String>,
        unit: Unit,
        columns: impl Into<Vec<&'static str>>,
        name: &str,
        values: Vec<u64>,
    ) -> Self {
        Self::new(title, unit, columns, vec![(name.to_owned(), values)])
    }
}

/// Results of a bench.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) name: &'static str,
    /// Description of the inputs, the method and the measured quantities, in Markdown.
    pub(super) about: String,
    pub(super) tables: Vec<Table>,
    pub(super) sizes: Vec<Sizes>,
    /// Conclusions from the numbers, one line each.
    pub(super) findings: Vec<String>,
}

impl Report {
    /// Writes `NAME.md` and `NAME.json` into `dir`, and returns the Markdown text.
    pub(super) fn write(&self, dir: &Path, machine: &Machine) -> Result<String> {
        let (date, text) = (run!("date -u +%F")?, self.markdown());
        let top = repository();
        // A tree without git still gives a page.
        let commit = run!("git -C {top} rev-parse --short=12 HEAD");
        let commit = commit.unwrap_or_else(|_| String::from("commit unknown"));
        let (date, commit, version) = (date.trim(), commit.trim(), figures::VERSION);
        let machine = machine.text();
        let text = format!("{text}\n{date}, {machine}, Quire {version} ({commit}).\n");
        fs::create_dir_all(dir)?;
        fs::write(dir.join(format!("{}.md", self.name)), &text)?;
        let json = json!({
            "bench": self.name,
            "date": date,
            "machine": machine,
            "version": version,
            "commit": commit,
            "sources": figures::sources_digest(self.name)?,
            "tables": self.tables.iter().map(Table::json).collect::<Vec<_>>(),
            "sizes": self.sizes.iter().map(Sizes::json).collect::<Vec<_>>(),
        });
        let json = serde_json::to_string_pretty(&json)?;
        fs::write(dir.join(format!("{}.json", self.name)), json + "\n")?;
        Ok(text)
    }

    fn markdown(&self) -> String {
        let mut text = format!(
            "# {}\n\n{}\n\nMade by `cargo xtask bench {}`; contestants run in turn, every exit code is checked. \
             A process smaller than the bench itself (4 MB) counts as that.\n",
            self.name, self.about, self.name
        );
        for table in &self.tables {
            text += &table.markdown();
        }
        for sizes in &self.sizes {
            text += &sizes.markdown();
        }
        if !self.findings.is_empty() {
            text += "\n";
        }
        for finding in &self.findings {
            text += &format!("- {finding}\n");
        }
        text
    }
}

impl Table {
    fn markdown(&self) -> String {
        let memory = match self.memory {
            Memory::LargestProcess => "peak MB, largest process",
            Memory::AllProcesses => "peak MB, all processes",
            Memory::WithCache => "peak MB, with cache",
        };
        let mut text = format!(
            "\n## {}\n\n| | median ms | quartiles | min | max | user+sys ms | {memory} |\n\
             |---|---|---|---|---|---|---|\n",
            self.title
        );
        for it in &self.outcomes {
            let memory = it.memory.map_or(String::from("?"), |it| format!("{:.1}", megabytes(it)));
            let [median, min, max, cpu] = [it.median, it.min, it.max, it.cpu].map(milliseconds);
            let [low, high] = it.quartiles.map(milliseconds);
            text += &format!(
                "| {} | {median} | {low} to {high} | {min} | {max} | {cpu} | {memory} |\n",
                it.name
            );
        }
        text + &format!("\n{} runs of each.\n", self.runs)
    }

    fn json(&self) -> Value {
        let outcomes = self.outcomes.iter().map(|it| {
            let [median, min, max, cpu] =
                [it.median, it.min, it.max, it.cpu].map(|it| it.as_secs_f64() * 1e3);
            let quartiles = it.quartiles.map(|it| it.as_secs_f64() * 1e3);
            json!({
                "name": it.name, "median_ms": median, "min_ms": min, "max_ms": max,
                "quartiles_ms": quartiles,
                "cpu_ms": cpu, "memory_bytes": it.memory,
            })
        });
        json!({ "title": self.title, "runs": self.runs, "outcomes": outcomes.collect::<Vec<_>>() })
    }
}

impl Sizes {
    fn markdown(&self) -> String {
        let columns = self.columns.join(" | ");
        let mut text =
            format!("\n## {}\n\n| {} | {columns} |\n|---|", self.title, self.unit.name());
        text += &"---|".repeat(self.columns.len());
        for (name, values) in &self.rows {
            let values = values.iter().map(|it| self.unit.show(*it));
            text += &format!("\n| {name} | {} |", values.collect::<Vec<_>>().join(" | "));
        }
        text + "\n"
    }

    fn json(&self) -> Value {
        let values = match self.unit {
            Unit::Megabytes | Unit::Kilobytes => "bytes",
            Unit::MegabytesPerSecond => "bytes_per_second",
            Unit::Milliseconds | Unit::Microseconds => "nanoseconds",
            Unit::Times => "times",
            Unit::Percent => "percent",
        };
        let rows = self.rows.iter().map(|(name, row)| json!({ "name": name, values: row }));
        json!({ "title": self.title, "columns": self.columns, "rows": rows.collect::<Vec<_>>() })
    }
}

fn milliseconds(duration: Duration) -> String {
    let value = duration.as_secs_f64() * 1e3;
    if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

fn megabytes(bytes: u64) -> f64 {
    // The result is exact up to 2^52 bytes; the table shows one decimal.
    f64::from(u32::try_from(bytes / 1000).unwrap_or(u32::MAX)) / 1000.0
}

impl Table {
    /// A contestant by a prefix of its name.
    pub(super) fn find(&self, name: &str) -> Option<&Outcome> {
        self.outcomes.iter().find(|it| it.name.starts_with(name))
    }

    /// "A: 0.31 of the time of B" for the medians of two contestants, which are found by prefixes of their names.
    pub(super) fn ratio(&self, ours: &str, theirs: &str) -> Option<String> {
        let (ours, theirs) = (self.find(ours)?, self.find(theirs)?);
        let time = ours.milliseconds() / theirs.milliseconds();
        let memory = match (ours.memory, theirs.memory) {
            (Some(ours), Some(theirs)) => {
                format!(", {:.2} of its memory", megabytes(ours) / megabytes(theirs))
            }
            _ => String::new(),
        };
        Some(format!("{}: {time:.2} of the time of {}{memory}", ours.name, theirs.name))
    }

    /// [`Table::ratio`], after the table's title.
    pub(super) fn titled_ratio(&self, ours: &str, theirs: &str) -> Option<String> {
        Some(format!("{}: {}", self.title, self.ratio(ours, theirs)?))
    }

    /// Ratios of the first contestant to each other one, without memory.
    pub(super) fn shares(&self) -> Vec<String> {
        let Some((ours, others)) = self.outcomes.split_first() else { return Vec::new() };
        let line = |it: &Outcome| {
            let share = ours.milliseconds() / it.milliseconds();
            format!("{}: {}: {share:.2} of the time of {}", self.title, ours.name, it.name)
        };
        others.iter().map(line).collect()
    }
}

/// Description of the machine, without identifying its owner.
#[derive(Debug)]
pub(super) struct Machine {
    cores: usize,
    processor: String,
    memory_gb: u64,
    kernel: String,
    file_system: String,
}

impl Machine {
    /// Describes this machine. `dir` is the bench's folder, whose file system is part of the description.
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let processors = fs::read_to_string("/proc/cpuinfo")?;
        let processor = processors.lines().find_map(|it| it.strip_prefix("model name"));
        let processor = processor.map(|it| it.trim_start_matches([':', ' ', '\t']).to_owned());
        let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let kernel = release.split(|it: char| !it.is_ascii_digit() && it != '.').next();
        let file_system = run!("stat --file-system --format=%T {dir}")?;
        let file_system = file_system.trim().replace("ext2/ext3", "ext4");
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            processor: processor.unwrap_or_else(|| String::from("unknown processor")),
            memory_gb: field("/proc/meminfo", "MemTotal")? / 1_000_000,
            kernel: kernel.unwrap_or_default().to_owned(),
            file_system,
        })
    }

    fn text(&self) -> String {
        let Self { cores, processor, memory_gb, kernel, file_system } = self;
        format!("{cores} cores ({processor}), {memory_gb} GB, Linux {kernel}, {file_system}")
    }
}
