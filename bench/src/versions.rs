//! The next version of an image that is in the store, and the costs of many versions.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::import::{podman, race, remove_podman};
use super::measure::Contestant;
use super::proxy::Proxy;
use super::report::{Report, Sizes, Unit};
use crate::Context;
use rig::Skipped;
use rig::cache::remove;
use rig::inputs::layout;
use rig::inputs::versions::{self, COUNT, Cut, Versions};
use rig::process::{need, quiet};
use rig::tools;
use testing::daemon::{Daemon, PROGRAM};

/// A tool that stores images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Quire,
    /// Quire with eStargz layers, of which only the new parts are downloaded.
    QuireChunked,
    Umoci,
    Podman,
}

use Way::{Podman, Quire, QuireChunked, Umoci};

const WAYS: [Way; 4] = [Quire, QuireChunked, Umoci, Podman];
const CUTS: [Cut; 2] = [Cut::Layered, Cut::Flat];

impl Way {
    fn name(self) -> Result<String> {
        Ok(match self {
            Quire => String::from("quire pull, gzip"),
            QuireChunked => String::from("quire pull, eStargz"),
            Umoci => format!(
                "skopeo copy ({}), umoci unpack ({})",
                crate::version("skopeo", "--version")?,
                crate::version("umoci", "--version")?
            ),
            Podman => format!("podman pull ({})", crate::version("podman", "--version")?),
        })
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
        cut: Cut,
        version: usize,
    ) -> Result<Vec<Command>> {
        let image = format!("{host}/{}", tag(self == QuireChunked, cut, version));
        let place = |name: &str| context.work.join(name);
        Ok(match self {
            Quire | QuireChunked => {
                let mut quire = Command::new(context.quire);
                quire.arg("--store").arg(place("store")).arg("pull").arg(image);
                vec![quire]
            }
            Umoci => {
                let copied = format!("{}:{version}", place("copied").display());
                let mut copy = Command::new(need("skopeo")?);
                copy.args(["copy", "--quiet", "--src-tls-verify=false"]);
                copy.arg(format!("docker://{image}")).arg(format!("oci:{copied}"));
                let mut unpack = Command::new(need("umoci")?);
                unpack.args(["unpack", "--image", &copied]);
                unpack.arg(place("bundles").join(version.to_string()));
                vec![copy, unpack]
            }
            Podman => {
                let mut podman = podman(context, context.work)?;
                podman.args(["pull", "--quiet", "--tls-verify=false", &image]);
                vec![podman]
            }
        })
    }

    /// Removes all images of the tool.
    fn clear(self, context: &Context<'_>) -> Result<()> {
        if self == Podman {
            return remove_podman(context);
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

fn tag(is_chunked: bool, cut: Cut, version: usize) -> String {
    let packing = if is_chunked { "chunked" } else { "gzip" };
    format!("{}-{packing}:{version}", title(cut))
}

fn title(cut: Cut) -> &'static str {
    match cut {
        Cut::Layered => "layered",
        Cut::Flat => "flat",
    }
}

fn run(commands: Vec<Command>) -> Result<()> {
    commands.into_iter().try_for_each(|mut it| quiet(&mut it).map(drop))
}

/// Bytes of the blocks that a folder takes.
pub(super) fn disk(path: &Path) -> Result<u64> {
    let mut du = Command::new("du");
    let text = quiet(du.args(["--summarize", "--block-size=1"]).arg(path))?;
    let number = text.split_whitespace().next().context("du says nothing")?;
    Ok(number.parse()?)
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let versions = versions::make(context.cache, false)?;
    let registry = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let registry = registry.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    for tool in ["skopeo", "umoci", "podman"] {
        need(tool)?;
    }
    for cut in CUTS {
        publish(context, &versions, &registry.host, cut)?;
    }
    let (mut tables, mut findings) = (Vec::new(), Vec::new());
    for cut in CUTS {
        for version in [1, 2] {
            let mut contestants = Vec::new();
            for way in WAYS {
                let host = &registry.host;
                let pull = move || way.pull(context, host, cut, version);
                contestants.push(Contestant::new(&way.name()?, pull).before(move || {
                    way.clear(context)?;
                    if version == 2 { run(way.pull(context, host, cut, 1)?) } else { Ok(()) }
                }));
            }
            let title = format!("{}, version {version}", title(cut));
            let (table, ratios) = race(
                context,
                contestants,
                &title,
                &[],
                &["skopeo", "podman", "quire pull, eStargz"],
            )?;
            findings.extend(ratios.into_iter().map(|it| format!("{title}: {it}")));
            tables.push(table);
        }
    }
    for cut in CUTS {
        let [one, both] = [1, 2].map(|last| unique(&versions, cut, last));
        let new: Vec<_> = both?.iter().zip(one?).map(|(both, one)| both - one).collect();
        findings.push(format!(
            "{}: version 2 has {} bytes in files that version 1 lacks, {} in whole blocks",
            title(cut),
            new[0],
            new[1]
        ));
    }
    let sizes = vec![second(context, &registry.host)?, all(context, &registry.host, &versions)?];
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
fn publish(context: &Context<'_>, versions: &Versions, host: &str, cut: Cut) -> Result<()> {
    let (draft, crane) = (context.work.join("draft"), tools::crane(context.cache)?);
    for version in 1..=COUNT {
        let mut config = layout::Config::default();
        config.command(&["python3", "-m", "gunicorn"]).folder("/opt/app");
        layout::write(&draft, &config, &versions.layers(cut, version)?)?;
        let mut push = Command::new(need("skopeo")?);
        push.args(["copy", "--quiet", "--dest-tls-verify=false"]);
        push.arg(format!("oci:{}:latest", draft.display()));
        let target = format!("{host}/{}", tag(false, cut, version));
        quiet(push.arg(format!("docker://{target}")))?;
        remove(&draft)?;
        if version <= 2 {
            let chunked = format!("{host}/{}", tag(true, cut, version));
            quiet(Command::new(&crane).args(["optimize", &target, &chunked]))?;
            if !quiet(Command::new(&crane).args(["manifest", &chunked]))?
                .contains("stargz/toc.digest")
            {
                bail!("crane made no eStargz layers");
            }
        }
    }
    Ok(())
}

/// Costs of the second version: bytes from the registry and on the disk.
fn second(context: &Context<'_>, host: &str) -> Result<Sizes> {
    let proxy = Proxy::to(host)?;
    let mut rows = Vec::new();
    for cut in CUTS {
        for way in WAYS {
            way.clear(context)?;
            let mut row = Vec::new();
            let mut before = 0;
            for version in [1, 2] {
                proxy.received();
                run(way.pull(context, &proxy.host, cut, version)?)?;
                let now = way.disk(context)?;
                row.extend([proxy.received(), now - before]);
                before = now;
            }
            rows.push((format!("{}, {}", title(cut), way.name()?), row));
            way.clear(context)?;
        }
    }
    Ok(Sizes {
        title: String::from("What two versions take"),
        unit: Unit::Megabytes,
        columns: vec!["1: fetched", "1: disk", "2: fetched", "2: disk"],
        rows,
    })
}

/// Disk use after all versions, compared with the size of their files.
fn all(context: &Context<'_>, host: &str, versions: &Versions) -> Result<Sizes> {
    let mut rows = BTreeMap::new();
    for cut in CUTS {
        let mut row = unique(versions, cut, COUNT)?;
        for way in [Quire, Podman] {
            way.clear(context)?;
            for version in 1..=COUNT {
                run(way.pull(context, host, cut, version)?)?;
            }
            row.push(way.disk(context)?);
            if way == Quire {
                for part in ["objects", "images", "layers"] {
                    row.push(disk(&context.work.join("store").join(part))?);
                }
            }
            way.clear(context)?;
        }
        rows.insert(String::from(title(cut)), row);
    }
    Ok(Sizes {
        title: format!("The disk after {COUNT} versions"),
        unit: Unit::Megabytes,
        columns: vec![
            "unique bytes",
            "in blocks",
            "quire",
            "of that objects",
            "images",
            "layers",
            "podman",
        ],
        rows: rows.into_iter().collect(),
    })
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
    let text = quiet(Command::new("python3").args(["-c", UNIQUE]).args(files))?;
    text.split_whitespace().map(|it| Ok(it.parse()?)).collect()
}
