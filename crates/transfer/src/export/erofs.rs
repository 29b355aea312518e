//! Writes an EROFS image that contains all file data, for Linux or gVisor.

use std::io::{self, Write};

use image::erofs::{Flavor, Piece, Profile, Standalone, WriteError, write_with};
use image::tree::{Content, Inode, Node, Tree};
use image::verity::ImageId;
use store::Store;

use super::files::{self, Files};
use super::{ExportError, Options};
use crate::progress::Event;
use image::digest::Digest;

/// Result of writing a self-contained image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErofsReport {
    /// Number of inodes in the image.
    pub inodes: u64,
    /// Size of the image in bytes.
    pub bytes: u64,
    /// Number of inodes whose xattrs were left out; 0 for Linux.
    pub without_xattrs: u64,
    /// Number of devices whose numbers gVisor ignores; 0 for Linux.
    pub without_numbers: u64,
}

/// Writes an image as one EROFS file that needs no store. Equal contents are stored once, and the same image always
/// gives the same bytes. Memory depends only on the number of files: about 150 bytes for each, and 2 MiB.
///
/// # Errors
/// [`ExportError`]; the output is incomplete then.
pub fn to_erofs(
    store: &Store,
    id: &ImageId,
    flavor: Flavor,
    mut out: &mut dyn Write,
    options: &Options<'_>,
) -> Result<ErofsReport, ExportError> {
    let tree = files::tree(store, id)?;
    (options.progress)(Event::Layers(&[Some(files::content_bytes(&tree))]));
    (options.progress)(Event::Started { layer: 0 });
    let mut files = Files::new(store, options);
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn Write| {
        give(&mut files, file, piece, out).map_err(io::Error::other)
    };
    let profile = Profile::Standalone(Standalone {
        flavor,
        uuid: derived(&format!("quire {flavor:?} {id}")),
    });
    let written = write_with(&tree, &profile, &mut contents, &mut out);
    let summary = written.map_err(|error| match error {
        WriteError::Content { path, source } => match source.downcast() {
            Ok(error) => error,
            Err(source) => ExportError::Erofs(Box::new(WriteError::Content { path, source })),
        },
        error => ExportError::Erofs(Box::new(error)),
    })?;
    (options.progress)(Event::Done { layer: 0 });
    let (without_xattrs, without_numbers) = match flavor {
        Flavor::Linux => (0, 0),
        Flavor::Gvisor => lost_on_gvisor(&tree),
    };
    let (inodes, bytes) = (summary.inodes, summary.bytes);
    Ok(ErofsReport { inodes, bytes, without_xattrs, without_numbers })
}

fn give(
    files: &mut Files<'_>,
    file: Inode<'_>,
    piece: Piece,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    // The writer reports the cause of a refused write itself.
    let refused = |error| ExportError::Erofs(Box::new(WriteError::Output(error)));
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

/// Derives a UUID from a text, always the same one. Source of the form: RFC 9562, version 8.
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

/// Counts inodes with xattrs, and devices. gVisor ignores device numbers, because its inodes have no `Rdev`
/// (`erofs.go` in `pkg/sentry/fsimpl/erofs`), so its overlay takes character devices for whiteouts.
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
