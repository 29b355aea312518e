//! `diff-walk`: checks that Quire's reader, the mounted kernel and the source agree on every path, attribute and byte
//! of an image.
//!
//! The kernel is the reference: the image is mounted like by `quire mount`, in a separate mount namespace, and every
//! file in it is compared with the tree that Quire's reader makes of the image. In the other direction, the kernel
//! must not list names that the tree lacks. A source directory, if given, is compared in the same way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use image::erofs::read::{ByteOffset, FileType, Image, ImageTree, Owners, ReadAt, View, to_tree};
use image::tree::{Content, Inode, Node, Tree};
use image::verity::{Algorithm, Hasher, ObjectId};
use kernel::mount::{
    Credentials, ErofsOptions, OverlayOptions, Propagation, Verity, XattrNamespace,
};

use rig::cache::Cache;
use rig::{inputs, process};

/// Inputs of the comparison.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// An image file: of composefs, or self-contained
    #[arg(required_unless_present = "short")]
    image: Option<PathBuf>,
    /// Compare an imported Debian root, in every form
    #[arg(long, conflicts_with = "image")]
    short: bool,
    /// Directory of objects; without it the contents of files are not compared
    #[arg(long, value_name = "DIR")]
    objects: Option<PathBuf>,
    /// Directory of the image's devices, each under its name
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// A directory that the image was made of, which is compared as well
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
}

/// The short form for every change: a Debian root, imported by the built `quire`.
fn short() -> Result<()> {
    let source = inputs::base_root(&Cache::open()?)?;
    let place = tempfile::tempdir()?;
    let store = place.path().join("store");
    let mut import = Command::new(rig::process::quire()?);
    import.arg("--store").arg(&store).args(["--json", "import"]);
    import.arg(format!("dir:{}", source.display())).arg("base");
    let report: serde_json::Value = serde_json::from_str(&process::quiet(&mut import)?)?;
    let id = report["image"].as_str().context("import reported no image")?;
    // Runs in a separate process, because it enters a mount namespace.
    let mut walk = Command::new(std::env::current_exe()?);
    walk.arg("diff-walk").arg(store.join("images").join(id));
    walk.arg("--objects").arg(store.join("objects")).arg("--against").arg(&source);
    process::shown(&mut walk)?;

    // The same image, self-contained.
    let alone = place.path().join("base.erofs");
    let mut export = Command::new(rig::process::quire()?);
    export.arg("--store").arg(&store).args(["--quiet", "export", "base"]);
    let mut target = std::ffi::OsString::from("erofs:");
    target.push(&alone);
    process::quiet(export.arg(target))?;
    let mut walk = Command::new(std::env::current_exe()?);
    process::shown(walk.arg("diff-walk").arg(&alone).arg("--against").arg(&source))?;

    // The same image over devices: packed ones, and the tar itself.
    let tar = place.path().join("base.tar");
    let mut make = Command::new("tar");
    make.args(["--format=posix", "--xattrs", "--acls", "--numeric-owner", "-cf"]).arg(&tar);
    process::quiet(make.arg("-C").arg(&source).arg("."))?;
    for form in ["packed", "tar"] {
        let mut import = Command::new(rig::process::quire()?);
        import.arg("--store").arg(&store).args(["--json", "import", "--form", form]);
        import.arg(format!("tar:{}", tar.display())).arg(form);
        let report: serde_json::Value = serde_json::from_str(&process::quiet(&mut import)?)?;
        let id = report["image"].as_str().context("import reported no image")?;
        let mut walk = Command::new(std::env::current_exe()?);
        walk.arg("diff-walk").arg(store.join("images").join(id));
        walk.arg("--data").arg(store.join("data"));
        process::shown(walk.arg("--against").arg(&source))?;
    }
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(rig::Skipped("diff-walk mounts, which needs root".to_owned()).into());
    }
    let Some(image) = args.image.as_ref().filter(|_| !args.short) else { return short() };
    let bytes = std::fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let opened = Image::open(&bytes[..])?;
    if opened.superblock().composefs.is_none() {
        return alone(args, image, &opened);
    }
    let tree = to_tree(&opened, View::Composefs(Owners::AsWritten))?.tree;

    kernel::process::own_mounts(Propagation::Private)?;
    let empty = tempfile::tempdir()?;
    let objects = File::open(args.objects.as_deref().unwrap_or(empty.path()))?;
    let file = File::open(image)?;
    let options = ErofsOptions::default();
    let erofs = kernel::mount::erofs(file.as_fd(), &options)?;
    let mount = kernel::mount::overlay(&OverlayOptions {
        name: "diff-walk",
        lower: &[erofs.mount.as_fd()],
        data: &[objects.as_fd()],
        upper: None,
        verity: Verity::Off,
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    })?;
    let point = tempfile::tempdir()?;
    mount.attach_at(point.path())?;
    let contents = if args.objects.is_some() { Contents::Compare } else { Contents::Skip };
    let mut differences = compare(&tree, point.path(), contents, Origin::Kernel)?;
    kernel::mount::unmount(point.path(), kernel::mount::Unmount::Lazy)?;
    if let Some(source) = &args.against {
        differences.extend(compare(&tree, source, Contents::Compare, Origin::Source)?);
    }
    tell(&tree, &differences)
}

/// Compares an image that is mounted without overlayfs. The digests are computed from the bytes that Quire's reader
/// returns.
fn alone(args: &Args, path: &Path, image: &Image<&[u8]>) -> Result<()> {
    let found = to_tree(image, View::Plain)?;
    let devices = image.devices().iter().map(|slot| {
        let id = slot.device_id().context("a device is named by no digest")?;
        let data = args.data.as_deref().context("the image has devices: say --data DIR")?;
        let path = data.join(id.to_string());
        File::open(&path).with_context(|| format!("cannot open {}", path.display()))
    });
    let devices = devices.collect::<Result<Vec<_>>>()?;
    let digests = digests(image, &found, &devices)?;
    let (tree, contents) = (found.tree, Contents::Read(&digests));
    kernel::process::own_mounts(Propagation::Private)?;
    let file = File::open(path)?;
    let fds: Vec<_> = devices.iter().map(|it| it.as_fd()).collect();
    let options = ErofsOptions { devices: &fds, ..ErofsOptions::default() };
    let erofs = kernel::mount::erofs(file.as_fd(), &options)?;
    let point = tempfile::tempdir()?;
    erofs.mount.attach_at(point.path())?;
    let mut differences = compare(&tree, point.path(), contents, Origin::Kernel)?;
    kernel::mount::unmount(point.path(), kernel::mount::Unmount::Lazy)?;
    if let Some(source) = &args.against {
        differences.extend(compare(&tree, source, contents, Origin::Source)?);
    }
    tell(&tree, &differences)
}

/// Returns, for each inode of a tree that was made of an image, the digest of the bytes that Quire's reader returns.
fn digests(
    image: &Image<&[u8]>,
    found: &ImageTree,
    devices: &[File],
) -> Result<Vec<Option<ObjectId>>> {
    let devices = devices.iter().map(|file| Ok(Bytes(file, file.metadata()?.len())));
    let devices = devices.collect::<Result<Vec<_>>>()?;
    let devices: Vec<&dyn ReadAt> = devices.iter().map(|it| it as &dyn ReadAt).collect();
    let mut digests = vec![None; found.tree.inode_bound()];
    let mut buffer = vec![0; 1 << 20];
    for (nid, digest) in found.nids.iter().zip(&mut digests) {
        let inode = image.inode(*nid)?;
        if inode.file_type() != FileType::Regular {
            continue;
        }
        let mut hasher = Hasher::new(Algorithm::Sha256);
        let mut at = ByteOffset(0);
        loop {
            match image.read(&inode, at, &mut buffer, &devices)? {
                0 => break,
                read => hasher.update(&buffer[..read]),
            }
            at.0 += buffer.len() as u64;
        }
        *digest = Some(hasher.finish().into());
    }
    Ok(digests)
}

/// A file with this number of bytes.
struct Bytes<'a>(&'a File, u64);

impl ReadAt for Bytes<'_> {
    fn len(&self) -> u64 {
        self.1
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }
}

fn tell(tree: &Tree, differences: &[String]) -> Result<()> {
    for difference in differences {
        println!("{difference}");
    }
    match differences.len() {
        0 => {
            println!("{} inodes agree", tree.inode_count());
            Ok(())
        }
        many => Err(rig::Failed(format!("{many} differences")).into()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contents<'a> {
    /// Compares with the objects that the tree names.
    Compare,
    /// Compares with the bytes that Quire's reader returns: digests by inode.
    Read(&'a [Option<ObjectId>]),
    Skip,
}

/// Origin of the directory that is compared with the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Kernel,
    Source,
}

/// Returns every difference between a tree and a directory, one per line.
fn compare(
    tree: &Tree,
    root: &Path,
    contents: Contents<'_>,
    origin: Origin,
) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut walk = tree.walk();
    let mut inodes: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    one(&tree.root(), root, contents, origin, &mut found)?;
    names(&tree.root(), root, origin, &mut found)?;
    while let Some((path, entry)) = walk.next() {
        let relative = Path::new(std::ffi::OsStr::from_bytes(&path[1..]));
        let place = root.join(relative);
        let Ok(metadata) = place.symlink_metadata() else {
            found.push(format!("{}: the {origin:?} does not have it", place.display()));
            continue;
        };
        one(&entry.inode, &place, contents, origin, &mut found)?;
        if entry.inode.is_directory() {
            names(&entry.inode, &place, origin, &mut found)?;
        }
        // Names of one inode in the tree must be names of one inode in the directory.
        let known = inodes.entry((metadata.dev(), metadata.ino()));
        let index = *known.or_insert(entry.inode.id().index());
        if index != entry.inode.id().index() {
            found.push(format!("{}: another inode is linked there", place.display()));
        }
    }
    Ok(found)
}

/// Checks that the directory lists exactly the names in the tree.
fn names(
    directory: &Inode<'_>,
    place: &Path,
    origin: Origin,
    found: &mut Vec<String>,
) -> Result<()> {
    let read = std::fs::read_dir(place).with_context(|| format!("cannot list {}", place.display()));
    for entry in read? {
        let name = entry?.file_name();
        if directory.lookup(name.as_bytes()).is_none() {
            found.push(format!("{}: only the {origin:?} has it", place.join(name).display()));
        }
    }
    Ok(())
}

fn one(
    inode: &Inode<'_>,
    place: &Path,
    contents: Contents<'_>,
    origin: Origin,
    found: &mut Vec<String>,
) -> Result<()> {
    let there = place.symlink_metadata()?;
    let here = inode.metadata();
    let mut check = |what: &str, ours: String, theirs: String| {
        if ours != theirs {
            let place = place.display();
            found.push(format!("{place}: {what}: tree {ours}, {origin:?} {theirs}"));
        }
    };
    check("mode", format!("{:o}", inode.mode()), format!("{:o}", there.mode()));
    check("uid", here.uid.to_string(), there.uid().to_string());
    check("gid", here.gid.to_string(), there.gid().to_string());
    let mtime = format!("{}.{:09}", here.mtime.seconds, here.mtime.nanoseconds);
    check("mtime", mtime, format!("{}.{:09}", there.mtime(), there.mtime_nsec()));
    // A merged directory has one link in overlayfs, and file systems count links of directories differently.
    if !inode.is_directory() {
        check("links", inode.nlink().to_string(), there.nlink().to_string());
    }
    check("xattrs", format!("{:?}", tree_xattrs(inode)), format!("{:?}", file_xattrs(place)?));
    match inode.node() {
        Node::Regular(content) => {
            check("size", content.size().to_string(), there.size().to_string());
            let ours = match contents {
                Contents::Compare => Some(digest_of(&content)),
                Contents::Read(digests) => {
                    let digest = digests[inode.id().index()];
                    Some(digest.map_or_else(|| "none".to_owned(), |digest| digest.to_string()))
                }
                Contents::Skip => None,
            };
            if let Some(ours) = ours.filter(|_| there.file_type().is_file()) {
                check("content", ours, digest_at(place)?);
            }
        }
        Node::Symlink(target) => {
            let theirs = std::fs::read_link(place)?;
            check("target", escaped(target), escaped(theirs.as_os_str().as_bytes()));
        }
        Node::CharDevice(number) | Node::BlockDevice(number) => {
            check("device", number.to_string(), there.rdev().to_string());
        }
        Node::Directory | Node::Fifo | Node::Socket => {}
    }
    Ok(())
}

fn escaped(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

fn tree_xattrs(inode: &Inode<'_>) -> BTreeMap<String, String> {
    inode.xattrs().map(|(name, value)| (escaped(name), escaped(value))).collect()
}

fn file_xattrs(place: &Path) -> Result<BTreeMap<String, String>> {
    let mut names = vec![0_u8; 64 << 10];
    let length = rustix::fs::llistxattr(place, &mut names[..])
        .with_context(|| format!("cannot list the xattrs of {}", place.display()))?;
    let mut all = BTreeMap::new();
    let mut value = vec![0_u8; 64 << 10];
    for name in names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let length = rustix::fs::lgetxattr(place, name, &mut value[..])?;
        all.insert(escaped(name), escaped(&value[..length]));
    }
    Ok(all)
}

fn digest_of(content: &Content<'_>) -> String {
    match content {
        Content::Inline(bytes) => image::verity::digest(Algorithm::Sha256, bytes).to_string(),
        Content::External { object: Some(object), .. } => object.to_string(),
        Content::External { object: None, .. } => "unknown".to_owned(),
    }
}

fn digest_at(place: &Path) -> Result<String> {
    let mut file = File::open(place).with_context(|| format!("cannot open {}", place.display()))?;
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finish().to_string()),
            Ok(read) => hasher.update(&buffer[..read]),
            Err(error) => bail!("cannot read {}: {error}", place.display()),
        }
    }
}
