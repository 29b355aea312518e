//! Lists a directory of the image: the tree's entries, `.` and `..`, and in the root the whiteouts that hide objects.

use std::iter::Peekable;

use crate::tree::{Children, Entry, Inode, InodeId};

/// The origin of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InodeSource {
    Tree(InodeId),
    /// A whiteout in the root that hides the object directory for this byte.
    Shadow(u8),
}

/// The bytes and names of all shadows, ordered by name.
pub(super) static SHADOWS: [(u8, [u8; 2]); 256] = {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut shadows = [(0, [0; 2]); 256];
    let mut byte = 0_u8;
    loop {
        let digits = [DIGITS[(byte >> 4) as usize], DIGITS[(byte & 15) as usize]];
        shadows[byte as usize] = (byte, digits);
        match byte.checked_add(1) {
            Some(next) => byte = next,
            None => break shadows,
        }
    }
};

/// An entry of a directory in the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listed<'a> {
    pub(super) name: &'a [u8],
    pub(super) source: InodeSource,
    /// Whether this name owns the inode.
    pub(super) owns: bool,
}

/// Iterates over the entries of a directory in byte order: children, shadows, `.` and `..`.
#[derive(Debug)]
pub(super) struct Listing<'a> {
    children: Peekable<Children<'a>>,
    dots: &'static [&'static [u8]],
    shadows: &'static [(u8, [u8; 2])],
    itself: InodeId,
    parent: InodeId,
}

impl<'a> Listing<'a> {
    /// Lists a directory without shadows, for images that are mounted without an overlay.
    pub(super) fn plain(directory: &Inode<'a>) -> Self {
        Self { shadows: &[], ..Self::for_directory(directory) }
    }

    pub(super) fn for_directory(directory: &Inode<'a>) -> Self {
        Self {
            children: directory.children().peekable(),
            dots: &[b".", b".."],
            shadows: if directory.id() == InodeId::ROOT { &SHADOWS } else { &[] },
            itself: directory.id(),
            parent: directory.parent().id(),
        }
    }

    fn next_child(&mut self) -> Option<Listed<'a>> {
        let Entry { name, inode, is_owner } = self.children.next()?;
        Some(Listed { name, source: InodeSource::Tree(inode.id()), owns: is_owner })
    }
}

impl<'a> Iterator for Listing<'a> {
    type Item = Listed<'a>;

    fn next(&mut self) -> Option<Listed<'a>> {
        if self.dots.is_empty() && self.shadows.is_empty() {
            return self.next_child();
        }
        let child = self.children.peek().map(|entry| entry.name);
        if let [(_, name), rest @ ..] = self.shadows
            && child == Some(name)
        {
            // The source itself has this name, so no shadow is added.
            self.shadows = rest;
        }
        let dot = self.dots.first().copied();
        let shadow = self.shadows.first().map(|(_, name)| &name[..]);
        let first = [child, dot, shadow].into_iter().flatten().min()?;
        match (self.dots, self.shadows) {
            ([name, rest @ ..], _) if *name == first => {
                self.dots = rest;
                let inode = if rest.is_empty() { self.parent } else { self.itself };
                Some(Listed { name, source: InodeSource::Tree(inode), owns: false })
            }
            (_, [(byte, name), rest @ ..]) if name == first => {
                self.shadows = rest;
                Some(Listed { name, source: InodeSource::Shadow(*byte), owns: true })
            }
            _ => self.next_child(),
        }
    }
}
