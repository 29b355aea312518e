//! `ls`, `tree`, `cat` and `dump`: the files of images.

use std::ffi::OsString;
use std::io::Write as _;
use std::num::NonZeroUsize;

use anyhow::bail;
use clap::Args;
use image::tree::{Inode, Node};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::target::{LastLink, Target, contents};
use crate::verbs::VerbArgs;
use crate::verbs::images::describe;

#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// NAME[:/PATH], or the path of an image file
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

#[derive(Debug, Args)]
pub(crate) struct Tree {
    /// NAME[:/PATH], or the path of an image file
    pub(crate) target: OsString,
    /// Show at most this many levels
    #[arg(short = 'L', long, value_name = "LEVELS", value_parser = levels)]
    pub(crate) depth: Option<NonZeroUsize>,
}

/// As `tree` of most systems has it: no level at all is a mistake.
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

#[derive(Debug, Args)]
pub(crate) struct Cat {
    /// NAME:/PATH
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

#[derive(Debug, Args)]
pub(crate) struct Dump {
    /// A name, an image id or its first digits (6 or more), or the path of an image file
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
        let files = listed.iter().map(|(path, inode)| describe::report(path, inode));
        report::json(&files.collect::<Vec<_>>())?;
        return Ok(Answer::Yes);
    }
    let mut out = report::standard_output();
    let columns: Vec<Vec<String>> = match args.long {
        true => listed.iter().map(|(_, inode)| describe::columns(inode)).collect(),
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
        write!(out, "{}", describe::name(path))?;
        match inode.node() {
            Node::Symlink(to) if args.long => writeln!(out, " -> {}", describe::name(to))?,
            _ => writeln!(out)?,
        }
    }
    out.flush()?;
    Ok(Answer::Yes)
}

/// Visits everything below a directory, depth first, with the path from it and the depth, from 1.
fn below<'a>(
    target: &'a Target,
    start: Inode<'a>,
    depth: usize,
    visit: &mut impl FnMut(&[u8], Inode<'a>, usize),
) {
    let mut path = Vec::new();
    let mut open = vec![(target.tree.inode(start.id()).children(), 0)];
    while let Some((children, length)) = open.last_mut() {
        path.truncate(*length);
        let Some(entry) = children.next() else {
            open.pop();
            continue;
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(entry.name);
        visit(&path, entry.inode, open.len());
        if entry.inode.is_directory() && open.len() < depth {
            open.push((entry.inode.children(), path.len()));
        }
    }
}

pub(crate) fn tree(context: &Context, args: &Tree) -> anyhow::Result<Answer> {
    let target = Target::open_names(context, &args.target)?;
    let start = target.inode(LastLink::Keep)?;
    let depth = args.depth.map_or(usize::MAX, NonZeroUsize::get);
    if context.json {
        let mut files = Vec::new();
        below(&target, start, depth, &mut |path, inode, _| {
            files.push(describe::report(path, &inode));
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
        write!(out, "{}{}", if last { "└── " } else { "├── " }, describe::name(entry.name))?;
        match entry.inode.node() {
            Node::Symlink(to) => writeln!(out, " -> {}", describe::name(to))?,
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

pub(crate) fn dump(context: &Context, args: &Dump) -> anyhow::Result<Answer> {
    let target = Target::open(context, &args.target)?;
    if target.path != b"/" {
        bail!("dump writes whole images: leave \":{}\" out", target.path.escape_ascii());
    }
    let mut out = report::standard_output();
    let (links, size) = (image::dump::Links::ToOwner, image::dump::directory_size);
    image::dump::write(&target.tree, links, size, &mut out)?;
    out.flush()?;
    Ok(Answer::Yes)
}
