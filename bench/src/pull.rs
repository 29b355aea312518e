//! Pull of an image from a registry on loopback into an empty store, ready to be mounted.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::import::{podman, race, set_podman_aside};
use super::measure::Contestant;
use super::report::Report;
use crate::Context;
use rig::Skipped;
use rig::inputs;
use rig::process::{find, need, quiet};
use testing::daemon::{Daemon, PROGRAM};

pub(super) fn bench(context: &Context<'_>) -> Result<Report> {
    let layout = inputs::debian_postgres(context.cache, false)?;
    let registry = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    let registry = registry.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let image = format!("{}/postgres:1", registry.host);
    let reference = format!("docker://{image}");
    let mut push = Command::new(need("skopeo")?);
    push.args(["copy", "--quiet", "--dest-tls-verify=false"]);
    quiet(push.arg(format!("oci:{}:latest", layout.display())).arg(&reference))?;
    let place = |name: &str| context.work.join(name);
    let mut contestants = vec![
        Contestant::new("quire pull", || {
            let mut quire = Command::new(context.quire);
            quire.arg("--store").arg(place("store")).arg("pull").arg(&image);
            Ok(vec![quire])
        })
        .before(|| context.set_aside("store")),
    ];
    let mut absent = Vec::new();
    if let (Some(skopeo), Some(umoci)) = (find("skopeo"), find("umoci")) {
        let reference = &reference;
        let commands = move || {
            let mut copy = Command::new(&skopeo);
            copy.args(["copy", "--quiet", "--src-tls-verify=false"]).arg(reference);
            copy.arg(format!("oci:{}:latest", place("copied").display()));
            let mut unpack = Command::new(&umoci);
            unpack.args(["unpack", "--image"]);
            unpack.arg(format!("{}:latest", place("copied").display())).arg(place("umoci"));
            Ok(vec![copy, unpack])
        };
        let name = format!(
            "skopeo copy ({}), umoci unpack ({})",
            crate::version("skopeo", "--version")?,
            crate::version("umoci", "--version")?
        );
        contestants.push(Contestant::new(&name, commands).before(|| {
            context.set_aside("copied")?;
            context.set_aside("umoci")
        }));
    } else {
        absent.push("skopeo or umoci");
    }
    if find("podman").is_some() {
        let image = &image;
        let command = || {
            let mut podman = podman(context, &layout)?;
            podman.args(["pull", "--quiet", "--tls-verify=false", image]);
            Ok(vec![podman])
        };
        let version = crate::version("podman", "--version")?;
        contestants.push(
            Contestant::new(&format!("podman pull ({version})"), command)
                .before(|| set_podman_aside(context)),
        );
    } else {
        absent.push("podman");
    }
    // Unpacks both layers at once, as a simple script can.
    let script = format!(
        "mkdir '{0}' && cd '{0}' && for blob in {1}; do gunzip -c \"$blob\" > \"$(basename \"$blob\")\" & done; wait",
        place("tars").display(),
        layers(&layout)?.join(" ")
    );
    contestants.push(
        Contestant::new("gunzip of the layers to two files", move || {
            let mut shell = Command::new("sh");
            shell.args(["-ec", &script]);
            Ok(vec![shell])
        })
        .before(|| context.set_aside("tars")),
    );
    let (table, findings) =
        race(context, contestants, "debian-postgres", &absent, &["skopeo", "podman", "gunzip"])?;
    Ok(Report {
        name: "pull",
        about: String::from(
            "Debian with PostgreSQL, two gzip layers of 237 MB, from Debian's docker-registry on loopback into an empty \
             store. The registry's own work is on everybody's clock, as is a `syncfs` of the file system; its processes \
             are in nobody's time of processors. The last row has no network, no files and no checks: what inflating alone \
             takes.",
        ),
        tables: vec![table],
        sizes: Vec::new(),
        findings,
    })
}

/// Paths of the layers of a layout's only image.
fn layers(layout: &Path) -> Result<Vec<String>> {
    let blob = |digest: &Value| {
        let digest = digest.as_str().and_then(|it| it.strip_prefix("sha256:"));
        let digest = digest.context("not a SHA-256 digest")?;
        Ok::<_, anyhow::Error>(layout.join("blobs/sha256").join(digest))
    };
    let read = |path: &Path| -> Result<Value> { Ok(serde_json::from_reader(File::open(path)?)?) };
    let index = read(&layout.join("index.json"))?;
    let manifest = read(&blob(&index["manifests"][0]["digest"])?)?;
    let layers = manifest["layers"].as_array().context("a manifest without layers")?;
    let names = layers.iter().map(|it| Ok(format!("'{}'", blob(&it["digest"])?.display())));
    names.collect()
}
