//! Cgroups of containers: what they are called, and how they go.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::bundle::spec::{RuntimeSpec, SpecError};
use crate::pace::GLANCE;

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
pub(crate) fn remove_cgroups(folder: &Path, id: &str) -> bool {
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
