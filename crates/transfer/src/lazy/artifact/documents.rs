//! The JSON documents of an artifact: its manifest and its config.

use std::collections::BTreeMap;

use image::digest::Digest;
use oci::manifest::{MANIFEST_MAX, or_default};
use serde::{Deserialize, Serialize};

use super::{ARTIFACT_MANIFEST, ArtifactError, LAZY_ARTIFACT};

pub(super) const CONFIG_TYPE: &str = "application/vnd.quire.lazy.config.v1+json";
pub(super) const IMAGE_TYPE: &str = "application/vnd.quire.lazy.image.v1.erofs+zstd";
pub(super) const HEAD_TYPE: &str = "application/vnd.quire.lazy.head.v1";
pub(super) const WINDOWS_TYPE: &str = "application/vnd.quire.lazy.windows.v1";
/// Annotation of an artifact's manifest: the names of its traces, separated by commas. A registry's list of referrers
/// also includes it.
pub(in crate::lazy) const TRACES_ANNOTATION: &str = "vnd.quire.lazy.traces";
/// Annotation of an artifact's manifest: when its traces were recorded, as OCI's image-spec defines it (RFC 3339). Here it
/// is in UTC without fractions of a second.
pub(in crate::lazy) const CREATED_ANNOTATION: &str = "org.opencontainers.image.created";
pub(super) const TRACES_TYPE: &str = "application/vnd.quire.lazy.traces.v1+json";
pub(super) const HOT_TYPE: &str = "application/vnd.quire.lazy.hot.v1";
pub(super) const RECIPE_TYPE: &str = "application/vnd.quire.lazy.recipe.v1+zstd";

/// Version of the config.
pub(super) const VERSION: u32 = 1;
/// Maximum number of blobs after the heads and windows. Blobs of unknown types are ignored.
pub(super) const MORE_MAX: usize = 64;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawManifest {
    pub(super) schema_version: u32,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) media_type: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) artifact_type: String,
    pub(super) config: RawDescriptor,
    pub(super) layers: Vec<RawDescriptor>,
    pub(super) subject: RawDescriptor,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawDescriptor {
    pub(super) media_type: String,
    pub(super) digest: Digest,
    pub(super) size: u64,
}

/// The blobs of an artifact by type.
pub(super) struct RawParts<'a> {
    pub(super) image: &'a RawDescriptor,
    /// The head of each index, with its windows.
    pub(super) heads: Vec<[&'a RawDescriptor; 2]>,
    pub(super) traces: Option<&'a RawDescriptor>,
    pub(super) hot: Option<&'a RawDescriptor>,
    pub(super) recipes: Vec<&'a RawDescriptor>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawConfig {
    pub(super) version: u32,
    pub(super) image: String,
    pub(super) image_bytes: u64,
    pub(super) layers: Vec<RawLayer>,
    /// Digest of the hot pack, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hot: Option<Digest>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawLayer {
    pub(super) digest: Digest,
    pub(super) size: u64,
    pub(super) diff_id: Digest,
    /// Id of the layer's device, if the image has files of the layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<String>,
    /// Digest of the device's head. Because of it, the config's digest also covers the heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) head: Option<Digest>,
    /// Digest of the layer's recipe, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) recipe: Option<Digest>,
}

/// Only the version of a config, so that it can be checked before the other fields.
#[derive(Deserialize)]
struct RawVersion {
    version: u32,
}

impl RawManifest {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ArtifactError> {
        let what = "manifest";
        check_size(what, bytes.len() as u64, MANIFEST_MAX)?;
        let raw: Self =
            serde_json::from_slice(bytes).map_err(|source| ArtifactError::Json { what, source })?;
        let is_manifest = raw.media_type.is_empty() || raw.media_type == ARTIFACT_MANIFEST;
        if raw.schema_version != 2 || !is_manifest {
            return Err(ArtifactError::Type(raw.media_type));
        }
        if raw.artifact_type != LAZY_ARTIFACT {
            return Err(ArtifactError::Type(raw.artifact_type));
        }
        expect_type(&raw.config, CONFIG_TYPE)?;
        Ok(raw)
    }

    /// Returns the image, the heads with their windows, and the optional blobs.
    pub(super) fn parts(&self) -> Result<RawParts<'_>, ArtifactError> {
        let count = ArtifactError::BlobCount(self.layers.len());
        let Some((image, rest)) = self.layers.split_first() else { return Err(count) };
        let is_pair = |it: &&RawDescriptor| [HEAD_TYPE, WINDOWS_TYPE].contains(&&*it.media_type);
        let (pairs, more) = rest.split_at(rest.iter().take_while(is_pair).count());
        let (pairs, []) = pairs.as_chunks::<2>() else { return Err(count) };
        expect_type(image, IMAGE_TYPE)?;
        let pairs = pairs.iter().map(|[head, windows]| {
            expect_type(head, HEAD_TYPE)?;
            expect_type(windows, WINDOWS_TYPE)?;
            Ok([head, windows])
        });
        let heads = pairs.collect::<Result<_, ArtifactError>>()?;
        if more.len() > MORE_MAX {
            return Err(count);
        }
        // A later version may add types of blobs.
        let known = [IMAGE_TYPE, HEAD_TYPE, WINDOWS_TYPE];
        if let Some(late) = more.iter().find(|it| known.contains(&&*it.media_type)) {
            expect_type(late, TRACES_TYPE)?;
        }
        let traces = more.iter().find(|it| it.media_type == TRACES_TYPE);
        let hot = more.iter().find(|it| it.media_type == HOT_TYPE);
        let recipes = more.iter().filter(|it| it.media_type == RECIPE_TYPE).collect();
        Ok(RawParts { image, heads, traces, hot, recipes })
    }
}

impl RawConfig {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ArtifactError> {
        let json = |source| ArtifactError::Json { what: "config", source };
        // The version is parsed first, because a later version may have other fields.
        let RawVersion { version } = serde_json::from_slice(bytes).map_err(json)?;
        if version != VERSION {
            return Err(ArtifactError::Version(version));
        }
        serde_json::from_slice(bytes).map_err(json)
    }
}

fn expect_type(blob: &RawDescriptor, expected: &'static str) -> Result<(), ArtifactError> {
    if blob.media_type == expected {
        return Ok(());
    }
    let actual = blob.media_type.clone();
    Err(ArtifactError::BlobType { blob: Box::new(blob.digest), actual, expected })
}

pub(super) const fn check_size(
    what: &'static str,
    size: u64,
    max: u64,
) -> Result<(), ArtifactError> {
    if size > max { Err(ArtifactError::TooLarge { what, size, max }) } else { Ok(()) }
}
