//! Objects and images that an import makes.

use std::io;

use image::verity::{Algorithm, DeviceId, Hasher, ImageId, ObjectId};

use super::Transaction;
use crate::disk::{DiskError, NewFile};
use crate::operation::OperationError;
use crate::shelf::devices::DeviceKind;

/// An error while an object, an image or a device is added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DraftError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The store uses another hash. An image's device table has room only for a SHA-256 digest.
    #[error(
        "this store names its objects by {0}, but devices need sha256: use --form objects, or another store"
    )]
    NoDevices(Algorithm),
    /// A tar device without a layer, or a packed device with one.
    #[error("cannot finish a device: {}", match .kind {
        DeviceKind::Packed => "a packed device must not name a layer",
        DeviceKind::Tar => "a tar device must name its layer",
    })]
    Layer { kind: DeviceKind },
    /// The added bytes and objects give another device than the sealed one.
    #[error("the layer and its files make device {actual}, not {expected}")]
    OtherDevice {
        /// The sealed device.
        expected: Box<DeviceId>,
        /// The device that the bytes and objects give.
        actual: Box<DeviceId>,
    },
    /// The device exists, but its index has another SHA-256 digest of an object.
    #[error(
        "device {device} has another SHA-256 digest of object {object}: run `quire fsck --repair`, which removes a \
        wrong one, then import the image again"
    )]
    OtherDigest { device: Box<DeviceId>, object: Box<ObjectId> },
}

/// Maximum bytes of a draft in memory before it gets a file. Most objects are smaller, and an object that the store
/// already has then needs no file.
const GATHERED_MAX: usize = 256 * 1024;

/// The file of an unfinished draft. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct Scrap<'t> {
    transaction: &'t Transaction<'t>,
    number: u64,
    kept: bool,
}

impl<'t> Scrap<'t> {
    pub(crate) fn new(transaction: &'t Transaction<'t>) -> Result<(Self, NewFile), DiskError> {
        let (number, file) = transaction.new_file()?;
        Ok((Self { transaction, number, kept: false }, file))
    }

    /// Returns the name of the file.
    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    /// Keeps the file, and returns its number.
    pub(crate) fn keep(mut self) -> u64 {
        self.kept = true;
        self.number
    }
}

impl Drop for Scrap<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.transaction.discard(self.number);
        }
    }
}

/// A file that is hashed while it is written.
#[derive(Debug)]
struct Spilled<'t> {
    scrap: Scrap<'t>,
    file: NewFile,
    hasher: Hasher,
}

impl<'t> Spilled<'t> {
    fn new(transaction: &'t Transaction<'t>) -> Result<Self, DiskError> {
        let (scrap, file) = Scrap::new(transaction)?;
        Ok(Self { scrap, file, hasher: Hasher::new(transaction.store().algorithm()) })
    }

    /// Writes and hashes the gathered bytes.
    fn take(&mut self, gathered: &mut Vec<u8>) -> Result<(), DiskError> {
        self.hasher.update(gathered);
        self.file.write_all(gathered)?;
        gathered.clear();
        Ok(())
    }

    fn zeros(&mut self, count: u64) -> Result<(), DiskError> {
        self.hasher.zeros(count);
        self.file.add_hole(count)
    }
}

/// An unfinished object. Dropping it removes its file.
#[derive(Debug)]
pub struct Draft<'t> {
    transaction: &'t Transaction<'t>,
    gathered: Vec<u8>,
    spilled: Option<Spilled<'t>>,
}

impl<'t> Draft<'t> {
    pub(crate) const fn new(transaction: &'t Transaction<'t>) -> Self {
        Self { transaction, gathered: Vec::new(), spilled: None }
    }

    /// Number of bytes so far.
    #[must_use]
    pub fn size(&self) -> u64 {
        let spilled = self.spilled.as_ref().map_or(0, |it| it.hasher.size());
        spilled + self.gathered.len() as u64
    }

    fn spill(&mut self) -> Result<(), DiskError> {
        let spilled = match &mut self.spilled {
            Some(spilled) => spilled,
            empty => empty.insert(Spilled::new(self.transaction)?),
        };
        spilled.take(&mut self.gathered)
    }

    /// Adds zeros. If they do not fit into the buffer, they become a hole, which takes no disk space and no time.
    ///
    /// # Errors
    /// The errors of a write.
    pub fn zeros(&mut self, count: u64) -> io::Result<()> {
        let gathered =
            usize::try_from(count).ok().and_then(|it| it.checked_add(self.gathered.len()));
        if let Some(length) = gathered.filter(|length| *length <= GATHERED_MAX) {
            self.gathered.resize(length, 0);
            return Ok(());
        }
        let added = self.spill().and_then(|()| match &mut self.spilled {
            Some(spilled) => spilled.zeros(count),
            None => unreachable!("it has just been made"),
        });
        added.map_err(|error| self.transaction.io_failed("an object", error))
    }

    /// Computes the object's id from its bytes. It becomes visible when the transaction is committed.
    ///
    /// # Errors
    /// [`DraftError`] if the object cannot be written.
    pub fn finish(mut self) -> Result<ObjectId, DraftError> {
        let transaction = self.transaction;
        let Some(mut spilled) = self.spilled.take() else {
            return transaction.object(&self.gathered);
        };
        let taken = spilled.take(&mut self.gathered);
        taken.map_err(|source| transaction.write_failed("an object", source))?;
        let Spilled { scrap, file, hasher } = spilled;
        let size = hasher.size();
        transaction.finish_object(scrap.keep(), file, hasher.finish().into(), size)
    }
}

impl io::Write for Draft<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = GATHERED_MAX - self.gathered.len();
        let taken = bytes.get(..room).unwrap_or(bytes);
        if taken.is_empty() && !bytes.is_empty() {
            let spilled = self.spill();
            spilled.map_err(|error| self.transaction.io_failed("an object", error))?;
            return self.write(bytes);
        }
        self.gathered.extend_from_slice(taken);
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes of an image gathered for one write.
const IMAGE_BUFFER: usize = 128 * 1024;

/// An unfinished image. Dropping it removes its file.
#[derive(Debug)]
pub struct ImageDraft<'t> {
    transaction: &'t Transaction<'t>,
    gathered: Vec<u8>,
    spilled: Spilled<'t>,
}

impl<'t> ImageDraft<'t> {
    pub(crate) fn new(transaction: &'t Transaction<'t>) -> Result<Self, DiskError> {
        let spilled = Spilled::new(transaction)?;
        Ok(Self { transaction, gathered: Vec::with_capacity(IMAGE_BUFFER), spilled })
    }

    /// Computes the image's id from its bytes. It becomes visible when the transaction is committed.
    ///
    /// # Errors
    /// [`DraftError`] if the image cannot be written.
    pub fn finish(mut self) -> Result<ImageId, DraftError> {
        let transaction = self.transaction;
        let taken = self.spilled.take(&mut self.gathered);
        taken.map_err(|source| transaction.write_failed("an image", source))?;
        let Spilled { scrap, file, hasher } = self.spilled;
        let size = hasher.size();
        transaction.finish_image(scrap.keep(), file, hasher.finish().into(), size)
    }
}

impl io::Write for ImageDraft<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = IMAGE_BUFFER - self.gathered.len();
        let taken = bytes.get(..room).unwrap_or(bytes);
        if taken.is_empty() && !bytes.is_empty() {
            let spilled = self.spilled.take(&mut self.gathered);
            spilled.map_err(|error| self.transaction.io_failed("an image", error))?;
            return self.write(bytes);
        }
        self.gathered.extend_from_slice(taken);
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
