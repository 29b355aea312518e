//! `--cidfile`: a file that gets the name of a new container.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// A new, empty file. It is removed on drop, unless the container was made.
pub(super) struct CidFile {
    file: File,
    /// The directory, whose path may change.
    folder: OwnedFd,
    /// Name in the directory.
    name: OsString,
    /// Path for messages.
    path: PathBuf,
    is_complete: bool,
}

impl CidFile {
    /// Makes the file, which must not exist, so that two containers never share one.
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        let failed = || format!("--cidfile {}", path.display());
        let name = path.file_name().filter(|_| !path.as_os_str().as_bytes().ends_with(b"/"));
        let name = name.ok_or(Errno::ISDIR).with_context(failed)?;
        let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder.unwrap_or(Path::new(".")), flags, Mode::empty())
            .with_context(failed)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        // As for other new files, the mask of this process restricts the mode.
        let mode = Mode::from_raw_mode(0o666);
        let file = match rustix::fs::openat(&folder, name, flags, mode) {
            Err(Errno::EXIST) => {
                bail!("{}: the file exists: another container may use it, or remove it", failed())
            }
            file => file.with_context(failed)?,
        };
        let (file, name, path) = (file.into(), name.to_owned(), path.to_owned());
        Ok(Self { file, folder, name, path, is_complete: false })
    }

    /// Writes the name of the container.
    pub(super) fn write(mut self, id: &str) -> anyhow::Result<()> {
        let failed = format!("--cidfile {}", self.path.display());
        self.file.write_all(id.as_bytes()).context(failed)?;
        self.is_complete = true;
        Ok(())
    }

    /// Whether the file still has its name. Another user who may change the directory may have put a file there.
    fn is_at(&self, name: &OsStr) -> bool {
        let current = rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW);
        let (Ok(ours), Ok(current)) = (rustix::fs::fstat(&self.file), current) else {
            return false;
        };
        (ours.st_dev, ours.st_ino) == (current.st_dev, current.st_ino)
    }
}

impl Drop for CidFile {
    fn drop(&mut self) {
        if !self.is_complete && self.is_at(&self.name) {
            let name = self.name.as_os_str();
            let _removed = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_container_that_was_made_leaves_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        drop(CidFile::create(&path).unwrap());
        assert!(!path.exists());
        CidFile::create(&path).unwrap().write("web").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "web");
        let error = CidFile::create(&path).err().unwrap().to_string();
        assert!(error.contains("the file exists"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "web");
        assert!(CidFile::create(&folder.path().join("new/")).is_err());
        assert!(!folder.path().join("new").exists());
    }

    #[test]
    fn no_other_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["ours", "other"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("other/id"), "theirs").unwrap();
        // The directory is swapped for a symlink to another one.
        let file = CidFile::create(&at("ours/id")).unwrap();
        rustix::fs::rename(at("ours"), at("moved")).unwrap();
        std::os::unix::fs::symlink("other", at("ours")).unwrap();
        drop(file);
        assert_eq!(std::fs::read_to_string(at("other/id")).unwrap(), "theirs");
        assert!(!at("moved/id").exists());
        // Another file has the name.
        let file = CidFile::create(&at("moved/id")).unwrap();
        rustix::fs::rename(at("other/id"), at("moved/id")).unwrap();
        drop(file);
        assert_eq!(std::fs::read_to_string(at("moved/id")).unwrap(), "theirs");
    }
}
