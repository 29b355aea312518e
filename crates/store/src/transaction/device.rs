//! Devices that an import makes from new data, or from sealed lazy devices.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use image::verity::{Algorithm, DeviceId, Hasher, ObjectId};

use super::Transaction;
use super::draft::{DraftError, Scrap};
use crate::disk::{DiskError, NewFile};
use crate::operation::OperationError;
use crate::shelf::devices::{
    Builder, DATA_BLOCK, DeviceKind, Entry, Header, ObjectPiece, PieceKey, Record, StoredDevice,
    key,
};
use image::digest::Digest;

/// Bytes gathered for one write.
const BUFFER: usize = 256 << 10;
const ZEROS: [u8; 4096] = [0; 4096];
/// Name of a device in messages.
pub(crate) const WHAT: &str = "a device";

/// An unfinished device. Write its bytes, and [`add`](Self::add) the objects in them. Dropping it removes its file.
#[derive(Debug)]
pub struct DeviceDraft<'t> {
    transaction: &'t Transaction<'t>,
    kind: DeviceKind,
    layer: Option<Digest>,
    target: Target<'t>,
    /// The file, opened for reading back.
    written: File,
    hasher: Hasher,
    gathered: Vec<u8>,
    index: Builder,
    /// Error of an object with an invalid id, which [`finish`](Self::finish) returns.
    failed: Option<io::Error>,
}

/// Destination of an unfinished device's bytes.
#[derive(Debug)]
enum Target<'t> {
    New {
        scrap: Scrap<'t>,
        file: NewFile,
    },
    /// A sealed device, which has the bytes already.
    Sealed(DeviceId),
}

impl<'t> DeviceDraft<'t> {
    pub(crate) fn new(
        transaction: &'t Transaction<'t>,
        kind: DeviceKind,
    ) -> Result<Self, DraftError> {
        let disk = |source| transaction.write_failed(WHAT, source);
        let (scrap, file) = Scrap::new(transaction).map_err(disk)?;
        let written = transaction.read_back(scrap.number()).map_err(disk)?;
        Self::from_file(transaction, kind, Target::New { scrap, file }, written)
    }

    /// Begins a device from a sealed one, whose file is `written`.
    pub(super) fn sealed(
        transaction: &'t Transaction<'t>,
        id: DeviceId,
        written: File,
    ) -> Result<Self, DraftError> {
        Self::from_file(transaction, DeviceKind::Tar, Target::Sealed(id), written)
    }

    fn from_file(
        transaction: &'t Transaction<'t>,
        kind: DeviceKind,
        target: Target<'t>,
        written: File,
    ) -> Result<Self, DraftError> {
        let algorithm = transaction.store().algorithm();
        if algorithm != Algorithm::Sha256 {
            return Err(DraftError::NoDevices(algorithm));
        }
        Ok(Self {
            transaction,
            kind,
            layer: None,
            target,
            written,
            hasher: Hasher::new(algorithm),
            gathered: Vec::with_capacity(BUFFER),
            index: Builder::default(),
            failed: None,
        })
    }

    /// Number of bytes so far, which is the offset of the next one.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.hasher.size() + self.gathered.len() as u64
    }

    #[must_use]
    pub const fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Adds zeros up to the next block boundary.
    ///
    /// # Errors
    /// [`DraftError`] if the zeros cannot be written.
    pub fn align(&mut self) -> Result<(), DraftError> {
        self.align_to(DATA_BLOCK)
    }

    /// Adds zeros up to the next multiple of `unit`, at most 4096.
    ///
    /// # Errors
    /// [`DraftError`] if the zeros cannot be written.
    pub fn align_to(&mut self, unit: u64) -> Result<(), DraftError> {
        let over = self.position() % unit;
        let missing = usize::try_from((unit - over) % unit).unwrap_or(0);
        let taken = self.take(&ZEROS[..missing]);
        taken.map_err(|source| self.transaction.write_failed(WHAT, source))
    }

    /// Adds an object at `offset`, in bytes. For an empty object, the offset is ignored. An object may be at several
    /// offsets.
    ///
    /// [`finish`](Self::finish) checks that the object begins at a block boundary, is within the device and does not
    /// overlap another one. `fsck` checks its bytes.
    pub fn add(&mut self, object: ObjectId, sha256: [u8; 32], offset: u64, size: u64) {
        let Some(id) = key(&object) else {
            self.failed = Some(io::Error::new(
                io::ErrorKind::InvalidInput,
                "an object id is SHA-512, and devices need SHA-256",
            ));
            return;
        };
        let offset = if size == 0 { 0 } else { offset };
        self.index.add(Entry { id, offset, size, sha256 });
    }

    /// Adds an object that consists of other objects, which may be in any device of the store. Pieces in this device
    /// must also be [`add`](Self::add)ed.
    ///
    /// [`finish`](Self::finish) checks that the pieces add up to the object's size. `fsck` checks their bytes.
    pub fn add_pieces(
        &mut self,
        object: ObjectId,
        sha256: [u8; 32],
        size: u64,
        pieces: &[ObjectPiece],
    ) {
        let named = pieces.iter().map(|it| {
            let id = it.object.as_ref().map(|it| key(it).ok_or(())).transpose()?;
            Ok(PieceKey { id, len: it.len })
        });
        match (key(&object), named.collect::<Result<Vec<_>, ()>>()) {
            (Some(id), Ok(pieces)) => self.index.add_record(Record { id, sha256, size, pieces }),
            _ => {
                let text = "an object id is SHA-512, and devices need SHA-256";
                self.failed = Some(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        }
    }

    pub fn set_layer(&mut self, diff_id: Digest) {
        self.layer = Some(diff_id);
    }

    /// Fills `buffer` with bytes that were already written, at `offset`.
    ///
    /// # Errors
    /// The errors of `pread`, and `UnexpectedEof` if fewer bytes were written.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let on_disk = self.hasher.size();
        let end = offset.checked_add(buffer.len() as u64).filter(|it| *it <= self.position());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let split = on_disk.clamp(offset, end);
        let first = usize::try_from(split - offset).map_err(io::Error::other)?;
        let (first, second) = buffer.split_at_mut(first);
        self.written.read_exact_at(first, offset)?;
        if !second.is_empty() {
            let from = usize::try_from(split - on_disk).map_err(io::Error::other)?;
            second.copy_from_slice(&self.gathered[from..from + second.len()]);
        }
        Ok(())
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<(), DiskError> {
        while !bytes.is_empty() {
            if self.gathered.len() == BUFFER {
                self.flush_gathered()?;
            }
            let room = (BUFFER - self.gathered.len()).min(bytes.len());
            self.gathered.extend_from_slice(&bytes[..room]);
            bytes = &bytes[room..];
        }
        Ok(())
    }

    fn flush_gathered(&mut self) -> Result<(), DiskError> {
        if let Target::New { file, .. } = &mut self.target {
            file.write_all(&self.gathered)?;
        }
        self.hasher.update(&self.gathered);
        self.gathered.clear();
        Ok(())
    }

    /// Pads the device to a whole block, and computes its id from its bytes. It becomes visible when the transaction
    /// is committed. If the store then already has an equal device with all of these objects, the existing device is
    /// kept.
    ///
    /// # Errors
    /// [`DraftError`] if the device cannot be written, or an object has an invalid offset.
    pub fn finish(mut self) -> Result<StoredDevice, DraftError> {
        let transaction = self.transaction;
        self.align()?;
        let imprint = self.index.imprint(self.kind, self.layer.as_ref());
        let taken = self.take(&imprint);
        taken.map_err(|source| transaction.write_failed(WHAT, source))?;
        let flushed = self.flush_gathered();
        flushed.map_err(|source| transaction.write_failed(WHAT, source))?;
        let Self { kind, layer, target, hasher, index, failed, .. } = self;
        let bytes = hasher.size();
        let id = hasher.finish();
        if (kind == DeviceKind::Tar) != layer.is_some() {
            transaction.fail();
            return Err(DraftError::Layer { kind });
        }
        let encoded = match failed {
            Some(error) => Err(error),
            None => index.encode(&Header { kind, bytes, dropped: 0, layer }),
        };
        let encoded = encoded.map_err(|source| {
            transaction.fail();
            OperationError::of("make the index of device", DeviceId::from(id))(source)
        })?;
        drop(self.written);
        let device = StoredDevice { id: id.into(), bytes, kind };
        match target {
            Target::New { scrap, file } => {
                drop(file);
                transaction.finish_device(Some(scrap), device, &encoded)?;
            }
            // The digests are equal, so the bytes are equal.
            Target::Sealed(expected) if expected == device.id => {
                transaction.finish_device(None, device, &encoded)?;
            }
            Target::Sealed(expected) => {
                transaction.fail();
                let (expected, actual) = (Box::new(expected), Box::new(device.id));
                return Err(DraftError::OtherDevice { expected, actual });
            }
        }
        Ok(device)
    }
}

impl io::Write for DeviceDraft<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.take(bytes);
        taken.map_err(|error| self.transaction.io_failed(WHAT, error))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
