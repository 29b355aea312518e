//! A cache, outside the repository, of inputs that are expensive to make. An entry is either complete or absent.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, IFlags, ioctl_getflags, ioctl_setflags};

/// The cache directory: `QUIRE_CACHE`, else `$XDG_CACHE_HOME/quire`, else `~/.cache/quire`.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    pub fn open() -> Result<Self> {
        let set = |name| env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from);
        let dir = match (set("QUIRE_CACHE"), set("XDG_CACHE_HOME"), set("HOME")) {
            (Some(dir), ..) => dir,
            (None, Some(xdg), _) => xdg.join("quire"),
            (None, None, Some(home)) => home.join(".cache/quire"),
            (None, None, None) => bail!("none of QUIRE_CACHE, XDG_CACHE_HOME and HOME is set"),
        };
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Self { dir: dir.canonicalize()? })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of an entry. If the entry is absent or `refresh` is set, `make` first builds it under a
    /// temporary name. Processes that need the same entry wait for each other.
    pub fn entry(
        &self,
        name: &str,
        refresh: bool,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let lock = File::create(self.dir.join(format!(".{name}.lock")))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        let path = self.dir.join(name);
        if !refresh && path.exists() {
            return Ok(path);
        }
        let draft = self.dir.join(format!(".{name}.draft"));
        remove(&draft)?;
        make(&draft).with_context(|| format!("cannot make the input {name}"))?;
        remove(&path)?;
        fs::rename(&draft, &path)?;
        Ok(path)
    }
}

/// Removes a file or a directory if it exists, including a store's objects, which may be immutable.
pub fn remove(path: &Path) -> Result<()> {
    let remove = || match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    let removed = match remove() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            clear_immutable(path)?;
            remove()
        }
        other => other,
    };
    removed.with_context(|| format!("cannot remove {}", path.display()))
}

/// Makes all files at and below `path` removable, as far as this process may.
fn clear_immutable(path: &Path) -> Result<()> {
    let found = path.symlink_metadata()?;
    if found.is_dir() {
        for entry in fs::read_dir(path)? {
            clear_immutable(&entry?.path())?;
        }
    }
    if found.is_dir() || found.is_file() {
        let file = File::open(path)?;
        // File systems without these flags have nothing to clear.
        if let Ok(flags) = ioctl_getflags(&file)
            && flags.contains(IFlags::IMMUTABLE)
        {
            ioctl_setflags(&file, flags - IFlags::IMMUTABLE)?;
        }
    }
    Ok(())
}
