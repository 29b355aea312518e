//! Makes configs and manifests for sources without them. The same layers and changes give the same bytes.

use serde_json::json;
use store::Blob;

use super::LayerReport;
use crate::config_change::{Change, apply_all};
use image::digest::Digest;
use oci::manifest::Platform;

/// Makes a config whose runtime settings are only those of `changes`.
pub(super) fn config(
    platform: &Platform,
    layers: &[LayerReport],
    changes: &[Change],
) -> (Digest, Vec<u8>) {
    let diff_ids: Vec<_> = layers.iter().map(|layer| layer.diff_id.to_string()).collect();
    let mut config = json!({
        "architecture": platform.architecture,
        "os": platform.os,
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    apply_all(&mut config, changes);
    document(&config)
}

/// Makes a manifest for this config and these layers.
pub(super) fn manifest(config: &Digest, config_bytes: usize, layers: &[Blob]) -> (Digest, Vec<u8>) {
    let layers = layers.iter().map(|blob| {
        json!({ "mediaType": blob.media_type, "digest": blob.digest.to_string(), "size": blob.size })
    });
    document(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config.to_string(),
            "size": config_bytes,
        },
        "layers": layers.collect::<Vec<_>>(),
    }))
}

fn document(value: &serde_json::Value) -> (Digest, Vec<u8>) {
    let bytes = value.to_string().into_bytes();
    (Digest::sha256(&bytes), bytes)
}
