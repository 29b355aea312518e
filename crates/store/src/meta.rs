//! The file `meta`, which describes a store.

use image::verity::Algorithm;
use serde::{Deserialize, Serialize};

use crate::record::{self, RecordError};

/// Protection of new objects and images against changes, besides mode 0444.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sealing {
    /// Files are protected by fs-verity if the file system supports it.
    #[default]
    Verity,
    /// Files are protected by fs-verity if the file system supports it, or else by the immutable flag if this process
    /// may set it (`CAP_LINUX_IMMUTABLE`). `rm -r` fails on such a store until `Store::unseal` removes the flag.
    VerityOrImmutable,
}

/// Version of the layout that this code writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 2;

/// Features that this version knows.
const KNOWN: [&str; 4] = [LAZY_DEVICES, SNAPSHOTS, CONTAINER_SNAPSHOTS, VOLUMES];

/// The store may have lazy devices, which `gc` must know and `fsck` must check.
const LAZY_DEVICES: &str = "lazy-devices";

/// The store may have snapshots of container engines, whose images `gc` must keep.
const SNAPSHOTS: &str = "snapshots";

/// The store may have snapshots of containers, whose images `gc` must keep.
const CONTAINER_SNAPSHOTS: &str = "container-snapshots";
/// The store may have volumes, which containers use and `gc` must keep.
const VOLUMES: &str = "volumes";

pub(crate) const META: &str = "meta";
/// Empty file that is present if the store is shared.
pub(crate) const SHARED_MARK: &str = "shared";
/// File with the id of the boot in which the store was last recovered. Its lock is held while files are synced or
/// removed.
pub(crate) const BOOT: &str = "boot";
/// File that is not empty while other files may have the mark of files that are not synced. Publications lock it,
/// shared.
pub(crate) const UNSYNCED: &str = "unsynced";

/// The checked contents of `meta`.
#[expect(clippy::struct_excessive_bools, reason = "each is a feature of the store")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// Hash that names objects and images.
    pub algorithm: Algorithm,
    /// Features that this version does not know, and that a program must know to change the store. If there are any,
    /// the store can only be read.
    pub unknown_to_write: Vec<String>,
    /// Whether the store may have lazy devices.
    pub has_lazy_devices: bool,
    /// Whether the store may have snapshots of container engines.
    pub has_snapshots: bool,
    /// Whether the store may have snapshots of containers.
    pub has_container_snapshots: bool,
    /// Whether the store may have volumes.
    pub has_volumes: bool,
    /// Protection of new objects and images, unless the caller chooses another one.
    pub sealing: Sealing,
}

/// The reason why `meta` is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetaError {
    #[error("the store's file \"meta\" is damaged")]
    Damaged(#[source] RecordError),
    /// An earlier layout version.
    #[error(
        "an earlier version of Quire made the store: it has format {0}, and this version reads format {FORMAT_VERSION}. \
         Make a new store and pull or import its images again, or `quire export` them with the version that made it"
    )]
    Earlier(u32),
    /// A later layout version.
    #[error(
        "a later version of Quire made the store: it has format {0}, and this version reads format {FORMAT_VERSION}"
    )]
    Version(u32),
    /// Name of a hash that this version does not know.
    #[error("the store uses the hash \"{}\", which this version does not know", .0.escape_debug())]
    Algorithm(String),
    /// Features that a program must know to read the store, and that this version does not know.
    #[error("the store has features that this version does not know: {}", .0.join(", "))]
    Features(Vec<String>),
}

/// `meta` as written. Unknown fields are for information only and are ignored.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    format: u32,
    algorithm: String,
    #[serde(default)]
    needed_to_read: Vec<String>,
    #[serde(default)]
    needed_to_write: Vec<String>,
    /// `immutable`, or absent. A version that does not know this field seals with fs-verity only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealing: Option<String>,
}

/// Value of `sealing` for [`Sealing::VerityOrImmutable`].
const IMMUTABLE: &str = "immutable";

impl Meta {
    pub(crate) const fn new(algorithm: Algorithm, sealing: Sealing) -> Self {
        let unknown_to_write = Vec::new();
        Self {
            algorithm,
            unknown_to_write,
            has_lazy_devices: false,
            has_snapshots: false,
            has_container_snapshots: false,
            has_volumes: false,
            sealing,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let features = [
            (self.has_lazy_devices, LAZY_DEVICES),
            (self.has_snapshots, SNAPSHOTS),
            (self.has_container_snapshots, CONTAINER_SNAPSHOTS),
            (self.has_volumes, VOLUMES),
        ];
        let features = features.into_iter().filter(|it| it.0).map(|it| it.1.to_owned());
        let features = features.chain(self.unknown_to_write.iter().cloned());
        record::encode(&Raw {
            format: FORMAT_VERSION,
            algorithm: self.algorithm.name().to_owned(),
            needed_to_read: Vec::new(),
            needed_to_write: features.collect(),
            sealing: (self.sealing == Sealing::VerityOrImmutable).then(|| IMMUTABLE.to_owned()),
        })
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, MetaError> {
        let raw: Raw = record::decode(bytes).map_err(MetaError::Damaged)?;
        match raw.format {
            FORMAT_VERSION => {}
            earlier @ 0..FORMAT_VERSION => return Err(MetaError::Earlier(earlier)),
            later => return Err(MetaError::Version(later)),
        }
        let unknown = |features: Vec<String>| -> Vec<String> {
            features.into_iter().filter(|it| !KNOWN.contains(&it.as_str())).collect()
        };
        let unknown_to_read = unknown(raw.needed_to_read);
        if !unknown_to_read.is_empty() {
            return Err(MetaError::Features(unknown_to_read));
        }
        let algorithm = [Algorithm::Sha256, Algorithm::Sha512]
            .into_iter()
            .find(|it| it.name() == raw.algorithm)
            .ok_or(MetaError::Algorithm(raw.algorithm))?;
        let sealing = match raw.sealing.as_deref() {
            Some(IMMUTABLE) => Sealing::VerityOrImmutable,
            _ => Sealing::Verity,
        };
        let has = |feature| raw.needed_to_write.iter().any(|it| it == feature);
        Ok(Self {
            algorithm,
            has_lazy_devices: has(LAZY_DEVICES),
            has_snapshots: has(SNAPSHOTS),
            has_container_snapshots: has(CONTAINER_SNAPSHOTS),
            has_volumes: has(VOLUMES),
            unknown_to_write: unknown(raw.needed_to_write),
            sealing,
        })
    }
}

#[cfg(test)]
mod tests {
    use image::verity::Algorithm;

    use super::{Meta, Sealing};
    use crate::record;

    fn check(json: &str, expected: &str) {
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        let found = match Meta::decode(&record::encode(&value)) {
            Ok(meta) => format!("{} {:?}", meta.algorithm, meta.unknown_to_write),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{json}: {found}");
    }

    #[test]
    fn versions_and_features_are_checked() {
        check(r#"{"format":2,"algorithm":"sha256"}"#, "sha256 []");
        check(r#"{"format":2,"algorithm":"sha512","color":"red"}"#, "sha512 []");
        check(
            r#"{"format":1,"algorithm":"sha256"}"#,
            "an earlier version of Quire made the store: it has format 1",
        );
        check(
            r#"{"format":3,"algorithm":"sha256"}"#,
            "a later version of Quire made the store: it has format 3",
        );
        check(r#"{"format":2,"algorithm":"md5"}"#, "\"md5\"");
        check(r#"{"format":2,"algorithm":"sha256","needed_to_read":["packs","x"]}"#, "packs, x");
        check(
            r#"{"format":2,"algorithm":"sha256","needed_to_write":["packs"]}"#,
            "sha256 [\"packs\"]",
        );
        check(
            r#"{"format":2,"algorithm":"sha256","needed_to_write":["lazy-devices"]}"#,
            "sha256 []",
        );
        check(r#"{"format":-1,"algorithm":"sha256"}"#, "file \"meta\" is damaged");
        check("[]", "file \"meta\" is damaged");
    }

    #[test]
    fn what_is_written_is_read() {
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            for sealing in [Sealing::Verity, Sealing::VerityOrImmutable] {
                let mut meta = Meta::new(algorithm, sealing);
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
                meta.unknown_to_write = vec!["packs".to_owned()];
                meta.has_lazy_devices = true;
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
                meta.has_snapshots = true;
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
                meta.has_container_snapshots = true;
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
                meta.has_volumes = true;
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
            }
        }
    }

    #[test]
    fn the_document_lists_all_features() {
        let document = include_str!("../../../docs/format/object-store.md");
        let (_, part) = document.split_once("\n## Compatibility\n").unwrap();
        for feature in super::KNOWN {
            assert!(part.contains(&format!("`{feature}`: ")), "{feature}");
        }
    }
}
