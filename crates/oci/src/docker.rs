//! Archives of `docker save` and `podman save`: a tar with `manifest.json`, configs, and layers, which are tars as
//! well.
//!
//! All versions are read: layers at `ID/layer.tar`, with symlinks for repeated ones, and layers at `blobs/sha256/…`
//! since Docker 25. Source: Docker's `image/spec/v1.2.md`, "Combined Image JSON + Filesystem Changeset Format".

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use image::tar::{Kind, Reader, TarError};

use crate::Digest;
use crate::manifest::{CONFIG_MAX, Config, MANIFEST_MAX, ManifestError, check_size};
use crate::source::Choice;

/// Member with the list of the images.
const LIST: &str = "manifest.json";
/// Maximum number of members in an archive. An image with 512 layers has some 2,000.
const MEMBERS_MAX: usize = 1 << 16;
/// Maximum length of a chain of symlinks to a member.
const LINKS_MAX: usize = 8;

/// An error of reading an image from an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DockerError {
    /// The file is not a tar.
    #[error("it is not an archive")]
    Tar(#[source] TarError),
    /// The archive has more members than any real one.
    #[error("it has more than {MEMBERS_MAX} members")]
    Members,
    /// A member is missing, so the file is not an archive of images, or is truncated.
    #[error("it has no \"{}\"", .0.escape_ascii())]
    Absent(Vec<u8>),
    /// A member cannot be read.
    #[error("cannot read \"{}\"", name.escape_ascii())]
    Read {
        /// Name of the member.
        name: Vec<u8>,
        /// Cause.
        source: io::Error,
    },
    /// `manifest.json` or a config is invalid.
    #[error("cannot use \"{}\"", name.escape_ascii())]
    Manifest {
        /// Name of the member.
        name: Vec<u8>,
        /// Cause.
        source: ManifestError,
    },
    /// A config does not have the digest in its name.
    #[error("\"{name}\" has the digest {actual}")]
    Mismatch {
        /// Name of the member.
        name: String,
        /// Digest of its content.
        actual: Digest,
    },
    /// The archive has no image with that name.
    #[error("there is no image \"{}\" in it, only {}", name.escape_debug(), there.join(", "))]
    Name {
        /// Requested name.
        name: String,
        /// Names in the archive.
        there: Vec<String>,
    },
    /// The archive has several images, and none was chosen.
    #[error("it has several images, name one of them: {}", .0.join(", "))]
    Several(Vec<String>),
}

#[derive(Debug)]
enum Member {
    Data {
        offset: u64,
        size: u64,
    },
    /// A symlink or hard link, to a path in the archive.
    Link(Vec<u8>),
}

/// An archive with the offsets of its members.
#[derive(Debug)]
pub struct Archive {
    file: Arc<File>,
    members: BTreeMap<Vec<u8>, Member>,
}

/// An image in an archive.
#[derive(Debug, Clone)]
pub struct ArchiveImage {
    /// The config's digest and bytes.
    pub config: (Digest, Vec<u8>),
    /// Parsed config, with a diff id for each layer.
    pub settings: Config,
    /// Layers, lowest first.
    pub layers: Vec<ArchiveLayer>,
    /// Name of the image in the archive.
    pub name: Option<String>,
}

/// A layer in an archive.
#[derive(Debug, Clone)]
pub struct ArchiveLayer {
    file: Arc<File>,
    offset: u64,
    /// Size in the archive in bytes, whether compressed or not.
    pub size: u64,
    /// Digest from its name, which newer archives have.
    pub digest: Option<Digest>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

impl Archive {
    /// Opens an uncompressed archive, and finds its members.
    ///
    /// # Errors
    /// [`DockerError::Tar`] or [`DockerError::Members`].
    pub fn open(file: File) -> Result<Self, DockerError> {
        let mut members = BTreeMap::new();
        let mut reader = Reader::new(&file);
        loop {
            let entry = match reader.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(TarError::Unsupported { .. }) => continue,
                Err(error) => return Err(DockerError::Tar(error)),
            };
            let member = match entry.kind {
                Kind::Regular => match entry.segments {
                    [] if entry.size == 0 => Member::Data { offset: entry.position, size: 0 },
                    [only] if only.offset == 0 && only.length == entry.size => {
                        Member::Data { offset: entry.position, size: entry.size }
                    }
                    // Known programs do not write these members as sparse files.
                    _ => continue,
                },
                Kind::Symlink(target) => Member::Link(beside(entry.path, target)),
                Kind::Hardlink(target) => Member::Link(target.to_vec()),
                _ => continue,
            };
            if members.len() == MEMBERS_MAX {
                return Err(DockerError::Members);
            }
            members.insert(entry.path.to_vec(), member);
        }
        Ok(Self { file: Arc::new(file), members })
    }

    fn data(&self, name: &str) -> Result<(u64, u64), DockerError> {
        let absent = || DockerError::Absent(name.as_bytes().to_vec());
        let mut path = normal(name.as_bytes());
        for _ in 0..=LINKS_MAX {
            match self.members.get(&path).ok_or_else(absent)? {
                Member::Data { offset, size } => return Ok((*offset, *size)),
                Member::Link(target) => path.clone_from(target),
            }
        }
        Err(absent())
    }

    fn small(&self, name: &str, kind: &'static str, max: u64) -> Result<Vec<u8>, DockerError> {
        let (offset, size) = self.data(name)?;
        let wrong = |source| DockerError::Manifest { name: name.as_bytes().to_vec(), source };
        check_size(kind, size, max).map_err(wrong)?;
        let mut bytes = Vec::new();
        let range = Range { file: Arc::clone(&self.file), at: offset, end: offset + size };
        range
            .take(max)
            .read_to_end(&mut bytes)
            .map_err(|source| DockerError::Read { name: name.as_bytes().to_vec(), source })?;
        Ok(bytes)
    }

    /// Whether the archive has a member with this path.
    #[must_use]
    pub fn has(&self, path: &str) -> bool {
        self.members.contains_key(path.as_bytes())
    }

    /// Returns the names of each image, in the order of the archive. An image may have none.
    ///
    /// # Errors
    /// [`DockerError`] if the list of images is missing or malformed.
    pub fn images(&self) -> Result<Vec<Vec<String>>, DockerError> {
        let entries = self.entries()?;
        Ok(entries.into_iter().map(|it| it.repo_tags.unwrap_or_default()).collect())
    }

    fn entries(&self) -> Result<Vec<Entry>, DockerError> {
        let bytes = self.small(LIST, "manifest", MANIFEST_MAX)?;
        serde_json::from_slice(&bytes).map_err(|source| {
            let source = ManifestError::Json { kind: "manifest", source };
            DockerError::Manifest { name: LIST.as_bytes().to_vec(), source }
        })
    }

    /// Finds an image, and parses its config.
    ///
    /// # Errors
    /// [`DockerError`] if the image is missing, ambiguous or malformed.
    pub fn find_image(&self, choice: &Choice) -> Result<ArchiveImage, DockerError> {
        let entries = self.entries()?;
        let tags = |entry: &Entry| entry.repo_tags.clone().unwrap_or_default();
        let there = || {
            let all: Vec<String> = entries.iter().flat_map(tags).collect();
            if all.is_empty() { vec!["images without a name".to_owned()] } else { all }
        };
        let (entry, name) = match choice {
            Choice::Only => match &entries[..] {
                [only] => (only, tags(only).into_iter().next()),
                [] => return Err(DockerError::Absent(LIST.as_bytes().to_vec())),
                _ => return Err(DockerError::Several(there())),
            },
            Choice::Named(name) => {
                let wanted = [name.clone(), format!("{name}:latest")];
                let found = entries.iter().find(|it| tags(it).iter().any(|it| wanted.contains(it)));
                let absent = || DockerError::Name { name: name.clone(), there: there() };
                (found.ok_or_else(absent)?, Some(name.clone()))
            }
            Choice::Digest(digest) => {
                let name = digest.to_string();
                return Err(DockerError::Name { name, there: there() });
            }
        };
        let config = self.small(&entry.config, "config", CONFIG_MAX)?;
        let digest = Digest::sha256(&config);
        if named_digest(&entry.config).is_some_and(|named| named != digest) {
            return Err(DockerError::Mismatch { name: entry.config.clone(), actual: digest });
        }
        let paths = entry.layers.clone().unwrap_or_default();
        let settings = Config::parse(&config).and_then(|settings| {
            settings.diff_ids_of(paths.len())?;
            Ok(settings)
        });
        let settings = settings.map_err(|source| DockerError::Manifest {
            name: entry.config.clone().into_bytes(),
            source,
        })?;
        let layers = paths.iter().map(|path| {
            let (offset, size) = self.data(path)?;
            let digest = named_digest(path);
            Ok(ArchiveLayer { file: Arc::clone(&self.file), offset, size, digest })
        });
        let layers = layers.collect::<Result<_, DockerError>>()?;
        Ok(ArchiveImage { config: (digest, config), settings, layers, name })
    }
}

impl ArchiveLayer {
    /// Opens the layer's data, which may be compressed.
    #[must_use]
    pub fn open(&self) -> Range {
        let end = self.offset.saturating_add(self.size);
        Range { file: Arc::clone(&self.file), at: self.offset, end }
    }
}

/// A reader of a part of a file, independent of the file's offset.
#[derive(Debug)]
pub struct Range {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for Range {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let length = left.min(into.len());
        let read = self.file.read_at(&mut into[..length], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// Returns the digest in `blobs/sha256/HEX`. In older archives, the name `HEX.json` of a config need not be its
/// digest: some tools write another digest, and `docker load` and skopeo do not compare it either.
fn named_digest(name: &str) -> Option<Digest> {
    let hex = name.strip_prefix("blobs/sha256/")?;
    format!("sha256:{hex}").parse().ok()
}

/// Normalises a path: removes `.`, empty components, and components followed by `..`.
fn normal(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            other => parts.push(other),
        }
    }
    parts.join(&b'/')
}

/// Returns the path to which a symlink at `path` leads.
fn beside(path: &[u8], target: &[u8]) -> Vec<u8> {
    let directory = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    normal(&[&path[..directory], target].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        assert_eq!(beside(b"abc/layer.tar", b"../def/layer.tar"), b"def/layer.tar");
        assert_eq!(beside(b"layer.tar", b"x"), b"x");
        assert_eq!(normal(b"./a//b/../../../c"), b"c");
    }

    #[test]
    fn digests_in_names() {
        let hex = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest = Some(Digest::sha256(b""));
        assert_eq!(named_digest(&format!("blobs/sha256/{hex}")), digest);
        assert_eq!(named_digest(&format!("{hex}.json")), None);
        assert_eq!(named_digest(&format!("{hex}/layer.tar")), None);
        assert_eq!(named_digest("config.json"), None);
    }
}
