//! Converts the files of an image over devices to objects, inline content or external files of a tree.

use hashbrown::HashMap;

use super::error::ReadError;
use super::inode::Inode;
use super::source::ReadAt;
use super::walk::Budget;
use super::xattr::InodeXattrs;
use super::{ByteOffset, Device, Extent, Image, RunPlace, to_u64, to_usize};
use crate::tree::{Content, Location};
use crate::verity::{Algorithm, Hasher, ObjectId};

/// The conversion of an image's files to objects.
#[derive(Clone, Copy)]
pub struct Objects<'o> {
    /// Hash algorithm of the object ids.
    pub algorithm: Algorithm,
    /// Maximum size in bytes of a file in the image that becomes inline content of the tree.
    pub inline_max: u64,
    /// Finds the object at a location, if it is known. The values come from the image and are not verified, so
    /// compare the size and the fingerprint with those of the object.
    pub find: &'o dyn Fn(&Located<'_>) -> Option<ObjectId>,
}

impl std::fmt::Debug for Objects<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { algorithm, inline_max, find: _ } = self;
        let mut debug = f.debug_struct("Objects");
        debug.field("algorithm", algorithm).field("inline_max", inline_max).finish_non_exhaustive()
    }
}

/// The location of a file on devices, and the values that the image states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located<'r> {
    /// Runs of the file in order: on devices, in the image, or holes. Adjacent runs are joined.
    pub runs: &'r [Extent],
    /// Size of the file in bytes, including a tail in the image.
    pub size: u64,
    /// SHA-256 of the file's bytes, as stated in the image.
    pub fingerprint: Option<[u8; 32]>,
}

/// The state of the conversion while a tree is made.
#[derive(Debug)]
pub(super) struct FileConversion<'o> {
    objects: Objects<'o>,
    /// Objects in the image, by offset and size.
    seen: HashMap<(ByteOffset, u64), ObjectId>,
    /// Limit of the bytes that are hashed.
    hashed: Budget,
    /// Limit of the bytes of chunk tables that are read.
    entries: Budget,
    /// Runs of the current file.
    runs: Vec<Extent>,
    /// Name of the xattr with the fingerprint; empty if there is none.
    pub(super) fingerprint: Vec<u8>,
}

impl<'o> FileConversion<'o> {
    /// `bound` limits the bytes that are hashed, and the bytes of chunk tables. An entry of a table has 4 or 8 bytes
    /// and belongs to one file.
    pub(super) fn new(objects: Objects<'o>, fingerprint: Vec<u8>, bound: u64) -> Self {
        Self {
            objects,
            seen: HashMap::new(),
            hashed: Budget::new(bound),
            entries: Budget::new(bound),
            runs: Vec::new(),
            fingerprint,
        }
    }
}

impl FileConversion<'_> {
    /// Locates all bytes of a file.
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

    /// Returns the content in a tree of a file with data.
    pub(super) fn content<'a, S: ReadAt>(
        &mut self,
        image: &Image<S>,
        inode: &Inode,
        xattrs: &InodeXattrs,
        bytes: &'a mut Vec<u8>,
    ) -> Result<Content<'a>, ReadError> {
        let size = inode.size();
        let external = |object: Option<ObjectId>| {
            let location = if object.is_some() { Location::Object } else { Location::None };
            Content::External { size, object, location }
        };
        self.find_runs(image, inode)?;
        let is_on_device =
            |it: &Extent| matches!(it.place, RunPlace::Data(device, _) if device != Device::IMAGE);
        // A file on devices may consist of zeros that are not stored.
        let is_nowhere = |it: &Extent| it.place == RunPlace::Hole;
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
        // Several inodes may have the same blocks. If one has a tail after the inode, they are not the same file.
        let key = first.filter(|extent| extent.len == size).and_then(|extent| match extent.place {
            RunPlace::Data(_, offset) => Some((offset, size)),
            RunPlace::Hole | RunPlace::Inline(_) | RunPlace::Packed => None,
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

/// Upper bound in bytes of inline content in a tree, which limits memory if `Objects::inline_max` is larger.
const INLINE_MAX: usize = 64 << 10;

fn hash<S: ReadAt>(
    image: &Image<S>,
    inode: &Inode,
    algorithm: Algorithm,
) -> Result<ObjectId, ReadError> {
    let mut hasher = Hasher::new(algorithm);
    let mut buffer = vec![0; to_usize(inode.size().min(1 << 20))];
    let mut reader = image.reader(inode);
    let mut at = 0_u64;
    loop {
        let read = reader.read(ByteOffset(at), &mut buffer, &[])?;
        if read == 0 {
            return Ok(hasher.finish().into());
        }
        hasher.update(buffer.get(..read).unwrap_or_default());
        at = at.saturating_add(to_u64(read));
    }
}

/// Parses the digest in a fingerprint.
pub(super) fn parse(value: &[u8]) -> Option<[u8; 32]> {
    value.strip_prefix(b"sha256:")?.try_into().ok()
}
