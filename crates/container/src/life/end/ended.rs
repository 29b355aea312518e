//! Takes down a container whose program has ended, and keeps its writable layer if requested.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use kernel::process::{Done, finish_behind};
use store::{ContainerDir, ContainerError};

use crate::folder::{FILESTORE, LAYER, REQUEST, STATE, STATE_BEFORE, USERNS, WRITABLE};
use crate::life::end::teardown;
use crate::life::filestores::Filestores;
use crate::life::log::add_sentence;
use crate::life::mount_staging::Stage;
use crate::life::state::StateBefore;
use crate::life::{background, writable_layer};
use crate::root::headroom::Headroom;
use crate::root::{Root, TrustedImage, upper_dir};

/// Message for a container's log and its caller if the disk has lost some of its writes.
pub const LOST: &str = "the disk of the store is full or failing: some data of the container was \
    lost while it ran, and it may have read zeros instead";

/// A container whose program has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: String,
    pub(crate) folder: ContainerDir,
    pub(crate) path: PathBuf,
    pub(crate) root: Root,
    pub(crate) stage: Stage,
    pub(crate) headrooms: Vec<Headroom>,
    /// Held until the teardown is complete, like `_directory`.
    pub(crate) _image: TrustedImage,
    pub(crate) _directory: Option<OwnedFd>,
    pub(crate) _lock: Option<OwnedFd>,
}

/// Files without which a kept container cannot be started again after a crash of the host.
const NEEDED: [&str; 5] = [REQUEST, STATE, STATE_BEFORE, WRITABLE, USERNS];

/// Writes the files that another start needs to the disk. If this fails, they may be damaged after a crash of the
/// host, which is then reported.
pub(crate) fn sync_needed(folder: &Path, id: &str) {
    let sync = |path: &Path| match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        file => file.and_then(|it| it.sync_all()),
    };
    let files = NEEDED.iter().map(|name| folder.join(name)).chain([folder.to_owned()]);
    for path in files {
        if let Err(error) = sync(&path) {
            tracing::debug!(id, %error, "cannot sync {}", path.display());
        }
    }
}

/// Flushes the layer of an ended container to the disk, in a process without the container's locks, so that other
/// commands can remove or read the container at the same time.
fn settle_behind(folder: &Path, id: &str) {
    let layer = folder.join(LAYER);
    let work = || {
        sync_needed(folder, id);
        if let Err(error) = upper_dir::settle(&layer) {
            tracing::debug!(%error, "the container's changes are not synced, so they are refused \
                after a restart of the host");
        }
    };
    if let Err(error) = kernel::process::start_server(&[], || Ok(()), work) {
        tracing::debug!(id, %error, "the container's changes are not synced, so they are refused \
            after a restart of the host");
    }
}

/// Whether the kernel and the runtime may still hold remains of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    Perhaps,
    No,
}

impl Ended {
    /// Takes the container down, in the background if this takes long. Calls `hidden` when other commands can no
    /// longer see the container.
    pub(crate) fn take_down(self, left: Runs, hidden: impl FnOnce()) -> Result<(), ContainerError> {
        let takes_long = self.root.doomed.takes_long()
            || self.root.image.takes_long_to_free()
            || self.stage.takes_long();
        // From here on, other commands cannot find the container.
        let (id, root, stage, headrooms) = (self.id, self.root, self.stage, self.headrooms);
        let folder = self.folder.hide()?;
        hidden();
        let clear = move |by| {
            root.doomed.shut_down();
            stage.shut_down();
            drop((headrooms, root.mount, root.image));
            if left == Runs::Perhaps && !teardown::clear(folder.path(), &id) {
                tracing::warn!(id, "cannot kill all remaining processes of the container");
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

    /// Takes down the container's mounts, and keeps its writable layer, its log and its exit code.
    pub(crate) fn rest(self, has_lost: bool, is_told: bool) {
        let kept = if has_lost {
            self.root.doomed.shut_down();
            false
        } else {
            // Other commands already see that the container has ended. If `rm` runs at the same time, it shuts the
            // file system down.
            self.settle();
            self.root.doomed.keep().is_ok()
        };
        drop((self.headrooms, self.root.mount, self.root.image));
        // Filestores of further mounts are removed with their container.
        Filestores::remove(&self.path, &self.stage);
        self.stage.shut_down();
        background::clear(&self.path, &self.id);
        if let Err(error) = StateBefore::restore(&self.path) {
            tracing::debug!(id = self.id, %error, "the next command restores the container's state");
        }
        let lost = match writable_layer::WritesPlace::load(&self.path) {
            Some(writable_layer::WritesPlace::Folder { .. }) if kept => {
                return settle_behind(&self.path, &self.id);
            }
            _ if kept => return sync_needed(&self.path, &self.id),
            Some(writable_layer::WritesPlace::Filestore { .. }) => {
                // The layer is removed first, because it may have filled the disk.
                drop(std::fs::remove_file(self.path.join(FILESTORE)));
                writable_layer::WritesPlace::Filestore { lost: true }
            }
            // The user may still need files in this directory.
            Some(writable_layer::WritesPlace::Folder { .. }) => {
                writable_layer::WritesPlace::Folder { lost: true }
            }
            _ => return,
        };
        if let Err(error) = lost.save(&self.path) {
            tracing::debug!(id = self.id, %error, "cannot record the loss of data");
        }
        let _told = is_told || add_sentence(&self.path, LOST);
    }

    /// Releases space that will not be written any more.
    fn settle(&self) {
        for headroom in &self.headrooms {
            if let Err(error) = headroom.settle() {
                tracing::debug!(id = self.id, %error, "a filestore keeps free space that it does not need");
            }
        }
    }
}
