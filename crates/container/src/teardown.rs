//! What is left of a container whose processes are gone, or should be.

use std::path::Path;

use kernel::mount::Unmount;

use crate::monitor::{ROOT, STATE, delete};

/// Ends what the kernel and the runtime keep of a container, so that its folder can be removed: processes, cgroups,
/// the runtime's records, and the root if it is attached in this mount namespace. The caller holds the container's
/// lock, so nobody runs it any more.
pub fn clear(folder: &Path, id: &str) {
    if folder.join(STATE).join(id).exists() {
        delete(folder, id);
    }
    // In another namespace than the container's own this finds nothing mounted.
    if let Err(error) = kernel::mount::unmount(&folder.join(ROOT), Unmount::Lazy) {
        tracing::debug!(id, %error, "no root to unmount");
    }
}
