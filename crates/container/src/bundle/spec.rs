//! The `config.json` of a bundle in the format of OCI runtimes. Source: OCI runtime-spec 1.0.2, `config.md` and
//! `config-linux.md`, which describe each field.
//!
//! Only fields that Quire writes or reads have names. `rest` holds the other fields of an object, so that a file of
//! another program loses no fields when it is read and written again. Objects without `rest` have no other fields.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use serde::de::{Deserializer as _, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bundle::user::User;
use crate::folder::CONFIG;

/// Version of the specification for Quire's bundles.
pub(crate) const VERSION: &str = "1.0.2";

/// Fields without a name in these types.
type Rest = Map<String, Value>;

/// The whole file. Source: `config.md`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RuntimeSpec {
    /// Version of the specification.
    pub oci_version: String,
    /// The first program of the container.
    pub process: SpecProcess,
    pub root: SpecRoot,
    pub hostname: String,
    /// File systems besides the root, in the order in which they are mounted.
    pub mounts: Vec<SpecMount>,
    /// Metadata for the runtime and for users.
    pub annotations: BTreeMap<String, String>,
    pub linux: SpecLinux,
    #[serde(flatten)]
    pub rest: Rest,
}

/// A program. Source: `config.md`, "Process".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpecProcess {
    /// Whether the program gets a new terminal.
    pub terminal: bool,
    pub user: SpecUser,
    /// The program and its arguments.
    pub args: Vec<String>,
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    pub cwd: String,
    pub capabilities: CapabilitySets,
    /// Whether the process and its children are kept from getting more rights.
    pub no_new_privileges: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rlimits: Vec<SpecLimit>,
    /// Initial size of the terminal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub console_size: Option<ConsoleSize>,
    /// Name of the AppArmor profile, which must be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apparmor_profile: Option<String>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// User and groups of a program, by their ids in the container. Source: `config.md`, "User".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpecUser {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub additional_gids: Vec<u32>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// File mode mask of programs in containers. As with podman and Docker, the caller's mask is not used.
const UMASK: u32 = 0o022;

impl SpecUser {
    pub(crate) fn new(user: &User) -> Self {
        // Runtimes have different defaults, and some use their caller's mask.
        let rest = Rest::from_iter([("umask".to_owned(), UMASK.into())]);
        Self { uid: user.uid, gid: user.gid, additional_gids: user.groups.clone(), rest }
    }
}

/// The capabilities of a program, by name. Source: `config.md`, "Linux Process".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CapabilitySets {
    /// Upper bound for the program and all programs that it executes.
    pub bounding: Vec<String>,
    /// Capabilities that the kernel checks.
    pub effective: Vec<String>,
    /// Capabilities that the program may make effective.
    pub permitted: Vec<String>,
    /// Capabilities that the program may keep when it executes another program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inheritable: Vec<String>,
    /// Capabilities that the program keeps when it executes another program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ambient: Vec<String>,
}

/// A limit of a process. Source: `config.md`, "POSIX process".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecLimit {
    /// Name, such as `RLIMIT_NOFILE`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The enforced limit.
    pub soft: u64,
    /// Upper bound to which the process may raise the soft limit.
    pub hard: u64,
}

/// The size of a terminal, in characters. Source: `config.md`, "Process".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleSize {
    pub height: u16,
    pub width: u16,
}

/// The root file system. Source: `config.md`, "Root".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecRoot {
    /// Path, absolute or relative to the bundle.
    pub path: String,
    pub readonly: bool,
}

/// A file system besides the root. Source: `config.md`, "Mounts".
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpecMount {
    pub destination: String,
    /// Type of the file system; `bind` for a file or directory of the host.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// A device, a path of the host, or any word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Options of mount(8).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
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
    /// New or joined namespaces.
    pub namespaces: Vec<SpecNamespace>,
    pub resources: SpecResources,
    /// Files of the kernel that the container cannot see.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub masked_paths: Vec<String>,
    /// Files of the kernel that the container cannot write to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub readonly_paths: Vec<String>,
    /// Filter of system calls, which only runtimes read. [`Filter`](super::security::Filter) makes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp: Option<Value>,
    /// Devices that the runtime creates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<SpecDevice>,
    /// Path of the cgroups below the root of each hierarchy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroups_path: Option<String>,
    /// Ids of the container's users on the host; empty if they are the same.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uid_mappings: Vec<IdMapping>,
    /// Ids of the container's groups on the host; empty if they are the same.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gid_mappings: Vec<IdMapping>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// A namespace of a container. Source: `config-linux.md`, "Namespaces".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecNamespace {
    /// Kind, such as `network`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Path of an existing namespace; `None` for a new one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

impl SpecNamespace {
    /// Returns an entry for a new namespace.
    pub(crate) fn new(kind: &str) -> Self {
        Self { kind: kind.to_owned(), path: None }
    }
}

/// A range of consecutive ids. Source: `config-linux.md`, "User namespace mappings".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// First id in the container.
    #[serde(rename = "containerID")]
    pub container: u32,
    /// First id on the host.
    #[serde(rename = "hostID")]
    pub host: u32,
    /// Number of ids.
    pub size: u32,
}

/// Limits of a whole container. Source: `config-linux.md`, "Control groups".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecResources {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<SpecMemory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<SpecPids>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<SpecCpu>,
    /// Rules for opening devices. The last matching rule applies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRule>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// Memory limits of a container. Source: `config-linux.md`, "Memory".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecMemory {
    /// Limit, in bytes; -1 for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// Limits of processes and threads of a container. Source: `config-linux.md`, "PIDs".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecPids {
    /// Limit; -1 for none.
    pub limit: i64,
}

/// Processor limits of a container. Source: `config-linux.md`, "CPU".
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecCpu {
    /// Limit of processor time in each period, in microseconds; -1 for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<i64>,
    /// Period, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period: Option<u64>,
    /// Weight against other cgroups that compete for processor time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<u64>,
    /// List of processors, such as `0-2,7`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    #[serde(flatten)]
    pub rest: Rest,
}

/// A rule for opening devices. A field that is `None` matches every device. Source: `config-linux.md`, "Allowed
/// Device list".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRule {
    /// Whether matching devices may be opened.
    pub allow: bool,
    /// `c`, `b` or `a`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Letters of `rwm`: read, write, mknod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access: Option<String>,
}

/// A device that the runtime creates. Source: `config-linux.md`, "Devices".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpecDevice {
    pub path: String,
    /// `c`, `b`, `u` or `p`.
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// Error of reading a `config.json`.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is not valid JSON of this form, or is truncated.
    #[error("{} is not a runtime configuration", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
}

impl RuntimeSpec {
    /// Reads the configuration of the container with this folder.
    pub fn load(folder: &Path) -> Result<Self, SpecError> {
        let path = folder.join(CONFIG);
        match std::fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map_err(|source| SpecError::Json { path, source })
            }
            Err(source) => Err(SpecError::Read { path, source }),
        }
    }

    /// Reads only the first program and its arguments from the configuration of the container with this folder. The rest
    /// of the file behind `process`, which is nearly everything in Quire's files, is neither read nor checked.
    pub(crate) fn load_args(folder: &Path) -> Result<Vec<String>, SpecError> {
        let path = folder.join(CONFIG);
        let file = match File::open(&path) {
            Ok(file) => BufReader::new(file),
            Err(source) => return Err(SpecError::Read { path, source }),
        };
        let mut process = None;
        let mut json = serde_json::Deserializer::from_reader(file);
        match json.deserialize_map(UpToProcess(&mut process)) {
            Err(source) if process.is_none() => Err(SpecError::Json { path, source }),
            _ => Ok(process.unwrap_or_default().args),
        }
    }
}

/// The part of `process` that lists show.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProcessArgs {
    args: Vec<String>,
}

/// Takes `process` from the top of a configuration, and then ends the parsing with an error.
struct UpToProcess<'a>(&'a mut Option<ProcessArgs>);

impl<'de> Visitor<'de> for UpToProcess<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a configuration")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key == "process" {
                *self.0 = Some(map.next_value()?);
                return Err(A::Error::custom("the rest is not needed"));
            }
            let _other: IgnoredAny = map.next_value()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with unknown fields, in every object that may have them.
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
        // All fields are optional, for programs that need only one.
        std::fs::write(folder.path().join(CONFIG), "{\"process\": {\"args\": [\"a\"]}}").unwrap();
        assert_eq!(load().unwrap().process.args, ["a"]);
    }

    #[test]
    fn a_list_reads_no_more_than_the_arguments() {
        let folder = tempfile::tempdir().unwrap();
        let args = || RuntimeSpec::load_args(folder.path());
        assert!(matches!(args(), Err(SpecError::Read { .. })));
        let process = r#"{"ociVersion": "1", "process": {"env": ["A=1"], "args": ["a", "b"]}"#;
        for (text, expect) in [
            (FOREIGN, &["sh"][..]),
            // The rest is cut off or damaged.
            (process, &["a", "b"]),
            (&format!("{process}, \"linux\": \u{0}"), &["a", "b"]),
            (r#"{"linux": {"process": 1}, "process": {}}"#, &[]),
            ("{}", &[]),
        ] {
            std::fs::write(folder.path().join(CONFIG), text).unwrap();
            assert_eq!(args().unwrap(), expect, "{text}");
        }
        for text in ["", "[1]", "{", r#"{"process": {"args": 1}}"#, r#"{"process": {"args": ["a""#]
        {
            std::fs::write(folder.path().join(CONFIG), text).unwrap();
            assert!(matches!(args(), Err(SpecError::Json { .. })), "{text}");
        }
        // Quire writes `process` at the front, so that the rest is not read.
        let spec: RuntimeSpec = serde_json::from_str(FOREIGN).unwrap();
        let written = serde_json::to_string(&spec).unwrap();
        let place = |name: &str| written.find(&format!("\"{name}\":")).unwrap();
        assert!(place("args") < place("root") && place("args") < place("seccomp"));
    }
}
