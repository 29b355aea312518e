//! Imports EROFS images in files, and disks with one.

use std::io::Write as _;

use image::verity::ObjectId;

use super::super::copy::KeptMetadata;
use super::super::objects::BATCH;
use super::super::{ImportError, ImportRun, UncommittedImage};
use super::{ErofsFile, FilePiece, FileSource};
use crate::progress::Event;

impl ImportRun<'_> {
    /// Imports an EROFS image. The files of a composefs image are in the store, or are copied from a folder of
    /// objects.
    pub(in crate::import) fn erofs(
        &self,
        file: &ErofsFile,
    ) -> Result<UncommittedImage, ImportError> {
        (self.environment.progress)(Event::Walking);
        let names = file.names(&self.options.limits, self.environment.cancel)?;
        let kept = KeptMetadata { xattrs: self.options.xattrs, times: self.options.times };
        if file.is_composefs() {
            return self.with_objects(names.tree, kept);
        }
        let put = |file: &FileSource<'_>| {
            let object = self.erofs_object(file)?;
            self.has_read(file.size);
            Ok(object)
        };
        let limits = &self.options.limits;
        self.made(file.complete(&names, kept, limits, &self.environment, put)?)
    }

    fn erofs_object(&self, file: &FileSource<'_>) -> Result<ObjectId, ImportError> {
        if usize::try_from(file.size).is_ok_and(|size| size <= BATCH) {
            return self.transaction.object(&file.bytes()?).map_err(ImportError::Object);
        }
        let mut draft = self.transaction.draft().map_err(ImportError::Object)?;
        file.read(|piece| {
            self.go_on()?;
            let written = match piece {
                FilePiece::Data(bytes) => draft.write_all(bytes),
                FilePiece::Hole(count) => draft.zeros(count),
            };
            written.map_err(ImportError::write)
        })?;
        draft.finish().map_err(ImportError::Object)
    }
}
