//! Images given back: layers bit for bit, manifests with the blobs they name, layouts, archives, flat tars, EROFS images
//! that hold their files, and disks of these.
//!
//! [`plan()`] decides for each layer of a manifest which bytes are given, and makes
//! those that have to be made; a push sends what it planned, [`to_layout`] writes it into a folder. [`to_docker_archive`],
//! [`to_tar`], [`to_erofs`] and `to_disk` write one stream.
//!
//! No byte is trusted: what a reader gives that was opened here ends in an error unless all of it had the digest it should
//! have, and the last bytes are kept back until that is known. Memory is bounded whatever the image's size.

mod archive;
mod compress;
#[cfg(feature = "disk")]
mod disk;
mod erofs;
mod error;
mod files;
mod flatten;
mod gzip;
mod layout;
mod plan;
mod target;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

pub use archive::{ArchiveReport, to_docker_archive};
#[cfg(feature = "disk")]
pub use disk::{DiskReport, RootType, to_disk};
pub use erofs::{ErofsReport, to_erofs};
pub use error::ExportError;
pub(crate) use files::tree;
pub use flatten::{TarReport, to_tar};
pub use layout::{LayoutReport, to_layout};
pub use plan::{Compression, How, Plan, PlannedLayer, architecture, plan, plan_for};
pub use target::{Output, Target, TargetError};

use store::parallel;

use crate::progress::Event;

/// What all that is done here needs besides.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// As many layers are compressed, or written to a layout, at once.
    pub threads: NonZeroUsize,
    /// Where layers are kept that had to be compressed anew, in files without names: as many bytes as they have.
    pub scratch: &'a Path,
    /// Is told what happens, from any thread. Of a layer that is compressed the bytes of its tar are counted, of others
    /// those that are written. A flat tar or an EROFS image counts as one layer.
    pub progress: &'a (dyn Fn(Event<'_>) + Sync),
    /// Set to end soon, with [`ExportError::Cancelled`].
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

    /// Does `work` for each number below `count`, on several threads, until one fails or it is cancelled.
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
