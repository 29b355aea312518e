//! Work directories of commands below `tmp/`, locked for as long as the command runs.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::disk::{Directory, DiskError, DiskRoom};
use crate::give_up::GiveUp;

/// Prefix of the names of work directories: `work-PID-NUMBER`.
pub(crate) const PREFIX: &str = "work-";

/// Second prefix of the names of directories that belong to no import: directories that are being removed, and
/// directories of `gc`.
const HIDDEN: &str = "gone-";

/// Second prefix of the names of directories for copies of a container's changes, for volumes and for temporary files
/// of commands. They belong to no import.
const COPY: &str = "copy-";

/// File in a work directory whose locked descriptor other programs may inherit. The directory counts as in use while
/// this file is locked.
pub(crate) const LOCK: &str = "lock";

/// Number for the next name. A process uses each number only once, because a trash that waits for one import would
/// otherwise wait for another.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The directory `tmp/` of a store, with unfinished files.
#[derive(Debug)]
pub(crate) struct Tmp {
    directory: Directory,
    /// Limit on disk space for all imports of this process.
    room: OnceLock<DiskRoom>,
}

impl Deref for Tmp {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        &self.directory
    }
}

impl Tmp {
    pub(crate) const fn new(directory: Directory) -> Self {
        Self { directory, room: OnceLock::new() }
    }

    pub(crate) fn room(&self) -> Result<DiskRoom, DiskError> {
        if let Some(room) = self.room.get() {
            return Ok(room.clone());
        }
        let room = self.directory.new_room()?;
        Ok(self.room.get_or_init(|| room).clone())
    }

    /// Writes a file with these bytes, durably, and replaces any file of this name.
    pub(crate) fn replace(
        &self,
        directory: &Directory,
        name: impl AsRef<[u8]>,
        bytes: &[u8],
    ) -> Result<(), DiskError> {
        let new = Replacement::write(Workspace::make(self)?, bytes)?;
        new.publish(directory, name)?;
        directory.sync()?;
        new.work.remove()
    }

    /// Does the same without syncing anything. After a crash the file may have the old content, the new content, a
    /// part of it, or zeros, so its readers must verify it.
    pub(crate) fn replace_unsynced(
        &self,
        directory: &Directory,
        name: impl AsRef<[u8]>,
        bytes: &[u8],
    ) -> Result<(), DiskError> {
        let new = Replacement::write_unsynced(Workspace::make(self)?, bytes)?;
        new.publish(directory, name)?;
        new.work.remove()
    }
}

/// The new content of a file, synced, in a work directory. Dropping it removes the work directory.
#[derive(Debug)]
pub(crate) struct Replacement {
    work: Workspace,
}

impl Replacement {
    const NAME: &str = "new";

    pub(crate) fn write(work: Workspace, bytes: &[u8]) -> Result<Self, DiskError> {
        let new = Self::write_unsynced(work, bytes)?;
        new.work.directory.sync_file(Self::NAME)?;
        Ok(new)
    }

    fn write_unsynced(work: Workspace, bytes: &[u8]) -> Result<Self, DiskError> {
        let mut new = work.directory.create(Self::NAME)?;
        new.write_all(bytes)?;
        new.publish_mode()?;
        drop(new);
        Ok(Self { work })
    }

    /// Replaces any file of this name. After a crash the file has the old or the new content, until the caller has
    /// synced the directory.
    pub(crate) fn publish(
        &self,
        directory: &Directory,
        name: impl AsRef<[u8]>,
    ) -> Result<(), DiskError> {
        self.work.directory.rename_over(Self::NAME, directory, name)
    }
}

/// A directory below `tmp/` with an exclusive lock on itself. A process that can lock such a directory knows that its
/// creator has ended.
#[derive(Debug)]
pub(crate) struct Workspace {
    tmp: Directory,
    pub(crate) directory: Directory,
    pub(crate) name: String,
    /// Whether the directory is already removed or published.
    gone: bool,
    /// If this is set and it is time to give up, dropping leaves the directory to [`clear`].
    left: Option<Arc<GiveUp>>,
}

impl Workspace {
    pub(crate) fn make(tmp: &Directory) -> Result<Self, DiskError> {
        Self::make_named(tmp, PREFIX)
    }

    /// Makes a directory that does not count as the directory of a running import.
    pub(crate) fn make_hidden(tmp: &Directory) -> Result<Self, DiskError> {
        Self::make_named(tmp, &format!("{PREFIX}{HIDDEN}"))
    }

    /// Makes a directory for files that belong to no import, such as the copy of a container's changes.
    pub(crate) fn make_copy(tmp: &Directory) -> Result<Self, DiskError> {
        Self::make_named(tmp, &format!("{PREFIX}{COPY}"))
    }

    /// Makes a directory whose name begins with `prefix`.
    pub(crate) fn make_named(tmp: &Directory, prefix: &str) -> Result<Self, DiskError> {
        let process = std::process::id();
        loop {
            let name = format!("{prefix}{process}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            if !tmp.make_private(&name)? {
                // The directory was made by a dead process with this process id, or in another PID namespace.
                continue;
            }
            // Until the directory is locked, another process may remove it as a leftover.
            let Some(directory) = tmp.open_if_there(&name)? else { continue };
            if directory.try_lock()? && directory.is_linked()? {
                return Ok(Self {
                    tmp: tmp.try_clone()?,
                    directory,
                    name,
                    gone: false,
                    left: None,
                });
            }
        }
    }

    /// Limits the disk space of files in the directory by `room`.
    pub(crate) fn leaving(mut self, room: DiskRoom) -> Self {
        self.directory.leave(room);
        self
    }

    /// Leaves the directory to [`clear`] if it is dropped when it is time to give up.
    pub(crate) fn left_when(mut self, give_up: &Arc<GiveUp>) -> Self {
        self.left = Some(Arc::clone(give_up));
        self
    }

    /// Removes the directory and its contents.
    pub(crate) fn remove(mut self) -> Result<(), DiskError> {
        self.gone = true;
        self.tmp.remove_tree(&self.name)
    }

    /// Returns the locked directory and its name. It is then not removed when it is dropped.
    pub(crate) fn into_parts(mut self) -> Result<(Directory, String), DiskError> {
        let directory = self.directory.try_clone()?;
        self.gone = true;
        Ok((directory, std::mem::take(&mut self.name)))
    }

    /// Renames the directory to its final name. The lock is kept. Returns `None` if the name is taken.
    pub(crate) fn publish(
        mut self,
        to: &Directory,
        name: &str,
    ) -> Result<Option<Directory>, DiskError> {
        // A duplicate of the descriptor keeps the lock. Duplicating may fail if descriptors run out, so it is done
        // first.
        let kept = self.directory.try_clone()?;
        match self.tmp.rename_new(&self.name, to, name)? {
            crate::disk::Renamed::Taken => Ok(None),
            crate::disk::Renamed::Now => {
                self.gone = true;
                Ok(Some(kept.renamed(to, name)))
            }
        }
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if self.gone || self.left.as_ref().is_some_and(|it| it.is_time()) {
            return;
        }
        if let Err(error) = self.tmp.remove_tree(&self.name) {
            tracing::debug!(work = self.name, %error, "cannot remove the work directory: the next command removes it");
        }
    }
}

/// Whether the creator of a work directory is alive.
#[derive(Debug)]
pub(crate) enum Owner {
    /// Another process holds the lock.
    Alive,
    /// The lock was free, and this process holds it now.
    Dead(Directory),
    /// The directory does not exist.
    Gone,
}

/// Finds out whether the creator of a directory is alive by trying its lock.
pub(crate) fn owner(parent: &Directory, name: &str) -> Result<Owner, DiskError> {
    match parent.open_if_there(name)? {
        None => Ok(Owner::Gone),
        Some(directory) if !directory.try_lock()? => Ok(Owner::Alive),
        // Another process may have removed the directory, and a third process may have made a directory of the same
        // name.
        Some(directory) if !directory.is_linked()? => Ok(Owner::Gone),
        // The creator has ended, but a program that it started is still running.
        Some(directory) if directory.is_file_locked(LOCK)? => Ok(Owner::Alive),
        Some(directory) => Ok(Owner::Dead(directory)),
    }
}

/// Whether the creator of a directory, or a program that inherited the lock, is alive.
pub(crate) fn is_alive(directory: &Directory) -> Result<bool, DiskError> {
    Ok(directory.is_locked()? || directory.is_file_locked(LOCK)?)
}

/// Returns the names of all work directories.
pub(crate) fn names(tmp: &Directory) -> Result<Vec<String>, DiskError> {
    let mut names = Vec::new();
    for listed in tmp.list()? {
        let directory = matches!(listed.kind, FileType::Directory | FileType::Unknown);
        match listed.text() {
            Some(name) if directory && is_name(name) => names.push(name.to_owned()),
            _ => {}
        }
    }
    Ok(names)
}

/// Whether a directory of this name is being removed, or belongs to `gc`.
pub(crate) fn is_hidden(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| rest.starts_with(HIDDEN))
}

/// Whether a work directory of this name may belong to an import.
pub(crate) fn may_be_import(name: &str) -> bool {
    let is_copy = name.strip_prefix(PREFIX).is_some_and(|rest| rest.starts_with(COPY));
    !is_hidden(name) && !is_copy
}

/// Whether this can be the name of a work directory.
pub(crate) fn is_name(name: &str) -> bool {
    name.starts_with(PREFIX) && name.bytes().all(|it| it.is_ascii_graphic() && it != b'/')
}

/// Moves a directory to `tmp/`, where the next command removes it after its lock is released. Returns the directory
/// with its new path, and its new name.
pub(crate) fn hide(
    parent: &Directory,
    name: &str,
    directory: &Directory,
    tmp: &Directory,
) -> Result<(Directory, String), DiskError> {
    let process = std::process::id();
    // A duplicate of the descriptor keeps the lock. Duplicating may fail if descriptors run out, so it is done first.
    let kept = directory.try_clone()?;
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let hidden = format!("{PREFIX}{HIDDEN}{process}-{number}");
        match parent.rename_new(name, tmp, &hidden)? {
            crate::disk::Renamed::Taken => {}
            crate::disk::Renamed::Now => return Ok((kept.renamed(tmp, &hidden), hidden)),
        }
    }
}

/// Removes the directories of dead commands, and returns their number. A container of this user may have written files
/// with other user ids. Only root of the user's namespace may remove these files, so they stay until a command runs in
/// that namespace.
pub(crate) fn clear(tmp: &Directory) -> Result<u64, DiskError> {
    let mut cleared = 0;
    for name in names(tmp)? {
        // The lock is held until the directory is removed.
        let Owner::Dead(_lock) = owner(tmp, &name)? else { continue };
        match tmp.remove_tree(&name) {
            Ok(()) => cleared += 1,
            Err(error) if error.is(Errno::ACCESS) || error.is(Errno::PERM) => {
                tracing::debug!(name, %error, "cannot remove the directory of a dead command");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(cleared)
}
