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
    if has_records(folder, id) {
        delete(folder, id);
    }
    remove_cgroups(folder, id);
    let places = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path());
    let places = places.filter(|path| path.is_dir() && is_place(path));
    // A namespace that runsc attaches among its records and leaves there. Source: gVisor `runsc/specutils/namespace.go`.
    let left = Some(folder.join(STATE).join("null-netns")).filter(|it| it.exists());
    for place in places.chain(left) {
        // In another namespace than the container's own this finds nothing mounted.
        if let Err(error) = kernel::mount::unmount(&place, Unmount::Lazy) {
            tracing::debug!(id, %error, "nothing to unmount");
        }
    }
}

/// Whether the runtime knows of the container: by a directory of its name, or as runsc by `ID_sandbox:ID.state`. Source for
/// that: gVisor `runsc/container/state_file.go`.
fn has_records(folder: &Path, id: &str) -> bool {
    let state = folder.join(STATE);
    state.join(id).exists() || state.join(format!("{id}_sandbox:{id}.state")).exists()
}

/// Where cgroups are. Source: cgroups(7).
const CGROUPS: &str = "/sys/fs/cgroup";

/// What the names of all containers' cgroups begin with.
const CGROUP: &str = "/quire-";

/// Where the cgroups of a container are, from the root of each hierarchy. Names of containers are their store's own, and
/// runtimes kill, freeze and limit whatever is in a cgroup: `unique` is something that no other store's container of this
/// name has.
#[must_use]
pub fn cgroup(id: &str, unique: &str) -> String {
    format!("{CGROUP}{id}-{unique}")
}

/// The same, of a container that may have been started, from its bundle.
fn cgroup_of(folder: &Path) -> Option<String> {
    let bytes = std::fs::read(folder.join("config.json")).ok()?;
    let config: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    let name = config["linux"]["cgroupsPath"].as_str()?.strip_prefix('/')?;
    (name.starts_with(&CGROUP[1..]) && !name.contains('/')).then(|| name.to_owned())
}

/// How long the processes of a container may take to die, once they are killed.
const DEATH: Duration = Duration::from_secs(3);

/// Removes cgroups that a runtime made and was killed before it noted the container, or after it had forgotten it. Only
/// empty ones can be removed: it is waited a while for processes that are dying.
fn remove_cgroups(folder: &Path, id: &str) {
    let Some(name) = cgroup_of(folder) else { return };
    let hierarchies = std::fs::read_dir(CGROUPS).into_iter().flatten().flatten();
    // Links stand for several controllers of one hierarchy.
    let hierarchies = hierarchies.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
    let roots = hierarchies.map(|it| it.path()).chain([PathBuf::from(CGROUPS)]);
    let since = Instant::now();
    for root in roots {
        let cgroup = root.join(&name);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cgroup_of_ours_is_taken_from_a_bundle() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cgroup_of(folder.path()), None);
        let check = |path: &str, expect: Option<&str>| {
            let config = serde_json::json!({"linux": {"cgroupsPath": path}});
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            assert_eq!(cgroup_of(folder.path()).as_deref(), expect, "{path}");
        };
        check(&cgroup("a", "1"), Some("quire-a-1"));
        check("/quire-a", Some("quire-a"));
        for path in ["", "/", "/other", "quire-a", "/quire-a/..", "/quire-a/b"] {
            check(path, None);
        }
    }
}
