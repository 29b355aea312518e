//! Logs of detached containers. Needs root.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{all_runtimes, place, wait_for};
use crate::write;

/// Returns the sizes of the files of a container's log.
fn sizes(place: &crate::Place, name: &str) -> Vec<u64> {
    let folder = place.path(&format!("store/containers/{name}"));
    let files = ["log.old", "log"].map(|it| std::fs::metadata(folder.join(it)));
    files.into_iter().filter_map(|it| Some(it.ok()?.len())).collect()
}

#[test]
fn a_log_has_an_end_and_the_newest_lines() {
    let Some(place) = place() else { return };
    // A line has 100 bytes.
    let script = "i=1000; while test $i -lt 9000; do i=$((i+1)); \
                  echo $i aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done; \
                  echo last >&2";
    for runtime in all_runtimes() {
        let name = format!("talks-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", runtime, "--log-size", "100k"], script);
        place.out(&format!("wait {name}"));
        let sizes = sizes(&place, &name);
        assert!(sizes.len() == 2 && sizes.iter().all(|it| *it <= 50 << 10), "{runtime}: {sizes:?}");
        let ran = place.run(&format!("logs {name}"));
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), "last\n"), "{runtime}");
        let log = ran.out;
        let lines: Vec<_> = log.lines().collect();
        let numbers: Vec<u32> = lines.iter().map(|it| it[..4].parse().unwrap()).collect();
        assert!(lines.iter().all(|it| it.len() == 99), "{runtime}: whole lines");
        assert!(numbers.len() > 500, "{runtime}: {}", numbers.len());
        let first = 9001 - u32::try_from(numbers.len()).unwrap();
        assert!(numbers.iter().copied().eq(first..=9000), "{runtime}: none is missing between");
        // These lines are in both files of the log.
        let tail = numbers.len() - 3;
        // The last line is on standard error.
        let tailed = place.run(&format!("logs --tail {} {name}", tail + 1));
        assert_eq!(
            (tailed.out.lines().count(), tailed.err.as_str()),
            (tail, "last\n"),
            "{runtime}"
        );
        assert!(log.ends_with(&tailed.out), "{runtime}");
        place.out(&format!("rm {name}"));
        start(&place, &["--name", &name, "--runtime", runtime, "--log-size", "0"], script);
        place.out(&format!("wait {name}"));
        assert_eq!(place.out(&format!("logs {name}")).lines().count(), 8000, "{runtime}");
    }
    let ran = place.run("run -d --log-size 100 a true");
    assert!(ran.code == Some(125) && ran.err.contains("at least 4096 bytes"), "{}", ran.err);
    let ran = place.run("run -d --log-size much a true");
    assert!(ran.code == Some(125) && ran.err.contains("--log-size"), "{}", ran.err);
}

#[test]
fn who_follows_a_log_sees_every_line() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "followed");
    let gate = place.path("gate");
    std::fs::create_dir(&gate).unwrap();
    // There are ten rounds, each of less than half of the log, and a follower has read the previous round.
    let script = "i=10; while test $i -lt 20; do while ! test -e /gate/$i; do sleep 0.01; done; \
                  j=100; while test $j -lt 400; do j=$((j+1)); \
                  echo $i $j aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done; \
                  i=$((i+1)); done; exit 4";
    start(&place, &["--name", "followed", "--log-size", "100k", "-v", "./gate:/gate:ro"], script);
    let mut follow = place.command(&["logs", "--follow", "followed"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    for round in 10..20 {
        write(&gate.join(round.to_string()), b"", 0o644);
        for number in 101..=400 {
            let line = lines.next().unwrap().unwrap();
            assert!(line.starts_with(&format!("{round} {number} a")), "{round} {number}: {line}");
        }
    }
    assert!(lines.next().is_none());
    assert_eq!(follow.wait().unwrap().code(), Some(0));
    assert_eq!(place.out("wait followed"), "4\n");
}

#[test]
fn a_log_without_room_stops_nobody() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "full");
    let script = "while ! test -e /gate/go; do sleep 0.01; done; i=0; \
                  while test $i -lt 3000; do i=$((i+1)); echo 0123456789012345678901234567890123456789 || exit 9; done; exit 5";
    let gate = place.path("gate");
    std::fs::create_dir(&gate).unwrap();
    start(&place, &["--name", "full", "--log-size", "8k", "-v", "./gate:/gate:ro"], script);
    let folder = place.path("store/containers/full");
    wait_for("the log", || folder.join("log").exists());
    // A directory in the place of the next file prevents the rotation, so the log is truncated.
    std::fs::create_dir(folder.join("log.next")).unwrap();
    write(&gate.join("go"), b"", 0o644);
    assert_eq!(place.out("wait full"), "5\n");
    // A note about lost output may follow the half of the limit.
    let sizes = sizes(&place, "full");
    assert!(sizes.iter().all(|it| *it <= (4 << 10) + 200), "{sizes:?}");
    std::fs::remove_dir(folder.join("log.next")).unwrap();
}

/// Returns the first word of each line, which are times of equal length, and the rest of each line.
fn times(text: &str) -> (Vec<&str>, Vec<&str>) {
    text.lines().map(|it| it.split_once(' ').unwrap()).unzip()
}

#[test]
fn lines_have_their_time_and_stream() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let name = format!("timed-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "echo one; printf 'tw' >&2; sleep 0.3; echo o >&2; sleep 0.3; echo three; printf 'no end'";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        place.out(&format!("wait {name}"));
        let ran = place.run(&format!("logs {name}"));
        assert_eq!(
            (ran.out.as_str(), ran.err.as_str()),
            ("one\nthree\nno end", "two\n"),
            "{runtime}"
        );
        let ran = place.run(&format!("logs --timestamps {name}"));
        let (of_output, lines) = times(&ran.out);
        assert_eq!(lines, ["one", "three", "no end"], "{runtime}");
        let (of_errors, lines) = times(&ran.err);
        assert_eq!(lines, ["two"], "{runtime}");
        assert!(of_output.is_sorted() && of_output[0] < of_output[1], "{runtime}: {of_output:?}");
        assert!(of_output.iter().chain(&of_errors).all(|it| it.len() == 30 && it.ends_with('Z')));
        // A record of the same time is within both limits.
        let check = |options: &str, expect: &str| {
            let ran = place.run(&format!("logs {options} {name}"));
            assert_eq!((ran.code, ran.out.as_str()), (Some(0), expect), "{runtime} {options}");
        };
        check(&format!("--since {}", of_output[1]), "three\nno end");
        check(&format!("--until {}", of_output[0]), "one\n");
        check("--since 1h --until 1s -n 0", "");
        check("--since 1h --tail all", "one\nthree\nno end");
        // As in podman, a duration of `--until` is the time after now.
        check("--until 1h --tail -1", "one\nthree\nno end");
        check("--until -1h", "");
        check("--since -1h", "");
        check("--tail 2", "three\nno end");
    }
    for (options, expect) in [
        ("--since soon", "--since: \"soon\" is no time: write a date such as"),
        ("--until 10", "there is no container"),
        ("--tail x", "write a number of lines"),
    ] {
        let ran = place.run(&format!("logs {options} none"));
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{options}: {}", ran.err);
    }
}

/// Quire 0.1 wrote the output without records, and a monitor that was killed may leave a part of a record.
#[test]
fn old_and_damaged_logs_are_read() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "old");
    start(&place, &["--name", "old"], "echo again");
    place.out("wait old");
    let log = place.path("store/containers/old/log");
    write(&log, b"first\nsecond without end", 0o600);
    assert_eq!(place.out("logs old"), "first\nsecond without end");
    assert_eq!(place.out("logs --tail 1 --timestamps old"), "second without end");
    assert_eq!(place.out("logs --since 1h old"), "");
    // Only the output of the new run is printed.
    let ran = place.run("start --attach old");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "again\n"), "{}", ran.err);
    assert_eq!(place.out("logs old"), "first\nsecond without end\nagain\n");
    assert_eq!(place.out("logs --since 1h old"), "again\n");
    let whole = std::fs::read_to_string(&log).unwrap();
    write(&log, format!("{whole}2026-11-30T12:00:00.000000000Z stdo").as_bytes(), 0o600);
    assert_eq!(place.out("logs --tail 1 old"), "");
    place.out("start old");
    place.out("wait old");
    assert_eq!(place.out("logs --tail 2 old"), "again\nagain\n");
}

#[test]
fn several_logs_have_names() {
    let Some(place) = place() else { return };
    let _guards = ["first", "second", "never"].map(|it| Rm(&place, it));
    start(&place, &["--name", "first"], "echo a; echo error >&2; echo b");
    start(&place, &["--name", "second"], "printf c; sleep 0.2; echo d");
    place.out("create --name never a true");
    place.out("wait first second");
    let ran = place.run("logs first second never");
    assert_eq!(
        (ran.out.as_str(), ran.err.as_str()),
        ("first a\nfirst b\nsecond cd\n", "first error\n")
    );
    // The last line that was read may be that of standard error.
    let ran = place.run("logs -n 1 -f second first");
    assert_eq!((ran.out + &ran.err).lines().count(), 2);
    let ran = place.run("logs first nothing");
    assert_eq!((ran.code, ran.out.as_str()), (Some(125), ""), "{}", ran.err);
}

/// As in podman, `--until` ends a command that follows.
#[test]
fn a_follower_ends_at_a_time() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "endless");
    start(&place, &["--name", "endless"], "while :; do echo tick; sleep 0.05; done");
    let shown = place.out("logs --follow --until 0.5s endless");
    assert!(shown.lines().count() > 1 && shown.lines().all(|it| it == "tick"), "{shown}");
    assert_eq!(place.out("ps -q"), "endless\n");
}
