//! Draws the picture of the README, and writes the page that compares figures with those of others, from what benches
//! have recorded in `docs/performance/*.json`.
//!
//! The same figures give the same bytes: tests compare the picture and the page with the recorded figures.

mod page;
mod rows;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

pub use page::{PAGE, VERSION, page, sources_digest};

/// File name of the picture, in the directory of the figures.
pub const OVERVIEW: &str = "overview.svg";

/// A comparison: a few bars with one scale.
struct Panel {
    title: &'static str,
    /// Input and environment, as shown.
    about: &'static str,
    /// Name of the `.json` file without its extension.
    bench: &'static str,
    source: PanelSource,
    unit: Unit,
    bars: &'static [Bar],
}

/// Location of a panel's values in the file.
enum PanelSource {
    /// Median times of the table with this title; each bar is one of its contestants.
    Times(&'static str),
    /// A row of the sizes with this title; each bar is one of its columns.
    Sizes { title: &'static str, row: &'static str },
}

struct Bar {
    label: &'static str,
    /// Name of the contestant or column. In the file, a version may follow it.
    name: &'static str,
    is_ours: bool,
}

#[derive(Clone, Copy)]
enum Unit {
    /// Recorded in milliseconds.
    Seconds,
    Milliseconds,
    /// Recorded in bytes.
    Megabytes,
}

const fn ours(label: &'static str, name: &'static str) -> Bar {
    Bar { label, name, is_ours: true }
}

const fn other(label: &'static str, name: &'static str) -> Bar {
    Bar { label, name, is_ours: false }
}

const PANELS: [Panel; 10] = [
    Panel {
        title: "Start an image that is only in a registry",
        about: "PostgreSQL, 237 MB, 20 ms a request",
        bench: "lazy",
        source: PanelSource::Times("postgres --version, 20 ms a request"),
        unit: Unit::Milliseconds,
        bars: &[
            ours("quire, lazily", "quire pull --lazy"),
            ours("quire, whole image", "quire pull"),
            other("Nydus, optimized", "Nydus v3, fanotify, optimized"),
            other("Nydus", "Nydus v3, fanotify"),
            other("stargz, optimized", "stargz, optimized"),
            other("stargz", "stargz"),
        ],
    },
    Panel {
        title: "The same, another image",
        about: "Java, 157 MB, 20 ms a request",
        bench: "lazy",
        source: PanelSource::Times("java --version, 20 ms a request"),
        unit: Unit::Milliseconds,
        bars: &[
            ours("quire, lazily", "quire pull --lazy"),
            ours("quire, whole image", "quire pull"),
            other("Nydus, optimized", "Nydus v3, fanotify, optimized"),
            other("Nydus", "Nydus v3, fanotify"),
            other("stargz, optimized", "stargz, optimized"),
            other("stargz", "stargz"),
        ],
    },
    Panel {
        title: "Pull an image",
        about: "Debian with PostgreSQL, 237 MB, local registry",
        bench: "pull",
        source: PanelSource::Times("debian-postgres"),
        unit: Unit::Seconds,
        bars: &[
            ours("quire", "quire pull"),
            other("podman", "podman pull"),
            other("skopeo, umoci", "skopeo copy"),
        ],
    },
    Panel {
        title: "Import an OCI layout",
        about: "the same image, empty store",
        bench: "import",
        source: PanelSource::Times("debian-postgres"),
        unit: Unit::Seconds,
        bars: &[
            ours("quire", "quire import"),
            other("composefs-rs", "cfsctl oci pull"),
            other("umoci", "umoci unpack"),
            other("podman", "podman pull"),
        ],
    },
    Panel {
        title: "Run true in a container",
        about: "start to end, right after another run",
        bench: "run",
        source: PanelSource::Times("right after another one"),
        unit: Unit::Milliseconds,
        bars: &[
            ours("quire, crun", "quire run, self, crun"),
            ours("quire, runc", "quire run, self, runc"),
            other("podman, runc", "podman run, runc"),
        ],
    },
    Panel {
        title: "Mount and unmount",
        about: "two whole processes, Debian",
        bench: "mount",
        source: PanelSource::Times("debian-small"),
        unit: Unit::Milliseconds,
        bars: &[
            ours("quire", "quire mount, quire umount"),
            ours("quire as composefs", "Quire's mount.composefs, umount(8)"),
            other("composefs (C)", "composefs (C) mount.composefs, umount(8)"),
        ],
    },
    Panel {
        title: "Disk for twenty versions of an application",
        about: "layered; the last row is the unique files alone",
        bench: "versions",
        source: PanelSource::Sizes { title: "The disk after 20 versions", row: "layered" },
        unit: Unit::Megabytes,
        bars: &[
            ours("quire", "quire"),
            other("podman", "podman"),
            other("unique files", "in blocks"),
        ],
    },
    Panel {
        title: "Memory for two versions of nginx",
        about: "page cache after reading all files, Linux 7.2",
        bench: "pagecache",
        source: PanelSource::Sizes {
            title: "Page cache after reading all of both images",
            row: "nginx",
        },
        unit: Unit::Megabytes,
        bars: &[
            ours("quire, packed", "packed, shared"),
            ours("quire, objects", "objects"),
            other("mkfs.erofs, shared", "mkfs.erofs, shared"),
            other("nothing shared", "packed, apart"),
        ],
    },
    Panel {
        title: "List a large tree, cold",
        about: "ls -lR, 64,246 entries",
        bench: "metadata",
        source: PanelSource::Times("developer: ls -lR, cold"),
        unit: Unit::Milliseconds,
        bars: &[
            ours("quire, packed", "quire packed, --warm metadata"),
            ours("quire, objects", "quire objects: composefs + overlayfs, --warm metadata"),
            other("folder on ext4", "folder on ext4"),
            other("mkfs.erofs", "mkfs.erofs"),
        ],
    },
    Panel {
        title: "Write a composefs image",
        about: "dump of 64,246 entries; the images are identical",
        bench: "mkcomposefs",
        source: PanelSource::Times("cs9-developer: as it is"),
        unit: Unit::Milliseconds,
        bars: &[ours("quire", "Quire"), other("composefs (C)", "composefs (C)")],
    },
];

/// Lengths in pixels.
const WIDTH: u32 = 920;
const MARGIN: u32 = 24;
const COLUMN: u32 = 448;
/// Distance from a panel's top to its first bar.
const HEAD: u32 = 48;
const LINE: u32 = 22;
/// Vertical distance between panels.
const GAP: u32 = 26;
const LABEL: u32 = 128;
/// Length of a panel's longest bar.
const BAR: u32 = 220;

const STYLE: &str = "\
.card{fill:#ffffff;stroke:#d0d7de}text{font:12px system-ui,sans-serif;fill:#1f2328}\
.title{font-weight:600;font-size:14px}.about{fill:#59636e;font-size:11px}\
.ours{fill:#0969da}.other{fill:#afb8c1}\
@media(prefers-color-scheme:dark){.card{fill:#0d1117;stroke:#3d444d}text{fill:#f0f6fc}\
.about{fill:#9198a1}.ours{fill:#4493f8}.other{fill:#656c76}}";

/// Returns the picture as SVG, from the `.json` files in `dir`.
pub fn overview(dir: &Path) -> Result<String> {
    let mut body = String::new();
    let mut top = MARGIN + 30;
    for pair in PANELS.chunks(2) {
        for (panel, left) in pair.iter().zip([MARGIN, MARGIN + COLUMN]) {
            body += &panel.draw(dir, left, top)?;
        }
        let lines = pair.iter().map(|it| it.bars.len()).max().unwrap_or_default();
        top += HEAD + LINE * u32::try_from(lines)? + GAP;
    }
    let height = top - GAP + MARGIN;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>Quire beside other tools: shorter bars are better</title>\n<style>{STYLE}</style>\n\
         <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n\
         <text class=\"about\" x=\"{MARGIN}\" y=\"{}\">Shorter bars are better. Medians, except sizes. \
         Inputs, machines and misses: docs/performance.</text>\n{body}</svg>\n",
        WIDTH - 1,
        height - 1,
        MARGIN + 8,
    ))
}

/// Draws the picture and writes the page again, in the directory of the figures.
pub fn write(dir: &Path) -> Result<()> {
    for (name, text) in [(OVERVIEW, overview(dir)?), (PAGE, page(dir)?)] {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

impl Panel {
    fn draw(&self, dir: &Path, left: u32, top: u32) -> Result<String> {
        let path = dir.join(format!("{}.json", self.bench));
        let read = || anyhow::Ok(serde_json::from_slice::<Value>(&fs::read(&path)?)?);
        let figures = read().with_context(|| format!("cannot read {}", path.display()))?;
        let values = self.bars.iter().map(|bar| {
            let value = self.source.lookup_value(&figures, bar.name);
            value.with_context(|| format!("{} has no figure of {}", path.display(), bar.name))
        });
        let values = values.collect::<Result<Vec<_>>>()?;
        let longest = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let date = figures["date"].as_str().unwrap_or_default();
        let about = format!("{}: {}; {date}", self.unit.axis(), self.about);
        let mut text = format!(
            "<text class=\"title\" x=\"{left}\" y=\"{}\">{}</text>\n\
             <text class=\"about\" x=\"{left}\" y=\"{}\">{}</text>\n",
            top + 14,
            escaped(self.title),
            top + 32,
            escaped(&about),
        );
        let mut y = top + HEAD;
        for (bar, value) in self.bars.iter().zip(values) {
            let length = (value / longest * f64::from(BAR)).max(1.0);
            let class = if bar.is_ours { "ours" } else { "other" };
            let start = left + LABEL;
            text += &format!(
                "<text x=\"{left}\" y=\"{}\">{}</text>\
                 <rect class=\"{class}\" x=\"{start}\" y=\"{y}\" width=\"{length:.1}\" height=\"14\" rx=\"2\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{}</text>\n",
                y + 11,
                escaped(bar.label),
                f64::from(start) + length + 6.0,
                y + 11,
                self.unit.show(value),
            );
            y += LINE;
        }
        Ok(text)
    }
}

impl PanelSource {
    /// Returns the value of the contestant or column `name`, in the recorded unit.
    fn lookup_value(&self, figures: &Value, name: &str) -> Option<f64> {
        match self {
            Self::Times(title) => {
                let table = by(&figures["tables"], "title", title)?;
                by(&table["outcomes"], "name", name)?["median_ms"].as_f64()
            }
            Self::Sizes { title, row } => {
                let table = by(&figures["sizes"], "title", title)?;
                let columns = table["columns"].as_array()?;
                let column = columns.iter().position(|it| it == name)?;
                by(&table["rows"], "name", row)?["bytes"].get(column)?.as_f64()
            }
        }
    }
}

/// Returns the element of an array whose `key` is `value`, which a version may follow.
fn by<'a>(array: &'a Value, key: &str, value: &str) -> Option<&'a Value> {
    let is_version = |rest: &str| {
        let rest = rest.strip_prefix(' ');
        rest.is_some_and(|it| it.starts_with(|it: char| it == '(' || it.is_ascii_digit()))
    };
    array.as_array()?.iter().find(|it| {
        let found = it[key].as_str().and_then(|it| it.strip_prefix(value));
        found.is_some_and(|rest| rest.is_empty() || is_version(rest))
    })
}

impl Unit {
    const fn axis(self) -> &'static str {
        match self {
            Self::Seconds => "Seconds",
            Self::Milliseconds => "Milliseconds",
            Self::Megabytes => "Megabytes",
        }
    }

    fn show(self, value: f64) -> String {
        let (value, unit) = match self {
            Self::Seconds => (value / 1e3, "s"),
            Self::Milliseconds => (value, "ms"),
            Self::Megabytes => (value / 1e6, "MB"),
        };
        let digits = usize::from(value < 100.0);
        format!("{value:.digits$} {unit}")
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_contestant_is_found_with_and_without_a_version_but_not_by_its_beginning() {
        let array = json!([{ "name": "quire packed, --warm" }, { "name": "quire packed" }, { "name": "mkfs 1.9" },
            { "name": "podman pull (4.3.1)" }]);
        let find = |name| by(&array, "name", name).map(|it| it["name"].as_str().unwrap());
        assert_eq!(find("quire packed"), Some("quire packed"));
        assert_eq!(find("mkfs"), Some("mkfs 1.9"));
        assert_eq!(find("podman pull"), Some("podman pull (4.3.1)"));
        assert_eq!(find("podman"), None);
    }

    #[test]
    fn a_figure_that_is_not_recorded_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let title = "postgres --version, 20 ms a request";
        let figures = json!({ "tables": [{ "title": title, "outcomes": [] }] });
        fs::write(dir.path().join("lazy.json"), figures.to_string()).unwrap();
        let error = overview(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("lazy.json has no figure of quire pull --lazy"), "{error}");
    }

    #[test]
    fn values_have_three_digits_or_one_behind_the_point() {
        assert_eq!(Unit::Seconds.show(2355.0), "2.4 s");
        assert_eq!(Unit::Milliseconds.show(190.2), "190 ms");
        assert_eq!(Unit::Megabytes.show(99_940_000.0), "99.9 MB");
    }
}
