//! Filters of a container's system calls: converts profiles in the format of Docker and podman to the format of
//! runtimes.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Capabilities;

/// The default profile, which contains the reason for each system call.
const USUAL: &str = include_str!("seccomp.json");

/// The filter of a container's system calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Filter {
    #[default]
    Usual,
    /// The default filter with `socketcall`, by which 32-bit x86 programs create sockets.
    Socketcall,
    /// All system calls are allowed.
    Unconfined,
    /// A filter from the caller.
    Profile(Profile),
}

/// Reason why a container cannot have a filter, a profile or a device.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The profile is not JSON.
    #[error("the seccomp profile is not JSON")]
    Json(#[source] serde_json::Error),
    /// The profile lacks a required part.
    #[error("the seccomp profile has no {0}: write it in the format of Docker and podman")]
    Lacks(&'static str),
    /// The profile has an unknown condition, which must not be ignored.
    #[error("the seccomp profile has an unknown condition \"{0}\"")]
    Condition(String),
    /// gVisor accepts no seccomp profile.
    #[error("runsc does not support seccomp profiles: gVisor's kernel handles the calls")]
    Runtime,
    /// gVisor accepts no AppArmor profile.
    #[error(
        "runsc does not support AppArmor profiles, so \"{0}\" would have no effect: leave it out"
    )]
    AppArmor(String),
    /// gVisor does not support the device.
    #[error(
        "runsc does not support the device \"{0}\": gVisor's kernel would show it, but no program \
        could open it"
    )]
    Device(String),
}

/// A validated profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Profile(Value);

/// Properties that the conditions of a profile test.
struct Machine<'a> {
    capabilities: &'a Capabilities,
    /// Name of the architecture in Go.
    architecture: &'a str,
    kernel: (u32, u32),
}

impl Profile {
    /// Parses and validates a profile.
    pub fn read(bytes: &[u8]) -> Result<Self, FilterError> {
        serde_json::from_slice::<Value>(bytes).map_err(FilterError::Json)?.try_into()
    }
}

impl TryFrom<Value> for Profile {
    type Error = FilterError;

    fn try_from(profile: Value) -> Result<Self, FilterError> {
        if !profile["defaultAction"].is_string() {
            return Err(FilterError::Lacks("defaultAction"));
        }
        let rules = profile["syscalls"].as_array().ok_or(FilterError::Lacks("syscalls"))?;
        for rule in rules {
            if !rule["names"].is_array() && !rule["name"].is_string() {
                return Err(FilterError::Lacks("names of calls"));
            }
            let conditions = [&rule["includes"], &rule["excludes"]];
            let keys = conditions.iter().filter_map(|it| it.as_object()).flat_map(|it| it.keys());
            let is_known = |key: &&String| ["caps", "arches", "minKernel"].contains(&key.as_str());
            if let Some(unknown) = keys.into_iter().find(|key| !is_known(key)) {
                return Err(FilterError::Condition(unknown.clone()));
            }
        }
        Ok(Self(profile))
    }
}

impl Profile {
    /// Returns the filter in the format of runtimes, for a container with these capabilities on this machine.
    fn entry(&self, machine: &Machine<'_>) -> Value {
        let profile = &self.0;
        let mut entry = json!({"defaultAction": profile["defaultAction"]});
        if !profile["defaultErrnoRet"].is_null() {
            entry["defaultErrnoRet"] = profile["defaultErrnoRet"].clone();
        }
        let architectures = match profile["archMap"].as_array() {
            Some(map) => {
                let own = map.iter().find(|it| it["architecture"] == scmp(machine.architecture));
                own.map(|own| {
                    let others = own["subArchitectures"].as_array().into_iter().flatten();
                    std::iter::once(&own["architecture"]).chain(others).cloned().collect()
                })
            }
            None => Some(profile["architectures"].clone()).filter(Value::is_array),
        };
        // A filter without architectures is for the machine's own one.
        if let Some(architectures) = architectures {
            entry["architectures"] = architectures;
        }
        let rules = profile["syscalls"].as_array().into_iter().flatten();
        entry["syscalls"] = rules.filter(|it| machine.wants(it)).map(rule).collect();
        entry
    }
}

/// Converts a rule. Comments and conditions are left out.
fn rule(rule: &Value) -> Value {
    let names = match &rule["name"] {
        Value::Null => rule["names"].clone(),
        name => json!([name]),
    };
    let mut entry = json!({"names": names, "action": rule["action"]});
    if !rule["errnoRet"].is_null() {
        entry["errnoRet"] = rule["errnoRet"].clone();
    }
    if rule["args"].as_array().is_some_and(|it| !it.is_empty()) {
        entry["args"] = rule["args"].clone();
    }
    entry
}

impl Machine<'_> {
    /// Whether all `includes` conditions of a rule are true, and no `excludes` condition is.
    fn wants(&self, rule: &Value) -> bool {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let has =
            |capability: &Value| capability.as_str().is_some_and(|it| self.capabilities.has(it));
        let is_here = |name: &Value| name.as_str() == Some(self.architecture);
        let (includes, excludes) = (&rule["includes"], &rule["excludes"]);
        let arches = list(&includes["arches"]);
        list(&includes["caps"]).iter().all(has)
            && (arches.is_empty() || arches.iter().any(is_here))
            && includes["minKernel"].as_str().is_none_or(|it| self.is_since(it))
            && !list(&excludes["caps"]).iter().any(has)
            && !list(&excludes["arches"]).iter().any(is_here)
            && !excludes["minKernel"].as_str().is_some_and(|it| self.is_since(it))
    }

    fn is_since(&self, version: &str) -> bool {
        version_of(version).is_some_and(|it| self.kernel >= it)
    }
}

fn version_of(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|it: char| !it.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns the name of this machine's architecture in Go. Source: `go tool dist list`.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "x86" => "x86",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// Returns libseccomp's name of an architecture.
fn scmp(architecture: &str) -> &'static str {
    match architecture {
        "amd64" => "SCMP_ARCH_X86_64",
        "x86" => "SCMP_ARCH_X86",
        "arm64" => "SCMP_ARCH_AARCH64",
        "arm" => "SCMP_ARCH_ARM",
        "riscv64" => "SCMP_ARCH_RISCV64",
        "ppc64le" => "SCMP_ARCH_PPC64LE",
        "s390x" => "SCMP_ARCH_S390X",
        _ => "",
    }
}

impl Filter {
    /// Returns the filter in the format of runtimes, or `None` for no filter.
    pub(super) fn entry(&self, capabilities: &Capabilities) -> Option<Value> {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let kernel = version_of(&release).unwrap_or_default();
        let machine = Machine { capabilities, architecture: architecture(), kernel };
        match self {
            Self::Unconfined => None,
            Self::Profile(profile) => Some(profile.entry(&machine)),
            Self::Usual => Some(usual().entry(&machine)),
            Self::Socketcall => {
                let mut entry = usual().entry(&machine);
                for rule in entry["syscalls"].as_array_mut().into_iter().flatten() {
                    if rule["names"] == json!(["socketcall"]) {
                        *rule = json!({"names": ["socketcall"], "action": "SCMP_ACT_ALLOW"});
                    }
                }
                Some(entry)
            }
        }
    }
}

fn usual() -> Profile {
    Profile::read(USUAL.as_bytes()).expect("Quire's default profile is valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error number of a call without conditions on its arguments, or `None` if the call is allowed.
    fn action(entry: &Value, call: &str) -> Option<u64> {
        let rules = entry["syscalls"].as_array().unwrap().iter();
        let mut rules = rules.filter(|it| {
            it["names"].as_array().unwrap().contains(&call.into()) && it["args"].is_null()
        });
        let found = rules.next();
        assert!(rules.next().is_none(), "{call} has two rules");
        match found {
            Some(rule) if rule["action"] == "SCMP_ACT_ALLOW" => None,
            Some(rule) => rule["errnoRet"].as_u64(),
            None => entry["defaultErrnoRet"].as_u64(),
        }
    }

    fn usual(add: &[&str], architecture: &str) -> Value {
        let drop = [String::from("ALL")];
        let add: Vec<_> = add.iter().map(|&it| it.to_owned()).collect();
        let capabilities = Capabilities::new(false, &add, &drop).unwrap();
        let machine = Machine { capabilities: &capabilities, architecture, kernel: (6, 1) };
        Profile::read(USUAL.as_bytes()).unwrap().entry(&machine)
    }

    /// Source of the numbers: errno(3).
    #[test]
    fn calls_follow_capabilities() {
        const EPERM: Option<u64> = Some(1);
        const ENOSYS: Option<u64> = Some(38);
        let without = usual(&[], "amd64");
        for (call, expect) in [
            ("read", None),
            ("execve", None),
            ("arch_prctl", None),
            ("keyctl", EPERM),
            ("add_key", EPERM),
            ("request_key", EPERM),
            ("io_uring_setup", EPERM),
            ("mount", EPERM),
            ("setns", EPERM),
            ("chroot", EPERM),
            ("bpf", EPERM),
            ("syslog", EPERM),
            ("clone3", ENOSYS),
            ("no_such_call", ENOSYS),
            ("s390_pci_mmio_read", ENOSYS),
        ] {
            assert_eq!(action(&without, call), expect, "{call}");
        }
        let has = |add: &[&str], calls: &[&str]| {
            for call in calls {
                assert_eq!(action(&usual(add, "amd64"), call), None, "{call} with {add:?}");
            }
        };
        has(&["SYS_CHROOT"], &["chroot"]);
        // If this process lacks a capability, its containers cannot have that capability.
        if Capabilities::new(false, &["SYS_ADMIN".to_owned()], &[]).is_ok() {
            has(&["SYS_ADMIN"], &["mount", "clone", "clone3", "unshare", "setns", "bpf", "syslog"]);
        }
    }

    /// Source: glibc 2.41, `__ASSUME_SOCKET_SYSCALL` in `sysdeps/unix/sysv/linux/*/kernel-features.h`.
    #[test]
    fn socketcall_is_for_machines_that_need_it() {
        let check = |architecture: &str, expect| {
            assert_eq!(action(&usual(&[], architecture), "socketcall"), expect, "{architecture}");
        };
        check("amd64", Some(1));
        check("ppc64le", Some(1));
        check("s390x", None);
        check("x86", None);
        let asked = Filter::Socketcall.entry(&Capabilities::default()).unwrap();
        assert_eq!(action(&asked, "socketcall"), None);
        let calls = asked["syscalls"].as_array().unwrap().iter();
        let mut sockets = calls.filter(|it| it["names"].to_string().contains("\"socket"));
        assert_eq!(sockets.next().unwrap()["names"], json!(["socketcall"]), "it stands first");
    }

    #[test]
    fn second_architectures_are_listed() {
        let check = |architecture: &str, expect: &[&str]| {
            assert_eq!(usual(&[], architecture)["architectures"], json!(expect));
        };
        check("amd64", &["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]);
        check("arm64", &["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]);
        check("riscv64", &["SCMP_ARCH_RISCV64"]);
    }

    #[test]
    fn what_is_no_profile_is_refused() {
        let check = |text: &str, expect: &str| {
            let error = Profile::read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expect), "{text}: {error}");
        };
        check("x", "not JSON");
        check("{}", "no defaultAction");
        check(r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#, "no syscalls");
        check(r#"{"defaultAction": "A", "syscalls": [{}]}"#, "no names");
        let odd = r#"{"defaultAction": "A", "syscalls": [{"names": [], "includes": {"moon": 1}}]}"#;
        check(odd, "condition \"moon\"");
    }
}
