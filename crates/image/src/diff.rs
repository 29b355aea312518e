//! Compares two trees and lists every path and attribute that differs, to explain why two images have different ids.

use std::cmp::Ordering;

use crate::tree::{Children, Content, Entry, Inode, Node, Timestamp, Tree};
use crate::verity::ObjectId;

/// A difference at one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference<'a> {
    /// The whole path, with a leading slash.
    pub path: Vec<u8>,
    /// The kind of the difference, with the values.
    pub change: Change<'a>,
}

/// The kind of a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<'a> {
    /// Only the first tree has the path. Paths below it are not listed.
    Removed,
    /// Only the second tree has the path. Paths below it are not listed.
    Added,
    /// Both trees have the path, with different attributes.
    Changed(Vec<Attribute<'a>>),
}

/// An attribute with two values, the first tree's and the second's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribute<'a> {
    /// File type, as `S_IFMT` bits. The contents are then not compared.
    Type(u16, u16),
    /// Permission, set-id and sticky bits.
    Permissions(u16, u16),
    /// User id of the owner.
    Uid(u32, u32),
    /// Group id of the owner.
    Gid(u32, u32),
    /// Modification time.
    Mtime(Timestamp, Timestamp),
    /// Number of links.
    Nlink(u32, u32),
    /// Path of the name that owns the inode; `None` if this path is that name.
    LinkTo(Option<Vec<u8>>, Option<Vec<u8>>),
    /// Length in bytes.
    Size(u64, u64),
    /// A regular file's contents, if the lengths are equal.
    Bytes(Bytes<'a>, Bytes<'a>),
    /// A symlink's target.
    Target(&'a [u8], &'a [u8]),
    /// A device number.
    Device(u64, u64),
    /// An xattr's name and its two values; `None` where a tree does not have the xattr.
    Xattr(&'a [u8], Option<&'a [u8]>, Option<&'a [u8]>),
}

/// The contents of a regular file, as far as the tree records them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytes<'a> {
    /// The bytes, which are stored in the tree.
    Inline(&'a [u8]),
    /// The object id of the bytes, which are outside the tree.
    Object(ObjectId),
    /// The bytes are outside the tree, and their object id is unknown.
    Unknown,
}

/// Compares two trees and passes each difference to `tell`, in the order of [`Tree::walk`].
pub fn diff<'a>(old: &'a Tree, new: &'a Tree, mut tell: impl FnMut(Difference<'a>)) {
    let mut path = Vec::new();
    compare(&path, old.root(), new.root(), (None, None), &mut tell);
    let mut open = vec![(Pairs::new(old.root(), new.root()), 0)];
    while let Some((pairs, length)) = open.last_mut() {
        path.truncate(*length);
        let Some(pair) = pairs.next() else {
            open.pop();
            continue;
        };
        let name = match &pair {
            Pair::Old(entry) | Pair::New(entry) | Pair::Both(entry, _) => entry.name,
        };
        path.push(b'/');
        path.extend_from_slice(name);
        match pair {
            Pair::Old(_) => tell(Difference { path: path.clone(), change: Change::Removed }),
            Pair::New(_) => tell(Difference { path: path.clone(), change: Change::Added }),
            Pair::Both(old, new) => {
                let links = (link_target(&old), link_target(&new));
                compare(&path, old.inode, new.inode, links, &mut tell);
                if old.inode.is_directory() && new.inode.is_directory() {
                    open.push((Pairs::new(old.inode, new.inode), path.len()));
                }
            }
        }
    }
}

fn link_target(entry: &Entry<'_>) -> Option<Vec<u8>> {
    (!entry.is_owner).then(|| entry.inode.path())
}

fn compare<'a>(
    path: &[u8],
    old: Inode<'a>,
    new: Inode<'a>,
    links: (Option<Vec<u8>>, Option<Vec<u8>>),
    tell: &mut impl FnMut(Difference<'a>),
) {
    let mut found = Vec::new();
    if links.0 != links.1 {
        found.push(Attribute::LinkTo(links.0, links.1));
    }
    nodes(old.node(), new.node(), &mut found);
    let (was, is) = (old.metadata(), new.metadata());
    if was.permissions != is.permissions {
        found.push(Attribute::Permissions(was.permissions, is.permissions));
    }
    if was.uid != is.uid {
        found.push(Attribute::Uid(was.uid, is.uid));
    }
    if was.gid != is.gid {
        found.push(Attribute::Gid(was.gid, is.gid));
    }
    if was.mtime != is.mtime {
        found.push(Attribute::Mtime(was.mtime, is.mtime));
    }
    // A directory's link count follows from its children, which are compared in any case.
    if !old.is_directory() && !new.is_directory() && old.nlink() != new.nlink() {
        found.push(Attribute::Nlink(old.nlink(), new.nlink()));
    }
    xattrs(old, new, &mut found);
    if !found.is_empty() {
        let path = if path.is_empty() { b"/".to_vec() } else { path.to_vec() };
        tell(Difference { path, change: Change::Changed(found) });
    }
}

fn nodes<'a>(old: Node<'a>, new: Node<'a>, found: &mut Vec<Attribute<'a>>) {
    match (old, new) {
        (Node::Regular(old), Node::Regular(new)) => {
            let (was, is) = (bytes(old), bytes(new));
            if old.size() != new.size() {
                found.push(Attribute::Size(old.size(), new.size()));
            } else if was != is {
                found.push(Attribute::Bytes(was, is));
            }
        }
        (Node::Symlink(old), Node::Symlink(new)) if old != new => {
            found.push(Attribute::Target(old, new));
        }
        (Node::CharDevice(old), Node::CharDevice(new))
        | (Node::BlockDevice(old), Node::BlockDevice(new))
            if old != new =>
        {
            found.push(Attribute::Device(old, new));
        }
        (old, new) if old.type_bits() != new.type_bits() => {
            found.push(Attribute::Type(old.type_bits(), new.type_bits()));
        }
        _ => {}
    }
}

const fn bytes(content: Content<'_>) -> Bytes<'_> {
    match content {
        Content::Inline(bytes) => Bytes::Inline(bytes),
        Content::External { object: Some(object), .. } => Bytes::Object(object),
        Content::External { object: None, .. } => Bytes::Unknown,
    }
}

fn xattrs<'a>(old: Inode<'a>, new: Inode<'a>, found: &mut Vec<Attribute<'a>>) {
    let sorted = |inode: Inode<'a>| {
        let mut pairs: Vec<_> = inode.xattrs().collect();
        pairs.sort_unstable();
        pairs.into_iter().peekable()
    };
    let (mut old, mut new) = (sorted(old), sorted(new));
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((old, _)), Some((new, _))) => old.cmp(new),
        };
        let was = if order.is_le() { old.next() } else { None };
        let is = if order.is_ge() { new.next() } else { None };
        if was != is
            && let Some((name, _)) = was.or(is)
        {
            found.push(Attribute::Xattr(name, was.map(|it| it.1), is.map(|it| it.1)));
        }
    }
}

/// The entries of two directories side by side.
struct Pairs<'a> {
    old: std::iter::Peekable<Children<'a>>,
    new: std::iter::Peekable<Children<'a>>,
}

enum Pair<'a> {
    Old(Entry<'a>),
    New(Entry<'a>),
    Both(Entry<'a>, Entry<'a>),
}

impl<'a> Pairs<'a> {
    fn new(old: Inode<'a>, new: Inode<'a>) -> Self {
        Self { old: old.children().peekable(), new: new.children().peekable() }
    }

    fn next(&mut self) -> Option<Pair<'a>> {
        let order = match (self.old.peek(), self.new.peek()) {
            (None, None) => return None,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(old), Some(new)) => old.name.cmp(new.name),
        };
        match order {
            Ordering::Less => self.old.next().map(Pair::Old),
            Ordering::Greater => self.new.next().map(Pair::New),
            Ordering::Equal => Some(Pair::Both(self.old.next()?, self.new.next()?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Builder, InodeId, Link, Metadata, XattrsId};

    /// Makes a tree with the directory `/d` and the file `/d/f`, then applies `change` to the builder.
    fn tree(content: &[u8], change: impl FnOnce(&mut Builder, InodeId, InodeId)) -> Tree {
        let mut builder = Builder::new();
        let directory = builder.subdirectory(InodeId::ROOT, b"d").unwrap();
        let node = Node::Regular(Content::Inline(content));
        let file = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
        builder.insert(directory, b"f", file, Link::Equal).unwrap();
        change(&mut builder, directory, file);
        builder.finish()
    }

    fn check(old: &Tree, new: &Tree, expect: &[(&str, Change<'_>)]) {
        let mut found = Vec::new();
        diff(old, new, |it| found.push((String::from_utf8(it.path).unwrap(), it.change)));
        let expect: Vec<_> =
            expect.iter().map(|(path, change)| ((*path).to_owned(), change.clone())).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn every_attribute_is_told() {
        let plain = tree(b"x", |_, _, _| {});
        check(&plain, &plain, &[]);
        let other = tree(b"y", |builder, _, file| {
            let xattrs = builder.xattrs([(&b"user.a"[..], &b"1"[..])]).unwrap();
            let mtime = Timestamp { seconds: 5, nanoseconds: 6 };
            let metadata = Metadata { permissions: 0o4711, uid: 1, gid: 2, mtime };
            builder.describe(file, &metadata, xattrs).unwrap();
        });
        check(
            &plain,
            &other,
            &[(
                "/d/f",
                Change::Changed(vec![
                    Attribute::Bytes(Bytes::Inline(b"x"), Bytes::Inline(b"y")),
                    Attribute::Permissions(0o755, 0o4711),
                    Attribute::Uid(0, 1),
                    Attribute::Gid(0, 2),
                    Attribute::Mtime(
                        Timestamp::default(),
                        Timestamp { seconds: 5, nanoseconds: 6 },
                    ),
                    Attribute::Xattr(b"user.a", None, Some(b"1")),
                ]),
            )],
        );
        let longer = tree(b"xy", |_, _, _| {});
        check(&plain, &longer, &[("/d/f", Change::Changed(vec![Attribute::Size(1, 2)]))]);
    }

    #[test]
    fn names_and_links_are_told() {
        let plain = tree(b"x", |_, _, _| {});
        let linked = tree(b"x", |builder, _, file| {
            builder.insert(InodeId::ROOT, b"g", file, Link::Equal).unwrap();
        });
        let nlink = |was, is| Change::Changed(vec![Attribute::Nlink(was, is)]);
        check(&plain, &linked, &[("/d/f", nlink(1, 2)), ("/g", Change::Added)]);
        check(&linked, &plain, &[("/d/f", nlink(2, 1)), ("/g", Change::Removed)]);
        let apart = tree(b"x", |builder, _, file| {
            let node = Node::Regular(Content::Inline(b"x"));
            let copy = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
            builder.insert(InodeId::ROOT, b"g", copy, Link::Equal).unwrap();
            builder.state_nlink(copy, 2);
            builder.state_nlink(file, 2);
        });
        let link = Attribute::LinkTo(Some(b"/d/f".to_vec()), None);
        check(&linked, &apart, &[("/g", Change::Changed(vec![link]))]);
    }

    #[test]
    fn another_type_hides_the_rest() {
        let plain = tree(b"x", |_, _, _| {});
        let other = tree(b"x", |builder, directory, _| {
            builder.remove(InodeId::ROOT, b"d");
            let node = Node::Symlink(b"t");
            let link = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
            builder.insert(InodeId::ROOT, b"d", link, Link::Equal).unwrap();
            assert!(builder.is_directory(directory));
        });
        let kind = Attribute::Type(0o040_000, 0o120_000);
        check(&plain, &other, &[("/d", Change::Changed(vec![kind]))]);
    }
}
