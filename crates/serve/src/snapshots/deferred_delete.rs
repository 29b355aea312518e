//! Folders of removed snapshots.

use std::sync::mpsc::{self, Sender, SyncSender};
use std::thread::JoinHandle;

use kernel::mount::Detached;
use store::HiddenSnapshot;

/// What removes folders, behind its callers' backs.
#[derive(Debug)]
pub(super) struct Trash {
    bin: Option<Sender<Thrown>>,
    thread: Option<JoinHandle<()>>,
}

pub(super) enum Thrown {
    Folder(HiddenSnapshot),
    /// A root that is attached nowhere any more.
    Root(Detached),
    /// All before it is to be gone.
    Emptied(SyncSender<()>),
}

impl Trash {
    pub(super) fn new() -> Self {
        let (bin, thrown) = mpsc::channel();
        let work = move || {
            for it in thrown {
                match it {
                    Thrown::Folder(folder) => {
                        if let Err(error) = folder.remove() {
                            let error: &dyn std::error::Error = &error;
                            tracing::warn!(
                                error,
                                "what a snapshot had is not removed: `quire gc` does"
                            );
                        }
                    }
                    // The kernel syncs what was written to it.
                    Thrown::Root(root) => drop(root),
                    Thrown::Emptied(told) => drop(told.send(())),
                }
            }
        };
        Self { bin: Some(bin), thread: Some(std::thread::spawn(work)) }
    }

    pub(super) fn throw(&self, it: Thrown) {
        // The thread ends after this only.
        drop(self.bin.as_ref().map(|bin| bin.send(it)));
    }

    pub(super) fn empty(&self) {
        let (told, emptied) = mpsc::sync_channel(1);
        self.throw(Thrown::Emptied(told));
        // The thread ends after this only.
        let _emptied = emptied.recv();
    }
}

impl Drop for Trash {
    fn drop(&mut self) {
        drop(self.bin.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
