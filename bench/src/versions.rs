//! The next version of an image that is in the store, and the costs of many versions.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::command::{cmd, more, run, run_all};
use super::import::race;
use super::measure::Contestant;
use super::podman::{self, podman};
use super::proxy::Proxy;
use super::registry;
use super::report::{Report, Sizes, Unit};
use crate::{Context, version};
use rig::cache::remove;
use rig::inputs::layout;
use rig::inputs::versions::{self, COUNT, Cut, Versions};
use rig::process::need;

/// A tool that stores images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Quire,
    /// Quire with eStargz layers, of which only the new parts are downloaded.
    QuireChunked,
    Umoci,
    Podman,
}

use Way::{Podman, Quire, QuireChunked, Umoci};

const WAYS: [Way; 4] = [Quire, QuireChunked, Umoci, Podman];
const CUTS: [(Cut, &str); 2] = [(Cut::Layered, "layered"), (Cut::Flat, "flat")];

impl Way {
    fn name(self) -> String {
        match self {
            Quire => String::from("quire pull, gzip"),
            QuireChunked => String::from("quire pull, eStargz"),
            Umoci => {
                let (skopeo, umoci) = (version("skopeo"), version("umoci"));
                format!("skopeo copy ({skopeo}), umoci unpack ({umoci})")
            }
            Podman => format!("podman pull ({})", version("podman")),
        }
    }

    /// The tool's folders, below the bench's folder.
    fn places(self) -> &'static [&'static str] {
        match self {
            Quire | QuireChunked => &["store"],
            Umoci => &["copied", "bundles"],
            Podman => &["podman"],
        }
    }

    fn pull(
        self,
        context: &Context<'_>,
        host: &str,
        cut: &str,
        version: usize,
    ) -> Result<Vec<Command>> {
        let (quire, work) = (context.quire, context.work);
        let image = format!("{host}/{}", tag(self == QuireChunked, cut, version));
        Ok(match self {
            Quire | QuireChunked => vec![cmd!("{quire} --store {work}/store pull {image}")],
            Umoci => {
                let (copied, number) = (work.join("copied"), version.to_string());
                vec![
                    cmd!(
                        "skopeo copy --quiet --src-tls-verify=false docker://{image}",
                        "oci:{copied}:{number}"
                    ),
                    cmd!("umoci unpack --image {copied}:{number} {work}/bundles/{number}"),
                ]
            }
            Podman => {
                vec![more!(podman(context, work)?, "pull --quiet --tls-verify=false {image}")]
            }
        })
    }

    /// Removes all images of the tool.
    fn clear(self, context: &Context<'_>) -> Result<()> {
        if self == Podman {
            return podman::remove_all(context);
        }
        self.places().iter().try_for_each(|it| remove(&context.work.join(it)))?;
        if self == Umoci {
            std::fs::create_dir(context.work.join("bundles"))?;
        }
        Ok(())
    }

    /// Bytes of the blocks that the tool takes on the disk.
    fn disk(self, context: &Context<'_>) -> Result<u64> {
        rustix::fs::sync();
        self.places().iter().map(|it| disk(&context.work.join(it))).sum()
    }
}

fn tag(is_chunked: bool, cut: &str, version: usize) -> String {
    let packing = if is_chunked { "chunked" } else { "gzip" };
    format!("{cut}-{packing}:{version}")
}

/// Bytes of the blocks that a folder takes.
pub(super) fn disk(path: &Path) -> Result<u64> {
    let text = run!("du --summarize --block-size=1 {path}")?;
    Ok(text.split_whitespace().next().context("du says nothing")?.parse()?)
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let versions = versions::make(context.cache, false)?;
    let registry = registry::start(context)?;
    let host = &registry.host;
    for tool in ["skopeo", "umoci", "podman"] {
        need(tool)?;
    }
    for (cut, title) in CUTS {
        publish(context, &versions, host, cut, title)?;
    }
    let (mut tables, mut findings) = (Vec::new(), Vec::new());
    for (_, cut) in CUTS {
        for version in [1, 2] {
            let rows = WAYS.map(|way| {
                let contestant =
                    Contestant::new(way.name(), move || way.pull(context, host, cut, version));
                let contestant = contestant.before(move || {
                    way.clear(context)?;
                    if version == 2 { run_all(way.pull(context, host, cut, 1)) } else { Ok(()) }
                });
                ("", Some(contestant))
            });
            let title = format!("{cut}, version {version}");
            let rivals = ["skopeo", "podman", "quire pull, eStargz"];
            let (table, ratios) = race(context, &title, rows, &rivals)?;
            findings.extend(ratios.into_iter().map(|it| format!("{title}: {it}")));
            tables.push(table);
        }
    }
    for (cut, title) in CUTS {
        let [one, both] = [1, 2].map(|last| unique(&versions, cut, last));
        let new: Vec<_> = both?.iter().zip(one?).map(|(both, one)| both - one).collect();
        findings.push(format!(
            "{title}: version 2 has {} bytes in files that version 1 lacks, {} in whole blocks",
            new[0], new[1]
        ));
    }
    let sizes = vec![second(context, host)?, all(context, host, &versions)?];
    Ok(Report {
        name: "versions",
        about: format!(
            "{COUNT} consecutive releases of an application (Django 4.2.1 and those that followed, with what it needs) \
             on Debian with Python, from Debian's docker-registry on loopback. *Layered*: system, runtime and application \
             are layers, of which the last one differs. *Flat*: one layer has everything, so that versions share no \
             blob. Version 1 goes into an empty store, version 2 to where version 1 is. A `syncfs` of the file system is on everybody's \
             clock."
        ),
        tables,
        sizes,
        findings,
    })
}

/// Pushes all versions to the registry with gzip layers, and the first two also as eStargz.
fn publish(
    context: &Context<'_>,
    versions: &Versions,
    host: &str,
    cut: Cut,
    title: &str,
) -> Result<()> {
    let draft = context.work.join("draft");
    for version in 1..=COUNT {
        let mut config = layout::Config::default();
        config.command(&["python3", "-m", "gunicorn"]).folder("/opt/app");
        layout::write(&draft, &config, &versions.layers(cut, version)?)?;
        let target = format!("{host}/{}", tag(false, title, version));
        registry::copy(&draft, &target)?;
        remove(&draft)?;
        if version <= 2 {
            let chunked = format!("{host}/{}", tag(true, title, version));
            registry::optimize(context, &target, &chunked)?;
        }
    }
    Ok(())
}

/// Costs of the second version: bytes from the registry and on the disk.
fn second(context: &Context<'_>, host: &str) -> Result<Sizes> {
    let proxy = Proxy::to(host)?;
    let mut rows = Vec::new();
    for (_, cut) in CUTS {
        for way in WAYS {
            way.clear(context)?;
            let mut row = Vec::new();
            let mut before = 0;
            for version in [1, 2] {
                proxy.received();
                run_all(way.pull(context, &proxy.host, cut, version))?;
                let now = way.disk(context)?;
                row.extend([proxy.received(), now - before]);
                before = now;
            }
            rows.push((format!("{cut}, {}", way.name()), row));
            way.clear(context)?;
        }
    }
    let columns = ["1: fetched", "1: disk", "2: fetched", "2: disk"];
    Ok(Sizes::new("Disk space of two versions", Unit::Megabytes, columns, rows))
}

/// Disk use after all versions, compared with the size of their files.
fn all(context: &Context<'_>, host: &str, versions: &Versions) -> Result<Sizes> {
    let mut rows = Vec::new();
    for (cut, title) in CUTS {
        let mut row = unique(versions, cut, COUNT)?;
        for way in [Quire, Podman] {
            way.clear(context)?;
            for version in 1..=COUNT {
                run_all(way.pull(context, host, title, version))?;
            }
            row.push(way.disk(context)?);
            if way == Quire {
                for part in ["objects", "images", "layers"] {
                    row.push(disk(&context.work.join("store").join(part))?);
                }
            }
            way.clear(context)?;
        }
        rows.push((String::from(title), row));
    }
    rows.sort();
    let title = format!("The disk after {COUNT} versions");
    let columns =
        ["unique bytes", "in blocks", "quire", "of that objects", "images", "layers", "podman"];
    Ok(Sizes::new(title, Unit::Megabytes, columns, rows))
}

/// Python script: sums the sizes of all different file contents in all layers of the versions up to one, and of the
/// blocks of 4096 bytes that they fill.
const UNIQUE: &str = "
import hashlib, sys, tarfile
sizes = {}
for name in sys.argv[1:]:
    with tarfile.open(name) as tar:
        for entry in tar:
            if entry.isreg():
                digest = hashlib.file_digest(tar.extractfile(entry), 'sha256').digest()
                sizes[digest] = entry.size
print(sum(sizes.values()), sum((it + 4095) // 4096 * 4096 for it in sizes.values()))
";
fn unique(versions: &Versions, cut: Cut, last: usize) -> Result<Vec<u64>> {
    let mut files = Vec::new();
    for version in 1..=last {
        files.extend(versions.layers(cut, version)?.into_iter().map(|it| it.file));
    }
    files.sort_unstable();
    files.dedup();
    let text = run!("python3 -c {UNIQUE} {files...}")?;
    text.split_whitespace().map(|it| Ok(it.parse()?)).collect()
}
