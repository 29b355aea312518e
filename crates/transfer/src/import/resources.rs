//! Resources that the calling process supplies to an import.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use store::Seconds;

use crate::progress::Event;

/// Usual value of [`ImportContext::budget`]: 64 MiB.
pub const BUDGET: usize = 64 << 20;

/// Resources of an import, the same for all imports of a process. The image does not depend on them.
#[derive(Clone, Copy)]
pub struct ImportContext<'a> {
    /// Current time, for the reference.
    pub now: Seconds,
    /// Number of threads that hash and write, and maximum number of layers that are read at once.
    pub threads: NonZeroUsize,
    /// Memory for data in transit in bytes, without the tree. Each layer in progress needs about 5 MiB.
    pub budget: usize,
    /// Directory for unnamed temporary files, into which compressed archives are unpacked.
    pub scratch: &'a Path,
    /// Called for each event, from any thread.
    pub progress: &'a (dyn Fn(Event<'_>) + Sync),
    /// If this flag is set, the import ends soon, and leaves no data behind.
    pub cancel: &'a AtomicBool,
}

impl std::fmt::Debug for ImportContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut environment = f.debug_struct("ImportContext");
        environment.field("now", &self.now).field("threads", &self.threads);
        environment.field("budget", &self.budget).field("scratch", &self.scratch);
        environment.finish_non_exhaustive()
    }
}
