//! What an import is given by the process that it works in.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use store::Seconds;

use crate::progress::Event;

/// The usual [`ImportSurroundings::budget`]: 64 MiB.
pub const BUDGET: usize = 64 << 20;

/// What an import works with. It is the same for all that a process imports: the image does not depend on it.
#[derive(Clone, Copy)]
pub struct ImportSurroundings<'a> {
    /// The time, for the ref.
    pub now: Seconds,
    /// Threads that hash and write; as many layers are read at once.
    pub threads: NonZeroUsize,
    /// Bytes of memory for data on its way, besides the tree. About 2 MiB are needed for each layer at work.
    pub budget: usize,
    /// Where compressed archives are unpacked for a while, to a file without a name.
    pub scratch: &'a Path,
    /// Is told what happens, from any thread.
    pub progress: &'a (dyn Fn(Event<'_>) + Sync),
    /// Set to end the import soon, with nothing left behind.
    pub cancel: &'a AtomicBool,
}

impl std::fmt::Debug for ImportSurroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut surroundings = f.debug_struct("ImportSurroundings");
        surroundings.field("now", &self.now).field("threads", &self.threads);
        surroundings.field("budget", &self.budget).field("scratch", &self.scratch);
        surroundings.finish_non_exhaustive()
    }
}
