//! The few settings of a container that lists show, read from `request.json` without the rest of the settings.
//!
//! A list of many containers reads them for each one, while the whole settings may have a seccomp profile of megabytes.
//! Settings that this version does not know are ignored here, unlike in [`StoredRequest`](crate::request::StoredRequest),
//! which starts containers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use serde::Deserialize;
use serde_json::Value;

use crate::folder::REQUEST;
use crate::restart_policy::RestartPolicy;

/// Maximum size of the file, in bytes. The longest part is a seccomp profile.
const LARGEST: u64 = 16 << 20;

/// Settings of a container that lists show. A container of a version that recorded no settings has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedSettings {
    /// Labels of the caller and of the image.
    pub labels: BTreeMap<String, String>,
    pub mounts: Vec<ListedMount>,
    /// `none`, `host`, `pasta`, `named`, `joined` for a network namespace, or `container`.
    pub network: Option<String>,
    pub restart: RestartPolicy,
    /// Names of networks of the store.
    pub networks: Vec<String>,
    /// Whether the log does not keep the output.
    pub no_log: bool,
}

/// A volume or another mount of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedMount {
    /// Path on the host or name of a volume. `None` for memory and filestores.
    pub source: Option<String>,
    /// Path in the container.
    pub destination: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListedFile {
    request: ListedRequest,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListedRequest {
    labels: BTreeMap<String, String>,
    volumes: Vec<ListedEntry>,
    mounts: Vec<ListedEntry>,
    restart: RestartPolicy,
    no_log: bool,
    bundle: ListedBundle,
    networks: Option<ListedNetworks>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListedNetworks {
    networks: Vec<ListedNetwork>,
}

#[derive(Deserialize)]
struct ListedNetwork {
    name: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListedBundle {
    network: Value,
}

#[derive(Deserialize)]
struct ListedEntry {
    /// A word, or an object with one field, whose name is the kind.
    #[serde(alias = "kind")]
    source: Value,
    destination: String,
}

impl ListedSettings {
    /// Reads the settings in a container's folder.
    ///
    /// # Errors
    /// If the file cannot be read or parsed. A missing file is no error.
    pub fn load(folder: &Path) -> std::io::Result<Self> {
        // The file may have been replaced by a FIFO or a link.
        let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
        let path = folder.join(REQUEST);
        let file = match File::options().read(true).custom_flags(flags).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            file => file?,
        };
        let ListedFile { request } = serde_json::from_reader(BufReader::new(file.take(LARGEST)))?;
        let entries = request.volumes.into_iter().chain(request.mounts);
        let mount = |it: ListedEntry| ListedMount {
            source: it.source.as_object().and_then(|it| it.values().next()).and_then(text),
            destination: it.destination,
        };
        let network = match &request.bundle.network {
            Value::Object(it) => it.keys().next().cloned(),
            word => text(word),
        };
        let networks = request.networks.unwrap_or_default().networks;
        Ok(Self {
            labels: request.labels,
            mounts: entries.map(mount).collect(),
            network,
            networks: networks.into_iter().map(|it| it.name).collect(),
            restart: request.restart,
            no_log: request.no_log,
        })
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::Access;
    use crate::bundle::mounts::{MountKind, MountRequest};
    use crate::plan::ContainerRequest;
    use crate::request::StoredRequest;

    fn load(text: &[u8]) -> std::io::Result<ListedSettings> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(REQUEST), text).unwrap();
        ListedSettings::load(folder.path())
    }

    #[test]
    fn settings_are_those_of_the_request() {
        let mut request = ContainerRequest::new("a");
        request.bundle.network = crate::bundle::Network::Pasta;
        request.volumes = vec!["/srv:/data".parse().unwrap()];
        request.mounts = vec![MountRequest {
            kind: MountKind::Host("/kept".to_owned()),
            destination: "/m".to_owned(),
            access: Access::Writable,
            relabels: false,
        }];
        let text = StoredRequest::encode(Path::new("/r"), &request).unwrap();
        let mount = |source: Option<&str>, destination: &str| ListedMount {
            source: source.map(str::to_owned),
            destination: destination.to_owned(),
        };
        let found = load(&text).unwrap();
        assert_eq!(found.mounts, [mount(Some("/srv"), "/data"), mount(Some("/kept"), "/m")]);
        assert_eq!(found.network.as_deref(), Some("pasta"));
        // Labels, and kinds of mounts without a path.
        let other = br#"{"version": 9, "new": 1, "request": {"labels": {"a": "b"}, "later": {},
            "volumes": [{"source": {"named": "v"}, "destination": "/v", "access": "x"},
                {"source": {"anonymous": null}, "destination": "/w"}],
            "mounts": [{"kind": {"memory": {"bytes": 1}}, "destination": "/t"}],
            "bundle": {"network": {"joined": "/ns"}}}}"#;
        let found = load(other).unwrap();
        assert_eq!(found.labels, BTreeMap::from([("a".to_owned(), "b".to_owned())]));
        assert_eq!(found.mounts, [mount(Some("v"), "/v"), mount(None, "/w"), mount(None, "/t")]);
        assert_eq!(found.network.as_deref(), Some("joined"));
        assert_eq!(load(b"{}").unwrap(), ListedSettings::default());
        assert!(load(b"{").is_err());
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(ListedSettings::load(folder.path()).unwrap(), ListedSettings::default());
    }
}
