//! Images in containerd: with containerd's snapshotters, with Quire, and with third-party ones.

mod aims;
mod costs;
mod kind;
mod node;
mod pods;
mod related;
mod roots;

use std::cell::RefCell;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::measure::{Contestant, Rules, Until};
use super::registry;
use super::report::{Report, Table};
use super::samples::{self, Program, Sample};
use crate::Context;
use crate::command::more;
use crate::rival;
use kind::Kind;
use node::Node;
use rig::inputs;
use rig::inputs::sid::{self, Sid};
use rig::process::{need, quiet};
use rig::{Skipped, tools};
use testing::daemon::Daemon;

/// nydus-snapshotter 0.16.1 is in the Go module proxy, but nydusd, which it starts for each image, is not.
const NO_NYDUS: &str = "it needs nydusd, whose newest version in a package registry is 2.2.0 of 2023 (crates.io: nydus-rs)";

/// The page's description of the measurements.
const ABOUT: &str = "Debian with nginx and Debian with PostgreSQL, two gzip layers each, the lower one the same, \
from Debian's docker-registry on loopback. containerd 2.4.2 has its own folder and is started again before each run, \
empty or with the images that a title names; each snapshotter pulls and runs each image once before the first table; \
it and the service beside it are ready when the clock starts. `ctr image pull` and `ctr run` are the commands, until \
nginx has answered its first request, or until `postgres --version` has printed. *pulled*: only `ctr image pull`. \
Programs and blobs of the registry are in the page cache. The bench itself syncs nothing while the clock runs. \
Processor time is that of the commands, of containerd with all it starts, and of the service; the largest process is \
one of the commands.\n\n\
`overlayfs` and `erofs` are containerd's own; erofs with its differ, erofs-utils of Debian \
sid, and as many layers at once as there are cores. *layer_content_caches*: its layers were converted before, as \
`ctr image build-erofs-cache` does it. *by another name*: the same layers came with another image before. *layers in \
its store*: `quire pull` had the image, of which containerd knows nothing; with `--skip download` it does not fetch \
the layers. *blobs here*: `ctr content fetch` was there before. *roots*: `ctr snapshot prepare` or `rm` for each of \
so many containers, one after the other; the start of `ctr` is the same for all. Quire mounts a root when it is \
prepared, and unmounts it when it is removed; containerd's snapshotters leave that to the program that starts the \
container. *at a time*: `ctr run --detach` of `sleep` for each of so many containers, by xargs. *lazy*: \
stargz-snapshotter gets layers of `crane optimize`, Quire those of the image as it is with the index that `quire \
index --push` made; both start before layers are downloaded, and neither has a record of the files that a start reads; \
soci-snapshotter pulls whole layers, in parallel. Both are programs of ours over the libraries of these \
versions.\n\n\
Bytes written are those that the kernel counts for the disk, the least of three pulls, all synced. The \
related images are ten releases of Django on the same Python and Debian; each container of them reads its \
application and its Python. The page cache is what `/proc/meminfo` counts as file pages.";

/// Disk space that the state of finished runs may take before it is removed, in bytes.
const MOST_ASIDE: u64 = 12_000_000_000;

/// The inputs that all contestants share.
struct Stage<'a> {
    context: &'a Context<'a>,
    /// Folder of containerd, its client and its shim.
    programs: PathBuf,
    sid: Sid,
    registry: Daemon,
    /// Third-party snapshotters; none if they are not available.
    stargz: Option<PathBuf>,
    soci: Option<PathBuf>,
    /// Third-party snapshotters that failed to run the first image.
    failed: RefCell<Vec<Kind>>,
}

impl<'a> Stage<'a> {
    fn new(context: &'a Context<'a>, findings: &mut Vec<String>) -> Result<Self> {
        need("runc")?;
        let mut rival = |name: &str, built: Result<PathBuf>| match rival(built)? {
            Ok(program) => anyhow::Ok(Some(program)),
            Err(Skipped(reason)) => {
                println!("SKIPPED: {name}: {reason}");
                findings.push(format!("SKIPPED: {name}: {reason}"));
                Ok(None)
            }
        };
        let stargz = rival("stargz-snapshotter", tools::stargz(context.cache))?;
        let soci = rival("soci-snapshotter", tools::soci(context.cache))?;
        rival("nydus-snapshotter", Err(Skipped(NO_NYDUS.into()).into()))?;
        let programs = tools::containerd(context.cache, tools::CONTAINERD)?.join("bin");
        let (registry, sid) = (registry::start(context)?, sid::make(context.cache, false)?);
        let failed = RefCell::default();
        Ok(Self { context, programs, sid, registry, stargz, soci, failed })
    }

    /// The `PATH` by which an engine finds its shim, the runtime, and a recent mkfs.erofs.
    fn path(&self) -> Result<std::ffi::OsString> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = [self.programs.clone(), self.sid.dir().join("bin")];
        let all = own.into_iter().chain(std::env::split_paths(&path));
        Ok(std::env::join_paths(all.chain([PathBuf::from("/usr/sbin")]))?)
    }

    /// Folder of the layers that containerd's EROFS snapshotter may link.
    fn caches(&self) -> PathBuf {
        self.context.work.join("caches")
    }

    /// Reference of the image variant that a snapshotter needs, under one of two names.
    fn image(&self, sample: &Sample, kind: Kind, name: &str) -> String {
        format!("{}/{}:{}", self.registry.host, sample.name, kind.tag(name))
    }

    /// Reference of an image that has only the lowest layer.
    fn base(&self) -> String {
        format!("{}/base:1", self.registry.host)
    }

    /// Pushes an image to the registry, in all variants and under both names.
    fn publish(&self, sample: &Sample) -> Result<()> {
        let layout = sample.layout(self.context.cache)?;
        for name in ["1", "2"] {
            let plain = self.image(sample, Kind::Quire, name);
            registry::copy(&layout, &plain)?;
            if self.stargz.is_some() {
                let estargz = self.image(sample, Kind::Stargz, name);
                registry::optimize(self.context, &plain, &estargz)?;
            }
        }
        registry::publish_index(self.context, &self.image(sample, Kind::QuireLazy, "1"))?;
        fill_caches(self, sample)
    }

    /// Runs a program once with each snapshotter, not timed. A third-party snapshotter that fails is left out and
    /// does not end the bench. These runs also bring the file system's own tables into the page cache, which the
    /// first runs that write many files would otherwise wait for.
    fn try_all(&self, sample: &Sample, program: &Program) -> Result<Vec<String>> {
        let mut findings = Vec::new();
        for entry in COLD.iter().filter(|it| it.kind.is_here(self)) {
            let (kind, node) = (entry.kind, Node::new(self, entry.kind));
            let image = self.image(sample, kind, "1");
            let tried = || -> Result<()> {
                node.start_anew()?;
                quiet(&mut node.pull(&image))?;
                quiet(&mut node.run(&image, program)).map(drop)
            };
            match tried() {
                Err(error) if kind.is_rival() => {
                    let finding = format!("SKIPPED: {} does not work here: {error:#}", kind.name());
                    println!("{finding}");
                    findings.push(finding);
                    self.failed.borrow_mut().push(kind);
                }
                tried => tried.with_context(|| kind.name())?,
            }
        }
        Ok(findings)
    }
}

/// The state of the engine and the store before the clock starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Here {
    Nothing,
    /// The lowest layer is present, pulled with another image.
    Base,
    /// All blobs of the image are present, but no snapshot.
    Blobs,
    /// The same layers are present, pulled under another name.
    OtherName,
    /// The layers are in Quire's store, but the engine has no record of them.
    InStore,
}

impl Here {
    fn prepare(self, stage: &Stage<'_>, node: &Node<'_>, sample: &Sample) -> Result<()> {
        let image = |name| stage.image(sample, node.kind, name);
        match self {
            Self::Nothing => Ok(()),
            Self::Base => quiet(&mut node.pull(&stage.base())).map(drop),
            Self::Blobs => quiet(&mut node.fetch(&image("1"))).map(drop),
            Self::OtherName => quiet(&mut node.pull(&image("2"))).map(drop),
            Self::InStore => node.pull_into_store(&image("1")),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    name: &'static str,
    kind: Kind,
    here: Here,
}

impl Entry {
    const fn new(kind: Kind, here: Here) -> Self {
        Self { name: kind.name(), kind, here }
    }

    const fn named(name: &'static str, kind: Kind, here: Here) -> Self {
        Self { name, kind, here }
    }
}

/// The timed part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Pull,
    PullAndRun,
}

/// A group of tables: its contestants with their initial states, Quire first, and the timed parts.
struct Case {
    title: &'static str,
    entries: &'static [Entry],
    parts: &'static [Part],
}

const COLD: [Entry; 6] = [
    Entry::new(Kind::Quire, Here::Nothing),
    Entry::new(Kind::QuireLazy, Here::Nothing),
    Entry::new(Kind::Overlayfs, Here::Nothing),
    Entry::new(Kind::Erofs, Here::Nothing),
    Entry::new(Kind::Stargz, Here::Nothing),
    Entry::new(Kind::Soci, Here::Nothing),
];

const SHARED_BASE: [Entry; 3] = [
    Entry::new(Kind::Quire, Here::Base),
    Entry::new(Kind::Overlayfs, Here::Base),
    Entry::new(Kind::Erofs, Here::Base),
];

const LAYERS_HERE: [Entry; 8] = [
    Entry::new(Kind::QuireSkip, Here::InStore),
    Entry::new(Kind::ErofsCaches, Here::Nothing),
    Entry::named("Quire, layers in its store", Kind::Quire, Here::InStore),
    Entry::named("Quire, by another name", Kind::Quire, Here::OtherName),
    Entry::named("overlayfs, by another name", Kind::Overlayfs, Here::OtherName),
    Entry::named("erofs, by another name", Kind::Erofs, Here::OtherName),
    Entry::named("stargz-snapshotter, by another name", Kind::Stargz, Here::OtherName),
    Entry::named("soci-snapshotter, by another name", Kind::Soci, Here::OtherName),
];

const BLOBS_HERE: [Entry; 4] = [
    Entry::new(Kind::Quire, Here::Blobs),
    Entry::new(Kind::QuireWalking, Here::Blobs),
    Entry::new(Kind::Overlayfs, Here::Blobs),
    Entry::new(Kind::Erofs, Here::Blobs),
];

const CASES: [Case; 4] = [
    Case { title: "cold", entries: &COLD, parts: &[Part::PullAndRun, Part::Pull] },
    Case { title: "its base pulled before", entries: &SHARED_BASE, parts: &[Part::PullAndRun] },
    Case {
        title: "all layers here",
        entries: &LAYERS_HERE,
        parts: &[Part::PullAndRun, Part::Pull],
    },
    Case { title: "blobs here", entries: &BLOBS_HERE, parts: &[Part::Pull] },
];

pub(super) use pods::bench as pods;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let mut findings = Vec::new();
    let stage = Stage::new(context, &mut findings)?;
    let mut report =
        Report { name: "engine", about: ABOUT.to_owned(), findings, ..Report::default() };
    registry::copy(&inputs::debian_base(context.cache)?, &stage.base())?;
    for name in ["nginx", "postgres"] {
        let sample = samples::find(name);
        image(&stage, sample, &sample.programs[0], &mut report)?;
    }
    if context.wants("related") {
        let kinds = [Kind::Quire, Kind::Overlayfs, Kind::Erofs];
        report.sizes.extend(related::related(&stage, &kinds)?);
    }
    let aims = aims::aims(&report);
    report.findings.extend(aims);
    Ok(report)
}

/// Measures everything that concerns one image.
fn image(stage: &Stage<'_>, sample: &Sample, program: &Program, report: &mut Report) -> Result<()> {
    let (context, name) = (stage.context, sample.name);
    let mut is_there = false;
    let mut publish = |findings: &mut Vec<String>| {
        if !std::mem::replace(&mut is_there, true) {
            stage.publish(sample)?;
            findings.extend(stage.try_all(sample, program)?);
        }
        anyhow::Ok(())
    };
    for case in &CASES {
        for part in case.parts {
            let end = match part {
                Part::Pull => "pulled",
                Part::PullAndRun => program.title,
            };
            let title = format!("{name}, {}: {end}", case.title);
            if context.wants(&title) {
                publish(&mut report.findings)?;
                let table = race(stage, sample, program, case.entries, *part, title)?;
                report.findings.extend(table.shares());
                report.tables.push(table);
            }
        }
    }
    for part in roots::PARTS {
        let title = format!("{name}, {}", part.title());
        if context.wants(&title) {
            publish(&mut report.findings)?;
            let table = roots::race(stage, sample, part, title)?;
            report.findings.extend(match part {
                roots::Part::Started => table.shares(),
                roots::Part::Made | roots::Part::Removed => roots::each(&table),
            });
            report.tables.push(table);
        }
    }
    if context.wants(&format!("{name}, bytes")) {
        publish(&mut report.findings)?;
        let entries = [&COLD[..], &SHARED_BASE[..]];
        for (entries, title) in entries.into_iter().zip(["cold", "its base pulled before"]) {
            let title = format!("{name}, {title}: bytes written");
            report.sizes.push(costs::written(stage, entries, sample, title)?);
        }
    }
    if context.wants(&format!("{name}, memory")) {
        publish(&mut report.findings)?;
        report.sizes.push(costs::memory(stage, &COLD, sample)?);
    }
    Ok(())
}

/// Converts an image's layers by containerd for [`Kind::ErofsCaches`], as its manual describes.
fn fill_caches(stage: &Stage<'_>, sample: &Sample) -> Result<()> {
    let node = Node::new(stage, Kind::Erofs);
    node.start_anew()?;
    let image = stage.image(sample, Kind::Erofs, "1");
    quiet(&mut node.fetch(&image))?;
    let mut build = more!(node.ctr(), "image build-erofs-cache {image}", stage.caches());
    quiet(build.env("PATH", stage.path()?))?;
    node.stop()
}

fn race(
    stage: &Stage<'_>,
    sample: &Sample,
    program: &Program,
    entries: &[Entry],
    part: Part,
    title: String,
) -> Result<Table> {
    stage.context.make_room(MOST_ASIDE)?;
    let entries: Vec<_> = entries.iter().filter(|it| it.kind.is_here(stage)).collect();
    let nodes: Vec<_> = entries.iter().map(|it| Node::new(stage, it.kind)).collect();
    let mut contestants = Vec::new();
    for (entry, node) in entries.iter().zip(&nodes) {
        let image = stage.image(sample, entry.kind, "1");
        let commands = move || match part {
            Part::Pull => vec![node.pull(&image)],
            Part::PullAndRun => vec![node.pull(&image), node.run(&image, program)],
        };
        let until = if part == Part::Pull { Until::End } else { program.until };
        let contestant = Contestant::new(entry.name, commands).until(until).before(move || {
            node.start_anew()?;
            entry.here.prepare(stage, node, sample)?;
            rustix::fs::sync();
            Ok(())
        });
        contestants.push(contestant.services(|| node.spent()).after(|| node.stop()));
    }
    Rules::new(stage.context.runs).race(title, contestants)
}
