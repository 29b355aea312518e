//! `man`: writes the man pages.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};

use super::man_pages::pages;
use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// A directory of man pages, which exists; the pages go to man1, man5 and man8 in it
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
}

impl VerbArgs for Man {
    const NAME: &'static str = "man";
    const ABOUT: &'static str = "Write the man pages into a directory";
    const EXAMPLES: &'static str = "quire man /usr/local/share/man";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        man(context, self)
    }
}

fn man(_: &Context, args: &Man) -> anyhow::Result<Answer> {
    let directory = args.directory.display();
    if !args.directory.is_dir() {
        bail!("{directory} is not a directory: `mkdir -p '{directory}'` first");
    }
    let failed = || format!("cannot write into {directory}");
    for page in pages() {
        let section = args.directory.join(format!("man{}", page.section));
        std::fs::create_dir_all(&section).with_context(failed)?;
        let file = section.join(format!("{}.{}", page.name, page.section));
        std::fs::write(file, page.text).with_context(failed)?;
    }
    Ok(Answer::Yes)
}
