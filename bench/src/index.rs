//! Costs of the index of layers: import time, and bytes in a registry.

use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::registry;
use super::report::{Report, Sizes, Table, Unit, ratio};
use crate::Context;
use rig::process::quiet;
use rig::{Skipped, inputs};
use testing::daemon::{Daemon, PROGRAM};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_postgres(context.cache, false)?;
    let source = format!("oci:{}:latest", layout.display());
    let import = |store: &str, options: &[&str]| {
        let mut quire = Command::new(context.quire);
        quire.arg("--store").arg(context.work.join(store)).args(["import", "--form", "tar"]);
        quire.args(options).arg(&source).arg("postgres");
        Ok(vec![quire])
    };
    let mut contestants = [
        Contestant::new("quire import --form tar", || import("plain", &[]))
            .before(|| context.set_aside("plain")),
        Contestant::new("quire import --form tar --index", || import("indexed", &["--index"]))
            .before(|| context.set_aside("indexed")),
    ];
    let rules = Rules {
        runs: context.runs,
        sync: Some(context.work.to_owned()),
        cold: false,
        pace: Pace::Turns,
        memory: Memory::AllProcesses,
    };
    let outcomes = measure(&rules, &mut contestants)?;
    drop(contestants);
    let findings = ratio(&outcomes, "quire import --form tar --index", "quire import --form tar");
    let (memory, runs) = (rules.memory, rules.runs);
    let table = Table { title: String::from("debian-postgres"), memory, runs, outcomes };
    let indexed = indexed(context, &layout)?;
    Ok(Report {
        name: "index",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers, 22,500 entries, 700 MB unpacked, into an empty store, with `--form tar`: \
             without an index of the layers, and with `--index`. The layers are in the page cache. A `syncfs` of the file \
             system is on the clock. Then the bytes that `quire index --push` has a registry keep for the image: for each \
             layer its head, windows and recipe, and for the image its EROFS image, which has the names of all files.",
        ),
        tables: vec![table],
        sizes: indexed,
        findings: findings.into_iter().collect(),
    })
}

/// Sizes of the image's index in the registry, compared with the layers.
fn indexed(context: &Context<'_>, layout: &std::path::Path) -> Result<Vec<Sizes>> {
    let daemon = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let daemon = daemon.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let image = format!("{}/postgres:1", daemon.host);
    registry::copy(layout, &image)?;
    let quire = || {
        let mut quire = Command::new(context.quire);
        quire.arg("--store").arg(context.work.join("pushed"));
        quire
    };
    registry::pull_with_index(quire(), &image)?;
    let made = quiet(quire().args(["index", "--json", "--push", &image, &image]))?;
    let made: Value = serde_json::from_str(&made)?;
    let get = |path: String| -> Result<Value> {
        let mut curl = Command::new("curl");
        curl.args(["-sSf", "-H", "Accept: application/vnd.oci.image.manifest.v1+json"]);
        let said = quiet(curl.arg(format!("http://{}/v2/postgres/{path}", daemon.host)))?;
        Ok(serde_json::from_str(&said)?)
    };
    let artifact = made["pushed"]["artifact"].as_str().context("the index was not pushed")?;
    let artifact = get(format!("manifests/{artifact}"))?;
    let config = artifact["config"]["digest"].as_str().context("an artifact has a config")?;
    let config = get(format!("blobs/{config}"))?;
    let blobs = artifact["layers"].as_array().context("an artifact has layers")?;
    let size = |digest: &Value| {
        let blob = blobs.iter().position(|it| it["digest"] == *digest);
        blob.and_then(|at| Some((at, blobs[at]["size"].as_u64()?))).context("no such blob")
    };
    let (mut rows, mut shares) = (Vec::new(), Vec::new());
    for (number, layer) in (1..).zip(config["layers"].as_array().context("it has layers")?) {
        let name = format!("layer {number}");
        let bytes = layer["size"].as_u64().context("a layer has a size")?;
        let (at, head) = size(&layer["head"])?;
        // The windows are the blob after the head.
        let windows = blobs[at + 1]["size"].as_u64().context("windows have a size")?;
        let recipe = size(&layer["recipe"])?.1;
        rows.push((name.clone(), vec![bytes, head, windows, recipe]));
        let share = |part: u64| (part * 10_000).div_ceil(bytes);
        shares.push((name, vec![share(head + windows), share(head + windows + recipe)]));
    }
    let bytes = |at: usize| rows.iter().map(|(_, row)| row[at]).sum::<u64>();
    let all: Vec<u64> = (0..4).map(bytes).collect();
    let image = blobs[0]["size"].as_u64().context("an image has a size")?;
    let share = |part: u64| (part * 10_000).div_ceil(all[0]);
    let sums = [all[1] + all[2], all[1] + all[2] + all[3]];
    shares.push((String::from("all layers"), sums.map(share).to_vec()));
    rows.push((String::from("all layers"), all));
    Ok(vec![
        Sizes {
            title: String::from("Bytes in the registry"),
            unit: Unit::Kilobytes,
            columns: vec!["layer", "head", "windows", "recipe"],
            rows,
        },
        Sizes {
            title: String::from("In ten-thousandths of the layer"),
            unit: Unit::Times,
            columns: vec!["head and windows", "with the recipe"],
            rows: shares,
        },
        Sizes {
            title: String::from("The EROFS image, compressed"),
            unit: Unit::Kilobytes,
            columns: vec!["bytes"],
            rows: vec![(String::from("image"), vec![image])],
        },
    ])
}
