//! The inodes of an image, with their xattrs and data. The surveys of the profiles fill it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::blocks::Extent;
use super::chunks::ChunkTable;
use super::devices::Devices;
use super::files::FileTable;
use super::inode::Form;
use super::listing::{InodeSource, Listing, SHADOWS};
use super::on_device::OnDevice;
use super::pair::OverlayNames;
use super::rules::{BlockPass, Rules};
use super::xattrs::prefixes::Prefixes;
use super::xattrs::{FilePairs, POSIX_ACLS, SetId, XattrTable};
use super::{ErofsWriteError, Version};
use crate::erofs::layout::file_type;
use crate::tree::{
    Content, External, Inode, InodeId, Metadata, Node, StringId, Timestamp, Tree, XattrsId,
};

/// Binary logarithm of a chunk's size in composefs images: at least a block, and at most the 2^31 blocks of
/// `CHUNK_BLKBITS_MASK`.
const CHUNK_BITS: std::ops::RangeInclusive<u32> = 12..=43;
/// Number of entries with which a directory takes less than 4 GiB, regardless of its names.
const ENTRIES: usize = 16_000_000;

/// An inode of the image. Items are small, because there are many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) source: InodeSource,
    /// First block of its data, if it has blocks.
    pub(super) block: u32,
    /// Number of blocks that are written for this inode; 0 if they were written for an earlier one with the same
    /// content. 32 bits suffice: a directory has less than 2^32 entries of at most 267 bytes each.
    pub(super) blocks: u32,
    /// Bytes of data after the inode.
    pub(super) tail: u16,
    pub(super) form: Form,
    /// Whether the inode is a directory with whiteouts, which overlayfs must find.
    pub(super) whiteouts: bool,
}
const _: () = assert!(size_of::<Item>() == 20);

impl Item {
    pub(super) const fn new(source: InodeSource) -> Self {
        Self { source, block: 0, blocks: 0, tail: 0, form: Form::Extended, whiteouts: false }
    }
}

/// The data of an inode in the image.
#[derive(Debug, Clone, Copy)]
pub(super) enum PlainData<'a> {
    Directory,
    Symlink(&'a [u8]),
    /// A file whose bytes are in the tree.
    Inline(&'a [u8]),
    /// An external file of a composefs image, which consists of holes.
    Holes {
        size: u64,
        /// Binary logarithm of the size of a chunk.
        bits: u32,
        chunks: u64,
    },
    /// A file whose content is on a device, or is written by `Contents`. Equal contents have equal objects.
    External {
        size: u64,
        object: Option<StringId>,
    },
    /// A device number.
    Device(u32),
    Nothing,
}

impl PlainData<'_> {
    /// Whether the data gets its blocks in this pass.
    pub(super) const fn is_in(&self, pass: BlockPass) -> bool {
        let is_file = matches!(self, Self::Inline(_) | Self::Holes { .. } | Self::External { .. });
        match pass {
            BlockPass::All => true,
            BlockPass::Names => !is_file,
            BlockPass::Files => is_file,
        }
    }

    /// Returns `i_size`. The size of a directory includes its blocks as a whole.
    pub(super) const fn size(&self, extent: Extent, block_size: u64) -> u64 {
        match self {
            Self::Directory => extent.blocks * block_size + extent.tail,
            Self::Symlink(bytes) | Self::Inline(bytes) => bytes.len() as u64,
            Self::Holes { size, .. } | Self::External { size, .. } => *size,
            Self::Device(_) | Self::Nothing => 0,
        }
    }
}

/// The fields and data of an inode in the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) mode: u16,
    pub(super) nlink: u32,
    pub(super) metadata: Metadata,
    pub(super) data: PlainData<'a>,
    /// Whether the inode is extended for another reason than its fields. For composefs, the reason is a stated size of
    /// 4 GiB or more of an inode without data. Otherwise, it is a number of entries that may take 4 GiB.
    large: bool,
}

impl Facts<'_> {
    /// Whether the inode fits in the compact form with a size of `size`, apart from its time.
    pub(super) fn is_narrow(&self, size: u64) -> bool {
        let ids = [self.metadata.uid, self.metadata.gid, self.nlink];
        ids.iter().all(|id| u16::try_from(*id).is_ok())
            && u32::try_from(size).is_ok()
            && !self.large
    }
}

/// The parts of a survey for images that overlayfs combines with objects.
#[derive(Debug)]
pub(super) struct Overlay {
    pub(super) names: OverlayNames,
    pub(super) version: Version,
    /// Sets to which xattrs were added.
    sets: BTreeMap<(XattrsId, Role), SetId>,
}

impl Overlay {
    pub(super) const fn new(names: OverlayNames, version: Version) -> Self {
        Self { names, version, sets: BTreeMap::new() }
    }
}

/// The role of an inode, which determines the xattrs that are added, besides those of external files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Plain,
    Whiteout,
    HasWhiteouts,
    Root { whiteouts: bool },
    Shadow,
}

/// Pairs of names and values of xattrs.
pub(super) type Pairs<'a> = Vec<(Cow<'a, [u8]>, &'a [u8])>;

/// Every inode of the image, with its xattrs, and the data that inodes share.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    pub(super) tree: &'a Tree,
    pub(super) rules: Rules,
    /// `None` for images that are mounted without overlayfs.
    pub(super) overlay: Option<Overlay>,
    /// The inodes. Until the plan, they are in the order of the profile; after it, they are in the order of their
    /// positions.
    pub(super) items: Vec<Item>,
    /// The modification time of compact inodes.
    pub(super) epoch: Timestamp,
    pub(super) xattrs: XattrTable<'a>,
    /// Whether an inode has a POSIX ACL.
    pub(super) has_acl: bool,
    /// The image's xattr sets by the tree's; [`SetId::UNKNOWN`] until they are made.
    sets: Vec<SetId>,
    /// Number of inodes with each object as content, by the index of the object's string, if contents may be shared.
    pub(super) uses: Vec<u32>,
    pub(super) devices: Devices,
    pub(super) files: FileTable,
    pub(super) prefixes: Prefixes,
}

impl<'a> Survey<'a> {
    /// Creates a survey without inodes.
    pub(super) fn new(tree: &'a Tree, rules: Rules, overlay: Option<Overlay>) -> Self {
        let names = overlay.as_ref().map_or(OverlayNames::TRUSTED, |overlay| overlay.names);
        Self {
            tree,
            rules,
            overlay,
            items: Vec::with_capacity(tree.inode_count() + SHADOWS.len()),
            epoch: Timestamp::default(),
            xattrs: XattrTable::new(tree, names),
            has_acl: false,
            sets: vec![SetId::UNKNOWN; tree.xattrs_bound()],
            uses: Vec::new(),
            devices: Devices::default(),
            files: FileTable::default(),
            prefixes: Prefixes::default(),
        }
    }

    /// Returns the role of an inode, and the set in the tree from which its xattrs are made.
    fn role(&self, item: &Item) -> (XattrsId, Role) {
        let InodeSource::Tree(id) = item.source else {
            return (self.tree.root().xattrs_id(), Role::Shadow);
        };
        let inode = self.tree.inode(id);
        let role = match item.whiteouts {
            _ if self.overlay.is_none() => Role::Plain,
            whiteouts if id == InodeId::ROOT => Role::Root { whiteouts },
            true => Role::HasWhiteouts,
            false if is_whiteout(&inode) => Role::Whiteout,
            false => Role::Plain,
        };
        (inode.xattrs_id(), role)
    }

    fn find_set(&self, xattrs: XattrsId, role: Role) -> Option<SetId> {
        match role {
            Role::Plain => Some(self.sets[xattrs.index()]).filter(|set| *set != SetId::UNKNOWN),
            _ => self.overlay.as_ref()?.sets.get(&(xattrs, role)).copied(),
        }
    }

    /// Counts an inode with its set of xattrs. `make` returns the pairs of a set that is new.
    pub(super) fn count_set(
        &mut self,
        item: &Item,
        make: impl FnOnce(&Self, XattrsId, Role) -> Result<Pairs<'a>, ErofsWriteError>,
    ) -> Result<(), ErofsWriteError> {
        let (xattrs, role) = self.role(item);
        let set = match self.find_set(xattrs, role) {
            Some(set) => set,
            None => {
                let pairs = make(self, xattrs, role)?;
                let set = self.xattrs.add(pairs).ok_or(ErofsWriteError::TooLarge("2^32 xattrs"))?;
                match (&mut self.overlay, role) {
                    (Some(overlay), role) if role != Role::Plain => {
                        overlay.sets.insert((xattrs, role), set);
                    }
                    _ => self.sets[xattrs.index()] = set,
                }
                set
            }
        };
        self.xattrs.count(set);
        Ok(())
    }

    /// Decides which xattrs are shared, after all inodes are counted.
    pub(super) fn share(&mut self) -> Result<(), ErofsWriteError> {
        self.has_acl = POSIX_ACLS.iter().any(|name| self.xattrs.has_name(name));
        if self.prefixes.fingerprint.is_some() {
            // The image needs a table of long prefixes in any case, although older kernels do not support such a
            // table.
            self.xattrs.shorten(|base, infix| self.prefixes.add(base, infix));
        }
        let Self { tree, overlay, items, xattrs, .. } = self;
        let files = items.iter().filter_map(|item| file_pairs(tree, overlay.as_ref(), item));
        xattrs.share(files).ok_or(ErofsWriteError::TooLarge("4 GiB of shared xattrs"))
    }

    /// Returns the set of an inode's xattrs without its [`FilePairs`].
    fn set_of(&self, item: &Item) -> SetId {
        let (xattrs, role) = self.role(item);
        self.find_set(xattrs, role).expect("sets were made for all items")
    }

    fn file_pairs(&self, item: &Item) -> Option<FilePairs> {
        file_pairs(self.tree, self.overlay.as_ref(), item)
    }

    /// Returns the size of an inode's xattrs in bytes.
    pub(super) fn xattrs_size(&self, item: &Item) -> u64 {
        let size = self.xattrs.size_of(self.set_of(item), self.file_pairs(item));
        match item.source {
            InodeSource::Tree(id) => self.files.xattrs_size(id, size),
            InodeSource::Shadow(_) => size,
        }
    }

    /// Writes an inode's xattrs. `first_id` is the id at the start of the table of shared xattrs.
    pub(super) fn put_xattrs(&self, item: &Item, first_id: u32, out: &mut Vec<u8>) {
        self.xattrs.put(self.set_of(item), self.file_pairs(item), first_id, out);
        if let InodeSource::Tree(id) = item.source {
            let before = u32::try_from(self.xattrs.shared_bytes() / 4);
            let before = before.expect("the table has less than 4 GiB");
            self.files.put(id, first_id + before, out);
        }
    }

    /// Returns the size of the table of shared xattrs in bytes.
    pub(super) fn shared_bytes(&self) -> u64 {
        self.xattrs.shared_bytes() + self.files.shared_bytes()
    }

    /// Returns the tree's inode of an item that is not a shadow.
    pub(super) fn inode(&self, item: &Item) -> Inode<'a> {
        let InodeSource::Tree(id) = item.source else { unreachable!("the tree has no shadows") };
        self.tree.inode(id)
    }

    pub(super) fn path(&self, item: &Item) -> Vec<u8> {
        match item.source {
            InodeSource::Tree(id) => self.tree.inode(id).path(),
            InodeSource::Shadow(byte) => [b"/", &SHADOWS[usize::from(byte)].1[..]].concat(),
        }
    }

    pub(super) fn facts(&self, source: InodeSource) -> Facts<'a> {
        let InodeSource::Tree(id) = source else {
            let metadata = Metadata { permissions: 0o644, ..self.tree.root().metadata() };
            let mode = Node::CharDevice(0).type_bits() | metadata.permissions;
            return Facts { mode, nlink: 1, metadata, data: PlainData::Device(0), large: false };
        };
        let inode = self.tree.inode(id);
        let mut facts = Facts {
            mode: inode.mode(),
            nlink: inode.nlink(),
            metadata: inode.metadata(),
            data: self.data(&inode),
            large: match self.overlay {
                Some(_) => inode.has_large_stated_size(),
                None => inode.children().len() >= ENTRIES,
            },
        };
        if matches!(facts.data, PlainData::Device(0))
            && self.overlay.is_some()
            && is_whiteout(&inode)
        {
            let file = Node::Regular(Content::Inline(&[]));
            facts.mode = file.type_bits() | facts.metadata.permissions;
            facts.data = PlainData::Nothing;
            facts.large = false;
        }
        facts
    }

    pub(super) fn data(&self, inode: &Inode<'a>) -> PlainData<'a> {
        if let Some(External { size, object, .. }) = inode.external() {
            if self.overlay.is_none() {
                return PlainData::External { size, object };
            }
            let (bits, chunks) = chunks_of(size);
            return PlainData::Holes { size, bits, chunks };
        }
        match inode.node() {
            Node::Directory => PlainData::Directory,
            Node::Symlink(target) => PlainData::Symlink(target),
            Node::Regular(Content::Inline(bytes)) => PlainData::Inline(bytes),
            Node::CharDevice(number) | Node::BlockDevice(number) => {
                PlainData::Device(device_number(number))
            }
            Node::Regular(Content::External { .. }) | Node::Fifo | Node::Socket => {
                PlainData::Nothing
            }
        }
    }

    /// Returns the file type in dirents. An escaped whiteout is a regular file.
    pub(super) fn file_type(&self, source: InodeSource) -> u8 {
        let InodeSource::Tree(id) = source else { return file_type::CHAR_DEVICE };
        let inode = self.tree.inode(id);
        if inode.external().is_some() {
            return file_type::REGULAR;
        }
        match inode.node() {
            Node::Directory => file_type::DIRECTORY,
            Node::Regular(_) => file_type::REGULAR,
            Node::CharDevice(_) if self.overlay.is_some() && is_whiteout(&inode) => {
                file_type::REGULAR
            }
            Node::CharDevice(_) => file_type::CHAR_DEVICE,
            Node::BlockDevice(_) => file_type::BLOCK_DEVICE,
            Node::Fifo => file_type::FIFO,
            Node::Socket => file_type::SOCKET,
            Node::Symlink(_) => file_type::SYMLINK,
        }
    }

    /// Lists a directory. Only overlays of root may have to hide objects: since Linux 6.5, overlayfs itself hides
    /// them, and overlays of users need a newer kernel in any case.
    pub(super) fn listing(&self, source: InodeSource) -> Listing<'a> {
        let InodeSource::Tree(id) = source else { unreachable!("a shadow is not a directory") };
        let directory = self.tree.inode(id);
        match &self.overlay {
            Some(overlay) if overlay.names == OverlayNames::TRUSTED => {
                Listing::for_directory(&directory)
            }
            _ => Listing::plain(&directory),
        }
    }

    /// Returns the object of a content, if all inodes with this content share its blocks. This is so if the content is
    /// longer than a block, if its tails would together take more than a block, or if files have no tails.
    pub(super) fn shared(&self, data: &PlainData<'_>) -> Option<StringId> {
        let PlainData::External { size, object: Some(object) } = *data else { return None };
        let uses = u64::from(self.uses[object.index()]);
        let block_size = self.rules.block_size.bytes();
        let saves = size.saturating_mul(uses) > block_size || !self.rules.file_tails;
        (uses > 1 && saves).then_some(object)
    }

    /// Returns the location of a file's bytes on a device.
    pub(super) fn on_device(&self, data: &PlainData<'_>) -> Option<&OnDevice> {
        let PlainData::External { object: Some(object), .. } = data else { return None };
        self.files.on_devices.get(object)
    }

    /// Returns the location and the chunk table of a file whose bytes are on devices.
    pub(super) fn table(&self, data: &PlainData<'_>) -> Option<(&OnDevice, ChunkTable<'_>)> {
        let file = self.on_device(data)?;
        Some((file, self.files.table(file, self.devices.is_wide())))
    }
}

/// Returns the xattrs that a composefs image adds to an external file.
fn file_pairs(tree: &Tree, overlay: Option<&Overlay>, item: &Item) -> Option<FilePairs> {
    match item.source {
        InodeSource::Tree(id) if overlay.is_some() => {
            tree.inode(id).external().map(FilePairs::for_external)
        }
        _ => None,
    }
}

/// Returns the binary logarithm of the chunk size, and the number of chunks, for a file of `size` bytes.
pub(super) fn chunks_of(size: u64) -> (u32, u64) {
    let bits =
        (u64::BITS - (size - 1).leading_zeros()).clamp(*CHUNK_BITS.start(), *CHUNK_BITS.end());
    (bits, size.div_ceil(1 << bits))
}

/// Whether the inode is a character device 0:0, which is a whiteout to overlayfs.
pub(super) fn is_whiteout(inode: &Inode<'_>) -> bool {
    inode.external().is_none()
        && matches!(inode.node(), Node::CharDevice(number) if device_number(number) == 0)
}

/// Returns the 32 bits of a device number that images store.
fn device_number(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).expect("masked")
}
