//! A container's folder, `containers/ID/` of its store: its path, and the names of the files in it.
//!
//! `docs/format/container.md` has the table of these files with the writer of each file, and its state after a crash.
//! Tests compare that table with [`NAMES`], and with the folders of real containers.

use std::path::PathBuf;

use store::Store;

/// The store's record of the container: its image, and whether the folder is kept.
pub const RECORD: &str = "container.json";
/// Empty file, which is locked as long as the container lives. The runtime inherits the open file.
pub const LOCK: &str = "lock";
/// The bundle's configuration.
pub const CONFIG: &str = "config.json";
/// Mount point of the root in the bundle.
pub const ROOT: &str = "rootfs";
/// Path of the runtime that runs the container.
pub const RUNTIME_PATH: &str = "runtime.path";
/// Directory of the runtime's own records.
pub const RUNTIME_STATE: &str = "runtime";
/// Error messages of the runtime.
pub const RUNTIME_LOG: &str = "runtime.log";
/// Pid of the container's first process.
pub const PID: &str = "container.pid";
/// State of a container that outlives its command.
pub const STATE: &str = "state.json";
/// State before a start that is not complete; `null` if the container was only created.
pub const STATE_BEFORE: &str = "state.before";
/// File for the next state, which reserves its space.
pub const STATE_NEXT: &str = "state.next";
/// A second record of the exit code.
pub const CODE: &str = "code";
/// Newer half of the container's output.
pub const LOG: &str = "log";
/// Older half of the container's output.
pub const LOG_OLDER: &str = "log.old";
/// Empty file that becomes the newer half.
pub const LOG_NEXT: &str = "log.next";
/// Second name of the newer half before it becomes the older one.
pub const LOG_TURNING: &str = "log.turn";
/// Number of processes that the kernel had killed when Quire was about to kill the container.
pub const KILLED: &str = "killed";
/// Empty file: the container has no remains outside of its folder.
pub const OVER: &str = "over";
/// Time of the last start that could not remove all remains of the container, in seconds since 1970.
pub const LATE: &str = "late";
/// Empty file that makes the monitor remove the container at its end, although the container would normally be kept.
pub const UNWANTED: &str = "unwanted";
/// Empty file: a user has stopped a container with a restart policy, so its program is not started again.
pub const STOPPED: &str = "stopped";
/// Locked while a command stops the container.
pub const STOPPING: &str = "stop.lock";
/// Locked while the container is paused.
pub const PAUSE: &str = "pause.lock";
/// Descriptor of a process that has the image mounted.
pub const SUPERBLOCK: &str = "superblock";
/// Descriptor of a process that has the upper directory open.
pub const UPPER: &str = "upper";
/// Settings with which the container is started again.
pub const REQUEST: &str = "request.json";
/// Location of the container's writes.
pub const WRITABLE: &str = "writable.json";
/// Map of the container's users to the host's.
pub const USERNS: &str = "userns";
/// Directory with the writable layer.
pub const LAYER: &str = "layer";
/// File with the writable layer. [`filestore`] names the files of further mounts.
pub const FILESTORE: &str = "filestore";
/// Prefix of the mount points of further mounts.
pub const MOUNT: &str = "mount-";
/// Prefix of the mount points of volumes.
pub const MOUNT_VOLUME: &str = "mount-volume-";
/// Mount point of the files with names, such as `/etc/hosts`.
pub const MOUNT_NAMES: &str = "mount-names";
/// Mount point of a network namespace that is connected to the host's network.
pub const NETWORK: &str = "network";
/// Ports of the host that are forwarded to the container.
pub const PORTS: &str = "ports.json";
/// Interfaces of the container in networks.
pub const NETWORKS: &str = "networks.json";
/// Prefix of the files for a call of the runtime's `exec`.
pub const EXEC: &str = "exec-";
/// Socket to which a runtime sends the container's terminal.
pub const CONSOLE: &str = kernel::terminal::SOCKET;

/// Directory created by crun: if the folder covers a cgroup file system, crun creates the container's cgroup in it.
const COVERED_CGROUP: &str = "quire-ID-RANDOM";

/// Names of all files in a container's folder. `N` stands for a number.
pub const NAMES: [&str; 43] = [
    RECORD,
    LOCK,
    CONFIG,
    ROOT,
    RUNTIME_PATH,
    RUNTIME_STATE,
    RUNTIME_LOG,
    PID,
    STATE,
    STATE_BEFORE,
    STATE_NEXT,
    CODE,
    LOG,
    LOG_OLDER,
    LOG_NEXT,
    LOG_TURNING,
    KILLED,
    OVER,
    LATE,
    UNWANTED,
    STOPPED,
    STOPPING,
    PAUSE,
    SUPERBLOCK,
    UPPER,
    REQUEST,
    WRITABLE,
    USERNS,
    LAYER,
    FILESTORE,
    "filestore-N",
    "mount-N",
    "mount-volume-N",
    MOUNT_NAMES,
    NETWORK,
    PORTS,
    NETWORKS,
    "exec-N.json",
    "exec-N.pid",
    "exec-N.log",
    "exec-N.sock",
    CONSOLE,
    COVERED_CGROUP,
];

/// Returns the folder of the container with this id.
#[must_use]
pub fn path(store: &Store, id: &str) -> PathBuf {
    store.path().join("containers").join(id)
}

/// Returns the name of the filestore of a further mount.
#[must_use]
pub fn filestore(number: usize) -> String {
    format!("{FILESTORE}-{number}")
}

/// Whether a container's folder may have a file with this name.
#[must_use]
pub fn is_known(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let fits = |pattern: &&str| match pattern.split_once('N') {
        _ if *pattern == COVERED_CGROUP => name.starts_with("quire-"),
        Some((before, after)) => {
            let number = name.strip_prefix(before).and_then(|it| it.strip_suffix(after));
            number.is_some_and(is_number)
        }
        None => *pattern == name,
    };
    NAMES.iter().any(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_these_names_and_no_others() {
        let table = include_str!("../../../docs/format/container.md");
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let mut rows: Vec<_> = rows.collect();
        let mut names = NAMES.to_vec();
        rows.sort_unstable();
        names.sort_unstable();
        assert_eq!(rows, names, "left: docs/format/container.md; right: NAMES");
    }

    #[test]
    fn names_with_numbers_are_known() {
        for name in ["log", "mount-0", "mount-names", "exec-12.json", "quire-a-1b", &filestore(3)] {
            assert!(is_known(name), "{name}");
        }
        for name in ["", "Log", "mount-", "mount-x", "exec-12", "exec-.pid", "filestore-1.old"] {
            assert!(!is_known(name), "{name}");
        }
    }

    /// A module that spells out a name would be a second owner of the file.
    #[test]
    fn no_other_module_spells_these_names() {
        let mut found = Vec::new();
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut folders = vec![crates.join("container/src"), crates.join("cli/src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]").next().unwrap_or_default();
                let is_spelled = |name: &&str| text.contains(&format!("folder.join(\"{name}\")"));
                let is_test = path.ends_with("tests.rs");
                if !is_test && !path.ends_with("folder.rs") && NAMES.iter().any(is_spelled) {
                    found.push(path);
                }
            }
        }
        assert_eq!(found, Vec::<PathBuf>::new());
    }
}
