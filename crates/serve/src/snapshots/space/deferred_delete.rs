//! Deletes the folders of removed snapshots in the background.

use std::sync::mpsc::{self, Sender, SyncSender};
use std::thread::JoinHandle;

use kernel::mount::Detached;
use store::HiddenSnapshot;

/// A thread that deletes folders.
#[derive(Debug)]
pub(in crate::snapshots) struct Trash {
    bin: Option<Sender<Thrown>>,
    thread: Option<JoinHandle<()>>,
}

pub(in crate::snapshots) enum Thrown {
    Folder(HiddenSnapshot),
    /// A root that is no longer attached.
    Root(Detached),
    /// Signals that everything before it was deleted.
    Emptied(SyncSender<()>),
}

impl Trash {
    pub(in crate::snapshots) fn new() -> Self {
        let (bin, thrown) = mpsc::channel();
        let work = move || {
            for it in thrown {
                match it {
                    Thrown::Folder(folder) => {
                        if let Err(error) = folder.remove() {
                            let error: &dyn std::error::Error = &error;
                            tracing::warn!(
                                error,
                                "cannot remove the data of a snapshot: `quire gc` removes it"
                            );
                        }
                    }
                    // The kernel syncs the changes of the root here.
                    Thrown::Root(root) => drop(root),
                    Thrown::Emptied(told) => drop(told.send(())),
                }
            }
        };
        Self { bin: Some(bin), thread: Some(std::thread::spawn(work)) }
    }

    pub(in crate::snapshots) fn throw(&self, it: Thrown) {
        // The thread outlives this value.
        drop(self.bin.as_ref().map(|bin| bin.send(it)));
    }

    pub(in crate::snapshots) fn empty(&self) {
        let (told, emptied) = mpsc::sync_channel(1);
        self.throw(Thrown::Emptied(told));
        // The thread outlives this value.
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
