//! What containers have written.

use container::life::kept::{Changes, Place};
use store::Store;

use crate::containers::Found;

/// What the writable layer of a container has, in bytes, by the file system inside: also what is not on its way to the disk
/// yet. None if that is not known: of a directory of the host, and of a container whose monitor was killed.
pub(crate) fn written(found: &Found) -> Option<u64> {
    if !found.is_running() {
        return found.state.as_ref().and_then(|it| it.written);
    }
    match Place::load(&found.folder)? {
        Place::None => Some(0),
        Place::Memory | Place::Filestore { .. } => {
            let changes = Changes::of_running(&found.folder).ok()?;
            container::root::headroom::written(changes.directory()).ok()
        }
        Place::Directory { .. } => None,
    }
}

/// The same of all containers of a store.
pub(crate) fn all_written(store: &Store) -> anyhow::Result<u64> {
    Ok(crate::containers::all(store)?.iter().filter_map(written).sum())
}
