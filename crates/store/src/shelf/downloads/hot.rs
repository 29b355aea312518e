//! Hot packs: the blocks that the start of an image reads, until its lazy devices have them. `blobs/DIGEST.hot` is the
//! pack of the index that a manifest came with. See `docs/format/hot-pack.md`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use image::digest::Digest;
use image::lazy::HeadError;
use image::lazy::hot::{BLOCK, COUNTS, HotFrame, HotHead};

use super::{BlobFile, DownloadShelf};
use crate::disk::DiskError;

/// A hot pack in a store. Its blocks are compared with their digests only when they are used, because a crash may have
/// damaged the file.
#[derive(Debug)]
pub struct HotPack {
    file: File,
    head: HotHead,
    /// Offset of each frame in the file, in bytes.
    places: Vec<u64>,
}

impl HotPack {
    /// Opens a pack. The head is verified, and the frames are as long as it says.
    ///
    /// # Errors
    /// An I/O error of the file, or [`io::ErrorKind::InvalidData`] with a [`HeadError`].
    pub fn open(file: File) -> io::Result<Self> {
        let damaged = |error: HeadError| io::Error::new(io::ErrorKind::InvalidData, error);
        let mut counts = [0; COUNTS];
        file.read_exact_at(&mut counts, 0)?;
        let length = HotHead::length_of(&counts).map_err(damaged)?;
        let mut head = vec![0; length];
        file.read_exact_at(&mut head, 0)?;
        let head = HotHead::decode(&head).map_err(damaged)?;
        let mut place = length as u64;
        let mut places = Vec::new();
        for frame in &head.frames {
            places.push(place);
            place += u64::from(frame.packed);
        }
        if file.metadata()?.len() != place {
            return Err(damaged(HeadError::Damaged("the length of a hot pack")));
        }
        Ok(Self { file, head, places })
    }

    /// Returns the frames, in the order in which programs read them.
    #[must_use]
    pub fn frames(&self) -> &[HotFrame] {
        &self.head.frames
    }

    /// Reads and decompresses the blocks of a frame. They are not verified.
    ///
    /// # Errors
    /// If the frame cannot be read, or its data is longer than its blocks.
    pub fn read(&self, frame: usize) -> io::Result<Vec<u8>> {
        let (Some(it), Some(place)) = (self.head.frames.get(frame), self.places.get(frame)) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let length = |it: u64| usize::try_from(it).map_err(io::Error::other);
        let mut packed = vec![0; length(it.packed.into())?];
        self.file.read_exact_at(&mut packed, *place)?;
        zstd::bulk::decompress(&packed, length(it.digests.len() as u64 * BLOCK)?)
    }
}

impl DownloadShelf {
    /// Returns the hot pack that came with this manifest. A pack whose head a crash has damaged counts as absent.
    ///
    /// Manifests with the same layers give the same image, but their indexes may have different authors. So a pack
    /// belongs to a manifest and not to an image.
    ///
    /// # Errors
    /// [`DiskError`] if the file cannot be opened.
    pub fn hot_pack(&self, manifest: &Digest) -> Result<Option<HotPack>, DiskError> {
        let name = BlobFile::Hot(*manifest).file_name();
        let Some((file, _)) = self.directory.read(name)? else { return Ok(None) };
        let opened = HotPack::open(file);
        let opened = opened.inspect_err(|error| {
            tracing::debug!(%manifest, %error, "ignoring a hot pack");
        });
        Ok(opened.ok())
    }

    /// Replaces the hot pack of a manifest, or removes it. It is removed together with the manifest. It is not synced,
    /// so that a start does not wait for the disk: a pack can be fetched again.
    ///
    /// # Errors
    /// [`DiskError`] if the pack cannot be written or removed.
    pub fn set_hot_pack(&self, manifest: &Digest, pack: Option<&[u8]>) -> Result<(), DiskError> {
        let name = BlobFile::Hot(*manifest).file_name();
        match pack {
            Some(bytes) => self.tmp.replace_unsynced(&self.directory, name, bytes),
            None => self.directory.unlink(name).map(drop),
        }
    }
}
