//! Push of images to a registry on loopback that has their base.

use std::cell::Cell;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::command::{cmd, more, run, run_all};
use super::measure::{Contestant, Memory, Rules};
use super::podman::{self, podman};
use super::registry;
use super::report::Report;
use crate::{Context, version};
use rig::inputs;
use rig::process::{need, quiet};

/// The container's change besides a number: 51 MB of programs, libraries and texts that the image has elsewhere.
const CHANGE: &str = "cp -a /usr/lib/postgresql /usr/share/postgresql /srv";
/// Names of the images in both tools.
const BASE: &str = "postgres:1";
const DERIVED: &str = "localhost/derived:1";

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let (quire, work) = (context.quire, context.work);
    for program in ["podman", "runc", "skopeo"] {
        need(program)?;
    }
    let layout = &inputs::debian_postgres(context.cache, false)?;
    let registry = registry::start(context)?;
    let host = &registry.host;
    let base = &format!("{host}/{BASE}");
    registry::copy(layout, base)?;
    run!("{quire} --store {work}/store pull --quiet {base}")?;
    quiet(&mut more!(podman(context, layout)?, "pull --quiet --tls-verify=false {base}"))?;

    let count = Cell::new(0);
    let next = || count.replace(count.get() + 1) + 1;
    // Each push has a separate repository, so that it does not find the layers of another push.
    let target = |what: &str| format!("{host}/{what}/{}:1", next());
    let podman_name = format!("podman push ({})", version("podman"));
    let (mut tables, mut findings) = (Vec::new(), Vec::new());
    // The second case pushes the last layer of the first case again.
    for (title, image, is_new) in [
        ("a new layer each time, on a base that the registry has", DERIVED, true),
        ("the same image into one more repository", DERIVED, false),
        ("the base as it is", base, false),
    ] {
        let ours = || {
            let target = target("quire");
            cmd!("{quire} --store {work}/store push {image} {target}")
        };
        let theirs = || {
            let (podman, target) = (podman(context, layout)?, target("podman"));
            anyhow::Ok(more!(podman, "push --quiet --tls-verify=false {image} docker://{target}"))
        };
        // Each number makes a different layer.
        let by_quire = || if is_new { derive_by_quire(context, base, next()) } else { Ok(()) };
        let by_podman =
            || if is_new { derive_by_podman(context, layout, base, next()) } else { Ok(()) };
        let contestants = vec![
            Contestant::new("quire push", ours).before(by_quire),
            Contestant::new(&podman_name, theirs).before(by_podman),
        ];
        let rules = Rules { memory: Memory::AllProcesses, ..Rules::new(context.runs) };
        let table = rules.race(title, contestants)?;
        findings.extend(table.titled_ratio("quire", "podman"));
        tables.push(table);
    }
    findings.push(format!(
        "bytes that a push of each kind left in the registry: {}",
        sizes(context, layout, base, host)?
    ));
    podman::remove_all(context)?;
    Ok(Report {
        name: "push",
        about: String::from(
            "Debian with PostgreSQL, pulled from Debian's docker-registry on loopback, goes back there into a repository \
             that is new each time: with one layer more, what a container wrote (a copy of PostgreSQL's programs and \
             texts), and as it is. The layer is committed before each run, which is not timed; or it is the one that \
             was pushed before, and both remember where. The registry takes the base's layers from the repository that \
             they came from. Its own work is on everybody's clock; its processes are in nobody's time of processors.",
        ),
        tables,
        findings,
        ..Report::default()
    })
}

fn derive_by_quire(context: &Context<'_>, base: &str, number: usize) -> Result<()> {
    let (quire, work) = (context.quire, context.work);
    let change = format!("{CHANGE}; echo {number} > /srv/number");
    run!(
        "{quire} --store {work}/store run --quiet --detach --name=derived {base} -- sh -c {change}"
    )?;
    let code = run!("{quire} --store {work}/store wait derived")?;
    anyhow::ensure!(code.trim() == "0", "the container ended with {code}");
    run_all([
        cmd!("{quire} --store {work}/store commit --quiet derived {DERIVED}"),
        cmd!("{quire} --store {work}/store rm --container derived"),
    ])
}

fn derive_by_podman(context: &Context<'_>, layout: &Path, base: &str, number: usize) -> Result<()> {
    let change = format!("{CHANGE}; echo {number} > /srv/number");
    let run = podman::run(context, layout, "--name=derived")?;
    let commit = more!(podman(context, layout)?, "commit --quiet derived {DERIVED}");
    run_all([more!(run, "{base} sh -c {change}"), commit])?;
    podman::rm(context, layout, "derived")
}

/// Sizes of the derived layers that both tools pushed, from the last entries of the manifests.
fn sizes(context: &Context<'_>, layout: &Path, base: &str, host: &str) -> Result<String> {
    let (quire, work) = (context.quire, context.work);
    let [ours, theirs] = ["quire", "podman"].map(|it| format!("{host}/{it}-size:1"));
    let podman = podman(context, layout)?;
    run_all([
        cmd!("{quire} --store {work}/store push --quiet {DERIVED} {ours}"),
        more!(podman, "push --quiet --tls-verify=false {DERIVED} docker://{theirs}"),
    ])?;
    let layers = |name: &str| -> Result<Vec<(String, u64)>> {
        let manifest = run!("skopeo inspect --raw --tls-verify=false docker://{name}")?;
        let manifest: Value = serde_json::from_str(&manifest)?;
        let layers = manifest["layers"].as_array().context("a manifest without layers")?;
        let layer = |it: &Value| Some((it["digest"].as_str()?.to_owned(), it["size"].as_u64()?));
        Ok(layers.iter().filter_map(layer).collect())
    };
    let (below, ours, theirs) = (layers(base)?, layers(&ours)?, layers(&theirs)?);
    for pushed in [&ours, &theirs] {
        let same = pushed.len() == below.len() + 1 && pushed.starts_with(&below);
        anyhow::ensure!(same, "the layers of the base are others: {pushed:?}, not {below:?}");
    }
    let last = |layers: &[(String, u64)]| layers.last().map_or(0, |(_, size)| *size / 1000);
    Ok(format!("quire {} kB, podman {} kB, of the base nothing", last(&ours), last(&theirs)))
}
