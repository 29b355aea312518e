//! What is left of a container whose processes are gone, or should be.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::mount::Unmount;

use crate::detached::GLANCE;
use crate::monitor::{STATE, delete};
use crate::stage::is_place;

/// Ends what the kernel and the runtime keep of a container, so that its folder can be removed: processes, cgroups,
/// the runtime's records, and the root if it is attached in this mount namespace. The caller holds the container's
/// lock, so nobody runs it any more.
pub fn clear(folder: &Path, id: &str) {
    if folder.join(STATE).join(id).exists() {
        delete(folder, id);
    }
    remove_cgroups(id);
    let places = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path());
    for place in places.filter(|path| path.is_dir() && is_place(path)) {
        // In another namespace than the container's own this finds nothing mounted.
        if let Err(error) = kernel::mount::unmount(&place, Unmount::Lazy) {
            tracing::debug!(id, %error, "nothing to unmount");
        }
    }
}

/// Where cgroups are. Source: cgroups(7).
const CGROUPS: &str = "/sys/fs/cgroup";

/// Where the cgroups of a container are, from the root of each hierarchy: at a place that nobody else uses.
#[must_use]
pub fn cgroup(id: &str) -> String {
    format!("/quire-{id}")
}

/// How long the processes of a container may take to die, once they are killed.
const DEATH: Duration = Duration::from_secs(3);

/// Removes cgroups that a runtime made and was killed before it noted the container, or after it had forgotten it. Only
/// empty ones can be removed: it is waited a while for processes that are dying. (They may be those of another store's
/// container of this name, so nothing is killed here.)
fn remove_cgroups(id: &str) {
    let path = cgroup(id);
    let hierarchies = std::fs::read_dir(CGROUPS).into_iter().flatten().flatten();
    // Links stand for several controllers of one hierarchy.
    let hierarchies = hierarchies.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
    let roots = hierarchies.map(|it| it.path()).chain([PathBuf::from(CGROUPS)]);
    let since = Instant::now();
    for root in roots {
        let cgroup = root.join(path.trim_start_matches('/'));
        loop {
            match std::fs::remove_dir(&cgroup) {
                Err(error)
                    if error.kind() == ErrorKind::ResourceBusy && since.elapsed() < DEATH =>
                {
                    std::thread::sleep(GLANCE);
                    continue;
                }
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    tracing::debug!(id, %error, cgroup = %cgroup.display(), "a cgroup stays");
                }
                _ => {}
            }
            break;
        }
    }
}
