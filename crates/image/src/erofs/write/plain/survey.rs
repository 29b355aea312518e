//! Collects the inodes of an image that is mounted without overlayfs, with their xattrs and shared data.

use std::borrow::Cow;

use hashbrown::HashMap;
use sha2::{Digest as _, Sha256};

use super::Flavor;
use super::chunks::{ChunkTable, Pieces};
use super::devices::Devices;
use super::files::{Files, Hashed};
use super::native::{BLOCK_SIZE, Native, Placed, Stored};
use super::on_device::{DataForm, OnDevice};
use super::prefixes::Prefixes;
use crate::erofs::write::inode::Form;
use crate::erofs::write::pair::OverlayNames;
use crate::erofs::write::place::BlockSize;
use crate::erofs::write::xattrs::{POSIX_ACLS, SetId, Xattrs};
use crate::erofs::write::{Contents, Piece, WriteError};
use crate::tree::{Content, Inode, InodeId, Node, StringId, Timestamp, Tree};
use crate::verity::ObjectId;

/// An inode of the image. Items are small, because there are many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) id: InodeId,
    /// First block of its data, if it has blocks.
    pub(super) block: u32,
    /// Bytes of data after the inode.
    pub(super) tail: u16,
    pub(super) form: Form,
    /// Whether its blocks are written for this inode, not for an earlier one with the same content.
    pub(super) owns_blocks: bool,
}
const _: () = assert!(size_of::<Item>() == 12);

/// The data of an inode in the image.
#[derive(Debug, Clone, Copy)]
pub(super) enum Data<'a> {
    Directory,
    Symlink(&'a [u8]),
    /// A file whose bytes are in the tree.
    Inline(&'a [u8]),
    /// A file whose content `Contents` writes. Equal contents have equal objects.
    External {
        size: u64,
        object: Option<StringId>,
    },
    Device(u64),
    Nothing,
}

impl<'a> Data<'a> {
    pub(super) fn of(inode: &Inode<'a>) -> Self {
        if let Some(external) = inode.external() {
            return Self::External { size: external.size, object: external.object };
        }
        match inode.node() {
            Node::Directory => Self::Directory,
            Node::Symlink(target) => Self::Symlink(target),
            Node::Regular(Content::Inline(bytes)) => Self::Inline(bytes),
            Node::CharDevice(number) | Node::BlockDevice(number) => Self::Device(number),
            Node::Regular(Content::External { .. }) | Node::Fifo | Node::Socket => Self::Nothing,
        }
    }

    /// Whether its blocks contain file data rather than names or targets.
    pub(super) const fn is_file(&self) -> bool {
        matches!(self, Self::Inline(_) | Self::External { .. })
    }
}

/// Every inode of the image, and the data that inodes share.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    pub(super) tree: &'a Tree,
    pub(super) flavor: Flavor,
    pub(super) block_size: BlockSize,
    pub(super) devices: Devices,
    pub(super) files: Files,
    pub(super) prefixes: Prefixes,
    /// The inodes, in the order in which `ls -lR` reads them.
    pub(super) items: Vec<Item>,
    /// The modification time of compact inodes.
    pub(super) epoch: Timestamp,
    pub(super) xattrs: Xattrs<'a>,
    pub(super) has_xattrs: bool,
    /// Whether an inode has a POSIX ACL.
    pub(super) has_acl: bool,
    /// The image's xattr sets by the tree's.
    sets: Vec<SetId>,
    /// Number of inodes with each object as content, by the index of the object's string.
    uses: Vec<u32>,
}

impl<'a> Survey<'a> {
    pub(super) fn of(
        tree: &'a Tree,
        flavor: Flavor,
        block_size: BlockSize,
        prefixes: Prefixes,
    ) -> Result<Self, WriteError> {
        let mut survey = Self {
            tree,
            flavor,
            block_size,
            devices: Devices::default(),
            files: Files::default(),
            prefixes,
            items: list(tree),
            epoch: Timestamp::default(),
            xattrs: Xattrs::new(tree, OverlayNames::TRUSTED),
            has_xattrs: false,
            has_acl: false,
            sets: vec![SetId::UNKNOWN; tree.xattrs_bound()],
            uses: vec![0; tree.strings_bound()],
        };
        let mut times = HashMap::new();
        for at in 0..survey.items.len() {
            let inode = tree.inode(survey.items[at].id);
            survey.count_xattrs(&inode)?;
            match Data::of(&inode) {
                Data::External { object: Some(object), .. } => survey.uses[object.index()] += 1,
                Data::Device(number) if u32::try_from(number).is_err() => {
                    return Err(WriteError::DeviceNumber { path: inode.path(), number });
                }
                _ => {}
            }
            if is_narrow(&inode) {
                *times.entry(inode.metadata().mtime).or_insert(0_u32) += 1;
            }
        }
        // Among equally frequent times take the earliest, so that the image is deterministic.
        let most = |(time, count): &(Timestamp, u32)| (*count, std::cmp::Reverse(*time));
        survey.epoch = times.into_iter().max_by_key(most).map_or(survey.epoch, |(time, _)| time);
        for item in &mut survey.items {
            let inode = tree.inode(item.id);
            if is_narrow(&inode) && inode.metadata().mtime == survey.epoch {
                item.form = Form::Compact;
            }
        }
        survey.has_acl = POSIX_ACLS.iter().any(|name| survey.xattrs.has_name(name));
        if survey.prefixes.fingerprint.is_some() {
            // The image has a table of long prefixes anyway, although older kernels do not support it.
            survey.xattrs.shorten(|base, infix| survey.prefixes.add(base, infix));
        }
        let none = std::iter::empty();
        survey.xattrs.share(none).ok_or(WriteError::TooLarge("4 GiB of shared xattrs"))?;
        Ok(survey)
    }

    fn count_xattrs(&mut self, inode: &Inode<'a>) -> Result<(), WriteError> {
        if self.flavor == Flavor::Gvisor || inode.xattrs().len() == 0 {
            return Ok(());
        }
        let set = &mut self.sets[inode.xattrs_id().index()];
        if *set == SetId::UNKNOWN {
            let pairs = inode.xattrs().map(|(name, value)| (Cow::Borrowed(name), value));
            let added = self.xattrs.add(pairs.collect());
            *set = added.ok_or(WriteError::TooLarge("2^32 xattrs"))?;
        }
        self.xattrs.count(*set);
        self.has_xattrs = true;
        Ok(())
    }

    pub(super) fn set_of(&self, inode: &Inode<'_>) -> SetId {
        match self.sets[inode.xattrs_id().index()] {
            SetId::UNKNOWN => SetId::NONE,
            set => set,
        }
    }

    /// Returns the object of a content whose blocks are shared by all inodes that have it: a content of more than a
    /// block, or one whose tails would take more than a block together.
    pub(super) fn shared(&self, data: &Data<'_>) -> Option<StringId> {
        let Data::External { size, object: Some(object) } = *data else { return None };
        let uses = u64::from(self.uses[object.index()]);
        (uses > 1 && size.saturating_mul(uses) > self.block_size.bytes()).then_some(object)
    }

    /// Returns the location of a file's bytes on a device.
    pub(super) fn on_device(&self, data: &Data<'_>) -> Option<&OnDevice> {
        let Data::External { object: Some(object), .. } = data else { return None };
        self.files.on_devices.get(object)
    }

    /// Returns the location and the chunk table of a file whose bytes are on devices.
    pub(super) fn table(&self, data: &Data<'_>) -> Option<(&OnDevice, ChunkTable<'_>)> {
        let file = self.on_device(data)?;
        Some((file, self.files.table(file, self.devices.is_wide())))
    }

    /// Returns the size of an inode's xattrs in bytes.
    pub(super) fn xattrs_size(&self, inode: &Inode<'_>) -> u64 {
        let without = self.xattrs.size_of(self.set_of(inode), None);
        self.files.xattrs_size(inode.id(), without)
    }

    /// Returns the size of the table of shared xattrs in bytes.
    pub(super) fn shared_bytes(&self) -> u64 {
        self.xattrs.shared_bytes() + self.files.shared_bytes()
    }

    /// Finds the locations and the fingerprints of all files.
    pub(super) fn add_files(
        &mut self,
        native: &Native<'_>,
        contents: &mut Contents<'_>,
    ) -> Result<(), WriteError> {
        self.devices = Devices::of(native.devices)?;
        let mut hashes = Vec::new();
        let mut of_objects = HashMap::new();
        let tree = self.tree;
        for id in self.items.iter().map(|item| item.id).collect::<Vec<_>>() {
            let inode = tree.inode(id);
            let hash = match Data::of(&inode) {
                Data::Inline(bytes) if !bytes.is_empty() => Sha256::digest(bytes).into(),
                Data::External { size: 1.., object: Some(object) } => {
                    match of_objects.get(&object) {
                        Some(hash) => *hash,
                        None => {
                            let hash = self.add_object(native, &inode, object, contents)?;
                            of_objects.insert(object, hash);
                            hash
                        }
                    }
                }
                Data::External { size: 1.., object: None } => hashed(&inode, contents)?,
                _ => continue,
            };
            hashes.push((id, hash));
        }
        for item in &self.items {
            let inode = self.tree.inode(item.id);
            let data = Data::of(&inode);
            if let (Data::External { size, .. }, Some(file)) = (data, self.on_device(&data))
                && size != file.size
            {
                return Err(WriteError::ContentSize { path: inode.path(), size });
            }
        }
        let added = self.files.set_fingerprints(hashes.into_iter(), self.tree.inode_bound());
        let bytes = added.and_then(|()| u32::try_from(self.shared_bytes()).ok());
        bytes.ok_or(WriteError::TooLarge("4 GiB of shared xattrs"))?;
        Ok(())
    }

    /// Records the location of an object, and returns its fingerprint.
    fn add_object(
        &mut self,
        native: &Native<'_>,
        inode: &Inode<'_>,
        key: StringId,
        contents: &mut Contents<'_>,
    ) -> Result<[u8; 32], WriteError> {
        let object = ObjectId::from_bytes(self.tree.string(key)).expect("the tree has no others");
        let Some(placed) = (native.find)(&object) else {
            return hashed(inode, contents);
        };
        let Data::External { size, .. } = Data::of(inode) else {
            unreachable!("only external files have objects")
        };
        match placed {
            Placed::Whole(stored) => {
                let file = self.place_on_device(size, &stored);
                let misplaced = || WriteError::Misplaced { path: inode.path(), size, stored };
                self.files.on_devices.insert(key, file.ok_or_else(misplaced)?);
                Ok(stored.fingerprint)
            }
            Placed::Pieces { runs, fingerprint } => {
                let placed = Pieces::place(runs, size, &self.devices);
                let misplaced = || WriteError::MisplacedPieces { path: inode.path(), size };
                let (mut file, pieces) = placed.ok_or_else(misplaced)?;
                if let Some(pieces) = pieces {
                    let number = u32::try_from(self.files.pieces.len());
                    let number =
                        number.map_err(|_many| WriteError::TooLarge("2^32 files in pieces"))?;
                    file.form = DataForm::Pieces(number);
                    self.files.pieces.push(pieces);
                }
                self.files.on_devices.insert(key, file);
                Ok(fingerprint)
            }
        }
    }

    /// Converts the location of a file's bytes. Returns `None` if it is invalid.
    fn place_on_device(&self, size: u64, stored: &Stored) -> Option<OnDevice> {
        let Stored { device, offset, fingerprint: _ } = *stored;
        let block_size = BLOCK_SIZE.bytes();
        let blocks = size.div_ceil(block_size);
        let block = offset / block_size;
        if offset % block_size != 0 || block.checked_add(blocks)? > self.devices.blocks(device)? {
            return None;
        }
        Some(OnDevice { device, block, size, form: DataForm::Consecutive })
    }
}

/// Computes the SHA-256 of a file that is stored in the image.
fn hashed(inode: &Inode<'_>, contents: &mut Contents<'_>) -> Result<[u8; 32], WriteError> {
    let Data::External { size, .. } = Data::of(inode) else {
        unreachable!("only external files are hashed")
    };
    let mut hashed = Hashed::default();
    contents(*inode, Piece::Whole, &mut hashed)
        .map_err(|source| WriteError::Content { path: inode.path(), source })?;
    hashed.finish(size).ok_or_else(|| WriteError::ContentSize { path: inode.path(), size })
}

/// Lists the inodes depth first by directories, with all inodes of a directory together. A walk that reads the inodes
/// of a directory after its names, and then enters its subdirectories, therefore reads the image from beginning to
/// end.
fn list(tree: &Tree) -> Vec<Item> {
    let item = |id| Item { id, block: 0, tail: 0, form: Form::Extended, owns_blocks: false };
    let mut items = Vec::with_capacity(tree.inode_count());
    items.push(item(InodeId::ROOT));
    let mut pending = vec![InodeId::ROOT];
    while let Some(directory) = pending.pop() {
        let first = pending.len();
        for entry in tree.inode(directory).children().filter(|entry| entry.is_owner) {
            items.push(item(entry.inode.id()));
            if entry.inode.is_directory() {
                pending.push(entry.inode.id());
            }
        }
        pending[first..].reverse();
    }
    items
}

/// Number of entries with which a directory takes less than 4 GiB, regardless of its names.
const ENTRIES: usize = 16_000_000;

/// Whether the inode fits in the compact form, apart from its time.
fn is_narrow(inode: &Inode<'_>) -> bool {
    let metadata = inode.metadata();
    let ids = [metadata.uid, metadata.gid, inode.nlink()];
    let size = match Data::of(inode) {
        Data::External { size, .. } => size,
        _ => 0,
    };
    ids.iter().all(|id| u16::try_from(*id).is_ok())
        && u32::try_from(size).is_ok()
        && inode.children().len() < ENTRIES
}
