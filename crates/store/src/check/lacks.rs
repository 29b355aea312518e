//! Finds images and layers that lack data, because data was lost, or was damaged and removed. In a root of such an
//! image, files that lack data would seem not to exist, so no root is made. See `docs/format/object-store.md`, "Images
//! that lack data".

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};

use image::tar::recipe::{Operation, Reader};
use image::verity::{ImageId, ObjectId};
use serde::Serialize;

use crate::disk::{DiskError, length};
use crate::mount_view::open::{OpenImage, OpenImageError, table_failed};
use crate::record;
use crate::shelf::absent;
use crate::shelf::blob_file::BlobFile;
use crate::shelf::images::{self, LackingData, Use};
use crate::shelf::is_file_of;
use crate::shelf::layers::StoredLayerError;
use crate::shelf::refs::Form;
use crate::store::Store;
use image::digest::Digest;

/// A file of an image whose bytes are not all in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LackingFile {
    /// Path of the file in the image.
    pub path: Vec<u8>,
    pub data: LackingData,
}

/// Record of the mark, as written.
#[derive(Debug, Serialize)]
struct Raw {
    image: String,
}

impl Store {
    /// Returns the files of an image whose bytes are not in the store, from the sizes of objects and the indexes of
    /// devices. The data is not read. Devices that are filled on demand lack nothing.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent or cannot be read.
    pub fn lacking(&self, image: &ImageId) -> Result<Vec<LackingFile>, OpenImageError> {
        let _lock = self.lock_shared()?;
        self.lacking_locked(image)
    }

    /// As [`lacking`](Self::lacking), for callers that hold the store's lock.
    fn lacking_locked(&self, image: &ImageId) -> Result<Vec<LackingFile>, OpenImageError> {
        let file = self.images.open(image)?.ok_or(OpenImageError::Absent(*image))?;
        let mut indexes = BTreeMap::new();
        for device in images::devices(&file)
            .map_err(table_failed(image))?
            .uses
            .iter()
            .filter_map(|it| it.device)
        {
            if self.devices.file(&device).is_some() || self.lazy_devices.file(&device).is_none() {
                indexes.insert(device, self.devices.index_of(&device)?);
            }
        }
        let (mut known, mut lacking, mut failed) = (BTreeMap::new(), Vec::new(), None);
        let mut lacks = |used: &Use| match used {
            Use::Object { object, size } => {
                let is_here = *known.entry((*object, *size)).or_insert_with(|| {
                    let is_here = self.has_file(object, |actual| actual == *size);
                    is_here.unwrap_or_else(|error| {
                        failed = Some(error);
                        true
                    })
                });
                (!is_here).then_some(LackingData::Object(*object))
            }
            Use::Range(part) => {
                let index = indexes.get(&part.device)?.as_ref();
                let is_here =
                    index.is_some_and(|it| it.first_unknown(part.offset, part.len).is_none());
                (!is_here).then_some(LackingData::Device(part.device))
            }
        };
        images::uses(&file, &mut |path, used| {
            let Some(data) = lacks(&used) else { return };
            // A file in several pieces is listed once.
            if lacking.last().is_none_or(|it: &LackingFile| it.path != path) {
                lacking.push(LackingFile { path: path.to_vec(), data });
            }
        })
        .map_err(table_failed(image))?;
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(lacking),
        }
    }

    /// Whether the store has a layer's recipe and all of its objects, and no object is shorter than the recipe states.
    /// The objects are not read.
    ///
    /// # Errors
    /// [`StoredLayerError`] if the disk cannot be read. A damaged recipe is not an error.
    pub fn has_whole_layer(&self, diff_id: &Digest) -> Result<bool, StoredLayerError> {
        let layer = match self.layers.open(diff_id) {
            Ok(Some(layer)) => layer,
            Ok(None) | Err(StoredLayerError::Damaged { .. }) => return Ok(false),
            Err(StoredLayerError::Disk(error)) if error.is_not_a_file() => return Ok(false),
            Err(error) => return Err(error),
        };
        let mut ends: BTreeMap<ObjectId, u64> =
            layer.info().objects.iter().map(|it| (*it, 0)).collect();
        let Ok(mut recipe) = Reader::new(layer.recipe()?) else { return Ok(false) };
        loop {
            match recipe.next_operation() {
                Ok(Some(Operation::Range { object, segment })) => {
                    let end = ends.entry(*object).or_default();
                    *end = (*end).max(segment.end());
                }
                Ok(Some(Operation::Verbatim(_))) => {}
                Ok(None) => break,
                Err(_) => return Ok(false),
            }
        }
        for (object, end) in ends {
            if !self.has_file(&object, |actual| actual >= end)?
                && self.devices.find_object(&object)?.is_none_or(|it| it.size < end)
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As [`has_whole_layer`](Self::has_whole_layer), for all layers of an image. An image that was pulled without its
    /// layers counts as whole.
    ///
    /// # Errors
    /// As [`has_whole_layer`](Self::has_whole_layer).
    pub fn has_whole_layers(
        &self,
        image: &ImageId,
        diff_ids: &[Digest],
    ) -> Result<bool, StoredLayerError> {
        // A lookup error is reported when the image is opened.
        if self.is_indexed(image).unwrap_or(false) {
            return Ok(true);
        }
        for diff_id in diff_ids {
            if !self.has_whole_layer(diff_id)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn has_file(
        &self,
        object: &ObjectId,
        is_size: impl Fn(u64) -> bool,
    ) -> Result<bool, DiskError> {
        let (_, rest) = crate::shelf::objects::split(object);
        let stat = match self.objects.shard(object)? {
            Some(shard) => shard.stat(rest)?,
            None => None,
        };
        Ok(stat.is_some_and(|stat| is_file_of(&stat, length(&stat)) && is_size(length(&stat))))
    }

    /// Refuses an image that a repair has marked, as long as it lacks data. In roots of other images, opening a file
    /// that lacks data fails. This needs `absent/`, so the whole image is checked if the store has no `absent/`.
    pub(crate) fn check_lacking(&self, opened: &mut OpenImage) -> Result<(), OpenImageError> {
        let image = &opened.id;
        if opened.form == Form::Objects && opened.absent.is_none() && self.is_writable() {
            opened.absent = self.make_absent();
        }
        let tells = opened.form != Form::Objects || opened.absent.is_some();
        let is_marked = self.downloads.is_lacking(image)?;
        if tells && !is_marked {
            return Ok(());
        }
        // The lock keeps repairs from removing data during the check.
        let _lock = self.lock_shared()?;
        let lacking = self.lacking_locked(image)?;
        let Some(LackingFile { path, data }) = lacking.first() else {
            if is_marked && self.is_writable() {
                self.unmark_lacking(image);
            }
            return Ok(());
        };
        Err(OpenImageError::Lacking {
            image: *image,
            files: lacking.len(),
            path: path.clone(),
            data: Box::new(*data),
        })
    }

    /// Opens the directory `absent/`, if it is complete.
    pub(crate) fn absent(&self) -> Option<OwnedFd> {
        let opened = absent::open(&self.root).unwrap_or_else(|error| {
            tracing::debug!(%error, "looking up every object to find absent ones");
            None
        });
        opened?.as_fd().try_clone_to_owned().ok()
    }

    /// Creates the missing parts of the directory `absent/`, and opens it.
    fn make_absent(&self) -> Option<OwnedFd> {
        if let Err(error) = absent::make(&self.root) {
            tracing::debug!(%error, "looking up every object to find absent ones");
        }
        self.absent()
    }

    /// Removes the marks of images that no longer lack data. The caller holds the store's lock.
    pub(crate) fn settle_lacking<'i>(&self, images: impl Iterator<Item = &'i ImageId>) {
        for image in images {
            let is_marked = self.downloads.is_lacking(image).unwrap_or(false);
            if is_marked && self.lacking_locked(image).is_ok_and(|lacking| lacking.is_empty()) {
                self.unmark_lacking(image);
            }
        }
    }

    /// Removes a mark. A remaining mark is harmless, but causes a check of the image's data at each use.
    fn unmark_lacking(&self, image: &ImageId) {
        let name = BlobFile::Lacking(*image).file_name();
        if let Err(error) = self.downloads.directory.unlink(name) {
            tracing::debug!(%error, "cannot remove the mark of an image that is complete again");
        }
    }

    /// Marks an image before data of it is removed. The caller holds the store's lock exclusively.
    pub(crate) fn mark_lacking(&self, image: &ImageId) -> Result<(), DiskError> {
        if self.downloads.is_lacking(image)? {
            return Ok(());
        }
        let mark = record::encode(&Raw { image: image.to_string() });
        let name = BlobFile::Lacking(*image).file_name();
        self.tmp.replace(&self.downloads.directory, name, &mark)
    }

    /// Returns the number of images that a repair has marked because they lack data. Images that have got their data
    /// back count until their next use.
    ///
    /// # Errors
    /// [`DiskError`] if marks cannot be listed.
    pub fn count_lacking(&self) -> Result<usize, DiskError> {
        let names = self.downloads.list()?.names;
        Ok(names.into_iter().filter(|it| matches!(it, BlobFile::Lacking(_))).count())
    }

    /// Removes the marks of images that no longer lack data. Returns the other marked images.
    ///
    /// # Errors
    /// [`DiskError`] if marks cannot be listed or removed.
    pub fn clear_lacking(&self) -> Result<Vec<ImageId>, DiskError> {
        let _lock = self.lock_shared()?;
        self.clear_lacking_locked()
    }

    /// As [`clear_lacking`](Self::clear_lacking), for callers that hold the store's lock.
    pub(crate) fn clear_lacking_locked(&self) -> Result<Vec<ImageId>, DiskError> {
        let mut still = Vec::new();
        for file in self.downloads.list()?.names {
            let BlobFile::Lacking(image) = file else { continue };
            match self.lacking_locked(&image) {
                Ok(lacking) if lacking.is_empty() => {
                    self.downloads.directory.unlink(file.file_name())?;
                }
                // The next `gc` removes this mark.
                Err(OpenImageError::Absent(_)) => {}
                Ok(_) | Err(_) => still.push(image),
            }
        }
        Ok(still)
    }
}
