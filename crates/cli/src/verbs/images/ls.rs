//! `ls`: lists the files of an image.

use std::ffi::OsString;
use std::io::Write as _;

use clap::Args;
use image::tree::{Inode, Node};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::target::{LastLink, Target};
use crate::verbs::VerbArgs;
use crate::verbs::images::file_listing::{self, below};

#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// NAME[:/PATH], erofs:FILE[:/PATH], disk:FILE[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// Print mode, links, owner, size and time of each file
    #[arg(short)]
    pub(crate) long: bool,
    /// List directories with everything below them
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
}

impl VerbArgs for Ls {
    const NAME: &'static str = "ls";
    const ABOUT: &'static str = "List the files of an image";
    const EXAMPLES: &'static str = "quire ls -l debian:/etc\n  quire ls -R ./root.erofs";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        ls(context, self)
    }
}

pub(crate) fn ls(context: &Context, args: &Ls) -> anyhow::Result<Answer> {
    let target = Target::open_names(context, &args.target)?;
    let start = target.inode(LastLink::Keep)?;
    let mut listed: Vec<(Vec<u8>, Inode<'_>)> = Vec::new();
    if start.is_directory() && args.recursive {
        below(&target, start, usize::MAX, &mut |path, inode, _| {
            listed.push((path.to_vec(), inode));
        });
    } else if start.is_directory() {
        listed.extend(start.children().map(|it| (it.name.to_vec(), it.inode)));
    } else {
        listed.push((target.path.clone(), start));
    }
    if context.json {
        let files = listed.iter().map(|(path, inode)| file_listing::report(path, inode));
        report::json(&files.collect::<Vec<_>>())?;
        return Ok(Answer::Yes);
    }
    let mut out = report::standard_output();
    let columns: Vec<Vec<String>> = match args.long {
        true => listed.iter().map(|(_, inode)| file_listing::columns(inode)).collect(),
        false => Vec::new(),
    };
    let width = |column: usize| columns.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..6).map(width).collect();
    for (at, (path, inode)) in listed.iter().enumerate() {
        if let Some(row) = columns.get(at) {
            for (cell, width) in row.iter().zip(&widths) {
                write!(out, "{cell:>width$} ")?;
            }
        }
        write!(out, "{}", file_listing::name(path))?;
        match inode.node() {
            Node::Symlink(to) if args.long => writeln!(out, " -> {}", file_listing::name(to))?,
            _ => writeln!(out)?,
        }
    }
    out.flush()?;
    Ok(Answer::Yes)
}
