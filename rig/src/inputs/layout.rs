//! Writes OCI image layouts without tools of other projects.

use std::fs;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::layer::{LayerFile, hex};
use crate::cache::remove;

/// Media types of layers. Source: OCI image-spec 1.1, `layer.md`.
pub const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
pub const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
pub const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

/// The settings in an image's config for running the image.
pub struct Config(Value);

impl Default for Config {
    fn default() -> Self {
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        Self(json!({ "Env": [path], "Labels": {} }))
    }
}

impl Config {
    pub fn env(&mut self, name: &str, value: &str) -> &mut Self {
        let env = self.0["Env"].as_array_mut().expect("made as an array");
        env.push(Value::String(format!("{name}={value}")));
        self
    }

    pub fn label(&mut self, name: &str, value: &str) -> &mut Self {
        self.0["Labels"][name] = json!(value);
        self
    }

    pub fn entrypoint(&mut self, words: &[&str]) -> &mut Self {
        self.0["Entrypoint"] = json!(words);
        self
    }

    pub fn command(&mut self, words: &[&str]) -> &mut Self {
        self.0["Cmd"] = json!(words);
        self
    }

    pub fn user(&mut self, user: &str) -> &mut Self {
        self.0["User"] = json!(user);
        self
    }

    pub fn folder(&mut self, folder: &str) -> &mut Self {
        self.0["WorkingDir"] = json!(folder);
        self
    }
}

/// Writes the layout of an image with these layers, the lowest first, with the tag `latest`. Layer files below `dir`
/// are moved into the layout.
pub fn write(dir: &Path, config: &Config, layers: &[LayerFile]) -> Result<()> {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let blob = |media: &str, value: &Value| -> Result<Value> {
        let bytes = value.to_string().into_bytes();
        let digest = hex(&Sha256::digest(&bytes));
        fs::write(blobs.join(&digest), &bytes)?;
        Ok(descriptor(media, &digest, bytes.len().try_into()?))
    };
    let diff_ids = layers.iter().map(|it| format!("sha256:{}", it.diff_id));
    let config = json!({
        "created": "2026-01-01T00:00:00Z",
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": config.0,
        "rootfs": { "type": "layers", "diff_ids": diff_ids.collect::<Vec<_>>() },
        "history": layers.iter().map(|_| json!({ "created_by": "xtask inputs" })).collect::<Vec<_>>(),
    });
    let config = blob("application/vnd.oci.image.config.v1+json", &config)?;
    let mut descriptors = Vec::new();
    for layer in layers {
        let target = blobs.join(&layer.digest);
        fs::copy(&layer.file, &target)?;
        let size = target.metadata()?.len();
        descriptors.push(descriptor(layer.media, &layer.digest, size));
        if layer.file.starts_with(dir) {
            remove(&layer.file)?;
            remove(&layer.file.with_file_name("layer.json"))?;
        }
    }
    let media = "application/vnd.oci.image.manifest.v1+json";
    let mut manifest = blob(
        media,
        &json!({ "schemaVersion": 2, "mediaType": media, "config": config, "layers": descriptors }),
    )?;
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": "latest" });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    });
    fs::write(dir.join("index.json"), index.to_string())?;
    fs::write(dir.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
    Ok(())
}

fn descriptor(media: &str, digest: &str, size: u64) -> Value {
    json!({ "mediaType": media, "digest": format!("sha256:{digest}"), "size": size })
}
