//! Numbers of files, and the empty files and directories that a file system shows in addition to those of the image, as
//! mount points.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use image::erofs::read::{FileType, Inode, Nid, ReadAt, ReadError, ShownFile, ShownImage};
use kernel::fuse::{NodeAttributes, NodeNumber};
use rustix::fs::Mode;

/// Node number of the first place. Nodes of an image have numbers below 2^60, because its size in bytes is below 2^64
/// and an inode has at least 32 bytes.
const FIRST: u64 = 1 << 62;

/// Inode number of the first place; the following ones have smaller numbers. Programs of 32 bits without support for
/// large files cannot list a directory in which a number has more bits. Inodes have larger numbers only in images of
/// 128 GiB.
const FIRST_INODE: u64 = 0xffff_ffff;

/// Position of the first place in the listing of a directory. Such programs also need positions below 2^31.
const FIRST_POSITION: u64 = 1 << 30;
/// The same for large directories, whose entries may have such positions themselves.
const FIRST_POSITION_OF_LARGE: u64 = 1 << 62;
/// Size of the smallest large directory, in bytes. In an image, a position has the number of a block of at least 512
/// bytes in its upper bits, from bit 16 on, so smaller directories have positions below [`FIRST_POSITION`].
const LARGE: u64 = 8 << 20;

/// The places of a file system.
#[derive(Debug)]
pub(super) struct Places(Vec<Place>);

/// An empty file or directory that the image lacks.
#[derive(Debug)]
pub(super) struct Place {
    /// The directory that shows the place: one of the image, or another place.
    directory: NodeNumber,
    name: Vec<u8>,
    is_directory: bool,
}

impl Places {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Finds out which of these paths an image lacks. Paths of directories end with a slash; missing directories above
    /// are added. A path that leads through a link or a file of the image is left out.
    ///
    /// # Errors
    /// If a directory of the image cannot be read.
    pub(super) fn missing<S: ReadAt>(
        image: &ShownImage<S>,
        paths: &[&str],
    ) -> Result<Self, ReadError> {
        let mut places = Self::new();
        for path in paths {
            places.add(image, path)?;
        }
        Ok(places)
    }

    fn add<S: ReadAt>(&mut self, image: &ShownImage<S>, path: &str) -> Result<(), ReadError> {
        let mut directory = NodeNumber::ROOT;
        // The nid of the same directory, if it is one of the image.
        let mut nid = Some(image.root());
        let mut names = path.split('/').filter(|it| !it.is_empty()).peekable();
        while let Some(name) = names.next() {
            let is_directory = names.peek().is_some() || path.ends_with('/');
            let found = match nid {
                Some(nid) => image.lookup(nid, name.as_bytes())?,
                None => None,
            };
            let next = match found {
                Some(file) if file.kind == FileType::Directory => Some(file.inode.nid()),
                Some(file) if is_whiteout(&file) => None,
                // The caller looks where a link leads, and whether a file is in the way.
                Some(_) => return Ok(()),
                None => None,
            };
            directory = match (next, self.find(directory, name.as_bytes())) {
                (Some(nid), _) => match node_of(image, nid) {
                    Some(node) => node,
                    None => return Ok(()),
                },
                (None, Some((node, place))) if place.is_directory => node,
                (None, Some(_)) => return Ok(()),
                (None, None) => {
                    let node = self.next();
                    self.0.push(Place { directory, name: name.into(), is_directory });
                    node
                }
            };
            nid = next;
        }
        Ok(())
    }

    /// The number that the next place gets.
    fn next(&self) -> NodeNumber {
        number(self.0.len())
    }

    /// Returns the place with this number.
    pub(super) fn get(&self, node: NodeNumber) -> Option<&Place> {
        let index = node.0.checked_sub(FIRST)?;
        self.0.get(usize::try_from(index).ok()?)
    }

    /// Returns the place with this name in a directory.
    pub(super) fn find(&self, directory: NodeNumber, name: &[u8]) -> Option<(NodeNumber, &Place)> {
        self.of(directory).find(|(_, place)| place.name == name)
    }

    /// Returns the places in a directory, in the order of their numbers.
    fn of(&self, directory: NodeNumber) -> impl Iterator<Item = (NodeNumber, &Place)> {
        let numbered = self.0.iter().enumerate().map(|(index, place)| (number(index), place));
        numbered.filter(move |(_, place)| place.directory == directory)
    }

    /// Returns the places of a directory from a distance on, each with the distance after it.
    pub(super) fn after(
        &self,
        directory: NodeNumber,
        from: u64,
    ) -> impl Iterator<Item = (u64, NodeNumber, &Place)> {
        let from = FIRST.saturating_add(from);
        let places = self.of(directory).filter(move |(node, _)| node.0 >= from);
        places.map(|(node, place)| (node.0.saturating_sub(FIRST).saturating_add(1), node, place))
    }
}

/// Returns the node number of a file of an image. The root has a fixed one. All others have their inode's number plus
/// 2, because 0 and 1 have a meaning in FUSE.
pub(super) fn node_of<S: ReadAt>(image: &ShownImage<S>, nid: Nid) -> Option<NodeNumber> {
    if nid == image.root() {
        return Some(NodeNumber::ROOT);
    }
    nid.0.checked_add(2).map(NodeNumber)
}

/// Returns the position after all entries of a directory of an image.
pub(super) const fn positions_after(directory: &Inode) -> u64 {
    if directory.size() < LARGE { FIRST_POSITION } else { FIRST_POSITION_OF_LARGE }
}

/// Whether an overlay takes a file for a whiteout: it hides the name in all lower layers, and is not shown itself.
/// Source: Linux `include/linux/fs.h`, `IS_WHITEOUT`.
pub(super) fn is_whiteout(file: &ShownFile) -> bool {
    file.kind == FileType::CharDevice && file.inode.device_number() == 0
}

fn number(index: usize) -> NodeNumber {
    NodeNumber(FIRST.saturating_add(u64::try_from(index).unwrap_or(u64::MAX)))
}

impl Place {
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(super) const fn is_directory(&self) -> bool {
        self.is_directory
    }

    /// The attributes of a place: it belongs to root, and its time is 1970.
    pub(super) fn attributes(&self, node: NodeNumber) -> NodeAttributes {
        let mode = Mode::from_raw_mode(if self.is_directory { 0o755 } else { 0o644 });
        let inode = FIRST_INODE.saturating_sub(node.0.saturating_sub(FIRST));
        let file = NodeAttributes::file(inode, 0, mode, (0, 0));
        match self.is_directory {
            true => NodeAttributes { kind: rustix::fs::FileType::Directory, links: 2, ..file },
            false => file,
        }
    }
}
