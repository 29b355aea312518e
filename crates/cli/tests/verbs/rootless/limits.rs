//! Limits of users' containers, in cgroups that were delegated to the user.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Ran;
use crate::container_life::runs::{runtimes, wait_for};
use crate::rootless::{USER, User, tree};

const ROOT: &str = "/sys/fs/cgroup";
const ALL: &str = "+memory +cpu +cpuset +pids";

/// A cgroup that was delegated to a user, like that of a systemd scope with `Delegate=yes`.
struct Scope<'a> {
    user: &'a User,
    above: PathBuf,
    place: PathBuf,
}

fn is_unified() -> bool {
    Path::new(ROOT).join("cgroup.subtree_control").exists()
}

/// A user with an image, if cgroups can be delegated on this host.
fn user() -> Option<User> {
    let user = User::new(true)?;
    if !is_unified() {
        testing::skipped("limits of users: this host has cgroups of version 1");
        return None;
    }
    user.import(&tree(&user));
    Some(user)
}

impl<'a> Scope<'a> {
    fn new(user: &'a User, controllers: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let above = Path::new(ROOT).join(format!("quire-test-{}-{number}", std::process::id()));
        let place = above.join("some.scope");
        fs::write(Path::new(ROOT).join("cgroup.subtree_control"), ALL).unwrap();
        fs::create_dir_all(&place).unwrap();
        fs::write(above.join("cgroup.subtree_control"), controllers).unwrap();
        for name in ["", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
            chown(place.join(name), Some(USER), Some(USER)).unwrap();
        }
        Self { user, above, place }
    }

    /// Runs a script of the user in the scope; `$Q` is quire.
    fn run(&self, script: &str) -> Ran {
        let quire = self.user.place.path("quire");
        // A shell that Quire has moved is in the child cgroup.
        let moved = self.place.join("quire");
        let cgroup = if moved.exists() { &moved } else { &self.place };
        let enter = format!("echo $$ > {}", cgroup.join("cgroup.procs").display());
        let words = ["env", &format!("Q={}", quire.display()), "sh", "-euc", script];
        self.user.call_after(&enter, &words)
    }

    #[track_caller]
    fn out(&self, script: &str) -> String {
        let ran = self.run(script);
        assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
        assert_eq!(ran.err, "");
        ran.out
    }

    /// Returns the names of the cgroups below the scope.
    fn below(&self) -> Vec<String> {
        let all = fs::read_dir(&self.place).unwrap().map(|it| it.unwrap());
        let all = all.filter(|it| it.file_type().unwrap().is_dir());
        all.map(|it| it.file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let mut below: Vec<_> = self.below().iter().map(|it| self.place.join(it)).collect();
        below.extend([self.place.clone(), self.above.clone()]);
        for cgroup in below {
            if std::thread::panicking() {
                let _left = fs::remove_dir(&cgroup);
            } else {
                // A process in the cgroup may still be removing a container's files.
                wait_for("the cgroup to be empty", || fs::remove_dir(&cgroup).is_ok());
            }
        }
    }
}

#[test]
fn limits_hold_in_a_cgroup_that_was_delegated() {
    let Some(user) = user() else { return };
    for runtime in runtimes() {
        let scope = Scope::new(&user, ALL);
        let run = format!("$Q run --rm --quiet --runtime {runtime}");
        let show = "a sh -c 'cd /sys/fs/cgroup; cat memory.max cpu.max cpuset.cpus pids.max'";
        let all = "--memory 64m --cpus 0.5 --cpuset-cpus 0 --pids-limit 40";
        // The second command notices that the first command has moved the shell, and does not move it again.
        let shown = scope.out(&format!("{run} {all} {show}; {run} {all} {show}"));
        let limited = "67108864\n50000 100000\n0\n40\n";
        assert_eq!(shown, [limited, limited].concat(), "{runtime}");
        // The default limit of processes is set if any other limit is set.
        let shown = scope.out(&format!("{run} --memory 64m {show}"));
        assert_eq!(shown, "67108864\nmax 100000\n\n2048\n", "{runtime}");
        // The container cannot change its limits.
        let script =
            "cd /sys/fs/cgroup; echo max > memory.max || echo 0 > cgroup.procs || echo > a";
        let ran = scope.run(&format!("$Q run --runtime {runtime} --memory 64m a sh -c '{script}'"));
        assert_ne!(ran.code, Some(0), "{runtime}: {}", ran.err);
        assert_eq!(ran.err.matches("Read-only file system").count(), 3, "{runtime}: {}", ran.err);
        let killed = scope.run(&format!(
            "$Q run --runtime {runtime} --memory 32m a sh -c 'x=a; while :; do x=$x$x; done'"
        ));
        assert_eq!(killed.code, Some(137), "{runtime}: {}", killed.err);
        assert!(killed.err.contains("memory"), "{runtime}: {}", killed.err);
        assert_eq!(scope.below(), ["quire"], "{runtime}: nothing else is left");
    }
}

/// Processes are not moved if there are no limits.
#[test]
fn without_limits_a_container_stays_where_its_user_is() {
    let Some(user) = user() else { return };
    let scope = Scope::new(&user, ALL);
    let run = "$Q run --rm --quiet --pids-limit 0 a sh -c";
    let shown = scope.out(&format!("{run} 'ls /sys/fs/cgroup; cat /proc/1/cgroup'"));
    assert_eq!(shown, "0::/\n");
    assert_eq!(scope.below(), Vec::<String>::new());
}

/// As in podman, whose default `pids_limit` is 2048 (containers.conf(5)), the limit is set without an option.
#[test]
fn the_usual_limit_of_processes_is_there_where_a_cgroup_was_delegated() {
    let Some(user) = user() else { return };
    for runtime in runtimes() {
        let scope = Scope::new(&user, ALL);
        let run = format!("$Q run --rm --quiet --runtime {runtime} a");
        let shown = scope.out(&format!("{run} cat /sys/fs/cgroup/pids.max"));
        assert_eq!(shown, "2048\n", "{runtime}");
        assert_eq!(scope.below(), ["quire"], "{runtime}: nothing else is left");
        drop(scope);
        // If the default limit cannot be set, no remark is printed.
        let scope = Scope::new(&user, "+memory");
        assert_eq!(scope.out(&format!("{run} id -u")), "0\n", "{runtime}");
    }
}

#[test]
fn what_was_not_delegated_is_named() {
    let Some(user) = user() else { return };
    // Without controllers, processes are not moved.
    let scope = Scope::new(&user, "");
    let ran = scope.run("$Q run --rm --memory 64m a id -u; $Q doctor");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("not limited: the required controllers"), "{}", ran.err);
    assert!(
        ran.out.contains("limits of containers do not work: the required controllers"),
        "{}",
        ran.out
    );
    assert_eq!(scope.below(), Vec::<String>::new());
    drop(scope);
    for runtime in runtimes() {
        let scope = Scope::new(&user, "+memory");
        let ran = scope.run(&format!(
            "$Q run --rm --runtime {runtime} --memory 64m --cpus 0.5 a cat /sys/fs/cgroup/memory.max"
        ));
        assert_eq!((ran.code, &*ran.out), (Some(0), "67108864\n"), "{runtime}: {}", ran.err);
        let missing = "its processor time is not limited: the controller cpu was not delegated";
        assert!(ran.err.contains(missing), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("controller pids"), "{runtime}: {}", ran.err);
        assert!(!ran.err.contains("memory is"), "{runtime}: {}", ran.err);
    }
}

#[test]
fn where_nothing_was_delegated_a_container_runs_and_says_so() {
    let Some(user) = User::new(true) else { return };
    user.import(&tree(&user));
    let why = if is_unified() {
        "systemd-run --user --scope -p Delegate=yes"
    } else {
        "users cannot use cgroups of version 1"
    };
    let options = [["--memory", "64m"], ["--cpus", "0.5"], ["--pids-limit", "40"]];
    // If the default limit of processes is given explicitly, it also causes a remark.
    for option in options.iter().chain([&["--pids-limit", "2048"]]) {
        let ran = user.run(&[&["run", "--rm"], &option[..], &["a", "id"]].concat());
        assert_eq!(ran.code, Some(0), "{option:?}: {}", ran.err);
        let said = "its memory, processors and processes are not limited: ";
        assert!(ran.err.contains(said) && ran.err.contains(why), "{option:?}: {}", ran.err);
    }
    let ran = user.run(&["run", "--rm", "a", "id"]);
    assert_eq!((ran.code, &*ran.err), (Some(0), ""));
    let told = user.out(&["doctor"]);
    assert!(told.contains("; limits of containers do not work: "), "{told}");
}

#[test]
fn later_commands_find_a_container_with_limits() {
    let Some(user) = user() else { return };
    for runtime in runtimes() {
        let scope = Scope::new(&user, ALL);
        let run = format!("$Q run --quiet --detach --runtime {runtime} --memory 64m --name c a");
        scope.out(&format!("{run} sleep 1000 > id"));
        // A program that is started later is also limited, because it is in the container's cgroup.
        assert_eq!(scope.out("$Q exec c cat /proc/self/cgroup"), "0::/\n", "{runtime}");
        // The kernel does not move a process from another cgroup into this cgroup.
        let ran = user.run(&["exec", "c", "id"]);
        assert_eq!(ran.code, Some(125), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("systemd-run --user"), "{runtime}: {}", ran.err);
        // All other commands work from another cgroup.
        user.out(&["commit", "--quiet", "c", "b"]);
        // A container with a cgroup is paused during the comparison. For a container without a cgroup, Quire prints a
        // remark.
        let ran = user.run(&["diff", "c"]);
        assert_eq!(ran.err, "", "{runtime}: {}", ran.out);
        user.out(&["stop", "--time", "0", "c"]);
        user.out(&["rm", "c"]);
        assert_eq!(scope.below(), ["quire"], "{runtime}");
        // This container's monitor is killed.
        scope.out(&format!("{run} sleep 1000 > id"));
        let listed = fs::read_to_string(scope.place.join("quire/cgroup.procs")).unwrap();
        let monitors: Vec<i32> = listed.lines().map(|it| it.parse().unwrap()).collect();
        assert!(!monitors.is_empty(), "{runtime}");
        for monitor in monitors {
            let pid = rustix::process::Pid::from_raw(monitor).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        wait_for("the end of the monitor", || {
            fs::read_to_string(scope.place.join("quire/cgroup.procs")).unwrap().is_empty()
        });
        user.out(&["rm", "--force", "c"]);
        assert_eq!(scope.below(), ["quire"], "{runtime}");
    }
}
