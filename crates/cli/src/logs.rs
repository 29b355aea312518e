//! `logs`: what a container wrote, from the two files that its log is in.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use container::log::{LOG, OLDER};
use store::OpenOptions;

use crate::Answer;
use crate::args;
use crate::containers::find;
use crate::context::Context;
use crate::report;

/// How often a log is looked at.
const GLANCE: Duration = Duration::from_millis(50);

pub(crate) fn logs(context: &Context, args: &args::Logs) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    let found = find(&store, &args.container)?;
    let Some((mut older, mut newer)) = open(&found.folder)? else {
        bail!("container {} was not started with --detach: it has no log", found.id)
    };
    if let Some(lines) = args.tail {
        let start = last_lines(&mut newer, lines)?;
        newer.seek(SeekFrom::Start(start.at))?;
        if let Some(older) = &mut older {
            let start = last_lines(older, lines.saturating_sub(start.lines))?;
            older.seek(SeekFrom::Start(start.at))?;
        }
    }
    if let Some(mut older) = older {
        print(&mut older)?;
    }
    loop {
        // Asked first: what is written until then is printed below.
        let is_over = !args.follow || find(&store, &found.id).map_or(true, |it| !it.is_running());
        print(&mut newer)?;
        // A container that is gone has taken its log along, and all of that was printed.
        while let Some((between, next)) = turned(&found.folder, &newer)? {
            // What was written before it became the older one.
            print(&mut newer)?;
            if let Some(mut between) = between {
                print(&mut between)?;
            }
            newer = next;
            print(&mut newer)?;
        }
        if is_over {
            return Ok(Answer::Yes);
        }
        std::thread::sleep(GLANCE);
    }
}

fn print(log: &mut File) -> anyhow::Result<()> {
    let mut out = report::standard_output();
    std::io::copy(log, &mut out)?;
    out.flush()?;
    Ok(())
}

/// The older file, if there is one, and the newer; none if there is no log.
fn open(folder: &Path) -> anyhow::Result<Option<(Option<File>, File)>> {
    let open = |name: &str| {
        let path = folder.join(name);
        match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            file => file.map(Some).with_context(|| format!("cannot open {}", path.display())),
        }
    };
    // Until both are of one moment: the newer may become the older meanwhile.
    for _ in 0..ATTEMPTS {
        let (newer, older, again) = (open(LOG)?, open(OLDER)?, open(LOG)?);
        match (newer, older, again) {
            (None, None, None) => return Ok(None),
            (Some(newer), older, Some(again)) if is_same(&newer, &again)? => {
                return Ok(Some((older, newer)));
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    bail!("the log in {} changes too fast to be read", folder.display())
}

/// A file turns older once in many mebibytes.
const ATTEMPTS: u32 = 1000;

/// What there is besides this file, if it is no longer the newer one: a file that was the newer one between, and the newer
/// one now.
fn turned(folder: &Path, file: &File) -> anyhow::Result<Option<(Option<File>, File)>> {
    let Some((older, newer)) = open(folder)? else { return Ok(None) };
    if is_same(file, &newer)? {
        return Ok(None);
    }
    let between = match older {
        Some(older) if !is_same(file, &older)? => Some(older),
        _ => None,
    };
    Ok(Some((between, newer)))
}

fn is_same(one: &File, other: &File) -> anyhow::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Where the last lines of a file begin, and how many they are.
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
            // The newline at the very end ends the last line, and begins none.
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
