//! Remains of a container whose processes are gone, or should be.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::mount::Unmount;

use crate::bundle::spec::{RuntimeSpec, SpecError};
use crate::folder::RUNTIME_STATE;
use crate::life::stage::is_place;
use crate::pace::GLANCE;
use crate::runtime::call::delete;

/// Ends all that the kernel and the runtime keep of a container, so that its folder can be removed: processes, cgroups,
/// the runtime's records, and the root if it is attached in this mount namespace. The caller holds the container's
/// lock, so it has no monitor.
///
/// Returns whether all is ended. If not, the folder has to stay for a later call, because only the folder says what is
/// left.
#[must_use]
pub fn clear(folder: &Path, id: &str) -> bool {
    if has_records(folder, id) {
        delete(folder, id);
    }
    let is_clear = remove_cgroups(folder, id);
    let places = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path());
    let places = places.filter(|path| is_place(path));
    // A namespace that runsc attaches among its records and leaves there. Source: gVisor `runsc/specutils/namespace.go`.
    let left = Some(folder.join(RUNTIME_STATE).join("null-netns")).filter(|it| it.exists());
    for place in places.chain(left) {
        // In another namespace than the container's own this finds nothing mounted.
        if let Err(error) = kernel::mount::unmount(&place, Unmount::Lazy) {
            tracing::debug!(id, %error, "nothing to unmount");
        }
    }
    is_clear && !has_records(folder, id)
}

/// Whether the runtime knows of the container: by a directory of its name, or as runsc by `ID_sandbox:ID.state`. Source for
/// that: gVisor `runsc/container/state_file.go`.
fn has_records(folder: &Path, id: &str) -> bool {
    let state = folder.join(RUNTIME_STATE);
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
fn cgroup_of(folder: &Path) -> std::io::Result<Option<String>> {
    let spec = match RuntimeSpec::load(folder) {
        Ok(spec) => spec,
        Err(SpecError::Read { source, .. }) if source.kind() != ErrorKind::NotFound => {
            return Err(source);
        }
        // One that is not whole was for no runtime yet.
        Err(SpecError::Read { .. } | SpecError::Json { .. }) => return Ok(None),
    };
    let name = spec.linux.cgroups_path.as_deref().and_then(|it| it.strip_prefix('/'));
    let name = name.filter(|it| it.starts_with(&CGROUP[1..]) && !it.contains('/'));
    Ok(name.map(str::to_owned))
}

/// How long the processes of a container may take to die, once they are killed.
const DEATH: Duration = Duration::from_secs(3);

/// Removes cgroups that a runtime made and was killed before it noted the container, or after it had forgotten it. Only
/// empty ones can be removed: it is waited a while for processes that are dying. Returns whether none is left.
fn remove_cgroups(folder: &Path, id: &str) -> bool {
    let (name, hierarchies) = match (cgroup_of(folder), std::fs::read_dir(CGROUPS)) {
        (Ok(None), _) => return true,
        (Ok(Some(name)), Ok(hierarchies)) => (name, hierarchies),
        // Without cgroups there are none of the container's.
        (_, Err(error)) if error.kind() == ErrorKind::NotFound => return true,
        (Err(error), _) | (_, Err(error)) => {
            tracing::debug!(id, %error, "cannot look for cgroups");
            return false;
        }
    };
    let hierarchies = hierarchies.flatten();
    // Links stand for several controllers of one hierarchy.
    let hierarchies = hierarchies.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
    // A folder covers the one that a runtime does not take, and the runtime may have written there.
    let roots = hierarchies.map(|it| it.path()).chain([PathBuf::from(CGROUPS)]);
    let roots = roots.filter(|root| is_hierarchy(root));
    let since = Instant::now();
    let mut is_clear = true;
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
                // Where nothing can be changed, what is not there is no different error.
                Err(error) if cgroup.exists() => {
                    tracing::debug!(id, %error, cgroup = %cgroup.display(), "a cgroup stays");
                    is_clear = false;
                }
                _ => {}
            }
            break;
        }
    }
    is_clear
}

/// Whether a directory is of a cgroup file system. Source: Linux `include/uapi/linux/magic.h`.
fn is_hierarchy(path: &Path) -> bool {
    const CGROUP: u32 = 0x0027_e0eb;
    const CGROUP2: u32 = 0x6367_7270;
    rustix::fs::statfs(path)
        .is_ok_and(|it| u32::try_from(it.f_type).is_ok_and(|it| [CGROUP, CGROUP2].contains(&it)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::CONFIG;

    #[test]
    fn only_a_cgroup_of_ours_is_taken_from_a_bundle() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cgroup_of(folder.path()).unwrap(), None);
        let check = |path: &str, expect: Option<&str>| {
            let config = serde_json::json!({"linux": {"cgroupsPath": path}});
            std::fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
            assert_eq!(cgroup_of(folder.path()).unwrap().as_deref(), expect, "{path}");
        };
        check(&cgroup("a", "1"), Some("quire-a-1"));
        check("/quire-a", Some("quire-a"));
        for path in ["", "/", "/other", "quire-a", "/quire-a/..", "/quire-a/b"] {
            check(path, None);
        }
    }
}
