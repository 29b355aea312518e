//! What the tree is in an image that is mounted by itself.

use std::borrow::Cow;

use hashbrown::HashMap;

use super::Flavor;
use crate::erofs::write::WriteError;
use crate::erofs::write::inode::Form;
use crate::erofs::write::place::BLOCK_SIZE;
use crate::erofs::write::xattrs::{SetId, Xattrs};
use crate::tree::{Content, Inode, InodeId, Node, StringId, Timestamp, Tree};

/// An inode of the image. There is one for each, so they are small.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) id: InodeId,
    /// The first block of its data, if it has any.
    pub(super) block: u32,
    /// Bytes of data behind the inode.
    pub(super) tail: u16,
    pub(super) form: Form,
    /// Its blocks are written for it, not for another with the same content before it.
    pub(super) owns_blocks: bool,
}
const _: () = assert!(size_of::<Item>() == 12);

/// What an inode's data is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Data<'a> {
    Directory,
    Symlink(&'a [u8]),
    /// A file whose bytes are in the tree.
    Inline(&'a [u8]),
    /// A file whose bytes have to be asked for. Equal contents have equal objects.
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

    /// Whether its blocks are file data, not names or targets.
    pub(super) const fn is_file(&self) -> bool {
        matches!(self, Self::Inline(_) | Self::External { .. })
    }
}

/// Every inode of the image, with what they share.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    pub(super) tree: &'a Tree,
    pub(super) flavor: Flavor,
    /// In the order that `ls -lR` asks for them.
    pub(super) items: Vec<Item>,
    /// The time of compact inodes.
    pub(super) epoch: Timestamp,
    pub(super) xattrs: Xattrs<'a>,
    pub(super) has_xattrs: bool,
    /// The image's sets by the tree's.
    sets: Vec<SetId>,
    /// Inodes by the object that has their content.
    uses: Vec<u32>,
}

impl<'a> Survey<'a> {
    pub(super) fn of(tree: &'a Tree, flavor: Flavor) -> Result<Self, WriteError> {
        let mut survey = Self {
            tree,
            flavor,
            items: list(tree),
            epoch: Timestamp::default(),
            xattrs: Xattrs::new(tree),
            has_xattrs: false,
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
        // Of times that are as frequent the earliest, so that the image is always the same.
        let most = |(time, count): &(Timestamp, u32)| (*count, std::cmp::Reverse(*time));
        survey.epoch = times.into_iter().max_by_key(most).map_or(survey.epoch, |(time, _)| time);
        for item in &mut survey.items {
            let inode = tree.inode(item.id);
            if is_narrow(&inode) && inode.metadata().mtime == survey.epoch {
                item.form = Form::Compact;
            }
        }
        let none = std::iter::empty();
        survey.xattrs.share(none).ok_or(WriteError::TooLarge("shared xattrs"))?;
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
            *set = added.ok_or(WriteError::TooLarge("xattrs"))?;
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

    /// The object of a content that is put into blocks once for all inodes that have it: when it has more than a block in
    /// any case, or when all the tails would take more.
    pub(super) fn shared(&self, data: &Data<'_>) -> Option<StringId> {
        let Data::External { size, object: Some(object) } = *data else { return None };
        let uses = u64::from(self.uses[object.index()]);
        (uses > 1 && size.saturating_mul(uses) > BLOCK_SIZE).then_some(object)
    }
}

/// Depth first by directories, but all inodes of a directory together: a walk that asks for each of them when it has read
/// the names, and then goes into the directories among them, goes through the image from its beginning to its end.
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

/// Entries of a directory that are less than 4 GiB whatever their names are.
const ENTRIES: usize = 16_000_000;

/// Whether the compact form can hold the inode, if the time is right.
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
