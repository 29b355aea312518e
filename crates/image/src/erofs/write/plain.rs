//! The surveys of images that are mounted without overlayfs: the image holds the tree unchanged, with the bytes of
//! files or the addresses of those bytes in other files.
//!
//! Sections 4 and 5 of `docs/format/erofs-profile.md` have the rules.

use std::borrow::Cow;

use hashbrown::HashMap;
use sha2::{Digest as _, Sha256};

use super::chunks::Pieces;
use super::devices::Devices;
use super::files::Hashed;
use super::listing::InodeSource;
use super::native::{BLOCK_SIZE, Native, Placed, Stored};
use super::on_device::{DataForm, OnDevice};
use super::rules::Rules;
use super::survey::{Item, PlainData, Survey};
use super::xattrs::prefixes::Prefixes;
use super::{Contents, ErofsWriteError, Piece};
use crate::erofs::layout::{
    NATIVE_HAS_ACL, NATIVE_HAS_TAR, NATIVE_HEADER_VERSION, NATIVE_MAGIC, RawNativeHeader,
};
use crate::tree::{Inode, InodeId, Node, StringId, Timestamp, Tree, XattrsId};
use crate::verity::ObjectId;

/// The options of a self-contained image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Standalone {
    /// The reader that the image is for.
    pub flavor: Flavor,
    /// UUID of the volume; zeros for none.
    pub uuid: [u8; 16],
}

/// The reader that a self-contained image is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flavor {
    /// Linux since 5.4. The image holds all data of the tree.
    #[default]
    Linux,
    /// Linux, on memory that it maps without a page cache (DAX). As for `Linux`, but the data of each file begins at a
    /// block and is in blocks. Linux maps no file whose end is after the inode.
    Dax,
    /// gVisor's reader, which refuses inodes with xattrs, and cannot map files whose data is not in blocks. The image
    /// has no xattrs, and therefore no ACLs, capabilities and labels.
    Gvisor,
}

impl Standalone {
    pub(super) fn survey<'a>(&self, tree: &'a Tree) -> Result<Survey<'a>, ErofsWriteError> {
        let rules = match self.flavor {
            Flavor::Linux => Rules::STANDALONE,
            Flavor::Dax | Flavor::Gvisor => Rules::MAPPED,
        };
        survey(tree, rules, self.flavor, Prefixes::default())
    }
}

impl Native<'_> {
    pub(super) fn survey<'a>(
        &self,
        tree: &'a Tree,
        contents: &mut Contents<'_>,
    ) -> Result<Survey<'a>, ErofsWriteError> {
        let prefixes = Prefixes::with_fingerprint();
        let mut survey = survey(tree, Rules::NATIVE, Flavor::Linux, prefixes)?;
        survey.add_files(self, contents)?;
        Ok(survey)
    }

    pub(super) fn header(&self, survey: &Survey<'_>) -> RawNativeHeader {
        let when = |condition, flag| if condition { flag } else { 0 };
        let flags = when(survey.has_acl, NATIVE_HAS_ACL) | when(self.has_tar, NATIVE_HAS_TAR);
        RawNativeHeader {
            magic: NATIVE_MAGIC,
            version: NATIVE_HEADER_VERSION.into(),
            flags: flags.into(),
        }
    }
}

fn survey(
    tree: &Tree,
    rules: Rules,
    flavor: Flavor,
    prefixes: Prefixes,
) -> Result<Survey<'_>, ErofsWriteError> {
    let mut survey = Survey::new(tree, rules, None);
    survey.prefixes = prefixes;
    survey.uses = vec![0; tree.strings_bound()];
    list(&mut survey);
    let mut times = HashMap::new();
    for at in 0..survey.items.len() {
        let item = survey.items[at];
        let inode = survey.inode(&item);
        survey.count_set(&item, |_, xattrs, _| {
            let pairs = tree.xattrs(if flavor == Flavor::Gvisor { XattrsId::NONE } else { xattrs });
            Ok(pairs.map(|(name, value)| (Cow::Borrowed(name), value)).collect())
        })?;
        if let Node::CharDevice(number) | Node::BlockDevice(number) = inode.node()
            && u32::try_from(number).is_err()
        {
            return Err(ErofsWriteError::DeviceNumber { path: inode.path(), number });
        }
        let facts = survey.facts(item.source);
        let mut bytes = 0;
        if let PlainData::External { size, object } = facts.data {
            bytes = size;
            if let Some(object) = object {
                survey.uses[object.index()] += 1;
            }
        }
        if facts.is_narrow(bytes) {
            *times.entry(facts.metadata.mtime).or_insert(0_u32) += 1;
        }
    }
    // If several times are equally frequent, the earliest is used, so that the image is deterministic.
    let most = |(time, count): &(Timestamp, u32)| (*count, std::cmp::Reverse(*time));
    survey.epoch = times.into_iter().max_by_key(most).map_or(survey.epoch, |(time, _)| time);
    survey.share()?;
    Ok(survey)
}

impl Survey<'_> {
    /// Finds the locations and the fingerprints of all files.
    fn add_files(
        &mut self,
        native: &Native<'_>,
        contents: &mut Contents<'_>,
    ) -> Result<(), ErofsWriteError> {
        self.devices = Devices::from_files(native.devices)?;
        let mut hashes = Vec::new();
        let mut of_objects = HashMap::new();
        for at in 0..self.items.len() {
            let inode = self.inode(&self.items[at]);
            let hash = match self.data(&inode) {
                PlainData::Inline(bytes) if !bytes.is_empty() => Sha256::digest(bytes).into(),
                PlainData::External { size: size @ 1.., object: Some(object) } => {
                    match of_objects.get(&object) {
                        Some(hash) => *hash,
                        None => {
                            let hash = self.add_object(native, &inode, size, object, contents)?;
                            of_objects.insert(object, hash);
                            hash
                        }
                    }
                }
                PlainData::External { size: size @ 1.., object: None } => {
                    hashed(&inode, size, contents)?
                }
                _ => continue,
            };
            hashes.push((inode.id(), hash));
        }
        for item in &self.items {
            let data = self.facts(item.source).data;
            if let (PlainData::External { size, .. }, Some(file)) = (data, self.on_device(&data))
                && size != file.size
            {
                return Err(ErofsWriteError::ContentSize { path: self.path(item), size });
            }
        }
        let added = self.files.set_fingerprints(hashes.into_iter(), self.tree.inode_bound());
        let bytes = added.and_then(|()| u32::try_from(self.shared_bytes()).ok());
        bytes.ok_or(ErofsWriteError::TooLarge("4 GiB of shared xattrs"))?;
        Ok(())
    }

    /// Records the location of an object, and returns its fingerprint.
    fn add_object(
        &mut self,
        native: &Native<'_>,
        inode: &Inode<'_>,
        size: u64,
        key: StringId,
        contents: &mut Contents<'_>,
    ) -> Result<[u8; 32], ErofsWriteError> {
        let object = ObjectId::from_bytes(self.tree.string(key)).expect("the tree has no others");
        let Some(placed) = (native.find)(&object) else {
            return hashed(inode, size, contents);
        };
        match placed {
            Placed::Whole(stored) => {
                let file = self.place_on_device(size, &stored);
                let misplaced = || ErofsWriteError::Misplaced { path: inode.path(), size, stored };
                self.files.on_devices.insert(key, file.ok_or_else(misplaced)?);
                Ok(stored.fingerprint)
            }
            Placed::Pieces { runs, fingerprint } => {
                let placed = Pieces::place(runs, size, &self.devices);
                let misplaced = || ErofsWriteError::MisplacedPieces { path: inode.path(), size };
                let (mut file, pieces) = placed.ok_or_else(misplaced)?;
                if let Some(pieces) = pieces {
                    let number = u32::try_from(self.files.pieces.len());
                    let number = number
                        .map_err(|_many| ErofsWriteError::TooLarge("2^32 files in pieces"))?;
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
fn hashed(
    inode: &Inode<'_>,
    size: u64,
    contents: &mut Contents<'_>,
) -> Result<[u8; 32], ErofsWriteError> {
    let mut hashed = Hashed::default();
    contents(*inode, Piece::Whole, &mut hashed)
        .map_err(|source| ErofsWriteError::Content { path: inode.path(), source })?;
    hashed.finish(size).ok_or_else(|| ErofsWriteError::ContentSize { path: inode.path(), size })
}

/// Lists the inodes directory by directory, depth first, with all inodes of a directory together. A walk that reads
/// the inodes of a directory after its names, and then enters its subdirectories, therefore reads the image from
/// beginning to end.
fn list(survey: &mut Survey<'_>) {
    let Survey { tree, items, .. } = survey;
    items.push(Item::new(InodeSource::Tree(InodeId::ROOT)));
    let mut pending = vec![InodeId::ROOT];
    while let Some(directory) = pending.pop() {
        let first = pending.len();
        for entry in tree.inode(directory).children().filter(|entry| entry.is_owner) {
            items.push(Item::new(InodeSource::Tree(entry.inode.id())));
            if entry.inode.is_directory() {
                pending.push(entry.inode.id());
            }
        }
        pending[first..].reverse();
    }
}
