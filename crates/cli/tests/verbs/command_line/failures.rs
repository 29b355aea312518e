//! Exit codes and JSON reports of failures, by which scripts distinguish them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use serde_json::Value;

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::place;
use crate::{Place, Ran};

/// Checks the last line of standard error.
fn check(ran: &Ran, kind: &str, code: i32, text: &str) -> Value {
    let report: Value = serde_json::from_str(ran.err.lines().last().unwrap()).expect(&ran.err);
    assert_eq!((ran.code, &report["kind"]), (Some(code), &kind.into()), "{}", ran.err);
    assert_eq!(report["exitCode"], code);
    assert!(report["error"].as_str().unwrap().contains(text), "{}", ran.err);
    report
}

#[test]
fn failures_have_kinds() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let report = check(&place.run("--json show nothing"), "absent", 3, "there is no store");
    assert!(report["hint"].as_str().unwrap().contains("quire import"), "{report}");
    place.out(&format!("import dir:{} base", tree.display()));
    let report = check(&place.run("show --json bse"), "absent", 3, "there is no image \"bse\"");
    assert!(report["hint"].as_str().unwrap().contains("did you mean base"), "{report}");
    check(&place.run("--json rm nothing"), "absent", 1, "there is no container \"nothing\"");
    check(&place.run("--json stop nothing"), "absent", 125, "there is no container \"nothing\"");
    check(&place.run("--json show"), "usage", 2, "<NAME>");
    check(&place.run("--json show --format x base"), "usage", 2, "use `quire inspect --format");
    check(&place.run("--json import dir:/nosuch/tree"), "other", 2, "/nosuch/tree");
    fs::write(place.path("policy"), "default = \"none\"\n").unwrap();
    let policy = place.path("policy");
    let refused = place.run(&format!("--json --policy {} export base tar:x", policy.display()));
    check(&refused, "refused", 4, "base");
    // A file system that is always full. Source: full(4).
    let mut full = place.command(&["show", "--json", "base"]);
    let full =
        Ran::from_output(&full.stdout(fs::File::create("/dev/full").unwrap()).output().unwrap());
    check(&full, "full", 6, "cannot write to standard output");
    // A command line without a verb, one that the verb refuses, and one that no verb has.
    check(&place.run("--json"), "usage", 2, "no command is given");
    check(&place.run("cat --json base:/etc/short"), "usage", 2, "never prints JSON");
    check(&place.run("run --json base true"), "usage", 125, "never prints JSON");
    check(&place.run("--json export base tar:-"), "usage", 2, "standard output");
    check(&place.run("top --json base"), "usage", 2, "unknown command");
    // clap's text is split into the error and a hint.
    let report = check(&place.run("--json show --bogus"), "usage", 2, "unexpected argument");
    let (error, hint) = (report["error"].as_str().unwrap(), report["hint"].as_str().unwrap());
    assert_eq!(error, "unexpected argument '--bogus' found");
    assert_eq!(hint, "Usage: quire show [OPTIONS] <NAME>");
    // Without --json, people get text, and the same code.
    let ran = place.run("show nothing");
    assert!(ran.code == Some(3) && ran.err.starts_with("quire: there is no image"), "{}", ran.err);
}

/// A name may have a line that looks like another error, and characters that terminals obey.
#[test]
fn names_do_not_forge_lines() {
    let place = Place::new();
    place.out(&format!("import --quiet dir:{} app", place.tree("tree", "x").display()));
    let forged = "a\nquire: all is well\u{1b}[31m";
    let option = format!("--{forged}");
    let path = place.path(forged);
    let path = path.to_str().unwrap();
    let source = format!("dir:{path}");
    let target = format!("tar:{path}/x");
    for words in [
        vec![forged],
        vec!["show", &option],
        vec!["run", &option, "app"],
        vec!["show", forged],
        vec!["rm", forged],
        vec!["tree", "-L", forged, "app"],
        vec!["import", &source],
        vec!["export", "app", &target],
        vec!["run", "--network", forged, "app"],
    ] {
        let ran = place.run_each(&words);
        assert!(
            ran.code != Some(0) && ran.err.contains(r"a\nquire: all is well\u{1b}[31m"),
            "{ran:?}"
        );
        assert!(!ran.err.contains("\nquire: all") && !ran.err.contains('\u{1b}'), "{ran:?}");
    }
}

/// `--json` after the image is the option of the program in the container.
#[test]
fn errors_are_text_if_the_program_has_the_option() {
    let place = Place::new();
    for line in ["run --bogus base prog --json", "run base --json", "exec --bogus a prog --json"] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(125), "{line}: {}", ran.err);
        assert!(serde_json::from_str::<Value>(&ran.err).is_err(), "{line}: {}", ran.err);
    }
}

#[test]
fn options_after_an_image_belong_to_its_program() {
    let place = Place::new();
    for option in ["--help", "-h", "--version", "--quiet=x", "--name"] {
        let ran = place.run(&format!("run --pull never nothing {option}"));
        let text = "there is no store";
        assert!(
            ran.code == Some(125) && ran.err.contains(text),
            "{option}: {} {}",
            ran.out,
            ran.err
        );
    }
}

/// C1 control characters, and the sequences of ESC, would change how a terminal shows the error.
#[test]
fn usage_errors_change_no_terminal() {
    let place = Place::new();
    for (words, text) in [
        (["show", "--bo\u{9b}2Jgus"], "'--bo\\u{9b}2Jgus'"),
        (["sh\u{9b}ow", "x"], "'sh\\u{9b}ow'"),
        (["run", "--ulimit=\u{202e}\x1b[31mx"], "\\u{202e}"),
    ] {
        let ran = place.run_each(&words);
        assert!(ran.code != Some(0) && ran.err.contains(text), "{words:?}: {}", ran.err);
        let is_plain = |it: char| it == '\n' || !it.is_control() && it != '\u{202e}';
        assert!(ran.err.chars().all(is_plain), "{words:?}: {:?}", ran.err);
    }
}

#[test]
fn exported_files_obey_the_umask() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let tar = place.path("tree.tar");
    let made = Command::new("tar").arg("-cf").arg(&tar).arg("-C").arg(&tree).arg(".").status();
    assert!(made.unwrap().success());
    place.out(&format!("import tar:{} base", tar.display()));
    for target in ["tar", "erofs", "gvisor", "docker-archive", "oci"] {
        check_modes(&place, "base", target);
    }
    if cfg!(feature = "disk") {
        check_modes(&place, "base", "disk");
    }
}

#[test]
fn exported_changes_obey_the_umask() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "changed");
    start(&place, &["--name", "changed"], "echo > /tmp/new");
    place.out("wait changed");
    check_modes(&place, "changed", "changes");
}

/// Exports to new files under several umasks. The modes of files and directories must be those that the umask leaves.
fn check_modes(place: &Place, name: &str, target: &str) {
    for umask in [0o022, 0o027, 0o077] {
        let file = place.path(&format!("{target}-{umask:o}"));
        let quire = place.command(&["export", name]);
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(format!("umask {umask:o}; exec \"$@\"")).arg("sh");
        shell.arg(quire.get_program()).args(quire.get_args());
        shell.arg(format!("{target}:{}", file.display()));
        assert!(shell.status().unwrap().success(), "{target}");
        let mut all = vec![file.clone()];
        if target == "oci" {
            all.extend(["oci-layout", "index.json", "blobs/sha256"].map(|it| file.join(it)));
            let blobs = fs::read_dir(file.join("blobs/sha256")).unwrap();
            all.extend(blobs.map(|it| it.unwrap().path()));
        }
        for path in all {
            let found = fs::metadata(&path).unwrap();
            let most = if found.is_dir() { 0o777 } else { 0o666 };
            let mode = found.permissions().mode() & 0o777;
            assert_eq!(mode, most & !umask, "{umask:o}: {}", path.display());
        }
    }
}
