//! Compares the measured figures with their targets.

use std::time::Duration;

use crate::report::{Report, Sizes};

/// End of a table's title, the two contestants that are compared, and the largest allowed ratio of their times.
const SHARES: [(&str, &str, &str, f64); 5] = [
    ("cold: ", "Quire", "overlayfs", 0.7),
    ("cold: ", "Quire", "erofs", 1.0),
    // The differ's throughput must be at least 1.3 times that of the engine's differ.
    ("blobs here: pulled", "Quire", "Quire, walking differ", 1.0 / 1.3),
    ("blobs here: pulled", "Quire", "overlayfs", 1.0 / 1.3),
    ("at a time: started", "Quire", "overlayfs", 1.1),
];

/// Longest allowed pull of an image whose layers are already in the store.
const PULL_HERE: Duration = Duration::from_millis(60);

/// Largest allowed disk use of ten related images, as a share of overlayfs's.
const RELATED: f64 = 0.6;

/// Largest allowed memory of the service, in bytes.
const MEMORY: u64 = 15_000_000;

/// Largest allowed write volume of an image whose base is in the store, as a share of the size of its new files.
pub(super) const NEW_FILES: f64 = 1.05;

/// Returns one line for each target whose figures are in these tables.
pub(super) fn aims(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for table in &report.tables {
        let find = |name: &str| table.outcomes.iter().find(|it| it.name == name);
        for (part, ours, theirs, most) in SHARES {
            if let (true, Some(ours), Some(theirs)) =
                (table.title.contains(part), find(ours), find(theirs))
            {
                let share = ours.milliseconds() / theirs.milliseconds();
                let what = format!("{}: {} of {}", table.title, ours.name, theirs.name);
                lines.push(line(&what, share, most, ""));
            }
        }
        let is_here = table.title.ends_with("all layers here: pulled");
        if let Some(ours) = find("Quire, --skip download").filter(|_| is_here) {
            let milliseconds = ours.milliseconds();
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
        if sizes.title.ends_with("its base pulled before: bytes written") {
            lines.extend(new_files(sizes));
        }
    }
    lines
}

/// Compares the bytes written besides blobs with the size of the new files, which is the last column.
fn new_files(sizes: &Sizes) -> Option<String> {
    let (_, values) = sizes.rows.iter().find(|(name, _)| name == "Quire")?;
    let [.., written, files] = values[..] else { return None };
    let what = format!("{}, but blobs: of the new files", sizes.title);
    Some(line(&what, ratio(written, files), NEW_FILES, ""))
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
