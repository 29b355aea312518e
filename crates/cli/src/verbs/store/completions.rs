//! `completions`: prints a completion script for a shell.

use std::io::Write as _;

use clap::Args;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

impl VerbArgs for Completions {
    const NAME: &'static str = "completions";
    const ABOUT: &'static str = "Print a completion script for a shell";
    const EXAMPLES: &'static str = "quire completions bash > /etc/bash_completion.d/quire";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        completions(context, self)
    }
}

fn completions(_: &Context, args: &Completions) -> anyhow::Result<Answer> {
    // Collect the script in memory first, because clap needs a writer that cannot fail.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::verbs::command(), "quire", &mut script);
    let mut out = report::standard_output();
    out.write_all(&script)?;
    out.flush()?;
    Ok(Answer::Yes)
}
