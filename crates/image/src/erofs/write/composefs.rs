//! The composefs profile, which transforms the tree before the layout.
//!
//! overlayfs makes a file system of the image and a directory of objects. Therefore a file whose bytes are in an
//! object gets the xattrs of a metacopy; overlayfs xattrs and whiteouts of the source are escaped, and overlayfs
//! unescapes them; and real whiteouts hide the object directories `00` to `ff`. Section 3 of
//! `docs/format/erofs-profile.md` has the rules.

use std::borrow::Cow;

use zerocopy::FromZeros as _;

use super::listing::InodeSource;
use super::pair::OverlayNames;
use super::rules::Rules;
use super::survey::{Item, Overlay, Pairs, Role, Survey, chunks_of, is_whiteout};
use super::xattrs::FilePairs;
use super::{ErofsWriteError, Version, Versions};
use crate::erofs::layout::{
    COMPOSEFS_HAS_ACL, COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC, RawComposefsHeader,
};
use crate::tree::{Content, External, Inode, InodeId, Node, Tree, XattrsId};

/// composefs's limit of a file's content in the image, in bytes. `LCFS_INLINE_CONTENT_MAX` in `lcfs-writer.h`.
const INLINE_MAX: usize = 5000;
/// composefs's limit of an inode's xattrs, as it counts them. `LCFS_INODE_EXTERNAL_XATTR_MAX` in `lcfs-writer.h`.
const XATTRS_MAX: u64 = 32767;
/// Maximum number of chunks in a file: the number of 4-byte block numbers in a block.
const CHUNKS_MAX: u64 = 1024;

const SELINUX: &[u8] = b"security.selinux";
/// Xattrs that make a file a whiteout that overlayfs unescapes, with privileges and without.
const WHITEOUT: [(&[u8], &[u8]); 2] =
    [(b"trusted.overlay.overlay.whiteout", b""), (b"user.overlay.whiteout", b"")];
/// Xattrs that mark a directory with such whiteouts; the last two since version 1.
const WHITEOUTS: [(&[u8], &[u8]); 4] = [
    (b"trusted.overlay.overlay.whiteouts", b""),
    (b"user.overlay.whiteouts", b""),
    (b"trusted.overlay.overlay.opaque", b"x"),
    (b"user.overlay.opaque", b"x"),
];

pub(super) fn survey(
    tree: &Tree,
    versions: Versions,
    names: OverlayNames,
) -> Result<Survey<'_>, ErofsWriteError> {
    let overlay = |version| Some(Overlay::new(names, version));
    let mut survey = Survey::new(tree, Rules::COMPOSEFS, overlay(versions.min));
    let any = list(&mut survey);
    let version = if any { versions.max.max(versions.min) } else { versions.min };
    survey.overlay = overlay(version);
    for at in 0..survey.items.len() {
        let item = survey.items[at];
        survey.count_set(&item, |survey, xattrs, role| {
            pairs_of(survey, &item, xattrs, role, names, version)
        })?;
        if let InodeSource::Tree(id) = item.source {
            let inode = tree.inode(id);
            if let Some(external) = inode.external() {
                check_external(tree, names, &inode, external)?;
                survey.xattrs.count_file(FilePairs::for_external(external));
            } else if let Node::Regular(Content::Inline(bytes)) = inode.node()
                && bytes.len() > INLINE_MAX
            {
                let (path, size) = (inode.path(), bytes.len() as u64);
                return Err(ErofsWriteError::InlineTooLarge { path, size });
            }
        }
    }
    survey.share()?;
    Ok(survey)
}

/// Lists the inodes breadth first from the root, each at the position of the name that owns it, and finds the earliest
/// time. Returns whether there is a whiteout.
fn list(survey: &mut Survey<'_>) -> bool {
    let mut any = false;
    survey.items.push(Item::new(InodeSource::Tree(InodeId::ROOT)));
    survey.epoch = survey.tree.root().metadata().mtime;
    let mut at = 0;
    while at < survey.items.len() {
        if let InodeSource::Tree(id) = survey.items[at].source {
            let inode = survey.tree.inode(id);
            survey.epoch = survey.epoch.min(inode.metadata().mtime);
            if inode.is_directory() {
                let mut whiteouts = false;
                for entry in survey.listing(InodeSource::Tree(id)).filter(|entry| entry.owns) {
                    survey.items.push(Item::new(entry.source));
                    whiteouts |= match entry.source {
                        InodeSource::Tree(id) => is_whiteout(&survey.tree.inode(id)),
                        InodeSource::Shadow(_) => false,
                    };
                }
                survey.items[at].whiteouts = whiteouts;
                any |= whiteouts;
            }
        }
        at += 1;
    }
    any
}

/// Returns the image's pairs for a set of xattrs of the tree.
fn pairs_of<'a>(
    survey: &Survey<'a>,
    item: &Item,
    xattrs: XattrsId,
    role: Role,
    names: OverlayNames,
    version: Version,
) -> Result<Pairs<'a>, ErofsWriteError> {
    let mut set = Draft::default();
    let original = survey.tree.xattrs(xattrs);
    if role == Role::Shadow {
        set.pairs.extend(
            original.filter(|(name, _)| *name == SELINUX).map(|(n, v)| (Cow::Borrowed(n), v)),
        );
    } else {
        let bytes = account(original.clone());
        if bytes > XATTRS_MAX {
            return Err(ErofsWriteError::XattrSpace { path: survey.path(item), bytes });
        }
        set.pairs.extend(original.map(|(name, value)| (escape(name, names), value)));
    }
    let mark = match version {
        Version::V0 => &WHITEOUTS[..2],
        Version::V1 => &WHITEOUTS[..],
    };
    let opaque: &[(&'static [u8], &'static [u8])] = &[(names.opaque, b"y")];
    let added: &[&[(&'static [u8], &'static [u8])]] = match role {
        Role::Plain | Role::Shadow => &[],
        Role::Whiteout => &[&WHITEOUT],
        Role::HasWhiteouts => &[mark],
        Role::Root { whiteouts: false } => &[opaque],
        Role::Root { whiteouts: true } => &[mark, opaque],
    };
    for (name, value) in added.iter().copied().flatten() {
        set.put(name, value).map_err(|Refused| ErofsWriteError::XattrInTheWay {
            path: survey.path(item),
            name: name.to_vec(),
        })?;
    }
    Ok(set.pairs)
}

/// Refuses a file that the image cannot represent.
fn check_external(
    tree: &Tree,
    names: OverlayNames,
    inode: &Inode<'_>,
    external: External,
) -> Result<(), ErofsWriteError> {
    if chunks_of(external.size).1 > CHUNKS_MAX {
        return Err(ErofsWriteError::FileTooLarge { path: inode.path(), size: external.size });
    }
    // C counts separately the xattrs that it adds.
    let (metacopy, redirect) = FilePairs::for_external(external).value_lengths(tree);
    let header = if inode.xattrs().len() == 0 { XATTRS_HEADER } else { 0 };
    let bytes = header
        + account_pair(names.metacopy, metacopy)
        + redirect.map_or(0, |value| account_pair(names.redirect, value));
    if bytes > XATTRS_MAX {
        return Err(ErofsWriteError::XattrSpace { path: inode.path(), bytes });
    }
    Ok(())
}

/// Returns composefs's header.
pub(super) fn header(survey: &Survey<'_>) -> RawComposefsHeader {
    let version = survey.overlay.as_ref().map_or(Version::V0, |overlay| overlay.version);
    RawComposefsHeader {
        magic: COMPOSEFS_MAGIC.into(),
        version: COMPOSEFS_HEADER_VERSION.into(),
        flags: if survey.has_acl { COMPOSEFS_HAS_ACL } else { 0 }.into(),
        composefs_version: version.number().into(),
        ..RawComposefsHeader::new_zeroed()
    }
}

/// Returns the name in the image of a source's xattr.
fn escape(name: &[u8], names: OverlayNames) -> Cow<'_, [u8]> {
    match name.strip_prefix(names.overlay) {
        Some(rest) => Cow::Owned([names.escaped, rest].concat()),
        None => Cow::Borrowed(name),
    }
}

/// Bytes that composefs counts for an inode with xattrs: their header.
const XATTRS_HEADER: u64 = 12;

/// Returns the bytes that composefs counts for an xattr: the entry and the maximum padding.
const fn account_pair(name: &[u8], value_len: usize) -> u64 {
    (7 + name.len() + value_len) as u64
}

fn account<'a>(pairs: impl ExactSizeIterator<Item = (&'a [u8], &'a [u8])>) -> u64 {
    let header = if pairs.len() == 0 { 0 } else { XATTRS_HEADER };
    header + pairs.map(|(name, value)| account_pair(name, value.len())).sum::<u64>()
}

/// A set of xattrs to which the profile's xattrs are added.
#[derive(Debug, Default)]
struct Draft<'a> {
    pairs: Pairs<'a>,
    /// The counted bytes of the added xattrs, minus the bytes of the replaced ones.
    added: u64,
}

struct Refused;

impl<'a> Draft<'a> {
    /// Adds a pair, or replaces the value of an existing one.
    ///
    /// For the xattrs that the profile adds, C begins a new count at 0, in an unsigned number, and subtracts a
    /// replaced value. So if that value is longer than all xattrs that were added before, C refuses the inode, and
    /// this function does the same. An exception is a value that is the only xattr, because then the count begins with
    /// its size.
    fn put(&mut self, name: &'static [u8], value: &'static [u8]) -> Result<(), Refused> {
        let new = account_pair(name, value.len());
        let is_only = self.pairs.len() == 1;
        if let Some((_, there)) = self.pairs.iter_mut().find(|(other, _)| **other == *name) {
            let old = account_pair(name, there.len());
            self.added = match (self.added + new).checked_sub(old) {
                _ if is_only => XATTRS_HEADER + new,
                Some(added) => added,
                None => return Err(Refused),
            };
            *there = value;
        } else {
            let header = if self.pairs.is_empty() { XATTRS_HEADER } else { 0 };
            self.added += header + new;
            self.pairs.push((Cow::Borrowed(name), value));
        }
        Ok(())
    }
}
