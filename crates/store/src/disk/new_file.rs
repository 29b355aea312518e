//! Files that are being written.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::Mode;
use rustix::io::Errno;

use super::{Change, DiskError, DiskRoom, Trace, length};

/// Size and alignment of holes, in bytes: a run of zeros of this length becomes a hole. This is the largest page or
/// block size of most systems. Shorter holes would need more space in the file system's tables than they save.
const HOLE: usize = 64 << 10;

/// Whether all bytes are zeros. The data of most files differs from zero at once, so the check is cheap.
fn is_zeros(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// A new file that is being written.
#[derive(Debug)]
pub(crate) struct NewFile {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
    pub(super) length: u64,
    /// Mode of the file when it is published.
    pub(super) mode: Mode,
    pub(super) trace: Trace,
    pub(super) room: Option<DiskRoom>,
}

impl NewFile {
    /// Appends bytes. Aligned runs of zeros become holes.
    pub(crate) fn write_all(&mut self, bytes: &[u8]) -> Result<(), DiskError> {
        let failed = |errno: Errno| DiskError {
            action: "write",
            path: self.path.clone(),
            source: errno.into(),
        };
        self.trace.allow().map_err(failed)?;
        if let Some(room) = &self.room {
            room.take(bytes.len() as u64).map_err(|source| DiskError {
                action: "write",
                path: self.path.clone(),
                source,
            })?;
        }
        // `data` is not written yet and begins at `start`.
        let (mut data, mut rest, mut at) = (bytes, bytes, self.length);
        let mut start = at;
        let mut ends_with_hole = false;
        while !rest.is_empty() {
            let over = usize::try_from(at % HOLE as u64).unwrap_or(0);
            let (piece, after) = rest.split_at(rest.len().min(HOLE - over));
            ends_with_hole = piece.len() == HOLE && is_zeros(piece);
            if ends_with_hole {
                let before = data.len() - rest.len();
                write_at(&self.fd, &data[..before], start).map_err(failed)?;
                data = after;
                start = at + HOLE as u64;
            }
            (rest, at) = (after, at + piece.len() as u64);
        }
        write_at(&self.fd, data, start).map_err(failed)?;
        if ends_with_hole {
            rustix::fs::ftruncate(&self.fd, at).map_err(failed)?;
        }
        self.length = at;
        self.trace.record(|| Change::Write(self.path.clone(), bytes.to_vec()));
        Ok(())
    }

    /// Appends a hole of `count` bytes.
    pub(crate) fn add_hole(&mut self, count: u64) -> Result<(), DiskError> {
        let failed = |errno: Errno| DiskError {
            action: "lengthen",
            path: self.path.clone(),
            source: errno.into(),
        };
        self.trace.allow().map_err(failed)?;
        let length = self.length.checked_add(count).ok_or(Errno::FBIG).map_err(failed)?;
        rustix::fs::ftruncate(&self.fd, length).map_err(failed)?;
        self.length = length;
        self.trace.record(|| Change::Lengthen(self.path.clone(), length));
        Ok(())
    }

    /// Makes this empty file share all blocks of another one (reflink). Returns its length in bytes, or `None` if the
    /// file systems do not support this, or if a test records changes.
    pub(crate) fn share_blocks_of(
        &mut self,
        other: &std::fs::File,
    ) -> Result<Option<u64>, DiskError> {
        let failed = |errno: Errno| DiskError {
            action: "copy a file to",
            path: self.path.clone(),
            source: errno.into(),
        };
        if self.trace.is_on() {
            return Ok(None);
        }
        match rustix::fs::ioctl_ficlone(&self.fd, other) {
            Ok(()) => {}
            // The file system does not support reflinks at all, or not between these two files, or not with their
            // settings. The caller then copies the data.
            Err(
                Errno::OPNOTSUPP
                | Errno::NOTTY
                | Errno::XDEV
                | Errno::INVAL
                | Errno::NOSYS
                | Errno::PERM
                | Errno::TXTBSY
                | Errno::BADF,
            ) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
        self.length = length(&rustix::fs::fstat(&self.fd).map_err(failed)?);
        Ok(Some(self.length))
    }

    /// Sets exactly the mode of published files, because the umask may have removed bits. Returns whether the mode was
    /// changed.
    pub(crate) fn publish_mode(&self) -> Result<bool, DiskError> {
        let failed = |action, errno: Errno| DiskError {
            action,
            path: self.path.clone(),
            source: errno.into(),
        };
        let stat = rustix::fs::fstat(&self.fd).map_err(|errno| failed("stat", errno))?;
        if Mode::from_raw_mode(stat.st_mode) == self.mode {
            return Ok(false);
        }
        rustix::fs::fchmod(&self.fd, self.mode).map_err(|errno| failed("chmod", errno))?;
        Ok(true)
    }
}

pub(super) fn write_at(fd: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                bytes = bytes.get(written..).unwrap_or_default();
                at += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
