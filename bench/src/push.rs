//! Push of images to a registry on loopback that has their base.

use std::cell::Cell;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::import::{podman, remove_podman};
use super::measure::{Contestant, Memory, Pace, Rules, measure};
use super::report::{Report, Table, ratio};
use crate::Context;
use rig::Skipped;
use rig::inputs;
use rig::process::{need, quiet};
use testing::daemon::{Daemon, PROGRAM};

/// The container's change besides a number: 51 MB of programs, libraries and texts that the image has elsewhere.
const CHANGE: &str = "cp -a /usr/lib/postgresql /usr/share/postgresql /srv";
/// Names of the images in both tools.
const BASE: &str = "postgres:1";
const DERIVED: &str = "localhost/derived:1";

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    for program in ["podman", "runc", "skopeo"] {
        need(program)?;
    }
    let layout = inputs::debian_postgres(context.cache, false)?;
    let registry = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let registry = registry.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let host = &registry.host;
    let base = format!("{host}/{BASE}");
    let mut copy = Command::new(need("skopeo")?);
    copy.args(["copy", "--quiet", "--dest-tls-verify=false"]);
    quiet(copy.arg(format!("oci:{}:latest", layout.display())).arg(format!("docker://{base}")))?;
    quiet(&mut quire(context, &["pull", "--quiet", &base]))?;
    quiet(podman(context, &layout)?.args(["pull", "--quiet", "--tls-verify=false", &base]))?;

    // Each push has a separate repository, so that it does not find the layers of another push.
    let count = Cell::new(0);
    let target = |what: &str| {
        count.set(count.get() + 1);
        format!("{host}/{what}/{}:1", count.get())
    };
    let podman_name = format!("podman push ({})", crate::version("podman", "--version")?);
    // Each number makes a different layer.
    let layer = Cell::new(0);
    let number = || {
        layer.set(layer.get() + 1);
        layer.get()
    };
    let mut tables = Vec::new();
    let mut findings = Vec::new();
    // The second case pushes the last layer of the first case again.
    for (title, image, how) in [
        ("a new layer each time, on a base that the registry has", DERIVED, Derived::Anew),
        ("the same image into one more repository", DERIVED, Derived::Before),
        ("the base as it is", &base, Derived::Before),
    ] {
        let mut contestants = vec![
            Contestant::new("quire push", || {
                Ok(vec![quire(context, &["push", image, &target("quire")])])
            })
            .before(|| match how {
                Derived::Anew => derive_by_quire(context, &base, number()),
                Derived::Before => Ok(()),
            }),
            Contestant::new(&podman_name, || {
                let mut podman = podman(context, &layout)?;
                podman.args(["push", "--quiet", "--tls-verify=false", image]);
                podman.arg(format!("docker://{}", target("podman")));
                Ok(vec![podman])
            })
            .before(|| match how {
                Derived::Anew => derive_by_podman(context, &layout, &base, number()),
                Derived::Before => Ok(()),
            }),
        ];
        let rules = Rules {
            runs: context.runs,
            sync: None,
            cold: false,
            pace: Pace::Turns,
            memory: Memory::AllProcesses,
        };
        let outcomes = measure(&rules, &mut contestants)?;
        drop(contestants);
        findings.extend(ratio(&outcomes, "quire", "podman").map(|it| format!("{title}: {it}")));
        let (memory, runs) = (rules.memory, rules.runs);
        tables.push(Table { title: title.to_owned(), memory, runs, outcomes });
    }
    findings.push(format!(
        "bytes that a push of each kind left in the registry: {}",
        sizes(context, &layout, &base, host)?
    ));
    remove_podman(context)?;
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
        sizes: Vec::new(),
        findings,
    })
}

fn quire(context: &Context<'_>, arguments: &[&str]) -> Command {
    let mut quire = Command::new(context.quire);
    quire.arg("--store").arg(context.work.join("store")).args(arguments);
    quire
}

/// Origin of the derived image's layer.
#[derive(Debug, Clone, Copy)]
enum Derived {
    /// Committed before each run.
    Anew,
    /// Pushed before.
    Before,
}

fn derive_by_quire(context: &Context<'_>, base: &str, number: usize) -> Result<()> {
    let change = format!("{CHANGE}; echo {number} > /srv/number");
    let run = ["run", "--quiet", "--detach", "--name=derived", base, "--", "sh", "-c", &change];
    quiet(&mut quire(context, &run))?;
    let code = quiet(&mut quire(context, &["wait", "derived"]))?;
    anyhow::ensure!(code.trim() == "0", "the container ended with {code}");
    quiet(&mut quire(context, &["commit", "--quiet", "derived", DERIVED]))?;
    quiet(&mut quire(context, &["rm", "--container", "derived"])).map(drop)
}

fn derive_by_podman(context: &Context<'_>, layout: &Path, base: &str, number: usize) -> Result<()> {
    let run = |arguments: &[&str]| quiet(podman(context, layout)?.args(arguments)).map(drop);
    let change = format!("{CHANGE}; echo {number} > /srv/number");
    let mut podman_run = podman(context, layout)?;
    podman_run.args(["--runtime", "runc", "run", "--name=derived", "--network=none"]);
    // podman raises these limits by default, which is not permitted everywhere.
    podman_run.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
    quiet(podman_run.args([base, "sh", "-c", &change]))?;
    run(&["commit", "--quiet", "derived", DERIVED])?;
    run(&["rm", "--force", "--time=0", "derived"])
}

/// Sizes of the derived layers that both tools pushed, from the last entries of the manifests.
fn sizes(context: &Context<'_>, layout: &Path, base: &str, host: &str) -> Result<String> {
    let quire_name = format!("{host}/quire-size:1");
    let podman_name = format!("{host}/podman-size:1");
    quiet(&mut quire(context, &["push", "--quiet", DERIVED, &quire_name]))?;
    let mut push = podman(context, layout)?;
    push.args(["push", "--quiet", "--tls-verify=false", DERIVED]);
    quiet(push.arg(format!("docker://{podman_name}")))?;
    let layers = |name: &str| -> Result<Vec<(String, u64)>> {
        let mut inspect = Command::new(need("skopeo")?);
        inspect.args(["inspect", "--raw", "--tls-verify=false"]);
        let manifest = quiet(inspect.arg(format!("docker://{name}")))?;
        let manifest: serde_json::Value = serde_json::from_str(&manifest)?;
        let layers = manifest["layers"].as_array().context("a manifest without layers")?;
        let layer = |it: &serde_json::Value| {
            Some((it["digest"].as_str()?.to_owned(), it["size"].as_u64()?))
        };
        Ok(layers.iter().filter_map(layer).collect())
    };
    let (below, ours, theirs) = (layers(base)?, layers(&quire_name)?, layers(&podman_name)?);
    for pushed in [&ours, &theirs] {
        let same = pushed.len() == below.len() + 1 && pushed.starts_with(&below);
        anyhow::ensure!(same, "the layers of the base are others: {pushed:?}, not {below:?}");
    }
    let last = |layers: &[(String, u64)]| layers.last().map_or(0, |(_, size)| *size / 1000);
    Ok(format!("quire {} kB, podman {} kB, of the base nothing", last(&ours), last(&theirs)))
}
