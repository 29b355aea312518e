//! Parts of help and man pages besides the options: groups of verbs, examples and exit codes.

use clap::Command;

use crate::verbs::exit_codes::EXIT_CODES;
use crate::verbs::{VERBS, VerbRow};

/// Returns the text below the options of a verb.
pub(super) fn after(verb: &VerbRow) -> String {
    format!("Examples:\n  {}\n\n{}", verb.examples, verb.exit_codes)
}

/// Returns the help of the whole program, with its verbs in groups.
pub(super) fn template(command: &Command) -> String {
    let mut text = "{before-help}{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    let mut group = "";
    for row in VERBS {
        if row.group != group {
            group = row.group;
            text += &format!("\n{group}:\n");
        }
        let about = command.find_subcommand(row.name).map(told).unwrap_or_default();
        text += &format!("  {:<12} {about}\n", row.name);
    }
    text + "  help         Show the help of a verb\n\nOptions:\n{options}{after-help}"
}

/// Describes a verb in one line.
fn told(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let aliases: Vec<_> = verb.get_visible_aliases().collect();
    if aliases.is_empty() { about } else { format!("{about} [alias: {}]", aliases.join(", ")) }
}

/// The text below the help of the whole program.
pub(super) const CODES_OF_ALL: &str = EXIT_CODES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_verbs_are_short() {
        for verb in crate::verbs::command().get_subcommands() {
            assert!(told(verb).len() <= 84, "{}: its line is too long", verb.get_name());
        }
    }
}
