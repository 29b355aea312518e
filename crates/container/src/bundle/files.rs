//! Reads files of a root that may be hostile: no link leads out of the root, no call blocks, and sizes are limited.

use std::io::Read as _;
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, OFlags, ResolveFlags};
use rustix::io::Errno;
use store::OperationError;

/// Maximum size in bytes: larger than any real `/etc/passwd`, and small enough to read before every start.
const LARGEST: u64 = 4 << 20;

/// Returns the bytes of a regular file inside `root`, or no bytes if the file does not exist.
pub(crate) fn read_small(root: BorrowedFd<'_>, path: &str) -> Result<Vec<u8>, OperationError> {
    let object = format!("{path} in the image");
    let failed = OperationError::of("read", &object);
    // NONBLOCK, so that a FIFO does not block the call.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match open_inside(root, path.as_bytes(), flags) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
        Err(errno) => return Err(failed(errno.into())),
    };
    let stat = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(failed(std::io::Error::other("it is not a regular file")));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::from(file);
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LARGEST {
        return Err(failed(std::io::Error::other("it has more than 4 MiB")));
    }
    Ok(bytes)
}

fn open_inside(
    root: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
) -> Result<rustix::fd::OwnedFd, Errno> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    kernel::files::open_resolved(root, path, flags, resolve)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_inside() {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("root");
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::write(outside.path().join("passwd"), "outside").unwrap();
        std::fs::write(root.join("passwd"), "inside").unwrap();
        symlink("../../passwd", root.join("etc/passwd")).unwrap();
        let fd = std::fs::File::open(&root).unwrap();
        assert_eq!(read_small(fd.as_fd(), "etc/passwd").unwrap(), b"inside");
        assert_eq!(read_small(fd.as_fd(), "etc/group").unwrap(), b"");
        std::fs::create_dir(root.join("etc/group")).unwrap();
        assert!(read_small(fd.as_fd(), "etc/group").is_err());
    }

    #[test]
    fn large_files_are_refused() {
        let root = tempfile::tempdir().unwrap();
        std::fs::File::create(root.path().join("group")).unwrap().set_len(LARGEST + 1).unwrap();
        let fd = std::fs::File::open(root.path()).unwrap();
        let error = read_small(fd.as_fd(), "group").unwrap_err();
        assert_eq!(error.source.to_string(), "it has more than 4 MiB");
    }
}
