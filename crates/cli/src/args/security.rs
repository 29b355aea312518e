//! Options for the rights of a container.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use container::bundle::security::{Limit, ProfileRequest};

/// A value of `--security-opt`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SecurityOpt {
    /// The container runs without a seccomp filter.
    Unconfined,
    /// File of a seccomp profile.
    Seccomp(PathBuf),
    /// Whether set-uid files and capabilities of files have no effect.
    NoNewPrivileges(bool),
    AppArmor(ProfileRequest),
    /// A part of an SELinux label, which has no effect because Quire sets none.
    Label,
    /// Whether the default profile allows `socketcall`.
    Socketcall(bool),
}

impl FromStr for SecurityOpt {
    type Err = String;

    /// Parses `KEY[=VALUE]`, as Docker and podman do; `:` is an older form of `=`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once(['=', ':']).unwrap_or((text, ""));
        match (key, value) {
            ("seccomp", "unconfined") => Ok(Self::Unconfined),
            ("seccomp", file) if !file.is_empty() => Ok(Self::Seccomp(file.into())),
            ("no-new-privileges", "" | "true") => Ok(Self::NoNewPrivileges(true)),
            ("no-new-privileges", "false") => Ok(Self::NoNewPrivileges(false)),
            ("apparmor", "unconfined") => Ok(Self::AppArmor(ProfileRequest::Unconfined)),
            ("apparmor", name) if !name.is_empty() => {
                Ok(Self::AppArmor(ProfileRequest::Named(name.to_owned())))
            }
            ("label", part) if is_label(part) => Ok(Self::Label),
            ("label", part) => Err(format!(
                "label={part}: use label=disable, or label=user:…, role:…, type:…, level:… or \
                filetype:…"
            )),
            ("socketcall", "" | "true") => Ok(Self::Socketcall(true)),
            ("socketcall", "false") => Ok(Self::Socketcall(false)),
            _ => Err(
                "use seccomp=FILE|unconfined, apparmor=PROFILE|unconfined, label=…, socketcall or \
                no-new-privileges"
                    .to_owned(),
            ),
        }
    }
}

/// Returns whether podman accepts `part` as part of a label. Source: podman-run(1), `--security-opt`.
fn is_label(part: &str) -> bool {
    let words = ["user", "role", "type", "level", "filetype"];
    let is_part = |(word, value): (&str, &str)| words.contains(&word) && !value.is_empty();
    ["disable", "nested"].contains(&part) || part.split_once(':').is_some_and(is_part)
}

// Rights and limits of a container.
#[derive(Debug, Args)]
pub(crate) struct Security {
    /// Add a capability, such as NET_ADMIN, or ALL
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',')]
    pub(crate) cap_add: Vec<String>,
    /// Drop a capability, or ALL
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',')]
    pub(crate) cap_drop: Vec<String>,
    /// Give all capabilities and all devices of the host, no seccomp filter, no AppArmor profile, and all of /proc
    /// and /sys
    #[arg(long)]
    pub(crate) privileged: bool,
    /// Set a security option: seccomp=FILE|unconfined, apparmor=PROFILE|unconfined, no-new-privileges, socketcall
    /// (for 32-bit programs that use the network), or label=… (no effect)
    #[arg(long, value_name = "OPTION")]
    pub(crate) security_opt: Vec<SecurityOpt>,
    /// Add a device of the host; by default with rwm (read, write, mknod)
    #[arg(long, value_name = "HOST[:CONTAINER[:rwm]]")]
    pub(crate) device: Vec<String>,
    /// Limit each process, such as nofile=1024:4096; -1 means no limit
    #[arg(long, value_name = "NAME=SOFT[:HARD]")]
    pub(crate) ulimit: Vec<Limit>,
    /// Limit the number of processes and threads; at the limit, fork fails. The default is 2048; for users who are not
    /// root, only with another limit or in a delegated cgroup. -1 means no limit
    #[arg(long, value_name = "COUNT", allow_hyphen_values = true)]
    pub(crate) pids_limit: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source: podman-run(1), `--security-opt`.
    #[test]
    fn security_options_are_those_of_podman() {
        let apparmor = |wish| Ok(SecurityOpt::AppArmor(wish));
        let named = |name: &str| apparmor(ProfileRequest::Named(name.to_owned()));
        let cases = [
            ("apparmor=unconfined", apparmor(ProfileRequest::Unconfined)),
            ("apparmor:unconfined", apparmor(ProfileRequest::Unconfined)),
            ("apparmor=my-profile", named("my-profile")),
            ("apparmor=/usr/bin/a:b", named("/usr/bin/a:b")),
            ("label=disable", Ok(SecurityOpt::Label)),
            ("label:disable", Ok(SecurityOpt::Label)),
            ("label=nested", Ok(SecurityOpt::Label)),
            ("label=type:spc_t", Ok(SecurityOpt::Label)),
            ("label=level:s0:c1,c2", Ok(SecurityOpt::Label)),
            ("label=filetype:container_file_t", Ok(SecurityOpt::Label)),
            ("seccomp=unconfined", Ok(SecurityOpt::Unconfined)),
            ("no-new-privileges", Ok(SecurityOpt::NoNewPrivileges(true))),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), expect, "{text}");
        }
        for text in ["apparmor", "apparmor=", "label", "label=", "label=type", "label=a:b", "a=b"] {
            assert!(text.parse::<SecurityOpt>().is_err(), "{text}");
        }
    }
}
