//! `--cidfile`: a file that gets the name of a new container.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// A new, empty file. It is removed on drop, unless the container was made.
pub(super) struct CidFile {
    file: File,
    /// Absolute path; `None` when the file is complete.
    path: Option<PathBuf>,
}

impl CidFile {
    /// Makes the file, which must not exist, so that two containers never share one.
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        let failed = || format!("--cidfile {}", path.display());
        let file = match File::create_new(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                bail!("{}: the file exists: another container may use it, or remove it", failed())
            }
            file => file.with_context(failed)?,
        };
        Ok(Self { file, path: Some(std::path::absolute(path).with_context(failed)?) })
    }

    /// Writes the name of the container.
    pub(super) fn write(mut self, id: &str) -> anyhow::Result<()> {
        let path = self.path.as_deref().unwrap_or(Path::new(""));
        let failed = format!("--cidfile {}", path.display());
        self.file.write_all(id.as_bytes()).context(failed)?;
        self.path = None;
        Ok(())
    }
}

impl Drop for CidFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            drop(std::fs::remove_file(path));
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
    }
}
