//! Layers: recipes from which the exact bytes of a layer's tar come back.
//!
//! One file a layer, in `layers/`, laid out as `docs/format/object-store.md`, "Layers", says.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;

use image::verity::{Algorithm, ObjectId};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Listing;
use crate::disk::{Directory, DiskError, NewFile};
use image::digest::Digest;

/// The first bytes of the file.
const MAGIC: &[u8; 8] = b"quirelay";
/// The last field of the trailer but the hash; its last byte is the version.
const END: &[u8; 8] = b"layend\0\x01";
/// Three lengths of 8 bytes, [`END`], SHA-256 of everything before.
const TRAILER: usize = 64;
/// zstd's own default: a recipe is tar headers, which compress well at any level.
const LEVEL: i32 = 3;
/// The most blobs that are recorded for one layer. Whoever compresses a layer anew each time only fills the list.
const BLOBS_MAX: usize = 64;
/// The most repositories that are recorded for one blob.
const REPOSITORIES_MAX: usize = 8;
/// The most bytes in the name of one, which is more than registries allow.
const REPOSITORY_MAX: usize = 512;

/// A layer as a registry sent it, most often compressed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Digest of the bytes as sent.
    pub digest: Digest,
    /// Length in bytes.
    pub size: u64,
    /// Media type that the manifest states.
    pub media_type: String,
    /// Whether all of its bytes were read, had this digest, and gave this layer. Otherwise the digest is only a claim.
    #[serde(rename = "hashed", default, skip_serializing_if = "std::ops::Not::not")]
    pub is_hashed: bool,
    /// Repositories that it was pushed to, as `registry/repository`: at most 8, the last first. They are only a hint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
}

impl Blob {
    /// Adds repositories that were recorded before, behind those that are known.
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

/// The description of a layer, besides its recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// Digest of the uncompressed tar: the layer's name in the store.
    pub diff_id: Digest,
    /// Size of the uncompressed tar, in bytes.
    pub size: u64,
    /// Its known compressed forms.
    pub blobs: Vec<Blob>,
    /// Every object that the recipe refers to, each once, in an order of the writer's choice. A
    /// recipe may refer to an object by its place in this list.
    pub objects: Vec<ObjectId>,
}

impl LayerInfo {
    /// Whether the blob with this digest is known to give this layer: all of its bytes were hashed while they did. Only
    /// then may an image have the layer because its manifest names the blob.
    #[must_use]
    pub fn is_in(&self, blob: &Digest) -> bool {
        self.blobs.iter().any(|it| it.is_hashed && it.digest == *blob)
    }

    /// Adds blobs that were recorded before. Those that are known come first, and new ones before old ones.
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
    /// Bytes of the recipe before compression.
    recipe_size: u64,
}

/// Why a layer cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The file is damaged.
    #[error("layer {diff_id} is damaged: {reason}")]
    Damaged {
        /// The layer.
        diff_id: Digest,
        /// The damage.
        reason: &'static str,
    },
    /// The recipe could not be compressed or decompressed.
    #[error("cannot {action} the recipe of a layer")]
    Recipe {
        /// The operation: "write" or "read".
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// An error of the disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A file, counted and hashed as it is written.
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

/// The file of a layer in the making. Write the recipe to it.
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

    /// Bytes of the recipe so far.
    pub(crate) const fn recipe_size(&self) -> u64 {
        self.recipe_size
    }

    /// Ends the recipe, and adds what is known of the layer.
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

/// What stands behind the recipe.
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

/// A layer of the store, opened and checked against its checksum.
#[derive(Debug)]
pub struct Layer {
    info: LayerInfo,
    recipe_size: u64,
    /// Where the compressed recipe ends; it begins behind the magic.
    recipe_end: u64,
    file: File,
}

impl Layer {
    /// Its description.
    #[must_use]
    pub const fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Size of its recipe, in bytes.
    #[must_use]
    pub const fn recipe_size(&self) -> u64 {
        self.recipe_size
    }

    /// Writes a file of the same recipe, of which something else is known.
    pub(crate) fn copy(&self, file: NewFile, info: &LayerInfo) -> io::Result<()> {
        let mut file = Hashed::new(file);
        let mut recipe = Range { file: self.file.try_clone()?, at: 0, end: self.recipe_end };
        io::copy(&mut recipe, &mut file)?;
        write_end(file, info, self.recipe_size)
    }

    /// A reader of its recipe that decompresses it.
    ///
    /// # Errors
    /// [`LayerError`] when reading cannot begin.
    pub fn recipe(&self) -> Result<RecipeReader, LayerError> {
        let failed = |source| LayerError::Recipe { action: "read", source };
        let file = self.file.try_clone().map_err(failed)?;
        let range = Range { file, at: MAGIC.len() as u64, end: self.recipe_end };
        let decoder = zstd::Decoder::new(range).map_err(failed)?;
        Ok(RecipeReader { decoder: decoder.take(self.recipe_size) })
    }
}

/// A part of a file, which ends early where the file does.
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

/// The bytes of a recipe.
pub struct RecipeReader {
    /// No more than was written, whatever the compressed bytes say.
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

/// `layers/`: layers by their diff ids.
#[derive(Debug)]
pub struct LayerShelf {
    pub(crate) directory: Directory,
    pub(crate) algorithm: Algorithm,
}

impl LayerShelf {
    /// Whether the store has this layer.
    pub(crate) fn has(&self, digest: &Digest) -> Result<bool, DiskError> {
        Ok(self.directory.stat(digest.file_name())?.is_some())
    }

    /// The layer with this diff id, if there is one. Reads and checks all of its file.
    ///
    /// # Errors
    /// [`LayerError`] when it is damaged or not readable.
    pub fn open(&self, diff_id: &Digest) -> Result<Option<Layer>, LayerError> {
        let name = diff_id.file_name();
        let Some((file, stat)) = self.directory.read(&name)? else { return Ok(None) };
        let size = crate::disk::length(&stat);
        let layer = parse(file, size, diff_id, self.algorithm.digest_len());
        match layer {
            Ok(Ok(layer)) => Ok(Some(layer)),
            Ok(Err(reason)) => Err(LayerError::Damaged { diff_id: *diff_id, reason }),
            Err(source) => Err(self.directory.failed("read", &name, source).into()),
        }
    }

    /// The diff ids of all layers, in order.
    ///
    /// # Errors
    /// [`DiskError`] when the directory cannot be read.
    pub fn diff_ids(&self) -> Result<Vec<Digest>, DiskError> {
        Ok(self.list()?.names)
    }

    pub(crate) fn list(&self) -> Result<Listing<Digest>, DiskError> {
        Listing::of(&self.directory, |it| Digest::from_file_name(it.text()?))
    }
}

/// Reads and checks a layer's file: an I/O error, or what is wrong with it, or the layer.
fn parse(
    file: File,
    size: u64,
    diff_id: &Digest,
    id_len: usize,
) -> io::Result<Result<Layer, &'static str>> {
    let Some(body) = size.checked_sub(TRAILER as u64 + MAGIC.len() as u64) else {
        return Ok(Err("it is too short"));
    };
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut at = 0;
    while at < size - 32 {
        let length = usize::try_from(size - 32 - at).unwrap_or(usize::MAX).min(buffer.len());
        file.read_exact_at(&mut buffer[..length], at)?;
        hash.update(&buffer[..length]);
        at += length as u64;
    }
    let mut trailer = [0; TRAILER];
    file.read_exact_at(&mut trailer, size - TRAILER as u64)?;
    let mut magic = [0; 8];
    file.read_exact_at(&mut magic, 0)?;
    if &magic != MAGIC || trailer[24..32] != *END {
        return Ok(Err("it is not a layer of this format"));
    }
    if trailer[32..] != *hash.finalize() {
        return Ok(Err("its checksum is wrong"));
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
        return Ok(Err("its lengths are invalid"));
    };
    if sum != body {
        return Ok(Err("its lengths do not add up"));
    }
    let read = |at: u64, length: u64| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    };
    let ids = read(recipe_end, objects)?;
    let Ok(mut raw) = serde_json::from_slice::<RawInfo>(&read(recipe_end + objects, json)?) else {
        return Ok(Err("its description is invalid"));
    };
    if raw.diff_id != *diff_id {
        return Ok(Err("it is the file of another layer"));
    }
    // The checksum says that nothing was damaged, not who wrote it.
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
    Ok(Ok(Layer { info, recipe_size: raw.recipe_size, recipe_end, file }))
}
