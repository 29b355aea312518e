//! Options for the rights of a container.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use container::bundle::security::Limit;

/// What `--security-opt` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SecurityOpt {
    /// No filter of calls.
    Unconfined,
    /// A profile in a file.
    Seccomp(PathBuf),
    /// Whether set-uid files and capabilities of files have no effect.
    NoNewPrivileges(bool),
}

impl FromStr for SecurityOpt {
    type Err = String;

    /// `KEY[=VALUE]`, as Docker and podman have it; `:` is an older form of `=`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once(['=', ':']).unwrap_or((text, ""));
        match (key, value) {
            ("seccomp", "unconfined") => Ok(Self::Unconfined),
            ("seccomp", file) if !file.is_empty() => Ok(Self::Seccomp(file.into())),
            ("no-new-privileges", "" | "true") => Ok(Self::NoNewPrivileges(true)),
            ("no-new-privileges", "false") => Ok(Self::NoNewPrivileges(false)),
            ("label" | "apparmor", _) => {
                Err(format!("there is no \"{key}\" here: quire sets up no SELinux and no AppArmor"))
            }
            _ => Err("it is seccomp=FILE, seccomp=unconfined or no-new-privileges".to_owned()),
        }
    }
}

// What a container may do.
#[derive(Debug, Args)]
pub(crate) struct Security {
    /// Add a capability, such as NET_ADMIN, or ALL
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',')]
    pub(crate) cap_add: Vec<String>,
    /// Drop a capability, or ALL
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',')]
    pub(crate) cap_drop: Vec<String>,
    /// Give all capabilities and all devices of the host, no seccomp filter, and all of /proc and /sys
    #[arg(long)]
    pub(crate) privileged: bool,
    /// Security option: seccomp=FILE, seccomp=unconfined or no-new-privileges
    #[arg(long, value_name = "OPTION")]
    pub(crate) security_opt: Vec<SecurityOpt>,
    /// Add a device of the host; by default with rwm (read, write, mknod)
    #[arg(long, value_name = "HOST[:CONTAINER[:rwm]]")]
    pub(crate) device: Vec<String>,
    /// Limit each process, such as nofile=1024:4096; -1 means no limit
    #[arg(long, value_name = "NAME=SOFT[:HARD]")]
    pub(crate) ulimit: Vec<Limit>,
    /// Limit the number of processes and threads; beyond it, fork fails. By default 2048, without root only beside another
    /// limit; -1 means no limit
    #[arg(long, value_name = "COUNT", allow_hyphen_values = true)]
    pub(crate) pids_limit: Option<i64>,
}
