//! OCI manifests, configs and indexes, named by digest and kept byte for byte.

use super::item::StoreItem;
use super::{Checked, Listing};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::{Directory, DiskError};
use image::digest::Digest;

/// Maximum length in bytes of a manifest, config or index. Registries refuse manifests of more than 4 MiB
/// (distribution-spec, "Pushing Manifests"); configs with long histories are larger.
pub(crate) const MANIFEST_MAX: u64 = 64 << 20;

/// An error while a manifest is read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoredManifestError {
    /// The bytes do not match the digest.
    #[error("the bytes of {expected} have the digest {actual}")]
    Mismatch {
        /// Digest that names the manifest.
        expected: Digest,
        /// Digest of the bytes.
        actual: Box<Digest>,
    },
    /// The manifest is longer than 64 MiB.
    #[error("{digest} has {size} bytes, more than the 64 MiB of a manifest")]
    Size {
        digest: Digest,
        /// Length in bytes.
        size: u64,
    },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

pub(crate) fn check(expected: &Digest, bytes: &[u8]) -> Result<(), StoredManifestError> {
    let size = bytes.len() as u64;
    if size > MANIFEST_MAX {
        return Err(StoredManifestError::Size { digest: *expected, size });
    }
    let mut hasher = expected.hasher();
    hasher.update(bytes);
    let actual = hasher.finish();
    if actual == *expected {
        return Ok(());
    }
    Err(StoredManifestError::Mismatch { expected: *expected, actual: Box::new(actual) })
}

/// The directory `manifests/`, with manifests, configs and indexes named by their digests.
#[derive(Debug)]
pub struct ManifestShelf {
    pub(crate) directory: Directory,
}

impl ManifestShelf {
    /// Returns the bytes of a manifest, config or index, verified against the digest; `None` if it is absent.
    ///
    /// # Errors
    /// [`StoredManifestError`] if it is damaged or not readable.
    pub fn read(&self, digest: &Digest) -> Result<Option<Vec<u8>>, StoredManifestError> {
        let Some(bytes) = self.directory.read_all(digest.file_name(), MANIFEST_MAX)? else {
            return Ok(None);
        };
        check(digest, &bytes)?;
        Ok(Some(bytes))
    }

    /// Whether a file with this digest as name exists.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be read.
    pub fn has(&self, digest: &Digest) -> Result<bool, DiskError> {
        Ok(self.directory.stat(digest.file_name())?.is_some())
    }

    pub(crate) fn list(&self) -> Result<Listing<Digest>, DiskError> {
        Listing::read(&self.directory, |it| Digest::from_file_name(it.text()?))
    }

    /// Hashes these manifests.
    pub(crate) fn check(&self, names: &[Digest]) -> Result<Checked, FsckError> {
        let mut checked = Checked::default();
        for digest in names {
            let why = match self.read(digest) {
                Ok(_) => None,
                Err(StoredManifestError::Mismatch { actual, .. }) => {
                    Some(format!("its bytes have the digest {actual}"))
                }
                Err(error) => Some(check_error::damage(&error)?),
            };
            checked.add(StoreItem::Manifest(*digest), why);
        }
        Ok(checked)
    }
}

/// The digests in a manifest, config or index, of items that a store keeps.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Links {
    /// Configs and, in an index, manifests.
    pub(crate) manifests: Vec<Digest>,
    /// Diff ids in a config.
    pub(crate) layers: Vec<Digest>,
    /// Layers in a manifest, as sent by the registry.
    pub(crate) blobs: Vec<Digest>,
}

impl Links {
    /// Parses the links. Bytes that are not such JSON have none.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let Ok(json) = serde_json::from_slice::<serde_json::Value>(bytes) else {
            return Self::default();
        };
        let digest = |value: &serde_json::Value| value.as_str()?.parse::<Digest>().ok();
        let list = |value: &serde_json::Value| value.as_array().cloned().unwrap_or_default();
        let mut manifests: Vec<_> = digest(&json["config"]["digest"]).into_iter().collect();
        let listed = list(&json["manifests"]);
        manifests.extend(listed.iter().filter_map(|it| digest(&it["digest"])));
        let diff_ids = list(&json["rootfs"]["diff_ids"]);
        let blobs = list(&json["layers"]);
        let blobs = blobs.iter().filter_map(|it| digest(&it["digest"])).collect();
        Self { manifests, layers: diff_ids.iter().filter_map(digest).collect(), blobs }
    }
}

#[cfg(test)]
mod tests {
    use super::Links;

    fn check(json: &str, manifests: &[char], layers: &[char], blobs: &[char]) {
        let name = |digit: &char| format!("sha256:{}", digit.to_string().repeat(64));
        let full = |text: &str| {
            ('a'..='f').fold(text.to_owned(), |text, digit| {
                text.replace(&format!("@{digit}"), &name(&digit))
            })
        };
        let links = Links::parse(full(json).as_bytes());
        let found = |digests: &[crate::Digest]| -> Vec<String> {
            digests.iter().map(ToString::to_string).collect()
        };
        assert_eq!(found(&links.manifests), manifests.iter().map(name).collect::<Vec<_>>());
        assert_eq!(found(&links.blobs), blobs.iter().map(name).collect::<Vec<_>>());
        assert_eq!(found(&links.layers), layers.iter().map(name).collect::<Vec<_>>());
    }

    #[test]
    fn links_are_found() {
        check(r#"{"config":{"digest":"@a"},"layers":[{"digest":"@b"}]}"#, &['a'], &[], &['b']);
        check(r#"{"manifests":[{"digest":"@b"},{"digest":"@c"}]}"#, &['b', 'c'], &[], &[]);
        check(r#"{"rootfs":{"type":"layers","diff_ids":["@d","@e"]}}"#, &[], &['d', 'e'], &[]);
        check(r#"{"config":{"digest":7},"rootfs":"x","manifests":{"digest":"@a"}}"#, &[], &[], &[]);
        check("[1]", &[], &[], &[]);
        check("not json", &[], &[], &[]);
    }
}
