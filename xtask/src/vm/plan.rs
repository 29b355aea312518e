//! What runs in guests, and what may be skipped there.

use std::time::Duration;

/// A test that people can name.
#[derive(Debug)]
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) runs: &'static [Run],
}

/// A test program, or some of its tests.
#[derive(Debug)]
pub(crate) struct Run {
    /// Package and target; the library's own tests are the target of its name.
    pub(crate) program: (&'static str, &'static str),
    /// Tests whose names have one of these; none: all.
    pub(crate) filters: &'static [&'static str],
    /// Tests whose names have one of these are left out.
    pub(crate) without: &'static [&'static str],
    /// Whether the program has libtest's command line and output; else its exit code says all.
    pub(crate) harness: bool,
    /// Whether it is a part of `short`.
    pub(crate) short: bool,
    pub(crate) limit: Duration,
}

const fn run(package: &'static str, target: &'static str, filters: &'static [&'static str]) -> Run {
    let limit = Duration::from_secs(1200);
    Run { program: (package, target), filters, without: &[], harness: true, short: false, limit }
}

const fn plain(run: Run) -> Run {
    Run { harness: false, ..run }
}

const fn short(run: Run) -> Run {
    Run { short: true, ..run }
}

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
            short(run("quire-cli", "verbs", &["mounts::"])),
            run("quire-cli", "verbs", &["runs::", "volumes::", "writable::", "no_room::"]),
            run("quire-cli", "verbs", &["commit::", "containers::", "deaths::", "userns::"]),
            run("quire-cli", "composefs", &[]),
        ],
    },
];

/// A skip that is no failure: the reason has this text, and the kernel is so.
#[derive(Debug)]
pub(crate) struct Skip {
    pub(crate) text: &'static str,
    pub(crate) on: On,
    /// Why nothing is lost.
    pub(crate) why: &'static str,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum On {
    Every,
    Before(u32, u32),
}

pub(crate) const SKIPS: &[Skip] = &[Skip {
    text: "#[ignore]: ",
    on: On::Every,
    why: "measurements, and halves of tests that start them",
}];

/// Whether a reason may be given on this kernel.
pub(crate) fn may_skip(reason: &str, version: (u32, u32)) -> bool {
    // Tests of what came later say it in one form, and check that the kernel's answer is that it is too old.
    if let Some((_, since)) = reason.split_once("this kernel is older than Linux ") {
        let mut numbers = since.split('.').map(str::parse);
        if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
            return version < (major, minor);
        }
    }
    SKIPS.iter().any(|skip| {
        reason.contains(skip.text)
            && match skip.on {
                On::Every => true,
                On::Before(major, minor) => version < (major, minor),
            }
    })
}
