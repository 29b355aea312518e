//! OCI and Docker manifests, indexes and configs, with the fields that Quire uses.
//!
//! Manifests are stored and pushed byte for byte as they were received; these types only parse them. Unknown fields
//! are ignored. Source: OCI image-spec 1.1, `manifest.md`, `image-index.md`, `config.md`; Docker's "Image Manifest
//! Version 2, Schema 2".

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use serde::Deserialize;

pub use self::execution::Execution;
pub use self::json::or_default;
use self::json::{object, object_or_default, parse_object, text, texts};
use crate::Digest;

mod execution;
mod json;

/// Maximum size of a manifest or index, in bytes. Source: OCI distribution-spec 1.1, "Pushing Manifests": registries
/// should accept up to 4 MiB, and most accept no more.
pub const MANIFEST_MAX: u64 = 4 << 20;
/// Maximum size of a config, in bytes. Most have some kilobytes; those of some build systems have megabytes of labels.
pub const CONFIG_MAX: u64 = 16 << 20;
/// Maximum number of layers in an image. Docker makes at most 127.
pub const LAYERS_MAX: usize = 512;
/// Maximum number of entries in an index.
pub const MANIFESTS_MAX: usize = 4096;

/// Annotation of a layout's entry that states what the entry is. Source: cosign, `pkg/oci/layout/index.go`.
pub const KIND: &str = "kind";
/// The kind of an image with signatures; `imageIndex` is that of an index.
pub const KIND_IMAGE: &str = "dev.cosignproject.cosign/image";
/// The kind of the signatures of a manifest or index.
pub const KIND_SIGNATURES: &str = "dev.cosignproject.cosign/sigs";
/// The kind of the signatures of an image id, which only Quire reads.
pub const KIND_IMAGE_SIGNATURES: &str = "quire/image-signatures";
/// The beginnings of the kinds of what belongs to an image.
const ATTACHED: [&str; 2] = ["dev.cosignproject.cosign/", "quire/"];

/// The annotation that names a manifest within a layout. Source: OCI image-spec, `annotations.md`.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The annotation that containerd adds with the full name, because its ref name is only the tag.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// An error of parsing a manifest, index or config.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The document is larger than any real one.
    #[error("the {kind} has {size} bytes, more than {max}")]
    TooLarge {
        /// `manifest`, `index` or `config`.
        kind: &'static str,
        /// Size in bytes.
        size: u64,
        /// Limit in bytes.
        max: u64,
    },
    /// The document is not JSON, or its JSON has another structure.
    #[error("the {kind} is malformed")]
    Json {
        /// `manifest`, `index` or `config`.
        kind: &'static str,
        /// Cause, with the position.
        source: serde_json::Error,
    },
    /// The document can be parsed as two kinds, so readers may differ (CVE-2021-41190).
    #[error("the {kind} has both \"{}\" and \"{}\"", fields[0], fields[1])]
    Ambiguous {
        /// `manifest` or `index`.
        kind: &'static str,
        /// One field that only manifests have, and one that only indexes have.
        fields: [&'static str; 2],
    },
    /// The document's media type contradicts its content.
    #[error("the {kind} states the media type \"{}\"", media_type.escape_debug())]
    MediaType {
        /// `manifest` or `index`.
        kind: &'static str,
        /// Media type in the document.
        media_type: String,
    },
    /// The document is the manifest of one image, but an index was expected.
    #[error("it is a manifest, but an index was expected")]
    NotIndex,
    /// A manifest of Docker's schema 1, or of an unknown newer schema.
    #[error("manifests of schema version {0} are not supported, only 2")]
    Schema(u64),
    /// The document has too many layers or manifests.
    #[error("there are {count} {what}, more than {max}")]
    TooMany {
        /// Kind of entries, for the message.
        what: &'static str,
        /// Number of entries.
        count: usize,
        /// Limit.
        max: usize,
    },
    /// The manifest describes an artifact such as a chart, a signature or a list of packages.
    #[error("it is an artifact of type \"{}\", not an image", kind.escape_debug())]
    Artifact {
        /// Its `artifactType`, or else its config's media type.
        kind: String,
    },
    /// A layer is not a tar, as in an artifact, or is encrypted.
    #[error("layer {number} is \"{}\", which is neither a tar of files nor an EROFS image", media_type.escape_debug())]
    LayerType {
        /// Number of the layer, from 1.
        number: usize,
        /// Media type in the manifest.
        media_type: String,
    },
    /// Manifest and config differ in the number of layers.
    #[error("the config has {diff_ids} diff ids, but the manifest has {layers} layers")]
    LayerCount {
        /// Number of layers in the manifest.
        layers: usize,
        /// Number of diff ids in the config.
        diff_ids: usize,
    },
    /// A setting that a program gets as a string of C has a NUL byte, where the program would see the string's end.
    #[error("the config's {setting} contains a NUL byte")]
    Nul {
        /// The setting, without its value, which may be a secret.
        setting: String,
    },
    /// The index has no manifest for the platform.
    #[error("there is no image for {wanted}, only for {}", there.join(", "))]
    Platform {
        /// Wanted platform.
        wanted: Platform,
        /// Platforms in the index.
        there: Vec<String>,
    },
}

/// A reference to content by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type, which Docker sometimes leaves empty.
    #[serde(default)]
    pub media_type: String,
    /// Digest of the content.
    #[serde(deserialize_with = "text")]
    pub digest: Digest,
    /// Size of the content, in bytes.
    pub size: u64,
    /// Annotations by their keys.
    #[serde(default, deserialize_with = "or_default")]
    pub annotations: BTreeMap<String, String>,
    /// Other addresses of the content, for a layer that may not be distributed.
    #[serde(default, deserialize_with = "or_default")]
    pub urls: Vec<String>,
    /// Platform of the image, in an index.
    pub platform: Option<Platform>,
}

impl Descriptor {
    /// Whether the content has this name in a layout or an archive.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        [REF_NAME, CONTAINERD_NAME].iter().any(|key| self.name_at(key) == Some(name))
    }

    /// Returns the name of the content in a layout or an archive.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name_at(REF_NAME).or_else(|| self.name_at(CONTAINERD_NAME))
    }

    fn name_at(&self, key: &str) -> Option<&str> {
        self.annotations.get(key).map(String::as_str)
    }

    /// Whether the content belongs to an image, such as its signatures, so that it is no image itself. Layouts list
    /// both.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        if let Some(kind) = self.name_at(KIND) {
            return ATTACHED.iter().any(|it| kind.starts_with(it)) && !kind.starts_with(KIND_IMAGE);
        }
        let ends = [".sig", ".att", ".sbom"];
        let Some(stem) =
            self.name().and_then(|name| ends.iter().find_map(|it| name.strip_suffix(it)))
        else {
            return false;
        };
        let digest = stem.strip_prefix("sha256-").or_else(|| stem.strip_prefix("quire-"));
        digest.is_some_and(|it| it.len() >= 64 && it.bytes().all(|byte| byte.is_ascii_hexdigit()))
    }

    /// Whether registries and archives may lack the layer. Source: OCI image-spec 1.1, `layer.md`, "Non-Distributable
    /// Layers"; Docker's "foreign" layers.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        !self.urls.is_empty()
            || [".nondistributable.", ".foreign."].iter().any(|it| self.media_type.contains(it))
    }

    /// Returns the digest for messages, and for a foreign layer its addresses in the manifest.
    #[must_use]
    pub fn title(&self) -> String {
        if !self.is_foreign() {
            return self.digest.to_string();
        }
        let urls = self.urls.iter().take(3).map(|url| url.escape_debug().to_string());
        let urls = urls.collect::<Vec<_>>().join(", ");
        let place =
            if urls.is_empty() { "without an address".to_owned() } else { format!("of {urls}") };
        format!("{}, a foreign layer {place}", self.digest)
    }

    /// Whether the entry is an attestation, which BuildKit adds to an image in the index.
    fn is_attestation(&self) -> bool {
        self.annotations.contains_key("vnd.docker.reference.type")
    }
}

/// An operating system and a processor, in Go's names.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// Operating system: `linux`, …
    pub os: String,
    /// Processor architecture: `amd64`, `arm64`, …
    pub architecture: String,
    /// Variant of the architecture: `v7`, `v8`, … or empty.
    #[serde(default, deserialize_with = "or_default")]
    pub variant: String,
}

impl Platform {
    /// Returns the platform of Linux on a processor with Rust's name `arch`, as in `std::env::consts::ARCH`.
    #[must_use]
    pub fn linux(arch: &str) -> Self {
        // Source: Go's `GOARCH` values, and the first parts of Rust's target triples.
        let architecture = match arch {
            "x86_64" => "amd64",
            "x86" => "386",
            "aarch64" => "arm64",
            "loongarch64" => "loong64",
            "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
            "powerpc64" => "ppc64",
            other => other,
        };
        Self {
            os: "linux".to_owned(),
            architecture: architecture.to_owned(),
            variant: String::new(),
        }
    }

    /// Returns the platform of Linux on the processor for which this program was built.
    #[must_use]
    pub fn of_this_machine() -> &'static Self {
        static THIS: LazyLock<Platform> = LazyLock::new(|| Platform::linux(std::env::consts::ARCH));
        &THIS
    }

    /// Returns how well an image for the platform `there` fits; larger is better, `None` is unusable. An image for an
    /// older variant of the processor fits, but not an image for a newer variant. Source: containerd's `platforms`
    /// package, `Only`. Unlike there, images for other architectures (386 on amd64, arm on arm64) do not fit.
    #[must_use]
    pub fn fit(&self, there: &Self) -> Option<u8> {
        let (wanted, there) = (self.normal(), there.normal());
        if wanted.os != there.os || wanted.architecture != there.architecture {
            return None;
        }
        let variants = wanted.variants();
        let place = variants.iter().position(|variant| *variant == there.variant)?;
        u8::try_from(place).ok().and_then(|place| u8::MAX.checked_sub(place))
    }

    /// Whether an image with this config may be for this platform. A missing variant matches, because many configs
    /// have none.
    #[must_use]
    pub fn may_be(&self, config: &Self) -> bool {
        let said = if config.variant.is_empty() { &self.variant } else { &config.variant };
        self.fit(&Self { variant: said.clone(), ..config.clone() }).is_some()
    }

    /// Returns the same platform in Go's names, with the default variant in one spelling. Source: containerd's
    /// `platforms` package, `database.go`.
    fn normal(&self) -> Self {
        let Self { os, architecture, variant } = self;
        let [os, architecture, variant] =
            [os, architecture, variant].map(|text| text.to_ascii_lowercase());
        let os = if os == "macos" { "darwin".to_owned() } else { os };
        let (architecture, variant) = match (&*architecture, &*variant) {
            ("i386", _) => ("386", ""),
            ("x86_64" | "x86-64" | "amd64", "v1") => ("amd64", ""),
            ("x86_64" | "x86-64" | "amd64", variant) => ("amd64", variant),
            ("aarch64" | "arm64", "8" | "v8" | "v8.0") => ("arm64", ""),
            ("aarch64" | "arm64", "9" | "v9.0") => ("arm64", "v9"),
            ("aarch64" | "arm64", variant) => ("arm64", variant),
            ("armhf", _) | ("arm", "" | "7") => ("arm", "v7"),
            ("armel", _) | ("arm", "6") => ("arm", "v6"),
            ("arm", "5") => ("arm", "v5"),
            ("arm", "8") => ("arm", "v8"),
            (architecture, variant) => (architecture, variant),
        };
        let [architecture, variant] = [architecture, variant].map(str::to_owned);
        Self { os, architecture, variant }
    }

    /// Returns the variants that run on this platform, best first. The platform must be normalised.
    fn variants(&self) -> Vec<String> {
        let mut variants = vec![self.variant.clone()];
        let number = || self.variant.strip_prefix('v');
        let below = |from: u8, lowest: u8| (lowest..from).rev();
        match &*self.architecture {
            "amd64" => {
                // Every processor has level 1, which has no name.
                if let Some(level @ 2..=9) = number().and_then(|it| it.parse().ok()) {
                    variants.extend(below(level, 2).map(|level| format!("v{level}")));
                    variants.push(String::new());
                }
            }
            "arm" => {
                if let Some(version @ 6..=9) = number().and_then(|it| it.parse().ok()) {
                    variants.extend(below(version, 5).map(|version| format!("v{version}")));
                }
            }
            "arm64" => {
                let (major, minor) =
                    number().map_or(("8", "0"), |it| it.split_once('.').unwrap_or((it, "0")));
                let name = |major: u8, minor: u8| match (major, minor) {
                    (8, 0) => String::new(),
                    (major, 0) => format!("v{major}"),
                    (major, minor) => format!("v{major}.{minor}"),
                };
                match (major, minor.parse::<u8>()) {
                    ("8", Ok(minor @ 0..=9)) => {
                        variants.extend(below(minor, 0).map(|minor| name(8, minor)));
                    }
                    // Armv9.n includes Armv8.(n + 5).
                    ("9", Ok(minor @ 0..=4)) => {
                        variants.extend(below(minor, 0).map(|minor| name(9, minor)));
                        variants.extend(below(minor + 6, 0).map(|minor| name(8, minor)));
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        variants
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        if self.variant.is_empty() { Ok(()) } else { write!(f, "/{}", self.variant) }
    }
}

/// Text that is not a platform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{}\" is not a platform: write OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT", .0.escape_debug())]
pub struct PlatformError(String);

impl FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = text.split('/').collect();
        let (os, architecture, variant) = match parts[..] {
            [os, architecture] => (os, architecture, ""),
            [os, architecture, variant] if !variant.is_empty() => (os, architecture, variant),
            _ => return Err(PlatformError(text.to_owned())),
        };
        if os.is_empty() || architecture.is_empty() {
            return Err(PlatformError(text.to_owned()));
        }
        let [os, architecture, variant] = [os, architecture, variant].map(str::to_owned);
        let given = Self { os, architecture, variant };
        // The names are Go's, but the variant is kept as given, because messages show it.
        let variant = given.variant.clone();
        let normal = given.normal();
        let is_implied = matches!(&*given.architecture, "armhf" | "armel");
        Ok(if is_implied { normal } else { Self { variant, ..normal } })
    }
}

/// A manifest or an index.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "a reader holds one at a time, and takes it apart at once"
)]
pub enum Document {
    /// The manifest of one image.
    Image(Manifest),
    /// An index of several images.
    Index(Index),
}

/// The manifest of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Config: how to run the image, and the diff ids of its layers.
    pub config: Descriptor,
    /// Layers, lowest first: tars, compressed or not. At most [`LAYERS_MAX`].
    pub layers: Vec<Descriptor>,
}

/// An index of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// Manifests of images, and further indexes. At most [`MANIFESTS_MAX`].
    pub manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    #[serde(default, deserialize_with = "or_default")]
    media_type: String,
    #[serde(default, deserialize_with = "or_default")]
    artifact_type: String,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

/// Media type of OCI indexes. Source: OCI image-spec 1.1, `media-types.md`.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Media types of indexes.
const INDEX_TYPES: [&str; 2] = [INDEX, "application/vnd.docker.distribution.manifest.list.v2+json"];
/// Media types of manifests.
const MANIFEST_TYPES: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// Media types of image configs. Old versions of Docker wrote the last of these types, and other old programs the
/// empty one. With one of these, the document is an image even if it has an `artifactType`. Source: OCI image-spec
/// 1.1, `manifest.md`, "Guidelines for Artifact Usage"; distribution's `manifest/schema2`.
const CONFIG_TYPES: [&str; 4] = [
    "",
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
    "application/octet-stream",
];

/// Returns the media type of a manifest or index, with which a registry sends it.
#[must_use]
pub fn media_type(bytes: &[u8]) -> String {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Kind {
        #[serde(default, deserialize_with = "or_default")]
        media_type: String,
        #[serde(default)]
        manifests: Option<serde::de::IgnoredAny>,
    }
    let kind: Kind = serde_json::from_slice(bytes).unwrap_or_default();
    match kind {
        Kind { media_type, .. } if !media_type.is_empty() => media_type,
        Kind { manifests: Some(_), .. } => INDEX.to_owned(),
        Kind { manifests: None, .. } => MANIFEST_TYPES[0].to_owned(),
    }
}

impl Document {
    /// Parses a manifest or an index.
    ///
    /// # Errors
    /// [`ManifestError`] if the document is invalid or not an image.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        Self::parse_as("manifest", bytes)
    }

    fn parse_as(kind: &'static str, bytes: &[u8]) -> Result<Self, ManifestError> {
        check_size(kind, bytes.len() as u64, MANIFEST_MAX)?;
        let json = |source| ManifestError::Json { kind, source };
        // The version is parsed first, because schema 1 has other fields.
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Version {
            schema_version: u64,
        }
        let Version { schema_version } = serde_json::from_slice(bytes).map_err(json)?;
        if schema_version != 2 {
            return Err(ManifestError::Schema(schema_version));
        }
        let RawDocument { media_type, artifact_type, config, layers, manifests } =
            serde_json::from_slice(bytes).map_err(json)?;
        let claims = |types: [&str; 2]| media_type.is_empty() || types.contains(&&*media_type);
        let ambiguous =
            |other| Err(ManifestError::Ambiguous { kind, fields: ["manifests", other] });
        match (manifests, layers, config) {
            (Some(_), Some(_), _) => ambiguous("layers"),
            (Some(_), _, Some(_)) => ambiguous("config"),
            (Some(manifests), None, None) => {
                if !claims(INDEX_TYPES) {
                    return Err(ManifestError::MediaType { kind, media_type });
                }
                check_count("manifests in one index", manifests.len(), MANIFESTS_MAX)?;
                Ok(Self::Index(Index { manifests }))
            }
            (None, layers, config) => {
                if !claims(MANIFEST_TYPES) {
                    return Err(ManifestError::MediaType { kind, media_type });
                }
                let missing = |field: &str| {
                    let message = format!("it has neither \"manifests\" nor \"{field}\"");
                    json(serde::de::Error::custom(message))
                };
                let layers = layers.ok_or_else(|| missing("layers"))?;
                let config = config.ok_or_else(|| missing("config"))?;
                check_count("layers", layers.len(), LAYERS_MAX)?;
                if !CONFIG_TYPES.contains(&&*config.media_type) {
                    let named = !artifact_type.is_empty();
                    let kind = if named { artifact_type } else { config.media_type };
                    return Err(ManifestError::Artifact { kind });
                }
                for (number, layer) in (1..).zip(&layers) {
                    if !is_layer_type(&layer.media_type) {
                        let media_type = layer.media_type.clone();
                        return Err(ManifestError::LayerType { number, media_type });
                    }
                }
                Ok(Self::Image(Manifest { config, layers }))
            }
        }
    }
}

impl Index {
    /// Parses an index, such as a layout's `index.json`.
    ///
    /// # Errors
    /// [`ManifestError`] if the document is invalid or not an index.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        match Document::parse_as("index", bytes)? {
            Document::Index(index) => Ok(index),
            Document::Image(_) => Err(ManifestError::NotIndex),
        }
    }
}

/// Media type of a layer that is an EROFS image; with the suffix `+zstd` it is compressed as a whole. Source: containerd
/// `core/images/mediatypes.go`, `MediaTypeErofsLayer`, and `plugins/diff/erofs/differ.go`.
pub const EROFS_LAYER: &str = "application/vnd.erofs.layer.v1";

/// Whether a layer of this type is an EROFS image.
#[must_use]
pub fn is_erofs_layer(media_type: &str) -> bool {
    media_type.strip_prefix(EROFS_LAYER).is_some_and(|suffix| ["", "+zstd"].contains(&suffix))
}

/// Whether a layer of this type is a tar or an EROFS image, compressed or not. A missing type passes, because the tar
/// is checked later.
fn is_layer_type(media_type: &str) -> bool {
    let tar = [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
    ];
    let suffixes = ["", "+gzip", "+zstd", ".gzip", ".zstd"];
    media_type.is_empty()
        || is_erofs_layer(media_type)
        || tar.iter().any(|tar| {
            media_type.strip_prefix(tar).is_some_and(|suffix| suffixes.contains(&suffix))
        })
}

impl Index {
    /// Returns the image that fits a platform best. An entry without a platform fits any, but least.
    ///
    /// # Errors
    /// [`ManifestError::Platform`] if no image fits.
    pub fn choose(&self, platform: &Platform) -> Result<&Descriptor, ManifestError> {
        let fit = |entry: &&Descriptor| match &entry.platform {
            None => Some(0),
            Some(there) => platform.fit(there),
        };
        let images = self.manifests.iter().filter(|entry| !entry.is_attestation());
        // If several entries fit equally well, the first one is used, as the specification requires.
        let best = images.clone().rev().max_by_key(fit).filter(|entry| fit(entry).is_some());
        best.ok_or_else(|| {
            let there = images.filter_map(|entry| entry.platform.as_ref());
            let mut there: Vec<_> = there.map(ToString::to_string).collect();
            there.dedup();
            if there.is_empty() {
                there.push("nothing".to_owned());
            }
            ManifestError::Platform { wanted: platform.clone(), there }
        })
    }
}

/// The config of an image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Config {
    /// Processor architecture, in Go's names.
    #[serde(default, deserialize_with = "or_default")]
    pub architecture: String,
    /// Operating system: `linux`, …
    #[serde(default, deserialize_with = "or_default")]
    pub os: String,
    /// Variant of the architecture: `v7`, `v8`, … or empty.
    #[serde(default, deserialize_with = "or_default")]
    pub variant: String,
    /// How to run the image.
    #[serde(default, deserialize_with = "object_or_default")]
    pub config: Execution,
    #[serde(deserialize_with = "object")]
    rootfs: RootFs,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct RootFs {
    #[serde(default, deserialize_with = "texts")]
    diff_ids: Vec<Digest>,
}

impl Config {
    /// Parses a config.
    ///
    /// # Errors
    /// [`ManifestError::TooLarge`], [`ManifestError::Json`], [`ManifestError::TooMany`] or [`ManifestError::Nul`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        check_size("config", bytes.len() as u64, CONFIG_MAX)?;
        let malformed = |source| ManifestError::Json { kind: "config", source };
        let config: Self = parse_object(bytes).map_err(malformed)?;
        check_count("diff ids", config.rootfs.diff_ids.len(), LAYERS_MAX)?;
        match config.config.setting_with_nul() {
            Some(setting) => Err(ManifestError::Nul { setting }),
            None => Ok(config),
        }
    }

    /// Returns the platform in the config, if it has one.
    #[must_use]
    pub fn platform(&self) -> Option<Platform> {
        let Self { os, architecture, variant, .. } = self;
        let [os, architecture, variant] = [os, architecture, variant].map(Clone::clone);
        let is_said = !os.is_empty() && !architecture.is_empty();
        is_said.then_some(Platform { os, architecture, variant })
    }

    /// Returns the digests of the uncompressed layers, lowest first.
    #[must_use]
    pub fn diff_ids(&self) -> &[Digest] {
        &self.rootfs.diff_ids
    }

    /// Returns the diff ids, which must be as many as the layers.
    ///
    /// # Errors
    /// [`ManifestError::LayerCount`] if they are not.
    pub fn diff_ids_of(&self, layers: usize) -> Result<&[Digest], ManifestError> {
        let diff_ids = self.diff_ids();
        if diff_ids.len() == layers {
            return Ok(diff_ids);
        }
        Err(ManifestError::LayerCount { layers, diff_ids: diff_ids.len() })
    }
}

/// Checks that a document has at most `max` bytes.
///
/// # Errors
/// [`ManifestError::TooLarge`] if it has more.
pub fn check_size(kind: &'static str, size: u64, max: u64) -> Result<(), ManifestError> {
    if size > max { Err(ManifestError::TooLarge { kind, size, max }) } else { Ok(()) }
}

/// Checks that a list has at most `max` entries.
///
/// # Errors
/// [`ManifestError::TooMany`] if it has more.
pub fn check_count(what: &'static str, count: usize, max: usize) -> Result<(), ManifestError> {
    if count > max { Err(ManifestError::TooMany { what, count, max }) } else { Ok(()) }
}

/// Parses `bytes` as every kind of document, for fuzzers.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    let platform = Platform::linux("x86_64");
    match Document::parse(bytes) {
        Ok(Document::Index(index)) => drop(index.choose(&platform)),
        Ok(Document::Image(image)) => {
            assert!(image.layers.len() <= LAYERS_MAX, "more layers than the limit");
        }
        Err(error) => assert!(!error.to_string().is_empty(), "an error without a message"),
    }
    if let Ok(config) = Config::parse(bytes) {
        drop(config.diff_ids_of(1));
    }
}

#[cfg(test)]
mod tests;
