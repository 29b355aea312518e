//! Labels of security modules: AppArmor profiles of containers, and options for SELinux that are accepted. Needs
//! root.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{in_own_mounts, place, runtimes};
use crate::{Place, Ran, add_programs, program};

const PROFILE: &str = "quire-default";

/// Makes a mount namespace look like a host with AppArmor. `$1` is a folder with the programs of that host.
const APPARMOR: &str = r#"set -e
    for path in /usr/sbin/apparmor_parser /sbin/apparmor_parser; do
        if test -f "$path"; then mount --bind /dev/null "$path"; fi
    done
    if test -d /etc/apparmor.d; then mount -t tmpfs tmpfs /etc/apparmor.d; fi
    mount -t tmpfs tmpfs /sys/module
    mkdir -p /sys/module/apparmor/parameters
    echo Y >/sys/module/apparmor/parameters/enabled
    mount -t tmpfs tmpfs /sys/kernel/security
    mkdir /sys/kernel/security/apparmor
"#;

/// Imitates the parser and the kernel, and saves the parser's arguments and input.
const PARSER: &str = "#!/bin/sh
    echo \"$@\" >\"${0%/*}/arguments\"
    cat >\"${0%/*}/input\"
    echo 'quire-default (enforce)' >>/sys/kernel/security/apparmor/profiles
";

/// Returns the profile in a bundle that was made on such a host, and the output.
fn bundle(place: &Place, prepare: &str, options: &[&str]) -> Option<(Ran, Value)> {
    let folder = place.path("bundle");
    // The mount is gone with the namespace.
    let _none_yet = fs::remove_dir_all(&folder);
    let script = format!("{APPARMOR}{prepare}\nexec \"$@\"");
    let ran = in_own_mounts(
        place,
        &script,
        &[&["bundle"], options, &["a", "bundle", "--", "true"]].concat(),
    )?;
    let config = fs::read(folder.join("config.json")).unwrap_or_else(|_| b"null".to_vec());
    let config: Value = serde_json::from_slice(&config).unwrap();
    Some((ran, config["process"]["apparmorProfile"].clone()))
}

/// Each host is simulated by the files that Quire reads.
#[test]
fn the_host_decides_which_profile_a_container_has() {
    let Some(place) = place() else { return };
    let programs = place.path("programs");
    fs::create_dir(&programs).unwrap();
    testing::script(&programs.join("apparmor_parser"), PARSER);
    let broken = place.path("broken");
    fs::create_dir(&broken).unwrap();
    testing::script(
        &broken.join("apparmor_parser"),
        "#!/bin/sh\ncat >/dev/null\necho 'AppArmor parser error: no permission' >&2\nexit 1\n",
    );
    let list = |names: &str| {
        format!("printf '{names}' >/sys/kernel/security/apparmor/profiles; ulimit -c 0")
    };
    let path = |it: &Path| format!("\nPATH={}:$PATH", it.display());
    let (other, loaded) = (list(r"other (enforce)\n"), list(r"quire-default (enforce)\n"));
    let (with_parser, with_broken) =
        (other.clone() + &path(&programs), other.clone() + &path(&broken));
    // The host, the options, the profile, and the message.
    let cases: [(&str, &[&str], Option<&str>, &str); 12] = [
        (&with_parser, &[], Some(PROFILE), ""),
        (&loaded, &[], Some(PROFILE), ""),
        (&other, &[], None, "apparmor_parser is not installed"),
        (&with_broken, &[], None, "AppArmor parser error: no permission"),
        ("", &[], None, "cannot read /sys/kernel/security/apparmor/profiles"),
        (&with_parser, &["--privileged"], None, ""),
        (&with_parser, &["--security-opt", "apparmor=unconfined"], None, ""),
        (&with_parser, &["--privileged", "--security-opt", "apparmor=other"], Some("other"), ""),
        (&with_parser, &["--security-opt", "apparmor=quire-default"], Some(PROFILE), ""),
        (&with_parser, &["--security-opt", "apparmor=none"], None, "\"none\" is not loaded"),
        (&other, &["--security-opt", "apparmor=quire-default"], None, "is not installed"),
        (
            &other,
            &["--security-opt", "apparmor=other", "--security-opt", "apparmor=unconfined"],
            None,
            "apparmor occurs twice",
        ),
    ];
    for (host, options, expect, said) in cases {
        let Some((ran, found)) = bundle(&place, host, options) else { return };
        assert_eq!(found.as_str(), expect, "{host} {options:?}: {}", ran.err);
        let is_error = expect.is_none() && options.len() > 1 && !said.is_empty();
        assert_eq!(ran.code, Some(if is_error { 2 } else { 0 }), "{options:?}: {}", ran.err);
        let remarks =
            ran.err.lines().filter(|it| it.contains("AppArmor") || it.contains("apparmor"));
        assert_eq!(remarks.count(), usize::from(!said.is_empty()), "{options:?}: {}", ran.err);
        assert!(ran.err.contains(said), "{options:?}: {}", ran.err);
    }
    // The parser got the text, and has left no cache.
    let input = fs::read_to_string(programs.join("input")).unwrap();
    assert!(input.contains("\nprofile quire-default "), "{input}");
    let arguments = fs::read_to_string(programs.join("arguments")).unwrap();
    assert_eq!(arguments, "--replace --skip-cache\n");
    // The installed file is used, because the administrator may have changed it.
    let installed = with_parser + "\necho changed >/etc/apparmor.d/quire-default";
    let prepare = format!("mkdir -p /etc/apparmor.d\n{installed}");
    if Path::new("/etc/apparmor.d").is_dir() {
        let (ran, found) = bundle(&place, &prepare, &[]).unwrap();
        assert_eq!(found, PROFILE, "{}", ran.err);
        let arguments = fs::read_to_string(programs.join("arguments")).unwrap();
        assert_eq!(arguments, "--replace --skip-cache /etc/apparmor.d/quire-default\n");
    }
}

/// Scripts for Fedora use these options everywhere. Source: podman-run(1).
#[test]
fn labels_of_selinux_are_accepted_and_have_no_effect() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("v")).unwrap();
    fs::write(place.path("v/file"), "of the host\n").unwrap();
    let mount = format!("type=bind,src={},dst=/v,relabel=shared", place.path("v").display());
    let each: [&[&str]; 7] = [
        &["-v", "./v:/v:z"],
        &["-v", "./v:/v:Z"],
        &["-v", "./v:/v:ro,Z"],
        &["--mount", &mount],
        &["-v", "./v:/v", "--security-opt", "label=disable"],
        &["-v", "./v:/v", "--security-opt", "label:type:spc_t"],
        &["-v", "./v:/v", "--security-opt", "label=level:s0:c1,c2"],
    ];
    let is_enforcing = fs::read_to_string("/sys/fs/selinux/enforce").is_ok_and(|it| it == "1");
    for options in each {
        let ran = place.run_each(&[&["run"], options, &["a", "--", "cat", "/v/file"]].concat());
        assert_eq!((ran.code, &*ran.out), (Some(0), "of the host\n"), "{options:?}: {}", ran.err);
        assert!(is_enforcing || !ran.err.contains("SELinux"), "{options:?}: {}", ran.err);
    }
    // On a host with SELinux, one remark says that labels have no effect, but only if the options ask for labels.
    let host = |enforce: &str| {
        format!(
            "set -e; mount -t tmpfs tmpfs /sys/fs; mkdir /sys/fs/selinux
            echo {enforce} >/sys/fs/selinux/enforce; exec \"$@\""
        )
    };
    let all = ["-v", "./v:/v:z", "--security-opt", "label=disable"];
    let cases = [
        ("1", &all[..], 1),
        ("1", &all[..2], 1),
        ("1", &all[2..], 1),
        ("1", &[], 0),
        ("0", &all, 0),
    ];
    for (number, (enforce, options, expect)) in cases.into_iter().enumerate() {
        let folder = format!("bundle-{number}");
        let arguments = [&["bundle"], options, &["a", &folder, "--", "true"]].concat();
        let Some(ran) = in_own_mounts(&place, &host(enforce), &arguments) else { return };
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let said = ran.err.matches("SELinux is enforcing").count();
        assert_eq!(said, expect, "{enforce} {options:?}: {}", ran.err);
    }
}

/// A place with an image whose programs try restricted operations. `None` unless the kernel has AppArmor and the
/// parser is installed.
fn with_apparmor() -> Option<Place> {
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    if !enabled.is_ok_and(|it| it.starts_with('Y')) {
        testing::skipped("AppArmor is off in this kernel");
        return None;
    }
    let place = place()?;
    testing::program("apparmor_parser")?;
    let busybox = program("busybox")?;
    add_programs(&place.path("tree"), &[busybox.to_str().unwrap()]);
    fs::rename(
        place.path("tree").join(busybox.strip_prefix("/").unwrap()),
        place.path("tree/bin/busybox"),
    )
    .unwrap();
    place.out(&format!("import --quiet dir:{} a", place.path("tree").display()));
    Some(place)
}

/// Runs the parser on a profile.
fn parse(option: &str, profile: &str) -> bool {
    let parser = testing::find_program("apparmor_parser").unwrap();
    let mut command = Command::new(parser);
    command.args([option, "--skip-cache"]).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(profile.as_bytes()).unwrap();
    child.wait().unwrap().success()
}

/// Returns for each line `NAME CODE` the name and whether the code is 0.
fn codes(out: &str) -> Vec<(&str, bool)> {
    out.lines()
        .filter_map(|it| it.split_once(' '))
        .map(|(name, code)| (name, code == "0"))
        .collect()
}

/// Tries each operation, and prints whether it succeeded. All operations are harmless: `h` prints help to the kernel's
/// log, and to other files whose content has an effect, zero bytes are written.
const ATTEMPTS: &str = "busybox mkdir -p /tmp/m
    try() { name=$1; shift; sh -c \"$*\" >/dev/null 2>&1; echo \"$name $?\"; }
    try mount busybox mount -t tmpfs tmpfs /tmp/m
    try remount busybox mount -o remount,rw /
    try sysrq 'echo h >/proc/sysrq-trigger'
    try kcore 'busybox head -c 1 /proc/kcore'
    try sysctl ': >/proc/sys/kernel/core_pattern'
    try vm ': >/proc/sys/vm/drop_caches'
    try firmware 'busybox ls /sys/firmware/*/'
    try sysfs ': >/sys/kernel/mm/ksm/run'
    try own 'echo 5 >/proc/self/oom_score_adj'
    try shared ': >/proc/sys/kernel/shmmax'
    try cgroup ': >/sys/fs/cgroup/cgroup.procs'
    try kill 'busybox sleep 9 & kill $!'
    try write 'echo >/tmp/new; busybox rm /tmp/new'";

/// The container has all capabilities, and neither seccomp nor masked or read-only paths, so only AppArmor denies
/// access. Source of the list: containers/common, pkg/apparmor/apparmor_linux_template.go.
#[test]
fn the_profile_denies_what_capabilities_allow() {
    let Some(place) = with_apparmor() else { return };
    let denied = ["mount", "remount", "sysrq", "kcore", "sysctl", "vm", "firmware", "sysfs"];
    for runtime in runtimes() {
        let run = |options: &[&str]| {
            let before = ["run", "--quiet", "--runtime", runtime, "--privileged"];
            let ran =
                place.run_each(&[&before, options, &["a", "--", "sh", "-c", ATTEMPTS]].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {options:?}: {}", ran.err);
            ran.out
        };
        let out = run(&["--security-opt", "apparmor=quire-default"]);
        for (name, could) in codes(&out) {
            assert_eq!(could, !denied.contains(&name), "{runtime}: {name}\n{out}");
        }
        assert_eq!(codes(&out).len(), 13, "{out}");
        // Some kernels lack some of the files, so the operations fail for all programs.
        let out = run(&[]);
        let lacks = |name: &str| match name {
            "kcore" => !Path::new("/proc/kcore").exists(),
            "firmware" => !Path::new("/sys/firmware").exists(),
            "sysfs" => !Path::new("/sys/kernel/mm/ksm/run").exists(),
            "sysrq" => !Path::new("/proc/sysrq-trigger").exists(),
            _ => false,
        };
        for (name, could) in codes(&out) {
            assert!(could || lacks(name), "{runtime}, unconfined: {name}\n{out}");
        }
        // The capability without a seccomp filter is also not enough.
        let script = "busybox mkdir /tmp/m; busybox mount -t tmpfs tmpfs /tmp/m";
        for (apparmor, expect) in [("quire-default", false), ("unconfined", true)] {
            let ran = place.run_each(&[
                "run",
                "--quiet",
                "--runtime",
                runtime,
                "--cap-add",
                "SYS_ADMIN",
                "--security-opt",
                "seccomp=unconfined",
                "--security-opt",
                &format!("apparmor={apparmor}"),
                "a",
                "--",
                "sh",
                "-c",
                script,
            ]);
            assert_eq!(ran.code == Some(0), expect, "{runtime} {apparmor}: {}", ran.err);
        }
    }
}

#[test]
fn containers_have_the_profile_from_start_to_end() {
    let Some(place) = with_apparmor() else { return };
    const CURRENT: &str = "/proc/self/attr/current";
    let confined = "quire-default (enforce)\n";
    // AppArmor 4 gives runtimes profiles with their own names that confine nothing.
    let is_free = |label: &str| label == "unconfined\n" || label.ends_with(" (unconfined)\n");
    for runtime in runtimes() {
        let cases: [(&[&str], bool); 8] = [
            (&[], true),
            (&["--userns", "0:700000:65536"], true),
            (&["-u", "5:6"], true),
            (&["--read-only"], true),
            (&["--security-opt", "no-new-privileges"], true),
            (&["--network", "host"], true),
            (&["--security-opt", "apparmor=unconfined"], false),
            (&["--privileged"], false),
        ];
        for (options, expect) in cases {
            let before = ["run", "--runtime", runtime];
            let ran = place.run_each(&[&before, options, &["a", "--", "cat", CURRENT]].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {options:?}: {}", ran.err);
            let is_right = if expect { ran.out == confined } else { is_free(&ran.out) };
            assert!(is_right, "{runtime} {options:?}: {}", ran.out);
            assert!(!ran.err.contains("AppArmor"), "{runtime} {options:?}: {}", ran.err);
        }
        // These checks are made in a running container: exec, signals of Quire and of the runtime, and the end.
        let name = format!("labelled-{runtime}");
        let _guard = Rm(&place, &name);
        let script =
            "trap 'echo hup' HUP; trap 'echo term; exit 3' TERM; while :; do sleep 0.1; done";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        let out = place.out(&format!("exec {name} cat {CURRENT} /proc/1/attr/current"));
        assert_eq!(out, confined.repeat(2), "{runtime}");
        // Processes of one container can examine each other.
        place.out(&format!("exec {name} busybox ls /proc/1/fd"));
        place.out(&format!("stop {name}"));
        assert_eq!(place.out(&format!("wait {name}")), "3\n", "{runtime}");
        assert!(place.out(&format!("logs {name}")).ends_with("term\n"), "{runtime}");
        place.out(&format!("rm {name}"));
        // A program that does not handle signals is killed.
        start(&place, &["--name", &name, "--runtime", runtime], "sleep 1000");
        place.out(&format!("stop --time 0 {name}"));
        place.out(&format!("rm --force {name}"));
    }
    let told: Value = serde_json::from_str(&place.out("doctor --json")).unwrap();
    let labels = told["labels"].as_str().unwrap();
    assert!(
        labels.starts_with("root's containers have the AppArmor profile quire-default"),
        "{labels}"
    );
}

#[test]
fn a_profile_of_the_callers_is_used() {
    let Some(place) = with_apparmor() else { return };
    // The profile allows everything except one file.
    let own = "profile quire-test-own flags=(attach_disconnected) {
        file, network, unix, capability, signal, ptrace, umount, mount,
        deny /etc/short r,
    }";
    assert!(parse("--replace", own));
    for runtime in runtimes() {
        for (option, expect) in [("quire-test-own", false), ("quire-default", true)] {
            let option = format!("apparmor={option}");
            let ran = place.run_each(&[
                "run",
                "--quiet",
                "--runtime",
                runtime,
                "--security-opt",
                &option,
                "a",
                "--",
                "cat",
                "/etc/short",
            ]);
            assert_eq!(ran.code == Some(0), expect, "{runtime} {option}: {}", ran.err);
        }
    }
    assert!(parse("--remove", own));
    let ran = place.run("run --security-opt apparmor=quire-test-own a -- true");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("\"quire-test-own\" is not loaded"), "{}", ran.err);
}
