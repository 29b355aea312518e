//! Finds installed OCI runtimes, tests them, and names the mount that a runtime refuses on this host.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::Access;

use crate::boot_cache::Notes;
use crate::bundle::Kind;

/// Known runtimes, the fastest first.
const KNOWN: [(&str, Kind); 3] =
    [("crun", Kind::Crun), ("runc", Kind::Runc), ("runsc", Kind::Runsc)];

/// Mount point of cgroup2 in the hybrid layout. Source: systemd, "Control Group APIs and Delegation".
const UNIFIED_BESIDE_V1: &str = "/sys/fs/cgroup/unified";

/// An installed runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime {
    pub path: PathBuf,
    /// The known runtime that the program behaves like.
    pub kind: Kind,
}

/// Reason why no runtime can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeError {
    /// The requested runtime does not exist or is not executable.
    #[error("no runtime \"{0}\": it is not in PATH, or not executable")]
    Absent(String),
    /// The search path contains no known runtime.
    #[error("no OCI runtime in PATH: install crun or runc")]
    None,
}

impl Runtime {
    /// Finds the runtime `wanted` (a name or a path), or the first of crun, runc and runsc in `search_path` that
    /// [works](Self::works). `search_path` has the syntax of `PATH`. The last candidate is not tested, since there is
    /// no replacement. Because a test takes some milliseconds, `notes` record that a program works, so it is tested
    /// once.
    pub fn locate(
        search_path: &OsStr,
        wanted: Option<&OsStr>,
        notes: Option<&Notes>,
    ) -> Result<Self, RuntimeError> {
        let Some(wanted) = wanted else {
            let mut found = KNOWN.iter().filter_map(|(name, kind)| {
                Some(Self { path: look_up(search_path, OsStr::new(name))?, kind: *kind })
            });
            let mut chosen = found.next().ok_or(RuntimeError::None)?;
            for next in found {
                if chosen.has_worked(notes) {
                    break;
                }
                tracing::warn!(runtime = %chosen.path.display(), "`--version` fails: trying the next runtime");
                chosen = next;
            }
            return Ok(chosen);
        };
        let path = look_up(search_path, wanted);
        // The path is made absolute, since later clean-up may run in another directory. Symbolic links are not
        // resolved, because the given name determines the kind.
        let path = path.and_then(|path| std::path::absolute(path).ok());
        let path = path.ok_or_else(|| RuntimeError::Absent(wanted.to_string_lossy().into()))?;
        Ok(Self::at(path))
    }

    /// Returns the runtime at this path. The file's name determines its kind.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        let kind = KNOWN.iter().find(|(name, _)| path.file_name() == Some(OsStr::new(name)));
        let kind = kind.map_or(Kind::Runc, |(_, kind)| *kind);
        Self { path, kind }
    }

    /// Whether the program starts, tested with `--version`. A stub, a program of another architecture, or one without
    /// its libraries does not start.
    #[must_use]
    pub fn works(&self) -> bool {
        let mut command = Command::new(&self.path);
        command.arg("--version");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|it| it.success())
    }

    /// Like [`works`](Self::works), but a note keeps a positive result for this exact file.
    fn has_worked(&self, notes: Option<&Notes>) -> bool {
        let note = notes.zip(self.note("runtime"));
        if note.as_ref().is_some_and(|(notes, name)| notes.read(name, 0).is_ok()) {
            return true;
        }
        let works = self.works();
        if let Some((notes, name)) = note.filter(|_| works)
            && let Err(error) = notes.write(&name, b"")
        {
            tracing::debug!(name, %error, "the next command runs `--version` again");
        }
        works
    }

    /// Returns the name of the note of this kind about exactly this file.
    pub(crate) fn note(&self, kind: &str) -> Option<String> {
        let program = std::fs::metadata(&self.path).ok()?;
        let (seconds, part) = (program.mtime(), program.mtime_nsec());
        let (device, inode) = (program.dev(), program.ino());
        Some(format!("{kind}-{device}-{inode}-{seconds}-{part}"))
    }

    /// Returns the known runtimes in `search_path`, which has the syntax of `PATH`.
    pub fn all(search_path: &OsStr) -> impl Iterator<Item = Self> {
        KNOWN.iter().filter_map(|(name, kind)| {
            Some(Self { path: look_up(search_path, OsStr::new(name))?, kind: *kind })
        })
    }

    /// Returns the mount that must be hidden from this runtime, in a separate mount namespace, so that the runtime
    /// works on this host. crun 1.8: "cgroups in hybrid mode not supported, drop all controllers from cgroupv2".
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

/// Finds an executable file by its `name` in `search_path`. A name with a slash is a path.
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
            let found = Runtime::locate(&search, wanted.map(Path::as_os_str), None);
            let expect = expect.map(|(name, kind)| Runtime { path: full.join(name), kind });
            assert_eq!(found, expect, "{wanted:?}");
        };
        check(None, Ok(("runc", Kind::Runc)));
        check(Some(Path::new("other")), Ok(("other", Kind::Runc)));
        check(Some(&full.join("runc")), Ok(("runc", Kind::Runc)));
        // The path is relative to the package's directory, which is the working directory of tests.
        let up = "../".repeat(std::path::absolute(".").unwrap().components().count());
        let relative = format!("{up}{}", full.join("runc").display());
        let found = Runtime::locate(&search, Some(relative.as_ref()), None).unwrap();
        assert!(found.path.is_absolute(), "{found:?}");
        check(Some(Path::new("crun")), Err(RuntimeError::Absent("crun".to_owned())));
        assert_eq!(Runtime::locate(empty.as_os_str(), None, None), Err(RuntimeError::None));
    }

    #[test]
    fn one_that_does_not_start_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, code: u8| {
            let path = folder.path().join(name);
            testing::script(&path, &format!("#!/bin/sh\nexit {code}\n"));
        };
        let check = |expect: &str| {
            let found = Runtime::locate(folder.path().as_os_str(), None, None).unwrap();
            assert_eq!(found.path, folder.path().join(expect));
        };
        put("crun", 1);
        check("crun");
        put("runc", 0);
        check("runc");
        put("runc", 1);
        put("runsc", 0);
        check("runsc");
        put("crun", 0);
        check("crun");
        // A runtime that is named explicitly is not tested.
        put("crun", 1);
        let named =
            Runtime::locate(folder.path().as_os_str(), Some("crun".as_ref()), None).unwrap();
        assert_eq!(named.path, folder.path().join("crun"));
    }

    #[test]
    fn what_has_worked_is_not_asked_again() {
        let folder = tempfile::tempdir().unwrap();
        let (asked, notes) = (folder.path().join("asked"), folder.path().join("notes"));
        let kept = Notes::new(&notes, rustix::process::geteuid().as_raw());
        let text = format!("#!/bin/sh\necho >> '{}'\n", asked.display());
        for name in ["crun", "runc"] {
            let path = folder.path().join(name);
            testing::script(&path, &text);
        }
        let check = |times: usize| {
            let found = Runtime::locate(folder.path().as_os_str(), None, Some(&kept)).unwrap();
            assert_eq!(found.kind, Kind::Crun);
            assert_eq!(std::fs::read_to_string(&asked).unwrap().lines().count(), times);
        };
        check(1);
        check(1);
        // A changed program is tested again.
        std::fs::write(folder.path().join("crun"), &text).unwrap();
        check(2);
    }
}
