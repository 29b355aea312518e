//! Networks and cgroups that a container sees. Needs root.

use std::process::Command;

use crate::container_life::runs::{place, runtimes};
use crate::{add_programs, program};

/// A named network namespace.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Option<Self> {
        if program("ip").is_none() {
            testing::skipped("ip of iproute2 is not here");
            return None;
        }
        let name = format!("quire-{name}-{}", std::process::id());
        let ip = |arguments: &[&str]| {
            let done = Command::new(program("ip").unwrap()).args(arguments).status().unwrap();
            assert!(done.success(), "{arguments:?}");
        };
        ip(&["netns", "add", &name]);
        let made = Self(name);
        ip(&["-n", &made.0, "link", "set", "lo", "up"]);
        ip(&["-n", &made.0, "address", "add", "192.0.2.77/32", "dev", "lo"]);
        Some(made)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Some(ip) = program("ip") {
            let _gone = Command::new(ip).args(["netns", "delete", &self.0]).status();
        }
    }
}

#[test]
fn a_namespace_of_somebody_else_is_joined() {
    let Some(place) = place() else { return };
    let Some(namespace) = Namespace::new("join") else { return };
    let path = format!("/run/netns/{}", namespace.0);
    let show = "cat /proc/net/fib_trie; cat /etc/hosts /etc/hostname; cat /etc/resolv.conf; cat /sys/class/net/lo/address";
    for runtime in runtimes() {
        for more in [&[][..], &["--read-only"]] {
            let network = format!("ns:{path}");
            let options = ["run", "--quiet", "--runtime", runtime, "--network", &network];
            let options =
                [&options[..], &["--hostname", "box", "--dns", "192.0.2.9"], more].concat();
            let ran = place.run_each(&[&options[..], &["a", "--", "sh", "-c", show]].concat());
            assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
            for said in ["192.0.2.77", "127.0.0.1\tbox\nbox\nnameserver 192.0.2.9\n", "00:00:00"] {
                assert!(ran.out.contains(said), "{runtime} {said}: {}", ran.out);
            }
        }
    }
    let file = place.path("tree/etc/short").display().to_string();
    let directory = place.path("tree").display().to_string();
    let pipe = place.path("pipe").display().to_string();
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, mode, 0).unwrap();
    for (network, said) in [
        ("ns:/proc/self/ns/mnt", "is a namespace of kind mount, not a network namespace"),
        (&format!("ns:{file}"), "is a file, not a namespace"),
        (&format!("ns:{directory}"), "is a directory, not a namespace"),
        (&format!("ns:{pipe}"), "is a pipe, not a namespace"),
        ("ns:/run/netns/quire-none", "cannot join it: No such file"),
    ] {
        for verb in [&["run", "a", "true"][..], &["bundle", "a", "out"]] {
            let arguments = [&verb[..1], &["--network", network], &verb[1..]].concat();
            let ran = place.run_each(&arguments);
            let code = if verb[0] == "run" { 125 } else { 2 };
            assert!(ran.code == Some(code) && ran.err.contains(said), "{network}: {}", ran.err);
        }
    }
    for (network, said) in [("ns:", "ns:PATH"), ("bridge", "quire network create")] {
        let ran = place.run_each(&["run", "--network", network, "a", "true"]);
        assert!(ran.code == Some(125) && ran.err.contains(said), "{network}: {}", ran.err);
    }
}

#[test]
fn a_container_sees_its_own_limits_and_changes_none() {
    let Some(place) = place() else { return };
    add_programs(&place.path("tree"), &["/bin/mkdir"]);
    place.out(&format!("import --quiet dir:{} b", place.path("tree").display()));
    // The script reads the files of cgroup v1 and of v2.
    let show = "cd /sys/fs/cgroup; cat memory.max memory/memory.limit_in_bytes 2>&-; echo --; \
                cat pids.max pids/pids.max 2>&-; echo --; cat /proc/self/cgroup; echo --; \
                for at in . */; do test -e $at/cgroup.procs || continue; mkdir $at/x && echo made; \
                echo 0 > $at/cgroup.procs && echo written; done; true";
    for runtime in runtimes() {
        for more in [&[][..], &["--userns", "auto"], &["--network", "host"], &["--read-only"]] {
            let options =
                ["run", "--quiet", "--runtime", runtime, "-m", "64m", "--pids-limit", "77"];
            let options = [&options[..], more, &["b", "--", "sh", "-c", show]].concat();
            let ran = place.run_each(&options);
            assert_eq!(ran.code, Some(0), "{runtime} {more:?}: {}", ran.err);
            let [memory, pids, groups, written] = ran.out.split("--\n").collect::<Vec<_>>()[..]
            else {
                panic!("{}", ran.out)
            };
            assert_eq!((memory, pids), ("67108864\n", "77\n"), "{runtime} {more:?}");
            assert_eq!(written, "", "{runtime} {more:?}");
            for line in groups.lines() {
                assert!(line.ends_with(":/"), "{runtime} {more:?}: {line}");
            }
        }
    }
}

/// Returns the weights of cgroup v2 to which runtimes convert shares of v1. Source:
/// `ConvertCPUSharesToCgroupV2Value` of opencontainers/cgroups. The second formula is used by runc from 1.3.2 on
/// and by crun from 1.23 on.
fn weights(shares: u32) -> [u32; 2] {
    let exponent = f64::from(shares).log2();
    let power = (exponent * exponent + 125.0 * exponent) / 612.0 - 7.0 / 34.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to 10000")]
    let curved = 10_f64.powf(power).ceil() as u32;
    [1 + (shares - 2) * 9999 / 262_142, curved]
}

#[test]
fn shares_have_a_weight() {
    assert_eq!([512, 2048].map(weights), [[20, 59], [79, 174]]);
}

#[test]
fn processors_are_limited() {
    let Some(place) = place() else { return };
    // The script reads the files of cgroup v1 or of v2.
    let show = "cd /sys/fs/cgroup; if test -e cpu.max; then read -r quota period < cpu.max; echo $quota; \
                echo weight; cat cpu.weight cpuset.cpus; \
                else cat cpu/cpu.cfs_quota_us; echo shares; cat cpu/cpu.shares cpuset/cpuset.cpus; fi";
    for runtime in runtimes() {
        for shares in [512, 2048] {
            let text = shares.to_string();
            let options = ["run", "--quiet", "--runtime", runtime, "--cpus", "1.5"];
            let options = [&options[..], &["--cpu-shares", &text, "--cpuset-cpus", "0"]].concat();
            let ran = place.run_each(&[&options[..], &["a", "--", "sh", "-c", show]].concat());
            assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
            let lines: Vec<_> = ran.out.lines().collect();
            let [quota, unit, found, processors] = lines[..] else { panic!("{}", ran.out) };
            assert_eq!((quota, processors), ("150000", "0"), "{runtime}");
            let expect = if unit == "shares" { [shares; 2] } else { weights(shares) };
            assert!(expect.contains(&found.parse().unwrap()), "{runtime}: {found} {unit}");
        }
    }
}
