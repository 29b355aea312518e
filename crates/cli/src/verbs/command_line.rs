//! The command line for clap. Help texts, man pages and completions are generated from it.

use clap::{Arg, ArgAction, Command, CommandFactory as _, Parser};

use crate::args::Global;
use crate::verbs::{Verb, row};

/// Returns the command line. Its help is that of [`explained`](crate::verbs::help::explained).
pub(crate) fn command() -> Command {
    Cli::command().mut_subcommands(|verb| {
        let Some(row) = row(verb.get_name()) else { return verb };
        let verb = row.describe(verb);
        let verb = match row.has_short_quiet {
            // As below: this takes the place of the global option, which has no letter.
            true => verb.arg(global("quiet").short('q').conflicts_with("verbose")),
            false => verb,
        };
        if row.prints_json {
            return verb;
        }
        // This hidden option replaces the global option for a verb without JSON.
        verb.arg(global("json"))
    })
}

/// Returns a verb's form of a global option. Help has only the program's.
fn global(name: &'static str) -> Arg {
    Arg::new(name).long(name).global(true).hide(true).action(ArgAction::SetTrue)
}

/// Run containers and mount OS images from one verified, deduplicated store.
///
/// Quire pulls images from registries, and keeps one verified copy of each distinct file. It runs containers by an OCI
/// runtime, such as crun or runc, and mounts, builds and exports images.
#[derive(Debug, Parser)]
#[command(name = "quire", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}
