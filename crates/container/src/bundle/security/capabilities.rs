//! Capabilities of a container: the default ones, and changes by the caller.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::bundle::spec::CapabilitySets;

/// All capabilities, indexed by number. Source: Linux 6.18, `include/uapi/linux/capability.h`.
const ALL: [&str; 41] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// Default capabilities of a container's root: podman's list. Docker also gives `CAP_MKNOD`, `CAP_AUDIT_WRITE` and
/// `CAP_NET_RAW`.
const USUAL: [&str; 11] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Reason why a container cannot have the requested capabilities.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapabilityError {
    /// The name is unknown.
    #[error(
        "there is no capability \"{0}\": see capabilities(7) for the names, for example NET_ADMIN; ALL means all of \
         them"
    )]
    Unknown(String),
    /// The capability is both added and dropped.
    #[error("{0} cannot be both added and dropped")]
    Both(&'static str),
    /// This process does not have the capability.
    #[error("cannot give {0} to a container: this process does not have it")]
    NotHeld(&'static str),
}

/// The capabilities of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "NamedCapabilities", try_from = "NamedCapabilities")]
pub struct Capabilities {
    /// Capabilities of the container's root, which are the most that any of its processes can get.
    bounding: BTreeSet<&'static str>,
    /// Capabilities that users other than root start with, because the caller added them.
    added: BTreeSet<&'static str>,
}

/// Capabilities by their names, as stored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedCapabilities {
    bounding: Vec<String>,
    added: Vec<String>,
}

impl From<Capabilities> for NamedCapabilities {
    fn from(from: Capabilities) -> Self {
        let names = |set: BTreeSet<&str>| set.into_iter().map(str::to_owned).collect();
        Self { bounding: names(from.bounding), added: names(from.added) }
    }
}

impl TryFrom<NamedCapabilities> for Capabilities {
    type Error = CapabilityError;

    fn try_from(from: NamedCapabilities) -> Result<Self, CapabilityError> {
        let set = |names: &[String]| -> Result<BTreeSet<_>, _> {
            names.iter().map(|it| find_capability(it)).collect()
        };
        Ok(Self { bounding: set(&from.bounding)?, added: set(&from.added)? })
    }
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { bounding: USUAL.into(), added: BTreeSet::new() }
    }
}

impl Capabilities {
    /// Returns the default capabilities, or all capabilities of this process if `all` is set, with those in `add` and
    /// without those in `drop`. Names need not begin with `CAP_`. `ALL` means all capabilities of this process.
    pub fn new(all: bool, add: &[String], drop: &[String]) -> Result<Self, CapabilityError> {
        Self::from_options(all, add, drop, &held())
    }

    fn from_options(
        all: bool,
        add: &[String],
        drop: &[String],
        held: &BTreeSet<&'static str>,
    ) -> Result<Self, CapabilityError> {
        let is_all = |name: &String| name.eq_ignore_ascii_case("ALL");
        let named = |names: &[String]| -> Result<BTreeSet<_>, _> {
            names.iter().filter(|it| !is_all(it)).map(|it| find_capability(it)).collect()
        };
        let (added, dropped) = (named(add)?, named(drop)?);
        if let Some(both) = added.intersection(&dropped).next() {
            return Err(CapabilityError::Both(both));
        }
        if let Some(lacking) = added.difference(held).next() {
            return Err(CapabilityError::NotHeld(lacking));
        }
        let base = match () {
            () if add.iter().any(is_all) => held.clone(),
            () if drop.iter().any(is_all) => BTreeSet::new(),
            () if all => held.clone(),
            () => USUAL.into(),
        };
        let bounding = base.union(&added).filter(|it| !dropped.contains(*it)).copied().collect();
        Ok(Self { bounding, added })
    }

    /// Whether the container's root has this capability.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.bounding.contains(name)
    }

    /// Returns the sets in the runtime configuration. Root has all capabilities, and other users have those that the
    /// caller added. If the caller added none, other users can get capabilities from files.
    pub(crate) fn entry(&self, uid: u32) -> CapabilitySets {
        let bounding = names(&self.bounding);
        if uid == 0 || self.added.is_empty() {
            return of_user(bounding, uid);
        }
        let added = names(&self.added);
        CapabilitySets {
            bounding,
            effective: added.clone(),
            permitted: added.clone(),
            inheritable: added.clone(),
            ambient: added,
        }
    }
}

fn names(set: &BTreeSet<&'static str>) -> Vec<String> {
    set.iter().map(|&it| it.to_owned()).collect()
}

/// Returns the sets of a program of this user. Root has all capabilities of the bounding set.
pub(crate) fn of_user(bounding: Vec<String>, uid: u32) -> CapabilitySets {
    let own = if uid == 0 { bounding.clone() } else { Vec::new() };
    CapabilitySets { bounding, effective: own.clone(), permitted: own, ..CapabilitySets::default() }
}

fn find_capability(name: &str) -> Result<&'static str, CapabilityError> {
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    let found = ALL.iter().find(|it| it.strip_prefix("CAP_") == Some(short));
    found.copied().ok_or_else(|| CapabilityError::Unknown(name.to_owned()))
}

/// Returns the bounding set of this process, which limits the capabilities that the process can have.
fn held() -> BTreeSet<&'static str> {
    let bits = status("CapBnd:");
    ALL.iter().enumerate().filter(|(number, _)| bits >> number & 1 == 1).map(|it| *it.1).collect()
}

/// Whether this process may raise limits.
pub(super) fn has_sys_resource() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    status("CapEff:") >> CAP_SYS_RESOURCE & 1 == 1
}

/// Reads a capability set of this process. Source: proc(5).
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(field));
    value.and_then(|it| u64::from_str_radix(it.trim(), 16).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_are_added_and_others_dropped() {
        let held: BTreeSet<_> =
            USUAL.iter().copied().chain(["CAP_NET_ADMIN", "CAP_SYSLOG"]).collect();
        let check = |all, add: &str, drop: &str, expect: Result<(usize, &str), CapabilityError>| {
            let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let found = Capabilities::from_options(all, &names(add), &names(drop), &held);
            match (&found, &expect) {
                (Ok(found), Ok((count, one))) => {
                    assert_eq!(found.bounding.len(), *count, "{add} {drop}");
                    assert!(one.is_empty() || found.has(one), "{add} {drop}");
                }
                _ => assert_eq!(found.map(|_| (0, "")), expect, "{add} {drop}"),
            }
        };
        check(false, "", "", Ok((11, "CAP_CHOWN")));
        check(false, "net_admin", "", Ok((12, "CAP_NET_ADMIN")));
        check(false, "CAP_NET_ADMIN CAP_CHOWN", "KILL", Ok((11, "CAP_NET_ADMIN")));
        check(false, "", "all", Ok((0, "")));
        check(false, "CHOWN", "ALL", Ok((1, "CAP_CHOWN")));
        check(false, "ALL", "", Ok((13, "CAP_SYSLOG")));
        check(false, "ALL", "SYSLOG", Ok((12, "CAP_NET_ADMIN")));
        check(true, "", "", Ok((13, "CAP_SYSLOG")));
        check(true, "", "CHOWN", Ok((12, "CAP_SYSLOG")));
        check(false, "SYSLOG", "CAP_SYSLOG", Err(CapabilityError::Both("CAP_SYSLOG")));
        check(false, "SYS_ADMIN", "", Err(CapabilityError::NotHeld("CAP_SYS_ADMIN")));
        check(false, "", "NO_SUCH", Err(CapabilityError::Unknown("NO_SUCH".to_owned())));
    }

    #[test]
    fn only_root_starts_with_those_that_nobody_asked_for() {
        let usual = Capabilities::default();
        assert_eq!(usual.entry(0).effective.len(), 11);
        assert!(usual.entry(1).effective.is_empty());
        let more = Capabilities { added: ["CAP_CHOWN"].into(), ..usual };
        assert_eq!(more.entry(1).ambient, ["CAP_CHOWN"]);
        assert!(more.entry(0).ambient.is_empty());
    }
}
