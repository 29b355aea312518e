//! Images of a tree whose bytes nobody has: the names, metadata and addresses that the images of real files would have,
//! over data blobs that are holes. What an option of the image's writer does to listings shows on these.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use image::erofs::{
    BlockSize, DataBlob, Fingerprints, Native, OverlayXattrs, Piece, Placed, Profile, Standalone,
    Stored, Versions, write, write_native, write_with,
};
use image::tree::{Content, Inode, Node, Tree};
use image::verity::{Algorithm, ObjectId, digest};

use super::forms::Files;

/// How objects are in their blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blob {
    /// In blocks of 512, small ones where larger ones leave room: as Quire packs.
    Dense,
    /// In blocks of 4096; ends of up to so many bytes are in the image.
    Packed(u16),
    /// Each behind a header of 512 bytes.
    Tar,
}

/// Bytes of a block of 4096, and of one of a tar.
const BLOCK: u64 = 4096;
const TAR_BLOCK: u64 = 512;

/// Where dense objects go.
#[derive(Default)]
struct Dense {
    /// Where there is room, by how many small blocks there are.
    gaps: [Vec<u64>; 8],
    end: u64,
}

impl Dense {
    fn place(&mut self, size: u64) -> u64 {
        let blocks = usize::try_from(size.div_ceil(TAR_BLOCK)).unwrap_or(usize::MAX);
        let gap = (blocks..8).find_map(|room| Some((room, self.gaps[room].pop()?)));
        let (room, start) = gap.unwrap_or_else(|| {
            let start = self.end;
            self.end += size.next_multiple_of(BLOCK);
            (usize::try_from((self.end - start) / TAR_BLOCK).unwrap_or(usize::MAX), start)
        });
        if room > blocks {
            self.gaps[room - blocks].push(start + size.next_multiple_of(TAR_BLOCK));
        }
        start
    }
}

/// Writes `NAME.img` over `NAME.data` in a folder.
pub(super) fn native(
    tree: &Tree,
    blob: Blob,
    fingerprints: Fingerprints,
    dir: &Path,
    name: &str,
) -> Result<Files> {
    let mut places = HashMap::new();
    let mut end = 0_u64;
    let mut dense = Dense::default();
    for (object, size) in objects(tree) {
        if places.contains_key(&object) {
            continue;
        }
        let (start, tail, block) = match blob {
            Blob::Packed(max) => {
                let tail = u16::try_from(size % BLOCK)?;
                (end, if tail > max { 0 } else { tail }, BLOCK)
            }
            Blob::Tar => (end + TAR_BLOCK, 0, TAR_BLOCK),
            Blob::Dense => (dense.place(size), 0, TAR_BLOCK),
        };
        let fingerprint = object.as_bytes().try_into().context("not an object of SHA-256")?;
        places.insert(object, Stored { device: 0, offset: start, tail, fingerprint });
        end = (start + size - u64::from(tail)).next_multiple_of(block);
    }
    let bytes = end.max(dense.end).next_multiple_of(BLOCK);
    let devices = [DataBlob { id: digest(Algorithm::Sha256, name.as_bytes()), bytes }];
    let data = dir.join(format!("{name}.data"));
    File::create(&data)?.set_len(bytes)?;
    let block_size = match blob {
        Blob::Packed(_) => BlockSize::B4096,
        Blob::Tar | Blob::Dense => BlockSize::B512,
    };
    let find = |object: &ObjectId| places.get(object).copied().map(Placed::Whole);
    let native = Native { fingerprints, ..Native::new(block_size, &devices, &find) };
    let image = dir.join(format!("{name}.img"));
    let mut out = BufWriter::new(File::create(&image)?);
    write_native(tree, &native, &mut zeros, &mut out)?;
    out.flush()?;
    Ok(Files::new(&image, vec![data]))
}

/// Writes `NAME.img` with everything in it.
pub(super) fn standalone(tree: &Tree, dir: &Path, name: &str) -> Result<PathBuf> {
    let image = dir.join(format!("{name}.img"));
    let mut out = BufWriter::new(File::create(&image)?);
    write_with(tree, &Profile::Standalone(Standalone::default()), &mut zeros, &mut out)?;
    out.flush()?;
    Ok(image)
}

/// Writes `NAME.img` for overlayfs.
pub(super) fn composefs(
    tree: &Tree,
    overlay: OverlayXattrs,
    dir: &Path,
    name: &str,
) -> Result<PathBuf> {
    let image = dir.join(format!("{name}.img"));
    let mut out = BufWriter::new(File::create(&image)?);
    write(tree, &Profile::Overlay(Versions::default(), overlay), &mut out)?;
    out.flush()?;
    Ok(image)
}

/// What every file is full of.
fn zeros(file: Inode<'_>, piece: Piece, out: &mut dyn Write) -> io::Result<()> {
    let Node::Regular(Content::External { size, .. }) = file.node() else {
        return Err(io::Error::other("it is no object"));
    };
    let start = match piece {
        Piece::Whole => 0,
        Piece::From(start) | Piece::End(start) => start,
    };
    io::copy(&mut io::Read::take(io::repeat(0), size - start), out).map(drop)
}

/// The objects of a tree with their lengths, in its order.
pub(super) fn objects(tree: &Tree) -> Vec<(ObjectId, u64)> {
    let mut found = Vec::new();
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        if let Node::Regular(Content::External { size, object: Some(object), .. }) =
            entry.inode.node()
            && entry.is_owner
        {
            found.push((object, size));
        }
    }
    found
}
