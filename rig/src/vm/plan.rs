//! Lists the tests that run in guests, and the accepted skips.

use std::time::Duration;

/// A test that users can select by name.
#[derive(Debug)]
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) runs: &'static [Run],
}

/// A test program, or some of its tests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// Package and target. The target of a library's own tests has the library's name.
    pub(crate) program: (&'static str, &'static str),
    /// Runs only tests whose names contain one of these; empty: all tests.
    pub(crate) filters: &'static [&'static str],
    /// Leaves out tests whose names contain one of these.
    pub(crate) but: &'static [&'static str],
    /// Whether the program has libtest's command line and output. Otherwise only its exit code counts.
    pub(crate) harness: bool,
    /// The first supported kernel version, and the reason.
    pub(crate) since: Option<((u32, u32), &'static str)>,
    /// Whether the run is part of `short`.
    pub(crate) short: bool,
    pub(crate) limit: Duration,
}

const fn run(package: &'static str, target: &'static str, filters: &'static [&'static str]) -> Run {
    let limit = Duration::from_secs(1200);
    Run {
        program: (package, target),
        filters,
        but: &[],
        harness: true,
        since: None,
        short: false,
        limit,
    }
}

const fn plain(run: Run) -> Run {
    Run { harness: false, ..run }
}

const fn short(run: Run) -> Run {
    Run { short: true, ..run }
}

const FILESTORES: Option<((u32, u32), &str)> = Some((
    (6, 12),
    "on Linux 6.1 some filestores that replace others on one loop device read what those wrote; not understood yet",
));

const FUSE_DEVICES: Option<((u32, u32), &str)> =
    Some(((6, 4), "earlier kernels mount no images over devices"));

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "kernel",
        about: "all mounts, their fallbacks and what holds them, as root",
        runs: &[
            short(run("quire-kernel", "privileged", &[])),
            run("quire-kernel", "quire-kernel", &[]),
            plain(run("quire-kernel", "behind", &[])),
            plain(run("quire-kernel", "signals", &[])),
        ],
    },
    Test {
        name: "verity",
        about: "what fs-verity protects is read as it is or not at all",
        runs: &[short(run("quire-cli", "verbs", &["verity::"]))],
    },
    Test {
        name: "inode-share",
        about: "equal files of two images are in memory once (Linux 7.0 and later)",
        runs: &[
            run("quire-kernel", "privileged", &["share::"]),
            short(run("quire-cli", "verbs", &["pages::"])),
        ],
    },
    Test {
        name: "forms",
        about: "images over devices, on every way to a mount",
        runs: &[
            // The last one mounts nothing, so that a test passes even on kernels that support none of these mounts.
            short(run(
                "quire-cli",
                "verbs",
                &["forms::every_form", "forms::a_device_that", "forms::what_came"],
            )),
            run("quire-cli", "verbs", &["forms::"]),
        ],
    },
    Test {
        name: "lazy",
        about: "readers of devices that are filled while they are read",
        runs: &[
            // One test kills the service, and one has no service at all.
            Run {
                since: FUSE_DEVICES,
                ..short(run(
                    "quire-serve",
                    "lazy",
                    &["a_lie_is_an_error", "fuse::nobody_sees", "a_service_that_is_killed"],
                ))
            },
            Run {
                since: FUSE_DEVICES,
                limit: Duration::from_secs(3600),
                ..run("quire-serve", "lazy", &[])
            },
            run("quire-cli", "verbs", &["lazy::", "fuse_devices::", "served::"]),
        ],
    },
    Test {
        name: "rootless",
        about: "containers and mounts of a user who is not root, by trees and by FUSE",
        runs: &[
            short(run(
                "quire-cli",
                "verbs",
                &[
                    "rootless::fuse::containers_run",
                    "rootless::mounts::what_is_lent",
                    "rootless::limits::limits_hold",
                ],
            )),
            run("quire-cli", "verbs", &["rootless::"]),
        ],
    },
    Test {
        name: "labels",
        about: "AppArmor profiles of containers, which are on in Debian's kernels",
        runs: &[
            short(run("quire-cli", "verbs", &["labels::the_profile_denies"])),
            run("quire-cli", "verbs", &["labels::"]),
        ],
    },
    Test {
        name: "store",
        about: "sealing and damage, with fs-verity",
        runs: &[
            short(run("quire-store", "quire-store", &["sealing", "damage"])),
            run("quire-store", "golden", &[]),
        ],
    },
    Test {
        name: "container",
        about: "roots, writable layers and containers",
        runs: &[run("quire-container", "quire-container", &[]), run("quire-container", "run", &[])],
    },
    Test {
        name: "cli",
        about: "the verbs that mount",
        runs: &[
            // Tests of users are in `rootless`.
            Run {
                but: &["rootless::"],
                ..short(run("quire-cli", "verbs", &["mounts::", "a_directory_has_a_limit"]))
            },
            Run {
                since: FILESTORES,
                ..run("quire-cli", "verbs", &["runs::", "volumes::", "writable::", "no_room::"])
            },
            Run {
                since: FILESTORES,
                limit: Duration::from_secs(3600),
                ..run("quire-cli", "verbs", &["containers::", "deaths::", "userns::"])
            },
            run("quire-cli", "composefs", &[]),
        ],
    },
];

/// Accepted reasons of skips, and why no coverage is lost.
pub(crate) const SKIPS: &[(&str, &str)] = &[
    ("#[ignore]: ", "measurements, and halves of tests that start them"),
    // Guests have these inputs if the host has them.
    (
        "QUIRE_TEST_DATA is not set",
        "inputs that are no part of the repository; the host lacks them, too",
    ),
    (
        "`make test-engines` makes the input ",
        "inputs that take minutes; where the host has them, the guest does",
    ),
    // Guests have no modules of these file systems, because btrfs by itself takes seconds to load.
    ("mkfs.xfs is not installed", "stores on XFS are tested on the host"),
    ("mkfs.btrfs is not installed", "stores on btrfs are tested on the host"),
    ("perl is not installed", "networks by pasta are tested on the host"),
    ("no C compiler for a static program", "images without a C library are tested on the host"),
];

/// Whether a skip with this reason is accepted on this kernel. `host_lacks` tests for programs that guests cannot
/// have.
pub(crate) fn may_skip(
    reason: &str,
    version: (u32, u32),
    host_lacks: impl Fn(&str) -> bool,
) -> bool {
    let program = reason.strip_suffix(" is not installed").and_then(|it| it.rsplit(' ').next());
    if program.is_some_and(host_lacks) {
        return true;
    }
    // Tests of newer kernel features report this reason in one form, after they have checked that the kernel's error
    // means that it is too old.
    if let Some((_, since)) = reason.split_once("this kernel is older than Linux ") {
        let mut numbers = since.split('.').map(str::parse);
        if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
            return version < (major, minor);
        }
    }
    SKIPS.iter().any(|(text, _)| reason.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_kernel_lacks_may_be_skipped() {
        let reason = "layers::a: this kernel is older than Linux 6.15";
        let may_skip = |reason, version| may_skip(reason, version, |it| it == "crun");
        assert!(may_skip(reason, (6, 12)));
        assert!(!may_skip(reason, (6, 15)));
        assert!(!may_skip(reason, (7, 2)));
        assert!(!may_skip("this kernel is older than Linux", (6, 1)));
        assert!(!may_skip("mkfs.erofs is not installed", (6, 1)));
        assert!(may_skip("mkfs.xfs is not installed", (6, 1)));
        assert!(may_skip("crun is not installed", (6, 1)));
        assert!(may_skip("mounts::a: crun is not installed", (6, 1)));
    }
}
