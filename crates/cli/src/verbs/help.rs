//! Help and man pages besides the options: verbs in groups, examples, exit codes.

use clap::Command;

use crate::verbs::{VERBS, VerbRow};

/// Those of most verbs.
pub(crate) const EXIT_CODES: &str =
    "Exit codes: 0 done, or yes; 1 the answer is no (damage, a difference); 2 could not do it";

/// Those of verbs that run a program in a container.
pub(crate) const RUN_CODES: &str = "\
Exit codes: the program's own; 128+N when signal N ended it; 125 Quire or the runtime failed; \
126 the program cannot be executed; 127 the program, or a file it needs to start, is not there; \
255 the time of --timeout was over

Signals: quire passes signals on to the program. The program is PID 1 in its container, so the kernel drops INT and TERM \
unless the program handles them. TERM therefore kills a program of `run` that neither handles, ignores nor blocks \
it (exit code 143). The third signal that quire receives kills the container.

On a terminal, Ctrl-C goes to the program. Two within two seconds kill a program that is PID 1 and neither handles nor \
ignores the signal. Ctrl-P Ctrl-Q leaves a container of `run`: it goes on, and its output goes to its log.";

/// What stands below the options of a verb.
pub(super) fn after(verb: &VerbRow) -> String {
    format!("Examples:\n  {}\n\n{}", verb.examples, verb.exit_codes)
}

/// The help of the whole program, with its verbs in groups.
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

/// A verb in a line.
fn told(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let aliases: Vec<_> = verb.get_visible_aliases().collect();
    if aliases.is_empty() { about } else { format!("{about} [alias: {}]", aliases.join(", ")) }
}

/// What stands below the help of the whole program.
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
