//! `logs`: prints the output of a container from the two files of its log.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use container::life::log::Halves;
use container::life::lookup::find_container;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// A container
    pub(crate) container: String,
    /// Follow the output until the container ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Print only this many of the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
}

impl VerbArgs for Logs {
    const NAME: &'static str = "logs";
    const ABOUT: &'static str = "Print the output of a container";
    const EXAMPLES: &'static str = "quire logs --tail 20 web\n  quire logs --follow web";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        logs(context, self)
    }
}

/// Time between two reads of a log.
const GLANCE: Duration = Duration::from_millis(50);

pub(crate) fn logs(context: &Context, args: &Logs) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let found = find_container(&store, &args.container)?;
    let failed = || format!("cannot read the log in {}", found.folder.display());
    let halves = Halves::open(&found.folder).with_context(failed)?;
    if halves.is_none() && found.is_created {
        // It has written nothing yet.
        return Ok(Answer::Yes);
    }
    let Some(Halves { mut older, mut newer }) = halves else {
        bail!("container {} was not started with --detach: it has no log", found.id)
    };
    if let Some(lines) = args.tail {
        let start = last_lines(&mut newer, lines).with_context(failed)?;
        newer.seek(SeekFrom::Start(start.at))?;
        if let Some(older) = &mut older {
            let start =
                last_lines(older, lines.saturating_sub(start.lines)).with_context(failed)?;
            older.seek(SeekFrom::Start(start.at))?;
        }
    }
    if let Some(mut older) = older {
        print(&mut older).with_context(failed)?;
    }
    let is_over = || -> anyhow::Result<bool> {
        Ok(!args.follow || find_container(&store, &found.id).map_or(true, |it| !it.is_running()))
    };
    follow(&found.folder, newer, &is_over)?;
    Ok(Answer::Yes)
}

/// Prints a log from the position of `newer`, which is its newer half, until `is_over`. `is_over` is called again and
/// again.
pub(super) fn follow(
    folder: &Path,
    mut newer: File,
    is_over: &dyn Fn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let failed = || format!("cannot read the log in {}", folder.display());
    loop {
        // This is checked before the log is read, so that output from before the end is printed below.
        let is_over = is_over()?;
        print(&mut newer).with_context(failed)?;
        // The log of a removed container does not exist any more, but all of it was printed.
        while let Some(after) = Halves::after(folder, &newer).with_context(failed)? {
            // Prints the output that was written before this file became the older one.
            print(&mut newer).with_context(failed)?;
            if let Some(mut between) = after.older {
                print(&mut between).with_context(failed)?;
            }
            newer = after.newer;
            print(&mut newer).with_context(failed)?;
        }
        if is_over {
            return Ok(());
        }
        std::thread::sleep(GLANCE);
    }
}

fn print(log: &mut File) -> anyhow::Result<()> {
    let mut out = report::standard_output();
    if log.metadata()?.len() < log.stream_position()? {
        // The log was truncated, because there was no space for another file.
        log.rewind()?;
    }
    std::io::copy(log, &mut out)?;
    out.flush()?;
    Ok(())
}

/// Offset of the last lines in a file, and their number.
struct Start {
    at: u64,
    lines: usize,
}

fn last_lines(log: &mut File, lines: usize) -> anyhow::Result<Start> {
    let length = log.metadata()?.len();
    let mut end = length;
    if lines == 0 {
        return Ok(Start { at: length, lines: 0 });
    }
    let mut seen = 0;
    let mut buffer = vec![0; 64 << 10];
    let mut is_last = true;
    while end > 0 {
        let length = usize::try_from(end).map_or(buffer.len(), |end| end.min(buffer.len()));
        let start = end - length as u64;
        log.seek(SeekFrom::Start(start))?;
        log.read_exact(&mut buffer[..length])?;
        for (at, byte) in buffer[..length].iter().enumerate().rev() {
            // The newline at the very end ends the last line, but does not begin another one.
            if *byte == b'\n' && !std::mem::take(&mut is_last) {
                seen += 1;
                if seen == lines {
                    return Ok(Start { at: start + at as u64 + 1, lines });
                }
            }
            is_last = false;
        }
        end = start;
    }
    Ok(Start { at: 0, lines: if length == 0 { 0 } else { seen + 1 } })
}
