//! Small OCI layouts with unusual files, which programs that compute ids must treat equally. Shares no code with Quire.

mod cases;
mod random;
mod tar;

use std::path::Path;

use serde_json::json;

use crate::chunked::sha256;

pub use cases::odd_layouts;
pub use random::random_layout;

/// An image with layers as tars, from the lowest to the uppermost.
#[derive(Debug, Clone)]
pub struct OddLayout {
    pub name: String,
    pub layers: Vec<Vec<u8>>,
}

impl OddLayout {
    /// Writes the image as an OCI layout, under the tag `latest`.
    pub fn write(&self, directory: &Path) {
        let blobs = directory.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        let put = |bytes: &[u8]| {
            let digest = sha256(bytes);
            std::fs::write(blobs.join(digest.strip_prefix("sha256:").unwrap()), bytes).unwrap();
            digest
        };
        let descriptor = |media_type: &str, bytes: &[u8]| json!({ "mediaType": media_type, "digest": put(bytes), "size": bytes.len() });
        let platform = json!({ "architecture": architecture(), "os": "linux" });
        let diff_ids: Vec<_> = self.layers.iter().map(|it| sha256(it)).collect();
        let mut config = platform.clone();
        config["rootfs"] = json!({ "type": "layers", "diff_ids": diff_ids });
        config["config"] = json!({});
        let config = config.to_string();
        let layers: Vec<_> = self
            .layers
            .iter()
            .map(|it| descriptor("application/vnd.oci.image.layer.v1.tar", it))
            .collect();
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes()),
            "layers": layers,
        });
        let mut listed = descriptor(manifest_type, manifest.to_string().as_bytes());
        listed["annotations"] = json!({ "org.opencontainers.image.ref.name": "latest" });
        listed["platform"] = platform;
        let index = json!({ "schemaVersion": 2, "manifests": [listed] });
        std::fs::write(directory.join("index.json"), index.to_string()).unwrap();
        std::fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }
}

/// Returns OCI's name of this machine's processor. Ids do not depend on it.
const fn architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}
