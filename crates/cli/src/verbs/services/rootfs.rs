//! Opens files below the root directory of this or another machine, whose files may be hostile.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat};

/// An open file below another machine's root. Symlinks are resolved as on that machine, so they cannot lead out of the
/// root.
#[derive(Debug)]
pub(crate) struct HeldPath(OwnedFd);

impl HeldPath {
    pub(crate) fn new(root: &Path, path: &Path) -> io::Result<Self> {
        let held = OFlags::PATH | OFlags::CLOEXEC;
        let root = openat(CWD, root, held | OFlags::DIRECTORY, Mode::empty())?;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        Ok(Self(kernel::files::open_resolved(root.as_fd(), path, held, resolve)?))
    }

    /// Returns a path by which this process can access the file while it is held open.
    pub(crate) fn reached(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// Opens a regular file.
///
/// # Errors
/// Those of `open`, and `InvalidInput` for a file of another type.
pub(crate) fn regular(root: &Path, path: &Path) -> io::Result<File> {
    oci::files::regular(&HeldPath::new(root, path)?.reached())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read as _;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_link_leads_out_of_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let (root, outside) = (folder.path().join("root"), folder.path().join("outside"));
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(&outside, "the host's").unwrap();
        fs::write(root.join("own"), "its own").unwrap();
        symlink(&outside, root.join("etc/absolute")).unwrap();
        symlink("../../outside", root.join("etc/relative")).unwrap();
        symlink("/own", root.join("etc/within")).unwrap();
        for name in ["/etc/absolute", "/etc/relative", "/../outside", "etc/../../outside"] {
            let error = regular(&root, Path::new(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{name}");
        }
        let mut text = String::new();
        regular(&root, Path::new("/etc/within")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "its own");
        assert!(regular(&root, Path::new("/etc")).is_err());
    }
}
