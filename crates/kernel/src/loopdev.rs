//! Loop devices: present a file as a block device, for kernels and file systems that need one.
#![expect(unsafe_code, reason = "rustix has no loop device ioctls")]

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter};

use crate::fd_name::name_of;

/// Options of [`attach`].
#[derive(Clone, Copy, Debug)]
pub struct LoopOptions {
    pub block_size: LoopBlockSize,
    pub access: Access,
    /// Whether the device bypasses the page cache of the file, so that data is in memory once. The kernel ignores this
    /// without an error if the file system does not support this.
    pub direct_io: bool,
}

/// A logical block size that every kernel accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopBlockSize {
    B512,
    B4096,
}

/// The access mode of a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device is read-only. The file must be open for reading.
    ReadOnly,
    /// The device is writable. The file must be open for reading and writing.
    ReadWrite,
}

/// An attached loop device. The kernel detaches it when its last user is gone: this descriptor, or a file system
/// mounted from the device.
#[derive(Debug)]
pub struct LoopDevice {
    fd: OwnedFd,
    number: u32,
}

impl LoopDevice {
    /// Returns the path of its device node.
    #[must_use]
    pub fn path(&self) -> String {
        node(self.number)
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The error of attaching a loop device.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The driver or the device node is missing, or the caller has no permission.
    #[error("cannot open {node}")]
    Open { node: String, source: Errno },
    /// The driver has no free device.
    #[error("cannot find a free loop device")]
    Free { source: Errno },
    /// The driver refused to attach the file.
    #[error("cannot attach {file} to {node}")]
    Attach {
        file: String,
        node: String,
        /// `ENOTTY` or `EINVAL` before Linux 5.8.
        source: Errno,
    },
    /// Other processes took each free device first.
    #[error("cannot attach {file}: other processes took each of {tries} free loop devices first")]
    Contended {
        file: String,
        /// Number of attempts.
        tries: u32,
    },
}

impl LoopError {
    /// Returns the errno of the failed system call, if one failed.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Open { source, .. } | Self::Free { source } | Self::Attach { source, .. } => {
                Some(*source)
            }
            Self::Contended { .. } => None,
        }
    }
}

const CONTROL: &str = "/dev/loop-control";
/// Number of attempts, because any process may take a free device before this one does.
const TRIES: u32 = 64;

/// Attaches a file to a free loop device. The device keeps the file open.
pub fn attach(file: BorrowedFd<'_>, options: &LoopOptions) -> Result<LoopDevice, LoopError> {
    let control = open(CONTROL, OFlags::RDWR)?;
    let access = match options.access {
        Access::ReadOnly => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
    };
    for _ in 0..TRIES {
        // SAFETY: LOOP_CTL_GET_FREE takes no argument and returns a number.
        let number = unsafe { rustix::ioctl::ioctl(&control, GetFree) }
            .map_err(|source| LoopError::Free { source })?;
        let device = LoopDevice { fd: open(&node(number), access)?, number };
        // SAFETY: LOOP_CONFIGURE takes exactly this struct (size asserted below).
        let configure = unsafe { Setter::<LOOP_CONFIGURE, Config>::new(config(file, options)) };
        // SAFETY: the device only reads the argument, which lives through the call.
        match unsafe { rustix::ioctl::ioctl(&device, configure) } {
            Ok(()) => return Ok(device),
            Err(Errno::BUSY) => {}
            Err(source) => {
                return Err(LoopError::Attach { file: name_of(file), node: device.path(), source });
            }
        }
    }
    Err(LoopError::Contended { file: name_of(file), tries: TRIES })
}

/// Tests whether this process can attach a loop device: the driver must have a free device, and the process must be
/// able to open its node. In a container the device nodes may be missing.
///
/// # Errors
/// The step that failed.
pub fn probe() -> Result<(), LoopError> {
    let control = open(CONTROL, OFlags::RDWR)?;
    // SAFETY: as in `attach`.
    let number = unsafe { rustix::ioctl::ioctl(&control, GetFree) }
        .map_err(|source| LoopError::Free { source })?;
    // The open is read-only, because closing a writable descriptor would cause a uevent.
    open(&node(number), OFlags::RDONLY).map(drop)
}

fn node(number: u32) -> String {
    format!("/dev/loop{number}")
}

fn open(node: &str, access: OFlags) -> Result<OwnedFd, LoopError> {
    rustix::fs::open(node, access | OFlags::CLOEXEC, Mode::empty())
        .map_err(|source| LoopError::Open { node: node.to_owned(), source })
}

fn config(file: BorrowedFd<'_>, options: &LoopOptions) -> Config {
    let mut flags = LO_FLAGS_AUTOCLEAR;
    if options.access == Access::ReadOnly {
        flags |= LO_FLAGS_READ_ONLY;
    }
    if options.direct_io {
        flags |= LO_FLAGS_DIRECT_IO;
    }
    Config {
        fd: file.as_raw_fd().unsigned_abs(),
        block_size: match options.block_size {
            LoopBlockSize::B512 => 512,
            LoopBlockSize::B4096 => 4096,
        },
        info: Info { flags, ..Info::ZERO },
        reserved: [0; 8],
    }
}

// Source: Linux include/uapi/linux/loop.h.
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<Config>() == 304);

/// `struct loop_info64`.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}
const _: () = assert!(size_of::<Info>() == 232);

impl Info {
    const ZERO: Self = Self {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
}

/// `LOOP_CTL_GET_FREE`, which returns the number of a free device. Another process may take that device first.
struct GetFree;

// SAFETY: the ioctl takes no argument, writes to no memory and returns a device number.
unsafe impl Ioctl for GetFree {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(number: IoctlOutput, _: *mut c_void) -> rustix::io::Result<u32> {
        u32::try_from(number).map_err(|_negative| Errno::INVAL)
    }
}
