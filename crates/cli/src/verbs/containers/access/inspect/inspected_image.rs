//! An image, as `inspect` describes it. The fields are those of podman, `pkg/inspect/inspect.go`.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use store::{Resolved, Store};
use transfer::{StoredError, StoredImage};

use crate::output::report::Bytes;
use crate::verbs::images::images::content_of;

/// Report of `inspect` on an image.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedImageReport {
    /// Image id.
    id: String,
    /// Digest of the manifest. Null if the image came without one.
    digest: Option<String>,
    /// Names of the image.
    repo_tags: Vec<String>,
    /// Repositories of these names, with the digest of the manifest.
    repo_digests: Vec<String>,
    /// Time at which the image was made, from its configuration. Null if the configuration does not have it.
    created: Option<String>,
    /// Author, from the configuration; may be empty.
    author: String,
    /// Architecture, such as `amd64`; empty if the image came without a configuration.
    architecture: String,
    /// Operating system, such as `linux`; empty if the image came without a configuration.
    os: String,
    /// Lengths of all files, each counted once.
    size: Bytes,
    /// The same as `Size`.
    virtual_size: Bytes,
    /// User of the program, from the configuration; may be empty.
    user: String,
    /// Defaults of containers, as OCI defines them. Null if the image came without them.
    config: Option<Value>,
    /// Labels, from the configuration.
    labels: BTreeMap<String, String>,
    /// Annotations of the manifest.
    annotations: BTreeMap<String, String>,
    /// Media type of the manifest; empty if it states none.
    manifest_type: String,
    /// The layers.
    #[serde(rename = "RootFS")]
    root_fs: InspectedRootReport,
    /// Steps of the build, as OCI defines them. Null if the image came without a configuration.
    history: Option<Value>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct InspectedRootReport {
    /// `layers`.
    #[serde(rename = "Type")]
    kind: &'static str,
    /// Digests of the layers' uncompressed tars, lowest first.
    layers: Vec<String>,
}

impl InspectedImageReport {
    pub(crate) fn new(store: &Store, found: &Resolved) -> anyhow::Result<Self> {
        let (refs, _) = store.refs.readable()?;
        let names =
            refs.into_iter().filter(|(name, it)| it.image == found.image && !name.is_unnamed());
        let names: Vec<_> = names.map(|(name, _)| name.to_string()).collect();
        let stored = match found.manifest.map(|it| StoredImage::load(store, &it)) {
            // `fsck` reports missing documents.
            None | Some(Err(StoredError::Absent { .. })) => None,
            Some(stored) => Some(stored?),
        };
        let manifest = stored.as_ref().map(StoredImage::manifest_json).transpose()?;
        let manifest = manifest.unwrap_or_default();
        let mut config = stored.as_ref().map(StoredImage::config_json).transpose()?;
        let size = Bytes(content_of(store, &found.image)?);
        let of = config.as_ref();
        let text = |path: &str| at(of, path).as_str().unwrap_or_default().to_owned();
        let digests = found.manifest.iter().flat_map(|digest| {
            names.iter().map(move |name| format!("{}@{digest}", repository(name)))
        });
        let layers = at(of, "/rootfs/diff_ids").as_array();
        let layers = layers.into_iter().flatten().filter_map(|it| it.as_str().map(str::to_owned));
        let mut repo_digests: Vec<_> = digests.collect();
        repo_digests.dedup();
        Ok(Self {
            id: found.image.to_string(),
            digest: found.manifest.map(|it| it.to_string()),
            repo_digests,
            created: at(of, "/created").as_str().map(str::to_owned),
            author: text("/author"),
            architecture: text("/architecture"),
            os: text("/os"),
            size,
            virtual_size: size,
            user: text("/config/User"),
            labels: texts(at(of, "/config/Labels")),
            annotations: texts(&manifest["annotations"]),
            manifest_type: manifest["mediaType"].as_str().unwrap_or_default().to_owned(),
            root_fs: InspectedRootReport { kind: "layers", layers: layers.collect() },
            repo_tags: names,
            history: take(config.as_mut(), "history"),
            config: take(config.as_mut(), "config"),
        })
    }
}

/// Returns the value at a JSON pointer, or null.
fn at<'a>(config: Option<&'a Value>, path: &str) -> &'a Value {
    static NULL: Value = Value::Null;
    config.and_then(|it| it.pointer(path)).unwrap_or(&NULL)
}

/// Takes a field out of a document, which may be no object.
fn take(document: Option<&mut Value>, field: &str) -> Option<Value> {
    document.and_then(|it| it.get_mut(field)).map(Value::take)
}

/// Returns a name without its tag.
fn repository(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => name,
    }
}

fn texts(object: &Value) -> BTreeMap<String, String> {
    let entries = object.as_object().into_iter().flatten();
    entries.filter_map(|(name, it)| Some((name.clone(), it.as_str()?.to_owned()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_repositories() {
        for (name, expect) in [
            ("debian:12", "debian"),
            ("docker.io/library/debian:latest", "docker.io/library/debian"),
            ("localhost:5000/app", "localhost:5000/app"),
            ("localhost:5000/app:1", "localhost:5000/app"),
            ("app", "app"),
        ] {
            assert_eq!(repository(name), expect);
        }
    }
}
