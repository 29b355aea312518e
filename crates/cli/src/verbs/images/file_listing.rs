//! Describes files of an image: like `ls -l`, and in JSON.

use std::collections::BTreeMap;

use image::tree::{Content, Inode, Node};
use serde::Serialize;

use crate::output::report;
use crate::session::target::Target;

/// Formats type and permissions like `ls`, such as `drwxr-xr-x`.
pub(crate) fn mode(inode: &Inode<'_>) -> String {
    let kind = match inode.node() {
        Node::Directory => 'd',
        Node::Regular(_) => '-',
        Node::Symlink(_) => 'l',
        Node::CharDevice(_) => 'c',
        Node::BlockDevice(_) => 'b',
        Node::Fifo => 'p',
        Node::Socket => 's',
    };
    let bits = inode.metadata().permissions;
    let mut text = String::from(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let rwx = bits >> shift & 7;
        text.push(if rwx & 4 != 0 { 'r' } else { '-' });
        text.push(if rwx & 2 != 0 { 'w' } else { '-' });
        text.push(match (rwx & 1 != 0, bits & special != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// Returns the length in bytes, or a device's numbers.
pub(crate) fn size(inode: &Inode<'_>) -> String {
    match inode.node() {
        Node::Regular(content) => content.size().to_string(),
        Node::Symlink(target) => target.len().to_string(),
        Node::CharDevice(number) | Node::BlockDevice(number) => {
            format!("{}, {}", rustix::fs::major(number), rustix::fs::minor(number))
        }
        Node::Directory | Node::Fifo | Node::Socket => "0".to_owned(),
    }
}

/// A file as `ls --json` and `tree --json` print it.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FileReport {
    /// Path below the listed directory. Bytes other than printable ASCII are `\xHH`, in all texts of this report.
    path: String,
    /// Type and permissions in octal, such as `100644`.
    mode: String,
    /// `directory`, `file`, `symlink`, `char-device`, `block-device`, `fifo` or `socket`.
    r#type: &'static str,
    /// Owner.
    uid: u32,
    /// Group.
    gid: u32,
    /// Number of hard links.
    nlink: u32,
    /// Time of the last change.
    mtime: MomentReport,
    /// Length. Absent unless it is a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<report::Bytes>,
    /// Id of the object that has the content. Absent unless it is a file with an object.
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    /// Target of the link. Absent unless it is a symlink.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    /// Device number. Absent unless it is a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceReport>,
    /// Extended attributes. Absent if there are none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    xattrs: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct MomentReport {
    /// Time since 1970, UTC.
    #[cfg_attr(test, schemars(extend("unit" = "seconds")))]
    seconds: i64,
    /// Fraction of the second.
    #[cfg_attr(test, schemars(extend("unit" = "nanoseconds")))]
    nanoseconds: u32,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceReport {
    /// Major number.
    major: u32,
    /// Minor number.
    minor: u32,
}

/// Makes the report of a file.
pub(crate) fn report(path: &[u8], inode: &Inode<'_>) -> FileReport {
    let metadata = inode.metadata();
    let escaped = |bytes: &[u8]| bytes.escape_ascii().to_string();
    let xattrs = inode.xattrs().map(|(name, value)| (escaped(name), escaped(value)));
    let mut told = FileReport {
        path: escaped(path),
        mode: format!("{:o}", inode.mode()),
        r#type: kind(inode),
        uid: metadata.uid,
        gid: metadata.gid,
        nlink: inode.nlink(),
        mtime: MomentReport {
            seconds: metadata.mtime.seconds,
            nanoseconds: metadata.mtime.nanoseconds,
        },
        size: None,
        object: None,
        target: None,
        device: None,
        xattrs: xattrs.collect(),
    };
    match inode.node() {
        Node::Regular(content) => {
            told.size = Some(report::Bytes(content.size()));
            if let Content::External { object: Some(object), .. } = content {
                told.object = Some(object.to_string());
            }
        }
        Node::Symlink(target) => told.target = Some(escaped(target)),
        Node::CharDevice(number) | Node::BlockDevice(number) => {
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            told.device = Some(DeviceReport { major, minor });
        }
        Node::Directory | Node::Fifo | Node::Socket => {}
    }
    told
}

/// Returns the type of a file as a word.
pub(crate) fn kind(inode: &Inode<'_>) -> &'static str {
    type_name(inode.node().type_bits())
}

/// Returns the word for `S_IFMT` bits.
pub(crate) const fn type_name(bits: u16) -> &'static str {
    match bits {
        0o040_000 => "directory",
        0o100_000 => "file",
        0o120_000 => "symlink",
        0o020_000 => "char-device",
        0o060_000 => "block-device",
        0o010_000 => "fifo",
        _ => "socket",
    }
}

/// Returns the columns of `ls -l`, without the name.
pub(crate) fn columns(inode: &Inode<'_>) -> Vec<String> {
    let metadata = inode.metadata();
    vec![
        mode(inode),
        inode.nlink().to_string(),
        metadata.uid.to_string(),
        metadata.gid.to_string(),
        size(inode),
        report::time(metadata.mtime.seconds),
    ]
}

/// Formats a name for a terminal. A name is escaped if it is not UTF-8, or if it contains characters that change how a
/// terminal shows the following text.
pub(crate) fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(report::is_unseen) => text.to_owned(),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// Visits everything below a directory, depth first, with the path relative to the directory and the depth, from 1.
pub(crate) fn below<'a>(
    target: &'a Target,
    start: Inode<'a>,
    depth: usize,
    visit: &mut impl FnMut(&[u8], Inode<'a>, usize),
) {
    let mut path = Vec::new();
    let mut open = vec![(target.tree.inode(start.id()).children(), 0)];
    while let Some((children, length)) = open.last_mut() {
        path.truncate(*length);
        let Some(entry) = children.next() else {
            open.pop();
            continue;
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(entry.name);
        visit(&path, entry.inode, open.len());
        if entry.inode.is_directory() && open.len() < depth {
            open.push((entry.inode.children(), path.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use image::tree::{Builder, InodeId, Link, Metadata, XattrsId};

    use super::*;

    fn check(permissions: u16, node: Node<'_>, expect: &str) {
        let mut builder = Builder::new();
        let metadata = Metadata { permissions, ..Metadata::IMPLICIT };
        let inode = builder.inode(&metadata, XattrsId::NONE, node).unwrap();
        builder.insert(InodeId::ROOT, b"x", inode, Link::Equal).unwrap();
        let tree = builder.finish();
        assert_eq!(mode(&tree.resolve(b"/x").unwrap()), expect);
    }

    /// The expected values are the output of GNU `ls -l` for such files.
    #[test]
    fn modes_are_as_ls_writes_them() {
        check(0o755, Node::Directory, "drwxr-xr-x");
        check(0o1777, Node::Directory, "drwxrwxrwt");
        check(0o4755, Node::Regular(Content::Inline(b"")), "-rwsr-xr-x");
        check(0o6644, Node::Regular(Content::Inline(b"")), "-rwSr-Sr--");
        check(0o1600, Node::Fifo, "prw------T");
        check(0o777, Node::Symlink(b"t"), "lrwxrwxrwx");
        check(0o660, Node::BlockDevice(1), "brw-rw----");
    }

    #[test]
    fn names_cannot_fool_a_terminal() {
        let check = |name: &str, expect: &str| assert_eq!(super::name(name.as_bytes()), expect);
        check("plain", "plain");
        check("Größe 日本", "Größe 日本");
        check("a\u{1b}[2J", r"a\x1b[2J");
        check("a\u{9b}2J", r"a\xc2\x9b2J");
        check("exe.\u{202e}txt", r"exe.\xe2\x80\xaetxt");
        check("a\u{2066}b", r"a\xe2\x81\xa6b");
        check("a\u{200b}b", r"a\xe2\x80\x8bb");
        check("\u{feff}a", r"\xef\xbb\xbfa");
        check("a\u{e0041}", r"a\xf3\xa0\x81\x81");
        assert_eq!(super::name(b"\xff"), r"\xff");
    }
}
