//! `dump`: prints an image as a composefs dump.

use std::ffi::OsString;
use std::io::Write as _;

use anyhow::bail;
use clap::Args;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::target::Target;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Dump {
    /// A name, an image id or its first digits (6 or more), erofs:FILE, disk:FILE, or the path of an image file
    pub(crate) target: OsString,
}

impl VerbArgs for Dump {
    const NAME: &'static str = "dump";
    const ABOUT: &'static str = "Print an image as a composefs dump, one line for each file";
    const EXAMPLES: &'static str = "quire dump debian";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        dump(context, self)
    }
}

pub(crate) fn dump(context: &Context, args: &Dump) -> anyhow::Result<Answer> {
    let target = Target::open(context, &args.target)?;
    if target.path != b"/" {
        bail!("dump prints whole images: leave \":{}\" out", target.path.escape_ascii());
    }
    let mut out = report::standard_output();
    let (links, size) = (image::dump::Links::ToOwner, image::dump::directory_size);
    image::dump::write(&target.tree, links, size, &mut out)?;
    out.flush()?;
    Ok(Answer::Yes)
}
