//! Files of pulls: whole and partial blobs, pins, and records about images and manifests.
//!
//! All files are in `blobs/`. Files of this module are named by a digest: `DIGEST` is a whole layer as its manifest
//! names it, `DIGEST.partial` the first bytes of a layer, and `DIGEST.pull` a pin: a pull of the manifest with this
//! digest began and has not ended. `DIGEST.signatures` records the origin of a manifest and its signatures, and
//! `IMAGE.signatures` the signatures of an image without a manifest. `chunks.rs` writes `DIFFID.chunks`, `hot.rs`
//! `DIGEST.hot`, `kept_index.rs` `DIGEST.index`, `origins.rs` `IMAGE.origins`, `start.rs` `DIGEST.start`, `traces.rs`
//! `IMAGE.traces`, `transaction/unproven.rs` `IMAGE.unproven`, and `lacks.rs` `IMAGE.lacking`. See
//! `docs/format/object-store.md`, "Blobs" and "Signatures".

pub(crate) mod chunks;
pub(crate) mod hot;
pub(crate) mod kept_index;
pub(crate) mod origins;
pub(crate) mod start;
pub(crate) mod traces;
pub(crate) mod unproven;

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use image::verity::{Algorithm, ImageId};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::blob_file::BlobFile;
use super::item::StoreItem;
use super::refs::Seconds;
use super::{Checked, Listing};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::{Directory, DiskError, DiskRoom, length, on_disk};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::Tmp;
use image::digest::Digest;

/// Maximum length in bytes of the signatures, with their data, of one manifest.
pub const SIGNATURES_MAX: u64 = 16 << 20;

/// Time in seconds for which `gc` keeps the downloads of an unfinished pull: a week.
pub const PIN_SECONDS: i64 = 7 * 24 * 3600;

#[derive(Debug, Serialize, Deserialize)]
struct Pin {
    created: Seconds,
}

/// The first bytes of a blob. The file is locked, so that only this process appends to it.
#[derive(Debug)]
pub struct PartialBlob<'s> {
    shelf: &'s DownloadShelf,
    digest: Digest,
    file: File,
    length: u64,
    room: DiskRoom,
}

/// The lock of [`DownloadShelf::lock_signatures`].
#[derive(Debug)]
pub struct SignaturesLock(#[expect(dead_code, reason = "it is held, not used")] Directory);

/// The directory `blobs/`, with the files of pulls.
#[derive(Debug)]
pub struct DownloadShelf {
    pub(crate) directory: Directory,
    pub(crate) tmp: Arc<Tmp>,
    pub(crate) algorithm: Algorithm,
}

impl DownloadShelf {
    /// Returns a whole blob and its length in bytes. The bytes are not verified: compare them with the digest.
    ///
    /// # Errors
    /// [`DiskError`] if the blob cannot be opened.
    pub fn blob(&self, digest: &Digest) -> Result<Option<(File, u64)>, DiskError> {
        let found = self.directory.read(BlobFile::Whole(*digest).file_name())?;
        Ok(found.map(|(file, stat)| (file, length(&stat))))
    }

    /// Opens the partial blob, or creates an empty one. Returns `None` while another process appends to it.
    ///
    /// The bytes are not verified, and may be zeros after a crash: compare the digest of the whole blob.
    ///
    /// # Errors
    /// [`DiskError`] if the file cannot be opened or created.
    pub fn partial(&self, digest: &Digest) -> Result<Option<PartialBlob<'_>>, DiskError> {
        self.lock_partial(digest, OFlags::CREATE)
    }

    /// Opens a partial blob to remove it. Returns `None` if there is none, or while another process appends to it.
    pub(crate) fn existing_partial(
        &self,
        digest: &Digest,
    ) -> Result<Option<PartialBlob<'_>>, DiskError> {
        self.lock_partial(digest, OFlags::empty())
    }

    fn lock_partial(
        &self,
        digest: &Digest,
        create: OFlags,
    ) -> Result<Option<PartialBlob<'_>>, DiskError> {
        let name = BlobFile::Partial(*digest).file_name();
        let failed = |action, errno: Errno| self.directory.failed(action, &name, errno);
        let flags = create
            | OFlags::RDWR
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::NOCTTY
            | OFlags::CLOEXEC;
        loop {
            let mode = Mode::RUSR | Mode::WUSR;
            let fd = match rustix::fs::openat(&self.directory, &name, flags, mode) {
                Ok(fd) => fd,
                Err(Errno::NOENT) if create.is_empty() => return Ok(None),
                Err(errno) => return Err(failed("open", errno)),
            };
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed("lock", errno)),
            }
            let stat = rustix::fs::fstat(&fd).map_err(|errno| failed("stat", errno))?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                let odd = io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file");
                return Err(self.directory.failed("read", &name, odd));
            }
            // The file was removed or completed between opening and locking it.
            if stat.st_nlink == 0
                || self.directory.stat(&name)?.map(|it| it.st_ino) != Some(stat.st_ino)
            {
                continue;
            }
            let length = length(&stat);
            let room = self.tmp.room()?;
            let (shelf, digest, file) = (self, *digest, fd.into());
            return Ok(Some(PartialBlob { shelf, digest, file, length, room }));
        }
    }

    /// Protects the manifest, its config, the layers that the config names, and the blobs of a pull from `gc`, for
    /// [`PIN_SECONDS`] after `now` or until [`unpin`](Self::unpin).
    ///
    /// # Errors
    /// [`DiskError`] if the pin cannot be written.
    pub fn pin(&self, manifest: &Digest, now: Seconds) -> Result<(), DiskError> {
        let pin = record::encode(&Pin { created: now });
        self.tmp.replace(&self.directory, BlobFile::Pin(*manifest).file_name(), &pin)
    }

    /// Returns the manifests of pulls that run or were interrupted, in no particular order.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be read.
    pub fn pinned(&self) -> Result<Vec<Digest>, DiskError> {
        let pinned = |it| match it {
            BlobFile::Pin(manifest) => Some(manifest),
            _ => None,
        };
        Ok(self.list()?.names.into_iter().filter_map(pinned).collect())
    }

    /// Returns the bytes that [`set_signatures`](Self::set_signatures) stored for a manifest. They are not verified:
    /// the caller verifies the signatures in them.
    ///
    /// # Errors
    /// [`DiskError`] if the bytes cannot be read, or are more than [`SIGNATURES_MAX`].
    pub fn signatures(&self, manifest: &Digest) -> Result<Option<Vec<u8>>, DiskError> {
        self.directory.read_all(BlobFile::Signatures(*manifest).file_name(), SIGNATURES_MAX)
    }

    /// As [`signatures`](Self::signatures), but those of an image for its use without a manifest.
    ///
    /// # Errors
    /// As [`signatures`](Self::signatures).
    pub fn image_signatures(&self, image: &ImageId) -> Result<Option<Vec<u8>>, DiskError> {
        self.directory.read_all(BlobFile::ImageSignatures(*image).file_name(), SIGNATURES_MAX)
    }

    /// Waits until no other process changes signatures, and makes others wait until the lock is dropped. Lock before
    /// reading signatures that [`set_signatures`](Self::set_signatures) will replace.
    ///
    /// # Errors
    /// [`DiskError`] if the lock cannot be taken.
    pub fn lock_signatures(&self) -> Result<SignaturesLock, DiskError> {
        // The lock needs a separate descriptor, because flock belongs to the open file description. `tmp/` is locked as
        // commits lock it, because other users cannot open it in a shared store.
        let directory = self.tmp.open(".")?;
        directory.lock()?;
        Ok(SignaturesLock(directory))
    }

    /// Stores these bytes for a manifest, durably, and replaces earlier ones. `gc` removes them together with the
    /// manifest, so the manifest must be in the store with a name, or pinned.
    ///
    /// # Errors
    /// [`DiskError`] if the bytes cannot be written, or are more than [`SIGNATURES_MAX`].
    pub fn set_signatures(&self, manifest: &Digest, bytes: &[u8]) -> Result<(), DiskError> {
        self.write_signatures(BlobFile::Signatures(*manifest), bytes)
    }

    /// Stores these bytes for an image, durably, and replaces earlier ones. `gc` removes them together with the image.
    ///
    /// # Errors
    /// As [`set_signatures`](Self::set_signatures).
    pub fn set_image_signatures(&self, image: &ImageId, bytes: &[u8]) -> Result<(), DiskError> {
        self.write_signatures(BlobFile::ImageSignatures(*image), bytes)
    }

    fn write_signatures(&self, file: BlobFile, bytes: &[u8]) -> Result<(), DiskError> {
        if bytes.len() as u64 > SIGNATURES_MAX {
            let odd = io::Error::new(io::ErrorKind::FileTooLarge, "too many signatures");
            return Err(self.directory.failed("write", file.file_name(), odd));
        }
        self.tmp.replace(&self.directory, file.file_name(), bytes)
    }

    /// Removes a manifest's pin. Returns whether there was one.
    ///
    /// # Errors
    /// [`DiskError`] if the pin cannot be removed.
    pub fn unpin(&self, manifest: &Digest) -> Result<bool, DiskError> {
        self.directory.unlink(BlobFile::Pin(*manifest).file_name())
    }

    /// Whether the pin of this manifest is valid. A damaged pin is not valid, which is harmless because pins only save
    /// work.
    pub(crate) fn is_pinned(&self, manifest: &Digest, now: Seconds) -> Result<bool, DiskError> {
        let bytes = self.directory.read_all(BlobFile::Pin(*manifest).file_name(), RECORD_MAX)?;
        let pin: Option<Result<Pin, RecordError>> = bytes.map(|bytes| record::decode(&bytes));
        Ok(match pin {
            // If the clock was set back, the pin must not be valid forever.
            Some(Ok(pin)) => now.0.abs_diff(pin.created.0) <= PIN_SECONDS.unsigned_abs(),
            Some(Err(error)) => {
                tracing::warn!(%manifest, %error, "the pin of a pull is damaged");
                false
            }
            None => false,
        })
    }

    /// Whether a repair has removed data of an image, and the image has not been found complete since.
    ///
    /// # Errors
    /// [`DiskError`] if the mark cannot be looked up.
    pub fn is_lacking(&self, image: &ImageId) -> Result<bool, DiskError> {
        Ok(self.directory.stat(BlobFile::Lacking(*image).file_name())?.is_some())
    }

    /// Checks a whole blob, and returns the damage.
    fn blob_damage(&self, digest: &Digest) -> Result<Option<String>, FsckError> {
        let read = || -> io::Result<Option<Digest>> {
            let Some((mut file, _)) = self.blob(digest).map_err(io::Error::other)? else {
                return Ok(None);
            };
            let mut hasher = digest.hasher();
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok(Some(hasher.finish())),
                    read => hasher.update(&buffer[..read]),
                }
            }
        };
        Ok(match check_error::found(read())? {
            Ok(Some(actual)) if actual != *digest => {
                Some(format!("its bytes have the digest {actual}"))
            }
            Ok(_) => None,
            Err(why) => Some(why),
        })
    }

    /// Returns the bytes on disk of partial blobs and pins of unfinished pulls.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn unfinished(&self) -> Result<u64, DiskError> {
        let mut bytes = 0;
        for file in self.list()?.names {
            if matches!(file, BlobFile::Partial(_) | BlobFile::Pin(_)) {
                bytes += self.directory.stat(file.file_name())?.map_or(0, |stat| on_disk(&stat));
            }
        }
        Ok(bytes)
    }

    pub(crate) fn list(&self) -> Result<Listing<BlobFile>, DiskError> {
        Listing::read(&self.directory, |it| BlobFile::parse(it.text()?))
    }

    /// Checks a file, and returns the damage. Partial blobs, pins, signatures, hot packs, recorded starts and marks of
    /// lacking data are not checked.
    pub(crate) fn damage(&self, file: &BlobFile) -> Result<Option<String>, FsckError> {
        match file {
            BlobFile::Whole(digest) => self.blob_damage(digest),
            BlobFile::Chunks(diff_id) => self.chunks_damage(diff_id),
            BlobFile::Origins(image) => self.origins_damage(image),
            BlobFile::Traces(image) => self.traces_damage(image),
            BlobFile::Unproven(image) => self.unproven_damage(image),
            BlobFile::Index(manifest) => self.kept_index_damage(manifest),
            BlobFile::Partial(_)
            | BlobFile::Pin(_)
            | BlobFile::Signatures(_)
            | BlobFile::ImageSignatures(_)
            | BlobFile::Hot(_)
            | BlobFile::Start(_)
            | BlobFile::Lacking(_) => Ok(None),
        }
    }

    /// Checks all files, except partial blobs, pins, signatures, hot packs, recorded starts and marks of lacking data.
    pub(crate) fn check(&self, files: &[BlobFile]) -> Result<Checked, FsckError> {
        let mut checked = Checked::default();
        for file in files {
            let is_promised = !matches!(
                file,
                BlobFile::Partial(_)
                    | BlobFile::Pin(_)
                    | BlobFile::Signatures(_)
                    | BlobFile::ImageSignatures(_)
                    | BlobFile::Hot(_)
                    | BlobFile::Start(_)
                    | BlobFile::Lacking(_)
            );
            if is_promised {
                checked.add(StoreItem::Blob(*file), self.damage(file)?);
            }
        }
        Ok(checked)
    }

    /// Removes a file of `blobs/`, unless a pull is appending to it. Returns whether a file was removed.
    pub(crate) fn remove(&self, file: &BlobFile) -> Result<bool, DiskError> {
        if let BlobFile::Partial(digest) = file {
            return match self.existing_partial(digest)? {
                Some(partial) => partial.discard().map(|()| true),
                None => Ok(false),
            };
        }
        self.directory.unlink_sealed(file.file_name())
    }
}

impl PartialBlob<'_> {
    /// Number of bytes in the file.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Reads bytes at `offset`, and returns their number: 0 at the end.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    /// Appends bytes. After an error, the partial blob can only be discarded.
    ///
    /// # Errors
    /// [`DiskError`], most often because the disk is full.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), DiskError> {
        let room = self.room.take(bytes.len() as u64);
        room.map_err(|error| self.failed("write", error))?;
        self.file.write_all_at(bytes, self.length).map_err(|error| self.failed("write", error))?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Removes all bytes.
    pub fn restart(&mut self) -> Result<(), DiskError> {
        self.file.set_len(0).map_err(|error| self.failed("truncate", error))?;
        self.length = 0;
        Ok(())
    }

    /// Removes the file.
    pub fn discard(self) -> Result<(), DiskError> {
        self.shelf.directory.unlink(BlobFile::Partial(self.digest).file_name()).map(drop)
    }

    /// Makes this the whole blob, durably. The caller must have compared the digest of all bytes.
    pub fn finish(self) -> Result<(), DiskError> {
        let mode = Mode::RUSR | Mode::RGRP | Mode::ROTH;
        let changed = rustix::fs::fchmod(self.file.as_fd(), mode);
        changed.map_err(|errno| self.failed("chmod", errno.into()))?;
        self.file.sync_all().map_err(|error| self.failed("sync", error))?;
        let [from, to] =
            [BlobFile::Partial(self.digest), BlobFile::Whole(self.digest)].map(|it| it.file_name());
        self.shelf.directory.rename_over(from, &self.shelf.directory, to)?;
        self.shelf.directory.sync()
    }

    fn failed(&self, action: &'static str, source: io::Error) -> DiskError {
        self.shelf.directory.failed(action, BlobFile::Partial(self.digest).file_name(), source)
    }
}

#[cfg(test)]
mod tests;
