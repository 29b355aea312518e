//! The next version of an image whose predecessor is in the store: by the recipes of its index, and as a whole.

use std::process::Command;

use anyhow::Result;

use super::command::cmd;
use super::measure::{Contestant, Memory, Rules};
use super::proxy::{Distance, Proxy};
use super::registry;
use super::report::Report;
use crate::Context;
use crate::import::synced;
use rig::inputs::pairs::{self, Version};
use rig::process::quiet;

/// Distances of the registry.
const PROFILES: [(&str, Distance); 2] = [
    ("no delay", Distance::new(0, None)),
    ("20 ms a request, 100 Mbit/s", Distance::new(20, Some(100))),
];

/// Name of a contestant, and repository of its variant of the image: plain layers, an index with recipes besides, or
/// eStargz layers.
type Way = (&'static str, &'static str);

const WAYS: [Way; 3] = [
    ("full pull, gzip", "plain"),
    ("quire pull, gzip with an index", "indexed"),
    ("quire pull, eStargz", "chunked"),
];

fn image(way: Way, host: &str, pair: &str, version: usize) -> String {
    format!("{host}/{}-{pair}:{version}", way.1)
}

fn pull(context: &Context<'_>, image: &str) -> Command {
    let (quire, work) = (context.quire, context.work);
    cmd!("{quire} --store {work}/store --quiet pull {image} it")
}

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let daemon = registry::start(context)?;
    let near = &daemon.host;
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
        let sent = publish(context, near, pair, versions)?;
        findings.push(format!(
            "{title}: the index, its image and its recipes have {sent} bytes in the registry"
        ));
        let proxy = Proxy::to(near)?;
        let mut fetched = Vec::new();
        for way in WAYS {
            context.set_aside("store")?;
            quiet(&mut pull(context, &image(way, near, pair, 1)))?;
            quiet(&mut pull(context, &image(way, &proxy.host, pair, 2)))?;
            let traffic = (proxy.received(), proxy.requests());
            fetched.push(traffic.0);
            rows.push((format!("{title}: {}", way.0), traffic));
        }
        let share = |part: u64| format!("{:.1} %", part as f64 * 100.0 / fetched[0] as f64);
        findings.push(format!(
            "{title}: with an index {} of the bytes of a full pull, by eStargz {}",
            share(fetched[1]),
            share(fetched[2])
        ));
        for (place, distance) in PROFILES {
            let proxy = Proxy::far(near, distance)?;
            let contestant = |way: Way| {
                let far = &proxy.host;
                Contestant::new(way.0, move || pull(context, &image(way, far, pair, 2))).before(
                    move || {
                        context.set_aside("store")?;
                        quiet(&mut pull(context, &image(way, near, pair, 1)))
                    },
                )
            };
            let rules = Rules { cold: true, memory: Memory::LargestProcess, ..synced(context) };
            let table = rules.race(format!("{title}, {place}"), WAYS.map(contestant).into())?;
            findings.extend(table.titled_ratio("quire pull, gzip", "full"));
            tables.push(table);
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
fn publish(context: &Context<'_>, host: &str, pair: &str, versions: &[Version; 2]) -> Result<u64> {
    let [plain, indexed, chunked] = WAYS;
    for (number, version) in (1..).zip(versions) {
        let plain = image(plain, host, pair, number);
        registry::copy(&version.layout, &plain)?;
        registry::copy(&version.layout, &image(indexed, host, pair, number))?;
        registry::optimize(context, &plain, &image(chunked, host, pair, number))?;
    }
    let sent = registry::publish_index(context, &image(indexed, host, pair, 2))?;
    context.set_aside("maker")?;
    Ok(sent)
}
