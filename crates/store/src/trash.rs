//! Garbage that `gc` has moved away but not yet unlinked.
//!
//! `gc` renames garbage into `tmp/trash-…/` while it holds the store's lock, and unlinks it there without the lock,
//! because a file system may need a long time for a single unlink. A file in the same directory contains the names of
//! the running imports. `gc` reads the lists of these imports, restores the objects in the lists, and unlinks the
//! others. If the lists of an import cannot be read, it may need any item, so the trash then stays until all of these
//! imports have ended. Each import checks the trash before it publishes, and restores the items that it needs. The
//! same holds for the trash of a `gc` that was killed.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;

use rustix::fs::FileType;

use crate::disk::{Directory, DiskError, Renamed};
use crate::record::RECORD_MAX;
use crate::shelf::containers::ContainerError;
use crate::shelf::item::StoreItem;
use crate::staging::{self, Owner, Workspace};
use crate::store::Store;

pub(crate) const PREFIX: &str = "trash-";
/// In a trash, prefix of the name of an item that had the immutable flag, which is set again when the item is
/// restored.
const SEALED: &str = "sealed-";
/// In a trash, file with the names of the imports that it waits for, one per line.
const WAITS: &str = "waits";

/// Returns the name of an item in a trash.
fn trash_name(item: &StoreItem) -> String {
    let file = item.file_name();
    match item {
        StoreItem::Object(id) => format!("object-{id}"),
        StoreItem::Device(_) | StoreItem::DeviceIndex(_) => format!("data-{file}"),
        StoreItem::Blob(_) => format!("blob-{file}"),
        StoreItem::LazyDevice(_) => format!("lazy-{file}"),
        other => format!("{}-{file}", other.kind()),
    }
}

/// A trash that is being filled. It is locked, so that other processes do not remove it.
#[derive(Debug)]
pub(crate) struct Trash {
    directory: Directory,
    name: String,
    /// Imports named in the file `waits`.
    waits: BTreeSet<String>,
}

impl Trash {
    /// Makes a trash that is emptied only after these imports have ended. Before the caller moves items into it, the
    /// caller must check, with the store locked exclusively, that these are [all running imports](Self::waits_for).
    pub(crate) fn make(store: &Store, waits: &[String]) -> Result<Self, DiskError> {
        let work = Workspace::make_named(&store.tmp, PREFIX)?;
        let mut file = work.directory.create(WAITS)?;
        file.write_all(waits.join("\n").as_bytes())?;
        drop(file);
        let (directory, name) = work.into_parts()?;
        Ok(Self { directory, name, waits: waits.iter().cloned().collect() })
    }

    /// Whether the trash waits for each of these imports.
    pub(crate) fn waits_for(&self, imports: &[String]) -> bool {
        imports.iter().all(|it| self.waits.contains(it))
    }

    /// Restores an item. Returns `false` if the trash does not have it.
    pub(crate) fn put_back(&self, store: &Store, item: &StoreItem) -> Result<bool, DiskError> {
        put_back(store, std::slice::from_ref(&self.directory), item)
    }

    /// Removes the items in the trash.
    pub(crate) fn empty(&self) -> Result<(), DiskError> {
        for listed in self.directory.list()? {
            if listed.name != WAITS.as_bytes() {
                self.directory.unlink_sealed(&listed.name)?;
            }
        }
        Ok(())
    }

    /// Removes the trash and its contents.
    pub(crate) fn remove(self, tmp: &Directory) -> Result<(), DiskError> {
        tmp.remove_tree(&self.name)
    }

    /// Moves an item into the trash. Returns `false` if the item is gone.
    pub(crate) fn take(
        &self,
        place: &Directory,
        item: &StoreItem,
        name: &str,
    ) -> Result<bool, DiskError> {
        match place.rename_new(name, &self.directory, trash_name(item)) {
            Err(error) if error.is(rustix::io::Errno::PERM) => {
                place.unseal(name.as_bytes(), error)?;
                place.rename_new(name, &self.directory, format!("{SEALED}{}", trash_name(item)))?;
                Ok(true)
            }
            Ok(Renamed::Now | Renamed::Taken) => Ok(true),
            // Another `gc` has moved it.
            Err(error) if error.is(rustix::io::Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Opens every trash of the store.
pub(crate) fn all(tmp: &Directory) -> Result<Vec<Directory>, DiskError> {
    let mut found = Vec::new();
    for name in names(tmp)? {
        found.extend(tmp.open_if_there(name)?);
    }
    Ok(found)
}

pub(crate) fn names(tmp: &Directory) -> Result<Vec<String>, DiskError> {
    let listed = tmp.list()?;
    let directories = listed.iter().filter(|it| matches!(it.kind, FileType::Directory));
    let names = directories.filter_map(|it| it.text());
    Ok(names.filter(|it| it.starts_with(PREFIX)).map(str::to_owned).collect())
}

/// Restores an item. Returns `false` if no trash has it.
pub(crate) fn put_back(
    store: &Store,
    trashes: &[Directory],
    item: &StoreItem,
) -> Result<bool, DiskError> {
    let place = store.place(item)?;
    for trash in trashes {
        for sealed in [false, true] {
            let mut name = trash_name(item);
            if sealed {
                name.insert_str(0, SEALED);
            }
            match trash.rename_new(name, &place, item.file_name()) {
                Ok(Renamed::Now) if sealed => {
                    seal_again(&place, &item.file_name());
                    return Ok(true);
                }
                Ok(Renamed::Now | Renamed::Taken) => return Ok(true),
                Err(error) if error.is(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(false)
}

/// Sets the immutable flag again. A failure is only logged, because the flag only protects against accidents.
/// fs-verity is not affected by moving a file.
fn seal_again(place: &Directory, name: &str) {
    let Ok(Some((file, _))) = place.read(name) else { return };
    if let Err(error) = kernel::seal::set_immutable(file.as_fd()) {
        tracing::warn!(%error, name, "cannot set the immutable flag again");
    }
}

/// Removes each trash that waits for no running import.
pub(crate) fn clear(tmp: &Directory) -> Result<u64, DiskError> {
    let mut cleared = 0;
    for name in names(tmp)? {
        let Owner::Dead(trash) = staging::owner(tmp, &name)? else { continue };
        let waits = trash.read_all(WAITS, RECORD_MAX)?.unwrap_or_default();
        let waits = String::from_utf8_lossy(&waits);
        let mut waiting = false;
        // A crash may have lost the list, but then it has also ended the imports.
        for import in waits.lines().filter(|it| staging::is_name(it)) {
            waiting |= matches!(staging::owner(tmp, import)?, Owner::Alive);
        }
        if !waiting {
            tmp.remove_tree(&name)?;
            cleared += 1;
        }
    }
    Ok(cleared)
}

impl Store {
    /// Removes the files of transactions that ended without a commit: those of dead commands, and those that were
    /// left because the caller wanted to end early ([`give_up_when`](Self::give_up_when)). Returns the number of
    /// transactions.
    ///
    /// # Errors
    /// [`DiskError`] if a file cannot be removed.
    pub fn clear_work(&self) -> Result<u64, DiskError> {
        staging::clear(&self.tmp)
    }

    /// Removes the leftovers of dead commands: work below `tmp/`, and the directories of dead containers that are not
    /// kept, container snapshots that nothing needs, and volumes that end with such containers. Returns the number of directories. `gc` removes other garbage.
    ///
    /// # Errors
    /// [`ContainerError`] if a directory cannot be removed.
    pub fn clear_dead(&self) -> Result<u64, ContainerError> {
        let mut cleared = self.clear_work()? + clear(&self.tmp)?;
        for seen in self.containers.see_all()? {
            if !seen.is_garbage() {
                continue;
            }
            cleared += u64::from(self.containers.remove_dead(&seen.id)?);
        }
        let snapshots = self.clear_container_snapshots()?.removed;
        Ok(cleared + snapshots + self.clear_volumes()?)
    }
}
