//! The writer: a tree becomes an image in two passes, lay out and then stream, so that it is never in memory.

mod composefs;
mod directory;
mod inode;
mod listing;
mod output;
mod pair;
mod place;
mod plain;
mod plan;
mod stream;
mod xattrs;

use std::io;

use crate::tree::{Inode, Tree};
use crate::verity::DeviceId;
use composefs::Survey;
pub use plain::{DEVICES_MAX, DeviceFile, Flavor, Native, Piece, Placed, Run, Standalone, Stored};
use plan::Plan;

/// What kind of image the writer makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Data is objects, which overlayfs finds through xattrs. The same bytes as C's `mkcomposefs` makes.
    Composefs(Versions),
    /// Data is in the image, which needs nothing else: for EROFS by itself.
    Standalone(Standalone),
}

/// A version of composefs' rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// The first.
    V0,
    /// Marks directories that have whiteouts as overlayfs wants it since Linux 6.8, with `opaque=x`.
    V1,
}

impl Version {
    /// The number that the image's header has.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::V0 => 0,
            Self::V1 => 1,
        }
    }
}

/// The versions that an image may have: the least that can say what the tree has is taken.
///
/// A `max` below `min` counts as `min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Versions {
    /// Not older than this.
    pub min: Version,
    /// Not newer than this.
    pub max: Version,
}

impl Default for Versions {
    /// Any.
    fn default() -> Self {
        Self { min: Version::V0, max: Version::V1 }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Length of the image.
    pub bytes: u64,
    /// The version of composefs' rules that it has; `None` in other profiles.
    pub version: Option<Version>,
    /// Inodes in it, with those that the profile adds.
    pub inodes: u64,
}

/// Why there is no image, or none that is whole.
///
/// Except for [`WriteError::Output`] and those about contents, nothing was written. Paths begin with a slash and are shown with escapes.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// More xattrs than composefs gives an inode.
    #[error(
        "\"{}\" has {bytes} bytes of xattrs, more than the 32767 of an inode",
        path.escape_ascii()
    )]
    XattrSpace {
        /// The inode.
        path: Vec<u8>,
        /// By composefs' account: 12, and for each xattr 7 and the bytes of its whole name and value.
        bytes: u64,
    },
    /// The source has an xattr that the profile uses itself, with so long a value that C refuses the inode.
    #[error(
        "\"{}\" has its own xattr \"{}\", which the image needs for a whiteout",
        path.escape_ascii(),
        name.escape_ascii()
    )]
    XattrInTheWay {
        /// The inode.
        path: Vec<u8>,
        /// As it would be named in the image.
        name: Vec<u8>,
    },
    /// An external file that takes more than 1024 chunks of 8 TiB.
    #[error("\"{}\" has {size} bytes, more than the 8 PiB of a file", path.escape_ascii())]
    FileTooLarge {
        /// The file.
        path: Vec<u8>,
        /// Bytes.
        size: u64,
    },
    /// A file whose bytes are in the tree, and too many for the image.
    #[error("\"{}\" has {size} bytes inline, more than 5000", path.escape_ascii())]
    InlineTooLarge {
        /// The file.
        path: Vec<u8>,
        /// Bytes.
        size: u64,
    },
    /// An object that is not named by SHA-256.
    #[error(
        "\"{}\" has a sha512 object id, but composefs images use only sha256",
        path.escape_ascii()
    )]
    ObjectAlgorithm {
        /// The file.
        path: Vec<u8>,
    },
    /// More xattrs than an inode of EROFS can have.
    #[error(
        "\"{}\" has {bytes} bytes of xattrs, more than the 262148 of an inode",
        path.escape_ascii()
    )]
    XattrsTooLarge {
        /// The inode.
        path: Vec<u8>,
        /// As they would be written.
        bytes: u64,
    },
    /// A device whose number has more than the 12 bits of major and 20 bits of minor that Linux has.
    #[error("\"{}\" has the device number {number:#x}, which Linux does not support", path.escape_ascii())]
    DeviceNumber {
        /// The device.
        path: Vec<u8>,
        /// As C libraries make it.
        number: u64,
    },
    /// The bytes of a file are not to be had.
    #[error("cannot read the contents of \"{}\"", path.escape_ascii())]
    Content {
        /// The file.
        path: Vec<u8>,
        /// As who was to give them said it.
        source: io::Error,
    },
    /// A file has another length than the tree says.
    #[error("the length of \"{}\" is not {size} bytes", path.escape_ascii())]
    ContentSize {
        /// The file.
        path: Vec<u8>,
        /// By the tree.
        size: u64,
    },
    /// What was first read of the ends of files is not what was there when all of them was read.
    #[error("files changed while the image was written")]
    ContentChanged,
    /// A device that is not named by SHA-256.
    #[error("device {id} has a sha512 id, but a device table has room only for sha256")]
    DeviceAlgorithm {
        /// The device.
        id: DeviceId,
    },
    /// A device that is not blocks, or no blocks, or too many.
    #[error("device {id} has {bytes} bytes, not 1 to 2^48 - 1 blocks of {block}")]
    DeviceLength {
        /// The device.
        id: DeviceId,
        /// Its length.
        bytes: u64,
        /// Bytes in a block.
        block: u64,
    },
    /// A file that was said to be where it cannot be.
    #[error(
        "\"{}\" has {size} bytes, which cannot be at byte {} of device {}",
        path.escape_ascii(), stored.offset, stored.device
    )]
    Misplaced {
        /// The file.
        path: Vec<u8>,
        /// Its bytes.
        size: u64,
        /// Where they were said to be.
        stored: Stored,
    },
    /// A file whose pieces cannot be where they are said to be.
    #[error(
        "\"{}\" has {size} bytes, which do not match the stated pieces of devices",
        path.escape_ascii()
    )]
    MisplacedPieces {
        /// The file.
        path: Vec<u8>,
        /// Its bytes.
        size: u64,
    },
    /// More than the format or the writer can count.
    #[error("the image is too large: it has more than {0}")]
    TooLarge(&'static str),
    /// The bytes could not be handed on. What was written so far is no image.
    #[error("cannot write the image")]
    Output(#[source] io::Error),
}

/// Writes the image of a tree: from first byte to last, in large pieces, and the same for every tree with the same
/// content.
///
/// [`Hasher`](crate::verity::Hasher) is a writer, for an image that goes nowhere else; [`Tee`](crate::verity::Tee)
/// hashes one on its way to a file.
///
/// ```
/// # extern crate quire_image as image;
/// # fn main() -> Result<(), image::erofs::WriteError> {
/// use image::erofs::{Profile, Versions, write};
/// use image::tree::Builder;
/// use image::verity::{Algorithm, Hasher};
///
/// let tree = Builder::new().finish();
/// let mut hasher = Hasher::new(Algorithm::Sha256);
/// let summary = write(&tree, &Profile::Composefs(Versions::default()), &mut hasher)?;
/// println!("{} bytes, object {}", summary.bytes, hasher.finish());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`WriteError`]: what the profile cannot hold, or what `out` answers.
pub fn write(
    tree: &Tree,
    profile: &Profile,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    let nobody = |_: Inode<'_>, _, _: &mut dyn io::Write| {
        Err(io::Error::new(io::ErrorKind::Unsupported, "the writer has no source of file contents"))
    };
    write_with(tree, profile, &mut { nobody }, out)
}

/// What gives the bytes of external files: asked for a [`Piece`] of a file, it writes that. Not a type of its own, since
/// all it has to be is a closure.
pub type Contents<'a> = dyn FnMut(Inode<'_>, Piece, &mut dyn io::Write) -> io::Result<()> + 'a;

/// Writes an image whose files' bytes are in other files, as far as they are there. `contents` gives the others, and is
/// asked for all of each once before anything is written, for its fingerprint.
///
/// # Errors
/// [`WriteError`]. What was written before an error is no image.
pub fn write_native(
    tree: &Tree,
    native: &Native<'_>,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    plain::write_native(tree, native, contents, out)
}

/// As [`write()`], for profiles whose images hold the bytes of external files: `contents` gives them. The composefs profile
/// does not ask for any.
///
/// # Errors
/// [`WriteError`]. What was written before an error is no image.
pub fn write_with(
    tree: &Tree,
    profile: &Profile,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    let versions = match profile {
        Profile::Composefs(versions) => *versions,
        Profile::Standalone(standalone) => return plain::write(tree, standalone, contents, out),
    };
    let plan = Plan::of(tree, Survey::of(tree, versions)?)?;
    let bytes = stream::write(&plan, out)?;
    let (version, inodes) = (plan.survey.version, plan.survey.items.len() as u64);
    Ok(Summary { bytes, version: Some(version), inodes })
}
