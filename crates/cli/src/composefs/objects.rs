//! The directory that `mkcomposefs --digest-store` fills: files named by their digest.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use image::verity::{Algorithm, ObjectId};
use kernel::files::Named;
use store::walk::{PutError, Source};

use super::Failure;

/// Objects on their way into the directory.
///
/// They are copied under names of their own and get their real ones when all are there and on the disk. So whatever
/// happens, a file with an object's name is whole. C does the same with one `fsync` a file, which takes much longer.
#[derive(Debug)]
pub(super) struct Objects<'a> {
    directory: &'a Path,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Every object that was asked for.
    met: HashSet<ObjectId>,
    /// Those that were not there.
    new: Vec<ObjectId>,
    work: Option<Work>,
}

/// Where files are until they are published. Removed with all that is left in it.
#[derive(Debug)]
struct Work {
    path: PathBuf,
}

impl Drop for Work {
    fn drop(&mut self) {
        // Nobody is served by an error about what is of no use any more.
        // One call that fails leaves the rest of it behind.
        drop(fs::remove_dir_all(&self.path).or_else(|_| fs::remove_dir_all(&self.path)));
    }
}

impl<'a> Objects<'a> {
    pub(super) fn new(directory: &'a Path) -> Self {
        Self { directory, state: Mutex::default() }
    }

    /// Hashes a file, and copies it if the directory does not have it.
    pub(super) fn put(&self, source: &mut Source<'_>) -> Result<ObjectId, PutError> {
        let object = source.digest(Algorithm::Sha256)?;
        let work = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if !state.met.insert(object) {
                return Ok(object);
            }
            // What is there is trusted, as C does.
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
        // `Source::digest` has read other bytes otherwise; the walk says so.
        if !source.is_unchanged()? {
            return Err("it changed".into());
        }
        copy.set_permissions(Permissions::from_mode(0o644))?;
        drop(copy);
        // It is worth having, and not all file systems have it.
        let copy = File::open(&path)?;
        drop(kernel::verity::enable(copy.as_fd(), kernel::verity::Algorithm::Sha256));
        Ok(object)
    }

    /// Makes the directory for work.
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

    /// Gives all that was copied its name.
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
                // Somebody else stored the same: ours goes with the directory.
                Named::Now | Named::Taken => {}
            }
        }
        Ok(())
    }
}
