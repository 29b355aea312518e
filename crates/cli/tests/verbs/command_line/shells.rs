//! The completion scripts of fish and zsh, run by these shells.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Place, Ran};

/// Makes a place with the image `debian:12`, a directory, and a home directory in whose `bin` is quire.
fn place() -> (Place, PathBuf) {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} debian:12", tree.display()));
    let home = place.path("home");
    fs::create_dir_all(home.join("bin")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_quire"), home.join("bin/quire")).unwrap();
    fs::write(place.path("settings.env"), "").unwrap();
    (place, home)
}

/// Returns a shell's command with quire in `PATH`.
fn shell(program: &Path, place: &Place, home: &Path) -> Command {
    let mut command = Command::new(program);
    let paths = [home.join("bin")].into_iter().chain(crate::search_path());
    command.env("PATH", std::env::join_paths(paths).unwrap()).env("TERM", "dumb");
    command.env("HOME", home).env("XDG_CONFIG_HOME", home).env("XDG_DATA_HOME", home);
    command.env("QUIRE_STORE", place.path("store")).current_dir(place.folder.path());
    command
}

#[test]
fn completion_works_in_fish() {
    let Some(fish) = testing::program("fish") else { return };
    let (place, home) = place();
    let check = |line: &str, expect: &[&str]| {
        let script = format!("quire completions fish | source; complete -C '{line}'");
        let mut fish = shell(&fish, &place, &home);
        let ran = Ran::from_output(&fish.args(["--no-config", "-c", &script]).output().unwrap());
        // A description follows a tab.
        let words: Vec<_> = ran.out.lines().filter_map(|it| it.split('\t').next()).collect();
        assert_eq!((words.as_slice(), ran.err.as_str()), (expect, ""), "{line}");
    };
    check("quire rm", &["rm", "rmi"]);
    check("quire run d", &["debian:12"]);
    check("~/bin/quire run d", &["debian:12"]);
    check("home/bin/quire run d", &["debian:12"]);
    check("quire run --pull=al", &["--pull=always"]);
    check("quire run --pull al", &["always"]);
    check("quire run --env-file=sett", &["--env-file=settings.env"]);
    check("quire run --env-file sett", &["settings.env"]);
    check("quire --store=tr", &["--store=tree/"]);
    check("quire run --store=nothing d", &[]);
    check("quire exec web -", &[]);
}

/// Types lines and the tab key, and prints the edited lines.
const TYPIST: &str = r#"
log_user 0
set timeout 60
set zsh [lindex $argv 0]
spawn -noecho $zsh -f -i
proc shown {} {
    expect {
        -re {\[\[(.*?)\]\]} { return $expect_out(1,string) }
        timeout { return "timeout" }
        eof { return "the shell ended" }
    }
}
send "source setup.zsh\r"
set ready [shown]
foreach line [lrange $argv 1 end] {
    send -- "$line\t\x14"
    set edited [shown]
    puts $edited
}
close
wait
"#;

/// Loads the script, and lets Ctrl-T print the edited line in brackets.
const SETUP: &str = "\
    PS1=\n\
    autoload -Uz compinit && compinit -u -D\n\
    source <(quire completions zsh)\n\
    show() { zle -I; print -r -- \"[[$BUFFER]]\"; BUFFER= }\n\
    zle -N show\n\
    bindkey '^T' show\n\
    bindkey '^I' complete-word\n\
    print -r -- '[[]]'\n";

#[test]
fn completion_works_in_zsh() {
    let (Some(zsh), Some(expect)) = (testing::program("zsh"), testing::program("expect")) else {
        return;
    };
    let (place, home) = place();
    fs::write(place.path("setup.zsh"), SETUP).unwrap();
    fs::write(place.path("typist"), TYPIST).unwrap();
    let lines = [
        ("quire images", "quire images "),
        ("quire run d", "quire run debian:12 "),
        ("sudo quire run d", "sudo quire run debian:12 "),
        ("~/bin/quire run d", "~/bin/quire run debian:12 "),
        ("quire show debian:", "quire show debian:12 "),
        ("quire run --pull=al", "quire run --pull=always "),
        ("quire run --env-file=sett", "quire run --env-file=settings.env "),
        ("quire run --env-file sett", "quire run --env-file settings.env "),
        ("quire --store=tr", "quire --store=tree/"),
        ("quire run --store=nothing d", "quire run --store=nothing d"),
        ("quire run --js", "quire run --js"),
    ];
    let mut typist = shell(&expect, &place, &home);
    typist.arg("typist").arg(zsh).args(lines.map(|it| it.0));
    let ran = Ran::from_output(&typist.output().unwrap());
    let edited: Vec<_> = ran.out.lines().collect();
    assert_eq!(edited, lines.map(|it| it.1), "{}", ran.err);
}
