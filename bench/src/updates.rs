//! The next version of an image whose predecessor is in the store: by the recipes of its index, and as a whole.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::proxy::{Distance, Proxy};
use super::registry;
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::Skipped;
use rig::inputs::pairs::{self, Version};
use rig::process::quiet;
use rig::tools;
use testing::daemon::{Daemon, PROGRAM};

/// Distances of the registry.
const PROFILES: [(&str, Distance); 2] = [
    ("no delay", Distance { delay: Duration::ZERO, bandwidth: None }),
    (
        "20 ms a request, 100 Mbit/s",
        Distance { delay: Duration::from_millis(20), bandwidth: Some(100_000_000 / 8) },
    ),
];

/// Variant of an image in the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Plain layers.
    Whole,
    /// Plain layers, and an index with recipes.
    Index,
    /// eStargz layers.
    Chunked,
}

const WAYS: [Way; 3] = [Way::Whole, Way::Index, Way::Chunked];

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Whole => "full pull, gzip",
            Self::Index => "quire pull, gzip with an index",
            Self::Chunked => "quire pull, eStargz",
        }
    }

    fn image(self, host: &str, pair: &str, version: usize) -> String {
        let repository = match self {
            Self::Whole => "plain",
            Self::Index => "indexed",
            Self::Chunked => "chunked",
        };
        format!("{host}/{repository}-{pair}:{version}")
    }
}

fn quire(context: &Context<'_>, store: &str) -> Command {
    let mut quire = Command::new(context.quire);
    quire.arg("--store").arg(context.work.join(store));
    quire
}

fn pull(context: &Context<'_>, image: &str) -> Command {
    let mut pull = quire(context, "store");
    pull.args(["--quiet", "pull", image, "it"]);
    pull
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let daemon = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let daemon = daemon.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let postgres = ["postgresql-15", "postgresql"];
    let [one, two] = pairs::make(context.cache, "postgresql", &postgres, false)?;
    let minor = format!("PostgreSQL {} to {}", one.version, two.version);
    let release = pairs::release(context.cache, false)?;
    let pairs = [
        ("postgresql", minor, [one, two]),
        ("release", String::from("Debian, all fixes of one round"), release),
    ];
    let (mut tables, mut findings, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for (pair, title, versions) in &pairs {
        let index = publish(context, &daemon.host, pair, versions)?;
        findings.push(format!("{title}: {index}"));
        let proxy = Proxy::to(&daemon.host)?;
        let mut fetched = Vec::new();
        for way in WAYS {
            context.set_aside("store")?;
            quiet(&mut pull(context, &way.image(&daemon.host, pair, 1)))?;
            quiet(&mut pull(context, &way.image(&proxy.host, pair, 2)))?;
            let traffic = (proxy.received(), proxy.requests());
            fetched.push(traffic.0);
            rows.push((format!("{title}: {}", way.name()), traffic));
        }
        let share = |part: u64| format!("{:.1} %", part as f64 * 100.0 / fetched[0] as f64);
        findings.push(format!(
            "{title}: with an index {} of the bytes of a full pull, by eStargz {}",
            share(fetched[1]),
            share(fetched[2])
        ));
        for (place, distance) in PROFILES {
            let proxy = Proxy::far(&daemon.host, distance)?;
            let title = format!("{title}, {place}");
            let mut contestants = Vec::new();
            for way in WAYS {
                let (near, far) = (&daemon.host, &proxy.host);
                let commands = move || Ok(vec![pull(context, &way.image(far, pair, 2))]);
                contestants.push(Contestant::new(way.name(), commands).before(move || {
                    context.set_aside("store")?;
                    quiet(&mut pull(context, &way.image(near, pair, 1))).map(drop)
                }));
            }
            let rules = Rules {
                runs: context.runs,
                sync: Some(context.work.to_owned()),
                cold: true,
                pace: Pace::Turns,
                memory: Memory::LargestProcess,
            };
            let outcomes = measure(&rules, &mut contestants)?;
            findings.extend(
                ratio(&outcomes, "quire pull, gzip", "full").map(|it| format!("{title}: {it}")),
            );
            let (memory, runs) = (rules.memory, rules.runs);
            tables.push(Table { title, memory, runs, outcomes });
        }
    }
    Ok(Report {
        name: "updates",
        about: String::from(
            "The newer of two versions of an image, pulled to where the older one is, from Debian's docker-registry on \
             loopback behind a proxy, which adds a delay to each connection and each request, and may bound the bytes a \
             second of all connections together. *PostgreSQL*: the base layer is in both, and the layer of packages \
             differs. *Debian*: all of the system is one layer, before and after the fixes of Debian's security team since \
             the point release. Caches are dropped before each run. A `syncfs` of the file system is on everybody's clock. \
             The eStargz layers are those of `crane optimize`, for both versions.",
        ),
        tables,
        sizes: registry::traffic(&rows),
        findings,
    })
}

/// Pushes both versions to the registry in each variant, and returns the size of the index.
fn publish(
    context: &Context<'_>,
    host: &str,
    pair: &str,
    versions: &[Version; 2],
) -> Result<String> {
    let crane = tools::crane(context.cache)?;
    for (number, version) in (1..).zip(versions) {
        for way in [Way::Whole, Way::Index] {
            registry::copy(&version.layout, &way.image(host, pair, number))?;
        }
        let [plain, chunked] = [Way::Whole, Way::Chunked].map(|it| it.image(host, pair, number));
        quiet(Command::new(&crane).args(["optimize", &plain, &chunked]))?;
        let manifest = quiet(Command::new(&crane).args(["manifest", &chunked]))?;
        if !manifest.contains("stargz/toc.digest") {
            bail!("crane made no eStargz layers");
        }
    }
    let image = Way::Index.image(host, pair, 2);
    registry::pull_with_index(quire(context, "maker"), &image)?;
    let sent = registry::push_index(quire(context, "maker"), &image)?;
    context.set_aside("maker")?;
    Ok(format!("the index, its image and its recipes have {sent} bytes in the registry"))
}
