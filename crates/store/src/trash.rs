//! Garbage between its place and its end.
//!
//! `gc` renames garbage into `tmp/trash-…/` while it holds the store's lock, and unlinks it there without the lock, since
//! a file system may need a long time for a single unlink. The names of the imports that run are in a file beside the
//! garbage. `gc` reads what they have listed, puts these objects back, and unlinks the others. Imports of earlier versions
//! have no lists: then the trash stays until all of these imports have ended. Each of them looks there before it
//! publishes, and puts back what it needs. The same holds for the trash of a `gc` that was killed.

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
/// In a trash, begins the name of what had the immutable flag, and gets it back with its place.
const SEALED: &str = "sealed-";
/// In a trash, the names of the imports that it waits for, one a line.
const WAITS: &str = "waits";

/// The name of something in a trash.
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

/// A trash that is being filled. It is locked, so that nobody takes it for one to remove.
#[derive(Debug)]
pub(crate) struct Trash {
    directory: Directory,
    name: String,
    /// The imports whose names are in its file.
    waits: BTreeSet<String>,
}

impl Trash {
    /// Makes one that waits for these imports. Before anything is put there, the caller makes sure with the store locked
    /// exclusively that they are [all that run](Self::waits_for).
    pub(crate) fn make(store: &Store, waits: &[String]) -> Result<Self, DiskError> {
        let work = Workspace::make_named(&store.tmp, PREFIX)?;
        let mut file = work.directory.create(WAITS)?;
        file.write_all(waits.join("\n").as_bytes())?;
        drop(file);
        let (directory, name) = work.into_parts()?;
        Ok(Self { directory, name, waits: waits.iter().cloned().collect() })
    }

    /// Whether it waits for each of these imports.
    pub(crate) fn waits_for(&self, imports: &[String]) -> bool {
        imports.iter().all(|it| self.waits.contains(it))
    }

    /// Puts something back in its place. `false` if it is not here.
    pub(crate) fn put_back(&self, store: &Store, item: &StoreItem) -> Result<bool, DiskError> {
        put_back(store, std::slice::from_ref(&self.directory), item)
    }

    /// Removes its contents.
    pub(crate) fn empty(&self) -> Result<(), DiskError> {
        for listed in self.directory.list()? {
            if listed.name != WAITS.as_bytes() {
                self.directory.unlink_sealed(&listed.name)?;
            }
        }
        Ok(())
    }

    /// Removes it and what is in it.
    pub(crate) fn remove(self, tmp: &Directory) -> Result<(), DiskError> {
        tmp.remove_tree(&self.name)
    }

    /// Takes something from its place.
    pub(crate) fn take(
        &self,
        place: &Directory,
        item: &StoreItem,
        name: &str,
    ) -> Result<(), DiskError> {
        match place.rename_new(name, &self.directory, trash_name(item)) {
            Err(error) if error.is(rustix::io::Errno::PERM) => {
                place.unseal(name.as_bytes(), error)?;
                place.rename_new(name, &self.directory, format!("{SEALED}{}", trash_name(item)))?;
            }
            Ok(Renamed::Now | Renamed::Taken) => {}
            // Another gc has taken it.
            Err(error) if error.is(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Every trash there is.
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

/// Puts something back in its place. `false` if no trash has it.
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

/// Without the flag the object is as good: it protects against accidents. (fs-verity stays with a file.)
fn seal_again(place: &Directory, name: &str) {
    let Ok(Some((file, _))) = place.read(name) else { return };
    if let Err(error) = kernel::seal::set_immutable(file.as_fd()) {
        tracing::warn!(%error, name, "cannot set the immutable flag again");
    }
}

/// Removes each trash that waits for nobody any more.
pub(crate) fn clear(tmp: &Directory) -> Result<u64, DiskError> {
    let mut cleared = 0;
    for name in names(tmp)? {
        let Owner::Dead(trash) = staging::owner(tmp, &name)? else { continue };
        let waits = trash.read_all(WAITS, RECORD_MAX)?.unwrap_or_default();
        let waits = String::from_utf8_lossy(&waits);
        let mut waiting = false;
        // A crash may have lost the list; it has ended the imports too.
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
    /// Removes the files of transactions that have ended without their commit: those of dead commands, and those that were left
    /// since their callers wanted an end ([`give_up_when`](Self::give_up_when)). Returns the number of transactions.
    ///
    /// # Errors
    /// [`DiskError`] when something cannot be removed.
    pub fn clear_work(&self) -> Result<u64, DiskError> {
        staging::clear(&self.tmp)
    }

    /// Removes the leftovers of dead commands: work below `tmp/`, and the folders of dead containers that
    /// are not kept. Returns the number of directories. `gc` removes other garbage.
    ///
    /// # Errors
    /// [`ContainerError`] when something cannot be removed.
    pub fn clear_dead(&self) -> Result<u64, ContainerError> {
        let mut cleared = self.clear_work()? + clear(&self.tmp)?;
        for seen in self.containers.see_all()? {
            if !seen.is_garbage() {
                continue;
            }
            cleared += u64::from(self.containers.remove_dead(&seen.id)?);
        }
        Ok(cleared)
    }
}
