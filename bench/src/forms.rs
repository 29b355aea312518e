//! The forms in which one tree is stored as a file system, and their mounts.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use image::erofs::read::Image;
use kernel::loopdev::{self, Access, LoopBlockSize, LoopOptions};
use kernel::mount::{
    Acl, Credentials, Detached, Durability, ErofsOptions, Ext4Options, Io, OverlayOptions, Reach,
    TmpfsOptions, Upper, Verity, XattrNamespace, bind, erofs, ext4, overlay, tmpfs,
};
use rustix::fs::{Mode, OFlags, mkdirat, openat};
use rustix::mount::{UnmountFlags, unmount};

use crate::Context;
use crate::command::run;

/// A form, with its name in tables.
#[derive(Debug, Clone)]
pub(super) struct Way {
    pub(super) name: String,
    pub(super) source: Source,
}

#[derive(Debug, Clone)]
pub(super) enum Source {
    /// A folder of the host's file system.
    Folder(PathBuf),
    /// A file with an ext4 file system, on a loop device with direct I/O.
    Ext4(PathBuf),
    /// A file with an XFS, likewise.
    Xfs(PathBuf),
    /// The image of a store, mounted by Quire's FUSE server.
    Fuse {
        quire: PathBuf,
        store: PathBuf,
    },
    Erofs(Files),
    /// An image of the form `objects`, and its objects.
    Composefs {
        image: PathBuf,
        objects: PathBuf,
    },
}

/// An EROFS image with its devices and mount settings.
#[derive(Debug, Clone)]
pub(super) struct Files {
    pub(super) image: PathBuf,
    pub(super) devices: Vec<PathBuf>,
    pub(super) io: Io,
    pub(super) acl: Acl,
    pub(super) through: Through,
    /// Read-ahead in kB; none for the kernel's default.
    pub(super) read_ahead: Option<u32>,
}

/// The source of an EROFS mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Through {
    /// The files themselves.
    File,
    /// Loop devices with direct I/O over the files.
    Loop,
    /// Loop devices without direct I/O, so that the files' pages are cached as well.
    BufferedLoop,
}

/// The writable layer on top of the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layer {
    None,
    /// An overlay with an upper directory on a separate tmpfs.
    Tmpfs,
}

impl Files {
    pub(super) fn new(image: &Path, devices: Vec<PathBuf>) -> Self {
        let image = image.to_owned();
        let (io, acl, through) = (Io::Direct, Acl::Keep, Through::File);
        Self { image, devices, io, acl, through, read_ahead: None }
    }

    /// The only image of a store, whose devices are named in its device table.
    pub(super) fn of_store(store: &Path) -> Result<Self> {
        let image = only_image(store)?;
        let bytes = fs::read(&image)?;
        let mut devices = Vec::new();
        for slot in Image::open(&bytes[..])?.devices() {
            let name =
                std::str::from_utf8(&slot.tag).context("a device that Quire did not name")?;
            devices.push(store.join("data").join(name));
        }
        Ok(Self::new(&image, devices))
    }

    fn mount(&self) -> Result<Detached> {
        let paths = std::iter::once(&self.image).chain(&self.devices);
        let mut files = paths.map(File::open).collect::<Result<Vec<_>, _>>()?;
        let mut loops = Vec::new();
        if self.through != Through::File {
            // Any of the images may have blocks of 512 bytes.
            let block_size = LoopBlockSize::B512;
            let direct_io = self.through == Through::Loop;
            let options = LoopOptions { block_size, access: Access::ReadOnly, direct_io };
            for file in &mut files {
                let device = loopdev::attach(file.as_fd(), &options)?;
                *file = File::open(device.path())?;
                loops.push(device);
            }
        }
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(File::as_fd).collect();
        let io = if self.through == Through::File { self.io } else { Io::Buffered };
        let (devices, acl, read_ahead) = (&fds[1..], self.acl, self.read_ahead);
        let mounted = erofs(
            fds[0],
            &ErofsOptions { devices, io, acl, share: None, read_ahead, ..Default::default() },
        )?;
        if mounted.read_ahead != read_ahead {
            bail!("cannot say how far to read ahead: was another EROFS mounted at the same time?");
        }
        if mounted.io != io {
            bail!("this kernel cannot read {} with {io:?}", self.image.display());
        }
        Ok(mounted.mount)
    }
}

impl Way {
    pub(super) fn new(name: impl Into<String>, source: Source) -> Self {
        Self { name: name.into(), source }
    }

    /// Mounts the tree at a folder, which is created.
    pub(super) fn mount(&self, target: &Path, layer: Layer) -> Result<()> {
        fs::create_dir_all(target)?;
        let (lower, objects) = match &self.source {
            Source::Folder(folder) => (bind(File::open(folder)?.as_fd(), Reach::One)?, None),
            Source::Ext4(file) => (mount_ext4(file, Access::ReadOnly)?, None),
            Source::Xfs(file) => (mount_xfs(file, Access::ReadOnly)?, None),
            Source::Fuse { quire, store } => {
                run!(
                    "{quire} --store {store} --quiet mount --via fuse --writable none image {target}"
                )?;
                let mount = bind(File::open(target)?.as_fd(), Reach::One);
                unmount(target, UnmountFlags::DETACH)?;
                (mount?, None)
            }
            Source::Erofs(files) => (files.mount()?, None),
            Source::Composefs { image, objects } => {
                (Files::new(image, Vec::new()).mount()?, Some(File::open(objects)?))
            }
        };
        let attach = |mount: &Detached| mount.attach_at(target).map_err(anyhow::Error::from);
        if layer == Layer::None && objects.is_none() {
            return attach(&lower);
        }
        let data: Vec<_> = objects.iter().map(File::as_fd).collect();
        let tmpfs = match layer {
            Layer::None => None,
            Layer::Tmpfs => Some(upper_folders()?),
        };
        let upper = tmpfs.as_ref().map(|(_, [upper, work])| Upper {
            upper: upper.as_fd(),
            work: work.as_fd(),
            durability: Durability::Durable,
        });
        let mount = overlay(&OverlayOptions {
            name: "bench",
            lower: &[lower.as_fd()],
            data: &data,
            upper,
            verity: Verity::Off,
            xattrs: XattrNamespace::Trusted,
            credentials: Credentials::Mounter,
        })?;
        attach(&mount)
    }
}

/// `upper` and `work` on a detached tmpfs, which overlayfs accepts since Linux 6.15 while the tmpfs is held open.
fn upper_folders() -> Result<(Detached, [File; 2])> {
    let options = TmpfsOptions { name: "bench", bytes: None, inodes: None, mode: 0o755 };
    let tmpfs = tmpfs(&options)?;
    let folder = |name: &str| -> Result<File> {
        mkdirat(tmpfs.as_fd(), name, Mode::from_raw_mode(0o755))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(tmpfs.as_fd(), name, flags, Mode::empty())?.into())
    };
    let folders = [folder("upper")?, folder("work")?];
    Ok((tmpfs, folders))
}

pub(super) fn mount_ext4(file: &Path, access: Access) -> Result<Detached> {
    let is_writable = access == Access::ReadWrite;
    let file = File::options().read(true).write(is_writable).open(file)?;
    let durability = Durability::Durable;
    let options = Ext4Options { durability, direct_io: true, access };
    Ok(ext4(file.as_fd(), &options)?)
}

/// Mounts a file with an XFS, on a loop device with direct I/O.
fn mount_xfs(file: &Path, access: Access) -> Result<Detached> {
    let file = File::options().read(true).write(access == Access::ReadWrite).open(file)?;
    let options = LoopOptions { block_size: LoopBlockSize::B512, access, direct_io: true };
    let device = loopdev::attach(file.as_fd(), &options)?;
    let point = tempfile::tempdir()?;
    let how = if access == Access::ReadWrite { "rw" } else { "ro" };
    let (device, at) = (device.path(), point.path());
    run!("mount -t xfs -o {how} {device} {at}")?;
    let mount = bind(File::open(at)?.as_fd(), Reach::One);
    unmount(at, UnmountFlags::DETACH)?;
    Ok(mount?)
}

/// Creates an ext4 in a sparse file; `fill` is called while it is mounted at `target`.
pub(super) fn make_ext4(
    file: &Path,
    target: &Path,
    bytes: u64,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    File::create(file)?.set_len(bytes)?;
    run!("mkfs.ext4 -q -F -m 0 {file}")?;
    filled(mount_ext4(file, Access::ReadWrite)?, target, |target| {
        fs::remove_dir(target.join("lost+found"))?;
        fill(target)
    })
}

/// Creates an XFS in a sparse file; `fill` is called while it is mounted at `target`.
pub(super) fn make_xfs(
    file: &Path,
    target: &Path,
    bytes: u64,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    File::create(file)?.set_len(bytes)?;
    run!("mkfs.xfs -q {file}")?;
    filled(mount_xfs(file, Access::ReadWrite)?, target, fill)
}

/// Calls `fill` while a new file system is mounted at `target`.
fn filled(mount: Detached, target: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    fs::create_dir_all(target)?;
    mount.attach_at(target)?;
    drop(mount);
    let filled = fill(target);
    unmount(target, UnmountFlags::empty()).context("cannot unmount the new file system")?;
    filled
}

/// Imports a source in the forms `objects`, `packed` and `tar`, each into a separate store.
pub(super) fn import(context: &Context<'_>, source: &str) -> Result<[PathBuf; 3]> {
    let [objects, packed, tar] =
        ["objects", "packed", "tar"].map(|form| import_form(context, source, form));
    Ok([objects?, packed?, tar?])
}

/// Imports a source in this form into a separate store.
pub(super) fn import_form(context: &Context<'_>, source: &str, form: &str) -> Result<PathBuf> {
    let (quire, store) = (context.quire, context.work.join(format!("store-{form}")));
    run!("{quire} --store {store} import --form {form} {source} image")?;
    Ok(store)
}

/// Imports the layout's image under the name `image` into a store.
pub(super) fn import_layout(context: &Context<'_>, layout: &Path) -> Result<PathBuf> {
    let (quire, store) = (context.quire, context.work.join("store"));
    run!("{quire} --store {store} import oci:{layout}:latest image")?;
    Ok(store)
}

/// Exports a store's image as one self-contained file.
pub(super) fn export(context: &Context<'_>, store: &Path, file: &Path) -> Result<()> {
    let quire = context.quire;
    run!("{quire} --store {store} export image erofs:{file}").map(drop)
}

pub(super) fn only_image(store: &Path) -> Result<PathBuf> {
    let images = fs::read_dir(store.join("images"))?.collect::<Result<Vec<_>, _>>()?;
    match &images[..] {
        [image] => Ok(image.path()),
        images => bail!("{} has {} images", store.display(), images.len()),
    }
}
