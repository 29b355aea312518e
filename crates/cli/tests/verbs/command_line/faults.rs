//! Commands whose system calls fail, one or all from one on. These are cases that `cargo xtask faults` found; it
//! tries all others.
#![cfg(target_arch = "x86_64")]

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use testing::faults::{Fault, Kind, Mode, RunEnvironment as Given, run};

use crate::container_life::runs;
use crate::{Place, Ran};

/// Runs a command line in which the first call fails whose description contains `only`. The timeout is a minute.
fn broken(place: &Place, line: &[&str], kind: Kind, mode: Mode, only: &str) -> Ran {
    let ran = perhaps_broken(place, line, kind, mode, only);
    ran.unwrap_or_else(|| panic!("{}: no call {only}", line.join(" ")))
}

/// Like [`broken`]; returns `None` if no call's description contains `only`.
fn perhaps_broken(place: &Place, line: &[&str], kind: Kind, mode: Mode, only: &str) -> Option<Ran> {
    let store = place.path("store");
    let head = [OsStr::new(env!("CARGO_BIN_EXE_quire")), OsStr::new("--store"), store.as_os_str()];
    let words: Vec<&OsStr> = head.into_iter().chain(line.iter().map(OsStr::new)).collect();
    let path = std::env::join_paths(crate::search_path()).unwrap();
    let variables: [(&str, &OsStr); 1] = [("PATH", path.as_os_str())];
    let (output, errors) = (place.path("output"), place.path("errors"));
    let given = Given {
        folder: place.folder.path(),
        input: b"",
        output: &output,
        errors: &errors,
        variables: &variables,
    };
    let fault = Fault { kind, nth: 1, mode, only: Some(only) };
    let traced = run(&words, &given, Some(fault), Duration::from_secs(60)).unwrap();
    let told = words.join(&OsString::from(" "));
    assert!(!traced.timed_out, "{}: it hangs", told.display());
    if traced.failed.is_empty() {
        return None;
    }
    let read = |path| String::from_utf8(std::fs::read(path).unwrap()).unwrap();
    Some(Ran { code: traced.code, out: read(&output), err: read(&errors) })
}

#[test]
fn a_name_that_cannot_be_read_is_not_left_out() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree a:1");
    let id = place.out("images --json");
    let id = id.split("\"image\": \"").nth(1).unwrap()[..64].to_owned();
    let ran = broken(&place, &["show", &id], Kind::Io, Mode::FromThenOn, "store/refs/a:1");
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert!(ran.err.contains("refs/a:1"), "{}", ran.err);
    // A disk error may be temporary, so the message does not suggest removing the name.
    assert!(!ran.err.contains("quire rm"), "{}", ran.err);
}

/// A repair once treated every failed check as damage, and emptied stores when the kernel had no memory for a
/// moment.
#[test]
fn what_nobody_could_look_at_is_not_removed() {
    for form in ["objects", "packed"] {
        let place = Place::new();
        place.tree("tree", "x");
        let large: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(place.path("tree/large"), &large).unwrap();
        place.out(&format!("import dir:tree a:1 --form {form}"));
        let count = || {
            let mut find = std::process::Command::new("find");
            let all = find.arg(place.path("store")).args(["-type", "f"]).output().unwrap();
            all.stdout.split(|byte| *byte == b'\n').count()
        };
        let before = count();
        let mut reached = 0;
        for folder in ["objects", "images", "layers", "manifests", "blobs", "data", "refs"] {
            if !place.path("store").join(folder).exists() {
                continue;
            }
            for kind in [Kind::Memory, Kind::Descriptors] {
                let only = format!("store/{folder}/");
                let line = ["fsck", "--deep", "--repair"];
                let Some(ran) = perhaps_broken(&place, &line, kind, Mode::FromThenOn, &only) else {
                    continue;
                };
                reached += 1;
                assert_eq!(ran.code, Some(2), "{form} {folder} {kind:?}: {}{}", ran.out, ran.err);
                assert!(
                    ran.err.contains(only.trim_end_matches('/')),
                    "{form} {folder}: {}",
                    ran.err
                );
                assert_eq!(count(), before, "{form} {folder} {kind:?}: {}", ran.err);
            }
        }
        assert!(reached >= 6, "{form}: only {reached} looks failed");
        assert!(place.out("fsck --deep").starts_with("sound"), "{form}");
    }
}

#[test]
fn who_waits_for_a_container_hears_of_a_disk_that_fails() {
    let Some(place) = runs::place() else { return };
    let name = format!("waits-{}", std::process::id());
    place.out(&format!("run -d --name {name} a -- sleep 30"));
    let ran =
        broken(&place, &["wait", &name], Kind::Io, Mode::FromThenOn, &format!("containers/{name}"));
    place.out(&format!("rm -f {name}"));
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains(&name), "{}", ran.err);
}

#[test]
fn a_container_that_nobody_was_told_of_goes_with_the_next_command() {
    let Some(place) = runs::place() else { return };
    let name = format!("untold-{}", std::process::id());
    let line = ["run", "-d", "--name", &name, "a", "--", "sh", "-c", "sleep 30"];
    let ran = broken(&place, &line, Kind::NoSpace, Mode::Once, &format!("{name}/writable.json"));
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    place.out("gc");
    assert_eq!(place.out("ps -a --json").trim(), "[]");
}

#[test]
fn a_runtime_that_nobody_can_watch_is_ended() {
    let Some(place) = runs::place() else { return };
    let name = format!("unwatched-{}", std::process::id());
    let line = ["run", "--name", &name, "a", "--", "sh", "-c", &format!(": {name}; sleep 30")];
    let ran = broken(&place, &line, Kind::Descriptors, Mode::Once, "pidfd_open");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    place.out("gc");
    assert!(runs::processes_with(&name).is_empty());
}
