//! Makes room for what is damaged to be imported again.

use crate::digest::Digest;
use crate::disk::Directory;
use crate::fsck::{Damage, FsckError, FsckOptions, FsckReport};
use crate::manifests::ManifestError;
use crate::store::Store;
use crate::trash::Item;

impl Store {
    /// Removes every object, image, layer and manifest that a check found damaged and that still is.
    /// An import of the same content then brings it back: as long as a damaged object is there, an
    /// import takes it for the one that it needs. Until then, what needs it fails to open, instead of
    /// reading wrong bytes. Answers how many were removed.
    ///
    /// # Errors
    /// [`FsckError::Busy`] while imports run, which may rely on what is there; or the disk.
    pub fn remove_damaged(&self, report: &FsckReport) -> Result<u64, FsckError> {
        if !self.is_writable() {
            return Err(FsckError::ReadOnly(self.path().to_owned()));
        }
        let _lock = self.lock_exclusive()?;
        if !self.running_imports()?.is_empty() {
            return Err(FsckError::Busy);
        }
        let mut removed = 0;
        for (damage, _) in &report.damage {
            let Some(item) = item(damage) else { continue };
            if !self.is_damaged(&item) {
                continue;
            }
            let place = item.place(self)?;
            removed += u64::from(remove(&place, &item.file_name())?);
        }
        Ok(removed)
    }

    fn is_damaged(&self, item: &Item) -> bool {
        let layer = |digest: &Digest| self.layer(digest).is_err();
        match item {
            Item::Object(id) => !self.is_sound_object(id),
            Item::Image(id) => !self.is_sound_image(id),
            Item::Layer(digest) => layer(digest),
            Item::Manifest(digest) => {
                matches!(self.manifest(digest), Err(ManifestError::Mismatch { .. }))
            }
        }
    }
}

fn remove(place: &Directory, name: &str) -> Result<bool, FsckError> {
    let removed = place.unlink_sealed(name)?;
    place.sync()?;
    Ok(removed)
}

/// What to remove, where the damage is in a file that is named by its content.
fn item(damage: &Damage) -> Option<Item> {
    match damage {
        Damage::Object { expected, .. } | Damage::Unreadable(expected, _) => {
            Some(Item::Object(*expected))
        }
        Damage::Image { expected, .. } => Some(Item::Image(*expected)),
        Damage::Layer(diff_id, _) => Some(Item::Layer(*diff_id)),
        Damage::Manifest(digest, _) => Some(Item::Manifest(*digest)),
        Damage::Missing(_)
        | Damage::Size { .. }
        | Damage::BadImage(..)
        | Damage::Ref(..)
        | Damage::Container(..)
        | Damage::Stray(_) => None,
    }
}

/// One thread: it is a few files.
pub(crate) const ALONE: FsckOptions = FsckOptions { threads: 1 };
