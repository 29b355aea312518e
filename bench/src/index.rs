//! Costs of the index of layers: import time, and bytes in a registry.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::command::{cmd, run};
use super::import::synced;
use super::measure::Contestant;
use super::registry;
use super::report::{Report, Sizes, Unit};
use crate::Context;
use rig::inputs;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    let layout = inputs::debian_postgres(context.cache, false)?;
    let contestant = |name: &str, store: &'static str, options: &'static [&str]| {
        let import = format!("import --form tar {}", options.join(" "));
        let layout = &layout;
        let command = move || {
            let import = import.split_whitespace();
            cmd!("{quire} --store {work}/{store} {import...} oci:{layout}:latest postgres")
        };
        Contestant::new(name, command).before(move || context.set_aside(store))
    };
    let contestants = vec![
        contestant("quire import --form tar", "plain", &[]),
        contestant("quire import --form tar --index", "indexed", &["--index"]),
    ];
    let table = synced(context).race("debian-postgres", contestants)?;
    let found = table.ratio("quire import --form tar --index", "quire import --form tar");
    Ok(Report {
        name: "index",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers, 22,500 entries, 700 MB unpacked, into an empty store, with `--form tar`: \
             without an index of the layers, and with `--index`. The layers are in the page cache. A `syncfs` of the file \
             system is on the clock. Then the bytes that `quire index --push` has a registry keep for the image: for each \
             layer its head, windows and recipe, and for the image its EROFS image, which has the names of all files.",
        ),
        tables: vec![table],
        sizes: indexed(context, &layout)?,
        findings: found.into_iter().collect(),
    })
}

/// Sizes of the image's index in the registry, compared with the layers.
fn indexed(context: &Context<'_>, layout: &Path) -> Result<Vec<Sizes>> {
    let (quire, work) = (context.quire, context.work);
    let daemon = registry::start(context)?;
    let image = format!("{}/postgres:1", daemon.host);
    registry::copy(layout, &image)?;
    let quire = || cmd!("{quire} --store {work}/pushed");
    registry::pull_with_index(quire(), &image)?;
    let made = registry::index(quire(), &image)?;
    let get = |path: String| -> Result<Value> {
        let (accept, host) = ("Accept: application/vnd.oci.image.manifest.v1+json", &daemon.host);
        Ok(serde_json::from_str(&run!("curl -sSf -H {accept} http://{host}/v2/postgres/{path}")?)?)
    };
    let artifact = made["artifact"].as_str().context("the index was not pushed")?;
    let artifact = get(format!("manifests/{artifact}"))?;
    let config = artifact["config"]["digest"].as_str().context("an artifact has a config")?;
    let config = get(format!("blobs/{config}"))?;
    let blobs = artifact["layers"].as_array().context("an artifact has layers")?;
    let size = |digest: &Value| {
        let blob = blobs.iter().position(|it| it["digest"] == *digest);
        blob.and_then(|at| Some((at, blobs[at]["size"].as_u64()?))).context("no such blob")
    };
    let mut rows = Vec::new();
    for (number, layer) in (1..).zip(config["layers"].as_array().context("it has layers")?) {
        let bytes = layer["size"].as_u64().context("a layer has a size")?;
        let (at, head) = size(&layer["head"])?;
        // The windows are the blob after the head.
        let windows = blobs[at + 1]["size"].as_u64().context("windows have a size")?;
        let recipe = size(&layer["recipe"])?.1;
        rows.push((format!("layer {number}"), vec![bytes, head, windows, recipe]));
    }
    let bytes = |at: usize| rows.iter().map(|(_, row)| row[at]).sum::<u64>();
    let all = (0..4).map(bytes).collect();
    rows.push((String::from("all layers"), all));
    let shares = rows.iter().map(|(name, row)| {
        let share = |part: u64| (part * 10_000).div_ceil(row[0]);
        (name.clone(), vec![share(row[1] + row[2]), share(row[1] + row[2] + row[3])])
    });
    let shares = shares.collect();
    let image = blobs[0]["size"].as_u64().context("an image has a size")?;
    let (title, shared) = ("Bytes in the registry", "In ten-thousandths of the layer");
    Ok(vec![
        Sizes::new(title, Unit::Kilobytes, ["layer", "head", "windows", "recipe"], rows),
        Sizes::new(shared, Unit::Times, ["head and windows", "with the recipe"], shares),
        Sizes::one("The EROFS image, compressed", Unit::Kilobytes, ["bytes"], "image", vec![image]),
    ])
}
