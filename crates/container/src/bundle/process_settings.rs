//! Settings of a container's processes besides their command, their user and their rights: groups, kernel parameters,
//! the file mode mask, and the score of the out-of-memory killer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bundle::choices::Network;
use crate::bundle::spec::RuntimeSpec;

/// Settings that the caller requests. A field that is empty or `None` keeps the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessSettings {
    /// Additional groups of the user, by names of the image or numbers.
    pub groups: Vec<String>,
    /// Whether processes keep the groups of the caller. In a user namespace, the kernel shows these groups as `nobody`.
    pub keep_groups: bool,
    /// Kernel parameters, by their names in sysctl(8).
    pub sysctl: BTreeMap<String, String>,
    /// File mode mask.
    pub umask: Option<u32>,
    /// Adjustment of the out-of-memory killer's score, from -1000 to 1000.
    pub oom_score: Option<i16>,
}

/// A kernel parameter that a container cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SysctlError {
    /// The text is not `NAME=VALUE`.
    #[error("\"{}\" is not NAME=VALUE, for example net.core.somaxconn=1024", .0.escape_debug())]
    Syntax(String),
    /// The parameter is the host's, and not one of a namespace.
    #[error(
        "{0} is a parameter of the whole host: use net.*, fs.mqueue.*, kernel.msg*, kernel.sem or kernel.shm*"
    )]
    Host(String),
    /// The container shares its network namespace with others.
    #[error("{0} needs a network of the container's own: use --network none or pasta")]
    Network(String),
}

/// Parameters of an IPC namespace. Source: ipc_namespaces(7), and podman's `containers/common/pkg/sysctl`.
const IPC: [&str; 8] = [
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.sem",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "kernel.shm_rmid_forced",
];

/// Beginnings of the names of parameters of namespaces.
const QUEUES: &str = "fs.mqueue.";
const NETWORK: &str = "net.";

/// Annotation that makes crun keep the groups of its caller. Source: crun(1), `run.oci.keep_original_groups`.
const KEEP_GROUPS: &str = "run.oci.keep_original_groups";

/// Parses `NAME=VALUE`. The name must be a parameter of a namespace.
pub fn parse_sysctl(text: &str) -> Result<(String, String), SysctlError> {
    let syntax = || SysctlError::Syntax(text.to_owned());
    let (name, value) = text.split_once('=').ok_or_else(syntax)?;
    // Runtimes turn the name into a path, which must stay in the directory of the parameter's namespace.
    let is_part = |part: &str| {
        let is_good = |it: u8| it.is_ascii_alphanumeric() || b"-_".contains(&it);
        !part.is_empty() && part.bytes().all(is_good)
    };
    if !name.split('.').all(is_part) || value.contains(['\0', '\n']) {
        return Err(syntax());
    }
    if !(IPC.contains(&name) || name.starts_with(QUEUES) || name.starts_with(NETWORK)) {
        return Err(SysctlError::Host(name.to_owned()));
    }
    Ok((name.to_owned(), value.to_owned()))
}

impl ProcessSettings {
    /// Checks that the container has the namespaces of the kernel parameters.
    pub fn check(&self, network: &Network) -> Result<(), SysctlError> {
        let is_own = matches!(network, Network::None | Network::Pasta | Network::Named);
        let mut others = self.sysctl.keys().filter(|it| it.starts_with(NETWORK) && !is_own);
        others.next().map_or(Ok(()), |it| Err(SysctlError::Network(it.clone())))
    }

    /// Writes the settings into a runtime's configuration. The groups are those of its user.
    pub(crate) fn write(&self, spec: &mut RuntimeSpec) {
        if self.keep_groups {
            spec.annotations.insert(KEEP_GROUPS.to_owned(), "1".to_owned());
        }
        if !self.sysctl.is_empty() {
            let sysctl = self.sysctl.iter().map(|(name, it)| (name.clone(), it.clone().into()));
            spec.linux.rest.insert("sysctl".to_owned(), Value::Object(sysctl.collect()));
        }
        if let Some(umask) = self.umask {
            spec.process.user.rest.insert("umask".to_owned(), umask.into());
        }
        if let Some(score) = self.oom_score {
            spec.process.rest.insert("oomScoreAdj".to_owned(), score.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parameters_of_namespaces_are_accepted() {
        let pair = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        let cases = [
            ("net.core.somaxconn=1024", pair("net.core.somaxconn", "1024")),
            ("kernel.shm_rmid_forced=1", pair("kernel.shm_rmid_forced", "1")),
            ("net.ipv4.ip_local_port_range=1 2", pair("net.ipv4.ip_local_port_range", "1 2")),
            ("fs.mqueue.msg_max=", pair("fs.mqueue.msg_max", "")),
            ("kernel.core_pattern=|/x", Err(SysctlError::Host("kernel.core_pattern".to_owned()))),
            ("vm.swappiness=1", Err(SysctlError::Host("vm.swappiness".to_owned()))),
            ("kernel.shmmax.x=1", Err(SysctlError::Host("kernel.shmmax.x".to_owned()))),
        ];
        for (text, expect) in cases {
            assert_eq!(parse_sysctl(text), expect, "{text}");
        }
        for text in
            ["", "net.core", "=1", "net.=1", "net..x=1", "net.a/../b=1", "net.a=1\n2", "net.a b=1"]
        {
            assert_eq!(parse_sysctl(text), Err(SysctlError::Syntax(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn parameters_of_another_network_are_refused() {
        let of = |name: &str| ProcessSettings {
            sysctl: BTreeMap::from([(name.to_owned(), "1".to_owned())]),
            ..ProcessSettings::default()
        };
        let joined = Network::Joined("/run/netns/a".to_owned());
        let other = Network::Container("db".to_owned());
        for network in [Network::Host, joined, other] {
            assert!(of("net.a").check(&network).is_err(), "{network:?}");
            assert_eq!(of("kernel.sem").check(&network), Ok(()), "{network:?}");
        }
        for network in [Network::None, Network::Pasta] {
            assert_eq!(of("net.a").check(&network), Ok(()), "{network:?}");
        }
    }

    /// Source: OCI runtime-spec 1.2, `config.md` and `config-linux.md`.
    #[test]
    fn the_runtime_gets_each_setting() {
        let settings = ProcessSettings {
            groups: Vec::new(),
            keep_groups: true,
            sysctl: BTreeMap::from([("net.a".to_owned(), "1".to_owned())]),
            umask: Some(0o77),
            oom_score: Some(-5),
        };
        let mut spec = RuntimeSpec::default();
        settings.write(&mut spec);
        let spec = serde_json::to_value(&spec).unwrap();
        assert_eq!(spec["linux"]["sysctl"]["net.a"], "1");
        assert_eq!(spec["process"]["user"]["umask"], 63);
        assert_eq!(spec["process"]["oomScoreAdj"], -5);
        assert_eq!(spec["annotations"]["run.oci.keep_original_groups"], "1");
        let mut none = RuntimeSpec::default();
        ProcessSettings::default().write(&mut none);
        assert_eq!(none, RuntimeSpec::default());
    }
}
