//! Opens an image of a store as a tree whose bytes are verified.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use container::bundle::userns::OwnIds;
use image::erofs::read::{CacheSize, Cached, Image, ReadAt, ShownImage};
use image::verity::{DeviceId, ImageId, ObjectId};
use store::{CheckedFile, CheckedObjects, OpenDevice, OpenImage, OperationError};

use super::tree::{FileData, FileTree, FuseView};

/// Cache for blocks of the image file; a directory and its inodes are close to each other.
const CACHE: CacheSize = CacheSize { chunk: 16 << 10, chunks: 64 };
/// The same for a server that rests: the process that starts it again keeps the chunks that were read at first.
const CACHE_AT_REST: CacheSize = CacheSize { chunk: 4 << 10, chunks: 256 };

/// Why an image cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenTreeError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// Some data of the image is not downloaded.
    #[error("image {0} is not completely downloaded: pull it without --lazy")]
    Partial(ImageId),
}

/// The files of an image in a store.
pub type StoreTree = FileTree<Cached<CheckedFile>, StoreData>;

/// Opens an image as a tree of files. Without fs-verity, the whole image file is compared with its id here. Files
/// appear as root's if `ids` does not map their owners.
pub fn open(
    image: &OpenImage,
    view: FuseView,
    ids: Option<OwnIds>,
) -> Result<StoreTree, OpenTreeError> {
    let id = image.id;
    let failed = OperationError::of("reopen image", id);
    let wrong = OperationError::of("read image", id);
    if image.devices.iter().any(|it| it.is_lent) {
        return Err(OpenTreeError::Partial(id));
    }
    let file = image.image.fd().try_clone_to_owned().map_err(failed)?;
    let checked = CheckedFile::new(file.into(), *id.digest(), image.image.size());
    let checked = checked.map_err(OperationError::of("use the file of image", id))?;
    let cache = if view == FuseView::Objects { CACHE_AT_REST } else { CACHE };
    let erofs = Image::open(Cached::with(checked, cache)).map_err(wrong)?;
    let shown = ShownImage::new(erofs).map_err(wrong)?;
    let devices = image.devices.iter().map(Device::new).collect::<Result<_, _>>();
    let data = StoreData {
        objects: CheckedObjects::new(image.objects.try_clone().map_err(failed)?),
        devices: devices.map_err(failed)?,
    };
    Ok(FileTree::new(shown, data, view, ids))
}

/// The objects and devices of an image.
#[derive(Debug)]
pub struct StoreData {
    objects: CheckedObjects,
    devices: Vec<Device>,
}

impl StoreData {
    /// Closes all objects that are open.
    pub(super) fn close(&self) {
        self.objects.close();
    }
}

impl FileData for StoreData {
    fn object(
        &self,
        object: &ObjectId,
        size: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        Ok(self.objects.read(object, size, offset, buffer)?)
    }

    fn devices(&self) -> Vec<&dyn ReadAt> {
        self.devices.iter().map(|it| -> &dyn ReadAt { it }).collect()
    }
}

/// A device, which is compared with its id at the first read.
#[derive(Debug)]
struct Device {
    id: DeviceId,
    bytes: u64,
    file: File,
    checked: OnceLock<CheckedFile>,
    /// Held by the thread that compares the device, so that others wait instead of repeating the work.
    comparing: Mutex<()>,
}

impl Device {
    fn new(device: &OpenDevice) -> io::Result<Self> {
        let (file, checked) = (device.file.try_clone()?, OnceLock::new());
        Ok(Self { id: device.id, bytes: device.bytes, file, checked, comparing: Mutex::new(()) })
    }

    fn checked(&self) -> io::Result<&CheckedFile> {
        if let Some(checked) = self.checked.get() {
            return Ok(checked);
        }
        let _turn = self.comparing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(checked) = self.checked.get() {
            return Ok(checked);
        }
        let checked = CheckedFile::new(self.file.try_clone()?, *self.id.digest(), self.bytes)?;
        Ok(self.checked.get_or_init(|| checked))
    }
}

impl ReadAt for Device {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        Ok(self.checked()?.read(offset, buffer)?)
    }
}

/// Returns all descriptors of a tree, except those of objects that were read.
#[must_use]
pub(super) fn descriptors(tree: &StoreTree) -> Vec<BorrowedFd<'_>> {
    let image = tree.image().image().source().get().as_fd();
    let data = tree.data();
    let devices = data.devices.iter().map(|it| it.file.as_fd());
    let compared = data.devices.iter().filter_map(|it| it.checked.get()).map(CheckedFile::as_fd);
    [image, data.objects.as_fd()].into_iter().chain(devices).chain(compared).collect()
}
