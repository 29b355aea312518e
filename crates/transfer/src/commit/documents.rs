//! Makes the config and manifest of the new image.

use serde_json::{Map, Value, json};
use store::Blob;

use super::Commit;
use crate::config_change::apply_all;
use image::digest::Digest;

/// The digest and bytes of a document.
type NamedDocument = (Digest, Vec<u8>);

/// Docker's fields about the container that an image was made in, and about its own storage. All describe the base
/// image.
const OF_ANOTHER: [&str; 5] = ["container", "container_config", "id", "parent", "parent_id"];

/// Returns the new config. `below`, the base image's config, is an object, because it was parsed as a config.
pub(super) fn config(mut below: Value, diff_id: &Digest, commit: &Commit<'_>) -> NamedDocument {
    let layers = below["rootfs"]["diff_ids"].as_array().map_or(0, Vec::len);
    if let Some(fields) = below.as_object_mut() {
        for name in OF_ANOTHER {
            fields.shift_remove(name);
        }
        fields.insert("created".to_owned(), commit.created.into());
        if let Some(author) = commit.author {
            fields.insert("author".to_owned(), author.into());
        }
    }
    if let Some(diff_ids) = below.pointer_mut("/rootfs/diff_ids").and_then(Value::as_array_mut) {
        diff_ids.push(diff_id.to_string().into());
    }
    let history = history(&below["history"], layers, commit);
    below["history"] = history.into();
    apply_all(&mut below, commit.changes);
    named(&below)
}

/// Returns the new history. Readers match its entries that are not "empty layer" to the layers, so each layer needs
/// one.
fn history(below: &Value, layers: usize, commit: &Commit<'_>) -> Vec<Value> {
    let mut history = below.as_array().cloned().unwrap_or_default();
    let is_layer = |it: &&Value| it["empty_layer"].as_bool() != Some(true);
    let told = history.iter().filter(is_layer).count();
    for _ in told..layers {
        history.push(json!({ "comment": "the image had no history of this layer" }));
    }
    let mut entry = Map::new();
    let mut tell = |name: &str, value: Option<&str>| {
        value.map(|value| entry.insert(name.to_owned(), value.into()))
    };
    tell("created", Some(commit.created));
    tell("author", commit.author);
    tell("created_by", Some(commit.command).filter(|it| !it.is_empty()));
    tell("comment", commit.message);
    history.push(entry.into());
    history
}

pub(super) fn manifest(
    below: &Value,
    (config, bytes): &NamedDocument,
    blob: &Blob,
) -> NamedDocument {
    let mut layers = below["layers"].as_array().cloned().unwrap_or_default();
    for layer in &mut layers {
        if let Some(name) = layer["mediaType"].as_str().and_then(oci_name) {
            layer["mediaType"] = name.into();
        }
    }
    layers.push(json!({
        "mediaType": blob.media_type, "digest": blob.digest.to_string(), "size": blob.size,
    }));
    named(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config.to_string(),
            "size": bytes.len(),
        },
        "layers": layers,
    }))
}

/// Returns OCI's equivalent of a media type of Docker's layers. Source: OCI image-spec, `media-types.md`,
/// "Compatibility Matrix".
fn oci_name(media_type: &str) -> Option<&'static str> {
    Some(match media_type.strip_prefix("application/vnd.docker.image.rootfs.")? {
        "diff.tar" => "application/vnd.oci.image.layer.v1.tar",
        "diff.tar.gzip" => "application/vnd.oci.image.layer.v1.tar+gzip",
        "diff.tar.zstd" => "application/vnd.oci.image.layer.v1.tar+zstd",
        "foreign.diff.tar" => "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "foreign.diff.tar.gzip" => "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        _ => return None,
    })
}

fn named(value: &Value) -> NamedDocument {
    let bytes = value.to_string().into_bytes();
    (Digest::sha256(&bytes), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commit::Change;
    use oci::manifest::{Config, Document};

    fn commit<'a>(
        manifest: &'a Digest,
        tree: &'a image::tree::Tree,
        changes: &'a [Change],
    ) -> Commit<'a> {
        Commit {
            manifest,
            tree,
            created: "2026-01-02T03:04:05Z",
            author: Some("me"),
            message: Some("why"),
            command: "sh -c x",
            changes,
        }
    }

    #[test]
    fn a_config_gets_one_more_of_each() {
        let (old, new) = (Digest::sha256(b"old"), Digest::sha256(b"new"));
        let tree = image::tree::Builder::new().finish();
        let below = json!({
            "architecture": "arm64", "os": "linux", "container": "x", "created": "then", "unknown": [1],
            "config": {"Cmd": ["a"], "Env": ["A=1"]},
            "rootfs": {"type": "layers", "diff_ids": [old.to_string()]},
            "history": [{"created_by": "ADD"}, {"created_by": "CMD", "empty_layer": true}],
        });
        let changes = ["CMD b c".parse().unwrap(), "ENV A=2 B=3".parse().unwrap()];
        let (digest, bytes) = config(below, &new, &commit(&old, &tree, &changes));
        assert_eq!(digest, Digest::sha256(&bytes));
        let found: Value = serde_json::from_slice(&bytes).unwrap();
        let entry = json!({
            "created": "2026-01-02T03:04:05Z", "author": "me", "created_by": "sh -c x", "comment": "why",
        });
        assert_eq!(
            found,
            json!({
                "architecture": "arm64", "os": "linux", "created": "2026-01-02T03:04:05Z", "author": "me",
                "unknown": [1],
                "config": {"Cmd": ["/bin/sh", "-c", "b c"], "Env": ["A=2", "B=3"]},
                "rootfs": {"type": "layers", "diff_ids": [old.to_string(), new.to_string()]},
                "history": [{"created_by": "ADD"}, {"created_by": "CMD", "empty_layer": true}, entry],
            })
        );
        assert_eq!(Config::parse(&bytes).unwrap().diff_ids(), [old, new]);
    }

    #[test]
    fn a_config_without_history_gets_one_that_can_be_counted() {
        let old = Digest::sha256(b"old");
        let tree = image::tree::Builder::new().finish();
        let two = [old.to_string(), old.to_string()];
        let below = json!({"architecture": "amd64", "os": "linux",
                           "rootfs": {"type": "layers", "diff_ids": two}});
        let (_, bytes) = config(below, &old, &commit(&old, &tree, &[]));
        let found: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(found["history"].as_array().unwrap().len(), 3);
        assert!(found["config"].is_null());
    }

    #[test]
    fn a_manifest_of_docker_becomes_one_of_oci() {
        let digest = Digest::sha256(b"x");
        let layer =
            |name: &str| json!({"mediaType": name, "digest": digest.to_string(), "size": 7});
        let below = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {}, "annotations": {"a": "b"},
            "layers": [layer("application/vnd.docker.image.rootfs.diff.tar.gzip"), layer("other")],
        });
        let media_type = "application/vnd.oci.image.layer.v1.tar".to_owned();
        let blob = Blob { digest, size: 9, media_type, is_hashed: true, repositories: Vec::new() };
        let (name, bytes) = manifest(&below, &(digest, b"{}".to_vec()), &blob);
        assert_eq!(name, Digest::sha256(&bytes));
        let found: Value = serde_json::from_slice(&bytes).unwrap();
        let types: Vec<_> =
            found["layers"].as_array().unwrap().iter().map(|it| it["mediaType"].clone()).collect();
        assert_eq!(
            types,
            [
                "application/vnd.oci.image.layer.v1.tar+gzip",
                "other",
                "application/vnd.oci.image.layer.v1.tar"
            ]
        );
        assert_eq!(found["config"]["size"], 2);
        let layers = json!([layer("application/vnd.oci.image.layer.v1.tar+gzip")]);
        let below = json!({"layers": layers});
        let (_, bytes) = manifest(&below, &(digest, b"{}".to_vec()), &blob);
        assert!(matches!(Document::parse(&bytes), Ok(Document::Image(it)) if it.layers.len() == 2));
    }
}
