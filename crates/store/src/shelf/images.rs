//! The images of a store, and the objects that they need.

use image::erofs::read::{
    ByteOffset, Cached, Device, DeviceSlot, FileType, Image, ImageTree, Located, Objects, Owners,
    Place, ReadAt, ReadError, View, native_tree, to_tree,
};
use image::tree::{Content, Node};
use image::verity::{Algorithm, DeviceId, Id, ImageId, ObjectId};

use crate::open::{ImageFile, OpenImage};
use crate::shelf::devices::{Index, PieceKey};
use crate::shelf::refs::Form;
use crate::store::{Store, StoreError};

impl Store {
    /// The ids of all images, in order, with or without a ref.
    ///
    /// # Errors
    /// [`StoreError`] when the directory cannot be read.
    pub fn images(&self) -> Result<Vec<ImageId>, StoreError> {
        let algorithm = self.algorithm();
        let listed = self.images.list()?;
        let ids = listed.iter().filter_map(|it| id_of(&it.name));
        Ok(ids.filter(|id| id.algorithm() == algorithm).collect())
    }
}

/// The id that a file is named by: lower case only, so that it has one name.
pub(crate) fn id_of<K>(name: &[u8]) -> Option<Id<K>> {
    let id = Id::from_hex(name).ok()?;
    (id.to_string().as_bytes() == name).then_some(id)
}

/// A data blob that an image has as a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// Its name; none if the device table has something else.
    pub(crate) blob: Option<DeviceId>,
    /// Its length, as the image says.
    pub(crate) bytes: u64,
}

/// Whether an image has its files' bytes on devices or in itself; one of small files only has no devices.
fn is_native<S: ReadAt>(image: &Image<S>) -> bool {
    image.superblock().composefs.is_none() || !image.devices().is_empty()
}

/// What the superblock of an image says of where its data is.
#[derive(Debug)]
pub(crate) struct Devices {
    /// `None` of a native image without the header that says it, which was written before the first release.
    pub(crate) form: Option<Form>,
    /// In order; none of a composefs image.
    pub(crate) uses: Vec<DeviceUse>,
}

/// Reads the table of devices.
pub(crate) fn devices(image: &ImageFile) -> Result<Devices, ContentsError> {
    let image = Image::open(image)?;
    let block = image.superblock().block_bits.size();
    let uses = image
        .devices()
        .iter()
        .map(|slot| DeviceUse { blob: id_of(&slot.tag), bytes: slot.blocks.saturating_mul(block) });
    let uses: Vec<_> = uses.collect();
    let form = if is_native(&image) {
        let header = image.superblock().native;
        header.map(|it| if it.has_tar { Form::Tar } else { Form::Packed })
    } else {
        Some(Form::Objects)
    };
    Ok(Devices { form, uses })
}

/// A file of an image, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Use {
    /// An object, in `objects/`.
    Object {
        object: ObjectId,
        /// Length in bytes, as the image says.
        size: u64,
    },
    /// A range of a data blob. A file in several pieces is told with each of them.
    Range(BlobRange),
}

/// A part of a data blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlobRange {
    pub(crate) blob: DeviceId,
    pub(crate) offset: u64,
    /// Bytes, at least 1.
    pub(crate) len: u64,
    /// Of the whole file.
    pub(crate) size: u64,
}

/// Why it is not known what an image needs.
#[derive(Debug, thiserror::Error)]
#[error("cannot read what the image needs")]
pub struct ContentsError(#[from] ReadError);

/// Calls `visit` with every path whose bytes are elsewhere, depth first, siblings in byte order.
pub(crate) fn uses(
    image: &ImageFile,
    visit: &mut dyn FnMut(&[u8], Use),
) -> Result<(), ContentsError> {
    let image = Image::open(Cached::new(image))?;
    if is_native(&image) {
        return ranges(&image, visit);
    }
    let tree = to_tree(&image, View::Composefs(Owners::FirstMet))?.tree;
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        if let Node::Regular(Content::External { size, object: Some(object), .. }) =
            entry.inode.node()
        {
            visit(path, Use::Object { object, size });
        }
    }
    Ok(())
}

/// What a native image has on its devices.
fn ranges<S: ReadAt>(
    image: &Image<S>,
    visit: &mut dyn FnMut(&[u8], Use),
) -> Result<(), ContentsError> {
    // Refuses images of which so little says so much that reading them would take for ever.
    image.device_ranges(|_| {})?;
    let blobs: Vec<_> = image.devices().iter().map(DeviceSlot::device_id).collect();
    let mut walk = image.walk();
    while let Some(step) = walk.next()? {
        let inode = step.inode;
        if inode.file_type() != FileType::Regular || inode.is_compressed() {
            continue;
        }
        let mut at = 0_u64;
        while let Some(extent) = image.map(&inode, ByteOffset(at))? {
            at = at.saturating_add(extent.len);
            if let Place::Data(device, offset) = extent.place
                && let Some(Some(blob)) = device.slot().and_then(|slot| blobs.get(slot))
            {
                let range = BlobRange {
                    blob: *blob,
                    offset: offset.0,
                    len: extent.len,
                    size: inode.size(),
                };
                visit(step.path, Use::Range(range));
            }
            // Of a further name, the first piece says enough: else few bytes could say much.
            if !step.is_new {
                break;
            }
        }
    }
    Ok(())
}

/// The objects of files that a native image has in itself: their bytes are needed nowhere else, but other forms of the
/// image come from them.
pub(crate) fn inside(image: &ImageFile) -> Result<Vec<ObjectId>, ContentsError> {
    let image = Image::open(Cached::new(image))?;
    let mut found = Vec::new();
    if !is_native(&image) {
        return Ok(found);
    }
    let objects = Objects { algorithm: Algorithm::Sha256, inline_max: INLINE_MAX, find: &|_| None };
    let tree = native_tree(&image, objects)?.tree;
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        if let Node::Regular(Content::External { object: Some(object), .. }) = entry.inode.node() {
            found.push(object);
        }
    }
    Ok(found)
}

/// Up to so many bytes, a file is in the tree itself, as composefs has it.
const INLINE_MAX: u64 = 64;

impl Store {
    /// The tree of an image, with the names of its objects, whatever its form is. A file of a native image that no index
    /// knows has none.
    ///
    /// # Errors
    /// [`ContentsError`] when it cannot be read.
    pub fn tree(&self, image: &OpenImage, owners: Owners) -> Result<ImageTree, ContentsError> {
        let read = Image::open(Cached::new(&image.image))?;
        if !is_native(&read) {
            return Ok(to_tree(&read, View::Composefs(owners))?);
        }
        let indexes: Vec<_> = image
            .devices
            .iter()
            .map(|device| {
                self.index_of(&device.id).unwrap_or_else(|error| {
                    tracing::warn!(%error, "objects in a data blob have no names");
                    None
                })
            })
            .collect();
        let index_of = |device: Device| indexes.get(device.slot()?)?.as_deref();
        let find = |located: &Located<'_>| {
            whole(located, &index_of).or_else(|| {
                let pieces = pieces(located, &index_of)?;
                let mut records = indexes.iter().flatten().filter_map(|it| it.record_of(&pieces));
                let record = records.find(|it| is_same(located, it.size, &it.sha256))?;
                Some(record.object())
            })
        };
        let objects = Objects { algorithm: self.algorithm(), inline_max: INLINE_MAX, find: &find };
        Ok(native_tree(&read, objects)?)
    }
}

fn is_same(located: &Located<'_>, size: u64, sha256: &[u8; 32]) -> bool {
    located.size == size && located.fingerprint.is_none_or(|it| it == *sha256)
}

/// The object that a file is, if the file is where one is, in one run.
fn whole<'i>(
    located: &Located<'_>,
    index_of: &dyn Fn(Device) -> Option<&'i Index>,
) -> Option<ObjectId> {
    let [run] = located.runs else { return None };
    let Place::Data(device, offset) = run.place else { return None };
    let entry = index_of(device)?.at(offset.0)?;
    let is_it = run.len == entry.size && is_same(located, entry.size, &entry.sha256);
    is_it.then(|| entry.object())
}

/// The objects that a file is made of, by what the indexes say is where the file's bytes are.
fn pieces<'i>(
    located: &Located<'_>,
    index_of: &dyn Fn(Device) -> Option<&'i Index>,
) -> Option<Vec<PieceKey>> {
    let mut pieces = Vec::new();
    let mut left = located.size;
    for run in located.runs {
        let (device, offset) = match run.place {
            Place::Hole => {
                pieces.push(PieceKey { id: None, len: run.len });
                left = left.checked_sub(run.len)?;
                continue;
            }
            Place::Data(device, offset) if device != Device::IMAGE => (device, offset.0),
            Place::Data(..) | Place::Inline(_) => return None,
        };
        let index = index_of(device)?;
        let until = offset.checked_add(run.len)?;
        let mut at = offset;
        while at < until {
            let entry = index.at(at).filter(|it| it.until() <= until)?;
            pieces.push(PieceKey { id: Some(entry.id), len: entry.size });
            left = left.checked_sub(entry.size)?;
            at = entry.until();
        }
    }
    (left == 0).then_some(pieces)
}
