//! The directory that `mkcomposefs --digest-store` fills with files named by their digest.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use image::verity::{Algorithm, ObjectId};
use kernel::files::NameOutcome;
use store::walk::{FileReader, PutError};

use super::Failure;

/// Objects that are being copied into the directory.
///
/// The objects are copied under temporary names, and renamed when all of them are complete and synced. A file with an
/// object's name is therefore complete even after a crash. The C tool calls `fsync` for each file instead, which takes
/// much longer.
#[derive(Debug)]
pub(super) struct Objects<'a> {
    directory: &'a Path,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Every object that `put` was called for.
    met: HashSet<ObjectId>,
    /// Objects that the directory did not have.
    new: Vec<ObjectId>,
    work: Option<Work>,
}

/// Directory with files that are not published yet. It is removed with its contents on drop.
#[derive(Debug)]
struct Work {
    path: PathBuf,
}

impl Drop for Work {
    fn drop(&mut self) {
        // Errors are ignored, because the remaining files are not used. A removal may fail halfway, so there are two
        // attempts.
        drop(fs::remove_dir_all(&self.path).or_else(|_| fs::remove_dir_all(&self.path)));
    }
}

impl<'a> Objects<'a> {
    pub(super) fn new(directory: &'a Path) -> Self {
        Self { directory, state: Mutex::default() }
    }

    /// Hashes a file, and copies it if the directory does not have it.
    pub(super) fn put(&self, source: &mut FileReader<'_>) -> Result<ObjectId, PutError> {
        let object = source.digest(Algorithm::Sha256)?;
        let work = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if !state.met.insert(object) {
                return Ok(object);
            }
            // Like the C tool, trust an existing file.
            if fs::symlink_metadata(self.directory.join(object.path())).is_ok() {
                return Ok(object);
            }
            state.new.push(object);
            if state.work.is_none() {
                state.work = Some(self.begin()?);
            }
            state.work.as_ref().map(|work| work.path.clone()).unwrap_or_default()
        };
        let path = work.join(object.to_string());
        let copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        kernel::files::copy(source.file().as_fd(), copy.as_fd())?;
        // If the file changed, `Source::digest` may have read other bytes; the walk reports the error.
        if !source.is_unchanged()? {
            return Err("it changed".into());
        }
        copy.set_permissions(Permissions::from_mode(0o644))?;
        drop(copy);
        // A failure is ignored, because some file systems do not support fs-verity.
        let copy = File::open(&path)?;
        drop(kernel::verity::enable(copy.as_fd(), kernel::verity::Algorithm::Sha256));
        Ok(object)
    }

    fn begin(&self) -> io::Result<Work> {
        let mut directories = DirBuilder::new();
        directories.mode(0o755).recursive(true).create(self.directory)?;
        for number in 0.. {
            let name = format!(".tmp-{}-{number}", std::process::id());
            let path = self.directory.join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map(|()| Work { path }),
            }
        }
        unreachable!("there are more numbers than files")
    }

    /// Moves all copied objects to their final names.
    pub(super) fn publish(self) -> Result<(), Failure> {
        let State { new, work, .. } =
            self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Some(work) = work else { return Ok(()) };
        let failed = || format!("cannot store objects in {}", self.directory.display());
        let directory = File::open(self.directory).with_context(failed)?;
        rustix::fs::syncfs(&directory).map_err(io::Error::from).with_context(failed)?;
        let from = File::open(&work.path).with_context(failed)?;
        for object in new {
            let path = object.path();
            let above = self.directory.join(path.split('/').next().unwrap_or_default());
            match DirBuilder::new().mode(0o755).create(above) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(error).with_context(failed).map_err(Failure::from);
                }
                _ => {}
            }
            let name = object.to_string();
            let named =
                kernel::files::rename_new((from.as_fd(), &*name), (directory.as_fd(), &*path));
            match named.map_err(io::Error::from).with_context(failed)? {
                // If another process stored the same object, our copy is removed with the work directory.
                NameOutcome::Now | NameOutcome::Taken => {}
            }
        }
        Ok(())
    }
}
