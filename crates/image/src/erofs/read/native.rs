//! Features of images over devices: objects by their addresses, fingerprints, and the used parts of devices.

use hashbrown::HashMap;

use super::error::{Corrupt, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::source::ReadAt;
use super::superblock::DeviceSlot;
use super::to_tree::{ImageTree, Reader, View};
use super::walk::{Budget, kept_bound};
use super::xattr::Xattrs;
use super::{ByteOffset, Device, Extent, Image, Place, to_u64, to_usize};
use crate::tree::{Content, Location};
use crate::verity::{Algorithm, DeviceId, Hasher, ObjectId};

/// How files of an image over devices become objects.
#[derive(Clone, Copy)]
pub struct Objects<'o> {
    /// The hash that names objects.
    pub algorithm: Algorithm,
    /// Length in bytes of the longest file in the image that becomes inline content of the tree.
    pub inline_max: u64,
    /// Finds the object at a place, if it is known. The values of the image are not verified: compare size and
    /// fingerprint with those of the object.
    pub find: &'o dyn Fn(&Located<'_>) -> Option<ObjectId>,
}

impl std::fmt::Debug for Objects<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { algorithm, inline_max, find: _ } = self;
        let mut debug = f.debug_struct("Objects");
        debug.field("algorithm", algorithm).field("inline_max", inline_max).finish_non_exhaustive()
    }
}

/// The place of a file on devices, and the values that the image states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located<'r> {
    /// Its runs in order, adjacent ones joined: on devices, in the image, or holes.
    pub runs: &'r [Extent],
    /// Length of the file in bytes, with an end that is in the image.
    pub size: u64,
    /// SHA-256 of its bytes, as the image states it.
    pub fingerprint: Option<[u8; 32]>,
}

/// A run of a file's bytes on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRange {
    /// The file.
    pub nid: Nid,
    /// The device.
    pub device: Device,
    /// Offset in the device, in bytes.
    pub offset: ByteOffset,
    /// Length in bytes, at least 1.
    pub len: u64,
}

/// Makes the tree that an image over devices was written from. Files on devices are external, with the object that
/// [`Objects::find`] returns, if any; the objects of files in the image are computed. The tree has no fingerprints.
///
/// # Errors
/// [`ReadError`]: as [`to_tree`](super::to_tree()).
pub fn native_tree<S: ReadAt>(
    image: &Image<S>,
    objects: Objects<'_>,
) -> Result<ImageTree, ReadError> {
    let hashed = Budget::new(kept_bound(image.source().len()));
    let fingerprint = image.fingerprint_name()?.unwrap_or_default();
    // An entry of a table of chunks is 4 or 8 bytes, and belongs to one file.
    let entries = Budget::new(kept_bound(image.source().len()));
    let (seen, runs) = (HashMap::new(), Vec::new());
    let files = Files { objects, seen, hashed, entries, runs, fingerprint };
    Reader::new(image, View::Plain, Some(files)).read()
}

/// What is known of an image's files while a tree is made.
#[derive(Debug)]
pub(super) struct Files<'o> {
    objects: Objects<'o>,
    /// Objects in the image by where they begin and their size.
    seen: HashMap<(ByteOffset, u64), ObjectId>,
    /// Bytes that were hashed.
    hashed: Budget,
    /// Bytes of tables of chunks that were read.
    entries: Budget,
    /// Of the file at hand.
    runs: Vec<Extent>,
    /// Name of the xattr with the fingerprint.
    pub(super) fingerprint: Vec<u8>,
}

impl Files<'_> {
    /// Finds where all of a file's bytes are.
    fn find_runs<S: ReadAt>(&mut self, image: &Image<S>, inode: &Inode) -> Result<(), ReadError> {
        self.runs.clear();
        let mut at = 0_u64;
        while let Some(extent) = image.map(inode, ByteOffset(at))? {
            self.entries.spend(4)?;
            at = at.saturating_add(extent.len);
            match self.runs.last_mut() {
                Some(last) if last.place.after(last.len) == extent.place => {
                    last.len = last.len.saturating_add(extent.len);
                }
                _ => self.runs.push(extent),
            }
        }
        Ok(())
    }

    /// What a file with data is in a tree.
    pub(super) fn content<'a, S: ReadAt>(
        &mut self,
        image: &Image<S>,
        inode: &Inode,
        xattrs: &Xattrs,
        bytes: &'a mut Vec<u8>,
    ) -> Result<Content<'a>, ReadError> {
        let size = inode.size();
        let external = |object: Option<ObjectId>| {
            let location = if object.is_some() { Location::Object } else { Location::None };
            Content::External { size, object, location }
        };
        self.find_runs(image, inode)?;
        let is_on_device =
            |it: &Extent| matches!(it.place, Place::Data(device, _) if device != Device::IMAGE);
        // All of it may be zeros that are nowhere.
        let is_nowhere = |it: &Extent| it.place == Place::Hole;
        let may_be = inode.is_chunk_based() && !image.devices.is_empty();
        if self.runs.iter().any(is_on_device) || may_be && self.runs.iter().all(is_nowhere) {
            let fingerprint = xattrs.get(&self.fingerprint).and_then(parse);
            let located = Located { runs: &self.runs, size, fingerprint };
            return Ok(external((self.objects.find)(&located)));
        }
        let first = self.runs.first();
        if size <= self.objects.inline_max.min(to_u64(INLINE_MAX)) {
            bytes.clear();
            bytes.resize(to_usize(size), 0);
            image.read(inode, ByteOffset(0), bytes, &[])?;
            return Ok(Content::Inline(bytes));
        }
        // Several inodes may have the same blocks; with an end behind the inode they are not the same file.
        let key = first.filter(|extent| extent.len == size).and_then(|extent| match extent.place {
            Place::Data(_, offset) => Some((offset, size)),
            Place::Hole | Place::Inline(_) => None,
        });
        if let Some(object) = key.and_then(|key| self.seen.get(&key)) {
            return Ok(external(Some(*object)));
        }
        self.hashed.spend(size)?;
        let object = hash(image, inode, self.objects.algorithm)?;
        if let Some(key) = key {
            self.seen.insert(key, object);
        }
        Ok(external(Some(object)))
    }
}

/// No tree has more in itself. A bound on memory, whatever is asked for.
const INLINE_MAX: usize = 64 << 10;

fn hash<S: ReadAt>(
    image: &Image<S>,
    inode: &Inode,
    algorithm: Algorithm,
) -> Result<ObjectId, ReadError> {
    let mut hasher = Hasher::new(algorithm);
    let mut buffer = vec![0; to_usize(inode.size().min(1 << 20))];
    let mut at = 0_u64;
    loop {
        let read = image.read(inode, ByteOffset(at), &mut buffer, &[])?;
        if read == 0 {
            return Ok(hasher.finish().into());
        }
        hasher.update(buffer.get(..read).unwrap_or_default());
        at = at.saturating_add(to_u64(read));
    }
}

/// The digest in a fingerprint.
fn parse(value: &[u8]) -> Option<[u8; 32]> {
    value.strip_prefix(b"sha256:")?.try_into().ok()
}

impl<S: ReadAt> Image<S> {
    /// What the xattr with a file's fingerprint is called, if files have them.
    pub(super) fn fingerprint_name(&self) -> Result<Option<Vec<u8>>, Corrupt> {
        let Some(at) = self.superblock.fingerprint_prefix else { return Ok(None) };
        let count = self.prefixes.len();
        let prefix = self.prefixes.get(usize::from(at));
        let prefix = prefix.ok_or(Corrupt::FingerprintPrefix { at, count })?;
        Ok(Some(prefix.name()))
    }

    /// SHA-256 of a file's bytes, if the image states it. Kernels share pages of files with equal fingerprints.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn fingerprint(&self, inode: &Inode) -> Result<Option<[u8; 32]>, ReadError> {
        let Some(name) = self.fingerprint_name()? else { return Ok(None) };
        Ok(self.xattr(inode, &name)?.as_deref().and_then(parse))
    }

    /// Passes every run of a file's bytes on devices to `tell`, file by file.
    ///
    /// # Errors
    /// [`ReadError`]. Runs of earlier files may have been passed before.
    pub fn device_ranges(&self, mut tell: impl FnMut(DeviceRange)) -> Result<(), ReadError> {
        if self.devices.is_empty() {
            return Ok(());
        }
        // An entry of a table of chunks is 4 or 8 bytes, and belongs to one file.
        let mut entries = Budget::new(kept_bound(self.source.len()));
        let mut walk = self.walk();
        while let Some(step) = walk.next()? {
            let inode = step.inode;
            if !step.is_new || inode.file_type() != FileType::Regular || inode.is_compressed() {
                continue;
            }
            let mut at = 0_u64;
            while let Some(extent) = self.map(&inode, ByteOffset(at))? {
                entries.spend(4)?;
                at = at.saturating_add(extent.len);
                if let Place::Data(device, offset) = extent.place
                    && device != Device::IMAGE
                {
                    tell(DeviceRange { nid: inode.nid(), device, offset, len: extent.len });
                }
            }
        }
        Ok(())
    }
}

impl DeviceSlot {
    /// The device that the slot names: its tag is the id in lower case hexadecimal digits.
    #[must_use]
    pub fn device_id(&self) -> Option<DeviceId> {
        let id = DeviceId::from_hex(&self.tag).ok()?;
        (id.to_string().as_bytes() == self.tag).then_some(id)
    }

    /// Length of the device in bytes, if the image states it. The kernel reads missing bytes as zeros.
    #[must_use]
    pub const fn bytes(&self) -> Option<u64> {
        self.len
    }
}
