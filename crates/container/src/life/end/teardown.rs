//! Removes the remains of a container whose processes are gone, or should be.

use std::path::Path;
use std::time::Duration;

use kernel::mount::Unmount;
use kernel::process::{Done, Who, finish_behind};
use store::{ContainerDir, ContainerError};

use crate::folder::{LAYER, RUNTIME_STATE};
use crate::life::cgroup::cgroups::remove_cgroups;
use crate::life::mount_staging::is_place;
use crate::runtime::call::{DELETION, delete};

/// Removes everything of a container that is outside of its folder, so that the folder can be removed: processes,
/// cgroups, the runtime's records, and the root if it is attached in this mount namespace. The caller holds the
/// container's lock, so the container has no monitor.
///
/// Returns whether everything is removed. If not, the folder has to stay for a later call, because only the folder
/// records the remains.
#[must_use]
pub fn clear(folder: &Path, id: &str) -> bool {
    clear_within(folder, id, DELETION)
}

/// Like [`clear`], but the runtime has at most the time `most`.
#[must_use]
pub(crate) fn clear_within(folder: &Path, id: &str, most: Duration) -> bool {
    if has_records(folder, id) {
        delete(folder, id, most);
    }
    let is_clear = remove_cgroups(folder, id);
    let places = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path());
    let places = places.filter(|path| is_place(path));
    // A namespace that runsc attaches among its records and leaves there. Source: gVisor
    // `runsc/specutils/namespace.go`.
    let left = Some(folder.join(RUNTIME_STATE).join("null-netns")).filter(|it| it.exists());
    for place in places.chain(left) {
        // If this mount namespace is not the container's, these file systems are not mounted in it.
        if let Err(error) = kernel::mount::unmount(&place, Unmount::Lazy) {
            tracing::debug!(id, %error, "no mount to unmount");
        }
    }
    is_clear && !has_records(folder, id)
}

/// Removes the runtime's records and the cgroups of a run that has ended, for another run with the same mounts. Returns
/// whether they are removed.
#[must_use]
pub(crate) fn clear_run(folder: &Path, id: &str) -> bool {
    if has_records(folder, id) {
        delete(folder, id, DELETION);
    }
    remove_cgroups(folder, id) && !has_records(folder, id)
}

/// Removes the folder of a container that has no other remains. A layer in the folder may have many files, so a
/// background process removes it. The container no longer exists when its folder was moved out of `containers/`. `who`
/// is the user of this process.
///
/// # Errors
/// [`ContainerError`] if the folder cannot be moved, or cannot be removed in the foreground.
pub(crate) fn remove_behind(folder: ContainerDir, who: Who) -> Result<(), ContainerError> {
    if !folder.path().join(LAYER).exists() {
        return folder.remove();
    }
    let id = folder.id().to_owned();
    let folder = folder.hide()?;
    if who.user != 0 {
        return match folder.remove() {
            // A user's container may have written files with other ids, which only root of the user's namespace may
            // remove.
            Err(ContainerError::Disk(error)) if error.is_read_only() => {
                tracing::warn!(id, %error, "cannot remove some of the container's changes: `quire gc` removes them");
                Ok(())
            }
            removed => removed,
        };
    }
    let _done = finish_behind(move |by| remove_last(folder, &id, by));
    Ok(())
}

/// Removes a hidden folder. A background process does this with the lowest priority.
pub(crate) fn remove_last(folder: ContainerDir, id: &str, by: Done) {
    if by == Done::Behind {
        kernel::process::be_idle();
    }
    if let Err(error) = folder.remove() {
        tracing::warn!(id, %error, "cannot remove the container's directory: `quire gc` removes it");
    }
}

/// Removes the runtime's records of a container that was created before the current boot. None of the container's
/// processes run any more, and the runtime could mistake a process with the same pid and start time for the
/// container's.
pub(crate) fn forget_earlier_boot(folder: &ContainerDir) {
    let made = folder.record().and_then(|it| it.boot.as_ref());
    if made.is_none() || made == kernel::process::boot_id().as_ref() {
        return;
    }
    match std::fs::remove_dir_all(folder.path().join(RUNTIME_STATE)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::debug!(id = folder.id(), %error, "cannot remove the runtime's state of an earlier boot");
        }
        _ => {}
    }
}

/// Whether the runtime has a record of the container: a directory with its name, or for runsc a file
/// `ID_sandbox:ID.state`. Source of the latter: gVisor `runsc/container/state_file.go`.
fn has_records(folder: &Path, id: &str) -> bool {
    let state = folder.join(RUNTIME_STATE);
    state.join(id).exists() || state.join(format!("{id}_sandbox:{id}.state")).exists()
}
