//! The writer: makes an image from a tree in two passes, layout and stream, so the image is never in memory.

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
use pair::OverlayNames;
pub use plain::{DEVICES_MAX, DeviceFile, Flavor, Native, Piece, Placed, Run, Standalone, Stored};
use plan::Plan;

/// The kind of image that the writer makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Data is objects, which overlayfs finds through xattrs. The same bytes as C's `mkcomposefs` makes.
    Composefs(Versions),
    /// The same for overlays of user namespaces (`userxattr`). It is for a tree that [`for_user`](crate::tree::for_user)
    /// made, and nothing but the kernel reads it.
    Stubs,
    /// Data is in the image, which needs nothing else to be mounted.
    Standalone(Standalone),
}

/// A version of composefs' rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// The first.
    V0,
    /// Marks directories with whiteouts with `opaque=x`, as overlayfs needs it since Linux 6.8.
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

/// The versions that an image may have. The writer takes the lowest one that can hold the tree.
///
/// A `max` below `min` counts as `min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Versions {
    /// The lowest version.
    pub min: Version,
    /// The highest version.
    pub max: Version,
}

impl Default for Versions {
    /// Any.
    fn default() -> Self {
        Self { min: Version::V0, max: Version::V1 }
    }
}

/// The result of writing an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Length of the image in bytes.
    pub bytes: u64,
    /// The version of composefs' rules that it has; `None` in other profiles.
    pub version: Option<Version>,
    /// Number of inodes in it, with those that the profile adds.
    pub inodes: u64,
}

/// Why an image could not be written, or is incomplete.
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
    /// An inode has an xattr that the profile uses itself, with a value so long that C composefs refuses the inode.
    #[error(
        "\"{}\" has its own xattr \"{}\", which the image needs for a whiteout",
        path.escape_ascii(),
        name.escape_ascii()
    )]
    XattrInTheWay {
        /// The inode.
        path: Vec<u8>,
        /// Name that the xattr would have in the image.
        name: Vec<u8>,
    },
    /// An external file that takes more than 1024 chunks of 8 TiB.
    #[error("\"{}\" has {size} bytes, more than the 8 PiB of a file", path.escape_ascii())]
    FileTooLarge {
        /// The file.
        path: Vec<u8>,
        /// Length in bytes.
        size: u64,
    },
    /// A file whose bytes are in the tree, and too many for the image.
    #[error("\"{}\" has {size} bytes inline, more than 5000", path.escape_ascii())]
    InlineTooLarge {
        /// The file.
        path: Vec<u8>,
        /// Length in bytes.
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
        /// Bytes that the xattrs would take.
        bytes: u64,
    },
    /// A device whose number has more than the 12 bits of major and 20 bits of minor that Linux has.
    #[error("\"{}\" has the device number {number:#x}, which Linux does not support", path.escape_ascii())]
    DeviceNumber {
        /// The device.
        path: Vec<u8>,
        /// The device number, in the encoding of C libraries.
        number: u64,
    },
    /// The bytes of a file cannot be read.
    #[error("cannot read the contents of \"{}\"", path.escape_ascii())]
    Content {
        /// The file.
        path: Vec<u8>,
        /// The error of `contents`.
        source: io::Error,
    },
    /// The length of a file is not the one in the tree.
    #[error("the length of \"{}\" is not {size} bytes", path.escape_ascii())]
    ContentSize {
        /// The file.
        path: Vec<u8>,
        /// Length in bytes in the tree.
        size: u64,
    },
    /// The ends of files changed between the first and the second read.
    #[error("files changed while the image was written")]
    ContentChanged,
    /// A device that is not named by SHA-256.
    #[error("device {id} has a sha512 id, but a device table has room only for sha256")]
    DeviceAlgorithm {
        /// The device.
        id: DeviceId,
    },
    /// The length of a device is not in whole blocks, is 0, or is too large.
    #[error("device {id} has {bytes} bytes, not 1 to 2^48 - 1 blocks of {block}")]
    DeviceLength {
        /// The device.
        id: DeviceId,
        /// Length of the device in bytes.
        bytes: u64,
        /// Bytes in a block.
        block: u64,
    },
    /// The stated place of a file is invalid.
    #[error(
        "\"{}\" has {size} bytes, which cannot be at byte {} of device {}",
        path.escape_ascii(), stored.offset, stored.device
    )]
    Misplaced {
        /// The file.
        path: Vec<u8>,
        /// Length of the file in bytes.
        size: u64,
        /// The stated place.
        stored: Stored,
    },
    /// The stated pieces of a file are invalid.
    #[error(
        "\"{}\" has {size} bytes, which do not match the stated pieces of devices",
        path.escape_ascii()
    )]
    MisplacedPieces {
        /// The file.
        path: Vec<u8>,
        /// Length of the file in bytes.
        size: u64,
    },
    /// More than the format or the writer can count.
    #[error("the image is too large: it has more than {0}")]
    TooLarge(&'static str),
    /// The output failed. The bytes written so far are not an image.
    #[error("cannot write the image")]
    Output(#[source] io::Error),
}

/// Writes the image of a tree, from first byte to last and in large pieces. Equal trees give equal images.
///
/// [`Hasher`](crate::verity::Hasher) is a writer that only hashes an image; [`Tee`](crate::verity::Tee) hashes one
/// on its way to a file.
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
/// [`WriteError`] when the profile cannot hold the tree, or `out` fails.
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

/// A closure that writes a [`Piece`] of the bytes of an external file.
pub type Contents<'a> = dyn FnMut(Inode<'_>, Piece, &mut dyn io::Write) -> io::Result<()> + 'a;

/// Writes an image whose files' bytes are on devices, if these have them. `contents` writes the bytes of other files. It
/// is first called for all of each file, for its fingerprint.
///
/// # Errors
/// [`WriteError`]. The bytes written before an error are not an image.
pub fn write_native(
    tree: &Tree,
    native: &Native<'_>,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    plain::write_native(tree, native, contents, out)
}

/// As [`write()`], for profiles whose images hold the bytes of external files: `contents` writes them. The composefs
/// profile never calls it.
///
/// # Errors
/// [`WriteError`]. The bytes written before an error are not an image.
pub fn write_with(
    tree: &Tree,
    profile: &Profile,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    let (versions, records) = match profile {
        Profile::Composefs(versions) => (*versions, OverlayNames::TRUSTED),
        Profile::Stubs => (Versions { min: Version::V0, max: Version::V0 }, OverlayNames::USER),
        Profile::Standalone(standalone) => return plain::write(tree, standalone, contents, out),
    };
    let plan = Plan::of(tree, Survey::of(tree, versions, records)?)?;
    let bytes = stream::write(&plan, out)?;
    let (version, inodes) = (plan.survey.version, plan.survey.items.len() as u64);
    Ok(Summary { bytes, version: Some(version), inodes })
}
