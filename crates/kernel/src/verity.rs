//! fs-verity: the kernel checks every block that it reads against one digest of the whole file.
#![expect(unsafe_code, reason = "rustix has no fs-verity ioctls")]

use std::os::fd::BorrowedFd;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, opcode};

use crate::fd_name::name_of;

/// The hash algorithm of a fs-verity digest. Blocks always have 4096 bytes and no salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256, with digests of 32 bytes.
    Sha256,
    /// SHA-512, with digests of 64 bytes.
    Sha512,
}

/// Outcome of [`enable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enabled {
    /// The call turned fs-verity on.
    Now,
    /// fs-verity was already on, perhaps with another algorithm, which [`measure`] returns.
    Before,
}

/// A fs-verity digest that the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    Sha256([u8; 32]),
    Sha512([u8; 64]),
}

/// The error of turning fs-verity on or of reading a digest.
#[derive(Debug, thiserror::Error)]
pub enum VerityError {
    /// The kernel or the type of file system does not support fs-verity.
    #[error("this kernel does not support fs-verity on the file system of {file}")]
    NoKernelSupport { file: String, source: Errno },
    /// The file system supports fs-verity but was made without it (`mkfs.ext4 -O verity`, `tune2fs -O verity`).
    #[error("fs-verity is not turned on in the file system of {file}")]
    NotEnabled { file: String, source: Errno },
    /// A process, perhaps this one, has the file open for writing.
    #[error("cannot turn on fs-verity for {file} while it is open for writing")]
    OpenForWriting { file: String, source: Errno },
    /// The kernel supports fs-verity, but not with this hash algorithm, because a module is missing.
    #[error("this kernel does not support {algorithm:?} for the fs-verity digest of {file}")]
    NoAlgorithm { file: String, algorithm: Algorithm, source: Errno },
    /// The file's digest uses an algorithm that Quire does not use.
    #[error("{file} has an fs-verity digest of algorithm {number}, which Quire does not support")]
    UnknownAlgorithm {
        file: String,
        /// The kernel's number of the algorithm.
        number: u16,
    },
    /// Another error of the kernel.
    #[error("cannot {action} fs-verity of {file}")]
    Call {
        /// "turn on" or "measure".
        action: &'static str,
        file: String,
        source: Errno,
    },
}

impl VerityError {
    /// Whether this file system on this kernel can never use fs-verity, so that a store may do without.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(
            self,
            Self::NoKernelSupport { .. } | Self::NotEnabled { .. } | Self::NoAlgorithm { .. }
        )
    }
}

/// Turns fs-verity on: the kernel reads the file once and builds its hash tree. The descriptor must be open for
/// reading only, and no process may have the file open for writing.
///
/// The kernel requires write permission. If the owner is not root and lacks it, this function adds it for a moment.
///
/// # Errors
/// [`VerityError`]; the file is then unchanged.
pub fn enable(file: BorrowedFd<'_>, algorithm: Algorithm) -> Result<Enabled, VerityError> {
    let mut enabled = turn_on(file, algorithm);
    if enabled == Err(Errno::ACCESS)
        && let Ok(mode) = rustix::fs::fstat(file).map(|it| Mode::from_raw_mode(it.st_mode))
        && rustix::fs::fchmod(file, mode | Mode::WUSR).is_ok()
    {
        enabled = turn_on(file, algorithm);
        enabled = enabled.and(rustix::fs::fchmod(file, mode));
    }
    match enabled {
        Ok(()) => Ok(Enabled::Now),
        Err(Errno::EXIST) => Ok(Enabled::Before),
        Err(source @ Errno::NOPKG) => {
            Err(VerityError::NoAlgorithm { file: name_of(file), algorithm, source })
        }
        Err(source) => Err(failed(file, "turn on", source)),
    }
}

fn turn_on(file: BorrowedFd<'_>, algorithm: Algorithm) -> Result<(), Errno> {
    let argument = EnableArgument {
        version: 1,
        hash_algorithm: match algorithm {
            Algorithm::Sha256 => HASH_SHA256,
            Algorithm::Sha512 => HASH_SHA512,
        }
        .into(),
        block_size: BLOCK_SIZE,
        ..EnableArgument::ZERO
    };
    // SAFETY: FS_IOC_ENABLE_VERITY takes exactly this struct (size asserted below).
    let enable = unsafe { Setter::<ENABLE_VERITY, EnableArgument>::new(argument) };
    // SAFETY: the file system only reads the argument; its salt and signature pointers are null.
    unsafe { rustix::ioctl::ioctl(file, enable) }
}

/// Returns the digest that the kernel enforces for a file. `None` if fs-verity is off for the file.
///
/// # Errors
/// [`VerityError::NoKernelSupport`] or [`VerityError::NotEnabled`] if the file cannot have a digest.
pub fn measure(file: BorrowedFd<'_>) -> Result<Option<Measured>, VerityError> {
    let mut digest = Digest { algorithm: 0, size: 64, bytes: [0; 64] };
    // SAFETY: FS_IOC_MEASURE_VERITY writes a header and at most `size` bytes, for which the struct has room.
    let measure = unsafe { Updater::<MEASURE_VERITY, Digest>::new(&mut digest) };
    // SAFETY: the argument lives through the call.
    match unsafe { rustix::ioctl::ioctl(file, measure) } {
        Ok(()) => {}
        Err(Errno::NODATA) => return Ok(None),
        Err(source) => return Err(failed(file, "measure", source)),
    }
    match (digest.algorithm, digest.size, digest.bytes.first_chunk()) {
        (HASH_SHA256, 32, Some(first)) => Ok(Some(Measured::Sha256(*first))),
        (HASH_SHA512, 64, _) => Ok(Some(Measured::Sha512(digest.bytes))),
        (number, ..) => Err(VerityError::UnknownAlgorithm { file: name_of(file), number }),
    }
}

fn failed(file: BorrowedFd<'_>, action: &'static str, source: Errno) -> VerityError {
    let file = name_of(file);
    match source {
        Errno::NOTTY | Errno::NOSYS => VerityError::NoKernelSupport { file, source },
        Errno::OPNOTSUPP => VerityError::NotEnabled { file, source },
        Errno::TXTBSY => VerityError::OpenForWriting { file, source },
        _ => VerityError::Call { action, file, source },
    }
}

// Source: Linux include/uapi/linux/fsverity.h.
const ENABLE_VERITY: Opcode = opcode::write::<EnableArgument>(b'f', 133);
/// The size in the number of the ioctl covers only the header.
const MEASURE_VERITY: Opcode = opcode::read_write::<[u16; 2]>(b'f', 134);
const HASH_SHA256: u16 = 1;
const HASH_SHA512: u16 = 2;
const BLOCK_SIZE: u32 = 4096;

/// `struct fsverity_enable_arg`.
#[repr(C)]
struct EnableArgument {
    version: u32,
    hash_algorithm: u32,
    block_size: u32,
    salt_size: u32,
    salt_pointer: u64,
    signature_size: u32,
    reserved_1: u32,
    signature_pointer: u64,
    reserved_2: [u64; 11],
}
const _: () = assert!(size_of::<EnableArgument>() == 128);

impl EnableArgument {
    const ZERO: Self = Self {
        version: 0,
        hash_algorithm: 0,
        block_size: 0,
        salt_size: 0,
        salt_pointer: 0,
        signature_size: 0,
        reserved_1: 0,
        signature_pointer: 0,
        reserved_2: [0; 11],
    };
}

/// `struct fsverity_digest`, with room for the longest digest.
#[repr(C)]
struct Digest {
    algorithm: u16,
    size: u16,
    bytes: [u8; 64],
}
const _: () = assert!(size_of::<Digest>() == 68);

#[cfg(test)]
mod tests {
    use super::{ENABLE_VERITY, MEASURE_VERITY};

    #[test]
    fn ioctl_numbers_are_the_kernels() {
        // As the C header computes them on x86-64 and aarch64.
        assert_eq!(ENABLE_VERITY, 0x4080_6685);
        assert_eq!(MEASURE_VERITY, 0xc004_6686);
    }
}
