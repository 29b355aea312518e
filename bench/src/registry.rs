//! What benches with registries share: images that go there, and what comes from there.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::report::{Sizes, Unit};
use rig::process::{need, quiet};

/// Copies a layout's image into a registry.
pub(super) fn copy(layout: &Path, image: &str) -> Result<()> {
    let mut push = Command::new(need("skopeo")?);
    push.args(["copy", "--quiet", "--dest-tls-verify=false"]);
    push.arg(format!("oci:{}:latest", layout.display())).arg(format!("docker://{image}"));
    quiet(&mut push).map(drop)
}

/// Has `quire` pull an image whole, with its index.
pub(super) fn pull_with_index(mut quire: Command, image: &str) -> Result<()> {
    quire.args(["--quiet", "pull", "--form", "tar", "--keep-layers", "--index", image]);
    quiet(&mut quire).map(drop)
}

/// Has `quire` push the index of an image that it pulled, and returns how many bytes that sent.
pub(super) fn push_index(mut quire: Command, image: &str) -> Result<u64> {
    let made = quiet(quire.args(["index", "--json", "--push", image, image]))?;
    let made: serde_json::Value = serde_json::from_str(&made)?;
    made["pushed"]["sent"].as_u64().context("the index was not pushed")
}

/// Tables of bytes and requests, by what was done.
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
