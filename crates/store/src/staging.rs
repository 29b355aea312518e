//! A command's own directory below `tmp/`, locked for as long as the command lives.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::disk::{Directory, DiskError, Room};
use crate::give_up::GiveUp;

/// What these directories are called: `work-PID-NUMBER`.
pub(crate) const PREFIX: &str = "work-";

/// What follows in the names of those that only have to go: nobody works in them.
const HIDDEN: &str = "gone-";

/// A file in such a directory that other programs may be given to lock. As long as it is locked the directory is
/// somebody's, too.
pub(crate) const LOCK: &str = "lock";

/// Numbers are not used twice in a process: a trash that waits for one import would wait for another.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// `tmp/` of a store: where what is not finished is.
#[derive(Debug)]
pub(crate) struct Tmp {
    directory: Directory,
    /// What all imports of this process leave of the disk.
    room: OnceLock<Room>,
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

    pub(crate) fn room(&self) -> Result<Room, DiskError> {
        if let Some(room) = self.room.get() {
            return Ok(room.clone());
        }
        let room = self.directory.new_room()?;
        Ok(self.room.get_or_init(|| room).clone())
    }

    /// Puts a file of these bytes in the place of whatever has the name, durably.
    pub(crate) fn replace(
        &self,
        directory: &Directory,
        name: impl AsRef<[u8]>,
        bytes: &[u8],
    ) -> Result<(), DiskError> {
        let work = Workspace::make(self)?;
        let mut new = work.directory.create("new")?;
        new.write_all(bytes)?;
        new.publish_mode()?;
        drop(new);
        work.directory.sync_file("new")?;
        work.directory.rename_over("new", directory, name)?;
        directory.sync()?;
        work.remove()
    }
}

/// A directory below `tmp/`, with an exclusive lock on itself. Whoever can lock one knows that its
/// maker is dead.
#[derive(Debug)]
pub(crate) struct Workspace {
    tmp: Directory,
    pub(crate) directory: Directory,
    pub(crate) name: String,
    /// Nothing to remove any more.
    gone: bool,
    /// Once it is time to give up, [`clear`] removes the directory.
    left: Option<Arc<GiveUp>>,
}

impl Workspace {
    pub(crate) fn make(tmp: &Directory) -> Result<Self, DiskError> {
        Self::make_named(tmp, PREFIX)
    }

    /// Makes one whose name begins with `prefix`.
    pub(crate) fn make_named(tmp: &Directory, prefix: &str) -> Result<Self, DiskError> {
        let process = std::process::id();
        loop {
            let name = format!("{prefix}{process}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            if !tmp.make_private(&name)? {
                // By a process of this id that is dead, or in another PID namespace.
                continue;
            }
            // Until it is locked, a cleaner may take it for a dead one's.
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

    /// Files in it leave some of the disk to others.
    pub(crate) fn leaving(mut self, room: Room) -> Self {
        self.directory.leave(room);
        self
    }

    /// Leaves the directory to [`clear`] if it is dropped when it is time to give up.
    pub(crate) fn left_when(mut self, give_up: &Arc<GiveUp>) -> Self {
        self.left = Some(Arc::clone(give_up));
        self
    }

    /// Removes the directory and what is in it.
    pub(crate) fn remove(mut self) -> Result<(), DiskError> {
        self.gone = true;
        self.tmp.remove_tree(&self.name)
    }

    /// The directory, with its lock, and its name. It is not removed when it is dropped.
    pub(crate) fn into_parts(mut self) -> Result<(Directory, String), DiskError> {
        let directory = self.directory.try_clone()?;
        self.gone = true;
        Ok((directory, std::mem::take(&mut self.name)))
    }

    /// Makes the directory something else: it gets another name, and keeps its lock.
    pub(crate) fn publish(
        mut self,
        to: &Directory,
        name: &str,
    ) -> Result<Option<Directory>, DiskError> {
        // The same open file, so that the lock stays. It can fail for want of descriptors, so it comes first.
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
            tracing::debug!(work = self.name, %error, "cannot remove the work directory: the next command does");
        }
    }
}

/// Whether the maker of such a directory lives.
#[derive(Debug)]
pub(crate) enum Owner {
    /// Somebody has it locked.
    Alive,
    /// Nobody had: now we do.
    Dead(Directory),
    /// There is no such directory.
    Gone,
}

/// Asks by trying the lock.
pub(crate) fn owner(parent: &Directory, name: &str) -> Result<Owner, DiskError> {
    match parent.open_if_there(name)? {
        None => Ok(Owner::Gone),
        Some(directory) if !directory.try_lock()? => Ok(Owner::Alive),
        // Somebody may have removed it, and another made a new one of this name.
        Some(directory) if !directory.is_linked()? => Ok(Owner::Gone),
        // Its maker is dead, but not the program that it started.
        Some(directory) if directory.is_file_locked(LOCK)? => Ok(Owner::Alive),
        Some(directory) => Ok(Owner::Dead(directory)),
    }
}

/// Whether the maker of such a directory lives, or a program that was given its lock.
pub(crate) fn is_alive(directory: &Directory) -> Result<bool, DiskError> {
    Ok(directory.is_locked()? || directory.is_file_locked(LOCK)?)
}

/// The names of all such directories.
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

/// Whether a name is of a directory that only has to go.
pub(crate) fn is_hidden(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| rest.starts_with(HIDDEN))
}

/// Whether this can be the name of such a directory.
pub(crate) fn is_name(name: &str) -> bool {
    name.starts_with(PREFIX) && name.bytes().all(|it| it.is_ascii_graphic() && it != b'/')
}

/// Moves a directory from where others see it to where the next command removes it, once it is not locked any more. Answers
/// it by its new path, and its new name.
pub(crate) fn hide(
    parent: &Directory,
    name: &str,
    directory: &Directory,
    tmp: &Directory,
) -> Result<(Directory, String), DiskError> {
    let process = std::process::id();
    // The same open file, so that the lock stays. It can fail for want of descriptors, so it comes first.
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

/// Removes the directories of dead commands, and returns their number. A user's container may have written files of other
/// ids. Only root of the user's namespace may remove these, so they stay until a command runs there.
pub(crate) fn clear(tmp: &Directory) -> Result<u64, DiskError> {
    let mut cleared = 0;
    for name in names(tmp)? {
        // The lock is held until the directory is gone.
        let Owner::Dead(_lock) = owner(tmp, &name)? else { continue };
        match tmp.remove_tree(&name) {
            Ok(()) => cleared += 1,
            Err(error) if error.is(Errno::ACCESS) || error.is(Errno::PERM) => {
                tracing::debug!(name, %error, "the directory of a dead command stays");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(cleared)
}
