//! `run` with the runtimes of this machine. Needs root.

use std::io::{BufRead as _, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::{Place, Ran, add_programs, is_root, program, write};

/// A store with an image `a` that has a few programs; `None` if this machine cannot run containers.
pub(crate) fn place() -> Option<Place> {
    if !is_root() {
        return None;
    }
    if program("crun").is_none() && program("runc").is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI has no runtime: install crun or runc");
        testing::skipped("crun is not installed");
        return None;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    write(&tree.join("etc/garbage"), b"garbage", 0o755);
    write(&tree.join("etc/lost"), b"#!/no/such\n", 0o755);
    add_programs(&tree, &["/bin/sh", "/bin/true", "/bin/cat", "/bin/sleep", "/bin/id"]);
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

/// Runs quire by a shell, as `"$@"`, in a separate mount namespace, with which its mounts are removed.
pub(crate) fn in_own_mounts(place: &Place, script: &str, arguments: &[&str]) -> Option<Ran> {
    if program("unshare").is_none() || program("mount").is_none() {
        testing::skipped("unshare and mount of util-linux are not here");
        return None;
    }
    let quire = place.command(arguments);
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    command.arg(quire.get_program()).args(quire.get_args());
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).current_dir(place.path("."));
    Some(Ran::from_output(&command.output().unwrap()))
}

/// Returns the installed runtimes whose containers use this kernel.
pub(crate) fn runtimes() -> impl Iterator<Item = &'static str> {
    ["crun", "runc"].into_iter().filter(|name| program(name).is_some())
}

/// Also returns gVisor's, which has a separate kernel: it shows no ACLs, and no limits of mounts or maps of ids
/// (decision 13).
pub(crate) fn all_runtimes() -> impl Iterator<Item = &'static str> {
    runtimes().chain(program("runsc").map(|_| "runsc"))
}

pub(crate) fn mounts() -> String {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap()
}

fn containers(place: &Place) -> usize {
    let entries = std::fs::read_dir(place.path("store/containers")).unwrap();
    let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
    // Names of filestore templates begin with a dot.
    names.filter(|name| !name.starts_with('.')).count()
}

/// Waits until a condition holds, for at most two minutes.
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what} did not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn codes_and_streams_pass_through() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let cases: [(&[&str], i32, &str); 10] = [
            (&["true"], 0, ""),
            (&["cat", "/etc/short"], 0, "short\n"),
            (&["sh", "-c", "exit 7"], 7, ""),
            (&["sh", "-c", "echo $A; echo > /etc/new && exit 3"], 3, "b\n"),
            (&["no-such-program"], 127, ""),
            (&["/etc/short"], 126, ""),
            // The exit codes are the same as those of `env`.
            (&["/etc/garbage"], 126, ""),
            (&["/etc/lost"], 127, ""),
            (&["sh", "-c", "exit 255"], 255, ""),
            (&["id", "-u"], 0, "5\n"),
        ];
        for (command, code, out) in cases {
            let user = if command[0] == "id" { "5:6" } else { "0" };
            let mut arguments =
                vec!["run", "--runtime", runtime, "-u", user, "-e", "A=b", "a", "--"];
            arguments.extend(command);
            let ran = place.run_each(&arguments);
            assert_eq!(ran.code, Some(code), "{runtime} {command:?}: {}", ran.err);
            assert_eq!(ran.out, out, "{runtime} {command:?}");
        }
    }
    let ran = place.run("run --pull never none -- true");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    let ran = place.run("run a");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("has no command"), "{}", ran.err);
    assert_eq!(containers(&place), 0);
}

/// Runs `run` on a separate terminal, which gets both outputs.
fn on_terminal(place: &Place, arguments: &str) -> Ran {
    let quire = env!("CARGO_BIN_EXE_quire");
    let line =
        format!("'{quire}' --store '{}' run --quiet {arguments}", place.path("store").display());
    let mut command = Command::new("script");
    command.args(["-q", "-e", "-c", &line, "/dev/null"]).stdin(Stdio::null());
    command.env("PATH", std::env::join_paths(crate::search_path()).unwrap());
    Ran::from_output(&command.output().unwrap())
}

#[test]
fn what_a_runtime_logs_does_not_change_the_exit_code() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let folder = place.path(&format!("grumbling-{runtime}"));
        std::fs::create_dir(&folder).unwrap();
        // This wrapper runs the real runtime, and then logs an error.
        let script = "#!/bin/sh
            REAL \"$@\"; code=$?
            test \"$3\" = --log && echo '{\"level\":\"error\",\"msg\":\"late\"}' >> \"$4\"
            exit $code\n";
        let script = script.replace("REAL", program(runtime).unwrap().to_str().unwrap());
        let path = folder.join(runtime);
        testing::script(&path, &script);
        for code in [1, 3] {
            let line = format!("--runtime {} a -- sh -c 'exit {code}'", path.display());
            let ran = on_terminal(&place, &line);
            assert_eq!(ran.code, Some(code), "{runtime}: {}", ran.out);
        }
    }
}

#[test]
fn a_runtimes_error_appears_once() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        // A directory cannot be mounted on a file, so each runtime prints one line about it.
        let mount = "--mount type=memory,dst=/etc/short";
        let times = |said: &str| said.lines().filter(|it| it.contains("etc/short")).count();
        let line = format!("run --quiet --runtime {runtime} {mount} a -- /bin/true");
        let ran = place.run(&line);
        assert_eq!(ran.code, Some(125), "{}", ran.err);
        assert_eq!(times(&ran.err), 1, "{}", ran.err);
        let ran = on_terminal(&place, &format!("--runtime {runtime} {mount} a -- /bin/true"));
        assert_eq!(ran.code, Some(125), "{}", ran.out);
        assert_eq!(times(&ran.out), 1, "{}", ran.out);
        assert!(ran.out.contains("could not start the container: "), "{}", ran.out);
    }
}

/// Starts `quire run` of a script, and waits until it has printed "ready".
fn ready(place: &Place, runtime: &str, script: &str, err: Stdio) -> (Child, Pid) {
    let mut child = place
        .command(&["run", "--runtime", runtime, "a", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(err)
        .spawn()
        .unwrap();
    let mut said = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"ready\n");
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    (child, pid)
}

#[test]
fn signals_reach_the_program() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let script = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done";
        let (mut child, pid) = ready(&place, runtime, script, Stdio::null());
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(42), "{runtime}");
    }
}

/// `timeout` ends a command like this: it sends one signal and waits.
#[test]
fn one_term_ends_what_would_never_get_it() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let script = "echo ready; exec sleep 600";
        let (mut child, pid) = ready(&place, runtime, script, Stdio::null());
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        wait_for("the end", || child.try_wait().unwrap().is_some());
        assert_eq!(child.wait().unwrap().code(), Some(143), "{runtime}");
        // A program that handles or ignores the signal is not killed.
        let script = "trap 'exit 7' USR1; trap '' TERM; echo ready; while :; do sleep 0.05; done";
        let (mut child, pid) = ready(&place, runtime, script, Stdio::null());
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        rustix::process::kill_process(pid, Signal::USR1).unwrap();
        wait_for("the end", || child.try_wait().unwrap().is_some());
        assert_eq!(child.wait().unwrap().code(), Some(7), "{runtime}");
        assert_eq!(containers(&place), 0, "{runtime}");
    }
}

#[test]
fn who_waits_for_the_store_can_be_told_to_end() {
    let Some(place) = place() else { return };
    // Hold the same lock as `gc`.
    let lock = std::fs::File::open(place.path("store/gc.lock")).unwrap();
    lock.lock().unwrap();
    let import = format!("dir:{}", place.path("tree").display());
    let cases: [(&[&str], i32); 2] =
        [(&["run", "a", "--", "true"], 125), (&["import", &import], 2)];
    for (arguments, code) in cases {
        let mut child = place.command(arguments).stderr(Stdio::piped()).spawn().unwrap();
        let inode = std::os::unix::fs::MetadataExt::ino(&lock.metadata().unwrap());
        let has_it_open = || {
            let fds = std::fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
            let mut files = fds.filter_map(|it| std::fs::metadata(it.ok()?.path()).ok());
            files.any(|it| std::os::unix::fs::MetadataExt::ino(&it) == inode)
        };
        // On a slow machine the process may not have blocked or handled signals yet.
        let minds_signals = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
            let masks = status.lines().filter_map(|line| {
                let (name, mask) = line.split_once(":\t")?;
                ["SigBlk", "SigCgt"].contains(&name).then(|| u64::from_str_radix(mask, 16).unwrap())
            });
            masks.fold(0, |all, mask| all | mask) & 1 << (Signal::INT.as_raw() - 1) != 0
        };
        wait_for("the wait", || has_it_open() && minds_signals());
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::INT).unwrap();
        wait_for("the end", || child.try_wait().unwrap().is_some());
        let ran = Ran::from_output(&child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(code), "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains("gc.lock"), "{arguments:?}: {}", ran.err);
    }
    drop(lock);
    place.out("run --quiet a -- true");
}

#[test]
fn the_third_request_to_end_kills_what_ignores_them() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let script = "trap '' TERM INT; echo ready; while :; do sleep 0.05; done";
        let (mut child, pid) = ready(&place, runtime, script, Stdio::piped());
        // Two different signals are sent, because a pending signal absorbs further signals of the same number.
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        rustix::process::kill_process(pid, Signal::INT).unwrap();
        let lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
        let mut lines = lines.map(Result::unwrap);
        assert!(lines.any(|line| line.contains("a third signal kills it")), "{runtime}");
        // A signal soon after an equal signal would count as the same request (`Requests`).
        std::thread::sleep(Duration::from_millis(300));
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(137), "{runtime}");
        assert_eq!(containers(&place), 0, "{runtime}");
    }
}

#[test]
fn after_a_kill_of_everything_only_files_are_left_and_they_go_next() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        // A unique argument, by which the container's processes can be found.
        let argument = format!("{}.{runtime}", std::process::id());
        let script = format!("echo ready; : {argument}; while :; do sleep 0.05; done");
        let (mut child, _) = ready(&place, runtime, &script, Stdio::null());
        // Quire and the runtime have the store's path among their arguments.
        let folder = place.folder.path().to_str().unwrap();
        let everything = || [processes_with(folder), processes_with(&argument)].concat();
        assert!(everything().len() >= 3, "{:?}", everything());
        let killed = everything();
        for pid in &killed {
            // Killing the first process may end others.
            let _gone = rustix::process::kill_process(*pid, Signal::KILL);
        }
        child.wait().unwrap();
        wait_for("the end of all", || everything().is_empty() && killed.iter().all(is_over));
        assert!(!mounts().contains(folder), "{}", mounts());
        assert_eq!(containers(&place), 1);
        let gc = place.out("gc");
        assert!(gc.starts_with("1 removed"), "{gc}");
        assert_eq!(containers(&place), 0, "{runtime}");
    }
    let loops = Command::new("losetup").arg("-a").output().unwrap();
    let loops = String::from_utf8_lossy(&loops.stdout).into_owned();
    assert!(!loops.contains(place.folder.path().to_str().unwrap()), "{loops}");
}

#[test]
fn a_container_on_the_hosts_network_can_not_touch_its_cgroups() {
    let Some(place) = place() else { return };
    let script = "for d in /sys/fs/cgroup /sys/fs/cgroup/*; do test -e $d/cgroup.procs || continue; \
         echo > $d/quire-test && exit 9; echo 0 > $d/cgroup.procs && exit 8; done; exit 0";
    for access in ["--quiet", "--read-only"] {
        let arguments = ["run", "--network", "host", access, "a", "--", "sh", "-c", script];
        let ran = place.run_each(&arguments);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
    }
    let ran = place.run_each(&["run", "--network", "host", "a", "--", "cat", "/proc/self/mounts"]);
    let mut mounts = ran.out.lines().filter(|it| it.contains(" /sys/fs/cgroup/"));
    assert!(mounts.all(|it| it.contains(" ro,")), "{}", ran.out);
}

/// Returns the cgroups of a container.
pub(crate) fn cgroups(id: &str) -> Vec<String> {
    let name = format!("quire-{id}-*");
    let all = Command::new("find").args(["/sys/fs/cgroup", "-name", &name]).output().unwrap();
    String::from_utf8(all.stdout).unwrap().lines().map(ToOwned::to_owned).collect()
}

#[test]
fn a_container_has_a_view_of_cgroups_that_goes_with_it() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        // The container's host name is its id.
        let script =
            "trap '' TERM INT; cat /proc/sys/kernel/hostname; while :; do sleep 0.05; done";
        let mut child = place
            .command(&["run", "--quiet", "--runtime", runtime, "a", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut id = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut id).unwrap();
        assert_ne!(cgroups(id.trim()), Vec::<String>::new(), "{runtime}");
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::TERM] {
            rustix::process::kill_process(pid, signal).unwrap();
            std::thread::sleep(Duration::from_millis(200));
        }
        assert_eq!(child.wait().unwrap().code(), Some(137), "{runtime}");
        assert_eq!(cgroups(id.trim()), Vec::<String>::new(), "{runtime}");
        for (script, code) in [("", 0), ("; exit 3", 3), ("; kill -KILL $$", 0)] {
            let script = format!("cat /proc/sys/kernel/hostname /proc/self/cgroup{script}");
            let ran = place.run_each(&[
                "run",
                "--quiet",
                "--runtime",
                runtime,
                "a",
                "--",
                "sh",
                "-c",
                &script,
            ]);
            assert_eq!(ran.code, Some(code), "{runtime}: {}", ran.err);
            let (id, groups) = ran.out.split_once('\n').unwrap();
            assert!(groups.lines().all(|it| it.ends_with(":/")), "{runtime}: {groups}");
            assert_eq!(cgroups(id), Vec::<String>::new(), "{runtime}");
        }
    }
}

/// Returns whether a process has ended or has no open files any more. (Its command line disappears before its files
/// are closed and its locks released.)
fn is_over(pid: &Pid) -> bool {
    let folder = format!("/proc/{pid}");
    let Ok(stat) = std::fs::read_to_string(format!("{folder}/stat")) else { return true };
    let threads = std::fs::read_dir(format!("{folder}/task")).map_or(0, Iterator::count);
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('Z' | 'X')) && threads <= 1
}

/// Returns processes, except for this one, whose command line or open files contain this text. A monitor's command
/// line only has its container's name.
pub(crate) fn processes_with(text: &str) -> Vec<Pid> {
    let all = std::fs::read_dir("/proc").unwrap();
    let pids = all.filter_map(|it| it.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let own = rustix::process::getpid();
    let pids = pids.filter_map(Pid::from_raw).filter(|pid| *pid != own);
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
        let mut files = files.filter_map(|it| std::fs::read_link(it.ok()?.path()).ok());
        String::from_utf8_lossy(&line).contains(text)
            || files.any(|it| it.to_string_lossy().contains(text))
    })
    .collect()
}

#[test]
fn what_is_written_is_gone() {
    let Some(place) = place() else { return };
    place.out("run --quiet a -- sh -c echo>/etc/new");
    let ran = place.run("run a -- cat /etc/new");
    assert_ne!(ran.code, Some(0));
    let ran = place.run_each(&["run", "--read-only", "a", "--", "sh", "-c", "echo > /etc/new"]);
    assert_ne!(ran.code, Some(0));
    // The script writes about 12 MB to a log of 1 MiB. Only the writer gets an error.
    let fill = "i=0; while [ $i -lt 100 ]; do cat /bin/sh || exit 28; i=$((i+1)); done > /tmp/big";
    let memory = "memory,size=1m";
    let ran = place.run_each(&["run", "--writable", memory, "a", "--", "sh", "-c", fill]);
    assert_eq!(ran.code, Some(28), "{}", ran.err);
}

/// runc, Docker and podman set `HOME` from the user of each program, unless the image or the caller has set it.
#[test]
fn home_is_that_of_the_programs_user() {
    let Some(place) = place() else { return };
    let users = "root:x:0:0::/root:/bin/sh\nbob:x:7:7::/srv/bob:/bin/sh\n";
    write(&place.path("tree/etc/passwd"), users.as_bytes(), 0o644);
    place.out("import --quiet dir:tree homes");
    for runtime in runtimes() {
        let show = ["sh", "-c", "echo $HOME"];
        let _guards =
            ["derived", "given"].map(|name| crate::container_life::containers::Rm(&place, name));
        for (name, given) in [("derived", &[][..]), ("given", &["-e", "HOME=/mine"])] {
            let run = ["run", "--quiet", "-d", "--runtime", runtime, "--name", name];
            let ran = place.run_each(&[&run, given, &["homes", "sleep", "60"]].concat());
            assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        }
        let check = |options: &[&str], name, expect: &str| {
            let ran = place.run_each(&[&["exec"], options, &[name], &show].concat());
            assert_eq!(ran.out, format!("{expect}\n"), "{runtime} {options:?} {name}: {}", ran.err);
        };
        check(&[], "derived", "/root");
        check(&["--user", "bob"], "derived", "/srv/bob");
        check(&["--user", "7"], "derived", "/srv/bob");
        check(&["--user", "99"], "derived", "/");
        check(&["--user", "bob", "-e", "HOME=/k"], "derived", "/k");
        check(&["--user", "bob"], "given", "/mine");
        place.out("rm -f derived given");
        let run = ["run", "--quiet", "--rm", "--runtime", runtime, "--user", "bob", "homes"];
        assert_eq!(place.run_each(&[&run[..], &show].concat()).out, "/srv/bob\n", "{runtime}");
    }
}

/// In crun's `--log`, the text before a colon is the kind of log (crun(1)). Other programs have similar syntax for
/// paths.
#[test]
fn a_store_may_be_below_any_folder() {
    use std::os::unix::ffi::OsStrExt as _;
    let Some(place) = place() else { return };
    let tree = format!("dir:{}", place.path("tree").display());
    let call = |store: &std::path::Path, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command.arg("--store").arg(store).args(arguments).stdin(Stdio::null());
        command.env("PATH", std::env::join_paths(crate::search_path()).unwrap());
        Ran::from_output(&command.output().unwrap())
    };
    for folder in ["job-10:30:00", "file:", "a,b=c", "what?offset=1", "a\\b", "sp ace", "100%d{x}"]
    {
        let store = place.path(folder).join("store");
        std::fs::create_dir(place.path(folder)).unwrap();
        let run = |arguments: &[&str]| {
            let ran = call(&store, arguments);
            assert_eq!(ran.code, Some(0), "{folder} {arguments:?}: {}", ran.err);
            ran.out
        };
        run(&["import", "--quiet", &tree, "a"]);
        for runtime in all_runtimes() {
            let options = ["run", "--quiet", "--runtime", runtime];
            assert_eq!(run(&[&options[..], &["a", "cat", "/etc/short"]].concat()), "short\n");
            run(&[&options[..], &["-d", "--name", "c", "a", "sleep", "60"]].concat());
            assert_eq!(run(&["exec", "c", "cat", "/etc/short"]), "short\n", "{folder} {runtime}");
            run(&["rm", "--force", "c"]);
        }
    }
    // JSON cannot contain such strings, and runtimes read only JSON.
    let odd = place.path(".").join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
    std::fs::create_dir(&odd).unwrap();
    let store = odd.join("store");
    assert_eq!(call(&store, &["import", "--quiet", &tree, "a"]).code, Some(0));
    let ran = call(&store, &["run", "a", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("not UTF-8"), "{}", ran.err);
}

/// An overlay cannot be the upper layer of another overlay.
#[test]
fn where_the_disk_takes_no_overlay_changes_are_in_a_filestore() {
    let Some(place) = place() else { return };
    if program("mkfs.ext4").is_none() {
        testing::skipped("mkfs.ext4 is not installed");
        return;
    }
    std::fs::create_dir(place.path("above")).unwrap();
    let script = "mount -t tmpfs none above && mkdir above/upper above/work && \
                  mount -t overlay -o lowerdir=store,upperdir=above/upper,workdir=above/work none store && exec \"$@\"";
    let Some(ran) = in_own_mounts(&place, script, &["doctor"]) else { return };
    assert!(
        ran.out.contains("self: one file with an ext4 inside, since"),
        "{}{}",
        ran.out,
        ran.err
    );
    let arguments = ["run", "--quiet", "a", "sh", "-c", "echo changed > /etc/new; cat /etc/new"];
    let Some(ran) = in_own_mounts(&place, script, &arguments) else { return };
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "changed\n"), "{}", ran.err);
}

/// A container of an engine, such as one in which CI runs as root, has no loop devices.
#[test]
fn changes_need_no_loop_devices() {
    let Some(place) = place() else { return };
    for devices in ["", "mknod /dev/loop-control c 10 237;"] {
        let script = format!(
            "mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9; {devices} exec \"$@\""
        );
        let arguments = ["run", "a", "sh", "-c", "echo changed > /etc/new; cat /etc/new"];
        let Some(ran) = in_own_mounts(&place, &script, &arguments) else { return };
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "changed\n"), "{devices}: {}", ran.err);
        assert_eq!(ran.err, "", "{devices}");
        // If the user asks for a filestore explicitly, a failure is an error.
        let arguments = ["run", "--writable", "self", "a", "true"];
        let Some(ran) = in_own_mounts(&place, &script, &arguments) else { return };
        assert_eq!(ran.code, Some(125), "{devices}: {}", ran.err);
        assert!(ran.err.contains("--writable memory"), "{devices}: {}", ran.err);
    }
}
