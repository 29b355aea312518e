//! `man`: writes the man pages.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueHint};

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// An existing directory
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
}

impl VerbArgs for Man {
    const NAME: &'static str = "man";
    const ABOUT: &'static str = "Write the man pages into a directory";
    const EXAMPLES: &'static str = "quire man /usr/local/share/man/man1";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        man(context, self)
    }
}

fn man(_: &Context, args: &Man) -> anyhow::Result<Answer> {
    clap_mangen::generate_to(crate::verbs::command(), &args.directory).with_context(|| {
        let directory = args.directory.display();
        match args.directory.is_dir() {
            true => format!("cannot write into {directory}"),
            false => format!("{directory} is not a directory: `mkdir -p '{directory}'` first"),
        }
    })?;
    Ok(Answer::Yes)
}
