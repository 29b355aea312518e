//! Cgroups of containers: their names, limits and removal.

use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::process::{Pid, Process, Signal};

use crate::backoff::GLANCE;
use crate::bundle::spec::{RuntimeSpec, SpecError};
use crate::bundle::{BundleOptions, Controller};
use crate::life::cgroup::delegation::Delegated;
use crate::life::cgroup::hierarchy::{CGROUP, CGROUPS, is_hierarchy};

/// Returns the path of a container's cgroups below the root of each hierarchy. Container names are unique only in
/// their store, and runtimes kill, freeze and limit all processes in a cgroup. So `unique` must differ between
/// containers of the same name in different stores.
#[must_use]
pub fn cgroup(id: &str, unique: &str) -> String {
    format!("{CGROUP}{id}-{unique}")
}

/// Reads this path from the bundle of a container that may have been started, without the leading slash.
fn cgroup_of(folder: &Path) -> io::Result<Option<String>> {
    let spec = match RuntimeSpec::load(folder) {
        Ok(spec) => spec,
        Err(SpecError::Read { source, .. }) if source.kind() != ErrorKind::NotFound => {
            return Err(source);
        }
        // If the bundle was truncated, no runtime was called with it, so there is no cgroup.
        Err(SpecError::Read { .. } | SpecError::Json { .. }) => return Ok(None),
    };
    let path = spec.linux.cgroups_path.as_deref().and_then(|it| it.strip_prefix('/'));
    let is_ours = |path: &&str| {
        let mut names = path.split('/');
        names.next_back().is_some_and(|it| it.starts_with(&CGROUP[1..]))
            && path.split('/').all(|it| !["", ".", ".."].contains(&it))
    };
    Ok(path.filter(is_ours).map(str::to_owned))
}

/// Returns the cgroup of a user's container, if it has a separate one.
#[must_use]
pub fn of_user(folder: &Path) -> Option<String> {
    let spec = RuntimeSpec::load(folder).ok()?;
    spec.linux.cgroups_path.filter(|it| it.rfind('/').is_some_and(|at| at > 0))
}

/// Sets the path of a container's cgroup, and removes the limits that cannot be set, with a `remark` about each.
pub(crate) fn limit(bundle: &mut BundleOptions, id: &str, unique: &str, remark: &dyn Fn(&str)) {
    let cgroup = cgroup(id, unique);
    if bundle.own.is_none() {
        bundle.cgroup = Some(cgroup);
        return;
    }
    if !bundle.is_limited {
        // The caller did not request this default limit, so it causes no remark if it cannot be set.
        let usual = bundle.pids.map(|_| [Controller::Pids]);
        let delegated = usual.and_then(|usual| {
            let delegated = Delegated::own().ok()?;
            delegated.open(&usual).ok().filter(|it| it.contains(&Controller::Pids))?;
            Some(delegated)
        });
        bundle.drop_limits(if delegated.is_some() { &[Controller::Pids] } else { &[] });
        bundle.cgroup = delegated.map(|it| format!("{}{cgroup}", it.path()));
        return;
    }
    let wanted = bundle.controllers();
    let open = Delegated::own().and_then(|it| Ok((it.open(&wanted)?, it)));
    let (open, delegated) = match open {
        Ok(found) => found,
        Err(why) => {
            bundle.drop_limits(&[]);
            remark(&format!("its memory, processors and processes are not limited: {why}"));
            return;
        }
    };
    for missing in wanted.iter().filter(|it| !open.contains(it)) {
        let (what, name) = (missing.limited(), missing.name());
        remark(&format!(
            "{what} not limited: the controller {name} is not delegated to this user (with \
            systemd: `Delegate=` of user@.service)"
        ));
    }
    bundle.drop_limits(&open);
    bundle.cgroup = Some(format!("{}{cgroup}", delegated.path()));
}

/// Time for a container's processes to die after they were killed.
const DEATH: Duration = Duration::from_secs(3);

/// Returns the container's path below the roots of the cgroup hierarchies, and these roots; `None` if it has no
/// cgroup that Quire named.
fn places(folder: &Path) -> io::Result<Option<(String, Vec<PathBuf>)>> {
    let Some(name) = cgroup_of(folder)? else { return Ok(None) };
    let hierarchies = match std::fs::read_dir(CGROUPS) {
        Ok(hierarchies) => hierarchies.flatten(),
        // A host without cgroups has none of the container.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Symbolic links are other names of hierarchies with several controllers.
    let hierarchies = hierarchies.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
    // A folder may cover a hierarchy that the runtime refuses, and the runtime may have created cgroups in that
    // folder.
    let roots = hierarchies.map(|it| it.path()).chain([PathBuf::from(CGROUPS)]);
    Ok(Some((name, roots.filter(|root| is_hierarchy(root)).collect())))
}

/// Whether a process is in the cgroup of a container, or in one below it.
pub(crate) fn has(folder: &Path, process: Pid) -> bool {
    let Ok(Some(name)) = cgroup_of(folder) else { return false };
    let own = std::fs::read_to_string(format!("/proc/{}/cgroup", process.as_raw_nonzero()));
    own.is_ok_and(|own| own.lines().any(|line| is_below(line, &name)))
}

/// Whether a line of `/proc/PID/cgroup` (cgroups(7)) names this cgroup or one below it.
fn is_below(line: &str, name: &str) -> bool {
    let path = line.splitn(3, ':').nth(2).unwrap_or_default();
    let rest = path.strip_prefix('/').and_then(|it| it.strip_prefix(name));
    rest.is_some_and(|it| it.is_empty() || it.starts_with('/'))
}

/// Kills all processes in a container's cgroups, without its runtime.
pub(crate) fn kill(folder: &Path) {
    let Ok(Some((name, roots))) = places(folder) else { return };
    for cgroup in roots.iter().map(|root| root.join(&name)) {
        // With cgroup v2, since Linux 5.14, this also kills processes that are forked at the same time.
        if std::fs::write(cgroup.join("cgroup.kill"), "1").is_ok() {
            continue;
        }
        kill_below(folder, &cgroup);
    }
}

/// Resumes the processes in a container's cgroups after a pause, without its runtime. Source: Linux
/// Documentation/admin-guide/cgroup-v2.rst, `cgroup.freeze`, and cgroup-v1/freezer-subsystem.rst.
pub(crate) fn thaw(folder: &Path) {
    let Ok(Some((name, roots))) = places(folder) else { return };
    for cgroup in roots.iter().map(|root| root.join(&name)) {
        for (file, text) in [("cgroup.freeze", "0"), ("freezer.state", "THAWED")] {
            match write_existing(&cgroup.join(file), text) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    tracing::debug!(%error, cgroup = %cgroup.display(), "cannot thaw a cgroup");
                }
                _ => {}
            }
        }
    }
}

/// The cgroups by which the kernel freezes a container.
#[derive(Debug)]
pub(crate) struct Freezer(Vec<FreezerFile>);

/// File that freezes a cgroup and its descendants. Source: as for [`thaw`].
#[derive(Debug)]
enum FreezerFile {
    /// `cgroup.freeze`, and `cgroup.events`, which reports the state.
    V2 { freeze: PathBuf, events: PathBuf },
    /// `freezer.state`.
    V1(PathBuf),
}

/// Time for a container's processes to freeze. A process in a long system call freezes after it.
const FREEZING: Duration = Duration::from_secs(10);

/// Time after which a cgroup that does not freeze is thawed and frozen again. In version 1, a process that forks while
/// the cgroup freezes can wait for a frozen one, so that the cgroup stays at `FREEZING`. runc does the same. Source: its
/// `fs/freezer.go`.
const STUCK: Duration = Duration::from_millis(100);

/// First interval between checks whether a container is frozen, which usually takes less than a millisecond.
const FREEZING_CHECK: Duration = Duration::from_micros(100);

impl Freezer {
    /// Finds the freezers that have processes of a container. `None` if there are none, or if this process may not
    /// write to them.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        let (name, roots) = places(folder).ok().flatten()?;
        let cgroups = roots.iter().map(|root| root.join(&name)).filter(|it| has_processes(it));
        let mut files = Vec::new();
        for cgroup in cgroups {
            let [freeze, events] = ["cgroup.freeze", "cgroup.events"].map(|it| cgroup.join(it));
            let state = cgroup.join("freezer.state");
            if freeze.exists() {
                files.push(FreezerFile::V2 { freeze, events });
            } else if state.exists() {
                files.push(FreezerFile::V1(state));
            }
        }
        // On a host with both hierarchies, a container is in both. A process that one of them has frozen never gets to the
        // place where the other one would, so only one is used, which is that of runtimes.
        if files.iter().any(|it| matches!(it, FreezerFile::V1(_))) {
            files.retain(|it| matches!(it, FreezerFile::V1(_)));
        }
        let may_write = files
            .iter()
            .all(|it| rustix::fs::access(it.control(), rustix::fs::Access::WRITE_OK).is_ok());
        (may_write && !files.is_empty()).then_some(Self(files))
    }

    /// Freezes all processes, and returns when none of them runs.
    ///
    /// # Errors
    /// The error of the kernel; `TimedOut` if some processes do not freeze. Some processes may be frozen then.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        for file in &self.0 {
            write_existing(file.control(), file.words().0)?;
        }
        let since = Instant::now();
        for file in &self.0 {
            let (mut pause, mut tried) = (FREEZING_CHECK, Instant::now());
            while !file.is_frozen()? {
                if since.elapsed() >= FREEZING {
                    return Err(ErrorKind::TimedOut.into());
                }
                if tried.elapsed() >= STUCK {
                    let (freeze, thaw) = file.words();
                    write_existing(file.control(), thaw)?;
                    std::thread::sleep(FREEZING_CHECK);
                    write_existing(file.control(), freeze)?;
                    (pause, tried) = (FREEZING_CHECK, Instant::now());
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(GLANCE);
            }
        }
        Ok(())
    }

    /// Lets all processes go on.
    pub(crate) fn thaw(&self) {
        for file in &self.0 {
            match write_existing(file.control(), file.words().1) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    let path = file.control().display();
                    tracing::warn!(%error, file = %path, "cannot thaw a cgroup");
                }
                _ => {}
            }
        }
    }
}

impl FreezerFile {
    fn control(&self) -> &Path {
        match self {
            Self::V2 { freeze, .. } => freeze,
            Self::V1(state) => state,
        }
    }

    /// Texts that freeze and thaw.
    fn words(&self) -> (&'static str, &'static str) {
        match self {
            Self::V2 { .. } => ("1", "0"),
            Self::V1(_) => ("FROZEN", "THAWED"),
        }
    }

    fn is_frozen(&self) -> io::Result<bool> {
        match self {
            Self::V2 { events, .. } => {
                Ok(std::fs::read_to_string(events)?.lines().any(|it| it == "frozen 1"))
            }
            // The read also makes the kernel count the frozen processes.
            Self::V1(state) => Ok(std::fs::read_to_string(state)?.trim() == "FROZEN"),
        }
    }
}

/// Writes to a file of the kernel, which is not created.
fn write_existing(path: &Path, text: &str) -> io::Result<()> {
    std::fs::File::options().write(true).open(path)?.write_all(text.as_bytes())
}

/// Whether a process is in a cgroup or below it.
fn has_processes(cgroup: &Path) -> bool {
    let listed = std::fs::read_to_string(cgroup.join("cgroup.procs"));
    // A threaded cgroup cannot be read in this way, but it has processes.
    if listed.as_ref().map_or_else(|it| it.kind() != ErrorKind::NotFound, |it| !it.is_empty()) {
        return true;
    }
    let below = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
    let mut below = below.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
    below.any(|it| has_processes(&it.path()))
}

/// Kills the processes of a cgroup and of its descendants.
fn kill_below(folder: &Path, cgroup: &Path) {
    let listed = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    for pid in listed.lines().filter_map(|it| it.parse().ok()).filter_map(Pid::from_raw) {
        let Ok(process) = Process::open(pid) else { continue };
        // The pid may have been reused before the process was opened.
        if has(folder, pid) {
            let _gone = process.signal(Signal::KILL);
        }
    }
    let below = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
    for it in below.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir())) {
        kill_below(folder, &it.path());
    }
}

/// Usual upper bound of the time that killed processes need to die.
const DYING: Duration = Duration::from_millis(500);

/// Removes cgroups that are left because the runtime was killed before it recorded the container, or after it had
/// deleted that record. Only empty cgroups can be removed, so this waits a while for dying processes. Returns whether
/// all cgroups are removed.
pub(crate) fn remove_cgroups(folder: &Path, id: &str) -> bool {
    let (name, roots) = match places(folder) {
        Ok(None) => return true,
        Ok(Some(found)) => found,
        Err(error) => {
            tracing::debug!(id, %error, "cannot look for cgroups");
            return false;
        }
    };
    let since = Instant::now();
    let mut is_told = false;
    let mut is_clear = true;
    for root in roots {
        let cgroup = root.join(&name);
        loop {
            match std::fs::remove_dir(&cgroup) {
                Err(error)
                    if error.kind() == ErrorKind::ResourceBusy && since.elapsed() < DEATH =>
                {
                    if since.elapsed() > DYING && !std::mem::replace(&mut is_told, true) {
                        // The runtime cannot kill these processes, or does not know them.
                        kill(folder);
                    }
                    std::thread::sleep(GLANCE);
                    continue;
                }
                // On a read-only file system, the call fails with the same error if the directory does not exist.
                Err(error) if cgroup.exists() => {
                    tracing::debug!(id, %error, cgroup = %cgroup.display(), "cannot remove a cgroup");
                    is_clear = false;
                }
                _ => {}
            }
            break;
        }
    }
    is_clear
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::CONFIG;

    #[test]
    fn a_process_is_known_by_its_cgroup() {
        let check = |line: &str, expect| assert_eq!(is_below(line, "quire-a-1"), expect, "{line}");
        check("0::/quire-a-1", true);
        check("7:pids:/quire-a-1/inner:x", true);
        check("0::/quire-a-12", false);
        check("0::/other/quire-a-1", false);
        check("0::/", false);
        check("", false);
    }

    /// Freezes a program by each freezer of this host. The program counts in a file.
    #[test]
    fn a_frozen_program_stands_still() {
        use std::process::Command;

        let name = cgroup("test", &format!("freezer-{}", std::process::id()));
        let folder = tempfile::tempdir().unwrap();
        let config = serde_json::json!({"linux": {"cgroupsPath": name}});
        std::fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
        let (name, roots) = places(folder.path()).unwrap().unwrap();
        let counter = folder.path().join("counter");
        let mut is_tried = false;
        for cgroup in roots.iter().map(|root| root.join(&name)) {
            if std::fs::create_dir(&cgroup).is_err() {
                continue;
            }
            let has_freezer =
                ["cgroup.freeze", "freezer.state"].iter().any(|it| cgroup.join(it).exists());
            if has_freezer {
                assert!(Freezer::of(folder.path()).is_none(), "without a process");
                let text = "n=0; while :; do n=$((n+1)); echo $n >\"$0\"; done";
                let mut program =
                    Command::new("sh").args(["-c", text]).arg(&counter).spawn().unwrap();
                let moved = write_existing(&cgroup.join("cgroup.procs"), &program.id().to_string());
                if moved.is_ok() {
                    is_tried = true;
                    check_freezer(&Freezer::of(folder.path()).unwrap(), &counter);
                }
                program.kill().unwrap();
                program.wait().unwrap();
            }
            std::fs::remove_dir(&cgroup).unwrap();
        }
        if !is_tried {
            testing::skipped("no freezer of this host is writable");
        }
    }

    fn check_freezer(freezer: &Freezer, counter: &Path) {
        let count = || std::fs::read_to_string(counter).unwrap_or_default();
        for _ in 0..20 {
            let before = count();
            while count() == before {
                std::thread::sleep(Duration::from_millis(1));
            }
            freezer.freeze().unwrap();
            let frozen = count();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(count(), frozen, "{freezer:?}");
            freezer.thaw();
        }
        // A program that is not frozen stays as it is.
        freezer.thaw();
    }

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
        check("/user.slice/a.scope/quire-a-1", Some("user.slice/a.scope/quire-a-1"));
        for path in ["", "/", "/other", "quire-a", "/quire-a/..", "/quire-a/b", "//quire-a"] {
            check(path, None);
        }
        for path in ["/../quire-a", "/a/../quire-a", "/a//quire-a", "/a/./quire-a", "/quire-a/"] {
            check(path, None);
        }
    }
}
