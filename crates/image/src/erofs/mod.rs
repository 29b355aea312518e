//! EROFS images: the on-disk layout, the writer and the reader.
//!
//! The layout is the kernel's; `docs/format/erofs-profile.md` describes how Quire uses it.

pub mod layout;
pub mod read;
mod write;

use std::collections::BTreeSet;

use crate::tree::Tree;

pub use write::{
    Contents, DEVICES_MAX, DeviceFile, ErofsWriteError, Flavor, Native, Piece, Placed, Profile,
    Run, Standalone, Stored, Summary, Version, Versions, write, write_native, write_with,
};

/// Returns the names of xattrs that images contain but no mount shows, because EROFS has no number for their
/// namespace, such as `com.apple.provenance` and `system.nfs4_acl`. Readers of images return these xattrs.
#[must_use]
pub fn hidden_xattrs(tree: &Tree) -> Vec<Vec<u8>> {
    let is_shown =
        |name: &[u8]| layout::XATTR_PREFIXES.iter().any(|(_, prefix)| name.starts_with(prefix));
    let names: BTreeSet<&[u8]> =
        tree.xattr_sets().flatten().map(|(name, _)| name).filter(|name| !is_shown(name)).collect();
    names.into_iter().map(<[u8]>::to_vec).collect()
}
