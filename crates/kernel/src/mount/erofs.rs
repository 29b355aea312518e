//! EROFS images, straight from a file where the kernel can, through a loop device where it cannot.

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

/// How to mount an EROFS image.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErofsOptions<'a> {
    /// The image's blob devices, in the order of its device table, each open for reading. Number
    /// and sizes are the caller's to check: the kernel reads a truncated one as zeros, and with
    /// none at all takes them for parts of the image.
    pub devices: &'a [BorrowedFd<'a>],
    /// Source of the kernel's reads: a file, where it can, or always loop devices.
    pub backing: Backing,
    /// How file data is read.
    pub io: Io,
    /// Whether POSIX ACLs in the image are obeyed.
    pub acl: Acl,
    /// With which other mounts the pages of equal files are shared. Kernels that cannot (before
    /// 7.0, or built without) mount without; [`Erofs::sharing`] says what came of it.
    pub share: Option<Domain<'a>>,
    /// Read-ahead in KiB, for sequential reads and around the touched pages of mapped files. The kernel's default is
    /// 128 for an EROFS that reads from files, whatever the disk below has. It is a wish: a caller who may not write to
    /// `/sys` gets the default.
    pub read_ahead: Option<u32>,
    /// Source in `mountinfo`: a relative path without `..`. With `None` or another text it is the path that the kernel opens.
    pub source: Option<&'a str>,
}

/// Domain of mounts that share pages: files with the same fingerprint are in memory once.
///
/// The kernel trusts the fingerprints in an image. A user who chooses one image of a domain can put other content into
/// files of all its mounts. So all images of a domain must be equally trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain<'a>(pub &'a str);

/// Whether the pages of an image's files are shared with those of other mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// With all of the domain, for files that have fingerprints.
    Domain,
    /// Not shared: not asked for, not supported by the kernel, or the image has no fingerprints.
    Alone,
}

/// How a file-backed EROFS reads file data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// Past the page cache of the image file, so that data is in memory once. Kernels that cannot
    /// are asked for `Buffered`, and all where a file system reads past its cache in larger pieces only
    /// than the image's blocks: EROFS would answer `EIO` (on disks with sectors of 4096 bytes, and blocks of 512).
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

/// Source of an EROFS superblock's reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// The image file itself. Its files cannot be read with `O_DIRECT`.
    #[default]
    File,
    /// The image file itself, or an error. Reads of a loop device are not those of the file below: events of that tell of
    /// none of them.
    FileOnly,
    /// A loop device over it, that goes when the mount goes, and one over each of its devices. Their files can be.
    Loop,
}

/// A mounted image.
#[derive(Debug)]
pub struct Erofs {
    /// The mount, attached nowhere.
    pub mount: Detached,
    /// Source of its reads.
    pub backing: Backing,
    /// How it reads file data: as asked for, or as this kernel can.
    pub io: Io,
    /// Whether pages are shared: as asked for, or as this kernel can.
    pub sharing: Sharing,
    /// How many KiB are read ahead, if that could be said.
    pub read_ahead: Option<u32>,
}

/// Mounts an image from a descriptor open for reading, read-only and attached nowhere.
///
/// The kernel keeps the image and its devices open for as long as the mount lives, and reads them with the credentials
/// of the caller. A loop device is used after `ENOTBLK` (kernels before 6.12, and files on tmpfs or overlayfs), or if
/// it is asked for. The kernel opens the source that `mountinfo` shows: `/proc/self/fd/N` or `/dev/loopN`, unless
/// [`ErofsOptions::source`] names it.
///
/// # Errors
/// The kernel's error in the step that failed, with the messages of EROFS.
pub fn erofs(image: BorrowedFd<'_>, options: &ErofsOptions<'_>) -> Result<Erofs, MountError> {
    let object = Image(image);
    if options.backing == Backing::Loop {
        return over_loop(&object, options);
    }
    let devices: Vec<String> = options.devices.iter().map(|&fd| proc_path(fd)).collect();
    match superblock(&object, &proc_path(image), &devices, options) {
        Err(error)
            if error.errno() == Some(Errno::NOTBLK) && options.backing != Backing::FileOnly =>
        {
            over_loop(&object, options)
        }
        result => result,
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
        // An unknown option is EINVAL, and leaves the context as it was.
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

/// Whether this kernel would share pages, by asking for it on behalf of no image.
pub(crate) fn try_sharing() -> Result<Sharing, MountError> {
    share(&Context::open("erofs", &"erofs")?, Domain("quire-probe"))
}

fn share(context: &Context<'_>, domain: Domain<'_>) -> Result<Sharing, MountError> {
    // Kernels before 7.0 do not know it. Later ones that were built without only say so in the log.
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
    // It is the loop device that reads past the cache.
    let buffered = ErofsOptions { io: Io::Buffered, read_ahead: None, ..*options };
    // Once mounted, the superblock keeps the loop devices; without it they go with their fds.
    let erofs = superblock(object, &primary.path(), &device_paths, &buffered)?;
    Ok(Erofs { backing: Backing::Loop, io: options.io, ..erofs })
}

/// Whether the superblock says that files have fingerprints: without, the kernel shares nothing and tells only its log.
fn has_fingerprints(object: &Image<'_>) -> Result<bool, MountError> {
    // Superblock at 1024, `feature_compat` at 8; EROFS_FEATURE_COMPAT_ISHARE_XATTRS (fs/erofs/erofs_fs.h).
    const FEATURES_AT: u64 = 1024 + 8;
    const ISHARE_XATTRS: u8 = 0x20;
    let mut low = [0];
    rustix::io::pread(object.0, &mut low, FEATURES_AT)
        .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
    Ok(low[0] & ISHARE_XATTRS != 0)
}

/// Whether every block of an image and its devices can be read past the page cache.
fn reads_blocks(object: &Image<'_>, devices: &[BorrowedFd<'_>]) -> Result<bool, MountError> {
    let bits = block_bits(object)?;
    let block = 1_u32.checked_shl(bits.into()).unwrap_or(u32::MAX);
    for &file in [object.0].iter().chain(devices) {
        let unit = files::direct_io_unit(file)
            .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
        // What nobody knows: disks and file systems have 4096 in common.
        let unit = unit.unwrap_or(4096);
        // 0: it cannot be read so at all.
        if unit == 0 || !block.is_multiple_of(unit) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The loop block size may not exceed the image's.
fn block_size(object: &Image<'_>) -> Result<LoopBlockSize, MountError> {
    let bits = block_bits(object)?;
    Ok(if bits >= 12 { LoopBlockSize::B4096 } else { LoopBlockSize::B512 })
}

/// The image's `blkszbits`. Whether it *is* an image is the kernel's to say.
fn block_bits(object: &Image<'_>) -> Result<u8, MountError> {
    // Superblock at 1024, `blkszbits` at 12 (fs/erofs/erofs_fs.h).
    const BLOCK_BITS_AT: u64 = 1024 + 12;
    let mut bits = [0];
    rustix::io::pread(object.0, &mut bits, BLOCK_BITS_AT)
        .map_err(|errno| MountError::call(Step::Examine, object, errno))?;
    Ok(bits[0])
}
