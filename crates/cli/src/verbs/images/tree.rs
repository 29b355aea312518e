//! `tree`: shows the directory tree of an image.

use std::ffi::OsString;
use std::io::Write as _;
use std::num::NonZeroUsize;

use clap::Args;
use image::tree::Node;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::target::{LastLink, Target};
use crate::verbs::VerbArgs;
use crate::verbs::images::file_listing::{self, below};

#[derive(Debug, Args)]
pub(crate) struct Tree {
    /// NAME[:/PATH], erofs:FILE[:/PATH], disk:FILE[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// Show at most this many levels
    #[arg(short = 'L', long, value_name = "LEVELS", value_parser = levels)]
    pub(crate) depth: Option<NonZeroUsize>,
}

/// Parses a number of levels. 0 is an error, as in the `tree` of most systems.
fn levels(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().ok().ok_or_else(|| "invalid level, must be greater than 0".to_owned())
}

impl VerbArgs for Tree {
    const NAME: &'static str = "tree";
    const ABOUT: &'static str = "Show the directory tree of an image";
    const EXAMPLES: &'static str = "quire tree -L 2 debian";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        tree(context, self)
    }
}

pub(crate) fn tree(context: &Context, args: &Tree) -> anyhow::Result<Answer> {
    let target = Target::open_names(context, &args.target)?;
    let start = target.inode(LastLink::Keep)?;
    let depth = args.depth.map_or(usize::MAX, NonZeroUsize::get);
    if context.json {
        let mut files = Vec::new();
        below(&target, start, depth, &mut |path, inode, _| {
            files.push(file_listing::report(path, &inode));
        });
        report::json(&files)?;
        return Ok(Answer::Yes);
    }
    let mut out = report::standard_output();
    writeln!(out, "{}", target.text)?;
    let mut open = vec![start.children()];
    let (mut directories, mut files) = (0_u64, 0_u64);
    while let Some(children) = open.last_mut() {
        let Some(entry) = children.next() else {
            open.pop();
            continue;
        };
        let last = children.len() == 0;
        let above = &open[..open.len() - 1];
        for children in above {
            write!(out, "{}", if children.len() == 0 { "    " } else { "│   " })?;
        }
        write!(out, "{}{}", if last { "└── " } else { "├── " }, file_listing::name(entry.name))?;
        match entry.inode.node() {
            Node::Symlink(to) => writeln!(out, " -> {}", file_listing::name(to))?,
            _ => writeln!(out)?,
        }
        if entry.inode.is_directory() {
            directories += 1;
            if open.len() < depth {
                open.push(entry.inode.children());
            }
        } else {
            files += 1;
        }
    }
    let (directories, files) =
        (report::count(directories, "directory"), report::count(files, "file"));
    writeln!(out, "\n{directories}, {files}")?;
    out.flush()?;
    Ok(Answer::Yes)
}
