//! A bundle's `config.json`, as OCI runtimes take it. Source: OCI runtime-spec 1.0.2, `config.md` and `config-linux.md`,
//! where each field is described.
//!
//! Only fields that Quire writes or reads have names here. `rest` has the other fields of an object, so that a foreign
//! file loses nothing when it is read and written again. Objects without `rest` have no other fields.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bundle::user::User;
use crate::folder::CONFIG;

/// The version of the specification that Quire's bundles follow.
pub(crate) const VERSION: &str = "1.0.2";

/// Fields that have no name here.
type Rest = Map<String, Value>;

/// The whole file. Source: `config.md`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RuntimeSpec {
    /// The specification that it follows.
    pub oci_version: String,
    /// The first program.
    pub process: SpecProcess,
    /// The root.
    pub root: SpecRoot,
    /// The host name.
    pub hostname: String,
    /// File systems besides the root, in the order in which they are mounted.
    pub mounts: Vec<SpecMount>,
    /// Words for the runtime, and for people.
    pub annotations: BTreeMap<String, String>,
    /// Fields for Linux only.
    pub linux: SpecLinux,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// A program. Source: `config.md`, "Process".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpecProcess {
    /// Whether it gets a terminal of its own.
    pub terminal: bool,
    /// Who it runs as.
    pub user: SpecUser,
    /// The program and its arguments.
    pub args: Vec<String>,
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    /// The working directory.
    pub cwd: String,
    /// Capabilities.
    pub capabilities: CapabilitySets,
    /// Whether the process and its children are kept from getting more rights.
    pub no_new_privileges: bool,
    /// Its limits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rlimits: Vec<SpecLimit>,
    /// The first size of its terminal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub console_size: Option<ConsoleSize>,
    /// Name of its AppArmor profile, which has to be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apparmor_profile: Option<String>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// Who a program runs as, by numbers of the container. Source: `config.md`, "User".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpecUser {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub additional_gids: Vec<u32>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// The file mode mask of programs in containers. As with podman and Docker, the caller's does not count.
const UMASK: u32 = 0o022;

impl SpecUser {
    pub(crate) fn new(user: &User) -> Self {
        // Runtimes differ in their default, and some leave it to who calls them.
        let rest = Rest::from_iter([("umask".to_owned(), UMASK.into())]);
        Self { uid: user.uid, gid: user.gid, additional_gids: user.groups.clone(), rest }
    }
}

/// The capabilities of a program, by their names. Source: `config.md`, "Linux Process".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CapabilitySets {
    /// The most that it, and all that it executes, can ever have.
    pub bounding: Vec<String>,
    /// Those that count.
    pub effective: Vec<String>,
    /// Those that it may make count.
    pub permitted: Vec<String>,
    /// Those that it may keep when it executes another program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inheritable: Vec<String>,
    /// Those that it keeps when it executes another program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ambient: Vec<String>,
}

/// A limit of a process. Source: `config.md`, "POSIX process".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecLimit {
    /// Its name, such as `RLIMIT_NOFILE`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The limit that counts.
    pub soft: u64,
    /// How far the process may raise it.
    pub hard: u64,
}

/// The size of a terminal, in characters. Source: `config.md`, "Process".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleSize {
    /// Lines.
    pub height: u16,
    /// Columns.
    pub width: u16,
}

/// The root. Source: `config.md`, "Root".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecRoot {
    /// Its path, absolute or from the bundle.
    pub path: String,
    /// Whether nothing can be written to it.
    pub readonly: bool,
}

/// A file system besides the root. Source: `config.md`, "Mounts".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpecMount {
    /// Where it is mounted.
    pub destination: String,
    /// The kind of file system; `bind` for a file or directory of the host.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// A device, a path of the host, or any word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// As mount(8) has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

impl SpecMount {
    pub(crate) fn new(destination: &str, kind: &str, source: &str, options: &[&str]) -> Self {
        Self {
            destination: destination.to_owned(),
            kind: Some(kind.to_owned()),
            source: Some(source.to_owned()),
            options: strings(options),
            rest: Rest::new(),
        }
    }
}

pub(crate) fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&it| it.to_owned()).collect()
}

/// Fields for Linux only. Source: `config-linux.md`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpecLinux {
    /// Namespaces of its own.
    pub namespaces: Vec<SpecNamespace>,
    /// Limits of the whole container.
    pub resources: SpecResources,
    /// Files of the kernel that it does not see.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub masked_paths: Vec<String>,
    /// Files of the kernel that it cannot write to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub readonly_paths: Vec<String>,
    /// The filter of calls, which only runtimes read. [`Filter`](super::security::Filter) makes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp: Option<Value>,
    /// Devices that the runtime makes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<SpecDevice>,
    /// Where its cgroups are, from the root of each hierarchy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroups_path: Option<String>,
    /// Who its users are on the host; empty if they are the same there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uid_mappings: Vec<IdMapping>,
    /// Who its groups are on the host; empty if they are the same there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gid_mappings: Vec<IdMapping>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// A namespace of a container. Source: `config-linux.md`, "Namespaces".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecNamespace {
    /// Kind, such as `network`.
    #[serde(rename = "type")]
    pub kind: String,
    /// One that there is already; none for a new one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

impl SpecNamespace {
    /// A new one.
    pub(crate) fn new(kind: &str) -> Self {
        Self { kind: kind.to_owned(), path: None }
    }
}

/// Ids in a row. Source: `config-linux.md`, "User namespace mappings".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// The first, inside.
    #[serde(rename = "containerID")]
    pub container: u32,
    /// The first, on the host.
    #[serde(rename = "hostID")]
    pub host: u32,
    /// How many.
    pub size: u32,
}

/// Limits of a whole container. Source: `config-linux.md`, "Control groups".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecResources {
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<SpecMemory>,
    /// Processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<SpecPids>,
    /// Processors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<SpecCpu>,
    /// Which devices can be opened: the last rule for one counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRule>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// Memory of a container. Source: `config-linux.md`, "Memory".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecMemory {
    /// Limit, in bytes; -1 for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// Processes and threads of a container. Source: `config-linux.md`, "PIDs".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecPids {
    /// Limit; -1 for none.
    pub limit: i64,
}

/// Processors of a container. Source: `config-linux.md`, "CPU".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecCpu {
    /// Limit of the time in each period, in microseconds; -1 for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<i64>,
    /// The period, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period: Option<u64>,
    /// Weight against other cgroups that want time, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<u64>,
    /// Which processors, such as `0-2,7`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// Other fields.
    #[serde(flatten)]
    pub rest: Rest,
}

/// Whether devices can be opened. A field that is `None` fits every device. Source: `config-linux.md`, "Allowed Device
/// list".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRule {
    /// Whether they can.
    pub allow: bool,
    /// `c`, `b` or `a`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The major number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// The minor number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Letters of `rwm`: to read, to write, to make.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access: Option<String>,
}

/// A device that the runtime makes. Source: `config-linux.md`, "Devices".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpecDevice {
    /// Where.
    pub path: String,
    /// `c`, `b`, `u` or `p`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The major number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// The minor number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Its user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A `config.json` that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The disk's answer.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is something else, or not whole.
    #[error("{} is not a runtime configuration", path.display())]
    Json {
        /// Which.
        path: PathBuf,
        /// Cause.
        source: serde_json::Error,
    },
}

impl RuntimeSpec {
    /// Reads the configuration of the container with this folder.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn load(folder: &Path) -> Result<Self, SpecError> {
        let path = folder.join(CONFIG);
        match std::fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map_err(|source| SpecError::Json { path, source })
            }
            Err(source) => Err(SpecError::Read { path, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with fields that have no name here, in every object that has others.
    const FOREIGN: &str = r#"{
        "ociVersion": "1.2.0", "hooks": {"prestart": [{"path": "/hook"}]}, "domainname": "d",
        "process": {
            "terminal": true, "args": ["sh"], "env": ["A=1"], "cwd": "/", "noNewPrivileges": false,
            "user": {"uid": 1, "gid": 2, "additionalGids": [3], "umask": 18},
            "capabilities": {"bounding": ["CAP_KILL"], "effective": [], "permitted": [],
                             "inheritable": ["CAP_KILL"], "ambient": ["CAP_KILL"]},
            "rlimits": [{"type": "RLIMIT_CORE", "soft": 0, "hard": 18446744073709551615}],
            "consoleSize": {"height": 24, "width": 80}, "oomScoreAdj": -5, "apparmorProfile": "p"
        },
        "root": {"path": "rootfs", "readonly": true}, "hostname": "h",
        "mounts": [{"destination": "/proc"},
                   {"destination": "/d", "type": "bind", "source": "/s", "options": ["rbind"],
                    "uidMappings": [{"containerID": 0, "hostID": 1, "size": 2}]}],
        "annotations": {"run.oci.handler": "krun"},
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "network", "path": "/run/netns/n"}],
            "resources": {
                "memory": {"limit": -1, "swap": 7}, "pids": {"limit": -1}, "unified": {"a": "b"},
                "cpu": {"quota": -1, "period": 2, "shares": 3, "cpus": "0", "mems": "0"},
                "devices": [{"allow": false, "access": "rwm"},
                            {"allow": true, "type": "c", "major": 1, "minor": -1}]
            },
            "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys"],
            "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/x"},
            "devices": [{"path": "/dev/x", "type": "c", "major": 1, "minor": 3, "fileMode": 438,
                         "uid": 0, "gid": 0}, {"path": "/dev/p", "type": "p"}],
            "cgroupsPath": "/c", "rootfsPropagation": "rslave", "sysctl": {"net.a": "1"},
            "uidMappings": [{"containerID": 0, "hostID": 1, "size": 2}],
            "gidMappings": [{"containerID": 0, "hostID": 1, "size": 2}]
        }
    }"#;

    #[test]
    fn nothing_that_somebody_else_wrote_is_lost() {
        let spec: RuntimeSpec = serde_json::from_str(FOREIGN).unwrap();
        assert_eq!(spec.process.rest["oomScoreAdj"], -5);
        let before: Value = serde_json::from_str(FOREIGN).unwrap();
        assert_eq!(serde_json::to_value(&spec).unwrap(), before);
    }

    #[test]
    fn what_is_no_configuration_is_told_apart_from_none() {
        let folder = tempfile::tempdir().unwrap();
        let load = || RuntimeSpec::load(folder.path());
        assert!(matches!(load(), Err(SpecError::Read { .. })));
        for text in ["", "[1]", "{\"process\": {\"args\": 1}}"] {
            std::fs::write(folder.path().join(CONFIG), text).unwrap();
            assert!(matches!(load(), Err(SpecError::Json { .. })), "{text}");
        }
        // All are optional to whoever only looks for one.
        std::fs::write(folder.path().join(CONFIG), "{\"process\": {\"args\": [\"a\"]}}").unwrap();
        assert_eq!(load().unwrap().process.args, ["a"]);
    }
}
