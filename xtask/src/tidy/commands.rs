//! Checks that commands of this repository in documents and in the Makefile can be parsed.
//!
//! Tests of the package `quire-cli` check the commands of `quire` itself, because that package has its command line.

use std::process::Command;

use clap::CommandFactory as _;
use clap::error::ErrorKind;
use rig::process::repository;

use super::{text, tracked};
use crate::Args;

/// Finds defaults that are not valid values, two options with one name, and similar errors.
#[test]
fn the_command_line_is_sound() {
    Args::command().debug_assert();
}

/// Returns clap's error for a command line of `cargo xtask`, if any.
fn refused(line: &str) -> Option<String> {
    let words = line.split_whitespace().skip(1);
    // Readers of the documents do not have the environment variables of a build.
    let command = Args::command()
        .mut_subcommand("install", |install| install.mut_arg("destination", |it| it.env(None)));
    let error = command.try_get_matches_from(words).err()?;
    // Words in capitals are placeholders; some fragments of prose lack an argument.
    let is_pattern = line.contains(|it: char| it.is_ascii_uppercase() || it == '…');
    let is_fine = matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            | ErrorKind::MissingRequiredArgument
    );
    let is_any = [ErrorKind::InvalidSubcommand, ErrorKind::InvalidValue].contains(&error.kind());
    let is_refused = !(is_fine || is_pattern && is_any);
    is_refused.then(|| error.to_string().lines().next().unwrap_or_default().to_owned())
}

/// Returns all `cargo xtask` lines of a page: in code spans, and in code blocks up to a comment.
fn tasks(page: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut is_code = false;
    for line in page.lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if is_code && !is_fence {
            let line = line.trim_start_matches(['#', '$', ' ']).split(" #").next();
            all.extend(line.map(|it| it.trim_end().to_owned()));
        }
        // Code spans in comments of code blocks count as well.
        all.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
    }
    all.retain(|it| it.starts_with("cargo xtask "));
    all
}

#[test]
fn tasks_that_documents_name_are_there() {
    let mut found = Vec::new();
    let mut count = 0;
    for path in tracked().into_iter().filter(|path| path.ends_with(".md")) {
        // The changelog was right when it was written, and is not changed later.
        if path == "CHANGELOG.md" {
            continue;
        }
        for line in tasks(&text(&path).unwrap_or_default()) {
            count += 1;
            let line = line.split(';').next().unwrap_or_default();
            found.extend(refused(line).map(|it| format!("{path}: `{line}`: {it}")));
        }
    }
    assert!(count > 20, "{count} lines");
    assert_eq!(found, Vec::<String>::new());
}

/// Parses the commands of every target of the Makefile, with default settings and with settings of users.
#[test]
fn targets_of_the_makefile_are_command_lines() {
    let makefile = text("Makefile").unwrap();
    let targets = makefile.lines().filter_map(|line| line.split_once(": "));
    let targets = targets.filter(|(_, rest)| rest.trim_start().starts_with(';'));
    let targets: Vec<_> = targets.map(|(target, _)| target.trim()).collect();
    assert!(targets.contains(&"install"), "{targets:?}");
    let check = |target: &str, setting: &str| {
        let mut make = Command::new("make");
        make.args(["--dry-run", "--no-print-directory", target]).args(setting.split_whitespace());
        // Removes the variables of the `make test` that runs this test.
        for name in ["DESTDIR", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PREFIX"] {
            make.env_remove(name);
        }
        let output = make.current_dir(repository()).output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(output.status.success(), "make {target}: {said}");
        for line in said.lines().filter(|it| it.starts_with("cargo xtask ")) {
            assert_eq!(refused(line), None, "make {target} {setting}: {line}");
        }
        said
    };
    for target in targets {
        check(target, "");
    }
    let said = check("install", "PREFIX=/opt/quire");
    assert!(said.contains("--prefix /opt/quire"), "{said}");
}

/// Finds targets of make that documents name.
#[test]
fn targets_that_documents_name_are_there() {
    let makefile = text("Makefile").unwrap();
    let is_there = |target: &str| makefile.lines().any(|it| it.starts_with(&format!("{target}:")));
    let mut found = Vec::new();
    for path in tracked().into_iter().filter(|path| path.ends_with(".md")) {
        if path == "CHANGELOG.md" {
            continue;
        }
        for span in text(&path).unwrap_or_default().split('`') {
            if let Some(rest) = span.strip_prefix("make ")
                && let Some(target) = rest.split_whitespace().next()
                && !is_there(target)
            {
                found.push(format!("{path}: `{span}`"));
            }
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn wrong_command_lines_are_found() {
    let check = |line: &str, expected: Option<&str>| {
        let said = refused(line);
        assert!(
            said.as_deref().unwrap_or_default().contains(expected.unwrap_or_default()),
            "{line}: {said:?}"
        );
        assert_eq!(said.is_some(), expected.is_some(), "{line}: {said:?}");
    };
    check("cargo xtask test tests", None);
    check("cargo xtask vm KERNEL [TEST…]", None);
    check("cargo xtask test nosuch", Some("invalid value"));
    check("cargo xtask tests", Some("unrecognized subcommand"));
    check("cargo xtask install --nosuch", Some("unexpected argument"));
    let page = "`cargo xtask a` b `c`\n```\n# cargo xtask d   # e\ncargo f\n```\n`cargo xtask g`";
    assert_eq!(tasks(page), ["cargo xtask a", "cargo xtask d", "cargo xtask g"]);
}
