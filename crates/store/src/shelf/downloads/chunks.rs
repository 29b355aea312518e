//! Tables of the chunks of layers that were pulled with a table of contents.
//!
//! Each layer has one file, `blobs/DIFFID.chunks`. `docs/format/object-store.md`, "Chunks", describes its layout. The
//! file is only a cache that saves downloads.

use std::io::{self, Read as _, Write as _};

use image::verity::{Algorithm, ObjectId};

use super::{BlobFile, DownloadShelf};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::DiskError;
use image::digest::Digest;

/// Magic number at the start of the file.
const MAGIC: &[u8; 8] = b"quirechk";
/// Last field of the trailer before the hash. Its last byte is the version.
const END: &[u8; 8] = b"chkend\0\x01";
/// Length of the trailer in bytes: three numbers of 8 bytes, [`END`], and the SHA-256 digest of all preceding bytes.
const TRAILER: usize = 64;
/// Same as for recipes, because these bytes are also tar headers.
const LEVEL: i32 = 3;
/// Maximum length in bytes of a file; longer files are neither written nor read. The file of a layer with 100 000
/// files has about 15 MB.
const FILE_MAX: u64 = 64 << 20;
/// Maximum number of bytes of such files that one search reads.
const SEARCH_MAX: u64 = 512 << 20;
/// Maximum number of bytes stored under one key.
const BYTES_MAX: usize = 1 << 20;

/// Key of a chunk: the SHA-256 digest of its bytes, or of data that identifies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey(pub [u8; 32]);

/// A part of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectPart {
    pub object: ObjectId,
    /// Offset of the part in the object, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// A chunk that was found. It is not verified, so the caller compares it with its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// A part of an object, which may be gone or damaged.
    Object(ObjectPart),
    /// The bytes of the chunk.
    Bytes(Vec<u8>),
}

/// The chunks of one layer.
pub struct Chunks {
    objects: Vec<(ChunkKey, ObjectPart)>,
    /// Key, offset in the concatenated bytes, and length in bytes.
    bytes: Vec<(ChunkKey, u64, u64)>,
    length: u64,
    packed: zstd::Encoder<'static, Vec<u8>>,
}

impl std::fmt::Debug for Chunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut chunks = f.debug_struct("Chunks");
        chunks.field("objects", &self.objects.len()).field("bytes", &self.bytes.len()).finish()
    }
}

impl Chunks {
    /// Makes an empty table.
    ///
    /// # Errors
    /// An error of the compressor if memory runs out.
    pub fn new() -> io::Result<Self> {
        let packed = zstd::Encoder::new(Vec::new(), LEVEL)?;
        Ok(Self { objects: Vec::new(), bytes: Vec::new(), length: 0, packed })
    }

    /// Adds a part of an object.
    pub fn object(&mut self, key: ChunkKey, part: ObjectPart) {
        self.objects.push((key, part));
    }

    /// Adds bytes, unless they are longer than 1 MiB.
    ///
    /// # Errors
    /// An error of the compressor.
    pub fn bytes(&mut self, key: ChunkKey, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() <= BYTES_MAX {
            self.packed.write_all(bytes)?;
            self.bytes.push((key, self.length, bytes.len() as u64));
            self.length += bytes.len() as u64;
        }
        Ok(())
    }

    /// Encodes the whole file.
    fn encode(mut self) -> io::Result<Vec<u8>> {
        self.objects.sort_by_key(|it| it.0);
        self.objects.dedup_by_key(|it| it.0);
        self.bytes.sort_by_key(|it| it.0);
        self.bytes.dedup_by_key(|it| it.0);
        let mut file = MAGIC.to_vec();
        for (key, part) in &self.objects {
            file.extend_from_slice(&key.0);
            file.extend_from_slice(part.object.as_bytes());
            file.extend_from_slice(&part.offset.to_le_bytes());
            file.extend_from_slice(&part.length.to_le_bytes());
        }
        for (key, offset, length) in &self.bytes {
            file.extend_from_slice(&key.0);
            file.extend_from_slice(&offset.to_le_bytes());
            file.extend_from_slice(&length.to_le_bytes());
        }
        file.extend_from_slice(&self.packed.finish()?);
        for number in [self.objects.len() as u64, self.bytes.len() as u64, self.length] {
            file.extend_from_slice(&number.to_le_bytes());
        }
        file.extend_from_slice(END);
        let hash = Digest::sha256(&file);
        file.extend_from_slice(hash.as_bytes());
        Ok(file)
    }
}

/// Damage of a table.
#[derive(Debug, thiserror::Error)]
enum ChunksDamage {
    #[error("it is too short")]
    Short,
    #[error("it is not a file of this format")]
    Format,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("its lengths are invalid")]
    Lengths,
    #[error("an object's id is invalid")]
    Object,
    #[error("its bytes at {0} overlap the bytes before them")]
    Overlap(u64),
    #[error("its bytes cannot be decompressed")]
    Decompress(io::Error),
}

/// A parsed file with a valid checksum.
struct Parsed<'a> {
    objects: &'a [u8],
    object_size: usize,
    bytes: &'a [u8],
    packed: &'a [u8],
    length: u64,
}

const KEY: usize = 32;
const BYTES_SIZE: usize = KEY + 16;

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn key(bytes: &[u8]) -> ChunkKey {
    ChunkKey(bytes[..KEY].try_into().expect("32 bytes"))
}

impl<'a> Parsed<'a> {
    fn parse(file: &'a [u8], algorithm: Algorithm) -> Result<Self, ChunksDamage> {
        let Some(end) = file.len().checked_sub(TRAILER).filter(|it| *it >= MAGIC.len()) else {
            return Err(ChunksDamage::Short);
        };
        let (rest, hash) = file.split_at(file.len() - 32);
        if !file.starts_with(MAGIC) || !rest.ends_with(END) {
            return Err(ChunksDamage::Format);
        }
        if Digest::sha256(rest).as_bytes() != hash {
            return Err(ChunksDamage::Checksum);
        }
        let object_size = KEY + algorithm.digest_len() + 16;
        let body = &file[MAGIC.len()..end];
        let table = |count: u64, size: usize| usize::try_from(count).ok()?.checked_mul(size);
        let objects = table(number(file, end), object_size).filter(|it| *it <= body.len());
        let (objects, body) = body.split_at(objects.ok_or(ChunksDamage::Lengths)?);
        let bytes = table(number(file, end + 8), BYTES_SIZE).filter(|it| *it <= body.len());
        let (bytes, packed) = body.split_at(bytes.ok_or(ChunksDamage::Lengths)?);
        Ok(Self { objects, object_size, bytes, packed, length: number(file, end + 16) })
    }

    /// Calls `found` with each wanted chunk.
    fn find_chunks(
        &self,
        wanted: &[ChunkKey],
        found: &mut dyn FnMut(usize, Chunk),
    ) -> Result<(), ChunksDamage> {
        for entry in self.objects.chunks_exact(self.object_size) {
            let Ok(at) = wanted.binary_search(&key(entry)) else { continue };
            let (id, place) = entry[KEY..].split_at(self.object_size - KEY - 16);
            let object = ObjectId::from_bytes(id).map_err(|_odd| ChunksDamage::Object)?;
            let (offset, length) = (number(place, 0), number(place, 8));
            found(at, Chunk::Object(ObjectPart { object, offset, length }));
        }
        let mut places = Vec::new();
        for entry in self.bytes.chunks_exact(BYTES_SIZE) {
            if let Ok(at) = wanted.binary_search(&key(entry)) {
                places.push((number(entry, KEY), number(entry, KEY + 8), at));
            }
        }
        if places.is_empty() {
            return Ok(());
        }
        places.sort_unstable();
        let broken = ChunksDamage::Decompress;
        let decoder = zstd::Decoder::with_buffer(self.packed).map_err(broken)?;
        let mut decoder = decoder.take(self.length);
        let mut position = 0;
        for (offset, length, at) in places {
            let ahead = offset.checked_sub(position).ok_or(ChunksDamage::Overlap(offset))?;
            let length = usize::try_from(length).ok().filter(|it| *it <= BYTES_MAX);
            let mut bytes = vec![0; length.ok_or(ChunksDamage::Lengths)?];
            io::copy(&mut (&mut decoder).take(ahead), &mut io::sink()).map_err(broken)?;
            decoder.read_exact(&mut bytes).map_err(broken)?;
            position = offset + bytes.len() as u64;
            found(at, Chunk::Bytes(bytes));
        }
        Ok(())
    }
}

impl DownloadShelf {
    /// Stores the chunks of a layer until `gc` removes the layer. A table that is too large is not stored.
    ///
    /// # Errors
    /// [`DiskError`] if the file cannot be written.
    pub fn keep_chunks(&self, diff_id: &Digest, chunks: Chunks) -> Result<(), DiskError> {
        let name = BlobFile::Chunks(*diff_id).file_name();
        let bytes = chunks.encode().map_err(|error| self.directory.failed("make", &name, error))?;
        if bytes.len() as u64 > FILE_MAX {
            tracing::debug!(%diff_id, bytes = bytes.len(), "too many chunks: not storing the table");
            return Ok(());
        }
        self.tmp.replace(&self.directory, name, &bytes)
    }

    /// Looks for chunks in all layers that were pulled with a table of contents. `wanted` is sorted. `found` is called
    /// with the index of a key in `wanted` and its chunk, possibly several times for one key. Damaged files are
    /// skipped.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be read.
    pub fn find_chunks(
        &self,
        wanted: &[ChunkKey],
        found: &mut dyn FnMut(usize, Chunk),
    ) -> Result<(), DiskError> {
        debug_assert!(wanted.is_sorted(), "the search needs a sorted list");
        let mut names: Vec<_> = self.directory.list()?;
        names.retain(|it| matches!(it.text().and_then(BlobFile::parse), Some(BlobFile::Chunks(_))));
        names.sort_by(|one, other| one.name.cmp(&other.name));
        let mut read = 0;
        for listed in &names {
            let outcome = match self.directory.read_all(&listed.name, FILE_MAX) {
                Ok(Some(bytes)) => {
                    read += bytes.len() as u64;
                    let parsed = Parsed::parse(&bytes, self.algorithm);
                    parsed.and_then(|it| it.find_chunks(wanted, found)).map_err(|it| it.to_string())
                }
                Ok(None) => Ok(()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(why) = outcome {
                let file = self.directory.path_of(&listed.name);
                tracing::debug!(file = %file.display(), why, "skipping a table of chunks");
            }
            if read > SEARCH_MAX {
                tracing::debug!(read, "reached the limit for searching tables of chunks");
                break;
            }
        }
        Ok(())
    }

    /// Checks the chunk table of a layer, and returns the damage.
    pub(super) fn chunks_damage(&self, diff_id: &Digest) -> Result<Option<String>, FsckError> {
        Ok(match self.directory.read_all(BlobFile::Chunks(*diff_id).file_name(), FILE_MAX) {
            Ok(Some(bytes)) => Parsed::parse(&bytes, self.algorithm).err().map(|it| it.to_string()),
            Ok(None) => None,
            Err(error) => Some(check_error::damage(&error)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use image::verity::{Algorithm, digest};

    use super::{Chunk, ChunkKey, Chunks, ObjectPart, Parsed};
    use crate::shelf::blob_file::BlobFile;
    use crate::shelf::downloads::tests::store;
    use crate::{Damage, Digest, FsckOptions, Seconds, Store, StoreItem};

    const fn key(byte: u8) -> ChunkKey {
        ChunkKey([byte; 32])
    }

    fn part(offset: u64) -> ObjectPart {
        ObjectPart { object: digest(Algorithm::Sha256, b"x").into(), offset, length: 9 }
    }

    fn chunks() -> Chunks {
        let mut chunks = Chunks::new().unwrap();
        chunks.bytes(key(5), b"five").unwrap();
        chunks.object(key(3), part(30));
        chunks.object(key(1), part(10));
        chunks.bytes(key(2), b"two").unwrap();
        chunks.bytes(key(9), b"").unwrap();
        chunks.bytes(key(8), &vec![1; (1 << 20) + 1]).unwrap();
        chunks
    }

    fn found(store: &Store, wanted: &[u8]) -> Vec<(usize, Chunk)> {
        let mut all = Vec::new();
        let keys: Vec<_> = wanted.iter().map(|it| key(*it)).collect();
        store.downloads.find_chunks(&keys, &mut |at, chunk| all.push((at, chunk))).unwrap();
        all
    }

    #[test]
    fn what_was_kept_is_found() {
        let (_folder, store) = store();
        assert!(found(&store, &[1, 2]).is_empty());
        store.downloads.keep_chunks(&Digest::sha256(b"layer"), chunks()).unwrap();
        let bytes = |text: &str| Chunk::Bytes(text.as_bytes().to_vec());
        let all = [(1, Chunk::Object(part(10))), (4, bytes("five")), (2, bytes("two"))];
        assert_eq!(found(&store, &[0, 1, 2, 4, 5, 8]), all);
        assert_eq!(found(&store, &[3, 9]), [(0, Chunk::Object(part(30))), (1, bytes(""))]);
        assert!(found(&store, &[0, 4, 7, 255]).is_empty());
    }

    #[test]
    fn every_flipped_bit_and_cut_is_found() {
        let good = chunks().encode().unwrap();
        assert!(Parsed::parse(&good, Algorithm::Sha256).is_ok());
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(Parsed::parse(&bad, Algorithm::Sha256).is_err(), "bit {at}");
        }
        for length in 0..good.len() {
            assert!(Parsed::parse(&good[..length], Algorithm::Sha256).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn lengths_that_lie_under_a_right_checksum() {
        let good = chunks().encode().unwrap();
        let end = good.len() - 64;
        let check = |at: usize, count: u64, expect: &str| {
            let mut bad = good.clone();
            bad[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let hash = Digest::sha256(&bad[..end + 32]);
            bad[end + 32..].copy_from_slice(hash.as_bytes());
            let wanted: Vec<_> = (0..=255).map(key).collect();
            let parsed = Parsed::parse(&bad, Algorithm::Sha256);
            let error = parsed.and_then(|it| it.find_chunks(&wanted, &mut |_, _| ())).unwrap_err();
            assert_eq!(error.to_string(), expect, "{count} at {at}");
        };
        // The numbers of objects, entries of bytes, and bytes. There are 2, 3 and 7.
        for (at, most) in [(end, 2), (end + 8, 3)] {
            for count in [most + 10, 1 << 32, u64::MAX] {
                check(at, count, "its lengths are invalid");
            }
        }
        for length in [0, 6] {
            check(end + 16, length, "its bytes cannot be decompressed");
        }
    }

    #[test]
    fn garbage_with_its_layer_and_checked() {
        let (folder, store) = store();
        let layer = Digest::sha256(b"layer");
        store.downloads.keep_chunks(&layer, chunks()).unwrap();
        let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
        assert!(report.is_sound(), "{report:?}");

        // The table is kept as long as the layer is needed, even if the layer is not in the store.
        let config = format!(r#"{{"rootfs":{{"diff_ids":["{layer}"]}}}}"#);
        let config_digest = Digest::sha256(config.as_bytes());
        let manifest = format!(r#"{{"config":{{"digest":"{config_digest}"}},"layers":[]}}"#);
        let digest = Digest::sha256(manifest.as_bytes());
        let import = store.begin().unwrap();
        import.manifest(&config_digest, config.as_bytes()).unwrap();
        import.manifest(&digest, manifest.as_bytes()).unwrap();
        import.commit().unwrap();
        store.downloads.pin(&digest, Seconds(1)).unwrap();
        store.gc(Seconds(1)).unwrap();
        let kept = [BlobFile::Pin(digest), BlobFile::Chunks(layer)];
        assert_eq!(store.downloads.list().unwrap().names, kept);

        let path = folder.path().join("store/blobs").join(BlobFile::Chunks(layer).file_name());
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[50] ^= 1;
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        assert!(found(&store, &[1, 2, 3]).is_empty());
        let report = store.fsck(FsckOptions { threads: 1 }).unwrap();
        let damage = Damage::Bad(
            StoreItem::Blob(BlobFile::Chunks(layer)),
            "its checksum is wrong".to_owned(),
        );
        assert_eq!(report.damage, [(damage, vec![])]);
        assert_eq!(store.remove_damaged(&report).unwrap(), 1);
        assert!(store.fsck(FsckOptions { threads: 1 }).unwrap().is_sound());

        store.downloads.keep_chunks(&layer, chunks()).unwrap();
        store.downloads.unpin(&digest).unwrap();
        store.gc(Seconds(1)).unwrap();
        assert!(store.downloads.list().unwrap().names.is_empty());
    }
}
