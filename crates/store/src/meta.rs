//! What a store says about itself: the file `meta`.

use image::verity::Algorithm;
use serde::{Deserialize, Serialize};

use crate::record::{self, RecordError};
use crate::store::Sealing;

/// The version of the layout that this code writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// The store has data blobs, or had: who does not know them would not keep them.
const DATA_BLOBS: &str = "data-blobs";
/// Some of them have objects in pieces or blocks of 512 bytes, or had: who does not know these would not keep them.
const DATA_PIECES: &str = "data-pieces";
/// Features that this version knows.
const KNOWN: [&str; 2] = [DATA_BLOBS, DATA_PIECES];

/// The checked contents of `meta`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// Names objects and images.
    pub algorithm: Algorithm,
    /// Features of the store that a program must know to change it, and this one does not:
    /// it may look only.
    pub unknown_to_write: Vec<String>,
    /// Whether there may be data blobs.
    pub data_blobs: bool,
    /// Whether there may be objects in pieces in them, or packed ones in blocks of 512 bytes.
    pub data_pieces: bool,
    /// How new objects and images are protected, unless who opens the store says otherwise.
    pub sealing: Sealing,
}

/// Why `meta` is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetaError {
    /// The file is damaged.
    #[error("the store's file meta cannot be read")]
    Damaged(#[source] RecordError),
    /// A layout that this version does not know.
    #[error("the store has format {0}, this version knows format {FORMAT_VERSION} only")]
    Version(u32),
    /// A hash that this version does not know.
    #[error("the store is made with the hash \"{}\", which this version does not know", .0.escape_debug())]
    Algorithm(String),
    /// It has features that a program must know to read it.
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
        Self { algorithm, unknown_to_write, data_blobs: false, data_pieces: false, sealing }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let features = [(self.data_blobs, DATA_BLOBS), (self.data_pieces, DATA_PIECES)];
        let needed = features.into_iter().filter(|(is_needed, _)| *is_needed);
        let needed = needed.map(|(_, name)| name.to_owned());
        let needed_to_write = needed.chain(self.unknown_to_write.iter().cloned()).collect();
        record::encode(&Raw {
            format: FORMAT_VERSION,
            algorithm: self.algorithm.name().to_owned(),
            needed_to_read: Vec::new(),
            needed_to_write,
            sealing: (self.sealing == Sealing::VerityOrImmutable).then(|| IMMUTABLE.to_owned()),
        })
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, MetaError> {
        let raw: Raw = record::decode(bytes).map_err(MetaError::Damaged)?;
        if raw.format != FORMAT_VERSION {
            return Err(MetaError::Version(raw.format));
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
        let has = |name: &str| raw.needed_to_write.iter().any(|it| it == name);
        let (data_blobs, data_pieces) = (has(DATA_BLOBS), has(DATA_PIECES));
        let unknown_to_write = unknown(raw.needed_to_write);
        Ok(Self { algorithm, unknown_to_write, data_blobs, data_pieces, sealing })
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
        check(r#"{"format":1,"algorithm":"sha256"}"#, "sha256 []");
        check(r#"{"format":1,"algorithm":"sha512","color":"red"}"#, "sha512 []");
        check(r#"{"format":2,"algorithm":"sha256"}"#, "format 2");
        check(r#"{"format":1,"algorithm":"md5"}"#, "\"md5\"");
        check(r#"{"format":1,"algorithm":"sha256","needed_to_read":["packs","x"]}"#, "packs, x");
        check(
            r#"{"format":1,"algorithm":"sha256","needed_to_write":["packs"]}"#,
            "sha256 [\"packs\"]",
        );
        check(r#"{"format":-1,"algorithm":"sha256"}"#, "cannot be read");
        check("[]", "cannot be read");
    }

    #[test]
    fn what_is_written_is_read() {
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            for sealing in [Sealing::Verity, Sealing::VerityOrImmutable] {
                let mut meta = Meta::new(algorithm, sealing);
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
                // Who says one feature more keeps those that it does not know.
                meta.data_pieces = true;
                meta.unknown_to_write = vec!["packs".to_owned()];
                assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
            }
        }
    }
}
