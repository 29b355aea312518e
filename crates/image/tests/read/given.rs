//! Tests the input of the writer of self-contained images, and its refusals.

use std::collections::BTreeMap;
use std::io;

use quire_image::erofs::layout::incompat;
use quire_image::erofs::read::{ByteOffset, FileType, Image, ReadAt};
use quire_image::erofs::{ErofsWriteError, Flavor, Piece, write, write_with};
use quire_image::tree::{Builder, Content, Inode, InodeId, Link, Location, Node, XattrsId};

use crate::standalone::{METADATA, profile};

#[test]
fn what_no_image_can_hold_is_refused() {
    let value = vec![b'v'; 65_535];
    let refused = |pairs: usize, node: Node<'_>| {
        let mut builder = Builder::new();
        let names: Vec<_> = (0..pairs).map(|at| format!("user.{at}")).collect();
        let xattrs = builder.xattrs(names.iter().map(|name| (name.as_bytes(), &value[..])));
        let inode = builder.inode(&METADATA, xattrs.unwrap(), node).unwrap();
        builder.insert(InodeId::ROOT, b"a", inode, Link::Equal).unwrap();
        let mut image = Vec::new();
        let error = write(&builder.finish(), &profile(Flavor::Linux), &mut image).unwrap_err();
        assert!(image.is_empty());
        error.to_string()
    };
    let error = refused(4, Node::Fifo);
    assert_eq!(error, "\"/a\" has 262172 bytes of xattrs, more than the 262148 of an inode");
    let error = refused(0, Node::CharDevice(1 << 32));
    assert_eq!(error, "\"/a\" has the device number 0x100000000, which Linux does not support");
    let size = 1 << 44;
    let huge = Content::External { size, object: None, location: Location::None };
    let error = refused(0, Node::Regular(huge));
    assert_eq!(error, "the image is too large: it has more than 16 TiB");
}

/// The writer does not trust the source of contents: each wrong content is an error.
#[test]
fn contents_that_are_wrong() {
    let mut builder = Builder::new();
    for (name, size) in [("large", 10_000), ("small", 100)] {
        let node = Content::External { size, object: None, location: Location::None };
        let inode = builder.inode(&METADATA, XattrsId::NONE, Node::Regular(node)).unwrap();
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    let tree = builder.finish();
    let with = |give: &mut dyn FnMut(u64, Piece, &mut dyn io::Write) -> io::Result<()>| {
        let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| match file.node() {
            Node::Regular(content) => give(content.size(), piece, out),
            node => panic!("{node:?}"),
        };
        write_with(&tree, &profile(Flavor::Linux), &mut contents, &mut io::sink())
    };
    let right = |size: u64, piece: Piece| match piece {
        Piece::Whole => vec![b'r'; size as usize],
        Piece::From(start) => vec![b'r'; (size - start) as usize],
    };
    assert!(with(&mut |size, piece, out| out.write_all(&right(size, piece))).is_ok());
    for extra in [-1_i64, 1, 5000] {
        for wrong in [100, 10_000] {
            for of_whole in [true, false] {
                let result = with(&mut |size, piece, out| {
                    let mut bytes = right(size, piece);
                    if size == wrong && (piece == Piece::Whole) == of_whole {
                        bytes.resize((bytes.len() as i64 + extra) as usize, b'r');
                    }
                    out.write_all(&bytes)
                });
                match result {
                    Err(ErofsWriteError::ContentSize { size, .. }) => assert_eq!(size, wrong),
                    other => assert!(!of_whole && wrong == 100 && other.is_ok(), "{other:?}"),
                }
            }
        }
    }
    let changed = with(&mut |size, piece, out| {
        let mut bytes = right(size, piece);
        if matches!(piece, Piece::From(_)) {
            bytes[5] = b'w';
        }
        out.write_all(&bytes)
    });
    assert!(matches!(changed, Err(ErofsWriteError::ContentChanged)), "{changed:?}");
    let failed = with(&mut |_, _, _| Err(io::Error::other("gone"))).unwrap_err();
    assert_eq!(failed.to_string(), "cannot read the contents of \"/large\"");
    let mut image = Vec::new();
    let nobody = write(&tree, &profile(Flavor::Linux), &mut image).unwrap_err();
    assert!(matches!(nobody, ErofsWriteError::Content { .. }), "{nobody}");

    struct Full(usize);
    impl io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| match file.node() {
        Node::Regular(content) => out.write_all(&right(content.size(), piece)),
        node => panic!("{node:?}"),
    };
    for room in [0, 4096] {
        let full =
            write_with(&tree, &profile(Flavor::Linux), &mut contents, &mut Full(room)).unwrap_err();
        assert!(matches!(full, ErofsWriteError::Output(_)), "{full}");
    }
}

/// A writer that stores only non-zero bytes.
#[derive(Default)]
struct Sparse {
    pieces: BTreeMap<u64, Vec<u8>>,
    len: u64,
}

impl io::Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.iter().any(|byte| *byte != 0) {
            self.pieces.insert(self.len, bytes.to_vec());
        }
        self.len += bytes.len() as u64;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ReadAt for Sparse {
    fn len(&self) -> u64 {
        self.len
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.fill(0);
        let end = offset + buffer.len() as u64;
        for (start, piece) in self.pieces.range(..end) {
            let piece_end = start + piece.len() as u64;
            if piece_end > offset {
                let (from, to) = ((*start).max(offset), piece_end.min(end));
                buffer[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&piece[(from - start) as usize..(to - start) as usize]);
            }
        }
        Ok(())
    }
}

/// Tests a file, and thereby an image, of more than 4 GiB.
#[test]
fn more_than_32_bits() {
    let size = (1 << 32) + 5000;
    let mut builder = Builder::new();
    for (name, size) in [("large", size), ("next", 5000)] {
        let node = Content::External { size, object: None, location: Location::None };
        let inode = builder.inode(&METADATA, XattrsId::NONE, Node::Regular(node)).unwrap();
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    let tree = builder.finish();
    let zeros = vec![0; 8 << 20];
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| {
        let Node::Regular(content) = file.node() else { panic!("no file") };
        let start = match piece {
            Piece::Whole => 0,
            Piece::From(start) => start,
        };
        let mut left = content.size() - start - 4;
        while left > 0 {
            let count = left.min(zeros.len() as u64);
            out.write_all(&zeros[..count as usize])?;
            left -= count;
        }
        out.write_all(b"end.")
    };
    let mut image = Sparse::default();
    write_with(&tree, &profile(Flavor::Linux), &mut contents, &mut image).unwrap();
    assert!(image.len > 1 << 32);
    let image = Image::open(image).unwrap();
    assert_eq!(image.superblock().incompat & incompat::ADDRESS_48BIT, 0);
    let mut walk = image.walk();
    let mut files = 0;
    while let Some(step) = walk.next().unwrap() {
        if step.inode.file_type() == FileType::Regular {
            let mut end = [0; 6];
            let size = step.inode.size();
            image.read(&step.inode, ByteOffset(size - 6), &mut end, &[]).unwrap();
            assert_eq!(&end, b"\0\0end.");
            files += 1;
        }
    }
    assert_eq!(files, 2);
}
