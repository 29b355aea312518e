//! Layers: recipes that rebuild the exact bytes of a layer's tar.
//!
//! One file per layer in `layers/`. `docs/format/object-store.md`, "Layers", describes its layout.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;

use image::verity::{Algorithm, ObjectId};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Listing;
use crate::disk::{Directory, DiskError, NewFile};
use image::digest::Digest;

/// Magic number at the start of the file.
const MAGIC: &[u8; 8] = b"quirelay";
/// Last field of the trailer before the hash. Its last byte is the version.
const END: &[u8; 8] = b"layend\0\x01";
/// Length of the trailer in bytes: three lengths of 8 bytes, [`END`], and the SHA-256 digest of all preceding bytes.
const TRAILER: usize = 64;
/// zstd's default level. Recipes contain tar headers, which compress well at any level.
const LEVEL: i32 = 3;
/// Maximum number of blobs recorded for one layer. This bounds the list if a client compresses the same layer
/// repeatedly, with different results.
const BLOBS_MAX: usize = 64;
/// Maximum number of repositories recorded for one blob.
const REPOSITORIES_MAX: usize = 8;
/// Maximum length in bytes of a repository's name, which is more than registries allow.
const REPOSITORY_MAX: usize = 512;

/// A layer as sent by a registry, usually compressed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Digest of the bytes as sent.
    pub digest: Digest,
    /// Length in bytes.
    pub size: u64,
    /// Media type that the manifest states.
    pub media_type: String,
    /// Whether all bytes of the blob were read, had this digest, and gave this layer. Otherwise the digest is only a
    /// claim.
    #[serde(rename = "hashed", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_hashed: bool,
    /// Repositories to which the blob was pushed, as `registry/repository`: at most 8, the last one first. They are
    /// only a hint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
}

impl Blob {
    /// Adds repositories from an earlier record, after the known ones.
    fn add_repositories(&mut self, before: &[String]) {
        let all = self.repositories.drain(..).chain(before.iter().cloned());
        let mut kept: Vec<String> = Vec::new();
        for repository in all.filter(|it| it.len() <= REPOSITORY_MAX) {
            if kept.len() < REPOSITORIES_MAX && !kept.contains(&repository) {
                kept.push(repository);
            }
        }
        self.repositories = kept;
    }
}

/// Description of a layer, besides its recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// Digest of the uncompressed tar, which names the layer in the store.
    pub diff_id: Digest,
    /// Size of the uncompressed tar, in bytes.
    pub size: u64,
    /// Known compressed forms of the layer.
    pub blobs: Vec<Blob>,
    /// Every object that the recipe refers to, each once, in an order that the writer chooses. A recipe may refer to
    /// an object by its index in this list.
    pub objects: Vec<ObjectId>,
}

impl LayerInfo {
    /// Whether the blob with this digest is known to give this layer, because all of its bytes were hashed while they
    /// were unpacked. An image may use this layer for a blob in its manifest only if this is true.
    #[must_use]
    pub fn is_in(&self, blob: &Digest) -> bool {
        self.blobs.iter().any(|it| it.is_hashed && it.digest == *blob)
    }

    /// Adds blobs from an earlier record. Hashed blobs come first, and new ones before old ones.
    pub(crate) fn add_known(&mut self, before: &[Blob]) {
        for blob in before {
            match self.blobs.iter_mut().find(|it| it.digest == blob.digest) {
                Some(same) => {
                    same.is_hashed |= blob.is_hashed;
                    same.add_repositories(&blob.repositories);
                }
                None => self.blobs.push(blob.clone()),
            }
        }
        self.blobs.sort_by_key(|it| !it.is_hashed);
        self.blobs.truncate(BLOBS_MAX);
    }
}

/// The part of [`LayerInfo`] that is JSON.
#[derive(Debug, Serialize, Deserialize)]
struct RawInfo {
    diff_id: Digest,
    size: u64,
    blobs: Vec<Blob>,
    /// Length of the uncompressed recipe in bytes.
    recipe_size: u64,
}

/// Damage of a layer's file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerDamage {
    #[error("it is too short")]
    Short,
    #[error("it is not a layer of this format")]
    Format,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("its lengths are invalid")]
    Lengths,
    #[error("its lengths do not add up: they are {expected} bytes, and it has {actual}")]
    Sum { expected: u64, actual: u64 },
    #[error("its description is invalid")]
    Description,
    #[error("it belongs to another layer")]
    OtherLayer,
}

/// Why a layer's file was not parsed.
enum ParseError {
    Read(io::Error),
    Damaged(LayerDamage),
}

impl From<LayerDamage> for ParseError {
    fn from(damage: LayerDamage) -> Self {
        Self::Damaged(damage)
    }
}

/// An error while a layer is read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoredLayerError {
    #[error("layer {diff_id} is damaged: {reason}")]
    Damaged { diff_id: Box<Digest>, reason: LayerDamage },
    /// The recipe could not be compressed or decompressed.
    #[error("cannot {action} the recipe of a layer")]
    Recipe {
        /// "write" or "read".
        action: &'static str,
        source: io::Error,
    },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A file that is counted and hashed while it is written.
struct Hashed {
    file: NewFile,
    hash: Sha256,
    written: u64,
}

impl Hashed {
    fn new(file: NewFile) -> Self {
        Self { file, hash: Sha256::new(), written: 0 }
    }
}

impl io::Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all(bytes).map_err(|error| io::Error::new(error.source.kind(), error))?;
        self.hash.update(bytes);
        self.written += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A layer's file that is being written. It implements `Write` for the recipe.
pub(crate) struct LayerWriter {
    recipe_size: u64,
    encoder: zstd::Encoder<'static, Hashed>,
}

impl LayerWriter {
    pub(crate) fn new(file: NewFile) -> io::Result<Self> {
        let mut file = Hashed::new(file);
        file.write_all(MAGIC)?;
        Ok(Self { recipe_size: 0, encoder: zstd::Encoder::new(file, LEVEL)? })
    }

    /// Number of bytes of the recipe so far.
    pub(crate) const fn recipe_size(&self) -> u64 {
        self.recipe_size
    }

    /// Ends the recipe, and adds the description of the layer.
    pub(crate) fn finish(self, info: &LayerInfo) -> io::Result<()> {
        write_end(self.encoder.finish()?, info, self.recipe_size)
    }
}

impl io::Write for LayerWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.encoder.write(bytes)?;
        self.recipe_size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the parts of the file after the recipe.
fn write_end(mut file: Hashed, info: &LayerInfo, recipe_size: u64) -> io::Result<()> {
    let recipe_end = file.written;
    let ids: Vec<_> = info.objects.iter().map(ObjectId::as_bytes).collect();
    file.write_all(&ids.concat())?;
    let json = serde_json::to_vec(&RawInfo {
        diff_id: info.diff_id,
        size: info.size,
        blobs: info.blobs.clone(),
        recipe_size,
    })?;
    file.write_all(&json)?;
    let mut trailer = Vec::with_capacity(TRAILER);
    for length in [recipe_end, info.objects.len() as u64, json.len() as u64] {
        trailer.extend_from_slice(&length.to_le_bytes());
    }
    trailer.extend_from_slice(END);
    file.write_all(&trailer)?;
    let hash = file.hash.clone().finalize();
    file.write_all(&hash)
}

/// An open layer of the store, verified by its checksum.
#[derive(Debug)]
pub struct StoredLayer {
    info: LayerInfo,
    recipe_size: u64,
    /// End of the compressed recipe, which begins after the magic number.
    recipe_end: u64,
    file: File,
}

impl StoredLayer {
    /// Returns the layer's description.
    #[must_use]
    pub const fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Returns the length of the uncompressed recipe in bytes.
    #[must_use]
    pub const fn recipe_size(&self) -> u64 {
        self.recipe_size
    }

    /// Writes a copy of the layer's file with another description.
    pub(crate) fn copy(&self, file: NewFile, info: &LayerInfo) -> io::Result<()> {
        let mut file = Hashed::new(file);
        let mut recipe = Range { file: self.file.try_clone()?, at: 0, end: self.recipe_end };
        io::copy(&mut recipe, &mut file)?;
        write_end(file, info, self.recipe_size)
    }

    /// Returns a reader that decompresses the recipe.
    ///
    /// # Errors
    /// [`StoredLayerError`] if reading cannot begin.
    pub fn recipe(&self) -> Result<RecipeReader, StoredLayerError> {
        let failed = |source| StoredLayerError::Recipe { action: "read", source };
        let file = self.file.try_clone().map_err(failed)?;
        let range = Range { file, at: MAGIC.len() as u64, end: self.recipe_end };
        let decoder = zstd::Decoder::new(range).map_err(failed)?;
        Ok(RecipeReader { decoder: decoder.take(self.recipe_size) })
    }
}

/// A reader of a part of a file. It ends early if the file is shorter.
struct Range {
    file: File,
    at: u64,
    end: u64,
}

impl io::Read for Range {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let length = left.min(buffer.len());
        let read = self.file.read_at(&mut buffer[..length], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// A reader of a decompressed recipe.
pub struct RecipeReader {
    /// Limited to the recipe's length, even if the compressed data contains more.
    decoder: io::Take<zstd::Decoder<'static, io::BufReader<Range>>>,
}

impl std::fmt::Debug for RecipeReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecipeReader").field("left", &self.decoder.limit()).finish()
    }
}

impl io::Read for RecipeReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(buffer)
    }
}

/// The directory `layers/`, with layers named by their diff ids.
#[derive(Debug)]
pub struct LayerShelf {
    pub(crate) directory: Directory,
    pub(crate) algorithm: Algorithm,
}

impl LayerShelf {
    /// Whether a file with this diff id as name exists. It may be damaged.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be read.
    pub fn has(&self, digest: &Digest) -> Result<bool, DiskError> {
        Ok(self.directory.stat(digest.file_name())?.is_some())
    }

    /// Opens the layer with this diff id, if the store has it. Reads and checks the whole file.
    ///
    /// # Errors
    /// [`StoredLayerError`] if the layer is damaged or not readable.
    pub fn open(&self, diff_id: &Digest) -> Result<Option<StoredLayer>, StoredLayerError> {
        let name = diff_id.file_name();
        let Some((file, stat)) = self.directory.read(&name)? else { return Ok(None) };
        let size = crate::disk::length(&stat);
        let layer = parse(file, size, diff_id, self.algorithm.digest_len());
        match layer {
            Ok(layer) => Ok(Some(layer)),
            Err(ParseError::Damaged(reason)) => {
                Err(StoredLayerError::Damaged { diff_id: Box::new(*diff_id), reason })
            }
            Err(ParseError::Read(source)) => {
                Err(self.directory.failed("read", &name, source).into())
            }
        }
    }

    /// Returns the diff ids of all layers, sorted.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be read.
    pub fn diff_ids(&self) -> Result<Vec<Digest>, DiskError> {
        Ok(self.list()?.names)
    }

    pub(crate) fn list(&self) -> Result<Listing<Digest>, DiskError> {
        Listing::read(&self.directory, |it| Digest::from_file_name(it.text()?))
    }
}

/// Reads and checks a layer's file.
fn parse(
    file: File,
    size: u64,
    diff_id: &Digest,
    id_len: usize,
) -> Result<StoredLayer, ParseError> {
    let Some(body) = size.checked_sub(TRAILER as u64 + MAGIC.len() as u64) else {
        return Err(LayerDamage::Short.into());
    };
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut at = 0;
    while at < size - 32 {
        let length = usize::try_from(size - 32 - at).unwrap_or(usize::MAX).min(buffer.len());
        file.read_exact_at(&mut buffer[..length], at).map_err(ParseError::Read)?;
        hash.update(&buffer[..length]);
        at += length as u64;
    }
    let mut trailer = [0; TRAILER];
    file.read_exact_at(&mut trailer, size - TRAILER as u64).map_err(ParseError::Read)?;
    let mut magic = [0; 8];
    file.read_exact_at(&mut magic, 0).map_err(ParseError::Read)?;
    if &magic != MAGIC || trailer[24..32] != *END {
        return Err(LayerDamage::Format.into());
    }
    if trailer[32..] != *hash.finalize() {
        return Err(LayerDamage::Checksum.into());
    }
    let length =
        |at: usize| u64::from_le_bytes(trailer[at..at + 8].try_into().expect("8 bytes of 64"));
    let (recipe_end, objects, json) = (length(0), length(8), length(16));
    let objects = objects.checked_mul(id_len as u64);
    let recipe = recipe_end.checked_sub(MAGIC.len() as u64);
    let sum = recipe
        .zip(objects)
        .and_then(|(recipe, objects)| recipe.checked_add(objects)?.checked_add(json));
    let (Some(sum), Some(objects)) = (sum, objects) else {
        return Err(LayerDamage::Lengths.into());
    };
    if sum != body {
        return Err(LayerDamage::Sum { expected: sum, actual: body }.into());
    }
    let read = |at: u64, length: u64| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    };
    let ids = read(recipe_end, objects).map_err(ParseError::Read)?;
    let json = read(recipe_end + objects, json).map_err(ParseError::Read)?;
    let Ok(mut raw) = serde_json::from_slice::<RawInfo>(&json) else {
        return Err(LayerDamage::Description.into());
    };
    if raw.diff_id != *diff_id {
        return Err(LayerDamage::OtherLayer.into());
    }
    // The checksum shows that the file is not damaged, but not who wrote it, so limits apply here as well.
    raw.blobs.truncate(BLOBS_MAX);
    for blob in &mut raw.blobs {
        blob.add_repositories(&[]);
    }
    let objects =
        ids.chunks_exact(id_len).map(|id| ObjectId::from_bytes(id).expect("32 or 64 bytes"));
    let info = LayerInfo {
        diff_id: raw.diff_id,
        size: raw.size,
        blobs: raw.blobs,
        objects: objects.collect(),
    };
    Ok(StoredLayer { info, recipe_size: raw.recipe_size, recipe_end, file })
}
