//! Marks of images that came with an index. A mark is set before such an image gets its name, and removed by an
//! import of the image's layers.

use std::collections::BTreeSet;
use std::io;

use image::verity::ImageId;

use super::{State, Transaction};
use crate::disk::DiskError;
use crate::shelf::blob_file::BlobFile;
use crate::shelf::downloads::unproven::{MANIFESTS_MAX, UnprovenError, UnprovenMark, encode};
use crate::store::Store;
use image::digest::Digest;

impl Transaction<'_> {
    /// Marks an image of this import or of the store, because the layers of this manifest may make another image. The
    /// mark is set before the image is published, and stays until an import of the layers that calls
    /// [`proven`](Self::proven) is committed.
    pub fn unproven(&self, image: ImageId, manifest: Digest) {
        self.state().unproven.entry(image).or_default().insert(manifest);
    }

    /// Records that the layers of this manifest make the image, because this import has read them and compared their
    /// digests. Without a manifest, the image was made from local data.
    pub fn proven(&self, image: ImageId, manifest: Option<Digest>) {
        self.state().proven.entry(image).or_default().extend(manifest);
    }

    /// Sets the marks, durably. The caller holds the store's lock and the lock of `tmp/`.
    pub(super) fn set_marks(&self, state: &State) -> Result<(), DiskError> {
        let mut is_new = false;
        for (image, manifests) in &state.unproven {
            let Some(all) = self.store.with_unproven(image, manifests)? else { continue };
            self.write_mark(image, &all)?;
            is_new = true;
        }
        if is_new { self.store.downloads.directory.sync() } else { Ok(()) }
    }

    /// Removes proven manifests from the marks, and manifests that no name needs any more. The refs of this import
    /// are already published, and the caller holds both locks.
    pub(super) fn clear_marks(&self, state: &State) -> Result<(), DiskError> {
        let Store { downloads, refs, .. } = self.store;
        let mut left = Vec::new();
        for (image, proven) in &state.proven {
            if !downloads.is_unproven(image)? {
                continue;
            }
            let (all, bad) = refs.readable()?;
            let named = all.into_values().filter(|it| it.image == *image);
            let named: BTreeSet<Digest> = named.filter_map(|it| it.manifest).collect();
            let marked = match downloads.unproven(image) {
                // The image may belong to a ref that cannot be read.
                Ok(Some(marked)) if !bad.is_empty() => marked,
                Ok(Some(marked)) => &marked & &named,
                Ok(None) => continue,
                Err(UnprovenError::Disk(error)) => return Err(error),
                Err(UnprovenError::Damaged { .. }) => named,
            };
            left.push((image, UnprovenMark { manifests: &marked - proven, is_proven: true }));
        }
        if left.is_empty() {
            return Ok(());
        }
        // A crash must not bring back a name whose mark is gone.
        refs.directory.sync()?;
        for (image, left) in &left {
            if left.manifests.is_empty() {
                downloads.directory.unlink(BlobFile::Unproven(**image).file_name())?;
            } else {
                self.write_mark(image, left)?;
            }
        }
        downloads.directory.sync()
    }

    fn write_mark(&self, image: &ImageId, mark: &UnprovenMark) -> Result<(), DiskError> {
        self.store.check_mark(image, mark)?;
        let (number, mut file) = self.new_file()?;
        file.write_all(&encode(image, mark))?;
        let (number, name) = (number.to_string(), BlobFile::Unproven(*image).file_name());
        self.work.directory.sync_file(&number)?;
        self.work.directory.rename_over(&number, &self.store.downloads.directory, &name)
    }
}

impl Store {
    /// Returns an image's mark with new manifests added, or `None` if all are known. A damaged mark is replaced.
    fn with_unproven(
        &self,
        image: &ImageId,
        new: &BTreeSet<Digest>,
    ) -> Result<Option<UnprovenMark>, DiskError> {
        let before = match self.downloads.unproven_mark(image) {
            // An image without a mark was made by an import of layers.
            Ok(None) => {
                let (manifests, is_proven) = (new.clone(), self.images.has(image)?);
                return Ok(Some(UnprovenMark { manifests, is_proven }));
            }
            Ok(Some(before)) if new.is_subset(&before.manifests) => return Ok(None),
            Ok(Some(before)) => before,
            Err(UnprovenError::Disk(error)) => return Err(error),
            Err(error) => {
                tracing::warn!(%image, %error, "replacing a damaged mark");
                UnprovenMark { manifests: self.manifests_of(image)?, is_proven: false }
            }
        };
        let mut manifests = &before.manifests | new;
        if manifests.len() > MANIFESTS_MAX {
            // Normally, most of these manifests have lost their names. The exception is a store with thousands of
            // names for one image.
            let (all, bad) = self.refs.readable()?;
            if bad.is_empty() {
                let named = all.into_values().filter(|it| it.image == *image);
                let named: BTreeSet<Digest> = named.filter_map(|it| it.manifest).collect();
                manifests = &(&before.manifests & &named) | new;
            }
        }
        Ok(Some(UnprovenMark { manifests, ..before }))
    }

    /// Refuses a mark that would be too long to read.
    fn check_mark(&self, image: &ImageId, mark: &UnprovenMark) -> Result<(), DiskError> {
        if mark.manifests.len() <= MANIFESTS_MAX {
            return Ok(());
        }
        let many = format!(
            "{} manifests state that their layers make this image, but none is compared yet: \
            remove some of its names, or pull them without --lazy",
            mark.manifests.len()
        );
        let many = io::Error::new(io::ErrorKind::QuotaExceeded, many);
        Err(self.downloads.directory.failed("write", BlobFile::Unproven(*image).file_name(), many))
    }

    /// Replaces a damaged mark, so that the image stays unproven. The caller holds the store's lock exclusively.
    pub(crate) fn mend_mark(&self, image: &ImageId) -> Result<(), DiskError> {
        let mark = UnprovenMark { manifests: self.manifests_of(image)?, is_proven: false };
        self.check_mark(image, &mark)?;
        let mark = encode(image, &mark);
        let name = BlobFile::Unproven(*image).file_name();
        self.tmp.replace(&self.downloads.directory, name, &mark)
    }

    /// Returns all known manifests from which an image may have been made.
    fn manifests_of(&self, image: &ImageId) -> Result<BTreeSet<Digest>, DiskError> {
        let named = self.refs.readable()?.0.into_values().filter(|it| it.image == *image);
        let mut all: BTreeSet<Digest> = named.filter_map(|it| it.manifest).collect();
        // A damaged record of origins is reported separately.
        let origins = self.downloads.origins(image).unwrap_or_default();
        all.extend(origins.into_iter().filter_map(|it| it.manifest));
        Ok(all)
    }
}
