//! Writes the page that puts published figures of other tools beside recorded ones of Quire.
//!
//! Its numbers are those of `docs/performance/*.json`, so the same records give the same page: a test compares them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::by;
use super::rows::{PUBLISHED, RIVALS};
use crate::process::repository;

/// File name of the page, in the directory of the figures.
pub const PAGE: &str = "figures.md";

/// Quire's version, which benches record.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A line of the page.
pub(super) struct Row {
    pub(super) work: &'static str,
    /// The others' figure with its source, in Markdown; in the second table, the program and what it does.
    pub(super) theirs: &'static str,
    pub(super) ours: &'static [Part],
    /// Why the figures differ, and by what they cannot be compared.
    pub(super) why: &'static str,
}

/// A recorded figure and the words before it.
pub(super) struct Part(pub(super) &'static str, pub(super) Shown);

/// How recorded figures are shown.
pub(super) enum Shown {
    /// As it is, with its unit.
    Value(Figure),
    /// The first divided by the second.
    Ratio(Figure, Figure),
    /// The difference to the second, in percent of the second.
    Less(Figure, Figure),
}

/// A place in a record.
#[derive(Clone, Copy)]
pub(super) struct Figure {
    /// Name of the bench.
    pub(super) bench: &'static str,
    /// Title of the table.
    pub(super) title: &'static str,
    /// Name of the row. In the record, a version may follow it.
    pub(super) row: &'static str,
    pub(super) column: Column,
}

#[derive(Clone, Copy)]
pub(super) enum Column {
    /// Median time of a contestant.
    Time,
    /// Its peak memory.
    Memory,
    /// A column of a table of sizes.
    Named(&'static str),
}

/// Records by name of the bench, which are read when they are needed; none if the bench has not run yet.
struct Records<'a> {
    dir: &'a Path,
    read: BTreeMap<&'static str, Option<Value>>,
}

/// Returns the page, from the `.json` files in `dir`.
///
/// # Errors
///
/// A record cannot be read, or lacks a figure that the page shows.
pub fn page(dir: &Path) -> Result<String> {
    let mut records = Records { dir, read: BTreeMap::new() };
    let mut text = String::from(HEAD);
    for (title, theirs, rows) in [
        ("Published figures", "published", &PUBLISHED[..]),
        ("Other tools, run by the same bench", "compared with", &RIVALS[..]),
    ] {
        text += &format!(
            "\n## {title}\n\n| work | {theirs} | recorded here | bench | reason for the difference |\n\
             |---|---|---|---|---|\n"
        );
        for row in rows {
            text += &records.line(row).with_context(|| format!("row \"{}\"", row.work))?;
        }
    }
    Ok(text)
}

const HEAD: &str = "\
# Figures beside those of other tools

The first table has figures that others have published, each beside the most similar work that a bench of Quire does.
The machines and the work differ, so compare ratios. The second has other tools that a bench runs itself, in turn with
Quire, on the same input and machine. *Ratio* means Quire's figure divided by the other tool's, for times unless
something else is named: below 1, Quire needs less.

The numbers are those of the pages that the fourth column names. A date with **v** is of an earlier version of Quire, or
of one that was not recorded. With **b**, the sources of the bench have changed since, or were not recorded. [Aims that
Quire misses](README.md#causes-of-missed-aims) have their causes on another page.

`cargo xtask bench figures` writes this page, as every bench does at its end.
";

impl Records<'_> {
    fn line(&mut self, row: &Row) -> Result<String> {
        let mut benches = Vec::new();
        let mut ours = Vec::new();
        for Part(label, shown) in row.ours {
            for figure in shown.figures() {
                if !benches.contains(&figure.bench) {
                    benches.push(figure.bench);
                }
            }
            let value = self.show(shown)?.unwrap_or_else(|| String::from("not measured yet"));
            ours.push(if label.is_empty() { value } else { format!("{label} {value}") });
        }
        let mut dated = Vec::new();
        for bench in benches {
            dated.push(self.dated(bench)?);
        }
        Ok(format!(
            "| {} | {} | {} | {} | {} |\n",
            row.work,
            row.theirs,
            ours.join("; "),
            dated.join("; "),
            row.why
        ))
    }

    fn record(&mut self, bench: &'static str) -> Result<Option<&Value>> {
        if !self.read.contains_key(bench) {
            let path = self.dir.join(format!("{bench}.json"));
            let record = match fs::read(&path) {
                Ok(bytes) => Some(serde_json::from_slice(&bytes)?),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot read {}", path.display()));
                }
            };
            self.read.insert(bench, record);
        }
        Ok(self.read.get(bench).and_then(Option::as_ref))
    }

    /// Returns a link to a bench's page with the date of its record, and what makes this old.
    fn dated(&mut self, bench: &'static str) -> Result<String> {
        let Some(record) = self.record(bench)? else { return Ok(bench.to_owned()) };
        let date = record["date"].as_str().unwrap_or_default();
        let is_earlier = record["version"] != VERSION;
        let has_changed = record["sources"] != sources_digest(bench)?.as_str();
        let marks = [(is_earlier, " **v**"), (has_changed, " **b**")];
        let marks: String = marks.iter().filter(|it| it.0).map(|it| it.1).collect();
        Ok(format!("[{bench}]({bench}.md) {date}{marks}"))
    }

    /// None if a bench has no record yet.
    fn show(&mut self, shown: &Shown) -> Result<Option<String>> {
        let values = shown.figures().map(|it| self.value(it));
        let values = values.collect::<Result<Option<Vec<_>>>>()?;
        Ok(values.map(|values| match (shown, &values[..]) {
            (Shown::Value(_), [value, ..]) => value.text(),
            (Shown::Ratio(..), [ours, theirs, ..]) => format!("{:.2}", ours.number / theirs.number),
            (Shown::Less(..), [ours, theirs, ..]) => {
                format!("{:.0} %", (ours.number / theirs.number - 1.0) * 100.0)
            }
            _ => String::new(),
        }))
    }

    fn value(&mut self, figure: Figure) -> Result<Option<Recorded>> {
        let Some(record) = self.record(figure.bench)? else { return Ok(None) };
        let value = figure.lookup(record).with_context(|| {
            let Figure { bench, title, row, .. } = figure;
            format!("{bench}.json has no figure of \"{row}\" in \"{title}\"")
        })?;
        Ok(Some(value))
    }
}

impl Shown {
    fn figures(&self) -> impl Iterator<Item = Figure> + use<> {
        let (first, second) = match *self {
            Self::Value(it) => (it, None),
            Self::Ratio(ours, theirs) | Self::Less(ours, theirs) => (ours, Some(theirs)),
        };
        [Some(first), second].into_iter().flatten()
    }
}

impl Figure {
    fn lookup(self, record: &Value) -> Option<Recorded> {
        let Column::Named(name) = self.column else {
            let table = by(&record["tables"], "title", self.title)?;
            let outcome = by(&table["outcomes"], "name", self.row)?;
            let (key, unit) = match self.column {
                Column::Memory => ("memory_bytes", "bytes"),
                _ => ("median_ms", "milliseconds"),
            };
            return Some(Recorded { number: outcome[key].as_f64()?, unit });
        };
        let table = by(&record["sizes"], "title", self.title)?;
        let column = table["columns"].as_array()?.iter().position(|it| it == name)?;
        let row = by(&table["rows"], "name", self.row)?;
        let unit = UNITS.into_iter().find(|it| row.get(it).is_some())?;
        Some(Recorded { number: row[unit].get(column)?.as_f64()?, unit })
    }
}

/// Keys of a row's numbers in a record's `sizes`.
const UNITS: [&str; 5] = ["bytes", "bytes_per_second", "nanoseconds", "times", "percent"];

/// A number of a record, and its unit there.
struct Recorded {
    number: f64,
    unit: &'static str,
}

impl Recorded {
    fn text(&self) -> String {
        let number = self.number;
        let (number, unit) = match self.unit {
            "bytes" if number < 1e6 => (number / 1e3, " kB"),
            "bytes" => (number / 1e6, " MB"),
            "bytes_per_second" => (number / 1e6, " MB/s"),
            "nanoseconds" if number < 1e9 => (number / 1e6, " ms"),
            "nanoseconds" => (number / 1e9, " s"),
            "milliseconds" if number >= 1e3 => (number / 1e3, " s"),
            "milliseconds" => (number, " ms"),
            "percent" => (number, " %"),
            _ => return format!("{number:.0}"),
        };
        let digits = usize::from(number < 100.0);
        format!("{number:.digits$}{unit}")
    }
}

/// Returns SHA-256 of the sources of a bench, in hexadecimal digits: the files of `bench/src` whose names are or begin
/// with those of its modules.
///
/// # Errors
///
/// The sources cannot be read, or there are none of this name.
pub fn sources_digest(bench: &str) -> Result<String> {
    let modules: &[&str] = match bench {
        "lazy" | "lazy-trees" | "outages" | "served" => &["lazy"],
        "pods" => &["engine"],
        "pagecache" => &["pagecache", "pageget", "pageload", "tensorload"],
        "read" => &["read", "fio"],
        "thousand" => &["thousand", "alive"],
        other => &[other],
    };
    let mut files = Vec::new();
    for module in modules {
        let before = files.len();
        let root = repository().join("bench/src");
        for entry in fs::read_dir(&root)? {
            let path = entry?.path();
            if path.file_stem().is_some_and(|it| it == *module) {
                collect(&path, &mut files)?;
            }
        }
        if files.len() == before {
            bail!("{} has no module {module} for the bench {bench}", root.display());
        }
    }
    files.sort();
    let mut digest = Sha256::new();
    for path in files {
        let name = path.strip_prefix(repository())?.as_os_str().as_encoded_bytes();
        let bytes = fs::read(&path)?;
        // Lengths, so that no other names and contents give the same input.
        digest.update(u64::try_from(name.len())?.to_le_bytes());
        digest.update(name);
        digest.update(u64::try_from(bytes.len())?.to_le_bytes());
        digest.update(bytes);
    }
    Ok(digest.finalize().iter().map(|it| format!("{it:02x}")).collect())
}

/// Adds a file, or all files below a directory.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    fs::read_dir(path)?.try_for_each(|it| collect(&it?.path(), files))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record() -> Value {
        json!({
            "tables": [{ "title": "pull", "outcomes": [
                { "name": "quire pull", "median_ms": 50.0, "memory_bytes": 4_000_000 },
                { "name": "podman pull (4.3.1)", "median_ms": 2500.0, "memory_bytes": 8_000_000 },
            ] }],
            "sizes": [{ "title": "disk", "columns": ["all", "own"], "rows": [
                { "name": "quire", "bytes": [500, 3_000_000] },
            ] }],
        })
    }

    fn figure(row: &'static str, title: &'static str, column: Column) -> Figure {
        Figure { bench: "pull", title, row, column }
    }

    #[test]
    fn figures_are_found_by_row_and_column_and_shown_with_their_unit() {
        let text = |it: Figure| it.lookup(&record()).map(|it| it.text());
        assert_eq!(text(figure("quire pull", "pull", Column::Time)).unwrap(), "50.0 ms");
        assert_eq!(text(figure("podman pull", "pull", Column::Time)).unwrap(), "2.5 s");
        assert_eq!(text(figure("podman pull", "pull", Column::Memory)).unwrap(), "8.0 MB");
        assert_eq!(text(figure("quire", "disk", Column::Named("all"))).unwrap(), "0.5 kB");
        assert_eq!(text(figure("quire", "disk", Column::Named("own"))).unwrap(), "3.0 MB");
        assert!(text(figure("quire", "disk", Column::Named("none"))).is_none());
        assert!(text(figure("podman", "pull", Column::Time)).is_none());
    }

    #[test]
    fn a_record_without_a_figure_is_an_error_and_a_missing_record_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let row = Row {
            work: "Pull",
            theirs: "podman",
            ours: &[Part(
                "",
                Shown::Less(
                    Figure {
                        bench: "pull",
                        title: "pull",
                        row: "quire pull",
                        column: Column::Time,
                    },
                    Figure {
                        bench: "pull",
                        title: "pull",
                        row: "podman pull",
                        column: Column::Time,
                    },
                ),
            )],
            why: "",
        };
        let mut records = Records { dir: dir.path(), read: BTreeMap::new() };
        assert_eq!(records.line(&row).unwrap(), "| Pull | podman | not measured yet | pull |  |\n");
        fs::write(dir.path().join("pull.json"), record().to_string()).unwrap();
        let mut records = Records { dir: dir.path(), read: BTreeMap::new() };
        let line = records.line(&row).unwrap();
        assert_eq!(line, "| Pull | podman | -98 % | [pull](pull.md)  **v** **b** |  |\n");
        fs::write(dir.path().join("pull.json"), "{}").unwrap();
        let mut records = Records { dir: dir.path(), read: BTreeMap::new() };
        let error = records.line(&row).unwrap_err().to_string();
        assert_eq!(error, "pull.json has no figure of \"quire pull\" in \"pull\"");
    }

    #[test]
    fn a_record_of_this_version_and_these_sources_has_no_mark() {
        let dir = tempfile::tempdir().unwrap();
        let sources = sources_digest("pull").unwrap();
        let record = json!({ "date": "2026-01-01", "version": VERSION, "sources": sources });
        fs::write(dir.path().join("pull.json"), record.to_string()).unwrap();
        let mut records = Records { dir: dir.path(), read: BTreeMap::new() };
        assert_eq!(records.dated("pull").unwrap(), "[pull](pull.md) 2026-01-01");
        assert_ne!(sources_digest("push").unwrap(), sources);
    }
}
