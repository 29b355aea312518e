//! Resources of this process for making images.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use kernel::process::finish_behind;
use store::{Seconds, Store};
use transfer::import::{BUDGET, ImportContext};
use transfer::progress::Event;

use crate::output::progress::Progress;
use crate::session::context::{Context, now};
use crate::session::signals::{give_up_when, until_signal};

/// Time, processors, memory, progress and cancellation of work that makes images.
pub(crate) struct JobResources<'s> {
    store: &'s Store,
    pub(crate) now: Seconds,
    pub(crate) threads: NonZeroUsize,
    /// Memory budget, in bytes.
    pub(crate) budget: usize,
    pub(crate) progress: Arc<Progress>,
    pub(crate) cancel: Arc<AtomicBool>,
    scratch: PathBuf,
}

impl<'s> JobResources<'s> {
    /// Creates the resources. From now on, work on this store can be cancelled, even while it waits for a lock.
    pub(crate) fn new(context: &Context, store: &'s Store, budget: usize) -> Self {
        let cancel = Arc::new(AtomicBool::new(false));
        give_up_when(store, &cancel);
        Self {
            store,
            now: now(),
            threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            budget,
            progress: Arc::new(context.progress()),
            cancel,
            scratch: scratch(store),
        }
    }

    /// Runs `work` with progress shown, until it ends or is cancelled.
    pub(crate) fn during<T: Send>(
        &self,
        work: impl FnOnce(&ImportContext<'_>) -> T + Send,
    ) -> anyhow::Result<T> {
        let environment = ImportContext {
            now: self.now,
            threads: self.threads,
            budget: self.budget,
            scratch: &self.scratch,
            progress: &|event: Event<'_>| self.progress.tell(event),
            cancel: &self.cancel,
        };
        let done = until_signal(&self.cancel, || work(&environment))?;
        self.progress.finish();
        if self.cancel.load(Ordering::Relaxed) {
            // This is done in the background, because the kernel takes seconds to remove large files, and a user who
            // has interrupted the command does not want to wait.
            let _done = finish_behind(|_| {
                if let Err(error) = self.store.clear_work() {
                    tracing::debug!(%error, "cannot remove unfinished files: the next command removes them");
                }
            });
        }
        Ok(done)
    }
}

/// Returns the directory for unnamed temporary files, such as an archive that is unpacked. This is the store, which
/// needs room for the image anyway, while `/tmp` may be in memory. A store that this user cannot write needs another
/// directory.
pub(crate) fn scratch(store: &Store) -> PathBuf {
    store.scratch_path().map_or_else(std::env::temp_dir, Path::to_owned)
}

/// Runs work on a file outside of any store, with progress shown, until it ends or is cancelled.
pub(crate) fn without_store<T: Send>(
    context: &Context,
    work: impl FnOnce(&ImportContext<'_>) -> T + Send,
) -> anyhow::Result<T> {
    let cancel = Arc::new(AtomicBool::new(false));
    let (progress, scratch) = (Arc::new(context.progress()), std::env::temp_dir());
    let environment = ImportContext {
        now: now(),
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        budget: BUDGET,
        scratch: &scratch,
        progress: &|event: Event<'_>| progress.tell(event),
        cancel: &cancel,
    };
    let done = until_signal(&cancel, || work(&environment))?;
    progress.finish();
    Ok(done)
}

/// Converts the MiB of `--memory` to bytes.
pub(crate) fn budget(mebibytes: u64) -> anyhow::Result<usize> {
    usize::try_from(mebibytes << 20).context("--memory is too large")
}
