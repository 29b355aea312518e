//! Mounts EROFS images: directly from a file if the kernel can, otherwise through a loop device.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::backing::with_read_ahead;
use super::context::Context;
use super::source::NamedSource;
use super::{Detached, MountError, Step};
use crate::fd_name::{name_of, proc_path};
use crate::files;
use crate::loopdev::{self, Access, LoopBlockSize, LoopDevice, LoopOptions};

/// Options of [`erofs`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ErofsOptions<'a> {
    /// Blob devices of the image in the order of its device table, each open for reading. The caller must check their
    /// number and sizes: the kernel reads a truncated device as zeros, and without any devices, it reads their data
    /// from the image file.
    pub devices: &'a [BorrowedFd<'a>],
    /// Whether the kernel reads the image file directly or through loop devices.
    pub backing: Backing,
    pub io: Io,
    /// Whether the kernel enforces POSIX ACLs in the image.
    pub acl: Acl,
    /// Domain of mounts with which pages of equal files are shared. Kernels that do not support this (before 7.0, or
    /// built without it) mount without sharing; [`Erofs::sharing`] has the result.
    pub share: Option<Domain<'a>>,
    /// Read-ahead in KiB, for sequential reads and around the touched pages of mapped files. The kernel's default is
    /// 128 for an EROFS that reads from files, regardless of the disk. The default stays if the caller may not write
    /// to `/sys`.
    pub read_ahead: Option<u32>,
    /// Source in `mountinfo`: a relative path without `..`. With `None` or another text, the path that the kernel
    /// opens.
    pub source: Option<&'a str>,
}

/// A domain of mounts that share pages: files with the same fingerprint are in memory once.
///
/// The kernel trusts the fingerprints in an image. So a user who determines one image of a domain can replace the
/// content of files in all mounts of the domain. So all images of a domain must be equally trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain<'a>(pub &'a str);

/// Whether the pages of an image's files are shared with those of other mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Shared within the domain, for files that have fingerprints.
    Domain,
    /// Pages are not shared, because sharing is not requested or not supported, or because the image has no
    /// fingerprints.
    Alone,
}

/// How a file-backed EROFS reads file data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// Bypasses the page cache of the image file, so that data is in memory once. `Buffered` is used instead if the
    /// kernel lacks this mode. It is also used if direct I/O of the file system needs units that are larger than the
    /// image's blocks (for example on disks with sectors of 4096 bytes, if the image has blocks of 512 bytes), because
    /// EROFS would return `EIO`.
    #[default]
    Direct,
    /// Reads go through the page cache of the image file, so that data is in memory twice.
    Buffered,
}

/// Whether the kernel enforces POSIX ACLs in an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Acl {
    /// The kernel enforces ACLs, which is the default.
    #[default]
    Keep,
    /// The kernel ignores ACLs. Then it does not look for them, which saves time on images without ACLs.
    Ignore,
}

/// The source of an EROFS superblock's reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// The image file itself. Files of the mount cannot be opened with `O_DIRECT`.
    #[default]
    File,
    /// A loop device for the image and for each of its devices, which are detached with the mount. Files of the mount
    /// can be opened with `O_DIRECT`.
    Loop,
}

#[derive(Debug)]
pub struct Erofs {
    /// The detached mount.
    pub mount: Detached,
    /// The source of its reads.
    pub backing: Backing,
    /// Whether its reads bypass the page cache: as requested, or as far as this kernel can.
    pub io: Io,
    /// Whether pages are shared: as requested, or as far as this kernel can.
    pub sharing: Sharing,
    /// Read-ahead in KiB, if it was set.
    pub read_ahead: Option<u32>,
}

/// Mounts an image read-only and detached, from a descriptor that is open for reading.
///
/// The kernel keeps the image and its devices open for as long as the mount lives, and reads them with the credentials
/// of the caller. A loop device is used if it is requested, or if the mount fails with `ENOTBLK` (in kernels before
/// 6.12, and for files on tmpfs or overlayfs). The source in `mountinfo` is the path that the kernel opens,
/// `/proc/self/fd/N` or `/dev/loopN`, unless [`ErofsOptions::source`] names it.
///
/// # Errors
/// The error of the step that failed, with the messages of EROFS.
pub fn erofs(image: BorrowedFd<'_>, options: &ErofsOptions<'_>) -> Result<Erofs, MountError> {
    let object = Image(image);
    if options.backing == Backing::Loop {
        return over_loop(&object, options);
    }
    let devices: Vec<String> = options.devices.iter().map(|&fd| proc_path(fd)).collect();
    match superblock(&object, &proc_path(image), &devices, options) {
        Err(error) if error.errno() == Some(Errno::NOTBLK) => over_loop(&object, options),
        result => result,
    }
}

/// Formats the image for messages. The path is looked up only when a message is formatted.
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
    options: &ErofsOptions<'_>,
) -> Result<Erofs, MountError> {
    let context = Context::open("erofs", object)?;
    let named = options.source.map(|name| Ok((name, NamedSource::new(name, source)?)));
    let named = named.transpose()?.and_then(|(name, named)| Some((name, named?)));
    context.string("source", named.as_ref().map_or(source, |(name, _)| name))?;
    context.flag("ro")?;
    for device in devices {
        context.string("device", device)?;
    }
    if options.acl == Acl::Ignore {
        context.flag("noacl")?;
    }
    let io = match options.io {
        // For an unknown option the kernel returns EINVAL and leaves the context unchanged.
        Io::Direct if reads_blocks(object, options.devices)? => {
            context.flag("directio").map_or(Io::Buffered, |()| Io::Direct)
        }
        Io::Direct | Io::Buffered => Io::Buffered,
    };
    let sharing = match options.share {
        Some(domain) if has_fingerprints(object)? => share(&context, domain)?,
        _ => Sharing::Alone,
    };
    let create = || match &named {
        Some((_, directory)) => context.create_in(directory.as_fd()),
        None => context.create(),
    };
    let read_ahead = match options.read_ahead {
        Some(kilobytes) => {
            let ((), is_done) = with_read_ahead("erofs-", kilobytes, create)?;
            is_done.then_some(kilobytes)
        }
        None => {
            create()?;
            None
        }
    };
    let mount = context.mount(MountAttrFlags::MOUNT_ATTR_RDONLY)?;
    Ok(Erofs { mount, backing: Backing::File, io, sharing, read_ahead })
}

/// Tests whether this kernel shares pages, with a context that never gets an image.
pub(crate) fn try_sharing() -> Result<Sharing, MountError> {
    share(&Context::open("erofs", &"erofs")?, Domain("quire-probe"))
}

fn share(context: &Context<'_>, domain: Domain<'_>) -> Result<Sharing, MountError> {
    // Kernels before 7.0 reject the option. Later kernels without the feature accept it and only log a message.
    match context.flag("inode_share") {
        Ok(()) if context.said("inode_share") => return Ok(Sharing::Alone),
        Ok(()) => {}
        Err(error) if error.errno() == Some(Errno::INVAL) => return Ok(Sharing::Alone),
        Err(error) => return Err(error),
    }
    context.string("domain_id", domain.0)?;
    Ok(Sharing::Domain)
}

fn over_loop(object: &Image<'_>, options: &ErofsOptions<'_>) -> Result<Erofs, MountError> {
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
    // Buffered, because the loop device itself bypasses the cache.
    let buffered = ErofsOptions { io: Io::Buffered, read_ahead: None, ..*options };
    // Once mounted, the superblock keeps the loop devices. If the mount fails, they are detached when the descriptors
    // close.
    let erofs = superblock(object, &primary.path(), &device_paths, &buffered)?;
    Ok(Erofs { backing: Backing::Loop, io: options.io, ..erofs })
}

/// Whether the superblock declares fingerprints. Without them, the kernel shares nothing and only logs a message.
fn has_fingerprints(object: &Image<'_>) -> Result<bool, MountError> {
    // The superblock is at byte 1024, and `feature_compat` at byte 8 of the superblock;
    // EROFS_FEATURE_COMPAT_ISHARE_XATTRS (fs/erofs/erofs_fs.h).
    const FEATURES_AT: u64 = 1024 + 8;
    const ISHARE_XATTRS: u8 = 0x20;
    let mut low = [0];
    rustix::io::pread(object.0, &mut low, FEATURES_AT)
        .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
    Ok(low[0] & ISHARE_XATTRS != 0)
}

/// Whether direct I/O can read every block of an image and its devices.
fn reads_blocks(object: &Image<'_>, devices: &[BorrowedFd<'_>]) -> Result<bool, MountError> {
    let bits = block_bits(object)?;
    let block = 1_u32.checked_shl(bits.into()).unwrap_or(u32::MAX);
    for &file in [object.0].iter().chain(devices) {
        let unit = files::direct_io_unit(file)
            .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
        // If the unit is unknown, 4096 is assumed, which suits all disks and file systems.
        let unit = unit.unwrap_or(4096);
        // 0 means no direct I/O.
        if unit == 0 || !block.is_multiple_of(unit) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns a block size for loop devices, which must not exceed that of the image.
fn block_size(object: &Image<'_>) -> Result<LoopBlockSize, MountError> {
    let bits = block_bits(object)?;
    Ok(if bits >= 12 { LoopBlockSize::B4096 } else { LoopBlockSize::B512 })
}

/// Reads the image's `blkszbits`. The kernel checks whether the file is an image.
fn block_bits(object: &Image<'_>) -> Result<u8, MountError> {
    // The superblock is at byte 1024, and `blkszbits` at byte 12 of the superblock (fs/erofs/erofs_fs.h).
    const BLOCK_BITS_AT: u64 = 1024 + 12;
    let mut bits = [0];
    rustix::io::pread(object.0, &mut bits, BLOCK_BITS_AT)
        .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
    Ok(bits[0])
}
