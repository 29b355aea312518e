//! EROFS images, straight from a file where the kernel can, through a loop device where it cannot.

use std::fmt;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, MountError, Step};
use crate::loopdev::{self, Access, LoopBlockSize, LoopDevice, LoopOptions};
use crate::object::{name_of, proc_path};

/// How to mount an EROFS image.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErofsOptions<'a> {
    /// The image's blob devices, in the order of its device table, each open for reading. Number
    /// and sizes are the caller's to check: the kernel reads a truncated one as zeros, and with
    /// none at all takes them for parts of the image.
    pub devices: &'a [BorrowedFd<'a>],
    /// How file data is read.
    pub io: Io,
    /// Whether POSIX ACLs in the image are obeyed.
    pub acl: Acl,
}

/// How a file-backed EROFS reads file data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// Past the page cache of the image file, so that data is in memory once. Kernels that cannot
    /// are asked for `Buffered`.
    #[default]
    Direct,
    /// Through the page cache of the image file: data is in memory twice.
    Buffered,
}

/// Whether POSIX ACLs in an image are obeyed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Acl {
    /// As the kernel does by default: yes.
    #[default]
    Keep,
    /// No. The kernel then need not look for them, which saves time on images without any.
    Ignore,
}

/// What an EROFS superblock reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The image file itself.
    File,
    /// A loop device over it, that goes when the mount goes.
    Loop,
}

/// A mounted image.
#[derive(Debug)]
pub struct Erofs {
    /// The mount, attached nowhere.
    pub mount: Detached,
    /// What it reads from.
    pub backing: Backing,
    /// How it reads file data: what was asked for, or what this kernel could do.
    pub io: Io,
}

/// Mounts an image from a descriptor open for reading, read-only and attached nowhere.
///
/// The kernel keeps the image and its devices open for as long as the mount lives, and reads them
/// with the credentials of the caller. A loop device is the answer to `ENOTBLK`: kernels before
/// 6.12, and files on tmpfs or overlayfs. `mountinfo` shows `/proc/self/fd/N` or `/dev/loopN` as
/// the source, since the kernel opens what it shows.
///
/// # Errors
/// The kernel's answer to the step that failed, with what EROFS said about it.
pub fn erofs(image: BorrowedFd<'_>, options: &ErofsOptions<'_>) -> Result<Erofs, MountError> {
    let object = Image(image);
    let devices: Vec<String> = options.devices.iter().map(|&fd| proc_path(fd)).collect();
    match superblock(&object, &proc_path(image), &devices, options.acl, options.io) {
        Ok((mount, io)) => Ok(Erofs { mount, backing: Backing::File, io }),
        Err(error) if error.errno() == Some(Errno::NOTBLK) => {
            let mount = over_loop(&object, options)?;
            Ok(Erofs { mount, backing: Backing::Loop, io: options.io })
        }
        Err(error) => Err(error),
    }
}

/// The image in messages; its path is only looked up when there is something to say.
struct Image<'a>(BorrowedFd<'a>);

impl fmt::Display for Image<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "erofs image {}", name_of(self.0))
    }
}

fn superblock(
    object: &Image<'_>,
    source: &str,
    devices: &[String],
    acl: Acl,
    io: Io,
) -> Result<(Detached, Io), MountError> {
    let context = Context::open("erofs", object)?;
    context.string("source", source)?;
    context.flag("ro")?;
    for device in devices {
        context.string("device", device)?;
    }
    if acl == Acl::Ignore {
        context.flag("noacl")?;
    }
    let io = match io {
        // An unknown option is EINVAL, and leaves the context as it was.
        Io::Direct => context.flag("directio").map_or(Io::Buffered, |()| Io::Direct),
        Io::Buffered => Io::Buffered,
    };
    context.create()?;
    Ok((context.mount(MountAttrFlags::MOUNT_ATTR_RDONLY)?, io))
}

fn over_loop(object: &Image<'_>, options: &ErofsOptions<'_>) -> Result<Detached, MountError> {
    let loop_options = LoopOptions {
        block_size: block_size(object)?,
        access: Access::ReadOnly,
        direct_io: options.io == Io::Direct,
    };
    let attach = |fd| {
        loopdev::attach(fd, &loop_options)
            .map_err(|source| MountError::Loop { object: Image(fd).to_string(), source })
    };
    let primary = attach(object.0)?;
    let devices: Vec<LoopDevice> =
        options.devices.iter().map(|&fd| attach(fd)).collect::<Result<_, _>>()?;
    let device_paths: Vec<String> = devices.iter().map(LoopDevice::path).collect();
    // Once mounted, the superblock keeps the loop devices; without it they go with their fds.
    superblock(object, &primary.path(), &device_paths, options.acl, Io::Buffered)
        .map(|(mount, _)| mount)
}

/// The loop block size may not exceed the image's. Whether it *is* an image is the kernel's to say.
fn block_size(object: &Image<'_>) -> Result<LoopBlockSize, MountError> {
    // Superblock at 1024, `blkszbits` at 12 (fs/erofs/erofs_fs.h).
    const BLOCK_BITS_AT: u64 = 1024 + 12;
    let mut bits = [0];
    rustix::io::pread(object.0, &mut bits, BLOCK_BITS_AT)
        .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
    Ok(if bits[0] >= 12 { LoopBlockSize::B4096 } else { LoopBlockSize::B512 })
}
