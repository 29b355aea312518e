//! `info`, `version`, `system`, and commands in groups.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::place;
use crate::{Place, Ran};

#[test]
fn info_and_version_have_podmans_fields() {
    let place = Place::new();
    let info: Value = serde_json::from_str(&place.out("info --json")).unwrap();
    let mut again: Value = serde_json::from_str(&place.out("info --format json")).unwrap();
    // The free memory changes between two calls.
    again["host"]["memFree"] = info["host"]["memFree"].clone();
    assert_eq!(info, again);
    assert_eq!(info["store"]["graphRoot"], place.path("store").display().to_string());
    assert_eq!(info["store"]["containerStore"]["number"], 0);
    assert!(info["host"]["memTotal"].as_u64().unwrap() > 1 << 20, "{info}");
    // The store is not made.
    assert!(!place.path("store").exists());
    let format = |line: &str| place.out(line).trim_end().to_owned();
    let arch = info["host"]["arch"].as_str().unwrap();
    assert_eq!(format("info --format {{.Host.Arch}}"), arch);
    assert_eq!(format("system info --format {{.Host.Arch}}"), arch);
    let version: Value = serde_json::from_str(&place.out("version --format json")).unwrap();
    let number = version["Client"]["Version"].as_str().unwrap();
    assert_eq!(format("version --format {{.Client.Version}}"), number);
    assert!(format("--version").starts_with(&format!("quire {number}")));
    assert!(place.out("version").contains(&format!("Version:      {number}\n")));
    assert!(place.out("info").contains("\n  arch: "));
    assert_eq!(version["Client"]["OsArch"], format!("linux/{arch}"));
}

#[test]
fn without_a_store_nothing_takes_space_and_nothing_is_removed() {
    let place = Place::new();
    let rows: Value = serde_json::from_str(&place.out("system df --json")).unwrap();
    for (row, kind) in
        rows.as_array().unwrap().iter().zip(["Images", "Containers", "Local Volumes"])
    {
        assert_eq!((&row["type"], &row["size"]), (&kind.into(), &0.into()));
    }
    assert_eq!(place.out("system prune --force"), "");
    assert_eq!(place.out("image ls --quiet"), "");
    assert_eq!(place.out("container ls --all --quiet"), "");
    for line in ["system df --force", "system prune --format x --force", "system prune --json -f"] {
        assert_eq!(place.run(line).code, Some(2), "{line}");
    }
    assert!(!place.path("store").exists());
}

#[test]
fn prune_removes_what_does_not_run_and_no_name_holds() {
    let Some(place) = place() else { return };
    let _guards = ["runs", "over"].map(|it| Rm(&place, it));
    start(&place, &["--name", "runs"], "sleep 1000");
    start(&place, &["--name", "over"], "echo text > /tmp/file");
    place.out("wait over");
    place.out("create --name new a true");
    place.out("tag a other");
    let rows: Value = serde_json::from_str(&place.out("system df --json")).unwrap();
    let counts = |row: &Value| (row["total"].as_u64(), row["active"].as_u64());
    assert_eq!(counts(&rows[0]), (Some(1), Some(1)));
    assert_eq!(counts(&rows[1]), (Some(3), Some(1)));
    let table = place.out("system df");
    assert!(table.starts_with("TYPE") && table.contains("Containers"), "{table}");
    assert_eq!(place.out("system df --format {{.Type}}"), "Images\nContainers\nLocal Volumes\n");
    let is_there = |name: &str| ps(&place, name).is_some();
    let asked = |answer: &str| {
        let mut command = place.command(&["system", "prune"]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(answer.as_bytes()).unwrap();
        Ran::from_output(&child.wait_with_output().unwrap())
    };
    // Without a yes, everything stays.
    for answer in ["", "\n", "n\n", "maybe\n"] {
        let ran = asked(answer);
        assert_eq!((ran.code, &*ran.out), (Some(0), ""), "{answer:?}");
        assert!(ran.err.contains("all containers that do not run"), "{}", ran.err);
        assert!(is_there("over") && is_there("new"), "{answer:?}");
    }
    // No container is that old.
    assert!(!place.out("container prune --force --filter until=1h").contains("over"));
    assert!(is_there("over"));
    assert_eq!(place.out("container prune --force"), "Deleted Containers\nnew\nover\n");
    assert!(is_there("runs") && !is_there("over") && !is_there("new"));
    // The image of a running container keeps its names, and so do others without --all.
    assert!(place.out("image prune --force").contains("freed"));
    assert!(!place.out("system prune --all --force").contains("Deleted Images"));
    assert_eq!(place.out("images").lines().count(), 3);
    place.out("rm --force runs");
    let ran = asked("y\n");
    assert!(ran.code == Some(0) && ran.out.contains("freed"), "{} {}", ran.out, ran.err);
    let pruned = place.out("image prune --all --force");
    assert!(pruned.starts_with("Deleted Images\na:latest\nother:latest\n"), "{pruned}");
    assert_eq!(place.out("images -q"), "");
}

#[test]
fn volumes_are_counted_and_pruned() {
    let Some(place) = place() else { return };
    let _guards = ["web", "rests"].map(|it| Rm(&place, it));
    place.out("volume create unused");
    fs::write(place.path("store/volumes/unused/data/file"), [7; 100_000]).unwrap();
    start(&place, &["--name", "web", "-v", "used:/data"], "sleep 1000");
    start(&place, &["--name", "rests", "-v", "rests:/data"], "true");
    place.out("wait rests");
    // The format `json` gives podman's fields, and --json those of Quire.
    let formatted: Value = serde_json::from_str(&place.out("system df --format json")).unwrap();
    let own: Value = serde_json::from_str(&place.out("system df --json")).unwrap();
    for at in 0..3 {
        let (row, other) = (&formatted[at], &own[at]);
        assert_eq!(row["Type"], other["type"]);
        assert_eq!((&row["Total"], &row["Active"]), (&other["total"], &other["active"]));
        assert_eq!((&row["TotalCount"], &row["RawSize"]), (&other["total"], &other["size"]));
        assert_eq!(row["RawReclaimable"], other["reclaimable"]);
        assert!(row["Size"].is_string() && row["Reclaimable"].is_string(), "{row}");
    }
    assert_eq!(formatted.as_array().unwrap().len(), 3);
    let row = &own[2];
    assert_eq!(row["type"], "Local Volumes");
    assert_eq!((row["total"].as_u64(), row["active"].as_u64()), (Some(3), Some(2)));
    assert!(row["reclaimable"].as_u64().unwrap() >= 100_000, "{row}");
    assert!(row["size"].as_u64() >= row["reclaimable"].as_u64(), "{row}");
    let names = || place.out("volume ls -q");
    for line in ["image prune --volumes -f", "container prune --volumes -f", "system df --volumes"]
    {
        assert_eq!(place.run(line).code, Some(2), "{line}");
    }
    place.out("system prune --force --volumes --filter until=1h");
    assert_eq!(names(), "rests\nunused\nused\n");
    // The container that does not run is removed first.
    let pruned = place.out("system prune --force --volumes");
    let expect = "Deleted Containers\nrests\nDeleted Volumes\nrests\nunused\n";
    assert!(pruned.starts_with(expect), "{pruned}");
    assert_eq!(names(), "used\n");
}

#[test]
fn volumes_that_do_not_exist_have_an_exit_code() {
    let place = Place::new();
    let check = || {
        for line in ["volume rm none", "volume inspect none", "volume inspect --format x none"] {
            let ran = place.run(line);
            let code = if line.starts_with("volume rm") { 1 } else { 125 };
            assert_eq!((ran.code, &*ran.out), (Some(code), ""), "{line}: {}", ran.err);
            let expect = "no volume with name \"none\" found: no such volume";
            assert!(ran.err.contains(expect), "{line}: {}", ran.err);
        }
        for line in ["volume rm --force none", "volume rm --all", "volume prune --force"] {
            assert_eq!(place.out(line), "", "{line}");
        }
    };
    // Also without a store.
    check();
    place.out("volume create one");
    check_other(&place);
    place.out("volume rm one");
    check();
}

/// Names are looked up before any volume is removed.
fn check_other(place: &Place) {
    assert_eq!(place.run("volume rm one none").code, Some(1));
    assert_eq!(place.out("volume ls -q"), "one\n");
    let report: Value =
        serde_json::from_str(place.run("--json volume inspect none").err.lines().last().unwrap())
            .unwrap();
    assert_eq!((&report["kind"], &report["exitCode"]), (&"absent".into(), &125.into()));
}

/// Labels may come from an image. Programs get them as they are, and a terminal shows no invisible characters.
#[test]
fn labels_do_not_steer_a_terminal_or_forge_rows() {
    let place = Place::new();
    let label = "a=x\nforged\trow\u{9b}2J\u{202e}";
    let ran = place.run_each(&["volume", "create", "--label", label, "one"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let inspected: Value = serde_json::from_str(&place.out("volume inspect one")).unwrap();
    assert_eq!(format!("a={}", inspected[0]["Labels"]["a"].as_str().unwrap()), label);
    assert!(place.out("volume inspect one").contains('\u{9b}'));
    let list = |format: &str| {
        let ran = place.run_each(&["volume", "ls", "--format", format]);
        assert_eq!(ran.code, Some(0), "{format}: {}", ran.err);
        ran.out
    };
    let escaped = "a=x\\nforged\\trow\\u{9b}2J\u{202e}\n";
    assert_eq!(list("{{.Labels}}"), escaped);
    assert_eq!(list("table {{.Labels}}"), format!("LABELS\n{escaped}"));
    assert_eq!(list("{{.Name}}\\t{{.Driver}}"), "one\tlocal\n");
    // Source: podman, `test/system/160-volumes.bats`: the labels of a list are one text.
    let labels: Value = serde_json::from_str(&list("{{json .Labels}}")).unwrap();
    assert_eq!(labels, format!("a={}", inspected[0]["Labels"]["a"].as_str().unwrap()));
    if !testing::programs(&["script"]) {
        return;
    }
    // This terminal has no size.
    for line in ["volume inspect one", "volume ls --json", "volume ls --format {{.Labels}}"] {
        let line = format!(
            "'{}' --store '{}' {line}",
            env!("CARGO_BIN_EXE_quire"),
            place.path("store").display()
        );
        let mut script = Command::new("script");
        script.args(["-q", "-e", "-c", &line, "/dev/null"]).stdin(Stdio::null());
        let ran = Ran::from_output(&script.output().unwrap());
        assert!(ran.out.contains("forged"), "{line}: {}", ran.out);
        assert!(!ran.out.contains(['\u{9b}', '\u{202e}']), "{line}: {}", ran.out);
    }
}

#[test]
fn groups_lead_to_commands_with_their_help_and_errors() {
    let place = Place::new();
    assert_eq!(place.out("image ls"), place.out("images"));
    assert_eq!(place.out("help image ls"), place.out("help images"));
    assert_eq!(place.out("image rm --help"), place.out("rmi --help"));
    assert_eq!(place.out("container ls --json"), place.out("ps --json"));
    let ran = place.run("container stop --bogus web");
    assert!(ran.err.contains("Usage: quire stop"), "{}", ran.err);
    // Programs that pass on exit codes have the same ones in a group.
    assert_eq!(place.run("container exec web true").code, Some(125));
    assert!(place.out("help image").contains("Examples:\n  quire image ls"));
}
