//! The figures that were aimed at, beside those that were measured.

use std::time::Duration;

use crate::measure::Outcome;
use crate::report::{Report, Sizes};

/// How a title ends, whose time is compared with whose, and the most that it may be of that.
const SHARES: [(&str, &str, &str, f64); 5] = [
    ("cold: ", "Quire", "overlayfs", 0.7),
    ("cold: ", "Quire", "erofs", 1.0),
    // The throughput of the differ is at least 1.3 times that of the engine's own.
    ("blobs here: pulled", "Quire", "Quire, walking differ", 1.0 / 1.3),
    ("blobs here: pulled", "Quire", "overlayfs", 1.0 / 1.3),
    ("at a time: started", "Quire", "overlayfs", 1.1),
];

/// The most that a pull of an image may take whose layers are here.
const PULL_HERE: Duration = Duration::from_millis(60);

/// Ten related images on the disk, as a share of what overlayfs takes.
const RELATED: f64 = 0.6;

/// What the service may have of memory, in bytes.
const MEMORY: u64 = 15_000_000;

/// What is written for an image whose base is here, as a share of its new files.
pub(super) const NEW_FILES: f64 = 1.05;

/// One line for each aim that these tables have figures for.
pub(super) fn aims(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for table in &report.tables {
        let find = |name: &str| table.outcomes.iter().find(|it| it.name == name);
        for (part, ours, theirs, most) in SHARES {
            if let (true, Some(ours), Some(theirs)) =
                (table.title.contains(part), find(ours), find(theirs))
            {
                let share = seconds(ours) / seconds(theirs);
                let what = format!("{}: {} of {}", table.title, ours.name, theirs.name);
                lines.push(line(&what, share, most, ""));
            }
        }
        let is_here = table.title.ends_with("all layers here: pulled");
        if let Some(ours) = find("Quire, --skip download").filter(|_| is_here) {
            let milliseconds = seconds(ours) * 1e3;
            let most = PULL_HERE.as_secs_f64() * 1e3;
            let what = format!("{}: {}, ctr's own start included", table.title, ours.name);
            lines.push(line(&what, milliseconds, most, " ms"));
        }
    }
    for sizes in &report.sizes {
        let value = |name: &str, column: usize| {
            let row = sizes.rows.iter().find(|(it, _)| it == name);
            row.and_then(|(_, values)| values.get(column)).copied()
        };
        if sizes.title.ends_with("on the disk") {
            for (column, what) in [(0, "the engine's blobs included"), (2, "without blobs")] {
                if let (Some(ours), Some(theirs)) =
                    (value("Quire", column), value("overlayfs", column))
                {
                    let what = format!("{}, {what}: Quire of overlayfs", sizes.title);
                    lines.push(line(&what, ratio(ours, theirs), RELATED, ""));
                }
            }
        }
        if let Some(idle) = value("Quire: quire", 0) {
            let what = format!("{}: the service before", sizes.title);
            lines.push(line(&what, ratio(idle, 1_000_000), ratio(MEMORY, 1_000_000), " MB"));
        }
        if sizes.title.ends_with("its base is here: bytes written") {
            lines.extend(new_files(sizes));
        }
    }
    lines
}

/// Bytes written beyond blobs, beside those of the files that are new, which is the last column.
fn new_files(sizes: &Sizes) -> Option<String> {
    let (_, values) = sizes.rows.iter().find(|(name, _)| name == "Quire")?;
    let [.., written, files] = values[..] else { return None };
    let what = format!("{}, but blobs: of the new files", sizes.title);
    Some(line(&what, ratio(written, files), NEW_FILES, ""))
}

fn seconds(outcome: &Outcome) -> f64 {
    outcome.median.as_secs_f64()
}

fn ratio(one: u64, other: u64) -> f64 {
    Duration::from_nanos(one).as_secs_f64() / Duration::from_nanos(other.max(1)).as_secs_f64()
}

fn line(what: &str, value: f64, most: f64, unit: &str) -> String {
    let met = if value <= most { "met" } else { "missed" };
    format!("{what}: {value:.2}{unit}; the aim, at most {most:.2}{unit}, is {met}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aim_is_met_or_missed() {
        let cases = [
            (0.699, "0.70; the aim, at most 0.70, is met"),
            (0.8, "0.80; the aim, at most 0.70, is missed"),
        ];
        for (value, expect) in cases {
            assert_eq!(line("x", value, 0.7, ""), format!("x: {expect}"));
        }
        assert!((ratio(3, 2) - 1.5).abs() < 1e-9);
    }
}
