//! Help: groups of verbs and options, examples and exit codes. `-h` prints a page, `--help` and `quire help` all.

use clap::builder::StyledStr;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};

use crate::output::width::{self, wrap};
use crate::verbs::command_words::UnusedLine;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::option_groups::place;
use crate::verbs::{VERBS, VerbRow, command, row};

/// The options of all verbs, below the help of each.
const GLOBAL: &str =
    "Global options: --store DIR, --json, --quiet, --verbose, …: see `quire --help`";
const GLOBAL_WITHOUT_JSON: &str =
    "Global options: --store DIR, --quiet, --verbose, …: see `quire --help`";

/// Describes clap's verb `help`.
const HELP: &str = "Show the help of a command";

/// The text below the short help of the whole program.
const BELOW_SHORT: &str = "\
    `quire help COMMAND` explains a command. Options: --store DIR, --json, --quiet, …: see `quire --help`";

/// Returns the command line with all that help, man pages and completions show.
pub(crate) fn explained() -> Command {
    explained_within(width::of_help())
}

/// Does the same for a terminal with this number of columns.
fn explained_within(columns: usize) -> Command {
    let mut command = command().after_help(BELOW_SHORT).after_long_help(ExitCodes::Kinds.text());
    command = command.term_width(columns).mut_subcommands(|verb| {
        let Some(row) = row(verb.get_name()) else { return verb };
        let verb = verb.after_help(below(row, false)).after_long_help(below(row, true));
        verb.term_width(columns)
    });
    let template = template(&command, columns, true);
    // Only now do the verbs have their options, and those of the program.
    command.build();
    command.help_template(template).mut_args(shorten).mut_subcommands(|verb| {
        if verb.get_name() == "help" {
            return verb.about(HELP);
        }
        let Some(row) = row(verb.get_name()) else { return verb };
        verb.mut_args(|arg| {
            if arg.is_global_set() || arg.get_id() == "version" {
                arg.hide(true)
            } else {
                shorten(place(row.groups, arg))
            }
        })
    })
}

/// Returns the short help of the whole program.
pub(crate) fn short() -> StyledStr {
    short_within(width::of_help())
}

fn short_within(columns: usize) -> StyledStr {
    let command = explained_within(columns);
    let template = template(&command, columns, false);
    command.help_template(template).render_help()
}

/// Replaces the help that clap made from [`command`], which has only the parts that are needed to run a verb. Other
/// errors stay.
pub(crate) fn explain(error: clap::Error, line: &UnusedLine) -> clap::Error {
    let mut command = explained();
    // `run -h` is the option for the host name, but alone it can only be a question.
    if let Some(row) = line.asks_with_option().and_then(row) {
        command = command.mut_subcommand(row.name, |verb| {
            // `mut_arg` would change the order of the options, which is fixed by now.
            verb.mut_args(|it| match it.get_id() == "help" {
                true => it.action(ArgAction::HelpShort),
                false => it,
            })
        });
        let words = ["quire", row.name, "--help"];
        return command.try_get_matches_from(words).err().unwrap_or(error);
    }
    if error.kind() != ErrorKind::DisplayHelp {
        return error;
    }
    if line.asks_for_list() {
        let template = template(&command, width::of_help(), false);
        command = command.help_template(template);
    }
    command.try_get_matches_from(line.words()).err().unwrap_or(error)
}

/// Gives `-h` only the first sentence of an option's help.
fn shorten(arg: Arg) -> Arg {
    let Some(help) = arg.get_help().map(ToString::to_string) else { return arg };
    let ends = [". ", "; ", ": "].map(|it| help.find(it));
    match ends.into_iter().flatten().min() {
        Some(end) if arg.get_long_help().is_none() => {
            let first = help.get(..end).unwrap_or_default().to_owned();
            arg.help(first).long_help(help)
        }
        // clap_mangen writes nothing about an option that `-h` does not show, unless it has a long help.
        _ if arg.is_hide_short_help_set() && arg.get_long_help().is_none() => arg.long_help(help),
        _ => arg,
    }
}

/// Returns the text below the options of a verb.
fn below(verb: &VerbRow, is_long: bool) -> String {
    let global = if verb.prints_json { GLOBAL } else { GLOBAL_WITHOUT_JSON };
    match is_long {
        true => format!("Examples:\n  {}\n\n{}\n\n{global}", verb.examples, verb.exit_codes.text()),
        false => format!(
            "Example:\n  {}\n\n{global}\nAll options, in full: `quire help {}`",
            verb.examples.lines().next().unwrap_or_default(),
            verb.name
        ),
    }
}

/// Commands that only the long help lists with a description, so that the short one fits on a screen.
const RARE: [&str; 22] = [
    "history",
    "untag",
    "dump",
    "save",
    "load",
    "convert",
    "merge",
    "filter",
    "index",
    "referrers",
    "attach",
    "port",
    "share",
    "unseal",
    "trace",
    "info",
    "version",
    "system",
    "image",
    "container",
    "completions",
    "man",
];

/// Returns the help of the whole program, with its verbs in groups.
fn template(command: &Command, columns: usize, is_long: bool) -> String {
    let mut text = "{before-help}{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    let mut group = "";
    let shown = VERBS.iter().filter(|it| is_long || !RARE.contains(&it.name));
    for row in shown {
        if row.group != group {
            group = row.group;
            text += &format!("\n{group}:\n");
        }
        let about = command.find_subcommand(row.name).map(told).unwrap_or_default();
        text += &listed(row.name, &about, columns);
    }
    match is_long {
        true => text + &listed("help", HELP, columns) + "\nOptions:\n{options}{after-help}",
        false => {
            let rare = listed("also", &RARE.join(", "), columns);
            text.trim_end().to_owned() + "\n" + rare.trim_end() + "{after-help}"
        }
    }
}

/// Returns the line of a verb, or several lines on a narrow terminal.
fn listed(name: &str, about: &str, columns: usize) -> String {
    /// Columns before the description.
    const BEFORE: usize = 15;
    let mut text = String::new();
    let lines = wrap(about, columns.saturating_sub(BEFORE).max(BEFORE));
    for (line, name) in lines.iter().zip(std::iter::once(name).chain(std::iter::repeat(""))) {
        text += format!("  {name:<12} {line}").trim_end();
        text.push('\n');
    }
    text
}

/// Describes a verb in one line.
fn told(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let aliases: Vec<_> = verb.get_visible_aliases().collect();
    if aliases.is_empty() { about } else { format!("{about} [alias: {}]", aliases.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "serve")]
    use crate::verbs::option_groups::CONTAINER;

    #[test]
    fn lines_of_verbs_are_short() {
        for verb in explained().get_subcommands() {
            assert!(told(verb).len() <= 84, "{}: its line is too long", verb.get_name());
        }
    }

    /// A new option of `run` needs a group, and no group has an option that is not there.
    #[cfg(feature = "serve")]
    #[test]
    fn each_option_of_run_is_in_one_group() {
        let command = explained();
        let run = command.find_subcommand("run").unwrap();
        let own = run.get_arguments().filter(|it| !it.is_positional() && !it.is_hide_set());
        let mut own: Vec<_> = own.map(|it| it.get_id().as_str()).collect();
        let mut all: Vec<_> = CONTAINER.iter().flat_map(|it| it.options).copied().collect();
        own.sort_unstable();
        all.sort_unstable();
        assert_eq!(own, all);
    }

    #[cfg(feature = "serve")]
    #[test]
    fn groups_come_in_order() {
        let mut command = explained();
        for verb in ["run", "bundle"] {
            let text = command.find_subcommand_mut(verb).unwrap().render_long_help().to_string();
            let headings = CONTAINER.iter().map(|it| it.heading.unwrap_or("Options"));
            let at: Vec<_> = headings.map(|it| text.find(&format!("\n{it}:\n"))).collect();
            assert!(at.iter().all(Option::is_some) && at.is_sorted(), "{verb}: {at:?} {text}");
        }
    }

    /// A terminal of 60 lines shows all that `-h` prints.
    #[test]
    fn short_help_is_a_page() {
        let check = |name: &str, text: &str| {
            let count = text.lines().count();
            assert!(count <= 60, "{name}: {count} lines\n{text}");
            assert!(text.contains("quire help"), "{name}: names no longer help\n{text}");
            assert!(text.lines().all(|it| it.chars().count() <= 100), "{name}: {text}");
        };
        let mut command = explained_within(100);
        for row in VERBS {
            let text = command.find_subcommand_mut(row.name).unwrap().render_help().to_string();
            check(row.name, &text);
        }
        // The verb for tests is no part of the program.
        let text = short_within(100).to_string();
        let text: String =
            text.lines().filter(|it| !it.contains("  example")).collect::<Vec<_>>().join("\n");
        check("quire", &text);
    }

    #[test]
    fn help_fits_into_narrow_terminals() {
        let check = |name: &str, text: &str| {
            // A usage is one line, which the terminal wraps.
            for line in text.lines().filter(|it| !it.starts_with("Usage: ")) {
                assert!(line.chars().count() <= 60, "{name}: {line}\n{text}");
            }
        };
        let mut command = explained_within(60);
        for row in VERBS {
            let verb = command.find_subcommand_mut(row.name).unwrap();
            check(row.name, &verb.render_help().to_string());
            check(row.name, &verb.render_long_help().to_string());
        }
        check("quire", &short_within(60).to_string());
        check("quire", &command.render_long_help().to_string());
    }

    /// Man pages explain options from their long help if `-h` does not show them.
    #[test]
    fn options_without_short_help_have_a_long_one() {
        let command = explained();
        let mut count = 0;
        for verb in command.get_subcommands() {
            let hidden = verb.get_arguments().filter(|it| it.is_hide_short_help_set());
            for arg in hidden.filter(|it| !it.is_hide_set() && it.get_help().is_some()) {
                assert!(arg.get_long_help().is_some(), "{} {}", verb.get_name(), arg.get_id());
                count += 1;
            }
        }
        assert!(count > 10, "{count}");
    }

    #[test]
    fn global_options_take_a_line() {
        let mut command = explained();
        let global: Vec<_> =
            command.get_arguments().filter(|it| it.is_global_set()).cloned().collect();
        let options = GLOBAL.split(": see").next().unwrap();
        for word in options.split([' ', ',']).filter_map(|it| it.strip_prefix("--")) {
            assert!(global.iter().any(|it| it.get_long() == Some(word)), "{word}");
        }
        let all = command.render_long_help().to_string();
        for row in VERBS {
            let text =
                command.find_subcommand_mut(row.name).unwrap().render_long_help().to_string();
            assert_eq!(text.matches("Global options: ").count(), 1, "{text}");
            for option in &global {
                let line = format!("\n      --{}", option.get_long().unwrap());
                assert!(all.contains(&line), "{line} {all}");
                assert!(!text.contains(&line), "{}: {line}", row.name);
            }
        }
    }
}
