//! The profiles for EROFS without overlayfs: the image holds the tree unchanged, with the bytes of files or the
//! addresses of those bytes in other files.
//!
//! Sections 4 and 5 of `docs/format/erofs-profile.md` have the rules.

mod chunks;
mod devices;
mod files;
mod native;
mod on_device;
mod pack;
mod plan;
mod prefixes;
mod stream;
mod survey;

use std::io;

use super::place::BlockSize;
use super::{Contents, Summary, WriteError};
use crate::erofs::layout::{
    NATIVE_HAS_ACL, NATIVE_HAS_TAR, NATIVE_HEADER_VERSION, NATIVE_MAGIC, RawNativeHeader,
};
use crate::tree::Tree;
pub use native::{DEVICES_MAX, DeviceFile, Native, Placed, Run, Stored};
use plan::Plan;
use prefixes::Prefixes;
use survey::Survey;

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
    /// gVisor's reader, which refuses inodes with xattrs, and cannot map files whose data is not in blocks. The image
    /// has no xattrs, and therefore no ACLs, capabilities and labels.
    Gvisor,
}

/// The part of a file's content that the writer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// All bytes. The caller verifies them, and returns an error if they are wrong.
    Whole,
    /// The bytes from this offset to the end, less than a block. They need not be verified, because the writer later
    /// needs all bytes, which must end with the same ones.
    From(u64),
}

pub(super) fn write(
    tree: &Tree,
    options: &Standalone,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    let survey = Survey::of(tree, options.flavor, BlockSize::B4096, Prefixes::default())?;
    finish(survey, options.uuid, None, contents, out)
}

pub(super) fn write_native(
    tree: &Tree,
    native: &Native<'_>,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    let mut survey =
        Survey::of(tree, Flavor::Linux, native::BLOCK_SIZE, Prefixes::with_fingerprint())?;
    survey.add_files(native, contents)?;
    let when = |condition, flag| if condition { flag } else { 0 };
    let flags = when(survey.has_acl, NATIVE_HAS_ACL) | when(native.has_tar, NATIVE_HAS_TAR);
    let header = RawNativeHeader {
        magic: NATIVE_MAGIC,
        version: NATIVE_HEADER_VERSION.into(),
        flags: flags.into(),
    };
    finish(survey, native.uuid, Some(header), contents, out)
}

fn finish(
    survey: Survey<'_>,
    uuid: [u8; 16],
    header: Option<RawNativeHeader>,
    contents: &mut Contents<'_>,
    out: &mut impl io::Write,
) -> Result<Summary, WriteError> {
    let plan = Plan::of(survey)?;
    let bytes = stream::write(&plan, uuid, header, contents, out)?;
    Ok(Summary { bytes, version: None, inodes: plan.survey.items.len() as u64 })
}
