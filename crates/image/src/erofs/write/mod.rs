//! The writer makes an image from a tree in two passes, layout and stream, so the image is never in memory as a whole.

mod blocks;
mod chunks;
mod composefs;
mod devices;
mod directory;
mod files;
mod inode;
mod listing;
mod native;
mod on_device;
mod output;
mod pack;
mod pair;
mod plain;
mod plan;
mod rules;
mod stream;
mod survey;
mod xattrs;

use std::io;

use zerocopy::IntoBytes as _;

use crate::tree::{Inode, Tree};
use crate::verity::DeviceId;
pub use native::{DEVICES_MAX, DeviceFile, Native, Placed, Run, Stored};
use pair::OverlayNames;
pub use plain::{Flavor, Standalone};
use plan::PlainPlan;
use survey::Survey;

/// The kind of image that the writer makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Data is in objects, which overlayfs finds through xattrs. The image has the same bytes as that of C's
    /// `mkcomposefs`.
    Composefs(Versions),
    /// Like `Composefs`, for overlays in user namespaces (`userxattr`). The tree must come from
    /// [`for_user`](crate::tree::for_user). Only the kernel reads such images.
    Stubs,
    /// Data is in the image, which can be mounted without other files.
    Standalone(Standalone),
}

/// A version of composefs's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// The first version.
    V0,
    /// Also marks directories with whiteouts with `opaque=x`, which overlayfs requires since Linux 6.8.
    V1,
}

impl Version {
    /// Returns the version's number in the image's header.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::V0 => 0,
            Self::V1 => 1,
        }
    }
}

/// The versions that an image may have. The writer uses the lowest one that can represent the tree.
///
/// A `max` below `min` counts as `min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Versions {
    /// Lowest version.
    pub min: Version,
    /// Highest version.
    pub max: Version,
}

impl Default for Versions {
    /// Allows all versions.
    fn default() -> Self {
        Self { min: Version::V0, max: Version::V1 }
    }
}

/// The result of writing an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Length of the image in bytes.
    pub bytes: u64,
    /// The version of composefs's rules that the image has; `None` in other profiles.
    pub version: Option<Version>,
    /// Number of inodes in the image, including those that the profile adds.
    pub inodes: u64,
}

/// The reason why an image cannot be written, or is incomplete.
///
/// Except for [`ErofsWriteError::Output`] and errors about contents, nothing was written. Messages show paths with a
/// leading slash and with escapes.
#[derive(Debug, thiserror::Error)]
pub enum ErofsWriteError {
    /// An inode has more xattrs than composefs allows.
    #[error(
        "\"{}\" has {bytes} bytes of xattrs, more than the 32767 of an inode",
        path.escape_ascii()
    )]
    XattrSpace {
        /// Path of the inode.
        path: Vec<u8>,
        /// Size of the xattrs as composefs counts it: 12, and for each xattr 7 plus the length of its whole name and
        /// value.
        bytes: u64,
    },
    /// An inode has an xattr that the profile itself uses, with a value so long that C composefs refuses the inode.
    #[error(
        "\"{}\" has its own xattr \"{}\", which the image needs for a whiteout",
        path.escape_ascii(),
        name.escape_ascii()
    )]
    XattrInTheWay {
        /// Path of the inode.
        path: Vec<u8>,
        /// Name of the xattr in the image.
        name: Vec<u8>,
    },
    /// An external file takes more than 1024 chunks of 8 TiB.
    #[error("\"{}\" has {size} bytes, more than the 8 PiB of a file", path.escape_ascii())]
    FileTooLarge {
        /// Path of the file.
        path: Vec<u8>,
        /// Length in bytes.
        size: u64,
    },
    /// A file with inline data is longer than 5000 bytes, the limit of an image.
    #[error("\"{}\" has {size} bytes inline, more than 5000", path.escape_ascii())]
    InlineTooLarge {
        /// Path of the file.
        path: Vec<u8>,
        /// Length in bytes.
        size: u64,
    },
    /// An inode has more xattrs than EROFS supports.
    #[error(
        "\"{}\" has {bytes} bytes of xattrs, more than the 262148 of an inode",
        path.escape_ascii()
    )]
    XattrsTooLarge {
        /// Path of the inode.
        path: Vec<u8>,
        /// Bytes that the xattrs would take.
        bytes: u64,
    },
    /// A device number exceeds the 12 bits of major and 20 bits of minor number that Linux supports.
    #[error("\"{}\" has the device number {number:#x}, which Linux does not support", path.escape_ascii())]
    DeviceNumber {
        /// Path of the device.
        path: Vec<u8>,
        /// The device number, in the encoding of C libraries.
        number: u64,
    },
    /// Reading a file's content failed.
    #[error("cannot read the contents of \"{}\"", path.escape_ascii())]
    Content {
        /// Path of the file.
        path: Vec<u8>,
        /// The error of `contents`.
        source: io::Error,
    },
    /// The length of a file differs from that in the tree.
    #[error("the length of \"{}\" is not {size} bytes", path.escape_ascii())]
    ContentSize {
        /// Path of the file.
        path: Vec<u8>,
        /// Length in bytes in the tree.
        size: u64,
    },
    /// The tails of files changed between the first and the second read.
    #[error("files changed while the image was written")]
    ContentChanged,
    /// A device id is not SHA-256.
    #[error("device {id} has a sha512 id, but a device table has room only for sha256")]
    DeviceAlgorithm {
        /// Id of the device.
        id: DeviceId,
    },
    /// The length of a device is not a whole number of blocks, is 0, or is too large.
    #[error("device {id} has {bytes} bytes, not 1 to 2^48 - 1 blocks of {block}")]
    DeviceLength {
        /// Id of the device.
        id: DeviceId,
        /// Length of the device in bytes.
        bytes: u64,
        /// Size of a block in bytes.
        block: u64,
    },
    /// The stated location of a file is invalid.
    #[error(
        "\"{}\" has {size} bytes, which cannot be at byte {} of device {}",
        path.escape_ascii(), stored.offset, stored.device
    )]
    Misplaced {
        /// Path of the file.
        path: Vec<u8>,
        /// Length of the file in bytes.
        size: u64,
        /// Stated location.
        stored: Stored,
    },
    /// The stated pieces of a file are invalid.
    #[error(
        "\"{}\" has {size} bytes, which do not match the stated pieces of devices",
        path.escape_ascii()
    )]
    MisplacedPieces {
        /// Path of the file.
        path: Vec<u8>,
        /// Length of the file in bytes.
        size: u64,
    },
    /// The image exceeds a limit of the format or of the writer.
    #[error("the image is too large: it has more than {0}")]
    TooLarge(&'static str),
    /// Writing to the output failed. The bytes written so far are not an image.
    #[error("cannot write the image")]
    Output(#[source] io::Error),
}

/// Writes the image of a tree in large pieces, from the first byte to the last. Equal trees give equal images.
///
/// [`Hasher`](crate::verity::Hasher) is a writer that only hashes an image; [`Tee`](crate::verity::Tee) hashes an
/// image while it is written to a file.
///
/// ```
/// # extern crate quire_image as image;
/// # fn main() -> Result<(), image::erofs::ErofsWriteError> {
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
/// [`ErofsWriteError`] if the profile cannot represent the tree, or writing to `out` fails.
pub fn write(
    tree: &Tree,
    profile: &Profile,
    out: &mut impl io::Write,
) -> Result<Summary, ErofsWriteError> {
    let nobody = |_: Inode<'_>, _, _: &mut dyn io::Write| {
        Err(io::Error::new(io::ErrorKind::Unsupported, "the writer has no source of file contents"))
    };
    write_with(tree, profile, &mut { nobody }, out)
}

/// The part of a file's content that the writer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// All bytes. The caller verifies them, and returns an error if they are wrong.
    Whole,
    /// The bytes from this offset to the end, less than a block. They need not be verified, because the writer later
    /// requests all bytes, which must end with the same bytes.
    From(u64),
}

/// A closure that writes a [`Piece`] of the content of an external file.
pub type Contents<'a> = dyn FnMut(Inode<'_>, Piece, &mut dyn io::Write) -> io::Result<()> + 'a;

/// Writes an image. If `native` has a location for a file, the file's bytes are on a device; otherwise `contents`
/// writes them. `contents` is first called for the whole of each such file, to compute the file's fingerprint.
///
/// # Errors
/// [`ErofsWriteError`]. The bytes written before an error are not an image.
pub fn write_native(
    tree: &Tree,
    native: &Native<'_>,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, ErofsWriteError> {
    let survey = native.survey(tree, contents)?;
    let header = native.header(&survey);
    finish(survey, header.as_bytes(), native.uuid, contents, out)
}

/// Like [`write()`], for profiles whose images contain the bytes of external files, which `contents` writes. The
/// composefs profile never calls `contents`.
///
/// # Errors
/// [`ErofsWriteError`]. The bytes written before an error are not an image.
pub fn write_with(
    tree: &Tree,
    profile: &Profile,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, ErofsWriteError> {
    let (versions, names) = match profile {
        Profile::Composefs(versions) => (*versions, OverlayNames::TRUSTED),
        Profile::Stubs => (Versions { min: Version::V0, max: Version::V0 }, OverlayNames::USER),
        Profile::Standalone(standalone) => {
            let survey = standalone.survey(tree)?;
            return finish(survey, &[], standalone.uuid, contents, out);
        }
    };
    let survey = composefs::survey(tree, versions, names)?;
    let header = composefs::header(&survey);
    finish(survey, header.as_bytes(), [0; 16], contents, out)
}

/// Lays out the image, and writes it after `header`.
fn finish(
    survey: Survey<'_>,
    header: &[u8],
    uuid: [u8; 16],
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, ErofsWriteError> {
    let plan = PlainPlan::from_survey(survey)?;
    let bytes = stream::write(&plan, header, uuid, contents, out)?;
    let Survey { overlay, items, .. } = &plan.survey;
    let version = overlay.as_ref().map(|overlay| overlay.version);
    Ok(Summary { bytes, version, inodes: items.len() as u64 })
}
