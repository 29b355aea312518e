//! From an empty store to a program's first output, out of a near or distant registry: with all layers, or lazily.

mod containers;
mod mounted;
mod nydus;
mod outages;
mod quire;
mod served;
mod stargz;
mod trees;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::measure::{Contestant, Outcome, Rules, Until};
use super::proxy::{Distance, Proxy};
use super::registry;
use super::report::{Report, Sizes, Table, Unit};
use crate::command::run_all;
use crate::samples::{Program, SAMPLES, Sample};
use crate::tls::Front;
use crate::{Context, rival};
use containers::Containers;
use nydus::Nydus;
pub(super) use outages::outages;
use quire::{KINDS, Kind, Quire};
use rig::process::find_program;
use rig::{Skipped, tools};
pub(super) use served::served;
use stargz::Stargz;
use testing::daemon::Daemon;

/// Distances of the registry.
const PROFILES: [(&str, Distance); 5] = [
    ("no delay", Distance::new(0, None)),
    ("20 ms a request", Distance::new(20, None)),
    ("20 ms a request, slow start", Distance::new(20, None).with_slow_start()),
    ("5 ms a request, 200 Mbit/s", Distance::new(5, Some(200))),
    ("20 ms a request, TLS and token", Distance::new(20, None).with_tls()),
];

/// Disk space that the stores of finished runs may take before they are removed, in bytes.
const MOST_ASIDE: u64 = 12_000_000_000;

/// A way to start a program of an image that is only in the registry.
trait Way {
    fn name(&self) -> &'static str;

    /// Removes the state of an earlier run and starts the services that outlive a container, not timed. `prepare`
    /// gets the data folder while it is still empty.
    fn before_with(&self, start: &Start<'_>, prepare: &dyn Fn(&Path) -> Result<()>) -> Result<()>;

    fn before(&self, start: &Start<'_>) -> Result<()> {
        self.before_with(start, &|_| Ok(()))
    }

    /// The data folder.
    fn data(&self) -> PathBuf;

    /// Called after [`Way::after`]: mounts the image again, with the data that was kept.
    fn again(&self, start: &Start<'_>) -> Result<()> {
        run_all(self.mount(start))
    }

    /// Whether the way is not Quire's. Its failure is then reported as a finding and does not end the bench.
    fn is_rival(&self) -> bool {
        true
    }

    /// Whether the way knows in advance which data a program reads.
    fn is_prepared(&self) -> bool;

    /// Fetches the data needed for a mount, and mounts the image.
    fn mount(&self, start: &Start<'_>) -> Result<Vec<Command>>;

    /// Mount point of [`Way::mount`].
    fn tree(&self) -> PathBuf;

    /// Waits until a mounted image is completely downloaded; false if the way does not download all of it.
    fn settle(&self, _: &Start<'_>) -> Result<bool> {
        Ok(false)
    }

    /// Fetches the data needed for a start, and runs the program in a container.
    fn run(&self, start: &Start<'_>, program: &Program) -> Result<Vec<Command>>;

    /// Stops the services, not timed.
    fn after(&self) -> Result<()>;
}

/// The image of a run, and its registry.
#[derive(Debug, Clone, Copy)]
struct Start<'a> {
    sample: &'a Sample,
    /// The registry's host and port.
    host: &'a str,
    /// The folder of certificates, if the registry requires TLS.
    certificate: Option<&'a Path>,
}

impl Start<'_> {
    /// Options of Quire for the registry.
    fn options(&self) -> Vec<OsString> {
        let folder = self.certificate.map(|it| vec!["--certs-dir".into(), it.into()]);
        folder.unwrap_or_default()
    }

    fn image(&self) -> String {
        format!("{}/{}:1", self.host, self.sample.name)
    }

    /// The same image, whose command is this program. Its index has the recorded start.
    fn image_of(&self, program: &Program) -> String {
        format!("{}/{}:{}", self.host, self.sample.name, program.trace)
    }
}

/// An image that other ways convert for a registry.
#[derive(Clone, Copy)]
struct Draft<'a> {
    containers: &'a Containers<'a>,
    start: &'a Start<'a>,
    layout: &'a Path,
    /// The programs for which the variants are optimized.
    programs: &'a [Program],
}

/// The inputs that all runs share.
struct Stage<'a> {
    context: &'a Context<'a>,
    runtime: PathBuf,
    /// Programs of the other ways; none if they are not available.
    nydus: Option<PathBuf>,
    stargz: Option<PathBuf>,
}

/// The settings of one table.
struct Race<'a> {
    title: String,
    until: Until,
    is_cold: bool,
    /// Called after [`Way::before`], not timed.
    prepare: &'a dyn Fn(&dyn Way) -> Result<()>,
    commands: &'a dyn Fn(&dyn Way) -> Result<Vec<Command>>,
}

/// The results so far.
#[derive(Default)]
struct Found {
    tables: Vec<Table>,
    findings: Vec<String>,
    /// Traffic by table title, one entry for each way.
    traffic: Vec<(String, Vec<Traffic>)>,
    /// Waiting times of readers, by event.
    waits: Vec<(String, Vec<Duration>)>,
}

/// Traffic of a way's last run.
struct Traffic {
    way: &'static str,
    bytes: u64,
    requests: u64,
}

/// An image in a registry, in the variants for all ways.
struct Published<'a> {
    layout: PathBuf,
    daemon: Daemon,
    /// Bytes that were sent for the indexes.
    sent: u64,
    containers: Containers<'a>,
    nydus: Option<Converted<nydus::Digest>>,
    stargz: Option<Converted<stargz::Layers>>,
}

/// An image's variant for another way.
struct Converted<T> {
    program: PathBuf,
    plain: T,
    /// Variants that are optimized for a program, by the names of its trace.
    optimized: Vec<(&'static str, T)>,
}

impl<T> Converted<T> {
    /// The variant for a program.
    fn of(&self, is_optimized: bool, program: &Program) -> Result<&T> {
        if !is_optimized {
            return Ok(&self.plain);
        }
        let found = self.optimized.iter().find(|(trace, _)| *trace == program.trace);
        found.map(|(_, variant)| variant).context("it was optimized")
    }
}

impl<'a> Stage<'a> {
    fn new(context: &'a Context<'a>, found: &mut Found) -> Result<Self> {
        let runtime = find_program("runc").or_else(|| find_program("crun"));
        let runtime =
            runtime.ok_or_else(|| Skipped("neither runc nor crun is installed".into()))?;
        let nydus = found.rival("Nydus v3", tools::nydus(context.cache))?;
        let stargz = found.rival("stargz-snapshotter", tools::stargz(context.cache))?;
        Ok(Self { context, runtime, nydus, stargz })
    }

    /// Pushes an image to a registry with its index and the variants of the other ways, optimized for these programs.
    fn publish(&'a self, sample: &Sample, programs: &[Program]) -> Result<Published<'a>> {
        let context = self.context;
        let layout = sample.layout(context.cache)?;
        let daemon = registry::start(context)?;
        let image = format!("{}/{}:1", daemon.host, sample.name);
        registry::copy(&layout, &image)?;
        let maker = context.work.join("maker");
        let near = Start { sample, host: &daemon.host, certificate: None };
        let sent = quire::publish(self, &near, &maker, programs)?;
        let containers = Containers::learn(self, &maker, &image, sample.programs)?;
        context.set_aside("maker")?;
        let draft = Draft { containers: &containers, start: &near, layout: &layout, programs };
        let nydus = self.nydus.as_ref().map(|it| nydus::publish(self, it, draft)).transpose()?;
        let stargz = self.stargz.as_ref().map(|it| stargz::publish(self, it, draft)).transpose()?;
        Ok(Published { layout, daemon, sent, containers, nydus, stargz })
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let mut found = Found::default();
    let stage = Stage::new(context, &mut found)?;
    for sample in &SAMPLES {
        let has_start = sample.programs.iter().any(|it| is_wanted(context, it));
        if has_start || trees::titles(sample.name).iter().any(|title| context.wants(title)) {
            starts(&stage, sample, &mut found)?;
        }
    }
    let sizes = found.sizes();
    Ok(Report {
        name: "lazy",
        about: String::from(
            "From an empty store to the first output of a program in a container, or to the end of `initdb`. Each \
             image is Debian's minimal system and a layer of packages: PostgreSQL (237 MB of gzip), NumPy, Node.js, \
             a JVM, nginx. nginx and PostgreSQL run as servers, and their first answer is the first output: a loop \
             in the container asks them each 10 ms. PostgreSQL makes its database before. The registry is Debian's \
             docker-registry on loopback behind a proxy, which adds a delay to each connection and each request, and \
             may bound the bytes a second of all connections together. With \"slow start\", each connection also sends \
             14,600 bytes in the first round trip of 20 ms and twice as many in each further one, up to 6 MiB. \
             With \"TLS and token\", HAProxy in front of the registry terminates TLS 1.3 and requires a token, which \
             it hands out itself; the proxy delays what clients send, so the TLS handshake takes 20 ms as well. For \
             Nydus, `curl` has the token when it fetches the bootstrap. Requests for the token, and those that are \
             refused without it, are not counted. The registry's \
             work is on every row's clock. Caches are dropped before each run.\n\n\
             The clock excludes making and pushing the index, and the start of `quire serve --lazy`, whose processor \
             time and memory are in no row. `quire index` records the start of an image, so each program has a copy \
             of the image whose command it is. In the row \"without a recorded start\", the index was made by `quire \
             index --no-start`. On the clock and in the bytes: manifest, config, the index, all data. Bytes \
             and requests are those of the last run, until its container is gone.\n\n\
             Rivals run the same program in \
             the same runtime, with the config.json that Quire wrote, in an overlayfs over what they mount, whose \
             upper folder is on the disk. For Nydus v3 (`nydus fanotify`) each layer is built by `nydus build` with \
             its defaults, and the layers are joined by `nydus merge`. On its clock are the bootstrap, fetched \
             compressed, the start of its service, the mount and all data; manifest and config are not fetched. It \
             prefetches nothing. Optimized, `nydus optimize` got the list of what this program reads, as recorded by \
             a mount of `nydus fuse`, and the service prefetches it. Conversion and sending are on no clock, and its \
             service's processor time and memory in no row.\n\n\
             stargz is the library of stargz-snapshotter 0.19.1 in \
             a program of ours, since its own needs containerd. It runs before the clock starts. Each layer is \
             converted as `ctr-remote images optimize` does it, and mounted with the settings that are its defaults, \
             but nothing is fetched in the background and, in one row, nothing is prefetched. Optimized, the files \
             that the very program opens come first in each layer, and the container starts when they are \
             downloaded, as with the snapshotter. Manifest and config are not fetched.\n\n\
             In the tables of trees, \
             the image is mounted read-only, without a container, and each file is read by `cat`, one after the \
             other, or `ls -lR` lists all. \"mounted, everything read\" has the pull and the mount on the clock. The \
             first `ls -lR` is the first thing that is done after the mount, with warm caches; the second comes \
             right behind one that is not timed. For \"complete\" all of the image is present before: \"completed\" has \
             waited for `quire mount --lazy --complete`, and all others have read each file once; then caches are \
             dropped.",
        ),
        tables: found.tables,
        sizes,
        findings: found.findings,
    })
}

/// The way to a registry.
struct Route {
    proxy: Proxy,
    /// HAProxy, which terminates TLS, the proxy behind it, and the folder with its certificate.
    secure: Option<(Front, Proxy, PathBuf)>,
}

impl Route {
    fn new(work: &Path, server: &str, distance: Distance) -> Result<Self> {
        if !distance.has_tls {
            return Ok(Self { proxy: Proxy::far(server, distance)?, secure: None });
        }
        let behind = Proxy::to(server)?;
        let front = Front::start(work, &behind.host)?;
        let proxy = Proxy::far(front.host(), distance)?;
        let folder = work.join("certs");
        let hosts = folder.join(&proxy.host);
        fs::create_dir_all(&hosts)?;
        let (host, certificate) = (&proxy.host, front.certificate.display());
        fs::write(
            hosts.join("hosts.toml"),
            format!("server = \"https://{host}\"\nca = \"{certificate}\"\n"),
        )?;
        Ok(Self { proxy, secure: Some((front, behind, folder)) })
    }

    fn start<'a>(&'a self, sample: &'a Sample) -> Start<'a> {
        let certificate = self.secure.as_ref().map(|(_, _, folder)| folder.as_path());
        Start { sample, host: &self.proxy.host, certificate }
    }

    /// Bytes and requests since the last call. With TLS, the requests are those that the registry got: those for the
    /// token, and those that were refused without it, are not counted.
    fn traffic(&self) -> (u64, u64) {
        let counted = self.secure.as_ref().map_or(&self.proxy, |(_, behind, _)| behind);
        (self.proxy.received(), counted.requests())
    }
}

/// Whether a program is timed at any distance.
fn is_wanted(context: &Context<'_>, program: &Program) -> bool {
    PROFILES.iter().any(|(place, _)| context.wants(&format!("{}, {place}", program.title)))
}

/// Measures all programs of one image at all distances.
fn starts(stage: &Stage<'_>, sample: &Sample, found: &mut Found) -> Result<()> {
    let context = stage.context;
    let wanted: Vec<_> =
        sample.programs.iter().filter(|it| is_wanted(context, it)).copied().collect();
    let published = stage.publish(sample, &wanted)?;
    let Published { daemon, sent, containers, nydus: converted, stargz: estargz, .. } = &published;
    found.findings.push(format!(
        "{}: the indexes of the image, one for each program, and their recipes have {sent} bytes in the registry",
        sample.name
    ));
    let mut ways: Vec<Box<dyn Way + '_>> = Vec::new();
    ways.extend(KINDS.map(|kind| Box::new(Quire::new(stage, kind)) as Box<dyn Way>));
    if let Some(converted) = converted {
        for (name, is_optimized) in
            [("Nydus v3, fanotify", false), ("Nydus v3, fanotify, optimized", true)]
        {
            ways.push(Box::new(Nydus { name, containers, converted, is_optimized }));
        }
    }
    if let Some(converted) = estargz {
        for (name, is_optimized) in [("stargz", false), ("stargz, optimized", true)] {
            ways.push(Box::new(Stargz::new(name, containers, converted, is_optimized)));
        }
    }
    for (number, (place, distance)) in PROFILES.into_iter().enumerate() {
        let mut titles = sample.programs.iter().map(|it| format!("{}, {place}", it.title));
        let is_wanted = titles.any(|title| context.wants(&title));
        if !is_wanted && !trees::titles_at(sample.name, number).iter().any(|it| context.wants(it)) {
            continue;
        }
        let Some(route) = rival(Route::new(context.work, &daemon.host, distance))?.map_or_else(
            |skipped| {
                found.findings.push(format!("\"{place}\" is absent: {}", skipped.0));
                None
            },
            Some,
        ) else {
            continue;
        };
        let start = route.start(sample);
        let some: Vec<_> = ways
            .iter()
            .map(AsRef::as_ref)
            .filter(|it| ![Kind::WholeTar, Kind::Completed].map(Kind::name).contains(&it.name()))
            .collect();
        for program in sample.programs {
            let title = format!("{}, {place}", program.title);
            if context.wants(&title) {
                let commands = |way: &dyn Way| way.run(&start, program);
                let (until, prepare) = (program.until, &|_: &dyn Way| Ok(()));
                let table = Race { title, until, is_cold: true, prepare, commands: &commands };
                race(stage, &some, &start, &route, table, found)?;
            }
        }
        let some: Vec<_> = ways.iter().map(AsRef::as_ref).filter(|it| !it.is_prepared()).collect();
        trees::walks(stage, &some, &start, number, &route, found)?;
    }
    Ok(())
}

/// Measures one table.
fn race(
    stage: &Stage<'_>,
    ways: &[&dyn Way],
    start: &Start<'_>,
    route: &Route,
    race: Race<'_>,
    found: &mut Found,
) -> Result<()> {
    stage.context.make_room(MOST_ASIDE)?;
    let traffic: Vec<_> = ways.iter().map(|_| std::cell::Cell::new((0, 0))).collect();
    let mut contestants = Vec::new();
    for (way, traffic) in ways.iter().zip(&traffic) {
        let way = *way;
        let contestant = Contestant::new(way.name(), move || (race.commands)(way));
        let contestant = contestant.until(race.until).before(move || {
            way.before(start)?;
            (race.prepare)(way)?;
            let _before = route.traffic();
            Ok(())
        });
        contestants.push(contestant.after(move || {
            traffic.set(route.traffic());
            way.after()
        }));
    }
    let rules = Rules { cold: race.is_cold, ..Rules::new(stage.context.runs) };
    found.tables.push(rules.race(&*race.title, contestants)?);
    let traffic = ways.iter().zip(&traffic).map(|(way, traffic)| {
        let (bytes, requests) = traffic.get();
        Traffic { way: way.name(), bytes, requests }
    });
    found.traffic.push((race.title, traffic.collect()));
    Ok(())
}

impl Found {
    /// Path of a way's program. If it is not available, the page lists it as absent.
    fn rival(&mut self, name: &str, built: Result<PathBuf>) -> Result<Option<PathBuf>> {
        match rival(built)? {
            Ok(program) => Ok(Some(program)),
            Err(skipped) => {
                println!("{name}: {skipped}");
                self.findings.push(format!("{name} is absent: {}", skipped.0));
                Ok(None)
            }
        }
    }

    /// Tables of the traffic of all ways, one column each.
    fn sizes(&self) -> Vec<Sizes> {
        let mut columns: Vec<&'static str> = Vec::new();
        for it in self.traffic.iter().flat_map(|(_, row)| row) {
            if !columns.contains(&it.way) {
                columns.push(it.way);
            }
        }
        let table = |title: &str, unit, of: fn(&Traffic) -> u64| {
            let row = |row: &[Traffic]| {
                let value = |column: &&str| row.iter().find(|it| it.way == *column).map_or(0, of);
                columns.iter().map(value).collect()
            };
            let rows = self.traffic.iter().map(|(title, it)| (title.clone(), row(it))).collect();
            Sizes::new(title, unit, columns.clone(), rows)
        };
        let percent = |title: &String, outcomes: &[Outcome]| {
            let time = |name: &str| outcomes.iter().find(|it| it.name == name).map(|it| it.median);
            let whole = time(Kind::Whole.name()).unwrap_or_default().as_micros().max(1);
            let part = |column: &&str| {
                let time = time(column).unwrap_or_default().as_micros();
                u64::try_from((time * 100 + whole / 2) / whole).unwrap_or(u64::MAX)
            };
            (title.clone(), columns.iter().map(part).collect::<Vec<_>>())
        };
        let title = format!("Time, in percent of \"{}\"", Kind::Whole.name());
        let rows = self.tables.iter().map(|it| percent(&it.title, &it.outcomes)).collect();
        vec![
            Sizes::new(title, Unit::Percent, columns.clone(), rows),
            table("Bytes from the registry, with HTTP's own", Unit::Megabytes, |it| it.bytes),
            table("Requests to the registry", Unit::Times, |it| it.requests),
        ]
    }
}
