//! Import and removal of an image, by form, beside GNU tar and podman.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::command::{cmd, more};
use super::import::synced;
use super::measure::Contestant;
use super::podman;
use super::report::Report;
use crate::{Context, version};
use rig::inputs;
use rig::process::{find_program, quiet};

const FORMS: [&str; 3] = ["objects", "packed", "tar"];
const TAR: &str = "tar -x, rm -r";

/// $1 a new folder; the rest are layers, from the lowest.
const UNPACK: &str = r#"
to=$1; shift
mkdir "$to"
for layer; do tar -xzf "$layer" --xattrs --xattrs-include=* --numeric-owner -C "$to"; done
"#;

/// $1 quire, $2 the store. Removes the only image and all data that no other image needs.
const REMOVE: &str =
    r#""$1" --store "$2" --quiet rmi image && "$1" --store "$2" --quiet gc --wait"#;

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    let layout = &inputs::debian_postgres(context.cache, false)?;
    let layers = &layers(layout)?;
    let import = |form: &'static str| {
        cmd!(
            "{quire} --store {work}/store-{form} --quiet import --form {form} oci:{layout}:latest image"
        )
    };
    let unpack = || cmd!("sh -euc {UNPACK} sh {work}/tree", ..layers);
    let has_podman = find_program("podman").is_some();
    let name = format!("podman pull, podman rmi ({})", version("podman"));
    let (mut imports, mut removals) = (Vec::new(), Vec::new());
    for form in FORMS {
        let aside = move || context.set_aside(format!("store-{form}"));
        let name = format!("quire import --form {form}");
        imports.push(Contestant::new(name, move || import(form)).before(aside));
        let remove = move || cmd!("sh -euc {REMOVE} sh {quire} {work}/store-{form}");
        let before = move || {
            aside()?;
            quiet(&mut import(form)).map(drop)
        };
        let name = format!("quire rmi and gc, {form}");
        removals.push(Contestant::new(name, remove).before(before));
    }
    imports.push(Contestant::new(TAR, unpack).before(|| context.set_aside("tree")));
    let before = || {
        context.set_aside("tree")?;
        quiet(&mut unpack()).map(drop)
    };
    removals.push(Contestant::new(TAR, || cmd!("rm -r {work}/tree")).before(before));
    if has_podman {
        let pull = || podman::pull(context, layout);
        imports.push(Contestant::new(&*name, pull).before(|| podman::set_aside(context)));
        let remove = || anyhow::Ok(more!(podman::podman(context, layout)?, "rmi --all"));
        let before = move || {
            podman::set_aside(context)?;
            quiet(&mut pull()?).map(drop)
        };
        removals.push(Contestant::new(&*name, remove).before(before));
    }
    let rules = synced(context);
    let tables = vec![rules.race("Import", imports)?, rules.race("Removal", removals)?];
    podman::remove_all(context)?;
    let mut findings = Vec::new();
    for table in &tables {
        for outcome in table.outcomes.iter().filter(|it| it.name.starts_with("quire")) {
            let ours = &outcome.name;
            findings.extend(table.titled_ratio(ours, TAR));
            findings.extend(table.titled_ratio(ours, "podman"));
        }
    }
    if !has_podman {
        findings.push(String::from(podman::ABSENT));
    }
    Ok(Report {
        name: "storing",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers, 22,500 entries, 700 MB unpacked. *Import*: into an empty store, \
             or a new folder. *Removal*: of the only image, with all data that no other image needs, right after its \
             import. `tar` unpacks the layers one over the other, without their whiteouts, and verifies nothing. The \
             layers are in the page cache. A `syncfs` of the file system is part of each time.",
        ),
        tables,
        findings,
        ..Report::default()
    })
}

/// Paths of the layers of a layout's only image, from the lowest.
fn layers(layout: &Path) -> Result<Vec<std::path::PathBuf>> {
    let blob = |digest: &Value| {
        let digest = digest.as_str().and_then(|it| it.strip_prefix("sha256:"));
        Ok(layout.join("blobs/sha256").join(digest.context("a descriptor has no SHA-256")?))
    };
    let read = |path: &Path| -> Result<Value> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
    let index = read(&layout.join("index.json"))?;
    let manifest = read(&blob(&index["manifests"][0]["digest"])?)?;
    let layers = manifest["layers"].as_array().context("a manifest has no layers")?;
    if layers.is_empty() {
        bail!("the image has no layers");
    }
    layers.iter().map(|it| blob(&it["digest"])).collect()
}
