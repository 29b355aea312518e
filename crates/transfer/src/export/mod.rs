//! Exports images: exact layers, manifests with their blobs, layouts, archives, flat tars, EROFS images with all
//! their files, and disks with such an image. System extensions are EROFS images or disks.
//!
//! [`plan()`] selects the bytes for each layer of a manifest, and compresses layers where needed. A push sends the
//! blobs of a plan, and [`to_layout`] writes them into a directory. [`to_docker_archive`], [`to_tar`], [`to_erofs`]
//! and `to_disk` write one stream, and `to_verified_disk` a file.
//!
//! Stored bytes are not trusted: a reader holds back the last bytes until the digest of all bytes is known, and
//! returns an error if the digest is wrong. Memory is bounded for images of any size.

mod archive;
mod composefs_id;
mod compress;
mod copy_error;
#[cfg(feature = "disk")]
mod disk;
mod erofs;
mod error;
mod extension;
mod files;
mod flatten;
mod gzip;
mod layout;
mod layout_blobs;
mod layout_signatures;
mod plan;
mod target;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

pub use archive::{ArchiveReport, ArchivedImage, to_docker_archive};
pub use composefs_id::{ComposefsIdError, IdFormat, SealedTree, composefs_id};
pub use compress::{Encoding, PackedLayer, pack};
pub use copy_error::CopyError;
#[cfg(feature = "disk")]
pub use disk::{
    BootError, BootFiles, BootProgram, DiskReport, RootHashKey, RootSigner, RootType, SignerError,
    StubError, VerifiedDisk, VerifiedDiskReport, to_disk, to_verified_disk,
};
pub use erofs::{ErofsReport, to_erofs};
pub use error::ExportError;
pub use extension::{ExtensionError, ExtensionKind, ExtensionRelease, check_extension};
pub(crate) use files::tree;
pub use flatten::{TarReport, to_tar};
pub use layout::{LayoutReport, to_layout};
pub use layout_blobs::plan_for_layout;
pub use plan::{Compression, ExportPlan, How, PlannedLayer, architecture, plan, plan_for};
pub use target::{Output, Target, TargetError};

use store::parallel;

use crate::progress::Event;

/// Options of all exports.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Number of layers that are compressed, or written to a layout, in parallel.
    pub threads: NonZeroUsize,
    /// Directory for unnamed temporary files, which contain the compressed layers.
    pub scratch: &'a Path,
    /// Called for each event, from any thread. Counts bytes of the tar for a compressed layer, otherwise the bytes
    /// written. A flat tar or an EROFS image counts as one layer.
    pub progress: &'a (dyn Fn(Event<'_>) + Sync),
    /// The caller sets this to end the export soon with [`ExportError::Cancelled`].
    pub cancel: &'a AtomicBool,
}

impl std::fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut options = f.debug_struct("Options");
        options.field("threads", &self.threads).field("scratch", &self.scratch);
        options.finish_non_exhaustive()
    }
}

impl Options<'_> {
    fn go_on(&self) -> Result<(), ExportError> {
        if self.cancel.load(Ordering::Relaxed) { Err(ExportError::Cancelled) } else { Ok(()) }
    }

    /// Calls `work` for each number below `count`, in several threads, until a call fails or the export is cancelled.
    fn each<T: Send>(
        &self,
        count: usize,
        work: impl Fn(usize) -> Result<T, ExportError> + Sync,
    ) -> Result<Vec<T>, ExportError> {
        parallel::each("layer", self.threads.get(), count, |at| {
            self.go_on()?;
            work(at)
        })
    }
}
