//! The shelves of a store: one directory for each kind of item.
//!
//! A shelf knows the file names in its directory and the files' contents. It does not depend on the store or on
//! imports.

pub(crate) mod absent;
pub(crate) mod blob_file;
pub(crate) mod container_snapshot_error;
pub(crate) mod container_snapshots;
pub(crate) mod containers;
pub(crate) mod data_error;
pub(crate) mod devices;
pub(crate) mod downloads;
pub(crate) mod images;
pub(crate) mod index_damage;
pub(crate) mod item;
pub(crate) mod layers;
pub(crate) mod lazy_device_file;
pub(crate) mod lazy_devices;
pub(crate) mod manifests;
pub(crate) mod networks;
pub(crate) mod objects;
pub(crate) mod refs;
pub(crate) mod snapshots;
pub(crate) mod volumes;

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::disk::{Directory, DiskError, Listed, length};
use crate::meta::SHARED_MARK;
use item::StoreItem;

/// A directory that is created with its first entry and never removed.
#[derive(Debug)]
pub(crate) struct LateDirectory {
    root: Arc<Directory>,
    name: &'static str,
    opened: OnceLock<Directory>,
}

impl LateDirectory {
    pub(crate) const fn new(root: Arc<Directory>, name: &'static str) -> Self {
        Self { root, name, opened: OnceLock::new() }
    }

    /// Returns the directory, if it exists.
    pub(crate) fn get(&self) -> Result<Option<&Directory>, DiskError> {
        if self.opened.get().is_none() {
            let directory = match self.root.open_if_there(self.name) {
                Ok(Some(directory)) => directory,
                Ok(None) => return Ok(None),
                // In a shared store, other users cannot and need not open a private directory.
                Err(error) => {
                    let is_others = error.is(Errno::ACCESS);
                    return match is_others && self.root.stat(SHARED_MARK)?.is_some() {
                        true => Ok(None),
                        false => Err(error),
                    };
                }
            };
            // Another thread may have opened the directory first.
            drop(self.opened.set(directory));
        }
        Ok(self.opened.get())
    }

    /// Returns the directory, which must exist.
    pub(crate) fn existing(&self) -> Result<&Directory, DiskError> {
        let gone = || self.root.failed("open directory", self.name, Errno::NOENT);
        self.get()?.ok_or_else(gone)
    }
}

/// The sorted names on a shelf, and the paths of files that do not belong there.
#[derive(Debug)]
pub(crate) struct Listing<T> {
    pub(crate) names: Vec<T>,
    pub(crate) strays: Vec<PathBuf>,
}

impl<T: Ord> Listing<T> {
    fn read(directory: &Directory, name: impl Fn(&Listed) -> Option<T>) -> Result<Self, DiskError> {
        let (mut names, mut strays) = (Vec::new(), Vec::new());
        for listed in directory.list()? {
            match name(&listed) {
                Some(name) => names.push(name),
                None => strays.push(directory.path_of(&listed.name)),
            }
        }
        names.sort_unstable();
        Ok(Self { names, strays })
    }
}

/// Result of checking items one by one.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    /// Number of checked items.
    pub(crate) count: u64,
    /// Damaged items, with a description of the damage.
    pub(crate) damage: Vec<(StoreItem, String)>,
}

impl Checked {
    fn add(&mut self, item: StoreItem, damage: Option<String>) {
        self.count += 1;
        self.damage.extend(damage.map(|why| (item, why)));
    }
}

pub(crate) fn is_file_of(stat: &Stat, size: u64) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && length(stat) == size
}

/// Whether a mount or a process has a file open. If that cannot be determined, `true`.
fn is_in_use(directory: &Directory, name: &str) -> bool {
    // If the name belongs to something other than a regular file, `fsck` reports this, and the image is not mounted.
    let Ok(Some((file, _))) = directory.read(name) else { return false };
    kernel::lease::in_use(file.as_fd()).unwrap_or_else(|error| {
        tracing::warn!(name, %error, "keeping a file, because it may be in use");
        true
    })
}
