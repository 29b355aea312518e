//! Helpers of benches with registries: their start, uploads of images, and their layers and traffic.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use testing::daemon::{Daemon, PROGRAM};

use super::report::{Sizes, Unit};
use crate::Context;
use crate::command::{cmd, more, run};
use rig::process::{need, quiet};
use rig::{Skipped, tools};

/// Starts Debian's docker-registry on loopback, with its data below the bench's folder.
pub(super) fn start(context: &Context<'_>) -> Result<Daemon> {
    let daemon = Daemon::start(context.work, "").context("cannot start docker-registry")?;
    daemon.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")).into())
}

/// Copies a layout's image into a registry.
pub(super) fn copy(layout: &Path, image: &str) -> Result<()> {
    let skopeo = need("skopeo")?;
    run!("{skopeo} copy --quiet --dest-tls-verify=false oci:{layout}:latest docker://{image}")?;
    Ok(())
}

/// Copies an image of a registry with eStargz layers instead of gzip layers.
pub(super) fn optimize(context: &Context<'_>, image: &str, chunked: &str) -> Result<()> {
    let crane = tools::crane(context.cache)?;
    run!("{crane} optimize {image} {chunked}")?;
    if !run!("{crane} manifest {chunked}")?.contains("stargz/toc.digest") {
        bail!("crane made no eStargz layers");
    }
    Ok(())
}

/// Copies an image within a registry, and sets the command that the copy starts, and its user.
pub(super) fn with_command(
    context: &Context<'_>,
    image: &str,
    copy: &str,
    (user, arguments): (&str, &[&str]),
) -> Result<()> {
    let crane = tools::crane(context.cache)?;
    // The option is a line of comma-separated values. Source: RFC 4180.
    let quoted = |it: &&str| format!("\"{}\"", it.replace('"', "\"\""));
    let command = arguments.iter().map(quoted).collect::<Vec<_>>().join(",");
    let set = cmd!("{crane} mutate --insecure --user {user} --entrypoint {command}");
    quiet(&mut more!(set, "--tag {copy} {image}")).map(drop)
}

/// A document of a layout, whose descriptor names it.
pub(super) fn document(layout: &Path, descriptor: &Value) -> Result<Value> {
    Ok(serde_json::from_slice(&fs::read(blob(layout, descriptor)?)?)?)
}

fn blob(layout: &Path, descriptor: &Value) -> Result<PathBuf> {
    let digest = descriptor["digest"].as_str().and_then(|it| it.strip_prefix("sha256:"));
    Ok(layout.join("blobs/sha256").join(digest.context("a descriptor has a digest")?))
}

/// The manifest of a layout's only image.
pub(super) fn manifest(layout: &Path) -> Result<Value> {
    let index: Value = serde_json::from_slice(&fs::read(layout.join("index.json"))?)?;
    document(layout, &index["manifests"][0])
}

/// Paths of the layers of a layout's only image, the lowest first.
pub(super) fn layers(layout: &Path) -> Result<Vec<PathBuf>> {
    let manifest = manifest(layout)?;
    let layers = manifest["layers"].as_array().context("a manifest has layers")?;
    layers.iter().map(|it| blob(layout, it)).collect()
}

/// Pulls an image with all layers by `quire`, and makes its index.
pub(super) fn pull_with_index(quire: Command, image: &str) -> Result<()> {
    quiet(&mut more!(quire, "--quiet pull --form tar --keep-layers --index {image}")).map(drop)
}

/// Pushes the index of an image that `quire` pulled, and returns the number of bytes sent.
pub(super) fn push_index(quire: Command, image: &str) -> Result<u64> {
    index(quire, image)?["sent"].as_u64().context("the index was not pushed")
}

/// Pushes the index of an image that `quire` pulled, with its recorded start, and returns the number of bytes sent.
pub(super) fn push_start(quire: Command, image: &str) -> Result<u64> {
    let made = quiet(&mut more!(quire, "index --json --push {image} {image}"))?;
    let made: Value = serde_json::from_str(&made)?;
    if made["starts"].as_array().is_none_or(Vec::is_empty) {
        bail!("the start of {image} was not recorded");
    }
    made["pushed"]["sent"].as_u64().context("the index was not pushed")
}

/// Makes and pushes the index of an image by the store `maker`, as the image's publisher would, and returns the number
/// of bytes sent.
pub(super) fn publish_index(context: &Context<'_>, image: &str) -> Result<u64> {
    let (quire, work) = (context.quire, context.work);
    pull_with_index(cmd!("{quire} --store {work}/maker"), image)?;
    push_index(cmd!("{quire} --store {work}/maker"), image)
}

/// Pushes the index of an image that `quire` pulled, without a recorded start, and returns the report of the push.
pub(super) fn index(quire: Command, image: &str) -> Result<Value> {
    let made = quiet(&mut more!(quire, "index --json --no-start --push {image} {image}"))?;
    Ok(serde_json::from_str::<Value>(&made)?["pushed"].take())
}

/// Tables of bytes and requests, one row for each operation.
pub(super) fn traffic(rows: &[(String, (u64, u64))]) -> Vec<Sizes> {
    let column = |of: fn(&(u64, u64)) -> u64| {
        rows.iter().map(|(name, traffic)| (name.clone(), vec![of(traffic)])).collect()
    };
    let bytes = "Bytes from the registry, with HTTP's own";
    vec![
        Sizes::new(bytes, Unit::Megabytes, ["fetched"], column(|it| it.0)),
        Sizes::new("Requests to the registry", Unit::Times, ["requests"], column(|it| it.1)),
    ]
}
