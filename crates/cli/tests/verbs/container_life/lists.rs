//! Lists of containers: filters, templates and orders. Needs root.

use serde_json::Value;

use crate::Place;
use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::place;

/// Returns the lines that `ps` prints.
fn names(place: &Place, options: &[&str]) -> Vec<String> {
    let ran = place.run_each(&[&["ps"], options].concat());
    assert_eq!(ran.code, Some(0), "{options:?}: {}", ran.err);
    ran.out.lines().map(str::to_owned).collect()
}

/// Makes three containers: `one` has exited with 0, `two` with 3, and `three` runs, with a volume.
fn three(place: &Place) -> [Rm<'_>; 3] {
    let guards = ["one", "two", "three"].map(|it| Rm(place, it));
    start(place, &["--name", "one"], "exit 0");
    start(place, &["--name", "two"], "exit 3");
    std::fs::create_dir(place.path("shared")).unwrap();
    start(place, &["--name", "three", "-v", "./shared:/shared:ro"], "sleep 100");
    assert_eq!(place.out("wait one two"), "0\n3\n");
    guards
}

/// `--force` ignores names that no container has, and not those that are unclear.
#[test]
fn a_beginning_of_two_ids_removes_nothing() {
    let Some(place) = place() else { return };
    let ids = ["abcabcabcab1", "abcabcabcab2"];
    let _guards = ids.map(|it| Rm(&place, it));
    for id in ids {
        place.out(&format!("create --quiet --name {id} a true"));
    }
    for options in ["--force", "--ignore", "--force --volumes"] {
        let ran = place.run(&format!("rm {options} abcabc"));
        assert!(ran.code == Some(125) && ran.err.contains("give more of the id"), "{}", ran.err);
    }
    assert_eq!(names(&place, &["-a", "-q"]).len(), 2);
    place.out("rm --force abcabcabcab1 nothing");
    assert_eq!(names(&place, &["-a", "-q"]), ["abcabcabcab2"]);
}

/// Source: podman-ps(1), `--filter`.
#[test]
fn filters_choose_containers() {
    let Some(place) = place() else { return };
    let _guards = three(&place);
    let shared = place.path("shared").display().to_string();
    place.out("tag a other");
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["three"]),
        (&["-a"], &["one", "two", "three"]),
        (&["-a", "-f", "name=o"], &["one", "two"]),
        (&["-a", "-f", "name=^o", "-f", "name=ee$"], &["one", "three"]),
        (&["-f", "name=one"], &[]),
        (&["-a", "-f", "id=two"], &["two"]),
        (&["-f", "status=exited"], &["one", "two"]),
        (&["-f", "status=stopped", "-f", "status=running"], &["one", "two", "three"]),
        (&["-f", "status=paused"], &[]),
        (&["-a", "-f", "exited=3"], &["two"]),
        (&["-a", "-f", "exited=3", "-f", "exited=0"], &["one", "two"]),
        (&["-a", "-f", "ancestor=a", "-f", "name=one"], &["one"]),
        (&["-f", "ancestor=a:latest"], &["three"]),
        (&["-f", "ancestor=other"], &["three"]),
        (&["-f", "ancestor=debian"], &[]),
        (&["-a", "-f", "before=three"], &["one", "two"]),
        (&["-a", "-f", "since=one"], &["two", "three"]),
        (&["-a", "-f", "since=one", "-f", "before=three"], &["two"]),
        (&["-f", "volume=/shared"], &["three"]),
        (&["-f", &format!("volume={shared}")], &["three"]),
        (&["-f", &format!("volume={shared}:/shared")], &["three"]),
        (&["-f", "volume=/other"], &[]),
        (&["-f", "network=pasta"], &[]),
        (&["-f", "network=none"], &["three"]),
        (&["-f", "label=a"], &[]),
        (&["-f", "label!=a"], &["three"]),
        (&["-f", "command=sh"], &["three"]),
        (&["-a", "-f", "until=1h"], &[]),
        (&["-a", "-f", "until=2100-01-01"], &["one", "two", "three"]),
        (&["-n", "2"], &["two", "three"]),
        (&["--last", "9"], &["one", "two", "three"]),
        (&["-l"], &["three"]),
        (&["-l", "-f", "status=exited"], &["two"]),
        (&["-a", "--sort", "names"], &["one", "three", "two"]),
        (&["-a", "--sort", "runningfor"], &["three", "two", "one"]),
        (&["-n", "2", "--sort", "names"], &["three", "two"]),
    ];
    for (options, expect) in cases {
        assert_eq!(names(&place, &[&["-q"], *options].concat()), *expect, "{options:?}");
    }
    for (options, expect) in [
        ("ps -f name", "write KEY=VALUE"),
        ("ps -f health=none", "there is no filter \"health\""),
        ("ps -f status=fine", "use one of created, running"),
        ("ps -f exited=x", "not an exit code"),
        ("ps -f name=(", "not a regular expression"),
        ("ps -f since=nothing", "there is no container \"nothing\""),
        ("ps -l -n 2", "cannot be used with"),
        ("ps --json --format json", "cannot be used with"),
    ] {
        let ran = place.run(options);
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{options}: {}", ran.err);
    }
}

/// Source: podman-ps(1), `--format`.
#[test]
fn templates_print_the_fields_of_podman() {
    let Some(place) = place() else { return };
    let _guards = three(&place);
    let check = |options: &[&str], expect: &[&str]| {
        assert_eq!(names(&place, options), expect, "{options:?}");
    };
    check(
        &["--format", "{{.Names}} {{.State}} {{.Image}} {{.Mounts}}"],
        &["three running a:latest /shared"],
    );
    check(
        &["-a", "--format", "{{.ID}} {{.ExitCode}} {{.Exited}}"],
        &["one 0 true", "two 3 true", "three 0 false"],
    );
    check(
        &["-a", "--sort", "names", "--format", "table {{.Names}}\\t{{.ExitCode}}"],
        &["NAMES       EXIT CODE", "one         0", "three       0", "two         3"],
    );
    check(&["--noheading", "--format", "table {{.ID}}"], &["three"]);
    check(&["-a", "--format", "{{range .}}{{.Names}},{{end}}"], &["one,two,three,"]);
    check(&["--format", "{{json .Labels}} [{{.Label \"a\"}}]"], &["{} []"]);
    let [status] = &names(&place, &["--format", "{{.Status}}"])[..] else { panic!() };
    assert!(status.starts_with("Up ") && status.contains("second"), "{status}");
    let status = names(&place, &["-f", "exited=3", "-a", "--format", "{{.Status}}"]);
    assert!(status[0].starts_with("Exited (3) ") && status[0].ends_with(" ago"), "{status:?}");
    let ran = place.run_each(&["ps", "--format", "{{.Nothing}}"]);
    let said = "there is no field \"Nothing\": the fields are ID, Names, Image";
    assert!(ran.code == Some(125) && ran.err.contains(said), "{}", ran.err);
    let all: Value = serde_json::from_str(&place.out("ps -a --format json")).unwrap();
    let row = &all[1];
    assert_eq!(
        (&row["Names"], &row["ExitCode"], &row["State"], &row["Image"]),
        (&serde_json::json!(["two"]), &3.into(), &"exited".into(), &"a:latest".into())
    );
    // The pid is that of the container's first process on the host.
    let pid = all[2]["Pid"].as_u64().unwrap();
    let of_quire: Value = serde_json::from_str(&place.out("ps --json")).unwrap();
    assert_eq!(of_quire[0]["pid"], pid);
    let whole = place.out("ps");
    assert!(place.out("ps --format table").starts_with("CONTAINER"));
    // Without titles, columns may be narrower.
    let words = |text: &str| text.split_whitespace().take(3).map(str::to_owned).collect::<Vec<_>>();
    let row = whole.split_once('\n').unwrap().1;
    assert_eq!(words(&place.out("ps --noheading")), words(row));
}
