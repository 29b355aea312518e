//! An image, ready to mount.

mod presence;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use image::digest::Digest;
use image::verity::{DeviceId, Hasher, ImageId, VerityDigest};
use kernel::verity::{Measured, measure};

use crate::disk::DiskError;
use crate::resolve::Resolved;
use crate::shelf::data_error::DataError;
use crate::shelf::images::{self, ContentsError, ImageFile, LackingData};
use crate::shelf::objects::LookupError;
use crate::shelf::refs::Form;
use crate::store::Store;

/// Why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenImageError {
    /// The store has no such image.
    #[error("the store has no image {0}")]
    Absent(ImageId),
    /// The kernel enforces a digest other than the image's id.
    #[error("image {expected} is damaged: its fs-verity digest is {actual}")]
    Mismatch {
        /// The expected id.
        expected: ImageId,
        /// The digest that the kernel measured.
        actual: Box<ImageId>,
    },
    /// An id that cannot be in this store.
    #[error("cannot look for image {id}")]
    Id {
        /// The image.
        id: ImageId,
        /// The cause.
        source: Box<LookupError>,
    },
    /// The superblock or the device table cannot be read.
    #[error("cannot read the device table of image {image}; `quire fsck` shows what is damaged")]
    Devices {
        /// The image.
        image: ImageId,
        /// The cause.
        source: ContentsError,
    },
    /// A native image without a header, or with an earlier one: damaged, or from before the first release.
    #[error(
        "image {0} has no header of this version: it is damaged, or an earlier version of Quire wrote it; \
         pull or import it again"
    )]
    Earlier(ImageId),
    /// A slot of the device table has no device id.
    #[error(
        "image {0} cannot be used from a store: its device table has a slot without a device id"
    )]
    Foreign(ImageId),
    /// A device that it needs cannot be used.
    #[error("cannot open a device of image {image}; `quire fsck` shows what is damaged")]
    Device {
        /// The image.
        image: ImageId,
        /// The cause.
        source: Box<LookupError>,
    },
    /// The store has some of its devices only as lazy ones.
    #[error(
        "the devices of image {0} are not here yet: mount it with --lazy, or pull it without --lazy"
    )]
    Partial(ImageId),
    /// It came with an index, and was not compared with its layers.
    #[error(
        "image {0} came with an index, and has not been compared with its layers yet: \
         `quire mount`, `quire run` or another `quire pull` of its name does that"
    )]
    Unproven(ImageId),
    /// A repair has removed data of it, or found that it is lost.
    #[error(
        "image {image} lacks the data of {files} {}, of \"{}\" for one ({data}): `quire fsck --repair` fetches it from where the \
         image came from, or `quire pull` of the image's name does; without a registry, import the image again",
        if *files == 1 { "file" } else { "files" }, path.escape_ascii()
    )]
    Lacking {
        /// The image.
        image: ImageId,
        /// Number of files that lack something.
        files: usize,
        /// Path of the first one.
        path: Vec<u8>,
        /// The missing data.
        data: Box<LackingData>,
    },
    /// A device is filled on demand, and who fills it does not lend it.
    #[error("cannot use device {device}, which is not here as a whole")]
    Lend {
        /// The device.
        device: DeviceId,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel enforces a digest for a device other than the device's id.
    #[error("device {expected} is damaged: its fs-verity digest is {actual}")]
    DeviceMismatch {
        /// The expected id.
        expected: Box<DeviceId>,
        /// The digest that the kernel measured.
        actual: Box<DeviceId>,
    },
    /// An error of the disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Why an image does not match its id.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Its file cannot be read.
    #[error("cannot read image {image}")]
    Read {
        /// Its id.
        image: ImageId,
        /// The error of the disk.
        source: io::Error,
    },
    /// Its bytes are those of another image.
    #[error("image {expected} is damaged: its bytes are those of {actual}")]
    Damaged {
        /// Its id.
        expected: ImageId,
        /// The digest of its bytes.
        actual: Box<ImageId>,
    },
}

/// Whether all data of an image is in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// Every byte is in the store.
    Complete,
    /// The store has some devices only as lazy ones, which are filled on demand.
    Partial,
    /// Every byte is in the store. The image came with an index, and was not compared with its layers: it cannot be
    /// opened to use it.
    Unproven,
}

/// Who fills lazy devices while they are read.
pub trait LendDevices {
    /// A device, open for reading. Its readers wait for bytes that are not there, and get an error where these do not come.
    ///
    /// # Errors
    /// Why it cannot be had.
    fn lend(&self, device: &DeviceId) -> Result<File, Box<dyn std::error::Error + Send + Sync>>;
}

/// An image, ready to mount: the descriptors that a mount needs.
///
/// As long as `image` or a copy of it is open, or a kernel mount made from it lives, `gc` keeps
/// the image, its objects and its devices.
#[derive(Debug)]
pub struct OpenImage {
    /// Its id.
    pub id: ImageId,
    /// The EROFS file, open for reading.
    pub image: ImageFile,
    /// Storage form of its data.
    pub form: Form,
    /// The devices that a native image needs, in the order of its devices; none for a composefs image.
    pub devices: Vec<OpenDevice>,
    /// The directory `objects/`, for `datadir+`.
    pub objects: OwnedFd,
    /// For a composefs image the directory `absent/`: the last `datadir+`, by which an object that is gone is an error and
    /// not a file that does not exist. `None` where the store has none.
    pub absent: Option<OwnedFd>,
    /// Whether the kernel checks every read of the image file against `id`, and of each device against its id.
    pub kernel_verity: bool,
    /// Whether all objects are in the store.
    pub presence: Presence,
}

/// An image whose names are read, and not the contents of its files: its devices need not be here.
#[derive(Debug)]
pub struct NamedImage {
    /// Its id.
    pub id: ImageId,
    /// The EROFS file, open for reading.
    pub image: ImageFile,
    /// Storage form of its data.
    pub form: Form,
    /// Id of each device and its length in bytes, in the order of its devices.
    pub devices: Vec<(DeviceId, u64)>,
    /// Whether the kernel checks every read of the image file and of each device.
    pub kernel_verity: bool,
    /// Whether all of its devices are here.
    pub presence: Presence,
}

/// A device of an image, open for reading. Its id and length are those that the image states.
#[derive(Debug)]
pub struct OpenDevice {
    /// Its id.
    pub id: DeviceId,
    /// Its file.
    pub file: File,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether the kernel checks every read of it.
    pub kernel_verity: bool,
    /// Whether somebody fills it while it is read.
    pub is_lent: bool,
}

impl OpenImage {
    /// Compares the bytes of the image file with its id, even if the kernel checks them too.
    ///
    /// # Errors
    /// [`VerifyError`] when the file cannot be read, or does not match.
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
    /// [`OpenImageError`] when it is absent, not a regular file, or the kernel measures another digest.
    pub fn open_image(&self, id: &ImageId) -> Result<OpenImage, OpenImageError> {
        self.open_proven((id, None), None)
    }

    /// Opens an image as that of the manifest that was found: its layers make it, whatever other manifests claim.
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image).
    pub fn open_found(&self, found: &Resolved) -> Result<OpenImage, OpenImageError> {
        self.open_proven((&found.image, found.manifest.as_ref()), None)
    }

    /// The same, to mount it. Devices that the store has only as lazy ones are lent by who fills them.
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image), and [`OpenImageError::Lend`].
    pub fn open_lazy_found(
        &self,
        found: &Resolved,
        lender: &dyn LendDevices,
    ) -> Result<OpenImage, OpenImageError> {
        self.open_proven((&found.image, found.manifest.as_ref()), Some(lender))
    }

    /// Opens an image to read the names in it. Devices that the store has only as lazy ones are as good as others.
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image), but for [`OpenImageError::Partial`] and [`OpenImageError::Unproven`].
    pub fn open_names(&self, id: &ImageId) -> Result<NamedImage, OpenImageError> {
        // Nobody gets to read the files that it lends.
        let opened = self.open_with((id, None), Some(&Unread(self)))?;
        Ok(NamedImage {
            id: opened.id,
            image: opened.image,
            form: opened.form,
            devices: opened.devices.iter().map(|it| (it.id, it.bytes)).collect(),
            kernel_verity: opened.kernel_verity,
            presence: opened.presence,
        })
    }

    /// Unit digests prove what readers wait for. An image of which nothing is missing can be compared as a whole, so it has
    /// to be.
    fn open_proven(
        &self,
        image: (&ImageId, Option<&Digest>),
        lender: Option<&dyn LendDevices>,
    ) -> Result<OpenImage, OpenImageError> {
        let opened = self.open_with(image, lender)?;
        match opened.presence {
            Presence::Unproven => Err(OpenImageError::Unproven(*image.0)),
            Presence::Complete | Presence::Partial => Ok(opened),
        }
    }

    fn open_with(
        &self,
        (id, manifest): (&ImageId, Option<&Digest>),
        lender: Option<&dyn LendDevices>,
    ) -> Result<OpenImage, OpenImageError> {
        self.objects
            .check_algorithm(id)
            .map_err(|source| OpenImageError::Id { id: *id, source: Box::new(source) })?;
        // gc asks, under its lock, whether an image is open. So either it sees ours, or we see
        // that the image is gone.
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
            // Not sealed, or a file system without fs-verity. The caller's policy decides.
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
        })
    }

    /// Opens every device that the image has as a device; the lock is held.
    fn open_devices(
        &self,
        id: &ImageId,
        image: &ImageFile,
        lender: Option<&dyn LendDevices>,
    ) -> Result<(Form, Vec<OpenDevice>), OpenImageError> {
        let table = images::devices(image);
        let table = table.map_err(|source| OpenImageError::Devices { image: *id, source })?;
        let form = table.form.ok_or(OpenImageError::Earlier(*id))?;
        kernel::files::allow_open(table.uses.len());
        let mut devices = Vec::with_capacity(table.uses.len());
        for used in &table.uses {
            let device = used.device.ok_or(OpenImageError::Foreign(*id))?;
            let opened = match self.devices.open(&device, used.bytes) {
                Err(LookupError::Data(DataError::Absent(_)))
                    if self.lazy_devices.file(&device).is_some() =>
                {
                    let lender = lender.ok_or(OpenImageError::Partial(*id))?;
                    devices.push(lent(*id, device, used.bytes, lender)?);
                    continue;
                }
                // It may have become complete, and moved, between the two looks.
                Err(LookupError::Data(DataError::Absent(_))) => {
                    self.devices.open(&device, used.bytes)
                }
                opened => opened,
            };
            let (file, _) = match opened {
                Ok(opened) => opened,
                Err(source) => {
                    let source = Box::new(source);
                    return Err(OpenImageError::Device { image: *id, source });
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

/// Lends lazy devices as they are.
struct Unread<'a>(&'a Store);

impl LendDevices for Unread<'_> {
    fn lend(&self, device: &DeviceId) -> Result<File, Box<dyn std::error::Error + Send + Sync>> {
        let found = self.0.lazy_devices.open(device)?;
        Ok(found.ok_or("it was removed this moment")?.0)
    }
}

/// A device that somebody fills: a file as long as the image says.
fn lent(
    image: ImageId,
    id: DeviceId,
    bytes: u64,
    lender: &dyn LendDevices,
) -> Result<OpenDevice, OpenImageError> {
    let failed = |source| OpenImageError::Lend { device: id, source };
    let file = lender.lend(&id).map_err(failed)?;
    let found = file.metadata().map_err(|error| failed(error.into()))?;
    if found.len() != bytes {
        let source = DataError::Length { device: id, expected: bytes, actual: found.len() };
        return Err(OpenImageError::Device { image, source: Box::new(source.into()) });
    }
    Ok(OpenDevice { id, file, bytes, kernel_verity: false, is_lent: true })
}
