//! Helpers of benches with registries: uploads of images, and their layers and traffic.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::report::{Sizes, Unit};
use rig::process::{need, quiet};

/// Copies a layout's image into a registry.
pub(super) fn copy(layout: &Path, image: &str) -> Result<()> {
    let mut push = Command::new(need("skopeo")?);
    push.args(["copy", "--quiet", "--dest-tls-verify=false"]);
    push.arg(format!("oci:{}:latest", layout.display())).arg(format!("docker://{image}"));
    quiet(&mut push).map(drop)
}

/// Paths of the layers of a layout's only image, the lowest first.
pub(super) fn layers(layout: &Path) -> Result<Vec<PathBuf>> {
    let read = |path: PathBuf| -> Result<Value> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
    let blob = |it: &Value| -> Result<PathBuf> {
        let digest = it["digest"].as_str().and_then(|it| it.strip_prefix("sha256:"));
        Ok(layout.join("blobs/sha256").join(digest.context("a descriptor has a digest")?))
    };
    let manifest = read(blob(&read(layout.join("index.json"))?["manifests"][0])?)?;
    let layers = manifest["layers"].as_array().context("a manifest has layers")?;
    layers.iter().map(blob).collect()
}

/// Pulls an image with all layers by `quire`, and makes its index.
pub(super) fn pull_with_index(mut quire: Command, image: &str) -> Result<()> {
    quire.args(["--quiet", "pull", "--form", "tar", "--keep-layers", "--index", image]);
    quiet(&mut quire).map(drop)
}

/// Pushes the index of an image that `quire` pulled, and returns the number of bytes sent.
pub(super) fn push_index(mut quire: Command, image: &str) -> Result<u64> {
    let made = quiet(quire.args(["index", "--json", "--push", image, image]))?;
    let made: Value = serde_json::from_str(&made)?;
    made["pushed"]["sent"].as_u64().context("the index was not pushed")
}

/// Tables of bytes and requests, one row for each operation.
pub(super) fn traffic(rows: &[(String, (u64, u64))]) -> Vec<Sizes> {
    let column = |of: fn(&(u64, u64)) -> u64| {
        rows.iter().map(|(name, traffic)| (name.clone(), vec![of(traffic)])).collect()
    };
    vec![
        Sizes {
            title: String::from("Bytes from the registry, with HTTP's own"),
            unit: Unit::Megabytes,
            columns: vec!["fetched"],
            rows: column(|it| it.0),
        },
        Sizes {
            title: String::from("Requests to the registry"),
            unit: Unit::Times,
            columns: vec!["requests"],
            rows: column(|it| it.1),
        },
    ]
}
