//! From an empty store to the end of a program, out of a registry that is near or far: with all layers, or lazily.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::proxy::{Distance, Proxy};
use super::registry;
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::Skipped;
use rig::inputs;
use rig::process::{find, quiet};
use testing::daemon::{Daemon, PROGRAM};

/// Where the registry is.
const PROFILES: [(&str, Distance); 3] = [
    ("no delay", Distance { delay: Duration::ZERO, bandwidth: None }),
    ("20 ms a request", Distance { delay: Duration::from_millis(20), bandwidth: None }),
    (
        "5 ms a request, 200 Mbit/s",
        Distance { delay: Duration::from_millis(5), bandwidth: Some(200_000_000 / 8) },
    ),
];

/// What is run, the name of its trace, and as whom.
const PROGRAMS: [(&str, &str, &str, &[&str]); 2] = [
    (
        "postgres --version",
        "version",
        "root",
        &["/usr/lib/postgresql/15/bin/postgres", "--version"],
    ),
    (
        "initdb",
        "initdb",
        "postgres",
        &["/usr/lib/postgresql/15/bin/initdb", "--no-sync", "--pgdata", "/tmp/data"],
    ),
];

/// How an image comes here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Whole,
    /// All layers, in the form that a lazy image has when it is complete.
    WholeTar,
    Lazy,
    /// With a trace of the very program.
    Traced,
}

const WAYS: [Way; 4] = [Way::Whole, Way::WholeTar, Way::Lazy, Way::Traced];

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Whole => "pull, run",
            Self::WholeTar => "pull --form tar, run",
            Self::Lazy => "quire pull --lazy, run --lazy",
            Self::Traced => "quire with a trace",
        }
    }

    const fn pull(self) -> &'static [&'static str] {
        match self {
            Self::Whole => &[],
            Self::WholeTar => &["--form", "tar"],
            Self::Lazy | Self::Traced => &["--lazy=require"],
        }
    }

    const fn is_lazy(self) -> bool {
        matches!(self, Self::Lazy | Self::Traced)
    }
}

/// What all runs share.
struct Stage<'a> {
    context: &'a Context<'a>,
    runtime: PathBuf,
}

impl Stage<'_> {
    fn store(&self) -> PathBuf {
        self.context.work.join("store")
    }

    fn quire(&self) -> Command {
        let mut quire = Command::new(self.context.quire);
        quire.arg("--store").arg(self.store()).arg("--quiet");
        quire
    }

    fn commands(&self, way: Way, image: &str, program: usize) -> Vec<Command> {
        let (_, trace, user, arguments) = PROGRAMS[program];
        let mut pull = self.quire();
        pull.arg("pull").args(way.pull()).arg(image);
        let mut run = self.quire();
        run.args(["run", "--rm", "--user", user, "--runtime"]).arg(&self.runtime);
        if way.is_lazy() {
            run.args(["--lazy", "--prefetch", if way == Way::Traced { trace } else { "none" }]);
        }
        run.arg(image).args(arguments);
        vec![pull, run]
    }

    /// An empty store, and the service of it.
    fn before(&self, way: Way) -> Result<Option<Service>> {
        self.context.set_aside("store")?;
        if !way.is_lazy() {
            return Ok(None);
        }
        Service::start(self).map(Some)
    }
}

/// `quire serve --lazy`, which is there before the clock starts, as a container engine is.
struct Service(Child);

impl Service {
    fn start(stage: &Stage<'_>) -> Result<Self> {
        let said = stage.context.work.join("service");
        let mut command = Command::new(stage.context.quire);
        command.arg("--store").arg(stage.store()).args(["serve", "--lazy"]);
        command.stdin(Stdio::null()).stdout(File::create(&said)?);
        let service = Self(command.spawn().context("cannot start the service")?);
        let begun = Instant::now();
        // It says a line as soon as it can be asked.
        while std::fs::metadata(&said)?.len() == 0 {
            if begun.elapsed() > Duration::from_secs(20) {
                bail!("quire serve --lazy does not begin");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(service)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _gone = kill_process(pid, Signal::TERM);
        }
        let _ended = self.0.wait();
    }
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_postgres(context.cache, false)?;
    let daemon = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let daemon = daemon.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let runtime = find("runc").or_else(|| find("crun"));
    let runtime = runtime.ok_or_else(|| Skipped("neither runc nor crun is installed".into()))?;
    let stage = Stage { context, runtime };
    let index = publish(context, &stage.runtime, &layout, &daemon.host)?;
    let (mut tables, mut findings, mut rows) = (Vec::new(), vec![index], Vec::new());
    for (place, distance) in PROFILES {
        let proxy = Proxy::far(&daemon.host, distance)?;
        let image = format!("{}/postgres:1", proxy.host);
        for (number, (program, ..)) in PROGRAMS.iter().enumerate() {
            let title = format!("{program}, {place}");
            if !context.wants(&title) {
                continue;
            }
            let service = std::cell::RefCell::new(None);
            let mut contestants = Vec::new();
            for way in WAYS {
                let (stage, image, service) = (&stage, &image, &service);
                let commands = move || Ok(stage.commands(way, image, number));
                let contestant = Contestant::new(way.name(), commands).before(move || {
                    drop(service.take());
                    service.replace(stage.before(way)?);
                    Ok(())
                });
                contestants.push(contestant.after(move || {
                    drop(service.take());
                    Ok(())
                }));
            }
            let rules = Rules {
                runs: context.runs,
                sync: None,
                cold: true,
                pace: Pace::Turns,
                memory: Memory::LargestProcess,
            };
            let outcomes = measure(&rules, &mut contestants)?;
            let rivals = ["pull, run", "pull --form tar"];
            let pairs = rivals
                .iter()
                .flat_map(|rival| [Way::Lazy, Way::Traced].map(|way| (way.name(), *rival)));
            let pairs = pairs.chain([(Way::Traced.name(), Way::Lazy.name())]);
            let ratios = pairs.filter_map(|(ours, theirs)| ratio(&outcomes, ours, theirs));
            findings.extend(ratios.map(|it| format!("{title}: {it}")));
            let (memory, runs) = (rules.memory, rules.runs);
            tables.push(Table { title: title.clone(), memory, runs, outcomes });
            drop(contestants);
            for way in WAYS {
                let _service = stage.before(way)?;
                let _before = (proxy.received(), proxy.requests());
                for mut command in stage.commands(way, &image, number) {
                    quiet(&mut command)?;
                }
                let traffic = (proxy.received(), proxy.requests());
                rows.push((format!("{title}: {}", way.name()), traffic));
            }
        }
    }
    Ok(Report {
        name: "lazy",
        about: String::from(
            "From an empty store to the end of a program in a container: Debian with PostgreSQL, two gzip layers of \
             237 MB, from Debian's docker-registry on loopback behind a proxy, which adds a delay to each connection and each \
             request, and may bound the bytes a second of all connections together. Caches are dropped before each run. \
             `quire serve --lazy` runs before the clock starts; its processor time and memory are in no row. Its index \
             is in the registry, and its fetching is on the clock and in the bytes. `quire trace` ran each program once before, on another store. The registry's own work is on every \
             row's clock. Other lazy file systems are not in this bench yet.",
        ),
        tables,
        sizes: registry::traffic(&rows),
        findings,
    })
}

/// Brings the image, its index and its traces to the registry, and says how large they are.
fn publish(context: &Context<'_>, runtime: &Path, layout: &Path, host: &str) -> Result<String> {
    let image = format!("{host}/postgres:1");
    registry::copy(layout, &image)?;
    let quire = || {
        let mut quire = Command::new(context.quire);
        quire.arg("--store").arg(context.work.join("maker"));
        quire
    };
    registry::pull_with_index(quire(), &image)?;
    for (_, trace, user, arguments) in PROGRAMS {
        let mut traced = quire();
        traced.args(["--quiet", "trace", "--as", trace, "--user", user, "--runtime"]);
        quiet(traced.arg(runtime).arg(&image).args(arguments))?;
    }
    let sent = registry::push_index(quire(), &image)?;
    context.set_aside("maker")?;
    Ok(format!(
        "the index, its image, the recipes and the traces have {sent} bytes in the registry"
    ))
}
