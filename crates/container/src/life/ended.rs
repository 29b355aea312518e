//! A container whose program has ended: it is taken down, and its writable layer may be kept.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use kernel::process::{Done, finish_behind};
use store::{ContainerDir, ContainerError};

use crate::folder::{FILESTORE, LAYER};
use crate::life::filestores::Filestores;
use crate::life::log::add_sentence;
use crate::life::monitor::Watch;
use crate::life::stage::Stage;
use crate::life::{detached, kept, teardown};
use crate::root::headroom::Headroom;
use crate::root::{Root, TrustedImage, upper};

/// Message for a container's log and its caller when the disk has lost some of its writes.
pub const LOST: &str = "the disk of the store is full or failing: some data of the container was lost while it ran, \
                        and it may have read zeros instead";

/// A container whose program has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: String,
    pub(crate) folder: ContainerDir,
    pub(crate) path: PathBuf,
    pub(crate) root: Root,
    pub(crate) stage: Stage,
    pub(crate) headrooms: Vec<Headroom>,
    /// Held until its root is gone.
    pub(crate) watch: Option<Box<dyn Watch>>,
    /// Held until all is done, as the next is.
    pub(crate) _image: TrustedImage,
    pub(crate) _directory: Option<OwnedFd>,
}

/// Has the layer of an ended container written to the disk, by a process that holds none of its locks: others may remove or
/// read it meanwhile.
fn settle_behind(folder: &Path, id: &str) {
    let layer = folder.join(LAYER);
    let work = || {
        if let Err(error) = upper::settle(&layer) {
            tracing::debug!(%error, "what the container wrote is refused after a restart of the host");
        }
    };
    if let Err(error) = kernel::process::start_server(&[], || Ok(()), work) {
        tracing::debug!(id, %error, "what the container wrote is refused after a restart of the host");
    }
}

/// Whether the kernel and the runtime may still have something of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    Perhaps,
    No,
}

impl Ended {
    /// Takes everything down, behind the user's back if it takes long; calls `hidden` when nobody else can see it any more.
    pub(crate) fn take_down(self, left: Runs, hidden: impl FnOnce()) -> Result<(), ContainerError> {
        let takes_long = self.root.doomed.takes_long()
            || self.root.image.takes_long_to_free()
            || self.stage.takes_long();
        // For everybody else it is gone now.
        let (id, root, stage, headrooms) = (self.id, self.root, self.stage, self.headrooms);
        let watch = self.watch;
        let folder = self.folder.hide()?;
        hidden();
        let clear = move |by| {
            root.doomed.shut_down();
            stage.shut_down();
            drop((headrooms, root.mount, root.image));
            drop(watch);
            if left == Runs::Perhaps && !teardown::clear(folder.path(), &id) {
                tracing::warn!(id, "cannot end all that is left of the container");
            }
            teardown::remove_last(folder, &id, by);
        };
        if takes_long {
            let _done = finish_behind(clear);
        } else {
            clear(Done::Here);
        }
        Ok(())
    }

    /// Takes down what runs, and keeps what was written, with the log and the exit code.
    pub(crate) fn rest(self, has_lost: bool, is_told: bool) {
        let kept = if has_lost {
            self.root.doomed.shut_down();
            false
        } else {
            // It has ended for everybody else; `rm` shuts the file system down under this.
            self.settle();
            self.root.doomed.keep().is_ok()
        };
        drop((self.headrooms, self.root.mount, self.root.image));
        drop(self.watch);
        // Those of further mounts go with their container.
        Filestores::remove(&self.path, &self.stage);
        self.stage.shut_down();
        detached::clear(&self.path, &self.id);
        let lost = match kept::Place::load(&self.path) {
            Some(kept::Place::Folder { .. }) if kept => return settle_behind(&self.path, &self.id),
            _ if kept => return,
            Some(kept::Place::Filestore { .. }) => {
                // First, since it may be what the disk is full of.
                drop(std::fs::remove_file(self.path.join(FILESTORE)));
                kept::Place::Filestore { lost: true }
            }
            // A person may still find something of use in it.
            Some(kept::Place::Folder { .. }) => kept::Place::Folder { lost: true },
            _ => return,
        };
        if let Err(error) = lost.save(&self.path) {
            tracing::debug!(id = self.id, %error, "what is lost is found out by its absence");
        }
        let _told = is_told || add_sentence(&self.path, LOST);
    }

    /// Gives back what nobody will write to any more.
    fn settle(&self) {
        for headroom in &self.headrooms {
            if let Err(error) = headroom.settle() {
                tracing::debug!(id = self.id, %error, "a filestore keeps room that it does not need");
            }
        }
    }
}
