//! Writes a tree as a dump.

use std::io::{self, Write};

use crate::tree::{Content, Inode, InodeId, Location, Node, Tree};

/// The name of an inode that is written in full. Its other names are written as hard links to that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// The name that owns the inode: parsing the dump gives the same tree.
    ToOwner,
    /// The name that is written first, as in `composefs-info dump`.
    ToFirst,
}

/// The printable bytes that are written as `\xHH`. Backslash, newline, carriage return and tab always have their
/// short escapes, and all other bytes except printable ASCII are always written as `\xHH`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Escape {
    /// The space.
    Space,
    /// The space, and a dash if it is the whole text.
    SpaceAndLoneDash,
    /// The space and the equals sign.
    SpaceAndEqual,
    /// None, as in the paths of `composefs-info ls`.
    Nothing,
}

/// Writes a dump: depth first, siblings in byte order. `size_of_directory` returns the value of the field SIZE for a
/// directory, in bytes; [`directory_size`] computes the size that a directory has in a composefs image.
///
/// # Errors
/// The error of `out`.
pub fn write(
    tree: &Tree,
    links: Links,
    size_of_directory: impl FnMut(Inode<'_>) -> u64,
    out: &mut impl Write,
) -> io::Result<()> {
    write_some(tree, links, |_name| true, size_of_directory, out)
}

/// Writes only the names in the root directory that `is_kept` accepts and all files below them. Apart from that, like
/// [`write()`].
///
/// # Errors
/// The error of `out`.
pub fn write_some(
    tree: &Tree,
    links: Links,
    mut is_kept: impl FnMut(&[u8]) -> bool,
    mut size_of_directory: impl FnMut(Inode<'_>) -> u64,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut line = Vec::new();
    let mut put = |path: &[u8], inode: Inode<'_>, target: Option<&[u8]>| {
        line.clear();
        let size = match inode.node() {
            Node::Directory => size_of_directory(inode),
            Node::Regular(content) => content.size(),
            Node::Symlink(target) => target.len() as u64,
            _ => 0,
        };
        append_line(&mut line, path, inode, size, target);
        out.write_all(&line)
    };
    put(b"/", tree.root(), None)?;
    let shared = if links == Links::ToFirst { shared(tree) } else { Vec::new() };
    // Paths of the first names written for the shared inodes.
    let mut first: Vec<Option<Box<[u8]>>> = vec![None; shared.len()];
    let mut is_below_kept = true;
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let inode = entry.inode;
        if path.len() == entry.name.len() + 1 {
            is_below_kept = is_kept(entry.name);
        }
        if !is_below_kept {
            continue;
        }
        match links {
            Links::ToOwner if entry.is_owner => put(path, inode, None)?,
            Links::ToOwner => put(path, inode, Some(&inode.path()))?,
            Links::ToFirst => match shared.binary_search(&inode.id()) {
                Err(_alone) => put(path, inode, None)?,
                Ok(at) => {
                    put(path, inode, first[at].as_deref())?;
                    first[at].get_or_insert_with(|| path.into());
                }
            },
        }
    }
    Ok(())
}

/// Returns the inodes that have several names, in ascending order.
fn shared(tree: &Tree) -> Vec<InodeId> {
    let mut shared = Vec::new();
    let mut open = vec![tree.root()];
    while let Some(directory) = open.pop() {
        for entry in directory.children() {
            if entry.inode.is_directory() {
                open.push(entry.inode);
            } else if !entry.is_owner {
                shared.push(entry.inode.id());
            }
        }
    }
    shared.sort_unstable();
    shared.dedup();
    shared
}

/// Returns the size of a directory in a composefs image in bytes. The image's root also has the names `00` to `ff`.
#[must_use]
pub fn directory_size(directory: Inode<'_>) -> u64 {
    const BLOCK: u64 = 4096;
    const ENTRY: u64 = 12;
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let is_root = directory.id() == InodeId::ROOT;
    let dots = [*b"..", *b".."].into_iter().zip([1, 2]);
    let whiteouts = (0..if is_root { 256 } else { 0 })
        .map(|number: usize| ([HEX[number >> 4], HEX[number & 15]], 2));
    let mut added = dots.chain(whiteouts).peekable();
    let mut children = directory.children().map(|entry| entry.name).peekable();
    let (mut blocks, mut filled) = (0, 0);
    loop {
        let next = added.peek().map(|(bytes, length)| &bytes[..*length]);
        let length = match (next, children.peek()) {
            (None, None) => break,
            (Some(one), Some(other)) if one == *other => {
                added.next();
                children.next().map_or(0, <[u8]>::len)
            }
            (Some(one), Some(other)) if one > *other => children.next().map_or(0, <[u8]>::len),
            (None, Some(_)) => children.next().map_or(0, <[u8]>::len),
            (Some(_), _) => added.next().map_or(0, |(_, length)| length),
        };
        let entry = ENTRY + length as u64;
        if filled + entry > BLOCK {
            blocks += 1;
            filled = 0;
        }
        filled += entry;
    }
    // The remaining entries are stored after the inode, unless they take more than half a block.
    if filled > BLOCK / 2 { (blocks + 1) * BLOCK } else { blocks * BLOCK + filled }
}

fn append_line(
    line: &mut Vec<u8>,
    path: &[u8],
    inode: Inode<'_>,
    size: u64,
    target: Option<&[u8]>,
) {
    let metadata = inode.metadata();
    let node = inode.node();
    escape(path, Escape::Space, line);
    line.push(b' ');
    append_decimal(line, size);
    line.push(b' ');
    if target.is_some() {
        line.push(b'@');
    }
    append_octal(line, inode.mode());
    let rdev = match node {
        Node::CharDevice(number) | Node::BlockDevice(number) => number,
        _ => 0,
    };
    for number in [inode.nlink().into(), metadata.uid.into(), metadata.gid.into(), rdev] {
        line.push(b' ');
        append_decimal(line, number);
    }
    line.push(b' ');
    if metadata.mtime.seconds < 0 {
        line.push(b'-');
    }
    append_decimal(line, metadata.mtime.seconds.unsigned_abs());
    line.push(b'.');
    append_decimal(line, metadata.mtime.nanoseconds.into());
    line.push(b' ');

    let object = match node {
        Node::Regular(Content::External { object, .. }) => object,
        _ => None,
    };
    let place = match node {
        Node::Symlink(target) => Some(target),
        Node::Regular(Content::External { location: Location::Path(path), .. }) => Some(path),
        _ => None,
    };
    let at_object =
        matches!(node, Node::Regular(Content::External { location: Location::Object, .. }));
    match (target.or(place), object) {
        (Some(bytes), _) => escape(bytes, Escape::SpaceAndLoneDash, line),
        (None, Some(object)) if at_object => line.extend_from_slice(object.path().as_bytes()),
        (None, _) => line.push(b'-'),
    }
    line.push(b' ');
    match node {
        Node::Regular(Content::Inline(bytes)) if !bytes.is_empty() => {
            escape(bytes, Escape::SpaceAndLoneDash, line);
        }
        _ => line.push(b'-'),
    }
    line.push(b' ');
    match object {
        Some(object) => line.extend_from_slice(object.to_string().as_bytes()),
        None => line.push(b'-'),
    }
    for (name, value) in inode.xattrs() {
        line.push(b' ');
        escape(name, Escape::SpaceAndEqual, line);
        line.push(b'=');
        escape(value, Escape::SpaceAndEqual, line);
    }
    line.push(b'\n');
}

/// Appends `bytes` with escapes to `out`.
pub fn escape(bytes: &[u8], style: Escape, out: &mut Vec<u8>) {
    let lone_dash = style == Escape::SpaceAndLoneDash && bytes == b"-";
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| is_special(*byte) || lone_dash) {
        out.extend_from_slice(&rest[..at]);
        append_special(rest[at], style, out);
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
}

/// Whether at least one style escapes this byte.
const fn is_special(byte: u8) -> bool {
    !matches!(byte, b'!'..=b'~') || matches!(byte, b'\\' | b'=')
}

fn append_special(byte: u8, style: Escape, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let letter = match byte {
        b'\\' => b'\\',
        b'\n' => b'n',
        b'\r' => b'r',
        b'\t' => b't',
        b' ' if style == Escape::Nothing => return out.push(byte),
        b'=' if style != Escape::SpaceAndEqual => return out.push(byte),
        _ => b'x',
    };
    out.extend([b'\\', letter]);
    if letter == b'x' {
        out.extend([DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
}

fn append_decimal(line: &mut Vec<u8>, mut number: u64) {
    // The largest number has 20 digits.
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b"0123456789"[usize::try_from(number % 10).expect("a digit")];
        number /= 10;
        if number == 0 {
            break;
        }
    }
    line.extend_from_slice(&digits[at..]);
}

fn append_octal(line: &mut Vec<u8>, number: u16) {
    // 16 bits have 6 octal digits.
    let mut shift = 15;
    while shift > 0 && number >> shift == 0 {
        shift -= 3;
    }
    loop {
        line.push(b"01234567"[usize::from(number >> shift & 7)]);
        if shift == 0 {
            break;
        }
        shift -= 3;
    }
}
