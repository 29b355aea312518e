//! Options of `run` that podman has as well. Needs root.

use std::fs;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{Place, Ran, add_programs};

fn with_programs() -> Option<Place> {
    let place = place()?;
    let tree = place.path("tree");
    add_programs(&tree, &["/bin/ls", "/bin/grep", "/usr/bin/tty", "/bin/cat"]);
    fs::write(tree.join("etc/group"), "root:x:0:\nadm:x:44:\n").unwrap();
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    Some(place)
}

fn run(place: &Place, runtime: &str, options: &[&str], script: &str) -> Ran {
    let before = ["run", "--quiet", "-u", "0", "--runtime", runtime];
    place.run_each(&[&before, options, &["a", "--", "sh", "-c", script]].concat())
}

#[test]
fn a_program_gets_the_settings_of_its_options() {
    let Some(place) = with_programs() else { return };
    for runtime in runtimes() {
        let check = |options: &[&str], script: &str, expect: &str| {
            let ran = run(&place, runtime, options, script);
            assert_eq!(ran.out, expect, "{runtime} {options:?}: {}", ran.err);
            assert_eq!(ran.code, Some(0), "{runtime} {options:?}: {}", ran.err);
        };
        check(&["--umask", "027"], "umask", "0027\n");
        check(&["--oom-score-adj", "321"], "cat /proc/self/oom_score_adj", "321\n");
        let sysctl = ["--sysctl", "net.core.somaxconn=99", "--sysctl", "kernel.msgmax=8000"];
        let read = "cat /proc/sys/net/core/somaxconn /proc/sys/kernel/msgmax";
        check(&sysctl, read, "99\n8000\n");
        check(&["--group-add", "adm", "--group-add", "77"], "id -G", "0 44 77\n");
        let mounted = "grep ' /t ' /proc/self/mounts | grep -c noexec; ls -ld /t | cut -c1-10 2>/dev/null \
            || ls -ld /t";
        let ran = run(&place, runtime, &["--tmpfs", "/t:size=64k,mode=1700"], mounted);
        assert!(
            ran.out.starts_with("1\n") && ran.out.contains("drwx-----T"),
            "{}{}",
            ran.out,
            ran.err
        );
        let ran =
            run(&place, runtime, &["--shm-size", "64k"], "grep ' /dev/shm ' /proc/self/mounts");
        assert!(ran.out.contains("size=64k"), "{runtime}: {}{}", ran.out, ran.err);
        let ran = run(&place, runtime, &["--group-add", "nowhere"], "true");
        assert!(ran.code == Some(125) && ran.err.contains("no group \"nowhere\""), "{}", ran.err);
    }
    // `exec` and another start have them as well.
    let _guard = Rm(&place, "c");
    start(
        &place,
        &["--name", "c", "--umask", "077", "--group-add", "77"],
        "umask; id -G; sleep 60",
    );
    wait_for("the effect", || place.out("logs c") == "0077\n0 77\n");
    assert_eq!(place.run_each(&["exec", "-u", "5", "c", "sh", "-c", "umask"]).out, "0077\n");
    place.out("restart -t 0 c");
    wait_for("the effect", || place.out("logs c") == "0077\n0 77\n0077\n0 77\n");
}

/// Labels of the command line replace those of the file, and these those of the image.
#[test]
fn labels_are_recorded_with_the_container() {
    let Some(place) = place() else { return };
    fs::write(place.path("labels"), "# a comment\nb=file\nc=file\n").unwrap();
    let _guard = Rm(&place, "c");
    start(
        &place,
        &["--name", "c", "--label-file", "labels", "-l", "b=own", "--label", "d"],
        "true",
    );
    let request = fs::read(place.path("store/containers/c/request.json")).unwrap();
    let request: serde_json::Value = serde_json::from_slice(&request).unwrap();
    let expect = serde_json::json!({"b": "own", "c": "file", "d": ""});
    assert_eq!(request["request"]["labels"], expect);
}

#[test]
fn a_file_gets_the_name_of_the_container() {
    let Some(place) = place() else { return };
    place.out("run --quiet --cidfile id --name c a true");
    assert_eq!(fs::read_to_string(place.path("id")).unwrap(), "c");
    let ran = place.run("run --quiet --cidfile id a true");
    assert!(ran.code == Some(125) && ran.err.contains("the file exists"), "{}", ran.err);
    let ran = place.run("run --quiet --cidfile other --userns 1:1:1 a true");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(!place.path("other").exists());
}

#[test]
fn a_container_replaces_another_of_its_name() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "c");
    start(&place, &["--replace", "--name", "c"], "echo first; sleep 60");
    let first = ps(&place, "c").unwrap()["pid"].clone();
    start(&place, &["--replace", "--name", "c"], "echo second; sleep 60");
    let second = ps(&place, "c").unwrap()["pid"].clone();
    assert_ne!(first, second);
    wait_for("the effect", || place.out("logs c") == "second\n");
    place.out("stop -t 0 c");
    start(&place, &["--replace", "--name", "c"], "sleep 60");
    let ran = place.run("run -d --name c a true");
    assert!(ran.code == Some(125) && ran.err.contains("already exists"), "{}", ran.err);
}

/// The old container runs until everything else of the new one is prepared.
#[test]
fn a_container_that_cannot_be_made_replaces_none() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "c");
    fs::create_dir(place.path("changes")).unwrap();
    start(&place, &["--name", "c", "--writable", "dir=changes"], "sleep 60");
    let first = ps(&place, "c").unwrap()["pid"].clone();
    for options in [
        "absent-image true",
        "-v /no/such:/x a true",
        "-u no-such-user a true",
        "--init-path /no/such --init a true",
        "--env-file no-such a true",
        "--network container:no-such a true",
        "--device /no/such a true",
        "--memory 1 a true",
    ] {
        for verb in ["run --quiet -d", "create --quiet"] {
            let ran = place.run(&format!("{verb} --replace --name c {options}"));
            let container = ps(&place, "c").unwrap_or_default();
            if ran.code == Some(0) {
                panic!("{verb} {options}: {}", ran.out);
            }
            assert_eq!(container["pid"], first, "{verb} {options}: {}", ran.err);
        }
    }
    // The directory of the old container is free for the new one.
    start(&place, &["--replace", "--name", "c", "--writable", "dir=changes"], "sleep 60");
    assert_ne!(ps(&place, "c").unwrap()["pid"], first);
}

/// `-dit` keeps a shell alive, whose output goes to the log.
#[test]
fn a_container_in_the_background_has_a_terminal() {
    let Some(place) = with_programs() else { return };
    for runtime in all_runtimes() {
        let _guard = Rm(&place, "shell");
        let options = ["-dit", "--name", "shell", "--runtime", runtime, "-u", "0"];
        // The `tty` of gVisor's containers finds no name.
        let line = ["a", "--", "sh", "-c", "test -t 0 && test -t 2 && echo terminal; exec sh"];
        let ran = place.run_each(&[&["run", "--quiet"], &options[..], &line].concat());
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        wait_for("the effect", || place.out("logs shell").contains("terminal\r\n"));
        assert_eq!(ps(&place, "shell").unwrap()["status"], "running", "{runtime}");
        place.out("stop -t 0 shell");
        place.out("start shell");
        wait_for("the effect", || place.out("logs shell").matches("terminal\r\n").count() == 2);
        place.out("rm --force shell");
        // All output of a short program is in the log.
        let options = ["-dt", "--name", "shell", "--runtime", runtime, "-u", "0"];
        let line = ["a", "--", "sh", "-c", "echo one; echo two"];
        let ran = place.run_each(&[&["run", "--quiet"], &options[..], &line].concat());
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        place.out("wait shell");
        assert_eq!(place.out("logs shell"), "one\r\ntwo\r\n", "{runtime}");
        place.out("rm shell");
        // Without a terminal, reading standard input waits.
        let options = ["-di", "--name", "shell", "--runtime", runtime, "-u", "0"];
        let line = ["a", "--", "sh", "-c", "cat; echo over"];
        let ran = place.run_each(&[&["run", "--quiet"], &options[..], &line].concat());
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(place.out("logs shell"), "", "{runtime}");
        assert_eq!(ps(&place, "shell").unwrap()["status"], "running", "{runtime}");
    }
}

#[test]
fn rm_takes_a_word() {
    let Some(place) = place() else { return };
    for word in ["--rm", "--rm=true", "--rm=1"] {
        place.out(&format!("run --quiet -d {word} --name c a true"));
        wait_for("the effect", || place.out("ps -aq").is_empty());
    }
    let _guard = Rm(&place, "c");
    place.out("run --quiet -d --rm=false --name c a true");
    place.out("wait c");
    assert_eq!(place.out("ps -aq"), "c\n");
    place.out("run --quiet --rm=true a true");
}

/// Only a program that failed without a network that the user chose may need one.
#[test]
fn a_failed_program_is_told_how_to_get_a_network() {
    let Some(place) = place() else { return };
    let hint = "use `--network pasta`";
    let run = |options: &str, command: &str| {
        place.run_each(
            &[
                &["run"],
                &options.split_whitespace().collect::<Vec<_>>()[..],
                &["a", "--", "sh", "-c", command],
            ]
            .concat(),
        )
    };
    let ran = run("-u 0", "exit 7");
    assert!(
        ran.code == Some(7) && ran.err.lines().filter(|it| it.contains(hint)).count() == 1,
        "{}",
        ran.err
    );
    for (options, command) in [
        ("-u 0", "true"),
        ("-u 0", "exit 127"),
        ("-u 0", "kill -KILL $$"),
        ("-u 0 --network none", "exit 7"),
        ("-u 0 --network host", "exit 7"),
        ("-u 0 --quiet", "exit 7"),
    ] {
        let ran = run(options, command);
        assert!(!ran.err.contains("--network"), "{options} {command}: {}", ran.err);
    }
}

/// A file with defaults, which the command line overrides.
#[test]
fn defaults_come_from_a_file() {
    let Some(place) = with_programs() else { return };
    let folder = place.path("config/quire");
    fs::create_dir_all(&folder).unwrap();
    let run = |defaults: &str, arguments: &[&str]| {
        fs::write(folder.join("run.toml"), defaults).unwrap();
        let mut command = place.command(&[&["run", "-u", "0"], arguments].concat());
        command.env("XDG_CONFIG_HOME", place.path("config"));
        Ran::from_output(&command.output().unwrap())
    };
    let own = fs::read_link("/proc/self/ns/net").unwrap().display().to_string();
    let show = ["a", "ls", "-l", "/proc/self/ns/net"];
    assert!(!run("", &show).out.contains(&own));
    assert!(run("network = \"host\"", &show).out.contains(&own));
    let none = [&["--network", "none"], &show[..]].concat();
    assert!(!run("network = \"host\"", &none).out.contains(&own));
    let ran = run("network = \"none\"", &["a", "--", "sh", "-c", "exit 7"]);
    assert!(ran.code == Some(7) && !ran.err.contains("--network"), "{}", ran.err);
    let ran = run("writable = \"none\"", &["a", "--", "sh", "-c", "> /x"]);
    assert_ne!(ran.code, Some(0));
    let ran = run("pull = \"never\"", &["nothing", "true"]);
    assert!(
        ran.err.contains("there is no image \"nothing\"") && !ran.err.contains("pulling"),
        "{}",
        ran.err
    );
    for (defaults, expect) in [
        (
            "\nnetwrok = \"host\"",
            "run.toml, line 2: \"netwrok\" is not a setting: use network, pull",
        ),
        ("network = \"bridge\"", "run.toml, line 1: network = \"bridge\": use pasta"),
    ] {
        let ran = run(defaults, &["a", "true"]);
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{}", ran.err);
        assert!(ran.err.contains(&folder.display().to_string()), "{}", ran.err);
    }
}

/// Source: podman-run(1), `--memory`, `--name` and `--volume`.
#[test]
fn values_have_podmans_meanings() {
    let Some(place) = with_programs() else { return };
    for name in ["d", "e"] {
        fs::create_dir(place.path(name)).unwrap();
    }
    place.out("run --quiet --memory 0 a true");
    let ran = place.run("run --quiet --memory 1k a true");
    assert!(ran.code == Some(125) && ran.err.contains("at least 6m"), "{}", ran.err);
    let _guard = Rm(&place, "c");
    assert_eq!(place.out("create --name /c a true"), "c\n");
    assert_eq!(place.out("ps -aq --filter name=^/c$"), "c\n");
    assert_eq!(place.out("start --attach /c"), "");
    place.out("rm /c");
    for name in ["c/", "//c", "/c/d"] {
        let ran = place.run(&format!("create --name {name} a true"));
        assert!(ran.code == Some(125) && ran.err.contains("is not a"), "{name}: {}", ran.err);
    }
    let mounts = "-v ./d:/d -v ./d:/d --tmpfs /t --tmpfs /t -v data:/v -v data:/v";
    place.out(&format!("run --quiet {mounts} a true"));
    for mounts in ["-v ./d:/d -v ./e:/d", "--tmpfs /d --tmpfs /d:ro", "-v ./d:/d --tmpfs /d"] {
        let ran = place.run(&format!("run --quiet {mounts} a true"));
        assert!(ran.code == Some(125) && ran.err.contains("two mounts"), "{mounts}: {}", ran.err);
    }
}

/// Descriptors 3 and 5 of the caller are files, 4 is closed, 6 a directory.
#[test]
fn only_the_named_descriptors_of_the_caller_are_passed_on() {
    let Some(place) = with_programs() else { return };
    fs::write(place.path("three"), "three\n").unwrap();
    fs::write(place.path("five"), "five\n").unwrap();
    let caller = |arguments: &[&str]| {
        let quire = place.command(arguments);
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "exec \"$@\" 3<three 4<&- 5<five 6<.", "sh"]);
        shell.arg(quire.get_program()).args(quire.get_args()).current_dir(place.folder.path());
        for (name, value) in quire.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        Ran::from_output(&shell.stdin(std::process::Stdio::null()).output().unwrap())
    };
    // `ls` opens the directory itself, under the next free number.
    let list = "ls /proc/self/fd | grep -v '^[012]$'; cat /proc/self/fd/5 2>/dev/null; \
        cat /proc/self/fd/3 2>/dev/null; true";
    for runtime in runtimes() {
        let run = |options: &[&str]| {
            let before = ["run", "--quiet", "-u", "0", "--runtime", runtime];
            caller(&[&before, options, &["a", "--", "sh", "-c", list]].concat())
        };
        let ran = run(&[]);
        assert!(!ran.out.contains("five") && !ran.out.contains("three"), "{runtime}: {}", ran.out);
        let ran = run(&["--preserve-fds", "1"]);
        assert!(
            ran.out.ends_with("three\n") && !ran.out.contains("five"),
            "{}{}",
            ran.out,
            ran.err
        );
        let ran = run(&["--preserve-fds", "1", "--rm=false", "--replace", "--name", "kept"]);
        assert!(
            ran.out.ends_with("three\n") && !ran.out.contains("five"),
            "{}{}",
            ran.out,
            ran.err
        );
        let ran = run(&["--preserve-fd", "5"]);
        match runtime {
            "crun" => {
                assert!(ran.out.ends_with("five\n") && !ran.out.contains("three"), "{}", ran.out);
                // The others are of `ls`, and /dev/null, by which crun keeps a number free. The lock of the
                // container's folder would be a further one.
                let numbers = ran.out.lines().filter(|it| it.parse::<u8>().is_ok()).count();
                assert!(numbers <= 3, "{}", ran.out);
            }
            _ => assert!(ran.code == Some(125) && ran.err.contains("use --runtime crun")),
        }
    }
    place.out("rm kept");
    if runtimes().next() != Some("crun") {
        return;
    }
    for (options, expect) in [
        ("--preserve-fd 4", "the caller of this command has no open descriptor 4"),
        ("--preserve-fd 6", "descriptor 6 is a directory of the host"),
        ("--preserve-fds 9", "descriptor 6 is a directory of the host"),
        ("-d --preserve-fd 5", "leave out --detach"),
    ] {
        let words: Vec<_> = options.split(' ').collect();
        let ran = caller(&[&["run", "--runtime", "crun"], &words[..], &["a", "true"]].concat());
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{options}: {}", ran.err);
    }
    let _guard = Rm(&place, "c");
    start(&place, &["--name", "c", "--runtime", "crun"], "sleep 60");
    let ran = caller(&["exec", "--preserve-fd=5", "c", "sh", "-c", list]);
    assert!(ran.out.ends_with("five\n") && !ran.out.contains("three"), "{}{}", ran.out, ran.err);
    let ran = caller(&["exec", "--preserve-fd=6", "c", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("is a directory"), "{}", ran.err);
}

/// The image has no data of time zones.
#[test]
fn a_container_has_a_time_zone() {
    let Some(place) = with_programs() else { return };
    if !std::path::Path::new("/usr/share/zoneinfo/Asia/Tokyo").exists() {
        testing::skipped("the host has no time zones (package tzdata)");
        return;
    }
    let zone = fs::read("/usr/share/zoneinfo/Asia/Tokyo").unwrap();
    let run = |options: &[&str]| {
        let words = [&["run", "--quiet"][..], options, &["a", "cat", "/etc/localtime"]].concat();
        place.command(&words).output().unwrap()
    };
    for options in [&["--tz", "Asia/Tokyo"][..], &["--tz=UTC", "--tz=Asia/Tokyo", "--read-only"]] {
        let output = run(options);
        assert!(
            output.status.success(),
            "{options:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(output.stdout, zone, "{options:?}");
    }
    if let Ok(own) = fs::read("/etc/localtime") {
        assert_eq!(run(&["--tz=local"]).stdout, own);
    }
    for (zone, expect) in [("../passwd", "use local for"), ("No/Where", "has no time zone in")] {
        let ran = place.run(&format!("run --tz {zone} a true"));
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{zone}: {}", ran.err);
    }
}
