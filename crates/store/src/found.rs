//! What a running import relies on in the store, listed in its work directory: `gc` leaves it alone.
//!
//! Why the two never miss each other: `docs/format/object-store.md`, "Imports that run".

use std::collections::{BTreeSet, HashSet};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, OnceLock, PoisonError};

use image::digest::Digest;
use image::verity::{ImageId, ObjectId};

use crate::disk::{Directory, DiskError, ListFile, length};
use crate::shelf::item::StoreItem;
use crate::staging::{self, Owner};
use crate::store::Store;

/// The file that lists images, layers and manifests, one a line.
const KEPT: &str = "kept";
/// The file that lists objects: the first bytes of the id of each.
const FOUND: &str = "found";
#[cfg(test)]
pub(crate) const LISTS: [&str; 2] = [KEPT, FOUND];
/// A line of an import that looks into devices: no device is changed as long as it runs.
const DEVICES: &str = "devices";
/// Bytes of an object's id in a list. Another object with the same ones is kept, too, until the import ends.
const PREFIX: usize = 8;

type Prefix = [u8; PREFIX];

fn prefix(id: &ObjectId) -> Prefix {
    *id.as_bytes().first_chunk().expect("32 are more than 8")
}

/// The lists of an import, to add to.
#[derive(Debug)]
pub(crate) struct FoundLists {
    work: Directory,
    kept: ListFile,
    found: OnceLock<ListFile>,
    making: Mutex<()>,
}

impl FoundLists {
    /// Makes those of the import with this work directory. The store's lock is held.
    pub(crate) fn make(work: &Directory) -> Result<Self, DiskError> {
        let (work, kept) = (work.try_clone()?, work.create_list(KEPT)?);
        Ok(Self { work, kept, found: OnceLock::new(), making: Mutex::default() })
    }

    /// Adds objects, before the caller looks whether they are there.
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

    /// Adds an image, a layer or a manifest. The store's lock is held.
    pub(crate) fn add(&self, item: &StoreItem) -> Result<(), DiskError> {
        self.kept.add(format!("{} {}\n", item.kind(), item.name()).as_bytes())
    }

    /// Notes that the import looks into devices. The store's lock is held.
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

/// The imports that run, and what they have listed.
#[derive(Debug, Default)]
pub(crate) struct RunningImports {
    /// Names of their work directories.
    pub(crate) names: Vec<String>,
    /// Those of them that have lists.
    listing: Vec<Listing>,
    /// Those of them that have no lists: each may have found anything.
    pub(crate) unlisted: Vec<String>,
    /// Whether one looks into devices.
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
    /// Up to where the list of objects was read, in bytes.
    read: u64,
}

impl RunningImports {
    /// Reads all lists. The store's lock is held exclusively, or what is listed next is not seen.
    pub(crate) fn of(store: &Store) -> Result<Self, DiskError> {
        let mut all = Self::default();
        all.refresh(store)?;
        Ok(all)
    }

    /// Finds imports that have begun or ended since, and reads what was added to the lists.
    pub(crate) fn refresh(&mut self, store: &Store) -> Result<(), DiskError> {
        let mut before = std::mem::take(&mut self.listing);
        self.names.clear();
        self.unlisted.clear();
        self.has_devices = false;
        for name in staging::names(&store.tmp)?.into_iter().filter(|name| !staging::is_hidden(name))
        {
            if !matches!(staging::owner(&store.tmp, &name)?, Owner::Alive) {
                continue;
            }
            // Another import may have the name by now.
            let known = before.iter().position(|it| it.name == name);
            let known = known.map(|at| before.swap_remove(at));
            let listing = match known {
                Some(known) if known.work.is_linked()? => known,
                _ => {
                    // It may have ended since.
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

    /// Whether an import may have found anything.
    pub(crate) const fn has_unlisted(&self) -> bool {
        !self.unlisted.is_empty()
    }

    /// Whether any device may be relied on.
    pub(crate) const fn need_devices(&self) -> bool {
        self.has_unlisted() || self.has_devices
    }

    /// Whether an object was listed.
    pub(crate) fn has_object(&self, id: &ObjectId) -> bool {
        self.objects.contains(&prefix(id))
    }

    /// Reads what was added to the lists of objects.
    pub(crate) fn read_objects(&mut self) -> Result<(), DiskError> {
        for listing in &mut self.listing {
            // Those that have ended have published what they found, or need it no more.
            let Some((file, stat)) = listing.work.read(FOUND)? else { continue };
            let more = length(&stat).saturating_sub(listing.read) / PREFIX as u64 * PREFIX as u64;
            let mut bytes = vec![0; usize::try_from(more).unwrap_or(0)];
            let read = file.read_exact_at(&mut bytes, listing.read);
            read.map_err(|source| listing.work.failed("read", FOUND, source))?;
            let (prefixes, _) = bytes.as_chunks::<PREFIX>();
            // A slot that is still empty is of an import that has not looked yet. It is read again.
            let full = prefixes.iter().take_while(|it| **it != [0; PREFIX]).count();
            listing.read += (full * PREFIX) as u64;
            self.objects.extend(prefixes.iter().filter(|it| **it != [0; PREFIX]));
        }
        Ok(())
    }

    /// Returns `None` if a line is from a later version.
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
