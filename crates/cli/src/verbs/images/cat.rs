//! `cat`: prints files of an image.

use std::ffi::OsString;
use std::io::Write as _;

use clap::Args;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::target::{LastLink, Target, contents};
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Cat {
    /// NAME:/PATH, erofs:FILE:/PATH or disk:FILE:/PATH
    #[arg(required = true)]
    pub(crate) targets: Vec<OsString>,
}

impl VerbArgs for Cat {
    const NAME: &'static str = "cat";
    const ABOUT: &'static str = "Print a file of an image";
    const EXAMPLES: &'static str = "quire cat debian:/etc/os-release";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        cat(context, self)
    }
}

pub(crate) fn cat(context: &Context, args: &Cat) -> anyhow::Result<Answer> {
    let mut out = report::standard_output();
    for text in &args.targets {
        let target = Target::open_names(context, text)?;
        let inode = target.inode(LastLink::Follow)?;
        contents(&target, inode, |bytes| Ok(out.write_all(bytes)?))?;
    }
    out.flush()?;
    Ok(Answer::Yes)
}
