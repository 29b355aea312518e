//! Makes every system call of every verb fail, one per round, and checks the resulting state.
//!
//! `cargo xtask faults` builds this program and calls it.
#![forbid(unsafe_code)]

mod report;
mod room;
mod round;
mod verbs;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use testing::faults::{Fault, Kind, Mode};

use self::report::{Counts, Report};
use self::room::Room;
use self::round::{Model, Outcome};
use self::verbs::VERBS;
use rig::Failed;

#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask faults", about = "Makes every system call of every verb fail")]
struct Args {
    /// Only verbs whose names contain one of these
    verbs: Vec<String>,
    /// Only this error
    #[arg(long)]
    error: Option<ErrorName>,
    /// Only this call, counted from 1
    #[arg(long)]
    nth: Option<u64>,
    /// Only this mode: fail one call, or every call from it on
    #[arg(long)]
    mode: Option<ModeName>,
    /// Maximum number of calls of each verb, error and mode, evenly chosen
    #[arg(long)]
    most: Option<u64>,
    /// Only the part for `make test`: some verbs, and one call of each
    #[arg(long, conflicts_with_all = ["verbs", "most"])]
    sample: bool,
    /// Path of the program; the default is the latest build
    #[arg(long)]
    program: Option<PathBuf>,
    /// Print each message of a failed verb once
    #[arg(long)]
    messages: bool,
    /// Write the counts to docs/faults.md
    #[arg(long)]
    publish: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ErrorName {
    Enospc,
    Eio,
    Eintr,
    Emfile,
    Enomem,
    Short,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModeName {
    Once,
    On,
}

/// The verbs that `make test` runs.
const SAMPLE: [&str; 12] = [
    "import oci",
    "pull, packed",
    "push",
    "export oci",
    "export erofs",
    "convert",
    "merge",
    "fsck --repair",
    "mount, ",
    "run --read-only",
    "run -d",
    "stop",
];

impl Args {
    fn wants(&self, verb: &str) -> bool {
        let wanted = self.verbs.iter().map(String::as_str);
        let mut wanted = wanted.chain(SAMPLE.into_iter().filter(|_| self.sample)).peekable();
        wanted.peek().is_none() || wanted.any(|it| verb.contains(it))
    }

    fn kinds(&self) -> Vec<Kind> {
        let wanted = self.error.map(|it| match it {
            ErrorName::Enospc => Kind::NoSpace,
            ErrorName::Eio => Kind::Io,
            ErrorName::Eintr => Kind::Interrupted,
            ErrorName::Emfile => Kind::Descriptors,
            ErrorName::Enomem => Kind::Memory,
            ErrorName::Short => Kind::Short,
        });
        Kind::ALL.into_iter().filter(|it| wanted.is_none_or(|wanted| wanted == *it)).collect()
    }

    fn modes(&self, kind: Kind) -> Vec<Mode> {
        let mut modes = match self.mode {
            Some(ModeName::Once) => vec![Mode::Once],
            Some(ModeName::On) => vec![Mode::FromThenOn],
            None => vec![Mode::Once, Mode::FromThenOn],
        };
        // A program repeats a call that is interrupted, and should do so for ever if it is always interrupted.
        modes.retain(|it| kind != Kind::Interrupted || *it == Mode::Once);
        modes
    }

    /// Returns the numbers of the calls to fail, out of `count`.
    fn calls(&self, count: u64) -> Vec<u64> {
        match (self.nth, self.most.or(self.sample.then_some(1))) {
            (Some(nth), _) => vec![nth],
            (None, Some(most)) if most < count => {
                (0..most).map(|it| it * count / most + count / most / 2 + 1).collect()
            }
            _ => (1..=count).collect(),
        }
    }
}

fn main() -> ExitCode {
    rig::exit("faults", run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let quire = match &args.program {
        Some(program) => program.canonicalize()?,
        None => rig::process::quire()?,
    };
    let mut room = Room::new(&quire)?;
    room.prepare()?;
    let mut report = Report::default();
    for verb in VERBS.iter().filter(|it| args.wants(it.name)) {
        let model = match Model::new(&mut room, *verb) {
            Ok(model) => model,
            Err(error) => {
                println!("{}: {error:#}", verb.name);
                report.failures += 1;
                continue;
            }
        };
        let mut messages = BTreeMap::new();
        for kind in args.kinds() {
            let mut counts = Counts::default();
            let calls = args.calls(model.candidates[kind.index()]);
            let modes = args.modes(kind);
            for (mode, nth) in modes.iter().flat_map(|it| calls.iter().map(move |nth| (*it, *nth)))
            {
                let fault = Fault { kind, nth, mode, only: None };
                let (outcome, traced) = model.round(&mut room, fault)?;
                counts.add(&outcome);
                let call = traced.failed.first().map_or("", String::as_str);
                match outcome {
                    Outcome::Right | Outcome::Unreached => {}
                    Outcome::Refused(message) => {
                        messages
                            .entry(message)
                            .or_insert_with(|| format!("{} {call}", kind.name()));
                    }
                    Outcome::Wrong(found) => {
                        println!("WRONG {}: {} {nth} {mode:?}: {call}", verb.name, kind.name());
                        found.iter().for_each(|it| println!("    {it}"));
                    }
                }
            }
            report.failures += counts.wrong;
            report.rows.entry(verb.name.to_owned()).or_default()[kind.index()] = counts;
        }
        println!("{}: {}", verb.name, report.row(verb.name));
        if args.messages {
            for (message, call) in messages {
                println!("    [{call}] {}", message.trim_end());
            }
        }
    }
    println!("{}", report.sum());
    if args.publish {
        report.publish(args.most)?;
    }
    if report.failures > 0 {
        bail!(Failed(format!("{} rounds went wrong", report.failures)));
    }
    Ok(())
}
