//! The rights of a container: system calls, capabilities, devices and limits. Needs root.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{all_runtimes, cgroups, in_own_mounts, place, runtimes};
use crate::{Place, add_programs, program};

/// An image with a program that makes system calls and prints their results.
fn with_calls() -> Option<Place> {
    let place = place()?;
    let Some(compiler) = program("gcc").or_else(|| program("cc")) else {
        testing::skipped("no C compiler for the program that makes calls");
        return None;
    };
    let tree = place.path("tree");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/verbs/container_rights/calls.c");
    let mut compile = Command::new(compiler);
    compile.args(["-static", "-o"]).arg(tree.join("bin/calls")).arg(source);
    assert!(compile.status().unwrap().success());
    add_programs(&tree, &["/bin/ls", "/bin/mknod", "/bin/chmod"]);
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

/// Returns the result of a system call from its line.
fn result<'a>(text: &'a str, call: &str) -> &'a str {
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{call} ")));
    line.unwrap_or_else(|| panic!("no {call} in {text}"))
}

/// Expected errors, from errno(3): EPERM for calls that are refused, ENOSYS for calls that look unknown, so that
/// libraries use something else, and EINVAL for auditing, as in kernels without it.
const REFUSED: [(&str, &str); 9] = [
    ("keyctl", "1"),
    ("add_key", "1"),
    ("request_key", "1"),
    ("io_uring_setup", "1"),
    ("clone", "1"),
    ("unshare-user", "1"),
    ("clone3", "38"),
    ("unknown", "38"),
    ("audit", "22"),
];
const ALLOWED: [&str; 4] = ["route", "unix", "fork", "unshare-files"];

#[test]
fn calls_that_reach_the_host_are_refused() {
    let Some(place) = with_calls() else { return };
    for runtime in runtimes() {
        let check = |what: &str, out: &str| {
            for (call, expect) in REFUSED {
                assert_eq!(result(out, call), expect, "{runtime}, {what}: {call}");
            }
            for call in ["alg", "alg-beyond", "vsock"] {
                assert_eq!(result(out, call), "1", "{runtime}, {what}: {call}");
            }
            for call in ["old-alg", "old-vsock", "old-audit", "old-unix", "old-connect"] {
                let result = result(out, call);
                assert!(
                    ["1", "unsupported"].contains(&result),
                    "{runtime}, {what}: {call} {result}"
                );
            }
            for call in ALLOWED {
                assert_eq!(result(out, call), "0", "{runtime}, {what}: {call}");
            }
        };
        for options in [&[][..], &["--userns", "0:700000:65536"], &["-u", "5:6"], &["--read-only"]]
        {
            let before = ["run", "--quiet", "--runtime", runtime];
            let ran = place.run_each(&[&before, options, &["a", "--", "calls"]].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {options:?}: {}", ran.err);
            check(&format!("{options:?}"), &ran.out);
        }
        let name = format!("confined-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", runtime], "while :; do sleep 1; done");
        let ran = place.run_each(&["exec", &name, "calls"]);
        check("exec", &ran.out);
        // The kernel shows whether programs in the container have a filter. Source: proc(5).
        let ran = place.run_each(&["exec", &name, "cat", "/proc/1/status", "/proc/self/status"]);
        assert_eq!(ran.out.matches("\nSeccomp:\t2\n").count(), 2, "{runtime}: {}", ran.out);
    }
}

/// crun gets the filter that it compiled before: the same bytes, for `run` and for `exec`.
#[test]
fn a_filter_that_is_compiled_already_is_the_same() {
    let Some(place) = with_calls() else { return };
    if !runtimes().any(|it| it == "crun") {
        return;
    }
    let mut filters = Vec::new();
    for number in 0..2 {
        let name = format!("compiled-{number}-{}", std::process::id());
        let _guard = Rm(&place, &name);
        place.out(&format!("run -d --runtime crun --name {name} a -- sleep 60"));
        let folder = place.path("store").join("containers").join(&name);
        filters.push(fs::read(folder.join("runtime").join(&name).join("seccomp.bpf")).unwrap());
        let config: Value =
            serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        // The first container may use a filter that another test has compiled.
        let is_given = config["annotations"]["run.oci.seccomp_bpf_data"].is_string();
        assert!(is_given || number == 0, "it is compiled again");
        let out = place.out(&format!("exec {name} calls"));
        for (call, expect) in REFUSED {
            assert_eq!(result(&out, call), expect, "exec {number}: {call}");
        }
    }
    assert!(!filters[0].is_empty() && filters[0] == filters[1]);
    let out = place.out("run --runtime crun a -- calls");
    for (call, expect) in REFUSED {
        assert_eq!(result(&out, call), expect, "run: {call}");
    }
}

/// The modes do not depend on the umask of the process that makes the files.
#[test]
fn what_is_kept_of_runtimes_and_filters_root_alone_can_write() {
    let Some(place) = place() else { return };
    if !runtimes().any(|it| it == "crun") {
        return;
    }
    for umask in ["000", "077"] {
        let script = format!(
            "mount -t tmpfs tmpfs /run && umask {umask} && \"$@\" && stat -c %a /run/quire"
        );
        for more in [&[][..], &["--userns", "auto"]] {
            let run = [&["run", "--quiet", "--runtime", "crun"], more, &["a", "--", "true"]];
            let Some(ran) = in_own_mounts(&place, &script, &run.concat()) else { return };
            assert_eq!((ran.code, &ran.out[..]), (Some(0), "755\n"), "{umask}: {}", ran.err);
        }
    }
}

#[test]
fn a_filter_can_be_another_one_or_none() {
    let Some(place) = with_calls() else { return };
    let text = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["keyctl"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "args": [], "comment": "x"},
        {"names": ["add_key"], "action": "SCMP_ACT_ERRNO", "includes": {"caps": ["CAP_SYS_ADMIN"]}}
    ]}"#;
    fs::write(place.path("own.json"), text).unwrap();
    fs::write(place.path("broken.json"), "{").unwrap();
    for runtime in runtimes() {
        let run = |options: &[&str]| {
            let before = ["run", "--quiet", "--runtime", runtime];
            let ran = place.run_each(&[&before, options, &["a", "--", "calls"]].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {options:?}: {}", ran.err);
            ran.out
        };
        for options in [&["--security-opt", "seccomp=unconfined"][..], &["--privileged"]] {
            let out = run(options);
            assert_eq!(result(&out, "unshare-user"), "0", "{runtime} {options:?}");
            // With a size of 1, the kernel returns EINVAL.
            assert_eq!(result(&out, "clone3"), "22", "{runtime} {options:?}");
        }
        let out = run(&["--security-opt", "seccomp=own.json"]);
        assert_eq!(
            (result(&out, "keyctl"), result(&out, "unshare-user")),
            ("95", "0"),
            "{runtime}"
        );
        let out = run(&["--cap-add", "SYS_ADMIN"]);
        assert_eq!((result(&out, "keyctl"), result(&out, "unshare-user")), ("1", "0"), "{runtime}");
        assert_eq!(result(&out, "clone3"), "22", "{runtime}");
    }
    for (option, expect) in [
        ("seccomp=broken.json", "not JSON"),
        ("seccomp=none.json", "cannot read the seccomp profile none.json"),
        ("seccomp", "seccomp=FILE"),
        ("apparmor", "apparmor=PROFILE"),
        ("label=enable", "use label=disable"),
        ("label=type:", "use label=disable"),
    ] {
        let ran = place.run(&format!("run --quiet --security-opt {option} a -- true"));
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{option}: {}", ran.err);
    }
}

/// Debian's C library for i386 makes all sockets by `socketcall`. Source: glibc, `__ASSUME_SOCKET_SYSCALL`.
#[test]
fn sockets_of_32_bit_programs_are_for_who_asks_for_them() {
    let Some(place) = with_calls() else { return };
    for runtime in runtimes() {
        for (option, expect) in [("socketcall", "0"), ("socketcall=false", "1")] {
            let before = ["run", "--quiet", "--runtime", runtime, "--security-opt", option];
            let ran = place.run_each(&[&before[..], &["a", "--", "calls"]].concat());
            let result_of = result(&ran.out, "old-unix");
            assert!(
                [expect, "unsupported"].contains(&result_of),
                "{runtime} {option}: {result_of}"
            );
            // The other socket families stay forbidden.
            for call in ["alg", "vsock"] {
                assert_eq!(result(&ran.out, call), "1", "{runtime} {option}: {call}");
            }
        }
    }
    fs::write(place.path("own.json"), r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}"#)
        .unwrap();
    let options = "--security-opt socketcall --security-opt seccomp=own.json";
    let ran = place.run(&format!("run --quiet {options} a -- true"));
    assert!(
        ran.code == Some(125) && ran.err.contains("changes only the default profile"),
        "{}",
        ran.err
    );
}

#[test]
fn capabilities_are_those_of_podman_and_what_is_asked() {
    let Some(place) = with_calls() else { return };
    // The first is the default of `podman run`; the others differ by the bits of capabilities(7).
    let cases: [(&[&str], &str); 6] = [
        (&[], "00000000800405fb"),
        (&["--cap-add", "net_raw,CAP_MKNOD"], "00000000880425fb"),
        (&["--cap-drop", "ALL"], "0000000000000000"),
        (&["--cap-drop", "all", "--cap-add", "CHOWN"], "0000000000000001"),
        (&["--cap-drop", "KILL", "--cap-drop", "CHOWN"], "00000000800405da"),
        (&["-u", "5", "--cap-add", "NET_BIND_SERVICE"], "0000000000000400"),
    ];
    for runtime in runtimes() {
        for (options, expect) in cases {
            let before = ["run", "--quiet", "--runtime", runtime];
            let command = ["a", "--", "cat", "/proc/self/status"];
            let ran = place.run_each(&[&before, options, &command].concat());
            let found = ran.out.lines().find_map(|line| line.strip_prefix("CapEff:\t"));
            assert_eq!(found, Some(expect), "{runtime} {options:?}: {}", ran.err);
            assert!(ran.out.contains("\nNoNewPrivs:\t0\n"), "{runtime}: {}", ran.out);
        }
        let options = ["--security-opt", "no-new-privileges"];
        let command = ["a", "--", "cat", "/proc/self/status"];
        let ran = place.run_each(&[&["run", "--quiet"], &options[..], &command].concat());
        assert!(ran.out.contains("\nNoNewPrivs:\t1\n"), "{runtime}: {} {}", ran.out, ran.err);
        let ran = place.run_each(&[
            "run",
            "--quiet",
            "--runtime",
            runtime,
            "a",
            "mknod",
            "/x",
            "c",
            "1",
            "3",
        ]);
        assert_ne!(ran.code, Some(0), "{runtime}");
    }
    for (options, expect) in [
        ("--cap-add FLYING", "no capability \"FLYING\""),
        ("--cap-add KILL --cap-drop CAP_KILL", "both added and dropped"),
    ] {
        let ran = place.run(&format!("run --quiet {options} a -- true"));
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{options}: {}", ran.err);
    }
}

#[test]
fn devices_and_limits_are_what_is_asked() {
    let Some(place) = with_calls() else { return };
    for runtime in all_runtimes() {
        let run = |options: &[&str], script: &str| {
            let before = ["run", "--quiet", "--runtime", runtime];
            place.run_each(&[&before, options, &["a", "--", "sh", "-c", script]].concat())
        };
        let ran = run(
            &["--ulimit", "nofile=100:200", "--ulimit", "core=0"],
            "ulimit -Sn; ulimit -Hn; ulimit -c",
        );
        assert_eq!(ran.out, "100\n200\n0\n", "{runtime}: {}", ran.err);
    }
    for runtime in runtimes() {
        let run = |options: &[&str], script: &str| {
            let before = ["run", "--quiet", "--runtime", runtime];
            place.run_each(&[&before, options, &["a", "--", "sh", "-c", script]].concat())
        };
        let script = "echo x > /dev/nothing; cat /dev/nothing && ls -l /dev/nothing";
        let ran = run(&["--device", "/dev/null:/dev/nothing:rw"], script);
        assert!(
            ran.code == Some(0) && ran.out.contains("1, 3"),
            "{runtime}: {} {}",
            ran.out,
            ran.err
        );
        assert_eq!(run(&[], "ls /dev/kmsg").code, run(&[], "ls /none").code, "{runtime}");
        if std::path::Path::new("/dev/kmsg").exists() {
            let ran = run(&["--privileged"], "ls /dev/kmsg; echo > /proc/sys/kernel/hostname");
            assert_eq!(ran.out, "/dev/kmsg\n", "{runtime}: {}", ran.err);
        }
        for (options, expect) in [
            (&[][..], "2048"),
            (&["--pids-limit", "70"], "70"),
            (&["--pids-limit", "-1"], "max"),
            (&["--pids-limit", "0"], "max"),
        ] {
            let _guard = Rm(&place, "limited");
            start(
                &place,
                &[&["--name", "limited", "--runtime", runtime], options].concat(),
                "sleep 60",
            );
            let limits = cgroups("limited").into_iter();
            let limits = limits.filter_map(|it| fs::read_to_string(format!("{it}/pids.max")).ok());
            let limits: Vec<_> = limits.map(|it| it.trim().to_owned()).collect();
            // Without an option, runtimes set no limit.
            let is_there = limits.iter().any(|it| it == expect);
            assert!(is_there || limits.is_empty(), "{runtime} {options:?}: {limits:?}");
            place.out("rm --container --force limited");
        }
    }
    for (options, expect) in [
        ("--device /etc/passwd", "is not a device"),
        ("--device /dev/none", "cannot examine the device"),
        ("--device /dev/zero:/dev/../etc/x", "without \"..\""),
        ("--device /dev/zero:/etc/short", "another file at /etc/short"),
        ("--device /dev/zero:/etc/link", "through links to /etc/long"),
        ("--device /dev/zero:/etc", "another file at /etc"),
        ("--device /dev/zero:/dev/null", "another file at /dev/null"),
        ("--device /dev/zero:/dev/shm", "another file at /dev/shm"),
        ("--device /dev/zero:/proc/x", "a file system of the kernel"),
        ("--device /dev/zero:/dev/a --device /dev/null:/dev/a", "another file at /dev/a"),
        ("--device /dev/zero:/new --read-only", "cannot be made in a read-only file system"),
        ("--device /dev/zero:/v/x --volume .:/v", "a directory of the host"),
        ("--ulimit nofile=2:1", "above the hard one"),
        ("--ulimit files=2", "no limit \"files\""),
    ] {
        let ran = place.run(&format!("run --quiet {options} a -- true"));
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{options}: {}", ran.err);
    }
}

/// Podman also mounts `/dev` noexec; Docker does not. Docker masks the files that count how often a processor was too
/// hot. Source: moby `daemon/pkg/oci/defaults.go`.
#[test]
fn nothing_in_dev_is_executed_and_hot_processors_are_masked() {
    let Some(place) = with_calls() else { return };
    for runtime in runtimes() {
        let run = |options: &[&str], script: &str| {
            let before = ["run", "--quiet", "--runtime", runtime];
            place.run_each(&[&before, options, &["a", "--", "sh", "-c", script]].concat())
        };
        for options in [&[][..], &["--userns", "auto"], &["--read-only"]] {
            let ran = run(options, "cat /bin/calls > /dev/calls; cat /proc/mounts");
            let line = ran.out.lines().find(|it| it.contains(" /dev tmpfs ")).unwrap();
            assert!(line.contains("noexec") && line.contains("nosuid"), "{runtime}: {line}");
        }
        let script = "cat /bin/calls > /dev/calls; chmod 755 /dev/calls; exec /dev/calls";
        assert_eq!(run(&[], script).code, Some(126), "{runtime}");
        // The program of `--init` is executed from `/dev`.
        if ["catatonit", "tini-static", "docker-init"].iter().any(|it| program(it).is_some()) {
            for options in [&["--init"][..], &["--init", "--userns", "auto"]] {
                assert_eq!(run(options, "exit 7").code, Some(7), "{runtime} {options:?}");
            }
        }
    }
    place.out("bundle a b -- true");
    let text = fs::read(place.path("b/config.json")).unwrap();
    place.out("umount b/rootfs");
    let config: Value = serde_json::from_slice(&text).unwrap();
    let masked = config["linux"]["maskedPaths"].as_array().unwrap();
    for number in 0..1024 {
        let path = format!("/sys/devices/system/cpu/cpu{number}/thermal_throttle");
        let is_there = std::path::Path::new(&path).exists();
        assert_eq!(masked.contains(&path.clone().into()), is_there, "{path}");
    }
}

/// A bundle is for any runtime, so it has a filter. The configuration for gVisor has none, because its kernel
/// filters calls.
#[test]
fn a_bundle_has_the_filter() {
    let Some(place) = place() else { return };
    place.out("bundle a b -- true");
    let config: Value =
        serde_json::from_slice(&fs::read(place.path("b/config.json")).unwrap()).unwrap();
    place.out("umount b/rootfs");
    assert_eq!(config["linux"]["seccomp"]["defaultErrnoRet"], 38);
    if program("runsc").is_some() {
        let _guard = Rm(&place, "sandbox");
        start(&place, &["--name", "sandbox", "--runtime", "runsc"], "sleep 60");
        let path = place.path("store/containers/sandbox/config.json");
        let config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        assert_eq!(config["linux"]["seccomp"], Value::Null);
        place.out("rm --container --force sandbox");
        let ran =
            place.run("run --quiet --runtime runsc --security-opt seccomp=own.json a -- true");
        assert_eq!(ran.code, Some(125), "{}", ran.err);
    }
}
