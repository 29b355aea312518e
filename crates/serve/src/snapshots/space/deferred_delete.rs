//! Deletes the folders of removed snapshots in the background.

use std::sync::mpsc::{self, SendError, Sender, SyncSender};
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
        let work = move || thrown.into_iter().for_each(delete);
        let thread = std::thread::Builder::new().name("trash".to_owned()).spawn(work);
        let thread = thread.inspect_err(|error| {
            tracing::warn!(%error, "cannot start a thread: calls wait until data is deleted");
        });
        Self { bin: Some(bin), thread: thread.ok() }
    }

    /// Deletes something in the background, or at once if there is no thread.
    pub(in crate::snapshots) fn throw(&self, it: Thrown) {
        if let Some(Err(SendError(it))) = self.bin.as_ref().map(|bin| bin.send(it)) {
            delete(it);
        }
    }

    pub(in crate::snapshots) fn empty(&self) {
        let (told, emptied) = mpsc::sync_channel(1);
        self.throw(Thrown::Emptied(told));
        let _emptied = emptied.recv();
    }
}

fn delete(it: Thrown) {
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

impl Drop for Trash {
    fn drop(&mut self) {
        drop(self.bin.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_thread_work_is_done_at_once() {
        let (bin, thrown) = mpsc::channel();
        drop(thrown);
        let trash = Trash { bin: Some(bin), thread: None };
        let (told, emptied) = mpsc::sync_channel(1);
        trash.throw(Thrown::Emptied(told));
        assert!(emptied.recv().is_ok());
        trash.empty();
    }
}
