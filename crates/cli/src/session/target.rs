//! Parses `NAME[:/PATH]`, `erofs:FILE[:/PATH]`, `disk:FILE[:/PATH]`, or the path of an image file, in the arguments of
//! verbs.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use image::erofs::read::{Nid, Owners};
use image::tree::{Inode, Node, Tree};
use oci::manifest::Platform;
use oci::source::ImageSource;
use store::{NamedImage, OpenImage, Presence, Resolved, Store};
use transfer::import::{ErofsFile, FilePiece, Limits};

use crate::session::context::Context;
use crate::session::resolve::meant_a_path;
use crate::session::resources::without_store;

/// The image that an argument names, and a path in it.
#[derive(Debug)]
pub(crate) struct Target {
    /// The argument, for messages.
    pub(crate) text: String,
    pub(crate) tree: Tree,
    /// Whether all data of the image is in the store; a file outside of a store counts as complete.
    presence: Presence,
    /// The store with the image's objects; `None` for an image file.
    pub(crate) store: Option<Store>,
    /// The image file with the contents of files that have no object.
    file: Option<FileTarget>,
    /// Absolute path in the image.
    pub(crate) path: Vec<u8>,
}

/// An image file that was opened for its names.
#[derive(Debug)]
struct FileTarget {
    erofs: ErofsFile,
    /// The nids of the tree's inodes; empty if the tree has the objects of all files.
    nids: Vec<Nid>,
}

/// Beginnings of sources that are EROFS images in files.
const KINDS: [&[u8]; 2] = [b"erofs:", b"disk:"];

/// Opens the source `erofs:FILE` or `disk:FILE`, or a path; `None` for any other text, and for names as in
/// [`file_source`]. As in a shell, a name that begins with `/`, `./` or `../` is a path.
pub(crate) fn erofs_file(context: &Context, text: &OsStr) -> anyhow::Result<Option<ErofsFile>> {
    let is_path = [&b"/"[..], b"./", b"../"].iter().any(|it| text.as_bytes().starts_with(it));
    if is_path {
        return Ok(Some(ErofsFile::open(Path::new(text))?));
    }
    Ok(match file_source(context, text)? {
        Some(ImageSource::Erofs(path)) => Some(ErofsFile::open(&path)?),
        Some(ImageSource::Disk(path)) => {
            let architecture = &Platform::of_this_machine().architecture;
            Some(ErofsFile::open_disk(&path, architecture)?)
        }
        _ => None,
    })
}

/// Parses `erofs:FILE` and `disk:FILE`; `None` for any other text. If the file does not exist, but an image has the
/// text as its name, the text is a name: version 0.1.0 made images with such names.
pub(crate) fn file_source(context: &Context, text: &OsStr) -> anyhow::Result<Option<ImageSource>> {
    if !KINDS.iter().any(|kind| text.as_bytes().starts_with(kind)) {
        return Ok(None);
    }
    let source = ImageSource::parse(text)?;
    let is_absent = match &source {
        ImageSource::Erofs(path) | ImageSource::Disk(path) => {
            path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound)
        }
        _ => false,
    };
    let is_name = |name: &str| {
        let store = context.open_with(name);
        store.is_ok_and(|store| crate::session::resolve::resolve(&store, name).is_ok())
    };
    Ok(if is_absent && text.to_str().is_some_and(is_name) { None } else { Some(source) })
}

/// Splits at the first `:/` behind the kind of a source. It cannot be part of a name, because a tag has no slash.
pub(crate) fn split(text: &OsStr) -> (&OsStr, &[u8]) {
    let bytes = text.as_bytes();
    let kind = KINDS.into_iter().find(|kind| bytes.starts_with(kind)).map_or(0, <[u8]>::len);
    match bytes[kind..].windows(2).position(|pair| pair == b":/") {
        Some(at) => (OsStr::from_bytes(&bytes[..kind + at]), &bytes[kind + at + 1..]),
        None => (text, b"/"),
    }
}

impl Target {
    /// Reads an image whose data is completely in the store, or an image file with the objects of all its files.
    pub(crate) fn open(context: &Context, text: &OsStr) -> anyhow::Result<Self> {
        let target =
            Self::resolve(context, text, |store, found| read(store, &store.open_found(found)?))?;
        let Some(file) = &target.file else { return Ok(target) };
        let limits = Limits::default();
        let tree = without_store(context, |environment| file.erofs.tree(&limits, environment))??;
        Ok(Self { tree, ..target })
    }

    /// Like [`open`](Self::open), but the image may lack data: files without data, and the files of an image file, have
    /// no object.
    pub(crate) fn open_names(context: &Context, text: &OsStr) -> anyhow::Result<Self> {
        let mut presence = Presence::Complete;
        let target = Self::resolve(context, text, |store, found| {
            let opened = store.open_names(&found.image)?;
            let manifest = found.manifest.as_ref();
            presence = match opened.presence {
                Presence::Partial => Presence::Partial,
                _ if store.downloads.is_unproven_for(&found.image, manifest)? => Presence::Unproven,
                _ => Presence::Complete,
            };
            read_names(store, &opened)
        })?;
        Ok(Self { presence, ..target })
    }

    fn resolve(
        context: &Context,
        text: &OsStr,
        read: impl FnOnce(&Store, &Resolved) -> anyhow::Result<Tree>,
    ) -> anyhow::Result<Self> {
        let presence = Presence::Complete;
        let (name, path) = split(text);
        let shown = text.to_string_lossy().into_owned();
        let path = path.to_vec();
        if let Some(erofs) = erofs_file(context, name)? {
            let limits = Limits::default();
            let names =
                without_store(context, |environment| erofs.names(&limits, environment.cancel))??;
            let file = Some(FileTarget { erofs, nids: names.nids });
            return Ok(Self { text: shown, tree: names.tree, presence, store: None, file, path });
        }
        let name = name.to_str().with_context(|| format!("\"{shown}\" is not UTF-8"))?;
        let store = context.open_with(name)?;
        let resolved = crate::session::resolve::resolve(&store, name)
            .map_err(|error| meant_a_path(&store, name, error))?;
        let tree = read(&store, &resolved)?;
        Ok(Self { text: shown, tree, presence, store: Some(store), file: None, path })
    }

    /// Whether files without an object have their bytes in an image file.
    fn has_contents(&self) -> bool {
        self.file.as_ref().is_some_and(|file| !file.erofs.is_composefs())
    }

    /// Returns the inode at the path. Symlinks in the middle of the path are followed inside the image, as in a root
    /// directory. A symlink at the end is followed only if the path ends with a slash, or if `last` requires it.
    pub(crate) fn inode(&self, last: LastLink) -> anyhow::Result<Inode<'_>> {
        let follow = last == LastLink::Follow || self.path.ends_with(b"/");
        resolve(&self.tree, &self.path, follow)
            .with_context(|| format!("the image has no \"{}\"", self.path.escape_ascii()))
    }
}

/// Checks that a directory exists. Users must create it themselves, so the error explains how.
pub(crate) fn check_directory(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => bail!("\"{shown}\" is not a directory"),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("the directory \"{shown}\" does not exist: `mkdir -p '{shown}'` makes it")
        }
        Err(error) => Err(error).with_context(|| format!("cannot examine \"{shown}\"")),
    }
}

/// Handling of a symlink at the end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastLink {
    /// Return the symlink itself.
    Keep,
    /// Return the file to which the symlink leads.
    Follow,
}

/// Maximum number of symlinks in a path, which is the kernel's. Source: Linux `include/linux/namei.h`,
/// `MAXSYMLINKS`.
const LINKS_MAX: usize = 40;

fn resolve<'a>(tree: &'a Tree, path: &[u8], follow_last: bool) -> Option<Inode<'a>> {
    let names = |path: &[u8]| -> Vec<Vec<u8>> {
        image::tree::components(path).rev().map(<[u8]>::to_vec).collect()
    };
    // `above` contains the directories from the root down. `left` contains the remaining names; the last element is
    // resolved next.
    let mut above = vec![tree.root()];
    let mut left = names(path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        match &name[..] {
            b"." => continue,
            b".." => {
                if above.len() > 1 {
                    above.pop();
                }
                continue;
            }
            _ => {}
        }
        let found = above.last()?.lookup(&name)?;
        match found.node() {
            Node::Symlink(target) if !left.is_empty() || follow_last => {
                links += 1;
                if links > LINKS_MAX {
                    return None;
                }
                if target.starts_with(b"/") {
                    above.truncate(1);
                }
                left.extend(names(target));
            }
            _ => above.push(found),
        }
    }
    above.pop()
}

/// Reads the tree of an image in the store.
pub(crate) fn read(store: &Store, image: &OpenImage) -> anyhow::Result<Tree> {
    let tree = store.tree(image, Owners::AsWritten);
    Ok(tree.with_context(|| format!("cannot read image {}", image.id))?.tree)
}

/// Reads the tree of an image in the store that may lack data.
pub(crate) fn read_names(store: &Store, image: &NamedImage) -> anyhow::Result<Tree> {
    let tree = store.named_tree(image, Owners::AsWritten);
    Ok(tree.with_context(|| format!("cannot read image {}", image.id))?.tree)
}

/// Passes the bytes of a regular file of the tree to `take`, in blocks. Bytes from objects are verified while they are
/// read: if they are wrong, the error is returned at the end of the file at the latest.
pub(crate) fn contents(
    target: &Target,
    inode: Inode<'_>,
    mut take: impl FnMut(&[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    use image::tree::Content;
    let Node::Regular(content) = inode.node() else {
        bail!("\"{}\" is not a regular file", inode.path().escape_ascii());
    };
    if target.presence == Presence::Unproven {
        bail!(
            "{} comes from an index, and is not compared with its layers yet: `quire mount`, \
            `quire run` or another `quire pull` of it compares it",
            target.text
        );
    }
    match content {
        Content::Inline(bytes) => take(bytes),
        Content::External { object: None, .. } if target.has_contents() => {
            let file = target.file.as_ref().context("the image file is open")?;
            let nid = file.nids[inode.id().index()];
            file.erofs.read(nid, inode, |piece| match piece {
                FilePiece::Data(bytes) => take(bytes),
                FilePiece::Hole(count) => zeros(count, &mut take),
            })
        }
        Content::External { object: Some(object), size, .. } => {
            let store = target.store.as_ref().with_context(|| {
                format!(
                    "{} has no store with the content of its files: `quire import --objects DIR` imports it with the \
                    directory of its objects",
                    target.text
                )
            })?;
            let mut file = store.object(&object)?;
            let mut hasher = image::verity::Hasher::new(object.algorithm());
            let mut buffer = vec![0; 1 << 20];
            loop {
                let read = std::io::Read::read(&mut file, &mut buffer)
                    .with_context(|| format!("cannot read object {object}"))?;
                if read == 0 {
                    break;
                }
                hasher.update(&buffer[..read]);
                if hasher.size() > size {
                    bail!("object {object} has more than {size} bytes: run `quire fsck`");
                }
                take(&buffer[..read])?;
            }
            let found = hasher.finish();
            if found != *object.digest() {
                bail!("object {object} is damaged, its digest is {found}: run `quire fsck`");
            }
            Ok(())
        }
        Content::External { object: None, .. } if target.presence == Presence::Partial => {
            bail!(
                "the data of \"{}\" is not downloaded: mount the image with --lazy, or pull it \
                without --lazy",
                inode.path().escape_ascii()
            )
        }
        Content::External { object: None, .. } => {
            bail!(
                "the object of \"{}\" is unknown: in the form packed or tar the index of a device \
                may be missing (see `quire fsck`), and a new import of the image writes it again",
                inode.path().escape_ascii()
            )
        }
    }
}

/// Passes this many zeros to `take`, in blocks.
fn zeros(count: u64, mut take: impl FnMut(&[u8]) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let block = [0; 64 << 10];
    let mut left = count;
    while left > 0 {
        let len = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
        take(&block[..len])?;
        left -= len as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_begins_at_the_first_colon_with_a_slash() {
        let cases = [
            ("a", "a", "/"),
            ("a:b", "a:b", "/"),
            ("a:/", "a", "/"),
            ("h:5000/a:b:/c:/d", "h:5000/a:b", "/c:/d"),
            ("./x.img:/c", "./x.img", "/c"),
            ("erofs:/a/b.img", "erofs:/a/b.img", "/"),
            ("erofs:/a/b.img:/c", "erofs:/a/b.img", "/c"),
            ("disk:x:/c:/d", "disk:x", "/c:/d"),
        ];
        for (text, name, path) in cases {
            assert_eq!(split(OsStr::new(text)), (OsStr::new(name), path.as_bytes()), "{text}");
        }
    }
}
