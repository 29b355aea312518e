//! Opens images to mount or read them.

mod presence;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use image::digest::Digest;
use image::verity::{DeviceId, Hasher, ImageId, VerityDigest};
use kernel::verity::{Measured, measure};

use crate::disk::DiskError;
use crate::operation::OperationError;
use crate::resolve::Resolved;
use crate::shelf::data_error::DataError;
use crate::shelf::images::{self, ContentsError, ImageFile, LackingData};
use crate::shelf::objects::ObjectLookupError;
use crate::shelf::refs::Form;
use crate::store::Store;

/// An error while opening an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenImageError {
    #[error("the store has no image {0}")]
    Absent(ImageId),
    /// The fs-verity digest of the image file differs from the image's id.
    #[error("image {expected} is damaged: its fs-verity digest is {actual}")]
    Mismatch {
        expected: ImageId,
        /// Digest that the kernel measured.
        actual: Box<ImageId>,
    },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A native image without a header, or with a header of an earlier format. The image is damaged, or was written
    /// before the first release.
    #[error(
        "image {0} has no header of this version: it is damaged, or an earlier version of Quire wrote it; \
         pull or import it again"
    )]
    Earlier(ImageId),
    #[error(
        "image {0} cannot be used from a store: its device table has an entry without a device id"
    )]
    Foreign(ImageId),
    /// The store has some of the image's devices only as lazy devices.
    #[error(
        "the devices of image {0} are not downloaded yet: mount it with --lazy, or pull it \
        without --lazy"
    )]
    Partial(ImageId),
    /// The image came with an index and has not been compared with its layers.
    #[error(
        "image {0} comes from an index, and is not compared with its layers yet: `quire \
        mount`, `quire run` or another `quire pull` of its name compares it"
    )]
    Unproven(ImageId),
    /// A repair removed data of the image, or found that data is lost.
    #[error(
        "image {image} lacks the data of {files} {}, for example of \"{}\" ({data}): `quire fsck \
        --repair` or `quire pull` of the image's name fetches it again; without a registry, \
        import the image again",
        if *files == 1 { "file" } else { "files" }, path.escape_ascii()
    )]
    Lacking {
        image: ImageId,
        /// Number of files with missing data.
        files: usize,
        /// Path of the first such file.
        path: Vec<u8>,
        data: Box<LackingData>,
    },
    /// The fs-verity digest of a device differs from the device's id.
    #[error("device {expected} is damaged: its fs-verity digest is {actual}")]
    DeviceMismatch {
        expected: Box<DeviceId>,
        /// Digest that the kernel measured.
        actual: Box<DeviceId>,
    },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// An error while comparing an image with its id.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("cannot read image {image}")]
    Read { image: ImageId, source: io::Error },
    /// The bytes of the image file have another digest.
    #[error("image {expected} is damaged: its digest is {actual}")]
    Damaged {
        expected: ImageId,
        /// Digest of the file's bytes.
        actual: Box<ImageId>,
    },
}

/// Whether all data of an image is in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// Every byte is in the store.
    Complete,
    /// The store has some devices only as lazy devices, which are filled on demand.
    Partial,
    /// Every byte is in the store, but the image came with an index and has not been compared with its layers, so it
    /// cannot be opened for use.
    Unproven,
}

/// Provides lazy devices that are filled while they are read.
pub trait LendDevices {
    /// Returns a device, open for reading. Reads wait for bytes that are not downloaded, and fail if the download
    /// fails.
    fn lend(&self, device: &DeviceId) -> Result<File, Box<dyn std::error::Error + Send + Sync>>;
}

/// An image, ready to mount: the descriptors that a mount needs.
///
/// As long as `image` or a duplicate of it is open, or a kernel mount of it exists, `gc` keeps the image, its objects
/// and its devices.
#[derive(Debug)]
pub struct OpenImage {
    pub id: ImageId,
    /// The EROFS file, open for reading.
    pub image: ImageFile,
    /// Storage form of the image's data.
    pub form: Form,
    /// Devices of a native image, in the order of its device table; empty for a composefs image.
    pub devices: Vec<OpenDevice>,
    /// Descriptor of the directory `objects/`, for the mount option `datadir+`.
    pub objects: OwnedFd,
    /// Descriptor of the directory `absent/` for a composefs image. As the last `datadir+` of a mount, it makes access
    /// to a missing object fail with an error, instead of showing a file that does not exist. `None` if the store has
    /// no such directory.
    pub absent: Option<OwnedFd>,
    /// Whether the kernel checks every read of the image file and of each device against its id.
    pub kernel_verity: bool,
    /// Whether all data of the image is in the store.
    pub presence: Presence,
    /// Read-ahead of a mount of the image, in KiB; `None` for the usual one.
    pub read_ahead: Option<u32>,
}

/// An image opened to read its names but not the contents of its files, so its devices may be incomplete.
#[derive(Debug)]
pub struct NamedImage {
    pub id: ImageId,
    /// The EROFS file, open for reading.
    pub image: ImageFile,
    /// Storage form of the image's data.
    pub form: Form,
    /// Id and length in bytes of each device, in the order of the device table.
    pub devices: Vec<(DeviceId, u64)>,
    /// Whether the kernel checks every read of the image file and of each device.
    pub kernel_verity: bool,
    /// Whether all data of the image is in the store.
    pub presence: Presence,
}

/// A device of an image, open for reading, with the id and length that the image states.
#[derive(Debug)]
pub struct OpenDevice {
    pub id: DeviceId,
    pub file: File,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether the kernel checks every read of the device against `id`.
    pub kernel_verity: bool,
    /// Whether [`LendDevices`] provided the device, so that it is filled while it is read.
    pub is_lent: bool,
}

impl OpenImage {
    /// Compares the bytes of the image file with its id, even if the kernel also verifies them.
    ///
    /// # Errors
    /// [`VerifyError`] if the file cannot be read or does not match.
    pub fn verify(&self) -> Result<(), VerifyError> {
        let mut hasher = Hasher::new(self.id.algorithm());
        let mut buffer = vec![0; 1 << 20];
        let (mut at, size) = (0, self.image.size());
        while at < size {
            let count = usize::try_from(size - at).map_or(buffer.len(), |it| it.min(buffer.len()));
            let read = self.image.read_exact_at(&mut buffer[..count], at);
            read.map_err(|source| VerifyError::Read { image: self.id, source })?;
            hasher.update(&buffer[..count]);
            at += count as u64;
        }
        let actual = hasher.finish();
        if actual == *self.id.digest() {
            return Ok(());
        }
        Err(VerifyError::Damaged { expected: self.id, actual: Box::new(actual.into()) })
    }
}

pub(crate) fn digest_of(measured: &Measured) -> VerityDigest {
    let id = match measured {
        Measured::Sha256(bytes) => VerityDigest::from_bytes(bytes),
        Measured::Sha512(bytes) => VerityDigest::from_bytes(bytes),
    };
    id.expect("32 or 64 bytes")
}

impl Store {
    /// Opens an image to mount or read it.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent, is not a regular file, or has another fs-verity digest.
    pub fn open_image(&self, id: &ImageId) -> Result<OpenImage, OpenImageError> {
        self.open_proven(id, None, None)
    }

    /// Opens an image for one of its manifests. The layers of that manifest must give the image; claims of other
    /// manifests do not count.
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image).
    pub fn open_found(&self, found: &Resolved) -> Result<OpenImage, OpenImageError> {
        self.open_proven(&found.image, found.manifest.as_ref(), None)
    }

    /// As [`open_found`](Self::open_found), to mount the image. If the store has a device only as a lazy device,
    /// `lender` provides it.
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image), and if `lender` fails.
    pub fn open_lazy_found(
        &self,
        found: &Resolved,
        lender: &dyn LendDevices,
    ) -> Result<OpenImage, OpenImageError> {
        self.open_proven(&found.image, found.manifest.as_ref(), Some(lender))
    }

    /// Opens an image to read the names in it. Its devices may be lazy devices.
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image), except [`OpenImageError::Partial`] and [`OpenImageError::Unproven`].
    pub fn open_names(&self, id: &ImageId) -> Result<NamedImage, OpenImageError> {
        // The opened files are dropped unread.
        let opened = self.open_with(id, None, Some(&Unread(self)))?;
        Ok(NamedImage {
            id: opened.id,
            image: opened.image,
            form: opened.form,
            devices: opened.devices.iter().map(|it| (it.id, it.bytes)).collect(),
            kernel_verity: opened.kernel_verity,
            presence: opened.presence,
        })
    }

    /// Refuses an image that is complete but was not compared with its layers. While devices are lazy, the digests of
    /// units verify the image's bytes. A complete image can be compared as a whole, so this is required.
    fn open_proven(
        &self,
        id: &ImageId,
        manifest: Option<&Digest>,
        lender: Option<&dyn LendDevices>,
    ) -> Result<OpenImage, OpenImageError> {
        let opened = self.open_with(id, manifest, lender)?;
        match opened.presence {
            Presence::Unproven => Err(OpenImageError::Unproven(*id)),
            Presence::Complete | Presence::Partial => Ok(opened),
        }
    }

    fn open_with(
        &self,
        id: &ImageId,
        manifest: Option<&Digest>,
        lender: Option<&dyn LendDevices>,
    ) -> Result<OpenImage, OpenImageError> {
        self.objects.check_algorithm(id).map_err(OperationError::of("look for image", id))?;
        // `gc` checks under its lock whether an image is open. So either `gc` notices this descriptor, or this process
        // finds that the image does not exist.
        let lock = self.lock_shared()?;
        let image = self.images.open(id)?.ok_or(OpenImageError::Absent(*id))?;
        let (form, devices) = self.open_devices(id, &image, lender)?;
        let presence = match devices.iter().any(|it| it.is_lent) {
            true => Presence::Partial,
            false => self.presence_of_complete(id, manifest)?,
        };
        drop(lock);
        let kernel_verity = match measure(image.fd()) {
            Ok(Some(measured)) => {
                let actual = ImageId::new(digest_of(&measured));
                if actual != *id {
                    return Err(OpenImageError::Mismatch {
                        expected: *id,
                        actual: Box::new(actual),
                    });
                }
                true
            }
            // fs-verity is not enabled for the file, or the file system does not support it. The caller's policy
            // decides whether to accept that.
            Ok(None) | Err(_) => false,
        };
        let directory = &self.objects.directory;
        let objects = directory.as_fd().try_clone_to_owned();
        let objects = objects.map_err(|error| directory.failed("duplicate", "", error))?;
        Ok(OpenImage {
            id: *id,
            image,
            form,
            objects,
            absent: match form {
                Form::Objects => self.absent(),
                Form::Packed | Form::Tar => None,
            },
            kernel_verity: kernel_verity && devices.iter().all(|it| it.kernel_verity),
            presence,
            devices,
            read_ahead: None,
        })
    }

    /// Opens every device in the image's device table. The caller holds the lock.
    fn open_devices(
        &self,
        id: &ImageId,
        image: &ImageFile,
        lender: Option<&dyn LendDevices>,
    ) -> Result<(Form, Vec<OpenDevice>), OpenImageError> {
        let table = images::devices(image);
        let table = table.map_err(table_failed(id))?;
        let form = table.form.ok_or(OpenImageError::Earlier(*id))?;
        kernel::files::allow_open(table.uses.len());
        let mut devices = Vec::with_capacity(table.uses.len());
        for used in &table.uses {
            let device = used.device.ok_or(OpenImageError::Foreign(*id))?;
            let opened = match self.devices.open(&device, used.bytes) {
                Err(ObjectLookupError::Data(DataError::Absent(_)))
                    if self.lazy_devices.file(&device).is_some() =>
                {
                    let lender = lender.ok_or(OpenImageError::Partial(*id))?;
                    devices.push(lent(*id, device, used.bytes, lender)?);
                    continue;
                }
                // A lazy device may have become complete, and may have been moved, between the two lookups.
                Err(ObjectLookupError::Data(DataError::Absent(_))) => {
                    self.devices.open(&device, used.bytes)
                }
                opened => opened,
            };
            let (file, _) = match opened {
                Ok(opened) => opened,
                Err(source) => {
                    return Err(device_failed(id)(source).into());
                }
            };
            let kernel_verity = match measure(file.as_fd()) {
                Ok(Some(measured)) if digest_of(&measured) != *device.digest() => {
                    let actual = DeviceId::new(digest_of(&measured));
                    let (expected, actual) = (Box::new(device), Box::new(actual));
                    return Err(OpenImageError::DeviceMismatch { expected, actual });
                }
                Ok(measured) => measured.is_some(),
                Err(_) => false,
            };
            let bytes = used.bytes;
            devices.push(OpenDevice { id: device, file, bytes, kernel_verity, is_lent: false });
        }
        Ok((form, devices))
    }
}

/// Returns an adapter for errors of the superblock or the device table.
pub(crate) fn table_failed(image: &ImageId) -> impl Fn(ContentsError) -> OperationError {
    move |error| {
        let object =
            format_args!("the device table of image {image}; `quire fsck` shows the damage");
        OperationError::of("read", object)(error)
    }
}

fn device_failed(image: &ImageId) -> impl Fn(ObjectLookupError) -> OperationError {
    move |error| {
        let object = format_args!("a device of image {image}; `quire fsck` shows the damage");
        OperationError::of("open", object)(error)
    }
}

/// Returns lazy devices as they are, for callers that do not read them.
struct Unread<'a>(&'a Store);

impl LendDevices for Unread<'_> {
    fn lend(&self, device: &DeviceId) -> Result<File, Box<dyn std::error::Error + Send + Sync>> {
        let found = self.0.lazy_devices.open(device)?;
        Ok(found.ok_or("it was removed while it was opened")?.0)
    }
}

/// Opens a device that a filler provides, and checks that it has the length that the image states.
fn lent(
    image: ImageId,
    id: DeviceId,
    bytes: u64,
    lender: &dyn LendDevices,
) -> Result<OpenDevice, OpenImageError> {
    let object = format!("device {id}, which is not completely downloaded");
    let failed = OperationError::of("use", &object);
    let file = lender.lend(&id).map_err(failed)?;
    let found = file.metadata().map_err(|error| failed(error.into()))?;
    if found.len() != bytes {
        let source = DataError::Length { device: id, expected: bytes, actual: found.len() };
        return Err(device_failed(&image)(source.into()).into());
    }
    Ok(OpenDevice { id, file, bytes, kernel_verity: false, is_lent: true })
}
