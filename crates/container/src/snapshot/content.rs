//! Copies the bytes of a file.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use store::DiskRoom;

/// Why the copy of an entry ended early.
#[derive(Debug, Clone, Copy)]
pub(super) enum CopyStop {
    Cancelled,
    /// The file changed although it must be at rest.
    Changed,
    /// The kernel refused this action.
    Kernel(&'static str, Errno),
}

impl CopyStop {
    pub(super) fn at(action: &'static str) -> impl Fn(Errno) -> Self + Copy {
        move |errno| Self::Kernel(action, errno)
    }
}

/// Size of a read, in bytes.
const PIECE: usize = 1 << 18;

/// Size of a copy inside the kernel, which cannot be interrupted, in bytes.
const KERNEL_PIECE: u64 = 64 << 20;

/// Smallest range that is copied inside the kernel, in bytes. Shorter ones take two system calls in any case.
const KERNEL_MIN: u64 = 1 << 16;

/// Copies bytes, and remembers what the two file systems support.
#[derive(Debug)]
pub(super) struct ByteCopier<'a> {
    cancel: &'a AtomicBool,
    /// Keeps some space free, so that other programs, which include the container, do not find the disk full.
    room: DiskRoom,
    /// Buffers of [`PIECE`] bytes, which are made when they are needed.
    buffers: [Vec<u8>; 2],
    can_share: bool,
    can_copy: bool,
}

impl<'a> ByteCopier<'a> {
    /// `to` is a directory on the file system of the copies.
    pub(super) fn new(cancel: &'a AtomicBool, to: BorrowedFd<'_>) -> Result<Self, Errno> {
        let room = DiskRoom::from_fd(to);
        let room = room.map_err(|it| Errno::from_io_error(&it).unwrap_or(Errno::IO))?;
        let buffers = [Vec::new(), Vec::new()];
        Ok(Self { cancel, room, buffers, can_share: true, can_copy: true })
    }

    /// Checks that there is space for a copy of `bytes` bytes. Every file takes space, also an empty one, one that shares
    /// blocks, and a directory.
    pub(super) fn take_room(&self, bytes: u64) -> Result<(), CopyStop> {
        let failed = CopyStop::at("write the copy of");
        self.room
            .take(bytes)
            .map_err(|it| failed(Errno::from_io_error(&it).unwrap_or(Errno::NOSPC)))
    }

    pub(super) fn go_on(&self) -> Result<(), CopyStop> {
        if self.cancel.load(Ordering::Relaxed) { Err(CopyStop::Cancelled) } else { Ok(()) }
    }

    /// Copies a file of `size` bytes into an empty file, with its holes. The two share blocks on file systems that
    /// support it. `is_dense` is a guess that the file has no holes. Returns false if the file became shorter during
    /// the copy.
    pub(super) fn copy(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        size: u64,
        is_dense: bool,
    ) -> Result<bool, CopyStop> {
        if size == 0 {
            return Ok(true);
        }
        if self.can_share {
            match rustix::fs::ioctl_ficlone(to, from) {
                Ok(()) => return Ok(true),
                Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::XDEV | Errno::NOSYS) => {
                    self.can_share = false;
                }
                // This file cannot share blocks: for example one without checksums on btrfs.
                Err(Errno::INVAL | Errno::PERM | Errno::TXTBSY | Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(CopyStop::Kernel("copy", errno)),
            }
        }
        if is_dense && size < KERNEL_MIN {
            return Ok(self.range(from, to, 0, size)? == size);
        }
        let is_whole = ranges(from, size, &mut |at, end| self.range(from, to, at, end))?;
        // The end of the file may be a hole.
        rustix::fs::ftruncate(to, size).map_err(CopyStop::at("set the size of the copy of"))?;
        Ok(is_whole)
    }

    /// Whether the data of a file of `size` bytes, outside of its holes, equals that of its copy.
    pub(super) fn is_equal(
        &mut self,
        from: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
        size: u64,
    ) -> Result<bool, CopyStop> {
        let mut is_equal = true;
        ranges(from, size, &mut |mut at, end| {
            while at < end && is_equal {
                self.go_on()?;
                let length = piece(end - at);
                let [one, other] = &mut self.buffers;
                let counts = [(from, one, "read"), (copy, other, "read the copy of")].map(
                    |(file, buffer, action)| {
                        buffer.resize(PIECE, 0);
                        let part = buffer.get_mut(..length).unwrap_or_default();
                        kernel::files::read_full(file, part, at).map_err(CopyStop::at(action))
                    },
                );
                let [count, copied] = counts;
                let (count, copied) = (count?, copied?);
                let [one, other] = &self.buffers;
                is_equal = one.get(..count) == other.get(..copied);
                if count == 0 {
                    return Ok(end);
                }
                at += count as u64;
            }
            Ok(end)
        })?;
        Ok(is_equal)
    }

    /// Copies a range. Returns the end of the copied bytes, which is less than `end` if the file is shorter.
    fn range(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        mut at: u64,
        end: u64,
    ) -> Result<u64, CopyStop> {
        while at < end {
            self.go_on()?;
            if self.can_copy && end - at >= KERNEL_MIN {
                let (mut read_at, mut write_at) = (at, at);
                let length = usize::try_from((end - at).min(KERNEL_PIECE)).unwrap_or(PIECE);
                self.take_room(length as u64)?;
                match rustix::fs::copy_file_range(
                    from,
                    Some(&mut read_at),
                    to,
                    Some(&mut write_at),
                    length,
                ) {
                    // Some file systems return 0 instead of an error, so the file is read in the usual way.
                    Ok(0) => {}
                    Ok(count) => {
                        at += count as u64;
                        continue;
                    }
                    Err(Errno::INTR) => continue,
                    Err(
                        Errno::XDEV
                        | Errno::INVAL
                        | Errno::OPNOTSUPP
                        | Errno::NOSYS
                        | Errno::PERM
                        | Errno::TXTBSY,
                    ) => self.can_copy = false,
                    Err(errno) => return Err(CopyStop::Kernel("copy", errno)),
                }
            }
            let length = piece(end - at);
            self.take_room(length as u64)?;
            let [buffer, _] = &mut self.buffers;
            buffer.resize(PIECE, 0);
            let part = buffer.get_mut(..length).unwrap_or_default();
            let count = kernel::files::read_full(from, part, at).map_err(CopyStop::at("read"))?;
            if count == 0 {
                break;
            }
            let part = part.get(..count).unwrap_or_default();
            kernel::files::write_all(to, part, at).map_err(CopyStop::at("write the copy of"))?;
            at += count as u64;
        }
        Ok(at)
    }
}

fn piece(length: u64) -> usize {
    usize::try_from(length).map_or(PIECE, |it| it.min(PIECE))
}

/// Calls `each` with the start and the end of each range of data in a file of `size` bytes. Returns false if `each`
/// returned a smaller end, or if the file is shorter.
fn ranges(
    file: BorrowedFd<'_>,
    size: u64,
    each: &mut dyn FnMut(u64, u64) -> Result<u64, CopyStop>,
) -> Result<bool, CopyStop> {
    let failed = CopyStop::at("find the holes of");
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            // Only a hole follows.
            Err(Errno::NXIO) => return Ok(true),
            // The file system does not report holes.
            Err(Errno::INVAL) => at,
            Err(errno) => return Err(failed(errno)),
        };
        if data >= size {
            return Ok(true);
        }
        let end = match rustix::fs::seek(file, SeekFrom::Hole(data)) {
            // The file changed, or the file system contradicts itself. All bytes are read then.
            Ok(hole) if hole <= data => size,
            Ok(hole) => hole.min(size),
            Err(Errno::NXIO | Errno::INVAL) => size,
            Err(errno) => return Err(failed(errno)),
        };
        if each(data, end)? < end {
            return Ok(false);
        }
        at = end;
    }
    Ok(true)
}
