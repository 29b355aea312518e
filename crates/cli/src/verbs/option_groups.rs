//! Groups of options in help, for verbs with many of them.

use clap::Arg;

/// Options that help shows together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OptionGroup {
    /// None means the options without a heading.
    pub(super) heading: Option<&'static str>,
    /// Whether `-h` shows them. The long help shows all.
    is_in_short: bool,
    /// Names of the fields, in the order of help.
    pub(super) options: &'static [&'static str],
}

const IMAGE: OptionGroup = OptionGroup {
    heading: Some("How the image is read"),
    is_in_short: false,
    options: &["domain", "io", "via", "mount_service"],
};

const LAZY: OptionGroup = OptionGroup {
    heading: Some("Lazy images and registries"),
    is_in_short: false,
    options: &[
        "lazy",
        "trust_index",
        "keep_index",
        "prefetch",
        "complete",
        "authfile",
        "certs_dir",
        "plain_http",
        "tls_verify",
    ],
};

/// Those of `mount`.
pub(crate) const MOUNT: &[OptionGroup] = &[IMAGE, LAZY];

/// Those of the verbs that make a container. The common options come first. Headings come in the order in which the
/// verb has its options.
pub(crate) const CONTAINER: &[OptionGroup] = &[
    OptionGroup {
        heading: None,
        is_in_short: true,
        options: &[
            "name",
            "detach",
            "rm",
            "restart",
            "interactive",
            "terminal",
            "tty",
            "volume",
            "publish",
            "env",
            "env_file",
            "workdir",
            "user",
            "entrypoint",
            "label",
            "label_file",
            "cidfile",
            "replace",
            "pull",
            "platform",
            "from",
            "tz",
            "help",
        ],
    },
    OptionGroup {
        heading: Some("Network"),
        is_in_short: true,
        options: &[
            "network",
            "network_alias",
            "ip",
            "hostname",
            "add_host",
            "no_hosts",
            "dns",
            "dns_search",
            "dns_option",
        ],
    },
    OptionGroup {
        heading: Some("Storage"),
        is_in_short: false,
        options: &[
            "writable",
            "read_only",
            "df",
            "mount",
            "tmpfs",
            "shm_size",
            "image_volume",
            "warm",
        ],
    },
    OptionGroup {
        heading: Some("Limits"),
        is_in_short: false,
        options: &[
            "memory",
            "cpus",
            "cpu_shares",
            "cpuset_cpus",
            "pids_limit",
            "ulimit",
            "oom_score_adj",
            "timeout",
            "log_size",
            "log_driver",
            "log_opt",
        ],
    },
    OptionGroup {
        heading: Some("Security"),
        is_in_short: false,
        options: &[
            "cap_add",
            "cap_drop",
            "privileged",
            "security_opt",
            "device",
            "group_add",
            "userns",
            "uidmap",
            "gidmap",
            "sysctl",
            "umask",
            "verity",
            "digest",
        ],
    },
    IMAGE,
    LAZY,
    OptionGroup {
        heading: Some("Other"),
        is_in_short: false,
        options: &[
            "init",
            "init_path",
            "runtime",
            "stop_signal",
            "stop_timeout",
            "attach",
            "preserve_fds",
            "preserve_fd",
        ],
    },
];

/// Options of groups that `-h` shows, which it leaves out so that a terminal shows the others.
const RARE: [&str; 12] = [
    "tz",
    "restart",
    "tty",
    "label_file",
    "cidfile",
    "replace",
    "platform",
    "no_hosts",
    "dns_search",
    "dns_option",
    "network_alias",
    "ip",
];

/// Puts an option in its group.
pub(super) fn place(groups: &[OptionGroup], arg: Arg) -> Arg {
    for group in groups {
        let Some(at) = group.options.iter().position(|it| arg.get_id() == *it) else { continue };
        let is_rare = !group.is_in_short || RARE.iter().any(|it| arg.get_id() == *it);
        let arg = arg.display_order(at).hide_short_help(is_rare);
        return match group.heading {
            Some(heading) => arg.help_heading(heading),
            None => arg,
        };
    }
    arg
}
