//! The JSON documents of an artifact: its manifest and its config.

use std::collections::BTreeMap;
use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::digest::Digest;
use oci::manifest::{MANIFEST_MAX, or_default};
use serde::{Deserialize, Serialize};

use super::{ARTIFACT_MANIFEST, ArtifactError, LAZY_ARTIFACT};

pub(super) const CONFIG_TYPE: &str = "application/vnd.quire.lazy.config.v1+json";
pub(super) const START_TYPE: &str = "application/vnd.quire.lazy.start.v2";
/// The first blob in version 1.
const IMAGE_TYPE: &str = "application/vnd.quire.lazy.image.v1.erofs+zstd";
pub(super) const WINDOWS_TYPE: &str = "application/vnd.quire.lazy.windows.v1";
/// Annotation of an artifact's manifest: the names of its traces, separated by commas. A registry's list of referrers
/// also includes it.
pub(in crate::lazy) const TRACES_ANNOTATION: &str = "vnd.quire.lazy.traces";
/// Annotation of an artifact's manifest: when its traces were recorded, as OCI's image-spec defines it (RFC 3339). Here it
/// is in UTC without fractions of a second.
pub(in crate::lazy) const CREATED_ANNOTATION: &str = "org.opencontainers.image.created";
pub(super) const RECIPE_TYPE: &str = "application/vnd.quire.lazy.recipe.v1+zstd";

/// Version of the config.
pub(super) const VERSION: u32 = 2;
/// Maximum number of blobs after the windows. Blobs of unknown types are ignored.
pub(super) const MORE_MAX: usize = 64;
/// Maximum length in bytes of a config that is embedded in the manifest, so that manifests stay small.
pub(super) const EMBEDDED_MAX: usize = 64 << 10;

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
    /// The content in base64. Source: OCI image-spec 1.1, "Content Descriptors", `data`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<String>,
}

/// The blobs of an artifact by type.
pub(super) struct RawParts<'a> {
    pub(super) start: &'a RawDescriptor,
    /// The windows of each device.
    pub(super) windows: &'a [RawDescriptor],
    pub(super) recipes: Vec<&'a RawDescriptor>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawConfig {
    pub(super) version: u32,
    pub(super) image: String,
    pub(super) image_bytes: u64,
    pub(super) layers: Vec<RawLayer>,
    pub(super) start: RawStart,
}

/// The blob with all parts that a start needs, and the lengths of these parts in bytes, in their order.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawStart {
    /// Digest of the blob. Because of it, the config's digest also covers all parts.
    pub(super) digest: Digest,
    /// The compressed image.
    pub(super) image: u64,
    /// The head of each device.
    pub(super) heads: Vec<u64>,
    /// The hot pack, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hot: Option<u64>,
    /// The traces, if there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) traces: Option<u64>,
}

/// The ranges of the parts in the start blob.
pub(super) struct StartPlaces {
    pub(super) image: Range<u64>,
    pub(super) heads: Vec<Range<u64>>,
    pub(super) hot: Option<Range<u64>>,
    pub(super) traces: Option<Range<u64>>,
    /// Length of the blob in bytes.
    pub(super) length: u64,
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

    /// Returns the blob for starts, the windows, and the optional blobs.
    pub(super) fn parts(&self) -> Result<RawParts<'_>, ArtifactError> {
        let count = ArtifactError::BlobCount(self.layers.len());
        let Some((start, rest)) = self.layers.split_first() else { return Err(count) };
        if start.media_type == IMAGE_TYPE {
            return Err(ArtifactError::Version(1));
        }
        expect_type(start, START_TYPE)?;
        let is_windows = |it: &&RawDescriptor| it.media_type == WINDOWS_TYPE;
        let (windows, more) = rest.split_at(rest.iter().take_while(is_windows).count());
        if more.len() > MORE_MAX {
            return Err(count);
        }
        // A later version may add types of blobs.
        if let Some(late) =
            more.iter().find(|it| [START_TYPE, WINDOWS_TYPE].contains(&&*it.media_type))
        {
            expect_type(late, RECIPE_TYPE)?;
        }
        let recipes = more.iter().filter(|it| it.media_type == RECIPE_TYPE).collect();
        Ok(RawParts { start, windows, recipes })
    }
}

impl RawDescriptor {
    pub(super) const fn new(media_type: String, digest: Digest, size: u64) -> Self {
        Self { media_type, digest, size, data: None }
    }

    /// Embeds the content.
    pub(super) fn with_data(self, bytes: &[u8]) -> Self {
        Self { data: Some(STANDARD.encode(bytes)), ..self }
    }

    /// Returns the embedded content. Returns `None` if there is none, or if it is not the content of this descriptor.
    pub(super) fn embedded(&self) -> Option<Vec<u8>> {
        let bytes = STANDARD.decode(self.data.as_ref()?).ok()?;
        (bytes.len() as u64 == self.size && self.digest.matches(&bytes)).then_some(bytes)
    }
}

impl RawStart {
    /// Returns the ranges of the parts. Returns `None` if a length overflows.
    pub(super) fn places(&self) -> Option<StartPlaces> {
        let mut length = 0_u64;
        let mut next = |bytes: u64| {
            let start = length;
            length = length.checked_add(bytes)?;
            Some(start..length)
        };
        let image = next(self.image)?;
        let heads = self.heads.iter().map(|it| next(*it)).collect::<Option<_>>()?;
        let hot = match self.hot {
            Some(bytes) => Some(next(bytes)?),
            None => None,
        };
        let traces = match self.traces {
            Some(bytes) => Some(next(bytes)?),
            None => None,
        };
        Some(StartPlaces { image, heads, hot, traces, length })
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
