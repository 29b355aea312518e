//! OCI and Docker manifests, indexes and configs, as far as Quire acts on them.
//!
//! Manifests are stored and pushed byte for byte as they came; these types only parse them. Unknown fields do no harm.
//! Source: OCI image-spec 1.1, `manifest.md`, `image-index.md`, `config.md`; Docker's "Image Manifest Version 2, Schema
//! 2".

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::{Digest, DigestError};

/// The most bytes in a manifest or index. Source: OCI distribution-spec 1.1, "Pushing Manifests": registries should
/// take up to 4 MiB, and most take no more.
pub const MANIFEST_MAX: u64 = 4 << 20;
/// The most bytes in a config. Real ones have kilobytes; those of some build systems have megabytes of labels.
pub const CONFIG_MAX: u64 = 16 << 20;
/// The most layers in an image. Docker makes at most 127.
pub const LAYERS_MAX: usize = 512;
/// The most entries in an index.
pub const MANIFESTS_MAX: usize = 4096;

/// The annotation that names a manifest within a layout. Source: OCI image-spec, `annotations.md`.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// What containerd writes beside it, since it keeps only the tag there.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// Why bytes are not a manifest, index or config that Quire can use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// It is larger than any real one.
    #[error("a {kind} of {size} bytes: at most {max} are read")]
    TooLarge {
        /// `manifest`, `index` or `config`.
        kind: &'static str,
        /// Its size, in bytes.
        size: u64,
        /// The limit, in bytes.
        max: u64,
    },
    /// Not JSON, or JSON of another shape.
    #[error("the {kind} is malformed")]
    Json {
        /// `manifest`, `index` or `config`.
        kind: &'static str,
        /// Where and why.
        source: serde_json::Error,
    },
    /// It can be read as two kinds of document, and readers may differ (CVE-2021-41190).
    #[error("the {kind} has both \"{}\" and \"{}\"", fields[0], fields[1])]
    Ambiguous {
        /// `manifest` or `index`.
        kind: &'static str,
        /// A field of one kind that the other lacks, and the reverse.
        fields: [&'static str; 2],
    },
    /// Its media type is not that of its content.
    #[error("the {kind} calls itself \"{}\"", media_type.escape_debug())]
    MediaType {
        /// `manifest` or `index`.
        kind: &'static str,
        /// The media type.
        media_type: String,
    },
    /// It is one image where an index is needed.
    #[error("it is a manifest, but an index was expected")]
    NotIndex,
    /// A manifest of Docker's schema 1, or of an unknown newer schema.
    #[error("manifests of schema version {0} are not supported, only 2")]
    Schema(u64),
    /// Too many layers or manifests.
    #[error("{count} {what}: at most {max} are read")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// How many.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// It is not an image but something else: a chart, a signature, a list of packages.
    #[error("it is an artifact of type \"{}\", not an image", kind.escape_debug())]
    Artifact {
        /// Its `artifactType`, or else its config's media type.
        kind: String,
    },
    /// A layer is not a file system: an artifact, or encrypted.
    #[error("layer {number} is \"{}\", which is not a tar of files", media_type.escape_debug())]
    LayerType {
        /// Counted from 1.
        number: usize,
        /// Media type in the manifest.
        media_type: String,
    },
    /// Manifest and config differ in the number of layers.
    #[error(
        "the config has another number of diff ids ({diff_ids}) than the manifest has layers ({layers})"
    )]
    LayerCount {
        /// In the manifest.
        layers: usize,
        /// In the config.
        diff_ids: usize,
    },
    /// No manifest in the index is for the platform.
    #[error("there is no image for {wanted}, only for {}", there.join(", "))]
    Platform {
        /// The wanted platform.
        wanted: Platform,
        /// Platforms in the index.
        there: Vec<String>,
    },
}

/// A reference to content by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type. Docker leaves it empty at times.
    #[serde(default)]
    pub media_type: String,
    /// Digest of the content.
    #[serde(deserialize_with = "text")]
    pub digest: Digest,
    /// Size of the content, in bytes.
    pub size: u64,
    /// Annotations.
    #[serde(default, deserialize_with = "or_default")]
    pub annotations: BTreeMap<String, String>,
    /// Where else the content is, for a layer that may not be distributed.
    #[serde(default, deserialize_with = "or_default")]
    pub urls: Vec<String>,
    /// In an index: platform of the image.
    pub platform: Option<Platform>,
}

impl Descriptor {
    /// Whether a layout or an archive knows the content by this name.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        [REF_NAME, CONTAINERD_NAME].iter().any(|key| self.name_at(key) == Some(name))
    }

    /// The name that a layout or an archive gives the content.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name_at(REF_NAME).or_else(|| self.name_at(CONTAINERD_NAME))
    }

    fn name_at(&self, key: &str) -> Option<&str> {
        self.annotations.get(key).map(String::as_str)
    }

    /// Whether the layer may be absent from registries and archives. Source: OCI image-spec 1.1, `layer.md`,
    /// "Non-Distributable Layers"; Docker's "foreign" layers.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        !self.urls.is_empty()
            || [".nondistributable.", ".foreign."].iter().any(|it| self.media_type.contains(it))
    }

    /// The digest, for messages; for a foreign layer also the addresses at which the manifest says that it is.
    #[must_use]
    pub fn title(&self) -> String {
        if !self.is_foreign() {
            return self.digest.to_string();
        }
        let urls = self.urls.iter().take(3).map(|url| url.escape_debug().to_string());
        let urls = urls.collect::<Vec<_>>().join(", ");
        let place =
            if urls.is_empty() { "with no address".to_owned() } else { format!("of {urls}") };
        format!("{}, a foreign layer {place}", self.digest)
    }

    /// BuildKit puts statements about an image beside it in the index.
    fn is_attestation(&self) -> bool {
        self.annotations.contains_key("vnd.docker.reference.type")
    }
}

/// An operating system and a processor, named as Go names them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// `linux`, …
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v7`, `v8`, … or nothing.
    #[serde(default, deserialize_with = "or_default")]
    pub variant: String,
}

impl Platform {
    /// Linux on a processor that Rust calls `arch`, as in `std::env::consts::ARCH`.
    #[must_use]
    pub fn linux(arch: &str) -> Self {
        // Source: Go's `GOARCH` values beside the first parts of Rust's target triples.
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

    /// Linux on the processor that this program was built for.
    #[must_use]
    pub fn of_this_machine() -> &'static Self {
        static THIS: LazyLock<Platform> = LazyLock::new(|| Platform::linux(std::env::consts::ARCH));
        &THIS
    }

    /// How well an image for the platform `there` fits: the larger the better. `None` if it does not. An older variant
    /// of the processor fits, but not a newer one. Source: containerd's `platforms` package, `Only`, without its other
    /// architectures (386 for amd64, arm for arm64).
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

    /// Whether an image may be for this platform by what its config says. Many configs do not state a variant.
    #[must_use]
    pub fn may_be(&self, config: &Self) -> bool {
        let said = if config.variant.is_empty() { &self.variant } else { &config.variant };
        self.fit(&Self { variant: said.clone(), ..config.clone() }).is_some()
    }

    /// The same platform in Go's words, with the variant that stands for none. Source: containerd's `platforms`
    /// package, `database.go`.
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

    /// The variants that run on this platform, which is a normal one, with the best first.
    fn variants(&self) -> Vec<String> {
        let mut variants = vec![self.variant.clone()];
        let number = || self.variant.strip_prefix('v');
        let below = |from: u8, lowest: u8| (lowest..from).rev();
        match &*self.architecture {
            "amd64" => {
                // Level 1 is that of every processor, and has no name.
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
                    // What Armv9.n adds is in Armv8.(n + 5).
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
        // In Go's words, but with the variant that was given: it shows in messages.
        let variant = given.variant.clone();
        let normal = given.normal();
        let is_implied = matches!(&*given.architecture, "armhf" | "armel");
        Ok(if is_implied { normal } else { Self { variant, ..normal } })
    }
}

/// A manifest or an index.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one is read at a time, and taken apart at once")]
pub enum Document {
    /// One image.
    Image(Manifest),
    /// Several images to choose from.
    Index(Index),
}

/// One image: its config, and its layers from the lowest to the uppermost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The config: how to run the image, and the layers' diff ids.
    pub config: Descriptor,
    /// The layers: tars, compressed or not. At most [`LAYERS_MAX`].
    pub layers: Vec<Descriptor>,
}

/// Images to choose from. At most [`MANIFESTS_MAX`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// Images, and further indexes.
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

/// Source: OCI image-spec 1.1, `media-types.md`.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The media types that indexes have.
const INDEX_TYPES: [&str; 2] = [INDEX, "application/vnd.docker.distribution.manifest.list.v2+json"];
/// The media types that manifests have.
const MANIFEST_TYPES: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// The media types that configs of images have; the last is what old versions of Docker wrote, the first what others did.
/// An `artifactType` beside one of these does not make an image anything else. Source: OCI image-spec 1.1, `manifest.md`,
/// "Guidelines for Artifact Usage"; distribution's `manifest/schema2`.
const CONFIG_TYPES: [&str; 4] = [
    "",
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
    "application/octet-stream",
];

impl Document {
    /// Reads a manifest or an index.
    ///
    /// # Errors
    /// [`ManifestError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        Self::parse_as("manifest", bytes)
    }

    fn parse_as(kind: &'static str, bytes: &[u8]) -> Result<Self, ManifestError> {
        check_size(kind, bytes.len() as u64, MANIFEST_MAX)?;
        let json = |source| ManifestError::Json { kind, source };
        // Schema 1 has other fields, so the version is looked at first.
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
    /// Reads an index, as in a layout's `index.json`.
    ///
    /// # Errors
    /// [`ManifestError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        match Document::parse_as("index", bytes)? {
            Document::Index(index) => Ok(index),
            Document::Image(_) => Err(ManifestError::NotIndex),
        }
    }
}

/// Whether a layer of this type is a tar of files, however compressed. No type at all passes: the tar will tell.
fn is_layer_type(media_type: &str) -> bool {
    let tar = [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
    ];
    let suffixes = ["", "+gzip", "+zstd", ".gzip", ".zstd"];
    media_type.is_empty()
        || tar.iter().any(|tar| {
            media_type.strip_prefix(tar).is_some_and(|suffix| suffixes.contains(&suffix))
        })
}

impl Index {
    /// The images for a platform, with the best fit first, and those without a platform last.
    ///
    /// # Errors
    /// [`ManifestError::Platform`] if there is none.
    pub fn choose(&self, platform: &Platform) -> Result<&Descriptor, ManifestError> {
        let fit = |entry: &&Descriptor| match &entry.platform {
            None => Some(0),
            Some(there) => platform.fit(there),
        };
        let images = self.manifests.iter().filter(|entry| !entry.is_attestation());
        // Of equals the first, as the specification has it.
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
    /// The processor it is for, as Go names it.
    #[serde(default, deserialize_with = "or_default")]
    pub architecture: String,
    /// `linux`, …
    #[serde(default, deserialize_with = "or_default")]
    pub os: String,
    /// `v7`, `v8`, … or nothing.
    #[serde(default, deserialize_with = "or_default")]
    pub variant: String,
    /// How to run the image.
    #[serde(default, deserialize_with = "or_default")]
    pub config: Execution,
    rootfs: RootFs,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct RootFs {
    #[serde(default, deserialize_with = "texts")]
    diff_ids: Vec<Digest>,
}

/// How a container of the image runs unless told otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Execution {
    /// `USER`, `USER:GROUP`, by name or number; empty for root.
    #[serde(deserialize_with = "or_default")]
    pub user: String,
    /// Environment variables, as `NAME=VALUE`.
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    /// Command, with its first arguments.
    #[serde(deserialize_with = "or_default")]
    pub entrypoint: Vec<String>,
    /// Further arguments, or the command if `entrypoint` is empty.
    #[serde(deserialize_with = "or_default")]
    pub cmd: Vec<String>,
    /// Working directory; empty for `/`.
    #[serde(deserialize_with = "or_default")]
    pub working_dir: String,
    /// Labels.
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    /// Signal that asks it to end; empty for SIGTERM.
    #[serde(deserialize_with = "or_default")]
    pub stop_signal: String,
}

impl Config {
    /// Reads a config.
    ///
    /// # Errors
    /// [`ManifestError::TooLarge`], [`ManifestError::Json`] or [`ManifestError::TooMany`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let kind = "config";
        check_size(kind, bytes.len() as u64, CONFIG_MAX)?;
        let config: Self =
            serde_json::from_slice(bytes).map_err(|source| ManifestError::Json { kind, source })?;
        check_count("diff ids", config.rootfs.diff_ids.len(), LAYERS_MAX)?;
        Ok(config)
    }

    /// The platform in the config, if there is one.
    #[must_use]
    pub fn platform(&self) -> Option<Platform> {
        let Self { os, architecture, variant, .. } = self;
        let [os, architecture, variant] = [os, architecture, variant].map(Clone::clone);
        let is_said = !os.is_empty() && !architecture.is_empty();
        is_said.then_some(Platform { os, architecture, variant })
    }

    /// The digests of the uncompressed layers, from the lowest to the uppermost.
    #[must_use]
    pub fn diff_ids(&self) -> &[Digest] {
        &self.rootfs.diff_ids
    }

    /// The diff ids, if there is one for each layer.
    ///
    /// # Errors
    /// [`ManifestError::LayerCount`].
    pub fn diff_ids_of(&self, layers: usize) -> Result<&[Digest], ManifestError> {
        let diff_ids = self.diff_ids();
        if diff_ids.len() == layers {
            return Ok(diff_ids);
        }
        Err(ManifestError::LayerCount { layers, diff_ids: diff_ids.len() })
    }
}

/// Refuses a document of more than `max` bytes.
///
/// # Errors
/// [`ManifestError`].
pub fn check_size(kind: &'static str, size: u64, max: u64) -> Result<(), ManifestError> {
    if size > max { Err(ManifestError::TooLarge { kind, size, max }) } else { Ok(()) }
}

/// Refuses more than `max` entries of a list.
///
/// # Errors
/// [`ManifestError`].
pub fn check_count(what: &'static str, count: usize, max: usize) -> Result<(), ManifestError> {
    if count > max { Err(ManifestError::TooMany { what, count, max }) } else { Ok(()) }
}

/// Reads a value, or the default for `null`, which Docker writes where it has nothing.
///
/// # Errors
/// If it is neither.
pub fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|error: DigestError| serde::de::Error::custom(error))
}

fn texts<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Digest>, D::Error> {
    let texts = Option::<Vec<String>>::deserialize(deserializer)?.unwrap_or_default();
    let digests = texts.iter().map(|text| text.parse());
    digests.collect::<Result<_, DigestError>>().map_err(serde::de::Error::custom)
}

/// Parses `bytes` as every kind of document, for fuzzers.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    let platform = Platform::linux("x86_64");
    match Document::parse(bytes) {
        Ok(Document::Index(index)) => drop(index.choose(&platform)),
        Ok(Document::Image(image)) => {
            assert!(image.layers.len() <= LAYERS_MAX, "more layers than are read");
        }
        Err(error) => assert!(!error.to_string().is_empty(), "an error without words"),
    }
    if let Ok(config) = Config::parse(bytes) {
        drop(config.diff_ids_of(1));
    }
}

#[cfg(test)]
mod tests;
