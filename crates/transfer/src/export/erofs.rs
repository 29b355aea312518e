//! Writes an image with all its files as one EROFS file, for the kernel or for gVisor.

use std::io::{self, Read as _, Write};

use image::erofs::{ErofsWriteError, Flavor, Piece, Profile, Standalone, write_with};
use image::tree::{Content, Inode, Node, Tree};
use image::verity::ImageId;
use store::Store;

use super::files::{self, FileContents};
use super::{ExportError, Options};
use crate::progress::Event;
use image::digest::Digest;

/// Alignment of memory that Linux maps as a device, in bytes. Source: Linux `mm/memremap.c`,
/// `memremap_compat_align`: a subsection, on all processors but POWER. Linux refuses a pmem device of another length.
pub(super) const PMEM_ALIGN: u64 = 2 << 20;

/// Result of writing a self-contained image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErofsReport {
    /// Number of inodes.
    pub inodes: u64,
    /// Size of the image, in bytes, with the padding of [`Flavor::Dax`].
    pub bytes: u64,
    /// Number of inodes whose xattrs were left out.
    pub without_xattrs: u64,
    /// Number of device nodes whose device numbers the reader ignores.
    pub without_numbers: u64,
}

/// Writes an image as one EROFS file that needs no store. Equal contents are stored once, and the same image always
/// gives the same bytes. The memory use depends on the number of files, not on their sizes: it is about 150 bytes per
/// file, and 2 MiB.
///
/// With [`Flavor::Dax`], zeros follow the image up to the length that a pmem device needs.
///
/// # Errors
/// An [`ExportError`]; the output is incomplete then.
pub fn to_erofs(
    store: &Store,
    id: &ImageId,
    flavor: Flavor,
    out: &mut dyn Write,
    options: &Options<'_>,
) -> Result<ErofsReport, ExportError> {
    let mut report = image_only(store, id, flavor, out, options)?;
    if flavor == Flavor::Dax {
        let bytes = report.bytes.next_multiple_of(PMEM_ALIGN);
        let padded = io::copy(&mut io::repeat(0).take(bytes - report.bytes), out);
        padded.map_err(|error| ExportError::Erofs(Box::new(ErofsWriteError::Output(error))))?;
        report.bytes = bytes;
    }
    Ok(report)
}

/// As [`to_erofs`], without the padding.
pub(super) fn image_only(
    store: &Store,
    id: &ImageId,
    flavor: Flavor,
    mut out: &mut dyn Write,
    options: &Options<'_>,
) -> Result<ErofsReport, ExportError> {
    let tree = files::tree(store, id)?;
    (options.progress)(Event::Layers(&[Some(files::content_bytes(&tree))]));
    (options.progress)(Event::Started { layer: 0 });
    let mut files = FileContents::new(store, options);
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn Write| {
        give(&mut files, file, piece, out).map_err(io::Error::other)
    };
    let profile = Profile::Standalone(Standalone {
        flavor,
        uuid: derived(&format!("quire {flavor:?} {id}")),
    });
    let written = write_with(&tree, &profile, &mut contents, &mut out);
    let summary = written.map_err(|error| match error {
        ErofsWriteError::Content { path, source } => match source.downcast() {
            Ok(error) => error,
            Err(source) => ExportError::Erofs(Box::new(ErofsWriteError::Content { path, source })),
        },
        error => ExportError::Erofs(Box::new(error)),
    })?;
    (options.progress)(Event::Done { layer: 0 });
    let (without_xattrs, without_numbers) = match flavor {
        Flavor::Linux | Flavor::Dax => (0, 0),
        Flavor::Gvisor => lost_on_gvisor(&tree),
    };
    let (inodes, bytes) = (summary.inodes, summary.bytes);
    Ok(ErofsReport { inodes, bytes, without_xattrs, without_numbers })
}

fn give(
    files: &mut FileContents<'_>,
    file: Inode<'_>,
    piece: Piece,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    // The EROFS writer keeps the actual error of its output, so this error is only a placeholder.
    let refused = |error| ExportError::Erofs(Box::new(ErofsWriteError::Output(error)));
    let content = match file.node() {
        Node::Regular(content) => content,
        _ => Content::Inline(&[]),
    };
    let path = file.path();
    match piece {
        Piece::Whole => {
            files.give(&path, content, &mut |bytes| out.write_all(bytes).map_err(refused))
        }
        Piece::From(start) => out.write_all(files.end(&path, content, start)?).map_err(refused),
    }
}

/// Derives a UUID from a text. Source of the format: RFC 9562, version 8.
pub(super) fn derived(text: &str) -> [u8; 16] {
    let digest = Digest::sha256(text.as_bytes());
    let mut uuid = [0; 16];
    for (to, from) in uuid.iter_mut().zip(digest.as_bytes()) {
        *to = *from;
    }
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// Counts inodes with xattrs, and devices. Source for the devices: gVisor `pkg/sentry/fsimpl/erofs/erofs.go`, whose
/// inodes have no `Rdev`, so that gVisor's overlay takes character devices for whiteouts.
fn lost_on_gvisor(tree: &Tree) -> (u64, u64) {
    let (mut xattrs, mut devices) = (u64::from(tree.root().xattrs().len() > 0), 0);
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        if entry.is_owner {
            xattrs += u64::from(entry.inode.xattrs().len() > 0);
            let node = entry.inode.node();
            devices += u64::from(matches!(node, Node::CharDevice(_) | Node::BlockDevice(_)));
        }
    }
    (xattrs, devices)
}
