//! Tests that commands, options and reports keep what a release promises (`docs/compatibility.md`).
//!
//! `testdata/promises` lists it. `QUIRE_UPDATE=1` adds new lines and never removes a line, so a promise can only be taken
//! back by hand.

use std::collections::BTreeSet;
use std::fs;

use clap::{Arg, Command};

use super::command;

/// Commands that are experimental, which the page names.
const EXPERIMENTAL: [&str; 3] = ["index", "serve", "trace"];

/// Sections of `docs/json.md` on reports of experimental commands and options.
const EXPERIMENTAL_REPORTS: [&str; 4] = ["index", "ps --engine", "ps --lazy", "pull --lazy"];

/// Compares the promised lines of a file with the present ones. `new` are those of them that a release may promise.
fn check(name: &str, present: &BTreeSet<String>, new: &BTreeSet<String>) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/promises");
    let path = format!("{folder}/{name}");
    let text = fs::read_to_string(&path).unwrap_or_default();
    let mut promised: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    if std::env::var_os("QUIRE_UPDATE").is_some() {
        promised.extend(new.iter().cloned());
        let lines: Vec<_> = promised.iter().map(|it| format!("{it}\n")).collect();
        fs::write(&path, lines.concat()).expect("the list can be written");
    }
    assert!(!promised.is_empty(), "{path} promises nothing");
    let broken: Vec<_> = promised.difference(present).collect();
    assert!(broken.is_empty(), "no longer true, but promised in {path}: {broken:#?}");
}

/// Adds a line for each command and for each way to write its options. An option that help does not show is accepted,
/// but no promise.
fn add(command: &Command, before: &str, with_hidden: bool, lines: &mut BTreeSet<String>) {
    let names = [command.get_name()].into_iter().chain(command.get_all_aliases());
    for name in names {
        let name = format!("{before}{name}");
        lines.insert(name.clone());
        for option in command
            .get_arguments()
            .filter(|it| !it.is_positional() && (with_hidden || !it.is_hide_set()))
        {
            for spelling in spellings(option) {
                let takes = option.get_num_args();
                let action = option.get_action().takes_values();
                if !action || takes.is_some_and(|it| it.min_values() == 0) {
                    lines.insert(format!("{name} {spelling}"));
                }
                if action {
                    lines.insert(format!("{name} {spelling} VALUE"));
                }
            }
        }
        for inner in command.get_subcommands() {
            add(inner, &format!("{name} "), with_hidden, lines);
        }
    }
}

fn spellings(option: &Arg) -> Vec<String> {
    let long = option.get_long().into_iter();
    let longs = long.chain(option.get_all_aliases().unwrap_or_default());
    let short = option.get_short().into_iter();
    let shorts = short.chain(option.get_all_short_aliases().unwrap_or_default());
    longs.map(|it| format!("--{it}")).chain(shorts.map(|it| format!("-{it}"))).collect()
}

#[test]
fn promised_commands_and_options_are_accepted() {
    let mut program = command();
    // Commands have their options only then.
    program.build();
    let lines = |with_hidden| {
        let mut lines = BTreeSet::new();
        let commands = program.get_subcommands();
        let is_promised =
            |it: &&Command| !EXPERIMENTAL.contains(&it.get_name()) && it.get_name() != "help";
        commands.filter(is_promised).for_each(|it| add(it, "", with_hidden, &mut lines));
        lines
    };
    let (present, new) = (lines(true), lines(false));
    assert!(new.contains("run --memory VALUE") && new.contains("run -d"));
    check("command-line.txt", &present, &new);
}

#[test]
fn promised_fields_of_reports_are_there() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json.md");
    let page = fs::read_to_string(page).unwrap();
    let mut lines = BTreeSet::new();
    let mut section = "";
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title;
        }
        let is_promised = !EXPERIMENTAL_REPORTS.iter().any(|it| section.starts_with(it));
        let Some(row) = line.strip_prefix("| `").filter(|_| is_promised) else { continue };
        let cells: Vec<_> = row.trim_end_matches('|').split(" | ").collect();
        let [field, types, unit, .., absent] = cells[..] else { panic!("{line}") };
        let field = field.replace('`', "");
        lines.insert(format!("{section}: {field}: {types} {unit}").trim_end().to_owned());
        if absent.trim().is_empty() {
            lines.insert(format!("{section}: {field} is never null or absent"));
        }
    }
    assert!(lines.contains("ps: container is never null or absent"));
    check("json.txt", &lines, &lines);
}
