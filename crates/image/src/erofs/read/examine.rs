//! Reads every part of an image once.

use super::error::{ErofsCorruption, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::native::native_tree;
use super::native_files::{Located, Objects};
use super::to_tree::{Owners, View, to_tree};
use super::walk::{Budget, work_bound};
use super::xattr::InodeXattrs;
use super::{ByteOffset, Device, Image, RunPlace, to_u64, to_usize};
use crate::verity::Algorithm;

/// The result of [`examine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Examined {
    /// Number of names, including the root.
    pub names: u64,
    /// Number of inodes that have a name.
    pub inodes: u64,
    /// Number of xattrs of all inodes.
    pub xattrs: u64,
    /// Number of files that have a fingerprint.
    pub fingerprints: u64,
    /// Number of bytes of file content that were read.
    pub bytes: u64,
}

/// Number of names that are looked up in addition to being listed.
const LOOKUPS: u64 = 4096;

/// Reads every part of an image in memory: every name, inode, xattr and target, up to `content_max` bytes of file
/// content in the image, and the image as a tree in both views. Tests and fuzzers use it to show that reading
/// terminates without a panic; other callers can use it to check an image.
///
/// # Errors
/// The first [`ReadError`].
pub fn examine(bytes: &[u8], content_max: u64) -> Result<Examined, ReadError> {
    let image = Image::open(bytes)?;
    let mut found = Examined::default();
    let mut work = Budget::new(work_bound(to_u64(bytes.len())));
    let mut xattrs = InodeXattrs::new();
    let mut directories: Vec<Option<Inode>> = Vec::new();
    let mut left = content_max;
    let mut walk = image.walk();
    while let Some(step) = walk.next()? {
        found.names = found.names.saturating_add(1);
        if let Some(parent) = directories.get(step.parent).copied().flatten()
            && found.names <= LOOKUPS
        {
            let found = image.lookup(&parent, step.name)?;
            debug_assert_eq!(found, Some(step.inode.nid()), "a name that is listed is found");
        }
        if !step.is_new {
            continue;
        }
        let is_directory = step.inode.file_type() == FileType::Directory;
        directories.push(is_directory.then_some(step.inode));
        found.inodes = found.inodes.saturating_add(1);
        image.read_xattrs(&step.inode, &mut xattrs)?;
        work.spend(xattrs.bytes())?;
        found.fingerprints =
            found.fingerprints.saturating_add(image.fingerprint(&step.inode)?.is_some().into());
        found.xattrs = found.xattrs.saturating_add(to_u64(xattrs.len()));
        if let Some(last) = xattrs.iter().last() {
            work.spend(xattrs.bytes())?;
            let value = image.xattr(&step.inode, last.name)?;
            debug_assert_eq!(
                value.as_deref(),
                Some(last.value),
                "an xattr that is listed is found"
            );
        }
        match step.inode.file_type() {
            FileType::Symlink => drop(image.read_link(&step.inode)?),
            FileType::Regular => {
                let read = read_file(&image, &step.inode, &mut left)?;
                found.bytes = found.bytes.saturating_add(read);
            }
            _ => {}
        }
    }
    debug_assert_eq!(image.lookup(&image.root()?, b"/").ok(), Some(None::<Nid>), "no such name");
    drop(to_tree(&image, View::Plain)?);
    if image.superblock().composefs.is_none() {
        let find = |located: &Located<'_>| {
            let sum = located.runs.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.len));
            debug_assert_eq!(sum, Some(located.size), "the runs cover the file");
            None
        };
        let nobody = Objects { algorithm: Algorithm::Sha256, inline_max: 64, find: &find };
        match native_tree(&image, nobody) {
            // These are data on devices that were not passed, and holes that are too large to be hashed.
            Ok(_) | Err(ReadError::NoDevice(_)) => {}
            Err(ReadError::Corrupt(ErofsCorruption::Amplified { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    image.device_ranges(|range| debug_assert!(range.len > 0, "an extent is not empty"))?;
    if image.superblock().composefs.is_some() {
        drop(to_tree(&image, View::Composefs(Owners::FirstMet))?);
        drop(to_tree(&image, View::Composefs(Owners::AsWritten))?);
    }
    Ok(found)
}

/// Reads at most `left` bytes of a file, skipping data on other devices, and returns the number of bytes read.
fn read_file(image: &Image<&[u8]>, inode: &Inode, left: &mut u64) -> Result<u64, ReadError> {
    let mut buffer = vec![0; 64 << 10];
    let mut reader = image.reader(inode);
    let (mut at, mut bytes) = (0, 0);
    while *left != 0
        && let Some(extent) = image.map(inode, ByteOffset(at))?
    {
        let len = extent.len.min(*left);
        let end = at.saturating_add(len);
        *left = left.saturating_sub(len);
        if !matches!(extent.place, RunPlace::Data(device, _) if device != Device::IMAGE) {
            while at < end {
                let len = buffer.len().min(to_usize(end.saturating_sub(at)));
                let buffer = buffer.get_mut(..len).unwrap_or_default();
                match reader.read(ByteOffset(at), buffer, &[])? {
                    0 => return Ok(bytes),
                    read => at = at.saturating_add(to_u64(read)),
                }
            }
            bytes = len.saturating_add(bytes);
        }
        at = end;
    }
    Ok(bytes)
}
