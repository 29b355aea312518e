//! Lists of the items in the store that running imports rely on, kept in their work directories. `gc` keeps these
//! items.
//!
//! `docs/format/object-store.md`, "Imports that run", explains why `gc` sees every item in time.

use std::collections::{BTreeSet, HashSet};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, OnceLock, PoisonError};

use image::digest::Digest;
use image::verity::{ImageId, ObjectId};

use crate::disk::{Directory, DiskError, ListFile, length};
use crate::shelf::item::StoreItem;
use crate::staging::{self, Owner};
use crate::store::Store;

/// File that lists images, layers and manifests, one per line.
const KEPT: &str = "kept";
/// File that lists objects by the first bytes of their ids.
const FOUND: &str = "found";
#[cfg(test)]
pub(crate) const LISTS: [&str; 2] = [KEPT, FOUND];
/// Line of an import that looks up data in devices. While the import runs, no device is changed.
const DEVICES: &str = "devices";
/// Bytes of an object id in a list. Another object with the same prefix is also kept until the import ends.
const PREFIX: usize = 8;

type Prefix = [u8; PREFIX];

fn prefix(id: &ObjectId) -> Prefix {
    *id.as_bytes().first_chunk().expect("32 bytes are more than 8")
}

/// The lists of one import, open for additions.
#[derive(Debug)]
pub(crate) struct FoundLists {
    work: Directory,
    kept: ListFile,
    found: OnceLock<ListFile>,
    making: Mutex<()>,
}

impl FoundLists {
    /// Creates the lists of the import with this work directory. The caller holds the store's lock.
    pub(crate) fn make(work: &Directory) -> Result<Self, DiskError> {
        let (work, kept) = (work.try_clone()?, work.create_list(KEPT)?);
        Ok(Self { work, kept, found: OnceLock::new(), making: Mutex::default() })
    }

    /// Adds objects. The caller must do this before it checks whether they are in the store.
    pub(crate) fn add_objects<'i>(
        &self,
        ids: impl IntoIterator<Item = &'i ObjectId>,
    ) -> Result<(), DiskError> {
        let bytes: Vec<u8> = ids.into_iter().flat_map(prefix).collect();
        match bytes.is_empty() {
            true => Ok(()),
            false => self.found()?.add(&bytes),
        }
    }

    /// Adds an image, a layer or a manifest. The caller holds the store's lock.
    pub(crate) fn add(&self, item: &StoreItem) -> Result<(), DiskError> {
        self.kept.add(format!("{} {}\n", item.kind(), item.name()).as_bytes())
    }

    /// Notes that the import looks up data in devices. The caller holds the store's lock.
    pub(crate) fn add_devices(&self) -> Result<(), DiskError> {
        self.kept.add(format!("{DEVICES}\n").as_bytes())
    }

    fn found(&self) -> Result<&ListFile, DiskError> {
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        let _alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        let found = self.work.create_list(FOUND)?;
        Ok(self.found.get_or_init(|| found))
    }
}

/// The running imports and the items in their lists.
#[derive(Debug, Default)]
pub(crate) struct RunningImports {
    /// Names of the imports' work directories.
    pub(crate) names: Vec<String>,
    /// Imports that have lists.
    listing: Vec<Listing>,
    /// Work directories of imports without readable lists, which may rely on any item.
    pub(crate) unlisted: Vec<String>,
    /// Whether an import looks up data in devices.
    pub(crate) has_devices: bool,
    pub(crate) images: BTreeSet<ImageId>,
    pub(crate) layers: BTreeSet<Digest>,
    pub(crate) manifests: BTreeSet<Digest>,
    objects: HashSet<Prefix>,
}

#[derive(Debug)]
struct Listing {
    name: String,
    work: Directory,
    /// Length in bytes of the list of objects that was already read.
    read: u64,
}

impl RunningImports {
    /// Reads all lists. The caller holds the store's lock exclusively, or misses later additions.
    pub(crate) fn from_store(store: &Store) -> Result<Self, DiskError> {
        let mut all = Self::default();
        all.refresh(store)?;
        Ok(all)
    }

    /// Finds imports that have begun or ended since the last call, and reads additions to the lists.
    pub(crate) fn refresh(&mut self, store: &Store) -> Result<(), DiskError> {
        let mut before = std::mem::take(&mut self.listing);
        self.names.clear();
        self.unlisted.clear();
        self.has_devices = false;
        for name in staging::names(&store.tmp)?.into_iter().filter(|it| staging::may_be_import(it))
        {
            if !matches!(staging::owner(&store.tmp, &name)?, Owner::Alive) {
                continue;
            }
            // Another import may have taken the name of the work directory in the meantime.
            let known = before.iter().position(|it| it.name == name);
            let known = known.map(|at| before.swap_remove(at));
            let listing = match known {
                Some(known) if known.work.is_linked()? => known,
                _ => {
                    // The import may have ended since its name was listed.
                    let Some(work) = store.tmp.open_if_there(&name)? else { continue };
                    Listing { name: name.clone(), work, read: 0 }
                }
            };
            let kept = listing.work.read_all(KEPT, u64::MAX)?;
            if kept.is_none_or(|it| self.read_kept(&it).is_none()) {
                self.unlisted.push(name.clone());
            }
            self.listing.push(listing);
            self.names.push(name);
        }
        self.read_objects()
    }

    /// Whether an import may rely on any item.
    pub(crate) const fn has_unlisted(&self) -> bool {
        !self.unlisted.is_empty()
    }

    /// Whether an import may rely on any device.
    pub(crate) const fn need_devices(&self) -> bool {
        self.has_unlisted() || self.has_devices
    }

    /// Whether an import listed the object.
    pub(crate) fn has_object(&self, id: &ObjectId) -> bool {
        self.objects.contains(&prefix(id))
    }

    /// Reads additions to the lists of objects.
    pub(crate) fn read_objects(&mut self) -> Result<(), DiskError> {
        for listing in &mut self.listing {
            // The file is missing if the import has listed no object. If the import has ended, its objects are
            // published or no longer needed.
            let Some((file, stat)) = listing.work.read(FOUND)? else { continue };
            let more = length(&stat).saturating_sub(listing.read) / PREFIX as u64 * PREFIX as u64;
            let mut bytes = vec![0; usize::try_from(more).unwrap_or(0)];
            let read = file.read_exact_at(&mut bytes, listing.read);
            read.map_err(|source| listing.work.failed("read", FOUND, source))?;
            let (prefixes, _) = bytes.as_chunks::<PREFIX>();
            // An empty slot belongs to a thread that has not looked up its objects yet. The slot is read again next
            // time.
            let full = prefixes.iter().take_while(|it| **it != [0; PREFIX]).count();
            listing.read += (full * PREFIX) as u64;
            self.objects.extend(prefixes.iter().filter(|it| **it != [0; PREFIX]));
        }
        Ok(())
    }

    /// Returns `None` if a line is unknown, because a later version wrote it.
    fn read_kept(&mut self, kept: &[u8]) -> Option<()> {
        String::from_utf8_lossy(kept).lines().try_for_each(|line| self.read_line(line))
    }

    fn read_line(&mut self, line: &str) -> Option<()> {
        if line == DEVICES {
            self.has_devices = true;
            return Some(());
        }
        let (kind, name) = line.split_once(' ')?;
        match kind {
            "image" => drop(self.images.insert(name.parse().ok()?)),
            "layer" => drop(self.layers.insert(name.parse().ok()?)),
            "manifest" => drop(self.manifests.insert(name.parse().ok()?)),
            _ => return None,
        }
        Some(())
    }
}
