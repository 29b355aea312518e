//! The file `meta`, which describes a store.

use image::verity::Algorithm;
use serde::{Deserialize, Serialize};

use crate::record::{self, RecordError};

/// How new objects and images are protected from change, besides mode 0444.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sealing {
    /// fs-verity where the file system has it.
    #[default]
    Verity,
    /// fs-verity where the file system has it, else the immutable flag where this process may set
    /// it (`CAP_LINUX_IMMUTABLE`). On such a store `rm -r` fails: `Store::unseal` it first.
    VerityOrImmutable,
}

/// The version of the layout that this code writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 2;

/// Features that this version knows.
const KNOWN: [&str; 2] = [LAZY_DEVICES, SNAPSHOTS];

/// There may be lazy devices, which `gc` has to know and `fsck` has to check.
const LAZY_DEVICES: &str = "lazy-devices";

/// There may be snapshots of engines, whose images `gc` has to keep.
const SNAPSHOTS: &str = "snapshots";

/// The file.
pub(crate) const META: &str = "meta";
/// Empty, and there if the store is shared.
pub(crate) const SHARED_MARK: &str = "shared";

/// The checked contents of `meta`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// The hash that names objects and images.
    pub algorithm: Algorithm,
    /// Features of the store that a program must know to change it, and that this version does not know.
    /// The store can then only be read.
    pub unknown_to_write: Vec<String>,
    /// Whether there may be lazy devices.
    pub has_lazy_devices: bool,
    /// Whether there may be snapshots of engines.
    pub has_snapshots: bool,
    /// How new objects and images are protected, unless the caller chooses another way.
    pub sealing: Sealing,
}

/// Why `meta` is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetaError {
    /// The file is damaged.
    #[error("the store's file \"meta\" is damaged")]
    Damaged(#[source] RecordError),
    /// A layout of an earlier version.
    #[error(
        "an earlier version of Quire made the store: it has format {0}, and this version reads format {FORMAT_VERSION}. \
         Make a new store and pull or import its images again, or `quire export` them with the version that made it"
    )]
    Earlier(u32),
    /// A layout of a later version.
    #[error(
        "a later version of Quire made the store: it has format {0}, and this version reads format {FORMAT_VERSION}"
    )]
    Version(u32),
    /// A hash that this version does not know.
    #[error("the store uses the hash \"{}\", which this version does not know", .0.escape_debug())]
    Algorithm(String),
    /// Features that a program must know to read the store, and that this version does not know.
    #[error("the store has features that this version does not know: {}", .0.join(", "))]
    Features(Vec<String>),
}

/// As written. Fields that are not known are for looking only, and ignored.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    format: u32,
    algorithm: String,
    #[serde(default)]
    needed_to_read: Vec<String>,
    #[serde(default)]
    needed_to_write: Vec<String>,
    /// `immutable`, or nothing. A version that does not know it seals by fs-verity only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealing: Option<String>,
}

/// In `meta`, that the immutable flag is wanted.
const IMMUTABLE: &str = "immutable";

impl Meta {
    pub(crate) const fn new(algorithm: Algorithm, sealing: Sealing) -> Self {
        let unknown_to_write = Vec::new();
        Self { algorithm, unknown_to_write, has_lazy_devices: false, has_snapshots: false, sealing }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let features = [(self.has_lazy_devices, LAZY_DEVICES), (self.has_snapshots, SNAPSHOTS)];
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
        let (has_lazy_devices, has_snapshots) = (has(LAZY_DEVICES), has(SNAPSHOTS));
        let unknown_to_write = unknown(raw.needed_to_write);
        Ok(Self { algorithm, unknown_to_write, has_lazy_devices, has_snapshots, sealing })
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
            }
        }
    }
}
