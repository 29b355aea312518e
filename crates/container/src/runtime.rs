//! The OCI runtime: which ones are there, and what each needs to work on this host.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

/// The runtimes we know how to start, the quickest first.
const KNOWN: [(&str, Kind); 3] =
    [("crun", Kind::Crun), ("runc", Kind::Runc), ("runsc", Kind::Runsc)];

/// Where cgroup2 stands in the hybrid layout. Source: systemd, "Control Group APIs and Delegation".
const UNIFIED_BESIDE_V1: &str = "/sys/fs/cgroup/unified";

/// An OCI runtime, by its habits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// crun: refuses hosts where cgroup v1 and v2 are both mounted.
    Crun,
    /// runc, and whatever else behaves like it.
    Runc,
    /// gVisor's runsc.
    Runsc,
}

/// A runtime that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime {
    /// The program.
    pub path: PathBuf,
    /// Its habits.
    pub kind: Kind,
}

/// No runtime can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeError {
    /// The one that was asked for is not there, or can not be executed.
    #[error("no runtime \"{0}\": it is not in PATH, or is not executable")]
    Absent(String),
    /// None of those we know is there.
    #[error("no OCI runtime in PATH: install crun or runc")]
    None,
}

impl Runtime {
    /// The runtime `wanted` (a name or a path), or the first of crun, runc and runsc that is in `search_path`, which
    /// is written as `PATH` is.
    ///
    /// # Errors
    /// [`RuntimeError`] when there is none.
    pub fn find(search_path: &OsStr, wanted: Option<&OsStr>) -> Result<Self, RuntimeError> {
        let Some(wanted) = wanted else {
            let found = KNOWN.iter().find_map(|(name, kind)| {
                Some(Self { path: look_up(search_path, OsStr::new(name))?, kind: *kind })
            });
            return found.ok_or(RuntimeError::None);
        };
        let path = look_up(search_path, wanted);
        let path = path.ok_or_else(|| RuntimeError::Absent(wanted.to_string_lossy().into()))?;
        Ok(Self::at(path))
    }

    /// The runtime at this path, whose name tells its habits.
    pub(crate) fn at(path: PathBuf) -> Self {
        let kind = KNOWN.iter().find(|(name, _)| path.file_name() == Some(OsStr::new(name)));
        let kind = kind.map_or(Kind::Runc, |(_, kind)| *kind);
        Self { path, kind }
    }

    /// The mount that has to be out of sight, in the runtime's own mount namespace, before this runtime works on a host with these
    /// file systems. crun 1.8: "cgroups in hybrid mode not supported, drop all controllers from cgroupv2".
    #[must_use]
    pub fn obstacle(&self) -> Option<&'static Path> {
        let unified = Path::new(UNIFIED_BESIDE_V1);
        (self.kind == Kind::Crun && is_cgroup2(unified)).then_some(unified)
    }
}

fn is_cgroup2(path: &Path) -> bool {
    // Source: `linux/magic.h`, CGROUP2_SUPER_MAGIC.
    const MAGIC: i64 = 0x6367_7270;
    rustix::fs::statfs(path).is_ok_and(|it| it.f_type == MAGIC)
}

/// What `PATH` has under `name`; a name with a slash is a path.
fn look_up(search_path: &OsStr, name: &OsStr) -> Option<PathBuf> {
    let usable = |path: &Path| path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok();
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(|path| usable(path));
    }
    let folders = std::env::split_paths(search_path).filter(|it| it.is_absolute());
    folders.map(|it| it.join(name)).find(|path| usable(path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_first_usable_one_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let (empty, full) = (folder.path().join("empty"), folder.path().join("full"));
        for (path, mode) in [("empty/crun", 0o644), ("full/runc", 0o755), ("full/other", 0o755)] {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let search = std::env::join_paths([&empty, &full]).unwrap();
        let check = |wanted: Option<&Path>, expect: Result<(&str, Kind), RuntimeError>| {
            let found = Runtime::find(&search, wanted.map(Path::as_os_str));
            let expect = expect.map(|(name, kind)| Runtime { path: full.join(name), kind });
            assert_eq!(found, expect, "{wanted:?}");
        };
        check(None, Ok(("runc", Kind::Runc)));
        check(Some(Path::new("other")), Ok(("other", Kind::Runc)));
        check(Some(&full.join("runc")), Ok(("runc", Kind::Runc)));
        check(Some(Path::new("crun")), Err(RuntimeError::Absent("crun".to_owned())));
        assert_eq!(Runtime::find(empty.as_os_str(), None), Err(RuntimeError::None));
    }
}
