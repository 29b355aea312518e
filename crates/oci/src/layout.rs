//! OCI layouts: directories with `index.json` and blobs by digest. Source: OCI image-spec 1.1, `image-layout.md`.
//!
//! A layout may be hostile, such as an unpacked archive, so no link in it leads to a file outside of it.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::blobs::{BlobSource, FailingReader};
use crate::manifest::{
    CONFIG_MAX, Config, Descriptor, Document, Index, MANIFEST_MAX, Manifest, ManifestError,
    Platform, check_size,
};
use crate::source::Choice;
use crate::{Digest, files};

/// Maximum depth of nested indexes above a manifest.
const DEPTH_MAX: usize = 4;

/// An error of reading an image from a layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The directory has no valid file `oci-layout`.
    #[error("{} is not an OCI layout", directory.display())]
    NotLayout {
        /// Directory of the layout.
        directory: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The layout has an unknown version.
    #[error("{} is an OCI layout of version {version}, not 1", directory.display())]
    Version {
        /// Directory of the layout.
        directory: PathBuf,
        /// Version in `oci-layout`.
        version: String,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A manifest, index or config is invalid.
    #[error("cannot use {}", path.display())]
    Manifest {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: ManifestError,
    },
    /// A blob does not have the digest in its name.
    #[error("{} has the digest {actual}", path.display())]
    Mismatch {
        /// Path of the blob.
        path: PathBuf,
        /// Digest of its content.
        actual: Digest,
    },
    /// A blob does not have the size in its descriptor.
    #[error("{} has {actual} bytes, not {expected}", path.display())]
    Size {
        /// Path of the blob.
        path: PathBuf,
        /// Size in the descriptor, in bytes.
        expected: u64,
        /// Size of the file, in bytes.
        actual: u64,
    },
    /// The index is empty.
    #[error("{} has no images: its index is empty", .0.display())]
    Empty(PathBuf),
    /// The layout has no image with that name.
    #[error("there is no image \"{}\" in {}, only {}", name.escape_debug(), directory.display(), list(there))]
    Absent {
        /// Directory of the layout.
        directory: PathBuf,
        /// Requested name.
        name: String,
        /// Names in the layout.
        there: Vec<String>,
    },
    /// The layout has several images, and none was chosen.
    #[error("{} has several images, name one of them: {}", directory.display(), list(there))]
    Several {
        /// Directory of the layout.
        directory: PathBuf,
        /// Names in the layout.
        there: Vec<String>,
    },
    /// The nesting of indexes is too deep.
    #[error("{} has more than {DEPTH_MAX} nested indexes", .0.display())]
    Depth(PathBuf),
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

/// An OCI layout on disk.
#[derive(Debug)]
pub struct Layout {
    directory: PathBuf,
    index_bytes: Vec<u8>,
    index: Index,
}

/// An image in a layout: its manifest and config, verified and parsed.
#[derive(Debug, Clone)]
pub struct LayoutImage {
    /// The manifest's digest and bytes.
    pub manifest: (Digest, Vec<u8>),
    /// The config's digest and bytes.
    pub config: (Digest, Vec<u8>),
    /// Indexes that led to the manifest, byte for byte, without `index.json`.
    pub indexes: Vec<Vec<u8>>,
    /// Parsed manifest.
    pub image: Manifest,
    /// Parsed config, with a diff id for each layer.
    pub settings: Config,
    /// Name of the image in the layout.
    pub name: Option<String>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Marker {
    image_layout_version: String,
}

impl Layout {
    /// Opens the layout in `directory`, and parses its index.
    ///
    /// # Errors
    /// [`LayoutError`] if the directory is not a layout, or its index is invalid.
    pub fn open(directory: &Path) -> Result<Self, LayoutError> {
        let directory = directory.to_owned();
        let marker = match read(&directory, Path::new("oci-layout"), "layout", MANIFEST_MAX) {
            Err(LayoutError::Read { source, .. }) => {
                return Err(LayoutError::NotLayout { directory, source });
            }
            other => other?,
        };
        let Marker { image_layout_version: version } =
            serde_json::from_slice(&marker).map_err(|error| LayoutError::NotLayout {
                directory: directory.clone(),
                source: error.into(),
            })?;
        if version.split('.').next() != Some("1") {
            return Err(LayoutError::Version { directory, version });
        }
        let index = Path::new("index.json");
        let path = directory.join(index);
        let bytes = read(&directory, index, "index", MANIFEST_MAX)?;
        match Index::parse(&bytes) {
            Ok(index) => Ok(Self { directory, index_bytes: bytes, index }),
            Err(source) => Err(LayoutError::Manifest { path, source }),
        }
    }

    /// Returns the bytes of `index.json` that were parsed, at most [`MANIFEST_MAX`].
    #[must_use]
    pub fn index_bytes(&self) -> &[u8] {
        &self.index_bytes
    }

    /// Returns the entries of `index.json`.
    #[must_use]
    pub fn entries(&self) -> &[Descriptor] {
        &self.index.manifests
    }

    /// Returns the path of a blob, whether or not it exists.
    #[must_use]
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.directory.join(place(digest))
    }

    /// Opens a blob, which must have this size in bytes. The caller must verify its digest.
    ///
    /// # Errors
    /// [`LayoutError::Read`] or [`LayoutError::Size`].
    pub fn open_blob(&self, digest: &Digest, size: u64) -> Result<File, LayoutError> {
        let path = self.blob_path(digest);
        let failed = |source| LayoutError::Read { path: path.clone(), source };
        let file = files::regular_in(&self.directory, &place(digest)).map_err(failed)?;
        let actual = file.metadata().map_err(failed)?.len();
        if actual != size {
            return Err(LayoutError::Size { path, expected: size, actual });
        }
        Ok(file)
    }

    /// Finds an image, and verifies its manifest and config. If the choice matches several manifests of one image, as
    /// for several processors, the platform decides.
    ///
    /// # Errors
    /// [`LayoutError`] if the image is missing, ambiguous or malformed.
    pub fn find_image(
        &self,
        choice: &Choice,
        platform: &Platform,
    ) -> Result<LayoutImage, LayoutError> {
        // Signatures are no images, but a caller who names their entry gets it.
        let is_image = |it: &&Descriptor| !it.is_attached();
        let entries: Vec<_> = self.index.manifests.iter().filter(is_image).collect();
        let all = &self.index.manifests;
        let (candidates, name): (Vec<_>, _) = match choice {
            Choice::Only => (entries.clone(), None),
            Choice::Named(name) => {
                let named = all.iter().filter(|entry| entry.is_named(name));
                (named.collect(), Some(name.clone()))
            }
            Choice::Digest(digest) => {
                let same = all.iter().filter(|entry| entry.digest == *digest);
                (same.collect(), Some(digest.to_string()))
            }
        };
        let there = || {
            let names = entries.iter().map(|entry| {
                entry.name().map_or_else(|| format!("@{}", entry.digest), str::to_owned)
            });
            let mut names: Vec<_> = names.collect();
            names.dedup();
            names
        };
        let directory = || self.directory.clone();
        let chosen = match candidates[..] {
            [] if entries.is_empty() => return Err(LayoutError::Empty(directory())),
            [] => {
                let name = name.unwrap_or_default();
                return Err(LayoutError::Absent { directory: directory(), name, there: there() });
            }
            [only] => only.clone(),
            // Several manifests with the same name, or all without a name, are one image for several platforms.
            [first, ..] if candidates.iter().all(|other| other.name() == first.name()) => {
                let index = Index { manifests: candidates.iter().copied().cloned().collect() };
                let path = self.directory.join("index.json");
                index
                    .choose(platform)
                    .map_err(|source| LayoutError::Manifest { path, source })?
                    .clone()
            }
            _ => return Err(LayoutError::Several { directory: directory(), there: there() }),
        };
        let name = chosen.name().map(str::to_owned);
        self.image(chosen, platform, name)
    }

    fn image(
        &self,
        mut at: Descriptor,
        platform: &Platform,
        name: Option<String>,
    ) -> Result<LayoutImage, LayoutError> {
        let mut indexes = Vec::new();
        for _ in 0..=DEPTH_MAX {
            let path = self.blob_path(&at.digest);
            let bytes = self.checked(&at, "manifest", MANIFEST_MAX)?;
            let wrong = |source| LayoutError::Manifest { path: path.clone(), source };
            match Document::parse(&bytes).map_err(wrong)? {
                Document::Index(index) => {
                    at = index.choose(platform).map_err(wrong)?.clone();
                    indexes.push(bytes);
                }
                Document::Image(image) => {
                    let config = self.checked(&image.config, "config", CONFIG_MAX)?;
                    let config_path = self.blob_path(&image.config.digest);
                    let settings = Config::parse(&config).and_then(|settings| {
                        settings.diff_ids_of(image.layers.len())?;
                        Ok(settings)
                    });
                    let settings = settings
                        .map_err(|source| LayoutError::Manifest { path: config_path, source })?;
                    return Ok(LayoutImage {
                        manifest: (at.digest, bytes),
                        config: (image.config.digest, config),
                        indexes,
                        image,
                        settings,
                        name,
                    });
                }
            }
        }
        Err(LayoutError::Depth(self.directory.clone()))
    }

    /// Reads the manifest or index of an entry, and verifies its size and digest.
    ///
    /// # Errors
    /// [`LayoutError`] if it is missing, damaged or too long.
    pub fn document(&self, entry: &Descriptor) -> Result<Vec<u8>, LayoutError> {
        self.checked(entry, "manifest", MANIFEST_MAX)
    }

    /// Reads a blob of at most `max` bytes. The caller must verify its digest.
    ///
    /// # Errors
    /// [`LayoutError`] if it is missing or longer.
    pub fn small_blob(&self, digest: &Digest, max: u64) -> Result<Vec<u8>, LayoutError> {
        read(&self.directory, &place(digest), "blob", max)
    }

    /// Reads a small blob, and verifies its size and digest.
    fn checked(
        &self,
        descriptor: &Descriptor,
        kind: &'static str,
        max: u64,
    ) -> Result<Vec<u8>, LayoutError> {
        let path = self.blob_path(&descriptor.digest);
        let bytes = read(&self.directory, &place(&descriptor.digest), kind, max)?;
        let actual = bytes.len() as u64;
        if actual != descriptor.size {
            return Err(LayoutError::Size { path, expected: descriptor.size, actual });
        }
        let mut hasher = descriptor.digest.hasher();
        hasher.update(&bytes);
        let actual = hasher.finish();
        if actual != descriptor.digest {
            return Err(LayoutError::Mismatch { path, actual });
        }
        Ok(bytes)
    }
}

impl BlobSource for Layout {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let open = || {
            let mut file = self.open_blob(digest, size).map_err(io::Error::other)?;
            file.seek(SeekFrom::Start(range.start))?;
            Ok(file.take(range.end.saturating_sub(range.start)))
        };
        match open() {
            Ok(part) => Box::new(part),
            Err(error) => Box::new(FailingReader::new(error)),
        }
    }
}

/// Returns the path of a blob in the layout.
fn place(digest: &Digest) -> PathBuf {
    let text = digest.to_string();
    let (algorithm, hex) = text.split_once(':').unwrap_or_default();
    Path::new("blobs").join(algorithm).join(hex)
}

/// Reads a whole file of a layout, of at most `max` bytes.
fn read(
    directory: &Path,
    place: &Path,
    kind: &'static str,
    max: u64,
) -> Result<Vec<u8>, LayoutError> {
    let path = directory.join(place);
    let failed = |source| LayoutError::Read { path: path.clone(), source };
    let file = files::regular_in(directory, place).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let wrong = |source| LayoutError::Manifest { path: path.clone(), source };
    check_size(kind, size, max).map_err(wrong)?;
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes).map_err(failed)?;
    // The file may have grown since the first check.
    check_size(kind, bytes.len() as u64, max).map_err(wrong)?;
    Ok(bytes)
}
